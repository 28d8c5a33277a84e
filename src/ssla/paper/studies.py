"""The studies by name, in the order in which the paper tells them."""

from __future__ import annotations

from collections.abc import Callable

from ssla.paper.heteroscedastic import Heteroscedastic
from ssla.paper.modularity import Priors
from ssla.paper.precision import Precision
from ssla.paper.runner import Study
from ssla.paper.sine import Sine

STUDIES: dict[str, Callable[[], Study]] = {
    "precision": Precision,
    "heteroscedastic": Heteroscedastic,
    "sine": Sine,
    "priors": Priors,
}
