"""Priors composed of others, and priors from a custom log density."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from copy import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributions import Distribution, biject_to

from ssla._checks import differentiated, finite, in_plain_torch, positive
from ssla.network.layout import Layout, contiguous_layout
from ssla.priors.prior import BoundPrior, Prior, names_of
from ssla.priors.separable import Separable, slope

LARGEST_HESSIAN = 4096  # parameters: above it, a dense Hessian of the prior takes more than 128 MiB


@dataclass(frozen=True, eq=False)
class Joint:
    """A joint log density of all of θ; derivatives by autograd.

    The curvature is returned as a diagonal if its off-diagonal part is exactly zero, so that every
    structure can use it.
    """

    function: Callable[[Tensor], Tensor]  # (P,) -> scalar

    def log_prob(self, theta: Tensor) -> Tensor:
        return self.function(theta)

    @in_plain_torch
    def gradient(self, theta: Tensor) -> Tensor:
        with differentiated("log_prob of the prior"):
            free = theta.detach().clone().requires_grad_(True)
            return slope(self.function(free), free).detach()

    @in_plain_torch
    def precision(self, theta: Tensor) -> Tensor:
        if theta.numel() > LARGEST_HESSIAN:
            raise ValueError(
                f"A joint prior over {theta.numel():,} parameters would need a dense Hessian. Use "
                "it for fewer parameters (priors.Product), or custom(log_prob, independent=True) "
                "if coordinates are independent."
            )
        with differentiated("log_prob of the prior"):
            free = theta.detach().clone().requires_grad_(True)
            first = slope(self.function(free), free, keep=True)
            H = -torch.stack([slope(g, free, keep=True).detach() for g in first])
        H = (H + H.mT) / 2
        diagonal = H.diagonal()
        return diagonal.clone() if torch.equal(H, torch.diag(diagonal)) else H


@dataclass(frozen=True, eq=False)
class Custom:
    """See `custom`."""

    log_prob_function: Callable[..., Tensor]
    independent: bool
    by_name: bool

    def bind(self, layout: Layout) -> BoundPrior:
        order = named_order(layout)
        if self.by_name:
            return Joint(
                lambda theta: self._checked(self.log_prob_function(layout.unpack(theta)), ())
            )
        if not self.independent:
            return Joint(lambda theta: self._checked(self.log_prob_function(theta[order]), ()))
        back = order.argsort()

        def log_density(theta: Tensor) -> Tensor:
            return self._checked(self.log_prob_function(theta[order]), theta.shape)[back]

        return Separable(log_density)

    def _checked(self, value: Any, shape: tuple[int, ...]) -> Tensor:
        if not isinstance(value, Tensor) or value.shape != shape:
            given = (
                f"a tensor of shape {tuple(value.shape)}"
                if isinstance(value, Tensor)
                else f"a {type(value).__name__}"
            )
            want = (
                f"one value for each parameter, shape {tuple(shape)}"
                if shape
                else "one number (a tensor of shape ())"
            )
            raise ValueError(f"The prior's log_prob must return {want}, but returned {given}.")
        return value


def custom(
    log_prob: Callable[..., Tensor], *, independent: bool = False, by_name: bool = False
) -> Custom:
    """A prior from its log density; gradient and Hessian by automatic differentiation.

    log_prob takes θ (P,) in the order of the parameter names and returns a number. With
    by_name=True it takes a dict of parameters instead. With independent=True it returns one value
    for each coordinate, (P,), and the Hessian is a diagonal. It must be written in torch and be
    twice differentiable. If it is not normalised, the evidence is not either.

    >>> import torch
    >>> prior = custom(lambda theta: -0.5 * (theta**2).sum() - theta.sum() ** 2)
    """
    if not callable(log_prob):
        raise TypeError(
            f"custom needs a function log_prob(theta), but got {type(log_prob).__name__}."
        )
    if independent and by_name:
        raise ValueError("custom takes independent=True or by_name=True, not both.")
    return Custom(log_prob, independent, by_name)


@dataclass(frozen=True, eq=False)
class FromDistribution:
    """Any torch.distributions distribution over θ.

    A distribution of one number applies to every coordinate independently. A batch or an event of P
    numbers applies to θ in the order of the names. With unconstrained=True, θ is the real
    coordinate of a constrained value v (log v for a positive one) and the density is that of θ: log
    p(v(θ)) + log|dv/dθ|.
    """

    distribution: Distribution
    unconstrained: bool = False

    @in_plain_torch
    def __post_init__(self) -> None:
        object.__setattr__(self, "distribution", _in_double(self.distribution))

    def bind(self, layout: Layout) -> BoundPrior:
        d = self.distribution
        order = named_order(layout)
        size = math.prod((*d.batch_shape, *d.event_shape))
        if size not in (1, layout.size):
            raise ValueError(
                f"The distribution {type(d).__name__} is over {size} numbers, but there are "
                f"{layout.size} free parameters. Give one over a single number, one over all of "
                "them, or priors.Product by parameter group."
            )
        if math.prod(d.event_shape) > 1:
            return Joint(lambda theta: self._log_prob(theta[order]).sum())
        back = order.argsort()
        return Separable(lambda theta: self._log_prob(theta[order])[back])

    def _log_prob(self, theta: Tensor) -> Tensor:
        """(P,) in the named order -> the log densities of the batch, in float64; −∞ outside the
        support.
        """
        d, event = self.distribution, tuple(self.distribution.event_shape)
        value = (
            theta.reshape(*d.batch_shape, *event)
            if math.prod(event) > 1
            else theta.reshape(-1, *event)
        )
        correction: Tensor | float = 0.0
        if self.unconstrained:
            transform = biject_to(d.support)
            real, value = value, transform(value)
            correction = transform.log_abs_det_jacobian(real, value)
        if d.support is not None and not bool(d.support.check(value.detach()).all()):
            return torch.full_like(theta, -math.inf)
        logs: Tensor = d.log_prob(value) + correction
        return logs.reshape(-1).double()


def _in_double(distribution: Distribution) -> Distribution:
    """A copy of the distribution with its numbers in float64: some log densities are rounded to
    the dtype of their parameters.
    """
    own = copy(distribution)
    for name, value in vars(distribution).items():
        if isinstance(value, Tensor) and value.is_floating_point():
            vars(own)[name] = value.detach().to("cpu", torch.float64)
        elif isinstance(value, Distribution):
            vars(own)[name] = _in_double(value)
    return own


@dataclass(frozen=True, eq=False)
class Product:
    """Different priors for different parameters: a dict by layer ("head") or parameter name
    ("head.bias").

    Every free parameter needs one; a parameter's own entry overrides that of its layer.
    """

    parts: Mapping[str, Prior | Distribution]

    @in_plain_torch
    def __post_init__(self) -> None:
        if not isinstance(self.parts, Mapping) or not self.parts:
            raise TypeError(
                "Product takes a dict from layer or parameter names to priors, but got "
                f"{self.parts!r}."
            )
        object.__setattr__(self, "parts", {key: as_prior(part) for key, part in self.parts.items()})

    def bind(self, layout: Layout) -> BoundPrior:
        owner: dict[str, str] = {}
        for key in sorted(
            self.parts, key=lambda name: name in layout.positions
        ):  # a parameter overrides its layer
            owner.update(dict.fromkeys(names_of(key, layout), key))
        missing = [name for name in layout.names if name not in owner]
        if missing:
            raise ValueError(
                f"Product has no prior for {', '.join(missing)}. Add those names, or their layers, "
                "to the dict."
            )
        groups = []
        for key in dict.fromkeys(owner.values()):
            names = [name for name in layout.names if owner[name] == key]
            index = torch.cat([layout.positions[name].flatten() for name in names])
            own = contiguous_layout({name: layout.positions[name].shape for name in names})
            groups.append((index, as_prior(self.parts[key]).bind(own)))
        return BoundProduct(layout.size, tuple(groups))


@dataclass(frozen=True, eq=False)
class BoundProduct:
    """The sum over groups; each prior gets only its own coordinates."""

    size: int
    groups: tuple[tuple[Tensor, BoundPrior], ...]

    def log_prob(self, theta: Tensor) -> Tensor:
        return torch.stack([bound.log_prob(theta[index]) for index, bound in self.groups]).sum()

    def gradient(self, theta: Tensor) -> Tensor:
        out = torch.zeros(self.size, dtype=torch.float64)
        for index, bound in self.groups:
            out[index] = bound.gradient(theta[index])
        return out

    def precision(self, theta: Tensor) -> Tensor:
        parts = [(index, bound.precision(theta[index])) for index, bound in self.groups]
        if all(part.dim() == 1 for _, part in parts):
            out = torch.zeros(self.size, dtype=torch.float64)
            for index, part in parts:
                out[index] = part
            return out
        out = torch.zeros(self.size, self.size, dtype=torch.float64)
        for index, part in parts:
            out[index[:, None], index] = torch.diag(part) if part.dim() == 1 else part
        return out


@dataclass(frozen=True, eq=False)
class NormalInverseGamma:
    """The conjugate prior of a Gaussian's mean and variance, over θ = (μ, log σ²):

        σ² ~ InverseGamma(shape, scale),   μ | σ² ~ N(mean, σ²/strength).

    With s = log σ² the change of variable multiplies the density by σ²:
    log π = −(shape + ½) s − e^(−s) [scale + ½ strength (μ − mean)²] + const. Needs exactly two
    parameters, in that order; use priors.Product for other parameters. Not log-concave jointly far
    from the mean.
    """

    mean: float = 0.0
    strength: float = 1.0
    shape: float = 1.0
    scale: float = 1.0

    @in_plain_torch
    def __post_init__(self) -> None:
        positive(
            "strength, shape and scale",
            torch.tensor([float(self.strength), float(self.shape), float(self.scale)]),
        )
        finite("prior mean", torch.tensor(float(self.mean)), "Give a finite number.")

    def bind(self, layout: Layout) -> Joint:
        if layout.size != 2:
            raise ValueError(
                "NormalInverseGamma is over two parameters, (μ, log σ²), but was given "
                f"{layout.size}. Name them: priors.Product({{'head.bias': NormalInverseGamma(…), "
                "'head.weight': Gaussian()})."
            )
        order = named_order(layout)
        constant = (
            self.shape * math.log(self.scale)
            - math.lgamma(self.shape)
            + 0.5 * math.log(self.strength)
            - 0.5 * math.log(2 * math.pi)
        )

        def log_density(theta: Tensor) -> Tensor:
            mu, s = theta[order].unbind()
            return (
                constant
                - (self.shape + 0.5) * s
                - (-s).exp() * (self.scale + 0.5 * self.strength * (mu - self.mean) ** 2)
            )

        return Joint(log_density)


def named_order(layout: Layout) -> Tensor:
    """Indices into θ, in the order of the parameter names."""
    return torch.cat([index.flatten() for index in layout.positions.values()])


def as_prior(prior: Any) -> Prior:
    """A prior, or a torch.distributions distribution, as a prior."""
    if isinstance(prior, Distribution):
        return FromDistribution(prior)
    if isinstance(prior, type) or not hasattr(prior, "bind"):
        raise TypeError(
            "prior must be an object such as ssla.priors.Gaussian(precision=1.0) or a "
            f"torch.distributions distribution, but is {prior!r}."
        )
    found: Prior = prior
    return found
