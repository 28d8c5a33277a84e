"""Split conformal intervals: coverage that holds for every finite sample, whatever the model got wrong."""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass
from typing import Any

import numpy as np

from ssla.predictive import Predictive, kind_of


@dataclass(frozen=True, eq=False)
class Conformal:
    """Sorted scores |y − mean| / stddev of rows kept aside (n, D).

    With k = ⌈(n + 1)·level⌉ the k-th smallest score q gives P(|y − mean| ≤ q·stddev) ≥ level for a row exchangeable with them,
    and at most level + 1/(n + 1) where scores have no ties.
    """

    scores: np.ndarray

    @staticmethod
    def of(predictive: Predictive, y: np.ndarray) -> Conformal:
        mean, spread = (_columns(part.numpy()) for part in (predictive.mean, predictive.stddev))
        return Conformal(np.sort(np.abs(_columns(y) - mean) / spread, axis=0))

    def factor(self, level: float) -> np.ndarray:
        """q for each target; infinite where the rows are too few for the level."""
        rank = math.ceil((len(self.scores) + 1) * level - 1e-9)
        if rank > len(self.scores):
            warnings.warn(
                f"A conformal interval of {level:g} needs at least {math.ceil(level / (1 - level))} calibration rows, but there "
                f"are {len(self.scores)}: the interval is infinite. Use a larger calibration_fraction or a lower level.",
                UserWarning,
                stacklevel=3,
            )
            return np.full(self.scores.shape[1], np.inf)
        factor: np.ndarray = self.scores[rank - 1]
        return factor

    def interval(self, predictive: Any, level: float) -> np.ndarray:
        """mean ± q·stddev: (N, 2), or (N, D, 2)."""
        mean, spread = (_columns(part.numpy()) for part in (predictive.mean, predictive.stddev))
        q = self.factor(level)
        ends = np.stack([mean - q * spread, mean + q * spread], -1)
        if kind_of(predictive) == "count":
            ends = np.stack([np.maximum(np.ceil(ends[..., 0]), 0), np.floor(ends[..., 1])], -1)
        return ends[:, 0] if predictive.mean.ndim == 1 else ends


def _columns(values: np.ndarray) -> np.ndarray:
    return values[:, None] if values.ndim == 1 else values
