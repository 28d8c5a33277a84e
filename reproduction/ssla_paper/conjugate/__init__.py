"""Conjugate models: the two procedures beside the analytic predictive, from n = 20 to n = 10⁶.

As published: maximum-likelihood refits θ̂ and θ̃(y), the prior in its increment alone and not in J,
every sum over the rows in float32, ℓ̃ and ℓ subtracted (ASSLA: θ̃ = θ̂ and no prior at all). The
same in float64 separates rounding from the method. Ours: the library with its default convention,
the prior in the refit and in the curvature, increments row by row in float64; the network starts at
its mode, like a trained one.

Normal–normal and Poisson–gamma have the paper's settings. Linear regression is mentioned there and
neither described nor shown: intercept 1, slope 1.5, σ² = 1, x ~ N(0, 1), a prediction at x = 1.5
and independent priors N(0, 1) are our choice, and so are all settings of conflict: a prior far from
the data, a strong one, and both.
"""

from __future__ import annotations

from ssla_paper.conjugate.study import Conjugate

__all__ = ["Conjugate"]
