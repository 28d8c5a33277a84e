"""Total-variation distances of predictives, and the decomposition of a credal set by them."""

import itertools
import math
import warnings

import numpy as np
import pytest
import torch
from scipy import integrate, stats
from torch import nn

import ssla
from ssla import likelihoods as L
from ssla import priors
from ssla.diagnostics.credal_sets import Credal
from ssla.diagnostics.predictive_sets import FiniteMembers
from ssla.diagnostics.total_variation import compute_distance
from ssla.predictive import from_marginal


def plug_in(likelihood, f):
    """The predictive p(y|f) of known outputs f (N, C)."""
    f = torch.as_tensor(f, dtype=torch.float64)
    return from_marginal(likelihood, f, torch.zeros(*f.shape, f.shape[1]).double(), "plug_in")


def gaussian(mean, sd):
    return plug_in(L.Gaussian(noise=sd), [[mean]])


def classes(*rows):
    """Distributions of classes (N, C), given by their probabilities."""
    return plug_in(L.Categorical(), torch.tensor(rows, dtype=torch.float64).log().clamp_min(-1e4))


def credal_set(*predictives):
    names = tuple(map(str, range(len(predictives))))
    return Credal(FiniteMembers(predictives), names, "exact")


def random_classes(rows, count, seed):
    generator = torch.Generator().manual_seed(seed)
    return classes(*torch.rand(rows, count, dtype=torch.float64, generator=generator).tolist())


# --- distances of two distributions -------------------------------------------------------------


@pytest.mark.parametrize("shift", [1e-6, 0.1, 1.0, 3.0, 8.0, 30.0])
def test_gaussians_of_equal_variance_have_the_closed_form(shift):
    found = compute_distance(gaussian(0.0, 2.0), gaussian(2.0 * shift, 2.0))
    # torch's erf has errors of 6e-10.
    assert abs(found.item() - math.erf(shift / math.sqrt(8))) < 2e-9


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ((0.0, 1.0), (0.5, 2.0)),
        ((0.0, 1.0), (0.0, 1.01)),
        ((0.0, 1.0), (3.0, 0.01)),
        ((1.0, 2.0), (-1.0, 3.0)),
    ],
)
def test_gaussians_of_unequal_variance_differ_between_their_two_crossings(first, second):
    (m, s), (n, t) = first, second
    equation = [
        s**-2 - t**-2,
        2 * (n / t**2 - m / s**2),
        (m / s) ** 2 - (n / t) ** 2 + 2 * math.log(s / t),
    ]
    ends = np.sort(np.roots(equation).real)
    expected = abs(np.diff(stats.norm.cdf(ends, m, s)) - np.diff(stats.norm.cdf(ends, n, t)))
    assert abs(compute_distance(gaussian(m, s), gaussian(n, t)).item() - expected[0]) < 1e-8


def test_other_densities_agree_with_an_integral_of_the_densities():
    """Student's t against Student's t: no normal law, several crossings of unequal tails."""
    first, second = plug_in(L.StudentT(3.0, 0.5), [[0.0]]), plug_in(L.StudentT(8.0, 1.0), [[0.4]])
    p, q = stats.t(3.0, 0.0, 0.5), stats.t(8.0, 0.4, 1.0)
    expected = sum(
        integrate.quad(lambda y: abs(p.pdf(y) - q.pdf(y)) / 2, a, b, limit=400, epsabs=1e-10)[0]
        for a, b in itertools.pairwise([-400, -5, -1, 0, 0.5, 1, 5, 400])
    )
    assert abs(compute_distance(first, second).item() - expected) < 1e-6


@pytest.mark.parametrize(("first", "second"), [(0.5, 0.9), (30.0, 36.0), (2.0, 400.0)])
def test_counts_agree_with_their_sum(first, second):
    y = np.arange(2000)
    expected = np.abs(stats.poisson.pmf(y, first) - stats.poisson.pmf(y, second)).sum() / 2
    found = compute_distance(
        plug_in(L.Poisson(), [[math.log(first)]]), plug_in(L.Poisson(), [[math.log(second)]])
    )
    assert abs(found.item() - expected) < 1e-7


def test_large_counts_agree_with_their_sum():
    """Beyond a thousand possible counts they are joined in cells."""
    y = np.arange(30_000, 50_000)
    expected = np.abs(stats.poisson.pmf(y, 40_000) - stats.poisson.pmf(y, 40_300)).sum() / 2
    found = compute_distance(
        plug_in(L.Poisson(), [[math.log(40_000)]]), plug_in(L.Poisson(), [[math.log(40_300)]])
    )
    assert abs(found.item() - expected) < 1e-5


def test_the_distance_is_a_metric_and_the_largest_difference_of_an_event():
    p, q, r = (random_classes(20, 4, seed) for seed in range(3))
    distance = compute_distance(p, q)
    assert torch.equal(distance, compute_distance(q, p))
    assert (compute_distance(p, p) == 0).all()
    assert (distance <= compute_distance(p, r) + compute_distance(r, q) + 1e-15).all()
    events = [list(event) for k in range(5) for event in itertools.combinations(range(4), k)]
    differences = [(p.probs[:, event].sum(1) - q.probs[:, event].sum(1)).abs() for event in events]
    torch.testing.assert_close(torch.stack(differences).amax(0), distance, rtol=0, atol=1e-15)


# --- the decomposition of a set -----------------------------------------------------------------


def test_one_member_has_no_epistemic_part_and_its_error_as_aleatoric_part():
    p = random_classes(10, 5, 0)
    parts = credal_set(p).total_variation()
    assert (parts.epistemic == 0).all()
    torch.testing.assert_close(parts.aleatoric, 1 - p.probs.amax(1))
    assert torch.equal(parts.total, parts.aleatoric + parts.epistemic)
    certain = classes([1.0, 0.0, 0.0])
    assert credal_set(certain).total_variation() == (0.0, 0.0, 0.0)


def test_the_set_of_all_distributions_is_all_epistemic():
    corners = [classes(row) for row in torch.eye(3).tolist()]
    assert credal_set(*corners).total_variation() == (1.0, 0.0, 1.0)


def test_two_classes_have_the_established_measures():
    low, high = torch.tensor([0.1, 0.3, 0.6]).double(), torch.tensor([0.4, 0.8, 0.9]).double()
    middle = (low + high) / 2
    members = [
        plug_in(L.Bernoulli(), torch.logit(probability)[:, None])
        for probability in (low, middle, high)
    ]
    total, aleatoric, epistemic = credal_set(*members).total_variation()
    torch.testing.assert_close(epistemic, high - low)
    torch.testing.assert_close(aleatoric, torch.minimum(low, 1 - high))
    torch.testing.assert_close(total, torch.minimum(high, 1 - low))


def test_two_members_of_three_classes_by_hand():
    total, aleatoric, epistemic = credal_set(
        classes([0.5, 0.3, 0.2]), classes([0.1, 0.3, 0.6])
    ).total_variation()
    assert abs(epistemic.item() - 0.4) < 1e-15
    assert abs(aleatoric.item() - 0.4) < 1e-15
    assert abs(total.item() - 0.8) < 1e-15


def test_parts_are_monotone_in_the_set_and_mixtures_change_nothing():
    members = [random_classes(50, 4, seed) for seed in range(5)]
    before = credal_set(members[0]).total_variation()
    for size in range(2, 6):
        after = credal_set(*members[:size]).total_variation()
        assert (after.epistemic >= before.epistemic).all()
        assert (after.aleatoric <= before.aleatoric).all()
        before = after
    mixed = ssla.mixture(members, [0.4, 0.3, 0.1, 0.1, 0.1])
    again = credal_set(*members, mixed).total_variation()
    torch.testing.assert_close(torch.stack(again), torch.stack(before), rtol=0, atol=1e-15)


def test_names_of_classes_do_not_matter():
    order = torch.tensor([2, 0, 3, 1])
    members = [random_classes(30, 4, seed) for seed in range(3)]
    renamed = [classes(*p.probs[:, order].tolist()) for p in members]
    found = torch.stack(credal_set(*members).total_variation())
    torch.testing.assert_close(torch.stack(credal_set(*renamed).total_variation()), found)


@pytest.mark.parametrize("count", [2, 3, 4, 5, 9])
def test_the_total_has_the_stated_bound_and_reaches_it(count):
    bound = 2 - 1 / (count // 2)
    members = [random_classes(400, count, seed) for seed in range(3)]
    assert (credal_set(*members).total_variation().total <= bound + 1e-12).all()
    assert count > 3 or bound == 1.0
    half = count // 2
    apart = [
        classes([1.0] * half + [0.0] * (count - half)),
        classes([0.0] * (count - half) + [1.0] * half),
    ]
    assert abs(credal_set(*apart).total_variation().total.item() - bound) < 1e-12


def test_counts_have_both_parts():
    rates = (2.0, 3.0, 5.0)
    total, aleatoric, epistemic = credal_set(
        *(plug_in(L.Poisson(), [[math.log(rate)]]) for rate in rates)
    ).total_variation()
    y = np.arange(200)
    masses = [stats.poisson.pmf(y, rate) for rate in rates]
    assert abs(aleatoric.item() - (1 - max(mass.max() for mass in masses))) < 1e-7
    assert abs(epistemic.item() - np.abs(masses[0] - masses[2]).sum() / 2) < 1e-7
    assert total == aleatoric + epistemic


# --- sets of priors -----------------------------------------------------------------------------

G = torch.Generator().manual_seed(8)
X = torch.randn(25, 3, dtype=torch.float64, generator=G)
Y = X @ torch.tensor([0.8, -0.4, 0.1], dtype=torch.float64)
NEW = torch.randn(4, 3, dtype=torch.float64, generator=G)


def fit(likelihood, y, outputs=1):
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return ssla.fit(
            nn.Linear(3, outputs).double(), (X, y), likelihood=likelihood, prior=priors.Gaussian()
        )


def test_a_box_has_the_distance_of_its_farthest_members():
    posterior = fit(L.Gaussian(noise=0.5), Y)
    box = priors.Box(mean=(-0.5, 1.0), precision=(0.2, 20.0))
    found = ssla.credal(posterior, NEW, box).distance()
    generator = torch.Generator().manual_seed(0)
    layout = posterior.network.layout
    members = [posterior.with_prior(box.sample(layout, generator)).predict(NEW) for _ in range(40)]
    seen = torch.stack(
        [compute_distance(p, q) for p, q in itertools.combinations(members, 2)]
    ).amax(0)
    assert (found >= seen - 1e-9).all()
    assert (found <= 1.0).all()
    # Corners of the set of f̂ and of the precisions are members, so the distance is reached.
    fixed = priors.Box(mean=(0.3, 0.3), precision=(2.0, 2.0))
    assert ssla.credal(posterior, NEW, fixed).distance().abs().max() < 1e-12


def test_a_box_over_precisions_agrees_with_a_fine_grid():
    posterior = fit(L.Categorical(), (Y > 0).long() + (Y > 1).long(), 3)
    credal = ssla.credal(posterior, NEW, priors.Box(precision=(0.05, 50.0)))
    parts = credal.total_variation()
    precisions = torch.logspace(math.log10(0.05), math.log10(50.0), 25, dtype=torch.float64)
    members = [posterior.with_prior(priors.Gaussian(float(t))).predict(NEW) for t in precisions]
    expected = credal_set(*members).total_variation()
    torch.testing.assert_close(parts.epistemic, expected.epistemic, rtol=0, atol=2e-4)
    torch.testing.assert_close(parts.aleatoric, expected.aleatoric, rtol=0, atol=2e-4)
    assert (parts.epistemic >= expected.epistemic - 1e-9).all()


def test_bounds_of_all_classes_are_those_of_each_class():
    posterior = fit(L.Categorical(), (Y > 0).long() + (Y > 1).long(), 3)
    for chosen in ([priors.Gaussian(0.1), priors.Gaussian(9.0)], priors.Box(precision=(0.1, 9.0))):
        credal = ssla.credal(posterior, NEW, chosen)
        for name in ("probs", "mean"):
            bounds = getattr(credal, name)
            assert bounds.lower.shape == (4, 3)
            for c in range(3):
                single = credal.probability([c])
                torch.testing.assert_close(bounds.lower[:, c], single.lower, rtol=0, atol=1e-9)
                torch.testing.assert_close(bounds.upper[:, c], single.upper, rtol=0, atol=1e-9)
        assert credal.stddev.lower.shape == (4, 3)


def test_several_targets_have_bounds_of_their_means():
    posterior = fit(L.Gaussian(noise=0.5), torch.stack([Y, -Y], 1), 2)
    strong, weak = (posterior.with_prior(priors.Gaussian(t)).predict(NEW) for t in (9.0, 0.1))
    bounds = ssla.credal(posterior, NEW, [priors.Gaussian(9.0), priors.Gaussian(0.1)]).mean
    torch.testing.assert_close(bounds.lower, torch.minimum(strong.mean, weak.mean))
    torch.testing.assert_close(bounds.upper, torch.maximum(strong.mean, weak.mean))


def test_targets_without_a_decomposition_are_refused():
    numbers = ssla.credal(fit(L.Gaussian(noise=0.5), Y), NEW, [priors.Gaussian(1.0)])
    with pytest.raises(TypeError, match=r"for classes and counts.*Ask for distance\(\)"):
        numbers.total_variation()
    assert (numbers.distance() == 0).all()
    with pytest.raises(AttributeError, match="no 'probs'"):
        _ = numbers.probs
    vectors = fit(L.Gaussian(noise=0.5), torch.stack([Y, Y], 1), 2)
    pair = ssla.credal(vectors, NEW, [priors.Gaussian(1.0), priors.Gaussian(2.0)])
    with pytest.raises(TypeError, match=r"kind 'vector'\. Ask for the bounds of the mean"):
        pair.distance()
