"""Shared error messages: what was expected, what was given, what to do."""

from __future__ import annotations

import difflib
import os
import sys
import warnings
from collections.abc import Iterable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._C._functorch import get_unwrapped, is_batchedtensor, is_functorch_wrapped_tensor
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

PACKAGE = Path(__file__).parent


def did_you_mean(name: object, valid: Iterable[str]) -> str:
    """A hint for an error: the most similar valid name, ignoring case; empty if there is none."""
    folded: dict[str, str] = {}
    for known in valid:
        folded.setdefault(known.casefold(), known)
    near = difflib.get_close_matches(str(name).casefold(), folded, n=1, cutoff=0.5)
    return f" Did you mean {folded[near[0]]!r}?" if near else ""


SEE = " See docs/failures.md."
"""The end of every warning: the page with its cause and its remedy."""


def warn(message: str, category: type[Warning] = UserWarning) -> None:
    """A warning that points at the first caller outside this package, the user's line, and names the page on failures."""
    frame, level = sys._getframe(1), 2
    while frame.f_back is not None and Path(frame.f_code.co_filename).is_relative_to(PACKAGE):
        frame, level = frame.f_back, level + 1
    warnings.warn(message + SEE, category, stacklevel=level)


def unknown_name(kind: str, name: object, valid: Iterable[str]) -> str:
    """The error text for an unknown name, with the most similar valid one."""
    names = list(valid)
    return f"Unknown {kind} {name!r}.{did_you_mean(name, names)} Valid: {', '.join(map(repr, names))}."


def one_of(kind: str, name: str, valid: Iterable[str]) -> str:
    """Return `name`, or raise ValueError if it is not in the list."""
    names = list(valid)
    if name not in names:
        raise ValueError(unknown_name(kind, name, names))
    return name


def layers_of(value: Tensor) -> list[Tensor]:
    """A tensor and those that torch.func has wrapped in it, the innermost last."""
    found = [value]
    while is_functorch_wrapped_tensor(found[-1]):
        found.append(get_unwrapped(found[-1]))
    return found


def batched(value: Tensor) -> bool:
    """Whether a tensor is inside torch.func.vmap, where no step may depend on its values."""
    return any(is_batchedtensor(layer) for layer in layers_of(value))


def outside_transforms() -> AbstractContextManager[Any]:
    """The block runs as if no torch.func transform were active: for constants and for values without a graph."""
    return temporarily_clear_interpreter_stack()


def finite(what: str, values: Tensor, remedy: str) -> None:
    """Raise ValueError for NaN and infinity, with the index of the first. Inside torch.func.vmap values cannot be read."""
    if not (values.is_floating_point() or values.is_complex()) or batched(values):
        return
    if bool(torch.isfinite(values.sum())):  # one reduction; a finite sum has finite terms
        return
    bad = ~torch.isfinite(values)
    if not bool(bad.any()):  # the sum overflowed, the values did not
        return
    first = [int(i) for i in bad.nonzero()[0]]
    raise ValueError(
        f"{what} must be finite, but {int(bad.sum())} of {values.numel()} values are NaN or "
        f"infinite (first at index {first}). {remedy}"
    )


def positive(what: str, values: Tensor, remedy: str = "Give a value above zero.") -> None:
    """Raise ValueError unless all values are finite and above zero."""
    if not bool((torch.isfinite(values) & (values > 0)).all()):
        shown = values.flatten()[:4].tolist()
        raise ValueError(f"{what} must be positive and finite, but is {shown}. {remedy}")


def level(value: float) -> float:
    """A probability strictly between 0 and 1."""
    try:
        number = float(value)
    except (TypeError, ValueError) as error:
        raise TypeError(f"level must be one number strictly between 0 and 1, for example 0.95, but is {value!r}.") from error
    if not 0.0 < number < 1.0:
        hint = f" For {number:g}% write {number / 100:g}." if 1.0 < number < 100.0 else ""
        raise ValueError(f"level must be strictly between 0 and 1, but is {number:g}.{hint}")
    return number


def writable(path: Path) -> None:
    """Raise ValueError if `path` cannot be written; called before the work starts."""
    folder = next(parent for parent in path.absolute().parents if parent.exists())
    if not folder.is_dir():
        raise ValueError(f"{path} cannot be written: {folder} is a file and not a folder. Give another path.")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise ValueError(f"{path} cannot be written: you have no permission to write to {folder}. Give another path.")


def covariances(what: str, K: Tensor) -> Tensor:
    """K (N, C, C) in float64, or ValueError unless it is symmetric and positive semi-definite to the rounding of its dtype.

    Within that rounding, entries are made symmetric and eigenvalues below zero become zero.
    """
    if not K.numel():
        return K.double()
    eps = torch.finfo(K.dtype).eps if K.is_floating_point() else 0.0
    values = K.detach().to("cpu", torch.float64)
    size = values.abs().amax((1, 2))
    # the rounding error of a product is at most √ε of its row; that of a difference of larger numbers is ε of those
    allowed = eps**0.5 * size * (K.shape[-1] > 1) + 16 * eps * size.amax()
    skew = (values - values.mT).abs().amax((1, 2))
    values = (values + values.mT) / 2
    spectrum, basis = torch.linalg.eigh(values)
    least = spectrum[:, 0]
    for bad, fault, figure in (
        (skew > allowed, "symmetric", "its entries differ from those of its transpose by"),
        (least < -allowed, "positive semi-definite", "its smallest eigenvalue is"),
    ):
        if bool(bad.any()):
            row = int(bad.nonzero()[0])
            number = float((skew if fault == "symmetric" else least)[row])
            raise ValueError(
                f"{what} must be {fault} for each input, but {int(bad.sum())} of {len(K)} are not (row {row}: {figure} "
                f"{number:.3g}). Give covariances and not standard deviations, differences or roots of them."
            )
    positive_part = (basis * spectrum.clamp_min(0).unsqueeze(-2)) @ basis.mT
    return torch.where((least < 0)[:, None, None], positive_part, values)
