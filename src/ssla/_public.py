"""The public names, all at once: what `import ssla` offers when the first of them is asked for."""

from ssla import distributed, likelihoods, metrics, priors, structures
from ssla.cost import estimate_cost
from ssla.expansion import Increments
from ssla.fitting import fit
from ssla.persistence import FileError, load
from ssla.posterior import Marginal, Posterior
from ssla.predictive import Predictive, mixture
from ssla.refit import NoRefit, OutputRefit, PlugIn

__all__ = [
    "FileError",
    "Increments",
    "Marginal",
    "NoRefit",
    "OutputRefit",
    "PlugIn",
    "Posterior",
    "Predictive",
    "distributed",
    "estimate_cost",
    "fit",
    "likelihoods",
    "load",
    "metrics",
    "mixture",
    "priors",
    "structures",
]
