"""Predictives of many classes: CPU milliseconds a row, peak memory, and errors of the integrals.

    python benchmarks/speed/predict_scale.py                       times, one thread: goals 0.02, 0.4 and 4 ms a row
    python benchmarks/speed/predict_scale.py --memory              100,000 rows × 1,000 classes in a process of its own
    python benchmarks/speed/predict_scale.py --errors [--truth 17] mean KL error of the nodes against 2¹⁷
    of them
    python benchmarks/speed/predict_scale.py --slabs               times by the size of the slabs of the integrals

A head of 512 features is trained on clusters, and has Kronecker factors at the trained weights
("laplace", mode="tilt"). Its prior precision gives outputs the variances that are printed. Run it
with OMP_NUM_THREADS=1. "by product" is the same predictive where every row takes its own product of
C²·S multiplications.
"""

from __future__ import annotations

import argparse
import resource
import subprocess
import sys
import time
from collections.abc import Callable

import torch
from torch import Tensor, nn

import ssla
from ssla.maths.quadrature.normal import normal_nodes
from ssla.maths.roots import Root, ScaledRoot
from ssla.predictive import class_integrals, many_classes

INPUTS, FEATURES = 64, 512
HEADS = {
    10: (4000, 1.6, 300.0),
    150: (8000, 1.1, 3000.0),
    1000: (4000, 0.9, 10000.0),
}  # rows, noise, prior precision
ROWS = {10: 4000, 150: 1000, 1000: 200}


def head(classes: int, epochs: int = 15) -> tuple[nn.Module, Tensor, Tensor, Tensor]:
    """A trained network, its data and new inputs."""
    rows, noise, _ = HEADS[classes]
    torch.manual_seed(0)
    centres = torch.randn(classes, INPUTS)
    y = torch.randint(classes, (rows,))
    x = centres[y] + noise * torch.randn(rows, INPUTS)
    new = centres[torch.randint(classes, (4000,))] + noise * torch.randn(4000, INPUTS)
    layers = [
        nn.Linear(INPUTS, FEATURES),
        nn.ReLU(),
        nn.Linear(FEATURES, FEATURES),
        nn.ReLU(),
        nn.Linear(FEATURES, classes),
    ]
    model = nn.Sequential(*layers)
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(epochs):
        for rows_of_batch in torch.randperm(rows).split(128):
            loss = nn.functional.cross_entropy(model(x[rows_of_batch]), y[rows_of_batch])
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
    return model.eval(), x, y, new


def fitted(classes: int, precision: float | None = None) -> tuple[ssla.Posterior, Tensor]:
    model, x, y, new = head(classes)
    prior = ssla.priors.Gaussian(precision or HEADS[classes][2])
    likelihood = ssla.likelihoods.Categorical()
    return ssla.fit(
        model,
        (x, y),
        likelihood=likelihood,
        structure="kfac",
        prior=prior,
        gaussian="laplace",
        mode="tilt",
    ), new


def milliseconds(work: Callable[[], object], rows: int, rounds: int = 5) -> float:
    """The least of some rounds, for each row."""
    work()
    found = []
    for _ in range(rounds):
        start = time.process_time()
        work()
        found.append(time.process_time() - start)
    return 1e3 * min(found) / rows


def times(classes: list[int]) -> None:
    for count in classes:
        posterior, new = fitted(count)
        x = new[: ROWS[count]]
        (_, root), *_ = posterior.iterate_means_and_roots(x)
        variance = float(root.variances().mean())
        spent = milliseconds(lambda: posterior.predict(x).probs, len(x))
        all_of_it = milliseconds(lambda: asked(posterior, x), len(x))
        shared, many_classes.ROWS_FOR_A_PROFILE = many_classes.ROWS_FOR_A_PROFILE, 1 << 40
        by_product = milliseconds(lambda: posterior.predict(x[: len(x) // 4]).probs, len(x) // 4, 2)
        many_classes.ROWS_FOR_A_PROFILE = shared
        profiles = (
            len(root.profiles())
            if isinstance(root, ScaledRoot) and root.profiles is not None
            else 0
        )
        print(
            f"{count:5,} classes, {len(x):,} rows, variance of an output {variance:.2g}, "
            f"{profiles} profiles: probs {spent:.3f} ms a row; with epistemic, entropy and mutual "
            f"information {all_of_it:.3f}; by product {by_product:.3f}",
            flush=True,
        )


def asked(posterior: ssla.Posterior, x: Tensor) -> tuple[Tensor, ...]:
    p = posterior.predict(x)
    return p.probs, p.epistemic, p.entropy, p.mutual_information


def errors(classes: list[int], truth: int) -> None:
    """KL of the predictive from the one by 2^truth nodes, with variances as at several prior
    precisions.
    """
    for count in classes:
        for factor in (1.0, 0.1, 0.01):
            posterior, new = fitted(count, HEADS[count][2] * factor)
            rows = 16 if count < 1000 else 4
            (f, root), *_ = posterior.iterate_means_and_roots(new[:400])
            found = class_integrals.integrate_classes([(f, root)], count, 1 << 30)
            exact = by_nodes(f[:rows], root.select_rows(slice(rows)), 1 << truth)
            same_nodes = by_nodes(f[:rows], root.select_rows(slice(rows)), class_integrals.POINTS)
            kl = (exact * (exact.log() - found.log_probs[:rows])).sum(1)
            off = (found.log_probs[:rows].exp() - same_nodes).abs().max()
            variance = float(root.variances().mean())
            print(
                f"{count:5,} classes, variance {variance:8.2g}: mean KL {float(kl.mean()):.1e}, "
                f"largest {float(kl.max()):.1e}; largest change of a probability by shared "
                f"products and float32 {float(off):.0e}",
                flush=True,
            )


def by_nodes(f: Tensor, root: Root, count: int) -> Tensor:
    """The mean of the softmax over that many nodes, in float64 for the sums."""
    z = normal_nodes(f.shape[1], count // 2)[0].to(root.dtype)
    matched = count < 4 * f.shape[1]
    total, squares = torch.zeros_like(f), None
    if matched:
        moved = root.multiply_outputs_last(z)
        squares = (root.variances() / (moved**2).mean(1)).sqrt()
    for some in z.split(max((1 << 22) // f.numel(), 1)):
        moved = root.multiply_outputs_last(some)
        moved = moved if squares is None else moved * squares.unsqueeze(1)
        total += torch.softmax(f.unsqueeze(1) + moved.double(), -1).sum(1)
    return total / len(z)


def memory(rows: int, classes: int, nodes: int) -> None:
    """The peak of a process that predicts, less what was resident before."""
    script = f"import predict_scale; predict_scale.one_prediction({rows}, {classes}, {nodes})"
    folder = __file__.rsplit("/", 1)[0]
    subprocess.run([sys.executable, "-c", script], check=True, cwd=folder)


def one_prediction(rows: int, classes: int, nodes: int) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(INPUTS, FEATURES), nn.ReLU(), nn.Linear(FEATURES, classes)
    ).eval()
    data = torch.randn(2000, INPUTS), torch.arange(2000) % classes
    likelihood, prior = ssla.likelihoods.Categorical(), ssla.priors.Gaussian(100.0)
    posterior = ssla.fit(
        model,
        data,
        likelihood=likelihood,
        structure="kfac",
        prior=prior,
        gaussian="laplace",
        mode="tilt",
    )
    class_integrals.POINTS = nodes
    x = torch.randn(rows, INPUTS)
    posterior.predict(x[:100])
    before, start = resident(), time.process_time()
    p = posterior.predict(x)
    probs = p.probs
    seconds, peak = (
        time.process_time() - start,
        resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
    )
    answers = rows * classes * 4 / 2**30
    print(
        f"{rows:,} rows × {classes:,} classes: {1e3 * seconds / rows:.2f} ms a row, peak "
        f"{peak - before:.2f} GiB above what was resident before; held: log probabilities, spread "
        f"{2 * answers:.2f} GiB, probs ({probs.dtype}) {answers:.2f} GiB"
    )
    information = p.mutual_information
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    print(
        f"then mutual_information (mean {float(information.mean()):.3f}): peak {peak - before:.2f} "
        "GiB"
    )


def resident() -> float:
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("VmRSS")) / 2**20


def slabs(classes: list[int]) -> None:
    for count in classes:
        posterior, new = fitted(count)
        (f, root), *_ = posterior.iterate_means_and_roots(new[: ROWS[count]])
        for nodes in (8, 16, 32, 64):
            line = []
            for power in (15, 16, 17, 18, 19):
                many_classes.NODES_AT_ONCE, many_classes.ENTRIES_AT_ONCE = nodes, 1 << power
                line.append(
                    milliseconds(
                        lambda: class_integrals.integrate_classes(
                            [(f, root)], count, 1 << 30, len(f)
                        ),
                        len(f),
                        3,
                    )
                )
            print(
                f"{count:5,} classes, {nodes:2} nodes at once, 2^15 … 2^19 entries:",
                *(f"{t:.3f}" for t in line),
                flush=True,
            )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--classes", type=int, nargs="+", default=[10, 150, 1000], choices=HEADS)
    parser.add_argument("--memory", action="store_true")
    parser.add_argument("--rows", type=int, default=100_000)
    parser.add_argument(
        "--nodes", type=int, default=512, help="fewer are quicker and take the same memory"
    )
    parser.add_argument("--errors", action="store_true")
    parser.add_argument("--truth", type=int, default=17)
    parser.add_argument("--slabs", action="store_true")
    options = parser.parse_args()
    if options.memory:
        memory(options.rows, max(options.classes), options.nodes)
    elif options.errors:
        errors(options.classes, options.truth)
    elif options.slabs:
        slabs(options.classes)
    else:
        times(options.classes)


if __name__ == "__main__":
    main()
