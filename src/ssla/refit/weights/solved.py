"""The options and the result of a refit of the weights, and the `Engine` that solves tasks.

Terms and symbols are those of `ssla.refit.weights`.
"""

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
    """The options of refits, as `WeightRefit` describes them, with all defaults resolved."""

    tolerance: float  # in posterior standard deviations
    max_steps: int  # gradients of each task
    curvature: str  # OBSERVED, FISHER or HESSIAN
    logdet: str  # one of LOGDETS
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
    """Refits at fixed inputs x, for any tasks: rows of x (M,) and targets y (M, …).

    All that does not depend on y is computed when an engine is opened.
    """

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
        with the number of tasks that converged (see `Progress`). Tasks that fail are returned where
        they ended, and marked as not converged.
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

        x_rows (M,): the row of x of each task. y (M, …): the target that is added. progress: called
        with the number of tasks that converged (see `Progress`). at: None, or a result of
        `find_modes` for other targets at the same rows; no mode is searched then, and the
        increments of y are computed at those points. Tasks that fail are marked as not converged.
        """
        ...

    def find_stuck(self, x_rows: Tensor, y: Tensor) -> Tensor:
        """Return a mask of the tasks (M,) that do not approach a mode in a few gradients.

        Such a task has no mode near θ̂. It is a cheap trial before many tasks. x_rows
        (M,), y (M, …): see `solve`.
        """
        ...

    def find_weights_at_modes(self, x_rows: Tensor, y: Tensor) -> Tensor:
        """Find the mode of each task, and return its weights θ̃ (M, P).

        x_rows (M,), y (M, …): see `solve`. Tasks that fail are returned where they ended.
        """
        ...


def compute_row_curvature(
    likelihood: Likelihood, curvature_kind: str, y: Tensor, f: Tensor
) -> Tensor:
    """Compute Λ of one kind at outputs f (…, C): (…, C, C), or a shape that broadcasts to it.

    y (…): the targets. curvature_kind: FISHER for the Fisher information; any other kind means the
    observed curvature.
    """
    return likelihood.fisher(f) if curvature_kind == FISHER else likelihood.precision(y, f)


def compute_new_row_increment(root: Tensor, precision: Tensor) -> tuple[Tensor, Tensor]:
    """Compute −½ log|I + ΛK| (m,), and where it exists (m,); NaN where it does not.

    It is the curvature increment with the training rows' curvature frozen at θ̂: this leaves out tr
    H⁻¹ΔH, which is O(1/n). root: R with R Rᵀ = K (m, C, C). precision: Λ of each task's new
    row (m, C, C). It exists where I + RᵀΛR is positive definite.
    """
    factor = linalg.factorise_identity_plus(root, precision)
    return torch.where(factor.positive, -0.5 * factor.logdet(), torch.nan), factor.positive


def compute_new_row_pull(
    likelihood: Likelihood, y: Tensor, f: Tensor, root: Tensor, Jz: Tensor
) -> Tensor:
    """Compute u = (I + ΛK)⁻¹Λ Jz at each task's new row (m, C), for Jz (m, C).

    By Woodbury's formula a step z = H⁻¹g becomes z − H⁻¹Jᵀu = (H + JᵀΛJ)⁻¹g. Λ is the observed
    curvature of target y (m, …) at outputs f (m, C), and the Fisher information where the observed
    one makes I + RᵀΛR indefinite: u only steers steps and is in no answer. root: R with R Rᵀ = K
    (m, C, C).
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
