"""The records that come with the package: the pages are made from them on any machine.

    records/<study>.json.gz         the records of a complete run, in the order of its tasks
    records/<study>.summary.json    the claims of an earlier run whose records were not kept

A study has one of the two files. Numbers keep all their digits, so that a page from these records
is the page of the run, byte for byte. Each record has the origin that `runner.describe_origin`
gives. If the present origin of its task is another one, the record is stale: it is still reported,
and the pages name what has changed.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ssla.files.replacing import replace_file
from ssla_paper.runner import (
    Claim,
    Record,
    Study,
    Workplace,
    describe_origin,
    write_results,
)

FOLDER = Path(__file__).with_name("records")


@dataclass(frozen=True)
class Shipped:
    """The records of one study: task key -> the record's origin and what was found."""

    study: str
    entries: Mapping[str, Record]

    def records(self) -> dict[str, Record]:
        return {key: entry["found"] for key, entry in self.entries.items()}

    def cpu_minutes(self) -> float:
        seconds = [float(record["cpu_seconds"]) for record in self.records().values()]
        return sum(seconds) / 60


def locate_records(study: str, folder: Path | None = None) -> Path:
    return (folder or FOLDER) / f"{study}.json.gz"


def locate_summary(study: str, folder: Path | None = None) -> Path:
    return (folder or FOLDER) / f"{study}.summary.json"


def read_shipped(study: str, folder: Path | None = None) -> Shipped | None:
    """The shipped records of a study; None if there are none. ValueError if they are damaged."""
    path = locate_records(study, folder)
    if not path.exists():
        return None
    try:
        text = json.loads(gzip.decompress(path.read_bytes()))
        return Shipped(text["study"], text["records"])
    except (OSError, EOFError, ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"{path} is not a file of records ({type(error).__name__}: {error}). Take it from the "
            f"repository again, or make it: python -m ssla_paper {study} --ship."
        ) from error


def read_summary(study: Study, folder: Path | None = None) -> Record:
    """The summary of a study whose records are not shipped; without claims if it was never run."""
    path = locate_summary(study.name, folder)
    summary: Record = {"title": study.title, "done": [0, 0], "claims": []}
    if path.exists():
        summary = json.loads(path.read_text(encoding="utf-8"))
    return {**summary, "not_shipped": True}


def ship_records(study: Study, place: Workplace, folder: Path | None = None) -> Path:
    """Write the records of a complete run into the package, and return the file.

    The same records give the same bytes. ValueError for a small version of the study, and for a run
    in which a record, or the library of a peer, is missing.
    """
    if place.quick:
        raise ValueError("The records of --quick are a test of the code. Ship those of a full run.")
    tasks = study.tasks(quick=False)
    missing = [task.key for task in tasks if not place.settled(study.name, task)]
    if missing:
        raise ValueError(
            f"{len(missing)} of the {len(tasks)} tasks of the study {study.name!r} have no complete "
            f"record of the present code in {place.folder}; the first is {missing[0]!r}. Run the "
            "study to its end, with the libraries of all peers."
        )
    entries = {task.key: place.recall_entry(study.name, task) for task in tasks}
    text = json.dumps(
        {"study": study.name, "records": entries}, ensure_ascii=False, separators=(",", ":")
    )
    path = locate_records(study.name, folder)
    with replace_file(path) as draft:
        draft.write_bytes(gzip.compress(text.encode(), 9, mtime=0))
    locate_summary(study.name, folder).unlink(missing_ok=True)
    return path


def report_shipped(shipped: Shipped, study: Study, place: Workplace) -> list[Claim]:
    """Write tables, figures and the summary of a study from its shipped records.

    ValueError if the present report cannot read the records because they are stale.
    """
    changes = list_changes(shipped, study)
    records = shipped.records()
    try:
        return write_results(study, place, records, len(records), changes)
    except Exception as error:
        if not changes:
            raise
        raise ValueError(
            f"The report of the study {study.name!r} failed on its shipped records, which are "
            f"stale ({'; '.join(changes)}): {type(error).__name__}: {error}. Compute them again: "
            f"python -m ssla_paper {study.name} --ship."
        ) from error


def list_changes(shipped: Shipped, study: Study) -> list[str]:
    """What has changed since the records were made, in words; empty if they are current."""
    tasks = {task.key: task for task in study.tasks(quick=False)}
    modules: set[str] = set()
    versions: set[str] = set()
    altered = 0
    for key in tasks.keys() & shipped.entries.keys():
        then, now = shipped.entries[key], describe_origin(tasks[key])
        old, new = then["sources"], now["sources"]
        modules |= {name for name in {*old, *new} if old.get(name) != new.get(name)}
        if then["made_by"]["ssla"] != now["made_by"]["ssla"]:
            versions.add(f"ssla {then['made_by']['ssla']} (now {now['made_by']['ssla']})")
        altered += {**then["made_by"], "ssla": None} != {**now["made_by"], "ssla": None}
    counts = {
        "with other settings": altered,
        "without records": len(tasks.keys() - shipped.entries.keys()),
        "removed": len(shipped.entries.keys() - tasks.keys()),
    }
    return [
        *sorted(modules),
        *sorted(versions),
        *[f"{count} tasks {what}" for what, count in counts.items() if count],
    ]


def describe_records(study: Study, folder: Path | None = None) -> tuple[str, str]:
    """What the shipped records of a study cost, and whether they are current."""
    shipped = read_shipped(study.name, folder)
    if shipped is None:
        return "not measured", "not shipped yet"
    changes = list_changes(shipped, study)
    state = f"stale: {'; '.join(changes)}" if changes else "current"
    return f"{shipped.cpu_minutes():.1f}", state
