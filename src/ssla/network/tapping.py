"""The inputs of a last layer as a module of its own, which can be traced."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn

from ssla.data import Inputs
from ssla.network.head import LastLayer
from ssla.network.watch import Inputs as SeenInputs


class LayerInputs(nn.Module):
    """φ(x) (N, F): what the last layer of a network multiplies.

    The parts of x are given in their order.

    The weight is looked up at each call: while a graph is traced, other tensors stand for the
    parameters.
    """

    def __init__(self, network: LastLayer, example: Inputs) -> None:
        super().__init__()
        self.module = network.frozen.module
        self.call = network.frozen.call
        self.weight = next(
            name for name, p in self.module.named_parameters() if p is network.weight
        )
        self.keys = tuple(example) if isinstance(example, Mapping) else None
        self.single = isinstance(example, Tensor)

    def forward(self, *parts: Tensor) -> Tensor:
        x: Inputs = (
            parts[0]
            if self.single
            else parts
            if self.keys is None
            else dict(zip(self.keys, parts, strict=True))
        )
        with SeenInputs(self.module.get_parameter(self.weight)) as seen:
            self.call(self.module, x)
        assert seen.input is not None
        phi: Tensor = seen.input
        return phi
