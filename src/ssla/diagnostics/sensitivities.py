"""Predictives under other priors, derivatives in the prior, and whether prior and data agree.

The outputs at an input x have the mean f̂ (C,) and the covariance K = J H⁻¹Jᵀ (C, C), with J (C, P)
the Jacobian in θ and H (P, P) the curvature of data and prior. The prior π has the precision T.

`local_sensitivity` is exact: scaling T by e^ε moves f̂ by b ε (where the mode moves) and K by −M ε,
with b = J H⁻¹∇log π and M = J H⁻¹ T H⁻¹ Jᵀ. The mode f̃ and the determinant of the refit of the
outputs follow by the chain rule, with the likelihood's third derivative from autograd. The
probabilities of three or more classes are sums over nodes, so there the derivatives are as accurate
as these sums.
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
from ssla.curvature.structure import Eigenbasis, NoFactorError
from ssla.data import Inputs, as_tensor
from ssla.diagnostics.predictive_sets import require_order
from ssla.fitting.evidence import eigenbasis
from ssla.likelihoods import Likelihood
from ssla.maths.linalg import covariance_root
from ssla.predictive import GaussianLaw, Predictive
from ssla.predictive.class_integrals import differentiate_log_probs
from ssla.predictive.expectation import Event, expect, get_expectation_nodes, probability
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
# The share of a prior's precision with which the curvature must be positive definite already. Just
# above the least precision that suffices, variances would be arbitrarily large. A guess
NEEDED = 0.8
USED_WEIGHT = 1e-14  # of a node of an integral: with less weight its slope is left out
CONFLICT = 0.05  # tail probability below which the text says "conflict"


@all_in_plain_torch
@dataclass(frozen=True, eq=False)
class Sensitivity:
    """Predictives of the same N inputs under M priors. Made by `ssla.sensitivity`.

    The first dimension of every table is that of the priors, in the order of `names`.
    """

    names: tuple[str, ...]
    posteriors: tuple[Posterior, ...]
    predictives: tuple[Predictive, ...]
    baseline: Predictive  # under the posterior's own prior
    convention: str
    own: Posterior  # the posterior itself, under its own prior
    x: Inputs

    @cached_property
    def mean(self) -> Tensor:
        """Return the means under each prior (M, N)."""
        return torch.stack([p.mean for p in self.predictives])

    @cached_property
    def stddev(self) -> Tensor:
        """Return the standard deviations under each prior (M, N)."""
        return torch.stack([p.stddev for p in self.predictives])

    def quantiles(self, q: Any) -> Tensor:
        """Return the q-quantiles under each prior: (M, N) for one q, (M, N, k) for k of them.

        Raises TypeError for classes.
        """
        return torch.stack(
            [require_order(p, missing="quantiles").icdf(q) for p in self.predictives]
        )

    def log_prob(self, y: Any) -> Tensor:
        """Return the log densities at y under each prior.

        y is (N,) or (N, k), and the result (M, N) or (M, N, k).
        """
        return torch.stack([p.log_prob(y) for p in self.predictives])

    def probability(self, event: Event) -> Tensor:
        """Return P(Y ∈ event) under each prior (M, N).

        event: (low, high), a list of such intervals, a class or a list of classes, or a function of
        y. Raises ValueError or TypeError for an event that does not fit the target.
        """
        return torch.stack([probability(p, event) for p in self.predictives])

    def expectation(self, function: Any) -> Tensor:
        """Return E function(Y) under each prior (M, N).

        function: applied to each y of a tensor (N, k). Raises ValueError unless it returns one
        value for each y.
        """
        return torch.stack([expect(p, function) for p in self.predictives])

    @property
    def mean_change(self) -> Tensor:
        """Return how far each mean is from the baseline's (M, N).

        The unit is the standard deviation of the baseline.
        """
        change: Tensor = (self.mean - self.baseline.mean) / self.baseline.stddev
        return change

    @property
    def stddev_ratio(self) -> Tensor:
        """Return the standard deviations as multiples of the baseline's (M, N)."""
        return self.stddev / self.baseline.stddev

    def quantile_change(self, q: Any) -> Tensor:
        """Return the q-quantiles less the baseline's: (M, N) for one q, (M, N, k) for k of them.

        Raises TypeError for classes.
        """
        change: Tensor = self.quantiles(q) - self.baseline.icdf(q)
        return change

    def probability_change(self, event: Event) -> Tensor:
        """Return P(Y ∈ event) less the baseline's (M, N); event as in `probability`."""
        return self.probability(event) - probability(self.baseline, event)

    def local(self, y: Any) -> Local:
        """Compute the derivative of log p(y) in the log precision of the posterior's own prior.

        See `local_sensitivity` for y and errors.
        """
        return local_sensitivity(self.own, self.x, y)

    def conflicts(self) -> tuple[Conflict, ...]:
        """Compute for each prior whether it agrees with the data: see `conflict` for errors."""
        return tuple(conflict(posterior) for posterior in self.posteriors)

    def __str__(self) -> str:
        """Return a table as text: a line for each prior, and lines before it for a long name."""
        width = NAME_COLUMNS
        lines = [
            f"{len(self.names)} priors, convention {self.convention}, against the posterior's own "
            "prior",
            f"{'':<{width}}  {'largest':>10}  {'ratio of sd':^15} {'log':>10}  {'sd off':>8}",
            f"{'prior':<{width}}  {'|Δmean|/sd':>10}  {'min … max':^15} {'evidence':>10}  "
            f"{'its mode':>8}",
        ]
        for i, name in enumerate(self.names):
            if len(name) > width:
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
    Gaussian prior that keeps the means of the posterior's own. refit: as in `Posterior.predict`.
    `Posterior.with_prior` describes the
    conventions, and when θ̂ moves with the prior; the reports of the posteriors in the result state
    it. A variational Gaussian keeps its averages over the data. Priors that are too weak for these
    are left out with a warning; if all are, ValueError is raised.

    >>> s = ssla.sensitivity(post, x, (0.01, 100)); print(s)      # doctest: +SKIP
    """
    named_priors = name_priors(posterior, priors)
    posteriors: dict[str, Posterior] = {}
    failed: dict[str, NoFactorError] = {}
    for name, prior in named_priors.items():
        try:
            posteriors[name] = _replace_prior(posterior, prior, convention)
        except NoFactorError as error:
            if not _keeps_averages(posterior, convention):
                raise
            failed[name] = error

    if failed:
        message = (
            f"{len(failed)} of {len(named_priors)} priors were left out ({', '.join(failed)}): the "
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


def _replace_prior(posterior: Posterior, prior: Prior, convention: str) -> Posterior:
    """Return the posterior under another prior.

    Raises NoFactorError where the curvature with that prior is not positive definite. If the
    posterior keeps averages, their curvature must be so with the share NEEDED of the precision.
    convention: as in `Posterior.with_prior`.
    """
    moved = posterior.with_prior(prior, convention)
    if _keeps_averages(posterior, convention):
        # A margin: the curvature must be positive definite with a part of the prior's precision.
        moved.sums.curvature.with_prior(NEEDED * moved.bound_prior.precision(moved.mean))
    return moved


def _keeps_averages(posterior: Posterior, convention: str) -> bool:
    """Return whether another prior keeps averages over the data whose curvature may be indefinite.

    A variational Gaussian under the exact convention keeps its averages. Their curvature may be
    indefinite if the likelihood is not concave.
    """
    return (
        convention == EXACT
        and posterior.variational is not None
        and not posterior.likelihood.concave
    )


def name_priors(posterior: Posterior, priors: Any) -> dict[str, Prior]:
    """Return a dict of priors by name, from a dict, a list or a range of priors.

    posterior: its prior gives the means of the priors of a range. The priors of a list are named by
    their descriptions. Raises TypeError for anything else, and ValueError for an invalid range and
    for no prior.
    """
    if isinstance(priors, Mapping):
        named_priors = {str(name): as_prior(prior) for name, prior in priors.items()}
    elif (
        isinstance(priors, tuple)
        and len(priors) in (2, 3)
        and all(isinstance(v, int | float) for v in priors)
    ):
        named_priors = _make_range_of_priors(posterior, priors)
    elif isinstance(priors, Sequence) and not isinstance(priors, str):
        named_priors = {}
        for prior in priors:
            name = describe(as_prior(prior))
            if name in named_priors:  # a list may hold two priors with the same description
                name = f"{name} ({len(named_priors) + 1})"
            named_priors[name] = as_prior(prior)
    else:
        raise TypeError(
            "priors must be a dict, a list of priors, or a range (low, high) of precisions, but "
            f"is {priors!r}."
        )

    if not named_priors:
        raise ValueError("priors is empty: give at least one prior.")
    return named_priors


def _make_range_of_priors(posterior: Posterior, limits: tuple[float, ...]) -> dict[str, Prior]:
    """Return Gaussian priors by name, with precisions in equal ratios from low to high.

    limits: (low, high[, count]), with COUNT priors unless given. The priors have the means of the
    posterior's own prior if that is Gaussian, and zero otherwise. Raises ValueError unless
    0 < low < high and count ≥ 2.
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
    """The derivatives in ε, at ε = 0, when the prior's precision is multiplied by e^ε."""

    log_prob: Tensor  # of log p(y|x, D), of y's shape
    mean: Tensor  # of f̂ (N, C): zero where θ̂ does not move with the prior
    covariance: Tensor  # of K (N, C, C)
    exact: Tensor  # (N,) bool: False where the refit fell back or did not converge


@in_plain_torch
def local_sensitivity(posterior: Posterior, x: Inputs, y: Any) -> Local:
    """Compute how the log predictive density at y changes with the precision of a Gaussian prior.

    The derivatives are exact, and not differences. They are those of refit="output".

    y: (N,) or (N, k); for D targets (N, D) or (N, k, D). θ̂ moves with the prior where
    `Posterior.with_prior` would move it. Raises ValueError for another prior than a Gaussian one,
    for another convention than the exact one, and for classes that do not exist.
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
        slope = _differentiate_class_probs(likelihood.logit_temperature, marginal, change)
        slope = slope.gather(1, grid.long())
        exact = torch.ones(len(grid), dtype=torch.bool)
        return Local(slope.reshape(shape), change.mean, change.covariance, exact)

    slope, exact = _differentiate_log_density(likelihood, grid, marginal, change)
    if not isinstance(predictive.law, GaussianLaw):
        # The log of the mass is subtracted. Its derivative is the expectation of the slope.
        nodes, weights = get_expectation_nodes(predictive)
        slope_at_nodes, exact_at_nodes = _differentiate_log_density(
            likelihood, nodes, marginal, change
        )
        is_used = weights > USED_WEIGHT
        slope = slope - (weights * torch.where(is_used, slope_at_nodes, 0.0)).sum(1, keepdim=True)
        exact = torch.cat([exact, exact_at_nodes | ~is_used], 1)

    return Local(slope.reshape(shape), change.mean, change.covariance, exact.all(1))


def _differentiate_class_probs(temperature: float, marginal: Marginal, change: Marginal) -> Tensor:
    """Compute d/dε of the log probability of every class: (N, C), and (N, 2) for one output.

    marginal: f̂ (N, C) and K (N, C, C) of the logits; change: their d/dε. The temperature divides
    logits, and its square divides their covariances.
    """
    return differentiate_log_probs(
        marginal.mean / temperature,
        marginal.covariance / temperature**2,
        change.mean / temperature,
        change.covariance / temperature**2,
    )


def _differentiate_log_density(
    likelihood: Likelihood, y: Tensor, marginal: Marginal, change: Marginal
) -> tuple[Tensor, Tensor]:
    """Compute d/dε of the un-normalised log density at y, and flags where it is exact, (N, k) each.

    y (N, k), or (N, k, D) for vectors. marginal: f̂ (N, C) and K (N, C, C); change: their d/dε. It
    is not exact where the refit fell back or did not converge. In the code a name with d is the
    derivative d/dε of the value, Λ is the precision at f̃, and u = K⁻¹(f̃ − f̂).
    """
    rows, count = y.shape[:2]
    f, K, df, dK = (values.repeat_interleave(count, 0) for values in (*marginal, *change))
    y = y.flatten(0, 1)
    boundary = _differentiate_at_boundary(likelihood, y, Marginal(f, K), Marginal(df, dK))
    if boundary is not None:
        # These entries get the slope at the boundary at the end. Until then they need a y whose
        # mode is inside the allowed outputs; the mean is one.
        y = torch.where(boundary.cut, likelihood.mean(f), y)

    mode = evaluate_at_mode(likelihood, y, f, covariance_root(K))
    u = mode.pull.unsqueeze(-1)  # K⁻¹(f̃ − f̂)
    f_mode = f + (K @ u).squeeze(-1)
    eye = torch.eye(f.shape[1], dtype=torch.float64)
    Lambda = likelihood.precision(y, f_mode)

    # f̃ = f̂ + K u with u = g(f̃), differentiated: (I + KΛ) df̃ = df̂ + dK u.
    df_mode = torch.linalg.solve(eye + K @ Lambda, df.unsqueeze(-1) + dK @ u).squeeze(-1)
    dLambda = differentiate_precision(likelihood, y, f_mode, df_mode)
    relative_change = torch.linalg.solve(eye + Lambda @ K, Lambda @ dK + dLambda @ K)
    trace = relative_change.diagonal(dim1=-2, dim2=-1).sum(-1)  # d log|I + ΛK|

    # d(log p(y|f̃) − ½uᵀKu) at a mode is uᵀdf̂ + ½uᵀdK u, since moving f̃ changes nothing there.
    slope = (mode.pull * df).sum(-1) + 0.5 * (u.mT @ dK @ u).squeeze((-2, -1)) - 0.5 * trace
    if boundary is not None:
        slope = torch.where(boundary.cut, boundary.slope, slope)
    exact = mode.converged & ~mode.fallback
    return slope.reshape(rows, count), exact.reshape(rows, count)


class _BoundarySlope(NamedTuple):
    """The derivatives of log densities whose refit the boundary of the allowed outputs cuts."""

    cut: Tensor  # (M,) bool: which log densities these are
    slope: Tensor  # d/dε (M,), for these only


def _differentiate_at_boundary(
    likelihood: Likelihood, y: Tensor, marginal: Marginal, change: Marginal
) -> _BoundarySlope | None:
    """Compute d/dε of the log densities of refits that the boundary of the allowed outputs cuts.

    These log densities have a closed form, which autograd differentiates. y (M,) or (M, D).
    marginal: f̂ (M, C) and K (M, C, C); change: their d/dε. Returns None for a likelihood without
    such a boundary.
    """
    with torch.enable_grad():
        variables = Marginal(*(values.detach().clone().requires_grad_(True) for values in marginal))
        boundary = likelihood.refit_at_boundary(y, *variables)
        if boundary is None:
            return None
        by_mean, by_covariance = torch.autograd.grad(boundary.total.sum(), tuple(variables))
    # The chain rule over f̂ and K.
    slope = (by_mean * change.mean).sum(-1) + (by_covariance * change.covariance).sum((-2, -1))
    return _BoundarySlope(boundary.cut, slope)


def differentiate_precision(
    likelihood: Likelihood, y: Tensor, f: Tensor, direction: Tensor
) -> Tensor:
    """Compute the derivative of Λ(y, f) along a direction of f, by autograd of log p.

    y (M,) or (M, D), f and direction (M, C) -> (M, C, C). likelihood: that of log p(y|f), with Λ(y,
    f) = −∇² log p(y|f).
    """
    with torch.enable_grad():
        variable = f.detach().clone().requires_grad_(True)
        score = _compute_gradient_or_zero(likelihood.log_prob(y, variable).sum(), variable)
        columns = [
            -_compute_gradient_or_zero(score[:, c].sum(), variable) for c in range(f.shape[1])
        ]
        rows = [
            _compute_gradient_or_zero((column * direction).sum(), variable) for column in columns
        ]

    return torch.stack([row.detach() for row in rows], 1)


def _compute_gradient_or_zero(value: Tensor, variable: Tensor) -> Tensor:
    """Compute the gradient of a number `value`, in the shape of the variable, with its graph.

    The gradient is zero if the value does not depend on the variable.
    """
    if not value.requires_grad:
        return torch.zeros_like(variable)
    (gradient,) = torch.autograd.grad(value, variable, create_graph=True, allow_unused=True)
    return torch.zeros_like(variable) if gradient is None else gradient


# --- prior and data -------------------------------------------------------------------------


class Conflict(NamedTuple):
    """The result of a test whether the data are probable under the prior."""

    # squared distance of the data's estimate from the prior mean, in units of its covariance under
    # the prior
    statistic: float
    df: int  # degrees of freedom
    tail: float  # probability under the prior of a distance at least as large: small means conflict

    def __str__(self) -> str:
        """Return the verdict and its numbers in one line."""
        verdict = "conflict" if self.tail < CONFLICT else "no conflict"
        return (
            f"{verdict}: prior-predictive tail probability {self.tail:.3g} (distance² "
            f"{self.statistic:.4g}, {self.df} df)"
        )


@in_plain_torch
def conflict(posterior: Posterior) -> Conflict:
    """Compute the prior-predictive tail probability of the data: small if prior and data conflict.

    The data enter by the score vector r = S(θ̂ − m) + ∇ℓ, with curvature S, which is a sufficient
    statistic of the linear model. Under θ ~ N(m, T⁻¹) r is N(0, S + S T⁻¹ S), so that
    rᵀ(S + S T⁻¹ S)⁺ r is χ² with rank(S) degrees of freedom. This is exact for Gaussian noise and a
    network linear in its free parameters, and a normal approximation of the likelihood otherwise.
    Noise estimated from the same data is taken as known.

    The test needs dense curvature, or kfac of a last layer with Gaussian noise, which is as exact.
    Other structures leave out correlations of r, and would report conflicts that are not there.
    Raises ValueError for these, and for a prior that is not a proper Gaussian.
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
        return _test_in_eigenbasis(basis, tau, r)
    if not curvature.exact:
        raise ValueError(
            "With this structure a conflict check needs one prior precision for each layer."
        )

    return _test_with_matrix(curvature.as_matrix(), tau, r)


def _test_in_eigenbasis(basis: Eigenbasis, tau: Tensor, r: Tensor) -> Conflict:
    """Return the test of `conflict` from an eigenbasis of S in which T is diagonal.

    tau (P,): the diagonal of T. r (P,): the score vector. The statistic is then a sum over the
    eigenvalues of S that are not zero to rounding. basis: has one eigenvalue of S for each
    coordinate.
    """
    is_nonzero = basis.values > RANK_TOLERANCE * basis.values.max()
    c = basis.to_eigenbasis(r)[is_nonzero]
    values = basis.values[is_nonzero]
    statistic = float((c * c / (values + values**2 / tau[is_nonzero])).sum())
    return _make_conflict(statistic, len(values))


def _test_with_matrix(S: Tensor, tau: Tensor, r: Tensor) -> Conflict:
    """Return the test of `conflict` from S (P, P), T = diag(tau) and r, with tau and r (P,).

    Eigenvalues of S that are zero to rounding are left out.
    """
    values, vectors = torch.linalg.eigh(S)
    is_nonzero = values > RANK_TOLERANCE * values.max()
    values, vectors = values[is_nonzero], vectors[:, is_nonzero]

    # S + S T⁻¹ S in the coordinates of the eigenvectors that are kept.
    spread = torch.diag(values) + values[:, None] * (vectors.mT @ (vectors / tau[:, None])) * values
    c = vectors.mT @ r
    return _make_conflict(float(c @ torch.linalg.solve(spread, c)), len(values))


def _make_conflict(statistic: float, df: int) -> Conflict:
    """Return the statistic with its tail probability under χ² with df degrees of freedom.

    The tail probability is gammaincc(df/2, statistic/2).
    """
    halves = torch.tensor([df / 2, statistic / 2], dtype=torch.float64)
    return Conflict(statistic, df, float(torch.special.gammaincc(halves[0], halves[1])))
