"""Scores and calibration of any Predictive, against observed y.

Lower is better for nll, crps, interval_score, pinball, brier, rmse and the calibration errors.
Functions give the mean over rows; `reduce=False` gives one value for each row. CRPS of a Gaussian
and interval scores are computed by `scoringrules` (`pip install 'ssla[metrics]'`).
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

from ssla._checks import in_plain_torch
from ssla._checks import level as checked_level
from ssla.data import as_tensor, column
from ssla.maths.quadrature import wrapped
from ssla.predictive import GaussianLaw, Predictive
from ssla.predictive.affine import AffineLaw
from ssla.predictive.joined import JoinedLaw

LEVELS = (0.5, 0.75, 0.9, 0.95)
CRPS_NODES = 96
CRPS_COUNTS = 4096


@in_plain_torch
def nll(predictive: Predictive, y: Any, *, reduce: bool = True) -> Tensor:
    """−log p(y): the negative log predictive density (or probability)."""
    return _mean(-predictive.log_prob(column(as_tensor(y))), reduce)


@in_plain_torch
def rmse(predictive: Predictive, y: Any) -> Tensor:
    """Root mean squared error of the predictive mean."""
    value = _near(y, predictive)
    return ((predictive.mean - value) ** 2).mean().sqrt()


@in_plain_torch
def crps(predictive: Predictive, y: Any, *, reduce: bool = True) -> Tensor:
    """Continuous ranked probability score ∫ (F(t) − 1{t ≥ y})² dt; for counts the sum."""
    if predictive.kind == "class":
        raise TypeError("CRPS needs ordered targets. For classes use nll, brier or ece.")
    if predictive.kind == "circular":
        raise TypeError("CRPS needs ordered targets. For angles use nll, rmse or coverage.")
    law = predictive.law
    if isinstance(law, JoinedLaw):
        value = _like(y, predictive.mean)
        return _mean(
            law.at(value, lambda part, own: crps(replace(predictive, law=part), own, reduce=False)),
            reduce,
        )
    if isinstance(law, AffineLaw):  # the score is in the target's unit
        z = (_like(y, predictive.mean).to("cpu", torch.float64) - law.shift) / law.scale
        return _mean(
            law.scale * crps(replace(predictive, law=law.base), z, reduce=False).double(), reduce
        )
    if isinstance(law, GaussianLaw):
        mean, scale = predictive.mean.double().cpu(), predictive.stddev.double().cpu()
        score = _scoringrules().crps_normal(
            _like(y, mean).numpy(), mean.numpy(), scale.numpy()
        )  # its torch backend is single
        return _mean(torch.as_tensor(score), reduce)
    if predictive.kind == "vector":
        raise TypeError(
            "CRPS of several targets has a form for single Gaussians only. Score a mixture by nll."
        )
    value = _like(y, predictive.mean)
    score = (
        _crps_counts(predictive, value)
        if predictive.kind == "count"
        else _crps_density(predictive, value)
    )
    return _mean(score, reduce)


def _crps_density(predictive: Any, y: Tensor) -> Tensor:
    """Gauss–Legendre on either side of y, in a variable that spaces nodes logarithmically in
    the tails.
    """
    ends = predictive.icdf(
        torch.tensor([1e-8, 0.25, 0.5, 0.75, 1 - 1e-8], dtype=torch.float64)
    ).double()
    y = y.double()
    low, middle, high = ends[:, 0], ends[:, 2], ends[:, 4]
    scale = ((ends[:, 3] - ends[:, 1]) / 2).clamp_min(1e-300)
    inside = torch.minimum(torch.maximum(y, low), high)
    nodes, weights = (
        torch.from_numpy(part) for part in np.polynomial.legendre.leggauss(CRPS_NODES)
    )
    total = (y - inside).abs()
    for start, stop, upper in ((low, inside, False), (inside, high, True)):
        a, b = torch.asinh((start - middle) / scale), torch.asinh((stop - middle) / scale)
        u = (a + b)[:, None] / 2 + (b - a)[:, None] / 2 * nodes
        F = predictive.cdf(middle[:, None] + scale[:, None] * torch.sinh(u)).double()
        height = (1 - F if upper else F) ** 2
        total = total + (height * torch.cosh(u) * weights).sum(1) * (b - a) / 2 * scale
    return total


def _crps_counts(predictive: Any, y: Tensor) -> Tensor:
    ends: Tensor = predictive.icdf(torch.tensor([1e-9, 1 - 1e-9], dtype=torch.float64)).double()
    y = y.double()
    width = ends[:, 1] - ends[:, 0] + 1
    step = (width / CRPS_COUNTS).ceil()
    steps = int((width / step).max().ceil())
    k = ends[:, :1] + step[:, None] * torch.arange(steps, dtype=torch.float64)
    F: Tensor = predictive.cdf(k).double()
    terms = (F - (k >= y[:, None]).double()) ** 2 * (k < ends[:, 1:] + 1)
    outside = (y - ends[:, 1] - 1).clamp_min(0) + (ends[:, 0] - y).clamp_min(
        0
    )  # terms of one beyond the window
    return (terms * step[:, None]).sum(1) + outside


@in_plain_torch
def coverage(predictive: Predictive, y: Any, level: float = 0.95) -> Tensor:
    """The share of y inside the central interval (for classes: inside the smallest set)."""
    return _inside(predictive, y, checked_level(level)).double().mean()


def _inside(predictive: Predictive, y: Any, level: float) -> Tensor:
    region = predictive.interval(level)
    if predictive.kind == "class":
        return region.gather(1, as_tensor(y).long().reshape(-1, 1)).squeeze(1)
    value = _near(y, predictive)
    return (value >= region[..., 0]) & (value <= region[..., 1])


@in_plain_torch
def mean_width(predictive: Predictive, level: float = 0.95) -> Tensor:
    """The mean width of the central interval (for classes: the mean size of the set)."""
    region = predictive.interval(checked_level(level))
    if predictive.kind == "class":
        return region.double().sum(1).mean()
    return (region[..., 1] - region[..., 0]).mean()


@in_plain_torch
def interval_score(
    predictive: Predictive, y: Any, level: float = 0.95, *, reduce: bool = True
) -> Tensor:
    """Width plus 2/α times the distance by which y is missed (Winkler)."""
    region = predictive.interval(checked_level(level))
    value = _near(y, predictive)
    return _mean(
        _scoringrules().interval_score(
            value, region[..., 0], region[..., 1], 1 - level, backend="torch"
        ),
        reduce,
    )


@in_plain_torch
def pinball(predictive: Any, y: Any, q: float, *, reduce: bool = True) -> Tensor:
    """Pinball loss of the quantile at probability q: q·(y − quantile) above it, (1 −
    q)·(quantile − y) below.
    """
    if predictive.kind in ("class", "circular"):
        raise TypeError(
            f"Quantiles need ordered targets, but the predictive is of kind {predictive.kind!r}."
        )
    level = checked_level(q)
    quantile: Tensor = predictive.icdf(level)
    off = _like(y, quantile) - quantile
    return _mean(torch.maximum(level * off, (level - 1) * off), reduce)


@in_plain_torch
def pit(predictive: Any, y: Any, generator: torch.Generator | None = None) -> Tensor:
    """F(y): uniform if the predictive is right. Counts: randomised between F(y − 1) and F(y) by
    `generator`, or halfway between the two without one.
    """
    value = column(as_tensor(y))
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
    """Mean |observed − nominal| frequency of {F(Y) ≤ q} over q = 1/bins … (bins−1)/bins."""
    if predictive.kind == "class":
        raise TypeError("calibration_error is for ordered targets. For classes use ece.")
    q = torch.arange(1, bins, dtype=torch.float64) / bins
    observed = (pit(predictive, y).double().flatten()[:, None] <= q).double().mean(0)
    return (observed - q).abs().mean()


@in_plain_torch
def brier(predictive: Predictive, y: Any, *, reduce: bool = True) -> Tensor:
    """Σ_c (p_c − 1{y = c})² over the classes (0 … 2)."""
    p = _classes(predictive).probs
    hit = torch.nn.functional.one_hot(as_tensor(y).long().flatten(), p.shape[1]).to(p)
    return _mean(((p - hit) ** 2).sum(1), reduce)


@in_plain_torch
def ece(predictive: Predictive, y: Any, bins: int = 15) -> Tensor:
    """Expected calibration error of the most probable class: Σ_bins share·|accuracy −
    confidence|.
    """
    probs: Tensor = _classes(predictive).probs
    confidence, guess = probs.double().max(1)
    right = (guess == as_tensor(y).long().flatten()).double()
    place = (confidence * bins).long().clamp(0, bins - 1)
    gap = torch.zeros(bins, dtype=torch.float64).index_add(0, place, right - confidence)
    return gap.abs().sum() / right.numel()


@dataclass(frozen=True)
class Summary:
    """The usual scores together; prints as a table."""

    scores: dict[str, float]

    def __getitem__(self, name: str) -> float:
        return self.scores[name]

    def __str__(self) -> str:
        width = max(map(len, self.scores))
        return "\n".join(f"{name:<{width}}  {value: .4f}" for name, value in self.scores.items())


@in_plain_torch
def summary(predictive: Predictive, y: Any, levels: Sequence[float] = LEVELS) -> Summary:
    """NLL, CRPS, RMSE, mass, and coverage and width by level (classes: NLL, Brier, ECE,
    accuracy, mass).
    """
    mass = float(predictive.mass.double().mean())
    if predictive.kind == "class":
        accuracy = (predictive.mode == as_tensor(y).long().flatten()).double().mean()
        values = {
            "nll": nll(predictive, y),
            "brier": brier(predictive, y),
            "ece": ece(predictive, y),
            "accuracy": accuracy,
        }
        return Summary({name: float(value) for name, value in values.items()} | {"mass": mass})
    ordered = {} if predictive.kind == "circular" else {"crps": float(crps(predictive, y))}
    scores = {"nll": float(nll(predictive, y))} | ordered | {"rmse": float(rmse(predictive, y))}
    for level in levels:
        scores[f"coverage {level:.0%}"] = float(coverage(predictive, y, level))
        scores[f"width {level:.0%}"] = float(mean_width(predictive, level))
    return Summary(
        scores | {"calibration error": float(calibration_error(predictive, y)), "mass": mass}
    )


def _classes(predictive: Any) -> Any:
    if predictive.kind != "class":
        raise TypeError(
            f"This score is for classes, but the predictive is of kind {predictive.kind!r}."
        )
    return predictive


def _like(y: Any, mean: Tensor) -> Tensor:
    value = as_tensor(y).to(mean)
    if value.numel() != mean.numel():
        raise ValueError(
            f"y must have shape {tuple(mean.shape)}, one value for each prediction, but has "
            f"{tuple(value.shape)}."
        )
    return value.reshape(mean.shape)


def _near(y: Any, predictive: Predictive) -> Tensor:
    """y, of the shape of the mean; an angle as the one within π of the mean."""
    mean = predictive.mean
    value = _like(y, mean)
    return mean + wrapped(value - mean) if predictive.kind == "circular" else value


def _mean(value: Tensor, reduce: bool) -> Tensor:
    return value.mean() if reduce else value


def _scoringrules() -> ModuleType:
    try:
        return importlib.import_module("scoringrules")
    except ImportError:
        raise ImportError("This score needs scoringrules: pip install 'ssla[metrics]'.") from None
