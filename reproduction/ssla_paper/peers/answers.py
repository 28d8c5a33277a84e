"""The prediction of a peer: Gaussians, one for each draw or member, with equal weights; and its
scores.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import scoringrules
import torch
from torch import Tensor

from ssla import metrics
from ssla.maths.quadrature.root_finding import bracketed_root

MOST_PAIRS = 4_000_000


@dataclass(frozen=True, eq=False)
class GaussianMixture:
    """p(y) = 1/S Σ_s N(y; means_s, sds_s²) for N inputs. means, sds (S, N) float64."""

    means: Tensor
    sds: Tensor
    kind = "scalar"

    def __post_init__(self) -> None:
        if self.means.dim() != 2 or self.means.shape != self.sds.shape:
            raise ValueError(
                f"means and sds must both be (S, N), but are {tuple(self.means.shape)} and "
                f"{tuple(self.sds.shape)}."
            )
        if not bool((torch.isfinite(self.means) & torch.isfinite(self.sds) & (self.sds > 0)).all()):
            raise ValueError("means must be finite and sds positive and finite.")

    @property
    def mean(self) -> Tensor:
        return self.means.mean(0)

    @property
    def stddev(self) -> Tensor:
        """√(E sd² + Var mean)."""
        return (self.sds.square().mean(0) + self.means.var(0, correction=0)).sqrt()

    def log_prob(self, y: Any) -> Tensor:
        """y (N,) or (N, k)."""
        z, m, s = self._beside(y)
        each = -0.5 * ((z - m) / s) ** 2 - s.log() - 0.5 * math.log(2 * math.pi)
        total: Tensor = torch.logsumexp(each, 0)
        return total - math.log(len(self.means))

    def cdf(self, y: Any) -> Tensor:
        """y (N,) or (N, k)."""
        z, m, s = self._beside(y)
        each: Tensor = torch.special.ndtr((z - m) / s)
        return each.mean(0)

    def icdf(self, q: Any) -> Tensor:
        """q a number -> (N,), or (k,) -> (N, k)."""
        levels = torch.as_tensor(q, dtype=torch.float64)
        z = torch.special.ndtri(levels.reshape(-1, 1, 1))  # between the members' own quantiles
        each = self.means + z * self.sds
        low, high = each.amin(1).T.contiguous(), each.amax(1).T.contiguous()
        found = bracketed_root(lambda y: self.cdf(y) - levels.reshape(1, -1), low, high)
        return found.squeeze(1) if levels.dim() == 0 else found

    def interval(self, level: float = 0.95) -> Tensor:
        """Central: (N, 2)."""
        return self.icdf(torch.tensor([(1 - level) / 2, (1 + level) / 2], dtype=torch.float64))

    def crps(self, y: Tensor) -> Tensor:
        """In closed form (scoringrules), in chunks of rows: it needs S² pairs for each row."""
        size = max(1, MOST_PAIRS // len(self.means) ** 2)
        parts = []
        for rows in range(0, len(y), size):
            part = slice(rows, rows + size)
            parts.append(
                scoringrules.crps_mixnorm(
                    y[part].numpy(),
                    self.means[:, part].T.numpy(),
                    self.sds[:, part].T.numpy(),
                    m_axis=-1,
                )
            )
        return torch.from_numpy(np.concatenate(parts))

    def _beside(self, y: Any) -> tuple[Tensor, Tensor, Tensor]:
        z = torch.as_tensor(y, dtype=torch.float64)
        if z.dim() == 2:
            return z[None], self.means[:, :, None], self.sds[:, :, None]
        return z[None], self.means, self.sds


def scores(answer: Any, y: Tensor, levels: Sequence[float] = metrics.LEVELS) -> dict[str, float]:
    """NLL, CRPS, RMSE, calibration error, coverage and mean width in per cent by level, of a
    Predictive or a peer's answer.
    """
    y = y.double().flatten()
    crps = answer.crps(y).mean() if isinstance(answer, GaussianMixture) else metrics.crps(answer, y)
    found = {"nll": metrics.nll(answer, y), "crps": crps, "rmse": metrics.rmse(answer, y)}
    found["calibration"] = metrics.calibration_error(answer, y)
    for level in levels:
        ends = answer.interval(level).double()
        found[f"cover{round(100 * level)}"] = (
            100 * ((y >= ends[:, 0]) & (y <= ends[:, 1])).double().mean()
        )
        found[f"width{round(100 * level)}"] = (ends[:, 1] - ends[:, 0]).mean()
    return {name: float(value) for name, value in found.items()}
