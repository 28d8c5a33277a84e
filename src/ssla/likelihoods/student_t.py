"""Heavy-tailed noise around one output.

z = (y − f)/scale is the standardised residual. g and Λ are those of
`ssla.likelihoods.likelihood`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ssla._checks import check_positive, in_plain_torch
from ssla.likelihoods.likelihood import (
    Likelihood,
    check_output_count,
    describe_residuals,
    squeeze_scalar_target,
)
from ssla.likelihoods.support import Real, Support


@dataclass(frozen=True)
class StudentT(Likelihood):
    """Heavy-tailed noise around one output: y = f + scale·t with t ~ Student-t(df).

    With z = (y − f)/scale: Λ = (df+1)(df − z²) / (scale²(df + z²)²) is negative for |z| > √df,
    where an outlier loses its influence; the Fisher information is (df+1) / ((df+3) scale²). The
    variance of y is infinite for df ≤ 2.
    """

    df: float
    scale: float

    @in_plain_torch
    def __post_init__(self) -> None:
        """Check that df > 1 and scale > 0; raise ValueError if not."""
        check_positive("StudentT df", torch.tensor(float(self.df)))
        if self.df <= 1:
            raise ValueError(
                f"StudentT df must exceed 1 (lighter tails than Cauchy's), but is {self.df:g}. Use "
                "df=2 or more."
            )
        check_positive("StudentT scale", torch.tensor(float(self.scale)))

    several_modes = True
    differentiable = True

    def multiply_dispersion(self, factor: float) -> StudentT:
        """Return the likelihood with `factor` times the scale."""
        return replace(self, scale=self.scale * factor)

    dispersion_in_words = staticmethod(describe_residuals)

    def support_for(self, outputs: int) -> Support:
        """Return the real line; raise ValueError unless there is one output."""
        check_output_count("StudentT", outputs, 1, "the location")
        return Real()

    def _standardise_residual(self, y: Tensor, f: Tensor) -> Tensor:
        """Return the standardised residual z = (y − f)/scale (...) for f (..., 1)."""
        return (squeeze_scalar_target(y, f) - f[..., 0]) / self.scale

    def log_prob(self, y: Tensor, f: Tensor) -> Tensor:
        """Return the log density of y (...): that of Student's t at z, less log scale."""
        z = self._standardise_residual(y, f)
        constant = (
            math.lgamma((self.df + 1) / 2)
            - math.lgamma(self.df / 2)
            - 0.5 * math.log(self.df * math.pi)
        )
        return constant - math.log(self.scale) - (self.df + 1) / 2 * torch.log1p(z * z / self.df)

    def log_prob_difference(self, y: Tensor, f_new: Tensor, f_old: Tensor) -> Tensor:
        """Return log p(y|f_new) − log p(y|f_old) (...), without cancellation.

        The result is −½(df + 1) log1p(ratio) with ratio = (z_new − z_old)(z_new + z_old)/(df +
        z_old²). Where the ratio is below −½ it is the plain difference, which does not cancel
        there.
        """
        new, old = self._standardise_residual(y, f_new), self._standardise_residual(y, f_old)
        ratio = (f_old - f_new)[..., 0] / self.scale * (new + old) / (self.df + old * old)
        plain = torch.log1p(new * new / self.df) - torch.log1p(old * old / self.df)
        change = torch.where(ratio > -0.5, torch.log1p(ratio.clamp_min(-0.5)), plain)
        return -(self.df + 1) / 2 * change

    def score(self, y: Tensor, f: Tensor) -> Tensor:
        """Return the score g = (df + 1) z / (scale (df + z²)) (..., 1)."""
        z = self._standardise_residual(y, f)
        return ((self.df + 1) / self.scale * z / (self.df + z * z)).unsqueeze(-1)

    def precision(self, y: Tensor, f: Tensor) -> Tensor:
        """Return the precision Λ = (df + 1)(df − z²) / (scale² (df + z²)²) (..., 1, 1)."""
        z = self._standardise_residual(y, f)
        denominator = self.df + z * z
        # Two divisions, because the square of the denominator overflows for a distant y.
        share = (self.df - z * z) / denominator
        return ((self.df + 1) / self.scale**2 * share / denominator)[..., None, None]

    def fisher(self, f: Tensor) -> Tensor:
        """Return the Fisher information (df + 1) / ((df + 3) scale²) (..., 1, 1)."""
        return torch.full_like(f, (self.df + 1) / ((self.df + 3) * self.scale**2)).unsqueeze(-1)

    def mean(self, f: Tensor) -> Tensor:
        """Return the location f (...) for f (..., 1)."""
        return f[..., 0]

    def variance(self, f: Tensor) -> Tensor:
        """Return the variance scale² df/(df − 2) of y (...), or infinity for df ≤ 2."""
        value = self.scale**2 * self.df / (self.df - 2) if self.df > 2 else math.inf
        return torch.full_like(f[..., 0], value)

    def locate_target(self, f: Tensor, K: Tensor) -> tuple[Tensor, Tensor]:
        """Return f̂ (N,) and √(scale² + K) (N,), for f (N, 1) and K (N, 1, 1)."""
        return f[..., 0], (self.scale**2 + K[..., 0, 0]).sqrt()

    centre_and_deviation = locate_target

    def starting_points(self, y: Tensor, f: Tensor, R: Tensor) -> list[Tensor]:
        """Return two starting points v (M, 1) for M tasks, with f̂ + Rv = f̂ and with f̂ + Rv = y.

        For a wide K the objective log p(y|f̂ + Rv) − ½‖v‖² has a mode near each. y is (M,), f (M, 1)
        holds f̂, and R is (M, 1, 1).
        """
        r = R[..., 0, 0]
        # Without uncertainty (r = 0) the only point is v = 0.
        at_y = (squeeze_scalar_target(y, f) - f[..., 0]) / torch.where(r > 0, r, torch.inf)
        return [torch.zeros_like(f), at_y.unsqueeze(-1)]

    def sample(self, f: Tensor, n: int, generator: torch.Generator | None = None) -> Tensor:
        """Return n draws of y (n, ...)."""
        centre = f[..., 0]
        normal = torch.randn(
            (n, *centre.shape), dtype=f.dtype, device=f.device, generator=generator
        )
        shape = torch.full((n, *centre.shape), self.df / 2, dtype=f.dtype, device=f.device)
        # A chi-squared number with df degrees of freedom is twice a Gamma(df/2) number.
        chi_squared = torch._standard_gamma(shape, generator=generator) * 2
        return centre + self.scale * normal * (self.df / chi_squared).sqrt()
