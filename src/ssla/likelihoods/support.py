"""Supports of targets: the allowed values of y, and the map of a continuous y to the real line.

The real coordinate of a continuous y is a number z on the real line with y = from_real(z). Grids
over y are built in z, for every support. The density of z is p(y) dy/dz, and `log_slope` is
log dy/dz.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from ssla._checks import check_finite

LARGEST_LOG = 700  # its exponential and the inverse of that are normal numbers of float64
LARGEST_LOGIT = 36  # σ(36) is below one in float64, and σ(37) rounds to one


class Support(Protocol):
    """The allowed values of the targets."""

    @property
    def kind(self) -> str:
        """Return the name of the form of y: "real", "vector", "circular", "count" or "class".

        "vector" means several numbers, and "circular" an angle.
        """

    def check(self, y: Tensor, outputs: int) -> None:
        """Raise ValueError if y has another shape, is not finite, or is outside the support.

        y is (N,), or (N, D) for vectors. outputs: the number of outputs of the network, which only
        the support of vectors needs.
        """


@runtime_checkable
class Continuous(Support, Protocol):
    """A support of one number, with a smooth map between it and the real line."""

    def to_real(self, y: Tensor) -> Tensor:
        """Return the real coordinate z of y, of the same shape."""

    def from_real(self, z: Tensor) -> Tensor:
        """Return y at the real coordinate z, of the same shape."""

    def log_slope(self, z: Tensor) -> Tensor:
        """Return log dy/dz, of the shape of z.

        Where `from_real` is clamped, it falls, so that the integral of dy/dz over all z is finite.
        """


@dataclass(frozen=True)
class Real:
    """The support of any finite number; z = y."""

    kind = "real"

    def check(self, y: Tensor, outputs: int) -> None:
        """Raise ValueError unless y (N,) is finite.

        `outputs` is part of the protocol and is not used.
        """
        _check_scalar_and_finite(y)

    def to_real(self, y: Tensor) -> Tensor:
        """Return y itself."""
        return y

    def from_real(self, z: Tensor) -> Tensor:
        """Return z itself."""
        return z

    def log_slope(self, z: Tensor) -> Tensor:
        """Return zeros of the shape of z."""
        return torch.zeros_like(z)


@dataclass(frozen=True)
class Positive:
    """The support of numbers above zero; z = log y.

    The map is clamped at |z| = LARGEST_LOG: exp overflows float64 at 709.8 and leaves its normal
    numbers at −708.4.
    """

    kind = "real"

    def check(self, y: Tensor, outputs: int) -> None:
        """Raise ValueError unless y (N,) is finite and above zero.

        `outputs` is part of the protocol and is not used.
        """
        _check_scalar_and_finite(y)
        _refuse_outside(y <= 0, y, "numbers above zero")

    def to_real(self, y: Tensor) -> Tensor:
        """Return log y, which is −∞ for y ≤ 0, so that the distribution function is 0 there."""
        return y.clamp_min(0).log()

    def from_real(self, z: Tensor) -> Tensor:
        """Return e^z, with z clamped so that y is finite and not zero."""
        return z.clamp(-LARGEST_LOG, LARGEST_LOG).exp()

    def log_slope(self, z: Tensor) -> Tensor:
        """Return z up to LARGEST_LOG, and 2 LARGEST_LOG − z beyond."""
        # `from_real` is clamped at LARGEST_LOG. If the slope did not fall beyond, its integral
        # would be infinite.
        return LARGEST_LOG - (z - LARGEST_LOG).abs()


@dataclass(frozen=True)
class UnitInterval:
    """The support of numbers strictly between 0 and 1; z = log(y / (1 − y))."""

    kind = "real"

    def check(self, y: Tensor, outputs: int) -> None:
        """Raise ValueError unless y (N,) is strictly between 0 and 1.

        `outputs` is part of the protocol and is not used.
        """
        _check_scalar_and_finite(y)
        _refuse_outside((y <= 0) | (y >= 1), y, "numbers strictly between 0 and 1")

    def to_real(self, y: Tensor) -> Tensor:
        """Return log(y / (1 − y)): −∞ for y ≤ 0, and ∞ for y ≥ 1."""
        return torch.logit(y.clamp(0, 1))

    def from_real(self, z: Tensor) -> Tensor:
        """Return σ(z), with z clamped so that y is strictly between 0 and 1."""
        # e^−LARGEST_LOG is near the smallest number.
        return torch.sigmoid(z.clamp(-LARGEST_LOG, LARGEST_LOGIT))

    def log_slope(self, z: Tensor) -> Tensor:
        """Return log dy/dz = log σ(z) + log σ(−z), without the clamp of `from_real`."""
        return torch.nn.functional.logsigmoid(z) + torch.nn.functional.logsigmoid(-z)


@dataclass(frozen=True)
class Circular:
    """The support of angles in radians, with period 2π.

    Every finite number is allowed and is mapped to [−π, π).
    """

    kind = "circular"

    def check(self, y: Tensor, outputs: int) -> None:
        """Raise ValueError unless y (N,) is finite.

        `outputs` is part of the protocol and is not used.
        """
        _check_scalar_and_finite(y)


@dataclass(frozen=True)
class RealVector:
    """The support of rows of D finite numbers, one for each output."""

    kind = "vector"

    def check(self, y: Tensor, outputs: int) -> None:
        """Raise ValueError unless y is finite and has shape (N, outputs)."""
        if y.dim() != 2 or y.shape[1] != outputs:
            raise ValueError(
                f"y must have shape (N, {outputs}), one column for each output of the network, but "
                f"is {tuple(y.shape)}. Give {outputs} targets for each row, or a network with as "
                "many outputs as targets."
            )
        _check_finite(y)


@dataclass(frozen=True)
class Counts:
    """The support of counts 0, 1, 2, …, up to `most` in a fit.

    Beyond 1e9 a Poisson distribution has a relative noise below 3e-5. Its log likelihood then has
    curvatures that cannot be factorised in double precision, and rounding errors of the network
    decide the fit.
    """

    most: float = math.inf

    kind = "count"

    def check(self, y: Tensor, outputs: int) -> None:
        """Raise ValueError unless y (N,) holds whole numbers from 0 to `most`.

        `outputs` is part of the protocol and is not used.
        """
        _check_scalar_and_finite(y)
        _refuse_outside((y < 0) | (y != torch.round(y)), y, "counts 0, 1, 2, …")
        if bool((y > self.most).any()):
            raise ValueError(
                f"y must hold counts up to {self.most:g}, but the largest is {float(y.max()):g}. "
                "Such counts are in effect continuous: use a Gaussian likelihood for log y, or "
                "'heteroscedastic' or 'positive' in the estimators, or give y in a larger unit."
            )


LARGEST_COUNT = 1e9  # the largest target of a fit: see `Counts`


@dataclass(frozen=True)
class Classes:
    """The support of class numbers, integers 0 … count−1."""

    count: int

    kind = "class"

    def check(self, y: Tensor, outputs: int) -> None:
        """Raise ValueError unless y (N,) holds whole numbers from 0 to count − 1.

        `outputs` is part of the protocol and is not used.
        """
        if y.dim() == 2 and y.shape[1] == self.count > 1:
            raise ValueError(
                f"y must hold class numbers of shape (N,), but is one-hot like {tuple(y.shape)}. "
                "Use y.argmax(1)."
            )
        _check_scalar_and_finite(y)
        outside = (y < 0) | (y >= self.count)
        # Integers and booleans are whole numbers by their dtype.
        if y.is_floating_point():
            outside = outside | (y != torch.round(y))
        _refuse_outside(outside, y, f"integers from 0 to {self.count - 1}")


def _check_scalar_and_finite(y: Tensor) -> None:
    """Raise ValueError unless y has shape (N,) and is finite."""
    if y.dim() != 1:
        raise ValueError(
            f"y must have shape (N,) or (N, 1) for this likelihood, but is {tuple(y.shape)}. "
            "For several targets use likelihoods.Gaussian and a network with one output for each."
        )
    _check_finite(y)


def _check_finite(y: Tensor) -> None:
    """Raise ValueError if y has NaN or an infinite value."""
    check_finite("y", y, "Drop or impute those rows.")


def _refuse_outside(outside: Tensor, y: Tensor, expected: str) -> None:
    """Raise ValueError if any y (N,) is outside the support, as marked in `outside` (N,) bool.

    The message names the first one. expected: the allowed values in words.
    """
    if bool(outside.any()):
        row = int(outside.nonzero()[0, 0])
        raise ValueError(
            f"y must hold {expected}, but {int(outside.sum())} of {y.numel()} values are outside: "
            f"the first is {float(y[row]):g} in row {row}. Choose a likelihood with that support, "
            "or correct y."
        )
