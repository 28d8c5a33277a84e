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
from ssla.fitting.again import read_again
from ssla.fitting.fit_plan import FitPlan
from ssla.fitting.held_out_scores import HeldOut, LeftOut
from ssla.fitting.prior_choice import (
    SCAN,
    SETTLED,
    alternate,
    climb_evidence,
    ended,
    finished,
    history_of,
    positive_averages,
    stepped,
)
from ssla.fitting.tuning_space import CRPS, EVIDENCE, LOO, NLL, NOISE, PRIOR, Space
from ssla.fitting.variational import ROUGH, TOLERANCE, Climb
from ssla.maths.bfgs import Maximum, maximise
from ssla.priors import EXACT

if TYPE_CHECKING:
    from ssla.posterior import Posterior

STRIDE, FARTHEST, PARABOLAS = 1.5, 12.0, 3  # of a search in logarithms
ROUGH_PARABOLAS = 2
SEARCH_ROUNDS = 6  # passes for the Gaussians on the way
DIFFERENCE = 1e-4  # of logarithms, for the derivatives of held-out scores
BOUND_ERROR = 1e-6  # of 1 + |bound|: where a variational Gaussian is taken as converged
SCORE_ERROR = 1e-9  # of a score: quadrature, and rounding errors of covariances under weak priors


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
            return climb_evidence(space)
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
        return finished(
            space.posterior_at(best.point), history_of(objective, space, best, notes), quiet
        )
    plan = read_again(posterior)
    if plan is None:
        notes.append(
            "the data cannot be read again: the averages of the variational Gaussian were kept"
        )
        best = climb(space.moved(positive_averages(posterior)))
        return finished(
            stepped(space, best.point)[0], history_of(objective, space, best, notes), quiet
        )
    if objective == EVIDENCE:
        return not_worse(posterior, alternate(space, notes, plan, quiet))

    def score(state: Posterior) -> float:
        own = LeftOut.of(state) if objective == LOO else HeldOut.of(state, data, objective, folds)
        nowhere = torch.zeros(len(space.free), dtype=torch.float64)
        value = own(space.moved(state), nowhere) + space.moved(state).expected(nowhere) / own.rows
        notes.extend(note for note in own.notes if note not in notes)
        return value

    return _search(space, score, objective, notes, plan, quiet, rough)


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
    return finished(before, replace(kept, notes=(*history.notes, note)), quiet=True)


def _search(
    space: Space,
    score: Callable[[Posterior], float],
    objective: str,
    notes: list[str],
    plan: FitPlan,
    quiet: bool,
    rough: bool,
) -> Posterior:
    """The prior of the best score, by a variational Gaussian for each that is tried: all
    precisions together, then each.
    """
    average = plan.average(space.posterior.theta, not space.posterior.tilted)
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
            state, step = stepped(
                space.moved(positive_averages(here)),
                (base + t * direction).clamp(low, high) - there,
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
    return ended(
        space, end, best, objective, notes, None if rough else plan, quiet, units, values, True
    )


def _top(a: float, b: float, c: float, fa: float, fb: float, fc: float) -> float:
    """Where the parabola through three points is highest; off the middle by at least a tenth of
    the wider side.
    """
    up, down = (b - a) * (fb - fc), (b - c) * (fb - fa)
    t = b - 0.5 * ((b - a) * up - (b - c) * down) / (up - down) if up != down else b
    wider = c - b if c - b > b - a else a - b
    return t if abs(t - b) > 0.1 * abs(wider) and a < t < c else b + 0.3 * wider


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
