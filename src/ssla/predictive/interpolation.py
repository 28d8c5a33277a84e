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
from ssla.maths.constants import cached_constant
from ssla.refit import Density, WeightLogDensity
from ssla.refit.increments import Increments
from ssla.refit.weights.solved import NAN
from ssla.values import Marginal

# These numbers are guesses unless a reason is given. The error is checked in each row.
TAIL = 2.5e-4  # of the output predictive, beyond the nodes on either side
# the region, its centre, and ± 1.5 standard deviations of a normal
QUANTILES = (TAIL, 0.0668, 0.5, 0.9332, 1 - TAIL)
# the region's width over that of ± 1.5 standard deviations, in w; a normal has 2.32 in y
REACH = 2.2
# scales tried, in standard deviations
BENDS = torch.logspace(math.log10(0.3), math.log10(4.0), 48, dtype=torch.float64)
CANDIDATES = 401  # points among which a further node is chosen
FIRST_NODES = 7
MORE_NODES = (2, 2, 2, 4, 4, 4, 8, 8, 8, 16, 16, 16, 24, 32)
MOST_NODES = FIRST_NODES + sum(MORE_NODES)
REGION = 5e-4  # of the answer, beyond the region of the stated error on either side
WIDENINGS = 6  # at most, of a row's region
# a small change counts as chance if the portion before changed more than this many times the error
# allowed
SURE = 4.0
COMPARED = 65  # points at which two interpolants are compared


@dataclass(frozen=True)
class Frame:
    """The variable t of each row, in which the correction is interpolated.

    t is linear in w = asinh((z − centre)/scale), z the support's real coordinate; in y itself for
    counts. It is −1 and 1 at the ends of the row's region. The scale is chosen so that w has the
    tails of a normal, a little shortened: a correction to a heavy-tailed density is then as smooth
    in w as one to a normal density is in y.
    """

    support: Support
    centre: Tensor  # (N,)
    scale: Tensor
    low: Tensor  # w at the ends
    high: Tensor

    @staticmethod
    def over(support: Support, quantiles: Tensor, least: int) -> Frame:
        """Make the frame of regions from the output predictive's QUANTILES (N, 5).

        Counts get a region of `least` numbers or more.
        """
        if not isinstance(support, Continuous):
            low = quantiles[:, 0].floor().clamp_min(0)
            high = torch.maximum(quantiles[:, -1].ceil(), low + least - 1)
            return Frame(support, torch.zeros_like(low), torch.ones_like(low), low, high)
        z = support.to_real(quantiles)
        centre = z[:, 2]
        off = z - centre[:, None]
        # Among S scales, take the one in which the region's reach is closest to REACH.
        scales = (z[:, 3] - z[:, 1])[:, None] / 2 * BENDS  # (N, S)
        w = torch.asinh(off[:, None] / scales[..., None])
        reach = (w[..., 4] - w[..., 0]) / (w[..., 3] - w[..., 1])
        scale = scales.gather(1, (reach - REACH).abs().argmin(1, keepdim=True)).squeeze(1)
        return Frame(support, centre, scale, *(torch.asinh(off[:, end] / scale) for end in (0, -1)))

    @property
    def counts(self) -> bool:
        """Tell whether y is a count."""
        return not isinstance(self.support, Continuous)

    @property
    def usable(self) -> Tensor:
        """Tell which rows (N,) bool have a finite region of positive width."""
        return torch.isfinite(self.low + self.high) & (self.high > self.low) & (self.scale > 0)

    def take(self, rows: Tensor) -> Frame:
        """Return the frame of some rows (m,)."""
        return Frame(
            self.support, self.centre[rows], self.scale[rows], self.low[rows], self.high[rows]
        )

    def replace_rows(self, rows: Tensor, other: Frame) -> Frame:
        """Return the frame with the rows (N,) bool of another frame."""
        parts = ("centre", "scale", "low", "high")
        return Frame(
            self.support,
            *(torch.where(rows, getattr(other, part), getattr(self, part)) for part in parts),
        )

    def to_y(self, t: Tensor) -> Tensor:
        """Map t (m, k) to y (m, k); whole numbers for counts."""
        w = self.low[:, None] + (self.high - self.low)[:, None] * (t + 1) / 2
        if isinstance(self.support, Continuous):
            return self.support.from_real(
                self.centre[:, None] + self.scale[:, None] * torch.sinh(w)
            )
        return w.round()

    def to_t(self, y: Tensor) -> Tensor:
        """Map y (m, k) to t (m, k)."""
        w = y
        if isinstance(self.support, Continuous):
            w = torch.asinh((self.support.to_real(y) - self.centre[:, None]) / self.scale[:, None])
        return 2 * (w - self.low[:, None]) / (self.high - self.low)[:, None] - 1

    def choose_nodes(self, known: Tensor, more: int) -> tuple[Tensor, Tensor]:
        """Choose y at `more` nodes beside the known ones (m, k; NaN: none), and tell which are new.

        Returns (m, more) each. The first nodes are Chebyshev's, ends included; each further one is
        where Π|t − t_j| is largest (Leja's rule). A region of few counts may have no new ones left.
        """
        if bool(known.isnan().all()):
            y = self.to_y(chebyshev_nodes(more).expand(len(known), -1))
            y = _push_apart(y, self.high) if self.counts else y
            return y, torch.ones_like(y, dtype=torch.bool)
        candidates = self.to_y(chebyshev_nodes(CANDIDATES).expand(len(known), -1))
        t = self.to_t(candidates)
        # log Π|t − t_j| over the known nodes; −∞ at a node, and a missing node (NaN) adds nothing
        distances = (t.unsqueeze(-1) - self.to_t(known).unsqueeze(1)).abs().log()
        log_product = distances.nan_to_num(nan=0.0, neginf=-math.inf).sum(-1)
        chosen, is_new = [], []
        for _ in range(more):
            largest, best = log_product.max(1, keepdim=True)
            chosen.append(candidates.gather(1, best))
            is_new.append(largest > -math.inf)
            log_product = log_product + (t - t.gather(1, best)).abs().log()
        return torch.cat(chosen, 1), torch.cat(is_new, 1)


@cached_constant
def chebyshev_nodes(count: int) -> Tensor:
    """Return −cos(πj/(count − 1)) for j = 0, 1, …: nodes (count,) from −1 to 1."""
    return -torch.cos(math.pi * torch.arange(count, dtype=torch.float64) / (count - 1))


def _push_apart(z: Tensor, top: Tensor) -> Tensor:
    """Push apart whole numbers in order (m, k) where two are the same; the last is at most `top`
    (m,).
    """
    number = torch.arange(z.shape[1], dtype=torch.float64)
    up = (z - number).cummax(1).values + number
    return torch.minimum(up, top[:, None] - (z.shape[1] - 1 - number))


@dataclass(frozen=True, eq=False)
class Corrected:
    """A log density: that of the output rung, plus the correction where there is one.

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

    outputs_move = True

    @property
    def refits(self) -> Tensor:
        """Return the number of refits in each row (N,)."""
        return (~self.nodes.isnan()).sum(1)

    @property
    def likelihood(self) -> Likelihood:
        """Return the law of the new observation."""
        return self.weights.likelihood

    @property
    def marginal(self) -> Marginal:
        """Return f̂ (N, C) and K (N, C, C)."""
        return self.weights.marginal

    @property
    def like(self) -> Tensor:
        """Return a tensor of the dtype and device of the answers."""
        return self.weights.like

    def density_at(self, y: Tensor, rows: Tensor | None = None) -> Density:
        """Return the corrected log densities at y (m, …) of the rows (m,); of all rows if None."""
        base = self.weights.output.density_at(y, rows)
        index = torch.arange(len(y)) if rows is None else rows
        y_flat = y.flatten(1) if y.dim() > 1 else y.unsqueeze(1)
        t = self.frame.take(index).to_t(y_flat).clamp(-1, 1)  # constant beyond the region
        correction = _sum_chebyshev(self.coefficients[index], t)
        return base._replace(log=base.log + correction.reshape(base.log.shape))

    def __call__(self, y: Tensor) -> Increments:
        """Return the increments at y (N, …): of refits of the weights in the rows that have them,
        of the output rung elsewhere; NaN where a refit failed and on_failure is "nan".
        """
        increments = self.weights.output(y)
        rows = (self.refitted & ~self.failed).nonzero().squeeze(-1)
        terms = ("likelihood", "prior", "curvature")
        if rows.numel():
            by_weights = self.weights.increments(y[rows], rows)
            for term in terms:
                getattr(increments, term)[rows] = getattr(by_weights, term)
        if self.weights.refit.on_failure == NAN:
            for term in terms:
                getattr(increments, term)[self.failed] = torch.nan
        return increments


def fit_correction(weights: WeightLogDensity, quantiles: Tensor, chosen: Tensor) -> Corrected:
    """Refit at a few y of every chosen row (N,) bool, and interpolate the correction.

    quantiles (N, 5): of the output predictive, at QUANTILES.
    """
    frame = Frame.over(_support_of(weights), quantiles, FIRST_NODES)
    no = torch.zeros_like(chosen)
    zeros = torch.zeros(len(chosen), MOST_NODES, dtype=torch.float64)
    state = Corrected(
        weights,
        refitted=chosen,
        frame=frame,
        nodes=zeros + torch.nan,
        values=zeros,
        coefficients=zeros,
        fallback=no,
        failed=chosen & ~frame.usable,
        inaccurate=no,
    )
    return _refine_correction(state, chosen & frame.usable, (FIRST_NODES, *MORE_NODES))


def _support_of(weights: WeightLogDensity) -> Support:
    """Return the support of y, which may depend on the number of outputs."""
    return weights.likelihood.support_for(weights.marginal.mean.shape[1])


def widen_correction(known: Corrected, quantiles: Tensor, rows: Tensor) -> Corrected:
    """Interpolate over a larger region in some rows (N,) bool, with the refits that are known and
    more. quantiles (N, 5): of the larger region.
    """
    # Rows without refits left for the new ends stay as they are and are inaccurate.
    full = rows & (known.refits + MORE_NODES[0] > MOST_NODES)
    known = replace(known, inaccurate=known.inaccurate | full)
    rows = rows & ~full
    wider = Frame.over(known.frame.support, quantiles, FIRST_NODES)
    if wider.counts:
        wider = replace(
            wider,
            low=torch.minimum(wider.low, known.frame.low),
            high=torch.maximum(wider.high, known.frame.high),
        )
    frame = known.frame.replace_rows(rows, wider)
    return _refine_correction(replace(known, frame=frame), rows, MORE_NODES)


def _refine_correction(state: Corrected, chosen: Tensor, portions: Iterable[int]) -> Corrected:
    """Add nodes to the chosen rows (N,) bool, a portion at a time, until the last portion changes
    the interpolant by no more than the error allowed.

    Rows that have not reached it after all portions are flagged as inaccurate.
    """
    state = _with_own_tensors(state)
    weights, allowed = state.weights, state.weights.refit.interpolation
    rows = chosen.nonzero().squeeze(-1)
    before = _fit_chebyshev(state.frame.take(rows).to_t(state.nodes[rows]), state.values[rows])
    changed = torch.full((len(rows),), torch.nan, dtype=torch.float64)  # by the portion before
    for portion in portions:
        if not rows.numel():
            break
        added, complete = _add_nodes(state, rows, portion)
        good = ~state.failed[rows]
        rows, before, changed = rows[good], before[good], changed[good]
        added, complete = added[good], complete[good]
        frame = state.frame.take(rows)
        series = _fit_chebyshev(frame.to_t(state.nodes[rows]), state.values[rows])
        state.coefficients[rows] = series
        change = _largest_difference(frame, series, before)
        # Without a new node the change is no measure of the error.
        error = torch.where(added, torch.fmax(change, changed / SURE), torch.inf)
        again = ~((error <= allowed) | complete)
        rows, before, changed = rows[again], series[again], change[again]
    state.coefficients[state.failed] = torch.nan if weights.refit.on_failure == NAN else 0.0
    return replace(state, inaccurate=state.inaccurate.index_fill(0, rows, True))


def _with_own_tensors(state: Corrected) -> Corrected:
    """Copy the tensors that a refinement writes to, so that the caller's state does not change."""
    names = ("nodes", "values", "coefficients", "fallback", "failed")
    return replace(state, **{name: getattr(state, name).clone() for name in names})


def _add_nodes(state: Corrected, rows: Tensor, portion: int) -> tuple[Tensor, Tensor]:
    """Refit at up to `portion` more nodes of each row (m,), and write the results into the state.

    Returns which rows got a node (m,) bool, and which are complete (m,) bool: all counts of their
    region have a refit.
    """
    weights, known = state.weights, state.nodes[rows]
    y, is_new = state.frame.take(rows).choose_nodes(known, portion)
    columns = (~known.isnan()).sum(1, keepdim=True) + torch.arange(portion)
    free = columns < MOST_NODES
    row, number = (is_new & free).nonzero(as_tuple=True)
    if row.numel():
        task, column, target = rows[row], columns[row, number], y[row, number].unsqueeze(1)
        of_network = rows[~weights.linearised_inputs[rows]]
        solved = weights.solve(target, task)
        weights.check_failures(solved)
        _refit_linearised(state, of_network[weights.linearised_inputs[of_network]])
        # Zero steps: the refit was not tried, so there is no node.
        state.nodes[task, column] = torch.where(solved.steps > 0, target.squeeze(1), torch.nan)
        output_logs = weights.output.density_at(target, task).log.squeeze(1)
        state.values[task, column] = solved.total - output_logs
        state.fallback[task[solved.fallback]] = True
        state.failed[task[~solved.converged]] = True
    return (is_new & free).any(1), (~is_new & free).any(1)


def _refit_linearised(state: Corrected, rows: Tensor) -> None:
    """Refit at the known nodes of rows (m,) that the linearised network has just taken over, so
    that all values of a row are of one network. Writes the results into the state.
    """
    row, column = (~state.nodes[rows].isnan()).nonzero(as_tuple=True)
    task = rows[row]
    if not task.numel():
        return
    y = state.nodes[task, column].unsqueeze(1)
    solved = state.weights.solve(y, task)
    state.values[task, column] = solved.total - state.weights.output.density_at(
        y, task
    ).log.squeeze(1)
    state.failed[task[~solved.converged]] = True


def _largest_difference(frame: Frame, series: Tensor, before: Tensor) -> Tensor:
    """Return the largest difference (m,) of two interpolants over the region, at COMPARED points.

    series, before (m, K): their coefficients.
    """
    if not len(series):
        return before[:, 0]
    # There and back: of counts, only whole numbers are compared.
    t = frame.to_t(frame.to_y(chebyshev_nodes(COMPARED).expand(len(series), -1)))
    return _sum_chebyshev(series - before, t).abs().amax(1)


def without_correction(weights: WeightLogDensity, chosen: Tensor, failed: Tensor) -> Corrected:
    """Return a state without interpolation, for classes: every y has its own refit.

    chosen, failed (N,) bool: the rows with refits, and those in which a refit failed.
    """
    no = torch.zeros_like(chosen)
    zero = torch.zeros(len(chosen), dtype=torch.float64)
    frame = Frame(_support_of(weights), zero, zero + 1, zero, zero + 1)
    none = zero.unsqueeze(1)
    return Corrected(weights, chosen, frame, none + torch.nan, none, none, no, failed, no)


def _fit_chebyshev(t: Tensor, values: Tensor) -> Tensor:
    """Return the Chebyshev coefficients (m, K) of the polynomial through values (m, K) at t (m, K).

    NaN in t stands for no node. Rows without nodes have NaN coefficients.
    """
    counts = (~t.isnan()).sum(1)
    order = t.isnan().long().argsort(dim=1, stable=True)  # nodes first
    series = torch.where((counts == 0)[:, None], torch.nan, torch.zeros_like(values))
    # Rows are solved by their number of nodes, so that a row's rounding does not depend on others.
    for count in counts.unique().tolist():
        if count == 0:
            continue
        rows = counts == count
        first = order[rows, :count]
        angle = torch.arccos(t[rows].gather(1, first).clamp(-1, 1))
        basis = torch.cos(angle.unsqueeze(-1) * torch.arange(count, dtype=torch.float64))
        solved = torch.linalg.solve(basis, values[rows].gather(1, first).unsqueeze(-1)).squeeze(-1)
        series[rows] = torch.nn.functional.pad(solved, (0, values.shape[1] - count))
    return series


def _sum_chebyshev(coefficients: Tensor, t: Tensor) -> Tensor:
    """Evaluate Σ_k c_k T_k(t) by Clenshaw's recurrence: (m, K), (m, j) -> (m, j)."""
    later = last = torch.zeros_like(t)
    used = (coefficients != 0).any(0)
    highest = int(used.nonzero().max()) if bool(used.any()) else 0
    for k in range(highest, 0, -1):
        last, later = 2 * t * last - later + coefficients[:, k, None], last
    return t * last - later + coefficients[:, :1]
