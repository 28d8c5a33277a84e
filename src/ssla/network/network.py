"""The Network protocol: what the packages above need of a network and its free parameters."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import torch
from torch import Tensor

from ssla.curvature.jacobians import Jacobian
from ssla.data import Inputs
from ssla.network.layout import Layout


class Network(Protocol):
    """The network f_θ(x) and its Jacobian in the free parameters, for any θ (P,) in float64.

    x is any input that `ssla.data.as_inputs` returns. "Cast" x has passed `cast`.
    """

    @property
    def layout(self) -> Layout:
        """Return the names of the free parameters and their positions in θ."""

    @property
    def theta(self) -> Tensor:
        """Return the free parameters as trained (P,)."""

    @property
    def outputs(self) -> int:
        """Return the number of outputs C."""

    @property
    def linear(self) -> bool:
        """Return whether f is linear in θ, so that J does not depend on θ."""

    @property
    def offset(self) -> Tensor | None:
        """Return f − J θ (C,) of a linear f, which is a bias that is not free; None without one."""

    @property
    def kronecker_names(self) -> frozenset[str]:
        """Return the free parameters of layers with a Kronecker form."""

    @property
    def parameter_outputs(self) -> Tensor:
        """Return the output that each parameter changes (P,); −1 if it may change several."""

    @property
    def layer_shapes(self) -> tuple[tuple[int, int], ...]:
        """Return (inputs including the bias, outputs) of each layer with a Kronecker form."""

    @property
    def notes(self) -> tuple[str, ...]:
        """Return notes for the report, from opening the module."""

    @property
    def dtype(self) -> torch.dtype:
        """Return the model's floating dtype, in which results are returned."""

    @property
    def device(self) -> torch.device:
        """Return the model's device."""

    def cast(self, x: Inputs) -> Inputs:
        """Return x on the model's device and in its dtype, after checking it.

        Parts that were integers at fit stay integers. Raises ValueError if the parts or shapes of x
        are not those of the fit, or if a number is not finite.
        """

    def chunks(self, x: Inputs, budget: int) -> Iterator[Inputs]:
        """Yield chunks of the rows x whose intermediate results fit the budget in bytes."""

    @property
    def bytes_per_row(self) -> int:
        """Return the bytes that one row of a chunk needs for all intermediate results."""

    @property
    def jacobian_per_row(self) -> int:
        """Return the bytes of J for one row, as `linearise` returns it; 0 if this is not known."""

    def rows_at_once(self, budget: int) -> int:
        """Return the number of rows of a chunk, at least one, that fits the budget in bytes."""

    def linearise(self, x: Inputs, theta: Tensor, graph: bool = False) -> tuple[Tensor, Jacobian]:
        """Return f (B, C) and J at θ (P,), on the CPU, for cast x.

        graph: whether both are differentiable in x.
        """

    def evaluate(self, x: Inputs, theta: Tensor) -> Tensor:
        """Return f (B, C) at θ (P,), on the CPU and without a graph, for cast x."""
