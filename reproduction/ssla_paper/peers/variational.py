"""Mean-field variational inference by numpyro: independent Gaussians over the weights, the
evidence bound by Adam.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence

from torch import Tensor

from ssla_paper.peers import GaussianMixture, library
from ssla_paper.peers.programs import INSTALL, Program, arrays

RATE, LAST_RATE, START_SD = 1e-2, 1e-4, 1e-2


def mean_field(
    x: Tensor,
    y: Tensor,
    new: Tensor,
    *,
    hidden: Sequence[int] = (50, 50),
    activation: str = "tanh",
    heteroscedastic: bool,
    prior_sd: float = 1.0,
    steps: int = 4000,
    draws: int = 200,
    batch_size: int | None = None,
    particles: int = 1,
    seed: int = 0,
) -> GaussianMixture:
    """p(y|new) as a mixture over draws from q; x (n, d), y (n,), new (N, d), standardised.

    Adam's rate falls from 0.01 to 0.0001 in even steps. q starts at a draw from the prior (its mean
    is a saddle, where all units are equal) with deviations of a hundredth of the prior's: larger
    ones hide the data at first. particles: draws in each estimate of the bound.
    """
    jax, numpyro, infer = (
        library("jax", INSTALL),
        library("numpyro", INSTALL),
        library("numpyro.infer", INSTALL),
    )
    guides = library("numpyro.infer.autoguide", INSTALL)
    program = Program(x.shape[1], tuple(hidden), activation, heteroscedastic, prior_sd)
    inputs, targets, rows = arrays(x, y.flatten(), new)
    start, later = jax.random.split(jax.random.PRNGKey(seed))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = program.model(batch_size)
        guide = guides.AutoNormal(model, init_loc_fn=infer.init_to_sample(), init_scale=START_SD)
        adam = numpyro.optim.Adam(lambda i: RATE + (LAST_RATE - RATE) * (i / steps))
        inference = infer.SVI(model, guide, adam, infer.Trace_ELBO(num_particles=particles))
        found = inference.run(start, steps, inputs, targets, progress_bar=False)
        sampled = guide.sample_posterior(later, found.params, sample_shape=(draws,))
    return program.mixture(sampled, rows)
