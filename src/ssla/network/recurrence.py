"""Recurrent layers of torch (LSTM, GRU, RNN) step by step.

A function of the caller computes their two products. One fused function of torch computes all
steps, so that no linear call can be intercepted, and it has no batching rule. In steps, the weight
of the inputs is a linear layer over all times at once, and the weight of the state is one that is
used at each time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ssla.network.attention import Projection

ARGUMENTS = (  # of torch's functions, in their order; names are ours
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
"""(W x + b, U h + c, state) -> the next state; the first two are (B, gates · H).

The formulas and the order of the gates are those of torch.
"""


def _step_lstm(from_input: Tensor, from_state: Tensor, state: State) -> State:
    """Return the next h and c (B, H) of an LSTM.

    from_input and from_state (B, 4H): the gates i, f, g and o are their sum.
    """
    i, f, g, o = (from_input + from_state).chunk(4, -1)
    c = torch.sigmoid(f) * state[1] + torch.sigmoid(i) * torch.tanh(g)
    return torch.sigmoid(o) * torch.tanh(c), c


def _step_gru(from_input: Tensor, from_state: Tensor, state: State) -> State:
    """Return the next h (B, H) of a GRU.

    from_input and from_state (B, 3H): parts of the gates r and z, and of the new state n.
    """
    r, z, n = from_input.chunk(3, -1)
    hr, hz, hn = from_state.chunk(3, -1)
    new = torch.tanh(n + torch.sigmoid(r + hr) * hn)
    update = torch.sigmoid(z + hz)
    return (new + update * (state[0] - new),)


def _step_tanh(from_input: Tensor, from_state: Tensor, state: State) -> State:
    """Return the next h (B, H) of an RNN with tanh, which does not need the state (a `Cell`)."""
    return (torch.tanh(from_input + from_state),)


def _step_relu(from_input: Tensor, from_state: Tensor, state: State) -> State:
    """Return the next h (B, H) of an RNN with ReLU, which does not need the state (a `Cell`)."""
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
    """Return the arguments of a call by name, and its cell; None for any other call.

    func, args, kwargs: the call. It is read if `compute_recurrence` can compute it: without packed
    sequences, projections of the state, and dropout.
    """
    # With packed sequences the third argument is the state: one tensor, or the two of an LSTM,
    # which are too few to be weights.
    if (
        func not in CELLS
        or kwargs
        or len(args) != len(ARGUMENTS)
        or not isinstance(args[2], list | tuple)
    ):
        return None
    given = dict(zip(ARGUMENTS, args, strict=True))
    directions = 2 if given["bidirectional"] else 1

    # A projection of the state would be one more tensor.
    expected = _count_tensors_per_layer(given) * given["layers"] * directions
    is_random = given["training"] and given["dropout"] > 0
    if is_random or len(given["weights"]) != expected:
        return None
    return {"cell": CELLS[func], **given}


def _count_tensors_per_layer(given: Mapping[str, Any]) -> int:
    """Return how many tensors one layer has in one direction: two weights, with or without biases.

    given: the arguments by name.
    """
    return 4 if given["has_biases"] else 2


def compute_recurrence(given: Mapping[str, Any], projection: Projection) -> tuple[Tensor, ...]:
    """Compute what torch's function returns, in steps.

    These are the states of the last layer at all times, (times, B, directions · H), or (B, times,
    directions · H) with batch_first; and the last states of all layers, h, and c for an LSTM, each
    (layers · directions, B, H). given: the arguments by name, from `read_recurrence`. projection:
    computes the products.
    """
    directions = 2 if given["bidirectional"] else 1
    # h, or h and c, each (layers · directions, B, H).
    first_states = [given["state"]] if isinstance(given["state"], Tensor) else given["state"]
    x = given["input"].transpose(0, 1) if given["batch_first"] else given["input"]  # (times, B, F)
    tensors_of_layer = _count_tensors_per_layer(given)
    last_states: list[State] = []

    for layer in range(given["layers"]):
        outputs = []
        for direction in range(directions):
            index = layer * directions + direction
            first = index * tensors_of_layer
            tensors = given["weights"][first : first + tensors_of_layer]
            weights = tensors if given["has_biases"] else (*tensors, None, None)
            state = tuple(values[index] for values in first_states)
            states, state = _compute_layer(
                given["cell"], x, state, weights, backward=direction == 1, projection=projection
            )
            outputs.append(states)
            last_states.append(state)
        x = outputs[0] if directions == 1 else torch.cat(outputs, -1)

    # From one (h, c) for each layer and direction to one array of h and one of c.
    last = [torch.stack(values) for values in zip(*last_states, strict=True)]
    return (x.transpose(0, 1) if given["batch_first"] else x, *last)


def _compute_layer(
    cell: Cell,
    x: Tensor,
    state: State,
    weights: Sequence[Tensor | None],
    backward: bool,
    projection: Projection,
) -> tuple[Tensor, State]:
    """Return h (times, B, H) of one layer in one direction, and the last state.

    x is (times, B, F), and state is the first one. weights: those of the input and of the state,
    and their biases or None. backward: go from the last time to the first.
    """
    input_weight, state_weight, input_bias, state_bias = weights
    assert input_weight is not None
    assert state_weight is not None
    from_input = projection(x, input_weight, input_bias, 0, 0, len(input_weight))
    h_at: dict[int, Tensor] = {}
    for t in range(len(x) - 1, -1, -1) if backward else range(len(x)):
        from_state = projection(state[0], state_weight, state_bias, 0, 0, len(state_weight))
        state = cell(from_input[t], from_state, state)
        h_at[t] = state[0]
    return torch.stack([h_at[t] for t in range(len(x))]), state
