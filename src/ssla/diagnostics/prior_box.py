"""Every Gaussian prior in a box of means and precisions, as a family of predictives.

A prior N(m, T⁻¹) has a mean m (P,) and one precision τ_p for each parameter p, equal within a
group: all parameters, or a layer. The curvature S = Σ JᵀΛJ of the data has the eigenvalues λ_p. In
its eigenbasis, with the rotated Jacobian z_p (C,) and gradient g_p of the log likelihood at θ₀, the
outputs at an input have under every prior the mean f̂ and the covariance K:

    K(τ) = Σ_p z_p z_pᵀ/(λ_p + τ_p),      f̂(τ, m) = f̂₀ + Σ_p z_p (g_p − τ_p (θ₀ − m)_p)/(λ_p + τ_p)

So a prior of its own can be tried for each input at little cost. f̂ is linear in m: over a box of
means it takes the values of an interval c(τ) ± r(τ), so P means are replaced by one number
s ∈ [−1, 1], with f̂ = c + s r. The search is then over s and one precision for each group.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from ssla.curvature.structure import Eigenbasis, Structure
from ssla.data import Inputs
from ssla.diagnostics.compass_search import maximise
from ssla.diagnostics.predictive_sets import Bounds, Functional, Worst, refuse_outputs
from ssla.fitting.evidence import ThinBasis, eigenbasis, make_thin_basis
from ssla.likelihoods import Likelihood
from ssla.network.layout import Layout
from ssla.predictive import Predictive, from_marginal
from ssla.priors import EXACT, Box
from ssla.refit import Refit
from ssla.values import Marginal

if TYPE_CHECKING:
    from ssla.posterior import Posterior

MOST_CORNERS = 64  # of the box, that are tried; a guess
# quasi-random points for each side of the box, beside the corners, from which a search may start; a
# guess
SPREAD = 16
FIRST_STEP = 0.25  # of a side of the box
# of a side of the box: where the search ends, for closed-form predictives and for others; guesses
FINE, COARSE = 1e-7, 1e-4


class _PrecisionRanges(NamedTuple):
    """The ranges of log precisions of a box, one for each of G groups of parameters.

    A group is all parameters, or a layer.
    """

    labels: list[str]  # of the groups
    groups: Tensor  # the group of each parameter (P,)
    low: Tensor  # the least log precisions (G,)
    high: Tensor  # the greatest ones (G,)


@dataclass(frozen=True, eq=False)
class BoxMembers:
    """The predictives at N inputs under all Gaussian priors of a box.

    A member has coordinates u ∈ [0, 1]^d. The first are the log precisions of the groups of
    parameters, from their least to their greatest values. Where θ̂ moves with the prior, the last is
    the place of f̂ between the lowest and the highest one, (s + 1)/2 with the s of the module. A
    task is an input with a u of its own.
    """

    names: tuple[str, ...]  # of the coordinates
    notes: tuple[str, ...]
    likelihood: Likelihood
    refit: str | Refit
    mean: Tensor  # f̂₀ (N, C) at θ₀
    jacobian: Tensor  # J (N, C, P)
    basis: Eigenbasis | ThinBasis
    gradient: Tensor  # ∇ℓ at θ₀ (P,)
    theta: Tensor  # θ₀ (P,)
    box_centre: Tensor  # of the means (P,)
    box_radius: Tensor  # half the widths of the box of means (P,)
    groups: Tensor  # the group of each coordinate of the basis
    low: Tensor  # least log precisions (G,)
    high: Tensor  # greatest log precisions (G,)
    moves: bool  # whether θ̂ moves with the prior

    is_family = True

    @staticmethod
    def build(
        posterior: Posterior, x: Inputs, box: Box, convention: str, refit: str | Refit
    ) -> BoxMembers:
        """Build the family from the network linearised at x and an eigenbasis of the curvature.

        refit: that of the predictives, as in `Posterior.predict`. Raises ValueError for another
        convention than the exact one, for ranges that differ within a layer, for ranges by layer
        under a structure without a kept eigenbasis, and for a range of means with several outputs.
        """
        if convention != EXACT:
            raise ValueError(
                f"A box of priors is for the exact convention, but it is {convention!r}. Give a "
                "list of priors."
            )

        layout = posterior.network.layout
        ranges = _find_precision_ranges(box, layout)
        lowest_mean, highest_mean = box.means(layout)
        basis = _find_basis(posterior.sums.curvature, ranges, layout.size)
        notes = _note_means(posterior, lowest_mean, highest_mean)
        chunks = [(f.double(), J.to_dense().values.double()) for f, J in posterior.linearised(x)]

        # A thin basis has k + P coordinates, which share one precision.
        groups = ranges.groups
        if len(basis.values) != layout.size:
            groups = torch.zeros(len(basis.values), dtype=torch.long)
        names = list(ranges.labels)
        if posterior.follows_prior:
            names.append("place between the lowest and the highest f̂")
        return BoxMembers(
            names=tuple(names),
            notes=notes,
            likelihood=posterior.likelihood,
            refit=refit,
            mean=torch.cat([f for f, _ in chunks]),
            jacobian=torch.cat([J for _, J in chunks]),
            basis=basis,
            gradient=posterior.sums.gradient,
            theta=posterior.mean,
            box_centre=(lowest_mean + highest_mean) / 2,
            box_radius=(highest_mean - lowest_mean) / 2,
            groups=groups,
            low=ranges.low,
            high=ranges.high,
            moves=posterior.follows_prior,
        )

    @property
    def rows(self) -> int:
        """Return N, the number of inputs."""
        return len(self.mean)

    @property
    def outputs(self) -> Bounds:
        """Raise TypeError: the members are averages over outputs."""
        refuse_outputs()

    @cached_property
    def _rotated_terms(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return J, ∇ℓ and θ₀ − box_centre in the eigenbasis Q.

        They are JQ (N, C, P), Qᵀ∇ℓ (P,) and Qᵀ(θ₀ − box_centre) (P,). A thin basis has k + P
        coordinates in place of P.
        """
        rotated = self.basis.to_eigenbasis
        return (
            rotated(self.jacobian),
            rotated(self.gradient),
            rotated(self.theta - self.box_centre),
        )

    def compute_marginal(self, u: Tensor, rows: Tensor) -> Marginal:
        """Compute f̂ (T, C) and K (T, C, C) of T tasks, each under its own prior.

        u (T, d): coordinates of the priors; rows (T,): the inputs. The formulas are those of the
        module.
        """
        Z, gradient, offset = self._rotated_terms
        Z = Z[rows]  # z_p of the module in its columns (T, C, P)
        group_precisions = (self.low + (self.high - self.low) * u[:, : len(self.low)]).exp()
        tau = group_precisions[:, self.groups]  # (T, P)
        h = self.basis.values + tau  # eigenvalues of H (T, P)
        K = (Z / h[:, None]) @ Z.mT
        f = self.mean[rows]
        if self.moves:
            # f̂ for the centre of the means, and then the radius r times s ∈ [−1, 1]
            f = f + (Z @ ((gradient - tau * offset) / h).unsqueeze(-1)).squeeze(-1)
            slope = self.basis.from_eigenbasis(Z * (tau / h)[:, None])  # ∂f̂/∂m (T, C, P)
            f = f + (2 * u[:, -1:] - 1) * (slope.abs() * self.box_radius).sum(-1)

        return Marginal(f, K)

    def make_predictive(self, u: Tensor, rows: Tensor) -> Predictive:
        """Return the predictive of T tasks, each under its own prior.

        u (T, d): coordinates of the priors; rows (T,): the inputs.
        """
        with warnings.catch_warnings():
            # A predictive may have no integral at a prior that the search only passes.
            warnings.simplefilter("ignore", UserWarning)
            return from_marginal(self.likelihood, *self.compute_marginal(u, rows), self.refit)

    def compute_bounds(self, functional: Functional, argument: Tensor) -> Bounds:
        """Compute the bounds of functional(·, argument) over the box: (N, k) -> (N, k) each.

        Each entry of the argument is a task with a search of its own.
        """
        row_count, column_count = argument.shape
        rows = torch.arange(row_count).repeat_interleave(column_count)
        one_column = argument.reshape(-1, 1)

        def evaluate(u: Tensor) -> Tensor:
            """Return the functional of each task under the priors u (T, d): (T,)."""
            return functional(self.make_predictive(u, rows), one_column).squeeze(1)

        at_starts = torch.stack(
            [functional(p, argument).flatten() for p in self._start_predictives]
        )
        _, negative_low = self._maximise(lambda u: -evaluate(u), -at_starts)
        _, high = self._maximise(evaluate, at_starts)
        shape = (row_count, column_count)
        return Bounds(-negative_low.reshape(shape), high.reshape(shape))

    def list_members(self) -> list[Predictive]:
        """Return the members at the corners of the box, at most MOST_CORNERS of them."""
        return self._start_predictives[: min(2**self._dimension, MOST_CORNERS)]

    def find_worst(self, functional: Callable[[Predictive], Tensor]) -> Worst:
        """Find the member of the box with the least functional(member), row by row."""
        rows = torch.arange(self.rows)
        at_starts = -torch.stack([functional(p) for p in self._start_predictives])
        u, negative_value = self._maximise(
            lambda u: -functional(self.make_predictive(u, rows)), at_starts
        )
        return Worst(self.make_predictive(u, rows), -negative_value)

    @property
    def _dimension(self) -> int:
        """Return d, the number of coordinates."""
        return len(self.low) + int(self.moves)

    @cached_property
    def _start_points(self) -> Tensor:
        """Return the points where a search may start (k, d).

        The corners come first, and then quasi-random points.
        """
        all_corners = itertools.product((0.0, 1.0), repeat=self._dimension)
        # There are 2^d corners; of very many only the first are taken.
        corners = torch.tensor(
            list(itertools.islice(all_corners, MOST_CORNERS)), dtype=torch.float64
        )
        sobol = torch.quasirandom.SobolEngine(self._dimension)
        return torch.cat([corners, sobol.draw(SPREAD * self._dimension, dtype=torch.float64)])

    @cached_property
    def _start_predictives(self) -> list[Predictive]:
        """Return the members at the start points, which are computed once for all searches."""
        rows = torch.arange(self.rows)
        return [
            self.make_predictive(point.expand(self.rows, -1), rows) for point in self._start_points
        ]

    def _maximise(
        self, evaluate: Callable[[Tensor], Tensor], at_starts: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Maximise T functions over [0, 1]^d at once, each from its best start points.

        evaluate: u (T, d) -> the value of each function at its own u (T,). at_starts (k, T): the
        values at the start points. Returns u (T, d) and the maxima (T,).
        """
        tolerance = FINE if self.likelihood.quadratic else COARSE
        return maximise(
            evaluate, self._start_points, at_starts, _clamp_to_box, FIRST_STEP, tolerance
        )


def _note_means(posterior: Posterior, lowest: Tensor, highest: Tensor) -> tuple[str, ...]:
    """Return notes on a range of prior means from lowest (P,) to highest (P,), or an empty tuple.

    Raises ValueError for a range of means with several outputs, where θ̂ moves with the prior.
    """
    if not posterior.follows_prior:
        return ("θ̂ does not move with the prior here, so the range of means has no influence",)
    if posterior.network.outputs > 1 and bool((lowest < highest).any()):
        raise ValueError(
            "A range of means is for networks with one output. Give fixed means, or a list of "
            "priors."
        )
    return ()


def _clamp_to_box(u: Tensor) -> Tensor:
    """Return the points of [0, 1]^d that are nearest to u (T, d)."""
    return u.clamp(0, 1)


def _find_precision_ranges(box: Box, layout: Layout) -> _PrecisionRanges:
    """Return the ranges of log precisions of a box by groups of parameters.

    All parameters are one group if their ranges are equal and the box does not name layers; else
    each layer is a group. Raises ValueError where ranges differ within a layer.
    """
    low, high = box.precisions(layout)
    layers = layout.names_by_layer
    groups = torch.zeros(layout.size, dtype=torch.long)
    labels = ["precision"]

    # A dict names layers, so that each of them has a coordinate, even where the ranges are equal.
    equal = bool((low == low[0]).all()) and bool((high == high[0]).all())
    if not equal or isinstance(box.precision, dict):
        labels = [f"precision of {layer or 'network'}" for layer in layers]
        for i, names in enumerate(layers.values()):
            for name in names:
                groups[layout.positions[name]] = i

    # The range of a group is that of its first parameter; all others must have the same.
    first_of_group = [int((groups == g).nonzero()[0]) for g in range(int(groups.max()) + 1)]
    group_low, group_high = low[first_of_group], high[first_of_group]
    if not (torch.equal(low, group_low[groups]) and torch.equal(high, group_high[groups])):
        raise ValueError(
            "A box of priors needs one range of precisions for each layer: weight and bias alike."
        )

    return _PrecisionRanges(labels, groups, group_low.log(), group_high.log())


def _find_basis(
    curvature: Structure, ranges: _PrecisionRanges, size: int
) -> Eigenbasis | ThinBasis:
    """Return an eigenbasis of the curvature S in which each block has one precision.

    size: P, the number of parameters. Raises ValueError if there is none: for ranges by layer under
    a structure that keeps no eigenbasis.
    """
    # The basis depends on which precisions are equal, and not on their values.
    pattern = torch.ones(size, dtype=torch.float64)
    basis: Eigenbasis | ThinBasis | None = eigenbasis(curvature, pattern, ranges.groups)
    if basis is None and len(ranges.low) == 1:
        basis = make_thin_basis(curvature, size)
    if basis is None:
        raise ValueError(
            "A box with different precisions by layer needs structure='kfac' or 'diag', but "
            f"this posterior has structure={curvature.name!r}. Give one range for all layers, "
            "or fit with structure='kfac'."
        )

    return basis
