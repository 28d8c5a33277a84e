"""The credal extension that the paper's conclusion proposes: a set of priors, and the resulting set
of predictives.

The model of the prior-modularity tables under every prior N(m, 1/τ) with m in [−1, 1] and τ in
[0.1, 100]. Beside the bounds of the library: those over the four corners alone, and those over a
fine grid of closed forms.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import ssla
from ssla_paper.runner import Claim, Record, Task
from ssla_paper.tables import Cell, Table, draw

NOISE, POINT, SLOPE = 0.5, 1.5, 0.8
MEANS, PRECISIONS = (-1.0, 1.0), (0.1, 100.0)
SIZES = (5, 50, 500)
PLACES = torch.linspace(-3, 3, 61, dtype=torch.float64)


def one(n: int) -> Record:
    """Bounds on the log density, the mean and the distribution function at x*."""
    generator = torch.Generator().manual_seed(n)
    x = torch.randn(n, 1, dtype=torch.float64, generator=generator)
    y = SLOPE * x[:, 0] + NOISE * torch.randn(n, dtype=torch.float64, generator=generator)
    model = nn.utils.skip_init(nn.Linear, 1, 1, bias=False, dtype=torch.float64).eval()
    nn.init.zeros_(model.weight)
    posterior = ssla.fit(
        model,
        (x, y),
        likelihood=ssla.likelihoods.Gaussian(noise=NOISE),
        prior=ssla.priors.Gaussian(),
        mode="polish",
    )
    found = ssla.credal(
        posterior, torch.tensor([[POINT]], dtype=torch.float64), ssla.priors.Box(MEANS, PRECISIONS)
    )
    log_prob, cdf, interval = (
        found.log_prob(PLACES[None]),
        found.cdf(PLACES[None]),
        found.interval(0.9),
    )
    corners = _closed_forms(x, y, torch.tensor(MEANS), torch.tensor(PRECISIONS))
    grid = _closed_forms(x, y, torch.linspace(*MEANS, 201), torch.logspace(-1, 2, 601))
    parts = found.decomposition(0.9)
    return {
        "n": n,
        "log_prob": [bound[0].tolist() for bound in log_prob],
        "corners": [corners.amin(0).tolist(), corners.amax(0).tolist()],
        "grid": [grid.amin(0).tolist(), grid.amax(0).tolist()],
        "cdf": [bound[0].tolist() for bound in cdf],
        "interval": interval[0].tolist(),
        "imprecision": float(parts.imprecision[0]),
        "width": float(parts.widest[0]),
    }


def _closed_forms(x: Tensor, y: Tensor, means: Tensor, precisions: Tensor) -> Tensor:
    """log N(y; x* m_n, σ² + x*² v_n) under every pair (m, τ): (pairs, places)."""
    m, tau = (
        part.double().reshape(-1, 1) for part in torch.meshgrid(means, precisions, indexing="ij")
    )
    variance = 1 / ((x * x).sum() / NOISE**2 + tau)
    centre = POINT * variance * ((x[:, 0] * y).sum() / NOISE**2 + tau * m)
    spread = (NOISE**2 + POINT**2 * variance).sqrt()
    logs: Tensor = (
        -0.5 * ((PLACES - centre) / spread) ** 2 - spread.log() - 0.5 * math.log(2 * math.pi)
    )
    return logs


def tasks() -> list[Task]:
    return [Task(f"set-{n}", one, {"n": n}) for n in SIZES]


def report(records: Mapping[str, Record], folder: Path) -> list[Claim]:
    """A table, a figure, and a check of the conclusion's proposal."""
    rows: list[list[Cell]] = []
    missed = error = 0.0
    for record in records.values():
        bounds, corners, grid = (
            torch.tensor(record[name]) for name in ("log_prob", "corners", "grid")
        )
        short = max(float((corners[0] - grid[0]).max()), float((grid[1] - corners[1]).max()))
        gap = max(
            float((bounds[0] - grid[0]).max()), float((grid[1] - bounds[1]).max())
        )  # how far the grid is outside our bounds
        missed, error = max(missed, short), max(error, gap)
        low, high = record["interval"]
        rows.append(
            [record["n"], record["imprecision"], record["width"], high - low, short, max(gap, 0.0)]
        )
    columns = [
        "n",
        "imprecision of the mean",
        "widest 90% interval",
        "90% under every prior",
        "corners miss",
        "ours miss",
    ]
    caption = (
        "Every prior N(m, 1/τ), m in [−1, 1], τ in [0.1, 100]: upper less lower mean, widths, and "
        "by how much the bounds of the log density over the four corners, and ours, fall short of "
        "those over 120,801 priors."
    )
    Table(
        "priors-set",
        caption,
        columns,
        rows,
        dict.fromkeys(columns[1:4], ".3f") | dict.fromkeys(columns[4:], ".1e"),
    ).write(folder)
    _figure(list(records.values()), folder)
    first, last = rows[0], rows[-1]
    return [
        Claim(
            "Of a box of means and precisions the four corners suffice for the imprecise predictive",
            "not stated",
            f"they miss up to {missed:.2f} of the upper log density; the library's search misses "
            f"{max(error, 0.0):.0e}",
            missed < 1e-3,
            "The conclusion correctly proposes the extreme points of a credal set of priors; but "
            "these are every N(m, 1/τ) of the box, not its corners: the highest density at y "
            "often belongs to a prior inside.",
        ),
        Claim(
            "The spread due to the prior vanishes with more data, the width of each predictive "
            "does not",
            "not stated",
            f"imprecision {first[1]:.2f} to {last[1]:.2f}, width {first[2]:.2f} to {last[2]:.2f} "
            f"(n = {first[0]} to {last[0]})",
            float(str(last[1])) < 0.1 * float(str(first[1]))
            and float(str(last[2])) > 0.5 * float(str(first[2])),
        ),
    ]


def _figure(records: list[Record], folder: Path) -> None:
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(
        1, len(records), figsize=(3.6 * len(records), 3), sharey=True, squeeze=False
    )
    places = PLACES.numpy()
    axis: Any
    for axis, record in zip(axes[0], records, strict=True):
        axis.fill_between(places, *record["cdf"], alpha=0.35, label="every prior in the set")
        corners = torch.tensor(record["corners"]).exp()
        upper = torch.tensor(record["log_prob"][1]).exp()
        axis.plot(places, upper, color="black", lw=1, label="upper density")
        axis.plot(
            places, corners[1], color="C3", lw=1, ls="--", label="upper density, corners only"
        )
        axis.set_title(f"n = {record['n']}")
        axis.set_xlabel("y at x = 1.5")
    axes[0][0].set_ylabel("P(Y ≤ y); density")
    axes[0][0].legend(fontsize=7, loc="upper left")
    draw(figure, folder, "priors-set")
