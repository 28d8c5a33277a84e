"""Whether small counts have a Poisson distribution, or are better predicted as numbers.

A mixture of Poisson distributions over x has a variance of at least its mean. So a grade from 3 to
9 cannot be one, and large counts are numbers in practice. For the rest, held-out rows decide, by
the networks that held them out, as these were trained: P(y) of a Poisson distribution against that
of a continuous one (`ssla.tables.networks.whole_numbers`).
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
# Both are guesses.
LEAST_DISPERSION = 0.7  # variance/mean of y
DISPERSIONS = (0.6, 1.6)  # mean squared error/mean at held-out rows; 1 for a Poisson distribution


def may_be_poisson(y: Tensor, weights: Tensor) -> bool:
    """Check whether targets y (n,) are small counts which do not vary less than Poisson counts.

    They have more than two values. weights (n,) are row weights.
    """
    if not whole_numbers.are_small_counts(y, weights):
        return False
    mean = weights @ y / weights.sum()
    return float(weights @ (y - mean) ** 2 / weights.sum()) >= LEAST_DISPERSION * float(mean)


def is_worth_counting(numbers: Ensemble, x: Tensor, y: Tensor, weights: Tensor) -> bool:
    """Check whether the errors of a fit to numbers are about as large as those of Poisson counts.

    Only then is a Poisson fit worth its time. x (n, d), y (n,) and weights (n,) are the rows.
    """
    if numbers.held is None or not bool(numbers.held.any(1).all()):
        return False
    low, high = DISPERSIONS
    return low <= dispersion(numbers, x, y, weights) <= high


def dispersion(numbers: Ensemble, x: Tensor, y: Tensor, weights: Tensor) -> float:
    """Return Σ(y − m)²/Σm at held-out rows, with the mean m of the networks that held them out.

    x (n, d), y (n,), weights (n,): all rows of the fit.
    """
    errors = 0.0
    total = 0.0
    for network, (held_x, held_y, w) in enumerate(_held_out_rows(numbers, x, y, weights)):
        mean = predicted_means(numbers, network, held_x)
        errors += float(w @ (held_y - mean) ** 2)
        total += float(w @ mean)
    return errors / total if total > 0 else torch.inf


def prefer_counts(
    numbers: Ensemble, counts: Ensemble, x: Tensor, y: Tensor, weights: Tensor
) -> bool:
    """Check whether the Poisson networks predict held-out rows better.

    Both ensembles hold out the same of the rows x (n, d), y (n,), weights (n,).
    """
    member_gains = gains(numbers, counts, x, y, weights)
    return len(member_gains) > 0 and float(member_gains.mean()) > 0


def gains(numbers: Ensemble, counts: Ensemble, x: Tensor, y: Tensor, weights: Tensor) -> Tensor:
    """Return the mean of log P(y) by counts − log P(y) by numbers for each member (M,).

    It is over the member's held-out rows; members that only one ensemble has kept have none.
    """
    member_gains = []
    held_out = _held_out_rows(numbers, x, y, weights)
    for network, (member, (held_x, held_y, w)) in enumerate(
        zip(numbers.kept, held_out, strict=True)
    ):
        if member in counts.kept:
            counting = counts.kept.index(member)
            gain = log_probs(counts, counting, held_x, held_y) - log_probs(
                numbers, network, held_x, held_y
            )
            member_gains.append(w @ gain / w.sum())
    return torch.stack(member_gains) if member_gains else torch.empty(0, dtype=torch.float64)


def log_probs(ensemble: Ensemble, network: int, x: Tensor, y: Tensor) -> Tensor:
    """Return log P(y) (n,) of counts y (n,) at x (n, d), by one network as it was trained."""
    likelihood, f = _network_outputs(ensemble, network, x)
    if ensemble.target is None:
        return likelihood.log_prob(y, f)
    return whole_numbers.log_probs(likelihood, f, ensemble.target, ensemble.scale, y)


def predicted_means(numbers: Ensemble, network: int, x: Tensor) -> Tensor:
    """Return the mean of y (n,) at x (n, d), by one network as it was trained."""
    assert numbers.target is not None
    likelihood, f = _network_outputs(numbers, network, x)
    mean, sd = whole_numbers.moments(likelihood, f, numbers.target)
    if isinstance(numbers.scale, Positive | Censored):
        return numbers.scale.moments_of_normals(mean, sd)[0]
    return mean


def _network_outputs(ensemble: Ensemble, network: int, x: Tensor) -> tuple[Likelihood, Tensor]:
    """Return the likelihood of one network, and its outputs f (n, C) at x (n, d)."""
    likelihood = next(
        component.posterior.likelihood
        for component in ensemble.components
        if component.member == network
    )
    with torch.no_grad():
        return likelihood, ensemble.modules[network](ensemble.standardise(x))


def _held_out_rows(
    ensemble: Ensemble, x: Tensor, y: Tensor, weights: Tensor
) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Return inputs (m, d), targets (m,) and weights (m,) that each member held out.

    x (n, d), y (n,), weights (n,): all rows of the table, of which some may not be fitted.
    """
    assert ensemble.held is not None
    fitted = fitted_rows(ensemble, len(x))
    x, y, weights = x[fitted], y[fitted], weights[fitted]
    return [(x[held], y[held], weights[held]) for held in ensemble.held]
