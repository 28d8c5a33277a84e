"""Fits posteriors of the last layers of small networks and of trees, under a given prior."""

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
from ssla.fitting.ranks import send_errors_to_ranks, share_data_among_ranks
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
    """Fit a posterior as `ssla.fit` does with a prior, but polish every last layer that has a mode.

    `ssla.fit` compares the mode with the trained weights, and may keep these. Here held-out rows
    choose the prior afterwards, so there is no comparison.

    Errors are those of `ssla.fit`.

    model, data, likelihood, structure: in any form that `ssla.fit` takes.  weights: which weights
    are uncertain; all others are fixed.  rough: whether a variational Gaussian has a lower
    accuracy, which is enough to choose a prior.
    """
    with send_errors_to_ranks():
        reader = Reader(open_source(data), model, weights, DEFAULT_BUDGET)
        plan = checked_plan(
            Posterior,
            share_data_among_ranks(reader),
            likelihood,
            prior,
            structure,
            mode=None,
            gaussian=None,
            budget=DEFAULT_BUDGET,
        )

    tolerance = ROUGH if rough else None
    return fit_with_prior(replace(plan, keeps_trained_layer=False, tolerance=tolerance))
