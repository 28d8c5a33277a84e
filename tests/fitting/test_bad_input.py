"""Rows that cannot be fitted, and rows that are fitted with a warning."""

import pytest
import torch
from torch import nn

from ssla import likelihoods as L
from ssla import priors
from support.bad_input import X, Y, assert_message, fit, net

CASES = {
    "a likelihood that does not inherit": (
        lambda: fit(likelihood=object()),
        "must be an object such as.*inherits from ssla.likelihoods.Likelihood",
    ),
    "empty arrays": (lambda: fit(data=(X[:0], Y[:0])), "data are empty"),
    "empty loader": (lambda: fit(data=[]), "data are empty.*drop_last"),
    "one row and no noise": (
        lambda: fit(data=(X[:1], Y[:1]), likelihood=L.Gaussian(noise="estimate")),
        "noise cannot be estimated: there is only one row",
    ),
    "constant target": (
        lambda: fit(nn.Linear(3, 1), (X, torch.zeros(20)), L.Gaussian(noise="estimate")),
        "noise cannot be estimated.*constant",
    ),
    "a network that reproduces the targets": (
        lambda: fit(
            net().double(),
            data=(X.double(), net().double()(X.double()).detach()[:, 0]),
            likelihood=L.Gaussian(noise="estimate"),
            mode="as_is",
        ),
        "noise cannot be estimated: the residuals are zero: the network reproduces the targets",
    ),
    "no degrees of freedom": (
        lambda: fit(
            data=(X[:3], Y[:3]),
            likelihood=L.Gaussian(noise="estimate"),
            prior=priors.Gaussian(1e-12),
        ),
        "noise cannot be estimated: 3 rows leave no degrees of freedom beside 3 fitted parameters",
    ),
    "few validation rows": (
        lambda: fit(prior=None, validation=(X[:2], Y[:2])),
        "validation= has 2 rows, too few",
    ),
    "all weights zero": (lambda: fit(data=(X, Y, torch.zeros(20))), "All row weights are zero"),
    "generator read twice": (
        lambda: fit(
            data=((X, Y.abs().round()) for _ in range(1)),
            likelihood=L.Poisson(),
            memory_budget=1700,
        ),
        "can be read only once",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_message(case):
    assert_message(*CASES[case])


def test_one_row_with_known_noise_is_fitted_and_warned_about():
    with pytest.warns(UserWarning, match="one row only"):
        post = fit(data=(X[:1], Y[:1]), prior=priors.Gaussian())
    assert "only one row" in str(post.report)
    assert torch.isfinite(post.predict(X).stddev).all()


def test_constant_columns_and_targets_are_reported():
    post = fit(data=(X * torch.tensor([1.0, 0.0, 1.0]), Y), prior=priors.Gaussian())
    assert "constant input columns: 1" in str(post.report)
    with pytest.warns(UserWarning, match="target is constant"):
        fit(data=(X, torch.ones(20)), prior=priors.Gaussian())
