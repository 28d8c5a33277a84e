"""Calibrates predictives by held-out rows: their spread, and the trust in the posteriors.

**Spread.** A member's predictive at x, stretched around its mean m by a factor c, has the density
p(m + (y − m)/c)/c. In the mixture

    Σ_k π_k p(m + (y − m)/c_k)/c_k

over a grid of factors, the shares π are those that predict the held-out rows best. Factors above 1
widen predictives that are too narrow, and factors below 1 narrow them. Several factors together
give the heavy tails that a Gaussian lacks.

Each row counts by the member that held it out. The error of that member includes its own deviation
from the other members. The mixture of all members averages this deviation away, and has it in its
spread. So the squared residual is reduced by the share of the members' disagreement V in the
predictive variance, but not below LEAST_RESIDUAL of itself.

**Trust.** For classes, shares are chosen in the same way for the posteriors and for the networks as
they were trained.

The shares start with PSEUDO_ROWS rows, spread like a normal distribution of log c with standard
deviation DOUBT, so that few held-out rows change them little.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from ssla.likelihoods import Likelihood
from ssla.predictive import Predictive, affine, from_marginal
from ssla.predictive.normals import average_normals
from ssla.tables.networks.stacking import fit_model_shares
from ssla.values import Marginal

# These constants are guesses.
FACTORS = 1.5 ** torch.arange(-2, 7, dtype=torch.float64)  # c_k
DOUBT = 0.3  # of log c
PSEUDO_ROWS = 10.0
LEAST_SHARE = 2e-3  # factors with a smaller share are left out
LEAST_RESIDUAL = 0.5  # the part of a squared residual that is left, at least
LARGEST_LOG_VARIANCE = 2 * math.log(10.0)  # noise of at most ten standard deviations of the target


def stretch_predictive(predictive: Predictive, factor: float) -> Predictive:
    """Return a predictive of numbers, stretched around its mean by a positive factor."""
    # m + c (y − m) = (1 − c) m + c y
    return affine(predictive, (1 - factor) * predictive.law.mean, factor)


def predict_as_trained(module: nn.Module, likelihood: Likelihood, z: Tensor) -> Predictive:
    """Return the network's own predictive at z (n, d), without uncertainty of its weights.

    module: the network, with the outputs (n, C) that the likelihood needs.
    """
    with torch.no_grad():
        f = module(z)
    no_covariance = f.new_zeros(*f.shape, f.shape[-1])
    return from_marginal(likelihood, f, no_covariance, "plug_in")


def compute_stretched_log_densities(marginal: Marginal, y: Tensor, disagreement: Tensor) -> Tensor:
    """Return the log of p(m + (y − m)/c)/c for all factors c (n, K), with p averaged over marginal.

    marginal: the Gaussian of mean and log variance, (n, 2), at the n held-out rows, each by its
    member.  y (n,): is first moved towards m, because of the disagreement V (n,) of the members.
    """
    # There is a single marginal with weight 1, and a single factor 1 with share 1.
    single = torch.ones(1, dtype=torch.float64)
    average = average_normals([marginal], single, single, single, y, LARGEST_LOG_VARIANCE).law
    # This is the root of the part of the squared residual that is left.
    shrinkage = (1 - disagreement / average.variance).clamp(LEAST_RESIDUAL, 1.0).sqrt()
    residual = (y - average.mean) * shrinkage
    stretched = average.mean[:, None] + residual[:, None] / FACTORS
    return average.log_prob(stretched) - FACTORS.log()


def choose_spreads(
    log_densities: Tensor, weights: Tensor, trees: Tensor | None = None
) -> tuple[tuple[tuple[float, float], ...], float]:
    """Return (factor, share) of each spread, and the share of the trees, by held-out rows.

    The shares are those that predict the n rows best. Those of the spreads sum to one.

    log_densities (n, K): those of the rows' targets, for all FACTORS.  weights (n,): row weights.
    trees (n,): the log densities by the trees; None: their share is 0.
    """
    # PSEUDO_ROWS rows, spread like a normal distribution of log c.
    base = torch.exp(-0.5 * (FACTORS.log() / DOUBT) ** 2)
    pseudo_rows = PSEUDO_ROWS * base / base.sum()

    tree_share = 0.0
    if trees is None:
        spread_shares = fit_model_shares(log_densities, weights, pseudo_rows)
    else:
        models = torch.cat([log_densities, trees[:, None]], 1)
        one_row = torch.ones_like(pseudo_rows[:1])  # the pseudo row of the trees
        all_shares = fit_model_shares(models, weights, torch.cat([pseudo_rows, one_row]))
        tree_share = float(all_shares[-1])
        spread_shares = all_shares[:-1] / all_shares[:-1].sum()

    # Factors with hardly any share would only make predictions slower.
    kept = spread_shares >= LEAST_SHARE
    kept_shares = spread_shares[kept] / spread_shares[kept].sum()
    spreads = tuple(zip(FACTORS[kept].tolist(), kept_shares.tolist(), strict=True))
    return spreads, tree_share
