"""Every rank of a `torch.distributed` group reads its shard; what they found is merged and handed to all.

Passes merge pairwise up a tree to rank 0, which sends the whole back: log₂(ranks) rounds, memory for two passes' sums, and the
same bits on every rank, so that all take the same steps afterwards. An error on one rank ends the fit on all of them: a rank that
waited for a sum that never comes would hang.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from torch import distributed

from ssla.fitting.passes import Data, Order, Pass, Reader
from ssla.network import Network

_ALONE: ContextVar[bool] = ContextVar("ssla_alone", default=False)


@contextmanager
def alone() -> Iterator[None]:
    """Inside, `fit` and `update` work for this process only, also under an initialised torch.distributed group.

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
    grouped = distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1
    return Ranks(reader) if grouped and not _ALONE.get() else reader


@dataclass(eq=False)
class Ranks:
    """The shards of all ranks, of which this process reads one."""

    mine: Reader

    @property
    def network(self) -> Network:
        return self.mine.network

    @property
    def passes(self) -> int:
        return self.mine.passes

    def read(self, order: Order) -> Pass:
        failure: Exception | None = None
        found: Pass | None = None
        try:
            found = self.mine.read(order)
            if found.sums is None:
                raise ValueError(f"rank {distributed.get_rank()} has no rows. Give every rank a shard with at least one.")
        except Exception as error:  # handed to the other ranks before it is raised
            failure = error
        self._agree(failure)
        assert found is not None
        return _all_merged(found)

    def _agree(self, failure: Exception | None) -> None:
        """All ranks succeeded, on the same network; or all of them raise."""
        state = (None, "") if failure else (_fingerprint(self.network), "")
        if failure is not None:
            state = (None, f"{type(failure).__name__}: {failure}")
        states: list[Any] = [None] * distributed.get_world_size()
        distributed.all_gather_object(states, state)
        if failure is not None:
            raise failure
        failed = [f"rank {rank}: {message}" for rank, (_, message) in enumerate(states) if message]
        if failed:
            raise RuntimeError(f"The fit was given up because another rank failed. {'; '.join(failed)}")
        if len({mark for mark, _ in states}) > 1:
            raise ValueError(
                "The ranks hold different networks, so their sums cannot be merged. Send one rank's weights to all first, for "
                "example by torch.distributed.broadcast of each parameter and buffer."
            )


def _fingerprint(network: Network) -> str:
    mark = hashlib.sha256(network.theta.numpy().tobytes())
    mark.update(repr((network.layout.names, network.outputs)).encode())
    return mark.hexdigest()


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
