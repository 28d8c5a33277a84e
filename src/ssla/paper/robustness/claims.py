"""The appendix's statements beside what was found."""

from __future__ import annotations

from collections.abc import Callable

from ssla.paper.robustness.methods import BASELINES, NAMES
from ssla.paper.robustness.results import Results, mean, unique
from ssla.paper.runner import Claim

NOT_SHOWN = "said in the appendix; no table, figure or code"
CLOSE_ACCURACY, CLOSE_AUROC = 0.01, 0.02


def claims(results: Results) -> list[Claim]:
    """From means over seeds."""
    found = [
        Claim(
            "Brier score, ECE, AUROC, shift, wrong labels, ablations and overhead are reported",
            NOT_SHOWN,
            "nothing to compare with; the tables here are new",
            False,
            "All experiments of the paper are regressions, where Brier score and ECE of classes have no meaning.",
        ),
        *_by_dataset(results),
        _price(results),
        _outside(results),
        _shift(results),
        _labels(results),
        _distance(results),
        *_cost(results),
        _identity(results),
        _newton(results),
    ]
    return [claim for claim in found if claim is not None]


def _value(results: Results, dataset: str, method: str, score: str) -> float | None:
    values = results.scores(dataset, method, score)
    return mean(values) if values else None


def _best(value: Callable[[str], float | None], methods: tuple[str, ...], lower: bool = True) -> tuple[str, float]:
    known = {m: v for m in methods if (v := value(m)) is not None}
    best = (min if lower else max)(known, key=lambda m: known[m])
    return best, known[best]


def _by_dataset(results: Results) -> list[Claim]:
    datasets = results.datasets()
    worst = {}
    for dataset in datasets:
        _, best = _best(lambda m, d=dataset: _value(results, d, m, "accuracy"), BASELINES, lower=False)  # type: ignore[misc]
        worst[dataset] = (_value(results, dataset, "output", "accuracy") or 0.0) - best
    low = min(worst, key=lambda d: worst[d])
    found = [
        Claim(
            "Accuracy matches or exceeds that of the baselines (within a point of the best of five, on every set)",
            NOT_SHOWN,
            f"at worst {100 * worst[low]:+.1f} points, on {low}",
            worst[low] >= -CLOSE_ACCURACY - 1e-9,
        )
    ]
    for method, label in (("output", "our default"), ("weights", "SSLA")):
        known = [d for d in datasets if results.scores(d, method, "nll")]
        for score in ("ece", "nll"):
            wins, told = 0, []
            for dataset in known:
                name, best = _best(lambda m, d=dataset, s=score: _value(results, d, m, s), BASELINES)  # type: ignore[misc]
                ours = _value(results, dataset, method, score)
                assert ours is not None
                wins += ours < best
                told.append(f"{dataset} {ours:.3f} against {best:.3f} ({NAMES[name]})")
            if known:
                reason = "" if wins == len(known) else _why(results, method)
                statement = f"Uncertainties are better calibrated than every baseline's: {score.upper()} of {label}"
                found.append(
                    Claim(
                        statement, NOT_SHOWN, f"lowest on {wins} of {len(known)}: {'; '.join(told)}", wins == len(known), reason
                    )
                )
    wins = sum((_value(results, d, "output5", "nll") or 9e9) < (_value(results, d, "ensemble", "nll") or 0.0) for d in datasets)
    found.append(
        Claim(
            "Ours on five networks has a lower NLL than the deep ensemble of the same five, on every set",
            "not stated",
            f"on {wins} of {len(datasets)}",
            wins == len(datasets),
            "" if wins == len(datasets) else _why(results, "output"),
        )
    )
    return found


def _why(results: Results, method: str) -> str:
    if method == "weights":
        return "Where the network is nearly right everywhere, any doubt about its weights costs likelihood."
    told = [
        "A saturated softmax has almost no curvature at the mode, so the linearised K is wide and the probabilities are too even."
    ]
    ece = {d: {m: _value(results, d, m, "ece") for m in ("plug_in", "laplace", "output", "weights")} for d in results.datasets()}
    peers = [(one["laplace"], one["plug_in"]) for one in ece.values() if one["laplace"] is not None]
    if peers:
        worse = sum(la > plain for la, plain in peers if la is not None and plain is not None)
        told.append(f"laplace-torch's ECE is above its network's own on {worse} of {len(peers)} sets.")
    refitted = [one for one in ece.values() if one["weights"] is not None]
    if refitted:
        before, after, plain = (mean([one[m] for one in refitted]) or 0.0 for m in ("output", "weights", "plug_in"))
        told.append(
            f"A real refit (SSLA) brings the ECE from {before:.3f} to {after:.3f} in the mean of the {len(refitted)} sets that "
            f"have one (plug-in {plain:.3f})."
        )
    return " ".join(told)


def _price(results: Results) -> Claim | None:
    """What the doubt costs where the network knows, and buys where it does not."""
    datasets = [d for d in results.datasets() if results.scores(d, "validated", "nll")]
    if not datasets:
        return None

    def average(method: str, score: str) -> float:
        return mean([_value(results, d, method, score) for d in datasets]) or 0.0

    def told_apart(method: str) -> float:
        return mean([mean(results.aurocs(d, p, method)) for d in datasets for p in results.places(d)]) or 0.0

    by = ("output", "validated", "plug_in")
    nll, ece, auroc = [average(m, "nll") for m in by], [average(m, "ece") for m in by], [told_apart(m) for m in by]
    return Claim(
        "The doubt of our default costs likelihood on rows like the training rows and finds inputs from elsewhere: the prior by "
        "rows left out, which all but removes it, undoes both",
        "not stated",
        f"means over {len(datasets)} sets, evidence / rows left out / plug-in: NLL {_three(nll)}; ECE {_three(ece)}; AUROC by "
        f"entropy {_three(auroc)}",
        nll[1] < nll[0] and auroc[1] < auroc[0],
    )


def _three(values: list[float]) -> str:
    return " / ".join(f"{value:.3f}" for value in values)


def _outside(results: Results) -> Claim:
    pairs = [(d, p) for d in results.datasets() for p in results.places(d)]

    def average(method: str) -> float | None:
        values = [results.aurocs(d, p, method) for d, p in pairs]
        return mean([mean(v) for v in values]) if all(values) else None

    name, best = _best(average, BASELINES, lower=False)
    ours, five = average("output") or 0.0, average("output5") or 0.0
    return Claim(
        "Inputs from elsewhere are found about as well as by the best baseline (mean AUROC by entropy within 0.02)",
        NOT_SHOWN,
        f"{ours:.3f} (on five networks {five:.3f}) against {best:.3f} ({NAMES[name]}), plug-in {average('plug_in') or 0.0:.3f}",
        ours >= best - CLOSE_AUROC,
    )


def _shift(results: Results) -> Claim:
    told, good = [], True
    for kind in ("noise", "rotation"):
        last = unique(d for r in results.shift for d in r[kind])[-1]

        def value(method: str, kind: str = kind, last: str = last) -> float | None:
            return mean([r[kind][last][method]["nll"] for r in results.shift if method in r[kind][last]] or [None])

        name, best = _best(value, BASELINES)
        ours = value("output") or 0.0
        good &= ours <= best
        told.append(f"{kind} {last}: {ours:.2f} against {best:.2f} ({NAMES[name]}), plug-in {value('plug_in') or 0.0:.2f}")
    return Claim(
        "Robust under shift (our reading: at its strongest our default's NLL is no worse than any baseline's)",
        NOT_SHOWN,
        "; ".join(told),
        good,
    )


def _labels(results: Results) -> Claim:
    told, good = [], True
    for dataset in unique(r["dataset"] for r in results.labels):
        most = max(r["share"] for r in results.labels if r["dataset"] == dataset)
        runs = [r["methods"] for r in results.labels if r["dataset"] == dataset and r["share"] == most]

        def value(method: str, runs: list[dict[str, dict[str, float]]] = runs) -> float | None:
            return mean([run[method]["nll"] for run in runs if method in run] or [None])

        name, best = _best(value, BASELINES)
        ours = value("output") or 0.0
        good &= ours <= best
        told.append(
            f"{dataset}, {most:.0%}: {ours:.3f} against {best:.3f} ({NAMES[name]}), plug-in {value('plug_in') or 0.0:.3f}"
        )
    return Claim("Robust to wrong labels: our default's NLL is no worse than any baseline's", NOT_SHOWN, "; ".join(told), good)


def _distance(results: Results) -> Claim:
    told, good = [], True
    for source in unique(r["source"] for r in results.covariate):
        runs = [r["methods"] for r in results.covariate if r["source"] == source]

        def value(method: str, place: int, score: str, runs: list[dict[str, list[dict[str, float]]]] = runs) -> float:
            return mean([run[method][place][score] for run in runs]) or 0.0

        ratio = value("output", 3, "width95") / value("output", 0, "width95")
        plain = value("plug_in", 3, "width95") / value("plug_in", 0, "width95")
        good &= ratio > plain
        told.append(
            f"{source}: the 95% interval is {ratio:.2f} times as wide far outside as inside (plug-in {plain:.2f}), and holds "
            f"{value('output', 3, 'cover95'):.0f}% (on five networks {value('output5', 3, 'cover95'):.0f}%)"
        )
    return Claim(
        "Under drift the increments can still tell that inputs are unusual",
        "said in the conclusion, to be taken with caution",
        "; ".join(told),
        good,
        "Intervals do widen, and far too little: last-layer doubt does not make a network know what it does not know.",
    )


def _cost(results: Results) -> list[Claim]:
    found = []
    for method, label in (("output", "our default"), ("weights", "SSLA")):
        runs = [r for r in results.cost if r["method"] == method]
        if runs:
            train, fit, predict = (mean([r[key] for r in runs]) or 0.0 for key in ("train", "fit", "predict"))
            share = mean([r["predict"] / r["forward"] for r in runs]) or 0.0
            found.append(
                Claim(
                    f"The additional cost is modest: {label} fits and predicts 1,000 rows in less time than training took",
                    NOT_SHOWN,
                    f"training {train:.1f} s, fit {fit:.1f} s, 1,000 rows {predict:,.1f} s ({share:,.0f} forward passes)",
                    fit + predict < train,
                )
            )
    return found


def _identity(results: Results) -> Claim:
    gap = max(r["assla_gap"] for r in results.calibration)
    return Claim(
        "For classes ASSLA is the plug-in: the curvature of a softmax does not depend on y",
        "not stated",
        f"largest difference of a probability {gap:.1e}",
        gap < 1e-10,
    )


def _newton(results: Results) -> Claim | None:
    told = {
        d: (_value(results, d, "newton", "nll") or 0.0, _value(results, d, "plug_in", "nll") or 0.0) for d in results.datasets()
    }
    bad = [d for d, (newton, plain) in told.items() if newton > 2 * plain]
    return Claim(
        "One Newton step is enough for classes (NLL at most twice the plug-in's)",
        "not stated",
        "; ".join(f"{d} {a:.2f} against {b:.2f}" for d, (a, b) in told.items()),
        not bad,
        "The quadratic value ½gᵀK(I+ΛK)⁻¹g is not bounded by log p ≤ 0: an improbable class with a wide K outweighs all others."
        if bad
        else "",
    )
