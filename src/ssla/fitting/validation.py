"""The posterior that rows choose which the network has not seen.

A network has memorised its training rows: their evidence says too little noise and too much
confidence. Validation rows decide

  the dispersion   a factor on the noise, a temperature of classes, an overdispersion of counts
  the prior        a factor on the precisions of the trained weights' scale
  the mode         the trained head (tilt), or the polished one where that is affordable
  the Gaussian     the one at the mode (laplace), or the variational one
  a scale of rows  where the confidence of a classifier clearly grows too fast with the length of
  its features

by the rule of `ssla.fitting.choice`. Features of these rows are computed once; every setting is
then a prediction in output space. Searches on the way are rough (fewer rows and nodes); the
posterior of the chosen setting is fitted on all training rows as if it had been asked for.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ssla.data import Source
from ssla.fitting.choice import Setting, best_spread, cross_fitted, mean_and_error
from ssla.fitting.fit import fit_at_mode, fit_with_prior
from ssla.fitting.fit_plan import FitPlan, InputFactors
from ssla.fitting.guard import warn_on_validation_rows
from ssla.fitting.network_itself import best_spread as best_spread_of_network
from ssla.fitting.network_itself import chosen_row_scale
from ssla.fitting.noise import at_noise
from ssla.fitting.passes import Reader, thinned
from ssla.fitting.ranks import the_same_rows
from ssla.fitting.score_table import Scored, ScoreTable
from ssla.fitting.steps import climb
from ssla.fitting.tuning_space import posterior_prior
from ssla.fitting.validation_rows import Candidate, ValidationRows
from ssla.fitting.variational import ROUGH
from ssla.likelihoods import Likelihood
from ssla.likelihoods.likelihood import Dispersed, dispersed, dispersion_in_words
from ssla.maths.digests import digest
from ssla.network import LastLayer
from ssla.predictive.cavities import ranks
from ssla.priors import BoundGaussian
from ssla.report import LAPLACE, POLISH, TILT, VARIATIONAL, TuningHistory, Validation
from ssla.values import Statistics

if TYPE_CHECKING:
    from ssla.posterior import Posterior

# The doubt explains a part of the errors: the dispersion beside it lies between one and the best
# one without doubt. The steps are guesses; a parabola through three of them refines the choice.
SPREAD_STEP, FEWEST_SPREADS, MARGIN = 1.3, 3, 1.15
# Factors on the prior precision, from a strong prior to a weak one, that some of the rows locate;
# then finer around the best. On clinc, by 64 nodes, half a decade below the best costs .05 nats and
# above it .02; a part of that is the error of so few nodes.
PRECISIONS = tuple(4.0**k for k in range(5, -7, -1))
# Below it, prior standard deviations are 64 times the trained weights: what the rows leave open (a
# shift of all logits) would have variances beside which float32 loses the rest.
LEAST_PRECISION = PRECISIONS[-1]
FINER = tuple(2.0 ** (k / 2) for k in range(4, -5, -1))
COARSE_ROWS = 1000
VARIATIONAL_SPREADS = (1.0, 0.8, 1.25)  # around the best of laplace
VARIATIONAL_PRECISIONS = tuple(2.0**k for k in range(2, -7, -1))
SEARCH_ROWS = 4_000  # training rows of variational Gaussians on the way
SEARCH_ROUNDS = 8  # passes for each of them
POLISH_WORK = (
    1e9  # rows × parameters²: beyond, polished heads take long, and only a given mode has them
)
POLISH_PRECISIONS = tuple(8.0**k for k in range(3, -5, -1))
POLISH_FINER = (2 * math.sqrt(2), math.sqrt(2) / 4)
POLISH_SPREADS = (1 / 1.2, 1.0, 1.2)  # around the best one without doubt
COVERAGE_ROWS = 1000
LEVELS = (0.5, 0.9, 0.95)


def choose_by_validation(plan: FitPlan, validation: Source, held_out: bool) -> Posterior:
    """The posterior of the setting that validation rows choose, with what they say in its
    report.
    """
    plan, start = trained_state(plan)
    as_it_came = rows = the_same_rows(
        lambda: ValidationRows.read(start, validation),
        lambda own: digest((own.y, own.weights, own.f)),
    )
    scale = chosen_row_scale(rows, start.likelihood)
    if scale is not None:
        plan.data.scale_rows(scale)
        plan, start = trained_state(replace(plan, inputs=InputFactors()))
        rows = rows.scaled(start)
    search = Search(plan, start, rows)
    with _quiet():
        search.run()
    table = search.table
    spread = best_spread(table.settings, table.scores, rows.weights, table.choice)
    setting = table.settings[table.choice]._replace(spread=spread)
    posterior = fit_with_prior(search.plan_at(setting))
    return _with_report(posterior, search, as_it_came, setting, held_out)


def trained_state(plan: FitPlan) -> tuple[FitPlan, Posterior]:
    """Where a search starts: the Gaussian at the trained weights, under the prior of their scale.

    Or as `mode` says. And the plan with the structure that was chosen for it, so that all settings
    share it.
    """
    mode = plan.mode if plan.mode is not None else TILT
    with _quiet():
        first, start = fit_at_mode(replace(plan, prior=None, mode=mode, validated=True))
    if plan.prior is not None:
        start = replace(start, prior=plan.prior)
    learned = replace(
        plan,
        structure=first.structure,
        automatic=False,
        reason=first.reason,
        inputs=first.inputs,
        rows=first.rows,
        repeatable=first.repeatable,
    )
    return learned, start


@contextmanager
def _quiet() -> Iterator[None]:
    """Warnings of settings on the way would mislead; the chosen one is fitted again and warns
    itself.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@dataclass(eq=False)
class Search:
    """Settings that are scored on validation rows, and what their scores need."""

    plan: FitPlan
    start: Posterior
    rows: ValidationRows

    @cached_property
    def whole(self) -> ScoreTable:
        """All settings that were scored on all rows."""
        return ScoreTable(self.rows)

    @property
    def table(self) -> ScoreTable:
        """Those of the Gaussian that was asked for."""
        return self.whole.of(self.plan.gaussian)

    def run(self) -> None:
        """Score settings by families: the cheapest first, which say where to look for the
        others.
        """
        if self.mode != POLISH:
            self._tilted()
        if self.mode == POLISH or (self.plan.mode is None and self._polishes):
            self._polished()
        if self._averages and self.mode != POLISH:
            self._variational()

    # --- what is asked for, and what it means --------------------------------------------------

    @property
    def mode(self) -> str:
        return self.start.mode

    @property
    def fixed_spread(self) -> bool:
        return len(self.spreads) == 1

    @property
    def fixed_prior(self) -> bool:
        return self.plan.prior is not None

    @property
    def _by_noise(self) -> bool:
        """Whether precisions are relative to the noise, so that K is s² times that at noise one.

        With H = (S + ρ)/s² of Gaussian noise, one factorisation serves every noise.
        """
        return self.start.likelihood.quadratic and not self.fixed_prior

    @property
    def precisions(self) -> tuple[float, ...]:
        return (1.0,) if self.fixed_prior else PRECISIONS

    @cached_property
    def network_spread(self) -> float:
        """The dispersion that is best for the network itself, without doubt."""
        return self._spread_without_doubt(None)

    def _spread_without_doubt(self, step: Tensor | None) -> float:
        """The best dispersion of the network itself, with its free weights moved by `step`."""
        return best_spread_of_network(self.rows, self.start.likelihood, self.rows.outputs(step))

    @cached_property
    def spreads(self) -> tuple[float, ...]:
        """Factors on the dispersion, from the smallest: those between one and the network's
        own, with both of them.
        """
        if not isinstance(self.start.likelihood, Dispersed):
            return (1.0,)
        low, high = self._range
        count = max(math.ceil(math.log(high / low) / math.log(SPREAD_STEP)) + 1, FEWEST_SPREADS)
        spreads = [low * (high / low) ** (k / (count - 1)) for k in range(count)]
        for own in (1.0, self.network_spread):
            nearest = min(range(count), key=lambda k: abs(math.log(spreads[k] / own)))
            spreads[nearest] = own
        return tuple(dict.fromkeys(spreads))

    @property
    def _range(self) -> tuple[float, float]:
        """The least and the largest factor on the dispersion."""
        return min(1.0, self.network_spread) / MARGIN, max(1.0, self.network_spread) * MARGIN

    def likelihood_at(self, spread: float) -> Likelihood:
        return dispersed(self.start.likelihood, spread)

    def precision_at(self, setting: Setting) -> Tensor:
        """−∇² log π of the setting's prior (P,) or (P, P)."""
        bound = self.start.bound_prior
        if not isinstance(bound, BoundGaussian):
            return bound.precision(self.start.theta)
        level = setting.precision / setting.spread**2 if self._by_noise else setting.precision
        return level * bound.scale_precision

    def state_at(self, setting: Setting, statistics: Statistics) -> Posterior:
        """The Gaussian at the trained weights in that setting."""
        prior = (
            self.start.prior
            if self.fixed_prior
            else posterior_prior(self.start, self.precision_at(setting))
        )
        likelihood = self.likelihood_at(setting.spread)
        return replace(
            self.start, likelihood=likelihood, prior=prior, statistics=statistics, mode=setting.mode
        )

    def plan_at(self, setting: Setting) -> FitPlan:
        """The fit of all training rows in that setting."""
        prior = (
            self.plan.prior
            if self.fixed_prior
            else posterior_prior(self.start, self.precision_at(setting))
        )
        likelihood = self.likelihood_at(setting.spread)
        gaussian = setting.gaussian if self.plan.gaussian is None else self.plan.gaussian
        return replace(
            self.plan,
            likelihood=likelihood,
            prior=prior,
            mode=setting.mode,
            gaussian=gaussian,
            validated=True,
        )

    # --- families of settings ------------------------------------------------------------------

    def _tilted(self) -> None:
        """The trained head with the Gaussian at it: roughly on some of the rows, then finely on
        all.
        """
        coarse = ScoreTable(self.rows.thinned(COARSE_ROWS))
        for spread in self.spreads:
            settings = [Setting(self.mode, LAPLACE, spread, level) for level in self.precisions]
            coarse.descend([(setting, self._tilted_candidate(setting))] for setting in settings)
        best = coarse.settings[
            coarse.choice
        ]  # not the very best: the rule looks for doubt, which costs a little
        place = self.spreads.index(best.spread)
        for spread in self.spreads[max(place - 1, 0) : place + 2]:
            levels = self._around(best.precision, FINER)
            settings = [Setting(self.mode, LAPLACE, spread, level) for level in levels]
            self.whole.descend([(setting, self._tilted_candidate(setting))] for setting in settings)

    def _around(self, level: float, factors: tuple[float, ...]) -> list[float]:
        """Prior precisions around one, from the strongest on; that one alone where a prior was
        given.
        """
        if self.fixed_prior:
            return [level]
        return list(dict.fromkeys(max(level * factor, LEAST_PRECISION) for factor in factors))

    def _tilted_candidate(self, setting: Setting) -> Candidate:
        likelihood = self.likelihood_at(setting.spread)
        if self._by_noise:
            unit = self._operators(setting.precision)
            return Candidate(likelihood, unit, None, setting.spread)
        curvature = self._statistics(setting.spread).curvature
        return Candidate(likelihood, curvature.with_prior(self.precision_at(setting)), None)

    def _operators(self, level: float) -> Any:
        """H⁻¹ at the noise at hand under that prior; computed once for all noises."""
        known = self._known_operators
        if level not in known:
            setting = Setting(self.mode, LAPLACE, 1.0, level)
            known[level] = self.start.statistics.curvature.with_prior(self.precision_at(setting))
        return known[level]

    @cached_property
    def _known_operators(self) -> dict[float, Any]:
        return {}

    @cached_property
    def _known_statistics(self) -> dict[float, Statistics]:
        return {1.0: self.start.statistics}

    def _statistics(self, spread: float) -> Statistics:
        """Sums over the training rows at θ̂ with that dispersion: a pass, but for Gaussian
        noise.
        """
        known = self._known_statistics
        if spread not in known:
            if self.start.likelihood.quadratic:
                known[spread] = at_noise(self.start, spread).statistics
            else:
                plan = replace(self.plan, likelihood=self.likelihood_at(spread), mode=self.mode)
                known[spread] = plan.sums_at(self.start.theta)
        return known[spread]

    @property
    def _polishes(self) -> bool:
        """Whether polished heads are cheap enough to be tried by default."""
        if not self.start.network.linear:
            return False
        work = self.start.statistics.n * self.start.theta.numel() ** 2
        return self.start.quadratic or work <= POLISH_WORK

    def _polished(self) -> None:
        """Heads at the mode of each prior, each with the dispersions that suit it."""
        table = ScoreTable(self.rows)
        table.descend(
            self._polished_group(level)
            for level in ((1.0,) if self.fixed_prior else POLISH_PRECISIONS)
        )
        if table.settings and not self.fixed_prior:
            near = [table.best.precision * factor for factor in POLISH_FINER]
            table.add([scored for level in near for scored in self._polished_group(level)])
        self.whole.extend(table)

    def _polished_group(self, level: float) -> list[Scored]:
        """A polished head with a few dispersions.

        A temperature of classes is the scale of its prior: one is enough.
        """
        first = Setting(POLISH, self._gaussian_of_polish, 1.0, level)
        if self.start.quadratic and self._by_noise:
            step = self._quadratic_step(first)
            middle = self._spread_without_doubt(step)
            group = [first._replace(spread=middle * factor) for factor in POLISH_SPREADS]
            return [(setting, self._quadratic_candidate(setting, step)) for setting in group]
        found = self._polished_candidate(first)
        if (
            found is None
            or self.start.likelihood.support_for(self.start.network.outputs).kind == "class"
        ):
            return [(first, found)]
        other = first._replace(spread=self._spread_without_doubt(found.step))
        return [(first, found), (other, self._polished_candidate(other))]

    @property
    def _gaussian_of_polish(self) -> str:
        return VARIATIONAL if self._averages and self.plan.gaussian != LAPLACE else LAPLACE

    def _quadratic_step(self, setting: Setting) -> Tensor:
        """To the mode under that prior: with Gaussian noise it follows from the sums, whatever
        the noise is.
        """
        prior = posterior_prior(self.start, self.precision_at(setting))
        theta, _ = self.start.statistics.at_mode(
            prior.bind(self.start.network.layout), self.start.theta
        )
        return theta - self.start.theta

    def _quadratic_candidate(self, setting: Setting, step: Tensor) -> Candidate:
        operator = self._operators(setting.precision)
        return Candidate(self.likelihood_at(setting.spread), operator, step, setting.spread)

    def _polished_candidate(self, setting: Setting) -> Candidate | None:
        """By passes over the training rows; None where there is no mode."""
        plan = self.plan_at(setting)
        try:
            found = fit_with_prior(replace(plan, tolerance=ROUGH))
        except ValueError:
            return None
        return self._candidate_of(found)

    def _candidate_of(self, state: Posterior) -> Candidate:
        return Candidate(state.likelihood, state.covariance, state.mean - self.start.theta)

    @property
    def _averages(self) -> bool:
        """Whether variational Gaussians can be had."""
        gaussian = None if self.plan.gaussian is None else VARIATIONAL
        return self.plan.gaussian != LAPLACE and replace(self.plan, gaussian=gaussian).averages

    def _variational(self) -> None:
        """Variational Gaussians of the trained head, around the best setting of laplace, each
        from the one before it.
        """
        laplace = self.whole.of(LAPLACE)
        best = laplace.settings[laplace.choice]
        levels = self._around(best.precision, VARIATIONAL_PRECISIONS)
        low, high = self._range
        tried = (1.0,) if self.fixed_spread else VARIATIONAL_SPREADS
        for spread in dict.fromkeys(min(max(factor * best.spread, low), high) for factor in tried):
            plan = self._search_plan(self.likelihood_at(spread))
            settings = [Setting(self.mode, VARIATIONAL, spread, level) for level in levels]
            self.whole.descend(self._variational_candidates(settings, plan))

    def _search_plan(self, likelihood: Likelihood) -> FitPlan:
        """Passes over some of the training rows, which count for all of them."""
        data = self.plan.data
        if isinstance(data, Reader):
            data = thinned(data, SEARCH_ROWS)
        return replace(
            self.plan,
            data=data,
            likelihood=likelihood,
            mode=self.mode,
            gaussian=None,
            tolerance=ROUGH,
        )

    def _variational_candidates(
        self, settings: list[Setting], plan: FitPlan
    ) -> Iterator[list[Scored]]:
        """Each found from the one before it."""
        for setting in settings:
            state = self.state_at(setting, self._statistics(setting.spread))
            found = replace(climb(plan, state), most=SEARCH_ROUNDS).run()
            plan = replace(plan, start=found.variational)
            yield [(setting, Candidate(state.likelihood, found.covariance, None))]


# --- what the rows say ---------------------------------------------------------------------------


def _with_report(
    posterior: Posterior,
    search: Search,
    as_it_came: ValidationRows,
    setting: Setting,
    held_out: bool,
) -> Posterior:
    """The posterior with the figures of the validation rows in its report.

    `as_it_came`: the rows without a scale of rows.
    """
    rows, start = search.rows, search.start
    table, weights = search.table, rows.weights
    plug_in = as_it_came.plug_in(start.likelihood)
    network_spread = best_spread_of_network(as_it_came, start.likelihood, as_it_came.f)
    scaled = as_it_came.plug_in(search.likelihood_at(network_spread))
    found = cross_fitted(table.settings, table.scores, weights)
    gain = mean_and_error(found - plug_in, weights)
    rescaled = mean_and_error(scaled - plug_in, weights)
    certain = network_spread if rescaled.mean > 2 * rescaled.error else 1.0
    kept = bool((posterior.theta == start.theta).all()) or start.network.linear
    own = Candidate(posterior.likelihood, posterior.covariance, posterior.mean - start.theta)
    validation = Validation(
        rows=rows.count,
        plug_in=-mean_and_error(plug_in, weights).mean,
        scaled_plug_in=-mean_and_error(scaled, weights).mean,
        predictive=-mean_and_error(found, weights).mean,
        gain=gain.mean,
        gain_error=gain.error,
        network_spread=network_spread,
        words=dispersion_in_words(start.likelihood, certain),
        spread=setting.spread,
        precision=setting.precision,
        settings=len(table.settings),
        coverage=_coverage(rows, own) if kept else {},
        held_out=held_out,
        mode=setting.mode,
        row_scales=_row_scales(rows),
    )
    if kept:
        with _quiet():
            final = rows.scores([own])[0]
        warn_on_validation_rows(final, plug_in, weights)
    report = replace(posterior.report, validation=validation)
    return replace(posterior, report=report, tuning_history=_history(table, setting))


def _history(table: ScoreTable, chosen: Setting) -> TuningHistory:
    """Every setting that was scored on all rows; then the chosen one, with the score of the
    nearest.
    """
    names = ("factor on the dispersion", "factor on the precision", "polished", "variational")
    points = [
        (own.spread, own.precision, float(own.mode == POLISH), float(own.gaussian == VARIATIONAL))
        for own in (*table.settings, chosen)
    ]
    means = table.scores @ table.rows.weights / table.rows.weights.sum()
    return TuningHistory(
        "log density of validation rows",
        names,
        torch.tensor(points, dtype=torch.float64),
        torch.cat([means, means[table.choice, None]]),
        torch.zeros(len(names), dtype=torch.float64),
        True,
        (),
        len(table.settings),
    )


def _row_scales(rows: ValidationRows) -> tuple[float, float] | None:
    """By what the outputs of most rows were divided: the quantiles of 5% and 95%.

    None without a scale of rows.
    """
    network = rows.posterior.network
    if not isinstance(network, LastLayer) or network.row_scale is None or rows.squares is None:
        return None
    ordered = network.row_scale.of_squares(rows.squares).sort().values
    return float(ordered[int(0.05 * len(ordered))]), float(ordered[int(0.95 * len(ordered))])


def _coverage(rows: ValidationRows, own: Candidate) -> dict[str, float]:
    """The share of rows inside the intervals (for classes: smallest sets) of each level, by
    weight.
    """
    inside = dict.fromkeys(LEVELS, 0.0)
    total = 0.0
    for predictive, y, weights in rows.predictives(own, COVERAGE_ROWS):
        lower, upper = ranks(predictive, y)
        for level in LEVELS:
            tail = (1 - level) / 2
            hit = (
                lower < level
                if predictive.kind == "class"
                else (upper >= tail) & (lower <= 1 - tail)
            )
            share = hit.double() if hit.dim() == 1 else hit.double().mean(1)
            inside[level] += float(weights @ share)
        total += float(weights.sum())
    return {f"{level:g}": hits / total for level, hits in inside.items()} if total > 0 else {}
