"""Posteriors as files: a directory of tensors (safetensors) and JSON, without code.

    model/
      manifest.json        kind, version, checksums, and everything that is not a tensor
      tensors.safetensors  θ̂, the sums over the data, tensors of likelihood and prior

The network is not stored: `load` takes the module and compares its fingerprint. A file cannot
execute code: JSON names only classes of a fixed table, and tensors are bytes. Training data are not
stored.
"""

from __future__ import annotations

from ssla.files.container import VERSION, FileError, read_model, write_model
from ssla.files.encoding import Decoder, Encoder
from ssla.files.save_posterior import encode_posterior, save

__all__ = [
    "VERSION",
    "Decoder",
    "Encoder",
    "FileError",
    "encode_posterior",
    "read_model",
    "save",
    "write_model",
]
