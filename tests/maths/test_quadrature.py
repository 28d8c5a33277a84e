"""Densities known pointwise, against SciPy."""

import math

import pytest
import torch
from scipy import stats

from ssla.maths import quadrature
from ssla.maths.quadrature.grid import find_regions_above
from ssla.maths.quadrature.search import _plan_retries, _Verdict, _Work

CASES = {
    "normal": stats.norm(),
    "shifted": stats.norm(5, 2),
    "narrow": stats.norm(0.3, 0.01),
    "student 3": stats.t(3),
    "student 8": stats.t(8),
    "logistic": stats.logistic(),
    "gumbel": stats.gumbel_r(),
    "skew": stats.skewnorm(8),
}


def grid_of(distribution, rows=4):
    def log_density(z, index):
        return torch.from_numpy(distribution.logpdf(z.numpy())) + math.log(0.7) + 0 * index[:, None]

    built = quadrature.build_grids(log_density, torch.zeros(rows), torch.ones(rows))
    assert len(built) == 1
    return built[0].grid


@pytest.mark.parametrize("name", CASES)
def test_mass_and_moments(name):
    d, grid = CASES[name], grid_of(CASES[name])
    assert grid.accurate.all()
    assert torch.allclose(grid.log_mass.exp(), torch.tensor(0.7, dtype=torch.float64), rtol=3e-7)
    mean, variance = grid.moments
    assert (mean - d.mean()).abs().max() < 1e-5 * d.std()
    assert (variance / d.var() - 1).abs().max() < 2e-5


@pytest.mark.parametrize("name", CASES)
def test_cdf_and_its_inverse(name):
    d, grid = CASES[name], grid_of(CASES[name])
    q = torch.tensor(
        [1e-5, 1e-3, 0.025, 0.3, 0.5, 0.9, 0.999, 1 - 1e-5], dtype=torch.float64
    ).expand(4, -1)
    z = torch.from_numpy(d.ppf(q.numpy()))
    assert (grid.cdf(z) - q).abs().max() < 5e-6
    assert (grid.cdf(grid.icdf(q)) - q).abs().max() < 1e-11
    assert ((grid.icdf(q) - z) / d.std()).abs().max() < 2e-3
    assert grid.icdf(torch.tensor([[0.0, 1.0]] * 4)).tolist() == [[-math.inf, math.inf]] * 4


def test_far_tails_follow_the_power_law():
    grid = grid_of(stats.t(3))
    z = torch.tensor([[-3e3, 3e3]] * 4, dtype=torch.float64)
    assert torch.allclose(grid.cdf(z)[:, 0], torch.tensor(stats.t(3).cdf(-3e3)), rtol=0.05)
    assert torch.allclose(1 - grid.cdf(z)[:, 1], torch.tensor(stats.t(3).sf(3e3)), rtol=0.05)


def test_infinite_variance_is_infinite():
    assert torch.isinf(grid_of(stats.t(1.9)).moments[1]).all()


def test_two_modes_give_two_intervals():
    def log_density(z, rows):
        left, right = stats.norm(-4, 1).logpdf(z.numpy()), stats.norm(4, 0.5).logpdf(z.numpy())
        return torch.logaddexp(torch.from_numpy(left), torch.from_numpy(right)) - math.log(2)

    ((_, grid),) = quadrature.build_grids(log_density, torch.zeros(2), torch.full((2,), 4.0))
    region = grid.hdr(0.9)
    assert region.lower.shape == (2, 2)
    inside = (grid.cdf(region.upper) - grid.cdf(region.lower)).sum(1)
    assert torch.allclose(inside, torch.tensor(0.9, dtype=torch.float64), atol=1e-6)
    heights = log_density(torch.cat([region.lower, region.upper], 1), None)
    assert (heights - heights[:, :1]).abs().max() < 5e-3  # the same density at all four ends
    one = grid.hdr(0.3)
    assert one.lower.shape == (2, 1)
    assert (one.lower > 3).all()


@pytest.mark.parametrize(("centre", "scale"), [(1e5, 1e-2), (-3e-3, 1e-4), (0.0, 1e6), (7.0, 20.0)])
def test_locate_finds_densities_anywhere(centre, scale):
    def log_density(z, rows):
        return torch.from_numpy(stats.norm(centre, scale).logpdf(z.numpy()))

    c, s = quadrature.locate_densities(log_density, 3)
    assert ((c - centre).abs() < 0.5 * scale).all()
    assert ((s > 0.3 * scale) & (s < 3 * scale)).all()


def test_a_jump_is_flagged_not_smoothed_over():
    def log_density(z, rows):
        return torch.where((z > -0.43) & (z < 0.61), 0.0, -200.0).double()

    built = quadrature.build_grids(log_density, torch.zeros(1), torch.ones(1))
    assert not built[0].grid.accurate.any()


def test_a_density_without_integral_is_cut_at_its_valley_and_flagged():
    """A normal whose log density turns up again at |z| = 6, as a Newton step far from its point
    does.
    """

    def log_density(z, rows):
        return -0.5 * z**2 + z**4 / 144

    ((_, grid),) = quadrature.build_grids(log_density, torch.zeros(2), torch.ones(2))
    assert not grid.accurate.any()
    valley = 6.0
    z = torch.linspace(-valley, valley, 20_001, dtype=torch.float64)
    expected = torch.trapezoid(log_density(z, None).exp(), z)
    assert torch.allclose(grid.log_mass.exp(), expected.expand(2), rtol=1e-4)
    assert torch.isfinite(grid.moments[1]).all()
    assert torch.isfinite(
        grid.icdf(torch.tensor([[1e-4, 0.5, 0.9999]] * 2, dtype=torch.float64))
    ).all()


@pytest.mark.parametrize(("height", "steep", "at"), [(-30.0, 60.0, 3.0), (-60.0, 80.0, 5.0)])
def test_a_cliff_does_not_make_the_spline_overshoot(height, steep, at):
    """The trapezoid alone accepts these at a few nodes, where the spline puts mass on the
    cliff's edge.
    """

    def log_density(z, rows):
        return -0.5 * z**2 + height * torch.sigmoid((z - at) * steep)

    ((_, grid),) = quadrature.build_grids(log_density, torch.zeros(1), torch.ones(1))
    z = torch.linspace(-12, 12, 400_001, dtype=torch.float64)
    exact = log_density(z, None).exp().cumsum(0)
    q = torch.tensor([0.025, 0.5, 0.975], dtype=torch.float64)
    expected = z[torch.searchsorted(exact / exact[-1], q)]
    assert (grid.icdf(q[None])[0] - expected).abs().max() < 2e-3


@pytest.mark.parametrize("end", [0, 1])
def test_a_root_at_an_end_of_its_bracket_is_found_whatever_its_sign_is_by_rounding(end):
    """0.5 is the distribution function at a fine point of a symmetric density: there it was
    0.488, by an error of 1e-17.
    """
    rounding = torch.tensor([-1e-17, 0.0, 1e-17], dtype=torch.float64)
    low, high = torch.zeros(3, dtype=torch.float64), torch.ones(3, dtype=torch.float64)
    found = quadrature.bracketed_root(lambda x: torch.where(x == end, rounding, x - end), low, high)
    torch.testing.assert_close(found, torch.full_like(found, end), rtol=0, atol=1e-15)


def test_regions_end_where_the_line_between_two_places_crosses_the_threshold():
    places = torch.arange(6, dtype=torch.float64)
    heights = torch.tensor([[0.0, 2.0, 0.0, 0.0, 4.0, 4.0], [0.0, 0.0, 2.0, 0.0, 0.0, 0.0]])
    regions = find_regions_above(heights.double(), places, torch.tensor([1.0, 1.0]).double())
    assert regions.lower[0].tolist() == [0.5, 3.25]
    assert regions.upper[0].tolist() == [1.5, 5.0]  # the last place is inside: no crossing
    assert (float(regions.lower[1, 0]), float(regions.upper[1, 0])) == (1.5, 2.5)
    assert regions.lower[1, 1].isnan()


def test_rows_are_tried_again_by_the_reason_why_they_did_not_pass():
    three = torch.arange(3, dtype=torch.float64)
    work = _Work(torch.tensor([4, 5, 6]), three, three + 1, 2.0, 21, 0)
    off, coarse, heavy = torch.eye(3, dtype=torch.bool)
    verdict = _Verdict(~(off | coarse | heavy), off, coarse, heavy, three + 10, three + 2)
    retries = _plan_retries(work, verdict, ~verdict.good)
    assert [(r.rows.tolist(), r.reach, r.node_count, r.round) for r in retries] == [
        ([4], 2.0, 21, 1),  # moved
        ([5], 2.0, 41, 1),  # refined
        ([6], 3.2, 41, 1),  # widened
    ]
    assert [float(r.centre) for r in retries] == [10.0, 11.0, 12.0]
