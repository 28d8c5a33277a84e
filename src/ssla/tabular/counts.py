"""Whether small counts have a Poisson law, or are better predicted as numbers.

A mixture of Poisson laws over x has a variance of at least its mean. So a grade from 3 to 9 cannot be one, and large counts
are numbers in practice. For the rest, held-out rows decide, by the networks that held them out, as these were trained: P(y) of
a Poisson law against

    P(y − ½ < Y < y + ½)        (y = 0: P(Y < ½))

of a continuous one.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ssla.likelihoods import Likelihood
from ssla.predictive.positive import Censored, Positive, log_between
from ssla.tabular.building import fitted_rows
from ssla.tabular.ensemble import Ensemble

POISSON = "poisson"
LARGEST_SPREAD = 5.0  # standard deviation of counts for which it matters that they are discrete
LEAST_DISPERSION = 0.7  # variance/mean of y
DISPERSIONS = (0.6, 1.6)  # mean squared error/mean at held-out rows; a Poisson law has 1


def may_be_poisson(y: Tensor, weights: Tensor) -> bool:
    """Whether targets (n,) are small counts with more than two values, which do not vary less than Poisson counts."""
    if y.dim() != 1 or bool((y < 0).any()) or bool((y != y.round()).any()) or bool((y <= 1).all()):
        return False
    mean = weights @ y / weights.sum()
    variance = weights @ (y - mean) ** 2 / weights.sum()
    return float(variance) <= LARGEST_SPREAD**2 and float(variance) >= LEAST_DISPERSION * float(mean)


def worth_counting(numbers: Ensemble, x: Tensor, y: Tensor, weights: Tensor) -> bool:
    """Whether the errors of a fit to numbers are about as large as those of a Poisson law, so that one is worth a fit."""
    if numbers.held is None or not bool(numbers.held.any(1).all()):
        return False
    low, high = DISPERSIONS
    return low <= dispersion(numbers, x, y, weights) <= high


def dispersion(numbers: Ensemble, x: Tensor, y: Tensor, weights: Tensor) -> float:
    """Σ(y − m)²/Σm at held-out rows, with the mean m of the networks that held them out."""
    errors, total = 0.0, 0.0
    for m, (rows, target, w) in enumerate(_held_out(numbers, x, y, weights)):
        mean = means(numbers, m, rows)
        errors, total = errors + float(w @ (target - mean) ** 2), total + float(w @ mean)
    return errors / total if total > 0 else torch.inf


def prefer_counts(numbers: Ensemble, counts: Ensemble, x: Tensor, y: Tensor, weights: Tensor) -> bool:
    """Whether the Poisson networks predict held-out rows better. Both ensembles hold out the same rows."""
    return float(gains(numbers, counts, x, y, weights).mean()) > 0


def gains(numbers: Ensemble, counts: Ensemble, x: Tensor, y: Tensor, weights: Tensor) -> Tensor:
    """The mean of log P(y) by counts − log P(y) by numbers at the held-out rows of each member (M,)."""
    found = []
    for m, (rows, target, w) in enumerate(_held_out(numbers, x, y, weights)):
        gain = log_probs(counts, m, rows, target) - log_probs(numbers, m, rows, target)
        found.append(w @ gain / w.sum())
    return torch.stack(found)


def log_probs(ensemble: Ensemble, member: int, x: Tensor, y: Tensor) -> Tensor:
    """log P(y) (n,) of counts y (n,) at x (n, d), by one network as it was trained."""
    likelihood, f = _outputs(ensemble, member, x)
    if ensemble.target is None:
        return likelihood.log_prob(y, f)
    ends = torch.stack([y - 0.5, y + 0.5], 1)
    mean, sd = _on_scale(ensemble, likelihood, f)
    t = ((ends if ensemble.scale is None else ensemble.scale.into(ends)) - mean[:, None]) / sd[:, None]
    return log_between(torch.where(y == 0, -torch.inf, t[:, 0]), t[:, 1])


def means(numbers: Ensemble, member: int, x: Tensor) -> Tensor:
    """The mean of y (n,) at x (n, d), by one network as it was trained."""
    mean, sd = _on_scale(numbers, *_outputs(numbers, member, x))
    return numbers.scale.moments_of_normals(mean, sd)[0] if isinstance(numbers.scale, Positive | Censored) else mean


def _outputs(ensemble: Ensemble, member: int, x: Tensor) -> tuple[Likelihood, Tensor]:
    likelihood = next(part.posterior.likelihood for part in ensemble.components if part.member == member)
    with torch.no_grad():
        return likelihood, ensemble.modules[member](ensemble.standardised(x))


def _on_scale(numbers: Ensemble, likelihood: Likelihood, f: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation (n,) of a Gaussian, on the scale of the target."""
    assert numbers.target is not None
    shift, unit = numbers.target.shift[0], numbers.target.scale[0]
    mean, variance = (part.reshape(len(f)) for part in (likelihood.mean(f), likelihood.variance(f)))
    return shift + unit * mean, unit * variance.sqrt()


def _held_out(ensemble: Ensemble, x: Tensor, y: Tensor, weights: Tensor) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Rows, targets and weights that each member held out."""
    assert ensemble.held is not None
    some = fitted_rows(ensemble, len(x))
    x, y, weights = x[some], y[some], weights[some]
    return [(x[held], y[held], weights[held]) for held in ensemble.held]
