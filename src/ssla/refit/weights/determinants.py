"""−½[log|H̃(θ̃)| − log|H(θ̂)|] of refits of any weights.

Determinants are exact (few weights or few rows), frozen at θ̂, or those of the fitted structure.

Terms and symbols are those of `ssla.refit.weights`. Here the kind of a curvature may be "hessian"
too: the exact −∇² with the network's second derivatives, where the other kinds have JᵀΛJ for each
row. Few weights are at most SMALL.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ssla.curvature.dense import DenseOperator
from ssla.data import Inputs, take_rows
from ssla.priors import EXACT as EXACT_CONVENTION
from ssla.priors import BoundPrior
from ssla.refit.increments import FISHER
from ssla.refit.weights.all_weights_dual import Dual
from ssla.refit.weights.all_weights_jacobians import (
    compute_jacobians_on_own_rows,
    compute_jacobians_on_same_rows,
)
from ssla.refit.weights.refit_rows import Block, PriorChange, TrainingRows, as_batch, as_matrix
from ssla.refit.weights.solved import (
    FROZEN,
    HESSIAN,
    STRUCTURE,
    Options,
    compute_new_row_increment,
    compute_row_curvature,
)

if TYPE_CHECKING:
    from ssla.posterior import Posterior

SMALL = 500  # a guess: weights up to which P×P matrices are formed for each task
HESSIANS_AT_ONCE = 32  # a guess: networks whose Hessians of a block are computed together
JACOBIANS_AT_ONCE = 1 << 27  # a guess: bytes of Jacobians and matrices formed together


@dataclass(frozen=True, eq=False)
class Determinants:
    """Curvature increments −½[log|H̃(θ̃)| − log|H(θ̂)|] of tasks at points θ − θ̂ (m, P)."""

    posterior: Posterior
    options: Options
    network_outputs: Callable[[Tensor, Inputs], Tensor]  # (θ (P,), x) -> f (b, C)
    rows: TrainingRows
    prior: BoundPrior  # whose curvature is part of H: by the convention it may be none

    @property
    def weight_count(self) -> int:
        """Return the number of weights P."""
        return self.posterior.theta.numel()

    @cached_property
    def start_factor(self) -> Tensor | None:
        """Return the Cholesky factor of the H (P, P) that preconditions the refits.

        For few weights H is the full Hessian at θ̂, if that is positive definite; otherwise it is
        the fitted curvature, if its structure is dense. None without such a factor.
        """
        if self.weight_count <= SMALL:
            hessian = self._factorise_start(HESSIAN)
            if hessian is not None:
                return hessian
        operator = self.posterior.operator
        return operator.factor if isinstance(operator, DenseOperator) else None

    def __call__(
        self, point: Tensor, f_new: Tensor, y: Tensor, x: Inputs, root: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Compute the curvature increments of m tasks at points θ − θ̂ (m, P).

        f_new (m, C): the outputs at the new inputs x (m, …). y (m, …): the new targets. root: R
        with R Rᵀ = K (m, C, C). Returns the increments, which have no meaning where they do not
        exist; where the Fisher information took the place of an indefinite curvature; and where H̃
        is positive definite, so that they exist. All are (m,).
        """
        if self.options.logdet == STRUCTURE:
            return self._compute_increments_by_structure(point, x)
        value = torch.full((len(point),), torch.nan, dtype=torch.float64)
        fallback = torch.zeros(len(point), dtype=torch.bool)
        positive = torch.zeros(len(point), dtype=torch.bool)

        # The kind asked for, then the Fisher information for the tasks where that is indefinite.
        for curvature_kind in dict.fromkeys((self.options.curvature, FISHER)):
            tasks = (~positive).nonzero().squeeze(-1)
            if not tasks.numel():
                break
            if self.options.logdet == FROZEN:
                precision = compute_row_curvature(
                    self.posterior.likelihood.predictive, curvature_kind, y[tasks], f_new[tasks]
                )
                increment = compute_new_row_increment(root[tasks], precision)
            else:
                increment = self._compute_exact_increments(
                    point[tasks], y[tasks], take_rows(x, tasks), curvature_kind
                )
            value[tasks], positive[tasks] = increment
            fallback[tasks] = curvature_kind != self.options.curvature

        return value, fallback, positive

    # --- exact -----------------------------------------------------------------------------

    @cached_property
    def _dual_determinants(self) -> Dual:
        """Return the engine of determinants of many weights, in the space of the outputs."""
        return Dual(self.posterior, self.network_outputs, self.rows)

    @cached_property
    def _start_factors(self) -> dict[str, Tensor | None]:
        """Return the dictionary in which `_factorise_start` stores its results, by kind."""
        return {}

    def _factorise_start(self, curvature_kind: str) -> Tensor | None:
        """Return the Cholesky factor of H(θ̂) of one kind (P, P); None if H(θ̂) is indefinite.

        curvature_kind: OBSERVED, FISHER or HESSIAN. It takes a pass over the data. The result is
        stored for the next call with the same kind.
        """
        if curvature_kind not in self._start_factors:
            H = self._compute_posterior_curvature(
                curvature_kind, self.posterior.theta.unsqueeze(0)
            )[0]
            factor, info = torch.linalg.cholesky_ex(H)
            self._start_factors[curvature_kind] = None if int(info) else factor
        return self._start_factors[curvature_kind]

    def _compute_exact_increments(
        self, point: Tensor, y: Tensor, x: Inputs, curvature_kind: str
    ) -> tuple[Tensor, Tensor]:
        """Compute −½ log|I + L⁻¹(H̃ − H)L⁻ᵀ| with H = L Lᵀ (m,), and where it exists (m,).

        point (m, P). y (m, …), x (m, …): those of the new rows. curvature_kind: of H and H̃. No two
        large determinants are subtracted. More than SMALL weights have the `Dual` in its place. If
        H(θ̂) is indefinite, the values are NaN and none exists.
        """
        if self.weight_count > SMALL:
            return self._dual_determinants(point, y, x, curvature_kind)
        L = self._factorise_start(curvature_kind)
        if L is None:
            nan = torch.full((len(point),), torch.nan, dtype=torch.float64)
            return nan, torch.zeros(len(point), dtype=torch.bool)
        values, positive = [], []

        for tasks in torch.arange(len(point)).split(self._tasks_at_once):
            thetas = self.posterior.theta + point[tasks]
            change = (
                self.compute_augmented_curvature(
                    curvature_kind, thetas, y[tasks], take_rows(x, tasks)
                )
                - L @ L.mT
            )
            # L⁻¹(L⁻¹ΔH)ᵀ = L⁻¹ΔHL⁻ᵀ, as ΔH is symmetric.
            half = torch.linalg.solve_triangular(L, change, upper=False)
            white = torch.linalg.solve_triangular(L, half.mT, upper=False)
            eye = torch.eye(self.weight_count, dtype=torch.float64)
            factor, info = torch.linalg.cholesky_ex(eye + (white + white.mT) / 2)
            values.append(-factor.diagonal(dim1=-2, dim2=-1).log().sum(-1))
            positive.append(info == 0)

        return torch.cat(values), torch.cat(positive)

    @property
    def _tasks_at_once(self) -> int:
        """Return the number of tasks whose P×P matrices are formed together, at least one."""
        network, budget = self.posterior.network, self.posterior.memory_budget
        rows = min(network.rows_at_once(budget), self.posterior.statistics.n)
        # J and ΛJ of a block of rows, and six P×P matrices.
        task_bytes = 8 * self.weight_count * (rows * network.outputs * 2 + 6 * self.weight_count)
        return max(JACOBIANS_AT_ONCE // task_bytes, 1)

    def compute_augmented_curvature(
        self, curvature_kind: str, thetas: Tensor, y: Tensor, x: Inputs
    ) -> Tensor:
        """Compute H̃ of one kind at each θ (m, P): (m, P, P).

        curvature_kind: OBSERVED, FISHER or HESSIAN. It sums the training rows, the prior and a new
        row for each θ, with target y (m, …) and input x (m, …).
        """
        return self._compute_posterior_curvature(
            curvature_kind, thetas
        ) + self._compute_new_row_curvature(curvature_kind, thetas, y, x)

    def _compute_posterior_curvature(self, curvature_kind: str, thetas: Tensor) -> Tensor:
        """Compute −∇²(ℓ_D + log prior) of one kind at each θ (m, P): (m, P, P).

        curvature_kind: OBSERVED, FISHER or HESSIAN. It takes a pass over the training rows.
        """
        theta_hat, bound_prior = self.posterior.theta, self.prior
        total = as_matrix(bound_prior.precision(theta_hat)).expand(len(thetas), -1, -1)
        change = PriorChange(bound_prior, theta_hat).compute_precision_change(thetas - theta_hat)
        total = total if change is None else total + change
        for block in self.rows:
            if curvature_kind == HESSIAN:
                total = total + self._compute_block_hessian(thetas, block)
            else:
                total = total + self._compute_block_gauss_newton(curvature_kind, thetas, block)
        return total

    def _compute_block_gauss_newton(
        self, curvature_kind: str, thetas: Tensor, block: Block
    ) -> Tensor:
        """Compute Σ_i J_i(θ)ᵀ Λ_i J_i(θ) over a block at each θ (m, P): (m, P, P).

        curvature_kind: of Λ, OBSERVED or FISHER.
        """
        J, f = compute_jacobians_on_same_rows(self.network_outputs, thetas, block.x)
        precision = compute_row_curvature(self.posterior.likelihood, curvature_kind, block.y, f)
        if block.weights is not None:
            precision = precision * block.weights[:, None, None]
        return J.flatten(1, 2).mT @ (precision @ J).flatten(1, 2)

    def _compute_block_hessian(self, thetas: Tensor, block: Block) -> Tensor:
        """Compute −∇² of a block's log likelihood at each θ (m, P): (m, P, P).

        The network's second derivatives are included.
        """
        likelihood = self.posterior.likelihood

        def loss(theta: Tensor) -> Tensor:
            """Return minus the block's log likelihood at one θ (P,)."""
            return -block.apply_weights(
                likelihood.log_prob(block.y, self.network_outputs(theta, block.x))
            ).sum()

        hessian = torch.func.jacrev(torch.func.grad(loss))
        # Chunks bound the memory.
        H: Tensor = torch.func.vmap(hessian, chunk_size=HESSIANS_AT_ONCE)(thetas)
        return H.detach()

    def _compute_new_row_curvature(
        self, curvature_kind: str, thetas: Tensor, y: Tensor, x: Inputs
    ) -> Tensor:
        """Compute the curvature of one kind of each new row at its θ (m, P): (m, P, P).

        curvature_kind: OBSERVED, FISHER or HESSIAN. y (m, …), x (m, …): a target and an input for
        each θ.
        """
        new_likelihood = self.posterior.likelihood.predictive
        if curvature_kind == HESSIAN:

            def loss(theta: Tensor, target: Tensor, row: Inputs) -> Tensor:
                """Return minus the log density of one new row at one θ (P,)."""
                f = self.network_outputs(theta, as_batch(row)).squeeze(0)
                return -new_likelihood.log_prob(target, f)

            H: Tensor = torch.func.vmap(torch.func.jacrev(torch.func.grad(loss)))(thetas, y, x)
            return H.detach()
        J, f = compute_jacobians_on_own_rows(self.network_outputs, thetas, x)
        curvature: Tensor = J.mT @ compute_row_curvature(new_likelihood, curvature_kind, y, f) @ J
        return curvature

    # --- by structure ----------------------------------------------------------------------

    def _compute_increments_by_structure(
        self, point: Tensor, x: Inputs
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Compute the increments by the structure, which is fitted again at each θ̃.

        It sums the Fisher information. A structure belongs to one θ, so each task takes a pass over
        the data. point (m, P). x (m, …): the new inputs. Returns what `__call__` returns: no task
        has a fallback, and all determinants exist. Raises NoFactorError if one does not.
        """
        has_prior = self.posterior.convention == EXACT_CONVENTION
        operator = self.posterior.operator if has_prior else self.posterior.data_operator
        start = operator.logdet()
        increments = [
            -0.5
            * (self._compute_structure_logdet(theta, take_rows(x, torch.tensor([task]))) - start)
            for task, theta in enumerate(self.posterior.theta + point)
        ]
        always = torch.ones(len(point), dtype=torch.bool)
        return torch.tensor(increments, dtype=torch.float64), ~always, always

    def _compute_structure_logdet(self, theta: Tensor, x: Inputs) -> float:
        """Compute log|S| of the structure S, fitted at θ (P,) to the training rows and a new input.

        x (1, …): the new input.
        """
        network, likelihood = self.posterior.network, self.posterior.likelihood
        sums = self.posterior.statistics.curvature.zero(self.weight_count)
        for block in self.rows:
            f, J = network.linearise(network.cast(block.x), theta)
            precision = block.apply_weights(likelihood.fisher(f.double()))
            sums = sums.add(J.double(), precision, block.weights)
        f, J = network.linearise(network.cast(x), theta)
        sums = sums.add(J.double(), likelihood.predictive.fisher(f.double()), None)
        return sums.with_prior(self.prior.precision(theta)).logdet()
