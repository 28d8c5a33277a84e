"""The public names: what `ssla.name` finds."""

from ssla import distributed, likelihoods, metrics, priors, structures
from ssla.explicit import ExplicitModel
from ssla.fitting import fit
from ssla.network.cost import estimate_cost
from ssla.persistence import FileError, load
from ssla.posterior import Marginal, Posterior
from ssla.predictive import Predictive, mixture
from ssla.prior_sets.credal import credal
from ssla.prior_sets.sensitivity import conflict, local_sensitivity, sensitivity
from ssla.refit import AutoRefit, NoRefit, OutputRefit, PlugIn, WeightRefit, assla, ssla
from ssla.refit.increments import Increments

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
