"""Passes over the data, with the sums at one θ.

Batches are checked, cast, and split into chunks that fit the memory budget. `Order` says what a
pass sums, `Pass` is its result, and `Reader` reads the data of one process.

A chunk is some rows, B of them, that are computed together. f (B, C) are their outputs, φ the
features of a last layer, and J their Jacobian ∂f/∂θ. The input factor of a last layer with
Kronecker factors is Σ φφᵀ; it depends on neither θ nor the noise. `ssla.fitting` lists the other
words.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from ssla.curvature import Dense, Extent, Structure
from ssla.curvature.automatic import Choice, choose_structure
from ssla.curvature.jacobians import Features, Jacobian
from ssla.curvature.memory import count_tensor_bytes, refuse_beyond_budget
from ssla.curvature.structure import MANY_CLASSES
from ssla.data import Batch, Rows, Source, check_batch
from ssla.fitting.sums import Averaging, Sums
from ssla.fitting.trained import Classes, Numbers
from ssla.fitting.watching import Spread, TargetRange
from ssla.likelihoods import Likelihood
from ssla.maths.progress import ProgressText, progress_bar
from ssla.network import (
    LastLayer,
    Network,
    Output,
    RowScale,
    open_network,
)
from ssla.network.frozen import count_rows_within
from ssla.network.head import MATRICES_PER_ROW
from ssla.priors import Prior
from ssla.report import POLISH, TILT

# Parts of the budget that the dense curvature for steps of the mean takes at most: with Kronecker
# factors of classes, whose own steps converge too, and otherwise. It is held three times: at the
# start, now, and at the next step.
NEWTON_SHARE, NEWTON_SHARE_OF_OTHERS = 4, 2
# Parameters of a last layer with Kronecker factors up to which it has that curvature: at (50k, 768,
# 2) it took 6 of 9 seconds.
MOST_FOR_NEWTON = 1000
# Parts of the budget that a fit may use besides its statistics: guesses, so that all together stay
# within 1.5 budgets (tests/fitting/test_memory.py).
CHUNK_SHARE = 8  # intermediate results of one chunk
KEPT_SHARE = 4  # features, or outputs and Jacobians, that are kept for further passes
# Copies of features and of outputs while a chunk of a last layer with Kronecker factors is summed.
POOLED_FEATURES, POOLED_OUTPUTS = 2, 8
EMPTY = "The data are empty: no batch with a row came. Check the loader, its sampler and drop_last."


@dataclass(frozen=True, eq=False)
class AutomaticStructure:
    """What the choice of a structure depends on, where no structure was asked for.

    This value is the same on every rank and worker, so that all of them choose the same structure.
    """

    rows: int | None  # the number of rows of all data; None where a process does not have it
    prior: Prior | None

    def choose(self, network: Network, budget: int, averages: bool) -> Choice:
        """Choose the structure for a network and a budget of bytes, with the reason as a text.

        averages: whether passes for a variational Gaussian will follow.
        """
        uneven = self.prior is not None and _precision_varies_inside_layers(self.prior, network)
        return choose_structure(measure_extent(network, self.rows, averages), budget, uneven)


def _precision_varies_inside_layers(prior: Prior, network: Network) -> bool:
    """Return whether a prior's precision varies inside a layer with a Kronecker form.

    A precision that is a full matrix (P, P) counts as one that varies.
    """
    precision = prior.bind(network.layout).precision(network.theta)
    diagonal = precision if precision.dim() == 1 else precision.diagonal()
    positions = network.layout.positions
    for names in network.layout.names_by_layer.values():
        inside = [
            diagonal[positions[name].flatten()] for name in names if name in network.kronecker_names
        ]
        if inside and bool((torch.cat(inside) != inside[0][0]).any()):
            return True
    return precision.dim() == 2


@dataclass(frozen=True, eq=False)
class Order:
    """What a pass is to sum."""

    theta: Tensor | None  # where the sums are taken (P,); None: at the trained weights
    likelihood: Likelihood
    structure: Structure
    mode: str | None  # what happens to θ̂; None: the default, see `choose_mode_for`
    # digests of what was asked for, which all ranks must share
    digests: Mapping[str, str] = field(default_factory=dict)
    averages: bool = False  # whether passes for averages over a Gaussian will follow
    # whether they were asked for; otherwise the Gaussian at the mode may replace them
    averages_asked: bool = False
    averaging: Averaging | None = None  # sum averages over this Gaussian; None: values at θ
    rereads: bool = False  # whether passes in other settings will follow
    # whether the input factor of a last layer is summed: once is enough for all passes over the
    # same rows
    sums_input_factor: bool = True
    direction: Tensor | None = None  # d (P,): sum Σ JᵀΛJ d only, in place of the gradient
    # the structure is still to be chosen, once the network is open; None: it is known
    automatic: AutomaticStructure | None = None

    def with_chosen_structure(self, network: Network, budget: int) -> Order:
        """Return the order with the structure that is chosen for the network.

        budget: in bytes. Where a structure was asked for, the order is returned unchanged.
        """
        if self.automatic is None:
            return self
        structure = self.automatic.choose(network, budget, self.averages).structure
        return replace(self, structure=structure, automatic=None)

    def choose_mode_for(self, network: Network) -> str:
        """Return the mode that was asked for; by default polish for a last layer, tilt otherwise.

        After the first pass a default of polish may become tilt: see `ssla.fitting.trained`.
        """
        return self.mode or (POLISH if network.linear else TILT)

    def polishes(self, network: Network) -> bool:
        """Return whether the pass belongs to the polish of a fit; a pass for averages does not."""
        return self.averaging is None and self.choose_mode_for(network) == POLISH

    def choose_structure_for(self, network: Network) -> Structure:
        """Return the structure that passes over the data of a network sum.

        This is the structure that was asked for. Only the Kronecker factors of a last layer of very
        many classes have a diagonal output factor by default.
        """
        has_many_classes = (
            network.linear and network.outputs > MANY_CLASSES and self.likelihood.softmax
        )
        return self.structure.for_many_classes() if has_many_classes else self.structure

    def sums_newton_curvature(self, network: Network, budget: int) -> bool:
        """Return whether the pass sums a dense curvature (P, P) besides the statistics.

        Newton steps of θ, or of a variational mean, use it. It is summed where such steps follow
        and its memory is a small share of the budget (in bytes). Steps without it take products
        with the curvature, a pass each.
        """
        if not self._steps_use_newton_curvature(network):
            return False
        memory = Dense(dual=False).memory(measure_extent(network))
        return memory <= budget // self._choose_budget_divisor()

    def _steps_use_newton_curvature(self, network: Network) -> bool:
        """Return whether Newton steps follow whose curvature the statistics do not hold."""
        averaging = self.averaging
        if self.direction is not None:  # a pass for one product
            return False

        # Very many rows are averaged at nodes of their own, and need no such curvature.
        if averaging is not None and averaging.row_nodes is not None:
            return False
        steps_follow = self.polishes(network) if averaging is None else averaging.moves
        # Exact statistics are that curvature for Gaussian noise, and in passes for averages.
        already_held = self.structure.exact and (self.likelihood.quadratic or averaging is not None)
        # The factorisation of a large last layer takes longer than the products.
        is_slow = (
            network.linear and self.structure.by_layers and network.layout.size > MOST_FOR_NEWTON
        )
        return steps_follow and not already_held and not is_slow

    def _choose_budget_divisor(self) -> int:
        """Return by which number the budget is divided for the curvature of Newton steps."""
        if self.likelihood.softmax and self.structure.exact:
            return 1  # it shares the memory of the statistics: a softmax has the same matrix
        if self.likelihood.softmax and self.structure.by_layers:
            return NEWTON_SHARE
        return NEWTON_SHARE_OF_OTHERS

    def needs_more_passes(self, network: Network, budget: int) -> bool:
        """Return whether the data will be read again after this pass.

        More passes follow for averages and for other settings, and for polish, unless the noise is
        Gaussian and the sums hold the exact curvature: then the mode follows from them. budget: in
        bytes.
        """
        exact = self.structure.exact or self.sums_newton_curvature(network, budget)
        determined = self.likelihood.quadratic and exact
        return self.rereads or self.averages or (self.polishes(network) and not determined)


@dataclass(frozen=True, eq=False)
class Pass:
    """The result of a pass over some rows. The passes of several shards merge into one."""

    sums: Sums | None  # None where there was no row
    target: TargetRange
    repeatable: bool  # whether the rows can be read again

    def merge(self, other: Pass) -> Pass:
        """Return the result of one pass over the rows of both."""
        sums = self.sums or other.sums
        if self.sums is not None and other.sums is not None:
            sums = self.sums.merge(other.sums)
        return Pass(sums, self.target.merge(other.target), self.repeatable and other.repeatable)


class Data(Protocol):
    """The source of passes: this process, the ranks of a group, or a cluster."""

    @property
    def network(self) -> Network:
        """Return the network, as it was opened on the first rows; raise ValueError before that."""
        ...

    @property
    def passes(self) -> int:
        """Return the number of passes over the data that have begun."""
        ...

    @property
    def source(self) -> Source | None:
        """Return all of the data, if this process reads them; None if others read parts."""
        ...

    def run_pass(self, order: Order) -> Pass:
        """Read the data once, and return the sums that the order asks for."""
        ...

    def scale_rows(self, scale: RowScale) -> None:
        """Give the last layer a scale of rows for all later passes; it must not have one yet."""
        ...


@dataclass(eq=False)
class Chunk:
    """What the passes need of one chunk: its inputs or features, targets and weights.

    `linearise` changes `outputs`, which it uses as a store.
    """

    x: Any  # the inputs; None where the features are enough
    y: Tensor  # (B,) or (B, C)
    weights: Tensor | None  # (B,)
    rounding: float  # ε of the dtype that y came in
    features: Features | None  # in the network's dtype, unless that has 16 bits
    offset: Tensor | None  # of the outputs (C,)
    outputs: tuple[Tensor, Tensor] | None = None  # the last θ of passes for averages, and f there

    def linearise(self, theta: Tensor, many_rows: bool) -> tuple[Tensor, Features]:
        """Return f (B, C) at θ (P,) in float64, and the features, which stand for J.

        many_rows: whether the data have very many rows. The features then stay in the dtype in
        which they are kept, and f is stored for the next pass at the same θ, which is recognised by
        the identity of the tensor. Otherwise the features are in float64. Raises AssertionError for
        a chunk without features.
        """
        assert self.features is not None
        if not many_rows:
            J = self.features.double()
            return self._add_offset(J.push(theta)), J
        if self.outputs is None or self.outputs[0] is not theta:
            f = self.features.double().push(theta)
            self.outputs = theta, self._add_offset(f)
        return self.outputs[1], self.features

    def _add_offset(self, f: Tensor) -> Tensor:
        """Return outputs (B, C) plus the offset, if there is one."""
        return f if self.offset is None else f + self.offset


class LinearChunk(NamedTuple):
    """A chunk with the outputs and the Jacobian at θ."""

    chunk: Chunk
    inputs: Any  # as they came; None: the chunk was kept from an earlier pass
    theta: Tensor  # (P,)
    f: Tensor  # (B, C), float64
    J: Jacobian


@dataclass(eq=False)
class Reader:
    """The data that this process reads, with what it keeps of them between passes.

    A pass changes the reader: it is counted, the first one opens the network and may keep chunks,
    and passes for averages may keep linearised chunks.
    """

    source: Source
    model: nn.Module | None  # None: the network is open
    weights: str | list[str] | tuple[str, ...]  # which weights of the model are free
    budget: int  # bytes
    progress: bool | None = None  # whether a bar is shown; None: after two seconds, on a terminal
    opened: Network | None = None  # None until the first rows have come
    passes: int = 0  # over the source
    reads: int = 0  # passes over the source or what is kept of it
    text: ProgressText = field(default_factory=lambda: ProgressText("fit"))
    kept: list[Chunk] | None = None  # chunks with features; None: no chunk is kept
    output: Output = None  # which part of the model's answer is f
    # the last order without a structure, and the same with the one that was chosen
    decided: tuple[Order, Order] | None = None
    # the chunks at the θ of passes for averages, while they fit the budget
    linearised: list[LinearChunk] | None = None

    @property
    def network(self) -> Network:
        """Return the network. Raises ValueError before the first row has come."""
        if self.opened is None:
            raise ValueError(EMPTY)
        return self.opened

    def run_pass(self, order: Order) -> Pass:
        """Read the data once, and return the sums that the order asks for.

        Chunks that are kept are read in place of the data. Raises ValueError for data that do not
        suit the network or the likelihood, and where data that can be read only once are to be read
        again.
        """
        self.reads += 1
        if self.progress is None and self.kept:
            self.text.show(f"pass {self.reads:,} over stored features")
        try:
            return self._sum_chunks(order)
        finally:
            self.text.close()

    def scale_rows(self, scale: RowScale) -> None:
        """Give the last layer a scale of rows, and scale the features that are kept, in place."""
        self.opened = with_row_scale(self.network, scale)
        self.linearised = None
        for chunk in self.kept or ():
            assert chunk.features is not None
            chunk.features = self.opened.scale_features(chunk.features)
            chunk.outputs = None

    def _sum_chunks(self, order: Order) -> Pass:
        """Sum all chunks as the order says, and return the result of the pass.

        The sums are products with a direction, averages over a Gaussian, or values at θ. A product
        may be one with averages, so `order.direction` is checked before `order.averaging`.
        """
        total: Sums | None = None
        target = TargetRange()
        for number, linear in enumerate(self._iterate_linear_chunks(order)):
            # The structure is known once the first chunk has opened the network.
            if total is None:
                order = self._with_structure(order)
                total = self._make_zero_sums(order)
            chunk, f, J = linear.chunk, linear.f, linear.J
            rows = f, J, chunk.y, chunk.weights, order.likelihood
            if order.direction is not None:
                total = total.add_product(*rows, order.direction, order.averaging, number)
            elif order.averaging is not None:
                total = total.add_averages(*rows, order.averaging, number)
            else:
                total = total.add(*rows)
                target = target.merge(self._watch_targets(linear, order.likelihood))
        return Pass(total, target, self.source.repeatable or bool(self.kept))

    def _make_zero_sums(self, order: Order) -> Sums:
        """Return the sums over no row, for an order whose structure is known."""
        return Sums.zero(
            self.network.layout.size,
            order.choose_structure_for(self.network),
            order.sums_newton_curvature(self.network, self.budget),
            order.sums_input_factor,
        )

    def _watch_targets(self, linear: LinearChunk, likelihood: Likelihood) -> TargetRange:
        """Return what later warnings and the choice of the mode need to know about a chunk."""
        chunk = linear.chunk
        f = linear.f
        spread = None
        if likelihood.quadratic:
            eps = torch.finfo(self.network.dtype).eps
            rounding = eps * self._compute_size_before_rounding(chunk, f, linear.theta)
            spread = Spread.from_chunk(chunk.y, f, chunk.weights, chunk.rounding, rounding)
        outputs = self.network.outputs
        classes = Classes.from_chunk(likelihood, chunk.y, outputs, chunk.features, chunk.weights)
        numbers = Numbers.from_chunk(likelihood, chunk.y, f, chunk.features, chunk.weights)
        return TargetRange.from_chunk(
            chunk.y, linear.inputs, spread, classes, numbers, chunk.weights
        )

    def _iterate_linear_chunks(self, order: Order) -> Iterator[LinearChunk]:
        """Yield the chunks of a pass with θ, f and J.

        All passes for averages have the same θ. So the first of them keeps f and J in `linearised`
        for the next ones, if they take little memory and features are not kept already.
        """
        if order.averaging is not None and self.linearised:
            yield from self.linearised
            return
        kept: list[LinearChunk] | None = None  # None: nothing is kept
        if order.averaging is not None and not self.kept:
            kept = []
        size = 0
        for chunk, inputs in self._iterate_chunks(order):
            theta = self.network.theta if order.theta is None else order.theta
            f, J = self._linearise(chunk, theta, order)
            size += count_tensor_bytes(J)
            if size > self.budget // KEPT_SHARE:
                kept = None
            if kept is not None:
                # Passes for averages use neither the inputs nor θ.
                kept.append(LinearChunk(chunk, None, self.network.theta, f, J))
            yield LinearChunk(chunk, inputs, theta, f, J)
        self.linearised = kept

    def _linearise(self, chunk: Chunk, theta: Tensor, order: Order) -> tuple[Tensor, Jacobian]:
        """Return f (B, C) of a chunk at θ (P,) in float64, and J.

        J is in float64 too, except for the features of very many rows: see `Chunk.linearise`.
        """
        if chunk.features is None:
            f, J = self.network.linearise(chunk.x, theta)
            return f.double(), J.double()
        many_rows = order.averaging is not None and order.averaging.row_nodes is not None
        return chunk.linearise(theta, many_rows)

    def _compute_size_before_rounding(self, chunk: Chunk, f: Tensor, theta: Tensor) -> Tensor:
        """Return the size (B, C) of the numbers whose rounding limits the accuracy of f (B, C).

        The size is |f| where the network computes f in its own dtype. A last layer is multiplied in
        float64 at θ (P,), so only its features φ are rounded: the size is |φ| |W|ᵀ.
        """
        if chunk.features is None:
            return f.abs()
        layout = self.network.layout
        weight = layout.positions[layout.names[0]]
        return chunk.features.double().phi[:, : weight.shape[1]].abs() @ theta[weight].abs().mT

    def _iterate_chunks(self, order: Order) -> Iterator[tuple[Chunk, Any]]:
        """Yield chunks of the data, checked and cast, each with its inputs as they came.

        The inputs are None for a chunk that was kept from the first pass. After the last chunk,
        `kept` holds all of them if they fit the budget. Raises ValueError where the data cannot be
        read again.
        """
        if self.kept:
            yield from ((chunk, None) for chunk in self.kept)
            return
        if self.passes and not self.source.repeatable:
            raise ValueError(
                "The data can be read only once (a generator), but this fit needs another pass. "
                "Give a DataLoader, a list of batches or arrays, or mode='tilt'."
            )

        self.passes += 1
        label = f"pass {self.passes}"
        rows = Rows(
            progress_bar(self.source, self.source.length, self.progress, label, "batch"),
            rows_at_once=lambda batch: self._count_rows_at_once(batch, order),
            prepare=lambda batch: self._prepare_chunk(batch, order),
            size=lambda chunk: self._count_bytes_to_keep(chunk, order),
            budget=self.budget // KEPT_SHARE,
        )
        yield from rows.read_chunks()
        self.kept = rows.kept

    def _count_rows_at_once(self, batch: Batch, order: Order) -> int:
        """Return how many rows a chunk of a batch may have.

        The number depends on the size of the network. The first batch opens the network, which is
        stored in `opened`.
        """
        if self.opened is None:
            assert self.model is not None
            rows = self.source.rows
            self.opened = open_network_within(
                self.model, self.weights, batch.x, order, self.budget, rows, self.output
            )
        bytes_of_row = count_bytes_per_row(self.opened, self._with_structure(order), self.budget)
        return count_rows_within(self.budget // CHUNK_SHARE, bytes_of_row)

    def _with_structure(self, order: Order) -> Order:
        """Return the order with a structure, which is chosen once for each order and stored."""
        if order.automatic is None:
            return order
        if self.decided is None or self.decided[0] is not order:
            self.decided = order, order.with_chosen_structure(self.network, self.budget)
        return self.decided[1]

    def _prepare_chunk(self, batch: Batch, order: Order) -> Chunk:
        """Check and cast the rows of a batch, and return them as a chunk.

        The chunk has the features of a last layer, or otherwise the inputs. Raises ValueError for
        rows that do not suit the network or the likelihood.
        """
        network = self.network
        support = order.likelihood.support_for(network.outputs)
        _, y, weights = check_batch(batch, support, network.outputs)
        x = network.cast(batch.x)
        features = offset = None
        if network.linear:
            _, J = network.linearise(x, network.theta)
            assert isinstance(J, Features)
            features = _cast_features_to_keep(J)
            offset = network.offset
            x = None
        rounding = torch.finfo(batch.y.dtype).eps if batch.y.is_floating_point() else 0.0
        return Chunk(x, y, weights, rounding, features, offset)

    def _count_bytes_to_keep(self, chunk: Chunk, order: Order) -> int | None:
        """Return the bytes of what the first pass keeps of a chunk for further passes.

        The result is None where nothing is kept: in later passes, for a chunk without features, or
        if no pass will follow.
        """
        if self.passes > 1 or chunk.features is None:
            return None
        if not self._with_structure(order).needs_more_passes(self.network, self.budget):
            return None
        return count_tensor_bytes(chunk.features.phi) + 8 * chunk.y.numel()  # 8 bytes a target


def _cast_features_to_keep(J: Features) -> Features:
    """Return the features J as they are kept for further passes, in float64 or float32.

    Features of a network in lower precision are kept in float32: that takes half of the memory of
    float64, and products of its numbers are exact in float64.
    """
    if J.dtype == torch.float64:
        return replace(J.double(), keeps_squares=True)
    return replace(J, phi=J.phi.float(), keeps_squares=True)


def with_row_scale(network: Network, scale: RowScale) -> LastLayer:
    """Return the network with a scale of rows, by which the features of each row are divided.

    Raises AssertionError unless the network is a last layer that has neither a scale of rows nor an
    offset.
    """
    assert isinstance(network, LastLayer)
    assert network.row_scale is None
    assert network.offset is None
    return replace(network, row_scale=scale)


def measure_extent(network: Network, rows: int | None = None, averages: bool = False) -> Extent:
    """Return the sizes of a fit of a network, from which structures estimate their memory.

    rows: None where they are not known. averages: whether a variational Gaussian is found.
    """
    return Extent(network.layout.size, network.outputs, network.layer_shapes, rows, averages)


def count_bytes_per_row(network: Network, order: Order, budget: int) -> int:
    """Return the bytes that the intermediate results of one row take in a pass.

    A last layer with Kronecker factors needs no matrix for each row, unless the pass sums a dense
    curvature for Newton steps. budget: in bytes; it decides whether that curvature is summed.
    """
    pooled = network.linear and order.structure.by_layers
    if not pooled or order.sums_newton_curvature(network, budget):
        return network.bytes_per_row
    outputs = network.outputs
    width = network.layout.size // outputs
    # What the network counts for the Jacobian and the precisions of a row is not needed here.
    matrices = 8 * (width * outputs + MATRICES_PER_ROW * outputs**2)
    pooled_bytes = 8 * (POOLED_FEATURES * width + POOLED_OUTPUTS * outputs)
    return network.bytes_per_row - matrices + pooled_bytes


def open_network_within(
    model: nn.Module,
    weights: str | list[str] | tuple[str, ...],
    x: Any,
    order: Order,
    budget: int,
    rows: int | None,
    output: Output = None,
) -> Network:
    """Open a network on inputs x for a fit within a budget of bytes.

    weights: which weights of the model are free. rows: the number of rows of all data; None where
    it is not known. output: which part of the model's answer is f. Raises ValueError where what the
    fit asks for is beyond the budget, or where the outputs do not fit the likelihood.
    """
    links = order.likelihood.links
    materialised = order.structure.needs_jacobian_entries
    network = open_network(model, weights, x, materialised, output, links)
    order = order.with_chosen_structure(network, budget)

    # The structure that was chosen may need less of the network than the one it replaces.
    if materialised and not order.structure.needs_jacobian_entries and not network.linear:
        network = open_network(model, weights, x, materialise=False, output=output, links=links)
    order.likelihood.support_for(network.outputs)  # raises where the outputs do not fit

    # A default variational Gaussian that is too large is replaced by the Gaussian at the mode. So
    # its averages count only where it was asked for, or where the fit would not give it up.
    required = order.averages_asked or network.linear or order.structure.couples_all_parameters
    extent = measure_extent(network, rows, order.averages and required)
    refuse_beyond_budget(
        order.choose_structure_for(network),
        extent,
        count_bytes_per_row(network, order, budget),
        budget,
    )
    return network


def thin_reader(reader: Reader, most: int) -> Reader:
    """Return a reader of at most `most` of the rows whose features a reader keeps.

    The rows are evenly spread: every k-th row of all chunks is read, with k times its weight, so
    that it stands for the rows beside it that are left out. The reader itself is returned where it
    keeps no features, or at most `most` rows of them.
    """
    chunks = [chunk for chunk in reader.kept or () if chunk.features is not None]
    row_count = sum(len(chunk.y) for chunk in chunks)
    stride = -(-row_count // most)  # rounded up
    if stride <= 1:
        return reader
    thinned = []
    start = 0  # the number of the chunk's first row among those of all chunks
    for chunk in chunks:
        assert chunk.features is not None
        # Every stride-th row of all chunks together, not of each chunk.
        rows = slice(-start % stride, None, stride)
        start += len(chunk.y)
        y = chunk.y[rows]
        weights = torch.ones(len(y), dtype=torch.float64)
        if chunk.weights is not None:
            weights = chunk.weights[rows]
        features = replace(chunk.features, phi=chunk.features.phi[rows].contiguous())
        if len(y):
            thinned.append(replace(chunk, y=y, weights=weights * stride, features=features))

    return make_reader_of_chunks(reader.network, thinned, reader.weights, reader.budget)


def make_reader_of_chunks(
    network: Network,
    chunks: list[Chunk],
    weights: str | list[str] | tuple[str, ...],
    budget: int,
) -> Reader:
    """Return a reader whose data are these chunks with features, and nothing else.

    weights: which weights of the network are free; the reader stores the value and does not use it.
    budget: in bytes.
    """
    no_batches = Source(lambda: iter(()), repeatable=True, length=0)
    return Reader(no_batches, None, weights, budget, opened=network, kept=chunks)
