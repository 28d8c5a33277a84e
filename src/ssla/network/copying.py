"""The private copy of the user's module: on one device, without gradients."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn

PARALLEL = (nn.DataParallel, nn.parallel.DistributedDataParallel)
COMPILED = (
    "The network{where} is a torch.jit module (a {kind}). Its parameters cannot be replaced and "
    "its layers cannot be read. Give the nn.Module that was scripted or traced, with the same "
    "weights. To fit a layer after it, compute its outputs once and fit that layer alone: "
    "ssla.fit(layer, (outputs, y), …)."
)


class _OneDevice(nn.Module):
    """A module that calls the wrapped one in this process.

    It has the parameter names of the parallel wrapper that it replaces.
    """

    def __init__(self, module: nn.Module) -> None:
        """Wrap a module."""
        super().__init__()
        self.module = module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the result of the wrapped module."""
        return self.module(*args, **kwargs)


class DataParallel(_OneDevice):
    """A replacement of torch's class of the same name, whose calls have no functional form.

    Fingerprints contain the name of a class, so it must be the same.
    """


class DistributedDataParallel(_OneDevice):
    """A replacement of torch's class of the same name, for the same reasons."""


def copy_privately(model: nn.Module) -> nn.Module:
    """Return a deep copy of the module without gradients and parallel wrappers.

    The module itself is not changed. Raises ValueError for a torch.jit module, or if the module
    cannot be copied.
    """
    for name, layer in model.named_modules():
        if isinstance(layer, torch.jit.ScriptModule):
            raise ValueError(
                COMPILED.format(
                    where=f"'s part {name!r}" if name else "", kind=type(layer).__name__
                )
            )

    inner = model.module if isinstance(model, PARALLEL) else model
    try:
        module = copy.deepcopy(inner)
    except (RuntimeError, TypeError, NotImplementedError) as error:
        raise ValueError(
            f"The network could not be copied ({error}), and ssla never works on the original. "
            "Remove tensors with gradients from its attributes, or use "
            "torch.nn.utils.parametrizations for weight norm."
        ) from error

    # Wrappers inside the module are replaced too.
    for parent in list(module.modules()):
        for name, layer in list(parent.named_children()):
            if isinstance(layer, PARALLEL):
                setattr(parent, name, _wrap_on_one_device(layer, layer.module))

    if inner is not model:
        module = _wrap_on_one_device(model, module)
    return module.requires_grad_(False)


def _wrap_on_one_device(wrapper: nn.Module, module: nn.Module) -> nn.Module:
    """Return the module inside the replacement of its parallel wrapper."""
    if isinstance(wrapper, nn.DataParallel):
        return DataParallel(module)
    return DistributedDataParallel(module)
