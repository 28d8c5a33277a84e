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
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ssla._checks import check_name, warn
from ssla.fitting.choice import parabola_top
from ssla.fitting.fit_plan import FitPlan
from ssla.fitting.further_passes import plan_to_reread
from ssla.fitting.held_out_scores import HeldOutScore, LeaveOneOutScore
from ssla.fitting.prior_choice import (
    SCAN,
    SETTLED,
    alternate_averages_and_prior,
    best_start,
    finish_tuning,
    finish_variational,
    history_of_visits,
    make_history,
    maximise_evidence,
    step_towards,
    with_positive_averages,
)
from ssla.fitting.tuning_space import CRPS, EVIDENCE, LOO, NLL, NOISE, PRIOR, Space
from ssla.fitting.variational import ROUGH, TOLERANCE, Average, BoundAscent
from ssla.maths.bfgs import Maximum, maximise_in_box
from ssla.priors import EXACT

if TYPE_CHECKING:
    from ssla.posterior import Posterior

# The numbers below were not measured: they are guesses, unless a comment says otherwise.
STRIDE, FARTHEST, PARABOLAS = 1.5, 12.0, 3  # of a search in logarithms
ROUGH_PARABOLAS = 2
SEARCH_ROUNDS = 6  # passes for the Gaussians on the way
DIFFERENCE = 1e-4  # of logarithms, for the derivatives of held-out scores
BOUND_ERROR = 1e-6  # of 1 + |bound|: where a variational Gaussian is taken as converged
SCORE_ERROR = 1e-9  # of a score: quadrature, and rounding errors of covariances under weak priors

Score = HeldOutScore | LeaveOneOutScore


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
    """Choose prior precisions and noise by the data: see Posterior.tune.

    per_output: one precision for each output of a last layer. within: the range of precisions;
    None: a wide one around the trained weights' scale. doubt: the standard deviation of
    a log precision around that of the posterior at hand, which keeps few held-out rows from
    choosing an extreme one. quiet: a poor solution is noted in the report only. rough: the
    posterior will not be kept, so that the search tries fewer priors, θ̂ stays, and the variational
    Gaussian at the end is as accurate as those on the way.

    Raises ValueError for unknown names, for data that do not suit the objective, and where there
    is nothing to tune.
    """
    chosen = _check_request(posterior, objective, data, over, folds)
    space, notes = Space.around(posterior, chosen, per_layer, per_output)
    expected = space.levels if doubt < math.inf else None
    space = replace(space, within=within, expected_levels=expected, doubt=doubt)
    if not space.names:
        raise ValueError(
            f"There is nothing to tune: over={chosen!r}, and "
            f"{notes[0] if notes else 'it is empty'}."
        )

    def score_of(state: Posterior) -> Score:
        """Return the score of the objective around a posterior."""
        if objective == LOO:
            return LeaveOneOutScore.from_posterior(state)
        return HeldOutScore.from_data(state, data, objective, folds)

    def find_best(space: Space) -> Maximum:
        """Find the best point of a space without passes for averages."""
        if objective == EVIDENCE:
            return maximise_evidence(space)
        score = score_of(space.posterior)
        best = _maximise_score(space, score)
        notes.extend(note for note in score.notes if note not in notes)
        return best

    if posterior.variational is None:
        best = find_best(space)
        history = make_history(objective, space, best, notes)
        return finish_tuning(space.posterior_at(best.point), history, quiet)
    plan = plan_to_reread(posterior)
    if plan is None:
        notes.append(
            "the data cannot be read again: the averages of the variational Gaussian were kept"
        )
        best = find_best(space.moved_to(with_positive_averages(posterior)))
        history = make_history(objective, space, best, notes)
        return finish_tuning(step_towards(space, best.point)[0], history, quiet)
    if objective == EVIDENCE:
        tuned = alternate_averages_and_prior(space, notes, plan, quiet)
        return keep_higher_bound(posterior, tuned)

    def score_posterior(state: Posterior) -> float:
        """Return the score of a posterior under its own prior, with what is expected of that."""
        score = score_of(state)
        moved = space.moved_to(state)
        unchanged = torch.zeros(len(space.free), dtype=torch.float64)
        value = score(moved, unchanged) + moved.expected_log_density(unchanged) / score.rows
        notes.extend(note for note in score.notes if note not in notes)
        return value

    return _search_by_passes(space, score_posterior, objective, notes, plan, quiet, rough)


def _search_by_passes(
    space: Space,
    score: Callable[[Posterior], float],
    objective: str,
    notes: list[str],
    plan: FitPlan,
    quiet: bool,
    rough: bool,
) -> Posterior:
    """Return the posterior with the best score, of those with a variational Gaussian for each prior
    that is tried.

    notes: for the history. plan: the passes over the training rows. quiet, rough: as in `tune`.
    """
    posterior = space.posterior
    average = plan.average_passes_at(posterior.theta, not posterior.tilted)
    start = torch.zeros(len(space.free), dtype=torch.float64)
    search = PriorSearch(space, average, score, posterior, start)
    search.search_all_directions(ROUGH_PARABOLAS if rough else PARABOLAS)
    # The Gaussians on the way were rough: the best one is found again, to its end.
    tolerance = ROUGH if rough else TOLERANCE
    tuned = BoundAscent(search.best, average, tolerance=tolerance).maximise_bound()
    points = [space.precisions_and_noise(point[None]) for point in search.points]
    history = history_of_visits(
        objective, space, search.as_maximum(), notes, points, search.values, settled=True
    )
    return finish_variational(tuned, history, None if rough else plan, quiet)


def _check_request(
    posterior: Posterior, objective: str, data: Any, over: Sequence[str], folds: int | None
) -> tuple[str, ...]:
    """Check what tuning is asked for, and return what is to be tuned.

    Raises ValueError for unknown names, another convention than the exact one, and data that do not
    suit the objective. Warns of leave-one-out scores.
    """
    check_name("objective", objective, (EVIDENCE, NLL, CRPS, LOO))
    chosen = (over,) if isinstance(over, str) else tuple(over)
    for name in chosen:
        check_name("thing to tune over", name, (PRIOR, NOISE))
    if posterior.convention != EXACT:
        raise ValueError(
            f"Tuning needs the exact convention, but this posterior has {posterior.convention!r}: "
            "use with_prior(prior) first."
        )
    by_training_rows = objective in (EVIDENCE, LOO)
    if by_training_rows and (data is not None or folds is not None):
        raise ValueError(
            f"objective={objective!r} comes from the data of the fit and takes none. For held-out "
            "data use 'nll' or 'crps'."
        )
    if not by_training_rows and data is None:
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
    return chosen


def keep_higher_bound(before: Posterior, tuned: Posterior) -> Posterior:
    """Return the tuned posterior, unless its bound is lower than the one before; then the one
    before, with a note.

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
    unchanged = replace(
        history,
        points=history.points[:1],
        values=torch.tensor([height], dtype=torch.float64),
        notes=(*history.notes, note),
    )
    return finish_tuning(before, unchanged, quiet=True)


@dataclass(eq=False)
class PriorSearch:
    """A search for the prior of the best score, by a variational Gaussian for each that is tried:
    all precisions together, then each.
    """

    space: Space
    average: Average
    score: Callable[[Posterior], float]
    best: Posterior  # with the best score so far
    point: Tensor  # the best coordinates so far (d,)
    points: list[Tensor] = field(default_factory=list)  # the best ones, one after the other
    values: list[float] = field(default_factory=list)  # their scores
    evaluations: int = 1

    def search_all_directions(self, parabolas: int) -> None:
        """Search along all coordinates together, then along each."""
        self.points.append(self.point)
        self.values.append(self.score(self.best))
        with warnings.catch_warnings():  # far from the best, Gaussians may be rough
            warnings.simplefilter("ignore", UserWarning)
            warnings.simplefilter("ignore", RuntimeWarning)
            self._search_along(torch.ones_like(self.point), parabolas)
            if len(self.point) > 1:
                for direction in torch.eye(len(self.point), dtype=torch.float64):
                    self._search_along(direction, parabolas)

    def as_maximum(self) -> Maximum:
        """Return the best point, and the way to it."""
        low, high = self.space.box
        return Maximum(
            self.point,
            self.values[-1],
            torch.zeros_like(self.point),
            (self.point <= low) | (self.point >= high),
            True,
            torch.stack(self.points),
            torch.tensor(self.values),
            self.evaluations,
        )

    def _search_along(self, direction: Tensor, parabolas: int) -> None:
        """Search along a direction (d,) from the best point so far: outwards while the score
        rises, then by parabolas.
        """
        base = self.point
        scores = {0.0: self.values[-1]}  # by the distance along the direction
        for stride in (STRIDE, -STRIDE):
            t = stride
            while abs(t) <= FARTHEST:
                scores[t] = self._try_point(base + t * direction)
                if not scores[t] >= scores[t - stride]:
                    break
                t += stride
        for _ in range(parabolas):
            highest = max(scores, key=lambda t: scores[t])
            left = max((t for t in scores if t < highest), default=None)
            right = min((t for t in scores if t > highest), default=None)
            if left is None or right is None or right - left < SETTLED:
                break
            t = _parabola_step(left, highest, right, scores[left], scores[highest], scores[right])
            scores[t] = self._try_point(base + t * direction)

    def _try_point(self, point: Tensor) -> float:
        """Find the variational Gaussian at a point (d,), from the best one so far, and return its
        score; keep it if it is better.
        """
        low, high = self.space.box
        start, step = step_towards(
            self.space.moved_to(with_positive_averages(self.best)),
            point.clamp(low, high) - self.point,
        )
        ascent = BoundAscent(start, self.average, tolerance=ROUGH, most=SEARCH_ROUNDS)
        state = ascent.maximise_bound()
        # Notes of Gaussians on the way do not belong into the report.
        report = replace(self.best.report, rounds=state.report.rounds)
        state = replace(state, report=report)
        value = self.score(state)
        self.evaluations += 1
        if value > self.values[-1]:
            self.best = state
            self.point = self.point + step
            self.points.append(self.point)
            self.values.append(value)
        return value


def _parabola_step(a: float, b: float, c: float, fa: float, fb: float, fc: float) -> float:
    """Return where the parabola through three points is highest; off the middle by at least a tenth
    of the wider side.
    """
    wider = c - b if c - b > b - a else a - b
    top = parabola_top(a, b, c, fa, fb, fc)
    # Near the middle there is nothing new to learn: a third of the wider side is tried instead.
    if top is None or abs(top - b) <= 0.1 * abs(wider) or not a < top < c:
        return b + 0.3 * wider
    return top


def _maximise_score(space: Space, held_out: Score) -> Maximum:
    """Find the best score by an ascent with central differences: 2d scores a gradient."""
    low, high = space.box
    start = torch.zeros(len(space.free), dtype=torch.float64)
    unit = abs(held_out(space, start.clamp(low, high))) if held_out.in_target_units else 1.0

    def score(point: Tensor) -> float:
        """Return the score at a point (d,), about one, with what is expected of the precisions."""
        return held_out(space, point) / unit + space.expected_log_density(point) / held_out.rows

    def score_and_slope(point: Tensor) -> tuple[float, Tensor]:
        """Return the score at a point (d,), and its gradient (d,)."""
        steps = DIFFERENCE * torch.eye(len(point), dtype=torch.float64)
        slope = [(score(point + h) - score(point - h)) / (2 * DIFFERENCE) for h in steps]
        return score(point), torch.tensor(slope, dtype=torch.float64)

    starts = start[None]
    if space.has_free_precisions:
        starts = torch.cat([starts, space.scan_points(SCAN)])
    first, heights = best_start(starts, space, score)
    best = maximise_in_box(
        score_and_slope, first, low, high, tolerance=1e-6, noise=SCORE_ERROR, rounds=100
    )
    points, values = best.points, best.values
    # The history begins at the prior at hand, also where the ascent began elsewhere.
    if not torch.equal(points[0], start.clamp(low, high)):
        points = torch.cat([start[None], points])
        values = torch.cat([heights[:1].double(), values])
    # A gradient takes two scores a coordinate beside the value.
    evaluations = best.evaluations * (2 * len(space.free) + 1)
    return replace(
        best,
        points=points,
        value=best.value * unit,
        values=values * unit,
        gradient=best.gradient * unit,
        evaluations=evaluations + len(starts) + held_out.in_target_units,
    )
