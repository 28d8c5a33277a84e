"""Structures that are refused: singular, too large, unknown; and the remedy."""

import pytest
import torch
from torch import nn

import ssla
from ssla import likelihoods as L
from ssla import priors, structures
from support.bad_input import X, Y, assert_message, fit
from support.plain_network import X as ROWS
from support.plain_network import net as plain
from support.plain_network import numbers


def wide_network():
    """A row of its results takes far more than its last bias."""
    return nn.Sequential(nn.Linear(3, 400), nn.Tanh(), nn.Linear(400, 1))


CASES = {
    "flat prior, constant column": (
        lambda: fit(nn.Linear(3, 1), (X * torch.tensor([1.0, 1.0, 0.0]), Y), prior=priors.Flat()),
        "not positive definite.*constant or repeated input column.*Remedy",
    ),
    "flat prior, few rows": (
        lambda: fit(data=(X[:3], Y[:3]), prior=priors.Flat()),
        "not positive definite.*fewer independent rows",
    ),
    "unknown structure": (lambda: fit(structure="desne"), r"Did you mean 'dense'\?"),
    "no structure": (lambda: fit(structure=None), "structure must be one of 'dense'"),
    "everything beyond the budget": (
        lambda: fit(weights="all", memory_budget=100),
        "needs 13.1 KiB, more than the memory budget of 100 B. Use fewer weights",
    ),
    "kfac beyond the budget": (
        lambda: fit(weights="all", structure="kfac", memory_budget=2500),
        "structure='kfac' with 21 free .* Use structure='diag'",
    ),
    "a row beyond the budget": (
        lambda: fit(wide_network(), weights=["2.bias"], structure="diag", memory_budget=500),
        ("One row of the network.s intermediate results takes .* than the memory budget of 500 B"),
    ),
    "rank of nothing": (
        lambda: structures.LowRank(rank=0),
        r"LowRank\(rank=…\) must be a positive integer or None, but is 0",
    ),
    "tail of everything": (
        lambda: structures.LowRank(tail=1.0),
        r"LowRank\(tail=…\) must be between 0 and 1",
    ),
    "dense beyond the budget": (
        lambda: fit(weights="all", memory_budget=2500),
        (
            "needs 13.1 KiB, more than the memory budget of 2.44 KiB. Use structure='diag' "
            r"\(1.97 KiB\), or"
        ),
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_message(case):
    assert_message(*CASES[case])


@pytest.mark.parametrize("precision", [1.0, 1e-3])
def test_a_proper_prior_is_not_the_remedy_for_itself(precision):
    data = (ROWS * torch.tensor([1.0, 1.0, 1e9]), numbers(30, 4))
    options = {"likelihood": L.Gaussian(noise=0.5), "structure": "kfac", "mode": "tilt"}
    with pytest.raises(
        ValueError, match=rf"proper \(at least {precision:g}\).*standardise the inputs"
    ) as caught:
        ssla.fit(plain()[0], data, prior=priors.Gaussian(precision=precision), **options)
    assert "priors.Gaussian" not in str(caught.value)
    with pytest.raises(ValueError, match=r"not positive definite.*give a proper prior"):
        ssla.fit(plain()[0], data, prior=priors.Flat(), **options)
    dense, tau = (
        structures.Dense(dual=False, matrix=torch.full((2, 2), 1e20, dtype=torch.float64), size=2),
        torch.ones(2).double(),
    )
    for proper in (tau, torch.diag(tau)):
        with pytest.raises(ValueError, match=r"proper \(at least 1\).*standardise the inputs"):
            dense.with_prior(proper)
    with pytest.raises(ValueError, match=r"give a proper prior"):
        dense.with_prior(0 * tau)
