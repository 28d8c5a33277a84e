"""The bands of every method on the module's own seed, and coverage against nominal coverage."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ssla_paper.heteroscedastic.numbers import LABELS, LEVELS, PUBLISHED, Found
from ssla_paper.runner import Record
from ssla_paper.tables import draw

BLUE, GREY, RED = "#3465a4", "#555753", "#cc0000"
PANELS = (
    "truth",
    "none-dense",
    "weights-dense",
    "newton-dense",
    "output-dense",
    "output-ensemble",
    "plug_in",
    "ensemble",
    "la-kfac",
    "la_scaled-kfac",
    "bb_alpha",
    "mean_field",
    "mean_field_deep",
    "nuts",
)
LINES = {  # method -> colour, marker, and its column in the paper
    "none-dense": ("tab:orange", "s", "ASSLA DENSE"),
    "weights-dense": ("tab:blue", "o", "SSLA DENSE"),
    "la-kfac": ("tab:green", "^", "LA KFAC"),
    "bb_alpha": ("tab:red", "v", "VI"),
    "mean_field_deep": ("tab:purple", "D", "MFVI"),
    "nuts": ("tab:brown", "P", "HMC"),
    "output-dense": ("black", "*", None),
}


def bands(records: Mapping[str, Record], folder: Path) -> None:
    """Panels on shared axes: rows as dots, mean, 95% band; the true band dashed.

    First the two published procedures.
    """
    import matplotlib.pyplot as plt

    found = {
        method: band
        for record in records.values()
        for method, band in record.get("bands", {}).items()
    }
    source = next((record for record in records.values() if "bands" in record), None)
    if source is None:
        return
    grid, truth = source["grid"], found.get("truth")
    old: dict[str, Any] = next(
        (record["published"] for record in records.values() if "published" in record), {}
    )
    panels: list[tuple[str, Any]] = [(f"{name}, as published", band) for name, band in old.items()]
    panels += [(LABELS[method][0], found[method]) for method in PANELS if method in found]
    columns = 4 if len(panels) > 6 else 3
    rows = -(-len(panels) // columns)
    figure, axes = plt.subplots(
        rows, columns, figsize=(3.2 * columns, 2.3 * rows), sharex=True, sharey=True, squeeze=False
    )
    for axis in axes.flat[len(panels) :]:
        axis.set_visible(False)
    for axis, (title, (mean, low, high)) in zip(axes.flat, panels, strict=False):
        axis.fill_between(grid, low, high, color=BLUE, alpha=0.25, lw=0, label="95% band")
        axis.plot(grid, mean, color=BLUE, lw=1.2, label="mean")
        axis.plot(*source["train"], ".", color=GREY, ms=2, alpha=0.6, label="training rows")
        axis.plot(*source["test"], ".", color=RED, ms=4, label="25 test rows")
        if truth is not None and title != LABELS["truth"][0]:
            for end in truth[1:]:
                axis.plot(
                    grid,
                    end,
                    "--",
                    color="black",
                    lw=0.6,
                    label="true band" if end is truth[1] else None,
                )
        axis.set_title(title, fontsize=9)
        axis.set_ylim(-4, 4)
        axis.set_xlim(grid[0], grid[-1])
    for axis in axes[:, 0]:
        axis.set_ylabel("y, standardised", fontsize=8)
    for axis in axes.flat[max(0, len(panels) - columns) : len(panels)]:
        axis.set_xlabel("x, standardised", fontsize=8)
        axis.tick_params(labelbottom=True)
    handles, labels = axes.flat[min(1, len(panels) - 1)].get_legend_handles_labels()
    figure.legend(
        handles,
        labels,
        loc="lower center",
        ncols=5,
        frameon=False,
        bbox_to_anchor=(0.5, -0.03),
        fontsize=9,
    )
    figure.tight_layout()
    draw(figure, folder, "heteroscedastic-bands")


def against_nominal(found: Found, folder: Path) -> None:
    """Coverage − nominal by level: published on 25 rows, and ours with two standard errors."""
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.8), sharey=True)
    for offset, (method, (colour, marker, column)) in enumerate(LINES.items()):
        at = [level + 0.5 * (offset - 3) for level in LEVELS]
        if column is not None:
            gaps = [
                float(value - level) for value, level in zip(PUBLISHED[column], LEVELS, strict=True)
            ]
            left.plot(at, gaps, marker, color=colour, ms=5, label=column)
        if method in found.means:
            scores = [found.means[method][f"cover{level}"] for level in LEVELS]
            gaps = [score.value - level for score, level in zip(scores, LEVELS, strict=True)]
            errors = [0.0 if math.isnan(score.error) else 2 * score.error for score in scores]
            right.errorbar(
                at, gaps, errors, fmt=marker, color=colour, ms=5, lw=1, label=LABELS[method][0]
            )
    for axis, title in (
        (left, "published: 25 rows, one seed"),
        (right, "computed correctly: mean over seeds ± 2 standard errors"),
    ):
        axis.axhline(0, color="black", lw=0.8)
        axis.set_xticks(LEVELS)
        axis.set_xlabel("nominal coverage, per cent")
        axis.set_title(title, fontsize=10)
        axis.legend(fontsize=7, frameon=False)
    left.set_ylabel("coverage − nominal, points")
    figure.tight_layout()
    draw(figure, folder, "heteroscedastic-coverage")
