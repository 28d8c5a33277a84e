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
from ssla.predictive.normals import averaged
from ssla.tables.networks.stacking import shares
from ssla.values import Marginal

FACTORS = 1.5 ** torch.arange(-2, 7, dtype=torch.float64)
DOUBT = 0.3
PSEUDO_ROWS = 10.0
LEAST_SHARE = 2e-3
LEAST_RESIDUAL = 0.5
LARGEST_LOG_VARIANCE = 2 * math.log(10.0)  # noise of at most ten standard deviations of the target


def spread_out(predictive: Predictive, factor: float) -> Predictive:
    """The predictive stretched around its mean."""
    return affine(predictive, (1 - factor) * predictive.law.mean, factor)


def as_trained(module: nn.Module, likelihood: Likelihood, z: Tensor) -> Predictive:
    """The network's own prediction, without uncertainty of its weights."""
    with torch.no_grad():
        f = module(z)
    return from_marginal(likelihood, f, f.new_zeros(*f.shape, f.shape[-1]), "plug_in")


def stretched_log_densities(marginal: Marginal, y: Tensor, disagreement: Tensor) -> Tensor:
    """log p(m + (y − m)/c)/c for all factors (n, K), at y (n,) moved towards m by V (n,); p
    averages over the marginal (n, 2).
    """
    one = torch.ones(1, dtype=torch.float64)
    law = averaged([marginal], one, one, one, y, LARGEST_LOG_VARIANCE).law
    kept = (1 - disagreement / law.variance).clamp(LEAST_RESIDUAL, 1.0).sqrt()
    residual = (y - law.mean) * kept
    return law.log_prob(law.mean[:, None] + residual[:, None] / FACTORS) - FACTORS.log()


def spreads_of(
    log_densities: Tensor, weights: Tensor, trees: Tensor | None = None
) -> tuple[tuple[tuple[float, float], ...], float]:
    """(factor, share) of the factors that held-out rows want; and the share of trees, with log
    densities (n,) there.
    """
    base = torch.exp(-0.5 * (FACTORS.log() / DOUBT) ** 2)
    pseudo = PSEUDO_ROWS * base / base.sum()
    share = 0.0
    if trees is None:
        found = shares(log_densities, weights, pseudo)
    else:
        found = shares(
            torch.cat([log_densities, trees[:, None]], 1),
            weights,
            torch.cat([pseudo, torch.ones_like(pseudo[:1])]),
        )
        share, found = float(found[-1]), found[:-1] / found[:-1].sum()
    kept = found >= LEAST_SHARE
    return tuple(
        zip(FACTORS[kept].tolist(), (found[kept] / found[kept].sum()).tolist(), strict=True)
    ), share
