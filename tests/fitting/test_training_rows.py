"""Rows of a fit."""

import pytest
import torch

import ssla
from ssla import likelihoods as L
from ssla import priors
from support.networks import data, mlp

GAUSSIAN = L.Gaussian(noise=0.3)
X, Y = data(60)


@pytest.fixture(scope="module")
def post():
    return ssla.fit(mlp(), (X, Y), likelihood=GAUSSIAN, prior=priors.Gaussian())


def test_rows_of_a_fit_may_carry_a_graph(post):
    graph = ssla.fit(
        mlp(),
        (X.clone().requires_grad_(True), Y.clone().requires_grad_(True) * 1),
        likelihood=GAUSSIAN,
        prior=priors.Gaussian(),
    )
    assert torch.equal(graph.theta, post.theta)
