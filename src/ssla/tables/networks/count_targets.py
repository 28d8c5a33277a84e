"""Whether small counts have a Poisson distribution, or are better predicted as numbers.

A mixture of Poisson distributions over x has a variance of at least its mean. So grades from 3 to 9
cannot have one, and large counts are treated as numbers. For the remaining targets held-out rows
decide: log P(y) of Poisson networks is compared with that of networks with a continuous predictive
(`ssla.tables.networks.whole_numbers`), each row by the networks that held it out, as trained.

The argument `continuous` is everywhere the ensemble of the continuous fit, and `poisson` that of
the Poisson fit. Both were fitted to the same rows, and hold out the same rows. f are the outputs of
a network.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ssla.likelihoods import Likelihood
from ssla.predictive.positive import Censored, Positive
from ssla.tables.networks import whole_numbers
from ssla.tables.networks.building import find_fitted_rows
from ssla.tables.networks.ensemble import Ensemble

POISSON = "poisson"
# Both are guesses. The second is 1 for a Poisson distribution.
LEAST_DISPERSION = 0.7  # variance of y over its mean
DISPERSIONS = (0.6, 1.6)  # mean squared error over mean, at held-out rows


def may_be_poisson(y: Tensor, weights: Tensor) -> bool:
    """Return whether targets y (n,) are small counts that vary at least about as Poisson counts do.

    Targets that are only 0 and 1 are not counts here. weights (n,) are row weights.
    """
    if not whole_numbers.are_small_counts(y, weights):
        return False
    mean = weights @ y / weights.sum()
    return float(weights @ (y - mean) ** 2 / weights.sum()) >= LEAST_DISPERSION * float(mean)


def is_poisson_worth_fitting(continuous: Ensemble, x: Tensor, y: Tensor, weights: Tensor) -> bool:
    """Return whether the errors of a continuous fit are about as large as those of Poisson counts.

    Otherwise a Poisson fit would not be better, and its time is saved. x (n, d), y (n,), weights
    (n,): all rows of the fit. The answer is False if a member has no held-out rows.
    """
    if continuous.held is None or not bool(continuous.held.any(1).all()):
        return False
    low, high = DISPERSIONS
    return low <= compute_dispersion(continuous, x, y, weights) <= high


def compute_dispersion(continuous: Ensemble, x: Tensor, y: Tensor, weights: Tensor) -> float:
    """Return Σ(y − m)²/Σm at held-out rows, with the mean m of the networks that held them out.

    The ratio is infinite if the means do not have a positive sum.  x (n, d), y (n,), weights (n,):
    all rows of the fit.
    """
    errors = 0.0
    total = 0.0
    held_out = _select_held_out_rows(continuous, x, y, weights)
    for network, (held_x, held_y, held_weights) in enumerate(held_out):
        mean = predict_means(continuous, network, held_x)
        errors += float(held_weights @ (held_y - mean) ** 2)
        total += float(held_weights @ mean)
    return errors / total if total > 0 else torch.inf


def is_poisson_better(
    continuous: Ensemble, poisson: Ensemble, x: Tensor, y: Tensor, weights: Tensor
) -> bool:
    """Return whether the Poisson networks have the higher mean log P(y) at held-out rows.

    Both ensembles hold out the same of the rows x (n, d), y (n,), weights (n,). The answer is False
    if they have no member in common.
    """
    gains = compute_member_gains(continuous, poisson, x, y, weights)
    return len(gains) > 0 and float(gains.mean()) > 0


def compute_member_gains(
    continuous: Ensemble, poisson: Ensemble, x: Tensor, y: Tensor, weights: Tensor
) -> Tensor:
    """Return by how much Poisson networks raise the mean log P(y), for each common member (m,).

    The mean is over the member's held-out rows. Members that only one ensemble has kept are left
    out, so m may be 0.  x (n, d), y (n,), weights (n,): all rows of the fit.
    """
    gains = []
    held_out = _select_held_out_rows(continuous, x, y, weights)
    for network, member in enumerate(continuous.kept_members):
        if member not in poisson.kept_members:
            continue
        held_x, held_y, held_weights = held_out[network]
        poisson_network = poisson.kept_members.index(member)
        poisson_log_probs = compute_count_log_probs(poisson, poisson_network, held_x, held_y)
        gain = poisson_log_probs - compute_count_log_probs(continuous, network, held_x, held_y)
        gains.append(held_weights @ gain / held_weights.sum())

    return torch.stack(gains) if gains else torch.empty(0, dtype=torch.float64)


def compute_count_log_probs(ensemble: Ensemble, network: int, x: Tensor, y: Tensor) -> Tensor:
    """Return log P(y) (n,) of counts y (n,) at x (n, d), by one network as it was trained.

    Of a continuous predictive it is the probability of what rounds to y.  network: its index.
    """
    likelihood, f = _get_likelihood_and_outputs(ensemble, network, x)
    # Only a Poisson ensemble has no unit of the target.
    if ensemble.target is None:
        return likelihood.log_prob(y, f)
    return whole_numbers.compute_rounded_log_probs(
        likelihood, f, ensemble.target, ensemble.scale, y
    )


def predict_means(continuous: Ensemble, network: int, x: Tensor) -> Tensor:
    """Return the mean of y (n,) at x (n, d), by one network as it was trained.

    network: its index in the ensemble, whose target is continuous.
    """
    assert continuous.target is not None
    likelihood, f = _get_likelihood_and_outputs(continuous, network, x)
    mean, sd = whole_numbers.compute_gaussian_moments(likelihood, f, continuous.target)
    if isinstance(continuous.scale, Positive | Censored):
        return continuous.scale.moments_of_normals(mean, sd)[0]
    return mean


def _get_likelihood_and_outputs(
    ensemble: Ensemble, network: int, x: Tensor
) -> tuple[Likelihood, Tensor]:
    """Return the likelihood of one network, by its index, and its outputs f (n, C) at x (n, d)."""
    likelihood = next(
        component.posterior.likelihood
        for component in ensemble.components
        if component.member == network
    )
    with torch.no_grad():
        return likelihood, ensemble.modules[network](ensemble.standardise(x))


def _select_held_out_rows(
    ensemble: Ensemble, x: Tensor, y: Tensor, weights: Tensor
) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Return for each network the inputs (m, d), targets (m,) and weights (m,) that it held out.

    x (n, d), y (n,), weights (n,): all rows of the table, of which some may not be fitted.
    """
    assert ensemble.held is not None
    fitted = find_fitted_rows(ensemble, len(x))
    x, y, weights = x[fitted], y[fitted], weights[fitted]
    return [(x[held], y[held], weights[held]) for held in ensemble.held]
