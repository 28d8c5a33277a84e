"""Pictures of calibration: predictions against observations.

The pictures show the range in which exact calibration would stay, by binomial probabilities. Bands
hold for each level or bin by itself, and for independent rows; leave-one-out rows are nearly so.
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

LEVELS = 39  # of a calibration curve: 0.025, 0.05, … 0.975
BIN_HEIGHT = 0.16  # of the bar of the largest bin, as a share of the picture's height


class Ranks(NamedTuple):
    """The rank of each y in its predictive, and how often it counts."""

    lower: Tensor  # P(Y < y) (n,)
    upper: Tensor  # P(Y ≤ y) (n,)
    weights: Tensor  # (n,)

    @property
    def size(self) -> int:
        """Return the sum of the weights of rows, rounded to a whole number."""
        return round(float(self.weights.sum()))

    def share(self, chosen: Tensor) -> float:
        """Return the weight of the chosen rows (n,) bool as a share of the weight of all."""
        return float((self.weights * chosen).sum() / self.weights.sum())

    def inside(self, levels: Any) -> list[float]:
        """Return the share of y inside the central interval of each level.

        A count is inside if any part of its probability is.
        """
        tails = [(1 - float(level)) / 2 for level in levels]
        return [self.share((self.upper >= tail) & (self.lower <= 1 - tail)) for tail in tails]

    def heights(self, bins: int) -> Tensor:
        """Return the heights of the histogram of P(Y ≤ y) (bins,), which are all 1 if it is flat.

        The bins have equal widths in [0, 1]. A count is spread evenly from lower to upper.
        """
        edges = torch.linspace(0, 1, bins + 1, dtype=torch.float64)

        # A number has the width zero. It gets a small one below it, so that it is in one bin.
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

    Above the diagonal, intervals are too wide. Intervals of counts cover more than their level,
    because counts are discrete.

    predictive: of held-out rows; or `posterior.loo()`.
    y: the observed targets of the rows; None for `posterior.loo()`, which has its own.
    target: which of D targets, from 0.
    confidence: the probability of the band around the diagonal, in which the curve of a calibrated
    model would be at each level.
    ax: the Axes to draw on; None: a new figure.

    Raises TypeError for classes, and ValueError for a y or a target that does not fit.
    """
    ranks = _read_ranks(predictive, y, target=target, picture="calibration")
    ax, color = open_axes(ax)
    levels = np.linspace(0, 1, LEVELS + 2)[1:-1]
    ranges = [compute_binomial_range(ranks.size, float(level), confidence) for level in levels]
    low, high = np.array(ranges).T / ranks.size
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
        ranks.inside(levels),
        color=color.main,
        lw=2,
        label=f"{_name_rows(predictive)}, {ranks.size:,} rows",
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

    With the shape of a U, predictions are too narrow; with a hump they are too wide, and with a
    slope they are biased. A count is spread evenly from P(Y < y) to P(Y ≤ y), which makes the
    histogram smoother than the band expects.

    bins: at least 2. confidence: the probability of the band, in which the height of a calibrated
    model would be in each bin. Other arguments and errors: as in `calibration`.
    """
    _check_bins(bins, 2)
    ranks = _read_ranks(predictive, y, target=target, picture="pit")
    ax, color = open_axes(ax)
    edges = torch.linspace(0, 1, bins + 1, dtype=torch.float64)
    heights = ranks.heights(bins)

    # A bin has the height 1 if it has its share 1/bins of the rows.
    low, high = (
        end * bins / ranks.size for end in compute_binomial_range(ranks.size, 1 / bins, confidence)
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
        ylim=(0, 1.35 * max(float(heights.max()), high)),  # with room for the legend
        xlabel="P(Y ≤ y)",
        ylabel="density",
    )
    add_legend(ax, ncols=2, loc="upper center")
    return ax


@in_plain_torch
def reliability(
    predictive: Predictive, y: Any, *, bins: int = 10, confidence: float = 0.95, ax: Any = None
) -> Any:
    """Draw accuracy against the probability of the most probable class, and return the Axes.

    Rows are put into bins of that probability, and the number of rows in each bin is shown.

    Below the diagonal, predictions are too sure. The bars are ranges in which the accuracy of a
    calibrated model would be in each bin, with the probability `confidence`.

    predictive: of held-out rows (N). y (N,): the codes of their classes. bins: at least 1. ax: the
    Axes to draw on; None: a new figure. Raises TypeError unless the target is a class, and
    ValueError for a y that does not fit.
    """
    if predictive.kind != "class":
        raise TypeError(
            f"plots.reliability is for classes, but the predictive is of kind {predictive.kind!r}. "
            "Use calibration."
        )

    _check_bins(bins, 1)
    observed = _check_one_for_each_row(
        squeeze_column(as_tensor(y)).to("cpu").long(), predictive, "one class"
    )
    ax, color = open_axes(ax)

    # Rows are put into bins by the probability of their predicted class; empty bins are left out.
    largest_probs, predicted = predictive.law.probs.max(1)
    is_correct = (predicted == observed).double()
    bin_of_row = (largest_probs * bins).long().clamp(0, bins - 1)
    counts = torch.bincount(bin_of_row, minlength=bins)
    used_bins = counts.nonzero().flatten()
    mean = torch.stack([largest_probs[bin_of_row == b].mean() for b in used_bins])
    accuracy = torch.stack([is_correct[bin_of_row == b].mean() for b in used_bins])

    # The hits of a calibrated model are binomial, with the predicted probability.
    ranges = [
        compute_binomial_range(int(n), float(p), confidence)
        for n, p in zip(counts[used_bins], mean, strict=True)
    ]
    ends = np.array(ranges).T / counts[used_bins].numpy()
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

    Where intervals are wider, y should be farther from the mean.

    predictive: of held-out rows (N). y (N,): their observed targets. level: the probability of the
    intervals. ax: the Axes to draw on; None: a new figure. Raises TypeError unless y is one ordered
    target, and ValueError for a y that does not fit.
    """
    check_ordered(predictive, "intervals")
    observed = _check_one_for_each_row(
        squeeze_column(as_tensor(y)).to("cpu", torch.float64), predictive, "one"
    )
    ends = predictive.law.interval(checked_level(level))
    mean = predictive.law.mean
    order = (ends[:, 1] - ends[:, 0]).argsort(stable=True)

    # Ends and y (N,), less the mean and in the order of widths.
    low = (ends[:, 0] - mean)[order]
    high = (ends[:, 1] - mean)[order]
    error = (observed - mean)[order]
    inside = (error >= low) & (error <= high)
    ax, color = open_axes(
        ax, f"{float(inside.double().mean()):.1%} of y inside {level:.0%} intervals"
    )
    rank = torch.arange(len(error), dtype=torch.float64) + 1
    ax.fill_between(rank, low, high, step="mid", color=color.tint(0.3), lw=0, label=f"{level:.0%}")
    size = float(np.clip(2500 / len(error), 3, 16))  # of dots: smaller where there are many
    ax.scatter(
        rank[inside], error[inside], s=size, color=color.ink, alpha=0.6, lw=0, label="inside"
    )
    ax.scatter(
        rank[~inside],
        error[~inside],
        s=1.6 * size,
        marker="x",
        lw=1.2,
        color=color.other,
        label="outside",
    )
    ax.set(xlabel="rows, by width of the interval", ylabel="y − mean")
    add_legend(ax, ncols=3, loc="upper left")
    low_end, high_end = ax.get_ylim()
    ax.set_ylim(low_end, high_end + 0.14 * (high_end - low_end))  # room for the legend
    return ax


def compute_binomial_range(n: int, p: float, confidence: float) -> tuple[int, int]:
    """Return a range of the number of successes in n trials with probability p, both ends in it.

    The probability of a number below the range, and that of one above it, are at most (1 −
    confidence)/2 each.

    Raises ValueError unless confidence is a probability.
    """
    tail = (1 - checked_level(confidence)) / 2
    if p <= 0:
        return 0, 0
    if p >= 1:
        return n, n

    # Only counts near the mean are summed, so that a large n takes no memory.
    spread = 10 * (n * p * (1 - p)) ** 0.5 + 40  # all but 1e-20 of the probability
    counts = torch.arange(
        max(int(n * p - spread), 0), min(int(n * p + spread) + 1, n) + 1, dtype=torch.float64
    )
    size = torch.tensor(float(n), dtype=torch.float64)
    log_mass = (
        torch.lgamma(size + 1)
        - torch.lgamma(counts + 1)
        - torch.lgamma(size - counts + 1)
        + counts * np.log(p)
        + (size - counts) * np.log1p(-p)
    )
    mass = (log_mass - log_mass.max()).exp()
    cumulative = mass.cumsum(0) / mass.sum()
    return int(counts[int((cumulative <= tail).sum())]), int(
        counts[int((cumulative < 1 - tail).sum())]
    )


def _check_bins(bins: Any, least: int) -> None:
    """Raise ValueError unless `bins` is a whole number from `least`."""
    if isinstance(bins, bool) or not isinstance(bins, int) or bins < least:
        raise ValueError(f"bins must be a whole number from {least}, but is {bins!r}.")


def _check_one_for_each_row(value: Tensor, predictive: Predictive, entry: str) -> Tensor:
    """Return `value` unchanged; raise ValueError unless it is (N,), for the N rows of a predictive.

    entry: the words for what each row has, for the message.
    """
    if value.shape != (predictive.law.rows,):
        raise ValueError(
            f"y must have shape ({predictive.law.rows},), {entry} for each row, but has "
            f"{tuple(value.shape)}."
        )
    return value


def _read_ranks(
    predictive: Predictive | LeaveOneOut, y: Any, *, target: int, picture: str
) -> Ranks:
    """Return the rank of each y in its predictive, for n rows and one target.

    y: the targets (n,), (n, 1) or (n, D) of a predictive. None for leave-one-out rows, which have
    their own y and weights; those that failed are left out. target: which of D targets, from 0; it
    is ignored for one target. picture: its name, for messages. Raises TypeError for classes, and
    ValueError for a y or a target that does not fit.
    """
    if predictive.kind == "class":
        raise TypeError(
            f"plots.{picture} is for ordered targets, but these are classes. Use plots.reliability."
        )

    if isinstance(predictive, LeaveOneOut):
        if y is not None:
            raise ValueError(
                f"plots.{picture} of leave-one-out rows takes no y: they have their own. Leave it "
                "out."
            )
        succeeded = ~predictive.failed
        lower = predictive.lower[succeeded]
        upper = predictive.upper[succeeded]
        weights = predictive.weights[succeeded]
    else:
        if y is None:
            raise ValueError(
                f"plots.{picture} of a predictive needs y, the observed targets of its rows."
            )

        observed = as_tensor(y).to("cpu", torch.float64)
        if predictive.kind != "vector":
            observed = squeeze_column(observed)
        lower, upper = rank_targets(predictive, observed)
        lower = lower.to("cpu", torch.float64)
        upper = upper.to("cpu", torch.float64)
        weights = torch.ones(len(lower), dtype=torch.float64)

    # The ranks of several targets are (n, D).
    if lower.dim() == 2:
        if not 0 <= target < lower.shape[1]:
            raise ValueError(f"target must be from 0 to {lower.shape[1] - 1}, but is {target}.")
        lower = lower[:, target]
        upper = upper[:, target]

    return Ranks(lower, upper, weights)


def _name_rows(predictive: Predictive | LeaveOneOut) -> str:
    """Return the words for the kind of rows, for a legend."""
    return "leave-one-out" if isinstance(predictive, LeaveOneOut) else "held-out"


def _draw_bin_sizes(ax: Any, color: Palette, counts: Tensor) -> None:
    """Draw a low bar and the number of rows for each of the bins of [0, 1] with a row.

    counts (bins,): the rows of each bin.
    """
    bins = len(counts)
    used_bins = counts.nonzero().flatten()
    heights = BIN_HEIGHT * counts / counts.max()
    ax.bar(
        (used_bins.numpy() + 0.5) / bins,
        heights[used_bins].numpy(),
        0.86 / bins,
        color=color.tint(0.3),
        lw=0,
        label="rows",
    )
    for b in used_bins.tolist():
        ax.text(
            (b + 0.5) / bins,
            BIN_HEIGHT * int(counts[b]) / int(counts.max()) + 0.02,
            f"{int(counts[b]):,}",
            ha="center",
            fontsize="x-small",
            bbox={"facecolor": color.paper, "lw": 0, "pad": 0.6},
            zorder=4,
        )


def _draw_diagonal(ax: Any, color: Palette) -> None:
    """Draw the line from (0, 0) to (1, 1), on which exactly calibrated predictions are."""
    ax.plot([0, 1], [0, 1], color=color.faint, lw=1, zorder=1)
