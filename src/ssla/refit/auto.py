"""The output refit first; a refit of the weights where that is doubtful."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from ssla.data import Inputs
from ssla.refit.outputs import OutputLogDensity
from ssla.refit.weights import WeightLogDensity, WeightRefit
from ssla.state import State

STEP_ERROR = 0.2  # error in log density for a step of one posterior standard deviation; it grows with the step's square
MASS_ERROR = 20.0  # error in log density over that of the mass
CLASS_SHARE = 0.05  # classes below this probability do not make an input doubtful


@dataclass(frozen=True, eq=False)
class AutoRefit:
    """The output refit where it is accurate enough, a refit of the weights where that is doubtful.

    `target` is the error in log density, a mean over y of its absolute value, that the output refit may have. It is not known
    without a refit, but two indicators are: how far a plausible y (the ends of a 95% interval) moves the weights, s posterior
    standard deviations, and the predictive's mass, off one by m. An input is doubtful where STEP_ERROR·s² or MASS_ERROR·m is
    above the target, or where its output predictive was flagged (not converged, inaccurate). Classes have s only: their output
    probabilities are integrals with a mass of one. With Gaussian noise and a linear
    model the output refit is exact, and nothing is doubtful. `predictive.diagnostics.rung` and `.reason` state for each input
    which rung answered, and why.

    The two factors are measured (benchmarks/doubt.py, docs/refits.md): of the inputs that are left to the output refit one to
    three in a hundred are off by more than the target. They are indicators, not bounds.
    """

    target: float = 0.05
    weights: WeightRefit = field(default_factory=WeightRefit)

    name = "auto"
    level = 0.95  # of the interval whose ends are the plausible y

    def __post_init__(self) -> None:
        if isinstance(self.target, bool | str) or not self.target > 0:
            raise ValueError(f"target must be a number above zero, for example 0.05, but is {self.target!r}.")
        if not isinstance(self.weights, WeightRefit):
            raise TypeError(
                f"weights must be a WeightRefit, for example ssla.WeightRefit(max_steps=50), but is {self.weights!r}."
            )

    def __call__(self, posterior: State, x: Inputs) -> WeightLogDensity:
        return self.weights(posterior, x)

    def reasons(self, weights: WeightLogDensity, mass: Tensor, flagged: Tensor, likely: Tensor) -> list[str]:
        """For each row why its output predictive is doubtful; empty where it is not.

        Of the output predictive: its mass (N,), whether it was flagged (N,), and the probabilities of the classes (N, C) or the
        ends of an interval (N, 2).
        """
        off = (mass.double().cpu() - 1).abs()
        step = largest_step(weights.output, likely)
        words = []
        for m, s, bad in zip(off.tolist(), step.tolist(), flagged.tolist(), strict=True):
            found = []
            if not MASS_ERROR * m <= self.target:
                found.append(f"mass off by {m:.2g}")
            if not STEP_ERROR * s**2 <= self.target:
                found.append(f"step of {s:.2g} sd")
            if bad:
                found.append("flagged")
            words.append(", ".join(found))
        return words


def largest_step(output: OutputLogDensity, likely: Tensor) -> Tensor:
    """How far a plausible y moves the weights, in posterior standard deviations (N,). `likely` as in AutoRefit.reasons."""
    likely = likely.double().cpu()
    if output.likelihood.support_for(output.marginal.mean.shape[1]).kind != "class":
        return output.step(likely).amax(1)
    likely, y = likely.topk(min(likely.shape[1], round(1 / CLASS_SHARE)))  # no more than these have that probability
    return torch.where(likely >= CLASS_SHARE, output.step(y.double()), torch.zeros_like(likely)).amax(1)
