"""Sets of predictives, and bounds of functions over them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from ssla.predictive import Predictive

Functional = Callable[[Predictive, Tensor], Tensor]
"""(predictive of R rows, argument (R, k)) -> (R, k)."""


class Bounds(NamedTuple):
    """The least and the greatest value over a set."""

    lower: Tensor
    upper: Tensor

    @property
    def imprecision(self) -> Tensor:
        return self.upper - self.lower


class Worst(NamedTuple):
    """For each row the member with the least value, together as one predictive, and those
    values (N,).
    """

    predictive: Predictive
    value: Tensor


class Members(Protocol):
    """A set of predictives for N rows."""

    @property
    def rows(self) -> int: ...

    @property
    def open(self) -> bool:
        """Whether there are more members than `start` lists."""
        ...

    def bounds(self, functional: Functional, argument: Tensor) -> Bounds:
        """Of functional(·, argument) over the set.  (N, k) -> (N, k) each."""
        ...

    def start(self) -> list[Predictive]:
        """Some members: all of a finite set, the corners of a family."""
        ...

    def worst(self, functional: Callable[[Predictive], Tensor]) -> Worst:
        """The member that minimises functional (N,), row by row."""
        ...


@dataclass(frozen=True, eq=False)
class FiniteMembers:
    """A list of predictives."""

    predictives: tuple[Predictive, ...]

    open = False

    @property
    def rows(self) -> int:
        return self.predictives[0].mean.shape[0]

    def bounds(self, functional: Functional, argument: Tensor) -> Bounds:
        values = torch.stack([functional(p, argument) for p in self.predictives])
        return Bounds(values.amin(0), values.amax(0))

    def start(self) -> list[Predictive]:
        return list(self.predictives)

    def worst(self, functional: Callable[[Predictive], Tensor]) -> Worst:
        raise NotImplementedError("a finite set has no more members than it lists")
