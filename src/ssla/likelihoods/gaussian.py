"""Gaussian noise around the outputs: one target or several, independent or correlated."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from ssla._checks import in_plain_torch, positive, recorded
from ssla.likelihoods.likelihood import LOG_2PI, Likelihood, event, residuals_in_words
from ssla.likelihoods.support import Real, RealVector, Support

ESTIMATE = "estimate"


@dataclass(frozen=True, eq=False)
class Gaussian(Likelihood):
    """y = f + ε, ε ~ N(0, Σ).

    Parameters
    ----------
    noise:
        Standard deviation: a number, a tensor (D,) with one for each output, or "estimate":
        `ssla.fit` then estimates it from the residuals, with degrees of freedom.
    covariance:
        Full Σ (D, D) in place of `noise`.

    Λ = fisher = Σ⁻¹ for every y and f. There is no default, because an unnoticed σ = 1 gives wrong
    intervals.
    """

    noise: float | Tensor | str | None = None
    covariance: Tensor | None = None

    @in_plain_torch
    def __post_init__(self) -> None:
        if (self.noise is None) == (self.covariance is None):
            raise ValueError(
                'Gaussian takes noise= (a standard deviation, a tensor (D,), or "estimate") or '
                "covariance= (D, D): exactly one of them."
            )
        if isinstance(self.noise, str):
            if self.noise != ESTIMATE:
                raise ValueError(
                    f'noise must be a number, a tensor (D,) or "estimate", but is {self.noise!r}.'
                )
        elif self.noise is not None:
            noise = recorded(torch.as_tensor(self.noise, dtype=torch.float64))
            if noise.dim() > 1:
                raise ValueError(
                    f"noise must be a number or a tensor (D,), but has shape {tuple(noise.shape)}. "
                    "For correlated noise give covariance= (D, D)."
                )
            positive(
                "noise", noise, 'It is a standard deviation; use noise="estimate" if it is unknown.'
            )
            object.__setattr__(self, "noise", noise if noise.dim() else float(noise))
        else:
            sigma = recorded(torch.as_tensor(self.covariance, dtype=torch.float64))
            if sigma.dim() != 2 or sigma.shape[0] != sigma.shape[1]:
                raise ValueError(
                    "covariance must be a square matrix (D, D), but has shape "
                    f"{tuple(sigma.shape)}."
                )
            _, info = torch.linalg.cholesky_ex(sigma)
            if int(info) != 0 or not torch.allclose(sigma, sigma.mT):
                raise ValueError(
                    "covariance must be symmetric and positive definite, but is not. Check its "
                    "eigenvalues."
                )
            object.__setattr__(self, "covariance", sigma)

    @property
    def estimated(self) -> bool:
        """Whether the noise has yet to be estimated."""
        return isinstance(self.noise, str)

    @property
    def support(self) -> Support:
        return Real()

    quadratic = True
    concave = True
    averages_differ = False  # Λ is the same for every f
    unequal_units = True
    closed_form = True

    def support_for(self, outputs: int) -> Support:
        size: int | None = None
        if self.covariance is not None:
            size = self.covariance.shape[0]
        elif isinstance(self.noise, Tensor):
            size = self.noise.numel()
        if size is not None and size != outputs:
            raise ValueError(
                f"Gaussian has noise for {size} outputs, but the network has {outputs}. Give one "
                "for each output."
            )
        return Real() if outputs == 1 else RealVector()

    def covariance_for(self, f: Tensor) -> Tensor:
        """Σ (C, C) in f's dtype and on its device."""
        if self.estimated:
            raise ValueError(
                'noise="estimate" has no value yet: ssla.fit estimates it; read it from '
                "posterior.likelihood.noise."
            )
        if self.covariance is not None:
            return self.covariance.to(f)
        sigma = torch.as_tensor(cast("float | Tensor", self.noise), dtype=f.dtype, device=f.device)
        return torch.diag(sigma.expand(f.shape[-1]) ** 2)

    def _precision(self, f: Tensor) -> Tensor:
        if self.covariance is None:
            return torch.diag(1 / self.covariance_for(f).diagonal())
        factor = torch.linalg.cholesky(self.covariance)
        return torch.cholesky_solve(torch.eye(factor.shape[0], dtype=factor.dtype), factor).to(f)

    def _residual(self, y: Tensor, f: Tensor) -> Tensor:
        """(..., C)."""
        return event(y, f).unsqueeze(-1) - f if f.shape[-1] == 1 else y - f

    def log_prob(self, y: Tensor, f: Tensor) -> Tensor:
        sigma = self.covariance_for(f)
        r = self._residual(y, f)
        if self.covariance is None:
            scale = sigma.diagonal().sqrt()
            white = r / scale
            return -0.5 * (white * white).sum(-1) - scale.log().sum() - 0.5 * f.shape[-1] * LOG_2PI
        factor = torch.linalg.cholesky(sigma)
        white = torch.linalg.solve_triangular(factor, r.unsqueeze(-1), upper=False).squeeze(-1)
        value: Tensor = (
            -0.5 * (white * white).sum(-1)
            - factor.diagonal().log().sum()
            - 0.5 * f.shape[-1] * LOG_2PI
        )
        return value

    def log_prob_difference(self, y: Tensor, f_new: Tensor, f_old: Tensor) -> Tensor:
        """(f̃ − f̂)ᵀ Σ⁻¹ (y − (f̃ + f̂)/2)."""
        middle = (self._residual(y, f_new) + self._residual(y, f_old)) / 2
        return ((f_new - f_old) @ self._precision(f_new) * middle).sum(-1)

    def score(self, y: Tensor, f: Tensor) -> Tensor:
        return self._residual(y, f) @ self._precision(f)

    def precision(self, y: Tensor, f: Tensor) -> Tensor:
        r = self._residual(y, f)
        return self._precision(f).expand(*r.shape, r.shape[-1])

    def fisher(self, f: Tensor) -> Tensor:
        return self._precision(f).expand(*f.shape, f.shape[-1])

    def mean(self, f: Tensor) -> Tensor:
        return f.squeeze(-1) if f.shape[-1] == 1 else f

    def variance(self, f: Tensor) -> Tensor:
        return self.covariance_for(f).diagonal().expand_as(f).reshape(self.mean(f).shape)

    def guess(self, f: Tensor, K: Tensor) -> tuple[Tensor, Tensor]:
        return f[..., 0], (self.variance(f) + K[..., 0, 0]).sqrt()

    def scale_of_answers(self, f: Tensor, K: Tensor) -> tuple[Tensor, Tensor]:
        return f, (self.covariance_for(f) + K).diagonal(dim1=-2, dim2=-1).sqrt()

    def sample(self, f: Tensor, n: int, generator: torch.Generator | None = None) -> Tensor:
        noise = torch.randn((n, *f.shape), dtype=f.dtype, device=f.device, generator=generator)
        factor = torch.linalg.cholesky(self.covariance_for(f))
        return self.mean(f + noise @ factor.mT)

    def log_average(self, y: Tensor, f: Tensor, K: Tensor) -> Tensor:
        """log N(y; f̂, Σ + K)."""
        r = self._residual(y, f)
        factor = torch.linalg.cholesky(self.covariance_for(f) + K)
        white = torch.linalg.solve_triangular(factor, r.unsqueeze(-1), upper=False).squeeze(-1)
        logdet = factor.diagonal(dim1=-2, dim2=-1).log().sum(-1)
        value: Tensor = -0.5 * (white * white).sum(-1) - logdet - 0.5 * f.shape[-1] * LOG_2PI
        return value

    def dispersed(self, factor: float) -> Gaussian:
        """With that many times the standard deviation."""
        if self.covariance is not None:
            return Gaussian(covariance=self.covariance * factor**2)
        assert isinstance(self.noise, float | Tensor), "the noise is still to be estimated"
        return Gaussian(noise=self.noise * factor)

    def dispersion_in_words(self, factor: float) -> str:
        return residuals_in_words(factor)

    def __repr__(self) -> str:
        if self.covariance is not None:
            return f"Gaussian(covariance={self.covariance.tolist()})"
        shown = self.noise.tolist() if isinstance(self.noise, Tensor) else self.noise
        return (
            f"Gaussian(noise={shown!r})"
            if isinstance(shown, str | list)
            else f"Gaussian(noise={shown:.6g})"
        )
