"""Counts: Poisson and negative binomial."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import softplus

from ssla._checks import in_plain_torch, one_of, positive
from ssla.likelihoods.likelihood import (
    CLOSE,
    EXP,
    LARGEST_EXPONENT,
    SOFTPLUS,
    BoundaryRefit,
    Derivatives,
    Likelihood,
    capped_exp,
    common_shape,
    covariance_of,
    event,
    need_outputs,
    softplus_difference,
)
from ssla.likelihoods.support import LARGEST_COUNT, Counts, Support
from ssla.maths.roots import Root

MANY = 1e6  # counts from which log y! is not formed: its rounding is 3e-9 there
SERIES = 1e-2  # of d = log λ/y, up to which e^d − 1 − d is a series: its error is d⁷/5040


@dataclass(frozen=True)
class Poisson(Likelihood):
    """y ~ Poisson(λ), one output: f = log λ (link "log") or f = λ > 0 (link "identity").

    Score and precision:

        log:       g = y − λ,    Λ = λ (= fisher)
        identity:  g = y/λ − 1,  Λ = y/λ², fisher = 1/λ

    With link "identity" an output refit of y = 0 is the integral of e^−λ over λ > 0 (see
    `refit_at_boundary`). The density of other counts is zero at λ = 0, so that their modes are
    inside.
    """

    link: str = "log"

    @in_plain_torch
    def __post_init__(self) -> None:
        one_of("link", self.link, ("log", "identity"))

    @property
    def support(self) -> Support:
        return Counts(LARGEST_COUNT)

    concave = True
    differentiable = True

    @property
    def linear_domain(self) -> bool:
        return self.link == "log"

    @property
    def links(self) -> tuple[str, ...]:
        return (EXP, SOFTPLUS) if self.linear_domain else ()

    @property
    def has_boundary(self) -> bool:
        return not self.linear_domain

    @property
    def overdispersion(self) -> float | None:
        return 0.0 if self.linear_domain else None

    def dispersed(self, factor: float) -> Likelihood:
        """With that many times the variance at a mean of 1, if that is more and the link is the
        logarithm.
        """
        return NegativeBinomial(factor - 1) if factor > 1 and self.linear_domain else self

    def dispersion_in_words(self, factor: float) -> str:
        if factor > CLOSE and self.linear_domain:
            return f"counts vary more than Poisson's: their overdispersion is {factor - 1:.3g}"
        return "counts vary as Poisson's do, or less"

    def support_for(self, outputs: int) -> Support:
        need_outputs("Poisson", outputs, 1, "the log rate" if self.linear_domain else "the rate")
        return Counts(LARGEST_COUNT)

    def check_outputs(self, f: Tensor) -> None:
        if not self.linear_domain and bool((f <= 0).any()):
            raise ValueError(
                "Poisson(link='identity') needs positive outputs (the rate), but the network "
                f"gives {float(f.min()):.4g}. Use link='log', which allows every output, or end "
                "the network in a positive function."
            )

    def log_prob(self, y: Tensor, f: Tensor) -> Tensor:
        y, a = event(y, f).to(f.dtype), f[..., 0]
        if self.linear_domain:
            return torch.where(
                y < MANY, y * a - capped_exp(a) - torch.lgamma(y + 1), _of_many(y, a)
            )
        value = torch.xlogy(y, a.clamp_min(0)) - a - torch.lgamma(y + 1)
        value = torch.where(
            y < MANY, value, _of_many(y, a.clamp_min(torch.finfo(a.dtype).tiny).log())
        )
        return torch.where(a > 0, value, torch.full_like(value, -math.inf))

    def log_prob_difference(self, y: Tensor, f_new: Tensor, f_old: Tensor) -> Tensor:
        """log: yΔ − λ expm1(Δ) with Δ = f̃ − f̂; identity: y log1p(Δ/λ) − Δ."""
        y, a, b = event(y, f_new).to(f_new.dtype), f_new[..., 0], f_old[..., 0]
        d = a - b
        if self.linear_domain:
            rate = torch.where(
                d.abs() <= 1,
                capped_exp(b) * torch.expm1(d.clamp(-1, 1)),
                capped_exp(a) - capped_exp(b),
            )
            return y * d - rate
        part = d / b
        log = torch.where(
            part.abs() <= 0.5, torch.log1p(part.clamp(-0.5, 0.5)), a.clamp_min(0).log() - b.log()
        )
        value = torch.where(y == 0, torch.zeros_like(d), y * log) - d
        return torch.where(a > 0, value, torch.full_like(value, -math.inf))

    def score(self, y: Tensor, f: Tensor) -> Tensor:
        y, a = event(y, f).to(f.dtype), f[..., 0]
        return (y - capped_exp(a) if self.linear_domain else y / a - 1).unsqueeze(-1)

    def precision(self, y: Tensor, f: Tensor) -> Tensor:
        y, a = event(y, f).to(f.dtype), f[..., 0]
        value = capped_exp(a).expand(common_shape(y, a)) if self.linear_domain else y / (a * a)
        return value[..., None, None]

    def fisher(self, f: Tensor) -> Tensor:
        return (capped_exp(f) if self.linear_domain else 1 / f).unsqueeze(-1)

    def refit_at_boundary(self, y: Tensor, f: Tensor, K: Tensor) -> BoundaryRefit | None:
        """y = 0 under a rate λ ~ N(m, s²) that is cut at zero: ∫ e^−λ N(λ; m, s²) dλ over λ > 0.

        log p(0|λ) = −λ has no curvature. Its mode m − s² is moved to zero where it is below. With
        t = s − m/s the integral is exp(−m + s²/2) Φ(−t). Where the mode is at zero (t > 0), the
        same is exp(−½m²/s²)·½ erfcx(t/√2), without cancellation. Both are exact.
        """
        if self.linear_domain:
            return None
        y, m, variance = torch.broadcast_tensors(event(y, f).to(f.dtype), f[..., 0], K[..., 0, 0])
        # A doubt below 1e-6 of the rate has no mass at zero: the floor keeps derivatives finite
        # where K = 0.
        variance_used = torch.maximum(variance, 1e-12 * m.detach() ** 2)
        sd = variance_used.sqrt()
        t = sd - m / sd
        at_zero = t > 0
        shift = -0.5 * torch.where(at_zero, m**2 / variance_used, variance)
        outside = torch.log(0.5 * torch.special.erfcx(t.clamp_min(0) / math.sqrt(2)))
        curvature = torch.where(at_zero, outside, torch.special.log_ndtr(-t.clamp_max(0)))
        log_prob = torch.where(at_zero, 0.0, variance - m)
        pull = torch.where(at_zero, -m / variance_used, -1.0)
        return BoundaryRefit(y == 0, log_prob, shift, curvature, pull.unsqueeze(-1))

    def averages_in_closed_form(
        self, y: Tensor, f: Tensor, root: Root, fisher: bool
    ) -> Derivatives | None:
        """With the rate E e^f = exp(f̂ + ½K) of a log link; None where the exponential is capped."""
        if not self.linear_domain:
            return None
        exponent = 0.5 * covariance_of(root, f)[:, -1, -1] + f[:, -1]
        if bool((exponent > LARGEST_EXPONENT).any()):
            return None
        rate = torch.exp(exponent)
        count, log_rate = event(y, f).to(f.dtype), f[:, 0]
        log_prob = count * log_rate - rate - torch.lgamma(count + 1)
        return Derivatives(log_prob, (count - rate).unsqueeze(-1), rate[:, None, None])

    def mean(self, f: Tensor) -> Tensor:
        return capped_exp(f[..., 0]) if self.linear_domain else f[..., 0]

    def variance(self, f: Tensor) -> Tensor:
        return self.mean(f)

    def sample(self, f: Tensor, n: int, generator: torch.Generator | None = None) -> Tensor:
        rate = self.mean(f)
        return torch.poisson(rate.expand(n, *rate.shape).contiguous(), generator=generator)


def _of_many(y: Tensor, log_rate: Tensor) -> Tensor:
    """log P(y) of a Poisson law for y ≥ MANY: −y(e^d − 1 − d) − ½ log 2πy − 1/12y, with d = log λ −
    log y.

    y log λ − λ − log y! is a difference of numbers of size y log y, which rounding decides from y =
    1e13 on.
    """
    y = y.clamp_min(MANY)
    d = log_rate - y.log()
    near = d.clamp(-SERIES, SERIES)
    series = (
        near * near * (1 / 2 + near * (1 / 6 + near * (1 / 24 + near * (1 / 120 + near / 720))))
    )
    excess = torch.where(d.abs() <= SERIES, series, torch.special.expm1(d.clamp_max(_most(d))) - d)
    return -y * excess - 0.5 * torch.log(2 * math.pi * y) - 1 / (12 * y)


def _most(d: Tensor) -> float:
    """The exponent at which `capped_exp` stops."""
    return math.log(torch.finfo(d.dtype).max) / 4


def _log_gamma_ratio(y: Tensor, r: float) -> Tensor:
    """log Γ(y + r)/Γ(y + 1) for y ≥ MANY, by Stirling's formula with the difference taken first."""
    low = y.clamp_min(MANY) + 1
    high = low + (r - 1)
    return (
        (low - 0.5) * torch.log1p((r - 1) / low)
        + (r - 1) * (high.log() - 1)
        + 1 / (12 * high)
        - 1 / (12 * low)
    )


@dataclass(frozen=True)
class NegativeBinomial(Likelihood):
    """Counts with mean μ = e^f and variance μ + dispersion·μ²; one output, the log mean.

    With r = 1/dispersion, p = μ/(μ + r): g = y(1−p) − rp, Λ = (y + r)p(1−p), fisher = rp.
    dispersion → 0 is Poisson.
    """

    dispersion: float

    @in_plain_torch
    def __post_init__(self) -> None:
        positive(
            "NegativeBinomial dispersion",
            torch.tensor(float(self.dispersion)),
            "For no extra spread use Poisson().",
        )

    def dispersed(self, factor: float) -> NegativeBinomial:
        """With that many times the dispersion."""
        return NegativeBinomial(self.dispersion * factor)

    def dispersion_in_words(self, factor: float) -> str:
        return f"the overdispersion of the counts is {factor:.3g} times that of the likelihood"

    @property
    def support(self) -> Support:
        return Counts(LARGEST_COUNT)

    concave = True
    differentiable = True
    links = (EXP, SOFTPLUS)

    @property
    def overdispersion(self) -> float:
        return self.dispersion

    def support_for(self, outputs: int) -> Support:
        need_outputs("NegativeBinomial", outputs, 1, "the log mean")
        return Counts(LARGEST_COUNT)

    def _logit(self, f: Tensor) -> Tensor:
        """log μ/r."""
        return f[..., 0] + math.log(self.dispersion)

    def log_prob(self, y: Tensor, f: Tensor) -> Tensor:
        y, z, r = event(y, f).to(f.dtype), self._logit(f), 1 / self.dispersion
        few = (
            torch.lgamma(y + r)
            - math.lgamma(r)
            - torch.lgamma(y + 1)
            - r * softplus(z)
            - y * softplus(-z)
        )
        many = _log_gamma_ratio(y, r) - math.lgamma(r) - r * softplus(z) - y * softplus(-z)
        return torch.where(y < MANY, few, many)

    def log_prob_difference(self, y: Tensor, f_new: Tensor, f_old: Tensor) -> Tensor:
        y, z, d = event(y, f_new).to(f_new.dtype), self._logit(f_old), (f_new - f_old)[..., 0]
        return -softplus_difference(z, d) / self.dispersion - y * softplus_difference(-z, -d)

    def score(self, y: Tensor, f: Tensor) -> Tensor:
        y, z = event(y, f).to(f.dtype), self._logit(f)
        return (y * torch.sigmoid(-z) - torch.sigmoid(z) / self.dispersion).unsqueeze(-1)

    def precision(self, y: Tensor, f: Tensor) -> Tensor:
        y, z = event(y, f).to(f.dtype), self._logit(f)
        return ((y + 1 / self.dispersion) * torch.sigmoid(z) * torch.sigmoid(-z))[..., None, None]

    def fisher(self, f: Tensor) -> Tensor:
        return (torch.sigmoid(self._logit(f)) / self.dispersion)[..., None, None]

    def mean(self, f: Tensor) -> Tensor:
        return capped_exp(f[..., 0])

    def variance(self, f: Tensor) -> Tensor:
        mean = self.mean(f)
        return mean + self.dispersion * mean * mean

    def sample(self, f: Tensor, n: int, generator: torch.Generator | None = None) -> Tensor:
        mean = self.mean(f).expand(n, *f.shape[:-1])
        rate = torch._standard_gamma(
            torch.full_like(mean, 1 / self.dispersion), generator=generator
        )
        return torch.poisson(rate * self.dispersion * mean, generator=generator)
