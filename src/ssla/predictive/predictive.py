"""Predictive: what a user asks a distribution of y, in which shapes, and what is checked."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, final

import torch
from torch import Tensor

from ssla._checks import all_in_plain_torch, draw_count, in_plain_torch
from ssla._checks import level as checked_level
from ssla.data import as_tensor
from ssla.predictive.law import Law
from ssla.priors import EXACT
from ssla.refit.increments import Increments

FLAGS = ("fallback", "unconverged", "inaccurate")
EXTREME = 1e40  # of outputs, or of their standard deviations
QUARTILES = (0.25, 0.5, 0.75)


@dataclass(frozen=True)
class Diagnostics:
    """How the answer was computed.

    Flags are by row: they are set where something happened for some y of that row.
    """

    refit: str
    # (N,) bool: the Fisher for an indefinite precision, or the mode for a Newton step outside the
    # domain
    fallback: Tensor
    unconverged: Tensor  # (N,) bool: an ascent to the mode ended early
    # (N,) bool: the quadrature (or the interpolation between refits) did not reach its tolerance
    inaccurate: Tensor
    convention: str = (
        EXACT  # where the prior enters; a mixture of several names them all: "exact, paper"
    )
    refits: Tensor | None = None  # (N,) refits of the weights that were made
    # (N,) standard error of the log probabilities of classes, from estimated determinants: √Σ p e²
    # over classes; zero where exact
    error: Tensor | None = None
    rung: tuple[str, ...] | None = (
        None  # which rung answered for each row; "failed": none, by on_failure="nan"
    )
    reason: tuple[str, ...] | None = None  # why "auto" refitted the weights; empty where it did not
    extreme: Tensor | None = (
        None  # (N,) bool: outputs beyond EXTREME, very far from the training rows; None: in no row
    )
    linearised: Tensor | None = (
        None  # (N,) bool: refits of the network linearised at θ̂ answered; None: in no row
    )
    mixed: Law | None = None  # a mixture of laws of numbers or counts, for `off_centre`

    @property
    def extreme_rows(self) -> Tensor:
        """`extreme` as a tensor (N,) bool."""
        return torch.zeros_like(self.fallback) if self.extreme is None else self.extreme

    def with_extreme(self, rows: Tensor) -> Diagnostics:
        """With these rows (N,) bool flagged, too."""
        rows = rows | self.extreme_rows
        return replace(self, extreme=rows) if bool(rows.any()) else self

    @property
    def off_centre(self) -> Tensor:
        """(N,) bool: the mean of a mixture is farther from its median than the quartiles are from
        each other.

        A few members with other locations then decide the mean, or a tail does: quantiles describe
        such a row better. Not flagged: predictives that are not mixtures of numbers, and rows with
        one value that has half of the probability.
        """
        return torch.zeros_like(self.fallback) if self.mixed is None else is_off_centre(self.mixed)

    def __str__(self) -> str:
        count = self.fallback.numel()
        text = (
            f"refit {self.refit}, prior {self.convention}: {count} rows; Fisher fallback in "
            f"{int(self.fallback.sum())}, not converged in {int(self.unconverged.sum())}, "
            f"inaccurate quadrature in {int(self.inaccurate.sum())}"
        )
        if bool(self.extreme_rows.any()):
            text += f"; outputs beyond {EXTREME:g} in {int(self.extreme_rows.sum())}"
        if self.mixed is not None:
            text += f", mean far from the median in {int(self.off_centre.sum())}"
        if self.refits is not None:
            text += (
                f"; {int(self.refits.sum()):,} refits, {float(self.refits.double().mean()):.1f} "
                "for each row"
            )
        if self.linearised is not None:
            text += f", of the linearised network in {int(self.linearised.sum())} rows"
        if self.error is not None and bool((self.error > 0).any()):
            text += (
                f", standard error of log probabilities at most {float(self.error.max()):.1g} "
                "(estimated determinants)"
            )
        if self.rung is not None:
            text += (
                f"; answered by weights: {self.rung.count('weights')}, by output: "
                f"{self.rung.count('output')}"
            )
            text += f", failed: {self.rung.count('failed')}" if "failed" in self.rung else ""
        return text


@all_in_plain_torch
@final
@dataclass(frozen=True, eq=False)
class Predictive:
    """A distribution of y for each of N inputs.

    Names as in torch.distributions; shapes are stated at each method.

    `law` answers in float64 on the CPU. This class checks what is asked, brings it to the law's
    shapes, and gives the answer the dtype and device of `like`. An attribute that a kind of target
    does not have (`probs` of a number, `cdf` of classes) is an AttributeError.
    """

    law: Law
    like: Tensor
    diagnostics: Diagnostics
    parts: tuple[
        Predictive, ...
    ] = ()  # the members of a mixture, or the predictives whose rows were joined
    differentiable: bool = False  # whether the answers carry gradients in x and y

    @property
    def kind(self) -> str:
        """ "scalar", "vector", "circular", "count" or "class"."""
        return self.law.kind

    @property
    def members(self) -> tuple[Predictive, ...]:
        """The members of a mixture that have a weight. They answer in float64."""
        if not self.parts:
            raise AttributeError("Only a mixture has members.")
        return self.parts

    @property
    def mean(self) -> Tensor:
        """(N,), or (N, D). Of classes: the mean of the indicators (N, C)."""
        return self._out(self.law.mean)

    @property
    def variance(self) -> Tensor:
        """Of y: `epistemic + aleatoric`."""
        return self._out(self.law.variance)

    @property
    def stddev(self) -> Tensor:
        return self._out(self.law.stddev)

    @property
    def covariance(self) -> Tensor:
        """(N, D, D)."""
        return self._out(self.law.covariance)

    @property
    def mode(self) -> Tensor:
        return self._out(self.law.mode)

    @property
    def mass(self) -> Tensor:
        """The integral (or sum) before normalisation (N,).

        The true predictive has 1: the difference measures the error.
        """
        return self._out(self.law.mass)

    @property
    def epistemic(self) -> Tensor:
        """The part of the variance that more data would remove: Var_f E[y|f]."""
        return self._out(self.law.epistemic)

    @property
    def aleatoric(self) -> Tensor:
        """The part of the variance that is noise: E_f Var[y|f]."""
        return self._out(self.law.aleatoric)

    @property
    def entropy(self) -> Tensor:
        """Of classes, in nats (N,), from 0 to log C: −Σ p log p. Doubt and noise together."""
        return self._out(self.law.entropy)

    @property
    def mutual_information(self) -> Tensor:
        """Of classes, in nats (N,): the part of `entropy` that more data would remove, H(E_f p) −
        E_f H(p) ≥ 0.

        For a refit of the weights (and "newton") it divides that predictive's entropy in the
        proportion under f ~ N(f̂, K). In a mixture the members' disagreement is part of it.
        """
        return self._out(self.law.mutual_information)

    @property
    def probs(self) -> Tensor:
        """Of the classes (N, C)."""
        return self._out(self.law.probs)

    def log_prob(self, y: Any) -> Tensor:
        """(N,) -> (N,), (N, k) -> (N, k); D targets: (N, D) -> (N,), (N, k, D) -> (N, k)."""
        value, single = self._targets(y)
        self.law.check(value)
        return self._out(answer(self.law.log_prob(value), single))

    @property
    def cdf(self) -> Callable[[Any], Tensor]:
        """cdf(y) = P(Y ≤ y), of y's shape; for D targets each by itself."""
        return self._cdf if self.kind != "class" else self.law.lacks("cdf")

    @in_plain_torch
    def _cdf(self, y: Any) -> Tensor:
        value, single = self._targets(y)
        not_nan(value)
        return self._out(answer(self.law.cdf(value), single))

    @property
    def icdf(self) -> Callable[[Any], Tensor]:
        """Quantiles.

        icdf(q): one number -> (N,) or (N, D); a vector (k,) -> (N, k) or (N, D, k).
        """
        return self._icdf if self.kind != "class" else self.law.lacks("icdf")

    @in_plain_torch
    def _icdf(self, q: Any) -> Tensor:
        value, single = probabilities(q)
        return self._out(answer(self.law.icdf(value), single))

    def interval(self, level: float = 0.95) -> Tensor:
        """The central interval: (N, 2), or (N, D, 2). Ends are included.

        Classes: the smallest set with at least that probability, bool (N, C). Angles: the circle is
        cut opposite the mean. Both ends are within π of the mean, so one may lie outside [−π, π).
        """
        return self._out(self.law.interval(checked_level(level)))

    def hdr(self, level: float = 0.95) -> Any:
        """The smallest region of that probability.

        One target: a union of intervals, `.lower .upper` (N, R), padded with NaN. D targets: an
        ellipsoid, or a region of density for a mixture. Classes: as `interval`.
        """
        region = self.law.hdr(checked_level(level))
        if isinstance(region, tuple):
            return type(region)(
                *(self._out(part) if isinstance(part, Tensor) else part for part in region)
            )
        return self._out(region) if isinstance(region, Tensor) else region

    def sample(self, n: int, generator: torch.Generator | None = None) -> Tensor:
        """(n, N), or (n, N, D)."""
        return self._out(self.law.sample(draw_count(n), generator))

    def increments(self, y: Any) -> Increments:
        """The three increments of the un-normalised log density, of log_prob's shape."""
        value, single = self._targets(y)
        self.law.check(value)
        return self.law.increments(value).map(lambda part: self._out(answer(part, single)))

    def _out(self, value: Tensor) -> Tensor:
        return value.to(self.like) if value.is_floating_point() else value.to(self.like.device)

    def _targets(self, y: Any) -> tuple[Tensor, bool]:
        if self.kind == "vector":
            rows, size = self.law.mean.shape
            return vector_targets(y, rows, size, self.differentiable), False
        return scalar_targets(y, self.law.rows, self.differentiable)


def is_extreme(f: Tensor, variances: Tensor) -> Tensor:
    """Whether an output f (N, C) or its standard deviation exceeds `EXTREME` (N,) bool.

    Features beyond 1e60 count as 1e60 (see `ssla.network.bounds`): these rows are among them.
    """
    return (f.detach().abs() > EXTREME).any(1) | (variances.detach() > EXTREME**2).any(1)


def is_off_centre(law: Law) -> Tensor:
    """Whether |mean − median| exceeds the distance of the quartiles, if these differ: (N,) bool."""
    mean = law.mean
    below = law.cdf(mean[:, None])[:, 0]
    if bool(
        ((below >= QUARTILES[0]) & (below < QUARTILES[2])).all()
    ):  # the mean is between the quartiles
        return torch.zeros_like(below, dtype=torch.bool)
    low, median, high = law.icdf(torch.tensor(QUARTILES, dtype=torch.float64)).unbind(1)
    return (high > low) & ((mean - median).abs() > high - low)


def scalar_targets(y: Any, rows: int, differentiable: bool = False) -> tuple[Tensor, bool]:
    """y as (N, k) float64, and whether it has one value for each row.

    Accepts a number, (N,), (N, k) and (1, k).
    """
    value = as_tensor(y, differentiable).to("cpu", torch.float64)
    if value.dim() == 0:
        return value.expand(rows, 1), True
    if value.dim() == 1 and value.shape[0] == rows:
        return value.unsqueeze(1), True
    if value.dim() == 2 and value.shape[0] in (1, rows):
        return value.expand(rows, -1), False
    raise ValueError(
        f"y must be a number, ({rows},) with one value for each input, or ({rows}, k) with k "
        f"values for each, but has shape {tuple(value.shape)}. For one grid of values at every "
        "input give shape (1, k): y[None]."
    )


def vector_targets(y: Any, rows: int, size: int, differentiable: bool = False) -> Tensor:
    """y (N, D) or (N, k, D) in float64."""
    value = as_tensor(y, differentiable).to("cpu", torch.float64)
    if value.dim() not in (2, 3) or value.shape[0] != rows or value.shape[-1] != size:
        raise ValueError(
            f"y must have shape ({rows}, {size}) or ({rows}, k, {size}), but has "
            f"{tuple(value.shape)}."
        )
    return value


def not_nan(y: Tensor) -> None:
    """The distribution function is defined at infinite values, but not at NaN."""
    if bool(y.isnan().any()):
        raise ValueError("y must not be NaN. Ask for numbers (infinite ones are fine).")


def probabilities(q: Any) -> tuple[Tensor, bool]:
    """q as (k,) float64, and whether it is one number."""
    value = as_tensor(q).to("cpu", torch.float64)
    if value.dim() > 1 or not bool(((value >= 0) & (value <= 1)).all()):
        raise ValueError(
            "q must be a number or a vector of probabilities between 0 and 1, but is "
            f"{value.tolist()}."
        )
    return value.reshape(-1), value.dim() == 0


def answer(value: Tensor, single: bool) -> Tensor:
    """(…, k) -> (…) where one value for each row was asked for."""
    return value.squeeze(-1) if single else value


def widest(predictives: Sequence[Predictive]) -> Tensor:
    """The `like` of the largest dtype."""
    return max((one.like for one in predictives), key=lambda like: like.dtype.itemsize)
