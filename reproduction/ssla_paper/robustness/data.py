"""The data sets: those bundled with scikit-learn, two moons, the paper's toy, and UCI tables where
SSLA_DATA has them.

Each has out-of-distribution inputs: excluded classes, noise, independently shuffled columns,
rotated digits.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from ssla_paper.uci.data import load

LEFT_OUT = "classes 5–9"
SEEN_DIGITS = 5
SIZES = {
    "digits": (500, 200),
    "digits 0–4": (400, 100),
    "cancer": (350, 200),
    "wine": (100, 78),
    "moons": (200, 300),
}


@dataclass(frozen=True, eq=False)
class Classes:
    """Training rows and test rows, in the network's unit. x (n, d) float64, y (n,) integers."""

    x: Tensor
    y: Tensor
    new: Tensor
    target: Tensor
    count: int
    outside: dict[str, Tensor]
    scale: Callable[[Tensor], Tensor]
    raw: Tensor  # the test rows as they were recorded


def _bundled(name: str, seed: int) -> tuple[Tensor, Tensor]:
    from sklearn import datasets

    if name == "moons":
        x, y = datasets.make_moons(1000, noise=0.25, random_state=seed)
    else:
        loader = {"wine": datasets.load_wine, "cancer": datasets.load_breast_cancer}.get(
            name, datasets.load_digits
        )
        x, y = loader(return_X_y=True)
    return torch.as_tensor(x, dtype=torch.float64), torch.as_tensor(y).long()


def classes(name: str, seed: int, size: float = 1.0) -> Classes:
    """One random split; `size` scales the number of rows."""
    x, y = _bundled(name, seed)
    rows, tests = (max(20, round(size * k)) for k in SIZES[name])
    generator = torch.Generator().manual_seed(1000 + seed)
    order = torch.randperm(len(x), generator=generator)
    x, y = x[order], y[order]
    outside: dict[str, Tensor] = {}
    if name == "digits 0–4":
        outside[LEFT_OUT] = x[y >= SEEN_DIGITS][:tests]
        x, y = x[y < SEEN_DIGITS], y[y < SEEN_DIGITS]
    seen, new = x[:rows], x[rows : rows + tests]
    scale = _scaling(seen, together=name.startswith("digits"))
    outside["shuffled columns"] = torch.stack(
        [c[torch.randperm(len(new), generator=generator)] for c in new.T], 1
    )
    if name.startswith("digits"):
        outside["on their side"] = rotated(new, 90.0)
        outside["noise"] = 16 * torch.rand(new.shape, generator=generator, dtype=torch.float64)
    else:
        spread = 3 * seen.std(0)
        outside["noise"] = seen.mean(0) + spread * torch.randn(
            new.shape, generator=generator, dtype=torch.float64
        )
    return Classes(
        scale(seen),
        y[:rows],
        scale(new),
        y[rows : rows + tests],
        int(y.max()) + 1,
        {k: scale(v) for k, v in outside.items()},
        scale,
        new,
    )


def _scaling(seen: Tensor, together: bool) -> Callable[[Tensor], Tensor]:
    """Mean 0 and standard deviation 1 on the training rows, of each column or of all pixels
    together.
    """
    mean = seen.mean() if together else seen.mean(0)
    spread = seen.std() if together else seen.std(0)
    return lambda x: (x - mean) / spread


def rotated(images: Tensor, degrees: float) -> Tensor:
    """8×8 images (N, 64) rotated about their centre, bilinear, dark outside."""
    angle = math.radians(degrees)
    turn = torch.tensor(
        [[math.cos(angle), -math.sin(angle), 0.0], [math.sin(angle), math.cos(angle), 0.0]],
        dtype=images.dtype,
    )
    grid = torch.nn.functional.affine_grid(
        turn.expand(len(images), 2, 3), [len(images), 1, 8, 8], align_corners=False
    )
    found = torch.nn.functional.grid_sample(images.reshape(-1, 1, 8, 8), grid, align_corners=False)
    return found.reshape(-1, 64)


def noisy(images: Tensor, sd: float, generator: torch.Generator) -> Tensor:
    """Gaussian noise of `sd` parts of the full brightness, clamped to the range of a pixel."""
    return (
        images + 16 * sd * torch.randn(images.shape, generator=generator, dtype=images.dtype)
    ).clamp(0, 16)


def mislabelled(y: Tensor, share: float, count: int, generator: torch.Generator) -> Tensor:
    """Labels with a share replaced by another class, all with the same probability."""
    wrong = torch.rand(y.shape, generator=generator) < share
    other = (y + torch.randint(1, count, y.shape, generator=generator)) % count
    return torch.where(wrong, other, y)


@dataclass(frozen=True, eq=False)
class Regression:
    """Training rows from one part of the input space; test rows from all of it, with their
    distance from that part.
    """

    source: str
    likelihood: str
    x: Tensor
    y: Tensor
    new: Tensor
    target: Tensor
    distance: Tensor  # 0 inside


TOY_EDGE, TOY_END = 4.0, 8.0


def toy(rows: int, low: float, high: float, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """y = 7 sin x + 3 |cos(x/2)| ε."""
    x = low + (high - low) * torch.rand(rows, 1, generator=generator, dtype=torch.float64)
    noise = torch.randn(rows, generator=generator, dtype=torch.float64)
    return x, 7 * x[:, 0].sin() + 3 * (x[:, 0] / 2).cos().abs() * noise


def table_at_hand() -> str:
    """For small runs: Concrete where SSLA_DATA has it, else scikit-learn's diabetes."""
    return (
        "concrete"
        if (Path(os.environ.get("SSLA_DATA") or "/no/such/folder") / "concrete.csv").exists()
        else "diabetes"
    )


def _table(name: str) -> tuple[str, Tensor, Tensor]:
    """A UCI table, from `uci.data`; or scikit-learn's diabetes."""
    if name == "diabetes":
        from sklearn.datasets import load_diabetes

        x, y = load_diabetes(return_X_y=True)
    else:
        rows = load(name)
        x, y = rows.x, rows.y
    return name, torch.as_tensor(x, dtype=torch.float64), torch.as_tensor(y, dtype=torch.float64)


def regression(name: str, seed: int, size: float = 1.0) -> Regression:
    """The toy: trained on |x| < 4, tested to 8.

    A table: trained on the lower 70% of its first principal component.
    """
    generator = torch.Generator().manual_seed(2000 + seed)
    if name == "toy":
        x, y = toy(round(200 * size), -TOY_EDGE, TOY_EDGE, generator)
        new, target = toy(round(300 * size), -TOY_END, TOY_END, generator)
        return Regression(
            name, "heteroscedastic", x, y, new, target, (new[:, 0].abs() - TOY_EDGE).clamp_min(0)
        )
    source, x, y = _table(name)
    z = (x - x.mean(0)) / x.std(0)
    _, _, axes = torch.linalg.svd(z, full_matrices=False)
    # the same end for either sign of the factorisation
    along = z @ axes[0] * torch.sign(axes[0].sum())
    edge = along.quantile(0.7)
    inside = (along <= edge).nonzero().flatten()
    inside = inside[torch.randperm(len(inside), generator=generator)]
    kept = inside[: round(0.8 * len(inside) * size)]
    tested = torch.cat([inside[round(0.8 * len(inside)) :], (along > edge).nonzero().flatten()])
    tested = tested[torch.randperm(len(tested), generator=generator)][: round(300 * size)]
    return Regression(
        source,
        "gaussian",
        x[kept],
        y[kept],
        x[tested],
        y[tested],
        (along[tested] - edge).clamp_min(0),
    )
