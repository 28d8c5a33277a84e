"""Passes of a posterior that is already fitted: over its own rows again, or over other rows."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ssla.data import Source, open_source
from ssla.fitting.fit import fit_with_prior
from ssla.fitting.fit_plan import FitPlan
from ssla.fitting.more_data import add_statistics
from ssla.fitting.passes import Chunk, Data, Reader, make_reader_of_chunks
from ssla.fitting.ranks import send_errors_to_ranks, share_data_among_ranks
from ssla.fitting.steps import refit_last_layer
from ssla.fitting.variational import add_rows
from ssla.network import LAST_LAYER
from ssla.priors import Prior
from ssla.report import AS_IS, POLISH
from ssla.values import Statistics

if TYPE_CHECKING:
    from ssla.posterior import Posterior


def _make_plan_like_posterior(posterior: Posterior, data: Data, mode: str) -> FitPlan:
    """Return the plan of a fit of `data` with the settings of a posterior.

    These are its likelihood, prior, structure, memory budget and Gaussian. mode: what happens to θ̂.
    """
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
    """Return a reader of `data`, in any form that `ssla.fit` takes, for a posterior's network.

    Raises ValueError or TypeError for data that cannot be opened, on all ranks of a group.
    """
    with send_errors_to_ranks():
        source = open_source(data)
    # The network is open already: the reader needs no model, and does not use `weights`.
    return Reader(
        source,
        model=None,
        weights=LAST_LAYER,
        budget=posterior.memory_budget,
        opened=posterior.network,
    )


def _make_plan_to_read(posterior: Posterior, data: Any, mode: str) -> FitPlan:
    """Return the plan of a fit of `data` with the settings of a posterior.

    data: in any form that `ssla.fit` takes. This process reads them; in a group every rank reads
    its own. mode: what happens to θ̂.
    """
    return _make_plan_like_posterior(
        posterior, share_data_among_ranks(_open_reader(posterior, data)), mode
    )


def collect_sums(posterior: Posterior, data: Any) -> Statistics:
    """Sum other data in one pass at the Gaussian of a posterior.

    The sums are values at θ̂, or averages over a variational Gaussian. data: in any form that
    `ssla.fit` takes.
    """
    plan = _make_plan_to_read(posterior, data, AS_IS)
    if posterior.variational is None:
        return plan.collect_statistics(posterior.theta)
    average = plan.make_average_passes_at(posterior.theta, moves=False)
    return average(posterior.mean, posterior.covariance).statistics


def make_plan_to_reread(posterior: Posterior) -> FitPlan | None:
    """Return the plan of further passes over the data that a posterior was fitted on.

    The result is None where the posterior does not hold the data, or they can be read only once.
    """
    source: Source | None = posterior.source
    if source is None or not source.repeatable:
        return None
    return replace(_make_plan_to_read(posterior, source, AS_IS), rows=posterior.statistics.n)


def update_posterior(posterior: Posterior, data: Any) -> Posterior:
    """Return the posterior with more data, by passes over them alone: see Posterior.update.

    Raises ValueError where the Gaussian is variational and the new data can be read only once.
    """
    reader = _open_reader(posterior, data)
    plan = _make_plan_like_posterior(posterior, share_data_among_ranks(reader), AS_IS)
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
    average = plan.make_average_passes_at(posterior.theta, moves=not posterior.tilted)
    return add_rows(posterior, updated, average)


def polish_again(
    posterior: Posterior, prior: Prior, data: Any, warm_start: bool = False
) -> Posterior:
    """Polish the network again from the trained weights, under a given prior and on given data.

    The likelihood and the other settings are those of the posterior. warm_start: a variational
    Gaussian starts from the posterior's own, which saves passes. The result then differs from that
    of a fit from the mode, within the tolerance of the rounds. Raises as
    `ssla.fitting.fit.fit_with_prior`.
    """
    plan = _make_plan_to_read(posterior, data, POLISH)
    structure = posterior.statistics.curvature.zero(posterior.theta.numel())
    start = posterior.variational if warm_start else None
    return fit_with_prior(replace(plan, prior=prior, structure=structure, start=start))


def refit_to_chunks(posterior: Posterior, chunks: list[Chunk]) -> Posterior:
    """Refit the Gaussian of a last layer to similar rows; its prior and noise stay.

    The refit starts from the present posterior. Only for a last layer that was polished, or that
    has a variational Gaussian. chunks: the rows with their features. Raises ValueError where the
    refit does not converge.
    """
    budget = posterior.memory_budget
    reader = make_reader_of_chunks(posterior.network, chunks, LAST_LAYER, budget)
    structure = posterior.statistics.curvature.zero(posterior.theta.numel())
    plan = replace(_make_plan_like_posterior(posterior, reader, POLISH), structure=structure)
    return refit_last_layer(plan, posterior)
