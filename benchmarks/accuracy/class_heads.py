"""The default mode of a classifier beside polish and tilt, for last layers that are trained, hardly
trained, and not trained.

    SSLA_TABLES=… python benchmarks/accuracy/class_heads.py [--sets wine heart_c …] [--seeds 1] [--noisy 3]
    [--json FILE]

Each seed trains one network as class_sets.py does, and then replaces or weakens its last layer (see
`heads`), or trains the same network anew for a few epochs. --noisy: networks with early stopping on
few rows, and on rows with wrong labels, over this number of seeds. Prints mean log-losses on the
test rows, how often the default kept the last layer, and what it lost against the better of the two
modes.
"""

from __future__ import annotations

import argparse
import copy
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import small_networks as networks
import torch
from class_sets import SETS, log_loss, trained
from small_networks import Split
from torch import Tensor, nn

import ssla
from ssla.likelihoods import Categorical

CHOSEN = (
    "breast cancer",
    "moons",
    "wine",
    "digits 0-4",
    "credit_g",
    "sick",
    "cmc",
    "page_blocks",
    "vowel",
    "breast_w",
    "heart_c",
)
FEW = {"credit_g": (100, 200), "cmc": (100, 200), "heart_c": (100, 200)}  # rows
WRONG = {"breast cancer": (0.2, 0.4), "wine": (0.2, 0.4), "moons": (0.2, 0.4)}  # shares of labels
MODES = {"polish": "polish", "tilt": "tilt", "default": None}


def split_of(name: str, seed: int) -> Split:
    if name in SETS:
        return SETS[name](seed)
    return networks.class_table(
        Path(os.environ.get("SSLA_TABLES", "data/tables")), name, seed, 2000
    )


# --- last layers --------------------------------------------------------------------------------


def with_head(model: nn.Sequential, weight: Tensor, bias: Tensor) -> nn.Sequential:
    found = copy.deepcopy(model)
    found[-1].weight.data, found[-1].bias.data = weight.clone(), bias.clone()
    return found


def after_epochs(
    model: nn.Sequential, split: Split, epochs: int, seed: int, head: bool = False
) -> nn.Sequential:
    """All weights, or the last layer only, trained for that many epochs."""
    found, generator = copy.deepcopy(model), torch.Generator().manual_seed(seed)
    optimiser = torch.optim.Adam((found[-1] if head else found).parameters(), lr=3e-3)
    for _ in range(epochs):
        for rows in torch.randperm(len(split.x), generator=generator).split(64):
            optimiser.zero_grad()
            nn.functional.cross_entropy(found(split.x[rows]), split.y[rows]).backward()
            optimiser.step()
    return found


def heads(model: nn.Sequential, split: Split, seed: int) -> Iterator[tuple[str, nn.Sequential]]:
    last = model[-1]
    yield "trained", model
    torch.manual_seed(100 + seed)
    layers = [nn.Linear(last.in_features, last.out_features).double() for _ in range(10)]
    random = [with_head(model, layer.weight.data, layer.bias.data) for layer in layers]
    yield "random", random[0]
    yield (
        "best of ten random",
        min(random, key=lambda one: float(nn.functional.cross_entropy(one(split.x), split.y))),
    )
    yield "zero", with_head(model, 0 * last.weight.data, 0 * last.bias.data)
    yield "trained × 0.3", with_head(model, 0.3 * last.weight.data, 0.3 * last.bias.data)
    for epochs in (1, 5):
        yield f"random, {epochs} epochs", after_epochs(random[0], split, epochs, seed, head=True)
    torch.manual_seed(seed)
    raw = networks.perceptron(split.x.shape[1], (50, 50), split.outputs, "relu")
    for epochs in (0, 1, 3, 10):
        yield f"network, {epochs} epochs", after_epochs(raw, split, epochs, seed)


def noisy(seed: int) -> Iterator[tuple[str, Split]]:
    """Few rows of noisy tables, and wrong labels in the rows of training and early stopping."""
    for name, sizes in FEW.items():
        whole = split_of(name, seed)
        for rows in sizes:
            most, held = slice(0, rows * 8 // 10), slice(0, rows // 5)
            yield (
                name,
                whole._replace(
                    x=whole.x[most],
                    y=whole.y[most],
                    x_held=whole.x_held[held],
                    y_held=whole.y_held[held],
                ),
            )
    for name, shares in WRONG.items():
        whole = split_of(name, seed)
        for share in shares:
            generator = torch.Generator().manual_seed(seed)
            y, y_held = (
                mislabelled(part, share, whole.outputs, generator)
                for part in (whole.y, whole.y_held)
            )
            yield name, whole._replace(y=y, y_held=y_held)


def mislabelled(y: Tensor, share: float, outputs: int, generator: torch.Generator) -> Tensor:
    wrong = torch.rand(y.shape, generator=generator) < share
    return torch.where(wrong, torch.randint(outputs, y.shape, generator=generator), y)


# --- runs ---------------------------------------------------------------------------------------


def scored(name: str, head: str, model: nn.Module, split: Split, seed: int) -> dict[str, Any]:
    with torch.no_grad():
        found: dict[str, Any] = {"set": name, "seed": seed, "head": head}
        found["itself"] = log_loss(model(split.x_test).softmax(1), split.y_test)
    for label, mode in MODES.items():
        post = ssla.fit(model, (split.x, split.y), likelihood=Categorical(), mode=mode)
        found[label] = log_loss(post.predict(split.x_test).probs, split.y_test)
        found["kept"] = post.report.mode == "tilt"
    return found


def show(records: list[dict[str, Any]]) -> None:
    print(
        f"| {'last layer':<20} | kept     | itself | polish | tilt  | default | lost: mean | most  "
        "|"
    )
    print(f"|{'-' * 22}|----------|--------|--------|-------|---------|------------|-------|")
    for head in dict.fromkeys(r["head"] for r in records):
        own = [r for r in records if r["head"] == head]
        means = [
            sum(r[key] for r in own) / len(own) for key in ("itself", "polish", "tilt", "default")
        ]
        lost = [r["default"] - min(r["polish"], r["tilt"]) for r in own]
        cells = " | ".join(f"{mean:.3f}" for mean in (*means, sum(lost) / len(own), max(lost)))
        print(f"| {head:<20} | {sum(r['kept'] for r in own)} of {len(own)} | {cells} |")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument(
        "--sets",
        nargs="*",
        default=list(CHOSEN),
        help="sets of class_sets.py but cnn, and class tables",
    )
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--noisy", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=300)
    parser.add_argument("--json", type=Path, default=None)
    options = parser.parse_args()
    torch.set_num_threads(1)
    records: list[dict[str, Any]] = []
    with networks.quiet():
        for name in options.sets:
            for seed in range(options.seeds):
                split = split_of(name, seed)
                model = trained(name, split, seed, options.epochs)
                records += [
                    scored(name, head, one, split, seed) for head, one in heads(model, split, seed)
                ]
                networks.write_json(options.json, vars(options), records)
        for seed in range(options.noisy):
            for name, split in noisy(seed):
                records.append(
                    scored(
                        name,
                        "trained, noisy rows",
                        trained(name, split, seed, options.epochs),
                        split,
                        seed,
                    )
                )
                networks.write_json(options.json, vars(options), records)
    show(records)


if __name__ == "__main__":
    main()
