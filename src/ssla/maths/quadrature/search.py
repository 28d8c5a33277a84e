"""Adaptive grids, which are refined, widened and moved until they pass, and a first location of
a density.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from ssla.maths.quadrature.grid import Grid, pattern_of

FIRST_NODES = 21
FIRST_REACH = 2.65  # sinh(2.65) = 7.0: seven scales to either side
MOST_NODES = 1100
MOST_ROUNDS = 24
TAIL_MASS = 1e-6
HALF_RULE_TOLERANCE = 5e-4
TASKS_AT_ONCE = 1 << 18  # nodes evaluated at once: bounds memory, keeps the arrays in cache

LogDensity = Callable[[Tensor, Tensor], Tensor]
"""(z (m, k), rows (m,)) -> log density (m, k) of those rows."""


class Built(NamedTuple):
    """Grids, and the rows of each."""

    rows: Tensor
    grid: Grid


class Accuracy(NamedTuple):
    """Limits for a row: mass beyond the nodes, difference of the half rule and, if given, of
    the spline.
    """

    tail: float = TAIL_MASS
    half_rule: float = HALF_RULE_TOLERANCE
    spline: float | None = None


def build(
    log_density: LogDensity,
    centre: Tensor,
    scale: Tensor,
    accuracy: Accuracy = Accuracy(),  # noqa: B008
) -> list[Built]:
    """Adaptive grids for all rows, from a first guess of centre and scale (m,).

    A row whose density has no integral (it does not decay, or has a pole) is cut at the minima
    around its first guess and flagged.
    """
    accepted: dict[tuple[int, float], list[Built]] = defaultdict(list)
    first_centre, first_scale = centre.double(), scale.double()
    work = [(torch.arange(centre.numel()), first_centre, first_scale, FIRST_REACH, FIRST_NODES, 0)]
    while work:
        rows, c, s, reach, count, round_ = work.pop()
        last_chance = round_ >= MOST_ROUNDS or count * 2 - 1 > MOST_NODES
        for part in _chunks(rows.numel(), count):
            grid = _evaluate(log_density, rows[part], c[part], s[part], reach, count)
            verdict = _judge(grid, accuracy)
            ok = torch.ones_like(verdict.good) if last_chance else verdict.good
            endless = (
                ok
                & ~verdict.good
                & _runaway(grid, verdict, first_centre[rows[part]], first_scale[rows[part]])
            )
            if bool(endless.any()):
                lost = rows[part][endless]
                cut = _evaluate(
                    log_density,
                    lost,
                    first_centre[lost],
                    first_scale[lost],
                    FIRST_REACH,
                    2 * FIRST_NODES - 1,
                )
                accepted[2 * FIRST_NODES - 1, FIRST_REACH].append(Built(lost, _cut_at_valleys(cut)))
            kept = ok & ~endless
            if bool(kept.any()):
                some = grid if bool(kept.all()) else grid.rows(kept)
                if not bool(verdict.good[kept].all()):
                    some = replace(some, accurate=verdict.good[kept])
                accepted[count, reach].append(Built(rows[part][kept], some))
            for again, new_reach, new_count in (
                (verdict.off_centre, reach, count),
                (verdict.coarse, reach, 2 * count - 1),
                (verdict.heavy, 1.6 * reach, 2 * count - 1),
            ):
                again = again & ~ok
                if bool(again.any()):
                    moved = verdict.centre[again], verdict.scale[again]
                    work.append((rows[part][again], *moved, new_reach, new_count, round_ + 1))
    if not centre.numel():  # no rows: an empty grid
        none = torch.arange(0)
        return [
            Built(
                none,
                _evaluate(log_density, none, first_centre, first_scale, FIRST_REACH, FIRST_NODES),
            )
        ]
    return [_join(parts) for parts in accepted.values()]


def _runaway(grid: Grid, verdict: _Verdict, first_centre: Tensor, first_scale: Tensor) -> Tensor:
    """Rows whose grid diverged on a density without integral: to infinity, away from the start,
    or into a pole.
    """
    away = (grid.centre - first_centre).abs() > 3 * first_scale
    return (
        ~torch.isfinite(grid.log_mass)
        | verdict.off_centre
        | away
        | (grid.scale < 1e-4 * first_scale)
    )


def _cut_at_valleys(grid: Grid) -> Grid:
    """Set the density to zero beyond the first minimum on either side of the middle node."""
    middle = grid.logs.shape[1] // 2
    left, right = grid.logs[:, : middle + 1].flip(1), grid.logs[:, middle:]
    halves = []
    for half in (left, right):
        gone = (half > half.cummin(1).values + 1e-9).cumsum(1) > 0  # all nodes after the first rise
        halves.append(torch.where(gone, half[:, :1] - 1e4, half))
    logs = torch.cat([halves[0].flip(1)[:, :-1], halves[1]], 1)
    return Grid(grid.centre, grid.scale, grid.reach, logs, torch.zeros_like(grid.accurate))


def _chunks(rows: int, count: int) -> Iterator[slice]:
    size = max(TASKS_AT_ONCE // count, 1)
    for start in range(0, max(rows, 1), size):
        yield slice(start, min(start + size, rows))


def _evaluate(
    log_density: LogDensity, rows: Tensor, c: Tensor, s: Tensor, reach: float, count: int
) -> Grid:
    x = pattern_of(count, reach)[0]
    logs = log_density(c[:, None] + s[:, None] * x, rows).double()
    return Grid(c, s, reach, logs, torch.ones_like(c, dtype=torch.bool))


class _Verdict(NamedTuple):
    good: Tensor
    off_centre: Tensor
    coarse: Tensor
    heavy: Tensor
    centre: Tensor
    scale: Tensor


def _judge(grid: Grid, accuracy: Accuracy) -> _Verdict:
    """Which rows pass, and how to change the grids of the others."""
    x = grid.pattern
    share = grid.relative
    body = share.sum(1)
    half = 2 * share[:, ::2].sum(1)
    left, right = (t.moment(0, grid.peak) / grid.scale for t in grid.tails)
    moments = share @ torch.stack([x, x * x], 1) / body[:, None]
    first = moments[:, 0]
    second = (moments[:, 1] - first * first).clamp_min(0).sqrt()
    wide = (second > 3.0).nonzero().squeeze(-1)
    if (
        wide.numel()
    ):  # far tails have most of the second moment; the bulk is where most of the mass is
        first[wide], second[wide] = _bulk(share[wide], x)
    spacing = float(x[x.numel() // 2 + 1])
    width = torch.maximum(
        second, torch.full_like(second, spacing)
    )  # narrower than the nodes: zoom in
    edge = (grid.logs[:, 0] == grid.peak) | (grid.logs[:, -1] == grid.peak)
    off = (first.abs() > 0.4) | (second < 0.4) | (second > 3.0) | edge
    coarse = ~((half / body - 1).abs() <= accuracy.half_rule) | grid.overshoots()
    if accuracy.spline is not None:
        coarse |= ~(grid.spline_error() <= accuracy.spline)
    heavy = ~((left + right) / body <= accuracy.tail)
    # a heavy tail shifts mean and spread: widen before moving, unless the peak is at the edge
    off = off & ~(heavy & (second > 3.0) & ~edge)
    centre = torch.where(off, grid.centre + grid.scale * first, grid.centre)
    scale = torch.where(off, grid.scale * width, grid.scale)
    heavy, coarse = heavy & ~off, coarse & ~off & ~heavy
    good = ~(off | heavy | coarse)
    return _Verdict(good, off, coarse, heavy, centre, scale)


def _bulk(share: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    """The median and half the distance between the 16% and the 84% quantile, from the mass (m,
    k) at nodes x.  (m,), (m,).
    """
    sums = share.cumsum(1)
    low, middle, high = (
        x[(sums < level * sums[:, -1:]).sum(1).clamp_max(x.numel() - 1)]
        for level in (0.16, 0.5, 0.84)
    )
    return middle, (high - low) / 2


def _join(parts: list[Built]) -> Built:
    if len(parts) == 1:
        return parts[0]
    rows = torch.cat([p.rows for p in parts])
    grids = [p.grid for p in parts]
    return Built(
        rows,
        Grid(
            torch.cat([g.centre for g in grids]),
            torch.cat([g.scale for g in grids]),
            grids[0].reach,
            torch.cat([g.logs for g in grids]),
            torch.cat([g.accurate for g in grids]),
        ),
    )


def locate(log_density: LogDensity, rows: int) -> tuple[Tensor, Tensor]:
    """A first centre and scale for an unknown density: from 1e-6 to 1e12 around zero.

    Finds the highest of logarithmically spaced nodes, then takes median and spread around it
    a few times. For two distant modes the result is the higher one, and `build` widens the grid.
    """
    index = torch.arange(rows)
    centre = torch.zeros(rows, dtype=torch.float64)
    scale = torch.full((rows,), 1e-6, dtype=torch.float64)
    reach, count = 42.0, 513
    for _ in range(12):
        x = pattern_of(count, reach)[0]
        logs = torch.cat(
            [
                log_density(centre[p, None] + scale[p, None] * x, index[p])
                for p in _chunks(rows, count)
            ]
        )
        logs = torch.nan_to_num(logs.double(), nan=-math.inf, neginf=-1e300)
        best = logs.argmax(1).clamp(1, count - 2)
        share = (logs - logs.max(1, keepdim=True).values).exp() * pattern_of(count, reach)[1]
        middle, spread = _bulk(share, x)
        near = (x[best + 1] - x[best - 1]) / 2
        centre, scale = centre + scale * middle, scale * torch.maximum(spread, near)
        reach, count = 6.0, 129
    return centre, scale
