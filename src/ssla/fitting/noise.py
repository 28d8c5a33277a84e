"""The noise of a Gaussian likelihood, from the residuals and the degrees of freedom that the
fit uses up.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ssla.fitting.sums import Sums, climbing
from ssla.likelihoods import Gaussian
from ssla.likelihoods.likelihood import dispersed
from ssla.network import Network
from ssla.priors import BoundPrior
from ssla.values import prior_share, residual_squares

if TYPE_CHECKING:
    from ssla.posterior import Posterior

Again = Callable[[Gaussian, "Tensor | None"], Sums]
"""(likelihood, θ) -> the sums of another pass."""


def estimate_noise(
    network: Network,
    sums: Sums,
    bound: BoundPrior,
    polish: bool,
    again: Again,
    theta: Tensor | None = None,
) -> tuple[Sums, Gaussian]:
    """σ_d² = RSS_d / (n − γ_d), γ_d = tr(S H⁻¹)_d the degrees of freedom that output d's weights
    use up.

    For a last layer (or one output) everything follows from the sums at unit noise, by a fixed
    point. Several outputs with all weights: one more pass at the raw residual scale, then a common
    correction.
    """
    outputs = network.outputs
    raw = (sums.squares / sums.statistics.weight).sqrt()
    _check_residuals(raw, sums)
    if not network.linear and outputs > 1:
        sums = again(Gaussian(noise=raw), theta)
        unit, groups = (
            torch.ones(1, dtype=torch.float64),
            torch.zeros(network.layout.size, dtype=torch.long),
        )
        squares = torch.tensor([sums.statistics.weight * outputs], dtype=torch.float64)
        rows = sums.statistics.weight * outputs
        polish = False
    else:
        unit, squares, rows = raw, sums.squares, sums.statistics.weight
        groups = torch.arange(outputs).repeat_interleave(network.layout.size // outputs)
    noise = unit.clone()
    at = network.theta if theta is None else theta
    for _ in range(200):
        scaled = sums.at_noise(noise[groups])
        precision = bound.precision(at)
        operator = climbing(scaled.newton_curvature, precision)
        used = torch.zeros_like(unit).index_add(0, groups, 1 - prior_share(operator, precision))
        rss = squares
        if polish:
            step = operator.solve(scaled.statistics.gradient + bound.gradient(at))
            unit_gradient = sums.statistics.gradient
            change = step * (sums.newton_curvature.push(step) - 2 * unit_gradient)
            rss = squares + torch.zeros_like(unit).index_add(0, groups, change)
        free = rows - used
        if bool((free <= 1e-8 * rows).any()):
            _refuse(
                f"{rows:g} rows leave no degrees of freedom beside {float(used.max()):.4g} fitted "
                "parameters"
            )
        new = (rss.clamp_min(0) / free).sqrt()
        if bool((new < 1e-8 * unit).any()):
            _refuse(
                "the residuals vanish: the free parameters reproduce every target, or the target "
                "is constant"
            )
        done = bool(((new - noise).abs() <= 1e-10 * noise).all())
        noise = new
        if done:
            break
    else:
        _refuse("the estimate does not settle")
    final = sums.at_noise(noise[groups])
    value = noise if unit.numel() == outputs else noise * raw
    return final, Gaussian(noise=float(value) if outputs == 1 else value)


def _check_residuals(raw: Tensor, sums: Sums) -> None:
    if sums.statistics.n < 2:
        _refuse("there is only one row")
    if bool((raw <= 1e-10 * sums.largest).any()):
        _refuse(
            "the residuals are zero: the network reproduces the targets exactly, or the target is "
            "constant"
        )


def _refuse(why: str) -> None:
    raise ValueError(
        f"The noise cannot be estimated: {why}. Give it as a number, likelihoods.Gaussian(noise=…)."
    )


def at_noise(posterior: Posterior, factor: float) -> Posterior:
    """The same θ̂ with `factor` times the noise: the sums rescale, exactly."""
    old = posterior.likelihood
    if factor == 1.0 or not old.quadratic:
        return posterior
    stats, outputs = posterior.statistics, posterior.network.outputs
    squares = residual_squares(stats, old, outputs)
    new = dispersed(old, factor)
    log_likelihood = (
        stats.log_likelihood
        + 0.5 * squares * (1 - factor**-2)
        - stats.weight * outputs * math.log(factor)
    )
    return replace(posterior, likelihood=new, statistics=stats.at_noise(factor, log_likelihood))
