"""The density of y from few refits of the weights: the output rung's log density plus a correction.

The correction is the difference of the two rungs' log densities. It is small and smooth in y, and
is interpolated by a polynomial in t, which runs from −1 to 1 over a row's region (`Frame`). The
region has 99.95% of the output predictive. It is widened where the corrected predictive reaches
further; beyond it the correction is constant. Seven refits come first, then two more and later more
at a time, until the last ones changed the interpolant by less than the error allowed. This
difference is the error of the interpolant before the last, so that the last one is better.

    rung          a kind of refit; here "output" and "weights"
    correction    log density of the weights rung less that of the output rung, as a function of y
    node          a y at which a row was refitted, and where its correction is known
    region        the interval of y over which a row's correction is interpolated
    portion       some nodes that are added together
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

    For numbers t is linear in w = asinh((z − centre)/scale), with z the support's real coordinate;
    for counts it is linear in w = y. It is −1 and 1 at the ends of the row's region. The scale is
    chosen so that w has the tails of a normal, a little shortened: a correction to a heavy-tailed
    density is then as smooth in w as one to a normal density is in y.
    """

    support: Support
    centre: Tensor  # (N,)
    scale: Tensor  # (N,)
    low: Tensor  # w at the lower end of the region (N,)
    high: Tensor  # w at the upper end (N,)

    @staticmethod
    def build(support: Support, quantiles: Tensor, least: int) -> Frame:
        """Build the frame whose regions run from the first to the last of the quantiles (N, 5).

        support: of y. quantiles: of the output predictive, at QUANTILES. A region of counts has at
        least `least` counts.
        """
        if not isinstance(support, Continuous):
            low = quantiles[:, 0].floor().clamp_min(0)
            high = torch.maximum(quantiles[:, -1].ceil(), low + least - 1)
            return Frame(support, torch.zeros_like(low), torch.ones_like(low), low, high)

        z = support.to_real(quantiles)
        centre = z[:, 2]
        from_centre = z - centre[:, None]

        # Of S scales, the one is taken in which the region's width over that of ± 1.5 standard
        # deviations is closest to REACH.
        scales = (z[:, 3] - z[:, 1])[:, None] / 2 * BENDS  # (N, S)
        w = torch.asinh(from_centre[:, None] / scales[..., None])
        reach = (w[..., 4] - w[..., 0]) / (w[..., 3] - w[..., 1])
        scale = scales.gather(1, (reach - REACH).abs().argmin(1, keepdim=True)).squeeze(1)
        low = torch.asinh(from_centre[:, 0] / scale)
        high = torch.asinh(from_centre[:, -1] / scale)
        return Frame(support, centre, scale, low, high)

    @property
    def is_of_counts(self) -> bool:
        """Tell whether y is a count."""
        return not isinstance(self.support, Continuous)

    @property
    def is_usable(self) -> Tensor:
        """Tell for each row (N,) bool whether its region is finite and has a positive width."""
        return torch.isfinite(self.low + self.high) & (self.high > self.low) & (self.scale > 0)

    def take(self, rows: Tensor) -> Frame:
        """Return the frame of some rows, given by their indices (m,)."""
        return Frame(
            self.support, self.centre[rows], self.scale[rows], self.low[rows], self.high[rows]
        )

    def replace_rows(self, rows: Tensor, other: Frame) -> Frame:
        """Return the frame with the rows (N,) bool taken from another frame of the same N rows."""
        return Frame(
            self.support,
            centre=torch.where(rows, other.centre, self.centre),
            scale=torch.where(rows, other.scale, self.scale),
            low=torch.where(rows, other.low, self.low),
            high=torch.where(rows, other.high, self.high),
        )

    def to_y(self, t: Tensor) -> Tensor:
        """Return y (m, k) at t (m, k), rounded to whole numbers for counts."""
        w = self.low[:, None] + (self.high - self.low)[:, None] * (t + 1) / 2
        if isinstance(self.support, Continuous):
            return self.support.from_real(
                self.centre[:, None] + self.scale[:, None] * torch.sinh(w)
            )
        return w.round()

    def to_t(self, y: Tensor) -> Tensor:
        """Return t (m, k) at y (m, k); it is beyond ±1 outside the region."""
        # w of a count is y itself.
        w = y
        if isinstance(self.support, Continuous):
            w = torch.asinh((self.support.to_real(y) - self.centre[:, None]) / self.scale[:, None])
        return 2 * (w - self.low[:, None]) / (self.high - self.low)[:, None] - 1

    def choose_nodes(self, known: Tensor, more: int) -> tuple[Tensor, Tensor]:
        """Choose y at `more` further nodes, and tell which of them are new: (m, more) each.

        known (m, k): y of the nodes so far; NaN stands for no node. Without any, the nodes are
        Chebyshev's, ends included. Otherwise each further node is where Π|t − t_j| is largest
        (Leja's rule). A region of few counts may have no new node left.
        """
        if bool(known.isnan().all()):
            y = self.to_y(make_chebyshev_nodes(more).expand(len(known), -1))
            # Rounding may have made neighbouring counts equal.
            y = _separate_counts(y, self.high) if self.is_of_counts else y
            return y, torch.ones_like(y, dtype=torch.bool)

        candidates = self.to_y(make_chebyshev_nodes(CANDIDATES).expand(len(known), -1))
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
def make_chebyshev_nodes(count: int) -> Tensor:
    """Return Chebyshev's nodes −cos(πj/(count − 1)) for j = 0, 1, …: (count,), from −1 to 1.

    count must be at least 2.
    """
    return -torch.cos(math.pi * torch.arange(count, dtype=torch.float64) / (count - 1))


def _separate_counts(z: Tensor, top: Tensor) -> Tensor:
    """Return counts z (m, k), which are in rising order, moved so that no two in a row are equal.

    The numbers are moved up where needed, and then down so that the last is at most `top` (m,).
    """
    number = torch.arange(z.shape[1], dtype=torch.float64)
    # z_j − j must not fall, so that z_j rises by at least one.
    moved_up = (z - number).cummax(1).values + number
    return torch.minimum(moved_up, top[:, None] - (z.shape[1] - 1 - number))


@dataclass(frozen=True, eq=False)
class Corrected:
    """The log density of the output rung plus the interpolated correction.

    Its increments are not interpolated: they are those of refits at the given y.
    """

    weights: WeightLogDensity
    refitted: Tensor  # (N,) bool: rows with refits of the weights
    frame: Frame
    nodes: Tensor  # (N, K) y of the refits; NaN: no refit
    values: Tensor  # (N, K) the correction at the nodes
    coefficients: Tensor  # (N, K) of the correction in Chebyshev polynomials of t
    fallback: Tensor  # (N,) bool: a refit took the Fisher information
    failed: Tensor  # (N,) bool: a refit failed, so that this row is the output rung's
    inaccurate: Tensor  # (N,) bool: the correction was not resolved with the most nodes

    outputs_move = True

    @property
    def refit_counts(self) -> Tensor:
        """Return the number of refits in each row (N,)."""
        return (~self.nodes.isnan()).sum(1)

    @property
    def likelihood(self) -> Likelihood:
        """Return the likelihood of the new observation."""
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
        """Return the corrected log densities at y (m,) or (m, k), with the output rung's flags.

        rows (m,): the inputs to which the rows of y belong; None: all in order.
        """
        output = self.weights.output.density_at(y, rows)
        index = torch.arange(len(y)) if rows is None else rows
        y_by_row = y.flatten(1) if y.dim() > 1 else y.unsqueeze(1)
        # The clamp makes the correction constant beyond the region.
        t = self.frame.take(index).to_t(y_by_row).clamp(-1, 1)
        correction = _sum_chebyshev(self.coefficients[index], t)
        return output._replace(log=output.log + correction.reshape(output.log.shape))

    def __call__(self, y: Tensor) -> Increments:
        """Return the increments at y (N,) or (N, k), each of y's shape.

        Rows with refits of the weights are refitted at these y; the others have the increments of
        the output rung. Rows in which a refit failed are NaN if on_failure is "nan".
        """
        increments = self.weights.output(y)
        rows = (self.refitted & ~self.failed).nonzero().squeeze(-1)
        # The tensors of the increments are fresh, so they may be changed in place.
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

    weights: makes the refits. quantiles (N, 5): of the output predictive, at QUANTILES. A chosen
    row without a usable region counts as failed.
    """
    frame = Frame.build(_get_support(weights), quantiles, FIRST_NODES)
    no_row = torch.zeros_like(chosen)
    zeros = torch.zeros(len(chosen), MOST_NODES, dtype=torch.float64)
    corrected = Corrected(
        weights,
        refitted=chosen,
        frame=frame,
        nodes=zeros + torch.nan,
        values=zeros,
        coefficients=zeros,
        fallback=no_row,
        failed=chosen & ~frame.is_usable,
        inaccurate=no_row,
    )
    return _refine_correction(corrected, chosen & frame.is_usable, (FIRST_NODES, *MORE_NODES))


def _get_support(weights: WeightLogDensity) -> Support:
    """Return the support of y for the network's number of outputs."""
    return weights.likelihood.support_for(weights.marginal.mean.shape[1])


def widen_correction(corrected: Corrected, quantiles: Tensor, rows: Tensor) -> Corrected:
    """Return the correction interpolated over a larger region in some rows (N,) bool.

    corrected: the correction so far. quantiles (N, 5): those of `fit_correction`, with the first
    and the last moved outward. The refits so far are kept and more are made. A row that already has
    nearly MOST_NODES keeps its region and is flagged as inaccurate.
    """
    full = rows & (corrected.refit_counts + MORE_NODES[0] > MOST_NODES)
    corrected = replace(corrected, inaccurate=corrected.inaccurate | full)
    rows = rows & ~full
    wider = Frame.build(corrected.frame.support, quantiles, FIRST_NODES)
    # A region of few counts was enlarged when it was built, and must not become smaller.
    if wider.is_of_counts:
        wider = replace(
            wider,
            low=torch.minimum(wider.low, corrected.frame.low),
            high=torch.maximum(wider.high, corrected.frame.high),
        )
    frame = corrected.frame.replace_rows(rows, wider)
    return _refine_correction(replace(corrected, frame=frame), rows, MORE_NODES)


def _refine_correction(corrected: Corrected, chosen: Tensor, portions: Iterable[int]) -> Corrected:
    """Return the correction with nodes added to the chosen rows (N,) bool, a portion at a time.

    A row is done when the last portion changed its interpolant by no more than the error allowed.
    corrected: the correction so far, which is not changed. portions: numbers of nodes. A row that
    is still changed too much by the last portion is flagged as inaccurate. A row in which a refit
    fails has no correction, or NaN if on_failure is "nan".
    """
    corrected = _copy_tensors(corrected)
    allowed = corrected.weights.refit.interpolation
    rows = chosen.nonzero().squeeze(-1)

    # The coefficients before a portion, and how much the portion before it changed the interpolant.
    before = _fit_chebyshev(
        corrected.frame.take(rows).to_t(corrected.nodes[rows]), corrected.values[rows]
    )
    last_change = torch.full((len(rows),), torch.nan, dtype=torch.float64)
    for portion in portions:
        if not rows.numel():
            break
        added, complete = _add_nodes(corrected, rows, portion)
        good = ~corrected.failed[rows]
        rows, before, last_change = rows[good], before[good], last_change[good]
        added, complete = added[good], complete[good]
        frame = corrected.frame.take(rows)
        series = _fit_chebyshev(frame.to_t(corrected.nodes[rows]), corrected.values[rows])
        corrected.coefficients[rows] = series
        change = _find_largest_difference(frame, series, before)
        # A small change after a large one may be chance (SURE). Without a new node the change says
        # nothing of the error.
        error = torch.where(added, torch.fmax(change, last_change / SURE), torch.inf)
        unfinished = ~((error <= allowed) | complete)
        rows, before, last_change = rows[unfinished], series[unfinished], change[unfinished]

    is_nan = corrected.weights.refit.on_failure == NAN
    corrected.coefficients[corrected.failed] = torch.nan if is_nan else 0.0
    return replace(corrected, inaccurate=corrected.inaccurate.index_fill(0, rows, True))


def _copy_tensors(corrected: Corrected) -> Corrected:
    """Return the correction with copies of the tensors that a refinement writes to.

    The caller's correction then does not change.
    """
    names = ("nodes", "values", "coefficients", "fallback", "failed")
    return replace(corrected, **{name: getattr(corrected, name).clone() for name in names})


def _add_nodes(corrected: Corrected, rows: Tensor, portion: int) -> tuple[Tensor, Tensor]:
    """Refit at up to `portion` more nodes of each row (m,), and write the results into `corrected`.

    Its tensors are changed in place. Returns two flags (m,) bool of the rows: whether they got a
    node, and whether they are complete, which is that all counts of their region have a refit.
    Raises RuntimeError where a refit fails and on_failure is "raise".
    """
    weights = corrected.weights
    known = corrected.nodes[rows]
    y, is_new = corrected.frame.take(rows).choose_nodes(known, portion)

    # The nodes of a row fill its columns from the left.
    columns = (~known.isnan()).sum(1, keepdim=True) + torch.arange(portion)
    has_column = columns < MOST_NODES
    row, number = (is_new & has_column).nonzero(as_tuple=True)
    if row.numel():
        # the row, the column and the y of each refit
        task = rows[row]
        column = columns[row, number]
        target = y[row, number].unsqueeze(1)
        rows_of_network = rows[~weights.linearised_inputs[rows]]
        solved = weights.solve(target, task)
        weights.check_failures(solved)
        # `solve` may have switched rows to the linearised network. Their old nodes are refitted.
        switched = rows_of_network[weights.linearised_inputs[rows_of_network]]
        _refit_known_nodes(corrected, switched)
        # Zero steps: the refit was not tried, so there is no node.
        corrected.nodes[task, column] = torch.where(solved.steps > 0, target.squeeze(1), torch.nan)
        output_logs = weights.output.density_at(target, task).log.squeeze(1)
        corrected.values[task, column] = solved.total - output_logs
        corrected.fallback[task[solved.fallback]] = True
        corrected.failed[task[~solved.converged]] = True
    return (is_new & has_column).any(1), (~is_new & has_column).any(1)


def _refit_known_nodes(corrected: Corrected, rows: Tensor) -> None:
    """Refit again at the nodes that some rows (m,) already have.

    The values are written into the tensors of `corrected`, in place. The rows have just been
    switched to the linearised network, and all values of a row must come from one network.
    """
    row, column = (~corrected.nodes[rows].isnan()).nonzero(as_tuple=True)
    task = rows[row]
    if not task.numel():
        return
    y = corrected.nodes[task, column].unsqueeze(1)
    solved = corrected.weights.solve(y, task)
    corrected.values[task, column] = solved.total - corrected.weights.output.density_at(
        y, task
    ).log.squeeze(1)
    corrected.failed[task[~solved.converged]] = True


def _find_largest_difference(frame: Frame, series: Tensor, before: Tensor) -> Tensor:
    """Return the largest absolute difference (m,) of two interpolants at COMPARED points.

    The points are spread over the region of each row of the frame. series, before (m, K): the
    coefficients of the interpolants.
    """
    if not len(series):  # no rows
        return before[:, 0]
    # `to_y` rounds counts, so that they are compared at whole numbers only.
    t = frame.to_t(frame.to_y(make_chebyshev_nodes(COMPARED).expand(len(series), -1)))
    return _sum_chebyshev(series - before, t).abs().amax(1)


def make_uncorrected(weights: WeightLogDensity, chosen: Tensor, failed: Tensor) -> Corrected:
    """Return a log density whose correction is zero, for classes.

    Its increments are those of refits. chosen, failed (N,) bool: the rows with refits, and those in
    which a refit failed.
    """
    no_row = torch.zeros_like(chosen)
    zeros = torch.zeros(len(chosen), dtype=torch.float64)
    ones = zeros + 1
    no_node = zeros.unsqueeze(1) + torch.nan
    return Corrected(
        weights,
        refitted=chosen,
        frame=Frame(_get_support(weights), centre=zeros, scale=ones, low=zeros, high=ones),
        nodes=no_node,
        values=zeros.unsqueeze(1),
        coefficients=zeros.unsqueeze(1),
        fallback=no_row,
        failed=failed,
        inaccurate=no_row,
    )


def _fit_chebyshev(t: Tensor, values: Tensor) -> Tensor:
    """Return the Chebyshev coefficients (m, K) of the polynomial through values (m, K) at t (m, K).

    NaN in t stands for no node. The degree is the number of nodes less one, and higher coefficients
    are zero. Rows without nodes have NaN coefficients.
    """
    counts = (~t.isnan()).sum(1)
    order = t.isnan().long().argsort(dim=1, stable=True)  # nodes first
    series = torch.where((counts == 0)[:, None], torch.nan, torch.zeros_like(values))

    # Rows with the same number of nodes are solved together, so that the rounding of a row does not
    # depend on other rows.
    for count in counts.unique().tolist():
        if count == 0:
            continue
        rows = counts == count
        columns = order[rows, :count]
        # T_k(t) = cos(k arccos t)
        angle = torch.arccos(t[rows].gather(1, columns).clamp(-1, 1))
        basis = torch.cos(angle.unsqueeze(-1) * torch.arange(count, dtype=torch.float64))
        targets = values[rows].gather(1, columns).unsqueeze(-1)
        solved = torch.linalg.solve(basis, targets).squeeze(-1)
        series[rows] = torch.nn.functional.pad(solved, (0, values.shape[1] - count))
    return series


def _sum_chebyshev(coefficients: Tensor, t: Tensor) -> Tensor:
    """Return Σ_k c_k T_k(t) (m, j), with Chebyshev polynomials T_k.

    coefficients: c (m, K). t (m, j). Clenshaw's recurrence is b_k = 2t b_{k+1} − b_{k+2} + c_k, and
    the sum is t b_1 − b_2 + c_0.
    """
    b_next = b_after_next = torch.zeros_like(t)
    is_used = (coefficients != 0).any(0)
    highest = int(is_used.nonzero().max()) if bool(is_used.any()) else 0
    for k in range(highest, 0, -1):
        b = 2 * t * b_next - b_after_next + coefficients[:, k, None]
        b_after_next = b_next
        b_next = b
    return t * b_next - b_after_next + coefficients[:, :1]
