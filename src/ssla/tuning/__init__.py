"""Prior precisions and noise from the data: by the evidence, or by a held-out score. The result is a new Posterior.

  evidence      closed-form value and gradient from the sums (`ssla.tuning.evidence`): no pass over the data. Of a variational
                Gaussian the bound, whose averages and prior are found in turn, by a few passes each
  nll, crps     of predictions for a validation set, read once; or by k folds of the training data, whose sums are taken once
                and recombined, so that no fold is fitted again. The features were still learned from all rows: where they
                overfit, a validation set that the network has not seen is the honest choice.

Precisions are tuned by one factor for each layer (or one for all), keeping the pattern of the prior at hand and its means; the
noise of a Gaussian likelihood by one factor. A solution at the edge of its range is reported, as is one that did not converge.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ssla._checks import one_of, warn
from ssla.fitting import again
from ssla.fitting.job import Job, outputs_apart
from ssla.fitting.prior_change import described
from ssla.priors import EXACT, Prior
from ssla.state import TUNING, Note, State, TuningHistory, without
from ssla.structures import Dense, Kfac, LowRank
from ssla.tuning.bfgs import Maximum, maximise
from ssla.tuning.evidence import Evidence, evidence_of
from ssla.tuning.scores import CRPS, EVIDENCE, NLL, HeldOut
from ssla.tuning.space import NOISE, PRECISIONS, PRIOR, Space

__all__ = ["choose_prior", "tune"]

SCAN = torch.linspace(-12.0, 12.0, 9, dtype=torch.float64)  # log factors on all precisions from which an ascent may start
SCAN_LIMIT = 1500  # parameters: beyond, a dense factorisation is too dear to scan with
HALVINGS = 5
ALTERNATIONS = 20  # of averages and prior
REACH_OF_CHOICE = 20.0  # of logarithms around the trained weights' scale
SETTLED = 0.05  # change of the logarithm of a precision at which an alternation is the last
REACH = 3.0  # by which a logarithm may change while averages are kept
DIFFERENCE = 1e-4  # of logarithms, for the derivatives of held-out scores


def tune(
    posterior: State,
    objective: str,
    data: Any,
    over: Sequence[str],
    per_layer: bool,
    folds: int | None,
    per_output: bool = False,
    within: tuple[float, float] = PRECISIONS,
    doubt: float = math.inf,
    quiet: bool = False,
) -> State:
    """See Posterior.tune.

    per_output: one precision for each output of a last layer. within: the range of precisions. doubt: the standard deviation of
    a log precision around that of the posterior at hand, which keeps few held-out rows from choosing an extreme one. quiet: a
    poor solution is noted in the report only.
    """
    one_of("objective", objective, (EVIDENCE, NLL, CRPS))
    chosen = (over,) if isinstance(over, str) else tuple(over)
    for name in chosen:
        one_of("thing to tune over", name, (PRIOR, NOISE))
    if posterior.convention != EXACT:
        raise ValueError(
            f"Tuning needs the exact convention, but this posterior has {posterior.convention!r}: use with_prior(prior) first."
        )
    if objective == EVIDENCE and (data is not None or folds is not None):
        raise ValueError("objective='evidence' comes from the sums and takes no data. For held-out data use 'nll' or 'crps'.")
    if objective != EVIDENCE and data is None:
        raise ValueError(
            f"objective={objective!r} needs data=: a validation set, or the training data with folds=5. Without data use "
            "'evidence'."
        )
    space, notes = Space.of(posterior, chosen, per_layer, per_output)
    space = replace(space, within=within, home=space.levels if doubt < math.inf else None, doubt=doubt)
    if not space.names:
        raise ValueError(f"There is nothing to tune: over={chosen!r}, and {notes[0] if notes else 'it is empty'}.")

    def climb(space: Space) -> Maximum:
        if objective == EVIDENCE:
            return _climb_evidence(space)
        score = HeldOut.of(space.posterior, data, objective, folds)
        notes.extend(note for note in score.notes if note not in notes)
        return _climb_scores(space, score)

    if posterior.variational is None:
        best = climb(space)
        return _finished(space.posterior_at(best.point), _history(objective, space, best, notes), quiet)
    return _alternate(space, climb, objective, notes, again(posterior), quiet)


def choose_prior(posterior: State, job: Job) -> State:
    """The posterior of a fit without a prior: from the trained weights' scale to the precisions of the highest evidence.

    One precision for each layer, or for each output of a last layer whose outputs are of different kinds. The noise goes with
    them where the fit estimated it.
    """
    dense = isinstance(posterior.sums.curvature, Dense | LowRank) and posterior.theta.numel() > SCAN_LIMIT
    apart = not isinstance(posterior.sums.curvature, Kfac) and outputs_apart(posterior.network, posterior.likelihood) is not None
    space, notes = Space.of(posterior, (PRIOR, NOISE) if job.estimated else (PRIOR,), not dense, apart)
    if job.averages:
        return _alternate(space, _climb_evidence, EVIDENCE, notes, job, quiet=True)
    best = _climb_evidence(replace(space, reach=REACH_OF_CHOICE))
    return _finished(job.averaged(space.posterior_at(best.point)), _history(EVIDENCE, space, best, notes), quiet=True)


def _alternate(
    space: Space,
    climb: Callable[[Space], Maximum],
    objective: str,
    notes: list[str],
    job: Job | None,
    quiet: bool = False,
) -> State:
    """Averages of the variational Gaussian and its prior in turn, until the prior stays where it is.

    With the averages kept, the objective is that of a Gaussian model; where neither changes any more its gradient is the bound's.
    """
    points, values = [space.units(torch.zeros(1, len(space.free)).double())], []
    found: list[Maximum] = []

    def choose(state: State) -> Prior | None:
        here = replace(space.moved(_positive(state)), reach=math.inf if job is None else REACH)
        best = climb(here)
        chosen, point = _stepped(here, best.point)
        if not found:
            values.append(state.log_evidence() if objective == EVIDENCE else float(best.values[0]))
        found.append(best)
        points.append(here.units(point[None]))
        values.append(best.value)
        still = bool(((points[-1] / points[-2]).log().abs() <= SETTLED).all()) or len(found) == ALTERNATIONS
        return None if still else chosen.prior

    if job is None:
        notes.append("the data cannot be read again: the averages of the variational Gaussian were kept")
        choose(space.posterior)
        end = space.moved(_positive(space.posterior)).posterior_at(found[-1].point)
    else:
        end = job.averaged(space.posterior, choose)
    if objective == EVIDENCE:
        values[-1] = end.log_evidence()
    settled = job is None or len(found) < ALTERNATIONS
    best = replace(
        found[-1],
        points=torch.zeros(len(points), len(space.free), dtype=torch.float64),
        values=torch.tensor(values, dtype=torch.float64),
        evaluations=sum(one.evaluations for one in found),
        converged=settled and found[-1].converged,
    )
    trace = replace(_history(objective, space, best, notes), points=torch.cat(points))
    if job is not None and end.network.linear and end.follows_prior:
        end = job.polished(end)
    return _finished(end, trace, quiet)


def _positive(posterior: State) -> State:
    """With the positive part of the averages: what is negative would make variances infinite under a weaker prior."""
    return posterior.with_sums(replace(posterior.sums, curvature=posterior.sums.curvature.positive_part()))


def _stepped(space: Space, point: Tensor) -> tuple[State, Tensor]:
    """The posterior at the point, or on the way to it as far as the kept averages are positive definite with the prior."""
    for _ in range(HALVINGS):
        try:
            found = space.posterior_at(point)
            _ = found.covariance
            return found, point
        except ValueError:
            point = point / 2
    return space.posterior, torch.zeros_like(point)


def _climb_evidence(space: Space) -> Maximum:
    """From the best of a scan over all precisions together, and from where the prior stands."""
    evidence: Evidence = evidence_of(space.problem)

    def function(point: Tensor) -> tuple[float, Tensor]:
        try:
            value, gradient = evidence(space.full(point))
        except ValueError:  # averages that are not positive definite with so weak a prior
            return -math.inf, torch.zeros_like(point)
        return value, gradient[space.free]

    low, high = space.box
    start = torch.zeros(len(space.free), dtype=torch.float64)
    best = maximise(function, start, low, high, space.scale, tolerance=1e-10)
    tuned = space.free < len(space.labels)
    if bool(tuned.any()) and space.posterior.theta.numel() <= SCAN_LIMIT and space.reach > REACH:
        starts = start + SCAN[:, None] * tuned.double()
        heights = torch.tensor([function(point.clamp(low, high))[0] for point in starts])
        other = maximise(function, starts[int(heights.argmax())], low, high, space.scale, tolerance=1e-10)
        if other.value > best.value + 1e-9 * abs(best.value):
            whole = torch.cat([start[None].clamp(low, high), other.points]), torch.cat([best.values[:1], other.values])
            best = replace(other, points=whole[0], values=whole[1], evaluations=other.evaluations + best.evaluations)
    return best


def _climb_scores(space: Space, held: HeldOut) -> Maximum:
    """By central differences: 2d scores a gradient."""

    def score(point: Tensor) -> float:
        return held(space, point) + space.expected(point) / held.rows

    def function(point: Tensor) -> tuple[float, Tensor]:
        steps = DIFFERENCE * torch.eye(len(point), dtype=torch.float64)
        slope = [(score(point + h) - score(point - h)) / (2 * DIFFERENCE) for h in steps]
        return score(point), torch.tensor(slope, dtype=torch.float64)

    low, high = space.box
    start = torch.zeros(len(space.free), dtype=torch.float64)
    tuned = (space.free < len(space.labels)).double()
    scan = SCAN[:, None] * min(1.0, space.reach / float(SCAN.max()))
    starts = torch.cat([start[None], start + scan * tuned]) if bool(tuned.any()) else start[None]
    heights = torch.tensor([score(point.clamp(low, high)) for point in starts])
    scale = torch.ones(len(space.free), dtype=torch.float64)
    best = maximise(function, starts[int(heights.argmax())], low, high, scale, tolerance=1e-6, rounds=100)
    if not torch.equal(best.points[0], start.clamp(low, high)):
        first = torch.cat([start[None], best.points]), torch.cat([heights[:1].double(), best.values])
        best = replace(best, points=first[0], values=first[1])
    return replace(best, evaluations=best.evaluations * (2 * len(space.free) + 1) + len(starts))


def _history(objective: str, space: Space, best: Maximum, notes: list[str]) -> TuningHistory:
    names = space.names
    edge = tuple(name for name, flag in zip(names, best.at_bound.tolist(), strict=True) if flag)
    label = "log evidence" if objective == EVIDENCE else f"held-out −{objective}"
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


def _finished(posterior: State, history: TuningHistory, quiet: bool = False) -> State:
    """The tuned posterior with its history and its report; warns about a poor solution, unless nobody asked for tuning."""
    if history.at_bound and not quiet:
        warn(
            f"Tuning ended at the edge of its range for {', '.join(history.at_bound)}: the objective has no maximum inside. A "
            "precision at the upper edge says that those parameters do not help, at the lower edge that the prior is not wanted."
        )
    if not history.converged and not quiet:
        warn("Tuning did not converge: see posterior.tuning_history.", RuntimeWarning)
    summary = "tuned by " + str(history).replace("\n", "; ")
    kept = "" if posterior.follows_mode else "θ̂ was kept, {residual:.3g} posterior sd from its mode; "
    found = described(posterior, kept + "precision and noise were tuned", posterior.mode)
    return replace(
        found,
        tuning_history=history,
        report=replace(found.report, notes=(*without(found.report.notes, TUNING), Note(summary, TUNING))),
    )
