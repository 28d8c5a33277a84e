"""The options and the result of a refit of the weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from ssla.likelihoods import Likelihood
from ssla.maths import linalg
from ssla.refit.increments import FISHER
from ssla.refit.weights.anderson import Progress

EXACT, TRACES, FROZEN, STRUCTURE = "exact", "traces", "frozen", "structure"
HESSIAN = "hessian"
LOGDETS = (EXACT, TRACES, FROZEN, STRUCTURE)
FALLBACK, NAN, RAISE = "fallback", "nan", "raise"
FAILURES = (FALLBACK, NAN, RAISE)
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
    """The increments of M tasks, each at its own mode, and how they were computed. All are (M,)."""

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
        """The un-normalised log densities (M,)."""
        return self.likelihood + self.prior + self.curvature

    @staticmethod
    def untried(count: int) -> Solved:
        """Return `count` tasks that were not solved: NaN, and not converged."""
        nan = torch.full((count,), torch.nan, dtype=torch.float64)
        no = torch.zeros(count, dtype=torch.bool)
        return Solved(nan, nan, nan, no, no, no.long(), nan, error=torch.zeros_like(nan))

    def with_tasks(self, tasks: Tensor, answers: Solved) -> Solved:
        """Replace the answers of some tasks (k,)."""
        columns = zip(self, answers, strict=True)
        return Solved(*(before.index_copy(0, tasks, after) for before, after in columns))


class Engine(Protocol):
    """Refits at fixed inputs for any tasks (row of x (M,), y (M, …))."""

    @property
    def tasks_at_once(self) -> int:
        """The number of tasks that `solve` should get in one call."""
        ...

    def solve(self, x_rows: Tensor, y: Tensor, progress: Progress | None = None) -> Solved:
        """Refit each task at its own mode.

        progress: called with the number of tasks that converged (see `Progress`).
        """
        ...

    def stuck(self, x_rows: Tensor, y: Tensor) -> Tensor:
        """Return which tasks do not approach a mode in a few gradients (M,), because none is near
        θ̂.

        It is for a trial before many tasks.
        """
        ...

    def modes(self, x_rows: Tensor, y: Tensor) -> Tensor:
        """Return θ̃ of each task (M, P)."""
        ...


def curvature_of(likelihood: Likelihood, kind: str, y: Tensor, f: Tensor) -> Tensor:
    """Return Λ of one kind at outputs f (…, C): (…, C, C), which may broadcast.

    kind: FISHER for the Fisher information; any other kind has the observed curvature.
    """
    return likelihood.fisher(f) if kind == FISHER else likelihood.precision(y, f)


def new_row_increment(root: Tensor, precision: Tensor) -> tuple[Tensor, Tensor]:
    """Return −½ log|I + ΛK| (m,), and where it exists (m,): the determinant frozen at θ̂ but for
    the new row.

    root R (m, C, C) with R Rᵀ = K, precision Λ (m, C, C). It leaves out tr H⁻¹(H(θ̃) − H(θ̂)),
    which is O(1/n).
    """
    factor = linalg.factorise_identity_plus(root, precision)
    return torch.where(factor.positive, -0.5 * factor.logdet(), torch.nan), factor.positive


def new_row_pull(likelihood: Likelihood, y: Tensor, f: Tensor, root: Tensor, Jz: Tensor) -> Tensor:
    """Return u = (I + ΛK)⁻¹Λ Jz at each task's new row (m, C), for Jz (m, C).

    By Woodbury's formula it is what the curvature of that row takes off a step z. Λ is the observed
    precision at outputs f (m, C), and the Fisher information where that makes I + RᵀΛR indefinite:
    it steers a step and is in no answer.
    """
    precision = likelihood.precision(y, f)
    factor = linalg.factorise_identity_plus(root, precision)
    indefinite = (~factor.positive).nonzero().squeeze(-1)
    if indefinite.numel():
        precision = precision.clone()
        precision[indefinite] = likelihood.fisher(f[indefinite])
        factor = linalg.factorise_identity_plus(root, precision)
    v = (precision @ Jz.unsqueeze(-1)).squeeze(-1)
    white = factor.solve(linalg.multiply_root_transposed(root, v))
    return v - (precision @ linalg.multiply_root(root, white).unsqueeze(-1)).squeeze(-1)


def matrices_at_once(budget: int, size: int) -> int:
    """Return how many P×P matrices of `size` may be formed together, at least one."""
    return max(min(MATRICES_AT_ONCE, budget // 4) // (8 * 4 * size * size), 1)
