"""Supports of targets: the allowed values of y, and the map of a continuous y to the real line."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from ssla._checks import finite


class Support(Protocol):
    """Targets of one kind."""

    @property
    def kind(self) -> str:
        """ "real" (one number), "vector" (several), "circular" (an angle), "count" or "class"."""
        ...

    def check(self, y: Tensor, outputs: int) -> None:
        """Raise ValueError if a y is outside the support."""
        ...


@runtime_checkable
class Continuous(Support, Protocol):
    """A scalar support with a smooth map to the real line."""

    def to_real(self, y: Tensor) -> Tensor: ...

    def from_real(self, z: Tensor) -> Tensor: ...

    def log_slope(self, z: Tensor) -> Tensor:
        """log dy/dz; its integral is finite also where `from_real` is clamped."""
        ...


@dataclass(frozen=True)
class Real:
    """Any finite number."""

    kind = "real"

    def check(self, y: Tensor, outputs: int) -> None:
        _scalar(y)
        _finite(y)

    def to_real(self, y: Tensor) -> Tensor:
        return y

    def from_real(self, z: Tensor) -> Tensor:
        return z

    def log_slope(self, z: Tensor) -> Tensor:
        return torch.zeros_like(z)


@dataclass(frozen=True)
class Positive:
    """Numbers above zero; z = log y."""

    kind = "real"

    def check(self, y: Tensor, outputs: int) -> None:
        _scalar(y)
        _finite(y)
        _refuse(y <= 0, y, "numbers above zero")

    def to_real(self, y: Tensor) -> Tensor:
        return y.clamp_min(
            0
        ).log()  # −∞ below the support, so that its distribution function is 0 there

    def from_real(self, z: Tensor) -> Tensor:
        return z.clamp(-700, 700).exp()

    def log_slope(self, z: Tensor) -> Tensor:
        # y is clamped at e^700: the slope must fall beyond, or the integral would be infinite
        return 700 - (z - 700).abs()


@dataclass(frozen=True)
class UnitInterval:
    """Numbers strictly between 0 and 1; z = log(y / (1 − y))."""

    kind = "real"

    def check(self, y: Tensor, outputs: int) -> None:
        _scalar(y)
        _finite(y)
        _refuse((y <= 0) | (y >= 1), y, "numbers strictly between 0 and 1")

    def to_real(self, y: Tensor) -> Tensor:
        return torch.logit(y.clamp(0, 1))

    def from_real(self, z: Tensor) -> Tensor:
        return torch.sigmoid(z.clamp(-700, 36))

    def log_slope(self, z: Tensor) -> Tensor:
        return torch.nn.functional.logsigmoid(z) + torch.nn.functional.logsigmoid(-z)


@dataclass(frozen=True)
class Circular:
    """Angles in radians, period 2π. Every finite number is allowed and is mapped to [−π, π)."""

    kind = "circular"

    def check(self, y: Tensor, outputs: int) -> None:
        _scalar(y)
        _finite(y)


@dataclass(frozen=True)
class RealVector:
    """Rows of D finite numbers, one for each output."""

    kind = "vector"

    def check(self, y: Tensor, outputs: int) -> None:
        if y.dim() != 2 or y.shape[1] != outputs:
            raise ValueError(
                f"y must have shape (N, {outputs}), one column for each output of the network, but "
                f"is {tuple(y.shape)}. Give {outputs} targets for each row, or a network with as "
                "many outputs as targets."
            )
        _finite(y)


@dataclass(frozen=True)
class Counts:
    """0, 1, 2, …, for a fit up to `most`.

    Beyond 1e9 a Poisson law has a relative noise below 3e-5, so that its log likelihood has
    curvatures beyond what fits in double precision can factorise, and rounding of the network
    decides the fit.
    """

    most: float = math.inf

    kind = "count"

    def check(self, y: Tensor, outputs: int) -> None:
        _scalar(y)
        _finite(y)
        _refuse((y < 0) | (y != torch.round(y)), y, "counts 0, 1, 2, …")
        if bool((y > self.most).any()):
            raise ValueError(
                f"y must hold counts up to {self.most:g}, but the largest is {float(y.max()):g}. "
                "Such counts are in effect continuous: use a Gaussian likelihood for log y, or "
                "'heteroscedastic' or 'positive' in the estimators, or give y in a larger unit."
            )


LARGEST_COUNT = 1e9  # of the targets of a fit


@dataclass(frozen=True)
class Classes:
    """Integers 0 … count−1."""

    count: int

    kind = "class"

    def check(self, y: Tensor, outputs: int) -> None:
        if y.dim() == 2 and y.shape[1] == self.count > 1:
            raise ValueError(
                f"y must hold class numbers of shape (N,), but is one-hot like {tuple(y.shape)}. "
                "Use y.argmax(1)."
            )
        _scalar(y)
        _finite(y)
        _refuse(
            (y < 0) | (y >= self.count) | (y != torch.round(y))
            if y.is_floating_point()
            else (y < 0) | (y >= self.count),
            y,
            f"integers from 0 to {self.count - 1}",
        )


def _scalar(y: Tensor) -> None:
    if y.dim() != 1:
        raise ValueError(
            f"y must have shape (N,) or (N, 1) for this likelihood, but is {tuple(y.shape)}. "
            "For several targets use likelihoods.Gaussian and a network with one output for each."
        )


def _finite(y: Tensor) -> None:
    finite("y", y, "Drop or impute those rows.")


def _refuse(bad: Tensor, y: Tensor, expected: str) -> None:
    if bool(bad.any()):
        row = int(bad.nonzero()[0, 0])
        raise ValueError(
            f"y must hold {expected}, but {int(bad.sum())} of {y.numel()} values are outside: the "
            f"first is {float(y[row]):g} in row {row}. Choose a likelihood with that support, or "
            "correct y."
        )
