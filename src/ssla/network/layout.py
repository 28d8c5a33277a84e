"""The free parameters, and their positions in the flat vector θ."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Layout:
    """Names and positions: positions[name] (of the parameter's shape) are indices into θ (P,).

    The *named order* is the concatenation of the flattened parameters in the order of `names`; θ
    itself may interleave them (a last layer keeps each output's weights and bias together).
    """

    positions: Mapping[str, Tensor]

    @property
    def names(self) -> tuple[str, ...]:
        """Return the names of the free parameters."""
        return tuple(self.positions)

    @property
    def size(self) -> int:
        """Return the number of free parameters P."""
        return sum(index.numel() for index in self.positions.values())

    def pack(self, values: Mapping[str, Tensor]) -> Tensor:
        """Return θ (P,) in float64, on the CPU, from parameters by name.

        Values with names that are not in the layout are ignored.
        """
        theta = torch.empty(self.size, dtype=torch.float64)
        for name, index in self.positions.items():
            theta[index] = values[name].detach().to("cpu", torch.float64)
        return theta

    def unpack(self, theta: Tensor) -> dict[str, Tensor]:
        """Return the parameters by name, in their shapes, from θ (P,), in θ's dtype."""
        return {name: theta[index] for name, index in self.positions.items()}

    def from_named_order(self, flat: Tensor) -> Tensor:
        """Return a vector (P,) in the order of θ, in float64, from one in the named order."""
        theta = torch.empty(self.size, dtype=torch.float64)
        start = 0
        for index in self.positions.values():
            theta[index.flatten()] = flat[start : start + index.numel()].to(torch.float64)
            start += index.numel()
        return theta

    @property
    def names_by_layer(self) -> dict[str, tuple[str, ...]]:
        """Return the names of the free parameters of each module, by the module's name.

        The name is "" for parameters of the network itself.
        """
        groups: dict[str, list[str]] = {}
        for name in self.names:
            groups.setdefault(name.rpartition(".")[0], []).append(name)
        return {layer: tuple(names) for layer, names in groups.items()}


def make_contiguous_layout(shapes: Mapping[str, torch.Size]) -> Layout:
    """Return the layout in which θ holds the parameters one after the other, as `shapes` does."""
    positions = {}
    start = 0
    for name, shape in shapes.items():
        count = shape.numel()
        positions[name] = torch.arange(start, start + count).reshape(shape)
        start += count
    return Layout(positions)


def make_last_layer_layout(weight: str, bias: str | None, outputs: int, inputs: int) -> Layout:
    """Return the layout of a last layer in which θ, as a matrix, is (C, F): J is then φᵀ ⊗ I.

    Row c holds the weights of output c, and then its bias. weight, bias: the names of the
    parameters; bias is None without a free one. outputs: C. inputs: the number of features, without
    that of the bias.
    """
    width = inputs + (bias is not None)
    index = torch.arange(outputs * width).reshape(outputs, width)
    positions = {weight: index[:, :inputs]}
    if bias is not None:
        positions[bias] = index[:, inputs]
    return Layout(positions)
