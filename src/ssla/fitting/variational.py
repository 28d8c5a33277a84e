"""The variational Gaussian: the N(m, S) nearest to the posterior in KL divergence.

Passes find it, which raise the evidence bound. At the nearest one

    S⁻¹ = Σ JᵀE[Λ]J − ∇² log π(m)      Σ JᵀE[g] + ∇log π(m) = 0      (or m = θ̂, if tilted)

with averages over f ~ N(f(m), J S Jᵀ) in place of the values at the mode. A round is a pass: it
takes the averages under the present Gaussian, and with them the bound. The next Gaussian has half
of the new averages in its precision and the new mean: with all of them the precision would
oscillate, and the mean need not wait for it. The step goes all the way there, or a share of the
way. A share that lowers the bound is halved, so the bound never falls. For Gaussian noise the
Gaussian at the mode is the nearest already.

The bound is E ℓ_D + E log π + the entropy of N(m, S) (`ssla.values.evidence_bound`). "The
structure" is how the sum in S⁻¹ is stored. An iterate is a Gaussian with the averages under it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple, Protocol, TypeAlias

import torch
from torch import Tensor

from ssla._checks import warn
from ssla.curvature import Operator, Structure
from ssla.fitting.sums import Sums, factorise_for_uphill_step, solve_newton_step_by_products
from ssla.maths.conjugate import Product
from ssla.priors import Prior
from ssla.report import FIT, VARIATIONAL, Note
from ssla.values import Statistics, Variational, evidence_bound

if TYPE_CHECKING:
    from ssla.posterior import Posterior

# The numbers below were not measured: they are guesses, unless a comment says otherwise.
TOLERANCE = 1e-4  # nats a parameter: a round that raises the bound by less is the last
ROUGH = 1e-3  # the same, for a Gaussian that only chooses a prior
COARSE = 1e-2  # the same: a round that raises the bound by less is followed by another prior
# squared standard deviations a parameter: a mean that would move farther has not converged
CLOSE = 1e-2
MOST_ROUNDS = 100
# weight of the new averages in the precision (method.md, section 11: with all of them it
# oscillates, half of them converge in 10 to 40 passes)
NEW = 0.5
GROWTH = 1.5  # of the share after a round that raised the bound
SHORTEST = 1 / 32  # the least share
NARROWER = 2.0  # factor on the precision's root while the averages do not exist
MOST_NARROWINGS = 30
ROUNDS_FROM_SIMILAR = 12  # rounds of a refit to slightly other rows
CONVERGED = 0.03  # standard deviations of the last step of the mean, after these rounds
ROUNDING = 1e-12  # a bound that is lower by this share of itself is as good

# by which conjugate gradients reduce the residual of a step of the mean: each round takes another
PRECISE = 0.1
MOST_PRODUCTS = 6  # for one step (method, section 11)
# the same for rows that are added: these products take no pass, so that the step may be exact
KEPT_PRECISE, KEPT_MOST_PRODUCTS = 1e-8, 200
ChoosePrior: TypeAlias = "Callable[[Posterior], Prior | None]"
"""A posterior with averages -> a better prior; None: keep the one it has."""


class Average(Protocol):
    """Passes for averages over a Gaussian of θ."""

    def __call__(self, mean: Tensor, covariance: Operator) -> Sums:
        """Sum the averages over N(mean, covariance) of θ, with a mean (P,), in one pass."""
        ...

    def make_products_under(self, mean: Tensor, covariance: Operator) -> Product | None:
        """Return the function v -> Σ JᵀE[Λ]J v of vectors (P,), a pass each.

        E is over N(mean, covariance) of θ. None where such products are too slow or not needed.
        """
        ...


class Iterate(NamedTuple):
    """A Gaussian, the averages under it, and its bound."""

    mean: Tensor  # (P,)
    curvature: Structure  # S⁻¹ less the prior's
    covariance: Operator
    averages: Sums
    bound: float


@dataclass(frozen=True, eq=False)
class KeptAverages:
    """Averages over rows that are not read again.

    The averages are a quadratic around the mean of the Gaussian that they were taken under.
    """

    mean: Tensor  # (P,)
    covariance: Operator
    statistics: Statistics

    @cached_property
    def _trace(self) -> float:
        """Return tr(Λ S) of the kept curvature under the Gaussian of the averages."""
        return self.statistics.curvature.trace(self.covariance)

    def compute_averages_under(self, mean: Tensor, covariance: Operator) -> Statistics:
        """Return the averages under another Gaussian N(mean, covariance), with a mean (P,).

        The average of a quadratic is its value at the mean, less ½ tr(Λ S).
        """
        moved = self.statistics.with_theta_moved(mean - self.mean)
        spread = self.statistics.curvature.trace(covariance) - self._trace
        return replace(moved, log_likelihood=moved.log_likelihood - 0.5 * spread)


@dataclass(eq=False)
class BoundAscent:
    """The ascent of the evidence bound, from the Gaussian that a posterior has, under its prior.

    The mean of a tilted posterior stays at θ̂: the averaged gradient there is subtracted, and only
    the covariance is found. A linear tilt by the gradient at θ̂ itself would let the mean move away,
    without any limit where log p is not concave.

    `choose_prior`, if given, is called for another prior whenever the Gaussian has nearly
    converged, until it returns None. `kept` are the averages over earlier rows; `average` then sums
    the new rows alone.
    """

    posterior: Posterior
    average: Average
    choose_prior: ChoosePrior | None = None
    tolerance: float = TOLERANCE  # nats a parameter: a round with a smaller gain is the last
    most: int = MOST_ROUNDS  # passes
    kept: KeptAverages | None = None
    # the weight of new averages in the precision; None: NEW, or all while a prior is to be
    # chosen
    new: float | None = None

    @property
    def moves(self) -> bool:
        """Return whether the ascent moves the mean, too."""
        return not self.posterior.tilted

    def maximise_bound(self) -> Posterior:
        """Find the Gaussian with the highest bound, and return the posterior with it.

        Where `choose_prior` is given, the posterior also has the prior that was chosen, and the
        ascent must not be used again: it stores that prior. Warns where the rounds end before the
        bound has converged. Raises ValueError where no averages exist.
        """
        current = self._make_first_iterate()
        rounds = 1
        share = 1.0
        converged = False
        while rounds < self.most and not converged:
            trial = self._make_next_iterate(current, share)
            if trial is not None:  # it took a pass
                rounds += 1
            # The next step of the mean tells whether a Gaussian has converged that cannot be
            # improved. A tilted one has no such step: it counts as not converged.
            stuck = trial is None and not self.moves
            # A bound that is lower by rounding error alone is as good.
            if trial is None or not trial.bound >= current.bound - ROUNDING * abs(current.bound):
                share /= 2
                if share >= SHORTEST:
                    continue
                # Even a short way gains nothing: the error of the nodes hides a smaller gain.
                gain = 0.0
                share = 1.0
            else:
                # In nats a parameter, as if the step had gone all the way.
                gain = (trial.bound - current.bound) / len(current.mean) / share
                current = trial
            share = min(1.0, GROWTH * share)
            if gain <= COARSE and self.choose_prior is not None:
                current = self._change_prior(current, self.choose_prior)
            elif gain <= self.tolerance:
                is_near = self._compute_squared_distance(current) <= CLOSE * len(current.mean)
                converged = not stuck and is_near
                if gain == 0:
                    break

        return self._finish(current, rounds, converged)

    def _change_prior(self, current: Iterate, choose_prior: ChoosePrior) -> Iterate:
        """Return the current Gaussian with its bound under the prior that `choose_prior` returns.

        That prior is stored in the ascent, which goes on under it. If `choose_prior` returns None,
        the prior stays, and `choose_prior` is not called again.
        """
        chosen = choose_prior(self._make_posterior_at(current))
        if chosen is None:
            self.choose_prior = None
            return current
        self.posterior = replace(self.posterior, prior=chosen)
        bound = self._compute_evidence_bound(current.mean, current.covariance, current.averages)
        return current._replace(curvature=current.curvature.positive_part(), bound=bound)

    def _make_first_iterate(self) -> Iterate:
        """Return the Gaussian of the posterior, or a narrower one if averages over it do not exist.

        Raises ValueError if they exist for none that is tried.
        """
        mean = self.posterior.mean if self.moves else self.posterior.theta
        curvature = self.posterior.sums.curvature
        for _ in range(MOST_NARROWINGS):
            first = self._make_iterate_at(mean, curvature, self._factorise(curvature, mean))
            if math.isfinite(first.bound):
                return first
            curvature = curvature.scale_both_sides(torch.full_like(self.posterior.theta, NARROWER))
        raise ValueError(
            "gaussian='variational' is not possible: the log likelihood has no finite average "
            "around the mode, however narrow the Gaussian. Use gaussian='laplace', or a log_prob "
            "that is finite for every output."
        )

    def _factorise(self, curvature: Structure, mean: Tensor) -> Operator:
        """Factorise the covariance of a Gaussian from its precision, curvature + T.

        T is the prior's −∇² log π at the mean (P,). Raises ValueError where the precision is not
        positive definite.
        """
        return factorise_for_uphill_step(curvature, self.posterior.bound_prior.precision(mean))

    def _make_iterate_at(self, mean: Tensor, curvature: Structure, covariance: Operator) -> Iterate:
        """Take the averages over a Gaussian in one pass, and return it with them and its bound.

        mean: (P,). curvature: S⁻¹ less the prior's part. covariance: S. Averages over kept rows are
        added.
        """
        sums = self.average(mean, covariance)
        if self.kept is not None:
            earlier = self.kept.compute_averages_under(mean, covariance)
            sums = replace(sums, statistics=earlier.merge(sums.statistics))
        bound = self._compute_evidence_bound(mean, covariance, sums)
        return Iterate(mean, curvature, covariance, sums, bound)

    def _compute_evidence_bound(self, mean: Tensor, covariance: Operator, averages: Sums) -> float:
        """Compute the evidence bound of N(mean, covariance) from the averages over it."""
        log_likelihood = averages.statistics.log_likelihood
        return evidence_bound(self.posterior.bound_prior, mean, covariance, log_likelihood)

    def _compute_gradient(self, current: Iterate) -> Tensor:
        """Compute the gradient (P,) of the bound in the mean; zero where the mean stays."""
        if not self.moves:
            return torch.zeros_like(current.mean)
        prior_gradient = self.posterior.bound_prior.gradient(current.mean)
        return current.averages.statistics.gradient + prior_gradient

    def _compute_squared_distance(self, current: Iterate) -> float:
        """Compute gᵀSg: the squared distance to the next mean, in standard deviations."""
        gradient = self._compute_gradient(current)
        return float(gradient @ current.covariance.solve(gradient))

    def _make_next_iterate(self, current: Iterate, share: float) -> Iterate | None:
        """Return the Gaussian that is a share of the way from the current to the next one.

        One pass takes the averages over it. The result is None, without a pass, where its precision
        is not positive definite.
        """
        # While a prior is to be chosen, the precision takes all of the new averages by default.
        weight_of_new = self.new or (1.0 if self.choose_prior is not None else NEW)
        curvature = current.curvature.mix_with(
            current.averages.statistics.curvature, weight_of_new * share
        )
        try:
            covariance = self._factorise(curvature, current.mean)
        except ValueError:
            # Averages of an indefinite Λ: the caller tries a smaller share.
            return None
        mean = current.mean
        if self.moves:
            mean = mean + share * self._compute_newton_step(current, covariance)
        return self._make_iterate_at(mean, curvature, covariance)

    def _compute_newton_step(self, current: Iterate, covariance: Operator) -> Tensor:
        """Compute the Newton step (P,) of the mean at the current Gaussian.

        The step uses the dense curvature where that is summed, else products with the curvature
        where a pass can compute them, else the curvature of the structure. covariance: that of the
        next Gaussian, which is the preconditioner.
        """
        gradient = self._compute_gradient(current)
        newton = current.averages.newton
        precision = self.posterior.bound_prior.precision(current.mean)
        if newton is not None and self.kept is None:
            return current.averages.compute_newton_step(gradient, precision)
        if newton is not None:
            # The kept rows have another structure than the dense curvature of the new ones. The two
            # cannot be added, but products with both can.
            return solve_newton_step_by_products(
                self._extend_product_to_all_rows(newton.push),
                gradient,
                precision,
                covariance,
                tolerance=KEPT_PRECISE,
                most=KEPT_MOST_PRODUCTS,
            )

        product = self.average.make_products_under(current.mean, current.covariance)
        if product is None:  # the structure's curvature, which may be only near the bound's
            return covariance.solve(gradient)
        return solve_newton_step_by_products(
            self._extend_product_to_all_rows(product),
            gradient,
            precision,
            covariance,
            tolerance=PRECISE,
            most=MOST_PRODUCTS,
        )

    def _extend_product_to_all_rows(self, product: Product) -> Product:
        """Return the function v -> Σ JᵀΛJ v over all rows, for vectors v (P,).

        product: the same over the rows that are read; that of kept rows is added.
        """
        if self.kept is None:
            return product
        earlier = self.kept.statistics.curvature
        return lambda v: product(v) + earlier.push(v)

    def _make_posterior_at(self, current: Iterate) -> Posterior:
        """Return the posterior with the current Gaussian, and the averages under it.

        The curvature of its statistics is the one behind the Gaussian itself. The averaged
        curvature would be that of the next Gaussian.
        """
        statistics = replace(current.averages.statistics, curvature=current.curvature)
        variational = Variational(current.mean, statistics, self.posterior.tilted)
        return replace(self.posterior, variational=variational)

    def _finish(self, best: Iterate, rounds: int, converged: bool) -> Posterior:
        """Return the posterior with the best Gaussian and with a report of the ascent.

        rounds: the passes that it took. converged: whether the bound has converged; a note and a
        warning say so if it has not.
        """
        report = self.posterior.report
        report = replace(report, gaussian=VARIATIONAL, rounds=report.rounds + rounds)
        if not converged:
            distance = math.sqrt(max(self._compute_squared_distance(best), 0.0) / len(best.mean))
            message = (
                f"the variational Gaussian did not converge in {rounds} passes: the best one that "
                f"was found is used, and its weights may be off by about {distance:.2g} of their "
                "standard deviations each"
            )
            report = replace(report, notes=(*report.notes, Note(message, FIT)))
            warn(
                f"{message}. Predictions are off by about that share of their epistemic standard "
                "deviation. A stronger prior or mode='tilt', which keeps the trained weights, "
                "converges sooner.",
                RuntimeWarning,
            )
        return replace(self._make_posterior_at(best), report=report)


def add_rows(before: Posterior, posterior: Posterior, average: Average) -> Posterior:
    """Return the posterior with the variational Gaussian of earlier and new rows.

    before: the posterior of the earlier rows, which must have a variational Gaussian; its averages
    are kept. posterior: the same with the statistics of all rows at θ̂. average: sums the new rows.
    The rounds read the new rows alone, and raise the bound of all rows.
    """
    kept = KeptAverages(before.mean, before.covariance, before.sums)
    first = average(kept.mean, kept.covariance).statistics
    assert before.variational is not None
    start = replace(before.variational, statistics=kept.statistics.merge(first))
    started = replace(posterior, variational=start)
    return BoundAscent(started, average, kept=kept).maximise_bound()


def refit_to_similar_rows(posterior: Posterior, average: Average) -> Posterior:
    """Return the posterior with the variational Gaussian of slightly different rows.

    average: sums these rows. posterior: has the Gaussian from which the ascent starts. It takes a
    fixed number of rounds from the present Gaussian, with half of the new averages in the
    precision. The bound is not a stopping rule so close to its maximum: a step can overshoot to a
    point with the same bound, and the error of the nodes hides small gains. The tilt of the
    gradient stays. Raises ValueError where the last step of the mean is still long.
    """
    current = posterior
    distance = math.inf  # squared, of the last step, in standard deviations
    tilt = posterior.tilt
    for _ in range(ROUNDS_FROM_SIMILAR):
        assert current.variational is not None
        sums = average(current.mean, current.covariance)
        gradient = sums.statistics.gradient + current.bound_prior.gradient(current.mean) - tilt
        step = sums.compute_newton_step(gradient, current.bound_prior.precision(current.mean))
        curvature = current.sums.curvature.mix_with(sums.statistics.curvature, 0.5)
        moved = replace(
            current.variational,
            mean=current.mean + step,
            statistics=replace(sums.statistics, curvature=curvature),
        )
        current = replace(current, variational=moved)
        distance = float(gradient @ step)

    if not distance <= CONVERGED**2:
        raise ValueError(
            f"The variational Gaussian did not converge in {ROUNDS_FROM_SIMILAR} rounds."
        )
    return current


def with_sums(posterior: Posterior, statistics: Statistics) -> Posterior:
    """Return the posterior with the same mean of θ and other statistics behind its covariance.

    The new statistics replace the averages of a variational Gaussian, or the sums at θ̂.
    """
    if posterior.variational is None:
        return replace(posterior, statistics=statistics)
    return replace(posterior, variational=replace(posterior.variational, statistics=statistics))


def with_recentred_mean(posterior: Posterior) -> Posterior:
    """Return the variational posterior with m at the mode of its averages under its prior.

    The averages are kept. They stand for a likelihood that is quadratic around m, with the
    curvature of the structure. This is exact to first order in what changed where the structure is
    dense. A tilted Gaussian stays where it is. Raises AssertionError for a posterior without a
    variational Gaussian, and ValueError where the covariance cannot be factorised.
    """
    variational = posterior.variational
    assert variational is not None
    if posterior.tilted:
        return posterior
    gradient = posterior.sums.gradient + posterior.bound_prior.gradient(posterior.mean)
    step = posterior.covariance.solve(gradient)
    moved = replace(
        variational,
        mean=variational.mean + step,
        statistics=variational.statistics.with_theta_moved(step),
    )
    return replace(posterior, variational=moved)
