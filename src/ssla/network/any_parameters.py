"""Any set of free parameters: layer by layer where a layer has a Kronecker form, entry by entry
elsewhere.

A linear or convolutional layer, or a product in an attention or a recurrent layer, contributes
J = Σ_t δ_t ⊗ a_t with its inputs a and backpropagated output gradients δ: neither the Jacobian nor
an array of its size is built. Scales and shifts of norms have the columns Σ_t δ_t x̂_t and Σ_t δ_t,
from the same backward passes. For other parameters (embeddings, grouped convolutions, bare ones)
the columns of J come from batched reverse-mode differentiation.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn
from torch.func import functional_call, jacrev, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel

from ssla._checks import batched
from ssla.curvature.jacobians import Jacobian, LayerBlock, LayerJacobian, RestBlock
from ssla.data import Inputs, leaves, map_inputs, row_count, slice_inputs
from ssla.network.bounds import shrink_factors, shrunk
from ssla.network.frozen import Frozen, in_chunks, rows_within
from ssla.network.layout import Layout, contiguous_layout
from ssla.network.watch import (
    CONVOLUTION,
    LINEAR,
    NORM,
    Call,
    Layers,
    Probe,
    by_place,
    patches,
    row_axis,
)

CHECKED_ROWS = 4
MAPPED = (
    "torch.func.vmap over inputs is for posteriors of a last layer, but these weights are others: "
    "their Jacobian takes a backward pass. Rows do not depend on each other: give all rows in one "
    "call in place of vmap."
)
# parts of the budget that one chunk of rows may take in `chunks`: a guess, beside the curvature's
# own share
CHUNK_SHARE = 4
UNLIKE_LAYERS = (
    "derivatives layer by layer do not agree with backpropagation through the whole network, so no "
    "layer uses the Kronecker form (structure='kfac' is a diagonal)"
)
UNLIKE_SOME = (
    "derivatives layer by layer do not agree with backpropagation through the whole network for "
    "{names}, which have no Kronecker form (structure='kfac' is a diagonal there)"
)


@dataclass(frozen=True)
class LayerPlan:
    """A layer with a Kronecker form: its weight (possibly frozen), and the positions of its free
    entries in θ (out, in [+ 1]).

    The projections of an attention are layers of their own: rows of one weight, from `first` on.
    """

    weight: str
    positions: Tensor
    weight_free: bool
    bias_free: bool
    first: int = 0
    axis: int = 0  # the dimension of its inputs that holds the rows


@dataclass(frozen=True)
class NormPlan:
    """A norm whose scale or shift is free."""

    weight: str  # possibly frozen
    bias: str | None  # None: frozen, or none
    axis: int = 0


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
    norms: tuple[NormPlan, ...] = ()
    jacobian_per_row: int = 0  # bytes; 0: not known, of a network from a file

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

    @property
    def columns(self) -> tuple[str, ...]:
        """Free parameters that are neither of a layer with a Kronecker form nor of a norm."""
        of_norms = {name for plan in self.norms for name in (plan.weight, plan.bias)}
        return tuple(name for name in self.others if name not in of_norms)

    def rows_at_once(self, budget: int) -> int:
        return rows_within(budget // CHUNK_SHARE, self.bytes_per_row)

    def chunks(self, x: Inputs, budget: int) -> Iterator[Inputs]:
        return in_chunks(x, self.rows_at_once(budget))

    def _free(self, theta: Tensor) -> dict[str, Tensor]:
        device, dtype = self.frozen.device, self.frozen.dtype
        return {
            name: theta[index].to(device, dtype) for name, index in self.layout.positions.items()
        }

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
        f, blocks, norms = self._layer_blocks(x, free, graph)
        rest = self._rest_block(x, free, norms, graph) if self.others else None
        f, J = (
            f.to("cpu"),
            LayerJacobian(self.layout.size, self.outputs, f.shape[0], tuple(blocks), rest),
        )
        factors = shrink_factors(f, *J.inputs)
        return (
            (f, J)
            if factors is None
            else (shrunk(f, factors), J.with_inputs(shrunk(part, factors) for part in J.inputs))
        )

    def _layer_blocks(
        self, x: Inputs, free: Mapping[str, Tensor], graph: bool
    ) -> tuple[Tensor, list[LayerBlock], dict[str, Tensor]]:
        """f, the layers with a Kronecker form, and the columns (B, C, out) of scales and shifts
        of norms.
        """
        plans = {(plan.weight, plan.first): plan for plan in self.layers}
        norms = {plan.weight: plan for plan in self.norms}
        named = {**self.rest, **free}
        watch = Layers({id(named[name]): name for name in (*norms, *(name for name, _ in plans))})
        with torch.enable_grad(), self.frozen.worded(x), watch:
            f = self.run(free, x)
        if not watch.calls:
            return f if graph else f.detach(), [], {}
        rows, zeros = row_count(x), [zero for _, _, zero in watch.calls]
        with torch.enable_grad():  # the caller may work under no_grad
            sums = f.sum(0).unbind()
        pieces: list[list[Tensor]] = [[] for _ in zeros]  # of each call, for each output
        for one in sums:
            retain = graph or one is not sums[-1]
            grads = torch.autograd.grad(
                one, zeros, retain_graph=retain, create_graph=graph, allow_unused=True
            )
            for piece, zero, grad in zip(pieces, zeros, grads, strict=True):
                piece.append(torch.zeros_like(zero) if grad is None else grad)
        found: dict[tuple[str, int], list[tuple[Tensor, Tensor]]] = {}
        columns: dict[str, Tensor] = {}
        for piece, (name, call, _) in zip(pieces, watch.calls, strict=True):
            if call.kind == NORM:
                _add_norm(columns, norms[name], call, piece, rows, graph)
            else:
                plan = plans[name, call.first]
                a = self._inputs(plan, patches(call, rows, plan.axis, graph))
                delta = torch.stack(
                    [by_place(call, grad, rows, plan.axis) for grad in piece], 1
                )  # (B, C, T, out)
                found.setdefault((name, call.first), []).append((a, delta))
            piece.clear()
        blocks = []
        for key, uses in found.items():  # a weight used twice: its positions are concatenated
            a, delta = torch.cat([u[0] for u in uses], 1), torch.cat([u[1] for u in uses], 2)
            blocks.append(LayerBlock(plans[key].positions, a.to("cpu"), delta.to("cpu")))
        return f if graph else f.detach(), blocks, columns

    @staticmethod
    def _inputs(plan: LayerPlan, a: Tensor) -> Tensor:
        """With the bias as an input that is always one; without the weight's columns if only
        the bias is free.
        """
        ones = torch.ones_like(a[..., :1])
        if not plan.weight_free:
            return ones
        return torch.cat([a, ones], -1) if plan.bias_free else a

    def _rest_block(
        self, x: Inputs, free: Mapping[str, Tensor], norms: Mapping[str, Tensor], graph: bool
    ) -> RestBlock:
        chosen = {name: free[name] for name in self.others if name not in norms}
        parts = dict(norms)

        def one(parameters: Mapping[str, Tensor], row: Inputs) -> Tensor:
            return self.run(
                {**free, **parameters}, map_inputs(lambda part: part.unsqueeze(0), row)
            ).squeeze(0)

        if chosen:
            with warnings.catch_warnings():
                # The function has no other form for these layers, and the user cannot change that.
                warnings.filterwarnings(
                    "ignore", "There is a performance drop because we have not yet implemented"
                )
                try:
                    parts |= vmap(jacrev(one), in_dims=(None, 0))(chosen, x)
                except RuntimeError:  # a layer without a batching rule (packed sequences)
                    parts |= self._columns_one_by_one(x, free, chosen, graph)
        values = torch.cat(
            [parts[name].reshape(row_count(x), self.outputs, -1) for name in self.others], 2
        )
        index = torch.cat([self.layout.positions[name].flatten() for name in self.others])
        return RestBlock(index, (values if graph else values.detach()).to("cpu"))

    def _columns_one_by_one(
        self, x: Inputs, free: Mapping[str, Tensor], chosen: Mapping[str, Tensor], graph: bool
    ) -> dict[str, Tensor]:
        """Columns (B, C, …) by one backward pass for each output of each row."""
        own = {name: value.detach().requires_grad_(True) for name, value in chosen.items()}
        found: dict[str, list[Tensor]] = {name: [] for name in chosen}
        for i in range(row_count(x)):
            row = slice_inputs(x, slice(i, i + 1))
            with torch.enable_grad():
                outputs = self.run({**free, **own}, row)[0].unbind()
            for f in outputs:
                retain = graph or f is not outputs[-1]
                grads = torch.autograd.grad(
                    f,
                    list(own.values()),
                    retain_graph=retain,
                    create_graph=graph,
                    allow_unused=True,
                )
                for name, grad in zip(own, grads, strict=True):
                    found[name].append(torch.zeros_like(own[name]) if grad is None else grad)
        return {
            name: torch.stack(parts).unflatten(0, (-1, self.outputs))
            for name, parts in found.items()
        }


def _add_norm(
    columns: dict[str, Tensor],
    plan: NormPlan,
    call: Call,
    grads: list[Tensor],
    rows: int,
    graph: bool,
) -> None:
    """Add the columns of one use of a norm: Σ_t δ_t x̂_t for its scale, Σ_t δ_t for its shift."""
    plain = patches(call, rows, plan.axis, graph)  # x̂ (B, T, out)
    deltas = [by_place(call, grad, rows, plan.axis) for grad in grads]
    parts = {plan.weight: torch.stack([(delta * plain).sum(1) for delta in deltas], 1)}
    if plan.bias is not None:
        parts[plan.bias] = torch.stack([delta.sum(1) for delta in deltas], 1)
    for name, part in parts.items():
        columns[name] = columns[name] + part if name in columns else part


@contextmanager
def _plain_attention() -> Iterator[None]:
    """Fused attention kernels have no batching rule, and the fused path of a transformer layer
    has no derivative.
    """
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with sdpa_kernel(SDPBackend.MATH):
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)


def rest_of(module: nn.Module, names: tuple[str, ...]) -> dict[str, Tensor]:
    """Parameters that are not free, and buffers."""
    return {name: p.detach() for name, p in module.named_parameters() if name not in names} | dict(
        module.named_buffers()
    )


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
    uses = _groups(probe, parameters, _row_axes(frozen, x, probe))
    plans = _plans(uses, layout)
    norms = _norm_plans(uses, layout)
    few = frozen.cast(slice_inputs(x, slice(0, CHECKED_ROWS)))
    notes = () if note is None else (note,)
    network = AnyParameters(
        frozen, layout, theta, f.shape[1], rest, plans, names, 0, notes, head, norms
    )
    network = replace(network, others=_without_form(network))
    wrong = _disagreement(network, few)
    if bool(wrong.any()):
        # Only the layers that are wrong lose their form. If the others are wrong then, none has
        # one.
        plans = tuple(plan for plan in plans if not bool(wrong[plan.positions].any()))
        right = {name for name, index in layout.positions.items() if not bool(wrong[index].any())}
        norms = tuple(plan for plan in norms if {plan.weight, plan.bias} & set(names) <= right)
        network = replace(network, layers=_covered(plans, layout), norms=norms)
        network = replace(network, others=_without_form(network))
        if bool(_disagreement(network, few).any()):
            network = replace(
                network, layers=(), norms=(), others=names, notes=(*notes, UNLIKE_LAYERS)
            )
        else:
            odd = [name for name in names if name not in right]
            network = replace(network, notes=(*notes, UNLIKE_SOME.format(names=", ".join(odd))))
    jacobian, extra = _bytes_per_row(network, probe, row_count(x), materialise)
    return replace(network, jacobian_per_row=jacobian, extra_per_row=extra)


def _without_form(network: AnyParameters) -> tuple[str, ...]:
    """Free parameters that no layer with a Kronecker form has."""
    planned = torch.zeros(network.layout.size, dtype=torch.bool)
    for plan in network.layers:
        planned[plan.positions] = True
    return tuple(
        name for name, index in network.layout.positions.items() if not bool(planned[index].all())
    )


def _bytes_per_row(
    network: AnyParameters, probe: Probe, rows: int, materialise: bool
) -> tuple[int, int]:
    """Of one row's Jacobian, and of all that is needed beside the network's own results."""
    outputs, item = network.outputs, torch.finfo(network.dtype).bits // 8
    parameters = dict(network.frozen.module.named_parameters())
    planned = {id(parameters[plan.weight]) for plan in network.layers}
    calls = [call for call in probe.calls if id(call.weight) in planned]
    results = [call.result.numel() // rows for call in calls]
    sizes = [
        _input_size(call) // rows + outputs * result
        for call, result in zip(calls, results, strict=True)
    ]
    rest_size = sum(network.layout.positions[name].numel() for name in network.others)
    jacobian = item * sum(sizes) + 8 * outputs * rest_size
    # Zeros and gradients of one output, and one layer at a time in float64, with the product of its
    # gradients and Λ.
    layers = 3 * item * sum(results) + 8 * 2 * max(sizes, default=0)
    # All outputs of a row are differentiated together for columns.
    columns = outputs * network.frozen.bytes_per_row if network.columns else 0
    whole = 3 * network.layout.size if materialise else 0
    return jacobian, jacobian + layers + columns + 8 * outputs * (rest_size + whole)


def _input_size(call: Call) -> int:
    """Entries of `patches`."""
    if call.kind == LINEAR:
        return call.input.numel()
    return call.result.numel() // call.weight.shape[0] * call.weight[0].numel()


@dataclass(frozen=True)
class _Use:
    """The calls of the same rows of one weight (and bias)."""

    calls: tuple[Call, ...]
    weight: str
    bias: str | None
    axis: int

    @property
    def call(self) -> Call:
        return self.calls[0]


def _row_axes(frozen: Frozen, x: Inputs, probe: Probe) -> list[int | None]:
    """The dimension of each call's input that holds the rows, by a second forward pass with
    another number of them.
    """
    rows = row_count(x)
    few = [0] * (3 if rows == 2 else 2)
    inputs = frozen.cast(map_inputs(lambda part: part[few], x))
    first_axis = [0 if call.input.shape[:1] == (rows,) else None for call in probe.calls]
    try:
        with torch.no_grad(), Probe() as other:
            frozen.call(frozen.module, inputs)
    except (RuntimeError, TypeError, ValueError, IndexError, AttributeError, KeyError):
        return first_axis
    if [(call.kind, call.key) for call in probe.calls] != [
        (call.kind, call.key) for call in other.calls
    ]:
        return first_axis
    return [
        row_axis(one, rows, two, len(few))
        for one, two in zip(probe.calls, other.calls, strict=True)
    ]


def _groups(probe: Probe, parameters: Mapping[str, Tensor], axes: list[int | None]) -> list[_Use]:
    """Parameters that are used in layers on batches, and nowhere else.

    Partly tied ones use plain differentiation.
    """
    names = {id(p): name for name, p in parameters.items()}
    groups: dict[tuple[int, int], list[tuple[Call, int | None]]] = {}
    for call, axis in zip(probe.calls, axes, strict=True):
        groups.setdefault(call.key, []).append((call, axis))
    uses = []
    for group in groups.values():
        call, axis = group[0]
        same = all(_same_layer(call, other) and where == axis for other, where in group)
        allowed = {NORM} if call.kind == NORM else {LINEAR, CONVOLUTION}
        plain = all(
            set(probe.uses.get(id(t), ())) <= allowed
            for t in (call.weight, call.bias)
            if t is not None
        )
        if axis is None or not same or not plain or id(call.weight) not in names:
            continue
        bias = None if call.bias is None else names.get(id(call.bias))
        uses.append(_Use(tuple(one for one, _ in group), names[id(call.weight)], bias, axis))
    everything = [group[0][0] for group in groups.values()]
    return [
        use
        for use in uses
        if not any(_overlap(use.call, other) for other in everything if other.key != use.call.key)
    ]


def _same_layer(one: Call, two: Call) -> bool:
    return (
        one.kind == two.kind
        and one.bias is two.bias
        and one.bias_first == two.bias_first
        and one.out == two.out
    )


def _overlap(one: Call, two: Call) -> bool:
    """Whether two calls have entries of a weight or a bias in common."""
    weights = (
        one.weight is two.weight
        and one.first < two.first + two.out
        and two.first < one.first + one.out
    )
    ends = one.bias_first + one.out, two.bias_first + two.out
    biases = (
        one.bias is not None
        and one.bias is two.bias
        and one.bias_first < ends[1]
        and two.bias_first < ends[0]
    )
    return weights or biases


def _plans(uses: Iterable[_Use], layout: Layout) -> tuple[LayerPlan, ...]:
    """Layers with a Kronecker form whose parameters are free, in whole or in part."""
    plans = []
    for use in uses:
        call = use.call
        weight_free, bias_free = (
            use.weight in layout.positions,
            use.bias is not None and use.bias in layout.positions,
        )
        if call.kind == NORM or not (weight_free or bias_free):
            continue
        parts = []
        if weight_free:
            parts.append(
                layout.positions[use.weight][call.first : call.first + call.out].flatten(1)
            )
        if bias_free and use.bias is not None:
            parts.append(
                layout.positions[use.bias][call.bias_first : call.bias_first + call.out].unsqueeze(
                    1
                )
            )
        positions = torch.cat(parts, 1) if len(parts) > 1 else parts[0]
        plans.append(LayerPlan(use.weight, positions, weight_free, bias_free, call.first, use.axis))
    return _covered(tuple(plans), layout)


def _covered(plans: tuple[LayerPlan, ...], layout: Layout) -> tuple[LayerPlan, ...]:
    """Without layers that have a part only of a parameter of which another part has no
    Kronecker form.
    """
    while True:
        planned = torch.zeros(layout.size, dtype=torch.bool)
        for plan in plans:
            planned[plan.positions] = True
        partly = torch.zeros_like(planned)
        for index in layout.positions.values():
            partly[index] = not bool(planned[index].all())
        kept = tuple(plan for plan in plans if not bool(partly[plan.positions].any()))
        if len(kept) == len(plans):
            return kept
        plans = kept


def _norm_plans(uses: Iterable[_Use], layout: Layout) -> tuple[NormPlan, ...]:
    """Norms whose scale or shift is free."""
    plans = []
    for use in uses:
        bias = use.bias if use.bias in layout.positions else None
        if use.call.kind == NORM and (use.weight in layout.positions or bias is not None):
            plans.append(NormPlan(use.weight, bias, use.axis))
    return tuple(plans)


def _disagreement(network: AnyParameters, x: Inputs) -> Tensor:
    """Entries (P,) at which Jᵀg by layers is not Jᵀg by backpropagation through the whole
    network, for one g.
    """
    free = {
        name: value.requires_grad_(True) for name, value in network._free(network.theta).items()
    }
    with torch.enable_grad():
        f = network.run(free, x)
        if not f.requires_grad:
            f = f + 0 * sum(
                value.sum() for value in free.values()
            )  # a forward under no_grad: all gradients are zero
        g = torch.linspace(-1, 1, f.numel(), dtype=f.dtype, device=f.device).reshape(f.shape) + 0.1
        scored = (f * g).sum()
        grads = torch.autograd.grad(scored, list(free.values()), allow_unused=True)
    if all(grad is None or not bool(grad.any()) for grad in grads):
        raise ValueError(
            "The gradient of the network's outputs in its free parameters is zero, so they would "
            "have no uncertainty. Remove torch.no_grad() and .detach() from its forward, or select "
            "other parameters."
        )
    named = {
        n: torch.zeros_like(free[n]) if grad is None else grad
        for n, grad in zip(free, grads, strict=True)
    }
    expected = network.layout.pack(named)
    del (
        free,
        grads,
        named,
        f,
        scored,
    )  # their graph and copies take as much memory as the Jacobian that follows
    try:
        found = network.linearise(x, network.theta)[1].double().pull(g.to("cpu", torch.float64))
    except (RuntimeError, KeyError):  # positions that are not those of the plan
        return torch.ones_like(expected, dtype=torch.bool)
    enough = max(
        1e-3, 4 * torch.finfo(network.dtype).eps
    )  # half precision has a larger rounding error in one product
    return ~((found - expected).abs() <= enough * (1e-12 + expected.abs().max()))
