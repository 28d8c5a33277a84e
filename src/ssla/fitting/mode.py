"""The mode: Newton ascent of the log posterior, a pass for each step unless the sums determine it.

Where a last layer is too large for its dense curvature, steps with Kronecker factors or a diagonal
alone do not converge. The Newton step is then found by conjugate gradients, with exact products of
the curvature (a pass each) and the structure as the preconditioner.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from ssla._checks import warn
from ssla.fitting.sums import Sums, climbing, newton_by_products
from ssla.maths.conjugate import Product
from ssla.priors import BoundGaussian, BoundPrior

RUNAWAY = (
    "polish diverges: after {steps} Newton steps the curvature of the log posterior is no longer "
    "positive definite. Likely cause: there is no mode nearby, for example because a variance that "
    "the network predicts can go to zero on few rows. Use a stronger prior, for example "
    "prior=ssla.priors.Gaussian(precision=1.0), or keep the weights by mode='tilt'."
)
MOST_NEWTON_STEPS = 200
MOST_TRIALS = 2000  # steps tried in one polish, shortened ones included: a pass over the data each
# polish ends when it is this many posterior standard deviations from the mode: Newton converges
# quadratically for a last layer; for other weights the Gauss–Newton steps converge linearly
DECREMENT_LINEAR, DECREMENT_OTHER = 1e-10, 1e-5
APPROXIMATE = (
    0.01  # standard deviations a parameter, where a last layer has only an approximate curvature
)
# by which conjugate gradients reduce the residual of a Newton step. A guess: its error is that of
# the next step
PRECISE = 0.03
MOST_PRODUCTS = 30  # for one Newton step
NEARLY = 0.3  # standard deviations a parameter
VISIBLE_DECREMENT = 0.1  # farther than this from the mode, the end of a polish is a warning
TRUSTED_DECREMENT = (
    1e-4  # so close to the mode, the gain is below rounding error and the full step is safe
)


class NoModeError(ValueError):
    """Newton steps ran to where the curvature cannot be factorised, or (`Polish.refuses`)
    reached no mode.
    """


@dataclass(frozen=True, eq=False)
class Polish:
    """Newton steps to the mode."""

    collect: Callable[[Tensor], Sums]  # a pass: the sums at θ
    linear: bool  # whether the outputs are linear in θ
    gaussian: bool  # whether the noise is Gaussian
    notes: list[str]
    refuses: bool = False  # where no mode is reached: NoModeError in place of a warning
    product: Callable[[Tensor], Product] | None = (
        None  # θ -> products with Σ JᵀΛJ there, a pass each
    )

    def run(
        self, theta: Tensor, sums: Sums, bound: BoundPrior, nearly: bool = False
    ) -> tuple[Tensor, Sums, int]:
        """Safeguarded Newton ascent of ℓ_D + log π from θ; nearly to the mode where a prior is
        still to be chosen.
        """
        approximate = self.linear and not sums.newton_curvature.exact
        enough = DECREMENT_LINEAR if self.linear else DECREMENT_OTHER
        enough = (
            APPROXIMATE * math.sqrt(len(theta)) if approximate and not self.gaussian else enough
        )
        enough = NEARLY * math.sqrt(len(theta)) if nearly else enough
        quadratic = self.linear and self.gaussian and sums.newton_curvature.exact
        height = sums.statistics.log_likelihood + float(bound.log_prob(theta))
        trials = 0
        for step_count in range(MOST_NEWTON_STEPS):
            gradient = sums.statistics.gradient + bound.gradient(theta)
            try:
                own = bound.precision(theta)
                if approximate and self.product is not None:
                    operator = climbing(sums.statistics.curvature, own)
                    step = newton_by_products(
                        self.product(theta), gradient, own, operator, PRECISE, MOST_PRODUCTS
                    )
                else:
                    step = sums.newton_step(gradient, own)
            except ValueError as error:
                if step_count == 0:
                    raise
                raise NoModeError(RUNAWAY.format(steps=step_count)) from error
            decrement = float(gradient @ step)
            # sums that are moved know small gains, sums over n do not
            rounding = 1e-22 if quadratic else 1e-15
            if decrement <= enough**2 or decrement <= rounding * abs(height):
                return theta, sums, step_count
            if quadratic and isinstance(bound, BoundGaussian):
                return theta + step, sums.moved(step), 1
            trusted = self.linear and decrement <= TRUSTED_DECREMENT**2
            size = 1.0
            while True:
                if trials == MOST_TRIALS:
                    return theta, sums, self._not_converged(step_count)
                trials += 1
                there = theta + size * step
                trial = sums.moved(size * step) if quadratic else self.collect(there)
                new = trial.statistics.log_likelihood + float(bound.log_prob(there))
                if new >= height + 1e-4 * size * decrement - 1e-13 * abs(height) or trusted:
                    break
                size /= 2
                if size < 1e-8:
                    self._stopped(
                        f"polish stopped after {step_count} steps: no smaller step raises the log "
                        "posterior",
                        decrement,
                    )
                    return theta, sums, step_count
            theta, sums, height = there, trial, new
        return theta, sums, self._not_converged(MOST_NEWTON_STEPS)

    def _stopped(self, note: str, decrement: float) -> None:
        if self.refuses and decrement > VISIBLE_DECREMENT**2:
            raise NoModeError(note)
        self.notes.append(note)
        if decrement > VISIBLE_DECREMENT**2:
            warn(
                f"{note}, though it is {math.sqrt(decrement):.2g} posterior standard deviations "
                "from a mode by its gradient. Likely causes: (a) a log density with kinks; (b) a "
                "network in single precision, whose rounding hides the gain. Use mode='tilt', a "
                "smooth log density, or model.double().",
                RuntimeWarning,
            )

    def _not_converged(self, steps: int) -> int:
        note = f"polish did not converge in {steps} Newton steps"
        if self.refuses:
            raise NoModeError(note)
        self.notes.append(note)
        warn(
            f"polish did not reach the mode in {steps} Newton steps (see posterior.report). Train "
            "the network further, use a stronger prior, or mode='tilt'.",
            RuntimeWarning,
        )
        return steps
