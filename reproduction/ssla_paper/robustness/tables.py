"""The tables."""

from __future__ import annotations

from pathlib import Path

from ssla_paper.robustness.methods import NAMES
from ssla_paper.robustness.results import Results, mean, methods_in, spread, unique
from ssla_paper.runner import Record
from ssla_paper.tables import Cell, Table

SCORES = {"nll": "NLL", "brier": "Brier", "ece": "ECE", "accuracy": "accuracy"}
REGRESSION = {"nll": "NLL", "crps": "CRPS", "cover95": "coverage 95", "width95": "width 95"}

NETWORKS = " Networks: 2×50, ReLU."


def write_tables(results: Results, folder: Path) -> None:
    """All tables; each states the number of seeds of its means."""
    for table in (
        _calibration(results),
        _outside(results),
        *_shift(results),
        _labels(results),
        _covariate(results),
        *_ablation(results),
        _cost(results),
    ):
        table.write(folder)


def _seeds(records: list[Record]) -> str:
    count = len(unique(r["seed"] for r in records))
    return (
        f"{count} seed{'s' * (count != 1)}, mean ± standard deviation" if count > 1 else "one seed"
    )


def _calibration(results: Results) -> Table:
    rows: list[list[Cell]] = []
    missing = results.missing()
    for dataset in results.datasets():
        for method, name in NAMES.items():
            if method in missing:
                rows.append([dataset, name, missing[method], None, None, None])
            elif results.scores(dataset, method, "nll"):
                rows.append(
                    [
                        dataset,
                        name,
                        *(spread(results.scores(dataset, method, score)) for score in SCORES),
                    ]
                )
    caption = (
        f"Classes, tested on rows like the training rows ({_seeds(results.calibration)}). Lower is "
        f"better except for accuracy.{NETWORKS}"
    )
    caption += (
        " laplace-torch: Kronecker factors, the prior by the evidence, the probit link. SSLA is "
        "omitted for ten classes, where"
    )
    caption += (
        " it is expensive: see the ablation and the costs. Ours, default: `ssla.fit` without "
        "prior, mode or gaussian (see"
    )
    caption += (
        ' docs/priors.md). Ours at the mode: polished, gaussian="laplace", the prior by the '
        "evidence; that with the prior by"
    )
    caption += (
        " held-out rows keeps the weights of the mode under precision 1. The paper shows none of "
        "these."
    )
    return Table(
        "robustness-1-calibration", caption, ["data", "method", *SCORES.values()], rows, {}
    )


def _outside(results: Results) -> Table:
    rows: list[list[Cell]] = []
    for dataset in results.datasets():
        for place in results.places(dataset):
            for method, name in NAMES.items():
                found = [
                    results.aurocs(dataset, place, method, by)
                    for by in ("entropy", "highest", "epistemic")
                ]
                if found[0]:
                    rows.append([dataset, place, name, *(spread(values) for values in found)])
    caption = (
        f"AUROC of detecting out-of-distribution inputs ({_seeds(results.calibration)}), by the "
        "entropy, by one minus"
    )
    caption += (
        " the highest probability, and by the method's own epistemic part, if it has one. 0.5 is "
        f"chance.{NETWORKS}"
    )
    return Table(
        "robustness-2-outside",
        caption,
        ["data", "inputs", "method", "entropy", "highest probability", "epistemic"],
        rows,
        {},
    )


def _shift(results: Results) -> list[Table]:
    tables = []
    for kind, what in (
        ("noise", "Gaussian noise, in parts of full brightness"),
        ("rotation", "rotation in degrees"),
    ):
        degrees = unique(d for r in results.shift for d in r[kind])
        for score, label in (("nll", "NLL"), ("ece", "ECE"), ("accuracy", "accuracy")):
            methods = methods_in([r[kind][degrees[0]] for r in results.shift])
            rows: list[list[Cell]] = [
                [
                    NAMES[m],
                    *(spread([r[kind][d][m][score] for r in results.shift]) for d in degrees),
                ]
                for m in methods
            ]
            caption = f"Digits under shift, {what}: {label} ({_seeds(results.shift)}).{NETWORKS}"
            tables.append(
                Table(f"robustness-3-{kind}-{score}", caption, ["method", *degrees], rows, {})
            )
    return tables


def _labels(results: Results) -> Table:
    rows: list[list[Cell]] = []
    for dataset in unique(r["dataset"] for r in results.labels):
        for share in unique(r["share"] for r in results.labels if r["dataset"] == dataset):
            runs = [
                r["methods"]
                for r in results.labels
                if r["dataset"] == dataset and r["share"] == share
            ]
            for method in methods_in(runs):
                entries = [spread([run[method][score] for run in runs]) for score in SCORES]
                rows.append([dataset, f"{share:.0%}", NAMES[method], *entries])
    caption = (
        "Training with a share of wrong labels, test with correct labels "
        f"({_seeds(results.labels)}).{NETWORKS}"
    )
    return Table(
        "robustness-4-labels", caption, ["data", "wrong", "method", *SCORES.values()], rows, {}
    )


def _covariate(results: Results) -> Table:
    rows: list[list[Cell]] = []
    for source in unique(r["source"] for r in results.covariate):
        runs = [r for r in results.covariate if r["source"] == source]
        for method, name in NAMES.items():
            entries = [r["methods"][method] for r in runs if method in r["methods"]]
            missing = next((r["missing"][method] for r in runs if method in r["missing"]), None)
            if missing:
                rows.append([source, name, missing, None, None, None, None])
            for b in range(4 if entries else 0):
                where = (
                    "inside"
                    if b == 0
                    else f"outside, third {b} (by {mean([r['edges'][b] for r in runs]):.2f})"
                )
                bad = mean([t[b]["no_density"] for t in entries])
                if bad:
                    rows.append(
                        [source, name, where, f"no density in {bad:.0%} of rows", None, None, None]
                    )
                else:
                    cells = [
                        spread([t[b][s] for t in entries], 1 if s == "cover95" else 2)
                        for s in REGRESSION
                    ]
                    rows.append([source, name, where, *cells])
    caption = (
        f"Regression by distance from the training inputs ({_seeds(results.covariate)}): the toy "
        "beyond |x| = 4; a table beyond"
    )
    caption += (
        " the lower 70% of its first principal component. All use the noise from held-out rows "
        "except laplace-torch,"
    )
    caption += f" which fits its own; the ensemble's last layers are polished.{NETWORKS}"
    return Table(
        "robustness-5-distance",
        caption,
        ["data", "method", "where", *REGRESSION.values()],
        rows,
        {},
    )


def _ablation(results: Results) -> list[Table]:
    tables = []
    for dataset in unique(r["dataset"] for r in results.ablation):
        runs = [r["variants"] for r in results.ablation if r["dataset"] == dataset]
        scores = SCORES if "brier" in runs[0][0] else REGRESSION
        rows: list[list[Cell]] = []
        for i, first in enumerate(runs[0]):
            entries: list[Cell] = [spread([run[i][score] for run in runs]) for score in scores]
            rows.append(
                [
                    first["factor"],
                    first["level"],
                    *entries,
                    spread([run[i]["mass"] for run in runs]),
                ]
            )
        caption = (
            f"Ablation on {dataset}: one choice changed at a time from a dense last layer, "
            "polished, the prior by the evidence, "
        )
        caption += (
            f"the output refit ({_seeds(results.ablation)}). Mass: the median before "
            f"normalisation; one is exact.{NETWORKS}"
        )
        name = f"robustness-6-ablation-{dataset.replace(' ', '-').replace('–', '-')}"
        tables.append(Table(name, caption, ["choice", "level", *scores.values(), "mass"], rows, {}))
    return tables


def _cost(results: Results) -> Table:
    rows: list[list[Cell]] = []
    for method, name in NAMES.items():
        runs = [r for r in results.cost if r["method"] == method]
        missing = next((r["missing"] for r in runs if "missing" in r), None)
        if missing:
            rows.append([name, missing, None, None, None, None])
        elif runs:
            relative = mean([r["predict"] / r["forward"] for r in runs])
            cells = [spread([r[key] for r in runs]) for key in ("train", "fit", "predict")]
            rows.append([name, *cells, f"{relative:,.0f}", spread([r["memory"] for r in runs], 0)])
    caption = (
        "Cost on digits: seconds on one thread, memory above the trained network's process "
        f"({_seeds(results.cost)}). SSLA's "
    )
    caption += f"prediction is from a few rows. Dropout's fit is its own training.{NETWORKS}"
    columns = [
        "method",
        "train (s)",
        "fit (s)",
        "predict 1,000 (s)",
        "× a forward pass",
        "peak memory (MiB)",
    ]
    return Table("robustness-7-cost", caption, columns, rows, {})
