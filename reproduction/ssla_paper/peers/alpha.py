"""Black-box α-divergence inference (Hernández-Lobato et al., used by Depeweg et al.): independent
Gaussians over the weights.

With one site for all n rows, q ∝ p₀ fⁿ, so that f = (q/p₀)^(1/n) up to a constant that cancels, the
energy is
    E_α(q) = −(1/α) Σᵢ log E_q[(p(yᵢ|w) (p₀(w)/q(w))^(1/n))^α].
α → 0 is the negative evidence bound; α = 1 is like expectation propagation. At n = 1, α = 1 it is
−log p(y) for every q.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from ssla_paper.peers import GaussianMixture

RATE, LAST_RATE, START_SD = 1e-2, 1e-4, 1e-2
LOG_2PI = math.log(2 * math.pi)


def energy(log_likelihoods: Tensor, log_ratio: Tensor, alpha: float) -> Tensor:
    """E_α from S draws of q: log p(yᵢ|w) (S, n) and log p₀(w) − log q(w) (S,).

    alpha = 0 is the limit.
    """
    draws, n = log_likelihoods.shape
    sites = log_likelihoods + log_ratio[:, None] / n
    if alpha == 0:
        return -sites.mean(0).sum()
    return -(torch.logsumexp(alpha * sites, 0) - math.log(draws)).sum() / alpha


def black_box_alpha(
    x: Tensor,
    y: Tensor,
    new: Tensor,
    *,
    alpha: float = 0.5,
    hidden: Sequence[int] = (50, 50),
    prior_sd: float = 1.0,
    steps: int = 2000,
    particles: int = 8,
    draws: int = 200,
    seed: int = 0,
) -> GaussianMixture:
    """p(y|new) of a tanh network with outputs (μ, log σ²), as a mixture over draws of q; x (n, d),
    y (n,), standardised.

    Weights have the prior N(0, prior_sd²/inputs of the layer), biases N(0, prior_sd²). All rows in
    every step.
    """
    generator = torch.Generator().manual_seed(seed)
    x, y, new = x.float(), y.float().flatten(), new.float()
    widths = (x.shape[1], *hidden, 2)
    shapes = [shape for a, b in pairwise(widths) for shape in ((a, b), (b,))]
    sds = torch.cat(
        [
            torch.full((math.prod(s),), prior_sd / (math.sqrt(s[0]) if len(s) == 2 else 1.0))
            for s in shapes
        ]
    )
    centre = torch.randn(len(sds), generator=generator).requires_grad_(
        True
    )  # in units of the prior's deviations
    log_sd = torch.full((len(sds),), math.log(START_SD)).requires_grad_(True)
    adam = torch.optim.Adam([centre, log_sd], lr=RATE)
    decline = torch.optim.lr_scheduler.LinearLR(adam, 1.0, LAST_RATE / RATE, steps)
    for _ in range(steps):
        noise = torch.randn(particles, len(sds), generator=generator)
        z = centre + log_sd.exp() * noise
        log_ratio = 0.5 * (noise.square() - z.square()).sum(1) + log_sd.sum()
        adam.zero_grad()
        energy(_log_prob(y, _outputs(z * sds, shapes, x)), log_ratio, alpha).backward()
        adam.step()
        decline.step()
    with torch.no_grad():
        z = centre + log_sd.exp() * torch.randn(draws, len(sds), generator=generator)
        f = _outputs(z * sds, shapes, new).double()
    return GaussianMixture(f[..., 0], (0.5 * f[..., 1]).exp())


def _outputs(w: Tensor, shapes: Sequence[tuple[int, ...]], x: Tensor) -> Tensor:
    """f (S, n, 2) of S networks; w (S, P)."""
    parts = w.split([math.prod(shape) for shape in shapes], 1)
    h = x.expand(len(w), *x.shape)
    for i in range(0, len(parts), 2):
        h = torch.baddbmm(parts[i + 1][:, None], h, parts[i].reshape(len(w), *shapes[i]))
        h = torch.tanh(h) if i + 2 < len(parts) else h
    return h


def _log_prob(y: Tensor, f: Tensor) -> Tensor:
    return -0.5 * (LOG_2PI + f[..., 1] + (y - f[..., 0]).square() * torch.exp(-f[..., 1]))
