"""Settings and priors as short texts for the page.

Numbers have four digits, and tensors their shape and range.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import fields, is_dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ssla.posterior import Posterior

DIGITS = 4  # significant digits
MOST_ENTRIES = 6  # of a dict
# A number with at least three decimals that is not a part of a longer word.
LONG_NUMBER = re.compile(r"(?<![\w.])\d+\.\d{3,}(?:e[-+]?\d+)?(?![\w.])")


def describe_fit(posterior: Posterior) -> str:
    """Return the text of the posterior's report, with its prior as `shorten` writes it."""
    return str(replace(posterior.report, prior=shorten(posterior.prior)))


def shorten(value: Any) -> str:
    """Return a text like repr, but with short numbers and at most MOST_ENTRIES of a dict.

    Tensors and arrays are written as their shape and range. Lists, tuples, dicts and dataclasses
    are shortened inside. Different values can have the same text.
    """
    if isinstance(value, Tensor | np.ndarray):
        return _shorten_tensor(torch.as_tensor(value))
    if isinstance(value, float):
        return f"{value:.{DIGITS}g}"
    if isinstance(value, Mapping):
        entries = [f"{key}: {shorten(entry)}" for key, entry in value.items()]
        more = [f"… {len(entries)} entries"] if len(entries) > MOST_ENTRIES else []
        return f"{{{', '.join(entries[:MOST_ENTRIES] + more)}}}"

    # By type, not isinstance: named tuples and other subclasses have a repr of their own.
    if type(value) is list:
        return f"[{', '.join(map(shorten, value))}]"
    if type(value) is tuple:
        comma = "," if len(value) == 1 else ""
        return f"({', '.join(map(shorten, value))}{comma})"
    if is_dataclass(value) and not isinstance(value, type):
        named = [
            f"{field.name}={shorten(getattr(value, field.name))}"
            for field in fields(value)
            if field.repr
        ]
        return f"{type(value).__name__}({', '.join(named)})"

    text = " ".join(repr(value).split())  # on one line

    # The numbers in a string are part of its text.
    if isinstance(value, str):
        return text
    return LONG_NUMBER.sub(lambda number: f"{float(number.group()):.{DIGITS}g}", text)


def _shorten_tensor(value: Tensor) -> str:
    """Return a text with the shape and the range of a tensor; the number if it has only one."""
    if value.numel() == 1:
        return shorten(float(value))
    shape = "×".join(map(str, value.shape))
    if not value.numel():
        return f"no numbers ({shape})"
    low = shorten(float(value.min()))
    high = shorten(float(value.max()))
    return f"{shape} numbers, all {low}" if low == high else f"{shape} numbers from {low} to {high}"
