"""Class probabilities of ssla beside those of the network itself, on six sets and, if asked for, on
the class tables.

    python benchmarks/accuracy/class_sets.py [--sets digits wine …] [--gaussian laplace variational] [--prior
    default held_out …]
                                    [--seeds 3] [--estimators 5] [--json FILE] [--quick]
    SSLA_TABLES=…/tables python benchmarks/accuracy/class_sets.py --sets --estimators 0 --tables [heart_c …]

Each seed splits the rows into training, early-stopping and test rows and trains one network. ssla
takes its last layer. Prints log-loss, ECE (15 bins, of the most probable class), accuracy and the
AUROC of the entropy for out-of-distribution (OOD) inputs.

    plug-in        the softmax of the network as it was trained
    laplace-torch  last layer, prior precision by its marginal likelihood, probit link (if the
    package is installed)

OOD: test images with permuted pixels (digits, cnn); digits 5 to 9 (digits 0-4); points in random
directions, three times as far from the centre as the training rows are (wine, breast cancer, moons;
standardised inputs).

    --prior default       ssla.fit without prior= and mode=
            tuned         the default after tune("nll", data=the early-stopping rows), which the features never saw
            polish        without prior=, with mode="polish"; so are all that follow
            1.0, …        a number: this precision
            bound         posterior.tune()
            loo           posterior.tune("loo"): leave-one-out of the training rows, which the features saw
            held_out      posterior.tune("nll", data=the early-stopping rows). Where tune keeps the mode (Laplace), a large
                          precision means "no uncertainty", and is no prior for another fit.
            held_out_all  the precision of 1e-3, 1e-2 … 1e2 with the lowest log-loss on the
            early-stopping rows (each with its
                          own fit), then fitted on training and early-stopping rows together
            grid          the same with the lowest log-loss on the test rows: the best in hindsight, not a method

All but held_out_all are fitted on the training rows. Seconds are of the processor, on one thread.
--estimators: SSLAClassifier, MLPClassifier and LogisticRegression with default settings on
standardised inputs, over this number of splits. --tables: a network 2 × 50 for each table and
split, of at most --rows rows (60% train, 15% early stopping, 25% test).
"""

from __future__ import annotations

import argparse
import copy
import inspect
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import small_networks as networks
import torch
from sklearn import datasets
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import roc_auc_score
from sklearn.model_selection import train_test_split
from sklearn.neural_network import MLPClassifier
from sklearn.preprocessing import StandardScaler
from small_networks import LAPLACE, VARIATIONAL, Split
from torch import Tensor, nn

import ssla
from ssla.likelihoods import Categorical
from ssla.sklearn import SSLAClassifier

try:
    import laplace as laplace_torch
except ImportError:
    laplace_torch = None

PRIORS = ("default", "tuned", "polish", "1.0", "bound", "loo", "held_out", "held_out_all", "grid")
GRID = tuple(10.0**k for k in range(-3, 3))
SCORES = ("log-loss", "ECE", "accuracy", "AUROC")
CONVOLUTIONAL = "cnn"
QUICK_ROWS = 150
SETS: dict[str, Callable[[int], Split]] = {
    "digits": networks.digits,
    "digits 0-4": networks.few_digits,
    "wine": networks.wine,
    "breast cancer": networks.breast_cancer,
    "moons": networks.moons,
    CONVOLUTIONAL: networks.digits,
}
ESTIMATOR_SETS = {
    "breast cancer": datasets.load_breast_cancer,
    "digits": datasets.load_digits,
    "wine": datasets.load_wine,
}


# --- scores -------------------------------------------------------------------------------------


class Probabilities(NamedTuple):
    """What `ssla.metrics` needs of a predictive of classes."""

    probs: Tensor
    kind: str = "class"


def log_loss(probs: Tensor, y: Tensor) -> float:
    return -float(probs.gather(1, y[:, None]).clamp_min(1e-300).log().mean())


def scores(home: Tensor, y: Tensor, ood: Tensor) -> dict[str, float]:
    """Of P(class) at the test rows (N, C) and at OOD inputs."""
    found = {
        "log-loss": log_loss(home, y),
        "ECE": float(ssla.metrics.ece(Probabilities(home), y, bins=15)),
        "accuracy": float((home.argmax(1) == y).double().mean()),
    }
    if len(ood):
        entropy = torch.special.entr(torch.cat([home, ood])).sum(1)
        foreign = np.r_[np.zeros(len(home)), np.ones(len(ood))]
        found["AUROC"] = float(roc_auc_score(foreign, entropy.numpy()))
    return found


# --- methods ------------------------------------------------------------------------------------


def posterior(model: nn.Module, split: Split, gaussian: str, prior: str) -> ssla.Posterior:
    law, x, y, held = Categorical(), split.x, split.y, (split.x_held, split.y_held)
    if prior in ("default", "tuned"):
        post = networks.fit(model, x, y, law, gaussian)
        return post if prior == "default" else post.tune("nll", data=held)
    if prior in ("polish", "bound", "loo", "held_out"):
        post = networks.fit(model, x, y, law, gaussian, mode="polish")
        if prior == "bound":
            return post.tune()
        if prior == "loo":
            with networks.quiet():
                return post.tune("loo")
        return post if prior == "polish" else post.tune("nll", data=held)
    if prior == "held_out_all":
        chosen = best_of_grid(model, split, gaussian, split.x_held, split.y_held)
        both = torch.cat([x, split.x_held]), torch.cat([y, split.y_held])
        return networks.fit(model, *both, law, gaussian, chosen.prior)
    if prior == "grid":
        return best_of_grid(model, split, gaussian, split.x_test, split.y_test)
    return networks.fit(model, x, y, law, gaussian, ssla.priors.Gaussian(float(prior)))


def best_of_grid(
    model: nn.Module, split: Split, gaussian: str, x: Tensor, y: Tensor
) -> ssla.Posterior:
    """A fit of the training rows for each precision; the one with the lowest log-loss on the
    rows x, y.
    """
    posts = [posterior(model, split, gaussian, str(precision)) for precision in GRID]
    return min(posts, key=lambda post: log_loss(post.predict(x).probs, y))


def precision_of(post: ssla.Posterior) -> float:
    """The mean precision of the prior."""
    return float(post.bound_prior.precision(post.theta).mean())


def of_ssla(model: nn.Module, split: Split, gaussian: str, prior: str) -> dict[str, float]:
    start = time.process_time()
    post = posterior(model, split, gaussian, prior)
    home = post.predict(split.x_test).probs
    seconds = time.process_time() - start
    ood = post.predict(split.x_ood).probs if len(split.x_ood) else home[:0]
    return scores(home, split.y_test, ood) | {"seconds": seconds, "precision": precision_of(post)}


def of_laplace_torch(model: nn.Module, split: Split, structure: str) -> dict[str, float]:
    loader = torch.utils.data.DataLoader(
        torch.utils.data.TensorDataset(split.x, split.y), batch_size=256
    )
    start = time.process_time()
    other = laplace_torch.Laplace(
        copy.deepcopy(model),
        "classification",
        subset_of_weights="last_layer",
        hessian_structure=structure,
    )
    other.fit(loader)
    other.optimize_prior_precision(method="marglik")
    home, ood = (other(x, link_approx="probit").detach() for x in (split.x_test, split.x_ood))
    precision = float(other.prior_precision.mean())
    return scores(home, split.y_test, ood) | {
        "seconds": time.process_time() - start,
        "precision": precision,
    }


def methods(
    model: nn.Module, split: Split, options: argparse.Namespace
) -> Iterator[tuple[str, dict[str, float]]]:
    """The scores of every method, by its name."""
    with torch.no_grad():
        plain = [model(x).softmax(1) for x in (split.x_test, split.x_ood)]
    yield "plug-in", scores(plain[0], split.y_test, plain[1])
    for gaussian in options.gaussian:
        for prior in options.prior:
            yield f"{gaussian}, {prior}", of_ssla(model, split, gaussian, prior)
    if laplace_torch is not None and len(split.x_ood):
        for structure in ("full", "kron"):
            yield f"laplace-torch, {structure}", of_laplace_torch(model, split, structure)


# --- runs ---------------------------------------------------------------------------------------


def trained(name: str, split: Split, seed: int, epochs: int) -> nn.Module:
    torch.manual_seed(seed)
    if name == CONVOLUTIONAL:
        model = networks.convolutional(split.outputs)
    else:
        model = networks.perceptron(split.x.shape[1], (50, 50), split.outputs, "relu")
    return networks.train(model, Categorical(), split, seed, epochs=epochs)


def run(
    part: str, name: str, split: Split, seed: int, options: argparse.Namespace
) -> list[dict[str, Any]]:
    model = trained(name, split, seed, options.epochs)
    if options.quick:
        rows = slice(0, QUICK_ROWS)
        split = split._replace(
            x_test=split.x_test[rows], y_test=split.y_test[rows], x_ood=split.x_ood[rows]
        )
    return [
        {"part": part, "set": name, "seed": seed, "method": method} | found
        for method, found in methods(model, split, options)
    ]


def estimators(name: str, seed: int, gaussians: list[str]) -> list[dict[str, Any]]:
    """SSLAClassifier beside scikit-learn's, on one split (75% of the rows train)."""
    x, y = ESTIMATOR_SETS[name](return_X_y=True)
    x, x_test, y, y_test = train_test_split(x, y, test_size=0.25, random_state=seed, stratify=y)
    scaler = StandardScaler().fit(x)
    x, x_test = scaler.transform(x), scaler.transform(x_test)
    models: dict[str, Any] = {"SSLAClassifier": SSLAClassifier(random_state=seed)}
    if "gaussian" in inspect.signature(SSLAClassifier).parameters:
        models |= {
            f"SSLAClassifier, {g}": SSLAClassifier(gaussian=g, random_state=seed) for g in gaussians
        }
    models |= {
        "MLPClassifier": MLPClassifier(random_state=seed),
        "LogisticRegression": LogisticRegression(max_iter=1000),
    }
    records = []
    for method, model in models.items():
        start = time.process_time()
        probs = torch.from_numpy(model.fit(x, y).predict_proba(x_test)).double()
        found = scores(probs, torch.from_numpy(y_test).long(), probs[:0]) | {
            "seconds": time.process_time() - start
        }
        records.append({"part": "estimators", "set": name, "seed": seed, "method": method} | found)
    return records


# --- output -------------------------------------------------------------------------------------


def show(title: str, records: list[dict[str, Any]]) -> None:
    """Mean ± standard deviation over seeds; over several sets the mean of their means."""
    sets = list(dict.fromkeys(r["set"] for r in records))
    print(f"\n{title}")
    print(
        f"| {'method':<26} | {'log-loss':<15} | {'ECE':<15} | {'accuracy':<15} | "
        f"{'AUROC for OOD':<15} | precision | seconds |"
    )
    print(f"|{'-' * 28}|{'|'.join(['-' * 17] * 4)}|-----------|---------|")
    for method in dict.fromkeys(r["method"] for r in records):
        own = [r for r in records if r["method"] == method]
        cells = []
        for score in SCORES:
            values = [r[score] for r in own if score in r]
            if not values:
                cells.append("")
            elif len(sets) == 1:
                cells.append(networks.spread(values, 3, "f"))
            else:
                cells.append(
                    f"{np.mean([np.mean([r[score] for r in own if r['set'] == one]) for one in sets]):.3f}"
                )
        more = [format(np.mean([r[key] for r in own]), form) if key in own[0] else ""
                for key, form in (("precision", ".2g"), ("seconds", ".2f"))]  # fmt: skip
        print(
            f"| {method:<26} | {' | '.join(f'{cell:<15}' for cell in cells)} | {more[0]:>9} | "
            f"{more[1]:>7} |",
            flush=True,
        )


def show_wide(records: list[dict[str, Any]]) -> None:
    """One row for each table, one column for each method."""
    names = list(dict.fromkeys(r["set"] for r in records))
    labels = list(dict.fromkeys(r["method"] for r in records))
    for score in ("log-loss", "ECE"):
        print(f"\n| {score:<14} | {' | '.join(f'{label:>12}' for label in labels)} |")
        print(f"|{'-' * 16}|{'|'.join('-' * (max(len(label), 12) + 2) for label in labels)}|")
        means = [
            [
                np.mean([r[score] for r in records if r["set"] == n and r["method"] == m])
                for m in labels
            ]
            for n in names
        ]
        for name, row in zip([*names, "mean"], [*means, np.mean(means, 0)], strict=True):
            cells = [
                f"{value:>{max(len(label), 12)}.3f}"
                for value, label in zip(row, labels, strict=True)
            ]
            print(f"| {name:<14} | {' | '.join(cells)} |")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument(
        "--sets",
        nargs="*",
        default=list(SETS),
        choices=list(SETS),
        metavar="SET",
        help=", ".join(SETS),
    )
    parser.add_argument(
        "--gaussian", nargs="+", default=[LAPLACE, VARIATIONAL], choices=[LAPLACE, VARIATIONAL]
    )
    parser.add_argument(
        "--prior",
        nargs="+",
        default=None,
        help=f"of {', '.join(PRIORS)}, or numbers; default: all of these",
    )
    parser.add_argument("--seeds", type=int, default=3, help="splits of each set and table")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument(
        "--estimators", type=int, default=5, help="splits for the scikit-learn estimators; 0: none"
    )
    parser.add_argument(
        "--tables",
        nargs="*",
        default=None,
        metavar="TABLE",
        help="class tables of SSLA_TABLES; no name: all",
    )
    parser.add_argument("--rows", type=int, default=2000, help="of a table at most")
    parser.add_argument("--epochs", type=int, default=300)
    parser.add_argument("--json", type=Path, default=None)
    parser.add_argument(
        "--quick",
        action="store_true",
        help="one seed, 40 epochs, three priors, 150 test rows: only shows that everything runs",
    )
    options = parser.parse_args()
    options.prior = options.prior or list(PRIORS)
    for prior in options.prior:
        if prior not in PRIORS and not _positive(prior):
            parser.error(
                f"--prior must be of {', '.join(PRIORS)}, or a positive number, but is {prior!r}."
            )
    torch.set_num_threads(1)
    if options.quick:
        options.seeds, options.epochs, options.estimators = 1, 40, min(options.estimators, 1)
        options.prior = [
            prior for prior in options.prior if prior in ("default", "bound", "held_out_all")
        ]
    options.gaussian = networks.available(options.gaussian)
    if laplace_torch is None:
        print("Skipped: laplace-torch is not installed.")
    seeds, records = range(options.first, options.first + options.seeds), []

    def keep(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
        records.extend(found)
        networks.write_json(options.json, vars(options), records)
        return found

    with networks.quiet():
        for name in options.sets:
            show(
                name,
                keep(
                    [
                        r
                        for seed in seeds
                        for r in run("sets", name, SETS[name](seed), seed, options)
                    ]
                ),
            )
        if len(options.sets) > 1:
            show("mean over sets", [r for r in records if r["part"] == "sets"])
        for name in ESTIMATOR_SETS if options.estimators else ():
            splits = range(options.estimators)
            show(
                f"estimators, {name}",
                keep([r for seed in splits for r in estimators(name, seed, options.gaussian)]),
            )
        if options.tables is not None:
            folder = Path(os.environ.get("SSLA_TABLES", "data/tables"))
            for name in options.tables or networks.class_tables(folder):
                for seed in seeds:
                    keep(
                        run(
                            "tables",
                            name,
                            networks.class_table(folder, name, seed, options.rows),
                            seed,
                            options,
                        )
                    )
                print(f"{name} done", flush=True)
            found = [r for r in records if r["part"] == "tables"]
            show_wide(found)
            show("mean over tables", found)


def _positive(text: str) -> bool:
    try:
        return float(text) > 0
    except ValueError:
        return False


if __name__ == "__main__":
    main()
