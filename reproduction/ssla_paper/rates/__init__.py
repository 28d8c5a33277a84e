"""Lemma 1, Theorem 1 and the corollaries, measured: the rate at which each remainder falls with n.

Three ordinary models (a line, a Poisson regression, a tanh network of nine weights) and a line with
inputs x_i = 1/i, whose curvature satisfies (A2) and does not grow. One observation (x, y) away from
the prediction is added at every n; a seed's data are nested. θ̂ maximises ℓ_D + log π, as in
Algorithm 1 and in the proof of Lemma 1, and each θ̃ is a refit to convergence. Where the paper
expands ℓ at its maximiser θ̂, we use ℓ + log π, so that the first-order term vanishes. Curvatures
are full Hessians. A slope is that of a least-squares line of log |quantity| on log n, one for each
seed.
"""

from __future__ import annotations

from ssla_paper.rates.study import Rates

__all__ = ["Rates"]
