"""Plots of predictives, with matplotlib (`pip install 'ssla[plots]'`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from ssla.data import as_tensor
from ssla.predictive import Predictive
from ssla.prior_sets.credal_sets import Credal
from ssla.prior_sets.sensitivities import Sensitivity

BAND = "#2f6db5"
OTHER = "#d1651f"
DOTS = "#333333"


def bands(
    predictive: Predictive,
    x: Any,
    data: tuple[Any, Any] | None = None,
    *,
    levels: Sequence[float] = (0.5, 0.9, 0.95),
    ax: Any = None,
    title: str | None = None,
) -> Any:
    """Mean and central intervals along one input.  x (N,) or (N, 1), the inputs of the predictive; data = (x, y) as dots."""
    ax = _axes(ax)
    place = as_tensor(x).flatten().numpy()
    order = np.argsort(place)
    shades = np.linspace(0.16, 0.55, len(levels)) if len(levels) > 1 else [0.3]
    for level, shade in zip(sorted(levels, reverse=True), shades, strict=True):
        low, high = predictive.interval(level).double().unbind(-1)
        color = tuple(1 - shade * (1 - c) for c in (0.18, 0.43, 0.71))  # opaque, so that the legend has the colours of the plot
        ax.fill_between(place[order], low.numpy()[order], high.numpy()[order], color=color, lw=0, label=f"{level:.0%}")
    ax.plot(place[order], predictive.mean.double().numpy()[order], color=BAND, lw=1.8, label="mean")
    if data is not None:
        ax.scatter(as_tensor(data[0]).flatten(), as_tensor(data[1]).flatten(), s=7, color=DOTS, alpha=0.6, lw=0, label="data")
    if title:
        ax.set_title(title)
    return ax


def density(predictives: dict[str, Predictive], row: int = 0, *, level: float = 0.9, points: int = 400, ax: Any = None) -> Any:
    """The predictive densities of one input, by name; the last one's highest-density region is marked."""
    ax = _axes(ax)
    wide = [p.icdf(torch.tensor([0.0005, 0.9995]))[row].double() for p in predictives.values()]
    low, high = min(float(w[0]) for w in wide), max(float(w[1]) for w in wide)
    y = torch.linspace(low, high, points, dtype=torch.float64)
    styles = ["--", ":", "-.", "-"]
    curve = y
    for i, (name, predictive) in enumerate(predictives.items()):
        curve = predictive.log_prob(y.expand(predictive.mean.shape[0], -1))[row].double().exp()
        last = i == len(predictives) - 1
        ax.plot(y, curve, ls="-" if last else styles[i % 3], color=BAND if last else OTHER, lw=2 if last else 1.4, label=name)
    region = next(reversed(predictives.values())).hdr(level)
    for start, stop in zip(region.lower[row].tolist(), region.upper[row].tolist(), strict=True):
        if start == start:  # not padding
            inside = (y >= start) & (y <= stop)
            ax.fill_between(y[inside], 0, curve[inside], color=BAND, alpha=0.18, lw=0)
    ax.set_ylim(bottom=0)
    ax.set_ylabel("density")
    ax.legend(frameon=False, fontsize=8)
    return ax


def _axes(ax: Any) -> Any:
    if ax is not None:
        return ax
    try:
        import matplotlib.pyplot as plt
    except ImportError:
        raise ImportError("Plots need matplotlib: pip install 'ssla[plots]'.") from None
    return plt.subplots(figsize=(7, 4))[1]


def prior_bands(sensitivity: Sensitivity, x: Any, *, level: float = 0.9, ax: Any = None) -> Any:
    """Mean and central interval along one input for every prior, from light (the first) to dark (the last)."""
    ax = _axes(ax)
    place = as_tensor(x).flatten().numpy()
    order = np.argsort(place)
    count = len(sensitivity.names)
    for i, (name, predictive) in enumerate(zip(sensitivity.names, sensitivity.predictives, strict=True)):
        shade = 0.25 + 0.75 * i / max(count - 1, 1)
        color = tuple(1 - shade * (1 - c) for c in (0.18, 0.43, 0.71))
        low, high = predictive.interval(level).double().unbind(-1)
        label = name if count <= 6 or i in (0, count - 1) else None
        ax.plot(place[order], predictive.mean.double().numpy()[order], color=color, lw=1.6, label=label)
        ax.plot(place[order], low.numpy()[order], color=color, lw=0.9, ls="--")
        ax.plot(place[order], high.numpy()[order], color=color, lw=0.9, ls="--")
    ax.legend(frameon=False, fontsize=8)
    ax.set_title(f"means and {level:.0%} intervals ({sensitivity.convention})", fontsize=10)
    return ax


def p_box(credal: Credal, row: int = 0, *, points: int = 60, ax: Any = None) -> Any:
    """Lower and upper distribution function of one input, with the smallest 90% interval of the set below."""
    ax = _axes(ax)
    ends = credal.quantile([0.002, 0.998])
    low, high = float(ends.lower[row, 0]), float(ends.upper[row, 1])
    y = torch.linspace(low, high, points, dtype=torch.float64)
    lower, upper = credal.cdf(y.expand(credal.members.rows, -1))
    ax.fill_between(y, lower[row], upper[row], color=BAND, alpha=0.25, lw=0, label="between lower and upper P(Y ≤ y)")
    ax.plot(y, lower[row], color=BAND, lw=1.6)
    ax.plot(y, upper[row], color=BAND, lw=1.6)
    a, b = credal.interval(0.9)[row].tolist()
    ax.plot([a, b], [-0.04, -0.04], color=OTHER, lw=3, solid_capstyle="butt", label="90% under every prior")
    ax.set_ylim(-0.08, 1.02)
    ax.set_ylabel("P(Y ≤ y)")
    ax.legend(frameon=False, fontsize=8, loc="upper left", bbox_to_anchor=(0.0, -0.1))
    return ax
