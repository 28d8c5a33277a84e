"""The studies by name, in the order of the paper. Each is imported when it is used."""

from __future__ import annotations

import importlib

from ssla._checks import unknown_name
from ssla_paper.runner import Study

STUDIES = {  # name -> module
    "conjugate": "ssla_paper.conjugate:Conjugate",
    "rates": "ssla_paper.rates:Rates",
    "precision": "ssla_paper.precision:Precision",
    "heteroscedastic": "ssla_paper.heteroscedastic:Heteroscedastic",
    "uci": "ssla_paper.uci:Uci",
    "sine": "ssla_paper.sine:Sine",
    "priors": "ssla_paper.modularity:Priors",
    "robustness": "ssla_paper.robustness:Robustness",
    "stated": "ssla_paper.stated:Stated",
}


def study(name: str) -> Study:
    """The study of that name. ImportError names the missing library."""
    if name not in STUDIES:
        raise ValueError(unknown_name("study", name, STUDIES))
    place, kind = STUDIES[name].split(":")
    try:
        made: Study = getattr(importlib.import_module(place), kind)()
    except ModuleNotFoundError as error:
        raise ImportError(
            f"The study {name!r} needs {error.name}: pip install ./reproduction."
        ) from error
    return made
