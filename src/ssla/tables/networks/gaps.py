"""Rows with unknown inputs: the predictive is a mixture over possible values of the inputs.

    p(y | known inputs) ≈ Σ_k w_k p(y | known inputs, values k)

The values come from the training table and do not depend on the known inputs of the row. The spread
of the members' means is the uncertainty from the missing value; it is part of the mixture's
epistemic variance.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch

from ssla.predictive import Predictive, mixture
from ssla.predictive.joined import joined


def predict_with_gaps(
    predict: Callable[[np.ndarray], Any],
    x: np.ndarray,
    gaps: np.ndarray,
    copies: Iterable[np.ndarray],
    weights: np.ndarray,
) -> Predictive:
    """The predictive at x (N, d). Rows with gaps (N,) bool, A in all, are predicted at each of the
    copies (A, d) and mixed with weights (K, A); the others are predicted directly.
    """
    parts, rows = [], []
    for which, part in (
        (~gaps, lambda: predict(x[~gaps])),
        (gaps, lambda: mixture([predict(c) for c in copies], weights)),
    ):
        if which.any():
            parts.append(part())
            rows.append(torch.from_numpy(which.nonzero()[0]))
    return joined(parts, rows)
