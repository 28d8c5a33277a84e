"""Self-training with few labels: rows chosen by `ssla.pseudo_label`, against plain self-training.

    python benchmarks/accuracy/pseudo_labels.py [--seeds 20] [--rounds 10] [--tasks moons digits]

Three ways to use a pool without labels, from the same few labels:

- supervised: not at all;
- plug-in: in each round the rows with the highest softmax probability of the network get its
  label and join the training rows;
- ssla: the same with the rows and labels of `ssla.pseudo_label`, refit="output".

Both once with the surest rows of the pool, which may all have one label, and once with equally many
rows of each label ("by label"). After each round the network is trained again, from its first
weights. Prints the mean accuracy on test rows with its standard error over seeds, the mean
difference of the two choices by seed, and the share of added labels that were right.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import warnings
from collections.abc import Callable
from typing import NamedTuple

import torch
from sklearn.datasets import load_digits, make_moons
from torch import Tensor, nn

import ssla
from ssla import likelihoods, priors


class Task(NamedTuple):
    """Rows with labels, of which some are seen, and a network for them."""

    x: Tensor
    y: Tensor
    classes: int
    labelled: Tensor  # numbers of the rows whose labels are known
    pool: Tensor
    test: Tensor
    make: Callable[[], nn.Module]
    added: int  # rows in a round


def split_rows(y: Tensor, each: int, pool: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Split rows into `each` labelled rows of every class, a pool, and test rows."""
    order = torch.randperm(len(y), generator=torch.Generator().manual_seed(seed))
    labelled = torch.cat([order[y[order] == c][:each] for c in y.unique()])
    rest = order[~torch.isin(order, labelled)]
    return labelled, rest[:pool], rest[pool:]


def make_digits(seed: int) -> Task:
    """Digits of 64 pixels: multinomial logistic regression, two labels for each class."""
    images, digits = load_digits(return_X_y=True)
    x, y = torch.as_tensor(images) / 16, torch.as_tensor(digits).long()
    rows = split_rows(y, 2, 800, seed)
    return Task(x, y, 10, *rows, lambda: nn.Linear(64, 10, dtype=torch.float64), 20)


def make_digits_network(seed: int) -> Task:
    """The same digits with a hidden layer of 30 units."""
    task = make_digits(seed)

    def make() -> nn.Module:
        return nn.Sequential(nn.Linear(64, 30), nn.Tanh(), nn.Linear(30, 10)).double()

    return task._replace(make=make)


def make_two_moons(seed: int) -> Task:
    """Two moons: a hidden layer of 30 units, four labels for each class."""
    points, labels = make_moons(1000, noise=0.15, random_state=seed)
    x, y = torch.as_tensor(points), torch.as_tensor(labels).long()
    rows = split_rows(y, 4, 400, seed)

    def make() -> nn.Module:
        return nn.Sequential(nn.Linear(2, 30), nn.Tanh(), nn.Linear(30, 2)).double()

    return Task(x, y, 2, *rows, make, 20)


TASKS = {"digits": make_digits, "digits-network": make_digits_network, "moons": make_two_moons}


def train(task: Task, x: Tensor, y: Tensor, seed: int) -> nn.Module:
    """Train a network to the mode under a standard normal prior of all weights."""
    torch.manual_seed(seed)
    model = task.make()
    weights = list(model.parameters())
    optimiser = torch.optim.LBFGS(weights, max_iter=200, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        optimiser.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y, reduction="sum")
        loss = loss + 0.5 * sum(w.square().sum() for w in weights)
        loss.backward()
        return loss

    optimiser.step(closure)
    return model.eval()


def score_by_softmax(model: nn.Module, x: Tensor, y: Tensor, pool: Tensor) -> tuple:
    """Return the network's labels of the pool, and their log probabilities."""
    with torch.no_grad():
        confidence, labels = torch.log_softmax(model(pool), 1).max(1)
    return labels, confidence


def score_by_predictive(model: nn.Module, x: Tensor, y: Tensor, pool: Tensor) -> tuple:
    """Return labels and scores of `ssla.pseudo_label`."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        posterior = ssla.fit(
            model,
            (x, y),
            likelihood=likelihoods.Categorical(),
            prior=priors.Gaussian(1.0),
            mode="tilt",
            progress=False,
        )
    best = ssla.pseudo_label(posterior, pool)
    return best.labels, best.scores


SCORES = {"plug-in": score_by_softmax, "ssla": score_by_predictive}


def choose_rows(labels: Tensor, scores: Tensor, task: Task, balanced: bool) -> Tensor:
    """Return the numbers of the surest rows: of the pool, or equally many of each label."""
    order = scores.argsort(descending=True, stable=True)
    if not balanced:
        return order[: task.added]
    share = task.added // task.classes
    return torch.cat([order[labels[order] == c][:share] for c in range(task.classes)])


def accuracy(model: nn.Module, task: Task) -> float:
    """Return the share of test rows that the network labels rightly."""
    with torch.no_grad():
        return float((model(task.x[task.test]).argmax(1) == task.y[task.test]).double().mean())


def self_train(
    task: Task, score: Callable, balanced: bool, rounds: int, seed: int
) -> tuple[float, float]:
    """Return the accuracy after self-training, and the share of added labels that were right."""
    x, y = task.x[task.labelled], task.y[task.labelled]
    pool = task.pool
    right = []
    for _ in range(rounds):
        model = train(task, x, y, seed)
        labels, scores = score(model, x, y, task.x[pool])
        rows = choose_rows(labels, scores, task, balanced)
        right.append((labels[rows] == task.y[pool[rows]]).double())
        x, y = torch.cat([x, task.x[pool[rows]]]), torch.cat([y, labels[rows]])
        left = torch.ones(len(pool), dtype=torch.bool)
        left[rows] = False
        pool = pool[left]
    return accuracy(train(task, x, y, seed), task), float(torch.cat(right).mean())


def describe(values: list[float]) -> str:
    """Return the mean with its standard error, in percent."""
    error = statistics.stdev(values) / len(values) ** 0.5 if len(values) > 1 else float("nan")
    return f"{100 * statistics.fmean(values):.2f} ± {100 * error:.2f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS))
    options = parser.parse_args()
    for name in options.tasks:
        scores: dict[str, list[float]] = {"supervised": []}
        right: dict[str, list[float]] = {}
        for seed in range(options.seeds):
            task = TASKS[name](seed)
            model = train(task, task.x[task.labelled], task.y[task.labelled], seed)
            scores["supervised"].append(accuracy(model, task))
            for choice, balanced in itertools.product(SCORES, (False, True)):
                done = self_train(task, SCORES[choice], balanced, options.rounds, seed)
                line = f"{choice}, by label" if balanced else choice
                for kept, value in zip((scores, right), done, strict=True):
                    kept.setdefault(line, []).append(value)
        print(f"{name}: {options.seeds} seeds, {options.rounds} rounds of {task.added} rows")
        for choice, values in scores.items():
            labels = f"; labels right {describe(right[choice])}" if choice in right else ""
            print(f"  {choice:<17} accuracy {describe(values)}{labels}")
        for suffix in ("", ", by label"):
            pairs = zip(scores["ssla" + suffix], scores["plug-in" + suffix], strict=True)
            print(f"  ssla − plug-in{suffix}: {describe([a - b for a, b in pairs])}", flush=True)


if __name__ == "__main__":
    main()
