"""A Gaussian whose mean and variance are both outputs of the network.

μ and σ² are mean and variance of y, s = log σ² the log variance, r = y − μ the residual, and
w = 1/σ². m and v are other names of μ and σ² in formulas for natural parameters. A hat marks values
at f̂ or at the old outputs, a tilde those at the new ones. g and Λ are those of
`ssla.likelihoods.likelihood`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from ssla._checks import check_name, check_positive, in_plain_torch
from ssla.likelihoods.likelihood import (
    LARGEST_EXPONENT,
    LOG_2PI,
    Derivatives,
    Likelihood,
    check_output_count,
    compute_covariance,
    describe_residuals,
    squeeze_scalar_target,
)
from ssla.likelihoods.support import Real, Support
from ssla.maths.elementwise import capped_exp
from ssla.maths.linalg import stack_last, stack_square
from ssla.maths.quadrature.normal import normal_nodes
from ssla.maths.roots import Root

MEAN_LOG_VARIANCE = "mean_log_variance"
NATURAL = "natural"
SMALLEST_DIVISOR = 1e-300  # takes the place of zero
# Constants of `starting_points` and `_Profile`. All are guesses, not measured. A task is one output
# refit, of one y at one input. A hard task may have several modes.
PROFILE_STEPS = 3  # Newton steps of every task
SAFE_STEPS = 40  # most Newton steps of a hard task
SHORTER_STEPS = 8  # most times that such a step is shortened
SEVERAL_MODES = 0.5  # c·Var μ/q beyond which a task is hard
LONGEST_STEP = 4.0  # in a log variance
LEAST_CURVATURE = 0.1  # of h, as a share of its positive part
SHORTER = 4  # a step that decreases h is divided by it
SMALLEST_STEP = 1e-11  # in a log variance of size one: smaller steps are rounding errors


@dataclass(frozen=True)
class HeteroscedasticGaussian(Likelihood):
    """A Gaussian y ~ N(μ, σ²), whose mean and variance follow from two outputs f.

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
        """Check the parameters' name and the scale; raise ValueError if one is invalid."""
        check_name("parameters", self.parameters, (MEAN_LOG_VARIANCE, NATURAL))
        check_positive("HeteroscedasticGaussian scale", torch.tensor(float(self.scale)))

    def __repr__(self) -> str:
        """Return the constructor call, with the scale if it is not 1."""
        scale = "" if self.scale == 1 else f", scale={self.scale:.4g}"
        return f"HeteroscedasticGaussian(parameters={self.parameters!r}{scale})"

    def _convert_to_unit_scale(self, f: Tensor) -> Tensor:
        """Return the outputs (..., 2) that at scale 1 give the distribution of y of f (..., 2)."""
        if self.scale == 1:
            return f
        if self.linear_domain:
            return torch.stack([f[..., 0], f[..., 1] + 2 * math.log(self.scale)], -1)
        return f / self.scale**2

    def averages_in_closed_form(
        self, y: Tensor, f: Tensor, root: Root, fisher: bool
    ) -> Derivatives | None:
        """Return E log p (B,), E g (B, 2) and E Λ (B, 2, 2) for f ~ N(f̂, R Rᵀ).

        y is (B,), f (B, 2) holds f̂, and root is R. If `fisher` is true, the Fisher information
        diag(E e⁻ˢ, ½) takes the place of E Λ. The result is None for natural parameters, and if the
        exponent of any row exceeds LARGEST_EXPONENT. With w = E e⁻ˢ, the Gaussian of μ weighted by
        e⁻ˢ/w has the mean m − K_μs and an unchanged variance.
        """
        if not self.linear_domain:
            return None
        K = compute_covariance(root, f)
        f = self._convert_to_unit_scale(f)
        exponent = 0.5 * K[:, -1, -1] - f[:, -1]
        if bool((exponent > LARGEST_EXPONENT).any()):
            return None
        w = torch.exp(exponent)
        mean, log_variance = f.unbind(-1)
        r = squeeze_scalar_target(y, f) - mean + K[:, 0, 1]
        average_rw = w * r  # E r e⁻ˢ
        average_r2w = w * (r * r + K[:, 0, 0])  # E r² e⁻ˢ
        log_prob = -0.5 * (LOG_2PI + log_variance + average_r2w)
        score = torch.stack([average_rw, 0.5 * (average_r2w - 1)], -1)

        if fisher:
            zero = torch.zeros_like(w)
            entries = [w, zero, zero, zero + 0.5]
        else:
            entries = [w, average_rw, average_rw, 0.5 * average_r2w]
        return Derivatives(log_prob, score, torch.stack(entries, -1).unflatten(-1, (2, 2)))

    @property
    def has_log_average(self) -> bool:
        """Return whether `log_average` has a formula: for mean and log variance only."""
        return self.linear_domain

    @property
    def scored_by_average(self) -> bool:
        """Return whether a search over priors scores rows by `log_average`.

        This is so for mean and log variance: their refits in the outputs need many steps where Var
        s is large, and a search over priors tries such priors.
        """
        return self.linear_domain

    def log_average(self, y: Tensor, f: Tensor, K: Tensor) -> Tensor:
        """Return log ∫ N(y; μ, eˢ) N((μ, s); f̂, K) dμ ds (B,), for f̂ (B, 2) and K (B, 2, 2).

        The integral over μ is in closed form, that over s by Gauss–Hermite. Raises AssertionError
        for natural parameters.
        """
        assert self.linear_domain, "natural parameters have no density for every output"
        nodes, weights = normal_nodes(1)
        mean_centre, s_centre = self._convert_to_unit_scale(f).unbind(-1)
        # Var s, by which is divided below, also without uncertainty.
        c = K[:, 1, 1].clamp_min(SMALLEST_DIVISOR)
        s = s_centre[:, None] + c.sqrt()[:, None] * nodes[:, 0]  # (B, J)
        # Given s, μ is Gaussian: its mean is linear in s, and its variance adds to the noise.
        slope = (K[:, 0, 1] / c)[:, None]
        mean = mean_centre[:, None] + slope * (s - s_centre[:, None])
        variance = s.exp() + (K[:, 0, 0, None] - slope * K[:, 0, 1, None]).clamp_min(0.0)
        log_prob = -0.5 * (
            LOG_2PI + variance.log() + (squeeze_scalar_target(y, f)[:, None] - mean) ** 2 / variance
        )
        return torch.logsumexp(log_prob + weights.log(), 1)

    def multiply_dispersion(self, factor: float) -> HeteroscedasticGaussian:
        """Return the likelihood with `factor` times the standard deviation."""
        return replace(self, scale=self.scale * factor)

    dispersion_in_words = staticmethod(describe_residuals)

    unequal_units = True
    several_modes = True
    differentiable = True

    @property
    def linear_domain(self) -> bool:
        """Return whether the parameters are mean and log variance, which allow every output."""
        return self.parameters == MEAN_LOG_VARIANCE

    def support_for(self, outputs: int) -> Support:
        """Return the real line; raise ValueError unless there are two outputs."""
        meaning = "mean and log variance" if self.linear_domain else "η₁ = μ/σ² and η₂ = −1/(2σ²)"
        check_output_count("HeteroscedasticGaussian", outputs, 2, meaning)
        return Real()

    def check_outputs(self, f: Tensor) -> None:
        """Raise ValueError if a natural parameter η₂ is not negative."""
        if not self.linear_domain and bool((f[..., 1] >= 0).any()):
            raise ValueError(
                "HeteroscedasticGaussian(parameters='natural') needs a negative second output η₂ "
                f"= −1/(2σ²), but the network gives values up to {float(f[..., 1].max()):.4g}. "
                "Train it to stay below zero, or use parameters='mean_log_variance', which allows "
                "every output."
            )

    def log_prob(self, y: Tensor, f: Tensor) -> Tensor:
        """Return log N(y; μ, σ²) (...); −∞ outside the domain."""
        y = squeeze_scalar_target(y, f)
        first, second = self._convert_to_unit_scale(f).unbind(-1)
        if self.linear_domain:
            r = y - first
            return -0.5 * (LOG_2PI + second + r * r * capped_exp(-second))
        # 1/σ²; NaN outside the domain becomes a density of zero.
        w = torch.where(second < 0, -2 * second, torch.nan)
        r = y - first / w
        value = 0.5 * (w.log() - LOG_2PI - w * r * r)
        return torch.nan_to_num(value, nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf)

    def log_prob_difference(self, y: Tensor, f_new: Tensor, f_old: Tensor) -> Tensor:
        """Return log p(y|f_new) − log p(y|f_old) (...), without cancellation for small changes."""
        y = squeeze_scalar_target(y, f_new)
        if self.linear_domain:
            return self._compute_difference_of_log_variance(y, f_new, f_old)
        return self._compute_difference_of_natural(y, f_new, f_old)

    def _compute_difference_of_log_variance(
        self, y: Tensor, f_new: Tensor, f_old: Tensor
    ) -> Tensor:
        """Return `log_prob_difference` (...) for mean and log variance.

        y is (...), f_new and f_old are (..., 2). The difference is

            −½ [Δs + e^(−ŝ) (r̃² expm1(−Δs) + (r̃ − r̂)(r̃ + r̂))],

        with the residuals r̃ at f_new and r̂ at f_old. Where |Δs| > 1 it is computed by plain
        subtraction, which does not cancel there.
        """
        # The step is that of the given outputs: the scale would only add rounding errors.
        mean_step, s_step = (f_new - f_old).unbind(-1)
        f_new, f_old = self._convert_to_unit_scale(f_new), self._convert_to_unit_scale(f_old)
        r_new = y - f_new[..., 0]
        r_old = y - f_old[..., 0]
        w_new = capped_exp(-f_new[..., 1])
        w_old = capped_exp(-f_old[..., 1])
        expm1 = torch.expm1(-s_step.clamp(-1, 1))
        close = w_old * (r_new * r_new * expm1 - mean_step * (r_new + r_old))
        far = r_new * r_new * w_new - r_old * r_old * w_old
        return -0.5 * (s_step + torch.where(s_step.abs() <= 1, close, far))

    def _compute_difference_of_natural(self, y: Tensor, f_new: Tensor, f_old: Tensor) -> Tensor:
        """Return `log_prob_difference` (...) for natural parameters.

        y is (...), f_new and f_old are (..., 2). The difference is

            ½ [log1p(Δw/w) − Δw r̃² − w (r̃ − r̂)(r̃ + r̂)],

        with the residuals r̃ at f_new and r̂ at f_old, w = −2η₂ = 1/σ² and m = η₁/w at f_old, and
        m̃ − m = (Δη₁ − mΔw)/w̃. It is −∞ where f_new is outside the domain.
        """
        first_step, second_step = self._convert_to_unit_scale(f_new - f_old).unbind(-1)
        f_new, f_old = self._convert_to_unit_scale(f_new), self._convert_to_unit_scale(f_old)
        w_old = -2 * f_old[..., 1]
        w_new = -2 * f_new[..., 1]
        w_step = -2 * second_step
        mean_old = f_old[..., 0] / w_old
        mean_step = (first_step - mean_old * w_step) / w_new
        r_new = y - mean_old - mean_step
        r_old = y - mean_old
        value = 0.5 * (
            torch.log1p(w_step / w_old)
            - w_step * r_new * r_new
            + w_old * mean_step * (r_new + r_old)
        )
        outside = ~(w_new > 0) | ~torch.isfinite(value)
        return torch.where(outside, torch.full_like(value, -torch.inf), value)

    def score(self, y: Tensor, f: Tensor) -> Tensor:
        """Return the score g (..., 2) at y (...) and f (..., 2)."""
        if not self.linear_domain:
            return self.derivatives(y, f).score
        # The same numbers as in `derivatives`, but without Λ, which costs more.
        r = squeeze_scalar_target(y, f) - f[..., 0]
        rw = r * capped_exp(-self._convert_to_unit_scale(f)[..., 1])
        return stack_last([rw, (r * rw).mul_(0.5).sub_(0.5)])

    def precision(self, y: Tensor, f: Tensor) -> Tensor:
        """Return the observed precision Λ (..., 2, 2)."""
        return self.derivatives(y, f).precision

    def derivatives(self, y: Tensor, f: Tensor) -> Derivatives:
        """Return log p (...), g (..., 2) and Λ (..., 2, 2) at y (...) and f (..., 2)."""
        y = squeeze_scalar_target(y, f)
        first, second = self._convert_to_unit_scale(f).unbind(-1)
        if not self.linear_domain:
            # The derivatives in η have a factor 1/scale² for each order.
            m, v = -first / (2 * second), -1 / (2 * second)
            score = stack_last([y - m, (y - m) * (y + m) - v]) / self.scale**2
            return Derivatives(self.log_prob(y, f), score, self.fisher(f).expand(*score.shape, 2))

        r = y - first
        w = capped_exp(-second)
        rw = r * w
        half_r2w = (r * rw).mul_(0.5)
        return Derivatives(
            (second + LOG_2PI).mul_(-0.5) - half_r2w,
            stack_last([rw, half_r2w - 0.5]),
            stack_square([[w.expand_as(rw), rw], [rw, half_r2w]]),
        )

    def fisher(self, f: Tensor) -> Tensor:
        """Return the Fisher information (..., 2, 2) at f (..., 2)."""
        second = self._convert_to_unit_scale(f)[..., 1]
        if self.linear_domain:
            w = capped_exp(-second)
            zero = torch.zeros_like(w)
            return stack_square([[w, zero], [zero, torch.full_like(w, 0.5)]])
        v = -1 / (2 * second)
        m = self.mean(f)
        cross = 2 * m * v
        return stack_square([[v, cross], [cross, 2 * v * v + 4 * m * m * v]]) / self.scale**4

    def mean(self, f: Tensor) -> Tensor:
        """Return μ (...), which does not depend on the scale."""
        return f[..., 0] if self.linear_domain else -f[..., 0] / (2 * f[..., 1])

    def variance(self, f: Tensor) -> Tensor:
        """Return σ² (...)."""
        second = self._convert_to_unit_scale(f)[..., 1]
        return capped_exp(second) if self.linear_domain else -1 / (2 * second)

    def locate_target(self, f: Tensor, K: Tensor) -> tuple[Tensor, Tensor]:
        """Return μ̂ (N,) and √(σ² + Var μ) (N,), for f (N, 2) and K (N, 2, 2).

        In natural parameters Var μ is that of μ linearised in η.
        """
        if self.linear_domain:
            return f[..., 0], (self.variance(f) + K[..., 0, 0]).sqrt()
        m, v = self.mean(f), self.variance(f)
        slope = stack_last([v, 2 * m * v]) / self.scale**2  # ∂μ/∂η
        variance_of_mean = (slope.unsqueeze(-2) @ K @ slope.unsqueeze(-1)).squeeze((-2, -1))
        return m, (v + variance_of_mean).sqrt()

    centre_and_deviation = locate_target

    def starting_points(self, y: Tensor, f: Tensor, R: Tensor) -> list[Tensor]:
        """Return the mode v (M, 2) of M tasks, as a list of one tensor.

        y is (M,), f (M, 2) holds f̂, and R (M, 2, 2) is lower triangular. Natural parameters need
        no starting points, so the list is empty: their log p is concave.

        The mean is profiled out. For a given change d of s, log p is quadratic in μ, so the best μ
        is a closed form and d is the only unknown. With c = Var s, β = Cov(μ,s)/c, q = Var(μ|s),
        ρ = y − μ̂ − βd, E = e^(ŝ+d), t = ρ/(E + q):

            h(d)  = −½(ŝ + d) − ½ρ²/(E + q) − ½d²/c
            c·h'  = c(βt + ½t²E − ½) − d
            −c·h'' = 1 + c((β + tE)²/(E + q) − ½t²E)

        and at the mode K⁻¹(f̃ − f̂) = (t, ½t²E − ½). So v = Rᵀ(t, ½t²E − ½), without an inverse of
        K.

        h can have several maxima where Var s is large or μ and s are strongly correlated (c·Var μ/q
        above about ½). Those tasks also start from three other points, and the highest maximum is
        taken.
        """
        if not self.linear_domain:
            return []

        # In units of the noise e^(ŝ/2), where ŝ is zero: single precision cannot hold squares of y
        # in every unit.
        unit = torch.exp(-0.5 * self._convert_to_unit_scale(f)[..., 1])

        # R = [[a, 0], [b, e]].
        a, b, e = R[..., 0, 0] * unit, R[..., 1, 0], R[..., 1, 1]
        r = (squeeze_scalar_target(y, f) - f[..., 0]) * unit
        s = torch.zeros_like(f[..., 1])
        c = torch.addcmul(b * b, e, e)
        a_over_c = a / c.clamp_min(torch.finfo(c.dtype).tiny)
        beta = a_over_c * b
        q = a_over_c * a * (e * e)

        # Without uncertainty of s, the variance of μ given s is that of μ.
        certain = c == 0
        if bool(certain.any()):
            q = torch.where(certain, a * a, q)
        task = _Profile(r, s, c, beta, q)

        # Newton steps are fast in single precision. One more in double precision squares their
        # error.
        single = task.map_fields(Tensor.float)
        d = single.find_lambert_start()
        for _ in range(PROFILE_STEPS):
            d = single.take_newton_step(d)
        d = task.take_newton_step(d.to(r.dtype))
        hard = (c * a * a > SEVERAL_MODES * q) & (c > 0)
        if bool(hard.any()):
            rows = hard.nonzero().squeeze(-1)
            d[rows] = task.map_fields(lambda values: values[rows]).find_highest_maximum(d[rows])

        # v = Rᵀ(t, u) with u = ½t²E − ½.
        E = capped_exp(s + d)
        t = torch.addcmul(r, beta, d, value=-1) / (E + q)
        u = torch.addcmul(E.new_tensor(-0.5), t * t, E, value=0.5)
        return [stack_last([torch.addcmul(b * u, a, t), e * u])]

    def sample(self, f: Tensor, n: int, generator: torch.Generator | None = None) -> Tensor:
        """Return n draws of y (n, ...)."""
        mean = self.mean(f)
        noise = torch.randn((n, *mean.shape), dtype=f.dtype, device=f.device, generator=generator)
        return mean + self.variance(f).sqrt() * noise


class _Profile(NamedTuple):
    """The profile h(d) of M tasks, with the fields r, s, c, β and q (M,) of `starting_points`.

    h(d) is log p(y|f̂ + Rv) − ½‖v‖² at its maximum over μ, as a function of the change d of s.
    """

    r: Tensor
    s: Tensor
    c: Tensor
    beta: Tensor
    q: Tensor

    def map_fields(self, function: Callable[[Tensor], Tensor]) -> _Profile:
        """Return the profile whose fields are function(field), (M,) -> (m,)."""
        return _Profile(*(function(values) for values in self))

    def find_lambert_start(self) -> Tensor:
        """Return an approximate maximum d (M,) of h.

        For β = 0 and fixed q the maximum has d + c/2 = W(½ c z² e^(c/2)), with z² = E ρ²/(E + q)²
        at d = 0. Lambert's W is replaced by the approximation w(1 − log(1 + w)/(2 + w)), where w is
        log(1 + its argument).
        """
        E = capped_exp(self.s)
        z2 = torch.square(self.r / (E + self.q)) * E
        w = torch.log1p(0.5 * self.c * z2 * capped_exp(0.5 * self.c))
        return w * (1 - torch.log1p(w) / (2 + w)) - 0.5 * self.c

    def take_newton_step(self, d: Tensor) -> Tensor:
        """Return d (M,) after one Newton step on h, with the derivatives of `starting_points`.

        h need not be concave: its curvature is taken as at least a share of its positive part.
        """
        E = capped_exp(self.s + d)
        D = E + self.q
        t = torch.addcmul(self.r, self.beta, d, value=-1).div_(D)
        tE = t * E
        half_t2E = (t * tE).mul_(0.5)
        positive_part = torch.square(tE.add_(self.beta)).div_(D)
        curvature = torch.maximum(positive_part - half_t2E, LEAST_CURVATURE * positive_part)
        curvature.mul_(self.c).add_(1)
        slope = torch.addcmul(half_t2E.sub_(0.5), self.beta, t).mul_(self.c).sub_(d)
        return d + slope.div_(curvature)

    def compute_height(self, d: Tensor) -> Tensor:
        """Return the height h(d) (M,) at d (M,), with −∞ where it is not a number."""
        rho = torch.addcmul(self.r, self.beta, d, value=-1)
        variance = capped_exp(self.s + d) + self.q
        value = -0.5 * (self.s + d + rho * rho / variance + d * d / self.c)
        return torch.nan_to_num(value, nan=-torch.inf, posinf=-torch.inf)

    def find_highest_maximum(self, d: Tensor) -> Tensor:
        """Return the highest maximum (M,) of h that is reached from d (M,) and three other points.

        These points are: −c/2, the maximum if y is near its mean; a noise as large as the residual;
        and a mean at y. The result is d where no maximum is higher.
        """
        # The floors are for a residual of zero and for tasks without uncertainty.
        noise_explains = (self.r * self.r).clamp_min(SMALLEST_DIVISOR).log() - self.s
        variance = (self.beta * self.beta * self.c + self.q).clamp_min(SMALLEST_DIVISOR)
        mean_explains = self.c * self.beta * self.r / variance
        best = d
        best_height = self.compute_height(d)
        for start in (d, -0.5 * self.c, noise_explains, mean_explains):
            maximum = self._climb_to_maximum(
                torch.where(torch.isfinite(start), start, torch.zeros_like(start))
            )
            height = self.compute_height(maximum)
            better = height > best_height
            best = torch.where(better, maximum, best)
            best_height = torch.where(better, height, best_height)
        return best

    def _climb_to_maximum(self, d: Tensor) -> Tensor:
        """Return the maximum (M,) of h that is reached from d (M,) by steps that never decrease h.

        A task that has no maximum after SAFE_STEPS steps returns the point where it is then.
        """
        height = self.compute_height(d)
        for _ in range(SAFE_STEPS):
            step = self.take_newton_step(d) - d
            step = torch.where(torch.isfinite(step), step, torch.zeros_like(step))
            step = step.clamp(-LONGEST_STEP, LONGEST_STEP)
            trial_height = self.compute_height(d + step)
            # A step that decreases h is shortened.
            for _ in range(SHORTER_STEPS):
                decreased = trial_height < height
                if not bool(decreased.any()):
                    break
                step = torch.where(decreased, step / SHORTER, step)
                trial_height = self.compute_height(d + step)
            accepted = trial_height >= height
            d = torch.where(accepted, d + step, d)
            height = torch.where(accepted, trial_height, height)
            if bool((step.abs() <= SMALLEST_STEP * (1 + d.abs())).all()):
                break
        return d
