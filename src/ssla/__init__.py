"""ssla: an honest predictive distribution for any trained PyTorch model, without sampling.

Only the names listed here are public. Each is imported when it is first used, so that `ssla --help` need not wait for torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING

__version__ = "0.1.0"

_PACKAGES = (
    "botorch",
    "demo",
    "distributed",
    "likelihoods",
    "metrics",
    "mlflow",
    "persistence",
    "plots",
    "predictive",
    "priors",
    "sklearn",
    "structures",
)
_NAMES = {  # public name -> the module that defines it
    "AutoRefit": "refit",
    "ExplicitModel": "explicit",
    "FileError": "persistence",
    "Increments": "refit",
    "Marginal": "state",
    "NoRefit": "refit",
    "OutputRefit": "refit",
    "PlugIn": "refit",
    "Posterior": "posterior",
    "Predictive": "predictive",
    "Scorer": "scoring",
    "WeightRefit": "refit",
    "assla": "posterior",
    "conflict": "prior_sets",
    "credal": "prior_sets",
    "estimate_cost": "network.cost",
    "explain": "posterior",
    "fit": "posterior",
    "html_report": "plots.report",
    "label_next": "posterior",
    "load": "posterior",
    "local_sensitivity": "prior_sets",
    "mixture": "predictive",
    "sensitivity": "prior_sets",
    "ssla": "posterior",
}
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
    "Scorer",
    "WeightRefit",
    "assla",
    "conflict",
    "credal",
    "distributed",
    "estimate_cost",
    "explain",
    "fit",
    "html_report",
    "label_next",
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

if TYPE_CHECKING:
    from ssla import distributed, likelihoods, metrics, priors, structures
    from ssla.explicit import ExplicitModel
    from ssla.network.cost import estimate_cost
    from ssla.persistence import FileError
    from ssla.plots.report import html_report
    from ssla.posterior import Posterior, assla, explain, fit, label_next, load, ssla
    from ssla.predictive import Predictive, mixture
    from ssla.prior_sets import conflict, credal, local_sensitivity, sensitivity
    from ssla.refit import AutoRefit, Increments, NoRefit, OutputRefit, PlugIn, WeightRefit
    from ssla.scoring import Scorer
    from ssla.state import Marginal
else:

    def __getattr__(name: str) -> object:
        if name in _PACKAGES:
            return import_module(f"ssla.{name}")
        if name not in _NAMES:
            raise AttributeError(f"module 'ssla' has no attribute {name!r}")
        value = globals()[name] = getattr(import_module(f"ssla.{_NAMES[name]}"), name)
        return value

    def __dir__() -> list[str]:
        return sorted([*_NAMES, *_PACKAGES])
