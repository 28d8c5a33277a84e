"""The Bayesian network that sampling and mean-field inference share, as a numpyro program.

Weights w ~ N(0, s²/inputs of the layer), biases b ~ N(0, s²), both as s times standard normals,
which is the better geometry for both. The last layer gives μ, or (μ, log σ²); with μ alone, σ ~
HalfNormal(1). Rows should be standardised.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ssla._checks import unknown_name
from ssla_paper.peers import GaussianMixture, library

INSTALL = "numpyro"
MOST_LOG_VARIANCE = 14.0


@dataclass(frozen=True)
class Program:
    """y ~ N(μ(x), σ(x)²), with μ and σ by a multilayer perceptron."""

    inputs: int
    hidden: Sequence[int]
    activation: str
    heteroscedastic: bool
    prior_sd: float

    def parts(self) -> dict[str, tuple[tuple[int, ...], float]]:
        """Name -> shape, and the prior's standard deviation."""
        widths = (self.inputs, *self.hidden, 2 if self.heteroscedastic else 1)
        found: dict[str, tuple[tuple[int, ...], float]] = {}
        for i, (width, following) in enumerate(pairwise(widths)):
            found[f"w{i}"] = ((width, following), self.prior_sd / width**0.5)
            found[f"b{i}"] = ((following,), self.prior_sd)
        return found

    def outputs(self, values: Mapping[str, Any], x: Any) -> tuple[Any, Any]:
        """μ and σ at the rows, from one draw of the standard normals (and of σ)."""
        jax = library("jax", INSTALL)
        act = _activation(self.activation)
        for i in range(len(self.hidden) + 1):
            (_, sd), (_, offset) = self.parts()[f"w{i}"], self.parts()[f"b{i}"]
            x = x @ (sd * values[f"w{i}"]) + offset * values[f"b{i}"]
            x = act(x) if i < len(self.hidden) else x
        if not self.heteroscedastic:
            return x[:, 0], jax.numpy.broadcast_to(values["sigma"], x[:, 0].shape)
        return x[:, 0], jax.numpy.exp(
            0.5 * jax.numpy.clip(x[:, 1], -MOST_LOG_VARIANCE, MOST_LOG_VARIANCE)
        )

    def model(self, batch_size: int | None = None) -> Callable[..., None]:
        """The program itself: model(x, y).

        batch_size: rows of a random subset, weighted to the full data.
        """
        numpyro, dist = library("numpyro", INSTALL), library("numpyro.distributions", INSTALL)

        def model(x: Any, y: Any) -> None:
            values = {
                name: numpyro.sample(name, dist.Normal(0, 1).expand(shape).to_event(len(shape)))
                for name, (shape, _) in self.parts().items()
            }
            if not self.heteroscedastic:
                values["sigma"] = numpyro.sample("sigma", dist.HalfNormal(1))
            size = None if batch_size is None or batch_size >= len(x) else batch_size
            with numpyro.plate("rows", len(x), subsample_size=size) as rows:
                mean, sd = self.outputs(values, x if size is None else x[rows])
                numpyro.sample("y", dist.Normal(mean, sd), obs=y if size is None else y[rows])

        return model

    def mixture(self, draws: Mapping[str, Any], new: Any) -> GaussianMixture:
        """One Gaussian for each draw: every array of `draws` has the draws in front."""
        jax = library("jax", INSTALL)
        mean, sd = jax.vmap(lambda values: self.outputs(values, new))(dict(draws))
        return GaussianMixture(
            *(torch.from_numpy(np.array(part, dtype=np.float64)) for part in (mean, sd))
        )


def arrays(*tensors: Tensor) -> tuple[Any, ...]:
    """Tensors -> jax arrays, in single precision (jax's own)."""
    jax = library("jax", INSTALL)
    return tuple(jax.numpy.asarray(tensor.detach().float().numpy()) for tensor in tensors)


def _activation(name: str) -> Callable[[Any], Any]:
    jax = library("jax", INSTALL)
    known: dict[str, Callable[[Any], Any]] = {
        "tanh": jax.numpy.tanh,
        "relu": jax.nn.relu,
        "silu": jax.nn.silu,
    }
    if name not in known:
        raise ValueError(unknown_name("activation", name, known))
    return known[name]
