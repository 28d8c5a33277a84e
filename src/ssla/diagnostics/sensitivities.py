"""What if the prior were different? Predictives across priors, derivatives in the prior, and
whether prior and data agree.

`local_sensitivity` is exact: scaling the prior's precision by e^ε moves f̂ by b ε (where the mode
moves) and K by −M ε, with b = J H⁻¹∇log π and M = J H⁻¹ T H⁻¹ Jᵀ; the refit's mode and its
determinant follow by the chain rule, with the likelihood's third derivative from autograd. The
probabilities of three or more classes are sums over nodes: there, to the accuracy of these.
"""

from __future__ import annotations

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
from ssla.diagnostics.predictive_sets import require_order
from ssla.fitting.evidence import eigenbasis
from ssla.likelihoods import Likelihood
from ssla.maths.linalg import covariance_root
from ssla.predictive import GaussianLaw, Predictive
from ssla.predictive.class_integrals import class_slopes
from ssla.predictive.expectation import Event, expect, nodes_of, probability
from ssla.priors import EXACT, BoundGaussian, Prior, as_prior, describe
from ssla.priors import Gaussian as GaussianPrior
from ssla.refit import Refit
from ssla.refit.increments import evaluate_at_mode
from ssla.refit.prior_response import prior_response
from ssla.values import Marginal

if TYPE_CHECKING:
    from ssla.posterior import Posterior

COUNT = 9  # priors of a range, unless the user says otherwise
NAME_COLUMNS = 17  # of the printed table
TEXT_COLUMNS = 67  # of a printed line: 80 with the indent of `ssla sensitivity`
RANK_TOLERANCE = 1e-10  # of the largest eigenvalue; smaller ones count as zero; a guess
# of a prior's precision: with all of it, averages that curve upwards could have any variance; a
# guess
NEEDED = 0.8
USED_WEIGHT = 1e-14  # of a node of an integral: with less weight its slope is not needed
CONFLICT = 0.05  # tail probability below which the text says "conflict"


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
        """The means under each prior (M, N)."""
        return torch.stack([p.mean for p in self.predictives])

    @cached_property
    def stddev(self) -> Tensor:
        """The standard deviations under each prior (M, N)."""
        return torch.stack([p.stddev for p in self.predictives])

    def quantiles(self, q: Any) -> Tensor:
        """Return the q-quantiles under each prior: (M, N), or (M, N, k) for several q.

        TypeError for classes.
        """
        return torch.stack([require_order(p, "quantiles").icdf(q) for p in self.predictives])

    def log_prob(self, y: Any) -> Tensor:
        """Return the log densities at y under each prior: y (N,) or (N, k) -> (M, N) or
        (M, N, k).
        """
        return torch.stack([p.log_prob(y) for p in self.predictives])

    def probability(self, event: Event) -> Tensor:
        """Return P(Y ∈ event) (M, N); event: (low, high), a list of such, classes, or a function
        of y.
        """
        return torch.stack([probability(p, event) for p in self.predictives])

    def expectation(self, function: Any) -> Tensor:
        """Return E function(Y) under each prior (M, N)."""
        return torch.stack([expect(p, function) for p in self.predictives])

    @property
    def mean_change(self) -> Tensor:
        """The move of the mean, in standard deviations of the baseline (M, N)."""
        change: Tensor = (self.mean - self.baseline.mean) / self.baseline.stddev
        return change

    @property
    def stddev_ratio(self) -> Tensor:
        """The standard deviations as multiples of the baseline's (M, N)."""
        return self.stddev / self.baseline.stddev

    def quantile_change(self, q: Any) -> Tensor:
        """Return by how much the q-quantiles differ from the baseline's: (M, N), or (M, N, k) for
        several q.  TypeError for classes.
        """
        change: Tensor = self.quantiles(q) - self.baseline.icdf(q)
        return change

    def probability_change(self, event: Event) -> Tensor:
        """Return by how much P(Y ∈ event) differs from the baseline's (M, N)."""
        return self.probability(event) - probability(self.baseline, event)

    def local(self, y: Any) -> Local:
        """Compute d log p(y) / d log(precision) under the posterior's own prior: see
        `local_sensitivity`.
        """
        return local_sensitivity(self.own, self.x, y)

    def conflicts(self) -> tuple[Conflict, ...]:
        """Check whether each prior agrees with the data: see `conflict`. Gaussian priors only."""
        return tuple(conflict(posterior) for posterior in self.posteriors)

    def __str__(self) -> str:
        """Return a table with one line for each prior."""
        width = NAME_COLUMNS
        lines = [
            f"{len(self.names)} priors, convention {self.convention}, against the posterior's own "
            "prior",
            f"{'':<{width}}  {'largest':>10}  {'ratio of sd':^15} {'log':>10}  {'sd off':>8}",
            f"{'prior':<{width}}  {'|Δmean|/sd':>10}  {'min … max':^15} {'evidence':>10}  "
            f"{'its mode':>8}",
        ]
        for i, name in enumerate(self.names):
            if len(name) > width:  # on its own line
                lines += textwrap.wrap(name, TEXT_COLUMNS)
                name = ""
            ratio = self.stddev_ratio[i]
            lines.append(
                f"{name:<{width}}  {float(self.mean_change[i].abs().max()):>10.3g}  "
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
    """Compute the predictives at x under several priors, without a pass over the data.

    priors: a dict from names to priors, a list, or a range (low, high[, count]) of precisions of a
    Gaussian prior that keeps the means of the posterior's own. How each prior is plugged in, and
    whether θ̂ moves with it, is `Posterior.with_prior`'s affair; the posteriors are kept, and their
    reports say it. Priors too weak for the averages of a variational Gaussian, which are kept, are
    left out with a warning.

    >>> s = ssla.sensitivity(post, x, (0.01, 100)); print(s)      # doctest: +SKIP
    """
    chosen = named_priors(posterior, priors)
    posteriors: dict[str, Posterior] = {}
    failed: dict[str, NoFactorError] = {}
    for name, prior in chosen.items():
        try:
            posteriors[name] = _posterior_under(posterior, prior, convention)
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
        if not posteriors:
            raise ValueError(message) from next(iter(failed.values()))
        warn(message)
    return Sensitivity(
        tuple(posteriors),
        tuple(posteriors.values()),
        tuple(p.predict(x, refit) for p in posteriors.values()),
        posterior.predict(x, refit),
        convention,
        posterior,
        x,
    )


def _posterior_under(posterior: Posterior, prior: Prior, convention: str) -> Posterior:
    """Return the posterior under another prior.

    Raises NoFactorError where the averages that it keeps curve upwards too much for that prior.
    """
    moved = posterior.with_prior(prior, convention)
    if _keeps_averages(posterior, convention):
        # A margin: the curvature must be positive definite with a part of the prior's precision.
        moved.sums.curvature.with_prior(NEEDED * moved.bound_prior.precision(moved.mean))
    return moved


def _keeps_averages(posterior: Posterior, convention: str) -> bool:
    """Check whether another prior keeps averages over the data, of a likelihood for which they can
    curve upwards.
    """
    return (
        convention == EXACT
        and posterior.variational is not None
        and not posterior.likelihood.concave
    )


def named_priors(posterior: Posterior, priors: Any) -> dict[str, Prior]:
    """Turn a dict, a list or a range of priors into priors by name.

    Raises TypeError for anything else, and ValueError for a range that is not one or for no prior.
    """
    if isinstance(priors, Mapping):
        chosen = {str(name): as_prior(prior) for name, prior in priors.items()}
    elif (
        isinstance(priors, tuple)
        and len(priors) in (2, 3)
        and all(isinstance(v, int | float) for v in priors)
    ):
        chosen = _range_of_priors(posterior, priors)
    elif isinstance(priors, Sequence) and not isinstance(priors, str):
        chosen = {}
        for prior in priors:
            name = describe(as_prior(prior))
            if name in chosen:  # a list may hold two priors with the same description
                name = f"{name} ({len(chosen) + 1})"
            chosen[name] = as_prior(prior)
    else:
        raise TypeError(
            "priors must be a dict, a list of priors, or a range (low, high) of precisions, but "
            f"is {priors!r}."
        )
    if not chosen:
        raise ValueError("priors is empty: give at least one prior.")
    return chosen


def _range_of_priors(posterior: Posterior, limits: tuple[float, ...]) -> dict[str, Prior]:
    """Return Gaussian priors with precisions in equal ratios from low to high, for limits (low,
    high[, count]); ValueError for limits that are not a range.

    They have the means of the posterior's own prior.
    """
    low, high, count = (*limits, COUNT)[:3]
    if not (0 < low < high < math.inf and int(count) >= 2):
        raise ValueError(
            "A range of priors is (low, high[, count]) with 0 < low < high and count ≥ 2, but "
            f"is {limits!r}."
        )
    mean = posterior.prior.mean if isinstance(posterior.prior, GaussianPrior) else 0.0
    levels = torch.logspace(math.log10(low), math.log10(high), int(count), dtype=torch.float64)
    return {f"precision {level:.4g}": GaussianPrior(level, mean) for level in levels.tolist()}


# --- derivatives ----------------------------------------------------------------------------


class Local(NamedTuple):
    """d/dε of a log predictive when the prior's precision is multiplied by e^ε."""

    log_prob: Tensor  # of log p(y|x, D), of y's shape
    mean: Tensor  # of f̂ (N, C): zero where θ̂ does not move with the prior
    covariance: Tensor  # of K (N, C, C)
    exact: Tensor  # (N,) bool: False where the refit fell back or did not converge


@in_plain_torch
def local_sensitivity(posterior: Posterior, x: Inputs, y: Any) -> Local:
    """Compute how the log predictive density at y changes with the precision of a Gaussian prior.

    The derivatives are exact, not differences.

    y (N,) or (N, k). For the output rung and the exact convention. θ̂ moves with the prior where
    `with_prior` would move it. Raises ValueError for another prior or convention.
    """
    if posterior.convention != EXACT or not isinstance(posterior.bound_prior, BoundGaussian):
        raise ValueError(
            "Local sensitivity is the derivative in the precision of a Gaussian prior under the "
            "exact convention. Use with_prior(priors.Gaussian(…)) first."
        )
    marginal = posterior.outputs_at(x)
    b, M = prior_response(posterior, x)  # (N, C), (N, C, C): see the module's docstring
    change = Marginal(b if posterior.follows_prior else torch.zeros_like(b), -M)
    likelihood = posterior.likelihood.predictive
    predictive = posterior.predict(x)
    value = as_tensor(y).to("cpu", torch.float64)
    # One y for each input is a grid of one column.
    is_grid = value.dim() == (3 if predictive.kind == "vector" else 2)
    grid = value if is_grid else value.unsqueeze(1)
    shape = grid.shape[:2] if is_grid else grid.shape[:1]
    if likelihood.logit_temperature is not None:
        predictive.law.check(grid)
        slope = _class_slopes(likelihood.logit_temperature, marginal, change)
        slope = slope.gather(1, grid.long())
        return Local(slope.reshape(shape), *change, torch.ones(len(grid), dtype=torch.bool))
    slope, exact = _log_density_slope(likelihood, grid, marginal, change)
    if not isinstance(predictive.law, GaussianLaw):
        # The mass changes too: d log ∫ is the expectation of the slope.
        nodes, weights = nodes_of(predictive)
        slope_at_nodes, exact_at_nodes = _log_density_slope(likelihood, nodes, marginal, change)
        used = weights > USED_WEIGHT
        slope = slope - (weights * torch.where(used, slope_at_nodes, 0.0)).sum(1, keepdim=True)
        exact = torch.cat([exact, exact_at_nodes | ~used], 1)
    return Local(slope.reshape(shape), change.mean, change.covariance, exact.all(1))


def _class_slopes(temperature: float, marginal: Marginal, change: Marginal) -> Tensor:
    """Compute d/dε of the log probability of every class (N, classes).

    marginal f̂ (N, C) and K (N, C, C) of the logits, change: their d/dε. The temperature divides
    logits, and its square their covariances.
    """
    return class_slopes(
        marginal.mean / temperature,
        marginal.covariance / temperature**2,
        change.mean / temperature,
        change.covariance / temperature**2,
    )


def _log_density_slope(
    likelihood: Likelihood, y: Tensor, marginal: Marginal, change: Marginal
) -> tuple[Tensor, Tensor]:
    """Compute d/dε of the un-normalised log density at y, and where it is exact.

    y (N, k, …), marginal f̂ (N, C) and K (N, C, C), change: their d/dε -> (N, k), bool (N, k).
    """
    rows, count = y.shape[:2]
    f, K, df, dK = (values.repeat_interleave(count, 0) for values in (*marginal, *change))
    y = y.flatten(0, 1)
    boundary = _boundary_slope(likelihood, y, Marginal(f, K), Marginal(df, dK))
    if boundary is not None:
        # These rows take the slope at the boundary; any y whose mode is inside will do here.
        y = torch.where(boundary.cut, likelihood.mean(f), y)
    mode = evaluate_at_mode(likelihood, y, f, covariance_root(K))
    u = mode.pull.unsqueeze(-1)
    f_mode = f + (K @ u).squeeze(-1)
    eye = torch.eye(f.shape[1], dtype=torch.float64)
    Lambda = likelihood.precision(y, f_mode)
    # f̃ = f̂ + K u with u = g(f̃), differentiated: (I + KΛ) df̃ = df̂ + dK u.
    df_mode = torch.linalg.solve(eye + K @ Lambda, df.unsqueeze(-1) + dK @ u).squeeze(-1)
    dLambda = third_derivative(likelihood, y, f_mode, df_mode)
    inner = torch.linalg.solve(eye + Lambda @ K, Lambda @ dK + dLambda @ K)
    trace = inner.diagonal(dim1=-2, dim2=-1).sum(-1)  # d log|I + ΛK|
    slope = (mode.pull * df).sum(-1) + 0.5 * (u.mT @ dK @ u).squeeze((-2, -1)) - 0.5 * trace
    if boundary is not None:
        slope = torch.where(boundary.cut, boundary.slope, slope)
    exact = mode.converged & ~mode.fallback
    return slope.reshape(rows, count), exact.reshape(rows, count)


class _BoundarySlope(NamedTuple):
    """d/dε of the log densities that the boundary of the allowed outputs cuts (M,)."""

    cut: Tensor  # which those are
    slope: Tensor


def _boundary_slope(
    likelihood: Likelihood, y: Tensor, marginal: Marginal, change: Marginal
) -> _BoundarySlope | None:
    """Compute the slopes of refits that end at the boundary of the allowed outputs, by autograd of
    their closed form; None where every output is allowed.

    y (M, …), marginal f̂ (M, C) and K (M, C, C), change: their d/dε.
    """
    with torch.enable_grad():
        free = Marginal(*(values.detach().clone().requires_grad_(True) for values in marginal))
        boundary = likelihood.refit_at_boundary(y, *free)
        if boundary is None:
            return None
        by_mean, by_covariance = torch.autograd.grad(boundary.total.sum(), tuple(free))
    # The chain rule over f̂ and K.
    slope = (by_mean * change.mean).sum(-1) + (by_covariance * change.covariance).sum((-2, -1))
    return _BoundarySlope(boundary.cut, slope)


def third_derivative(likelihood: Likelihood, y: Tensor, f: Tensor, direction: Tensor) -> Tensor:
    """Compute d/dε Λ(y, f + ε·direction), by autograd of log p.

    y (M, …), f and direction (M, C) -> (M, C, C).
    """
    with torch.enable_grad():
        free = f.detach().clone().requires_grad_(True)
        score = _gradient_or_zero(likelihood.log_prob(y, free).sum(), free)
        columns = [-_gradient_or_zero(score[:, c].sum(), free) for c in range(f.shape[1])]
        rows = [_gradient_or_zero((column * direction).sum(), free) for column in columns]
    return torch.stack([row.detach() for row in rows], 1)


def _gradient_or_zero(value: Tensor, variable: Tensor) -> Tensor:
    """Compute ∂value/∂variable, in the shape of the variable; zero where value does not depend on
    it.
    """
    if not value.requires_grad:
        return torch.zeros_like(variable)
    (gradient,) = torch.autograd.grad(value, variable, create_graph=True, allow_unused=True)
    return torch.zeros_like(variable) if gradient is None else gradient


# --- prior and data -------------------------------------------------------------------------


class Conflict(NamedTuple):
    """Whether the data are ones that the prior expects."""

    # squared distance of the data's estimate from the prior's, in the prior predictive's own units
    statistic: float
    df: int
    tail: float  # P(at least that far) under the prior: small means conflict

    def __str__(self) -> str:
        """Return the verdict and its numbers in one line."""
        verdict = "conflict" if self.tail < CONFLICT else "no conflict"
        return (
            f"{verdict}: prior-predictive tail probability {self.tail:.3g} (distance² "
            f"{self.statistic:.4g}, {self.df} df)"
        )


@in_plain_torch
def conflict(posterior: Posterior) -> Conflict:
    """Compute the prior-predictive tail probability of the data.

    The sufficient statistic of the linear model stands for the data.

    Under θ ~ N(m, T⁻¹) the score vector r = S(θ̂ − m) + ∇ℓ is N(0, S + S T⁻¹ S), so rᵀ(S + S T⁻¹
    S)⁺ r is χ² with rank(S) degrees of freedom. Exact for Gaussian noise and a network linear in
    its free parameters; by the normal approximation of the likelihood otherwise. Noise estimated
    from the same data is taken as known.

    Needs dense curvature (or kfac of a last layer with Gaussian noise, which is as exact). Another
    structure leaves out correlations that r has, and would report conflicts that are not there:
    ValueError. The same for a prior that is not a proper Gaussian.
    """
    bound = posterior.bound_prior
    if not isinstance(bound, BoundGaussian) or not bool((bound.scale_precision > 0).all()):
        raise ValueError(
            "A conflict check needs a proper Gaussian prior: with_prior(priors.Gaussian(…))."
        )
    tau = bound.scale_precision
    curvature = posterior.sums.curvature
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
        # In an eigenbasis of S in which T is diagonal, the statistic is a sum.
        kept = basis.values > RANK_TOLERANCE * basis.values.max()
        c, values = basis.to_eigenbasis(r)[kept], basis.values[kept]
        statistic = float((c * c / (values + values**2 / tau[kept])).sum())
        return _conflict_of_statistic(statistic, len(values))
    if not curvature.exact:
        raise ValueError(
            "With this structure a conflict check needs one prior precision for each layer."
        )
    values, vectors = torch.linalg.eigh(curvature.as_matrix())
    kept = values > RANK_TOLERANCE * values.max()
    values, vectors = values[kept], vectors[:, kept]
    # S + S T⁻¹ S in the coordinates of the eigenvectors that are kept.
    spread = torch.diag(values) + values[:, None] * (vectors.mT @ (vectors / tau[:, None])) * values
    c = vectors.mT @ r
    return _conflict_of_statistic(float(c @ torch.linalg.solve(spread, c)), len(values))


def _conflict_of_statistic(statistic: float, df: int) -> Conflict:
    """Return the statistic with its tail probability under χ² with df degrees of freedom."""
    half = torch.tensor([df / 2, statistic / 2], dtype=torch.float64)
    return Conflict(statistic, df, float(torch.special.gammaincc(half[0], half[1])))
