"""The output refit first; a refit of the weights where that is doubtful.

A rung is a kind of refit. An input, a row of x, is doubtful where an indicator says that the output
refit may be off by more than the target.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from torch import Tensor

from ssla.data import Inputs
from ssla.refit.outputs import OutputLogDensity
from ssla.refit.weights.at_prediction import CANDIDATE
from ssla.refit.weights.weight_log_density import WeightLogDensity
from ssla.refit.weights.weight_refit import WeightRefit
from ssla.report import LAPLACE, VARIATIONAL

if TYPE_CHECKING:
    from ssla.posterior import Posterior

# All three are measured by benchmarks/accuracy/auto_rule.py. STEP_ERROR is the error in log density
# for a step of one posterior standard deviation, which grows with the square of the step.
# MASS_ERROR is the error in log density over the error of the mass.
STEP_ERROR, MASS_ERROR = 0.2, 20.0
# The error in log probability over the probability of all classes but the most probable one.
CLASS_ERROR = {LAPLACE: 1.2, VARIATIONAL: 0.7}


@dataclass(frozen=True, eq=False)
class AutoRefit:
    """The output refit where it is accurate enough, a refit of the weights where that is doubtful.

    `target` is the error in log density, a mean over y of its absolute value, that the output refit
    may have. It is not known without a refit, but two indicators are: how far a plausible y (the
    ends of a 95% interval) moves the weights, s posterior standard deviations, and the predictive's
    mass, off one by m. An input is doubtful where STEP_ERROR·s² or MASS_ERROR·m is above the
    target, or where its output predictive was flagged (not converged, inaccurate). For classes the
    indicator is the probability of all classes but the most probable one, times CLASS_ERROR of the
    posterior's Gaussian. With Gaussian noise and a linear model the output refit is exact, and
    nothing is doubtful. `predictive.diagnostics.rung` and `.reason` state for each input which rung
    answered, and why.

    The factors are measured (benchmarks/accuracy/auto_rule.py, docs/refits.md): of the inputs that
    are left to the output refit, one to three in a hundred are off by more than the target. They
    are indicators, not bounds.
    """

    target: float = 0.05
    weights: WeightRefit = field(default_factory=WeightRefit)

    name = "auto"
    level = 0.95  # of the interval whose ends are the plausible y

    def __post_init__(self) -> None:
        """Check the arguments.

        Raises ValueError for a target that is not above zero, and for options of the refit that
        make it less accurate, and TypeError for `weights` that are not a WeightRefit.
        """
        if isinstance(self.target, bool | str) or not self.target > 0:
            raise ValueError(
                f"target must be a number above zero, for example 0.05, but is {self.target!r}."
            )
        if not isinstance(self.weights, WeightRefit):
            raise TypeError(
                "weights must be a WeightRefit, for example ssla.WeightRefit(max_steps=50), but "
                f"is {self.weights!r}."
            )
        if self.weights.candidates is not None or self.weights.refitted_point != CANDIDATE:
            raise ValueError(
                "AutoRefit refits where the output refit is not accurate enough, so it needs the "
                "accurate refit: WeightRefit(at='candidate') without candidates and half_width."
            )

    def __call__(self, posterior: Posterior, x: Inputs) -> WeightLogDensity:
        """Return the log density of the refit of the weights at x.

        It holds the output refit as `output`; `find_reasons` decides which inputs are refitted.
        """
        return self.weights(posterior, x)

    def find_reasons(
        self, weights: WeightLogDensity, mass: Tensor, flagged: Tensor, likely: Tensor
    ) -> list[str]:
        """Return for each row why its output predictive is doubtful; an empty text where it is not.

        weights: the log density whose output refit is judged. mass (N,): of the output predictive.
        flagged (N,): whether it did not converge or is inaccurate. likely: the probabilities of
        classes (N, C), or the ends of an interval of plausible y (N, 2).
        """
        if _is_for_classes(weights.output):
            factor = CLASS_ERROR[weights.posterior.report.gaussian]
            indicated = [
                self._list_class_reasons(rest_probability, factor)
                for rest_probability in (1 - likely.double().cpu().amax(1)).tolist()
            ]
        else:
            mass_errors = (mass.double().cpu() - 1).abs().tolist()
            steps = find_largest_step(weights.output, likely).tolist()
            indicated = [
                self._list_density_reasons(mass_error, step)
                for mass_error, step in zip(mass_errors, steps, strict=True)
            ]
        for reasons, is_flagged in zip(indicated, flagged.tolist(), strict=True):
            if is_flagged:
                reasons.append("flagged")
        return [", ".join(reasons) for reasons in indicated]

    def _list_class_reasons(self, rest_probability: float, factor: float) -> list[str]:
        """Return why a row is doubtful, as texts; an empty list if it is not.

        rest_probability: of all classes but the likeliest; NaN counts as doubtful. factor: the
        entry of CLASS_ERROR for the posterior's Gaussian.
        """
        if factor * rest_probability <= self.target:
            return []
        return [f"probability of {rest_probability:.2g} for other classes"]

    def _list_density_reasons(self, mass_error: float, step: float) -> list[str]:
        """Return why a row is doubtful, as texts; an empty list if it is not.

        mass_error: |mass − 1|. step: how far plausible y move the weights, in posterior standard
        deviations. NaN counts as doubtful.
        """
        reasons = []
        # `not … <=` rather than `>`, so that NaN counts as doubtful.
        if not MASS_ERROR * mass_error <= self.target:
            reasons.append(f"mass off by {mass_error:.2g}")
        if not STEP_ERROR * step**2 <= self.target:
            reasons.append(f"step of {step:.2g} sd")
        return reasons


def _is_for_classes(output: OutputLogDensity) -> bool:
    """Return whether y is a class."""
    return output.likelihood.support_for(output.marginal.mean.shape[1]).kind == "class"


def find_largest_step(output: OutputLogDensity, likely: Tensor) -> Tensor:
    """Return how far the ends of an interval move the weights: the larger of two steps (N,).

    likely: the two ends for each row (N, 2). The unit is posterior standard deviations.
    """
    return output.step_length(likely.double().cpu()).amax(1)
