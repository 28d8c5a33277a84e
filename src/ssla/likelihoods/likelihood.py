"""What a likelihood is: a log density of y given the network's outputs f, differentiated in f.

Shapes. f is (..., C). A scalar target y is (...), broadcast against f's leading shape; a vector
target (Gaussian with C > 1 outputs) is (..., C). Nothing here knows of networks or weights.
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
        """What y may be. (For Gaussian and Categorical it depends on C: see `support_for`.)"""
        ...

    def support_for(self, outputs: int) -> Support:
        """What y may be when the network has that many outputs; ValueError if C does not fit."""
        ...

    def check_outputs(self, f: Tensor) -> None:
        """Raise ValueError where f is outside the likelihood's domain."""
        ...

    def log_prob(self, y: Tensor, f: Tensor) -> Tensor:
        """(...), normalised over y."""
        ...

    def log_prob_difference(self, y: Tensor, f_new: Tensor, f_old: Tensor) -> Tensor:
        """log p(y|f_new) − log p(y|f_old) (...), formed so that close outputs keep the digits of their difference."""
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
        """log p, g and Λ with their common work shared."""
        ...

    def mean(self, f: Tensor) -> Tensor:
        """E[y | f]: (...), or (..., C) for vectors and classes (probabilities)."""
        ...

    def variance(self, f: Tensor) -> Tensor:
        """Var[y | f], of the shape of `mean`; infinite where it does not exist."""
        ...

    def sample(self, f: Tensor, n: int, generator: torch.Generator | None = None) -> Tensor:
        """n draws of y for every f: (n, ...)."""
        ...

    @property
    def predictive(self) -> Likelihood:
        """The law of a new observation; differs from self only under tempering."""
        ...

    @property
    def linear_domain(self) -> bool:
        """Whether every f in R^C is allowed."""
        ...


@runtime_checkable
class Located(Protocol):
    """A likelihood of a continuous y that can say roughly where y lies."""

    def guess(self, f: Tensor, K: Tensor) -> tuple[Tensor, Tensor]:
        """About the centre and the scale of y (in the support's real coordinate) when f ~ N(f̂, K): where a grid may start."""
        ...


@runtime_checkable
class Started(Protocol):
    """A likelihood that knows where the modes of log p(y|f̂ + Rv) − ½‖v‖² may be."""

    def starts(self, y: Tensor, f: Tensor, R: Tensor) -> list[Tensor]:
        """Points v (M, C) from which an ascent reaches the highest mode, at least from one of them. Empty: from zero."""
        ...


def event(y: Tensor, f: Tensor) -> Tensor:
    """A scalar target given as a column of f's own shape, (N, 1) with (N, 1), is meant as (N,)."""
    if y.dim() == f.dim() and y.shape == f.shape and f.shape[-1] == 1:
        return y.squeeze(-1)
    return y


def need_outputs(name: str, outputs: int, expected: int, meaning: str) -> None:
    """ValueError unless the network has the number of outputs that the likelihood reads."""
    if outputs != expected:
        raise ValueError(
            f"{name} needs a network with {expected} output{'s' if expected > 1 else ''} ({meaning}), "
            f"but this one has {outputs}. Change the last layer or choose another likelihood."
        )


def capped_exp(t: Tensor) -> Tensor:
    """exp(t), held below the fourth root of the dtype's maximum so that products stay finite.

    Float64: t ≤ 177, float32: t ≤ 22 is exact.
    """
    return torch.exp(t.clamp_max(math.log(torch.finfo(t.dtype).max) / 4))


def softplus_difference(old: Tensor, step: Tensor) -> Tensor:
    """softplus(old + step) − softplus(old) = log1p(σ(old)·expm1(step)), in that form while the step is short."""
    close = torch.log1p(torch.sigmoid(old) * torch.expm1(step.clamp(-1, 1)))
    return torch.where(step.abs() <= 1, close, softplus(old + step) - softplus(old))


def uniform(like: Tensor, n: int, generator: torch.Generator | None) -> Tensor:
    """n × like.shape uniforms strictly inside (0, 1)."""
    u = torch.rand((n, *like.shape), dtype=torch.float64, device=like.device, generator=generator)
    return u.clamp(1e-16, 1 - 1e-16)
