"""The arguments of a fit, checked: an error here comes before the first pass over the data."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch.distributions import Distribution

from ssla._checks import check_name
from ssla.curvature import Structure, resolve_structure
from ssla.curvature.automatic import AUTO
from ssla.curvature.memory import DEFAULT_BUDGET
from ssla.fitting.fit_plan import FitPlan
from ssla.fitting.passes import Data
from ssla.likelihoods import Likelihood
from ssla.priors import Prior, as_prior
from ssla.report import AS_IS, LAPLACE, POLISH, TILT, VARIATIONAL

if TYPE_CHECKING:
    from ssla.posterior import Posterior


def checked_plan(
    result_class: type[Posterior],
    data: Data,
    likelihood: Likelihood,
    prior: Prior | Distribution | None,
    structure: str | Structure,
    mode: str | None,
    gaussian: str | None,
    budget: int,
) -> FitPlan:
    """Check the arguments of a fit, and return its plan.

    result_class: the class that the fit returns. data: the source of its passes. prior, mode,
    gaussian: None where the fit chooses. budget: bytes for intermediate results.

    Raises TypeError for an object that is not a likelihood, a prior or a structure, and ValueError
    for unknown names and for arguments that exclude each other.
    """
    _check_likelihood(likelihood)
    if mode is not None:
        check_name("mode", mode, (POLISH, TILT, AS_IS))
    if gaussian is not None:
        check_name("gaussian", gaussian, (LAPLACE, VARIATIONAL))
    if gaussian == VARIATIONAL and not likelihood.linear_domain:
        raise ValueError(
            f"gaussian='variational' averages over a Gaussian of the outputs, but {likelihood!r} "
            "does not allow every output. Use gaussian='laplace', or a likelihood on the "
            "logarithmic scale."
        )

    # "auto" stands for dense until the first batch opens the network; then the fit chooses.
    automatic = isinstance(structure, str) and structure == AUTO
    return FitPlan(
        result_class,
        data,
        likelihood,
        None if prior is None else as_prior(prior),
        resolve_structure("dense" if automatic else structure),
        mode,
        budget,
        gaussian,
        automatic=automatic,
    )


def _check_likelihood(likelihood: Likelihood) -> None:
    """Raise TypeError for an object that is not a likelihood.

    Raises ValueError for a tempered one whose noise is to be estimated.
    """
    if isinstance(likelihood, type):
        raise TypeError(
            f"likelihood must be an object, but is the class {likelihood.__name__}. Write "
            f"{likelihood.__name__}(…)."
        )
    if not isinstance(likelihood, Likelihood):
        raise TypeError(
            "likelihood must be an object such as ssla.likelihoods.Gaussian(noise='estimate'), "
            f"but is {likelihood!r}. A likelihood of your own inherits from "
            "ssla.likelihoods.Likelihood, or is made by ssla.likelihoods.custom."
        )
    if likelihood.needs_noise_estimate and not likelihood.quadratic:
        raise ValueError(
            "Tempered(Gaussian(noise='estimate')) is not defined: give the base's noise as a "
            "number."
        )


def checked_weights(weights: Any) -> str | list[str] | tuple[str, ...]:
    """Return the argument weights= unchanged; raise TypeError unless it is a name or a list.

    Whether the names exist is checked when the network is opened.
    """
    if not isinstance(weights, str | list | tuple):
        raise TypeError(
            "weights must be 'last_layer', 'all', a module's name or a list of parameter names, "
            f"but is {weights!r}."
        )
    return weights


def checked_budget(memory_budget: Any) -> int:
    """Return the argument memory_budget= in bytes; None stands for the default of 1 GiB.

    Raises ValueError if it is not a positive number.
    """
    if memory_budget is None:
        return DEFAULT_BUDGET
    if isinstance(memory_budget, str) or memory_budget <= 0:
        raise ValueError(
            f"memory_budget must be a number of bytes, for example 2**30, but is {memory_budget!r}."
        )
    return int(memory_budget)
