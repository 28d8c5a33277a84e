"""ssla: an honest predictive distribution for any trained PyTorch model, without sampling.

Public names are listed in `ssla._public` and imported with the first use of one of them, so that `ssla --help` need not wait for
torch. A room (`ssla.sklearn`, `ssla.priors`) is imported when it is named.
"""

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING

__version__ = "0.1.0"

if TYPE_CHECKING:
    from ssla._public import *  # noqa: F403
    from ssla._public import __all__ as __all__
else:

    def __getattr__(name: str) -> object:
        if not name.startswith("__") and find_spec(f"ssla.{name}") is not None:  # a room: itself alone
            return import_module(f"ssla.{name}")
        if name == "__all__" or not name.startswith("_"):
            public = import_module("ssla._public")
            if name == "__all__":
                return public.__all__
            globals().update({known: getattr(public, known) for known in public.__all__})
            if name in globals():
                return globals()[name]
        raise AttributeError(f"module 'ssla' has no attribute {name!r}")

    def __dir__() -> list[str]:
        return [*import_module("ssla._public").__all__, "sklearn"]
