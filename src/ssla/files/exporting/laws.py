"""The predictives of the output refit in a static graph: fixed nodes, unrolled Newton steps, no
step that depends on the data.

They have the nodes of `ssla.predictive`, so they give the same numbers. Where the library would go
on with other nodes, a row is NaN. Operations are those that onnxruntime has in float64 (see
`ssla.maths.portable`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from ssla.curvature import Operator
from ssla.curvature.diagonal import DiagonalOperator
from ssla.curvature.jacobians import Features
from ssla.curvature.kfac import KfacOperator
from ssla.maths import linalg
from ssla.maths.portable import log_ndtr, ndtr
from ssla.maths.quadrature.logistic import logistic_normal
from ssla.maths.roots import FullRoot, Root
from ssla.predictive.class_integrals import deviations, softmax_nodes

NODES_AT_ONCE = 64  # of a softmax integral: arrays (N, C, 64)
ROOT_ROUNDS = 40
UNSOLVED = 1e-9  # of a probability


class Levels(NamedTuple):
    """Probabilities of quantiles (k,), and the quantiles of N(0, 1): constants of the graph."""

    q: Tensor
    scores: Tensor


class Numbers(Protocol):
    """A law of numbers or counts.

    Moments are (N,), or (N, D); quantiles have one more axis at the end.
    """

    @property
    def mean(self) -> Tensor: ...

    @property
    def variance(self) -> Tensor: ...

    @property
    def whole(self) -> bool:
        """Whether y is a count."""
        ...

    def density(self, y: Tensor) -> Tensor:
        """dF/dy, for steps of a search; not needed for counts."""
        ...

    def cdf(self, y: Tensor) -> Tensor: ...

    def icdf(self, levels: Levels) -> Tensor: ...


@dataclass(frozen=True, eq=False)
class GaussianLaw:
    """N(f̂, Σ + K), each target by itself."""

    mean: Tensor
    variance: Tensor

    whole = False

    @cached_property
    def _scale(self) -> Tensor:
        return self.variance.sqrt().unsqueeze(-1)

    def _z(self, y: Tensor) -> Tensor:
        return (y - self.mean.unsqueeze(-1)) / self._scale

    def density(self, y: Tensor) -> Tensor:
        return torch.exp(-0.5 * self._z(y) ** 2) / (self._scale * math.sqrt(2 * math.pi))

    def cdf(self, y: Tensor) -> Tensor:
        return ndtr(self._z(y))

    def icdf(self, levels: Levels) -> Tensor:
        return self.mean.unsqueeze(-1) + self._scale * levels.scores


def gaussian(f: Tensor, K: Tensor, noise: Tensor) -> GaussianLaw:
    mean, variance = f, (noise + K).diagonal(dim1=-2, dim2=-1)
    return (
        GaussianLaw(mean[:, 0], variance[:, 0]) if f.shape[1] == 1 else GaussianLaw(mean, variance)
    )


@dataclass(frozen=True, eq=False)
class MixtureLaw:
    """Σ w_m p_m(y)."""

    laws: tuple[Numbers, ...]
    weights: tuple[float, ...]

    @property
    def whole(self) -> bool:
        return self.laws[0].whole

    def _average(self, values: list[Tensor]) -> Tensor:
        total = self.weights[0] * values[0]
        for w, value in zip(self.weights[1:], values[1:], strict=True):
            total = total + w * value
        return total

    @cached_property
    def mean(self) -> Tensor:
        return self._average([law.mean for law in self.laws])

    @cached_property
    def variance(self) -> Tensor:
        return self._average([law.variance + (law.mean - self.mean) ** 2 for law in self.laws])

    def density(self, y: Tensor) -> Tensor:
        return self._average([law.density(y) for law in self.laws])

    def cdf(self, y: Tensor) -> Tensor:
        return self._average([law.cdf(y) for law in self.laws])

    def icdf(self, levels: Levels) -> Tensor:
        """Between the members' own quantiles."""
        ends = torch.stack([law.icdf(levels) for law in self.laws])
        low, high = ends.amin(0), ends.amax(0)
        return (
            self._first_count(levels.q, low, high)
            if self.whole
            else self._root(levels.q, low, high)
        )

    def _root(self, levels: Tensor, low: Tensor, high: Tensor) -> Tensor:
        """Newton steps inside a shrinking bracket."""
        y = (low + high) / 2
        for _ in range(ROOT_ROUNDS):
            gap = self.cdf(y) - levels
            low, high = torch.where(gap <= 0, y, low), torch.where(gap >= 0, y, high)
            new = y - gap / self.density(y).clamp_min(1e-300)
            y = torch.where((new >= low) & (new <= high), new, (low + high) / 2)
        return torch.where((self.cdf(y) - levels).abs() <= UNSOLVED, y, torch.nan)

    def _first_count(self, levels: Tensor, low: Tensor, high: Tensor) -> Tensor:
        """The smallest count whose probability reaches the level."""
        low = low - 1
        for _ in range(ROOT_ROUNDS):
            middle = ((low + high) / 2).floor()
            enough = self.cdf(middle) - levels >= 0
            between = middle > low
            high = torch.where(enough & between, middle, high)
            low = torch.where(~enough & between, middle, low)
        return torch.where(high - low <= 1, high, torch.nan)


def binary_probabilities(f: Tensor, K: Tensor) -> Tensor:
    """Of one logit, or of the difference of two.  -> (N, 2)."""
    if f.shape[1] == 1:
        m, variance = f[:, 0], K[:, 0, 0]
    else:
        m, variance = f[:, 1] - f[:, 0], K[:, 1, 1] + K[:, 0, 0] - 2 * K[:, 0, 1]
    log_one, log_zero, _ = logistic_normal(m, variance.clamp_min(0).sqrt(), log_ndtr)
    return torch.softmax(torch.stack([log_zero, log_one], 1), 1)


def softmax_probabilities(f: Tensor, root: Root) -> Tensor:
    """The mean of the softmax over the nodes, some of them at a time.  -> (N, C)."""
    total = torch.zeros_like(f)
    for moved in _moved(root, softmax_nodes(f.shape[1])):
        total = total + torch.softmax(f.unsqueeze(-1) + moved, 1).sum(-1)
    return total / total.sum(1, keepdim=True)


def _moved(root: Root, z: Tensor) -> Iterator[Tensor]:
    """R z (N, C, s)."""
    if z.shape[1] < 4 * z.shape[0]:  # the nodes are rescaled together
        yield deviations(root, z)
        return
    for some in z.split(NODES_AT_ONCE, 1):
        yield root.times(some)


def root_of(operator: Operator, J: Features) -> Root:
    """The root of K that the library takes: Cholesky, by columns.

    Kronecker factors and a diagonal have theirs at once.
    """
    if isinstance(operator, KfacOperator | DiagonalOperator):
        return operator.root(J)
    return FullRoot(_cholesky(operator.covariance(J)))


def _cholesky(K: Tensor) -> Tensor:
    size = K.shape[-1]
    if size <= linalg.CLOSED_FORM_LIMIT:
        return linalg.root(K)
    columns: list[Tensor] = []  # (N, C)
    for j in range(size):
        column = K[:, :, j]
        if columns:
            before = torch.stack(columns, -1)
            column = column - (before * before[:, j : j + 1]).sum(-1)
        pivot = column[:, j : j + 1].clamp_min(0).sqrt()
        column = torch.where(pivot > 0, column / pivot.clamp_min(1e-300), 0.0)
        columns.append(column * (torch.arange(size) >= j))
    return torch.stack(columns, -1)
