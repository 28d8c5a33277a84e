"""Scores and calibration of a model, from a few numbers of each row.

Predictions of all rows are made in blocks, and only these numbers are kept, so memory is bounded.

A *measure* is such a number. Here n is the number of rows, and L that of LEVELS. All targets have
these measures: "nll"; "mass"; "inside" and "width" (n, L) of intervals or sets; the "epistemic" and
the "aleatoric" variance; "flagged", whether a computation did not reach its tolerance; and
"off_centre", which is that of the diagnostics. Classes also have "sure" (the largest probability),
"hit" (whether its class was observed), "brier" and "classes" (their number). Other targets have
"square" (the squared error), "lower" and "upper" (the ranks of `rank_targets`), and, if they are
not angles, "crps".
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ssla import metrics
from ssla.maths.quadrature import wrap_angles
from ssla.plots.calibration import Ranks, compute_binomial_range
from ssla.predictive.cavities import rank_targets
from ssla.tables.report.subject import Subject

# What the page shows: guesses.
LEVELS = (0.5, 0.9, 0.95)  # of intervals and sets
BLOCK = 4096  # rows that are predicted together
CURVE_LEVELS = 19  # of the curve of coverage and of the calibration error of numbers: 0.05 … 0.95
BINS = 10  # of the PIT histogram and of the reliability picture
ECE_BINS = 15  # of the calibration error of classes
CONFIDENCE = 0.95  # of the range in which a calibrated model would be
BOOLEAN = ("flagged", "off_centre", "hit")  # names of measures that are yes or no
SCORE_NAMES = {"nll": "negative log-likelihood", "crps": "CRPS", "brier": "Brier score"}


def measure_subject(subject: Subject, refit: str | None) -> dict[str, Any]:
    """Return the measures of all rows, by their names, and the kind of the predictives as "kind".

    A measure is (n,), or (n, L) with an entry for each of LEVELS.  refit: None is that of the
    model. Raises ValueError for a model of several targets.
    """
    blocks = []
    for rows in np.array_split(np.arange(len(subject.y)), math.ceil(len(subject.y) / BLOCK)):
        predictive = subject.predict(rows, refit, 1.0)  # with the model's own prior
        if predictive.kind == "vector":
            raise ValueError(
                "The report is for one target, but the model has several. Fit and report one "
                "target at a time."
            )
        blocks.append(measure_rows(predictive, subject.y[torch.from_numpy(rows)]))

    return {"kind": predictive.kind} | {
        name: torch.cat([block[name] for block in blocks]) for name in blocks[0]
    }


def measure_rows(predictive: Any, y: Tensor) -> dict[str, Tensor]:
    """Return the measures of rows with targets y (n,), from which scores and pictures are made.

    A measure is (n,) or (n, L), on the CPU: a bool if its name is in BOOLEAN, otherwise float64.
    """
    diagnostics = predictive.diagnostics
    measures = {
        "nll": metrics.nll(predictive, y, reduce=False),
        "flagged": diagnostics.inaccurate | diagnostics.unconverged,
        "off_centre": diagnostics.off_centre,
        "mass": predictive.mass,
    }
    if predictive.kind == "class":
        measures |= _measure_classes(predictive, y)
    else:
        measures |= _measure_numbers(predictive, y)

    return {
        name: value.to("cpu", torch.bool if name in BOOLEAN else torch.float64)
        for name, value in measures.items()
    }


def _measure_classes(predictive: Any, y: Tensor) -> dict[str, Tensor]:
    """Return the measures of predictives of classes: (n,), or (n, L) for levels.

    predictive: that of n rows.  y (n,): the codes of the observed classes.
    """
    codes = y.long()
    largest, predicted = predictive.probs.max(1)
    sets = [predictive.interval(level) for level in LEVELS]  # (n, C) bool each
    return {
        "sure": largest,
        "hit": predicted == codes,
        "brier": metrics.brier(predictive, y, reduce=False),
        "inside": torch.stack([members.gather(1, codes[:, None])[:, 0] for members in sets], 1),
        "width": torch.stack([members.sum(1) for members in sets], 1),
        "epistemic": predictive.epistemic.reshape(len(y), -1).sum(1),
        "aleatoric": predictive.aleatoric.reshape(len(y), -1).sum(1),
        "classes": torch.full((len(y),), predictive.probs.shape[1]),
    }


def _measure_numbers(predictive: Any, y: Tensor) -> dict[str, Tensor]:
    """Return the measures of predictives of numbers, counts and angles: (n,), or (n, L) for levels.

    predictive: that of n rows.  y (n,): the observed targets. Angles have no CRPS.
    """
    intervals = [predictive.interval(level) for level in LEVELS]

    # An angle is taken in the turn that is nearest to the mean.
    near = (
        predictive.mean + wrap_angles(y - predictive.mean) if predictive.kind == "circular" else y
    )
    lower, upper = rank_targets(predictive, y)
    measures = {
        "square": (predictive.mean - near) ** 2,
        "inside": torch.stack(
            [(near >= ends[:, 0]) & (near <= ends[:, 1]) for ends in intervals], 1
        ),
        "width": torch.stack([ends[:, 1] - ends[:, 0] for ends in intervals], 1),
        "lower": lower,
        "upper": upper,
        "epistemic": predictive.epistemic,
        "aleatoric": predictive.aleatoric,
    }
    if predictive.kind != "circular":
        measures["crps"] = metrics.crps(predictive, y, reduce=False)
    return measures


def score_measures(measures: dict[str, Any]) -> dict[str, float]:
    """Return the scores, averaged over all rows, by their names on the page.

    measures: those of `measure_subject`.
    """
    scores = {
        text: float(measures[name].mean()) for name, text in SCORE_NAMES.items() if name in measures
    }
    if measures["kind"] == "class":
        scores["accuracy"] = float(measures["hit"].double().mean())
        scores["calibration error (ECE)"] = _compute_class_calibration_error(measures)
        region = "set"
        size = "mean size of the"
    else:
        scores["RMSE of the mean"] = float(measures["square"].mean().sqrt())
        scores["calibration error"] = _compute_calibration_error(measures)
        region = "interval"
        size = "mean width of the"

    for i, level in enumerate(LEVELS):
        scores[f"share inside the {level:.0%} {region}"] = float(measures["inside"][:, i].mean())
    for i, level in enumerate(LEVELS):
        scores[f"{size} {level:.0%} {region}"] = float(measures["width"][:, i].mean())
    return scores | {"mean mass (1 is exact)": float(measures["mass"].mean())}


def _compute_calibration_error(measures: dict[str, Any]) -> float:
    """Return the mean distance of the distribution of P(Y ≤ y) from a uniform one, for numbers.

    The mean is over CURVE_LEVELS equally spaced values of P.
    """
    q = torch.arange(1, CURVE_LEVELS + 1, dtype=torch.float64) / (CURVE_LEVELS + 1)
    # The mid-rank: a count is at the centre of its probability.
    pit = (measures["lower"] + measures["upper"]) / 2
    return float(((pit[:, None] <= q).double().mean(0) - q).abs().mean())


def _compute_class_calibration_error(measures: dict[str, Any], bins: int = ECE_BINS) -> float:
    """Return the mean over rows of |accuracy − mean probability| in their bin, for classes.

    The bins have equal widths, and a row is in that of the probability of its predicted class.
    """
    bin_of_row = (measures["sure"] * bins).long().clamp(0, bins - 1)
    # The sum over the rows of a bin: rows · (accuracy − mean probability).
    gap = torch.zeros(bins, dtype=torch.float64).index_add(
        0, bin_of_row, measures["hit"].double() - measures["sure"]
    )
    return float(gap.abs().sum() / len(bin_of_row))


def describe_number_calibration(model: dict[str, Any], plug_in: dict[str, Any]) -> dict[str, Any]:
    """Return the curve of coverage by level, and the PIT histogram, of the model and its plug-in.

    model, plug_in: the measures of `measure_subject` for each. Curve and histogram have the ranges
    in which a calibrated model would be, and so has the coverage of LEVELS, as "expected".
    """
    n = len(model["nll"])

    # Without the levels 0 and 1, whose intervals hold no row and all rows.
    levels = np.linspace(0, 1, CURVE_LEVELS + 2)[1:-1]
    ones = torch.ones(n, dtype=torch.float64)
    model_ranks, plug_in_ranks = (
        Ranks(measures["lower"], measures["upper"], ones) for measures in (model, plug_in)
    )
    level_ranges = [compute_binomial_range(n, float(level), CONFIDENCE) for level in levels]
    low, high = (np.array(level_ranges).T / n).tolist()

    # Heights of the histogram are 1 where each bin has its share of the rows.
    bin_low, bin_high = (end * BINS / n for end in compute_binomial_range(n, 1 / BINS, CONFIDENCE))
    curve = {
        "level": levels.tolist(),
        "inside": model_ranks.inside(levels),
        "plugIn": plug_in_ranks.inside(levels),
        "low": low,
        "high": high,
    }
    pit = {
        "heights": model_ranks.heights(BINS).tolist(),
        "plugIn": plug_in_ranks.heights(BINS).tolist(),
        "low": bin_low,
        "high": bin_high,
    }
    return {"calibration": curve, "pit": pit, "expected": _compute_expected_coverage(n)}


def describe_class_calibration(model: dict[str, Any], plug_in: dict[str, Any]) -> dict[str, Any]:
    """Return accuracy by the probability of the predicted class, of the model and its plug-in.

    model, plug_in: the measures of `measure_subject` for each. "expected" has the ranges of the
    coverage of LEVELS in which a calibrated model would be.
    """
    return {
        "reliability": {
            "own": _make_reliability_bins(model),
            "plugIn": _make_reliability_bins(plug_in),
        },
        "expected": _compute_expected_coverage(len(model["nll"])),
    }


def _make_reliability_bins(measures: dict[str, Any]) -> list[list[float]]:
    """Return five numbers for each bin of rows, for the picture of reliability.

    These are mean probability, accuracy, number of rows, and both ends of the range in which the
    accuracy of a calibrated model would be. Bins are by the probability of the predicted class, and
    those without a row are left out.  measures: those of `measure_subject`.
    """
    bin_of_row = (measures["sure"] * BINS).long().clamp(0, BINS - 1)
    bins = []
    for number in bin_of_row.unique().tolist():
        chosen = bin_of_row == number
        count = int(chosen.sum())
        probability = float(measures["sure"][chosen].mean())
        accuracy = float(measures["hit"][chosen].double().mean())
        low, high = (end / count for end in compute_binomial_range(count, probability, CONFIDENCE))
        bins.append([probability, accuracy, count, low, high])

    return bins


def _compute_expected_coverage(n: int) -> list[list[float]]:
    """Return the range of the coverage of each of LEVELS by a calibrated model, as [low, high].

    The range holds the coverage of n rows with the probability CONFIDENCE.
    """
    return [[end / n for end in compute_binomial_range(n, level, CONFIDENCE)] for level in LEVELS]
