"""Predictives of the rungs that refit the weights: always, or where the output rung is doubtful."""

from __future__ import annotations

import torch
from torch import Tensor

from ssla.likelihoods import Gaussian
from ssla.likelihoods.support import Classes, Continuous, Support
from ssla.predictive.classes import ClassPredictive
from ssla.predictive.counts import CountPredictive, count_predictive
from ssla.predictive.few_refits import REGION, WIDENINGS, Corrected, correct, uncorrected, widened
from ssla.predictive.frame import QUANTILES
from ssla.predictive.gaussian import GaussianPredictive
from ssla.predictive.grid import GridPredictive, grid_predictive
from ssla.predictive.predictive import Diagnostics, Predictive
from ssla.priors import BoundGaussian
from ssla.refit import AutoRefit, WeightLogDensity
from ssla.refit.auto import MASS_ERROR, STEP_ERROR
from ssla.refit.weights import NAN

VECTOR = (
    "A refit of the weights has no closed form for a vector target here, and no grid in several dimensions. For log densities at "
    "given y use ssla.ssla(posterior, x, y); for a distribution use refit='output'."
)
CIRCULAR = (
    "A refit of the weights has no predictive for angles. For log densities at given y use ssla.ssla(posterior, x, y); for a "
    "distribution use refit='output'."
)
MARGIN = 1.1  # by which a widened region exceeds what is seen of the answer's
CLASS_SHARE = 0.05  # classes below this probability do not make an input doubtful


def is_exact(weights: WeightLogDensity) -> bool:
    """Whether the output rung is already the weights': Gaussian noise, linear, dense, a Gaussian prior."""
    return weights.posterior.quadratic and isinstance(weights.posterior.bound_prior, BoundGaussian)


def refitted(weights: WeightLogDensity, output: Predictive, name: str, reasons: list[str] | None = None) -> Predictive:
    """The predictive of the weights rung in the rows with a reason (all rows if None), of the output rung in the others."""
    rows = weights.marginal.mean.shape[0]
    support = weights.likelihood.support_for(weights.marginal.mean.shape[1])
    chosen = torch.tensor([reasons is None or bool(reasons[i]) for i in range(rows)], dtype=torch.bool)
    if is_exact(weights) and isinstance(output, GaussianPredictive):
        chosen &= reasons is None  # the two rungs are one; it is called by the name asked for
        rungs = _rungs(weights, chosen, torch.zeros_like(chosen))
        return GaussianPredictive(weights, output.noise, False, _told(output.diagnostics, name, rungs, reasons, None))
    if support.kind == "vector":
        raise ValueError(VECTOR)
    if support.kind == "circular":
        raise ValueError(CIRCULAR)
    if isinstance(support, Classes):
        return _classes(weights, output, support.count, chosen, name, reasons)
    assert isinstance(output, GaussianPredictive | GridPredictive | CountPredictive)
    log_density, made = _resolved(weights, output.icdf(QUANTILES).to("cpu", torch.float64), chosen, support, name)
    flags = Diagnostics(
        name,
        made.diagnostics.fallback | log_density.fallback,
        made.diagnostics.unconverged | log_density.failed,
        (made.diagnostics.inaccurate & ~_left_out(weights, log_density.failed)) | log_density.inaccurate,
    )
    rungs = _rungs(weights, chosen, log_density.failed)
    told = _told(flags, name, rungs, reasons, log_density.refits)
    if isinstance(made, CountPredictive):
        return CountPredictive(log_density, made.tables, told)
    return GridPredictive(log_density, made.support, made.pieces, told)


def _resolved(
    weights: WeightLogDensity, quantiles: Tensor, chosen: Tensor, support: Support, name: str
) -> tuple[Corrected, CountPredictive | GridPredictive]:
    """Correct over the output predictive's region; where the answer's own 99.9% region reaches beyond it, wider."""
    log_density = correct(weights, quantiles, chosen)
    for _ in range(WIDENINGS):
        made = (
            grid_predictive(log_density, support, name)
            if isinstance(support, Continuous)
            else count_predictive(log_density, name)
        )
        ends = made.icdf((REGION, 1 - REGION)).to("cpu", torch.float64)
        beyond = (ends[:, 0] < quantiles[:, 0]) | (ends[:, 1] > quantiles[:, -1])
        log_density.inaccurate[chosen & ~log_density.failed & ~torch.isfinite(made.mass.to("cpu"))] = True
        beyond &= chosen & ~log_density.failed & ~log_density.inaccurate & torch.isfinite(ends).all(1)
        if not bool(beyond.any()):
            return log_density, made
        z = support.to_real(ends) if isinstance(support, Continuous) else ends
        centre = (support.to_real(quantiles) if isinstance(support, Continuous) else quantiles)[:, 2:3]
        far = centre + MARGIN * (z - centre)
        far = support.from_real(far) if isinstance(support, Continuous) else far
        wider = quantiles.clone()
        wider[:, 0], wider[:, -1] = torch.minimum(wider[:, 0], far[:, 0]), torch.maximum(wider[:, -1], far[:, 1])
        quantiles = torch.where(beyond.unsqueeze(1), wider, quantiles)
        log_density = widened(log_density, quantiles, beyond)
    made = grid_predictive(log_density, support, name) if isinstance(support, Continuous) else count_predictive(log_density, name)
    log_density.inaccurate[beyond] = True
    return log_density, made


def _classes(
    weights: WeightLogDensity, output: Predictive, count: int, chosen: Tensor, name: str, reasons: list[str] | None
) -> ClassPredictive:
    """One refit for each class of each chosen row; a row of which one fails is the output rung's."""
    assert isinstance(output, ClassPredictive)
    logs, rows = output.log_weights.clone(), chosen.nonzero().squeeze(-1)
    fallback, failed = output.diagnostics.fallback.clone(), torch.zeros_like(chosen)
    if rows.numel():
        density = weights.at(torch.arange(count, dtype=torch.float64).expand(len(rows), -1), rows)
        good = density.converged.all(1)
        logs[rows[good]], fallback[rows], failed[rows] = density.log[good], density.fallback.any(1), ~good
        logs[_left_out(weights, failed)] = torch.nan
    unconverged = torch.where(chosen, failed, output.diagnostics.unconverged)
    flags = Diagnostics(name, fallback, unconverged, torch.zeros_like(fallback))
    told = _told(flags, name, _rungs(weights, chosen, failed), reasons, torch.where(chosen, 0 if weights.stopped else count, 0))
    return ClassPredictive(uncorrected(weights, chosen & ~failed, failed), logs, told)


def _left_out(weights: WeightLogDensity, failed: Tensor) -> Tensor:
    """The failed rows that the user wants as NaN."""
    return failed & (weights.refit.on_failure == NAN)


def _rungs(weights: WeightLogDensity, chosen: Tensor, failed: Tensor) -> tuple[str, ...]:
    """Who answered for each row: "weights", "output", or nobody: "failed"."""
    lost = _left_out(weights, failed)
    return tuple(
        "failed" if no else "weights" if yes else "output"
        for yes, no in zip((chosen & ~failed).tolist(), lost.tolist(), strict=True)
    )


def _told(flags: Diagnostics, name: str, rungs: tuple[str, ...], reasons: list[str] | None, refits: Tensor | None) -> Diagnostics:
    none = torch.zeros_like(flags.fallback, dtype=torch.long)
    return Diagnostics(
        name,
        flags.fallback,
        flags.unconverged,
        flags.inaccurate,
        refits=none if refits is None else refits,
        rung=rungs,
        reason=None if reasons is None else tuple(reasons),
    )


def doubts(auto: AutoRefit, weights: WeightLogDensity, output: Predictive) -> list[str]:
    """For each row why its output predictive is doubtful; empty where it is not."""
    rows = weights.marginal.mean.shape[0]
    if is_exact(weights):
        return [""] * rows
    flags = output.diagnostics
    flagged = (flags.unconverged | flags.inaccurate).tolist()
    off = (output.mass.double().cpu() - 1).abs()
    step = _largest_step(weights, output)
    words = []
    for i in range(rows):
        found = []
        if not MASS_ERROR * float(off[i]) <= auto.target:
            found.append(f"mass off by {float(off[i]):.2g}")
        if not STEP_ERROR * float(step[i]) ** 2 <= auto.target:
            found.append(f"step of {float(step[i]):.2g} sd")
        if flagged[i]:
            found.append("flagged")
        words.append(", ".join(found))
    return words


def _largest_step(weights: WeightLogDensity, output: Predictive) -> Tensor:
    """How far a plausible y moves the weights, in posterior standard deviations (N,)."""
    likelihood = weights.likelihood
    support = likelihood.support_for(weights.marginal.mean.shape[1])
    if support.kind == "vector":
        assert isinstance(likelihood, Gaussian)
        f, K = weights.marginal
        noise = torch.diag_embed(likelihood.variance(f).sqrt())
        spread = torch.linalg.cholesky(noise**2 + K)
        return weights.output.step(f.unsqueeze(1) + 2 * spread.mT).amax(1)
    if isinstance(output, ClassPredictive):
        probs = output.probs.double().cpu()
        y = torch.arange(probs.shape[1], dtype=torch.float64).expand_as(probs)
        return torch.where(probs >= CLASS_SHARE, weights.output.step(y), torch.zeros_like(probs)).amax(1)
    return weights.output.step(output.interval(0.95).double().cpu()).amax(1)
