"""Identifies the network of a posterior by its layers, parameters and buffers, bit by bit."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ssla.maths.digests import digest
from ssla.network.frozen import Network
from ssla.network.reopening import describe, module_of, output_words

VALUES = "the layers are equal, but the values of buffers or weights differ"


def fingerprint(module: nn.Module) -> dict[str, Any]:
    """Names, dtypes and shapes of all tensors; digests of the layers and of the values.

    Does not depend on the device.
    """
    named = _tensors(module)
    layers = hashlib.sha256()
    for name, layer in module.named_modules():
        settings = layer.extra_repr() if type(layer).__module__.startswith("torch.nn") else ""
        layers.update(f"{name}|{type(layer).__qualname__}|{settings}\n".encode())
    values = hashlib.sha256()
    for name, tensor in named.items():
        values.update(name.encode())
        values.update(
            tensor.detach().to("cpu").contiguous().flatten().view(torch.uint8).numpy().tobytes()
        )
    return {
        "tensors": [
            [name, str(t.dtype).removeprefix("torch."), list(t.shape)] for name, t in named.items()
        ],
        "layers": layers.hexdigest(),
        "values": values.hexdigest(),
    }


def difference(one: Mapping[str, Any], other: Mapping[str, Any]) -> str:
    """The difference of two fingerprints as text; empty if they are equal."""
    if one["tensors"] != other["tensors"]:
        was, now = ({str(t[0]): f"{t[1]} {t[2]}" for t in part["tensors"]} for part in (one, other))
        odd = [n for n in {**was, **now} if was.get(n) != now.get(n)]
        first = (
            f"{odd[0]!r} was {was.get(odd[0], 'absent')} and is {now.get(odd[0], 'absent')}"
            if odd
            else "their order differs"
        )
        return f"{len(odd)} parameters or buffers differ; {first}"
    if one["layers"] != other["layers"]:
        return (
            "parameters have the same names and shapes, but the layers differ (their classes or "
            "settings)"
        )
    return VALUES if one["values"] != other["values"] else ""


def marks(network: Network) -> dict[str, str]:
    """Digests of everything that must be equal in two networks before their sums are merged."""
    opening = describe(network)
    return {
        "networks": digest(fingerprint(module_of(network))),
        "free parameters": digest((opening.linear, opening.names, opening.outputs)),
        "part of the result (output=)": digest(output_words(network)),
        "layers with a Kronecker form": digest((opening.layers, opening.others)),
        "scales of rows": digest(opening.row_scale),
    }


def _tensors(module: nn.Module) -> dict[str, Tensor]:
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}
