"""Further passes of a posterior that exists: over its own rows, over more of them, over others."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ssla.data import Source, open_source
from ssla.fitting.fit import fit_with_prior
from ssla.fitting.fit_plan import FitPlan
from ssla.fitting.more_data import with_more
from ssla.fitting.passes import Chunk, Data, Reader
from ssla.fitting.ranks import announced, shared
from ssla.fitting.steps import refitted
from ssla.fitting.variational import with_rows
from ssla.network import LAST_LAYER
from ssla.priors import Prior
from ssla.report import AS_IS, POLISH
from ssla.values import Statistics

if TYPE_CHECKING:
    from ssla.posterior import Posterior


def plan_of(posterior: Posterior, data: Data, mode: str) -> FitPlan:
    """A fit of other rows with a posterior's likelihood, prior and Gaussian."""
    return FitPlan(
        type(posterior),
        data,
        posterior.likelihood,
        posterior.prior,
        posterior.statistics.curvature,
        mode,
        posterior.memory_budget,
        posterior.gaussian,
    )


def reader_of(posterior: Posterior, data: Any) -> Reader:
    """Other rows, read for a posterior's network."""
    with announced():
        budget = posterior.memory_budget
        return Reader(open_source(data), None, LAST_LAYER, budget, opened=posterior.network)


def collect(posterior: Posterior, data: Any) -> Statistics:
    """The sums of other data under a posterior's Gaussian (at θ̂, or averages), in one pass."""
    plan = plan_of(posterior, shared(reader_of(posterior, data)), AS_IS)
    if posterior.variational is None:
        return plan.sums_at(posterior.theta)
    average = plan.average(posterior.theta, moves=False)
    return average(posterior.mean, posterior.covariance).statistics


def read_again(posterior: Posterior) -> FitPlan | None:
    """Further passes over the data that a posterior was fitted on.

    None where it cannot read them again.
    """
    source = posterior.source
    if source is None or not source.repeatable:
        return None
    plan = plan_of(posterior, shared(reader_of(posterior, source)), AS_IS)
    return replace(plan, rows=posterior.statistics.n)


def update(posterior: Posterior, data: Any) -> Posterior:
    """The posterior with more data, by passes over them alone (see Posterior.update)."""
    reader = reader_of(posterior, data)
    plan = plan_of(posterior, shared(reader), AS_IS)
    plan, sums, _ = plan.read(posterior.theta)
    updated = with_more(posterior, sums.statistics, reader.source, passes=1)
    if posterior.variational is None:
        return updated
    if not plan.repeatable:
        raise ValueError(
            "The averages of a variational Gaussian need several passes over the new data, but "
            "they can be read only once (a generator). Give a DataLoader, a list of batches or "
            "arrays, or fit with gaussian='laplace'."
        )
    return with_rows(posterior, updated, plan.average(posterior.theta, not posterior.tilted))


def polish_again(
    posterior: Posterior, prior: Prior, data: Any, from_there: bool = False
) -> Posterior:
    """The same network and likelihood polished under another prior, or on other rows.

    from_there: a variational Gaussian starts from the posterior's own, which saves passes. It is
    then another point within the tolerance than that of a fit from the mode.
    """
    plan = plan_of(posterior, shared(reader_of(posterior, data)), POLISH)
    structure = posterior.statistics.curvature.zero(posterior.theta.numel())
    start = posterior.variational if from_there else None
    return fit_with_prior(replace(plan, prior=prior, structure=structure, start=start))


def fit_again(posterior: Posterior, chunks: list[Chunk]) -> Posterior:
    """The Gaussian of a last layer on other rows, with a warm start; its prior and noise stay.

    For a last layer that was polished, or that has a variational Gaussian.
    """
    nothing_more = Source(lambda: iter(()), True, 0)
    budget = posterior.memory_budget
    reader = Reader(nothing_more, None, LAST_LAYER, budget, opened=posterior.network, kept=chunks)
    structure = posterior.statistics.curvature.zero(posterior.theta.numel())
    return refitted(replace(plan_of(posterior, reader, POLISH), structure=structure), posterior)
