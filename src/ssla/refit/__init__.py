"""The refits, from the cheapest to the most exact: plug_in (the baseline), none (ASSLA),
newton, output, weights (SSLA).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ssla._checks import unknown_name
from ssla.data import Inputs, as_tensor
from ssla.refit.auto import AutoRefit
from ssla.refit.increments import Increments
from ssla.refit.outputs import (
    ByChunks,
    Density,
    LogDensity,
    NoRefit,
    OutputLogDensity,
    OutputRefit,
    OutputRung,
    PlugIn,
    Refit,
    on_marginal,
)
from ssla.refit.weights.weight_refit import WeightLogDensity, WeightRefit

if TYPE_CHECKING:
    from ssla.posterior import Posterior

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
                f"refit must be one of {', '.join(map(repr, REFITS))} or an object such as "
                f"ssla.NoRefit(), but is {refit!r}."
            )
        return refit
    if refit not in REFITS:
        raise ValueError(unknown_name("refit", refit, REFITS))
    return REFITS[refit]


def increments_at(rung: Refit, posterior: Posterior, x: Inputs, y: Any) -> Increments:
    """Un-normalised log densities at y by their increments."""
    log_density = rung(posterior, x)
    f = log_density.marginal.mean
    support = log_density.likelihood.support_for(f.shape[1])
    value = _targets(
        as_tensor(y).to("cpu", torch.float64), f.shape[0], f.shape[1], support.kind == "vector"
    )
    support.check(
        value.reshape(-1, f.shape[1]) if support.kind == "vector" else value.flatten(), f.shape[1]
    )
    return log_density(value).map(lambda part: part.to(log_density.like))


def _targets(y: Tensor, rows: int, outputs: int, vector: bool) -> Tensor:
    if vector:
        if y.dim() in (2, 3) and y.shape[0] == rows and y.shape[-1] == outputs:
            return y
        expected = (
            f"({rows}, {outputs}), or ({rows}, k, {outputs}) with k candidates for each input"
        )
    else:
        if y.dim() in (1, 2) and y.shape[0] == rows:
            return y
        expected = (
            f"({rows},) with one value for each input, or ({rows}, k) with k candidates for each"
        )
    raise ValueError(f"y must have shape {expected}, but has {tuple(y.shape)}.")
