"""SSLA (refit="weights") of large last layers: seconds and memory, and the distance from the dense engine.

    OMP_NUM_THREADS=1 python benchmarks/ssla_speed.py                  # (10k, 512, 10): seconds and memory
    OMP_NUM_THREADS=1 python benchmarks/ssla_speed.py --only agreement # (2k, 128, 10) against the dense engine
    OMP_NUM_THREADS=1 python benchmarks/ssla_speed.py --classes 100 --rows 2

Features are generated (ReLU of a rotated Gaussian mixture with a decaying spectrum), the head is trained by L-BFGS. Seconds are
of the processor. Memory is the peak of a process of its own, less what was resident before the refits.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
import warnings
from pathlib import Path

import torch
from torch import Tensor, nn

import ssla

STATUS, CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def problem(n: int, width: int, classes: int, spread: float, seed: int = 0) -> tuple[nn.Module, Tensor, Tensor, Tensor]:
    """A trained head, its features and classes, and features of 200 new rows."""
    generator = torch.Generator().manual_seed(seed)
    total = n + 200
    centres = 4 * spread * torch.randn(classes, width, generator=generator) / width**0.5
    y = torch.randint(classes, (total,), generator=generator)
    scale = (1 + torch.arange(width)) ** -0.5 * width**0.5 / 4
    rotation = torch.linalg.qr(torch.randn(width, width, generator=generator))[0]
    x = torch.relu((centres[y] + torch.randn(total, width, generator=generator)) * scale @ rotation)
    torch.manual_seed(seed)
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


def fitted(options: argparse.Namespace, n: int, width: int, classes: int) -> tuple[ssla.Posterior, Tensor]:
    model, x, y, new = problem(n, width, classes, options.spread)
    prior = ssla.priors.Gaussian(1e-3 * n)  # the head's own weight decay
    post = ssla.fit(
        model, (x, y), likelihood=ssla.likelihoods.Categorical(), prior=prior, structure="kfac", gaussian="laplace", mode="tilt"
    )
    return post, new


def resident(key: str) -> int:
    return next(1024 * int(line.split()[1]) for line in STATUS.read_text().splitlines() if line.startswith(key))


def speed(options: argparse.Namespace) -> None:
    """Print seconds of opening (once) and of each row, the number of refits, and the peak of memory, as JSON."""
    post, new = fitted(options, options.n, options.width, options.classes)
    new = new[: options.rows]
    CLEAR.write_text("5")
    before = resident("VmRSS")
    start = time.process_time()
    log_density = ssla.WeightRefit()(post.state, new)
    probs = post.predict(new).probs
    likely = probs >= log_density.rare
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
        "error": float(solved.error.max()),
        "memory": (resident("VmHWM") - before) / post.state.memory_budget,
        "engine": type(log_density._engine).__name__,
    }
    print(json.dumps(found))


def agreement(options: argparse.Namespace) -> None:
    """Log probabilities of both engines at (2,000, 128, 10)."""
    post, new = fitted(options, 2000, 128, 10)
    new = new[: options.rows]
    found = [post.predict(new, refit=ssla.WeightRefit(logdet=name)).probs.double().log() for name in ("traces", "exact")]
    apart = (found[0] - found[1]).abs()
    kl = float((found[1].exp() * (found[1] - found[0])).sum(1).mean())
    print(f"(2,000, 128, 10), {len(new)} rows: log probabilities differ by at most {float(apart.max()):.1e}, KL {kl:.1e}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--only", choices=["speed", "agreement"])
    parser.add_argument("--n", type=int, default=10_000)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--classes", type=int, default=10)
    parser.add_argument("--rows", type=int, default=50)
    parser.add_argument("--spread", type=float, default=1.5, help="distance of the classes")
    parser.add_argument("--inside", action="store_true", help="measure in this process")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    if options.inside:
        speed(options)
        return
    if options.only in (None, "speed"):
        call = [sys.executable, __file__, "--inside", *sys.argv[1:]]
        found = json.loads(subprocess.run(call, check=True, capture_output=True, text=True).stdout)
        print(
            f"({options.n:,}, {options.width}, {options.classes}): {found['once']:.1f} s once, {found['row']:.2f} s a row with "
            f"{found['refits']:.1f} refits ({found['converged']:.0%} converged), stated error at most {found['error']:.1e}, peak "
            f"memory {found['memory']:.2f} of the budget ({found['engine']})"
        )
    if options.only in (None, "agreement"):
        agreement(options)


if __name__ == "__main__":
    main()
