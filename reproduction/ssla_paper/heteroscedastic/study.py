"""Table 2 and the figure of bands: the study's tasks and tables."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from ssla_paper.heteroscedastic import methods, published
from ssla_paper.heteroscedastic.claims import claims
from ssla_paper.heteroscedastic.figures import against_nominal, bands
from ssla_paper.heteroscedastic.numbers import (
    LABELS,
    LEVELS,
    OWN,
    PUBLISHED,
    Found,
    by_seed,
    gathered,
    percentiles,
)
from ssla_paper.runner import Claim, Record, Task
from ssla_paper.tables import Cell, Table

NETWORKS = (
    " Our networks and those of LA: 2×50, SiLU, outputs μ and log σ² (LA with one σ: one output); "
    "VI, MFVI and HMC: tanh."
)
AS_PUBLISHED = " Networks as published: 2×50, ReLU, one output."
SEEDS, SLOW_SEEDS, TEST, DATA_SEEDS, REFIT_RUNS = 20, 5, 1000, 100, 5


@dataclass(frozen=True)
class Heteroscedastic:
    name = "heteroscedastic"
    title = "Heteroscedastic regression (coverage table and bands)"

    def tasks(self, quick: bool) -> list[Task]:
        made: list[Task] = []
        runs, rates = (
            (2, published.REFIT_RATES[-1:]) if quick else (REFIT_RUNS, published.REFIT_RATES)
        )
        for rate in rates:
            settings = {"rate": rate, "points": 6, "epochs": 2} if quick else {"rate": rate}
            made += [
                Task(f"refitted-{rate:g}-{s}", published.refitted, {**settings, "seed": s}, 2)
                for s in range(runs)
            ]
        made.append(
            Task(
                "published-bands",
                published.bands,
                {"low": methods.LOW, "high": methods.HIGH, "steps": methods.STEPS},
            )
        )
        if quick:
            return [
                *made,
                Task("published-0", published.of_seeds, {"seeds": [OWN, *range(4)]}),
                *_quick_methods(),
            ]
        for part in range(0, DATA_SEEDS, 20):
            seeds = [OWN] * (part == 0) + [seed for seed in range(part, part + 20) if seed != OWN]
            made.append(Task(f"published-{part}", published.of_seeds, {"seeds": seeds}))
        made += [
            Task(f"settings-{rate:g}", published.of_settings, {"rates": [rate]})
            for rate in published.RATES
        ]
        return made + _methods()

    def report(self, records: Mapping[str, Record], folder: Path) -> list[Claim]:
        found = gathered(records)
        _published_table(records).write(folder)
        _coverage_table(found).write(folder)
        _score_table(found).write(folder)
        for table in (_refit_table(records), _settings_table(records), _chain_table(records)):
            if table.rows:
                table.write(folder)
        bands(records, folder)
        against_nominal(found, folder)
        return claims(records, found)


def _methods() -> list[Task]:
    """Seed by seed, so that a partial run is useful.

    The module's own seed: its 25 rows, and the figure's grid.
    """
    kinds: dict[str, tuple[Callable[..., Record], int]] = {
        "nuts": (methods.sampled, SLOW_SEEDS),
        "ours": (methods.ours, SEEDS),
        "variational": (methods.variational, SEEDS),
        "collapsed": (methods.collapsed, SLOW_SEEDS),
        "classical": (methods.classical, SEEDS),
    }
    editions = {"classical": 2}
    made = [
        Task(f"{n}-own", function, {"seed": OWN, "fresh": 0}, editions.get(n, 1))
        for n, (function, _) in kinds.items()
    ]
    for seed in range(SEEDS):
        for name, (function, count) in kinds.items():
            settings = {"seed": seed, "fresh": TEST} | (
                {"every": seed < SLOW_SEEDS} if name == "ours" else {}
            )
            if seed < count:
                made.append(Task(f"{name}-{seed}", function, settings, editions.get(name, 1)))
    return made


def _quick_methods() -> list[Task]:
    """Without numpyro's methods: their compilation alone takes longer than all other tasks."""
    made = [Task("ours-own", methods.ours, {"seed": OWN, "fresh": 0, "every": False})]
    for seed in range(2):
        settings = {"seed": seed, "fresh": 200}
        made.append(Task(f"ours-{seed}", methods.ours, {**settings, "every": seed == 0}))
        made.append(Task(f"classical-{seed}", methods.classical, settings, 2))
    return [
        *made,
        Task(
            "variational-0",
            methods.variational,
            {"seed": 0, "fresh": 200, "steps": 800, "mean_fields": False},
        ),
    ]


def _published_table(records: Mapping[str, Record]) -> Table:
    """Published beside the published procedure: on the module's own seed, and over data seeds."""
    runs = by_seed(records)
    refits = [record["coverage"] for record in records.values() if "widths" in record]
    rows: list[list[Cell]] = []
    for column, values in PUBLISHED.items():
        own: list[float] | None = None
        ends: list[tuple[float, float]] | None = None
        over = "not attempted"
        if column.startswith(("ASSLA", "LA")) and runs:
            several = {seed: columns[column] for seed, columns in runs.items()}
            own, ends, over = (
                several.get(OWN),
                percentiles(list(several.values())),
                f"central 95% of {len(several)} data seeds",
            )
        elif column.startswith("SSLA") and refits:
            ends, over = (
                percentiles(refits, 0.0, 1.0),
                f"least and most of {len(refits)} runs on one data seed",
            )
        for i, level in enumerate(LEVELS):
            span = f"{ends[i][0]:.0f}–{ends[i][1]:.0f}" if ends else None
            inside = (
                None if ends is None else "yes" if ends[i][0] <= values[i] <= ends[i][1] else "no"
            )
            rows.append([column, level, values[i], own[i] if own else None, span, inside, over])
    columns = [
        "column",
        "nominal",
        "published",
        "procedure, seed 42",
        "procedure, range",
        "inside",
        "range over",
    ]
    caption = (
        "Table 2 by the procedures that produced it: coverage in per cent of 25 test rows, in "
        f"steps of 4.{AS_PUBLISHED}"
    )
    return Table("heteroscedastic-published", caption, columns, rows, {"procedure, seed 42": ".0f"})


def _coverage_table(found: Found) -> Table:
    columns = [
        "method",
        *(f"{part} {level}" for level in LEVELS for part in ("published", "25 rows", "found")),
        "seeds",
    ]
    rows: list[list[Cell]] = []
    for method, scores in found.means.items():
        label, column = LABELS[method]
        row: list[Cell] = [label]
        for i, level in enumerate(LEVELS):
            single = found.single.get(method)
            row += [
                PUBLISHED[column][i] if column else None,
                single[f"cover{level}"] if single else None,
            ]
            row.append(scores[f"cover{level}"].shown(1))
        rows.append([*row, scores["nll"].seeds])
    rows += [[f"{key}: {what}", *[None] * 13] for key, what in found.missing.items()]
    formats = {f"25 rows {level}": ".0f" for level in LEVELS}
    caption = (
        "Coverage in per cent: published; ours on the toy module's own 25 test rows; ours on fresh "
        "test rows, mean ± standard error over data seeds (fewer seeds for slow methods, see the "
        f"last column).{NETWORKS}"
    )
    return Table("heteroscedastic-coverage", caption, columns, rows, formats)


def _score_table(found: Found) -> Table:
    names = {"nll": 3, "crps": 4, "rmse": 3, "width95": 2, "width50": 2}
    rows: list[list[Cell]] = []
    for method, scores in found.means.items():
        shown = [scores[name].shown(digits) for name, digits in names.items()]
        rows.append([LABELS[method][0], *shown, found.gap(method), scores["nll"].seeds])
    columns = [
        "method",
        "NLL",
        "CRPS",
        "RMSE",
        "width 95",
        "width 50",
        "points off nominal",
        "seeds",
    ]
    caption = (
        "Scores of standardised targets on fresh test rows, mean ± standard error over data seeds; "
        "points off nominal: |mean coverage − nominal|, mean over the four levels. Depth and prior "
        "of VI and MFVI (1×20) were chosen on test rows of seed 0, which favours them; the "
        "activation of our networks on rows of another seed; the prior of NUTS was not tuned."
        f"{NETWORKS}"
    )
    return Table("heteroscedastic-scores", caption, columns, rows, {"points off nominal": ".1f"})


def _refit_table(records: Mapping[str, Record]) -> Table:
    runs = [record for record in records.values() if "widths" in record]
    rows: list[list[Cell]] = [
        [f"{run['rate']:g}", run["seed"], *run["coverage"], min(run["widths"]), max(run["widths"])]
        for run in runs
    ]
    caption = (
        "SSLA as published on one data set, one network for each learning rate: runs differ only "
        "in the order of rows in the refits. Coverage in per cent of 25 rows, and the range of the "
        f"widths.{AS_PUBLISHED}"
    )
    columns = ["rate", "run", *(str(level) for level in LEVELS), "least width", "largest width"]
    formats = {
        **{str(level): ".0f" for level in LEVELS},
        "least width": ".3f",
        "largest width": ".3f",
    }
    return Table("heteroscedastic-refits", caption, columns, rows, formats)


def _settings_table(records: Mapping[str, Record]) -> Table:
    rows: list[list[Cell]] = []
    for record in records.values():
        for one in record.get("settings", []):
            shown = ["/".join(f"{value:.0f}" for value in one[name]) for name in ("assla", "la")]
            rows.append([f"{one['rate']:g}", one["batch"], one["loss"], *shown])
    rows.append(["published", None, None, "76/68/60/56", "100/100/92/68"])
    caption = (
        "ASSLA and LA as published (LA with K left out) on the toy module's own seed, by settings "
        f"in the ranges searched: coverage at 95/90/75/50 of 25 rows.{AS_PUBLISHED}"
    )
    columns = ["rate", "batch", "validation loss", "ASSLA", "LA"]
    return Table(
        "heteroscedastic-settings",
        caption,
        columns,
        rows if len(rows) > 1 else [],
        {"validation loss": ".4f"},
    )


def _chain_table(records: Mapping[str, Record]) -> Table:
    rows: list[list[Cell]] = []
    for record in records.values():
        if "chain" in record:
            chain = record["chain"]
            rows.append(
                [
                    record["seed"],
                    chain["draws"],
                    chain["r_hat"],
                    chain["effective"],
                    chain["divergent"],
                ]
            )
    caption = (
        "NUTS: one chain for each seed; split R̂ and effective draws of μ at the test rows "
        "(median), divergent transitions."
    )
    columns = ["data seed", "draws", "split R̂", "effective", "divergent"]
    return Table(
        "heteroscedastic-chains", caption, columns, rows, {"split R̂": ".3f", "effective": ".0f"}
    )
