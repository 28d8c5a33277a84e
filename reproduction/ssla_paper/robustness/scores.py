"""Scores of probabilities (N, C) against classes (N,), and how well a score separates two sets."""

from __future__ import annotations

import torch
from torch import Tensor

BINS = 15


def entropy(probs: Tensor) -> Tensor:
    """−Σ p log p over the last axis."""
    total: Tensor = torch.special.xlogy(probs, probs).sum(-1)
    return -total


def class_scores(probs: Tensor, y: Tensor) -> dict[str, float]:
    """NLL, Brier score (0 … 2), expected calibration error and accuracy."""
    hit = torch.nn.functional.one_hot(y, probs.shape[1]).double()
    count, confidence, right = (
        torch.tensor(part, dtype=torch.float64) for part in reliability(probs, y)
    )
    return {
        "nll": float(-probs.gather(1, y[:, None]).clamp_min(1e-300).log().mean()),
        "brier": float(((probs - hit) ** 2).sum(1).mean()),
        "ece": float((right - confidence).abs().sum() / count.sum()),
        "accuracy": float((probs.argmax(1) == y).double().mean()),
    }


def reliability(probs: Tensor, y: Tensor) -> tuple[list[float], list[float], list[float]]:
    """By bin of the highest probability: rows, the sum of those probabilities, and correct rows.

    Sums can be added.
    """
    confidence, guess = probs.double().max(1)
    place = (confidence * BINS).long().clamp(0, BINS - 1)
    found = []
    for value in (torch.ones_like(confidence), confidence, (guess == y).double()):
        found.append(torch.zeros(BINS, dtype=torch.float64).index_add(0, place, value).tolist())
    return found[0], found[1], found[2]


def auroc(inside: Tensor, outside: Tensor) -> float:
    """P(score outside > score inside) + ½ P(equal)."""
    ordered = inside.double().sort().values
    below = torch.searchsorted(ordered, outside.double(), right=False)
    upto = torch.searchsorted(ordered, outside.double(), right=True)
    return float((below + upto).double().mean() / (2 * len(ordered)))
