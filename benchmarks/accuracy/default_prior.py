"""Which prior serves a user who gives none: last layers on the UCI tables and on sets of classes,
in raw and standardised units.

    SSLA_DATA=… SSLA_TABLES=… python benchmarks/accuracy/default_prior.py [--seeds 3] [--doubt 1.0] [--quick]
    [--json FILE]

One network of 2 × 50 units for each table and seed, trained with early stopping on standardised
targets. In raw units its last layer is rescaled, so that the point predictions are the same.
Candidates, all Gaussian, by the rows of the fit alone:

    one               precision 1, mean 0: what `prior=None` was before
    own               the precision of the trained weights, 1 / mean(w²)
    bound             the precision of the highest evidence or bound, mean 0
    bound, bias       the same, but the bias has its trained value as mean
    bound, centred    the same, but every weight has its trained value as mean
    default           what `ssla.fit` takes when no prior is given

All are polished (mode="polish"), also classes, whose trained last layers `ssla.fit` keeps by
default: see class_sets.py. Prints the mean test NLL by set and unit (raw NLLs less log of the
scale, so that units can be compared), and the mean over sets.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from small_networks import (
    Split,
    breast_cancer,
    class_table,
    class_tables,
    digits,
    few_digits,
    moons,
    perceptron,
    quiet,
    train,
    wine,
    write_json,
)
from torch import Tensor, nn

import ssla
from ssla.fitting import prior_choice
from ssla.fitting.tuning import tune
from ssla.likelihoods import Categorical, Gaussian, HeteroscedasticGaussian, Likelihood

TARGETS = {
    "concrete": "Concrete compressive strength",
    "wine_quality": "alcohol",
    "bike_sharing_hour": "temp",
    "airfoil_self_noise": "scaled-sound-pressure",
    "auto_mpg": "mpg",
    "liver_disorders": "alkphos",
    "daily_demand_orders": "Target (Total orders)",
    "real_estate_valuation": "Y house price of unit area",
}
DROPPED = ("instant", "dteday", "car_name", "No", "atemp", "selector")
CLASS_SETS = {
    "digits": digits,
    "digits 0–4": few_digits,
    "wine": wine,
    "breast cancer": breast_cancer,
    "moons": moons,
}
CANDIDATES = ("one", "own", "bound", "bound, bias", "bound, centred", "default")


def regression(folder: Path, name: str, seed: int, most_rows: int) -> tuple[Split, float, float]:
    """Standardised rows, and the mean and scale of the target."""
    frame = (
        pd.read_csv(folder / f"{name}.csv").drop(columns=list(DROPPED), errors="ignore").dropna()
    )
    frame = frame.sample(frac=1, random_state=seed)[:most_rows]
    y = frame.pop(TARGETS[name]).to_numpy(float)
    x = pd.get_dummies(frame).to_numpy(float)
    first, second = int(0.6 * len(y)), int(0.75 * len(y))
    mean, scale = x[:first].mean(0), x[:first].std(0)
    x = (x - mean) / np.where(scale > 1e-9, scale, 1.0)
    middle, spread = float(y[:first].mean()), float(y[:first].std())
    columns, target = torch.from_numpy(x), torch.from_numpy((y - middle) / spread)
    parts = [
        p
        for a, b in ((0, first), (first, second), (second, len(y)))
        for p in (columns[a:b], target[a:b])
    ]
    return Split(*parts, x_ood=columns[:0], outputs=1), middle, spread


def rescaled(
    model: nn.Sequential, likelihood: Likelihood, middle: float, spread: float
) -> nn.Sequential:
    """The same network with outputs in the target's own unit."""
    outputs = model[-1].out_features
    copy = perceptron(model[0].in_features, [50, 50], outputs)
    copy.load_state_dict(model.state_dict())
    with torch.no_grad():
        copy[-1].weight[0] *= spread
        copy[-1].bias[0] = copy[-1].bias[0] * spread + middle
        if isinstance(likelihood, HeteroscedasticGaussian):
            copy[-1].bias[1] += 2 * np.log(spread)
    return copy.eval()


def fitted(
    kind: str,
    model: nn.Sequential,
    data: tuple[Tensor, Tensor],
    likelihood: Likelihood,
    gaussian: str,
) -> ssla.Posterior:
    layer = model[-1]
    weight, bias = (f"{len(model) - 1}.{part}" for part in ("weight", "bias"))
    outputs = not isinstance(likelihood, Categorical)  # of different kinds: one precision each
    squares = (
        (layer.weight.detach() ** 2).mean(1)
        if outputs
        else (layer.weight.detach() ** 2).mean().expand(layer.out_features)
    )
    own = {
        weight: (1 / squares)[:, None].expand_as(layer.weight).clone(),
        bias: (1 / squares).clone(),
    }
    options: dict[str, Any] = {"likelihood": likelihood, "gaussian": gaussian, "mode": "polish"}
    if kind == "default":
        return ssla.fit(model, data, **options)
    if kind == "one":
        return ssla.fit(model, data, prior=ssla.priors.Gaussian(1.0), **options)
    means: dict[str, dict[str, Any]] = {
        "bound, bias": {weight: 0.0, bias: layer.bias.detach().clone()},
        "bound, centred": {
            weight: layer.weight.detach().clone(),
            bias: layer.bias.detach().clone(),
        },
    }
    prior = ssla.priors.Gaussian(own, means.get(kind, 0.0))
    post = ssla.fit(model, data, prior=prior, **options)
    if kind == "own":
        return post
    return tune(post, "evidence", None, ("prior", "noise"), True, None, per_output=outputs)


def records(
    name: str,
    unit: str,
    seed: int,
    model: nn.Sequential,
    split: Split,
    likelihood: Likelihood,
    spread: float,
) -> list[Any]:
    classes = isinstance(likelihood, Categorical)
    truth = {"set": name, "unit": unit, "seed": seed, "likelihood": type(likelihood).__name__}
    found = []
    shift = 0.0 if classes else float(np.log(spread))
    with torch.no_grad():
        f = model(split.x_test)
    if not isinstance(likelihood, Gaussian):
        found.append(
            {
                **truth,
                "prior": "plug-in",
                "nll": -float(likelihood.log_prob(split.y_test, f).mean()) - shift,
            }
        )
    gaussian = "laplace" if isinstance(likelihood, Gaussian) else "variational"
    for kind in CANDIDATES:
        with quiet():
            post = fitted(kind, model, (split.x, split.y), likelihood, gaussian)
            nll = -float(post.predict(split.x_test).log_prob(split.y_test).double().mean()) - shift
        found.append(
            {
                **truth,
                "prior": kind,
                "nll": nll,
                "precision": float(post.bound_prior.scale_precision.median()),
            }
        )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--rows", type=int, default=2000, help="the most rows of a table")
    parser.add_argument("--quick", action="store_true", help="one seed, four sets, 600 rows")
    parser.add_argument(
        "--doubt",
        type=float,
        default=None,
        help="sd of a log precision around the trained scale, of the default",
    )
    parser.add_argument("--json", type=Path, default=None)
    options = parser.parse_args()
    prior_choice.DOUBT = options.doubt or prior_choice.DOUBT
    torch.set_num_threads(1)
    seeds, rows = (1, 600) if options.quick else (options.seeds, options.rows)
    uci, tables = (Path(os.environ[name]) for name in ("SSLA_DATA", "SSLA_TABLES"))
    all_records: list[dict[str, Any]] = []
    for seed in range(seeds):
        for name in list(TARGETS)[: 2 if options.quick else None]:
            split, middle, spread = regression(uci, name, seed, rows)
            for likelihood in (Gaussian(noise=1.0), HeteroscedasticGaussian()):
                torch.manual_seed(seed)
                model = perceptron(
                    split.x.shape[1], [50, 50], 1 + isinstance(likelihood, HeteroscedasticGaussian)
                )
                train(model, likelihood, split, seed)
                law = Gaussian(noise="estimate") if isinstance(likelihood, Gaussian) else likelihood
                all_records += records(name, "standardised", seed, model, split, law, 1.0)
                raw = split._replace(
                    y=split.y * spread + middle, y_test=split.y_test * spread + middle
                )
                all_records += records(
                    name, "raw", seed, rescaled(model, likelihood, middle, spread), raw, law, spread
                )
        sets = {name: make(seed) for name, make in CLASS_SETS.items()}
        sets |= {name: class_table(tables, name, seed, rows) for name in class_tables(tables)}
        for name, split in list(sets.items())[: 2 if options.quick else None]:
            torch.manual_seed(seed)
            model = perceptron(split.x.shape[1], [50, 50], split.outputs)
            train(model, Categorical(), split, seed)
            all_records += records(name, "classes", seed, model, split, Categorical(), 1.0)
        write_json(options.json, vars(options), all_records)
    frame = pd.DataFrame(all_records)
    order = ["plug-in", *CANDIDATES]
    with pd.option_context("display.width", 200, "display.float_format", "{:.3f}".format):
        means = frame.pivot_table(
            index=["likelihood", "unit", "set"], columns="prior", values="nll"
        )
        print(means.reindex(columns=order).to_string())
        print(means.groupby(["likelihood", "unit"]).mean().reindex(columns=order).to_string())


if __name__ == "__main__":
    main()
