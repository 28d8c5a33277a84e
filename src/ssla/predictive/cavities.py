"""Cavities: what each training row contributes to the Gaussian of θ, and the outputs without it.

Row i contributes a site to the Gaussian of θ: its score g and its precision Λ, averaged over the
Gaussian (variational), or at the mode with the Fisher for Λ (Laplace). The outputs at x_i without
the site have the cavity

    K₋ = (K⁻¹ − Λ)⁻¹ = R (I − RᵀΛR)⁻¹ Rᵀ        f₋ = f − K₋ g        K = J S Jᵀ = R Rᵀ

and y_i is predicted from N(f₋, K₋). This is exact for a linear model with Gaussian noise. For other
likelihoods the sites of the other rows are kept as they are, which is too optimistic for
influential rows: those whose site moves the Gaussian far, in KL divergence. Prior, noise and
features are kept, and so is the tilt of a θ̂ that is not a mode.

`collect_sites` computes the sites, in one pass. `score_left_out` evaluates them under another
Gaussian, with the sites fixed.

J is the Jacobian of the outputs at x_i, and S the covariance of θ. A row is sound if it has a
cavity: I − RᵀΛR is positive definite.
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
from ssla.curvature.memory import count_tensor_bytes
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
# The least eigenvalue of I − RᵀΛR of a sound row. An eigenvalue is the variance with the row, as a
# share of the variance without it.
LEAST = 1e-6
SITES_SHARE = 4  # parts of the memory budget that kept sites take at most; a guess
ROWS_AT_ONCE = 1024  # predictives that are held together


# --- sites ---------------------------------------------------------------------------------


class Site(NamedTuple):
    """The contributions of b training rows to the Gaussian of θ, in float64.

    Score and precision are those of a row of weight one.
    """

    f: Tensor  # outputs at the Gaussian's mean (b, C)
    J: Jacobian
    score: Tensor  # g (b, C)
    precision: Tensor  # Λ (b, C, C)
    y: Tensor  # (b,) or (b, D)
    weights: Tensor | None  # of the rows (b,); None: all one

    @property
    def row_weights(self) -> Tensor:
        """Return the weights of the rows (b,): ones if none were given."""
        if self.weights is None:
            return torch.ones(len(self.f), dtype=torch.float64)
        return self.weights


@dataclass(frozen=True, eq=False)
class Sites:
    """The sites of all training rows, in chunks.

    The sites are kept in memory if they fit a share of the budget, and computed again in each
    iteration otherwise.
    """

    rows: Rows[Site]
    mean: Tensor  # the mean of θ (P,) at which the outputs of the sites are
    likelihood: Likelihood

    def __iter__(self) -> Iterator[Site]:
        """Iterate over the chunks, each of which is one Site."""
        return iter(self.rows)


def collect_sites(
    posterior: Posterior, data: Any = None, purpose: DataPurpose = PURPOSE, most: int | None = None
) -> Sites:
    """Compute the sites of the training rows in one pass.

    data: the training rows; None: those that the posterior keeps. purpose: names the caller in
    error messages. most: the largest number of rows in a chunk; None: what the budget allows.
    Raises ValueError unless the rows are those of the fit, by their number and the gradient.
    """
    source = open_training_data(posterior, data, purpose)
    network = posterior.network
    likelihood = posterior.likelihood
    budget = posterior.memory_budget
    support = likelihood.support_for(network.outputs)
    fisher = uses_expected_fisher(posterior)

    def compute_site(chunk: Batch) -> Site:
        """Linearise a chunk of rows, and compute their score and precision.

        Score and precision are averages over a variational Gaussian, or at the mode of a Laplace
        one.
        """
        _, y, weights = check_batch(chunk, support, network.outputs)
        ((f, J),) = posterior.linearised(chunk.x)  # the rows are one chunk of the network, too
        f, J = f.double(), J.double()
        if posterior.variational is None:
            return Site(f, J, likelihood.score(y, f), likelihood.fisher(f), y, weights)
        _, score, precision = averages(likelihood, y, f, posterior.covariance.root(J), fisher)
        return Site(f, J, score, precision, y, weights)

    rows_at_once = network.rows_at_once(budget)
    if most is not None:
        rows_at_once = min(rows_at_once, most)
    rows = Rows(
        source, lambda _: rows_at_once, compute_site, count_site_bytes, budget // SITES_SHARE
    )

    # The number of rows and the gradient at θ̂ tell whether these are the rows of the fit. The
    # outputs of a site are at the Gaussian's mean, so they are moved to θ̂ first.
    row_count = 0
    gradient = torch.zeros_like(posterior.theta)
    for site in rows:
        row_count += len(site.f)
        f_at_theta = site.f - site.J.push(posterior.mean - posterior.theta)
        gradient += site.J.pull(likelihood.score(site.y, f_at_theta) * site.row_weights[:, None])

    check_same_data(posterior, row_count, gradient, purpose)
    return Sites(rows, posterior.mean, likelihood)


def count_site_bytes(site: Site) -> int:
    """Return the memory of a site in bytes, without its row weights."""
    return count_tensor_bytes(site.J) + sum(
        count_tensor_bytes(tensor) for tensor in (site.f, site.score, site.precision, site.y)
    )


def uses_expected_fisher(posterior: Posterior) -> bool:
    """Tell whether a variational Gaussian of this posterior averages the Fisher in place of Λ.

    This is so where averages of Λ may be indefinite and the curvature structure cannot hold them.
    """
    return not posterior.likelihood.concave and posterior.sums.curvature.positive_only


# --- cavities ------------------------------------------------------------------------------


class Cavity(NamedTuple):
    """The outputs at b rows, each without the row's own site.

    A row that is not `sound` has no cavity: its outputs are those with the site.
    """

    marginal: Marginal  # f₋ (b, C) and K₋ (b, C, C)
    # KL divergence (b,) of the Gaussian of θ without the row from that with it; infinite where not
    # sound
    influence: Tensor
    sound: Tensor  # (b,) bool: I − RᵀΛR is positive definite


def compute_cavity(site: Site, step: Tensor | None, covariance: Operator) -> Cavity:
    """Compute the outputs at each row of a site without the row's own contribution.

    The Gaussian of θ is N(m + step, covariance), with m the mean at which the sites were computed
    and step (P,), None for zero. The sites are fixed, so that the score there is g − ΛJ step.
    """
    f = site.f
    g = site.score
    if step is not None:
        move = site.J.push(step)
        f = f + move
        g = g - (site.precision @ move.unsqueeze(-1)).squeeze(-1)

    # A row of weight w stands for w equal rows, of which one is removed (all of it if w < 1).
    once = site.row_weights.clamp_max(1.0)
    K = covariance.covariance(site.J)

    # A site that is not finite is not removed, and its row is not sound.
    finite = torch.isfinite(g).all(-1) & torch.isfinite(site.precision).all(-1).all(-1)
    precision = torch.where(finite[:, None, None], site.precision * once[:, None, None], 0.0)

    # I − RᵀΛR in its eigenvectors: it is positive definite where the row can be removed.
    R = covariance_root(K)
    removed = R.mT @ precision @ R  # RᵀΛR
    identity = torch.eye(removed.shape[-1], dtype=removed.dtype)
    values, vectors = torch.linalg.eigh(identity - (removed + removed.mT) / 2)
    sound = finite & (values[:, 0] > LEAST)
    axes = R @ vectors
    values = values.clamp_min(LEAST)

    # The shift along each axis, in standard deviations with the row.
    z = (axes.mT @ (g * once[:, None]).unsqueeze(-1)).squeeze(-1) / values
    shift = (axes @ z.unsqueeze(-1)).squeeze(-1)

    # KL divergence of the Gaussian without the row from that with it, summed over the axes.
    influence = 0.5 * (1 / values - 1 + values.log() + z.square()).sum(-1)
    without = (axes / values.unsqueeze(-2)) @ axes.mT
    marginal = Marginal(
        torch.where(sound[:, None], f - shift, f), torch.where(sound[:, None, None], without, K)
    )
    return Cavity(marginal, torch.where(sound, influence, torch.inf), sound)


class Score(NamedTuple):
    """A leave-one-out score."""

    mean_log_prob: float  # of the rows with a cavity, by row weight; NaN if there are none
    unsound: int  # number of rows without a cavity


def score_left_out(sites: Sites, mean: Tensor, covariance: Operator) -> Score:
    """Compute the mean leave-one-out log density under another Gaussian N(mean, covariance) of θ.

    mean (P,). The sites are fixed. Tuning by leave-one-out maximises this score. Rows without a
    cavity are left out.
    """
    total = weight = 0.0
    unsound = 0
    for site in sites:
        without = compute_cavity(site, mean - sites.mean, covariance)
        log_prob = torch.cat(
            [
                p.log_prob(y)
                for p, y in iterate_predictives(sites.likelihood, without.marginal, site.y)
            ]
        )
        weights = site.row_weights * without.sound
        total += float((weights * log_prob).sum())
        weight += float(weights.sum())
        unsound += int((~without.sound).sum())
    return Score(total / weight if weight else float("nan"), unsound)


# --- predictives ---------------------------------------------------------------------------


def iterate_predictives(
    likelihood: Likelihood, marginal: Marginal, y: Tensor
) -> Iterator[tuple[Predictive, Tensor]]:
    """Yield predictives of f ~ N(f₋, K₋) with the y of their rows, for blocks of rows.

    likelihood: of y. marginal: f₋ (n, C) and K₋ (n, C, C). y (n,) or (n, D). Warnings of inaccurate
    rows are not shown, because the caller counts these rows.
    """
    for start in range(0, len(y), ROWS_AT_ONCE):
        rows = slice(start, start + ROWS_AT_ONCE)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            predictive = from_marginal(likelihood, marginal.mean[rows], marginal.covariance[rows])
        yield predictive, y[rows]


def rank_targets(predictive: Predictive, y: Tensor) -> tuple[Tensor, Tensor]:
    """Return P(Y < y) and P(Y ≤ y) under the predictive, both of the shape of y, (b,) or (b, D).

    Classes are ordered from the most to the least probable: the results are the probability of all
    classes more probable than y, without y and with it. For angles the circle is cut opposite the
    mean. For numbers both are the same.
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
