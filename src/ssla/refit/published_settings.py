"""The settings of the paper's regression experiments, as arguments of the library's functions.

The functions are `ssla.fit`, `Posterior.tune` and `Posterior.predict`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from ssla._checks import check_name
from ssla.priors import Gaussian
from ssla.refit.outputs import NoRefit, OutputRefit, Refit
from ssla.refit.weights.at_prediction import PREDICTION
from ssla.refit.weights.solved import STRUCTURE
from ssla.refit.weights.weight_refit import WeightRefit
from ssla.report import LAPLACE, TILT

STRUCTURES = ("kfac", "diag", "dense")  # the columns of the paper's tables
CANDIDATES = 20  # appendix of the paper: 20 values of y for each prediction
PRIOR_PRECISION = 1.0  # appendix of the paper: a standard normal prior


class PaperSettings(NamedTuple):
    """What `paper_settings` returns: keyword arguments for two calls, and three refits by name."""

    fit: dict[str, Any]  # of ssla.fit
    tune: dict[str, Any]  # of Posterior.tune
    refits: dict[str, Refit]  # "SSLA", "ASSLA" and "LA", for Posterior.predict


def paper_settings(
    half_width: float,
    structure: str = "kfac",
    at: str = PREDICTION,
    candidates: int = CANDIDATES,
) -> PaperSettings:
    """Return the paper's settings for a regression network: SSLA, ASSLA and LA of one posterior.

    The last layer with its trained weights, a standard normal prior, whose precision is then tuned
    once by the evidence, and one of the structures "kfac", "diag" and "dense". SSLA is Algorithm 1
    as it is written, with the determinant of that structure, on `candidates` values of y around ŷ.
    ASSLA is Algorithm 2, with the structure's Fisher information of the data. LA is the Laplace
    predictive of the outputs.

    half_width: of the candidates' grid ŷ ± half_width, in units of y; the paper does not state it
    (its code has ŷ ± 1.96 standard deviations of the targets). at: "prediction", or "candidate" for
    the refit with each y that the derivation needs. They are settings to check the paper with; the
    library's defaults are more accurate. Raises ValueError for an unknown structure, and for other
    options that do not exist.

    >>> settings = ssla.paper_settings(half_width=1.96 * float(y.std()))           # doctest: +SKIP
    >>> posterior = ssla.fit(net, (x, y), likelihood=likelihood, **settings.fit)   # doctest: +SKIP
    >>> posterior = posterior.tune(**settings.tune)                                # doctest: +SKIP
    >>> posterior.predict(x_new, refit=settings.refits["SSLA"]).interval(0.95)     # doctest: +SKIP
    """
    check_name("structure", structure, STRUCTURES)
    weights = WeightRefit(at=at, logdet=STRUCTURE, candidates=candidates, half_width=half_width)
    return PaperSettings(
        fit={
            "weights": "last_layer",
            "prior": Gaussian(PRIOR_PRECISION),
            "structure": structure,
            "gaussian": LAPLACE,
            "mode": TILT,
        },
        tune={"objective": "evidence", "over": ("prior",), "per_layer": False},
        refits={"SSLA": weights, "ASSLA": NoRefit(), "LA": OutputRefit()},
    )
