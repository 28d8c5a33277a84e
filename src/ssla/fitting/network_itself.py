"""What rows that it has not seen say of the network itself, without any doubt: its spread, and
its scale of rows.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ssla.fitting.choice import mean_and_error
from ssla.fitting.validation_rows import ValidationRows
from ssla.likelihoods import Likelihood
from ssla.likelihoods.likelihood import Dispersed, dispersed
from ssla.network import LastLayer, RowScale

# Factors on the dispersion at which the network is scored: some of them first, then those around
# the best.
SPREADS = torch.logspace(-1.5, 1.5, 121, base=8.0, dtype=torch.float64)
COARSE = 10
# Strengths of a scale of rows. On networks of benchmarks/networks larger ones gained nothing: T(x)
# is then as good as proportional to the length of the features.
STRENGTHS = (1.0, 3.0, 10.0, 30.0)
# Standard errors by which a scale of rows must be better. Where it helped (clinc, lstm) it was
# better by 6, where it did not (cnn, transformer, fashion) by at most 2; on cnn such a gain was
# lost under shift.
CLEARLY = 3.0
SHORTEST = (
    0.05  # share of the rows whose features count as short: scales are not extended below them
)


def best_spread(rows: ValidationRows, likelihood: Likelihood, f: Tensor) -> float:
    """The factor on the dispersion with which the network's outputs f (n, C) predict the rows
    best; 1 where there is none.
    """
    if not isinstance(likelihood, Dispersed):
        return 1.0

    def height(place: int) -> float:
        """The log density of all rows at one of SPREADS, with a standard normal prior of its
        logarithm.

        The prior is for rows that set no limit: if the network classifies all of them right, a
        smaller temperature is always better.
        """
        spread = float(SPREADS[place])
        return (
            float(rows.plug_in(dispersed(likelihood, spread), f) @ rows.weights)
            - 0.5 * math.log(spread) ** 2
        )

    def best_of(places: range) -> int:
        return max(places, key=height)

    near = best_of(range(0, len(SPREADS), COARSE))
    return float(
        SPREADS[best_of(range(max(near - COARSE + 1, 0), min(near + COARSE, len(SPREADS))))]
    )


def chosen_row_scale(rows: ValidationRows, likelihood: Likelihood) -> RowScale | None:
    """A scale of rows with which the network predicts clearly better, at the best temperature
    of each; None: there is none.
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
    counted = rows.squares[rows.weights > 0]
    if not float(counted.min()) < float(counted.max()):
        return None

    def scores(f: Tensor) -> Tensor:
        return rows.plug_in(dispersed(likelihood, best_spread(rows, likelihood, f)), f)

    mean = float(rows.squares @ rows.weights / rows.weights.sum())
    least = float(counted.kthvalue(max(int(SHORTEST * len(counted)), 1)).values)
    scales = [RowScale(strength, mean, least) for strength in STRENGTHS]
    found = [scores(rows.f / scale.of_squares(rows.squares)[:, None]) for scale in scales]
    best = max(range(len(scales)), key=lambda i: float(found[i] @ rows.weights))
    gain = mean_and_error(found[best] - scores(rows.f), rows.weights)
    return scales[best] if gain.mean > CLEARLY * gain.error else None
