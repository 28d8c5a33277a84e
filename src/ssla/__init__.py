"""ssla: an honest predictive distribution for any trained PyTorch model, without sampling.

Only the names listed here are public. Each is imported when it is first used, so that `ssla --help`
need not wait for torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING

__version__ = "0.1.0"

_PACKAGES = {  # public name -> the package or module behind it
    "botorch": "botorch",
    "demo": "demo",
    "distributed": "distributed",
    "likelihoods": "likelihoods",
    "metrics": "metrics",
    "mlflow": "mlflow",
    "plots": "plots",
    "predictive": "predictive",
    "priors": "priors",
    "sklearn": "sklearn",
    "structures": "structures",
}
_NAMES = {  # public name -> the module that defines it
    "AutoRefit": "refit",
    "ExplicitModel": "explicit",
    "FileError": "files",
    "Increments": "refit",
    "Marginal": "values",
    "NoRefit": "refit",
    "OutputRefit": "refit",
    "PlugIn": "refit",
    "Posterior": "posterior",
    "Predictive": "predictive",
    "Scorer": "tables.scoring",
    "WeightRefit": "refit",
    "assla": "posterior",
    "conflict": "diagnostics",
    "credal": "diagnostics",
    "estimate_cost": "network.cost",
    "explain": "posterior",
    "fit": "posterior",
    "html_report": "tables.report",
    "label_next": "posterior",
    "load": "files.load_posterior",
    "local_sensitivity": "diagnostics",
    "mixture": "predictive",
    "paper_settings": "refit",
    "pseudo_label": "diagnostics",
    "sensitivity": "diagnostics",
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
    "botorch",
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
    "mlflow",
    "paper_settings",
    "plots",
    "predictive",
    "priors",
    "pseudo_label",
    "sensitivity",
    "sklearn",
    "ssla",
    "structures",
]

if TYPE_CHECKING:
    from ssla import (
        botorch,
        distributed,
        likelihoods,
        metrics,
        mlflow,
        plots,
        predictive,
        priors,
        sklearn,
        structures,
    )
    from ssla.diagnostics import conflict, credal, local_sensitivity, pseudo_label, sensitivity
    from ssla.explicit import ExplicitModel
    from ssla.files import FileError
    from ssla.files.load_posterior import load
    from ssla.network.cost import estimate_cost
    from ssla.posterior import Posterior, assla, explain, fit, label_next, ssla
    from ssla.predictive import Predictive
    from ssla.predictive.mixing import mixture
    from ssla.refit import (
        AutoRefit,
        Increments,
        NoRefit,
        OutputRefit,
        PlugIn,
        WeightRefit,
        paper_settings,
    )
    from ssla.tables.report import html_report
    from ssla.tables.scoring import Scorer
    from ssla.values import Marginal
else:

    def __getattr__(name: str) -> object:
        """Return a public name, imported when it is first used.

        Raises AttributeError for another name.
        """
        # An imported package becomes an attribute of this one by itself; other names are stored.
        if name in _PACKAGES:
            return import_module(f"ssla.{_PACKAGES[name]}")
        if name not in _NAMES:
            raise AttributeError(f"module 'ssla' has no attribute {name!r}")
        value: object = getattr(import_module(f"ssla.{_NAMES[name]}"), name)
        globals()[name] = value
        return value

    def __dir__() -> list[str]:
        """Return the public names, also those that are not imported yet."""
        return sorted([*_NAMES, *_PACKAGES])
