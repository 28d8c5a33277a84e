"""Engines that run tasks on workers: Dask, Ray, or an executor of this machine."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Any, Protocol

from ssla.maths.progress import progress_bar

Work = Callable[[Any, Any], Any]
"""(task, shard) -> the result of the shard."""
Merge = Callable[[Any, Any], Any]


class Engine(Protocol):
    """Runs a function on the workers."""

    def one(self, function: Callable[[Any], Any], shard: Any) -> Any:
        """function(shard), there."""
        ...

    def merged(
        self, function: Work, task: Any, shards: list[Any], merge: Merge, label: str | None
    ) -> Any:
        """function(task, shard) for every shard, merged pairwise up a tree.

        label: of a progress bar.
        """
        ...


def engine_of(client: Any) -> Engine:
    """The engine for a user's client."""
    if isinstance(client, Executor):
        return ExecutorEngine(client)
    home = type(client).__module__.split(".")[0]
    if home == "distributed" and hasattr(client, "submit"):
        return DaskEngine(client)
    if getattr(client, "__name__", None) == "ray":
        return RayEngine(client)
    raise TypeError(
        "client must be a dask.distributed.Client, the module ray, or a "
        f"concurrent.futures.Executor, but is a {type(client).__name__}."
    )


@dataclass(frozen=True, eq=False)
class DaskEngine:
    """dask.distributed: futures are arguments, lost results are computed again."""

    client: Any

    def one(self, function: Callable[[Any], Any], shard: Any) -> Any:
        return self.client.submit(function, self._handle(shard), pure=False).result()

    def merged(
        self, function: Work, task: Any, shards: list[Any], merge: Merge, label: str | None
    ) -> Any:
        # as the result of a task and not scattered: scattered data are lost if their worker dies
        sent = self.client.submit(_same, task, pure=False)
        parts = [
            self.client.submit(function, sent, self._handle(shard), pure=False) for shard in shards
        ]
        whole = _tree(parts, lambda a, b: self.client.submit(merge, a, b, pure=False))
        if label is not None:
            from distributed import as_completed

            for _ in progress_bar(as_completed(parts), len(parts), True, label, "shard"):
                pass
        return whole.result()

    def _handle(self, shard: Any) -> Any:
        """Delayed values and collections become futures; futures and plain values stay."""
        return self.client.compute(shard) if hasattr(shard, "__dask_graph__") else shard


@dataclass(frozen=True, eq=False)
class RayEngine:
    """ray: references are arguments, tasks are retried."""

    ray: Any

    def one(self, function: Callable[[Any], Any], shard: Any) -> Any:
        return self.ray.get(self.ray.remote(function).remote(shard))

    def merged(
        self, function: Work, task: Any, shards: list[Any], merge: Merge, label: str | None
    ) -> Any:
        work, join, sent = self.ray.remote(function), self.ray.remote(merge), self.ray.put(task)
        parts = [work.remote(sent, shard) for shard in shards]
        whole = _tree(parts, join.remote)
        for part in progress_bar(parts, len(parts), label is not None, label or "", "shard"):
            self.ray.wait([part])
        return self.ray.get(whole)


@dataclass(frozen=True, eq=False)
class ExecutorEngine:
    """concurrent.futures: results are merged in this process."""

    executor: Executor

    def one(self, function: Callable[[Any], Any], shard: Any) -> Any:
        return self.executor.submit(function, shard).result()

    def merged(
        self, function: Work, task: Any, shards: list[Any], merge: Merge, label: str | None
    ) -> Any:
        parts = [self.executor.submit(function, task, shard) for shard in shards]
        bar = progress_bar(parts, len(parts), label is not None, label or "", "shard")
        return _tree([part.result() for part in bar], merge)


def _same(value: Any) -> Any:
    return value


def _tree(parts: list[Any], merge: Merge) -> Any:
    """Merge neighbours until one is left: log₂ levels, in the order of the shards."""
    while len(parts) > 1:
        pairs = [merge(a, b) for a, b in zip(parts[::2], parts[1::2], strict=False)]
        parts = pairs + parts[2 * len(pairs) :]
    return parts[0]
