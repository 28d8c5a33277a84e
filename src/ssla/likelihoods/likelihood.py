"""The Likelihood protocol: a log density of y given the network's outputs f, with derivatives in f.

Shapes. f is (..., C). A scalar target y is (...), broadcast against f's leading shape; a vector
target (Gaussian with C > 1 outputs) is (..., C). Likelihoods do not depend on networks or weights.

Symbols of this package:

    g       the score ∂ log p(y|f)/∂f (..., C)
    Λ       the observed precision −∂² log p(y|f)/∂f² (..., C, C)
    Fisher  E_y Λ, the average of Λ over y ~ p(y|f)
    f̂, K    mean and covariance of a Gaussian of the outputs, f ~ N(f̂, K)
    R       a root of K: K = R Rᵀ
    f̃, v    the refit: f̃ = f̂ + Rv maximises log p(y|f̂ + Rv) − ½‖v‖² (docs/mathematics.md, "In output
            space")
    β       the power of a tempered likelihood
    T       the temperature of class logits
"""

from __future__ import annotations

import math
from abc import abstractmethod
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from ssla.likelihoods.support import Continuous, Support
from ssla.maths import quadrature
from ssla.maths.roots import Root

LOG_2PI = math.log(2 * math.pi)
# `log_prob_difference` integrates the score over changes of the outputs up to this size. A guess.
LARGEST_INTEGRATED_STEP = 0.01
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
        """Return the allowed values of y, for a network with this number of outputs C.

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
        """Return E[y | f], of shape (...).

        For vectors it is (..., C). For classes of several outputs it is their probabilities
        (..., C).
        """

    @abstractmethod
    def variance(self, f: Tensor) -> Tensor:
        """Return Var[y | f] with the shape of `mean`; infinite where it does not exist."""

    @abstractmethod
    def sample(self, f: Tensor, n: int, generator: torch.Generator | None = None) -> Tensor:
        """Return n draws of y for every f, as a tensor (n, ...), or (n, ..., C) for vectors.

        Without a generator, torch's global one is used.
        """

    # --- the outputs -----------------------------------------------------------------------

    @property
    def linear_domain(self) -> bool:
        """Return whether every vector f in R^C is allowed as outputs.

        If it is false, `check_outputs` refuses the others, and log_prob is −∞ there.
        """
        return True

    def check_outputs(self, f: Tensor) -> None:
        """Raise ValueError if an f (..., C) is outside the likelihood's domain.

        The default refuses nothing: it is right where `linear_domain` is true.
        """
        return

    @property
    def links(self) -> tuple[str, ...]:
        """Return the names of the functions that the likelihood applies to the outputs itself.

        `SOFTMAX` is one of them. A network that ends in such a function would apply it twice. The
        default, an empty tuple, means none.
        """
        return ()

    @property
    def unequal_units(self) -> bool:
        """Return whether each output has its own unit, and so its own prior precision."""
        return False

    # --- the form of the density -----------------------------------------------------------

    @property
    def predictive(self) -> Likelihood:
        """Return the likelihood of a new observation.

        That is the likelihood itself, except for `Tempered`, which tempers only the training data.
        """
        return self

    @property
    def power(self) -> float:
        """Return the power β to which the density of `predictive` is raised.

        The power is 1 except in `Tempered`, whose log_prob is β times that of `predictive`.
        """
        return 1.0

    @property
    def quadratic(self) -> bool:
        """Return whether y = f + ε with ε ~ N(0, Σ), so that log p is quadratic in f.

        Λ = Σ⁻¹ is then the same for every row, y and f, and sums over rows determine log p.
        `covariance_for` returns Σ.
        """
        return False

    def covariance_for(self, f: Tensor) -> Tensor:
        """Return the noise covariance Σ (C, C), in the dtype and on the device of f (..., C).

        Raises TypeError unless the likelihood is `quadratic`.
        """
        raise TypeError(f"{self!r} has no noise covariance: its log density is not quadratic in f.")

    @property
    def needs_noise_estimate(self) -> bool:
        """Return whether the noise has no value yet, so that a fit has to estimate it."""
        return False

    @property
    def concave(self) -> bool:
        """Return whether log p is known to be concave in f.

        Λ and its averages are then positive semi-definite. False means that nothing is known.
        """
        return False

    @property
    def averages_differ(self) -> bool:
        """Return whether averages of g and Λ over a Gaussian of f differ from those at its mean.

        Only then a variational Gaussian differs from the Laplace approximation. The default is
        false where some f are not allowed, because the averages do not exist there.
        """
        return self.linear_domain

    @property
    def may_be_piecewise_linear(self) -> bool:
        """Return whether log p might be piecewise linear in f: with kinks, and without curvature.

        If it is true, `is_piecewise_linear` decides, which is slower.
        """
        return False

    def is_piecewise_linear(self, f: Tensor) -> bool:
        """Return whether log p has a slope but no curvature at f (..., C) for any y, like −|y − f|.

        The default is for likelihoods with a curvature, so it does not look at f.
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
        """Return T where class probabilities are softmax(f/T), or σ(f/T) for one output.

        The result is None for other likelihoods.
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
        """Return whether `mean` is P(y = 1) alone (...), and not one number for each class.

        This is true for two classes with one output.
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
        """Return log p (...), g (..., C) and Λ (..., C, C) at f (..., C), computed together."""
        return Derivatives(self.log_prob(y, f), self.score(y, f), self.precision(y, f))

    def log_prob_difference(self, y: Tensor, f_new: Tensor, f_old: Tensor) -> Tensor:
        """Return log p(y|f_new) − log p(y|f_old) (...), without cancellation for a small change.

        Where every |Δ| ≤ LARGEST_INTEGRATED_STEP, with Δ = f_new − f_old, the default is the
        integral ∫₀¹ g(f_old + tΔ)ᵀΔ dt by four Gauss–Legendre nodes, whose error is O(|Δ|⁹).
        Elsewhere it is the plain difference.
        """
        y = squeeze_scalar_target(y, f_new)
        step = f_new - f_old
        plain = self.log_prob(y, f_new) - self.log_prob(y, f_old)
        close = (step.abs() <= LARGEST_INTEGRATED_STEP).all(-1)
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
        """Return the change of the score, g(y, f) − g(y, before) (..., C)."""
        return self.score(y, f) - self.score(y, before)

    def curvature(self, y: Tensor, f: Tensor, fisher: bool = False) -> Tensor:
        """Return Λ(y, f) (..., C, C), or the Fisher information E_y Λ if `fisher` is true."""
        return self.fisher(f) if fisher else self.precision(y, f)

    def precision_times(self, y: Tensor, f: Tensor, v: Tensor, fisher: bool = False) -> Tensor:
        """Return Λ(y, f) v (..., C) for v (..., C); `fisher` is that of `curvature`."""
        return (self.curvature(y, f, fisher) @ v.unsqueeze(-1)).squeeze(-1)

    def precision_diagonal(self, y: Tensor, f: Tensor, fisher: bool = False) -> Tensor:
        """Return the diagonal Λ_cc (..., C) at f (..., C); `fisher` is that of `curvature`."""
        precision = self.curvature(y, f, fisher).expand(*f.shape, f.shape[-1])
        return precision.diagonal(dim1=-2, dim2=-1)

    def precision_trace(self, y: Tensor, f: Tensor, K: Tensor, fisher: bool = False) -> Tensor:
        """Return tr(K Λ(y, f)) (m, b) for m output vectors in each of b rows.

        The arguments are y (b, ...), f (m, b, C), and K (b, C, C), which must be symmetric.
        `fisher` is that of `curvature`.
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
        """Return Σ_i w_i d_i ΔΛ_i d_iᵀ (m, r, r), summed over b rows, for m output vectors each.

        ΔΛ_i = Λ(y_i, f_i) − Λ(y_i, before_i). The arguments are y (b, ...), f (m, b, C), before
        (b, C), directions dᵀ (b, C, r), and weights w (b,); None means weights of one. `fisher` is
        that of `curvature`.
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
        """Return starting points v (M, C) for the ascent of log p(y|f̂ + Rv) − ½‖v‖² in M tasks.

        y is (M, ...), f (M, C) holds f̂, and R is (M, C, C). The ascent from at least one of them
        reaches the highest mode. With an empty list, the default, it starts from zero.
        """
        return []

    @property
    def has_boundary(self) -> bool:
        """Return whether the density of some y is positive at the boundary of the allowed outputs.

        If it is true, `refit_at_boundary` returns the refits of these y.
        """
        return False

    def refit_at_boundary(self, y: Tensor, f: Tensor, K: Tensor) -> BoundaryRefit | None:
        """Return the refits that the boundary cuts, for f ~ N(f̂, K), differentiable in f̂ and K.

        y is (...), f (..., C) holds f̂, and K is (..., C, C). The result is None, the default, if no
        density is positive at the boundary.
        """
        return None

    # --- averages over a Gaussian of the outputs -------------------------------------------

    def averages_in_closed_form(
        self, y: Tensor, f: Tensor, root: Root, fisher: bool
    ) -> Derivatives | None:
        """Return E log p (B,), E g (B, C) and E Λ (B, C, C) for f ~ N(f̂, R Rᵀ), with f (B, C) as f̂.

        y is (B,) or (B, C), and root is R. The result is None, the default, where there is no
        formula. If `fisher` is true, the expected Fisher information takes the place of E Λ.
        """
        return None

    @property
    def has_log_average(self) -> bool:
        """Return whether `log_average` has a formula."""
        return False

    def log_average(self, y: Tensor, f: Tensor, K: Tensor) -> Tensor:
        """Return log ∫ p(y|f) N(f; f̂, K) df (B,) for y (B,) or (B, C), f (B, C) and K (B, C, C).

        Raises TypeError if `has_log_average` is false: `ssla.likelihoods.integrals.log_average`
        then computes the integral at nodes.
        """
        raise TypeError(f"{self!r} has no formula for its average over a Gaussian of the outputs.")

    @property
    def scored_by_average(self) -> bool:
        """Return whether a search over priors scores rows by `log_average`, not by predictives.

        This is true where refits in the outputs need many steps, which would make the search slow.
        """
        return False

    def log_prob_at_nodes(self, y: Tensor, f: Tensor) -> Tensor:
        """Return log p(y|f) (B, J) for y (B,) at J nodes f (B, C, J); f may be overwritten."""
        targets = y.unsqueeze(1).expand(f.shape[0], f.shape[2], *y.shape[1:])
        return self.log_prob(targets, f.mT)

    # --- answers ---------------------------------------------------------------------------

    def locate_target(self, f: Tensor, K: Tensor) -> tuple[Tensor, Tensor]:
        """Return an approximate centre (N,) and scale (N,) of a continuous y for f ~ N(f̂, K).

        A grid over y starts there, in the support's real coordinate. f is (N, C) and K is (N, C,
        C). The default finds both by a search over p(y|f̂), and does not use K.
        """
        return quadrature.locate_densities(make_log_density_on_line(self, f), f.shape[0])

    def centre_and_deviation(self, f: Tensor, K: Tensor) -> tuple[Tensor, Tensor]:
        """Return the centre and the standard deviation of y for f ~ N(f̂, K), of one shape.

        The shape is (N,), or (N, C) for several targets. A dtype that rounds the centre by a large
        part of the deviation is too coarse for answers. By default the centre is f and the
        deviation is infinite, as for classes and counts: every dtype is then fine enough.
        """
        return f, torch.full_like(f, torch.inf)


def make_log_density_on_line(likelihood: Likelihood, f: Tensor) -> quadrature.LogDensity:
    """Return the log density as a function (z (n, k), rows (n,)) -> (n, k), given f[rows].

    f (N, C) holds the outputs, and z is y in the support's real coordinate (`Continuous.to_real`).
    Raises AssertionError unless the support of the likelihood is continuous.
    """
    support = likelihood.support_for(f.shape[-1])
    assert isinstance(support, Continuous)

    def log_density(z: Tensor, rows: Tensor) -> Tensor:
        """Return the log density of z (n, k) in rows (n,), which is that of y plus log dy/dz."""
        y = support.from_real(z)
        return likelihood.log_prob(y, f[rows].unsqueeze(1)) + support.log_slope(z)

    return log_density


@runtime_checkable
class Dispersed(Protocol):
    """A likelihood with a spread that can be changed: a noise, a temperature, an overdispersion."""

    def multiply_dispersion(self, factor: float) -> Likelihood:
        """Return the same likelihood with `factor` > 0 times the spread."""

    def dispersion_in_words(self, factor: float) -> str:
        """Return a clause for the report: what a factor on the spread says of the network.

        factor: how many times the spread the validation rows need.
        """


def multiply_dispersion(likelihood: Likelihood, factor: float) -> Likelihood:
    """Return the likelihood with `factor` times the spread; unchanged if its spread is fixed."""
    return (
        likelihood.multiply_dispersion(factor) if isinstance(likelihood, Dispersed) else likelihood
    )


def dispersion_in_words(likelihood: Likelihood, factor: float) -> str:
    """Return a clause for the report: what a factor on the spread says of the network.

    factor: how many times the spread the validation rows need. The text is empty for a likelihood
    whose spread is fixed.
    """
    return likelihood.dispersion_in_words(factor) if isinstance(likelihood, Dispersed) else ""


# A factor on a spread between 1/CLOSE and CLOSE is described as equal to one. A guess.
CLOSE = 1.05


def describe_residuals(factor: float) -> str:
    """Return a clause for the report: what a factor on the standard deviation says of the noise.

    factor: how many times the standard deviation the validation rows need.
    """
    if factor > CLOSE:
        return f"its residuals on these rows are {factor:.3g} times as large as its noise says"
    if factor < 1 / CLOSE:
        return f"its residuals on these rows are only {factor:.3g} times as large as its noise says"
    return "its noise is right: no other is clearly better"


# Averages in closed form are not used for exponents above this one: `capped_exp` stops at 177.
LARGEST_EXPONENT = 170.0


def compute_covariance(root: Root, f: Tensor) -> Tensor:
    """Return K = R Rᵀ (B, C, C) from its root, in the dtype of the outputs f (B, C)."""
    R = root.multiply(torch.eye(f.shape[1], dtype=f.dtype))
    return R @ R.mT


def squeeze_scalar_target(y: Tensor, f: Tensor) -> Tensor:
    """Return y without its last dimension if y and f are both (..., 1); otherwise y itself.

    A scalar target may be given as a column (N, 1), but the formulas need (N,).
    """
    if y.shape == f.shape and f.shape[-1] == 1:
        return y.squeeze(-1)
    return y


def check_output_count(name: str, outputs: int, expected: int, meaning: str) -> None:
    """Raise ValueError unless the network has the number of outputs that the likelihood needs.

    name: the likelihood's name. meaning: what the expected outputs are, in words.
    """
    if outputs != expected:
        raise ValueError(
            f"{name} needs a network with {expected} output{'s' if expected > 1 else ''} "
            f"({meaning}), but this one has {outputs}. Change the last layer or choose another "
            "likelihood."
        )
