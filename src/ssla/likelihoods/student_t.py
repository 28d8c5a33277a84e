"""Heavy-tailed noise around one output."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ssla._checks import in_plain_torch, positive
from ssla.likelihoods.likelihood import Likelihood, event, need_outputs, residuals_in_words
from ssla.likelihoods.support import Real, Support


@dataclass(frozen=True)
class StudentT(Likelihood):
    """y = f + scale·t, t ~ Student-t(df).

    With z = (y − f)/scale: Λ = (df+1)(df − z²) / (scale²(df + z²)²) is negative for |z| > √df,
    where an outlier loses its influence; the Fisher information is (df+1) / ((df+3) scale²). The
    variance of y is infinite for df ≤ 2.
    """

    df: float
    scale: float

    @in_plain_torch
    def __post_init__(self) -> None:
        positive("StudentT df", torch.tensor(float(self.df)))
        if self.df <= 1:
            raise ValueError(
                f"StudentT df must exceed 1 (lighter tails than Cauchy's), but is {self.df:g}. Use "
                "df=2 or more."
            )
        positive("StudentT scale", torch.tensor(float(self.scale)))

    @property
    def support(self) -> Support:
        return Real()

    several_modes = True
    differentiable = True

    def dispersed(self, factor: float) -> StudentT:
        """With that many times the scale."""
        return replace(self, scale=self.scale * factor)

    def dispersion_in_words(self, factor: float) -> str:
        return residuals_in_words(factor)

    def support_for(self, outputs: int) -> Support:
        need_outputs("StudentT", outputs, 1, "the location")
        return Real()

    def _z(self, y: Tensor, f: Tensor) -> Tensor:
        return (event(y, f) - f[..., 0]) / self.scale

    def log_prob(self, y: Tensor, f: Tensor) -> Tensor:
        z = self._z(y, f)
        constant = (
            math.lgamma((self.df + 1) / 2)
            - math.lgamma(self.df / 2)
            - 0.5 * math.log(self.df * math.pi)
        )
        return constant - math.log(self.scale) - (self.df + 1) / 2 * torch.log1p(z * z / self.df)

    def log_prob_difference(self, y: Tensor, f_new: Tensor, f_old: Tensor) -> Tensor:
        """−½(df + 1) log1p((z̃ − ẑ)(z̃ + ẑ)/(df + ẑ²)); the plain difference where the ratio is
        below a half.
        """
        new, old = self._z(y, f_new), self._z(y, f_old)
        excess = (f_old - f_new)[..., 0] / self.scale * (new + old) / (self.df + old * old)
        plain = torch.log1p(new * new / self.df) - torch.log1p(old * old / self.df)
        return (
            -(self.df + 1)
            / 2
            * torch.where(excess > -0.5, torch.log1p(excess.clamp_min(-0.5)), plain)
        )

    def score(self, y: Tensor, f: Tensor) -> Tensor:
        z = self._z(y, f)
        return ((self.df + 1) / self.scale * z / (self.df + z * z)).unsqueeze(-1)

    def precision(self, y: Tensor, f: Tensor) -> Tensor:
        z = self._z(y, f)
        q = self.df + z * z
        return ((self.df + 1) / self.scale**2 * ((self.df - z * z) / q) / q)[..., None, None]

    def fisher(self, f: Tensor) -> Tensor:
        return torch.full_like(f, (self.df + 1) / ((self.df + 3) * self.scale**2)).unsqueeze(-1)

    def mean(self, f: Tensor) -> Tensor:
        return f[..., 0]

    def variance(self, f: Tensor) -> Tensor:
        value = self.scale**2 * self.df / (self.df - 2) if self.df > 2 else math.inf
        return torch.full_like(f[..., 0], value)

    def guess(self, f: Tensor, K: Tensor) -> tuple[Tensor, Tensor]:
        return f[..., 0], (self.scale**2 + K[..., 0, 0]).sqrt()

    def scale_of_answers(self, f: Tensor, K: Tensor) -> tuple[Tensor, Tensor]:
        return self.guess(f, K)

    def starts(self, y: Tensor, f: Tensor, R: Tensor) -> list[Tensor]:
        """f̂, and y itself: for a wide K the objective has a mode near each."""
        r = R[..., 0, 0]
        there = (event(y, f) - f[..., 0]) / torch.where(r > 0, r, torch.inf)
        return [torch.zeros_like(f), there.unsqueeze(-1)]

    def sample(self, f: Tensor, n: int, generator: torch.Generator | None = None) -> Tensor:
        centre = f[..., 0]
        normal = torch.randn(
            (n, *centre.shape), dtype=f.dtype, device=f.device, generator=generator
        )
        shape = torch.full((n, *centre.shape), self.df / 2, dtype=f.dtype, device=f.device)
        chi = torch._standard_gamma(shape, generator=generator) * 2
        return centre + self.scale * normal * (self.df / chi).sqrt()
