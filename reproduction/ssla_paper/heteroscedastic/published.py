"""The published procedures: one output trained by squared error, and intervals ŷ ± z·s, where s is
not from a predictive.

ASSLA: s is the bandwidth of a kernel density estimate over 30 candidates y on ŷ ± 1.96, weighted by
exp(−(y − ŷ)²): 0.3985 for every input. LA: σ stays at 1 on standardised targets. SSLA: for each of
20 candidates all weights are trained on from θ̂ by a new Adam for up to ten epochs (here: ten),
batches of 32, and s is the bandwidth again, now with weights exp(ℓ_D(θ̃) − ℓ_D(θ̂) − (y − f̃)²);
the curvature increment was identically zero.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from scipy.stats import gaussian_kde
from torch import Tensor, nn
from torch.func import functional_call, vmap

from ssla_paper.heteroscedastic.data import Pair, Toy, toy
from ssla_paper.networks import Recipe, perceptron, squared_error, train
from ssla_paper.peers import MissingPeerError
from ssla_paper.runner import Record

LEVELS = (95, 90, 75, 50)
FACTORS = (1.96, 1.64, 1.15, 0.67)
CANDIDATES, REFITTED, SPAN = 30, 20, 1.96
RECIPE = Recipe(learning_rate=3e-3, batch_size=64)
RATES, BATCHES = (1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2), (32, 128)
EPOCHS, BATCH, REFIT_RATES = 10, 32, (1e-2, 3e-2, 1e-1)
STRUCTURES = {"KFAC": "kron", "DIAG": "diag", "DENSE": "full"}


def bandwidth(points: np.ndarray, weights: np.ndarray) -> float:
    """√ of the kernel's variance: Scott's factor n_eff^(−1/5) times the weighted standard
    deviation.
    """
    return float(np.sqrt(gaussian_kde(points, weights=weights).covariance[0, 0]))


def constant_width() -> float:
    """The published ASSLA's s."""
    d = np.linspace(-SPAN, SPAN, CANDIDATES)
    return bandwidth(d, np.exp(-(d**2)))


def coverage(residuals: Tensor, width: Tensor | float) -> list[float]:
    """Per cent of |y − ŷ| ≤ z·s, at the four levels."""
    return [100 * float((residuals.abs() <= z * width).double().mean()) for z in FACTORS]


def trained(data: Toy, seed: int, recipe: Recipe = RECIPE) -> tuple[nn.Sequential, float]:
    """The published network (in double), and its loss on the validation rows."""
    generator = torch.Generator().manual_seed(seed)
    net = perceptron(1, 1, generator).double()
    loss = train(net, data.train, data.validation, squared_error, recipe, generator)
    return net, loss


def _residuals(net: nn.Module, data: Pair) -> Tensor:
    with torch.no_grad():
        found: Tensor = data[1] - net(data[0])[:, 0]
    return found


def of_seeds(seeds: list[int]) -> Record:
    """ASSLA and LA as published on the 25 test points of each data seed."""
    assla, la = [], []
    try:
        for seed in seeds:
            data = toy(seed)
            net, _ = trained(data, seed)
            residuals = _residuals(net, data.test)
            assla.append(coverage(residuals, constant_width()))
            la.append(
                {name: coverage(residuals, s) for name, s in laplace_widths(net, data).items()}
            )
    except MissingPeerError as error:
        return {"missing": str(error)}
    return {"seeds": seeds, "assla": assla, "la": la}


def laplace_widths(net: nn.Module, data: Toy) -> dict[str, Tensor]:
    """√(K + 1) at the test points, by structure."""
    from ssla_paper.peers.laplace import laplace

    return {
        name: laplace(net, *data.train, data.test[0], structure=structure, noise=1.0).sds[0]
        for name, structure in STRUCTURES.items()
    }


def of_settings(rates: list[float], seed: int = 42) -> Record:
    """The same on the module's default seed, by learning rate and batch size: possible results
    of a search over them.
    """
    data, found = toy(seed), []
    for rate in rates:
        for batch in BATCHES:
            net, loss = trained(data, seed, Recipe(learning_rate=rate, batch_size=batch))
            residuals = _residuals(net, data.test)
            found.append(
                {
                    "rate": rate,
                    "batch": batch,
                    "loss": loss,
                    "assla": coverage(residuals, constant_width()),
                    "la": coverage(residuals, 1.0),
                }
            )
    return {"settings": found}


def refitted(
    seed: int, rate: float, points: int = 25, data_seed: int = 42, epochs: int = EPOCHS
) -> Record:
    """SSLA as published, by a network trained and refitted at this rate; `seed` draws the rows'
    order in the refits alone.
    """
    data = toy(data_seed)
    net, _ = trained(data, data_seed, Recipe(learning_rate=rate, batch_size=RECIPE.batch_size))
    x, y = data.test[0][:points], data.test[1][:points]
    with torch.no_grad():
        centre = net(x)[:, 0]
    d = torch.linspace(-SPAN, SPAN, REFITTED, dtype=torch.float64)
    candidates = centre[:, None] + d  # (N, k)
    gains = _refits(net.float(), data.train, x, candidates, seed, rate, epochs)
    widths = [bandwidth(d.numpy(), np.exp((gain - gain.max()).numpy())) for gain in gains]
    s = torch.tensor(widths, dtype=torch.float64)
    return {"seed": seed, "rate": rate, "coverage": coverage(y - centre, s), "widths": widths}


def _refits(
    net: nn.Module, data: Pair, x: Tensor, candidates: Tensor, seed: int, rate: float, epochs: int
) -> Tensor:
    """ℓ_D(θ̃) − ℓ_D(θ̂) − (y − f̃)² for each candidate (N, k), every refit with its own Adam
    and order of rows; ℓ = −Σ(y − f)².
    """
    generator = torch.Generator().manual_seed(seed)
    names, shapes = zip(*[(name, p.shape) for name, p in net.named_parameters()], strict=True)
    sizes = [math.prod(shape) for shape in shapes]
    start = torch.cat([p.detach().flatten() for p in net.parameters()])
    tasks = candidates.numel()

    def outputs(flat: Tensor, rows: Tensor) -> Tensor:
        parts = [part.reshape(shape) for part, shape in zip(flat.split(sizes), shapes, strict=True)]
        found: Tensor = functional_call(net, dict(zip(names, parts, strict=True)), (rows,))[:, 0]
        return found

    forward = vmap(outputs)
    inputs = torch.cat(
        [data[0].expand(tasks, -1, 1), x.repeat_interleave(candidates.shape[1], 0)[:, None]], 1
    ).float()
    targets = torch.cat([data[1].expand(tasks, -1), candidates.reshape(-1, 1)], 1).float()
    theta = start.repeat(tasks, 1).requires_grad_(True)
    adam = torch.optim.Adam([theta], lr=rate)  # elementwise: one each
    for _ in range(epochs):
        order = torch.rand(targets.shape, generator=generator).argsort(1)
        for rows in order.split(BATCH, 1):
            adam.zero_grad()
            error = forward(theta, inputs.gather(1, rows[..., None])) - targets.gather(1, rows)
            error.square().mean(1).sum().backward()
            adam.step()
    with torch.no_grad():
        squares = (forward(theta, inputs) - targets).square().double()
        before = (outputs(start, inputs[0, :-1]) - targets[0, :-1]).square().double().sum()
    gains = before - squares.sum(1)  # the last column is (y − f̃)²
    return gains.reshape(candidates.shape)


def bands(low: float, high: float, steps: int, seed: int = 42) -> Record:
    """Mean and ends of the 95% band over a grid, of both procedures whose widths need no refit."""
    from ssla_paper.peers.laplace import laplace

    data = toy(seed)
    net, _ = trained(data, seed)
    grid = torch.linspace(low, high, steps, dtype=torch.float64)[:, None]
    with torch.no_grad():
        centre = net(grid)[:, 0]
    widths = {"ASSLA": torch.full_like(centre, constant_width())}
    try:
        widths["LA"] = laplace(net, *data.train, grid, structure="kron", noise=1.0).sds[0]
    except MissingPeerError as error:
        return {"published": _ends(centre, widths), "missing": str(error)}
    return {"published": _ends(centre, widths)}


def _ends(centre: Tensor, widths: dict[str, Tensor]) -> dict[str, list[list[float]]]:
    reach = FACTORS[0]
    return {
        name: torch.stack([centre, centre - reach * width, centre + reach * width]).tolist()
        for name, width in widths.items()
    }
