"""Tasks on classes: scores and calibration, out-of-distribution inputs, increasing shift, wrong
labels.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ssla_paper.robustness import data
from ssla_paper.robustness.methods import Answer, trained
from ssla_paper.robustness.scores import auroc, class_scores, entropy, reliability
from ssla_paper.runner import Record

NOISES = (0.0, 0.1, 0.2, 0.3, 0.5)
ANGLES = (0.0, 15.0, 30.0, 45.0, 60.0)
SHIFTED = 100
FEW = 3  # classes: with more, SSLA is run on one out-of-distribution set only


def calibration(dataset: str, seed: int, size: float = 1.0, epochs: int = 200) -> Record:
    """Scores on in-distribution test rows, and how well each method detects out-of-distribution
    inputs.
    """
    found = data.classes(dataset, seed, size)
    methods = trained(found.x, found.y, found.count, seed, epochs)
    answers, missing = methods.answers(found.new, methods.affordable(), epistemic=True)
    elsewhere = {}
    for place, x in found.outside.items():
        names = [
            name
            for name in answers
            if name != "weights" or found.count <= FEW or place == data.LEFT_OUT
        ]
        elsewhere[place] = methods.answers(x, names, epistemic=True)[0]
    record: Record = {
        "dataset": dataset,
        "seed": seed,
        "rows": len(found.x),
        "tests": len(found.new),
        "missing": missing,
    }
    record["temperature"] = methods.temperature
    record["methods"] = {
        name: {
            "scores": class_scores(answer.probs, found.target),
            "reliability": reliability(answer.probs, found.target),
            "auroc": {
                place: _auroc(answer, other[name])
                for place, other in elsewhere.items()
                if name in other
            },
        }
        for name, answer in answers.items()
    }
    record["assla_gap"] = float(
        (answers["none"].probs - _polished(methods.first, found.new)).abs().max()
    )
    return record


def _auroc(inside: Answer, outside: Answer) -> dict[str, float]:
    """AUROC by entropy, by the highest probability, and by the method's own epistemic measure,
    if it has one.
    """
    aurocs = {
        "entropy": auroc(entropy(inside.probs), entropy(outside.probs)),
        "highest": auroc(-inside.probs.amax(1), -outside.probs.amax(1)),
    }
    if inside.epistemic is not None and outside.epistemic is not None:
        aurocs["epistemic"] = auroc(inside.epistemic, outside.epistemic)
    return aurocs


def _polished(posterior: object, x: Tensor) -> Tensor:
    """softmax f̂ of the polished network, computed directly."""
    f: Tensor = posterior.marginal(x).mean  # type: ignore[attr-defined]
    return torch.softmax(f.double(), 1)


def shift(
    seed: int,
    size: float = 1.0,
    epochs: int = 200,
    noises: Sequence[float] = NOISES,
    angles: Sequence[float] = ANGLES,
) -> Record:
    """Digits with increasing noise, and with increasing rotation."""
    found = data.classes("digits", seed, size)
    methods = trained(found.x, found.y, found.count, seed, epochs)
    names = methods.affordable(without=("newton", "validated"))
    raw, target = found.raw[:SHIFTED], found.target[:SHIFTED]
    generator = torch.Generator().manual_seed(3000 + seed)
    record: Record = {"seed": seed, "noise": {}, "rotation": {}, "missing": {}}
    for kind, degrees in (("noise", noises), ("rotation", angles)):
        for degree in degrees:
            images = (
                data.noisy(raw, degree, generator) if kind == "noise" else data.rotated(raw, degree)
            )
            answers, record["missing"] = methods.answers(found.scale(images), names)
            record[kind][f"{degree:g}"] = {
                name: class_scores(answer.probs, target) for name, answer in answers.items()
            }
    return record


def labels(dataset: str, share: float, seed: int, size: float = 1.0, epochs: int = 200) -> Record:
    """Trained, stopped and tuned with a share of wrong labels; tested on correct labels."""
    found = data.classes(dataset, seed, size)
    y = data.mislabelled(found.y, share, found.count, torch.Generator().manual_seed(4000 + seed))
    methods = trained(found.x, y, found.count, seed, epochs)
    names = methods.affordable(without=("newton", "validated"))
    answers, missing = methods.answers(found.new, names)
    scored = {name: class_scores(answer.probs, found.target) for name, answer in answers.items()}
    return {"dataset": dataset, "share": share, "seed": seed, "methods": scored, "missing": missing}
