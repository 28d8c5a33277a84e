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
# rows × weight vectors worked on together: larger arrays do not fit the processor's cache
ROWS_AT_ONCE = 1 << 13


@dataclass(frozen=True, eq=False)
class Stacked:
    """f_θ for θ (m, P). Each free parameter is a range of θ."""

    network: AnyParameters
    steps: tuple[tuple[str, str | None] | nn.Module, ...]  # names of weight and bias, or a function
    ranges: dict[str, tuple[int, int]]

    def parameters(self, thetas: Tensor) -> dict[str, Tensor]:
        """Free parameters by name (m, …)."""
        shapes = self.network.layout.positions
        return {
            name: thetas[:, a:b].reshape(-1, *shapes[name].shape)
            for name, (a, b) in self.ranges.items()
        }

    def run(self, free: dict[str, Tensor], x: Tensor) -> Tensor:
        """x (b, …) of all θ, or (m, b, …) of its own for each -> f (m, b, C)."""
        m = len(next(iter(free.values())))
        h = x.expand(m, -1, -1) if x.dim() == 2 else x
        for step in self.steps:
            if isinstance(step, nn.Module):
                h = step(h)
                continue
            weight = self._named(free, step[0])
            bias = None if step[1] is None else self._named(free, step[1])
            W = weight.mT.expand(m, -1, -1)
            h = (
                torch.bmm(h, W)
                if bias is None
                else torch.baddbmm(bias.unsqueeze(-2).expand(m, 1, -1), h, W)
            )
        return h

    def _named(self, free: dict[str, Tensor], name: str) -> Tensor:
        return free[name] if name in free else self.network.rest[name]

    def gradient(self, thetas: Tensor, x: Tensor, score: Tensor) -> Tensor:
        """Σ_i J_i(θ)ᵀ score_i for x as in `run`: (m, P)."""
        return self.outputs_and_gradient(thetas, x, lambda f: score)[1]

    def outputs_and_gradient(self, thetas: Tensor, x: Tensor, score: Any) -> tuple[Tensor, Tensor]:
        """f (m, b, C) and Σ_i J_iᵀ score(f)_i (m, P)."""
        free = {
            name: value.detach().requires_grad_(True)
            for name, value in self.parameters(thetas).items()
        }
        with torch.enable_grad():
            f = self.run(free, x)
            grads = torch.autograd.grad(
                f, list(free.values()), score(f.detach()), allow_unused=True
            )
        total = torch.zeros_like(thetas)
        for (a, b), grad in zip(self.ranges.values(), grads, strict=True):
            if grad is not None:
                total[:, a:b] = grad.flatten(1)
        return f.detach(), total


def stacked(network: AnyParameters, x: Any, theta: Tensor) -> Stacked | None:
    """The chain of a network, where it is one and agrees with the network itself on x; else
    None.
    """
    if not isinstance(x, Tensor) or x.dim() != 2:
        return None
    names = {id(p): name for name, p in network.frozen.module.named_parameters()}
    steps: list[tuple[str, str | None] | nn.Module] = []
    for layer in _chain(network.frozen.module):
        if layer is None or layer._forward_hooks or layer._forward_pre_hooks:
            return None
        if type(layer) is nn.Linear:
            steps.append(
                (names[id(layer.weight)], None if layer.bias is None else names[id(layer.bias)])
            )
        elif type(layer) is not nn.Dropout:  # a network in evaluation mode: the identity
            steps.append(layer)
    ranges = {}
    for name, index in network.layout.positions.items():
        flat, start = index.flatten(), int(index.flatten()[0])
        if not torch.equal(flat, torch.arange(start, start + flat.numel())):
            return None
        ranges[name] = (start, start + flat.numel())
    used = {name for step in steps if isinstance(step, tuple) for name in step}
    if not set(ranges) <= used:
        return None
    chain = Stacked(network, tuple(steps), ranges)
    with torch.no_grad():
        expected = network.run(network.layout.unpack(theta), x)
        found = chain.run(chain.parameters(theta.unsqueeze(0)), x).squeeze(0)
    agrees = found.shape == expected.shape and torch.allclose(found, expected, rtol=1e-4, atol=1e-5)
    return chain if agrees else None


def _chain(module: nn.Module) -> Iterator[nn.Module | None]:
    """Layers in their order; None for one that is not of a known kind."""
    if (
        type(module) is nn.Sequential
        and not module._forward_hooks
        and not module._forward_pre_hooks
    ):
        for part in module:
            yield from _chain(part)
    elif type(module) is nn.Linear or type(module) in ELEMENTWISE:
        yield module if not (isinstance(module, nn.Dropout) and module.training) else None
    else:
        yield None
