"""Sets of priors: how much an answer depends on the prior, and bounds over all priors of a set."""

from __future__ import annotations

from ssla.prior_sets.credal_sets import Credal, credal
from ssla.prior_sets.sensitivities import conflict, local_sensitivity, sensitivity

__all__ = ["Credal", "conflict", "credal", "local_sensitivity", "sensitivity"]
