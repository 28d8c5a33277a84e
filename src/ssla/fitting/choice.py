"""Which of several settings rows that the network has not seen choose, from their log densities.

The best mean log density is uncertain, and rows from the training distribution cannot see what
doubt is worth elsewhere. So: of all settings within one standard error of the best (paired, over
rows), take the one with the smallest prior precision, then the dispersion that is best there. The
price of the doubt is at most MOST_LOSS nats, which one standard error of few rows would exceed, and
may be LEAST_LOSS even where many rows can tell smaller differences. Everything here is a function
of the table of log densities alone, so that the choice of one half of the rows can be scored on the
other half without a new fit.

A setting is a mode, a Gaussian, a factor on the dispersion (its spread) and a factor on the prior
precisions. k settings have the log densities (k, n) of n rows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ssla.report import TILT, VARIATIONAL

# Nats a row. Settings next to each other may have a paired standard error of 1e-4 (fashion, 5,000
# rows), which would leave no room for doubt that is worth .05 in the AUROC of other inputs.
LEAST_LOSS, MOST_LOSS = 0.001, 0.002
# Standard errors by which a polished head must be better: the predictions of the network itself
# stay without a clear reason. A guess.
CLEARLY = 2.0


class Setting(NamedTuple):
    """What validation rows choose between."""

    mode: str
    gaussian: str
    spread: float  # factor on the dispersion of the present likelihood
    precision: float  # factor on the present prior precisions; for Gaussian noise at that noise

    @property
    def family(self) -> tuple[str, str]:
        """Return the mode and the Gaussian: settings that share both are of one family."""
        return self.mode, self.gaussian


class Difference(NamedTuple):
    """A mean over rows, and its standard error."""

    mean: float
    error: float


def compute_mean_and_error(values: Tensor, weights: Tensor) -> Difference:
    """Compute the weighted mean of values (n,), and its standard error.

    weights: (n,), not all zero. The error is infinite for a single row.
    """
    total = weights.sum()
    mean = (weights * values).sum() / total
    effective_rows = float(total**2 / (weights**2).sum())  # Kish's effective sample size
    variance = (weights * (values - mean) ** 2).sum() / total
    error = math.sqrt(float(variance) / (effective_rows - 1)) if effective_rows > 1 else math.inf
    return Difference(float(mean), error)


def choose_setting(settings: Sequence[Setting], scores: Tensor, weights: Tensor) -> int:
    """Return the index of the setting that rows choose by their log densities.

    scores (k, n): the log densities of the rows under k settings. weights (n,): of the rows. First
    the mode and the Gaussian are chosen: those of the best setting, unless the trained head (tilt)
    is within two standard errors of it, or the variational Gaussian within one. Then the prior is
    chosen, then the dispersion.
    """
    means = scores @ weights / weights.sum()
    best = _find_highest_mean(range(len(settings)), means)
    # The trained head keeps the network's predictions, so a polished one must be clearly better.
    trained = [i for i, setting in enumerate(settings) if setting.mode == TILT]
    best = _prefer_rivals(best, trained, scores, weights, standard_errors=CLEARLY)
    mode = settings[best].mode
    variational = [i for i, setting in enumerate(settings) if setting.family == (mode, VARIATIONAL)]
    best = _prefer_rivals(best, variational, scores, weights)
    # In that family: the weakest prior that is as good as the best, at its best dispersion.
    family = [i for i, setting in enumerate(settings) if setting.family == settings[best].family]
    as_good = [i for i in family if _is_as_good(scores[best], scores[i], weights)]
    weakest = min(settings[i].precision for i in as_good)
    return _find_highest_mean([i for i in family if settings[i].precision == weakest], means)


def cross_fit_scores(settings: Sequence[Setting], scores: Tensor, weights: Tensor) -> Tensor:
    """Return the log density (n,) of each row under the setting that the other half chooses.

    scores: log densities (k, n) under each of k settings. weights (n,): of the rows. The halves are
    the rows with even and with odd numbers. A single row has no other half, and is scored under its
    own choice.
    """
    even = torch.arange(len(weights)) % 2 == 0
    cross_fitted = torch.empty_like(scores[0])
    for half in (even, ~even):
        other = ~half if bool((~half).any()) else half
        index = choose_setting(settings, scores[:, other], weights[other])
        cross_fitted[half] = scores[index, half]
    return cross_fitted


def refine_spread(
    settings: Sequence[Setting], scores: Tensor, weights: Tensor, chosen: int
) -> float:
    """Return the best dispersion near that of the chosen setting, between those that were tried.

    This dispersion is where a parabola through the three nearest logarithms of the spread is
    highest, or the chosen setting's own spread if that is at the edge. scores: log densities (k,
    n). weights: of the rows (n,). chosen: the index of the chosen setting.
    """
    setting = settings[chosen]

    # Mean log densities of the settings that differ in the spread alone.
    means = {
        other.spread: float(scores[i] @ weights / weights.sum())
        for i, other in enumerate(settings)
        if other._replace(spread=setting.spread) == setting
    }
    spreads = sorted(means)
    index = spreads.index(setting.spread)
    if not 0 < index < len(spreads) - 1:
        return setting.spread
    nearest = spreads[index - 1 : index + 2]
    a, b, c = (math.log(spread) for spread in nearest)
    fa, fb, fc = (means[spread] for spread in nearest)
    top = find_parabola_top(a, b, c, fa, fb, fc)
    return setting.spread if top is None else math.exp(min(max(top, a), c))


def find_parabola_top(
    a: float, b: float, c: float, fa: float, fb: float, fc: float
) -> float | None:
    """Return where the parabola through (a, fa), (b, fb) and (c, fc) has its maximum or minimum.

    None where the points are on a line. The formula is that of Brent's parabolic interpolation.
    """
    up = (b - a) * (fb - fc)
    down = (b - c) * (fb - fa)
    if up == down:
        return None
    return b - 0.5 * ((b - a) * up - (b - c) * down) / (up - down)


def _find_highest_mean(indices: Sequence[int] | range, means: Tensor) -> int:
    """Return the one of some indices whose mean, of means (k,), is highest; the first of equals."""
    return max(indices, key=lambda i: float(means[i]))


def _prefer_rivals(
    best: int, rivals: list[int], scores: Tensor, weights: Tensor, standard_errors: float = 0.0
) -> int:
    """Return the best of the rivals if it is about as good as `best`; else `best` itself.

    best, rivals: indices of settings. A rival is about as good if its loss is at most so many
    standard errors, or by `_is_as_good`. scores: log densities (k, n) of all settings. weights: of
    the rows (n,).
    """
    if not rivals or best in rivals:
        return best
    rival = _find_highest_mean(rivals, scores @ weights / weights.sum())
    loss = compute_mean_and_error(scores[best] - scores[rival], weights)
    is_near = loss.mean <= standard_errors * loss.error
    return rival if is_near or _is_as_good(scores[best], scores[rival], weights) else best


def _is_as_good(best: Tensor, other: Tensor, weights: Tensor) -> bool:
    """Return whether the mean loss best − other is at most its standard error.

    best, other: log densities (n,) of rows with weights (n,). A loss up to LEAST_LOSS always
    passes, and one above MOST_LOSS never does.
    """
    loss = compute_mean_and_error(best - other, weights)
    return loss.mean <= min(max(loss.error, LEAST_LOSS), MOST_LOSS)
