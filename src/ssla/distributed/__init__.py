"""Fits on many machines: workers read shards and exchange only sums.

There are two ways, with the same result:

  torchrun      under an initialised torch.distributed group `ssla.fit` needs no change: every rank
                passes its own shard, and every rank gets the same posterior. `alone()` disables
                this.
  Dask or Ray   `ssla.distributed.fit(model, shards, client=…)` sends the network to the workers,
                where each shard becomes sums, and merges those pairwise on the cluster. One sum is
                returned for each pass. If a worker dies, the engine reads its shards again on
                another worker, with the same result.

A worker is a process, or a thread of an executor, that reads shards; the driver is the process that
calls `fit`. The passes of a fit are the
same as on one machine: each is the sums over all rows that one step of the fit needs.

A shard is any data that `ssla.fit` accepts, or a function without arguments that returns it (called
on the worker, so that data never pass through this process), or the engine's own handle (a Dask
future or delayed, a Ray reference).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from ssla._checks import in_plain_torch
from ssla.curvature import Structure
from ssla.data import Inputs, open_source, take_rows
from ssla.distributed.engines import Engine, choose_engine
from ssla.fitting import fit as fitting
from ssla.fitting.arguments import checked_budget, checked_plan, checked_weights
from ssla.fitting.passes import EMPTY, Order, Pass, Reader, open_network_within, with_row_scale
from ssla.fitting.ranks import alone
from ssla.fitting.validation import choose_by_validation
from ssla.likelihoods import Likelihood
from ssla.maths.progress import is_progress_wanted
from ssla.network import (
    LAST_LAYER,
    Network,
    Output,
    RowScale,
    check_output_argument,
    describe_opening,
    get_module,
    open_network,
)
from ssla.posterior import Posterior
from ssla.priors import Prior

__all__ = ["alone", "fit"]

OPENING_ROWS = 32  # a guess: enough to find the layers of a network


@in_plain_torch
def fit(
    model: nn.Module,
    shards: Sequence[Any],
    *,
    client: Any,
    likelihood: Likelihood,
    prior: Prior | None = None,
    validation: Any = None,
    weights: str | list[str] | tuple[str, ...] = LAST_LAYER,
    structure: str | Structure = "auto",
    mode: str | None = None,
    gaussian: str | None = None,
    output: Output = None,
    memory_budget: int | None = None,
    progress: bool | None = None,
) -> Posterior:
    """Fit as `ssla.fit`, on shards of data that workers read.

    client: a `dask.distributed.Client`, the module `ray` (initialised), or a
    `concurrent.futures.Executor`. memory_budget is that of each worker. validation: rows that the
    network has not seen, which this process reads; a share of the shards is not taken. Everything
    else as in `ssla.fit`.

    >>> with Client("tcp://scheduler:8786") as client:                              # doctest: +SKIP
    ...     shards = [partial(read_rows, path) for path in paths]
    ...     post = ssla.distributed.fit(model, shards, client=client, likelihood=likelihood)
    """
    shards = list(shards)
    if not shards:
        raise ValueError(
            "shards is empty. Give a list with the data of each shard, or functions that return "
            "them."
        )

    budget = checked_budget(memory_budget)
    answer_part = check_output_argument(output)
    names = checked_weights(weights)
    engine = choose_engine(client)
    cluster = Cluster(engine, shards, model, names, budget, progress, output=answer_part)
    plan = checked_plan(Posterior, cluster, likelihood, prior, structure, mode, gaussian, budget)
    if validation is None:
        return fitting.fit(plan)
    return choose_by_validation(plan, open_source(validation), held_out=False)


# --- on the workers ------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class ShardTask:
    """What a worker needs in addition to its shard; it is pickled once for each pass."""

    model: nn.Module
    weights: str | list[str] | tuple[str, ...]
    # Rows x with which every worker opens the network, so that all find the same layers.
    opening: Inputs
    budget: int  # bytes, of each worker
    order: Order
    output: Output = None
    row_scale: RowScale | None = None


@in_plain_torch
def read_shard(task: ShardTask, shard: Any) -> Pass:
    """Read one shard on a worker, and return its sums.

    shard: data, or a function that returns them. Errors are those of `ssla.fit` for its data.
    """
    materialise = task.order.structure.needs_jacobian_entries
    network = open_network(task.model, task.weights, task.opening, materialise, task.output)
    if task.row_scale is not None:
        network = with_row_scale(network, task.row_scale)

    # A worker may itself be a rank of a torch.distributed group. Its sums must stay those of its
    # shard, so the group is disabled.
    with alone():
        source = open_source(_load_shard(shard))
        # No model is needed, because the network is already open.
        reader = Reader(source, None, task.weights, task.budget, opened=network)
        return reader.run_pass(task.order)


@in_plain_torch
def read_first_rows(shard: Any) -> Inputs | None:
    """Return the first rows of x in a shard, with which to open the network; None without a row."""
    for batch in open_source(_load_shard(shard)):
        if batch.y.shape[0]:
            return take_rows(batch.x, slice(0, OPENING_ROWS))
    return None


@in_plain_torch
def merge_pair(first: Pass, second: Pass) -> Pass:
    """Return the pass of two sets of shards from the passes of both."""
    return first.merge(second)


def _load_shard(shard: Any) -> Any:
    """Return the data of a shard: a function is called, and anything else is the data."""
    # An iterable that can also be called is data.
    return shard() if callable(shard) and not isinstance(shard, Iterable) else shard


# --- on the driver -------------------------------------------------------------------------


@dataclass(eq=False)
class Cluster:
    """The shards as one source of passes, in place of a `Reader` of this process."""

    engine: Engine
    shards: list[Any]
    model: nn.Module
    weights: str | list[str] | tuple[str, ...]
    budget: int  # bytes, of each worker
    progress: bool | None  # whether a bar is shown; None: by itself on a terminal
    passes: int = 0  # how many have begun
    opening: Inputs | None = None  # see `ShardTask`; None before the first pass
    opened: Network | None = None  # the network; None before the first pass
    output: Output = None
    source = None  # a Reader has the rows here; those of a cluster are on the workers

    @property
    def network(self) -> Network:
        """Return the network, as this process has opened it.

        Raises ValueError before the first pass.
        """
        if self.opened is None:
            raise ValueError(EMPTY)
        return self.opened

    def run_pass(self, order: Order) -> Pass:
        """Let the workers read all shards, and return the merged sums.

        The first pass also opens the network in this process. Raises ValueError if no shard has a
        row.
        """
        if self.opened is None:
            self.opening = self._find_opening_rows()
            self.opened = open_network_within(
                self.model, self.weights, self.opening, order, self.budget, None, self.output
            )

        order = order.with_chosen_structure(self.opened, self.budget)
        self.passes += 1

        # The private copy and its names are sent, so that later changes to the user's module do not
        # change the sums.
        task = ShardTask(
            get_module(self.opened),
            self.opened.layout.names,
            self.opening,
            self.budget,
            order,
            self.output,
            describe_opening(self.opened).row_scale,
        )
        label = f"pass {self.passes}" if is_progress_wanted(self.progress) else None
        result: Pass = self.engine.run_and_merge(read_shard, task, self.shards, merge_pair, label)
        return result

    def scale_rows(self, scale: RowScale) -> None:
        """Give the last layer a scale of rows, in place, which later passes send to the workers."""
        self.opened = with_row_scale(self.network, scale)

    def _find_opening_rows(self) -> Inputs:
        """Return the first rows of x of the first shard that has some.

        Raises ValueError if none has.
        """
        for shard in self.shards:
            rows = self.engine.run_once(read_first_rows, shard)
            if rows is not None:
                return rows
        raise ValueError(EMPTY)
