"""The cost of a predictive in forward passes of the same network, beside laplace-torch.

10,000 inputs, network 8-50-50-2 (mean and log variance), last layer, float32. Goals: `marginal` (f
and K) in under 4 forward passes, the whole predictive density in under 30. Every round times all
candidates one after the other, so that they have the same load; the table gives the median over
rounds of the ratio to the forward pass of that round, and the best time.

    python benchmarks/speed/predict_speed.py [--rounds 40] [--points 10000]
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from torch import nn

import ssla


def network(outputs: int) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(8, 50), nn.ReLU(), nn.Linear(50, 50), nn.ReLU(), nn.Linear(50, outputs)
    ).eval()


def laplace(
    model: nn.Module, x: torch.Tensor, y: torch.Tensor, new: torch.Tensor
) -> Callable[[], object] | None:
    """laplace-torch's f and variance of f, last layer, full; None where it is not installed."""
    try:
        from laplace import Laplace
    except ImportError:
        return None
    la = Laplace(model, "regression", subset_of_weights="last_layer", hessian_structure="full")
    la.fit(
        torch.utils.data.DataLoader(
            torch.utils.data.TensorDataset(x, torch.stack([y, y], 1)), batch_size=500
        )
    )
    return lambda: la(new)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--points", type=int, default=10_000)
    options = parser.parse_args()
    model = network(2)
    x = torch.randn(1000, 8)
    y = x[:, 0] + torch.randn(1000) * (0.2 + 0.2 * x[:, 1].abs())
    new = torch.randn(options.points, 8)
    posterior = ssla.fit(
        model,
        (x, y),
        likelihood=ssla.likelihoods.HeteroscedasticGaussian(),
        prior=ssla.priors.Gaussian(),
        gaussian="laplace",
    )
    gaussian = ssla.fit(
        network(1),
        (x, y),
        likelihood=ssla.likelihoods.Gaussian(noise="estimate"),
        prior=ssla.priors.Gaussian(),
    )

    def forward() -> object:
        with torch.no_grad():
            return model(new)

    work: dict[str, Callable[[], object]] = {
        "one forward pass": forward,
        "marginal (f and K)": lambda: posterior.marginal(new),
        "predict none: mass, density": lambda: posterior.predict(new, refit="none").mass,
        "predict output: mass, density": lambda: posterior.predict(new).mass,
        "  … and 95% intervals": lambda: posterior.predict(new).interval(0.95),
        "Gaussian: predict, 95% interval": lambda: gaussian.predict(new).interval(0.95),
    }
    peer = laplace(network(2), x, y, new)
    if peer is not None:
        work["laplace-torch la(x) (f and K)"] = peer
    times: dict[str, list[float]] = {name: [] for name in work}
    for round_ in range(options.rounds + 3):
        for name, job in work.items():
            start = time.perf_counter()
            job()
            if round_ >= 3:
                times[name].append(time.perf_counter() - start)
    base = times["one forward pass"]
    print(
        f"{options.points:,} points, {torch.get_num_threads()} threads, {options.rounds} rounds\n"
    )
    print(f"{'':<34}{'best ms':>9}{'median ms':>11}{'forward passes':>16}")
    for name, values in times.items():
        ratio = statistics.median(v / b for v, b in zip(values, base, strict=True))
        print(
            f"{name:<34}{min(values) * 1e3:9.2f}{statistics.median(values) * 1e3:11.2f}{ratio:16.1f}"
        )
    if peer is None:
        print("\nlaplace-torch is not installed: `make bench` installs it")


if __name__ == "__main__":
    main()
