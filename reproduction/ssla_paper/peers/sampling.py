"""Hamiltonian Monte Carlo by numpyro's NUTS: the reference for the approximations."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from ssla_paper.peers import GaussianMixture, library
from ssla_paper.peers.programs import INSTALL, Program, arrays

TREE_DEPTH = 8


@dataclass(frozen=True, eq=False)
class Chain:
    """The mixture over draws, and convergence diagnostics of μ(new), the median over rows."""

    answer: GaussianMixture
    r_hat: float  # split in halves; 1 at convergence
    effective: float  # draws
    divergent: int


def chain(
    x: Tensor,
    y: Tensor,
    new: Tensor,
    *,
    hidden: Sequence[int] = (50, 50),
    activation: str = "tanh",
    heteroscedastic: bool,
    prior_sd: float = 1.0,
    warmup: int = 200,
    draws: int = 200,
    thin: int = 1,
    seed: int = 0,
) -> Chain:
    """p(y|new) as a mixture over the draws of one chain; x (n, d), y (n,), new (N, d),
    standardised.

    Weights of a layer are exchangeable, so the diagnostics use predictions, not weights.
    """
    jax, infer = library("jax", INSTALL), library("numpyro.infer", INSTALL)
    program = Program(x.shape[1], tuple(hidden), activation, heteroscedastic, prior_sd)
    inputs, targets, rows = arrays(x, y.flatten(), new)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        kernel = infer.NUTS(
            program.model(), max_tree_depth=TREE_DEPTH, init_strategy=infer.init_to_sample()
        )
        sampler = infer.MCMC(
            kernel, num_warmup=warmup, num_samples=draws, thinning=thin, progress_bar=False
        )
        sampler.run(jax.random.PRNGKey(seed), inputs, targets)
        answer = program.mixture(sampler.get_samples(), rows)
        r_hat, effective = _diagnostics(answer.means.numpy())
        divergent = int(sampler.get_extra_fields()["diverging"].sum())
    return Chain(answer, r_hat, effective, divergent)


def _diagnostics(means: np.ndarray) -> tuple[float, float]:
    """Split R̂ and the effective number of draws of μ at each row (draws, rows), then the
    median.
    """
    diagnostics = library("numpyro.diagnostics", INSTALL)
    if len(means) < 4:
        raise ValueError(
            f"Diagnostics need four draws or more, but there are {len(means)}. Increase draws, or "
            "decrease thin."
        )
    several = means[None].astype(np.float64)
    r_hat = diagnostics.split_gelman_rubin(several)
    effective = diagnostics.effective_sample_size(several)
    return float(np.median(r_hat)), float(np.median(effective))
