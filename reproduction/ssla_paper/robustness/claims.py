"""The statements of the appendix, and the results."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable

from ssla_paper.robustness.covariate import BINS
from ssla_paper.robustness.methods import BASELINES, NAMES
from ssla_paper.robustness.results import Results, mean, unique
from ssla_paper.runner import OURS, PAPER, Claim

NOT_SHOWN = "stated in the appendix; no table, figure or code"
NOT_CLAIMED = "not claimed: the appendix says that robustness is assessed"
METHODS = (  # our name, the name in a statement, whose statement
    ("default", "our default", OURS),
    ("none", "ASSLA", PAPER),
    ("weights", "SSLA", PAPER),
)
CLOSE_ACCURACY, CLOSE_AUROC, CLOSE_ECE = 0.01, 0.02, 0.01
WIDER = 0.01  # a guess: a ratio of widths that differs by less is rounding and noise


def claims(results: Results) -> list[Claim]:
    """From means over seeds."""
    found = [
        Claim(
            "Brier score, ECE, AUROC, shift, wrong labels, ablations and overhead are reported",
            NOT_SHOWN,
            "nothing to compare with; the tables here are new",
            False,
            "All experiments of the paper are regressions, where Brier score and ECE of classes "
            "have no meaning.",
            number="6",
        ),
        *_accurate(results),
        *_by_dataset(results),
        *_below_laplace(results),
        _at_the_mode(results),
        _price(results),
        _both(results),
        *_outside(results),
        _shift(results),
        _labels(results),
        *_distance(results),
        *_cost(results),
        _identity(results),
        _newton(results),
    ]
    return [claim for claim in found if claim is not None]


def _value(results: Results, dataset: str, method: str, score: str) -> float | None:
    values = results.scores(dataset, method, score)
    return mean(values) if values else None


def _best(
    value: Callable[[str], float | None], methods: tuple[str, ...], lower: bool = True
) -> tuple[str, float]:
    known = {m: v for m in methods if (v := value(m)) is not None}
    best = (min if lower else max)(known, key=lambda m: known[m])
    return best, known[best]


def _accurate(results: Results) -> list[Claim]:
    """Accuracy beside the best of five baselines, on the sets where a method was run."""
    found = []
    for method, label, kind in METHODS:
        behind = {
            d: (_value(results, d, method, "accuracy") or 0.0)
            - _best_of(results, d, "accuracy", lower=False)[1]
            for d in results.datasets()
            if results.scores(d, method, "accuracy")
        }
        if behind:
            low = min(behind, key=lambda d: behind[d])
            found.append(
                Claim(
                    "Accuracy matches or exceeds that of the baselines (within a point of the best "
                    f"of five, on every set): {label}",
                    NOT_SHOWN,
                    f"at worst {100 * behind[low]:+.1f} points, on {low}; {len(behind)} sets",
                    behind[low] >= -CLOSE_ACCURACY - 1e-9,
                    kind=kind,
                    number="6" if kind == PAPER else "",
                )
            )
    return found


def _best_of(results: Results, dataset: str, score: str, lower: bool = True) -> tuple[str, float]:
    return _best(lambda m: _value(results, dataset, m, score), BASELINES, lower)


def _below_laplace(results: Results) -> list[Claim]:
    """The abstract's sentence, for classes: beside laplace-torch on the same networks."""
    found = []
    for method, label, kind in METHODS:
        if kind != PAPER:
            continue
        known = [
            d
            for d in results.datasets()
            if results.scores(d, method, "ece") and results.scores(d, "laplace", "ece")
        ]
        for score in ("ece", "nll"):
            pairs = {
                d: (_value(results, d, method, score), _value(results, d, "laplace", score))
                for d in known
            }
            wins = sum(a < b for a, b in pairs.values() if a is not None and b is not None)
            if known:
                ours, theirs = (mean([pair[at] for pair in pairs.values()]) or 0.0 for at in (0, 1))
                found.append(
                    Claim(
                        f"{label} outperforms classical Laplace in calibration, by ECE (classes, "
                        "laplace-torch on the same networks)"
                        if score == "ece"
                        else f"{label} has a lower NLL than classical Laplace (classes, "
                        "laplace-torch on the same networks)",
                        "regression only; no table of classes",
                        f"{ours:.3f} against {theirs:.3f} on average; lower on {wins} of "
                        f"{len(known)}: "
                        + "; ".join(f"{d} {a:.3f} against {b:.3f}" for d, (a, b) in pairs.items()),
                        wins == len(known),
                        "" if score == "ece" else "The NLL is not calibration alone.",
                        kind=PAPER if score == "ece" else OURS,
                        number="7" if score == "ece" else "",
                    )
                )
    return found


def _by_dataset(results: Results) -> list[Claim]:
    datasets = results.datasets()
    found = []
    for method, label, kind in METHODS:
        known = [d for d in datasets if results.scores(d, method, "nll")]
        for score in ("ece", "nll"):
            wins, findings = 0, []
            for dataset in known:
                name, best = _best_of(results, dataset, score)
                ours = _value(results, dataset, method, score)
                assert ours is not None
                wins += ours < best
                findings.append(f"{dataset} {ours:.3f} against {best:.3f} ({NAMES[name]})")
            if known:
                reason = "" if wins == len(known) else _why(results, method, score)
                if score == "ece":
                    apart, error = _from_the_best(results, method, known)
                    findings.append(f"on average {apart:+.4f} ± {error:.4f} from the best")
                found.append(
                    Claim(
                        "Uncertainties are at least as well calibrated as the best baseline's of "
                        f"each set (ECE, within two standard errors): {label}"
                        if score == "ece"
                        else f"The NLL is lower than the best baseline's on every set: {label}",
                        NOT_SHOWN if score == "ece" else "not claimed apart from calibration",
                        f"lowest on {wins} of {len(known)}: {'; '.join(findings)}",
                        apart <= 2 * error if score == "ece" else wins == len(known),
                        reason,
                        kind=kind if score == "ece" else OURS,
                        number="6" if kind == PAPER and score == "ece" else "",
                    )
                )
    wins = sum(
        (_value(results, d, "default5", "nll") or 9e9)
        < (_value(results, d, "ensemble", "nll") or 0.0)
        for d in datasets
    )
    found.append(
        Claim(
            "Our default on five networks has a lower NLL than the deep ensemble of the same "
            "five, on every set",
            "not stated",
            f"on {wins} of {len(datasets)}",
            wins == len(datasets),
            "" if wins == len(datasets) else _why(results, "default5", "nll"),
        )
    )
    return found


def _from_the_best(results: Results, method: str, known: list[str]) -> tuple[float, float]:
    """ECE less that of the best baseline of each set: mean over sets and seeds, and standard
    error of the paired differences over seeds.
    """
    pairs = [
        zip(
            results.scores(d, method, "ece"),
            results.scores(d, _best_of(results, d, "ece")[0], "ece"),
            strict=False,
        )
        for d in known
    ]
    seeds = [
        statistics.fmean(differences)
        for differences in zip(*([a - b for a, b in pair] for pair in pairs), strict=False)
    ]
    error = statistics.stdev(seeds) / math.sqrt(len(seeds)) if len(seeds) > 1 else 0.0
    return statistics.fmean(seeds), error


def _above(results: Results, dataset: str, one: str, other: str, score: str) -> bool:
    a, b = (_value(results, dataset, method, score) for method in (one, other))
    return a is not None and b is not None and a > b


def _why(results: Results, method: str, score: str) -> str:
    if method == "none":
        return "It is the plug-in of the polished network."
    known = [d for d in results.datasets() if results.scores(d, method, score)]
    plain, words = (
        ("none", "the plug-in of its own polished network")
        if method == "weights"
        else ("plug_in", "its own network")
    )
    plain, words = ("ensemble", "the ensemble") if method == "default5" else (plain, words)
    lost = [d for d in known if _above(results, d, method, plain, score)]
    return f"Against {words} it is worse on {', '.join(lost) or 'none'} of these."


def _at_the_mode(results: Results) -> Claim:
    """Why the default is not the Gaussian at the mode."""
    nll = {
        d: [_value(results, d, m, "nll") or 0.0 for m in ("default", "output", "plug_in")]
        for d in results.datasets()
    }
    even = [d for d in results.datasets() if _above(results, d, "output", "none", "ece")]
    findings = [
        "A saturated softmax has almost no curvature at the mode, so the linearised K is wide and "
        "the probabilities are underconfident: ECE is above that of its own network's plug-in on "
        f"{', '.join(even) or 'no set'}."
    ]
    ece = {
        d: {m: _value(results, d, m, "ece") for m in ("plug_in", "laplace", "output", "weights")}
        for d in results.datasets()
    }
    peers = [(one["laplace"], one["plug_in"]) for one in ece.values() if one["laplace"] is not None]
    if peers:
        worse = sum(la > plain for la, plain in peers if la is not None and plain is not None)
        findings.append(
            f"laplace-torch's ECE is above its network's own on {worse} of {len(peers)} sets."
        )
    refitted = [one for one in ece.values() if one["weights"] is not None]
    if refitted:
        before, after, plain = (
            mean([one[m] for one in refitted]) or 0.0 for m in ("output", "weights", "plug_in")
        )
        findings.append(
            f"A real refit (SSLA) reduces the ECE from {before:.3f} to {after:.3f} on average over "
            f"the {len(refitted)} sets that have one (plug-in {plain:.3f})."
        )
    return Claim(
        "Our default has a lower NLL than the Gaussian at the mode with the prior by the "
        "evidence, on every set",
        "not stated",
        "default / at the mode / plug-in: "
        + "; ".join(f"{d} {_three(values)}" for d, values in nll.items()),
        all(values[0] < values[1] for values in nll.values()),
        " ".join(findings),
    )


def _price(results: Results) -> Claim | None:
    """The effect of the epistemic uncertainty inside the distribution and outside."""
    datasets = [d for d in results.datasets() if results.scores(d, "validated", "nll")]
    if not datasets:
        return None

    def average(method: str, score: str) -> float:
        return mean([_value(results, d, method, score) for d in datasets]) or 0.0

    def told_apart(method: str) -> float:
        return (
            mean([mean(results.aurocs(d, p, method)) for d in datasets for p in results.places(d)])
            or 0.0
        )

    by = ("output", "validated", "plug_in")
    nll, ece, auroc = (
        [average(m, "nll") for m in by],
        [average(m, "ece") for m in by],
        [told_apart(m) for m in by],
    )
    return Claim(
        "The epistemic uncertainty of the Gaussian at the mode costs likelihood in distribution "
        "and detects out-of-distribution inputs: the prior by held-out rows, which almost removes "
        "it, undoes both",
        "not stated",
        f"means over {len(datasets)} sets, evidence / held-out rows / plug-in: NLL {_three(nll)}; "
        f"ECE {_three(ece)}; AUROC by entropy {_three(auroc)}",
        nll[1] < nll[0] and auroc[1] < auroc[0],
    )


def _both(results: Results) -> Claim | None:
    """Real refits: as confident as the plug-in in distribution, as uncertain as our default
    outside.
    """
    datasets = [d for d in results.datasets() if results.scores(d, "weights", "nll")]
    pairs = [(d, p) for d in datasets for p in results.places(d) if results.aurocs(d, p, "weights")]
    if not pairs:
        return None
    by = ("weights", "default", "none")
    nll, ece = (
        [mean([_value(results, d, m, score) for d in datasets]) or 0.0 for m in by]
        for score in ("nll", "ece")
    )
    auroc = [mean([mean(results.aurocs(*pair, m)) for pair in pairs]) or 0.0 for m in by]
    return Claim(
        "SSLA is as well calibrated as the plug-in of its network (ECE within 0.01) and detects "
        "out-of-distribution inputs as well as our default (AUROC within 0.02)",
        "not stated",
        f"SSLA / our default / plug-in of the polished network: NLL {_three(nll)}, ECE "
        f"{_three(ece)} over {len(datasets)} sets; AUROC {_three(auroc)} over {len(pairs)} kinds "
        "of inputs",
        ece[0] <= ece[2] + CLOSE_ECE and auroc[0] >= auroc[1] - CLOSE_AUROC,
    )


def _three(values: list[float]) -> str:
    return " / ".join(f"{value:.3f}" for value in values)


def _outside(results: Results) -> list[Claim]:
    """Mean AUROC beside the best baseline, over the kinds of inputs on which a method was run."""
    found = []
    for method, label, kind in METHODS:
        pairs = [
            (d, p)
            for d in results.datasets()
            for p in results.places(d)
            if results.aurocs(d, p, method)
        ]
        if not pairs:
            continue

        def average(name: str, pairs: list[tuple[str, str]] = pairs) -> float | None:
            values = [results.aurocs(d, p, name) for d, p in pairs]
            return mean([mean(v) for v in values]) if all(values) else None

        name, best = _best(average, BASELINES, lower=False)
        ours = average(method) or 0.0
        shown = f"{label} {ours:.3f}"
        if method == "default":
            shown += f" (on five networks {average('default5') or 0.0:.3f})"
        found.append(
            Claim(
                "Out-of-distribution inputs are detected about as well as by the best baseline "
                f"(mean AUROC by entropy within 0.02): {label}",
                NOT_SHOWN,
                f"{shown} against {best:.3f} ({NAMES[name]}), plug-in "
                f"{average('plug_in') or 0.0:.3f}, over {len(pairs)} kinds of inputs",
                ours >= best - CLOSE_AUROC,
                "For classes it is the plug-in of the polished network."
                if method == "none"
                else "",
                kind=kind,
                number="6" if kind == PAPER else "",
            )
        )
    return found


def _shift(results: Results) -> Claim:
    findings, good = [], True
    for kind in ("noise", "rotation"):
        last = unique(d for r in results.shift for d in r[kind])[-1]

        def value(method: str, kind: str = kind, last: str = last) -> float | None:
            return mean(
                [r[kind][last][method]["nll"] for r in results.shift if method in r[kind][last]]
                or [None]
            )

        name, best = _best(value, BASELINES)
        ours = value("default") or 0.0
        good &= ours <= best
        findings.append(
            f"{kind} {last}: {ours:.2f} against {best:.2f} ({NAMES[name]}), plug-in "
            f"{value('plug_in') or 0.0:.2f}"
        )
    return Claim(
        "Robust under shift (our reading: at its strongest our default's NLL is no worse than any "
        "baseline's)",
        NOT_CLAIMED,
        "; ".join(findings),
        good,
        kind=OURS,
    )


def _labels(results: Results) -> Claim:
    findings, good = [], True
    for dataset in unique(r["dataset"] for r in results.labels):
        most = max(r["share"] for r in results.labels if r["dataset"] == dataset)
        runs = [
            r["methods"] for r in results.labels if r["dataset"] == dataset and r["share"] == most
        ]

        def value(method: str, runs: list[dict[str, dict[str, float]]] = runs) -> float | None:
            return mean([run[method]["nll"] for run in runs if method in run] or [None])

        name, best = _best(value, BASELINES)
        ours = value("default") or 0.0
        good &= ours <= best
        findings.append(
            f"{dataset}, {most:.0%}: {ours:.3f} against {best:.3f} ({NAMES[name]}), plug-in "
            f"{value('plug_in') or 0.0:.3f}"
        )
    statement = "Robust to wrong labels: our default's NLL is no worse than any baseline's"
    return Claim(statement, NOT_CLAIMED, "; ".join(findings), good, kind=OURS)


def _distance(results: Results) -> list[Claim]:
    """Far from the training inputs an interval is wider than the plug-in's grows, or rows are
    flagged because their density has no integral.
    """
    return [_far(results, *method) for method in METHODS if _was_run(results, method[0])]


def _was_run(results: Results, method: str) -> bool:
    return any(method in record["methods"] for record in results.covariate)


def _far(results: Results, method: str, label: str, kind: str) -> Claim:
    findings, good = [], True
    for source in unique(r["source"] for r in results.covariate):
        runs = [r["methods"] for r in results.covariate if r["source"] == source]

        def value(
            name: str,
            place: int,
            score: str,
            runs: list[dict[str, list[dict[str, float]]]] = runs,
        ) -> float | None:
            return mean([run[name][place][score] for run in runs if name in run] or [None])

        def wider(name: str) -> float | None:
            ends = [value(name, place, "width95") for place in (0, BINS - 1)]
            return ends[1] / ends[0] if ends[0] and ends[1] else None

        ratio, plain = wider(method), wider("plug_in") or math.inf
        flagged = value(method, BINS - 1, "no_density") or 0.0
        cover = value(method, BINS - 1, "cover95")
        good &= flagged > 0 or (ratio is not None and ratio > plain * (1 + WIDER))
        parts = []
        if ratio is not None:
            parts.append(f"95% interval {ratio:.2f} times as wide far outside as inside")
        if flagged:
            parts.append(f"no density in {flagged:.0%} of rows, which are flagged")
        if cover is not None:
            parts.append(f"covers {cover:.0f}%")
        findings.append(f"{source}: {', '.join(parts)} (plug-in {plain:.2f} times)")
    return Claim(
        f"Under drift the increments can still indicate unusual inputs: {label}",
        "stated in the conclusion, with caution",
        "; ".join(findings),
        good,
        "Intervals widen, but far too little: the uncertainty of the last layer does not cover "
        "errors of the features."
        if good
        else "With constant noise its intervals are those of the plug-in."
        if method == "none"
        else "",
        kind=kind,
        number="6" if kind == PAPER else "",
    )


def _cost(results: Results) -> list[Claim]:
    found = []
    for method, label, kind in METHODS:
        runs = [r for r in results.cost if r["method"] == method]
        if runs:
            train, fit, predict = (
                mean([r[key] for r in runs]) or 0.0 for key in ("train", "fit", "predict")
            )
            share = mean([r["predict"] / r["forward"] for r in runs]) or 0.0
            found.append(
                Claim(
                    "The additional cost is modest (fit and prediction of 1,000 rows take less time "
                    f"than training, digits): {label}",
                    NOT_SHOWN,
                    f"training {train:.1f} s, fit {fit:.1f} s, 1,000 rows {predict:,.1f} s "
                    f"({share:,.0f} forward passes)",
                    fit + predict < train,
                    "Ten classes. In regression, the paper's setting, real refits are cheap: see "
                    "the study of the UCI sets."
                    if method == "weights"
                    else "",
                    kind=kind,
                    number="6" if kind == PAPER else "",
                )
            )
    return found


def _identity(results: Results) -> Claim:
    gap = max(r["assla_gap"] for r in results.calibration)
    return Claim(
        "For classes ASSLA is the plug-in of the polished network: the curvature of a softmax "
        "does not depend on y",
        "not stated",
        f"largest difference of a probability {gap:.1e}",
        gap < 1e-10,
    )


def _newton(results: Results) -> Claim | None:
    findings = {
        d: (_value(results, d, "newton", "nll") or 0.0, _value(results, d, "plug_in", "nll") or 0.0)
        for d in results.datasets()
    }
    bad = [d for d, (newton, plain) in findings.items() if newton > 2 * plain]
    return Claim(
        "One Newton step is enough for classes (NLL at most twice the plug-in's)",
        "not stated",
        "; ".join(f"{d} {a:.2f} against {b:.2f}" for d, (a, b) in findings.items()),
        not bad,
        "The quadratic value ½gᵀK(I+ΛK)⁻¹g is not bounded by log p ≤ 0: an improbable class with a "
        "wide K dominates all others."
        if bad
        else "",
    )
