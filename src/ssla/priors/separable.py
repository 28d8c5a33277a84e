"""Priors of independent coordinates: heavy tails, shrinkage, rates.

One log density for every coordinate; the curvature, from autograd, is exactly diagonal. Where a
textbook density has a kink or a pole at zero it is smoothed at a stated width, and normalised again
in closed form, because Laplace's approximation needs two derivatives.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.special import scaled_modified_bessel_k1

from ssla._checks import (
    check_finite,
    check_name,
    check_positive,
    in_plain_torch,
    record_derivatives,
)
from ssla.network.layout import Layout
from ssla.priors.prior import Setting, convert_setting_to_tensors, resolve_setting

LOG_2PI = math.log(2 * math.pi)
IDENTITY, LOG = "identity", "log"


@dataclass(frozen=True, eq=False)
class Separable:
    """A prior over flat θ with independent coordinates: log π(θ) = Σ_i log π_i(θ_i)."""

    log_density: Callable[[Tensor], Tensor]  # (P,) -> (P,), coordinate by coordinate

    def log_prob(self, theta: Tensor) -> Tensor:
        """Return log π(θ), a scalar, for θ (P,)."""
        return self.log_density(theta).sum()

    @in_plain_torch
    def gradient(self, theta: Tensor) -> Tensor:
        """Return ∇ log π (P,) at θ (P,)."""
        return compute_gradient(self.log_prob, theta)

    @in_plain_torch
    def precision(self, theta: Tensor) -> Tensor:
        """Return the diagonal of −∇² log π (P,) at θ (P,)."""
        with record_derivatives("log_prob of the prior"):
            free = make_differentiable_copy(theta)
            gradient = differentiate(self.log_prob(free), free, keep_graph=True)
            # Coordinates are independent, so the derivative of the gradient's sum is the diagonal
            # of the Hessian.
            return -differentiate(gradient.sum(), free).detach()


def compute_gradient(log_prob: Callable[[Tensor], Tensor], theta: Tensor) -> Tensor:
    """Return ∇ log_prob (P,) at θ (P,) by autograd, for a scalar log_prob."""
    with record_derivatives("log_prob of the prior"):
        free = make_differentiable_copy(theta)
        return differentiate(log_prob(free), free).detach()


def make_differentiable_copy(theta: Tensor) -> Tensor:
    """Return a copy of θ (P,) that autograd can differentiate by."""
    return theta.detach().clone().requires_grad_(True)


def differentiate(value: Tensor, point: Tensor, keep_graph: bool = False) -> Tensor:
    """Return ∂ value/∂ point (P,) for a scalar value; zeros if it does not depend on the point.

    point (P,): the tensor from which the value was computed. keep_graph: whether the result can be
    differentiated again.
    """
    if not value.requires_grad:
        return torch.zeros_like(point)
    (gradient,) = torch.autograd.grad(value, point, create_graph=keep_graph, allow_unused=True)
    return torch.zeros_like(point) if gradient is None else gradient


def _check_scale_and_loc(scale: Setting, loc: Setting) -> None:
    """Raise ValueError unless the scale is positive and the location is finite."""
    for value in convert_setting_to_tensors(scale):
        check_positive("prior scale", value)
    for value in convert_setting_to_tensors(loc):
        check_finite("prior loc", value, "Give finite numbers.")


@dataclass(frozen=True, eq=False)
class Laplace:
    """A prior with double exponential tails, exp(−|θ − loc|/scale), and a smoothed kink.

    It is the hyperbolic density

        log π = −√(ε² + (θ − loc)²)/scale − log(2 ε K₁(ε/scale)),      ε = smoothing · scale,

    with the modified Bessel function K₁. Log-concave everywhere. As smoothing → 0 it tends to the
    Laplace density, whose curvature is 0, and undefined at loc. A mode at exactly loc (the zeros of
    the lasso) is then found only to within a distance of order ε.
    """

    scale: Setting = 1.0
    loc: Setting = 0.0
    smoothing: float = 0.1

    @in_plain_torch
    def __post_init__(self) -> None:
        """Raise ValueError unless scale and smoothing are positive and loc is finite."""
        _check_scale_and_loc(self.scale, self.loc)
        check_positive(
            "smoothing",
            torch.tensor(float(self.smoothing)),
            "It is the width of the smoothed kink, in units of the scale.",
        )

    def bind(self, layout: Layout) -> Separable:
        """Return the prior over flat θ; raise ValueError if a setting does not fit the layout."""
        scale = resolve_setting("scale", self.scale, layout)
        loc = resolve_setting("loc", self.loc, layout)
        width = torch.tensor(float(self.smoothing), dtype=torch.float64)
        # log(2 ε K₁(ε/scale)): the scaled Bessel function is e^width K₁(width).
        constant = (
            (2 * self.smoothing * scale).log() + scaled_modified_bessel_k1(width).log() - width
        )

        def log_density(theta: Tensor) -> Tensor:
            """Return log π_i(θ_i) (P,) for θ (P,)."""
            height: Tensor = -torch.sqrt(width**2 + ((theta - loc) / scale) ** 2) - constant
            return height

        return Separable(log_density)


@dataclass(frozen=True, eq=False)
class StudentT:
    """A prior with heavy tails: Student's t with df degrees of freedom around loc.

    It is not log-concave beyond |θ − loc| = √df · scale.
    """

    df: float = 3.0
    scale: Setting = 1.0
    loc: Setting = 0.0

    @in_plain_torch
    def __post_init__(self) -> None:
        """Raise ValueError unless df and scale are positive and loc is finite."""
        _check_scale_and_loc(self.scale, self.loc)
        check_positive("df", torch.tensor(float(self.df)))

    def bind(self, layout: Layout) -> Separable:
        """Return the prior over flat θ; raise ValueError if a setting does not fit the layout."""
        scale = resolve_setting("scale", self.scale, layout)
        loc = resolve_setting("loc", self.loc, layout)
        df = float(self.df)
        constant = (
            math.lgamma((df + 1) / 2)
            - math.lgamma(df / 2)
            - 0.5 * math.log(df * math.pi)
            - scale.log()
        )

        def log_density(theta: Tensor) -> Tensor:
            """Return log π_i(θ_i) (P,) for θ (P,)."""
            return constant - (df + 1) / 2 * torch.log1p(((theta - loc) / scale) ** 2 / df)

        return Separable(log_density)


@dataclass(frozen=True, eq=False)
class Horseshoe:
    """A prior like the horseshoe: sharp at zero, with tails of order θ⁻², and smoothed at zero.

        π(θ) = log(1 + 1/(t² + ε²)) / (2π (√(1 + ε²) − ε) scale),      t = θ/scale, ε = smoothing.

    The horseshoe itself has a pole at zero, where no Laplace approximation holds; a smaller
    smoothing is closer to it. Log-concave only within about ε of zero: the report of a posterior
    usually notes this.
    """

    scale: Setting = 1.0
    smoothing: float = 0.1

    @in_plain_torch
    def __post_init__(self) -> None:
        """Raise ValueError unless scale and smoothing are positive."""
        _check_scale_and_loc(self.scale, 0.0)
        check_positive(
            "smoothing",
            torch.tensor(float(self.smoothing)),
            "It is the width of the smoothed pole, in units of the scale.",
        )

    def bind(self, layout: Layout) -> Separable:
        """Return the prior over flat θ; raise ValueError if the scale does not fit the layout."""
        scale = resolve_setting("scale", self.scale, layout)
        width = float(self.smoothing)
        constant = math.log(2 * math.pi * (math.sqrt(1 + width**2) - width)) + scale.log()

        def log_density(theta: Tensor) -> Tensor:
            """Return log π_i(θ_i) (P,) for θ (P,)."""
            return torch.log(torch.log1p(1 / ((theta / scale) ** 2 + width**2))) - constant

        return Separable(log_density)


@dataclass(frozen=True, eq=False)
class SpikeSlab:
    """A continuous spike and slab: weight · N(0, slab²) + (1 − weight) · N(0, spike²).

    It is not log-concave between the two.
    """

    spike: float = 0.1
    slab: float = 1.0
    weight: float = 0.5

    @in_plain_torch
    def __post_init__(self) -> None:
        """Raise ValueError unless both scales are positive and the weight is between 0 and 1."""
        check_positive(
            "spike and slab",
            torch.tensor([float(self.spike), float(self.slab)]),
            "They are standard deviations.",
        )
        if not 0 < self.weight < 1:
            raise ValueError(
                "weight must be strictly between 0 and 1 (the slab's share), but is "
                f"{self.weight!r}."
            )

    def bind(self, layout: Layout) -> Separable:
        """Return the prior over flat θ, the same for every parameter."""
        scales = torch.tensor([self.slab, self.spike], dtype=torch.float64)
        shares = torch.tensor([self.weight, 1 - self.weight], dtype=torch.float64)

        def log_density(theta: Tensor) -> Tensor:
            """Return log π_i(θ_i) (P,) for θ (P,), from the two terms of the mixture (P, 2)."""
            log_terms = (
                shares.log()
                - scales.log()
                - 0.5 * LOG_2PI
                - 0.5 * (theta.unsqueeze(-1) / scales) ** 2
            )
            return torch.logsumexp(log_terms, -1)

        return Separable(log_density)


@dataclass(frozen=True, eq=False)
class Gamma:
    """A prior of a rate λ ~ Gamma(shape, rate), whose density is ∝ λ^(shape−1) e^(−rate·λ).

    `link` defines θ, as in likelihoods.Poisson:

        "log"       θ = log λ:  log π(θ) = shape·θ − rate·e^θ + const
        "identity"  θ = λ > 0:  log π(θ) = (shape − 1) log θ − rate·θ + const

    With "log" the change of variable multiplies the density by λ, and log π is concave. With
    "identity" it is so for shape ≥ 1. Both are the same distribution of λ, but their densities have
    different modes: Laplace's approximation depends on the link.
    """

    shape: Setting
    rate: Setting
    link: str = LOG

    @in_plain_torch
    def __post_init__(self) -> None:
        """Raise ValueError for an unknown link, and unless shape and rate are positive."""
        check_name("link", self.link, (LOG, IDENTITY))
        for name, setting in (("shape", self.shape), ("rate", self.rate)):
            for value in convert_setting_to_tensors(setting):
                check_positive(f"prior {name}", value)

    def bind(self, layout: Layout) -> Separable:
        """Return the prior over flat θ; raise ValueError if a setting does not fit the layout."""
        shape = resolve_setting("shape", self.shape, layout)
        rate = resolve_setting("rate", self.rate, layout)
        constant = shape * rate.log() - torch.lgamma(shape)

        def log_density_of_logarithm(theta: Tensor) -> Tensor:
            """Return log π_i(θ_i) (P,) of θ = log λ (P,)."""
            return constant + shape * theta - rate * theta.exp()

        def log_density_of_rate(theta: Tensor) -> Tensor:
            """Return log π_i(θ_i) (P,) of θ = λ (P,); −∞ for a rate that is not positive."""
            # The other branch of `where` must be finite too, or gradients would be NaN.
            allowed = theta > 0
            positive_rate = torch.where(allowed, theta, torch.ones_like(theta))
            value = constant + (shape - 1) * positive_rate.log() - rate * positive_rate
            return torch.where(allowed, value, -math.inf)

        return Separable(log_density_of_logarithm if self.link == LOG else log_density_of_rate)
