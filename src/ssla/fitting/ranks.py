"""Every rank of a `torch.distributed` group reads its shard; what they found is merged and handed
to all.

Passes merge pairwise up a tree to rank 0, which sends the whole back: log₂(ranks) rounds, memory
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
from ssla.network import Network, RowScale, marks

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


def shared(reader: Reader) -> Data:
    """The reader itself, or all ranks' readers as one."""
    return Ranks(reader) if _grouped() else reader


def _grouped() -> bool:
    ready = (
        distributed.is_available()
        and distributed.is_initialized()
        and distributed.get_world_size() > 1
    )
    return ready and not _ALONE.get()


@contextmanager
def announced() -> Iterator[None]:
    """What comes before the first pass: an error inside ends the fit on the other ranks, which
    wait at their first vote.
    """
    try:
        yield
    except Exception as error:
        if _grouped():
            _vote(None, error)
        raise


@dataclass(eq=False)
class Ranks:
    """The shards of all ranks, of which this process reads one."""

    mine: Reader
    source = None  # this process holds a part only

    @property
    def network(self) -> Network:
        return self.mine.network

    @property
    def passes(self) -> int:
        return self.mine.passes

    @cached_property
    def _marks(self) -> dict[str, str]:
        return marks(self.network)

    def scale_rows(self, scale: RowScale) -> None:
        self.mine.scale_rows(scale)
        self.__dict__.pop("_marks", None)

    def read(self, order: Order) -> Pass:
        failure: Exception | None = None
        found: Pass | None = None
        stated: dict[str, str] | None = None
        try:
            found = self.mine.read(order)
            if found.sums is None:
                raise ValueError(
                    f"rank {distributed.get_rank()} has no rows. Give every rank a shard with at "
                    "least one."
                )
            stated = {
                **self._marks,
                **order.marks,
                "modes": order.mode_for(self.network),
                "θ̂": digest((order.theta, order.around and order.around.shift)),
            }
        except Exception as error:  # handed to the other ranks before it is raised
            failure = error
        _vote(stated, failure)
        assert found is not None
        return _all_merged(found)


def the_same_rows(read: Callable[[], T], mark: Callable[[T], str]) -> T:
    """What `read` returns, if every rank has the same; `mark` is a digest of it.

    Each rank makes its own choices by validation rows. With other rows it would choose otherwise,
    and the passes that follow would not fit together.
    """
    if not _grouped():
        return read()
    found: T | None = None
    failure: Exception | None = None
    try:
        found = read()
    except Exception as error:  # handed to the other ranks before it is raised
        failure = error
    _vote({} if found is None else {"validation rows": mark(found)}, failure)
    assert found is not None
    return found


def _vote(stated: Mapping[str, str] | None, failure: Exception | None) -> None:
    """All ranks succeeded, with the same network and settings; or all of them raise.

    One collective, which every rank joins.
    """
    states: list[Any] = [None] * distributed.get_world_size()
    distributed.all_gather_object(
        states, (stated, "" if failure is None else f"{type(failure).__name__}: {failure}")
    )
    if failure is not None:
        raise failure
    failed = [f"rank {rank}: {message}" for rank, (_, message) in enumerate(states) if message]
    if failed:
        raise RuntimeError(f"The fit was given up because another rank failed. {'; '.join(failed)}")
    first = states[0][0]
    odd = [what for what in first if any(marked[what] != first[what] for marked, _ in states)]
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
        unlike = [str(rank) for rank, (marked, _) in enumerate(states) if marked != first]
        raise ValueError(
            f"The ranks were given different {', '.join(odd)} (rank {', '.join(unlike)} not as "
            "rank 0), so their sums cannot be merged. Use the same arguments on every rank, and "
            "the same posterior for an update; only the data may differ."
        )


def _all_merged(mine: Pass) -> Pass:
    rank, world = distributed.get_rank(), distributed.get_world_size()
    step = 1
    while step < world:
        if rank % (2 * step) == step:
            distributed.send_object_list([mine], dst=rank - step)
            break
        if rank + step < world:
            received: list[Any] = [None]
            distributed.recv_object_list(received, src=rank + step)
            mine = mine.merge(received[0])
        step *= 2
    whole: list[Any] = [mine if rank == 0 else None]
    distributed.broadcast_object_list(whole, src=0)
    result = whole[0]
    assert isinstance(result, Pass)
    return result
