"""Estimates the memory and the passes of a fit, and the gradients of refits, before they start.

The estimate uses the shapes in the module and needs no forward pass.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor, nn

from ssla._checks import in_plain_torch
from ssla.curvature import Extent, Structure, resolve_structure
from ssla.curvature.automatic import AUTO, choose_structure, describe_time
from ssla.curvature.memory import DEFAULT_BUDGET, describe_affordable_structures, describe_bytes
from ssla.curvature.structure import MANY_CLASSES
from ssla.network.frozen import Output, check_output_argument
from ssla.network.head import MATRICES_PER_ROW
from ssla.network.opening import ALL, LAST_LAYER, list_trainable_names, select_parameter_names

ROUNDS = "10 to 30 for the variational Gaussian (none with gaussian='laplace')"
# Passes of one refit over the rows, by whether it is of a last layer: the usual number, and that
# for a y far from its prediction. Where they were measured is not recorded.
GRADIENTS = {True: (4, 20), False: (15, 40)}
HISTORY = 64  # vectors of P numbers that a refit of all weights holds; a guess
MATRICES = 6  # matrices P × P that a refit of a last layer holds; a guess
TASKS = 256  # refits that are solved together, as in `ssla.refit.weights.all_weights`
# A gradient takes two operations for each row and weight in the forward pass, and four backward.
OPERATIONS = 6
CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)


@dataclass(frozen=True)
class Cost:
    """Bytes and passes of one fit, as a table when printed."""

    rows: int
    parameters: int  # free ones
    outputs: int
    structure: str  # its name
    statistics: int  # bytes
    per_row: int  # bytes of each row of a chunk, in addition to the network's activations
    passes: str  # in words
    budget: int  # bytes
    instead: str  # structures that fit, in words
    refits: int = 0  # refits of the weights, one for each (x, y)
    # Passes over the rows of all refits together: the usual number, and that if every y is far from
    # its prediction.
    gradients: tuple[int, int] = (0, 0)
    refit_memory: int = 0  # bytes of the refits that are solved together
    # Of one core, without the network's own forward passes; NaN if not known for this structure.
    seconds: float = math.nan
    choice: str = ""  # why the structure was chosen, where none was asked for

    @property
    def fits(self) -> bool:
        """Return whether the statistics fit the memory budget.

        Rows always fit: they are read in chunks.
        """
        return self.statistics <= self.budget

    def __str__(self) -> str:
        """Return the table, with one quantity on each line.

        The lines on time and refits are left out where these are not known or not planned.
        """
        verdict = (
            f"{'within' if self.fits else 'BEYOND'} the budget of {describe_bytes(self.budget)}"
        )
        lines = [
            f"rows          {self.rows:,}: read in chunks, memory does not grow with them",
            f"parameters    {self.parameters:,} free, {self.outputs} "
            f"output{'s' * (self.outputs != 1)}",
            f"statistics    {describe_bytes(self.statistics)} ({self.structure}), {verdict}",
            f"each row      {describe_bytes(self.per_row)} while its chunk is read",
            f"passes        {self.passes}",
        ]
        if self.choice:
            lines.insert(2, f"structure     {self.structure} (chosen: {self.choice})")
        if not math.isnan(self.seconds):
            lines.append(
                f"time          about {describe_time(self.seconds)} on one core, without the "
                "network's own passes"
            )
        if self.refits:
            few, many = self.gradients
            lines.append(
                f"refits        {self.refits:,}: {few:,} to {many:,} gradients over all rows "
                f"({few // self.refits} to {many // self.refits} for each), about "
                f"{_describe_operations(OPERATIONS * few * self.rows * self.parameters)} to "
                f"{_describe_operations(OPERATIONS * many * self.rows * self.parameters)}, in "
                f"{describe_bytes(self.refit_memory)}"
            )
        if not self.fits:
            lines.append(f"instead       {self.instead}, or a larger memory_budget")

        return "\n".join(lines)


@in_plain_torch
def estimate_cost(
    model: nn.Module,
    n: int,
    *,
    weights: str | list[str] | tuple[str, ...] = LAST_LAYER,
    structure: str | Structure = AUTO,
    gaussian: bool = True,
    output: Output = None,
    memory_budget: int | None = None,
    refits: int = 0,
) -> Cost:
    """Estimate the memory, passes and seconds of `ssla.fit` of a model to n rows.

    weights, structure and output are those of `fit`; the estimate does not depend on output.
    Seconds are those of one core for a dense or kfac fit without a given prior; the network's own
    forward passes come on top. The last layer is assumed to be the last nn.Linear of the module;
    `fit` itself finds it in the forward pass. gaussian: whether the likelihood is Gaussian with
    constant noise; then a last layer is polished without a further pass. More than 1,000 outputs of
    another likelihood are taken for classes. memory_budget: in bytes; None for the default. refits:
    how many refits of the weights are planned, one for each pair (x, y); a whole predictive takes
    about 10 to 20 for each x. Their operations do not include determinants, and assume that a row
    uses each weight once. Raises ValueError for a module without an nn.Linear, for unknown names
    and for refits that are not a whole number from 0, and TypeError for an output of another type.

    >>> cost = ssla.estimate_cost(model, 1_000_000, weights="all")  # doctest: +SKIP
    """
    automatic = isinstance(structure, str) and structure == AUTO
    # With "auto", `choose_structure` below replaces this one.
    chosen = resolve_structure("dense" if automatic else structure)
    check_output_argument(output)
    last = _find_last_linear(model)
    head_names = _find_parameter_names(model, last)
    names = head_names if weights == LAST_LAYER else _select_names(model, weights)
    shapes = dict(model.named_parameters())
    parameters = sum(shapes[name].numel() for name in names)
    outputs = last.out_features
    extent = Extent(parameters, outputs, _list_layer_shapes(model, names), n, averages=not gaussian)
    budget = DEFAULT_BUDGET if memory_budget is None else memory_budget
    reason = ""
    if automatic:
        chosen, reason = choose_structure(extent, budget)
    head = set(names) <= set(head_names)
    if head and not gaussian and outputs > MANY_CLASSES:
        chosen = chosen.for_many_classes()
    if isinstance(refits, bool) or not isinstance(refits, int) or refits < 0:
        raise ValueError(f"refits must be a whole number from 0, but is {refits!r}.")
    few, many = GRADIENTS[head]
    return Cost(
        rows=n,
        parameters=parameters,
        outputs=outputs,
        structure=chosen.name,
        statistics=chosen.memory(extent),
        per_row=_count_bytes_per_row(chosen, extent, head),
        passes=_describe_passes(chosen, gaussian, head),
        budget=budget,
        instead=describe_affordable_structures(chosen.name, extent, budget),
        refits=refits,
        gradients=(few * refits, many * refits),
        refit_memory=_estimate_refit_memory(parameters, head, refits, budget),
        seconds=chosen.estimate_seconds(extent),
        choice=reason,
    )


def _count_bytes_per_row(structure: Structure, extent: Extent, head: bool) -> int:
    """Return the bytes of one row of a chunk, without the network's activations.

    All numbers count as float64, 8 bytes. head: whether the free parameters are those of a last
    layer. The figures follow those of `LastLayer.bytes_per_row` and of the plans of layers.
    """
    outputs = extent.outputs
    if head:
        features = extent.size // outputs
        # A diagonal in the outputs needs no C×C matrices for each row.
        matrices = 0 if structure.diagonal_outputs else MATRICES_PER_ROW * outputs**2
        return 8 * (features * (outputs + 2) + matrices)
    if structure.needs_jacobian_entries:
        # Three arrays of the entries of J.
        return 8 * outputs * 3 * extent.size
    # Inputs and gradients of each layer, and two arrays of the columns of other parameters.
    layer_sizes = sum(inputs + outputs_of_layer for inputs, outputs_of_layer in extent.layers)
    return 8 * outputs * (layer_sizes + 2 * extent.parameters_outside_layers)


def _describe_passes(structure: Structure, gaussian: bool, head: bool) -> str:
    """Return the description of a fit's passes over the rows.

    gaussian: whether the likelihood is Gaussian with constant noise. head: whether the free
    parameters are those of a last layer.
    """
    if not head:
        passes = "1 (mode='tilt'); polish adds one for each Gauss–Newton step"
        passes += "" if gaussian else f"; {ROUNDS}, over Jacobians kept if they fit in memory"
    elif gaussian:
        passes = "1"
    else:
        passes = (
            f"1, and one for each Newton step of polish (about 5 to 10); {ROUNDS}; over features "
            "kept if they fit in memory"
        )
    if structure.is_widened_by_fit:
        passes += "; one more each time the sketch is doubled, which also doubles its memory"
    return passes


def _estimate_refit_memory(parameters: int, head: bool, refits: int, budget: int) -> int:
    """Return the bytes of the refits of weights that are solved together.

    parameters: P. head: whether they are those of a last layer. refits: how many are planned.
    budget: in bytes.
    """
    refit_bytes = 8 * parameters * (MATRICES * parameters if head else HISTORY)  # in float64
    # As many refits at a time as half of the budget holds, but at least one.
    together = min(refit_bytes * min(refits, TASKS), budget // 2)
    return min(max(refit_bytes, together), refit_bytes * refits)


def _describe_operations(count: int) -> str:
    """Return a number of operations in words: 3.2e+12 -> "3 TFlop"."""
    for size, word in ((10**15, "PFlop"), (10**12, "TFlop"), (10**9, "GFlop")):
        if count >= size:
            return f"{count / size:,.0f} {word}"
    return f"{count / 10**6:,.0f} MFlop"


def _find_last_linear(model: nn.Module) -> nn.Linear:
    """Return the last nn.Linear of a module; raise ValueError if it has none."""
    linears = [layer for layer in model.modules() if isinstance(layer, nn.Linear)]
    if not linears:
        raise ValueError(
            "The cost is estimated from the module's last nn.Linear, but it has none. Fit a few "
            "rows and read the report."
        )
    return linears[-1]


def _find_parameter_names(model: nn.Module, layer: nn.Linear) -> list[str]:
    """Return the names that the parameters of a layer of the model have in the model."""
    ids = {id(p) for p in layer.parameters()}
    return [name for name, p in model.named_parameters() if id(p) in ids]


def _select_names(model: nn.Module, weights: str | list[str] | tuple[str, ...]) -> list[str]:
    """Return the names of the free parameters for weights="all", a module's name, or a list."""
    return list(
        list_trainable_names(model) if weights == ALL else select_parameter_names(model, weights)
    )


def _list_layer_shapes(model: nn.Module, names: list[str]) -> tuple[tuple[int, int], ...]:
    """Return (inputs including the bias, outputs) of each layer that has free parameters.

    Only layers with a Kronecker form count. names: those of the free parameters.
    """
    shapes: list[tuple[int, int]] = []
    for prefix, layer in model.named_modules():
        parameters = dict(layer.named_parameters(recurse=False))
        full_names = [f"{prefix}.{name}" if prefix else name for name in parameters]
        if not set(full_names).isdisjoint(names):
            shapes += _list_shapes_in_layer(layer, parameters)
    return tuple(shapes)


def _list_shapes_in_layer(
    layer: nn.Module, parameters: dict[str, nn.Parameter]
) -> list[tuple[int, int]]:
    """Return (inputs including the bias, outputs) of each product with a weight of a layer.

    parameters: those of the layer itself, by name. The list is empty for a layer without a
    Kronecker form.
    """
    if isinstance(layer, nn.MultiheadAttention):
        weights: tuple[Tensor, ...] = (
            layer.q_proj_weight,
            layer.k_proj_weight,
            layer.v_proj_weight,
        )
        # One matrix holds the three weights if they have the same inputs.
        if layer.in_proj_weight is not None:
            weights = layer.in_proj_weight.chunk(3)
        has_bias = layer.in_proj_bias is not None
    elif isinstance(layer, nn.RNNBase) and layer.proj_size == 0:
        weights = tuple(value for name, value in parameters.items() if name.startswith("weight"))
        has_bias = bool(layer.bias)
    elif isinstance(layer, nn.Linear) or (isinstance(layer, CONVOLUTIONS) and layer.groups == 1):
        weights = (layer.weight,)
        has_bias = layer.bias is not None
    else:
        return []
    return [(weight[0].numel() + has_bias, weight.shape[0]) for weight in weights]
