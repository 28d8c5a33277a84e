"""Pictures of doubt: where predictions are unsure, and which training rows decide them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ssla._checks import check_name, in_plain_torch
from ssla.diagnostics.explanations import MEAN, VARIANCE, Explanation
from ssla.plots.canvas import add_legend, open_axes, set_log_ticks
from ssla.plots.distributions import by_name, check_row
from ssla.predictive import Predictive

KNOWN = 0.95  # quantile of the known rows' doubt above which a row counts as foreign
MARKERS = "ox^"


@in_plain_torch
def doubt(predictives: Predictive | Mapping[str, Predictive], *, ax: Any = None) -> Any:
    """Draw the epistemic against the aleatoric standard deviation of every row, both on logarithmic
    axes, with the line where they are equal; return the Axes.

    Several predictives by name have markers of their own. The variances of classes are summed over
    the classes. ValueError where every row has an epistemic variance of zero.
    """
    named = by_name(predictives, "rows")
    ax, color = open_axes(ax)
    shades = (color.main, color.other, color.ink)
    for i, (name, predictive) in enumerate(named.items()):
        noise, epistemic = _deviations(predictive)
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
    x_limits, y_limits = ax.get_xlim(), ax.get_ylim()
    ends = [min(*x_limits, *y_limits), max(*x_limits, *y_limits)]
    ax.plot(ends, ends, color=color.faint, lw=1, zorder=0, label="equal")
    ax.set(xlim=x_limits, ylim=y_limits)
    set_log_ticks(ax.xaxis, *x_limits)
    set_log_ticks(ax.yaxis, *y_limits)
    add_legend(ax, markerscale=2)
    return ax


@in_plain_torch
def out_of_distribution(known: Predictive, foreign: Predictive, *, ax: Any = None) -> Any:
    """Draw `doubt` of known and of foreign rows, with the 95% quantile of doubt in known rows, and
    return the Axes. The title says how well doubt separates the rows.

    AUROC: the probability that a foreign row has more doubt than a known one; 0.5 if doubt does not
    separate them.
    """
    ax = doubt({"known": known, "foreign": foreign}, ax=ax)
    _, color = open_axes(ax)
    of_known, of_foreign = _deviations(known)[1], _deviations(foreign)[1]
    limit = float(torch.quantile(of_known, KNOWN))
    ax.axhline(limit, color=color.ink, ls="--", lw=1, label=f"{KNOWN:.0%} of known below")
    share = float((of_foreign > limit).double().mean())
    area = auroc(of_known, of_foreign)
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
    """Draw bars of what the most influential training rows add to the mean, or to the variance, of
    one output at one input; return the Axes.

    by: "mean" or "variance"; most: the number of rows. ValueError for another `by`, row or output.
    """
    check_name("by", by, (MEAN, VARIANCE))
    by_rows = explanation.influence
    check_row(row, len(by_rows.rows))
    outputs = by_rows.mean.shape[-1]
    if not 0 <= output < outputs:
        raise ValueError(f"output must be from 0 to {outputs - 1}, but is {output}.")
    ax, color = open_axes(ax)
    values = (by_rows.mean if by == MEAN else by_rows.variance)[row, :most, output]
    names = [f"row {i}" for i in by_rows.rows[row, :most].tolist()]
    shades = [color.main if value >= 0 else color.other for value in values.tolist()]
    positions = np.arange(len(names))
    ax.barh(positions, values.numpy(), color=shades, height=0.7)
    ax.axvline(0, color=color.ink, lw=1)
    ax.set_yticks(positions, names)
    ax.invert_yaxis()
    ax.set(
        xlabel=f"added to the {by} of output {output}" if outputs > 1 else f"added to the {by} of f"
    )
    return ax


def auroc(low: Tensor, high: Tensor) -> float:
    """Return the probability that a value of `high` (k,) exceeds one of `low` (n,).

    Equal values count half.
    """
    in_order = low.sort().values
    below, up_to = (
        torch.searchsorted(in_order, high, right=right).double() for right in (False, True)
    )
    return float((below + up_to).mean() / 2 / len(low))


def _deviations(predictive: Predictive) -> tuple[Tensor, Tensor]:
    """Return aleatoric and epistemic standard deviations (N,), summed over targets or classes.

    Zeros are replaced by the smallest positive one, for a logarithmic axis. ValueError where every
    epistemic one is zero.
    """
    noise, epistemic = (
        part if part.dim() == 1 else part.sum(1)
        for part in (predictive.law.aleatoric, predictive.law.epistemic)
    )
    if not bool((epistemic > 0).any()):
        raise ValueError(
            f"Every row has a doubt of zero (refit={predictive.diagnostics.refit!r}), which a "
            "logarithmic axis cannot show. Use refit='output'."
        )
    noise, epistemic = (part.clamp_min(float(part[part > 0].min())) for part in (noise, epistemic))
    return noise.sqrt(), epistemic.sqrt()
