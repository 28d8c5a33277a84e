"""Spreads and trust by held-out rows; pieces of numbers."""

import math

import numpy as np
import pytest
import torch
from scipy import optimize

from ssla import Marginal, metrics
from ssla.curvature.structure import NoFactorError
from ssla.sklearn import SSLAClassifier, SSLARegressor, load
from ssla.tables.estimators import estimator
from ssla.tables.networks import building
from ssla.tables.networks.pieces import Pieces, count_pieces, find_quantile_edges
from ssla.tables.networks.recalibration import (
    choose_spreads,
    compute_stretched_log_densities,
    fit_model_shares,
)

G = torch.Generator().manual_seed(0)


def test_shares_are_the_maximum_of_a_concave_function():
    logs = torch.randn(60, 3, dtype=torch.float64, generator=G)
    weights = torch.rand(60, dtype=torch.float64, generator=G)
    pseudo = torch.tensor([2.0, 1.0, 0.5], dtype=torch.float64)

    def negative(free):
        pi = torch.softmax(torch.tensor([*free, 0.0], dtype=torch.float64), 0)
        return -float(weights @ (logs.exp() @ pi).log() + pseudo @ pi.log())

    best = optimize.minimize(
        negative, [0.0, 0.0], method="Nelder-Mead", options={"xatol": 1e-8, "fatol": 1e-10}
    ).x
    expected = torch.softmax(torch.tensor([*best, 0.0], dtype=torch.float64), 0)
    assert torch.allclose(fit_model_shares(logs, weights, pseudo), expected, atol=1e-5)


@pytest.mark.parametrize("truth", [0.5, 1.0, 2.0])
def test_spreads_find_the_scale_of_the_residuals(truth):
    y = truth * torch.randn(4000, dtype=torch.float64, generator=G)
    marginal = Marginal(
        torch.zeros(4000, 2, dtype=torch.float64), torch.zeros(4000, 2, 2, dtype=torch.float64)
    )
    found = choose_spreads(
        compute_stretched_log_densities(marginal, y, torch.zeros_like(y)), torch.ones_like(y)
    )[0]
    assert sum(share for _, share in found) == pytest.approx(1.0)
    assert math.sqrt(sum(share * factor**2 for factor, share in found)) == pytest.approx(
        truth, rel=0.06
    )


def test_heavy_tails_have_several_spreads_and_few_rows_decide_little():
    t = torch.distributions.StudentT(torch.tensor(3.0, dtype=torch.float64))
    torch.manual_seed(0)
    y = t.sample((4000,))
    marginal = Marginal(
        torch.zeros(4000, 2, dtype=torch.float64), torch.zeros(4000, 2, 2, dtype=torch.float64)
    )
    found = dict(
        choose_spreads(
            compute_stretched_log_densities(marginal, y, torch.zeros_like(y)), torch.ones_like(y)
        )[0]
    )
    assert max(found) >= 3
    few = Marginal(*(part[:2] for part in marginal))
    two = torch.ones(2, dtype=torch.float64)
    little = choose_spreads(compute_stretched_log_densities(few, 10 * two, 0 * two), two)[0]
    assert sum(share for factor, share in little if factor <= 2.5) > 0.75


def test_disagreement_of_the_members_is_not_counted_twice():
    y = math.sqrt(2) * torch.randn(
        4000, dtype=torch.float64, generator=G
    )  # noise 1 and a deviation of the member of variance 1
    f = torch.zeros(4000, 2, dtype=torch.float64)
    f[:, 1] = math.log(2.0)
    marginal = Marginal(f, torch.zeros(4000, 2, 2, dtype=torch.float64))
    found = choose_spreads(
        compute_stretched_log_densities(marginal, y, torch.ones_like(y)), torch.ones_like(y)
    )[0]
    assert sum(share * factor**2 for factor, share in found) * 2 == pytest.approx(1.0, rel=0.1)


def test_disagreement_removes_half_of_a_squared_residual_at_most():
    marginal = Marginal(
        torch.zeros(2, 2, dtype=torch.float64), torch.zeros(2, 2, 2, dtype=torch.float64)
    )
    y = torch.tensor([1.0, -2.0], dtype=torch.float64)
    most = compute_stretched_log_densities(marginal, y, torch.full_like(y, 9.0))
    assert torch.allclose(
        most, compute_stretched_log_densities(marginal, y * math.sqrt(0.5), torch.zeros_like(y))
    )


def test_pieces_are_progress_through_quantiles_and_go_on_beyond_them():
    x = torch.stack(
        [torch.arange(101.0, dtype=torch.float64), torch.arange(101.0, dtype=torch.float64) % 2], 1
    )
    edges = find_quantile_edges(x, torch.ones(101, dtype=torch.float64), 4)
    assert count_pieces(edges) == (4, 0)
    module = Pieces(count_pieces(edges)).double()
    module.set_edges(edges)
    new = torch.tensor([[50.0, 1.0], [-25.0, 0.0], [150.0, 0.0]], dtype=torch.float64)
    expected = [[50, 1, 1, 1, 0, 0], [-25, 0, -1, 0, 0, 0], [150, 0, 1, 1, 1, 3]]
    assert torch.allclose(module(new), torch.tensor(expected, dtype=torch.float64))
    twice = torch.cat([x, x[:30]])
    weights = torch.where(torch.arange(101) < 30, 2.0, 1.0).double()
    assert all(
        torch.equal(a, b)
        for a, b in zip(
            find_quantile_edges(twice, torch.ones(131, dtype=torch.float64), 4),
            find_quantile_edges(x, weights, 4),
            strict=True,
        )
    )


def test_auto_rules():
    members = estimator.choose_member_count.__wrapped__
    assert [members(rows) for rows in (100, 301, 10**5, 10**6)] == [10, 5, 5, 2]
    assert [estimator.choose_epoch_count(rows) for rows in (100, 10**5, 10**6)] == [200, 40, 8]
    assert [estimator.choose_batch_size(rows) for rows in (100, 1600, 10**5, 10**7)] == [
        16,
        100,
        390,
        4096,
    ]


def test_the_default_regressor_covers_noise_that_depends_on_x_and_survives_a_file(tmp_path):
    rng = np.random.default_rng(0)
    X = rng.uniform(-2, 2, (900, 2))
    y = np.sin(2 * X[:, 0]) + np.exp(X[:, 1] - 1) * rng.standard_t(4, 900)
    model = SSLARegressor(members=2, max_epochs=40, random_state=0).fit(X[:500], y[:500])
    assert model.ensemble_.settings.likelihood == "heteroscedastic"
    assert (model.ensemble_.architecture.activation, model.ensemble_.architecture.pieces) == (
        "relu",
        (8, 8),
    )
    p = model.predict_dist(X[500:])
    assert 0.85 <= float(metrics.coverage(p, y[500:], 0.9)) <= 0.95
    width = np.diff(model.predict_interval(X[500:], 0.9))[:, 0]
    assert np.corrcoef(np.log(width), X[500:, 1])[0, 1] > 0.8
    again = load(model.save(tmp_path / "model"))
    assert np.array_equal(again.predict_interval(X[500:]), model.predict_interval(X[500:]))
    assert again.ensemble_.spreads == model.ensemble_.spreads


def test_trust_is_a_share_of_posteriors_beside_networks():
    rng = np.random.default_rng(1)
    X = rng.normal(size=(200, 2))
    labels = (X[:, 0] + 0.7 * rng.normal(size=200) > 0).astype(int)
    model = SSLAClassifier(members=2, max_epochs=20, trees=0, random_state=0).fit(X, labels)
    ensemble = model.ensemble_
    assert 0 < ensemble.trust < 1
    z = ensemble.inputs(torch.from_numpy(X))
    own = torch.stack([torch.sigmoid(module(z))[:, 0] for module in ensemble.modules]).mean(0)
    posteriors = torch.stack(
        [component.posterior.predict(z).probs[:, 1] for component in ensemble.components]
    ).mean(0)
    expected = ensemble.trust * posteriors + (1 - ensemble.trust) * own
    assert np.allclose(model.predict_proba(X)[:, 1], expected.detach().numpy(), atol=1e-10)


def test_a_target_that_no_varying_noise_fits_gets_constant_noise_and_a_warning(monkeypatch):
    X = np.random.default_rng(2).normal(size=(80, 2))
    fit_rows = SSLARegressor._fit_rows

    def refuses(self, X, y, weights, likelihood, related, rival=None, **more):
        if likelihood == "heteroscedastic":
            raise NoFactorError("The curvature cannot be factorised: no noise.")
        return fit_rows(self, X, y, weights, likelihood, related, **more)

    monkeypatch.setattr(SSLARegressor, "_fit_rows", refuses)
    with pytest.warns(UserWarning, match="constant noise was used"):
        model = SSLARegressor(members=1, max_epochs=5, random_state=0).fit(X, X[:, 0])
    assert model.ensemble_.settings.likelihood == "gaussian"
    few = SSLARegressor(members=1, max_epochs=5, random_state=0).fit(
        X[:50], X[:50, 0] + 0.1 * X[:50, 1] ** 2
    )
    assert few.ensemble_.settings.likelihood == "gaussian"


def test_where_the_logarithmic_scale_cannot_be_fitted_the_target_keeps_its_own(monkeypatch):
    """Most of the targets may be zero, without noise on that scale: this is no reason for a
    constant noise, nor for a warning.
    """
    rng = np.random.default_rng(2)
    X = rng.normal(size=(80, 2))
    fit_rows = SSLARegressor._fit_rows

    def refuses(self, *rest, rival=None, **more):
        if rival is not None:
            raise NoFactorError("The curvature cannot be factorised: no noise.")
        return fit_rows(self, *rest, **more)

    monkeypatch.setattr(SSLARegressor, "_fit_rows", refuses)
    model = SSLARegressor(members=1, max_epochs=5, random_state=0).fit(
        X, np.exp(X[:, 0] + rng.normal(size=80))
    )
    assert model.ensemble_.settings.likelihood == "heteroscedastic"


@pytest.mark.parametrize("likelihood", ["heteroscedastic", "gaussian"])
def test_last_layers_of_large_tables_take_some_rows_and_constant_noise_takes_all(
    monkeypatch, likelihood
):
    monkeypatch.setattr(building, "MOST_FITTED", 100)
    rng = np.random.default_rng(4)
    X = rng.normal(size=(300, 2))
    y = X[:, 0] + rng.normal(size=300) * np.exp(0.5 * X[:, 1])
    model = SSLARegressor(likelihood, members=2, max_epochs=20, trees=0, random_state=0).fit(X, y)
    assert model.ensemble_.components[0].posterior.report.n == (
        100 if likelihood == "heteroscedastic" else 300
    )
    assert 0.8 < float(metrics.coverage(model.predict_dist(X), y, 0.9)) < 0.98
    ends = model.predictive_set(X, 0.9)
    assert np.mean((ends[:, 0] <= y) & (y <= ends[:, 1])) > 0.85


@pytest.mark.parametrize("column", [0, 2])
def test_a_typing_error_in_an_input_gives_a_wide_and_consistent_prediction(column):
    """Far from the data the log variance of a network is linear: e^(10⁵) gave NaN quantiles,
    and bounds beside the mean.
    """
    rng = np.random.default_rng(0)
    X = rng.normal(size=(200, 3))
    y = X[:, 0] + 0.3 * rng.normal(size=200)
    model = SSLARegressor(members=2, max_epochs=30, random_state=0).fit(X, y)
    far = np.zeros((5, 3))
    far[:, column] = [1e2, 1e4, 1e6, -1e6, 1e30]
    assert model.ensemble_.trees is not None
    quantiles = model.predict_quantiles(far, [0.025, 0.5, 0.975])
    mean, sd = model.predict(far, return_std=True)
    assert np.isfinite(quantiles).all()
    assert np.isfinite(sd).all()
    assert (np.diff(quantiles) > 0).all()
    assert ((quantiles[:, 0] < mean) & (mean < quantiles[:, 2])).all()
    assert (sd > 10 * model.predict(X, return_std=True)[1].mean()).all()


def test_many_columns_without_effect_leave_the_noise_as_it_is():
    """The networks disagree as much as they overfit, but their posteriors do not, and the
    disagreement reduces the noise.
    """
    rng = np.random.default_rng(0)
    X, y = rng.normal(size=(300, 1000)), rng.normal(size=300)
    model = SSLARegressor("gaussian", members=4, random_state=0).fit(X[:100], y[:100])
    assert 0.8 < float(metrics.coverage(model.predict_dist(X[100:]), y[100:], 0.9)) < 0.97
