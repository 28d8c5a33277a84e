"""Engines that run tasks on workers: Dask, Ray, or an executor of this machine.

A task is a value that all workers get, and a shard is the data of one of them (see
`ssla.distributed`).
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Any, Protocol

from ssla.maths.progress import progress_bar

Work = Callable[[Any, Any], Any]
"""(task, shard) -> the result of the shard."""
Merge = Callable[[Any, Any], Any]
"""Two results -> the result of both."""


class Engine(Protocol):
    """Runs functions on the workers. A shard may be data, a function, or a handle of the engine."""

    def run_once(self, function: Callable[[Any], Any], shard: Any) -> Any:
        """Return function(shard), computed on a worker."""
        ...

    def run_and_merge(
        self, function: Work, task: Any, shards: list[Any], merge: Merge, label: str | None
    ) -> Any:
        """Compute function(task, shard) for every shard, and return the merge of all results.

        Results of neighbours are merged first, so that the order of the shards is kept. shards: at
        least one. label: of a progress bar; None: there is none.
        """
        ...


def choose_engine(client: Any) -> Engine:
    """Return the engine for a user's client; raise TypeError for a client of another kind."""
    if isinstance(client, Executor):
        return ExecutorEngine(client)
    library = type(client).__module__.split(".")[0]
    if library == "distributed" and hasattr(client, "submit"):
        return DaskEngine(client)
    if getattr(client, "__name__", None) == "ray":
        return RayEngine(client)
    raise TypeError(
        "client must be a dask.distributed.Client, the module ray, or a "
        f"concurrent.futures.Executor, but is a {type(client).__name__}."
    )


@dataclass(frozen=True, eq=False)
class DaskEngine:
    """The engine of dask.distributed: futures are arguments, lost results are computed again."""

    client: Any

    def run_once(self, function: Callable[[Any], Any], shard: Any) -> Any:
        """Run the function as a task, and return its result."""
        return self.client.submit(function, self._convert_to_future(shard), pure=False).result()

    def run_and_merge(
        self, function: Work, task: Any, shards: list[Any], merge: Merge, label: str | None
    ) -> Any:
        """Submit all tasks and all merges at once, wait for the last merge, and return it."""
        # The task is sent as the result of a task: scattered data are lost if their worker dies.
        sent_task = self.client.submit(_return_value, task, pure=False)
        results = [
            self.client.submit(function, sent_task, self._convert_to_future(shard), pure=False)
            for shard in shards
        ]
        merged = _merge_tree(results, lambda a, b: self.client.submit(merge, a, b, pure=False))
        if label is not None:
            from distributed import as_completed

            completed = as_completed(results)
            show = True  # there is a label only if a bar is wanted
            # The bar moves while it is iterated.
            for _ in progress_bar(completed, len(results), show, label, "shard"):
                pass

        return merged.result()

    def _convert_to_future(self, shard: Any) -> Any:
        """Return a delayed value or collection as a future; a future or plain value as it is."""
        return self.client.compute(shard) if hasattr(shard, "__dask_graph__") else shard


@dataclass(frozen=True, eq=False)
class RayEngine:
    """The engine of ray: references are arguments, tasks are retried."""

    ray: Any

    def run_once(self, function: Callable[[Any], Any], shard: Any) -> Any:
        """Run the function as a remote task, and return its result."""
        return self.ray.get(self.ray.remote(function).remote(shard))

    def run_and_merge(
        self, function: Work, task: Any, shards: list[Any], merge: Merge, label: str | None
    ) -> Any:
        """Start all tasks and all merges at once, wait for the last merge, and return it."""
        remote_function = self.ray.remote(function)
        remote_merge = self.ray.remote(merge)
        sent_task = self.ray.put(task)
        results = [remote_function.remote(sent_task, shard) for shard in shards]
        merged = _merge_tree(results, remote_merge.remote)
        bar = progress_bar(results, len(results), label is not None, label or "", "shard")
        for result in bar:
            self.ray.wait([result])
        return self.ray.get(merged)


@dataclass(frozen=True, eq=False)
class ExecutorEngine:
    """The engine of concurrent.futures: results are merged in this process."""

    executor: Executor

    def run_once(self, function: Callable[[Any], Any], shard: Any) -> Any:
        """Run the function in a worker, and return its result."""
        return self.executor.submit(function, shard).result()

    def run_and_merge(
        self, function: Work, task: Any, shards: list[Any], merge: Merge, label: str | None
    ) -> Any:
        """Submit all tasks at once, wait for all results, and return their merge, made here."""
        futures = [self.executor.submit(function, task, shard) for shard in shards]
        bar = progress_bar(futures, len(futures), label is not None, label or "", "shard")
        return _merge_tree([future.result() for future in bar], merge)


def _return_value(value: Any) -> Any:
    """Return the value. Submitted as a task, it makes the value a result that other tasks take."""
    return value


def _merge_tree(results: list[Any], merge: Merge) -> Any:
    """Merge pairs of neighbours until one result is left, and return it.

    results: at least one. Their order is kept, and the depth of the merges is log₂ of their number.
    """
    while len(results) > 1:
        pairs = [merge(a, b) for a, b in zip(results[::2], results[1::2], strict=False)]
        # The last of an odd number has no neighbour.
        results = pairs + results[2 * len(pairs) :]
    return results[0]
