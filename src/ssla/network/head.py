"""The last layer: outputs linear in the free parameters, features computed by the rest of the
network.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ssla.curvature.jacobians import Features, Jacobian
from ssla.data import Inputs
from ssla.network.bounds import shrink_factors, shrunk
from ssla.network.frozen import Frozen, in_chunks, rows_within
from ssla.network.layout import Layout
from ssla.network.row_scale import RowScale
from ssla.network.watch import Inputs as SeenInputs

PRECISIONS = 4  # C×C matrices of a row, at most


@dataclass(frozen=True, eq=False)
class LastLayer:
    """f = φ(x) Wᵀ (+ b): linear in θ, with features φ from the rest of the network.

    With a scale of rows, features, ones and outputs of a row are divided by it.
    """

    frozen: Frozen
    weight: nn.Parameter
    layout: Layout
    theta: Tensor
    outputs: int
    fold_bias: bool
    offset: Tensor | None  # a bias that is not free (C,)
    notes: tuple[str, ...] = ()
    row_scale: RowScale | None = None  # only without an offset

    linear = True

    @property
    def dtype(self) -> torch.dtype:
        return self.frozen.dtype

    @property
    def device(self) -> torch.device:
        return self.frozen.device

    @property
    def inputs(self) -> int:
        """The number of features."""
        return self.weight.shape[1]

    @property
    def kronecker(self) -> frozenset[str]:
        return frozenset(self.layout.names)

    @property
    def parameter_outputs(self) -> Tensor:
        return torch.arange(self.outputs).repeat_interleave(self.layout.size // self.outputs)

    def cast(self, x: Inputs) -> Inputs:
        return self.frozen.cast(x)

    @property
    def layer_shapes(self) -> tuple[tuple[int, int], ...]:
        return ((self.layout.size // self.outputs, self.outputs),)

    @property
    def bytes_per_row(self) -> int:
        width = self.layout.size // self.outputs
        return self.frozen.bytes_per_row + 8 * (
            width * (self.outputs + 2) + PRECISIONS * self.outputs**2
        )

    @property
    def jacobian_per_row(self) -> int:
        return 8 * (self.layout.size // self.outputs)

    def rows_at_once(self, budget: int) -> int:
        return rows_within(budget, self.bytes_per_row)

    def chunks(self, x: Inputs, budget: int) -> Iterator[Inputs]:
        return in_chunks(x, self.rows_at_once(budget))

    def linearise(self, x: Inputs, theta: Tensor, graph: bool = False) -> tuple[Tensor, Jacobian]:
        with SeenInputs(self.weight) as seen:
            self.frozen.forward(x, graph)
        assert seen.input is not None
        phi = seen.input.to("cpu")
        factors = shrink_factors(phi)
        J = self.scaled(
            Features(phi if factors is None else shrunk(phi, factors), self.outputs, self.fold_bias)
        )
        # in float64: means may be large compared with the noise
        f = Features(J.phi.double(), self.outputs, J.bias).push(theta)
        return (f if self.offset is None else f + self.offset), J

    def scaled(self, J: Features) -> Features:
        """Features of rows under the scale of rows, if there is one."""
        return J if self.row_scale is None else self.row_scale.features(J, self.inputs)

    def evaluate(self, x: Inputs, theta: Tensor) -> Tensor:
        return self.linearise(x, theta)[0]
