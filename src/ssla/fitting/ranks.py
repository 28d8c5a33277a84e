"""Every rank of a `torch.distributed` group reads its shard; what they found is merged and sent to
all.

Passes merge pairwise up a tree to rank 0, which sends the result back: log₂(ranks) rounds, memory
for two passes' sums, and the same bits on every rank, so that all take the same steps afterwards.
An error on one rank ends the fit on all of them: a rank that waited for a sum that never comes
would hang.
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
from ssla.network import Network, RowScale, merge_digests

T = TypeVar("T")
_ALONE: ContextVar[bool] = ContextVar("ssla_alone", default=False)


@contextmanager
def alone() -> Iterator[None]:
    """Inside, `fit` and `update` work for this process only, also under an initialised
    torch.distributed group.

    >>> if rank == 0:                       # doctest: +SKIP
    ...     with ssla.distributed.alone():
    ...         post = ssla.fit(model, data, likelihood=likelihood)
    """
    token = _ALONE.set(True)
    try:
        yield
    finally:
        _ALONE.reset(token)


def data_of_ranks(reader: Reader) -> Data:
    """Return all ranks' readers as one source of passes; the reader itself outside a group."""
    return Ranks(reader) if _in_group() else reader


def _in_group() -> bool:
    """Return whether this process is one of several ranks that work together."""
    ready = (
        distributed.is_available()
        and distributed.is_initialized()
        and distributed.get_world_size() > 1
    )
    return ready and not _ALONE.get()


@contextmanager
def errors_sent_to_ranks() -> Iterator[None]:
    """Send an error inside the block, which comes before the first pass, to the other ranks.

    It ends the fit there: they wait to hear of every rank before they merge sums.
    """
    try:
        yield
    except Exception as error:
        if _in_group():
            _agree({}, error)
        raise


@dataclass(eq=False)
class Ranks:
    """The shards of all ranks, of which this process reads one."""

    reader: Reader
    source = None  # this process holds a part only

    @property
    def network(self) -> Network:
        """The network, as this rank has opened it."""
        return self.reader.network

    @property
    def passes(self) -> int:
        """The number of passes that this rank has begun."""
        return self.reader.passes

    @cached_property
    def _network_digests(self) -> dict[str, str]:
        """Digests of the network, which all ranks must share; computed once."""
        return merge_digests(self.network)

    def scale_rows(self, scale: RowScale) -> None:
        """Give the last layer of this rank a scale of rows."""
        self.reader.scale_rows(scale)
        self.__dict__.pop("_network_digests", None)

    def run_pass(self, order: Order) -> Pass:
        """Read this rank's shard, and return the sums over the shards of all ranks.

        Raises what this rank raises, RuntimeError where another rank failed, and ValueError where
        the ranks differ in network or arguments.
        """

        def read() -> tuple[Pass, dict[str, str]]:
            """Read the shard; return its pass, and the digests that all ranks must share."""
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
                "modes": order.mode_for(self.network),
                "θ̂": digest((order.theta, averaging and averaging.shift)),
            }

        return _merge_over_ranks(_read_and_agree(read))


def read_same_rows(read: Callable[[], T], digest_of: Callable[[T], str]) -> T:
    """Return what `read` returns, if every rank has the same by `digest_of`.

    Each rank makes its own choices by validation rows. With other rows it would choose otherwise,
    and the passes that follow would not fit together. Raises as `Ranks.run_pass`.
    """
    if not _in_group():
        return read()

    def read_with_digest() -> tuple[T, dict[str, str]]:
        """Read the rows; return them, and the digest that all ranks must share."""
        rows = read()
        return rows, {"validation rows": digest_of(rows)}

    return _read_and_agree(read_with_digest)


def _read_and_agree(read: Callable[[], tuple[T, dict[str, str]]]) -> T:
    """Return the value that `read` returns, once every rank has read with the same digests."""
    try:
        value, digests = read()
    except Exception as error:  # sent to the other ranks before it is raised
        _agree({}, error)
        raise
    _agree(digests, None)
    return value


def _agree(digests: Mapping[str, str], failure: Exception | None) -> None:
    """Check that all ranks succeeded, with the same network and settings; or all of them raise.

    This is one collective operation, which every rank joins. Raises `failure` if it is given,
    RuntimeError where another rank failed, ValueError where digests differ.
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
    odd = [name for name in first if any(stated[name] != first[name] for stated, _ in states)]
    if "networks" in odd:
        raise ValueError(
            "The ranks hold different networks, so their sums cannot be merged. Send one rank's "
            "weights to all first, for example by torch.distributed.broadcast of each parameter "
            "and buffer."
        )
    if "validation rows" in odd:
        raise ValueError(
            "The ranks have different validation rows, so they would choose different posteriors. "
            "Give all validation rows, in the same order, to every rank; validation= as a share of "
            "the data holds out rows of each rank's own shard."
        )
    if odd:
        unlike = [str(rank) for rank, (stated, _) in enumerate(states) if stated != first]
        raise ValueError(
            f"The ranks were given different {', '.join(odd)} (rank {', '.join(unlike)} not as "
            "rank 0), so their sums cannot be merged. Use the same arguments on every rank, and "
            "the same posterior for an update; only the data may differ."
        )


def _merge_over_ranks(result: Pass) -> Pass:
    """Merge the passes of all ranks up a tree to rank 0, and send the result to all."""
    rank, world = distributed.get_rank(), distributed.get_world_size()
    step = 1
    while step < world:
        # Every second of the ranks that are left sends its sums to the one below it.
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
