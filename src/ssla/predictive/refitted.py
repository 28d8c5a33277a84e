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
    correct,
    uncorrected,
    widened,
)
from ssla.predictive.predictive import Diagnostics, Predictive
from ssla.refit import WeightLogDensity
from ssla.refit.weights.weight_refit import NAN

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
    """ValueError for targets that a refit of the weights has no predictive for."""
    kind = weights.likelihood.support_for(weights.marginal.mean.shape[1]).kind
    if kind == "vector" and not weights.exact:
        raise ValueError(VECTOR)
    if kind == "circular":
        raise ValueError(CIRCULAR)


def refitted(
    weights: WeightLogDensity, output: Predictive, name: str, reasons: list[str] | None = None
) -> Predictive:
    """The predictive of the weights rung in the rows with a reason (all rows if None), of the
    output rung in the others.
    """
    rows = weights.marginal.mean.shape[0]
    support = weights.likelihood.support_for(weights.marginal.mean.shape[1])
    chosen = torch.tensor(
        [reasons is None or bool(reasons[i]) for i in range(rows)], dtype=torch.bool
    )
    if weights.exact and isinstance(output.law, GaussianLaw):
        # the two rungs give the same answer; it has the name of the one that was asked for
        chosen &= reasons is None
        rungs = _rungs(weights, chosen, torch.zeros_like(chosen))
        flags = _diagnostics(output.diagnostics, name, rungs, reasons, None)
        return Predictive(GaussianLaw(weights, output.law.noise, False), weights.like, flags)
    if isinstance(support, Classes):
        return _classes(weights, output, chosen, name, reasons)
    log_density, made = _resolved(
        weights, output.icdf(QUANTILES).to("cpu", torch.float64), chosen, support, name
    )
    flags = Diagnostics(
        name,
        made.diagnostics.fallback | log_density.fallback,
        made.diagnostics.unconverged | log_density.failed,
        (made.diagnostics.inaccurate & ~_left_out(weights, log_density.failed))
        | log_density.inaccurate,
    )
    rungs = _rungs(weights, chosen, log_density.failed)
    flags = _diagnostics(flags, name, rungs, reasons, log_density.refits)
    return replace(made, diagnostics=_with_linearised(flags, weights))


def _resolved(
    weights: WeightLogDensity, quantiles: Tensor, chosen: Tensor, support: Support, name: str
) -> tuple[Corrected, Predictive]:
    """Correct over the output predictive's region; where the answer's own 99.9% region reaches
    beyond it, wider.
    """
    log_density = correct(weights, quantiles, chosen)
    for _ in range(WIDENINGS):
        made = (
            grid_predictive(log_density, support, name)
            if isinstance(support, Continuous)
            else count_predictive(log_density, name)
        )
        ends = made.icdf((REGION, 1 - REGION)).to("cpu", torch.float64)
        beyond = (ends[:, 0] < quantiles[:, 0]) | (ends[:, 1] > quantiles[:, -1])
        log_density.inaccurate[
            chosen & ~log_density.failed & ~torch.isfinite(made.mass.to("cpu"))
        ] = True
        beyond &= (
            chosen & ~log_density.failed & ~log_density.inaccurate & torch.isfinite(ends).all(1)
        )
        if not bool(beyond.any()):
            return log_density, made
        z = support.to_real(ends) if isinstance(support, Continuous) else ends
        centre = (support.to_real(quantiles) if isinstance(support, Continuous) else quantiles)[
            :, 2:3
        ]
        far = centre + MARGIN * (z - centre)
        far = support.from_real(far) if isinstance(support, Continuous) else far
        wider = quantiles.clone()
        wider[:, 0], wider[:, -1] = (
            torch.minimum(wider[:, 0], far[:, 0]),
            torch.maximum(wider[:, -1], far[:, 1]),
        )
        quantiles = torch.where(beyond.unsqueeze(1), wider, quantiles)
        log_density = widened(log_density, quantiles, beyond)
    made = (
        grid_predictive(log_density, support, name)
        if isinstance(support, Continuous)
        else count_predictive(log_density, name)
    )
    log_density.inaccurate[beyond] = True
    return log_density, made


def _classes(
    weights: WeightLogDensity,
    output: Predictive,
    chosen: Tensor,
    name: str,
    reasons: list[str] | None,
) -> Predictive:
    """A refit for each class of each chosen row that is not rare, unless it is the only one: then
    no refit changes the answer.

    A row in which a refit fails has the output rung's answer.
    """
    assert isinstance(output.law, ClassLaw)
    logs, likely = output.law.log_weights.clone(), output.law.probs >= weights.rare
    likely &= likely.sum(1, keepdim=True) > 1
    rows, y = (chosen.unsqueeze(1) & likely).nonzero().unbind(1)
    fallback, failed = output.diagnostics.fallback.clone(), torch.zeros_like(chosen)
    errors = torch.zeros_like(logs)
    if rows.numel():
        density = weights.at(y.double(), rows)
        failed[rows[~density.converged]], fallback[chosen] = True, False
        fallback[rows[density.fallback]] = True
        good = ~failed[rows]
        rows, y, refitted_logs = rows[good], y[good], density.log[good]
        logs = _with_rare(logs, output.law.probs, rows, y, refitted_logs)
        logs[rows, y] = refitted_logs
        if density.error is not None:
            errors[rows, y] = density.error[good].to(errors.dtype)
        logs[_left_out(weights, failed)] = torch.nan
    unconverged = torch.where(chosen, failed, output.diagnostics.unconverged)
    flags = Diagnostics(name, fallback, unconverged, torch.zeros_like(fallback))
    refits = torch.where(chosen, 0 if weights.stopped else likely.sum(1), 0)
    flags = _diagnostics(flags, name, _rungs(weights, chosen, failed), reasons, refits)
    error = (torch.nan_to_num(logs.softmax(1)) * errors.square()).sum(1).sqrt()
    flags = _with_linearised(replace(flags, error=error), weights)
    law = ClassLaw(uncorrected(weights, chosen & ~failed, failed), logs, output.law.integrals)
    return Predictive(law, weights.like, flags)


def _with_rare(
    logs: Tensor, probs: Tensor, rows: Tensor, y: Tensor, refitted_logs: Tensor
) -> Tensor:
    """Log weights (N, C) in which the classes without a refit change as much as the rarest class of
    their row that has one.

    The output refit gives rare classes too much: the more, the rarer they are (docs/refits.md).
    """
    changes = torch.full_like(logs, torch.nan)
    changes[rows, y] = refitted_logs - logs[rows, y]
    has = ~torch.isnan(changes)
    rarest = torch.where(has, probs, torch.inf).argmin(1, keepdim=True)
    change = changes.gather(1, rarest)
    return torch.where(has.any(1, keepdim=True), logs + torch.nan_to_num(change), logs)


def _left_out(weights: WeightLogDensity, failed: Tensor) -> Tensor:
    """The failed rows that are NaN by on_failure='nan'."""
    return failed & (weights.refit.on_failure == NAN)


def _rungs(weights: WeightLogDensity, chosen: Tensor, failed: Tensor) -> tuple[str, ...]:
    """The rung that answered for each row: "weights", "output", or none: "failed"."""
    lost = _left_out(weights, failed)
    return tuple(
        "failed" if no else "weights" if yes else "output"
        for yes, no in zip((chosen & ~failed).tolist(), lost.tolist(), strict=True)
    )


def _with_linearised(flags: Diagnostics, weights: WeightLogDensity) -> Diagnostics:
    """With the rows that refits of the linearised network answered."""
    if not weights.linearised or flags.refits is None or flags.rung is None:
        return flags
    answered = torch.tensor([rung == "weights" for rung in flags.rung], dtype=torch.bool)
    return replace(flags, linearised=answered & (flags.refits.cpu() > 0))


def _diagnostics(
    flags: Diagnostics,
    name: str,
    rungs: tuple[str, ...],
    reasons: list[str] | None,
    refits: Tensor | None,
) -> Diagnostics:
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
