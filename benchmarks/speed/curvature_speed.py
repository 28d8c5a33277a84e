"""Fit and predict beside laplace-torch at equal settings: MLP 8-50-50-1, Gaussian noise, in one
run, as ratios.

Goals: all weights, KFAC: predict ≥ 100× faster, fit ≥ 3×; dense fit ≥ 20×; diag fit ≥ 5×; last
layer fit and predict ≥ 3×. laplace-torch predicts the variance of f only (`la(x)`); ours here is
`marginal`, the same quantity.

    python benchmarks/speed/curvature_speed.py [--rows 10000] [--points 2000] [--quick]
"""

from __future__ import annotations

import argparse
import resource
import time
from collections.abc import Callable

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import ssla

SETTINGS = [
    ("last_layer", "full", "dense"),
    ("last_layer", "kron", "kfac"),
    ("last_layer", "diag", "diag"),
    ("all", "diag", "diag"),
    ("all", "kron", "kfac"),
    ("all", "full", "dense"),
]


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(8, 50), nn.ReLU(), nn.Linear(50, 50), nn.ReLU(), nn.Linear(50, 1)
    ).eval()


def clock(work: Callable[[], object], repeats: int) -> float:
    best = float("inf")
    for _ in range(repeats):
        start = time.perf_counter()
        work()
        best = min(best, time.perf_counter() - start)
    return best


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=10_000)
    parser.add_argument("--points", type=int, default=2_000)
    parser.add_argument(
        "--quick",
        action="store_true",
        help="leave out laplace-torch's full Hessian of all weights (minutes)",
    )
    options = parser.parse_args()
    x, new = torch.randn(options.rows, 8), torch.randn(options.points, 8)
    y = x[:, :1].sin() + 0.3 * torch.randn(options.rows, 1)
    loader = DataLoader(TensorDataset(x, y), batch_size=1000)
    try:
        from laplace import Laplace
    except ImportError:
        Laplace = None
        print("laplace-torch is not installed: `make bench` installs it; only our times\n")
    threads = torch.get_num_threads()
    print(
        f"n = {options.rows:,}, {options.points:,} test points, {threads} threads; both read the "
        "same DataLoader\n"
    )
    print("weights     structure      fit s  predict s  theirs fit   predict    fit ×  predict ×")
    for weights, theirs, ours in SETTINGS:

        def fit(weights: str = weights, ours: str = ours) -> ssla.Posterior:
            likelihood = ssla.likelihoods.Gaussian(noise=0.3)
            return ssla.fit(
                network(),
                loader,
                likelihood=likelihood,
                prior=ssla.priors.Gaussian(),
                weights=weights,
                structure=ours,
                mode="tilt",
            )

        mine = clock(fit, 2)
        posterior = fit()
        posterior.marginal(new)
        predict = clock(lambda posterior=posterior: posterior.marginal(new), 3)  # type: ignore[misc]
        row = f"{weights:<12}{ours:<11}{mine:9.3f}{predict:11.4f}"
        if Laplace is not None and not (options.quick and (weights, theirs) == ("all", "full")):
            la = Laplace(
                network(),
                "regression",
                subset_of_weights=weights,
                hessian_structure=theirs,
                sigma_noise=0.3,
            )
            their_fit = clock(lambda la=la: la.fit(loader), 1)  # type: ignore[misc]
            their_predict = clock(lambda la=la: la(new), 2)  # type: ignore[misc]
            row += f"{their_fit:12.3f}{their_predict:10.4f}{their_fit / mine:9.1f}{their_predict / predict:11.1f}"
        print(row, flush=True)
    print(
        "\npeak memory of the process: "
        f"{resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20:.2f} GiB"
    )


if __name__ == "__main__":
    main()
