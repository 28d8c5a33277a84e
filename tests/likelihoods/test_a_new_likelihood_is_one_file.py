"""A likelihood that the library does not know, in this one file, through every door of it."""

import math
import runpy
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

import ssla
from ssla import likelihoods as L
from ssla.likelihoods.support import Positive
from support import cases


@dataclass(frozen=True)
class Gamma(L.Likelihood):
    """y > 0 with mean μ = e^f and variance μ²/shape; the required members of a likelihood only.

    With z = y e^−f: g = shape(z − 1), Λ = shape·z, fisher = shape.
    """

    shape: float = 3.0

    def support_for(self, outputs):
        if outputs != 1:
            raise ValueError(f"Gamma needs one output (the log mean), but there are {outputs}.")
        return Positive()

    def _ratio(self, y, f):
        y = y.squeeze(-1) if y.shape == f.shape else y
        return y * torch.exp(-f[..., 0])

    def log_prob(self, y, f):
        z = self._ratio(y, f)
        y = y.squeeze(-1) if y.shape == f.shape else y
        constant = self.shape * math.log(self.shape) - math.lgamma(self.shape)
        return constant + self.shape * (torch.log(z) - z) - torch.log(y)

    def score(self, y, f):
        return self.shape * (self._ratio(y, f) - 1).unsqueeze(-1)

    def precision(self, y, f):
        return self.shape * self._ratio(y, f)[..., None, None]

    def fisher(self, f):
        return torch.full_like(f, self.shape).unsqueeze(-1)

    def mean(self, f):
        return torch.exp(f[..., 0])

    def variance(self, f):
        return self.mean(f) ** 2 / self.shape

    def sample(self, f, n, generator=None):
        mean = self.mean(f).expand(n, *f.shape[:-1])
        unit = torch._standard_gamma(torch.full_like(mean, self.shape), generator=generator)
        return unit / self.shape * mean


def _log_prob(y, f):
    rate = 3.0 * torch.exp(-f[..., 0])
    return 3.0 * torch.log(rate) + 2.0 * torch.log(y) - rate * y - math.lgamma(3.0)


REFERENCE = L.custom(_log_prob, support="positive", outputs=1)


def _seeded(seed):
    return torch.Generator().manual_seed(seed)


X = torch.randn(60, 2, dtype=torch.float64, generator=_seeded(1))
Y = Gamma().sample((0.5 * X[:, :1] + 0.2), 1, _seeded(2))[0]


def network():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return torch.nn.Sequential(
            torch.nn.Linear(2, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1)
        ).double()


def fitted(likelihood=None, **options):
    options = {"prior": ssla.priors.Gaussian(precision=1.0), **options}
    return ssla.fit(network(), (X, Y), likelihood=likelihood or Gamma(), **options)


# --- the shared checks -----------------------------------------------------------------------


SHARED = runpy.run_path(str(Path(__file__).parent / "test_likelihoods.py"))


@pytest.mark.parametrize(
    "check",
    [
        "test_score_and_precision_equal_autograd",
        "test_score_and_precision_equal_finite_differences",
        "test_derivatives_are_the_three_together",
        "test_density_integrates_to_one_and_fisher_is_the_expected_precision",
        "test_score_has_mean_zero",
        "test_samples_have_the_mean_and_variance",
        "test_broadcasts_a_grid_of_y",
    ],
)
def test_it_passes_the_checks_that_every_likelihood_passes(check, monkeypatch):
    f, y = cases.T([-1.0], [0.5]), cases.T(0.1, 1.0, 6.0)
    monkeypatch.setitem(cases.CASES, "new", (Gamma(), f, y))
    SHARED[check]("new")


@pytest.mark.parametrize("step", [1e-9, 1e-3, 1.0])
def test_differences_of_log_p_keep_their_digits_by_default(step):
    y, f = torch.tensor([0.4, 3.0]).double(), torch.tensor([[0.1], [-0.6]]).double()
    z = y * torch.exp(-f[:, 0])
    exact = 3.0 * (-step - z * math.expm1(-step))
    assert torch.allclose(Gamma().log_prob_difference(y, f + step, f), exact, rtol=1e-6, atol=0)


def test_a_class_without_a_required_member_is_refused_by_name():
    class Half(L.Likelihood):
        def log_prob(self, y, f):
            return -(y - f[..., 0]).square()

    with pytest.raises(TypeError, match="fisher"):
        Half()


# --- fit, predict, save ----------------------------------------------------------------------


@pytest.mark.parametrize("weights", ["last_layer", "all"])
@pytest.mark.parametrize("structure", ["dense", "kfac", "diag"])
def test_fits_and_predictions_are_those_of_its_log_density_alone(weights, structure):
    options = {"weights": weights, "structure": structure, "gaussian": "laplace"}
    mine, other = fitted(**options), fitted(REFERENCE, **options)
    assert torch.allclose(mine.theta, other.theta, rtol=1e-6, atol=1e-8)
    for refit in ("output", "newton", "none"):
        found, expected = (p.predict(X[:4], refit=refit) for p in (mine, other))
        assert torch.allclose(found.log_prob(Y[:4]), expected.log_prob(Y[:4]), atol=1e-6), refit
        assert torch.allclose(found.mean, expected.mean, rtol=1e-5), refit
    low, high = mine.predict(X[:4]).interval(0.9).unbind(-1)
    assert bool((low < mine.predict(X[:4]).mean).all())
    assert bool((low > 0).all())
    assert bool((high > low).all())


def test_refits_of_the_weights_are_those_of_its_log_density_alone():
    found, expected = (
        fitted(law, weights="last_layer").predict(X[:2], refit="weights")
        for law in (Gamma(), REFERENCE)
    )
    assert torch.allclose(found.log_prob(Y[:2]), expected.log_prob(Y[:2]), atol=1e-5)


def test_averages_over_a_gaussian_and_tempering():
    mine, other = fitted(gaussian="variational"), fitted(REFERENCE, gaussian="variational")
    assert mine.variational is not None
    assert torch.allclose(mine.mean, other.mean, rtol=1e-5, atol=1e-7)
    cold = fitted(L.Tempered(Gamma(), 4.0)).marginal(X[:3]).covariance
    assert bool((cold < fitted().marginal(X[:3]).covariance).all())


def test_diagnostics_report_and_validation():
    posterior = fitted()
    assert bool(torch.isfinite(posterior.loo().log_prob).all())
    explained = ssla.explain(posterior, X[:2])
    assert explained.influence.rows.shape[0] == 2
    assert "Gamma(shape=3.0)" in str(posterior.report)
    chosen = ssla.fit(network(), (X[:40], Y[:40]), likelihood=Gamma(), validation=(X[40:], Y[40:]))
    assert chosen.report.validation is not None
    assert bool(torch.isfinite(chosen.predict(X[40:]).log_prob(Y[40:])).all())


def test_files_need_its_code_again_and_export_says_what_it_cannot_write(tmp_path):
    posterior = fitted()
    posterior.save(tmp_path / "new.ssla")
    with pytest.raises(ValueError, match="custom code"):
        ssla.load(tmp_path / "new.ssla", model=network())
    again = ssla.load(tmp_path / "new.ssla", model=network(), likelihood=Gamma())
    assert torch.equal(
        again.predict(X[:3]).log_prob(Y[:3]), posterior.predict(X[:3]).log_prob(Y[:3])
    )
    with pytest.raises(ValueError, match="Gaussian noise, classes and counts, but not Gamma"):
        posterior.export(tmp_path / "new.onnx", X[:2])


def test_gradients_in_x_are_refused_with_what_has_them():
    with pytest.raises(ValueError, match="marginal"):
        fitted().predict(X[:2], differentiable=True)
