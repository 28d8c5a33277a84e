"""Sets of predictives, and bounds of functions over them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

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
        """The width of the bounds, upper − lower, in their shape."""
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
    def rows(self) -> int:
        """The number N of rows."""
        ...

    @property
    def is_family(self) -> bool:
        """Return whether there are more members than `list_members` returns."""
        ...

    def bounds(self, functional: Functional, argument: Tensor) -> Bounds:
        """Compute the bounds of functional(·, argument) over the set.  (N, k) -> (N, k) each."""
        ...

    def list_members(self) -> list[Predictive]:
        """Return some members: all of a finite set, the corners of a family."""
        ...

    def find_worst(self, functional: Callable[[Predictive], Tensor]) -> Worst:
        """Find the member that minimises functional (N,), row by row."""
        ...


@dataclass(frozen=True, eq=False)
class FiniteMembers:
    """A list of predictives."""

    predictives: tuple[Predictive, ...]

    is_family = False

    @property
    def rows(self) -> int:
        """See Members.rows."""
        return self.predictives[0].mean.shape[0]

    def bounds(self, functional: Functional, argument: Tensor) -> Bounds:
        """Compute the bounds over the list; see Members.bounds."""
        values = torch.stack([functional(p, argument) for p in self.predictives])
        return Bounds(values.amin(0), values.amax(0))

    def list_members(self) -> list[Predictive]:
        """Return all members; see Members.list_members."""
        return list(self.predictives)

    def find_worst(self, functional: Callable[[Predictive], Tensor]) -> Worst:
        """Raise NotImplementedError: only a family is searched."""
        raise NotImplementedError("a finite set has no more members than it lists")


def require_order(predictive: Predictive, lacking: str = "order") -> Any:
    """Return the predictive; TypeError for classes, which lack an order, quantiles, …"""
    if predictive.kind == "class":
        raise TypeError(f"Classes have no {lacking}. Ask for probability([…]).")
    return predictive
