"""Sums over the data at one θ, with what fitting needs besides the statistics.

For each of B rows: outputs f (B, C), Jacobian J, score g (B, C) and precision Λ (B, C, C). The
statistics hold Σ JᵀΛJ with the Fisher information, or with averages of Λ over a Gaussian of θ;
Newton steps may have a curvature with the observed Λ of their own. To pool rows is to sum w_i Λ_i
over them before the product with J, which is possible for Kronecker factors.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from ssla._checks import check_finite
from ssla.curvature import Dense, Operator, Structure
from ssla.curvature.dense import DenseOperator
from ssla.curvature.jacobians import Jacobian
from ssla.curvature.kfac import needs_summed_precision_only
from ssla.likelihoods import Likelihood
from ssla.likelihoods.averages import (
    RowNodes,
    averages,
    multiply_by_curvature,
    pool_fisher,
)
from ssla.likelihoods.likelihood import LOG_2PI
from ssla.maths.conjugate import Product, conjugate_gradients
from ssla.maths.roots import Root
from ssla.priors import BoundPrior
from ssla.values import Statistics


class Averaging(NamedTuple):
    """A Gaussian over θ, under which a pass sums averages in place of values at θ."""

    shift: Tensor  # its mean less θ (P,)
    covariance: Operator
    # the expected Fisher information in place of the expected observed precision, which may be
    # indefinite
    fisher: bool
    moves: bool  # whether the mean will move, which takes a curvature of its own for its steps
    row_nodes: RowNodes | None = None  # for many rows of classes; None: all rows share their nodes

    def compute_mean_outputs(self, f: Tensor, J: Jacobian) -> Tensor:
        """Return the outputs (B, C) at the Gaussian's mean, from f (B, C) and J at θ."""
        return f + J.push(self.shift) if bool(self.shift.any()) else f

    def compute_output_root(self, J: Jacobian) -> Root:
        """Return R with R Rᵀ = K = J S Jᵀ (B, C, C) for the rows with Jacobian J."""
        if isinstance(self.covariance, DenseOperator):
            return self.covariance.root_for_sums(J)
        return self.covariance.root(J)

    def choose_nodes_of_chunk(self, chunk: int) -> RowNodes | None:
        """Return the nodes of chunk number `chunk` of the pass.

        The result is None where all rows share their nodes.
        """
        return None if self.row_nodes is None else self.row_nodes.for_chunk(chunk)


@dataclass(frozen=True, eq=False)
class Sums:
    """Statistics with what fitting needs besides.

    These are the observed curvature for Newton steps, and squared residuals for the noise.
    """

    statistics: Statistics
    newton: Structure | None  # Σ JᵀΛJ with the observed Λ; None: that of the statistics serves
    squares: Tensor  # Σ w (y − f)² by output (C,), for the noise
    largest: Tensor  # |y| at its largest by output (C,): the unit in which residuals may be zero
    reference: Tensor  # the noise that the statistics were taken at (C,)
    # whether the input factor of a last layer with Kronecker factors is summed; see Kfac.add
    has_input_factor: bool = True

    @staticmethod
    def zero(size: int, structure: Structure, newton: bool, has_input_factor: bool = True) -> Sums:
        """Return the sums over no row, for `size` parameters.

        structure: how the curvature is stored. newton: whether Newton steps have a dense curvature
        of their own. has_input_factor: whether the input factor is summed.
        """
        statistics = Statistics(
            0, 0.0, 0.0, torch.zeros(size, dtype=torch.float64), structure.zero(size)
        )
        none = torch.zeros(1, dtype=torch.float64)
        observed = Dense(dual=False).zero(size) if newton else None
        return Sums(statistics, observed, none, none, torch.ones(1), has_input_factor)

    @property
    def newton_curvature(self) -> Structure:
        """Return the curvature of Newton steps.

        The result is the observed one where that is summed, and else that of the statistics.
        """
        return self.newton or self.statistics.curvature

    @property
    def has_kinks(self) -> bool:
        """Return whether log p has kinks in f, as |y − f| has: Newton steps then lead nowhere.

        This is so if a parameter has a gradient and Fisher information, but no observed curvature.
        The result is False where the observed curvature is not summed.
        """
        if self.newton is None or not self.newton.exact:
            return False
        flat = (self.newton.as_matrix().diagonal() == 0).double()
        fisher_along_flat = float(flat @ self.statistics.curvature.push(flat))
        return fisher_along_flat > 0 and bool((flat * self.statistics.gradient != 0).any())

    def compute_newton_step(self, gradient: Tensor, prior_precision: Tensor) -> Tensor:
        """Compute the Newton step H⁻¹ gradient (P,) for a gradient (P,).

        H has the observed curvature where it is summed and positive definite, else that of the
        statistics. prior_precision: (P,) or (P, P). Raises ValueError where neither can be
        factorised.
        """
        if self.newton is not None:
            try:
                return self.newton.with_prior(prior_precision).solve(gradient)
            except ValueError:
                # The observed curvature is not positive definite: that of the statistics is used.
                pass
        return factorise_for_uphill_step(self.statistics.curvature, prior_precision).solve(gradient)

    def add(
        self, f: Tensor, J: Jacobian, y: Tensor, weights: Tensor | None, likelihood: Likelihood
    ) -> Sums:
        """Return the sums with B more rows.

        f (B, C): their outputs. J: their Jacobian. y: their targets. weights (B,): their weights;
        None: all ones. Matrices are changed in place, so `self` must not be used afterwards. Raises
        ValueError where an output or a log density is not finite, or an output is outside the
        domain of the likelihood.
        """
        check_finite(
            "The network's output", f, "Check the scale of the inputs and the trained weights."
        )
        likelihood.check_outputs(f)
        pooling = self._choose_pooling_weights(f, J, weights)
        log_prob = likelihood.log_prob(y, f)
        score = likelihood.score(y, f)
        if pooling is None:
            precision = likelihood.fisher(f)
        else:
            precision = pool_fisher(likelihood, f, pooling, self._pools_diagonal)

        # For a softmax the observed precision is the Fisher information: one sum serves both.
        are_same = self.statistics.curvature.exact and likelihood.softmax
        observed = likelihood.precision(y, f) if self.newton is not None and not are_same else None
        check_finite(
            "log p(y|f)",
            log_prob,
            "Some targets are impossible for these outputs: check y and the likelihood.",
        )
        if weights is not None:
            log_prob = log_prob * weights
            score = score * weights[:, None]
            # A pooled precision has the weights already.
            precision = precision * weights[:, None, None] if pooling is None else precision
            observed = None if observed is None else observed * weights[:, None, None]
        statistics = self._with_rows(J, float(log_prob.sum()), score, precision, weights, len(f))
        newton = self.newton
        if newton is not None and observed is not None:
            newton = newton.accumulate(J, observed)
        elif newton is not None and statistics.curvature.exact:
            # The same matrix as that of the statistics, without a copy.
            matrix = statistics.curvature.as_matrix()
            newton = Dense(dual=False, matrix=matrix, rows=(), size=len(statistics.gradient))
        return self._with_residuals(f, y, weights, likelihood, statistics, newton)

    def _with_residuals(
        self,
        f: Tensor,
        y: Tensor,
        weights: Tensor | None,
        likelihood: Likelihood,
        statistics: Statistics,
        newton: Structure | None,
    ) -> Sums:
        """Return sums with new statistics, with a new Newton curvature, and with more residuals.

        f (B, C), y, weights (B,): the outputs, targets and weights of the rows whose squared
        residuals are added, if the likelihood is Gaussian. statistics, newton: already with these
        rows.
        """
        squares = torch.zeros(f.shape[1], dtype=torch.float64)
        largest = self.largest
        reference = self.reference
        if likelihood.quadratic:
            reference = likelihood.covariance_for(f).diagonal().sqrt()
            targets = y.reshape(f.shape)
            row_squares = (targets - f) ** 2
            squares = (row_squares if weights is None else row_squares * weights[:, None]).sum(0)
            largest = torch.maximum(largest, targets.abs().amax(0))
        return Sums(
            statistics, newton, self.squares + squares, largest, reference, self.has_input_factor
        )

    def _with_rows(
        self,
        J: Jacobian,
        log_likelihood: float,
        score: Tensor,
        precision: Tensor,
        weights: Tensor | None,
        rows: int,
    ) -> Statistics:
        """Return the statistics with more rows, whose Jacobian is J; matrices are changed in place.

        log_likelihood, score (B, C), precision (B, C, C) or its sum over rows: with the row weights
        already in them. weights: (B,), for the input factors; None: all ones. rows: their number B.
        """
        s = self.statistics
        curvature = s.curvature.accumulate(J, precision, weights, self.has_input_factor)
        return Statistics(
            s.n + rows,
            s.weight + (rows if weights is None else float(weights.sum())),
            s.log_likelihood + log_likelihood,
            s.gradient + J.pull(score),
            curvature,
        )

    def add_averages(
        self,
        f: Tensor,
        J: Jacobian,
        y: Tensor,
        weights: Tensor | None,
        likelihood: Likelihood,
        averaging: Averaging,
        chunk: int = 0,
    ) -> Sums:
        """Return the sums with B more rows, with averages over a Gaussian of θ in place of values.

        The rows are given as in `add`, and matrices are changed in place, too. averaging: the
        Gaussian. chunk: the number of the rows' chunk in the pass, which decides its nodes. Where
        the averages do not exist, the result has a log likelihood of −∞, and its other sums have no
        meaning.
        """
        pooling = self._choose_pooling_weights(f, J, weights) if self.newton is None else None
        log_prob, score, precision = averages(
            likelihood,
            y,
            averaging.compute_mean_outputs(f, J),
            averaging.compute_output_root(J),
            fisher=averaging.fisher,
            pool=pooling,
            diagonal=pooling is not None and self._pools_diagonal,
            row_nodes=averaging.choose_nodes_of_chunk(chunk),
        )
        if weights is not None:
            log_prob = log_prob * weights
            score = score * weights[:, None]
            precision = precision * weights[:, None, None] if pooling is None else precision
        total = float(log_prob.sum())

        # Averages that do not exist must not get into the matrices, which are changed in place.
        if not (
            math.isfinite(total)
            and bool(torch.isfinite(score).all())
            and bool(torch.isfinite(precision).all())
        ):
            return replace(self, statistics=replace(self.statistics, log_likelihood=-math.inf))

        statistics = self._with_rows(J, total, score.to(J.dtype), precision, weights, len(f))
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
        averaging: Averaging | None = None,
        chunk: int = 0,
    ) -> Sums:
        """Return the sums with the product JᵀΛJ d of B more rows added to the gradient.

        Of the other sums only the number of rows changes. The rows are given as in `add`.
        direction: d (P,). averaging: the Gaussian over which Λ is
        averaged; None: Λ at θ. chunk: as in `add_averages`.
        """
        u = J.push(direction).double()
        if averaging is None:
            product = multiply_by_curvature(likelihood, y, f, u)
        else:
            product = multiply_by_curvature(
                likelihood,
                y,
                averaging.compute_mean_outputs(f, J),
                u,
                averaging.compute_output_root(J),
                fisher=averaging.fisher,
                row_nodes=averaging.choose_nodes_of_chunk(chunk),
            )
        if weights is not None:
            product = product * weights[:, None]
        s = self.statistics
        gradient = s.gradient + J.pull(product.to(J.dtype))
        return replace(self, statistics=replace(s, n=s.n + f.shape[0], gradient=gradient))

    def _choose_pooling_weights(
        self, f: Tensor, J: Jacobian, weights: Tensor | None
    ) -> Tensor | None:
        """Return the weights (B,) by which the rows are pooled, or None if they are not pooled.

        Rows are pooled where the curvature needs only the weighted sum of their precisions. f
        (B, C), J and weights (B,) are those of the rows; weights None: all ones.
        """
        if not needs_summed_precision_only(self.statistics.curvature, J):
            return None
        return torch.ones(len(f), dtype=torch.float64) if weights is None else weights

    @property
    def _pools_diagonal(self) -> bool:
        """Return whether the curvature needs only the diagonal of the rows' summed precisions."""
        return self.statistics.curvature.diagonal_outputs

    def merge(self, other: Sums) -> Sums:
        """Return the sums over both data sets, which must be taken at the same θ and noise."""
        newton = None
        if self.newton is not None and other.newton is not None:
            newton = self.newton.merge(other.newton)
        return replace(
            self,
            statistics=self.statistics.merge(other.statistics),
            newton=newton,
            squares=self.squares + other.squares,
            largest=torch.maximum(self.largest, other.largest),
        )

    def with_input_factor_of(self, other: Structure) -> Sums:
        """Return the sums with the input factor of another pass over the same rows.

        These sums must have none. other: the curvature of that pass.
        """
        curvature = self.statistics.curvature.with_inputs_of(other)
        statistics = replace(self.statistics, curvature=curvature)
        return replace(self, statistics=statistics, has_input_factor=True)

    def with_noise_scaled(self, noise: Tensor) -> Sums:
        """Return the sums as if they were taken at `noise` times their noise.

        noise: (P,), for each parameter the factor on the noise of its output. Only for sums as a
        pass collected them (not after `with_theta_moved`): their log likelihood is that of the
        squared residuals.
        """
        s = self.statistics
        outputs = self.squares.numel()

        # With one factor for all, parameters need not be ordered by outputs.
        if bool((noise != noise[0]).any()):
            factor = noise.reshape(outputs, -1)[:, 0]
        else:
            factor = noise[:1].expand(outputs)
        scale = self.reference * factor

        # The log likelihood is computed anew. It is not a change of the present one: at a noise of
        # 1 that is −½ of the squares in the unit of the targets, and the difference of two such
        # numbers may have no digits left.
        constant = scale.log().sum() + 0.5 * outputs * LOG_2PI
        log_likelihood = -0.5 * float((self.squares / scale**2).sum()) - s.weight * float(constant)
        newton = None if self.newton is None else self.newton.scale_both_sides(1 / noise)
        return replace(
            self,
            statistics=s.with_noise_scaled(noise, log_likelihood),
            newton=newton,
            reference=scale,
        )

    def compute_residual_squares(self, start: Sums, step: Tensor) -> Tensor:
        """Return the squared residuals (C,) at the θ of these sums.

        start: the sums from where θ moved by `step` (P,). If these sums were computed from `start`
        without a pass (a Gaussian last layer), their `squares` are still those at the start, and
        the quadratic of `start` gives the change.
        """
        if self.squares is not start.squares:
            return self.squares
        gain = float(step @ start.statistics.gradient) - 0.5 * float(
            step @ start.newton_curvature.push(step)
        )
        noise = self.reference**2
        if noise.numel() == 1:
            return self.squares - 2 * gain * noise
        # The gain of several outputs is known in total only: each gets its share.
        return self.squares * (1 - 2 * gain / (self.squares / noise).sum())

    def with_theta_moved(self, step: Tensor) -> Sums:
        """Return the sums at θ + step, for a step (P,), without a pass.

        Exact where ℓ_D is quadratic (a Gaussian last layer). The squared residuals stay those of
        the last pass: see `compute_residual_squares`.
        """
        return replace(
            self, statistics=self.statistics.with_theta_moved(step, self.newton_curvature)
        )


def factorise_for_uphill_step(curvature: Structure, prior_precision: Tensor) -> Operator:
    """Factorise (S + T)⁻¹ for a step uphill, from the curvature S of the data and T of the prior.

    prior_precision: T, (P,) or (P, P). Where a prior that is not log-concave makes S + T
    indefinite, the positive part of a diagonal T is taken. Raises ValueError where that does not
    help, and for an indefinite sum with a full T.
    """
    try:
        return curvature.with_prior(prior_precision)
    except ValueError:
        # Only negative entries of a diagonal T can be left out.
        if prior_precision.dim() == 2 or bool((prior_precision >= 0).all()):
            raise
        return curvature.with_prior(prior_precision.clamp_min(0))


def solve_newton_step_by_products(
    product: Product,
    gradient: Tensor,
    prior_precision: Tensor,
    preconditioner: Operator,
    tolerance: float,
    most: int,
) -> Tensor:
    """Compute (S + T)⁻¹ g (P,) for a gradient g (P,) by at most `most` conjugate gradients.

    product: v -> S v. prior_precision: T (P,) or (P, P). preconditioner: an operator near
    (S + T)⁻¹. tolerance: the factor by which the residual is to fall. Where a direction has no
    positive curvature, the result is the step before it; if it is the first direction, the
    preconditioner applied to g.
    """

    def multiply_with_prior(v: Tensor) -> Tensor:
        """Compute (S + T) v (P,)."""
        prior = prior_precision * v if prior_precision.dim() == 1 else prior_precision @ v
        return product(v) + prior

    step = conjugate_gradients(multiply_with_prior, gradient, preconditioner.solve, tolerance, most)
    return preconditioner.solve(gradient) if step is None else step


def compute_distance_to_mode(sums: Sums, bound: BoundPrior, theta: Tensor) -> float:
    """Compute how far θ (P,) is from the mode, in posterior standard deviations: √(gᵀH⁻¹g).

    sums: taken at θ. bound: the prior over θ. g = ∇(ℓ_D + log π) at θ. Raises ValueError where H
    cannot be factorised.
    """
    gradient = sums.statistics.gradient + bound.gradient(theta)
    step = sums.compute_newton_step(gradient, bound.precision(theta))
    return math.sqrt(max(float(gradient @ step), 0.0))
