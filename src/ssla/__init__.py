"""ssla: an honest predictive distribution for any trained PyTorch model, without sampling."""

from ssla import likelihoods, metrics, priors
from ssla.cost import estimate_cost
from ssla.expansion import Increments
from ssla.fitting import fit
from ssla.posterior import Marginal, Posterior
from ssla.predictive import Predictive
from ssla.refit import AutoRefit, NoRefit, OutputRefit, PlugIn, WeightRefit, assla, ssla

__version__ = "0.1.0"

__all__ = [
    "AutoRefit",
    "Increments",
    "Marginal",
    "NoRefit",
    "OutputRefit",
    "PlugIn",
    "Posterior",
    "Predictive",
    "WeightRefit",
    "assla",
    "estimate_cost",
    "fit",
    "likelihoods",
    "metrics",
    "priors",
    "ssla",
]
