"""Split conformal intervals, whose coverage holds for every sample size and for a wrong model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ssla._checks import warn
from ssla.maths.order_statistics import conformal_quantile, describe_row_shortage
from ssla.predictive import Predictive
from ssla.predictive.transformed import Transform, remove_transforms
from ssla.refit import resolve


@dataclass(frozen=True, eq=False)
class Conformal:
    """The conformal scores |y − mean| / stddev of n calibration rows and D targets.

    q is the smallest score at which the weights of the scores up to it sum to at least (W +
    1)·level, where W is the sum of all weights and the 1 is the new row. Then P(|y − mean| ≤
    q·stddev) ≥ level for a row exchangeable with them. With weights of one, q is the k-th smallest
    score, k = ⌈(n + 1)·level⌉, and the probability is at most level + 1/(n + 1) where scores have
    no ties.

    Weights are frequencies: a row of weight 3 equals three rows. They do not correct for a new row
    from another distribution, and their scale matters: weights that sum to one count as one row.
    """

    scores: np.ndarray  # (n, D), each column sorted
    weights: np.ndarray  # those of the scores' rows (n, D)
    refit: Any  # that of the predictives that were scored; the scores hold only for it

    @staticmethod
    def from_rows(
        predictive: Predictive,
        y: np.ndarray,
        weights: np.ndarray,
        refit: Any,
        transform: Transform | None = None,
    ) -> Conformal:
        """Return the scores of calibration rows with y (n,) or (n, D) and weights (n,).

        predictive: that of these rows.  refit: the one that it was computed with.  transform: maps
        the scale of the model to that of y. The scores are computed on the scale of the model.
        None: both are the same.
        """
        mean, spread = _compute_mean_and_spread(predictive, transform)
        y = y if transform is None else transform.to_z(torch.from_numpy(y)).numpy()
        scores = np.abs(_as_columns(y) - mean) / spread
        order = np.argsort(scores, axis=0, kind="stable")
        return Conformal(np.take_along_axis(scores, order, axis=0), weights[order], refit)

    def holds_for(self, refit: Any) -> bool:
        """Return whether the scores were computed with this refit, a name or an object."""
        return resolve(refit) == resolve(self.refit)

    def score_quantile(self, level: float) -> np.ndarray:
        """Return q for each target (D,).

        The quantile q is infinite, with a warning, if there are too few rows for the level.
        """
        scores = torch.from_numpy(self.scores.T)
        weights = torch.from_numpy(self.weights.T)

        # All targets have the same rows, so the first one decides.
        shortage = describe_row_shortage(weights[0], level, "calibration rows")
        if shortage is not None:
            warn(
                f"A conformal interval of {level:g} {shortage}: the interval is infinite. Use a "
                "larger calibration_fraction or a lower level."
            )

        q: np.ndarray = conformal_quantile(scores, weights, level).numpy()
        return q

    def interval(
        self, predictive: Any, level: float, transform: Transform | None = None
    ) -> np.ndarray:
        """Return the intervals mean ± q·stddev of a predictive: (N, 2), or (N, D, 2) for D targets.

        transform: that of `from_rows`. The interval is computed on the scale of the model and then
        transformed. The ends for counts are rounded inwards to whole numbers.
        """
        mean, spread = _compute_mean_and_spread(predictive, transform)
        q = self.score_quantile(level)
        ends = np.stack([mean - q * spread, mean + q * spread], -1)
        if transform is not None:
            ends = transform.to_y(torch.from_numpy(ends)).numpy()
        if predictive.kind == "count":
            # The counts inside the interval are the same, and none is negative.
            ends = np.stack([np.maximum(np.ceil(ends[..., 0]), 0), np.floor(ends[..., 1])], -1)
        return ends[:, 0] if predictive.mean.ndim == 1 else ends


def _compute_mean_and_spread(
    predictive: Predictive, transform: Transform | None
) -> tuple[np.ndarray, np.ndarray]:
    """Return mean and standard deviation (N, D) of a predictive.

    With a transform they are those on the scale of the model, before the transform.
    """
    on_scale = predictive if transform is None else remove_transforms(predictive)
    return _as_columns(on_scale.mean.numpy()), _as_columns(on_scale.stddev.numpy())


def _as_columns(values: np.ndarray) -> np.ndarray:
    """Return values (n,) or (n, D) with the shape (n, D)."""
    return values[:, None] if values.ndim == 1 else values
