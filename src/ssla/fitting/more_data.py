"""Posteriors of more data: sums that are added, and what that does to θ̂ and to the Gaussian."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from ssla.data import Source
from ssla.fitting.variational import with_recentred_mean
from ssla.maths.digests import digest
from ssla.network import describe_difference, fingerprint, merge_digests, module_of
from ssla.priors import describe
from ssla.report import ADDED, DATA, MOVED, RANK, Note, subject, without
from ssla.values import Statistics, Variational

if TYPE_CHECKING:
    from ssla.posterior import Posterior


def merge_posteriors(posterior: Posterior, other: Posterior) -> Posterior:
    """Return the posterior of both data sets: see Posterior.merge.

    Raises ValueError unless both are of one model, at one θ̂ or at one that the sums can reach.
    """
    _check_same_model(posterior, other)
    statistics = other.statistics
    if not torch.equal(posterior.theta, other.theta):
        if not posterior.quadratic:
            raise ValueError(
                "The two posteriors are at different modes, and their statistics cannot be "
                "moved. Fit every shard with mode='tilt'."
            )
        statistics = statistics.moved(posterior.theta - other.theta)
    merged = add_statistics(
        posterior, statistics, other.source, other.report.passes, other.report.notes
    )
    if posterior.variational is None:
        return merged
    # Both sums are taken at θ̂, so that the order does not matter.
    ours, theirs = (each.sums.moved(each.theta - each.mean) for each in (posterior, other))
    variational = Variational(posterior.theta, ours.merge(theirs), posterior.tilted)
    return with_recentred_mean(replace(merged, variational=variational))


def _check_same_model(posterior: Posterior, other: Posterior) -> None:
    """Raise ValueError unless the sums of both are of one model, so that they may be added."""
    for name in ("names", "outputs", "output", "structure", "mode", "convention", "gaussian"):
        ours, theirs = getattr(posterior.report, name), getattr(other.report, name)
        if ours != theirs:
            raise ValueError(
                f"Only posteriors alike can be merged, but their {name} differ: {ours} and "
                f"{theirs}."
            )
    our_digests, their_digests = merge_digests(posterior.network), merge_digests(other.network)
    odd = [name for name in our_digests if our_digests[name] != their_digests[name]]
    if odd:
        why = describe_difference(
            *(fingerprint(module_of(each.network)) for each in (posterior, other))
        )
        raise ValueError(
            "Only posteriors of the same trained network can be merged, but their "
            f"{' and '.join(odd)} differ{why and ': '}{why}."
        )
    same_likelihood = digest(posterior.likelihood) == digest(other.likelihood)
    if not same_likelihood or digest(posterior.bound_prior) != digest(other.bound_prior):
        name = "priors" if same_likelihood else "likelihoods"
        ours, theirs = (describe(getattr(each, name[:-1])) for each in (posterior, other))
        raise ValueError(
            f"Only posteriors with the same {name} can be merged, but the {name} differ, "
            f"if only in digits that are not shown: {ours} and {theirs}. Fit every shard with the "
            "same one; an estimated noise as the number that one shard found."
        )


def add_statistics(
    posterior: Posterior,
    statistics: Statistics,
    source: Source | None,
    passes: int,
    notes: tuple[str, ...] = (),
) -> Posterior:
    """Add the sums of more data at θ̂ to a posterior.

    It is then at the new mode where the statistics determine it, else at θ̂. source, passes, notes:
    of the data that are added.
    """
    theta, merged = posterior.theta, posterior.statistics.merge(statistics)
    if posterior.updates_mode_from_sums:
        theta, merged = merged.at_mode(posterior.objective_prior, theta)
        note = "data were added: moved to the mode of all of them"
    elif posterior.variational is None:
        note = "data were added: θ̂ was kept, and is no longer the mode of all of them"
    else:
        change = (
            "its covariance has changed and its mean stayed"
            if posterior.tilted
            else "the Gaussian has moved"
        )
        note = f"data were added: {change}, the averages over the earlier rows and θ̂ were kept"
    both = (
        None if posterior.source is None or source is None else posterior.source.followed_by(source)
    )
    moved = replace(posterior, theta=theta, statistics=merged, source=both)
    # Notes of both, once each. What was noted of the data then still holds for a part of them.
    earlier = without(dict.fromkeys((*posterior.report.notes, *notes)), ADDED)
    kept = [
        Note(f"before data were added: {n}") if subject(n) in (DATA, MOVED) else n for n in earlier
    ]
    report = replace(
        posterior.report,
        n=merged.n,
        weight=merged.weight,
        passes=posterior.report.passes + passes,
        residual_after=moved.residual,
        notes=(*with_sketch_note(kept, moved), Note(note, ADDED)),
    )
    return replace(moved, report=report)


def with_sketch_note(notes: list[str], posterior: Posterior) -> list[str]:
    """Return the notes with what a low-rank curvature leaves out under the present data and prior
    of a posterior.
    """
    least = float(posterior.bound_prior.precision(posterior.theta).min())
    kept = without(notes, RANK)
    note = posterior.statistics.curvature.note(least) if least > 0 else ""
    return [*kept, Note(note, RANK)] if note else kept
