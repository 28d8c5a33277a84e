"""Predictives of the rungs that refit the weights: always, or where the output rung is doubtful."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from ssla.likelihoods.support import Classes, Continuous, Support
from ssla.predictive.class_law import ClassLaw
from ssla.predictive.count_law import count_predictive
from ssla.predictive.gaussian_law import GaussianLaw
from ssla.predictive.grid_law import grid_predictive
from ssla.predictive.interpolation import (
    QUANTILES,
    REGION,
    WIDENINGS,
    Corrected,
    fit_correction,
    widen_correction,
    without_correction,
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
    """Raise ValueError for targets that a refit of the weights has no predictive for."""
    kind = weights.likelihood.support_for(weights.marginal.mean.shape[1]).kind
    if kind == "vector" and not weights.equals_output_refit:
        raise ValueError(VECTOR)
    if kind == "circular":
        raise ValueError(CIRCULAR)


def make_refitted_predictive(
    weights: WeightLogDensity, output: Predictive, name: str, reasons: list[str] | None = None
) -> Predictive:
    """Return the predictive of the weights rung in the rows with a reason (all rows if None), of
    the output rung in the others.

    output: the predictive of the output rung; name: of the rung that was asked for.
    """
    rows = weights.marginal.mean.shape[0]
    support = weights.likelihood.support_for(weights.marginal.mean.shape[1])
    chosen = torch.tensor(
        [reasons is None or bool(reasons[i]) for i in range(rows)], dtype=torch.bool
    )
    if weights.equals_output_refit and isinstance(output.law, GaussianLaw):
        # The two rungs give the same answer. It has the name of the one that was asked for.
        chosen &= reasons is None
        rungs = _name_rungs(weights, chosen, torch.zeros_like(chosen))
        flags = _with_rungs(output.diagnostics, name, rungs, reasons, None)
        return Predictive(GaussianLaw(weights, output.law.noise, False), weights.like, flags)
    if isinstance(support, Classes):
        return _refit_classes(weights, output, chosen, name, reasons)
    quantiles = output.icdf(QUANTILES).to("cpu", torch.float64)
    log_density, predictive = _widen_until_covered(weights, quantiles, chosen, support, name)
    by_quadrature = predictive.diagnostics
    is_nan = _nan_rows(weights, log_density.failed)
    flags = Diagnostics(
        name,
        by_quadrature.fallback | log_density.fallback,
        by_quadrature.unconverged | log_density.failed,
        (by_quadrature.inaccurate & ~is_nan) | log_density.inaccurate,
    )
    rungs = _name_rungs(weights, chosen, log_density.failed)
    flags = _with_rungs(flags, name, rungs, reasons, log_density.refits)
    return replace(predictive, diagnostics=_with_linearised(flags, weights))


def _widen_until_covered(
    weights: WeightLogDensity, quantiles: Tensor, chosen: Tensor, support: Support, name: str
) -> tuple[Corrected, Predictive]:
    """Interpolate the correction of the chosen rows (N,) bool over the output predictive's region,
    and over a wider one where the answer's own 99.9% region reaches beyond it.

    quantiles (N, 5): of the output predictive, at QUANTILES. Rows that are still too narrow after
    WIDENINGS are flagged as inaccurate.
    """
    log_density = fit_correction(weights, quantiles, chosen)
    for _ in range(WIDENINGS):
        predictive = _predictive_by_support(log_density, support, name)
        ends = predictive.icdf((REGION, 1 - REGION)).to("cpu", torch.float64)
        beyond = (ends[:, 0] < quantiles[:, 0]) | (ends[:, 1] > quantiles[:, -1])
        good = chosen & ~log_density.failed
        log_density.inaccurate[good & ~torch.isfinite(predictive.mass.to("cpu"))] = True
        beyond &= good & ~log_density.inaccurate & torch.isfinite(ends).all(1)
        if not bool(beyond.any()):
            return log_density, predictive
        wider = _widen_quantiles(quantiles, ends, support)
        quantiles = torch.where(beyond.unsqueeze(1), wider, quantiles)
        log_density = widen_correction(log_density, quantiles, beyond)
    predictive = _predictive_by_support(log_density, support, name)
    log_density.inaccurate[beyond] = True
    return log_density, predictive


def _predictive_by_support(log_density: Corrected, support: Support, name: str) -> Predictive:
    """Make the predictive of a number by a grid, of a count by sums."""
    if isinstance(support, Continuous):
        return grid_predictive(log_density, support, name)
    return count_predictive(log_density, name)


def _widen_quantiles(quantiles: Tensor, ends: Tensor, support: Support) -> Tensor:
    """Move the first and last quantiles (N, 5) outward so that the region contains `ends` (N, 2).

    The ends are first moved away from the centre by MARGIN, in the support's real coordinate.
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


def _refit_classes(
    weights: WeightLogDensity,
    output: Predictive,
    chosen: Tensor,
    name: str,
    reasons: list[str] | None,
) -> Predictive:
    """Refit for each class of each chosen row (N,) bool that is not rare, unless it is the only
    one: then no refit changes the answer.

    A row in which a refit fails has the output rung's answer.
    """
    assert isinstance(output.law, ClassLaw)
    logs = output.law.log_weights.clone()
    likely = output.law.probs >= weights.rare_probability
    likely &= likely.sum(1, keepdim=True) > 1
    rows, y = (chosen.unsqueeze(1) & likely).nonzero().unbind(1)
    fallback = output.diagnostics.fallback.clone()
    failed = torch.zeros_like(chosen)
    errors = torch.zeros_like(logs)
    if rows.numel():
        density = weights.density_at(y.double(), rows)
        failed[rows[~density.converged]] = True
        fallback[chosen] = False
        fallback[rows[density.fallback]] = True
        good = ~failed[rows]
        rows, y, refitted_logs = rows[good], y[good], density.log[good]
        logs = _change_rare_classes(logs, output.law.probs, rows, y, refitted_logs)
        logs[rows, y] = refitted_logs
        if density.error is not None:
            errors[rows, y] = density.error[good].to(errors.dtype)
        logs[_nan_rows(weights, failed)] = torch.nan
    unconverged = torch.where(chosen, failed, output.diagnostics.unconverged)
    flags = Diagnostics(name, fallback, unconverged, torch.zeros_like(fallback))
    refits = torch.where(chosen, 0 if weights.refits_stopped else likely.sum(1), 0)
    flags = _with_rungs(flags, name, _name_rungs(weights, chosen, failed), reasons, refits)
    error = (torch.nan_to_num(logs.softmax(1)) * errors.square()).sum(1).sqrt()
    flags = _with_linearised(replace(flags, error=error), weights)
    law = ClassLaw(
        without_correction(weights, chosen & ~failed, failed), logs, output.law.integrals
    )
    return Predictive(law, weights.like, flags)


def _change_rare_classes(
    logs: Tensor, probs: Tensor, rows: Tensor, y: Tensor, refitted_logs: Tensor
) -> Tensor:
    """Change the log weights (N, C) of classes without a refit as much as those of the rarest class
    of their row that has one.

    probs (N, C): of the output refit; rows, y, refitted_logs (m,): the refits. The output refit
    gives rare classes too much: the more, the rarer they are (docs/refits.md).
    """
    changes = torch.full_like(logs, torch.nan)
    changes[rows, y] = refitted_logs - logs[rows, y]
    has = ~torch.isnan(changes)
    rarest = torch.where(has, probs, torch.inf).argmin(1, keepdim=True)
    change = changes.gather(1, rarest)
    return torch.where(has.any(1, keepdim=True), logs + torch.nan_to_num(change), logs)


def _nan_rows(weights: WeightLogDensity, failed: Tensor) -> Tensor:
    """Return the failed rows (N,) bool whose answer is NaN, by on_failure='nan'."""
    return failed & (weights.refit.on_failure == NAN)


def _name_rungs(weights: WeightLogDensity, chosen: Tensor, failed: Tensor) -> tuple[str, ...]:
    """Name the rung that answered for each row: "weights" or "output"; "failed" where none did."""
    by_weights = (chosen & ~failed).tolist()
    is_nan = _nan_rows(weights, failed).tolist()
    return tuple(
        "failed" if row_is_nan else "weights" if row_by_weights else "output"
        for row_by_weights, row_is_nan in zip(by_weights, is_nan, strict=True)
    )


def _with_linearised(flags: Diagnostics, weights: WeightLogDensity) -> Diagnostics:
    """Add the rows that were answered by refits of the linearised network, if there are such."""
    linearised = weights.linearised_inputs
    if not bool(linearised.any()) or flags.refits is None or flags.rung is None:
        return flags
    answered = torch.tensor([rung == "weights" for rung in flags.rung], dtype=torch.bool)
    return replace(flags, linearised=linearised & answered & (flags.refits.cpu() > 0))


def _with_rungs(
    flags: Diagnostics,
    name: str,
    rungs: tuple[str, ...],
    reasons: list[str] | None,
    refits: Tensor | None,
) -> Diagnostics:
    """Add to the flags which rung answered for each row, why, and the number of refits (N,).

    name: of the rung that was asked for; refits=None: none in any row.
    """
    none = torch.zeros_like(flags.fallback, dtype=torch.long)
    return Diagnostics(
        name,
        flags.fallback,
        flags.unconverged,
        flags.inaccurate,
        extreme=flags.extreme,
        refits=none if refits is None else refits,
        rung=rungs,
        reason=None if reasons is None else tuple(reasons),
    )
