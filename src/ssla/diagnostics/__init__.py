"""Questions about a posterior: leave-one-out, conformal sets, explanations, other priors, sets
of priors.
"""

from __future__ import annotations

from ssla.diagnostics.credal_sets import Credal, credal
from ssla.diagnostics.sensitivities import conflict, local_sensitivity, sensitivity

__all__ = ["Credal", "conflict", "credal", "local_sensitivity", "sensitivity"]
