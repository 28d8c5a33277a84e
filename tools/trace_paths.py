"""Files and changes of package on the four main paths through the library.

Run: python tools/trace_paths.py [--list]

Every Python function of ssla on a path counts once, in the order of the first calls. `files` counts
their files, `changes` how often the package differs between one function and the next. A package is
a folder of src/ssla, or a single file at its top.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import torch

import ssla
from ssla.sklearn import SSLARegressor

ROOT = Path(ssla.__file__).parent


def walked(path: Callable[[], object]) -> list[str]:
    """The functions in the order of their first calls, as "file:function"."""
    seen: dict[str, None] = {}

    def watch(frame: object, event: str, argument: object) -> None:
        code = frame.f_code  # type: ignore[attr-defined]
        if (
            event == "call"
            and code.co_filename.startswith(str(ROOT))
            and code.co_name != "<module>"
        ):
            seen.setdefault(f"{Path(code.co_filename).relative_to(ROOT)}:{code.co_qualname}")

    sys.setprofile(watch)
    try:
        path()
    finally:
        sys.setprofile(None)
    return list(seen)


def package(function: str) -> str:
    return function.partition(":")[0].partition("/")[0]


def main() -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    x = torch.randn(60, 3, dtype=torch.float64)
    y = x[:, 0] + 0.3 * torch.randn(60, dtype=torch.float64)
    X, Y = x.numpy(), y.numpy()
    one, two = (
        torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.Tanh(), torch.nn.Linear(8, outputs))
        .double()
        .eval()
        for outputs in (1, 2)
    )
    noise, varying = (
        ssla.likelihoods.Gaussian(noise="estimate"),
        ssla.likelihoods.HeteroscedasticGaussian(),
    )
    paths: dict[str, Callable[[], object]] = {
        "fit": lambda: ssla.fit(one, (x, y), likelihood=noise),
        "predict().interval": lambda: post.predict(x[:5]).interval(0.9),
        'predict(refit="weights").log_prob': lambda: post.predict(x[:3], refit="weights").log_prob(
            y[:3]
        ),
        "SSLARegressor": lambda: (
            SSLARegressor(max_epochs=3, random_state=0).fit(X, Y).predict_interval(X)
        ),
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for path in paths.values():  # a first run, so that imports and caches are not counted
            post = ssla.fit(two, (x, y), likelihood=varying)
            path()
        print(f"{'path':36}  files  changes  functions")
        for name, path in paths.items():
            functions = walked(path)
            changes = sum(package(a) != package(b) for a, b in pairwise(functions))
            files = len({function.partition(":")[0] for function in functions})
            print(f"{name:36}  {files:5}  {changes:7}  {len(functions):9}")
            if "--list" in sys.argv:
                print("\n".join(f"    {function}" for function in functions))


if __name__ == "__main__":
    main()
