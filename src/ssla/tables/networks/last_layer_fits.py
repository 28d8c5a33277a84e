"""Last layers of small networks and of trees, under a given prior."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import nn

from ssla.curvature import Structure
from ssla.curvature.memory import DEFAULT_BUDGET
from ssla.data import open_source
from ssla.fitting.arguments import checked_plan
from ssla.fitting.fit import fit_with_prior
from ssla.fitting.passes import Reader
from ssla.fitting.ranks import data_of_ranks, errors_sent_to_ranks
from ssla.fitting.variational import ROUGH
from ssla.likelihoods import Likelihood
from ssla.network import LAST_LAYER
from ssla.posterior import Posterior
from ssla.priors import Prior


def fit_last_layer(
    model: nn.Module,
    data: Any,
    likelihood: Likelihood,
    prior: Prior,
    weights: str = LAST_LAYER,
    structure: str | Structure = "dense",
    rough: bool = False,
) -> Posterior:
    """Fit as `ssla.fit` does with a prior, but polish a last layer that has a mode in any case.

    It is for networks of which held-out rows choose the prior afterwards, so the mode is not
    compared with the trained weights. rough: with a variational Gaussian of a lower accuracy,
    which is enough to choose a prior.
    """
    with errors_sent_to_ranks():
        reader = Reader(open_source(data), model, weights, DEFAULT_BUDGET)
        plan = checked_plan(
            Posterior,
            data_of_ranks(reader),
            likelihood,
            prior,
            structure,
            None,
            None,
            DEFAULT_BUDGET,
        )
    return fit_with_prior(
        replace(plan, keeps_trained_layer=False, tolerance=ROUGH if rough else None)
    )
