"""Predictives of the rungs that refit the weights: always, or where the output rung is doubtful.

The output rung refits the outputs. A chosen row is one whose weights are to be refitted. The
correction of a row, its nodes and its region are those of `ssla.predictive.interpolation`.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from ssla.likelihoods.support import Classes, Continuous, Support
from ssla.predictive.candidate_law import make_candidate_predictive
from ssla.predictive.class_law import ClassLaw
from ssla.predictive.count_law import make_count_predictive
from ssla.predictive.gaussian_law import GaussianLaw
from ssla.predictive.grid_law import make_grid_predictive
from ssla.predictive.interpolation import (
    QUANTILES,
    REGION,
    WIDENINGS,
    Corrected,
    fit_correction,
    make_uncorrected,
    widen_correction,
)
from ssla.predictive.predictive import Diagnostics, Predictive
from ssla.refit import WeightLogDensity
from ssla.refit.weights.solved import NAN

VECTOR = (
    "A refit of the weights has no closed form for a vector target here, and no grid in several "
    "dimensions. For log densities at given y use ssla.ssla(posterior, x, y); for a distribution "
    "use refit='output'."
)
CIRCULAR = (
    "A refit of the weights has no predictive for angles. For log densities at given y use "
    "ssla.ssla(posterior, x, y); for a distribution use refit='output'."
)
MARGIN = 1.1  # by which a widened region exceeds the answer's own region


def check_refittable(weights: WeightLogDensity) -> None:
    """Raise ValueError for targets that a refit of the weights has no predictive for.

    These are angles, and vectors unless the output refit is exact.
    """
    kind = weights.likelihood.support_for(weights.marginal.mean.shape[1]).kind
    if kind == "vector" and not weights.equals_output_refit:
        raise ValueError(VECTOR)
    if kind == "circular":
        raise ValueError(CIRCULAR)


def make_refitted_predictive(
    weights: WeightLogDensity, output: Predictive, name: str, reasons: list[str] | None = None
) -> Predictive:
    """Return the predictive by refits of the weights, with the output rung in rows without them.

    weights: the log density of refits of the weights. output: the predictive of the output rung.
    name: of the rung that was requested. reasons: for each row why it is refitted, empty where it
    is not; None: all rows are refitted.
    """
    if weights.refit.candidates is not None:
        return make_candidate_predictive(weights, output, name)
    rows, outputs = weights.marginal.mean.shape
    support = weights.likelihood.support_for(outputs)
    chosen = torch.tensor(
        [reasons is None or bool(reasons[i]) for i in range(rows)], dtype=torch.bool
    )
    if weights.equals_output_refit and isinstance(output.law, GaussianLaw):
        # Both rungs have the same answer, so nothing is refitted. The answer counts as that of the
        # requested rung: all rows of "weights", none of "auto".
        chosen &= reasons is None
        rungs = _name_rungs(weights, chosen, failed=torch.zeros_like(chosen))
        flags = _add_rungs(output.diagnostics, name, rungs, reasons, refits=None)
        closed_form = output.law
        law = GaussianLaw(
            weights, closed_form.noise, False, closed_form.convention, closed_form.moved
        )
        return Predictive(law, weights.like, flags)
    if isinstance(support, Classes):
        return _make_class_predictive(weights, output, chosen, name, reasons)
    quantiles = output.icdf(QUANTILES).to("cpu", torch.float64)
    log_density, predictive = _widen_until_covered(weights, quantiles, chosen, support, name)
    of_quadrature = predictive.diagnostics

    # A row that is NaN by request is not called inaccurate.
    is_nan = _find_nan_rows(weights, log_density.failed)
    flags = Diagnostics(
        name,
        of_quadrature.fallback | log_density.fallback,
        of_quadrature.unconverged | log_density.failed,
        (of_quadrature.inaccurate & ~is_nan) | log_density.inaccurate,
        weights.posterior.convention,
    )
    rungs = _name_rungs(weights, chosen, log_density.failed)
    counts = _count_refits(weights, log_density.refit_counts)
    flags = _add_rungs(flags, name, rungs, reasons, counts)
    return replace(predictive, diagnostics=_add_linearised_rows(flags, weights))


def _widen_until_covered(
    weights: WeightLogDensity, quantiles: Tensor, chosen: Tensor, support: Support, name: str
) -> tuple[Corrected, Predictive]:
    """Return the corrected log density of the chosen rows (N,) bool, and the predictive from it.

    The correction is interpolated over the region of the output predictive, and over a wider region
    in rows where the 99.9% region of the answer reaches beyond it. Rows in which it still does
    after WIDENINGS are flagged as inaccurate. quantiles (N, 5): of the output predictive, at
    QUANTILES. support: of y. name: of the requested rung.
    """
    log_density = fit_correction(weights, quantiles, chosen)
    for _ in range(WIDENINGS):
        predictive = _make_predictive_by_support(log_density, support, name)
        ends = predictive.icdf((REGION, 1 - REGION)).to("cpu", torch.float64)
        beyond = (ends[:, 0] < quantiles[:, 0]) | (ends[:, 1] > quantiles[:, -1])
        good = chosen & ~log_density.failed
        log_density.inaccurate[good & ~torch.isfinite(predictive.mass.to("cpu"))] = True
        # A row without an end, or that is inaccurate already, is not widened.
        beyond &= good & ~log_density.inaccurate & torch.isfinite(ends).all(1)
        if not bool(beyond.any()):
            return log_density, predictive
        wider = _widen_quantiles(quantiles, ends, support)
        quantiles = torch.where(beyond.unsqueeze(1), wider, quantiles)
        log_density = widen_correction(log_density, quantiles, beyond)
    predictive = _make_predictive_by_support(log_density, support, name)
    log_density.inaccurate[beyond] = True
    return log_density, predictive


def _make_predictive_by_support(log_density: Corrected, support: Support, name: str) -> Predictive:
    """Return the predictive of a corrected log density.

    support: of y; a number is integrated on a grid, and a count is summed. name: of the rung.
    """
    if isinstance(support, Continuous):
        return make_grid_predictive(log_density, support, name)
    return make_count_predictive(log_density, name)


def _widen_quantiles(quantiles: Tensor, ends: Tensor, support: Support) -> Tensor:
    """Return quantiles (N, 5) whose first and last are moved outward, beyond `ends` (N, 2).

    The region between them then contains the ends with a margin. The margin makes the distance of
    an end from the centre MARGIN times as large: for numbers in the support's real coordinate, for
    counts in y.
    """
    if isinstance(support, Continuous):
        z, centre = support.to_real(ends), support.to_real(quantiles)[:, 2:3]
        far = support.from_real(centre + MARGIN * (z - centre))
    else:
        centre = quantiles[:, 2:3]
        far = centre + MARGIN * (ends - centre)
    wider = quantiles.clone()
    wider[:, 0] = torch.minimum(wider[:, 0], far[:, 0])
    wider[:, -1] = torch.maximum(wider[:, -1], far[:, 1])
    return wider


def _make_class_predictive(
    weights: WeightLogDensity,
    output: Predictive,
    chosen: Tensor,
    name: str,
    reasons: list[str] | None,
) -> Predictive:
    """Return the predictive of classes, with a refit for each class that is not rare.

    Only the chosen rows (N,) bool are refitted. A row with a single class that is not rare is not
    refitted, because no refit would change its answer. A row in which a refit fails has the output
    rung's answer, or NaN if on_failure is "nan". output, name, reasons: those of
    `make_refitted_predictive`.
    """
    assert isinstance(output.law, ClassLaw)
    logs = output.law.log_weights.clone()
    is_refitted = output.law.probs >= weights.rare_probability
    is_refitted &= is_refitted.sum(1, keepdim=True) > 1
    rows, y = (chosen.unsqueeze(1) & is_refitted).nonzero().unbind(1)
    fallback = output.diagnostics.fallback.clone()
    failed = torch.zeros_like(chosen)
    errors = torch.zeros_like(logs)
    if rows.numel():
        density = weights.density_at(y.double(), rows)
        failed[rows[~density.converged]] = True
        fallback[chosen] = False
        fallback[rows[density.fallback]] = True
        # A row with a failed refit takes none of its refits.
        good = ~failed[rows]
        rows, y, refitted_logs = rows[good], y[good], density.log[good]
        logs = _change_rare_classes(logs, output.law.probs, rows, y, refitted_logs)
        logs[rows, y] = refitted_logs
        if density.error is not None:
            errors[rows, y] = density.error[good].to(errors.dtype)
        logs[_find_nan_rows(weights, failed)] = torch.nan
    unconverged = torch.where(chosen, failed, output.diagnostics.unconverged)
    accurate = torch.zeros_like(fallback)
    flags = Diagnostics(name, fallback, unconverged, accurate, weights.posterior.convention)
    refits = torch.where(chosen, 0 if weights.refits_stopped else is_refitted.sum(1), 0)
    refits = _count_refits(weights, refits)
    flags = _add_rungs(flags, name, _name_rungs(weights, chosen, failed), reasons, refits)

    # The standard error of a row: √Σ p e² over the classes.
    error = (torch.nan_to_num(logs.softmax(1)) * errors.square()).sum(1).sqrt()
    flags = _add_linearised_rows(replace(flags, error=error), weights)
    log_density = make_uncorrected(weights, chosen & ~failed, failed)
    law = ClassLaw(log_density, logs, output.law.integrals)
    return Predictive(law, weights.like, flags)


def _change_rare_classes(
    logs: Tensor, probs: Tensor, rows: Tensor, y: Tensor, refitted_logs: Tensor
) -> Tensor:
    """Return log weights (N, C) for the classes that are too rare for a refit.

    All classes of a row are changed by as much as a refit changes the rarest class that has one.
    logs, probs (N, C): log weights and probabilities of the output refit. rows, y, refitted_logs
    (m,): the refits. Rows without a refit stay as they are. The caller then overwrites the refitted
    classes, so that this is the answer for the rare ones. The output refit gives classes too much
    probability, and the more the rarer they are (docs/refits.md).
    """
    changes = torch.full_like(logs, torch.nan)
    changes[rows, y] = refitted_logs - logs[rows, y]
    has_refit = ~torch.isnan(changes)
    rarest = torch.where(has_refit, probs, torch.inf).argmin(1, keepdim=True)
    change = changes.gather(1, rarest)
    return torch.where(has_refit.any(1, keepdim=True), logs + torch.nan_to_num(change), logs)


def _find_nan_rows(weights: WeightLogDensity, failed: Tensor) -> Tensor:
    """Return the rows (N,) bool whose answer is NaN.

    These are the failed rows (N,) bool if on_failure is "nan", and none otherwise.
    """
    return failed & (weights.refit.on_failure == NAN)


def _count_refits(weights: WeightLogDensity, evaluations: Tensor) -> Tensor:
    """Return the number of refits of each row (N,).

    evaluations (N,): the number of y that were evaluated. Both are the same, unless all y of a row
    share one refit.
    """
    return evaluations.clamp(max=1) if weights.refits_at_prediction else evaluations


def _name_rungs(weights: WeightLogDensity, chosen: Tensor, failed: Tensor) -> tuple[str, ...]:
    """Return the name of the rung that answered for each row: "weights", "output" or "failed".

    The name is "failed" where the answer is NaN. chosen, failed (N,) bool: the rows to refit, and
    those in which a refit failed.
    """
    is_nan = _find_nan_rows(weights, failed).tolist()
    names = ["weights" if by_weights else "output" for by_weights in (chosen & ~failed).tolist()]
    return tuple(
        "failed" if row_is_nan else name for name, row_is_nan in zip(names, is_nan, strict=True)
    )


def _add_linearised_rows(flags: Diagnostics, weights: WeightLogDensity) -> Diagnostics:
    """Return the diagnostics with flags for the rows that the linearised network answered.

    Their refits are those of the network linearised at θ̂. If there is no such row, or `flags` have
    no rungs and refits, they are returned as they are.
    """
    linearised = weights.linearised_inputs
    if not bool(linearised.any()) or flags.refits is None or flags.rung is None:
        return flags
    answered = torch.tensor([rung == "weights" for rung in flags.rung], dtype=torch.bool)
    return replace(flags, linearised=linearised & answered & (flags.refits.cpu() > 0))


def _add_rungs(
    flags: Diagnostics,
    name: str,
    rungs: tuple[str, ...],
    reasons: list[str] | None,
    refits: Tensor | None,
) -> Diagnostics:
    """Return the diagnostics with the rung, the reason and the number of refits (N,) of each row.

    flags: the other fields. rungs: the rung that answered for each row. name: of the requested
    rung. reasons: None if all rows are refitted. refits: None if there were none in any row.
    """
    no_refits = torch.zeros_like(flags.fallback, dtype=torch.long)
    return Diagnostics(
        name,
        flags.fallback,
        flags.unconverged,
        flags.inaccurate,
        flags.convention,
        extreme=flags.extreme,
        refits=no_refits if refits is None else refits,
        rung=rungs,
        reason=None if reasons is None else tuple(reasons),
    )
