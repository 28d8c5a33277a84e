"""Hamiltonian Monte Carlo of the stated network by leapfrog steps, and what its chains are worth.

Of hamiltorch's settings: τ_in is the precision of the prior, the same for every weight; the mass is
that of every weight; τ_out is the precision of the output. With one output (hamiltorch's loss for
regression) y ~ N(μ(x), 1/τ_out). With two outputs the text does not say where τ_out enters; here
y ~ N(μ(x), σ²(x)/τ_out), so that it is the precision where the network's own log variance is zero.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from ssla_paper.networks import HIDDEN, perceptron
from ssla_paper.peers import GaussianMixture

Gradient = Callable[[Tensor], tuple[float, Tensor]]
"""Weights (P,) -> the potential energy, −log density up to a constant, and its gradient (P,)."""


@dataclass(frozen=True, eq=False)
class Walk:
    """Draws of one chain (S, P), and the share of proposals that were accepted."""

    draws: Tensor
    accepted: float


def walk(
    gradient: Gradient,
    start: Tensor,
    *,
    step: float,
    steps: int,
    mass: float,
    samples: int,
    generator: torch.Generator,
) -> Walk:
    """Draw from exp(−potential): momenta from N(0, mass), `steps` leapfrog steps, and a test of
    acceptance. A proposal whose energy is not finite is rejected.
    """
    w = start.clone()
    energy, slope = gradient(w)
    draws = torch.empty(samples, len(w), dtype=w.dtype)
    accepted = 0
    for i in range(samples):
        p = math.sqrt(mass) * torch.randn(w.shape, generator=generator, dtype=w.dtype)
        before = energy + float(p.square().sum()) / (2 * mass)
        at, new_slope, new_energy = w.clone(), slope, energy
        p.sub_(new_slope, alpha=0.5 * step)
        for j in range(steps):
            at.add_(p, alpha=step / mass)
            new_energy, new_slope = gradient(at)
            p.sub_(new_slope, alpha=step if j + 1 < steps else 0.5 * step)
        change = before - new_energy - float(p.square().sum()) / (2 * mass)
        luck = float(torch.rand((), generator=generator))
        if math.isfinite(change) and (change >= 0 or luck < math.exp(change)):
            w, energy, slope, accepted = at, new_energy, new_slope, accepted + 1
        draws[i] = w
    return Walk(draws, accepted / samples)


def split_weights(w: Tensor, inputs: int, outputs: int) -> list[Tensor]:
    """Return the weights and biases of the layers, in the order of torch, of w (..., P)."""
    widths = (inputs, *HIDDEN, outputs)
    parts: list[Tensor] = []
    place = 0
    for a, b in pairwise(widths):
        weight, bias = w[..., place : place + a * b], w[..., place + a * b : place + a * b + b]
        parts += [weight.reshape(*w.shape[:-1], b, a), bias]
        place += a * b + b
    return parts


def outputs_of(w: Tensor, x: Tensor, outputs: int) -> Tensor:
    """f (S, N, outputs) of S networks with ReLU; w (S, P), x (N, d)."""
    parts = split_weights(w, x.shape[1], outputs)
    h = x.expand(len(w), *x.shape)
    for i in range(0, len(parts), 2):
        h = torch.baddbmm(parts[i + 1][:, None], h, parts[i].mT)
        h = torch.relu(h) if i + 2 < len(parts) else h
    return h


def initial(inputs: int, outputs: int, generator: torch.Generator) -> Tensor:
    """The weights as torch initialises them (P,), which is where every baseline starts."""
    net = perceptron(inputs, outputs, generator)
    return torch.cat([p.detach().flatten() for p in net.parameters()])


def potential(x: Tensor, y: Tensor, tau_in: float, tau_out: float, outputs: int) -> Gradient:
    """Of the network's posterior, in closed form; with autograd a step takes four times as long."""
    inputs = x.shape[1]

    @torch.no_grad()
    def gradient(w: Tensor) -> tuple[float, Tensor]:
        w1, b1, w2, b2, w3, b3 = split_weights(w, inputs, outputs)
        h1 = torch.addmm(b1, x, w1.T).relu_()
        h2 = torch.addmm(b2, h1, w2.T).relu_()
        f = torch.addmm(b3, h2, w3.T)
        r = f[:, 0] - y
        if outputs == 1:
            energy = 0.5 * tau_out * float(r.square().sum())
            d3 = (tau_out * r)[:, None]
        else:
            precision = tau_out * torch.exp(-f[:, 1])
            pulled = r * precision
            squares = r * pulled
            energy = 0.5 * float((squares + f[:, 1]).sum())
            d3 = torch.stack([pulled, 0.5 * (1 - squares)], 1)
        d2 = (d3 @ w3) * (h2 > 0)
        d1 = (d2 @ w2) * (h1 > 0)
        slope = torch.cat(
            [
                part.flatten()
                for part in (d1.T @ x, d1.sum(0), d2.T @ h1, d2.sum(0), d3.T @ h2, d3.sum(0))
            ]
        ).add_(w, alpha=tau_in)
        return energy + 0.5 * tau_in * float(w.square().sum()), slope

    return gradient


def mixture(w: Tensor, x: Tensor, tau_out: float, outputs: int) -> GaussianMixture:
    """The predictive of draws (S, P): one Gaussian each."""
    f = outputs_of(w, x.to(w.dtype), outputs).double()
    scale = tau_out**-0.5
    if outputs == 1:
        return GaussianMixture(f[..., 0], torch.full_like(f[..., 0], scale))
    return GaussianMixture(f[..., 0], scale * (0.5 * f[..., 1]).exp())


def split_r_hat(values: Tensor) -> Tensor:
    """R̂ over the halves of every chain (rows,); values (chains, draws, rows). 1 at convergence."""
    half = values.shape[1] // 2
    parts = torch.cat([values[:, :half], values[:, -half:]]).double()
    within = parts.var(1).mean(0)
    between = parts.mean(1).var(0)
    found: Tensor = ((half - 1) / half + between / within).sqrt()
    return found


def effective(values: Tensor) -> Tensor:
    """How many independent draws are worth as much (rows,); values (chains, draws, rows).

    By the autocorrelations of all chains about their common variance, summed in pairs as long as
    these are positive, and made to fall (Geyer).
    """
    chains, draws, rows = values.shape
    centred = values.double() - values.double().mean(1, keepdim=True)
    spectrum = torch.fft.rfft(centred, 2 * draws, dim=1)
    auto = torch.fft.irfft(spectrum.abs().square(), 2 * draws, dim=1)[:, :draws] / draws
    within = auto[:, 0].mean(0) * draws / (draws - 1)
    total = within * (draws - 1) / draws
    if chains > 1:
        total = total + values.double().mean(1).var(0)
    rho = 1 - (within - auto.mean(0)) / total
    rho[0] = 1.0
    pairs = rho[: draws // 2 * 2].reshape(-1, 2, rows).sum(1)
    is_positive = (pairs > 0).cummin(0).values
    pairs = pairs.cummin(0).values * is_positive
    found: Tensor = (2 * pairs.sum(0) - 1).clamp_min(1 / math.log10(chains * draws))
    return chains * draws / found
