"""ssla: an honest predictive distribution for any trained PyTorch model, without sampling."""

from ssla import likelihoods, metrics, priors
from ssla.cost import estimate_cost
from ssla.credal import credal
from ssla.expansion import Increments
from ssla.explicit import ExplicitModel
from ssla.fitting import fit
from ssla.posterior import Marginal, Posterior
from ssla.predictive import Predictive
from ssla.refit import NoRefit, OutputRefit, PlugIn
from ssla.sensitivity import conflict, local_sensitivity, sensitivity

__version__ = "0.1.0"

__all__ = [
    "ExplicitModel",
    "Increments",
    "Marginal",
    "NoRefit",
    "OutputRefit",
    "PlugIn",
    "Posterior",
    "Predictive",
    "conflict",
    "credal",
    "estimate_cost",
    "fit",
    "likelihoods",
    "local_sensitivity",
    "metrics",
    "priors",
    "sensitivity",
]
