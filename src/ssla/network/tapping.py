"""The inputs of a last layer as a module of its own, which can be traced."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn

from ssla.data import Inputs
from ssla.network.head import LastLayer
from ssla.network.watch import InputWatch


class LayerInputs(nn.Module):
    """The features φ(x) (N, F), which the last layer of a network multiplies, as a module."""

    def __init__(self, network: LastLayer, example: Inputs) -> None:
        """Take the module and its way of being called from a network.

        example: an input x, which shows how many tensors x has and how they are named.
        """
        super().__init__()
        self.module = network.frozen.module
        self.call_module = network.frozen.call_module
        self.weight = next(
            name for name, p in self.module.named_parameters() if p is network.weight
        )
        self.keys = tuple(example) if isinstance(example, Mapping) else None
        self.single = isinstance(example, Tensor)

    def forward(self, *tensors: Tensor) -> Tensor:
        """Return φ (N, F) for an input x, given as its tensors in the order of the example."""
        x: Inputs = tensors[0] if self.single else tensors
        if self.keys is not None:
            x = dict(zip(self.keys, tensors, strict=True))
        # The weight is looked up at each call: while a graph is traced, other tensors stand for the
        # parameters.
        with InputWatch(self.module.get_parameter(self.weight)) as watch:
            self.call_module(self.module, x)
        assert watch.input is not None
        phi: Tensor = watch.input
        return phi
