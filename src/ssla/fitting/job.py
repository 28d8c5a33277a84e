"""One call of `fit`: its passes, its noise, its mode."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ssla._checks import warn
from ssla.curvature import Dense, Extent, Kfac, LowRank, Operator, Structure
from ssla.curvature.dense import DenseOperator
from ssla.curvature.kfac import MANY_CLASSES
from ssla.curvature.memory import in_words
from ssla.fitting.mode import NoModeError, Polish
from ssla.fitting.noise import estimate_noise
from ssla.fitting.passes import EMPTY, KEPT_SHARE, Data, Order, Unchosen, extent_of
from ssla.fitting.sums import Around, Sums, residual
from ssla.fitting.trained import Verdict, judged, judged_numbers
from ssla.fitting.variational import NEW, Average, Choose, Climb, from_there
from ssla.fitting.watching import TargetRange, warn_residual
from ssla.likelihoods import Custom, Gaussian, HeteroscedasticGaussian, Likelihood, Tempered
from ssla.likelihoods.averages import RowNodes, concave, of_classes
from ssla.maths.conjugate import Product
from ssla.maths.digests import digest
from ssla.network import Network, output_words
from ssla.priors import (
    BoundGaussian,
    BoundPrior,
    Prior,
    check_at,
    concavity_notes,
    describe,
    trained_scale,
)
from ssla.report import CONCAVITY, LAPLACE, MOVED, POLISH, RANK, TILT, VARIATIONAL, Note, Report
from ssla.values import Statistics, Variational

if TYPE_CHECKING:
    from ssla.posterior import Posterior

STRAIGHT = (
    "log p(y|f) has no curvature in f at any of the targets, while its Fisher information is not "
    "zero: it has kinks, as |y − f| has, so Newton steps do not lead to the mode"
)
DIAGONAL_FACTOR = (
    f"the output factor of structure='kfac' is diagonal, as is the default above {MANY_CLASSES:,} "
    "classes; ask for the full one by structure=ssla.structures.Kfac(output_factor='full')"
)
NOISE_ROUNDS = 10


@dataclass(eq=False)
class Job:
    """One call of `fit`: what its steps share."""

    kind: type[Posterior]  # of the result: its module stands above this one
    data: Data
    likelihood: Likelihood
    prior: Prior | None  # None: to be chosen, from the scale of the trained weights on
    structure: Structure
    mode: str | None
    budget: int
    gaussian: str | None = None
    start: Variational | None = None  # where the variational Gaussian starts; None: at the mode
    tolerance: float | None = None  # of the variational Gaussian; None: its own default
    judges: bool = True  # whether a trained last layer is kept where no mode is given
    validated: bool = False  # whether validation rows choose: further jobs will read the same data
    notes: list[str] = field(default_factory=list)
    repeatable: bool = True
    raw_squares: Tensor | None = None  # squared residuals of the network as it came (C,)
    estimated: bool = False  # the noise
    automatic: bool = False  # whether the structure is chosen once the network is open
    reason: str = ""  # for the structure that was chosen
    inputs: Kfac | None = None  # the input factors of a last layer, which all passes share
    rows: int = 0  # that the first pass saw
    marks: dict[str, str] = field(
        init=False
    )  # of what was asked for: the noise may be estimated, the sketch widened

    def __post_init__(self) -> None:
        # it decides how wide a sketch may grow
        width = self.budget if isinstance(self.structure, LowRank) else None
        width = self.budget if self.automatic else width
        asked = {
            "likelihoods": self.likelihood,
            "priors": self.prior,
            "structures": (self.structure, width),
        }
        self.marks = {what: digest(value) for what, value in asked.items()}

    # --- the whole -------------------------------------------------------------------------

    def run(self) -> Posterior:
        self.estimated = estimate = (
            isinstance(self.likelihood, Gaussian) and self.likelihood.estimated
        )
        if estimate:
            self.likelihood = Gaussian(
                noise=1.0
            )  # sums in units of the noise; scaled once it is known
        sums, target = self._read(None)
        self.rows = sums.statistics.n
        sums = self._enough_directions(sums, estimate)
        network = self._network
        self.raw_squares = sums.squares if isinstance(self.likelihood, Gaussian) else None
        bound = self._prior.bind(network.layout)
        check_at(self._prior, bound, network.theta)
        mode = self._order(None).mode_for(network)
        if isinstance(self.likelihood.predictive, Custom) and sums.straight:
            sums, mode = replace(sums, newton=None), self._without_polish(mode)
        judged_by_sums = self.judges and self.mode is None and mode == POLISH
        verdict = self._verdict(sums, target) if judged_by_sums else None
        if verdict is not None:
            mode = verdict.mode
            self.notes.append(
                verdict.note(
                    "the class frequencies" if target.classes else "the best constant prediction"
                )
            )
        theta, steps = network.theta, 0
        if estimate:
            sums, self.likelihood = estimate_noise(
                network, sums, bound, mode == POLISH, self._at_noise
            )
        start, start_fit = sums.statistics, sums
        before = residual(sums, bound, theta)
        if mode == POLISH:
            theta, sums, steps = self._to_mode(theta, sums, bound)
            if estimate and not (network.linear and isinstance(bound, BoundGaussian)):
                theta, sums, steps = self._settle_noise(theta, sums, steps, bound)
            self._compare_fit(start_fit, sums, theta, network.theta)
        after = residual(sums, bound, theta)
        moved = theta - network.theta
        shift = math.sqrt(
            max(float(moved @ start.curvature.push(moved)), 0.0) / max(start.weight, 1e-300)
        )
        self.notes[:0] = network.notes
        target.note(self.notes)
        if target.spread is not None and isinstance(self.likelihood, Gaussian):
            missed = target.spread.missed
            if (
                mode == POLISH
                # it may have found the scale; where it lost it, the prior is at fault: see
                # _compare_fit
            ):
                missed = torch.minimum(missed, sums.residual_squares(start_fit, moved))
            target.spread.warn_scale(missed, self.notes)
            noise = self.likelihood.covariance_for(missed).diagonal().sqrt()
            target.spread.warn_rounding(noise, network.dtype, self.notes)
        self.notes.extend(Note(note, CONCAVITY) for note in concavity_notes(bound.precision(theta)))
        self._note_directions(sums)
        if self._structure is not self.structure:
            self.notes.append(DIAGONAL_FACTOR)
        report = self._report(sums, mode, before, after, steps, shift)
        if not self.validated:  # validation rows have compared it with the network itself
            warn_residual(report)
        posterior = self.kind(
            network,
            self.likelihood,
            self._prior,
            theta,
            sums.statistics,
            mode,
            report,
            self.budget,
            self.data.source,
        )
        # factorise now: an indefinite curvature is an error of fit, not of predict
        _ = posterior.operator
        if self.prior is None:
            return posterior
        # Matrices (P, P) that are not needed any more: the sums before polish, and H⁻¹ where
        # another Gaussian follows.
        del _, sums, start, start_fit
        if self.averages:
            posterior = replace(posterior)
        return self.averaged(posterior)

    def _verdict(self, sums: Sums, target: TargetRange) -> Verdict | None:
        """Whether the last layer is trained, from its sums; None where that cannot be told."""
        if target.classes is not None:
            return judged(sums, target.classes, self.likelihood)
        if target.numbers is not None:
            return judged_numbers(sums, target.numbers, self.likelihood, self.estimated)
        return None

    # --- the variational Gaussian ----------------------------------------------------------

    @property
    def _variational(self) -> bool:
        """As asked for; by default wherever the likelihood's averages differ from its values
        and exist.
        """
        law = self.likelihood.base if isinstance(self.likelihood, Tempered) else self.likelihood
        return self.gaussian != LAPLACE and not isinstance(law, Gaussian) and law.linear_domain

    @property
    def averages(self) -> bool:
        """Whether `averaged` will make a variational Gaussian by passes."""
        return self._variational and self.repeatable and not self._too_long and not self._too_large

    @property
    def _too_long(self) -> bool:
        """Rounds for a default: those of many weights without a curvature between layers, whose
        Jacobians cannot be kept.

        Each round would then take C backward passes through the network over all rows.
        """
        size = self.rows * self._network.jacobian_per_row
        return self._optional and size > self.budget // KEPT_SHARE

    @property
    def _too_large(self) -> bool:
        """Vectors for a default: more of them than for the Gaussian at the mode."""
        return self._optional and self._bytes_of_averages > self.budget

    @property
    def _bytes_of_averages(self) -> int:
        return self._structure.memory(extent_of(self._network, self.rows, averages=True))

    @property
    def _optional(self) -> bool:
        """Whether a variational Gaussian, if it is costly, gives way to the one at the mode."""
        by_layers = not self._network.linear and not self.structure.whole
        return self.gaussian is None and by_layers

    def averaged(self, posterior: Posterior, choose: Choose | None = None) -> Posterior:
        """The state with a variational Gaussian where one is wanted; `choose` chooses its prior."""
        if not self._variational:
            same = isinstance(self.likelihood, Gaussian) and self.gaussian == VARIATIONAL
            return (
                replace(posterior, report=replace(posterior.report, gaussian=VARIATIONAL))
                if same
                else posterior
            )
        if not self.averages:
            return self._without_averages(posterior)
        structure, fisher = self._averaged_structure()
        if fisher:
            note = (
                "the variational Gaussian takes the expected Fisher information, because "
                f"structure={structure.name!r} needs it"
            )
            posterior = replace(
                posterior,
                report=replace(posterior.report, notes=(*posterior.report.notes, Note(note))),
            )
        found = self.climb(posterior, choose).run()
        _ = found.covariance
        return replace(found, report=replace(found.report, passes=self.data.passes))

    def climb(self, posterior: Posterior, choose: Choose | None = None) -> Climb:
        """The rounds to the variational Gaussian: from the mode, or from the Gaussian of
        similar rows.
        """
        start = self.start
        if start is None and self._row_nodes is not None:
            start = Variational(
                posterior.theta, self._narrow(posterior.statistics), posterior.tilted
            )
        if start is not None:
            posterior = replace(posterior, variational=replace(start, tilted=posterior.tilted))
        # On the network of benchmarks/networks (clinc, 150 classes) half of the new averages took
        # 18 rounds, all of them 32.
        new = None if self._row_nodes is None else NEW
        climb = Climb(
            posterior, self.average(posterior.theta, not posterior.tilted), choose, new=new
        )
        return climb if self.tolerance is None else replace(climb, tolerance=self.tolerance)

    def _narrow(self, statistics: Statistics) -> Statistics:
        """The sums with the curvature of outputs of zero (equal class probabilities) in every row.

        A network that has learned its rows by heart has almost no curvature there: from that of its
        own outputs the rounds would start at the prior's covariance, where averages say nothing
        about the outputs at hand.
        """
        curvature = statistics.curvature
        assert isinstance(curvature, Kfac)
        nowhere = torch.zeros(1, self._network.outputs, dtype=torch.float64)
        of_row = self.likelihood.fisher(nowhere)[0] * statistics.weight
        return replace(statistics, curvature=curvature.with_output_factor(of_row))

    def from_there(self, posterior: Posterior) -> Posterior:
        """A last layer's posterior on this job's data instead, from where it is: at their mode, or
        with their averages.

        θ̂ of a variational Gaussian stays, and so does its tilt.
        """
        if posterior.variational is not None:
            return from_there(posterior, self.average(posterior.theta))
        theta, sums, _ = self._polish.run(
            posterior.theta, self._collect(posterior.theta), posterior.bound_prior
        )
        return replace(posterior, theta=theta, statistics=sums.statistics)

    def average(self, theta: Tensor, moves: bool = True) -> Average:
        """Passes for averages over Gaussians, with the network linearised at θ; `moves`:
        whether their means move.
        """
        return Averages(self, theta, *self._averaged_structure(), moves, self._row_nodes)

    def product(self, theta: Tensor, around: Around | None = None) -> Product:
        """Products with Σ JᵀΛJ at θ, or with its averages: a pass each, over features kept if
        they fit in memory.
        """
        order = Order(
            theta,
            self.likelihood,
            self.structure,
            self.mode,
            self.marks,
            around=around,
            inputs=False,
        )

        def product(v: Tensor) -> Tensor:
            found = self.data.read(replace(order, direction=v)).sums
            assert found is not None
            return found.statistics.gradient

        return product

    def averages_around(self, around: Around, theta: Tensor, structure: Structure) -> Sums:
        """One pass."""
        order = Order(
            theta,
            self.likelihood,
            structure,
            self.mode,
            self.marks,
            around=around,
            inputs=self.inputs is None,
        )
        found = self._with_inputs(self.data.read(order).sums)
        assert found is not None
        return found

    @property
    def _row_nodes(self) -> RowNodes | None:
        """Nodes of their own for the rows of a last layer with Kronecker factors, where there
        are many.
        """
        pooled = (
            self._network.linear
            and isinstance(self.structure, Kfac)
            and of_classes(self.likelihood)
        )
        return RowNodes.for_rows(self.rows, self._network.outputs) if pooled else None

    def _with_inputs(self, found: Sums | None) -> Sums | None:
        """The sums of a pass, with the input factors of the first one."""
        if (
            found is None
            or not self._network.linear
            or not isinstance(found.statistics.curvature, Kfac)
        ):
            return found
        if found.inputs:
            self.inputs, self.rows = found.statistics.curvature, found.statistics.n
            return found
        assert self.inputs is not None
        return found.with_inputs_of(self.inputs)

    def _averaged_structure(self) -> tuple[Structure, bool]:
        """The structure for averages, and whether it takes the Fisher because averages may be
        indefinite.
        """
        structure = self.structure.zero(self._network.layout.size)
        if concave(self.likelihood) or not isinstance(structure, Dense | LowRank):
            return structure, False
        whole = Dense(dual=False)
        fits = (
            isinstance(structure, Dense)
            and whole.memory(extent_of(self._network, averages=True)) <= self.budget
        )
        return (whole, False) if fits else (structure, True)

    def _without_averages(self, posterior: Posterior) -> Posterior:
        """Laplace in place of the default: for data that can be read only once, or Jacobians
        that are not kept.
        """
        if self.gaussian == VARIATIONAL:
            raise ValueError(
                "gaussian='variational' reads the data several times, but they can be read only "
                "once (a generator). Give a DataLoader, a list of batches or arrays, or "
                "gaussian='laplace'."
            )
        message = "gaussian='laplace' was used in place of 'variational', "
        if self._too_large:
            message += (
                f"which needs {in_words(self._bytes_of_averages)}, more than the memory budget"
            )
        elif self._too_long and self.repeatable:
            size = self.rows * self._network.jacobian_per_row
            message += (
                f"which takes {self._network.outputs} backward passes over the data in each of its "
                f"rounds: the Jacobians of all rows take {in_words(size)}, more than the part of "
                "the memory budget in which they are kept; ask for it by gaussian='variational'"
            )
        else:
            message += "which reads the data several times"
            warn(
                f"{message}: these can be read only once. Give a DataLoader or arrays, or "
                "gaussian='laplace'."
            )
        return replace(
            posterior,
            report=replace(posterior.report, notes=(*posterior.report.notes, Note(message))),
        )

    def _to_mode(self, theta: Tensor, sums: Sums, bound: BoundPrior) -> tuple[Tensor, Sums, int]:
        """θ at the mode.

        Where none is reached, a variational Gaussian starts by default from the trained weights.
        """
        optional = self.mode != POLISH and self.averages
        unsure = not concave(self.likelihood)
        polish = replace(self._polish, refuses=optional and unsure)
        rough = self.prior is None or (self.tolerance is not None and unsure)
        try:
            return polish.run(theta, sums, bound, nearly=rough and self._variational)
        except NoModeError:
            if not optional:
                raise
            self.notes.append(
                "the log posterior has no mode nearby: θ̂ stays, and the variational Gaussian "
                "starts from there"
            )
            return theta, sums, 0

    def _without_polish(self, mode: str) -> str:
        """The mode of the fit for a likelihood with kinks: as asked for, or "tilt" in place of
        the default.
        """
        if self.mode == POLISH:
            raise ValueError(
                f"mode='polish' is not possible: {STRAIGHT}. Use mode='tilt', or a smooth log_prob."
            )
        if mode == POLISH:
            message = (
                f"mode='tilt' was used in place of 'polish': {STRAIGHT}. The curvature of the "
                "posterior is the Fisher"
            )
            self.notes.append(message)
            warn(f"{message}. Give mode='tilt', or a smooth log_prob.")
        return TILT if mode == POLISH else mode

    def _enough_directions(self, sums: Sums, estimate: bool) -> Sums:
        """A low-rank sketch is widened, with a pass each time, until it overstates no variance
        by more than it may.
        """
        found = sums.statistics.curvature
        if not isinstance(found, LowRank):
            return sums
        least = self._least_precision()
        if (
            estimate
        ):  # the sums are in units of a noise that is not known yet: about that of the residuals
            least *= float((sums.squares / sums.statistics.weight).min())
        most = max(
            self.budget
            // found.memory(Extent(self._network.layout.size, 1))
            * found.sketch.shape[1],
            1,
        )
        while least > 0 and self.repeatable and (wider := found.wider(least, most)) is not None:
            self.structure = wider
            sums = self._collect(None)
            found = sums.statistics.curvature
            assert isinstance(found, LowRank)
        return sums

    def _least_precision(self) -> float:
        network = self._network
        return float(self._prior.bind(network.layout).precision(network.theta).min())

    def _note_directions(self, sums: Sums) -> None:
        """Say what a low-rank curvature leaves out."""
        found, least = sums.statistics.curvature, self._least_precision()
        if not isinstance(found, LowRank) or least <= 0:
            return
        note = found.note(least)
        self.notes.append(Note(note, RANK))
        if found.rank is None and found.overstated(least) > 2 * found.tail:
            why = "the memory budget" if self.repeatable else "a source that can be read only once"
            warn(
                f"{note}, which is beyond tail={found.tail:g}: {why} allows no wider sketch. Use "
                "structure='kfac', a larger memory_budget, or LowRank(rank=…) to take it as it is."
            )

    def _settle_noise(
        self, theta: Tensor, sums: Sums, steps: int, bound: BoundPrior
    ) -> tuple[Tensor, Sums, int]:
        """Noise and mode in turn, until the noise is that of the residuals at the mode."""
        for _ in range(NOISE_ROUNDS):
            before = sums.reference
            self.likelihood = Gaussian(noise=1.0)
            sums, self.likelihood = estimate_noise(
                self._network, self._collect(theta), bound, False, self._at_noise, theta
            )
            theta, sums, more = self._polish.run(theta, sums, bound)
            steps += more
            if bool(((sums.reference / before - 1).abs() <= 1e-4).all()):
                return theta, sums, steps
        self.notes.append(f"noise and mode did not settle together in {NOISE_ROUNDS} rounds")
        return theta, sums, steps

    def _compare_fit(self, start: Sums, end: Sums, theta: Tensor, trained: Tensor) -> None:
        """Warn where the prior pulled the mode away from what the network had learned, unless
        validation rows chose it.
        """
        if self.validated:
            return
        before, after = start.statistics, end.statistics
        if isinstance(self.likelihood, Gaussian):
            spread = (end.squares / start.squares.clamp_min(1e-300)).sqrt()
            if self.likelihood.covariance is None and self.raw_squares is not None:
                spread = (
                    end.residual_squares(start, theta - trained)
                    / self.raw_squares.clamp_min(1e-300)
                ).sqrt()
            worse = float(spread.max()) > 1.5
            figure = f"the residuals grew by a factor of {float(spread.max()):.3g}"
        else:
            fall = (before.log_likelihood - after.log_likelihood) / after.weight
            worse, figure = fall > 0.2, f"the log likelihood fell by {fall:.3g} a row"
        if worse:
            message = (
                f"polish moved the network away from what it had learned: {figure}, because the "
                "prior is too strong for the scale of its weights and targets. Standardise the "
                "targets, weaken the prior (priors.Gaussian(precision=1e-4)), or use mode='tilt', "
                "which keeps your network's predictions."
            )
            self.notes.append(Note(message, MOVED))
            warn(message)

    def polished(self, posterior: Posterior) -> Posterior:
        """θ̂ of a variational posterior moved to the mode under its prior, which may have changed:
        where weight refits start.

        Where there is no mode nearby θ̂ stays, with a note.
        """
        self.mode = POLISH
        polish = replace(self._polish, refuses=not concave(self.likelihood))
        try:
            theta, sums, steps = polish.run(
                posterior.theta, self._collect(posterior.theta), posterior.bound_prior
            )
        except NoModeError:
            note = Note("under the tuned prior the log posterior has no mode nearby: θ̂ stays")
            return replace(
                posterior, report=replace(posterior.report, notes=(*posterior.report.notes, note))
            )
        moved = replace(posterior, theta=theta, statistics=sums.statistics, mode=POLISH)
        report = replace(
            posterior.report,
            mode=POLISH,
            residual_after=moved.residual,
            steps=posterior.report.steps + steps,
        )
        return replace(moved, report=report)

    def sums_at(self, theta: Tensor) -> Statistics:
        return self._collect(theta).statistics

    @property
    def _prior(self) -> Prior:
        if self.prior is not None:
            return self.prior
        network = self._network
        apart = outputs_apart(network, self.likelihood, self.structure)
        return trained_scale(network.layout, network.theta, apart)

    @property
    def _structure(self) -> Structure:
        """What the passes sum: `structure`, or its form for very many classes."""
        return self._order(None).structure_for(self._network)

    @property
    def _network(self) -> Network:
        return self.data.network

    def _report(
        self, sums: Sums, mode: str, before: float, after: float, steps: int, shift: float
    ) -> Report:
        layout = self._network.layout
        return Report(
            n=sums.statistics.n,
            weight=sums.statistics.weight,
            parameters=layout.size,
            names=layout.names,
            outputs=self._network.outputs,
            likelihood=repr(self.likelihood),
            structure=self.structure.name,
            blocks=self._blocks(),
            mode=mode,
            residual=before,
            residual_after=after,
            steps=steps,
            output_shift=shift,
            passes=self.data.passes,
            memory=self._structure.memory(
                extent_of(self._network, sums.statistics.n, self.averages)
            ),
            notes=tuple(self.notes),
            prior=describe(self._prior),
            output=output_words(self._network),
            choice=self.reason,
        )

    def _blocks(self) -> dict[str, str]:
        """Which structure each layer got; parameter by parameter for a layer of which only a
        part has a Kronecker form.
        """
        blocks = {}
        for layer, names in self._network.layout.layers().items():
            if not isinstance(self.structure, Kfac):
                blocks[layer] = self.structure.name
                continue
            kinds = {
                name: self.structure.name if name in self._network.kronecker else "diag"
                for name in names
            }
            blocks |= kinds if len(set(kinds.values())) > 1 else {layer: kinds[names[0]]}
        return blocks

    # --- passes over the data --------------------------------------------------------------

    def _collect(self, theta: Tensor | None) -> Sums:
        """One pass: the sums at θ (the trained one if None)."""
        return self._read(theta)[0]

    def _at_noise(self, likelihood: Gaussian, theta: Tensor | None) -> Sums:
        self.likelihood = likelihood
        return self._collect(theta)

    @property
    def _polish(self) -> Polish:
        gaussian = isinstance(self.likelihood, Gaussian)
        return Polish(
            self._collect, self._network.linear, gaussian, self.notes, product=self.product
        )

    def _order(self, theta: Tensor | None) -> Order:
        return Order(
            theta,
            self.likelihood,
            self.structure,
            self.mode,
            self.marks,
            averages=self._variational,
            averages_asked=self._variational and self.gaussian == VARIATIONAL,
            rereads=self.validated,
            unchosen=self._unchosen,
        )

    @property
    def _unchosen(self) -> Unchosen | None:
        """What decides the structure.

        Ranks and workers know the rows of their own shards only, so that none is used.
        """
        source = self.data.source
        return (
            Unchosen(None if source is None else source.rows, self.prior)
            if self.automatic
            else None
        )

    def _read(self, theta: Tensor | None) -> tuple[Sums, TargetRange]:
        found = self.data.read(replace(self._order(theta), inputs=self.inputs is None))
        self.repeatable = found.repeatable
        if found.sums is not None and self._unchosen is not None:
            self.structure, self.reason = self._unchosen.choose(
                self._network, self.budget, self._variational
            )
            self.automatic = False
        sums = self._with_inputs(found.sums)
        if sums is None:
            raise ValueError(EMPTY)
        if sums.statistics.weight <= 0:
            raise ValueError("All row weights are zero, so there is nothing to learn from.")
        return sums, found.target


@dataclass(frozen=True, eq=False)
class Averages:
    """Passes of a job for averages over Gaussians, with the network linearised at θ: an
    `Average`.
    """

    job: Job
    theta: Tensor
    structure: Structure
    fisher: bool
    moves: bool
    row_nodes: RowNodes | None

    def __call__(self, mean: Tensor, covariance: Operator) -> Sums:
        found = self.job.averages_around(self._around(mean, covariance), self.theta, self.structure)
        if isinstance(covariance, DenseOperator):
            covariance.forget()  # the next pass has another Gaussian
        return found

    def product(self, mean: Tensor, covariance: Operator) -> Product | None:
        """For a last layer, whose features are cheap to read again, unless the structure is the
        whole curvature.
        """
        if isinstance(self.structure, Dense) or not self.job.data.network.linear:
            return None
        return self.job.product(self.theta, self._around(mean, covariance))

    def _around(self, mean: Tensor, covariance: Operator) -> Around:
        return Around(mean - self.theta, covariance, self.fisher, self.moves, self.row_nodes)


def outputs_apart(network: Network, likelihood: Likelihood, structure: Structure) -> Tensor | None:
    """The output of each parameter (P,) of a last layer with outputs of different units, −1 for
    others.

    None where there are no such outputs, and for Kronecker factors, which take one precision for
    each layer.
    """
    apart = isinstance(likelihood, Gaussian | HeteroscedasticGaussian) and network.outputs > 1
    found = network.parameter_outputs
    return found if apart and not isinstance(structure, Kfac) and bool((found >= 0).any()) else None
