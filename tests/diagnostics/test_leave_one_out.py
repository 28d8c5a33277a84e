"""Leave-one-out predictions of training rows, against fits without each row."""

import math
from functools import cache

import pytest
import torch

import ssla
from ssla import likelihoods as L
from ssla.data import Source
from ssla.predictive import cavities
from support.networks import data, mlp

X, Y = data(40)


def normal(*shape, seed):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def problem(name, n):
    """likelihood, targets for `x`, number of outputs."""
    x = normal(n, 3, seed=3)
    mean, noise = torch.sin(x[:, 0]), normal(n, seed=4)
    law, y, outputs = {
        "bernoulli": (L.Bernoulli(), (mean + 0.5 * noise > 0).double(), 1),
        "poisson": (
            L.Poisson(),
            torch.poisson((0.5 + 0.7 * x[:, 0]).exp(), generator=torch.Generator().manual_seed(5)),
            1,
        ),
        "heteroscedastic": (
            L.HeteroscedasticGaussian(),
            mean + (0.2 + 0.2 * x[:, 1].abs()) * noise,
            2,
        ),
        "student": (L.StudentT(4.0, 0.3), mean + 0.3 * noise, 1),
        "categorical": (
            L.Categorical(),
            (mean + 0.3 * noise > 0).long() + (x[:, 1] > 0.7).long(),
            3,
        ),
        "gaussian": (L.Gaussian(noise=0.3), mean + 0.3 * noise, 1),
        "two numbers": (
            L.Gaussian(noise=torch.tensor([0.3, 0.5])),
            torch.stack([mean, noise], 1),
            2,
        ),
        "angle": (L.custom(_angle, support="circular", outputs=1), 3 + mean + 0.5 * noise, 1),
    }[name]
    if name == "angle":
        y = torch.remainder(y + math.pi, 2 * math.pi) - math.pi
    return law, x, y, outputs


def _angle(y, f):
    return (
        4 * torch.cos(y - 3 - f[..., 0])
        - math.log(2 * math.pi)
        - torch.special.i0e(torch.tensor(4.0)).log().item()
        - 4
    )


def fitted(name, n=40, **options):
    law, x, y, outputs = problem(name, n)
    return ssla.fit(
        mlp(outputs=outputs, width=4),
        (x, y),
        likelihood=law,
        **({"prior": ssla.priors.Gaussian()} | options),
    )


@cache
def brute_force(name, n, gaussian="laplace"):
    """log p(y_i | rest) by a fit without each row."""
    law, x, y, outputs = problem(name, n)
    found = []
    for i in range(n):
        rest = torch.arange(n) != i
        post = ssla.fit(
            mlp(outputs=outputs, width=4),
            (x[rest], y[rest]),
            likelihood=law,
            gaussian=gaussian,
            prior=ssla.priors.Gaussian(),
        )
        found.append(post.predict(x[i : i + 1]).log_prob(y[i : i + 1]))
    return torch.cat(found)


# --- exact ---------------------------------------------------------------------------------


@pytest.mark.parametrize("structure", ["dense", "kfac"])
@pytest.mark.parametrize("name", ["gaussian", "two numbers"])
def test_exact_for_a_linear_model_with_gaussian_noise(name, structure):
    found = fitted(name, structure=structure).loo()
    torch.testing.assert_close(found.log_prob, brute_force(name, 40), atol=1e-8, rtol=0)
    assert not found.refitted.any()
    assert found.nll == pytest.approx(-float(found.log_prob.mean()))


def test_exact_where_a_row_alone_determines_a_weight():
    """Its leverage is almost one."""
    x = torch.cat(
        [torch.ones(6, 1, dtype=torch.float64), torch.zeros(6, 1, dtype=torch.float64)], 1
    )
    x[0, 1] = 1.0
    y = normal(6, seed=1)
    model, prior = (
        torch.nn.Linear(2, 1, bias=False).double().eval(),
        ssla.priors.Gaussian(precision=1e-3),
    )
    law = L.Gaussian(noise=0.5)
    found = ssla.fit(model, (x, y), likelihood=law, prior=prior, mode="polish").loo()
    rest = ssla.fit(model, (x[1:], y[1:]), likelihood=law, prior=prior, mode="polish").predict(
        x[:1]
    )
    assert float(found.log_prob[0]) == pytest.approx(float(rest.log_prob(y[:1])), abs=1e-8)
    assert float(found.pit[0]) == pytest.approx(float(rest.cdf(y[:1])), abs=1e-8)


def test_a_row_without_features_changes_nothing():
    """Its K is zero."""
    x = torch.cat([X, torch.zeros(1, 3, dtype=torch.float64)])
    y = torch.cat([Y, Y[:1]])
    model = torch.nn.Linear(3, 1, bias=False).double().eval()
    post = ssla.fit(model, (x, y), likelihood=L.Gaussian(noise=0.3), prior=ssla.priors.Gaussian())
    assert float(post.loo().log_prob[-1]) == pytest.approx(
        float(post.predict(x[-1:]).log_prob(y[-1:])), abs=1e-12
    )


# --- against fits without each row ----------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "n", "gaussian"),
    [
        ("bernoulli", 40, "variational"),
        ("poisson", 40, "variational"),
        ("heteroscedastic", 60, "variational"),
        ("heteroscedastic", 60, "laplace"),
        ("bernoulli", 40, "laplace"),
    ],
)
def test_log_densities_are_within_a_hundredth_of_fits_without_the_row(name, n, gaussian):
    found, expected = (
        fitted(name, n, gaussian=gaussian).loo(),
        brute_force(name, n, gaussian=gaussian),
    )
    assert float((found.log_prob - expected).abs().mean()) <= 0.01
    assert abs(found.nll + float(expected.mean())) <= 0.01
    if gaussian == "laplace" and found.refitted.any():
        torch.testing.assert_close(
            found.log_prob[found.refitted], expected[found.refitted], atol=1e-6, rtol=0
        )


def test_refits_of_influential_rows_lower_the_error():
    post, expected = (
        fitted("heteroscedastic", 60, gaussian="variational"),
        brute_force("heteroscedastic", 60, gaussian="variational"),
    )
    cavities, refitted = post.loo(refits=0), post.loo()
    assert bool(refitted.refitted.any())
    assert not cavities.refitted.any()
    assert torch.equal(cavities.doubtful, refitted.refitted)
    assert "influential rows that were not refitted" in str(cavities)
    assert "influential rows that were not refitted" not in str(refitted)
    assert (refitted.log_prob - expected).abs().mean() < 0.5 * (
        cavities.log_prob - expected
    ).abs().mean()
    assert torch.equal(
        post.loo(refits=2).refitted.nonzero().flatten(),
        cavities.influence.topk(2).indices.sort().values,
    )


# --- weights --------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["gaussian", "poisson"])
def test_a_row_of_weight_two_is_two_equal_rows(name):
    law, x, y, outputs = problem(name, 30)
    model, twice = mlp(outputs=outputs, width=4), torch.arange(5)
    doubled = ssla.fit(
        model,
        (torch.cat([x, x[twice]]), torch.cat([y, y[twice]])),
        likelihood=law,
        prior=ssla.priors.Gaussian(),
    ).loo()
    weights = torch.ones(30, dtype=torch.float64)
    weights[twice] = 2.0
    found = ssla.fit(model, (x, y, weights), likelihood=law, prior=ssla.priors.Gaussian()).loo()
    torch.testing.assert_close(found.log_prob, doubled.log_prob[:30], atol=1e-8, rtol=0)
    assert torch.equal(found.refitted, doubled.refitted[:30])
    assert found.nll == pytest.approx(doubled.nll, abs=1e-8)
    assert found.coverage(0.9) == pytest.approx(doubled.coverage(0.9))


def test_rows_of_weight_zero_are_predicted_as_held_out_rows_and_count_for_nothing():
    weights = torch.ones(40, dtype=torch.float64)
    weights[::4] = 0.0
    post = ssla.fit(
        mlp(), (X, Y, weights), likelihood=L.Gaussian(noise=0.3), prior=ssla.priors.Gaussian()
    )
    found = post.loo()
    torch.testing.assert_close(found.log_prob[::4], post.predict(X[::4]).log_prob(Y[::4]))
    assert found.nll == pytest.approx(-float(found.log_prob[weights > 0].mean()))


# --- rows without a cavity ------------------------------------------------------------------


@pytest.mark.parametrize("gaussian", ["variational", "laplace"])
def test_rows_without_a_cavity_are_refitted_and_counted(monkeypatch, gaussian):
    post, expected = (
        fitted("bernoulli", gaussian=gaussian),
        brute_force("bernoulli", 40, gaussian=gaussian),
    )
    monkeypatch.setattr(cavities, "LEAST", 0.9)
    found = post.loo()
    assert 0 < int(found.refitted.sum()) < 40
    assert bool(found.influence[found.refitted].isinf().any())
    assert float((found.log_prob - expected)[found.refitted].abs().max()) <= 1e-2
    assert f"refitted        {int(found.refitted.sum())} rows" in str(found)


@pytest.mark.parametrize("options", [{"weights": "all"}, {"mode": "tilt", "gaussian": "laplace"}])
def test_rows_that_cannot_be_refitted_are_nan_with_a_warning(monkeypatch, options):
    post = fitted("bernoulli", **options)
    monkeypatch.setattr(cavities, "LEAST", 0.9)
    with pytest.warns(RuntimeWarning, match=r"no answer for \d+ of 40 rows"):
        found = post.loo()
    assert 0 < int(found.failed.sum()) < 40
    assert not found.refitted.any()
    assert math.isfinite(found.nll)
    assert found.nll == pytest.approx(-float(found.log_prob[~found.failed].mean()))
    assert "no answer" in str(found)


# --- PIT and coverage -----------------------------------------------------------------------


@pytest.mark.parametrize("name", ["gaussian", "heteroscedastic", "student", "angle"])
def test_pit_is_uniform_where_the_model_is_right(name):
    law, x, _, outputs = problem(name, 400)
    model = mlp(outputs=outputs, width=4)
    with torch.no_grad():
        y = (
            law.sample(model(x), 1, torch.Generator().manual_seed(0))[0]
            if name != "angle"
            else problem(name, 400)[2]
        )
    found = ssla.fit(model, (x, y), likelihood=law, prior=ssla.priors.Gaussian()).loo(refits=0)
    pit = found.pit.sort().values
    steps = torch.arange(401, dtype=torch.float64) / 400
    distance = torch.maximum((steps[1:] - pit).abs(), (pit - steps[:-1]).abs()).max()
    assert float(distance) < 1.63 / 20  # Kolmogorov–Smirnov at 1%
    assert found.coverage(0.9) == pytest.approx(0.9, abs=0.05)


@pytest.mark.parametrize(
    "name", ["gaussian", "two numbers", "poisson", "bernoulli", "categorical", "angle"]
)
def test_coverage_counts_the_rows_inside_the_intervals_of_the_cavities(name):
    post, level = fitted(name), 0.8
    found = post.loo(refits=0)
    law, _, y, _ = problem(name, 40)
    (site,) = cavities.collect_sites(post)
    predictive = ssla.predictive.from_marginal(
        law, *cavities.compute_cavity(site, None, post.covariance).marginal
    )
    assert found.coverage(level) == pytest.approx(
        float(ssla.metrics.coverage(predictive, y, level))
    )
    torch.testing.assert_close(found.log_prob, predictive.log_prob(y))
    if found.kind == "class":
        assert found.pit is None
    else:
        assert found.pit.shape == y.shape
        assert bool(((found.pit >= 0) & (found.pit <= 1)).all())


def test_pit_of_a_count_is_the_middle_of_its_step():
    post = fitted("poisson")
    found = post.loo(refits=0)
    torch.testing.assert_close(found.upper - found.lower, found.log_prob.exp(), atol=1e-6, rtol=0)
    torch.testing.assert_close(found.pit, found.lower + found.log_prob.exp() / 2, atol=1e-6, rtol=0)


# --- structures, weights, memory ------------------------------------------------------------


@pytest.mark.parametrize("gaussian", ["variational", "laplace"])
@pytest.mark.parametrize("structure", ["kfac", "diag", "low_rank"])
@pytest.mark.parametrize("name", ["bernoulli", "heteroscedastic", "categorical"])
def test_every_structure_has_an_answer(name, structure, gaussian):
    post, (_, x, y, _) = fitted(name, structure=structure, gaussian=gaussian), problem(name, 40)
    found = post.loo()
    assert bool(found.log_prob.isfinite().all())
    assert found.nll > float(ssla.metrics.nll(post.predict(x), y))


@pytest.mark.parametrize("gaussian", ["variational", "laplace"])
@pytest.mark.parametrize("name", ["gaussian", "poisson", "categorical"])
def test_all_weights_have_an_answer(name, gaussian):
    post = fitted(name, weights="all", gaussian=gaussian, prior=ssla.priors.Gaussian(5.0))
    found, (_, x, y, _) = post.loo(), problem(name, 40)
    assert bool(found.log_prob.isfinite().all())
    assert found.nll > float(ssla.metrics.nll(post.predict(x), y))


def test_chunks_and_little_memory_give_the_same(monkeypatch):
    law, x, y, _ = problem("heteroscedastic", 40)
    whole = fitted("heteroscedastic", gaussian="variational")
    expected = whole.loo(refits=0)
    monkeypatch.setattr(cavities, "ROWS_AT_ONCE", 7)
    small = ssla.fit(
        mlp(outputs=2, width=4),
        (x, y),
        likelihood=law,
        gaussian="variational",
        memory_budget=16_000,
        prior=ssla.priors.Gaussian(),
    )
    assert cavities.collect_sites(small).rows.kept is None
    found = small.loo([(x[:11], y[:11]), (x[11:], y[11:])])
    torch.testing.assert_close(found.log_prob, expected.log_prob, atol=1e-6, rtol=0)
    assert not found.refitted.any()  # the sites do not fit the memory
    assert bool(found.doubtful.any())


def test_single_precision():
    law, x, y, _ = problem("gaussian", 40)
    post = ssla.fit(
        mlp(width=4, dtype=torch.float32),
        (x.float(), y.float()),
        likelihood=law,
        prior=ssla.priors.Gaussian(),
    )
    torch.testing.assert_close(post.loo().log_prob, brute_force("gaussian", 40), atol=1e-4, rtol=0)


# --- scores under another Gaussian ----------------------------------------------------------


def test_the_score_under_another_prior_has_the_sites_of_the_first():
    """For Gaussian noise the sites do not depend on the prior, so this is leave-one-out under
    the other prior.
    """
    post = fitted("gaussian", prior=ssla.priors.Gaussian(0.1))
    other = post.with_prior(ssla.priors.Gaussian(7.0))
    sites = cavities.collect_sites(post)
    found = cavities.score_left_out(sites, other.mean, other.covariance)
    assert found.mean_log_prob == pytest.approx(-other.loo().nll, abs=1e-10)
    assert found.unsound == 0
    assert cavities.score_left_out(
        sites, post.mean, post.covariance
    ).mean_log_prob == pytest.approx(-post.loo().nll, abs=1e-12)


def test_the_score_leaves_out_and_counts_rows_without_a_cavity(monkeypatch):
    post = fitted("bernoulli")
    sites, whole = cavities.collect_sites(post), post.loo()
    monkeypatch.setattr(cavities, "LEAST", 0.9)
    found = cavities.score_left_out(sites, post.mean, post.covariance)
    (site,) = sites
    sound = cavities.compute_cavity(site, None, post.covariance).sound
    assert 0 < found.unsound == int((~sound).sum()) < 40
    assert found.mean_log_prob == pytest.approx(float(whole.log_prob[sound].mean()))


# --- data -----------------------------------------------------------------------------------


def test_a_loaded_posterior_needs_its_data(tmp_path):
    model = mlp()
    post = ssla.fit(model, (X, Y), likelihood=L.Gaussian(noise=0.3), prior=ssla.priors.Gaussian())
    again = ssla.load(post.save(tmp_path / "posterior"), model)
    with pytest.raises(
        ValueError,
        match=r"loo\(\) needs the training data again.*loaded from a file.*posterior.loo\(data=\(X, y\)\)",
    ):
        again.loo()
    assert torch.equal(again.loo((X, Y)).log_prob, post.loo().log_prob)


def test_other_data_and_generators_are_refused():
    post = ssla.fit(mlp(), (X, Y), likelihood=L.Gaussian(noise=0.3), prior=ssla.priors.Gaussian())
    with pytest.raises(
        ValueError, match=r"The data have 39 rows, but the posterior was fitted on 40"
    ):
        post.loo((X[1:], Y[1:]))
    with pytest.raises(ValueError, match=r"not those of the fit.*posterior.loo\(data=…\)"):
        post.loo((X, Y + 3))
    with pytest.raises(ValueError, match="generator, which can be read only once"):
        post.loo(batch for batch in [(X, Y)])
    once = ssla.fit(
        mlp(),
        Source(lambda: iter(()), True, 0).followed_by(ssla.data.open_source((X, Y))),
        likelihood=L.Gaussian(noise=0.3),
        prior=ssla.priors.Gaussian(),
    )
    torch.testing.assert_close(once.loo().log_prob, post.loo().log_prob)


def test_inaccurate_predictives_are_counted():
    """A row whose log variance is not determined without it."""
    post = fitted(
        "heteroscedastic", weights="all", gaussian="variational", prior=ssla.priors.Gaussian(5.0)
    )
    with pytest.warns(UserWarning, match=r"1 of 40 leave-one-out predictives are inaccurate"):
        found = post.loo()
    assert int(found.inaccurate.sum()) == 1


def test_bad_arguments_are_refused():
    post = fitted("gaussian")
    with pytest.raises(ValueError, match="refits must be a whole number from 0"):
        post.loo(refits=-1)
    with pytest.raises(ValueError, match="level must be strictly between 0 and 1"):
        post.loo().coverage(90)
    additive = post.with_prior(ssla.priors.Gaussian(2.0), convention="additive")
    with pytest.raises(ValueError, match=r"loo\(\) works with the exact convention only"):
        additive.loo()


def test_the_text_says_that_it_may_be_optimistic():
    text = str(fitted("poisson").loo())
    assert "40 rows, each predicted from the others" in text
    assert "at 0.9" in text
    assert "its features have seen them" in text
