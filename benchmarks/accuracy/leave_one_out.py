"""`posterior.loo()` against fits without each row, for three last layers.

    python benchmarks/accuracy/leave_one_out.py [--every 4] [--gaussian variational laplace]

Prints the mean absolute difference of the log densities, by cavities alone (refits=0) and with
refits of influential rows, the mean log densities, and the time of loo() and of the fits without a
row. `--every k` fits without every k-th row only.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

import ssla
from ssla import likelihoods as L

Case = tuple[str, nn.Module, Tensor, Tensor, L.Likelihood]


def normal(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def trained(
    x: Tensor, y: Tensor, law: L.Likelihood, width: int, outputs: int, steps: int = 300
) -> nn.Module:
    """A small network, trained on the rows."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(x.shape[1], width), nn.Tanh(), nn.Linear(width, outputs)
    ).double()
    optimiser = torch.optim.Adam(model.parameters(), lr=0.01, weight_decay=1e-3)
    for _ in range(steps):
        optimiser.zero_grad()
        loss = -law.log_prob(y, model(x)).mean()
        loss.backward()
        optimiser.step()
    return model.eval()


def cases() -> Iterator[Case]:
    x = normal(60, 3, seed=1)
    poisson: L.Likelihood = L.Poisson()
    counts = torch.poisson((0.5 + 0.7 * x[:, 0]).exp(), generator=torch.Generator().manual_seed(2))
    yield "Poisson, n = 60, 6 features", trained(x, counts, poisson, 5, 1), x, counts, poisson
    both: L.Likelihood = L.HeteroscedasticGaussian()
    y = torch.sin(x[:, 0]) + (0.2 + 0.2 * x[:, 1].abs()) * normal(60, seed=3)
    yield "mean and log variance, n = 60, 6 features", trained(x, y, both, 5, 2), x, y, both
    images, digits = load_digits(return_X_y=True)
    rows = torch.randperm(len(digits), generator=torch.Generator().manual_seed(4))[:200]
    x, y = torch.as_tensor(images)[rows] / 16, torch.as_tensor(digits)[rows]
    classes: L.Likelihood = L.Categorical()
    yield "digits, 10 classes, n = 200, 17 features", trained(x, y, classes, 16, 10), x, y, classes


def without(
    model: nn.Module, x: Tensor, y: Tensor, law: L.Likelihood, gaussian: str, rows: Tensor
) -> Tensor:
    """log p(y_i | rest) by a fit without each of the rows."""
    found = []
    for i in rows.tolist():
        rest = torch.arange(len(y)) != i
        post = ssla.fit(
            model,
            (x[rest], y[rest]),
            likelihood=law,
            prior=ssla.priors.Gaussian(),
            gaussian=gaussian,
        )
        found.append(post.predict(x[i : i + 1]).log_prob(y[i : i + 1]))
    return torch.cat(found)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--every", type=int, default=1)
    parser.add_argument("--gaussian", nargs="+", default=["variational", "laplace"])
    options = parser.parse_args()
    every = options.every
    print(
        f"{'last layer':44} {'gaussian':12} {'cavities':>9} {'refits':>9} {'rows':>5} "
        f"{'in-sample':>10} {'loo':>8} {'true':>8}"
    )
    for name, model, x, y, law in cases():
        rows = torch.arange(0, len(y), every)
        for gaussian in options.gaussian:
            post = ssla.fit(
                model, (x, y), likelihood=law, prior=ssla.priors.Gaussian(), gaussian=gaussian
            )
            start = time.perf_counter()
            found = post.loo()
            quick = time.perf_counter() - start
            cavities = post.loo(refits=0)
            start = time.perf_counter()
            truth = without(model, x, y, law, gaussian, rows)
            slow = (time.perf_counter() - start) * every
            errors = [float((one.log_prob[rows] - truth).abs().mean()) for one in (cavities, found)]
            seen = float(post.predict(x[rows]).log_prob(y[rows]).mean())
            print(
                f"{name:44} {gaussian:12} {errors[0]:9.2e} {errors[1]:9.2e} "
                f"{int(found.refitted.sum()):5d} {seen:10.4f} "
                f"{float(found.log_prob[rows].mean()):8.4f} {float(truth.mean()):8.4f}   "
                f"{quick:.1f} s, not {slow:.0f} s",
                flush=True,
            )


if __name__ == "__main__":
    main()
