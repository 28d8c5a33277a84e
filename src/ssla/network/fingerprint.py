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
    """Return the names, dtypes and shapes of all tensors, and digests of the layers and of the
    values.

    The result does not depend on the device.
    """
    named = _tensors(module)
    layers = hashlib.sha256()
    for name, layer in module.named_modules():
        settings = layer.extra_repr() if type(layer).__module__.startswith("torch.nn") else ""
        layers.update(f"{name}|{type(layer).__qualname__}|{settings}\n".encode())
    values = hashlib.sha256()
    for name, tensor in named.items():
        on_cpu = tensor.detach().to("cpu").contiguous()
        values.update(name.encode())
        values.update(on_cpu.flatten().view(torch.uint8).numpy().tobytes())
    return {
        "tensors": [
            [name, str(t.dtype).removeprefix("torch."), list(t.shape)] for name, t in named.items()
        ],
        "layers": layers.hexdigest(),
        "values": values.hexdigest(),
    }


def difference(before: Mapping[str, Any], after: Mapping[str, Any]) -> str:
    """Return the difference of two fingerprints as text; empty if they are equal."""
    if before["tensors"] != after["tensors"]:
        was, now = (
            {str(item[0]): f"{item[1]} {item[2]}" for item in state["tensors"]}
            for state in (before, after)
        )
        changed = [name for name in {**was, **now} if was.get(name) != now.get(name)]
        detail = "their order differs"
        if changed:
            name = changed[0]
            detail = f"{name!r} was {was.get(name, 'absent')} and is {now.get(name, 'absent')}"
        return f"{len(changed)} parameters or buffers differ; {detail}"
    if before["layers"] != after["layers"]:
        return (
            "parameters have the same names and shapes, but the layers differ (their classes or "
            "settings)"
        )
    return VALUES if before["values"] != after["values"] else ""


def merge_digests(network: Network) -> dict[str, str]:
    """Return digests of everything that must be equal in two networks before their sums are
    merged.
    """
    opening = describe(network)
    return {
        "networks": digest(fingerprint(module_of(network))),
        "free parameters": digest((opening.linear, opening.names, opening.outputs)),
        "part of the result (output=)": digest(output_words(network)),
        "layers with a Kronecker form": digest((opening.layers, opening.others)),
        "scales of rows": digest(opening.row_scale),
    }


def _tensors(module: nn.Module) -> dict[str, Tensor]:
    """Return the parameters and buffers of a module by name."""
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}
