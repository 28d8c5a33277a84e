"""Answers about a fitted posterior, without another fit.

Leave-one-out, conformal sets, explanations, other priors, sets of priors, and pseudo-labels.
"""

from __future__ import annotations

from ssla.diagnostics.credal_sets import Credal, credal
from ssla.diagnostics.pseudo_labels import PseudoLabels, pseudo_label
from ssla.diagnostics.sensitivities import conflict, local_sensitivity, sensitivity

__all__ = [
    "Credal",
    "PseudoLabels",
    "conflict",
    "credal",
    "local_sensitivity",
    "pseudo_label",
    "sensitivity",
]
