"""Frozen values as JSON and tensors, and back.

Numbers, texts, lists, tuples, dicts and tensors are stored directly; dataclasses of the tables
below by name and fields. Other classes are neither stored nor created: reading calls only the
constructors of these classes.
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


def _table() -> dict[str, type]:
    own: tuple[type, ...] = (
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
    table: dict[str, type] = {cls.__name__: cls for cls in own}
    packages = {
        "likelihoods": (likelihoods, LIKELIHOODS),
        "priors": (priors, PRIORS),
        "structures": (curvature, STRUCTURES),
    }
    for place, (package, names) in packages.items():
        table |= {
            f"{place}.{name}": getattr(package, name)
            for name in names
            if dataclasses.is_dataclass(getattr(package, name, None))
        }
    return table


CLASSES: dict[str, type] = _table()
NAMES = {cls: name for name, cls in CLASSES.items()}


class NotStorableError(TypeError):
    """A value that holds code, or whose class is not in the tables."""


@dataclass(eq=False)
class Encoder:
    """Values -> JSON; tensors are collected under the path at which they were found."""

    tensors: dict[str, Tensor] = field(default_factory=dict)

    def encode(self, value: Any, place: str) -> Any:
        if isinstance(value, Note):
            return {"note": [value.subject, str(value)]}
        if value is None or isinstance(value, bool | int | str):
            return value
        if isinstance(value, float):
            return value if math.isfinite(value) else {"float": repr(value)}
        if isinstance(value, Tensor):
            turned = value.dim() == 2 and not value.is_contiguous() and value.mT.is_contiguous()
            self.tensors[place] = value.mT if turned else value
            # keeps the memory layout, so that later products have the same bits
            return {"turned": place} if turned else {"tensor": place}
        if isinstance(value, tuple | list):
            name = "tuple" if isinstance(value, tuple) else "list"
            return {name: [self.encode(item, f"{place}.{i}") for i, item in enumerate(value)]}
        if isinstance(value, Mapping):
            return {
                "dict": [
                    [str(key), self.encode(item, f"{place}.{key}")] for key, item in value.items()
                ]
            }
        if type(value) in NAMES:
            parts = {
                f.name: self.encode(getattr(value, f.name), f"{place}.{f.name}")
                for f in dataclasses.fields(value)
                if f.init
            }
            return {"class": NAMES[type(value)], "fields": parts}
        raise NotStorableError(
            f"{place} is a {type(value).__name__}, which cannot be stored in a file."
        )


@dataclass(frozen=True, eq=False)
class Decoder:
    """JSON and tensors -> values.

    Unexpected content raises an exception, which `container.guarded` turns into a FileError.
    """

    tensors: Mapping[str, Tensor]

    def decode(self, value: Any, expected: type | None = None) -> Any:
        found = self._decode(value)
        if expected is not None and not isinstance(found, expected):
            raise TypeError(
                f"a {expected.__name__} was expected, but a {type(found).__name__} was found"
            )
        return found

    def _decode(self, value: Any) -> Any:
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
            case {"class": str(name), "fields": dict(parts)}:
                return self._object(
                    CLASSES[name], {str(key): self._decode(item) for key, item in parts.items()}
                )
        raise ValueError(f"{str(value)[:60]} is not a known value")

    @staticmethod
    def _object(cls: type, fields: dict[str, Any]) -> Any:
        hints = _hints(cls)
        for name, value in fields.items():
            if not _fits(value, hints[name]):
                raise TypeError(f"{cls.__name__}.{name} cannot be a {type(value).__name__}")
        return cls(**fields)


@lru_cache
def _hints(cls: type) -> dict[str, Any]:
    return typing.get_type_hints(cls)


def _fits(value: Any, hint: Any) -> bool:
    """Whether a value matches a type hint.

    Protocols and other unusual hints accept any value of the tables.
    """
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return any(_fits(value, one) for one in arguments)
    if hint is type(None):
        return value is None
    if hint is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    if hint is int:
        return isinstance(value, int) and not isinstance(value, bool)
    if hint in (bool, str, Tensor):
        return isinstance(value, hint)
    if origin is tuple:
        inner = arguments[0] if arguments else Any
        return isinstance(value, tuple) and (
            inner is Any or all(_fits(item, inner) for item in value)
        )
    if origin in (dict, Mapping) or (isinstance(origin, type) and issubclass(origin, Mapping)):
        return isinstance(value, dict) and all(_fits(item, arguments[1]) for item in value.values())
    return type(value) in NAMES or value is None
