"""Predictives as curves and bands: along one input, at one input, under many priors."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ssla._checks import check_level as checked_level
from ssla._checks import in_plain_torch
from ssla.data import as_tensor
from ssla.diagnostics.credal_sets import Credal
from ssla.diagnostics.sensitivities import Sensitivity
from ssla.plots.canvas import GREEN, PURPLE, add_legend, open_axes
from ssla.predictive import Predictive

STYLES = ("--", ":", "-.")
DRAWN_QUANTILES = (0.0005, 0.9995)  # between them a density is drawn


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
    """Draw mean and central intervals along one input, and return the Axes.

    x: (N,) or (N, 1), the inputs of the predictive, in any order.
    data: (x, y) of rows to draw as dots; None: no dots.
    levels: the probabilities of the intervals.
    ax: the Axes to draw on; None: a new figure. title: of the Axes; None: no title.

    Raises TypeError unless y is one ordered target, and ValueError for an x that does not fit.
    """
    check_ordered(predictive, "bands")
    x_values = _read_one_input(x, predictive.law.rows)
    ax, color = open_axes(ax, title)
    order = np.argsort(x_values, kind="stable")
    sorted_x = x_values[order]

    # The widest interval is drawn first, below the others, and is the faintest.
    widest_first = sorted(map(checked_level, levels), reverse=True)
    shades = np.linspace(0.2, 0.6, len(levels)) if len(levels) > 1 else [0.35]
    for level, shade in zip(widest_first, shades, strict=True):
        low, high = (
            end.numpy()[order] for end in _convert_to_double(predictive.interval(level)).unbind(-1)
        )
        ax.fill_between(
            sorted_x, low, high, color=color.tint(float(shade)), lw=0, label=f"{level:.0%}"
        )

    mean = _convert_to_double(predictive.mean).numpy()
    ax.plot(sorted_x, mean[order], color=color.ink, lw=1.6, label="mean")
    if data is not None:
        ax.scatter(
            *(_convert_to_double(part).flatten() for part in data),
            s=9,
            color=color.ink,
            alpha=0.55,
            lw=0,
            label="data",
        )

    ax.set(xlabel="x", ylabel="y")
    add_legend(ax, ncols=2)
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
    """Draw the predictive density at one input, with its highest-density region; return the Axes.

    predictives: one, or several by their names in the legend; the region is that of the last.
    row: the input among those of each predictive. level: the probability of the region. points: at
    how many y a density is drawn; counts are drawn at whole numbers in the same range. ax: the Axes
    to draw on; None: a new figure.

    Raises TypeError unless y is one ordered target, and ValueError for a wrong row or level.
    """
    named = name_predictives(predictives, "density")
    for predictive in named.values():
        check_ordered(predictive, "density")
        check_row(row, predictive.law.rows)
    checked_level(level)
    ax, color = open_axes(ax)
    counts = any(predictive.kind == "count" for predictive in named.values())
    y = _choose_drawn_values(list(named.values()), row, points, counts=counts)
    last = list(named)[-1]
    for i, (name, predictive) in enumerate(named.items()):
        # All rows have the same y (k,), because `log_prob` takes (N, k).
        curve = _convert_to_double(predictive.log_prob(y.expand(predictive.law.rows, -1)))[
            row
        ].exp()
        style = {"ls": STYLES[i % len(STYLES)], "color": color.other, "lw": 1.5}
        if name == last:
            style = {"ls": "-", "color": color.main, "lw": 2}
        ax.plot(y, curve, label=name, **style)

    # `curve` is now that of the last predictive. The legend has its region once.
    region = named[last].hdr(level)
    for k, (start, stop) in enumerate(_list_intervals(region, row)):
        label = f"{level:.0%} region" if k == 0 else None
        inside = (y >= start) & (y <= stop)
        ax.fill_between(
            y[inside], 0, curve[inside], color=color.tint(0.35), lw=0, label=label, zorder=0
        )

    ax.set_ylim(bottom=0)
    ax.set(xlabel="y", ylabel="probability" if counts else "density")
    add_legend(ax)
    return ax


@in_plain_torch
def increments(predictive: Predictive, row: int = 0, *, points: int = 200, ax: Any = None) -> Any:
    """Draw the three increments of the log density at one input, along y, and return the Axes.

    Each is drawn less its value at the mode.

    The likelihood falls where y contradicts the data, and the prior where y needs unlikely weights.
    The curvature is the change of the log determinant. Their sum is the log density up to a
    constant.

    row: the input among those of the predictive. points: at how many y they are drawn; counts are
    drawn at whole numbers in the same range. ax: the Axes to draw on; None: a new figure. Raises
    TypeError unless y is one ordered target, and ValueError for a wrong row.
    """
    check_ordered(predictive, "increments")
    check_row(row, predictive.law.rows)
    ax, color = open_axes(ax)
    y = _choose_drawn_values([predictive], row, points, counts=predictive.kind == "count")

    # The values at the mode are computed with the others, as the last ones.
    mode = _convert_to_double(predictive.mode)[row]
    y_and_mode = torch.cat([y, mode[None]])
    terms = predictive.increments(y_and_mode.expand(predictive.law.rows, -1)).map(
        lambda term: _convert_to_double(term)[row]
    )
    curves: list[tuple[str, Tensor, Any, str]] = [
        ("likelihood", terms.likelihood, color.other, "--"),
        ("prior", terms.prior, GREEN, "-."),
        ("curvature", terms.curvature, PURPLE, ":"),
        ("sum", terms.total, color.ink, "-"),
    ]
    for name, values, shade, style in curves:
        ax.plot(y, values[:-1] - values[-1], color=shade, ls=style, lw=1.7, label=name)
    ax.axvline(float(mode), color=color.faint, lw=0.8, zorder=0)
    ax.set(xlabel="y", ylabel="log density − at mode")
    add_legend(ax)
    return ax


@in_plain_torch
def prior_bands(sensitivity: Sensitivity, x: Any, *, level: float = 0.9, ax: Any = None) -> Any:
    """Draw mean and central interval along one input for every prior; return the Axes.

    The colour is faint for the first prior and strong for the last.

    sensitivity: of N inputs. x: (N,) or (N, 1), these inputs in any order. level: the probability
    of the intervals. ax: the Axes to draw on; None: a new figure. Raises TypeError unless y is one
    ordered target, and ValueError for an x that does not fit.
    """
    x_values = _read_one_input(x, sensitivity.baseline.law.rows)
    ax, color = open_axes(
        ax, f"means and {checked_level(level):.0%} intervals ({sensitivity.convention})"
    )
    order = np.argsort(x_values, kind="stable")
    sorted_x = x_values[order]
    count = len(sensitivity.names)
    for i, (name, predictive) in enumerate(
        zip(sensitivity.names, sensitivity.predictives, strict=True)
    ):
        check_ordered(predictive, "prior_bands")
        shade = color.tint(0.35 + 0.65 * i / max(count - 1, 1))
        # A legend has room for six names; of more, the first and the last are named.
        label = name if count <= 6 or i in (0, count - 1) else None
        mean = _convert_to_double(predictive.mean).numpy()
        ax.plot(sorted_x, mean[order], color=shade, lw=1.8, label=label)
        for end in _convert_to_double(predictive.interval(level)).unbind(-1):
            ax.plot(sorted_x, end.numpy()[order], color=shade, lw=1, ls="--")

    ax.set(xlabel="x", ylabel="y")
    add_legend(ax)
    return ax


@in_plain_torch
def p_box(
    credal: Credal, row: int = 0, *, level: float = 0.9, points: int = 60, ax: Any = None
) -> Any:
    """Draw the bounds of the distribution function at one input, and return the Axes.

    The smallest interval whose probability is at least `level` under every member is drawn too.

    row: the input among those of `credal`. points: at how many y they are drawn. ax: the Axes to
    draw on; None: a new figure. Raises ValueError for a wrong row or level.
    """
    check_row(row, credal.members.rows)
    checked_level(level)
    ax, color = open_axes(ax)

    # Functions are drawn between these quantiles of all priors; the numbers are a guess.
    ends = credal.quantile([0.002, 0.998])
    y = torch.linspace(
        float(ends.lower[row, 0]), float(ends.upper[row, 1]), points, dtype=torch.float64
    )
    lower, upper = (part[row] for part in credal.cdf(y.expand(credal.members.rows, -1)))
    ax.fill_between(
        y, lower, upper, color=color.tint(0.35), lw=0, label=f"all {credal.member_noun}s"
    )
    for bound in (lower, upper):
        ax.plot(y, bound, color=color.main, lw=1.6)
    low, high = credal.interval(level)[row].tolist()

    # The interval is a bar below both functions.
    ax.plot(
        [low, high],
        [-0.05, -0.05],
        color=color.other,
        lw=4,
        solid_capstyle="butt",
        label=f"{level:.0%} under every {credal.member_noun}",
    )
    ax.set_ylim(-0.1, 1.32)  # room for the legend
    ax.set_yticks([0, 0.25, 0.5, 0.75, 1])
    ax.set(xlabel="y", ylabel="P(Y ≤ y)")
    add_legend(ax, loc="upper left")
    return ax


# --- helpers ---------------------------------------------------------------------------------


def name_predictives(
    predictives: Predictive | Mapping[str, Predictive], name: str
) -> dict[str, Predictive]:
    """Return predictives by their names. name: that of a single one, which has none.

    Raises ValueError if there are none.
    """
    named = {name: predictives} if isinstance(predictives, Predictive) else dict(predictives)
    if not named:
        raise ValueError("predictives has no entry. Give a Predictive, or a dict of them by name.")
    return named


def check_ordered(predictive: Predictive, name: str) -> None:
    """Raise TypeError unless the target is one number or count.

    name: the picture, for the message.
    """
    if predictive.kind not in ("scalar", "count"):
        use = "reliability" if predictive.kind == "class" else "one target at a time"
        raise TypeError(
            f"plots.{name} is for one ordered target, but the predictive is of kind "
            f"{predictive.kind!r}. Use {use}."
        )


def check_row(row: int, rows: int) -> None:
    """Raise ValueError unless `row` is one of `rows` inputs, from 0 on or backwards from −1."""
    if not -rows <= row < rows:
        raise ValueError(
            f"row must be one of the {rows} inputs, from 0 to {rows - 1}, but is {row}."
        )


def _read_one_input(x: Any, rows: int) -> Any:
    """Return x, (N,) or (N, 1), as a NumPy array (N,) of floats.

    rows: the number N of inputs. Raises ValueError for another number of entries.
    """
    values = _convert_to_double(x)
    if values.numel() != rows:
        raise ValueError(
            f"x must hold one number for each of the {rows} inputs, but has shape "
            f"{tuple(values.shape)}."
        )
    return values.flatten().numpy()


def _convert_to_double(values: Any) -> Tensor:
    """Return a tensor or an array as a tensor of the same shape, in float64 on the CPU."""
    return as_tensor(values).to("cpu", torch.float64)


def _choose_drawn_values(
    predictives: list[Predictive], row: int, points: int, *, counts: bool
) -> Tensor:
    """Return the y (k,) at which the densities of one row are drawn.

    The y are `points` numbers between the quantiles DRAWN_QUANTILES of all predictives. counts:
    whether y are counts; the numbers are then rounded, each once.
    """
    quantiles = torch.tensor(DRAWN_QUANTILES)
    ends = torch.stack([_convert_to_double(p.icdf(quantiles))[row] for p in predictives])
    low = float(ends[:, 0].min())
    high = float(ends[:, 1].max())
    y = torch.linspace(low, high, points, dtype=torch.float64)
    return y.round().unique() if counts else y


def _list_intervals(region: Any, row: int) -> list[tuple[float, float]]:
    """Return the intervals of one row of a highest-density region as pairs (start, stop).

    A row with fewer intervals than others is padded with NaN, which is left out.
    """
    pairs = zip(region.lower[row].tolist(), region.upper[row].tolist(), strict=True)
    return [(start, stop) for start, stop in pairs if not math.isnan(start)]
