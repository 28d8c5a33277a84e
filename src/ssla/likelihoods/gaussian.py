"""Gaussian noise around the outputs: one target or several, independent or correlated."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from ssla._checks import check_positive, copy_if_inference, in_plain_torch
from ssla.likelihoods.likelihood import (
    LOG_2PI,
    Likelihood,
    describe_residuals,
    squeeze_scalar_target,
)
from ssla.likelihoods.support import Real, RealVector, Support

ESTIMATE = "estimate"  # the noise of a likelihood whose noise a fit estimates


@dataclass(frozen=True, eq=False)
class Gaussian(Likelihood):
    """Gaussian noise around the outputs: y = f + ε with ε ~ N(0, Σ).

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
        """Check the noise or the covariance, and store it as a number or in float64.

        Raises ValueError if both or none are given, or if one is invalid.
        """
        if (self.noise is None) == (self.covariance is None):
            raise ValueError(
                'Gaussian takes noise= (a standard deviation, a tensor (D,), or "estimate") or '
                "covariance= (D, D): exactly one of them."
            )
        # The dataclass is frozen, so checked values are stored by object.__setattr__.
        if self.covariance is not None:
            object.__setattr__(self, "covariance", _check_covariance(self.covariance))
        elif self.noise is not None:
            object.__setattr__(self, "noise", _check_noise(self.noise))

    @property
    def needs_noise_estimate(self) -> bool:
        """Return whether the noise has still to be estimated."""
        return isinstance(self.noise, str)

    quadratic = True
    concave = True
    averages_differ = False  # Λ is the same for every f
    unequal_units = True
    has_log_average = True

    def support_for(self, outputs: int) -> Support:
        """Return the real line for one output, and real vectors for several.

        Raises ValueError if the noise is for another number of outputs.
        """
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
        """Return Σ (C, C) in the dtype and on the device of f (..., C).

        Raises ValueError if the noise has still to be estimated.
        """
        if self.needs_noise_estimate:
            raise ValueError(
                'noise="estimate" has no value yet: ssla.fit estimates it; read it from '
                "posterior.likelihood.noise."
            )
        if self.covariance is not None:
            return self.covariance.to(f)
        sigma = torch.as_tensor(cast("float | Tensor", self.noise), dtype=f.dtype, device=f.device)
        return torch.diag(sigma.expand(f.shape[-1]) ** 2)

    def _compute_noise_precision(self, f: Tensor) -> Tensor:
        """Return Σ⁻¹ (C, C) in the dtype of f (..., C).

        Raises ValueError if the noise has still to be estimated.
        """
        if self.covariance is None:
            return torch.diag(1 / self.covariance_for(f).diagonal())
        factor = torch.linalg.cholesky(self.covariance)
        return torch.cholesky_solve(torch.eye(factor.shape[0], dtype=factor.dtype), factor).to(f)

    def _compute_residual(self, y: Tensor, f: Tensor) -> Tensor:
        """Return the residual y − f (..., C), for f (..., C) and y of shape (...) or (..., C)."""
        return squeeze_scalar_target(y, f).unsqueeze(-1) - f if f.shape[-1] == 1 else y - f

    def log_prob(self, y: Tensor, f: Tensor) -> Tensor:
        """Return log N(y; f, Σ) (...)."""
        sigma = self.covariance_for(f)
        residual = self._compute_residual(y, f)
        if self.covariance is not None:
            return _log_normal(residual, sigma)
        scale = sigma.diagonal().sqrt()
        white = residual / scale
        return -0.5 * (white * white).sum(-1) - scale.log().sum() - 0.5 * f.shape[-1] * LOG_2PI

    def log_prob_difference(self, y: Tensor, f_new: Tensor, f_old: Tensor) -> Tensor:
        """Return log p(y|f_new) − log p(y|f_old) (...), without cancellation.

        The result is (f_new − f_old)ᵀ Σ⁻¹ (y − (f_new + f_old)/2).
        """
        mean_residual = (self._compute_residual(y, f_new) + self._compute_residual(y, f_old)) / 2
        return ((f_new - f_old) @ self._compute_noise_precision(f_new) * mean_residual).sum(-1)

    def score(self, y: Tensor, f: Tensor) -> Tensor:
        """Return Σ⁻¹(y − f) (..., C)."""
        return self._compute_residual(y, f) @ self._compute_noise_precision(f)

    def precision(self, y: Tensor, f: Tensor) -> Tensor:
        """Return Σ⁻¹ (..., C, C) for the common shape of y and f."""
        shape = self._compute_residual(y, f).shape
        return self._compute_noise_precision(f).expand(*shape, shape[-1])

    def fisher(self, f: Tensor) -> Tensor:
        """Return Σ⁻¹ (..., C, C)."""
        return self._compute_noise_precision(f).expand(*f.shape, f.shape[-1])

    def mean(self, f: Tensor) -> Tensor:
        """Return f: (...) for one output, (..., C) for several."""
        return f.squeeze(-1) if f.shape[-1] == 1 else f

    def variance(self, f: Tensor) -> Tensor:
        """Return the diagonal of Σ with the shape of `mean`."""
        return self.covariance_for(f).diagonal().expand_as(f).reshape(self.mean(f).shape)

    def locate_target(self, f: Tensor, K: Tensor) -> tuple[Tensor, Tensor]:
        """Return f̂ (N,) and √(σ² + K) (N,), for f (N, 1) and K (N, 1, 1)."""
        return f[..., 0], (self.variance(f) + K[..., 0, 0]).sqrt()

    def centre_and_deviation(self, f: Tensor, K: Tensor) -> tuple[Tensor, Tensor]:
        """Return f̂ (N, C) and the standard deviations of Σ + K (N, C)."""
        return f, (self.covariance_for(f) + K).diagonal(dim1=-2, dim2=-1).sqrt()

    def sample(self, f: Tensor, n: int, generator: torch.Generator | None = None) -> Tensor:
        """Return n draws of y: (n, ...) for one output, (n, ..., C) for several."""
        noise = torch.randn((n, *f.shape), dtype=f.dtype, device=f.device, generator=generator)
        factor = torch.linalg.cholesky(self.covariance_for(f))
        return self.mean(f + noise @ factor.mT)

    def log_average(self, y: Tensor, f: Tensor, K: Tensor) -> Tensor:
        """Return log N(y; f̂, Σ + K) (B,) for y (B,) or (B, C), f (B, C) and K (B, C, C)."""
        return _log_normal(self._compute_residual(y, f), self.covariance_for(f) + K)

    def multiply_dispersion(self, factor: float) -> Gaussian:
        """Return the likelihood with `factor` times the standard deviation.

        Raises AssertionError if the noise is "estimate", which is not a number yet.
        """
        if self.covariance is not None:
            return Gaussian(covariance=self.covariance * factor**2)
        assert isinstance(self.noise, float | Tensor), "the noise is still to be estimated"
        return Gaussian(noise=self.noise * factor)

    dispersion_in_words = staticmethod(describe_residuals)

    def __repr__(self) -> str:
        """Return the constructor call as text, with six digits of a noise that is one number."""
        if self.covariance is not None:
            return f"Gaussian(covariance={self.covariance.tolist()})"
        if isinstance(self.noise, Tensor):
            return f"Gaussian(noise={self.noise.tolist()!r})"
        noise = repr(self.noise) if isinstance(self.noise, str) else f"{self.noise:.6g}"
        return f"Gaussian(noise={noise})"


def _check_noise(noise: float | Tensor | str) -> float | Tensor | str:
    """Return a standard deviation as a number or a float64 tensor (D,), or "estimate" unchanged.

    Raises ValueError if it is another text, has more than one dimension, or is not positive.
    """
    if isinstance(noise, str):
        if noise != ESTIMATE:
            raise ValueError(
                f'noise must be a number, a tensor (D,) or "estimate", but is {noise!r}.'
            )
        return noise

    sigma = copy_if_inference(torch.as_tensor(noise, dtype=torch.float64))
    if sigma.dim() > 1:
        raise ValueError(
            f"noise must be a number or a tensor (D,), but has shape {tuple(sigma.shape)}. "
            "For correlated noise give covariance= (D, D)."
        )

    check_positive(
        "noise", sigma, 'It is a standard deviation; use noise="estimate" if it is unknown.'
    )
    return sigma if sigma.dim() else float(sigma)


def _check_covariance(covariance: Tensor) -> Tensor:
    """Return the covariance Σ (D, D) in float64.

    Raises ValueError unless it is a square matrix that is symmetric and positive definite.
    """
    sigma = copy_if_inference(torch.as_tensor(covariance, dtype=torch.float64))
    if sigma.dim() != 2 or sigma.shape[0] != sigma.shape[1]:
        raise ValueError(
            f"covariance must be a square matrix (D, D), but has shape {tuple(sigma.shape)}."
        )
    _, info = torch.linalg.cholesky_ex(sigma)
    if int(info) != 0 or not torch.allclose(sigma, sigma.mT):
        raise ValueError(
            "covariance must be symmetric and positive definite, but is not. Check its eigenvalues."
        )
    return sigma


def _log_normal(residual: Tensor, covariance: Tensor) -> Tensor:
    """Return log N(residual; 0, Σ) (...) for residual (..., C) and Σ (C, C) or (..., C, C)."""
    factor = torch.linalg.cholesky(covariance)
    white = torch.linalg.solve_triangular(factor, residual.unsqueeze(-1), upper=False).squeeze(-1)
    half_logdet = factor.diagonal(dim1=-2, dim2=-1).log().sum(-1)
    value: Tensor = (
        -0.5 * (white * white).sum(-1) - half_logdet - 0.5 * residual.shape[-1] * LOG_2PI
    )
    return value
