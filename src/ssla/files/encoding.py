"""Turns frozen values into JSON and tensors, and back.

Numbers, texts, lists, tuples, dicts and tensors are stored directly; dataclasses of the table
CLASSES by name and fields. Other classes are neither stored nor created: reading calls only the
constructors of these classes. A new class that a posterior holds must be added to that table.
"""

from __future__ import annotations

import dataclasses
import math
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from torch import Tensor

from ssla import curvature, likelihoods, priors
from ssla.curvature.kfac import LayerFactors
from ssla.network import LayerPlan, NormPlan, Opening, RowScale
from ssla.report import Note, Report, Validation
from ssla.values import Statistics, Variational

# Custom is code of the user, which a file cannot contain.
LIKELIHOODS = tuple(name for name in likelihoods.__all__ if name != "Custom")
PRIORS = (
    "Gaussian",
    "Flat",
    "Laplace",
    "StudentT",
    "Horseshoe",
    "SpikeSlab",
    "Gamma",
    "NormalInverseGamma",
    "Product",
)
STRUCTURES = tuple(type(structure).__name__ for structure in curvature.STRUCTURES.values())


def _collect_classes_by_name() -> dict[str, type]:
    """Return the classes that files may hold, by the names that they have there."""
    values: tuple[type, ...] = (
        Report,
        Statistics,
        Validation,
        Variational,
        LayerFactors,
        LayerPlan,
        NormPlan,
        Opening,
        RowScale,
    )
    table: dict[str, type] = {cls.__name__: cls for cls in values}
    packages = {
        "likelihoods": (likelihoods, LIKELIHOODS),
        "priors": (priors, PRIORS),
        "structures": (curvature, STRUCTURES),
    }
    for prefix, (package, names) in packages.items():
        table |= {
            f"{prefix}.{name}": getattr(package, name)
            for name in names
            if dataclasses.is_dataclass(getattr(package, name, None))
        }

    return table


CLASSES: dict[str, type] = _collect_classes_by_name()
NAMES = {cls: name for name, cls in CLASSES.items()}


class NotStorableError(TypeError):
    """A value that holds code, or whose class is not in the tables."""


@dataclass(eq=False)
class Encoder:
    """Turns values into JSON, and collects their tensors by the path at which they are in it.

    `tensors` grows with each value that is encoded.
    """

    tensors: dict[str, Tensor] = field(default_factory=dict)

    def encode(self, value: Any, path: str) -> Any:
        """Return a value as JSON, and collect the tensors in it.

        path: that of the value in the content, such as "statistics.gradient"; tensors are named by
        their paths. Raises NotStorableError for code and for classes that are not in the table.
        """
        # A Note is a string, so it comes before strings, as bool does with int below.
        if isinstance(value, Note):
            return {"note": [value.subject, str(value)]}
        if value is None or isinstance(value, bool | int | str):
            return value
        if isinstance(value, float):
            return value if math.isfinite(value) else {"float": repr(value)}
        if isinstance(value, Tensor):
            return self._collect_tensor(value, path)

        if isinstance(value, tuple | list):
            name = "tuple" if isinstance(value, tuple) else "list"
            return {name: [self.encode(item, f"{path}.{i}") for i, item in enumerate(value)]}
        if isinstance(value, Mapping):
            pairs = [[str(key), self.encode(item, f"{path}.{key}")] for key, item in value.items()]
            return {"dict": pairs}
        if type(value) in NAMES:
            fields = {
                f.name: self.encode(getattr(value, f.name), f"{path}.{f.name}")
                for f in dataclasses.fields(value)
                if f.init
            }
            return {"class": NAMES[type(value)], "fields": fields}

        raise NotStorableError(
            f"{path} is a {type(value).__name__}, which cannot be stored in a file."
        )

    def _collect_tensor(self, value: Tensor, path: str) -> dict[str, str]:
        """Collect a tensor by its path, and return the JSON that names it.

        A transposed matrix stays one in memory when it is read, so that later products have the
        same bits: its transpose is stored under the key "turned", and transposed again.
        """
        is_transposed = value.dim() == 2 and not value.is_contiguous() and value.mT.is_contiguous()
        self.tensors[path] = value.mT if is_transposed else value
        return {"turned": path} if is_transposed else {"tensor": path}


@dataclass(frozen=True, eq=False)
class Decoder:
    """Turns JSON and tensors back into values.

    Unexpected content raises an exception, which `container.convert_to_file_error` turns into a
    FileError.
    """

    tensors: Mapping[str, Tensor]

    def decode(self, value: Any, expected: type | None = None) -> Any:
        """Return the value that JSON stands for.

        expected: its class, or None for any. Raises TypeError for another class, and
        ValueError, KeyError or TypeError for unknown content.
        """
        decoded = self._decode(value)
        if expected is not None and not isinstance(decoded, expected):
            raise TypeError(
                f"a {expected.__name__} was expected, but a {type(decoded).__name__} was found"
            )
        return decoded

    def _decode(self, value: Any) -> Any:
        """Return the value that JSON stands for, of any class, by the forms of `Encoder.encode`."""
        if value is None or isinstance(value, bool | int | float | str):
            return value
        match value:
            case {"note": [str(subject), str(text)]}:
                return Note(text, subject)
            case {"float": str(text)}:
                return float(text)
            case {"tensor": str(name)}:
                return self.tensors[name]
            case {"turned": str(name)}:
                return self.tensors[name].mT
            case {"tuple": list(items)}:
                return tuple(self._decode(item) for item in items)
            case {"list": list(items)}:
                return [self._decode(item) for item in items]
            case {"dict": list(items)} if all(isinstance(key, str) for key, _ in items):
                return {key: self._decode(item) for key, item in items}
            case {"class": str(name), "fields": dict(items)}:
                fields = {str(key): self._decode(item) for key, item in items.items()}
                return self._make_object(CLASSES[name], fields)
        raise ValueError(f"{str(value)[:60]} is not a known value")

    @staticmethod
    def _make_object(cls: type, fields: dict[str, Any]) -> Any:
        """Return an object of a class with these fields.

        Raises TypeError if a type hint excludes one.
        """
        hints = _get_type_hints(cls)
        for name, value in fields.items():
            if not _fits_hint(value, hints[name]):
                raise TypeError(f"{cls.__name__}.{name} cannot be a {type(value).__name__}")
        return cls(**fields)


@lru_cache
def _get_type_hints(cls: type) -> dict[str, Any]:
    """Return the type hints of a class by field. They take a while to resolve, so they are kept."""
    return typing.get_type_hints(cls)


def _fits_hint(value: Any, hint: Any) -> bool:
    """Return whether a value fits a type hint.

    All items of a tuple are checked against its first hint, and only values of a dict are checked.
    Protocols and other unusual hints accept None and any value of the tables.
    """
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return any(_fits_hint(value, argument) for argument in arguments)
    if hint is type(None):
        return value is None
    if hint is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    if hint is int:
        return isinstance(value, int) and not isinstance(value, bool)
    if hint in (bool, str, Tensor):
        return isinstance(value, hint)
    if origin is tuple:
        item_hint = arguments[0] if arguments else Any
        return isinstance(value, tuple) and (
            item_hint is Any or all(_fits_hint(item, item_hint) for item in value)
        )

    if origin in (dict, Mapping) or (isinstance(origin, type) and issubclass(origin, Mapping)):
        return isinstance(value, dict) and all(
            _fits_hint(item, arguments[1]) for item in value.values()
        )

    return type(value) in NAMES or value is None
