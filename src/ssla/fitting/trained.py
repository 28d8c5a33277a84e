"""Whether a last layer is trained: what decides between "tilt" and "polish" where no mode is given.

Polish continues where the training was stopped, on the same rows, and can make a trained network
worse. Tilt keeps it, and would also keep a last layer that was never trained. The sums of the first
pass tell the two apart. In log likelihood:

    learned   the network's, less that of the best constant prediction (for classes: of their
              frequencies)
    missing   what a Newton step of the last layer would add, ½ gᵀ(S + τ)⁻¹g, less what such a step
              loses on new rows by fitting noise: the number of parameters that the rows determine,
              tr S(S + τ)⁻¹ (Akaike)

The layer is trained if it has learned at least three quarters of both together. τ depends on the
features and on the unit of an output, not on the weights: under N(0, 1/τ) the outputs have a
standard deviation of 3 units. Logits have the unit 1, other outputs that of one observation at the
best constant, 1/√Λ. Where the noise is estimated, both log likelihoods are those with the noise
that suits each.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ssla.curvature.jacobians import Features
from ssla.fitting.sums import Sums
from ssla.likelihoods import Likelihood
from ssla.report import POLISH, TILT

LOGITS = 3.0  # the standard deviation of outputs under N(0, 1/τ), in their units
SAMPLE, SAMPLE_OF_CHUNK = (
    2048,
    256,
)  # rows for the best constant of likelihoods without a closed form
CONSTANT_STEPS = 20
STRONGER = (1.0, 10.0, 100.0)  # factors on τ for numbers and counts
SHARE = 0.75  # of what the features allow


@dataclass(frozen=True, eq=False)
class Classes:
    """The classes of the rows, and the size of the features that predict them.

    Those of shards merge.
    """

    counts: Tensor  # the weight of each class (K,)
    squares: float  # Σ w |φ|²

    @staticmethod
    def of(
        likelihood: Likelihood,
        y: Tensor,
        outputs: int,
        features: Features | None,
        weights: Tensor | None,
    ) -> Classes | None:
        """None where the targets are no classes, or the free weights no last layer."""
        if features is None or likelihood.logit_temperature is None:
            return None
        w = torch.ones(len(y), dtype=torch.float64) if weights is None else weights
        found = torch.bincount(y.flatten().long(), weights=w, minlength=max(outputs, 2))
        return Classes(found, float(w @ features.phi.double().square().sum(1)))

    def merge(self, other: Classes) -> Classes:
        return Classes(self.counts + other.counts, self.squares + other.squares)

    @property
    def log_likelihood(self) -> float:
        """Of the class frequencies as a prediction for every row."""
        return -float(self.counts.sum() * torch.special.entr(self.counts / self.counts.sum()).sum())

    @property
    def precision(self) -> float:
        """τ."""
        return self.squares / float(self.counts.sum()) / LOGITS**2


@dataclass(frozen=True, eq=False)
class Numbers:
    """Numbers or counts beside the outputs that predict them. Those of shards merge."""

    weight: float
    squares: float  # Σ w |φ|²
    mean: Tensor  # of y (D,)
    spread: Tensor  # Σ w (y − mean)² (D,)
    y: Tensor  # of some rows (m,) or (m, D)
    f: Tensor  # outputs there (m, C)

    @staticmethod
    def of(
        likelihood: Likelihood,
        y: Tensor,
        f: Tensor,
        features: Features | None,
        weights: Tensor | None,
    ) -> Numbers | None:
        """None where the targets are classes, or the free weights no last layer."""
        if features is None or likelihood.support_for(f.shape[1]).kind == "class":
            return None
        w = torch.ones(len(y), dtype=torch.float64) if weights is None else weights
        columns = y.reshape(len(y), -1).double()
        total = float(w.sum())
        mean = w @ columns / max(total, 1e-300)
        stride = -(-len(y) // SAMPLE_OF_CHUNK)
        squares = float(w @ features.phi.double().square().sum(1))
        return Numbers(total, squares, mean, w @ (columns - mean) ** 2, y[::stride], f[::stride])

    def merge(self, other: Numbers) -> Numbers:
        weight = self.weight + other.weight
        step, share = other.mean - self.mean, other.weight / max(weight, 1e-300)
        return Numbers(
            weight,
            self.squares + other.squares,
            self.mean + share * step,
            self.spread + other.spread + self.weight * share * step**2,
            torch.cat([self.y, other.y])[:SAMPLE],
            torch.cat([self.f, other.f])[:SAMPLE],
        )

    def precision(self, units: Tensor, size: int) -> Tensor:
        """τ for each of `size` parameters of a last layer, from the units of the outputs (C,)."""
        each = self.squares / max(self.weight, 1e-300) / (LOGITS * units) ** 2
        return each.repeat_interleave(size // len(units))


class Verdict(NamedTuple):
    """Log likelihoods that a last layer has learned, and that it misses."""

    learned: float
    missing: float

    @property
    def trained(self) -> bool:
        return self.learned > 0 and self.learned >= SHARE * (self.learned + self.missing)

    @property
    def mode(self) -> str:
        return TILT if self.trained else POLISH

    def note(self, constant: str) -> str:
        """For a report; `constant` says what the network is compared with."""
        if self.learned > 0:
            learned = f"the network's log likelihood is {self.learned:.3g} above that of {constant}"
        else:
            learned = (
                f"the network's log likelihood is {-self.learned:.3g} below that of {constant}"
            )
        missing = f"a Newton step of the last layer would add {self.missing:.3g} beyond noise"
        trained = "trained" if self.trained else "not trained"
        return (
            f"mode={self.mode!r} was chosen, because the last layer is {trained}: {learned}, and "
            f"{missing}"
        )


def judged_numbers(
    sums: Sums, numbers: Numbers, likelihood: Likelihood, estimated: bool
) -> Verdict | None:
    """From the sums at the trained weights; None where there is nothing to learn, or no constant to
    compare with.

    estimated: whether the noise is: the sums are then those at a noise of one.
    """
    if not numbers.squares > 0 or not bool((numbers.spread > 0).all()):
        return None
    return (
        _gaussian(sums, numbers, estimated)
        if likelihood.quadratic
        else _other(sums, numbers, likelihood)
    )


def _gaussian(sums: Sums, numbers: Numbers, estimated: bool) -> Verdict:
    """With squared residuals for log likelihoods; each has its own noise where that is
    estimated.
    """
    n, residuals = numbers.weight, sums.squares.clamp_min(1e-300)
    size = len(sums.statistics.gradient)
    noise = (residuals / n).sqrt() if estimated else sums.reference.expand_as(residuals)
    if estimated:
        sums = sums.at_noise(noise.repeat_interleave(size // len(noise)))
    precision = numbers.precision((numbers.spread / n).sqrt(), size)
    if not estimated:
        learned = float(((numbers.spread - residuals) / (2 * noise**2)).sum())
        return Verdict(learned, _missing(sums, precision, lambda gain: gain))
    count = n * len(noise)  # the squared residuals, in units of the noise
    learned = 0.5 * n * float((numbers.spread / residuals).log().sum())
    return Verdict(
        learned,
        _missing(
            sums, precision, lambda gain: -0.5 * count * math.log(max(1 - 2 * gain / count, 1e-12))
        ),
    )


def _other(sums: Sums, numbers: Numbers, likelihood: Likelihood) -> Verdict | None:
    """With log densities of some rows for all of them."""
    constant = _best_constant(likelihood, numbers.y, numbers.f)
    if constant is None:
        return None
    each = likelihood.log_prob(numbers.y, numbers.f) - likelihood.log_prob(
        numbers.y, constant.expand_as(numbers.f)
    )
    learned = numbers.weight * float(each.mean())
    units = 1 / likelihood.fisher(constant[None])[0].diagonal().clamp_min(1e-300).sqrt()
    power = likelihood.power
    precision = numbers.precision(units, len(sums.statistics.gradient))
    return Verdict(learned, power * _missing(sums, precision, lambda gain: gain / power))


def _best_constant(likelihood: Likelihood, y: Tensor, f: Tensor) -> Tensor | None:
    """The outputs (C,) that predict all rows best, by scoring steps from the mean outputs; None
    where there are none.
    """

    def height(outputs: Tensor) -> float:
        return float(likelihood.log_prob(y, outputs.expand_as(f)).mean())

    here = f.mean(0)
    value = height(here)
    for _ in range(CONSTANT_STEPS):
        slope = likelihood.score(y, here.expand_as(f)).mean(0)
        factor, info = torch.linalg.cholesky_ex(likelihood.fisher(here[None])[0])
        if int(info) or not math.isfinite(value) or not bool(torch.isfinite(slope).all()):
            return None
        step = torch.cholesky_solve(slope[:, None], factor)[:, 0]
        size = 1.0
        while size > 1e-6 and not height(here + size * step) >= value:
            size /= 2
        gain = height(here + size * step) - value
        if not gain > 1e-9:
            return here
        here, value = here + size * step, value + gain
    return here


def _missing(sums: Sums, precision: Tensor, worth: Callable[[float], float]) -> float:
    """What a Newton step adds beyond noise, under τ or a stronger prior: with few rows a weak one
    has too many parameters.

    worth: what a gain of the quadratic is in log likelihood.
    """
    statistics, g = sums.statistics, sums.statistics.gradient
    if statistics.curvature.by_layers:  # it takes one precision
        precision = torch.full_like(precision, float(precision.log().mean().exp()))
    most = 0.0
    for factor in STRONGER:
        tau = factor * precision
        step = sums.newton_step(g, tau)
        determined = float((1 - tau * statistics.curvature.with_prior(tau).variances()).sum())
        gain = float(g @ step) - 0.5 * float(step @ sums.newton_curvature.push(step))
        most = max(most, worth(gain) - determined)
    return most


def judged(sums: Sums, classes: Classes, likelihood: Likelihood) -> Verdict:
    """From the sums at the trained weights."""
    power = likelihood.power
    statistics, g = sums.statistics, sums.statistics.gradient
    learned = statistics.log_likelihood - power * classes.log_likelihood
    precision = torch.full_like(g, power * classes.precision)
    if not classes.precision > 0:  # without features there is nothing to learn
        return Verdict(learned, 0.0)
    determined = float(
        (1 - precision * statistics.curvature.with_prior(precision).variances()).sum()
    )
    gain = 0.5 * float(g @ sums.newton_step(g, precision))
    return Verdict(learned, max(gain - power * determined, 0.0))
