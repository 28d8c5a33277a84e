"""Refits under the conventions "paper" (prior in the refit, not in the curvature) and "additive"
(eq. (10): likelihood modes, only the prior increment is added).

Oracles: `ExplicitModel` (another implementation, Newton on autograd derivatives of a density that
is written here), SciPy with NumPy's determinants, the reference, and closed forms.
"""

import numpy as np
import pytest
import torch
from scipy import optimize
from torch import nn

import ssla
from ssla import likelihoods as L
from ssla import priors
from ssla.refit.weights.last_layer import LastLayerRefit
from ssla.refit.weights.reference import refit_one
from support.cases import CASES
from support.reference_problems import problem
from support.refits import T, inputs, seeded, small_network

CONVENTIONS = pytest.mark.parametrize("convention", ["paper", "additive"])
CLOSE = 1e-8
ENGINE = {"tolerance": 1e-9, "on_failure": "raise"}


def rounding(post, theta):
    """The error of an increment where a refit ends 2e-9 posterior standard deviations from θ̃ (P,).

    It is as many times the slope of log π there in these units; likelihood and prior increments
    change in opposite directions, and under "additive" only the prior's does.
    """
    slope = post.bound_prior.gradient(theta)
    return 2e-9 * float(slope @ post.operator.solve(slope)) ** 0.5


def assert_equals_reference(post, new, candidates, kind, **options):
    log_density = ssla.WeightRefit(curvature=kind, **(ENGINE | options))(post, new)
    y = candidates.expand(len(new), *candidates.shape)
    solved = log_density.solve(y)
    assert solved.converged.all()
    modes = log_density.find_weights_at_modes(y).flatten(0, 1)
    task = 0
    for i in range(len(new)):
        for value in candidates:
            found = refit_one(post, new[i : i + 1], value, kind)
            close = CLOSE + rounding(post, found.theta)
            for part in ("likelihood", "prior", "curvature"):
                error = abs(float(getattr(solved, part)[task]) - float(getattr(found, part)))
                assert error < close
            # both end within 1e-9 posterior standard deviations, which may be far without a prior
            atol = 1e-8 * max(1.0, float(post.operator.variances().max()) ** 0.5)
            assert torch.allclose(modes[task], found.theta, rtol=0, atol=atol)
            assert bool(solved.fallback[task]) == (found.curvature_kind != kind)
            task += 1
    return log_density


# `problem` has a tilt; the last layer of softmax has no curvature of its own along (1, …, 1).
SINGULAR = {"categorical", "hot categorical"}


@CONVENTIONS
@pytest.mark.parametrize("kind", ["observed", "fisher"])
@pytest.mark.parametrize("name", sorted(set(CASES) - SINGULAR))
def test_a_last_layer_equals_the_reference(name, kind, convention):
    post, new, candidates = problem(name)
    changed = post.with_prior(priors.Gaussian(0.7, mean=0.2), convention)
    log_density = assert_equals_reference(changed, new, candidates, kind)
    assert isinstance(log_density._engine, LastLayerRefit)


@CONVENTIONS
@pytest.mark.parametrize("name", sorted(SINGULAR))
def test_a_softmax_has_no_curvature_without_a_prior(name, convention):
    post, *_ = problem(name)
    with pytest.raises(ValueError, match="data alone do not determine every parameter"):
        post.with_prior(post.prior, convention)


@CONVENTIONS
@pytest.mark.parametrize("kind", ["observed", "fisher", "hessian"])
@pytest.mark.parametrize("name", ["gaussian", "heteroscedastic", "poisson", "bernoulli"])
def test_all_weights_equal_the_reference(name, kind, convention):
    post, new, candidates = problem(name, weights="all", n=200)
    changed = post.with_prior(priors.Gaussian(0.4, mean=0.1), convention)
    assert_equals_reference(changed, new, candidates, kind)


@CONVENTIONS
@pytest.mark.parametrize("weights", ["last_layer", "all"])
def test_a_prior_whose_curvature_changes_and_row_weights(weights, convention):
    rows = 0.5 + torch.rand(80, dtype=torch.float64, generator=seeded(8))
    post, new, candidates = problem("heteroscedastic", weights, row_weights=rows)
    changed = post.with_prior(priors.StudentT(df=5.0, scale=1.5), convention)
    assert_equals_reference(changed, new[:1], candidates, "observed")


@CONVENTIONS
@pytest.mark.filterwarnings("ignore:The network is not at the mode")
@pytest.mark.parametrize("weights", ["last_layer", "all"])
def test_without_a_tilt(weights, convention):
    post, new, candidates = problem("poisson", weights, mode="as_is", n=300)
    changed = post.with_prior(priors.Gaussian(0.7), convention)
    assert changed.mode == "as_is"
    assert_equals_reference(changed, new[:1], candidates, "observed")


# --- models of a few parameters, written by hand --------------------------------------------


def by_hand(name):
    """log p(row | θ) of rows (x, y), with θ as the last layer of nn.Linear has it."""

    def gaussian(row, t):
        return -0.5 * np.log(2 * np.pi * 0.25) - 2 * (row[1] - t[0] * row[0] - t[1]) ** 2

    def poisson(row, t):
        f = t[0] * row[0] + t[1]
        return row[1] * f - f.exp() - torch.lgamma(row[1] + 1)

    def bernoulli(row, t):
        return torch.nn.functional.logsigmoid((2 * row[1] - 1) * (t[0] * row[0] + t[1]))

    def heteroscedastic(row, t):
        # weight (2, 1), bias (2,): the mean has t[0], t[1]; log σ² has t[2], t[3]
        mean, s = t[0] * row[0] + t[1], t[2] * row[0] + t[3]
        return -0.5 * (np.log(2 * np.pi) + s + (row[1] - mean) ** 2 * torch.exp(-s))

    return {
        "gaussian": (L.Gaussian(noise=0.5), gaussian, 1, T(-1.0, 0.4, 3.0)),
        "poisson": (L.Poisson(), poisson, 1, T(0.0, 2.0, 7.0)),
        "bernoulli": (L.Bernoulli(), bernoulli, 1, T(0.0, 1.0)),
        "heteroscedastic": (L.HeteroscedasticGaussian(), heteroscedastic, 2, T(-1.0, 0.4, 2.0)),
    }[name]


def linear_model(name, prior, convention):
    """A linear model at its mode under a convention, the same as an ExplicitModel, and the y."""
    likelihood, log_prob, outputs, candidates = by_hand(name)
    x = inputs(60, 1, 1)
    model = nn.Linear(1, outputs).double()
    with torch.no_grad():
        model.weight.copy_(T([0.8], [0.3])[:outputs])
        model.bias.copy_(T(0.2, -0.6)[:outputs])
        y = likelihood.sample(model(x), 1, seeded(3))[0].double()
    post = ssla.fit(model, (x, y), likelihood=likelihood, prior=prior, gaussian="laplace")
    post = post.with_prior(prior, convention, data=(x, y))
    explicit = ssla.ExplicitModel(
        log_prob, torch.cat([x, y[:, None]], 1), torch.zeros(2 * outputs), prior, convention
    )
    return post, explicit, candidates


PRIORS = {
    "gaussian": priors.Gaussian(2.0, mean=0.4),
    "conflict": priors.Gaussian(80.0, mean=-1.5),
    "student": priors.StudentT(df=4.0, scale=0.6),
}


@CONVENTIONS
@pytest.mark.filterwarnings("ignore:polish moved", "ignore:The network is not at the mode")
@pytest.mark.parametrize("prior", PRIORS)
@pytest.mark.parametrize("name", ["gaussian", "poisson", "bernoulli", "heteroscedastic"])
def test_it_equals_the_model_written_by_hand(name, prior, convention):
    post, explicit, candidates = linear_model(name, PRIORS[prior], convention)
    if (name, prior, convention) == ("heteroscedastic", "conflict", "paper"):
        # θ̂ is so far from the data that their observed curvature is not positive definite: no
        # determinant by hand, and the Fisher information of every row here, which is counted.
        with pytest.raises(ValueError, match="curvature at the mode is not positive definite"):
            explicit.increments(torch.zeros(1, 2))
        solved = ssla.WeightRefit(**ENGINE)(post, T([0.3])).solve(candidates[None])
        assert solved.fallback.all()
        fisher = refit_one(post, T([0.3]), candidates[1], "fisher")
        assert float(solved.curvature[1]) == pytest.approx(float(fisher.curvature), abs=1e-7)
        return
    theta = torch.cat([post.parameters["weight"], post.parameters["bias"][:, None]], 1).flatten()
    assert torch.allclose(theta, explicit.mode, rtol=0, atol=1e-6)
    new = T([0.3], [-1.4])
    found = ssla.ssla(post, new, candidates.expand(2, -1), ssla.WeightRefit(**ENGINE))
    assert found.convention == convention
    for i in range(2):
        rows = torch.stack([new[i].expand(len(candidates)), candidates], 1)
        expected = explicit.increments(rows)
        for part in ("likelihood", "prior", "curvature"):
            error = (getattr(found, part)[i] - getattr(expected, part)).abs().max()
            # θ̂ ends this near its mode, and the prior increment is of first order in it
            assert error < CLOSE + 50 * post.report.residual_after + rounding(post, theta)


@CONVENTIONS
@pytest.mark.parametrize("name", ["poisson", "heteroscedastic"])
def test_assla_equals_the_model_written_by_hand(name, convention):
    post, explicit, candidates = linear_model(name, PRIORS["gaussian"], convention)
    new = T([0.3], [-1.4])
    refit = ssla.NoRefit(data_curvature="observed")
    found = ssla.assla(post, new, candidates.expand(2, -1), refit)
    assert found.convention == convention
    for i in range(2):
        rows = torch.stack([new[i].expand(len(candidates)), candidates], 1)
        expected = explicit.increments(rows, refit=False)
        usable = ~expected.curvature.isnan()
        assert usable.sum() >= 2
        assert (found.total[i] - expected.total)[usable].abs().max() < 1e-7


def test_the_prior_increment_alone_differs_between_priors():
    """Additive: one θ̂ and one θ̃ for every prior, so other increments do not change."""
    parts = []
    for prior in PRIORS.values():
        post, _, candidates = linear_model("poisson", prior, "additive")
        parts.append(ssla.ssla(post, T([0.3]), candidates[None], ssla.WeightRefit(**ENGINE)))
    for other in parts[1:]:
        assert (other.likelihood - parts[0].likelihood).abs().max() < 1e-6
        assert (other.curvature - parts[0].curvature).abs().max() < 1e-6
        assert (other.prior - parts[0].prior).abs().max() > 1e-3


# --- a small network with all its weights, by SciPy ---------------------------------------------


def by_scipy(log_likelihood, log_prior, log_new, theta, convention):
    """The three increments by SciPy's mode and autograd's Hessians, with the tilt at θ̂."""
    with_prior = float(convention == "paper")

    def log_objective(t):
        return log_likelihood(t) + with_prior * log_prior(t)

    slope = torch.func.grad(log_objective)(theta)

    def objective(t):
        return log_objective(t) + log_new(t) - slope @ (t - theta)

    gradient = torch.func.grad(objective)
    hessian = torch.func.jacrev(gradient)
    end = optimize.minimize(
        lambda t: -float(objective(torch.from_numpy(t))),
        theta.numpy(),
        jac=lambda t: -gradient(torch.from_numpy(t)).numpy(),
        hess=lambda t: -hessian(torch.from_numpy(t)).numpy(),
        method="trust-exact",
        options={"gtol": 1e-9},
    ).x
    mode = torch.from_numpy(end)
    for _ in range(3):
        mode = mode - torch.linalg.solve(hessian(mode), gradient(mode))

    def logdet(function, t):
        sign, value = np.linalg.slogdet(-torch.func.jacrev(torch.func.grad(function))(t).numpy())
        assert sign > 0
        return value

    change = log_likelihood(mode) - log_likelihood(theta) - slope @ (mode - theta)
    after = logdet(lambda t: log_likelihood(t) + log_new(t), mode)
    return (
        float(change + log_new(mode)),
        float(log_prior(mode) - log_prior(theta)),
        -0.5 * (after - logdet(log_likelihood, theta)),
    )


# The likelihood of the network for counts has no mode near the trained weights without a prior.
@pytest.mark.parametrize(
    ("name", "convention"), [("gaussian", "paper"), ("gaussian", "additive"), ("poisson", "paper")]
)
def test_all_weights_equal_scipy(name, convention):
    post, new, _, log_joint, log_new, _ = small_network(name, n=300)
    changed = post.with_prior(post.prior, convention)
    y = T([1.0, 2.0], [0.0, 1.0])
    if name == "gaussian":
        y = post.predict(new).icdf(T(0.4, 0.7))
    refit = ssla.WeightRefit(curvature="hessian", **ENGINE)
    found = ssla.ssla(changed, new, y, refit)
    for i in range(2):
        for j in range(2):
            expected = by_scipy(
                lambda t: log_joint(t) + 0.15 * (t**2).sum(),
                lambda t: -0.15 * (t**2).sum(),
                log_new(i, y[i, j]),
                post.theta,
                convention,
            )
            for part, value in zip(("likelihood", "prior", "curvature"), expected, strict=True):
                assert float(getattr(found, part)[i, j]) == pytest.approx(value, abs=1e-6)


# --- options and predictives --------------------------------------------------------------------


@CONVENTIONS
def test_determinants_of_the_structure_and_of_the_new_row_alone(convention):
    post, new, candidates = problem("heteroscedastic")
    changed = post.with_prior(priors.Gaussian(0.7), convention)
    y = candidates.expand(len(new), -1)
    options = ENGINE | {"curvature": "fisher"}
    exact = ssla.ssla(changed, new, y, ssla.WeightRefit(**options))
    dense = ssla.ssla(changed, new, y, ssla.WeightRefit(logdet="structure", **options))
    assert (exact.curvature - dense.curvature).abs().max() < 1e-8
    frozen = ssla.WeightRefit(logdet="frozen", **options)(changed, new)
    modes = frozen.find_weights_at_modes(y)
    S = changed.data_operator
    for i in range(len(new)):
        f, J = next(iter(changed.linearised(new[i : i + 1])))
        K = S.covariance(J.double())[0]
        for j in range(len(candidates)):
            f_new = f + J.double().push(modes[i, j] - changed.theta)
            Lambda = changed.likelihood.fisher(f_new)[0]
            expected = -0.5 * torch.linalg.slogdet(torch.eye(2, dtype=K.dtype) + Lambda @ K)[1]
            assert float(frozen(y).curvature[i, j]) == pytest.approx(float(expected), abs=1e-9)


@CONVENTIONS
def test_all_weights_by_structure(convention):
    post, new, candidates = problem("poisson", weights="all", n=200)
    changed = post.with_prior(post.prior, convention)
    y = candidates.expand(len(new), -1)
    options = ENGINE | {"curvature": "fisher"}
    exact = ssla.ssla(changed, new, y, ssla.WeightRefit(logdet="exact", **options))
    dense = ssla.ssla(changed, new, y, ssla.WeightRefit(logdet="structure", **options))
    assert (exact.curvature - dense.curvature).abs().max() < 1e-8


@CONVENTIONS
def test_one_refit_on_the_prediction(convention):
    post, new, candidates = problem("heteroscedastic")
    changed = post.with_prior(priors.Gaussian(0.7), convention)
    refit = ssla.WeightRefit(at="prediction", **ENGINE)
    found = ssla.ssla(changed, new, candidates.expand(2, -1), refit)
    point = changed.network.linearise(new, changed.theta)[0][:, 0]
    for i in range(2):
        for j, y in enumerate(candidates):
            expected = refit_one(changed, new[i : i + 1], y, refit_y=point[i])
            assert float(found.curvature[i, j]) == pytest.approx(
                float(expected.curvature), abs=CLOSE
            )
            assert float(found.prior[i, j]) == pytest.approx(float(expected.prior), abs=CLOSE)


@CONVENTIONS
def test_gaussian_noise_has_the_closed_form_of_the_output_refit(convention):
    post, explicit, candidates = linear_model("gaussian", PRIORS["gaussian"], convention)
    new = T([0.3], [-1.4])
    output, weights = post.predict(new), post.predict(new, refit="weights")
    y = candidates.expand(2, -1)
    assert torch.allclose(weights.log_prob(y), output.log_prob(y), rtol=0, atol=1e-10)
    assert torch.allclose(weights.mass, output.mass, rtol=1e-8)
    assert weights.diagnostics.convention == convention
    found = weights.increments(y)
    assert found.convention == convention
    for i in range(2):
        rows = torch.stack([new[i].expand(len(candidates)), candidates], 1)
        total = explicit.increments(rows).total
        assert (found.total[i] - total).abs().max() < 1e-7
        normalised = weights.log_prob(y)[i] + weights.mass[i].log()
        assert (normalised - total).abs().max() < 1e-7


@CONVENTIONS
@pytest.mark.parametrize("name", ["poisson", "bernoulli", "heteroscedastic"])
def test_a_predictive_of_each_kind(name, convention):
    post, _, candidates = linear_model(name, PRIORS["gaussian"], convention)
    new = T([0.3], [-1.4])
    p = post.predict(new, refit="weights")
    assert p.diagnostics.convention == convention
    assert set(p.diagnostics.rung) == {"weights"}
    # inside the 99.9% region, beyond which the correction of the output refit is constant
    y = candidates.expand(2, -1) if name == "bernoulli" else p.icdf(T(0.01, 0.3, 0.6, 0.99))
    expected = ssla.ssla(post, new, y).total - p.mass.log()[:, None]
    assert (p.log_prob(y) - expected).abs().max() < 1e-4


EXACT_ONLY = {
    "a large last layer": (
        lambda: linear_model("poisson", priors.Gaussian(), "paper")[0],
        ssla.WeightRefit(logdet="traces"),
        "logdet='traces'.*works with the exact convention only. Use logdet='exact'",
    ),
    "a linearised network": (
        lambda: changed_network(),
        ssla.WeightRefit(linearised=True),
        "Refits of the linearised network work with the exact convention only",
    ),
    "frozen determinants": (
        lambda: changed_network(),
        ssla.WeightRefit(logdet="frozen"),
        "logdet='frozen' of all weights works with the exact convention only. Use logdet='str",
    ),
    "many weights": (
        lambda: changed_network(hidden=180),
        ssla.WeightRefit(),
        "More than 500 weights have their determinants with the exact convention only",
    ),
}


def changed_network(hidden=2):
    """All weights of a network under the paper's convention."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(1, hidden), nn.Tanh(), nn.Linear(hidden, 1)).double()
    x = inputs(60, 1, 1)
    post = ssla.fit(
        model,
        (x, torch.sin(x[:, 0])),
        likelihood=L.Gaussian(noise=0.3),
        prior=priors.Gaussian(),
        weights="all",
        structure="diag",
        mode="tilt",
    )
    return post.with_prior(priors.Gaussian(2.0), "paper")


@pytest.mark.parametrize("case", EXACT_ONLY)
def test_what_needs_the_prior_in_the_curvature_is_refused(case):
    make, refit, message = EXACT_ONLY[case]
    post = make()
    with pytest.raises(ValueError, match=message):
        ssla.ssla(post, T([0.3]), T(0.4), refit)


def test_a_refit_that_fails_is_not_linearised():
    """The automatic choice takes the output refit under these conventions, and says why."""
    post, new, *_ = small_network("gaussian")
    changed = post.with_prior(post.prior, "paper")
    refit = ssla.WeightRefit(max_steps=1)
    with pytest.warns(RuntimeWarning, match="exact convention only"):
        found = ssla.ssla(changed, new, T(0.1, 0.2), refit)
    assert torch.equal(found.total, changed.predict(new).increments(T(0.1, 0.2)).total)


def test_auto_is_refused():
    post, *_ = linear_model("poisson", priors.Gaussian(), "paper")
    with pytest.raises(ValueError, match="refit='auto' works with the exact convention only"):
        post.predict(T([0.3]), refit="auto")
