"""Posteriors of more data: sums that are added, and what that does to θ̂ and to the Gaussian."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from ssla.data import Source
from ssla.fitting.variational import with_recentred_mean
from ssla.maths.digests import digest
from ssla.network import compute_merge_digests, describe_difference, fingerprint, get_module
from ssla.priors import describe
from ssla.report import ADDED, DATA, MOVED, RANK, Note, subject_of, without_subjects
from ssla.values import Statistics, Variational

if TYPE_CHECKING:
    from ssla.posterior import Posterior


def merge_posteriors(posterior: Posterior, other: Posterior) -> Posterior:
    """Return the posterior of the data of both posteriors: see Posterior.merge.

    Raises ValueError unless both are of one model, and at one θ̂ or at two that their quadratic sums
    can be moved between.
    """
    _check_same_model(posterior, other)
    statistics = other.statistics
    if not torch.equal(posterior.theta, other.theta):
        if not posterior.quadratic:
            raise ValueError(
                "The two posteriors are at different modes, and their statistics cannot be "
                "moved. Fit every shard with mode='tilt'."
            )
        statistics = statistics.with_theta_moved(posterior.theta - other.theta)
    merged = add_statistics(
        posterior, statistics, other.source, other.report.passes, other.report.notes
    )
    if posterior.variational is None:
        return merged

    # Both sums are taken at θ̂, so that the order does not matter.
    ours = posterior.sums.with_theta_moved(posterior.theta - posterior.mean)
    theirs = other.sums.with_theta_moved(other.theta - other.mean)
    variational = Variational(posterior.theta, ours.merge(theirs), posterior.tilted)
    return with_recentred_mean(replace(merged, variational=variational))


def _check_same_model(posterior: Posterior, other: Posterior) -> None:
    """Raise ValueError unless both posteriors are of one model, so that their sums may be added."""
    for name in ("names", "outputs", "output", "structure", "mode", "convention", "gaussian"):
        ours, theirs = getattr(posterior.report, name), getattr(other.report, name)
        if ours != theirs:
            raise ValueError(
                f"Only posteriors alike can be merged, but their {name} differ: {ours} and "
                f"{theirs}."
            )

    our_digests, their_digests = (
        compute_merge_digests(posterior.network),
        compute_merge_digests(other.network),
    )
    unequal = [name for name in our_digests if our_digests[name] != their_digests[name]]
    if unequal:
        why = describe_difference(
            fingerprint(get_module(posterior.network)), fingerprint(get_module(other.network))
        )
        reason = f": {why}" if why else ""
        raise ValueError(
            "Only posteriors of the same trained network can be merged, but their "
            f"{' and '.join(unequal)} differ{reason}."
        )

    same_likelihood = digest(posterior.likelihood) == digest(other.likelihood)
    if not same_likelihood or digest(posterior.bound_prior) != digest(other.bound_prior):
        attribute = "prior" if same_likelihood else "likelihood"
        name = f"{attribute}s"
        ours, theirs = describe(getattr(posterior, attribute)), describe(getattr(other, attribute))
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
    """Return the posterior with the statistics of more data, which were taken at its θ̂.

    θ̂ moves to the new mode where the sums determine it; elsewhere it stays. A variational Gaussian
    is not changed here: the caller adds the new averages. source, passes, notes: of the data that
    are added. source is None where these cannot be read again; the result then has no source
    either.
    """
    theta = posterior.theta
    merged = posterior.statistics.merge(statistics)
    if posterior.updates_mode_from_sums:
        theta, merged = merged.move_to_mode(posterior.objective_prior, theta)
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
    joint_source = None
    if posterior.source is not None and source is not None:
        joint_source = posterior.source.followed_by(source)
    moved = replace(posterior, theta=theta, statistics=merged, source=joint_source)

    # Notes of both data sets, once each. A note on earlier data holds for a part of the rows only.
    earlier = without_subjects(dict.fromkeys((*posterior.report.notes, *notes)), ADDED)
    kept = [
        Note(f"before data were added: {earlier_note}")
        if subject_of(earlier_note) in (DATA, MOVED)
        else earlier_note
        for earlier_note in earlier
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
    """Return the notes, with a note on what a low-rank curvature leaves out in place of an old one.

    The note is about the posterior's present data and prior. Other structures have none.
    """
    least = float(posterior.bound_prior.precision(posterior.theta).min())
    kept = without_subjects(notes, RANK)
    note = posterior.statistics.curvature.describe_omission(least) if least > 0 else ""
    return [*kept, Note(note, RANK)] if note else kept
