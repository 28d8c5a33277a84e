"""Mixtures of predictives of one number: continuous, and counts."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from ssla._checks import level as checked_level
from ssla.numerics.quadrature import Regions, bracketed_root
from ssla.predictive.mixture import Blend
from ssla.predictive.predictive import Diagnostics, answer, not_nan, probabilities, scalar_targets
from ssla.refit.increments import Increments

NODES = 385  # over all members together
REACH = 5.2  # in normal scores: quantiles from 1e-7 to 1 − 1e-7
BISECTIONS = 50
MOST_COUNTS = 4096


@dataclass(frozen=True, eq=False)
class ScalarMixture:
    """Σ w_m p_m(y) over the real line, or over counts. log_prob and cdf are exact averages; quantiles are searched for."""

    blend: Blend
    kind: str  # "scalar" or "count"

    @property
    def members(self) -> tuple[Any, ...]:
        return self.blend.members

    @property
    def diagnostics(self) -> Diagnostics:
        return self.blend.diagnostics

    @property
    def mean(self) -> Tensor:
        return self.blend.out(self.blend.mean)

    @cached_property
    def _variance(self) -> Tensor:
        return self.blend.epistemic + self.blend.aleatoric

    @property
    def variance(self) -> Tensor:
        return self.blend.out(self._variance)

    @property
    def stddev(self) -> Tensor:
        return self.blend.out(self._variance.sqrt())

    @property
    def epistemic(self) -> Tensor:
        return self.blend.out(self.blend.epistemic)

    @property
    def aleatoric(self) -> Tensor:
        return self.blend.out(self.blend.aleatoric)

    @property
    def mass(self) -> Tensor:
        return self.blend.out(self.blend.mass)

    def _log_prob(self, y: Tensor) -> Tensor:
        """(N, k) -> (N, k) in float64."""
        return self.blend.log_average(lambda m: m.log_prob(y))

    def _cdf(self, y: Tensor) -> Tensor:
        return self.blend.average(lambda m: m.cdf(y))

    def log_prob(self, y: Any) -> Tensor:
        """(N,) -> (N,); (N, k) -> (N, k)."""
        value, single = scalar_targets(y, self.blend.rows)
        return self.blend.out(answer(self._log_prob(value), single))

    def cdf(self, y: Any) -> Tensor:
        """P(Y ≤ y).  (N,) -> (N,); (N, k) -> (N, k)."""
        value, single = scalar_targets(y, self.blend.rows)
        not_nan(value)
        return self.blend.out(answer(self._cdf(value), single))

    def _icdf(self, q: Tensor) -> Tensor:
        """(k,) -> (N, k): between the members' own quantiles."""
        ends = self.blend.each(lambda m: m.icdf(q))
        search = _first_count if self.kind == "count" else bracketed_root
        return search(lambda y: self._cdf(y) - q, ends.amin(0), ends.amax(0))

    def icdf(self, q: Any) -> Tensor:
        """Quantiles: one number -> (N,); (k,) -> (N, k)."""
        value, single = probabilities(q)
        return self.blend.out(answer(self._icdf(value), single))

    def interval(self, level: float = 0.95) -> Tensor:
        """Central interval (N, 2)."""
        tail = (1 - checked_level(level)) / 2
        return self.icdf(torch.tensor([tail, 1 - tail], dtype=torch.float64))

    @cached_property
    def _nodes(self) -> tuple[Tensor, Tensor]:
        """Places (N, F) in order and log densities there: quantiles of every member, staggered; or the counts between them."""
        if self.kind == "count":
            return self._counts
        count = len(self.members)
        per_member = max(NODES // count, 33)
        steps = torch.linspace(-REACH, REACH, per_member * count, dtype=torch.float64)
        parts = [m.icdf(torch.special.ndtr(steps[i::count])).to("cpu", torch.float64) for i, m in enumerate(self.members)]
        places = torch.cat(parts, 1).sort(1).values
        return places, self._log_prob(places)

    @cached_property
    def mode(self) -> Tensor:
        """The highest point: of the densest node and its neighbours, by a parabola through log p."""
        places, logs = self._nodes
        if self.kind == "count":
            return self.blend.out(places.gather(1, logs.argmax(1, keepdim=True)).squeeze(1))
        best = logs.argmax(1, keepdim=True).clamp(1, places.shape[1] - 2)
        (a, b, c), (fa, fb, fc) = (tuple(t.gather(1, best + s) for s in (-1, 0, 1)) for t in (places, logs))
        left, right = (b - a) * (fb - fc), (b - c) * (fb - fa)
        turn = b - 0.5 * ((b - a) * left - (b - c) * right) / (left - right)
        good = torch.isfinite(turn) & (turn >= a) & (turn <= c)
        return self.blend.out(torch.where(good, turn, places.gather(1, logs.argmax(1, keepdim=True))).squeeze(1))

    def hdr(self, level: float = 0.95) -> Regions:
        """{y: p(y) ≥ c} with that probability: a union of intervals lower, upper (N, R), padded with NaN.

        c is found by bisection on the exact probability of the set; between nodes log p is taken as linear.
        """
        checked_level(level)
        places, logs = self._nodes
        if self.kind == "count":
            return self._runs(level)
        low, high = torch.maximum(logs[:, 0], logs[:, -1]), logs.amax(1)
        for _ in range(BISECTIONS):
            middle = (low + high) / 2
            enough = self._probability(_above(places, logs, middle)) >= level
            low, high = torch.where(enough, middle, low), torch.where(enough, high, middle)
        region = _above(places, logs, low)
        return Regions(self.blend.out(region.lower), self.blend.out(region.upper))

    @cached_property
    def _counts(self) -> tuple[Tensor, Tensor]:
        """All counts that matter (every second, third, … where they are more than thousands)."""
        ends = self._icdf(torch.tensor([1e-9, 1 - 1e-9], dtype=torch.float64))
        width = ends[:, 1] - ends[:, 0] + 1
        step = (width / MOST_COUNTS).ceil()
        most = int((width / step).max().ceil()) if len(width) else 1
        places = ends[:, :1] + step[:, None] * torch.arange(most, dtype=torch.float64)
        return places, self._log_prob(places)

    def _runs(self, level: float) -> Regions:
        """The smallest set of counts with at least that probability, as runs lower … upper."""
        places, logs = self._counts
        step = (places[:, 1:2] - places[:, :1]) if places.shape[1] > 1 else torch.ones_like(places)
        share = self._cdf(places + step - 1) - self._cdf(places - 1)
        order = logs.argsort(1, descending=True)
        reached = share.gather(1, order).cumsum(1)
        needed = torch.nn.functional.pad(reached[:, :-1] < level, (1, 0), value=True)
        inside = torch.zeros_like(needed).scatter(1, order, needed)
        lower, upper = _ends_of_runs(inside)
        first, last = (torch.where(at < 0, math.nan, places.gather(1, at.clamp_min(0))) for at in (lower, upper))
        return Regions(self.blend.out(first), self.blend.out(last + step - 1))

    def _probability(self, region: Regions) -> Tensor:
        ends = torch.cat([region.lower, region.upper], 1)
        F = torch.where(ends.isnan(), 0.0, self._cdf(torch.nan_to_num(ends)))
        half = region.lower.shape[1]
        return (F[:, half:] - F[:, :half]).sum(1)

    def sample(self, n: int, generator: torch.Generator | None = None) -> Tensor:
        """(n, N)."""
        return self.blend.out(self.blend.choose(n, lambda m: m.sample(n, generator), generator))

    def increments(self, y: Any) -> Increments:
        return self.blend.increments(y)


def _first_count(function: Callable[[Tensor], Tensor], low: Tensor, high: Tensor) -> Tensor:
    """The smallest whole number in [low, high] where the rising function is no longer negative."""
    low, high = low - 1, high.clone()
    while bool((high - low > 1).any()):
        middle = ((low + high) / 2).floor()
        enough = function(middle) >= -1e-14
        low, high = torch.where(enough, low, middle), torch.where(enough, middle, high)
    return high


def _ends_of_runs(inside: Tensor) -> tuple[Tensor, Tensor]:
    """Where runs of True begin and end: indices (N, R), padded with −1."""
    edge = torch.zeros_like(inside[:, :1])
    starts = inside & ~torch.cat([edge, inside[:, :-1]], 1)
    stops = inside & ~torch.cat([inside[:, 1:], edge], 1)
    most = max(int(starts.sum(1).max()), 1) if len(starts) else 1
    found = []
    for marks in (starts, stops):
        rows, at = marks.nonzero(as_tuple=True)
        rank = marks.cumsum(1)[rows, at] - 1
        ends = torch.full((inside.shape[0], most), -1, dtype=torch.long)
        ends[rows, rank] = at
        found.append(ends)
    return found[0], found[1]


def _above(places: Tensor, logs: Tensor, threshold: Tensor) -> Regions:
    """Where log p exceeds the threshold (N,), ends by linear interpolation."""
    excess = logs - threshold[:, None]
    lower, upper = _ends_of_runs(excess > 0)
    ends = []
    for at, step in ((lower, -1), (upper, 1)):
        here = at.clamp_min(0)
        other = (here + step).clamp(0, places.shape[1] - 1)
        a, b = excess.gather(1, here), excess.gather(1, other)
        x, y = places.gather(1, here), places.gather(1, other)
        share = torch.where(a - b > 0, a / (a - b), torch.zeros_like(a)).clamp(0, 1)
        ends.append(torch.where(at < 0, math.nan, x + share * (y - x)))
    return Regions(*ends)
