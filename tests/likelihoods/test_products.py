"""Products with the curvature of an observation, against those with its C×C matrices."""

import pytest
import torch

from ssla import likelihoods as L
from support.refits import inputs, seeded

LIKELIHOODS = [
    L.Categorical(temperature=1.7),
    L.Tempered(L.Categorical(), 0.4),
    L.HeteroscedasticGaussian(),
]


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("likelihood", LIKELIHOODS)
def test_the_change_of_the_curvature_along_directions_is_that_of_its_matrices(likelihood, weighted):
    outputs = 2 if isinstance(likelihood, L.HeteroscedasticGaussian) else 5
    f = inputs(3 * 7, 1, outputs).reshape(3, 7, outputs)
    before = inputs(7, 2, outputs)
    directions = inputs(7 * outputs, 3, 4).reshape(7, outputs, 4)
    y = torch.arange(7) % outputs if outputs > 2 else inputs(7, 4, 1)[:, 0]
    weights = torch.rand(7, generator=seeded(5)).double() if weighted else None
    change = likelihood.precision(y, f) - likelihood.precision(y, before)
    each = directions.mT @ change @ directions
    expected = (each if weights is None else each * weights[:, None, None]).sum(1)
    found = likelihood.precision_change_along(y, f, before, directions, weights)
    assert torch.allclose(found, expected)
    none = likelihood.precision_change_along(y, f, before, directions[..., :0], weights)
    assert none.shape == (3, 0, 0)


def test_differences_of_log_probabilities_near_and_far_are_those_of_single_rows():
    likelihood = L.Categorical(temperature=1.3)
    before = inputs(6, 1, 4)
    steps = torch.tensor([1e-6, 0.1, 5.0]).double()[:, None, None]
    f = before + steps * inputs(18, 2, 4).reshape(3, 6, 4)
    y = torch.arange(6) % 4
    found = likelihood.log_prob_difference(y, f, before)
    plain = likelihood.log_prob(y, f) - likelihood.log_prob(y, before)
    assert torch.allclose(found, plain, atol=1e-12)
    batched = torch.func.vmap(lambda one: likelihood.log_prob_difference(y, one, before))(f)
    assert torch.equal(found, batched)
