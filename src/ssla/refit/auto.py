"""Output first; the weights where that is doubtful."""

from __future__ import annotations

from dataclasses import dataclass, field

from ssla.batches import Inputs
from ssla.posterior import Posterior
from ssla.refit.weights import WeightExpansion, WeightRefit


@dataclass(frozen=True, eq=False)
class AutoRefit:
    """The output refit where it can be trusted, a refit of the weights where it is doubtful.

    An input is doubtful where (a) the mass of its output predictive is off one by more than `target`, (b) a plausible y moves the
    weights by more than `step` posterior standard deviations, so that the linearised network may not hold, or (c) its output
    predictive was flagged (not converged, inaccurate). With Gaussian noise and a linear model the output refit is exact, and
    nothing is doubtful. `predictive.diagnostics.rung` and `.reason` say for each input which rung answered, and why.

    The two tests are signs, not bounds: a mass of one does not prove a predictive right.
    """

    target: float = 0.01
    step: float = 1.0
    weights: WeightRefit = field(default_factory=WeightRefit)

    name = "auto"

    def __post_init__(self) -> None:
        for what, value in (("target", self.target), ("step", self.step)):
            if isinstance(value, bool | str) or not value > 0:
                raise ValueError(f"{what} must be a number above zero, for example 0.01, but is {value!r}.")
        if not isinstance(self.weights, WeightRefit):
            raise TypeError(
                f"weights must be a WeightRefit, for example ssla.WeightRefit(max_steps=50), but is {self.weights!r}."
            )

    def __call__(self, posterior: Posterior, x: Inputs) -> WeightExpansion:
        return self.weights(posterior, x)
