"""Posteriors as files: a directory of tensors (safetensors) and JSON, which holds data and no code.

    model/
      manifest.json        what it is, which version wrote it, checksums, and everything that is not a tensor
      tensors.safetensors  θ̂, the sums over the data, tensors of likelihood and prior

The network itself is the user's: `load` asks for the module, and compares its fingerprint. Nothing in a file can execute: JSON
names only classes of a fixed table, and tensors are bytes. Training data are not stored.
"""

from __future__ import annotations

from ssla.persistence.container import VERSION, FileError, read, write
from ssla.persistence.encoding import Decoder, Encoder
from ssla.persistence.posteriors import load, pack, save, unpack

__all__ = ["VERSION", "Decoder", "Encoder", "FileError", "load", "pack", "read", "save", "unpack", "write"]
