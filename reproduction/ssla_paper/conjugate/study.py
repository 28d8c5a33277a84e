"""Tasks, tables and figures of the conjugate models."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ssla_paper.conjugate.claims import LAST, claims
from ssla_paper.conjugate.measure import MODELS, PRIORS, one
from ssla_paper.conjugate.numbers import spread, values
from ssla_paper.conjugate.pictures import conflicts, curves, falls
from ssla_paper.precision import PUBLISHED as INTERMEDIATE
from ssla_paper.runner import Claim, Record, Task
from ssla_paper.tables import Cell, Table, draw

SIZES = (20, 100, 1000, 10_000, 100_000, 1_000_000)
CONFLICTS = (20, 100, 1000, 10_000)
SEEDS, SEEDS_AT_LAST = 10, 3
SHORT = dict(zip(MODELS, ("normal", "poisson", "linear"), strict=True))
CONFLICTING = ("strong", "far", "far and strong")


@dataclass(frozen=True)
class Conjugate:
    name = "conjugate"
    title = "Conjugate models (two figures, and the one that is mentioned)"

    def tasks(self, quick: bool) -> list[Task]:
        sizes, conflicts_at, seeds = (
            ((20, 1000, LAST), (20,), 2) if quick else (SIZES, CONFLICTS, SEEDS)
        )
        tasks = []
        for model, short in SHORT.items():
            for prior in PRIORS[model]:
                at = (
                    sizes
                    if prior == "reference"
                    else conflicts_at
                    if prior in CONFLICTING
                    else (20,)
                )
                for n in at:
                    if quick and n == LAST and model != "normal–normal":
                        continue  # the slow part
                    count = seeds if n < LAST else 1 if quick else SEEDS_AT_LAST
                    settings = {"model": model, "prior": prior, "n": n, "seeds": count}
                    tasks.append(Task(f"{short}-{prior.replace(' ', '-')}-{n}", one, settings))
        return tasks

    def report(self, records: Mapping[str, Record], folder: Path) -> list[Claim]:
        reference = [record for record in records.values() if record["prior"] == "reference"]
        distances(reference).write(folder)
        errors(reference).write(folder)
        rounding(reference).write(folder)
        against_data(list(records.values())).write(folder)
        strengths(list(records.values())).write(folder)
        for model, short in SHORT.items():
            draw(
                curves(model, [record for record in reference if record["model"] == model]),
                folder,
                f"conjugate-{short}",
            )
        draw(falls(reference), folder, "conjugate-kl")
        draw(
            conflicts([record for record in records.values() if record["n"] == CONFLICTS[0]]),
            folder,
            "conjugate-conflict",
        )
        return claims(list(records.values()))


def distances(reference: list[Record]) -> Table:
    rows: list[list[Cell]] = []
    methods = [
        "float32 SSLA",
        "float32 ASSLA",
        "float64 SSLA",
        "float64 ASSLA",
        "ours SSLA",
        "ours ASSLA",
        "plug-in",
    ]
    for record in reference:
        known = INTERMEDIATE.get(record["n"]) if record["model"] == "normal–normal" else None
        cells = [spread(values(record, method, "kl")) for method in methods]
        rows.append(
            [
                record["model"],
                f"{record['n']:,}",
                len(record["runs"]),
                None if known is None else known[0][0],
                *cells,
            ]
        )
        if record["model"] == "Poisson–gamma":
            inside: list[Cell] = [
                spread(values(record, f"{method} in λ", "kl")) for method in methods[4:]
            ]
            rows.append(
                [
                    "Poisson–gamma, ours in λ",
                    f"{record['n']:,}",
                    len(record["runs"]),
                    None,
                    *[None] * 4,
                    *inside,
                ]
            )
    names = [
        "ASSLA published",
        "SSLA as published",
        "ASSLA as published",
        "SSLA, its formulas in float64",
        "ASSLA, the same",
    ]
    columns = ["model", "n", "runs", *names, "SSLA ours", "ASSLA ours", "plug-in"]
    caption = (
        "KL of the normalised approximation from the analytic predictive (nats), mean ± standard "
        "deviation over data sets."
    )
    return Table("conjugate-kl", caption, columns, rows, {"ASSLA published": ".1e"})


def errors(reference: list[Record]) -> Table:
    methods = {"as published": "float32", "ours": "ours"}
    rows: list[list[Cell]] = []
    for record in reference:
        row: list[Cell] = [record["model"], f"{record['n']:,}"]
        for what in ("error", "log_mass"):
            row += [
                spread(values(record, f"{key} {m}", what))
                for key in methods.values()
                for m in ("SSLA", "ASSLA")
            ]
        rows.append(row)
    columns = ["model", "n"]
    for words in ("largest error", "log mass"):
        columns += [f"{words}, {m} {name}" for name in methods for m in ("SSLA", "ASSLA")]
    caption = (
        "Before normalisation: the largest error of the log density where the analytic one is "
        "within e⁻⁸ of its peak, and the logarithm of the mass (0 is exact)."
    )
    return Table("conjugate-errors", caption, columns, rows, {})


def rounding(reference: list[Record]) -> Table:
    rows: list[list[Cell]] = []
    for record in reference:
        row: list[Cell] = [record["model"], f"{record['n']:,}"]
        for method in ("SSLA", "ASSLA"):
            row += [
                max(run["loss"][method][part] for run in record["runs"])
                for part in ("likelihood", "prior", "curvature")
            ]
        rows.append(row)
    columns = [
        "model",
        "n",
        *(
            f"{method}: {part}"
            for method in ("SSLA", "ASSLA")
            for part in ("ℓ", "prior", "curvature")
        ),
    ]
    caption = (
        "The error of float32 in each term of the published procedure: the largest difference from "
        "float64."
    )
    return Table("conjugate-rounding", caption, columns, rows, dict.fromkeys(columns[2:], ".1e"))


def against_data(records: list[Record]) -> Table:
    rows: list[list[Cell]] = []
    for record in records:
        if record["n"] not in CONFLICTS or record["prior"] not in ("reference", *CONFLICTING):
            continue
        a, b = PRIORS[record["model"]][record["prior"]]
        belief = (
            f"Gamma({a:g}, {b:g})" if record["model"] == "Poisson–gamma" else f"N({a:g}, {b:g})"
        )
        cells = [
            spread(values(record, m, "kl"))
            for m in ("float32 SSLA", "float32 ASSLA", "ours SSLA", "ours ASSLA")
        ]
        mass = [
            spread(values(record, method, "log_mass")) for method in ("float32 SSLA", "ours SSLA")
        ]
        rows.append(
            [record["model"], f"{record['prior']}: {belief}", f"{record['n']:,}", *cells, *mass]
        )
    columns = [
        "model",
        "prior",
        "n",
        "SSLA as published",
        "ASSLA as published",
        "SSLA ours",
        "ASSLA ours",
    ]
    columns += ["log mass, SSLA as published", "log mass, SSLA ours"]
    caption = (
        "Prior against data: KL from the analytic predictive, and the logarithm of SSLA's mass."
    )
    return Table("conjugate-conflict", caption, columns, rows, {})


def strengths(records: list[Record]) -> Table:
    rows: list[list[Cell]] = []
    for record in records:
        if record["prior"].startswith("variance"):
            methods = ("float32 SSLA", "float32 ASSLA", "ours SSLA", "ours ASSLA")
            cells = [spread(values(record, method, "kl"), ".3g") for method in methods]
            rows.append([f"N(0, {PRIORS[record['model']][record['prior']][1]:g})", *cells])
    columns = [
        "prior of both weights",
        "SSLA as published",
        "ASSLA as published",
        "SSLA ours",
        "ASSLA ours",
    ]
    caption = (
        "Linear regression, n = 20: KL from the analytic predictive, for stronger and stronger "
        "priors."
    )
    return Table("conjugate-strength", caption, columns, rows, {})
