"""One continuous target by k candidates on an equally spaced grid around ŷ, as the paper has it.

The log densities at the candidates are interpolated by a not-a-knot cubic spline (exact for a
Gaussian), and the density is normalised over the grid's range [ŷ − w, ŷ + w]. It is zero beyond:
what mass there would be is cut, and `Diagnostics.cut` has the share by the output refit.

A candidate is a y at which the weights are refitted, and ŷ the prediction of the network. A panel
is the interval between two neighbouring candidates. It is integrated in FINE sections of equal
length. A place u is a position on the grid in units of its step.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import final

import numpy as np
import torch
from torch import Tensor

from ssla._checks import warn
from ssla.likelihoods.support import Continuous
from ssla.maths.constants import cached_constant
from ssla.maths.quadrature import Regions
from ssla.maths.quadrature.grid import find_regions_above
from ssla.predictive.law import Law
from ssla.predictive.predictive import Diagnostics, Predictive
from ssla.predictive.spread import split_variance
from ssla.refit import WeightLogDensity
from ssla.refit.increments import Increments
from ssla.refit.weights.solved import NAN

FINE = 8  # a guess: sections of a panel, each with four Gauss–Legendre nodes
BISECTIONS = 50  # of a quantile and of a region's threshold: 2⁻⁵⁰ is rounding
# A guess: the share of the output refit's predictive beyond the grid from which a row is reported.
MOST_CUT = 0.02
# A guess: the difference of the trapezoidal rule on the candidates from the spline's integral, as a
# share of the mass, beyond which the candidates are too far apart.
MOST_DIFFERENCE = 0.01


@cached_constant
def _make_spline_matrix(count: int) -> Tensor:
    """Return the matrix (k, k) from values at 0, 1, …, k − 1 to their spline's second derivatives.

    The spline is cubic and not-a-knot, k = count ≥ 4.
    """
    # One equation for each node: system · (second derivatives) = differences · (values).
    system, differences = np.zeros((2, count, count))
    for node in range(1, count - 1):
        system[node, node - 1 : node + 2] = 1, 4, 1
        differences[node, node - 1 : node + 2] = 6, -12, 6
    # The third derivative does not jump at the second and the last node but one.
    system[0, :3] = system[-1, -3:] = 1, -2, 1
    return torch.from_numpy(np.linalg.solve(system, differences))


@cached_constant
def _make_legendre_rule() -> tuple[Tensor, Tensor]:
    """Return four Gauss–Legendre nodes and weights on [0, 1], each (4,)."""
    nodes, weights = np.polynomial.legendre.leggauss(4)
    return torch.from_numpy((nodes + 1) / 2), torch.from_numpy(weights / 2)


@final
@dataclass(frozen=True, eq=False)
class CandidateLaw(Law):
    """The density exp(spline(y)) / mass on [low, low + (k − 1) step], zero outside.

    Inside, places are u = (y − low)/step from 0 to k − 1: the candidates are at whole numbers.
    """

    log_density: WeightLogDensity
    support: Continuous
    low: Tensor  # (N,)
    step: float
    logs: Tensor  # (N, k) un-normalised log densities of the candidates

    kind = "scalar"

    @property
    def rows(self) -> int:
        """Return N, the number of inputs."""
        return len(self.low)

    @property
    def _panels(self) -> int:
        """Return the number of panels between candidates, k − 1."""
        return self.logs.shape[1] - 1

    def _to_places(self, y: Tensor) -> Tensor:
        """Return u = (y − low)/step for y (N, q), clamped to the grid."""
        return ((y - self.low[:, None]) / self.step).clamp(0, self._panels)

    def _to_y(self, u: Tensor) -> Tensor:
        """Return y at places u (N, q)."""
        return self.low[:, None] + self.step * u

    @cached_property
    def _peak(self) -> Tensor:
        """Return the highest log density of the candidates (N, 1)."""
        return self.logs.amax(1, keepdim=True)

    @cached_property
    def _bends(self) -> Tensor:
        """Return the second derivatives of the spline in u at the candidates (N, k)."""
        return (self.logs - self._peak) @ _make_spline_matrix(self.logs.shape[1]).mT

    def _evaluate_spline(self, u: Tensor) -> Tensor:
        """Return the spline at places u (N, q): the log density less its peak at the candidates."""
        left_node = u.nan_to_num().floor().long().clamp(0, self._panels - 1)
        t = u - left_node  # the share of the panel to the left of u, and the rest
        s = 1 - t
        relative = self.logs - self._peak
        line = s * relative.gather(1, left_node) + t * relative.gather(1, left_node + 1)
        bend = s * (s * s - 1) * self._bends.gather(1, left_node)
        bend = bend + t * (t * t - 1) * self._bends.gather(1, left_node + 1)
        return line + bend / 6

    def _integrate(self, start: Tensor, length: Tensor) -> Tensor:
        """Compute ∫ exp(spline) du from places `start` (N, q) over `length` (N, q).

        Each interval must be inside one section.
        """
        total = torch.zeros_like(start)
        for node, weight in zip(*_make_legendre_rule(), strict=True):
            total = total + weight * self._evaluate_spline(start + node * length).exp()
        return total * length

    @cached_property
    def _edges(self) -> Tensor:
        """Return the places of the ends of all sections ((k − 1)·FINE + 1,)."""
        return torch.arange(self._panels * FINE + 1, dtype=torch.float64) / FINE

    @cached_property
    def _cumulative(self) -> Tensor:
        """Return ∫ exp(spline) du from the lowest candidate to each of the edges (N, …)."""
        starts = self._edges[:-1].expand(self.rows, -1)
        integrals = self._integrate(starts, torch.full_like(starts, 1 / FINE))
        cumulative: Tensor = torch.nn.functional.pad(integrals.cumsum(1), (1, 0))
        return cumulative

    @property
    def _log_mass(self) -> Tensor:
        """Return the logarithm of the mass (N,)."""
        return self._cumulative[:, -1].log() + self._peak[:, 0] + math.log(self.step)

    @property
    def mass(self) -> Tensor:
        """Return the integral of the un-normalised density over the grid's range (N,)."""
        return self._log_mass.exp()

    @cached_property
    def _moments(self) -> tuple[Tensor, Tensor]:
        """Return mean and variance of y, (N,) each."""
        nodes, weights = _make_legendre_rule()
        u = (self._edges[:-1, None] + nodes / FINE).flatten().expand(self.rows, -1)
        shares = self._evaluate_spline(u).exp() * weights.repeat(len(self._edges) - 1) / FINE
        shares = shares / self._cumulative[:, -1:]
        mean = (shares * u).sum(1)
        variance = (shares * (u - mean[:, None]) ** 2).sum(1)
        return self.low + self.step * mean, self.step**2 * variance

    @property
    def mean(self) -> Tensor:
        """Return E[y] (N,)."""
        return self._moments[0]

    @property
    def variance(self) -> Tensor:
        """Return Var[y] (N,)."""
        return self._moments[1]

    @cached_property
    def mode(self) -> Tensor:
        """Return the y (N,) of highest density among the ends of all sections."""
        heights = self._evaluate_spline(self._edges.expand(self.rows, -1))
        return self.low + self.step * self._edges[heights.argmax(1)]

    @cached_property
    def _variance_parts(self) -> tuple[Tensor, Tensor]:
        """Return the epistemic and the aleatoric part of Var[y], (N,) each."""
        return split_variance(self.log_density, self.variance)

    @property
    def epistemic(self) -> Tensor:
        """Return the part of Var[y] that comes from the uncertainty of f (N,)."""
        return self._variance_parts[0]

    @property
    def aleatoric(self) -> Tensor:
        """Return the part of Var[y] that is noise (N,)."""
        return self._variance_parts[1]

    def check(self, y: Tensor) -> None:
        """Raise ValueError where y (N, k) is outside the support of the likelihood."""
        self.support.check(y.flatten(), 1)

    def log_prob(self, y: Tensor) -> Tensor:
        """Return the normalised log density at y (N, k), −∞ beyond the grid."""
        u = (y - self.low[:, None]) / self.step
        inside = (u >= 0) & (u <= self._panels)
        logs = (
            self._evaluate_spline(u.clamp(0, self._panels)) + self._peak - self._log_mass[:, None]
        )
        return torch.where(inside, logs, -torch.inf)

    def cdf(self, y: Tensor) -> Tensor:
        """Return P(Y ≤ y), of y's shape."""
        u = self._to_places(y)
        section = (u * FINE).nan_to_num().floor().long().clamp(0, len(self._edges) - 2)
        start = self._edges[section]
        below = self._cumulative.gather(1, section) + self._integrate(start, u - start)
        return below / self._cumulative[:, -1:]

    def icdf(self, q: Tensor) -> Tensor:
        """Return the quantiles at q (k,): (N, k)."""
        return self._compute_quantiles(q.expand(self.rows, -1))

    def _compute_quantiles(self, q: Tensor) -> Tensor:
        """Return the quantiles at probabilities q (N, k), by bisection inside a section: (N, k)."""
        target = (q * self._cumulative[:, -1:]).contiguous()
        section = torch.searchsorted(self._cumulative, target, right=True) - 1
        section = section.clamp(0, len(self._edges) - 2)
        start, rest = self._edges[section], target - self._cumulative.gather(1, section)
        low, high = torch.zeros_like(rest), torch.full_like(rest, 1 / FINE)
        for _ in range(BISECTIONS):
            middle = (low + high) / 2
            beyond = self._integrate(start, middle) > rest
            low, high = torch.where(beyond, low, middle), torch.where(beyond, middle, high)
        return self._to_y(start + (low + high) / 2 + 0 * rest)  # NaN stays NaN

    def hdr(self, level: float) -> Regions:
        """Return the smallest region of y with probability `level`, a union of intervals."""
        heights = self._evaluate_spline(self._edges.expand(self.rows, -1))
        low, high = heights.amin(1) - 1, heights.amax(1)
        for _ in range(BISECTIONS):
            middle = (low + high) / 2
            enough = self._compute_probability(self._find_regions_above(heights, middle)) >= level
            low, high = torch.where(enough, middle, low), torch.where(enough, high, middle)
        return self._find_regions_above(heights, low)

    def _find_regions_above(self, heights: Tensor, threshold: Tensor) -> Regions:
        """Return the regions of y whose heights (N, …) exceed a threshold (N,)."""
        return Regions(*map(self._to_y, find_regions_above(heights, self._edges, threshold)))

    def _compute_probability(self, regions: Regions) -> Tensor:
        """Return the probability (N,) of unions of intervals, padded with NaN."""
        lower, upper = self.cdf(regions.lower), self.cdf(regions.upper)
        return torch.nan_to_num(upper - lower).sum(1)

    def sample(self, n: int, generator: torch.Generator | None) -> Tensor:
        """Draw n values for each input (n, N), by inversion of the cdf."""
        u = torch.rand(self.rows, n, dtype=torch.float64, generator=generator)
        return self._compute_quantiles(u).mT

    def increments(self, y: Tensor) -> Increments:
        """Return the increments of refits at y (N, k), which are not interpolated."""
        return self.log_density(y)

    def find_coarse_rows(self) -> Tensor:
        """Return the rows (N,) bool in which the candidates are too far apart for the density.

        In these rows the trapezoidal rule on the candidates differs from the spline's integral.
        """
        heights = (self.logs - self._peak).exp()
        trapezoid = heights.sum(1) - (heights[:, 0] + heights[:, -1]) / 2
        return ~((trapezoid / self._cumulative[:, -1] - 1).abs() <= MOST_DIFFERENCE)


def make_candidate_predictive(
    weights: WeightLogDensity, output: Predictive, name: str
) -> Predictive:
    """Return the predictive by refits at k candidates on ŷ ± half_width.

    weights: the log density of refits of the weights, whose settings have k and half_width. output:
    the predictive of the output rung, which tells how much of the mass is cut, and answers for rows
    in which a refit fails. name: of the rung. Warns where the grid cuts more than MOST_CUT of the
    mass. Raises ValueError for other targets than one number, and where the grid leaves the
    support.
    """
    support = _require_continuous_support(weights)
    assert weights.refit.candidates is not None
    assert weights.refit.half_width is not None
    count, half_width = weights.refit.candidates, weights.refit.half_width
    y = _make_candidates(weights, support, count, half_width)

    solved = weights.solve(y)
    failed = weights.check_failures(solved).reshape(y.shape).any(1)
    logs = solved.total.reshape(y.shape)
    is_nan = weights.refit.on_failure == NAN
    logs_of_failed = (
        torch.full_like(logs, torch.nan) if is_nan else weights.output.density_at(y).log
    )
    logs = torch.where(failed[:, None], logs_of_failed, logs)
    law = CandidateLaw(weights, support, y[:, 0], 2 * half_width / (count - 1), logs)
    ends = output.law.cdf(y[:, [0, -1]])
    cut = ends[:, 0] + 1 - ends[:, 1]
    _warn_of_cut_mass(cut, half_width)
    refits = torch.full_like(failed, count, dtype=torch.long)
    rung_of_failed = "failed" if is_nan else "output"

    flags = Diagnostics(
        name,
        fallback=solved.fallback.reshape(y.shape).any(1),
        unconverged=failed,
        inaccurate=law.find_coarse_rows() & ~(failed & is_nan),
        convention=output.diagnostics.convention,
        refits=refits.clamp(max=1) if weights.refits_at_prediction else refits,
        rung=tuple(rung_of_failed if row_failed else "weights" for row_failed in failed.tolist()),
        extreme=output.diagnostics.extreme,
        linearised=weights.linearised_inputs if bool(weights.linearised_inputs.any()) else None,
        cut=cut,
    )
    return Predictive(law, weights.like, flags)


def _require_continuous_support(weights: WeightLogDensity) -> Continuous:
    """Return the support of y; raise ValueError unless y is one number on an interval."""
    support = weights.likelihood.support_for(weights.marginal.mean.shape[1])
    if not isinstance(support, Continuous) or support.kind != "real":
        raise ValueError(
            "WeightRefit(candidates=…) is for one continuous target: classes and counts have a "
            f"candidate for each value already, and this target is of kind {support.kind!r}. Leave "
            "candidates and half_width out."
        )
    return support


def _make_candidates(
    weights: WeightLogDensity, support: Continuous, count: int, half_width: float
) -> Tensor:
    """Return `count` equally spaced candidates on ŷ ± half_width for each row (N, count).

    Raises ValueError where one of them is outside the support of y.
    """
    offsets = torch.linspace(-half_width, half_width, count, dtype=torch.float64)
    y = weights.prediction[:, None] + offsets
    try:
        support.check(y.flatten(), weights.marginal.mean.shape[1])
    except ValueError as error:
        raise ValueError(
            f"The grid of candidates ŷ ± {half_width:g} leaves the support of y: {error} Give a "
            "smaller half_width."
        ) from None
    return y


def _warn_of_cut_mass(cut: Tensor, half_width: float) -> None:
    """Warn where the grid leaves out more than MOST_CUT of the mass.

    cut (N,): the share that it leaves out. half_width: of the grid, for the message.
    """
    rows = cut > MOST_CUT
    if bool(rows.any()):
        warn(
            f"The candidates on ŷ ± {half_width:g} cut more than {MOST_CUT:.0%} of the mass in "
            f"{int(rows.sum()):,} of {len(cut):,} rows (at most {float(cut.max()):.0%}, by the "
            "output refit; `diagnostics.cut` has the shares). The predictive is normalised on that "
            "range and is too narrow there. Give a larger half_width.",
            RuntimeWarning,
        )
