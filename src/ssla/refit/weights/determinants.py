"""−½[log|H̃(θ̃)| − log|H(θ̂)|] when every weight may move: exact for few of them or few rows,
frozen, or by the structure.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ssla.curvature.dense import DenseOperator
from ssla.data import Inputs
from ssla.refit.increments import FISHER
from ssla.refit.weights import all_weights_jacobians as jacobians
from ssla.refit.weights.all_weights_dual import Dual
from ssla.refit.weights.refit_rows import Block, PriorChange, TrainingRows, leading, square, take
from ssla.refit.weights.solved import FROZEN, HESSIAN, STRUCTURE, Options, own_increment

if TYPE_CHECKING:
    from ssla.posterior import Posterior

SMALL = 500  # weights up to which P×P matrices are formed for each task
JACOBIANS_AT_ONCE = 1 << 27  # bytes


@dataclass(frozen=True, eq=False)
class Determinants:
    """Curvature increments of tasks at their modes."""

    posterior: Posterior
    options: Options
    run: Callable[[Tensor, Inputs], Tensor]  # (θ (P,), x) -> f (b, C)
    rows: TrainingRows

    @property
    def size(self) -> int:
        return self.posterior.theta.numel()

    @cached_property
    def start_factor(self) -> Tensor | None:
        """What preconditions the refits: Cholesky of the full Hessian at θ̂ of few weights where it
        is positive definite, else of the fitted dense curvature; None where there is no P×P matrix.
        """
        if self.size <= SMALL:
            factor, info = torch.linalg.cholesky_ex(
                self._curvature(HESSIAN, self.posterior.theta.unsqueeze(0))[0]
            )
            if int(info) == 0:
                start: Tensor = factor
                return start
        operator = self.posterior.operator
        if isinstance(operator, DenseOperator):
            return operator.factor
        return None

    def __call__(
        self, point: Tensor, own: Tensor, y: Tensor, x: Inputs, root: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """θ − θ̂ (m, P), outputs at x (m, C), tasks' y and x, root of K -> increments, Fisher
        fallbacks, positive definite.
        """
        if self.options.logdet == STRUCTURE:
            return self._by_structure(point, y, x)
        kinds = (
            [self.options.curvature]
            if self.options.curvature == FISHER
            else [self.options.curvature, FISHER]
        )
        value = torch.full((len(point),), torch.nan, dtype=torch.float64)
        fallback, positive = (
            torch.zeros(len(point), dtype=torch.bool),
            torch.zeros(len(point), dtype=torch.bool),
        )
        for kind in kinds:
            todo = (~positive).nonzero().squeeze(-1)
            if not todo.numel():
                break
            part = take(x, todo)
            if self.options.logdet == FROZEN:
                law = self.posterior.likelihood.predictive
                precision = (
                    law.fisher(own[todo]) if kind == FISHER else law.precision(y[todo], own[todo])
                )
                value[todo], positive[todo] = own_increment(root[todo], precision)
            else:
                value[todo], positive[todo] = self._exact(point[todo], y[todo], part, kind)
            fallback[todo] = kind != self.options.curvature
        return value, fallback, positive

    # --- exact -----------------------------------------------------------------------------

    @cached_property
    def _dual(self) -> Dual:
        return Dual(self.posterior, self.run, self.rows)

    @cached_property
    def _bases(self) -> dict[str, Tensor | None]:
        return {}

    def _base(self, kind: str) -> Tensor | None:
        """Cholesky of H(θ̂) of one kind; None where it is not positive definite."""
        if kind not in self._bases:
            factor, info = torch.linalg.cholesky_ex(
                self._curvature(kind, self.posterior.theta.unsqueeze(0))[0]
            )
            self._bases[kind] = None if int(info) else factor
        return self._bases[kind]

    def _exact(self, point: Tensor, y: Tensor, x: Inputs, kind: str) -> tuple[Tensor, Tensor]:
        """−½ log|I + L⁻¹(H̃ − H)L⁻ᵀ| with H = L Lᵀ: no two large determinants are subtracted.

        Many weights: in the dual.
        """
        if self.size > SMALL:
            return self._dual(point, y, x, kind)
        base = self._base(kind)
        if base is None:
            return torch.full((len(point),), torch.nan, dtype=torch.float64), torch.zeros(
                len(point), dtype=torch.bool
            )
        rows = min(
            self.posterior.network.rows_at_once(self.posterior.memory_budget),
            self.posterior.statistics.n,
        )
        each = 8 * self.size * (rows * self.posterior.network.outputs * 2 + 6 * self.size)
        values, goods = [], []
        for part in torch.arange(len(point)).split(max(JACOBIANS_AT_ONCE // each, 1)):
            thetas = self.posterior.theta + point[part]
            change = self.full(kind, thetas, y[part], take(x, part)) - base @ base.mT
            half = torch.linalg.solve_triangular(base, change, upper=False)
            white = torch.linalg.solve_triangular(base, half.mT, upper=False)
            eye = torch.eye(self.size, dtype=torch.float64)
            factor, info = torch.linalg.cholesky_ex(eye + (white + white.mT) / 2)
            values.append(-factor.diagonal(dim1=-2, dim2=-1).log().sum(-1))
            goods.append(info == 0)
        return torch.cat(values), torch.cat(goods)

    def full(self, kind: str, thetas: Tensor, y: Tensor, x: Inputs) -> Tensor:
        """H̃ at each task's θ: of the data, the prior and the new observation (m, P, P)."""
        return self._curvature(kind, thetas) + self._own(kind, thetas, y, x)

    def _curvature(self, kind: str, thetas: Tensor) -> Tensor:
        """Of ℓ_D + log π at each θ (m, P): (m, P, P)."""
        prior = PriorChange(self.posterior.bound_prior, self.posterior.theta)
        total = square(self.posterior.bound_prior.precision(self.posterior.theta)).expand(
            len(thetas), -1, -1
        )
        change = prior.precision(thetas - self.posterior.theta)
        total = total if change is None else total + change
        for block in self.rows:
            total = total + (
                self._hessian(thetas, block)
                if kind == HESSIAN
                else self._gauss_newton(kind, thetas, block)
            )
        return total

    def _gauss_newton(self, kind: str, thetas: Tensor, block: Block) -> Tensor:
        """Σ_i J_i(θ)ᵀ Λ_i J_i(θ)."""
        likelihood = self.posterior.likelihood
        J, f = jacobians.of_rows(self.run, thetas, block.x)
        precision = likelihood.fisher(f) if kind == FISHER else likelihood.precision(block.y, f)
        if block.weights is not None:
            precision = precision * block.weights[:, None, None]
        return J.flatten(1, 2).mT @ (precision @ J).flatten(1, 2)

    def _hessian(self, thetas: Tensor, block: Block) -> Tensor:
        """−∇² of the block's log likelihood, the network's second derivatives included."""
        likelihood = self.posterior.likelihood

        def loss(theta: Tensor) -> Tensor:
            return -block.weighted(likelihood.log_prob(block.y, self.run(theta, block.x))).sum()

        H: Tensor = torch.func.vmap(torch.func.jacrev(torch.func.grad(loss)), chunk_size=32)(thetas)
        return H.detach()

    def _own(self, kind: str, thetas: Tensor, y: Tensor, x: Inputs) -> Tensor:
        """The new observation's own curvature at each task's θ: (m, P, P)."""
        law = self.posterior.likelihood.predictive

        if kind == HESSIAN:

            def loss(theta: Tensor, target: Tensor, row: Inputs) -> Tensor:
                return -law.log_prob(target, self.run(theta, leading(row)).squeeze(0))

            H: Tensor = torch.func.vmap(torch.func.jacrev(torch.func.grad(loss)))(thetas, y, x)
            return H.detach()
        J, f = jacobians.of_own(self.run, thetas, x)
        precision = law.fisher(f) if kind == FISHER else law.precision(y, f)
        result: Tensor = J.mT @ precision @ J
        return result

    # --- by structure ----------------------------------------------------------------------

    def _by_structure(self, point: Tensor, y: Tensor, x: Inputs) -> tuple[Tensor, Tensor, Tensor]:
        """The fitted structure, built again at each θ̃ (Fisher; a pass over the data for each
        task: a structure is for one θ).
        """
        network, likelihood = self.posterior.network, self.posterior.likelihood
        law, before = likelihood.predictive, self.posterior.operator.logdet()
        values = []
        for task in range(len(point)):
            theta = self.posterior.theta + point[task]
            sums = self.posterior.statistics.curvature.zero(self.size)
            for block in self.rows:
                f, J = network.linearise(network.cast(block.x), theta)
                sums = sums.add(
                    J.double(), block.weighted(likelihood.fisher(f.double())), block.weights
                )
            f, J = network.linearise(network.cast(take(x, torch.tensor([task]))), theta)
            sums = sums.add(J.double(), law.fisher(f.double()), None)
            values.append(
                -0.5
                * (sums.with_prior(self.posterior.bound_prior.precision(theta)).logdet() - before)
            )
        yes = torch.ones(len(point), dtype=torch.bool)
        return torch.tensor(values, dtype=torch.float64), ~yes, yes
