"""Refits of any set of weights: all tasks at once through `torch.func`, preconditioned by the
fitted curvature.

The network is run for m parameter vectors at a time; gradients come by one backward pass through
all of them. Few weights are preconditioned with their exact Hessian at θ̂, many with the fitted
structure, to which Anderson's mixing adds what the structure leaves out. Gradients of many weights
are in float32 until they are as small as its rounding allows; every task ends with gradients in
float64, which decide whether it has converged. `reference` computes the same for one task, without
these tricks. What they bring (docs/notes/refits.md):

gradients in float32      0.28 ms for each task in place of 0.55 ms (2,851 weights, 300 rows)
Anderson's mixing         not measured alone; longer mixed steps took three classes from 66 to 88
                          gradients to 15 to 19
the fitted structure      24.5 gradients, where the exact Hessian at θ̂ takes 16 to 17 and costs
                          seconds to build (2,851 weights)
a linearised start        not measured alone
batched products          not measured alone
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ssla._checks import warn
from ssla.curvature.jacobians import LayerJacobian
from ssla.curvature.woodbury import WoodburyOperator
from ssla.data import Inputs, as_inputs, map_inputs, row_count
from ssla.likelihoods import Likelihood
from ssla.maths import linalg
from ssla.network.any_parameters import AnyParameters
from ssla.network.stacked import ROWS_AT_ONCE, Stacked, stacked
from ssla.refit.increments import at_mode
from ssla.refit.interrupts import Interrupted
from ssla.refit.weights.anderson import (
    SHARED_STEPS,
    Found,
    Progress,
    Slope,
    ascend,
    finished,
    saddle_free,
)
from ssla.refit.weights.determinants import SMALL, Determinants
from ssla.refit.weights.refit_rows import (
    PriorChange,
    TrainingRows,
    check_seen,
    leading,
    open_rows,
    solve_rows,
    take,
)
from ssla.refit.weights.solved import HESSIAN, Options, Solved, own_pull
from ssla.report import AS_IS

if TYPE_CHECKING:
    from ssla.posterior import Posterior

MOST_TASKS = 256
TRIAL_STEPS = 40  # gradients of a trial: twice as many as a refit to 1e-3 takes
ABOVE_ROUNDING = (
    5.0  # times the rounding error of float32 gradients: from here on they are in float64
)
NEARLY = 0.9  # of the tolerance: where float32 ends, so that float64 confirms it
# posterior standard deviations from a mode after the shared steps: Newton starts at θ̂ again
LOST = 0.1
PROGRESS = 0.1  # a trial that comes nearer than this part of the way is not stuck


@dataclass(frozen=True, eq=False)
class ManyNetworks:
    """f_θ for many θ at once on the CPU, in the dtype of θ: by matrix products where the
    network is a chain, else by `vmap`.
    """

    network: AnyParameters
    chain: Stacked | None = None

    def one(self, theta: Tensor, x: Inputs) -> Tensor:
        """θ (P,) -> f (b, C)."""
        return self.network.run(self.network.layout.unpack(theta), x)

    def same_rows(self, thetas: Tensor, x: Inputs) -> Tensor:
        """Every θ (m, P) on the same rows: (m, b, C)."""
        if self.chain is not None and isinstance(x, Tensor):
            chain, rows = self.chain, x
            return torch.cat(
                [chain.run(chain.parameters(part), rows) for part in thetas.split(_at_once(rows))]
            )
        return self._mapped(lambda theta: self.one(theta, x), thetas)

    def own_rows(self, thetas: Tensor, x: Inputs) -> Tensor:
        """θ (m, P), each on its own row of x: (m, C)."""
        if self.chain is not None and isinstance(x, Tensor):
            return self.chain.run(self.chain.parameters(thetas), x.unsqueeze(1)).squeeze(1)
        return self._mapped(lambda theta, row: self.one(theta, leading(row)).squeeze(0), thetas, x)

    @staticmethod
    def _mapped(function: Callable[..., Tensor], *values: Any) -> Tensor:
        try:
            result: Tensor = torch.func.vmap(function)(*values)
        except RuntimeError:  # a layer without a batching rule (recurrent ones): task by task
            index = torch.arange(len(values[0]))
            result = torch.stack([function(*(take(value, i) for value in values)) for i in index])
        return result

    def gradient(
        self, thetas: Tensor, x: Inputs, score: Callable[[Tensor], Tensor], own: bool = False
    ) -> tuple[Tensor, Tensor]:
        """Σ_i J_i(θ)ᵀ score(f_i) for each θ (m, P), and the outputs.

        `score` is elementwise in the θ where x is shared.
        """
        if self.chain is not None and isinstance(x, Tensor):
            if own:
                f, total = self.chain.outputs_and_gradient(
                    thetas, x.unsqueeze(1), lambda f: score(f.squeeze(1)).to(f.dtype).unsqueeze(1)
                )
                return total, f.squeeze(1)
            cast = lambda f: score(f).to(f.dtype)  # noqa: E731
            parts = [
                self.chain.outputs_and_gradient(part, x, cast) for part in thetas.split(_at_once(x))
            ]
            return torch.cat([part[1] for part in parts]), torch.cat([part[0] for part in parts])
        run = self.own_rows if own else self.same_rows
        with torch.enable_grad():
            free = thetas.detach().clone().requires_grad_(True)
            f = run(free, x)
            (total,) = torch.autograd.grad(f, free, score(f.detach()).to(f.dtype))
        return total, f.detach()


def _at_once(x: Tensor) -> int:
    return max(ROWS_AT_ONCE // len(x), 1)


@dataclass(frozen=True, eq=False)
class AllWeightsRefit:
    """All refits of one posterior's weights at inputs x. `solve` takes any tasks (row of x, y)."""

    posterior: Posterior
    options: Options
    many: ManyNetworks
    single: ManyNetworks  # the same in float32
    rows: TrainingRows  # inputs in float64
    x: Inputs
    f: Tensor  # f̂ at x (N, C)
    jacobian: Tensor  # J at x (N, C, P)
    gradient: Tensor  # ∇ℓ_D(θ̂) (P,)
    precondition: Callable[[Tensor], Tensor]  # H⁻¹ on the rows of (m, P)
    precondition_single: Callable[[Tensor], Tensor]  # the same in float32
    determinants: Determinants
    interrupted: Interrupted = field(default_factory=Interrupted)

    @property
    def law(self) -> Likelihood:
        return self.posterior.likelihood.predictive

    @cached_property
    def prior(self) -> PriorChange:
        return PriorChange(self.posterior.bound_prior, self.posterior.theta)

    @property
    def tasks_at_once(self) -> int:
        frozen = self.many.network.frozen
        rows = min(
            self.posterior.network.rows_at_once(self.posterior.memory_budget),
            self.posterior.statistics.n,
        )
        each = (
            8 * self.gradient.numel() * (4 * self.options.memory + 16)
            + 6 * frozen.bytes_per_row * rows
        )
        return max(min(self.posterior.memory_budget // 2 // each, MOST_TASKS), 1)

    def solve(self, where: Tensor, y: Tensor, progress: Progress | None = None) -> Solved:
        """Tasks (row of x, y): the three increments at each one's own mode.

        Ctrl-C ends the ascent: tasks that have converged keep their answers, the others and all
        later tasks have not converged.
        """
        if self.interrupted.asked:
            return Solved.untried(len(where))
        with self.interrupted.listening():
            group = _Group(self, where, y)
            found = self._ascend(group, self.options.max_steps, progress)
            likelihood, prior, own = group.values(found.point)
            curvature, fallback, positive = self.determinants(
                found.point, own, y, group.x, group.root
            )
            converged = found.converged & positive & torch.isfinite(likelihood + prior + curvature)
        if self.interrupted.asked:
            warn(
                f"Refits of the weights were interrupted: {int(converged.sum()):,} of "
                f"{len(where):,} under way were finished. The others, and all that had not "
                "started, count as not converged.",
                RuntimeWarning,
            )
        error = torch.zeros_like(curvature)
        return Solved(
            likelihood, prior, curvature, fallback, converged, found.steps, found.norm, error
        )

    def stuck(self, where: Tensor, y: Tensor) -> Tensor:
        """Whether √(gᵀP⁻¹g) does not fall to a tenth of its value at θ̂ within TRIAL_STEPS
        gradients.

        At a mode each few gradients bring a digit. At a saddle the objective rises without bound
        along some direction, or to a mode far away.
        """
        group = _Group(self, where, y)
        at_start = group.evaluate(
            torch.zeros(len(where), self.gradient.numel(), dtype=torch.float64),
            torch.arange(len(where)),
        )
        before = (at_start.gradient * at_start.step).sum(-1).clamp_min(0).sqrt()
        enough = max(PROGRESS * float(before.min()), self.options.tolerance)
        found = self._ascend(group, min(TRIAL_STEPS, self.options.max_steps), tolerance=enough)
        return ~(found.norm <= (PROGRESS * before).clamp_min(self.options.tolerance))

    def modes(self, where: Tensor, y: Tensor) -> Tensor:
        return (
            self.posterior.theta
            + self._ascend(_Group(self, where, y), self.options.max_steps).point
        )

    @cached_property
    def rounding(self) -> float:
        """√(eᵀH⁻¹e) of the error e of the data's gradient at θ̂ in float32."""
        likelihood, theta = self.posterior.likelihood, self.posterior.theta.float().unsqueeze(0)
        error = -self.gradient
        for block in self.rows:
            score = lambda f, b=block: b.weighted(likelihood.score(b.y, f[0].double())).unsqueeze(0)  # noqa: E731
            error = (
                error
                + self.single.gradient(theta, map_inputs(_single, block.x), score)[0]
                .squeeze(0)
                .double()
            )
        size = float(error @ self.precondition(error.unsqueeze(0)).squeeze(0))
        return max(size, 0.0) ** 0.5 if size == size else float("inf")

    def _ascend(
        self,
        group: _Group,
        most: int,
        progress: Progress | None = None,
        tolerance: float | None = None,
    ) -> Found:
        """With the shared preconditioner; tasks of few weights that have not converged continue
        with their own Hessians.
        """
        tolerance = self.options.tolerance if tolerance is None else tolerance
        small = self.gradient.numel() <= SMALL
        first = min(most, SHARED_STEPS) if small else most
        memory = self.options.memory
        guess: Tensor | None = group.start  # of a linearised network: a direction, perhaps too long
        earlier, begin = None, torch.zeros(len(group.y), self.gradient.numel(), dtype=torch.float64)
        if not small and self.rounding * ABOVE_ROUNDING < PROGRESS:
            earlier = self._in_single(group, group.start, most, tolerance)
            begin, guess = earlier.point.double(), None
        found = ascend(
            group.evaluate,
            begin,
            tolerance=tolerance,
            max_steps=first,
            memory=memory,
            toward=guess,
            progress=progress,
            earlier=earlier,
            stop=self.interrupted,
        )
        lost = (~found.converged & (found.norm > LOST)).unsqueeze(-1)
        found = (
            replace(found, point=torch.where(lost, torch.zeros_like(found.point), found.point))
            if small
            else found
        )
        own = lambda rest: group.take(rest).evaluate_newton  # noqa: E731
        return finished(found, own, tolerance=tolerance, max_steps=most - first, progress=progress)

    def _in_single(self, group: _Group, guess: Tensor, most: int, tolerance: float) -> Found:
        """The first part of the ascent, with gradients in float32."""
        return ascend(
            group.evaluate,
            torch.zeros_like(guess, dtype=torch.float32),
            tolerance=max(NEARLY * tolerance, ABOVE_ROUNDING * self.rounding),
            max_steps=most,
            memory=self.options.memory,
            toward=guess.float(),
            stop=self.interrupted,
        )


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
    def jacobian_single(self) -> Tensor:
        return self.jacobian.float()

    @cached_property
    def pulled_single(self) -> Tensor:
        return self.pulled.float()

    @cached_property
    def root(self) -> Tensor:
        K = self.jacobian @ self.pulled.mT
        return linalg.root((K + K.mT) / 2)

    @cached_property
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
        known = (
            "jacobian",
            "pulled",
            "root",
            "jacobian_single",
            "pulled_single",
        )  # computed once for the whole group
        part.__dict__.update(
            {name: self.__dict__[name][tasks] for name in known if name in self.__dict__}
        )
        return part

    def evaluate(self, point: Tensor, tasks: Tensor) -> Slope:
        """The gradient, and (H + JᵀΛJ)⁻¹ of it with H and J at θ̂; in the dtype of the point."""
        group = self.take(tasks)
        total, own = group.gradient(point)
        return Slope(total, group._step(total, own))

    def evaluate_newton(self, point: Tensor, tasks: Tensor) -> Slope:
        """The gradient, and |H̃|⁻¹ of it with the task's own Hessian where it stands."""
        group = self.take(tasks)
        total, _ = group.gradient(point)
        H = self.refit.determinants.full(
            HESSIAN, self.refit.posterior.theta + point, group.y, group.x
        )
        return Slope(total, saddle_free(H, total))

    def gradient(self, point: Tensor) -> tuple[Tensor, Tensor]:
        """Of ℓ_D + log p(y|x,·) + log π − g₀ᵀ(θ−θ̂) (m, P), in the dtype of the point; and the
        outputs at x (m, C).
        """
        refit, law, likelihood = self.refit, self.refit.law, self.refit.posterior.likelihood
        if not bool(point.any()):
            return self._gradient_at_start(point)
        double = point.dtype == torch.float64
        many, cast = (refit.many, _double) if double else (refit.single, _single)
        theta = refit.posterior.theta.to(point.dtype) + point
        total, own = many.gradient(
            theta, map_inputs(cast, self.x), lambda f: law.score(self.y, f.double()), own=True
        )
        outside = torch.zeros(len(point), dtype=torch.bool)
        for block in refit.rows:

            def score(f: Tensor, block: Any = block) -> Tensor:
                value = likelihood.score(block.y, f.double())
                return value if block.weights is None else value * block.weights.unsqueeze(-1)

            part, f = many.gradient(theta, map_inputs(cast, block.x), score)
            total = total + part
            if not likelihood.linear_domain:
                outside |= ~torch.isfinite(likelihood.log_prob(block.y, f.double())).all(-1)
        total = total + refit.prior.gradient(point)
        if refit.posterior.mode == AS_IS:
            total = total + refit.posterior.bound_prior.gradient(refit.posterior.theta)
        else:
            total = total - refit.gradient
        own = own.double()
        if not law.linear_domain:
            outside |= ~torch.isfinite(law.log_prob(self.y, own))
        return torch.where(outside.unsqueeze(-1), torch.nan, total).to(point.dtype), own

    def _gradient_at_start(self, zero: Tensor) -> tuple[Tensor, Tensor]:
        """At θ̂ the gradient is known: that of the new observation, and g₀ where it is left in."""
        refit = self.refit
        own = refit.f[self.where]
        total = (refit.law.score(self.y, own).unsqueeze(-2) @ self.jacobian).squeeze(-2)
        if refit.posterior.mode == AS_IS:
            total = (
                total + refit.gradient + refit.posterior.bound_prior.gradient(refit.posterior.theta)
            )
        return total.to(zero.dtype), own

    def _step(self, gradient: Tensor, own: Tensor) -> Tensor:
        """z − H⁻¹Jᵀ(I + ΛK)⁻¹ΛJz with z = H⁻¹g: Woodbury."""
        double = gradient.dtype == torch.float64
        z = (
            self.refit.precondition(gradient)
            if double
            else self.refit.precondition_single(gradient)
        )
        J, pulled = (
            (self.jacobian, self.pulled) if double else (self.jacobian_single, self.pulled_single)
        )
        u = own_pull(
            self.refit.law, self.y, own, self.root, (J @ z.unsqueeze(-1)).squeeze(-1).double()
        )
        return z - (u.to(z.dtype).unsqueeze(-2) @ pulled).squeeze(-2)

    def values(self, point: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Likelihood increment (with the tilt), prior increment (m,), and the outputs at x (m,
        C).
        """
        refit, likelihood = self.refit, self.refit.posterior.likelihood
        theta = refit.posterior.theta + point
        with torch.no_grad():
            own = refit.many.own_rows(theta, self.x)
            total = refit.law.log_prob(self.y, own)
            for block in refit.rows:
                change = likelihood.log_prob_difference(
                    block.y, refit.many.same_rows(theta, block.x), block.f
                )
                total = total + (change if block.weights is None else change * block.weights).sum(
                    -1
                )
        if refit.posterior.mode != AS_IS:
            slope = refit.gradient + refit.posterior.bound_prior.gradient(refit.posterior.theta)
            total = total - point @ slope
        return total, refit.prior.value(point), own


def open_all_weights(
    posterior: Posterior, x: Inputs, options: Options, data: Any
) -> AllWeightsRefit:
    """Stage one: a pass over the data for the gradient at θ̂ (and the Hessian of few weights),
    J at x.
    """
    network = posterior.network
    if not isinstance(network, AnyParameters):
        raise TypeError(
            f"A refit of the weights does not support networks of type {type(network).__name__}. "
            "Use refit='output'."
        )
    many = ManyNetworks(replace(network, rest=_changed(network.rest, _double)))

    def prepare(inputs: Inputs) -> tuple[Inputs, Tensor]:
        wide = map_inputs(_double, inputs)
        with torch.no_grad():
            return wide, many.one(posterior.theta, wide)

    rows = open_rows(posterior, data, prepare)
    wide, f = prepare(network.cast(as_inputs(x)))
    many = replace(many, chain=stacked(many.network, wide, posterior.theta))
    single = replace(network, rest=_changed(network.rest, _single))
    chain = None if many.chain is None else replace(many.chain, network=single)
    n, gradient = 0, torch.zeros_like(posterior.theta)
    for block in rows:
        n += row_count(block.x)
        score = block.weighted(posterior.likelihood.score(block.y, block.f)).unsqueeze(0)
        gradient += many.gradient(posterior.theta.unsqueeze(0), block.x, score.expand_as)[
            0
        ].squeeze(0)
    check_seen(posterior, n, gradient)
    determinants = Determinants(posterior, options, many.one, rows)
    factor = determinants.start_factor
    parts = [J.double() for _, J in posterior.linearised(x)]
    return AllWeightsRefit(
        posterior=posterior,
        options=options,
        many=many,
        single=ManyNetworks(single, chain),
        rows=rows,
        x=wide,
        f=f,
        jacobian=torch.cat([J.dense().values for J in parts if isinstance(J, LayerJacobian)]),
        gradient=gradient,
        precondition=lambda v: solve_rows(posterior.operator, factor, v),
        precondition_single=_in_single(posterior, factor),
        determinants=determinants,
    )


def _in_single(posterior: Posterior, factor: Tensor | None) -> Callable[[Tensor], Tensor]:
    """H⁻¹ on the rows of (m, P) in float32, where the structure allows it."""
    operator = posterior.operator
    if isinstance(operator, WoodburyOperator):
        narrow = WoodburyOperator(
            operator.prior.float(), operator.basis.float(), operator.spectrum.float()
        )
        return lambda v: narrow.solve_many(v.mT).mT
    if factor is not None:
        half = factor.float()
        return lambda v: torch.cholesky_solve(v.mT, half).mT
    return lambda v: solve_rows(operator, factor, v.double()).float()


def _double(part: Tensor) -> Tensor:
    return part.to("cpu", torch.float64) if part.is_floating_point() else part.to("cpu")


def _single(part: Tensor) -> Tensor:
    return part.to("cpu", torch.float32) if part.is_floating_point() else part.to("cpu")


def _changed(named: Mapping[str, Tensor], change: Callable[[Tensor], Tensor]) -> dict[str, Tensor]:
    return {name: change(value) for name, value in named.items()}
