"""What validation rows show about the network itself, without epistemic uncertainty ("doubt").

The rows show its best dispersion, and a scale of rows. A spread is a factor on the dispersion of a
likelihood. A scale of rows (`ssla.network.RowScale`) divides the features of each row, and so its
logits, by a number that grows with their length.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ssla.fitting.choice import compute_mean_and_error
from ssla.fitting.validation_rows import ValidationRows
from ssla.likelihoods import Likelihood
from ssla.likelihoods.likelihood import Dispersed, multiply_dispersion
from ssla.network import LastLayer, RowScale

# Factors on the dispersion at which the network is scored: every COARSE-th of them first, then
# those around the best. A guess.
SPREADS = torch.logspace(-1.5, 1.5, 121, base=8.0, dtype=torch.float64)
COARSE = 10
# Strengths of a scale of rows. On networks of benchmarks/networks larger ones gained nothing: T(x)
# is then as good as proportional to the length of the features.
STRENGTHS = (1.0, 3.0, 10.0, 30.0)
# Standard errors by which a scale of rows must be better. On networks of benchmarks/networks, where
# it helped (clinc, lstm) it was better by 6, where it did not (cnn, transformer, fashion) by at
# most 2; on cnn such a gain was lost under shift.
CLEARLY = 3.0
# share of the rows whose features count as short: scales are not extended below them (a guess)
SHORTEST = 0.05


def find_best_network_spread(rows: ValidationRows, likelihood: Likelihood, f: Tensor) -> float:
    """Find the factor on the dispersion with which outputs f (n, C) predict the rows best.

    The factor is one of SPREADS; it is 1 where the likelihood has no dispersion. The search assumes
    that the log density of the rows has a single maximum over the factor.
    """
    if not isinstance(likelihood, Dispersed):
        return 1.0

    def compute_height(index: int) -> float:
        """Return the penalised log density of all rows at the factor SPREADS[index].

        The penalty is a standard normal log prior of the factor's logarithm. Without the prior
        there may be no maximum: if the network classifies all rows right, a smaller temperature is
        always better.
        """
        spread = float(SPREADS[index])
        log_density = rows.score_plug_in(multiply_dispersion(likelihood, spread), f) @ rows.weights
        return float(log_density) - 0.5 * math.log(spread) ** 2

    nearest = max(range(0, len(SPREADS), COARSE), key=compute_height)
    neighbours = range(max(nearest - COARSE + 1, 0), min(nearest + COARSE, len(SPREADS)))
    return float(SPREADS[max(neighbours, key=compute_height)])


def choose_row_scale(rows: ValidationRows, likelihood: Likelihood) -> RowScale | None:
    """Choose a scale of rows with which a classifier predicts the rows clearly better.

    likelihood: of the classifier. With and without the scale, the best temperature is taken. The
    result is None where no scale is clearly better, for other targets than classes, for other
    weights than a last layer, and where all features have one length.
    """
    network = rows.posterior.network
    classes = likelihood.support_for(network.outputs).kind == "class"
    if (
        not classes
        or rows.squares is None
        or not isinstance(network, LastLayer)
        or network.offset is not None
    ):
        return None

    squares_with_weight = rows.squares[rows.weights > 0]
    if not float(squares_with_weight.min()) < float(squares_with_weight.max()):
        return None

    def compute_scores(f: Tensor) -> Tensor:
        """Compute log densities (n,) of the rows for outputs f (n, C), at the best temperature."""
        spread = find_best_network_spread(rows, likelihood, f)
        return rows.score_plug_in(multiply_dispersion(likelihood, spread), f)

    # Every scale takes the mean of the features' squared lengths, and a small quantile of them.
    mean = float(rows.squares @ rows.weights / rows.weights.sum())
    rank = max(int(SHORTEST * len(squares_with_weight)), 1)
    least = float(squares_with_weight.kthvalue(rank).values)
    scales = [RowScale(strength, mean, least) for strength in STRENGTHS]
    scaled = [
        compute_scores(rows.f / scale.compute_scales(rows.squares)[:, None]) for scale in scales
    ]
    best = max(range(len(scales)), key=lambda i: float(scaled[i] @ rows.weights))
    gain = compute_mean_and_error(scaled[best] - compute_scores(rows.f), rows.weights)
    return scales[best] if gain.mean > CLEARLY * gain.error else None
