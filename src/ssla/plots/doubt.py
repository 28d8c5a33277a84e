"""Where predictions are unsure, and why."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ssla._checks import in_plain_torch, one_of
from ssla.diagnostics.explanations import MEAN, VARIANCE, Explanation
from ssla.plots.canvas import axes, legend, log_axis
from ssla.plots.distributions import checked_row
from ssla.predictive import Predictive

KNOWN = 0.95  # quantile of the known rows' doubt above which a row counts as foreign


@in_plain_torch
def doubt(predictives: Predictive | Mapping[str, Predictive], *, ax: Any = None) -> Any:
    """Epistemic against aleatoric standard deviation of every row, both on logarithmic axes; the
    line is where they are equal.

    Several predictives by name have markers of their own. The variances of classes are summed over
    the classes.
    """
    named = {"rows": predictives} if isinstance(predictives, Predictive) else dict(predictives)
    if not named:
        raise ValueError("predictives has no entry. Give a Predictive, or a dict of them by name.")
    ax, color = axes(ax)
    shades = (color.main, color.other, color.ink)
    for i, (name, predictive) in enumerate(named.items()):
        noise, own = _deviations(predictive)
        size = float(np.clip(3000 / len(own), 5, 24))
        marker = "ox^"[i % 3]
        ax.scatter(
            noise,
            own,
            s=size,
            marker=marker,
            color=shades[i % 3],
            alpha=0.7,
            lw=1 if marker == "x" else 0,
            label=name,
        )
    ax.set(xscale="log", yscale="log", xlabel="noise (aleatoric sd)", ylabel="doubt (epistemic sd)")
    low, high = (f(f(ax.get_xlim()), f(ax.get_ylim())) for f in (min, max))
    box = ax.get_xlim(), ax.get_ylim()
    ax.plot([low, high], [low, high], color=color.faint, lw=1, zorder=0, label="equal")
    ax.set(xlim=box[0], ylim=box[1])
    for axis, ends in zip((ax.xaxis, ax.yaxis), box, strict=True):
        log_axis(axis, *ends)
    legend(ax, markerscale=2)
    return ax


@in_plain_torch
def out_of_distribution(known: Predictive, foreign: Predictive, *, ax: Any = None) -> Any:
    """`doubt` of known and of foreign rows, with the 95% quantile of the known rows' doubt, and how
    well doubt separates them.

    AUROC: the probability that a foreign row has more doubt than a known one; 0.5 if doubt says
    nothing about it.
    """
    ax = doubt({"known": known, "foreign": foreign}, ax=ax)
    _, color = axes(ax)
    own, other = _deviations(known)[1], _deviations(foreign)[1]
    limit = float(torch.quantile(own, KNOWN))
    ax.axhline(limit, color=color.ink, ls="--", lw=1, label=f"{KNOWN:.0%} of known below")
    found = float((other > limit).double().mean())
    ax.set_title(f"{found:.0%} of foreign above, AUROC {auroc(own, other):.2f}", fontsize="medium")
    legend(ax, markerscale=2)
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
    """What the most influential training rows add to the mean, or to the variance, of one
    output at one input. Bars.
    """
    one_of("by", by, (MEAN, VARIANCE))
    checked_row(row, len(explanation.influence.rows))
    outputs = explanation.influence.mean.shape[-1]
    if not 0 <= output < outputs:
        raise ValueError(f"output must be from 0 to {outputs - 1}, but is {output}.")
    ax, color = axes(ax)
    values = (explanation.influence.mean if by == MEAN else explanation.influence.variance)[
        row, :most, output
    ]
    names = [f"row {i}" for i in explanation.influence.rows[row, :most].tolist()]
    shades = [color.main if value >= 0 else color.other for value in values.tolist()]
    place = np.arange(len(names))
    ax.barh(place, values.numpy(), color=shades, height=0.7)
    ax.axvline(0, color=color.ink, lw=1)
    ax.set_yticks(place, names)
    ax.invert_yaxis()
    ax.set(
        xlabel=f"added to the {by} of output {output}" if outputs > 1 else f"added to the {by} of f"
    )
    return ax


def auroc(low: Tensor, high: Tensor) -> float:
    """The probability that a value of `high` exceeds one of `low`; equal ones count half."""
    ordered = low.sort().values
    below, upto = (
        torch.searchsorted(ordered, high, right=right).double() for right in (False, True)
    )
    return float((below + upto).mean() / 2 / len(low))


def _deviations(predictive: Predictive) -> tuple[Tensor, Tensor]:
    """Aleatoric and epistemic standard deviations (N,)."""
    noise, own = (
        part if part.dim() == 1 else part.sum(1)
        for part in (predictive.law.aleatoric, predictive.law.epistemic)
    )
    if not bool((own > 0).any()):
        raise ValueError(
            f"Every row has a doubt of zero (refit={predictive.diagnostics.refit!r}), which a "
            "logarithmic axis cannot show. Use refit='output'."
        )
    noise, own = (part.clamp_min(float(part[part > 0].min())) for part in (noise, own))
    return noise.sqrt(), own.sqrt()
