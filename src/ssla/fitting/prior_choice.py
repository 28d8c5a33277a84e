"""The prior of a fit that was given none: by the evidence, around the scale of the trained weights.

Of a Gaussian at the mode the evidence follows from the sums. Of a variational Gaussian it is a
bound, whose averages and prior are found in turn.

A point (d,) of a search holds logarithms of factors on prior precisions and noise: see
`ssla.fitting.tuning_space.Space`. The expected precisions are those of the trained weights' scale,
around which the log precisions have a normal density.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ssla._checks import warn
from ssla.fitting.evidence import Evidence, make_evidence
from ssla.fitting.fit_plan import FitPlan, find_outputs_with_own_units
from ssla.fitting.more_data import with_sketch_note
from ssla.fitting.steps import move_theta_to_mode, with_variational_gaussian
from ssla.fitting.tuning_space import EVIDENCE, LOO, NOISE, PRIOR, Space
from ssla.fitting.variational import with_sums
from ssla.maths.bfgs import Maximum, Value, maximise_in_box
from ssla.priors import Prior, concavity_notes, describe
from ssla.report import CONCAVITY, MOVED, TUNING, Note, TuningHistory, without_subjects
from ssla.report import PRIOR as PRIOR_NOTE

if TYPE_CHECKING:
    from ssla.posterior import Posterior

# The numbers below were not measured: they are guesses, unless a comment says otherwise.
# Log factors on all precisions from which an ascent may start.
SCAN = torch.linspace(-12.0, 12.0, 9, dtype=torch.float64)
SCAN_LIMIT = 1500  # parameters: beyond, a dense factorisation is too slow for a scan
HALVINGS = 5  # of a point whose prior leaves no positive definite curvature
ALTERNATIONS = 20  # of averages and prior
# Rounding errors of the evidence, as shares of 1 + the number of observations: the slope that ends
# an ascent, and the gain of another ascent that counts.
SLOPE_TOLERANCE, LEAST_GAIN = 1e-10, 1e-9
REACH_OF_CHOICE = 20.0  # of logarithms around the trained weights' scale
# Standard deviation of a log precision around the trained weights' scale, for a prior that nobody
# gave.
DOUBT = 1.0
AT_MODE = 1e-4  # posterior standard deviations
SETTLED = 0.05  # change of the logarithm of a precision at which an alternation is the last
REACH = 3.0  # by which a logarithm may change while averages are kept


def choose_prior(plan: FitPlan, posterior: Posterior, estimated: bool) -> Posterior:
    """Return the posterior of a fit without a prior, with precisions chosen by the evidence.

    plan: of the fit, after its passes. posterior: under the prior of the trained weights' scale.
    There is one precision for each layer, or for each output of a last layer whose outputs have
    different units, or one for all of a large dense curvature. Its logarithm is expected to have
    standard deviation DOUBT around that of the trained weights: features that separate all training
    rows leave the evidence with almost no preference between priors, and a weak prior makes
    predictions too sure. estimated: whether the fit estimated the noise, which is then chosen
    together with the precisions.
    """
    posterior = replace(posterior)  # a copy, whose cached factorisations are dropped with it
    large_dense = (
        posterior.sums.curvature.couples_all_parameters and posterior.theta.numel() > SCAN_LIMIT
    )
    own_units = find_outputs_with_own_units(
        posterior.network, posterior.likelihood, posterior.sums.curvature
    )
    over = (PRIOR, NOISE) if estimated else (PRIOR,)
    space, notes = Space.around(
        posterior, over, per_layer=not large_dense, per_output=own_units is not None
    )
    space = replace(space, expected_levels=space.levels, doubt=DOUBT)
    if plan.finds_variational:
        return alternate_averages_and_prior(space, notes, plan, quiet=True)
    best = maximise_evidence(replace(space, reach=REACH_OF_CHOICE))
    history = make_history(EVIDENCE, space, best, notes)
    chosen = with_variational_gaussian(plan, space.make_posterior_at(best.point))

    # These hold vectors (P,) that are not needed any more.
    del posterior, space
    return finish_tuning(chosen, history, quiet=True)


def alternate_averages_and_prior(
    space: Space, notes: list[str], plan: FitPlan, quiet: bool
) -> Posterior:
    """Find the averages of the variational Gaussian and its prior in turn, until the prior stays.

    Returns the posterior with its history. With the averages kept, the evidence is that of a
    Gaussian model. Where neither changes any more, its gradient is that of the bound. space: around
    the posterior from which the search starts. notes: for the history. plan: with the passes.
    quiet: whether a poor solution is only noted, without a warning.
    """
    points = [space.compute_precisions_and_noise(torch.zeros(1, len(space.free)).double())]
    values: list[float] = []
    maxima: list[Maximum] = []

    def choose_next_prior(current: Posterior) -> Prior | None:
        """Choose the prior of the highest evidence with the averages of `current` kept.

        The result is None where the prior has settled, which ends the search. Each call appends to
        `points`, `values` and `maxima`.
        """
        kept = replace(space.move_to(with_positive_averages(current)), reach=REACH)
        best = maximise_evidence(kept)
        chosen, point = step_towards(kept, best.point)
        if not maxima:
            values.append(current.log_evidence())
        maxima.append(best)
        points.append(kept.compute_precisions_and_noise(point[None]))
        values.append(best.value)
        still = bool(((points[-1] / points[-2]).log().abs() <= SETTLED).all())
        return None if still or len(maxima) == ALTERNATIONS else chosen.prior

    tuned = with_variational_gaussian(plan, space.posterior, choose_next_prior)
    settled = bool(maxima) and len(maxima) < ALTERNATIONS
    if not maxima:  # the Gaussian did not come near convergence, so no prior was chosen
        value = tuned.log_evidence()
        maxima.append(_make_maximum_at_start(space, value))
        values.append(value)
    values[-1] = tuned.log_evidence()
    best = replace(maxima[-1], evaluations=sum(maximum.evaluations for maximum in maxima))
    history = make_history_of_visits(EVIDENCE, space, best, notes, points, values, settled)
    return finish_variational(tuned, history, plan, quiet)


def _make_maximum_at_start(space: Space, value: float) -> Maximum:
    """Return the result of a search that tried only the start, with this value, and stopped."""
    start = torch.zeros(len(space.free), dtype=torch.float64)
    return Maximum(
        start,
        value,
        gradient=torch.zeros_like(start),  # not known
        at_bound=torch.zeros_like(start, dtype=torch.bool),
        converged=False,
        points=start[None],
        values=torch.tensor([value]),
        evaluations=0,
    )


def finish_variational(
    posterior: Posterior, history: TuningHistory, plan: FitPlan | None, quiet: bool
) -> Posterior:
    """Return the tuned variational posterior with its history.

    θ̂ of a polished last layer moves to the mode under the prior, by passes of `plan`; None: it
    stays. quiet: as in `finish_tuning`.
    """
    if plan is not None and posterior.network.linear and posterior.follows_prior:
        posterior = move_theta_to_mode(plan, posterior)
    return finish_tuning(posterior, history, quiet)


def with_positive_averages(posterior: Posterior) -> Posterior:
    """Return the posterior with the positive part of its averaged curvature.

    Under a weaker prior, negative directions would have infinite variances.
    """
    return with_sums(
        posterior, replace(posterior.sums, curvature=posterior.sums.curvature.positive_part())
    )


def step_towards(space: Space, point: Tensor) -> tuple[Posterior, Tensor]:
    """Return the posterior at a point (d,) of the space, and the point itself.

    Where the kept averages with that prior are not positive definite, the point is halved, a few
    times at most; then the present posterior is returned, with the point zero.
    """
    for _ in range(HALVINGS):
        try:
            reached = space.make_posterior_at(point)
            _ = reached.covariance
            return reached, point
        except ValueError:
            # The curvature is not positive definite so far away. Closer to the present posterior it
            # is that of a posterior that exists.
            point = point / 2
    return space.posterior, torch.zeros_like(point)


def maximise_evidence(space: Space) -> Maximum:
    """Find the highest evidence inside the box of the space.

    One ascent starts from the present prior. For a wide box and few parameters, another starts from
    the best of a scan over all precisions together. The values are the evidence plus the log
    density of the expected precisions.
    """
    problem = space.problem

    # The present log likelihood is a constant that depends on the unit of the targets. It is left
    # out of the search, and added at the end.
    constant = problem.log_likelihood
    objective = _make_objective(space, make_evidence(problem._replace(log_likelihood=0.0)))
    low, high = space.box

    # Rounding errors of the evidence grow with the number of observations.
    level = 1 + space.posterior.sums.weight * space.posterior.network.outputs

    def ascend(start: Tensor) -> Maximum:
        """Climb from a start (d,) to a maximum of the objective inside the box."""
        return maximise_in_box(
            objective, start, low, high, space.scale, tolerance=SLOPE_TOLERANCE, level=level
        )

    start = torch.zeros(len(space.free), dtype=torch.float64)
    best = ascend(start)
    small = space.posterior.theta.numel() <= SCAN_LIMIT
    if space.has_free_precisions and small and space.reach > REACH:
        first, _ = choose_best_start(
            space.make_scan_points(SCAN), space, lambda point: objective(point)[0]
        )
        other = ascend(first)
        if other.value > best.value + LEAST_GAIN * level:
            best = replace(
                other,
                points=torch.cat([start[None].clamp(low, high), other.points]),
                values=torch.cat([best.values[:1], other.values]),
                evaluations=other.evaluations + best.evaluations,
            )
    return replace(best, value=best.value + constant, values=best.values + constant)


def _make_objective(space: Space, evidence: Evidence) -> Callable[[Tensor], Value]:
    """Return the objective of a search by the evidence, as a function of a point (d,).

    The result is the evidence plus the log density of the expected precisions.
    """

    def penalised_evidence(point: Tensor) -> Value:
        """Compute the objective at a point (d,), with derivatives; −∞ where H is indefinite."""
        try:
            value, gradient, curvature = evidence(space.fill_coordinates(point))
        except ValueError:  # averages that are not positive definite with so weak a prior
            return Value(-math.inf, torch.zeros_like(point))
        if curvature is not None:
            curvature = curvature[space.free] + space.expected_curvature
        return Value(
            value + space.compute_expected_log_density(point),
            gradient[space.free] + space.compute_expected_slope(point),
            curvature,
        )

    return penalised_evidence


def choose_best_start(
    starts: Tensor, space: Space, height: Callable[[Tensor], float]
) -> tuple[Tensor, Tensor]:
    """Return the start (d,) of the greatest height among k, and the heights (k,) of all of them.

    starts: (k, d). height: maps a point (d,) to its height. Heights are taken where the starts are
    clamped to the box of the space; the result is not clamped.
    """
    low, high = space.box
    heights = torch.tensor([height(point.clamp(low, high)) for point in starts])
    return starts[int(heights.argmax())], heights


def make_history(
    objective: str, space: Space, best: Maximum, notes: Sequence[str]
) -> TuningHistory:
    """Return the history of an ascent, with points in units of precisions and noise.

    objective: EVIDENCE, LOO or the name of a held-out score. best: the result of the ascent in the
    space. notes: for the history.
    """
    names = space.names
    edge = tuple(name for name, flag in zip(names, best.at_bound.tolist(), strict=True) if flag)
    labels = {EVIDENCE: "log evidence", LOO: "leave-one-out log density"}
    return TuningHistory(
        labels.get(objective, f"held-out −{objective}"),
        names,
        space.compute_precisions_and_noise(best.points),
        best.values,
        best.gradient,
        best.converged,
        edge,
        best.evaluations,
        tuple(notes),
    )


def make_history_of_visits(
    objective: str,
    space: Space,
    best: Maximum,
    notes: list[str],
    points: list[Tensor],
    values: list[float],
    settled: bool,
) -> TuningHistory:
    """Return the history of a search that found a variational Gaussian for each prior.

    objective, space, notes: as in `make_history`. points: the priors that were visited, each (1,
    d), in units of precisions and noise. values: the objective at each of them. best: the last
    ascent. settled: whether the search ended before its limit of rounds.
    """
    heights = torch.tensor(values, dtype=torch.float64)
    converged = settled and best.converged
    history = make_history(objective, space, replace(best, values=heights), notes)
    return replace(history, points=torch.cat(points), converged=converged)


def finish_tuning(posterior: Posterior, history: TuningHistory, quiet: bool = False) -> Posterior:
    """Return the tuned posterior with its history, and with a summary of it in the report.

    Warns of a solution at the edge of its range, and of one that did not converge. quiet: whether
    these warnings are left out, because nobody asked for tuning.
    """
    if history.at_bound and not quiet:
        warn(
            f"Tuning ended at the edge of its range for {', '.join(history.at_bound)}: the "
            "objective has no maximum inside. A precision at the upper edge says that those "
            "parameters do not help, at the lower edge that the prior is not wanted."
        )
    if not history.converged and not quiet:
        warn("Tuning did not converge: see posterior.tuning_history.", RuntimeWarning)

    at_mode = posterior.updates_mode_from_sums or posterior.residual <= AT_MODE
    change = "" if at_mode else "θ̂ was kept, {residual:.3g} posterior sd from its mode; "
    if history.names == (NOISE,):
        change += "noise was tuned"
    elif NOISE in history.names:
        change += "precision and noise were tuned"
    else:
        change += "precision was tuned"

    tuned = describe_change(posterior, change, posterior.mode)
    summary = Note("tuned by " + str(history).replace("\n", "; "), TUNING)
    notes = (*without_subjects(tuned.report.notes, TUNING), summary)
    return replace(tuned, tuning_history=history, report=replace(tuned.report, notes=notes))


def describe_change(posterior: Posterior, change: str, mode: str) -> Posterior:
    """Return the posterior with a mode, and with a report of its new prior.

    The report also has the convention and the distance to the mode. change: what was done, as a
    text in which {residual} and {each} stand for the distance to the mode, in total and per
    parameter. mode: POLISH, TILT or AS_IS.
    """
    residual = posterior.residual
    per_parameter = residual / math.sqrt(posterior.theta.numel())
    precision = posterior.bound_prior.precision(posterior.theta)
    notes = without_subjects(posterior.report.notes, PRIOR_NOTE, CONCAVITY, MOVED)
    notes = with_sketch_note(notes, posterior)
    notes.append(Note(f"prior: {change.format(residual=residual, each=per_parameter)}", PRIOR_NOTE))
    notes.extend(Note(note, CONCAVITY) for note in concavity_notes(precision))
    report = replace(
        posterior.report,
        prior=describe(posterior.prior),
        convention=posterior.convention,
        mode=mode,
        residual_after=residual,
        notes=tuple(notes),
        likelihood=repr(posterior.likelihood),
    )
    return replace(posterior, mode=mode, report=report)
