"""Why a prediction is unsure: against fits without a row, with a row more, and with one input
changed.
"""

import pytest
import torch
from torch import nn

import ssla
from ssla import likelihoods as L
from support.cases import CASES
from support.networks import mlp

STRUCTURES = ["dense", "kfac", "diag", "low_rank"]
PRIOR = ssla.priors.Gaussian(precision=0.7)


def normal(*shape, seed):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


X, NEW, POOL = normal(40, 3, seed=1), normal(5, 3, seed=2), normal(7, 3, seed=3)
SINE = torch.sin(X[:, 0]) + 0.3 * normal(40, seed=4)
TARGETS = {1: SINE, 2: torch.stack([SINE, X[:, 1] + 0.5 * normal(40, seed=5)], 1)}
NOISE = {1: L.Gaussian(noise=0.3), 2: L.Gaussian(noise=torch.tensor([0.3, 0.5]))}


def gaussian(rows=slice(None), outputs=1, **options):
    """A polished last layer: linear, with Gaussian noise."""
    data = (X[rows], TARGETS[outputs][rows])
    return ssla.fit(mlp(outputs=outputs), data, likelihood=NOISE[outputs], prior=PRIOR, **options)


def without(refit, posterior, x):
    """What each training row adds to the mean and to the variance of f at x (N, n, C), by a fit
    without it.
    """
    full = posterior.marginal(x)
    rest = [refit(torch.arange(len(X)) != i).marginal(x) for i in range(len(X))]
    mean = torch.stack([full.mean - other.mean for other in rest], 1)
    variance = torch.stack(
        [(full.covariance - other.covariance).diagonal(dim1=-2, dim2=-1) for other in rest], 1
    )
    return mean, variance


def by_row(influence, part):
    """(N, k, C) in the order of the training rows."""
    return part.gather(1, influence.rows.argsort(1).unsqueeze(-1).expand_as(part))


# --- training rows -------------------------------------------------------------------------


@pytest.mark.parametrize("outputs", [1, 2])
@pytest.mark.parametrize("structure", ["dense", "low_rank"])
def test_influence_is_exact_for_a_linear_model_with_gaussian_noise(structure, outputs):
    posterior = gaussian(outputs=outputs, structure=structure)
    found = ssla.explain(posterior, NEW, top=None).influence
    mean, variance = without(
        lambda rows: gaussian(rows, outputs, structure=structure), posterior, NEW
    )
    torch.testing.assert_close(by_row(found, found.mean), mean, atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(by_row(found, found.variance), variance, atol=1e-6, rtol=1e-6)
    assert (found.variance <= 0).all()
    assert found.rows.shape == (5, 40)


def test_influence_with_kfac_is_exact_for_one_output():
    posterior = gaussian(structure="kfac")
    found = ssla.explain(posterior, NEW, top=None).influence
    mean, _ = without(lambda rows: gaussian(rows, structure="kfac"), posterior, NEW)
    torch.testing.assert_close(by_row(found, found.mean), mean, atol=1e-6, rtol=1e-6)


@pytest.mark.filterwarnings("ignore:ssla.explain leaves out:RuntimeWarning")
@pytest.mark.parametrize("weights", ["last_layer", "all"])
@pytest.mark.parametrize("structure", STRUCTURES)
def test_influence_equals_the_formula_with_matrices(structure, weights):
    """S₋ = (S⁻¹ − JᵀΛJ)⁻¹ and m₋ = m − S₋Jᵀg, with every matrix built."""
    posterior = gaussian(outputs=2, structure=structure, weights=weights)
    state = posterior
    S = state.covariance.solve_many(torch.eye(len(state.theta), dtype=torch.float64))
    (f, J), (_, at) = next(state.linearised(X)), next(state.linearised(NEW))
    J, at = J.double().to_dense().values, at.double().to_dense().values
    g, Lambda = posterior.likelihood.score(TARGETS[2], f), posterior.likelihood.fisher(f)
    found = ssla.explain(posterior, NEW, top=None).influence
    sound = torch.zeros(40, dtype=torch.bool)
    sound[found.rows[0]] = True
    for place, row in enumerate(found.rows[0].tolist()):
        less = torch.linalg.inv(torch.linalg.inv(S) - J[row].mT @ Lambda[row] @ J[row])
        mean = at[0] @ less @ (J[row].mT @ g[row])
        variance = (at[0] @ (S - less) @ at[0].mT).diagonal()
        torch.testing.assert_close(found.mean[0, place], mean, rtol=1e-6, atol=1e-9)
        torch.testing.assert_close(found.variance[0, place], variance, rtol=1e-6, atol=1e-9)


def test_a_row_of_weight_two_stands_for_two():
    twice = torch.ones(40, dtype=torch.float64)
    twice[3] = 2.0
    heavy = ssla.fit(mlp(), (X, SINE, twice), likelihood=NOISE[1], prior=PRIOR)
    found = ssla.explain(heavy, NEW, top=None).influence
    one = ssla.fit(mlp(), (X, SINE), likelihood=NOISE[1], prior=PRIOR)
    expected = heavy.marginal(NEW).mean - one.marginal(NEW).mean
    torch.testing.assert_close(by_row(found, found.mean)[:, 3], expected, atol=1e-8, rtol=1e-6)


def test_influence_on_the_variance_of_classes_equals_the_formula_with_matrices():
    """S − S₋ − S (Σ_j Jᵀ dΛ_j J) S, with dΛ_j along what the row does to f_j, and half of it
    for the row itself.
    """
    law, y = L.Categorical(), (X[:, 0] > 0).long() + (X[:, 1] > 0.5).long()
    posterior = ssla.fit(mlp(outputs=3), (X, y), likelihood=law, prior=PRIOR, gaussian="laplace")
    state = posterior
    S = state.covariance.solve_many(torch.eye(len(state.theta), dtype=torch.float64))
    (f, J), (_, at) = next(state.linearised(X)), next(state.linearised(NEW))
    J, at = J.double().to_dense().values, at.double().to_dense().values
    g, Lambda, p = law.score(y, f), law.fisher(f), torch.softmax(f, -1)
    found = ssla.explain(posterior, NEW, top=None).influence
    variance = by_row(found, found.variance)
    for row in (0, 7, 39):
        less = torch.linalg.inv(torch.linalg.inv(S) - J[row].mT @ Lambda[row] @ J[row])
        move = J @ less @ (J[row].mT @ g[row])
        move[row] *= 0.5
        dp = (Lambda @ move.unsqueeze(-1)).squeeze(-1)
        outer = dp.unsqueeze(-1) * p.unsqueeze(-2)
        rise = torch.diag_embed(dp) - outer - outer.mT
        bend = (J.mT @ rise @ J).sum(0)
        expected = (at @ (S - less - S @ bend @ S) @ at.mT).diagonal(dim1=-2, dim2=-1)
        torch.testing.assert_close(variance[:, row], expected, rtol=1e-3, atol=1e-6)


def ranks(values):
    return values.argsort(-1).argsort(-1).double()


@pytest.mark.parametrize("gaussian", ["laplace", "variational"])
def test_influence_ranks_rows_of_classes_as_refits_do(gaussian):
    """Spearman's correlation over the rows, for each input and each output."""
    y = (X[:, 0] + 0.5 * normal(40, seed=6) > 0).long() + (X[:, 1] > 0.5).long()

    def refit(rows):
        return ssla.fit(
            mlp(outputs=3),
            (X[rows], y[rows]),
            likelihood=L.Categorical(),
            prior=PRIOR,
            gaussian=gaussian,
        )

    posterior = refit(slice(None))
    found = ssla.explain(posterior, NEW, top=None).influence
    mean, variance = without(refit, posterior, NEW)
    for ours, theirs in (
        (by_row(found, found.mean), mean),
        (by_row(found, found.variance), variance),
    ):
        a, b = ranks(ours.movedim(1, -1)).flatten(0, 1), ranks(theirs.movedim(1, -1)).flatten(0, 1)
        each = torch.stack(
            [torch.corrcoef(torch.stack(pair))[0, 1] for pair in zip(a, b, strict=True)]
        )
        assert each.min() >= 0.95


@pytest.mark.parametrize(
    ("columns", "law", "outputs", "errors"),
    [
        (4, L.Categorical(), 3, {0.0: 0.137, 0.5: 0.125, 1.0: 0.136}),
        (10, L.Categorical(), 3, {0.0: 0.283, 0.5: 0.203, 1.0: 0.166}),
        (4, L.Poisson(), 1, {0.0: 0.071, 0.5: 0.063, 1.0: 0.071}),
        (12, L.Poisson(), 1, {0.0: 0.103, 0.5: 0.081, 1.0: 0.086}),
    ],
)
def test_the_share_of_the_own_term_has_the_stated_error_beside_refits(
    columns, law, outputs, errors, monkeypatch
):
    """By brute force: 60 refits without a row each.

    The figures are those of the docstring of `explanations`.
    """
    generator = torch.Generator().manual_seed(1)
    draw = lambda *shape: torch.randn(*shape, dtype=torch.float64, generator=generator)
    x, weights = draw(60, columns), draw(columns, outputs)
    f = x @ weights
    y = (
        (f + draw(60, outputs)).argmax(1)
        if outputs > 1
        else torch.poisson((0.4 * f[:, 0]).exp(), generator=generator)
    )
    net, new = nn.Linear(columns, outputs).double().eval(), draw(4, columns)

    def refit(rows):
        prior = ssla.priors.Gaussian(1.0)
        return ssla.fit(
            net, (x[rows], y[rows]), likelihood=law, prior=prior, mode="polish", gaussian="laplace"
        )

    def spread(posterior):
        return posterior.marginal(new).covariance.diagonal(dim1=-2, dim2=-1)

    posterior, rows = refit(slice(None)), torch.arange(60)
    expected = torch.stack([spread(posterior) - spread(refit(rows != row)) for row in rows], 1)
    for share, error in errors.items():
        monkeypatch.setattr("ssla.diagnostics.explanations.OWN", share)
        found = ssla.explain(posterior, new, top=None).influence
        gap = (by_row(found, found.variance) - expected).abs().mean() / expected.abs().mean()
        assert float(gap) == pytest.approx(error, abs=0.001)


def test_the_top_rows_are_the_first_of_all_rows_in_any_chunks():
    posterior = gaussian(outputs=2)
    everything = ssla.explain(posterior, NEW, top=None).influence
    few = ssla.explain(posterior, NEW, top=4).influence
    chunks = [(X[i : i + 7], TARGETS[2][i : i + 7]) for i in range(0, 40, 7)]
    parts = ssla.explain(posterior, NEW, top=4, data=chunks).influence
    for one in (few, parts):
        assert torch.equal(one.rows, everything.rows[:, :4])
        torch.testing.assert_close(one.mean, everything.mean[:, :4])
    by_variance = ssla.explain(posterior, NEW, top=None, by="variance").influence
    size = (
        by_variance.variance
        / posterior.marginal(NEW).covariance.diagonal(dim1=-2, dim2=-1)[:, None]
    ).sum(-1)
    assert (size.diff(dim=1) >= -1e-12).all()


def test_a_small_memory_budget_changes_no_answer():
    wide, narrow = gaussian(), gaussian(memory_budget=40_000)
    one, two = (ssla.explain(post, POOL, top=3).influence for post in (wide, narrow))
    assert torch.equal(one.rows, two.rows)
    torch.testing.assert_close(one.mean, two.mean)
    with pytest.raises(ValueError, match=r"40 rows on 900 inputs takes .* MiB.*Give a smaller top"):
        ssla.explain(narrow, normal(900, 3, seed=0), top=None)


# --- noise, doubt and prior ----------------------------------------------------------------


@pytest.mark.parametrize("structure", STRUCTURES)
def test_the_variance_is_noise_plus_doubt_and_the_prior_is_its_slope(structure):
    posterior = gaussian(structure=structure)
    split = ssla.explain(posterior, NEW).split
    torch.testing.assert_close(split.noise + split.doubt, posterior.predict(NEW).variance)
    assert ((split.prior > 0) & (split.prior < split.doubt)).all()
    step = 1e-4
    more, less = (
        posterior.with_prior(ssla.priors.Gaussian(0.7 * 2.718281828459045**s)).marginal(NEW)
        for s in (step, -step)
    )
    slope = (more.covariance - less.covariance).flatten() / (2 * step)
    torch.testing.assert_close(split.prior, -slope, rtol=1e-5, atol=1e-10)


def test_without_information_all_doubt_is_the_prior_s():
    posterior = ssla.fit(
        nn.Linear(3, 1).double(), (X, SINE), likelihood=L.Gaussian(noise=1e5), prior=PRIOR
    )
    split = ssla.explain(posterior, NEW).split
    torch.testing.assert_close(split.prior, split.doubt, rtol=1e-6, atol=0)


@pytest.mark.filterwarnings("ignore:The network is not at the mode", "ignore:The residuals are")
@pytest.mark.parametrize("name", CASES)
def test_every_likelihood_is_explained(name):
    law, f, y = CASES[name]
    count = len(y)
    x = normal(3 * count, 3, seed=7)
    offset = f.mean(0)
    network = mlp(outputs=f.shape[1])
    with torch.no_grad():
        network[2].bias.copy_(offset)
        network[2].weight *= 0.01 if not law.linear_domain else 1.0
    target = y.clamp(-5, 5).repeat(3, *[1] * (y.dim() - 1))
    target = target.long() if law.support_for(f.shape[1]).kind == "class" else target
    posterior = ssla.fit(
        network,
        (x, target),
        likelihood=law,
        prior=ssla.priors.Gaussian(50.0, offset.mean().item()),
        mode="tilt",
        gaussian="laplace",
    )
    found = ssla.explain(posterior, NEW)
    predictive = posterior.predict(NEW)
    torch.testing.assert_close(found.split.noise + found.split.doubt, predictive.variance)
    assert found.split.prior.shape == predictive.variance.shape
    assert torch.isfinite(found.influence.mean).all()
    assert torch.isfinite(found.inputs).all()
    assert (ssla.label_next(posterior, POOL, NEW).gain >= 0).all()
    assert str(found).count("variance   ") == 3


def test_the_mean_of_a_custom_likelihood_has_the_slope_of_the_built_in_one():
    y = torch.poisson((0.3 * X[:, 0]).exp(), generator=torch.Generator().manual_seed(0))
    own = CASES["custom poisson"][0]
    splits = [
        ssla.explain(ssla.fit(mlp(), (X, y), likelihood=law, prior=PRIOR, gaussian="laplace"), NEW)
        for law in (L.Poisson(), own)
    ]
    torch.testing.assert_close(splits[0].split.prior, splits[1].split.prior, rtol=1e-3, atol=0)
    torch.testing.assert_close(splits[0].inputs, splits[1].inputs, rtol=1e-3, atol=1e-6)


# --- inputs --------------------------------------------------------------------------------


def test_inputs_are_compared_one_at_a_time_with_the_training_means():
    posterior = gaussian()
    found = ssla.explain(posterior, NEW)
    torch.testing.assert_close(found.reference, X.mean(0))
    for j in range(3):
        other = NEW.clone()
        other[:, j] = X[:, j].mean()
        fall = posterior.marginal(NEW).covariance - posterior.marginal(other).covariance
        torch.testing.assert_close(found.inputs[:, j], fall.flatten())


def test_an_input_that_the_network_ignores_causes_no_doubt():
    network = nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 1)).double()
    with torch.no_grad():
        network[0].weight[:, 2] = 0.0
    posterior = ssla.fit(network, (X, SINE), likelihood=NOISE[1], prior=PRIOR)
    found = ssla.explain(posterior, NEW, reference=torch.zeros(3)).inputs
    assert (found[:, 2].abs() < 1e-15).all()  # rounding: other rows of a product
    assert (found[:, :2].abs() > 1e-6).all()


class TwoParts(nn.Module):
    def __init__(self):
        super().__init__()
        self.head = nn.Linear(3, 1)

    def forward(self, a, b):
        return self.head(torch.cat([a, b], 1))


def test_inputs_in_parts_have_influence_but_no_columns():
    parts = (X[:, :1], X[:, 1:])
    posterior = ssla.fit(TwoParts().double(), (parts, SINE), likelihood=NOISE[1], prior=PRIOR)
    found = ssla.explain(posterior, (NEW[:, :1], NEW[:, 1:]))
    assert found.inputs is None
    assert found.influence.rows.shape == (5, 10)
    with pytest.raises(ValueError, match="reference is for inputs in a table"):
        ssla.explain(posterior, (NEW[:, :1], NEW[:, 1:]), reference=torch.zeros(3))


# --- which row to label --------------------------------------------------------------------


@pytest.mark.parametrize("outputs", [1, 2])
@pytest.mark.parametrize("structure", ["dense", "low_rank"])
def test_the_gain_of_a_label_equals_a_fit_with_the_row(structure, outputs):
    posterior = gaussian(outputs=outputs, structure=structure)
    found = ssla.label_next(posterior, POOL, NEW)
    before = posterior.marginal(NEW).covariance.diagonal(dim1=-2, dim2=-1).sum(-1).mean()
    assert found.doubt == pytest.approx(float(before))
    for i in range(len(POOL)):
        label = torch.full(
            (1, outputs), 100.0 * i, dtype=torch.float64
        )  # the label does not matter
        data = (torch.cat([X, POOL[i : i + 1]]), torch.cat([TARGETS[outputs].view(40, -1), label]))
        more = ssla.fit(
            mlp(outputs=outputs), data, likelihood=NOISE[outputs], prior=PRIOR, structure=structure
        )
        after = more.marginal(NEW).covariance.diagonal(dim1=-2, dim2=-1).sum(-1).mean()
        assert float(found.gain[i]) == pytest.approx(float(before - after), rel=1e-6)
    assert found.best == int(found.order[0]) == int(found.gain.argmax())


def test_the_gain_for_classes_predicts_the_order_of_updates():
    """With the label drawn in proportion to its probability: the mean of the doubt after an
    update for each class.
    """
    y = (X[:, 0] + 0.5 * normal(40, seed=6) > 0).long() + (X[:, 1] > 0.5).long()
    posterior = ssla.fit(mlp(outputs=3), (X, y), likelihood=L.Categorical(), prior=PRIOR)
    pool = normal(30, 3, seed=9)
    gain = ssla.label_next(posterior, pool, NEW).gain
    probs = posterior.predict(pool).probs
    after = [
        sum(
            float(probs[i, c])
            * float(
                posterior.update((pool[i : i + 1], torch.tensor([c]))).predict(NEW).epistemic.sum()
            )
            for c in range(3)
        )
        for i in range(30)
    ]
    found = torch.corrcoef(torch.stack([ranks(gain), ranks(-torch.tensor(after))]))[0, 1]
    assert found >= 0.9


def test_without_targets_the_pool_itself_is_meant_in_any_chunks():
    posterior, narrow = gaussian(), gaussian(memory_budget=40_000)
    one = ssla.label_next(posterior, POOL)
    torch.testing.assert_close(one.gain, ssla.label_next(posterior, POOL, POOL).gain)
    torch.testing.assert_close(one.gain, ssla.label_next(narrow, POOL).gain)


# --- bad input -----------------------------------------------------------------------------


def test_bad_input_has_clear_errors():
    posterior = gaussian()
    for call, match in (
        (lambda: ssla.explain(posterior, NEW, top=0), "top must be a whole number from 1"),
        (
            lambda: ssla.explain(posterior, NEW, by="men"),
            r"Unknown by 'men'. Did you mean 'mean'\?",
        ),
        (lambda: ssla.explain(posterior, NEW[:0]), "x has no rows"),
        (
            lambda: ssla.explain(posterior, NEW, reference=[0.0]),
            r"reference must have shape \(3,\)",
        ),
        (
            lambda: ssla.explain(posterior, NEW, data=(X[:9], SINE[:9])),
            r"ssla.explain\(posterior, x, data=",
        ),
        (lambda: ssla.label_next(posterior, POOL[:0]), "pool has no rows"),
    ):
        with pytest.raises(ValueError, match=match):
            call()
    paper = posterior.with_prior(PRIOR, convention="paper")
    with pytest.raises(ValueError, match="exact convention only"):
        ssla.explain(paper, NEW)
    with pytest.raises(TypeError, match="must be a Posterior"):
        ssla.explain(mlp(), NEW)


def test_rows_that_cannot_be_removed_are_counted_and_left_out():
    """The diagonal of the curvature understates what a row with a high leverage determines."""
    x = torch.ones(6, 2, dtype=torch.float64)
    x[0] = 40.0
    y = normal(6, seed=1)
    posterior = ssla.fit(
        nn.Linear(2, 1).double(),
        (x, y),
        likelihood=L.Gaussian(noise=0.1),
        prior=PRIOR,
        structure="diag",
    )
    with pytest.warns(RuntimeWarning, match=r"leaves out 1 of 6 training rows.*structure='dense'"):
        found = ssla.explain(posterior, x[:2], top=None)
    assert found.failed.tolist() == [True] + [False] * 5
    assert found.influence.rows.shape == (2, 5)
    assert 0 not in found.influence.rows
