"""The public names: what `ssla.name` finds."""

from ssla import distributed, likelihoods, metrics, priors, structures
from ssla.cost import estimate_cost
from ssla.credal_sets import credal
from ssla.expansion import Increments
from ssla.explicit import ExplicitModel
from ssla.fitting import fit
from ssla.persistence import FileError, load
from ssla.posterior import Marginal, Posterior
from ssla.predictive import Predictive, mixture
from ssla.refit import AutoRefit, NoRefit, OutputRefit, PlugIn, WeightRefit, assla, ssla
from ssla.sensitivities import conflict, local_sensitivity, sensitivity

__all__ = [
    "AutoRefit",
    "ExplicitModel",
    "FileError",
    "Increments",
    "Marginal",
    "NoRefit",
    "OutputRefit",
    "PlugIn",
    "Posterior",
    "Predictive",
    "WeightRefit",
    "assla",
    "conflict",
    "credal",
    "distributed",
    "estimate_cost",
    "fit",
    "likelihoods",
    "load",
    "local_sensitivity",
    "metrics",
    "mixture",
    "priors",
    "sensitivity",
    "ssla",
    "structures",
]
