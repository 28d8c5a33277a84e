"""How cost grows: rows 10³ → 10⁶, widths 50 → 1,000, outputs 1 → 1,000, and a convolutional net of
ten million parameters.

Each line runs in its own process, so that peak memory is measured separately; the memory of `import
ssla` is subtracted. Rows are generated when they are read and not stored. Goals: time per row and
memory constant in n; memory by widths and not by parameters.

    python benchmarks/speed/growth.py [--quick] [--only rows|rows_all|widths|outputs|convolution]
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

BATCH = 1000
CASES: dict[str, tuple[int, ...]] = {
    "rows": (1_000, 10_000, 100_000, 1_000_000),
    "rows_all": (1_000, 10_000, 100_000),
    "widths": (50, 100, 300, 1_000),
    "outputs": (1, 10, 100, 1_000),
    "convolution": (10_000_000,),
}
WHAT = {
    "rows": "last layer, dense, MLP 8-50-50-1, n rows",
    "rows_all": "all weights, kfac, MLP 8-50-50-1, n rows",
    "widths": "all weights, kfac, MLP 8-w-w-1, 2,000 rows",
    "outputs": "last layer of 51 features, kfac (exact: the noise is constant), c outputs, 500 rows",
    "convolution": "all weights, kfac, four convolutions and two linear layers, 10 classes, 64 "
    "rows of 32×32×3, budget 2 GiB",
}


def peak() -> float:
    """MiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def child(case: str, size: int) -> dict[str, float]:
    """One measurement, in its own process."""
    import torch
    from torch import nn

    import ssla

    class Stream:
        """Rows that are generated when they are read, the same each time."""

        def __init__(
            self, rows: int, shape: tuple[int, ...], outputs: int = 1, classes: int = 0
        ) -> None:
            self.rows, self.shape, self.outputs, self.classes = rows, shape, outputs, classes

        def __iter__(self) -> Iterator[tuple[Any, Any]]:
            for start in range(0, self.rows, BATCH):
                generator = torch.Generator().manual_seed(start)
                count = min(BATCH, self.rows - start)
                x = torch.randn(count, *self.shape, generator=generator)
                if self.classes:
                    yield x, torch.randint(self.classes, (count,), generator=generator)
                else:
                    yield (
                        x,
                        x[:, :1].sin()
                        + 0.3 * torch.randn(count, self.outputs, generator=generator),
                    )

    def mlp(width: int, outputs: int = 1) -> nn.Module:
        return nn.Sequential(
            nn.Linear(8, width),
            nn.ReLU(),
            nn.Linear(width, width),
            nn.ReLU(),
            nn.Linear(width, outputs),
        ).eval()

    torch.manual_seed(0)
    gaussian = ssla.likelihoods.Gaussian(noise=0.3)
    new: Any = torch.randn(100, 8)
    options: dict[str, Any] = {
        "likelihood": gaussian,
        "prior": ssla.priors.Gaussian(),
        "mode": "tilt",
    }
    rows = 2_000
    if case in ("rows", "rows_all"):
        rows = size
        model, data = mlp(50), Stream(size, (8,))
        options |= {"structure": "kfac", "weights": "all"} if case == "rows_all" else {}
    elif case == "widths":
        model, data = mlp(size), Stream(rows, (8,))
        options |= {"structure": "kfac", "weights": "all"}
    elif case == "outputs":
        rows, new = 500, new[:10]
        model, data = mlp(50, size), Stream(rows, (8,), outputs=size)
        options |= {"structure": "kfac"}
    else:
        rows, new = 64, torch.randn(8, 3, 32, 32)
        model = nn.Sequential(
            *(nn.Conv2d(3, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Conv2d(64, 128, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Conv2d(128, 256, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Conv2d(256, 256, 3, padding=1), nn.ReLU(), nn.Flatten()),
            *(nn.Linear(4096, 2176), nn.ReLU(), nn.Linear(2176, 10)),
        ).eval()
        data = Stream(rows, (3, 32, 32), classes=10)
        options |= {
            "structure": "kfac",
            "weights": "all",
            "likelihood": ssla.likelihoods.Categorical(),
            "prior": ssla.priors.Gaussian(),
            "gaussian": "laplace",
        }
        options["memory_budget"] = 2 << 30
    before = peak()
    import warnings

    warnings.simplefilter("ignore")
    start = time.perf_counter()
    posterior = ssla.fit(model, data, **options)
    fitted = time.perf_counter()
    posterior.marginal(new)
    done = time.perf_counter()
    return {
        "parameters": posterior.report.parameters,
        "rows": rows,
        "fit": fitted - start,
        "predict": (done - fitted) / len(new),
        "memory": peak() - before,
        "statistics": posterior.report.memory / 2**20,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument(
        "--quick",
        action="store_true",
        help="leave out the largest of each and the convolutional net",
    )
    parser.add_argument("--only", choices=CASES)
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        print(json.dumps(child(options.child[0], int(options.child[1]))))
        return
    for case, sizes in CASES.items():
        if (options.only and case != options.only) or (options.quick and case == "convolution"):
            continue
        print(f"\n{WHAT[case]}")
        print(
            "       size   parameters     fit s   µs/row   predict ms/point   peak MiB   "
            "statistics MiB"
        )
        for size in sizes[:-1] if options.quick else sizes:
            command = [sys.executable, __file__, "--child", case, str(size)]
            found = json.loads(
                subprocess.run(command, check=True, capture_output=True, text=True).stdout
            )
            print(
                f"{size:11,}{found['parameters']:13,}{found['fit']:10.2f}{1e6 * found['fit'] / found['rows']:9.1f}"
                f"{1e3 * found['predict']:19.2f}{found['memory']:11.0f}{found['statistics']:17.1f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
