"""Cavities: what each training row contributes to the Gaussian of θ, and the outputs without it.

Row i contributes a site to the Gaussian of θ: its score g and its precision Λ, averaged over the
Gaussian (variational), or at the mode with the Fisher for Λ (Laplace). The outputs at x_i without
the site have the cavity

    K₋ = (K⁻¹ − Λ)⁻¹ = R (I − RᵀΛR)⁻¹ Rᵀ        f₋ = f − K₋ g        K = J S Jᵀ = R Rᵀ

and y_i is predicted from N(f₋, K₋). This is exact for a linear model with Gaussian noise. For other
likelihoods the sites of the other rows are kept as they are, which is too optimistic for
influential rows: those whose site moves the Gaussian far, in KL divergence. Prior, noise and
features are kept, and so is the tilt of a θ̂ that is not a mode.

`collect` computes the sites, in one pass. `score` evaluates them under another Gaussian, with the
sites fixed.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from ssla.curvature import Operator
from ssla.curvature.jacobians import Jacobian
from ssla.curvature.memory import tensor_bytes
from ssla.data import Batch, Rows, check_batch
from ssla.likelihoods import Likelihood
from ssla.likelihoods.averages import averages
from ssla.maths.linalg import covariance_root
from ssla.maths.quadrature import wrap_angles
from ssla.predictive import from_marginal
from ssla.predictive.predictive import Predictive
from ssla.refit.weights.refit_rows import DataPurpose, check_same_data, open_training_data
from ssla.values import Marginal

if TYPE_CHECKING:
    from ssla.posterior import Posterior

PURPOSE = DataPurpose("posterior.loo()", "The data", "posterior.loo(data={})")
# least eigenvalue of I − RᵀΛR, the variance with the row as a share of the variance without it
LEAST = 1e-6
ROWS_AT_ONCE = 1024  # predictives that are held together


# --- sites ---------------------------------------------------------------------------------


class Site(NamedTuple):
    """What some rows contribute to the Gaussian of θ, in float64.

    A row's weight stands beside its site, not in it.
    """

    f: Tensor  # outputs at the Gaussian's mean (b, C)
    J: Jacobian
    score: Tensor  # g (b, C)
    precision: Tensor  # Λ (b, C, C)
    y: Tensor
    weights: Tensor | None  # None: all one

    @property
    def row_weights(self) -> Tensor:
        """Return the weights of the rows (b,), ones where there are none."""
        if self.weights is None:
            return torch.ones(len(self.f), dtype=torch.float64)
        return self.weights


@dataclass(frozen=True, eq=False)
class Sites:
    """The sites of all rows under N(mean, ·), a chunk at a time; kept in memory while they fit
    a share of the budget.
    """

    rows: Rows[Site]
    mean: Tensor  # of θ, where the outputs are
    likelihood: Likelihood

    def __iter__(self) -> Iterator[Site]:
        """Iterate over the sites of chunks of rows."""
        return iter(self.rows)


def collect_sites(
    posterior: Posterior, data: Any = None, purpose: DataPurpose = PURPOSE, most: int | None = None
) -> Sites:
    """Compute the sites of the training rows in one pass, at most `most` rows a chunk.

    ValueError unless they are the rows of the fit.
    """
    source = open_training_data(posterior, data, purpose)
    network, likelihood, budget = posterior.network, posterior.likelihood, posterior.memory_budget
    support = likelihood.support_for(network.outputs)
    fisher = uses_expected_fisher(posterior)

    def compute_site(chunk: Batch) -> Site:
        """Linearise a chunk of rows, and average score and precision over the Gaussian."""
        _, y, weights = check_batch(chunk, support, network.outputs)
        ((f, J),) = posterior.linearised(chunk.x)  # these rows are one chunk
        f, J = f.double(), J.double()
        if posterior.variational is None:
            return Site(f, J, likelihood.score(y, f), likelihood.fisher(f), y, weights)
        _, score, precision = averages(likelihood, y, f, posterior.covariance.root(J), fisher)
        return Site(f, J, score, precision, y, weights)

    rows_at_once = network.rows_at_once(budget)
    if most is not None:
        rows_at_once = min(rows_at_once, most)
    rows = Rows(source, lambda _: rows_at_once, compute_site, bytes_of_site, budget // 4)
    # The number of rows and the gradient at θ̂ tell whether these are the rows of the fit.
    row_count, gradient = 0, torch.zeros_like(posterior.theta)
    for site in rows:
        row_count += len(site.f)
        f_at_theta = site.f - site.J.push(posterior.mean - posterior.theta)
        gradient += site.J.pull(likelihood.score(site.y, f_at_theta) * site.row_weights[:, None])
    check_same_data(posterior, row_count, gradient, purpose)
    return Sites(rows, posterior.mean, likelihood)


def bytes_of_site(site: Site) -> int:
    """Return the memory of a site in bytes."""
    return tensor_bytes(site.J) + sum(
        tensor_bytes(part) for part in (site.f, site.score, site.precision, site.y)
    )


def uses_expected_fisher(posterior: Posterior) -> bool:
    """Tell whether a variational Gaussian was fitted with the expected Fisher.

    It was where the structure takes no average that may be indefinite.
    """
    return not posterior.likelihood.concave and posterior.sums.curvature.positive_only


# --- cavities ------------------------------------------------------------------------------


class Cavity(NamedTuple):
    """The outputs at some rows without each row's own site.

    Where a row is not `sound` the values are those with the site.
    """

    marginal: Marginal
    # KL divergence (b,) of the Gaussian of θ without the row from that with it; infinite where not
    # sound
    influence: Tensor
    sound: Tensor  # (b,) bool: I − RᵀΛR is positive definite


def compute_cavity(site: Site, step: Tensor | None, covariance: Operator) -> Cavity:
    """Remove each row's own site from the Gaussian N(mean + step, covariance) of θ.

    step (P,), None for zero. The sites are fixed, so the score there is g − ΛJ step.
    """
    f, g = site.f, site.score
    if step is not None:
        move = site.J.push(step)
        f = f + move
        g = g - (site.precision @ move.unsqueeze(-1)).squeeze(-1)
    # A row that counts more than once is removed once.
    once = site.row_weights.clamp_max(1.0)
    K = covariance.covariance(site.J)
    # A site that is not finite is not removed, and its row is not sound.
    finite = torch.isfinite(g).all(-1) & torch.isfinite(site.precision).all(-1).all(-1)
    precision = torch.where(finite[:, None, None], site.precision * once[:, None, None], 0.0)
    R = covariance_root(K)
    S = R.mT @ precision @ R
    values, vectors = torch.linalg.eigh(torch.eye(S.shape[-1], dtype=S.dtype) - (S + S.mT) / 2)
    sound = finite & (values[:, 0] > LEAST)
    axes = R @ vectors
    values = values.clamp_min(LEAST)
    # the shift along each axis, in standard deviations with the row
    z = (axes.mT @ (g * once[:, None]).unsqueeze(-1)).squeeze(-1) / values
    shift = (axes @ z.unsqueeze(-1)).squeeze(-1)
    influence = 0.5 * (1 / values - 1 + values.log() + z.square()).sum(-1)
    without = (axes / values.unsqueeze(-2)) @ axes.mT
    marginal = Marginal(
        torch.where(sound[:, None], f - shift, f), torch.where(sound[:, None, None], without, K)
    )
    return Cavity(marginal, torch.where(sound, influence, torch.inf), sound)


class Score(NamedTuple):
    """The mean leave-one-out log density by row weight, and the rows without a cavity, which it
    leaves out.
    """

    mean_log_prob: float
    unsound: int


def score_left_out(sites: Sites, mean: Tensor, covariance: Operator) -> Score:
    """Compute the leave-one-out score under another Gaussian N(mean, covariance) of θ.

    The sites are fixed. Tuning by leave-one-out evaluates this.
    """
    total = weight = 0.0
    unsound = 0
    for site in sites:
        without = compute_cavity(site, mean - sites.mean, covariance)
        log_prob = torch.cat(
            [p.log_prob(y) for p, y in predictives_of(sites.likelihood, without.marginal, site.y)]
        )
        weights = site.row_weights * without.sound
        total += float((weights * log_prob).sum())
        weight += float(weights.sum())
        unsound += int((~without.sound).sum())
    return Score(total / weight if weight else float("nan"), unsound)


# --- predictives ---------------------------------------------------------------------------


def predictives_of(
    likelihood: Likelihood, marginal: Marginal, y: Tensor
) -> Iterator[tuple[Predictive, Tensor]]:
    """Yield the predictives of f ~ N(f₋, K₋) with their y (b,) or (b, D), by blocks of rows."""
    for start in range(0, len(y), ROWS_AT_ONCE):
        rows = slice(start, start + ROWS_AT_ONCE)
        with warnings.catch_warnings():  # inaccurate rows are counted
            warnings.simplefilter("ignore", UserWarning)
            predictive = from_marginal(likelihood, marginal.mean[rows], marginal.covariance[rows])
        yield predictive, y[rows]


def rank_targets(predictive: Predictive, y: Tensor) -> tuple[Tensor, Tensor]:
    """Return P(Y < y) and P(Y ≤ y) of each row, of y's shape.

    For classes they are the probability of all more probable ones, without and with y. For angles
    the circle is cut opposite the mean.
    """
    if predictive.kind == "class":
        of_y = predictive.probs.gather(1, y.long()[:, None])
        more_probable = (predictive.probs * (predictive.probs > of_y)).sum(1)
        return more_probable, more_probable + of_y.squeeze(1)
    if predictive.kind == "circular":
        cut = predictive.cdf(wrap_angles(predictive.mean - torch.pi))
        from_cut = (predictive.cdf(wrap_angles(y)) - cut) % 1
        return from_cut, from_cut
    upper = predictive.cdf(y)
    return (predictive.cdf(y - 1) if predictive.kind == "count" else upper), upper
