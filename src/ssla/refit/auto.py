"""Output first; the weights where that is doubtful."""

from __future__ import annotations

from dataclasses import dataclass, field

from ssla.data import Inputs
from ssla.posterior import Posterior
from ssla.refit.weights import WeightLogDensity, WeightRefit

STEP_ERROR = 0.2  # error in log density for a step of one posterior standard deviation; it grows with the step's square
MASS_ERROR = 20.0  # error in log density over that of the mass


@dataclass(frozen=True, eq=False)
class AutoRefit:
    """The output refit where it can be trusted, a refit of the weights where it is doubtful.

    `target` is the error in log density, a mean over y of its absolute value, that the output refit may have. It is not known
    without a refit, but two signs of it are: how far a plausible y (the ends of a 95% interval) moves the weights, s posterior
    standard deviations, and the predictive's mass, off one by m. An input is doubtful where STEP_ERROR·s² or MASS_ERROR·m is
    above the target, or where its output predictive was flagged (not converged, inaccurate). With Gaussian noise and a linear
    model the output refit is exact, and nothing is doubtful. `predictive.diagnostics.rung` and `.reason` say for each input
    which rung answered, and why.

    The two factors are measured (benchmarks/doubt.py, docs/refits.md): of the inputs that are left to the output refit one to
    three in a hundred are off by more than the target. They are signs, not bounds.
    """

    target: float = 0.05
    weights: WeightRefit = field(default_factory=WeightRefit)

    name = "auto"

    def __post_init__(self) -> None:
        if isinstance(self.target, bool | str) or not self.target > 0:
            raise ValueError(f"target must be a number above zero, for example 0.05, but is {self.target!r}.")
        if not isinstance(self.weights, WeightRefit):
            raise TypeError(
                f"weights must be a WeightRefit, for example ssla.WeightRefit(max_steps=50), but is {self.weights!r}."
            )

    def __call__(self, posterior: Posterior, x: Inputs) -> WeightLogDensity:
        return self.weights(posterior, x)
