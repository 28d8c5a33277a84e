"""The estimators follow the unit of the targets, and refuse units in which a variance is zero
or infinite.
"""

from __future__ import annotations

import warnings

import numpy as np
import pytest
import torch

from ssla.sklearn import PredictiveRegressor, SSLARegressor
from ssla.tables.networks import fit_scaling

RNG = np.random.default_rng(0)
X = RNG.normal(size=(70, 3))
Y = X[:, 0] + 0.5 * np.sin(X[:, 1]) + 0.2 * RNG.normal(size=70)


def answers(likelihood: str, c: float) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    y = np.exp(Y) if likelihood == "log_normal" else Y
    model = SSLARegressor(likelihood, members=2, max_epochs=10, random_state=0, trees=5)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model.fit(X, c * y)
        mean, sd = model.predict(X[:5], return_std=True)
        return mean / c, sd / c, model.predict_interval(X[:5], 0.9) / c


@pytest.mark.parametrize("likelihood", ["auto", "gaussian", "log_normal"])
def test_predictions_follow_the_unit_of_the_targets(likelihood):
    expected = answers(likelihood, 1.0)
    for c in (1e-140, 1e-30, 1e30, 1e140):
        for found, wanted in zip(answers(likelihood, c), expected, strict=True):
            np.testing.assert_allclose(found, wanted, rtol=1e-6)


@pytest.mark.parametrize("c", [1e200, 1e-200])
@pytest.mark.parametrize("likelihood", ["auto", "gaussian", "positive", "log_normal"])
def test_targets_whose_variance_has_no_number_are_refused(likelihood, c):
    with pytest.raises(
        ValueError, match=r"must have values between 1e-150 and 1e\+150 in size.*another unit"
    ):
        SSLARegressor(likelihood, members=1, max_epochs=2).fit(X, c * np.exp(Y))


def test_the_regressor_around_other_models_refuses_them_too():
    with pytest.raises(ValueError, match="Give y in another unit"):
        PredictiveRegressor().fit(X, 1e200 * Y)
    with pytest.raises(ValueError, match="Give y in another unit"):
        PredictiveRegressor().fit(X, 1e-200 * Y)


@pytest.mark.parametrize("c", [1.0, 1e200, 1e-200, 1e300])
def test_standardising_neither_overflows_nor_vanishes(c):
    """Mean and standard deviation by NumPy in unit scale."""
    weights = RNG.uniform(0.5, 2.0, size=70)
    found = fit_scaling(torch.from_numpy(c * X), torch.from_numpy(weights))
    mean = np.average(X, axis=0, weights=weights)
    sd = np.sqrt(np.average((X - mean) ** 2, axis=0, weights=weights))
    np.testing.assert_allclose(found.shift / c, mean, rtol=1e-12, atol=1e-15)
    np.testing.assert_allclose(found.scale / c, sd, rtol=1e-12)
