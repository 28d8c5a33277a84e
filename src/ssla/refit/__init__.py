"""The refits, from the cheapest to the most exact: plug_in (the baseline), none (ASSLA), newton, output, weights (SSLA)."""

from __future__ import annotations

from ssla._checks import unknown_name
from ssla.refit.auto import AutoRefit
from ssla.refit.increments import Increments
from ssla.refit.none import NoRefit, PlugIn
from ssla.refit.output import OutputRefit
from ssla.refit.outputs import ByChunks, Density, LogDensity, OutputLogDensity, OutputRung, Refit, on_marginal
from ssla.refit.weights import WeightLogDensity, WeightRefit
from ssla.refit.words import increments_at

__all__ = [
    "REFITS",
    "AutoRefit",
    "ByChunks",
    "Density",
    "Increments",
    "LogDensity",
    "NoRefit",
    "OutputLogDensity",
    "OutputRefit",
    "OutputRung",
    "PlugIn",
    "Refit",
    "WeightLogDensity",
    "WeightRefit",
    "increments_at",
    "on_marginal",
    "resolve",
]

REFITS: dict[str, Refit] = {
    "plug_in": PlugIn(),
    "none": NoRefit(),
    "newton": OutputRefit(steps=1),
    "output": OutputRefit(),
    "weights": WeightRefit(),
    "auto": AutoRefit(),
}


def resolve(refit: str | Refit) -> Refit:
    """The door for names; objects pass."""
    if not isinstance(refit, str):
        if isinstance(refit, type) or not callable(refit) or not hasattr(refit, "name"):
            raise TypeError(
                f"refit must be one of {', '.join(map(repr, REFITS))} or an object such as ssla.NoRefit(), but is {refit!r}."
            )
        return refit
    if refit not in REFITS:
        raise ValueError(unknown_name("refit", refit, REFITS))
    return REFITS[refit]
