"""The paper's statements about its networks, on the networks that its text states.

A method is better than LA if the mean over sets of their difference is below zero by two standard
errors, and if more sets are clearly below zero than clearly above: one set of 60 rows must not
decide. Where the two conditions disagree the claim says so.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping

from ssla_paper.heteroscedastic.numbers import Mean
from ssla_paper.runner import OURS, Claim, Record
from ssla_paper.stated.data import TOY
from ssla_paper.stated.numbers import (
    COMPARED,
    EACH,
    WHOLE,
    Found,
    difference,
    levels_of,
    overall,
    title_of,
)
from ssla_paper.stated.report import failed_refits, worst_split
from ssla_paper.uci.published import PUBLISHED

LEVELS, SCORES = (95, 75, 50), ("cover95", "cover75", "cover50", "nll", "crps")
STEP = 4  # points: one row of the published toy table
CLEAR = 2.0  # standard errors
LIVER = "liver_disorders"
CLOSE = 0.2  # nats a row: a guess of what one row may not change
SAME = 0.02  # nats: a guess of what "agree" allows


def claims(results: Found) -> list[Claim]:
    """The claims for which there are records."""
    made: list[Claim] = []
    for method, variant in (("SSLA", WHOLE), ("ASSLA", WHOLE), ("SSLA", EACH)):
        words = "SSLA with a refit for every y" if variant == EACH else method
        kinds = {
            score: _by_set(results, method, score, variant)
            for score in ("coverage", "nll", "width")
        }
        if not kinds["nll"]:
            continue
        made += [
            _calibrated(kinds["coverage"], method, words),
            _lower(kinds["nll"], method, words),
            _sharper(kinds["width"], words),
        ]
    made += [*_conservative(results), *_structures(results), *_stable(results)]
    if LIVER in results.sets:
        made += [_liver(results, method) for method in ("SSLA", "ASSLA")]
    made += [*_same_laplace(results), *_ours(results)]
    return [*made, *_polish(results), *_one_row(results)]


def _by_set(results: Found, method: str, score: str, variant: str = WHOLE) -> dict[str, Mean]:
    """Return method − LA by set, for sets with at least one split."""
    found = {
        name: difference(results.pairs(method, name, variant), score, name) for name in results.sets
    }
    return {name: value for name, value in found.items() if value is not None}


def _is_below(value: Mean) -> bool:
    """Whether a difference is below zero by two standard errors (of one split: below zero)."""
    error = 0.0 if value.error != value.error else value.error
    return value.value + CLEAR * error < 0


def _is_above(value: Mean) -> bool:
    return _is_below(Mean(-value.value, value.error, value.seeds))


def _each(found: Mapping[str, Mean], digits: int) -> str:
    """The differences by set, and how many are clear."""
    below, above = sum(map(_is_below, found.values())), sum(map(_is_above, found.values()))
    shown = ", ".join(f"{title_of(name)} {value.shown(digits)}" for name, value in found.items())
    return f"clearly below zero on {below} and above on {above} of {len(found)} sets ({shown})"


def _is_better(found: Mapping[str, Mean]) -> bool:
    """Whether the mean over sets is clearly below zero, and more sets are than are above."""
    return _is_below(overall(list(found.values()))) and _more_are_below(found)


def _more_are_below(found: Mapping[str, Mean]) -> bool:
    return sum(map(_is_below, found.values())) > sum(map(_is_above, found.values()))


def _doubt(found: Mapping[str, Mean]) -> str:
    value = overall(list(found.values()))
    if not (_is_below(value) or _is_above(value)):
        return " The mean is within two standard errors of zero."
    if _is_below(value) and not _more_are_below(found):
        least = min(found, key=lambda name: found[name].value)
        rest = overall([each for name, each in found.items() if name != least])
        return (
            " By the mean alone it would hold, but not more sets are clearly below zero than above; "
            f"without {title_of(least)} ({found[least].seeds} splits) the mean is {rest.shown(2)}."
        )
    return ""


def _shared(words: str) -> str:
    """Which rows and variant a statement is about."""
    rows = "On test rows whose refits converge. " if words.startswith("SSLA") else ""
    return f"{rows}KFAC and the tuned prior; LA on the same network and rows."


def _published_errors(method: str) -> float:
    """The mean over sets and levels of |published coverage − level|."""
    return statistics.fmean(
        abs(cover - level)
        for rows in PUBLISHED.values()
        for cover, level in zip(rows[method], LEVELS, strict=False)
    )


def _published_coverage(method: str) -> str:
    """The mean over sets of the published coverage, by level."""
    columns = zip(*(rows[method][: len(LEVELS)] for rows in PUBLISHED.values()), strict=True)
    return "/".join(f"{statistics.fmean(column):.0f}" for column in columns)


def _calibrated(found: Mapping[str, Mean], method: str, words: str) -> Claim:
    total = overall(list(found.values()))
    return Claim(
        "Outperforms classical Laplace in calibration (the stated networks; coverage error, in "
        f"points): {words}",
        f"points off nominal in the table of UCI sets: {method} {_published_errors(method):.1f}, "
        f"LA {_published_errors('LA'):.1f}",
        f"differs from LA's by {total.shown(2)} on average; {_each(found, 1)}",
        _is_better(found),
        _shared(words) + _doubt(found),
        number="7",
    )


def _lower(found: Mapping[str, Mean], method: str, words: str) -> Claim:
    total = overall(list(found.values()))
    at = SCORES.index("nll")
    lower = sum(rows[method][at] < rows["LA"][at] for rows in PUBLISHED.values())
    return Claim(
        f"Has a lower NLL than classical Laplace (the stated networks): {words}",
        f"lower on {lower} of {len(PUBLISHED)} UCI sets",
        f"differs from LA's by {total.shown(3)} on average; {_each(found, 3)}",
        _is_better(found),
        _shared(words) + _doubt(found),
        number="4",
    )


def _sharper(found: Mapping[str, Mean], words: str) -> Claim:
    total = overall(list(found.values()))
    return Claim(
        f"Is sharper than classical Laplace (the stated networks; widths, in per cent): {words}",
        "comparatively tighter; no widths are given",
        f"differs from LA's by {total.shown(1)}% on average; {_each(found, 1)}",
        _is_better(found),
        _shared(words) + _doubt(found),
        number="4",
    )


def _conservative(results: Found) -> list[Claim]:
    label = COMPARED["LA"]
    over: dict[str, list[float]] = {}
    for name in results.sets:
        splits = results.of(label, name)
        if splits:
            over[name] = [
                statistics.fmean(one[f"cover{level}"] for one in splits) - level
                for level in levels_of(name)
            ]
    if not over:
        return []
    above = [name for name, points in over.items() if min(points) > 2]
    shown = ", ".join(
        f"{title_of(name)} {'/'.join(f'{point:+.0f}' for point in points)}"
        for name, points in over.items()
    )
    return [
        Claim(
            "Classical Laplace is conservative: more than 2 points above nominal at every level, on "
            "most sets (the stated networks)",
            f"100/100/92/68 on the toy set; {_published_coverage('LA')} on average over the UCI sets",
            f"on {len(above)} of {len(over)} sets; coverage less nominal at the paper's levels: "
            f"{shown}",
            2 * len(above) > len(over),
            "With the noise that the network predicts, in place of a noise of one.",
            number="4",
        )
    ]


def _structures(results: Found) -> list[Claim]:
    """Coverage of SSLA on the toy set by structure, under each prior."""
    if TOY not in results.sets:
        return []
    apart: dict[str, float] = {}
    for prior in ("unit", "tuned"):
        columns = []
        for structure in ("kfac", "diag", "dense"):
            splits = results.of(f"SSLA {structure} {prior}", TOY)
            if splits:
                columns.append(
                    [
                        statistics.fmean(one[f"cover{level}"] for one in splits)
                        for level in levels_of(TOY)
                    ]
                )
        if len(columns) > 1:
            apart[prior] = max(max(c) - min(c) for c in zip(*columns, strict=True))
    if not apart:
        return []
    return [
        Claim(
            "SSLA's uncertainty varies with the covariance approximation (the stated networks, toy "
            "set; more than 4 points of coverage)",
            "columns up to 16 points apart",
            f"up to {apart['unit']:.1f} points apart under N(0, 1), {apart['tuned']:.1f} with the "
            "prior tuned for each structure",
            max(apart.values()) > STEP,
            "The structure enters the determinant of the refit, and the evidence that tunes the "
            "prior.",
            number="4",
        )
    ]


def _stable(results: Found) -> list[Claim]:
    """How many refits fail, and how much worse than LA the worst split is."""
    shares = {}
    for words, method in (
        ("one refit with the prediction, N(0, 1)", "SSLA kfac unit"),
        ("the same, tuned prior", "SSLA kfac tuned"),
        ("a refit for every y, tuned prior", "SSLA, every y"),
    ):
        counts = [results.refits(name, method) for name in results.sets]
        shares[words] = 100 * sum(lost for _, lost in counts) / sum(asked for asked, _ in counts)
    far: list[str] = []
    for variant in (WHOLE, EACH):
        gaps = {
            name: max(one["nll"] - other["nll"] for one, other in pairs)
            for name in results.sets
            if (pairs := results.pairs("SSLA", name, variant))
        }
        if gaps:
            name = max(gaps, key=lambda each: gaps[each])
            far.append(f"{variant}: {gaps[name]:,.2f} nats a row ({title_of(name)})")
    shown = ", ".join(f"{words} {share:.0f}%" for words, share in shares.items())
    return [
        Claim(
            "SSLA can become unstable (the stated networks; more than 5% of its refits fail)",
            "stated without a number",
            f"refits that do not converge: {shown}; the worst split beside LA, {'; '.join(far)}",
            max(shares.values()) > 5,
            _why_refits_fail(results),
            number="4",
        )
    ]


def _why_refits_fail(results: Found) -> str:
    """The share of failed refits by mode, where it was measured."""
    shares = []
    for mode in ("tilt", "as_is", "polish"):
        kept = [
            record["modes"][mode]
            for records in results.modes.values()
            for record in records.values()
            if "at" in record["modes"].get(mode, {})
        ]
        if kept:
            shares.append(f"{mode} {failed_refits(kept, 'SSLA'):.0f}%")
    if not shares:
        return ""
    return (
        f"By the mode of the last layer, under N(0, 1) ({', '.join(map(title_of, results.modes))}): "
        f"{', '.join(shares)}. Early stopping leaves a gradient. Tilt takes it out of the objective, "
        "as_is does not: that is their only difference."
    )


def _liver(results: Found, method: str) -> Claim:
    pairs = results.pairs(method, LIVER)
    nll, levels = difference(pairs, "nll", LIVER), levels_of(LIVER)
    assert nll is not None
    cover = "/".join(
        f"{statistics.fmean(one[f'cover{level}'] for one, _ in pairs):.1f}" for level in levels
    )
    la = "/".join(
        f"{statistics.fmean(other[f'cover{level}'] for _, other in pairs):.1f}" for level in levels
    )
    under = statistics.fmean(one["cover95"] for one, _ in pairs) < 95 - STEP
    published = PUBLISHED[LIVER]
    return Claim(
        "Liver Disorders is a failure: pronounced under-coverage and an NLL above LA's (the stated "
        f"networks): {method}",
        f"{method} {published[method][0]:.0f}/{published[method][1]:.0f}/"
        f"{published[method][2]:.0f}, NLL {published[method][3]}; LA NLL {published['LA'][3]}",
        f"{cover}, LA {la}; NLL differs by {nll.shown(3)}",
        under and _is_above(nll),
        "Under-coverage: 95% intervals that cover less than 91%.",
        number="4",
    )


def _same_laplace(results: Found) -> list[Claim]:
    """LA by refits in the outputs and by its integral."""
    gaps = {}
    for name in results.sets:
        records = results.splits[name].values()
        both = [
            (record["methods"][COMPARED["LA"]], record["methods"]["LA, integral"])
            for record in records
            if "nll" in record["methods"].get(COMPARED["LA"], {})
            and "nll" in record["methods"].get("LA, integral", {})
        ]
        if both:
            gaps[name] = statistics.median(abs(one["nll"] - other["nll"]) for one, other in both)
    if not gaps:
        return []
    worst = max(gaps, key=lambda name: gaps[name])
    return [
        Claim(
            "The LA here, a refit in the outputs, agrees with the integral over its Gaussian (NLL "
            f"to {SAME}, median over splits)",
            "–",
            f"on {sum(gap <= SAME for gap in gaps.values())} of {len(gaps)} sets; most on "
            f"{title_of(worst)}: {gaps[worst]:.3f}",
            max(gaps.values()) <= SAME,
            kind=OURS,
        )
    ]


def _ours(results: Found) -> list[Claim]:
    """The correct computation with our defaults, beside LA and ASSLA."""
    made = []
    for score, words, digits in (("nll", "NLL", 3), ("coverage", "coverage error", 1)):
        found = _by_set(results, "ours", score)
        if not found:
            continue
        total = overall(list(found.values()))
        made.append(
            Claim(
                f"Our goal: the default with validation rows has a lower {words} than the stated LA",
                "–",
                f"differs by {total.shown(digits)} on average; {_each(found, digits)}",
                _is_better(found),
                "It has the validation rows that also stopped the training, LA has not."
                + _doubt(found),
                kind=OURS,
            )
        )
    return made


def _polish(results: Found) -> list[Claim]:
    """Why polish hurts: the two parts of the NLL, at training and at test rows."""
    made = []
    for name, records in results.modes.items():
        kept = [
            record["modes"]
            for record in records.values()
            if all("at" in record["modes"].get(mode, {}) for mode in ("tilt", "polish"))
        ]
        if not kept:
            continue

        def change(part: str, fact: str, kept: list[Record] = kept) -> float:
            return statistics.fmean(
                one["polish"]["at"][part][fact] - one["tilt"]["at"][part][fact] for one in kept
            )

        nll = {
            mode: [one[mode]["methods"]["ASSLA"]["nll"] for one in kept]
            for mode in ("tilt", "polish")
        }
        made.append(
            Claim(
                "mode='polish' hurts ASSLA because it fits the log variance to the training rows: "
                f"{title_of(name)}",
                "not stated",
                f"training rows: log σ² {change('train', 'log variance'):+.2f}, z² "
                f"{change('train', 'z2'):+.2f}, NLL {change('train', 'nll'):+.3f}; test rows: log "
                f"σ² {change('test', 'log variance'):+.2f}, z² {change('test', 'z2'):+.2f}, NLL of "
                f"the network {change('test', 'nll'):+.3f}; ASSLA, median over {len(kept)} splits: "
                f"{statistics.median(nll['tilt']):.3f} (tilt), "
                f"{statistics.median(nll['polish']):.3f} (polish)",
                change("train", "nll") < 0 < change("test", "nll")
                and change("test", "z2") > -change("test", "log variance") > 0,
                "Early stopping left log σ² larger than the training rows ask for; polish undoes "
                "that. ASSLA is nearly the plug-in of that network, so it inherits the loss.",
                kind=OURS,
            )
        )
    return made


def _one_row(results: Found) -> list[Claim]:
    """The split of Liver Disorders with the largest NLL after polish, and its worst row."""
    records = results.modes.get(LIVER, {})
    worst = worst_split(records, "polish", "SSLA")
    if worst is None:
        return []
    return [
        Claim(
            "After mode='polish' the largest NLL of SSLA on Liver Disorders is made by one test "
            "row: without it the split is within 0.2 of LA",
            "not stated",
            f"split {worst.split}: NLL {worst.nll:,.2f}, without the row {worst.others:.2f} (LA "
            f"without its own worst row {worst.laplace:.2f}); the row has an NLL of "
            f"{worst.row_nll:,.1f}: sigma {worst.sigma_tilt:.2f} and z² {worst.z2_tilt:.1f} at the "
            f"trained weights, {worst.sigma:.2f} and {worst.z2:.1f} after polish, and SSLA's 95% "
            f"interval there is {worst.width:.3f} wide",
            worst.others - worst.laplace < CLOSE < worst.nll - worst.others,
            "Polish lowers sigma at this row, and the refit with the prediction, whose residual is "
            f"zero, lowers it again: the interval of the polished network is "
            f"{2 * 1.96 * worst.sigma:.3f} wide.",
            kind=OURS,
        )
    ]
