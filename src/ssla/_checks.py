"""Checks of arguments, and the torch contexts in which the library works.

An error says what was expected, what was given and what to do. In most checks `subject` is the noun
with which the message begins, such as "The network's output", and `remedy` its last sentence.

A torch context is a setting of the caller that changes what torch does: inference mode, automatic
casts, a default device, or a transform of torch.func. Public functions run without them
(`in_plain_torch`).
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

P = ParamSpec("P")  # the arguments of a decorated function
R = TypeVar("R")  # its result
C = TypeVar("C")  # a decorated class

PACKAGE = Path(__file__).parent


def did_you_mean(name: object, valid: Iterable[str]) -> str:
    """Return a hint for an error with the most similar valid name; empty if none is similar.

    Case is ignored. The hint starts with a space.
    """
    by_folded_name: dict[str, str] = {}
    # Of two names that differ by case alone, the first is suggested.
    for valid_name in valid:
        by_folded_name.setdefault(valid_name.casefold(), valid_name)
    # The least similarity, 0.5, is a guess.
    similar_names = difflib.get_close_matches(str(name).casefold(), by_folded_name, n=1, cutoff=0.5)
    return f" Did you mean {by_folded_name[similar_names[0]]!r}?" if similar_names else ""


SEE = " See docs/failures.md."
"""The end of every warning: the page with its cause and its remedy."""


def warn(message: str, category: type[Warning] = UserWarning) -> None:
    """Give a warning at the first caller outside this package, which is the user's line.

    message: ends with a full stop. SEE, the name of the page on failures, is added to it.
    """
    frame = sys._getframe(1)
    stack_level = 2  # of that frame in `warnings.warn`: 1 would be this function
    while frame.f_back is not None and Path(frame.f_code.co_filename).is_relative_to(PACKAGE):
        frame = frame.f_back
        stack_level += 1
    warnings.warn(message + SEE, category, stacklevel=stack_level)


def unknown_name(noun: str, name: object, valid: Iterable[str]) -> str:
    """Return the error text for an unknown name, with the most similar valid one.

    noun: what the name stands for, such as "structure" in "Unknown structure 'dens'".
    """
    names = list(valid)
    return (
        f"Unknown {noun} {name!r}.{did_you_mean(name, names)} Valid: {', '.join(map(repr, names))}."
    )


def check_name(noun: str, name: Any, valid: Iterable[str]) -> str:
    """Return the name if it is one of the valid ones; raise ValueError for any other value.

    noun: what the name stands for, for the error.
    """
    names = list(valid)
    if not isinstance(name, str) or name not in names:
        raise ValueError(unknown_name(noun, name, names))
    return name


def wrapped_tensors(value: Tensor) -> list[Tensor]:
    """Return a tensor and those that torch.func has wrapped in it, the innermost last.

    Each transform, such as grad or vmap, wraps the tensors inside it once.
    """
    tensors = [value]
    while is_functorch_wrapped_tensor(tensors[-1]):
        tensors.append(get_unwrapped(tensors[-1]))
    return tensors


def is_inside_vmap(value: Tensor) -> bool:
    """Return whether a tensor is inside torch.func.vmap, where no step may depend on its values."""
    return any(is_batchedtensor(tensor) for tensor in wrapped_tensors(value))


def outside_transforms() -> AbstractContextManager[Any]:
    """Return a context in which no torch.func transform is active.

    Constants and values without a graph are made inside it: a transform would wrap new tensors.
    """
    return temporarily_clear_interpreter_stack()


# Whether this build of torch has a device.
BUILT = {
    "cuda": torch.backends.cuda.is_built(),
    "mps": torch.backends.mps.is_built(),
    "xpu": getattr(torch.version, "xpu", None) is not None,
}
AUTOCAST_DEVICES = ("cpu", *(name for name, built in BUILT.items() if built))
"""Devices that this build of torch has, and for which it may cast automatically."""
CPU = torch.device("cpu")
_caller = threading.local()
"""`.device`: the default device that the caller has set, while the library works without it."""


def _caller_changed_torch() -> bool:
    """Return whether the caller has entered a torch context that would change answers.

    These are inference mode, automatic casts, and a default device other than the CPU. Every public
    call asks this, so it must be fast: it takes 1 µs.
    """
    if torch.is_inference_mode_enabled() or any(map(torch.is_autocast_enabled, AUTOCAST_DEVICES)):
        return True
    # torch.get_default_device() takes several µs. Without a function mode there is no default
    # device to find.
    return torch._C._len_torch_function_stack() > 0 and torch.get_default_device().type != "cpu"


@contextmanager
def plain_torch() -> Iterator[None]:
    """Run the block as if the caller had entered no torch context.

    Inference mode becomes no_grad: it stops autograd, by which the library differentiates.
    Automatic casts are off. New tensors are on the CPU. The default dtype is one setting for all
    threads, so it stays: the library states dtypes.
    """
    with ExitStack() as stack:
        if torch.is_inference_mode_enabled():
            stack.enter_context(torch.inference_mode(mode=False))
            stack.enter_context(torch.no_grad())
        for device_type in AUTOCAST_DEVICES:
            if torch.is_autocast_enabled(device_type):
                stack.enter_context(torch.autocast(device_type, enabled=False))
        device = torch.get_default_device()
        if device.type != "cpu":
            stack.enter_context(_remember_device(device))
            stack.enter_context(CPU)
        yield


@contextmanager
def _remember_device(device: torch.device) -> Iterator[None]:
    """Keep the caller's default device for `callers_device` while the block runs."""
    outer_device = getattr(_caller, "device", None)
    _caller.device = device
    try:
        yield
    finally:
        _caller.device = outer_device


def callers_device() -> AbstractContextManager[Any]:
    """Return a context with the caller's own default device, for the caller's code.

    Such code is a module that makes tensors, or a loader with its generator. The device "meta" is
    left out: tensors have no values there, so the caller's code could give no answer.
    """
    device: torch.device | None = getattr(_caller, "device", None)
    return nullcontext() if device is None or device.type == "meta" else device


def in_plain_torch(function: Callable[P, R]) -> Callable[P, R]:
    """Decorate a function that users call, so that it runs in `plain_torch`."""

    @functools.wraps(function)
    def call_function(*args: P.args, **kwargs: P.kwargs) -> R:
        """Call the function; enter `plain_torch` only if the caller has changed torch."""
        if not _caller_changed_torch():
            return function(*args, **kwargs)
        with plain_torch():
            return function(*args, **kwargs)

    return call_function


def all_in_plain_torch(cls: type[C]) -> type[C]:
    """Decorate a class, so that its public methods and properties run in `plain_torch`.

    `__call__` and `__post_init__` do too. The class itself is changed and returned. Inherited
    members, static methods and class methods stay as they are.
    """
    for name, member in list(vars(cls).items()):
        if name.startswith("_") and name not in ("__call__", "__post_init__"):
            continue
        if isinstance(member, FunctionType):
            setattr(cls, name, in_plain_torch(member))
        elif isinstance(member, property) and member.fget is not None:
            setattr(cls, name, member.getter(in_plain_torch(member.fget)))
        elif isinstance(member, functools.cached_property):
            member.func = in_plain_torch(member.func)

    return cls


def copy_if_inference(value: Tensor) -> Tensor:
    """Return a tensor that autograd accepts: one made in inference mode is copied."""
    return value.clone() if value.is_inference() else value


@contextmanager
def record_derivatives(subject: str) -> Iterator[None]:
    """Let autograd record derivatives in the block, which calls a function of the user.

    subject: the function, for the error. Raises ValueError if the block uses a tensor that was made
    in inference mode, which autograd cannot record. Other errors pass.
    """
    try:
        with torch.enable_grad():
            yield
    except RuntimeError as error:
        # The message of torch begins with "Inference tensors", or has "inference tensor" in it.
        if "nference tensor" not in str(error):
            raise
        raise ValueError(
            f"{subject} uses a tensor that was made inside torch.inference_mode(), and autograd "
            "cannot differentiate a function with it. Make the tensor outside, or use "
            "tensor.clone(), called outside."
        ) from error


def check_finite(subject: str, values: Tensor, remedy: str) -> None:
    """Raise ValueError if a value is NaN or infinite, with the index of the first.

    subject: the values, for the error. remedy: its last sentence. Nothing is checked inside
    torch.func.vmap, where values cannot be read.
    """
    # Integers are finite, and inside vmap values cannot be read.
    if not (values.is_floating_point() or values.is_complex()) or is_inside_vmap(values):
        return
    if bool(torch.isfinite(values.sum())):  # one reduction; a finite sum has finite terms
        return
    is_bad = ~torch.isfinite(values)
    if not bool(is_bad.any()):  # the sum overflowed, the values did not
        return
    first = [int(i) for i in is_bad.nonzero()[0]]
    raise ValueError(
        f"{subject} must be finite, but {int(is_bad.sum())} of {values.numel()} values are NaN or "
        f"infinite (first at index {first}). {remedy}"
    )


def refuse_masked(
    subject: str, values: Any, remedy: str = "Leave out these rows, or fill them."
) -> None:
    """Raise ValueError for a NumPy array with masked values.

    The numbers behind the mask are not data. subject: the array, for the error. remedy: its last
    sentence. Values of any other type are not checked.
    """
    if isinstance(values, np.ma.MaskedArray) and np.ma.is_masked(values):
        mask = np.ma.getmaskarray(values)
        first = [int(i) for i in np.argwhere(mask)[0]]
        raise ValueError(
            f"{subject} must not have masked values, but {int(mask.sum())} of {mask.size} are "
            f"masked (first at index {first}). {remedy}"
        )


def check_draw_count(n: Any) -> int:
    """Return the number of draws as an int.

    Raises TypeError unless it is a whole number, and ValueError if it is below 0.
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


def check_positive(subject: str, values: Tensor, remedy: str = "Give a value above zero.") -> None:
    """Raise ValueError unless all values are finite and above zero.

    subject: the values, for the error. remedy: its last sentence.
    """
    if not bool((torch.isfinite(values) & (values > 0)).all()):
        shown = values.flatten()[:4].tolist()
        raise ValueError(f"{subject} must be positive and finite, but is {shown}. {remedy}")


def check_level(value: float) -> float:
    """Return the probability of an interval or a quantile as a float.

    Raises TypeError unless it is one number, and ValueError unless it is strictly between 0 and 1.
    """
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


def check_writable(path: Path) -> None:
    """Raise ValueError if a file at `path` could not be written.

    Folders that do not exist count as writable if the first one above them is. It is called before
    the work starts, so that no work is lost.
    """
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


def checked_covariances(subject: str, K: Tensor) -> Tensor:
    """Return covariances K (N, C, C) in float64, on the CPU.

    subject: the covariances, for the error. Raises ValueError unless they are symmetric and
    positive semi-definite to the rounding of their dtype. Within that rounding, entries are made
    symmetric and eigenvalues below zero become zero.
    """
    if not K.numel():
        return K.double()

    # Integers are exact.
    eps = torch.finfo(K.dtype).eps if K.is_floating_point() else 0.0
    values = K.detach().to("cpu", torch.float64)
    size = values.abs().amax((1, 2))

    # The rounding error of a product of matrices is at most √ε of its row; that of a difference of
    # larger numbers is ε of those, where the factor 16 is a guess. A 1×1 covariance is not a
    # product of matrices.
    has_products = K.shape[-1] > 1
    allowed = eps**0.5 * size * has_products + 16 * eps * size.amax()
    skew = (values - values.mT).abs().amax((1, 2))
    symmetry_fault = "its entries differ from those of its transpose by"
    _refuse_bad_covariances(subject, skew > allowed, "symmetric", symmetry_fault, skew)
    values = (values + values.mT) / 2
    spectrum, basis = torch.linalg.eigh(values)
    least = spectrum[:, 0]
    fault = "its smallest eigenvalue is"
    _refuse_bad_covariances(subject, least < -allowed, "positive semi-definite", fault, least)
    positive_part = (basis * spectrum.clamp_min(0).unsqueeze(-2)) @ basis.mT
    return torch.where((least < 0)[:, None, None], positive_part, values)


def _refuse_bad_covariances(
    subject: str, is_bad: Tensor, required: str, fault: str, figures: Tensor
) -> None:
    """Raise ValueError if any covariance is bad, with the fault of the first.

    is_bad (N,) bool: which of them are. required: the adjective that they lack. fault: words before
    the figure of the first. figures (N,): how large the fault of each is.
    """
    if bool(is_bad.any()):
        row = int(is_bad.nonzero()[0])
        raise ValueError(
            f"{subject} must be {required} for each input, but {int(is_bad.sum())} of "
            f"{len(is_bad)} are not (row {row}: {fault} {float(figures[row]):.3g}). Give "
            "covariances and not standard deviations, differences or roots of them."
        )
