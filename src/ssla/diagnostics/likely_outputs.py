"""The predictives of all weights whose relative likelihood is at least α.

For weights θ ~ N(m, S), the set {θ : q(θ)/q(m) ≥ α} is an ellipsoid, (θ − m)ᵀS⁻¹(θ − m) ≤ r² with
r² = −2 log α. The outputs at x are linear in θ, f = f̂ + J(θ − m), so that they fill the ellipsoid

    {f : (f − f̂)ᵀ K⁻¹ (f − f̂) ≤ r²} = {f̂ + r R v : ‖v‖ ≤ 1},   K = J S Jᵀ = R Rᵀ.

A member of the set is p(y|f) for one such f: the set takes the place of an integral over the
weights. A coordinate f_c lies in f̂_c ± r √K_cc, and both ends are reached. Other answers are
maximised over the unit ball of v. Each answer of each input is a task, with a v of its own:

- one output: v is a number in [−1, 1], and the search has both ends among its starting points.
  Answers that are monotone in f (mean, distribution function, quantiles, probabilities of two
  classes) are largest at an end, so that their bounds are exact;
- softmax and Gaussian noise with several outputs: answers are smooth functions of f. They are
  maximised by projected gradient steps (see `projected_ascent`);
- others with several outputs (mean and log variance): by a compass search in v.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ssla._checks import warn
from ssla.data import Inputs, as_inputs, row_count
from ssla.diagnostics.compass_search import maximise
from ssla.diagnostics.predictive_sets import Bounds, Functional, Worst
from ssla.diagnostics.projected_ascent import MOST_ROUNDS, Maxima, ascend, project_to_ball
from ssla.likelihoods import Likelihood
from ssla.maths.roots import full_root
from ssla.predictive import Diagnostics, Predictive, predictive_of_outputs
from ssla.predictive.class_law import ClassLaw
from ssla.refit import OutputLogDensity, PlugIn
from ssla.values import Marginal

if TYPE_CHECKING:
    from ssla.posterior import Posterior

PLUG_IN = PlugIn()
ENTRIES_AT_ONCE = 1 << 20  # numbers (tasks, C) of one step of a search; a guess
LINE_POINTS = 9  # starting points in [−1, 1] for one output; a guess
SPREAD = 16  # quasi-random starting points for each of several outputs, beside the axes; a guess
MOST_PAIRED = 12  # classes, for all pairs of which there are starting points; a guess
# Starting points from which gradient steps start. Against the best of 50 other starts, lower
# probabilities of 30 random classes were up to 1.3e-5 too large with 3, and 4e-10 with 8
# (tests/diagnostics/test_relative_likelihood.py repeats the comparison).
STARTS = 8
EARLY = 3  # starting points of searches that take all rows at once; a guess
# After so many steps only the best LATE searches of each task continue; guesses
EARLY_ROUNDS, LATE = 8, 2
FIRST_STEP = 0.25  # of v in a compass search
FINE, COARSE = 1e-7, 1e-4  # steps of v where it ends: for closed forms and for others; guesses


@dataclass(frozen=True, eq=False)
class LikelyOutputs:
    """The distributions p(y|f) at N inputs for all outputs f of an ellipsoid: see the module.

    Answers are in float64 on the CPU.
    """

    likelihood: Likelihood
    mean: Tensor  # f̂ (N, C)
    root: Tensor  # r R (N, C, C)

    is_family = True

    @staticmethod
    def build(posterior: Posterior, x: Inputs, relative_likelihood: float) -> LikelyOutputs:
        """Build the set from the Gaussian of the outputs at x.

        Raises ValueError unless 0 < relative_likelihood ≤ 1, for a likelihood with outputs that
        are not allowed, and where the roots exceed the posterior's memory budget.
        """
        alpha = _check_relative_likelihood(relative_likelihood)
        likelihood = posterior.likelihood.predictive
        if not likelihood.linear_domain:
            raise ValueError(
                "relative_likelihood needs a likelihood that allows all outputs, because an "
                f"ellipsoid around f̂ may leave its domain, but this one is {likelihood!r}. Use a "
                "likelihood on another scale (log rates, a log variance), or give priors."
            )

        inputs = as_inputs(x)
        outputs = posterior.network.outputs
        needed = 8 * row_count(inputs) * outputs**2
        if needed > posterior.memory_budget:
            raise ValueError(
                f"The ellipsoids of {row_count(inputs):,} inputs with {outputs} outputs need "
                f"{needed / 2**20:,.0f} MiB, and the memory budget is "
                f"{posterior.memory_budget / 2**20:,.0f} MiB. Give fewer inputs at a time, or fit "
                "with a larger memory_budget."
            )

        mean, covariance = posterior.outputs_at(inputs)
        radius = math.sqrt(-2 * math.log(alpha))
        return LikelyOutputs(likelihood, mean, radius * full_root(covariance).values)

    @property
    def rows(self) -> int:
        """Return N, the number of inputs."""
        return len(self.mean)

    @property
    def outputs(self) -> Bounds:
        """Return the bounds of the outputs, f̂_c ± r √K_cc, (N, C) each."""
        reach = self.root.square().sum(2).sqrt()
        return Bounds(self.mean - reach, self.mean + reach)

    def compute_bounds(self, functional: Functional, argument: Tensor) -> Bounds:
        """Compute the bounds of functional(·, argument) over the set: (N, k) -> (N, k) each.

        Each entry of the argument is a task with a search of its own. Blocks of rows bound the
        memory.
        """
        bounds = [
            part._compute_block(functional, argument[rows])
            for rows, part in self._split_rows(argument.shape[1])
        ]
        return Bounds(*(torch.cat(sides) for sides in zip(*bounds, strict=True)))

    def list_members(self) -> list[Predictive]:
        """Return the members at the starting points of searches, f̂ first."""
        return list(self._start_predictives)

    def find_worst(self, functional: Callable[[Predictive], Tensor]) -> Worst:
        """Find the member of the set with the least functional(member), row by row."""
        at_starts = torch.stack([-functional(p) for p in self._start_predictives])  # (s, N)
        if self._is_smooth:
            maxima = self._ascend_from_best(
                lambda p, _: -functional(p)[:, None], at_starts.mT[..., None], single=True
            )
            v = maxima.v[:, 0]
        else:
            v, _ = self._search(lambda v: -functional(self._make_predictive(v)), at_starts)

        worst = self._make_predictive(v)
        return Worst(worst, functional(worst))

    @property
    def _is_smooth(self) -> bool:
        """Return whether members are smooth functions of several outputs, by formulas."""
        smooth = self.likelihood.softmax or self.likelihood.quadratic
        return smooth and self.mean.shape[1] > 1

    @cached_property
    def _start_points(self) -> Tensor:
        """Return the v from which searches may start (N, s, C), zero first.

        For softmax and several targets they are the directions in which an output rises or falls
        most. Otherwise all rows have the same: points of a line for one output, and axes and
        quasi-random points for several.
        """
        row_count, outputs = self.mean.shape
        zero = torch.zeros(1, outputs, dtype=torch.float64)
        if self._is_smooth:
            unit = self._find_steepest_directions()
            return torch.cat([zero.expand(row_count, 1, -1), unit, -unit], 1)

        if outputs == 1:
            line = torch.linspace(-1, 1, LINE_POINTS, dtype=torch.float64)
            points = torch.cat([zero, line[line != 0][:, None]])
        else:
            axes = torch.eye(outputs, dtype=torch.float64)
            sobol = torch.quasirandom.SobolEngine(outputs)
            cube = 2 * sobol.draw(SPREAD * outputs, dtype=torch.float64) - 1
            # Points of the cube are moved along their rays into the ball.
            length = torch.linalg.vector_norm(cube, dim=1, keepdim=True).clamp_min(1e-12)
            inside = cube * cube.abs().amax(1, keepdim=True) / length
            points = torch.cat([zero, axes, -axes, inside])

        return points.expand(row_count, -1, -1)

    def _find_steepest_directions(self) -> Tensor:
        """Return the directions v (N, s, C) of length one in which an output rises most.

        For several targets these are the outputs themselves. For softmax they are the outputs less
        their mean and, for up to MOST_PAIRED classes, the differences of all pairs of outputs. A
        vector is zero where the output does not change.
        """
        directions = self.root.mT  # column c is r Rᵀ e_c
        if self.likelihood.softmax:
            centred = directions - directions.mean(2, keepdim=True)
            if self.mean.shape[1] <= MOST_PAIRED:
                first, second = torch.combinations(torch.arange(self.mean.shape[1])).unbind(1)
                pairs = directions[:, :, first] - directions[:, :, second]
                centred = torch.cat([centred, pairs], 2)
            directions = centred

        length = torch.linalg.vector_norm(directions, dim=1, keepdim=True)
        return torch.where(length > 0, directions / length, 0.0).mT

    @cached_property
    def _start_predictives(self) -> list[Predictive]:
        """Return the members at the starting points, which are computed once for all searches."""
        return [self._make_predictive(v) for v in self._start_points.unbind(1)]

    def _split_rows(self, columns: int) -> Iterator[tuple[slice, LikelyOutputs]]:
        """Yield blocks of rows with the set at these rows, for an argument with k columns."""
        outputs = self.mean.shape[1]
        starts = self._start_points.shape[1]

        # The numbers of a row: its tasks, or its starting points with all columns.
        numbers = max(STARTS * columns * outputs, starts * max(outputs, columns))
        size = max(ENTRIES_AT_ONCE // numbers, 1)
        if size >= self.rows:
            yield slice(None), self  # with the predictives that it has kept
            return
        for start in range(0, self.rows, size):
            rows = slice(start, start + size)
            yield rows, replace(self, mean=self.mean[rows], root=self.root[rows])

    def _compute_block(self, functional: Functional, argument: Tensor) -> Bounds:
        """Compute the bounds of functional(·, argument) for all rows at once: (N, k) each.

        argument (N, k). Each entry is a task, and the tasks of a row are side by side.
        """
        if self._is_smooth:
            return self._compute_bounds_by_gradients(functional, argument)
        row_count, columns = argument.shape
        one_column = argument.reshape(-1, 1)

        def evaluate(v: Tensor) -> Tensor:
            """Return the functional of each task at its own v (N·k, C): (N·k,)."""
            members = self._make_predictive(v.view(row_count, columns, -1))
            return functional(members, one_column).squeeze(1)

        at_starts = torch.stack(
            [functional(p, argument).flatten() for p in self._start_predictives]
        )
        _, negative_low = self._search(lambda v: -evaluate(v), -at_starts)
        _, high = self._search(evaluate, at_starts)
        return Bounds(-negative_low.view(argument.shape), high.view(argument.shape))

    def _search(
        self, evaluate: Callable[[Tensor], Tensor], at_starts: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Maximise functions of v by a compass search: v (T, C) and the maxima (T,).

        at_starts (s, T): the values at the starting points, which are those of every row. evaluate:
        v (T, C) -> the value of each of T tasks at its own v (T,).
        """
        closed_form = self.likelihood.quadratic or self.likelihood.logit_temperature is not None
        return maximise(
            evaluate,
            self._start_points[0],
            at_starts,
            project_to_ball,
            FIRST_STEP,
            FINE if closed_form else COARSE,
        )

    def _compute_bounds_by_gradients(self, functional: Functional, argument: Tensor) -> Bounds:
        """Compute the bounds of functional(·, argument) for all rows, by gradient steps."""
        row_count, columns = argument.shape
        starts = self._start_points.shape[1]
        members = self._make_predictive(self._start_points)
        at_starts = functional(members, argument.repeat_interleave(starts, 0))
        at_starts = at_starts.view(row_count, starts, columns)
        sides = []
        for sign in (-1.0, 1.0):

            def evaluate(p: Predictive, rows: Tensor, sign: float = sign) -> Tensor:
                """Return ± the functional of all tasks of some rows (m·t, 1).

                Each column of the argument has t/k tasks, one beside the other.
                """
                repeats = p.law.rows // max(len(rows) * columns, 1)
                one_column = argument[rows].repeat_interleave(repeats, 1).reshape(-1, 1)
                return sign * functional(p, one_column)

            maxima = self._ascend_from_best(evaluate, sign * at_starts)
            sides.append(sign * maxima.value)

        return Bounds(*sides)

    def _ascend_from_best(
        self,
        evaluate: Callable[[Predictive, Tensor], Tensor],
        at_starts: Tensor,
        single: bool = False,
    ) -> Maxima:
        """Maximise k functions of v in each row, by gradient steps from the best starting points.

        evaluate: a member for each of t tasks in m rows, with the numbers (m,) of these rows ->
        (m·t, 1). at_starts (N, s, k): the values at the starting points. single: `evaluate` takes
        all rows only, and one task in each. Warns of searches that have not converged.

        The best starting points are followed for EARLY_ROUNDS steps, and the LATE best of these
        searches to the end. Returns the best v (N, k, C) and the maxima (N, k).
        """
        points = self._start_points[:, :, None].expand(-1, -1, at_starts.shape[2], -1)
        started = Maxima(points, at_starts, torch.ones_like(at_starts, dtype=torch.bool))

        # The largest value at a starting point, with which differences of values are compared
        scale = at_starts.abs().amax(1, keepdim=True)  # (N, 1, k)

        chosen = _keep_highest(started, EARLY if single else STARTS)
        early = self._continue_searches(evaluate, chosen, scale, EARLY_ROUNDS, single)
        chosen = _keep_highest(early, LATE)
        late = self._continue_searches(evaluate, chosen, scale, MOST_ROUNDS, single)
        v, value, unconverged = (part.squeeze(1) for part in _keep_highest(late, 1))
        if bool(unconverged.any()):
            warn(
                f"{int(unconverged.sum())} of {unconverged.numel()} bounds over the likely outputs "
                "have not converged: the true bounds are wider. Use a relative_likelihood nearer "
                "to 1."
            )

        return Maxima(v, value, unconverged)

    def _continue_searches(
        self,
        evaluate: Callable[[Predictive, Tensor], Tensor],
        searches: Maxima,
        scale: Tensor,
        rounds: int,
        single: bool,
    ) -> Maxima:
        """Continue S searches for each of k functions in each row, from the points where they are.

        searches, and the result: fields (N, S, k, …). scale (N, 1, k): the size of the values of
        each function. rounds: the most steps. evaluate, single: as in `_ascend_from_best`.
        """
        differentiate = partial(self._differentiate, evaluate)
        v = searches.v
        size = scale.expand(v.shape[:3])
        if single:
            ended = [
                ascend(differentiate, v[:, i], size[:, i], rounds, leave_out_rows=False)
                for i in range(v.shape[1])
            ]
            return Maxima(*(torch.stack(part, 1) for part in zip(*ended, strict=True)))

        # The tasks of a row are ordered by function, and then by starting point.
        ordered = ascend(
            differentiate,
            v.transpose(1, 2).flatten(1, 2),
            size.transpose(1, 2).flatten(1, 2),
            rounds,
        )
        functions = v.shape[2]
        return Maxima(*(part.unflatten(1, (functions, -1)).transpose(1, 2) for part in ordered))

    def _differentiate(
        self, evaluate: Callable[[Predictive, Tensor], Tensor], v: Tensor, rows: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return the values (m, t) of t tasks in m rows, and their gradients in v (m, t, C).

        v (m, t, C). rows: the numbers of the rows (m,). evaluate: as in `_ascend_from_best`.
        """
        root = self.root[rows]
        f = (self.mean[rows, None] + v @ root.mT).reshape(-1, self.mean.shape[1]).detach()
        with torch.enable_grad():
            value = evaluate(self._predict_outputs(f.requires_grad_()), rows)
            slope = torch.zeros_like(f)
            if value.requires_grad:  # it does not where the answer is the same for every f
                (slope,) = torch.autograd.grad(value.sum(), f)

        # A slope without a value, as that of √(p(1 − p)) at p = 0, ends the search.
        slope = torch.nan_to_num(slope, nan=0.0, posinf=0.0, neginf=0.0)
        return value.detach().view(v.shape[:2]), slope.view(v.shape) @ root

    def _make_predictive(self, v: Tensor) -> Predictive:
        """Return p(y|f) at f = f̂ + r R v, for v (N, C) or v (N, t, C): N or N·t rows."""
        points = v if v.dim() == 3 else v.unsqueeze(1)
        f = self.mean.unsqueeze(1) + points @ self.root.mT
        return self._predict_outputs(f.reshape(-1, self.mean.shape[1]))

    def _predict_outputs(self, f: Tensor) -> Predictive:
        """Return p(y|f) for known outputs f (T, C), with a graph if f has one."""
        temperature = self.likelihood.logit_temperature
        if not self.likelihood.softmax or temperature is None:
            covariance = torch.zeros(*f.shape, f.shape[1], dtype=torch.float64)
            return predictive_of_outputs(self.likelihood, f, covariance, PLUG_IN)

        # The same for softmax, without a C×C matrix for each task and without a call by class.
        exact = Marginal(f, f.new_zeros(()).expand(*f.shape, f.shape[1]))
        log_density = OutputLogDensity(
            likelihood=self.likelihood,
            marginal=exact,
            prior=lambda: exact,  # a plug-in has no part of the prior
            rule=PLUG_IN.rule,
            outputs_move=PLUG_IN.outputs_move,
            like=f.new_empty(0),
            outputs_known=PLUG_IN.outputs_known,
        )
        unflagged = torch.zeros(len(f), dtype=torch.bool)
        flags = Diagnostics(PLUG_IN.name, unflagged, unflagged, unflagged)
        law = ClassLaw(log_density, torch.log_softmax(f / temperature, 1))
        return Predictive(law, log_density.like, flags)


def _keep_highest(searches: Maxima, count: int) -> Maxima:
    """Return the `count` highest of S searches for each function, the highest first.

    searches: fields (N, S, k, …), with v (N, S, k, C). The result has fields (N, count, k, …), or
    all searches if there are fewer.
    """
    best = searches.value.topk(min(count, searches.value.shape[1]), 1).indices
    best_of_v = best[..., None].expand(-1, -1, -1, searches.v.shape[-1])
    return Maxima(
        searches.v.gather(1, best_of_v),
        searches.value.gather(1, best),
        searches.unconverged.gather(1, best),
    )


def _check_relative_likelihood(value: Any) -> float:
    """Return the relative likelihood as a float. Raises ValueError unless it is in (0, 1]."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= 1:
        raise ValueError(
            "relative_likelihood must be a number above 0 and at most 1, the least density of the "
            f"weights relative to the highest one, such as 0.15, but is {value!r}."
        )
    return float(value)
