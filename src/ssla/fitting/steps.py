"""The steps of a fit, each a function from one frozen value to the next: see `ssla.fitting.fit`.

read_data                   one pass: the sums at the trained weights
choose_mode                 whether θ̂ stays at the trained weights
settle_noise                the noise of a Gaussian likelihood, from the residuals
find_mode                   Newton steps to the mode, where θ̂ moves
gaussian_at_mode            the Gaussian at θ̂, with the report
with_variational_gaussian   the variational Gaussian in its place
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ssla._checks import warn
from ssla.curvature import Extent, Kfac, LowRank
from ssla.curvature.kfac import MANY_CLASSES
from ssla.curvature.memory import bytes_in_words
from ssla.fitting.fit_plan import FitPlan
from ssla.fitting.mode import NoModeError
from ssla.fitting.noise import CollectAtNoise, estimate_noise
from ssla.fitting.passes import extent_of
from ssla.fitting.sums import Sums, distance_to_mode
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
# The numbers below were not measured: they are guesses.
NOISE_ROUNDS = 10
SETTLED_NOISE = 1e-4  # relative change of the noise between two rounds
GROWN_RESIDUALS = 1.5  # factor on the residuals by which polish made the network clearly worse
LOWER_LOG_LIKELIHOOD = 0.2  # nats a row, the same for other likelihoods


@dataclass(frozen=True, eq=False)
class Draft:
    """A fit that is not finished: what one step returns to the next."""

    plan: FitPlan
    estimated: bool  # whether the noise is estimated, not given
    prior: Prior  # as given, or of the trained weights' scale
    bound: BoundPrior  # the same, over the flat θ
    mode: str
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
    """Read the data once, and return the sums at the trained weights under the starting prior.

    The plan of the draft has its structure and its number of rows. Raises ValueError for data that
    cannot be fitted, and for a prior that has no finite density at the trained weights.
    """
    estimated = plan.estimates_noise
    if estimated:
        # Sums in units of the noise: they are scaled once it is known.
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
        mode=plan.order_at(None).mode_for(network),
        theta=network.theta,
        sums=sums,
        target=target,
        trained_sums=sums,
        raw_squares=sums.squares if plan.likelihood.quadratic else None,
    )


def choose_mode(draft: Draft) -> Draft:
    """Choose whether a last layer is polished or kept, where nobody asked for a mode; the reason
    is noted.
    """
    plan = draft.plan
    if plan.likelihood.predictive.may_be_straight and draft.sums.has_kinks:
        draft = _replace_polish_by_tilt(replace(draft, sums=replace(draft.sums, newton=None)))
    if not plan.keeps_trained_layer or plan.mode is not None or draft.mode != POLISH:
        return draft
    verdict = _judge_last_layer(draft)
    if verdict is None:
        return draft
    classes = draft.target.classes is not None
    baseline = "the class frequencies" if classes else "the best constant prediction"
    return replace(draft, mode=verdict.mode).with_note(verdict.note(baseline))


def settle_noise(draft: Draft) -> Draft:
    """Estimate the noise of a Gaussian likelihood from the residuals, where it was not given.

    Raises ValueError where the residuals do not determine it.
    """
    if draft.estimated:
        sums, likelihood = estimate_noise(
            draft.plan.network,
            draft.sums,
            draft.bound,
            draft.mode == POLISH,
            _collect_at_noise(draft.plan),
        )
        draft = replace(draft, plan=replace(draft.plan, likelihood=likelihood), sums=sums)
    return replace(draft, trained_sums=draft.sums)


def find_mode(draft: Draft) -> Draft:
    """Move θ̂ to the mode, if it is to be polished, and the noise to that of the residuals there.

    Raises NoModeError where polish was asked for and there is no mode nearby.
    """
    if draft.mode != POLISH:
        return draft
    draft = _take_newton_steps(draft)
    # With a last layer and a Gaussian prior the noise was found together with the mode.
    together = draft.plan.network.linear and isinstance(draft.bound, BoundGaussian)
    if draft.estimated and not together:
        draft = _alternate_noise_and_mode(draft)
    return _warn_if_worse(draft)


def gaussian_at_mode(draft: Draft) -> Posterior:
    """Return the Gaussian at θ̂, with a report of what was seen and done.

    Raises ValueError where the curvature is not positive definite.
    """
    plan = draft.plan
    # First, because a curvature that cannot be factorised is an error, and what follows only warns.
    distance_before = distance_to_mode(draft.trained_sums, draft.bound, plan.network.theta)
    distance_after = distance_to_mode(draft.sums, draft.bound, draft.theta)
    draft = _add_notes(draft)
    report = _make_report(draft, distance_before, distance_after)
    if not plan.validated:  # validation rows have compared it with the network itself
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
    """Return the posterior with a variational Gaussian, where one is wanted and can be had.

    choose_prior: is asked for another prior whenever the Gaussian has nearly converged. Raises
    ValueError where the Gaussian was asked for and cannot be had.
    """
    if not plan.wants_variational:
        # With Gaussian noise the Gaussian at the mode is the nearest one.
        same = plan.likelihood.quadratic and plan.gaussian == VARIATIONAL
        if not same:
            return posterior
        return replace(posterior, report=replace(posterior.report, gaussian=VARIATIONAL))
    if not plan.finds_variational:
        return _stay_at_laplace(plan, posterior)
    structure, fisher = plan.structure_for_averages()
    if fisher:
        note = (
            "the variational Gaussian takes the expected Fisher information, because "
            f"structure={structure.name!r} needs it"
        )
        posterior = _add_note(posterior, note)
    averaged = bound_ascent(plan, posterior, choose_prior).maximise_bound()
    # Factorised now, as at the mode.
    _ = averaged.covariance
    return replace(averaged, report=replace(averaged.report, passes=plan.data.passes))


# --- other rows, other priors --------------------------------------------------------------------


def bound_ascent(
    plan: FitPlan, posterior: Posterior, choose_prior: ChoosePrior | None = None
) -> BoundAscent:
    """Return the rounds to the variational Gaussian: from the mode, or from the Gaussian of similar
    rows.
    """
    start = plan.start
    by_row_nodes = plan.row_nodes is not None
    if start is None and by_row_nodes:
        start = Variational(posterior.theta, _narrow_start(plan, posterior), posterior.tilted)
    if start is not None:
        posterior = replace(posterior, variational=replace(start, tilted=posterior.tilted))
    # On the network of benchmarks/networks (clinc, 150 classes) half of the new averages took 18
    # rounds, all of them 32.
    new = NEW if by_row_nodes else None
    average = plan.averages_at(posterior.theta, not posterior.tilted)
    ascent = BoundAscent(posterior, average, choose_prior, new=new)
    return ascent if plan.tolerance is None else replace(ascent, tolerance=plan.tolerance)


def refit_last_layer(plan: FitPlan, posterior: Posterior) -> Posterior:
    """Refit a last layer's posterior to the plan's rows instead, from where it is.

    It is then at their mode, or has their averages. θ̂ of a variational Gaussian stays, and so does
    its tilt. Raises ValueError where the refit does not converge.
    """
    if posterior.variational is not None:
        return refit_to_similar_rows(posterior, plan.averages_at(posterior.theta))
    sums = plan.collect_sums(posterior.theta)
    theta, sums, _ = plan.polish([]).find_mode(posterior.theta, sums, posterior.bound_prior)
    return replace(posterior, theta=theta, statistics=sums.statistics)


def move_theta_to_mode(plan: FitPlan, posterior: Posterior) -> Posterior:
    """Move θ̂ of a variational posterior to the mode under its prior: where weight refits start.

    The prior may have changed. Where there is no mode nearby θ̂ stays, with a note.
    """
    plan = replace(plan, mode=POLISH)
    polish = replace(plan.polish([]), refuses=not plan.likelihood.concave)
    try:
        sums = plan.collect_sums(posterior.theta)
        theta, sums, steps = polish.find_mode(posterior.theta, sums, posterior.bound_prior)
    except NoModeError:
        return _add_note(
            posterior, "under the tuned prior the log posterior has no mode nearby: θ̂ stays"
        )
    moved = replace(posterior, theta=theta, statistics=sums.statistics, mode=POLISH)
    report = replace(
        posterior.report,
        mode=POLISH,
        residual_after=moved.residual,
        steps=posterior.report.steps + steps,
    )
    return replace(moved, report=report)


# --- parts of the steps --------------------------------------------------------------------------


def _widen_sketch(plan: FitPlan, sums: Sums, estimated: bool) -> tuple[FitPlan, Sums]:
    """Widen a low-rank sketch, a pass each time, until it overstates no variance too much.

    Other structures stay as they are. estimated: whether the sums are at a noise of one.
    """
    sketch = sums.statistics.curvature
    if not isinstance(sketch, LowRank):
        return plan, sums
    least = plan.least_precision
    if estimated:
        # The sums are in units of a noise that is not known yet: about that of the residuals.
        least *= float((sums.squares / sums.statistics.weight).min())
    bytes_of_one = sketch.memory(Extent(plan.network.layout.size, 1))
    most = max(plan.budget // bytes_of_one * sketch.sketch.shape[1], 1)
    while least > 0 and plan.repeatable and (wider := sketch.wider(least, most)) is not None:
        plan = replace(plan, structure=wider)
        sums = plan.collect_sums(None)
        sketch = sums.statistics.curvature
        assert isinstance(sketch, LowRank)
    return plan, sums


def _replace_polish_by_tilt(draft: Draft) -> Draft:
    """Return the draft of a likelihood with kinks in mode "tilt", where polish is the default.

    Raises ValueError where polish was asked for.
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
    """Judge from its sums whether the last layer is trained; None where that cannot be told."""
    likelihood, target = draft.plan.likelihood, draft.target
    if target.classes is not None:
        return judge_classes(draft.sums, target.classes, likelihood)
    if target.numbers is not None:
        return judge_numbers(draft.sums, target.numbers, likelihood, draft.estimated)
    return None


def _collect_at_noise(plan: FitPlan) -> CollectAtNoise:
    """Return a pass with another noise: (likelihood, θ) -> its sums."""
    return lambda likelihood, theta: replace(plan, likelihood=likelihood).collect_sums(theta)


def _take_newton_steps(draft: Draft) -> Draft:
    """Climb to the mode by Newton steps.

    Where none is reached, a variational Gaussian starts by default from the trained weights;
    without one, NoModeError is raised.
    """
    plan, notes = draft.plan, list(draft.notes)
    optional = plan.mode != POLISH and plan.finds_variational
    unsure = not plan.likelihood.concave
    polish = replace(plan.polish(notes), refuses=optional and unsure)
    # A prior is still to be chosen, or a rough Gaussian is enough: near the mode will do.
    rough = plan.prior is None or (plan.tolerance is not None and unsure)
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
    """Find noise and mode in turn, until the noise is that of the residuals at the mode."""
    theta, sums, steps = draft.theta, draft.sums, draft.steps
    plan, notes = draft.plan, list(draft.notes)
    for _ in range(NOISE_ROUNDS):
        before = sums.reference
        unit = replace(plan, likelihood=Gaussian(noise=1.0))
        sums, likelihood = estimate_noise(
            plan.network,
            unit.collect_sums(theta),
            draft.bound,
            False,
            _collect_at_noise(plan),
            theta,
        )
        plan = replace(plan, likelihood=likelihood)
        theta, sums, more = plan.polish(notes).find_mode(theta, sums, draft.bound)
        steps += more
        if bool(((sums.reference / before - 1).abs() <= SETTLED_NOISE).all()):
            break
    else:
        notes.append(f"noise and mode did not settle together in {NOISE_ROUNDS} rounds")
    return replace(draft, plan=plan, theta=theta, sums=sums, steps=steps, notes=tuple(notes))


def _warn_if_worse(draft: Draft) -> Draft:
    """Warn where the prior pulled the mode away from what the network had learned.

    Not where validation rows chose it.
    """
    plan, before, after = draft.plan, draft.trained_sums, draft.sums
    if plan.validated:
        return draft
    if plan.likelihood.quadratic:
        ratio = (after.squares / before.squares.clamp_min(1e-300)).sqrt()
        # Squares under a given covariance are of whitened residuals: there are no raw ones.
        joint = getattr(plan.likelihood, "covariance", None)
        if joint is None and draft.raw_squares is not None:
            squares = after.residual_squares(before, draft.theta - plan.network.theta)
            ratio = (squares / draft.raw_squares.clamp_min(1e-300)).sqrt()
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
    """Note what the report says of the data, the prior and the structure; warn where it matters."""
    plan = draft.plan
    notes = [*plan.network.notes, *draft.notes]
    draft.target.warn_data(notes)
    spread = draft.target.spread
    if spread is not None and plan.likelihood.quadratic:
        missed = spread.missed
        if draft.mode == POLISH:
            # Polish may have found the scale. Where it lost it, the prior is at fault, which is
            # warned about elsewhere.
            moved = draft.theta - plan.network.theta
            missed = torch.minimum(missed, draft.sums.residual_squares(draft.trained_sums, moved))
        spread.warn_scale(missed, notes)
        noise = plan.likelihood.covariance_for(missed).diagonal().sqrt()
        spread.warn_rounding(noise, plan.network.dtype, notes)
    precision = draft.bound.precision(draft.theta)
    notes.extend(Note(note, CONCAVITY) for note in concavity_notes(precision))
    notes.extend(_sketch_notes(plan, draft.sums))
    if plan.summed_structure is not plan.structure:
        notes.append(DIAGONAL_FACTOR)
    return replace(draft, notes=tuple(notes))


def _sketch_notes(plan: FitPlan, sums: Sums) -> list[str]:
    """Return the notes of what a low-rank curvature leaves out; warns where it is much."""
    sketch, least = sums.statistics.curvature, plan.least_precision
    if not isinstance(sketch, LowRank) or least <= 0:
        return []
    note = sketch.note(least)
    if sketch.rank is None and sketch.overstated(least) > 2 * sketch.tail:
        why = "the memory budget" if plan.repeatable else "a source that can be read only once"
        warn(
            f"{note}, which is beyond tail={sketch.tail:g}: {why} allows no wider sketch. Use "
            "structure='kfac', a larger memory_budget, or LowRank(rank=…) to take it as it is."
        )
    return [Note(note, RANK)]


def _make_report(draft: Draft, distance_before: float, distance_after: float) -> Report:
    """Write the report of a fit, from the distances to the mode before and after polish."""
    plan, sums = draft.plan, draft.sums
    network, layout = plan.network, plan.network.layout
    # ‖Jδ‖ over the rows: how far polish moved the training outputs, in units of the noise.
    start = draft.trained_sums.statistics
    moved = draft.theta - network.theta
    squares = max(float(moved @ start.curvature.push(moved)), 0.0)
    extent = extent_of(network, sums.statistics.n, plan.finds_variational)
    return Report(
        n=sums.statistics.n,
        weight=sums.statistics.weight,
        parameters=layout.size,
        names=layout.names,
        outputs=network.outputs,
        likelihood=repr(plan.likelihood),
        structure=plan.structure.name,
        blocks=_structures_of_layers(plan),
        mode=draft.mode,
        residual=distance_before,
        residual_after=distance_after,
        steps=draft.steps,
        output_shift=math.sqrt(squares / max(start.weight, 1e-300)),
        passes=plan.data.passes,
        memory=plan.summed_structure.memory(extent),
        notes=draft.notes,
        prior=describe(draft.prior),
        output=describe_output_argument(network),
        choice=plan.reason,
    )


def _structures_of_layers(plan: FitPlan) -> dict[str, str]:
    """Return the structure that each layer has in the curvature, by the layer's name.

    Parameter by parameter for a layer of which only a part has a Kronecker form.
    """
    structures = {}
    common = plan.structure.name
    for layer, names in plan.network.layout.layers().items():
        if not plan.structure.by_layers:
            structures[layer] = common
            continue
        each = {name: common if name in plan.network.kronecker_names else "diag" for name in names}
        structures |= each if len(set(each.values())) > 1 else {layer: each[names[0]]}
    return structures


def _narrow_start(plan: FitPlan, posterior: Posterior) -> Statistics:
    """Return the sums with the curvature of outputs of zero (equal class probabilities) in every
    row.

    A network that has memorised its rows has almost no curvature there: from that of its own
    outputs the rounds would start at the prior's covariance, where averages say nothing about the
    outputs at hand.
    """
    statistics = posterior.statistics
    curvature = statistics.curvature
    assert isinstance(curvature, Kfac)
    zero = torch.zeros(1, plan.network.outputs, dtype=torch.float64)
    of_all_rows = plan.likelihood.fisher(zero)[0] * statistics.weight
    return replace(statistics, curvature=curvature.with_output_factor(of_all_rows))


def _stay_at_laplace(plan: FitPlan, posterior: Posterior) -> Posterior:
    """Return the Gaussian at the mode in place of the default, with the reason in its report.

    For data that can be read only once, or Jacobians that are not kept. Raises ValueError where
    the variational Gaussian was asked for.
    """
    if plan.gaussian == VARIATIONAL:
        raise ValueError(
            "gaussian='variational' reads the data several times, but they can be read only once "
            "(a generator). Give a DataLoader, a list of batches or arrays, or gaussian='laplace'."
        )
    message = "gaussian='laplace' was used in place of 'variational', "
    if plan.variational_is_large:
        message += (
            f"which needs {bytes_in_words(plan.bytes_of_averages)}, more than the memory budget"
        )
    elif plan.variational_takes_long and plan.repeatable:
        message += (
            f"which takes {plan.network.outputs} backward passes over the data in each of its "
            "rounds: the Jacobians of all rows take "
            f"{bytes_in_words(plan.bytes_of_jacobians)}, more than the part of the memory budget "
            "in which they are kept; ask for it by gaussian='variational'"
        )
    else:
        message += "which reads the data several times"
        warn(
            f"{message}: these can be read only once. Give a DataLoader or arrays, or "
            "gaussian='laplace'."
        )
    return _add_note(posterior, message)


def _add_note(posterior: Posterior, note: str) -> Posterior:
    """Return the posterior with another note in its report."""
    notes = (*posterior.report.notes, Note(note))
    return replace(posterior, report=replace(posterior.report, notes=notes))
