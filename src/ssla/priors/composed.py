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

from ssla._checks import check_finite, check_positive, in_plain_torch, record_derivatives
from ssla.network.layout import Layout, make_contiguous_layout
from ssla.priors.prior import BoundPrior, Prior, find_parameters_of_key, sort_layers_first
from ssla.priors.separable import (
    Separable,
    compute_gradient,
    differentiate,
    make_differentiable_copy,
)

LARGEST_HESSIAN = 4096  # parameters: above it, a dense Hessian of the prior takes more than 128 MiB


@dataclass(frozen=True, eq=False)
class Joint:
    """A joint log density of all of θ, with derivatives by autograd."""

    function: Callable[[Tensor], Tensor]  # (P,) -> scalar

    def log_prob(self, theta: Tensor) -> Tensor:
        """Return log π(θ), a scalar, for θ (P,)."""
        return self.function(theta)

    @in_plain_torch
    def gradient(self, theta: Tensor) -> Tensor:
        """Return ∇ log π (P,) at θ (P,)."""
        return compute_gradient(self.function, theta)

    @in_plain_torch
    def precision(self, theta: Tensor) -> Tensor:
        """Return −∇² log π at θ (P,): (P,) if its other entries are exactly zero, else (P, P).

        Raises ValueError if θ has too many parameters for a dense Hessian.
        """
        if theta.numel() > LARGEST_HESSIAN:
            raise ValueError(
                f"A joint prior over {theta.numel():,} parameters would need a dense Hessian. Use "
                "it for fewer parameters (priors.Product), or custom(log_prob, independent=True) "
                "if coordinates are independent."
            )

        with record_derivatives("log_prob of the prior"):
            free = make_differentiable_copy(theta)
            gradient = differentiate(self.function(free), free, keep_graph=True)
            # One row of the Hessian for each entry of the gradient. The rows share one graph.
            H = -torch.stack(
                [differentiate(entry, free, keep_graph=True).detach() for entry in gradient]
            )
        H = (H + H.mT) / 2

        # Only some structures can use a full matrix, but all can use a diagonal.
        diagonal = H.diagonal()
        return diagonal.clone() if torch.equal(H, torch.diag(diagonal)) else H


@dataclass(frozen=True, eq=False)
class Custom:
    """A prior that is computed from its log density; see `custom`."""

    log_prob_function: Callable[..., Tensor]
    independent: bool
    by_name: bool

    def bind(self, layout: Layout) -> BoundPrior:
        """Return the prior over flat θ.

        Each call of its methods raises ValueError where the user's function returns a tensor of
        another shape, or no tensor.
        """
        if self.by_name:
            return Joint(
                lambda theta: self._check_value(self.log_prob_function(layout.unpack(theta)), ())
            )
        order = find_named_order(layout)
        if not self.independent:
            return Joint(lambda theta: self._check_value(self.log_prob_function(theta[order]), ()))
        to_theta = order.argsort()  # from the named order to that of θ

        def log_density(theta: Tensor) -> Tensor:
            """Return log π_i(θ_i) (P,) for θ (P,); the user's function has the named order."""
            return self._check_value(self.log_prob_function(theta[order]), theta.shape)[to_theta]

        return Separable(log_density)

    def _check_value(self, value: Any, shape: tuple[int, ...]) -> Tensor:
        """Return the result of the user's log_prob unchanged.

        Raises ValueError unless it is a tensor of the given shape.
        """
        if not isinstance(value, Tensor) or value.shape != shape:
            given = (
                f"a tensor of shape {tuple(value.shape)}"
                if isinstance(value, Tensor)
                else f"a {type(value).__name__}"
            )
            expected = (
                f"one value for each parameter, shape {tuple(shape)}"
                if shape
                else "one number (a tensor of shape ())"
            )
            raise ValueError(f"The prior's log_prob must return {expected}, but returned {given}.")
        return value


def custom(
    log_prob: Callable[..., Tensor], *, independent: bool = False, by_name: bool = False
) -> Custom:
    """Return a prior from its log density, with gradient and Hessian by autograd.

    log_prob takes θ (P,) in the order of the parameter names and returns a number. With
    by_name=True it takes a dict of parameters instead. With independent=True it returns one value
    for each coordinate, (P,), and the Hessian is a diagonal. It must be written in torch and be
    twice differentiable. If it is not normalised, the evidence is not either. Raises TypeError if
    log_prob is not a function, and ValueError if both independent and by_name are true.

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
    """A prior from any torch.distributions distribution over θ.

    A distribution of one number applies to every coordinate independently. A batch or an event of P
    numbers applies to θ in the order of the names. With unconstrained=True, θ is the real
    coordinate of a constrained value v (log v for a positive one) and the density is that of θ: log
    p(v(θ)) + log|dv/dθ|.
    """

    distribution: Distribution
    unconstrained: bool = False

    @in_plain_torch
    def __post_init__(self) -> None:
        """Replace the distribution by a copy in float64, although the dataclass is frozen."""
        object.__setattr__(self, "distribution", _copy_in_double(self.distribution))

    def bind(self, layout: Layout) -> BoundPrior:
        """Return the prior over flat θ.

        Raises ValueError if the distribution is neither over one number nor over as many as there
        are free parameters.
        """
        distribution = self.distribution
        order = find_named_order(layout)
        size = math.prod((*distribution.batch_shape, *distribution.event_shape))
        if size not in (1, layout.size):
            raise ValueError(
                f"The distribution {type(distribution).__name__} is over {size} numbers, but there "
                f"are {layout.size} free parameters. Give one over a single number, one over all "
                "of them, or priors.Product by parameter group."
            )
        if math.prod(distribution.event_shape) > 1:
            return Joint(lambda theta: self._log_prob(theta[order]).sum())
        to_theta = order.argsort()  # from the named order to that of θ
        return Separable(lambda theta: self._log_prob(theta[order])[to_theta])

    def _log_prob(self, theta: Tensor) -> Tensor:
        """Return the log densities in float64 for θ (P,) in the named order.

        They are (P,) for a distribution of one number, which holds for each coordinate, and else of
        the batch's size. All are −∞, and (P,), if any coordinate is outside the support.
        """
        distribution = self.distribution
        event_shape = tuple(distribution.event_shape)

        # A distribution of one number is evaluated for a batch of all coordinates.
        batch_shape = tuple(distribution.batch_shape) if math.prod(event_shape) > 1 else (-1,)
        value = theta.reshape(*batch_shape, *event_shape)
        correction: Tensor | float = 0.0  # log|dv/dθ| of the change of variable
        if self.unconstrained:
            transform = biject_to(distribution.support)
            coordinate = value
            value = transform(coordinate)
            correction = transform.log_abs_det_jacobian(coordinate, value)
        support = distribution.support
        if support is not None and not bool(support.check(value.detach()).all()):
            return torch.full_like(theta, -math.inf)
        log_densities: Tensor = distribution.log_prob(value) + correction
        return log_densities.reshape(-1).double()


def _copy_in_double(distribution: Distribution) -> Distribution:
    """Return a copy of the distribution with its numbers in float64 on the CPU.

    Otherwise some log densities would be rounded to the dtype of their parameters. Distributions
    inside the distribution are copied, too.
    """
    double = copy(distribution)
    for name, value in vars(distribution).items():
        if isinstance(value, Tensor) and value.is_floating_point():
            vars(double)[name] = value.detach().to("cpu", torch.float64)
        elif isinstance(value, Distribution):
            vars(double)[name] = _copy_in_double(value)
    return double


@dataclass(frozen=True, eq=False)
class Product:
    """Different priors for different parameters, as a dict.

    The keys are names of layers ("head") or of parameters ("head.bias"). Every free parameter needs
    a prior; a parameter's own entry overrides that of its layer.
    """

    parts: Mapping[str, Prior | Distribution]

    @in_plain_torch
    def __post_init__(self) -> None:
        """Replace the dict by one whose values are all priors; raise TypeError if it is invalid."""
        if not isinstance(self.parts, Mapping) or not self.parts:
            raise TypeError(
                "Product takes a dict from layer or parameter names to priors, but got "
                f"{self.parts!r}."
            )
        # The dataclass is frozen, so the priors are stored by object.__setattr__.
        priors = {key: as_prior(prior) for key, prior in self.parts.items()}
        object.__setattr__(self, "parts", priors)

    def bind(self, layout: Layout) -> BoundPrior:
        """Return the prior over flat θ.

        Raises ValueError if a parameter has no prior, or a key is no name of the layout.
        """
        key_of: dict[str, str] = {}  # the key of each parameter's prior
        for key in sort_layers_first(self.parts, layout):
            key_of.update(dict.fromkeys(find_parameters_of_key(key, layout), key))
        missing = [name for name in layout.names if name not in key_of]
        if missing:
            raise ValueError(
                f"Product has no prior for {', '.join(missing)}. Add those names, or their layers, "
                "to the dict."
            )

        groups = []

        # Each prior is bound to the layout of its own parameters alone.
        for key in dict.fromkeys(key_of.values()):
            names = [name for name in layout.names if key_of[name] == key]
            index = torch.cat([layout.positions[name].flatten() for name in names])
            group = make_contiguous_layout({name: layout.positions[name].shape for name in names})
            groups.append((index, as_prior(self.parts[key]).bind(group)))
        return BoundProduct(layout.size, tuple(groups))


@dataclass(frozen=True, eq=False)
class BoundProduct:
    """The sum of log densities over groups; each prior gets only the coordinates of its group."""

    size: int  # P, the number of parameters of all groups together
    groups: tuple[tuple[Tensor, BoundPrior], ...]  # the indices of a group in θ, and its prior

    def log_prob(self, theta: Tensor) -> Tensor:
        """Return log π(θ), a scalar, for θ (P,)."""
        return torch.stack([bound.log_prob(theta[index]) for index, bound in self.groups]).sum()

    def gradient(self, theta: Tensor) -> Tensor:
        """Return ∇ log π (P,) at θ (P,)."""
        gradient = torch.zeros(self.size, dtype=torch.float64)
        for index, bound in self.groups:
            gradient[index] = bound.gradient(theta[index])
        return gradient

    def precision(self, theta: Tensor) -> Tensor:
        """Return −∇² log π at θ (P,): (P,) if that of every group is diagonal, else (P, P)."""
        blocks = [(index, bound.precision(theta[index])) for index, bound in self.groups]
        if all(block.dim() == 1 for _, block in blocks):
            diagonal = torch.zeros(self.size, dtype=torch.float64)
            for index, block in blocks:
                diagonal[index] = block
            return diagonal
        precision = torch.zeros(self.size, self.size, dtype=torch.float64)
        for index, block in blocks:
            precision[index[:, None], index] = torch.diag(block) if block.dim() == 1 else block
        return precision


@dataclass(frozen=True, eq=False)
class NormalInverseGamma:
    """The conjugate prior of a Gaussian's mean μ and variance σ², over θ = (μ, log σ²).

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
        """Raise ValueError unless all parameters are finite, and all but the mean positive."""
        check_positive(
            "strength, shape and scale",
            torch.tensor([float(self.strength), float(self.shape), float(self.scale)]),
        )
        check_finite("prior mean", torch.tensor(float(self.mean)), "Give a finite number.")

    def bind(self, layout: Layout) -> Joint:
        """Return the prior over flat θ; raise ValueError unless there are two parameters."""
        if layout.size != 2:
            raise ValueError(
                "NormalInverseGamma is over two parameters, (μ, log σ²), but was given "
                f"{layout.size}. Name them: priors.Product({{'head.bias': NormalInverseGamma(…), "
                "'head.weight': Gaussian()})."
            )

        order = find_named_order(layout)

        # The logarithms of the constants of both densities.
        constant = (
            self.shape * math.log(self.scale)
            - math.lgamma(self.shape)
            + 0.5 * math.log(self.strength)
            - 0.5 * math.log(2 * math.pi)
        )

        def log_density(theta: Tensor) -> Tensor:
            """Return log π of θ (2,), which is (μ, s) in the named order: see the class."""
            mu, s = theta[order].unbind()
            return (
                constant
                - (self.shape + 0.5) * s
                - (-s).exp() * (self.scale + 0.5 * self.strength * (mu - self.mean) ** 2)
            )

        return Joint(log_density)


def find_named_order(layout: Layout) -> Tensor:
    """Return the indices (P,) for which θ[indices] has the order of the parameter names."""
    return torch.cat([index.flatten() for index in layout.positions.values()])


def as_prior(prior: Any) -> Prior:
    """Return a prior unchanged, or a torch.distributions distribution as a prior.

    Raises TypeError for another object.
    """
    if isinstance(prior, Distribution):
        return FromDistribution(prior)
    if isinstance(prior, type) or not hasattr(prior, "bind"):
        raise TypeError(
            "prior must be an object such as ssla.priors.Gaussian(precision=1.0) or a "
            f"torch.distributions distribution, but is {prior!r}."
        )
    checked: Prior = prior
    return checked
