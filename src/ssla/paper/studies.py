"""The studies by name, in the order in which the paper tells them."""

from __future__ import annotations

from collections.abc import Callable

from ssla.paper.conjugate import Conjugate
from ssla.paper.modularity import Priors
from ssla.paper.precision import Precision
from ssla.paper.rates import Rates
from ssla.paper.runner import Study
from ssla.paper.sine import Sine

STUDIES: dict[str, Callable[[], Study]] = {
    "conjugate": Conjugate,
    "rates": Rates,
    "precision": Precision,
    "sine": Sine,
    "priors": Priors,
}
