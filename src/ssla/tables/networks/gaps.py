"""Predictives of rows with unknown inputs: mixtures over possible values of these inputs.

    p(y | known inputs) ≈ Σ_k w_k p(y | known inputs, values k)

The values come from the training table and do not depend on the known inputs of the row. The spread
between the means of the parts is the uncertainty from the missing values. It belongs to the
epistemic variance of the mixture.
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

    predict: returns the predictive at complete rows (n, d).  copies: K versions (A, d) of the A
    rows with gaps, with other values in the gaps, whose predictives are mixed with weights (K, A).
    Rows without gaps are predicted directly.
    """
    predictives = []
    rows = []
    complete = ~gaps
    if complete.any():
        predictives.append(predict(x[complete]))
        rows.append(torch.from_numpy(np.flatnonzero(complete)))
    if gaps.any():
        predictives.append(mixture([predict(copy) for copy in copies], weights))
        rows.append(torch.from_numpy(np.flatnonzero(gaps)))

    return join_predictives(predictives, rows)
