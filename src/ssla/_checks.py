"""Shared error messages (what was expected, what was given, what to do), and the torch contexts
that work is done in.
"""

from __future__ import annotations

import difflib
import functools
import operator
import os
import sys
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from pathlib import Path
from types import FunctionType
from typing import Any, ParamSpec, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch._C._functorch import get_unwrapped, is_batchedtensor, is_functorch_wrapped_tensor
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

P = ParamSpec("P")
R = TypeVar("R")
C = TypeVar("C")

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
    """A warning that points at the first caller outside this package, the user's line, and
    names the page on failures.
    """
    frame, level = sys._getframe(1), 2
    while frame.f_back is not None and Path(frame.f_code.co_filename).is_relative_to(PACKAGE):
        frame, level = frame.f_back, level + 1
    warnings.warn(message + SEE, category, stacklevel=level)


def unknown_name(kind: str, name: object, valid: Iterable[str]) -> str:
    """The error text for an unknown name, with the most similar valid one."""
    names = list(valid)
    return (
        f"Unknown {kind} {name!r}.{did_you_mean(name, names)} Valid: {', '.join(map(repr, names))}."
    )


def one_of(kind: str, name: Any, valid: Iterable[str]) -> str:
    """Return `name`, or raise ValueError if it is not in the list."""
    names = list(valid)
    if not isinstance(name, str) or name not in names:
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
    """The block runs as if no torch.func transform were active: for constants and for values
    without a graph.
    """
    return temporarily_clear_interpreter_stack()


BUILT = {
    "cuda": torch.backends.cuda.is_built(),
    "mps": torch.backends.mps.is_built(),
    "xpu": getattr(torch.version, "xpu", None) is not None,
}
AUTOCAST = ("cpu", *(name for name, built in BUILT.items() if built))
"""Devices that this build of torch has, and for which it may cast automatically."""
CPU = torch.device("cpu")
_left = threading.local()
"""`.device`: the default device that the caller has set, while the library works without it."""


def _foreign() -> bool:
    """Whether the caller has entered a torch context that would change answers.

    It is asked at every public call: 1 µs.
    """
    if torch.is_inference_mode_enabled():
        return True
    for device_type in AUTOCAST:
        if torch.is_autocast_enabled(device_type):
            return True
    # torch.get_default_device() takes several µs. Without a function mode there is no default
    # device to find.
    return torch._C._len_torch_function_stack() > 0 and torch.get_default_device().type != "cpu"


@contextmanager
def plain_torch() -> Iterator[None]:
    """The block runs as if the caller had entered no torch context.

    Inference mode becomes no_grad: it stops autograd, by which the library differentiates.
    Automatic casts are off. New tensors are on the CPU. The default dtype is one setting for all
    threads, so it stays: the library states dtypes.
    """
    with ExitStack() as stack:
        if torch.is_inference_mode_enabled():
            stack.enter_context(torch.inference_mode(False))
            stack.enter_context(torch.no_grad())
        for device_type in AUTOCAST:
            if torch.is_autocast_enabled(device_type):
                stack.enter_context(torch.autocast(device_type, enabled=False))
        device = torch.get_default_device()
        if device.type != "cpu":
            stack.enter_context(_remembered(device))
            stack.enter_context(CPU)
        yield


@contextmanager
def _remembered(device: torch.device | None) -> Iterator[None]:
    """Remember the caller's default device for `callers_device`."""
    before = getattr(_left, "device", None)
    _left.device = device
    try:
        yield
    finally:
        _left.device = before


def callers_device() -> AbstractContextManager[Any]:
    """The caller's own default device, for the caller's code: a module that makes tensors, a loader
    with its generator.

    Not "meta", where tensors have no values: no code of the caller's could give an answer on it.
    """
    device: torch.device | None = getattr(_left, "device", None)
    return nullcontext() if device is None or device.type == "meta" else device


def in_plain_torch(function: Callable[P, R]) -> Callable[P, R]:
    """The function, run in `plain_torch`: for what users call.

    Calls inside it find nothing more to leave.
    """

    @functools.wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        if not _foreign():
            return function(*args, **kwargs)
        with plain_torch():
            return function(*args, **kwargs)

    return run


def all_in_plain_torch(kind: type[C]) -> type[C]:
    """The class, with its public methods and properties, `__call__` and `__post_init__` run in
    `plain_torch`.
    """
    for name, member in list(vars(kind).items()):
        if name.startswith("_") and name not in ("__call__", "__post_init__"):
            continue
        if isinstance(member, FunctionType):
            setattr(kind, name, in_plain_torch(member))
        elif isinstance(member, property) and member.fget is not None:
            setattr(
                kind,
                name,
                property(in_plain_torch(member.fget), member.fset, member.fdel, member.__doc__),
            )
        elif isinstance(member, functools.cached_property):
            member.func = in_plain_torch(member.func)
    return kind


def recorded(value: Tensor) -> Tensor:
    """The tensor as autograd accepts it: one that was made in inference mode is copied."""
    return value.clone() if value.is_inference() else value


@contextmanager
def differentiated(what: str) -> Iterator[None]:
    """Record derivatives of the user's function.

    ValueError if it uses a tensor that autograd cannot record.
    """
    try:
        with torch.enable_grad():
            yield
    except RuntimeError as error:
        if "nference tensor" not in str(error):
            raise
        raise ValueError(
            f"{what} uses a tensor that was made inside torch.inference_mode(), and autograd "
            "cannot differentiate a function with it. Make the tensor outside, or use "
            "tensor.clone(), called outside."
        ) from error


def finite(what: str, values: Tensor, remedy: str) -> None:
    """Raise ValueError for NaN and infinity, with the index of the first.

    Inside torch.func.vmap values cannot be read.
    """
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


def refuse_masked(
    what: str, values: Any, remedy: str = "Leave out these rows, or fill them."
) -> None:
    """Raise ValueError for a NumPy array with masked values: the numbers behind the mask are
    not data.
    """
    if isinstance(values, np.ma.MaskedArray) and np.ma.is_masked(values):
        mask = np.ma.getmaskarray(values)
        first = [int(i) for i in np.argwhere(mask)[0]]
        raise ValueError(
            f"{what} must not have masked values, but {int(mask.sum())} of {mask.size} are masked "
            f"(first at index {first}). {remedy}"
        )


def draw_count(n: Any) -> int:
    """The number of draws as an int; ValueError or TypeError unless it is a whole number of at
    least 0.
    """
    shape_hint = " Write sample(5), not sample((5,))." if isinstance(n, tuple | list) else ""
    try:
        count = operator.index(n)
    except TypeError:
        count = None
    if count is None or isinstance(n, bool):
        raise TypeError(f"The number of draws must be a whole number, but is {n!r}.{shape_hint}")
    if count < 0:
        raise ValueError(f"The number of draws must be at least 0, but is {count}.")
    return count


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
        raise TypeError(
            "level must be one number strictly between 0 and 1, for example 0.95, but is "
            f"{value!r}."
        ) from error
    if not 0.0 < number < 1.0:
        hint = f" For {number:g}% write {number / 100:g}." if 1.0 < number < 100.0 else ""
        raise ValueError(f"level must be strictly between 0 and 1, but is {number:g}.{hint}")
    return number


def writable(path: Path) -> None:
    """Raise ValueError if `path` cannot be written; called before the work starts."""
    folder = next(parent for parent in path.absolute().parents if parent.exists())
    if not folder.is_dir():
        raise ValueError(
            f"{path} cannot be written: {folder} is a file and not a folder. Give another path."
        )
    if not os.access(folder, os.W_OK | os.X_OK):
        raise ValueError(
            f"{path} cannot be written: you have no permission to write to {folder}. Give another "
            "path."
        )


def covariances(what: str, K: Tensor) -> Tensor:
    """K (N, C, C) in float64, or ValueError unless it is symmetric and positive semi-definite to
    the rounding of its dtype.

    Within that rounding, entries are made symmetric and eigenvalues below zero become zero.
    """
    if not K.numel():
        return K.double()
    eps = torch.finfo(K.dtype).eps if K.is_floating_point() else 0.0
    values = K.detach().to("cpu", torch.float64)
    size = values.abs().amax((1, 2))
    # the rounding error of a product is at most √ε of its row; that of a difference of larger
    # numbers is ε of those
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
                f"{what} must be {fault} for each input, but {int(bad.sum())} of {len(K)} are not "
                f"(row {row}: {figure} {number:.3g}). Give covariances and not standard "
                "deviations, differences or roots of them."
            )
    positive_part = (basis * spectrum.clamp_min(0).unsqueeze(-2)) @ basis.mT
    return torch.where((least < 0)[:, None, None], positive_part, values)
