"""The last layer: outputs linear in the free parameters.

The rest of the network computes its features.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ssla.curvature.jacobians import Features, Jacobian
from ssla.data import Inputs
from ssla.network.bounds import shrink_factors, shrink_rows
from ssla.network.frozen import Frozen, count_rows_within, split_into_chunks
from ssla.network.layout import Layout
from ssla.network.row_scale import RowScale
from ssla.network.watch import InputWatch

MATRICES_PER_ROW = 4  # C×C matrices of a row that exist at one time, at most; a guess


@dataclass(frozen=True, eq=False)
class LastLayer:
    """The network f = φ(x) Wᵀ (+ b): linear in θ, with features φ from the rest of the network.

    With a scale of rows, features, ones and outputs of a row are divided by it.
    """

    frozen: Frozen
    weight: nn.Parameter
    layout: Layout
    theta: Tensor
    outputs: int
    fold_bias: bool  # whether the bias is free: θ then holds it as the weight of a feature of ones
    offset: Tensor | None  # a bias that is not free (C,)
    notes: tuple[str, ...] = ()
    row_scale: RowScale | None = None  # only without an offset

    linear = True

    @property
    def dtype(self) -> torch.dtype:
        """Return the floating dtype of the module."""
        return self.frozen.dtype

    @property
    def device(self) -> torch.device:
        """Return the device of the module."""
        return self.frozen.device

    @property
    def inputs(self) -> int:
        """Return the number of features."""
        return self.weight.shape[1]

    @property
    def kronecker_names(self) -> frozenset[str]:
        """Return all free parameters: they belong to one layer with a Kronecker form."""
        return frozenset(self.layout.names)

    @property
    def parameter_outputs(self) -> Tensor:
        """Return the output that each parameter changes (P,)."""
        return torch.arange(self.outputs).repeat_interleave(self.layout.size // self.outputs)

    def cast(self, x: Inputs) -> Inputs:
        """Return x on the model's device and in its dtype, after checking it.

        Parts that were integers at fit stay integers. Raises ValueError if the parts or shapes of x
        are not those of the fit, or if a number is not finite.
        """
        return self.frozen.cast(x)

    @property
    def layer_shapes(self) -> tuple[tuple[int, int], ...]:
        """Return (inputs including the bias, outputs) of the layer."""
        return ((self.layout.size // self.outputs, self.outputs),)

    @property
    def bytes_per_row(self) -> int:
        """Return the bytes that one row of a chunk needs, with its features and C×C matrices."""
        width = self.layout.size // self.outputs
        # Features as they are and in float64, and their product for each output.
        numbers = width * (self.outputs + 2) + MATRICES_PER_ROW * self.outputs**2
        return self.frozen.bytes_per_row + 8 * numbers

    @property
    def jacobian_per_row(self) -> int:
        """Return the bytes of the features of one row in float64: J = φᵀ ⊗ I is not built."""
        return 8 * (self.layout.size // self.outputs)

    def rows_at_once(self, budget: int) -> int:
        """Return the number of rows of a chunk, at least one, under a budget in bytes."""
        return count_rows_within(budget, self.bytes_per_row)

    def chunks(self, x: Inputs, budget: int) -> Iterator[Inputs]:
        """Yield chunks of the rows x that fit the budget in bytes."""
        return split_into_chunks(x, self.rows_at_once(budget))

    def linearise(self, x: Inputs, theta: Tensor, graph: bool = False) -> tuple[Tensor, Jacobian]:
        """Return f (B, C) in float64 and J, on the CPU, for θ (P,) and cast x.

        graph: whether both are differentiable in x. Raises ValueError if the module fails on x.
        """
        with InputWatch(self.weight) as watch:
            self.frozen.forward(x, graph)
        assert watch.input is not None
        phi = watch.input.to("cpu")
        # Rows with huge features are moved along their ray, so that squares do not overflow.
        factors = shrink_factors(phi)
        if factors is not None:
            phi = shrink_rows(phi, factors)
        J = self.scale_features(Features(phi, self.outputs, self.fold_bias))
        # f is computed in float64, because means may be large compared with the noise.
        f = Features(J.phi.double(), self.outputs, J.bias).push(theta)
        return (f if self.offset is None else f + self.offset), J

    def scale_features(self, J: Features) -> Features:
        """Return the features of rows divided by the scale of rows; unchanged without a scale."""
        return J if self.row_scale is None else self.row_scale.scale_features(J, self.inputs)

    def evaluate(self, x: Inputs, theta: Tensor) -> Tensor:
        """Return f (B, C) at θ (P,) in float64, on the CPU and without a graph, for cast x."""
        return self.linearise(x, theta)[0]
