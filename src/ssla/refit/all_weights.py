"""Refits of any set of weights: all tasks at once through `torch.func`, preconditioned by the fitted curvature.

The network is run in float64 for m parameter vectors at a time; gradients come by one backward pass through all of them. Few
weights are preconditioned with their exact Hessian at θ̂, many with the fitted structure, to which Anderson's mixing adds what
the structure leaves out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from ssla.data import Inputs, as_inputs, map_inputs, row_count
from ssla.likelihoods import Likelihood
from ssla.network.any_parameters import AnyParameters
from ssla.numerics import linalg
from ssla.refit.anderson import SHARED_STEPS, Found, Progress, Slope, ascend, finished, saddle_free
from ssla.refit.determinants import SMALL, Determinants
from ssla.refit.increments import at_mode
from ssla.refit.rows import PriorChange, TrainingRows, check_seen, leading, open_rows, solve_rows, take
from ssla.refit.solved import HESSIAN, Options, Solved, own_pull
from ssla.state import AS_IS, State
from ssla.structures.jacobians import LayerJacobian

MOST_TASKS = 256
TRIAL_STEPS = 40  # gradients of a trial: twice as many as a refit to 1e-3 takes
PROGRESS = 0.1  # a trial that comes nearer than this part of the way is not stuck


@dataclass(frozen=True, eq=False)
class ManyNetworks:
    """f_θ for many θ at once, in float64 on the CPU."""

    network: AnyParameters

    def one(self, theta: Tensor, x: Inputs) -> Tensor:
        """θ (P,) -> f (b, C)."""
        return self.network.run(self.network.layout.unpack(theta), x)

    def same_rows(self, thetas: Tensor, x: Inputs) -> Tensor:
        """Every θ (m, P) on the same rows: (m, b, C)."""
        return self._mapped(lambda theta: self.one(theta, x), thetas)

    def own_rows(self, thetas: Tensor, x: Inputs) -> Tensor:
        """θ (m, P), each on its own row of x: (m, C)."""
        return self._mapped(lambda theta, row: self.one(theta, leading(row)).squeeze(0), thetas, x)

    @staticmethod
    def _mapped(function: Callable[..., Tensor], *values: Any) -> Tensor:
        try:
            result: Tensor = torch.func.vmap(function)(*values)
        except RuntimeError:  # a layer without a batching rule (recurrent ones): task by task
            index = torch.arange(len(values[0]))
            result = torch.stack([function(*(take(value, i) for value in values)) for i in index])
        return result

    def gradient(self, thetas: Tensor, x: Inputs, score: Callable[[Tensor], Tensor], own: bool = False) -> tuple[Tensor, Tensor]:
        """Σ_i J_i(θ)ᵀ score(f_i) for each θ (m, P), and the outputs."""
        run = self.own_rows if own else self.same_rows
        with torch.enable_grad():
            free = thetas.detach().clone().requires_grad_(True)
            f = run(free, x)
            (total,) = torch.autograd.grad(f, free, score(f.detach()))
        return total, f.detach()


@dataclass(frozen=True, eq=False)
class AllWeightsRefit:
    """All refits of one posterior's weights at inputs x. `solve` takes any tasks (row of x, y)."""

    posterior: State
    options: Options
    many: ManyNetworks
    rows: TrainingRows  # inputs in float64
    x: Inputs
    f: Tensor  # f̂ at x (N, C)
    jacobian: Tensor  # J at x (N, C, P)
    gradient: Tensor  # ∇ℓ_D(θ̂) (P,)
    precondition: Callable[[Tensor], Tensor]  # H⁻¹ on the rows of (m, P)
    determinants: Determinants

    @property
    def law(self) -> Likelihood:
        return self.posterior.likelihood.predictive

    @cached_property
    def prior(self) -> PriorChange:
        return PriorChange(self.posterior.bound_prior, self.posterior.theta)

    @property
    def tasks_at_once(self) -> int:
        frozen = self.many.network.frozen
        rows = min(self.posterior.network.rows_at_once(self.posterior.memory_budget), self.posterior.statistics.n)
        each = 8 * self.gradient.numel() * (3 * self.options.memory + 16) + 6 * frozen.bytes_per_row * rows
        return max(min(self.posterior.memory_budget // 2 // each, MOST_TASKS), 1)

    def solve(self, where: Tensor, y: Tensor, progress: Progress | None = None) -> Solved:
        """Tasks (row of x, y): the three increments at each one's own mode."""
        group = _Group(self, where, y)
        found = self._ascend(group, self.options.max_steps, progress)
        likelihood, prior, own = group.values(found.point)
        curvature, fallback, positive = self.determinants(found.point, own, y, group.x, group.root)
        converged = found.converged & positive & torch.isfinite(likelihood + prior + curvature)
        return Solved(likelihood, prior, curvature, fallback, converged, found.steps, found.norm)

    def stuck(self, where: Tensor, y: Tensor) -> Tensor:
        """Whether √(gᵀP⁻¹g) has not fallen to a tenth of its value at θ̂ after TRIAL_STEPS gradients.

        At a mode each few gradients bring a digit. At a saddle the objective rises without bound along some direction, or to a
        mode far away.
        """
        group = _Group(self, where, y)
        at_start = group.evaluate(torch.zeros(len(where), self.gradient.numel(), dtype=torch.float64), torch.arange(len(where)))
        before = (at_start.gradient * at_start.step).sum(-1).clamp_min(0).sqrt()
        found = self._ascend(group, min(TRIAL_STEPS, self.options.max_steps))
        return ~(found.converged | (found.norm <= PROGRESS * before))

    def modes(self, where: Tensor, y: Tensor) -> Tensor:
        return self.posterior.theta + self._ascend(_Group(self, where, y), self.options.max_steps).point

    def _ascend(self, group: _Group, most: int, progress: Progress | None = None) -> Found:
        """With the shared preconditioner; tasks of few weights that have not converged continue with their own Hessians."""
        tolerance = self.options.tolerance
        small = self.gradient.numel() <= SMALL
        first = min(most, SHARED_STEPS) if small else most
        guess, memory = group.start(), self.options.memory  # of a linearised network: a direction, perhaps too long
        zero = torch.zeros_like(guess)
        found = ascend(group.evaluate, zero, tolerance=tolerance, max_steps=first, memory=memory, toward=guess, progress=progress)
        own = lambda rest: group.take(rest).evaluate_newton  # noqa: E731
        return finished(found, own, tolerance=tolerance, max_steps=most - first, progress=progress)


@dataclass(frozen=True, eq=False)
class _Group:
    """m tasks that are solved together. Points are θ − θ̂ (m, P)."""

    refit: AllWeightsRefit
    where: Tensor
    y: Tensor

    @cached_property
    def x(self) -> Inputs:
        return take(self.refit.x, self.where)

    @cached_property
    def jacobian(self) -> Tensor:
        return self.refit.jacobian[self.where]

    @cached_property
    def pulled(self) -> Tensor:
        """H⁻¹Jᵀ of each task's input (m, C, P)."""
        places, index = self.where.unique(return_inverse=True)
        J = self.refit.jacobian[places]
        return self.refit.precondition(J.flatten(0, 1)).reshape(J.shape)[index]

    @cached_property
    def root(self) -> Tensor:
        K = self.jacobian @ self.pulled.mT
        return linalg.root((K + K.mT) / 2)

    def start(self) -> Tensor:
        """The refit of the linearised model: θ̂ + H⁻¹Jᵀu."""
        f = self.refit.f[self.where]
        if not self.refit.law.linear_domain:
            return torch.zeros(len(f), self.jacobian.shape[-1], dtype=torch.float64)
        pull = at_mode(self.refit.law, self.y, f, self.root).pull
        return (pull.unsqueeze(-2) @ self.pulled).squeeze(-2)

    def take(self, tasks: Tensor) -> _Group:
        if len(tasks) == len(self.y):
            return self
        part = _Group(self.refit, self.where[tasks], self.y[tasks])
        part.__dict__.update(pulled=self.pulled[tasks], root=self.root[tasks])  # solved once for the whole group
        return part

    def evaluate(self, point: Tensor, tasks: Tensor) -> Slope:
        """The gradient, and (H + JᵀΛJ)⁻¹ of it with H and J at θ̂."""
        group = self.take(tasks)
        total, own = group.gradient(point)
        return Slope(total, group._step(total, own))

    def evaluate_newton(self, point: Tensor, tasks: Tensor) -> Slope:
        """The gradient, and |H̃|⁻¹ of it with the task's own Hessian where it stands."""
        group = self.take(tasks)
        total, _ = group.gradient(point)
        H = self.refit.determinants.full(HESSIAN, self.refit.posterior.theta + point, group.y, group.x)
        return Slope(total, saddle_free(H, total))

    def gradient(self, point: Tensor) -> tuple[Tensor, Tensor]:
        """Of ℓ_D + log p(y|x,·) + log π − g₀ᵀ(θ−θ̂) (m, P); and the outputs at x (m, C)."""
        refit, law, likelihood = self.refit, self.refit.law, self.refit.posterior.likelihood
        theta = refit.posterior.theta + point
        total, own = refit.many.gradient(theta, self.x, lambda f: law.score(self.y, f), own=True)
        outside = torch.zeros(len(point), dtype=torch.bool)
        for block in refit.rows:

            def score(f: Tensor, block: Any = block) -> Tensor:
                value = likelihood.score(block.y, f)
                return value if block.weights is None else value * block.weights.unsqueeze(-1)

            part, f = refit.many.gradient(theta, block.x, score)
            total = total + part
            if not likelihood.linear_domain:
                outside |= ~torch.isfinite(likelihood.log_prob(block.y, f)).all(-1)
        total = total + refit.prior.gradient(point)
        if refit.posterior.mode == AS_IS:
            total = total + refit.posterior.bound_prior.gradient(refit.posterior.theta)
        else:
            total = total - refit.gradient
        if not law.linear_domain:
            outside |= ~torch.isfinite(law.log_prob(self.y, own))
        return torch.where(outside.unsqueeze(-1), torch.nan, total), own

    def _step(self, gradient: Tensor, own: Tensor) -> Tensor:
        """z − H⁻¹Jᵀ(I + ΛK)⁻¹ΛJz with z = H⁻¹g: Woodbury."""
        z = self.refit.precondition(gradient)
        u = own_pull(self.refit.law, self.y, own, self.root, (self.jacobian @ z.unsqueeze(-1)).squeeze(-1))
        return z - (u.unsqueeze(-2) @ self.pulled).squeeze(-2)

    def values(self, point: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Likelihood increment (with the tilt), prior increment (m,), and the outputs at x (m, C)."""
        refit, likelihood = self.refit, self.refit.posterior.likelihood
        theta = refit.posterior.theta + point
        with torch.no_grad():
            own = refit.many.own_rows(theta, self.x)
            total = refit.law.log_prob(self.y, own)
            for block in refit.rows:
                change = likelihood.log_prob_difference(block.y, refit.many.same_rows(theta, block.x), block.f)
                total = total + (change if block.weights is None else change * block.weights).sum(-1)
        if refit.posterior.mode != AS_IS:
            slope = refit.gradient + refit.posterior.bound_prior.gradient(refit.posterior.theta)
            total = total - point @ slope
        return total, refit.prior.value(point), own


def open_all_weights(posterior: State, x: Inputs, options: Options, data: Any) -> AllWeightsRefit:
    """Stage one: a pass over the data for the gradient at θ̂ (and the Hessian of few weights), J at x."""
    network = posterior.network
    if not isinstance(network, AnyParameters):
        raise TypeError(f"A refit of the weights does not support networks of type {type(network).__name__}. Use refit='output'.")
    many = ManyNetworks(replace(network, rest=_in_double(network.rest)))

    def prepare(inputs: Inputs) -> tuple[Inputs, Tensor]:
        wide = map_inputs(_double, inputs)
        with torch.no_grad():
            return wide, many.one(posterior.theta, wide)

    rows = open_rows(posterior, data, prepare)
    n, gradient = 0, torch.zeros_like(posterior.theta)
    for block in rows:
        n += row_count(block.x)
        score = block.weighted(posterior.likelihood.score(block.y, block.f)).unsqueeze(0)
        gradient += many.gradient(posterior.theta.unsqueeze(0), block.x, score.expand_as)[0].squeeze(0)
    check_seen(posterior, n, gradient)
    determinants = Determinants(posterior, options, many.one, rows)
    factor = determinants.start_factor
    wide, f = prepare(network.cast(as_inputs(x)))
    parts = [J.double() for _, J in posterior.linearised(x)]
    return AllWeightsRefit(
        posterior=posterior,
        options=options,
        many=many,
        rows=rows,
        x=wide,
        f=f,
        jacobian=torch.cat([J.dense().values for J in parts if isinstance(J, LayerJacobian)]),
        gradient=gradient,
        precondition=lambda v: solve_rows(posterior.operator.solve, factor, v),
        determinants=determinants,
    )


def _double(part: Tensor) -> Tensor:
    return part.to("cpu", torch.float64) if part.is_floating_point() else part.to("cpu")


def _in_double(named: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: _double(value) for name, value in named.items()}
