"""The steps of a fit, each a function from one frozen value to the next: see `ssla.fitting.fit`.

read            one pass: the sums at the trained weights
choose_mode     whether θ̂ stays at the trained weights
settle_noise    the noise of a Gaussian likelihood, from the residuals
find_mode       Newton steps to the mode, where θ̂ moves
posterior_at    the Gaussian at θ̂, with the report
with_averages   the variational Gaussian in its place
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
from ssla.curvature.memory import in_words
from ssla.fitting.fit_plan import FitPlan
from ssla.fitting.mode import NoModeError
from ssla.fitting.noise import Again, estimate_noise
from ssla.fitting.passes import extent_of
from ssla.fitting.sums import Sums, residual
from ssla.fitting.trained import Verdict, judged, judged_numbers
from ssla.fitting.variational import NEW, Choose, Climb, from_there
from ssla.fitting.watching import TargetRange, warn_residual
from ssla.likelihoods import Gaussian
from ssla.network import output_words
from ssla.priors import BoundGaussian, BoundPrior, Prior, check_at, concavity_notes, describe
from ssla.report import CONCAVITY, MOVED, POLISH, RANK, TILT, VARIATIONAL, Note, Report
from ssla.values import Statistics, Variational

if TYPE_CHECKING:
    from ssla.posterior import Posterior

STRAIGHT = (
    "log p(y|f) has no curvature in f at any of the targets, while its Fisher information is not "
    "zero: it has kinks, as |y − f| has, so Newton steps do not lead to the mode"
)
DIAGONAL_FACTOR = (
    "the output factor of structure='kfac' is diagonal, as is the default above "
    f"{MANY_CLASSES:,} classes; ask for the full one by "
    "structure=ssla.structures.Kfac(output_factor='full')"
)
NOISE_ROUNDS = 10
SETTLED_NOISE = 1e-4  # relative change of the noise between two rounds


@dataclass(frozen=True, eq=False)
class Draft:
    """A fit on its way: what one step hands to the next."""

    plan: FitPlan
    estimated: bool  # whether the noise is estimated, not given
    prior: Prior  # as given, or of the trained weights' scale
    bound: BoundPrior  # the same, over the flat θ
    mode: str
    theta: Tensor
    sums: Sums  # at θ
    target: TargetRange  # what the first pass saw of the targets
    trained_sums: Sums  # at the trained weights
    raw_squares: Tensor | None  # squared residuals of the network as it came (C,)
    steps: int = 0  # Newton steps
    notes: tuple[str, ...] = ()

    def noted(self, note: str) -> Draft:
        return replace(self, notes=(*self.notes, note))


def read(plan: FitPlan) -> Draft:
    """One pass at the trained weights. The plan then has its structure and its number of rows."""
    estimated = plan.estimates_noise
    if estimated:
        # Sums in units of the noise: they are scaled once it is known.
        plan = replace(plan, likelihood=Gaussian(noise=1.0), asked=plan.marks)
    plan, sums, target = plan.read(None)
    plan = replace(plan, rows=sums.statistics.n)
    plan, sums = _with_enough_directions(plan, sums, estimated)
    network = plan.network
    prior = plan.starting_prior
    bound = prior.bind(network.layout)
    check_at(prior, bound, network.theta)
    squares = sums.squares if plan.likelihood.quadratic else None
    mode = plan.order(None).mode_for(network)
    theta = network.theta
    return Draft(plan, estimated, prior, bound, mode, theta, sums, target, sums, squares)


def choose_mode(draft: Draft) -> Draft:
    """Whether a last layer is polished or kept, where nobody asked for a mode; with the reason."""
    plan = draft.plan
    if plan.likelihood.predictive.may_be_straight and draft.sums.straight:
        draft = _without_polish(replace(draft, sums=replace(draft.sums, newton=None)))
    verdict = None
    if plan.judges and plan.mode is None and draft.mode == POLISH:
        verdict = _verdict(draft)
    if verdict is None:
        return draft
    classes = draft.target.classes is not None
    baseline = "the class frequencies" if classes else "the best constant prediction"
    return replace(draft, mode=verdict.mode).noted(verdict.note(baseline))


def settle_noise(draft: Draft) -> Draft:
    """The noise of a Gaussian likelihood from the residuals, where it was not given."""
    if draft.estimated:
        sums, likelihood = estimate_noise(
            draft.plan.network,
            draft.sums,
            draft.bound,
            draft.mode == POLISH,
            _pass_at_noise(draft.plan),
        )
        draft = replace(draft, plan=replace(draft.plan, likelihood=likelihood), sums=sums)
    return replace(draft, trained_sums=draft.sums)


def find_mode(draft: Draft) -> Draft:
    """θ̂ at the mode, if it is to be polished: by Newton steps, and with the noise that suits
    it.
    """
    if draft.mode != POLISH:
        return draft
    draft = _climbed(draft)
    # With a last layer and a Gaussian prior the noise was found together with the mode.
    together = draft.plan.network.linear and isinstance(draft.bound, BoundGaussian)
    if draft.estimated and not together:
        draft = _with_noise_of_the_mode(draft)
    return _with_warning_if_moved(draft)


def posterior_at(draft: Draft) -> Posterior:
    """The Gaussian at θ̂, with a report of what was seen and done."""
    plan = draft.plan
    # First, because a curvature that cannot be factorised is an error, and what follows only warns.
    residuals = (
        residual(draft.trained_sums, draft.bound, plan.network.theta),
        residual(draft.sums, draft.bound, draft.theta),
    )
    draft = _with_notes(draft)
    report = _report(draft, *residuals)
    if not plan.validated:  # validation rows have compared it with the network itself
        warn_residual(report)
    posterior = plan.kind(
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


def with_averages(plan: FitPlan, posterior: Posterior, choose: Choose | None = None) -> Posterior:
    """The posterior with a variational Gaussian, where one is wanted and can be had.

    choose: is asked for another prior whenever the Gaussian has nearly converged.
    """
    if not plan.wants_variational:
        # With Gaussian noise the Gaussian at the mode is the nearest one.
        same = plan.likelihood.quadratic and plan.gaussian == VARIATIONAL
        if not same:
            return posterior
        return replace(posterior, report=replace(posterior.report, gaussian=VARIATIONAL))
    if not plan.averages:
        return _without_averages(plan, posterior)
    structure, fisher = plan.averaged_structure()
    if fisher:
        note = (
            "the variational Gaussian takes the expected Fisher information, because "
            f"structure={structure.name!r} needs it"
        )
        posterior = _noted(posterior, note)
    averaged = climb(plan, posterior, choose).run()
    # Factorised now, as at the mode.
    _ = averaged.covariance
    return replace(averaged, report=replace(averaged.report, passes=plan.data.passes))


# --- other rows, other priors --------------------------------------------------------------------


def climb(plan: FitPlan, posterior: Posterior, choose: Choose | None = None) -> Climb:
    """The rounds to the variational Gaussian: from the mode, or from the Gaussian of similar
    rows.
    """
    start = plan.start
    by_row_nodes = plan.row_nodes is not None
    if start is None and by_row_nodes:
        start = Variational(posterior.theta, _narrow(plan, posterior), posterior.tilted)
    if start is not None:
        posterior = replace(posterior, variational=replace(start, tilted=posterior.tilted))
    # On the network of benchmarks/networks (clinc, 150 classes) half of the new averages took 18
    # rounds, all of them 32.
    new = NEW if by_row_nodes else None
    average = plan.average(posterior.theta, not posterior.tilted)
    rounds = Climb(posterior, average, choose, new=new)
    return rounds if plan.tolerance is None else replace(rounds, tolerance=plan.tolerance)


def refitted(plan: FitPlan, posterior: Posterior) -> Posterior:
    """A last layer's posterior on the plan's rows instead, from where it is.

    At their mode, or with their averages. θ̂ of a variational Gaussian stays, and so does its tilt.
    """
    if posterior.variational is not None:
        return from_there(posterior, plan.average(posterior.theta))
    polish = plan.polish([])
    sums = plan.collect(posterior.theta)
    theta, sums, _ = polish.run(posterior.theta, sums, posterior.bound_prior)
    return replace(posterior, theta=theta, statistics=sums.statistics)


def with_theta_at_mode(plan: FitPlan, posterior: Posterior) -> Posterior:
    """θ̂ of a variational posterior moved to the mode under its prior: where weight refits start.

    The prior may have changed. Where there is no mode nearby θ̂ stays, with a note.
    """
    plan = replace(plan, mode=POLISH)
    polish = replace(plan.polish([]), refuses=not plan.likelihood.concave)
    try:
        sums = plan.collect(posterior.theta)
        theta, sums, steps = polish.run(posterior.theta, sums, posterior.bound_prior)
    except NoModeError:
        return _noted(
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


def _verdict(draft: Draft) -> Verdict | None:
    """Whether the last layer is trained, from its sums; None where that cannot be told."""
    likelihood, target = draft.plan.likelihood, draft.target
    if target.classes is not None:
        return judged(draft.sums, target.classes, likelihood)
    if target.numbers is not None:
        return judged_numbers(draft.sums, target.numbers, likelihood, draft.estimated)
    return None


def _without_polish(draft: Draft) -> Draft:
    """The mode of a likelihood with kinks: as asked for, or "tilt" in place of the default."""
    if draft.plan.mode == POLISH:
        raise ValueError(
            f"mode='polish' is not possible: {STRAIGHT}. Use mode='tilt', or a smooth log_prob."
        )
    if draft.mode != POLISH:
        return draft
    message = (
        f"mode='tilt' was used in place of 'polish': {STRAIGHT}. The curvature of the posterior is "
        "the Fisher"
    )
    warn(f"{message}. Give mode='tilt', or a smooth log_prob.")
    return replace(draft, mode=TILT).noted(message)


def _with_enough_directions(plan: FitPlan, sums: Sums, estimated: bool) -> tuple[FitPlan, Sums]:
    """A low-rank sketch is widened, a pass each time, until it overstates no variance too much."""
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
        sums = plan.collect(None)
        sketch = sums.statistics.curvature
        assert isinstance(sketch, LowRank)
    return plan, sums


def _pass_at_noise(plan: FitPlan) -> Again:
    """A pass with another noise: (likelihood, θ) -> its sums."""
    return lambda likelihood, theta: replace(plan, likelihood=likelihood).collect(theta)


def _climbed(draft: Draft) -> Draft:
    """Newton steps to the mode.

    Where none is reached, a variational Gaussian starts by default from the trained weights.
    """
    plan, notes = draft.plan, list(draft.notes)
    optional = plan.mode != POLISH and plan.averages
    unsure = not plan.likelihood.concave
    polish = replace(plan.polish(notes), refuses=optional and unsure)
    # A prior is still to be chosen, or a rough Gaussian is enough: near the mode will do.
    rough = plan.prior is None or (plan.tolerance is not None and unsure)
    nearly = rough and plan.wants_variational
    try:
        theta, sums, steps = polish.run(draft.theta, draft.sums, draft.bound, nearly=nearly)
    except NoModeError:
        if not optional:
            raise
        note = (
            "the log posterior has no mode nearby: θ̂ stays, and the variational Gaussian starts "
            "from there"
        )
        return replace(draft, notes=(*notes, note))
    return replace(draft, theta=theta, sums=sums, steps=steps, notes=tuple(notes))


def _with_noise_of_the_mode(draft: Draft) -> Draft:
    """Noise and mode in turn, until the noise is that of the residuals at the mode."""
    theta, sums, steps = draft.theta, draft.sums, draft.steps
    plan, notes = draft.plan, list(draft.notes)
    for _ in range(NOISE_ROUNDS):
        before = sums.reference
        unit = replace(plan, likelihood=Gaussian(noise=1.0))
        sums, likelihood = estimate_noise(
            plan.network,
            unit.collect(theta),
            draft.bound,
            False,
            _pass_at_noise(plan),
            theta,
        )
        plan = replace(plan, likelihood=likelihood)
        theta, sums, more = plan.polish(notes).run(theta, sums, draft.bound)
        steps += more
        if bool(((sums.reference / before - 1).abs() <= SETTLED_NOISE).all()):
            break
    else:
        notes.append(f"noise and mode did not settle together in {NOISE_ROUNDS} rounds")
    return replace(draft, plan=plan, theta=theta, sums=sums, steps=steps, notes=tuple(notes))


def _with_warning_if_moved(draft: Draft) -> Draft:
    """Warn where the prior pulled the mode away from what the network had learned.

    Not where validation rows chose it.
    """
    plan, start, end = draft.plan, draft.trained_sums, draft.sums
    if plan.validated:
        return draft
    if plan.likelihood.quadratic:
        spread = (end.squares / start.squares.clamp_min(1e-300)).sqrt()
        # Squares under a given covariance are of whitened residuals: there are no raw ones.
        joint = getattr(plan.likelihood, "covariance", None)
        if joint is None and draft.raw_squares is not None:
            after = end.residual_squares(start, draft.theta - plan.network.theta)
            spread = (after / draft.raw_squares.clamp_min(1e-300)).sqrt()
        worse = float(spread.max()) > 1.5
        figure = f"the residuals grew by a factor of {float(spread.max()):.3g}"
    else:
        before, after_polish = start.statistics, end.statistics
        fall = (before.log_likelihood - after_polish.log_likelihood) / after_polish.weight
        worse = fall > 0.2
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
    return draft.noted(Note(message, MOVED))


def _with_notes(draft: Draft) -> Draft:
    """What the report says of the data, the prior and the structure; warnings where they matter."""
    plan = draft.plan
    notes = [*plan.network.notes, *draft.notes]
    draft.target.note(notes)
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
    notes.extend(_notes_of_directions(plan, draft.sums))
    if plan.summed_structure is not plan.structure:
        notes.append(DIAGONAL_FACTOR)
    return replace(draft, notes=tuple(notes))


def _notes_of_directions(plan: FitPlan, sums: Sums) -> list[str]:
    """What a low-rank curvature leaves out."""
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


def _report(draft: Draft, residual_before: float, residual_after: float) -> Report:
    plan, sums = draft.plan, draft.sums
    network, layout = plan.network, plan.network.layout
    start = draft.trained_sums
    moved = draft.theta - network.theta
    squares = max(float(moved @ start.statistics.curvature.push(moved)), 0.0)
    extent = extent_of(network, sums.statistics.n, plan.averages)
    return Report(
        n=sums.statistics.n,
        weight=sums.statistics.weight,
        parameters=layout.size,
        names=layout.names,
        outputs=network.outputs,
        likelihood=repr(plan.likelihood),
        structure=plan.structure.name,
        blocks=_blocks(plan),
        mode=draft.mode,
        residual=residual_before,
        residual_after=residual_after,
        steps=draft.steps,
        output_shift=math.sqrt(squares / max(start.statistics.weight, 1e-300)),
        passes=plan.data.passes,
        memory=plan.summed_structure.memory(extent),
        notes=draft.notes,
        prior=describe(draft.prior),
        output=output_words(network),
        choice=plan.reason,
    )


def _blocks(plan: FitPlan) -> dict[str, str]:
    """Which structure each layer got.

    Parameter by parameter for a layer of which only a part has a Kronecker form.
    """
    blocks = {}
    name_of_all = plan.structure.name
    for layer, names in plan.network.layout.layers().items():
        if not plan.structure.by_layers:
            blocks[layer] = name_of_all
            continue
        kinds = {name: name_of_all if name in plan.network.kronecker else "diag" for name in names}
        blocks |= kinds if len(set(kinds.values())) > 1 else {layer: kinds[names[0]]}
    return blocks


def _narrow(plan: FitPlan, posterior: Posterior) -> Statistics:
    """The sums with the curvature of outputs of zero (equal class probabilities) in every row.

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


def _without_averages(plan: FitPlan, posterior: Posterior) -> Posterior:
    """Laplace in place of the default, with the reason.

    For data that can be read only once, or Jacobians that are not kept.
    """
    if plan.gaussian == VARIATIONAL:
        raise ValueError(
            "gaussian='variational' reads the data several times, but they can be read only once "
            "(a generator). Give a DataLoader, a list of batches or arrays, or gaussian='laplace'."
        )
    message = "gaussian='laplace' was used in place of 'variational', "
    if plan.averages_are_large:
        message += f"which needs {in_words(plan.bytes_of_averages)}, more than the memory budget"
    elif plan.averages_take_long and plan.repeatable:
        message += (
            f"which takes {plan.network.outputs} backward passes over the data in each of its "
            f"rounds: the Jacobians of all rows take {in_words(plan.bytes_of_jacobians)}, more "
            "than the part of the memory budget in which they are kept; ask for it by "
            "gaussian='variational'"
        )
    else:
        message += "which reads the data several times"
        warn(
            f"{message}: these can be read only once. Give a DataLoader or arrays, or "
            "gaussian='laplace'."
        )
    return _noted(posterior, message)


def _noted(posterior: Posterior, note: str) -> Posterior:
    notes = (*posterior.report.notes, Note(note))
    return replace(posterior, report=replace(posterior.report, notes=notes))
