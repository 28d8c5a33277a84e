"""Determinants without a refit, for each curvature: against matrices that are written out."""

import pytest
import torch

from ssla import NoRefit
from ssla import likelihoods as L
from ssla.predictive import from_marginal
from support.oracles import random_spd

F64 = torch.float64
CASES = {
    "classes": (
        L.Categorical(),
        torch.tensor([[0.3, -1.0, 2.0], [1.0, 0.0, 0.0]], dtype=F64),
        torch.tensor([2, 0]),
    ),
    "noise by x": (
        L.HeteroscedasticGaussian(),
        torch.tensor([[0.3, -1.0], [1.0, 0.5]], dtype=F64),
        torch.tensor([1.1, -2.0], dtype=F64),
    ),
    "counts": (
        L.NegativeBinomial(0.5),
        torch.tensor([[0.3], [1.0]], dtype=F64),
        torch.tensor([0.0, 7.0], dtype=F64),
    ),
}


@pytest.mark.parametrize("curvature", ["observed", "fisher", "empirical"])
@pytest.mark.parametrize("name", CASES)
def test_the_determinant_is_that_of_the_named_curvature(name, curvature):
    likelihood, f, y = CASES[name]
    outputs = f.shape[1]
    K = 0.1 * random_spd(2, outputs, outputs, seed=1)
    slope = torch.func.grad(lambda f, y: likelihood.log_prob(y, f))
    score = torch.stack([slope(*task) for task in zip(f, y, strict=True)])
    hessian = torch.stack([torch.func.jacrev(slope)(*task) for task in zip(f, y, strict=True)])
    precision = {
        "observed": -hessian,
        "fisher": likelihood.fisher(f),
        "empirical": score[:, :, None] * score[:, None, :],
    }[curvature]
    eye = torch.eye(outputs, dtype=F64)
    expected = -0.5 * torch.linalg.det(eye + precision @ K).log()
    parts = from_marginal(likelihood, f, K, refit=NoRefit(curvature=curvature)).increments(y)
    assert torch.allclose(parts.likelihood, likelihood.log_prob(y, f), atol=1e-12)
    assert torch.allclose(parts.curvature, expected, atol=1e-12)
