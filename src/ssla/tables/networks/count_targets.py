"""Whether small counts have a Poisson law, or are better predicted as numbers.

A mixture of Poisson laws over x has a variance of at least its mean. So a grade from 3 to 9 cannot
be one, and large counts are numbers in practice. For the rest, held-out rows decide, by the
networks that held them out, as these were trained: P(y) of a Poisson law against that of a
continuous one (`ssla.tables.networks.whole_numbers`).
"""

from __future__ import annotations

import torch
from torch import Tensor

from ssla.likelihoods import Likelihood
from ssla.predictive.positive import Censored, Positive
from ssla.tables.networks import whole_numbers
from ssla.tables.networks.building import fitted_rows
from ssla.tables.networks.ensemble import Ensemble

POISSON = "poisson"
LEAST_DISPERSION = 0.7  # variance/mean of y
DISPERSIONS = (0.6, 1.6)  # mean squared error/mean at held-out rows; a Poisson law has 1


def may_be_poisson(y: Tensor, weights: Tensor) -> bool:
    """Whether targets (n,) are small counts with more than two values, which do not vary less
    than Poisson counts.
    """
    if not whole_numbers.small_counts(y, weights):
        return False
    mean = weights @ y / weights.sum()
    return float(weights @ (y - mean) ** 2 / weights.sum()) >= LEAST_DISPERSION * float(mean)


def worth_counting(numbers: Ensemble, x: Tensor, y: Tensor, weights: Tensor) -> bool:
    """Whether the errors of a fit to numbers are about as large as those of a Poisson law, so
    that one is worth a fit.
    """
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


def prefer_counts(
    numbers: Ensemble, counts: Ensemble, x: Tensor, y: Tensor, weights: Tensor
) -> bool:
    """Whether the Poisson networks predict held-out rows better.

    Both ensembles hold out the same rows.
    """
    found = gains(numbers, counts, x, y, weights)
    return len(found) > 0 and float(found.mean()) > 0


def gains(numbers: Ensemble, counts: Ensemble, x: Tensor, y: Tensor, weights: Tensor) -> Tensor:
    """The mean of log P(y) by counts − log P(y) by numbers at the held-out rows of each member
    that both have kept (M,).
    """
    found = []
    for m, (member, (rows, target, w)) in enumerate(
        zip(numbers.kept, _held_out(numbers, x, y, weights), strict=True)
    ):
        if member in counts.kept:
            place = counts.kept.index(member)
            gain = log_probs(counts, place, rows, target) - log_probs(numbers, m, rows, target)
            found.append(w @ gain / w.sum())
    return torch.stack(found) if found else torch.empty(0, dtype=torch.float64)


def log_probs(ensemble: Ensemble, member: int, x: Tensor, y: Tensor) -> Tensor:
    """log P(y) (n,) of counts y (n,) at x (n, d), by one network as it was trained."""
    likelihood, f = _outputs(ensemble, member, x)
    if ensemble.target is None:
        return likelihood.log_prob(y, f)
    return whole_numbers.log_probs(likelihood, f, ensemble.target, ensemble.scale, y)


def means(numbers: Ensemble, member: int, x: Tensor) -> Tensor:
    """The mean of y (n,) at x (n, d), by one network as it was trained."""
    assert numbers.target is not None
    mean, sd = whole_numbers.moments(*_outputs(numbers, member, x), numbers.target)
    return (
        numbers.scale.moments_of_normals(mean, sd)[0]
        if isinstance(numbers.scale, Positive | Censored)
        else mean
    )


def _outputs(ensemble: Ensemble, member: int, x: Tensor) -> tuple[Likelihood, Tensor]:
    likelihood = next(
        part.posterior.likelihood for part in ensemble.components if part.member == member
    )
    with torch.no_grad():
        return likelihood, ensemble.modules[member](ensemble.standardised(x))


def _held_out(
    ensemble: Ensemble, x: Tensor, y: Tensor, weights: Tensor
) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Rows, targets and weights that each member held out."""
    assert ensemble.held is not None
    some = fitted_rows(ensemble, len(x))
    x, y, weights = x[some], y[some], weights[some]
    return [(x[held], y[held], weights[held]) for held in ensemble.held]
