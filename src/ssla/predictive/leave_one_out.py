"""Leave-one-out predictions of the training rows, without refits.

Row i contributes a site to the Gaussian of θ: its score g and its precision Λ, averaged over the Gaussian (variational), or at
the mode with the Fisher for Λ (Laplace). The outputs at x_i without the site have the cavity

    K₋ = (K⁻¹ − Λ)⁻¹ = R (I − RᵀΛR)⁻¹ Rᵀ        f₋ = f − K₋ g        K = J S Jᵀ = R Rᵀ

and y_i is predicted from N(f₋, K₋). This is exact for a linear model with Gaussian noise. For other likelihoods the sites of the
other rows are kept as they are, which is too optimistic for influential rows: those whose site moves the Gaussian far, in KL
divergence. In a last layer these are refitted. Prior, noise and features are kept, and so is the tilt of a θ̂ that is not a mode.

`collect` computes the sites, in one pass. `score` evaluates them under another Gaussian, with the sites fixed.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ssla._checks import all_in_plain_torch, warn
from ssla._checks import level as checked_level
from ssla.data import Batch, Rows, checked
from ssla.fitting import Chunk, fit_again
from ssla.likelihoods import Likelihood
from ssla.likelihoods.averages import averages, concave
from ssla.numerics.linalg import root
from ssla.numerics.quadrature import wrapped
from ssla.predictive import from_marginal
from ssla.predictive.predictive import Predictive
from ssla.priors import EXACT
from ssla.refit.rows import Purpose, check_seen, training_data
from ssla.state import POLISH, Marginal, State
from ssla.structures import Dense, LowRank, Operator
from ssla.structures.jacobians import Features, Jacobian
from ssla.structures.memory import bytes_of

PURPOSE = Purpose("posterior.loo()", "The data", "posterior.loo(data={})")
LEAST = 1e-6  # eigenvalue of I − RᵀΛR: the variance with the row, as a share of the variance without it
ROWS_AT_ONCE = 1024  # predictives that are held together
INFLUENTIAL = 0.1  # nats: the error of a cavity grows with it (benchmarks/leave_one_out.py)
ROWS_TO_REFIT = 200_000  # at most this many rows are read for refits in each round, unless the user says otherwise
LEVELS = (0.5, 0.9, 0.95)


@all_in_plain_torch
@dataclass(frozen=True, eq=False)
class LeaveOneOut:
    """Each training row predicted from the others, in the order in which the data are read. Made by `posterior.loo()`.

    A row of weight w stands for w equal rows: one of them is left out (all of it, if w < 1).
    """

    kind: str  # of the target, as `Predictive.kind`
    log_prob: Tensor  # log p(y_i | the other rows) (n,); NaN where there is no answer
    lower: Tensor  # P(Y < y_i) (n,), or (n, D) for D targets; for classes the probability of all classes that are more probable
    upper: Tensor  # P(Y ≤ y_i), the same for numbers; for classes with that of y_i itself
    inaccurate: Tensor  # (n,) bool: rows whose predictive could not be integrated to its tolerance
    influence: Tensor  # KL divergence (n,) of the Gaussian without the row from that with it; infinite: there is none without it
    refitted: Tensor  # (n,) bool: rows for which the Gaussian was refitted
    weights: Tensor  # of the rows (n,)

    @property
    def pit(self) -> Tensor | None:
        """P(Y ≤ y_i) (n,) or (n, D): uniform if the model is right. Classes have none.

        Of counts the middle of P(Y < y_i) and P(Y ≤ y_i). Of angles the circle is cut opposite the mean.
        """
        return None if self.kind == "class" else (self.lower + self.upper) / 2

    @property
    def failed(self) -> Tensor:
        """(n,) bool: rows without an answer. They are left out of `nll` and `coverage`."""
        return self.log_prob.isnan()

    @property
    def doubtful(self) -> Tensor:
        """(n,) bool: influential rows that were not refitted. Their log densities are too high."""
        return (self.influence > INFLUENTIAL) & ~self.refitted & ~self.failed

    @cached_property
    def nll(self) -> float:
        """The mean of −log p(y_i | the other rows), by row weight."""
        return -self._mean(self.log_prob)

    def coverage(self, level: float = 0.95) -> float:
        """The share of rows, by weight, whose central interval (for classes: smallest set) at that level contains y."""
        tail = (1 - checked_level(level)) / 2
        inside = self.lower < level if self.kind == "class" else (self.upper >= tail) & (self.lower <= 1 - tail)
        return self._mean(inside.double() if inside.dim() == 1 else inside.double().mean(1))

    def _mean(self, values: Tensor) -> float:
        weights = self.weights.masked_fill(self.failed, 0.0)
        return float((weights * values.nan_to_num()).sum() / weights.sum())

    def __str__(self) -> str:
        shares = ", ".join(f"{self.coverage(level):.3f} at {level:g}" for level in LEVELS)
        failed, doubtful = int(self.failed.sum()), int(self.doubtful.sum())
        lines = [
            f"leave-one-out   {len(self.log_prob):,} rows, each predicted from the others",
            f"nll             {self.nll:.4g}",
            f"coverage        {shares}",
            f"refitted        {int(self.refitted.sum()):,} rows; the others follow from the fit",
            *([f"doubtful        {doubtful:,} influential rows that were not refitted"] if doubtful else []),
            *([f"no answer       {failed:,} rows, which are left out of these figures"] if failed else []),
            "note            If the network was trained on these rows, its features have seen them, and these figures are "
            "optimistic.",
        ]
        return "\n".join(lines)


# --- sites ---------------------------------------------------------------------------------


class Site(NamedTuple):
    """What some rows contribute to the Gaussian of θ, in float64. A row's weight stands beside its site, not in it."""

    f: Tensor  # outputs at the Gaussian's mean (b, C)
    J: Jacobian
    score: Tensor  # g (b, C)
    precision: Tensor  # Λ (b, C, C)
    y: Tensor
    weights: Tensor | None  # None: all one

    @property
    def row_weights(self) -> Tensor:
        return torch.ones(len(self.f), dtype=torch.float64) if self.weights is None else self.weights


@dataclass(frozen=True, eq=False)
class Sites:
    """The sites of all rows under N(mean, ·), a chunk at a time; kept in memory while they fit a share of the budget."""

    rows: Rows[Site]
    mean: Tensor  # of θ, where the outputs are
    likelihood: Likelihood

    def __iter__(self) -> Iterator[Site]:
        return iter(self.rows)


def collect(posterior: State, data: Any = None, purpose: Purpose = PURPOSE, most: int | None = None) -> Sites:
    """The sites of the training rows, in a pass, at most `most` rows a chunk; ValueError unless they are those of the fit."""
    source = training_data(posterior, data, purpose)
    network, likelihood, budget = posterior.network, posterior.likelihood, posterior.memory_budget
    support = likelihood.support_for(network.outputs)
    fisher = by_fisher(posterior)

    def site(part: Batch) -> Site:
        _, y, weights = checked(part, support, network.outputs)
        ((f, J),) = posterior.linearised(part.x)  # a part is a chunk
        f, J = f.double(), J.double()
        if posterior.variational is None:
            return Site(f, J, likelihood.score(y, f), likelihood.fisher(f), y, weights)
        _, score, precision = averages(likelihood, y, f, posterior.covariance.root(J), fisher)
        return Site(f, J, score, precision, y, weights)

    together = network.rows_at_once(budget) if most is None else min(network.rows_at_once(budget), most)
    rows = Rows(source, lambda _: together, site, bytes_of_site, budget // 4)
    n, gradient = 0, torch.zeros_like(posterior.theta)
    for one in rows:
        n += len(one.f)
        at_theta = one.f - one.J.push(posterior.mean - posterior.theta)
        gradient += one.J.pull(likelihood.score(one.y, at_theta) * one.row_weights[:, None])
    check_seen(posterior, n, gradient, purpose)
    return Sites(rows, posterior.mean, likelihood)


def bytes_of_site(site: Site) -> int:
    return bytes_of(site.J) + sum(bytes_of(part) for part in (site.f, site.score, site.precision, site.y))


def by_fisher(posterior: State) -> bool:
    """Whether a variational Gaussian was fitted with the expected Fisher, because its structure takes no indefinite average."""
    curvature = posterior.sums.curvature
    return not concave(posterior.likelihood) and (
        isinstance(curvature, LowRank) or (isinstance(curvature, Dense) and curvature.dual)
    )


# --- cavities ------------------------------------------------------------------------------


class Cavity(NamedTuple):
    """The outputs without the row's own site. Where it is not `sound` the values are those with the site."""

    marginal: Marginal
    influence: Tensor  # KL divergence (b,) of the Gaussian of θ without the row from that with it; infinite where not sound
    sound: Tensor  # (b,) bool: I − RᵀΛR is positive definite


def cavity(site: Site, step: Tensor | None, covariance: Operator) -> Cavity:
    """Of each row under N(mean + step, covariance), with the sites fixed: g there is g − ΛJ step."""
    f, g = site.f, site.score
    if step is not None:
        move = site.J.push(step)
        f, g = f + move, g - (site.precision @ move.unsqueeze(-1)).squeeze(-1)
    once = site.row_weights.clamp_max(1.0)
    K = covariance.covariance(site.J)
    finite = torch.isfinite(g).all(-1) & torch.isfinite(site.precision).all(-1).all(-1)
    precision = torch.where(finite[:, None, None], site.precision * once[:, None, None], 0.0)
    R = root(K)
    S = R.mT @ precision @ R
    values, vectors = torch.linalg.eigh(torch.eye(S.shape[-1], dtype=S.dtype) - (S + S.mT) / 2)
    sound = finite & (values[:, 0] > LEAST)
    axes, values = R @ vectors, values.clamp_min(LEAST)
    z = (axes.mT @ (g * once[:, None]).unsqueeze(-1)).squeeze(-1) / values  # the shift, in standard deviations with the row
    shift = (axes @ z.unsqueeze(-1)).squeeze(-1)
    influence = 0.5 * (1 / values - 1 + values.log() + z.square()).sum(-1)
    without = (axes / values.unsqueeze(-2)) @ axes.mT
    marginal = Marginal(torch.where(sound[:, None], f - shift, f), torch.where(sound[:, None, None], without, K))
    return Cavity(marginal, torch.where(sound, influence, torch.inf), sound)


class Score(NamedTuple):
    """The mean leave-one-out log density by row weight, and the rows without a cavity, which it leaves out."""

    mean_log_prob: float
    unsound: int


def score(sites: Sites, mean: Tensor, covariance: Operator) -> Score:
    """Leave-one-out under another Gaussian of θ, with the sites fixed: what tuning by leave-one-out evaluates."""
    total = weight = 0.0
    unsound = 0
    for site in sites:
        found = cavity(site, mean - sites.mean, covariance)
        log_prob = torch.cat([p.log_prob(y) for p, y in _predictives(sites.likelihood, found.marginal, site.y)])
        weights = site.row_weights * found.sound
        total += float((weights * log_prob).sum())
        weight += float(weights.sum())
        unsound += int((~found.sound).sum())
    return Score(total / weight if weight else float("nan"), unsound)


# --- answers -------------------------------------------------------------------------------


class Answer(NamedTuple):
    """See `LeaveOneOut`."""

    log_prob: Tensor
    lower: Tensor
    upper: Tensor
    inaccurate: Tensor


def leave_one_out(posterior: State, data: Any = None, refits: int | None = None) -> LeaveOneOut:
    """See Posterior.loo."""
    if posterior.convention != EXACT:
        raise ValueError(
            f"loo() works with the exact convention only, but this posterior has convention={posterior.convention!r}. Use "
            "posterior.with_prior(posterior.prior).loo()."
        )
    if refits is not None and (isinstance(refits, bool) or not isinstance(refits, int) or refits < 0):
        raise ValueError(f"refits must be a whole number from 0, or None, but is {refits!r}.")
    sites = collect(posterior, data)
    parts, influences, weights = [], [], []
    for site in sites:
        without = cavity(site, None, posterior.covariance)
        parts.append(_answer(sites.likelihood, without.marginal, site.y))
        influences.append(without.influence)
        weights.append(site.row_weights)
    answer, influence = Answer(*map(torch.cat, zip(*parts, strict=True))), torch.cat(influences)
    bad = influence.isinf()
    for values in answer[:3]:
        values[bad] = torch.nan
    refitted = torch.zeros_like(bad)
    most = max(ROWS_TO_REFIT // len(bad), 1) if refits is None else refits
    found = list(_refits(posterior, sites, _worst(posterior, influence, most)))
    if found:
        rows, f, K, y = (torch.cat(column) for column in zip(*found, strict=True))
        for values, own in zip(answer, _answer(sites.likelihood, Marginal(f, K), y), strict=True):
            values[rows] = own
        refitted[rows] = True
    _warn(bad & ~refitted, answer.inaccurate)
    kind = posterior.likelihood.predictive.support_for(posterior.network.outputs).kind
    return LeaveOneOut(kind, *answer, influence, refitted, torch.cat(weights))


def _warn(failed: Tensor, inaccurate: Tensor) -> None:
    if bool(inaccurate.any()):
        warn(
            f"{int(inaccurate.sum())} of {len(inaccurate)} leave-one-out predictives are inaccurate: their density has no "
            "integral, or a spike that could not be resolved. See loo().inaccurate."
        )
    if bool(failed.any()):
        warn(
            f"loo() has no answer for {int(failed.sum())} of {len(failed)} rows (NaN): their share of the fit cannot be removed "
            "from it, and they were not refitted. Refits need a last layer that was polished or has a variational Gaussian, rows "
            "that fit a quarter of the memory budget, and a large enough refits=. Likely cause: structure='diag' or 'kfac' "
            "describes these rows badly. Use structure='dense'.",
            RuntimeWarning,
        )


def _worst(posterior: State, influence: Tensor, most: int) -> list[int]:
    """The rows to refit, the most influential first: none but those without a cavity where cavities are exact."""
    least = torch.finfo(influence.dtype).max if posterior.quadratic else INFLUENTIAL
    order = influence.argsort(descending=True, stable=True)
    return [row for row in order[:most].tolist() if float(influence[row]) > least]


def _refits(posterior: State, sites: Sites, wanted: list[int]) -> Iterator[tuple[Tensor, Tensor, Tensor, Tensor]]:
    """Row, f and K of the same Gaussian fitted without that row, and y. Only a last layer has them."""
    kept = sites.rows.kept
    movable = posterior.variational is not None or posterior.mode == POLISH
    if not posterior.network.linear or kept is None or not movable:
        return
    chunks = [_chunk(site, posterior) for site in kept]
    starts = torch.tensor([0, *(len(site.f) for site in kept)]).cumsum(0)
    for row in wanted:
        part = int(torch.searchsorted(starts, row, right=True)) - 1
        at = row - int(starts[part])
        site, less = kept[part], kept[part].row_weights.clone()
        less[at] -= less[at].clamp_max(1.0)
        rest = [replace(chunk, weights=less) if k == part else chunk for k, chunk in enumerate(chunks)]
        try:
            other = fit_again(posterior, rest)
        except ValueError:  # without this row there is no mode, or no positive definite curvature
            continue
        assert isinstance(site.J, Features)
        J = replace(site.J, phi=site.J.phi[at : at + 1])
        f = site.f[at : at + 1] + J.push(other.mean - sites.mean)
        yield torch.tensor([row]), f, other.covariance.covariance(J), site.y[at : at + 1]


def _chunk(site: Site, posterior: State) -> Chunk:
    assert isinstance(site.J, Features)
    return Chunk(None, site.y, site.weights, 0.0, site.J, posterior.network.offset)


def _answer(likelihood: Likelihood, marginal: Marginal, y: Tensor) -> Answer:
    """Of y under the predictives of f ~ N(f₋, K₋)."""
    parts = [
        Answer(predictive.log_prob(some), *ranks(predictive, some), predictive.diagnostics.inaccurate)
        for predictive, some in _predictives(likelihood, marginal, y)
    ]
    return Answer(*map(torch.cat, zip(*parts, strict=True)))


def _predictives(likelihood: Likelihood, marginal: Marginal, y: Tensor) -> Iterator[tuple[Predictive, Tensor]]:
    """The predictives of f ~ N(f₋, K₋) with their y, some rows at a time."""
    for start in range(0, len(y), ROWS_AT_ONCE):
        rows = slice(start, start + ROWS_AT_ONCE)
        with warnings.catch_warnings():  # inaccurate rows are counted
            warnings.simplefilter("ignore", UserWarning)
            predictive = from_marginal(likelihood, marginal.mean[rows], marginal.covariance[rows])
        yield predictive, y[rows]


def ranks(predictive: Predictive, y: Tensor) -> tuple[Tensor, Tensor]:
    """`lower` and `upper` of LeaveOneOut."""
    if predictive.kind == "class":
        own = predictive.probs.gather(1, y.long()[:, None])
        ahead = (predictive.probs * (predictive.probs > own)).sum(1)
        return ahead, ahead + own.squeeze(1)
    if predictive.kind == "circular":
        cut = predictive.cdf(wrapped(predictive.mean - torch.pi))
        turn = (predictive.cdf(wrapped(y)) - cut) % 1
        return turn, turn
    upper = predictive.cdf(y)
    return (predictive.cdf(y - 1) if predictive.kind == "count" else upper), upper
