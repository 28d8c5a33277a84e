"""The cost of each method beyond a trained network: seconds to fit, seconds to predict, peak
memory.

Each method runs in its own process, started by `measured`, so that it cannot reuse the memory of
another.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from ssla_paper.peers import MissingPeerError
from ssla_paper.robustness import data
from ssla_paper.robustness.methods import MEMBERS, Methods, trained
from ssla_paper.runner import Record

ROWS, REFITTED, REPEATS = 1000, 4, 3
RESET, STATUS = Path("/proc/self/clear_refs"), Path("/proc/self/status")


def measured(method: str, seed: int, size: float = 1.0, epochs: int = 200) -> Record:
    """`cost` of one method in a fresh process."""
    command = [
        sys.executable,
        "-W",
        "ignore",
        "-m",
        __name__,
        method,
        str(seed),
        str(size),
        str(epochs),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(
            f"The process that measures {method!r} ended with code "
            f"{done.returncode}:\n{done.stderr[-2000:]}"
        )
    found: Record = json.loads(done.stdout.splitlines()[-1])
    return found


def cost(method: str, seed: int, size: float, epochs: int) -> Record:
    """On digits: training, fit and prediction. Refits of the weights are timed on a few rows."""
    torch.set_num_threads(1)
    found = data.classes("digits", seed, size)
    members = MEMBERS if method in ("ensemble", "default5", "temperature") else 1
    record: Record = {"method": method, "seed": seed}
    record["train"], methods = _timed(
        lambda: trained(found.x, found.y, found.count, seed, epochs, members)
    )
    whole = max(round(ROWS * size), REFITTED)
    x = found.new.repeat(-(-whole // len(found.new)), 1)[:whole]
    record["forward"] = _predicting(methods, "plug_in", x) * ROWS / whole
    rows = REFITTED if method == "weights" else whole
    try:
        _warmed(method)
        before = _peak(reset=True)
        record["fit"], _ = _timed(lambda: _fitted(methods, method))
        record["predict"] = (
            _predicting(methods, method, x[:rows], 1 if method == "weights" else REPEATS)
            * ROWS
            / rows
        )
        record["memory"] = max(_peak() - before, 0.0)
    except MissingPeerError as error:
        record["missing"] = str(error)
    return record


def _warmed(method: str) -> None:
    """Import and first use on a small case, which do not count as time or memory of the fit."""
    x = torch.randn(40, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    small = trained(x, (x[:, 0] > 0).long(), 2, 0, epochs=2, members=2)
    small.answer(method, x[:5])


def _fitted(methods: Methods, method: str) -> Any:
    """The work of a method before the first prediction."""
    if method in ("plug_in", "ensemble"):
        return None
    names = {"default": "first_default", "default5": "defaults"}
    own = ("temperature", "laplace", "dropout", "validated")
    return getattr(methods, names.get(method, method if method in own else "first"))


def _predicting(methods: Methods, method: str, x: torch.Tensor, repeats: int = REPEATS) -> float:
    """The fastest of a few runs: other processes share the machine."""
    return min(_timed(lambda: methods.answer(method, x))[0] for _ in range(repeats))


def _timed(work: Callable[[], Any]) -> tuple[float, Any]:
    start = time.perf_counter()
    result = work()
    return time.perf_counter() - start, result


def _peak(reset: bool = False) -> float:
    """The highest resident memory in MiB, since the last reset where the system has one
    (Linux), else of the process.
    """
    if reset and RESET.exists():
        RESET.write_text("5")
    if STATUS.exists():
        line = next(line for line in STATUS.read_text().splitlines() if line.startswith("VmHWM"))
        return float(line.split()[1]) / 1024
    unit = 1 << 20 if sys.platform == "darwin" else 1 << 10
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / unit


if __name__ == "__main__":
    name, start, share, most = sys.argv[1:]
    sys.stdout.write(json.dumps(cost(name, int(start), float(share), int(most))) + "\n")
