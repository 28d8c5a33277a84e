"""Prior precisions and noise from the data, by the evidence or by a held-out score.

`tune` returns a new Posterior. The objectives are

  evidence      closed-form value and gradient from the sums (`ssla.fitting.evidence`): no pass over
                the data. For a variational Gaussian it is the bound, whose averages and prior are
                found in turn, by a few passes each
  loo           leave-one-out log densities of the training rows (`ssla.diagnostics.loo`)
  nll, crps     of predictions for a validation set, read once; or by k folds of the training data,
                whose sums are taken once and recombined, so that no fold is fitted again. The
                features were still learned from all rows: where they overfit, a validation set that
                the network has not seen is the right choice.

Precisions are tuned by one factor for each layer (or one for all), keeping the pattern of the prior
at hand and its means; the noise of a Gaussian likelihood by one factor. A solution at the edge of
its range is reported, as is one that did not converge.

A point (d,) holds the logarithms of these factors: see `ssla.fitting.tuning_space.Space`. The
expected precisions are those around which the user's `doubt` keeps the search.
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
from ssla.fitting.choice import find_parabola_top
from ssla.fitting.fit_plan import FitPlan
from ssla.fitting.further_passes import make_plan_to_reread
from ssla.fitting.held_out_scores import HeldOutScore, LeaveOneOutScore
from ssla.fitting.prior_choice import (
    SCAN,
    SETTLED,
    alternate_averages_and_prior,
    choose_best_start,
    finish_tuning,
    finish_variational,
    make_history,
    make_history_of_visits,
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
# Shares of the wider side of the best point: a parabola's top within BESIDE is too close to it, and
# the point at INSIDE is tried instead.
BESIDE, INSIDE = 0.1, 0.3
SEARCH_ROUNDS = 6  # passes for the Gaussians during the search
DIFFERENCE = 1e-4  # of logarithms, for the derivatives of held-out scores
BOUND_ERROR = 1e-6  # of 1 + |bound|: where a variational Gaussian is taken as converged
SLOPE_TOLERANCE, ASCENT_ROUNDS = 1e-6, 100  # of the ascent of a held-out score
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
    """Return the posterior with prior precisions and noise chosen by the data: see Posterior.tune.

    objective: EVIDENCE, LOO, NLL or CRPS. data, folds: for NLL and CRPS, a validation set, or the
    training data with their number of folds. over: which of PRIOR and NOISE are tuned. per_layer:
    whether each layer has a precision of its own. per_output: whether each output of a last layer
    has a precision of its own. within: the range of precisions; None: a wide one around the trained
    weights' scale. doubt: the standard deviation of a log precision around that of the posterior at
    hand, which keeps few held-out rows from choosing an extreme one; infinite: none. quiet: whether
    a poor solution is only noted in the report. rough: whether the posterior will not be kept: the
    search then tries fewer priors, θ̂ stays, and the variational Gaussian at the end is as accurate
    as those during the search.

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

    def make_score(candidate: Posterior) -> Score:
        """Return the score of the objective around a posterior."""
        if objective == LOO:
            return LeaveOneOutScore.from_posterior(candidate)
        return HeldOutScore.from_data(candidate, data, objective, folds)

    if posterior.variational is not None:
        return _tune_variational(space, objective, make_score, notes, quiet, rough)
    best = _find_best_point(space, objective, make_score, notes)
    history = make_history(objective, space, best, notes)
    return finish_tuning(space.make_posterior_at(best.point), history, quiet)


def _find_best_point(
    space: Space, objective: str, make_score: Callable[[Posterior], Score], notes: list[str]
) -> Maximum:
    """Find the best point of a space from its posterior's sums, without passes for averages.

    make_score: makes the score around a posterior, for an objective that is not the evidence. Its
    notes are appended to `notes`.
    """
    if objective == EVIDENCE:
        return maximise_evidence(space)
    score = make_score(space.posterior)
    best = _maximise_score(space, score)
    notes.extend(note for note in score.notes if note not in notes)
    return best


def _tune_variational(
    space: Space,
    objective: str,
    make_score: Callable[[Posterior], Score],
    notes: list[str],
    quiet: bool,
    rough: bool,
) -> Posterior:
    """Return the tuned posterior of a variational Gaussian, whose averages change with the prior.

    The averages are found again by passes over the training rows, or kept where these cannot be
    read again. space: around the posterior. make_score, notes: as in `_find_best_point`. quiet,
    rough: as in `tune`.
    """
    posterior = space.posterior
    plan = make_plan_to_reread(posterior)
    if plan is None:
        notes.append(
            "the data cannot be read again: the averages of the variational Gaussian were kept"
        )
        kept = space.move_to(with_positive_averages(posterior))
        best = _find_best_point(kept, objective, make_score, notes)
        history = make_history(objective, space, best, notes)
        return finish_tuning(step_towards(space, best.point)[0], history, quiet)
    if objective == EVIDENCE:
        tuned = alternate_averages_and_prior(space, notes, plan, quiet)
        return keep_higher_bound(posterior, tuned)

    def score_posterior(candidate: Posterior) -> float:
        """Return the score of a posterior under its own prior, with a penalty on its precisions.

        The penalty is the log density of the precisions around the expected ones, divided by the
        number of rows. Notes of the score are appended to `notes`.
        """
        score = make_score(candidate)
        moved = space.move_to(candidate)
        unchanged = torch.zeros(len(space.free), dtype=torch.float64)
        penalised = (
            score(moved, unchanged) + moved.compute_expected_log_density(unchanged) / score.weight
        )
        notes.extend(note for note in score.notes if note not in notes)
        return penalised

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
    """Try some priors with a variational Gaussian each, and return the posterior of the best score.

    space: around the posterior from which the search starts. score: of a posterior; larger is
    better. objective: its name in the history. notes: for the history. plan: the passes over the
    training rows. quiet, rough: as in `tune`.
    """
    posterior = space.posterior
    average = plan.make_average_passes_at(posterior.theta, moves=not posterior.tilted)
    start = torch.zeros(len(space.free), dtype=torch.float64)
    search = PriorSearch(space, average, score, posterior, start)
    search.search_all_directions(ROUGH_PARABOLAS if rough else PARABOLAS)
    # The Gaussians during the search were rough: the best one is found again, with all its rounds.
    tolerance = ROUGH if rough else TOLERANCE
    tuned = BoundAscent(search.best, average, tolerance=tolerance).maximise_bound()
    points = [space.compute_precisions_and_noise(point[None]) for point in search.points]
    history = make_history_of_visits(
        objective, space, search.as_maximum(), notes, points, search.values, settled=True
    )
    return finish_variational(tuned, history, None if rough else plan, quiet)


def _check_request(
    posterior: Posterior, objective: str, data: Any, over: Sequence[str], folds: int | None
) -> tuple[str, ...]:
    """Check the arguments of `tune`, and return which of PRIOR and NOISE are to be tuned.

    The arguments are those of `tune`. Raises ValueError for unknown names, another convention than
    the exact one, and data that do not suit the objective. Leave-one-out scores leave out the
    noise, and are warned about.
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
    """Return the tuned posterior, or the one before if its bound is higher, with a note.

    The bound may fall: the tuned prior is that of the exact bound for a dense curvature only, and
    of an approximate one for other structures.
    """
    history = tuned.tuning_history
    height = before.log_evidence()
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
    """A search for the prior of the best score, with a variational Gaussian for each one tried.

    The calls change the search: it holds the best posterior so far, and the way to it.
    """

    space: Space
    average: Average
    score: Callable[[Posterior], float]
    best: Posterior  # with the best score so far
    point: Tensor  # the best coordinates so far (d,)
    points: list[Tensor] = field(default_factory=list)  # the best so far, one after the other
    values: list[float] = field(default_factory=list)  # their scores
    evaluations: int = 1  # scores that were computed, with that of the start

    def search_all_directions(self, parabolas: int) -> None:
        """Search along all coordinates together, then along each of them.

        parabolas: how many parabolas refine each direction.
        """
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
        """Return the best point and the points before it, as other searches do.

        The gradient is not known, and is set to zero.
        """
        low, high = self.space.box
        return Maximum(
            self.point,
            self.values[-1],
            gradient=torch.zeros_like(self.point),
            at_bound=(self.point <= low) | (self.point >= high),
            converged=True,
            points=torch.stack(self.points),
            values=torch.tensor(self.values),
            evaluations=self.evaluations,
        )

    def _search_along(self, direction: Tensor, parabolas: int) -> None:
        """Search along a direction (d,) from the best point so far, and keep what is better.

        Points are tried at growing distances to both sides while the score rises, then at the tops
        of parabolas through the best point and its two neighbours.
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
            below = max((t for t in scores if t < highest), default=None)
            above = min((t for t in scores if t > highest), default=None)
            if below is None or above is None or above - below < SETTLED:
                break
            t = _choose_parabola_step(
                below, highest, above, scores[below], scores[highest], scores[above]
            )
            scores[t] = self._try_point(base + t * direction)

    def _try_point(self, point: Tensor) -> float:
        """Find the variational Gaussian at a point (d,), and return its score.

        The ascent starts from the best Gaussian so far. If the new one is better, it is stored in
        its place. A point outside the box, or with too weak a prior for the present averages, is
        moved to one that is allowed.
        """
        low, high = self.space.box
        start, step = step_towards(
            self.space.move_to(with_positive_averages(self.best)),
            point.clamp(low, high) - self.point,
        )
        ascent = BoundAscent(start, self.average, tolerance=ROUGH, most=SEARCH_ROUNDS)
        tried = ascent.maximise_bound()

        # The report keeps its notes: those on a Gaussian during the search do not belong there.
        report = replace(self.best.report, rounds=tried.report.rounds)
        tried = replace(tried, report=report)
        score = self.score(tried)
        self.evaluations += 1
        if score > self.values[-1]:
            self.best = tried
            self.point = self.point + step
            self.points.append(self.point)
            self.values.append(score)
        return score


def _choose_parabola_step(a: float, b: float, c: float, fa: float, fb: float, fc: float) -> float:
    """Return the point to try next between a < b < c, where the values are fa, fb and fc.

    fb must be the highest value. The next point is the top of the parabola through the three, if
    that is between a and c and not beside b. Otherwise it is inside the wider side of b.
    """
    wider = c - b if c - b > b - a else a - b
    top = find_parabola_top(a, b, c, fa, fb, fc)
    # A point beside b adds little.
    if top is None or abs(top - b) <= BESIDE * abs(wider) or not a < top < c:
        return b + INSIDE * wider
    return top


def _maximise_score(space: Space, held_out: Score) -> Maximum:
    """Find the point of the best score by an ascent, with gradients by central differences.

    held_out: maps a space and a point (d,) to the score; larger is better. The ascent starts from
    the best of the present prior and a scan over all precisions together. A gradient takes 2d
    scores.
    """
    low, high = space.box
    start = torch.zeros(len(space.free), dtype=torch.float64)

    # A score in the unit of the targets is divided by its size at the start.
    unit = abs(held_out(space, start.clamp(low, high))) if held_out.in_target_units else 1.0

    def score(point: Tensor) -> float:
        """Return the penalised score at a point (d,), in the unit above.

        The log density of the precisions around the expected ones, a row, is added.
        """
        return (
            held_out(space, point) / unit
            + space.compute_expected_log_density(point) / held_out.weight
        )

    def score_and_slope(point: Tensor) -> tuple[float, Tensor]:
        """Return the value of `score` at a point (d,), and its gradient (d,)."""
        steps = DIFFERENCE * torch.eye(len(point), dtype=torch.float64)
        slope = [(score(point + h) - score(point - h)) / (2 * DIFFERENCE) for h in steps]
        return score(point), torch.tensor(slope, dtype=torch.float64)

    starts = start[None]
    if space.has_free_precisions:
        starts = torch.cat([starts, space.make_scan_points(SCAN)])
    first, heights = choose_best_start(starts, space, score)
    best = maximise_in_box(
        score_and_slope,
        first,
        low,
        high,
        tolerance=SLOPE_TOLERANCE,
        noise=SCORE_ERROR,
        rounds=ASCENT_ROUNDS,
    )
    points, values = best.points, best.values

    # The history begins at the present prior, also where the ascent began elsewhere.
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
        # The scan took one score for each start, and a unit that is not one took another.
        evaluations=evaluations + len(starts) + int(held_out.in_target_units),
    )
