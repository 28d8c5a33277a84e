"""Predictive: the methods of a distribution of y for users, with their shapes and checks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, final

import torch
from torch import Tensor

from ssla._checks import all_in_plain_torch, check_draw_count, in_plain_torch
from ssla._checks import check_level as checked_level
from ssla.data import as_tensor
from ssla.predictive.law import Law
from ssla.priors import EXACT
from ssla.refit.increments import Increments

FLAGS = ("fallback", "unconverged", "inaccurate")
EXTREME = 1e40  # outputs, or their standard deviations; a guess, below features of 1e60
QUARTILES = (0.25, 0.5, 0.75)


@dataclass(frozen=True)
class Diagnostics:
    """How the answer was computed.

    Flags are by row: they are set where something happened for some y of that row.
    """

    refit: str  # the name of the rung; a mixture of several names them all
    # (N,) bool: the Fisher for an indefinite precision, or the mode for a Newton step outside the
    # domain
    fallback: Tensor
    unconverged: Tensor  # (N,) bool: an ascent to the mode ended early
    # (N,) bool: the quadrature (or the interpolation between refits) did not reach its tolerance
    inaccurate: Tensor
    # where the prior enters; a mixture of several names them all: "exact, paper"
    convention: str = EXACT
    refits: Tensor | None = None  # (N,) refits of the weights that were made
    # (N,) standard error of the log probabilities of classes, from estimated determinants: √Σ p e²
    # over classes; zero where exact
    error: Tensor | None = None
    # which rung answered for each row; "failed": none, by on_failure="nan"
    rung: tuple[str, ...] | None = None
    reason: tuple[str, ...] | None = None  # why "auto" refitted the weights; empty where it did not
    # (N,) bool: outputs beyond EXTREME, very far from the training rows; None: in no row
    extreme: Tensor | None = None
    # (N,) bool: refits of the network linearised at θ̂ answered; None: in no row
    linearised: Tensor | None = None
    # (N,) share of the output refit's predictive beyond a grid of candidates; None: no such grid
    cut: Tensor | None = None
    mixed: Law | None = None  # a mixture of laws of numbers or counts, for `off_centre`

    @property
    def extreme_rows(self) -> Tensor:
        """Return `extreme` as a tensor (N,) bool; all False if it is None."""
        return torch.zeros_like(self.fallback) if self.extreme is None else self.extreme

    def with_extreme(self, rows: Tensor) -> Diagnostics:
        """Return the diagnostics with the flags `extreme` set in these rows (N,) bool as well."""
        all_rows = rows | self.extreme_rows
        return replace(self, extreme=all_rows) if bool(all_rows.any()) else self

    @property
    def off_centre(self) -> Tensor:
        """Return flags (N,) bool of the rows in which the mean of a mixture is far from its median.

        Far is more than the distance between the quartiles. In such a row a few members with other
        locations, or a tail, decide the mean; quantiles describe it better. Predictives that are
        not mixtures of numbers or counts have no flag, nor have rows in which one value has half of
        the probability.
        """
        return torch.zeros_like(self.fallback) if self.mixed is None else is_off_centre(self.mixed)

    def __str__(self) -> str:
        """Return one line with the numbers of flagged rows, and with the optional fields."""
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
        if self.cut is not None and self.cut.numel():
            text += f"; at most {float(self.cut.max()):.1%} of the mass beyond the candidates"
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

    Names are those of torch.distributions; shapes are stated at each method.

    `law` answers in float64 on the CPU. This class checks the arguments, brings them to the law's
    shapes, and gives the answer the dtype and device of `like`. An attribute that a kind of target
    does not have (`probs` of a number, `cdf` of classes) raises AttributeError.
    """

    law: Law
    like: Tensor  # answers have its dtype and device; its values are not used
    diagnostics: Diagnostics
    # the members of a mixture, or the predictives whose rows were joined
    parts: tuple[Predictive, ...] = ()
    differentiable: bool = False  # whether the answers carry gradients in x and y

    @property
    def kind(self) -> str:
        """Name the kind of target: "scalar", "vector", "circular", "count" or "class"."""
        return self.law.kind

    @property
    def members(self) -> tuple[Predictive, ...]:
        """Return the members of a mixture that have a positive weight. They answer in float64.

        Raises AttributeError if the predictive has no parts.
        """
        if not self.parts:
            raise AttributeError("Only a mixture has members.")
        return self.parts

    @property
    def mean(self) -> Tensor:
        """Return the mean of y (N,) or (N, D); of classes: the mean of the indicators (N, C)."""
        return self._cast(self.law.mean)

    @property
    def variance(self) -> Tensor:
        """Return the variance of y, `epistemic + aleatoric`, of the shape of the mean."""
        return self._cast(self.law.variance)

    @property
    def stddev(self) -> Tensor:
        """Return the standard deviation of y, of the shape of the mean."""
        return self._cast(self.law.stddev)

    @property
    def covariance(self) -> Tensor:
        """Return the covariance of a vector y (N, D, D); for Gaussian noise and one target too.

        Raises AttributeError for other targets.
        """
        return self._cast(self.law.covariance)

    @property
    def mode(self) -> Tensor:
        """Return the y of highest density, (N,) or (N, D)."""
        return self._cast(self.law.mode)

    @property
    def mass(self) -> Tensor:
        """Return the integral (or sum) of the density before normalisation (N,).

        The true predictive has mass 1, so the difference from 1 measures the error.
        """
        return self._cast(self.law.mass)

    @property
    def epistemic(self) -> Tensor:
        """Return the part of the variance that more data would remove, Var_f E[y|f].

        The result has the shape of the mean.
        """
        return self._cast(self.law.epistemic)

    @property
    def aleatoric(self) -> Tensor:
        """Return the part of the variance that is noise, E_f Var[y|f], of the shape of the mean."""
        return self._cast(self.law.aleatoric)

    @property
    def entropy(self) -> Tensor:
        """Return the entropy of the classes, −Σ p log p, in nats (N,), from 0 to log C.

        The entropy contains the uncertainty of f and the noise. Raises AttributeError for other
        targets.
        """
        return self._cast(self.law.entropy)

    @property
    def mutual_information(self) -> Tensor:
        """Return the part of `entropy` that more data would remove, in nats (N,).

        The result is H(E_f p) − E_f H(p) ≥ 0. For a refit of the weights (and "newton") its share
        of the entropy is computed under f ~ N(f̂, K), and multiplied by the entropy of the refit's
        predictive. In a mixture it contains the disagreement of the members. Raises AttributeError
        for other targets.
        """
        return self._cast(self.law.mutual_information)

    @property
    def probs(self) -> Tensor:
        """Return the probabilities of the classes (N, C).

        Raises AttributeError for other targets.
        """
        return self._cast(self.law.probs)

    def log_prob(self, y: Any) -> Tensor:
        """Return the log density (or log probability) of y.

        One target: (N,) -> (N,), (N, k) -> (N, k). D targets: (N, D) -> (N,), (N, k, D) -> (N, k).
        Raises ValueError for other shapes, and where y is outside the support.
        """
        targets, is_single = self._shape_targets(y)
        self.law.check(targets)
        return self._cast(drop_single_value(self.law.log_prob(targets), is_single))

    @property
    def cdf(self) -> Callable[[Any], Tensor]:
        """Return the function cdf(y) = P(Y ≤ y), of y's shape; for each of D targets separately.

        The function is a property that raises AttributeError for classes, so that
        `hasattr(predictive, "cdf")` is False for them.
        """
        return self._evaluate_cdf if self.kind != "class" else self.law.refuse_attribute("cdf")

    @in_plain_torch
    def _evaluate_cdf(self, y: Any) -> Tensor:
        """Return P(Y ≤ y), of y's shape. y may be infinite; raises ValueError where it is NaN."""
        targets, is_single = self._shape_targets(y)
        check_not_nan(targets)
        return self._cast(drop_single_value(self.law.cdf(targets), is_single))

    @property
    def icdf(self) -> Callable[[Any], Tensor]:
        """Return the function icdf(q), the quantile at probability q.

        q is one number -> (N,) or (N, D), or a vector (k,) -> (N, k) or (N, D, k). The property
        raises AttributeError for classes.
        """
        return self._evaluate_icdf if self.kind != "class" else self.law.refuse_attribute("icdf")

    @in_plain_torch
    def _evaluate_icdf(self, q: Any) -> Tensor:
        """Return the quantiles at q: () -> (N,) or (N, D); (k,) -> (N, k) or (N, D, k).

        Raises ValueError unless 0 ≤ q ≤ 1.
        """
        probabilities, is_single = parse_probabilities(q)
        return self._cast(drop_single_value(self.law.icdf(probabilities), is_single))

    def interval(self, level: float = 0.95) -> Tensor:
        """Return the central interval of that probability, (N, 2) or (N, D, 2), ends included.

        For classes it is the smallest set with at least that probability, bool (N, C). For angles
        the circle is cut opposite the mean; both ends are within π of the mean, so one may lie
        outside [−π, π). Raises ValueError unless 0 < level < 1.
        """
        return self._cast(self.law.interval(checked_level(level)))

    def hdr(self, level: float = 0.95) -> Any:
        """Return the smallest region with that probability.

        For one target it is a union of intervals, `.lower .upper` (N, R), padded with NaN. For D
        targets it is an ellipsoid, or for a mixture the region above a density. For classes it is
        the set of `interval`. Raises ValueError unless 0 < level < 1.
        """
        region = self.law.hdr(checked_level(level))
        if isinstance(region, tuple):  # a named tuple, whose tensors are cast
            return type(region)(
                *(self._cast(field) if isinstance(field, Tensor) else field for field in region)
            )
        return self._cast(region) if isinstance(region, Tensor) else region

    def sample(self, n: int, generator: torch.Generator | None = None) -> Tensor:
        """Draw n values of y for each input: (n, N), or (n, N, D).

        generator: of the random numbers; None for torch's own.
        """
        return self._cast(self.law.sample(check_draw_count(n), generator))

    def increments(self, y: Any) -> Increments:
        """Return the three increments of the un-normalised log density, of log_prob's shape.

        Raises TypeError for predictives that are not from one refit, such as mixtures, and
        ValueError where y is outside the support.
        """
        targets, is_single = self._shape_targets(y)
        self.law.check(targets)
        return self.law.increments(targets).map(
            lambda increment: self._cast(drop_single_value(increment, is_single))
        )

    def _cast(self, value: Tensor) -> Tensor:
        """Return an answer with the dtype and device of `like`.

        Booleans and integers keep their dtype and are only moved to the device.
        """
        return value.to(self.like) if value.is_floating_point() else value.to(self.like.device)

    def _shape_targets(self, y: Any) -> tuple[Tensor, bool]:
        """Return y in float64 on the CPU, and whether the answer has a last dimension to drop.

        y is (N, k) for one target, with k = 1 and True for one value by row; (N, D) or (N, k, D)
        and False for D targets. Raises ValueError for other shapes.
        """
        if self.kind == "vector":
            rows, size = self.law.mean.shape
            return shape_vector_targets(y, rows, size, self.differentiable), False
        return shape_scalar_targets(y, self.law.rows, self.differentiable)


def is_extreme(f: Tensor, variances: Tensor) -> Tensor:
    """Return flags (N,) bool of the rows with an extreme output or standard deviation.

    Extreme is more than `EXTREME` in size. f (N, C): the outputs. variances (N, C): those of the
    outputs. Rows with features that `ssla.network.bounds`
    cut at 1e60 are flagged too, because their outputs are large.
    """
    return (f.detach().abs() > EXTREME).any(1) | (variances.detach() > EXTREME**2).any(1)


def is_off_centre(law: Law) -> Tensor:
    """Return flags (N,) bool of the rows in which the mean is far from the median.

    Far is more than the distance between the quartiles. Rows with equal quartiles are not flagged.
    law: of one number or count.
    """
    mean = law.mean
    below_mean = law.cdf(mean[:, None])[:, 0]
    # A mean between its quartiles is never flagged. If all are, no quantile is searched for.
    if bool(((below_mean >= QUARTILES[0]) & (below_mean < QUARTILES[2])).all()):
        return torch.zeros_like(below_mean, dtype=torch.bool)
    low, median, high = law.icdf(torch.tensor(QUARTILES, dtype=torch.float64)).unbind(1)
    return (high > low) & ((mean - median).abs() > high - low)


def shape_scalar_targets(y: Any, rows: int, differentiable: bool = False) -> tuple[Tensor, bool]:
    """Return y as (N, k) in float64, and whether it has one value for each row (k = 1).

    rows: N. Accepts a number, (N,), (N, k) and (1, k), and raises ValueError for other shapes.
    differentiable: whether the graph of y is kept.
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


def shape_vector_targets(y: Any, rows: int, size: int, differentiable: bool = False) -> Tensor:
    """Return y (N, D) or (N, k, D) in float64, for N = rows and D = size.

    Raises ValueError for other shapes. differentiable: whether the graph of y is kept.
    """
    value = as_tensor(y, differentiable).to("cpu", torch.float64)
    if value.dim() not in (2, 3) or value.shape[0] != rows or value.shape[-1] != size:
        raise ValueError(
            f"y must have shape ({rows}, {size}) or ({rows}, k, {size}), but has "
            f"{tuple(value.shape)}."
        )
    return value


def check_not_nan(y: Tensor) -> None:
    """Raise ValueError where y is NaN. Infinite values are allowed: a cdf is defined there."""
    if bool(y.isnan().any()):
        raise ValueError("y must not be NaN. Ask for numbers (infinite ones are fine).")


def parse_probabilities(q: Any) -> tuple[Tensor, bool]:
    """Return q as (k,) in float64, and whether it is a single number.

    Raises ValueError for more dimensions, and unless 0 ≤ q ≤ 1.
    """
    value = as_tensor(q).to("cpu", torch.float64)
    if value.dim() > 1 or not bool(((value >= 0) & (value <= 1)).all()):
        raise ValueError(
            "q must be a number or a vector of probabilities between 0 and 1, but is "
            f"{value.tolist()}."
        )
    return value.reshape(-1), value.dim() == 0


def drop_single_value(value: Tensor, is_single: bool) -> Tensor:
    """Return the value without its last dimension if is_single, and unchanged otherwise.

    value: a result (…, k) for k values of y or q in each row. is_single: whether the user gave a
    single one, so that k = 1.
    """
    return value.squeeze(-1) if is_single else value


def choose_widest_like(predictives: Sequence[Predictive]) -> Tensor:
    """Return the `like` tensor with the widest dtype among the predictives.

    If several have that dtype, it is the first of them.
    """
    return max((part.like for part in predictives), key=lambda like: like.dtype.itemsize)
