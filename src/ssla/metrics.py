"""Scores and calibration of any Predictive, against observed y.

Lower is better for nll, crps, interval_score, pinball, brier, rmse and the calibration errors.
Functions return the mean over rows, as a tensor (); `reduce=False` returns one value for each row.
N is the number of rows, and D that of targets in a row. F is the distribution function of a row's
predictive. CRPS of a Gaussian and interval scores are computed by `scoringrules` (`pip install
'ssla[metrics]'`).
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ssla._checks import check_level as checked_level
from ssla._checks import in_plain_torch
from ssla.data import as_tensor, squeeze_column
from ssla.maths.quadrature import wrap_angles
from ssla.predictive import GaussianLaw, Predictive
from ssla.predictive.affine import AffineLaw
from ssla.predictive.joined import JoinedLaw

LEVELS = (0.5, 0.75, 0.9, 0.95)
CRPS_NODES = 96  # on either side of y; a guess
CRPS_COUNTS = 4096  # the most counts that are summed one by one; a guess


@in_plain_torch
def nll(predictive: Predictive, y: Any, *, reduce: bool = True) -> Tensor:
    """Return −log p(y), the negative log predictive density (or probability).

    y: one value for each row. reduce=False: one score for each row (N,), not their mean.
    """
    return _reduce_rows(-predictive.log_prob(squeeze_column(as_tensor(y))), reduce)


@in_plain_torch
def rmse(predictive: Predictive, y: Any) -> Tensor:
    """Return the root mean squared error of the predictive mean, for y of the mean's shape.

    An error of an angle is the shorter way around the circle.
    """
    value = _reshape_like_mean(y, predictive)
    return ((predictive.mean - value) ** 2).mean().sqrt()


@in_plain_torch
def crps(predictive: Predictive, y: Any, *, reduce: bool = True) -> Tensor:
    """Return the continuous ranked probability score ∫ (F(t) − 1{t ≥ y})² dt.

    For counts it is the sum over t = 0, 1, 2, … in place of the integral.

    y: one value for each row. reduce=False: one score for each row, not their mean. Raises
    TypeError for classes, angles, and mixtures of several targets.
    """
    if predictive.kind == "class":
        raise TypeError("CRPS needs ordered targets. For classes use nll, brier or ece.")
    if predictive.kind == "circular":
        raise TypeError("CRPS needs ordered targets. For angles use nll, rmse or coverage.")
    return _reduce_rows(_compute_crps(predictive, y), reduce)


def _compute_crps(predictive: Predictive, y: Any) -> Tensor:
    """Return the CRPS of each row, (N,) or (N, D), by the formula for the predictive's law.

    y: one value for each prediction. Raises TypeError for mixtures of several targets.
    """
    law = predictive.law

    # Laws made of others come first: their parts may be Gaussian.
    if isinstance(law, JoinedLaw):
        return law.ask_by_rows(
            _reshape_like(y, predictive.mean),
            lambda part, y_part: _compute_crps(replace(predictive, law=part), y_part),
        )

    if isinstance(law, AffineLaw):
        # The score is in the unit of the target, so it is that of the base times the scale.
        z = (_reshape_like(y, predictive.mean).to("cpu", torch.float64) - law.shift) / law.scale
        return law.scale * _compute_crps(replace(predictive, law=law.base), z).double()

    if isinstance(law, GaussianLaw):
        mean = predictive.mean.double().cpu()
        scale = predictive.stddev.double().cpu()
        # The torch backend of scoringrules has single precision.
        score = _import_scoringrules().crps_normal(
            _reshape_like(y, mean).numpy(), mean.numpy(), scale.numpy()
        )
        return torch.as_tensor(score)

    if predictive.kind == "vector":
        raise TypeError(
            "CRPS of several targets has a form for single Gaussians only. Score a mixture by nll."
        )

    compute = _sum_crps_of_counts if predictive.kind == "count" else _integrate_crps
    return compute(predictive, _reshape_like(y, predictive.mean))


def _integrate_crps(predictive: Predictive, y: Tensor) -> Tensor:
    """Integrate the CRPS (N,) of numbers y (N,) by a Gauss–Legendre rule on either side of y.

    The variable is t = median + scale · sinh(u), so that nodes in the tails are spaced
    logarithmically. Beyond the quantiles at 1e-8 and 1 − 1e-8 the integrand is taken as one between
    y and the quantile, and as zero elsewhere.
    """
    quantiles = predictive.icdf(
        torch.tensor([1e-8, 0.25, 0.5, 0.75, 1 - 1e-8], dtype=torch.float64)
    ).double()
    y = y.double()
    low, first_quartile, median, third_quartile, high = quantiles.unbind(1)  # each (N,)
    scale = ((third_quartile - first_quartile) / 2).clamp_min(1e-300)
    inside = torch.minimum(torch.maximum(y, low), high)
    nodes, weights = (
        torch.from_numpy(part) for part in np.polynomial.legendre.leggauss(CRPS_NODES)
    )
    total = (y - inside).abs()

    # Below y the integrand is F², and above it (1 − F)².
    for start, stop, is_above in ((low, inside, False), (inside, high, True)):
        # The interval [a, b] of u, and the nodes in it (N, CRPS_NODES)
        a = torch.asinh((start - median) / scale)
        b = torch.asinh((stop - median) / scale)
        u = (a + b)[:, None] / 2 + (b - a)[:, None] / 2 * nodes
        F = predictive.cdf(median[:, None] + scale[:, None] * torch.sinh(u)).double()
        height = (1 - F if is_above else F) ** 2
        # dt = scale · cosh(u) du, and the rule's interval of length 2 becomes [a, b].
        total = total + (height * torch.cosh(u) * weights).sum(1) * (b - a) / 2 * scale

    return total


def _sum_crps_of_counts(predictive: Predictive, y: Tensor) -> Tensor:
    """Sum the CRPS (N,) of counts y (N,), Σ_k (F(k) − 1{k ≥ y})², with F from cdf.

    The sum goes over the counts between the quantiles at 1e-9 and 1 − 1e-9. If these are more than
    CRPS_COUNTS counts apart, only every second, third, … is evaluated, and stands for those after
    it.
    """
    ends: Tensor = predictive.icdf(torch.tensor([1e-9, 1 - 1e-9], dtype=torch.float64)).double()
    y = y.double()
    width = ends[:, 1] - ends[:, 0] + 1
    step = (width / CRPS_COUNTS).ceil()
    steps = int((width / step).max().ceil())

    # (N, steps); rows with a narrower window have counts beyond it, whose terms are zero.
    k = ends[:, :1] + step[:, None] * torch.arange(steps, dtype=torch.float64)
    F: Tensor = predictive.cdf(k).double()
    terms = (F - (k >= y[:, None]).double()) ** 2 * (k < ends[:, 1:] + 1)

    # A y beyond the window: each count between the two has a term of one.
    outside = (y - ends[:, 1] - 1).clamp_min(0) + (ends[:, 0] - y).clamp_min(0)
    return (terms * step[:, None]).sum(1) + outside


@in_plain_torch
def coverage(predictive: Predictive, y: Any, level: float = 0.95) -> Tensor:
    """Return the share of y inside the central interval (for classes: inside the smallest set).

    y: one value for each row; level: of the interval, between 0 and 1.
    """
    region = predictive.interval(checked_level(level))
    if predictive.kind == "class":
        inside = region.gather(1, as_tensor(y).long().reshape(-1, 1)).squeeze(1)
    else:
        value = _reshape_like_mean(y, predictive)
        inside = (value >= region[..., 0]) & (value <= region[..., 1])
    return inside.double().mean()


@in_plain_torch
def mean_width(predictive: Predictive, level: float = 0.95) -> Tensor:
    """Return the mean width of the central interval (for classes: the mean size of the set).

    level: of the interval, between 0 and 1.
    """
    region = predictive.interval(checked_level(level))
    if predictive.kind == "class":
        return region.double().sum(1).mean()
    return (region[..., 1] - region[..., 0]).mean()


@in_plain_torch
def interval_score(
    predictive: Predictive, y: Any, level: float = 0.95, *, reduce: bool = True
) -> Tensor:
    """Return Winkler's score: the interval's width, plus 2/α times its distance from a missed y.

    The interval is the central one of that level, and α = 1 − level. y: of the mean's shape.
    reduce=False: one score for each row, not their mean. Raises ImportError without scoringrules.
    """
    region = predictive.interval(checked_level(level))
    score = _import_scoringrules().interval_score(
        _reshape_like_mean(y, predictive),
        region[..., 0],
        region[..., 1],
        1 - level,
        backend="torch",
    )
    return _reduce_rows(score, reduce)


@in_plain_torch
def pinball(predictive: Any, y: Any, q: float, *, reduce: bool = True) -> Tensor:
    """Return the pinball loss of the quantile at probability q, between 0 and 1.

    The loss is q·(y − quantile) for y above the quantile, and (1 − q)·(quantile − y) below. y: one
    value for each prediction. reduce=False: one score for each row, not their mean. Raises
    TypeError for classes and angles.
    """
    if predictive.kind in ("class", "circular"):
        raise TypeError(
            f"Quantiles need ordered targets, but the predictive is of kind {predictive.kind!r}."
        )
    level = checked_level(q)
    quantile: Tensor = predictive.icdf(level)
    error = _reshape_like(y, quantile) - quantile
    return _reduce_rows(torch.maximum(level * error, (level - 1) * error), reduce)


@in_plain_torch
def pit(predictive: Any, y: Any, generator: torch.Generator | None = None) -> Tensor:
    """Return the probability integral transform F(y), which is uniform if the predictive is right.

    y: one value for each row (N,), or (N, D). For counts the result is randomised between F(y − 1)
    and F(y) by `generator`; without one it is halfway between the two.
    """
    value = squeeze_column(as_tensor(y))
    upper: Tensor = predictive.cdf(value)
    if predictive.kind != "count":
        return upper
    lower: Tensor = predictive.cdf(as_tensor(value).double() - 1)
    u: float | Tensor = 0.5
    if generator is not None:
        u = torch.rand(upper.shape, generator=generator, dtype=torch.float64).to(upper)
    return lower + u * (upper - lower)


@in_plain_torch
def calibration_error(predictive: Predictive, y: Any, bins: int = 20) -> Tensor:
    """Return the mean difference of observed and nominal frequencies of {F(y) ≤ q}.

    The mean of |observed − q| goes over q = 1/bins … (bins − 1)/bins. y: one value for each
    prediction. Raises TypeError for classes.
    """
    if predictive.kind == "class":
        raise TypeError("calibration_error is for ordered targets. For classes use ece.")
    q = torch.arange(1, bins, dtype=torch.float64) / bins
    observed = (pit(predictive, y).double().flatten()[:, None] <= q).double().mean(0)
    return (observed - q).abs().mean()


@in_plain_torch
def brier(predictive: Predictive, y: Any, *, reduce: bool = True) -> Tensor:
    """Return Σ_c (p_c − 1{y = c})² over the classes (0 … 2); raise TypeError for other targets.

    y (N,): the classes. reduce=False: one score for each row, not their mean.
    """
    p = _get_class_probs(predictive)
    is_observed = torch.nn.functional.one_hot(as_tensor(y).long().flatten(), p.shape[1]).to(p)
    return _reduce_rows(((p - is_observed) ** 2).sum(1), reduce)


@in_plain_torch
def ece(predictive: Predictive, y: Any, bins: int = 15) -> Tensor:
    """Return the expected calibration error, Σ share·|accuracy − confidence| over bins.

    Bins are of equal width, by the confidence: the probability of the most probable class. y (N,):
    the classes. Raises TypeError for other targets.
    """
    confidence, predicted = _get_class_probs(predictive).double().max(1)
    is_correct = (predicted == as_tensor(y).long().flatten()).double()
    bin_of_row = (confidence * bins).long().clamp(0, bins - 1)
    # Σ (is_correct − confidence) of a bin is its number of rows times |accuracy − confidence|, so
    # that its share of N rows is the weight of the bin.
    gap = torch.zeros(bins, dtype=torch.float64).index_add(0, bin_of_row, is_correct - confidence)
    return gap.abs().sum() / is_correct.numel()


@dataclass(frozen=True)
class Summary:
    """The usual scores together, which print as a table."""

    scores: dict[str, float]

    def __getitem__(self, name: str) -> float:
        """Return a score by its name; raise KeyError for another name."""
        return self.scores[name]

    def __str__(self) -> str:
        """Return a table with one line for each score."""
        width = max(map(len, self.scores))
        return "\n".join(f"{name:<{width}}  {value: .4f}" for name, value in self.scores.items())


@in_plain_torch
def summary(predictive: Predictive, y: Any, levels: Sequence[float] = LEVELS) -> Summary:
    """Return the usual scores of a predictive for y, one value for each prediction.

    The scores are NLL, CRPS (not for angles), RMSE, coverage and width at each level, the
    calibration error and the mean mass. For classes they are NLL, Brier, ECE, accuracy and the mean
    mass. The mass is the integral of the predictive before it was normalised: the nearer to one,
    the better the approximation. Raises TypeError for targets without a CRPS.
    """
    mass = predictive.mass.double().mean()
    scores = {"nll": nll(predictive, y)}
    if predictive.kind == "class":
        scores["brier"] = brier(predictive, y)
        scores["ece"] = ece(predictive, y)
        scores["accuracy"] = (predictive.mode == as_tensor(y).long().flatten()).double().mean()
    else:
        if predictive.kind != "circular":  # angles are not ordered
            scores["crps"] = crps(predictive, y)
        scores["rmse"] = rmse(predictive, y)
        for level in levels:
            scores[f"coverage {level:.0%}"] = coverage(predictive, y, level)
            scores[f"width {level:.0%}"] = mean_width(predictive, level)
        scores["calibration error"] = calibration_error(predictive, y)

    scores["mass"] = mass
    return Summary({name: float(value) for name, value in scores.items()})


def _get_class_probs(predictive: Any) -> Tensor:
    """Return the probabilities of classes (N, C); raise TypeError for other targets."""
    if predictive.kind != "class":
        raise TypeError(
            f"This score is for classes, but the predictive is of kind {predictive.kind!r}."
        )
    probs: Tensor = predictive.probs
    return probs


def _reshape_like(y: Any, mean: Tensor) -> Tensor:
    """Return y in the shape, dtype and device of `mean`; raise ValueError for another size."""
    value = as_tensor(y).to(mean)
    if value.numel() != mean.numel():
        raise ValueError(
            f"y must have shape {tuple(mean.shape)}, one value for each prediction, but has "
            f"{tuple(value.shape)}."
        )
    return value.reshape(mean.shape)


def _reshape_like_mean(y: Any, predictive: Predictive) -> Tensor:
    """Return y in the shape of the mean; for an angle the equal one within π of the mean."""
    mean = predictive.mean
    value = _reshape_like(y, mean)
    return mean + wrap_angles(value - mean) if predictive.kind == "circular" else value


def _reduce_rows(by_row: Tensor, reduce: bool) -> Tensor:
    """Return the mean of values (N,) or (N, D) if `reduce`, else the values themselves."""
    return by_row.mean() if reduce else by_row


def _import_scoringrules() -> ModuleType:
    """Import scoringrules and return it; raise ImportError with the remedy if it is missing."""
    try:
        return importlib.import_module("scoringrules")
    except ImportError:
        raise ImportError("This score needs scoringrules: pip install 'ssla[metrics]'.") from None
