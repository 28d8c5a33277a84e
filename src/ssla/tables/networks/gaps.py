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
from ssla.predictive.joined import join_predictives


def predict_with_gaps(
    predict: Callable[[np.ndarray], Any],
    x: np.ndarray,
    gaps: np.ndarray,
    copies: Iterable[np.ndarray],
    weights: np.ndarray,
) -> Predictive:
    """Return the predictive at x (N, d), where rows with gaps (N,) bool have unknown inputs.

    These A rows are predicted at each of the copies (A, d), which have other values in the gaps,
    and mixed with weights (K, A). The other rows are predicted directly.
    """
    parts = []
    rows = []
    complete = ~gaps
    if complete.any():
        parts.append(predict(x[complete]))
        rows.append(torch.from_numpy(complete.nonzero()[0]))
    if gaps.any():
        parts.append(mixture([predict(copy) for copy in copies], weights))
        rows.append(torch.from_numpy(gaps.nonzero()[0]))
    return join_predictives(parts, rows)
