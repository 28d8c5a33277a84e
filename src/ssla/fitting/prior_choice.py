"""The prior of a fit that was given none: by the evidence, around the scale of the trained weights.

Of a Gaussian at the mode the evidence follows from the sums. Of a variational Gaussian it is a
bound, whose averages and prior are found in turn.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ssla._checks import warn
from ssla.fitting.evidence import Evidence, evidence_of
from ssla.fitting.fit_plan import FitPlan, outputs_apart
from ssla.fitting.more_data import with_directions
from ssla.fitting.steps import with_averages, with_theta_at_mode
from ssla.fitting.tuning_space import EVIDENCE, LOO, NOISE, PRIOR, Space
from ssla.fitting.variational import with_sums
from ssla.maths.bfgs import Maximum, Value, maximise
from ssla.priors import Prior, concavity_notes, describe
from ssla.report import CONCAVITY, MOVED, TUNING, Note, TuningHistory, without
from ssla.report import PRIOR as PRIOR_NOTE

if TYPE_CHECKING:
    from ssla.posterior import Posterior

# Log factors on all precisions from which an ascent may start.
SCAN = torch.linspace(-12.0, 12.0, 9, dtype=torch.float64)
SCAN_LIMIT = 1500  # parameters: beyond, a dense factorisation is too dear to scan with
HALVINGS = 5
ALTERNATIONS = 20  # of averages and prior
REACH_OF_CHOICE = 20.0  # of logarithms around the trained weights' scale
# Standard deviation of a log precision around the trained weights' scale, for a prior that nobody
# gave.
DOUBT = 1.0
AT_MODE = 1e-4  # posterior standard deviations
SETTLED = 0.05  # change of the logarithm of a precision at which an alternation is the last
REACH = 3.0  # by which a logarithm may change while averages are kept


def choose_prior(plan: FitPlan, posterior: Posterior, estimated: bool) -> Posterior:
    """The posterior of a fit without a prior: with the precisions of the highest evidence around
    the trained weights' scale.

    One precision for each layer, or for each output of a last layer whose outputs are of different
    kinds; its logarithm has standard deviation DOUBT around that of the trained weights. Features
    that separate all training rows leave the evidence with almost no preference between priors, and
    a weak one makes predictions too sure. The noise goes with the precisions where the fit
    estimated it.
    """
    posterior = replace(posterior)  # what is computed on the way is forgotten with this copy
    dense = posterior.sums.curvature.whole and posterior.theta.numel() > SCAN_LIMIT
    apart = outputs_apart(posterior.network, posterior.likelihood, posterior.sums.curvature)
    over = (PRIOR, NOISE) if estimated else (PRIOR,)
    space, notes = Space.of(posterior, over, not dense, apart is not None)
    space = replace(space, home=space.levels, doubt=DOUBT)
    if plan.averages:
        return alternate(space, notes, plan, quiet=True)
    best = climb_evidence(replace(space, reach=REACH_OF_CHOICE))
    history = history_of(EVIDENCE, space, best, notes)
    end = with_averages(plan, space.posterior_at(best.point))
    # Vectors (P,) that are not needed any more
    del posterior, space
    return finished(end, history, quiet=True)


def alternate(space: Space, notes: list[str], plan: FitPlan, quiet: bool) -> Posterior:
    """Averages of the variational Gaussian and its prior in turn, until the prior stays where it
    is.

    With the averages kept, the evidence is that of a Gaussian model; where neither changes any more
    its gradient is the bound's.
    """
    points, values = [space.units(torch.zeros(1, len(space.free)).double())], []
    found: list[Maximum] = []

    def choose(state: Posterior) -> Prior | None:
        here = replace(space.moved(positive_averages(state)), reach=REACH)
        best = climb_evidence(here)
        chosen, point = stepped(here, best.point)
        if not found:
            values.append(state.log_evidence())
        found.append(best)
        points.append(here.units(point[None]))
        values.append(best.value)
        still = (
            bool(((points[-1] / points[-2]).log().abs() <= SETTLED).all())
            or len(found) == ALTERNATIONS
        )
        return None if still else chosen.prior

    end = with_averages(plan, space.posterior, choose)
    settled = bool(found) and len(found) < ALTERNATIONS
    if not found:  # the Gaussian never came near its best, so that no prior was chosen
        nowhere, height = torch.zeros(len(space.free), dtype=torch.float64), end.log_evidence()
        at_edge = torch.zeros_like(nowhere, dtype=torch.bool)
        found.append(
            Maximum(
                nowhere, height, nowhere, at_edge, False, nowhere[None], torch.tensor([height]), 0
            )
        )
        values.append(height)
    values[-1] = end.log_evidence()
    best = replace(found[-1], evaluations=sum(one.evaluations for one in found))
    return ended(space, end, best, EVIDENCE, notes, plan, quiet, points, values, settled)


def ended(
    space: Space,
    end: Posterior,
    best: Maximum,
    objective: str,
    notes: list[str],
    plan: FitPlan | None,
    quiet: bool,
    points: list[Tensor],
    values: list[float],
    settled: bool,
) -> Posterior:
    """The tuned variational posterior: θ̂ follows the prior to its mode by passes of `plan`, and
    the history shows the way.
    """
    heights = torch.tensor(values, dtype=torch.float64)
    whole = replace(best, points=torch.zeros(len(points), len(space.free)).double(), values=heights)
    trace = replace(
        history_of(objective, space, whole, notes),
        points=torch.cat(points),
        converged=settled and best.converged,
    )
    if plan is not None and end.network.linear and end.follows_prior:
        end = with_theta_at_mode(plan, end)
    return finished(end, trace, quiet)


def positive_averages(posterior: Posterior) -> Posterior:
    """With the positive part of the averages: what is negative would make variances infinite
    under a weaker prior.
    """
    return with_sums(
        posterior, replace(posterior.sums, curvature=posterior.sums.curvature.positive_part())
    )


def stepped(space: Space, point: Tensor) -> tuple[Posterior, Tensor]:
    """The posterior at the point, or on the way to it as far as the kept averages are positive
    definite with the prior.
    """
    for _ in range(HALVINGS):
        try:
            found = space.posterior_at(point)
            _ = found.covariance
            return found, point
        except ValueError:
            point = point / 2
    return space.posterior, torch.zeros_like(point)


def climb_evidence(space: Space) -> Maximum:
    """From the best of a scan over all precisions together, and from where the prior stands."""
    problem = space.problem
    # The log likelihood at hand is a constant that depends on the unit of the targets: left out
    # here
    constant = problem.log_likelihood
    evidence: Evidence = evidence_of(problem._replace(log_likelihood=0.0))

    def function(point: Tensor) -> Value:
        """The evidence and what the scale of the trained weights expects, with their
        derivatives.
        """
        try:
            value, gradient, curvature = evidence(space.full(point))
        except ValueError:  # averages that are not positive definite with so weak a prior
            return Value(-math.inf, torch.zeros_like(point))
        if curvature is not None:
            curvature = curvature[space.free] + space.expected_curvature
        return Value(
            value + space.expected(point),
            gradient[space.free] + space.expected_slope(point),
            curvature,
        )

    low, high = space.box
    start = torch.zeros(len(space.free), dtype=torch.float64)
    level = 1 + space.posterior.sums.weight * space.posterior.network.outputs
    best = maximise(function, start, low, high, space.scale, tolerance=1e-10, level=level)
    tuned = space.free < len(space.labels)
    if bool(tuned.any()) and space.posterior.theta.numel() <= SCAN_LIMIT and space.reach > REACH:
        starts = space.middle(float(SCAN.max())) + SCAN[:, None] * tuned.double()
        heights = torch.tensor([function(point.clamp(low, high))[0] for point in starts])
        first = starts[int(heights.argmax())]
        other = maximise(function, first, low, high, space.scale, tolerance=1e-10, level=level)
        if other.value > best.value + 1e-9 * level:
            whole = (
                torch.cat([start[None].clamp(low, high), other.points]),
                torch.cat([best.values[:1], other.values]),
            )
            best = replace(
                other,
                points=whole[0],
                values=whole[1],
                evaluations=other.evaluations + best.evaluations,
            )
    return replace(best, value=best.value + constant, values=best.values + constant)


def history_of(objective: str, space: Space, best: Maximum, notes: list[str]) -> TuningHistory:
    names = space.names
    edge = tuple(name for name, flag in zip(names, best.at_bound.tolist(), strict=True) if flag)
    label = {EVIDENCE: "log evidence", LOO: "leave-one-out log density"}.get(
        objective, f"held-out −{objective}"
    )
    return TuningHistory(
        label,
        names,
        space.units(best.points),
        best.values,
        best.gradient,
        best.converged,
        edge,
        best.evaluations,
        tuple(notes),
    )


def finished(posterior: Posterior, history: TuningHistory, quiet: bool = False) -> Posterior:
    """The tuned posterior with its history and its report; warns about a poor solution, unless
    nobody asked for tuning.
    """
    if history.at_bound and not quiet:
        warn(
            f"Tuning ended at the edge of its range for {', '.join(history.at_bound)}: the "
            "objective has no maximum inside. A precision at the upper edge says that those "
            "parameters do not help, at the lower edge that the prior is not wanted."
        )
    if not history.converged and not quiet:
        warn("Tuning did not converge: see posterior.tuning_history.", RuntimeWarning)
    summary = "tuned by " + str(history).replace("\n", "; ")
    moved = posterior.follows_mode or posterior.residual <= AT_MODE
    kept = "" if moved else "θ̂ was kept, {residual:.3g} posterior sd from its mode; "
    what = (
        "noise was"
        if history.names == (NOISE,)
        else "precision and noise were"
        if NOISE in history.names
        else "precision was"
    )
    found = described(posterior, f"{kept}{what} tuned", posterior.mode)
    return replace(
        found,
        tuning_history=history,
        report=replace(
            found.report, notes=(*without(found.report.notes, TUNING), Note(summary, TUNING))
        ),
    )


def described(posterior: Posterior, what: str, mode: str) -> Posterior:
    """The posterior with a report of its prior, its convention and its distance to the mode."""
    residual = posterior.residual
    each = residual / math.sqrt(posterior.theta.numel())
    notes = with_directions(
        without(posterior.report.notes, PRIOR_NOTE, CONCAVITY, MOVED), posterior
    )
    notes += [Note(f"prior: {what.format(residual=residual, each=each)}", PRIOR_NOTE)]
    notes += [
        Note(note, CONCAVITY)
        for note in concavity_notes(posterior.bound_prior.precision(posterior.theta))
    ]
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
