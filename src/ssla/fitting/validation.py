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
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ssla.curvature import Operator
from ssla.data import Source
from ssla.fitting.choice import Setting, cross_fitted_scores, mean_and_error, refined_spread
from ssla.fitting.fit import fit_at_mode, fit_with_prior
from ssla.fitting.fit_plan import FitPlan, InputFactors
from ssla.fitting.guard import warn_on_validation_rows
from ssla.fitting.network_itself import best_spread_without_doubt, choose_row_scale
from ssla.fitting.noise import at_noise
from ssla.fitting.passes import Reader, thin_reader
from ssla.fitting.ranks import read_same_rows
from ssla.fitting.score_table import ScoreTable, SettingWithGaussian
from ssla.fitting.steps import bound_ascent
from ssla.fitting.tuning_space import prior_with_precision
from ssla.fitting.validation_rows import Candidate, ValidationRows
from ssla.fitting.variational import ROUGH
from ssla.likelihoods import Likelihood
from ssla.likelihoods.likelihood import Dispersed, dispersion_in_words, with_dispersion
from ssla.maths.digests import digest
from ssla.network import LastLayer
from ssla.predictive.cavities import rank_targets
from ssla.priors import BoundGaussian, Prior
from ssla.report import LAPLACE, POLISH, TILT, VARIATIONAL, TuningHistory, Validation
from ssla.values import Statistics

if TYPE_CHECKING:
    from ssla.posterior import Posterior

# The numbers below were not measured: they are guesses, unless a comment says otherwise.
# The doubt explains a part of the errors: the dispersion beside it lies between one and the best
# one without doubt. A parabola through three of the steps refines the choice.
SPREAD_STEP, FEWEST_SPREADS, MARGIN = 1.3, 3, 1.15
# Factors on the prior precision, from a strong prior to a weak one, that some of the rows locate;
# then finer around the best. On clinc (benchmarks/networks), by 64 nodes, half a decade below the
# best costs .05 nats and above it .02; a part of that is the error of so few nodes.
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
# rows × parameters²: beyond, polished heads take long, and only a given mode has them
POLISH_WORK = 1e9
POLISH_PRECISIONS = tuple(8.0**k for k in range(3, -5, -1))
POLISH_FINER = (2 * math.sqrt(2), math.sqrt(2) / 4)
POLISH_SPREADS = (1 / 1.2, 1.0, 1.2)  # around the best one without doubt
COVERAGE_ROWS = 1000
LEVELS = (0.5, 0.9, 0.95)


def choose_by_validation(plan: FitPlan, validation: Source, held_out: bool) -> Posterior:
    """Return the posterior of the setting that validation rows choose, with what they say in its
    report.

    held_out: whether the rows are a share of the training data. Raises ValueError for rows that are
    too few, and for a plan that cannot be fitted.
    """
    plan, start = fit_trained_state(plan)
    original_rows = read_same_rows(
        lambda: ValidationRows.read(start, validation),
        lambda rows: digest((rows.y, rows.weights, rows.f)),
    )
    rows = original_rows
    scale = choose_row_scale(rows, start.likelihood)
    if scale is not None:
        # Another network: its features differ, and so do all sums.
        plan.data.scale_rows(scale)
        plan, start = fit_trained_state(replace(plan, input_factors=InputFactors()))
        rows = rows.scaled(start)
    search = Search(plan, start, rows)
    with _ignored_warnings():
        search.score_families()
    table = search.table
    spread = refined_spread(table.settings, table.scores, rows.weights, table.choice)
    setting = table.chosen._replace(spread=spread)
    posterior = fit_with_prior(search.plan_at(setting))
    return _with_report(posterior, search, original_rows, setting, held_out)


def fit_trained_state(plan: FitPlan) -> tuple[FitPlan, Posterior]:
    """Fit where a search starts: the Gaussian at the trained weights, under the prior of their
    scale; or where `mode` says.

    Also returns the plan with the structure that was chosen for it, so that all settings share it.
    """
    mode = plan.mode if plan.mode is not None else TILT
    with _ignored_warnings():
        first, start = fit_at_mode(replace(plan, prior=None, mode=mode, validated=True))
    if plan.prior is not None:
        start = replace(start, prior=plan.prior)
    learned = replace(
        plan,
        structure=first.structure,
        automatic=False,
        reason=first.reason,
        input_factors=first.input_factors,
        rows=first.rows,
        repeatable=first.repeatable,
    )
    return learned, start


@contextmanager
def _ignored_warnings() -> Iterator[None]:
    """Ignore warnings of settings on the way, which would mislead; the chosen one is fitted again
    and warns itself.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@dataclass(eq=False)
class Search:
    """Settings that are scored on validation rows, and what their scores need."""

    plan: FitPlan
    start: Posterior  # the Gaussian at the trained weights
    rows: ValidationRows

    @cached_property
    def all_settings(self) -> ScoreTable:
        """All settings that were scored on all rows."""
        return ScoreTable(self.rows)

    @property
    def table(self) -> ScoreTable:
        """The settings of the Gaussian that was asked for."""
        return self.all_settings.with_gaussian(self.plan.gaussian)

    def score_families(self) -> None:
        """Score settings by families: the cheapest first, which say where to look for the
        others.
        """
        if self.mode != POLISH:
            self._score_tilted_heads()
        if self.mode == POLISH or (self.plan.mode is None and self._tries_polish):
            self._score_polished_heads()
        if self._tries_variational and self.mode != POLISH:
            self._score_variational_gaussians()

    # --- what is asked for, and what it means --------------------------------------------------

    @property
    def mode(self) -> str:
        """The mode of the Gaussian at the trained weights."""
        return self.start.mode

    @property
    def fixed_spread(self) -> bool:
        """Return whether the likelihood has no dispersion to choose."""
        return len(self.spreads) == 1

    @property
    def fixed_prior(self) -> bool:
        """Return whether the prior was given."""
        return self.plan.prior is not None

    @property
    def _scales_with_noise(self) -> bool:
        """Return whether precisions are relative to the noise, so that K is s² times that at noise
        one.

        With H = (S + ρ)/s² of Gaussian noise, one factorisation serves every noise.
        """
        return self.start.likelihood.quadratic and not self.fixed_prior

    @property
    def precisions(self) -> tuple[float, ...]:
        """Factors on the prior precision, from the strongest prior on."""
        return (1.0,) if self.fixed_prior else PRECISIONS

    @cached_property
    def network_spread(self) -> float:
        """The dispersion that is best for the network itself, without doubt."""
        return self._spread_without_doubt(None)

    def _spread_without_doubt(self, step: Tensor | None) -> float:
        """Return the best dispersion of the network itself, with its free weights moved by `step`
        (P,).
        """
        f = self.rows.outputs(step)
        return best_spread_without_doubt(self.rows, self.start.likelihood, f)

    @cached_property
    def spreads(self) -> tuple[float, ...]:
        """Factors on the dispersion, from the smallest: those between one and the network's
        own, with both of them.
        """
        if not isinstance(self.start.likelihood, Dispersed):
            return (1.0,)
        low, high = self._spread_limits
        count = max(math.ceil(math.log(high / low) / math.log(SPREAD_STEP)) + 1, FEWEST_SPREADS)
        spreads = [low * (high / low) ** (k / (count - 1)) for k in range(count)]
        for exact in (1.0, self.network_spread):
            nearest = min(range(count), key=lambda k: abs(math.log(spreads[k] / exact)))
            spreads[nearest] = exact
        return tuple(dict.fromkeys(spreads))

    @property
    def _spread_limits(self) -> tuple[float, float]:
        """The least and the largest factor on the dispersion."""
        return min(1.0, self.network_spread) / MARGIN, max(1.0, self.network_spread) * MARGIN

    def likelihood_at(self, spread: float) -> Likelihood:
        """Return the likelihood with a factor on its dispersion."""
        return with_dispersion(self.start.likelihood, spread)

    def precision_at(self, setting: Setting) -> Tensor:
        """Return −∇² log π of the setting's prior (P,) or (P, P)."""
        bound = self.start.bound_prior
        if not isinstance(bound, BoundGaussian):
            return bound.precision(self.start.theta)
        scales = self._scales_with_noise
        level = setting.precision / setting.spread**2 if scales else setting.precision
        return level * bound.scale_precision

    def prior_at(self, setting: Setting) -> Prior:
        """Return the prior of a setting: the one that was given, or one with the setting's
        precision.
        """
        if self.plan.prior is not None:
            return self.plan.prior
        return prior_with_precision(self.start, self.precision_at(setting))

    def state_at(self, setting: Setting, statistics: Statistics) -> Posterior:
        """Return the Gaussian at the trained weights in that setting."""
        return replace(
            self.start,
            likelihood=self.likelihood_at(setting.spread),
            prior=self.prior_at(setting),
            statistics=statistics,
            mode=setting.mode,
        )

    def plan_at(self, setting: Setting) -> FitPlan:
        """Return the fit of all training rows in that setting."""
        gaussian = setting.gaussian if self.plan.gaussian is None else self.plan.gaussian
        return replace(
            self.plan,
            likelihood=self.likelihood_at(setting.spread),
            prior=self.prior_at(setting),
            mode=setting.mode,
            gaussian=gaussian,
            validated=True,
        )

    # --- the trained head, with the Gaussian at it ---------------------------------------------

    def _score_tilted_heads(self) -> None:
        """Score the trained head with the Gaussian at it: roughly on some of the rows, then finely
        on all.
        """
        coarse = ScoreTable(self.rows.thinned(COARSE_ROWS))
        for spread in self.spreads:
            self._score_levels(coarse, spread, self.precisions)
        # Around the choice and not the very best: the rule looks for doubt, which costs a little.
        chosen = coarse.chosen
        index = self.spreads.index(chosen.spread)
        for spread in self.spreads[max(index - 1, 0) : index + 2]:
            levels = self._levels_around(chosen.precision, FINER)
            self._score_levels(self.all_settings, spread, levels)

    def _score_levels(
        self, table: ScoreTable, spread: float, levels: list[float] | tuple[float, ...]
    ) -> None:
        """Score prior precisions of the trained head at one dispersion, from the strongest on."""
        settings = [Setting(self.mode, LAPLACE, spread, level) for level in levels]
        table.score_until_hopeless(
            [(setting, self._tilted_candidate(setting))] for setting in settings
        )

    def _levels_around(self, level: float, factors: tuple[float, ...]) -> list[float]:
        """Return prior precisions around one, from the strongest on; that one alone where a prior
        was given.
        """
        if self.fixed_prior:
            return [level]
        return list(dict.fromkeys(max(level * factor, LEAST_PRECISION) for factor in factors))

    def _tilted_candidate(self, setting: Setting) -> Candidate:
        """Return the Gaussian at the trained head in a setting."""
        likelihood = self.likelihood_at(setting.spread)
        if self._scales_with_noise:
            operator = self._operator_at(setting.precision)
            return Candidate(likelihood, operator, None, setting.spread)
        curvature = self._statistics_at(setting.spread).curvature
        return Candidate(likelihood, curvature.with_prior(self.precision_at(setting)), None)

    def _operator_at(self, level: float) -> Operator:
        """Return H⁻¹ at the noise at hand under a prior precision; computed once for all noises."""
        known = self._known_operators
        if level not in known:
            setting = Setting(self.mode, LAPLACE, 1.0, level)
            known[level] = self.start.statistics.curvature.with_prior(self.precision_at(setting))
        return known[level]

    @cached_property
    def _known_operators(self) -> dict[float, Operator]:
        """The operators that were computed, by their prior precision."""
        return {}

    @cached_property
    def _known_statistics(self) -> dict[float, Statistics]:
        """The sums that were computed, by their dispersion."""
        return {1.0: self.start.statistics}

    def _statistics_at(self, spread: float) -> Statistics:
        """Return sums over the training rows at θ̂ with that dispersion: a pass, but for Gaussian
        noise.
        """
        known = self._known_statistics
        if spread not in known:
            if self.start.likelihood.quadratic:
                known[spread] = at_noise(self.start, spread).statistics
            else:
                plan = replace(self.plan, likelihood=self.likelihood_at(spread), mode=self.mode)
                known[spread] = plan.collect_statistics(self.start.theta)
        return known[spread]

    # --- polished heads ------------------------------------------------------------------------

    @property
    def _tries_polish(self) -> bool:
        """Return whether polished heads are cheap enough to be tried by default."""
        if not self.start.network.linear:
            return False
        work = self.start.statistics.n * self.start.theta.numel() ** 2
        return self.start.quadratic or work <= POLISH_WORK

    def _score_polished_heads(self) -> None:
        """Score heads at the mode of each prior, each with the dispersions that suit it."""
        table = ScoreTable(self.rows)
        levels = (1.0,) if self.fixed_prior else POLISH_PRECISIONS
        table.score_until_hopeless(self._polished_group(level) for level in levels)
        if table.settings and not self.fixed_prior:
            near = [table.best.precision * factor for factor in POLISH_FINER]
            table.score_settings(
                [each for level in near for each in self._polished_group(level)],
            )
        self.all_settings.add_table(table)

    def _polished_group(self, level: float) -> list[SettingWithGaussian]:
        """Return the polished head of a prior precision, with a few dispersions.

        A temperature of classes is the scale of its prior: one is enough.
        """
        gaussian = VARIATIONAL if self._tries_variational else LAPLACE
        first = Setting(POLISH, gaussian, 1.0, level)
        if self.start.quadratic and self._scales_with_noise:
            step = self._quadratic_step(first)
            best_spread = self._spread_without_doubt(step)
            group = [first._replace(spread=best_spread * factor) for factor in POLISH_SPREADS]
            return [(setting, self._quadratic_candidate(setting, step)) for setting in group]
        candidate = self._polished_candidate(first)
        classes = self.start.likelihood.support_for(self.start.network.outputs).kind == "class"
        if candidate is None or classes:
            return [(first, candidate)]
        other = first._replace(spread=self._spread_without_doubt(candidate.step))
        return [(first, candidate), (other, self._polished_candidate(other))]

    def _quadratic_step(self, setting: Setting) -> Tensor:
        """Return the step (P,) to the mode under a setting's prior: with Gaussian noise it follows
        from the sums, whatever the noise is.
        """
        prior = prior_with_precision(self.start, self.precision_at(setting))
        theta, _ = self.start.statistics.at_mode(
            prior.bind(self.start.network.layout), self.start.theta
        )
        return theta - self.start.theta

    def _quadratic_candidate(self, setting: Setting, step: Tensor) -> Candidate:
        """Return the Gaussian a step (P,) away from the trained head, for Gaussian noise."""
        operator = self._operator_at(setting.precision)
        return Candidate(self.likelihood_at(setting.spread), operator, step, setting.spread)

    def _polished_candidate(self, setting: Setting) -> Candidate | None:
        """Polish a head by passes over the training rows; None where there is no mode."""
        try:
            posterior = fit_with_prior(replace(self.plan_at(setting), tolerance=ROUGH))
        except ValueError:
            return None
        step = posterior.mean - self.start.theta
        return Candidate(posterior.likelihood, posterior.covariance, step)

    # --- variational Gaussians -----------------------------------------------------------------

    @property
    def _tries_variational(self) -> bool:
        """Return whether variational Gaussians are allowed and can be had."""
        gaussian = None if self.plan.gaussian is None else VARIATIONAL
        allowed = self.plan.gaussian != LAPLACE
        return allowed and replace(self.plan, gaussian=gaussian).finds_variational

    def _score_variational_gaussians(self) -> None:
        """Score variational Gaussians of the trained head, around the best setting of laplace, each
        from the one before it.
        """
        best = self.all_settings.with_gaussian(LAPLACE).chosen
        levels = self._levels_around(best.precision, VARIATIONAL_PRECISIONS)
        low, high = self._spread_limits
        factors = (1.0,) if self.fixed_spread else VARIATIONAL_SPREADS
        spreads = [min(max(factor * best.spread, low), high) for factor in factors]
        for spread in dict.fromkeys(spreads):
            plan = self._search_plan(self.likelihood_at(spread))
            settings = [Setting(self.mode, VARIATIONAL, spread, level) for level in levels]
            self.all_settings.score_until_hopeless(self._variational_candidates(settings, plan))

    def _search_plan(self, likelihood: Likelihood) -> FitPlan:
        """Return passes over some of the training rows, which count for all of them."""
        data = self.plan.data
        if isinstance(data, Reader):
            data = thin_reader(data, SEARCH_ROWS)
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
    ) -> Iterator[list[SettingWithGaussian]]:
        """Yield the variational Gaussian of each setting, each found from the one before it."""
        for setting in settings:
            state = self.state_at(setting, self._statistics_at(setting.spread))
            ascent = replace(bound_ascent(plan, state), most=SEARCH_ROUNDS)
            posterior = ascent.maximise_bound()
            plan = replace(plan, start=posterior.variational)
            yield [(setting, Candidate(state.likelihood, posterior.covariance, None))]


# --- what the rows say ---------------------------------------------------------------------------


def _with_report(
    posterior: Posterior,
    search: Search,
    original_rows: ValidationRows,
    setting: Setting,
    held_out: bool,
) -> Posterior:
    """Return the posterior with the figures of the validation rows in its report; warn if it
    predicts them worse than the network.

    original_rows: the rows without a scale of rows.
    """
    rows, start = search.rows, search.start
    table, weights = search.table, rows.weights
    # The network itself, as it came and with the dispersion that suits it.
    plug_in = original_rows.plug_in(start.likelihood)
    network_spread = best_spread_without_doubt(original_rows, start.likelihood, original_rows.f)
    scaled = original_rows.plug_in(search.likelihood_at(network_spread))
    predictive = cross_fitted_scores(table.settings, table.scores, weights)
    gain = mean_and_error(predictive - plug_in, weights)
    rescaled = mean_and_error(scaled - plug_in, weights)
    certain = network_spread if rescaled.mean > 2 * rescaled.error else 1.0
    # The rows are linearised at the trained weights: another θ̂ of all weights has other Jacobians.
    linearised = bool((posterior.theta == start.theta).all()) or start.network.linear
    coverage: dict[str, float] = {}
    if linearised:
        step = posterior.mean - start.theta
        candidate = Candidate(posterior.likelihood, posterior.covariance, step)
        coverage = _coverage_by_level(rows, candidate)
        with _ignored_warnings():
            scores = rows.scores([candidate])[0]
        warn_on_validation_rows(scores, plug_in, weights)
    validation = Validation(
        rows=rows.count,
        plug_in=-mean_and_error(plug_in, weights).mean,
        scaled_plug_in=-mean_and_error(scaled, weights).mean,
        predictive=-mean_and_error(predictive, weights).mean,
        gain=gain.mean,
        gain_error=gain.error,
        network_spread=network_spread,
        words=dispersion_in_words(start.likelihood, certain),
        spread=setting.spread,
        precision=setting.precision,
        settings=len(table.settings),
        coverage=coverage,
        held_out=held_out,
        mode=setting.mode,
        row_scales=_typical_row_scales(rows),
    )
    report = replace(posterior.report, validation=validation)
    return replace(posterior, report=report, tuning_history=_make_history(table, setting))


def _make_history(table: ScoreTable, chosen: Setting) -> TuningHistory:
    """Write the history: every setting that was scored on all rows; then the chosen one, with the
    score of the nearest.
    """
    names = ("factor on the dispersion", "factor on the precision", "polished", "variational")
    points = [
        (
            setting.spread,
            setting.precision,
            float(setting.mode == POLISH),
            float(setting.gaussian == VARIATIONAL),
        )
        for setting in (*table.settings, chosen)
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


def _typical_row_scales(rows: ValidationRows) -> tuple[float, float] | None:
    """Return the numbers by which the outputs of rows were divided, at the quantiles of 5% and 95%.

    None without a scale of rows.
    """
    network = rows.posterior.network
    if not isinstance(network, LastLayer) or network.row_scale is None or rows.squares is None:
        return None
    ordered = network.row_scale.compute_scales(rows.squares).sort().values
    return float(ordered[int(0.05 * len(ordered))]), float(ordered[int(0.95 * len(ordered))])


def _coverage_by_level(rows: ValidationRows, candidate: Candidate) -> dict[str, float]:
    """Return the share of rows inside the intervals (for classes: smallest sets) of each level, by
    weight.
    """
    inside = dict.fromkeys(LEVELS, 0.0)
    total = 0.0
    for predictive, y, weights in rows.predictives(candidate, COVERAGE_ROWS):
        # y is at a rank between lower and upper of its predictive.
        lower, upper = rank_targets(predictive, y)
        for level in LEVELS:
            tail = (1 - level) / 2
            if predictive.kind == "class":
                hit = lower < level
            else:
                hit = (upper >= tail) & (lower <= 1 - tail)
            share = hit.double() if hit.dim() == 1 else hit.double().mean(1)  # over the targets
            inside[level] += float(weights @ share)
        total += float(weights.sum())
    return {f"{level:g}": hits / total for level, hits in inside.items()} if total > 0 else {}
