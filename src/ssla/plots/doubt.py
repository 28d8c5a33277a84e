"""Pictures of doubt: where predictions are unsure, and which training rows influence them.

Doubt is the epistemic standard deviation of y, and noise the aleatoric one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ssla._checks import check_name, in_plain_torch
from ssla.diagnostics.explanations import MEAN, VARIANCE, Explanation
from ssla.plots.canvas import add_legend, open_axes, set_log_ticks
from ssla.plots.distributions import check_row, name_predictives
from ssla.predictive import Predictive

KNOWN = 0.95  # quantile of the known rows' doubt above which a row counts as foreign
MARKERS = "ox^"


@in_plain_torch
def doubt(predictives: Predictive | Mapping[str, Predictive], *, ax: Any = None) -> Any:
    """Draw the epistemic against the aleatoric standard deviation of rows, and return the Axes.

    Both axes are logarithmic, with the line where the two are equal.

    predictives: one, or several by their names in the legend, with a colour and a marker for each;
    the fourth has those of the first again. Variances are summed over classes or targets. ax: the
    Axes to draw on; None: a new figure. Raises ValueError where every row has an epistemic variance
    of zero.
    """
    named = name_predictives(predictives, "rows")
    ax, color = open_axes(ax)
    shades = (color.main, color.other, color.ink)
    for i, (name, predictive) in enumerate(named.items()):
        noise, epistemic = _compute_deviations(predictive)
        marker = MARKERS[i % 3]
        ax.scatter(
            noise,
            epistemic,
            s=float(np.clip(3000 / len(epistemic), 5, 24)),
            marker=marker,
            color=shades[i % 3],
            alpha=0.7,
            lw=1 if marker == "x" else 0,
            label=name,
        )

    ax.set(xscale="log", yscale="log", xlabel="noise (aleatoric sd)", ylabel="doubt (epistemic sd)")

    # The diagonal spans both axes, whose limits stay those of the dots.
    x_limits = ax.get_xlim()
    y_limits = ax.get_ylim()
    ends = [min(*x_limits, *y_limits), max(*x_limits, *y_limits)]
    ax.plot(ends, ends, color=color.faint, lw=1, zorder=0, label="equal")
    ax.set(xlim=x_limits, ylim=y_limits)
    set_log_ticks(ax.xaxis, *x_limits)
    set_log_ticks(ax.yaxis, *y_limits)
    add_legend(ax, markerscale=2)
    return ax


@in_plain_torch
def out_of_distribution(known: Predictive, foreign: Predictive, *, ax: Any = None) -> Any:
    """Draw `doubt` of known and of foreign rows, and return the Axes.

    A line shows the 95% quantile of doubt in known rows, and the title how well doubt separates the
    rows. The title has the share of foreign rows above the quantile, and the AUROC: the probability
    that a foreign row has more doubt than a known one, which is 0.5 if doubt does not separate
    them.

    known: predictive of rows like the training data. foreign: predictive of other rows. ax: the
    Axes to draw on; None: a new figure. Raises ValueError where every row of either has no doubt.
    """
    ax = doubt({"known": known, "foreign": foreign}, ax=ax)
    _, color = open_axes(ax)
    _, known_doubt = _compute_deviations(known)
    _, foreign_doubt = _compute_deviations(foreign)
    limit = float(torch.quantile(known_doubt, KNOWN))
    ax.axhline(limit, color=color.ink, ls="--", lw=1, label=f"{KNOWN:.0%} of known below")
    share = float((foreign_doubt > limit).double().mean())
    area = compute_auroc(known_doubt, foreign_doubt)
    ax.set_title(f"{share:.0%} of foreign above, AUROC {area:.2f}", fontsize="medium")
    add_legend(ax, markerscale=2)
    return ax


@in_plain_torch
def influence(
    explanation: Explanation,
    row: int = 0,
    *,
    output: int = 0,
    by: str = MEAN,
    most: int = 10,
    ax: Any = None,
) -> Any:
    """Draw what the most influential training rows add to an output, and return the Axes.

    There is a bar for each row, for the mean or the variance of one output at one input.

    explanation: of `ssla.explain`. row: the input among those it explains. output: which output of
    the network. by: "mean" or "variance". most: how many training rows are drawn. ax: the Axes to
    draw on; None: a new figure. Raises ValueError for another `by`, row or output.
    """
    check_name("by", by, (MEAN, VARIANCE))
    effects = explanation.influence
    check_row(row, len(effects.rows))
    outputs = effects.mean.shape[-1]
    if not 0 <= output < outputs:
        raise ValueError(f"output must be from 0 to {outputs - 1}, but is {output}.")
    ax, color = open_axes(ax)
    values = (effects.mean if by == MEAN else effects.variance)[row, :most, output]
    names = [f"row {i}" for i in effects.rows[row, :most].tolist()]
    shades = [color.main if value >= 0 else color.other for value in values.tolist()]
    positions = np.arange(len(names))
    ax.barh(positions, values.numpy(), color=shades, height=0.7)
    ax.axvline(0, color=color.ink, lw=1)
    ax.set_yticks(positions, names)
    ax.invert_yaxis()  # the most influential row is at the top
    ax.set(
        xlabel=f"added to the {by} of output {output}" if outputs > 1 else f"added to the {by} of f"
    )
    return ax


def compute_auroc(low: Tensor, high: Tensor) -> float:
    """Return the area under the ROC curve of values `low` (n,) and `high` (k,).

    It is the probability that a random value of `high` is above one of `low`. Equal values count
    half.
    """
    sorted_low = low.sort().values
    # For each value of `high`: how many of `low` are smaller, and how many are not larger.
    smaller = torch.searchsorted(sorted_low, high, right=False).double()
    not_larger = torch.searchsorted(sorted_low, high, right=True).double()
    return float((smaller + not_larger).mean() / 2 / len(low))


def _compute_deviations(predictive: Predictive) -> tuple[Tensor, Tensor]:
    """Return the aleatoric and the epistemic standard deviation (N,) of each row.

    Variances are summed over targets or classes first. Zeros are replaced by the smallest positive
    value of any row, for a logarithmic axis. Raises ValueError where every epistemic one is zero.
    """
    # (N,), or (N, D) for several targets and (N, C) for classes.
    noise, epistemic = (
        variance if variance.dim() == 1 else variance.sum(1)
        for variance in (predictive.law.aleatoric, predictive.law.epistemic)
    )
    if not bool((epistemic > 0).any()):
        raise ValueError(
            f"Every row has a doubt of zero (refit={predictive.diagnostics.refit!r}), which a "
            "logarithmic axis cannot show. Use refit='output'."
        )

    noise, epistemic = (
        variance.clamp_min(float(variance[variance > 0].min())) for variance in (noise, epistemic)
    )
    return noise.sqrt(), epistemic.sqrt()
