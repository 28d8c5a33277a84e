"""Further passes of a posterior that exists: over its own rows, over more of them, over others."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ssla.data import Source, open_source
from ssla.fitting.fit import fit_with_prior
from ssla.fitting.fit_plan import FitPlan
from ssla.fitting.more_data import add_statistics
from ssla.fitting.passes import Chunk, Data, Reader, reader_of_chunks
from ssla.fitting.ranks import data_of_ranks, errors_sent_to_ranks
from ssla.fitting.steps import refit_last_layer
from ssla.fitting.variational import add_rows
from ssla.network import LAST_LAYER
from ssla.priors import Prior
from ssla.report import AS_IS, POLISH
from ssla.values import Statistics

if TYPE_CHECKING:
    from ssla.posterior import Posterior


def _plan_for(posterior: Posterior, data: Data, mode: str) -> FitPlan:
    """Return the plan of a fit of other rows with a posterior's likelihood, prior and Gaussian."""
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


def _open_reader(posterior: Posterior, data: Any) -> Reader:
    """Open other rows, to be read for a posterior's network."""
    with errors_sent_to_ranks():
        source = open_source(data)
    budget = posterior.memory_budget
    return Reader(source, None, LAST_LAYER, budget, opened=posterior.network)


def _plan_to_read(posterior: Posterior, data: Any, mode: str) -> FitPlan:
    """Return the plan of a fit of data, which this process or all ranks of its group read."""
    return _plan_for(posterior, data_of_ranks(_open_reader(posterior, data)), mode)


def collect_sums(posterior: Posterior, data: Any) -> Statistics:
    """Sum other data under a posterior's Gaussian (at θ̂, or averages), in one pass."""
    plan = _plan_to_read(posterior, data, AS_IS)
    if posterior.variational is None:
        return plan.collect_statistics(posterior.theta)
    average = plan.averages_at(posterior.theta, moves=False)
    return average(posterior.mean, posterior.covariance).statistics


def plan_to_reread(posterior: Posterior) -> FitPlan | None:
    """Return the plan of further passes over the data that a posterior was fitted on.

    None where it cannot read them again.
    """
    source: Source | None = posterior.source
    if source is None or not source.repeatable:
        return None
    return replace(_plan_to_read(posterior, source, AS_IS), rows=posterior.statistics.n)


def update_posterior(posterior: Posterior, data: Any) -> Posterior:
    """Add data to a posterior, by passes over them alone: see Posterior.update.

    Raises ValueError where the Gaussian is variational and the new data can be read only once.
    """
    reader = _open_reader(posterior, data)
    plan = _plan_for(posterior, data_of_ranks(reader), AS_IS)
    plan, sums, _ = plan.run_pass(posterior.theta)
    updated = add_statistics(posterior, sums.statistics, reader.source, passes=1)
    if posterior.variational is None:
        return updated
    if not plan.repeatable:
        raise ValueError(
            "The averages of a variational Gaussian need several passes over the new data, but "
            "they can be read only once (a generator). Give a DataLoader, a list of batches or "
            "arrays, or fit with gaussian='laplace'."
        )
    return add_rows(posterior, updated, plan.averages_at(posterior.theta, not posterior.tilted))


def polish_again(
    posterior: Posterior, prior: Prior, data: Any, from_there: bool = False
) -> Posterior:
    """Polish the same network and likelihood under another prior, or on other rows.

    from_there: a variational Gaussian starts from the posterior's own, which saves passes. It is
    then another point within the tolerance than that of a fit from the mode.
    """
    plan = _plan_to_read(posterior, data, POLISH)
    structure = posterior.statistics.curvature.zero(posterior.theta.numel())
    start = posterior.variational if from_there else None
    return fit_with_prior(replace(plan, prior=prior, structure=structure, start=start))


def refit_to_chunks(posterior: Posterior, chunks: list[Chunk]) -> Posterior:
    """Refit the Gaussian of a last layer to other rows, with a warm start; its prior and noise
    stay.

    For a last layer that was polished, or that has a variational Gaussian. Raises ValueError where
    the refit does not converge.
    """
    budget = posterior.memory_budget
    reader = reader_of_chunks(posterior.network, chunks, LAST_LAYER, budget)
    structure = posterior.statistics.curvature.zero(posterior.theta.numel())
    plan = replace(_plan_for(posterior, reader, POLISH), structure=structure)
    return refit_last_layer(plan, posterior)
