"""Trains the networks of the suite once and keeps weights, features and outputs in a folder.

    python -m benchmarks.networks.training [--only clinc …] [--members 0 1 2 3 4] [--cache DIR]

Training takes a minute or less for each network, and five minutes for each of fashion. A file that
exists is not made again. Member s is the network of seed s; the ensemble has members 0 to 4.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import torch
from torch import Tensor, nn

from .tasks import CLASSES, TASKS, Rows, Task

CACHE = Path("/tmp/ssla_networks")
MEMBERS = 5
CHUNK = 1_000


@torch.enable_grad()
def train(task: Task, rows: Rows, seed: int) -> nn.Sequential:
    """AdamW with a one-cycle rate, for a fixed number of epochs, on the training rows alone."""
    torch.manual_seed(seed)
    network = task.network().train()
    x, y = rows.train
    steps = task.epochs * (len(x) // task.batch)
    optimiser = torch.optim.AdamW(
        network.parameters(), lr=1e-3, weight_decay=task.decay, fused=True
    )
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, max_lr=task.rate, total_steps=steps)
    loss_of = nn.CrossEntropyLoss() if task.kind == CLASSES else nn.MSELoss()
    for _ in range(task.epochs):
        # The last rows of an epoch that do not fill a batch are left out.
        for places in torch.randperm(len(x)).split(task.batch):
            if len(places) < task.batch:
                continue
            outputs = network(x[places])
            loss = loss_of(outputs if task.kind == CLASSES else outputs[:, 0], y[places])
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
            schedule.step()
    return network.eval()


def trained(task: Task, rows: Rows, seed: int, cache: Path) -> nn.Sequential:
    """The network of a seed in eval mode, read from the folder or trained and kept there."""
    path = cache / f"{task.name}-{seed}.pt"
    network = task.network()
    if not path.exists():
        start = time.process_time()
        state = train(task, rows, seed).state_dict()
        print(
            f"{task.name}, network {seed}: trained in {time.process_time() - start:.0f} CPU s",
            flush=True,
        )
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.save(state, path)
    network.load_state_dict(torch.load(path, weights_only=True))
    return network.eval()


@torch.no_grad()
def in_chunks(module: nn.Module, x: Tensor) -> Tensor:
    return torch.cat([module(part) for part in x.split(CHUNK)])


def features(task: Task, rows: Rows, seed: int, cache: Path) -> tuple[Rows, nn.Linear]:
    """The rows with the features of the network as inputs, and the trained last layer.

    Every last-layer method starts from these, so the forward pass of the body is in no method's
    time.
    """
    network = trained(task, rows, seed, cache)
    body, head = network[0], network[1]
    path = cache / f"{task.name}-{seed}-features.pt"
    if path.exists():
        kept = torch.load(path, weights_only=True)
    else:
        inputs = {
            "train": rows.train[0],
            "validation": rows.validation[0],
            "test": rows.test[0],
            "ood": rows.ood,
        }
        inputs |= {name: pair[0] for name, pair in rows.shifts.items()}
        kept = {name: in_chunks(body, x) for name, x in inputs.items()}
        torch.save(kept, path)
    found = Rows(
        (kept["train"], rows.train[1]),
        (kept["validation"], rows.validation[1]),
        (kept["test"], rows.test[1]),
        kept["ood"],
        {name: (kept[name], pair[1]) for name, pair in rows.shifts.items()},
    )
    assert isinstance(head, nn.Linear)
    return found, head


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--only", nargs="+", default=list(TASKS), choices=list(TASKS))
    parser.add_argument("--members", nargs="+", type=int, default=list(range(MEMBERS)))
    parser.add_argument("--cache", type=Path, default=CACHE)
    options = parser.parse_args()
    torch.set_num_threads(1)
    for name in options.only:
        task = TASKS[name]
        rows = task.rows()
        for member in options.members:
            head_rows, head = features(task, rows, member, options.cache)
            outputs = in_chunks(head, head_rows.test[0])
            y = rows.test[1]
            if task.kind == CLASSES:
                loss = nn.functional.cross_entropy(outputs, y)
                accuracy = (outputs.argmax(1) == y).float().mean()
                print(f"{name} {member}: log-loss {loss:.4f}, accuracy {accuracy:.4f}", flush=True)
            else:
                error = (outputs[:, 0] - y).square().mean().sqrt()
                train_error = (
                    (in_chunks(head, head_rows.train[0])[:, 0] - rows.train[1])
                    .square()
                    .mean()
                    .sqrt()
                )
                print(
                    f"{name} {member}: RMSE {error:.4f}, on training rows {train_error:.4f}",
                    flush=True,
                )


if __name__ == "__main__":
    main()
