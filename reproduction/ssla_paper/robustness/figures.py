"""The figures: reliability, out-of-distribution inputs and shift, wrong labels, distance,
ablations.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from ssla_paper.robustness.methods import NAMES
from ssla_paper.robustness.results import Results, mean, methods_in, unique
from ssla_paper.tables import draw

COLOURS = {
    "plug_in": "#555555",
    "temperature": "#b8860b",
    "laplace": "#8c510a",
    "ensemble": "#2166ac",
    "dropout": "#7fbf7b",
    "default": "#b2182b",
    "default5": "#e7298a",
    "none": "#999999",
    "newton": "#f4a582",
    "output": "#fb9a99",
    "weights": "#762a83",
    "validated": "#17becf",
}


def write_figures(results: Results, folder: Path) -> None:
    """All of them."""
    _reliability(results, folder)
    _outside(results, folder)
    _shift(results, folder)
    _labels(results, folder)
    _distance(results, folder)
    _ablation(results, folder)


def _axes(rows: int, columns: int, width: float = 3.4, height: float = 3.0) -> tuple[Any, Any]:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    return plt.subplots(
        rows, columns, figsize=(width * columns, height * rows), squeeze=False, layout="constrained"
    )


def _legend(figure: Any, axis: Any) -> None:
    handles, labels = axis.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=5, fontsize=8, frameon=False)


def _style(method: str) -> dict[str, Any]:
    return {
        "color": COLOURS[method],
        "label": NAMES[method],
        "marker": "o",
        "markersize": 3.5,
        "linewidth": 1.3,
    } | ({"linestyle": "--"} if method in ("none", "temperature") else {})


def _reliability(results: Results, folder: Path) -> None:
    """Accuracy against confidence, bins of all seeds added."""
    datasets = results.datasets()
    figure, axes = _axes(1, len(datasets))
    for axis, dataset in zip(axes[0], datasets, strict=True):
        runs = [r["methods"] for r in results.calibration if r["dataset"] == dataset]
        axis.plot([0, 1], [0, 1], color="black", linewidth=0.6)
        for method in methods_in(runs):
            if method == "newton":
                continue
            count, confidence, right = torch.tensor(
                [run[method]["reliability"] for run in runs]
            ).sum(0)
            known = count >= max(5, 0.01 * float(count.sum()))
            axis.plot(
                confidence[known] / count[known], right[known] / count[known], **_style(method)
            )
        axis.set(
            title=dataset,
            xlabel="highest probability",
            ylabel="accuracy",
            xlim=(0.2, 1.02),
            ylim=(0.0, 1.02),
        )
    _legend(figure, max(axes[0], key=lambda a: len(a.lines)))
    draw(figure, folder, "robustness-reliability")


def _outside(results: Results, folder: Path) -> None:
    """AUROC by entropy, a dot for each method."""
    pairs = [(d, p) for d in results.datasets() for p in results.places(d)]
    figure, axes = _axes(1, 1, 7.5, 0.42 * len(pairs) + 1.6)
    axis = axes[0, 0]
    for method in NAMES:
        points = [
            (mean(results.aurocs(d, p, method)), i)
            for i, (d, p) in enumerate(pairs)
            if results.aurocs(d, p, method)
        ]
        if points and method != "newton":
            axis.plot(
                *zip(*points, strict=True),
                **{**_style(method), "linestyle": "none", "markersize": 6, "alpha": 0.85},
            )
    axis.axvline(0.5, color="black", linewidth=0.6)
    axis.set_yticks(range(len(pairs)), [f"{d}: {p}" for d, p in pairs], fontsize=8)
    axis.invert_yaxis()
    axis.grid(axis="y", linewidth=0.3)
    axis.set(xlabel="AUROC by entropy (0.5: chance)")
    _legend(figure, axis)
    draw(figure, folder, "robustness-outside")


def _shift(results: Results, folder: Path) -> None:
    if not results.shift:
        return
    figure, axes = _axes(2, 3)
    for row, (kind, label) in zip(
        axes, (("noise", "noise (of full brightness)"), ("rotation", "degrees")), strict=True
    ):
        degrees = unique(d for r in results.shift for d in r[kind])
        for axis, score in zip(row, ("nll", "ece", "accuracy"), strict=True):
            for method in methods_in([r[kind][degrees[0]] for r in results.shift]):
                values = [mean([r[kind][d][method][score] for r in results.shift]) for d in degrees]
                axis.plot([float(d) for d in degrees], values, **_style(method))
            axis.set(
                xlabel=label, ylabel={"nll": "NLL", "ece": "ECE", "accuracy": "accuracy"}[score]
            )
    _legend(figure, axes[0, 0])
    draw(figure, folder, "robustness-shift")


def _labels(results: Results, folder: Path) -> None:
    datasets = unique(r["dataset"] for r in results.labels)
    figure, axes = _axes(max(len(datasets), 1), 3)
    for row, dataset in zip(axes, datasets, strict=True):
        runs = [r for r in results.labels if r["dataset"] == dataset]
        shares = unique(r["share"] for r in runs)
        for axis, score in zip(row, ("accuracy", "nll", "ece"), strict=True):
            for method in methods_in([r["methods"] for r in runs]):
                values = [
                    mean([r["methods"][method][score] for r in runs if r["share"] == s])
                    for s in shares
                ]
                axis.plot([100 * s for s in shares], values, **_style(method))
            axis.set(
                title=dataset,
                xlabel="% of labels wrong",
                ylabel={"nll": "NLL", "ece": "ECE"}.get(score, score),
            )
    _legend(figure, axes[0, 0])
    draw(figure, folder, "robustness-labels")


def _distance(results: Results, folder: Path) -> None:
    sources = unique(r["source"] for r in results.covariate)
    figure, axes = _axes(max(len(sources), 1), 3)
    for row, source in zip(axes, sources, strict=True):
        runs = [r for r in results.covariate if r["source"] == source]
        places = [mean([r["edges"][b] for r in runs]) for b in range(4)]
        for axis, score in zip(row, ("nll", "cover95", "width95"), strict=True):
            for method in methods_in([r["methods"] for r in runs]):
                values = [
                    mean([r["methods"][method][b][score] for r in runs if method in r["methods"]])
                    for b in range(4)
                ]
                known = [(x, v) for x, v in zip(places, values, strict=True) if v is not None]
                if known:
                    axis.plot(*zip(*known, strict=True), **_style(method))
            axis.set(
                title=source,
                xlabel="distance outside",
                ylabel={"nll": "NLL", "cover95": "% in the 95% interval"}.get(score, "width"),
            )
        if row[0].get_ylim()[1] > 50:
            row[0].set_yscale("log")
        row[1].axhline(95, color="black", linewidth=0.6)
    _legend(figure, axes[0, 0])
    draw(figure, folder, "robustness-distance")


def _ablation(results: Results, folder: Path) -> None:
    """NLL minus that of the base, a dot for each seed and a bar at the mean."""
    datasets = unique(r["dataset"] for r in results.ablation)
    figure, axes = _axes(1, max(len(datasets), 1), 4.2, 7.0)
    for axis, dataset in zip(axes[0], datasets, strict=True):
        runs = [r["variants"] for r in results.ablation if r["dataset"] == dataset]
        base = [next(v["nll"] for v in run if v["level"] == "output (default)") for run in runs]
        names = [f"{v['factor']}: {v['level']}" for v in runs[0]]
        for i in range(len(names)):
            gaps = [
                run[i]["nll"] - b
                for run, b in zip(runs, base, strict=True)
                if run[i]["nll"] is not None
            ]
            axis.plot(
                gaps,
                [i] * len(gaps),
                "o",
                color=_factor_colour(runs[0][i]["factor"]),
                markersize=3.5,
                alpha=0.6,
            )
            if gaps:
                axis.plot([sum(gaps) / len(gaps)], [i], "|", color="black", markersize=11)
        axis.axvline(0, color="black", linewidth=0.6)
        if max(abs(end) for end in axis.get_xlim()) > 0.5:
            axis.set_xscale("symlog", linthresh=0.1)
        axis.set_yticks(range(len(names)), names, fontsize=7)
        axis.invert_yaxis()
        axis.grid(axis="y", linewidth=0.3)
        axis.set(title=dataset, xlabel="NLL less the default's")
    draw(figure, folder, "robustness-ablation")


def _factor_colour(factor: str) -> str:
    order: Sequence[str] = ("refit", "curvature", "structure", "weights", "prior", "mode")
    return ("#b2182b", "#762a83", "#2166ac", "#1b7837", "#b8860b", "#555555")[order.index(factor)]
