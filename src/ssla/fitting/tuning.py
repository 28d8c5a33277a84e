"""Prior precisions and noise from the data: by the evidence, or by a held-out score.

The result is a new Posterior.

  evidence      closed-form value and gradient from the sums (`ssla.fitting.evidence`): no pass over
                the data. Of a variational Gaussian the bound, whose averages and prior are found
                in turn, by a few passes each
  loo           leave-one-out log densities of the training rows (`ssla.diagnostics.loo`)
  nll, crps     of predictions for a validation set, read once; or by k folds of the training data,
                whose sums are taken once and recombined, so that no fold is fitted again. The
                features were still learned from all rows: where they overfit, a validation set that
                the network has not seen is the honest choice.

Precisions are tuned by one factor for each layer (or one for all), keeping the pattern of the prior
at hand and its means; the noise of a Gaussian likelihood by one factor. A solution at the edge of
its range is reported, as is one that did not converge.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ssla._checks import one_of, warn
from ssla.curvature import Dense, LowRank
from ssla.data import Source
from ssla.fitting import again
from ssla.fitting.evidence import Evidence, evidence_of
from ssla.fitting.guard import warn_on_training_rows
from ssla.fitting.held_out_scores import CRPS, EVIDENCE, LOO, NLL, HeldOut, LeftOut
from ssla.fitting.job import Job, outputs_apart
from ssla.fitting.price import affordable
from ssla.fitting.prior_change import described
from ssla.fitting.training_rows import TrainingRows
from ssla.fitting.tuning_space import NOISE, PRIOR, Space
from ssla.fitting.validation import choose_by_validation
from ssla.fitting.variational import ROUGH, TOLERANCE, Climb, with_sums
from ssla.maths.bfgs import Maximum, Value, maximise
from ssla.priors import EXACT, Prior
from ssla.report import TUNING, Note, TuningHistory, without

if TYPE_CHECKING:
    from ssla.posterior import Posterior

__all__ = ["choose_prior", "fitted", "tune"]

SCAN = torch.linspace(
    -12.0, 12.0, 9, dtype=torch.float64
)  # log factors on all precisions from which an ascent may start
SCAN_LIMIT = 1500  # parameters: beyond, a dense factorisation is too dear to scan with
HALVINGS = 5
ALTERNATIONS = 20  # of averages and prior
REACH_OF_CHOICE = 20.0  # of logarithms around the trained weights' scale
STRIDE, FARTHEST, PARABOLAS = 1.5, 12.0, 3  # of a search in logarithms
ROUGH_PARABOLAS = 2
SEARCH_ROUNDS = 6  # passes for the Gaussians on the way
# standard deviation of a log precision around the trained weights' scale, for a prior that nobody
# gave
DOUBT = 1.0
AT_MODE = 1e-4  # posterior standard deviations
SETTLED = 0.05  # change of the logarithm of a precision at which an alternation is the last
REACH = 3.0  # by which a logarithm may change while averages are kept
DIFFERENCE = 1e-4  # of logarithms, for the derivatives of held-out scores
BOUND_ERROR = 1e-6  # of 1 + |bound|: where a variational Gaussian is taken as converged
SCORE_ERROR = 1e-9  # of a score: quadrature, and rounding errors of covariances under weak priors


def fitted(job: Job, validation: Source | None, held_out: bool = False) -> Posterior:
    """The posterior of a fit: what nobody gave is chosen by validation rows, or without any by the
    evidence.

    held_out: whether the validation rows are a share of the training data.
    """
    if validation is not None:
        return choose_by_validation(job, validation, held_out)
    # The state without a prior is not kept under a name: its vectors are freed on the way.
    posterior = choose_prior(job.run(), job) if job.prior is None else job.run()
    rows = TrainingRows.of(posterior)
    if job.prior is None:
        posterior = affordable(posterior, job, rows)
    warn_on_training_rows(posterior, rows)
    return posterior


def tune(
    posterior: Posterior,
    objective: str,
    data: Any,
    over: Sequence[str],
    per_layer: bool,
    folds: int | None,
    per_output: bool = False,
    within: tuple[float, float] | None = None,
    doubt: float = math.inf,
    quiet: bool = False,
    rough: bool = False,
) -> Posterior:
    """See Posterior.tune.

    per_output: one precision for each output of a last layer. within: the range of precisions;
    None: a wide one around the trained weights' scale. doubt: the standard deviation of
    a log precision around that of the posterior at hand, which keeps few held-out rows from
    choosing an extreme one. quiet: a poor solution is noted in the report only. rough: the
    posterior will not be kept, so that the search tries fewer priors, θ̂ stays, and the variational
    Gaussian at the end is as accurate as those on the way.
    """
    one_of("objective", objective, (EVIDENCE, NLL, CRPS, LOO))
    chosen = (over,) if isinstance(over, str) else tuple(over)
    for name in chosen:
        one_of("thing to tune over", name, (PRIOR, NOISE))
    if posterior.convention != EXACT:
        raise ValueError(
            f"Tuning needs the exact convention, but this posterior has {posterior.convention!r}: "
            "use with_prior(prior) first."
        )
    own = objective in (EVIDENCE, LOO)
    if own and (data is not None or folds is not None):
        raise ValueError(
            f"objective={objective!r} comes from the data of the fit and takes none. For held-out "
            "data use 'nll' or 'crps'."
        )
    if not own and data is None:
        raise ValueError(
            f"objective={objective!r} needs data=: a validation set, or the training data with "
            "folds=5. Without data use 'evidence'."
        )
    if objective == LOO:
        chosen = tuple(name for name in chosen if name != NOISE)  # the sites are those of one noise
        warn(
            "tune('loo') scores rows on which the network's features were trained, unless they "
            "were trained on other rows: it then favours a prior that is too weak. "
            "tune('evidence') was better in our measurements; best is tune('nll', data=…) with "
            "rows that the network has not seen."
        )
    space, notes = Space.of(posterior, chosen, per_layer, per_output)
    space = replace(
        space, within=within, home=space.levels if doubt < math.inf else None, doubt=doubt
    )
    if not space.names:
        raise ValueError(
            f"There is nothing to tune: over={chosen!r}, and "
            f"{notes[0] if notes else 'it is empty'}."
        )

    def climb(space: Space) -> Maximum:
        if objective == EVIDENCE:
            return _climb_evidence(space)
        score = (
            LeftOut.of(space.posterior)
            if objective == LOO
            else HeldOut.of(space.posterior, data, objective, folds)
        )
        best = _climb_scores(space, score)
        notes.extend(note for note in score.notes if note not in notes)
        return best

    if posterior.variational is None:
        best = climb(space)
        return _finished(
            space.posterior_at(best.point), _history(objective, space, best, notes), quiet
        )
    job = again(posterior)
    if job is None:
        notes.append(
            "the data cannot be read again: the averages of the variational Gaussian were kept"
        )
        best = climb(space.moved(_positive(posterior)))
        return _finished(
            _stepped(space, best.point)[0], _history(objective, space, best, notes), quiet
        )
    if objective == EVIDENCE:
        return not_worse(posterior, _alternate(space, notes, job, quiet))

    def score(state: Posterior) -> float:
        own = LeftOut.of(state) if objective == LOO else HeldOut.of(state, data, objective, folds)
        nowhere = torch.zeros(len(space.free), dtype=torch.float64)
        value = own(space.moved(state), nowhere) + space.moved(state).expected(nowhere) / own.rows
        notes.extend(note for note in own.notes if note not in notes)
        return value

    return _search(space, score, objective, notes, job, quiet, rough)


def choose_prior(posterior: Posterior, job: Job) -> Posterior:
    """The posterior of a fit without a prior: with the precisions of the highest evidence around
    the trained weights' scale.

    One precision for each layer, or for each output of a last layer whose outputs are of different
    kinds; its logarithm has standard deviation DOUBT around that of the trained weights. Features
    that separate all training rows leave the evidence with almost no preference between priors, and
    a weak one makes predictions too sure. The noise goes with the precisions where the fit
    estimated it.
    """
    dense = (
        isinstance(posterior.sums.curvature, Dense | LowRank)
        and posterior.theta.numel() > SCAN_LIMIT
    )
    apart = outputs_apart(posterior.network, posterior.likelihood, posterior.sums.curvature)
    over = (PRIOR, NOISE) if job.estimated else (PRIOR,)
    space, notes = Space.of(posterior, over, not dense, apart is not None)
    space = replace(space, home=space.levels, doubt=DOUBT)
    if job.averages:
        return _alternate(space, notes, job, quiet=True)
    best = _climb_evidence(replace(space, reach=REACH_OF_CHOICE))
    history = _history(EVIDENCE, space, best, notes)
    end = job.averaged(space.posterior_at(best.point))
    # Vectors (P,) that are not needed any more
    del posterior, space
    return _finished(end, history, quiet=True)


def _alternate(space: Space, notes: list[str], job: Job, quiet: bool) -> Posterior:
    """Averages of the variational Gaussian and its prior in turn, until the prior stays where it
    is.

    With the averages kept, the evidence is that of a Gaussian model; where neither changes any more
    its gradient is the bound's.
    """
    points, values = [space.units(torch.zeros(1, len(space.free)).double())], []
    found: list[Maximum] = []

    def choose(state: Posterior) -> Prior | None:
        here = replace(space.moved(_positive(state)), reach=REACH)
        best = _climb_evidence(here)
        chosen, point = _stepped(here, best.point)
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

    end = job.averaged(space.posterior, choose)
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
    return _ended(space, end, best, EVIDENCE, notes, job, quiet, points, values, settled)


def not_worse(before: Posterior, tuned: Posterior) -> Posterior:
    """The tuned posterior, unless its bound is lower than the one before.

    Then the one before, with a note.

    Only the bound of a dense curvature is climbed exactly: for others the step of the prior is that
    of an approximate bound.
    """
    history, height = tuned.tuning_history, before.log_evidence()
    if history is None or tuned.log_evidence() >= height - BOUND_ERROR * (1 + abs(height)):
        return tuned
    note = (
        f"the prior at hand was kept: its bound is {height:.6g}, that of the tuned one "
        f"{tuned.log_evidence():.6g}"
    )
    kept = replace(
        history, points=history.points[:1], values=torch.tensor([height], dtype=torch.float64)
    )
    return _finished(before, replace(kept, notes=(*history.notes, note)), quiet=True)


def _search(
    space: Space,
    score: Callable[[Posterior], float],
    objective: str,
    notes: list[str],
    job: Job,
    quiet: bool,
    rough: bool,
) -> Posterior:
    """The prior of the best score, by a variational Gaussian for each that is tried: all
    precisions together, then each.
    """
    average = job.average(space.posterior.theta, not space.posterior.tilted)
    low, high = space.box
    here, there = space.posterior, torch.zeros(len(space.free), dtype=torch.float64)
    points, values, evaluations = [there], [score(here)], 1

    def climb(direction: Tensor) -> None:
        """Along one direction from the best point so far: outwards while the score rises, then
        by parabolas.
        """
        nonlocal here, there, evaluations
        base, seen = there, {0.0: values[-1]}

        def at(t: float) -> float:
            nonlocal here, there, evaluations
            state, step = _stepped(
                space.moved(_positive(here)), (base + t * direction).clamp(low, high) - there
            )
            point = there + step
            found = Climb(state, average, tolerance=ROUGH, most=SEARCH_ROUNDS).run()
            state = replace(found, report=replace(here.report, rounds=found.report.rounds))
            value = score(state)
            evaluations += 1
            seen[t] = value
            if value > values[-1]:
                here, there = state, point
                points.append(point)
                values.append(value)
            return value

        for sign in (1.0, -1.0):
            t = sign * STRIDE
            while abs(t) <= FARTHEST and at(t) >= seen[t - sign * STRIDE]:
                t += sign * STRIDE
        for _ in range(ROUGH_PARABOLAS if rough else PARABOLAS):
            middle = max(seen, key=lambda t: seen[t])
            left, right = (
                max((t for t in seen if t < middle), default=None),
                min((t for t in seen if t > middle), default=None),
            )
            if left is None or right is None or right - left < SETTLED:
                break
            at(_top(left, middle, right, seen[left], seen[middle], seen[right]))

    with warnings.catch_warnings():  # far from the best, Gaussians may be rough
        warnings.simplefilter("ignore", UserWarning)
        warnings.simplefilter("ignore", RuntimeWarning)
        climb(torch.ones_like(there))
        if len(there) > 1:
            for direction in torch.eye(len(there), dtype=torch.float64):
                climb(direction)
    end = Climb(here, average, tolerance=ROUGH if rough else TOLERANCE).run()
    units = [space.units(point[None]) for point in points]
    at_edge = (there <= low) | (there >= high)
    best = Maximum(
        there,
        values[-1],
        torch.zeros_like(there),
        at_edge,
        True,
        torch.stack(points),
        torch.tensor(values),
        evaluations,
    )
    return _ended(
        space, end, best, objective, notes, None if rough else job, quiet, units, values, True
    )


def _top(a: float, b: float, c: float, fa: float, fb: float, fc: float) -> float:
    """Where the parabola through three points is highest; off the middle by at least a tenth of
    the wider side.
    """
    up, down = (b - a) * (fb - fc), (b - c) * (fb - fa)
    t = b - 0.5 * ((b - a) * up - (b - c) * down) / (up - down) if up != down else b
    wider = c - b if c - b > b - a else a - b
    return t if abs(t - b) > 0.1 * abs(wider) and a < t < c else b + 0.3 * wider


def _ended(
    space: Space,
    end: Posterior,
    best: Maximum,
    objective: str,
    notes: list[str],
    job: Job | None,
    quiet: bool,
    points: list[Tensor],
    values: list[float],
    settled: bool,
) -> Posterior:
    """The tuned variational posterior: θ̂ follows the prior to its mode by passes of `job`, and
    the history shows the way.
    """
    heights = torch.tensor(values, dtype=torch.float64)
    whole = replace(best, points=torch.zeros(len(points), len(space.free)).double(), values=heights)
    trace = replace(
        _history(objective, space, whole, notes),
        points=torch.cat(points),
        converged=settled and best.converged,
    )
    end = job.polished(end) if job is not None and end.network.linear and end.follows_prior else end
    return _finished(end, trace, quiet)


def _positive(posterior: Posterior) -> Posterior:
    """With the positive part of the averages: what is negative would make variances infinite
    under a weaker prior.
    """
    return with_sums(
        posterior, replace(posterior.sums, curvature=posterior.sums.curvature.positive_part())
    )


def _stepped(space: Space, point: Tensor) -> tuple[Posterior, Tensor]:
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


def _climb_evidence(space: Space) -> Maximum:
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


def _climb_scores(space: Space, held: HeldOut | LeftOut) -> Maximum:
    """By central differences: 2d scores a gradient."""
    low, high = space.box
    start = torch.zeros(len(space.free), dtype=torch.float64)
    unit = abs(held(space, start.clamp(low, high))) if held.in_target_units else 1.0

    def score(point: Tensor) -> float:
        return held(space, point) / unit + space.expected(point) / held.rows

    def function(point: Tensor) -> tuple[float, Tensor]:
        steps = DIFFERENCE * torch.eye(len(point), dtype=torch.float64)
        slope = [(score(point + h) - score(point - h)) / (2 * DIFFERENCE) for h in steps]
        return score(point), torch.tensor(slope, dtype=torch.float64)

    tuned = (space.free < len(space.labels)).double()
    scan = SCAN[:, None] * min(1.0, space.reach / float(SCAN.max()))
    middle = space.middle(float(SCAN.max()))
    starts = torch.cat([start[None], middle + scan * tuned]) if bool(tuned.any()) else start[None]
    heights = torch.tensor([score(point.clamp(low, high)) for point in starts])
    best = maximise(
        function,
        starts[int(heights.argmax())],
        low,
        high,
        tolerance=1e-6,
        noise=SCORE_ERROR,
        rounds=100,
    )
    if not torch.equal(best.points[0], start.clamp(low, high)):
        first = (
            torch.cat([start[None], best.points]),
            torch.cat([heights[:1].double(), best.values]),
        )
        best = replace(best, points=first[0], values=first[1])
    evaluations = best.evaluations * (2 * len(space.free) + 1) + len(starts) + held.in_target_units
    value, values, gradient = best.value * unit, best.values * unit, best.gradient * unit
    return replace(best, value=value, values=values, gradient=gradient, evaluations=evaluations)


def _history(objective: str, space: Space, best: Maximum, notes: list[str]) -> TuningHistory:
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


def _finished(posterior: Posterior, history: TuningHistory, quiet: bool = False) -> Posterior:
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
