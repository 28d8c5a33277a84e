"""Full conformal sets without refits, against full conformal prediction that fits again for
each candidate.
"""

import math

import numpy as np
import pytest
import torch

import ssla
from ssla import likelihoods as L
from ssla.diagnostics import conformal as full_conformal
from support.networks import data, mlp

X, Y = data(40)
NEW = data(6, seed=9)[0]
FEW = 24  # rows where every candidate is fitted again
NOISE, PRECISION, LEVEL = 0.3, 2.0, 0.8
LAW = L.Gaussian(noise=NOISE)


def linear(outputs=1):
    return torch.nn.Linear(3, outputs).double().eval()


def ridge(x, y, weights, at):
    """Mean and variance of y at one input, by ridge regression."""
    A = np.column_stack([x, np.ones(len(x))])
    H = A.T @ (A * weights[:, None]) / NOISE**2 + PRECISION * np.eye(4)
    a = np.append(at, 1.0)
    return a @ np.linalg.solve(H, A.T @ (weights * y)) / NOISE**2, NOISE**2 + a @ np.linalg.solve(
        H, a
    )


def scores_by_refits(x, y, weights, at, value):
    """Of all rows and of the candidate: n + 1 ridge regressions, each without one of the rows
    of the augmented data.
    """
    x, y, weights = np.vstack([x, at]), np.append(y, value), np.append(weights, 1.0)
    scores = []
    for i in range(len(y)):
        less = weights.copy()
        less[i] -= min(less[i], 1.0)
        mean, variance = ridge(x, y, less, x[i])
        scores.append(abs(y[i] - mean) / math.sqrt(variance))
    return np.array(scores)


def inside_by_refits(x, y, weights, at, value, level, rows=None):
    """Whether `value` is in the set."""
    scores = scores_by_refits(x, y, weights, at, value)
    w = weights * (np.ones(len(y), dtype=bool) if rows is None else rows)
    return w[scores[:-1] < scores[-1]].sum() < level * (w.sum() + 1) * (1 - 1e-12)


# --- exact -----------------------------------------------------------------------------------


@pytest.mark.parametrize("level", [0.5, LEVEL, 0.95])
@pytest.mark.parametrize("case", ["plain", "weights", "rows"])
def test_exact_for_ridge_regression(case, level):
    weights = np.ones(40)
    rows = None
    if case == "weights":
        weights[::3], weights[1::3] = 2.0, 0.4
    if case == "rows":
        rows = np.arange(40) % 2 == 0
    post = ssla.fit(
        linear(),
        (X, Y, torch.from_numpy(weights)),
        likelihood=LAW,
        prior=ssla.priors.Gaussian(PRECISION),
    )
    found = post.predictive_set(NEW, level, rows=rows)
    assert found.shape == (6, 2)
    x, y = X.numpy(), Y.numpy()
    for at, (low, high) in zip(NEW.numpy(), found.tolist(), strict=True):
        for value, expected in [
            (low - 1e-6, False),
            (low + 1e-6, True),
            (high - 1e-6, True),
            (high + 1e-6, False),
        ]:
            assert inside_by_refits(x, y, weights, at, value, level, rows) == expected
        for value in np.linspace(low - 2, high + 2, 9):  # an interval
            assert inside_by_refits(x, y, weights, at, value, level, rows) == (low <= value <= high)


def test_rows_of_weight_zero_do_not_count():
    weights = torch.ones(40, dtype=torch.float64)
    weights[::4] = 0.0
    prior = ssla.priors.Gaussian(PRECISION)
    with_zeros = ssla.fit(mlp(), (X, Y, weights), likelihood=LAW, prior=prior).predictive_set(
        NEW, LEVEL
    )
    kept = weights > 0
    torch.testing.assert_close(
        with_zeros,
        ssla.fit(mlp(), (X[kept], Y[kept]), likelihood=LAW, prior=prior).predictive_set(NEW, LEVEL),
    )


def test_the_general_way_is_that_of_gaussian_noise():
    """Fixed points of the refits in the outputs, where there is a closed form."""
    post = ssla.fit(mlp(), (X, Y), likelihood=LAW, prior=ssla.priors.Gaussian(PRECISION))
    custom = ssla.fit(
        mlp(),
        (X, Y),
        likelihood=L.Tempered(LAW, beta=1.0),
        prior=ssla.priors.Gaussian(PRECISION),
        gaussian="laplace",
    )
    torch.testing.assert_close(
        custom.predictive_set(NEW, LEVEL), post.predictive_set(NEW, LEVEL), atol=1e-4, rtol=0
    )


@pytest.mark.parametrize("general", [False, True])
def test_several_posteriors_count_the_ranks_of_all_their_rows(general):
    """Two networks, each compared with its own rows: the ends by the definition, candidate by
    candidate.
    """
    law = L.Tempered(LAW, beta=1.0) if general else LAW
    halves = [torch.arange(40) < 20, torch.arange(40) >= 20]
    posts = [
        ssla.fit(
            mlp(seed=seed),
            (X, Y),
            likelihood=law,
            prior=ssla.priors.Gaussian(PRECISION),
            gaussian="laplace",
        )
        for seed in range(2)
    ]
    members = [
        full_conformal.Member(post, NEW, rows=half)
        for post, half in zip(posts, halves, strict=True)
    ]
    found = full_conformal.cross_conformal_sets(members, LEVEL)
    prepared = full_conformal._use_mean_output(
        [
            full_conformal._Comparison.read_rows(member).make_candidates(slice(0, 6))
            for member in members
        ]
    )

    def lower_scores(y, side):
        """How many rows have a lower score than a candidate on this side of the networks'
        predictions (6,).
        """
        counts = []
        for one in prepared:
            own = full_conformal.compute_nonconformity(LAW, y, one.query.f, one.query.K)
            counts.append(
                ((one.score_rows(y) < own[:, None]) & (side * (y[:, None] - one.query.f) > 0)).sum(
                    1
                )
            )
        return sum(counts)

    rank = math.ceil(41 * LEVEL)
    for end, side in ((found[:, 0], -1), (found[:, 1], 1)):
        assert bool((lower_scores(end - side * 1e-4, side) < rank).all())
        assert bool((lower_scores(end + side * 1e-4, side) >= rank).all())


def test_several_ridge_regressions_have_their_mean_at_the_candidate():
    """Two models of other inputs, each with its own rows: fits with the candidate moved by f_j
    − f̄.
    """
    halves = [torch.arange(40) < 20, torch.arange(40) >= 20]
    views, new = [X, X.abs()], [NEW, NEW.abs()]
    prior, ones = ssla.priors.Gaussian(PRECISION), np.ones(40)
    posts = [ssla.fit(linear(), (x, Y), likelihood=LAW, prior=prior) for x in views]
    members = [
        full_conformal.Member(*parts)
        for parts in zip(posts, new, [None, None], halves, strict=True)
    ]
    found = full_conformal.cross_conformal_sets(members, LEVEL).numpy()
    for row, (low, high) in enumerate(found):
        own = [
            ridge(x.numpy(), Y.numpy(), ones, at[row].numpy())[0]
            for x, at in zip(views, new, strict=True)
        ]
        inside = []
        for value in (low - 1e-6, low + 1e-6, high - 1e-6, high + 1e-6):
            lower = 0
            for x, at, rows, f in zip(views, new, halves, own, strict=True):
                scores = scores_by_refits(
                    x.numpy(), Y.numpy(), ones, at[row].numpy(), value - np.mean(own) + f
                )
                lower += (scores[:-1] < scores[-1])[rows.numpy()].sum()
            inside.append(lower < LEVEL * 41)
        assert inside == [False, True, True, False]


@pytest.mark.parametrize("name", ["heteroscedastic", "poisson", "categorical"])
def test_equal_networks_are_one_network(name):
    post, half = fitted(name), torch.arange(40) < 20
    members = [full_conformal.Member(post, NEW, rows=rows) for rows in (half, ~half)]
    one = full_conformal.cross_conformal_sets([full_conformal.Member(post, NEW)], LEVEL)
    torch.testing.assert_close(full_conformal.cross_conformal_sets(members, LEVEL), one)
    halved = full_conformal.Member(post, NEW, shares=torch.full((40,), 0.5, dtype=torch.float64))
    torch.testing.assert_close(full_conformal.cross_conformal_sets([halved, halved], LEVEL), one)


# --- against fits with the candidate ---------------------------------------------------------


def set_by_fits(law, outputs, x, y, at, candidates, level):
    """bool (k,): every candidate is added, and the same posterior fitted without each row."""
    kept = []
    for value in candidates:
        rows, targets = torch.cat([x, at]), torch.cat([y, value[None]])
        scores = []
        for i in range(len(targets)):
            rest = torch.arange(len(targets)) != i
            post = ssla.fit(
                mlp(outputs=outputs, width=4),
                (rows[rest], targets[rest]),
                likelihood=law,
                prior=ssla.priors.Gaussian(),
                gaussian="laplace",
                mode="polish",
            )
            scores.append(
                full_conformal.compute_nonconformity(
                    law, targets[i : i + 1].double(), *post.marginal(rows[i : i + 1])
                )
            )
        scores = torch.cat(scores)
        kept.append(bool((scores[:-1] < scores[-1]).sum() < level * len(targets) * (1 - 1e-12)))
    return kept


def targets(name, x):
    mean, noise = torch.sin(x[:, 0]), data(len(x), seed=5)[0][:, 0]
    return {
        "bernoulli": (L.Bernoulli(), (mean + 0.5 * noise > 0).double(), 1),
        "categorical": (
            L.Categorical(),
            (mean + 0.3 * noise > 0).long() + (x[:, 1] > 0.7).long(),
            3,
        ),
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
    }[name]


def fitted(name, n=40, **options):
    x = X[:n]
    law, y, outputs = targets(name, X)
    options = {"gaussian": "laplace", "prior": ssla.priors.Gaussian()} | options
    return ssla.fit(
        mlp(outputs=outputs, width=4), (x, y[:n]), likelihood=law, mode="polish", **options
    )


@pytest.mark.parametrize("name", ["bernoulli", "categorical"])
def test_classes_are_those_of_fits_with_the_candidate(name):
    law, y, outputs = targets(name, X)
    found = fitted(name, FEW).predictive_set(NEW, LEVEL)
    assert found.dtype == torch.bool
    labels = torch.arange(found.shape[1]).to(y)
    expected = torch.tensor(
        [set_by_fits(law, outputs, X[:FEW], y[:FEW], at[None], labels, LEVEL) for at in NEW[:3]]
    )
    assert torch.equal(found[:3], expected)


@pytest.mark.parametrize("name", ["poisson", "heteroscedastic", "student"])
def test_ends_are_near_those_of_fits_with_the_candidate(name):
    """A candidate a tenth of the width inside is in the set, one a tenth outside is not."""
    law, y, outputs = targets(name, X)
    found = fitted(name, FEW).predictive_set(NEW, LEVEL)
    for at, (low, high) in zip(NEW[:2], found.tolist(), strict=False):
        if name == "poisson":
            candidates, expected = torch.tensor([low, high, high + 2]), [True, True, False]
        else:
            step = 0.1 * (high - low)
            candidates, expected = (
                torch.tensor([low - step, low + step, high - step, high + step]),
                [False, True, True, False],
            )
        assert (
            set_by_fits(law, outputs, X[:FEW], y[:FEW], at[None], candidates.double(), LEVEL)
            == expected
        )


# --- coverage --------------------------------------------------------------------------------


@pytest.mark.parametrize("scale", [0.1, 1.0])
def test_coverage_where_the_noise_is_wrong(scale):
    """A linear model with a wrong noise and a wrong shape of it: coverage of 400 new rows, each
    with its own training rows.
    """
    generator = torch.Generator().manual_seed(0)
    inside = []
    for _ in range(20):
        x = torch.randn(60, 3, dtype=torch.float64, generator=generator)
        noise = 0.3 * torch.randn(60, dtype=torch.float64, generator=generator) ** 3
        y = x[:, 0] + noise
        post = ssla.fit(
            linear(),
            (x[:40], y[:40]),
            likelihood=L.Gaussian(noise=scale),
            prior=ssla.priors.Gaussian(),
        )
        low, high = post.predictive_set(x[40:], 0.9).unbind(1)
        inside.append((low <= y[40:]) & (y[40:] <= high))
    assert float(torch.stack(inside).double().mean()) == pytest.approx(0.9, abs=0.04)


# --- structures, memory, dtypes --------------------------------------------------------------


@pytest.mark.parametrize("gaussian", ["laplace", "variational"])
@pytest.mark.parametrize(
    "name", ["bernoulli", "categorical", "poisson", "heteroscedastic", "student"]
)
def test_every_likelihood_has_sets_that_grow_with_the_level(name, gaussian):
    post = fitted(name, gaussian=gaussian)
    small, large = (post.predictive_set(NEW, level) for level in (0.5, 0.9))
    if small.dtype == torch.bool:
        assert bool((small <= large).all())
        assert small.shape == (6, 2 if name == "bernoulli" else 3)
    else:
        assert small.shape == (6, 2)
        assert bool((small[:, 0] >= large[:, 0]).all())
        assert bool((small[:, 1] <= large[:, 1]).all())
        assert bool((small[:, 0] <= small[:, 1]).all())
    if name == "poisson":
        assert torch.equal(large, large.round())
        assert bool((large >= 0).all())


@pytest.mark.filterwarnings("ignore:predictive_set cannot remove:RuntimeWarning")
@pytest.mark.parametrize("structure", ["kfac", "diag", "low_rank"])
@pytest.mark.parametrize("weights", ["last_layer", "all"])
def test_every_structure_has_an_answer(structure, weights):
    post = ssla.fit(
        mlp(),
        (X, Y),
        likelihood=LAW,
        prior=ssla.priors.Gaussian(5.0),
        structure=structure,
        weights=weights,
    )
    found = post.predictive_set(NEW, 0.9)
    assert bool(found.isfinite().all())
    assert bool((found[:, 0] < found[:, 1]).all())


@pytest.mark.parametrize("name", ["heteroscedastic", "categorical"])
def test_chunks_and_little_memory_give_the_same(name, monkeypatch):
    y = targets(name, X)[1]
    expected = fitted(name).predictive_set(NEW, LEVEL)
    monkeypatch.setattr(full_conformal, "ROWS_AT_ONCE", 7)
    small = fitted(name, memory_budget=40_000)
    found = small.predictive_set(NEW, LEVEL, data=[(X[:11], y[:11]), (X[11:], y[11:])])
    assert (
        torch.equal(found, expected)
        if found.dtype == torch.bool
        else torch.allclose(found, expected, atol=1e-5)
    )


def test_single_precision_and_no_inputs():
    prior = ssla.priors.Gaussian(PRECISION)
    expected = ssla.fit(mlp(), (X, Y), likelihood=LAW, prior=prior).predictive_set(NEW, LEVEL)
    post = ssla.fit(mlp(dtype=torch.float32), (X.float(), Y.float()), likelihood=LAW, prior=prior)
    found = post.predictive_set(NEW.float(), LEVEL)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), expected, atol=1e-4, rtol=0)
    assert post.predictive_set(NEW[:0].float()).shape == (0, 2)


# --- refused, and warned ---------------------------------------------------------------------


def test_few_rows_give_infinite_sets_with_a_warning():
    post = ssla.fit(mlp(), (X, Y), likelihood=LAW, prior=ssla.priors.Gaussian())
    with pytest.warns(
        UserWarning,
        match=r"A predictive set of 0.99 needs at least 99 rows, but there are 40: every set",
    ):
        assert bool(post.predictive_set(NEW, 0.99).isinf().all())
    with pytest.warns(UserWarning, match="needs at least 99 rows"):
        assert bool(fitted("heteroscedastic").predictive_set(NEW, 0.99).isinf().all())
    with pytest.warns(UserWarning, match="needs at least 99 rows"):
        assert bool(fitted("categorical").predictive_set(NEW, 0.99).all())


def test_rows_that_cannot_be_removed_make_the_sets_larger(monkeypatch):
    post = ssla.fit(mlp(), (X, Y), likelihood=LAW, prior=ssla.priors.Gaussian())
    expected = post.predictive_set(NEW, 0.5)
    monkeypatch.setattr(ssla.predictive.cavities, "LEAST", 0.9)
    with pytest.warns(RuntimeWarning, match=r"cannot remove \d+ of 40 rows"):
        found = post.predictive_set(NEW, 0.5)
    assert bool((found[:, 1] - found[:, 0] > expected[:, 1] - expected[:, 0]).all())


def test_wrong_arguments_are_refused():
    post = ssla.fit(mlp(), (X, Y), likelihood=LAW, prior=ssla.priors.Gaussian())
    with pytest.raises(ValueError, match="level must be strictly between 0 and 1"):
        post.predictive_set(NEW, 90)
    for rows in (
        torch.ones(39, dtype=torch.bool),
        torch.arange(5),
        torch.zeros(40, dtype=torch.bool),
    ):
        with pytest.raises(
            ValueError, match="rows must be a bool for each of the 40 training rows"
        ):
            post.predictive_set(NEW, rows=rows)
    with pytest.raises(ValueError, match="exact convention only"):
        post.with_prior(ssla.priors.Gaussian(3.0), convention="paper").predictive_set(NEW)
    with pytest.raises(ValueError, match="not those of the fit"):
        post.predictive_set(NEW, data=(X, Y + 3))
    two = ssla.fit(
        mlp(outputs=2), (X, torch.stack([Y, -Y], 1)), likelihood=LAW, prior=ssla.priors.Gaussian()
    )
    with pytest.raises(TypeError, match="for one number on the whole line, counts or classes"):
        two.predictive_set(NEW)
    heavy = ssla.fit(
        mlp(), (X, Y), likelihood=L.StudentT(1.5, 0.3), prior=ssla.priors.Gaussian(50.0)
    )
    with pytest.raises(ValueError, match="under this likelihood it is infinite"):
        heavy.predictive_set(NEW)
