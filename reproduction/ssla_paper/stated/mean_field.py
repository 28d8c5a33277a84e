"""Independent Gaussians over the weights of the stated network: MFVI and black-box α.

Every weight has the prior N(0, 1). The first epochs have the squared error in place of the negative
log likelihood ("burn-in"); the others have y ~ N(μ(x), c²σ²(x)) with the noise scale c. MFVI is the
evidence bound with its divergence in closed form, summed over all weights. Black-box α has the
energy of `ssla_paper.peers.alpha` instead: its limit α → 0 is the same bound, estimated by draws.

As for the stated networks: Adam, 500 epochs, stopped after 20 without improvement of the NLL of the
validation rows, here by that of the mixture, counted from the end of burn-in.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import softplus

from ssla_paper.networks import EPOCHS, PATIENCE
from ssla_paper.peers import GaussianMixture
from ssla_paper.peers.alpha import energy
from ssla_paper.stated.chains import initial, outputs_of
from ssla_paper.stated.data import Pair
from ssla_paper.stated.network import OUTPUTS

START_RHO = -5.0  # the deviation of a weight is log(1 + e^ρ): 0.007
LOG_2PI = math.log(2 * math.pi)


@dataclass(frozen=True, eq=False)
class Independent:
    """q: centres and deviations of the weights (P,), and how it was found."""

    centre: Tensor
    sd: Tensor
    noise_scale: float
    epochs: int
    loss: float  # the lowest NLL of the validation rows

    def mixture(self, x: Tensor, draws: int, generator: torch.Generator) -> GaussianMixture:
        """The predictive by draws of the weights."""
        noise = torch.randn(draws, len(self.centre), generator=generator)
        return _mixture(self.centre + self.sd * noise, x, self.noise_scale)

    @property
    def divergence(self) -> float:
        return float(divergence(self.centre, self.sd))


def divergence(centre: Tensor, sd: Tensor) -> Tensor:
    """KL(q ‖ N(0, 1)), summed over all weights."""
    return 0.5 * (sd.square() + centre.square() - 1 - 2 * sd.log()).sum()


def independent(
    train: Pair,
    validation: Pair,
    *,
    rate: float,
    batch: int,
    burn_in: int,
    train_draws: int,
    test_draws: int,
    noise_scale: float,
    seed: int,
    alpha: float | None = None,
    epochs: int = EPOCHS,
) -> Independent:
    """Fit q; alpha None: the evidence bound (MFVI). x (n, d), y (n,), standardised.

    test_draws: also of the mixture on the validation rows, with the same noise in every epoch.
    """
    generator = torch.Generator().manual_seed(seed)
    x, y = train[0].float(), train[1].float()
    centre = initial(x.shape[1], OUTPUTS, generator).requires_grad_(True)
    rho = torch.full_like(centre, START_RHO).requires_grad_(True)
    held = torch.randn(test_draws, len(centre), generator=generator)
    adam = torch.optim.Adam([centre, rho], lr=rate)
    best, kept, since, epoch = math.inf, (centre.detach().clone(), softplus(rho).detach()), 0, 0
    for epoch in range(1, epochs + 1):
        for rows in torch.randperm(len(x), generator=generator).split(batch):
            noise = torch.randn(train_draws, len(centre), generator=generator)
            adam.zero_grad()
            f = outputs_of(centre + softplus(rho) * noise, x[rows], OUTPUTS)
            logs = log_likelihoods(f, y[rows], noise_scale, epoch <= burn_in)
            objective(logs, len(x), centre, softplus(rho), noise, alpha).backward()
            adam.step()
        if epoch <= burn_in and epoch < epochs:
            continue
        with torch.no_grad():
            sd = softplus(rho)
            score = _nll(centre + sd * held, validation, noise_scale)
            if score < best:
                best, kept, since = score, (centre.detach().clone(), sd), 0
                continue
        since += 1
        if since >= PATIENCE or math.isnan(score):
            break
    return Independent(*kept, noise_scale, epoch, best)


def log_likelihoods(f: Tensor, y: Tensor, noise_scale: float, is_burning: bool) -> Tensor:
    """log p(yᵢ|w) of draws (S, n), or minus the squared error in burn-in; f (S, n, 2)."""
    squares = (y - f[..., 0]).square()
    if is_burning:
        return -squares
    log_variance = f[..., 1] + 2 * math.log(noise_scale)
    return -0.5 * (LOG_2PI + log_variance + squares * torch.exp(-log_variance))


def objective(
    logs: Tensor, n: int, centre: Tensor, sd: Tensor, noise: Tensor, alpha: float | None
) -> Tensor:
    """What is minimised, by a batch of the n rows: logs (S, rows) of the draws centre + sd·noise.

    Divided by n, which changes no step of Adam but those of its smallest gradients.
    """
    share = logs.shape[1] / n
    if alpha is None:
        return -logs.mean() + divergence(centre, sd) / n
    w = centre + sd * noise
    log_ratio = 0.5 * (noise.square() - w.square()).sum(1) + sd.log().sum()
    return energy(logs, log_ratio * share, alpha) / (share * n)


def _mixture(w: Tensor, x: Tensor, noise_scale: float) -> GaussianMixture:
    with torch.no_grad():
        f = outputs_of(w, x.float(), OUTPUTS).double()
    return GaussianMixture(f[..., 0], noise_scale * (0.5 * f[..., 1]).exp())


def _nll(w: Tensor, rows: Pair, noise_scale: float) -> float:
    """The NLL of the mixture; NaN where a network has no finite answer."""
    try:
        return -float(_mixture(w, rows[0], noise_scale).log_prob(rows[1]).mean())
    except ValueError:
        return math.nan
