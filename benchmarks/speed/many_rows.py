"""Predictions of many rows: memory and rate of `ssla predict`, of `ssla.Scorer` with Dask and Ray,
and of the forward pass.

    python benchmarks/speed/many_rows.py --rows 10000000 --folder /tmp/many_rows [--only parquet forward
    dask ray csv]

The table has eight numbers and a category; the model is one network of `ssla train` with its
defaults. Every measurement is a process of its own. `above` is its peak memory beyond that of an
interpreter that has imported nothing, `after imports` the part that the imports of ssla, torch and
pyarrow take. Dask and Ray have one worker process of one thread, and the rows are generated on the
worker.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path

PART = 1 << 18
NAMES = [f"x{i}" for i in range(8)]
WAYS = ("parquet", "csv", "forward", "scorer", "dask", "ray")


def peak() -> float:
    """MiB of this process.

    Not ru_maxrss, which begins with the memory of the process that started this one.
    """
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) / 1024


BARE = peak()


def frame(rows, seed):
    import numpy as np
    import pandas as pd

    rng = np.random.default_rng(seed)
    numbers = rng.normal(size=(rows, len(NAMES)))
    kind = rng.integers(0, 4, rows)
    table = pd.DataFrame(dict(zip(NAMES, numbers.T, strict=True)))
    table["kind"] = np.array(["a", "b", "c", "d"])[kind]
    y = (
        np.sin(numbers[:, 0])
        + numbers[:, 1] * numbers[:, 2]
        + 0.3 * kind
        + 0.3 * rng.normal(size=rows)
    )
    return table, y


def parts(rows):
    return [(seed, min(PART, rows - seed * PART)) for seed in range(-(-rows // PART))]


def prepare(folder, rows, csv):
    """The model, and the table as Parquet and as CSV, unless they exist."""
    import pyarrow
    import pyarrow.parquet

    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / "model").exists():
        from ssla.tables.cli.train import Request
        from ssla.tables.cli.work import train_file

        table, y = frame(2000, 10**6)
        table.assign(y=y).to_csv(folder / "train.csv", index=False)
        train_file(Request(folder / "train.csv", "y", folder / "model", max_epochs=50), quiet=True)
    place = folder / f"rows_{rows}.parquet"
    if not place.exists():
        writer = None
        for seed, count in parts(rows):
            block = pyarrow.Table.from_pandas(frame(count, seed)[0], preserve_index=False)
            writer = writer or pyarrow.parquet.ParquetWriter(
                place.with_suffix(".draft"), block.schema
            )
            writer.write_table(block)
        writer.close()
        place.with_suffix(".draft").rename(place)
    if csv and not place.with_suffix(".csv").exists():
        for seed, count in parts(rows):
            frame(count, seed)[0].to_csv(
                place.with_suffix(".text"), mode="a", header=seed == 0, index=False
            )
        place.with_suffix(".text").rename(place.with_suffix(".csv"))


def predict(folder, rows, suffix):
    from ssla.tables.cli.work import predict_file

    imported, started = peak(), time.perf_counter()
    done = predict_file(folder / "model", folder / f"rows_{rows}{suffix}", folder / f"out{suffix}")
    assert done["rows"] == rows
    return {
        "seconds": time.perf_counter() - started,
        "above": peak() - BARE,
        "after imports": imported - BARE,
    }


def forward(folder, rows):
    """The same networks, in blocks of the same size, without reading and writing."""
    import torch

    import ssla.sklearn
    from ssla.tables.scoring.saved_models import BLOCK

    ensemble = ssla.sklearn.load(folder / "model").ensemble_
    x = torch.randn(BLOCK, ensemble.architecture.inputs, dtype=torch.float64)
    started = time.perf_counter()
    with torch.no_grad():
        for _ in range(rows // BLOCK):
            z = ensemble.inputs(x)
            for module in ensemble.modules:
                module(z)
    return {
        "seconds": (time.perf_counter() - started) * rows / (rows // BLOCK * BLOCK),
        "above": peak() - BARE,
    }


def scored(folder, rows):
    """`ssla.Scorer` for data frames in this process: no files."""
    import ssla

    scorer, seconds = ssla.Scorer(folder / "model"), 0.0
    for seed, count in parts(rows):
        table = frame(count, seed)[0]
        started = time.perf_counter()
        scorer(table)
        seconds += time.perf_counter() - started
    return {"seconds": seconds, "above": peak() - BARE}


def summary(scorer, table):
    """One row with the facts of a partition: what is checked, and the memory of the worker."""
    import pandas as pd

    out = scorer(table)
    return pd.DataFrame(
        {
            "rows": [len(out)],
            "sum": [float(out["upper_95"].sum())],
            "peak": [peak()],
            "pid": [os.getpid()],
        }
    )


def dask(folder, rows):
    import dask.dataframe

    import ssla
    from distributed import Client, LocalCluster

    scorer = ssla.Scorer(folder / "model")
    started = time.perf_counter()
    with (
        LocalCluster(n_workers=1, threads_per_worker=1, dashboard_address=None) as cluster,
        Client(cluster),
    ):
        seeds, counts = zip(*parts(rows), strict=True)
        table = dask.dataframe.from_map(lambda count, seed: frame(count, seed)[0], counts, seeds)
        meta = summary(scorer, frame(2, 0)[0])
        found = table.map_partitions(lambda part: summary(scorer, part), meta=meta).compute()
    return workers(found, rows, time.perf_counter() - started)


def ray(folder, rows):
    import ray as engine

    import ssla

    scorer = ssla.Scorer(folder / "model")
    started = time.perf_counter()
    engine.init(num_cpus=1, include_dashboard=False, log_to_driver=False)
    engine.data.DataContext.get_current().enable_progress_bars = False

    def generated(batch):
        return frame(int(batch["count"][0]), int(batch["seed"][0]))[0]

    asked = engine.data.from_items([{"seed": seed, "count": count} for seed, count in parts(rows)])
    made = asked.map_batches(generated, batch_size=1)
    done = made.map_batches(
        lambda part: summary(scorer, part), batch_size=None, batch_format="pandas"
    )
    found = done.to_pandas()
    engine.shutdown()
    return workers(found, rows, time.perf_counter() - started)


def workers(found, rows, seconds):
    assert found["rows"].sum() == rows
    by_order = found["peak"].tolist()
    tenth = max(len(by_order) // 10, 1)
    return {
        "seconds": seconds,
        "above": max(by_order) - BARE,
        "peak after a tenth": max(by_order[:tenth]) - BARE,
        "processes": found["pid"].nunique(),
        "sum": float(found["sum"].sum()),
    }


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=10**7)
    parser.add_argument("--folder", type=Path, default=Path("/tmp/many_rows"))
    parser.add_argument(
        "--only", nargs="+", choices=WAYS, default=["parquet", "forward", "scorer", "dask", "ray"]
    )
    parser.add_argument("--work", choices=WAYS, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.work:
        work = {"forward": forward, "scorer": scored, "dask": dask, "ray": ray}.get(given.work)
        found = (
            work(given.folder, given.rows)
            if work
            else predict(given.folder, given.rows, f".{given.work}")
        )
        print(json.dumps(found))
        return
    prepare(given.folder, given.rows, "csv" in given.only)
    seconds = {}
    for way in given.only:
        command = [
            sys.executable,
            __file__,
            "--rows",
            str(given.rows),
            "--folder",
            str(given.folder),
            "--work",
            way,
        ]
        done = subprocess.run(
            command,
            stdout=subprocess.PIPE,
            text=True,
            check=True,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )
        found = json.loads(done.stdout.strip().splitlines()[-1])
        seconds[way] = found["seconds"]
        rest = ", ".join(
            f"{name} {value:,.0f}" for name, value in found.items() if name != "seconds"
        )
        ratio = (
            f", {seconds[way] / seconds['forward']:.1f} × the forward pass"
            if "forward" in seconds
            else ""
        )
        rate = given.rows / found["seconds"]
        print(
            f"{way:8} {found['seconds']:7.1f} s, {rate:10,.0f} rows/s{ratio}; MiB: {rest}",
            flush=True,
        )


if __name__ == "__main__":
    main()
