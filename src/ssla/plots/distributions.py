"""Predictives as curves and bands: along one input, at one input, under many priors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ssla._checks import in_plain_torch
from ssla._checks import level as checked_level
from ssla.data import as_tensor
from ssla.diagnostics.credal_sets import Credal
from ssla.diagnostics.sensitivities import Sensitivity
from ssla.plots.canvas import GREEN, PURPLE, axes, legend
from ssla.predictive import Predictive

STYLES = ("--", ":", "-.")
RANGE = (0.0005, 0.9995)  # quantiles between which a density is drawn


@in_plain_torch
def bands(
    predictive: Predictive,
    x: Any,
    data: tuple[Any, Any] | None = None,
    *,
    levels: Sequence[float] = (0.5, 0.9, 0.95),
    ax: Any = None,
    title: str | None = None,
) -> Any:
    """Mean and central intervals along one input.

    x (N,) or (N, 1), the inputs of the predictive; data = (x, y) as dots.
    """
    ordered(predictive, "bands")
    place = _line(x, predictive.law.rows)
    ax, color = axes(ax, title)
    order = np.argsort(place, kind="stable")
    shades = np.linspace(0.2, 0.6, len(levels)) if len(levels) > 1 else [0.35]
    for level, shade in zip(sorted(map(checked_level, levels), reverse=True), shades, strict=True):
        low, high = (end.numpy()[order] for end in _float(predictive.interval(level)).unbind(-1))
        ax.fill_between(
            place[order], low, high, color=color.tint(float(shade)), lw=0, label=f"{level:.0%}"
        )
    ax.plot(
        place[order], _float(predictive.mean).numpy()[order], color=color.ink, lw=1.6, label="mean"
    )
    if data is not None:
        ax.scatter(
            *(_float(part).flatten() for part in data),
            s=9,
            color=color.ink,
            alpha=0.55,
            lw=0,
            label="data",
        )
    ax.set(xlabel="x", ylabel="y")
    legend(ax, ncols=2)
    return ax


@in_plain_torch
def density(
    predictives: Predictive | Mapping[str, Predictive],
    row: int = 0,
    *,
    level: float = 0.9,
    points: int = 400,
    ax: Any = None,
) -> Any:
    """The predictive density at one input, with its highest-density region.

    Of several, by name, the region of the last.
    """
    named = {"density": predictives} if isinstance(predictives, Predictive) else dict(predictives)
    if not named:
        raise ValueError("predictives has no entry. Give a Predictive, or a dict of them by name.")
    for predictive in named.values():
        ordered(predictive, "density")
        checked_row(row, predictive.law.rows)
    checked_level(level)
    ax, color = axes(ax)
    counts = any(predictive.kind == "count" for predictive in named.values())
    y = _grid(list(named.values()), row, points, counts)
    last = list(named)[-1]
    for i, name in enumerate(named):
        curve = _at(named[name], y, row).exp()
        style = "-" if name == last else STYLES[i % len(STYLES)]
        ax.plot(
            y,
            curve,
            ls=style,
            color=color.main if name == last else color.other,
            lw=2 if name == last else 1.5,
            label=name,
        )
    region = named[last].hdr(level)
    for k, (start, stop) in enumerate(_intervals(region, row)):
        label = None if k else f"{level:.0%} region"
        inside = (y >= start) & (y <= stop)
        ax.fill_between(
            y[inside], 0, curve[inside], color=color.tint(0.35), lw=0, label=label, zorder=0
        )
    ax.set_ylim(bottom=0)
    ax.set(xlabel="y", ylabel="probability" if counts else "density")
    legend(ax)
    return ax


@in_plain_torch
def increments(predictive: Predictive, row: int = 0, *, points: int = 200, ax: Any = None) -> Any:
    """The three increments of the log density at one input, along y, each less its value at the
    mode.

    The likelihood falls where y contradicts the data, the prior where y needs unlikely weights; the
    curvature is the change of the log determinant. Their sum is the log density up to a constant.
    """
    ordered(predictive, "increments")
    checked_row(row, predictive.law.rows)
    ax, color = axes(ax)
    y = _grid([predictive], row, points, predictive.kind == "count")
    mode = _float(predictive.mode)[row]
    both = torch.cat([y, mode[None]])
    found = predictive.increments(both.expand(predictive.law.rows, -1)).map(
        lambda part: _float(part)[row]
    )
    parts: dict[str, tuple[Tensor, Any, str]]
    parts = {
        "likelihood": (found.likelihood, color.other, "--"),
        "prior": (found.prior, GREEN, "-."),
    }
    parts |= {"curvature": (found.curvature, PURPLE, ":"), "sum": (found.total, color.ink, "-")}
    for name, (values, shade, style) in parts.items():
        ax.plot(y, values[:-1] - values[-1], color=shade, ls=style, lw=1.7, label=name)
    ax.axvline(float(mode), color=color.faint, lw=0.8, zorder=0)
    ax.set(xlabel="y", ylabel="log density − at mode")
    legend(ax)
    return ax


@in_plain_torch
def prior_bands(sensitivity: Sensitivity, x: Any, *, level: float = 0.9, ax: Any = None) -> Any:
    """Mean and central interval along one input for every prior, from faint (the first) to
    strong (the last).
    """
    place = _line(x, sensitivity.baseline.law.rows)
    ax, color = axes(
        ax, f"means and {checked_level(level):.0%} intervals ({sensitivity.convention})"
    )
    order = np.argsort(place, kind="stable")
    count = len(sensitivity.names)
    for i, (name, predictive) in enumerate(
        zip(sensitivity.names, sensitivity.predictives, strict=True)
    ):
        ordered(predictive, "prior_bands")
        shade = color.tint(0.35 + 0.65 * i / max(count - 1, 1))
        label = name if count <= 6 or i in (0, count - 1) else None
        ax.plot(
            place[order], _float(predictive.mean).numpy()[order], color=shade, lw=1.8, label=label
        )
        for end in _float(predictive.interval(level)).unbind(-1):
            ax.plot(place[order], end.numpy()[order], color=shade, lw=1, ls="--")
    ax.set(xlabel="x", ylabel="y")
    legend(ax)
    return ax


@in_plain_torch
def p_box(
    credal: Credal, row: int = 0, *, level: float = 0.9, points: int = 60, ax: Any = None
) -> Any:
    """Lower and upper distribution function of one input, with the smallest interval that every
    prior gives that level.
    """
    checked_row(row, credal.members.rows)
    checked_level(level)
    ax, color = axes(ax)
    ends = credal.quantile([0.002, 0.998])
    y = torch.linspace(
        float(ends.lower[row, 0]), float(ends.upper[row, 1]), points, dtype=torch.float64
    )
    lower, upper = (part[row] for part in credal.cdf(y.expand(credal.members.rows, -1)))
    ax.fill_between(y, lower, upper, color=color.tint(0.35), lw=0, label="all priors")
    for bound in (lower, upper):
        ax.plot(y, bound, color=color.main, lw=1.6)
    a, b = credal.interval(level)[row].tolist()
    ax.plot(
        [a, b],
        [-0.05, -0.05],
        color=color.other,
        lw=4,
        solid_capstyle="butt",
        label=f"{level:.0%} under every prior",
    )
    ax.set_ylim(-0.1, 1.32)  # room for the legend
    ax.set_yticks([0, 0.25, 0.5, 0.75, 1])
    ax.set(xlabel="y", ylabel="P(Y ≤ y)")
    legend(ax, loc="upper left")
    return ax


# --- what the functions share ----------------------------------------------------------------


def ordered(predictive: Predictive, name: str) -> None:
    """TypeError unless the target is one number on a line."""
    if predictive.kind not in ("scalar", "count"):
        use = "reliability" if predictive.kind == "class" else "one target at a time"
        raise TypeError(
            f"plots.{name} is for one ordered target, but the predictive is of kind "
            f"{predictive.kind!r}. Use {use}."
        )


def checked_row(row: int, rows: int) -> None:
    if not -rows <= row < rows:
        raise ValueError(
            f"row must be one of the {rows} inputs, from 0 to {rows - 1}, but is {row}."
        )


def _line(x: Any, rows: int) -> Any:
    place = _float(as_tensor(x))
    if place.numel() != rows:
        raise ValueError(
            f"x must hold one number for each of the {rows} inputs, but has shape "
            f"{tuple(place.shape)}."
        )
    return place.flatten().numpy()


def _float(values: Any) -> Tensor:
    return as_tensor(values).to("cpu", torch.float64)


def _grid(predictives: list[Predictive], row: int, points: int, counts: bool) -> Tensor:
    ends = torch.stack([_float(p.icdf(torch.tensor(RANGE)))[row] for p in predictives])
    low, high = float(ends[:, 0].min()), float(ends[:, 1].max())
    y = torch.linspace(low, high, points, dtype=torch.float64)
    return y.round().unique() if counts else y


def _at(predictive: Predictive, y: Tensor, row: int) -> Tensor:
    return _float(predictive.log_prob(y.expand(predictive.law.rows, -1)))[row]


def _intervals(region: Any, row: int) -> list[tuple[float, float]]:
    pairs = zip(region.lower[row].tolist(), region.upper[row].tolist(), strict=True)
    return [(start, stop) for start, stop in pairs if start == start]  # NaN is padding
