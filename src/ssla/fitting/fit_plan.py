"""What a fit was asked for and has learned so far, as one frozen value, and its passes over the
data.

A step of the fit (`ssla.fitting.steps`) takes a plan and returns another one: with the structure
that was chosen, the noise that was estimated, the rows that were counted. A plan can read its data
at any time: sums at θ, averages over a Gaussian of θ, products with the curvature.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING

from torch import Tensor

from ssla.curvature import Dense, Kfac, Operator, Structure
from ssla.curvature.dense import DenseOperator
from ssla.fitting.mode import Polish
from ssla.fitting.passes import EMPTY, KEPT_SHARE, Data, Order, Unchosen, extent_of
from ssla.fitting.sums import Around, Sums
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
    """Σ φφᵀ of a last layer with Kronecker factors: the first pass sums it, later ones share it.

    All plans that read the same rows hold the same object.
    """

    known: Kfac | None = None


@dataclass(frozen=True, eq=False)
class FitPlan:
    """What a fit was asked for, and what its passes have found out."""

    kind: type[Posterior]  # of the result: its module stands above this one
    data: Data
    likelihood: Likelihood
    prior: Prior | None  # None: to be chosen, from the scale of the trained weights on
    structure: Structure
    mode: str | None  # None: by whether the network is trained
    budget: int
    gaussian: str | None = None  # None: variational, where that differs and is not too costly
    start: Variational | None = None  # where the variational Gaussian starts; None: at the mode
    tolerance: float | None = None  # of the variational Gaussian; None: its own default
    judges: bool = True  # whether a trained last layer is kept where no mode is given
    validated: bool = False  # whether validation rows choose: further plans read the same data
    automatic: bool = False  # whether the structure is chosen once the network is open
    asked: dict[str, str] | None = None  # digests of what was asked for; None: this plan

    # What the first pass found out.
    reason: str = ""  # for the structure that was chosen
    repeatable: bool = True  # whether the data can be read again
    rows: int = 0
    inputs: InputFactors = field(default_factory=InputFactors)

    # --- what follows from it --------------------------------------------------------------

    @property
    def network(self) -> Network:
        """As it was opened on the first rows."""
        return self.data.network

    @property
    def estimates_noise(self) -> bool:
        """Whether the noise of a Gaussian likelihood is still to be estimated."""
        return self.likelihood.estimated and self.likelihood.quadratic

    @property
    def starting_prior(self) -> Prior:
        """The prior that was given, or the one of the trained weights' scale."""
        if self.prior is not None:
            return self.prior
        network = self.network
        apart = outputs_apart(network, self.likelihood, self.structure)
        return trained_scale(network.layout, network.theta, apart)

    @property
    def least_precision(self) -> float:
        """The weakest precision of the starting prior."""
        network = self.network
        return float(self.starting_prior.bind(network.layout).precision(network.theta).min())

    @property
    def summed_structure(self) -> Structure:
        """What the passes sum: `structure`, or its form for very many classes."""
        return self.order(None).structure_for(self.network)

    @property
    def wants_variational(self) -> bool:
        """Whether a variational Gaussian is asked for, or is the default.

        It is the default wherever the likelihood's averages differ from its values and exist.
        """
        return self.gaussian != LAPLACE and self.likelihood.averages_differ

    @property
    def averages(self) -> bool:
        """Whether the fit ends with a variational Gaussian, found by passes."""
        costly = self.averages_take_long or self.averages_are_large
        return self.wants_variational and self.repeatable and not costly

    @property
    def averages_take_long(self) -> bool:
        """Whether a default would take rounds of C backward passes through the network each.

        So it is for many weights without a curvature between layers, whose Jacobians cannot be
        kept.
        """
        return self._gives_way and self.bytes_of_jacobians > self.budget // KEPT_SHARE

    @property
    def averages_are_large(self) -> bool:
        """Whether a default would need more vectors than the memory budget has."""
        return self._gives_way and self.bytes_of_averages > self.budget

    @property
    def bytes_of_jacobians(self) -> int:
        return self.rows * self.network.jacobian_per_row

    @property
    def bytes_of_averages(self) -> int:
        return self.summed_structure.memory(extent_of(self.network, self.rows, averages=True))

    @property
    def _gives_way(self) -> bool:
        """Whether a variational Gaussian, if it is costly, gives way to the one at the mode."""
        by_layers = not self.network.linear and not self.structure.whole
        return self.gaussian is None and by_layers

    @property
    def row_nodes(self) -> RowNodes | None:
        """Nodes of their own for the rows of a last layer with Kronecker factors, where many."""
        pooled = self.network.linear and self.structure.by_layers
        if not pooled or not self.likelihood.softmax:
            return None
        return RowNodes.for_rows(self.rows, self.network.outputs)

    def averaged_structure(self) -> tuple[Structure, bool]:
        """The structure for averages, and whether it takes the Fisher.

        Averages of a likelihood that is not log-concave may be indefinite.
        """
        structure = self.structure.zero(self.network.layout.size)
        if self.likelihood.concave or not structure.whole:
            return structure, False
        full = Dense(dual=False)
        fits = full.memory(extent_of(self.network, averages=True)) <= self.budget
        if structure.exact and fits:
            return full, False
        return structure, True

    # --- passes over the data --------------------------------------------------------------

    @cached_property
    def marks(self) -> dict[str, str]:
        """Digests of what was asked for, which all ranks of a group must share."""
        if self.asked is not None:
            return self.asked
        # The budget decides how wide a sketch may grow, and which structure is chosen.
        counts = self.automatic or self.structure.grows
        asked = {
            "likelihoods": self.likelihood,
            "priors": self.prior,
            "structures": (self.structure, self.budget if counts else None),
        }
        return {what: digest(value) for what, value in asked.items()}

    @property
    def _unchosen(self) -> Unchosen | None:
        """What decides the structure; None where it is known.

        Ranks and workers know the rows of their own shards only, so that none is used there.
        """
        source = self.data.source
        if not self.automatic:
            return None
        return Unchosen(None if source is None else source.rows, self.prior)

    def order(self, theta: Tensor | None) -> Order:
        """What a pass at θ is to sum; None: at the trained weights."""
        return Order(
            theta,
            self.likelihood,
            self.structure,
            self.mode,
            self.marks,
            averages=self.wants_variational,
            averages_asked=self.wants_variational and self.gaussian == VARIATIONAL,
            rereads=self.validated,
            unchosen=self._unchosen,
        )

    def read(self, theta: Tensor | None) -> tuple[FitPlan, Sums, TargetRange]:
        """One pass: the plan with what it found out, the sums at θ, and what targets it saw."""
        order = replace(self.order(theta), inputs=self.inputs.known is None)
        result = self.data.read(order)
        plan = replace(self, repeatable=result.repeatable)
        if result.sums is None:
            raise ValueError(EMPTY)
        if plan._unchosen is not None:
            choice = plan._unchosen.choose(plan.network, plan.budget, plan.wants_variational)
            plan = replace(plan, structure=choice.structure, reason=choice.reason, automatic=False)
        sums = plan._with_inputs(result.sums)
        if sums.inputs:
            plan = replace(plan, rows=sums.statistics.n)
        if sums.statistics.weight <= 0:
            raise ValueError("All row weights are zero, so there is nothing to learn from.")
        return plan, sums, result.target

    def collect(self, theta: Tensor | None) -> Sums:
        """One pass: the sums at θ; None: at the trained weights."""
        return self.read(theta)[1]

    def sums_at(self, theta: Tensor) -> Statistics:
        return self.collect(theta).statistics

    def average(self, theta: Tensor, moves: bool = True) -> Average:
        """Passes for averages over Gaussians, with the network linearised at θ.

        moves: whether the means of the Gaussians move.
        """
        structure, fisher = self.averaged_structure()
        return Averages(self, theta, structure, fisher, moves, self.row_nodes)

    def product(self, theta: Tensor, around: Around | None = None) -> Product:
        """Products with Σ JᵀΛJ at θ, or with its averages.

        A pass each, over features that are kept if they fit in memory.
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
            sums = self.data.read(replace(order, direction=v)).sums
            assert sums is not None
            return sums.statistics.gradient

        return product

    def averages_around(self, around: Around, theta: Tensor, structure: Structure) -> Sums:
        """One pass: averages over a Gaussian of θ."""
        order = Order(
            theta,
            self.likelihood,
            structure,
            self.mode,
            self.marks,
            around=around,
            inputs=self.inputs.known is None,
        )
        sums = self.data.read(order).sums
        assert sums is not None
        return self._with_inputs(sums)

    def polish(self, notes: list[str]) -> Polish:
        """Newton steps to the mode; what they have to say is appended to `notes`."""
        quadratic = self.likelihood.quadratic
        return Polish(self.collect, self.network.linear, quadratic, notes, product=self.product)

    def _with_inputs(self, sums: Sums) -> Sums:
        """The sums of a pass, with the input factors of the first one."""
        curvature = sums.statistics.curvature
        if not self.network.linear or not isinstance(curvature, Kfac):
            return sums
        if sums.inputs:
            self.inputs.known = curvature
            return sums
        assert self.inputs.known is not None
        return sums.with_inputs_of(self.inputs.known)


@dataclass(frozen=True, eq=False)
class Averages:
    """Passes of a plan for averages over Gaussians, with the network linearised at θ: an
    `Average`.
    """

    plan: FitPlan
    theta: Tensor
    structure: Structure
    fisher: bool  # the expected Fisher in place of the averaged curvature
    moves: bool
    row_nodes: RowNodes | None

    def __call__(self, mean: Tensor, covariance: Operator) -> Sums:
        sums = self.plan.averages_around(self._around(mean, covariance), self.theta, self.structure)
        if isinstance(covariance, DenseOperator):
            covariance.forget()  # the next pass has another Gaussian
        return sums

    def product(self, mean: Tensor, covariance: Operator) -> Product | None:
        """For a last layer, whose features are cheap to read again.

        None where the structure is the whole curvature already.
        """
        if self.structure.exact or not self.plan.network.linear:
            return None
        return self.plan.product(self.theta, self._around(mean, covariance))

    def _around(self, mean: Tensor, covariance: Operator) -> Around:
        return Around(mean - self.theta, covariance, self.fisher, self.moves, self.row_nodes)


def outputs_apart(network: Network, likelihood: Likelihood, structure: Structure) -> Tensor | None:
    """The output of each parameter (P,) of a last layer with outputs of different units, −1 for
    others.

    None where there are no such outputs, and for Kronecker factors, which take one precision for
    each layer.
    """
    apart = likelihood.unequal_units and network.outputs > 1
    if not apart or structure.by_layers:
        return None
    outputs = network.parameter_outputs
    return outputs if bool((outputs >= 0).any()) else None
