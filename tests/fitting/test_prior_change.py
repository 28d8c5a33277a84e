"""Another prior for the same data: equal to a fresh fit, by every convention, against algebra
done by hand.
"""

import copy
import math
import warnings

import numpy as np
import pytest
import torch
from scipy import optimize, stats
from torch import nn

import ssla
from ssla import likelihoods as L
from ssla import priors
from ssla.refit.prior_response import compute_data_covariance
from support.oracles import Constant
from support.published import EXACT_OFF, OFF, SELF, VARIANCES

GENERATOR = torch.Generator().manual_seed(5)
X = torch.randn(60, 3, dtype=torch.float64, generator=GENERATOR)
NEW = torch.randn(5, 3, dtype=torch.float64, generator=GENERATOR)
W = torch.tensor([[1.0, -0.5], [0.3, 0.8], [0.0, 1.2]], dtype=torch.float64)
Y = X @ W + 0.4 * torch.randn(60, 2, dtype=torch.float64, generator=GENERATOR)
COUNTS = torch.poisson(torch.exp(0.5 + 0.4 * X[:, 0]), generator=GENERATOR)
OLD = priors.Gaussian(precision=1.0)
PRIORS = {
    "weaker": priors.Gaussian(1e-3),
    "stronger, moved": priors.Gaussian(precision=30.0, mean=0.5),
    "by parameter": priors.Gaussian(
        precision={"2.weight": 3.0, "2.bias": 0.1}, mean={"2.weight": 0.2, "2.bias": -1.0}
    ),
    "flat": priors.Flat(),
    "laplace": priors.Laplace(0.3),
    "student": priors.StudentT(3.0, 0.2),
    "correlated": priors.custom(lambda t: -0.5 * (t**2).sum() - 2 * t.sum() ** 2),
}


def net(outputs=1, seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, outputs)).double().eval()


def fit(model, y, prior=OLD, **options):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        mode = "polish" if options.get("weights", "last_layer") == "last_layer" else None
        return ssla.fit(model, (X, y), prior=prior, gaussian="laplace", **{"mode": mode} | options)


def at(posterior, model):
    """The module with the posterior's θ̂ in its weights."""
    own = copy.deepcopy(model)
    with torch.no_grad():
        for name, value in posterior.parameters.items():
            dict(own.named_parameters())[name].copy_(value)
    return own


def assert_same(a, b, x=NEW, tolerance=1e-8):
    assert (a.theta - b.theta).abs().max() < tolerance
    for one, other in zip(a.marginal(x), b.marginal(x), strict=True):
        assert (one - other).abs().max() < tolerance
    assert abs(a.log_evidence() - b.log_evidence()) < tolerance * (1 + abs(b.log_evidence()))


@pytest.mark.parametrize("structure", ["dense", "kfac"])
@pytest.mark.parametrize("outputs", [1, 2])
@pytest.mark.parametrize("name", PRIORS)
def test_a_gaussian_last_layer_moves_to_the_mode_of_a_fresh_fit(name, outputs, structure):
    if structure == "kfac" and name not in ("weaker", "stronger, moved", "flat"):
        pytest.skip("kfac takes one precision for each layer")
    y = Y[:, 0] if outputs == 1 else Y
    noise = L.Gaussian(noise=0.4) if outputs == 1 else L.Gaussian(noise=torch.tensor([0.4, 0.6]))
    moved = fit(net(outputs), y, likelihood=noise, prior=OLD, structure=structure).with_prior(
        PRIORS[name]
    )
    fresh = fit(net(outputs), y, likelihood=noise, prior=PRIORS[name], structure=structure)
    assert_same(moved, fresh)
    assert moved.report.residual_after < 1e-8
    assert "moved to its mode from the sums" in str(moved.report)


def test_priors_can_be_plugged_in_and_out():
    first = fit(net(), Y[:, 0], likelihood=L.Gaussian(noise=0.4), prior=OLD)
    back = first.with_prior(PRIORS["student"]).with_prior(PRIORS["stronger, moved"]).with_prior(OLD)
    assert_same(back, first, tolerance=1e-10)


def test_an_estimated_noise_is_kept():
    estimated = fit(net(), Y[:, 0], likelihood=L.Gaussian(noise="estimate"), prior=OLD)
    moved = estimated.with_prior(priors.Gaussian(20.0))
    assert moved.likelihood is estimated.likelihood
    fresh = fit(
        net(),
        Y[:, 0],
        likelihood=L.Gaussian(noise=estimated.likelihood.noise),
        prior=priors.Gaussian(20.0),
    )
    assert_same(moved, fresh)
    assert "noise was kept" in str(moved.report)


@pytest.mark.parametrize("prior", [priors.Gaussian(7.0, 0.1), priors.Flat()])
@pytest.mark.parametrize("structure", ["dense", "diag", "kfac"])
@pytest.mark.parametrize("weights", ["last_layer", "all"])
def test_other_likelihoods_keep_their_place_and_say_so(structure, weights, prior):
    """Equal to a fresh fit of the network at that θ̂ with mode="as_is"."""
    if isinstance(prior, priors.Flat) and weights == "all" and structure != "diag":
        pytest.skip("60 rows do not determine all weights without a prior")
    model = net()
    first = fit(
        model, COUNTS, likelihood=L.Poisson(), prior=OLD, structure=structure, weights=weights
    )
    moved = first.with_prior(prior)
    fresh = fit(
        at(first, model),
        COUNTS,
        likelihood=L.Poisson(),
        prior=prior,
        structure=structure,
        weights=weights,
        mode="as_is",
    )
    assert_same(moved, fresh)
    assert torch.equal(moved.theta, first.theta)
    assert (
        abs(moved.report.residual_after - fresh.report.residual)
        < 1e-6 * (1 + fresh.report.residual)
        or structure != "dense"
    )
    assert "θ̂ was kept" in str(moved.report)
    assert moved.report.mode == ("as_is" if weights == "last_layer" else "tilt")


@pytest.mark.parametrize("structure", ["dense", "diag", "kfac"])
def test_given_the_data_it_is_polished_again(structure):
    prior = priors.Gaussian(7.0, 0.1)
    options = {"likelihood": L.Poisson(), "structure": structure}
    again = fit(net(), COUNTS, prior=OLD, **options).with_prior(prior, data=(X, COUNTS))
    assert_same(again, fit(net(), COUNTS, prior=prior, **options))
    assert "polished again on the data" in str(again.report)
    assert again.report.passes > 1


@pytest.mark.parametrize("prior", ["laplace", "student"])
def test_fits_reach_the_mode_under_any_prior(prior):
    """The gradient of the whole log posterior vanishes, by autograd through the network itself;
    noise estimated too.
    """
    model = net()
    for likelihood, y in [
        (L.Gaussian(noise=0.4), Y[:, 0]),
        (L.Gaussian(noise="estimate"), Y[:, 0]),
        (L.Poisson(), COUNTS),
    ]:
        post = fit(model, y, likelihood=likelihood, prior=PRIORS[prior])
        own = at(post, model)
        log_posterior = post.likelihood.log_prob(y, own(X)).sum() + post.bound_prior.log_prob(
            _theta(own, post)
        )
        gradients = torch.autograd.grad(log_posterior, [own[2].weight, own[2].bias])
        assert max(float(g.abs().max()) for g in gradients) < 1e-6


def _theta(model, post):
    """θ as a differentiable function of the module's parameters."""
    theta = torch.zeros(post.theta.numel(), dtype=torch.float64)
    for name, index in post.network.layout.positions.items():
        theta = theta.index_put((index.flatten(),), dict(model.named_parameters())[name].flatten())
    return theta


# --- conventions --------------------------------------------------------------------------

A, B = X.numpy(), Y[:, 0].numpy()
X_NEW = NEW.numpy()
SIGMA2, TAU, MEAN = 0.16, 3.0, 0.7


def ridge(A, b, tau, mean=0.0):
    return np.linalg.solve(A.T @ A / SIGMA2 + tau * np.eye(3), A.T @ b / SIGMA2 + tau * mean)


def by_hand(convention, x, y):
    """Equation (1) in NumPy: two modes, two determinants, two sums."""
    tau = 0.0 if convention == "additive" else TAU
    in_curvature = TAU if convention == "exact" else 0.0
    more, target = np.vstack([A, x]), np.append(B, y)
    hat, tilde = ridge(A, B, tau, MEAN), ridge(more, target, tau, MEAN)
    log_lik = stats.norm(more @ tilde, math.sqrt(SIGMA2)).logpdf(target).sum()
    log_lik -= stats.norm(A @ hat, math.sqrt(SIGMA2)).logpdf(B).sum()
    log_prior = stats.norm(MEAN, 1 / math.sqrt(TAU)).logpdf
    prior = log_prior(tilde).sum() - log_prior(hat).sum()
    logdet = [np.linalg.slogdet(M.T @ M / SIGMA2 + in_curvature * np.eye(3))[1] for M in (more, A)]
    return log_lik, prior, -0.5 * (logdet[0] - logdet[1])


def line(convention, likelihood=None, y=None, prior=None):
    model = nn.Linear(3, 1, bias=False, dtype=torch.float64)
    post = fit(
        model,
        Y[:, 0] if y is None else y,
        likelihood=likelihood or L.Gaussian(noise=math.sqrt(SIGMA2)),
        prior=OLD,
    )
    return post.with_prior(prior or priors.Gaussian(TAU, MEAN), convention)


@pytest.mark.parametrize("refit", ["newton", "output"])
@pytest.mark.parametrize("convention", ["exact", "paper", "additive"])
def test_each_convention_is_equation_1_by_hand(convention, refit):
    p = line(convention).predict(NEW, refit=refit)
    y = torch.tensor([-3.0, 0.2, 2.0, 5.0], dtype=torch.float64).expand(5, -1)
    parts = p.increments(y)
    for i in range(5):
        for j in range(4):
            likelihood, prior, curvature = by_hand(convention, X_NEW[i : i + 1], float(y[i, j]))
            assert abs(float(parts.likelihood[i, j]) - likelihood) < 1e-9
            assert abs(float(parts.prior[i, j]) - prior) < 1e-9
            assert abs(float(parts.curvature[i, j]) - curvature) < 1e-9
    # log_prob is the same function normalised, and mass is what it integrates to
    assert (p.log_prob(y) - (parts.total - p.mass.log()[:, None])).abs().max() < 1e-9
    grid = torch.linspace(-12, 12, 4001, dtype=torch.float64)
    assert (
        torch.trapezoid(p.increments(grid.expand(5, -1)).total.exp(), grid) - p.mass
    ).abs().max() < 1e-9
    assert (p.variance - p.epistemic - p.aleatoric).abs().max() < 1e-12
    assert (p.epistemic > 0).all()


@pytest.mark.parametrize("convention", ["paper", "additive"])
@pytest.mark.parametrize("refit", ["none", "plug_in"])
def test_without_a_refit_the_prior_does_not_enter(convention, refit):
    post = line(convention)
    p = post.predict(NEW, refit=refit)
    assert not p.increments(torch.zeros(5)).prior.any()
    K = compute_data_covariance(post, NEW)[:, 0, 0]
    expected = torch.sqrt(SIGMA2 / (SIGMA2 + K)) if refit == "none" else torch.ones(5)
    assert (p.mass - expected).abs().max() < 1e-12


@pytest.mark.parametrize("convention", ["paper", "additive"])
def test_vectors_have_their_mass_too(convention):
    model = nn.Linear(3, 2, bias=False, dtype=torch.float64)
    p = (
        fit(model, Y, likelihood=L.Gaussian(noise=0.4))
        .with_prior(priors.Gaussian(TAU, MEAN), convention)
        .predict(NEW)
    )
    y = torch.randn(5, 7, 2, dtype=torch.float64, generator=GENERATOR)
    assert (p.log_prob(y) - p.increments(y).total + p.mass.log()[:, None]).abs().max() < 1e-10
    singles = [line_of(column, convention).predict(NEW) for column in (Y[:, 0], Y[:, 1])]
    assert (p.mean - torch.stack([s.mean for s in singles], 1)).abs().max() < 1e-10
    assert (p.mass - singles[0].mass * singles[1].mass).abs().max() < 1e-10


def line_of(y, convention):
    model = nn.Linear(3, 1, bias=False, dtype=torch.float64)
    return fit(model, y, likelihood=L.Gaussian(noise=0.4)).with_prior(
        priors.Gaussian(TAU, MEAN), convention
    )


@pytest.mark.parametrize("convention", ["exact", "paper", "additive"])
def test_counts_by_every_convention_against_a_scalar_search(convention):
    """Poisson, one output: f̃ by a bounded search, prior and determinant by hand from S and T."""
    post = line(convention, L.Poisson(), COUNTS)
    p = post.predict(NEW)
    S = post.statistics.curvature.matrix.numpy()
    theta = post.theta.numpy()
    H = S if convention == "additive" else S + TAU * np.eye(3)
    D = S + TAU * np.eye(3) if convention == "exact" else S
    log_prior = lambda t: stats.norm(MEAN, 1 / math.sqrt(TAU)).logpdf(t).sum()
    for i in range(3):
        j = X_NEW[i]
        f, K, Kd = (
            float(j @ theta),
            float(j @ np.linalg.solve(H, j)),
            float(j @ np.linalg.solve(D, j)),
        )
        for y in (0, 2, 6):
            objective = lambda t, y=y, f=f, K=K: (
                -(stats.poisson(math.exp(t)).logpmf(y) - 0.5 * (t - f) ** 2 / K)
            )
            found = optimize.minimize_scalar(
                objective, bounds=(f - 3, f + 3), method="bounded", options={"xatol": 1e-12}
            )
            tilde = float(found.x)
            step = np.linalg.solve(H, j) * (tilde - f) / K
            gain = log_prior(theta + step) - log_prior(theta)
            total = (
                -found.fun
                - 0.5 * math.log1p(math.exp(tilde) * Kd)
                + (gain if convention == "additive" else 0.0)
            )
            parts = p.increments(torch.full((5,), float(y)))
            assert abs(float(parts.total[i]) - total) < 1e-7
            assert abs(float(parts.prior[i]) - gain) < 1e-6
    total = torch.stack([p.log_prob(torch.full((5,), float(k))).exp() for k in range(200)]).sum(0)
    assert (total - 1).abs().max() < 1e-6


def test_heteroscedastic_predictives_normalise_under_every_convention():
    model = nn.Linear(3, 2, dtype=torch.float64)
    post = fit(model, Y[:, 0], likelihood=L.HeteroscedasticGaussian())
    y = torch.linspace(-40, 40, 20_001, dtype=torch.float64)
    for convention in ("exact", "paper", "additive"):
        p = post.with_prior(priors.Gaussian(2.0, 0.1), convention, data=(X, Y[:, 0])).predict(NEW)
        assert (torch.trapezoid(p.log_prob(y.expand(5, -1)).exp(), y) - 1).abs().max() < 1e-5
        assert p.diagnostics.convention == convention


@pytest.mark.parametrize("convention", ["exact", "paper", "additive"])
def test_the_convention_is_named_in_every_result(convention):
    post = line(convention)
    p = post.predict(NEW)
    assert post.report.convention == post.convention == p.diagnostics.convention == convention
    assert p.increments(torch.zeros(5)).convention == convention
    assert f"(convention: {convention})" in str(post.report)
    assert f"prior {convention}" in str(p.diagnostics)
    classes = fit(
        nn.Linear(3, 1).double(), (Y[:, 0] > 0).long(), likelihood=L.Bernoulli(), prior=OLD
    )
    assert classes.with_prior(OLD, convention).predict(NEW).diagnostics.convention == convention


# --- the paper's tables -------------------------------------------------------------------


def modularity_table(convention, offset):
    """SSLA without its constant −½ log 2πσ², at ŷ + offset, for each prior variance: h =
    x*²/Σx² = 0.05315, σ = 0.5.
    """
    x = torch.linspace(-1, 1, 50, dtype=torch.float64)
    x = x * math.sqrt(1.5**2 / 0.05315 / float((x**2).sum()))
    y = 0.8 * x + 0.5 * torch.randn(
        50, dtype=torch.float64, generator=torch.Generator().manual_seed(0)
    )
    post = ssla.fit(
        nn.Linear(1, 1, bias=False).double(),
        (x[:, None], y),
        likelihood=L.Gaussian(noise=0.5),
        prior=OLD,
    )
    values = []
    for variance in VARIANCES:
        p = post.with_prior(priors.Gaussian(1 / variance), convention).predict(
            torch.tensor([[1.5]])
        )
        values.append(
            float(p.increments(p.mean + offset).total) + 0.5 * math.log(2 * math.pi * 0.25)
        )
    return values


@pytest.mark.parametrize(("offset", "stated"), [(0.0, SELF), (1.0, OFF)])
def test_the_ten_numbers_of_the_papers_tables(offset, stated):
    assert np.abs(np.array(modularity_table("paper", offset)) - stated).max() < 1e-4


def test_the_exact_numbers_beside_them():
    values = modularity_table("exact", 1.0)
    assert np.abs(np.array(values[:4]) - EXACT_OFF).max() < 1e-4
    # and they are the exact predictive's: −½ log(1 + K/σ²) − ½/(σ² + K)
    for variance, value in zip(VARIANCES, values, strict=True):
        K = 1.5**2 / (1.5**2 / 0.05315 / 0.25 + 1 / variance)
        assert abs(value + 0.5 * math.log1p(K / 0.25) + 0.5 / (0.25 + K)) < 1e-9


# --- what is said where it does not go well ------------------------------------------------


def test_a_prior_that_is_not_log_concave_is_noted():
    post = fit(net(), Y[:, 0], likelihood=L.Gaussian(noise=0.4), prior=priors.StudentT(3.0, 0.05))
    assert "not log-concave in" in str(post.report)
    moved = post.with_prior(OLD)
    assert "log-concave" not in str(moved.report)


def test_a_prior_that_spoils_the_curvature_is_refused_by_name():
    """One observation at 3 with noise 10 under a narrow Student-t at 0: at θ̂ = 3 the curvature
    is the prior's, negative.
    """
    model = Constant()
    with torch.no_grad():
        model.head.weight.fill_(3.0)
    data = (torch.ones(2, 1), torch.tensor([3.0, 3.1]))
    post = ssla.fit(model, data, likelihood=L.Gaussian(noise=10.0), prior=OLD, mode="tilt")
    with pytest.raises(ValueError, match=r"not positive definite.*not log-concave in 1 directions"):
        post.with_prior(priors.StudentT(1.0, 0.1))


def test_conventions_without_a_prior_in_the_curvature_need_enough_data():
    few = (X[:4], Y[:4, 0])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        post = ssla.fit(net(), few, likelihood=L.Gaussian(noise=0.4), prior=OLD)
    for convention in ("paper", "additive"):
        with pytest.raises(
            ValueError, match=r"leaves the prior out of the curvature.*Use convention='exact'"
        ):
            post.with_prior(OLD, convention)


def test_an_additive_prior_that_outgrows_the_likelihood_is_refused():
    post = line("additive", prior=priors.custom(lambda t: 2e5 * (t**2).sum()))
    with pytest.raises(ValueError, match=r"have no integral.*Use convention='exact'"):
        post.predict(NEW)


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (
            lambda p: p.with_prior(OLD, "exct"),
            ValueError,
            "Unknown convention 'exct'. Did you mean 'exact'",
        ),
        (lambda p: p.with_prior(3.0), TypeError, "prior must be an object such as"),
        (
            lambda p: p.with_prior(priors.Gamma(2.0, 1.0, link="identity")),
            ValueError,
            "has no density at the parameters",
        ),
        (
            lambda p: p.with_prior(priors.Gaussian({"nope": 1.0})),
            ValueError,
            "Unknown layer or parameter in the prior 'nope'",
        ),
    ],
)
def test_mistakes_are_named(make, error, message):
    model = nn.Linear(3, 1, dtype=torch.float64)
    post = fit(model, -Y[:, 0], likelihood=L.Gaussian(noise=0.4))
    with pytest.raises(error, match=message):
        make(post)


def test_nothing_of_the_old_posterior_changes():
    post = fit(net(), Y[:, 0], likelihood=L.Gaussian(noise=0.4), prior=OLD)
    theta, report, S = (
        post.theta.clone(),
        str(post.report),
        post.statistics.curvature.matrix.clone(),
    )
    post.with_prior(priors.Laplace(0.2), "paper")
    assert torch.equal(post.theta, theta)
    assert torch.equal(post.statistics.curvature.matrix, S)
    assert str(post.report) == report
    assert post.prior is OLD
