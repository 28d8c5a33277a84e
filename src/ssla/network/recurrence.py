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


Cell = Callable[[Tensor, Tensor, State], State]
"""(W x + b, U h + c, state) -> the next state; the first two are (B, gates · H)."""


def _step_lstm(from_input: Tensor, from_state: Tensor, state: State) -> State:
    """Return the next h and c (B, H) of an LSTM from its gates (B, 4H)."""
    i, f, g, o = (from_input + from_state).chunk(4, -1)
    c = torch.sigmoid(f) * state[1] + torch.sigmoid(i) * torch.tanh(g)
    return torch.sigmoid(o) * torch.tanh(c), c


def _step_gru(from_input: Tensor, from_state: Tensor, state: State) -> State:
    """Return the next h (B, H) of a GRU from its gates (B, 3H)."""
    r, z, n = from_input.chunk(3, -1)
    hr, hz, hn = from_state.chunk(3, -1)
    new = torch.tanh(n + torch.sigmoid(r + hr) * hn)
    update = torch.sigmoid(z + hz)
    return (new + update * (state[0] - new),)


def _step_tanh(from_input: Tensor, from_state: Tensor, state: State) -> State:
    """Return the next h (B, H) of an RNN with tanh."""
    return (torch.tanh(from_input + from_state),)


def _step_relu(from_input: Tensor, from_state: Tensor, state: State) -> State:
    """Return the next h (B, H) of an RNN with ReLU."""
    return (torch.relu(from_input + from_state),)


CELLS: dict[Any, Cell] = {
    torch.lstm: _step_lstm,
    torch.gru: _step_gru,
    torch.rnn_tanh: _step_tanh,
    torch.rnn_relu: _step_relu,
}


def read_recurrence(
    func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> dict[str, Any] | None:
    """Return the arguments by name, if it is a call that `recur` can compute, else None.

    `recur` does not support packed sequences, projections of the state, or dropout.
    """
    if (
        func not in CELLS
        or kwargs
        or len(args) != len(ARGUMENTS)
        or not isinstance(args[2], list | tuple)
    ):
        return None
    given = dict(zip(ARGUMENTS, args, strict=True))
    # A projection of the state has a further weight.
    tensors_of_layer = 4 if given["has_biases"] else 2
    expected = tensors_of_layer * given["layers"] * (1 + given["bidirectional"])
    random = given["training"] and given["dropout"] > 0
    return None if random or len(given["weights"]) != expected else {"cell": CELLS[func], **given}


def recur(given: Mapping[str, Any], projection: Projection) -> tuple[Tensor, ...]:
    """Return what torch's function does: the states at all times, and the last ones.

    The last states are (layers · directions, B, H). given: the arguments by name. projection
    computes the products.
    """
    directions = 1 + given["bidirectional"]
    # h, or h and c, each (layers · directions, B, H).
    first_states = [given["state"]] if isinstance(given["state"], Tensor) else given["state"]
    x = given["input"].transpose(0, 1) if given["batch_first"] else given["input"]  # (times, B, F)
    tensors_of_layer = 4 if given["has_biases"] else 2
    last_states: list[State] = []
    for layer in range(given["layers"]):
        outputs = []
        for direction in range(directions):
            index = layer * directions + direction
            first = index * tensors_of_layer
            weights = given["weights"][first : first + tensors_of_layer]
            state = tuple(values[index] for values in first_states)
            states, state = _run_layer(
                given["cell"], x, state, (*weights, None, None)[:4], direction == 1, projection
            )
            outputs.append(states)
            last_states.append(state)
        x = outputs[0] if directions == 1 else torch.cat(outputs, -1)
    # From one (h, c) for each layer and direction to one array of h and one of c.
    last = [torch.stack(values) for values in zip(*last_states, strict=True)]
    return (x.transpose(0, 1) if given["batch_first"] else x, *last)


def _run_layer(
    cell: Cell,
    x: Tensor,
    state: State,
    weights: tuple[Any, ...],
    backward: bool,
    projection: Projection,
) -> tuple[Tensor, State]:
    """Return the states (times, B, H) of one layer in one direction, and the last one.

    x is (times, B, F). weights: those of the input and of the state, and their biases or None.
    backward: go from the last time to the first.
    """
    input_weight, state_weight, input_bias, state_bias = weights
    from_input = projection(x, input_weight, input_bias, 0, 0, len(input_weight))
    times = range(len(x) - 1, -1, -1) if backward else range(len(x))
    states: dict[int, Tensor] = {}
    for t in times:
        from_state = projection(state[0], state_weight, state_bias, 0, 0, len(state_weight))
        state = cell(from_input[t], from_state, state)
        states[t] = state[0]
    return torch.stack([states[t] for t in range(len(x))]), state
