"""Approximate full conformal sets: without calibration rows, and without refits.

Full conformal prediction adds the candidate (x, y) to the data, fits again, and keeps y unless its
score is among the highest of all rows. The terms:

    candidate      a new input x with a y that may be in its set
    compared rows  the training rows whose scores are compared with that of the candidate
    score          how badly the other rows predict a row: large for a surprising y
    site           what a row contributes to the fit: the gradient g (C,) of its log likelihood in
                   its outputs, and Λ (C, C), minus the second derivative or its expectation
    cavity         the Gaussian of a row's outputs when its own site is removed from the fit
    member         a posterior with its training rows; several networks have one member each

The scores are

    numbers, counts    |y − μ| / √v       μ = E[y|f],  v = Var[y|f] + Var E[y|f] to first order
    classes            1 − p(y)           p at f/√(1 + πk/8), k the variances of f

where f (C,) and K (C, C) are mean and covariance of the outputs without the row. For the candidate
they are the posterior's own, f_x and K_x. The refit with the candidate has the mode f̃ = f_x + K_x u
in the outputs, with u the gradient of log p(y|f) at f̃, and the precision Λ̃ there. Let S be the
covariance of θ, and J_i and J_x the Jacobians of the outputs. With X = J_i S J_xᵀ and
Q = Λ̃(I + K_xΛ̃)⁻¹ the refit moves the outputs of row i to

    f_i + X u        K_i − X Q Xᵀ

and the row's own site is then removed as in `leave_one_out`, with the sites fixed. Exact for a
linear model with Gaussian noise.

**Gaussian noise, one output.** With e = y_i − f_i, s = σ² + K_x, r = y − f_x and
h = (K_i − X²/s)/σ², the score of row i is |e − rX/s|/t with t² = σ²(1 − h), and that of the
candidate is |r|/√s. Since t > |X|/√s, row i has the higher score exactly for r between the two
values e√s/(X/√s ± t), which have opposite signs. So the set is an interval, and its ends are order
statistics of these values over the rows. (With a row weight w < 1, t² = σ²(1 − wh)(1
− wh + h), and the condition may fail: such a row counts as having the higher score.)

**Other numbers.** An end is where the score of the candidate equals the quantile of the others',
which moves little with y: a fixed point, with bisection where it is not a contraction. Candidates
further out than the end are not tried.

**Features that have seen the rows** make their scores too small: coverage is then below the level.
`rows` restricts the comparison to rows that the features have not seen. These and the new row are
exchangeable, although the last layer was fitted to them.

**Several networks,** each with its own unseen rows: a row is compared with the candidate by the
network that has not seen it, and the ranks are counted over all rows (cross-conformal prediction).
At the candidate all networks have the mean of their outputs, as a mixture has: network j compares y
− f̄ + f_j in place of y, with its own K_x. With their own outputs, as in CV+, the spread of the
networks at x makes the sets wider than the errors of their mean.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from ssla._checks import check_level as checked_level
from ssla._checks import warn
from ssla.data import Inputs, as_inputs, as_tensor, row_count, take_rows
from ssla.diagnostics.explanations import (
    Query,
    compute_first_order_variance,
    compute_mean_slopes,
    count_queries_at_once,
    iterate_queries,
)
from ssla.likelihoods import Likelihood
from ssla.likelihoods.support import Classes, Counts, Real, Support
from ssla.maths.linalg import covariance_root
from ssla.maths.order_statistics import conformal_quantile, describe_row_shortage
from ssla.predictive.cavities import Sites, collect_sites, compute_cavity
from ssla.priors import EXACT
from ssla.refit.increments import evaluate_at_mode
from ssla.refit.weights.refit_rows import DataPurpose

if TYPE_CHECKING:
    from ssla.posterior import Posterior

PURPOSE = DataPurpose(
    "posterior.predictive_set", "The data", "posterior.predictive_set(x, data={})"
)
ROWS_AT_ONCE = 1024  # training rows in a chunk; a guess
TOLERANCE = 1e-6  # of an endpoint, in standard deviations of y; a guess
MOST_STEPS = 60  # of the fixed point; a guess: bisection alone then gains 18 digits
NUMBERS = 16  # numbers, or C×C matrices, that are held for a training row and a candidate


class Member(NamedTuple):
    """A posterior with the training rows that it compares candidates with."""

    posterior: Posterior
    x: Inputs  # the new inputs, as its network takes them
    data: Any = None  # its training data; None: those that it keeps
    rows: Any = None  # the n training rows to compare with (n,) bool; None: all
    # the share of each row that this posterior counts (n,), where several posteriors compare with
    # the same row; None: all of each
    shares: Tensor | None = None


def predictive_set(
    posterior: Posterior, x: Inputs, level: float, data: Any = None, rows: Any = None
) -> Tensor:
    """Compute the conformal sets of one posterior at the N inputs x; see Posterior.predictive_set.

    level: of the sets, between 0 and 1. data, rows: as in `Member`. Returns intervals (N, 2) in the
    dtype of the posterior's answers, or sets of classes, bool (N, C). Raises what
    `cross_conformal_sets` raises.
    """
    sets = cross_conformal_sets([Member(posterior, as_inputs(x), data, rows)], level)
    if sets.dtype == torch.bool:
        return sets
    return sets.to(posterior.answer_template(posterior.outputs_at(x)))


def cross_conformal_sets(members: Sequence[Member], level: float) -> Tensor:
    """Compute conformal sets from one or several posteriors of the same likelihood.

    members: at least one, all with the same N new inputs. level: the least coverage, between 0 and
    1. Returns intervals (N, 2) in float64, or sets of classes, bool (N, C). Warns of sets that are
    infinite or too large. Raises ValueError for another convention than the exact one, for rows
    that are not those of the fit and for a y of infinite variance, and TypeError for targets other
    than numbers on the whole line, counts and classes.
    """
    level = checked_level(level)
    first = members[0].posterior
    support = _check_posterior(first)
    comparisons = [_Comparison.read_rows(member) for member in members]
    _warn_of_large_sets(
        torch.cat([comparison.rows.weights for comparison in comparisons]),
        torch.cat([comparison.rows.removable for comparison in comparisons]),
        level,
    )
    find_sets: Callable[[list[_Candidates], float], Tensor]

    # The first, empty result gives the right shape where there are no inputs.
    if isinstance(support, Classes):
        find_sets = _find_class_sets
        sets = [torch.empty(0, support.count, dtype=torch.bool)]
    else:
        find_sets = _solve_gaussian_ends if first.likelihood.quadratic else _search_ends
        sets = [torch.empty(0, 2, dtype=torch.float64)]

    # A few new inputs at a time, so that their covariances with all training rows fit the budget.
    compared_rows = sum(len(comparison.rows.y) for comparison in comparisons)
    numbers = NUMBERS * first.network.outputs * compared_rows
    at_once = count_queries_at_once(first, numbers)
    for start in range(0, row_count(members[0].x), at_once):
        inputs = slice(start, start + at_once)
        candidates = [comparison.make_candidates(inputs) for comparison in comparisons]
        sets.append(find_sets(_use_mean_output(candidates), level))

    result = torch.cat(sets)
    if isinstance(support, Counts):  # the whole numbers inside
        return torch.stack([result[:, 0].clamp_min(0).ceil(), result[:, 1].floor()], 1)
    return result


def _check_posterior(posterior: Posterior) -> Support:
    """Return the support of y, if conformal sets are defined for the posterior.

    Raises ValueError for another convention than the exact one, and TypeError for other targets
    than numbers on the whole line, counts and classes.
    """
    if posterior.convention != EXACT:
        raise ValueError(
            "predictive_set works with the exact convention only, but this posterior has "
            f"convention={posterior.convention!r}. Use "
            "posterior.with_prior(posterior.prior).predictive_set(x)."
        )

    support = posterior.likelihood.predictive.support_for(posterior.network.outputs)
    if not isinstance(support, Real | Counts | Classes):
        raise TypeError(
            "predictive_set is for one number on the whole line, counts or classes, but this "
            f"likelihood has {support!r}. Fit a posterior for each target, or use "
            "posterior.predict(x).interval(level)."
        )

    return support


def _warn_of_large_sets(weights: Tensor, removable: Tensor, level: float) -> None:
    """Warn of sets that are infinite or too large.

    All sets are infinite if there are few rows, and too large if some rows cannot be removed from
    the fit.

    weights (m,): of the compared rows. removable (m,) bool: whether the row can be removed. level:
    of the sets.
    """
    shortage = describe_row_shortage(weights, level, "rows")
    if shortage is not None:
        warn(
            f"A predictive set of {level:g} {shortage}: every set is infinite (all classes). Use "
            "more rows or a lower level."
        )

    if not bool(removable.all()):
        warn(
            f"predictive_set cannot remove {int((~removable).sum())} of {len(removable)} rows "
            "from the fit. They count as rows with the highest scores, so that the sets are too "
            "large. Likely causes: (a) structure='diag' or 'kfac' describes these rows badly: use "
            "structure='dense'; (b) a row that alone decides a predicted variance.",
            RuntimeWarning,
        )


# --- training rows -------------------------------------------------------------------------


def _check_rows(rows: Any, n: int) -> Tensor:
    """Return the rows to compare with, (n,) bool; None means all n of them.

    Raises ValueError unless `rows` is (n,) of dtype bool with at least one True.
    """
    if rows is None:
        return torch.ones(n, dtype=torch.bool)
    flags = as_tensor(rows).cpu()
    if flags.dtype == torch.bool and flags.shape == (n,) and bool(flags.any()):
        return flags
    raise ValueError(
        f"rows must be a bool for each of the {n:,} training rows, in the order in which the data "
        f"are read, with at least one True, but is {flags.dtype} of shape "
        f"{tuple(flags.shape)}{' without a True' * (flags.dtype == torch.bool)}."
    )


def _split_flags_by_chunk(flags: Tensor, sites: Sites) -> list[Tensor]:
    """Split flags of the training rows (n,) bool into a tensor (b,) for each chunk of `sites`."""
    return list(flags.split([len(site.f) for site in sites]))


@dataclass(frozen=True, eq=False)
class _ComparedRows:
    """The m training rows that a candidate is compared with."""

    y: Tensor  # (m,)
    f: Tensor  # outputs with all rows in the fit (m, C)
    K: Tensor  # their covariance (m, C, C)
    score: Tensor  # g of one copy of the row (m, C)
    precision: Tensor  # Λ of one copy of the row (m, C, C)
    copy_weight: Tensor  # the weight of one copy of the row, min(w, 1) (m,)
    weights: Tensor  # (m,)
    removable: Tensor  # (m,) bool: the row can be removed

    @staticmethod
    def select_rows(posterior: Posterior, sites: Sites, chosen: Tensor) -> _ComparedRows:
        """Return the chosen rows, (n,) bool, with their contributions to the fit.

        A row that cannot be removed gets a site of zero.
        """
        chunks = []
        for site, is_compared in zip(sites, _split_flags_by_chunk(chosen, sites), strict=True):
            weights = site.row_weights
            K = posterior.covariance.covariance(site.J)

            # A row of weight w stands for w equal rows; one of them is removed.
            copy_weight = weights.clamp_max(1.0)
            removable = compute_cavity(site, None, posterior.covariance).sound

            # A row that cannot be removed has no site here; its score is infinite later.
            score = torch.where(removable[:, None], site.score * copy_weight[:, None], 0.0)
            precision = torch.where(
                removable[:, None, None], site.precision * copy_weight[:, None, None], 0.0
            )

            # in the order of the fields
            columns = (
                site.y.double(),
                site.f,
                K,
                score,
                precision,
                copy_weight,
                weights,
                removable,
            )
            chunks.append(tuple(column[is_compared] for column in columns))

        return _ComparedRows(*map(torch.cat, zip(*chunks, strict=True)))


@dataclass(frozen=True, eq=False)
class _Comparison:
    """A member with its training rows, prepared once for all candidates."""

    member: Member
    sites: Sites
    chosen: Tensor  # (n,) bool
    rows: _ComparedRows

    @staticmethod
    def read_rows(member: Member) -> _Comparison:
        """Read the training rows of a member, once.

        Raises ValueError unless they are those of the fit.
        """
        chosen = _check_rows(member.rows, member.posterior.statistics.n)
        sites = collect_sites(member.posterior, member.data, PURPOSE, ROWS_AT_ONCE)
        rows = _ComparedRows.select_rows(member.posterior, sites, chosen)
        if member.shares is not None:
            rows = replace(rows, weights=rows.weights * member.shares[chosen])
        return _Comparison(member, sites, chosen, rows)

    def make_candidates(self, inputs: slice) -> _Candidates:
        """Compute what the compared rows need of some new inputs.

        These are the outputs there and their covariances with the compared rows.
        """
        posterior = self.member.posterior
        x = take_rows(self.member.x, inputs)

        # The network may return these inputs in several chunks.
        chunks = list(iterate_queries(posterior, x, NUMBERS * len(self.rows.y)))
        f = torch.cat([query.f for query in chunks])
        K = torch.cat([query.K for query in chunks])
        solved = torch.cat([query.solved for query in chunks], 1)
        kept_of_sites = zip(self.sites, _split_flags_by_chunk(self.chosen, self.sites), strict=True)
        pushed = torch.cat(
            [site.J.push_many(solved)[is_compared] for site, is_compared in kept_of_sites]
        )
        X = pushed.unflatten(-1, f.shape)  # (m, C, q, C)
        return _Candidates(
            posterior.likelihood, Query(f, K, solved), X.permute(2, 0, 1, 3), self.rows
        )


# --- candidates ----------------------------------------------------------------------------


class _Candidates(NamedTuple):
    """q new inputs and the m training rows that they are compared with."""

    likelihood: Likelihood
    query: Query
    X: Tensor  # J_i S J_xᵀ (q, m, C, C)
    rows: _ComparedRows

    def score_rows(self, y: Tensor) -> Tensor:
        """Compute the scores of the training rows after a refit with y (q,) at the new inputs.

        The result is (q, m), with the letters of the module. It is infinite for rows that cannot be
        removed from the fit.
        """
        rows = self.rows
        X = self.X
        u, B = self._refit_outputs(y)

        # The refit with (x, y) moves f of every row and takes X Q Xᵀ from its K, with Q = BᵀB.
        XB = X @ B.mT.unsqueeze(1)
        K = rows.K - XB @ XB.mT
        move = (X @ u[:, None, :, None]).squeeze(-1)  # (q, m, C)

        # The row's own site is removed: K₋ = (I − KΛ)⁻¹ K and f₋ = f − K₋ g, with g at the moved f.
        g = rows.score - (rows.precision @ move.unsqueeze(-1)).squeeze(-1)
        eye = torch.eye(u.shape[1], dtype=torch.float64)
        K_without = torch.linalg.solve(eye - K @ rows.precision, K)
        K_without = (K_without + K_without.mT) / 2  # symmetric but for rounding
        f_without = rows.f + move - (K_without @ g.unsqueeze(-1)).squeeze(-1)
        targets = rows.y.expand(len(X), -1)
        scores = compute_nonconformity(
            self.likelihood.predictive,
            targets.flatten(),
            f_without.flatten(0, 1),
            K_without.flatten(0, 1),
        ).view_as(targets)
        return torch.where(rows.removable, scores, torch.inf)

    def _refit_outputs(self, y: Tensor) -> tuple[Tensor, Tensor]:
        """Compute u (q, C) and B (q, C, C) of the refit with y (q,), where Q = BᵀB.

        The letters are those of the module. With Λ̃ = L Lᵀ, Q = Λ̃(I + KΛ̃)⁻¹ is L(I + LᵀKL)⁻¹Lᵀ,
        which needs no inverse of K.
        """
        f, K, _ = self.query
        u = evaluate_at_mode(self.likelihood, y, f, covariance_root(K)).pull
        f_mode = f + (K @ u.unsqueeze(-1)).squeeze(-1)
        L = covariance_root(self.likelihood.fisher(f_mode))
        eye = torch.eye(f.shape[1], dtype=torch.float64)
        factor = torch.linalg.cholesky(eye + L.mT @ K @ L)
        return u, torch.linalg.solve_triangular(factor, L.mT, upper=False)


def _use_mean_output(members: list[_Candidates]) -> list[_Candidates]:
    """Return the candidates with the mean output of all networks in place of each network's own.

    Only the mean of the outputs changes; every network keeps its own covariance. See the module.
    members: the candidates of each network, for the same q inputs.
    """
    f = torch.stack([member.query.f for member in members]).mean(0)
    return [member._replace(query=member.query._replace(f=f)) for member in members]


def compute_nonconformity(likelihood: Likelihood, y: Tensor, f: Tensor, K: Tensor) -> Tensor:
    """Compute the score of the module, which says how badly outputs N(f, K) predict y.

    likelihood: of y given the outputs. y (M,), f (M, C), K (M, C, C) -> (M,). Raises ValueError
    where the variance of y is infinite.
    """
    if likelihood.support_for(f.shape[1]).kind == "class":
        return 1 - _approximate_class_probabilities(likelihood, f, K).gather(
            1, y.long()[:, None]
        ).squeeze(1)
    centre, scale = _compute_moments_of_y(likelihood, f, K)
    return (y - centre).abs() / scale


def _approximate_class_probabilities(likelihood: Likelihood, f: Tensor, K: Tensor) -> Tensor:
    """Approximate the class probabilities by those at f/√(1 + πk/8), with k the variances of f.

    f (M, C), K (M, C, C) -> (M, C), or (M, 2) for one output. This is MacKay's approximation of the
    integral of a sigmoid.
    """
    p = likelihood.mean(f / (1 + torch.pi / 8 * K.diagonal(dim1=-2, dim2=-1)).sqrt())
    return p if p.dim() == 2 else torch.stack([1 - p, p], 1)


def _compute_moments_of_y(likelihood: Likelihood, f: Tensor, K: Tensor) -> tuple[Tensor, Tensor]:
    """Compute the mean and, to first order, the standard deviation of y, (M,) each.

    f (M, C), K (M, C, C). Raises ValueError where the standard deviation is not finite.
    """
    doubt = compute_first_order_variance(compute_mean_slopes(likelihood, f, K), K).squeeze(1)
    scale = (likelihood.variance(f) + doubt).sqrt()
    if not bool(scale.isfinite().all()):
        raise ValueError(
            "predictive_set divides residuals by the standard deviation of y, but under this "
            "likelihood it is infinite. Use a likelihood with a finite variance, such as StudentT "
            "with df above 2."
        )
    return likelihood.mean(f).reshape(len(f)), scale


# --- sets ----------------------------------------------------------------------------------


def _solve_gaussian_ends(members: list[_Candidates], level: float) -> Tensor:
    """Compute the intervals (q, 2) for Gaussian noise and one output, in closed form.

    The ends are quantiles of the crossings of all members' rows, by row weight. members: the
    candidates of each member, for the same q inputs. level: of the sets.
    """
    crossings = [_compute_gaussian_crossings(member) for member in members]
    lower = torch.cat([low for low, _ in crossings], 1)
    upper = torch.cat([high for _, high in crossings], 1)
    weights = torch.cat([member.rows.weights for member in members])
    return torch.stack(
        [-conformal_quantile(-lower, weights, level), conformal_quantile(upper, weights, level)], 1
    )


def _compute_gaussian_crossings(candidates: _Candidates) -> tuple[Tensor, Tensor]:
    """Compute the two y between which each training row has the higher score, (q, m) each.

    The lower ones come first. These y are f_x + e√s/(X/√s ± t), with the letters of the module, and
    infinite where the row has the higher score for every y.
    """
    likelihood, query, X, rows = candidates
    noise = likelihood.covariance_for(query.f).flatten()[0].double()
    s = (noise + query.K.flatten())[:, None]

    # One output: scalars in place of 1×1 matrices.
    X = X[..., 0, 0]
    K = rows.K.flatten()
    f = rows.f.flatten()
    h = (K - X.square() / s) / noise
    remaining = 1 - rows.copy_weight * h
    t = (noise * remaining * (remaining + h)).sqrt()
    slope = X / s.sqrt()
    numerator = (rows.y - f) * s.sqrt()  # e√s
    ends = numerator / (slope + t), numerator / (slope - t)
    crosses = rows.removable & (t > slope.abs())
    lower = torch.where(crosses, torch.minimum(*ends), -torch.inf)
    upper = torch.where(crosses, torch.maximum(*ends), torch.inf)
    return query.f + lower, query.f + upper


class _EndSearch(NamedTuple):
    """The values that the search for the ends of q intervals needs, the same in every step."""

    members: list[_Candidates]
    centres: list[Tensor]  # for each member the mean of y at the new inputs (q,)
    scales: list[Tensor]  # for each member the standard deviation of y there (q,)
    weights: Tensor  # of all their rows (m,)
    level: float
    lowest: float  # the lowest possible y

    def compute_implied_end(self, side: float, t: Tensor) -> Tensor:
        """Compute the ends (q,) that the rows' scores imply after a refit with y = side · t (q,).

        side: −1 for the lower ends, 1 for the upper ones. The ends are in the coordinate t: the
        quantile of side · centre + scale · score over the rows of all members. They are infinite
        where too few rows can be removed from the fit. A y below the lowest possible one is
        replaced by that one.
        """
        # The search may try a y outside the support. A count below 0 has no likelihood to refit
        # with.
        y = (side * t).clamp_min(self.lowest)
        ends_by_row = [
            (side * centre)[:, None] + scale[:, None] * member.score_rows(y)
            for member, centre, scale in zip(self.members, self.centres, self.scales, strict=True)
        ]
        return conformal_quantile(torch.cat(ends_by_row, 1), self.weights, self.level)


def _search_ends(members: list[_Candidates], level: float) -> Tensor:
    """Compute the intervals (q, 2) of numbers or counts, by a fixed point for each end.

    An end is the y that equals the quantile of centre ± scale · score over the rows, where the
    scores are those after a refit with this y. Warns of ends that did not converge. members, level:
    as in `_solve_gaussian_ends`.
    """
    weights = torch.cat([member.rows.weights for member in members])
    removable = torch.cat([member.rows.removable for member in members])
    moments = [
        _compute_moments_of_y(member.likelihood.predictive, member.query.f, member.query.K)
        for member in members
    ]
    centres = [centre for centre, _ in moments]
    scales = [scale for _, scale in moments]

    # With too few rows, or too many that cannot be removed, the quantile is infinite: every y is in
    # the set.
    if bool(conformal_quantile(torch.where(removable, 0.0, torch.inf), weights, level).isinf()):
        whole_line = torch.tensor([-torch.inf, torch.inf], dtype=torch.float64)
        return whole_line.expand(len(scales[0]), 2)
    support = members[0].likelihood.predictive.support_for(members[0].query.f.shape[1])
    lowest = 0.0 if support.kind == "count" else -torch.inf
    search = _EndSearch(members, centres, scales, weights, level, lowest)
    lower, lower_converged = _search_end(search, side=-1.0)
    upper, upper_converged = _search_end(search, side=1.0)
    converged = torch.cat([lower_converged, upper_converged])
    if not bool(converged.all()):
        warn(
            f"{int((~converged).sum())} of {len(converged)} ends of predictive sets did not "
            "converge: the scores of the training rows change as fast as that of the candidate. "
            "Likely cause: few training rows. Use posterior.predict(x).interval(level).",
            RuntimeWarning,
        )

    return torch.stack([lower, upper], 1)


def _search_end(search: _EndSearch, side: float) -> tuple[Tensor, Tensor]:
    """Search for one end of each interval: the lower one for side −1, the upper one for 1.

    Returns the ends (q,), and which of them converged (q,) bool.
    """
    scale = torch.stack(search.scales).mean(0)

    # In the coordinate t = side · y the end is the largest t in the set. The bracket has `inside`
    # in the set and `outside` not in it.
    inside = (side * torch.stack(search.centres)).amin(0)
    outside = torch.full_like(inside, torch.inf)
    t = inside + scale
    for _ in range(MOST_STEPS):
        implied = search.compute_implied_end(side, t)
        is_in_set = implied >= t
        inside = torch.where(is_in_set, t, inside)
        outside = torch.where(is_in_set, outside, t)
        converged = (implied - t).abs() <= TOLERANCE * scale
        if bool(converged.all()):
            break

        # The fixed-point step where it stays in the bracket, bisection elsewhere.
        in_bracket = (implied > inside) & (implied < outside)
        step = torch.where(in_bracket, implied, (inside + outside) / 2)
        t = torch.where(converged, t, step)

    return side * t, converged


def _find_class_sets(members: list[_Candidates], level: float) -> Tensor:
    """Compute the sets of classes, bool (q, C), by a refit with every class.

    members, level: as in `_solve_gaussian_ends`. A class is in the set if its score is at most the
    quantile of those of the rows.
    """
    weights = torch.cat([member.rows.weights for member in members])
    query = members[0].query
    support = members[0].likelihood.predictive.support_for(query.f.shape[1])
    assert isinstance(support, Classes)
    is_in_set = []
    for label in range(support.count):
        y = torch.full((len(query.f),), float(label), dtype=torch.float64)
        excess = []  # the scores of the rows less that of the candidate (q, m)
        for member in members:
            candidate_score = compute_nonconformity(
                member.likelihood.predictive, y, member.query.f, member.query.K
            )
            excess.append(member.score_rows(y) - candidate_score[:, None])
        is_in_set.append(conformal_quantile(torch.cat(excess, 1), weights, level) >= 0)

    return torch.stack(is_in_set, 1)
