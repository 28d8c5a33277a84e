"""What held-out rows say about the spread of the predictives, and about posteriors beside the
networks as they were trained.

**Spread.** A member's predictive at x, stretched around its mean m by a factor c, has the density
p(m + (y − m)/c)/c. The mixture

    Σ_k π_k p(m + (y − m)/c_k)/c_k

over a grid of factors has the shares π that predict the held-out rows best. Factors above 1 correct
members that are too sure, below 1 the opposite, and several at once give the heavy tails that a
Gaussian lacks. Each row counts once, by its member that did not see it. That member errs by its own
deviation from the other members too, which their mixture averages away and adds to its spread; so
its squared residual is reduced by the share of the members' disagreement V in its variance, to half
at least.

**Trust.** For classes the same shares decide between the posteriors and the networks as they were
trained.

Few rows decide little: the shares start with PSEUDO_ROWS rows, spread like a normal distribution of
log c with sd DOUBT.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from ssla.likelihoods import Likelihood
from ssla.predictive import Predictive, affine, from_marginal
from ssla.predictive.normals import average_normals
from ssla.tables.networks.stacking import model_shares
from ssla.values import Marginal

# These constants are guesses.
FACTORS = 1.5 ** torch.arange(-2, 7, dtype=torch.float64)  # c_k
DOUBT = 0.3
PSEUDO_ROWS = 10.0
LEAST_SHARE = 2e-3  # factors with a smaller share are left out
LEAST_RESIDUAL = 0.5  # of a squared residual, after the disagreement is taken away
LARGEST_LOG_VARIANCE = 2 * math.log(10.0)  # noise of at most ten standard deviations of the target


def spread_out(predictive: Predictive, factor: float) -> Predictive:
    """Return the predictive stretched around its mean by a factor."""
    return affine(predictive, (1 - factor) * predictive.law.mean, factor)


def as_trained(module: nn.Module, likelihood: Likelihood, z: Tensor) -> Predictive:
    """Return the network's own predictive at z (n, d), without uncertainty of its weights."""
    with torch.no_grad():
        f = module(z)
    return from_marginal(likelihood, f, f.new_zeros(*f.shape, f.shape[-1]), "plug_in")


def stretched_log_densities(marginal: Marginal, y: Tensor, disagreement: Tensor) -> Tensor:
    """Return log p(m + (y − m)/c)/c for all factors (n, K), where p averages over the marginal.

    marginal: mean and log variance (n, 2) of a member.  y (n,) is first moved towards m, by the
    variance between the members (n,).
    """
    # the average of a single posterior, without spread
    single = torch.ones(1, dtype=torch.float64)
    average = average_normals([marginal], single, single, single, y, LARGEST_LOG_VARIANCE).law
    shrinkage = (1 - disagreement / average.variance).clamp(LEAST_RESIDUAL, 1.0).sqrt()
    residual = (y - average.mean) * shrinkage
    stretched = average.mean[:, None] + residual[:, None] / FACTORS
    return average.log_prob(stretched) - FACTORS.log()


def choose_spreads(
    log_densities: Tensor, weights: Tensor, trees: Tensor | None = None
) -> tuple[tuple[tuple[float, float], ...], float]:
    """Return (factor, share) of the spreads that predict held-out rows best, and the trees' share.

    log_densities (n, K): for all factors.  weights (n,): of the rows.  trees (n,): log densities
    of the trees there; None: their share is 0.
    """
    # PSEUDO_ROWS rows, spread like a normal distribution of log c; one row for the trees.
    base = torch.exp(-0.5 * (FACTORS.log() / DOUBT) ** 2)
    pseudo = PSEUDO_ROWS * base / base.sum()
    tree_share = 0.0
    if trees is None:
        spread_shares = model_shares(log_densities, weights, pseudo)
    else:
        models = torch.cat([log_densities, trees[:, None]], 1)
        all_shares = model_shares(models, weights, torch.cat([pseudo, torch.ones_like(pseudo[:1])]))
        tree_share = float(all_shares[-1])
        spread_shares = all_shares[:-1] / all_shares[:-1].sum()
    # Factors with hardly any share would only make predictions slower.
    kept = spread_shares >= LEAST_SHARE
    kept_shares = spread_shares[kept] / spread_shares[kept].sum()
    spreads = tuple(zip(FACTORS[kept].tolist(), kept_shares.tolist(), strict=True))
    return spreads, tree_share
