"""What if the prior were different? Predictives across priors, derivatives in the prior, and
whether prior and data agree.

`local_sensitivity` is exact: scaling the prior's precision by e^ε moves f̂ by b ε (where the mode
moves) and K by −M ε, with b = J H⁻¹∇log π and M = J H⁻¹ T H⁻¹ Jᵀ; the refit's mode and its
determinant follow by the chain rule, with the likelihood's third derivative from autograd. The
probabilities of three or more classes are sums over nodes: there, to the accuracy of these.
"""

from __future__ import annotations

import itertools
import math
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from ssla._checks import all_in_plain_torch, in_plain_torch, warn
from ssla.curvature.structure import NoFactorError
from ssla.data import Inputs, as_tensor
from ssla.fitting.evidence import eigenbasis
from ssla.likelihoods import Likelihood
from ssla.maths.linalg import root
from ssla.predictive import GaussianLaw, Predictive
from ssla.predictive.class_integrals import class_slopes
from ssla.predictive.expectation import Event, expect, nodes_of, probability
from ssla.priors import EXACT, BoundGaussian, Prior, as_prior, describe
from ssla.priors import Gaussian as GaussianPrior
from ssla.refit import Refit
from ssla.refit.increments import at_mode
from ssla.refit.prior_response import prior_response
from ssla.values import Marginal

if TYPE_CHECKING:
    from ssla.posterior import Posterior

COUNT = 9
NAME, TEXT = (
    17,
    67,
)  # columns of a name in the printed table, and of a line: 80 with the indent of `ssla sensitivity`
RANK_TOLERANCE = 1e-10
# of a prior's precision: with all of it, averages that curve upwards could have any variance
NEEDED = 0.8


@all_in_plain_torch
@dataclass(frozen=True, eq=False)
class Sensitivity:
    """Predictives of the same inputs under several priors.

    Rows of every table: one a prior, in the order of `names`.
    """

    names: tuple[str, ...]
    posteriors: tuple[Posterior, ...]
    predictives: tuple[Predictive, ...]
    baseline: Predictive  # under the posterior's own prior
    convention: str
    own: Posterior
    x: Inputs

    @cached_property
    def mean(self) -> Tensor:
        """(M, N)."""
        return torch.stack([p.mean for p in self.predictives])

    @cached_property
    def stddev(self) -> Tensor:
        """(M, N)."""
        return torch.stack([p.stddev for p in self.predictives])

    def quantiles(self, q: Any) -> Tensor:
        """(M, N), or (M, N, k) for several q."""
        return torch.stack([_ordered(p).icdf(q) for p in self.predictives])

    def log_prob(self, y: Any) -> Tensor:
        """(M, N) or (M, N, k)."""
        return torch.stack([p.log_prob(y) for p in self.predictives])

    def probability(self, event: Event) -> Tensor:
        """P(Y ∈ event) (M, N); event: (low, high), a list of such, classes, or a function of y."""
        return torch.stack([probability(p, event) for p in self.predictives])

    def expectation(self, function: Any) -> Tensor:
        """E function(Y) (M, N)."""
        return torch.stack([expect(p, function) for p in self.predictives])

    @property
    def mean_change(self) -> Tensor:
        """By how many of its own standard deviations the baseline's mean moves (M, N)."""
        change: Tensor = (self.mean - self.baseline.mean) / self.baseline.stddev
        return change

    @property
    def stddev_ratio(self) -> Tensor:
        """(M, N)."""
        return self.stddev / self.baseline.stddev

    def quantile_change(self, q: Any) -> Tensor:
        """(M, N) or (M, N, k)."""
        change: Tensor = self.quantiles(q) - _ordered(self.baseline).icdf(q)
        return change

    def probability_change(self, event: Event) -> Tensor:
        """(M, N)."""
        return self.probability(event) - probability(self.baseline, event)

    def local(self, y: Any) -> Local:
        """d log p(y) / d log(precision) under the posterior's own prior: see
        `local_sensitivity`.
        """
        return local_sensitivity(self.own, self.x, y)

    def conflicts(self) -> tuple[Conflict, ...]:
        """Whether each prior agrees with the data: see `conflict`. Gaussian priors only."""
        return tuple(conflict(posterior) for posterior in self.posteriors)

    def __str__(self) -> str:
        lines = [
            f"{len(self.names)} priors, convention {self.convention}, against the posterior's own "
            "prior",
            f"{'':<{NAME}}  {'largest':>10}  {'ratio of sd':^15} {'log':>10}  {'sd off':>8}",
            f"{'prior':<{NAME}}  {'|Δmean|/sd':>10}  {'min … max':^15} {'evidence':>10}  "
            f"{'its mode':>8}",
        ]
        for i, name in enumerate(self.names):
            if len(name) > NAME:  # on its own line
                lines += textwrap.wrap(name, TEXT)
                name = ""
            ratio = self.stddev_ratio[i]
            lines.append(
                f"{name:<{NAME}}  {float(self.mean_change[i].abs().max()):>10.3g}  "
                f"{float(ratio.min()):>6.3f} … {float(ratio.max()):<6.3f} "
                f"{self.posteriors[i].log_evidence():>10.2f}  "
                f"{self.posteriors[i].report.residual_after:>8.2g}"
            )
        return "\n".join(lines)


@in_plain_torch
def sensitivity(
    posterior: Posterior,
    x: Inputs,
    priors: Mapping[str, Prior] | Sequence[Prior] | tuple[float, float] | tuple[float, float, int],
    convention: str = EXACT,
    refit: str | Refit = "output",
) -> Sensitivity:
    """Predictives at x under several priors, without a pass over the data.

    priors: a dict from names to priors, a list, or a range (low, high[, count]) of precisions of a
    Gaussian prior that keeps the means of the posterior's own. How each prior is plugged in, and
    whether θ̂ moves with it, is `Posterior.with_prior`'s affair; the posteriors are kept, and their
    reports say it. Priors too weak for the averages of a variational Gaussian, which are kept, are
    left out with a warning.

    >>> s = ssla.sensitivity(post, x, (0.01, 100)); print(s)      # doctest: +SKIP
    """
    chosen = named_priors(posterior, priors)
    found: dict[str, Posterior] = {}
    failed: dict[str, NoFactorError] = {}
    for name, prior in chosen.items():
        try:
            found[name] = _under(posterior, prior, convention)
        except NoFactorError as error:
            if not _keeps_averages(posterior, convention):
                raise
            failed[name] = error
    if failed:
        message = (
            f"{len(failed)} of {len(chosen)} priors were left out ({', '.join(failed)}): the "
            "averages over the data that this posterior has curve upwards too much for them. Fit "
            "again with such a prior to compare it."
        )
        if not found:
            raise ValueError(message) from next(iter(failed.values()))
        warn(message)
    predictives = tuple(p.predict(x, refit) for p in found.values())
    return Sensitivity(
        tuple(found),
        tuple(found.values()),
        predictives,
        posterior.predict(x, refit),
        convention,
        posterior,
        x,
    )


def _under(posterior: Posterior, prior: Prior, convention: str) -> Posterior:
    """The posterior under another prior; NoFactorError where the averages that it keeps curve
    upwards too much for that one.
    """
    moved = posterior.with_prior(prior, convention)
    if _keeps_averages(posterior, convention):
        moved.sums.curvature.with_prior(NEEDED * moved.bound_prior.precision(moved.mean))
    return moved


def _keeps_averages(posterior: Posterior, convention: str) -> bool:
    """Whether another prior keeps averages over the data, of a likelihood for which they can
    curve upwards.
    """
    return (
        convention == EXACT
        and posterior.variational is not None
        and not posterior.likelihood.concave
    )


def named_priors(posterior: Posterior, priors: Any) -> dict[str, Prior]:
    """A dict, a list or a range of priors -> priors by name."""
    if isinstance(priors, Mapping):
        chosen = {str(name): as_prior(prior) for name, prior in priors.items()}
    elif (
        isinstance(priors, tuple)
        and len(priors) in (2, 3)
        and all(isinstance(v, int | float) for v in priors)
    ):
        low, high, count = (*priors, COUNT)[:3]
        if not (0 < low < high < math.inf and int(count) >= 2):
            raise ValueError(
                "A range of priors is (low, high[, count]) with 0 < low < high and count ≥ 2, but "
                f"is {priors!r}."
            )
        mean = posterior.prior.mean if isinstance(posterior.prior, GaussianPrior) else 0.0
        levels = torch.logspace(
            math.log10(low), math.log10(high), int(count), dtype=torch.float64
        ).tolist()
        chosen = {f"precision {level:.4g}": GaussianPrior(level, mean) for level in levels}
    elif isinstance(priors, Sequence) and not isinstance(priors, str):
        chosen = {}
        for prior in priors:
            name = describe(as_prior(prior))
            chosen[name if name not in chosen else f"{name} ({len(chosen) + 1})"] = as_prior(prior)
    else:
        raise TypeError(
            "priors must be a dict, a list of priors, or a range (low, high) of precisions, but "
            f"is {priors!r}."
        )
    if not chosen:
        raise ValueError("priors is empty: give at least one prior.")
    return chosen


def _ordered(predictive: Predictive) -> Any:
    if predictive.kind == "class":
        raise TypeError("Classes have no quantiles. Ask for probability([…]).")
    return predictive


# --- derivatives ----------------------------------------------------------------------------


class Local(NamedTuple):
    """d/dε of a log predictive when the prior's precision is multiplied by e^ε."""

    log_prob: Tensor  # of log p(y|x, D), of y's shape
    mean: Tensor  # of f̂ (N, C): zero where θ̂ does not move with the prior
    covariance: Tensor  # of K (N, C, C)
    exact: Tensor  # (N,) bool: False where the refit fell back or did not converge


@in_plain_torch
def local_sensitivity(posterior: Posterior, x: Inputs, y: Any) -> Local:
    """How the log predictive density at y answers to the precision of a Gaussian prior: exact
    derivatives, no differences.

    y (N,) or (N, k). For the output rung and the exact convention. θ̂ moves with the prior where
    `with_prior` would move it.
    """
    if posterior.convention != EXACT or not isinstance(posterior.bound_prior, BoundGaussian):
        raise ValueError(
            "Local sensitivity is the derivative in the precision of a Gaussian prior under the "
            "exact convention. Use with_prior(priors.Gaussian(…)) first."
        )
    moves = posterior.follows_prior
    marginal = posterior.outputs_at(x)
    b, M = prior_response(posterior, x)
    change = Marginal(b if moves else torch.zeros_like(b), -M)
    likelihood = posterior.likelihood.predictive
    predictive = posterior.predict(x)
    value = as_tensor(y).to("cpu", torch.float64)
    vector = predictive.kind == "vector"
    grid = value if value.dim() == (3 if vector else 2) else value.unsqueeze(1)
    shape = grid.shape[:2] if grid is value else grid.shape[:1]
    unit = likelihood.logit_temperature
    if unit is not None:
        predictive.law.check(grid)
        pairs = ((f / unit, K / unit**2) for f, K in (marginal, change))
        slope = class_slopes(*itertools.chain(*pairs)).gather(1, grid.long())
        return Local(slope.reshape(shape), *change, torch.ones(len(grid), dtype=torch.bool))
    slope, exact = _slope(likelihood, grid, marginal, change)
    if not isinstance(
        predictive.law, GaussianLaw
    ):  # the mass changes too: d log ∫ = E of the slope
        values, weights = nodes_of(predictive)
        at_nodes, fine = _slope(likelihood, values, marginal, change)
        used = weights > 1e-14
        slope = slope - (weights * torch.where(used, at_nodes, 0.0)).sum(1, keepdim=True)
        exact = torch.cat([exact, fine | ~used], 1)
    return Local(slope.reshape(shape), change.mean, change.covariance, exact.all(1))


def _slope(
    likelihood: Likelihood, y: Tensor, at: Marginal, change: Marginal
) -> tuple[Tensor, Tensor]:
    """d/dε of the un-normalised log density at y (N, k, …), and where it is exact (N, k)."""
    rows, count = y.shape[:2]
    f, K, df, dK = (part.repeat_interleave(count, 0) for part in (*at, *change))
    y = y.flatten(0, 1)
    boundary = _boundary_slope(likelihood, y, Marginal(f, K), Marginal(df, dK))
    if boundary is not None:
        y = torch.where(boundary.cut, likelihood.mean(f), y)  # a y whose mode is inside
    found = at_mode(likelihood, y, f, root(K))
    u = found.pull.unsqueeze(-1)
    end = f + (K @ u).squeeze(-1)
    eye = torch.eye(f.shape[1], dtype=torch.float64)
    Lambda = likelihood.precision(y, end)
    moved = torch.linalg.solve(eye + K @ Lambda, df.unsqueeze(-1) + dK @ u).squeeze(-1)  # df̃
    bend = third_derivative(likelihood, y, end, moved)
    inner = torch.linalg.solve(eye + Lambda @ K, Lambda @ dK + bend @ K)
    trace = inner.diagonal(dim1=-2, dim2=-1).sum(-1)
    slope = (found.pull * df).sum(-1) + 0.5 * (u.mT @ dK @ u).squeeze((-2, -1)) - 0.5 * trace
    if boundary is not None:
        slope = torch.where(boundary.cut, boundary.slope, slope)
    return slope.reshape(rows, count), (found.converged & ~found.fallback).reshape(rows, count)


class _BoundarySlope(NamedTuple):
    """d/dε of the log densities that the boundary of the allowed outputs cuts (M,)."""

    cut: Tensor  # which those are
    slope: Tensor


def _boundary_slope(
    likelihood: Likelihood, y: Tensor, at: Marginal, change: Marginal
) -> _BoundarySlope | None:
    """By autograd of their closed form; None where every output is allowed."""
    with torch.enable_grad():
        free = Marginal(*(part.detach().clone().requires_grad_(True) for part in at))
        boundary = likelihood.refit_at_boundary(y, *free)
        if boundary is None:
            return None
        by_mean, by_covariance = torch.autograd.grad(boundary.total.sum(), tuple(free))
    slope = (by_mean * change.mean).sum(-1) + (by_covariance * change.covariance).sum((-2, -1))
    return _BoundarySlope(boundary.cut, slope)


def third_derivative(likelihood: Likelihood, y: Tensor, f: Tensor, direction: Tensor) -> Tensor:
    """d/dε Λ(y, f + ε·direction) (M, C, C), by autograd of log p."""
    with torch.enable_grad():
        free = f.detach().clone().requires_grad_(True)
        score = _gradient(likelihood.log_prob(y, free).sum(), free)
        columns = [-_gradient(score[:, c].sum(), free) for c in range(f.shape[1])]
        return torch.stack(
            [_gradient((column * direction).sum(), free).detach() for column in columns], 1
        )


def _gradient(value: Tensor, at: Tensor) -> Tensor:
    if not value.requires_grad:
        return torch.zeros_like(at)
    (found,) = torch.autograd.grad(value, at, create_graph=True, allow_unused=True)
    return torch.zeros_like(at) if found is None else found


# --- prior and data -------------------------------------------------------------------------


class Conflict(NamedTuple):
    """Whether the data are ones that the prior expects."""

    # squared distance of the data's estimate from the prior's, in the prior predictive's own units
    statistic: float
    df: int
    tail: float  # P(at least that far) under the prior: small means conflict

    def __str__(self) -> str:
        said = "conflict" if self.tail < 0.05 else "no conflict"
        return (
            f"{said}: prior-predictive tail probability {self.tail:.3g} (distance² "
            f"{self.statistic:.4g}, {self.df} df)"
        )


@in_plain_torch
def conflict(posterior: Posterior) -> Conflict:
    """The prior-predictive tail probability of the data, through the sufficient statistic of the
    linear model.

    Under θ ~ N(m, T⁻¹) the score vector r = S(θ̂ − m) + ∇ℓ is N(0, S + S T⁻¹ S), so rᵀ(S + S T⁻¹
    S)⁺ r is χ² with rank(S) degrees of freedom. Exact for Gaussian noise and a network linear in
    its free parameters; by the normal approximation of the likelihood otherwise. Noise estimated
    from the same data is taken as known.

    Needs dense curvature (or kfac of a last layer with Gaussian noise, which is as exact). Another
    structure leaves out correlations that r has, and would report conflicts that are not there.
    """
    bound = posterior.bound_prior
    if not isinstance(bound, BoundGaussian) or not bool((bound.scale_precision > 0).all()):
        raise ValueError(
            "A conflict check needs a proper Gaussian prior: with_prior(priors.Gaussian(…))."
        )
    tau, curvature = bound.scale_precision, posterior.sums.curvature
    if not curvature.exact and not posterior.quadratic:
        raise ValueError(
            "A conflict check needs dense curvature, but this posterior has "
            f"structure={posterior.report.structure!r}, which leaves out correlations: it would "
            "report conflicts that are not there. Fit with structure='dense', for example of the "
            "last layer."
        )
    r = curvature.push(posterior.mean - bound.mean) + posterior.sums.gradient
    basis = eigenbasis(curvature, tau, torch.zeros(len(tau), dtype=torch.long))
    if basis is not None:
        c, values = basis.rotated(r), basis.values
        seen = values > RANK_TOLERANCE * values.max()
        c, values = c[seen], values[seen]
        statistic, df = float((c * c / (values + values**2 / tau[seen])).sum()), len(values)
        return _conflict(statistic, df)
    if not curvature.exact:
        raise ValueError(
            "With this structure a conflict check needs one prior precision for each layer."
        )
    values, vectors = torch.linalg.eigh(curvature.as_matrix())
    seen = values > RANK_TOLERANCE * values.max()
    values, vectors = values[seen], vectors[:, seen]
    spread = torch.diag(values) + values[:, None] * (vectors.mT @ (vectors / tau[:, None])) * values
    c = vectors.mT @ r
    return _conflict(float(c @ torch.linalg.solve(spread, c)), len(values))


def _conflict(statistic: float, df: int) -> Conflict:
    half = torch.tensor([df / 2, statistic / 2], dtype=torch.float64)
    return Conflict(statistic, df, float(torch.special.gammaincc(half[0], half[1])))
