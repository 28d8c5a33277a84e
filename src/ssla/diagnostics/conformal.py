"""Approximate full conformal sets: without calibration rows, and without refits.

Full conformal prediction adds the candidate (x, y) to the data, fits again, and keeps y unless its
score is among the highest of all rows. The score of a row says how badly the other rows predict it:

    numbers, counts    |y − m| / √v       m = E[y|f],  v = Var[y|f] + Var E[y|f] to first order
    classes            1 − p(y)           p at f/√(1 + πk/8), k the variances of f

where f and K are those without the row. For the candidate they are the posterior's own. Its refit
has the mode in the outputs, f̃ = f_x + K_x u, and the precision Λ̃ there. With X = J_i S J_xᵀ and Q
= Λ̃(I + K_xΛ̃)⁻¹ it moves the outputs of row i to

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

from ssla._checks import level as checked_level
from ssla._checks import warn
from ssla.data import Inputs, as_inputs, as_tensor, row_count, slice_inputs
from ssla.diagnostics.explanations import Query, first_order_variance, queries, slopes
from ssla.likelihoods import Likelihood
from ssla.likelihoods.support import Classes, Counts, Real, Support
from ssla.maths.linalg import root
from ssla.maths.order_statistics import conformal_quantile, shortage
from ssla.predictive.cavities import Sites, cavity, collect
from ssla.priors import EXACT
from ssla.refit.increments import at_mode
from ssla.refit.weights.refit_rows import Purpose

if TYPE_CHECKING:
    from ssla.posterior import Posterior

PURPOSE = Purpose("posterior.predictive_set", "The data", "posterior.predictive_set(x, data={})")
ROWS_AT_ONCE = 1024
TOLERANCE = 1e-6  # of an end, in standard deviations of y
MOST_STEPS = 60
NUMBERS = 16  # numbers, or C×C matrices, that are held for a training row and a candidate


class Member(NamedTuple):
    """A posterior, the new inputs as its network takes them, its training data, and the rows to
    compare with (n,) bool.

    shares: how much of each row this posterior counts (n,), where several posteriors compare with
    the same row.
    """

    posterior: Posterior
    x: Inputs
    data: Any = None
    rows: Any = None
    shares: Tensor | None = None


def predictive_set(
    posterior: Posterior, x: Inputs, level: float, data: Any = None, rows: Any = None
) -> Tensor:
    """See Posterior.predictive_set."""
    found = cross_sets([Member(posterior, as_inputs(x), data, rows)], level)
    return found if found.dtype == torch.bool else found.to(posterior.like(posterior.outputs_at(x)))


def cross_sets(members: Sequence[Member], level: float) -> Tensor:
    """Intervals (N, 2) in float64, or sets of classes, bool (N, C), from one or several
    posteriors of the same likelihood.
    """
    level = checked_level(level)
    first = members[0].posterior
    support = _checked_support(first)
    prepared = [_Prepared.of(member) for member in members]
    _warn(
        torch.cat([one.others.weights for one in prepared]),
        torch.cat([one.others.sound for one in prepared]),
        level,
    )
    find: Callable[[list[_Candidates], float], Tensor]
    if isinstance(support, Classes):
        find = _classes
    else:
        find = _gaussian if first.likelihood.quadratic else _numbers
    C, size = first.network.outputs, len(first.theta)
    numbers = NUMBERS * C * sum(len(one.others.y) for one in prepared)
    some = max(first.memory_budget // 8 // (8 * C * (4 * size + numbers)), 1)
    columns = support.count if isinstance(support, Classes) else 2
    parts = [
        torch.empty(0, columns, dtype=torch.bool if isinstance(support, Classes) else torch.float64)
    ]
    for start in range(0, row_count(members[0].x), some):
        parts.append(
            find(
                _at_their_mean([one.candidates(slice(start, start + some)) for one in prepared]),
                level,
            )
        )
    found = torch.cat(parts)
    if isinstance(support, Counts):
        return torch.stack([found[:, 0].clamp_min(0).ceil(), found[:, 1].floor()], 1)
    return found


def _checked_support(posterior: Posterior) -> Support:
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


def _warn(weights: Tensor, sound: Tensor, level: float) -> None:
    short = shortage(weights, level, "rows")
    if short is not None:
        warn(
            f"A predictive set of {level:g} {short}: every set is infinite (all classes). Use more "
            "rows or a lower level."
        )
    if not bool(sound.all()):
        warn(
            f"predictive_set cannot remove {int((~sound).sum())} of {len(sound)} rows from the "
            "fit. They count as rows with the highest scores, so that the sets are too large. "
            "Likely causes: (a) structure='diag' or 'kfac' describes these rows badly: use "
            "structure='dense'; (b) a row that alone decides a predicted variance.",
            RuntimeWarning,
        )


# --- training rows -------------------------------------------------------------------------


def _chosen(rows: Any, n: int) -> Tensor:
    """(n,) bool."""
    if rows is None:
        return torch.ones(n, dtype=torch.bool)
    given = as_tensor(rows).cpu()
    if given.dtype == torch.bool and given.shape == (n,) and bool(given.any()):
        return given
    raise ValueError(
        f"rows must be a bool for each of the {n:,} training rows, in the order in which the data "
        f"are read, with at least one True, but is {given.dtype} of shape "
        f"{tuple(given.shape)}{' without a True' * (given.dtype == torch.bool)}."
    )


def _parts(sites: Sites, chosen: Tensor) -> list[Tensor]:
    """The chosen rows of each chunk."""
    return list(chosen.split([len(site.f) for site in sites]))


@dataclass(frozen=True, eq=False)
class _Others:
    """The training rows that the candidate is compared with."""

    y: Tensor  # (m,)
    f: Tensor  # (m, C)
    K: Tensor  # (m, C, C)
    score: Tensor  # g of one copy of the row (m, C)
    precision: Tensor  # Λ of one copy of the row (m, C, C)
    once: Tensor  # the share of one copy in a row of weight 1 (m,)
    weights: Tensor  # (m,)
    sound: Tensor  # (m,) bool: the row can be removed

    @staticmethod
    def of(posterior: Posterior, sites: Sites, chosen: Tensor) -> _Others:
        found = []
        for site, part in zip(sites, _parts(sites, chosen), strict=True):
            weights, K = site.row_weights, posterior.covariance.covariance(site.J)
            once = weights.clamp_max(1.0)
            sound = cavity(site, None, posterior.covariance).sound
            score = torch.where(sound[:, None], site.score * once[:, None], 0.0)
            precision = torch.where(sound[:, None, None], site.precision * once[:, None, None], 0.0)
            columns = (site.y.double(), site.f, K, score, precision, once, weights, sound)
            found.append(tuple(column[part] for column in columns))
        return _Others(*map(torch.cat, zip(*found, strict=True)))


@dataclass(frozen=True, eq=False)
class _Prepared:
    """What all candidates of a member share."""

    member: Member
    sites: Sites
    chosen: Tensor  # (n,) bool
    others: _Others

    @staticmethod
    def of(member: Member) -> _Prepared:
        chosen = _chosen(member.rows, member.posterior.statistics.n)
        sites = collect(member.posterior, member.data, PURPOSE, ROWS_AT_ONCE)
        others = _Others.of(member.posterior, sites, chosen)
        if member.shares is not None:
            others = replace(others, weights=others.weights * member.shares[chosen])
        return _Prepared(member, sites, chosen, others)

    def candidates(self, some: slice) -> _Candidates:
        """Some of the new inputs, with their covariances with the training rows."""
        posterior = self.member.posterior
        found = list(
            queries(posterior, slice_inputs(self.member.x, some), NUMBERS * len(self.others.y))
        )
        f, K = torch.cat([query.f for query in found]), torch.cat([query.K for query in found])
        solved = torch.cat([query.solved for query in found], 1)
        products = zip(self.sites, _parts(self.sites, self.chosen), strict=True)
        X = torch.cat([site.J.push_many(solved)[part] for site, part in products]).unflatten(
            -1, f.shape
        )  # (m, C, q, C)
        return _Candidates(
            posterior.likelihood, Query(f, K, solved), X.permute(2, 0, 1, 3), self.others
        )


# --- candidates ----------------------------------------------------------------------------


class _Candidates(NamedTuple):
    """New inputs (q of them) and the training rows (m)."""

    likelihood: Likelihood
    query: Query
    X: Tensor  # J_i S J_xᵀ (q, m, C, C)
    others: _Others

    def scores(self, y: Tensor) -> Tensor:
        """Of the training rows after a refit with y (q,) at the new inputs: (q, m)."""
        f, K, _ = self.query
        others, X = self.others, self.X
        R = root(K)
        u = at_mode(self.likelihood, y, f, R).pull
        L = root(self.likelihood.fisher(f + (K @ u.unsqueeze(-1)).squeeze(-1)))
        eye = torch.eye(f.shape[1], dtype=torch.float64)
        B = torch.linalg.solve_triangular(
            torch.linalg.cholesky(eye + L.mT @ K @ L), L.mT, upper=False
        )  # Q = BᵀB
        XB = X @ B.mT.unsqueeze(1)
        K = others.K - XB @ XB.mT
        move = (X @ u[:, None, :, None]).squeeze(-1)  # (q, m, C)
        g = others.score - (others.precision @ move.unsqueeze(-1)).squeeze(-1)
        without = torch.linalg.solve(eye - K @ others.precision, K)
        without = (without + without.mT) / 2
        end = others.f + move - (without @ g.unsqueeze(-1)).squeeze(-1)
        rows = others.y.expand(len(X), -1)
        found = score(
            self.likelihood.predictive, rows.flatten(), end.flatten(0, 1), without.flatten(0, 1)
        ).view_as(rows)
        return torch.where(others.sound, found, torch.inf)


def _at_their_mean(members: list[_Candidates]) -> list[_Candidates]:
    """All networks with the mean of their outputs at the new inputs."""
    f = torch.stack([one.query.f for one in members]).mean(0)
    return [one._replace(query=one.query._replace(f=f)) for one in members]


def score(likelihood: Likelihood, y: Tensor, f: Tensor, K: Tensor) -> Tensor:
    """How badly f ~ N(f, K) predicts y: see above.  y (M,), f (M, C), K (M, C, C) -> (M,)."""
    if likelihood.support_for(f.shape[1]).kind == "class":
        return 1 - _probs(likelihood, f, K).gather(1, y.long()[:, None]).squeeze(1)
    centre, scale = _moments(likelihood, f, K)
    return (y - centre).abs() / scale


def _probs(likelihood: Likelihood, f: Tensor, K: Tensor) -> Tensor:
    """(M, C), or (M, 2) for one output."""
    found = likelihood.mean(f / (1 + torch.pi / 8 * K.diagonal(dim1=-2, dim2=-1)).sqrt())
    return found if found.dim() == 2 else torch.stack([1 - found, found], 1)


def _moments(likelihood: Likelihood, f: Tensor, K: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation of y (M,)."""
    doubt = first_order_variance(slopes(likelihood, f, K), K).squeeze(1)
    scale = (likelihood.variance(f) + doubt).sqrt()
    if not bool(scale.isfinite().all()):
        raise ValueError(
            "predictive_set divides residuals by the standard deviation of y, but under this "
            "likelihood it is infinite. Use a likelihood with a finite variance, such as StudentT "
            "with df above 2."
        )
    return likelihood.mean(f).reshape(len(f)), scale


# --- sets ----------------------------------------------------------------------------------


def _gaussian(members: list[_Candidates], level: float) -> Tensor:
    """(q, 2), in closed form."""
    lower, upper = (torch.cat(sides, 1) for sides in zip(*map(_crossings, members), strict=True))
    weights = torch.cat([one.others.weights for one in members])
    return torch.stack(
        [-conformal_quantile(-lower, weights, level), conformal_quantile(upper, weights, level)], 1
    )


def _crossings(candidates: _Candidates) -> tuple[Tensor, Tensor]:
    """Row i has the higher score for candidates between these (q, m)."""
    likelihood, query, X, others = candidates
    noise = likelihood.covariance_for(query.f).flatten()[0].double()
    s = (noise + query.K.flatten())[:, None]
    X, K, f = X[..., 0, 0], others.K.flatten(), others.f.flatten()
    h = (K - X.square() / s) / noise
    left = 1 - others.once * h
    t, slope = (noise * left * (left + h)).sqrt(), X / s.sqrt()
    push = (others.y - f) * s.sqrt()
    ends = push / (slope + t), push / (slope - t)
    crosses = others.sound & (t > slope.abs())
    lower, upper = torch.minimum(*ends), torch.maximum(*ends)
    return query.f + torch.where(crosses, lower, -torch.inf), query.f + torch.where(
        crosses, upper, torch.inf
    )


def _numbers(members: list[_Candidates], level: float) -> Tensor:
    """(q, 2), by a fixed point for each end: y = quantile of m ± scale·(the scores of the rows
    with y).
    """
    laws = [one.likelihood.predictive for one in members]
    weights, sound = (
        torch.cat([getattr(one.others, name) for one in members]) for name in ("weights", "sound")
    )
    centres, scales = zip(
        *(_moments(law, one.query.f, one.query.K) for law, one in zip(laws, members, strict=True)),
        strict=True,
    )
    rows, scale = len(scales[0]), torch.stack(scales).mean(0)
    if bool(conformal_quantile(torch.where(sound, 0.0, torch.inf), weights, level).isinf()):
        return torch.tensor([-torch.inf, torch.inf], dtype=torch.float64).expand(rows, 2)
    least = 0.0 if laws[0].support_for(members[0].query.f.shape[1]).kind == "count" else -torch.inf
    ends, open_ends = [], 0
    for side in (-1.0, 1.0):  # t = ±y
        inside = (side * torch.stack(centres)).amin(0)
        outside, t = torch.full_like(inside, torch.inf), inside + scale
        for _ in range(MOST_STEPS):
            y = (side * t).clamp_min(least)
            reach = [
                (side * centre)[:, None] + width[:, None] * one.scores(y)
                for one, centre, width in zip(members, centres, scales, strict=True)
            ]
            found = conformal_quantile(torch.cat(reach, 1), weights, level)
            kept = found >= t
            inside, outside = torch.where(kept, t, inside), torch.where(kept, outside, t)
            done = (found - t).abs() <= TOLERANCE * scale
            if bool(done.all()):
                break
            t = torch.where(
                done,
                t,
                torch.where((found > inside) & (found < outside), found, (inside + outside) / 2),
            )
        open_ends += int((~done).sum())
        ends.append(side * t)
    if open_ends:
        warn(
            f"{open_ends} of {2 * rows} ends of predictive sets did not converge: the scores of "
            "the training rows change as fast as that of the candidate. Likely cause: few "
            "training rows. Use posterior.predict(x).interval(level).",
            RuntimeWarning,
        )
    return torch.stack(ends, 1)


def _classes(members: list[_Candidates], level: float) -> Tensor:
    """bool (q, C)."""
    weights, query = torch.cat([one.others.weights for one in members]), members[0].query
    support = members[0].likelihood.predictive.support_for(query.f.shape[1])
    assert isinstance(support, Classes)
    kept = []
    for label in range(support.count):
        y = torch.full((len(query.f),), float(label), dtype=torch.float64)
        above = [
            one.scores(y) - score(one.likelihood.predictive, y, one.query.f, one.query.K)[:, None]
            for one in members
        ]
        kept.append(conformal_quantile(torch.cat(above, 1), weights, level) >= 0)
    return torch.stack(kept, 1)
