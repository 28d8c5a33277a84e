"""The studies by name, in the order in which the paper tells them. Each is imported when it is wanted."""

from __future__ import annotations

import importlib

from ssla._checks import unknown_name
from ssla.paper.runner import Study

STUDIES = {  # name -> where it is
    "conjugate": "ssla.paper.conjugate:Conjugate",
    "rates": "ssla.paper.rates:Rates",
    "precision": "ssla.paper.precision:Precision",
    "heteroscedastic": "ssla.paper.heteroscedastic:Heteroscedastic",
    "uci": "ssla.paper.uci:Uci",
    "sine": "ssla.paper.sine:Sine",
    "priors": "ssla.paper.modularity:Priors",
    "robustness": "ssla.paper.robustness:Robustness",
}


def study(name: str) -> Study:
    """The study of that name. ImportError says which extra its work needs."""
    if name not in STUDIES:
        raise ValueError(unknown_name("study", name, STUDIES))
    place, kind = STUDIES[name].split(":")
    try:
        made: Study = getattr(importlib.import_module(place), kind)()
    except ModuleNotFoundError as error:
        raise ImportError(f"The study {name!r} needs {error.name}: pip install 'ssla[paper]'.") from error
    return made
