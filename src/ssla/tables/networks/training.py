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
from dataclasses import dataclass, field
from itertools import pairwise

import torch
from torch import Tensor, nn

from ssla._checks import unknown_name
from ssla.likelihoods import Likelihood
from ssla.network.unset import make_unset_linear
from ssla.tables.networks.embeddings import Embeddings, draw_first_weights
from ssla.tables.networks.pieces import Pieces
from ssla.tables.networks.threads import limit_threads

ACTIVATIONS: dict[str, type[nn.Module]] = {"relu": nn.ReLU, "silu": nn.SiLU, "tanh": nn.Tanh}
SMALLEST_LOG_VARIANCE = -14.0  # without it, σ of a noise-free target would go to zero
WORTH_THREADS = 30_000_000  # multiplications in one forward pass, from which threads help
MOST_EXPANDED = 20_000_000  # numbers: inputs with their pieces that are kept in memory
SCALES = "scales"  # of the inputs of the first layer, beside the module's own parameters
SMALLEST_RATE = 0.02  # of the learning rate, at the last epoch


@dataclass(frozen=True)
class Architecture:
    """The layers of a multilayer perceptron.

    pieces: the number of linear pieces of each input, () for none (see
    `ssla.tables.networks.pieces`).  levels, dimensions: the numbers of levels and of trained
    columns of inputs that are codes, 0 for numbers, () for none (see
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
        """The numbers of inputs of all linear layers, and of the outputs of the last."""
        embedded = sum(self.dimensions) - sum(count > 0 for count in self.levels)
        return (self.inputs + sum(self.pieces) + embedded, *self.hidden, self.outputs)

    def build(self) -> nn.Sequential:
        """Return the module with uninitialised parameters, so that no random number is drawn.

        Raises ValueError for an unknown activation.
        """
        if self.activation not in ACTIVATIONS:
            raise ValueError(unknown_name("activation", self.activation, ACTIVATIONS))
        layers: list[nn.Module] = [Pieces(self.pieces)] if self.pieces else []
        if self.levels:
            layers.append(Embeddings(self.levels, self.dimensions, self.inputs + sum(self.pieces)))
        for i, (width, following) in enumerate(pairwise(self.widths)):
            layers.append(make_unset_linear(width, following, torch.float32))
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
    """The data of all members: inputs x, targets y, row weights, and held-out rows.

    x (n, d), y (n,) or (n, D), weights (n,), held_out (M, n) bool.  edges: of the pieces of each
    column, if the architecture has pieces.  y_by_member (M, n): targets in place of y, if members
    have targets of their own.
    """

    x: Tensor
    y: Tensor
    weights: Tensor
    held_out: Tensor
    edges: tuple[Tensor, ...] = ()
    y_by_member: Tensor | None = None

    def targets(self, index: Tensor) -> Tensor:
        """Return the targets of the rows (M, B) of each member -> (M, B) or (M, B, D)."""
        return self.y[index] if self.y_by_member is None else self.y_by_member.gather(1, index)


@dataclass(frozen=True, eq=False)
class Trained:
    """The networks with their best weights, and the epoch of these weights."""

    modules: tuple[nn.Sequential, ...]
    epochs: int
    best_epoch: Tensor  # (M,)
    losses: Tensor  # validation loss by epoch (epochs, M)


def train_networks(
    architecture: Architecture,
    likelihood: Likelihood | None,
    rows: Rows,
    schedule: Schedule,
    seed: int,
    start: Tensor | None = None,
    on_epoch: Callable[[int], None] | None = None,
) -> Trained:
    """Train all members by Adam with a cosine schedule; each keeps the weights of its best epoch.

    The best epoch has the lowest loss on the member's held-out rows; without held-out rows it is
    the last one. Random numbers are drawn from an own generator only. Raises FloatingPointError if
    the training diverges.

    likelihood: None is Gaussian with unknown noise.  start (C,): the biases of the last layer.
    on_epoch: called with the number of each finished epoch.
    """
    multiplications = (
        len(rows.held_out)
        * (schedule.batch_size or len(rows.x))
        * sum(a * b for a, b in pairwise(architecture.widths))
    )
    with limit_threads(multiplications < WORTH_THREADS):
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
    """Train all members at once: arguments, result and errors are those of `train`."""
    generator = torch.Generator().manual_seed(seed)
    module = _build_empty(architecture, rows)
    shapes = {name: p.shape for name, p in module.named_parameters()}
    if architecture.pieces:
        shapes = {SCALES: torch.Size([architecture.widths[0]])} | shapes
    members = len(rows.held_out)
    theta = _initial_weights(module, shapes, members, start, generator).requires_grad_(True)
    # Weights (M, P) and, without a likelihood, log variances (M, C) are trained by one objective.
    objective = _Objective.build(module, shapes, theta, architecture, likelihood, rows)
    inside = _pad_rows(~rows.held_out)
    outside = _pad_rows(rows.held_out)
    decay = schedule.precision / (rows.weights[inside.rows] * inside.real).sum(1)  # τ/W (M,)
    optimiser = _Adam(objective.parameters)
    training_rows = inside.rows.shape[1]
    batch_size = min(schedule.batch_size or training_rows, training_rows)
    best = _BestWeights.initial(theta)
    has_held_out = outside.rows.shape[1] > 0
    for epoch in range(1, schedule.max_epochs + 1):
        rate = _learning_rate(schedule, epoch)
        for index, real in inside.batches(batch_size, generator):
            losses = objective.mean_losses(index, real) + 0.5 * decay * (theta * theta).sum(1)
            optimiser.step(losses.sum(), rate)
        if has_held_out:
            with torch.no_grad():
                scores = objective.mean_losses(outside.rows, outside.real).double()
            best.update(epoch, scores, theta)
        if on_epoch is not None:
            on_epoch(epoch)
        # Stop when no member has improved for `patience` epochs.
        if has_held_out and epoch - int(best.epochs.max()) >= schedule.patience:
            break
    if not has_held_out:
        best.theta = theta.detach()
        best.epochs = torch.full_like(best.epochs, epoch)
    if not bool(torch.isfinite(best.theta).all()):
        raise FloatingPointError(
            "Training diverged: the weights are no longer finite. Use a smaller learning_rate, or "
            "check for extreme values."
        )
    # The scales of the inputs become part of the first layer.
    modules = tuple(
        _fill_module(module, _apply_scales(objective.layers, _unpack_weights(flat, shapes)))
        for flat in best.theta
    )
    history = torch.stack(best.history) if best.history else torch.empty(0)
    return Trained(modules, epoch, best.epochs, history)


def _learning_rate(schedule: Schedule, epoch: int) -> float:
    """Return the rate of an epoch (from 1): half a cosine, down to SMALLEST_RATE of the first."""
    share = 0.5 * (1 + math.cos(math.pi * (epoch - 1) / schedule.max_epochs))
    return schedule.learning_rate * (SMALLEST_RATE + (1 - SMALLEST_RATE) * share)


@dataclass(frozen=True, eq=False)
class _Objective:
    """The negative log-likelihood of all members, as a function of their weights."""

    theta: Tensor  # (M, P)
    log_variances: Tensor  # (M, C), trained where the likelihood is None
    shapes: Mapping[str, torch.Size]  # of the parameters in a row of theta
    layers: list[tuple[str, nn.Module]]  # that are applied to x
    x: Tensor  # (n, d), or already with pieces
    likelihood: Likelihood | None
    rows: Rows

    @staticmethod
    def build(
        module: nn.Sequential,
        shapes: Mapping[str, torch.Size],
        theta: Tensor,
        architecture: Architecture,
        likelihood: Likelihood | None,
        rows: Rows,
    ) -> _Objective:
        """Return the objective for weights theta (M, P)."""
        log_variances = torch.zeros(
            len(theta),
            architecture.outputs,
            dtype=rows.x.dtype,
            requires_grad=likelihood is None,
        )
        x = rows.x
        layers = list(module.named_children())
        # Pieces have no parameters, so they are computed once for all epochs if memory allows.
        if isinstance(module[0], Pieces) and len(x) * architecture.widths[0] <= MOST_EXPANDED:
            x = module[0](x)
            layers = layers[1:]
        return _Objective(
            theta=theta,
            log_variances=log_variances,
            shapes=shapes,
            layers=layers,
            x=x,
            likelihood=likelihood,
            rows=rows,
        )

    @property
    def parameters(self) -> list[Tensor]:
        """The tensors that are trained."""
        return [self.theta, self.log_variances] if self.likelihood is None else [self.theta]

    def row_losses(self, index: Tensor) -> Tensor:
        """Return −log p(y|f) (M, B) of the rows (M, B) of each member, not weighted.

        Gaussian noise with unknown variance: up to a constant.
        """
        f = _compute_outputs(self.layers, self.shapes, self.theta, self.x[index])
        y = self.rows.targets(index)
        if self.likelihood is not None:
            return -self.likelihood.log_prob(y, f)
        s = self.log_variances.clamp_min(SMALLEST_LOG_VARIANCE)[:, None]
        r = y.reshape(f.shape) - f
        losses: Tensor = 0.5 * (r * r * torch.exp(-s) + s).sum(-1)
        return losses

    def mean_losses(self, index: Tensor, real: Tensor) -> Tensor:
        """Return the weighted mean loss (M,) of rows (M, B); real (M, B) is 0 where padded."""
        w = self.rows.weights[index] * real
        return (w * self.row_losses(index)).sum(1) / w.sum(1).clamp_min(1e-12)


@dataclass(eq=False)
class _BestWeights:
    """The weights of each member's best epoch so far."""

    theta: Tensor  # (M, P)
    epochs: Tensor  # (M,)
    lowest: Tensor  # (M,): validation loss there
    history: list[Tensor] = field(default_factory=list)  # validation loss (M,) of each epoch

    @staticmethod
    def initial(theta: Tensor) -> _BestWeights:
        """Return the weights (M, P) before the first epoch."""
        members = len(theta)
        return _BestWeights(
            theta.detach().clone(),
            torch.zeros(members, dtype=torch.long),
            torch.full((members,), math.inf, dtype=torch.float64),
        )

    def update(self, epoch: int, scores: Tensor, theta: Tensor) -> None:
        """Take the weights (M, P) of members whose validation loss (M,) is the lowest so far."""
        better = scores < self.lowest
        self.lowest = torch.where(better, scores, self.lowest)
        self.epochs = torch.where(better, epoch, self.epochs)
        self.theta = torch.where(better[:, None], theta.detach(), self.theta)
        self.history.append(scores)


@dataclass(eq=False)
class _Adam:
    """Adam on a few tensors.

    (torch.optim would import the compiler first, which takes longer than training.)
    """

    parameters: list[Tensor]
    steps: int = 0

    def __post_init__(self) -> None:
        """Set the first and the second moments of the gradient to zero."""
        self.first = [torch.zeros_like(p) for p in self.parameters]
        self.second = [torch.zeros_like(p) for p in self.parameters]

    def step(
        self,
        loss: Tensor,
        rate: float,
        decay: tuple[float, float] = (0.9, 0.999),
        least: float = 1e-8,
    ) -> None:
        """Move the parameters by one step down the gradient of the loss ().

        decay: β₁ and β₂ of the moments.  least: ε, added to the root of the second moment.
        """
        gradients = torch.autograd.grad(loss, self.parameters)
        self.steps += 1
        # The corrections for moments that start at zero.
        step = rate / (1 - decay[0] ** self.steps)
        root = math.sqrt(1 - decay[1] ** self.steps)
        with torch.no_grad():
            for p, g, m, v in zip(self.parameters, gradients, self.first, self.second, strict=True):
                m.lerp_(g, 1 - decay[0])
                v.mul_(decay[1]).addcmul_(g, g, value=1 - decay[1])
                p.addcdiv_(m, (v.sqrt() / root).add_(least), value=-step)


@dataclass(frozen=True, eq=False)
class _PaddedRows:
    """Numbers of the rows of each member (M, k), padded to one length.

    real (M, k) is 0 where padded.
    """

    rows: Tensor
    real: Tensor

    def batches(self, size: int, generator: torch.Generator) -> list[tuple[Tensor, Tensor]]:
        """Return batches in a new random order for each member; one batch if it holds all rows.

        Each has the numbers of rows (M, B), and which are real (M, B).
        """
        count = self.rows.shape[1]
        if size >= count:
            return [(self.rows, self.real)]
        order = torch.rand(self.rows.shape, generator=generator, dtype=torch.float32).argsort(1)
        rows = self.rows.gather(1, order)
        real = self.real.gather(1, order)
        return list(zip(rows.split(size, 1), real.split(size, 1), strict=True))


def _pad_rows(chosen: Tensor) -> _PaddedRows:
    """Return the numbers of each member's chosen rows (M, n) bool."""
    most = int(chosen.sum(1).max())
    order = (~chosen).to(torch.uint8).argsort(dim=1, stable=True)[:, :most]
    return _PaddedRows(order, chosen.gather(1, order).to(torch.float32))


def _initial_weights(
    module: nn.Sequential,
    shapes: Mapping[str, torch.Size],
    members: int,
    start: Tensor | None,
    generator: torch.Generator,
) -> Tensor:
    """Draw θ (M, P): weights N(0, 1/inputs), biases 0 (the last: `start` (C,)), small embeddings.

    shapes: of the parameters of the module, and of scales, which start at 1.
    """
    dtype = next(module.parameters()).dtype
    all_weights = []
    for name, shape in shapes.items():
        if name == SCALES:
            weights = torch.ones(members, shape.numel(), dtype=dtype)
        elif isinstance(module.get_submodule(name.split(".")[0]), Embeddings):
            weights = draw_first_weights(members, shape, generator, dtype)
        elif len(shape) == 2:
            weights = torch.randn(members, shape.numel(), generator=generator, dtype=dtype)
            weights = weights / math.sqrt(shape[1])
        else:
            weights = torch.zeros(members, shape.numel(), dtype=dtype)
        all_weights.append(weights)
    if start is not None:
        all_weights[-1] = start.to(dtype).expand(members, -1)
    return torch.cat(all_weights, 1)


def _unpack_weights(flat: Tensor, shapes: Mapping[str, torch.Size]) -> dict[str, Tensor]:
    """Return the parameters by name (…, *shape) of flat weights (…, P)."""
    weights = flat.split([shape.numel() for shape in shapes.values()], -1)
    return {
        name: values.unflatten(-1, shape)
        for (name, shape), values in zip(shapes.items(), weights, strict=True)
    }


def _compute_outputs(
    layers: list[tuple[str, nn.Module]], shapes: Mapping[str, torch.Size], theta: Tensor, x: Tensor
) -> Tensor:
    """Compute the outputs f (M, B, C) of all members for θ (M, P) and x (M, B, d).

    Batched products take half the time of `vmap`.
    """
    parameters = _apply_scales(layers, _unpack_weights(theta, shapes))
    for name, layer in layers:
        if isinstance(layer, nn.Linear):
            bias = parameters[f"{name}.bias"][:, None]
            x = torch.baddbmm(bias, x, parameters[f"{name}.weight"].mT)
        elif isinstance(layer, Embeddings):
            tables = [parameters[f"{name}.tables.{i}"] for i in range(len(layer.tables))]
            x = layer.embed_stacked(x, tables)
        else:
            x = layer(x)
    return x


def _apply_scales(
    layers: list[tuple[str, nn.Module]], parameters: dict[str, Tensor]
) -> dict[str, Tensor]:
    """Return the parameters (…, *shape) with the scales multiplied into the first linear layer.

    Its inputs then need no gradient. Without scales the parameters are returned as they are.
    """
    scales = parameters.pop(SCALES, None)
    if scales is None:
        return parameters
    first = next(f"{name}.weight" for name, layer in layers if isinstance(layer, nn.Linear))
    return parameters | {first: parameters[first] * scales[..., None, :]}


def _build_empty(architecture: Architecture, rows: Rows) -> nn.Sequential:
    """Build the module with uninitialised weights; its pieces have the edges of the rows."""
    module = architecture.build().to(rows.x.dtype)
    if isinstance(module[0], Pieces):
        module[0].set_edges(rows.edges)
    return module


def _fill_module(module: nn.Sequential, parameters: Mapping[str, Tensor]) -> nn.Sequential:
    """Return a copy of the module with the parameters of one member, by name."""
    copy = deepcopy(module)
    copy.load_state_dict(dict(parameters), strict=False)
    return copy
