"""The options and the result of a refit of the weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from ssla.likelihoods import Likelihood
from ssla.maths import linalg
from ssla.refit.increments import FISHER
from ssla.refit.weights.anderson import Ascent, Progress

EXACT, TRACES, FROZEN, STRUCTURE = "exact", "traces", "frozen", "structure"
HESSIAN = "hessian"
LOGDETS = (EXACT, TRACES, FROZEN, STRUCTURE)
FALLBACK, NAN, RAISE = "fallback", "nan", "raise"
FAILURES = (FALLBACK, NAN, RAISE)
MATRICES_AT_ONCE = 1 << 26  # a guess: bytes of P×P matrices formed together


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
    fallback: Tensor  # whether the Fisher replaced an indefinite observed curvature
    converged: Tensor
    steps: Tensor  # evaluations of the gradient
    norm: Tensor  # √(gᵀH⁻¹g) at the end: posterior standard deviations from the mode
    error: Tensor  # standard error of the curvature increment; zero where it is exact

    @property
    def total(self) -> Tensor:
        """Return the un-normalised log densities (M,)."""
        return self.likelihood + self.prior + self.curvature

    @staticmethod
    def untried(count: int) -> Solved:
        """Return the results of `count` tasks that were not solved: NaN, and not converged."""
        nan = torch.full((count,), torch.nan, dtype=torch.float64)
        never = torch.zeros(count, dtype=torch.bool)
        return Solved(
            likelihood=nan,
            prior=nan,
            curvature=nan,
            fallback=never,
            converged=never,
            steps=never.long(),
            norm=nan,
            error=torch.zeros_like(nan),
        )

    def with_tasks(self, tasks: Tensor, answers: Solved) -> Solved:
        """Return these results with the `answers` of some tasks (k,) in the place of theirs."""
        columns = zip(self, answers, strict=True)
        return Solved(*(before.index_copy(0, tasks, after) for before, after in columns))


class Engine(Protocol):
    """Refits at fixed inputs for any tasks (row of x (M,), y (M, …))."""

    @property
    def f(self) -> Tensor:
        """Return f̂ at x (N, C)."""
        ...

    @property
    def tasks_at_once(self) -> int:
        """Return the number of tasks that `solve` should get in one call."""
        ...

    def find_modes(self, x_rows: Tensor, y: Tensor, progress: Progress | None = None) -> Ascent:
        """Find the mode of each task, in the engine's own coordinates.

        x_rows (M,): the row of x of each task. y (M, …): the target that is added. progress: called
        with the number of tasks that converged (see `Progress`).
        """
        ...

    def solve(
        self,
        x_rows: Tensor,
        y: Tensor,
        progress: Progress | None = None,
        at: Ascent | None = None,
    ) -> Solved:
        """Compute the increments of each task at its own mode.

        x_rows (M,): the row of x of each task. y (M, …). progress: called with the number of tasks
        that converged (see `Progress`). at: what `find_modes` returned for other targets at the
        same rows, where the increments are computed in place of the modes for y. Tasks that fail
        are marked as not converged.
        """
        ...

    def find_stuck(self, x_rows: Tensor, y: Tensor) -> Tensor:
        """Return which tasks (M,) do not approach a mode in a few gradients: none is near θ̂.

        It is a trial before many tasks. x_rows (M,), y (M, …).
        """
        ...

    def find_weights_at_modes(self, x_rows: Tensor, y: Tensor) -> Tensor:
        """Return θ̃ of each task (M, P), for x_rows (M,) and y (M, …)."""
        ...


def compute_row_curvature(
    likelihood: Likelihood, curvature_kind: str, y: Tensor, f: Tensor
) -> Tensor:
    """Return Λ of one kind at outputs f (…, C): (…, C, C), or a shape that broadcasts to it.

    curvature_kind: FISHER for the Fisher information; any other kind has the observed curvature.
    """
    return likelihood.fisher(f) if curvature_kind == FISHER else likelihood.precision(y, f)


def compute_new_row_increment(root: Tensor, precision: Tensor) -> tuple[Tensor, Tensor]:
    """Return −½ log|I + ΛK| (m,), and where it exists (m,); NaN where it does not.

    It is the curvature increment with the training rows' curvature frozen at θ̂. root R (m, C, C)
    with R Rᵀ = K, precision Λ (m, C, C) of the new row. It leaves out tr H⁻¹(H(θ̃) − H(θ̂)), which
    is O(1/n).
    """
    factor = linalg.factorise_identity_plus(root, precision)
    return torch.where(factor.positive, -0.5 * factor.logdet(), torch.nan), factor.positive


def compute_new_row_pull(
    likelihood: Likelihood, y: Tensor, f: Tensor, root: Tensor, Jz: Tensor
) -> Tensor:
    """Return u = (I + ΛK)⁻¹Λ Jz at each task's new row (m, C), for Jz (m, C).

    By Woodbury's formula a step z with H⁻¹ becomes z − H⁻¹Jᵀu with (H + JᵀΛJ)⁻¹. Λ is the observed
    precision at outputs f (m, C), and the Fisher information where that makes I + RᵀΛR indefinite:
    u only steers steps and is in no answer. root R (m, C, C) with R Rᵀ = K.
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


def count_matrices_at_once(budget: int, size: int) -> int:
    """Return how many tasks may form their P×P matrices together, at least one.

    budget: the memory budget in bytes; size: the number of weights P. A task counts as four
    matrices in float64.
    """
    return max(min(MATRICES_AT_ONCE, budget // 4) // (8 * 4 * size * size), 1)
