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
SMALL_STEP = 0.01  # of outputs, up to which a difference of log p is an integral of the score
# Functions that a likelihood may apply to the outputs itself (`Likelihood.links`)
SOFTMAX, SIGMOID, EXP, SOFTPLUS = "softmax", "sigmoid", "exp", "softplus"


class Derivatives(NamedTuple):
    """log p (...), g = ∂ log p/∂f (..., C), Λ = −∂² log p/∂f² (..., C, C), evaluated together."""

    log_prob: Tensor
    score: Tensor
    precision: Tensor


class BoundaryRefit(NamedTuple):
    """Output refits whose integral over f is cut by the boundary of the allowed outputs.

    All fields have the shape (...).

    total = log_prob + shift + curvature is the log of ∫ p(y|f) N(f; f̂, K) df over the allowed f.
    """

    cut: Tensor  # bool: the other fields count only here
    log_prob: Tensor  # log p(y|f̃) at the highest allowed f̃, or its limit there
    shift: Tensor  # −½(f̃−f̂)ᵀK⁻¹(f̃−f̂)
    curvature: Tensor  # takes the place of −½ log|I + ΛK|
    pull: Tensor  # u with f̃ − f̂ = K u (..., C)

    @property
    def total(self) -> Tensor:
        return self.log_prob + self.shift + self.curvature


@runtime_checkable
class Likelihood(Protocol):
    """p(y | f) in output space.

    A new likelihood is a class `MyLaw(Likelihood)` in one file. The abstract members are required.
    Every other member has a default here, which is right for any likelihood: a class overrides it
    where it has a formula, or where what it says is not so. `Tempered` asks its base for each of
    them.
    """

    # --- required --------------------------------------------------------------------------

    @abstractmethod
    def support_for(self, outputs: int) -> Support:
        """The allowed values of y for this number of outputs; ValueError if the likelihood
        needs another number.
        """
        ...

    @abstractmethod
    def log_prob(self, y: Tensor, f: Tensor) -> Tensor:
        """(...), normalised over y."""
        ...

    @abstractmethod
    def score(self, y: Tensor, f: Tensor) -> Tensor:
        """g (..., C)."""
        ...

    @abstractmethod
    def precision(self, y: Tensor, f: Tensor) -> Tensor:
        """Λ (..., C, C); may be indefinite."""
        ...

    @abstractmethod
    def fisher(self, f: Tensor) -> Tensor:
        """E_y Λ (..., C, C), positive semi-definite."""
        ...

    @abstractmethod
    def mean(self, f: Tensor) -> Tensor:
        """E[y | f]: (...), or (..., C) for vectors and classes (probabilities)."""
        ...

    @abstractmethod
    def variance(self, f: Tensor) -> Tensor:
        """Var[y | f], with the shape of `mean`; infinite where it does not exist."""
        ...

    @abstractmethod
    def sample(self, f: Tensor, n: int, generator: torch.Generator | None = None) -> Tensor:
        """n draws of y for every f: (n, ...)."""
        ...

    # --- the outputs -----------------------------------------------------------------------

    @property
    def linear_domain(self) -> bool:
        """Whether every f in R^C is allowed."""
        return True

    def check_outputs(self, f: Tensor) -> None:
        """Raise ValueError where f is outside the likelihood's domain."""
        return

    @property
    def links(self) -> tuple[str, ...]:
        """The functions that the likelihood applies to the outputs itself, such as `SOFTMAX`: a
        network that ends in one of them applies it twice.
        """
        return ()

    @property
    def unequal_units(self) -> bool:
        """Whether each of several outputs has a unit of its own, and so a prior precision."""
        return False

    # --- what kind of law it is ------------------------------------------------------------

    @property
    def predictive(self) -> Likelihood:
        """The likelihood of a new observation; differs from self only for Tempered."""
        return self

    @property
    def power(self) -> float:
        """β with log p = β · log p of `predictive`, up to a constant; differs from 1 only for
        Tempered.
        """
        return 1.0

    @property
    def quadratic(self) -> bool:
        """Whether y = f + ε with ε ~ N(0, Σ): log p is quadratic in f, with one Λ = Σ⁻¹ for all
        rows and outputs, so that sums over rows determine it. `covariance_for` has Σ.
        """
        return False

    def covariance_for(self, f: Tensor) -> Tensor:
        """Σ (C, C) of a `quadratic` likelihood, in f's dtype and on its device."""
        raise TypeError(f"{self!r} has no noise covariance: its log density is not quadratic in f.")

    @property
    def estimated(self) -> bool:
        """Whether the noise is still to be estimated by a fit."""
        return False

    @property
    def concave(self) -> bool:
        """Whether log p is known to be concave in f, so that Λ and its averages are never
        indefinite.
        """
        return False

    @property
    def averages_differ(self) -> bool:
        """Whether averages of g and Λ over a Gaussian of f exist and differ from their values at
        its mean, so that a variational Gaussian differs from the Laplace approximation.
        """
        return self.linear_domain

    @property
    def may_be_straight(self) -> bool:
        """Whether log p may have kinks and no curvature in f; `straight` then tests it."""
        return False

    def straight(self, f: Tensor) -> bool:
        """Whether log p has a slope but no curvature in f for every y, like |y − f|."""
        return False

    @property
    def fisher_in_closed_form(self) -> bool:
        """Whether `fisher` is a formula; otherwise each call takes a quadrature over y."""
        return True

    @property
    def mean_has_gradient(self) -> bool:
        """Whether autograd can differentiate `mean`."""
        return True

    @property
    def differentiable(self) -> bool:
        """Whether autograd can differentiate log_prob, score and precision in y and f, so that
        predictives of y have gradients.
        """
        return False

    # --- classes ---------------------------------------------------------------------------

    @property
    def logit_temperature(self) -> float | None:
        """T where the probabilities of classes are softmax(f/T), or σ(f/T) of one output; None
        for every other likelihood.
        """
        return None

    @property
    def softmax(self) -> bool:
        """Whether p = softmax(f/T), with T of `logit_temperature`: Λ is diag(p) − ppᵀ up to a
        factor, the same for every y, and is never formed for a row of many classes.
        """
        return False

    @property
    def shift_invariant(self) -> bool:
        """Whether a number that is added to all outputs changes nothing: Λ then has no part
        along (1, …, 1).
        """
        return False

    @property
    def one_probability(self) -> bool:
        """Whether the mean of two classes is P(y = 1) alone, and not one number for each."""
        return False

    # --- counts ----------------------------------------------------------------------------

    @property
    def overdispersion(self) -> float | None:
        """a where y is a count with mean μ = e^f and variance μ + a·μ²: negative binomial, and
        Poisson for a = 0; None for every other likelihood.
        """
        return None

    # --- differences and products ----------------------------------------------------------

    def derivatives(self, y: Tensor, f: Tensor) -> Derivatives:
        """log p, g and Λ, computed together."""
        return Derivatives(self.log_prob(y, f), self.score(y, f), self.precision(y, f))

    def log_prob_difference(self, y: Tensor, f_new: Tensor, f_old: Tensor) -> Tensor:
        """log p(y|f_new) − log p(y|f_old) (...), computed without cancellation for close
        outputs.

        By default ∫₀¹ g(f̂ + tΔ)ᵀΔ dt with four Gauss–Legendre nodes where every |Δ| ≤ 0.01: the
        error of the rule is O(|Δ|⁹). Elsewhere the plain difference.
        """
        y = event(y, f_new)
        d = f_new - f_old
        plain = self.log_prob(y, f_new) - self.log_prob(y, f_old)
        close = (d.abs() <= SMALL_STEP).all(-1)
        if not bool(close.any()):
            return plain
        nodes, weights = np.polynomial.legendre.leggauss(4)
        total = torch.zeros_like(plain)
        for node, weight in zip(nodes, weights, strict=True):
            total = total + weight / 2 * (self.score(y, f_old + (node + 1) / 2 * d) * d).sum(-1)
        return torch.where(close, total, plain)

    def score_change(self, y: Tensor, f: Tensor, before: Tensor) -> Tensor:
        """g(y, f) − g(y, before).  (..., C)."""
        return self.score(y, f) - self.score(y, before)

    def curvature(self, y: Tensor, f: Tensor, fisher: bool = False) -> Tensor:
        """Λ(y, f) (..., C, C), or its expectation over y where `fisher` is asked for."""
        return self.fisher(f) if fisher else self.precision(y, f)

    def precision_times(self, y: Tensor, f: Tensor, v: Tensor, fisher: bool = False) -> Tensor:
        """Λ(y, f) v.  v (..., C) -> (..., C)."""
        return (self.curvature(y, f, fisher) @ v.unsqueeze(-1)).squeeze(-1)

    def precision_diagonal(self, y: Tensor, f: Tensor, fisher: bool = False) -> Tensor:
        """Λ_cc (..., C)."""
        whole = self.curvature(y, f, fisher).expand(*f.shape, f.shape[-1])
        return whole.diagonal(dim1=-2, dim2=-1)

    def precision_trace(self, y: Tensor, f: Tensor, K: Tensor, fisher: bool = False) -> Tensor:
        """tr(K Λ(y, f)) of m outputs in each of b rows.

        y (b, ...), f (m, b, C), K (b, C, C) symmetric -> (m, b).
        """
        whole = self.curvature(y, f, fisher).expand(*f.shape, f.shape[-1])
        return torch.einsum("bcd,mbcd->mb", K, whole)

    def precision_change_along(
        self,
        y: Tensor,
        f: Tensor,
        before: Tensor,
        directions: Tensor,
        weights: Tensor | None = None,
        fisher: bool = False,
    ) -> Tensor:
        """Σ_i w_i d_i ΔΛ_i d_iᵀ of m outputs in b rows, ΔΛ_i = Λ(y_i, f_i) − Λ(y_i, before_i).

        f (m, b, C), before (b, C), directions dᵀ (b, C, r), weights (b,) -> (m, r, r).
        """
        scaled = directions if weights is None else directions * weights[:, None, None]
        shape = (*f.shape, f.shape[-1])
        after = self.curvature(y, f, fisher).expand(shape)
        change = after - self.curvature(y, before, fisher).expand(shape[1:])
        return torch.einsum("bcr,mbcd,bds->mrs", scaled, change, directions)

    # --- refits in the outputs -------------------------------------------------------------

    @property
    def several_modes(self) -> bool:
        """Whether log p(y|f̂ + Rv) − ½‖v‖² may have several modes in v."""
        return False

    def starts(self, y: Tensor, f: Tensor, R: Tensor) -> list[Tensor]:
        """Points v (M, C); the ascent of log p(y|f̂ + Rv) − ½‖v‖² from at least one of them
        reaches the highest mode.

        Empty: start from zero.
        """
        return []

    @property
    def has_boundary(self) -> bool:
        """Whether the density of some y is positive at the boundary of the allowed outputs."""
        return False

    def refit_at_boundary(self, y: Tensor, f: Tensor, K: Tensor) -> BoundaryRefit | None:
        """The refits that the boundary cuts, for f ~ N(f̂, K); differentiable in f̂ and K.

        None: no density is positive there.
        """
        return None

    # --- averages over a Gaussian of the outputs -------------------------------------------

    def averages_in_closed_form(
        self, y: Tensor, f: Tensor, root: Root, fisher: bool
    ) -> Derivatives | None:
        """E log p (B,), E g (B, C) and E Λ (B, C, C) for f ~ N(f̂, R Rᵀ), with the expected
        Fisher information for E Λ where `fisher` is asked for; None where there is no formula.
        """
        return None

    @property
    def closed_form(self) -> bool:
        """Whether `log_average` has a formula."""
        return False

    def log_average(self, y: Tensor, f: Tensor, K: Tensor) -> Tensor:
        """log ∫ p(y|f) N(f; f̂, K) df.  y (B,) or (B, C), f (B, C), K (B, C, C) -> (B,).

        Without a formula see `ssla.likelihoods.integrals.log_average`.
        """
        raise TypeError(f"{self!r} has no formula for its average over a Gaussian of the outputs.")

    @property
    def scored_by_average(self) -> bool:
        """Whether a search over priors scores rows by `log_average` in place of predictives,
        because refits in the outputs take many steps.
        """
        return False

    def log_prob_at_nodes(self, y: Tensor, f: Tensor) -> Tensor:
        """log p(y|f) at J nodes.  y (B,), f (B, C, J), which may be overwritten -> (B, J)."""
        targets = y.unsqueeze(1).expand(f.shape[0], f.shape[2], *y.shape[1:])
        return self.log_prob(targets, f.mT)

    # --- answers ---------------------------------------------------------------------------

    def guess(self, f: Tensor, K: Tensor) -> tuple[Tensor, Tensor]:
        """Approximate centre and scale of a continuous y (in the support's real coordinate) for
        f ~ N(f̂, K): where a grid starts.  (N, C), (N, C, C) -> (N,), (N,).

        By default those of p(y|f̂), by a search.
        """
        return quadrature.locate(log_density_on_line(self, f), f.shape[0])

    def scale_of_answers(self, f: Tensor, K: Tensor) -> tuple[Tensor, Tensor]:
        """Centre and standard deviation of y, or of the outputs where y = f + noise: a dtype that
        rounds the centre by a large part of the deviation is too coarse for answers.

        By default the deviation is infinite: every dtype will do, as for classes and counts.
        """
        return f, torch.full_like(f, torch.inf)


def log_density_on_line(likelihood: Likelihood, f: Tensor) -> quadrature.LogDensity:
    """log p(y|f) of the rows of f (N, C), in the real coordinate of a continuous support."""
    support = likelihood.support_for(f.shape[-1])
    assert isinstance(support, Continuous)

    def log_density(z: Tensor, rows: Tensor) -> Tensor:
        y = support.from_real(z)
        return likelihood.log_prob(y, f[rows].unsqueeze(1)) + support.log_slope(z)

    return log_density


@runtime_checkable
class Dispersed(Protocol):
    """A likelihood with a spread that can be changed: a noise, a temperature, an overdispersion."""

    def dispersed(self, factor: float) -> Likelihood:
        """The same law with that many times the spread."""
        ...

    def dispersion_in_words(self, factor: float) -> str:
        """What it says of the network that unseen rows want `factor` times the spread."""
        ...


def dispersed(likelihood: Likelihood, factor: float) -> Likelihood:
    """With that many times the spread; as it is where it has none that can be changed."""
    return likelihood.dispersed(factor) if isinstance(likelihood, Dispersed) else likelihood


def dispersion_in_words(likelihood: Likelihood, factor: float) -> str:
    """What it says of the network that unseen rows want `factor` times the spread; empty
    without one.
    """
    return likelihood.dispersion_in_words(factor) if isinstance(likelihood, Dispersed) else ""


CLOSE = 1.05  # factors on a spread that are nearer to one than this count as one in words


def residuals_in_words(factor: float) -> str:
    """What a factor on a standard deviation says, for numbers."""
    if factor > CLOSE:
        return f"its residuals on these rows are {factor:.3g} times as large as its noise says"
    if factor < 1 / CLOSE:
        return f"its residuals on these rows are only {factor:.3g} times as large as its noise says"
    return "its noise is right: no other is clearly better"


LARGEST_EXPONENT = 170.0  # of an average in closed form: `capped_exp` stops at 177


def covariance_of(root: Root, f: Tensor) -> Tensor:
    """K = R Rᵀ (B, C, C) in the dtype of the outputs f (B, C)."""
    R = root.times(torch.eye(f.shape[1], dtype=f.dtype))
    return R @ R.mT


def event(y: Tensor, f: Tensor) -> Tensor:
    """y with shape (N,), also if it was given as a column (N, 1) for f (N, 1)."""
    if y.dim() == f.dim() and y.shape == f.shape and f.shape[-1] == 1:
        return y.squeeze(-1)
    return y


def common_shape(*parts: Tensor) -> torch.Size:
    """The shape to which all parts broadcast.

    (torch.broadcast_shapes would import the compiler first, which takes seconds.)
    """
    shape: torch.Size = torch.broadcast_tensors(*parts)[0].shape
    return shape


def need_outputs(name: str, outputs: int, expected: int, meaning: str) -> None:
    """ValueError unless the network has the number of outputs that the likelihood needs."""
    if outputs != expected:
        raise ValueError(
            f"{name} needs a network with {expected} output{'s' if expected > 1 else ''} "
            f"({meaning}), but this one has {outputs}. Change the last layer or choose another "
            "likelihood."
        )


def capped_exp(t: Tensor) -> Tensor:
    """exp(t), clamped to the fourth root of the dtype's maximum so that products stay finite.

    Float64: t ≤ 177, float32: t ≤ 22 is exact.
    """
    return torch.exp(t.clamp_max(math.log(torch.finfo(t.dtype).max) / 4))


def softplus_difference(old: Tensor, step: Tensor) -> Tensor:
    """softplus(old + step) − softplus(old) = log1p(σ(old)·expm1(step)), in that form for |step|
    ≤ 1.
    """
    close = torch.log1p(torch.sigmoid(old) * torch.expm1(step.clamp(-1, 1)))
    return torch.where(step.abs() <= 1, close, softplus(old + step) - softplus(old))


def uniform(like: Tensor, n: int, generator: torch.Generator | None) -> Tensor:
    """n × like.shape uniforms strictly inside (0, 1)."""
    u = torch.rand((n, *like.shape), dtype=torch.float64, device=like.device, generator=generator)
    return u.clamp(1e-16, 1 - 1e-16)
