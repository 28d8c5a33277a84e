"""Refit in the outputs: one Newton step, or all the way to the mode."""

from __future__ import annotations

from dataclasses import dataclass

from ssla.data import Inputs
from ssla.refit.increments import Rule, at_mode, one_step
from ssla.refit.outputs import OutputLogDensity, on_posterior
from ssla.state import State


@dataclass(frozen=True)
class OutputRefit:
    """f̃ = mode of log p(y|f) − ½(f−f̂)ᵀK⁻¹(f−f̂): the refit of the linearised network, exactly, in C dimensions.

    steps = None goes to the mode; steps = 1 takes one Newton step and its quadratic value. Both are exact for
    Gaussian noise and a network linear in its free parameters.
    """

    steps: int | None = None

    moves = True

    def __post_init__(self) -> None:
        if self.steps not in (None, 1):
            raise ValueError(f"steps must be None (to the mode) or 1 (one Newton step), but is {self.steps!r}.")

    @property
    def name(self) -> str:
        return "output" if self.steps is None else "newton"

    @property
    def rule(self) -> Rule:
        return at_mode if self.steps is None else one_step

    def __call__(self, posterior: State, x: Inputs) -> OutputLogDensity:
        return on_posterior(self, posterior, x)
