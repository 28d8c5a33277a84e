"""Refits of the weights: thousands together, beside one-by-one Newton and beside a fresh optimiser
for each.

    python benchmarks/speed/refit_speed.py [--rounds 3] [--one-by-one 200] [--against DIRECTORY] [--only
    all_weights]

--against: another checkout of this repository. Its refits of all weights and of ten classes run in
a process of their own, in turn with ours, and processor times are compared (a busy machine changes
them less than elapsed times).

Ten classes: digits, a 64-50-50-10 network, n = 1,200, prior precision 1, the variational Gaussian.
Beside it NUTS on the same last layer (500 + 1,000 draws, one chain; with numpyro).

Every ratio comes from the same run: the jobs alternate. One-by-one Newton is exact (observed
Hessian, Cholesky, backtracking) and is timed on a part of the tasks. "The authors' way" retrains a
copy of the network on the data and (x, y) for each y: a fresh Adam, ten epochs, batches of 32.
"""

from __future__ import annotations

import argparse
import copy
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

import ssla

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "benchmarks" / "accuracy"))

import small_networks as networks  # noqa: E402


def one_by_one(
    features: Tensor, y: Tensor, theta: Tensor, phi: Tensor, target: Tensor, precision: float
) -> tuple[float, int]:
    """SSLA of one heteroscedastic task by Newton from θ̂ (C, F), to a decrement of 1e-8: (log
    density, steps).
    """

    def derivatives(t: Tensor, rows: Tensor, values: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        mean, log_variance = (rows @ t.mT).unbind(-1)
        r, w = values - mean, torch.exp(-log_variance)
        score = torch.stack([r * w, 0.5 * r * r * w - 0.5], -1)
        curvature = torch.stack([w, r * w, r * w, 0.5 * r * r * w], -1)
        return -0.5 * (log_variance + r * r * w), score, curvature

    def hessian(rows: Tensor, curvature: Tensor) -> Tensor:
        blocks = [(rows * curvature[:, k, None]).mT @ rows for k in (0, 1, 3)]
        H = torch.cat([torch.cat([blocks[0], blocks[1]], 1), torch.cat([blocks[1], blocks[2]], 1)])
        H.diagonal().add_(precision)
        return H

    rows, values = torch.cat([features, phi[None]]), torch.cat([y, target[None]])
    first, _, curvature = derivatives(theta, features, y)
    before = torch.linalg.cholesky(hessian(features, curvature)).diagonal().log().sum()
    start = first.sum() - 0.5 * precision * (theta**2).sum()
    t = theta.clone()
    logs, score, curvature = derivatives(t, rows, values)
    value = logs.sum() - 0.5 * precision * (t**2).sum()
    steps = 0
    while True:
        gradient = (score.mT @ rows - precision * t).flatten()
        factor = torch.linalg.cholesky(hessian(rows, curvature))
        move = torch.cholesky_solve(gradient[:, None], factor)[:, 0]
        if float(gradient @ move) <= 1e-16:
            break
        steps += 1
        size = 1.0
        while True:
            trial = t + size * move.reshape(t.shape)
            logs, score, curvature = derivatives(trial, rows, values)
            new = logs.sum() - 0.5 * precision * (trial**2).sum()
            if float(new) >= float(value) - 1e-9:
                break
            size /= 2
        t, value = trial, new
    constant = -0.5 * torch.log(torch.tensor(2 * torch.pi))
    return float(value - start + constant - (factor.diagonal().log().sum() - before)), steps


def authors_way(model: nn.Module, x: Tensor, y: Tensor, new: Tensor, target: Tensor) -> nn.Module:
    """A copy of the network, trained on the data and (x, y): a fresh Adam, ten epochs, batches
    of 32.
    """
    again = copy.deepcopy(model)
    optimiser = torch.optim.Adam(again.parameters(), lr=1e-3)
    rows, values = torch.cat([x, new[None]]), torch.cat([y, target[None]])
    for _ in range(10):
        for part in torch.randperm(len(rows)).split(32):
            optimiser.zero_grad()
            ((again(rows[part])[:, 0] - values[part]) ** 2).mean().backward()
            optimiser.step()
    return again


def timed(jobs: dict[str, Callable[[], object]], rounds: int) -> dict[str, list[float]]:
    """Seconds of each job, alternating; the first round does not count."""
    times: dict[str, list[float]] = {name: [] for name in jobs}
    for round_ in range(rounds + 1):
        for name, job in jobs.items():
            start = time.perf_counter()
            job()
            if round_:
                times[name].append(time.perf_counter() - start)
    return times


def ratio(
    times: dict[str, list[float]], slow: str, fast: str, per_slow: int, per_fast: int
) -> float:
    """How many times as long one unit of `slow` takes as one of `fast`: the median over rounds."""
    return statistics.median(
        (a / per_slow) / (b / per_fast) for a, b in zip(times[slow], times[fast], strict=True)
    )


def last_layer(rounds: int, singles: int) -> None:
    """n = 1,000, 51 features, two outputs, 100 points × 20 y."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 50), nn.Tanh(), nn.Linear(50, 2)).double().eval()
    x = torch.randn(1000, 8, dtype=torch.float64)
    y = x[:, 0] + torch.randn(1000, dtype=torch.float64) * (0.2 + 0.2 * x[:, 1].abs())
    post = ssla.fit(
        model,
        (x, y),
        likelihood=ssla.likelihoods.HeteroscedasticGaussian(),
        prior=ssla.priors.Gaussian(),
        gaussian="laplace",
    )
    new = torch.randn(100, 8, dtype=torch.float64)
    grid = post.predict(new).icdf(torch.linspace(0.002, 0.998, 20, dtype=torch.float64))
    refit = ssla.WeightRefit()

    def features(a: Tensor) -> Tensor:
        with torch.no_grad():
            return torch.cat([model[1](model[0](a)), torch.ones(len(a), 1, dtype=a.dtype)], 1)

    phi, phi_new, theta = features(x), features(new), post.theta.reshape(2, -1)
    chosen = torch.linspace(0, grid.numel() - 1, singles).long()

    def singly() -> list[tuple[float, int]]:
        tasks = [(int(i) // grid.shape[1], int(i) % grid.shape[1]) for i in chosen]
        return [one_by_one(phi, y, theta, phi_new[i], grid[i, j], 1.0) for i, j in tasks]

    many = torch.randn(1000, 8, dtype=torch.float64)
    jobs: dict[str, Callable[[], object]] = {
        "together": lambda: refit(post, new).solve(grid),
        "one by one": singly,
        "predict output": lambda: post.predict(many).mass,
        "predict weights": lambda: post.predict(many, refit="weights").mass,
    }
    times = timed(jobs, rounds)
    solved, single = refit(post, new).solve(grid), singly()
    worst = max(
        abs(float(solved.total[i]) - value) for i, (value, _) in zip(chosen, single, strict=True)
    )
    print(
        f"Last layer: n = 1,000, 51 features, 2 outputs, {grid.numel():,} refits at 1e-8, "
        f"{torch.get_num_threads()} threads"
    )
    print(
        f"  together        {min(times['together']):8.2f} s, "
        f"{float(solved.steps.double().mean()):.1f} gradients for each task"
    )
    print(
        f"  one by one      {min(times['one by one']) / singles * grid.numel():8.2f} s (from "
        f"{singles}), {statistics.mean(s for _, s in single):.1f} Newton steps for each task"
    )
    faster = ratio(times, "one by one", "together", singles, grid.numel())
    print(f"  ratio           {faster:8.1f}x; the two differ by at most {worst:.1e}")
    refits = float(post.predict(many, refit="weights").diagnostics.refits.double().mean())
    print(
        f"Whole predictives of 1,000 points: {min(times['predict weights']):.2f} s, {refits:.1f} "
        "refits for each point, "
        f"{ratio(times, 'predict weights', 'predict output', 1, 1):.0f}x the time of "
        "OutputRefit\n"
    )


def network_at_its_mode() -> tuple[nn.Module, Tensor, Tensor, ssla.Posterior, Tensor, Tensor]:
    """n = 300, about 3,000 weights, Gaussian noise: the network, its data, its posterior, 10
    points × 10 y.
    """
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(4, 50), nn.Tanh(), nn.Linear(50, 50), nn.Tanh(), nn.Linear(50, 1)
    ).double()
    x = torch.randn(300, 4, dtype=torch.float64)
    y = torch.sin(x[:, 0]) + 0.2 * torch.randn(300, dtype=torch.float64)
    likelihood, prior = ssla.likelihoods.Gaussian(noise=0.2), ssla.priors.Gaussian(precision=10.0)
    # to the mode: a refit assumes a maximum
    optimiser = torch.optim.LBFGS(
        model.parameters(),
        max_iter=3000,
        history_size=50,
        line_search_fn="strong_wolfe",
        tolerance_grad=1e-6,
        tolerance_change=0.0,
    )

    def closure() -> Tensor:
        optimiser.zero_grad()
        loss = ((model(x)[:, 0] - y) ** 2).sum() / 0.08 + 5 * sum(
            (p**2).sum() for p in model.parameters()
        )
        loss.backward()
        return loss

    optimiser.step(closure)
    new = torch.randn(10, 4, dtype=torch.float64)
    post = ssla.fit(
        model.eval(), (x, y), likelihood=likelihood, prior=prior, gaussian="laplace", weights="all"
    )
    return (
        model,
        x,
        y,
        post,
        new,
        post.predict(new).icdf(torch.linspace(0.02, 0.98, 10, dtype=torch.float64)),
    )


def processor_times() -> None:
    """Print seconds of processor time of the refits of all weights to 1e-3 and 1e-5: what
    `--against` compares.
    """
    _, _, _, post, new, grid = network_at_its_mode()
    ssla.WeightRefit(tolerance=0.1)(post, new).solve(grid)  # imports and caches
    for tolerance in (1e-3, 1e-5):
        start = time.process_time()
        solved = ssla.WeightRefit(tolerance=tolerance)(post, new).solve(grid)
        print(
            time.process_time() - start,
            float(solved.steps.double().mean()),
            int(solved.converged.sum()),
        )


def ten_classes() -> tuple[nn.Module, networks.Split, ssla.Posterior]:
    split = networks.digits(0, 1200, 200)
    torch.manual_seed(0)
    model = networks.perceptron(64, (50, 50), 10)
    networks.train(model, ssla.likelihoods.Categorical(), split, 0)
    law, prior = ssla.likelihoods.Categorical(), ssla.priors.Gaussian()
    return (
        model,
        split,
        ssla.fit(
            model.eval(), (split.x, split.y), likelihood=law, prior=prior, gaussian="variational"
        ),
    )


def class_times(rows: int, answers: Path) -> None:
    """Print seconds of processor time for each row of ten classes, and save log probabilities:
    what `--against` compares.
    """
    _, split, post = ten_classes()
    new = torch.cat([split.x_test, split.x])[:rows]
    post.predict(new[:2], refit="weights")  # imports and caches
    start = time.process_time()
    log_probs = post.predict(new, refit="weights").probs.log()
    print((time.process_time() - start) / rows)
    torch.save(log_probs, answers)


def _elsewhere(root: Path, *arguments: str) -> str:
    """What this script prints with the library of another checkout."""
    environment = {**os.environ, "PYTHONPATH": str(root / "src")}
    return subprocess.run(
        [sys.executable, __file__, *arguments],
        env=environment,
        check=True,
        capture_output=True,
        text=True,
    ).stdout


def classes(other: Path | None) -> None:
    """1,000 rows of ten classes here, NUTS, and 40 rows of another checkout."""
    here, saved = (
        ROOT,
        {name: Path(tempfile.mkdtemp()) / name for name in ("this", "other")},
    )
    each = float(
        _elsewhere(here, "--only", "class_times", "--rows", "1000", "--answers", str(saved["this"]))
    )
    print(f"Ten classes, 1,000 rows, processor time: {1000 * each:.1f} s here")
    if other is not None:
        slow = float(
            _elsewhere(
                other, "--only", "class_times", "--rows", "40", "--answers", str(saved["other"])
            )
        )
        ours, theirs = (torch.load(saved[name]) for name in ("this", "other"))
        apart = (ours[: len(theirs)] - theirs).abs()
        kl = float((theirs.exp() * (theirs - ours[: len(theirs)])).sum(1).mean())
        likely = {least: float(apart[theirs.exp() >= least].max()) for least in (1e-2, 1e-4, 0.0)}
        words = ", ".join(f"{value:.1e} (p ≥ {least:g})" for least, value in likely.items())
        print(f"  {1000 * slow:.0f} s in {other} (from 40 rows), ratio {slow / each:.1f}")
        print(f"  log probabilities differ by at most {words}; KL {kl:.1e}")
    try:
        import last_layers
    except ImportError:
        print("  NUTS needs numpyro: not run")
        return
    model, split, _ = ten_classes()
    laplace = networks.fit(
        model, split.x, split.y, ssla.likelihoods.Categorical(), "laplace", ssla.priors.Gaussian()
    )
    weight, bias = laplace.parameters.values()
    last_layers.CHAINS = 1
    phi, mode = last_layers.features(model, split.x), torch.cat([weight, bias[:, None]], 1)
    nuts = last_layers.sample(last_layers.CASES["digits"], phi, split.y, mode, 1.0, 1000, 0)
    print(
        f"  NUTS, 500 + 1,000 draws, one chain: {nuts.seconds:.1f} s, "
        f"{nuts.seconds / (1000 * each):.2f} of our time"
    )


def against(other: Path, rounds: int) -> None:
    """The refits of all weights of this checkout and of another one, in turn."""
    found: dict[str, list[list[list[float]]]] = {"this": [], "other": []}
    for _ in range(rounds):
        for name, root in (("other", other), ("this", ROOT)):
            text = _elsewhere(root, "--only", "processor_times")
            found[name].append(
                [[float(part) for part in line.split()] for line in text.splitlines()]
            )
    for k, tolerance in enumerate((1e-3, 1e-5)):
        times = {name: [run[k][0] for run in runs] for name, runs in found.items()}
        ratios = [a / b for a, b in zip(times["other"], times["this"], strict=True)]
        last = {name: runs[-1][k] for name, runs in found.items()}
        print(
            f"All weights, 100 refits at {tolerance:g}, processor time: {min(times['other']):.2f} "
            f"s in {other}, {min(times['this']):.2f} s here, ratio {statistics.median(ratios):.1f} "
            f"({min(ratios):.1f} to {max(ratios):.1f}); gradients {last['other'][1]:.1f} and "
            f"{last['this'][1]:.1f}, converged {last['other'][2]:.0f} and {last['this'][2]:.0f}"
        )


def all_weights(rounds: int) -> None:
    """n = 300, about 3,000 weights, Gaussian noise, the determinant frozen: 10 points × 10 y."""
    model, x, y, post, new, grid = network_at_its_mode()
    retrained = 3
    for tolerance in (1e-3, 1e-5):
        refit = ssla.WeightRefit(tolerance=tolerance)
        jobs: dict[str, Callable[[], object]] = {
            "together": lambda r=refit: r(post, new).solve(grid),
            "authors": lambda: [
                authors_way(model, x, y, new[i], grid[i, 0]) for i in range(retrained)
            ],
        }
        times = timed(jobs, rounds)
        solved = refit(post, new).solve(grid)
        faster = ratio(times, "authors", "together", retrained, grid.numel())
        print(
            f"All weights ({post.report.parameters:,}), n = 300, {grid.numel()} refits at "
            f"{tolerance:g}: {min(times['together']) / grid.numel() * 1e3:.1f} ms each, "
            f"{float(solved.steps.double().mean()):.0f} steps, {int(solved.converged.sum())} "
            f"converged; the authors' way takes {faster:.0f}x as long"
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--one-by-one", type=int, default=200)
    parser.add_argument(
        "--against",
        type=Path,
        help="another checkout: compare refits of all weights and of classes",
    )
    parser.add_argument(
        "--only", choices=["last_layer", "classes", "all_weights", "processor_times", "class_times"]
    )
    parser.add_argument("--rows", type=int, default=1000, help="of class_times")
    parser.add_argument(
        "--answers", type=Path, help="file for the log probabilities of class_times"
    )
    options = parser.parse_args()
    if options.only == "processor_times":
        processor_times()
    elif options.only == "class_times":
        class_times(options.rows, options.answers)
    if options.only in (None, "last_layer"):
        last_layer(options.rounds, options.one_by_one)
    if options.only in (None, "classes"):
        classes(options.against)
    if options.only in (None, "all_weights"):
        all_weights(options.rounds)
        if options.against is not None:
            against(options.against, options.rounds)


if __name__ == "__main__":
    main()
