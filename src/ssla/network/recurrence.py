"""Recurrent layers of torch (LSTM, GRU, RNN) step by step, with their two products left to the
caller.

One fused function of torch computes all steps, so that no linear call can be intercepted, and it
has no batching rule. In steps, the weight of the inputs is a linear layer over all times at once,
and the weight of the state is one that is used at each time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from ssla.network.attention import Projection

ARGUMENTS = (
    "input",
    "state",
    "weights",
    "has_biases",
    "layers",
    "dropout",
    "training",
    "bidirectional",
    "batch_first",
)
State = tuple[Tensor, ...]
"""h, or h and c of an LSTM: (B, H) each."""


def _lstm(inside: Tensor, outside: Tensor, state: State) -> State:
    i, f, g, o = (inside + outside).chunk(4, -1)
    c = torch.sigmoid(f) * state[1] + torch.sigmoid(i) * torch.tanh(g)
    return torch.sigmoid(o) * torch.tanh(c), c


def _gru(inside: Tensor, outside: Tensor, state: State) -> State:
    (r, z, n), (hr, hz, hn) = inside.chunk(3, -1), outside.chunk(3, -1)
    new = torch.tanh(n + torch.sigmoid(r + hr) * hn)
    update = torch.sigmoid(z + hz)
    return (new + update * (state[0] - new),)


def _tanh(inside: Tensor, outside: Tensor, state: State) -> State:
    return (torch.tanh(inside + outside),)


def _relu(inside: Tensor, outside: Tensor, state: State) -> State:
    return (torch.relu(inside + outside),)


CELLS: dict[Any, Callable[[Tensor, Tensor, State], State]] = {
    torch.lstm: _lstm,
    torch.gru: _gru,
    torch.rnn_tanh: _tanh,
    torch.rnn_relu: _relu,
}


def read_recurrence(
    func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> dict[str, Any] | None:
    """The arguments by name, if it is a call that `recur` can compute.

    Not for packed sequences, projections of the state, or dropout.
    """
    if (
        func not in CELLS
        or kwargs
        or len(args) != len(ARGUMENTS)
        or not isinstance(args[2], list | tuple)
    ):
        return None
    given = dict(zip(ARGUMENTS, args, strict=True))
    each = 4 if given["has_biases"] else 2
    plain = len(given["weights"]) == each * given["layers"] * (1 + given["bidirectional"])
    random = given["training"] and given["dropout"] > 0
    return None if random or not plain else {"cell": CELLS[func], **given}


def recur(given: Mapping[str, Any], projection: Projection) -> tuple[Tensor, ...]:
    """As torch's function: the states at all times, and the last ones of each layer and
    direction.
    """
    cell, directions = given["cell"], 1 + given["bidirectional"]
    starts = [given["state"]] if isinstance(given["state"], Tensor) else list(given["state"])
    x = given["input"].transpose(0, 1) if given["batch_first"] else given["input"]  # (times, B, F)
    each = 4 if given["has_biases"] else 2
    groups = [
        given["weights"][start : start + each] for start in range(0, len(given["weights"]), each)
    ]
    last: list[State] = []
    for layer in range(given["layers"]):
        outputs = []
        for direction in range(directions):
            place = layer * directions + direction
            weights = (*groups[place], None, None)[:4]
            state = tuple(start[place] for start in starts)
            states, state = _run(cell, x, state, weights, direction == 1, projection)
            outputs.append(states)
            last.append(state)
        x = outputs[0] if directions == 1 else torch.cat(outputs, -1)
    ends = [torch.stack([state[part] for state in last]) for part in range(len(starts))]
    return (x.transpose(0, 1) if given["batch_first"] else x, *ends)


def _run(
    cell: Callable[[Tensor, Tensor, State], State],
    x: Tensor,
    state: State,
    weights: tuple[Any, ...],
    backward: bool,
    projection: Projection,
) -> tuple[Tensor, State]:
    """The states (times, B, H) of one layer in one direction, and the last one."""
    inside_weight, state_weight, inside_bias, state_bias = weights
    inside = projection(x, inside_weight, inside_bias, 0, 0, len(inside_weight))
    times = range(len(x) - 1, -1, -1) if backward else range(len(x))
    found: dict[int, Tensor] = {}
    for t in times:
        outside = projection(state[0], state_weight, state_bias, 0, 0, len(state_weight))
        state = cell(inside[t], outside, state)
        found[t] = state[0]
    return torch.stack([found[t] for t in range(len(x))]), state
