"""The output refit first; a refit of the weights where that is doubtful."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from torch import Tensor

from ssla.data import Inputs
from ssla.refit.outputs import OutputLogDensity
from ssla.refit.weights.weight_refit import WeightLogDensity, WeightRefit
from ssla.report import LAPLACE, VARIATIONAL

if TYPE_CHECKING:
    from ssla.posterior import Posterior

# error in log density for a step of one posterior standard deviation; it grows with the step's
# square
STEP_ERROR = 0.2
MASS_ERROR = 20.0  # error in log density over that of the mass
CLASS_ERROR = {
    LAPLACE: 1.2,
    VARIATIONAL: 0.7,
}  # error in log probability over that of all classes but the most probable one


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

    The factors are measured (benchmarks/doubt.py, docs/refits.md): of the inputs that are left to
    the output refit one to three in a hundred are off by more than the target. They are indicators,
    not bounds.
    """

    target: float = 0.05
    weights: WeightRefit = field(default_factory=WeightRefit)

    name = "auto"
    level = 0.95  # of the interval whose ends are the plausible y

    def __post_init__(self) -> None:
        if isinstance(self.target, bool | str) or not self.target > 0:
            raise ValueError(
                f"target must be a number above zero, for example 0.05, but is {self.target!r}."
            )
        if not isinstance(self.weights, WeightRefit):
            raise TypeError(
                "weights must be a WeightRefit, for example ssla.WeightRefit(max_steps=50), but "
                f"is {self.weights!r}."
            )

    def __call__(self, posterior: Posterior, x: Inputs) -> WeightLogDensity:
        return self.weights(posterior, x)

    def reasons(
        self, weights: WeightLogDensity, mass: Tensor, flagged: Tensor, likely: Tensor
    ) -> list[str]:
        """For each row why its output predictive is doubtful; empty where it is not.

        Of the output predictive: its mass (N,), whether it was flagged (N,), and the probabilities
        of the classes (N, C) or the ends of an interval (N, 2).
        """
        if _of_classes(weights.output):
            others, error = (
                1 - likely.double().cpu().amax(1),
                CLASS_ERROR[weights.posterior.report.gaussian],
            )
            found = [
                [f"probability of {other:.2g} for other classes"]
                * (not error * other <= self.target)
                for other in others.tolist()
            ]
        else:
            off, step = (mass.double().cpu() - 1).abs(), largest_step(weights.output, likely)
            found = [
                [f"mass off by {m:.2g}"] * (not MASS_ERROR * m <= self.target)
                + [f"step of {s:.2g} sd"] * (not STEP_ERROR * s**2 <= self.target)
                for m, s in zip(off.tolist(), step.tolist(), strict=True)
            ]
        return [
            ", ".join(words + ["flagged"] * bad)
            for words, bad in zip(found, flagged.tolist(), strict=True)
        ]


def _of_classes(output: OutputLogDensity) -> bool:
    return output.likelihood.support_for(output.marginal.mean.shape[1]).kind == "class"


def largest_step(output: OutputLogDensity, likely: Tensor) -> Tensor:
    """How far the ends of an interval (N, 2) move the weights, in posterior standard deviations
    (N,).
    """
    return output.step(likely.double().cpu()).amax(1)
