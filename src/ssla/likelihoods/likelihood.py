"""The Likelihood protocol: a log density of y given the network's outputs f, with derivatives in f.

Shapes. f is (..., C). A scalar target y is (...), broadcast against f's leading shape; a vector
target (Gaussian with C > 1 outputs) is (..., C). Likelihoods do not depend on networks or weights.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import softplus

from ssla.likelihoods.support import Continuous, Support
from ssla.maths import quadrature
from ssla.maths.roots import Root

LOG_2PI = math.log(2 * math.pi)
# Changes of the outputs up to this size use an integral of the score. A guess, not measured.
SMALL_STEP = 0.01
# Functions that a likelihood may apply to the outputs itself (`Likelihood.links`)
SOFTMAX, SIGMOID, EXP, SOFTPLUS = "softmax", "sigmoid", "exp", "softplus"


class Derivatives(NamedTuple):
    """The log density and its first two derivatives in the outputs, evaluated together.

    The fields are log p (...), g = ∂ log p/∂f (..., C) and Λ = −∂² log p/∂f² (..., C, C).
    """

    log_prob: Tensor
    score: Tensor
    precision: Tensor


class BoundaryRefit(NamedTuple):
    """Output refits whose integral over f is cut by the boundary of the allowed outputs.

    All fields have the shape (...), except `pull`. log_prob + shift + curvature is the log of ∫
    p(y|f) N(f; f̂, K) df over the allowed f.
    """

    cut: Tensor  # bool: the other fields are valid only where it is true
    log_prob: Tensor  # log p(y|f̃) at the highest allowed f̃, or its limit there
    shift: Tensor  # −½(f̃−f̂)ᵀK⁻¹(f̃−f̂)
    curvature: Tensor  # takes the place of −½ log|I + ΛK|
    pull: Tensor  # (..., C): u with f̃ − f̂ = K u

    @property
    def total(self) -> Tensor:
        """Return log_prob + shift + curvature (...), the log of the integral."""
        return self.log_prob + self.shift + self.curvature


@runtime_checkable
class Likelihood(Protocol):
    """The density p(y | f) of a target y given the network's outputs f.

    A new likelihood is a class `MyLaw(Likelihood)` in one file. The abstract members are required.
    Every other member has a default that is right for any likelihood. A class overrides a member
    where it has a formula, or where the default is wrong for it. `Tempered` takes each member from
    its base.
    """

    # --- required --------------------------------------------------------------------------

    @abstractmethod
    def support_for(self, outputs: int) -> Support:
        """Return the allowed values of y for this number of outputs.

        Raises ValueError if the likelihood needs another number of outputs.
        """

    @abstractmethod
    def log_prob(self, y: Tensor, f: Tensor) -> Tensor:
        """Return log p(y|f) (...), normalised over y."""

    @abstractmethod
    def score(self, y: Tensor, f: Tensor) -> Tensor:
        """Return the score g = ∂ log p/∂f (..., C)."""

    @abstractmethod
    def precision(self, y: Tensor, f: Tensor) -> Tensor:
        """Return the observed precision Λ = −∂² log p/∂f² (..., C, C), which may be indefinite."""

    @abstractmethod
    def fisher(self, f: Tensor) -> Tensor:
        """Return the Fisher information E_y Λ (..., C, C), which is positive semi-definite."""

    @abstractmethod
    def mean(self, f: Tensor) -> Tensor:
        """Return E[y | f]: (...), or (..., C) for vectors and for classes (their probabilities)."""

    @abstractmethod
    def variance(self, f: Tensor) -> Tensor:
        """Return Var[y | f] with the shape of `mean`; infinite where it does not exist."""

    @abstractmethod
    def sample(self, f: Tensor, n: int, generator: torch.Generator | None = None) -> Tensor:
        """Return n draws of y for every f, as a tensor (n, ...)."""

    # --- the outputs -----------------------------------------------------------------------

    @property
    def linear_domain(self) -> bool:
        """Return whether every f in R^C is allowed."""
        return True

    def check_outputs(self, f: Tensor) -> None:
        """Raise ValueError where f (..., C) is outside the likelihood's domain."""
        return

    @property
    def links(self) -> tuple[str, ...]:
        """Return the functions that the likelihood applies to the outputs itself, such as
        `SOFTMAX`.

        A network that ends in one of them would apply it twice.
        """
        return ()

    @property
    def unequal_units(self) -> bool:
        """Return whether each output has its own unit, and so its own prior precision."""
        return False

    # --- the form of the density -----------------------------------------------------------

    @property
    def predictive(self) -> Likelihood:
        """Return the likelihood of a new observation; only `Tempered` returns another one than
        itself.
        """
        return self

    @property
    def power(self) -> float:
        """Return β with log p = β · log p of `predictive`, up to a constant; it is 1 except in
        `Tempered`.
        """
        return 1.0

    @property
    def quadratic(self) -> bool:
        """Return whether y = f + ε with ε ~ N(0, Σ), so that log p is quadratic in f.

        Λ = Σ⁻¹ is then the same for all rows and outputs, and sums over rows determine log p.
        `covariance_for` returns Σ.
        """
        return False

    def covariance_for(self, f: Tensor) -> Tensor:
        """Return Σ (C, C) of a `quadratic` likelihood, in f's dtype and on its device.

        Raises TypeError for every other likelihood.
        """
        raise TypeError(f"{self!r} has no noise covariance: its log density is not quadratic in f.")

    @property
    def needs_noise_estimate(self) -> bool:
        """Return whether a fit has still to estimate the noise."""
        return False

    @property
    def concave(self) -> bool:
        """Return whether log p is known to be concave in f, so that Λ and its averages are never
        indefinite.
        """
        return False

    @property
    def averages_differ(self) -> bool:
        """Return whether averages of g and Λ over a Gaussian of f exist and differ from their
        values at its mean.

        Only then a variational Gaussian differs from the Laplace approximation.
        """
        return self.linear_domain

    @property
    def may_be_piecewise_linear(self) -> bool:
        """Return whether log p may have kinks and no curvature in f; `is_piecewise_linear` then tests it."""
        return False

    def is_piecewise_linear(self, f: Tensor) -> bool:
        """Return whether log p has a slope but no curvature in f (..., C) for every y, like |y −
        f|.
        """
        return False

    @property
    def fisher_in_closed_form(self) -> bool:
        """Return whether `fisher` is a formula; otherwise each call needs a quadrature over y."""
        return True

    @property
    def mean_has_gradient(self) -> bool:
        """Return whether autograd can differentiate `mean`."""
        return True

    @property
    def differentiable(self) -> bool:
        """Return whether autograd can differentiate log_prob, score and precision in y and f.

        Predictives of y then have gradients.
        """
        return False

    # --- classes ---------------------------------------------------------------------------

    @property
    def logit_temperature(self) -> float | None:
        """Return T where class probabilities are softmax(f/T), or σ(f/T) for one output; otherwise
        None.
        """
        return None

    @property
    def softmax(self) -> bool:
        """Return whether p = softmax(f/T), with T of `logit_temperature`.

        Λ is then diag(p) − ppᵀ up to a factor and the same for every y. It is not formed for rows
        of many classes.
        """
        return False

    @property
    def shift_invariant(self) -> bool:
        """Return whether adding one number to all outputs changes nothing.

        Λ is then zero along (1, …, 1).
        """
        return False

    @property
    def one_probability(self) -> bool:
        """Return whether the mean of two classes is P(y = 1) alone, and not one number for each
        class.
        """
        return False

    # --- counts ----------------------------------------------------------------------------

    @property
    def overdispersion(self) -> float | None:
        """Return a where y is a count with mean μ = e^f and variance μ + a·μ²; otherwise None.

        A negative binomial has a > 0, and Poisson has a = 0.
        """
        return None

    # --- differences and products ----------------------------------------------------------

    def derivatives(self, y: Tensor, f: Tensor) -> Derivatives:
        """Return log p, g and Λ, computed together."""
        return Derivatives(self.log_prob(y, f), self.score(y, f), self.precision(y, f))

    def log_prob_difference(self, y: Tensor, f_new: Tensor, f_old: Tensor) -> Tensor:
        """Return log p(y|f_new) − log p(y|f_old) (...), without cancellation where the outputs are
        close.

        Where every |Δ| ≤ 0.01, with Δ = f_new − f_old, the default is ∫₀¹ g(f_old + tΔ)ᵀΔ dt by
        four Gauss–Legendre nodes: the error of the rule is O(|Δ|⁹). Elsewhere it is the plain
        difference.
        """
        y = scalar_target(y, f_new)
        step = f_new - f_old
        plain = self.log_prob(y, f_new) - self.log_prob(y, f_old)
        close = (step.abs() <= SMALL_STEP).all(-1)
        if not bool(close.any()):
            return plain
        # The nodes are those of [−1, 1]; (node + 1)/2 and weight/2 map them to [0, 1].
        nodes, weights = np.polynomial.legendre.leggauss(4)
        integral = torch.zeros_like(plain)
        for node, weight in zip(nodes, weights, strict=True):
            score = self.score(y, f_old + (node + 1) / 2 * step)
            integral = integral + weight / 2 * (score * step).sum(-1)
        return torch.where(close, integral, plain)

    def score_change(self, y: Tensor, f: Tensor, before: Tensor) -> Tensor:
        """Return g(y, f) − g(y, before) (..., C)."""
        return self.score(y, f) - self.score(y, before)

    def curvature(self, y: Tensor, f: Tensor, fisher: bool = False) -> Tensor:
        """Return Λ(y, f) (..., C, C), or its expectation over y if `fisher` is true."""
        return self.fisher(f) if fisher else self.precision(y, f)

    def precision_times(self, y: Tensor, f: Tensor, v: Tensor, fisher: bool = False) -> Tensor:
        """Return Λ(y, f) v (..., C) for v (..., C)."""
        return (self.curvature(y, f, fisher) @ v.unsqueeze(-1)).squeeze(-1)

    def precision_diagonal(self, y: Tensor, f: Tensor, fisher: bool = False) -> Tensor:
        """Return the diagonal Λ_cc (..., C)."""
        precision = self.curvature(y, f, fisher).expand(*f.shape, f.shape[-1])
        return precision.diagonal(dim1=-2, dim2=-1)

    def precision_trace(self, y: Tensor, f: Tensor, K: Tensor, fisher: bool = False) -> Tensor:
        """Return tr(K Λ(y, f)) (m, b) of m outputs in each of b rows.

        The arguments are y (b, ...), f (m, b, C), and symmetric K (b, C, C).
        """
        precision = self.curvature(y, f, fisher).expand(*f.shape, f.shape[-1])
        return torch.einsum("bcd,mbcd->mb", K, precision)

    def precision_change_along(
        self,
        y: Tensor,
        f: Tensor,
        before: Tensor,
        directions: Tensor,
        weights: Tensor | None = None,
        fisher: bool = False,
    ) -> Tensor:
        """Return Σ_i w_i d_i ΔΛ_i d_iᵀ (m, r, r) of m outputs in b rows, ΔΛ_i = Λ(y_i, f_i) −
        Λ(y_i, before_i).

        The arguments are f (m, b, C), before (b, C), directions dᵀ (b, C, r), and weights (b,).
        """
        scaled = directions if weights is None else directions * weights[:, None, None]
        shape = (*f.shape, f.shape[-1])
        after = self.curvature(y, f, fisher).expand(shape)
        change = after - self.curvature(y, before, fisher).expand(shape[1:])
        return torch.einsum("bcr,mbcd,bds->mrs", scaled, change, directions)

    # --- refits in the outputs -------------------------------------------------------------

    @property
    def several_modes(self) -> bool:
        """Return whether log p(y|f̂ + Rv) − ½‖v‖² may have several modes in v."""
        return False

    def starting_points(self, y: Tensor, f: Tensor, R: Tensor) -> list[Tensor]:
        """Return starting points v (M, C) for the ascent of log p(y|f̂ + Rv) − ½‖v‖².

        The ascent from at least one of them reaches the highest mode. With an empty list it starts
        from zero.
        """
        return []

    @property
    def has_boundary(self) -> bool:
        """Return whether the density of some y is positive where the allowed outputs end."""
        return False

    def refit_at_boundary(self, y: Tensor, f: Tensor, K: Tensor) -> BoundaryRefit | None:
        """Return the refits that the boundary cuts, for f ~ N(f̂, K), differentiable in f̂ and K.

        f (..., C) holds f̂, and K is (..., C, C). The result is None if no density is positive at
        the boundary.
        """
        return None

    # --- averages over a Gaussian of the outputs -------------------------------------------

    def averages_in_closed_form(
        self, y: Tensor, f: Tensor, root: Root, fisher: bool
    ) -> Derivatives | None:
        """Return E log p (B,), E g (B, C) and E Λ (B, C, C) for f ~ N(f̂, R Rᵀ), or None without a
        formula.

        If `fisher` is true, the expected Fisher information takes the place of E Λ.
        """
        return None

    @property
    def has_log_average(self) -> bool:
        """Return whether `log_average` has a formula."""
        return False

    def log_average(self, y: Tensor, f: Tensor, K: Tensor) -> Tensor:
        """Return log ∫ p(y|f) N(f; f̂, K) df (B,) for y (B,) or (B, C), f (B, C) and K (B, C, C).

        Raises TypeError without a formula; see `ssla.likelihoods.integrals.log_average` for that
        case.
        """
        raise TypeError(f"{self!r} has no formula for its average over a Gaussian of the outputs.")

    @property
    def scored_by_average(self) -> bool:
        """Return whether a search over priors scores rows by `log_average` in place of predictives.

        This is right where refits in the outputs need many steps.
        """
        return False

    def log_prob_at_nodes(self, y: Tensor, f: Tensor) -> Tensor:
        """Return log p(y|f) (B, J) for y (B,) at J nodes f (B, C, J); f may be overwritten."""
        targets = y.unsqueeze(1).expand(f.shape[0], f.shape[2], *y.shape[1:])
        return self.log_prob(targets, f.mT)

    # --- answers ---------------------------------------------------------------------------

    def locate_target(self, f: Tensor, K: Tensor) -> tuple[Tensor, Tensor]:
        """Return an approximate centre (N,) and scale (N,) of a continuous y for f ~ N(f̂, K).

        A grid starts there, in the support's real coordinate. f is (N, C) and K is (N, C, C). The
        default is a search for those of p(y|f̂).
        """
        return quadrature.locate_densities(log_density_on_line(self, f), f.shape[0])

    def centre_and_deviation(self, f: Tensor, K: Tensor) -> tuple[Tensor, Tensor]:
        """Return the centre and standard deviation of y, or of the outputs where y = f + noise.

        A dtype that rounds the centre by a large part of the deviation is too coarse for answers.
        By default the deviation is infinite, as for classes and counts: every dtype is fine enough.
        """
        return f, torch.full_like(f, torch.inf)


def log_density_on_line(likelihood: Likelihood, f: Tensor) -> quadrature.LogDensity:
    """Return the function (z (n, k), rows (n,)) -> log p(y|f) of a continuous support.

    f (N, C) holds the outputs, and z is y in the support's real coordinate.
    """
    support = likelihood.support_for(f.shape[-1])
    assert isinstance(support, Continuous)

    # The density of z is that of y times dy/dz.
    def log_density(z: Tensor, rows: Tensor) -> Tensor:
        y = support.from_real(z)
        return likelihood.log_prob(y, f[rows].unsqueeze(1)) + support.log_slope(z)

    return log_density


@runtime_checkable
class Dispersed(Protocol):
    """A likelihood with a spread that can be changed: a noise, a temperature, an overdispersion."""

    def multiply_dispersion(self, factor: float) -> Likelihood:
        """Return the same likelihood with `factor` times the spread."""

    def dispersion_in_words(self, factor: float) -> str:
        """Describe the network, given that unseen rows need `factor` times the spread."""


def multiply_dispersion(likelihood: Likelihood, factor: float) -> Likelihood:
    """Return the likelihood with `factor` times the spread; unchanged if its spread is fixed."""
    return (
        likelihood.multiply_dispersion(factor) if isinstance(likelihood, Dispersed) else likelihood
    )


def dispersion_in_words(likelihood: Likelihood, factor: float) -> str:
    """Describe the network, given that unseen rows need `factor` times the spread.

    The text is empty for a likelihood whose spread is fixed.
    """
    return likelihood.dispersion_in_words(factor) if isinstance(likelihood, Dispersed) else ""


# Factors on a spread between 1/CLOSE and CLOSE are described as one. A guess, not measured.
CLOSE = 1.05


def describe_residuals(factor: float) -> str:
    """Describe what a factor on a standard deviation says about the noise, for numeric targets."""
    if factor > CLOSE:
        return f"its residuals on these rows are {factor:.3g} times as large as its noise says"
    if factor < 1 / CLOSE:
        return f"its residuals on these rows are only {factor:.3g} times as large as its noise says"
    return "its noise is right: no other is clearly better"


LARGEST_EXPONENT = 170.0  # of an average in closed form: `capped_exp` stops at 177


def covariance_of(root: Root, f: Tensor) -> Tensor:
    """Return K = R Rᵀ (B, C, C) in the dtype of the outputs f (B, C)."""
    R = root.multiply(torch.eye(f.shape[1], dtype=f.dtype))
    return R @ R.mT


def scalar_target(y: Tensor, f: Tensor) -> Tensor:
    """Return a column y (N, 1) for f (N, 1) as (N,), and any other y unchanged."""
    if y.dim() == f.dim() and y.shape == f.shape and f.shape[-1] == 1:
        return y.squeeze(-1)
    return y


def common_shape(*parts: Tensor) -> torch.Size:
    """Return the shape to which all tensors broadcast.

    (torch.broadcast_shapes would import the compiler first, which takes seconds.)
    """
    shape: torch.Size = torch.broadcast_tensors(*parts)[0].shape
    return shape


def check_output_count(name: str, outputs: int, expected: int, meaning: str) -> None:
    """Raise ValueError unless the network has the number of outputs that the likelihood needs."""
    if outputs != expected:
        raise ValueError(
            f"{name} needs a network with {expected} output{'s' if expected > 1 else ''} "
            f"({meaning}), but this one has {outputs}. Change the last layer or choose another "
            "likelihood."
        )


def capped_exp(t: Tensor) -> Tensor:
    """Return exp(t), clamped to the fourth root of the dtype's maximum so that products stay
    finite.

    It is exact for t ≤ 177 in float64 and for t ≤ 22 in float32.
    """
    return torch.exp(t.clamp_max(largest_exponent(t.dtype)))


def largest_exponent(dtype: torch.dtype) -> float:
    """Return the exponent at which `capped_exp` stops."""
    return math.log(torch.finfo(dtype).max) / 4


def softplus_difference(old: Tensor, step: Tensor) -> Tensor:
    """Return softplus(old + step) − softplus(old), without cancellation for small steps.

    For |step| ≤ 1 this is log1p(σ(old)·expm1(step)).
    """
    close = torch.log1p(torch.sigmoid(old) * torch.expm1(step.clamp(-1, 1)))
    return torch.where(step.abs() <= 1, close, softplus(old + step) - softplus(old))


def uniform_numbers(like: Tensor, n: int, generator: torch.Generator | None) -> Tensor:
    """Return n × like.shape uniform numbers strictly inside (0, 1), in float64."""
    u = torch.rand((n, *like.shape), dtype=torch.float64, device=like.device, generator=generator)
    # Quantile functions are infinite at 0 and 1.
    return u.clamp(1e-16, 1 - 1e-16)
