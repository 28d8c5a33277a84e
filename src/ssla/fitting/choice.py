"""Which of several settings rows that the network has not seen choose, from their log densities.

The best mean log density is uncertain, and rows from the training distribution cannot see what
doubt is worth elsewhere. So: of all settings within one standard error of the best (paired, over
rows), take the one with the smallest prior precision, then the dispersion that is best there. The
price of the doubt is at most MOST_LOSS nats, which one standard error of few rows would exceed, and
may be LEAST_LOSS even where many rows can tell smaller differences. Everything here is a function
of the table of log densities alone, so that the choice of one half of the rows can be scored on the
other half for nothing.
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
# stay without a clear reason.
CLEARLY = 2.0


class Setting(NamedTuple):
    """What validation rows choose between."""

    mode: str
    gaussian: str
    spread: float  # factor on the dispersion of the likelihood at hand
    precision: float  # factor on the prior precisions at hand; for Gaussian noise at that noise

    @property
    def family(self) -> tuple[str, str]:
        return self.mode, self.gaussian


class Difference(NamedTuple):
    """A mean over rows, and its standard error."""

    mean: float
    error: float


def mean_and_error(values: Tensor, weights: Tensor) -> Difference:
    """The weighted mean of values (n,) and its standard error; infinite for a single row."""
    total = weights.sum()
    mean = (weights * values).sum() / total
    rows = float(total**2 / (weights**2).sum())
    variance = (weights * (values - mean) ** 2).sum() / total
    return Difference(
        float(mean), math.sqrt(float(variance) / (rows - 1)) if rows > 1 else math.inf
    )


def choose_setting(settings: Sequence[Setting], scores: Tensor, weights: Tensor) -> int:
    """The index of the setting that rows with these log densities choose.  (k, n), (n,) -> index.

    First the mode and the Gaussian: those of the best setting, unless the trained head (tilt) is
    within two standard errors of it, or the variational Gaussian within one. Then the prior, then
    the dispersion.
    """
    means = scores @ weights / weights.sum()
    best = _best(range(len(settings)), means)
    trained = [i for i, setting in enumerate(settings) if setting.mode == TILT]
    best = _or_rival(best, trained, scores, weights, means, CLEARLY)
    mode = settings[best].mode
    variational = [i for i, own in enumerate(settings) if own.family == (mode, VARIATIONAL)]
    best = _or_rival(best, variational, scores, weights, means)
    family = [i for i, setting in enumerate(settings) if setting.family == settings[best].family]
    near = [i for i in family if _as_good(scores[best], scores[i], weights)]
    smallest = min(settings[i].precision for i in near)
    return _best([i for i in family if settings[i].precision == smallest], means)


def cross_fitted(settings: Sequence[Setting], scores: Tensor, weights: Tensor) -> Tensor:
    """Log densities (n,) of each half of the rows under the setting that the other half chooses.

    The halves are the rows with even and with odd numbers.
    """
    even = torch.arange(len(weights)) % 2 == 0
    found = torch.empty_like(scores[0])
    for half in (even, ~even):
        other = ~half if bool((~half).any()) else half
        index = choose_setting(settings, scores[:, other], weights[other])
        found[half] = scores[index, half]
    return found


def best_spread(settings: Sequence[Setting], scores: Tensor, weights: Tensor, chosen: int) -> float:
    """The dispersion between the settings that were tried, beside the chosen one.

    Where a parabola through the three nearest logarithms of the spread is highest; the chosen
    setting's own if it is at the edge.
    """
    own = settings[chosen]
    line = {
        setting.spread: float(scores[i] @ weights / weights.sum())
        for i, setting in enumerate(settings)
        if setting._replace(spread=own.spread) == own
    }
    spreads = sorted(line)
    place = spreads.index(own.spread)
    if not 0 < place < len(spreads) - 1:
        return own.spread
    (a, b, c), (fa, fb, fc) = zip(
        *((math.log(s), line[s]) for s in spreads[place - 1 : place + 2]), strict=True
    )
    up, down = (b - a) * (fb - fc), (b - c) * (fb - fa)
    if up == down:
        return own.spread
    top = b - 0.5 * ((b - a) * up - (b - c) * down) / (up - down)
    return math.exp(min(max(top, a), c))


def _best(indices: Sequence[int] | range, means: Tensor) -> int:
    return max(indices, key=lambda i: float(means[i]))


def _or_rival(
    best: int,
    rivals: list[int],
    scores: Tensor,
    weights: Tensor,
    means: Tensor,
    errors: float = 0.0,
) -> int:
    """The best of the rivals if it is as good as `best`, or within so many standard errors of
    it; else `best` itself.
    """
    if not rivals or best in rivals:
        return best
    rival = _best(rivals, means)
    near = mean_and_error(scores[best] - scores[rival], weights)
    return (
        rival
        if near.mean <= errors * near.error or _as_good(scores[best], scores[rival], weights)
        else best
    )


def _as_good(best: Tensor, other: Tensor, weights: Tensor) -> bool:
    """Whether the mean of best − other is at most its standard error, within the two limits."""
    loss = mean_and_error(best - other, weights)
    return loss.mean <= min(max(loss.error, LEAST_LOSS), MOST_LOSS)
