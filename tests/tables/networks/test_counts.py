"""The choice between counts and numbers, against probabilities written by hand, and on tables
with a known law.
"""

import numpy as np
import pytest
import torch
from scipy import stats

from ssla import metrics
from ssla.fitting.mode import NoModeError
from ssla.sklearn import SSLARegressor, load
from ssla.tables.networks import building
from ssla.tables.networks import count_targets as counts

QUICK = {"members": 5, "max_epochs": 30, "hidden": (16,), "trees": 0, "random_state": 0}
RNG = np.random.default_rng(0)
X = RNG.normal(size=(500, 2))
RATE = np.exp(0.6 * X[:, 0] - 0.4 * X[:, 1] - 0.25)  # its mean is about 1
ONES = torch.ones(len(X), dtype=torch.float64)


def poisson(mean, seed=0):
    return np.random.default_rng(seed).poisson(mean * RATE).astype(float)


def varied(times, mean=2.0):
    """Negative binomial counts; their variance is so many times their mean."""
    return (
        np.random.default_rng(1)
        .negative_binomial(mean * RATE / (times - 1), 1 / times)
        .astype(float)
    )


def graded():
    return np.clip(np.round(6 + X[:, 0] + 0.6 * np.random.default_rng(2).normal(size=500)), 3, 9)


def chosen(model):
    return model.ensemble_.settings.likelihood


@pytest.fixture(scope="module")
def fitted():
    model = SSLARegressor(**QUICK | {"members": 3}).fit(X, poisson(1.0))
    assert chosen(model) == "poisson"
    return model


@pytest.mark.parametrize("mean", [0.5, 1.0, 4.0])
def test_poisson_counts_are_fitted_as_counts(mean):
    y = poisson(mean)
    model = SSLARegressor(**QUICK).fit(X[:400], y[:400])
    assert chosen(model) == "poisson"
    p = model.predict_dist(X[400:])
    assert p.kind == "count"
    assert float(metrics.coverage(p, y[400:], 0.9)) > 0.85


def test_the_choice_is_the_fit_that_could_be_asked_for(fitted):
    asked = SSLARegressor("poisson", **QUICK | {"members": 3}).fit(X, poisson(1.0))
    assert np.array_equal(asked.predict(X[:20]), fitted.predict(X[:20]))


OTHERS = {
    "grades": graded(),
    "overdispersed": varied(4.0),
    "large": poisson(200.0),
    "not whole": poisson(2.0) + 0.5,
    "negative": poisson(2.0) - 1,
    "zero and one": (poisson(0.3) > 0).astype(float),
}


@pytest.mark.parametrize("kind", list(OTHERS))
def test_other_targets_are_numbers_without_a_second_fit(kind, monkeypatch):
    fitted = []
    fit_rows = SSLARegressor._fit_rows
    monkeypatch.setattr(
        SSLARegressor,
        "_fit_rows",
        lambda *args, **more: fitted.append(args[4]) or fit_rows(*args, **more),
    )
    assert counts.may_be_poisson(torch.from_numpy(OTHERS[kind]), ONES) == (kind == "overdispersed")
    model = SSLARegressor(**QUICK | {"members": 2, "max_epochs": 10}).fit(X, OTHERS[kind])
    assert chosen(model) in ("heteroscedastic", "positive")
    assert fitted == ["heteroscedastic"]


@pytest.mark.parametrize("likelihood", ["heteroscedastic", "positive", "gaussian", "poisson"])
def test_probabilities_and_dispersion_are_those_by_hand(likelihood):
    y = poisson(2.0)
    ensemble = (
        SSLARegressor(likelihood, **QUICK | {"members": 2, "max_epochs": 5}).fit(X, y).ensemble_
    )
    x, target = torch.from_numpy(X), torch.from_numpy(y)
    z = (x - x.mean(0)) / x.std(0, unbiased=False)
    errors, means = 0.0, 0.0
    for m, held in enumerate(ensemble.held):
        f, own = ensemble.modules[m](z[held]).detach().numpy(), y[held.numpy()]
        found = counts.compute_count_log_probs(ensemble, m, x[held], target[held]).numpy()
        if likelihood == "poisson":
            assert np.allclose(
                found, stats.poisson.logpmf(own, np.exp(f[:, 0])), rtol=0, atol=1e-10
            )
            continue
        noise = next(part for part in ensemble.components if part.member == m).posterior.likelihood
        sd = np.exp(f[:, 1] / 2) if f.shape[1] == 2 else np.full(len(f), float(noise.noise))
        into = (
            (lambda v: v)
            if ensemble.scale is None
            else (lambda v: ensemble.scale.to_z(torch.from_numpy(v)).numpy())
        )
        scaled = into(y)
        law = stats.norm(scaled.mean() + scaled.std() * f[:, 0], scaled.std() * sd)
        low = np.where(own == 0, 0.0, law.cdf(into(np.maximum(own - 0.5, 0))))
        assert np.allclose(found, np.log(law.cdf(into(own + 0.5)) - low), rtol=0, atol=1e-10)
        t = np.linspace(-9, 9, 2001)[:, None]
        wide = torch.from_numpy(law.mean() + t * law.std())
        values = wide if ensemble.scale is None else ensemble.scale.to_y(wide)
        mean = (values.numpy() * stats.norm.pdf(t)).sum(0) * (t[1] - t[0])
        errors, means = errors + ((own - mean) ** 2).sum(), means + mean.sum()
    if likelihood != "poisson":
        assert np.isclose(
            counts.compute_dispersion(ensemble, x, target, ONES), errors / means, rtol=1e-5
        )


def test_tails_keep_their_digits():
    """Forty standard deviations above the mean, where a difference of two distribution
    functions is zero.
    """
    y = poisson(2.0)
    ensemble = (
        SSLARegressor("heteroscedastic", **QUICK | {"members": 1, "max_epochs": 2})
        .fit(X, y)
        .ensemble_
    )
    x, far = torch.from_numpy(X[:3]), torch.full((3,), 100.0, dtype=torch.float64)
    f = ensemble.modules[0](ensemble.inputs(x)).detach().numpy()
    t = ((99.5 - y.mean()) / y.std() - f[:, 0]) / np.exp(f[:, 1] / 2)
    assert (t > 10).all()
    assert np.allclose(
        counts.compute_count_log_probs(ensemble, 0, x, far), stats.norm.logsf(t), rtol=1e-3
    )


def test_gains_are_weighted_means_over_the_rows_that_a_member_held_out(monkeypatch):
    y, weights = poisson(2.0), 1 + torch.arange(500, dtype=torch.float64) % 3
    monkeypatch.setattr(building, "MOST_FITTED", 300)  # `held` is then about these rows only
    numbers, own = (
        SSLARegressor(name, **QUICK | {"max_epochs": 5}).fit(X, y).ensemble_
        for name in ("heteroscedastic", "poisson")
    )
    some = torch.linspace(0, 499, 300).long()
    assert numbers.held.shape == (5, 300)
    assert torch.equal(numbers.held, own.held)
    x, target = torch.from_numpy(X), torch.from_numpy(y)
    found = counts.compute_member_gains(numbers, own, x, target, weights)
    rows = some[numbers.held[2]]
    logs = [
        counts.compute_count_log_probs(ensemble, 2, x[rows], target[rows])
        for ensemble in (own, numbers)
    ]
    assert torch.isclose(
        found[2], (weights[rows] * (logs[0] - logs[1])).sum() / weights[rows].sum()
    )


def test_the_second_fit_holds_out_the_same_rows_for_a_random_state_that_moves_on():
    model = SSLARegressor(
        **QUICK | {"members": 2, "max_epochs": 5, "random_state": np.random.RandomState(3)}
    )
    held = []
    fit_rows = model._fit_rows
    model._fit_rows = lambda *args, **more: held.append(fit_rows(*args, **more)) or held[-1]
    model.fit(X, poisson(1.0))
    assert [ensemble.settings.likelihood for ensemble in held][1:] == ["poisson"]
    assert torch.equal(held[0].held, held[1].held)


def test_other_targets_are_refused_later(fitted):
    for wrong in (-1.0, 0.5):
        with pytest.raises(ValueError, match=r"chosen by 'auto' for this table\) needs counts"):
            fitted.partial_fit(X[:2], [wrong, 1.0])
        with pytest.raises(ValueError, match="y must hold counts"):
            fitted.predict_dist(X[:1]).log_prob(np.array([wrong]))


def test_files_intervals_and_more_rows(fitted, tmp_path):
    again = load(fitted.save(tmp_path / "model"))
    assert again.likelihood == "auto"
    assert chosen(again) == "poisson"
    ends = fitted.predict_interval(X[:100], 0.9)
    assert np.array_equal(again.predict_interval(X[:100], 0.9), ends)
    assert np.array_equal(ends, np.round(ends))
    assert (ends >= 0).all()
    before = again.predict_dist(X[:100]).epistemic.mean()
    assert (
        again.partial_fit(X, poisson(1.0, seed=7)).predict_dist(X[:100]).epistemic.mean() < before
    )


def test_conformal_intervals():
    y = poisson(1.0)
    model = SSLARegressor(conformal=True, **QUICK).fit(X[:400], y[:400])
    assert chosen(model) == "poisson"
    ends = model.predict_interval(X[400:], 0.9)
    assert ((ends[:, 0] <= y[400:]) & (y[400:] <= ends[:, 1])).mean() > 0.85
    assert np.array_equal(ends, np.round(ends))


def test_a_poisson_fit_that_fails_leaves_the_numbers(monkeypatch):
    fit_rows = SSLARegressor._fit_rows

    def refuses(self, X, y, weights, likelihood, *rest, **more):
        if likelihood == "poisson":
            raise NoModeError("The mode was not found: no reason.")
        return fit_rows(self, X, y, weights, likelihood, *rest, **more)

    monkeypatch.setattr(SSLARegressor, "_fit_rows", refuses)
    assert chosen(SSLARegressor(**QUICK | {"members": 2}).fit(X, poisson(1.0))) in (
        "heteroscedastic",
        "positive",
    )


@pytest.mark.parametrize(
    "more", [{"early_stopping": False}, {"weights": "all", "structure": "diag"}]
)
def test_without_held_out_rows_or_with_more_weights_counts_are_numbers(more):
    model = SSLARegressor(**QUICK | {"members": 1, "max_epochs": 3} | more).fit(
        X[:100], poisson(1.0)[:100]
    )
    assert chosen(model) in ("heteroscedastic", "gaussian")
