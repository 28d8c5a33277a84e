"""Pictures of calibration: predictions against observations, with the range in which exact
calibration would stay, by binomial probabilities.

Bands hold for each level or bin by itself, and for independent rows; leave-one-out rows are nearly
so.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ssla._checks import check_level as checked_level
from ssla._checks import in_plain_torch
from ssla.data import as_tensor, squeeze_column
from ssla.diagnostics.loo import LeaveOneOut
from ssla.plots.canvas import Palette, add_legend, open_axes
from ssla.plots.distributions import check_ordered
from ssla.predictive import Predictive
from ssla.predictive.cavities import rank_targets

LEVELS = 39  # of a calibration curve


class Ranks(NamedTuple):
    """The rank of each y in its predictive, and how often it counts."""

    lower: Tensor  # P(Y < y) (n,)
    upper: Tensor  # P(Y ≤ y) (n,)
    weights: Tensor  # (n,)

    @property
    def size(self) -> int:
        """Return the number of rows, counted by their weights."""
        return round(float(self.weights.sum()))

    def share(self, chosen: Tensor) -> float:
        """Return the weight of the chosen rows (n,) bool as a share of all."""
        return float((self.weights * chosen).sum() / self.weights.sum())

    def inside(self, levels: Any) -> list[float]:
        """Return the share of y inside the central interval of each level."""
        tails = [(1 - float(level)) / 2 for level in levels]
        return [self.share((self.upper >= tail) & (self.lower <= 1 - tail)) for tail in tails]

    def heights(self, bins: int) -> Tensor:
        """Return the heights of the PIT histogram (bins,), which are 1 where it is flat.

        A count is spread over lower … upper.
        """
        edges = torch.linspace(0, 1, bins + 1, dtype=torch.float64)
        # A number has no width; it gets a small one below it, so that it belongs to one bin.
        width = (self.upper - self.lower).clamp_min(1e-12)
        is_number = self.upper - self.lower < 1e-12
        start = torch.where(is_number, self.upper - width, self.lower).clamp_min(0)
        # the share of each row below each edge (n, bins + 1)
        below = ((edges - start[:, None]) / width[:, None]).clamp(0, 1)
        below[:, 0] = 0.0
        below[:, -1] = 1.0
        by_bin = (self.weights[:, None] * below.diff(dim=1)).sum(0)
        heights: Tensor = by_bin / self.weights.sum() * bins
        return heights


@in_plain_torch
def calibration(
    predictive: Predictive | LeaveOneOut,
    y: Any = None,
    *,
    target: int = 0,
    confidence: float = 0.95,
    ax: Any = None,
) -> Any:
    """Draw the share of y inside central intervals against their level, and return the Axes.

    Above the diagonal, intervals are too wide.

    predictive: of held-out rows, with their y; or `posterior.loo()`.  target: which of D targets.
    confidence: of the band around the diagonal. Intervals of counts cover more than their level,
    because counts are discrete.
    """
    ranked = _rank_targets(predictive, y, target, "calibration")
    ax, color = open_axes(ax)
    levels = np.linspace(0, 1, LEVELS + 2)[1:-1]
    ranges = [binomial_range(ranked.size, float(level), confidence) for level in levels]
    low, high = np.array(ranges).T / ranked.size
    _draw_diagonal(ax, color)
    ax.fill_between(
        levels,
        low,
        high,
        color=color.tint(0.25),
        lw=0,
        label=f"{confidence:.0%} if calibrated",
        zorder=0,
    )
    ax.plot(
        levels,
        ranked.inside(levels),
        color=color.main,
        lw=2,
        label=f"{_name_rows(predictive)}, {ranked.size:,} rows",
    )
    ax.set(xlim=(0, 1), ylim=(0, 1), xlabel="level of the interval", ylabel="share of y inside")
    add_legend(ax, loc="upper left")
    return ax


@in_plain_torch
def pit(
    predictive: Predictive | LeaveOneOut,
    y: Any = None,
    *,
    bins: int = 10,
    target: int = 0,
    confidence: float = 0.95,
    ax: Any = None,
) -> Any:
    """Draw the histogram of P(Y ≤ y), which is flat if predictions are calibrated; return the Axes.

    A U: predictions are too narrow; a hump: too wide; a slope: biased.

    A count is spread over P(Y < y) … P(Y ≤ y), which makes the histogram smoother than the band
    expects. Arguments as for `calibration`.
    """
    _check_bins(bins, 2)
    ranked = _rank_targets(predictive, y, target, "pit")
    ax, color = open_axes(ax)
    edges, heights = torch.linspace(0, 1, bins + 1, dtype=torch.float64), ranked.heights(bins)
    low, high = (
        end * bins / ranked.size for end in binomial_range(ranked.size, 1 / bins, confidence)
    )
    style = {"align": "edge", "color": color.tint(0.6), "edgecolor": color.paper, "lw": 1}
    ax.bar(edges[:-1].numpy(), heights.numpy(), 1 / bins, label=_name_rows(predictive), **style)
    ax.axhspan(
        low,
        high,
        facecolor="none",
        edgecolor=color.ink,
        ls="--",
        lw=1,
        label=f"{confidence:.0%} if calibrated",
    )
    ax.axhline(1, color=color.ink, lw=1)
    ax.set(
        xlim=(0, 1),
        ylim=(0, 1.35 * max(float(heights.max()), high)),
        xlabel="P(Y ≤ y)",
        ylabel="density",
    )
    add_legend(ax, ncols=2, loc="upper center")
    return ax


@in_plain_torch
def reliability(
    predictive: Predictive, y: Any, *, bins: int = 10, confidence: float = 0.95, ax: Any = None
) -> Any:
    """Draw accuracy against the probability of the most probable class, in bins of that
    probability, with the rows in each bin; return the Axes.

    Below the diagonal, predictions are too sure. The bars are ranges in which the accuracy of a
    calibrated model would be. TypeError unless the target is a class.
    """
    if predictive.kind != "class":
        raise TypeError(
            f"plots.reliability is for classes, but the predictive is of kind {predictive.kind!r}. "
            "Use calibration."
        )
    _check_bins(bins, 1)
    value = _check_one_for_each_row(
        squeeze_column(as_tensor(y)).to("cpu").long(), predictive, "one class"
    )
    ax, color = open_axes(ax)
    # Rows are put into bins by the probability of their class; empty bins are left out.
    confidences, guess = predictive.law.probs.max(1)
    hit = (guess == value).double()
    bin_of_row = (confidences * bins).long().clamp(0, bins - 1)
    counts = torch.bincount(bin_of_row, minlength=bins)
    full = counts.nonzero().flatten()
    mean = torch.stack([confidences[bin_of_row == b].mean() for b in full])
    accuracy = torch.stack([hit[bin_of_row == b].mean() for b in full])
    # A calibrated model is right as often as it says: a binomial with that probability.
    ranges = [
        binomial_range(int(n), float(p), confidence)
        for n, p in zip(counts[full], mean, strict=True)
    ]
    ends = np.array(ranges).T / counts[full].numpy()
    _draw_diagonal(ax, color)
    _draw_bin_sizes(ax, color, counts)
    ax.vlines(
        mean, *ends, color=color.tint(0.55), lw=5, label=f"{confidence:.0%} if calibrated", zorder=2
    )
    ax.plot(mean, accuracy, "o-", color=color.other, lw=1.6, ms=5, label="accuracy", zorder=3)
    ax.set(
        xlim=(0, 1), ylim=(0, 1.02), xlabel="probability of the predicted class", ylabel="accuracy"
    )
    add_legend(ax, loc="upper left")
    return ax


@in_plain_torch
def intervals(predictive: Predictive, y: Any, *, level: float = 0.9, ax: Any = None) -> Any:
    """Draw central intervals, sorted by width, and y, both less the mean; return the Axes.

    Where intervals are wider, y should be further off. TypeError unless y is one ordered target.
    """
    check_ordered(predictive, "intervals")
    value = _check_one_for_each_row(
        squeeze_column(as_tensor(y)).to("cpu", torch.float64), predictive, "one"
    )
    ends, mean = predictive.law.interval(checked_level(level)), predictive.law.mean
    order = (ends[:, 1] - ends[:, 0]).argsort(stable=True)
    low, high, off = (part[order] for part in (ends[:, 0] - mean, ends[:, 1] - mean, value - mean))
    inside = (off >= low) & (off <= high)
    ax, color = open_axes(
        ax, f"{float(inside.double().mean()):.1%} of y inside {level:.0%} intervals"
    )
    rank = torch.arange(len(off), dtype=torch.float64) + 1
    ax.fill_between(rank, low, high, step="mid", color=color.tint(0.3), lw=0, label=f"{level:.0%}")
    size = float(np.clip(2500 / len(off), 3, 16))
    ax.scatter(rank[inside], off[inside], s=size, color=color.ink, alpha=0.6, lw=0, label="inside")
    ax.scatter(
        rank[~inside],
        off[~inside],
        s=1.6 * size,
        marker="x",
        lw=1.2,
        color=color.other,
        label="outside",
    )
    ax.set(xlabel="rows, by width of the interval", ylabel="y − mean")
    add_legend(ax, ncols=3, loc="upper left")
    low_end, high_end = ax.get_ylim()
    ax.set_ylim(low_end, high_end + 0.14 * (high_end - low_end))
    return ax


def binomial_range(n: int, p: float, confidence: float) -> tuple[int, int]:
    """Return the smallest and the largest count of n trials with probability p, such that at most
    (1 − confidence)/2 of the probability is beyond either.
    """
    tail = (1 - checked_level(confidence)) / 2
    if p <= 0 or p >= 1:
        return (0, 0) if p <= 0 else (n, n)
    spread = 10 * (n * p * (1 - p)) ** 0.5 + 40  # all but 1e-20 of the probability
    k = torch.arange(
        max(int(n * p - spread), 0), min(int(n * p + spread) + 1, n) + 1, dtype=torch.float64
    )
    size = torch.tensor(float(n), dtype=torch.float64)
    log = (
        torch.lgamma(size + 1)
        - torch.lgamma(k + 1)
        - torch.lgamma(size - k + 1)
        + k * np.log(p)
        + (size - k) * np.log1p(-p)
    )
    mass = (log - log.max()).exp()
    cumulative = mass.cumsum(0) / mass.sum()
    return int(k[int((cumulative <= tail).sum())]), int(k[int((cumulative < 1 - tail).sum())])


def _check_bins(bins: Any, least: int) -> None:
    """Raise ValueError unless `bins` is a whole number from `least`."""
    if isinstance(bins, bool) or not isinstance(bins, int) or bins < least:
        raise ValueError(f"bins must be a whole number from {least}, but is {bins!r}.")


def _check_one_for_each_row(value: Tensor, predictive: Predictive, entry: str) -> Tensor:
    """Return y if it is (N,), else raise ValueError; entry: what each row has, for the message."""
    if value.shape != (predictive.law.rows,):
        raise ValueError(
            f"y must have shape ({predictive.law.rows},), {entry} for each row, but has "
            f"{tuple(value.shape)}."
        )
    return value


def _rank_targets(predictive: Predictive | LeaveOneOut, y: Any, target: int, name: str) -> Ranks:
    """Rank each y in its predictive; name: of the picture, for messages.

    Leave-one-out rows have their own y and weights; rows without a cavity are left out. TypeError
    for classes, ValueError for a y or a target that does not fit.
    """
    if predictive.kind == "class":
        raise TypeError(
            f"plots.{name} is for ordered targets, but these are classes. Use plots.reliability."
        )
    if isinstance(predictive, LeaveOneOut):
        if y is not None:
            raise ValueError(
                f"plots.{name} of leave-one-out rows takes no y: they have their own. Leave it out."
            )
        good = ~predictive.failed
        lower, upper = predictive.lower[good], predictive.upper[good]
        weights = predictive.weights[good]
    else:
        if y is None:
            raise ValueError(
                f"plots.{name} of a predictive needs y, the observed targets of its rows."
            )
        value = as_tensor(y).to("cpu", torch.float64)
        lower, upper = rank_targets(
            predictive, value if predictive.kind == "vector" else squeeze_column(value)
        )
        lower, upper = (part.to("cpu", torch.float64) for part in (lower, upper))
        weights = torch.ones(len(lower), dtype=torch.float64)
    if lower.dim() == 2:
        if not 0 <= target < lower.shape[1]:
            raise ValueError(f"target must be from 0 to {lower.shape[1] - 1}, but is {target}.")
        lower, upper = lower[:, target], upper[:, target]
    return Ranks(lower, upper, weights)


def _name_rows(predictive: Predictive | LeaveOneOut) -> str:
    """Name the kind of rows for a legend."""
    return "leave-one-out" if isinstance(predictive, LeaveOneOut) else "held-out"


def _draw_bin_sizes(ax: Any, color: Palette, counts: Tensor) -> None:
    """Draw low bars with the numbers of rows in bins (bins,) of [0, 1]; empty bins have none."""
    bins, full = len(counts), counts.nonzero().flatten()
    heights = 0.16 * counts / counts.max()
    ax.bar(
        (full.numpy() + 0.5) / bins,
        heights[full].numpy(),
        0.86 / bins,
        color=color.tint(0.3),
        lw=0,
        label="rows",
    )
    for b in full.tolist():
        ax.text(
            (b + 0.5) / bins,
            0.16 * int(counts[b]) / int(counts.max()) + 0.02,
            f"{int(counts[b]):,}",
            ha="center",
            fontsize="x-small",
            bbox={"facecolor": color.paper, "lw": 0, "pad": 0.6},
            zorder=4,
        )


def _draw_diagonal(ax: Any, color: Palette) -> None:
    """Draw the line of exact calibration."""
    ax.plot([0, 1], [0, 1], color=color.faint, lw=1, zorder=1)
