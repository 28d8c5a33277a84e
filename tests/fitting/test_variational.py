"""The variational Gaussian: against the bound maximised by SciPy, and against posteriors known
by quadrature.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy import optimize
from torch import Tensor, nn

import ssla
from ssla.curvature import Dense
from ssla.data import open_source
from ssla.fitting.further_passes import make_plan_to_reread
from ssla.fitting.passes import Order, Reader
from ssla.fitting.variational import ROUGH, BoundAscent
from ssla.likelihoods import (
    Bernoulli,
    Categorical,
    Gaussian,
    HeteroscedasticGaussian,
    Likelihood,
    NegativeBinomial,
    Poisson,
    StudentT,
    custom,
)
from ssla.tables.networks.last_layer_fits import fit_last_layer

STRUCTURES = ("dense", "kfac", "diag", "low_rank")


def problem(
    likelihood: Likelihood, n: int = 40, inputs: int = 3, seed: int = 0
) -> tuple[nn.Sequential, Tensor, Tensor]:
    """A linear network at zero, and rows that follow the likelihood at other weights."""
    generator = torch.Generator().manual_seed(seed)
    outputs = {"HeteroscedasticGaussian": 2, "Categorical": 4}.get(type(likelihood).__name__, 1)
    x = torch.randn(n, inputs, dtype=torch.float64, generator=generator)
    true = 0.7 * torch.randn(outputs, inputs, dtype=torch.float64, generator=generator)
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(inputs, outputs)).double().eval()
    y = likelihood.sample(x @ true.mT, 1, generator)[0].reshape(n)
    return model, x, y


def _train(model: nn.Module, x: Tensor, y: Tensor, likelihood: Likelihood) -> None:
    """To the mode under a weak prior."""
    mode = ssla.fit(
        model, (x, y), likelihood=likelihood, prior=ssla.priors.Gaussian(0.01), gaussian="laplace"
    ).parameters
    with torch.no_grad():
        for name, value in mode.items():
            model.get_parameter(name).copy_(value)


def tightly(monkeypatch: pytest.MonkeyPatch, tolerance: float = 1e-12) -> None:
    monkeypatch.setattr(BoundAscent, "tolerance", tolerance, raising=True)
    monkeypatch.setattr(BoundAscent.__init__, "__defaults__", (None, tolerance, 400, None, None))


def best_gaussian(log_joint: Any, size: int) -> tuple[np.ndarray, np.ndarray, float]:
    """The N(m, S) of the highest bound, by SciPy on m and a Cholesky factor, with 40
    Gauss–Hermite nodes an axis.
    """
    nodes, weights = np.polynomial.hermite_e.hermegauss(40)
    z = np.stack(np.meshgrid(*[nodes] * size, indexing="ij"), -1).reshape(-1, size)
    w = np.prod(
        np.stack(np.meshgrid(*[weights / weights.sum()] * size, indexing="ij"), -1).reshape(
            -1, size
        ),
        1,
    )
    low = np.tril_indices(size)

    def opened(v: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        L = np.zeros((size, size))
        L[low] = v[size:]
        L[np.diag_indices(size)] = np.exp(np.diag(L))
        return v[:size], L

    def loss(v: np.ndarray) -> float:
        m, L = opened(v)
        average = float(w @ log_joint(m + z @ L.T))
        return -(average + np.log(np.diag(L)).sum() + 0.5 * size * (1 + math.log(2 * math.pi)))

    found = optimize.minimize(
        loss, np.zeros(size + len(low[0])), method="BFGS", options={"gtol": 1e-8}
    )
    m, L = opened(found.x)
    return m, L @ L.T, -float(found.fun)


@pytest.mark.parametrize(
    "likelihood",
    [Bernoulli(), Poisson(), NegativeBinomial(dispersion=0.5), StudentT(df=4.0, scale=1.0)],
    ids=repr,
)
def test_it_is_the_gaussian_of_the_highest_bound(
    likelihood: Likelihood, monkeypatch: pytest.MonkeyPatch
) -> None:
    tightly(monkeypatch)
    model, x, y = problem(likelihood, n=15, inputs=1)
    post = ssla.fit(
        model,
        (x, y),
        likelihood=likelihood,
        prior=ssla.priors.Gaussian(0.8),
        gaussian="variational",
    )
    phi = torch.cat([x, torch.ones(15, 1)], 1)

    def log_joint(theta: np.ndarray) -> np.ndarray:
        f = torch.from_numpy(theta) @ phi.mT
        prior = 0.5 * (2 * math.log(0.8) - 2 * math.log(2 * math.pi)) - 0.4 * (theta**2).sum(1)
        return likelihood.log_prob(y, f.unsqueeze(-1)).sum(1).numpy() + prior

    m, S, bound = best_gaussian(log_joint, 2)
    np.testing.assert_allclose(post.mean.numpy(), m, atol=2e-3)
    covariance = torch.linalg.inv(post.covariance.factor @ post.covariance.factor.mT)
    np.testing.assert_allclose(covariance.numpy(), S, atol=2e-3)
    assert post.log_evidence() == pytest.approx(bound, abs=2e-4)
    grid = np.linspace(-9, 9, 601)
    theta = np.stack(np.meshgrid(grid, grid), -1).reshape(-1, 2)
    evidence = float(torch.logsumexp(torch.from_numpy(log_joint(theta)), 0)) + 2 * math.log(
        grid[1] - grid[0]
    )
    assert bound <= evidence + 1e-6


def test_the_predictive_is_far_nearer_to_the_truth_than_laplace() -> None:
    model, x, y = problem(Bernoulli(), n=12, inputs=1, seed=3)
    options = {"likelihood": Bernoulli(), "prior": ssla.priors.Gaussian(0.05)}
    both = [
        ssla.fit(model, (x, y), gaussian=name, **options) for name in ("laplace", "variational")
    ]  # type: ignore[arg-type]
    grid = torch.linspace(-30, 30, 1201, dtype=torch.float64)
    theta = torch.cartesian_prod(grid, grid)
    log = -0.025 * (theta**2).sum(1)
    for row, target in zip(x[:, 0], y, strict=True):
        log += Bernoulli().log_prob(target, (theta[:, :1] * row + theta[:, 1:]))
    weight = torch.softmax(log, 0)
    new = torch.linspace(-3, 3, 13, dtype=torch.float64)[:, None]
    truth = torch.stack([weight @ torch.sigmoid(theta[:, 0] * a + theta[:, 1]) for a in new[:, 0]])

    def distance(post: ssla.Posterior) -> float:
        p = post.predict(new).probs[:, 1]
        return float(
            (truth * (truth / p).log() + (1 - truth) * ((1 - truth) / (1 - p)).log()).mean()
        )

    laplace, variational = (distance(post) for post in both)
    assert variational < 0.2 * laplace


@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize(
    "likelihood", [Bernoulli(), Poisson(), HeteroscedasticGaussian(), Categorical()], ids=repr
)
def test_the_bound_never_falls_from_round_to_round(
    likelihood: Likelihood, structure: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, x, y = problem(likelihood)
    bounds = []
    for most in range(1, 9):
        monkeypatch.setattr(BoundAscent.__init__, "__defaults__", (None, 0.0, most, None, None))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            post = ssla.fit(
                model,
                (x, y),
                likelihood=likelihood,
                structure=structure,
                prior=ssla.priors.Gaussian(),
                gaussian="variational",
            )
        bounds.append(post.log_evidence())
        said = any("did not converge" in str(w.message) for w in caught)
        assert said == ("did not converge" in str(post.report))
        assert said or most > 3
    assert all(b >= a - 1e-9 for a, b in zip(bounds, bounds[1:], strict=False))
    assert bounds[-1] > bounds[0]


def test_conjugate_models_have_their_exact_evidence() -> None:
    model, x, y = problem(Gaussian(noise=0.5))
    prior = ssla.priors.Gaussian(0.7)
    laplace = ssla.fit(
        model, (x, y), likelihood=Gaussian(noise=0.5), prior=prior, gaussian="laplace"
    )
    asked = ssla.fit(
        model, (x, y), likelihood=Gaussian(noise=0.5), prior=prior, gaussian="variational"
    )
    assert asked.log_evidence() == laplace.log_evidence()
    assert asked.gaussian == "variational"
    assert asked.report.passes == laplace.report.passes

    plan = make_plan_to_reread(laplace)
    assert plan is not None
    climbed = BoundAscent(
        laplace, plan.make_average_passes_at(laplace.theta)
    ).maximise_bound()  # the same by passes
    assert climbed.log_evidence() == pytest.approx(laplace.log_evidence(), abs=1e-10)
    torch.testing.assert_close(climbed.mean, laplace.theta, rtol=0, atol=1e-10)
    phi = torch.cat([x, torch.ones(40, 1)], 1)
    marginal = torch.distributions.MultivariateNormal(
        torch.zeros(40).double(), 0.25 * torch.eye(40).double() + phi @ phi.mT / 0.7
    )
    assert laplace.log_evidence() == pytest.approx(float(marginal.log_prob(y)), abs=1e-10)


@pytest.mark.parametrize(
    "likelihood", [Bernoulli(), Poisson(), HeteroscedasticGaussian()], ids=repr
)
def test_the_bounds_slope_in_the_precision(
    likelihood: Likelihood, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the optimum only the prior's own terms move: ½ [P − τ Σ(m² + diag S)] for one log
    precision.
    """
    tightly(monkeypatch)
    model, x, y = problem(likelihood)

    def at(log_precision: float) -> ssla.Posterior:
        prior = ssla.priors.Gaussian(math.exp(log_precision))
        return ssla.fit(model, (x, y), likelihood=likelihood, prior=prior, gaussian="variational")

    here, h = at(0.2), 1e-3
    tau, P = math.exp(0.2), len(here.mean)
    slope = 0.5 * (P - tau * float((here.mean**2 + here.covariance.variances()).sum()))
    assert (at(0.2 + h).log_evidence() - at(0.2 - h).log_evidence()) / (2 * h) == pytest.approx(
        slope, abs=2e-4 * P
    )


@pytest.mark.parametrize(
    "likelihood", [Bernoulli(), Poisson(), HeteroscedasticGaussian()], ids=repr
)
def test_tuning_finds_the_highest_bound(likelihood: Likelihood) -> None:
    model, x, y = problem(likelihood)
    options = {"likelihood": likelihood, "gaussian": "variational", "mode": "polish"}
    tuned = ssla.fit(model, (x, y), prior=ssla.priors.Gaussian(), **options).tune()
    best = float(tuned.bound_prior.scale_precision[0])

    def bound(precision: float) -> float:
        return ssla.fit(
            model, (x, y), prior=ssla.priors.Gaussian(precision), **options
        ).log_evidence()

    assert bound(best) == pytest.approx(tuned.log_evidence(), abs=5e-3)
    assert bound(best) > max(bound(best * 1.5), bound(best / 1.5)) - 1e-3
    assert tuned.report.residual_after < 1e-6  # θ̂ has followed the prior to its mode


def test_rows_in_place_of_a_matrix_give_the_same() -> None:
    model, x, y = problem(Categorical(), n=8, inputs=20)
    dual, whole = (
        ssla.fit(
            model,
            (x, y),
            likelihood=Categorical(),
            prior=ssla.priors.Gaussian(),
            structure=structure,
        )
        for structure in (Dense(), Dense(dual=False))
    )
    assert isinstance(dual.sums.curvature, Dense)
    assert dual.sums.curvature.matrix is None
    torch.testing.assert_close(dual.mean, whole.mean, rtol=0, atol=1e-8)
    torch.testing.assert_close(dual.covariance.variances(), whole.covariance.variances())
    assert dual.log_evidence() == pytest.approx(whole.log_evidence(), abs=1e-8)


@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("weights", ["last_layer", "all", ["0.weight"]], ids=str)
def test_every_structure_and_scope(structure: str, weights: Any, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 3)).double().eval()
    x = torch.randn(30, 2, dtype=torch.float64)
    y = torch.randint(3, (30,))
    prior = ssla.priors.Gaussian(2.0)
    post = ssla.fit(
        model, (x, y), likelihood=Categorical(), weights=weights, structure=structure, prior=prior
    )
    laplace = ssla.fit(
        model,
        (x, y),
        likelihood=Categorical(),
        weights=weights,
        structure=structure,
        prior=prior,
        gaussian="laplace",
    )
    assert post.gaussian == "variational"
    assert torch.equal(post.theta, laplace.theta)  # the mode stays where it is
    new = torch.randn(5, 2, dtype=torch.float64)
    f, K = post.marginal(new)
    assert bool((torch.linalg.eigvalsh(K) > -1e-12).all())
    if weights == "last_layer":
        hidden = torch.cat(
            [torch.tanh(new @ model[0].weight.mT + model[0].bias), torch.ones(5, 1)], 1
        )
        torch.testing.assert_close(f, (hidden @ post.mean.reshape(3, 5).mT).detach())
    path = post.save(tmp_path / "post")
    assert torch.equal(ssla.load(path, model).predict(new).probs, post.predict(new).probs)
    assert ssla.load(path, model).log_evidence() == post.log_evidence()


def test_a_tilted_posterior_stays_at_the_trained_weights_to_first_order() -> None:
    model, x, y = problem(Bernoulli(), n=4000)
    _train(model, x, y, Bernoulli())
    post = ssla.fit(
        model, (x, y), likelihood=Bernoulli(), prior=ssla.priors.Gaussian(), mode="tilt"
    )
    off = (post.mean - post.theta) / post.covariance.variances().sqrt()
    assert float(off.abs().max()) < 0.05
    assert post.report.mode == "tilt"


class TestChanges:
    """update, merge and another prior, each against a fit of all data under that prior."""

    @pytest.fixture
    def rows(self) -> tuple[nn.Sequential, Tensor, Tensor, Tensor]:
        model, x, y = problem(Poisson(), n=200)
        return (
            model,
            x,
            y,
            torch.randn(20, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(9)),
        )

    @staticmethod
    def fit(model: nn.Module, *data: Tensor, **options: Any) -> ssla.Posterior:
        return ssla.fit(
            model, data, likelihood=Poisson(), **({"prior": ssla.priors.Gaussian()} | options)
        )

    def test_update(self, rows: tuple[nn.Sequential, Tensor, Tensor, Tensor]) -> None:
        model, x, y, new = rows
        half, whole = self.fit(model, x[:100], y[:100]), self.fit(model, x, y)
        both = half.update((x[100:], y[100:]))
        assert both.report.n == 200
        before, after = (
            float((p.marginal(new).mean - whole.marginal(new).mean).abs().max())
            for p in (half, both)
        )
        assert after < 0.1 * before
        torch.testing.assert_close(
            both.marginal(new).covariance, whole.marginal(new).covariance, rtol=0.05, atol=1e-4
        )

    def test_merge(self, rows: tuple[nn.Sequential, Tensor, Tensor, Tensor]) -> None:
        model, x, y, new = rows
        _train(model, x, y, Poisson())
        a, b, whole = (
            self.fit(model, x[r], y[r], mode="tilt")
            for r in (slice(0, 100), slice(100, 200), slice(0, 200))
        )
        one, other = a.merge(b), b.merge(a)
        torch.testing.assert_close(one.mean, other.mean)
        torch.testing.assert_close(
            one.marginal(new).covariance, whole.marginal(new).covariance, rtol=0.05, atol=1e-4
        )
        torch.testing.assert_close(
            one.marginal(new).mean, whole.marginal(new).mean, rtol=0, atol=0.02
        )

    def test_another_gaussian_is_not_merged(
        self, rows: tuple[nn.Sequential, Tensor, Tensor, Tensor]
    ) -> None:
        model, x, y, _ = rows
        _train(model, x, y, Poisson())
        a = self.fit(model, x, y, mode="tilt")
        b = self.fit(model, x, y, mode="tilt", gaussian="laplace")
        with pytest.raises(ValueError, match="gaussian differ"):
            a.merge(b)

    def test_another_prior(self, rows: tuple[nn.Sequential, Tensor, Tensor, Tensor]) -> None:
        model, x, y, new = rows
        post, prior = self.fit(model, x, y), ssla.priors.Gaussian(4.0)
        truth = self.fit(model, x, y, prior=prior)
        kept, again = post.with_prior(prior), post.with_prior(prior, data=(x, y))
        torch.testing.assert_close(again.mean, truth.mean)
        off = [
            float((p.marginal(new).mean - truth.marginal(new).mean).abs().max())
            for p in (post, kept)
        ]
        assert off[1] < 0.2 * off[0]
        assert "averages over the data" in str(kept.report)

    def test_the_papers_conventions_take_the_gaussian_at_the_mode(
        self, rows: tuple[nn.Sequential, Tensor, Tensor, Tensor]
    ) -> None:
        model, x, y, new = rows
        paper = self.fit(model, x, y).with_prior(ssla.priors.Gaussian(), convention="paper")
        assert paper.gaussian == "laplace"
        assert "laplace" in " ".join(paper.report.notes)
        same = self.fit(model, x, y, gaussian="laplace").with_prior(
            ssla.priors.Gaussian(), convention="paper"
        )
        assert torch.equal(paper.predict(new).mean, same.predict(new).mean)


class TestInput:
    def test_data_that_can_be_read_once(self) -> None:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).double().eval()
        _, x, y = problem(Bernoulli())

        def batches() -> Iterator[tuple[Tensor, Tensor]]:
            yield x, y

        options = {"likelihood": Bernoulli(), "weights": "all", "prior": ssla.priors.Gaussian()}
        with pytest.warns(UserWarning, match="read only once"):
            post = ssla.fit(model, batches(), **options)  # type: ignore[arg-type]
        assert post.gaussian == "laplace"
        assert "laplace" in " ".join(post.report.notes)
        with pytest.raises(ValueError, match="several times"):
            ssla.fit(model, batches(), gaussian="variational", **options)  # type: ignore[arg-type]

    @pytest.mark.filterwarnings("ignore:The network is not at the mode")
    def test_very_many_outputs_are_averaged_too(self) -> None:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 1200)).eval()
        x, y = torch.randn(60, 4), torch.randint(1200, (60,))
        post = ssla.fit(model, (x, y), likelihood=Categorical(), structure="kfac", mode="tilt")
        assert post.gaussian == "variational"
        assert post.tuning_history is not None
        laplace = ssla.fit(
            model,
            (x, y),
            likelihood=Categorical(),
            structure="kfac",
            mode="tilt",
            gaussian="laplace",
        )
        assert laplace.gaussian == "laplace"

    def test_names(self) -> None:
        model, x, y = problem(Bernoulli())
        with pytest.raises(ValueError, match="variational"):
            ssla.fit(model, (x, y), likelihood=Bernoulli(), gaussian="varational")

    def test_likelihoods_that_do_not_allow_every_output(self) -> None:
        model, x, y = problem(Bernoulli())
        with torch.no_grad():
            model[0].weight.zero_()
            model[0].bias.fill_(2.0)
        law = Poisson(link="identity")
        with pytest.raises(ValueError, match="does not allow every output"):
            ssla.fit(model, (x, y), likelihood=law, gaussian="variational")
        post = ssla.fit(
            model, (x, y + 1), likelihood=law, prior=ssla.priors.Gaussian(), mode="tilt"
        )
        assert post.gaussian == "laplace"

    def test_a_log_density_that_is_not_finite_everywhere_starts_from_a_narrower_gaussian(
        self,
    ) -> None:
        def log_prob(y: Tensor, f: Tensor) -> Tensor:
            return torch.where(f[..., 0].abs() < 50.0, -0.5 * (y - f[..., 0]) ** 2, torch.nan)

        model, x, y = problem(Gaussian(noise=1.0))
        with torch.no_grad():
            model[0].weight.zero_()
            model[0].bias.fill_(49.99)
        law, y = custom(log_prob, support="real"), y - y.mean() + 49.99
        prior = ssla.priors.Gaussian(1e-3, {"0.weight": 0.0, "0.bias": 49.99})
        post = ssla.fit(
            model, (x, y), likelihood=law, prior=prior, mode="tilt", gaussian="variational"
        )
        assert math.isfinite(post.log_evidence())


class TestWithoutAPrior:
    """The prior that `fit` chooses."""

    @pytest.mark.parametrize(
        "likelihood", [Gaussian(noise="estimate"), HeteroscedasticGaussian()], ids=repr
    )
    @pytest.mark.parametrize("unit", [1e-3, 250.0])
    def test_predictions_do_not_depend_on_the_unit(
        self, likelihood: Likelihood, unit: float
    ) -> None:
        law = Gaussian(noise=0.3) if isinstance(likelihood, Gaussian) else likelihood
        model, x, y = problem(law, n=120)
        _train(model, x, y, law)
        copy = nn.Sequential(nn.Linear(3, model[0].out_features)).double().eval()
        with torch.no_grad():
            copy.load_state_dict(model.state_dict())
            copy[0].weight[0] *= unit
            copy[0].bias[0] = copy[0].bias[0] * unit + 7 * unit
            if isinstance(likelihood, HeteroscedasticGaussian):
                copy[0].bias[1] += 2 * math.log(unit)
        one = ssla.fit(model, (x, y), likelihood=likelihood)
        other = ssla.fit(copy, (x, y * unit + 7 * unit), likelihood=likelihood)
        new = torch.randn(10, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
        a, b = one.predict(new), other.predict(new)
        torch.testing.assert_close(b.mean, a.mean * unit + 7 * unit, rtol=2e-3, atol=2e-3 * unit)
        torch.testing.assert_close(b.stddev, a.stddev * unit, rtol=1e-2, atol=0)

    def test_it_is_the_prior_of_the_highest_evidence_around_the_trained_scale_and_said(
        self,
    ) -> None:
        model, x, y = problem(Bernoulli(), n=100)
        post = ssla.fit(model, (x, y), likelihood=Bernoulli())
        assert post.tuning_history is not None
        assert "tuned by log evidence" in str(post.report)
        best = float(post.bound_prior.scale_precision[0])
        own = 1 / float((model[0].weight.detach() ** 2).mean())

        def height(precision: float) -> float:
            prior = ssla.priors.Gaussian(
                precision, {"0.weight": 0.0, "0.bias": model[0].bias.detach()}
            )
            evidence = ssla.fit(model, (x, y), likelihood=Bernoulli(), prior=prior).log_evidence()
            return evidence - 0.5 * math.log(precision / own) ** 2

        assert height(best) > max(height(best * 1.5), height(best / 1.5)) - 1e-3

    def test_the_report_says_what_was_tuned_and_that_the_mode_followed(self) -> None:
        model, x, y = problem(Bernoulli(), n=100)
        notes = " ".join(ssla.fit(model, (x, y), likelihood=Bernoulli()).report.notes)
        assert "prior: precision was tuned" in notes
        assert "θ̂ was kept" not in notes

    def test_a_gaussian_that_never_comes_near_its_best_keeps_the_first_prior(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(BoundAscent.__init__, "__defaults__", (None, 1e-4, 1, None, None))
        model, x, y = problem(Categorical(), n=100)
        with pytest.warns(RuntimeWarning, match="did not converge"):
            post = ssla.fit(model, (x, y), likelihood=Categorical())
        assert post.tuning_history is not None
        assert not post.tuning_history.converged
        own = 1 / float((model[0].weight.detach() ** 2).mean())
        assert float(post.bound_prior.scale_precision[0]) == pytest.approx(own)
        assert post.tuning_history.points.shape == (1, 1)

    def test_a_layer_at_zero_still_learns(self) -> None:
        model, x, y = problem(Categorical(), n=200)
        with torch.no_grad():
            model[0].weight.zero_()
            model[0].bias.zero_()
        found = ssla.fit(model, (x, y), likelihood=Categorical()).predict(x)
        assert float(found.log_prob(y).mean()) > math.log(1 / 4) + 0.1

    def test_a_bias_is_centred_on_its_trained_value(self) -> None:
        model, x, y = problem(Gaussian(noise=1.0))
        with torch.no_grad():
            model[0].bias.fill_(1000.0)
        post = ssla.fit(model, (x, y + 1000), likelihood=Gaussian(noise="estimate"))
        assert float(post.bound_prior.mean[-1]) == 1000
        assert float(post.predict(x).mean.mean()) == pytest.approx(float(y.mean()) + 1000, abs=0.2)

    @pytest.mark.parametrize("structure", STRUCTURES)
    def test_all_weights_of_every_structure(self, structure: str) -> None:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 1)).double().eval()
        _, x, y = problem(Gaussian(noise=0.5))
        post = ssla.fit(
            model, (x, y), likelihood=Gaussian(noise="estimate"), weights="all", structure=structure
        )
        layers = post.bound_prior.scale_precision
        assert float(layers[0]) != float(layers[-1])
        assert bool(torch.isfinite(post.predict(x).stddev).all())


def separated(
    classes: int = 6, n: int = 120, inputs: int = 10
) -> tuple[nn.Sequential, Tensor, Tensor]:
    """Rows of classes that a linear network separates: the Gaussian at the mode is far too wide."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(n, inputs, dtype=torch.float64, generator=generator)
    y = (x @ torch.randn(inputs, classes, dtype=torch.float64, generator=generator)).argmax(1)
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(inputs, classes)).double().eval(), x, y


def test_separated_classes_take_few_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x, y = separated(10, 200, 20)
    post = ssla.fit(model, (x, y), likelihood=Categorical(), prior=ssla.priors.Gaussian(0.1))
    assert post.report.rounds <= 16  # 21 with one share for precision and mean
    tightly(monkeypatch, 1e-8)
    best = ssla.fit(model, (x, y), likelihood=Categorical(), prior=ssla.priors.Gaussian(0.1))
    assert best.log_evidence() - 4e-3 * len(post.mean) <= post.log_evidence() <= best.log_evidence()


def test_a_rough_fit_has_a_bound_that_is_nearly_as_high() -> None:
    model, x, y = separated()
    prior = ssla.priors.Gaussian(0.1)
    post = fit_last_layer(model, (x, y), Categorical(), prior)
    rough = fit_last_layer(model, (x, y), Categorical(), prior, rough=True)
    assert rough.report.rounds < post.report.rounds
    assert torch.equal(rough.theta, post.theta)
    assert (
        post.log_evidence() - 10 * ROUGH * len(post.mean)
        <= rough.log_evidence()
        <= post.log_evidence()
    )


@pytest.mark.parametrize("n", [10, 120], ids=["fewer rows than parameters", "more rows"])
def test_newton_steps_of_classes_share_the_curvature(n: int) -> None:
    model, x, y = separated(n=n)
    w = torch.linspace(0.5, 2.0, n, dtype=torch.float64)
    batches = [(x[:4], y[:4], w[:4]), (x[4:], y[4:], w[4:])]
    reader = Reader(open_source(batches), model, "last_layer", 1 << 30)
    sums = reader.run_pass(Order(None, Categorical(), Dense(), "polish")).sums
    assert sums is not None
    assert isinstance(sums.newton, Dense)
    f = (x @ model[0].weight.mT + model[0].bias).detach()
    J = torch.einsum(
        "ab,nf->nabf", torch.eye(6).double(), torch.cat([x, torch.ones(n, 1)], 1)
    ).flatten(2)
    whole = torch.einsum("n,nap,nab,nbq->pq", w, J, Categorical().precision(y, f), J)
    torch.testing.assert_close(sums.newton.as_matrix(), whole)
    torch.testing.assert_close(sums.statistics.curvature.as_matrix(), whole)
