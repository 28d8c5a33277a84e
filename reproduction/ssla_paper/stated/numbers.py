"""Records -> means over splits with standard errors, and paired differences of methods."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from ssla_paper.heteroscedastic.numbers import Mean, mean_of
from ssla_paper.runner import Record
from ssla_paper.stated.data import TOY
from ssla_paper.uci.data import SETS, STAND_IN, title

TOY_LEVELS, LEVELS = (95, 90, 75, 50), (95, 75, 50)
MAIN = "kfac tuned"  # the stated setting on UCI: KFAC, with post-hoc tuning
WHOLE, EACH = "whole line", "every y"  # variants of SSLA with kfac and the tuned prior
COMPARED = {  # column -> method of a record
    "plug-in": "plug-in",
    "LA": f"LA {MAIN}",
    "ASSLA": f"ASSLA {MAIN}",
    "SSLA": "SSLA, whole line",
    "SSLA, every y": "SSLA, every y",
    "ours": "ours",
}
Scores = Mapping[str, float]


@dataclass(frozen=True)
class Found:
    """The records of all splits: set -> seed of the split -> record; and those of the modes."""

    splits: Mapping[str, Mapping[int, Record]]
    modes: Mapping[str, Mapping[int, Record]]

    @property
    def sets(self) -> list[str]:
        return sorted(self.splits, key=[TOY, *SETS, STAND_IN].index)

    def of(self, method: str, name: str) -> list[Scores]:
        """Return the scores of a method on the splits of a set, where it has any."""
        records = self.splits[name].values()
        found = [record["methods"].get(method, {}) for record in records]
        return [scores for scores in found if "nll" in scores]

    def mean(self, method: str, name: str, score: str) -> Mean | None:
        values = [scores[score] for scores in self.of(method, name)]
        return mean_of(values) if values else None

    def pairs(self, method: str, name: str, variant: str = WHOLE) -> list[tuple[Scores, Scores]]:
        """Return the scores of a method and of LA by split.

        method: "ASSLA", "ours" or "plug-in" on all test rows, or "SSLA" on the rows whose refits
        converged; splits without such rows are left out.
        """
        found: list[tuple[Scores, Scores]] = []
        for record in self.splits[name].values():
            if method == "SSLA":
                both = record["refitted"].get(variant, {"rows": 0})
                if both["rows"]:
                    found.append((both["SSLA"], both["LA"]))
                continue
            one = record["methods"].get(COMPARED[method], {})
            other = record["methods"].get(COMPARED["LA"], {})
            if "nll" in one and "nll" in other:
                found.append((one, other))
        return found

    def refits(self, name: str, method: str) -> tuple[int, int]:
        """Return how many rows of all splits were asked of SSLA, and how many did not converge; a
        split without a factor has none that converged.
        """
        asked = lost = 0
        for record in self.splits[name].values():
            scores = record["methods"].get(method, {"error": ""})
            if "error" in scores:
                asked += record["rows"][2]
                lost += record["rows"][2]
            else:
                asked += scores["rows"]
                lost += scores["unconverged"]
        return asked, lost


def gathered(records: Mapping[str, Record]) -> Found:
    splits: dict[str, dict[int, Record]] = {}
    modes: dict[str, dict[int, Record]] = {}
    for record in records.values():
        kind = modes if "modes" in record else splits
        kind.setdefault(record["set"], {})[record["split"]] = record
    return Found(splits, modes)


def levels_of(name: str) -> tuple[int, ...]:
    """Return the levels of the paper's table about a set."""
    return TOY_LEVELS if name == TOY else LEVELS


def title_of(name: str) -> str:
    return "Toy" if name == TOY else title(name)


def coverage_error(splits: Sequence[Scores], levels: Sequence[int]) -> float:
    """Return the mean over levels of |mean coverage over splits − level|, in points."""
    return statistics.fmean(
        abs(statistics.fmean(scores[f"cover{level}"] for scores in splits) - level)
        for level in levels
    )


def jackknifed(value: Callable[[list[int]], float], count: int) -> Mean:
    """Return value(all splits) with the standard error of the jackknife over `count` splits."""
    every = list(range(count))
    if count < 2:
        return Mean(value(every), math.nan, count)
    left = [value([i for i in every if i != out]) for out in every]
    centre = statistics.fmean(left)
    squares = sum((one - centre) ** 2 for one in left)
    return Mean(value(every), math.sqrt((count - 1) / count * squares), count)


def difference(pairs: Sequence[tuple[Scores, Scores]], score: str, name: str) -> Mean | None:
    """Return method − LA with its standard error over splits; None without a split.

    score: "nll", "crps", "width" (the mean over levels of the relative difference of widths, in per
    cent) or "coverage" (of the coverage errors, in points).
    """
    if not pairs:
        return None
    levels = levels_of(name)

    def of(chosen: list[int]) -> float:
        ours, theirs = [pairs[i][0] for i in chosen], [pairs[i][1] for i in chosen]
        if score == "coverage":
            return coverage_error(ours, levels) - coverage_error(theirs, levels)
        if score == "width":
            return 100 * statistics.fmean(
                statistics.fmean(one[f"width{level}"] for one in ours)
                / statistics.fmean(one[f"width{level}"] for one in theirs)
                - 1
                for level in levels
            )
        return statistics.fmean(
            one[score] - other[score] for one, other in zip(ours, theirs, strict=True)
        )

    return jackknifed(of, len(pairs))


def overall(means: Sequence[Mean]) -> Mean:
    """Return the mean over sets, whose errors are independent."""
    errors = [0.0 if math.isnan(one.error) else one.error for one in means]
    return Mean(
        statistics.fmean(one.value for one in means),
        math.hypot(*errors) / len(means),
        sum(one.seeds for one in means),
    )
