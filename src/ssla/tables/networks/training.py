"""Trains small networks for tables, several together.

Each has its own initialisation, order of rows and held-out rows. The objective is the negative log
posterior of a row, −log p(y|f) + (τ/2W)‖θ‖², with W the total weight of the training rows: weight
decay *is* the Gaussian prior of precision τ. With unknown Gaussian noise, σ is trained too. Members
are stacked and computed by batched products, so five networks take about twice the time of a
single network.
Rows are selected by index, without a DataLoader.

Networks with pieces also train a scale for each input of their first layer, W → W diag(s) with s =
1 at the start. A step then weakens or strengthens an input as a whole. At the end the scales are
multiplied into W.
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
from ssla.tables.networks.embeddings import Embeddings, draw_first_embeddings
from ssla.tables.networks.pieces import Pieces
from ssla.tables.networks.threads import limit_threads

ACTIVATIONS: dict[str, type[nn.Module]] = {"relu": nn.ReLU, "silu": nn.SiLU, "tanh": nn.Tanh}
SMALLEST_LOG_VARIANCE = -14.0  # keeps σ of a target without noise above zero; a guess
WORTH_THREADS = 30_000_000  # multiplications in one forward pass, from which threads help; a guess
MOST_EXPANDED = 20_000_000  # numbers of the inputs with their pieces, kept in memory; a guess
# The name of the scales of the first layer's inputs. They are trained beside the parameters of the
# module.
SCALES = "scales"
SMALLEST_RATE = 0.02  # share of the learning rate towards the last epoch; a guess


@dataclass(frozen=True)
class Architecture:
    """The layers of a multilayer perceptron.

    pieces: the number of linear pieces of each input; () if no input has any (see
    `ssla.tables.networks.pieces`).  levels, dimensions: for each input the number of its levels and
    of their trained columns if it holds codes, 0 if it holds numbers; () if no input holds codes
    (see `ssla.tables.networks.embeddings`).
    """

    inputs: int  # number of columns
    outputs: int
    hidden: tuple[int, ...] = (50, 50)  # widths of the hidden layers
    activation: str = "silu"
    pieces: tuple[int, ...] = ()
    levels: tuple[int, ...] = ()
    dimensions: tuple[int, ...] = ()

    @property
    def widths(self) -> tuple[int, ...]:
        """The number of inputs of each linear layer, and then of the outputs of the last one."""
        # Embeddings replace each column of codes by several columns.
        coded = sum(count > 0 for count in self.levels)
        first = self.inputs + sum(self.pieces) + sum(self.dimensions) - coded
        return (first, *self.hidden, self.outputs)

    def build(self) -> nn.Sequential:
        """Return the module with uninitialised parameters in float32, in eval mode.

        No random number is drawn. Raises ValueError for an unknown activation.
        """
        if self.activation not in ACTIVATIONS:
            raise ValueError(unknown_name("activation", self.activation, ACTIVATIONS))
        layers: list[nn.Module] = [Pieces(self.pieces)] if self.pieces else []
        if self.levels:
            layers.append(Embeddings(self.levels, self.dimensions, self.inputs + sum(self.pieces)))
        for i, (width, following) in enumerate(pairwise(self.widths)):
            layers.append(make_unset_linear(width, following, torch.float32))
            # There is no activation after the last layer.
            if i < len(self.hidden):
                layers.append(ACTIVATIONS[self.activation]())

        return nn.Sequential(*layers).eval()


@dataclass(frozen=True)
class Schedule:
    """Epochs, batches, learning rate and weight decay of a training."""

    max_epochs: int = 200
    batch_size: int | None = 64  # None: all rows at once
    learning_rate: float = 1e-2  # of the first epoch
    patience: int = 40  # epochs without improvement after which the training stops
    precision: float = 1.0  # τ of the Gaussian prior


@dataclass(frozen=True, eq=False)
class Rows:
    """The data of all M members."""

    x: Tensor  # inputs (n, d)
    y: Tensor  # targets (n,) or (n, D)
    weights: Tensor  # row weights (n,)
    held_out: Tensor  # (M, n) bool: the rows that each member holds out
    edges: tuple[Tensor, ...] = ()  # of the pieces of each column, if the architecture has pieces
    y_by_member: Tensor | None = None  # targets (M, n) in place of y, if members differ in them

    def select_targets(self, index: Tensor) -> Tensor:
        """Return the targets (M, B) or (M, B, D) of rows, given by their indices (M, B)."""
        return self.y[index] if self.y_by_member is None else self.y_by_member.gather(1, index)


@dataclass(frozen=True, eq=False)
class Trained:
    """The networks of M members with their best weights."""

    modules: tuple[nn.Sequential, ...]
    epochs: int  # that were trained
    best_epoch: Tensor  # that of the weights (M,), counted from one
    losses: Tensor  # at the held-out rows, by epoch (epochs, M); (0,) without held-out rows


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

    The best epoch has the lowest loss at the member's held-out rows. Without held-out rows it is
    the last one. All random numbers are drawn from a new generator with this seed. Raises
    ValueError for an unknown activation, and FloatingPointError if the training diverges.

    architecture: the layers of each network.  likelihood: None is Gaussian with unknown noise.
    rows: the training rows, and which each member holds out.  start (C,): the first biases of the
    last layer; None: zero.  on_epoch: a function that is called with the number of each finished
    epoch.
    """
    multiplications = (
        len(rows.held_out)
        * (schedule.batch_size or len(rows.x))
        * sum(inputs * outputs for inputs, outputs in pairwise(architecture.widths))
    )
    with limit_threads(small=multiplications < WORTH_THREADS):
        return _train_members(architecture, likelihood, rows, schedule, seed, start, on_epoch)


@torch.enable_grad()
def _train_members(
    architecture: Architecture,
    likelihood: Likelihood | None,
    rows: Rows,
    schedule: Schedule,
    seed: int,
    start: Tensor | None,
    on_epoch: Callable[[int], None] | None,
) -> Trained:
    """Train all members at once; arguments, result and errors are those of `train_networks`."""
    generator = torch.Generator().manual_seed(seed)

    # All weights of a member are one row of theta.
    module = _build_module(architecture, rows)
    shapes = {name: p.shape for name, p in module.named_parameters()}

    # The scales come first, because the start of the last layer is written to the last weights.
    if architecture.pieces:
        shapes = {SCALES: torch.Size([architecture.widths[0]])} | shapes
    theta = _draw_initial_weights(module, shapes, len(rows.held_out), start, generator)
    theta.requires_grad_(True)

    objective = _Objective.build(module, shapes, theta, architecture, likelihood, rows)
    best, epochs = _run_epochs(objective, schedule, generator, on_epoch)
    if not bool(torch.isfinite(best.theta).all()):
        raise FloatingPointError(
            "Training diverged: the weights are no longer finite. Use a smaller learning_rate, or "
            "check for extreme values."
        )

    parameters = [
        _apply_scales(objective.layers, _unpack_weights(flat, shapes)) for flat in best.theta
    ]
    history = torch.stack(best.history) if best.history else torch.empty(0)
    return Trained(
        modules=tuple(_copy_with_parameters(module, values) for values in parameters),
        epochs=epochs,
        best_epoch=best.epochs,
        losses=history,
    )


def _run_epochs(
    objective: _Objective,
    schedule: Schedule,
    generator: torch.Generator,
    on_epoch: Callable[[int], None] | None,
) -> tuple[_BestWeights, int]:
    """Minimise the objective, and return the best weights and the number of epochs.

    The parameters of the objective are changed in place. The training stops early when no member
    has improved at its held-out rows for `patience` epochs. Without held-out rows the last weights
    count as the best.

    schedule: has at least one epoch.  generator: draws the orders of the rows.  on_epoch: as in
    `train_networks`.
    """
    rows = objective.rows
    theta = objective.theta
    training = _pad_rows(~rows.held_out)
    held_out = _pad_rows(rows.held_out)
    has_held_out = held_out.rows.shape[1] > 0
    decay = schedule.precision / (rows.weights[training.rows] * training.real).sum(1)  # τ/W (M,)
    training_count = training.rows.shape[1]
    batch_size = min(schedule.batch_size or training_count, training_count)
    optimiser = _Adam(objective.parameters)
    best = _BestWeights.before_training(theta)

    for epoch in range(1, schedule.max_epochs + 1):
        rate = _compute_learning_rate(schedule, epoch)
        for index, real in training.draw_batches(batch_size, generator):
            mean_losses = objective.compute_mean_losses(index, real)
            losses = mean_losses + 0.5 * decay * (theta * theta).sum(1)
            # No member depends on the weights of another, so the sum trains each by itself.
            optimiser.step(losses.sum(), rate)
        if has_held_out:
            with torch.no_grad():
                scores = objective.compute_mean_losses(held_out.rows, held_out.real).double()
            best.update(epoch, scores, theta)
        if on_epoch is not None:
            on_epoch(epoch)
        if has_held_out and epoch - int(best.epochs.max()) >= schedule.patience:
            break

    if not has_held_out:
        best.theta = theta.detach()
        best.epochs = torch.full_like(best.epochs, epoch)

    return best, epoch


def _compute_learning_rate(schedule: Schedule, epoch: int) -> float:
    """Return the learning rate of an epoch, counted from one.

    The rate falls like half a cosine, from that of the schedule towards SMALLEST_RATE of it.
    """
    share = 0.5 * (1 + math.cos(math.pi * (epoch - 1) / schedule.max_epochs))
    return schedule.learning_rate * (SMALLEST_RATE + (1 - SMALLEST_RATE) * share)


@dataclass(frozen=True, eq=False)
class _Objective:
    """The negative log-likelihood of all members, as a function of their weights."""

    theta: Tensor  # θ (M, P)
    log_variances: Tensor  # s (M, C), trained where the likelihood is None
    shapes: Mapping[str, torch.Size]  # of the parameters in a row of theta, by name
    layers: list[tuple[str, nn.Module]]  # those that are applied to x, with their names
    x: Tensor  # (n, d), or already with the pieces appended
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
        """Return the objective for weights theta (M, P), with log variances that start at zero.

        module, shapes: the layers, and the shapes of the parameters in a row of theta.
        """
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
        """The tensors that are trained: θ (M, P), and log variances (M, C) of an unknown noise."""
        return [self.theta, self.log_variances] if self.likelihood is None else [self.theta]

    def compute_row_losses(self, index: Tensor) -> Tensor:
        """Return −log p(y|f) (M, B) of each row, without row weights.

        index (M, B): the rows of each member. For a Gaussian with unknown variance e^s the constant
        of the density is left out.
        """
        f = _compute_outputs(self.layers, self.shapes, self.theta, self.x[index])
        y = self.rows.select_targets(index)
        if self.likelihood is not None:
            return -self.likelihood.log_prob(y, f)
        s = self.log_variances.clamp_min(SMALLEST_LOG_VARIANCE)[:, None]
        r = y.reshape(f.shape) - f
        losses: Tensor = 0.5 * (r * r * torch.exp(-s) + s).sum(-1)
        return losses

    def compute_mean_losses(self, index: Tensor, real: Tensor) -> Tensor:
        """Return the weighted mean loss (M,) of the rows of each member.

        index (M, B): the rows.  real (M, B): 1, or 0 for padding. A member whose rows are all
        padding has the loss 0.
        """
        weights = self.rows.weights[index] * real
        # The bound keeps 0/0 from being NaN where all rows are padding.
        total = weights.sum(1).clamp_min(1e-12)
        return (weights * self.compute_row_losses(index)).sum(1) / total


@dataclass(eq=False)
class _BestWeights:
    """The weights of each member's best epoch so far, by the loss at its held-out rows."""

    theta: Tensor  # (M, P)
    epochs: Tensor  # the best epochs (M,), counted from one; 0 before the first
    lowest: Tensor  # the loss there (M,)
    history: list[Tensor] = field(default_factory=list)  # the loss (M,) of every epoch

    @staticmethod
    def before_training(theta: Tensor) -> _BestWeights:
        """Return a copy of the weights theta (M, P), with an infinite loss and no history."""
        members = len(theta)
        return _BestWeights(
            theta.detach().clone(),
            torch.zeros(members, dtype=torch.long),
            torch.full((members,), math.inf, dtype=torch.float64),
        )

    def update(self, epoch: int, scores: Tensor, theta: Tensor) -> None:
        """Take over the weights theta (M, P) of members whose scores (M,) are the lowest so far.

        scores: the losses at the held-out rows after this epoch, which are added to `history`.
        """
        better = scores < self.lowest
        self.lowest = torch.where(better, scores, self.lowest)
        self.epochs = torch.where(better, epoch, self.epochs)
        self.theta = torch.where(better[:, None], theta.detach(), self.theta)
        self.history.append(scores)


@dataclass(eq=False)
class _Adam:
    """The optimiser Adam for a few tensors, which it changes in place.

    torch.optim is not used, because it imports the compiler, which takes longer than the training.
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

        rate: the learning rate.  decay: β₁ and β₂ of the moments.  least: ε, added to the root of
        the second moment. The defaults of `decay` and `least` are those of the Adam paper.
        """
        gradients = torch.autograd.grad(loss, self.parameters)
        beta_1, beta_2 = decay
        self.steps += 1

        # The moments start at zero, and these factors correct the bias that follows from it.
        step = rate / (1 - beta_1**self.steps)
        root = math.sqrt(1 - beta_2**self.steps)
        with torch.no_grad():
            for parameter, gradient, first, second in zip(
                self.parameters, gradients, self.first, self.second, strict=True
            ):
                first.lerp_(gradient, 1 - beta_1)
                second.mul_(beta_2).addcmul_(gradient, gradient, value=1 - beta_2)
                parameter.addcdiv_(first, (second.sqrt() / root).add_(least), value=-step)


@dataclass(frozen=True, eq=False)
class _PaddedRows:
    """The indices of the rows of each member, padded to one length k."""

    rows: Tensor  # (M, k)
    real: Tensor  # (M, k): 1, or 0 for padding

    def draw_batches(self, size: int, generator: torch.Generator) -> list[tuple[Tensor, Tensor]]:
        """Return batches of at most `size` rows, in a new random order for each member.

        Each batch has the indices of its rows (M, B), and `real` (M, B). If one batch holds all
        rows, they keep their order, and no random number is drawn.
        """
        count = self.rows.shape[1]
        if size >= count:
            return [(self.rows, self.real)]
        order = torch.rand(self.rows.shape, generator=generator, dtype=torch.float32).argsort(1)
        rows = self.rows.gather(1, order)
        real = self.real.gather(1, order)
        return list(zip(rows.split(size, 1), real.split(size, 1), strict=True))


def _pad_rows(chosen: Tensor) -> _PaddedRows:
    """Return the indices of the chosen rows (M, n) bool of each member, padded to one length.

    The padding has the indices of rows that are not chosen.
    """
    most = int(chosen.sum(1).max())
    # A stable sort by "not chosen" brings the chosen rows to the front, in their order.
    order = (~chosen).to(torch.uint8).argsort(dim=1, stable=True)[:, :most]
    return _PaddedRows(order, chosen.gather(1, order).to(torch.float32))


def _draw_initial_weights(
    module: nn.Sequential,
    shapes: Mapping[str, torch.Size],
    members: int,
    start: Tensor | None,
    generator: torch.Generator,
) -> Tensor:
    """Draw the weights θ (M, P) with which the training starts.

    Matrices are from N(0, 1/inputs), embeddings are small random numbers, scales are 1, and biases
    are 0. The biases of the last layer are `start` (C,) if it is given.  shapes: the shapes of the
    scales and the parameters by name, the biases of the last layer at the end.

    module: the layers.  members: M.  generator: draws the weights.
    """
    dtype = next(module.parameters()).dtype
    all_weights = []
    for name, shape in shapes.items():
        if name == SCALES:
            weights = torch.ones(members, shape.numel(), dtype=dtype)
        elif isinstance(module.get_submodule(name.split(".")[0]), Embeddings):
            weights = draw_first_embeddings(members, shape, generator, dtype)
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
    """Return the parameters (…, *shape) by name, given as flat weights (…, P).

    shapes: those of the parameters, in their order in the flat weights.
    """
    weights = flat.split([shape.numel() for shape in shapes.values()], -1)
    return {
        name: values.unflatten(-1, shape)
        for (name, shape), values in zip(shapes.items(), weights, strict=True)
    }


def _compute_outputs(
    layers: list[tuple[str, nn.Module]], shapes: Mapping[str, torch.Size], theta: Tensor, x: Tensor
) -> Tensor:
    """Compute the outputs f (M, B, C) of all members for θ (M, P) and x (M, B, d).

    layers: with their names in the module.  shapes: those of the parameters in a row of θ. Batched
    products take half the time of `torch.func.vmap`.
    """
    parameters = _apply_scales(layers, _unpack_weights(theta, shapes))
    for name, layer in layers:
        if isinstance(layer, nn.Linear):
            bias = parameters[f"{name}.bias"][:, None]  # (M, 1, outputs)
            weight = parameters[f"{name}.weight"]  # (M, outputs, inputs)
            x = torch.baddbmm(bias, x, weight.mT)
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

    The result has no scales any more. Scaled weights give the same outputs as scaled inputs, but
    the inputs need no gradient. Without scales the parameters are returned as they are.
    """
    if SCALES not in parameters:
        return parameters
    scales = parameters[SCALES]
    of_module = {name: values for name, values in parameters.items() if name != SCALES}
    first = next(f"{name}.weight" for name, layer in layers if isinstance(layer, nn.Linear))
    return of_module | {first: of_module[first] * scales[..., None, :]}


def _build_module(architecture: Architecture, rows: Rows) -> nn.Sequential:
    """Build the module with uninitialised weights, in the dtype of x; its pieces have their edges.

    Raises ValueError for an unknown activation.
    """
    module = architecture.build().to(rows.x.dtype)
    if isinstance(module[0], Pieces):
        module[0].set_edges(rows.edges)
    return module


def _copy_with_parameters(module: nn.Sequential, parameters: Mapping[str, Tensor]) -> nn.Sequential:
    """Return a copy of the module with the parameters of one member, by name."""
    member = deepcopy(module)
    # Not strict, because the edges of pieces are not parameters: they are copied with the module.
    member.load_state_dict(dict(parameters), strict=False)
    return member
