"""The numbers of the report, as plain values.

These are scores, calibration, and each shown row under several strengths of the prior. The
bounds over the priors of the slider are the smallest and the largest of its values: a credal set of
five priors.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from ssla.data import take_rows
from ssla.posterior import explain
from ssla.tables.report.measures import (
    LEVELS,
    describe_class_calibration,
    describe_number_calibration,
    measure_subject,
    score_measures,
)
from ssla.tables.report.shown_rows import (
    describe_rows,
    list_rounded_numbers,
    round_number,
    shorten_inputs,
)
from ssla.tables.report.subject import Subject

FACTORS = (0.1, 0.3, 1.0, 3.0, 10.0)  # on the precision of the prior, for the slider; a guess
# How much the page lists: guesses.
DOUBTFUL = 10  # rows that are listed as out-of-distribution
INFLUENTIAL = 5  # training rows that explain the doubt of a row
SHOWN_EFFECTS = 3  # inputs that do
LARGEST_EXPLAINED = 50_000  # training rows, above which they are not searched


def collect_facts(subject: Subject, max_rows: int) -> dict[str, Any]:
    """Return all numbers and names that the page shows, by the keys that page.js reads.

    max_rows: how many rows are shown at most. Raises ValueError for a model of several targets.
    """
    measures = measure_subject(subject, None)
    plug_in = measure_subject(subject, "plug_in")
    predictive_kind = measures["kind"]

    # The epistemic share (n,) of each row's variance. A row without variance has the share 0.
    variance = measures["epistemic"] + measures["aleatoric"]
    share = measures["epistemic"] / variance.clamp_min(1e-300)
    shown = choose_rows(measures["nll"], share, max_rows)
    factors = FACTORS if subject.fixed_prior is None else (1.0,)

    # The page names doubtful rows by their positions among the shown rows.
    order = share[torch.from_numpy(shown)].argsort(descending=True, stable=True)
    doubtful = order[:DOUBTFUL].tolist()
    plug_in_scores = score_measures(plug_in)
    scores = [
        [name, value, plug_in_scores[name]] for name, value in score_measures(measures).items()
    ]
    calibration = (
        describe_class_calibration if predictive_kind == "class" else describe_number_calibration
    )
    return {
        "kind": predictive_kind,
        "target": subject.target,
        "n": len(subject.y),
        "shown": len(shown),
        "classes": list(subject.classes or ()) or _enumerate_classes(measures),
        "levels": list(LEVELS),
        "factors": list(factors),
        "own": factors.index(1.0),
        "fixedPrior": subject.fixed_prior or "",  # empty: there is a slider
        "inputNames": list(subject.input_names),
        "scores": scores,
        "flagged": int(measures["flagged"].sum()),
        "off_centre": int(measures["off_centre"].sum()),
        "medianShare": float(share.median()),
        **calibration(measures, plug_in),
        "doubtful": doubtful,
        "why": _explain_doubt(subject, shown, doubtful),
        "rows": describe_rows(subject, shown, factors, predictive_kind)
        | _describe_measures(subject, measures, share, shown),
    }


def _describe_measures(
    subject: Subject, measures: dict[str, Any], share: Tensor, shown: np.ndarray
) -> dict[str, Any]:
    """Return what does not depend on the prior: lists with an entry for each shown row.

    measures: those of `measure_subject` for all n rows.  share (n,): the epistemic share of each
    row's variance.  shown (k,): positions of the shown rows.
    """
    index = torch.from_numpy(shown)
    labels = subject.labels
    rows = {
        "id": [int(i) + 1 if labels is None else int(labels[i]) for i in shown],
        "y": list_rounded_numbers(subject.y[index]),
        "nll": list_rounded_numbers(measures["nll"][index]),
        "share": list_rounded_numbers(share[index]),
        "flagged": measures["flagged"][index].int().tolist(),
        "inputs": shorten_inputs(subject.inputs(shown)),
    }
    if measures["kind"] != "class":
        # The rank of y in its predictive; a count is at the centre of its probability.
        mid_ranks = (measures["lower"] + measures["upper"]) / 2
        rows["rank"] = list_rounded_numbers(mid_ranks[index])

    return rows


def choose_rows(nll: Tensor, share: Tensor, most: int) -> np.ndarray:
    """Return the positions of at most `most` rows to show, in their order.

    All n rows are shown if they are not more. Otherwise a quarter of `most` are the worst
    predicted, a quarter the most doubtful, and the rest are evenly spaced among the remaining rows.

    nll (n,): the negative log-likelihood of each row.  share (n,): the epistemic share of its
    variance.
    """
    n = len(nll)
    if n <= most:
        return np.arange(n)
    quarter = most // 4
    worst = nll.argsort(descending=True, stable=True)[:quarter].tolist()
    most_doubtful = share.argsort(descending=True, stable=True)[:quarter].tolist()

    # A row can be among both.
    chosen = np.array(sorted({*worst, *most_doubtful}), dtype=int)
    remaining = np.setdiff1d(np.arange(n), chosen)
    spaced = np.linspace(0, len(remaining) - 1, most - len(chosen)).round().astype(int)
    return np.union1d(chosen, remaining[spaced])


def _explain_doubt(subject: Subject, shown: np.ndarray, doubtful: list[int]) -> dict[str, Any]:
    """Return the causes of doubt in the most doubtful rows: training rows, inputs, and the prior.

    shown (k,): positions of the shown rows among all.  doubtful: positions among the shown rows,
    which are the keys of the result, as texts. The result is empty for a posterior that does not
    hold its training data, or holds more than LARGEST_EXPLAINED rows.
    """
    # Only inputs are known as causes for an estimator: its rows are predicted with one at its mean.
    if subject.predict_at_mean is not None:
        return _explain_by_inputs(subject, shown, doubtful)
    posterior = subject.posterior
    if posterior is None or posterior.source is None or posterior.report.n > LARGEST_EXPLAINED:
        return {}
    rows = torch.from_numpy(shown[doubtful])
    explanation = explain(posterior, take_rows(subject.x, rows), top=INFLUENTIAL)
    reasons = {}
    for i, position in enumerate(doubtful):
        # The effect of each training row on the mean, summed over outputs; rows count from 1.
        effects = explanation.influence.mean[i].abs().sum(1)
        influential = [
            [int(row) + 1, round_number(float(effect))]
            for row, effect in zip(explanation.influence.rows[i], effects, strict=True)
        ]
        doubt = float(explanation.split.doubt[i].sum())
        # Without doubt, there are no shares of it.
        inputs = []
        if explanation.inputs is not None and doubt > 0:
            inputs = _find_largest_effects(explanation.inputs[i] / doubt)
        prior = None
        if doubt > 0:
            prior = round_number(float(explanation.split.prior[i].sum()) / doubt)
        reasons[str(position)] = {"rows": influential, "inputs": inputs, "prior": prior}

    return reasons


def _explain_by_inputs(subject: Subject, shown: np.ndarray, doubtful: list[int]) -> dict[str, Any]:
    """Return for each doubtful row the inputs that cause most of its doubt, without other causes.

    The effect of an input is the share of the doubt that is gone if the input is at its training
    mean. `ssla.explain` has the same for a posterior.

    shown, doubtful and the keys: as in `_explain_doubt`. The subject must have `predict_at_mean`.
    """
    assert subject.predict_at_mean is not None
    rows = shown[doubtful]
    doubt = _sum_epistemic_variance(subject.predict(rows, None, 1.0))
    shares = [
        1 - _sum_epistemic_variance(subject.predict_at_mean(rows, j)) / doubt
        for j in range(len(subject.input_names))
    ]

    # (rows, inputs); in a row without doubt all effects are zero.
    effects = torch.stack(shares, 1).nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)
    return {
        str(position): {"rows": [], "inputs": _find_largest_effects(effects[i]), "prior": None}
        for i, position in enumerate(doubtful)
    }


def _sum_epistemic_variance(predictive: Any) -> Tensor:
    """Return the epistemic variance (n,) of each row, which is summed over classes."""
    total: Tensor = predictive.epistemic.double().cpu().reshape(predictive.law.rows, -1).sum(1)
    return total


def _find_largest_effects(effects: Tensor) -> list[list[Any]]:
    """Return [position, effect] of the SHOWN_EFFECTS inputs with the largest absolute effects.

    effects (d,): the effect of each input.
    """
    top = effects.abs().argsort(descending=True, stable=True)[:SHOWN_EFFECTS].tolist()
    return [[j, round_number(float(effects[j]))] for j in top]


def _enumerate_classes(measures: dict[str, Any]) -> list[str]:
    """Return the numbers 0, 1, … of the classes as their names; an empty list if there are none.

    measures: those of `measure_subject`, which have "classes" only if the target is a class.
    """
    if "classes" not in measures:
        return []
    count = int(measures["classes"][0])  # the same in every row
    return [str(i) for i in range(count)]
