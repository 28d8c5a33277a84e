"""What a law is: the distribution of y at each of N inputs, in float64 on the CPU.

A law has the mathematics only. `Predictive` adds shapes, checks, and the dtype and device of the
answers.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NoReturn, Protocol

import torch
from torch import Tensor
from torch.nn.functional import pad

from ssla._checks import finite
from ssla.maths.quadrature import Regions
from ssla.predictive.spread import split_variance
from ssla.refit import LogDensity
from ssla.refit.increments import Increments

OF_CLASSES = (
    " It is of classes only. For numbers and counts use `epistemic` (doubt) and `aleatoric` "
    "(noise), variances of y."
)


class Law(ABC):
    """N distributions. y is (N, k) for one target; (N, D) or (N, k, D) for D of them.

    Moments are (N,) for one target and (N, D) for D of them. Classes have no cdf and icdf. Only
    Gaussians and mixtures of D targets have a covariance. Only classes have probs, entropy and
    mutual_information.
    """

    @property
    @abstractmethod
    def kind(self) -> str:
        """ "scalar", "vector", "circular", "count" or "class"."""

    @property
    @abstractmethod
    def rows(self) -> int:
        """N."""

    @property
    @abstractmethod
    def mean(self) -> Tensor: ...

    @property
    @abstractmethod
    def variance(self) -> Tensor:
        """Of y: epistemic + aleatoric."""

    @property
    def stddev(self) -> Tensor:
        return self.variance.sqrt()

    @property
    @abstractmethod
    def mode(self) -> Tensor: ...

    @property
    @abstractmethod
    def mass(self) -> Tensor:
        """The integral (or sum) before normalisation (N,)."""

    @property
    @abstractmethod
    def epistemic(self) -> Tensor:
        """Var_f E[y|f]."""

    @property
    @abstractmethod
    def aleatoric(self) -> Tensor:
        """E_f Var[y|f]."""

    @property
    def entropy(self) -> Tensor:
        """Of classes, in nats (N,)."""
        self.lacks("entropy", OF_CLASSES)

    @property
    def mutual_information(self) -> Tensor:
        """I(y; f) of classes, in nats (N,): H(E p) − E H(p)."""
        self.lacks("mutual_information", OF_CLASSES)

    @property
    def covariance(self) -> Tensor:
        """(N, D, D)."""
        self.lacks("covariance")

    @property
    def probs(self) -> Tensor:
        """(N, C)."""
        self.lacks("probs")

    def check(self, y: Tensor) -> None:
        """ValueError where y is outside the support."""
        finite("y", y, "Ask for finite values only.")

    @abstractmethod
    def log_prob(self, y: Tensor) -> Tensor:
        """Normalised.  (N, k) -> (N, k); (N, D) -> (N,); (N, k, D) -> (N, k)."""

    def cdf(self, y: Tensor) -> Tensor:
        """P(Y ≤ y), of y's shape; for D targets each by itself."""
        self.lacks("cdf")

    def below(self, y: Tensor) -> Tensor:
        """P(Y < y), for one continuous target. Less than the cdf at an atom: a value that has a
        probability of its own."""
        return self.cdf(y)

    def icdf(self, q: Tensor) -> Tensor:
        """(k,) -> (N, k) or (N, D, k)."""
        self.lacks("icdf")

    def interval(self, level: float) -> Tensor:
        """The central interval (N, 2) or (N, D, 2); for classes the smallest set, bool (N, C)."""
        tail = (1 - level) / 2
        return self.icdf(torch.tensor([tail, 1 - tail], dtype=torch.float64))

    @abstractmethod
    def hdr(self, level: float) -> Any:
        """The smallest region of that probability: Regions, an ellipsoid, a region of density,
        or a set of classes.
        """

    @abstractmethod
    def sample(self, n: int, generator: torch.Generator | None) -> Tensor:
        """(n, N) or (n, N, D)."""

    @abstractmethod
    def increments(self, y: Tensor) -> Increments:
        """The three increments of the un-normalised log density, of log_prob's shape."""

    def lacks(self, name: str, instead: str = "") -> NoReturn:
        """AttributeError, so that hasattr is False."""
        raise AttributeError(
            f"A predictive of kind {self.kind!r} has no {name!r} ({type(self).__name__}).{instead}"
        )


@dataclass(frozen=True, eq=False)
class PointwiseLaw(Law):
    """exp(total(y)) / mass, where the log density is evaluated at y itself, and mass and
    moments are integrals or sums of it.
    """

    log_density: LogDensity

    @property
    @abstractmethod
    def _log_mass(self) -> Tensor: ...

    @property
    @abstractmethod
    def _moments(self) -> tuple[Tensor, Tensor]:
        """Mean and variance."""

    @property
    def rows(self) -> int:
        return self.log_density.marginal.mean.shape[0]

    @property
    def mean(self) -> Tensor:
        return self._moments[0]

    @property
    def variance(self) -> Tensor:
        return self._moments[1]

    @property
    def mass(self) -> Tensor:
        return self._log_mass.exp()

    @cached_property
    def _parts(self) -> tuple[Tensor, Tensor]:
        return split_variance(self.log_density, self.variance)

    @property
    def epistemic(self) -> Tensor:
        return self._parts[0]

    @property
    def aleatoric(self) -> Tensor:
        return self._parts[1]

    def log_prob(self, y: Tensor) -> Tensor:
        return self.log_density.at(y).log - self._log_mass[:, None]

    def increments(self, y: Tensor) -> Increments:
        return self.log_density(y)


class Piece(Protocol):
    """What was computed together for some of the rows."""

    @property
    def rows(self) -> Tensor: ...


def gathered(pieces: Sequence[Piece], values: Sequence[Tensor]) -> Tensor:
    """One tensor (m, …) for each piece -> all rows (N, …) in their order."""
    out = torch.empty(
        sum(len(piece.rows) for piece in pieces), *values[0].shape[1:], dtype=values[0].dtype
    )
    for piece, value in zip(pieces, values, strict=True):
        out[piece.rows] = value
    return out


def gathered_regions(pieces: Sequence[Piece], regions: Sequence[Regions]) -> Regions:
    """The same for unions of intervals: lower, upper (N, R), padded with NaN."""
    most = max(region.lower.shape[1] for region in regions)
    lower, upper = (
        gathered(pieces, [pad(end, (0, most - end.shape[1]), value=torch.nan) for end in ends])
        for ends in zip(*regions, strict=True)
    )
    return Regions(lower, upper)


def highest(heights: Tensor, shares: Tensor, level: float) -> Tensor:
    """The highest of k atoms whose shares reach the level.  (N, k), (N, k) -> bool (N, k)."""
    order = heights.argsort(1, descending=True)
    needed = pad(shares.gather(1, order).cumsum(1)[:, :-1] < level, (1, 0), value=True)
    return torch.zeros_like(needed).scatter(1, order, needed)


def ends_of_runs(inside: Tensor) -> tuple[Tensor, Tensor]:
    """Where runs of True begin and end: indices (N, R), padded with −1."""
    edge = torch.zeros_like(inside[:, :1])
    starts = inside & ~torch.cat([edge, inside[:, :-1]], 1)
    stops = inside & ~torch.cat([inside[:, 1:], edge], 1)
    most = max(int(starts.sum(1).max()), 1) if len(starts) else 1
    found = []
    for marks in (starts, stops):
        rows, at = marks.nonzero(as_tuple=True)
        rank = marks.cumsum(1)[rows, at] - 1
        ends = torch.full((inside.shape[0], most), -1, dtype=torch.long)
        ends[rows, rank] = at
        found.append(ends)
    return found[0], found[1]
