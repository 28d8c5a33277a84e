"""Law: the distribution of y at each of N inputs, in float64 on the CPU.

A law has the mathematics only. `Predictive` adds shapes, checks, and the dtype and device of the
answers. "The shape of the mean" is (N,) for one target, (N, D) for D targets, and (N, C) for C
classes, or (N,) for Bernoulli.

Some laws compute their rows in blocks, called pieces. A piece has the numbers of its rows, and
its results are put together by `gather_rows`.
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

from ssla._checks import check_finite
from ssla.maths.quadrature import Regions
from ssla.predictive.spread import split_variance
from ssla.refit import LogDensity
from ssla.refit.increments import Increments

# the end of the message for attributes that only classes have
OF_CLASSES = (
    " It is of classes only. For numbers and counts use `epistemic` (doubt) and `aleatoric` "
    "(noise), variances of y."
)


class Law(ABC):
    """The distributions of y at N inputs. y is (N, k) for one target; (N, D) or (N, k, D) for D.

    Moments are (N,) for one target and (N, D) for D of them. Classes have no cdf and icdf. Only
    Gaussians and mixtures of D targets have a covariance. Only classes have probs, entropy and
    mutual_information.
    """

    @property
    @abstractmethod
    def kind(self) -> str:
        """Name the kind of target: "scalar", "vector", "circular", "count" or "class"."""

    @property
    def has_median(self) -> bool:
        """Return whether y is one number or one count, which has a median."""
        return self.kind in ("scalar", "count")

    @property
    @abstractmethod
    def rows(self) -> int:
        """Return N, the number of inputs."""

    @property
    @abstractmethod
    def mean(self) -> Tensor:
        """Return E[y], (N,) or (N, D); for classes the mean of the indicators."""

    @property
    @abstractmethod
    def variance(self) -> Tensor:
        """Return Var[y] = epistemic + aleatoric, of the shape of the mean."""

    @property
    def stddev(self) -> Tensor:
        """Return the standard deviation of y, of the shape of the mean."""
        return self.variance.sqrt()

    @property
    @abstractmethod
    def mode(self) -> Tensor:
        """Return the y of highest density, (N,) or (N, D)."""

    @property
    @abstractmethod
    def mass(self) -> Tensor:
        """Return the integral (or sum) of the density before normalisation (N,)."""

    @property
    @abstractmethod
    def epistemic(self) -> Tensor:
        """Return Var_f E[y|f], of the shape of the mean."""

    @property
    @abstractmethod
    def aleatoric(self) -> Tensor:
        """Return E_f Var[y|f], of the shape of the mean."""

    @property
    def entropy(self) -> Tensor:
        """Return the entropy of the classes in nats (N,).

        Raises AttributeError for other targets.
        """
        self.refuse_attribute("entropy", OF_CLASSES)

    @property
    def mutual_information(self) -> Tensor:
        """Return the mutual information I(y; f) = H(E p) − E H(p) of the classes in nats (N,).

        Raises AttributeError for other targets.
        """
        self.refuse_attribute("mutual_information", OF_CLASSES)

    @property
    def covariance(self) -> Tensor:
        """Return Cov[y] (N, D, D).

        Raises AttributeError unless y is a vector or a Gaussian number.
        """
        self.refuse_attribute("covariance")

    @property
    def probs(self) -> Tensor:
        """Return the probabilities of the classes (N, C).

        Raises AttributeError for other targets.
        """
        self.refuse_attribute("probs")

    def check(self, y: Tensor) -> None:
        """Raise ValueError where y, of a shape as in `log_prob`, is outside the support."""
        check_finite("y", y, "Ask for finite values only.")

    @abstractmethod
    def log_prob(self, y: Tensor) -> Tensor:
        """Return the normalised log density of y.

        (N, k) -> (N, k) for one target; (N, D) -> (N,) and (N, k, D) -> (N, k) for D of them.
        """

    def cdf(self, y: Tensor) -> Tensor:
        """Return P(Y ≤ y), of y's shape, for each of D targets separately.

        Raises AttributeError for classes.
        """
        self.refuse_attribute("cdf")

    def below(self, y: Tensor) -> Tensor:
        """Return P(Y < y) for one continuous target, of y's shape.

        The probability differs from the cdf only at an atom, a single value with a positive
        probability. A law with an atom overrides this method.
        """
        return self.cdf(y)

    def icdf(self, q: Tensor) -> Tensor:
        """Return the quantiles at probabilities q (k,): (N, k) or (N, D, k).

        Raises AttributeError for classes.
        """
        self.refuse_attribute("icdf")

    def interval(self, level: float) -> Tensor:
        """Return the central interval with probability `level`: (N, 2) or (N, D, 2).

        For classes it is the smallest set, bool (N, C).
        """
        tail = (1 - level) / 2
        return self.icdf(torch.tensor([tail, 1 - tail], dtype=torch.float64))

    @abstractmethod
    def hdr(self, level: float) -> Any:
        """Return the smallest region of y with probability `level`.

        The region is Regions (unions of intervals), an Ellipsoid, a DensityRegion, or sets of
        classes, bool (N, C).
        """

    @abstractmethod
    def sample(self, n: int, generator: torch.Generator | None) -> Tensor:
        """Draw n values of y for each input: (n, N) or (n, N, D).

        generator: of the random numbers; None for torch's own.
        """

    @abstractmethod
    def increments(self, y: Tensor) -> Increments:
        """Return the three increments of the un-normalised log density at y, of log_prob's shape.

        Raises TypeError for laws that do not come from one refit, such as mixtures.
        """

    def refuse_attribute(self, name: str, hint: str = "") -> NoReturn:
        """Raise AttributeError for an attribute `name` that this kind of target does not have.

        With this class of error `hasattr` is False. hint: a text at the end of the message.
        """
        raise AttributeError(
            f"A predictive of kind {self.kind!r} has no {name!r} ({type(self).__name__}).{hint}"
        )


@dataclass(frozen=True, eq=False)
class PointwiseLaw(Law):
    """The density exp(total(y)) / mass, where total(y) is the log density evaluated at y itself.

    Mass and moments are integrals or sums of it over y.
    """

    log_density: LogDensity  # with the un-normalised log density total(y), its `density_at`

    @property
    @abstractmethod
    def _log_mass(self) -> Tensor:
        """Return the logarithm of the mass (N,)."""

    @property
    @abstractmethod
    def _moments(self) -> tuple[Tensor, Tensor]:
        """Return the mean and the variance of y, (N,) each."""

    @property
    def rows(self) -> int:
        """Return N, the number of inputs."""
        return self.log_density.marginal.mean.shape[0]

    @property
    def mean(self) -> Tensor:
        """Return E[y] (N,)."""
        return self._moments[0]

    @property
    def variance(self) -> Tensor:
        """Return Var[y] (N,)."""
        return self._moments[1]

    @property
    def mass(self) -> Tensor:
        """Return the integral (or sum) of the un-normalised density (N,)."""
        return self._log_mass.exp()

    @cached_property
    def _variance_parts(self) -> tuple[Tensor, Tensor]:
        """Return the epistemic and the aleatoric part of Var[y], (N,) each."""
        return split_variance(self.log_density, self.variance)

    @property
    def epistemic(self) -> Tensor:
        """Return the part of Var[y] that comes from the uncertainty of f (N,)."""
        return self._variance_parts[0]

    @property
    def aleatoric(self) -> Tensor:
        """Return the part of Var[y] that is noise (N,)."""
        return self._variance_parts[1]

    def log_prob(self, y: Tensor) -> Tensor:
        """Evaluate the normalised log density: y (N, k) -> (N, k)."""
        return self.log_density.density_at(y).log - self._log_mass[:, None]

    def increments(self, y: Tensor) -> Increments:
        """Return the increments of the refit at y (N, k), each of shape (N, k)."""
        return self.log_density(y)


class Piece(Protocol):
    """The result for a block of the rows, which were computed together."""

    @property
    def rows(self) -> Tensor:
        """Return the indices (m,) of the block's rows among all N rows."""
        ...


def gather_rows(pieces: Sequence[Piece], values: Sequence[Tensor]) -> Tensor:
    """Join one tensor (m, …) of each piece into one tensor (N, …), in the order of the rows.

    values: the tensors, in the order of the pieces. There must be at least one piece, and each of
    the N rows must be in exactly one.
    """
    row_count = sum(len(piece.rows) for piece in pieces)
    gathered = torch.empty(row_count, *values[0].shape[1:], dtype=values[0].dtype)
    for piece, value in zip(pieces, values, strict=True):
        gathered[piece.rows] = value
    return gathered


def gather_regions(pieces: Sequence[Piece], regions: Sequence[Regions]) -> Regions:
    """Join the unions of intervals (m, R) of all pieces, in the order of the rows.

    regions: the unions of each piece, in the order of the pieces. Rows with fewer than the largest
    R are padded with NaN, since R differs between pieces.
    """
    most = max(region.lower.shape[1] for region in regions)

    def gather_ends(ends: Sequence[Tensor]) -> Tensor:
        """Join the lower or the upper ends (m, R) of the pieces, padded to `most` columns."""
        padded = [pad(end, (0, most - end.shape[1]), value=torch.nan) for end in ends]
        return gather_rows(pieces, padded)

    return Regions(
        gather_ends([region.lower for region in regions]),
        gather_ends([region.upper for region in regions]),
    )


def select_highest(heights: Tensor, shares: Tensor, level: float) -> Tensor:
    """Select in each row the fewest of the highest entries whose shares together reach the level.

    heights (N, k): the density of each entry. shares (N, k): its probability. Returns bool (N, k).
    """
    order = heights.argsort(1, descending=True)
    # An entry is needed if the shares of all higher ones do not reach the level. The highest one is
    # always needed.
    needed = pad(shares.gather(1, order).cumsum(1)[:, :-1] < level, (1, 0), value=True)
    return torch.zeros_like(needed).scatter(1, order, needed)


def find_runs(inside: Tensor) -> tuple[Tensor, Tensor]:
    """Find the runs of True in each row of `inside` (N, k) bool.

    Returns the indices of the first and of the last entry of each run, (N, R) each. R is the
    largest number of runs, at least 1; rows with fewer are padded with −1.
    """
    edge = torch.zeros_like(inside[:, :1])
    is_first = inside & ~torch.cat([edge, inside[:, :-1]], 1)
    is_last = inside & ~torch.cat([inside[:, 1:], edge], 1)
    most = max(int(is_first.sum(1).max()), 1) if len(inside) else 1
    ends = torch.full((2, len(inside), most), -1, dtype=torch.long)
    for side, is_end in enumerate((is_first, is_last)):
        rows, columns = is_end.nonzero(as_tuple=True)
        # A run's number is the count of ends in its row up to its own, less one.
        run_number = is_end.cumsum(1)[rows, columns] - 1
        ends[side, rows, run_number] = columns
    return ends[0], ends[1]
