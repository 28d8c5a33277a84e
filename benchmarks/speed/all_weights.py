"""Cost of all weights of residual networks: CPU seconds beside one pass of training, and peak
memory.

    OMP_NUM_THREADS=1 python benchmarks/speed/all_weights.py                  # ResNet-20, 2,000 rows
    OMP_NUM_THREADS=1 python benchmarks/speed/all_weights.py --rows 200
    OMP_NUM_THREADS=1 python benchmarks/speed/all_weights.py --network resnet18 --structure diag --rows 8
    OMP_NUM_THREADS=1 python benchmarks/speed/all_weights.py --network resnet18 --structure kfac    # refused

A pass of training is one forward and backward pass over the rows, in batches of 100. Images are
generated: costs do not depend on what they show. Each run is a process of its own, whose peak
memory is read from `resource.getrusage`; what the process had before the fit (torch, the network,
the rows) is subtracted.
"""

from __future__ import annotations

import argparse
import resource
import time

import torch
from torch import Tensor, nn

import ssla

CLASSES = 10
BATCH = 100


class Block(nn.Module):
    """Two convolutions with batch norm, and the input beside them."""

    def __init__(self, inside: int, outside: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(inside, outside, 3, stride, 1, bias=False)
        self.first_norm = nn.BatchNorm2d(outside)
        self.second = nn.Conv2d(outside, outside, 3, 1, 1, bias=False)
        self.second_norm = nn.BatchNorm2d(outside)
        self.short: nn.Module = nn.Identity()
        if stride > 1 or inside != outside:
            short = nn.Conv2d(inside, outside, 1, stride, bias=False)
            self.short = nn.Sequential(short, nn.BatchNorm2d(outside))

    def forward(self, x: Tensor) -> Tensor:
        h = torch.relu(self.first_norm(self.first(x)))
        return torch.relu(self.second_norm(self.second(h)) + self.short(x))


class ResNet(nn.Module):
    """A residual network for images of 32×32: `depth` blocks of each width."""

    def __init__(self, widths: tuple[int, ...], depth: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, widths[0], 3, 1, 1, bias=False)
        self.norm = nn.BatchNorm2d(widths[0])
        blocks, inside = [], widths[0]
        for stage, width in enumerate(widths):
            for place in range(depth):
                blocks.append(Block(inside, width, 2 if stage and not place else 1))
                inside = width
        self.body = nn.Sequential(*blocks)
        self.head = nn.Linear(inside, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        h = self.body(torch.relu(self.norm(self.first(x))))
        return self.head(h.mean((2, 3)))


NETWORKS = {
    "resnet20": lambda: ResNet((16, 32, 64), 3),  # 272,474 weights
    "resnet18": lambda: ResNet((64, 128, 256, 512), 2),  # 11,173,962 weights
}


def train_once(model: nn.Module, x: Tensor, y: Tensor) -> float:
    """CPU seconds of one forward and backward pass over the rows."""
    model.train()
    start = time.process_time()
    for rows, targets in zip(x.split(BATCH), y.split(BATCH), strict=True):
        model.zero_grad()
        nn.functional.cross_entropy(model(rows), targets).backward()
    return time.process_time() - start


def peak() -> float:
    """Peak memory of this process in GiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--network", choices=NETWORKS, default="resnet20")
    parser.add_argument("--structure", default="kfac")
    parser.add_argument("--rows", type=int, default=2000)
    parser.add_argument("--predicted", type=int, default=100, help="rows that are predicted")
    parser.add_argument(
        "--precision", type=float, help="of the prior; chosen by the fit if not given"
    )
    options = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = NETWORKS[options.network]()
    x, y = torch.randn(options.rows, 3, 32, 32), torch.randint(CLASSES, (options.rows,))
    few = slice(
        0, min(options.rows, 500)
    )  # the cost of a row does not depend on the number of rows
    train_once(model, x[few], y[few])
    a_pass = min(train_once(model, x[few], y[few]) for _ in range(2)) / len(x[few]) * options.rows
    model.zero_grad()
    model.eval()
    before = peak()
    prior = None if options.precision is None else ssla.priors.Gaussian(options.precision)
    print(
        f"{options.network}, {sum(p.numel() for p in model.parameters()):,} weights, "
        f"{options.rows:,} rows"
    )
    print(f"one pass of training     {a_pass:8.1f} s, peak memory before the fit {before:.2f} GiB")
    start = time.process_time()
    try:
        likelihood = ssla.likelihoods.Categorical()
        post = ssla.fit(
            model,
            (x, y),
            likelihood=likelihood,
            weights="all",
            structure=options.structure,
            prior=prior,
        )
    except ValueError as error:
        print(
            f"refused after            {time.process_time() - start:8.1f} s, peak memory "
            f"{peak():.2f} GiB: {error}"
        )
        return
    seconds = time.process_time() - start
    print(
        f"fit                      {seconds:8.1f} s = {seconds / a_pass:.1f} passes of training, "
        f"peak {peak():.2f} GiB"
    )
    start = time.process_time()
    post.predict(x[: options.predicted]).probs  # noqa: B018
    seconds = time.process_time() - start
    ratio = seconds / (a_pass * options.predicted / options.rows)
    print(
        f"predict {options.predicted:5} rows       {seconds:8.1f} s = {ratio:.1f} passes over "
        f"these rows, peak {peak():.2f} GiB"
    )
    print(post.report)


if __name__ == "__main__":
    main()
