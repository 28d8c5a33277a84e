"""A Gaussian whose mean and variance are both outputs of the network."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ssla._checks import in_plain_torch, one_of, positive
from ssla.likelihoods.likelihood import (
    LARGEST_EXPONENT,
    LOG_2PI,
    Derivatives,
    Likelihood,
    capped_exp,
    covariance_of,
    event,
    need_outputs,
    residuals_in_words,
)
from ssla.likelihoods.support import Real, Support
from ssla.maths.linalg import stack_last, stack_square
from ssla.maths.quadrature.normal import normal_nodes
from ssla.maths.roots import Root

MEAN_LOG_VARIANCE = "mean_log_variance"
NATURAL = "natural"
PROFILE_STEPS = 3
SAFE_STEPS = 40
SEVERAL_MODES = 0.5


@dataclass(frozen=True)
class HeteroscedasticGaussian(Likelihood):
    """y ~ N(μ, σ²) with two outputs f.

    parameters = "mean_log_variance": f = (μ, s), σ² = eˢ. The observed precision
    Λ = e⁻ˢ [[1, r], [r, r²/2]], r = y − μ, is indefinite for r ≠ 0; the Fisher information is
    diag(e⁻ˢ, ½).

    parameters = "natural": f = (η₁, η₂) = (μ/σ², −1/(2σ²)), η₂ < 0. The log likelihood is concave,
    so the observed precision does not depend on y and equals the Fisher information.

    scale: a factor on σ for all rows. Outputs are then those of σ/scale: s − 2 log scale, or η ·
    scale².
    """

    parameters: str = MEAN_LOG_VARIANCE
    scale: float = 1.0

    @in_plain_torch
    def __post_init__(self) -> None:
        one_of("parameters", self.parameters, (MEAN_LOG_VARIANCE, NATURAL))
        positive("HeteroscedasticGaussian scale", torch.tensor(float(self.scale)))

    def __repr__(self) -> str:
        scale = "" if self.scale == 1 else f", scale={self.scale:.4g}"
        return f"HeteroscedasticGaussian(parameters={self.parameters!r}{scale})"

    def scaled(self, f: Tensor) -> Tensor:
        """The outputs at scale 1, with the same mean."""
        if self.scale == 1:
            return f
        if self.linear_domain:
            return torch.stack([f[..., 0], f[..., 1] + 2 * math.log(self.scale)], -1)
        return f / self.scale**2

    def averages_in_closed_form(
        self, y: Tensor, f: Tensor, root: Root, fisher: bool
    ) -> Derivatives | None:
        """For mean and log variance; None where the exponential is capped.

        With w = E e⁻ˢ the Gaussian of μ, weighted by e⁻ˢ/w, has its mean at m − K_μs and its
        variance as before.
        """
        if not self.linear_domain:
            return None
        K, f = covariance_of(root, f), self.scaled(f)
        exponent = 0.5 * K[:, -1, -1] - f[:, -1]
        if bool((exponent > LARGEST_EXPONENT).any()):
            return None
        w = torch.exp(exponent)
        mean, log_variance = f.unbind(-1)
        r = event(y, f) - mean + K[:, 0, 1]
        first, second = w * r, w * (r * r + K[:, 0, 0])  # E r e⁻ˢ and E r² e⁻ˢ
        log_prob = -0.5 * (LOG_2PI + log_variance + second)
        score = torch.stack([first, 0.5 * (second - 1)], -1)
        none = torch.zeros_like(w)
        entries = (w, none, none, none + 0.5) if fisher else (w, first, first, 0.5 * second)
        return Derivatives(log_prob, score, torch.stack(entries, -1).unflatten(-1, (2, 2)))

    @property
    def closed_form(self) -> bool:
        return self.linear_domain

    @property
    def scored_by_average(self) -> bool:
        return self.linear_domain

    def log_average(self, y: Tensor, f: Tensor, K: Tensor) -> Tensor:
        """log ∫ N(y; μ, eˢ) N((μ, s); f̂, K): closed in μ, Gauss–Hermite in s.

        For mean and log variance.

        Refits in the outputs need many steps where Var s is large, which a search over priors
        meets.
        """
        assert self.linear_domain, "natural parameters have no density for every output"
        nodes, weights = normal_nodes(1)
        centre, level = self.scaled(f).unbind(-1)
        c = K[:, 1, 1].clamp_min(1e-300)
        s = level[:, None] + c.sqrt()[:, None] * nodes[:, 0]  # (n, J)
        slope = (K[:, 0, 1] / c)[:, None]
        mean = centre[:, None] + slope * (s - level[:, None])
        variance = s.exp() + (K[:, 0, 0, None] - slope * K[:, 0, 1, None]).clamp_min(0.0)
        log = -0.5 * (LOG_2PI + variance.log() + (event(y, f)[:, None] - mean) ** 2 / variance)
        return torch.logsumexp(log + weights.log(), 1)

    def dispersed(self, factor: float) -> HeteroscedasticGaussian:
        """With that many times the standard deviation."""
        return replace(self, scale=self.scale * factor)

    def dispersion_in_words(self, factor: float) -> str:
        return residuals_in_words(factor)

    @property
    def support(self) -> Support:
        return Real()

    unequal_units = True
    several_modes = True
    differentiable = True

    @property
    def linear_domain(self) -> bool:
        return self.parameters == MEAN_LOG_VARIANCE

    def support_for(self, outputs: int) -> Support:
        meaning = "mean and log variance" if self.linear_domain else "η₁ = μ/σ² and η₂ = −1/(2σ²)"
        need_outputs("HeteroscedasticGaussian", outputs, 2, meaning)
        return Real()

    def check_outputs(self, f: Tensor) -> None:
        if not self.linear_domain and bool((f[..., 1] >= 0).any()):
            raise ValueError(
                "HeteroscedasticGaussian(parameters='natural') needs a negative second output η₂ "
                f"= −1/(2σ²), but the network gives values up to {float(f[..., 1].max()):.4g}. "
                "Train it to stay below zero, or use parameters='mean_log_variance', which allows "
                "every output."
            )

    def log_prob(self, y: Tensor, f: Tensor) -> Tensor:
        y, f = event(y, f), self.scaled(f)
        a, b = f[..., 0], f[..., 1]
        if self.linear_domain:
            r = y - a
            return -0.5 * (LOG_2PI + b + r * r * capped_exp(-b))
        width = torch.where(b < 0, -2 * b, torch.nan)  # 1/σ²; outside the domain: no density
        r = y - a / width
        value = 0.5 * (width.log() - LOG_2PI - width * r * r)
        return torch.nan_to_num(value, nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf)

    def log_prob_difference(self, y: Tensor, f_new: Tensor, f_old: Tensor) -> Tensor:
        """In (μ, s), with r̃, r̂ the residuals: −½[Δs + e^(−ŝ)(r̃² expm1(−Δs) + (r̃ − r̂)(r̃ +
        r̂))].

        Natural, w = −2η₂ = 1/σ² and m = η₁/w: ½[log1p(Δw/w) − Δw r̃² − w(r̃ − r̂)(r̃ + r̂)], m̃ − m
        = (Δη₁ − mΔw)/w̃.
        """
        y, step = event(y, f_new), f_new - f_old
        d, e = (step if self.linear_domain else self.scaled(step)).unbind(-1)
        f_new, f_old = self.scaled(f_new), self.scaled(f_old)
        if self.linear_domain:
            new, old = y - f_new[..., 0], y - f_old[..., 0]
            close = capped_exp(-f_old[..., 1]) * (
                new * new * torch.expm1(-e.clamp(-1, 1)) - d * (new + old)
            )
            far = new * new * capped_exp(-f_new[..., 1]) - old * old * capped_exp(-f_old[..., 1])
            return -0.5 * (e + torch.where(e.abs() <= 1, close, far))
        w, w_new, dw = -2 * f_old[..., 1], -2 * f_new[..., 1], -2 * e
        m = f_old[..., 0] / w
        dm = (d - m * dw) / w_new
        new, old = y - m - dm, y - m
        value = 0.5 * (torch.log1p(dw / w) - dw * new * new + w * dm * (new + old))
        outside = ~(w_new > 0) | ~torch.isfinite(value)
        return torch.where(outside, torch.full_like(value, -torch.inf), value)

    def score(self, y: Tensor, f: Tensor) -> Tensor:
        if not self.linear_domain:
            return self.derivatives(y, f).score
        r = event(y, f) - f[..., 0]
        rw = r * capped_exp(-self.scaled(f)[..., 1])
        return stack_last([rw, (r * rw).mul_(0.5).sub_(0.5)])

    def precision(self, y: Tensor, f: Tensor) -> Tensor:
        return self.derivatives(y, f).precision

    def derivatives(self, y: Tensor, f: Tensor) -> Derivatives:
        y, (a, b) = event(y, f), self.scaled(f).unbind(-1)
        if not self.linear_domain:
            m, v = -a / (2 * b), -1 / (2 * b)
            score = stack_last([y - m, (y - m) * (y + m) - v]) / self.scale**2
            return Derivatives(self.log_prob(y, f), score, self.fisher(f).expand(*score.shape, 2))
        r = y - a
        w = capped_exp(-b)
        rw = r * w
        half = (r * rw).mul_(0.5)
        return Derivatives(
            (b + LOG_2PI).mul_(-0.5) - half,
            stack_last([rw, half - 0.5]),
            stack_square([[w.expand_as(rw), rw], [rw, half]]),
        )

    def fisher(self, f: Tensor) -> Tensor:
        inside = self.scaled(f)
        if self.linear_domain:
            w = capped_exp(-inside[..., 1])
            zero = torch.zeros_like(w)
            return stack_square([[w, zero], [zero, torch.full_like(w, 0.5)]])
        v, m = -1 / (2 * inside[..., 1]), self.mean(f)
        cross = 2 * m * v
        return stack_square([[v, cross], [cross, 2 * v * v + 4 * m * m * v]]) / self.scale**4

    def mean(self, f: Tensor) -> Tensor:
        return f[..., 0] if self.linear_domain else -f[..., 0] / (2 * f[..., 1])

    def variance(self, f: Tensor) -> Tensor:
        inside = self.scaled(f)[..., 1]
        return capped_exp(inside) if self.linear_domain else -1 / (2 * inside)

    def guess(self, f: Tensor, K: Tensor) -> tuple[Tensor, Tensor]:
        if self.linear_domain:
            return f[..., 0], (self.variance(f) + K[..., 0, 0]).sqrt()
        m, v = self.mean(f), self.variance(f)
        slope = stack_last([v, 2 * m * v]) / self.scale**2  # ∂μ/∂η
        return m, (v + (slope.unsqueeze(-2) @ K @ slope.unsqueeze(-1)).squeeze((-2, -1))).sqrt()

    def scale_of_answers(self, f: Tensor, K: Tensor) -> tuple[Tensor, Tensor]:
        return self.guess(f, K)

    def starts(self, y: Tensor, f: Tensor, R: Tensor) -> list[Tensor]:
        """Profile out the mean: for a given change d of s, log p is quadratic in μ, so one
        dimension is left.

        With Var s = c, β = Cov(μ,s)/c, q = Var(μ|s), ρ = y − μ̂ − βd, E = e^(ŝ+d), t = ρ/(E + q):
            h(d)  = −½(ŝ + d) − ½ρ²/(E + q) − ½d²/c
            c·h'  = c(βt + ½t²E − ½) − d
            −c·h'' = 1 + c((β + tE)²/(E + q) − ½t²E)
        and at the mode K⁻¹(f̃ − f̂) = (t, ½t²E − ½), so v = Rᵀ of that needs no division.

        h can have several maxima where Var s is large or μ and s are strongly correlated (c·Var μ/q
        above ½ or so): those tasks also start from three other points, and the highest maximum is
        taken.
        """
        if not self.linear_domain:
            return []
        # In units of the noise e^(ŝ/2), where ŝ is zero: single precision holds no squares of y in
        # every unit.
        unit = torch.exp(-0.5 * self.scaled(f)[..., 1])
        a, b, low = R[..., 0, 0] * unit, R[..., 1, 0], R[..., 1, 1]
        r, s = (event(y, f) - f[..., 0]) * unit, torch.zeros_like(f[..., 1])
        c = torch.addcmul(b * b, low, low)
        share = a / c.clamp_min(torch.finfo(c.dtype).tiny)
        beta, q = share * b, share * a * (low * low)
        certain = c == 0  # s has no uncertainty
        if bool(certain.any()):
            q = torch.where(certain, a * a, q)
        rough = [part.float() for part in (r, s, c, beta, q)]
        d = _profile_start(*rough)
        for _ in range(PROFILE_STEPS):
            d = _profile_step(d, *rough)
        d = _profile_step(
            d.to(r.dtype), r, s, c, beta, q
        )  # one step in double precision squares the error of single precision
        hard = (c * a * a > SEVERAL_MODES * q) & (c > 0)
        if bool(hard.any()):
            rows = hard.nonzero().squeeze(-1)
            d[rows] = _profile_best(d[rows], *(part[rows] for part in (r, s, c, beta, q)))
        E = capped_exp(s + d)
        t = torch.addcmul(r, beta, d, value=-1) / (E + q)
        u = torch.addcmul(E.new_tensor(-0.5), t * t, E, value=0.5)
        return [stack_last([torch.addcmul(b * u, a, t), low * u])]

    def sample(self, f: Tensor, n: int, generator: torch.Generator | None = None) -> Tensor:
        mean = self.mean(f)
        noise = torch.randn((n, *mean.shape), dtype=f.dtype, device=f.device, generator=generator)
        return mean + self.variance(f).sqrt() * noise


def _profile_start(r: Tensor, s: Tensor, c: Tensor, beta: Tensor, q: Tensor) -> Tensor:
    """For β = 0 and q fixed, d + c/2 = W(½ c z² e^(c/2)); Lambert's W by its logarithmic
    approximation.
    """
    E = capped_exp(s)
    z2 = torch.square(r / (E + q)) * E
    w = torch.log1p(0.5 * c * z2 * capped_exp(0.5 * c))
    return w * (1 - torch.log1p(w) / (2 + w)) - 0.5 * c


def _profile_step(d: Tensor, r: Tensor, s: Tensor, c: Tensor, beta: Tensor, q: Tensor) -> Tensor:
    """One Newton step on h(d); its curvature is at least a tenth of the positive part."""
    E = capped_exp(s + d)
    D = E + q
    t = torch.addcmul(r, beta, d, value=-1).div_(D)
    tE = t * E
    half = (t * tE).mul_(0.5)
    bend = torch.square(tE.add_(beta)).div_(D)
    curve = torch.maximum(bend - half, 0.1 * bend).mul_(c).add_(1)
    rise = torch.addcmul(half.sub_(0.5), beta, t).mul_(c).sub_(d)
    return d + rise.div_(curve)


def _profile(d: Tensor, r: Tensor, s: Tensor, c: Tensor, beta: Tensor, q: Tensor) -> Tensor:
    """h(d), −∞ where it is not a number."""
    rho = torch.addcmul(r, beta, d, value=-1)
    value = -0.5 * (s + d + rho * rho / (capped_exp(s + d) + q) + d * d / c)
    return torch.nan_to_num(value, nan=-torch.inf, posinf=-torch.inf)


def _profile_best(d: Tensor, *rest: Tensor) -> Tensor:
    """The highest maximum of h reached from d and from three other points, by steps that never
    decrease h.

    The points: y as expected (d = −c/2), the noise explains y, the mean explains y.
    """
    r, s, c, beta, q = rest
    noise = (r * r).clamp_min(1e-300).log() - s
    mean = c * beta * r / (beta * beta * c + q).clamp_min(1e-300)
    best, height = d, _profile(d, *rest)
    for start in (d, -0.5 * c, noise, mean):
        here = torch.where(torch.isfinite(start), start, torch.zeros_like(start))
        value = _profile(here, *rest)
        for _ in range(SAFE_STEPS):
            step = _profile_step(here, *rest) - here
            step = torch.where(torch.isfinite(step), step, torch.zeros_like(step)).clamp(-4, 4)
            trial = here + step
            new = _profile(trial, *rest)
            for _ in range(8):
                down = new < value
                if not bool(down.any()):
                    break
                step = torch.where(down, step / 4, step)
                trial = here + step
                new = _profile(trial, *rest)
            up = new >= value
            here, value = torch.where(up, trial, here), torch.where(up, new, value)
            if bool((step.abs() <= 1e-11 * (1 + here.abs())).all()):
                break
        better = value > height
        best, height = torch.where(better, here, best), torch.where(better, value, height)
    return best
