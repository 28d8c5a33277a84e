"""The log density of y by refits of the weights at fixed inputs.

The network itself is refitted where it has a mode near θ̂. A trained network need not have one: its
Hessian under the prior may be indefinite, and then the objective rises without bound or to a mode
far away. Where that is so, the network linearised at θ̂ takes its place, which has a mode for every
concave likelihood:

at all inputs     where refits that are tried before many make no progress, or where most of the
                  refits so far failed
at one input      where one of its refits failed. All y of an input are then refitted by the
                  linearised network, so that its predictive is of one model.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ssla._checks import warn
from ssla.data import Inputs
from ssla.likelihoods import Likelihood
from ssla.maths.progress import bar_delay, is_progress_wanted, tqdm_class
from ssla.priors import BoundGaussian
from ssla.refit.increments import Increments
from ssla.refit.outputs import Density, OutputLogDensity
from ssla.refit.weights.anderson import Progress
from ssla.refit.weights.at_prediction import PREDICTION, RefitAtPrediction, predict_points
from ssla.refit.weights.solved import FALLBACK, NAN, RAISE, Engine, Solved
from ssla.report import POLISH
from ssla.values import Marginal

if TYPE_CHECKING:
    from ssla.posterior import Posterior
    from ssla.refit.weights.weight_refit import WeightRefit

# A guess: posterior standard deviations per parameter; nearer to the mode, more training is no
# remedy.
AT_MODE = 0.01
RARE = 1e-3  # a guess: the probability of a class below which it is not refitted
TRIALS = 3  # a guess: refits that are tried before many, the easiest ones and then at the median
MANY = 30  # a guess: refits from which on those at the median are tried too
MOST = 0.5  # a guess: the share of failed refits above which all inputs are linearised


@dataclass(frozen=True, eq=False)
class WeightLogDensity:
    """Log densities at fixed inputs, each by a refit of the weights with (x, y) added.

    Every y costs a refit; `ssla.predictive.interpolation` needs few for a density.
    """

    refit: WeightRefit
    posterior: Posterior
    x: Inputs
    # the output refit: where refits start from, and the fallback of failures
    output: OutputLogDensity

    outputs_move = True

    @property
    def likelihood(self) -> Likelihood:
        """Return the likelihood of the new observation."""
        return self.output.likelihood

    @property
    def marginal(self) -> Marginal:
        """Return f̂ (N, C) and K (N, C, C) in float64."""
        return self.output.marginal

    @property
    def like(self) -> Tensor:
        """Return a tensor with the dtype and the device of the answers."""
        return self.output.like

    @property
    def equals_output_refit(self) -> bool:
        """Return whether the output refit gives the same answer, so that no refit is needed.

        It does for Gaussian noise, a linear model, a dense structure and a Gaussian prior, if each
        y has its own refit.
        """
        gaussian = isinstance(self.posterior.bound_prior, BoundGaussian)
        return self.posterior.quadratic and gaussian and not self.refits_at_prediction

    @property
    def refits_at_prediction(self) -> bool:
        """Return whether all y of an input share one refit, on the point prediction there."""
        return self.refit.refitted_point == PREDICTION

    @property
    def rare_probability(self) -> float:
        """Return the probability below which a class is not refitted.

        It is zero by default where classes share a refit, because each then costs little.
        """
        default = 0.0 if self.refits_at_prediction else RARE
        return default if self.refit.rare is None else self.refit.rare

    # --- which engine ------------------------------------------------------------------------

    @cached_property
    def _engine(self) -> Engine:
        """Return the engine of the network itself; ValueError where options or budget forbid it."""
        return self._at_requested_point(self.refit.engine(self.posterior, self.x))

    def _at_requested_point(self, engine: Engine) -> Engine:
        """Return the engine as it is, or one that refits with the point prediction."""
        if not self.refits_at_prediction:
            return engine
        return RefitAtPrediction(engine, predict_points(self.likelihood, engine.f))

    @cached_property
    def prediction(self) -> Tensor:
        """Return ŷ of each input at θ̂ (N,), or (N, D) for D targets; see `predict_points`."""
        if not len(self.linearised_inputs):  # no input, so that no engine is opened
            return predict_points(self.likelihood, self.marginal.mean)
        all_linearised = bool(self.linearised_inputs.all())
        engine = self._linearised_engine if all_linearised else self._engine
        return predict_points(self.likelihood, engine.f)

    @cached_property
    def _linearised_engine(self) -> Engine:
        """Return the engine of the network linearised at θ̂; ValueError where there is none.

        Where all inputs are linearised the engine of the network is deleted: it holds the Jacobians
        at x.
        """
        if bool(self.linearised_inputs.all()):
            self.__dict__.pop("_engine", None)  # where `cached_property` stores it
        return self._at_requested_point(self.refit.linearised_engine(self.posterior, self.x))

    @cached_property
    def linearised_inputs(self) -> Tensor:
        """Return which inputs have refits of the linearised network (N,).

        Refits that fail set entries of this tensor in place.
        """
        is_requested = self.refit.linearised is True and not self.posterior.network.linear
        return torch.full((len(self.marginal.mean),), is_requested, dtype=torch.bool)

    @cached_property
    def _why_not_linearised(self) -> str | None:
        """Return why the linearised network cannot replace the network; None where it can."""
        return self.refit.why_not_linearised(self.posterior, self.x)

    @cached_property
    def _findings(self) -> dict[str, bool]:
        """Return the findings of the refits so far, by name; a missing name counts as False.

        tried: the easiest ones were tried. no_mode: they all made no progress. most_fail: most of
        those at the median made none, or most of the refits failed.
        """
        return {}

    @property
    def refits_stopped(self) -> bool:
        """Return whether the easiest refits made no progress and nothing can take their place."""
        no_mode = self._findings.get("no_mode", False)
        return no_mode and not bool(self.linearised_inputs.all())

    def _linearise_inputs(self, inputs: Tensor) -> None:
        """Mark inputs (k,) for refits of the linearised network, where that is possible.

        A last layer is linear already: a refit of it that failed would fail again.
        """
        if not self.posterior.network.linear and self._why_not_linearised is None:
            self.linearised_inputs[inputs] = True

    def _linearise_all_inputs(self, finding: str) -> None:
        """Record a finding, and mark all inputs for refits of the linearised network."""
        self._findings[finding] = True
        self._linearise_inputs(torch.arange(len(self.linearised_inputs)))

    def _try_some_refits(self, x_rows: Tensor, y: Tensor, steps: Tensor) -> None:
        """Try refits of the network before many: a trial costs less than an hour of failures.

        The task that moves the weights least is tried first (steps (M,): by how much), then the
        next ones of other inputs. If all are stuck, no refit has a mode near θ̂. Of many tasks,
        those at the median are tried too, because easy refits say little about the others. Findings
        are recorded, and inputs marked.
        """
        self._findings["tried"] = True
        order = torch.nan_to_num(steps, nan=math.inf).argsort(stable=True)
        first, later = order[:1], order[1:]
        elsewhere = later[x_rows[later] != x_rows[first]]
        few = (elsewhere if len(elsewhere) else later)[: TRIALS - 1]
        # `all` stops after the easiest task where that makes progress.
        if all(bool(self._engine.find_stuck(x_rows[part], y[part]).all()) for part in (first, few)):
            self._linearise_all_inputs("no_mode")
        elif len(order) >= MANY:
            at_median = order[len(order) // 2 :][:TRIALS]
            stuck = self._engine.find_stuck(x_rows[at_median], y[at_median])
            if float(stuck.double().mean()) > MOST:
                self._linearise_all_inputs("most_fail")

    # --- refits ------------------------------------------------------------------------------

    def solve(self, y: Tensor, rows: Tensor | None = None) -> Solved:
        """Refit with y (m, …) or (m, k, …) added at rows (m,): the refits (M,), in y's order.

        rows: None for all inputs. Tasks that failed are returned as they ended. The first call with
        more than TRIALS tasks tries some of them first (`_try_some_refits`).
        """
        x_rows, flat = self._flatten_tasks(y, rows)
        if not len(x_rows):
            return Solved.untried(0)
        untried = "tried" not in self._findings and not bool(self.linearised_inputs.all())
        if untried and len(x_rows) > TRIALS and not self.posterior.network.linear:
            output = self.output if rows is None else self.output.select_rows(rows)
            self._try_some_refits(x_rows, flat, output.step_length(y).flatten())
        if self.refits_stopped:
            return Solved.untried(len(x_rows))
        solved = self._solve_network(x_rows, flat)
        again = self.linearised_inputs[x_rows].nonzero().squeeze(-1)
        with _progress_bar(len(again), self.refit.progress) as progress:
            # Without tasks the engine is not opened.
            for tasks in split_tasks(again, self._linearised_engine if len(again) else None):
                part = self._linearised_engine.solve(x_rows[tasks], flat[tasks], progress)
                solved = solved.with_tasks(tasks, part)
        return solved

    def _solve_network(self, x_rows: Tensor, y: Tensor) -> Solved:
        """Refit the network itself with y (M, …) added at inputs (M,) that are not linearised.

        An input with a failed refit is linearised from then on; all inputs are, once most refits
        failed. Tasks that are left out are returned as untried.
        """
        solved = Solved.untried(len(x_rows))
        tasks_left = (~self.linearised_inputs[x_rows]).nonzero().squeeze(-1)
        tried = failed = 0
        with _progress_bar(len(tasks_left), self.refit.progress) as progress:
            while len(tasks_left):
                tasks = split_tasks(tasks_left, self._engine)[0]
                part = self._engine.solve(x_rows[tasks], y[tasks], progress)
                solved = solved.with_tasks(tasks, part)
                tried += len(tasks)
                failed += int((~part.converged).sum())
                self._linearise_inputs(x_rows[tasks[~part.converged]])
                tasks_left = tasks_left[len(tasks) :]
                if tried >= MANY and failed > MOST * tried:
                    self._linearise_all_inputs("most_fail")
                tasks_left = tasks_left[~self.linearised_inputs[x_rows[tasks_left]]]
        return solved

    def modes(self, y: Tensor) -> Tensor:
        """Return θ̃(y), where each refit ends: of y's shape, and P.

        Refits that fail are returned where they end.
        """
        x_rows, flat = self._flatten_tasks(y, None)
        modes = torch.empty(len(x_rows), len(self.posterior.theta), dtype=torch.float64)
        linearised = self.linearised_inputs[x_rows]
        # Engines are named, so that one without tasks is not opened.
        for chosen, name in ((~linearised, "_engine"), (linearised, "_linearised_engine")):
            tasks = chosen.nonzero().squeeze(-1)
            if len(tasks):
                engine: Engine = getattr(self, name)
                for part in split_tasks(tasks, engine):
                    modes[part] = engine.modes(x_rows[part], flat[part])
        return modes.reshape(*self._answer_shape(y), -1)

    def _flatten_tasks(self, y: Tensor, rows: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return the row of x of each task (M,), and its y (M, …), for y (m, …) or (m, k, …).

        rows (m,): the rows that y belongs to; None: all rows.
        """
        per_row = y.shape[1] if y.dim() > 1 + self._target_dimensions else 1
        index = torch.arange(len(y)) if rows is None else rows
        flat = y.reshape(-1, *y.shape[y.dim() - self._target_dimensions :])
        classes = self.likelihood.support_for(self.marginal.mean.shape[1]).kind == "class"
        return index.repeat_interleave(per_row), flat.long() if classes else flat

    @property
    def _target_dimensions(self) -> int:
        """Return the number of dimensions of one target: 1 where y is a vector, else 0."""
        return int(self.likelihood.support_for(self.marginal.mean.shape[1]).kind == "vector")

    def _answer_shape(self, y: Tensor) -> torch.Size:
        """Return the shape of the answers for y: y's, without the dimension of a vector target."""
        return y.shape[:-1] if self._target_dimensions else y.shape

    # --- what refits that failed come to -----------------------------------------------------

    def check_failures(self, solved: Solved) -> Tensor:
        """Return which tasks failed (M,); RuntimeError if some did and on_failure is "raise"."""
        failed = ~solved.converged
        if self.refit.on_failure == RAISE and bool(failed.any()):
            worst = float(torch.nan_to_num(solved.norm[failed], nan=math.inf).max())
            raise RuntimeError(
                f"{int(failed.sum())} of {failed.numel()} refits did not reach their mode in "
                f"{self.refit.max_steps} steps (the worst is {worst:.2g} posterior standard "
                f"deviations from it). {self._failure_cause} Or use on_failure='fallback', which "
                "takes the output refit's answer there."
            )
        return failed

    @property
    def _failure_cause(self) -> str:
        """Return the part of a message that says why refits fail, with the figure of the report."""
        report = self.posterior.report
        per_parameter = report.residual_after / math.sqrt(report.parameters)
        context = ""
        if self.refits_stopped:
            context += f"The {TRIALS} easiest made no progress, so the others were not tried. "
        may_linearise = not self.posterior.network.linear and self.refit.linearised is None
        if may_linearise and self._why_not_linearised is not None:
            context += f"{self._why_not_linearised} "
        training = ""
        if per_parameter > AT_MODE:
            polish = "mode='polish', " if report.mode != POLISH else ""
            training = f"train the network to convergence under this prior, {polish}"
        return (
            f"{context}The weights are {report.residual_after:.3g} posterior standard deviations "
            f"from the mode ({per_parameter:.2g} per parameter). Likely causes: (a) they are no "
            "maximum under this prior (not trained to the end, or a saddle); (b) y is far outside "
            f"what the model expects. Remedy: {training}a stronger prior, more max_steps or a "
            "larger tolerance in ssla.WeightRefit, or refit='output'."
        )

    def warn_of_failures(self, failed: int, count: int, answers: str) -> None:
        """Warn where the linearised network took the network's place, and of refits that failed.

        failed: how many of `count` answers are NaN or those of the output refit. answers: what they
        are called. Nothing is said of failures that raise or that the user asked for as NaN.
        """
        linearised = int(self.linearised_inputs.sum())
        if linearised and self.refit.linearised is None:
            self._warn_of_linearised(linearised)
        if failed and (self.refit.on_failure == FALLBACK or self.refits_stopped):
            answer = "are NaN" if self.refit.on_failure == NAN else "use the output rung"
            message = (
                f"{failed:,} of {count:,} {answers} did not converge and {answer}. "
                f"{self._failure_cause}"
            )
            warn(message, RuntimeWarning)

    def _warn_of_linearised(self, count: int) -> None:
        """Warn that the linearised network was refitted at `count` inputs."""
        if self._findings.get("no_mode", False):
            reason = (
                f"The {TRIALS} easiest refits of the weights made no progress: the trained "
                "weights are no maximum under this prior."
            )
        elif self._findings.get("most_fail", False):
            reason = "Most of the refits of the weights that were tried found no mode."
        else:
            reason = (
                f"At {count:,} of {len(self.linearised_inputs):,} inputs a refit of the "
                "weights found no mode."
            )
        warn(
            f"{reason} The network linearised at the trained weights was refitted in its place "
            "(`diagnostics.linearised` marks the inputs). ssla.WeightRefit(linearised=True) "
            "asks for this without a trial; linearised=False takes the output refit.",
            RuntimeWarning,
        )

    # --- answers -----------------------------------------------------------------------------

    def density_at(self, y: Tensor, rows: Tensor | None = None) -> Density:
        """Return un-normalised log densities of y (m, …) at rows (m,); None: all rows.

        Refits that failed have the output refit's density, NaN, or raise a RuntimeError, as
        `on_failure` sets.
        """
        solved = self.solve(y, rows)
        failed = self.check_failures(solved)
        total = solved.total
        if bool(failed.any()):
            replacement: Tensor | float = torch.nan
            if self.refit.on_failure == FALLBACK:
                replacement = self.output.density_at(y, rows).log.reshape(-1)
            total = torch.where(failed, replacement, total)
        shape = self._answer_shape(y)
        return Density(
            total.reshape(shape),
            solved.fallback.reshape(shape),
            solved.converged.reshape(shape),
            error=torch.where(failed, 0.0, solved.error).reshape(shape),
        )

    def __call__(self, y: Tensor) -> Increments:
        """Return the three increments of y (N, …) at all inputs."""
        return self.increments(y)

    def increments(self, y: Tensor, rows: Tensor | None = None) -> Increments:
        """Return the three increments of y (m, …) at rows (m,); None: all rows.

        Each has the shape of y. Where a refit failed they are those of the output refit, or NaN,
        with a warning, or a RuntimeError is raised, as `on_failure` sets.
        """
        solved = self.solve(y, rows)
        failed = self.check_failures(solved)
        self.warn_of_failures(int(failed.sum()), failed.numel(), "refits of the weights")
        parts = [solved.likelihood, solved.prior, solved.curvature]
        if bool(failed.any()):
            if self.refit.on_failure == FALLBACK:
                output_refit = self.output if rows is None else self.output.select_rows(rows)
                instead = output_refit(y)
                replacement = [
                    part.reshape(-1)
                    for part in (instead.likelihood, instead.prior, instead.curvature)
                ]
            else:
                replacement = [torch.full_like(parts[0], torch.nan)] * 3
            parts = [
                torch.where(failed, replaced, part)
                for part, replaced in zip(parts, replacement, strict=True)
            ]
        likelihood, prior, curvature = (part.reshape(self._answer_shape(y)) for part in parts)
        return Increments(likelihood, prior, curvature, self.posterior.convention)


def split_tasks(tasks: Tensor, engine: Engine | None) -> list[Tensor]:
    """Return the tasks (M,) in groups that the engine solves together.

    None for the engine, where there are no tasks, gives no groups.
    """
    return [] if engine is None else list(tasks.split(engine.tasks_at_once))


@contextmanager
def _progress_bar(count: int, show: bool | None) -> Iterator[Progress | None]:
    """Show a bar over `count` tasks where that is wanted, and yield the function that moves it.

    The function is None without a bar. The bar counts the tasks that converged, and says how many
    gradients were taken. show: True, False, or None: as `is_progress_wanted` decides.
    """
    tqdm = tqdm_class(required=show is True) if count and is_progress_wanted(show) else None
    if tqdm is None:
        yield None
        return
    with tqdm(total=count, desc=f"{count:,} refits", unit="refit", delay=bar_delay(show)) as bar:
        rounds = 0

        def move_bar(done: int) -> None:
            """Move the bar by the number of tasks that converged in a round."""
            nonlocal rounds
            rounds += 1
            bar.set_postfix_str(f"{rounds:,} gradients", refresh=False)
            bar.update(done)

        yield move_bar
