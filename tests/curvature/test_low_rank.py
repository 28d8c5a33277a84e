"""Fewer directions than parameters: the dual form of dense (exact), and the sketch (stated
error).
"""

import warnings

import pytest
import torch
from torch import nn
from torch.utils.data import (
    DataLoader,
    Subset,
    TensorDataset,
    WeightedRandomSampler,
    default_collate,
)

import ssla
from ssla import likelihoods as L
from ssla import priors
from ssla.curvature import Dense, LowRank
from ssla.curvature.woodbury import WoodburyOperator
from ssla.data import open_source
from ssla.refit.prior_response import prior_response

pytestmark = pytest.mark.filterwarnings("ignore:The network is")


def network(outputs=1, width=9):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, width), nn.Tanh(), nn.Linear(width, outputs)).double().eval()


def rows(n, seed=1):
    return torch.randn(n, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


TARGETS = {
    "gaussian": (L.Gaussian(noise=0.2), 1, lambda x: x[:, 0].sin()),
    "heteroscedastic": (L.HeteroscedasticGaussian(), 2, lambda x: x[:, 0].sin()),
    "classes": (L.Categorical(), 4, lambda x: (x[:, 0] > 0).long() + (x[:, 1] > 0).long()),
    "counts": (L.Poisson(), 1, lambda x: (x[:, 0].exp()).round()),
}


def fitted(kind, x, structure, **options):
    likelihood, outputs, target = TARGETS[kind]
    options = {"weights": "all", "prior": priors.Gaussian(precision=0.3), **options}
    return ssla.fit(
        network(outputs),
        (x, target(x)),
        likelihood=likelihood,
        gaussian="laplace",
        structure=structure,
        **options,
    )


def assert_same_operator(one, other, x, rtol=1e-9):
    assert torch.allclose(
        one.marginal(x).covariance, other.marginal(x).covariance, rtol=rtol, atol=1e-12
    )
    assert abs(one.operator.logdet() - other.operator.logdet()) < 1e-8
    assert torch.allclose(one.operator.variances(), other.operator.variances(), rtol=rtol)
    assert torch.allclose(
        prior_response(one, x).covariance,
        prior_response(other, x).covariance,
        rtol=1e-7,
        atol=1e-10,
    )
    assert abs(one.log_evidence() - other.log_evidence()) < 1e-8


@pytest.mark.parametrize("kind", TARGETS)
def test_fewer_rows_than_parameters_are_kept_as_rows_and_give_the_same_answer(kind):
    x = rows(8)
    dual, primal = (fitted(kind, x, structure) for structure in ("dense", Dense(dual=False)))
    assert dual.statistics.curvature.matrix is None
    assert isinstance(dual.operator, WoodburyOperator)
    assert primal.statistics.curvature.matrix is not None
    assert_same_operator(dual, primal, rows(20, seed=2))


@pytest.mark.parametrize("weights", ["all", "last_layer"])
def test_rows_turn_into_the_matrix_when_there_are_more_than_parameters(weights):
    x = rows(60)
    structure = "dense"
    few = fitted("gaussian", x[:6], structure, weights=weights, mode="tilt")
    assert few.statistics.curvature.matrix is None
    target = TARGETS["gaussian"][2]
    grown = few.update((x[6:], target(x[6:])))
    assert grown.statistics.curvature.matrix is not None
    assert_same_operator(
        grown,
        fitted("gaussian", x, Dense(dual=False), weights=weights, mode="tilt"),
        rows(20, seed=2),
    )


def test_dual_rows_merge_with_a_matrix_and_with_rows():
    x, target = rows(70), TARGETS["gaussian"][2]
    parts = [
        fitted("gaussian", x[s], "dense", mode="tilt")
        for s in (slice(0, 5), slice(5, 12), slice(12, 70))
    ]
    assert [p.statistics.curvature.matrix is None for p in parts] == [True, True, False]
    whole = ssla.fit(
        network(),
        (x, target(x)),
        likelihood=L.Gaussian(noise=0.2),
        weights="all",
        prior=priors.Gaussian(precision=0.3),
    )
    for merged in (
        parts[0].merge(parts[1]).merge(parts[2]),
        parts[2].merge(parts[1].merge(parts[0])),
    ):
        assert_same_operator(merged, whole, rows(20, seed=2))


def test_polish_and_the_noise_are_the_same_in_either_form():
    x = rows(12)
    y = x[:, 0].sin() + 0.1 * rows(12, seed=5)[:, 0]
    likelihood = L.Gaussian(noise="estimate")
    dual, primal = (
        ssla.fit(
            network(width=20),
            (x, y),
            likelihood=likelihood,
            prior=priors.Gaussian(),
            gaussian="laplace",
            structure=structure,
        )
        for structure in ("dense", Dense(dual=False))
    )
    assert dual.statistics.curvature.matrix is None
    assert float(dual.likelihood.noise) == pytest.approx(float(primal.likelihood.noise), rel=1e-8)
    assert torch.allclose(dual.theta, primal.theta, atol=1e-8)
    assert_same_operator(dual, primal, x, rtol=1e-7)


def test_a_flat_prior_on_fewer_rows_than_parameters_is_refused():
    with pytest.raises(ValueError, match=r"not positive definite.*Remedy: give a proper prior"):
        fitted("gaussian", rows(8), "dense", prior=priors.Flat())
    with pytest.raises(
        ValueError, match=r"not positive definite \(.* directions of data for 46 parameters\)"
    ):
        fitted("gaussian", rows(8), LowRank(rank=4), prior=priors.Flat())


def test_a_network_too_wide_for_a_matrix_is_fitted_by_its_rows_within_the_budget():
    wide = nn.Sequential(
        nn.Linear(3, 600), nn.Tanh(), nn.Linear(600, 1)
    ).eval()  # P = 3,001: a matrix takes 275 MiB
    x = rows(20).float()
    options = {
        "likelihood": L.Gaussian(noise=0.2),
        "prior": priors.Gaussian(),
        "weights": "all",
        "memory_budget": 8 << 20,
    }
    post = ssla.fit(wide, (x, x[:, 0]), **options)
    assert post.report.memory < 8 << 20
    batches = [(x, x[:, 0])]  # the number of rows is not announced
    with pytest.raises(
        ValueError,
        match=r"structure='dense' with 3,001 .* needs 275 MiB.*Use structure='low_rank'.* or structure='diag'",
    ):
        ssla.fit(wide, batches, **options)


# --- the sketch ----------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:On the training rows the predictive is worse")
@pytest.mark.parametrize("kind", TARGETS)
def test_low_rank_tends_to_dense_as_the_rank_grows(kind):
    x, new = rows(80), rows(30, seed=2)
    dense = fitted(kind, x, "dense")
    truth = dense.marginal(new).covariance
    size = dense.theta.numel()
    errors, bounds = [], []
    for rank in (1, size // 8, size // 2, size):
        post = fitted(kind, x, LowRank(rank=rank))
        errors.append(
            float((post.marginal(new).covariance - truth).abs().max() / truth.abs().max())
        )
        bounds.append(post.statistics.curvature.largest_variance_excess(0.3))
    assert bounds == sorted(bounds, reverse=True)
    assert errors[0] > errors[-1]
    assert errors[-1] < 1e-8
    assert_same_operator(post, dense, new, rtol=1e-7)


def test_dropped_curvature_is_what_it_says_and_widens_by_no_more_than_it_says():
    x, new = rows(80), rows(30, seed=2)
    dense = fitted("gaussian", x, "dense")
    S = dense.statistics.curvature.as_matrix()
    truth = dense.marginal(new).covariance
    for rank in (2, 5, 12, 30):
        post = fitted("gaussian", x, LowRank(rank=rank))
        sketch = post.statistics.curvature
        eye = torch.eye(len(S), dtype=torch.float64)
        approximate = torch.stack([sketch.push(column) for column in eye])
        missing = torch.linalg.eigvalsh(S - approximate)
        assert float(missing.min()) > -1e-10 * float(S.trace())  # Ŝ ⪯ S
        bound = sketch.largest_variance_excess(0.3)
        assert bound == pytest.approx(float(missing.sum()) / 0.3, rel=1e-6)
        best = float(torch.linalg.eigvalsh(S)[:-rank].sum()) / 0.3
        assert (
            best * (1 - 1e-9) <= bound <= 1.5 * best + 1e-3 * float(S.trace())
        )  # near the best that any k directions can do
        found = post.marginal(new).covariance
        assert bool((found >= truth * (1 - 1e-9)).all())
        assert bool((found <= truth * (1 + bound)).all())


@pytest.mark.parametrize("tail", [0.5, 1e-3])
def test_without_a_rank_the_sketch_is_as_wide_as_the_tail_asks(tail):
    x, new = rows(80), rows(30, seed=2)
    post = fitted("gaussian", x, LowRank(tail=tail, columns=3))
    found = post.statistics.curvature
    assert found.largest_variance_excess(0.3) <= tail
    narrower = LowRank(tail=tail, columns=found.sketch.shape[1] // 2).zero(46)
    J = post.network.linearise(x, post.theta)[1]
    assert (
        narrower.add(J, torch.full((80, 1, 1), 25.0, dtype=torch.float64)).largest_variance_excess(
            0.3
        )
        > tail
    )
    assert f"low_rank: {found.directions} of 46 directions; no variance is more than" in str(
        post.report
    )
    ratio = post.marginal(new).covariance / fitted("gaussian", x, "dense").marginal(new).covariance
    assert 1 - 1e-9 <= float(ratio.min()) <= float(ratio.max()) <= 1 + tail


def test_the_bound_holds_with_an_estimated_noise_and_several_outputs():
    x, new = rows(80), rows(30, seed=2)
    y = torch.stack([x[:, 0].sin(), 3 * x[:, 1]], 1) + 0.3 * rows(80, seed=4)[:, :2]
    low, dense = (
        ssla.fit(
            network(2),
            (x, y),
            likelihood=L.Gaussian(noise="estimate"),
            prior=priors.Gaussian(),
            structure=structure,
        )
        for structure in ("low_rank", "dense")
    )
    assert torch.allclose(low.likelihood.noise, dense.likelihood.noise, rtol=1e-6)
    excess = low.statistics.curvature.largest_variance_excess(1.0)
    diagonals = [post.marginal(new).covariance.diagonal(dim1=1, dim2=2) for post in (low, dense)]
    assert excess < 0.5
    assert float((diagonals[0] / diagonals[1]).max()) <= 1 + excess + 1e-6


def test_the_sketch_is_widened_until_it_is_enough():
    found = fitted("gaussian", rows(80), LowRank(tail=0.5, columns=2))
    assert found.statistics.curvature.largest_variance_excess(0.3) <= 0.5
    assert found.report.passes > 2
    once = ((x, y) for x, y in [(rows(80), rows(80)[:, 0].sin())])
    with pytest.warns(
        UserWarning,
        match=r"beyond tail=0.5: a source that can be read only once allows no wider sketch",
    ):
        ssla.fit(
            network(),
            once,
            likelihood=L.Gaussian(noise=0.2),
            prior=priors.Gaussian(),
            weights="all",
            structure=LowRank(tail=0.5, columns=2),
        )


def test_sketches_of_other_widths_or_seeds_do_not_merge():
    one, two, three = (LowRank(rank=r, seed=s).zero(30) for r, s in ((2, 0), (3, 0), (2, 1)))
    with pytest.raises(
        ValueError, match="of one width can be merged, but these have 14 and 16 columns"
    ):
        one.merge(two)
    with pytest.raises(ValueError, match="Only low_rank statistics"):
        one.merge(three)


def test_a_prior_that_couples_parameters_is_refused():
    with pytest.raises(ValueError, match="whose curvature is diagonal"):
        LowRank(rank=2).zero(3).with_prior(torch.eye(3, dtype=torch.float64))


# --- loaders whose rows are picked at once --------------------------------------------------


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("sampling", ["in order", "shuffled", "weighted sampler", "subset"])
def test_rows_picked_at_once_are_those_the_loader_gives(sampling, drop_last, weighted):
    x = rows(23)
    parts = (x, x[:, :1], x[:, 0].abs()) if weighted else (x, x[:, :1])
    dataset = TensorDataset(*parts)
    if sampling == "subset":
        dataset = Subset(Subset(dataset, list(range(20, 2, -1))), [3, 1, 4, 1, 5, 9, 2, 6])

    def loader():
        generator = torch.Generator().manual_seed(3)
        if sampling == "weighted sampler":
            sampler = WeightedRandomSampler(x[:, 0].abs(), 30, generator=generator)
            return DataLoader(dataset, batch_size=7, sampler=sampler, drop_last=drop_last)
        return DataLoader(
            dataset,
            batch_size=7,
            shuffle=sampling == "shuffled",
            generator=generator,
            drop_last=drop_last,
        )

    batches = list(open_source(loader()))
    expected = [default_collate([dataset[i] for i in picked]) for picked in loader().batch_sampler]
    assert len(batches) == len(expected)
    for ours, given in zip(batches, expected, strict=True):
        assert torch.equal(ours.x, given[0])
        assert torch.equal(ours.y, given[1])
        assert (ours.weights is None) == (not weighted)
        if weighted:
            assert torch.equal(ours.weights, given[2])


def test_a_loader_with_its_own_collation_is_read_as_it_is():
    x = rows(10)
    loader = DataLoader(
        TensorDataset(x, x[:, 0]),
        batch_size=5,
        collate_fn=lambda batch: (torch.zeros(2, 3), torch.ones(2)),
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert [b.x.shape for b in open_source(loader)] == [(2, 3), (2, 3)]
