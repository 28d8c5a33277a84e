"""The log density of y by refits of the weights at fixed inputs.

The network itself is refitted where it has a mode near θ̂. A trained network need not have one: its
Hessian under the prior may be indefinite, and then the objective rises without bound or to a mode
far away. Where that is so, the network linearised at θ̂ takes its place, which has a mode for every
concave likelihood:

at all inputs     where refits that are tried before many make no progress, or where most of the
                  refits so far failed
at one input      where one of its refits failed. All y of an input are then refitted by the
                  linearised network, so that its predictive is of one model.

Terms and symbols are those of `ssla.refit.weights`. Here too: an input is a row of x; the rung is
the kind of refit that a user asks for; the output refit is that of `ssla.refit.outputs`, which
needs f̂ and K only; a trial is a short refit that shows whether there is a mode near θ̂.
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
from ssla.maths.progress import choose_bar_delay, choose_tqdm_class, is_progress_wanted
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

    Every y costs a refit; `ssla.predictive.interpolation` needs few for a density. The object
    remembers what its refits showed: which inputs are linearised (`linearised_inputs`), and what
    the trials found (`_findings`). Later calls depend on it.
    """

    refit: WeightRefit
    posterior: Posterior
    x: Inputs
    # the output refit: the fallback of failures, and the order in which refits are tried
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

        True for Gaussian noise, a linear model, a dense structure and a Gaussian prior, if each y
        has its own refit.
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
        """Return the engine of the network itself.

        It is opened at the first use. Raises ValueError if options or memory budget forbid it.
        """
        return self._wrap_for_requested_point(self.refit.open_engine(self.posterior, self.x))

    def _wrap_for_requested_point(self, engine: Engine) -> Engine:
        """Return the engine itself for at="candidate", or around it one for at="prediction"."""
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
        """Return the engine of the network linearised at θ̂.

        It is opened at the first use. If all inputs are linearised by then, the engine of the
        network is deleted, because it holds the Jacobians at x. Raises ValueError if there can be
        no such engine.
        """
        if bool(self.linearised_inputs.all()):
            self.__dict__.pop("_engine", None)  # where `cached_property` stores it
        return self._wrap_for_requested_point(
            self.refit.open_linearised_engine(self.posterior, self.x)
        )

    @cached_property
    def linearised_inputs(self) -> Tensor:
        """Return a mask of the inputs whose refits are those of the linearised network (N,).

        Refits that fail set entries of this tensor to True, in place; none is set back.
        """
        is_requested = self.refit.linearised is True and not self.posterior.network.linear
        return torch.full((len(self.marginal.mean),), is_requested, dtype=torch.bool)

    @cached_property
    def _obstacle_to_linearising(self) -> str | None:
        """Return why the linearised network cannot replace the network; None where it can."""
        return self.refit.find_obstacle_to_linearising(self.posterior, self.x)

    @cached_property
    def _findings(self) -> dict[str, bool]:
        """Return what the refits have shown so far, by name; a missing name counts as False.

        The dictionary is changed in place. "tried": trials were made. "no_mode": no easy trial made
        progress. "most_fail": most of the trials at the median made none, or most of the refits
        failed.
        """
        return {}

    @property
    def refits_stopped(self) -> bool:
        """Return whether the easiest refits made no progress and nothing can take their place."""
        no_mode = self._findings.get("no_mode", False)
        return no_mode and not bool(self.linearised_inputs.all())

    def _linearise_inputs(self, inputs: Tensor) -> None:
        """Mark inputs, by their rows of x (k,), as linearised, if that is possible.

        It is not where there is an obstacle, nor for a last layer. That is linear already: a refit
        that failed would fail again.
        """
        if not self.posterior.network.linear and self._obstacle_to_linearising is None:
            self.linearised_inputs[inputs] = True

    def _linearise_all_inputs(self, finding: str) -> None:
        """Record a finding (a name in `_findings`), and mark all inputs as linearised.

        Nothing is marked where linearising is not possible, as `_linearise_inputs` says.
        """
        self._findings[finding] = True
        self._linearise_inputs(torch.arange(len(self.linearised_inputs)))

    def _try_some_refits(self, x_rows: Tensor, y: Tensor, steps: Tensor) -> None:
        """Make trials of a few tasks, and linearise all inputs if these find no mode near θ̂.

        x_rows (M,), y (M, …): the tasks. steps (M,): how far the output refit moves the weights in
        each of them. The task with the smallest step is tried first, then the next ones of other
        inputs. If all are stuck, no refit has a mode near θ̂. Of many tasks, those at the median
        are tried too, because easy refits say little about the others. Findings are recorded.
        """
        self._findings["tried"] = True
        order = torch.nan_to_num(steps, nan=math.inf).argsort(stable=True)
        first, later = order[:1], order[1:]
        elsewhere = later[x_rows[later] != x_rows[first]]
        next_easiest = (elsewhere if len(elsewhere) else later)[: TRIALS - 1]

        # `all` stops after the easiest task where that makes progress.
        if all(
            bool(self._engine.find_stuck(x_rows[tasks], y[tasks]).all())
            for tasks in (first, next_easiest)
        ):
            self._linearise_all_inputs("no_mode")
        elif len(order) >= MANY:
            at_median = order[len(order) // 2 :][:TRIALS]
            stuck = self._engine.find_stuck(x_rows[at_median], y[at_median])
            if float(stuck.double().mean()) > MOST:
                self._linearise_all_inputs("most_fail")

    # --- refits ------------------------------------------------------------------------------

    def solve(self, y: Tensor, rows: Tensor | None = None) -> Solved:
        """Refit with each y added, and return the results of the M tasks in the order of y.

        y (m, …), or (m, k, …) with k candidates for each row; M is m or m·k. rows (m,): the rows of
        x that y belongs to; None: all rows. Tasks that failed are returned as they ended, and those
        that were not tried as `Solved.untried`. The first call with more than TRIALS tasks makes
        trials (`_try_some_refits`); it and failures change `linearised_inputs`.
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

        linearised = self.linearised_inputs[x_rows].nonzero().squeeze(-1)
        with _show_progress_bar(len(linearised), self.refit.progress) as progress:
            # Without tasks the engine is not opened.
            engine = self._linearised_engine if len(linearised) else None
            for tasks in split_tasks(linearised, engine):
                answers = self._linearised_engine.solve(x_rows[tasks], flat[tasks], progress)
                solved = solved.with_tasks(tasks, answers)

        return solved

    def _solve_network(self, x_rows: Tensor, y: Tensor) -> Solved:
        """Refit the network itself in those tasks whose inputs are not linearised.

        x_rows (M,), y (M, …): all tasks. Returns the results of all of them (M,), untried for the
        tasks that are left out. An input with a failed refit is linearised from then on, and all
        inputs are once most refits have failed.
        """
        solved = Solved.untried(len(x_rows))
        tasks_left = (~self.linearised_inputs[x_rows]).nonzero().squeeze(-1)
        tried = failed = 0
        with _show_progress_bar(len(tasks_left), self.refit.progress) as progress:
            while len(tasks_left):
                tasks = split_tasks(tasks_left, self._engine)[0]
                answers = self._engine.solve(x_rows[tasks], y[tasks], progress)
                solved = solved.with_tasks(tasks, answers)
                tried += len(tasks)
                failed += int((~answers.converged).sum())
                self._linearise_inputs(x_rows[tasks[~answers.converged]])

                tasks_left = tasks_left[len(tasks) :]
                if tried >= MANY and failed > MOST * tried:
                    self._linearise_all_inputs("most_fail")
                tasks_left = tasks_left[~self.linearised_inputs[x_rows[tasks_left]]]

        return solved

    def find_weights_at_modes(self, y: Tensor) -> Tensor:
        """Refit with each y added at its row of x, and return the weights θ̃(y) where it ends.

        y (N, …), or (N, k, …) with k candidates for each row: the result is (N, P) or (N, k, P).
        Refits that fail are returned where they end: no input is linearised by this call.
        """
        x_rows, flat = self._flatten_tasks(y, None)
        weights = torch.empty(len(x_rows), len(self.posterior.theta), dtype=torch.float64)
        is_linearised = self.linearised_inputs[x_rows]

        for use_linearised, chosen in ((False, ~is_linearised), (True, is_linearised)):
            tasks = chosen.nonzero().squeeze(-1)
            if not len(tasks):  # an engine without tasks is not opened
                continue
            engine = self._linearised_engine if use_linearised else self._engine
            for group in split_tasks(tasks, engine):
                weights[group] = engine.find_weights_at_modes(x_rows[group], flat[group])
        return weights.reshape(*self._find_answer_shape(y), -1)

    def _flatten_tasks(self, y: Tensor, rows: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return the tasks of y (m, …) or (m, k, …): the row of x of each (M,), and its y (M, …).

        rows (m,): the rows of x that y belongs to; None: all rows. Classes become whole numbers.
        """
        per_row = y.shape[1] if y.dim() > 1 + self._target_dimensions else 1
        index = torch.arange(len(y)) if rows is None else rows
        flat = y.reshape(-1, *y.shape[y.dim() - self._target_dimensions :])
        has_classes = self.likelihood.support_for(self.marginal.mean.shape[1]).kind == "class"
        return index.repeat_interleave(per_row), flat.long() if has_classes else flat

    @property
    def _target_dimensions(self) -> int:
        """Return the number of dimensions of one target: 1 where y is a vector, else 0."""
        return int(self.likelihood.support_for(self.marginal.mean.shape[1]).kind == "vector")

    def _find_answer_shape(self, y: Tensor) -> torch.Size:
        """Return the shape of the answers for y: y's, without the dimension of a vector target."""
        return y.shape[:-1] if self._target_dimensions else y.shape

    # --- failures ----------------------------------------------------------------------------

    def check_failures(self, solved: Solved) -> Tensor:
        """Return a mask of the tasks that failed (M,).

        Raises RuntimeError if some failed and on_failure is "raise".
        """
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
        """Return the part of a message that says why refits fail and what to do about it.

        It states how far the report says that θ̂ is from the mode.
        """
        report = self.posterior.report
        per_parameter = report.residual_after / math.sqrt(report.parameters)
        context = ""
        if self.refits_stopped:
            context += f"The {TRIALS} easiest made no progress, so the others were not tried. "
        may_linearise = not self.posterior.network.linear and self.refit.linearised is None
        if may_linearise and self._obstacle_to_linearising is not None:
            context += f"{self._obstacle_to_linearising} "
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
        """Warn that inputs were linearised, and that refits failed, if this happened.

        failed: how many of the `count` answers are NaN or those of the output refit. answers: their
        plural name in the warning. No warning is given for linearised=True, for failures with
        on_failure="raise", and for those with on_failure="nan" unless all refits were stopped.
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
        """Return the un-normalised log density of each y, with flags; all have y's shape.

        y (m, …), or (m, k, …) with k candidates for each row. rows (m,): the rows of x that y
        belongs to; None: all rows. A refit that failed gives the output refit's density for
        on_failure="fallback", and NaN for "nan". Raises RuntimeError for "raise". No warning is
        given: `warn_of_failures` does that.
        """
        solved = self.solve(y, rows)
        failed = self.check_failures(solved)
        total = solved.total
        if bool(failed.any()):
            replacement: Tensor | float = torch.nan
            if self.refit.on_failure == FALLBACK:
                replacement = self.output.density_at(y, rows).log.reshape(-1)
            total = torch.where(failed, replacement, total)
        shape = self._find_answer_shape(y)
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
        """Return the three increments of each y; all have y's shape.

        y (m, …), or (m, k, …) with k candidates for each row. rows (m,): the rows of x that y
        belongs to; None: all rows. A refit that failed gives the output refit's increments for
        on_failure="fallback", and NaN for "nan", with a warning. Raises RuntimeError for "raise".
        """
        solved = self.solve(y, rows)
        failed = self.check_failures(solved)
        self.warn_of_failures(int(failed.sum()), failed.numel(), "refits of the weights")
        increments = [solved.likelihood, solved.prior, solved.curvature]
        if bool(failed.any()):
            if self.refit.on_failure == FALLBACK:
                output_refit = self.output if rows is None else self.output.select_rows(rows)
                of_outputs = output_refit(y)
                replacements = [
                    increment.reshape(-1)
                    for increment in (of_outputs.likelihood, of_outputs.prior, of_outputs.curvature)
                ]
            else:
                replacements = [torch.full_like(increments[0], torch.nan)] * 3
            increments = [
                torch.where(failed, replacement, increment)
                for increment, replacement in zip(increments, replacements, strict=True)
            ]
        shape = self._find_answer_shape(y)
        likelihood, prior, curvature = (increment.reshape(shape) for increment in increments)
        return Increments(likelihood, prior, curvature, self.posterior.convention)


def split_tasks(tasks: Tensor, engine: Engine | None) -> list[Tensor]:
    """Return the numbers of the tasks (M,) in groups that the engine solves together.

    engine: None if there are no tasks; the list is then empty.
    """
    return [] if engine is None else list(tasks.split(engine.tasks_at_once))


@contextmanager
def _show_progress_bar(count: int, show: bool | None) -> Iterator[Progress | None]:
    """Show a progress bar over `count` tasks, and yield the function that moves it.

    The bar counts the tasks that converged, and shows how many gradients were taken. show: True or
    False; None: as `is_progress_wanted` decides. Without a bar, None is yielded.
    """
    tqdm = choose_tqdm_class(required=show is True) if count and is_progress_wanted(show) else None
    if tqdm is None:
        yield None
        return
    with tqdm(
        total=count, desc=f"{count:,} refits", unit="refit", delay=choose_bar_delay(show)
    ) as bar:
        rounds = 0

        def move_bar(done: int) -> None:
            """Move the bar by the number of tasks that converged in a round."""
            nonlocal rounds
            rounds += 1
            bar.set_postfix_str(f"{rounds:,} gradients", refresh=False)
            bar.update(done)

        yield move_bar
