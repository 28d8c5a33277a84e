"""Sums over the data at one θ, with what fitting needs besides the statistics."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from ssla._checks import finite
from ssla.curvature import Dense, Operator, Structure
from ssla.curvature.dense import DenseOperator
from ssla.curvature.jacobians import Jacobian
from ssla.curvature.kfac import pools
from ssla.likelihoods import Likelihood
from ssla.likelihoods.averages import (
    RowNodes,
    averages,
    curvature_product,
    pooled_fisher,
)
from ssla.likelihoods.likelihood import LOG_2PI
from ssla.maths.conjugate import Product, conjugate_gradients
from ssla.maths.roots import Root
from ssla.priors import BoundPrior
from ssla.values import Statistics


class Around(NamedTuple):
    """A Gaussian over θ whose averages are to be summed."""

    shift: Tensor  # its mean less θ (P,)
    covariance: Operator
    # the expected Fisher information in place of the expected observed precision, which may be
    # indefinite
    fisher: bool
    moves: bool  # whether the mean will move, which takes a curvature of its own for its steps
    row_nodes: RowNodes | None = None  # of many rows of classes


@dataclass(frozen=True, eq=False)
class Sums:
    """Statistics with what fitting needs besides: the observed curvature for Newton steps,
    squared residuals.
    """

    statistics: Statistics
    newton: Structure | None
    squares: Tensor  # Σ w (y − f)² by output (C,), for the noise
    largest: Tensor  # |y| at its largest by output (C,): the unit in which residuals may be zero
    reference: Tensor  # the noise that the statistics were taken at (C,)
    # whether the input factor of a last layer with Kronecker factors is summed; see Kfac.add
    inputs: bool = True

    @staticmethod
    def zero(size: int, structure: Structure, newton: bool, inputs: bool = True) -> Sums:
        nothing = Statistics(
            0, 0.0, 0.0, torch.zeros(size, dtype=torch.float64), structure.zero(size)
        )
        none = torch.zeros(1, dtype=torch.float64)
        own = Dense(dual=False).zero(size) if newton else None
        return Sums(nothing, own, none, none, torch.ones(1), inputs)

    @property
    def newton_curvature(self) -> Structure:
        return self.newton or self.statistics.curvature

    @property
    def straight(self) -> bool:
        """Whether the observed curvature is zero in directions in which the Fisher is not,
        though there is a gradient.
        """
        if self.newton is None or not self.newton.exact:
            return False
        none = (self.newton.as_matrix().diagonal() == 0).double()
        return float(none @ self.statistics.curvature.push(none)) > 0 and bool(
            (none * self.statistics.gradient != 0).any()
        )

    def newton_step(self, gradient: Tensor, prior_precision: Tensor) -> Tensor:
        """H⁻¹ g with the observed curvature; with the Fisher where that is not positive
        definite.
        """
        if self.newton is not None:
            try:
                return self.newton.with_prior(prior_precision).solve(gradient)
            except ValueError:
                pass
        return climbing(self.statistics.curvature, prior_precision).solve(gradient)

    def add(
        self, f: Tensor, J: Jacobian, y: Tensor, weights: Tensor | None, likelihood: Likelihood
    ) -> Sums:
        """The sums with more rows.

        Matrices are changed in place: these sums must not be used afterwards.
        """
        finite("The network's output", f, "Check the scale of the inputs and the trained weights.")
        likelihood.check_outputs(f)
        pool = self._pool(f, J, weights)
        log_prob, score = likelihood.log_prob(y, f), likelihood.score(y, f)
        precision = (
            likelihood.fisher(f)
            if pool is None
            else pooled_fisher(likelihood, f, pool, self._diagonal)
        )
        dense = self.statistics.curvature.exact
        same = dense and likelihood.softmax  # the observed precision is the Fisher information
        observed = likelihood.precision(y, f) if self.newton is not None and not same else None
        finite(
            "log p(y|f)",
            log_prob,
            "Some targets are impossible for these outputs: check y and the likelihood.",
        )
        if weights is not None:
            log_prob, score = log_prob * weights, score * weights[:, None]
            precision = precision * weights[:, None, None] if pool is None else precision
            observed = None if observed is None else observed * weights[:, None, None]
        squares, reference = torch.zeros(f.shape[1], dtype=torch.float64), self.reference
        largest = self.largest
        if likelihood.quadratic:
            reference = likelihood.covariance_for(f).diagonal().sqrt()
            targets = y.reshape(f.shape)
            r = (targets - f) ** 2
            squares = (r if weights is None else r * weights[:, None]).sum(0)
            largest = torch.maximum(largest, targets.abs().amax(0))
        s, newton = self.statistics, self.newton
        curvature = s.curvature.accumulate(J, precision, weights, self.inputs)
        if newton is not None and observed is not None:
            newton = newton.accumulate(J, observed)
        elif newton is not None and curvature.exact:
            newton = Dense(False, curvature.as_matrix(), (), len(s.gradient))
        return Sums(
            Statistics(
                s.n + f.shape[0],
                s.weight + (f.shape[0] if weights is None else float(weights.sum())),
                s.log_likelihood + float(log_prob.sum()),
                s.gradient + J.pull(score),
                curvature,
            ),
            newton,
            self.squares + squares,
            largest,
            reference,
            self.inputs,
        )

    def add_averages(
        self,
        f: Tensor,
        J: Jacobian,
        y: Tensor,
        weights: Tensor | None,
        likelihood: Likelihood,
        around: Around,
        chunk: int = 0,
    ) -> Sums:
        """As `add`, with averages over a Gaussian of θ in place of values.

        chunk: its number, which decides its nodes.

        Where they do not exist the log likelihood is −∞.
        """
        pool = self._pool(f, J, weights) if self.newton is None else None
        diagonal = pool is not None and self._diagonal
        mean = f + J.push(around.shift) if bool(around.shift.any()) else f
        root = root_of(around.covariance, J)
        row_nodes = None if around.row_nodes is None else around.row_nodes.of_chunk(chunk)
        log_prob, score, precision = averages(
            likelihood, y, mean, root, around.fisher, pool, diagonal, row_nodes
        )
        if weights is not None:
            log_prob, score = log_prob * weights, score * weights[:, None]
            precision = precision * weights[:, None, None] if pool is None else precision
        s = self.statistics
        total = float(log_prob.sum())
        sound = (
            math.isfinite(total)
            and bool(torch.isfinite(score).all())
            and bool(torch.isfinite(precision).all())
        )
        if not sound:
            return replace(self, statistics=replace(s, log_likelihood=-math.inf))
        statistics = Statistics(
            s.n + f.shape[0],
            s.weight + (f.shape[0] if weights is None else float(weights.sum())),
            s.log_likelihood + total,
            s.gradient + J.pull(score.to(J.dtype)),
            s.curvature.accumulate(J, precision, weights, self.inputs),
        )
        newton = None if self.newton is None else self.newton.accumulate(J, precision)
        return replace(self, statistics=statistics, newton=newton)

    def add_product(
        self,
        f: Tensor,
        J: Jacobian,
        y: Tensor,
        weights: Tensor | None,
        likelihood: Likelihood,
        direction: Tensor,
        around: Around | None = None,
        chunk: int = 0,
    ) -> Sums:
        """Σ JᵀΛJ d in place of the gradient, and no curvature; with `around` the averages of Λ
        over that Gaussian.
        """
        u = J.push(direction).double()
        if around is None:
            turned = curvature_product(likelihood, y, f, u)
        else:
            mean = f + J.push(around.shift) if bool(around.shift.any()) else f
            row_nodes = None if around.row_nodes is None else around.row_nodes.of_chunk(chunk)
            turned = curvature_product(
                likelihood, y, mean, u, root_of(around.covariance, J), around.fisher, row_nodes
            )
        if weights is not None:
            turned = turned * weights[:, None]
        s = self.statistics
        more = replace(s, n=s.n + f.shape[0], gradient=s.gradient + J.pull(turned.to(J.dtype)))
        return replace(self, statistics=more)

    def _pool(self, f: Tensor, J: Jacobian, weights: Tensor | None) -> Tensor | None:
        """The row weights (B,) where the sum of the rows' precisions is enough."""
        if not pools(self.statistics.curvature, J):
            return None
        return torch.ones(len(f), dtype=torch.float64) if weights is None else weights

    @property
    def _diagonal(self) -> bool:
        """Whether the diagonal of that sum is enough."""
        return self.statistics.curvature.diagonal_outputs

    def merge(self, other: Sums) -> Sums:
        """The sums over both data sets, taken at the same θ and noise."""
        newton = (
            None if self.newton is None or other.newton is None else self.newton.merge(other.newton)
        )
        statistics = self.statistics.merge(other.statistics)
        largest = torch.maximum(self.largest, other.largest)
        return Sums(
            statistics, newton, self.squares + other.squares, largest, self.reference, self.inputs
        )

    def with_inputs_of(self, other: Structure) -> Sums:
        """With the input factors of another pass over the same rows."""
        curvature = self.statistics.curvature
        return replace(
            self,
            statistics=replace(self.statistics, curvature=curvature.with_inputs_of(other)),
            inputs=True,
        )

    def at_noise(self, noise: Tensor) -> Sums:
        """The sums at `noise` times their noise, (P,): one factor for each parameter's output.

        For sums as collected, whose log likelihood follows from the squared residuals.
        """
        s = self.statistics
        outputs = self.squares.numel()
        factor = (
            noise.reshape(outputs, -1)[:, 0]
            if bool((noise != noise[0]).any())
            else noise[:1].expand(outputs)
        )
        scale = self.reference * factor
        # Not as a change of the log likelihood at hand: at a noise of 1 that is −½ of the squares
        # in the unit of the targets, and the difference of two such numbers may have no digits
        # left.
        constant = scale.log().sum() + 0.5 * outputs * LOG_2PI
        log_likelihood = -0.5 * float((self.squares / scale**2).sum()) - s.weight * float(constant)
        statistics = s.at_noise(noise, log_likelihood)
        newton = None if self.newton is None else self.newton.scaled(1 / noise)
        return replace(self, statistics=statistics, newton=newton, reference=scale)

    def residual_squares(self, start: Sums, moved: Tensor) -> Tensor:
        """Squared residuals after θ moved, (C,): by the quadratic sums of a last layer, else as
        collected.
        """
        if self.squares is not start.squares:
            return self.squares
        gain = float(moved @ start.statistics.gradient) - 0.5 * float(
            moved @ start.newton_curvature.push(moved)
        )
        noise = self.reference**2
        return (
            self.squares - 2 * gain * noise
            if noise.numel() == 1
            else self.squares * (1 - 2 * gain / (self.squares / noise).sum())
        )

    def moved(self, step: Tensor) -> Sums:
        """The sums at θ + step where ℓ is quadratic: exact for a Gaussian last layer."""
        return replace(self, statistics=self.statistics.moved(step, self.newton_curvature))


def root_of(covariance: Operator, J: Jacobian) -> Root:
    """R with R Rᵀ = K at the rows of a pass."""
    return (
        covariance.root_for_sums(J) if isinstance(covariance, DenseOperator) else covariance.root(J)
    )


def climbing(curvature: Structure, prior_precision: Tensor) -> Operator:
    """(S + T)⁻¹ for a step uphill: where a prior that is not log-concave makes S + T
    indefinite, with T's positive part.
    """
    try:
        return curvature.with_prior(prior_precision)
    except ValueError:
        if prior_precision.dim() == 2 or bool((prior_precision >= 0).all()):
            raise
        return curvature.with_prior(prior_precision.clamp_min(0))


def newton_by_products(
    product: Product,
    gradient: Tensor,
    prior_precision: Tensor,
    structure: Operator,
    tolerance: float,
    most: int,
) -> Tensor:
    """(S + T)⁻¹ g by conjugate gradients on products S v; `structure`, about that inverse, is the
    preconditioner.

    Where the curvature is not positive, it is the step as far as it was found, or the structure's
    own.
    """

    def whole(v: Tensor) -> Tensor:
        prior = prior_precision * v if prior_precision.dim() == 1 else prior_precision @ v
        return product(v) + prior

    step = conjugate_gradients(whole, gradient, structure.solve, tolerance, most)
    return structure.solve(gradient) if step is None else step


def residual(sums: Sums, bound: BoundPrior, theta: Tensor) -> float:
    """√(gᵀH⁻¹g): how far θ is from the mode, in posterior standard deviations."""
    gradient = sums.statistics.gradient + bound.gradient(theta)
    step = sums.newton_step(gradient, bound.precision(theta))
    return math.sqrt(max(float(gradient @ step), 0.0))
