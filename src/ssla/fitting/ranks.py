"""Passes of a `torch.distributed` group: every rank reads its shard, and all get the merged sums.

A rank is a process of the group, and its shard is the part of the data that it reads.

Passes merge pairwise up a tree to rank 0, which sends the result back. This takes log₂(ranks)
rounds and memory for two passes' sums. Every rank gets the same bits, so that all take the same
steps afterwards. An error on one rank ends the fit on all of them, because a rank that waits for
sums that never come would hang.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeVar

from torch import distributed

from ssla.fitting.passes import Data, Order, Pass, Reader
from ssla.maths.digests import digest
from ssla.network import Network, RowScale, compute_merge_digests

T = TypeVar("T")
_ALONE: ContextVar[bool] = ContextVar("ssla_alone", default=False)


@contextmanager
def alone() -> Iterator[None]:
    """Let `fit` and `update` inside the block work for this process only.

    This is needed where a torch.distributed group is initialised, but one rank fits alone.

    >>> if rank == 0:                       # doctest: +SKIP
    ...     with ssla.distributed.alone():
    ...         post = ssla.fit(model, data, likelihood=likelihood)
    """
    token = _ALONE.set(True)
    try:
        yield
    finally:
        _ALONE.reset(token)


def share_data_among_ranks(reader: Reader) -> Data:
    """Return the shards of all ranks as one source of passes.

    reader: of this rank's shard. Outside a group it is returned itself.
    """
    return Ranks(reader) if _is_in_group() else reader


def _is_in_group() -> bool:
    """Return whether this process is one of several ranks that work together.

    The result is False inside a block of `alone`.
    """
    ready = (
        distributed.is_available()
        and distributed.is_initialized()
        and distributed.get_world_size() > 1
    )
    return ready and not _ALONE.get()


@contextmanager
def send_errors_to_ranks() -> Iterator[None]:
    """Send an error that is raised inside the block to the other ranks, and raise it here.

    The block must come before the first pass. The other ranks then end their fit, because they wait
    for a message from every rank before they merge sums.
    """
    try:
        yield
    except Exception as error:
        if _is_in_group():
            _exchange_states({}, error)
        raise


@dataclass(eq=False)
class Ranks:
    """The shards of all ranks, of which this process reads one: a `Data` of passes."""

    reader: Reader
    source = None  # this process reads a part only

    @property
    def network(self) -> Network:
        """Return the network, as this rank has opened it.

        Raises ValueError before its first pass.
        """
        return self.reader.network

    @property
    def passes(self) -> int:
        """Return the number of passes over its shard that this rank has begun."""
        return self.reader.passes

    @cached_property
    def _network_digests(self) -> dict[str, str]:
        """Return digests of the network, which all ranks must share; computed once."""
        return compute_merge_digests(self.network)

    def scale_rows(self, scale: RowScale) -> None:
        """Give the last layer of this rank a scale of rows; it must not have one yet."""
        self.reader.scale_rows(scale)
        self.__dict__.pop("_network_digests", None)  # the stored digests are of the old network

    def run_pass(self, order: Order) -> Pass:
        """Read this rank's shard, and return the sums over the shards of all ranks.

        Every rank must call this with an equal order. Raises what this rank raises, RuntimeError
        where another rank failed, and ValueError where the ranks differ in network or arguments.
        """

        def read_shard() -> tuple[Pass, dict[str, str]]:
            """Read the shard; return its pass, and the digests that all ranks must share.

            Raises ValueError for a shard without rows.
            """
            result = self.reader.run_pass(order)
            if result.sums is None:
                raise ValueError(
                    f"rank {distributed.get_rank()} has no rows. Give every rank a shard with at "
                    "least one."
                )
            averaging = order.averaging
            return result, {
                **self._network_digests,
                **order.digests,
                "modes": order.choose_mode_for(self.network),
                "θ̂": digest((order.theta, averaging and averaging.shift)),
            }

        return _merge_over_ranks(_read_and_compare(read_shard))


def read_same_rows(read: Callable[[], T], digest_of: Callable[[T], str]) -> T:
    """Return what `read` returns, after a check that every rank has read the same rows.

    digest_of: returns the digest of what `read` returns, by which ranks are compared. Each rank
    makes its own choices by validation rows. With other rows it would choose otherwise, and its
    later passes would differ from those of the other ranks. Outside a group nothing is checked.
    Raises as `Ranks.run_pass`.
    """
    if not _is_in_group():
        return read()

    def read_with_digest() -> tuple[T, dict[str, str]]:
        """Read the rows; return them, and the digest that all ranks must share."""
        rows = read()
        return rows, {"validation rows": digest_of(rows)}

    return _read_and_compare(read_with_digest)


def _read_and_compare(read: Callable[[], tuple[T, dict[str, str]]]) -> T:
    """Call `read`, and return its value once every rank has read with the same digests.

    read: returns a value and digests by name. Raises as `_exchange_states`.
    """
    try:
        value, digests = read()
    except Exception as error:  # sent to the other ranks before it is raised
        _exchange_states({}, error)
        raise
    _exchange_states(digests, None)
    return value


def _exchange_states(digests: Mapping[str, str], failure: Exception | None) -> None:
    """Exchange digests and failures with all ranks; raise unless all succeeded with equal digests.

    digests: of this rank's network and settings, by name. failure: the error of this rank; None: it
    succeeded. This is one collective operation, which every rank must join. Raises `failure` if it
    is given, RuntimeError where another rank failed, and ValueError where digests differ.
    """
    message = "" if failure is None else f"{type(failure).__name__}: {failure}"
    states: list[Any] = [None] * distributed.get_world_size()
    distributed.all_gather_object(states, (digests, message))
    if failure is not None:
        raise failure
    failed = [f"rank {rank}: {message}" for rank, (_, message) in enumerate(states) if message]
    if failed:
        raise RuntimeError(f"The fit was given up because another rank failed. {'; '.join(failed)}")
    first = states[0][0]
    unequal = [name for name in first if any(other[name] != first[name] for other, _ in states)]

    # A different network or different rows have a remedy of their own, so they are named first.
    if "networks" in unequal:
        raise ValueError(
            "The ranks hold different networks, so their sums cannot be merged. Send one rank's "
            "weights to all first, for example by torch.distributed.broadcast of each parameter "
            "and buffer."
        )
    if "validation rows" in unequal:
        raise ValueError(
            "The ranks have different validation rows, so they would choose different posteriors. "
            "Give all validation rows, in the same order, to every rank; validation= as a share of "
            "the data holds out rows of each rank's own shard."
        )
    if unequal:
        ranks = [str(rank) for rank, (other, _) in enumerate(states) if other != first]
        raise ValueError(
            f"The ranks were given different {', '.join(unequal)} (rank {', '.join(ranks)} not as "
            "rank 0), so their sums cannot be merged. Use the same arguments on every rank, and "
            "the same posterior for an update; only the data may differ."
        )


def _merge_over_ranks(result: Pass) -> Pass:
    """Merge the passes of all ranks up a tree to rank 0, and return the result on every rank.

    result: the pass of this rank. Every rank must call this.
    """
    rank, world = distributed.get_rank(), distributed.get_world_size()
    step = 1
    while step < world:
        # The ranks that still take part are multiples of `step`. Every second one of them sends its
        # sums to the one before it, and is done.
        if rank % (2 * step) == step:
            distributed.send_object_list([result], dst=rank - step)
            break
        if rank + step < world:
            received: list[Any] = [None]
            distributed.recv_object_list(received, src=rank + step)
            result = result.merge(received[0])
        step *= 2
    sent: list[Pass | None] = [result if rank == 0 else None]
    distributed.broadcast_object_list(sent, src=0)
    assert sent[0] is not None
    return sent[0]
