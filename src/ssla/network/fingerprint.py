"""Identifies the network of a posterior by its layers, parameters and buffers, bit by bit."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ssla.maths.digests import digest
from ssla.network.network import Network
from ssla.network.reopening import describe_opening, describe_output_argument, get_module

VALUES = "the layers are equal, but the values of buffers or weights differ"
"""What `describe_difference` returns if only values differ."""


def fingerprint(module: nn.Module) -> dict[str, Any]:
    """Return what identifies a module: its tensors, its layers and its values.

    "tensors" are names, dtypes and shapes; "layers" and "values" are digests. The result does not
    depend on the device. Files contain it, so it must not change.
    """
    named = _list_named_tensors(module)
    layers = hashlib.sha256()
    for name, layer in module.named_modules():
        # The text of a layer of torch has its settings, such as the stride. That of another class
        # may have anything, such as an address in memory.
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


def describe_difference(before: Mapping[str, Any], after: Mapping[str, Any]) -> str:
    """Return the first difference of two fingerprints as text; empty if they are equal.

    Tensors are compared first, then layers, then values. The text is `VALUES` if only values
    differ.
    """
    if before["tensors"] != after["tensors"]:
        # Each item is (name, dtype, shape).
        was = {str(item[0]): f"{item[1]} {item[2]}" for item in before["tensors"]}
        now = {str(item[0]): f"{item[1]} {item[2]}" for item in after["tensors"]}
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


def compute_merge_digests(network: Network) -> dict[str, str]:
    """Return digests of all that must be equal in two networks before their sums are merged.

    The keys are words for an error. Raises TypeError for a network without a module.
    """
    opening = describe_opening(network)
    return {
        "networks": digest(fingerprint(get_module(network))),
        "free parameters": digest((opening.linear, opening.names, opening.outputs)),
        "part of the result (output=)": digest(describe_output_argument(network)),
        "layers with a Kronecker form": digest((opening.layers, opening.others)),
        "scales of rows": digest(opening.row_scale),
    }


def _list_named_tensors(module: nn.Module) -> dict[str, Tensor]:
    """Return the parameters and buffers of a module by name."""
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}
