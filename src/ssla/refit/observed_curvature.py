"""K = J H⁻¹ Jᵀ with the observed curvature of the training rows in H, for refits without a refit.

A posterior's own H has the Fisher information of each row. The paper's Algorithm 2 has the observed
curvature, H = Σ_i J_iᵀ Λ(y_i, f̂_i) J_i − ∇² log π. For the log link of counts, for classes and for
Gaussian noise they are the same.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ssla.curvature import Operator, Structure
from ssla.data import Inputs, check_batch
from ssla.priors import EXACT
from ssla.refit.weights.refit_rows import DataPurpose, check_same_data, open_training_data
from ssla.report import LAPLACE
from ssla.values import join_chunks

if TYPE_CHECKING:
    from ssla.posterior import Posterior

PURPOSE = DataPurpose(
    "NoRefit(data_curvature='observed')",
    "The data of the curvature",
    "refit=ssla.NoRefit(data_curvature='observed', data={})",
)


def observed_covariance(posterior: Posterior, x: Inputs, data: Any) -> Tensor:
    """Compute K = J H⁻¹ Jᵀ (N, C, C) with the observed curvature of the training rows in H.

    x: N inputs. data: the training data; None: those of the posterior. H includes the prior under
    the exact convention only, as the determinant needs it. Raises ValueError for a variational
    Gaussian, for data that are not those of the fit, and if H is not positive definite.
    """
    operator = factorise_observed_curvature(posterior, data)
    return join_chunks(
        posterior.network.outputs,
        [(f, operator.covariance(J)) for f, J in posterior.linearised(x)],
    ).covariance


def factorise_observed_curvature(posterior: Posterior, data: Any) -> Operator:
    """Return H⁻¹ with the observed curvature of the training rows, in the posterior's structure.

    It is a pass over the rows. The arguments and errors are those of `observed_covariance`.
    """
    if posterior.gaussian != LAPLACE:
        raise ValueError(
            "data_curvature='observed' is the curvature at θ̂, but this posterior has a variational "
            "Gaussian around another mean. Fit with gaussian='laplace', or use "
            "data_curvature='fisher'."
        )
    sums = _sum_observed_curvature(posterior, data)
    prior = posterior.bound_prior.precision(posterior.theta)

    # A determinant without the prior has a covariance without it.
    precision = prior if posterior.convention == EXACT else torch.zeros_like(posterior.theta)
    reason = ""
    if not sums.drops_negative_curvature:
        try:
            return sums.with_prior(precision)
        except ValueError as error:
            reason = f" ({error})"
    raise ValueError(
        "The observed curvature of the training rows is not positive definite at θ̂, so ASSLA with "
        "data_curvature='observed' does not exist. Likely causes: (a) θ̂ is no maximum, as with "
        "mode='tilt' far from the mode; (b) outliers under a likelihood that is not concave; (c) a "
        "weak prior. Remedy: mode='polish', a stronger prior, or data_curvature='fisher'." + reason
    )


def _sum_observed_curvature(posterior: Posterior, data: Any) -> Structure:
    """Sum Σ_i J_iᵀ Λ(y_i, f̂_i) J_i over the training rows, in the posterior's structure.

    data: see `observed_covariance`. Raises ValueError if the data are not those of the fit, or if
    the structure cannot sum indefinite rows.
    """
    likelihood, outputs = posterior.likelihood, posterior.network.outputs
    support = likelihood.support_for(outputs)
    size = posterior.theta.numel()
    sums = posterior.statistics.curvature.for_indefinite_rows().zero(size)
    gradient = torch.zeros(size, dtype=torch.float64)
    n = 0

    for batch in open_training_data(posterior, data, PURPOSE):
        x, y, weights = check_batch(batch, support, outputs)
        first = 0
        for f, J in posterior.linearised(x):
            rows = slice(first, first + len(f))
            first += len(f)
            w = torch.ones(len(f), dtype=torch.float64) if weights is None else weights[rows]
            f_64, J_64 = f.double(), J.double()
            gradient += J_64.pull(w.unsqueeze(-1) * likelihood.score(y[rows], f_64))
            precision = likelihood.precision(y[rows], f_64).expand(*f.shape, outputs)
            sums = sums.add(J_64, w[:, None, None] * precision, w)
        n += first

    check_same_data(posterior, n, gradient, PURPOSE)
    return sums
