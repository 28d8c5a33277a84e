"""Counts: Poisson and negative binomial.

g, Λ and the Fisher information are those of `ssla.likelihoods.likelihood`. λ is the rate of a
Poisson distribution, μ the mean of a negative binomial one, r the inverse of its dispersion.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import softplus

from ssla._checks import check_name, check_positive, in_plain_torch
from ssla.likelihoods.likelihood import (
    CLOSE,
    EXP,
    LARGEST_EXPONENT,
    SOFTPLUS,
    BoundaryRefit,
    Derivatives,
    Likelihood,
    check_output_count,
    compute_covariance,
    squeeze_scalar_target,
)
from ssla.likelihoods.support import LARGEST_COUNT, Counts, Support
from ssla.maths.elementwise import capped_exp, common_shape, largest_exponent, softplus_difference
from ssla.maths.roots import Root

MANY = 1e6  # from this count on log y! is not formed: its rounding error is 3e-9 there
SERIES = 1e-2  # up to this d = log(λ/y), e^d − 1 − d is a series whose error is d⁷/5040
# `Poisson.refit_at_boundary`: the least variance of f, as a share of f̂²
LEAST_RELATIVE_VARIANCE = 1e-12


@dataclass(frozen=True)
class Poisson(Likelihood):
    """Counts y ~ Poisson(λ) with one output: f = log λ (link "log") or f = λ > 0 (link "identity").

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
        """Check the name of the link; raise ValueError if it is unknown."""
        check_name("link", self.link, ("log", "identity"))

    concave = True
    differentiable = True

    @property
    def linear_domain(self) -> bool:
        """Return whether the link is the logarithm, which allows every output."""
        return self.link == "log"

    @property
    def links(self) -> tuple[str, ...]:
        """Return the exponential and softplus for a log link, and none for the identity."""
        return (EXP, SOFTPLUS) if self.linear_domain else ()

    @property
    def has_boundary(self) -> bool:
        """Return whether the link is the identity: P(y = 0) is positive at λ = 0."""
        return not self.linear_domain

    @property
    def overdispersion(self) -> float | None:
        """Return 0 for a log link, and None for the identity."""
        return 0.0 if self.linear_domain else None

    def multiply_dispersion(self, factor: float) -> Likelihood:
        """Return a likelihood with `factor` times the variance at a mean of 1.

        The result is a NegativeBinomial if the factor exceeds 1 and the link is the logarithm.
        Otherwise it is this likelihood, because no likelihood of counts here has such a variance.
        """
        return NegativeBinomial(factor - 1) if factor > 1 and self.linear_domain else self

    def dispersion_in_words(self, factor: float) -> str:
        """Return a clause for the report: the overdispersion, or that there is none.

        factor: how many times the variance at a mean of 1 the validation rows need. No likelihood
        here has an identity link and an overdispersion; the clause then says so.
        """
        if factor > CLOSE and not self.linear_domain:
            return (
                f"counts vary {factor:.3g} times as much as Poisson's, and no likelihood with "
                "link='identity' does that"
            )
        if factor > CLOSE:
            return f"counts vary more than Poisson's: their overdispersion is {factor - 1:.3g}"
        return "counts vary as Poisson's do, or less"

    def support_for(self, outputs: int) -> Support:
        """Return the counts up to LARGEST_COUNT; raise ValueError unless there is one output."""
        check_output_count(
            "Poisson", outputs, 1, "the log rate" if self.linear_domain else "the rate"
        )
        return Counts(LARGEST_COUNT)

    def check_outputs(self, f: Tensor) -> None:
        """Raise ValueError if a rate f (..., 1) under link "identity" is not positive."""
        if not self.linear_domain and bool((f <= 0).any()):
            raise ValueError(
                "Poisson(link='identity') needs positive outputs (the rate), but the network "
                f"gives {float(f.min()):.4g}. Use link='log', which allows every output, or end "
                "the network in a positive function."
            )

    def log_prob(self, y: Tensor, f: Tensor) -> Tensor:
        """Return y log λ − λ − log y! (...); −∞ where a rate is not positive."""
        y = squeeze_scalar_target(y, f).to(f.dtype)
        output = f[..., 0]
        if self.linear_domain:
            of_small_counts = y * output - capped_exp(output) - torch.lgamma(y + 1)
            return torch.where(y < MANY, of_small_counts, _log_poisson_of_many(y, output))
        of_small_counts = torch.xlogy(y, output.clamp_min(0)) - output - torch.lgamma(y + 1)
        # The clamp keeps log λ, and with it the gradients of `where`, finite outside the domain.
        log_rate = output.clamp_min(torch.finfo(output.dtype).tiny).log()
        inside = torch.where(y < MANY, of_small_counts, _log_poisson_of_many(y, log_rate))
        return torch.where(output > 0, inside, torch.full_like(inside, -math.inf))

    def log_prob_difference(self, y: Tensor, f_new: Tensor, f_old: Tensor) -> Tensor:
        """Return log p(y|f_new) − log p(y|f_old) (...), without cancellation for small changes.

        With Δ = f_new − f_old and λ at f_old it is yΔ − λ expm1(Δ) for a log link, and
        y log1p(Δ/λ) − Δ for the identity. With the identity it is −∞ where the new rate is not
        positive. Large changes (|Δ| > 1, or |Δ| > λ/2) do not cancel and are plain differences.
        """
        y = squeeze_scalar_target(y, f_new).to(f_new.dtype)
        new, old = f_new[..., 0], f_old[..., 0]
        step = new - old
        if self.linear_domain:
            close = capped_exp(old) * torch.expm1(step.clamp(-1, 1))
            far = capped_exp(new) - capped_exp(old)
            return y * step - torch.where(step.abs() <= 1, close, far)
        relative = step / old
        close = torch.log1p(relative.clamp(-0.5, 0.5))
        far = new.clamp_min(0).log() - old.log()
        log_ratio = torch.where(relative.abs() <= 0.5, close, far)
        # For y = 0 the product with an infinite logarithm would be NaN.
        value = torch.where(y == 0, torch.zeros_like(step), y * log_ratio) - step
        return torch.where(new > 0, value, torch.full_like(value, -math.inf))

    def score(self, y: Tensor, f: Tensor) -> Tensor:
        """Return y − λ for a log link, or y/λ − 1 for the identity (..., 1)."""
        y = squeeze_scalar_target(y, f).to(f.dtype)
        output = f[..., 0]
        return (y - capped_exp(output) if self.linear_domain else y / output - 1).unsqueeze(-1)

    def precision(self, y: Tensor, f: Tensor) -> Tensor:
        """Return λ for a log link, or y/λ² for the identity (..., 1, 1)."""
        y = squeeze_scalar_target(y, f).to(f.dtype)
        output = f[..., 0]
        if self.linear_domain:
            value = capped_exp(output).expand(common_shape(y, output))
        else:
            value = y / (output * output)
        return value[..., None, None]

    def fisher(self, f: Tensor) -> Tensor:
        """Return λ for a log link, or 1/λ for the identity (..., 1, 1)."""
        return (capped_exp(f) if self.linear_domain else 1 / f).unsqueeze(-1)

    def refit_at_boundary(self, y: Tensor, f: Tensor, K: Tensor) -> BoundaryRefit | None:
        """Return the refits of y = 0 for an identity link; None for a log link.

        They are ∫ e^−λ N(λ; m, s²) dλ over the rates λ > 0. f (..., 1) holds m and K (..., 1, 1)
        holds s².

        log p(0|λ) = −λ has no curvature, so the mode is m − s², or zero if that is negative. With
        t = s − m/s the integral is exp(−m + s²/2) Φ(−t). Where the mode is at zero (t > 0), the
        same number is exp(−½m²/s²)·½ erfcx(t/√2), which does not cancel. Both are exact.
        """
        if self.linear_domain:
            return None
        y, m, variance = torch.broadcast_tensors(
            squeeze_scalar_target(y, f).to(f.dtype), f[..., 0], K[..., 0, 0]
        )

        # A standard deviation below 1e-6 of the rate has no mass at zero. This floor keeps
        # derivatives finite where K = 0.
        variance_used = torch.maximum(variance, LEAST_RELATIVE_VARIANCE * m.detach() ** 2)
        sd = variance_used.sqrt()
        t = sd - m / sd

        # Each branch of `where` is clamped to its own side of t = 0, so that both have finite
        # gradients.
        at_zero = t > 0
        shift = -0.5 * torch.where(at_zero, m**2 / variance_used, variance)
        log_tail_at_zero = torch.log(0.5 * torch.special.erfcx(t.clamp_min(0) / math.sqrt(2)))
        log_tail_inside = torch.special.log_ndtr(-t.clamp_max(0))
        curvature = torch.where(at_zero, log_tail_at_zero, log_tail_inside)
        log_prob = torch.where(at_zero, 0.0, variance - m)
        pull = torch.where(at_zero, -m / variance_used, -1.0)
        return BoundaryRefit(y == 0, log_prob, shift, curvature, pull.unsqueeze(-1))

    def averages_in_closed_form(
        self, y: Tensor, f: Tensor, root: Root, fisher: bool
    ) -> Derivatives | None:
        """Return E log p (B,), E g (B, 1) and E Λ (B, 1, 1) for a log link and f ~ N(f̂, R Rᵀ).

        y is (B,), f (B, 1) holds f̂, and root is R. All three follow from the average rate E e^f =
        exp(f̂ + ½K). The result is None for the identity link, and if the exponent of any row
        exceeds LARGEST_EXPONENT: the caller then takes a quadrature for all rows. Λ does not depend
        on y, so `fisher` changes nothing.
        """
        if not self.linear_domain:
            return None
        exponent = 0.5 * compute_covariance(root, f)[:, 0, 0] + f[:, 0]
        if bool((exponent > LARGEST_EXPONENT).any()):
            return None
        rate = torch.exp(exponent)
        y = squeeze_scalar_target(y, f).to(f.dtype)
        log_prob = y * f[:, 0] - rate - torch.lgamma(y + 1)
        return Derivatives(log_prob, (y - rate).unsqueeze(-1), rate[:, None, None])

    def mean(self, f: Tensor) -> Tensor:
        """Return the rate λ (...) for f (..., 1)."""
        return capped_exp(f[..., 0]) if self.linear_domain else f[..., 0]

    variance = mean  # a property of Poisson counts

    def sample(self, f: Tensor, n: int, generator: torch.Generator | None = None) -> Tensor:
        """Return n draws of the count (n, ...)."""
        rate = self.mean(f)
        return torch.poisson(rate.expand(n, *rate.shape).contiguous(), generator=generator)


def _log_poisson_of_many(y: Tensor, log_rate: Tensor) -> Tensor:
    """Return log P(y) (...) of a Poisson distribution, for counts y ≥ MANY and log_rate = log λ.

    By Stirling's formula it is −y(e^d − 1 − d) − ½ log(2πy) − 1/(12y), with d = log λ − log y. The
    plain y log λ − λ − log y! is a difference of numbers of size y log y: from y = 1e13 on it is
    only rounding error. For smaller y the result is finite but has no meaning.
    """
    y = y.clamp_min(MANY)
    d = log_rate - y.log()
    # e^d − 1 − d cancels for small d, so there it is its Taylor series.
    near = d.clamp(-SERIES, SERIES)
    series = (
        near * near * (1 / 2 + near * (1 / 6 + near * (1 / 24 + near * (1 / 120 + near / 720))))
    )
    plain = torch.special.expm1(d.clamp_max(largest_exponent(d.dtype))) - d
    excess = torch.where(d.abs() <= SERIES, series, plain)
    return -y * excess - 0.5 * torch.log(2 * math.pi * y) - 1 / (12 * y)


def _log_gamma_ratio(y: Tensor, r: float) -> Tensor:
    """Return log(Γ(y + r)/Γ(y + 1)) (...) for counts y ≥ MANY (...).

    The formula is Stirling's, with the difference taken first, so that large terms do not cancel.
    For smaller y the result is finite but has no meaning.
    """
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
    """Counts with mean μ = e^f and variance μ + dispersion·μ²; the one output f is the log mean.

    With r = 1/dispersion, z = log(μ/r) and p = μ/(μ + r) = σ(z): g = y(1−p) − rp,
    Λ = (y + r)p(1−p), fisher = rp. Poisson is the limit dispersion → 0.
    """

    dispersion: float

    @in_plain_torch
    def __post_init__(self) -> None:
        """Check that the dispersion is positive; raise ValueError if not."""
        check_positive(
            "NegativeBinomial dispersion",
            torch.tensor(float(self.dispersion)),
            "For no extra spread use Poisson().",
        )

    def multiply_dispersion(self, factor: float) -> NegativeBinomial:
        """Return the likelihood with `factor` times the dispersion."""
        return NegativeBinomial(self.dispersion * factor)

    def dispersion_in_words(self, factor: float) -> str:
        """Return a clause for the report that names the factor on the dispersion."""
        return f"the overdispersion of the counts is {factor:.3g} times that of the likelihood"

    concave = True
    differentiable = True
    links = (EXP, SOFTPLUS)

    @property
    def overdispersion(self) -> float:
        """Return the dispersion, which is a in the variance μ + a·μ²."""
        return self.dispersion

    def support_for(self, outputs: int) -> Support:
        """Return the counts up to LARGEST_COUNT; raise ValueError unless there is one output."""
        check_output_count("NegativeBinomial", outputs, 1, "the log mean")
        return Counts(LARGEST_COUNT)

    def _log_mean_over_r(self, f: Tensor) -> Tensor:
        """Return z = log μ/r (...) for f (..., 1), so that p = σ(z)."""
        return f[..., 0] + math.log(self.dispersion)

    def log_prob(self, y: Tensor, f: Tensor) -> Tensor:
        """Return log(Γ(y + r)/(Γ(r) y!)) + r log(1 − p) + y log p (...), with p = σ(z)."""
        y = squeeze_scalar_target(y, f).to(f.dtype)
        z = self._log_mean_over_r(f)
        r = 1 / self.dispersion
        of_small_counts = (
            torch.lgamma(y + r)
            - math.lgamma(r)
            - torch.lgamma(y + 1)
            - r * softplus(z)
            - y * softplus(-z)
        )
        of_large_counts = (
            _log_gamma_ratio(y, r) - math.lgamma(r) - r * softplus(z) - y * softplus(-z)
        )
        return torch.where(y < MANY, of_small_counts, of_large_counts)

    def log_prob_difference(self, y: Tensor, f_new: Tensor, f_old: Tensor) -> Tensor:
        """Return log p(y|f_new) − log p(y|f_old) (...), without cancellation.

        The result is the change of r log(1 − p) + y log p; the other terms do not depend on f.
        """
        y = squeeze_scalar_target(y, f_new).to(f_new.dtype)
        z = self._log_mean_over_r(f_old)
        step = (f_new - f_old)[..., 0]
        change_of_r_term = -softplus_difference(z, step) / self.dispersion
        return change_of_r_term - y * softplus_difference(-z, -step)

    def score(self, y: Tensor, f: Tensor) -> Tensor:
        """Return y(1 − p) − rp (..., 1)."""
        y = squeeze_scalar_target(y, f).to(f.dtype)
        z = self._log_mean_over_r(f)
        return (y * torch.sigmoid(-z) - torch.sigmoid(z) / self.dispersion).unsqueeze(-1)

    def precision(self, y: Tensor, f: Tensor) -> Tensor:
        """Return (y + r)p(1 − p) (..., 1, 1)."""
        y = squeeze_scalar_target(y, f).to(f.dtype)
        z = self._log_mean_over_r(f)
        return ((y + 1 / self.dispersion) * torch.sigmoid(z) * torch.sigmoid(-z))[..., None, None]

    def fisher(self, f: Tensor) -> Tensor:
        """Return rp (..., 1, 1)."""
        return (torch.sigmoid(self._log_mean_over_r(f)) / self.dispersion)[..., None, None]

    def mean(self, f: Tensor) -> Tensor:
        """Return μ = e^f (...)."""
        return capped_exp(f[..., 0])

    def variance(self, f: Tensor) -> Tensor:
        """Return μ + dispersion·μ² (...)."""
        mean = self.mean(f)
        return mean + self.dispersion * mean * mean

    def sample(self, f: Tensor, n: int, generator: torch.Generator | None = None) -> Tensor:
        """Return n draws of the count (n, ...): a Poisson count whose rate is Gamma distributed."""
        mean = self.mean(f).expand(n, *f.shape[:-1])
        rate = torch._standard_gamma(
            torch.full_like(mean, 1 / self.dispersion), generator=generator
        )
        return torch.poisson(rate * self.dispersion * mean, generator=generator)
