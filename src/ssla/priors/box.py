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
    """θ_i ~ N(m_i, 1/τ): each mean anywhere in its range, and one precision for each layer anywhere
    in its range.

    `mean` and `precision` are (low, high), or a dict of pairs by layer (or, for means, parameter)
    name. A range with low = high fixes that value.
    """

    mean: Range | Mapping[str, Range] = (0.0, 0.0)
    precision: Range | Mapping[str, Range] = (1.0, 1.0)

    @in_plain_torch
    def __post_init__(self) -> None:
        for what, setting, least in (
            ("mean", self.mean, -math.inf),
            ("precision", self.precision, 0.0),
        ):
            for pair in setting.values() if isinstance(setting, Mapping) else [setting]:
                if (
                    not isinstance(pair, tuple | list)
                    or len(pair) != 2
                    or not least < pair[0] <= pair[1] < math.inf
                ):
                    condition = "0 < low ≤ high" if what == "precision" else "low ≤ high"
                    raise ValueError(
                        f"Box {what} must be (low, high) with {condition}, or a dict of such "
                        f"pairs, but has {pair!r}."
                    )

    def means(self, layout: Layout) -> tuple[Tensor, Tensor]:
        """Lower and upper means (P,)."""
        return _ends("mean", self.mean, layout)

    def precisions(self, layout: Layout) -> tuple[Tensor, Tensor]:
        """Lower and upper precisions (P,), equal within a layer."""
        return _ends("precision", self.precision, layout)

    def centre(self, layout: Layout) -> Gaussian:
        """The prior in the middle: midpoints of the means, and of the logarithms of the
        precisions.
        """
        (a, b), (low, high) = self.means(layout), self.precisions(layout)
        return _member(layout, (a + b) / 2, (low * high).sqrt())

    def sample(self, layout: Layout, generator: torch.Generator | None = None) -> Gaussian:
        """A random member: means uniform, precisions log-uniform, one for each layer."""
        (a, b), (low, high) = self.means(layout), self.precisions(layout)
        share = torch.rand(len(a), dtype=torch.float64, generator=generator)
        by_layer = torch.zeros_like(a)
        for names in layout.layers().values():
            level = torch.rand((), dtype=torch.float64, generator=generator)
            for name in names:
                by_layer[layout.positions[name]] = level
        return _member(layout, a + share * (b - a), low * (high / low) ** by_layer)


def _ends(what: str, setting: Range | Mapping[str, Range], layout: Layout) -> tuple[Tensor, Tensor]:
    if isinstance(setting, Mapping):
        low = resolve(what, {key: pair[0] for key, pair in setting.items()}, layout)
        return low, resolve(what, {key: pair[1] for key, pair in setting.items()}, layout)
    return resolve(what, setting[0], layout), resolve(what, setting[1], layout)


def _member(layout: Layout, mean: Tensor, precision: Tensor) -> Gaussian:
    """A Gaussian prior from vectors over θ."""
    return Gaussian(dict(layout.unpack(precision)), dict(layout.unpack(mean)))
