"""Passes over the data: chunks that fit the budget, checked and cast, summed at one θ."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from ssla.curvature import Dense, Extent, Structure
from ssla.curvature.automatic import Choice, choose
from ssla.curvature.jacobians import Features, Jacobian
from ssla.curvature.kfac import MANY_CLASSES
from ssla.curvature.memory import bytes_of, refuse_beyond_budget
from ssla.data import Batch, Rows, Source, checked
from ssla.fitting.sums import Around, Sums
from ssla.fitting.trained import Classes, Numbers
from ssla.fitting.watching import Spread, TargetRange, bar
from ssla.likelihoods import Likelihood
from ssla.maths.progress import Text
from ssla.network import (
    LastLayer,
    Network,
    Output,
    RowScale,
    open_network,
)
from ssla.network.frozen import rows_within
from ssla.network.head import PRECISIONS
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
POOLED_FEATURES, POOLED_OUTPUTS = (
    2,
    8,
)  # copies of them while a chunk of a last layer with Kronecker factors is summed
KEPT_SHARE = 4  # features, or outputs and Jacobians, that are kept for further passes
EMPTY = "The data are empty: no batch with a row came. Check the loader, its sampler and drop_last."


@dataclass(frozen=True, eq=False)
class Unchosen:
    """What decides the structure of a fit without one, before its first pass: the same on every
    rank and worker.
    """

    rows: int | None  # of all data, if every process knows them
    prior: Prior | None

    def choose(self, network: Network, budget: int, averages: bool) -> Choice:
        uneven = self.prior is not None and _uneven(self.prior, network)
        return choose(extent_of(network, self.rows, averages), budget, uneven)


def _uneven(prior: Prior, network: Network) -> bool:
    """Whether a prior's precision varies inside a layer with a Kronecker form."""
    precision = prior.bind(network.layout).precision(network.theta)
    diagonal = precision if precision.dim() == 1 else precision.diagonal()
    places = network.layout.positions
    for names in network.layout.layers().values():
        inside = [diagonal[places[name].flatten()] for name in names if name in network.kronecker]
        if inside and bool((torch.cat(inside) != inside[0][0]).any()):
            return True
    return precision.dim() == 2


@dataclass(frozen=True, eq=False)
class Order:
    """What a pass is to sum."""

    theta: Tensor | None  # where (None: as trained)
    likelihood: Likelihood
    structure: Structure
    mode: str | None
    marks: Mapping[str, str] = field(
        default_factory=dict
    )  # digests of what was asked for, which all ranks must share
    averages: bool = False  # whether passes for averages over a Gaussian will follow
    averages_asked: bool = (
        False  # whether they were asked for; a default gives way to the Gaussian at the mode
    )
    around: Around | None = None  # sum averages over this Gaussian; None: values at θ
    rereads: bool = False  # whether passes in other settings will follow
    # whether the input factor of a last layer is summed: once is enough for all passes over the
    # same rows
    inputs: bool = True
    direction: Tensor | None = None  # sum Σ JᵀΛJ d only, in place of the gradient
    unchosen: Unchosen | None = (
        None  # the structure is still to be chosen, once the network is open
    )

    def chosen(self, network: Network, budget: int) -> Order:
        """With the structure that is chosen for the network, where none was asked for."""
        if self.unchosen is None:
            return self
        structure = self.unchosen.choose(network, budget, self.averages).structure
        return replace(self, structure=structure, unchosen=None)

    def mode_for(self, network: Network) -> str:
        """As asked for; by default polish for a last layer, tilt otherwise.

        See `trained` for the last layer of a classifier.
        """
        return self.mode or (POLISH if network.linear else TILT)

    def polishes(self, network: Network) -> bool:
        return self.around is None and self.mode_for(network) == POLISH

    def structure_for(self, network: Network) -> Structure:
        """As asked for; the Kronecker factors of a last layer of very many classes have a
        diagonal output factor by default.
        """
        many = network.linear and network.outputs > MANY_CLASSES and self.likelihood.softmax
        return self.structure.for_many_classes() if many else self.structure

    def newton(self, network: Network, budget: int) -> bool:
        """Whether steps of the mean have a dense curvature of their own: while P² is small, unless
        the statistics are it.

        Where they have none, they take products with the curvature, a pass each.
        """
        if self.direction is not None or (
            self.around is not None and self.around.row_nodes is not None
        ):
            return False
        same = self.structure.exact and (self.likelihood.quadratic or self.around is not None)
        steps = self.polishes(network) if self.around is None else self.around.moves
        share = NEWTON_SHARE_OF_OTHERS
        if self.likelihood.softmax and self.structure.exact:
            share = 1  # it is the same matrix as that of the statistics
        elif self.likelihood.softmax and self.structure.by_layers:
            share = NEWTON_SHARE
        slow = network.linear and self.structure.by_layers and network.layout.size > MOST_FOR_NEWTON
        return (
            steps
            and not same
            and not slow
            and Dense(dual=False).memory(extent_of(network)) <= budget // share
        )

    def again(self, network: Network, budget: int) -> bool:
        """Whether the data will be read again: for averages, or by polish unless the sums hold
        a Gaussian's quadratic whole.
        """
        whole = self.likelihood.quadratic and (self.structure.exact or self.newton(network, budget))
        return self.rereads or self.averages or (self.polishes(network) and not whole)


@dataclass(frozen=True, eq=False)
class Pass:
    """What a pass found. Those of shards merge."""

    sums: Sums | None  # of no row: None
    target: TargetRange
    repeatable: bool

    def merge(self, other: Pass) -> Pass:
        sums = self.sums or other.sums
        if self.sums is not None and other.sums is not None:
            sums = self.sums.merge(other.sums)
        return Pass(sums, self.target.merge(other.target), self.repeatable and other.repeatable)


class Data(Protocol):
    """Where passes come from: this process, the ranks of a group, a cluster."""

    @property
    def network(self) -> Network:
        """As opened on the first rows."""
        ...

    @property
    def passes(self) -> int:
        """Passes begun."""
        ...

    @property
    def source(self) -> Source | None:
        """All of the data, if this process can read them again."""
        ...

    def read(self, order: Order) -> Pass: ...

    def scale_rows(self, scale: RowScale) -> None:
        """From now on, passes are over the last layer with this scale of rows."""
        ...


@dataclass(eq=False)
class Chunk:
    """What the passes need of one chunk: its Jacobian or features, targets, weights."""

    x: Any
    y: Tensor
    weights: Tensor | None
    grain: float  # ε of the dtype that y came in
    features: Features | None  # in the network's dtype, unless that has 16 bits
    offset: Tensor | None
    outputs: tuple[Tensor, Tensor] | None = None  # the last θ of passes for averages, and f there

    def linearised(self, theta: Tensor, rows_of_many: bool) -> tuple[Tensor, Features]:
        """f in float64, and the features: in float64, too, unless the rows are of very many,
        whose f is then kept.
        """
        assert self.features is not None
        if not rows_of_many:
            J = self.features.double()
            f = J.push(theta)
            return (f if self.offset is None else f + self.offset), J
        if self.outputs is None or self.outputs[0] is not theta:
            f = self.features.double().push(theta)
            self.outputs = theta, (f if self.offset is None else f + self.offset)
        return self.outputs[1], self.features


@dataclass(eq=False)
class Reader:
    """The data that this process reads."""

    source: Source
    model: nn.Module | None
    weights: str | list[str] | tuple[str, ...]
    budget: int
    progress: bool | None = None  # None: after two seconds, on a terminal
    opened: Network | None = None
    passes: int = 0  # over the source
    reads: int = 0  # passes over the source or what is kept of it
    text: Text = field(default_factory=lambda: Text("fit"))
    kept: list[Chunk] | None = None
    output: Output = None  # which part of the model's answer is f
    decided: tuple[Order, Order] | None = (
        None  # the last order without a structure, and the same with the one that was chosen
    )
    linearised: list[tuple[Chunk, Tensor, Jacobian]] | None = (
        None  # at the θ of passes for averages, while it fits the budget
    )

    @property
    def network(self) -> Network:
        if self.opened is None:
            raise ValueError(EMPTY)
        return self.opened

    def read(self, order: Order) -> Pass:
        """One pass: the sums at order.theta."""
        self.reads += 1
        if self.progress is None and self.kept:
            self.text.show(f"pass {self.reads:,} over stored features")
        try:
            return self._read(order)
        finally:
            self.text.close()

    def scale_rows(self, scale: RowScale) -> None:
        self.opened = with_row_scale(self.network, scale)
        self.linearised = None
        for chunk in self.kept or ():
            assert chunk.features is not None
            chunk.features, chunk.outputs = self.opened.scaled(chunk.features), None

    def _read(self, order: Order) -> Pass:
        total: Sums | None = None
        target = TargetRange()
        for chunk, (row, seen, theta, f, J) in enumerate(self._linear_rows(order)):
            network = self.network
            if total is None:
                order = self._chosen(order)
                newton = order.newton(network, self.budget)
                total = Sums.zero(
                    network.layout.size, order.structure_for(network), newton, order.inputs
                )
            if order.direction is not None:
                total = total.add_product(
                    f, J, row.y, row.weights, order.likelihood, order.direction, order.around, chunk
                )
                continue
            if order.around is not None:
                total = total.add_averages(
                    f, J, row.y, row.weights, order.likelihood, order.around, chunk
                )
                continue
            total = total.add(f, J, row.y, row.weights, order.likelihood)
            spread = None
            if order.likelihood.quadratic:
                rounding = torch.finfo(network.dtype).eps * self._rounded(row, f, theta)
                spread = Spread.of(row.y, f, row.weights, row.grain, rounding)
            classes = Classes.of(
                order.likelihood, row.y, network.outputs, row.features, row.weights
            )
            numbers = Numbers.of(order.likelihood, row.y, f, row.features, row.weights)
            target = target.see(row.y, seen, spread, classes, numbers, row.weights)
        return Pass(total, target, self.source.repeatable or bool(self.kept))

    def _linear_rows(self, order: Order) -> Iterator[tuple[Chunk, Any, Tensor, Tensor, Jacobian]]:
        """Chunks with θ, f and J.

        Passes for averages share one θ: f and J are kept while they take little memory.
        """
        if order.around is not None and self.linearised:
            yield from ((row, None, self.network.theta, f, J) for row, f, J in self.linearised)
            return
        kept: list[tuple[Chunk, Tensor, Jacobian]] | None = (
            None if order.around is None or self.kept else []
        )
        size = 0
        for row, seen in self._rows(order):
            theta = self.network.theta if order.theta is None else order.theta
            f, J = self._linearise(row, theta, order)
            size += bytes_of(J)
            if kept is not None:
                kept = None if size > self.budget // KEPT_SHARE else [*kept, (row, f, J)]
            yield row, seen, theta, f, J
        self.linearised = kept

    def _linearise(self, row: Chunk, theta: Tensor, order: Order) -> tuple[Tensor, Jacobian]:
        if row.features is not None:
            return row.linearised(
                theta, order.around is not None and order.around.row_nodes is not None
            )
        f, J = self.network.linearise(row.x, theta)
        return f.double(), J.double()

    def _rounded(self, row: Chunk, f: Tensor, theta: Tensor) -> Tensor:
        """The size of what was rounded on the way to f (B, C): f itself, or of a last layer,
        multiplied in float64, |φ| |W|ᵀ.
        """
        if row.features is None:
            return f.abs()
        layout = self.network.layout
        weight = layout.positions[layout.names[0]]
        return row.features.double().phi[:, : weight.shape[1]].abs() @ theta[weight].abs().mT

    def _rows(self, order: Order) -> Iterator[tuple[Chunk, Any]]:
        """Chunks of the data, checked and cast, with the inputs as they came (None: the chunk
        was kept from the first pass).
        """
        if self.kept:
            yield from ((row, None) for row in self.kept)
            return
        if self.passes and not self.source.repeatable:
            raise ValueError(
                "The data can be read only once (a generator), but this fit needs another pass. "
                "Give a DataLoader, a list of batches or arrays, or mode='tilt'."
            )
        self.passes += 1
        batches = bar(self.source, self.source.length, self.progress, f"pass {self.passes}")
        rows = Rows(
            batches,
            lambda batch: self._rows_at_once(batch, order),
            lambda part: self._prepare(part, order),
            lambda row: self._bytes_to_keep(row, order),
            self.budget // KEPT_SHARE,
        )
        yield from rows.read()
        self.kept = rows.kept

    def _rows_at_once(self, batch: Batch, order: Order) -> int:
        if self.opened is None:
            self.opened = self._open(batch, order)
        return rows_within(
            self.budget // CHUNK_SHARE, bytes_per_row(self.opened, self._chosen(order), self.budget)
        )

    def _chosen(self, order: Order) -> Order:
        """The order with a structure, chosen once."""
        if order.unchosen is None:
            return order
        if self.decided is None or self.decided[0] is not order:
            self.decided = order, order.chosen(self.network, self.budget)
        return self.decided[1]

    def _open(self, batch: Batch, order: Order) -> Network:
        assert self.model is not None
        return open_within(
            self.model, self.weights, batch.x, order, self.budget, self.source.rows, self.output
        )

    def _prepare(self, batch: Batch, order: Order) -> Chunk:
        network = self.network
        _, y, weights = checked(
            batch, order.likelihood.support_for(network.outputs), network.outputs
        )
        x = network.cast(batch.x)
        features = offset = None
        if network.linear:
            _, J = network.linearise(x, network.theta)
            assert isinstance(J, Features)
            features, offset = _stored(J), network.offset
            x = None
        grain = torch.finfo(batch.y.dtype).eps if batch.y.is_floating_point() else 0.0
        return Chunk(x, y, weights, grain, features, offset)

    def _bytes_to_keep(self, row: Chunk, order: Order) -> int | None:
        """Of a chunk of features that the first pass keeps for further ones; None where there
        are none.
        """
        if self.passes > 1 or row.features is None:
            return None
        if not self._chosen(order).again(self.network, self.budget):
            return None
        return bytes_of(row.features.phi) + 8 * row.y.numel()


def _stored(J: Features) -> Features:
    """Features as they are kept for further passes: single precision takes half of the memory,
    and is exact in double.
    """
    if J.dtype == torch.float64:
        return replace(J.double(), remembers=True)
    return replace(J, phi=J.phi.float(), remembers=True)


def with_row_scale(network: Network, scale: RowScale) -> LastLayer:
    """The last layer with a scale of rows, which it did not have."""
    assert isinstance(network, LastLayer)
    assert network.row_scale is None
    assert network.offset is None
    return replace(network, row_scale=scale)


def extent_of(network: Network, rows: int | None = None, averages: bool = False) -> Extent:
    return Extent(network.layout.size, network.outputs, network.layer_shapes, rows, averages)


def bytes_per_row(network: Network, order: Order, budget: int) -> int:
    """Of intermediate results. A last layer with Kronecker factors needs no matrix for each row."""
    if not network.linear or not order.structure.by_layers or order.newton(network, budget):
        return network.bytes_per_row
    width, outputs = network.layout.size // network.outputs, network.outputs
    matrices = 8 * (width * outputs + PRECISIONS * outputs**2)
    return (
        network.bytes_per_row - matrices + 8 * (POOLED_FEATURES * width + POOLED_OUTPUTS * outputs)
    )


def open_within(
    model: nn.Module,
    weights: str | list[str] | tuple[str, ...],
    x: Any,
    order: Order,
    budget: int,
    rows: int | None,
    output: Output = None,
) -> Network:
    """The network, unless what it asks for is beyond the budget."""
    links = order.likelihood.links
    network = open_network(model, weights, x, order.structure.materialises, output, links)
    materialised, order = order.structure.materialises, order.chosen(network, budget)
    if materialised and not order.structure.materialises and not network.linear:
        network = open_network(model, weights, x, False, output, links)
    order.likelihood.support_for(network.outputs)
    required = order.averages_asked or network.linear or order.structure.whole
    extent = extent_of(network, rows, order.averages and required)
    refuse_beyond_budget(
        order.structure_for(network), extent, bytes_per_row(network, order, budget), budget
    )
    return network


def thinned(reader: Reader, most: int) -> Reader:
    """About `most` of the rows whose features a reader keeps, evenly spread; each counts for those
    left out.

    The reader itself where it keeps none, or few enough.
    """
    chunks = [chunk for chunk in reader.kept or () if chunk.features is not None]
    rows = sum(len(chunk.y) for chunk in chunks)
    stride = -(-rows // most)
    if stride <= 1:
        return reader
    picked = []
    first = 0
    for chunk in chunks:
        assert chunk.features is not None
        own = slice(-first % stride, None, stride)
        first += len(chunk.y)
        y = chunk.y[own]
        weights = (
            torch.ones(len(y), dtype=torch.float64) if chunk.weights is None else chunk.weights[own]
        )
        features = replace(chunk.features, phi=chunk.features.phi[own].contiguous())
        some = replace(chunk, y=y, weights=weights * stride, features=features)
        if len(some.y):
            picked.append(some)
    nothing_more = Source(lambda: iter(()), True, 0)
    return Reader(
        nothing_more, None, reader.weights, reader.budget, opened=reader.opened, kept=picked
    )
