"""The options and the result of a refit of the weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from ssla.likelihoods import Likelihood
from ssla.maths import linalg
from ssla.refit.weights.anderson import Progress

EXACT, TRACES, FROZEN, STRUCTURE = "exact", "traces", "frozen", "structure"
HESSIAN = "hessian"
LOGDETS = (EXACT, TRACES, FROZEN, STRUCTURE)
MATRICES_AT_ONCE = 1 << 26  # bytes of P×P matrices formed together


@dataclass(frozen=True)
class Options:
    """The options of one refit. Defaults are resolved."""

    tolerance: float
    max_steps: int
    curvature: str
    logdet: str
    memory: int  # rounds that the ascent mixes


class Solved(NamedTuple):
    """M tasks, each at its own mode: three increments, and how they were computed. All (M,)."""

    likelihood: Tensor
    prior: Tensor
    curvature: Tensor
    fallback: Tensor  # the Fisher in place of an indefinite observed curvature
    converged: Tensor
    steps: Tensor  # evaluations of the gradient
    norm: Tensor  # √(gᵀH⁻¹g) at the end: posterior standard deviations from the mode
    error: Tensor  # standard error of the curvature increment; zero where it is exact

    @property
    def total(self) -> Tensor:
        return self.likelihood + self.prior + self.curvature

    @staticmethod
    def untried(count: int) -> Solved:
        """Tasks that were not solved."""
        nothing, no = (
            torch.full((count,), torch.nan, dtype=torch.float64),
            torch.zeros(count, dtype=torch.bool),
        )
        return Solved(
            nothing, nothing, nothing, no, no, no.long(), nothing, torch.zeros_like(nothing)
        )

    @staticmethod
    def joined(parts: list[Solved]) -> Solved:
        return Solved(*(torch.cat(column) for column in zip(*parts, strict=True)))


class Engine(Protocol):
    """Refits at fixed inputs for any tasks (row of x (M,), y (M, …))."""

    @property
    def tasks_at_once(self) -> int: ...

    def solve(self, where: Tensor, y: Tensor, progress: Progress | None = None) -> Solved:
        """progress: called with the number of tasks that converged (see `Progress`)."""
        ...

    def stuck(self, where: Tensor, y: Tensor) -> Tensor:
        """Which tasks do not approach a mode in a few gradients (M,), because none is near θ̂.

        For a trial before many tasks.
        """
        ...

    def modes(self, where: Tensor, y: Tensor) -> Tensor:
        """θ̃ (M, P)."""
        ...


def own_increment(root: Tensor, precision: Tensor) -> tuple[Tensor, Tensor]:
    """−½ log|I + ΛK|, the determinant frozen at θ̂ but for the new point's own curvature; and where
    it exists.

    Leaves out tr H⁻¹(H(θ̃) − H(θ̂)), which is O(1/n).
    """
    factor = linalg.identity_plus(root, precision)
    return torch.where(factor.positive, -0.5 * factor.logdet(), torch.nan), factor.positive


def own_pull(law: Likelihood, y: Tensor, f: Tensor, root: Tensor, along: Tensor) -> Tensor:
    """u = (I + ΛK)⁻¹Λ Jz at each task's own point: what its curvature takes off a step z by
    Woodbury.  along Jz (m, C) -> (m, C).

    Λ is the observed precision, the Fisher where that makes I + RᵀΛR indefinite: it steers a step,
    not an answer.
    """
    precision = law.precision(y, f)
    factor = linalg.identity_plus(root, precision)
    bad = (~factor.positive).nonzero().squeeze(-1)
    if bad.numel():
        precision = precision.clone()
        precision[bad] = law.fisher(f[bad])
        factor = linalg.identity_plus(root, precision)
    v = (precision @ along.unsqueeze(-1)).squeeze(-1)
    white = factor.solve(linalg.upper_times(root, v))
    return v - (precision @ linalg.lower_times(root, white).unsqueeze(-1)).squeeze(-1)


def at_once(budget: int, size: int) -> int:
    """How many P×P matrices may be formed together."""
    return max(min(MATRICES_AT_ONCE, budget // 4) // (8 * 4 * size * size), 1)
