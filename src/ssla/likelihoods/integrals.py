"""log ∫ p(y|f) N(f; f̂, K) df at observed targets: what rows that the network has not seen are scored by.

A likelihood with a closed form has the method `log_average`. For others it is a sum over fixed
nodes, a few rows at a time: Gauss–Hermite for one and two outputs, a low-discrepancy set for more.
The sum over few nodes is a little too low where the doubt is large (Jensen's inequality: by about
half the relative variance of the sum), for all settings that are compared alike.
"""

from __future__ import annotations

from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from ssla.likelihoods.likelihood import Likelihood
from ssla.numerics.quadrature.normal import normal_nodes
from ssla.numerics.roots import Root

NUMBERS_AT_ONCE = 1 << 19  # of an array (rows, nodes, outputs): what fits a processor's cache
# Pairs of nodes, by the number of outputs: guesses. With few nodes the log-loss of 150 classes is
# too high (clinc, 2,000 rows at one setting: .390 with 32 nodes, .374 with 128, .365 with 512), more
# so where the doubt is larger: a search with them prefers somewhat too little doubt.
FEW_PAIRS, MANY_PAIRS = 32, 64
MANY_OUTPUTS = 64


@runtime_checkable
class ClosedForm(Protocol):
    """A likelihood whose average over a Gaussian of the outputs is known."""

    def log_average(self, y: Tensor, f: Tensor, K: Tensor) -> Tensor:
        """log ∫ p(y|f) N(f; f̂, K) df.  y (B,) or (B, C), f (B, C), K (B, C, C) -> (B,)."""
        ...


@runtime_checkable
class AtNodes(Protocol):
    """A likelihood with a fast way to its log density at many outputs for each target."""

    def log_prob_at_nodes(self, y: Tensor, f: Tensor) -> Tensor:
        """log p(y|f) at J nodes.  y (B,), f (B, C, J), which may be overwritten -> (B, J)."""
        ...


def log_average(likelihood: Likelihood, y: Tensor, f: Tensor, root: Root) -> Tensor:
    """log ∫ p(y|f) N(f; f̂, R Rᵀ) df (B,), in float64.  y as the likelihood takes it, f (B, C).

    For likelihoods that allow every output; nodes outside the domain would have no density.
    """
    if isinstance(likelihood, ClosedForm):
        R = root.times(torch.eye(f.shape[1], dtype=root.dtype)).double()
        return likelihood.log_average(y, f.double(), R @ R.mT)
    nodes, weights = normal_nodes(f.shape[1], FEW_PAIRS if f.shape[1] > MANY_OUTPUTS else MANY_PAIRS)
    # Logits of classes lose nothing in single precision; targets of other kinds may.
    single = likelihood.support_for(f.shape[1]).kind == "class" and root.dtype == torch.float32
    dtype = torch.float32 if single else torch.float64
    z, log_weights = nodes.mT.contiguous().to(root.dtype), weights.log()
    size = max(NUMBERS_AT_ONCE // nodes.numel(), 1)
    found = torch.empty(len(f), dtype=torch.float64)
    for start in range(0, len(f), size):
        rows = slice(start, start + size)
        points = root.take(rows).times(z).to(dtype) + f[rows].to(dtype).unsqueeze(-1)  # (b, C, J)
        found[rows] = (_at_nodes(likelihood, y[rows], points).double() + log_weights).logsumexp(1)
    return found


def _at_nodes(likelihood: Likelihood, y: Tensor, points: Tensor) -> Tensor:
    """log p(y|f) (b, J) at points (b, C, J)."""
    if isinstance(likelihood, AtNodes):
        return likelihood.log_prob_at_nodes(y, points)
    targets = y.unsqueeze(1).expand(points.shape[0], points.shape[2], *y.shape[1:])
    return likelihood.log_prob(targets, points.mT)
