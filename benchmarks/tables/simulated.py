"""Simulated tables with many categories, and with small counts: what the defaults gain and lose
there.

    make .venv/.ready-tables
    .venv/bin/python benchmarks/tables/simulated.py [--only categories|counts] [--first 100] [--seeds 2]

As many test rows as training rows. Seeds below 100 were looked at while the defaults were chosen,
those from 100 on were not.

Categories: three numbers, noise 0.3, and a category with an effect of standard deviation 1 (or a
slope for the first number, or no effect). NLL, RMSE (classes: log-loss, errors) and coverage at 90%
of

    ssla            SSLARegressor() / SSLAClassifier()
    50 columns      the same on one column for each of the 50 most frequent values (TableEncoder)
    left out        the same without the category
    CatBoost        native categories, RMSEWithUncertainty (or its defaults for classes), early stopping
    known           the mean of each value shrunken as the simulation has it, everything else known

Counts: Poisson and negative binomial (variance 1.5 and 3 times the mean), 600 rows. Log probability
and coverage at 90% of

    ssla            SSLARegressor()
    numbers         SSLARegressor("heteroscedastic"), the probability between y − ½ and y + ½
    known           the law of the simulation
"""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import pandas as pd
from scipy import stats

from ssla import metrics
from ssla.sklearn import SSLAClassifier, SSLARegressor, TableEncoder

NOISE, CATEGORY = 0.3, "place"
Scores = tuple[float, ...]


@dataclass(frozen=True)
class Categories:
    """A table of so many values of a category, with so many training rows each."""

    values: int
    rows: int
    effect: str = "level"  # or "slope", "none"
    classes: bool = False

    def __str__(self) -> str:
        return (
            f"{self.values} values of {self.rows} rows, effect: "
            f"{self.effect}{', two classes' if self.classes else ''}"
        )

    def draw(self, seed: int) -> tuple[pd.DataFrame, np.ndarray, np.ndarray, np.ndarray]:
        """Training rows and as many test rows: a frame, y, the part of y without the category,
        the number of the category.
        """
        rng = np.random.default_rng(seed)
        code = np.concatenate(
            [rng.permutation(np.repeat(np.arange(self.values), self.rows)) for _ in range(2)]
        )
        x, effect = rng.normal(size=(len(code), 3)), rng.normal(size=self.values)
        known = np.sin(2 * x[:, 0]) + 0.5 * x[:, 1]
        own = {"level": effect[code], "slope": effect[code] * x[:, 0], "none": np.zeros(len(code))}[
            self.effect
        ]
        y = known + own + NOISE * rng.normal(size=len(code))
        if self.classes:
            y = (rng.random(len(code)) < 1 / (1 + np.exp(-1.5 * (known + own)))).astype(float)
        frame = pd.DataFrame(x, columns=["a", "b", "c"]).assign(
            **{CATEGORY: [f"place {c}" for c in code]}
        )
        return frame, y, known, code

    def scores(self, seed: int) -> dict[str, Scores]:
        frame, y, known, code = self.draw(seed)
        half = len(y) // 2
        seen, new, target = frame.iloc[:half], frame.iloc[half:], y[half:]
        encoder = TableEncoder().fit(seen)
        tables = {
            "ssla": (seen, new),
            "50 columns": (encoder.transform(seen), encoder.transform(new)),
            "left out": (seen.drop(columns=CATEGORY), new.drop(columns=CATEGORY)),
        }
        found = {
            name: self.of_ours(*table, y[:half], target, seed) for name, table in tables.items()
        }
        found["CatBoost"] = self.of_catboost(seen, new, y[:half], target, seed)
        if self.effect == "level" and not self.classes:
            residuals = y[:half] - known[:half]
            spread = NOISE**2 / (
                self.rows + NOISE**2
            )  # of an effect, given its rows; the prior's is 1
            mean = (
                known[half:]
                + (np.bincount(code[:half], residuals) / (self.rows + NOISE**2))[code[half:]]
            )
            found["known"] = of_normal(mean, np.full(half, np.sqrt(NOISE**2 + spread)), target)
        return found

    def of_ours(
        self, seen: object, new: object, y: np.ndarray, target: np.ndarray, seed: int
    ) -> Scores:
        if self.classes:
            return of_classes(
                SSLAClassifier(random_state=seed).fit(seen, y).predict_proba(new)[:, 1], target
            )
        p = SSLARegressor(random_state=seed).fit(seen, y).predict_dist(new)
        return tuple(
            float(s)
            for s in (
                metrics.nll(p, target),
                metrics.rmse(p, target),
                metrics.coverage(p, target, 0.9),
            )
        )

    def of_catboost(
        self, seen: pd.DataFrame, new: pd.DataFrame, y: np.ndarray, target: np.ndarray, seed: int
    ) -> Scores:
        from catboost import CatBoostClassifier, CatBoostRegressor

        options = {
            "cat_features": [CATEGORY],
            "random_seed": seed,
            "verbose": False,
            "allow_writing_files": False,
        }
        options |= {"early_stopping_rounds": 50, "thread_count": 1}
        stop = np.random.default_rng(seed).random(len(y)) < 0.1
        model = (
            CatBoostClassifier(**options)
            if self.classes
            else CatBoostRegressor(loss_function="RMSEWithUncertainty", **options)
        )
        model.fit(seen[~stop], y[~stop], eval_set=(seen[stop], y[stop]))
        if self.classes:
            return of_classes(model.predict_proba(new)[:, 1], target)
        found = model.predict(new)
        return of_normal(found[:, 0], np.sqrt(found[:, 1]), target)


@dataclass(frozen=True)
class Counts:
    """A table of counts, with their variance so many times their mean."""

    mean: float
    times: float = 1.0

    def __str__(self) -> str:
        return f"counts of mean {self.mean:g}, variance {self.times:g} times the mean"

    def law(self, rate: np.ndarray) -> object:
        return (
            stats.poisson(rate)
            if self.times == 1
            else stats.nbinom(rate / (self.times - 1), 1 / self.times)
        )

    def scores(self, seed: int) -> dict[str, Scores]:
        rng = np.random.default_rng(seed)
        x = rng.normal(size=(1200, 4))
        rate = self.mean * np.exp(0.6 * np.sin(2 * x[:, 0]) - 0.4 * x[:, 1] * (x[:, 2] > 0) - 0.15)
        y = self.law(rate).rvs(random_state=rng).astype(float)
        seen, new, target = x[:600], x[600:], y[600:]
        known, found = self.law(rate[600:]), {}
        for name, likelihood in (("ssla", "auto"), ("numbers", "heteroscedastic")):
            model = SSLARegressor(likelihood, random_state=seed).fit(seen, y[:600])
            p = model.predict_dist(new)
            if p.kind == "count":
                logs = p.log_prob(target).numpy()
            else:  # what is below zero is part of zero
                logs = np.log(
                    np.maximum(
                        np.where(
                            target > 0,
                            p.cdf(target + 0.5) - p.cdf(target - 0.5),
                            p.cdf(target + 0.5),
                        ),
                        1e-12,
                    )
                )
            taken = float(model.ensemble_.settings.likelihood == "poisson")
            found[name] = (float(logs.mean()), float(metrics.coverage(p, target, 0.9)), taken)
        inside = (known.ppf(0.05) <= target) & (target <= known.ppf(0.95))
        return found | {"known": (float(known.logpmf(target).mean()), float(inside.mean()))}


def of_normal(mean: np.ndarray, sd: np.ndarray, y: np.ndarray) -> Scores:
    z = np.abs(y - mean) / sd
    return (
        float(-stats.norm(mean, sd).logpdf(y).mean()),
        float(np.sqrt(((y - mean) ** 2).mean())),
        float((z < 1.6449).mean()),
    )


def of_classes(probability: np.ndarray, y: np.ndarray) -> Scores:
    right = np.clip(np.where(y > 0, probability, 1 - probability), 1e-12, 1)
    return float(-np.log(right).mean()), float((right < 0.5).mean())


CATEGORIES = (
    Categories(300, 20),
    Categories(1000, 8),
    Categories(300, 20, "slope"),
    Categories(300, 20, "none"),
    Categories(2000, 3, "none"),
    Categories(30, 4, "none"),
    Categories(300, 20, classes=True),
    Categories(300, 20, "none", classes=True),
)
COUNTS = tuple(Counts(mean, times) for mean in (0.5, 2.0, 6.0) for times in (1.0, 1.5, 3.0))
HEADS = {
    "categories": "NLL / RMSE / coverage, or log-loss / errors",
    "counts": "log probability / coverage / Poisson taken",
}


def cases(only: str) -> Iterator[tuple[str, tuple[Categories | Counts, ...]]]:
    yield from (
        (name, found)
        for name, found in (("categories", CATEGORIES), ("counts", COUNTS))
        if only in ("", name)
    )


def means(score: Callable[[int], dict[str, Scores]], seeds: range) -> dict[str, np.ndarray]:
    found = [score(seed) for seed in seeds]
    return {name: np.mean([one[name] for one in found], 0) for name in found[0]}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--only", choices=("categories", "counts"), default="")
    parser.add_argument("--first", type=int, default=100)
    parser.add_argument("--seeds", type=int, default=2)
    asked = parser.parse_args()
    for harmless in ("the variational Gaussian did not converge", "Some columns are not used"):
        warnings.filterwarnings("ignore", harmless)
    for name, tables in cases(asked.only):
        print(f"\n{name}: {HEADS[name]}", flush=True)
        for table in tables:
            print(f"\n{table}", flush=True)
            for method, scores in means(
                table.scores, range(asked.first, asked.first + asked.seeds)
            ).items():
                print(
                    f"    {method:<12}" + " / ".join(f"{score:.3f}" for score in scores), flush=True
                )


if __name__ == "__main__":
    main()
