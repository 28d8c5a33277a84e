"""Saves a posterior to a file, which `load_posterior` opens."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ssla.files.container import write_model
from ssla.files.encoding import Encoder, NotStorableError
from ssla.network import (
    describe_opening,
    fingerprint,
    get_module,
    get_output_argument,
)

if TYPE_CHECKING:
    from ssla.posterior import Posterior

KIND = "posterior"  # of a saved model, in its manifest


def save(posterior: Posterior, path: str | os.PathLike[str]) -> Path:
    """Write a posterior to a directory, and return its path; see Posterior.save."""
    encoder = Encoder()
    content = encode_posterior(posterior, encoder, "")
    return write_model(path, KIND, content, encoder.tensors)


def encode_posterior(posterior: Posterior, encoder: Encoder, prefix: str) -> dict[str, Any]:
    """Return all of a posterior but its network as JSON.

    The encoder collects the tensors. Their names begin with `prefix`, which differs between
    posteriors in one file.
    """
    values = {
        "theta": posterior.theta,
        "statistics": posterior.statistics,
        "report": posterior.report,
        "opening": describe_opening(posterior.network),
    }
    if posterior.variational is not None:
        values["variational"] = posterior.variational
    content = {name: encoder.encode(value, f"{prefix}{name}") for name, value in values.items()}

    # These may be code of the user.
    custom = {"likelihood": posterior.likelihood, "prior": posterior.prior}
    output = get_output_argument(posterior.network)
    if output is not None:
        custom["output"] = output
    for name, value in custom.items():
        content[name] = _encode_or_name(encoder, value, f"{prefix}{name}")
    content["memory_budget"] = posterior.memory_budget
    content["convention"] = posterior.convention
    content["network"] = fingerprint(get_module(posterior.network))
    return content


def _encode_or_name(encoder: Encoder, value: object, path: str) -> Any:
    """Return the value as JSON, or {"own": name of its class} if it holds code.

    path: as in `Encoder.encode`.
    """
    before = dict(encoder.tensors)
    try:
        return encoder.encode(value, path)
    except NotStorableError:
        # Tensors that were collected before the code was met are not stored.
        encoder.tensors.clear()
        encoder.tensors.update(before)
        return {"own": type(value).__name__}
