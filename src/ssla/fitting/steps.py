"""The steps of a fit, each a function from one frozen value to the next: see `ssla.fitting.fit`.

read_data                   one pass: the sums at the trained weights
choose_mode                 whether θ̂ stays at the trained weights
settle_noise                the noise of a Gaussian likelihood, from the residuals
find_mode                   Newton steps to the mode, where θ̂ moves
make_gaussian_at_mode       the Gaussian at θ̂, with the report
with_variational_gaussian   the variational Gaussian in its place

`ssla.fitting` lists the words of these docstrings.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ssla._checks import warn
from ssla.curvature import Extent, Kfac, LowRank
from ssla.curvature.memory import describe_bytes
from ssla.curvature.structure import MANY_CLASSES
from ssla.fitting.fit_plan import FitPlan
from ssla.fitting.mode import NoModeError
from ssla.fitting.noise import CollectAtNoise, estimate_noise
from ssla.fitting.passes import measure_extent
from ssla.fitting.sums import Sums, compute_distance_to_mode
from ssla.fitting.trained import Verdict, judge_classes, judge_numbers
from ssla.fitting.variational import NEW, BoundAscent, ChoosePrior, refit_to_similar_rows
from ssla.fitting.watching import TargetRange, warn_residual
from ssla.likelihoods import Gaussian
from ssla.network import describe_output_argument
from ssla.priors import (
    BoundGaussian,
    BoundPrior,
    Prior,
    check_density_at,
    concavity_notes,
    describe,
)
from ssla.report import CONCAVITY, MOVED, POLISH, RANK, TILT, VARIATIONAL, Note, Report
from ssla.values import Statistics, Variational

if TYPE_CHECKING:
    from ssla.posterior import Posterior

KINKS = (
    "log p(y|f) has no curvature in f at any of the targets, while its Fisher information is not "
    "zero: it has kinks, as |y − f| has, so Newton steps do not lead to the mode"
)
DIAGONAL_FACTOR = (
    "the output factor of structure='kfac' is diagonal, as is the default above "
    f"{MANY_CLASSES:,} classes; ask for the full one by "
    "structure=ssla.structures.Kfac(output_factor='full')"
)
SMALLEST_DIVISOR = 1e-300  # takes the place of zero
# The numbers below were not measured: they are guesses.
NOISE_ROUNDS = 10  # of noise and mode in turn
SETTLED_NOISE = 1e-4  # relative change of the noise between two rounds
GROWN_RESIDUALS = 1.5  # factor on the residuals by which polish made the network clearly worse
LOWER_LOG_LIKELIHOOD = 0.2  # nats a row, the same for other likelihoods


@dataclass(frozen=True, eq=False)
class Draft:
    """A fit that is not finished: one step of the fit returns it, and the next takes it."""

    plan: FitPlan
    estimated: bool  # whether the noise is estimated, not given
    prior: Prior  # as given, or of the trained weights' scale
    bound: BoundPrior  # the same, over the flat θ
    mode: str  # what happens to θ̂: POLISH, TILT or AS_IS
    theta: Tensor  # (P,)
    sums: Sums  # at θ
    target: TargetRange  # what the first pass saw of the targets
    trained_sums: Sums  # at the trained weights
    raw_squares: Tensor | None  # squared residuals of the network as it came (C,)
    steps: int = 0  # Newton steps
    notes: tuple[str, ...] = ()

    def with_note(self, note: str) -> Draft:
        """Return the draft with another note for the report."""
        return replace(self, notes=(*self.notes, note))


def read_data(plan: FitPlan) -> Draft:
    """Read the data once, and return a draft with the sums at the trained weights.

    Its plan has the structure and the number of rows; its prior is the one that was given, or that
    of the trained weights' scale. A low-rank sketch that is too narrow takes further passes. Raises
    ValueError for data that cannot be fitted, and for a prior that has no finite density at the
    trained weights.
    """
    estimated = plan.estimates_noise
    if estimated:
        # The sums are taken at a noise of one, and scaled once the noise is known. The ranks
        # compare what was asked for, so its digests are kept.
        plan = replace(plan, likelihood=Gaussian(noise=1.0), first_digests=plan.digests)
    plan, sums, target = plan.run_pass(None)
    plan = replace(plan, rows=sums.statistics.n)
    plan, sums = _widen_sketch(plan, sums, estimated)
    network = plan.network
    prior = plan.starting_prior
    bound = prior.bind(network.layout)
    check_density_at(prior, bound, network.theta)

    return Draft(
        plan,
        estimated,
        prior,
        bound,
        mode=plan.make_order_at(None).choose_mode_for(network),
        theta=network.theta,
        sums=sums,
        target=target,
        trained_sums=sums,
        raw_squares=sums.squares if plan.likelihood.quadratic else None,
    )


def choose_mode(draft: Draft) -> Draft:
    """Choose whether a last layer is polished or kept, where nobody asked for a mode.

    Returns the draft with that mode and with a note that says why. Raises ValueError where polish
    was asked for under a likelihood with kinks.
    """
    plan = draft.plan
    if plan.likelihood.predictive.may_be_piecewise_linear and draft.sums.has_kinks:
        # The observed curvature is useless, so the Fisher information takes its place.
        draft = _replace_polish_by_tilt(replace(draft, sums=replace(draft.sums, newton=None)))
    if not plan.keeps_trained_layer or plan.mode is not None or draft.mode != POLISH:
        return draft
    verdict = _judge_last_layer(draft)
    if verdict is None:
        return draft
    classes = draft.target.classes is not None
    baseline = "the class frequencies" if classes else "the best constant prediction"
    return replace(draft, mode=verdict.mode).with_note(verdict.make_note(baseline))


def settle_noise(draft: Draft) -> Draft:
    """Estimate the noise of a Gaussian likelihood from the residuals, where it was not given.

    `trained_sums` of the result are at that noise. Raises ValueError where the residuals do not
    determine it.
    """
    if draft.estimated:
        sums, likelihood = estimate_noise(
            draft.plan.network,
            draft.sums,
            draft.bound,
            polish=draft.mode == POLISH,
            collect_at_noise=_make_collect_at_noise(draft.plan),
        )
        draft = replace(draft, plan=replace(draft.plan, likelihood=likelihood), sums=sums)
    return replace(draft, trained_sums=draft.sums)


def find_mode(draft: Draft) -> Draft:
    """Move θ̂ of the draft to the mode, if it is to be polished.

    An estimated noise becomes that of the residuals at the mode. A draft in another mode than
    polish is returned unchanged. Warns where the mode predicts the training rows clearly worse.
    Raises NoModeError where there is no mode nearby and no variational Gaussian takes its place.
    """
    if draft.mode != POLISH:
        return draft
    draft = _take_newton_steps(draft)
    # With a last layer and a Gaussian prior the noise was found together with the mode.
    together = draft.plan.network.linear and isinstance(draft.bound, BoundGaussian)
    if draft.estimated and not together:
        draft = _alternate_noise_and_mode(draft)
    return _warn_if_worse(draft)


def make_gaussian_at_mode(draft: Draft) -> Posterior:
    """Return the posterior with the Gaussian at θ̂ of the draft.

    Its report says what was seen and done. Raises ValueError where the curvature is not positive
    definite.
    """
    plan = draft.plan

    # The distances come first: they raise for a curvature that cannot be factorised, and a fit that
    # fails should not warn before.
    distance_before = compute_distance_to_mode(draft.trained_sums, draft.bound, plan.network.theta)
    distance_after = compute_distance_to_mode(draft.sums, draft.bound, draft.theta)
    draft = _add_notes(draft)
    report = _make_report(draft, distance_before, distance_after)

    # A setting that validation rows chose has been compared with the network itself.
    if not plan.validated:
        warn_residual(report)
    posterior = plan.result_class(
        plan.network,
        plan.likelihood,
        draft.prior,
        draft.theta,
        draft.sums.statistics,
        draft.mode,
        report,
        plan.budget,
        plan.data.source,
    )

    # Factorised now: an indefinite curvature is an error of the fit, not of a later prediction.
    _ = posterior.operator
    return posterior


def with_variational_gaussian(
    plan: FitPlan, posterior: Posterior, choose_prior: ChoosePrior | None = None
) -> Posterior:
    """Return the posterior with a variational Gaussian, where one is wanted and possible.

    plan: with the passes over the data. choose_prior: is called for another prior whenever the
    Gaussian has nearly converged; None: the prior stays. If the variational Gaussian is only the
    default and is not possible, the Gaussian at the mode stays, with a note. Raises ValueError
    where the variational Gaussian was asked for and is not possible.
    """
    if not plan.wants_variational:
        # With Gaussian noise the Gaussian at the mode is the nearest one: only its name changes.
        if plan.likelihood.quadratic and plan.gaussian == VARIATIONAL:
            return replace(posterior, report=replace(posterior.report, gaussian=VARIATIONAL))
        return posterior
    if not plan.finds_variational:
        return _keep_gaussian_at_mode(plan, posterior)
    structure, fisher = plan.choose_structure_for_averages()
    if fisher:
        note = (
            "the variational Gaussian takes the expected Fisher information, because "
            f"structure={structure.name!r} needs it"
        )
        posterior = _add_notes_to_report(posterior, [note])
    averaged = make_bound_ascent(plan, posterior, choose_prior).maximise_bound()

    # Factorised now, as at the mode.
    _ = averaged.covariance
    return replace(averaged, report=replace(averaged.report, passes=plan.data.passes))


# --- other rows, other priors --------------------------------------------------------------------


def make_bound_ascent(
    plan: FitPlan, posterior: Posterior, choose_prior: ChoosePrior | None = None
) -> BoundAscent:
    """Return the ascent to the variational Gaussian of a plan, which has not begun.

    The ascent starts from the plan's Gaussian; without one from a narrow Gaussian, where each row
    has nodes of its own, or from the one at the mode. choose_prior: as in
    `with_variational_gaussian`.
    """
    start = plan.start
    by_row_nodes = plan.row_nodes is not None
    if start is None and by_row_nodes:
        start = Variational(
            posterior.theta, _set_equal_probabilities(plan, posterior), posterior.tilted
        )
    if start is not None:
        posterior = replace(posterior, variational=replace(start, tilted=posterior.tilted))
    # The weight of new averages in the precision. On the network of benchmarks/networks (clinc, 150
    # classes) a half took 18 rounds, one took 32.
    new = NEW if by_row_nodes else None
    average = plan.make_average_passes_at(posterior.theta, moves=not posterior.tilted)
    ascent = BoundAscent(posterior, average, choose_prior, new=new)
    return ascent if plan.tolerance is None else replace(ascent, tolerance=plan.tolerance)


def refit_last_layer(plan: FitPlan, posterior: Posterior) -> Posterior:
    """Refit a last layer's posterior to the plan's rows, starting from the present posterior.

    The rows must be similar to those of the posterior. The result is at the mode of the plan's
    rows. If it has a variational Gaussian, that is found by their averages, and θ̂ and its tilt
    stay. Raises ValueError where the refit does not converge.
    """
    if posterior.variational is not None:
        return refit_to_similar_rows(posterior, plan.make_average_passes_at(posterior.theta))
    notes: list[str] = []
    sums = plan.collect_sums(posterior.theta)
    theta, sums, _ = plan.make_polish(notes).find_mode(posterior.theta, sums, posterior.bound_prior)
    moved = replace(posterior, theta=theta, statistics=sums.statistics)
    return _add_notes_to_report(moved, notes)


def move_theta_to_mode(plan: FitPlan, posterior: Posterior) -> Posterior:
    """Move θ̂ of a variational posterior to the mode under its prior, which may have changed.

    plan: with the passes over the data. Refits of the weights start at θ̂. Where there is no mode
    nearby, θ̂ stays and a note says so. Raises ValueError as `Polish.find_mode`.
    """
    plan = replace(plan, mode=POLISH)
    notes: list[str] = []
    polish = replace(plan.make_polish(notes), refuses=not plan.likelihood.concave)
    try:
        sums = plan.collect_sums(posterior.theta)
        theta, sums, steps = polish.find_mode(posterior.theta, sums, posterior.bound_prior)
    except NoModeError:
        return _add_notes_to_report(
            posterior, ["under the tuned prior the log posterior has no mode nearby: θ̂ stays"]
        )
    moved = replace(posterior, theta=theta, statistics=sums.statistics, mode=POLISH)
    report = replace(
        posterior.report,
        mode=POLISH,
        residual_after=moved.residual,
        steps=posterior.report.steps + steps,
    )
    return _add_notes_to_report(replace(moved, report=report), notes)


# --- parts of the steps --------------------------------------------------------------------------


def _widen_sketch(plan: FitPlan, sums: Sums, estimated: bool) -> tuple[FitPlan, Sums]:
    """Widen a low-rank sketch, a pass each time, until it overstates no variance by too much.

    A sketch is the low-rank form of the curvature; its width is its number of columns. Returns the
    plan with the last structure, and its sums. Other structures and their sums are returned
    unchanged. estimated: whether the noise is estimated, so that the sums are at a noise of one.
    """
    sketch = sums.statistics.curvature
    if not isinstance(sketch, LowRank):
        return plan, sums
    least = plan.least_precision
    if estimated:
        # In the sums' units, the precision is multiplied by the noise's square: about that of the
        # residuals, as the noise is not known yet.
        least *= float((sums.squares / sums.statistics.weight).min())

    # The widest sketch that the budget allows: its memory grows in proportion to its width.
    bytes_of_sketch = sketch.memory(Extent(plan.network.layout.size, 1))
    most = max(plan.budget // bytes_of_sketch * sketch.sketch.shape[1], 1)
    while least > 0 and plan.repeatable and (wider := sketch.widen_sketch(least, most)) is not None:
        plan = replace(plan, structure=wider)
        sums = plan.collect_sums(None)
        sketch = sums.statistics.curvature
        assert isinstance(sketch, LowRank)
    return plan, sums


def _replace_polish_by_tilt(draft: Draft) -> Draft:
    """Return the draft of a likelihood with kinks in mode "tilt", with a warning and a note.

    A draft in another mode than polish is returned unchanged. Raises ValueError where polish was
    asked for.
    """
    if draft.plan.mode == POLISH:
        raise ValueError(
            f"mode='polish' is not possible: {KINKS}. Use mode='tilt', or a smooth log_prob."
        )
    if draft.mode != POLISH:
        return draft
    message = (
        f"mode='tilt' was used in place of 'polish': {KINKS}. The curvature of the posterior is "
        "the Fisher"
    )
    warn(f"{message}. Give mode='tilt', or a smooth log_prob.")
    return replace(draft, mode=TILT).with_note(message)


def _judge_last_layer(draft: Draft) -> Verdict | None:
    """Judge by the draft's sums of the first pass whether the last layer is trained.

    The result is None where the targets do not allow a verdict.
    """
    likelihood = draft.plan.likelihood
    target = draft.target
    if target.classes is not None:
        return judge_classes(draft.sums, target.classes, likelihood)
    if target.numbers is not None:
        return judge_numbers(draft.sums, target.numbers, likelihood, draft.estimated)
    return None


def _make_collect_at_noise(plan: FitPlan) -> CollectAtNoise:
    """Return the function (likelihood, θ (P,)) -> sums, which runs a pass of the plan."""
    return lambda likelihood, theta: replace(plan, likelihood=likelihood).collect_sums(theta)


def _take_newton_steps(draft: Draft) -> Draft:
    """Climb to the mode by Newton steps, and return the draft there.

    Where there is no mode nearby, NoModeError is raised. Only if polish was the default and a
    variational Gaussian follows, θ̂ stays at the trained weights instead, with a note.
    """
    plan = draft.plan
    notes = list(draft.notes)
    optional = plan.mode != POLISH and plan.finds_variational
    may_lack_mode = not plan.likelihood.concave
    polish = replace(plan.make_polish(notes), refuses=optional and may_lack_mode)

    # The ascent may stop near the mode where a variational Gaussian follows, and either its prior
    # is still to be chosen, or it may be rough.
    rough = plan.prior is None or (plan.tolerance is not None and may_lack_mode)
    nearly = rough and plan.wants_variational
    try:
        theta, sums, steps = polish.find_mode(draft.theta, draft.sums, draft.bound, nearly=nearly)
    except NoModeError:
        if not optional:
            raise
        return draft.with_note(
            "the log posterior has no mode nearby: θ̂ stays, and the variational Gaussian starts "
            "from there"
        )
    return replace(draft, theta=theta, sums=sums, steps=steps, notes=tuple(notes))


def _alternate_noise_and_mode(draft: Draft) -> Draft:
    """Find noise and mode in turn, until the noise is that of the residuals at the mode.

    If that is not reached in NOISE_ROUNDS rounds, the last noise and mode are returned, with a
    note. Raises as `estimate_noise` and `Polish.find_mode`.
    """
    theta, sums, steps = draft.theta, draft.sums, draft.steps
    plan = draft.plan
    notes = list(draft.notes)
    for _ in range(NOISE_ROUNDS):
        before = sums.reference
        unit = replace(plan, likelihood=Gaussian(noise=1.0))
        sums, likelihood = estimate_noise(
            plan.network,
            unit.collect_sums(theta),
            draft.bound,
            polish=False,
            collect_at_noise=_make_collect_at_noise(plan),
            theta=theta,
        )
        plan = replace(plan, likelihood=likelihood)
        theta, sums, more_steps = plan.make_polish(notes).find_mode(theta, sums, draft.bound)
        steps += more_steps
        if bool(((sums.reference / before - 1).abs() <= SETTLED_NOISE).all()):
            break
    else:
        notes.append(f"noise and mode did not settle together in {NOISE_ROUNDS} rounds")

    return replace(draft, plan=plan, theta=theta, sums=sums, steps=steps, notes=tuple(notes))


def _warn_if_worse(draft: Draft) -> Draft:
    """Return the draft, with a warning and a note where polish made its predictions clearly worse.

    The predictions are those of the training rows. The likely cause is a prior that is too strong.
    Where validation rows chose the mode, the draft is returned unchanged.
    """
    plan = draft.plan
    before, after = draft.trained_sums, draft.sums
    if plan.validated:
        return draft
    if plan.likelihood.quadratic:
        ratio = (after.squares / before.squares.clamp_min(SMALLEST_DIVISOR)).sqrt()
        # A Gaussian with a given covariance sums whitened residuals, so the raw ones are not known.
        given_covariance = getattr(plan.likelihood, "covariance", None)
        if given_covariance is None and draft.raw_squares is not None:
            squares = after.compute_residual_squares(before, draft.theta - plan.network.theta)
            ratio = (squares / draft.raw_squares.clamp_min(SMALLEST_DIVISOR)).sqrt()
        worse = float(ratio.max()) > GROWN_RESIDUALS
        figure = f"the residuals grew by a factor of {float(ratio.max()):.3g}"
    else:
        difference = before.statistics.log_likelihood - after.statistics.log_likelihood
        fall = difference / after.statistics.weight
        worse = fall > LOWER_LOG_LIKELIHOOD
        figure = f"the log likelihood fell by {fall:.3g} a row"
    if not worse:
        return draft

    message = (
        f"polish moved the network away from what it had learned: {figure}, because the prior is "
        "too strong for the scale of its weights and targets. Standardise the targets, weaken the "
        "prior (priors.Gaussian(precision=1e-4)), or use mode='tilt', which keeps your network's "
        "predictions."
    )
    warn(message)
    return draft.with_note(Note(message, MOVED))


def _add_notes(draft: Draft) -> Draft:
    """Return the draft with the report's notes on the data, the prior and the structure.

    Warns of data whose scale or rounding spoils the predictions.
    """
    plan = draft.plan
    notes = [*plan.network.notes, *draft.notes]
    draft.target.warn_data(notes)
    spread = draft.target.spread

    if spread is not None and plan.likelihood.quadratic:
        missed = spread.missed
        if draft.mode == POLISH:
            # The smaller residuals count. Polish may have found the right scale; where it lost it,
            # `_warn_if_worse` has warned.
            moved = draft.theta - plan.network.theta
            missed = torch.minimum(
                missed, draft.sums.compute_residual_squares(draft.trained_sums, moved)
            )
        spread.warn_scale(missed, notes)
        noise = plan.likelihood.covariance_for(missed).diagonal().sqrt()
        spread.warn_rounding(noise, plan.network.dtype, notes)
    precision = draft.bound.precision(draft.theta)
    notes.extend(Note(note, CONCAVITY) for note in concavity_notes(precision))
    notes.extend(_describe_sketch(plan, draft.sums))
    if plan.summed_structure is not plan.structure:
        notes.append(DIAGONAL_FACTOR)
    return replace(draft, notes=tuple(notes))


def _describe_sketch(plan: FitPlan, sums: Sums) -> list[str]:
    """Return the notes on what a low-rank curvature leaves out; none for other structures.

    Warns where it leaves out more than its tail allows, because no wider sketch was possible.
    """
    sketch = sums.statistics.curvature
    least = plan.least_precision
    if not isinstance(sketch, LowRank) or least <= 0:
        return []
    note = sketch.describe_omission(least)
    # A rank that the user gave is taken as it is. Twice the tail is a guess.
    if sketch.rank is None and sketch.largest_variance_excess(least) > 2 * sketch.tail:
        why = "the memory budget" if plan.repeatable else "a source that can be read only once"
        warn(
            f"{note}, which is beyond tail={sketch.tail:g}: {why} allows no wider sketch. Use "
            "structure='kfac', a larger memory_budget, or LowRank(rank=…) to take it as it is."
        )
    return [Note(note, RANK)]


def _make_report(draft: Draft, distance_before: float, distance_after: float) -> Report:
    """Return the report of a fit.

    distance_before, distance_after: from the mode, before and after polish, in posterior standard
    deviations.
    """
    plan, sums = draft.plan, draft.sums
    network, layout = plan.network, plan.network.layout

    # δᵀSδ = Σ (Jδ)ᵀΛ(Jδ): how far polish moved the training outputs by δ, in units of the noise.
    start = draft.trained_sums.statistics
    moved = draft.theta - network.theta
    squares = max(float(moved @ start.curvature.push(moved)), 0.0)
    extent = measure_extent(network, sums.statistics.n, plan.finds_variational)
    return Report(
        n=sums.statistics.n,
        weight=sums.statistics.weight,
        parameters=layout.size,
        names=layout.names,
        outputs=network.outputs,
        likelihood=repr(plan.likelihood),
        structure=plan.structure.name,
        blocks=_name_structures_of_layers(plan),
        mode=draft.mode,
        residual=distance_before,
        residual_after=distance_after,
        steps=draft.steps,
        output_shift=math.sqrt(squares / max(start.weight, SMALLEST_DIVISOR)),
        passes=plan.data.passes,
        memory=plan.summed_structure.memory(extent),
        notes=draft.notes,
        prior=describe(draft.prior),
        output=describe_output_argument(network),
        choice=plan.reason,
    )


def _name_structures_of_layers(plan: FitPlan) -> dict[str, str]:
    """Return the name of the structure that each layer has in the curvature, by the layer's name.

    A layer of which only a part has a Kronecker form is listed parameter by parameter: the keys are
    then the names of its parameters.
    """
    structures = {}
    common = plan.structure.name
    for layer, names in plan.network.layout.names_by_layer.items():
        if not plan.structure.by_layers:
            structures[layer] = common
            continue
        by_name = {
            name: common if name in plan.network.kronecker_names else "diag" for name in names
        }
        structures |= by_name if len(set(by_name.values())) > 1 else {layer: by_name[names[0]]}
    return structures


def _set_equal_probabilities(plan: FitPlan, posterior: Posterior) -> Statistics:
    """Return the posterior's statistics with the curvature of rows of equal class probabilities.

    A network that has memorised its rows has almost no curvature there. From that curvature the
    rounds of the variational Gaussian would start near the prior's covariance, under which the
    averages hardly depend on the network's outputs. The likelihood must be a softmax. Raises
    AssertionError for another structure than Kronecker factors.
    """
    statistics = posterior.statistics
    curvature = statistics.curvature
    assert isinstance(curvature, Kfac)
    # Outputs of zero stand for equal probabilities.
    equal_outputs = torch.zeros(1, plan.network.outputs, dtype=torch.float64)
    output_factor = plan.likelihood.fisher(equal_outputs)[0] * statistics.weight
    return replace(statistics, curvature=curvature.with_output_factor(output_factor))


def _keep_gaussian_at_mode(plan: FitPlan, posterior: Posterior) -> Posterior:
    """Return the posterior with a note that says why it has no variational Gaussian.

    The reason is its memory, its time, or that the data can be read only once; the last is also a
    warning. Raises ValueError where the variational Gaussian was asked for.
    """
    if plan.gaussian == VARIATIONAL:
        raise ValueError(
            "gaussian='variational' reads the data several times, but they can be read only once "
            "(a generator). Give a DataLoader, a list of batches or arrays, or gaussian='laplace'."
        )

    message = "gaussian='laplace' was used in place of 'variational', "
    if plan.variational_is_large:
        message += (
            f"which needs {describe_bytes(plan.bytes_of_averages)}, more than the memory budget"
        )
    elif plan.variational_takes_long and plan.repeatable:
        message += (
            f"which takes {plan.network.outputs} backward passes over the data in each of its "
            "rounds: the Jacobians of all rows take "
            f"{describe_bytes(plan.bytes_of_jacobians)}, more than the part of the memory budget "
            "in which they are kept; ask for it by gaussian='variational'"
        )
    else:
        message += "which reads the data several times"
        warn(
            f"{message}: these can be read only once. Give a DataLoader or arrays, or "
            "gaussian='laplace'."
        )
    return _add_notes_to_report(posterior, [message])


def _add_notes_to_report(posterior: Posterior, notes: list[str]) -> Posterior:
    """Return the posterior with further notes in its report."""
    all_notes = (*posterior.report.notes, *map(Note, notes))
    return replace(posterior, report=replace(posterior.report, notes=all_notes))
