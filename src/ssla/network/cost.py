"""Memory and passes of a fit, and gradients of refits, before they start, from the module's
shapes, without a forward pass.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor, nn

from ssla._checks import in_plain_torch
from ssla.curvature import Extent, Structure, resolve
from ssla.curvature.automatic import AUTO, choose, seconds_of, time_in_words
from ssla.curvature.kfac import MANY_CLASSES
from ssla.curvature.memory import DEFAULT_BUDGET, alternatives, in_words
from ssla.network.frozen import Output, checked_output
from ssla.network.opening import ALL, LAST_LAYER, named_parameters, trainable

ROUNDS = "10 to 30 for the variational Gaussian (none with gaussian='laplace')"
GRADIENTS = {
    True: (4, 20),
    False: (15, 40),
}  # of one refit, by whether it is of a last layer: usual, and for a y far out
HISTORY = 64  # vectors of P numbers that a refit of all weights holds
TASKS = 256  # refits that are solved together
CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)


@dataclass(frozen=True)
class Cost:
    """Bytes and passes of one fit. `print` it."""

    rows: int
    parameters: int
    outputs: int
    structure: str
    statistics: int  # bytes
    per_row: int  # bytes of each row of a chunk, in addition to the network's activations
    passes: str
    budget: int
    instead: str  # structures that fit
    refits: int = 0  # refits of the weights, one for each (x, y)
    gradients: tuple[int, int] = (
        0,
        0,
    )  # passes over the rows of all refits together: usual, and if every y is far out
    refit_memory: int = 0  # bytes of the refits that are solved together
    # of one core, without the network's own forward passes; NaN: not known for this structure
    seconds: float = math.nan
    choice: str = ""  # why the structure was chosen, where none was asked for

    @property
    def fits(self) -> bool:
        """Whether the statistics fit the memory budget (rows are read in chunks that fit)."""
        return self.statistics <= self.budget

    def __str__(self) -> str:
        verdict = f"{'within' if self.fits else 'BEYOND'} the budget of {in_words(self.budget)}"
        lines = [
            f"rows          {self.rows:,}: read in chunks, memory does not grow with them",
            f"parameters    {self.parameters:,} free, {self.outputs} "
            f"output{'s' * (self.outputs != 1)}",
            f"statistics    {in_words(self.statistics)} ({self.structure}), {verdict}",
            f"each row      {in_words(self.per_row)} while its chunk is read",
            f"passes        {self.passes}",
        ]
        if self.choice:
            lines.insert(2, f"structure     {self.structure} (chosen: {self.choice})")
        if not math.isnan(self.seconds):
            lines.append(
                f"time          about {time_in_words(self.seconds)} on one core, without the "
                "network's own passes"
            )
        if self.refits:
            few, many = self.gradients
            lines.append(
                f"refits        {self.refits:,}: {few:,} to {many:,} gradients over all rows "
                f"({few // self.refits} to {many // self.refits} for each), about "
                f"{_operations(6 * few * self.rows * self.parameters)} to "
                f"{_operations(6 * many * self.rows * self.parameters)}, in "
                f"{in_words(self.refit_memory)}"
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
    """Memory, passes and seconds of `ssla.fit(model, data of n rows, weights=, structure=)`.

    Seconds are those of one core for a dense or kfac fit without a given prior; the network's own
    forward passes come on top. The last layer is assumed to be the last nn.Linear of the module;
    `fit` itself finds it in the forward pass. gaussian: whether the likelihood is Gaussian with
    constant noise; then a last layer is polished without a further pass. More than 1,000 outputs of
    another likelihood are taken for classes. output: as in `fit`; the estimate does not depend on
    it. refits: how many refits of the weights are planned, one for each pair (x, y); a whole
    predictive takes about 10 to 20 for each x. Their operations do not include determinants, and
    assume that a row uses each weight once.

    >>> cost = ssla.estimate_cost(model, 1_000_000, weights="all")  # doctest: +SKIP
    """
    automatic = isinstance(structure, str) and structure == AUTO
    kind = resolve("dense" if automatic else structure)
    checked_output(output)
    linears = [layer for layer in model.modules() if isinstance(layer, nn.Linear)]
    if not linears:
        raise ValueError(
            "The cost is estimated from the module's last nn.Linear, but it has none. Fit a few "
            "rows and read the report."
        )
    outputs = linears[-1].out_features
    names = _names(model, weights, linears[-1])
    own = dict(model.named_parameters())
    parameters = sum(own[name].numel() for name in names)
    extent = Extent(parameters, outputs, _layers(model, names), n, averages=not gaussian)
    budget = DEFAULT_BUDGET if memory_budget is None else memory_budget
    reason = ""
    if automatic:
        kind, reason = choose(extent, budget)
    head = set(names) <= {
        name for name, p in own.items() if any(p is q for q in linears[-1].parameters())
    }
    if head and not gaussian and outputs > MANY_CLASSES:
        kind = kind.for_many_classes()
    statistics = kind.memory(extent)
    width = parameters // outputs if head else 0
    if head:
        pooled = kind.diagonal_outputs  # no C×C matrices for each row
        per_row = 8 * (width * (outputs + 2) + (0 if pooled else 4 * outputs**2))
    else:
        per_row = (
            8
            * outputs
            * (
                3 * parameters
                if kind.materialises
                else sum(inside + out for inside, out in extent.layers) + 2 * extent.rest
            )
        )
    if not head:
        passes = "1 (mode='tilt'); polish adds one for each Gauss–Newton step"
        passes += "" if gaussian else f"; {ROUNDS}, over Jacobians kept if they fit in memory"
    else:
        passes = (
            "1"
            if gaussian
            else f"1, and one for each Newton step of polish (about 5 to 10); {ROUNDS}; over "
            "features kept if they fit in memory"
        )
    if kind.grows:
        passes += "; one more each time the sketch is doubled, which also doubles its memory"
    instead = alternatives(kind.name, extent, budget)
    if isinstance(refits, bool) or not isinstance(refits, int) or refits < 0:
        raise ValueError(f"refits must be a whole number from 0, but is {refits!r}.")
    few, many = GRADIENTS[head]
    each = 8 * parameters * (6 * parameters if head else HISTORY)
    memory = min(max(each, min(each * min(refits, TASKS), budget // 2)), each * refits)
    return Cost(
        n,
        parameters,
        outputs,
        kind.name,
        statistics,
        per_row,
        passes,
        budget,
        instead,
        refits,
        (few * refits, many * refits),
        memory,
        seconds_of(kind, extent),
        reason,
    )


def _operations(count: int) -> str:
    """3.2e+12 -> "3 TFlop"."""
    for size, word in ((10**15, "PFlop"), (10**12, "TFlop"), (10**9, "GFlop")):
        if count >= size:
            return f"{count / size:,.0f} {word}"
    return f"{count / 10**6:,.0f} MFlop"


def _names(
    model: nn.Module, weights: str | list[str] | tuple[str, ...], last: nn.Linear
) -> list[str]:
    own = dict(model.named_parameters())
    if weights == ALL:
        return list(trainable(model))
    if weights == LAST_LAYER:
        return [name for name, p in own.items() if any(p is q for q in last.parameters())]
    return list(named_parameters(model, weights))


def _layers(model: nn.Module, names: list[str]) -> tuple[tuple[int, int], ...]:
    """(inputs including the bias, outputs) of each layer with a Kronecker form that has free
    parameters.
    """
    found: list[tuple[int, int]] = []
    for prefix, layer in model.named_modules():
        own = dict(layer.named_parameters(recurse=False))
        full = {name: f"{prefix}.{name}" if prefix else name for name in own}
        if not any(name in names for name in full.values()):
            continue
        if isinstance(layer, nn.MultiheadAttention):
            parts: tuple[Tensor, ...] = (
                layer.q_proj_weight,
                layer.k_proj_weight,
                layer.v_proj_weight,
            )
            if layer.in_proj_weight is not None:
                parts = layer.in_proj_weight.chunk(3)
            found += [
                (part.shape[1] + (layer.in_proj_bias is not None), part.shape[0]) for part in parts
            ]
        elif isinstance(layer, nn.RNNBase) and layer.proj_size == 0:
            parts = tuple(value for name, value in own.items() if name.startswith("weight"))
            found += [(part.shape[1] + bool(layer.bias), part.shape[0]) for part in parts]
        elif isinstance(layer, nn.Linear) or (
            isinstance(layer, CONVOLUTIONS) and layer.groups == 1
        ):
            found.append(
                (layer.weight[0].numel() + (layer.bias is not None), layer.weight.shape[0])
            )
    return tuple(found)
