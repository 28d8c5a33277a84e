"""One module from x to the answers: the network, f̂ and K of each posterior, their laws, the
mixture, the target's unit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from ssla.curvature import Operator
from ssla.curvature.diagonal import DiagonalOperator
from ssla.curvature.jacobians import Features
from ssla.curvature.kfac import KfacOperator
from ssla.data import Inputs
from ssla.files.exporting.count_nodes import count_law
from ssla.files.exporting.laws import (
    Levels,
    MixtureLaw,
    Numbers,
    binary_probabilities,
    gaussian,
    root_of,
    softmax_probabilities,
)
from ssla.likelihoods import Likelihood
from ssla.network import LastLayer, LayerInputs
from ssla.priors import EXACT

if TYPE_CHECKING:
    from ssla.posterior import Posterior

NUMBERS, CLASSES = ("mean", "sd", "quantiles"), ("probabilities", "label")
MOST_CLASSES = 100  # of a covariance whose root is unrolled


@dataclass(frozen=True, eq=False)
class Unit:
    """Numbers (d,) or (D,): v = shift + scale · z."""

    shift: Tensor
    scale: Tensor


@dataclass(frozen=True, eq=False)
class Part:
    """A posterior of a mixture, its share, and the number of its network."""

    state: Posterior
    weight: float
    network: int


class Graph(nn.Module):
    """x -> mean, sd and quantiles, or probabilities and label, in float64.

    The networks compute in their own dtype. inputs: x is standardised first; target: the unit of y.
    """

    def __init__(
        self,
        parts: Sequence[Part],
        example: Inputs,
        levels: Sequence[float],
        inputs: Unit | None = None,
        target: Unit | None = None,
    ) -> None:
        super().__init__()
        first = {part.network: part.state.network for part in reversed(parts)}
        networks = [
            network for _, network in sorted(first.items()) if isinstance(network, LastLayer)
        ]
        self.features = nn.ModuleList(LayerInputs(network, example) for network in networks)
        self.parts = tuple(parts)
        q = torch.tensor(list(levels), dtype=torch.float64)
        self.levels = Levels(q, torch.special.ndtri(q))
        self.inputs, self.target = inputs, target

    @property
    def names(self) -> tuple[str, ...]:
        """Of the answers."""
        return CLASSES if self.parts[0].state.likelihood.logit_temperature is not None else NUMBERS

    def forward(self, *parts: Tensor) -> tuple[Tensor, ...]:
        if self.inputs is not None:
            parts = ((parts[0] - self.inputs.shift) / self.inputs.scale,)
        phi = [features(*parts).double() for features in self.features]
        moments = [_moments(part.state, phi[part.network]) for part in self.parts]
        if self.names is CLASSES:
            p = moments[0].probabilities() * self.parts[0].weight
            for part, moment in zip(self.parts[1:], moments[1:], strict=True):
                p = p + part.weight * moment.probabilities()
            return p, p.argmax(1)
        laws = tuple(moment.law() for moment in moments)
        law = (
            laws[0]
            if len(laws) == 1
            else MixtureLaw(laws, tuple(part.weight for part in self.parts))
        )
        mean, sd, quantiles = law.mean, law.variance.sqrt(), law.icdf(self.levels)
        if self.target is None:
            return mean, sd, quantiles
        shift, scale = self.target.shift, self.target.scale
        return (
            shift + scale * mean,
            scale * sd,
            shift.unsqueeze(-1) + scale.unsqueeze(-1) * quantiles,
        )


@dataclass(frozen=True, eq=False)
class _Moments:
    """f̂ (N, C) and J of one posterior, from which K and its root follow."""

    likelihood: Likelihood
    f: Tensor
    J: Features
    operator: Operator

    def probabilities(self) -> Tensor:
        unit = self.likelihood.logit_temperature
        assert unit is not None
        f = self.f if unit == 1 else self.f / unit
        if f.shape[1] <= 2:
            return binary_probabilities(f, self.operator.covariance(self.J) / unit**2)
        return softmax_probabilities(f, root_of(self.operator, self.J).scaled(1 / unit))

    def law(self) -> Numbers:
        K, likelihood = self.operator.covariance(self.J), self.likelihood
        if likelihood.quadratic:
            return gaussian(self.f, K, likelihood.covariance_for(self.f))
        return count_law(likelihood, self.f, K)


def _moments(state: Posterior, phi: Tensor) -> _Moments:
    """As in `LastLayer.linearise`, in float64."""
    network = state.network
    assert isinstance(network, LastLayer)
    J = network.scaled(Features(phi, network.outputs, network.fold_bias))
    f = J.push(state.mean)
    return _Moments(
        state.likelihood.predictive,
        f if network.offset is None else f + network.offset,
        J.double(),
        state.covariance,
    )


def refuse(state: Posterior) -> None:
    """ValueError for a posterior whose predictive has no static graph."""
    network, likelihood = state.network, state.likelihood.predictive
    if not isinstance(network, LastLayer):
        names = network.layout.names
        some = ", ".join(names[:3]) + (", …" if len(names) > 3 else "")
        raise ValueError(
            "export writes posteriors of a last layer, but the free parameters of this one are "
            f"{some}: its covariance needs the derivatives of the whole network. Fit with "
            "weights='last_layer'."
        )
    if state.convention != EXACT:
        raise ValueError(
            "export works with the exact convention only, but this posterior has "
            f"convention={state.convention!r}. Use posterior.with_prior(posterior.prior)."
        )
    if not likelihood.linear_domain:
        raise ValueError(
            f"{likelihood!r} does not allow every output, and its refit has no fixed number of "
            "steps. Use the default: Poisson(link='log') or "
            "HeteroscedasticGaussian(parameters='mean_log_variance')."
        )
    counts = likelihood.overdispersion is not None
    classes = likelihood.logit_temperature is not None
    if not (likelihood.quadratic or classes or counts):
        raise ValueError(
            "export writes Gaussian noise, classes and counts, but not "
            f"{type(likelihood).__name__}: its predictive is found by an adaptive search, which a "
            "static graph cannot hold. Export the network alone (torch.onnx.export), or serve "
            "posterior.predict."
        )
    whole = likelihood.softmax and not isinstance(state.covariance, KfacOperator | DiagonalOperator)
    if whole and network.outputs > MOST_CLASSES:
        raise ValueError(
            f"The probabilities of {network.outputs} classes need the root of a "
            f"{network.outputs}×{network.outputs} covariance, which the graph would compute in as "
            f"many steps; up to {MOST_CLASSES} are written. Fit with structure='kfac' or 'diag', "
            "whose roots need no steps."
        )
