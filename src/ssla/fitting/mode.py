"""The mode: Newton ascent of the log posterior, a pass for each step unless the sums determine it.

Where a last layer is too large for its dense curvature, steps with Kronecker factors or a diagonal
alone do not converge. The Newton step is then found by conjugate gradients, with exact products of
the curvature (a pass each) and the structure as the preconditioner.

With the gradient g of the log posterior and H its curvature, a Newton step is H⁻¹g. The decrement
gᵀH⁻¹g is the squared distance to the mode in posterior standard deviations, and twice the gain that
the quadratic promises for the full step.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from ssla._checks import warn
from ssla.fitting.sums import Sums, factorise_for_uphill_step, solve_newton_step_by_products
from ssla.maths.conjugate import Product
from ssla.priors import BoundGaussian, BoundPrior

RUNAWAY = (
    "polish diverges: after {steps} Newton steps the curvature of the log posterior is no longer "
    "positive definite. Likely cause: there is no mode nearby, for example because a variance that "
    "the network predicts can go to zero on few rows. Use a stronger prior, for example "
    "prior=ssla.priors.Gaussian(precision=1.0), or keep the weights by mode='tilt'."
)
# The numbers below were not measured: they are guesses, unless a comment says otherwise.
MOST_NEWTON_STEPS = 200
MOST_TRIALS = 2000  # steps tried in one polish, shortened ones included: a pass over the data each
HALVINGS = 26  # of one step: the last one tried has a share of 1.5e-8
# Posterior standard deviations from the mode at which polish ends: Newton converges quadratically
# for a last layer; for other weights the Gauss–Newton steps converge linearly.
DECREMENT_LINEAR, DECREMENT_OTHER = 1e-10, 1e-5
# The same, a parameter, for a last layer with only an approximate curvature.
APPROXIMATE = 0.01
NEARLY = 0.3  # the same, a parameter, where near the mode is enough
# The factor by which conjugate gradients reduce the residual of a Newton step. What is left, the
# next Newton step corrects.
PRECISE = 0.03
MOST_PRODUCTS = 30  # for one Newton step
# The decrement at which rounding errors decide, as a share of the log posterior: of sums that are
# moved without a pass, and of sums over rows.
ROUNDING_OF_MOVED, ROUNDING_OF_SUMS = 1e-22, 1e-15
ROUNDING_OF_HEIGHT = 1e-13  # share of the log posterior that a step may lose by rounding
VISIBLE_DECREMENT = 0.1  # farther than this from the mode, the end of a polish is a warning
# so close to the mode, the gain is below rounding error and the full step is safe
TRUSTED_DECREMENT = 1e-4
SUFFICIENT = 1e-4  # share of the expected gain that a step must reach (Armijo)


class NoModeError(ValueError):
    """There is no mode nearby: the curvature cannot be factorised where Newton steps have led.

    It is also raised where they reached no mode at all, if `Polish.refuses` is true.
    """


class _Point(NamedTuple):
    """A point of the ascent."""

    theta: Tensor  # (P,)
    sums: Sums  # at θ
    height: float  # ℓ_D + log π at θ


@dataclass(frozen=True, eq=False)
class Polish:
    """The ascent to the mode of ℓ_D + log π by Newton steps."""

    collect: Callable[[Tensor], Sums]  # a pass: the sums at θ
    linear: bool  # whether the outputs are linear in θ
    gaussian: bool  # whether the noise is Gaussian, so that ℓ_D is quadratic in the outputs
    notes: list[str]  # for the report; the ascent appends to it
    # whether an ascent that reaches no mode raises NoModeError, in place of a warning
    refuses: bool = False
    # θ -> products with Σ JᵀΛJ there, a pass each; None: steps by the structure alone
    make_products_at: Callable[[Tensor], Product] | None = None

    def find_mode(
        self, theta: Tensor, sums: Sums, bound: BoundPrior, nearly: bool = False
    ) -> tuple[Tensor, Sums, int]:
        """Climb ℓ_D + log π from θ (P,), where the sums were taken, by safeguarded Newton steps.

        bound: the prior over θ. nearly: whether to stop near the mode, which is enough where a
        prior is still to be chosen. Returns θ (P,), the sums there, and the number of steps.

        Raises ValueError where the curvature at the start cannot be factorised, and NoModeError
        where it cannot be later. An ascent that ends far from a mode warns, or raises NoModeError
        if `refuses`.
        """
        limit = self._choose_distance_limit(theta, sums, nearly)

        # With Gaussian noise and the exact curvature the sums at any θ follow without a pass.
        quadratic = self.linear and self.gaussian and sums.newton_curvature.exact
        height = sums.statistics.log_likelihood + float(bound.log_prob(theta))
        trials = 0
        for step_count in range(MOST_NEWTON_STEPS):
            gradient = sums.statistics.gradient + bound.gradient(theta)
            try:
                step = self._compute_newton_step(theta, sums, gradient, bound.precision(theta))
            except ValueError as error:
                if step_count == 0:
                    raise
                raise NoModeError(RUNAWAY.format(steps=step_count)) from error
            # Twice the gain that the quadratic expects: the squared distance to the mode.
            decrement = float(gradient @ step)
            # Sums that are moved resolve small gains, sums over n rows do not.
            rounding = ROUNDING_OF_MOVED if quadratic else ROUNDING_OF_SUMS
            if decrement <= limit**2 or decrement <= rounding * abs(height):
                return theta, sums, step_count
            if quadratic and isinstance(bound, BoundGaussian):
                # The objective is quadratic: this step ends at its mode.
                return theta + step, sums.with_theta_moved(step), 1

            # No name for the present point: it would keep its sums in memory during the next step.
            reached, tried = self._search_along(
                step,
                _Point(theta, sums, height),
                bound,
                decrement,
                quadratic,
                most=MOST_TRIALS - trials,
            )
            trials += tried
            if reached is None:
                if tried <= HALVINGS:  # the limit of all trials ended the search
                    self._report_no_convergence(step_count)
                else:
                    self._report_stop(step_count, decrement)
                return theta, sums, step_count
            theta, sums, height = reached

        self._report_no_convergence(MOST_NEWTON_STEPS)
        return theta, sums, MOST_NEWTON_STEPS

    def _search_along(
        self,
        step: Tensor,
        start: _Point,
        bound: BoundPrior,
        decrement: float,
        quadratic: bool,
        most: int,
    ) -> tuple[_Point | None, int]:
        """Halve a step (P,) until it raises the log posterior by a share of what is expected.

        Close to the mode that gain is below rounding error, and the full step is taken. bound: the
        prior. decrement: twice the gain that is expected of the full step. quadratic: whether the
        sums at any θ follow without a pass. most: the number of steps that may be tried. Returns
        the point that was reached, and the number of steps that were tried. The point is None where
        none of HALVINGS + 1 steps is good enough, and where `most` ends the search.
        """
        is_trusted = self.linear and decrement <= TRUSTED_DECREMENT**2
        for halvings in range(HALVINGS + 1):
            if halvings == most:
                return None, halvings
            size = 0.5**halvings
            theta = start.theta + size * step
            sums = start.sums.with_theta_moved(size * step) if quadratic else self.collect(theta)
            height = sums.statistics.log_likelihood + float(bound.log_prob(theta))
            gain = SUFFICIENT * size * decrement
            enough = start.height + gain - ROUNDING_OF_HEIGHT * abs(start.height)
            if height >= enough or is_trusted:
                return _Point(theta, sums, height), halvings + 1

        return None, HALVINGS + 1

    def _has_approximate_curvature(self, sums: Sums) -> bool:
        """Return whether the sums are those of a last layer with only an approximate curvature."""
        return self.linear and not sums.newton_curvature.exact

    def _choose_distance_limit(self, theta: Tensor, sums: Sums, nearly: bool) -> float:
        """Return the distance to the mode at which the ascent from θ (P,) ends.

        The distance is in posterior standard deviations. sums: at θ. nearly: as in `find_mode`.
        """
        if nearly:
            return NEARLY * math.sqrt(len(theta))
        if self._has_approximate_curvature(sums) and not self.gaussian:
            return APPROXIMATE * math.sqrt(len(theta))
        return DECREMENT_LINEAR if self.linear else DECREMENT_OTHER

    def _compute_newton_step(
        self, theta: Tensor, sums: Sums, gradient: Tensor, prior_precision: Tensor
    ) -> Tensor:
        """Compute the Newton step (P,) at θ (P,), where the sums were taken, for a gradient (P,).

        prior_precision: (P,) or (P, P). A last layer with an approximate curvature takes conjugate
        gradients, a pass for each product. Raises ValueError where the curvature cannot be
        factorised.
        """
        if not self._has_approximate_curvature(sums) or self.make_products_at is None:
            return sums.compute_newton_step(gradient, prior_precision)
        preconditioner = factorise_for_uphill_step(sums.statistics.curvature, prior_precision)
        return solve_newton_step_by_products(
            self.make_products_at(theta),
            gradient,
            prior_precision,
            preconditioner,
            tolerance=PRECISE,
            most=MOST_PRODUCTS,
        )

    def _report_stop(self, steps: int, decrement: float) -> None:
        """Note that no shorter step raises the log posterior after this number of steps.

        decrement: the squared distance to the mode. Far from the mode this also warns, or raises
        NoModeError if `refuses`.
        """
        note = f"polish stopped after {steps} steps: no smaller step raises the log posterior"
        is_far = decrement > VISIBLE_DECREMENT**2
        if self.refuses and is_far:
            raise NoModeError(note)
        self.notes.append(note)
        if is_far:
            warn(
                f"{note}, though it is {math.sqrt(decrement):.2g} posterior standard deviations "
                "from a mode by its gradient. Likely causes: (a) a log density with kinks; (b) a "
                "network in single precision, whose rounding hides the gain. Use mode='tilt', a "
                "smooth log density, or model.double().",
                RuntimeWarning,
            )

    def _report_no_convergence(self, steps: int) -> None:
        """Note and warn that this number of steps did not reach the mode.

        Raises NoModeError in place of the warning if `refuses`.
        """
        note = f"polish did not converge in {steps} Newton steps"
        if self.refuses:
            raise NoModeError(note)
        self.notes.append(note)
        warn(
            f"polish did not reach the mode in {steps} Newton steps (see posterior.report). Train "
            "the network further, use a stronger prior, or mode='tilt'.",
            RuntimeWarning,
        )
