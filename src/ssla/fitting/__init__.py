"""`fit`: from a trained network and its data to a Posterior.

One pass collects the sums at the trained θ. What happens next is the `mode`:

  polish   Newton steps to the mode of ℓ_D + log π. With Gaussian noise and a last layer the
           objective is quadratic, so the mode follows from the sums: no further pass. Otherwise
           each step is a pass (over cached features while they fit the memory budget).
  tilt     θ̂ stays; the residual gradient is subtracted from the objective, so that θ̂ is its mode.
  as_is    θ̂ stays and is taken for the mode; a large residual gradient is warned about.

By default a last layer is polished, and other weights are tilted. `trained` decides for classifiers
without a prior.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from torch.distributions import Distribution

from ssla._checks import one_of
from ssla.curvature import Structure, resolve
from ssla.curvature.automatic import AUTO
from ssla.curvature.memory import DEFAULT_BUDGET
from ssla.data import Source, open_source
from ssla.fitting.job import Job
from ssla.fitting.more_data import with_more
from ssla.fitting.passes import Chunk, Data, Reader
from ssla.fitting.ranks import announced, shared
from ssla.fitting.variational import with_rows
from ssla.likelihoods import Gaussian, Likelihood, Tempered
from ssla.network import LAST_LAYER
from ssla.priors import Prior, as_prior
from ssla.report import AS_IS, LAPLACE, POLISH, TILT, VARIATIONAL
from ssla.values import Statistics

if TYPE_CHECKING:
    from ssla.posterior import Posterior

__all__ = [
    "Chunk",
    "Reader",
    "announced",
    "checked_budget",
    "checked_job",
    "checked_weights",
    "collect",
    "fit_again",
    "polish_again",
    "shared",
    "update",
]


def checked_job(
    kind: type[Posterior],
    data: Data,
    likelihood: Likelihood,
    prior: Prior | Distribution | None,
    structure: str | Structure,
    mode: str | None,
    gaussian: str | None,
    budget: int,
) -> Job:
    """The work, if its parts are what they should be."""
    if not isinstance(likelihood, type) and not isinstance(likelihood, Likelihood):
        raise TypeError(
            "likelihood must be an object such as ssla.likelihoods.Gaussian(noise='estimate'), "
            f"but is {likelihood!r}."
        )
    if isinstance(likelihood, type):
        raise TypeError(
            f"likelihood must be an object, but is the class {likelihood.__name__}. Write "
            f"{likelihood.__name__}(…)."
        )
    if (
        isinstance(likelihood, Tempered)
        and isinstance(likelihood.base, Gaussian)
        and likelihood.base.estimated
    ):
        raise ValueError(
            "Tempered(Gaussian(noise='estimate')) is not defined: give the base's noise as a "
            "number."
        )
    if mode is not None:
        one_of("mode", mode, (POLISH, TILT, AS_IS))
    if gaussian is not None:
        one_of("gaussian", gaussian, (LAPLACE, VARIATIONAL))
    if gaussian == VARIATIONAL and not likelihood.linear_domain:
        raise ValueError(
            f"gaussian='variational' averages over a Gaussian of the outputs, but {likelihood!r} "
            "does not allow every output. Use gaussian='laplace', or a likelihood on the "
            "logarithmic scale."
        )
    own = None if prior is None else as_prior(prior)
    if isinstance(structure, str) and structure == AUTO:
        return Job(
            kind, data, likelihood, own, resolve("dense"), mode, budget, gaussian, automatic=True
        )
    return Job(kind, data, likelihood, own, resolve(structure), mode, budget, gaussian)


def checked_weights(weights: Any) -> str | list[str] | tuple[str, ...]:
    if not isinstance(weights, str | list | tuple):
        raise TypeError(
            "weights must be 'last_layer', 'all', a module's name or a list of parameter names, "
            f"but is {weights!r}."
        )
    return weights


def checked_budget(memory_budget: Any) -> int:
    if memory_budget is not None and (isinstance(memory_budget, str) or memory_budget <= 0):
        raise ValueError(
            f"memory_budget must be a number of bytes, for example 2**30, but is {memory_budget!r}."
        )
    return DEFAULT_BUDGET if memory_budget is None else int(memory_budget)


def collect(posterior: Posterior, data: Any) -> Statistics:
    """The sums of other data under a posterior's Gaussian (at θ̂, or averages), in one pass."""
    job = _job(posterior, data)[0]
    if posterior.variational is None:
        return job.sums_at(posterior.theta)
    return job.average(posterior.theta, moves=False)(
        posterior.mean, posterior.covariance
    ).statistics


def again(posterior: Posterior) -> Job | None:
    """Further passes over the data that a posterior was fitted on; None where it cannot read
    them again.
    """
    if posterior.source is None or not posterior.source.repeatable:
        return None
    return replace(_job(posterior, posterior.source)[0], rows=posterior.statistics.n)


def update(posterior: Posterior, data: Any) -> Posterior:
    """The posterior with more data, by passes over them alone (see Posterior.update)."""
    job, source = _job(posterior, data)
    found = with_more(posterior, job.sums_at(posterior.theta), source, passes=1)
    if posterior.variational is None:
        return found
    if not job.repeatable:
        raise ValueError(
            "The averages of a variational Gaussian need several passes over the new data, but "
            "they can be read only once (a generator). Give a DataLoader, a list of batches or "
            "arrays, or fit with gaussian='laplace'."
        )
    return with_rows(posterior, found, job.average(posterior.theta, not posterior.tilted))


def _job(posterior: Posterior, data: Any) -> tuple[Job, Source]:
    """A job that sums other data at a posterior's θ̂, and where it reads them."""
    budget = posterior.memory_budget
    with announced():
        reader = Reader(open_source(data), None, LAST_LAYER, budget, opened=posterior.network)
    curvature, gaussian = posterior.statistics.curvature, posterior.gaussian
    return Job(
        type(posterior),
        shared(reader),
        posterior.likelihood,
        posterior.prior,
        curvature,
        AS_IS,
        budget,
        gaussian,
    ), reader.source


def polish_again(
    posterior: Posterior, prior: Prior, data: Any, from_there: bool = False
) -> Posterior:
    """The same network and likelihood polished under another prior, or on other rows.

    from_there: a variational Gaussian starts from the posterior's own, which saves passes. It is
    then another point within the tolerance than that of a fit from the mode.
    """
    size, budget = posterior.theta.numel(), posterior.memory_budget
    with announced():
        reader = Reader(open_source(data), None, LAST_LAYER, budget, opened=posterior.network)
    structure = posterior.statistics.curvature.zero(size)
    start = posterior.variational if from_there else None
    return Job(
        type(posterior),
        shared(reader),
        posterior.likelihood,
        prior,
        structure,
        POLISH,
        budget,
        posterior.gaussian,
        start,
    ).run()


def fit_again(posterior: Posterior, chunks: list[Chunk]) -> Posterior:
    """The Gaussian of a polished or variational last layer on other rows, with a warm start;
    its prior and noise stay.
    """
    size, budget = posterior.theta.numel(), posterior.memory_budget
    nothing_more = Source(lambda: iter(()), True, 0)
    reader = Reader(nothing_more, None, LAST_LAYER, budget, opened=posterior.network, kept=chunks)
    structure = posterior.statistics.curvature.zero(size)
    job = Job(
        type(posterior),
        reader,
        posterior.likelihood,
        posterior.prior,
        structure,
        POLISH,
        budget,
        posterior.gaussian,
    )
    return job.from_there(posterior)
