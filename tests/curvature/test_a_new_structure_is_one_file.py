"""A structure that the library does not know, with the required members only, in fits."""

from dataclasses import dataclass, field

import pytest
import torch

import ssla
from ssla.curvature import Dense, Structure


@dataclass(frozen=True, eq=False)
class Matrix(Structure):
    """The full matrix, without a word about it: every other member has its default."""

    inside: Dense = field(default_factory=lambda: Dense(dual=False))

    name = "matrix"
    needs_jacobian_entries = True
    couples_all_parameters = True

    def zero(self, size):
        return Matrix(self.inside.zero(size))

    def add(self, J, precision, weights=None):
        return Matrix(self.inside.add(J, precision, weights))

    def merge(self, other):
        return Matrix(self.inside.merge(other.inside))

    def mix_with(self, other, share):
        return Matrix(self.inside.mix_with(other.inside, share))

    def positive_part(self):
        return Matrix(self.inside.positive_part())

    def scale_both_sides(self, factors):
        return Matrix(self.inside.scale_both_sides(factors))

    def push(self, direction):
        return self.inside.push(direction)

    def trace(self, operator):
        return self.inside.trace(operator)

    def with_prior(self, precision):
        return self.inside.with_prior(precision)

    def memory(self, extent):
        return self.inside.memory(extent)


X = torch.randn(50, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
TARGETS = {
    "gaussian": (ssla.likelihoods.Gaussian(noise=0.3), X[:, 0].sin()),
    "bernoulli": (ssla.likelihoods.Bernoulli(), (X[:, 1] > 0.2).long()),
}


@pytest.mark.parametrize("weights", ["last_layer", "all"])
@pytest.mark.parametrize("name", TARGETS)
def test_fits_and_predictions_are_those_of_the_dense_structure(name, weights):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        net = torch.nn.Sequential(
            torch.nn.Linear(2, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1)
        ).double()
    likelihood, y = TARGETS[name]
    mine, dense = (
        ssla.fit(
            net,
            (X, y),
            likelihood=likelihood,
            prior=ssla.priors.Gaussian(1.0),
            weights=weights,
            structure=structure,
        )
        for structure in (Matrix(), Dense(dual=False))
    )
    found, expected = mine.marginal(X[:5]), dense.marginal(X[:5])
    assert torch.allclose(found.mean, expected.mean, rtol=1e-4, atol=1e-6)
    assert torch.allclose(found.covariance, expected.covariance, rtol=1e-3)
    assert mine.report.structure == "matrix"


def test_a_class_without_a_required_member_is_refused_by_name():
    class Half(Structure):
        name = "half"

    with pytest.raises(TypeError, match="with_prior"):
        Half()
