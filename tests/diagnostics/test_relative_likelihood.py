"""Bounds over all likely weights: closed forms for one output, grids and many starts for classes."""

import math
import warnings

import pytest
import torch
from torch import nn

import ssla
from ssla import likelihoods as L
from ssla import priors
from ssla.diagnostics import likely_outputs
from ssla.diagnostics.credal_sets import Credal
from ssla.diagnostics.likely_outputs import LikelyOutputs
from ssla.diagnostics.projected_ascent import ascend
from ssla.predictive import from_marginal
from ssla.predictive.expectation import probability

G = torch.Generator().manual_seed(8)
X = torch.randn(25, 3, dtype=torch.float64, generator=G)
Y = X @ torch.tensor([0.8, -0.4, 0.1], dtype=torch.float64)
NEW = torch.randn(6, 3, dtype=torch.float64, generator=G)
ALPHA = 0.15
RADIUS = math.sqrt(-2 * math.log(ALPHA))


def fit(likelihood, y, outputs=1, dtype=torch.float64, **options):
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = nn.Linear(3, outputs, dtype=dtype)
        options = {"prior": priors.Gaussian(), **options}
        return ssla.fit(model, (X.to(dtype), y), likelihood=likelihood, **options)


LABELS = (Y > 0).long() + (Y > 1).long()
GAUSSIAN = fit(L.Gaussian(noise=0.5), Y)
CLASSES = fit(L.Categorical(), LABELS, 3)


def plug_in(likelihood, f):
    return from_marginal(likelihood, f, torch.zeros(*f.shape, f.shape[1]).double(), "plug_in")


def random_set(classes, spread, rows=8, seed=0, likelihood=None):
    """An ellipsoid with random axes, not of a posterior: (f̂, r R, the set)."""
    generator = torch.Generator().manual_seed(seed)
    f = 2 * torch.randn(rows, classes, dtype=torch.float64, generator=generator)
    noise = torch.randn(rows, classes, classes + 2, dtype=torch.float64, generator=generator)
    root = spread * noise @ noise.mT / (classes + 2)
    members = LikelyOutputs(L.Categorical() if likelihood is None else likelihood, f, root)
    return f, root, Credal(members, ("random",), "exact")


# --- the set of outputs -------------------------------------------------------------------------


@pytest.mark.parametrize("posterior", [GAUSSIAN, CLASSES], ids=["gaussian", "classes"])
def test_outputs_are_those_of_the_weights_in_the_ellipsoid(posterior):
    """The extreme weights are written out: θ̂ ± r S J_cᵀ / √K_cc."""
    lower, upper = ssla.credal(posterior, NEW, relative_likelihood=ALPHA).outputs
    f, K = posterior.marginal(NEW)
    reach = RADIUS * K.diagonal(dim1=1, dim2=2).sqrt()
    torch.testing.assert_close(lower, f - reach)
    torch.testing.assert_close(upper, f + reach)
    size = posterior.theta.numel()
    S = torch.stack([posterior.covariance.solve(e) for e in torch.eye(size).double()])
    generator = torch.Generator().manual_seed(0)
    for _, J in posterior.linearised(NEW):
        rows = J.to_dense().values
        for i, c in ((0, 0), (3, f.shape[1] - 1)):
            move = RADIUS * S @ rows[i, c] / (rows[i, c] @ S @ rows[i, c]).sqrt()
            # It is on the boundary: q(θ) = α q(m).
            relative = -0.5 * float(move @ torch.linalg.solve(S, move))
            assert abs(math.exp(relative) - ALPHA) < 1e-9
            assert abs(float(f[i, c] + rows[i, c] @ move - upper[i, c])) < 1e-9
        for _ in range(50):
            move = torch.linalg.cholesky(S) @ torch.randn(
                size, dtype=torch.float64, generator=generator
            )
            move = move / torch.linalg.solve(S, move).dot(move).sqrt() * RADIUS
            moved = f + rows @ move
            assert ((moved >= lower - 1e-9) & (moved <= upper + 1e-9)).all()


def test_relative_likelihood_one_is_the_network_itself_and_sets_are_nested():
    alone = ssla.credal(CLASSES, NEW, relative_likelihood=1.0)
    torch.testing.assert_close(alone.probs.lower, CLASSES.predict(NEW, "plug_in").probs)
    torch.testing.assert_close(alone.probs.upper, alone.probs.lower)
    assert alone.distance().max() < 1e-12
    before = alone
    for alpha in (0.7, 0.15, 1e-3):
        after = ssla.credal(CLASSES, NEW, relative_likelihood=alpha)
        assert (after.probs.lower < before.probs.lower).all()
        assert (after.probs.upper > before.probs.upper).all()
        assert (after.distance() > before.distance()).all()
        before = after
    nearly_all = ssla.credal(CLASSES, NEW, relative_likelihood=1e-300)
    assert nearly_all.total_variation().epistemic.min() > 0.999


# --- one output: closed forms -------------------------------------------------------------------


def test_gaussian_noise_has_closed_forms():
    credal = ssla.credal(GAUSSIAN, NEW, relative_likelihood=ALPHA)
    f, K = GAUSSIAN.marginal(NEW)
    reach = RADIUS * K[:, 0, 0].sqrt()
    noise = torch.distributions.Normal(*torch.tensor([0.0, 0.5], dtype=torch.float64))
    torch.testing.assert_close(credal.mean.lower, f[:, 0] - reach)
    torch.testing.assert_close(credal.mean.upper, f[:, 0] + reach)
    y = torch.linspace(-2, 2, 6, dtype=torch.float64)
    lower, upper = credal.cdf(y)
    torch.testing.assert_close(lower, noise.cdf(y - f[:, 0] - reach))
    torch.testing.assert_close(upper, noise.cdf(y - f[:, 0] + reach))
    quantile = credal.quantile(0.9)
    torch.testing.assert_close(
        quantile.upper, f[:, 0] + reach + noise.icdf(torch.tensor(0.9).double()), check_dtype=False
    )
    torch.testing.assert_close(credal.stddev.lower, torch.full_like(f[:, 0], 0.5))
    assert credal.stddev.imprecision.abs().max() < 1e-12
    # The density is highest at the f nearest to y, which may be inside.
    inside = (y - f[:, 0]).abs() <= reach
    assert inside.any()
    nearest = torch.where(inside, y, f[:, 0] + reach * (y - f[:, 0]).sign())
    torch.testing.assert_close(
        credal.log_prob(y).upper, noise.log_prob(y - nearest), rtol=0, atol=1e-9
    )
    torch.testing.assert_close(
        credal.distance(), torch.erf(reach / 0.5 / math.sqrt(2)), rtol=0, atol=1e-8
    )


def test_the_interval_holds_under_every_member():
    credal = ssla.credal(GAUSSIAN, NEW, relative_likelihood=ALPHA)
    ends = credal.interval(0.9)
    lower, upper = credal.outputs
    for share in torch.linspace(0, 1, 11):
        member = plug_in(L.Gaussian(noise=0.5), lower + share * (upper - lower))
        assert (member.cdf(ends[:, 1]) - member.cdf(ends[:, 0]) >= 0.9 - 1e-6).all()


@pytest.mark.parametrize("likelihood", [L.Bernoulli(), L.Bernoulli(temperature=2.0)])
def test_two_classes_with_one_output_have_the_closed_form(likelihood):
    posterior = fit(likelihood, (Y > 0).long())
    credal = ssla.credal(posterior, NEW, relative_likelihood=ALPHA)
    lower, upper = (likelihood.mean(f) for f in credal.outputs)
    torch.testing.assert_close(credal.mean.lower, lower)
    torch.testing.assert_close(credal.mean.upper, upper)
    torch.testing.assert_close(credal.probs.lower, torch.stack([1 - upper, lower], 1))
    parts = credal.total_variation()
    torch.testing.assert_close(parts.epistemic, upper - lower)
    torch.testing.assert_close(parts.aleatoric, torch.minimum(lower, 1 - upper))


def test_counts_have_the_closed_form_and_float32_networks_too():
    counts = torch.poisson(torch.exp(0.5 + 0.3 * X[:, 0]), generator=G)
    posterior = fit(L.Poisson(), counts, dtype=torch.float32)
    credal = ssla.credal(posterior, NEW.float(), relative_likelihood=ALPHA)
    lower, upper = credal.outputs
    torch.testing.assert_close(credal.mean.upper, upper[:, 0].exp(), rtol=1e-7, atol=0)
    y = torch.full((6,), 2.0, dtype=torch.float64)
    poisson = torch.distributions.Poisson(lower[:, 0].exp())
    expected = sum(poisson.log_prob(torch.tensor(float(k))).exp() for k in range(3))
    torch.testing.assert_close(credal.cdf(y).upper, expected, rtol=0, atol=1e-7)


# --- several outputs ----------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [1.0, 3.0])
def test_two_classes_with_two_outputs_have_the_closed_form(temperature):
    f, root, credal = random_set(2, 2.0, likelihood=L.Categorical(temperature=temperature))
    axis = torch.tensor([-1.0, 1.0], dtype=torch.float64)
    reach = torch.linalg.vector_norm(axis @ root, dim=-1)
    for side, sign in zip(credal.probs, (-1.0, 1.0), strict=True):
        expected = torch.sigmoid((f @ axis + sign * reach) / temperature)
        torch.testing.assert_close(side[:, 1], expected, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("spread", [0.3, 2.0, 8.0])
def test_three_classes_agree_with_a_fine_grid(spread):
    """Extreme members of softmax are on the sphere ‖v‖ = 1; the grid has 10⁵ points of it."""
    f, root, credal = random_set(3, spread)
    index = torch.arange(100_000, dtype=torch.float64) + 0.5
    z, angle = 1 - 2 * index / len(index), math.pi * (1 + math.sqrt(5)) * index
    width = (1 - z * z).sqrt()
    sphere = torch.stack([width * angle.cos(), width * angle.sin(), z], 1)
    p = torch.softmax(f[:, None] + sphere @ root.mT, 2)
    lower, upper = credal.probs
    assert (lower <= p.amin(1) + 1e-9).all()
    assert (upper >= p.amax(1) - 1e-9).all()
    torch.testing.assert_close(lower, p.amin(1), rtol=0, atol=2e-4)
    torch.testing.assert_close(upper, p.amax(1), rtol=0, atol=2e-4)
    pair = credal.probability([0, 2])
    torch.testing.assert_close(pair.upper, 1 - lower[:, 1], rtol=0, atol=1e-8)
    # Inside the ball the standard deviation has a maximum of ½ where p = ½ is possible.
    possible = (lower[:, 0] < 0.5) & (upper[:, 0] > 0.5)
    assert torch.allclose(credal.stddev.upper[possible, 0], torch.tensor(0.5).double())
    distances = torch.stack([torch.cdist(rows[::20], rows[::20], 1).max() / 2 for rows in p])
    assert (credal.distance() >= distances - 1e-3).all()


@pytest.mark.parametrize(("classes", "spread"), [(5, 2.0), (10, 1.0), (10, 5.0), (14, 3.0)])
def test_no_member_of_many_starts_is_beyond_the_bounds(classes, spread):
    f, root, credal = random_set(classes, spread)
    generator = torch.Generator().manual_seed(1)
    starts = torch.randn(len(f), 60, classes, dtype=torch.float64, generator=generator)
    starts = starts / torch.linalg.vector_norm(starts, dim=2, keepdim=True)
    for c in range(0, classes, 3):
        for sign, side in zip((-1.0, 1.0), credal.probability([c]), strict=True):

            def evaluate(v, rows, sign=sign, c=c):
                outputs = (f[rows, None] + v @ root[rows].mT).requires_grad_()
                p = sign * torch.softmax(outputs, 2)[..., c]
                (slope,) = torch.autograd.grad(p.sum(), outputs)
                return p.detach(), slope @ root[rows]

            best = ascend(evaluate, starts, torch.full(starts.shape[:2], 1e-3).double())
            assert (sign * side >= best.value.amax(1) - 1e-7).all()
            assert (sign * side <= best.value.amax(1) + 1e-5).all()


def test_expectations_over_classes_are_bounded_by_members():
    f, root, credal = random_set(4, 2.0)
    scores = torch.tensor([3.0, -1.0, 0.5, 10.0], dtype=torch.float64)
    lower, upper = credal.expectation(lambda y: scores[y.long()])
    v = torch.randn(8, 20_000, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    v = v / torch.linalg.vector_norm(v, dim=2, keepdim=True)
    values = torch.softmax(f[:, None] + v @ root.mT, 2) @ scores
    assert (lower <= values.amin(1) + 1e-9).all()
    assert (upper >= values.amax(1) - 1e-9).all()
    torch.testing.assert_close(lower, values.amin(1), rtol=0, atol=0.05)
    torch.testing.assert_close(upper, values.amax(1), rtol=0, atol=0.05)


def test_renaming_classes_renames_the_bounds():
    f, root, credal = random_set(4, 2.0)
    order = torch.tensor([2, 0, 3, 1])
    renamed = Credal(LikelyOutputs(L.Categorical(), f[:, order], root[:, order]), ("r",), "exact")
    for ours, theirs in zip(credal.probs, renamed.probs, strict=True):
        torch.testing.assert_close(theirs, ours[:, order], rtol=0, atol=1e-8)


def test_blocks_of_rows_change_nothing(monkeypatch):
    f, root, credal = random_set(3, 2.0, rows=11)
    whole = credal.probs
    mean, _ = LikelyOutputs(L.Poisson(), f[:, :1], root[:, :1, :1]), None
    counts = Credal(mean, ("c",), "exact").cdf(torch.ones(11))
    monkeypatch.setattr(likely_outputs, "ENTRIES_AT_ONCE", 200)
    for one, many in zip(
        (*whole, *counts),
        (*credal.probs, *Credal(mean, ("c",), "exact").cdf(torch.ones(11))),
        strict=True,
    ):
        torch.testing.assert_close(many, one, rtol=0, atol=1e-9)


def test_several_targets_have_the_closed_form_of_their_means():
    posterior = fit(L.Gaussian(noise=0.5), torch.stack([Y, -Y.sin()], 1), 2)
    credal = ssla.credal(posterior, NEW, relative_likelihood=ALPHA)
    for mean, output in zip(credal.mean, credal.outputs, strict=True):
        torch.testing.assert_close(mean, output, rtol=0, atol=1e-8)


def test_mean_and_log_variance_agree_with_a_grid_of_the_disc():
    posterior = fit(L.HeteroscedasticGaussian(), Y + 0.3 * torch.sin(7 * X[:, 1]), 2)
    new = NEW[:2]
    credal = ssla.credal(posterior, new, relative_likelihood=ALPHA)
    f, K = posterior.marginal(new)
    root = RADIUS * torch.linalg.cholesky(K)
    angle = torch.linspace(0, 2 * math.pi, 721, dtype=torch.float64)[:-1]
    share = torch.linspace(0, 1, 41, dtype=torch.float64)
    disc = (share[:, None, None] * torch.stack([angle.cos(), angle.sin()], 1)).flatten(0, 1)
    mean, log_variance = (f[:, None] + disc @ root.mT).unbind(2)
    y = torch.tensor([0.4, -0.6], dtype=torch.float64)
    member = torch.distributions.Normal(mean, (log_variance / 2).exp())
    expected = member.cdf(y[:, None])
    lower, upper = credal.cdf(y)
    torch.testing.assert_close(lower, expected.amin(1), rtol=0, atol=1e-4)
    torch.testing.assert_close(upper, expected.amax(1), rtol=0, atol=1e-4)
    event = credal.probability((-0.2, 0.5))
    inside = member.cdf(torch.tensor(0.5)) - member.cdf(torch.tensor(-0.2))
    torch.testing.assert_close(event.upper, inside.amax(1), rtol=0, atol=1e-4)
    torch.testing.assert_close(credal.outputs.upper[:, 0], mean.amax(1), rtol=0, atol=1e-3)


# --- users --------------------------------------------------------------------------------------


def test_every_structure_and_gradients_switched_off():
    for structure in ("dense", "kfac", "diag"):
        posterior = fit(L.Categorical(), LABELS, 3, structure=structure)
        with torch.inference_mode():
            lower, upper = ssla.credal(posterior, NEW, relative_likelihood=ALPHA).probs
        mean = posterior.predict(NEW).probs
        assert ((lower < mean) & (mean < upper)).all()
        assert not lower.requires_grad


def test_no_rows_give_no_bounds():
    credal = ssla.credal(CLASSES, NEW[:0], relative_likelihood=ALPHA)
    assert credal.probs.lower.shape == (0, 3)
    assert credal.outputs.upper.shape == (0, 3)


def test_it_says_what_it_is():
    credal = ssla.credal(GAUSSIAN, NEW, relative_likelihood=ALPHA)
    assert repr(credal) == "Credal(relative likelihood ≥ 0.15; 6 inputs, convention 'exact')"
    assert credal.member_noun == "likely model"
    member = credal.members.list_members()[0]
    assert torch.equal(
        probability(member, (-1.0, 1.0)),
        probability(plug_in(L.Gaussian(noise=0.5), credal.members.mean), (-1.0, 1.0)),
    )


def positive_rates():
    """A posterior whose outputs must be positive."""
    model = nn.Linear(3, 1, dtype=torch.float64)
    with torch.no_grad():
        model.weight.zero_()
        model.bias.fill_(2.0)
    return ssla.fit(
        model,
        (X, 2.0 + (Y > 0).double()),
        likelihood=L.Poisson(link="identity"),
        prior=priors.Gaussian(100.0),
        mode="tilt",
        gaussian="laplace",
    )


@pytest.mark.parametrize("value", [0.0, -0.1, 1.5, math.nan, math.inf, "0.15", True])
def test_other_relative_likelihoods_are_refused(value):
    with pytest.raises(ValueError, match="must be a number above 0 and at most 1"):
        ssla.credal(GAUSSIAN, NEW, relative_likelihood=value)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: ssla.credal(GAUSSIAN, NEW), ValueError, "either priors or .* but got neither"),
        (
            lambda: ssla.credal(GAUSSIAN, NEW, [priors.Gaussian(1.0)], relative_likelihood=0.5),
            ValueError,
            "but got both",
        ),
        (
            lambda: ssla.credal(GAUSSIAN, NEW, refit="none", relative_likelihood=0.5),
            ValueError,
            "are for sets of priors",
        ),
        (
            lambda: ssla.credal(GAUSSIAN, NEW, convention="paper", relative_likelihood=0.5),
            ValueError,
            "are for sets of priors",
        ),
        (
            lambda: ssla.credal(CLASSES, NEW, relative_likelihood=0.5).quantile(0.5),
            TypeError,
            "Classes have no order",
        ),
        (
            lambda: ssla.credal(GAUSSIAN, NEW, [priors.Gaussian(1.0)]).outputs,
            TypeError,
            "have no bounds of f",
        ),
        (
            lambda: ssla.credal(GAUSSIAN, NEW, priors.Box(precision=(1.0, 2.0))).outputs,
            TypeError,
            "have no bounds of f",
        ),
        (
            lambda: ssla.credal(GAUSSIAN, NEW * math.nan, relative_likelihood=0.5),
            ValueError,
            "finite",
        ),
        (
            lambda: ssla.credal(
                fit(L.Categorical(), LABELS, 3, memory_budget=1 << 22),
                NEW.repeat(20_000, 1),
                relative_likelihood=0.5,
            ),
            ValueError,
            "Give fewer inputs at a time",
        ),
        (
            lambda: ssla.credal(positive_rates(), NEW, relative_likelihood=0.5),
            ValueError,
            "needs a likelihood that allows all outputs",
        ),
    ],
)
def test_mistakes_are_named(call, error, message):
    with pytest.raises(error, match=message):
        call()


def test_searches_that_have_not_converged_are_reported(monkeypatch):
    monkeypatch.setattr(likely_outputs, "EARLY_ROUNDS", 1)
    monkeypatch.setattr(likely_outputs, "MOST_ROUNDS", 1)
    monkeypatch.setattr(likely_outputs, "STARTS", 1)
    _, _, credal = random_set(10, 5.0)
    with pytest.warns(UserWarning, match="bounds over the likely outputs have not converged"):
        _ = credal.probs
