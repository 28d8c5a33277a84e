"""The paper's conjugate checks, and the effect of a prior: SSLA beside exact predictives, as
numbers and a figure.

    python examples/conjugate_priors.py [figure.png]

Needs torch and matplotlib (pip install 'ssla[plots]'). Every function returns {name:
(approximation, exact)} as log densities.
"""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributions as dist

import ssla
from ssla import priors

F64 = torch.float64
COUNTS = torch.tensor([2.0, 4, 3, 0, 5], dtype=F64)
Table = dict[str, tuple[Tensor, Tensor]]


def normal(y: Tensor, mean: Tensor | float, variance: Tensor | float) -> Tensor:
    return dist.Normal(
        torch.as_tensor(mean, dtype=F64), torch.as_tensor(variance, dtype=F64).sqrt()
    ).log_prob(y)


def normal_normal(y: Tensor) -> Table:
    """μ ~ N(4, 1), known variance 2, five observations: exact for every y."""
    data = torch.tensor([3.1, 4.7, 5.2, 2.9, 4.4], dtype=F64)
    model = ssla.ExplicitModel(
        lambda row, t: normal(row, t[0], 2.0), data, [4.0], priors.Gaussian(1.0, mean=4.0)
    )
    variance = 1 / (len(data) / 2 + 1)
    exact = normal(y, (4 + data.sum() / 2) * variance, variance + 2)
    return {"normal–normal": (model.increments(y).total, exact)}


def poisson(row: Tensor, rate: Tensor) -> Tensor:
    return row * rate.log() - rate - torch.lgamma(row + 1)


def poisson_gamma(y: Tensor) -> Table:
    """λ ~ Gamma(6, 2): the same prior in λ and in log λ, for which Laplace's approximations
    differ a little.
    """
    exact = dist.NegativeBinomial(
        6 + COUNTS.sum(), logits=-torch.tensor(2.0 + len(COUNTS), dtype=F64).log()
    ).log_prob(y)
    identity = ssla.ExplicitModel(
        lambda row, t: poisson(row, t[0]), COUNTS, [3.0], priors.Gamma(6.0, 2.0, link="identity")
    )
    log = ssla.ExplicitModel(
        lambda row, t: poisson(row, t[0].exp()), COUNTS, [1.0], priors.Gamma(6.0, 2.0, link="log")
    )
    return {
        "Poisson–gamma in λ": (identity.increments(y).total, exact),
        "Poisson–gamma in log λ": (log.increments(y).total, exact),
    }


def line(x: float, y: Tensor) -> tuple[Tensor, Tensor]:
    """Ten rows of (1, x, y), and candidates (1, x, y)."""
    at = torch.linspace(-2, 2, 10, dtype=F64)
    noise = torch.tensor([0.3, -0.5, 0.1, 0.4, -0.2, -0.3, 0.6, 0.0, -0.6, 0.2], dtype=F64)
    rows = torch.stack([torch.ones(10, dtype=F64), at, 1 + 0.8 * at + noise], 1)
    return rows, torch.stack([torch.ones_like(y), torch.full_like(y, x), y], 1)


def known_noise(y: Tensor, x: float = 1.5) -> Table:
    """Linear regression, σ² = 0.25, weights ~ N(0, 1): exact."""
    rows, candidates = line(x, y)
    model = ssla.ExplicitModel(
        lambda r, w: normal(r[2], r[:2] @ w, 0.25), rows, [0.0, 0.0], priors.Gaussian(1.0)
    )
    X = rows[:, :2]
    H = X.mT @ X / 0.25 + torch.eye(2, dtype=F64)
    new = torch.tensor([1.0, x], dtype=F64)
    mean = new @ torch.linalg.solve(H, X.mT @ rows[:, 2] / 0.25)
    exact = normal(y, mean, 0.25 + new @ torch.linalg.solve(H, new))
    return {"linear, known noise": (model.increments(candidates).total, exact)}


def unknown_noise(y: Tensor, x: float = 1.5, shape: float = 3.0, scale: float = 0.6) -> Table:
    """Linear regression, σ² ~ InverseGamma(shape, scale), w | σ² ~ N(0, σ² I), over (w, log
    σ²): exactly a Student-t.
    """
    rows, candidates = line(x, y)

    def log_prior(t: Tensor) -> Tensor:
        # log σ²: the change of variable adds s, and the normal density of two weights subtracts it
        # again.
        s = t[2]
        return -(shape + 1) * s - (scale + 0.5 * (t[:2] ** 2).sum()) * (-s).exp()

    model = ssla.ExplicitModel(
        lambda r, t: (
            -0.5 * (math.log(2 * math.pi) + t[2] + (r[2] - r[:2] @ t[:2]) ** 2 * (-t[2]).exp())
        ),
        rows,
        [0.5, 0.5, -1.0],
        priors.custom(log_prior),
    )
    X, target = rows[:, :2], rows[:, 2]
    P = X.mT @ X + torch.eye(2, dtype=F64)
    w = torch.linalg.solve(P, X.mT @ target)
    a, b = shape + len(rows) / 2, scale + 0.5 * (target @ target - w @ P @ w)
    new = torch.tensor([1.0, x], dtype=F64)
    spread = (b / a * (1 + new @ torch.linalg.solve(P, new))).sqrt()
    exact = dist.StudentT(torch.tensor(2 * a, dtype=F64), new @ w, spread).log_prob(y)
    return {"linear, unknown noise": (model.increments(candidates).total, exact)}


def normal_unknown(y: Tensor) -> Table:
    """Mean and variance of a normal, NormalInverseGamma over (μ, log σ²): a Student-t too."""
    data = torch.tensor([3.1, 4.7, 5.2, 2.9, 4.4, 3.9, 4.1, 5.5], dtype=F64)
    m, k, a, b = 4.0, 1.0, 3.0, 2.0
    model = ssla.ExplicitModel(
        lambda row, t: -0.5 * (math.log(2 * math.pi) + t[1] + (row - t[0]) ** 2 * (-t[1]).exp()),
        data,
        [4.0, 0.0],
        priors.NormalInverseGamma(m, k, a, b),
    )
    n, mean = len(data), data.mean()
    kn, an = k + n, a + n / 2
    bn = b + 0.5 * ((data - mean) ** 2).sum() + 0.5 * k * n * (mean - m) ** 2 / kn
    exact = dist.StudentT(
        torch.tensor(2 * an, dtype=F64), (k * m + n * mean) / kn, (bn * (kn + 1) / (an * kn)).sqrt()
    ).log_prob(y)
    return {"normal, unknown mean and variance": (model.increments(y).total, exact)}


def conflicting() -> tuple[Tensor, Any, Any]:
    """A line with prior slope −3 and slope 0.8 in the data: bands for priors of growing
    strength, a credal set.
    """
    rows, _ = line(1.5, torch.zeros(1, dtype=F64))
    model = nn.Linear(1, 1).double()
    prior = priors.Gaussian(precision=0.1, mean={"weight": -3.0, "bias": 1.0})
    post = ssla.fit(
        model,
        (rows[:, 1:2], rows[:, 2]),
        likelihood=ssla.likelihoods.Gaussian(noise=0.5),
        prior=prior,
    )
    x = torch.linspace(-3, 3, 61, dtype=F64)[:, None]
    bands = ssla.sensitivity(post, x, (0.1, 100.0, 4))
    box = priors.Box(mean={"weight": (-3.0, 1.0), "bias": (0.0, 2.0)}, precision=(0.1, 20.0))
    return x, bands, ssla.credal(post, torch.tensor([[2.5]], dtype=F64), box)


def run(picture: Path | None = None) -> dict[str, float]:
    """Print every check and return the largest errors of the log density; plot them if a path
    is given.
    """
    real, counts = torch.linspace(0, 8, 81, dtype=F64), torch.arange(0, 15, dtype=F64)
    tables = {
        **normal_normal(real),
        **poisson_gamma(counts),
        **known_noise(real - 2),
        **unknown_noise(real - 2),
        **normal_unknown(real),
    }
    errors = {name: float((ours - exact).abs().max()) for name, (ours, exact) in tables.items()}
    for name, error in errors.items():
        print(f"{name:<36} largest error of the log density {error:.2g}")
    x, bands, credal = conflicting()
    for strength, verdict in zip(bands.names, bands.conflicts(), strict=True):
        print(f"slope −3 with {strength:<16} {verdict}")
    print(f"P(Y > 2 | x = 2.5) lies in [{float(credal.probability((2, math.inf)).lower):.3f}, "
          f"{float(credal.probability((2, math.inf)).upper):.3f}]")  # fmt: skip
    if picture is not None:
        draw(picture, tables, real, counts, x, bands, credal)
    return errors


def draw(
    picture: Path, tables: Table, real: Tensor, counts: Tensor, x: Tensor, bands: Any, credal: Any
) -> None:
    import matplotlib.pyplot as plt

    from ssla import plots

    figure, axes = plt.subplots(2, 4, figsize=(17, 7.5), constrained_layout=True)
    for ax, (name, (ours, exact)) in zip(axes.flat, tables.items(), strict=False):
        y = counts if "Poisson" in name else real - 2 * ("linear" in name)
        ax.plot(y, exact.exp(), color="#333333", lw=3, alpha=0.35, label="exact")
        ax.plot(
            y,
            ours.exp(),
            "o" if "Poisson" in name else "--",
            color=plots.BAND,
            ms=4,
            label="SSLA, un-normalised",
        )
        ax.set_title(name, fontsize=10)
        ax.set_ylim(bottom=0)
        ax.legend(frameon=False, fontsize=8)
    plots.prior_bands(bands, x, ax=axes[1, 2])
    axes[1, 2].set_title("prior against data: slope −3, from weak to strong", fontsize=10)
    plots.p_box(credal, ax=axes[1, 3])
    axes[1, 3].set_title("credal set at x = 2.5 over a box of priors", fontsize=10)
    figure.savefig(picture, dpi=110)
    plt.close(figure)


if __name__ == "__main__":
    run(Path(sys.argv[1] if len(sys.argv) > 1 else "conjugate_priors.png"))
