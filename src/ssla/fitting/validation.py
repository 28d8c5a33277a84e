"""The posterior of the setting that validation rows choose: rows that the network has not seen.

"Doubt" is epistemic uncertainty, a head is a last layer. A network has memorised its training rows,
so that their evidence says too little noise and too much confidence. Validation rows decide

  the dispersion   a factor on the noise, a temperature of classes, an overdispersion of counts
  the prior        a factor on the precisions of the trained weights' scale
  the mode         the trained head (tilt), or the polished one where that is affordable
  the Gaussian     the one at the mode (laplace), or the variational one
  a scale of rows  where the confidence of a classifier clearly grows too fast with the length of
  its features

by the rule of `ssla.fitting.choice`. Features of these rows are computed once; every setting is
then a prediction in output space. The search is rough (it takes fewer rows and nodes). The
posterior of the chosen setting is fitted on all training rows, as if it had been asked for.

    setting      mode, Gaussian, and factors on dispersion and prior precision (`Setting`)
    spread       the factor on the dispersion
    level        the factor on the prior precisions of the start
    start        the Gaussian at the trained weights, from which the search starts
    candidate    the Gaussian of a setting, with its likelihood (`Candidate`)
    family       the settings that share mode and Gaussian
    step         the mean of a candidate less that of the start (P,)
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ssla.curvature import Operator
from ssla.curvature.structure import NoFactorError
from ssla.data import Source
from ssla.fitting.choice import Setting, compute_mean_and_error, cross_fit_scores, refine_spread
from ssla.fitting.fit import fit_at_mode, fit_with_prior
from ssla.fitting.fit_plan import FitPlan, InputFactors
from ssla.fitting.guard import warn_on_validation_rows
from ssla.fitting.network_itself import choose_row_scale, find_best_network_spread
from ssla.fitting.noise import scale_noise
from ssla.fitting.passes import Reader, thin_reader
from ssla.fitting.ranks import read_same_rows
from ssla.fitting.score_table import ScoreTable, SettingWithGaussian
from ssla.fitting.steps import make_bound_ascent
from ssla.fitting.tuning_space import make_prior_with_precision
from ssla.fitting.validation_rows import Candidate, ValidationRows
from ssla.fitting.variational import ROUGH
from ssla.likelihoods import Likelihood
from ssla.likelihoods.likelihood import Dispersed, dispersion_in_words, multiply_dispersion
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
# one of the network itself. A parabola through three of the steps refines the choice.
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
SEARCH_ROWS = 4_000  # training rows of variational Gaussians during the search
SEARCH_ROUNDS = 8  # passes for each of them
# rows × parameters²: beyond, polished heads take long, and only a given mode has them
POLISH_WORK = 1e9
POLISH_PRECISIONS = tuple(8.0**k for k in range(3, -5, -1))
POLISH_FINER = (2 * math.sqrt(2), math.sqrt(2) / 4)
POLISH_SPREADS = (1 / 1.2, 1.0, 1.2)  # around the best one for the head itself
COVERAGE_ROWS = 1000
LEVELS = (0.5, 0.9, 0.95)  # of intervals, whose coverage is reported
TYPICAL = (0.05, 0.95)  # quantiles of the scales of rows that are reported


def choose_by_validation(plan: FitPlan, validation: Source, held_out: bool) -> Posterior:
    """Fit the posterior of the setting that validation rows choose.

    Its report has the figures of these rows. plan: what the user asked for. held_out: whether the
    rows are a share of the training data. Raises ValueError for rows that are too few, and for a
    plan that cannot be fitted.
    """
    plan, start = fit_trained_state(plan)
    original_rows = read_same_rows(
        lambda: ValidationRows.read(start, validation),
        lambda rows: digest((rows.y, rows.weights, rows.f)),
    )

    rows = original_rows
    scale = choose_row_scale(rows, start.likelihood)
    if scale is not None:
        # Scaled features are those of another network, with other sums.
        plan.data.scale_rows(scale)
        plan, start = fit_trained_state(replace(plan, input_factors=InputFactors()))
        rows = rows.with_row_scale_of(start)

    search = Search(plan, start, rows)
    with _ignore_warnings():
        search.score_families()
    table = search.table
    # Without any setting there is nothing to choose: the first failure says why.
    if not table.settings and search.failures:
        raise search.failures[0]
    spread = refine_spread(table.settings, table.scores, rows.weights, table.index_of_chosen)
    setting = table.chosen._replace(spread=spread)
    posterior = fit_with_prior(search.make_plan_at(setting))
    return _with_report(posterior, search, original_rows, setting, held_out)


def fit_trained_state(plan: FitPlan) -> tuple[FitPlan, Posterior]:
    """Fit the Gaussian from which the search starts, and return it with the plan of all settings.

    The Gaussian is at the trained weights, or where the plan's mode puts θ̂. Its prior is the
    plan's; without one that of the trained weights' scale. The plan that is returned has the
    structure that was chosen and what the first pass found out, so that all settings share them.
    """
    mode = plan.mode if plan.mode is not None else TILT
    with _ignore_warnings():
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
def _ignore_warnings() -> Iterator[None]:
    """Ignore warnings inside the block.

    Warnings about settings that are only tried would mislead. The chosen setting is fitted again,
    and warns then.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@dataclass(eq=False)
class Search:
    """A search among settings, which are scored on validation rows.

    A prior precision is given by a factor on that of `start`'s prior, here called a level.
    """

    plan: FitPlan  # with the options that the user gave
    start: Posterior  # the Gaussian at the trained weights
    rows: ValidationRows
    # the errors of settings whose curvature could not be factorised; these are left out
    failures: list[NoFactorError] = field(default_factory=list)

    @cached_property
    def all_settings(self) -> ScoreTable:
        """Return the table of all settings that were scored on all rows; the search fills it."""
        return ScoreTable(self.rows)

    @property
    def table(self) -> ScoreTable:
        """Return the table of the scored settings with the Gaussian that the user asked for.

        If the user asked for none, these are all settings.
        """
        return self.all_settings.with_gaussian(self.plan.gaussian)

    def score_families(self) -> None:
        """Score settings family by family, and add them to `all_settings`.

        The cheapest family comes first; variational Gaussians are searched around its choice.
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
        """Return the mode of the Gaussian from which the search starts."""
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
        """Return whether precisions are relative to the noise.

        For Gaussian noise with a factor s on it, H = (S + ρ)/s² then, and K is s² times that at
        s = 1: one factorisation serves every noise.
        """
        return self.start.likelihood.quadratic and not self.fixed_prior

    @property
    def precisions(self) -> tuple[float, ...]:
        """Return the levels to try, from the strongest prior on; only 1 for a given prior."""
        return (1.0,) if self.fixed_prior else PRECISIONS

    @cached_property
    def network_spread(self) -> float:
        """Return the best factor on the dispersion of the network itself, as it came."""
        return self._find_network_spread_after(None)

    def _find_network_spread_after(self, step: Tensor | None) -> float:
        """Return the best factor on the dispersion of the network with its free weights moved.

        step: (P,), by which the weights are moved; None: they stay. The uncertainty of θ is left
        out.
        """
        f = self.rows.compute_outputs(step)
        return find_best_network_spread(self.rows, self.start.likelihood, f)

    @cached_property
    def spreads(self) -> tuple[float, ...]:
        """Return the factors on the dispersion to try, from the smallest.

        The factors lie between 1 and the network's own best factor, a little beyond both, and hold
        both. Only 1 for a likelihood without dispersion.
        """
        if not isinstance(self.start.likelihood, Dispersed):
            return (1.0,)
        low, high = self._spread_limits
        count = max(math.ceil(math.log(high / low) / math.log(SPREAD_STEP)) + 1, FEWEST_SPREADS)
        spreads = [low * (high / low) ** (k / (count - 1)) for k in range(count)]
        # The steps are equal in logarithms; the nearest ones become the two factors themselves.
        for exact in (1.0, self.network_spread):
            nearest = min(range(count), key=lambda k: abs(math.log(spreads[k] / exact)))
            spreads[nearest] = exact
        return tuple(dict.fromkeys(spreads))

    @property
    def _spread_limits(self) -> tuple[float, float]:
        """Return the least and the largest factor on the dispersion."""
        return min(1.0, self.network_spread) / MARGIN, max(1.0, self.network_spread) * MARGIN

    def make_likelihood_at(self, spread: float) -> Likelihood:
        """Return the likelihood of the start with a factor `spread` on its dispersion."""
        return multiply_dispersion(self.start.likelihood, spread)

    def compute_precision_at(self, setting: Setting) -> Tensor:
        """Return −∇² log π of the setting's prior, (P,) or (P, P).

        A prior that is not Gaussian was given, and has its precision at the start.
        """
        bound = self.start.bound_prior
        if not isinstance(bound, BoundGaussian):
            return bound.precision(self.start.theta)
        scales = self._scales_with_noise
        level = setting.precision / setting.spread**2 if scales else setting.precision
        return level * bound.scale_precision

    def make_prior_at(self, setting: Setting) -> Prior:
        """Return the prior of a setting.

        The prior is the one that the user gave, or a Gaussian with the precision of the setting.
        """
        if self.plan.prior is not None:
            return self.plan.prior
        return make_prior_with_precision(self.start, self.compute_precision_at(setting))

    def make_state_at(self, setting: Setting, statistics: Statistics) -> Posterior:
        """Return the Gaussian at the θ̂ of the start in a setting.

        statistics: the sums there at the setting's dispersion.
        """
        return replace(
            self.start,
            likelihood=self.make_likelihood_at(setting.spread),
            prior=self.make_prior_at(setting),
            statistics=statistics,
            mode=setting.mode,
        )

    def make_plan_at(self, setting: Setting) -> FitPlan:
        """Return the plan of a fit of all training rows in a setting."""
        gaussian = setting.gaussian if self.plan.gaussian is None else self.plan.gaussian
        return replace(
            self.plan,
            likelihood=self.make_likelihood_at(setting.spread),
            prior=self.make_prior_at(setting),
            mode=setting.mode,
            gaussian=gaussian,
            validated=True,
        )

    # --- the trained head, with the Gaussian at it ---------------------------------------------

    def _score_tilted_heads(self) -> None:
        """Score the trained head with the Gaussian at the mode, and fill `all_settings`.

        A coarse grid of settings is scored on some of the rows. A fine grid around the choice is
        then scored on all rows.
        """
        coarse = ScoreTable(self.rows.thin_rows(COARSE_ROWS))
        for spread in self.spreads:
            self._score_tilted_heads_at(coarse, spread, self.precisions)
        if not coarse.settings:
            return
        # The fine grid is around the choice, not around the best: the rule prefers a weaker prior,
        # which costs a little.
        chosen = coarse.chosen
        index = self.spreads.index(chosen.spread)
        for spread in self.spreads[max(index - 1, 0) : index + 2]:
            levels = self._choose_levels_around(chosen.precision, FINER)
            self._score_tilted_heads_at(self.all_settings, spread, levels)

    def _score_tilted_heads_at(
        self, table: ScoreTable, spread: float, levels: list[float] | tuple[float, ...]
    ) -> None:
        """Score the trained head at one spread and several levels, and add the scores to a table.

        levels: in falling order, because scoring may stop at the first hopeless one.
        """
        settings = [Setting(self.mode, LAPLACE, spread, level) for level in levels]
        table.score_until_hopeless(
            [(setting, self._make_tilted_candidate(setting))] for setting in settings
        )

    def _choose_levels_around(self, level: float, factors: tuple[float, ...]) -> list[float]:
        """Return `factors` times a level, from the strongest on, and none below LEAST_PRECISION.

        Where the user gave a prior, the result is the level alone.
        """
        if self.fixed_prior:
            return [level]
        return list(dict.fromkeys(max(level * factor, LEAST_PRECISION) for factor in factors))

    def _make_tilted_candidate(self, setting: Setting) -> Candidate | None:
        """Return the candidate at the trained head in a setting.

        The result is None where the curvature cannot be factorised, which is counted in `failures`.
        """
        likelihood = self.make_likelihood_at(setting.spread)
        try:
            if self._scales_with_noise:
                operator = self._factorise_at(setting.precision)
                return Candidate(likelihood, operator, step=None, scale=setting.spread)
            curvature = self._collect_statistics_at(setting.spread).curvature
            operator = curvature.with_prior(self.compute_precision_at(setting))
        except NoFactorError as error:
            self.failures.append(error)
            return None
        return Candidate(likelihood, operator, step=None)

    def _factorise_at(self, level: float) -> Operator:
        """Return H⁻¹ at the start's noise and a level; it is computed once and stored.

        Raises ValueError where H is not positive definite.
        """
        stored = self._known_operators
        if level not in stored:
            setting = Setting(self.mode, LAPLACE, spread=1.0, precision=level)
            stored[level] = self.start.statistics.curvature.with_prior(
                self.compute_precision_at(setting)
            )
        return stored[level]

    @cached_property
    def _known_operators(self) -> dict[float, Operator]:
        """Return the operators that were computed so far, by their level."""
        return {}

    @cached_property
    def _known_statistics(self) -> dict[float, Statistics]:
        """Return the statistics that were computed so far, by their spread."""
        return {1.0: self.start.statistics}

    def _collect_statistics_at(self, spread: float) -> Statistics:
        """Return the statistics of the training rows at θ̂ with a factor on the dispersion.

        They are computed once and stored: by a pass, or for Gaussian noise without one.
        """
        stored = self._known_statistics
        if spread not in stored:
            if self.start.likelihood.quadratic:
                stored[spread] = scale_noise(self.start, spread).statistics
            else:
                plan = replace(
                    self.plan, likelihood=self.make_likelihood_at(spread), mode=self.mode
                )
                stored[spread] = plan.collect_statistics(self.start.theta)
        return stored[spread]

    # --- polished heads ------------------------------------------------------------------------

    @property
    def _tries_polish(self) -> bool:
        """Return whether polished heads are tried by default.

        Only heads of last layers are, if their Newton steps are cheap enough.
        """
        if not self.start.network.linear:
            return False
        work = self.start.statistics.n * self.start.theta.numel() ** 2
        return self.start.quadratic or work <= POLISH_WORK

    def _score_polished_heads(self) -> None:
        """Score polished heads, each with a few dispersions, and add them to `all_settings`.

        A polished head is a last layer at the mode under its prior.
        """
        table = ScoreTable(self.rows)
        levels = (1.0,) if self.fixed_prior else POLISH_PRECISIONS
        table.score_until_hopeless(self._make_polish_group(level) for level in levels)
        if table.settings and not self.fixed_prior:
            finer = [table.best.precision * factor for factor in POLISH_FINER]
            table.score_settings(
                [candidate for level in finer for candidate in self._make_polish_group(level)],
            )
        self.all_settings.add_table(table)

    def _make_polish_group(self, level: float) -> list[SettingWithGaussian]:
        """Return the polished head of a level, with a few dispersions.

        Classes have one: another temperature is the same as another prior precision. The head is
        None where it cannot be polished.
        """
        gaussian = VARIATIONAL if self._tries_variational else LAPLACE
        first = Setting(POLISH, gaussian, spread=1.0, precision=level)
        # For Gaussian noise the sums give every head, without a pass.
        if self.start.quadratic and self._scales_with_noise:
            step = self._find_quadratic_step(first)
            best_spread = self._find_network_spread_after(step)
            group = [first._replace(spread=best_spread * factor) for factor in POLISH_SPREADS]
            return [(setting, self._make_quadratic_candidate(setting, step)) for setting in group]
        candidate = self._fit_polish_candidate(first)
        classes = self.start.likelihood.support_for(self.start.network.outputs).kind == "class"
        if candidate is None or classes:
            return [(first, candidate)]
        second = first._replace(spread=self._find_network_spread_after(candidate.step))
        return [(first, candidate), (second, self._fit_polish_candidate(second))]

    def _find_quadratic_step(self, setting: Setting) -> Tensor:
        """Return the step (P,) from the start to the mode under a setting's prior.

        Only for quadratic sums whose precisions are relative to the noise: it is then the same for
        every noise.
        """
        prior = make_prior_with_precision(self.start, self.compute_precision_at(setting))
        theta, _ = self.start.statistics.move_to_mode(
            prior.bind(self.start.network.layout), self.start.theta
        )
        return theta - self.start.theta

    def _make_quadratic_candidate(self, setting: Setting, step: Tensor) -> Candidate:
        """Return the candidate of a setting at a step (P,) from the start, for Gaussian noise."""
        operator = self._factorise_at(setting.precision)
        return Candidate(self.make_likelihood_at(setting.spread), operator, step, setting.spread)

    def _fit_polish_candidate(self, setting: Setting) -> Candidate | None:
        """Return the candidate of a setting whose last layer is polished by passes.

        The result is None where the fit raises ValueError, for example because there is no mode.
        """
        try:
            posterior = fit_with_prior(replace(self.make_plan_at(setting), tolerance=ROUGH))
        except ValueError:
            return None
        step = posterior.mean - self.start.theta
        return Candidate(posterior.likelihood, posterior.covariance, step)

    # --- variational Gaussians -----------------------------------------------------------------

    @property
    def _tries_variational(self) -> bool:
        """Return whether variational Gaussians are allowed and possible."""
        return self.plan.finds_variational

    def _score_variational_gaussians(self) -> None:
        """Score variational Gaussians of the trained head, and add them to `all_settings`.

        Their settings are around the chosen one of those with the Gaussian at the mode.
        """
        at_mode = self.all_settings.with_gaussian(LAPLACE)
        if not at_mode.settings:
            return
        nearest = at_mode.chosen
        levels = self._choose_levels_around(nearest.precision, VARIATIONAL_PRECISIONS)
        low, high = self._spread_limits
        factors = (1.0,) if self.fixed_spread else VARIATIONAL_SPREADS
        spreads = [min(max(factor * nearest.spread, low), high) for factor in factors]
        for spread in dict.fromkeys(spreads):
            plan = self._make_search_plan(self.make_likelihood_at(spread))
            settings = [Setting(self.mode, VARIATIONAL, spread, level) for level in levels]
            self.all_settings.score_until_hopeless(self._fit_variational_candidates(settings, plan))

    def _make_search_plan(self, likelihood: Likelihood) -> FitPlan:
        """Return the plan of rough passes with a likelihood, over some of the training rows.

        These rows have larger weights, so that they count for all rows. On several processes, all
        rows are read.
        """
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

    def _fit_variational_candidates(
        self, settings: list[Setting], plan: FitPlan
    ) -> Iterator[list[SettingWithGaussian]]:
        """Yield each setting with its variational Gaussian, as a group of one.

        The passes of `plan` find each Gaussian, starting from the one before it. A setting whose
        curvature cannot be factorised on the way has none, and is counted in `failures`.
        """
        for setting in settings:
            at_mode = self.make_state_at(setting, self._collect_statistics_at(setting.spread))
            ascent = replace(make_bound_ascent(plan, at_mode), most=SEARCH_ROUNDS)
            try:
                posterior = ascent.maximise_bound()
            except NoFactorError as error:
                self.failures.append(error)
                yield [(setting, None)]
                continue
            plan = replace(plan, start=posterior.variational)
            yield [(setting, Candidate(at_mode.likelihood, posterior.covariance, step=None))]


# --- what the rows say ---------------------------------------------------------------------------


def _with_report(
    posterior: Posterior,
    search: Search,
    original_rows: ValidationRows,
    setting: Setting,
    held_out: bool,
) -> Posterior:
    """Return the posterior with the figures of the validation rows in its report.

    Its history has the settings of the search. Warns if it predicts the rows clearly worse than the
    network itself. original_rows: the rows without a scale of rows. setting: the chosen one.
    held_out: whether the rows are a share of the training data.
    """
    rows, start = search.rows, search.start
    table, weights = search.table, rows.weights

    # The network itself, as it came and with the dispersion that suits it.
    plug_in = original_rows.score_plug_in(start.likelihood)
    network_spread = find_best_network_spread(original_rows, start.likelihood, original_rows.f)
    scaled = original_rows.score_plug_in(search.make_likelihood_at(network_spread))
    predictive = cross_fit_scores(table.settings, table.scores, weights)
    gain = compute_mean_and_error(predictive - plug_in, weights)
    rescaled = compute_mean_and_error(scaled - plug_in, weights)

    # Only a dispersion that is better by two standard errors is reported as the network's.
    clear_spread = network_spread if rescaled.mean > 2 * rescaled.error else 1.0

    # The rows are linearised at the trained weights: another θ̂ of all weights has other Jacobians.
    linearised = bool((posterior.theta == start.theta).all()) or start.network.linear
    coverage: dict[str, float] = {}
    if linearised:
        step = posterior.mean - start.theta
        candidate = Candidate(posterior.likelihood, posterior.covariance, step)
        coverage = _compute_coverage_by_level(rows, candidate)
        with _ignore_warnings():
            scores = rows.compute_scores([candidate])[0]
        warn_on_validation_rows(scores, plug_in, weights)
    validation = Validation(
        rows=rows.count,
        plug_in=-compute_mean_and_error(plug_in, weights).mean,
        scaled_plug_in=-compute_mean_and_error(scaled, weights).mean,
        predictive=-compute_mean_and_error(predictive, weights).mean,
        gain=gain.mean,
        gain_error=gain.error,
        network_spread=network_spread,
        words=dispersion_in_words(start.likelihood, clear_spread),
        spread=setting.spread,
        precision=setting.precision,
        settings=len(table.settings),
        unfactorised=len(search.failures),
        coverage=coverage,
        held_out=held_out,
        mode=setting.mode,
        row_scales=_find_typical_row_scales(rows),
    )
    report = replace(posterior.report, validation=validation)
    return replace(posterior, report=report, tuning_history=_make_history(table, setting))


def _make_history(table: ScoreTable, chosen: Setting) -> TuningHistory:
    """Return the history: every setting that was scored on all rows, then the chosen one.

    The dispersion of the chosen one was refined and not scored: it has the score of the setting
    that the table chooses.
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
        torch.cat([means, means[table.index_of_chosen, None]]),
        gradient=torch.zeros(len(names), dtype=torch.float64),  # not known
        converged=True,
        at_bound=(),
        evaluations=len(table.settings),
    )


def _find_typical_row_scales(rows: ValidationRows) -> tuple[float, float] | None:
    """Return the scales by which the outputs of rows were divided, as two quantiles (TYPICAL).

    The result is None where the network has no scale of rows.
    """
    network = rows.posterior.network
    if not isinstance(network, LastLayer) or network.row_scale is None or rows.squares is None:
        return None
    ordered = network.row_scale.compute_scales(rows.squares).sort().values
    low, high = (float(ordered[int(share * len(ordered))]) for share in TYPICAL)
    return low, high


def _compute_coverage_by_level(rows: ValidationRows, candidate: Candidate) -> dict[str, float]:
    """Return the share of rows, by weight, inside the central intervals of each of LEVELS.

    For classes it is the share inside the smallest sets. The predictives are those under the
    candidate. The keys are the levels, as text. At most COVERAGE_ROWS rows are used. The result is
    empty where they have no weight.
    """
    inside = dict.fromkeys(LEVELS, 0.0)
    total = 0.0
    for predictive, y, weights in rows.iterate_predictives(candidate, COVERAGE_ROWS):
        # The rank of y in its predictive is between lower and upper; for counts these differ.
        lower, upper = rank_targets(predictive, y)
        for level in LEVELS:
            tail = (1 - level) / 2
            if predictive.kind == "class":
                covered = lower < level
            else:
                covered = (upper >= tail) & (lower <= 1 - tail)
            share = covered.double()
            if covered.dim() == 2:  # several targets in a row
                share = share.mean(1)
            inside[level] += float(weights @ share)
        total += float(weights.sum())
    return {f"{level:g}": hits / total for level, hits in inside.items()} if total > 0 else {}
