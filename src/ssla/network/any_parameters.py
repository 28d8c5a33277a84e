"""Any set of free parameters: layer by layer where a layer has a Kronecker form, entry by entry elsewhere.

A linear or convolutional layer contributes J = Σ_t δ_t ⊗ a_t with its inputs a and backpropagated output gradients δ: neither
the Jacobian nor an array of its size is built. For parameters of other layers (norms, embeddings, recurrent, bare ones) the
columns of J come from batched reverse-mode differentiation.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.func import functional_call, jacrev, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel

from ssla._checks import batched
from ssla.data import Inputs, leaves, map_inputs, row_count, slice_inputs
from ssla.network.bounds import shrink_factors, shrunk
from ssla.network.frozen import Frozen, in_chunks, rows_within
from ssla.network.layout import Layout, contiguous_layout
from ssla.network.watch import CONVOLUTION, LINEAR, Layers, Probe, by_place, patches
from ssla.structures.jacobians import Jacobian, LayerBlock, LayerJacobian, RestBlock

CHECKED_ROWS = 4
MAPPED = (
    "torch.func.vmap over inputs is for posteriors of a last layer, but these weights are others: their Jacobian takes a "
    "backward pass. Rows do not depend on each other: give all rows in one call in place of vmap."
)
UNLIKE_LAYERS = (
    "derivatives layer by layer do not agree with backpropagation through the whole network, so no layer uses the Kronecker "
    "form (structure='kfac' is a diagonal)"
)


@dataclass(frozen=True)
class LayerPlan:
    """A layer with a Kronecker form: its weight (possibly frozen), and the positions of its free entries in θ (out, in [+ 1])."""

    weight: str
    positions: Tensor
    weight_free: bool
    bias_free: bool


@dataclass(frozen=True, eq=False)
class AnyParameters:
    """f_θ for an arbitrary set of parameters."""

    frozen: Frozen
    layout: Layout
    theta: Tensor
    outputs: int
    rest: Mapping[str, Tensor] = field(repr=False)  # parameters that are not free, and buffers
    layers: tuple[LayerPlan, ...]
    others: tuple[str, ...]  # free parameters without a Kronecker form
    extra_per_row: int  # bytes
    notes: tuple[str, ...] = ()
    head: tuple[str, ...] = ()  # free weight and bias of the linear layer that computes the outputs

    linear = False
    offset = None

    @property
    def dtype(self) -> torch.dtype:
        return self.frozen.dtype

    @property
    def device(self) -> torch.device:
        return self.frozen.device

    @property
    def kronecker(self) -> frozenset[str]:
        """Free parameters of layers with a Kronecker form."""
        return frozenset(self.layout.names) - frozenset(self.others)

    @property
    def parameter_outputs(self) -> Tensor:
        found = torch.full((self.layout.size,), -1)
        for name in self.head:
            for output, row in enumerate(self.layout.positions[name]):
                found[row] = output
        return found

    def cast(self, x: Inputs) -> Inputs:
        return self.frozen.cast(x)

    @property
    def layer_shapes(self) -> tuple[tuple[int, int], ...]:
        return tuple((plan.positions.shape[1], plan.positions.shape[0]) for plan in self.layers)

    @property
    def bytes_per_row(self) -> int:
        return self.frozen.bytes_per_row + self.extra_per_row

    def rows_at_once(self, budget: int) -> int:
        return rows_within(budget, self.bytes_per_row)

    def chunks(self, x: Inputs, budget: int) -> Iterator[Inputs]:
        return in_chunks(x, self.rows_at_once(budget))

    def _free(self, theta: Tensor) -> dict[str, Tensor]:
        named = self.layout.unpack(theta)
        return {name: value.to(self.frozen.device, self.frozen.dtype) for name, value in named.items()}

    def run(self, free: Mapping[str, Tensor], x: Inputs) -> Tensor:
        wrapped = lambda *a, **k: functional_call(self.frozen.module, {**self.rest, **free}, a, k)  # noqa: E731
        with _plain_attention():
            result = self.frozen.call(wrapped, x)  # type: ignore[arg-type]
        return self.frozen.outputs(result, row_count(x))

    def evaluate(self, x: Inputs, theta: Tensor) -> Tensor:
        with torch.no_grad(), self.frozen.worded(x):
            return self.run(self._free(theta), x).to("cpu")

    def linearise(self, x: Inputs, theta: Tensor, graph: bool = False) -> tuple[Tensor, Jacobian]:
        if any(batched(leaf) for leaf in leaves(x)):
            raise ValueError(MAPPED)
        free = self._free(theta)
        f, blocks = self._layer_blocks(x, free, graph)
        rest = self._rest_block(x, free, graph) if self.others else None
        f, J = f.to("cpu"), LayerJacobian(self.layout.size, self.outputs, f.shape[0], tuple(blocks), rest)
        factors = shrink_factors(f, *J.inputs)
        return (f, J) if factors is None else (shrunk(f, factors), J.with_inputs(shrunk(part, factors) for part in J.inputs))

    def _layer_blocks(self, x: Inputs, free: Mapping[str, Tensor], graph: bool) -> tuple[Tensor, list[LayerBlock]]:
        plans = {plan.weight: plan for plan in self.layers}
        named = {**self.rest, **free}
        watch = Layers({id(named[name]): name for name in plans})
        with torch.enable_grad(), self.frozen.worded(x), watch:
            f = self.run(free, x)
        if not plans:
            return f if graph else f.detach(), []
        zeros = [zero for _, _, zero in watch.calls]
        with torch.enable_grad():  # the caller may work under no_grad
            sums = f.sum(0).unbind()
        columns = [
            torch.autograd.grad(one, zeros, retain_graph=graph or one is not sums[-1], create_graph=graph, allow_unused=True)
            for one in sums
        ]
        found: dict[str, list[tuple[Tensor, Tensor]]] = {}
        for i, (name, call, zero) in enumerate(watch.calls):
            grads = [torch.zeros_like(zero) if column[i] is None else column[i] for column in columns]
            delta = torch.stack([by_place(call, g) for g in grads], 1)  # (B, C, T, out)
            found.setdefault(name, []).append((self._inputs(plans[name], patches(call, graph)), delta))
        blocks = []
        for name, uses in found.items():  # a weight used twice: its positions are concatenated
            a, delta = torch.cat([u[0] for u in uses], 1), torch.cat([u[1] for u in uses], 2)
            blocks.append(LayerBlock(plans[name].positions, a.to("cpu"), delta.to("cpu")))
        return f if graph else f.detach(), blocks

    @staticmethod
    def _inputs(plan: LayerPlan, a: Tensor) -> Tensor:
        """With the bias as an input that is always one; without the weight's columns if only the bias is free."""
        ones = torch.ones_like(a[..., :1])
        if not plan.weight_free:
            return ones
        return torch.cat([a, ones], -1) if plan.bias_free else a

    def _rest_block(self, x: Inputs, free: Mapping[str, Tensor], graph: bool) -> RestBlock:
        chosen = {name: free[name] for name in self.others}

        def one(parameters: Mapping[str, Tensor], row: Inputs) -> Tensor:
            return self.run({**free, **parameters}, map_inputs(lambda part: part.unsqueeze(0), row)).squeeze(0)

        try:
            parts = vmap(jacrev(one), in_dims=(None, 0))(chosen, x)
        except RuntimeError:  # a layer without a batching rule (recurrent layers): row by row
            rows = [jacrev(one)(chosen, _row(x, i)) for i in range(row_count(x))]
            parts = {name: torch.stack([row[name] for row in rows]) for name in self.others}
        values = torch.cat([parts[name].flatten(2) for name in self.others], 2)
        index = torch.cat([self.layout.positions[name].flatten() for name in self.others])
        return RestBlock(index, (values if graph else values.detach()).to("cpu"))


@contextmanager
def _plain_attention() -> Iterator[None]:
    """Fused attention kernels have no batching rule, and the fused path of a transformer layer has no derivative."""
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with sdpa_kernel(SDPBackend.MATH):
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)


def _row(x: Inputs, i: int) -> Inputs:
    return map_inputs(lambda part: part[i], x)


def rest_of(module: nn.Module, names: tuple[str, ...]) -> dict[str, Tensor]:
    """Parameters that are not free, and buffers."""
    return {name: p.detach() for name, p in module.named_parameters() if name not in names} | dict(module.named_buffers())


def open_any(
    frozen: Frozen,
    names: tuple[str, ...],
    x: Inputs,
    f: Tensor,
    probe: Probe,
    materialise: bool,
    note: str | None,
    head: tuple[str, ...] = (),
) -> AnyParameters:
    """Plan the layers, and validate the plan against plain backpropagation on a few rows."""
    parameters = dict(frozen.module.named_parameters())
    layout = contiguous_layout({name: parameters[name].shape for name in names})
    theta = layout.pack({name: parameters[name] for name in names})
    rest = rest_of(frozen.module, names)
    rows = row_count(x)
    plans = _plans(probe, parameters, layout, rows)
    planned = torch.zeros(layout.size, dtype=torch.bool)
    for plan in plans:
        planned[plan.positions] = True
    others = tuple(name for name in names if not bool(planned[layout.positions[name]].all()))
    outputs = f.shape[1]
    seen = sum(c.result.numel() * outputs + patches(c).numel() for c in probe.calls if c.input.shape[0] == rows) // rows
    rest_size = sum(layout.positions[name].numel() for name in others)
    whole = layout.size if materialise else 0
    extra = 8 * (2 * seen + outputs * (2 * rest_size + 3 * whole))
    notes = () if note is None else (note,)
    network = AnyParameters(frozen, layout, theta, outputs, rest, plans, others, extra, notes, head)
    few = frozen.cast(slice_inputs(x, slice(0, CHECKED_ROWS)))
    if not _agrees(network, few) and plans:
        notes = (*notes, UNLIKE_LAYERS)
        extra = 8 * outputs * 5 * layout.size
        return AnyParameters(frozen, layout, theta, outputs, rest, (), names, extra, notes, head)
    return network


def _plans(probe: Probe, parameters: Mapping[str, Tensor], layout: Layout, rows: int) -> tuple[LayerPlan, ...]:
    """Layers whose free parameters are used in linear or convolutional calls on batches, and nowhere else."""
    names = {id(p): name for name, p in parameters.items()}

    def plain(tensor: Tensor | None) -> bool:
        return tensor is None or set(probe.uses.get(id(tensor), ())) <= {LINEAR, CONVOLUTION}

    plans: dict[str, LayerPlan] = {}
    for call in probe.calls:
        weight = names.get(id(call.weight))
        bias = None if call.bias is None else names.get(id(call.bias))
        if weight is None or not plain(call.weight) or not plain(call.bias) or call.input.shape[0] != rows:
            continue
        shared = [c for c in probe.calls if c.weight is call.weight or (call.bias is not None and c.bias is call.bias)]
        if any(c.weight is not call.weight or c.bias is not call.bias or c.input.shape[0] != rows for c in shared):
            continue  # partly tied: uses plain differentiation
        weight_free, bias_free = weight in layout.positions, bias is not None and bias in layout.positions
        if not weight_free and not bias_free:
            continue
        parts = [layout.positions[weight].flatten(1)] if weight_free else []
        if bias_free and bias is not None:
            parts.append(layout.positions[bias].unsqueeze(1))
        plans[weight] = LayerPlan(weight, torch.cat(parts, 1), weight_free, bias_free)
    return tuple(plans.values())


def _agrees(network: AnyParameters, x: Inputs) -> bool:
    """Whether Jᵀg by layers equals Jᵀg by backpropagation through the whole network, for one g."""
    free = {name: value.requires_grad_(True) for name, value in network._free(network.theta).items()}
    with torch.enable_grad():
        f = network.run(free, x)
        if not f.requires_grad:
            f = f + 0 * sum(value.sum() for value in free.values())  # a forward under no_grad: all gradients are zero
        g = torch.linspace(-1, 1, f.numel(), dtype=f.dtype, device=f.device).reshape(f.shape) + 0.1
        grads = torch.autograd.grad((f * g).sum(), list(free.values()), allow_unused=True)
    if all(grad is None or not bool(grad.any()) for grad in grads):
        raise ValueError(
            "The gradient of the network's outputs in its free parameters is zero, so they would have no "
            "uncertainty. Remove torch.no_grad() and .detach() from its forward, or select other parameters."
        )
    named = {n: torch.zeros_like(free[n]) if grad is None else grad for n, grad in zip(free, grads, strict=True)}
    expected = network.layout.pack(named)
    found = network.linearise(x, network.theta)[1].double().pull(g.detach().to("cpu", torch.float64))
    enough = max(1e-3, 4 * torch.finfo(network.dtype).eps)  # half precision has a larger rounding error in one product
    return bool((found - expected).abs().max() <= enough * (1e-12 + expected.abs().max()))
