"""Any set of free parameters: layer by layer where a layer has a Kronecker form, entry by entry
elsewhere.

A linear or convolutional layer, or a product in an attention or a recurrent layer, contributes
J = Σ_t δ_t ⊗ a_t with its inputs a and backpropagated output gradients δ: neither the Jacobian nor
an array of its size is built. Scales and shifts of norms have the columns Σ_t δ_t x̂_t and Σ_t δ_t,
from the same backward passes. For other parameters (embeddings, grouped convolutions, bare ones)
the columns of J come from batched reverse-mode differentiation.

`ssla.network.layer_plans` decides which layers have which form.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, jacrev, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel

from ssla._checks import is_inside_vmap
from ssla.curvature.jacobians import Jacobian, LayerBlock, LayerJacobian, RestBlock
from ssla.data import Inputs, input_tensors, map_inputs, row_count, take_rows
from ssla.network.bounds import shrink_factors, shrink_rows
from ssla.network.frozen import Frozen, count_rows_within, split_into_chunks
from ssla.network.layout import Layout
from ssla.network.watch import (
    NORM,
    Call,
    LayerWatch,
    arrange_inputs_by_position,
    arrange_values_by_position,
)

MAPPED = (
    "torch.func.vmap over inputs is for posteriors of a last layer, but these weights are others: "
    "their Jacobian takes a backward pass. Rows do not depend on each other: give all rows in one "
    "call in place of vmap."
)
# A chunk of rows in `chunks` may take one part in so many of the budget. A guess: the curvature
# needs a share of the budget too.
CHUNK_SHARE = 4


@dataclass(frozen=True)
class LayerPlan:
    """A layer with a Kronecker form: its weight, and where its free entries are in θ.

    The projections of an attention are layers of their own: rows of one weight, from `first` on.
    """

    weight: str  # its name; it may be frozen
    positions: Tensor  # (out, in), with the bias as a last column if it is free
    weight_free: bool
    bias_free: bool
    first: int = 0
    axis: int = 0  # the dimension of its inputs that holds the rows


@dataclass(frozen=True)
class NormPlan:
    """A norm whose scale or shift is free."""

    weight: str  # the name of its scale, which may be frozen
    bias: str | None  # the name of its shift; None: it is frozen, or there is none
    axis: int = 0  # the dimension of its inputs that holds the rows


@dataclass(frozen=True, eq=False)
class AnyParameters:
    """The network f_θ for any set of free parameters."""

    frozen: Frozen
    layout: Layout
    theta: Tensor
    outputs: int
    fixed_tensors: Mapping[str, Tensor] = field(repr=False)  # see `collect_fixed_tensors`
    layers: tuple[LayerPlan, ...]
    without_kronecker: tuple[str, ...]  # free parameters without a Kronecker form
    extra_per_row: int  # bytes
    notes: tuple[str, ...] = ()
    head: tuple[str, ...] = ()  # free weight and bias of the linear layer that computes the outputs
    norms: tuple[NormPlan, ...] = ()
    jacobian_per_row: int = 0  # bytes; 0: not known, of a network from a file

    linear = False
    offset = None

    @property
    def dtype(self) -> torch.dtype:
        """Return the floating dtype of the module."""
        return self.frozen.dtype

    @property
    def device(self) -> torch.device:
        """Return the device of the module."""
        return self.frozen.device

    @property
    def kronecker_names(self) -> frozenset[str]:
        """Return the free parameters of layers with a Kronecker form."""
        return frozenset(self.layout.names) - frozenset(self.without_kronecker)

    @property
    def parameter_outputs(self) -> Tensor:
        """Return the output that each parameter of the head changes, and −1 for others (P,)."""
        outputs = torch.full((self.layout.size,), -1)
        for name in self.head:
            # Row c of the head's weight, and entry c of its bias, belong to output c.
            for output, positions in enumerate(self.layout.positions[name]):
                outputs[positions] = output
        return outputs

    def cast(self, x: Inputs) -> Inputs:
        """Return x on the model's device and in its dtype, after checking it.

        Parts that were integers at fit stay integers. Raises ValueError if the parts or shapes of x
        are not those of the fit, or if a number is not finite.
        """
        return self.frozen.cast(x)

    @property
    def layer_shapes(self) -> tuple[tuple[int, int], ...]:
        """Return (inputs including the bias, outputs) of each layer with a Kronecker form."""
        return tuple((plan.positions.shape[1], plan.positions.shape[0]) for plan in self.layers)

    @property
    def bytes_per_row(self) -> int:
        """Return the bytes that one row of a chunk needs, with its Jacobian."""
        return self.frozen.bytes_per_row + self.extra_per_row

    @property
    def unplanned_names(self) -> tuple[str, ...]:
        """Return the free parameters that belong neither to a planned layer nor to a norm.

        Their columns of J are found by plain differentiation.
        """
        of_norms = {name for plan in self.norms for name in (plan.weight, plan.bias)}
        return tuple(name for name in self.without_kronecker if name not in of_norms)

    def rows_at_once(self, budget: int) -> int:
        """Return the number of rows of a chunk, at least one, under a budget in bytes."""
        return count_rows_within(budget // CHUNK_SHARE, self.bytes_per_row)

    def chunks(self, x: Inputs, budget: int) -> Iterator[Inputs]:
        """Yield chunks of the rows x that fit the budget in bytes."""
        return split_into_chunks(x, self.rows_at_once(budget))

    def split_into_parameters(self, theta: Tensor) -> dict[str, Tensor]:
        """Return the free parameters at θ (P,) by name, in the module's dtype and on its device."""
        return {
            name: theta[positions].to(self.device, self.dtype)
            for name, positions in self.layout.positions.items()
        }

    def compute_outputs(self, free: Mapping[str, Tensor], x: Inputs) -> Tensor:
        """Return f (B, C) of the module for cast x, with these free parameters by name.

        The result has an autograd graph if gradients are enabled. What the module raises is not
        caught.
        """
        tensors = {**self.fixed_tensors, **free}

        def call_with_tensors(*args: Any, **kwargs: Any) -> Any:
            """Call the module with `tensors` in place of its own parameters and buffers."""
            return functional_call(self.frozen.module, tensors, args, kwargs)

        with _disable_fused_attention():
            # The function stands for the module, which is only called.
            result = self.frozen.call_module(call_with_tensors, x)  # type: ignore[arg-type]
        return self.frozen.extract_outputs(result, row_count(x))

    def evaluate(self, x: Inputs, theta: Tensor) -> Tensor:
        """Return f (B, C) at θ (P,), on the CPU and without a graph, for cast x.

        Raises ValueError if the module fails on x.
        """
        with torch.no_grad(), self.frozen.explain_failures(x):
            return self.compute_outputs(self.split_into_parameters(theta), x).to("cpu")

    def linearise(self, x: Inputs, theta: Tensor, graph: bool = False) -> tuple[Tensor, Jacobian]:
        """Return f (B, C) and J at θ (P,), on the CPU, for cast x.

        graph: whether both are differentiable in x. Raises ValueError inside torch.func.vmap, and
        if the module fails on x.
        """
        if any(is_inside_vmap(leaf) for leaf in input_tensors(x)):
            raise ValueError(MAPPED)
        free = self.split_into_parameters(theta)
        f, blocks, norm_columns = self._differentiate_layers(x, free, graph)
        f = f.to("cpu")
        rest_block = None
        if self.without_kronecker:
            rest_block = self._compute_rest_block(x, free, norm_columns, graph)
        J = LayerJacobian(self.layout.size, self.outputs, f.shape[0], tuple(blocks), rest_block)

        # Rows with huge derivatives are moved along their ray, so that squares do not overflow.
        factors = shrink_factors(f, *J.inputs)
        if factors is None:
            return f, J
        return shrink_rows(f, factors), J.with_inputs(
            shrink_rows(values, factors) for values in J.inputs
        )

    def _differentiate_layers(
        self, x: Inputs, free: Mapping[str, Tensor], graph: bool
    ) -> tuple[Tensor, list[LayerBlock], dict[str, Tensor]]:
        """Return f (B, C), the blocks of layers with a Kronecker form, and the columns of norms.

        The columns (B, C, out) are those of scales and shifts, by the parameter's name. x: cast
        rows. free: the free parameters by name. graph: whether all of them are differentiable in x.
        Raises ValueError if the module fails on x.
        """
        plans = {(plan.weight, plan.first): plan for plan in self.layers}
        norms = {plan.weight: plan for plan in self.norms}
        tensors = {**self.fixed_tensors, **free}
        names = (*norms, *(plan.weight for plan in self.layers))
        watch = LayerWatch({id(tensors[name]): name for name in names})

        with torch.enable_grad(), self.frozen.explain_failures(x), watch:
            f = self.compute_outputs(free, x)
        rows = row_count(x)
        gradients = _compute_gradients_of_outputs(f, [zero for _, _, zero in watch.calls], graph)

        # By the weight's name and its first row: inputs a and gradients δ of each use.
        uses: dict[tuple[str, int], list[tuple[Tensor, Tensor]]] = {}
        columns: dict[str, Tensor] = {}
        for (name, call, _), call_gradients in zip(watch.calls, gradients, strict=True):
            if call.operation == NORM:
                _add_norm_columns(columns, norms[name], call, call_gradients, rows, graph)
            else:
                plan = plans[name, call.first]
                a = _append_bias_input(
                    plan, arrange_inputs_by_position(call, rows, plan.axis, graph)
                )
                deltas = [
                    arrange_values_by_position(call, gradient, rows, plan.axis)
                    for gradient in call_gradients
                ]
                uses.setdefault((name, call.first), []).append((a, torch.stack(deltas, 1)))
            # The gradients of a call are copied above: those here would only occupy memory.
            call_gradients.clear()

        blocks = []
        # A weight that is used twice has one block, with the positions of both uses: a (B, T, in)
        # and delta (B, C, T, out).
        for key, pairs in uses.items():
            a = torch.cat([inputs for inputs, _ in pairs], 1)
            delta = torch.cat([gradient for _, gradient in pairs], 2)
            blocks.append(LayerBlock(plans[key].positions, a.to("cpu"), delta.to("cpu")))

        return f if graph else f.detach(), blocks, columns

    def _compute_rest_block(
        self, x: Inputs, free: Mapping[str, Tensor], norm_columns: Mapping[str, Tensor], graph: bool
    ) -> RestBlock:
        """Return the columns of J for free parameters without a Kronecker form.

        norm_columns are those that are already known, (B, C, out) by name. graph: whether the
        columns are differentiable in x.
        """
        columns = dict(norm_columns)
        missing = {name: free[name] for name in self.without_kronecker if name not in columns}
        if missing:
            columns |= self._compute_columns(x, free, missing, graph)
        shape = (row_count(x), self.outputs, -1)
        values = torch.cat([columns[name].reshape(shape) for name in self.without_kronecker], 2)
        index = torch.cat(
            [self.layout.positions[name].flatten() for name in self.without_kronecker]
        )
        return RestBlock(index, (values if graph else values.detach()).to("cpu"))

    def _compute_columns(
        self, x: Inputs, free: Mapping[str, Tensor], chosen: Mapping[str, Tensor], graph: bool
    ) -> dict[str, Tensor]:
        """Return the columns (B, C, …) of J for some of the free parameters, by name.

        free: all free parameters by name; chosen: those whose columns are wanted. All rows are
        differentiated together, or one by one if a layer has no batching rule. graph: whether the
        columns are differentiable in x.
        """

        def outputs_of_row(parameters: Mapping[str, Tensor], row: Inputs) -> Tensor:
            """Return f (C,) of one row, which vmap maps over the rows."""
            batch = map_inputs(lambda values: values.unsqueeze(0), row)
            return self.compute_outputs({**free, **parameters}, batch).squeeze(0)

        with warnings.catch_warnings():
            # torch has no faster form for these layers, and the user cannot change that.
            warnings.filterwarnings(
                "ignore", "There is a performance drop because we have not yet implemented"
            )
            try:
                columns: dict[str, Tensor] = vmap(jacrev(outputs_of_row), in_dims=(None, 0))(
                    dict(chosen), x
                )
            except RuntimeError:  # a layer without a batching rule (packed sequences)
                columns = self._compute_columns_by_row(x, free, chosen, graph)
        return columns

    def _compute_columns_by_row(
        self, x: Inputs, free: Mapping[str, Tensor], chosen: Mapping[str, Tensor], graph: bool
    ) -> dict[str, Tensor]:
        """Return what `_compute_columns` does, by one backward pass for each output of each row.

        The arguments are those of `_compute_columns`.
        """
        variables = {name: value.detach().requires_grad_(True) for name, value in chosen.items()}
        columns: dict[str, list[Tensor]] = {name: [] for name in chosen}
        for i in range(row_count(x)):
            row = take_rows(x, slice(i, i + 1))
            with torch.enable_grad():
                outputs = self.compute_outputs({**free, **variables}, row)[0].unbind()
            for output in outputs:
                # The last backward pass of a row may free its graph.
                retain = graph or output is not outputs[-1]
                gradients = _compute_gradients(output, list(variables.values()), retain, graph)
                for name, gradient in zip(variables, gradients, strict=True):
                    columns[name].append(gradient)

        return {
            name: torch.stack(gradients).unflatten(0, (-1, self.outputs))
            for name, gradients in columns.items()
        }


def _compute_gradients(
    output: Tensor, variables: list[Tensor], retain: bool, graph: bool
) -> list[Tensor]:
    """Return the gradients of a scalar output in some variables.

    The gradient is zero in a variable that the output does not depend on. retain: whether the
    output's graph is kept for another backward pass. graph: whether the gradients have a graph
    themselves.
    """
    gradients = torch.autograd.grad(
        output, variables, retain_graph=retain, create_graph=graph, allow_unused=True
    )
    return [
        torch.zeros_like(variable) if gradient is None else gradient
        for variable, gradient in zip(variables, gradients, strict=True)
    ]


def _compute_gradients_of_outputs(
    f: Tensor, zeros: list[Tensor], graph: bool
) -> list[list[Tensor]]:
    """Return the gradients of each output in some zeros, as a list of C tensors for each zero.

    f is (B, C). zeros: tensors that were added to the results of calls (see `LayerWatch`); a
    gradient has the shape of its zero. graph: whether the gradients have a graph themselves. Rows
    are independent, so the gradient of an output's sum over rows holds the gradient of each row.
    """
    gradients: list[list[Tensor]] = [[] for _ in zeros]
    if not zeros:
        return gradients
    with torch.enable_grad():  # the caller may work under no_grad
        sums = f.sum(0).unbind()
    for output_sum in sums:
        retain = graph or output_sum is not sums[-1]
        of_output = _compute_gradients(output_sum, zeros, retain, graph)
        for call_gradients, gradient in zip(gradients, of_output, strict=True):
            call_gradients.append(gradient)
    return gradients


def _append_bias_input(plan: LayerPlan, a: Tensor) -> Tensor:
    """Return the inputs of the free entries of a layer, from the inputs a (B, T, in) of its weight.

    A free bias has an input that is always one: the result is then (B, T, in + 1). If only the bias
    is free, this is the only input.
    """
    ones = torch.ones_like(a[..., :1])
    if not plan.weight_free:
        return ones
    return torch.cat([a, ones], -1) if plan.bias_free else a


def _add_norm_columns(
    columns: dict[str, Tensor],
    plan: NormPlan,
    call: Call,
    gradients: list[Tensor],
    rows: int,
    graph: bool,
) -> None:
    """Add the columns (B, C, out) of one use of a norm to `columns` in place, by parameter name.

    The columns are Σ_t δ_t x̂_t for its scale and Σ_t δ_t for its shift. plan, call: those of the
    norm and of its use on `rows` rows. gradients: those of each output in the norm's result. graph:
    whether the columns are differentiable in x.
    """
    normalised = arrange_inputs_by_position(call, rows, plan.axis, graph)  # x̂ (B, T, out)
    deltas = [arrange_values_by_position(call, gradient, rows, plan.axis) for gradient in gradients]
    new = {plan.weight: torch.stack([(delta * normalised).sum(1) for delta in deltas], 1)}
    if plan.bias is not None:
        new[plan.bias] = torch.stack([delta.sum(1) for delta in deltas], 1)
    for name, values in new.items():
        columns[name] = columns[name] + values if name in columns else values


@contextmanager
def _disable_fused_attention() -> Iterator[None]:
    """Switch fused attention off inside the context, and restore the setting after it.

    Fused attention kernels have no batching rule, and the fused path of a transformer layer has no
    derivative.
    """
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with sdpa_kernel(SDPBackend.MATH):
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)


def collect_fixed_tensors(module: nn.Module, free: tuple[str, ...]) -> dict[str, Tensor]:
    """Return the parameters whose names are not in `free`, and the buffers, by name."""
    fixed = {name: p.detach() for name, p in module.named_parameters() if name not in free}
    return fixed | dict(module.named_buffers())
