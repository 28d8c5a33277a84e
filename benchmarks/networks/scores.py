"""Scores of predictions of classes and of real targets."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from sklearn.metrics import roc_auc_score
from torch import Tensor

BINS = 15
LEVELS = (0.5, 0.9, 0.95)
SMALLEST = 1e-300  # a probability of zero has this log-loss: 691 nats


def log_losses(probs: Tensor, y: Tensor) -> Tensor:
    """−log p(y) of each row (N,)."""
    return -probs.gather(1, y[:, None])[:, 0].double().clamp_min(SMALLEST).log()


def calibration_error(probs: Tensor, y: Tensor) -> float:
    """ECE: mean |confidence − accuracy| of the most probable class over 15 bins of equal width."""
    confidence, label = probs.max(1)
    right = (label == y).double()
    places = (confidence * BINS).long().clamp_max(BINS - 1)
    total = 0.0
    for k in range(BINS):
        mine = places == k
        if mine.any():
            total += float(
                mine.double().mean() * (confidence[mine].double().mean() - right[mine].mean()).abs()
            )
    return total


def brier(probs: Tensor, y: Tensor) -> float:
    return float((probs - torch.nn.functional.one_hot(y, probs.shape[1])).square().sum(1).mean())


def auroc(inside: Tensor, outside: Tensor) -> float:
    """How well a score that is larger for out-of-distribution inputs separates them."""
    labels = np.r_[np.zeros(len(inside)), np.ones(len(outside))]
    return float(roc_auc_score(labels, torch.cat([inside, outside]).numpy()))


def entropy(probs: Tensor) -> Tensor:
    return torch.special.entr(probs.clamp_min(0)).sum(1)


def best_temperature(f: Tensor, y: Tensor) -> float:
    """T of the lowest log-loss of softmax(f/T), by golden section in log T."""

    def loss(log_t: float) -> float:
        return float(torch.nn.functional.cross_entropy(f / math.exp(log_t), y))

    return math.exp(_golden(loss, math.log(0.1), math.log(20.0)))


def _golden(loss: Callable[[float], float], low: float, high: float) -> float:
    ratio = (math.sqrt(5) - 1) / 2
    for _ in range(40):
        left = high - ratio * (high - low)
        right = low + ratio * (high - low)
        if loss(left) < loss(right):
            high = right
        else:
            low = left
    return (low + high) / 2


# --- predictions --------------------------------------------------------------------------------


class Prediction(Protocol):
    """What a method says of the rows of one part."""

    def losses(self, y: Tensor) -> Tensor:
        """−log p(y) of each row (N,)."""

    def scores(self, y: Tensor) -> dict[str, float]:
        """All scores of rows with targets."""

    def doubts(self) -> dict[str, Tensor]:
        """Scores (N,) that should be larger for out-of-distribution inputs."""


@dataclass(frozen=True)
class ClassPrediction:
    """Class probabilities (N, C) and the mean entropy (N,) of the members that they average."""

    probs: Tensor
    member_entropy: Tensor

    @property
    def information(self) -> Tensor:
        """Mutual information of class and weights (N,); NaN where a method does not give it."""
        return entropy(self.probs) - self.member_entropy

    def losses(self, y: Tensor) -> Tensor:
        return log_losses(self.probs, y)

    def scores(self, y: Tensor) -> dict[str, float]:
        return {
            "loss": float(self.losses(y).mean()),
            "ECE": calibration_error(self.probs, y),
            "Brier": brier(self.probs, y),
            "accuracy": float((self.probs.argmax(1) == y).float().mean()),
        }

    def doubts(self) -> dict[str, Tensor]:
        return {"AUROC": entropy(self.probs), "AUROC MI": self.information}


@dataclass(frozen=True)
class RealPrediction:
    """Mean, standard deviation of y and of the mean (N,): a Gaussian, or a given predictive."""

    mean: Tensor
    sd: Tensor
    epistemic: Tensor
    predictive: Any = None

    def losses(self, y: Tensor) -> Tensor:
        if self.predictive is not None:
            return -self.predictive.log_prob(y.to(self.predictive.mean.dtype)).float()
        return (
            0.5 * ((y - self.mean) / self.sd).square() + self.sd.log() + 0.5 * math.log(2 * math.pi)
        )

    def coverage(self, y: Tensor, level: float) -> float:
        if self.predictive is not None:
            low, high = self.predictive.interval(level).unbind(-1)
            return float(((y >= low) & (y <= high)).double().mean())
        reach = math.sqrt(2) * torch.special.erfinv(torch.tensor(level))
        return float(((y - self.mean).abs() <= reach * self.sd).double().mean())

    def scores(self, y: Tensor) -> dict[str, float]:
        found = {
            "loss": float(self.losses(y).mean()),
            "RMSE": float((y - self.mean).square().mean().sqrt()),
        }
        return found | {f"coverage {level:.0%}": self.coverage(y, level) for level in LEVELS}

    def doubts(self) -> dict[str, Tensor]:
        return {"AUROC": self.sd, "AUROC MI": self.epistemic}


def ood_scores(test: Prediction, ood: Prediction) -> dict[str, float]:
    """AUROC of each doubt: test rows against OOD inputs. A constant doubt has 0.5."""
    outside = ood.doubts()
    found = {}
    for name, inside in test.doubts().items():
        both = inside.isfinite().all() and outside[name].isfinite().all()
        found[name] = auroc(inside, outside[name]) if both else math.nan
    return found


def brief(test: Prediction, y: Tensor, ood: Prediction) -> str:
    """One line: the scores of test rows and the AUROCs."""
    found = test.scores(y) | ood_scores(test, ood)
    return " ".join(f"{name} {value:.4f}" for name, value in found.items())
