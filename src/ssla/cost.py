"""What a fit will take, before it is begun: from the module's shapes alone, without a forward pass."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from ssla._checks import one_of, unknown_name
from ssla.network import ALL, LAST_LAYER
from ssla.posterior import DEFAULT_BUDGET
from ssla.structures import STRUCTURES

COPIES = 4  # statistics, a batch's share, the factorisation, and its inverse factor
CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)


@dataclass(frozen=True)
class Cost:
    """Bytes and passes of one fit. `print` it."""

    rows: int
    parameters: int
    outputs: int
    structure: str
    statistics: int  # bytes
    per_row: int  # bytes that each row of a chunk takes beside the network's own activations
    passes: str
    budget: int
    alternatives: dict[str, int]  # structure -> bytes of its statistics

    @property
    def fits(self) -> bool:
        """Whether the statistics stay within the memory budget (rows are chunked to it in any case)."""
        return self.statistics <= self.budget

    def __str__(self) -> str:
        verdict = f"{'within' if self.fits else 'BEYOND'} the budget of {_bytes(self.budget)}"
        lines = [
            f"rows          {self.rows:,}: read in chunks, memory does not grow with them",
            f"parameters    {self.parameters:,} free, {self.outputs} output{'s' * (self.outputs != 1)}",
            f"statistics    {_bytes(self.statistics)} ({self.structure}), {verdict}",
            f"each row      {_bytes(self.per_row)} while its chunk is read",
            f"passes        {self.passes}",
        ]
        if not self.fits:
            good = [f"structure={name!r} ({_bytes(size)})" for name, size in self.alternatives.items() if size <= self.budget]
            lines.append(f"instead       {' or '.join(good) or 'fewer weights'}, or a larger memory_budget")
        return "\n".join(lines)


def estimate_cost(
    model: nn.Module,
    n: int,
    *,
    weights: str | list[str] | tuple[str, ...] = LAST_LAYER,
    structure: str = "dense",
    gaussian: bool = True,
    memory_budget: int | None = None,
) -> Cost:
    """Memory and passes of `ssla.fit(model, data of n rows, weights=, structure=)`.

    The last layer is taken to be the last nn.Linear of the module; `fit` itself finds it in the forward pass. gaussian: whether
    the likelihood is Gaussian with constant noise, when a last layer is polished without a further pass.

    >>> print(ssla.estimate_cost(model, 1_000_000, weights="all", structure="kfac"))   # doctest: +SKIP
    """
    one_of("structure", structure, STRUCTURES)
    linears = [layer for layer in model.modules() if isinstance(layer, nn.Linear)]
    if not linears:
        raise ValueError(
            "The cost is estimated from the module's last nn.Linear, but it has none. Fit a few rows and read the report."
        )
    outputs = linears[-1].out_features
    names = _names(model, weights, linears[-1])
    own = dict(model.named_parameters())
    parameters = sum(own[name].numel() for name in names)
    sizes = {
        "dense": COPIES * 8 * parameters**2,
        "kfac": COPIES * 8 * _kronecker(model, names),
        "diag": COPIES * 8 * parameters,
    }
    head = set(names) <= {name for name, p in own.items() if any(p is q for q in linears[-1].parameters())}
    width = parameters // outputs if head else 0
    if head:
        per_row = 8 * (width * (outputs + 2) + 4 * outputs**2)
    else:
        per_row = 8 * outputs * (3 * parameters if structure == "dense" else _widths(model, names))
    if not head:
        passes = "1 (mode='tilt'); polish adds one for each Gauss–Newton step"
    else:
        passes = (
            "1" if gaussian else "1, and one for each Newton step of polish (about 5 to 10), over features kept while they fit"
        )
    budget = DEFAULT_BUDGET if memory_budget is None else memory_budget
    others = {name: size for name, size in sizes.items() if name != structure}
    return Cost(n, parameters, outputs, structure, sizes[structure], per_row, passes, budget, others)


def _names(model: nn.Module, weights: str | list[str] | tuple[str, ...], last: nn.Linear) -> list[str]:
    own = dict(model.named_parameters())
    if weights == ALL:
        return list(own)
    if weights == LAST_LAYER:
        return [name for name, p in own.items() if any(p is q for q in last.parameters())]
    wanted = [weights] if isinstance(weights, str) else list(weights)
    for name in wanted:
        if name not in own:
            raise ValueError(unknown_name("parameter", name, own))
    return wanted


def _layers(model: nn.Module, names: list[str]) -> list[tuple[int, int, int]]:
    """(inputs with the bias folded in, outputs, parameters) of each layer with a Kronecker form that has free parameters."""
    found = []
    for prefix, layer in model.named_modules():
        free = [f"{prefix}.{name}" if prefix else name for name, _ in layer.named_parameters(recurse=False)]
        free = [name for name in free if name in names]
        if not free or not isinstance(layer, (nn.Linear, *CONVOLUTIONS)):
            continue
        if isinstance(layer, CONVOLUTIONS) and layer.groups > 1:
            continue
        inputs = layer.weight[0].numel() + (layer.bias is not None)
        found.append((inputs, layer.weight.shape[0], inputs * layer.weight.shape[0]))
    return found


def _kronecker(model: nn.Module, names: list[str]) -> int:
    own = dict(model.named_parameters())
    layers = _layers(model, names)
    rest = max(sum(own[name].numel() for name in names) - sum(size for _, _, size in layers), 0)
    return sum(a * a + g * g for a, g, _ in layers) + rest


def _widths(model: nn.Module, names: list[str]) -> int:
    own = dict(model.named_parameters())
    layers = _layers(model, names)
    rest = max(sum(own[name].numel() for name in names) - sum(size for _, _, size in layers), 0)
    return sum(a + g for a, g, _ in layers) + 2 * rest


def _bytes(size: int) -> str:
    value, units = float(size), ["B", "KiB", "MiB", "GiB", "TiB"]
    for unit in units:
        if value < 1024 or unit == units[-1]:
            return f"{value:.3g} {unit}"
        value /= 1024
    raise AssertionError("unreachable")
