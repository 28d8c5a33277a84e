"""Slopes over seeds, beside the powers that the paper states."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ssla_paper.rates import regions
from ssla_paper.rates.measure import BOUNDED, MODELS, one
from ssla_paper.runner import OURS, Claim, Record, Task
from ssla_paper.tables import Cell, Table, draw

SIZES = (500, 1000, 2000, 4000, 8000, 16000, 32000)
SEEDS = 8
CLOSE = 0.1  # a slope within this distance of a power of n counts as that power


SETTINGS = (
    "At a new row off the prediction: x = (0.5, −0.3), y = 2 (counts: y = 5), and x = 1, y = 2 in "
    "the last model. Rows that say ŷ are at the self-prediction, for which the paper states its "
    "results: in these models (constant Gaussian noise, or counts with their canonical link) the "
    "step is zero there and only the curvature increment is left. linear: x ~ N(0, 1)², two slopes and an intercept, noise 0.5. "
    "poisson: the same with log link. network: two tanh units, 9 weights, noise 0.25. Rows are "
    "drawn from the model itself; every weight has the prior N(0, 1). linear, x_i = 1/i: one "
    "slope, noise 0.5; it satisfies (A1) to (A3) with a bounded J."
)
VARYING = "where J grows like n (A2′) and y ≠ ŷ"


@dataclass(frozen=True)
class Quantity:
    """A quantity, its place in the paper, the power of n that the paper states and the correct
    one.
    """

    key: str
    words: str
    where: str
    published: str
    corrected: str
    power: float


QUANTITIES = (
    Quantity("step", "‖θ̃ − θ̂‖", "Lemma 1", "−1", "−1", -1),
    Quantity(
        "smallest",
        "smallest eigenvalue of J",
        "proof of Lemma 1",
        "1, by (A2)",
        "1 if inputs keep varying",
        1,
    ),
    Quantity("gain", "ℓ̃(θ̃) − ℓ̃(θ̂) with log π", "Theorem 1", "−1", "−1", -1),
    Quantity("loss", "ℓ(θ̂) − ℓ(θ̃) with log π", "proof of Theorem 1", "−2", "−1: ℓ″ is O(n)", -1),
    Quantity("bend", "‖J̃(θ̃) − J̃(θ̂)‖/n", "Corollary 1", "−1", "−1, or no change", -1),
    Quantity(
        "prior",
        "log π(θ̃) − log π(θ̂)",
        "Corollary 1",
        "−1, below leading order",
        "−1, leading order",
        -1,
    ),
    Quantity(
        "curvature",
        "½ log det J̃(θ̃) − ½ log det J(θ̂)",
        "equation of ASSLA",
        "leading order",
        "−1",
        -1,
    ),
    Quantity("gap", "log SSLA − log ASSLA, off ŷ", "Theorem 1, Corollary 1", "−1", "−1", -1),
    Quantity(
        "outer", "tr G̃ᵀG̃ / tr(−ℓ̃″) at ŷ, G̃ = ∇ℓ̃(θ̂)", "Corollary 2", "0", "−1: rank one, O(1)", -1
    ),
)


@dataclass(frozen=True)
class Slope:
    """Mean and standard error over seeds; none for a quantity that is always zero."""

    mean: float | None
    error: float

    def __str__(self) -> str:
        return (
            "none: exactly 0"
            if self.mean is None
            else f"{self.mean:.3f} ± {self.error:.3f}".replace("-", "−")
        )

    def near(self, power: float) -> bool:
        return self.mean is None or abs(self.mean - power) < CLOSE


def slope(records: list[Record], key: str) -> Slope:
    if all(value == 0 for record in records for value in record[key]):
        return Slope(None, 0.0)
    found = [_line(record["n"], record[key]) for record in records]
    error = statistics.stdev(found) / math.sqrt(len(found)) if len(found) > 1 else math.nan
    return Slope(statistics.mean(found), error)


def _line(n: list[int], values: list[float]) -> float:
    return statistics.linear_regression(
        [math.log(a) for a in n], [math.log(abs(b)) for b in values]
    ).slope


@dataclass(frozen=True)
class Rates:
    name = "rates"
    title = "Lemma 1, Theorem 1 and the corollaries: rates in n"

    def tasks(self, quick: bool) -> list[Task]:
        sizes, seeds = (list(SIZES[:5]), 3) if quick else (list(SIZES), SEEDS)
        return [
            Task(
                f"{'bounded' if model == BOUNDED else model}-{seed}",
                one,
                {"model": model, "seed": seed, "sizes": sizes},
            )
            for model in (*MODELS, BOUNDED)
            for seed in range(seeds)
        ] + regions.tasks()

    def report(self, records: Mapping[str, Record], folder: Path) -> list[Claim]:
        apart = {key: record for key, record in records.items() if key.startswith("region-")}
        records = {key: record for key, record in records.items() if key not in apart}
        by_model = {
            model: [r for r in records.values() if r["model"] == model]
            for model in (*MODELS, BOUNDED)
        }
        slopes = {
            (q.key, model): slope(runs, q.key)
            for model, runs in by_model.items()
            for q in QUANTITIES
        }
        first = by_model["linear"][0]
        rows_: list[list[Cell]] = [
            [
                q.words,
                q.where,
                q.published,
                q.corrected,
                *(str(slopes[q.key, model]) for model in by_model),
            ]
            for q in QUANTITIES
        ]
        caption = (
            f"Powers of n: slopes of log |quantity| on log n, n = {first['n'][0]:,} to "
            f"{first['n'][-1]:,}, mean ± standard error over {len(by_model['linear'])} seeds. "
            f"{SETTINGS}"
        )
        columns = ["quantity", "in", "published power", "corrected", *by_model]
        Table("rates", caption, columns, rows_, {}).write(folder)
        _signs(by_model).write(folder)
        draw(picture(by_model), folder, "rates")
        return claims(by_model, slopes) + (regions.report(apart, folder) if apart else [])


def _ends(runs: list[Record], key: str) -> tuple[float, float]:
    """Smallest and largest over seeds and n."""
    values = [value for run in runs for value in run[key]]
    return min(values), max(values)


def _signs(by_model: dict[str, list[Record]]) -> Table:
    rows_: list[list[Cell]] = []
    for model, runs in by_model.items():
        along, outer = _ends(runs, "along"), _ends(runs, "own_outer")
        whole = statistics.mean(run["rows_outer"][-1] for run in runs)
        fisher = statistics.mean(run["own_fisher"][-1] for run in runs)
        rows_.append([model, *along, _ends(runs, "gap_at_prediction")[1], outer[1], fisher, whole])
    columns = [
        "model",
        "step along +J̃⁻¹∇log p, least",
        "most",
        "SSLA less ASSLA at ŷ",
        "new row's ggᵀ at ŷ",
        "its Gauss–Newton part",
        "tr Σ gᵢgᵢᵀ / tr J",
    ]
    caption = (
        "The step θ̃ − θ̂ in units of J̃⁻¹∇log p (published: −1); at y = ŷ, the largest difference "
        "between SSLA and ASSLA, and the trace of the new row's curvature by the outer product of "
        "its gradient and by the generalised Gauss–Newton; the outer products of all rows against "
        "J at the largest n."
    )
    formats = {
        columns[1]: ".3f",
        columns[2]: ".3f",
        columns[3]: ".1e",
        columns[4]: ".1e",
        columns[5]: ".2f",
        columns[6]: ".3f",
    }
    return Table("rates-signs", caption, columns, rows_, formats)


LEMMA = "Lemma 1, θ̃ = θ̂ + O(1/n)"
THEOREM = "Theorem 1, ℓ̃(θ̃) = ℓ̃(θ̂) + O((Ln + 1)/n²), which is O(1/n)"
PRIOR = "Corollary 1 on π, π(θ̃) = π(θ̂) + O(1/n)"
GAUSS_NEWTON = "Equation (13) and Corollary 2, J̃ ≈ G̃ᵀG̃/n"


def claims(by_model: dict[str, list[Record]], slopes: dict[tuple[str, str], Slope]) -> list[Claim]:
    def found(key: str) -> str:
        return "powers " + ", ".join(f"{slopes[key, model]} ({model})" for model in MODELS)

    def all_near(key: str, power: float) -> bool:
        return all(slopes[key, model].near(power) for model in MODELS)

    def holds(
        statement: str, published: str, key: str, power: float = -1, reason: str = ""
    ) -> Claim:
        return Claim(
            f"{statement}: {VARYING}",
            published,
            found(key),
            all_near(key, power),
            reason,
            number="2",
        )

    def bounded(statement: str, key: str, reason: str = "") -> Claim:
        """The same statement under (A1) to (A3) as printed."""
        return Claim(
            f"{statement}: under (A1) to (A3) alone, y ≠ ŷ",
            "power −1 whenever eigenvalues of J are bounded below",
            f"with x_i = 1/i, where they are: power {slopes[key, BOUNDED]}; J has power "
            f"{slopes['smallest', BOUNDED]}",
            slopes[key, BOUNDED].near(-1),
            reason,
            number="2",
        )

    along = [end for model in by_model for end in _ends(by_model[model], "along")]
    ratios = [
        statistics.mean(p / c for p, c in zip(run["prior"], run["curvature"], strict=True))
        for m in MODELS
        for run in by_model[m]
    ]
    own = max(_ends(by_model[model], "own_outer")[1] for model in MODELS)
    at_prediction = max(_ends(by_model[model], "gap_at_prediction")[1] for model in MODELS)
    largest = by_model["linear"][0]["n"][-1]
    whole = [statistics.mean(run["rows_outer"][-1] for run in by_model[model]) for model in MODELS]
    return [
        holds(
            LEMMA,
            "power −1",
            "step",
            reason="At y = ŷ, with constant Gaussian noise or a canonical link, the step is zero.",
        ),
        bounded(
            LEMMA,
            "step",
            "(A2) bounds J from below by a constant; the lemma needs a bound that grows like n. "
            "With a log variance it fails at y = ŷ too: see the errata.",
        ),
        Claim(
            "Proof of Lemma 1, θ̃ − θ̂ = −J̃⁻¹∇log p",
            "a step against the gradient: factor −1",
            f"factor {min(along):.3f} to {max(along):.3f} on J̃⁻¹∇log p",
            max(along) < 0,
            "The sign is reversed: θ̃ moves towards the new observation. The rate does not change.",
            number="2",
        ),
        Claim(
            "J grows like n, which is (A2′), when inputs keep varying",
            "not stated",
            found("smallest"),
            all_near("smallest", 1),
            kind=OURS,
        ),
        holds(THEOREM, "power −1", "gain"),
        bounded(THEOREM, "gain"),
        holds(
            "Proof of Theorem 1, ℓ(θ̃) = ℓ(θ̂) + O(1/n²)",
            "power −2",
            "loss",
            -2,
            "The second derivative of ℓ is a sum over n: O(n) · O(1/n)² = O(1/n). The rate of the "
            "theorem does not change, since its other term is O(1/n) as well. (Measured with log "
            "π in ℓ, so that θ̂ is its mode and the first order vanishes.)",
        ),
        holds(
            "Corollary 1 on J, J̃(θ̃)/n = J̃(θ̂)/n + O(1/n)",
            "power −1",
            "bend",
            -1,
            "For the line J does not depend on θ at all.",
        ),
        holds(PRIOR, "power −1", "prior"),
        bounded(PRIOR, "prior"),
        Claim(
            "The prior increment is of higher order than the curvature increment, so ASSLA may "
            "drop the one and keep the other: y ≠ ŷ",
            "subleading",
            f"both have power −1; their ratio lies between {min(ratios):.2f} and {max(ratios):.2f}",
            not (all_near("prior", -1) and all_near("curvature", -1)),
            "Prior, curvature and the refit's gain are all O(1/n), the order of the whole "
            "difference between a predictive and the plug-in: of three terms of the same order "
            "ASSLA keeps one. With a log variance the same is true at y = ŷ: see the errata.",
            number="2",
        ),
        Claim(
            "The prior increment is of higher order than the curvature increment, so ASSLA may "
            "drop the one and keep the other: y = ŷ, constant Gaussian noise or a canonical link",
            "subleading",
            f"SSLA and ASSLA differ by at most {at_prediction:g} at ŷ: nothing moves there",
            at_prediction < 1e-9,
            number="2",
        ),
        Claim(
            f"{GAUSS_NEWTON}: G̃ the gradient of the sum ℓ̃, at θ̂",
            "approximately equal",
            f"at ŷ tr G̃ᵀG̃ / tr(−ℓ̃″) has {found('outer')}; the new row's own part is {own:g}",
            all_near("outer", 0),
            "G̃ is zero at θ̂ except for the gradient of the prior, and the new row's gradient is "
            "zero at ŷ.",
            number="2",
        ),
        Claim(
            f"{GAUSS_NEWTON}: G̃ the matrix of the rows' own scores, without the factor 1/n",
            "approximately equal",
            f"tr Σ gᵢgᵢᵀ / tr J at n = {largest:,} is {min(whole):.3f} to {max(whole):.3f}",
            max(abs(ratio - 1) for ratio in whole) < CLOSE,
            "The paper's J̃ is −ℓ̃″/n there, and a sum in (12). For the new row alone the outer "
            "product is zero at ŷ, its curvature is not: that needs the generalised Gauss–Newton.",
            number="2",
        ),
        holds("SSLA and ASSLA differ by O(1/n)", "power −1", "gap"),
    ]


def picture(by_model: dict[str, list[Record]]) -> Any:
    """Every quantity against n, geometric mean over seeds, between lines of power −1 and −2."""
    import matplotlib.pyplot as plt

    shown = {
        "step": "o",
        "gain": "s",
        "loss": "^",
        "bend": "D",
        "prior": "v",
        "curvature": "P",
        "gap": "X",
        "outer": "*",
    }
    words = {q.key: q.words for q in QUANTITIES}
    figure, axes = plt.subplots(
        1, len(by_model), figsize=(4.1 * len(by_model), 4.4), sharey=True, constrained_layout=True
    )
    colors = plt.get_cmap("tab10").colors  # type: ignore[attr-defined]
    for ax, (model, runs) in zip(axes, by_model.items(), strict=True):
        n = runs[0]["n"]
        for color, (key, mark) in zip(colors, shown.items(), strict=False):
            if any(value == 0 for run in runs for value in run[key]):
                continue
            means = [
                math.exp(statistics.mean(math.log(run[key][i]) for run in runs))
                for i in range(len(n))
            ]
            ax.plot(n, means, marker=mark, ms=5, lw=1, color=color, label=words[key], alpha=0.85)
        for power, style in ((-1, "--"), (-2, ":")):
            ax.plot(
                n,
                [(a / n[0]) ** power for a in n],
                style,
                color="#333333",
                lw=1.2,
                label=f"n to the power {power}".replace("-", "−"),
            )
        ax.set(xscale="log", yscale="log", xlabel="n", title=model)
    axes[0].set_ylabel("size")
    handles, labels = axes[1].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=5, frameon=False, fontsize=9)
    return figure
