"""A whole density from few refits: the output rung's density, corrected.

The refit's answer and the output rung's differ by a correction that is small and smooth in y. It is
interpolated by a polynomial in t, which runs from −1 to 1 over a row's region (`Frame`). The region
has 99.95% of the output predictive. It is widened where the corrected predictive reaches further;
beyond it the correction is constant. Seven refits come first, then two more and later more at a
time, until the last ones changed the interpolant by less than the error allowed. So that error is
the one of the interpolant before the last.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ssla.likelihoods import Likelihood
from ssla.likelihoods.support import Continuous, Support
from ssla.maths.constants import constant
from ssla.refit import Density, WeightLogDensity
from ssla.refit.increments import Increments
from ssla.refit.weights.weight_refit import NAN
from ssla.values import Marginal

TAIL = 2.5e-4  # of the output predictive, beyond the nodes on either side
QUANTILES = (
    TAIL,
    0.0668,
    0.5,
    0.9332,
    1 - TAIL,
)  # the region, its centre, and ± 1.5 standard deviations of a normal
REACH = (
    2.2  # the region's width over that of ± 1.5 standard deviations, in w; a normal has 2.32 in y
)
BENDS = torch.logspace(
    math.log10(0.3), math.log10(4.0), 48, dtype=torch.float64
)  # scales tried, in standard deviations
CANDIDATES = 401
FIRST_NODES = 7
MORE_NODES = (2, 2, 2, 4, 4, 4, 8, 8, 8, 16, 16, 16, 24, 32)
MOST_NODES = FIRST_NODES + sum(MORE_NODES)
REGION = 5e-4  # of the answer, beyond the region of the stated error on either side
WIDENINGS = 6
# a small change counts as chance if the portion before changed more than this many times the error
# allowed
SURE = 4.0
COMPARED = 65  # points at which two interpolants are compared


@dataclass(frozen=True)
class Frame:
    """t is linear in w = asinh((z − centre)/scale), z the support's real coordinate; in y itself
    for counts.

    The scale is chosen so that w has the tails of a normal, a little shortened: a correction to a
    heavy-tailed density is then as smooth in w as one to a normal density is in y.
    """

    support: Support
    centre: Tensor  # (N,)
    scale: Tensor
    low: Tensor  # w at the ends
    high: Tensor

    @staticmethod
    def over(support: Support, quantiles: Tensor, least: int) -> Frame:
        """From the output predictive's QUANTILES (N, 5); counts get a region of `least` numbers
        or more.
        """
        if not isinstance(support, Continuous):
            low = quantiles[:, 0].floor().clamp_min(0)
            high = torch.maximum(quantiles[:, -1].ceil(), low + least - 1)
            return Frame(support, torch.zeros_like(low), torch.ones_like(low), low, high)
        z = support.to_real(quantiles)
        centre = z[:, 2]
        off = z - centre[:, None]
        scales = (z[:, 3] - z[:, 1])[:, None] / 2 * BENDS  # (N, S)
        w = torch.asinh(off[:, None] / scales[..., None])
        reach = (w[..., 4] - w[..., 0]) / (w[..., 3] - w[..., 1])
        scale = scales.gather(1, (reach - REACH).abs().argmin(1, keepdim=True)).squeeze(1)
        return Frame(support, centre, scale, *(torch.asinh(off[:, end] / scale) for end in (0, -1)))

    @property
    def counts(self) -> bool:
        return not isinstance(self.support, Continuous)

    @property
    def usable(self) -> Tensor:
        return torch.isfinite(self.low + self.high) & (self.high > self.low) & (self.scale > 0)

    def take(self, rows: Tensor) -> Frame:
        return Frame(
            self.support, self.centre[rows], self.scale[rows], self.low[rows], self.high[rows]
        )

    def replaced(self, rows: Tensor, other: Frame) -> Frame:
        """With the rows (N,) bool of another one."""
        parts = ("centre", "scale", "low", "high")
        return Frame(
            self.support,
            *(torch.where(rows, getattr(other, part), getattr(self, part)) for part in parts),
        )

    def outward(self, t: Tensor) -> Tensor:
        """t (m, k) -> y; whole numbers for counts."""
        w = self.low[:, None] + (self.high - self.low)[:, None] * (t + 1) / 2
        if isinstance(self.support, Continuous):
            return self.support.from_real(
                self.centre[:, None] + self.scale[:, None] * torch.sinh(w)
            )
        return w.round()

    def inward(self, y: Tensor) -> Tensor:
        """y (m, k) -> t."""
        w = y
        if isinstance(self.support, Continuous):
            w = torch.asinh((self.support.to_real(y) - self.centre[:, None]) / self.scale[:, None])
        return 2 * (w - self.low[:, None]) / (self.high - self.low)[:, None] - 1

    def nodes(self, known: Tensor, more: int) -> tuple[Tensor, Tensor]:
        """y at `more` nodes beside the known ones (m, k; NaN: none), and which are new.

        (m, more) each.

        The first are Chebyshev's, ends included; each further one is where Π|t − t_j| is largest
        (Leja's rule). A region of few counts may have no new ones left.
        """
        if bool(known.isnan().all()):
            y = self.outward(chebyshev_nodes(more).expand(len(known), -1))
            y = _distinct(y, self.high) if self.counts else y
            return y, torch.ones_like(y, dtype=torch.bool)
        values = self.outward(chebyshev_nodes(CANDIDATES).expand(len(known), -1))
        t = self.inward(values)
        log = (
            (t.unsqueeze(-1) - self.inward(known).unsqueeze(1))
            .abs()
            .log()
            .nan_to_num(nan=0.0, neginf=-math.inf)
            .sum(-1)
        )
        chosen, new = [], []
        for _ in range(more):
            largest, place = log.max(1, keepdim=True)
            chosen.append(values.gather(1, place))
            new.append(largest > -math.inf)
            log = log + (t - t.gather(1, place)).abs().log()
        return torch.cat(chosen, 1), torch.cat(new, 1)


@constant
def chebyshev_nodes(count: int) -> Tensor:
    """−cos(πj/(count − 1)): from −1 to 1."""
    return -torch.cos(math.pi * torch.arange(count, dtype=torch.float64) / (count - 1))


def _distinct(z: Tensor, top: Tensor) -> Tensor:
    """Whole numbers in order (m, k), pushed apart where two are the same; the last is at most
    `top`.
    """
    place = torch.arange(z.shape[1], dtype=torch.float64)
    up = (z - place).cummax(1).values + place
    return torch.minimum(up, top[:, None] - (z.shape[1] - 1 - place))


@dataclass(frozen=True, eq=False)
class Corrected:
    """A log density: output + correction where there is one.

    Increments are those of real refits at the y asked for.
    """

    weights: WeightLogDensity
    refitted: Tensor  # (N,) bool: rows with refits of the weights
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
        t = (
            self.frame.take(index)
            .inward(y.flatten(1) if y.dim() > 1 else y.unsqueeze(1))
            .clamp(-1, 1)
        )
        return base._replace(
            log=base.log + _clenshaw(self.coefficients[index], t).reshape(base.log.shape)
        )

    def __call__(self, y: Tensor) -> Increments:
        below = self.weights.output(y)
        rows = (self.refitted & ~self.failed).nonzero().squeeze(-1)
        if rows.numel():
            real = self.weights.increments(y[rows], rows)
            for target, values in zip(
                (below.likelihood, below.prior, below.curvature),
                (real.likelihood, real.prior, real.curvature),
                strict=True,
            ):
                target[rows] = values
        if self.weights.refit.on_failure == NAN:
            for target in (below.likelihood, below.prior, below.curvature):
                target[self.failed] = torch.nan
        return below


def correct(weights: WeightLogDensity, quantiles: Tensor, chosen: Tensor) -> Corrected:
    """Refit at few y of every chosen row (N,) bool; quantiles (N, 5) of the output predictive,
    at QUANTILES.
    """
    frame = Frame.over(
        weights.likelihood.support_for(weights.marginal.mean.shape[1]), quantiles, FIRST_NODES
    )
    no, nothing = (
        torch.zeros_like(chosen),
        torch.zeros(len(chosen), MOST_NODES, dtype=torch.float64),
    )
    state = Corrected(
        weights,
        chosen,
        frame,
        nothing + torch.nan,
        nothing,
        nothing,
        no,
        chosen & ~frame.usable,
        no,
    )
    return _refined(state, chosen & frame.usable, (FIRST_NODES, *MORE_NODES))


def widened(known: Corrected, quantiles: Tensor, rows: Tensor) -> Corrected:
    """Over a larger region in some rows (N,) bool, from the refits that are there and more."""
    full = rows & (known.refits + MORE_NODES[0] > MOST_NODES)  # no refits left for the new ends
    known, rows = replace(known, inaccurate=known.inaccurate | full), rows & ~full
    wider = Frame.over(known.frame.support, quantiles, FIRST_NODES)
    if wider.counts:
        wider = replace(
            wider,
            low=torch.minimum(wider.low, known.frame.low),
            high=torch.maximum(wider.high, known.frame.high),
        )
    return _refined(replace(known, frame=known.frame.replaced(rows, wider)), rows, MORE_NODES)


def _refined(state: Corrected, chosen: Tensor, portions: Iterable[int]) -> Corrected:
    """More nodes, a portion at a time, until the last portion changes the interpolant by no
    more than the error allowed.
    """
    weights, frame = state.weights, state.frame
    nodes, values, coefficients = (
        state.nodes.clone(),
        state.values.clone(),
        state.coefficients.clone(),
    )
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
        free = place < MOST_NODES
        who, which = (new & free).nonzero(as_tuple=True)
        if who.numel():  # else all counts of a region are there, or the most nodes
            task, slot, target = rows[who], place[who, which], y[who, which].unsqueeze(1)
            solved = weights.solve(target, task)
            weights.check(solved)
            nodes[task, slot] = torch.where(
                solved.steps > 0, target.squeeze(1), torch.nan
            )  # untried: no refit
            values[task, slot] = solved.total - weights.output.at(target, task).log.squeeze(1)
            fallback[task[solved.fallback]] = True
            failed[task[~solved.converged]] = True
        good = ~failed[rows]
        rows, before, whole, here = (
            rows[good],
            before[good],
            (~new & free).any(1)[good],
            here.take(good),
        )
        series = _series(here.inward(nodes[rows]), values[rows])
        coefficients[rows] = series
        compared = here.inward(here.outward(chebyshev_nodes(COMPARED).expand(len(rows), -1)))
        change = (
            _clenshaw(series - before, compared).abs().amax(1) if rows.numel() else before[:, 0]
        )
        error = torch.fmax(change, changed[good] / SURE)
        error = torch.where(
            (new & free).any(1)[good], error, torch.inf
        )  # no new node: the change is no measure of the error
        again = ~(
            (error <= weights.refit.interpolation) | whole
        )  # whole: every count has its own refit
        rows, before, changed = rows[again], series[again], change[again]
    coefficients[failed] = torch.nan if weights.refit.on_failure == NAN else 0.0
    inaccurate = state.inaccurate.index_fill(0, rows, True)
    return replace(
        state,
        nodes=nodes,
        values=values,
        coefficients=coefficients,
        fallback=fallback,
        failed=failed,
        inaccurate=inaccurate,
    )


def uncorrected(weights: WeightLogDensity, chosen: Tensor, failed: Tensor) -> Corrected:
    """For classes, where every y has its own refit and nothing is interpolated."""
    no, zero = torch.zeros_like(chosen), torch.zeros(len(chosen), dtype=torch.float64)
    frame = Frame(
        weights.likelihood.support_for(weights.marginal.mean.shape[1]),
        zero,
        zero + 1,
        zero,
        zero + 1,
    )
    none = zero.unsqueeze(1)
    return Corrected(weights, chosen, frame, none + torch.nan, none, none, no, failed, no)


def _series(t: Tensor, values: Tensor) -> Tensor:
    """Chebyshev coefficients (m, K) of the polynomial through values (m, K) at t (m, K; NaN: no
    node). NaN without nodes.
    """
    counts = (~t.isnan()).sum(1)
    order = t.isnan().long().argsort(dim=1, stable=True)  # nodes first
    series = torch.where((counts == 0)[:, None], torch.nan, torch.zeros_like(values))
    for count in (
        counts.unique().tolist()
    ):  # each size by itself, so that a row's rounding does not depend on other rows
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
