"""Which network a posterior belongs to: its layers, its parameters and buffers, bit by bit."""

from __future__ import annotations

import hashlib
from typing import Any

import torch
from torch import Tensor, nn

from ssla.persistence.container import FileError


def fingerprint(module: nn.Module) -> dict[str, Any]:
    """Names, dtypes and shapes of all tensors; digests of the layers and of the values. Does not depend on the device."""
    named = _tensors(module)
    layers = hashlib.sha256()
    for name, layer in module.named_modules():
        settings = layer.extra_repr() if type(layer).__module__.startswith("torch.nn") else ""
        layers.update(f"{name}|{type(layer).__qualname__}|{settings}\n".encode())
    values = hashlib.sha256()
    for name, tensor in named.items():
        values.update(name.encode())
        values.update(tensor.detach().to("cpu").contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return {
        "tensors": [[name, str(t.dtype).removeprefix("torch."), list(t.shape)] for name, t in named.items()],
        "layers": layers.hexdigest(),
        "values": values.hexdigest(),
    }


def compare(stated: dict[str, Any], module: nn.Module, source: object) -> None:
    """Refuse a module that is not the one that was saved, and say in what it differs."""
    found = fingerprint(module)
    if found["tensors"] != stated["tensors"]:
        was, now = ({str(t[0]): f"{t[1]} {t[2]}" for t in part["tensors"]} for part in (stated, found))
        odd = [n for n in {**was, **now} if was.get(n) != now.get(n)]
        first = f"{odd[0]!r} was {was.get(odd[0], 'absent')} and is {now.get(odd[0], 'absent')}" if odd else "their order differs"
        raise FileError(
            f"{source} belongs to another network: {len(odd)} parameters or buffers differ; {first}. Build the module as it was "
            "when the posterior was saved."
        )
    if found["layers"] != stated["layers"]:
        raise FileError(
            f"{source} belongs to another network: parameters have the same names and shapes, but the layers differ (their "
            "classes or settings). Build the module as it was when the posterior was saved."
        )
    if found["values"] != stated["values"]:
        raise FileError(
            f"{source} belongs to other weights of this network: it was trained further, or not loaded. Load the state_dict of "
            "the network that was fitted, then load the posterior."
        )


def _tensors(module: nn.Module) -> dict[str, Tensor]:
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}
