"""ssla: an honest predictive distribution for any trained PyTorch model, without sampling.

Public names are listed in `ssla._public` and imported with the first use of one of them, so that `ssla --help` need not wait for
torch. `ssla.sklearn` is imported when it is named.
"""

from importlib import import_module
from typing import TYPE_CHECKING

__version__ = "0.1.0"

if TYPE_CHECKING:
    from ssla._public import *  # noqa: F403
    from ssla._public import __all__ as __all__
else:

    def __getattr__(name: str) -> object:
        if name == "sklearn":
            return import_module("ssla.sklearn")
        if name == "__all__" or not name.startswith("_"):
            public = import_module("ssla._public")
            globals().update({known: getattr(public, known) for known in public.__all__})
            if name in globals():  # a public name, or a room that they brought along
                return globals()[name]
            if name == "__all__":
                return public.__all__
        raise AttributeError(f"module 'ssla' has no attribute {name!r}")

    def __dir__() -> list[str]:
        return [*import_module("ssla._public").__all__, "sklearn"]
