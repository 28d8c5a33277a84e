"""Whether a last layer is trained: this decides between "tilt" and "polish" where no mode is given.

Polish continues where the training was stopped, on the same rows, and can make a trained network
worse. Tilt keeps the weights, also those of a last layer that was never trained. The sums of the
first pass tell the two cases apart, by two differences of log likelihoods:

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

φ are the features of a last layer, S is the curvature Σ JᵀΛJ, and g the gradient of the log
likelihood. A constant prediction has the same outputs in every row. A gain is an increase of the
log likelihood of all rows.
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

SMALLEST_DIVISOR = 1e-300  # takes the place of zero
# The numbers below were not measured: they are guesses.
LOGITS = 3.0  # the standard deviation of outputs under N(0, 1/τ), in their units
SAMPLE = 2048  # rows for the best constant of likelihoods without a closed form
SAMPLE_OF_CHUNK = 256
CONSTANT_STEPS = 20
STRONGER = (1.0, 10.0, 100.0)  # factors on τ for numbers and counts
SHARE = 0.75  # of what the features allow
LEAST_GAIN = 1e-9  # nats a row: a smaller one ends the search for the best constant
SHORTEST = 1e-6  # share of a step of that search
LEAST_SQUARES = 1e-12  # share of the squared residuals that a Newton step leaves at least


@dataclass(frozen=True, eq=False)
class Classes:
    """The classes of the rows, and the size of the features that predict them.

    Those of shards merge.
    """

    counts: Tensor  # the weight of each class (K,)
    squares: float  # Σ w |φ|²

    @staticmethod
    def from_chunk(
        likelihood: Likelihood,
        y: Tensor,
        outputs: int,
        features: Features | None,
        weights: Tensor | None,
    ) -> Classes | None:
        """Return the classes of one chunk with targets y (B,) and row weights (B,); None: all ones.

        outputs: the number of outputs. features: of the chunk; None where the free weights are not
        a last layer. The result is None then, and where the targets are not classes.
        """
        if features is None or likelihood.logit_temperature is None:
            return None
        w = torch.ones(len(y), dtype=torch.float64) if weights is None else weights
        # A Bernoulli likelihood has one output for its two classes.
        counts = torch.bincount(y.flatten().long(), weights=w, minlength=max(outputs, 2))
        return Classes(counts, float(w @ features.phi.double().square().sum(1)))

    def merge(self, other: Classes) -> Classes:
        """Return the classes of both sets of rows."""
        return Classes(self.counts + other.counts, self.squares + other.squares)

    @property
    def log_likelihood(self) -> float:
        """Return the log likelihood of all rows, if every prediction is the class frequencies."""
        return -float(self.counts.sum() * torch.special.entr(self.counts / self.counts.sum()).sum())

    @property
    def precision(self) -> float:
        """Return τ of the module's docstring, the same for all parameters."""
        return self.squares / float(self.counts.sum()) / LOGITS**2


@dataclass(frozen=True, eq=False)
class Numbers:
    """Numbers or counts, and the outputs that predict them. Those of shards merge."""

    weight: float
    squares: float  # Σ w |φ|²
    mean: Tensor  # of y (D,)
    spread: Tensor  # Σ w (y − mean)² (D,)
    y: Tensor  # of some rows (m,) or (m, D)
    f: Tensor  # outputs there (m, C)

    @staticmethod
    def from_chunk(
        likelihood: Likelihood,
        y: Tensor,
        f: Tensor,
        features: Features | None,
        weights: Tensor | None,
    ) -> Numbers | None:
        """Return the numbers of one chunk with targets y, outputs f (B, C) and row weights (B,).

        Weights of None are all ones. features: of the chunk; None where the free weights are not a
        last layer. The result is None then, and where the targets are classes.
        """
        if features is None or likelihood.support_for(f.shape[1]).kind == "class":
            return None
        w = torch.ones(len(y), dtype=torch.float64) if weights is None else weights
        columns = y.reshape(len(y), -1).double()
        total = float(w.sum())
        mean = w @ columns / max(total, SMALLEST_DIVISOR)
        stride = -(-len(y) // SAMPLE_OF_CHUNK)  # rounded up
        squares = float(w @ features.phi.double().square().sum(1))
        return Numbers(total, squares, mean, w @ (columns - mean) ** 2, y[::stride], f[::stride])

    def merge(self, other: Numbers) -> Numbers:
        """Return the numbers of both sets of rows, with a sample of at most SAMPLE rows."""
        weight = self.weight + other.weight
        # Squares around the common mean: those within each set, and those between the two means.
        step = other.mean - self.mean
        share = other.weight / max(weight, SMALLEST_DIVISOR)
        return Numbers(
            weight,
            self.squares + other.squares,
            self.mean + share * step,
            self.spread + other.spread + self.weight * share * step**2,
            torch.cat([self.y, other.y])[:SAMPLE],
            torch.cat([self.f, other.f])[:SAMPLE],
        )

    def compute_precision(self, units: Tensor, size: int) -> Tensor:
        """Return τ (P,) of the module's docstring for a last layer, with P = size parameters.

        units (C,): of the outputs. The parameters must be ordered by outputs.
        """
        by_output = self.squares / max(self.weight, SMALLEST_DIVISOR) / (LOGITS * units) ** 2
        return by_output.repeat_interleave(size // len(units))


class Verdict(NamedTuple):
    """How much log likelihood a last layer has learned, and how much it misses.

    Both are those of the module's docstring, in nats over all rows.
    """

    learned: float
    missing: float

    @property
    def trained(self) -> bool:
        """Return whether the layer has learned enough of what its features allow."""
        return self.learned > 0 and self.learned >= SHARE * (self.learned + self.missing)

    @property
    def mode(self) -> str:
        """Return the mode that suits the layer: tilt if it is trained, polish otherwise."""
        return TILT if self.trained else POLISH

    def make_note(self, baseline: str) -> str:
        """Return the mode and its reason for the report.

        baseline: the prediction that the network is compared with, in words.
        """
        side = "above" if self.learned > 0 else "below"
        learned = (
            f"the network's log likelihood is {abs(self.learned):.3g} {side} that of {baseline}"
        )
        missing = f"a Newton step of the last layer would add {self.missing:.3g} beyond noise"
        trained = "trained" if self.trained else "not trained"
        return (
            f"mode={self.mode!r} was chosen, because the last layer is {trained}: {learned}, and "
            f"{missing}"
        )


def judge_classes(sums: Sums, classes: Classes, likelihood: Likelihood) -> Verdict:
    """Judge the last layer of a classifier from the sums at the trained weights.

    classes: of the same rows. Log likelihoods that are computed without the power of a tempered
    likelihood are multiplied by it.
    """
    power = likelihood.power
    statistics = sums.statistics
    g = statistics.gradient
    learned = statistics.log_likelihood - power * classes.log_likelihood
    precision = torch.full_like(g, power * classes.precision)
    if not classes.precision > 0:  # without features there is nothing to learn
        return Verdict(learned, 0.0)
    determined = _count_determined_parameters(sums, precision)
    gain = 0.5 * float(g @ sums.compute_newton_step(g, precision))
    return Verdict(learned, max(gain - power * determined, 0.0))


def judge_numbers(
    sums: Sums, numbers: Numbers, likelihood: Likelihood, estimated: bool
) -> Verdict | None:
    """Judge a last layer that predicts numbers or counts, from the sums at the trained weights.

    numbers: of the same rows. estimated: whether the noise is to be estimated; the sums are then
    those at a noise of one. The result is None where there is nothing to learn, or no constant to
    compare with.
    """
    if not numbers.squares > 0 or not bool((numbers.spread > 0).all()):
        return None
    if likelihood.quadratic:
        return _judge_gaussian(sums, numbers, estimated)
    return _judge_by_sample(sums, numbers, likelihood)


def _judge_gaussian(sums: Sums, numbers: Numbers, estimated: bool) -> Verdict:
    """Judge a layer by its squared residuals and those of the best constant, the mean of y.

    sums, numbers: as in `judge_numbers`. estimated: whether the noise is to be estimated; network
    and constant then have their own noise.
    """
    n = numbers.weight
    residuals = sums.squares.clamp_min(SMALLEST_DIVISOR)
    size = len(sums.statistics.gradient)
    precision = numbers.compute_precision((numbers.spread / n).sqrt(), size)
    if not estimated:
        noise = sums.reference.expand_as(residuals)
        learned = float(((numbers.spread - residuals) / (2 * noise**2)).sum())
        return Verdict(learned, _compute_gain_beyond_noise(sums, precision, lambda gain: gain))

    noise = (residuals / n).sqrt()
    scaled = sums.with_noise_scaled(noise.repeat_interleave(size // len(noise)))
    count = n * len(noise)  # the squared residuals, in units of the noise
    learned = 0.5 * n * float((numbers.spread / residuals).log().sum())

    def convert_gain(gain: float) -> float:
        """Return the gain in log likelihood if the noise becomes smaller with the residuals.

        gain: the gain at the present noise, which takes 2·gain off the squared residuals.
        """
        return -0.5 * count * math.log(max(1 - 2 * gain / count, LEAST_SQUARES))

    return Verdict(learned, _compute_gain_beyond_noise(scaled, precision, convert_gain))


def _judge_by_sample(sums: Sums, numbers: Numbers, likelihood: Likelihood) -> Verdict | None:
    """Judge a layer by the log densities of a sample of rows, which stands for all of them.

    None where no best constant can be found.
    """
    constant = _find_best_constant(likelihood, numbers.y, numbers.f)
    if constant is None:
        return None
    log_ratios = likelihood.log_prob(numbers.y, numbers.f) - likelihood.log_prob(
        numbers.y, constant.expand_as(numbers.f)
    )
    learned = numbers.weight * float(log_ratios.mean())
    units = 1 / likelihood.fisher(constant[None])[0].diagonal().clamp_min(SMALLEST_DIVISOR).sqrt()
    power = likelihood.power
    precision = numbers.compute_precision(units, len(sums.statistics.gradient))
    missing = power * _compute_gain_beyond_noise(sums, precision, lambda gain: gain / power)
    return Verdict(learned, missing)


def _find_best_constant(likelihood: Likelihood, y: Tensor, f: Tensor) -> Tensor | None:
    """Find the constant outputs (C,) that predict all targets y (m,) best.

    The search takes Fisher scoring steps from the mean of the outputs f (m, C), at most
    CONSTANT_STEPS. None where a step is not defined or a log density is not finite.
    """

    def compute_mean_log_prob(outputs: Tensor) -> float:
        """Return the mean log density of the targets for the same outputs (C,) in every row."""
        return float(likelihood.log_prob(y, outputs.expand_as(f)).mean())

    constant = f.mean(0)
    value = compute_mean_log_prob(constant)
    for _ in range(CONSTANT_STEPS):
        slope = likelihood.score(y, constant.expand_as(f)).mean(0)
        factor, info = torch.linalg.cholesky_ex(likelihood.fisher(constant[None])[0])
        if int(info) or not math.isfinite(value) or not bool(torch.isfinite(slope).all()):
            return None
        step = torch.cholesky_solve(slope[:, None], factor)[:, 0]
        # The step is halved until it raises the mean; `not` also halves it after NaN.
        size = 1.0
        while size > SHORTEST and not compute_mean_log_prob(constant + size * step) >= value:
            size /= 2
        gain = compute_mean_log_prob(constant + size * step) - value
        if not gain > LEAST_GAIN:
            return constant
        constant = constant + size * step
        value = value + gain

    return constant


def _compute_gain_beyond_noise(
    sums: Sums, precision: Tensor, convert_gain: Callable[[float], float]
) -> float:
    """Compute how much log likelihood a Newton step adds beyond noise, at least zero.

    precision: τ (P,). The result is the largest under τ and some stronger priors: with few rows a
    weak prior leaves too many parameters free. convert_gain: maps the gain of the quadratic to the
    gain in log likelihood.
    """
    g = sums.statistics.gradient
    # Kronecker factors take one precision for the layer.
    if sums.statistics.curvature.by_layers:
        precision = torch.full_like(precision, float(precision.log().mean().exp()))
    most = 0.0
    for factor in STRONGER:
        tau = factor * precision
        step = sums.compute_newton_step(g, tau)
        determined = _count_determined_parameters(sums, tau)
        gain = float(g @ step) - 0.5 * float(step @ sums.newton_curvature.push(step))
        most = max(most, convert_gain(gain) - determined)
    return most


def _count_determined_parameters(sums: Sums, precision: Tensor) -> float:
    """Compute tr S(S + τ)⁻¹, the number of parameters that the rows determine.

    precision: τ (P,).
    """
    variances = sums.statistics.curvature.with_prior(precision).variances()
    return float((1 - precision * variances).sum())
