"""Adaptive grids, and a first location of a density.

A row is one density, and a grid has several rows on one node pattern (see `grid`). A row passes, or
is good, if its mass is accurate. Otherwise its grid is changed and tried again, in rounds:

    off centre  the nodes are not where the mass is: they are moved
    heavy       too much mass is beyond the nodes: the reach becomes larger
    coarse      the nodes are too far apart: there are about twice as many

A row that never passes is accepted as not accurate, or cut if its density has no integral.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from ssla.maths.quadrature.grid import Grid, node_pattern

# Constants without another reason are guesses, not measured.
FIRST_NODES = 21
FIRST_REACH = 2.65  # sinh(2.65) = 7.0: seven scales to either side
MOST_NODES = 1100
MOST_ROUNDS = 24
TAIL_MASS = 1e-6
HALF_RULE_TOLERANCE = 5e-4
TASKS_AT_ONCE = 1 << 18  # nodes evaluated at once: bounds memory, keeps the arrays in cache
# In units of the scale: limits of the mass's mean and spread within which nodes are centred on it
MOST_SHIFT, LEAST_SPREAD, MOST_SPREAD = 0.4, 0.4, 3.0
# A grid that fails beyond these limits diverged (`_find_diverged_grids`).
FARTHEST_SHIFT, SMALLEST_SHRINKAGE = 3.0, 1e-4
WIDER = 1.6  # factor on the reach where a tail is too heavy
# `locate_densities`: reach and number of nodes of the first round (1e-6·sinh(42) is 1e12) and of
# the others
WIDE_SEARCH, CLOSE_SEARCH, SEARCH_ROUNDS = (42.0, 513), (6.0, 129), 12

LogDensity = Callable[[Tensor, Tensor], Tensor]
"""(z (m, k), rows (m,)) -> log density (m, k) of those rows."""


class RowGrid(NamedTuple):
    """A grid, and the numbers of its rows (m,)."""

    rows: Tensor
    grid: Grid


class Accuracy(NamedTuple):
    """Limits for the errors of a row, as shares of its mass."""

    tail: float = TAIL_MASS  # mass beyond the nodes
    half_rule: float = HALF_RULE_TOLERANCE  # difference of the rule on every second node
    spline: float | None = None  # difference of the spline's mass, if it is checked


def build_grids(
    log_density: LogDensity,
    centre: Tensor,
    scale: Tensor,
    accuracy: Accuracy = Accuracy(),  # noqa: B008
) -> list[RowGrid]:
    """Build adaptive grids for m rows, from a first guess of centre (m,) and scale (m,).

    log_density: see LogDensity; it is called for some rows at a time, several times. accuracy: the
    limits within which a row passes. Rows of one node pattern share a grid, so the result is a list
    of grids with their rows. A row that never passes has `accurate` = False. So has a row whose
    density has no integral (it does not decay, or has a pole): it is cut at the minima around its
    first guess.
    """
    if not centre.numel():
        none = torch.arange(0)
        empty = _Work(none, centre.double(), scale.double(), FIRST_REACH, FIRST_NODES, 0)
        return [RowGrid(none, _evaluate_grid(log_density, empty))]

    start = _Start(centre.double(), scale.double())
    accepted: dict[tuple[int, float], list[RowGrid]] = defaultdict(list)
    work = [_Work(torch.arange(centre.numel()), *start, FIRST_REACH, FIRST_NODES, 0)]
    while work:
        task = work.pop()
        for chunk in _iterate_row_chunks(task.rows.numel(), task.node_count):
            part = task.select_rows(chunk)
            grid = _evaluate_grid(log_density, part)
            verdict = _judge_grid(grid, accuracy)

            # In the last round all rows are done, whether they pass or not.
            done = torch.ones_like(verdict.good) if part.is_last else verdict.good
            failed = done & ~verdict.good
            first_guess = start.select_rows(part.rows)
            diverged = failed & _find_diverged_grids(grid, verdict, first_guess)
            if bool(diverged.any()):
                cut = _cut_grid(log_density, part.rows[diverged], start)
                accepted[cut.grid.logs.shape[1], FIRST_REACH].append(cut)
            kept = done & ~diverged
            if bool(kept.any()):
                accepted[task.node_count, task.reach].append(
                    _accept_rows(part, grid, verdict, kept)
                )

            work += _plan_retries(part, verdict, ~done)

    return [_join_grids(grids) for grids in accepted.values()]


class _Start(NamedTuple):
    """The first guess of centre and scale, each (m,)."""

    centre: Tensor
    scale: Tensor

    def select_rows(self, rows: Tensor) -> _Start:
        """Return the guess for rows (k,), by their numbers."""
        return _Start(self.centre[rows], self.scale[rows])


class _Work(NamedTuple):
    """The m rows that wait for a grid, and where its nodes will be."""

    rows: Tensor  # the numbers of the rows (m,)
    centre: Tensor  # (m,)
    scale: Tensor  # (m,)
    reach: float
    node_count: int
    round: int  # how many grids these rows have had

    @property
    def is_last(self) -> bool:
        """Return whether no further round, or no finer grid, is allowed after this one.

        Its rows are then accepted even if they do not pass.
        """
        return self.round >= MOST_ROUNDS or self.node_count * 2 - 1 > MOST_NODES

    def select_rows(self, rows: slice) -> _Work:
        """Return the work for a slice of the rows."""
        return self._replace(rows=self.rows[rows], centre=self.centre[rows], scale=self.scale[rows])


def _accept_rows(work: _Work, grid: Grid, verdict: _Verdict, accepted: Tensor) -> RowGrid:
    """Return the rows of a grid that `accepted` (m,) bool selects, with their numbers.

    Rows that did not pass are flagged as not accurate. work, verdict: of all rows of the grid.
    """
    kept_grid = grid if bool(accepted.all()) else grid.select_rows(accepted)
    if not bool(verdict.good[accepted].all()):
        kept_grid = replace(kept_grid, accurate=verdict.good[accepted])
    return RowGrid(work.rows[accepted], kept_grid)


def _plan_retries(work: _Work, verdict: _Verdict, pending: Tensor) -> list[_Work]:
    """Return the next work for the pending rows (m,) bool, by the reason why they did not pass.

    Rows off the centre get moved nodes, coarse ones twice as many, and rows with heavy tails a
    larger reach with twice as many. work: of all rows of the grid. verdict: of these rows.
    """
    finer = 2 * work.node_count - 1
    retries = []
    for reason, reach, count in (
        (verdict.off_centre, work.reach, work.node_count),
        (verdict.coarse, work.reach, finer),
        (verdict.heavy, WIDER * work.reach, finer),
    ):
        is_retried = reason & pending
        if bool(is_retried.any()):
            moved = verdict.centre[is_retried], verdict.scale[is_retried]
            retries.append(_Work(work.rows[is_retried], *moved, reach, count, work.round + 1))

    return retries


def _cut_grid(log_density: LogDensity, rows: Tensor, start: _Start) -> RowGrid:
    """Return a grid for rows (r,) without an integral, at their first guess.

    The density is cut at the first minimum on either side, and the rows are not accurate. start:
    the first guess of all rows.
    """
    work = _Work(rows, *start.select_rows(rows), FIRST_REACH, 2 * FIRST_NODES - 1, 0)
    return RowGrid(rows, _cut_at_valleys(_evaluate_grid(log_density, work)))


def _find_diverged_grids(grid: Grid, verdict: _Verdict, start: _Start) -> Tensor:
    """Return which rows (m,) have a grid that diverged, as on a density without an integral.

    start: the first guess of these rows, which did not pass in their last round. A grid diverged if
    its mass is zero, infinite or NaN; if its nodes are still off the centre of the mass, so that it
    would move again; if its centre is more than FARTHEST_SHIFT first scales from the first one; or
    if its scale is below SMALLEST_SHRINKAGE of the first one, as at a pole.
    """
    away = (grid.centre - start.centre).abs() > FARTHEST_SHIFT * start.scale
    pole = grid.scale < SMALLEST_SHRINKAGE * start.scale
    return ~torch.isfinite(grid.log_mass) | verdict.off_centre | away | pole


def _cut_at_valleys(grid: Grid) -> Grid:
    """Return the grid with no density beyond the first minimum on either side of the middle node.

    The rows of the returned grid are not accurate.
    """
    middle = grid.logs.shape[1] // 2
    left, right = grid.logs[:, : middle + 1].flip(1), grid.logs[:, middle:]
    halves = []
    for half in (left, right):
        # Everything is cut from the first node on at which log p is above its minimum so far. There
        # log p is 1e4 below the middle, which stands for no density and keeps logs finite.
        after_rise = (half > half.cummin(1).values + 1e-9).cumsum(1) > 0
        halves.append(torch.where(after_rise, half[:, :1] - 1e4, half))

    logs = torch.cat([halves[0].flip(1)[:, :-1], halves[1]], 1)
    return Grid(grid.centre, grid.scale, grid.reach, logs, torch.zeros_like(grid.accurate))


def _iterate_row_chunks(rows: int, count: int) -> Iterator[slice]:
    """Yield slices of rows that are evaluated together, with `count` nodes each.

    There is one slice for zero rows.
    """
    size = max(TASKS_AT_ONCE // count, 1)
    for start in range(0, max(rows, 1), size):
        yield slice(start, min(start + size, rows))


def _evaluate_grid(log_density: LogDensity, work: _Work) -> Grid:
    """Return the grid of some work, with the density evaluated at its nodes."""
    x = node_pattern(work.node_count, work.reach)[0]
    logs = log_density(work.centre[:, None] + work.scale[:, None] * x, work.rows).double()
    accurate = torch.ones_like(work.centre, dtype=torch.bool)
    return Grid(work.centre, work.scale, work.reach, logs, accurate)


class _Verdict(NamedTuple):
    """Which of m rows pass, why the others do not, and where their next grid is.

    A row that does not pass has one reason; see the module.
    """

    good: Tensor  # (m,) bool
    off_centre: Tensor  # (m,) bool
    coarse: Tensor  # (m,) bool
    heavy: Tensor  # (m,) bool
    centre: Tensor  # of the next grid (m,)
    scale: Tensor  # of the next grid (m,)


def _judge_grid(grid: Grid, accuracy: Accuracy) -> _Verdict:
    """Return which rows of a grid pass, and how the grids of the others should change.

    accuracy: the limits of errors.
    """
    x = grid.pattern
    shares = grid.relative_terms
    body = shares.sum(1)
    half_rule = 2 * shares[:, ::2].sum(1)
    left, right = (t.moment(0, grid.peak) / grid.scale for t in grid.tails)
    mean, spread = _locate_mass(shares, x, body)
    edge = (grid.logs[:, 0] == grid.peak) | (grid.logs[:, -1] == grid.peak)
    off_centre = (mean.abs() > MOST_SHIFT) | (spread < LEAST_SPREAD) | (spread > MOST_SPREAD) | edge

    # Conditions with `~` and `<=` are true for NaN too.
    coarse = ~((half_rule / body - 1).abs() <= accuracy.half_rule) | grid.find_overshooting_rows()
    if accuracy.spline is not None:
        coarse |= ~(grid.compute_spline_error() <= accuracy.spline)
    heavy = ~((left + right) / body <= accuracy.tail)

    # A heavy tail shifts mean and spread, so such a grid is widened before it is moved, unless the
    # peak is at the edge.
    off_centre = off_centre & ~(heavy & (spread > MOST_SPREAD) & ~edge)

    # A density narrower than the nodes is enlarged until they resolve it.
    spacing = float(x[x.numel() // 2 + 1])
    width = torch.maximum(spread, torch.full_like(spread, spacing))
    centre = torch.where(off_centre, grid.centre + grid.scale * mean, grid.centre)
    scale = torch.where(off_centre, grid.scale * width, grid.scale)

    # Each row has one reason at most: first it is moved, then widened, then refined.
    heavy = heavy & ~off_centre
    coarse = coarse & ~off_centre & ~heavy
    return _Verdict(~(off_centre | heavy | coarse), off_centre, coarse, heavy, centre, scale)


def _locate_mass(shares: Tensor, x: Tensor, body: Tensor) -> tuple[Tensor, Tensor]:
    """Compute mean (m,) and spread (m,) of the mass shares (m, k) at nodes x (k,).

    Both are in units of the scale. body (m,): the sum of the shares. Where the spread is large, far
    tails have most of the second moment, and the result is that of `_locate_bulk`.
    """
    moments = shares @ torch.stack([x, x * x], 1) / body[:, None]
    mean = moments[:, 0]
    spread = (moments[:, 1] - mean * mean).clamp_min(0).sqrt()
    wide = (spread > MOST_SPREAD).nonzero().squeeze(-1)
    if wide.numel():
        mean[wide], spread[wide] = _locate_bulk(shares[wide], x)
    return mean, spread


def _locate_bulk(shares: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    """Compute the median (m,) and half the distance between the 16% and the 84% quantile (m,).

    shares (m, k): mass at nodes x (k,). For a Gaussian half that distance is one standard
    deviation.
    """
    sums = shares.cumsum(1)
    low, median, high = (
        x[(sums < level * sums[:, -1:]).sum(1).clamp_max(x.numel() - 1)]
        for level in (0.16, 0.5, 0.84)
    )
    return median, (high - low) / 2


def _join_grids(grids: list[RowGrid]) -> RowGrid:
    """Return one grid with the rows of all grids, which must have one node pattern."""
    if len(grids) == 1:
        return grids[0]
    all_rows = torch.cat([rows for rows, _ in grids])
    joined = Grid(
        torch.cat([grid.centre for _, grid in grids]),
        torch.cat([grid.scale for _, grid in grids]),
        grids[0].grid.reach,
        torch.cat([grid.logs for _, grid in grids]),
        torch.cat([grid.accurate for _, grid in grids]),
    )
    return RowGrid(all_rows, joined)


def locate_densities(log_density: LogDensity, rows: int) -> tuple[Tensor, Tensor]:
    """Find a first centre (m,) and scale (m,) for m = rows unknown densities.

    The densities may be at distances from 1e-6 to 1e12 of zero. The first round has nodes over that
    range. Each round takes the median and the spread of the mass at its nodes as the next centre
    and scale. For two distant modes the result is the higher one, and `build_grids` widens the
    grid. rows: their number m.
    """
    index = torch.arange(rows)
    centre = torch.zeros(rows, dtype=torch.float64)
    scale = torch.full((rows,), 1e-6, dtype=torch.float64)
    reach, count = WIDE_SEARCH
    for _ in range(SEARCH_ROUNDS):
        x, weights = node_pattern(count, reach)
        logs = torch.cat(
            [
                log_density(centre[chunk, None] + scale[chunk, None] * x, index[chunk])
                for chunk in _iterate_row_chunks(rows, count)
            ]
        )
        logs = torch.nan_to_num(logs.double(), nan=-math.inf, neginf=-1e300)
        best = logs.argmax(1).clamp(1, count - 2)
        shares = (logs - logs.max(1, keepdim=True).values).exp() * weights
        median, spread = _locate_bulk(shares, x)

        # A density may be narrower than the distance of the nodes. That distance is then the scale.
        spacing = (x[best + 1] - x[best - 1]) / 2
        centre = centre + scale * median
        scale = scale * torch.maximum(spread, spacing)
        reach, count = CLOSE_SEARCH

    return centre, scale
