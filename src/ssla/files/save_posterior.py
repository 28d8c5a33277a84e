"""A posterior to a file. `load_posterior` opens it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ssla.files.container import write
from ssla.files.encoding import Encoder, NotStorableError
from ssla.network import (
    describe,
    fingerprint,
    module_of,
    output_of,
)

if TYPE_CHECKING:
    from ssla.posterior import Posterior

KIND = "posterior"


def save(posterior: Posterior, path: str | os.PathLike[str]) -> Path:
    """Write a posterior to a directory (see Posterior.save)."""
    encoder = Encoder()
    content = pack(posterior, encoder, "")
    return write(path, KIND, content, encoder.tensors)


def pack(posterior: Posterior, encoder: Encoder, place: str) -> dict[str, Any]:
    """Everything but the network, as JSON; the encoder collects the tensors, whose names begin
    with `place`.
    """
    opening = describe(posterior.network)
    parts = {
        "theta": posterior.theta,
        "statistics": posterior.statistics,
        "report": posterior.report,
        "opening": opening,
    }
    if posterior.variational is not None:
        parts["variational"] = posterior.variational
    content = {name: encoder.encode(value, f"{place}{name}") for name, value in parts.items()}
    part = output_of(posterior.network)
    own = {"likelihood": posterior.likelihood, "prior": posterior.prior} | (
        {} if part is None else {"output": part}
    )
    for name, value in own.items():
        content[name] = _or_own(encoder, value, f"{place}{name}")
    content["memory_budget"] = posterior.memory_budget
    content["convention"] = posterior.convention
    content["network"] = fingerprint(module_of(posterior.network))
    return content


def _or_own(encoder: Encoder, value: object, place: str) -> Any:
    """The stored value, or the name of its class if it holds code."""
    before = dict(encoder.tensors)
    try:
        return encoder.encode(value, place)
    except NotStorableError:
        encoder.tensors.clear()
        encoder.tensors.update(before)
        return {"own": type(value).__name__}
