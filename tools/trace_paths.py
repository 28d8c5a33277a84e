"""Files and changes of package on the four main paths through the library.

Run: python tools/trace_paths.py            # print the table of docs/design.md
     python tools/trace_paths.py --list     # and the functions of each path
     python tools/trace_paths.py --write    # and put it into docs/design.md

Every Python function of ssla on a path counts once, in the order of the first calls. `files` counts
their files, `changes` how often the package differs between one function and the next. A package is
a folder of src/ssla, or a single file at its top. tests/test_trace_paths.py compares the page with
a new count.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import torch

import ssla
from ssla.sklearn import SSLARegressor

ROOT = Path(ssla.__file__).parent
PAGE = Path(__file__).parents[1] / "docs" / "design.md"
HEADER = "| call | files | changes of package |\n|---|---|---|\n"


class Trace(NamedTuple):
    """What one call passes."""

    functions: list[str]  # "file:function", in the order of their first calls

    @property
    def files(self) -> int:
        """How many files the functions are in."""
        return len({function.partition(":")[0] for function in self.functions})

    @property
    def changes(self) -> int:
        """How often the package differs between one function and the next."""
        packages = [name.partition(":")[0].partition("/")[0] for name in self.functions]
        return sum(a != b for a, b in pairwise(packages))


def trace(call: Callable[[], object]) -> Trace:
    """Run a call and note the functions of ssla that it enters."""
    seen: dict[str, None] = {}

    def watch(frame: object, event: str, argument: object) -> None:
        code = frame.f_code  # type: ignore[attr-defined]
        inside = event == "call" and code.co_filename.startswith(str(ROOT))
        if inside and code.co_name != "<module>":
            name = getattr(code, "co_qualname", code.co_name)  # from Python 3.11
            seen.setdefault(f"{Path(code.co_filename).relative_to(ROOT)}:{name}")

    sys.setprofile(watch)
    try:
        call()
    finally:
        sys.setprofile(None)
    return Trace(list(seen))


def trace_main_calls() -> dict[str, Trace]:
    """Trace the four main calls on a small problem, each after a first run of it, so that imports
    and caches do not count.
    """
    torch.manual_seed(0)
    torch.set_num_threads(1)
    x = torch.randn(60, 3, dtype=torch.float64)
    y = x[:, 0] + 0.3 * torch.randn(60, dtype=torch.float64)
    X, Y = x.numpy(), y.numpy()
    mean, mean_and_variance = (
        torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.Tanh(), torch.nn.Linear(8, outputs))
        .double()
        .eval()
        for outputs in (1, 2)
    )
    noise = ssla.likelihoods.Gaussian(noise="estimate")
    varying = ssla.likelihoods.HeteroscedasticGaussian()
    regressor = SSLARegressor(max_epochs=3, random_state=0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        posterior = ssla.fit(mean_and_variance, (x, y), likelihood=varying)
        calls: dict[str, Callable[[], object]] = {
            "fit": lambda: ssla.fit(mean, (x, y), likelihood=noise),
            "predict().interval": lambda: posterior.predict(x[:5]).interval(0.9),
            'predict(refit="weights")': lambda: posterior.predict(x[:3], refit="weights").log_prob(
                y[:3]
            ),
            "SSLARegressor": lambda: regressor.fit(X, Y).predict_interval(X),
        }
        for call in calls.values():
            call()
        return {name: trace(call) for name, call in calls.items()}


def table(traces: dict[str, Trace]) -> str:
    """The table of docs/design.md."""
    rows = (f"| `{name}` | {found.files} | {found.changes} |\n" for name, found in traces.items())
    return HEADER + "".join(rows)


def counts_on_the_page() -> dict[str, tuple[int, int]]:
    """Files and changes of each call, as docs/design.md states them."""
    rows = PAGE.read_text(encoding="utf-8").partition(HEADER)[2].partition("\n\n")[0]
    cells = [[cell.strip() for cell in row.split("|")[1:-1]] for row in rows.splitlines()]
    return {name.strip("`"): (int(files), int(changes)) for name, files, changes in cells}


def main() -> None:
    traces = trace_main_calls()
    print(table(traces))
    if "--list" in sys.argv:
        for name, found in traces.items():
            print(name, *found.functions, sep="\n    ")
    if "--write" in sys.argv:
        before, _, rest = PAGE.read_text(encoding="utf-8").partition(HEADER)
        after = rest.partition("\n\n")[2]
        PAGE.write_text(f"{before}{table(traces)}\n{after}", encoding="utf-8")


if __name__ == "__main__":
    main()
