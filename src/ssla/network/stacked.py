"""Plain chains of linear layers and elementwise functions, for many weight vectors at once.

The functions are computed by batched matrix products.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
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
# A guess.
ROWS_AT_ONCE = 1 << 13
# How much the outputs of a chain may differ from those of the network: batched products round
# differently. Guesses.
RELATIVE_ERROR, ABSOLUTE_ERROR = 1e-4, 1e-5
Step = tuple[str, str | None] | nn.Module
"""The names of the weight and the bias of a linear layer, or an elementwise function."""


@dataclass(frozen=True, eq=False)
class StackedChain:
    """A chain of layers as a function f_θ of many θ (m, P); each free parameter is a range of θ.

    All tensors are in the dtype of the module.
    """

    network: AnyParameters
    steps: tuple[Step, ...]  # in the order in which they are computed
    ranges: dict[str, tuple[int, int]]  # by name: the first position in θ, and that after the last

    def split_parameters(self, thetas: Tensor) -> dict[str, Tensor]:
        """Return the free parameters (m, …) by name, in the order of `ranges`, from θ (m, P)."""
        positions = self.network.layout.positions
        return {
            name: thetas[:, start:stop].reshape(-1, *positions[name].shape)
            for name, (start, stop) in self.ranges.items()
        }

    def compute_outputs(self, free: dict[str, Tensor], x: Tensor) -> Tensor:
        """Return f (m, b, C) for x (b, D), the same for all θ, or x (m, b, D), one for each θ.

        free: the free parameters (m, …) by name.
        """
        m = len(next(iter(free.values())))
        # h: the result of the steps so far, (m, b, width of the layer).
        h = x.expand(m, -1, -1) if x.dim() == 2 else x
        tensors = {**self.network.fixed_tensors, **free}

        for step in self.steps:
            if isinstance(step, nn.Module):
                h = step(h)
                continue
            weight_name, bias_name = step
            # A parameter that is not free has no dimension for θ: `expand` repeats it for all.
            W = tensors[weight_name].mT.expand(m, -1, -1)
            if bias_name is None:
                h = torch.bmm(h, W)
            else:
                h = torch.baddbmm(tensors[bias_name].unsqueeze(-2).expand(m, 1, -1), h, W)

        return h

    def compute_gradient(self, thetas: Tensor, x: Tensor, score: Tensor) -> Tensor:
        """Return Σ_i J_i(θ)ᵀ score_i (m, P), for θ (m, P) and score (m, b, C).

        x: as in `compute_outputs`.
        """
        return self.compute_outputs_and_gradient(thetas, x, lambda f: score)[1]

    def compute_outputs_and_gradient(
        self, thetas: Tensor, x: Tensor, score: Callable[[Tensor], Tensor]
    ) -> tuple[Tensor, Tensor]:
        """Return f (m, b, C) and Σ_i J_iᵀ score(f)_i (m, P), for θ (m, P).

        x: as in `compute_outputs`. score: a function of f (m, b, C) that returns as many numbers;
        it is not differentiated. Both results are without a graph.
        """
        free = {
            name: value.detach().requires_grad_(True)
            for name, value in self.split_parameters(thetas).items()
        }

        with torch.enable_grad():
            f = self.compute_outputs(free, x)
            gradients = torch.autograd.grad(
                f, list(free.values()), score(f.detach()), allow_unused=True
            )

        # A parameter that the outputs do not depend on has no gradient: its entries stay zero.
        total = torch.zeros_like(thetas)
        for (start, stop), gradient in zip(self.ranges.values(), gradients, strict=True):
            if gradient is not None:
                total[:, start:stop] = gradient.flatten(1)
        return f.detach(), total


def open_chain(network: AnyParameters, x: Any, theta: Tensor) -> StackedChain | None:
    """Return the chain of a network, or None if it is not a chain.

    The result is also None if a free parameter is not used in the chain, or if the outputs of the
    chain differ from those of the network on cast rows x (b, D). θ (P,) is in the module's dtype.
    """
    if not isinstance(x, Tensor) or x.dim() != 2:
        return None
    steps = _list_chain_steps(network.frozen.module)
    ranges = _find_parameter_ranges(network.layout)
    if steps is None or ranges is None:
        return None
    used = {name for step in steps if isinstance(step, tuple) for name in step}
    if not set(ranges) <= used:
        return None
    chain = StackedChain(network, steps, ranges)

    with torch.no_grad():
        expected = network.compute_outputs(network.layout.unpack(theta), x)
        f = chain.compute_outputs(chain.split_parameters(theta.unsqueeze(0)), x).squeeze(0)

    agrees = f.shape == expected.shape and torch.allclose(
        f, expected, rtol=RELATIVE_ERROR, atol=ABSOLUTE_ERROR
    )
    return chain if agrees else None


def _list_chain_steps(module: nn.Module) -> tuple[Step, ...] | None:
    """Return the steps of a module that is a plain chain; None for another module.

    Dropout is left out.
    """
    names = {id(p): name for name, p in module.named_parameters()}
    steps: list[Step] = []
    for layer in _yield_layers_in_order(module):
        if layer is None:
            return None
        if type(layer) is nn.Linear:
            bias = None if layer.bias is None else names[id(layer.bias)]
            steps.append((names[id(layer.weight)], bias))
        # `_yield_layers_in_order` yields dropout in evaluation mode only, where it is the identity.
        elif type(layer) is not nn.Dropout:
            steps.append(layer)
    return tuple(steps)


def _find_parameter_ranges(layout: Layout) -> dict[str, tuple[int, int]] | None:
    """Return the range of each parameter in θ: its first position, and that after its last.

    The result is None if the positions of one are not consecutive.
    """
    ranges = {}
    for name, index in layout.positions.items():
        positions = index.flatten()
        start = int(positions[0])
        stop = start + positions.numel()
        if not torch.equal(positions, torch.arange(start, stop)):
            return None
        ranges[name] = (start, stop)
    return ranges


def _yield_layers_in_order(module: nn.Module) -> Iterator[nn.Module | None]:
    """Yield the layers of a module in their order, with None for one that a chain cannot hold.

    A chain holds linear layers and elementwise functions, without hooks. Dropout in training mode
    is random, so it yields None too.
    """
    is_random = isinstance(module, nn.Dropout) and module.training
    if module._forward_hooks or module._forward_pre_hooks or is_random:
        yield None
    elif type(module) is nn.Sequential:
        for layer in module:
            yield from _yield_layers_in_order(layer)
    # Subclasses may compute something else, so only the classes themselves count.
    elif type(module) is nn.Linear or type(module) in ELEMENTWISE:
        yield module
    else:
        yield None
