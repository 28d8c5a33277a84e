"""Methods to compare with: each peer from its usual library, with fitted noise and prior.

A peer is one module with one function, from a trained network (or the data) and new inputs to a
GaussianMixture. Heavy imports are inside the functions; if a library is not installed they raise
MissingPeerError, and the table names what to install.
"""

from __future__ import annotations

import importlib
import warnings
from types import ModuleType

from ssla_paper.peers.answers import GaussianMixture, scores

__all__ = ["GaussianMixture", "MissingPeerError", "library", "scores"]


class MissingPeerError(ImportError):
    """A peer's library is not installed."""


def library(module: str, install: str) -> ModuleType:
    """Import a peer's library, silent about its own warnings.

    MissingPeerError names what to install.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return importlib.import_module(module)
    except ImportError as error:
        raise MissingPeerError(f"needs {install} (`make paper` installs it): {error}") from error
