"""What is tuned: logarithms of factors on prior precisions and on the noise.

The module also makes the posterior at any of these factors. A group is a set of parameters whose
prior precisions share one factor: a layer, or the parameters of one output. Free coordinates are
those that a search changes. "The pattern" is the prior precisions at the start, before any factor.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ssla.fitting.evidence import Problem
from ssla.fitting.fit_plan import find_outputs_with_own_units
from ssla.fitting.noise import scale_noise
from ssla.fitting.variational import with_recentred_mean
from ssla.priors import BoundGaussian, Flat, trained_scale
from ssla.priors import Gaussian as GaussianPrior
from ssla.values import compute_residual_squares

if TYPE_CHECKING:
    from ssla.posterior import Posterior

EVIDENCE, NLL, CRPS, LOO = "evidence", "nll", "crps", "loo"
PRIOR, NOISE = "prior", "noise"
# Of precisions, around those of the trained weights' scale; not measured. Far above it the evidence
# is flat: at 1e8 its slope still exceeds the tolerance of the search, so that weights which do not
# help are found at the edge. Far below it rises steeply: the range may be wide there, for a last
# layer that was never trained and needs weights a million times as large.
PRECISION_FACTORS = (1e-16, 1e8)
NOISE_FACTORS = (1e-6, 1e6)  # a guess


@dataclass(frozen=True, eq=False)
class Space:
    """What is tuned: logarithms of factors on the precisions and on the noise.

    There is one factor for each group of parameters. A point (d,) has the d free coordinates. All
    coordinates are (a_1 … a_G, t), one a for each group and t for the noise; those that are not
    free are zero.
    """

    posterior: Posterior
    bound: BoundGaussian
    pattern: Tensor  # precisions at a = 0 (P,)
    groups: Tensor  # the number of each parameter's group (P,)
    labels: tuple[str, ...]  # one for each group
    free: Tensor  # indices into (a_1 … a_G, t)
    trained_precision: Tensor  # (P,) of the trained weights' scale, which follows the units
    reach: float = math.inf  # the largest change of a logarithm
    within: tuple[float, float] | None = None  # precisions; None: around the trained ones
    expected_levels: Tensor | None = None  # log precisions (G,) that are expected
    doubt: float = math.inf  # standard deviation of a log precision around those

    @staticmethod
    def around(
        posterior: Posterior, over: Sequence[str], per_layer: bool, per_output: bool = False
    ) -> tuple[Space, list[str]]:
        """Return the space around a posterior, and notes on what cannot be tuned.

        over: which of PRIOR and NOISE are free. per_layer, per_output: whether each layer, or each
        output of a last layer, is a group of precisions. Raises ValueError for a prior that is not
        Gaussian, and for a flat one that is kept.
        """
        notes: list[str] = []
        bound = posterior.bound_prior
        if not isinstance(bound, BoundGaussian):
            raise ValueError(
                "Tuning is for Gaussian priors, whose precision it scales, but this posterior has "
                "another. Use with_prior(priors.Gaussian()) first, or compare priors by "
                "log_evidence() and ssla.sensitivity."
            )

        labels, groups = _group_parameters(posterior, per_layer, per_output)
        free = list(range(len(labels))) if PRIOR in over else []
        if NOISE in over:
            if posterior.likelihood.quadratic:
                free.append(len(labels))
            else:
                notes.append(f"{posterior.report.likelihood} has no noise to tune")
        flat = isinstance(posterior.prior, Flat)
        if flat and PRIOR not in over:
            raise ValueError(
                "Under a flat prior the evidence is not defined. Tune the prior too, or give a "
                "Gaussian one."
            )

        space = Space(
            posterior,
            bound,
            # A flat prior has no pattern: all precisions are then relative to one.
            torch.ones_like(posterior.theta) if flat else bound.scale_precision,
            groups,
            labels,
            torch.tensor(free, dtype=torch.long),
            _compute_trained_precision(posterior),
        )
        return space, notes

    # --- coordinates ---------------------------------------------------------------------------

    @property
    def names(self) -> tuple[str, ...]:
        """Return the names of the free coordinates."""
        return tuple((*self.labels, "noise")[i] for i in self.free.tolist())

    @property
    def mean_moves(self) -> bool:
        """Return whether the mean of θ follows the prior, from the sums alone."""
        return self.posterior.follows_prior

    @property
    def _is_precision(self) -> Tensor:
        """Return a mask (d,) of the free coordinates that are precisions, not the noise."""
        return self.free < len(self.labels)

    @property
    def has_free_precisions(self) -> bool:
        """Return whether a precision is free."""
        return bool(self._is_precision.any())

    def fill_coordinates(self, point: Tensor) -> Tensor:
        """Return all coordinates (G + 1,) at a point (d,); those that are not free are zero."""
        zero = torch.zeros(len(self.labels) + 1, dtype=torch.float64)
        return zero.index_copy(0, self.free, point)

    def compute_precision(self, point: Tensor) -> Tensor:
        """Return the precisions (P,) at a point (d,)."""
        return self.pattern * self.fill_coordinates(point)[:-1].exp()[self.groups]

    def compute_noise_factor(self, point: Tensor) -> float:
        """Return the factor on the noise at a point (d,)."""
        return math.exp(float(self.fill_coordinates(point)[-1]))

    @property
    def box(self) -> tuple[Tensor, Tensor]:
        """Return the least and the largest values of the free coordinates, (d,) each.

        A group's precisions lie in `within`, or within PRECISION_FACTORS around the trained
        weights' scale; no coordinate exceeds `reach`.
        """
        base = self.trained_precision if self.within is None else torch.ones_like(self.pattern)
        # From the pattern to the base, in logarithms. Its least and largest entry in each group are
        # found without further vectors (P,), of which each counts with millions of weights.
        distance = (base / self.pattern).log_()
        zero = torch.zeros(len(self.labels), dtype=torch.float64)
        down, up = (
            zero.scatter_reduce(0, self.groups, distance, extreme, include_self=False)
            for extreme in ("amin", "amax")
        )
        lowest, highest = map(math.log, self.within or PRECISION_FACTORS)
        low = [*(down + lowest).tolist(), math.log(NOISE_FACTORS[0])]
        high = [*(up + highest).tolist(), math.log(NOISE_FACTORS[1])]
        least, most = (torch.tensor(edge, dtype=torch.float64)[self.free] for edge in (low, high))
        return least.clamp_min(-self.reach), most.clamp_max(self.reach)

    def make_scan_points(self, steps: Tensor) -> Tensor:
        """Return points (k, d) from which a search may start, one for each of the steps (k,).

        At a point, all log precisions have moved together by its step from where they are. Where
        the trained weights' scale is farther away than the largest step, they have moved from that
        scale.
        """
        distance = (self.trained_precision / self.pattern).log()
        means = [distance[self.groups == g].mean() for g in range(len(self.labels))]
        trained = torch.stack([*means, torch.zeros((), dtype=torch.float64)])[self.free]
        centre = torch.where(trained.abs() > float(steps.max()), trained, 0.0)
        return centre + steps[:, None] * self._is_precision.double()

    @property
    def scale(self) -> Tensor:
        """Return the approximate inverse curvature (d,) of the evidence in the free coordinates.

        The result is 2/P_g for a group of P_g parameters, and 1/(2nC) for the noise of n rows with
        C outputs.
        """
        sizes = torch.bincount(self.groups, minlength=len(self.labels)).double()
        rows = self.posterior.sums.weight * self.posterior.network.outputs
        return torch.cat([2 / sizes, torch.tensor([0.5 / rows], dtype=torch.float64)])[self.free]

    def compute_precisions_and_noise(self, points: Tensor) -> Tensor:
        """Return what the free coordinates stand for, at points (R, d): (R, d).

        A column is the mean precision of a free group, or the standard deviation of the first
        output's noise.
        """
        columns = []
        for column, i in enumerate(self.free.tolist()):
            if i == len(self.labels):
                base = self._compute_noise_of_first_output()
            else:
                base = float(self.pattern[self.groups == i].mean())
            columns.append(base * points[:, column].exp())
        return torch.stack(columns, 1)

    def _compute_noise_of_first_output(self) -> float:
        """Return the standard deviation of the noise of the first output."""
        zero = torch.zeros(self.posterior.network.outputs, dtype=torch.float64)
        return math.sqrt(float(self.posterior.likelihood.covariance_for(zero)[0, 0]))

    # --- the precisions that are expected ------------------------------------------------------

    @cached_property
    def levels(self) -> Tensor:
        """Return the mean log precision of each group (G,) at the point zero.

        The result is stored, because each evaluation of the evidence needs it.
        """
        return torch.stack(
            [self.pattern[self.groups == g].log().mean() for g in range(len(self.labels))]
        )

    def compute_expected_log_density(self, point: Tensor) -> float:
        """Return the log density of the precisions at a point (d,), less its maximum.

        Their logarithms are normal around the expected ones. Zero where none are expected.
        """
        if self.expected_levels is None:
            return 0.0
        return -0.5 * float((self._compute_deviations(point) ** 2).sum())

    def compute_expected_slope(self, point: Tensor) -> Tensor:
        """Return the gradient (d,) of `compute_expected_log_density` at a point (d,)."""
        if self.expected_levels is None:
            return torch.zeros_like(point)
        noise = torch.zeros(1, dtype=torch.float64)
        return torch.cat([-self._compute_deviations(point) / self.doubt, noise])[self.free]

    @property
    def expected_curvature(self) -> Tensor:
        """Return minus the second derivatives (d,) of `compute_expected_log_density`.

        They are constant.
        """
        of_precision = 0.0 if self.expected_levels is None else self.doubt**-2
        return torch.where(self._is_precision, of_precision, 0.0).double()

    def _compute_deviations(self, point: Tensor) -> Tensor:
        """Return the distances (G,) of the log precisions at a point (d,) from the expected ones.

        They are in units of the standard deviation `doubt`. Raises AssertionError where no
        precisions are expected.
        """
        assert self.expected_levels is not None
        return (self.levels + self.fill_coordinates(point)[:-1] - self.expected_levels) / self.doubt

    # --- posteriors ----------------------------------------------------------------------------

    def move_to(self, posterior: Posterior) -> Space:
        """Return the same coordinates around another posterior, whose prior is the new pattern."""
        bound = posterior.bound_prior
        assert isinstance(bound, BoundGaussian)
        return replace(self, posterior=posterior, bound=bound, pattern=bound.scale_precision)

    @property
    def problem(self) -> Problem:
        """Return what the evidence at any point is computed from: the sums, and the pattern."""
        posterior = self.posterior
        sums = posterior.sums
        outputs = posterior.network.outputs
        has_noise = posterior.likelihood.quadratic
        squares = (
            compute_residual_squares(sums, posterior.likelihood, outputs) if has_noise else 0.0
        )
        return Problem(
            sums.curvature,
            sums.gradient,
            posterior.mean - self.bound.mean,
            sums.log_likelihood,
            squares,
            sums.weight * outputs if has_noise else 0.0,
            self.pattern,
            self.groups,
            self.mean_moves,
        )

    def make_posterior_at(self, point: Tensor) -> Posterior:
        """Return the posterior with the prior and the noise of a point (d,), without a pass.

        θ̂, or a variational mean, moves to suit them where the sums allow it. Raises ValueError
        where the curvature is then not positive definite.
        """
        rescaled = scale_noise(self.posterior, self.compute_noise_factor(point))
        prior = make_prior_with_precision(rescaled, self.compute_precision(point))
        changed = replace(rescaled, prior=prior)
        if not self.mean_moves:
            return changed
        if changed.variational is not None:
            # Where the reach is limited, passes follow that move the mean.
            return with_recentred_mean(changed) if self.reach == math.inf else changed
        theta, statistics = changed.statistics.move_to_mode(changed.bound_prior, changed.theta)
        return replace(changed, theta=theta, statistics=statistics)


def _group_parameters(
    posterior: Posterior, per_layer: bool, per_output: bool
) -> tuple[tuple[str, ...], Tensor]:
    """Return the label of each group, and the number of each parameter's group (P,).

    per_layer: whether each layer is a group; else all parameters are one. per_output: whether each
    output of a last layer is a group of its own instead.
    """
    network, layout = posterior.network, posterior.network.layout
    layers = layout.names_by_layer if per_layer else {"all": layout.names}
    groups = torch.zeros(layout.size, dtype=torch.long)
    for i, names in enumerate(layers.values()):
        for name in names:
            groups[layout.positions[name]] = i
    labels = [f"precision of {layer or 'network'}" for layer in layers]

    # One factor for all of a large network keeps the pattern of its outputs' precisions.
    if per_output and (per_layer or network.linear):
        outputs = network.parameter_outputs
        groups = torch.where(outputs < 0, groups, len(labels) + outputs)
        labels += [f"precision of output {c}" for c in range(network.outputs)]

    # Groups without a parameter are left out, and the others numbered anew.
    used, groups = groups.unique(return_inverse=True)
    return tuple(labels[i] for i in used.tolist()), groups


def _compute_trained_precision(posterior: Posterior) -> Tensor:
    """Return the precisions (P,) of the trained weights' scale.

    The precisions are those of layers, or of outputs where outputs have different units.
    """
    network = posterior.network
    own_units = find_outputs_with_own_units(
        network, posterior.likelihood, posterior.statistics.curvature
    )
    prior = trained_scale(network.layout, network.theta, own_units)
    return prior.bind(network.layout).scale_precision


def make_prior_with_precision(posterior: Posterior, precision: Tensor) -> GaussianPrior:
    """Return a Gaussian prior with this precision (P,) and the mean of the posterior's prior.

    Equal precisions are written as one number, for all parameters or for those of one name, so that
    the prior prints well. The new mean is zero if the posterior's prior is flat.
    """
    mean = posterior.prior.mean if isinstance(posterior.prior, GaussianPrior) else 0.0
    if bool((precision == precision[0]).all()):
        return GaussianPrior(float(precision[0]), mean)
    by_name: dict[str, float | Tensor] = {}
    for name, index in posterior.network.layout.positions.items():
        inside = precision[index]
        first = inside.flatten()[0]
        by_name[name] = float(first) if bool((inside == first).all()) else inside
    return GaussianPrior(by_name, mean)
