"""Small networks for tables: several trained together, each with its own initialisation, order of
rows and validation rows.

The objective is the negative log posterior of a row, −log p(y|f) + (τ/2W)‖θ‖², with W the total
weight of the training rows: weight decay *is* the Gaussian prior of precision τ. With unknown
Gaussian noise, σ is trained too. Members are stacked and run by batched products, so five networks
take about twice the time of one. Rows are selected by index, without a DataLoader.

Networks with pieces also train a scale for each input of their first layer, W → W diag(s) with s =
1 at the start: a step then weakens or strengthens an input as a whole. At the end the scales are
part of W.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from itertools import pairwise

import torch
from torch import Tensor, nn

from ssla._checks import unknown_name
from ssla.likelihoods import Likelihood
from ssla.network.unset import unset_linear
from ssla.tables.networks.embeddings import Embeddings, first_weights
from ssla.tables.networks.pieces import Pieces, place
from ssla.tables.networks.threads import one_thread_if

ACTIVATIONS: dict[str, type[nn.Module]] = {"relu": nn.ReLU, "silu": nn.SiLU, "tanh": nn.Tanh}
SMALLEST_LOG_VARIANCE = -14.0  # without it, σ of a noise-free target would go to zero
WORTH_THREADS = 30_000_000  # multiplications in one forward pass
MOST_EXPANDED = 20_000_000  # numbers: inputs with their pieces that are kept in memory
SCALES = "scales"  # of the inputs of the first layer, beside the module's own parameters
SMALLEST_RATE = 0.02  # of the learning rate, at the last epoch


@dataclass(frozen=True)
class Architecture:
    """A multilayer perceptron; pieces: the number of linear pieces of each input, () for none (see
    `ssla.tables.networks.pieces`).

    levels, dimensions: of the inputs that are codes of levels, 0 for numbers, () for none (see
    `ssla.tables.networks.embeddings`).
    """

    inputs: int
    outputs: int
    hidden: tuple[int, ...] = (50, 50)
    activation: str = "silu"
    pieces: tuple[int, ...] = ()
    levels: tuple[int, ...] = ()
    dimensions: tuple[int, ...] = ()

    @property
    def widths(self) -> tuple[int, ...]:
        """Inputs and outputs of the linear layers."""
        embedded = sum(self.dimensions) - sum(count > 0 for count in self.levels)
        return (self.inputs + sum(self.pieces) + embedded, *self.hidden, self.outputs)

    def build(self) -> nn.Sequential:
        """The module, with uninitialised parameters: no random number is drawn."""
        if self.activation not in ACTIVATIONS:
            raise ValueError(unknown_name("activation", self.activation, ACTIVATIONS))
        layers: list[nn.Module] = [Pieces(self.pieces)] if self.pieces else []
        if self.levels:
            layers.append(Embeddings(self.levels, self.dimensions, self.inputs + sum(self.pieces)))
        for i, (width, following) in enumerate(pairwise(self.widths)):
            layers.append(unset_linear(width, following, torch.float32))
            if i < len(self.hidden):
                layers.append(ACTIVATIONS[self.activation]())
        return nn.Sequential(*layers).eval()


@dataclass(frozen=True)
class Schedule:
    """Epochs, batches and rates. batch_size None: all rows at once."""

    max_epochs: int = 200
    batch_size: int | None = 64
    learning_rate: float = 1e-2
    patience: int = 40
    precision: float = 1.0  # τ


@dataclass(frozen=True, eq=False)
class Rows:
    """The data of all members: x (n, d), y (n,) or (n, D), weights (n,), and the held-out rows of
    each member (M, n).

    edges: those of the pieces of each column, if the architecture has pieces.  y_by_member (M, n):
    in place of y.
    """

    x: Tensor
    y: Tensor
    weights: Tensor
    held_out: Tensor
    edges: tuple[Tensor, ...] = ()
    y_by_member: Tensor | None = None

    def targets(self, index: Tensor) -> Tensor:
        """y of the rows (M, B) of each member."""
        return self.y[index] if self.y_by_member is None else self.y_by_member.gather(1, index)


@dataclass(frozen=True, eq=False)
class Trained:
    """The networks with their best weights, and the epoch of these weights."""

    modules: tuple[nn.Sequential, ...]
    epochs: int
    best_epoch: Tensor  # (M,)
    losses: Tensor  # validation loss by epoch (epochs, M)


def train(
    architecture: Architecture,
    likelihood: Likelihood | None,
    rows: Rows,
    schedule: Schedule,
    seed: int,
    start: Tensor | None = None,
    on_epoch: Callable[[int], None] | None = None,
) -> Trained:
    """Adam with a cosine schedule; each member keeps the weights of its best epoch on its held-out
    rows.

    likelihood None is Gaussian with unknown noise. start: the biases of the last layer. Without
    held-out rows the last epoch is kept. Draws from its own generator only.
    """
    work = (
        len(rows.held_out)
        * (schedule.batch_size or len(rows.x))
        * sum(a * b for a, b in pairwise(architecture.widths))
    )
    with one_thread_if(work < WORTH_THREADS):
        return _train(architecture, likelihood, rows, schedule, seed, start, on_epoch)


@torch.enable_grad()
def _train(
    architecture: Architecture,
    likelihood: Likelihood | None,
    rows: Rows,
    schedule: Schedule,
    seed: int,
    start: Tensor | None,
    on_epoch: Callable[[int], None] | None,
) -> Trained:
    generator = torch.Generator().manual_seed(seed)
    members, module = rows.held_out.shape[0], _empty(architecture, rows)
    shapes = {name: p.shape for name, p in module.named_parameters()}
    if architecture.pieces:
        shapes = {SCALES: torch.Size([architecture.widths[0]])} | shapes
    theta = _initial(module, shapes, members, start, generator).requires_grad_(True)  # (M, P)
    spread = torch.zeros(
        members, architecture.outputs, dtype=rows.x.dtype, requires_grad=likelihood is None
    )  # log σ²
    x, layers = rows.x, list(module.named_children())
    if isinstance(module[0], Pieces) and len(x) * architecture.widths[0] <= MOST_EXPANDED:
        x, layers = module[0](x), layers[1:]  # once for all epochs
    forward = partial(_forward, layers, shapes)

    def losses(index: Tensor) -> Tensor:
        """(M, B), not weighted."""
        f, y = forward(theta, x[index]), rows.targets(index)
        if likelihood is not None:
            return -likelihood.log_prob(y, f)
        s = spread.clamp_min(SMALLEST_LOG_VARIANCE)[:, None]
        r = y.reshape(f.shape) - f
        loss: Tensor = 0.5 * (r * r * torch.exp(-s) + s).sum(-1)
        return loss

    def mean_loss(index: Tensor, real: Tensor) -> Tensor:
        """(M,), weighted."""
        w = rows.weights[index] * real
        return (w * losses(index)).sum(1) / w.sum(1).clamp_min(1e-12)

    inside, outside = _index(~rows.held_out), _index(rows.held_out)
    decay = schedule.precision / (rows.weights[inside.rows] * inside.real).sum(1)  # τ/W (M,)
    optimiser = _Adam([theta, spread] if likelihood is None else [theta])
    size = (
        inside.rows.shape[1]
        if schedule.batch_size is None
        else min(schedule.batch_size, inside.rows.shape[1])
    )
    best, found = theta.detach().clone(), torch.zeros(members, dtype=torch.long)
    lowest = torch.full((members,), math.inf, dtype=torch.float64)
    history: list[Tensor] = []
    watching = outside.rows.shape[1] > 0
    for epoch in range(1, schedule.max_epochs + 1):
        share = 0.5 * (1 + math.cos(math.pi * (epoch - 1) / schedule.max_epochs))
        rate = schedule.learning_rate * (SMALLEST_RATE + (1 - SMALLEST_RATE) * share)
        for index, real in inside.batches(size, generator):
            optimiser.step(
                (mean_loss(index, real) + 0.5 * decay * (theta * theta).sum(1)).sum(), rate
            )
        if watching:
            with torch.no_grad():
                score = mean_loss(outside.rows, outside.real).double()
            better = score < lowest
            lowest, found = torch.where(better, score, lowest), torch.where(better, epoch, found)
            best = torch.where(better[:, None], theta.detach(), best)
            history.append(score)
        if on_epoch is not None:
            on_epoch(epoch)
        if watching and epoch - int(found.max()) >= schedule.patience:
            break
    if not watching:
        best, found = theta.detach(), torch.full_like(found, epoch)
    if not bool(torch.isfinite(best).all()):
        raise FloatingPointError(
            "Training diverged: the weights are no longer finite. Use a smaller learning_rate, or "
            "check for extreme values."
        )
    modules = tuple(_filled(module, _with_scales(layers, _unpack(flat, shapes))) for flat in best)
    return Trained(modules, epoch, found, torch.stack(history) if history else torch.empty(0))


@dataclass(eq=False)
class _Adam:
    """Adam on a few tensors.

    (torch.optim would import the compiler first, which takes longer than training.)
    """

    parameters: list[Tensor]
    steps: int = 0

    def __post_init__(self) -> None:
        self.first = [torch.zeros_like(p) for p in self.parameters]
        self.second = [torch.zeros_like(p) for p in self.parameters]

    def step(
        self,
        loss: Tensor,
        rate: float,
        decay: tuple[float, float] = (0.9, 0.999),
        least: float = 1e-8,
    ) -> None:
        gradients = torch.autograd.grad(loss, self.parameters)
        self.steps += 1
        step = rate / (1 - decay[0] ** self.steps)
        root = math.sqrt(1 - decay[1] ** self.steps)
        with torch.no_grad():
            for p, g, m, v in zip(self.parameters, gradients, self.first, self.second, strict=True):
                m.lerp_(g, 1 - decay[0])
                v.mul_(decay[1]).addcmul_(g, g, value=1 - decay[1])
                p.addcdiv_(m, (v.sqrt() / root).add_(least), value=-step)


@dataclass(frozen=True, eq=False)
class _Index:
    """Rows of each member, padded to the same number: rows (M, k), real (M, k) is 0 where
    padded.
    """

    rows: Tensor
    real: Tensor

    def batches(self, size: int, generator: torch.Generator) -> list[tuple[Tensor, Tensor]]:
        """Batches in a new order for each member; one batch if it holds all rows."""
        count = self.rows.shape[1]
        if size >= count:
            return [(self.rows, self.real)]
        order = torch.rand(self.rows.shape, generator=generator, dtype=torch.float32).argsort(1)
        rows, real = self.rows.gather(1, order), self.real.gather(1, order)
        return list(zip(rows.split(size, 1), real.split(size, 1), strict=True))


def _index(chosen: Tensor) -> _Index:
    """bool (M, n) -> the rows that are True."""
    most = int(chosen.sum(1).max())
    order = (~chosen).to(torch.uint8).argsort(dim=1, stable=True)[:, :most]
    return _Index(order, chosen.gather(1, order).to(torch.float32))


def _initial(
    module: nn.Sequential,
    shapes: Mapping[str, torch.Size],
    members: int,
    start: Tensor | None,
    generator: torch.Generator,
) -> Tensor:
    """θ (M, P): weights N(0, 1/inputs), biases 0 (the last: `start`), small embeddings."""
    parts, dtype = [], next(module.parameters()).dtype
    for name, shape in shapes.items():
        if name == SCALES:
            parts.append(torch.ones(members, shape.numel(), dtype=dtype))
        elif isinstance(module.get_submodule(name.split(".")[0]), Embeddings):
            parts.append(first_weights(members, shape, generator, dtype))
        elif len(shape) == 2:
            parts.append(
                torch.randn(members, shape.numel(), generator=generator, dtype=dtype)
                / math.sqrt(shape[1])
            )
        else:
            parts.append(torch.zeros(members, shape.numel(), dtype=dtype))
    if start is not None:
        parts[-1] = start.to(dtype).expand(members, -1)
    return torch.cat(parts, 1)


def _unpack(flat: Tensor, shapes: Mapping[str, torch.Size]) -> dict[str, Tensor]:
    """θ (…, P) -> parameters by name."""
    parts = flat.split([shape.numel() for shape in shapes.values()], -1)
    return {
        name: part.unflatten(-1, shape)
        for (name, shape), part in zip(shapes.items(), parts, strict=True)
    }


def _forward(
    layers: list[tuple[str, nn.Module]], shapes: Mapping[str, torch.Size], theta: Tensor, x: Tensor
) -> Tensor:
    """f (M, B, C) of all members for θ (M, P) and x (M, B, d): batched products, half the time
    of `vmap`.
    """
    parameters = _with_scales(layers, _unpack(theta, shapes))
    for name, layer in layers:
        if isinstance(layer, nn.Linear):
            x = torch.baddbmm(
                parameters[f"{name}.bias"][:, None], x, parameters[f"{name}.weight"].mT
            )
        elif isinstance(layer, Embeddings):
            x = layer.stacked(
                x, [parameters[f"{name}.tables.{i}"] for i in range(len(layer.tables))]
            )
        else:
            x = layer(x)
    return x


def _with_scales(
    layers: list[tuple[str, nn.Module]], parameters: dict[str, Tensor]
) -> dict[str, Tensor]:
    """The parameters with the scales in the first linear layer, whose inputs then need no
    gradient.
    """
    scales = parameters.pop(SCALES, None)
    if scales is None:
        return parameters
    first = next(f"{name}.weight" for name, layer in layers if isinstance(layer, nn.Linear))
    return parameters | {first: parameters[first] * scales[..., None, :]}


def _empty(architecture: Architecture, rows: Rows) -> nn.Sequential:
    """The module without weights; its pieces have their edges."""
    module = architecture.build().to(rows.x.dtype)
    if isinstance(module[0], Pieces):
        place(module[0], rows.edges)
    return module


def _filled(module: nn.Sequential, parameters: Mapping[str, Tensor]) -> nn.Sequential:
    copy = deepcopy(module)
    copy.load_state_dict(dict(parameters), strict=False)
    return copy
