"""A whole density from few refits: the output rung's density, corrected.

The refit's answer and the output rung's differ by a correction that is small and smooth in y. It is interpolated by a polynomial
in t (see `ssla.predictive.frame`) over the region that has 99.95% of the output predictive, widened where the corrected one
reaches further, and continued as a constant beyond it. Seven refits come first, then two more and later more at a time, until
the last ones changed the interpolant by less than the error allowed: what is kept to it is the interpolant before the last.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ssla.likelihoods import Likelihood
from ssla.posterior import Marginal
from ssla.predictive.frame import Frame, chebyshev_nodes
from ssla.refit import Density, WeightLogDensity
from ssla.refit.increments import Increments
from ssla.refit.weights import NAN

FIRST_NODES = 7
MORE_NODES = (2, 2, 2, 4, 4, 4, 8, 8, 8, 16, 16, 16, 24, 32)
MOST_NODES = FIRST_NODES + sum(MORE_NODES)
REGION = 5e-4  # of the answer, beyond the promise on either side
WIDENINGS = 6
SURE = 4.0  # a portion that changes little after one that changed this many times the error allowed did so by chance
COMPARED = 65  # points at which two interpolants are compared


@dataclass(frozen=True, eq=False)
class Corrected:
    """A log density: output + correction where there is one. Increments are those of real refits at the y asked for."""

    weights: WeightLogDensity
    refitted: Tensor  # (N,) bool: rows that the weights answer for
    frame: Frame
    nodes: Tensor  # (N, K) y where there is a refit; NaN: none
    values: Tensor  # (N, K) the correction there
    coefficients: Tensor  # (N, K) of Chebyshev's polynomials in t
    fallback: Tensor  # (N,) bool, of the refits
    failed: Tensor  # (N,) bool: a refit failed, so that this row is the output rung's
    inaccurate: Tensor  # (N,) bool: the correction was not resolved with the most nodes

    moves = True

    @property
    def refits(self) -> Tensor:
        """(N,) how many."""
        return (~self.nodes.isnan()).sum(1)

    @property
    def likelihood(self) -> Likelihood:
        return self.weights.likelihood

    @property
    def marginal(self) -> Marginal:
        return self.weights.marginal

    @property
    def like(self) -> Tensor:
        return self.weights.like

    def at(self, y: Tensor, rows: Tensor | None = None) -> Density:
        base = self.weights.output.at(y, rows)
        index = torch.arange(len(y)) if rows is None else rows
        t = self.frame.take(index).inward(y.flatten(1) if y.dim() > 1 else y.unsqueeze(1)).clamp(-1, 1)
        return base._replace(log=base.log + _clenshaw(self.coefficients[index], t).reshape(base.log.shape))

    def __call__(self, y: Tensor) -> Increments:
        below = self.weights.output(y)
        rows = (self.refitted & ~self.failed).nonzero().squeeze(-1)
        if rows.numel():
            real = self.weights.increments(y[rows], rows)
            for target, values in zip(
                (below.likelihood, below.prior, below.curvature), (real.likelihood, real.prior, real.curvature), strict=True
            ):
                target[rows] = values
        if self.weights.refit.on_failure == NAN:
            for target in (below.likelihood, below.prior, below.curvature):
                target[self.failed] = torch.nan
        return below


def correct(weights: WeightLogDensity, quantiles: Tensor, chosen: Tensor) -> Corrected:
    """Refit at few y of every chosen row (N,) bool; quantiles (N, 5) of the output predictive, at QUANTILES."""
    frame = Frame.over(weights.likelihood.support_for(weights.marginal.mean.shape[1]), quantiles, FIRST_NODES)
    no, nothing = torch.zeros_like(chosen), torch.zeros(len(chosen), MOST_NODES, dtype=torch.float64)
    state = Corrected(weights, chosen, frame, nothing + torch.nan, nothing, nothing, no, chosen & ~frame.usable, no)
    return _refined(state, chosen & frame.usable, (FIRST_NODES, *MORE_NODES))


def widened(known: Corrected, quantiles: Tensor, rows: Tensor) -> Corrected:
    """Over a larger region in some rows (N,) bool, from the refits that are there and more."""
    full = rows & (known.refits + MORE_NODES[0] > MOST_NODES)  # no refits left for the new ends
    known, rows = replace(known, inaccurate=known.inaccurate | full), rows & ~full
    wider = Frame.over(known.frame.support, quantiles, FIRST_NODES)
    if wider.counts:
        wider = replace(wider, low=torch.minimum(wider.low, known.frame.low), high=torch.maximum(wider.high, known.frame.high))
    return _refined(replace(known, frame=known.frame.replaced(rows, wider)), rows, MORE_NODES)


def _refined(state: Corrected, chosen: Tensor, portions: Iterable[int]) -> Corrected:
    """More nodes, a portion at a time, until the last portion changes the interpolant by no more than the error allowed."""
    weights, frame = state.weights, state.frame
    nodes, values, coefficients = state.nodes.clone(), state.values.clone(), state.coefficients.clone()
    fallback, failed = state.fallback.clone(), state.failed.clone()
    rows = chosen.nonzero().squeeze(-1)
    before = _series(frame.take(rows).inward(nodes[rows]), values[rows])
    changed = torch.full((len(rows),), torch.nan, dtype=torch.float64)  # by the last portion
    for portion in portions:
        if not rows.numel():
            break
        here, known = frame.take(rows), nodes[rows]
        y, new = here.nodes(known, portion)
        place = (~known.isnan()).sum(1, keepdim=True) + torch.arange(portion)
        room = place < MOST_NODES
        who, which = (new & room).nonzero(as_tuple=True)
        if who.numel():  # else all counts of a region are there, or the most nodes
            task, slot, target = rows[who], place[who, which], y[who, which].unsqueeze(1)
            solved = weights.solve(target, task)
            weights.check(solved)
            nodes[task, slot] = torch.where(solved.steps > 0, target.squeeze(1), torch.nan)  # untried: no refit
            values[task, slot] = solved.total - weights.output.at(target, task).log.squeeze(1)
            fallback[task[solved.fallback]] = True
            failed[task[~solved.converged]] = True
        good = ~failed[rows]
        rows, before, whole, here = rows[good], before[good], (~new & room).any(1)[good], here.take(good)
        series = _series(here.inward(nodes[rows]), values[rows])
        coefficients[rows] = series
        compared = here.inward(here.outward(chebyshev_nodes(COMPARED).expand(len(rows), -1)))
        change = _clenshaw(series - before, compared).abs().amax(1) if rows.numel() else before[:, 0]
        error = torch.fmax(change, changed[good] / SURE)
        error = torch.where((new & room).any(1)[good], error, torch.inf)  # nothing new was asked: that settles nothing
        again = ~((error <= weights.refit.interpolation) | whole)  # whole: every count has its own refit
        rows, before, changed = rows[again], series[again], change[again]
    coefficients[failed] = torch.nan if weights.refit.on_failure == NAN else 0.0
    inaccurate = state.inaccurate.index_fill(0, rows, True)
    return replace(
        state, nodes=nodes, values=values, coefficients=coefficients, fallback=fallback, failed=failed, inaccurate=inaccurate
    )


def uncorrected(weights: WeightLogDensity, chosen: Tensor, failed: Tensor) -> Corrected:
    """For classes, where every y has its own refit and nothing is interpolated."""
    no, zero = torch.zeros_like(chosen), torch.zeros(len(chosen), dtype=torch.float64)
    frame = Frame(weights.likelihood.support_for(weights.marginal.mean.shape[1]), zero, zero + 1, zero, zero + 1)
    none = zero.unsqueeze(1)
    return Corrected(weights, chosen, frame, none + torch.nan, none, none, no, failed, no)


def _series(t: Tensor, values: Tensor) -> Tensor:
    """Chebyshev coefficients (m, K) of the polynomial through values (m, K) at t (m, K; NaN: no node). NaN without nodes."""
    counts = (~t.isnan()).sum(1)
    order = t.isnan().long().argsort(dim=1, stable=True)  # nodes first
    series = torch.where((counts == 0)[:, None], torch.nan, torch.zeros_like(values))
    for count in counts.unique().tolist():  # each size by itself, so that a row's rounding does not depend on other rows
        if count == 0:
            continue
        rows = counts == count
        first = order[rows, :count]
        angle = torch.arccos(t[rows].gather(1, first).clamp(-1, 1))
        basis = torch.cos(angle.unsqueeze(-1) * torch.arange(count, dtype=torch.float64))
        solved = torch.linalg.solve(basis, values[rows].gather(1, first).unsqueeze(-1)).squeeze(-1)
        series[rows] = torch.nn.functional.pad(solved, (0, values.shape[1] - count))
    return series


def _clenshaw(coefficients: Tensor, t: Tensor) -> Tensor:
    """Σ_k c_k T_k(t).  (m, K), (m, j) -> (m, j)."""
    later = last = torch.zeros_like(t)
    used = int((coefficients != 0).any(0).nonzero().max()) if bool((coefficients != 0).any()) else 0
    for k in range(used, 0, -1):
        last, later = 2 * t * last - later + coefficients[:, k, None], last
    return t * last - later + coefficients[:, :1]
