"""No refit: the paper's ASSLA, and the plug-in with which it is compared."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from ssla._checks import one_of
from ssla.data import Inputs
from ssla.refit.increments import CURVATURES, OBSERVED, Rule, plug_in, without_refit
from ssla.refit.outputs import OutputLogDensity, on_posterior
from ssla.state import State


@dataclass(frozen=True)
class NoRefit:
    """θ̃ = θ̂: log p(y|f̂) − ½ log|I + Λ K|.

    curvature: "observed" (the paper's Algorithm 2), "fisher", or "empirical" (its Corollary 3).

    With Gaussian noise the curvature does not depend on y, so the normalised predictive *is* the plug-in; with
    "empirical" it is even tighter. It is here because it is published; it is not recommended.
    """

    curvature: str = OBSERVED

    name = "none"
    moves = False

    def __post_init__(self) -> None:
        one_of("curvature", self.curvature, CURVATURES)

    @property
    def rule(self) -> Rule:
        return partial(without_refit, curvature=self.curvature)

    def __call__(self, posterior: State, x: Inputs) -> OutputLogDensity:
        return on_posterior(self, posterior, x)


@dataclass(frozen=True)
class PlugIn:
    """log p(y|f̂): the network's own answer, as if its weights were known. The baseline; its mass is 1."""

    name = "plug_in"
    moves = False

    @property
    def rule(self) -> Rule:
        return plug_in

    def __call__(self, posterior: State, x: Inputs) -> OutputLogDensity:
        return on_posterior(self, posterior, x)
