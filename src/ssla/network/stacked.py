"""Plain chains of linear layers and elementwise functions, run for many weight vectors at once
by batched matrix products.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ssla.network.any_parameters import AnyParameters
from ssla.network.layout import Layout

ELEMENTWISE = (
    nn.Tanh,
    nn.ReLU,
    nn.Sigmoid,
    nn.GELU,
    nn.SiLU,
    nn.ELU,
    nn.LeakyReLU,
    nn.Softplus,
    nn.Identity,
    nn.Dropout,
)
# Rows × weight vectors that are computed together: larger arrays do not fit the processor's cache.
ROWS_AT_ONCE = 1 << 13
Step = tuple[str, str | None] | nn.Module
"""The names of the weight and the bias of a linear layer, or an elementwise function."""


@dataclass(frozen=True, eq=False)
class Stacked:
    """A chain of layers as a function f_θ of many θ (m, P); each free parameter is a range of θ."""

    network: AnyParameters
    steps: tuple[Step, ...]
    ranges: dict[str, tuple[int, int]]  # the first position in θ, and that after the last

    def parameters(self, thetas: Tensor) -> dict[str, Tensor]:
        """Return the free parameters (m, …) by name, for θ (m, P)."""
        shapes = self.network.layout.positions
        return {
            name: thetas[:, start:stop].reshape(-1, *shapes[name].shape)
            for name, (start, stop) in self.ranges.items()
        }

    def run(self, free: dict[str, Tensor], x: Tensor) -> Tensor:
        """Return f (m, b, C) for x (b, …), the same for all θ, or x (m, b, …), one for each θ.

        free: the free parameters (m, …) by name.
        """
        m = len(next(iter(free.values())))
        h = x.expand(m, -1, -1) if x.dim() == 2 else x
        tensors = {**self.network.rest, **free}
        for step in self.steps:
            if isinstance(step, nn.Module):
                h = step(h)
                continue
            weight_name, bias_name = step
            # A parameter that is not free has no dimension for θ: it is the same for all.
            W = tensors[weight_name].mT.expand(m, -1, -1)
            if bias_name is None:
                h = torch.bmm(h, W)
            else:
                h = torch.baddbmm(tensors[bias_name].unsqueeze(-2).expand(m, 1, -1), h, W)
        return h

    def gradient(self, thetas: Tensor, x: Tensor, score: Tensor) -> Tensor:
        """Return Σ_i J_i(θ)ᵀ score_i (m, P), for θ (m, P), x as in `run`, and score (m, b, C)."""
        return self.outputs_and_gradient(thetas, x, lambda f: score)[1]

    def outputs_and_gradient(self, thetas: Tensor, x: Tensor, score: Any) -> tuple[Tensor, Tensor]:
        """Return f (m, b, C) and Σ_i J_iᵀ score(f)_i (m, P), for θ (m, P) and x as in `run`."""
        free = {
            name: value.detach().requires_grad_(True)
            for name, value in self.parameters(thetas).items()
        }
        with torch.enable_grad():
            f = self.run(free, x)
            gradients = torch.autograd.grad(
                f, list(free.values()), score(f.detach()), allow_unused=True
            )
        total = torch.zeros_like(thetas)
        for (start, stop), gradient in zip(self.ranges.values(), gradients, strict=True):
            if gradient is not None:
                total[:, start:stop] = gradient.flatten(1)
        return f.detach(), total


def open_chain(network: AnyParameters, x: Any, theta: Tensor) -> Stacked | None:
    """Return the chain of a network, or None if it is not one or disagrees with the network on x.

    x (b, D) are cast rows, and θ (P,) is in the module's dtype.
    """
    if not isinstance(x, Tensor) or x.dim() != 2:
        return None
    steps = _chain_steps(network.frozen.module)
    ranges = _parameter_ranges(network.layout)
    if steps is None or ranges is None:
        return None
    used = {name for step in steps if isinstance(step, tuple) for name in step}
    if not set(ranges) <= used:
        return None
    chain = Stacked(network, steps, ranges)
    with torch.no_grad():
        expected = network.run(network.layout.unpack(theta), x)
        f = chain.run(chain.parameters(theta.unsqueeze(0)), x).squeeze(0)
    agrees = f.shape == expected.shape and torch.allclose(f, expected, rtol=1e-4, atol=1e-5)
    return chain if agrees else None


def _chain_steps(module: nn.Module) -> tuple[Step, ...] | None:
    """Return the steps of a module that is a plain chain; None for another module."""
    names = {id(p): name for name, p in module.named_parameters()}
    steps: list[Step] = []
    for layer in _layers_in_order(module):
        if layer is None:
            return None
        if type(layer) is nn.Linear:
            bias = None if layer.bias is None else names[id(layer.bias)]
            steps.append((names[id(layer.weight)], bias))
        # Dropout in evaluation mode is the identity.
        elif type(layer) is not nn.Dropout:
            steps.append(layer)
    return tuple(steps)


def _parameter_ranges(layout: Layout) -> dict[str, tuple[int, int]] | None:
    """Return the range of each parameter in θ; None if the positions of one are not a range."""
    ranges = {}
    for name, index in layout.positions.items():
        positions = index.flatten()
        start = int(positions[0])
        stop = start + positions.numel()
        if not torch.equal(positions, torch.arange(start, stop)):
            return None
        ranges[name] = (start, stop)
    return ranges


def _layers_in_order(module: nn.Module) -> Iterator[nn.Module | None]:
    """Yield the layers of a chain in their order, with None for one of another kind.

    Layers with hooks and dropout in training mode count as other kinds.
    """
    random = isinstance(module, nn.Dropout) and module.training
    if module._forward_hooks or module._forward_pre_hooks or random:
        yield None
    elif type(module) is nn.Sequential:
        for layer in module:
            yield from _layers_in_order(layer)
    # Subclasses may compute something else, so only the classes themselves count.
    elif type(module) is nn.Linear or type(module) in ELEMENTWISE:
        yield module
    else:
        yield None
