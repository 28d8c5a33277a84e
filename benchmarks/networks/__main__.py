"""Real network tasks, with peers at their best, in one run.

    python -m benchmarks.networks [--only clinc …] [--seeds 0 1 2] [--methods plug-in …]
                                  [--cache DIR] [--json FILE] [--seconds 900] [--gigabytes 6]
                                  [--again] [--table]

Run from the root of the repository, with SSLA_NETWORKS and SSLA_DATA set (see tasks.py). Tasks are
in tasks.py, methods in peers.py, scores in scores.py. Networks are trained once and kept in the
cache, or before with `python -m benchmarks.networks.training`. A (task, seed, method) that is in
the JSON file is not run again; --again runs the named methods again. --table prints the tables of
the file without any run.

Each method runs in a process of its own on one thread, with a limit on CPU seconds and on memory
beyond the rows. A method that is refused, stopped or out of memory is recorded so. Last-layer
methods start from features: their seconds do not contain the forward pass of the network. `fit`
contains every choice on the validation rows; `predict` is of the test rows. Memory is the peak
beyond what the process had at its start.

    loss      mean −log p(y): log-loss of classes, negative log density of standardised targets
    ± se      standard error of the paired difference to the plug-in, over test rows
    ECE       15 bins, most probable class
    AUROC     test rows against out-of-distribution inputs, by entropy (classes) or by the
              standard deviation of y (regression); MI: by mutual information, or by the standard
              deviation of the mean
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import os
import resource
import time
import traceback
from pathlib import Path
from typing import Any

import numpy as np
import torch

from . import peers, scores
from .peers import METHODS, NotApplicable, Setting
from .tasks import CLASSES, TASKS, Rows
from .training import CACHE

Record = dict[str, Any]
LAPLACE_BEST = "laplace-torch, best on validation rows"
DONE, SKIPPED = "done", "not applicable"


# --- one method ---------------------------------------------------------------------------------


def parts_of(rows: Rows) -> dict[str, tuple[torch.Tensor, torch.Tensor | None]]:
    """Everything that is predicted, by name; OOD inputs have no targets."""
    parts: dict[str, tuple[torch.Tensor, torch.Tensor | None]] = {
        "test": rows.test,
        "validation": rows.validation,
    }
    parts["ood"] = rows.ood, None
    return parts | {f"shift {name}": pair for name, pair in rows.shifts.items()}


def peak_bytes() -> int:
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def measure(setting: Setting, method: str) -> tuple[Record, np.ndarray]:
    """Fit and predict once. Returns the scores and the losses of the test rows."""
    torch.manual_seed(setting.seed)
    before = resident_bytes()
    start = time.process_time()
    predictor = METHODS[method](setting)
    fitted = time.process_time()
    record: Record = {"fit seconds": fitted - start, "fit bytes": max(0, peak_bytes() - before)}
    raw = parts_of(setting.raw)
    phi = parts_of(setting.phi)
    with torch.no_grad():
        start = time.process_time()
        test = predictor(raw["test"][0], phi["test"][0])
        record["predict seconds"] = time.process_time() - start
        record["predict rows"] = len(raw["test"][0])
        record["predict bytes"] = max(0, peak_bytes() - before)
        y = setting.raw.test[1]
        record |= test.scores(y)
        losses = test.losses(y).double().numpy()
        validation = predictor(raw["validation"][0], phi["validation"][0])
        record["validation loss"] = float(validation.losses(setting.raw.validation[1]).mean())
        record |= scores.ood_scores(test, predictor(raw["ood"][0], phi["ood"][0]))
        for name, (x, target) in raw.items():
            if name.startswith("shift"):
                assert target is not None
                record[name] = float(predictor(x, phi[name][0]).losses(target).mean())
    return record, losses


def in_child(setting: Setting, method: str, seconds: int, gigabytes: float, pipe: Any) -> None:
    """Run in a forked process under limits, and send what was found or what went wrong."""
    torch.set_num_threads(1)
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
    limit = resident_bytes() + int(gigabytes * 2**30)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    try:
        record, losses = measure(setting, method)
        pipe.send(({"status": DONE} | record, losses))
    except NotApplicable as reason:
        pipe.send(({"status": SKIPPED, "reason": str(reason)}, None))
    except Exception as error:
        text = f"{type(error).__name__}: {error}"
        pipe.send(
            (
                {"status": "failed", "reason": text[:500], "trace": traceback.format_exc()[-2000:]},
                None,
            )
        )


def run(
    setting: Setting, method: str, seconds: int, gigabytes: float
) -> tuple[Record, np.ndarray | None]:
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    child = context.Process(target=in_child, args=(setting, method, seconds, gigabytes, sender))
    child.start()
    sender.close()
    try:
        found: tuple[Record, np.ndarray | None] = receiver.recv()
    except EOFError:  # killed by a limit
        reason = f"Stopped after {seconds} CPU seconds, or out of {gigabytes:g} GB of memory."
        found = {"status": "stopped", "reason": reason}, None
    child.join()
    return found


# --- the file -----------------------------------------------------------------------------------


class Results:
    """The records by task, seed and method, written after each run.

    The losses of test rows are in the cache, for paired differences.
    """

    def __init__(self, path: Path | None, cache: Path) -> None:
        self.path = path
        self.cache = cache
        self.records: list[Record] = []
        if path is not None and path.exists():
            self.records = json.loads(path.read_text())["records"]

    def find(self, task: str, seed: int, method: str) -> Record | None:
        for record in self.records:
            if (record["task"], record["seed"], record["method"]) == (task, seed, method):
                return record
        return None

    def losses_path(self, task: str, seed: int, method: str) -> Path:
        return (
            self.cache / "losses" / f"{task}-{seed}-{method.replace(' ', '_').replace(',', '')}.npy"
        )

    def add(
        self, task: str, seed: int, method: str, record: Record, losses: np.ndarray | None
    ) -> Record:
        old = self.find(task, seed, method)
        if old is not None:
            self.records.remove(old)
        if losses is not None:
            path = self.losses_path(task, seed, method)
            path.parent.mkdir(parents=True, exist_ok=True)
            np.save(path, losses)
            base = self.losses_path(task, seed, "plug-in")
            if base.exists():
                difference = losses - np.load(base)
                record["difference"] = float(difference.mean())
                record["difference se"] = float(difference.std(ddof=1) / math.sqrt(len(difference)))
        record = {"task": task, "seed": seed, "method": method} | record
        self.records.append(record)
        if self.path is not None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.path.write_text(json.dumps({"records": self.records}, indent=1) + "\n")
        return record


def with_best_laplace(records: list[Record]) -> list[Record]:
    """Add, for each task and seed, the record of laplace-torch with the lowest validation loss."""
    found = list(records)
    for task, seed in dict.fromkeys((r["task"], r["seed"]) for r in records):
        own = [
            r
            for r in records
            if (r["task"], r["seed"], r["status"]) == (task, seed, DONE)
            and r["method"].startswith("laplace-torch")
        ]
        if own:
            best = min(own, key=lambda r: r["validation loss"])
            found.append(best | {"method": LAPLACE_BEST, "setting": best["method"]})
    return found


# --- tables -------------------------------------------------------------------------------------


def mean_of(records: list[Record], key: str) -> float:
    values = [r[key] for r in records if key in r and r[key] is not None]
    return float(np.mean(values)) if values else math.nan


def cell(value: float, digits: int) -> str:
    if math.isnan(value):
        return "–"
    text = f"{value:.{digits}f}"
    return text.replace("0.", ".", 1) if text.startswith(("0.", "-0.")) else text


def table(task: str, records: list[Record]) -> str:
    """The markdown table of one task: means over seeds."""
    classes = TASKS[task].kind == CLASSES
    own = [r for r in with_best_laplace(records) if r["task"] == task]
    done = [r for r in own if r["status"] == DONE]
    shifts = list(dict.fromkeys(key for r in done for key in r if key.startswith("shift ")))
    keys = (
        ["ECE", "Brier", "accuracy"]
        if classes
        else ["RMSE", "coverage 50%", "coverage 90%", "coverage 95%"]
    )
    columns = [*keys, "AUROC", "AUROC MI", *shifts]
    header = ["method", "seeds", "loss", "difference ± se", *columns]
    header += ["fit s", "predict ms/row", "peak MB"]
    lines = [f"| {' | '.join(header)} |", "|" + "---|" * len(header)]
    others = []
    for method in [LAPLACE_BEST, *METHODS]:
        mine = [r for r in done if r["method"] == method]
        if not mine:
            others += [
                f"{method}: {r['status']}. {r.get('reason', '')}"
                for r in own
                if r["method"] == method
            ][:1]
            continue
        difference = f"{mean_of(mine, 'difference'):+.4f} ± {mean_of(mine, 'difference se'):.4f}"
        row = [method, str(len(mine)), cell(mean_of(mine, "loss"), 4), difference]
        row += [
            cell(mean_of(mine, key), 4 if key in ("ECE", "Brier") or key.startswith("shift") else 3)
            for key in columns
        ]
        row.append(f"{mean_of(mine, 'fit seconds'):.1f}")
        row.append(f"{1000 * mean_of(mine, 'predict seconds') / mine[0]['predict rows']:.3f}")
        row.append(f"{max(mean_of(mine, 'fit bytes'), mean_of(mine, 'predict bytes')) / 2**20:.0f}")
        lines.append(f"| {' | '.join(row)} |")
    seeds = len({r["seed"] for r in done})
    notes = [f"- {line}" for line in others if SKIPPED not in line]
    return "\n".join([f"### {task} ({seeds} seeds)", "", *lines, "", *notes])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--only", nargs="+", default=list(TASKS), choices=list(TASKS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument(
        "--methods", nargs="+", default=list(METHODS), choices=list(METHODS), metavar="METHOD"
    )
    parser.add_argument("--cache", type=Path, default=CACHE)
    parser.add_argument(
        "--json", type=Path, default=None, help="default: results.json in the cache"
    )
    parser.add_argument("--seconds", type=int, default=900, help="CPU seconds of one method")
    parser.add_argument("--gigabytes", type=float, default=6.0)
    parser.add_argument("--again", action="store_true", help="run also what the file has")
    parser.add_argument("--table", action="store_true", help="only print the tables")
    options = parser.parse_args()
    torch.set_num_threads(1)
    results = Results(options.json or options.cache / "results.json", options.cache)
    for name in options.only:
        if not options.table:
            run_task(name, options, results)
        print("\n" + table(name, results.records), flush=True)


def run_task(name: str, options: argparse.Namespace, results: Results) -> None:
    task = TASKS[name]
    raw = task.rows()
    for seed in options.seeds:
        setting = None
        for method in options.methods:
            if not options.again and results.find(name, seed, method) is not None:
                continue
            if setting is None:
                setting = peers.setting_of(task, seed, options.cache, raw)
            record, losses = run(setting, method, options.seconds, options.gigabytes)
            record = results.add(name, seed, method, record, losses)
            shown = (
                f"loss {record['loss']:.4f}, AUROC {record['AUROC']:.3f}"
                if "loss" in record
                else record.get("reason")
            )
            seconds = record.get("fit seconds", 0.0)
            print(
                f"{name} {seed} {method}: {record['status']}, {shown}, fit {seconds:.1f} s",
                flush=True,
            )


if __name__ == "__main__":
    main()
