"""The paper's Algorithm 1 as written: one refit on the point prediction, all y evaluated there.

Oracles: the reference (one task, Newton), SciPy with autograd's Hessians, and ASSLA where θ̃ = θ̂.
"""

import numpy as np
import pytest
import torch
from scipy import optimize

import ssla
from ssla import likelihoods as L
from ssla.refit.weights.at_prediction import RefitAtPrediction, predict_points
from ssla.refit.weights.reference import refit_one
from support.cases import CASES
from support.reference_problems import problem
from support.refits import T, inputs, last_layer, small_network

CLOSE = 1e-8  # in log density, of every increment


def point_of(post, new):
    """ŷ at θ̂ from the network's own answer, by rules that are written out here."""
    f = post.network.linearise(post.network.cast(new), post.theta)[0].double()
    likelihood = post.likelihood.predictive
    kind = likelihood.support_for(f.shape[1]).kind
    mean = likelihood.mean(f)
    if kind == "count":
        return torch.floor(mean + 0.5)
    if kind != "class":
        return mean
    logs = torch.stack([likelihood.log_prob(torch.full((len(f),), c).double(), f) for c in (0, 1)])
    count = likelihood.support_for(f.shape[1]).count
    if count > 2:
        extra = [likelihood.log_prob(torch.full((len(f),), c).double(), f) for c in range(2, count)]
        logs = torch.cat([logs, torch.stack(extra)])
    return logs.argmax(0).double()


def assert_equals_reference(post, new, candidates, kind, close=CLOSE, **options):
    options = {"tolerance": 1e-9, "curvature": kind, "at": "prediction"} | options
    log_density = ssla.WeightRefit(**options)(post, new)
    solved = log_density.solve(candidates.expand(len(new), *candidates.shape))
    assert solved.converged.all()
    assert isinstance(log_density._engine, RefitAtPrediction)
    task = 0
    for i, point in enumerate(point_of(post, new)):
        modes = []
        for y in candidates:
            found = refit_one(post, new[i : i + 1], y, kind, refit_y=point)
            for part in ("likelihood", "prior", "curvature"):
                expected = float(getattr(found, part))
                error = abs(float(getattr(solved, part)[task]) - expected)
                assert error < close + 4 * float(solved.error[task])
            assert bool(solved.fallback[task]) == (found.curvature_kind != kind)
            modes.append(found.theta)
            task += 1
        assert torch.equal(modes[0], modes[-1])
        found_modes = log_density.find_weights_at_modes(
            candidates.expand(len(new), *candidates.shape)
        )[i]
        assert torch.allclose(found_modes, modes[0].expand_as(found_modes), rtol=0, atol=1e-8)
    return solved


@pytest.mark.parametrize("name", CASES)
def test_a_last_layer_equals_the_reference(name):
    assert_equals_reference(*problem(name), "observed", logdet="exact")


@pytest.mark.parametrize("name", ["heteroscedastic", "poisson", "categorical"])
def test_products_equal_the_reference(name):
    assert_equals_reference(*problem(name), "fisher", close=1e-6, logdet="traces")


@pytest.mark.parametrize("kind", ["observed", "hessian"])
@pytest.mark.parametrize("name", ["gaussian", "heteroscedastic", "poisson", "categorical"])
def test_all_weights_equal_the_reference(name, kind):
    assert_equals_reference(*problem(name, weights="all"), kind, logdet="exact")


def test_the_linearised_network_equals_the_last_layer():
    """A last layer opened as any weights and linearised is the same model."""
    post, new, candidates = problem("heteroscedastic")
    linear = ssla.fit(
        post.network.frozen.module,
        next(iter(post.source))[:2],
        likelihood=post.likelihood,
        prior=post.prior,
        gaussian="laplace",
        mode="tilt",
        weights=["2.weight", "2.bias"],
    )
    y = candidates.expand(len(new), -1)
    options = {"at": "prediction", "tolerance": 1e-9}
    expected = ssla.ssla(post, new, y, ssla.WeightRefit(**options)).total
    found = ssla.ssla(linear, new, y, ssla.WeightRefit(linearised=True, **options)).total
    assert (found - expected).abs().max() < 1e-7


def test_with_constant_noise_it_is_assla():
    """The gradient at y = ŷ is zero, so θ̃ = θ̂ (errata, item 2)."""
    post, new, candidates, *_ = last_layer("gaussian")
    y = candidates.expand(len(new), -1)
    found = ssla.ssla(post, new, y, ssla.WeightRefit(at="prediction"))
    expected = ssla.assla(post, new, y)
    for part in ("likelihood", "prior", "curvature"):
        assert (getattr(found, part) - getattr(expected, part)).abs().max() < 1e-10
    assert (found.total - ssla.ssla(post, new, y).total).abs().max() > 1e-2
    p = post.predict(new, refit=ssla.WeightRefit(at="prediction"))
    assert torch.allclose(p.stddev, torch.full_like(p.stddev, 0.5), atol=1e-4)
    assert (p.diagnostics.refits == 1).all()


def by_scipy(log_joint, log_new, theta, point, y):
    """θ̃ of the refit on `point` by SciPy, and the log density of each y there, with autograd's
    Hessians and NumPy's determinants.
    """
    slope = torch.func.grad(log_joint)(theta)

    def objective(t):
        return log_joint(t) + log_new(point)(t) - slope @ (t - theta)

    def minus(function):
        return lambda t: -function(torch.from_numpy(np.array(t))).numpy()

    gradient = torch.func.grad(objective)
    end = optimize.minimize(
        minus(objective),
        theta.numpy(),
        jac=minus(gradient),
        hess=minus(torch.func.jacrev(gradient)),
        method="trust-exact",
        options={"gtol": 1e-9},
    ).x
    mode = torch.from_numpy(end)
    for _ in range(3):
        mode = mode - torch.linalg.solve(torch.func.jacrev(gradient)(mode), gradient(mode))

    def logdet(function, t):
        H = -torch.func.jacrev(torch.func.grad(function))(t)
        sign, value = np.linalg.slogdet(H.numpy())
        assert sign > 0
        return value

    start = logdet(log_joint, theta)
    return [
        float(log_joint(mode) - log_joint(theta) + log_new(v)(mode) - slope @ (mode - theta))
        - 0.5 * (logdet(lambda t, v=v: log_joint(t) + log_new(v)(t), mode) - start)
        for v in y
    ]


@pytest.mark.parametrize("name", ["heteroscedastic", "poisson", "categorical"])
def test_a_last_layer_equals_scipy(name):
    post, new, candidates, log_joint, log_new = last_layer(name)
    found = ssla.ssla(
        post, new, candidates.expand(len(new), -1), ssla.WeightRefit(at="prediction")
    ).total
    for i, point in enumerate(point_of(post, new)):
        expected = by_scipy(log_joint, lambda v, i=i: log_new(i, v), post.theta, point, candidates)
        assert np.abs(found[i].numpy() - expected).max() < (1e-3 if name == "categorical" else 1e-6)


def spread(logs, y):
    """The standard deviation of the normalised density on an equally spaced grid."""
    p = torch.softmax(logs, -1)
    mean = (p * y).sum(-1, keepdim=True)
    return ((p * (y - mean) ** 2).sum(-1)).sqrt()


@pytest.mark.parametrize("build", [last_layer, small_network])
def test_a_log_variance_makes_the_one_refit_too_narrow(build):
    """The score of log σ² at y = ŷ is −½: narrower than the plug-in, which a refit for each y
    widens (errata, item 2).
    """
    post, new, *_ = build("heteroscedastic", n=150)
    y = torch.linspace(-3.5, 3.5, 57, dtype=torch.float64)
    grid = y.expand(len(new), -1)
    options = {"curvature": "observed", "on_failure": "raise"}
    once = ssla.WeightRefit(at="prediction", **options)(post, new)
    each = ssla.ssla(post, new, grid, ssla.WeightRefit(**options)).total
    plug_in = post.predict(new, refit="plug_in").log_prob(grid)
    assert (spread(once(grid).total, y) < 0.99 * spread(plug_in, y)).all()
    assert (spread(each, y) > 1.02 * spread(plug_in, y)).all()
    # the log variance at x: lower at θ̃ than at θ̂
    for i, theta in enumerate(once.find_weights_at_modes(point_of(post, new))):
        before, after = (
            post.network.linearise(post.network.cast(new[i : i + 1]), t)[0][0, 1]
            for t in (post.theta, theta)
        )
        assert after < before - 0.005


def test_all_weights_equal_scipy_with_the_networks_second_derivatives():
    post, new, _, log_joint, log_new, _ = small_network("heteroscedastic", n=150)
    point = point_of(post, new)
    y = point[:, None] + T(-0.1, 0.0, 0.2)
    refit = ssla.WeightRefit(at="prediction", curvature="hessian", tolerance=1e-9)
    solved = refit(post, new).solve(y)
    assert not solved.fallback.any()
    for i in range(len(new)):
        expected = by_scipy(
            log_joint, lambda v, i=i: log_new(i, v), post.theta, point[i], y[i].unbind()
        )
        assert np.abs(solved.total.reshape(2, -1)[i].numpy() - expected).max() < 1e-6


def test_a_predictive_of_each_kind():
    for name in ("heteroscedastic", "poisson", "categorical"):
        post, new, candidates, *_ = last_layer(name)
        refit = ssla.WeightRefit(at="prediction")
        p = post.predict(new, refit=refit)
        y = candidates.expand(len(new), -1)
        if name == "heteroscedastic":
            y = p.icdf(T(0.01, 0.3, 0.5, 0.9))
        if name == "poisson":  # beyond the 99.9% region the correction is constant
            y = p.icdf(T(0.01, 0.3, 0.5, 0.9, 0.99))
        expected = ssla.ssla(post, new, y, refit).total - p.mass.log()[:, None]
        assert (p.log_prob(y) - expected).abs().max() < 1e-4
        assert (p.diagnostics.refits == 1).all()
        assert not (p.diagnostics.inaccurate | p.diagnostics.unconverged).any()


def test_point_predictions():
    assert predict_points(L.Poisson(), T([0.0], [1.25])).tolist() == [1.0, 3.0]
    assert predict_points(L.Bernoulli(), T([0.1], [-0.1])).tolist() == [1.0, 0.0]
    assert predict_points(L.Categorical(), T([0.1, 3.0, -1.0])).tolist() == [1.0]
    assert predict_points(L.HeteroscedasticGaussian(), T([0.4, 3.0])).tolist() == [0.4]
    vector = predict_points(L.Gaussian(noise=T(0.7, 2.0)), T([0.4, 3.0]))
    assert vector.tolist() == [[0.4, 3.0]]


def test_a_failed_refit_is_counted_and_takes_the_output_refit():
    post, new, candidates, *_ = last_layer("heteroscedastic")
    y = candidates.expand(len(new), -1)
    refit = ssla.WeightRefit(at="prediction", max_steps=1)
    with pytest.warns(RuntimeWarning, match="did not converge and use the output rung"):
        found = ssla.ssla(post, new, y, refit)
    assert torch.equal(found.total, post.predict(new).increments(y).total)


def test_data_and_module_stay_and_inputs_repeat():
    """The same input twice has the same answers, and a second call needs no further refit."""
    post, *_ = last_layer("heteroscedastic")
    new = inputs(2, 6).repeat(2, 1)
    log_density = ssla.WeightRefit(at="prediction")(post, new)
    first = log_density(T(0.1, 0.2, 0.1, 0.2))
    assert torch.allclose(first.total[:2], first.total[2:], rtol=0, atol=1e-12)
    known = dict(log_density._engine.ascents)
    log_density(T(0.5, 0.2, 0.1, 0.4))
    assert all(log_density._engine.ascents[row] is known[row] for row in known)
