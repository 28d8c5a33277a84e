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
from ssla.priors.prior import resolve_setting

Range = tuple[float, float]


@dataclass(frozen=True, eq=False)
class Box:
    """A set of priors θ_i ~ N(m_i, 1/τ), whose means and precisions lie in given ranges.

    Each parameter i has a mean m_i of its own. All parameters of a layer have one precision τ.
    `mean` and `precision` are (low, high), or a dict of pairs by layer (or, for means, parameter)
    name. A range with low = high fixes that value.
    """

    mean: Range | Mapping[str, Range] = (0.0, 0.0)
    precision: Range | Mapping[str, Range] = (1.0, 1.0)

    @in_plain_torch
    def __post_init__(self) -> None:
        """Raise ValueError if a range of the means or precisions is invalid."""
        _check_ranges("mean", self.mean, -math.inf, "low ≤ high")
        _check_ranges("precision", self.precision, 0.0, "0 < low ≤ high")

    def means(self, layout: Layout) -> tuple[Tensor, Tensor]:
        """Return the lower and upper means (P,), in the order of θ.

        Raises ValueError for names that are not in the layout.
        """
        return _resolve_limits("mean", self.mean, layout)

    def precisions(self, layout: Layout) -> tuple[Tensor, Tensor]:
        """Return the lower and upper precisions (P,), in the order of θ.

        Raises ValueError for names that are not in the layout.
        """
        return _resolve_limits("precision", self.precision, layout)

    def centre(self, layout: Layout) -> Gaussian:
        """Return the prior in the middle of the box.

        Its means are the arithmetic middle of their limits, its precisions the geometric one.
        """
        low_mean, high_mean = self.means(layout)
        low, high = self.precisions(layout)
        return _make_gaussian(layout, (low_mean + high_mean) / 2, (low * high).sqrt())

    def sample(self, layout: Layout, generator: torch.Generator | None = None) -> Gaussian:
        """Draw a prior of the box at random.

        Each mean is uniform between its limits, and the precision of each layer is log-uniform.
        generator: of the random numbers; None for torch's own.
        """
        low_mean, high_mean = self.means(layout)
        low, high = self.precisions(layout)
        # A uniform number for each mean, and one for the precisions of each layer.
        u_mean = torch.rand(len(low_mean), dtype=torch.float64, generator=generator)
        u_precision = torch.zeros_like(low_mean)
        for names in layout.names_by_layer.values():
            u_layer = torch.rand((), dtype=torch.float64, generator=generator)
            for name in names:
                u_precision[layout.positions[name]] = u_layer
        mean = low_mean + u_mean * (high_mean - low_mean)
        return _make_gaussian(layout, mean, low * (high / low) ** u_precision)


def _check_ranges(
    name: str, setting: Range | Mapping[str, Range], least: float, condition: str
) -> None:
    """Raise ValueError unless every range of a setting is a valid pair (low, high).

    A pair is valid if least < low ≤ high < ∞. name: the name of the setting, for the error.
    condition: the condition on a pair in words, for the error.
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


def _resolve_limits(
    name: str, setting: Range | Mapping[str, Range], layout: Layout
) -> tuple[Tensor, Tensor]:
    """Return the lower and the upper values (P,) of a setting, in the order of θ.

    name: the name of the setting, for errors. Raises as `resolve_setting`.
    """
    if isinstance(setting, Mapping):
        low = {key: pair[0] for key, pair in setting.items()}
        high = {key: pair[1] for key, pair in setting.items()}
        return resolve_setting(name, low, layout), resolve_setting(name, high, layout)
    low_number, high_number = setting
    return (
        resolve_setting(name, low_number, layout),
        resolve_setting(name, high_number, layout),
    )


def _make_gaussian(layout: Layout, mean: Tensor, precision: Tensor) -> Gaussian:
    """Return the Gaussian prior with these means and precisions (P,), in the order of θ."""
    return Gaussian(dict(layout.unpack(precision)), dict(layout.unpack(mean)))
