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
    make_log_density_of_marginal,
)
from ssla.refit.published_settings import PaperSettings, paper_settings
from ssla.refit.weights.weight_log_density import WeightLogDensity
from ssla.refit.weights.weight_refit import WeightRefit

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
    "PaperSettings",
    "PlugIn",
    "Refit",
    "WeightLogDensity",
    "WeightRefit",
    "compute_increments_at",
    "make_log_density_of_marginal",
    "paper_settings",
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
    """Return the refit of a name, or `refit` itself if it is an object.

    Raises ValueError for an unknown name, and TypeError for a class and for an object that is not
    callable or has no `name`.
    """
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


def compute_increments_at(rung: Refit, posterior: Posterior, x: Inputs, y: Any) -> Increments:
    """Return the un-normalised log densities of y at inputs x (N rows), as increments.

    y: a target for each row, or k candidates for each; a number is (N,) or (N, k), a vector (N, D)
    or (N, k, D). The increments have y's shape, without D, and the dtype and the device of the
    rung's answers. Raises ValueError if the shape of y does not fit, or if a value is not in the
    support of the likelihood.
    """
    log_density = rung(posterior, x)
    rows, outputs = log_density.marginal.mean.shape
    support = log_density.likelihood.support_for(outputs)
    is_vector = support.kind == "vector"
    y = as_tensor(y).to("cpu", torch.float64)
    _check_shape(y, rows, outputs, is_vector)
    support.check(y.reshape(-1, outputs) if is_vector else y.flatten(), outputs)
    return log_density(y).map(lambda increment: increment.to(log_density.like))


def _check_shape(y: Tensor, rows: int, outputs: int, is_vector: bool) -> None:
    """Raise ValueError unless y has one target, or several candidates, for each row of x.

    rows: the number of rows of x. is_vector: whether a target has a value for each of the outputs;
    False: it is a number.
    """
    if is_vector:
        fits = y.dim() in (2, 3) and y.shape[0] == rows and y.shape[-1] == outputs
        expected = (
            f"({rows}, {outputs}), or ({rows}, k, {outputs}) with k candidates for each input"
        )
    else:
        fits = y.dim() in (1, 2) and y.shape[0] == rows
        expected = (
            f"({rows},) with one value for each input, or ({rows}, k) with k candidates for each"
        )
    if not fits:
        raise ValueError(f"y must have shape {expected}, but has {tuple(y.shape)}.")
