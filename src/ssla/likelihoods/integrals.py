"""log ∫ p(y|f) N(f; f̂, K) df at observed targets: what rows that the network has not seen are
scored by.

A likelihood with a `closed_form` has the method `log_average`. For others it is a sum over fixed
nodes, a few rows at a time: Gauss–Hermite for one and two outputs, a low-discrepancy set for more.
The logarithm of a sum over few nodes is too low where the doubt is large (Jensen's inequality), by
about half the relative variance of the sum. That is added, from the variance between nodes.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ssla.likelihoods.likelihood import Likelihood
from ssla.maths.quadrature.normal import normal_nodes
from ssla.maths.roots import Root

NUMBERS_AT_ONCE = 1 << 19  # of an array (rows, nodes, outputs): what fits a processor's cache
# Pairs of nodes, by the number of outputs. With 32 pairs the log-loss of 150 classes (clinc, 600
# rows) was .486, .438, .446 at prior precisions of 30, 68, 150, corrected .479, .433, .443; with
# 256 pairs, as in a prediction, .474, .428, .441; with 4,096 draws .467, .423, .440.
FEW_PAIRS, MANY_PAIRS = 32, 64
MANY_OUTPUTS = 64
GAUSS_HERMITE = 2  # up to so many outputs, the nodes are exact enough


def log_average(likelihood: Likelihood, y: Tensor, f: Tensor, root: Root) -> Tensor:
    """log ∫ p(y|f) N(f; f̂, R Rᵀ) df (B,), in float64.  y as the likelihood takes it, f (B, C).

    For likelihoods that allow every output; nodes outside the domain would have no density.
    """
    if likelihood.closed_form:
        R = root.times(torch.eye(f.shape[1], dtype=root.dtype)).double()
        return likelihood.log_average(y, f.double(), R @ R.mT)
    nodes, weights = normal_nodes(
        f.shape[1], FEW_PAIRS if f.shape[1] > MANY_OUTPUTS else MANY_PAIRS
    )
    # Logits of classes lose nothing in single precision; targets of other kinds may.
    single = likelihood.support_for(f.shape[1]).kind == "class" and root.dtype == torch.float32
    dtype = torch.float32 if single else torch.float64
    z, log_weights = nodes.mT.contiguous().to(root.dtype), weights.log()
    pairs = len(nodes) // 2 if f.shape[1] > GAUSS_HERMITE else 0
    size = max(NUMBERS_AT_ONCE // nodes.numel(), 1)
    found = torch.empty(len(f), dtype=torch.float64)
    for start in range(0, len(f), size):
        rows = slice(start, start + size)
        points = root.take(rows).times(z).to(dtype) + f[rows].to(dtype).unsqueeze(-1)  # (b, C, J)
        logs = likelihood.log_prob_at_nodes(y[rows], points).double() + log_weights
        sums = logs.logsumexp(1)
        found[rows] = sums + _jensen((logs - sums[:, None]).exp(), pairs) if pairs else sums
    return found


def _jensen(shares: Tensor, pairs: int) -> Tensor:
    """By what the logarithm of a sum is too low in the mean, from the nodes' shares of it (b, J).

    Half the relative variance of the sum. A node and its mirror image, half of the nodes apart,
    count as one: their errors cancel in part. Nothing is added to a sum of zero.
    """
    return (0.5 * pairs * (shares[:, :pairs] + shares[:, pairs:]).var(1)).nan_to_num(0.0)
