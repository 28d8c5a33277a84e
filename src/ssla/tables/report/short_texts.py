"""Settings and priors as short texts for the page: numbers with four digits, tensors by their
shape and range.
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

DIGITS = 4
MOST_ENTRIES = 6  # of a dict
LONG_NUMBER = re.compile(r"(?<![\w.])\d+\.\d{3,}(?:e[-+]?\d+)?(?![\w.])")


def of_fit(posterior: Posterior) -> str:
    """The report of the fit, with its prior as `short` writes it."""
    return str(replace(posterior.report, prior=short(posterior.prior)))


def short(value: Any) -> str:
    """repr for readers. It is not for comparisons: different values can have the same text."""
    if isinstance(value, Tensor | np.ndarray):
        return _numbers(torch.as_tensor(value))
    if isinstance(value, float):
        return f"{value:.{DIGITS}g}"
    if isinstance(value, Mapping):
        parts = [f"{key}: {short(part)}" for key, part in value.items()]
        more = [f"… {len(parts)} entries"] if len(parts) > MOST_ENTRIES else []
        return f"{{{', '.join(parts[:MOST_ENTRIES] + more)}}}"
    if type(value) in (tuple, list):
        parts = [short(part) for part in value]
        ends = "[]" if isinstance(value, list) else "()"
        return (
            ends[0] + ", ".join(parts) + ("," if ends == "()" and len(parts) == 1 else "") + ends[1]
        )
    if is_dataclass(value) and not isinstance(value, type):
        named = [
            f"{field.name}={short(getattr(value, field.name))}"
            for field in fields(value)
            if field.repr
        ]
        return f"{type(value).__name__}({', '.join(named)})"
    text = " ".join(repr(value).split())
    return (
        text
        if isinstance(value, str)
        else LONG_NUMBER.sub(lambda found: f"{float(found.group()):.{DIGITS}g}", text)
    )


def _numbers(value: Tensor) -> str:
    if value.numel() == 1:
        return short(float(value))
    shape = "×".join(map(str, value.shape))
    if not value.numel():
        return f"no numbers ({shape})"
    low, high = (short(float(end)) for end in (value.min(), value.max()))
    return f"{shape} numbers, all {low}" if low == high else f"{shape} numbers from {low} to {high}"
