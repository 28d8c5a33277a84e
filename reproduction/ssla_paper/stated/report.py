"""The tables of the stated experiment."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ssla_paper.heteroscedastic.numbers import mean_of
from ssla_paper.runner import Record
from ssla_paper.stated.numbers import (
    COMPARED,
    EACH,
    WHOLE,
    Found,
    coverage_error,
    difference,
    jackknifed,
    levels_of,
    title_of,
)
from ssla_paper.stated.search import BATCHES, RATES, best, found
from ssla_paper.tables import Cell, Table

LEAD = (
    "Networks as stated: 2×50, ReLU, outputs μ and log σ². LA, ASSLA and SSLA: kfac, N(0, 1) with "
    "its precision tuned by the evidence. SSLA is one refit with the prediction, without the grid "
    "of candidates; rows whose refit fails have LA's answer."
)
STRUCTURES, PRIORS = ("kfac", "diag", "dense"), {"unit": "N(0, 1)", "tuned": "tuned"}


def write_tables(results: Found, folder: Path) -> None:
    """Write every table for which there are records."""
    for table in (
        search_table(results),
        *score_tables(results),
        beside_table(results),
        refit_table(results),
        structure_table(results),
        mode_table(results),
        worst_table(results),
    ):
        if table.rows:
            table.write(folder)


def search_table(results: Found) -> Table:
    rows: list[list[Cell]] = []
    for name in results.sets:
        trials = found().get(name)
        if not trials:
            continue
        chosen = best(trials)
        counts = next(iter(results.splits[name].values()))["rows"]
        near = sum(trial.loss <= chosen.loss + 0.05 for trial in trials)
        settings: list[Cell] = [f"{chosen.rate:.1e}", chosen.batch, f"{chosen.loss:.3f}"]
        rows.append([title_of(name), *counts, *settings, len(trials), near])
    caption = (
        f"The search, once a set: Optuna's TPE, learning rates {RATES[0]:g} to {RATES[1]:g}, "
        f"batches {BATCHES[0]} to {BATCHES[1]}, by the NLL of the validation rows (without its "
        "constant) of one split. Near: trials within 0.05 of the best. Splits of each set: "
        f"{len(next(iter(results.splits.values())))}. Bike Sharing: not attempted, its "
        "search was not finished."
    )
    columns = ["set", "training", "validation", "tested", "rate", "batch", "NLL", "trials", "near"]
    return Table("stated-search", caption, columns, rows, {})


def score_tables(results: Found) -> list[Table]:
    """NLL, CRPS, coverage error and width by set and method."""
    made = []
    for score, words, digits in (
        ("nll", "NLL", 3),
        ("crps", "CRPS", 4),
        ("coverage", "Coverage error (points off nominal, mean over the paper's levels)", 1),
        ("width95", "Mean width of the 95% interval", 3),
    ):
        rows: list[list[Cell]] = []
        for name in results.sets:
            row: list[Cell] = [title_of(name)]
            for method in COMPARED.values():
                splits = results.of(method, name)
                if not splits:
                    row.append(None)
                    continue
                if score == "coverage":
                    levels = levels_of(name)
                    shown = jackknifed(
                        lambda chosen, s=splits, at=levels: coverage_error(  # type: ignore[misc]
                            [s[i] for i in chosen], at
                        ),
                        len(splits),
                    )
                else:
                    shown = mean_of([one[score] for one in splits])
                row.append(shown.shown(digits))
            rows.append([*row, len(results.splits[name])])
        caption = f"{words} of test rows, mean ± standard error over splits. {LEAD}"
        columns = ["set", *COMPARED, "splits"]
        made.append(Table(f"stated-scores-{score}", caption, columns, rows, {}))
    return made


def beside_table(results: Found) -> Table:
    rows: list[list[Cell]] = []
    for name in results.sets:
        for method, variant, words in (
            ("ASSLA", WHOLE, "ASSLA"),
            ("SSLA", WHOLE, "SSLA"),
            ("SSLA", EACH, "SSLA, every y"),
            ("ours", WHOLE, "ours"),
        ):
            pairs = results.pairs(method, name, variant)
            row: list[Cell] = [title_of(name), words]
            for score, digits in (("nll", 3), ("crps", 4), ("coverage", 1), ("width", 1)):
                found_here = difference(pairs, score, name)
                row.append(None if found_here is None else found_here.shown(digits))
            rows.append([*row, len(pairs)])
    columns = ["set", "method", "NLL", "CRPS", "coverage error", "width in %", "splits"]
    caption = (
        "Method less LA on the same network, below zero is better for the first three: mean ± "
        "standard error over splits (of the coverage error and the width by the jackknife). Of SSLA "
        "on the rows whose refits converged, and LA on the same rows. "
        f"{LEAD}"
    )
    return Table("stated-beside", caption, columns, rows, {})


def refit_table(results: Found) -> Table:
    rows: list[list[Cell]] = []
    asked = {
        "N(0, 1)": "SSLA kfac unit",
        "tuned": "SSLA kfac tuned",
        "tuned, every y": "SSLA, every y",
    }
    for name in results.sets:
        row: list[Cell] = [title_of(name)]
        for method in asked.values():
            total, lost = results.refits(name, method)
            row.append(f"{100 * lost / total:.0f}")
        grid = results.of("SSLA kfac tuned", name)
        tested = sum(one["rows"] for one in grid)
        if not tested:
            continue
        for count in ("cut", "outside"):
            row.append(f"{100 * sum(one[count] for one in grid) / tested:.1f}")
        infinite = sum(one["outside"] > 0 for one in grid)
        precisions = [
            record["precision"]["kfac"]
            for record in results.splits[name].values()
            if not isinstance(record["precision"].get("kfac", ""), str)
        ]
        rows.append([*row, f"{infinite} of {len(grid)}", f"{statistics.median(precisions):.1f}"])
    columns = [
        "set",
        *(f"failed, {words}" for words in asked),
        "cut by the grid",
        "target outside",
        "infinite NLL",
        "tuned precision",
    ]
    caption = (
        "Refits of SSLA (kfac), in per cent of test rows: refits that do not converge, under N(0, "
        "1), under the tuned prior, and with each y; rows of which the grid of 20 candidates on ŷ ± "
        "1.96 cuts more than 2% of the mass, and rows whose target is outside of it, where the "
        "density is zero; splits whose NLL is infinite for that; the median of the tuned precision."
    )
    return Table("stated-refits", caption, columns, rows, {})


def structure_table(results: Found) -> Table:
    """Means over sets, of the splits on which every structure has an answer."""
    rows: list[list[Cell]] = []
    for method in ("LA", "ASSLA", "SSLA"):
        for structure in STRUCTURES:
            for prior, words in PRIORS.items():
                label = f"{method} {structure} {prior}"
                errors, covers, widths, nlls = [], [], [], []
                for name in results.sets:
                    splits = results.of(label, name)
                    if not splits:
                        continue
                    errors.append(coverage_error(splits, levels_of(name)))
                    covers.append(statistics.fmean(one["cover95"] for one in splits))
                    widths.append(statistics.fmean(one["width95"] for one in splits))
                    nlls.append(statistics.median(one["nll"] for one in splits))
                if not errors:
                    continue
                lost = [results.refits(name, label) for name in results.sets]
                share = 100 * sum(b for _, b in lost) / sum(a for a, _ in lost)
                rows.append(
                    [
                        method,
                        structure,
                        words,
                        f"{statistics.median(nlls):.3f}",
                        f"{statistics.fmean(errors):.2f}",
                        f"{statistics.fmean(covers):.1f}",
                        f"{statistics.fmean(widths):.3f}",
                        f"{share:.0f}" if method == "SSLA" else None,
                    ]
                )
    columns = ["method", "structure", "prior", "NLL", "coverage error", "95%", "width 95", "failed"]
    caption = (
        "Structures and priors, means over sets: of the NLL, which for SSLA on its grid can be "
        "infinite, the median over sets of the median over splits; coverage error in points; coverage and width at 95%; for SSLA "
        "the refits that failed, in per cent: those rows have LA's answer."
    )
    return Table("stated-structures", caption, columns, rows, {})


def mode_table(results: Found) -> Table:
    rows: list[list[Cell]] = []
    for name, records in results.modes.items():
        for mode in ("tilt", "as_is", "polish"):
            kept = [r["modes"][mode] for r in records.values() if "at" in r["modes"].get(mode, {})]
            if not kept:
                continue
            row: list[Cell] = [title_of(name), mode]
            for fact in ("log variance", "z2"):
                for part in ("train", "test"):
                    values = [one["at"][part][fact] for one in kept]
                    row.append(f"{statistics.fmean(values):.2f}")
            for method in ("plug-in", "ASSLA", "LA", "SSLA", "SSLA, every y"):
                scored = [one["methods"][method] for one in kept if "nll" in one["methods"][method]]
                values = [one["nll"] for one in scored]
                if not values:
                    row.append(None)
                    continue
                fewer = "" if len(values) == len(kept) else f", {len(values)} splits"
                row.append(f"{statistics.median(values):.3f} ({max(values):,.1f}{fewer})")
            row += [f"{failed_refits(kept, method):.0f}" for method in ("SSLA", "SSLA, every y")]
            rows.append([*row, len(kept)])
    columns = [
        "set",
        "mode",
        "log σ², training",
        "test",
        "z², training",
        "test rows",
        "plug-in",
        "ASSLA",
        "LA",
        "SSLA",
        "SSLA, every y",
        "failed",
        "every y",
        "splits",
    ]
    caption = (
        "What the mode of the last layer does, under N(0, 1) with kfac: means of log σ² and of z² = "
        "(y − μ)²/σ² at θ̂, and the NLL of test rows, median over splits (largest; how many "
        "splits, where others have a curvature without a factor). Failed: "
        "refits that do not converge, in per cent, of the prediction and of every y. The NLL of the "
        "network is half the sum of log σ², z² and log 2π."
    )
    return Table("stated-modes", caption, columns, rows, {})


def failed_refits(kept: Sequence[Record], method: str) -> float:
    """Return the share of rows in per cent whose refits failed, in records of one mode."""
    total = sum(int(one["methods"]["plug-in"]["rows"]) for one in kept)
    lost: int = sum(
        one["methods"][method].get("unconverged", one["methods"]["plug-in"]["rows"]) for one in kept
    )
    return 100 * lost / total


def worst_table(results: Found) -> Table:
    """The split with the largest NLL of a refit, by set and mode."""
    rows: list[list[Cell]] = []
    for name, records in results.modes.items():
        for mode in ("tilt", "as_is", "polish"):
            for method in ("SSLA", "SSLA, every y"):
                row = _worst(records, mode, method)
                if row:
                    rows.append([title_of(name), mode, method, *row])
    columns = [
        "set",
        "mode",
        "method",
        "split",
        "NLL",
        "without it",
        "its NLL",
        "σ, tilt",
        "σ, here",
        "z², tilt",
        "z², here",
        "width 95",
        "LA's width 95",
    ]
    caption = (
        "The split with the largest NLL of a refit, and its worst row: NLL of the split, of its "
        "other rows, and of that row; σ(x) and z² of that row by the network at its trained "
        "weights (tilt) and in this mode, and the widths of its intervals by SSLA and by LA (of "
        "LA: at its own worst row). Widths in standard deviations of the training targets."
    )
    return Table("stated-worst", caption, columns, rows, {})


@dataclass(frozen=True)
class WorstSplit:
    """The split with the largest NLL of a refit in one mode, and its worst row."""

    split: int
    nll: float
    others: float  # the mean NLL of its other rows
    laplace: float  # of LA without LA's worst row
    row_nll: float
    sigma_tilt: float  # by the network at its trained weights; NaN if it is not known there
    z2_tilt: float
    sigma: float
    z2: float
    width: float
    laplace_width: float  # at LA's worst row


def worst_split(records: Mapping[int, Record], mode: str, method: str) -> WorstSplit | None:
    """Return the split with the largest NLL; None without one."""
    kept = {
        seed: record["modes"]
        for seed, record in records.items()
        if "nll" in record["modes"].get(mode, {}).get("methods", {}).get(method, {})
    }
    if not kept:
        return None
    seed = max(kept, key=lambda seed: kept[seed][mode]["methods"][method]["nll"])
    scores, laplace = (kept[seed][mode]["methods"][name] for name in (method, "LA"))
    worst = scores["worst"]
    same = kept[seed].get("tilt", {}).get("methods", {})
    tilt = next(
        (one["worst"] for one in same.values() if one.get("worst", {}).get("row") == worst["row"]),
        {"sigma": math.nan, "z2": math.nan},
    )
    return WorstSplit(
        seed,
        scores["nll"],
        worst["others"],
        laplace["worst"]["others"],
        worst["nll"],
        tilt["sigma"],
        tilt["z2"],
        worst["sigma"],
        worst["z2"],
        worst["width95"],
        laplace["worst"]["width95"],
    )


def _worst(records: Mapping[int, Record], mode: str, method: str) -> list[Cell] | None:
    found_here = worst_split(records, mode, method)
    if found_here is None:
        return None
    one = found_here
    is_known = not math.isnan(one.sigma_tilt)
    return [
        str(one.split),
        f"{one.nll:,.2f}",
        f"{one.others:.2f}",
        f"{one.row_nll:,.1f}",
        f"{one.sigma_tilt:.3f}" if is_known else None,
        f"{one.sigma:.3f}",
        f"{one.z2_tilt:.1f}" if is_known else None,
        f"{one.z2:.1f}",
        f"{one.width:.4f}",
        f"{one.laplace_width:.3f}",
    ]
