"""Bayesian optimisation with a small network beside a Gaussian process: Branin, Hartmann-6, and a
problem with categories.

    python benchmarks/accuracy/bayesian_optimisation.py [--problems branin hartmann categories] [--methods
    ssla gp random] [--seeds 5]
                                               [--first 0] [--json FILE] [--picture FILE] [--from
                                               FILE]

Each run starts with the same Sobol points for all methods, and then evaluates one point at a time,
where qLogEI is largest (`optimize_acqf`; for categories `optimize_acqf_mixed`, with the numbers
optimised for each category).

    ssla     ssla.botorch.train: a network of 200 cosine units, posterior over all weights; other random weights at every step
    gp       SingleTaskGP, or MixedSingleTaskGP for categories, with BoTorch's defaults
    random   more Sobol points

The functions have no noise. The categories are those of a maximum over two numbers and one category
of five: a Branin function whose inputs are shifted and whose value is scaled and shifted by
category. Prints the median and the quartiles of the simple regret (best possible value minus the
best seen) at the end, and processor seconds per step. --from draws a stored run, and adds what it
does not have. --first is the first seed.
"""

from __future__ import annotations

import argparse
import json
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from botorch.acquisition.logei import qLogExpectedImprovement
from botorch.fit import fit_gpytorch_mll
from botorch.models import MixedSingleTaskGP, SingleTaskGP
from botorch.models.transforms import Normalize
from botorch.optim import optimize_acqf, optimize_acqf_mixed
from botorch.sampling import SobolQMCNormalSampler
from botorch.test_functions import Branin, Hartmann
from gpytorch.mlls import ExactMarginalLogLikelihood
from torch import Tensor

import ssla.botorch

METHODS = ("ssla", "gp", "random")
SHIFTS = torch.tensor(
    [[0.0, 0.0], [3.0, -2.0], [-2.0, 3.0], [1.0, 1.0], [-4.0, -1.0]], dtype=torch.float64
)
FACTORS = torch.tensor([1.5, 0.5, 1.0, 2.0, 0.8], dtype=torch.float64)
OFFSETS = torch.tensor([20.0, 15.0, 0.0, 10.0, 5.0], dtype=torch.float64)


@dataclass(frozen=True)
class Problem:
    """A function to be maximised over a box; `categories` as for ssla.botorch.train."""

    function: Callable[[Tensor], Tensor]  # (n, d) -> (n,)
    bounds: Tensor
    best: float
    first: int  # Sobol points
    steps: int
    categories: dict[int, int] | None = None

    def value(self, x: Tensor) -> Tensor:
        return self.function(x).double()[:, None]

    def points(self, n: int, seed: int) -> Tensor:
        unit = torch.quasirandom.SobolEngine(self.bounds.shape[1], scramble=True, seed=seed).draw(
            n, dtype=torch.float64
        )
        x = self.bounds[0] + (self.bounds[1] - self.bounds[0]) * unit
        for column, count in (self.categories or {}).items():
            x[:, column] = (unit[:, column] * count).floor()
        return x


def by_category(x: Tensor) -> Tensor:
    """−(factor · Branin(numbers + shift) + offset) of the category; category 2 has the best
    maximum, −0.397887.
    """
    kind = x[:, 2].long()
    return -(FACTORS[kind] * Branin()._evaluate_true(x[:, :2] + SHIFTS[kind]) + OFFSETS[kind])


def problems() -> dict[str, Problem]:
    branin, hartmann = Branin().bounds.double(), Hartmann(6).bounds.double()
    mixed = torch.cat([branin, torch.tensor([[0.0], [4.0]], dtype=torch.float64)], 1)
    return {
        "branin": Problem(lambda x: -Branin()(x), branin, -0.397887, 6, 24),
        "hartmann": Problem(lambda x: -Hartmann(6)(x), hartmann, 3.32237, 12, 28),
        "categories": Problem(by_category, mixed, -0.397887, 10, 16, {2: 5}),
    }


def gaussian_process(problem: Problem, x: Tensor, y: Tensor) -> Any:
    scaling = Normalize(
        x.shape[1], indices=[i for i in range(x.shape[1]) if i not in (problem.categories or {})]
    )
    if problem.categories is None:
        model: Any = SingleTaskGP(
            x, y, input_transform=Normalize(x.shape[1], bounds=problem.bounds)
        )
    else:
        model = MixedSingleTaskGP(x, y, cat_dims=list(problem.categories), input_transform=scaling)
    fit_gpytorch_mll(ExactMarginalLogLikelihood(model.likelihood, model))
    return model


def candidate(problem: Problem, model: Any, y: Tensor, seed: int) -> Tensor:
    torch.manual_seed(seed)
    sampler = SobolQMCNormalSampler(torch.Size([64]), seed=seed)
    acquisition = qLogExpectedImprovement(model, best_f=float(y.max()), sampler=sampler)
    options: dict[str, Any] = {
        "q": 1,
        "num_restarts": 4,
        "raw_samples": 128,
        "options": {"maxiter": 60},
    }
    if problem.categories is None:
        return optimize_acqf(acquisition, problem.bounds, **options)[0]
    ((column, count),) = problem.categories.items()
    fixed = [{column: float(k)} for k in range(count)]
    options |= {"num_restarts": 2, "raw_samples": 64}  # for each category
    return optimize_acqf_mixed(acquisition, problem.bounds, fixed_features_list=fixed, **options)[0]


def run(problem: Problem, method: str, seed: int) -> tuple[list[float], float]:
    """The regret after each evaluation, and processor seconds for each step."""
    x = problem.points(problem.first + (problem.steps if method == "random" else 0), seed)
    y, began = problem.value(x), time.process_time()
    while len(x) < problem.first + problem.steps:
        step = 1000 * seed + len(x)
        if method == "gp":
            model = gaussian_process(problem, x, y)
        else:
            model = ssla.botorch.train(
                x, y, bounds=problem.bounds, categories=problem.categories, seed=step
            )
        new = candidate(problem, model, y, step)
        x, y = torch.cat([x, new]), torch.cat([y, problem.value(new)])
    best = y[:, 0].cummax(0).values
    return (problem.best - best).clamp_min(1e-9).tolist(), (
        time.process_time() - began
    ) / problem.steps


def draw(found: dict[str, Any], path: Path) -> None:
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(
        1, len(found), figsize=(3.6 * len(found), 3.0), layout="constrained"
    )
    colours = {"ssla": "#0072b2", "gp": "#d55e00", "random": "#888888"}
    for axis, (name, methods) in zip(
        axes if len(found) > 1 else [axes], found.items(), strict=True
    ):
        for method, runs in methods.items():
            regret = torch.tensor(runs["regret"], dtype=torch.float64)
            low, middle, high = regret.quantile(
                torch.tensor([0.25, 0.5, 0.75], dtype=torch.float64), 0
            )
            evaluations = range(1, regret.shape[1] + 1)
            axis.plot(evaluations, middle, color=colours[method], label=method)
            axis.fill_between(evaluations, low, high, color=colours[method], alpha=0.2, linewidth=0)
        axis.axvline(problems()[name].first, color="#bbbbbb", linewidth=0.8, linestyle=":")
        axis.set(title=name, yscale="log", xlabel="evaluations")
    first = axes[0] if len(found) > 1 else axes
    first.set_ylabel("regret")
    first.legend(frameon=False)
    figure.savefig(path, dpi=80)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--problems", nargs="+", default=list(problems()), choices=list(problems()))
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=METHODS)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--picture", type=Path)
    parser.add_argument("--from", dest="stored", type=Path)
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # of BoTorch's optimisers: restarts that did not converge
    found: dict[str, Any] = json.loads(chosen.stored.read_text()) if chosen.stored else {}
    print(
        "| problem | evaluations | method | median regret | quartiles | seconds per step "
        "|\n|---|---|---|---|---|---|"
    )
    for name in chosen.problems:
        problem = problems()[name]
        for method in chosen.methods:
            runs = found.setdefault(name, {}).get(method)
            if runs is None:
                done = [
                    run(problem, method, seed)
                    for seed in range(chosen.first, chosen.first + chosen.seeds)
                ]
                runs = {
                    "regret": [curve for curve, _ in done],
                    "seconds": sum(s for _, s in done) / len(done),
                }
                found[name][method] = runs
                if chosen.json:
                    chosen.json.write_text(json.dumps(found))
            last = torch.tensor(runs["regret"], dtype=torch.float64)[:, -1]
            low, middle, high = last.quantile(
                torch.tensor([0.25, 0.5, 0.75], dtype=torch.float64)
            ).tolist()
            total = problem.first + problem.steps
            print(
                f"| {name} | {total} | {method} | {middle:.2g} | {low:.2g} to {high:.2g} | "
                f"{runs['seconds']:.2f} |",
                flush=True,
            )
    if chosen.picture:
        draw(found, chosen.picture)


if __name__ == "__main__":
    main()
