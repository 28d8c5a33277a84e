"""Posteriors of more data: sums that are added, and what that does to θ̂ and to the Gaussian."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from ssla.data import Source
from ssla.fitting.variational import recentred
from ssla.maths.digests import digest
from ssla.network import difference, fingerprint, marks, module_of
from ssla.priors import describe
from ssla.report import ADDED, DATA, MOVED, RANK, Note, subject, without
from ssla.values import Statistics, Variational

if TYPE_CHECKING:
    from ssla.posterior import Posterior


def merge(posterior: Posterior, other: Posterior) -> Posterior:
    """The posterior of both data sets (see Posterior.merge)."""
    _refuse_unlike(posterior, other)
    statistics = other.statistics
    if not torch.equal(posterior.theta, other.theta):
        if not posterior.quadratic:
            raise ValueError(
                "The two posteriors are at different modes, and their statistics cannot be "
                "moved. Fit every shard with mode='tilt'."
            )
        statistics = statistics.moved(posterior.theta - other.theta)
    both = with_more(posterior, statistics, other.source, other.report.passes, other.report.notes)
    if posterior.variational is None:
        return both
    # Both sums are taken at θ̂, so that the order does not matter.
    mine, theirs = (each.sums.moved(each.theta - each.mean) for each in (posterior, other))
    variational = Variational(posterior.theta, mine.merge(theirs), posterior.tilted)
    return recentred(replace(both, variational=variational))


def _refuse_unlike(posterior: Posterior, other: Posterior) -> None:
    """ValueError unless the sums of both are of one model, so that they may be added."""
    for what in ("names", "outputs", "output", "structure", "mode", "convention", "gaussian"):
        mine, theirs = getattr(posterior.report, what), getattr(other.report, what)
        if mine != theirs:
            raise ValueError(
                f"Only posteriors alike can be merged, but their {what} differ: {mine} and "
                f"{theirs}."
            )
    ours, others = marks(posterior.network), marks(other.network)
    odd = [what for what in ours if ours[what] != others[what]]
    if odd:
        why = difference(*(fingerprint(module_of(post.network)) for post in (posterior, other)))
        parts = f"{' and '.join(odd)} differ{why and ': '}{why}"
        raise ValueError(
            f"Only posteriors of the same trained network can be merged, but their {parts}."
        )
    for what, mine, theirs in (
        ("likelihoods", posterior.likelihood, other.likelihood),
        ("priors", posterior.bound_prior, other.bound_prior),
    ):
        if digest(mine) != digest(theirs):
            pair = (
                f"{describe(getattr(posterior, what[:-1]))} and "
                f"{describe(getattr(other, what[:-1]))}"
            )
            raise ValueError(
                f"Only posteriors with the same {what} can be merged, but the {what} differ, "
                f"if only in digits that are not shown: {pair}. Fit every shard with the same "
                "one; an estimated noise as the number that one shard found."
            )


def with_more(
    posterior: Posterior,
    statistics: Statistics,
    source: Source | None,
    passes: int,
    notes: tuple[str, ...] = (),
) -> Posterior:
    """The posterior with the sums of more data at θ̂.

    It is at the new mode where the statistics determine it, else at θ̂.
    """
    theta, whole = posterior.theta, posterior.statistics.merge(statistics)
    note = "data were added: θ̂ was kept, and is no longer the mode of all of them"
    if posterior.variational is not None:
        what = (
            "its covariance has changed and its mean stayed"
            if posterior.tilted
            else "the Gaussian has moved"
        )
        note = f"data were added: {what}, the averages over the earlier rows and θ̂ were kept"
    if posterior.follows_mode:
        theta, whole = whole.at_mode(posterior.objective_prior, theta)
        note = "data were added: moved to the mode of all of them"
    both = None if posterior.source is None or source is None else posterior.source.then(source)
    moved = replace(posterior, theta=theta, statistics=whole, source=both)
    before = without(dict.fromkeys((*posterior.report.notes, *notes)), ADDED)  # once each
    kept = [
        Note(f"before data were added: {n}") if subject(n) in (DATA, MOVED) else n for n in before
    ]
    report = replace(
        posterior.report,
        n=whole.n,
        weight=whole.weight,
        passes=posterior.report.passes + passes,
        residual_after=moved.residual,
        notes=(*with_directions(kept, moved), Note(note, ADDED)),
    )
    return replace(moved, report=report)


def with_directions(notes: list[str], posterior: Posterior) -> list[str]:
    """The notes with what a low-rank curvature leaves out now, under its present data and prior."""
    found, least = (
        posterior.statistics.curvature,
        float(posterior.bound_prior.precision(posterior.theta).min()),
    )
    kept = without(notes, RANK)
    note = found.note(least) if least > 0 else ""
    return [*kept, Note(note, RANK)] if note else kept
