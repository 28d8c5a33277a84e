"""The studies by name, in the order in which the paper tells them."""

from __future__ import annotations

from collections.abc import Callable

from ssla.paper.modularity import Priors
from ssla.paper.precision import Precision
from ssla.paper.runner import Study
from ssla.paper.sine import Sine
from ssla.paper.uci import Uci

STUDIES: dict[str, Callable[[], Study]] = {"precision": Precision, "sine": Sine, "priors": Priors, "uci": Uci}
