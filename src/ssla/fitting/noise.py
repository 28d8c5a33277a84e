"""The noise of a Gaussian likelihood, from residuals and degrees of freedom.

The degrees of freedom are those that the fit uses up: γ = tr(S H⁻¹), the number of parameters that
the rows determine. RSS is the residual sum of squares Σ w (y − f)². A group is
the outputs that share one factor on their noise: a single output, or all of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NoReturn

import torch
from torch import Tensor

from ssla.fitting.sums import Sums, factorise_for_uphill_step
from ssla.likelihoods import Gaussian
from ssla.likelihoods.likelihood import multiply_dispersion
from ssla.network import Network
from ssla.priors import BoundPrior
from ssla.values import compute_prior_share, compute_residual_squares

if TYPE_CHECKING:
    from ssla.posterior import Posterior

CollectAtNoise = Callable[[Gaussian, "Tensor | None"], Sums]
"""(likelihood, θ) -> the sums of another pass."""

# Guesses: the fixed point converges linearly, in ten rounds or so.
MOST_ROUNDS = 200
SETTLED = 1e-10  # relative change of the noise at which the rounds end
NO_FREEDOM = 1e-8  # share of the rows: fewer degrees of freedom count as none
NO_RESIDUALS = 1e-8  # share of the noise at the start: a smaller one counts as zero
NO_RAW_RESIDUALS = 1e-10  # the same, of the largest target


@dataclass(frozen=True, eq=False)
class _NoiseProblem:
    """What the next noise follows from. The estimate is the fixed point of `compute_next_noise`.

    There is one noise for each of G groups of outputs.
    """

    sums: Sums
    theta: Tensor  # at which the sums were taken (P,)
    bound: BoundPrior
    polish: bool  # whether the residuals are those at the mode
    unit: Tensor  # the noise to start from (G,)
    groups: Tensor  # the group of each parameter (P,)
    squares: Tensor  # squared residuals, in units of the sums' noise (G,)
    rows: float  # residuals in a group, by weight

    def compute_next_noise(self, noise: Tensor) -> Tensor:
        """Compute the next noise (G,) from the residuals and degrees of freedom at a noise (G,).

        Both noises are in units of the noise at which the sums were taken. Raises ValueError where
        no degrees of freedom are left, or no residuals.
        """
        scaled = self.sums.with_noise_scaled(noise[self.groups])
        precision = self.bound.precision(self.theta)
        operator = factorise_for_uphill_step(scaled.newton_curvature, precision)
        used = torch.zeros_like(self.unit).index_add(
            0, self.groups, 1 - compute_prior_share(operator, precision)
        )
        squares = self.squares
        if self.polish:
            # The mode at this noise is one Newton step δ away. The squares are −2ℓ plus a constant,
            # so they change by δᵀSδ − 2gᵀδ; each parameter's part belongs to its output's group.
            step = operator.solve(scaled.statistics.gradient + self.bound.gradient(self.theta))
            push = self.sums.newton_curvature.push(step)
            change = step * (push - 2 * self.sums.statistics.gradient)
            squares = squares + torch.zeros_like(self.unit).index_add(0, self.groups, change)
        free = self.rows - used
        if bool((free <= NO_FREEDOM * self.rows).any()):
            _refuse_estimate(
                f"{self.rows:g} rows leave no degrees of freedom beside "
                f"{float(used.max()):.4g} fitted parameters"
            )

        new = (squares.clamp_min(0) / free).sqrt()
        if bool((new < NO_RESIDUALS * self.unit).any()):
            _refuse_estimate(
                "the residuals vanish: the free parameters reproduce every target, or the target "
                "is constant"
            )
        return new


def estimate_noise(
    network: Network,
    sums: Sums,
    bound: BoundPrior,
    polish: bool,
    collect_at_noise: CollectAtNoise,
    theta: Tensor | None = None,
) -> tuple[Sums, Gaussian]:
    """Estimate the noise σ_d² = RSS_d / (n − γ_d) of each output d.

    γ_d = tr(S H⁻¹)_d are the degrees of freedom that output d's weights use up. Returns the sums at
    that noise, and the Gaussian likelihood with it. For a last layer (or one output) everything
    follows from the sums at unit noise, by a fixed point. Several outputs with all weights take one
    more pass at the raw residual scale, then a common correction.

    sums: at a noise of one. bound: the prior over θ. polish: whether the residuals are those at the
    mode, not at θ. collect_at_noise: runs the further pass. theta: where the sums were taken (P,);
    None: at the trained weights. Raises ValueError where the rows do not determine the noise.
    """
    outputs = network.outputs
    raw = (sums.squares / sums.statistics.weight).sqrt()
    _check_residuals(raw, sums)
    common = not network.linear and outputs > 1
    start = network.theta if theta is None else theta
    if common:
        # In units of the raw residuals: one group, whose squared residuals are their number.
        sums = collect_at_noise(Gaussian(noise=raw), theta)
        unit = torch.ones(1, dtype=torch.float64)
        groups = torch.zeros(network.layout.size, dtype=torch.long)
        rows = sums.statistics.weight * outputs
        squares = torch.tensor([rows], dtype=torch.float64)
        polish = False
    else:
        unit = raw
        groups = torch.arange(outputs).repeat_interleave(network.layout.size // outputs)
        rows = sums.statistics.weight
        squares = sums.squares

    problem = _NoiseProblem(sums, start, bound, polish, unit, groups, squares, rows)
    noise = _find_fixed_point(problem)

    # A common factor is relative to the raw residuals; otherwise each output has its own noise.
    value = noise if unit.numel() == outputs else noise * raw
    likelihood = Gaussian(noise=float(value) if outputs == 1 else value)
    return sums.with_noise_scaled(noise[groups]), likelihood


def _find_fixed_point(problem: _NoiseProblem) -> Tensor:
    """Return the noise (G,) that `problem.compute_next_noise` leaves unchanged.

    Raises ValueError where the noise does not settle in MOST_ROUNDS rounds, and as that method.
    """
    noise = problem.unit.clone()
    for _ in range(MOST_ROUNDS):
        new = problem.compute_next_noise(noise)
        is_settled = bool(((new - noise).abs() <= SETTLED * noise).all())
        noise = new
        if is_settled:
            break
    else:
        _refuse_estimate("the estimate does not settle")
    return noise


def _check_residuals(raw: Tensor, sums: Sums) -> None:
    """Raise ValueError if the residuals cannot determine a noise.

    This is so for a single row, and where the root mean square residuals `raw` (C,) are zero beside
    the targets of the sums.
    """
    if sums.statistics.n < 2:
        _refuse_estimate("there is only one row")
    if bool((raw <= NO_RAW_RESIDUALS * sums.largest).any()):
        _refuse_estimate(
            "the residuals are zero: the network reproduces the targets exactly, or the target is "
            "constant"
        )


def _refuse_estimate(why: str) -> NoReturn:
    """Raise ValueError, because the noise cannot be estimated.

    why: the reason, as a clause for the message.
    """
    raise ValueError(
        f"The noise cannot be estimated: {why}. Give it as a number, likelihoods.Gaussian(noise=…)."
    )


def scale_noise(posterior: Posterior, factor: float) -> Posterior:
    """Return the posterior at the same θ̂ with `factor` times the noise of its Gaussian likelihood.

    The sums rescale exactly. A posterior with another likelihood is returned unchanged.
    """
    old = posterior.likelihood
    if factor == 1.0 or not old.quadratic:
        return posterior
    statistics = posterior.statistics
    outputs = posterior.network.outputs
    squares = compute_residual_squares(statistics, old, outputs)
    log_likelihood = (
        statistics.log_likelihood
        + 0.5 * squares * (1 - factor**-2)
        - statistics.weight * outputs * math.log(factor)
    )
    return replace(
        posterior,
        likelihood=multiply_dispersion(old, factor),
        statistics=statistics.with_noise_scaled(factor, log_likelihood),
    )
