"""Predictive curves, as in the paper's figures, and the distance against n."""

from __future__ import annotations

import math
import statistics
from typing import Any

from ssla_paper.conjugate.measure import MODELS
from ssla_paper.runner import Record

ANALYTIC, SSLA, ASSLA = "#3a9a4b", "#c92a2a", "#222222"  # the paper's green, red and black
PROCEDURES = {"as published (float32)": "float32", "ours": "ours"}
FLOOR = 1e-32


def _draw(
    ax: Any, record: Record, names: dict[str, tuple[str, str, str]], drop: float = 9.0
) -> None:
    """Curves of the first run: name -> (label, colour, style); cut where a density is e^−drop
    of its peak.
    """
    counts = record["model"] == "Poisson–gamma"
    for name, (label, color, style) in names.items():
        y, log = record["runs"][0]["methods"][name]["curve"]
        top = max(log)
        kept = [(a, math.exp(min(b, 300.0))) for a, b in zip(y, log, strict=True) if b > top - drop]
        wide = 5.0 if name == "analytic" else 1.5
        ax.plot(*zip(*kept, strict=True), style, color=color, lw=wide, alpha=0.45 if name == "analytic" else 1.0, label=label,
                marker="o" if counts else None, ms=3)  # fmt: skip


def curves(model: str, records: list[Record]) -> Any:
    """The paper's figure of one model, once for each procedure: un-normalised densities."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(
        2, len(records), figsize=(3.1 * len(records), 5.6), constrained_layout=True, squeeze=False
    )
    for line, (words, key) in zip(axes, PROCEDURES.items(), strict=True):
        for ax, record in zip(line, records, strict=True):
            names = {
                "analytic": ("analytic", ANALYTIC, "-"),
                f"{key} SSLA": ("SSLA", SSLA, "-"),
                f"{key} ASSLA": ("ASSLA", ASSLA, "--"),
            }
            _draw(ax, record, names)
            ax.set_ylim(bottom=0)
            methods = record["runs"][0]["methods"]
            found = ", ".join(f"{m} {methods[f'{key} {m}']['kl']:.0e}" for m in ("SSLA", "ASSLA"))
            ax.set_title(f"n = {record['n']:,}\nKL {found}", fontsize=8)
        line[0].set_ylabel(words)
    axes[0, 0].legend(frameon=False, fontsize=8)
    figure.suptitle(model)
    return figure


def falls(reference: list[Record]) -> Any:
    """KL and the largest error of the log density against n, mean over data sets."""
    import matplotlib.pyplot as plt

    lines = {
        "float32 SSLA": ("SSLA as published", SSLA, "--", "o"),
        "float32 ASSLA": ("ASSLA as published", ASSLA, "--", "s"),
        "float64 SSLA": ("SSLA, its formulas in float64", "#e8918f", ":", "o"),
        "ours SSLA": ("SSLA ours", SSLA, "-", "o"),
        "ours ASSLA": ("ASSLA ours", ASSLA, "-", "s"),
        "ours ASSLA in λ": ("ASSLA ours, in λ", "#7a7a7a", "-", "^"),
    }
    figure, axes = plt.subplots(
        2,
        len(MODELS),
        figsize=(4.6 * len(MODELS), 7.4),
        sharex=True,
        sharey="row",
        constrained_layout=True,
    )
    for column, model in zip(axes.T, MODELS, strict=True):
        here = [record for record in reference if record["model"] == model]
        n = [record["n"] for record in here]
        for ax, what in zip(column, ("kl", "error"), strict=True):
            for name, (label, color, style, mark) in lines.items():
                if any(name not in record["runs"][0]["methods"] for record in here):
                    continue
                means = [
                    statistics.mean(run["methods"][name][what] for run in record["runs"])
                    for record in here
                ]
                ax.plot(
                    n,
                    [max(m, FLOOR) for m in means],
                    style,
                    color=color,
                    marker=mark,
                    ms=4,
                    label=label,
                )
            ax.set(xscale="log", yscale="log")
            ax.grid(alpha=0.25)
        column[0].set_title(model)
        column[1].set_xlabel("n")
    axes[0, 0].set_ylabel("KL from the analytic predictive")
    axes[1, 0].set_ylabel("largest error of the log density")
    handles, labels = axes[0, 1].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3, frameon=False, fontsize=9)
    return figure


def conflicts(records: list[Record]) -> Any:
    """Prior against data at the smallest n: normalised densities, so that those of any mass can
    be seen.
    """
    import matplotlib.pyplot as plt

    priors = ("strong", "far", "far and strong")
    figure, axes = plt.subplots(
        len(priors), len(MODELS), figsize=(4.4 * len(MODELS), 8.2), constrained_layout=True
    )
    names = {
        "analytic": ("analytic", ANALYTIC, "-"),
        "float32 SSLA": ("SSLA as published", SSLA, "--"),
        "float32 ASSLA": ("ASSLA as published", ASSLA, "--"),
        "ours SSLA": ("SSLA ours", "#2f6db5", "-"),
    }
    for line, prior in zip(axes, priors, strict=True):
        for ax, model in zip(line, MODELS, strict=True):
            record = next(
                record
                for record in records
                if record["model"] == model and record["prior"] == prior
            )
            _draw(ax, _normalised(record, names), names)
            ax.set_ylim(bottom=0)
            ax.set_title(f"{model}, {prior} prior, n = {record['n']}", fontsize=9)
    axes[0, 0].legend(frameon=False, fontsize=8)
    return figure


def _normalised(record: Record, names: dict[str, tuple[str, str, str]]) -> Record:
    """The same record, its first run's curves less their log mass."""
    methods = record["runs"][0]["methods"]
    found = {}
    for name in names:
        y, log = methods[name]["curve"]
        found[name] = {"curve": [y, [value - methods[name]["log_mass"] for value in log]]}
    return {**record, "runs": [{"methods": found}]}
