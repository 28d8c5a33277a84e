"""The cost of a predictive of classes: in forward passes for 10 classes, in seconds and memory for
more.

    python benchmarks/speed/class_speed.py [--classes 10 100 1000] [--rows 1000] [--features 50]
    [--structure kfac] python benchmarks/speed/class_speed.py --classes 10000 --structure kfac --fitted
    5000 --features 64 --rows 1000

Memory is that of the whole process, torch included (about 0.2 GiB before the fit). With more than
1,000 outputs the default Gaussian is Laplace, as the printed name says, and the output factor of
structure="kfac" is diagonal. Each number of classes is timed in its own process, so that the peak
memory is its own.
"""

from __future__ import annotations

import argparse
import multiprocessing
import resource
import statistics
import time

import torch
from torch import nn

import ssla


def timed(
    classes: int, rows: int, features: int, structure: str, fitted: int, budget: float, mode: str
) -> None:
    torch.manual_seed(0)
    layers = [
        nn.Linear(64, 50),
        nn.ReLU(),
        nn.Linear(50, features),
        nn.ReLU(),
        nn.Linear(features, classes),
    ]
    model, x, y = (
        nn.Sequential(*layers).eval(),
        torch.randn(fitted, 64),
        torch.arange(fitted) % classes,
    )
    prior = ssla.priors.Gaussian(precision=1.0)
    memory = int(budget * 2**30)
    start, processor = time.perf_counter(), time.process_time()
    post = ssla.fit(
        model,
        (x, y),
        likelihood=ssla.likelihoods.Categorical(),
        prior=prior,
        structure=structure,
        mode=mode,
        memory_budget=memory,
    )
    post.predict(x[:1])
    fit_seconds, before = time.perf_counter() - start, peak()
    processor = time.process_time() - processor
    new = torch.randn(rows, 64)
    forward, predict, work = [], [], []
    for _ in range(3 if classes > 50 else 30):
        start = time.perf_counter()
        with torch.no_grad():
            model(new)
        forward.append(time.perf_counter() - start)
        start, begun = time.perf_counter(), time.process_time()
        p = post.predict(new)
        predict.append(time.perf_counter() - start)
        work.append(time.process_time() - begun)
        if predict[-1] > 5:
            break
    off = float((p.mass - 1).abs().max())
    ratio = statistics.median(a / b for a, b in zip(predict, forward, strict=True))
    print(
        f"{classes:7,} classes, {structure}, {post.gaussian}, {rows:,} rows: fit "
        f"{fit_seconds:.1f} s ({processor:.1f} s of the processor); predict "
        f"{1e3 * min(predict):,.1f} ms ({1e3 * min(work):,.1f} ms), {ratio:,.0f} forward passes; "
        f"peak memory {before:.2f} GiB of fit, {peak():.2f} GiB of all; mass off by {off:.0e}",
        flush=True,
    )


def peak() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--classes", type=int, nargs="+", default=[10])
    parser.add_argument("--rows", type=int, default=1000)
    parser.add_argument("--features", type=int, default=50)
    parser.add_argument("--fitted", type=int, default=500, help="rows of the fit")
    parser.add_argument("--structure", default="dense")
    parser.add_argument("--budget", type=float, default=1.0, help="GiB")
    parser.add_argument("--mode", default="polish", choices=["polish", "tilt"])
    options = parser.parse_args()
    for classes in options.classes:
        work = (
            classes,
            options.rows,
            options.features,
            options.structure,
            options.fitted,
            options.budget,
            options.mode,
        )
        child = multiprocessing.get_context("spawn").Process(target=timed, args=work)
        child.start()
        child.join()


if __name__ == "__main__":
    main()
