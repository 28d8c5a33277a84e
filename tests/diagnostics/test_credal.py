"""Bounds over sets of priors: they hold every member, and every random member of a family; one
prior gives the predictive.
"""

import math
import warnings

import numpy as np
import pytest
import torch
from scipy import optimize, stats
from torch import nn

import ssla
from ssla import likelihoods as L
from ssla import priors, structures
from ssla.diagnostics.credal_intervals import find_smallest_interval, merge_regions
from ssla.maths.quadrature import Regions
from ssla.predictive.expectation import probability

G = torch.Generator().manual_seed(8)
X = torch.randn(25, 3, dtype=torch.float64, generator=G)
Y = X @ torch.tensor([0.8, -0.4, 0.1], dtype=torch.float64) + 0.5 * torch.randn(
    25, dtype=torch.float64, generator=G
)
COUNTS = torch.poisson(torch.exp(0.5 + 0.3 * X[:, 0]), generator=G)
NEW = torch.cat(
    [
        torch.randn(2, 3, dtype=torch.float64, generator=G),
        torch.full((1, 3), 3.0, dtype=torch.float64),
    ]
)
GRID = torch.linspace(-4, 4, 9, dtype=torch.float64).expand(3, -1)
LIST = {
    "weak": priors.Gaussian(0.1),
    "strong": priors.Gaussian(20.0, 0.5),
    "robust": priors.StudentT(4.0),
    "sharp": priors.Laplace(0.5),
}
BOX = priors.Box(mean=(-0.5, 1.0), precision=(0.2, 20.0))


def fit(likelihood, y, outputs=1, **options):
    torch.manual_seed(0)
    options = {"prior": priors.Gaussian(), "gaussian": "laplace", **options}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return ssla.fit(nn.Linear(3, outputs).double(), (X, y), likelihood=likelihood, **options)


GAUSSIAN = fit(L.Gaussian(noise=0.5), Y)
POISSON = fit(L.Poisson(), COUNTS)
STUDENT = fit(L.StudentT(4.0, 0.4), Y)


def square(y):
    return y * y


def hinge(y):
    return (y - 1).clamp_min(0)


def questions(predictive):
    """(name, value) of one member, (N,) each."""
    yield "mean", predictive.mean
    yield "sd", predictive.stddev
    yield "median", predictive.icdf(0.5)
    yield "upper", predictive.icdf(0.95)
    yield "event", probability(predictive, (0.5, 2.0))
    yield "square", ssla.predictive.expectation.expect(predictive, square)
    yield "hinge", ssla.predictive.expectation.expect(predictive, hinge)
    for j in range(GRID.shape[1]):
        yield f"cdf {j}", predictive.cdf(GRID[:, j])


def bounds(c):
    """The same of a credal set."""
    quantiles = c.quantile([0.5, 0.95])
    cdf = c.cdf(GRID)
    answer = {
        "mean": c.mean,
        "sd": c.stddev,
        "event": c.probability((0.5, 2.0)),
        "square": c.expectation(square),
    }
    answer |= {
        "median": (quantiles.lower[:, 0], quantiles.upper[:, 0]),
        "upper": (quantiles.lower[:, 1], quantiles.upper[:, 1]),
    }
    answer["hinge"] = c.expectation(hinge)
    return answer | {f"cdf {j}": (cdf.lower[:, j], cdf.upper[:, j]) for j in range(GRID.shape[1])}


# --- finite sets --------------------------------------------------------------------------------


@pytest.mark.parametrize("convention", ["exact", "paper", "additive"])
@pytest.mark.parametrize(
    "posterior", [GAUSSIAN, POISSON, STUDENT], ids=["gaussian", "poisson", "student"]
)
def test_bounds_hold_every_member_and_are_reached(posterior, convention):
    c = ssla.credal(posterior, NEW, LIST, convention)
    held = bounds(c)
    members = [
        dict(questions(posterior.with_prior(p, convention).predict(NEW))) for p in LIST.values()
    ]
    for name, (lower, upper) in held.items():
        values = torch.stack([m[name].double() for m in members])
        assert (lower <= upper).all()
        assert torch.equal(lower, values.amin(0))
        assert torch.equal(upper, values.amax(0))
    assert c.convention == convention
    assert (c.imprecision() >= c.cdf(torch.zeros(3)).imprecision - 0.02).all()


@pytest.mark.parametrize(
    "priors_",
    [[priors.Gaussian(2.0, 0.3)], priors.Box((0.3, 0.3), (2.0, 2.0))],
    ids=["list", "box"],
)
def test_one_prior_gives_the_predictive(priors_):
    c = ssla.credal(GAUSSIAN, NEW, priors_)
    p = GAUSSIAN.with_prior(priors.Gaussian(2.0, 0.3)).predict(NEW)
    single = dict(questions(p))
    for name, (lower, upper) in bounds(c).items():
        assert (upper - lower).abs().max() < 1e-12
        assert (lower - single[name]).abs().max() < 1e-9
    assert (c.interval(0.9) - p.interval(0.9)).abs().max() < 1e-4
    region = c.hdr(0.9)
    assert (torch.cat(region, 1) - p.interval(0.9)).abs().max() < 1e-9
    assert c.imprecision().abs().max() < 1e-12
    assert c.imprecision((0, 1)).abs().max() < 1e-12
    d = c.decomposition(0.9)
    assert d.imprecision.abs().max() < 1e-9
    assert (d.narrowest - d.widest).abs().max() < 1e-9


def test_mixtures_of_members_stay_inside():
    c = ssla.credal(GAUSSIAN, NEW, LIST)
    members = [GAUSSIAN.with_prior(p).predict(NEW) for p in LIST.values()]
    generator = torch.Generator().manual_seed(0)
    for _ in range(20):
        w = torch.rand(4, generator=generator, dtype=torch.float64)
        w = w / w.sum()
        mixed = sum(wi * p.cdf(GRID) for wi, p in zip(w, members, strict=True))
        lower, upper = c.cdf(GRID)
        assert ((mixed >= lower - 1e-12) & (mixed <= upper + 1e-12)).all()


def test_the_interval_is_the_smallest_that_every_member_allows():
    members = [ssla.predictive.from_marginal(L.Gaussian(noise=s), torch.tensor([[m]]).double(), torch.zeros(1, 1, 1)) for m, s in
               [(0.0, 1.0), (0.7, 1.3), (-0.2, 0.6)]]  # fmt: skip
    a, b = find_smallest_interval(members, 0.9)[0].tolist()
    laws = [stats.norm(m, s) for m, s in [(0.0, 1.0), (0.7, 1.3), (-0.2, 0.6)]]
    least = min(law.cdf(b) - law.cdf(a) for law in laws)
    assert 0.9 - 1e-6 <= least < 0.9 + 1e-3

    def width(start):
        end = optimize.brentq(
            lambda t: min(law.cdf(t) - law.cdf(start) for law in laws) - 0.9, start, 50.0
        )
        return end - start

    starts = np.linspace(-2.2, min(law.ppf(0.1 - 1e-9) for law in laws), 150)
    assert abs((b - a) - min(width(s) for s in starts)) < 1e-4


@pytest.mark.parametrize(
    "posterior", [GAUSSIAN, POISSON, STUDENT], ids=["gaussian", "poisson", "student"]
)
def test_every_member_gives_the_interval_its_probability(posterior):
    for chosen in (LIST, priors.Box((0.0, 0.0), (0.2, 20.0))):
        ends = ssla.credal(posterior, NEW, chosen).interval(0.9)
        members = (
            LIST.values() if chosen is LIST else [priors.Gaussian(t) for t in (0.2, 1.0, 5.0, 20.0)]
        )
        for prior in members:
            p = posterior.with_prior(prior).predict(NEW)
            before = ends[:, 0] - float(posterior is POISSON)
            assert (p.cdf(ends[:, 1]) - p.cdf(before) >= 0.9 - 1e-4).all()


def test_the_union_of_regions_merges_what_overlaps():
    nan = math.nan
    one = Regions(torch.tensor([[0.0, 4.0], [0.0, nan]]), torch.tensor([[1.0, 5.0], [2.0, nan]]))
    two = Regions(torch.tensor([[0.5], [3.0]]), torch.tensor([[2.0], [4.0]]))
    found = merge_regions([one, two])
    assert found.lower.tolist() == [[0.0, 4.0], [0.0, 3.0]]
    assert found.upper.tolist() == [[2.0, 5.0], [2.0, 4.0]]
    c = ssla.credal(GAUSSIAN, NEW, LIST)
    region = c.hdr(0.8)
    for prior in LIST.values():
        ends = GAUSSIAN.with_prior(prior).predict(NEW).interval(0.8)
        assert (
            (region.lower[:, 0] <= ends[:, 0] + 1e-12)
            & (region.upper.nan_to_num(-math.inf).amax(1) >= ends[:, 1] - 1e-12)
        ).all()


def test_classes_have_bounds_too():
    post = fit(L.Categorical(), COUNTS.clamp_max(2).long(), outputs=3)
    c = ssla.credal(post, NEW, (0.1, 10.0, 3))
    lower, upper = c.probability([1, 2])
    assert (lower < upper).all()
    other = c.probability([0])
    assert torch.allclose(lower, 1 - other.upper)  # conjugacy of lower and upper probability
    with pytest.raises(TypeError, match="Classes have no order"):
        c.cdf(torch.zeros(3))


# --- boxes ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("structure", ["dense", "kfac", "diag"])
@pytest.mark.parametrize("kind", ["gaussian", "poisson"])
def test_the_box_holds_its_random_members(kind, structure):
    """Dense random samples of means and precisions, each put in by with_prior."""
    post = (
        fit(L.Gaussian(noise=0.5), Y, structure=structure)
        if kind == "gaussian"
        else fit(L.Poisson(), COUNTS, structure=structure)
    )
    c = ssla.credal(post, NEW, BOX)
    held = bounds(c) if kind == "gaussian" else {"mean": c.mean, "event": c.probability((0.5, 2.0))}
    moves = kind == "gaussian" and structure != "diag"
    assert bool(c.notes) != moves
    generator = torch.Generator().manual_seed(1)
    best = {name: torch.full((3,), -math.inf, dtype=torch.float64) for name in held}
    for _ in range(300 if kind == "gaussian" else 25):
        member = dict(
            questions(post.with_prior(BOX.sample(post.network.layout, generator)).predict(NEW))
        )
        for name, (lower, upper) in held.items():
            assert (member[name] >= lower - 1e-7).all(), name
            assert (member[name] <= upper + 1e-7).all(), name
            best[name] = torch.maximum(best[name], member[name].double())
    assert all((lower <= upper).all() for lower, upper in held.values())


def test_the_extremes_of_a_box_are_members_and_not_only_its_corners():
    """cdf at y is not monotone in the precision: the bound lies inside, below every corner's
    value.
    """
    post = fit(L.Gaussian(noise=0.5), Y)
    box = priors.Box(mean=(2.0, 2.0), precision=(1e-3, 1e3))
    c = ssla.credal(post, NEW, box)
    y = torch.tensor([1.3, 0.5, 3.0], dtype=torch.float64)
    lower, upper = c.cdf(y)
    levels = torch.logspace(-3, 3, 2001, dtype=torch.float64)
    values = torch.stack(
        [post.with_prior(priors.Gaussian(float(t), 2.0)).predict(NEW).cdf(y) for t in levels[::10]]
    )
    corners = values[[0, -1]]
    assert (lower <= values.amin(0) + 1e-9).all()
    assert (upper >= values.amax(0) - 1e-9).all()
    assert (lower - values.amin(0)).abs().max() < 1e-3
    inside = (values.amin(0) < corners.amin(0) - 1e-4) | (values.amax(0) > corners.amax(0) + 1e-4)
    assert inside.any()


def test_means_sweep_an_interval_of_outputs_that_corners_of_the_hyperrectangle_reach():
    post = fit(L.Gaussian(noise=0.5), Y)
    tau = 5.0
    c = ssla.credal(post, NEW, priors.Box(mean=(-1.0, 2.0), precision=(tau, tau)))
    layout = post.network.layout
    everything = []
    for corner in torch.cartesian_prod(*[torch.tensor([-1.0, 2.0], dtype=torch.float64)] * 4):
        everything.append(
            post.with_prior(priors.Gaussian(tau, dict(layout.unpack(corner)))).predict(NEW).mean
        )
    means = torch.stack(everything)
    assert (c.mean.lower - means.amin(0)).abs().max() < 1e-9
    assert (c.mean.upper - means.amax(0)).abs().max() < 1e-9


def test_boxes_by_layer_need_blocks():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).double().eval()
    box = priors.Box(precision={"0": (0.1, 1.0), "2": (1.0, 10.0)})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        kfac, dense = (
            ssla.fit(
                net,
                (X, Y),
                likelihood=L.Gaussian(noise=0.5),
                prior=priors.Gaussian(),
                weights="all",
                structure=s,
            )
            for s in ("kfac", "dense")
        )
    c = ssla.credal(kfac, NEW, box)
    assert c.names == ("precision of 0", "precision of 2")
    lower, upper = c.stddev
    generator = torch.Generator().manual_seed(0)
    for _ in range(50):
        sd = kfac.with_prior(box.sample(kfac.network.layout, generator)).predict(NEW).stddev
        assert ((sd >= lower - 1e-9) & (sd <= upper + 1e-9)).all()
    with pytest.raises(ValueError, match="needs structure='kfac' or 'diag'"):
        ssla.credal(dense, NEW, box)
    with pytest.raises(ValueError, match="one range of precisions for each layer"):
        ssla.credal(
            kfac,
            NEW,
            priors.Box(precision={"0.weight": (0.1, 1.0), "0.bias": (0.1, 2.0), "2": (1.0, 10.0)}),
        )
    whole = ssla.credal(dense, NEW, priors.Box(precision=(0.5, 5.0)))
    assert whole.names == ("precision",)


FEW = torch.randn(4, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(9))


def few_rows(structure):
    """Seven parameters and four rows: `Dense` keeps rows in place of a matrix."""
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return ssla.fit(
            nn.Linear(6, 1).double(),
            (FEW, Y[:4]),
            likelihood=L.Gaussian(noise=0.5),
            prior=priors.Gaussian(),
            structure=structure,
        )


@pytest.mark.parametrize("structure", ["dense", "low_rank"])
def test_a_box_over_few_rows_agrees_with_the_matrix_form(structure):
    thin, whole = few_rows(structure), few_rows(structures.Dense(dual=False))
    assert structure != "dense" or (
        thin.statistics.curvature.matrix is None and whole.statistics.curvature.matrix is not None
    )
    new = torch.randn(3, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(10))
    ours, theirs = ssla.credal(thin, new, BOX), ssla.credal(whole, new, BOX)
    names = ("mean", "stddev") if structure == "dense" else ("stddev",)  # θ̂ stays with low_rank
    for mine, other in ((getattr(ours, name), getattr(theirs, name)) for name in names):
        assert torch.allclose(mine.lower, other.lower, atol=1e-9)
        assert torch.allclose(mine.upper, other.upper, atol=1e-9)
        assert mine.imprecision.min() > 0.01


def test_a_box_over_few_rows_holds_random_members_fitted_directly_and_is_reached():
    post, generator = few_rows("dense"), torch.Generator().manual_seed(0)
    new = torch.randn(3, 6, dtype=torch.float64, generator=generator)
    c = ssla.credal(post, new, BOX)
    mean, stddev, found = c.mean, c.stddev, []
    for _ in range(60):
        prior = BOX.sample(post.network.layout, generator)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            member = ssla.fit(
                nn.Linear(6, 1).double(),
                (FEW, Y[:4]),
                likelihood=L.Gaussian(noise=0.5),
                prior=prior,
            ).predict(new)
        found.append(member.stddev)
        for bounds, value in ((mean, member.mean), (stddev, member.stddev)):
            assert ((value >= bounds.lower - 1e-8) & (value <= bounds.upper + 1e-8)).all()
    seen = torch.stack(
        found
    )  # the standard deviation is a function of the precision alone, so that some members come close
    assert (seen.amin(0) - stddev.lower).abs().max() < 0.1 * stddev.imprecision.max()
    assert (seen.amax(0) - stddev.upper).abs().max() < 0.1 * stddev.imprecision.max()


def test_a_box_by_layer_over_few_rows_is_refused_for_the_right_reason():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1)).double().eval()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        post = ssla.fit(
            net,
            (X[:5], Y[:5]),
            likelihood=L.Gaussian(noise=0.5),
            prior=priors.Gaussian(),
            weights="all",
        )
    with pytest.raises(
        ValueError,
        match=r"different precisions by layer .* structure='dense'\. Give one range for all layers",
    ):
        ssla.credal(post, NEW, priors.Box(precision={"0": (0.1, 1.0), "2": (1.0, 10.0)}))
    assert ssla.credal(post, NEW, priors.Box(precision=(0.5, 5.0))).names == ("precision",)


def test_imprecision_shrinks_with_data_and_width_does_not():
    generator = torch.Generator().manual_seed(3)
    found = []
    for n in (20, 2000):
        x = torch.randn(n, 3, dtype=torch.float64, generator=generator)
        y = x[:, 0] + 0.5 * torch.randn(n, dtype=torch.float64, generator=generator)
        post = ssla.fit(
            nn.Linear(3, 1).double(),
            (x, y),
            likelihood=L.Gaussian(noise=0.5),
            prior=priors.Gaussian(),
        )
        found.append(ssla.credal(post, NEW, BOX).decomposition())
    assert (found[1].imprecision < 0.05 * found[0].imprecision).all()
    assert (found[1].narrowest > 0.5 * found[0].narrowest).all()
    assert (found[1].narrowest <= found[1].widest).all()


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (
            lambda: priors.Box(precision=(0.0, 1.0)),
            ValueError,
            "Box precision must be .* 0 < low ≤ high",
        ),
        (lambda: priors.Box(mean=(1.0, 0.0)), ValueError, "Box mean must be"),
        (lambda: ssla.credal(GAUSSIAN, NEW, BOX, "paper"), ValueError, "for the exact convention"),
        (lambda: ssla.credal(GAUSSIAN, NEW, []), ValueError, "priors is empty"),
        (
            lambda: ssla.credal(GAUSSIAN, NEW, LIST).interval(95),
            ValueError,
            "level must be strictly between",
        ),
        (
            lambda: ssla.credal(fit(L.Gaussian(noise=0.5), torch.stack([Y, Y], 1), 2), NEW, BOX),
            ValueError,
            "with one output",
        ),
        (
            lambda: ssla.credal(fit(L.Bernoulli(), (Y > 0).long()), NEW, LIST).interval(),
            TypeError,
            "Classes have no intervals",
        ),
    ],
)
def test_mistakes_are_named(call, error, message):
    with pytest.raises(error, match=message):
        call()
