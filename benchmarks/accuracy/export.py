"""Exported graphs in onnxruntime against the library: ten models (likelihood × structure of the
last layer), many inputs each.

    python benchmarks/accuracy/export.py [--rows 10000] [--only "counts, dense"]

Differences are in units of the larger of an answer and its standard deviation; of probabilities as
they are. Inputs are drawn twice as wide as those of the training, so that many are outside of it;
the file was checked on 100 of the training rows only. `NaN`: rows that the graph does not answer.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

import onnxruntime
import torch
from torch import nn

import ssla
from ssla import likelihoods as L
from ssla import priors

LEVELS = (0.05, 0.5, 0.95)
BLOCK = 500  # rows at a time, for both
MODELS = {  # likelihood, outputs, target of a number, structure
    "gaussian, dense": (L.Gaussian(noise=0.3), 1, lambda y: y, "dense"),
    "gaussian, low rank": (L.Gaussian(noise=0.3), 1, lambda y: y, "low_rank"),
    "two targets, kfac": (
        L.Gaussian(noise=torch.tensor([0.3, 0.4])),
        2,
        lambda y: torch.stack([y, -y], 1),
        "kfac",
    ),
    "yes or no, dense": (L.Bernoulli(), 1, lambda y: (y > 0).long(), "dense"),
    "two classes, diagonal": (L.Categorical(), 2, lambda y: (y > 0).long(), "diag"),
    "three classes, dense": (
        L.Categorical(),
        3,
        lambda y: (y > 0).long() + (y > 0.5).long(),
        "dense",
    ),
    "ten classes, kfac": (
        L.Categorical(),
        10,
        lambda y: (4 * y).round().long().clamp(-5, 4) + 5,
        "kfac",
    ),
    "counts, dense": (L.Poisson(), 1, lambda y: (3 * y.abs()).round(), "dense"),
    "counts, kfac": (L.Poisson(), 1, lambda y: (3 * y.abs()).round(), "kfac"),
    "dispersed counts, dense": (
        L.NegativeBinomial(0.5),
        1,
        lambda y: (3 * y.abs()).round(),
        "dense",
    ),
}


def fitted(name):
    likelihood, outputs, target, structure = MODELS[name]
    torch.manual_seed(0)
    x = torch.randn(300, 3, dtype=torch.float64)
    y = torch.sin(x[:, 0]) + 0.3 * torch.randn(300, dtype=torch.float64)
    network = nn.Sequential(nn.Linear(3, 16), nn.Tanh(), nn.Linear(16, outputs)).double().eval()
    return ssla.fit(
        network,
        (x, target(y)),
        likelihood=likelihood,
        prior=priors.Gaussian(1.0),
        structure=structure,
    ), x


def answers(predictive):
    if predictive.kind == "class":
        return {"probabilities": predictive.probs}
    return {
        "mean": predictive.mean,
        "sd": predictive.stddev,
        "quantiles": predictive.icdf(list(LEVELS)),
    }


def compared(post, session, x):
    """The largest difference of each answer, rows of NaN, and the seconds of both programs."""
    worst, nan, seconds = {}, 0, [0.0, 0.0]
    for some in x.split(BLOCK):
        started = time.perf_counter()
        expected = answers(post.predict(some))
        middle = time.perf_counter()
        found = dict(
            zip(
                (o.name for o in session.get_outputs()),
                session.run(None, {"x": some.numpy()}),
                strict=True,
            )
        )
        seconds = [seconds[0] + middle - started, seconds[1] + time.perf_counter() - middle]
        lost = torch.zeros(len(some), dtype=torch.bool)
        for name, value in expected.items():
            mine = torch.from_numpy(found[name])
            unit = torch.ones_like(value)
            if name != "probabilities":
                sd = expected["sd"]
                unit = torch.maximum(
                    value.abs(), sd if value.dim() == sd.dim() else sd.unsqueeze(-1)
                )
            gap = (mine - value).abs() / unit
            lost |= mine.isnan().flatten(1).any(1) if mine.dim() > 1 else mine.isnan()
            worst[name] = max(worst.get(name, 0.0), float(gap.nan_to_num(nan=0.0).max()))
        nan += int(lost.sum())
    return worst, nan, seconds


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=10_000)
    parser.add_argument("--only", choices=list(MODELS), nargs="+", default=list(MODELS))
    given = parser.parse_args()
    x = 2 * torch.randn(
        given.rows, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1)
    )
    print(
        "| model | largest difference | NaN | file, MB | written, s | library, s | onnxruntime, s |"
    )
    print("|---|---|---|---|---|---|---|", flush=True)
    for name in given.only:
        post, seen = fitted(name)
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "model.onnx"
            started = time.perf_counter()
            post.export(path, LEVELS, seen[:100])
            took, size = time.perf_counter() - started, path.stat().st_size / 1e6
            session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
            worst, nan, (library, runtime) = compared(post, session, x)
        said = ", ".join(f"{answer} {value:.0e}" for answer, value in worst.items())
        print(
            f"| {name} | {said} | {nan} | {size:.1f} | {took:.1f} | {library:.1f} | {runtime:.1f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
