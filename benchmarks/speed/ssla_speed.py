"""SSLA (refit="weights") of large last layers: seconds and memory, and the distance from the dense
engine.

    OMP_NUM_THREADS=1 python benchmarks/speed/ssla_speed.py                  # the whole table
    OMP_NUM_THREADS=1 python benchmarks/speed/ssla_speed.py --only agreement # (2k, 128, 10) against the
    dense engine OMP_NUM_THREADS=1 python benchmarks/speed/ssla_speed.py --only speed --classes 100 --rows
    2

Features are generated, the head is trained by L-BFGS. No setting of the engine was chosen on the
problems of the agreement. Seconds are of the processor. Memory is the peak of a process of its own,
less what was resident before the refits.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
import warnings
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

import ssla
from ssla.refit.weights import last_layer_products
from ssla.refit.weights.solved import Solved

STATUS, CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")


class Problem(NamedTuple):
    """How features and classes are generated."""

    name: str
    spread: float = 1.5
    seed: int = 0
    tanh: bool = False


SPEED = Problem("ReLU")
AGREEMENT = [
    Problem("ReLU, another seed", seed=11),
    Problem("tanh of few factors", spread=2.0, seed=12, tanh=True),
    Problem("nearly separable", spread=4.0, seed=13),
]
CLASSES_APART = (
    3.0  # distance of 100 classes: nearer ones overlap so much that every class is a candidate
)


def features(
    kind: Problem, n: int, width: int, classes: int, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """ReLU of a rotated Gaussian mixture with a decaying spectrum, or tanh of a random map of
    20 factors; and the classes.
    """
    y = torch.randint(classes, (n,), generator=generator)
    if kind.tanh:
        centres = kind.spread * torch.randn(classes, 20, generator=generator)
        factors = centres[y] + torch.randn(n, 20, generator=generator) * 2
        return torch.tanh(factors @ torch.randn(20, width, generator=generator) / 20**0.5), y
    centres = 4 * kind.spread * torch.randn(classes, width, generator=generator) / width**0.5
    scale = (1 + torch.arange(width)) ** -0.5 * width**0.5 / 4
    rotation = torch.linalg.qr(torch.randn(width, width, generator=generator))[0]
    return torch.relu(
        (centres[y] + torch.randn(n, width, generator=generator)) * scale @ rotation
    ), y


def problem(
    kind: Problem, n: int, width: int, classes: int
) -> tuple[nn.Module, Tensor, Tensor, Tensor]:
    """A trained head, its features and classes, and features of 200 new rows."""
    generator = torch.Generator().manual_seed(kind.seed)
    x, y = features(kind, n + 200, width, classes, generator)
    torch.manual_seed(kind.seed)
    model = nn.Linear(width, classes)
    optimiser = torch.optim.LBFGS(model.parameters(), max_iter=200, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        optimiser.zero_grad()
        loss = nn.functional.cross_entropy(model(x[:n]), y[:n])
        loss = loss + 5e-4 * sum((p**2).sum() for p in model.parameters())
        loss.backward()
        return loss

    optimiser.step(closure)
    return model.eval(), x[:n], y[:n], x[n:]


def fitted(kind: Problem, n: int, width: int, classes: int) -> tuple[ssla.Posterior, Tensor]:
    model, x, y, new = problem(kind, n, width, classes)
    prior = ssla.priors.Gaussian(1e-3 * n)  # the head's own weight decay
    post = ssla.fit(
        model,
        (x, y),
        likelihood=ssla.likelihoods.Categorical(),
        prior=prior,
        structure="kfac",
        gaussian="laplace",
        mode="tilt",
    )
    return post, new


def resident(key: str) -> int:
    return next(
        1024 * int(line.split()[1])
        for line in STATUS.read_text().splitlines()
        if line.startswith(key)
    )


def speed(options: argparse.Namespace) -> None:
    """Print seconds of opening (once) and of each row, the number of refits, and the peak of
    memory, as JSON.
    """
    kind = SPEED if options.classes <= 10 else SPEED._replace(spread=CLASSES_APART)
    post, new = fitted(kind, options.n, options.width, options.classes)
    new = new[: options.rows]
    CLEAR.write_text("5")
    before = resident("VmRSS")
    start = time.process_time()
    log_density = ssla.WeightRefit()(post, new)
    probs = post.predict(new).probs
    likely = probs >= log_density.rare_probability
    likely &= likely.sum(1, keepdim=True) > 1
    rows, y = likely.nonzero().unbind(1)
    log_density.solve(y[:1].double(), rows[:1])  # with everything that is computed once
    opened = time.process_time()
    solved = log_density.solve(y.double(), rows)
    found = {
        "once": opened - start,
        "row": (time.process_time() - opened) / len(new),
        "refits": len(y) / len(new),
        "converged": float(solved.converged.double().mean()),
        "error": stated(solved, rows, y, probs),
        "memory": (resident("VmHWM") - before) / post.memory_budget,
        "engine": type(log_density._engine.shared).__name__,
    }
    print(json.dumps(found))


def stated(solved: Solved, rows: Tensor, y: Tensor, probs: Tensor) -> float:
    """The largest `diagnostics.error` of these rows: √Σ p e² over the classes."""
    logs, errors = torch.full(probs.shape, -torch.inf).double(), torch.zeros(probs.shape).double()
    logs[rows, y], errors[rows, y] = solved.total, solved.error
    return float((logs.softmax(1).nan_to_num() * errors.square()).sum(1).sqrt().max())


class Agreement(NamedTuple):
    """How far log probabilities are from those of the dense engine."""

    largest: float
    typical: float  # the median
    likely: float  # the largest of classes above 1%
    kl: float

    def __str__(self) -> str:
        return (
            f"at most {self.largest:.1e} ({self.likely:.1e} for p ≥ 0.01), typically "
            f"{self.typical:.1e}, KL {self.kl:.1e}"
        )


def agreement(kind: Problem, rows: int, large: bool) -> Agreement:
    """At (2,000, 128, 10).

    large: with the settings of a large problem (sketched determinants, a looser tolerance).
    """
    post, new = fitted(kind, 2000, 128, 10)
    refits = [ssla.WeightRefit(logdet="traces"), ssla.WeightRefit(logdet="exact")]
    limit = last_layer_products.LARGE
    last_layer_products.LARGE = 0.0 if large else limit
    found = [post.predict(new[:rows], refit=refit).probs.double().log() for refit in refits]
    last_layer_products.LARGE = limit
    apart = (found[0] - found[1]).abs()
    kl = float((found[1].exp() * (found[1] - found[0])).sum(1).mean())
    return Agreement(
        float(apart.max()), float(apart.median()), float(apart[found[1].exp() >= 0.01].max()), kl
    )


def measured(options: argparse.Namespace, classes: int, rows: int) -> None:
    """Print one row of the table of seconds, measured in a process of its own."""
    call = [
        sys.executable,
        __file__,
        "--inside",
        "--n",
        str(options.n),
        "--width",
        str(options.width),
    ]
    call += ["--classes", str(classes), "--rows", str(rows)]
    found = json.loads(subprocess.run(call, check=True, capture_output=True, text=True).stdout)
    print(
        f"| ({options.n:,}, {options.width}, {classes}) | {found['once']:.0f} | "
        f"{found['row']:.2f} | {found['refits']:.1f} | {found['converged']:.0%} | "
        f"{found['error']:.1e} | {found['memory']:.2f} | {found['engine']} |",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--only", choices=["speed", "agreement"])
    parser.add_argument("--n", type=int, default=10_000)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--classes", type=int)
    parser.add_argument("--rows", type=int)
    parser.add_argument("--inside", action="store_true", help="measure in this process")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    if options.inside:
        speed(options)
        return
    if options.only in (None, "speed"):
        print(
            "| (n, d, C) | s once | s a row | refits a row | converged | stated error | "
            "memory/budget | curvature |"
        )
        print("|---|---|---|---|---|---|---|---|")
        sizes = {10: 10, 100: 1} if options.classes is None else {options.classes: 10}
        for classes, rows in sizes.items():
            measured(options, classes, options.rows or rows)
    if options.only in (None, "agreement"):
        print("Log probabilities at (2,000, 128, 10) against the dense engine:")
        for kind in AGREEMENT:
            print(f"{kind.name}: {agreement(kind, options.rows or 4, False)}", flush=True)
            print(
                "  with the settings of a large problem: "
                f"{agreement(kind, options.rows or 4, True)}",
                flush=True,
            )


if __name__ == "__main__":
    main()
