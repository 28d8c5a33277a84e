"""The method in the paper's words."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ssla.data import Inputs, as_tensor
from ssla.posterior import Posterior
from ssla.refit.increments import Increments
from ssla.refit.none import NoRefit
from ssla.refit.outputs import Refit
from ssla.refit.weights import WeightRefit


def ssla(posterior: Posterior, x: Inputs, y: Any, refit: WeightRefit | None = None) -> Increments:
    """SSLA: refit all weights in scope on the data plus (x, y), for each y. Un-normalised log densities by their increments.

    y is (N,), or (N, k) for k candidates at each input; D targets (N, D) or (N, k, D). One refit for each y; options in `refit`.

    >>> ssla.ssla(posterior, x, y).total                     # doctest: +SKIP
    """
    return _increments(WeightRefit() if refit is None else refit, posterior, x, y)


def assla(posterior: Posterior, x: Inputs, y: Any, refit: NoRefit | None = None) -> Increments:
    """ASSLA: no refit, θ̃ = θ̂: log p(y|f̂) − ½ log|I + ΛK|. Shapes as for `ssla`.

    With Gaussian noise it is the plug-in times a constant: it does not include the uncertainty of the network.
    """
    return _increments(NoRefit() if refit is None else refit, posterior, x, y)


def _increments(rung: Refit, posterior: Posterior, x: Inputs, y: Any) -> Increments:
    if not isinstance(posterior, Posterior):
        raise TypeError(f"The first argument must be a Posterior, as ssla.fit returns it, but is a {type(posterior).__name__}.")
    log_density = rung(posterior, x)
    f = log_density.marginal.mean
    support = log_density.likelihood.support_for(f.shape[1])
    value = _targets(as_tensor(y).to("cpu", torch.float64), f.shape[0], f.shape[1], support.kind == "vector")
    support.check(value.reshape(-1, f.shape[1]) if support.kind == "vector" else value.flatten(), f.shape[1])
    return log_density(value).map(lambda part: part.to(log_density.like))


def _targets(y: Tensor, rows: int, outputs: int, vector: bool) -> Tensor:
    if vector:
        if y.dim() in (2, 3) and y.shape[0] == rows and y.shape[-1] == outputs:
            return y
        expected = f"({rows}, {outputs}), or ({rows}, k, {outputs}) with k candidates for each input"
    else:
        if y.dim() in (1, 2) and y.shape[0] == rows:
            return y
        expected = f"({rows},) with one value for each input, or ({rows}, k) with k candidates for each"
    raise ValueError(f"y must have shape {expected}, but has {tuple(y.shape)}.")
