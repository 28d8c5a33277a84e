"""The Likelihood protocol: a log density of y given the network's outputs f, with derivatives in f.

Shapes. f is (..., C). A scalar target y is (...), broadcast against f's leading shape; a vector
target (Gaussian with C > 1 outputs) is (..., C). Likelihoods do not depend on networks or weights.
"""

from __future__ import annotations

import math
from typing import NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor
from torch.nn.functional import softplus

from ssla.likelihoods.support import Support

LOG_2PI = math.log(2 * math.pi)


class Derivatives(NamedTuple):
    """log p (...), g = ∂ log p/∂f (..., C), Λ = −∂² log p/∂f² (..., C, C), evaluated together."""

    log_prob: Tensor
    score: Tensor
    precision: Tensor


@runtime_checkable
class Likelihood(Protocol):
    """p(y | f) in output space."""

    @property
    def support(self) -> Support:
        """The allowed values of y.

        (For Gaussian and Categorical it depends on C: see `support_for`.)
        """
        ...

    def support_for(self, outputs: int) -> Support:
        """The allowed values of y for this number of outputs; ValueError if the likelihood
        needs another number.
        """
        ...

    def check_outputs(self, f: Tensor) -> None:
        """Raise ValueError where f is outside the likelihood's domain."""
        ...

    def log_prob(self, y: Tensor, f: Tensor) -> Tensor:
        """(...), normalised over y."""
        ...

    def log_prob_difference(self, y: Tensor, f_new: Tensor, f_old: Tensor) -> Tensor:
        """log p(y|f_new) − log p(y|f_old) (...), computed without cancellation for close
        outputs.
        """
        ...

    def score(self, y: Tensor, f: Tensor) -> Tensor:
        """g (..., C)."""
        ...

    def precision(self, y: Tensor, f: Tensor) -> Tensor:
        """Λ (..., C, C); may be indefinite."""
        ...

    def fisher(self, f: Tensor) -> Tensor:
        """E_y Λ (..., C, C), positive semi-definite."""
        ...

    def derivatives(self, y: Tensor, f: Tensor) -> Derivatives:
        """log p, g and Λ, computed together."""
        ...

    def mean(self, f: Tensor) -> Tensor:
        """E[y | f]: (...), or (..., C) for vectors and classes (probabilities)."""
        ...

    def variance(self, f: Tensor) -> Tensor:
        """Var[y | f], with the shape of `mean`; infinite where it does not exist."""
        ...

    def sample(self, f: Tensor, n: int, generator: torch.Generator | None = None) -> Tensor:
        """n draws of y for every f: (n, ...)."""
        ...

    @property
    def predictive(self) -> Likelihood:
        """The likelihood of a new observation; differs from self only for Tempered."""
        ...

    @property
    def linear_domain(self) -> bool:
        """Whether every f in R^C is allowed."""
        ...


@runtime_checkable
class Located(Protocol):
    """A likelihood of a continuous y that estimates the location of y."""

    def guess(self, f: Tensor, K: Tensor) -> tuple[Tensor, Tensor]:
        """Approximate centre and scale of y (in the support's real coordinate) for f ~ N(f̂,
        K): where a grid starts.
        """
        ...


@runtime_checkable
class Started(Protocol):
    """A likelihood with starting points for the modes of log p(y|f̂ + Rv) − ½‖v‖²."""

    def starts(self, y: Tensor, f: Tensor, R: Tensor) -> list[Tensor]:
        """Points v (M, C); the ascent from at least one of them reaches the highest mode.

        Empty: start from zero.
        """
        ...


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
class Bounded(Protocol):
    """A likelihood that can have a positive density at the boundary of the allowed outputs."""

    def refit_at_boundary(self, y: Tensor, f: Tensor, K: Tensor) -> BoundaryRefit | None:
        """The refits that the boundary cuts, for f ~ N(f̂, K); differentiable in f̂ and K.

        None: every output is allowed.
        """
        ...


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
