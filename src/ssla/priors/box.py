"""A set of priors: every Gaussian whose means and precisions lie in a box."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from ssla._checks import in_plain_torch
from ssla.network.layout import Layout
from ssla.priors.gaussian_prior import Gaussian
from ssla.priors.prior import resolve

Range = tuple[float, float]


@dataclass(frozen=True, eq=False)
class Box:
    """The priors θ_i ~ N(m_i, 1/τ) whose means m_i, and one precision τ for each layer, lie in
    ranges.

    `mean` and `precision` are (low, high), or a dict of pairs by layer (or, for means, parameter)
    name. A range with low = high fixes that value.
    """

    mean: Range | Mapping[str, Range] = (0.0, 0.0)
    precision: Range | Mapping[str, Range] = (1.0, 1.0)

    @in_plain_torch
    def __post_init__(self) -> None:
        """Check the ranges; raise ValueError if one is invalid."""
        _check_ranges("mean", self.mean, -math.inf, "low ≤ high")
        _check_ranges("precision", self.precision, 0.0, "0 < low ≤ high")

    def means(self, layout: Layout) -> tuple[Tensor, Tensor]:
        """Return the lower and upper means (P,)."""
        return _limits("mean", self.mean, layout)

    def precisions(self, layout: Layout) -> tuple[Tensor, Tensor]:
        """Return the lower and upper precisions (P,), equal within a layer."""
        return _limits("precision", self.precision, layout)

    def centre(self, layout: Layout) -> Gaussian:
        """Return the prior with the midpoints of the means and of the logarithms of the
        precisions.
        """
        low_mean, high_mean = self.means(layout)
        low, high = self.precisions(layout)
        return _gaussian_of(layout, (low_mean + high_mean) / 2, (low * high).sqrt())

    def sample(self, layout: Layout, generator: torch.Generator | None = None) -> Gaussian:
        """Return a random member: means uniform, precisions log-uniform, one for each layer."""
        low_mean, high_mean = self.means(layout)
        low, high = self.precisions(layout)
        # A uniform number for each mean, and one for the precisions of each layer.
        u_mean = torch.rand(len(low_mean), dtype=torch.float64, generator=generator)
        u_precision = torch.zeros_like(low_mean)
        for names in layout.layers().values():
            u_layer = torch.rand((), dtype=torch.float64, generator=generator)
            for name in names:
                u_precision[layout.positions[name]] = u_layer
        mean = low_mean + u_mean * (high_mean - low_mean)
        return _gaussian_of(layout, mean, low * (high / low) ** u_precision)


def _check_ranges(
    name: str, setting: Range | Mapping[str, Range], least: float, condition: str
) -> None:
    """Raise ValueError unless every range of a setting is (low, high) with least < low ≤
    high < ∞.
    """
    for pair in setting.values() if isinstance(setting, Mapping) else [setting]:
        if (
            not isinstance(pair, tuple | list)
            or len(pair) != 2
            or not least < pair[0] <= pair[1] < math.inf
        ):
            raise ValueError(
                f"Box {name} must be (low, high) with {condition}, or a dict of such pairs, but "
                f"has {pair!r}."
            )


def _limits(
    name: str, setting: Range | Mapping[str, Range], layout: Layout
) -> tuple[Tensor, Tensor]:
    """Return the lower and upper values (P,) of a setting."""
    if isinstance(setting, Mapping):
        low = resolve(name, {key: pair[0] for key, pair in setting.items()}, layout)
        return low, resolve(name, {key: pair[1] for key, pair in setting.items()}, layout)
    return resolve(name, setting[0], layout), resolve(name, setting[1], layout)


def _gaussian_of(layout: Layout, mean: Tensor, precision: Tensor) -> Gaussian:
    """Return a Gaussian prior from vectors over θ (P,)."""
    return Gaussian(dict(layout.unpack(precision)), dict(layout.unpack(mean)))
