"""Log densities of both procedures on a grid of y, and their distance from the analytic
predictive.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

import ssla
from ssla_paper.conjugate.models import Analytic, Linear, Model, Normal, Poisson
from ssla_paper.runner import Record

F64 = torch.float64
MODELS: dict[str, type[Normal] | type[Poisson] | type[Linear]] = {
    "normal–normal": Normal,
    "Poisson–gamma": Poisson,
    "linear regression": Linear,
}
PRIORS: dict[str, dict[str, tuple[float, float]]] = {
    "normal–normal": {
        "reference": (4.0, 1.0),
        "strong": (4.0, 0.01),
        "far": (0.0, 1.0),
        "far and strong": (0.0, 0.01),
    },
    "Poisson–gamma": {
        "reference": (6, 2),
        "strong": (300, 100),
        "far": (20, 2),
        "far and strong": (1000, 100),
    },
    "linear regression": {
        "reference": (0.0, 1.0),
        "strong": (0.0, 0.01),
        "far": (-4.0, 1.0),
        "far and strong": (-4.0, 0.01),
    },
}
STRENGTHS = (
    1.0,
    0.3,
    0.1,
    0.03,
    0.01,
)  # prior variances of the regression's weights, for one table
PRIORS["linear regression"] |= {f"variance {v:g}": (0.0, v) for v in STRENGTHS}
FLOOR, NEAR = (
    25.0,
    8.0,
)  # log units below the peak: where a grid may end; where errors are measured (±4 sd of a normal)
AT_ONCE = 1 << 20  # log densities at a time, to fit the cache


class Parts(NamedTuple):
    likelihood: Tensor
    prior: Tensor
    curvature: Tensor

    @property
    def total(self) -> Tensor:
        return self.likelihood + self.prior + self.curvature


def published(model: Model, rows: Tensor, y: Tensor, refit: bool, dtype: torch.dtype) -> Parts:
    """ℓ̃(θ̃) − ℓ(θ̂), log π(θ̃) − log π(θ̂) and −½ [log|J̃(θ̃)| − log|J(θ̂)|] at maximum
    likelihood, each rounded to dtype.

    refit=False is ASSLA: θ̃ = θ̂, no prior.
    """
    rows, y = rows.to(dtype), y.to(dtype)
    hat = model.likeliest(rows, None)
    whole = model.log_rows(rows, hat).sum(1)
    if refit:
        tilde = model.likeliest(rows, y)
        size = max(AT_ONCE // len(rows), 1)
        sums = torch.cat([model.log_rows(rows, some).sum(1) for some in tilde.split(size)])
        prior = model.log_prior(tilde) - model.log_prior(hat)
    else:
        tilde, sums, prior = hat.expand(len(y), -1), whole, torch.zeros_like(y)
    likelihood = (sums + model.log_new(y, tilde)) - whole
    curvature = -0.5 * (model.logdet(rows, y, tilde) - model.logdet(rows, None, hat))
    return Parts(likelihood.to(F64), prior.to(F64), curvature.expand(len(y)).to(F64))


def divergence(p: Tensor, q: Tensor) -> float:
    """KL(p ‖ q) of log probabilities that each sum to one: Σ p d − p + q with d = log p − log
    q, without negative terms.
    """
    d = p - q
    small = p.exp() * d**2 * (0.5 - d / 6 + d**2 / 24)
    return float(torch.where(d.abs() < 1e-3, small, p.exp() * d - p.exp() + q.exp()).sum())


def compare(
    log_density: Callable[[Tensor], Tensor],
    y: Tensor,
    log_q: Tensor,
    analytic: Analytic,
    counts: bool,
) -> Record:
    """KL of the normalised density, log of its mass, largest error of the log density where the
    analytic one is not small.
    """
    y, log_q = widened(log_density, y, log_q, counts)
    log_p, step = analytic.log_prob(y), float(y[1] - y[0])
    near = log_p > log_p.max() - NEAR
    mass = torch.logsumexp(log_q, 0)
    return {
        "kl": divergence(log_p - torch.logsumexp(log_p, 0), log_q - mass),
        "log_mass": float(mass) + math.log(step),
        "error": float((log_q - log_p)[near].abs().max()),
        "curve": [y.tolist(), log_q.tolist()],
    }


def widened(
    log_density: Callable[[Tensor], Tensor], y: Tensor, log_q: Tensor, counts: bool
) -> tuple[Tensor, Tensor]:
    """The grid y (k,) grown at either end, evenly, until the density there is e⁻²⁵ of its peak."""
    step = float(y[1] - y[0])
    more = step * torch.arange(1, 41, dtype=F64)
    for _ in range(60):
        bar = float(log_q.max()) - FLOOR
        low, high = (
            float(log_q[0]) > bar and not (counts and float(y[0]) == 0),
            float(log_q[-1]) > bar,
        )
        if not low and not high:
            return y, log_q
        if low:
            y = torch.cat([(y[0] - more).flip(0), y])
            log_q = torch.cat([log_density(y[: len(more)]), log_q])
        if high:
            y = torch.cat([y, y[-1] + more])
            log_q = torch.cat([log_q, log_density(y[-len(more) :])])
    raise ValueError(
        "The density does not fall within hundreds of standard deviations: it cannot be normalised."
    )


def grid(analytic: Analytic, counts: bool) -> Tensor:
    """Steps of a fifth of the standard deviation, eight to either side; or counts from zero."""
    if counts:
        return torch.arange(math.ceil(analytic.centre + 12 * analytic.scale) + 10, dtype=F64)
    return analytic.centre + analytic.scale * torch.linspace(-8, 8, 81, dtype=F64)


def one(model: str, prior: str, n: int, seeds: int) -> Record:
    """All runs of one model, prior and n; the first run's curves are kept."""
    runs = [run(MODELS[model](*PRIORS[model][prior]), n, seed) for seed in range(seeds)]
    for later in runs[1:]:
        for found in later["methods"].values():
            del found["curve"]
    return {"model": model, "prior": prior, "n": n, "runs": runs}


def run(model: Model, n: int, seed: int) -> Record:
    """Every method on one data set."""
    rows = model.draw(n, seed)
    analytic = model.analytic(rows)
    y = grid(analytic, model.counts)
    log_p = analytic.log_prob(y)
    found: Record = {"analytic": compare(analytic.log_prob, y, log_p, analytic, model.counts)}
    loss: dict[str, dict[str, float]] = {}
    for method, refit in (("SSLA", True), ("ASSLA", False)):
        single, double = (published(model, rows, y, refit, dtype) for dtype in (torch.float32, F64))
        for name, parts, dtype in (("float32", single, torch.float32), ("float64", double, F64)):
            again = partial(_published, model, rows, refit, dtype)
            found[f"{name} {method}"] = compare(again, y, parts.total, analytic, model.counts)
        near = log_p > log_p.max() - NEAR
        loss[method] = {
            part: _largest((getattr(single, part) - getattr(double, part))[near])
            for part in Parts._fields
        }
    for name, posterior in model.posteriors(rows).items():
        refitted = ssla.WeightRefit(tolerance=1e-11, on_failure="raise")(posterior, model.point)
        still = ssla.NoRefit()(posterior, model.point)
        ours = {
            f"ours SSLA{name}": partial(_at, refitted, "total"),
            f"ours ASSLA{name}": partial(_at, still, "total"),
            f"plug-in{name}": partial(_at, still, "likelihood"),
        }
        for method, log_density in ours.items():
            found[method] = compare(log_density, y, log_density(y), analytic, model.counts)
    return {"seed": seed, "methods": found, "loss": loss}


def _published(model: Model, rows: Tensor, refit: bool, dtype: torch.dtype, y: Tensor) -> Tensor:
    return published(model, rows, y, refit, dtype).total


def _at(log_density: Callable[[Tensor], ssla.Increments], part: str, y: Tensor) -> Tensor:
    found: Tensor = getattr(log_density(y.unsqueeze(0)), part)
    return found[0]


def _largest(values: Tensor) -> float:
    return float(values.abs().max())
