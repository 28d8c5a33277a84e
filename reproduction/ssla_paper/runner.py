"""Runs each task once: records are written in one step, so a run can be interrupted and
continued.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import ssla
from ssla.files.replacing import replace_file, replace_folder
from ssla_paper.sources import digest_sources

Record = dict[str, Any]
"""The result of a task: numbers, strings, lists and dicts of them."""


class TaskError(ValueError):
    """A task of a study failed; records of the others are kept."""


@dataclass(frozen=True)
class Task:
    """One piece of a study: function(**settings) -> Record.

    The function is at the top level of a module, for other processes.
    """

    key: str  # a file name
    function: Callable[..., Record]
    settings: Mapping[str, Any] = field(default_factory=dict)
    edition: int = 1  # of the function: a record of an older edition is computed again


PAPER, REPEATED, OURS = "paper", "repeated", "ours"


class Study(Protocol):
    """A table or figure of the paper, or several with shared tasks."""

    @property
    def name(self) -> str: ...

    @property
    def title(self) -> str: ...

    def tasks(self, quick: bool) -> list[Task]: ...

    def report(self, records: Mapping[str, Record], folder: Path) -> list[Claim]:
        """Write tables and figures; return which published statements hold."""
        ...


@dataclass(frozen=True)
class Claim:
    """A statement and the result.

    kind: the paper's statement; that a procedure gives published numbers; or ours.
    number: the claim of the page ("1" to "8") that a statement of the paper belongs to.
    """

    statement: str
    published: str
    found: str
    holds: bool
    reason: str = ""
    kind: str = PAPER
    number: str = ""

    def __post_init__(self) -> None:
        if self.kind == PAPER and (
            self.published in ("–", "not stated") or self.statement.startswith("Our goal")
        ):
            object.__setattr__(self, "kind", OURS)


def write_whole(path: Path, text: str) -> None:
    """Write the text in one step: all of it, or no change."""
    with replace_file(path) as draft:
        draft.write_text(text, encoding="utf-8")


@dataclass(frozen=True)
class Workplace:
    """A folder of records, tables and figures."""

    folder: Path
    quick: bool = False

    def records(self, study: str) -> Path:
        return self.folder / ("records-quick" if self.quick else "records") / study

    def results(self, study: str) -> Path:
        return self.folder / ("quick" if self.quick else "results") / study

    def recall(self, study: str, task: Task) -> Record | None:
        """The record of the task, if it exists, is complete, and has the same settings, version
        and sources.
        """
        entry = self.recall_entry(study, task)
        return None if entry is None else entry["found"]

    def recall_entry(self, study: str, task: Task) -> Record | None:
        """The record with what it was made by, on the same conditions."""
        try:
            kept = json.loads(
                (self.records(study) / f"{task.key}.json").read_text(encoding="utf-8")
            )
        except (FileNotFoundError, json.JSONDecodeError, UnicodeDecodeError):
            return None
        origin = describe_origin(task)
        if not isinstance(kept, dict) or any(kept.get(name) != origin[name] for name in origin):
            return None
        return kept

    def complete(self, study: str) -> bool:
        """Whether there are tables from all tasks of a run."""
        try:
            done, tasks = json.loads(
                (self.results(study) / "summary.json").read_text(encoding="utf-8")
            )["done"]
        except (OSError, ValueError, KeyError, TypeError):
            return False
        return bool(done == tasks)

    def settled(self, study: str, task: Task) -> bool:
        """Whether the task is finished: a record in which no peer was missing."""
        found = self.recall(study, task)
        return found is not None and not _misses(found)

    def keep(self, study: str, task: Task, found: Record) -> None:
        write_whole(
            self.records(study) / f"{task.key}.json",
            json.dumps({**describe_origin(task), "found": found}, indent=1),
        )


def _misses(found: Any) -> bool:
    """Whether a record notes a missing library."""
    if isinstance(found, dict):
        return bool(found.get("missing")) or any(map(_misses, found.values()))
    return isinstance(found, list) and any(map(_misses, found))


def describe_origin(task: Task) -> Record:
    """What a record depends on: the version of ssla, the task, and the sources of its function.

    After a round trip through JSON. A record of another origin is not reused.
    """
    settings: Record = json.loads(json.dumps(dict(task.settings)))
    edition = {"edition": task.edition} if task.edition > 1 else {}
    return {
        "made_by": {"ssla": ssla.__version__, "settings": settings, **edition},
        "sources": digest_sources(task.function),
    }


def run(
    study: Study, place: Workplace, jobs: int = 1, progress: bool = True, work: bool = True
) -> list[Claim]:
    """Run unfinished tasks, then report. Can be interrupted and run again.

    work=False reports existing records, possibly of an interrupted run; the summary gives their
    number.
    """
    tasks = study.tasks(place.quick)
    keys = [task.key for task in tasks]
    if len(set(keys)) < len(keys):
        raise ValueError(f"The study {study.name!r} has two tasks with the same key.")
    try:  # before the work, not after it
        place.records(study.name).mkdir(parents=True, exist_ok=True)
        write_whole(place.results("") / ".writable", "")
        (place.results("") / ".writable").unlink()
    except OSError as error:
        raise ValueError(
            f"{place.folder} cannot be written ({error}). Give a folder with write permission."
        ) from error
    missing = [task for task in tasks if not place.settled(study.name, task)]
    label = f"{study.name} ({len(tasks) - len(missing)} of {len(tasks)} done)"
    for task, record in _done(missing if work else [], jobs, label, progress):
        place.keep(study.name, task, record)
    records = {
        task.key: found for task in tasks if (found := place.recall(study.name, task)) is not None
    }
    if not records:
        raise ValueError(
            f"There are no records of the study {study.name!r} in {place.folder} to report. Run it "
            "first."
        )
    if len(records) < len(tasks) and place.complete(study.name):
        raise ValueError(
            f"There are records of {len(records)} of the {len(tasks)} tasks of the study "
            f"{study.name!r} in {place.folder}, and tables of a complete earlier run in "
            f"{place.results(study.name)}, which a partial run does not replace. Run the study to "
            "its end, or move that directory away."
        )
    return write_results(study, place, records, len(tasks))


def write_results(
    study: Study,
    place: Workplace,
    records: Mapping[str, Record],
    tasks: int,
    changes: Sequence[str] = (),
) -> list[Claim]:
    """Write tables, figures and the summary of a study from its records; return its claims.

    tasks: how many records a finished run has. changes: what has changed since the records were
    made; the pages then say that the study is stale. The old results stay until the new ones are
    complete.
    """
    with replace_folder(place.results(study.name)) as folder:
        claims = study.report(records, folder)
        summary: Record = {
            "title": study.title,
            "done": [len(records), tasks],
            "claims": [vars(claim) for claim in claims],
        }
        if changes:
            summary["changes"] = list(changes)
        (folder / "summary.json").write_text(json.dumps(summary, indent=1), encoding="utf-8")
    return claims


def _timed(function: Callable[..., Record], settings: Mapping[str, Any]) -> Record:
    import torch

    torch.set_num_threads(1)
    start, cpu = time.perf_counter(), _cpu_seconds()
    record = function(**settings)
    return {
        **record,
        "seconds": time.perf_counter() - start,
        "cpu_seconds": _cpu_seconds() - cpu,
    }


def _cpu_seconds() -> float:
    """The processor time of this process and of its children that have ended."""
    return sum(os.times()[:4])


def _done(
    tasks: list[Task], jobs: int, label: str, progress: bool
) -> Iterator[tuple[Task, Record]]:
    from ssla.maths.progress import progress_bar

    if jobs == 1 or len(tasks) < 2:
        for task in progress_bar(tasks, len(tasks), progress and bool(tasks), label, "task"):
            yield task, _named(task, partial(_timed, task.function, task.settings))
        return
    context = multiprocessing.get_context("spawn")  # torch's threads do not survive a fork
    pool = ProcessPoolExecutor(
        min(jobs, len(tasks)), mp_context=context, initializer=_with_parent, initargs=(os.getpid(),)
    )
    futures = {pool.submit(_timed, task.function, task.settings): task for task in tasks}
    try:
        for future in progress_bar(as_completed(futures), len(futures), progress, label, "task"):
            yield futures[future], _named(futures[future], future.result)
    except BaseException:
        for future in futures:
            future.cancel()
        for process in list(pool._processes.values()):  # their results would be discarded
            process.terminate()
        raise
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _named(task: Task, result: Callable[[], Record]) -> Record:
    """The result, or the error with the task's name."""
    try:
        return result()
    except Exception as error:
        raise TaskError(f"The task {task.key!r} failed: {type(error).__name__}: {error}") from error


def _with_parent(parent: int) -> None:
    """End a worker whose parent was killed, so that it does not use the cores of the next run."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
