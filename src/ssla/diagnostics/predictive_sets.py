"""Sets of predictives, and bounds of functions over them.

The predictives of a set are its members. All of them are for the same N inputs, the rows. A set is
either finite, or a family: members that depend continuously on coordinates, so that a bound over
them is found by a search in each row.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, NoReturn, Protocol

import torch
from torch import Tensor

from ssla.predictive import Predictive

Functional = Callable[[Predictive, Tensor], Tensor]
"""A function of a predictive of R rows and an argument (R, k), with values (R, k)."""


class Bounds(NamedTuple):
    """The least and the greatest value over a set of predictives, of one shape."""

    lower: Tensor
    upper: Tensor

    @property
    def imprecision(self) -> Tensor:
        """Return upper − lower, the width of the bounds, in their shape."""
        return self.upper - self.lower


class Worst(NamedTuple):
    """The member with the least value, row by row."""

    predictive: Predictive  # in each row that of the row's own member
    value: Tensor  # the least values (N,)


class Members(Protocol):
    """A set of predictives for N rows."""

    @property
    def rows(self) -> int:
        """Return N, the number of rows of every member."""
        ...

    @property
    def is_family(self) -> bool:
        """Return whether there are more members than `list_members` returns."""
        ...

    @property
    def outputs(self) -> Bounds:
        """Return the bounds of the network's outputs (N, C).

        Raises TypeError where members are not given by outputs.
        """
        refuse_outputs()

    def compute_bounds(self, functional: Functional, argument: Tensor) -> Bounds:
        """Compute the bounds of functional(·, argument) over the set, entry by entry.

        argument (N, k); the bounds are (N, k) each.
        """
        ...

    def list_members(self) -> list[Predictive]:
        """Return the members of a finite set, or the corners of a family."""
        ...

    def find_worst(self, functional: Callable[[Predictive], Tensor]) -> Worst:
        """Find the member of a family that minimises functional(member), which is (N,), row by row.

        Raises NotImplementedError for a finite set.
        """
        ...


@dataclass(frozen=True, eq=False)
class FiniteMembers:
    """A finite set of predictives of the same N rows, at least one."""

    predictives: tuple[Predictive, ...]

    is_family = False

    @property
    def rows(self) -> int:
        """Return N, the number of rows of every member."""
        return self.predictives[0].mean.shape[0]

    @property
    def outputs(self) -> Bounds:
        """Raise TypeError: the members are averages over outputs."""
        refuse_outputs()

    def compute_bounds(self, functional: Functional, argument: Tensor) -> Bounds:
        """Compute the bounds of functional(·, argument) over the set: (N, k) -> (N, k) each."""
        values = torch.stack([functional(p, argument) for p in self.predictives])
        return Bounds(values.amin(0), values.amax(0))

    def list_members(self) -> list[Predictive]:
        """Return all members."""
        return list(self.predictives)

    def find_worst(self, functional: Callable[[Predictive], Tensor]) -> Worst:
        """Raise NotImplementedError: only a family is searched.

        The argument is part of the protocol.
        """
        raise NotImplementedError("a finite set has no more members than it lists")


def refuse_outputs() -> NoReturn:
    """Raise TypeError for a set whose members are averages over outputs."""
    raise TypeError(
        "Members of a set of priors are averages over the network's outputs, so that they have no "
        "bounds of f. Use relative_likelihood= in place of priors, or posterior.with_prior(prior)"
        ".marginal(x)."
    )


def require_order(predictive: Predictive, missing: str = "order") -> Any:
    """Return the predictive unchanged. Raises TypeError for classes, which have no order.

    missing: the property that classes do not have, for the message.
    """
    if predictive.kind == "class":
        raise TypeError(f"Classes have no {missing}. Ask for probability([…]).")
    return predictive
