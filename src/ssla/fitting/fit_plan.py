"""What a fit was asked for and has learned so far, as one frozen value.

The passes of a plan over the data are here too. A step of the fit (`ssla.fitting.steps`) takes a
plan and returns another one: with the structure that was chosen, the noise that was estimated, the
rows that were counted. A plan can read its data at any time: sums at θ, averages over a Gaussian of
θ, products with the curvature.

Words: the input factor of a last layer with Kronecker factors is Σ φφᵀ over its features φ.
Averages are E log p, E g and E Λ of rows over a Gaussian of θ, which a variational Gaussian needs.
Row nodes are the points at which the outputs of a row are averaged, where each row has its own.
`ssla.fitting` lists the other words.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING

from torch import Tensor

from ssla.curvature import Dense, Kfac, Operator, Structure
from ssla.curvature.dense import DenseOperator
from ssla.fitting.mode import Polish
from ssla.fitting.passes import EMPTY, KEPT_SHARE, AutomaticStructure, Data, Order, measure_extent
from ssla.fitting.sums import Averaging, Sums
from ssla.fitting.variational import Average
from ssla.fitting.watching import TargetRange
from ssla.likelihoods import Likelihood
from ssla.likelihoods.averages import RowNodes
from ssla.maths.conjugate import Product
from ssla.maths.digests import digest
from ssla.network import Network
from ssla.priors import Prior, trained_scale
from ssla.report import LAPLACE, VARIATIONAL
from ssla.values import Statistics, Variational

if TYPE_CHECKING:
    from ssla.posterior import Posterior


@dataclass(eq=False)
class InputFactors:
    """The input factor Σ φφᵀ of a last layer with Kronecker factors.

    The first pass sums it and stores it here; later passes use it again. All plans that read the
    same rows hold the same object.
    """

    known: Kfac | None = None


@dataclass(frozen=True, eq=False)
class FitPlan:
    """What a fit was asked for, and what its passes have found out."""

    # The class of the result. It is passed as a value, because its module stands above this one.
    result_class: type[Posterior]
    data: Data
    likelihood: Likelihood
    prior: Prior | None  # None: to be chosen, from the scale of the trained weights on
    structure: Structure
    mode: str | None  # what happens to θ̂; None: by whether the network is trained
    budget: int  # bytes
    gaussian: str | None = None  # None: variational, where that differs and is not too costly
    start: Variational | None = None  # where the variational Gaussian starts; None: at the mode
    tolerance: float | None = None  # of the variational Gaussian; None: its own default
    keeps_trained_layer: bool = True  # whether a trained last layer is kept if no mode is given
    validated: bool = False  # whether validation rows choose: further plans read the same data
    automatic: bool = False  # whether the structure is chosen once the network is open
    first_digests: dict[str, str] | None = None  # of the plan as it was asked for; None: this one

    # What the first pass found out.
    reason: str = ""  # for the structure that was chosen
    repeatable: bool = True  # whether the data can be read again
    rows: int = 0
    input_factors: InputFactors = field(default_factory=InputFactors)

    # --- what follows from it --------------------------------------------------------------

    @property
    def network(self) -> Network:
        """Return the network, as it was opened on the first rows."""
        return self.data.network

    @property
    def estimates_noise(self) -> bool:
        """Return whether the noise of a Gaussian likelihood is still to be estimated."""
        return self.likelihood.needs_noise_estimate and self.likelihood.quadratic

    @property
    def starting_prior(self) -> Prior:
        """Return the prior that was given, or the one of the trained weights' scale."""
        if self.prior is not None:
            return self.prior
        network = self.network
        own_units = find_outputs_with_own_units(network, self.likelihood, self.structure)
        return trained_scale(network.layout, network.theta, own_units)

    @property
    def least_precision(self) -> float:
        """Return the smallest precision that the starting prior has at the trained weights."""
        network = self.network
        return float(self.starting_prior.bind(network.layout).precision(network.theta).min())

    @property
    def summed_structure(self) -> Structure:
        """Return the structure that passes sum: `structure`, or its form for very many classes."""
        return self.make_order_at(None).choose_structure_for(self.network)

    @property
    def wants_variational(self) -> bool:
        """Return whether a variational Gaussian is asked for, or is the default, and is of use.

        It is of no use where it equals the Gaussian at the mode. The variational Gaussian is the
        default wherever the likelihood's averages exist and differ from its values.
        """
        return self.gaussian != LAPLACE and self.likelihood.averages_differ

    @property
    def finds_variational(self) -> bool:
        """Return whether the fit ends with a variational Gaussian that passes find.

        This is not so where the data can be read only once, or where a default would cost too much.
        """
        costly = self.variational_takes_long or self.variational_is_large
        return self.wants_variational and self.repeatable and not costly

    @property
    def variational_takes_long(self) -> bool:
        """Return whether a default variational Gaussian would take too long.

        This is so where the Jacobians of all rows cannot be kept: each round then takes C backward
        passes through the network.
        """
        return self._may_leave_variational and self.bytes_of_jacobians > self.budget // KEPT_SHARE

    @property
    def variational_is_large(self) -> bool:
        """Return whether a default variational Gaussian would need more than the memory budget."""
        return self._may_leave_variational and self.bytes_of_averages > self.budget

    @property
    def bytes_of_jacobians(self) -> int:
        """Return the memory of the Jacobians of all rows, in bytes."""
        return self.rows * self.network.jacobian_per_row

    @property
    def bytes_of_averages(self) -> int:
        """Return the memory of a variational Gaussian's sums and factorisation, in bytes."""
        return self.summed_structure.memory(measure_extent(self.network, self.rows, averages=True))

    @property
    def _may_leave_variational(self) -> bool:
        """Return whether the Gaussian at the mode may replace a variational one that is costly.

        This is so where nobody asked for a variational one, the free weights are not a last layer,
        and the structure has no curvature between layers.
        """
        by_layers = not self.network.linear and not self.structure.couples_all_parameters
        return self.gaussian is None and by_layers

    @property
    def row_nodes(self) -> RowNodes | None:
        """Return the row nodes of averages; None where all rows share their nodes.

        Many rows have nodes of their own, under a softmax and for a last layer with Kronecker
        factors.
        """
        pooled = self.network.linear and self.structure.by_layers
        if not pooled or not self.likelihood.softmax:
            return None
        return RowNodes.for_rows(self.rows, self.network.outputs)

    def choose_structure_for_averages(self) -> tuple[Structure, bool]:
        """Return an empty structure for averages, and whether it sums the expected Fisher.

        The expected Fisher information then takes the place of the averaged curvature. The averaged
        curvature of a likelihood that is not log-concave may be indefinite, which a dense matrix
        can hold and other exact structures cannot.
        """
        structure = self.structure.zero(self.network.layout.size)
        if self.likelihood.concave or not structure.couples_all_parameters:
            return structure, False
        # A P×P sum can hold an indefinite Λ. Rows in place of a matrix cannot: they are squares.
        full = Dense(dual=False)
        fits = full.memory(measure_extent(self.network, averages=True)) <= self.budget
        if structure.exact and fits:
            return full, False
        return structure, True

    # --- passes over the data --------------------------------------------------------------

    @cached_property
    def digests(self) -> dict[str, str]:
        """Return digests of what was asked for, which all ranks of a group must share."""
        if self.first_digests is not None:
            return self.first_digests
        # The budget decides how wide a sketch may grow, and which structure is chosen.
        counts = self.automatic or self.structure.is_widened_by_fit
        return {
            "likelihoods": digest(self.likelihood),
            "priors": digest(self.prior),
            "structures": digest((self.structure, self.budget if counts else None)),
        }

    @property
    def _automatic_structure(self) -> AutomaticStructure | None:
        """Return what decides the structure; None where it is known.

        Ranks and workers have only the rows of their own shards. There the number of rows is left
        out, so that all of them choose the same.
        """
        if not self.automatic:
            return None
        source = self.data.source
        return AutomaticStructure(None if source is None else source.rows, self.prior)

    def make_order_at(self, theta: Tensor | None) -> Order:
        """Return the order of a pass at θ (P,), which says what it sums.

        theta: None for the trained weights.
        """
        return Order(
            theta,
            self.likelihood,
            self.structure,
            self.mode,
            self.digests,
            averages=self.wants_variational,
            averages_asked=self.wants_variational and self.gaussian == VARIATIONAL,
            rereads=self.validated,
            automatic=self._automatic_structure,
        )

    def run_pass(self, theta: Tensor | None) -> tuple[FitPlan, Sums, TargetRange]:
        """Read the data once, and return a plan, the sums at θ (P,), and the range of the targets.

        The plan is this one with what the pass found out. theta: None for the trained weights. The
        first pass also stores the input factor that all plans of these rows share. Raises
        ValueError if the data are empty, or if all weights are zero.
        """
        sums_factor = self.input_factors.known is None
        order = replace(self.make_order_at(theta), sums_input_factor=sums_factor)
        result = self.data.run_pass(order)
        plan = replace(self, repeatable=result.repeatable)
        if result.sums is None:
            raise ValueError(EMPTY)

        # The pass has opened the network. It chose the same structure by the same rule.
        automatic = plan._automatic_structure
        if automatic is not None:
            choice = automatic.choose(plan.network, plan.budget, plan.wants_variational)
            plan = replace(plan, structure=choice.structure, reason=choice.reason, automatic=False)
        sums = plan._with_input_factors(result.sums)
        if sums.has_input_factor:
            plan = replace(plan, rows=sums.statistics.n)
        if sums.statistics.weight <= 0:
            raise ValueError("All row weights are zero, so there is nothing to learn from.")
        return plan, sums, result.target

    def collect_sums(self, theta: Tensor | None) -> Sums:
        """Read the data once, and return the sums at θ (P,). Raises as `run_pass`.

        theta: None for the trained weights.
        """
        return self.run_pass(theta)[1]

    def collect_statistics(self, theta: Tensor) -> Statistics:
        """Read the data once, and return the statistics at θ (P,)."""
        return self.collect_sums(theta).statistics

    def make_average_passes_at(self, theta: Tensor, moves: bool = True) -> Average:
        """Return passes for averages over Gaussians, with the network linearised at theta (P,).

        moves: whether the means of the Gaussians will move, so that passes also sum what a step of
        the mean needs.
        """
        structure, fisher = self.choose_structure_for_averages()
        return AveragePasses(self, theta, structure, fisher, moves, self.row_nodes)

    def make_products_at(self, theta: Tensor, averaging: Averaging | None = None) -> Product:
        """Return the function v -> Σ JᵀΛJ v for vectors (P,), with J and Λ at theta (P,).

        averaging: Λ is averaged over this Gaussian. Each product is a pass over the data, or over
        their features where these fit in memory.
        """
        order = Order(
            theta,
            self.likelihood,
            self.structure,
            self.mode,
            self.digests,
            averaging=averaging,
            sums_input_factor=False,
        )

        def product(v: Tensor) -> Tensor:
            """Compute Σ JᵀΛJ v (P,) for v (P,)."""
            sums = self.data.run_pass(replace(order, direction=v)).sums
            assert sums is not None
            return sums.statistics.gradient

        return product

    def make_polish(self, notes: list[str]) -> Polish:
        """Return the ascent to the mode, which reads the plan's data.

        The ascent appends to `notes` what the report is to say.
        """
        return Polish(
            self.collect_sums,
            linear=self.network.linear,
            gaussian=self.likelihood.quadratic,
            notes=notes,
            make_products_at=self.make_products_at,
        )

    def _with_input_factors(self, sums: Sums) -> Sums:
        """Return the sums of a pass with the input factor of the first pass.

        If this is the first pass, its factor is stored for the later ones. Sums of other structures
        than Kronecker factors of a last layer are returned unchanged.
        """
        curvature = sums.statistics.curvature
        if not self.network.linear or not isinstance(curvature, Kfac):
            return sums
        if sums.has_input_factor:
            self.input_factors.known = curvature
            return sums
        assert self.input_factors.known is not None
        return sums.with_input_factor_of(self.input_factors.known)


@dataclass(frozen=True, eq=False)
class AveragePasses:
    """The passes of a plan for averages over Gaussians, with the network linearised at θ.

    These passes implement the protocol `ssla.fitting.variational.Average`.
    """

    plan: FitPlan
    theta: Tensor  # (P,)
    structure: Structure
    fisher: bool  # whether the expected Fisher is summed in place of the averaged curvature
    moves: bool  # whether the means of the Gaussians will move
    row_nodes: RowNodes | None

    def __call__(self, mean: Tensor, covariance: Operator) -> Sums:
        """Sum the averages over N(mean, covariance) of θ in one pass, with a mean (P,).

        What a dense covariance has stored for its products is dropped afterwards.
        """
        plan = self.plan
        order = Order(
            self.theta,
            plan.likelihood,
            self.structure,
            plan.mode,
            plan.digests,
            averaging=self._make_averaging(mean, covariance),
            sums_input_factor=plan.input_factors.known is None,
        )
        sums = plan.data.run_pass(order).sums
        assert sums is not None
        if isinstance(covariance, DenseOperator):
            covariance.drop_inverses()  # the next pass has another Gaussian
        return plan._with_input_factors(sums)

    def make_products_under(self, mean: Tensor, covariance: Operator) -> Product | None:
        """Return products with the curvature averaged over N(mean, covariance), a pass each.

        mean: (P,). The result is None for other weights than a last layer, whose passes are slow,
        and where the structure already is the exact curvature.
        """
        if self.structure.exact or not self.plan.network.linear:
            return None
        return self.plan.make_products_at(self.theta, self._make_averaging(mean, covariance))

    def _make_averaging(self, mean: Tensor, covariance: Operator) -> Averaging:
        """Return what a pass needs to average over N(mean, covariance), with a mean (P,)."""
        return Averaging(mean - self.theta, covariance, self.fisher, self.moves, self.row_nodes)


def find_outputs_with_own_units(
    network: Network, likelihood: Likelihood, structure: Structure
) -> Tensor | None:
    """Return the number of the output that each parameter changes (P,), for priors by output.

    The number is −1 for parameters that change several outputs. The result is None where the
    outputs have one unit, where no parameter belongs to one output, and for Kronecker factors,
    which take one precision for each layer.
    """
    unequal = likelihood.unequal_units and network.outputs > 1
    if not unequal or structure.by_layers:
        return None
    outputs = network.parameter_outputs
    return outputs if bool((outputs >= 0).any()) else None
