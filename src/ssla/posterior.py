"""The fitted object: data statistics, a prior, and the mode between them.

A Posterior is a frozen value. It holds a private copy of the network, so the user's module is neither
needed unchanged nor ever written to. Predictions live above this room; `predict` is the door to them.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from ssla.batches import Inputs, as_inputs
from ssla.jacobians import Jacobian
from ssla.likelihoods import Gaussian, Likelihood
from ssla.network import Network
from ssla.priors import BoundPrior, Prior
from ssla.structures import Dense, Operator, Structure

if TYPE_CHECKING:
    from ssla.predictive import Predictive
    from ssla.refit import Refit

POLISH, TILT, AS_IS = "polish", "tilt", "as_is"
DEFAULT_BUDGET = 1 << 30


class Marginal(NamedTuple):
    """The outputs at x as a Gaussian: mean f̂ (N, C), covariance K (N, C, C)."""

    mean: Tensor
    covariance: Tensor


@dataclass(frozen=True, eq=False)
class Statistics:
    """Sums over the data at one θ. `merge` adds them."""

    n: int  # rows seen
    weight: float  # sum of the row weights (= n without weights)
    log_likelihood: float
    gradient: Tensor  # ∇ℓ_D (P,)
    curvature: Structure  # Σ JᵀΛJ

    def merge(self, other: Statistics) -> Statistics:
        """The sums over both data sets (at the same θ)."""
        return Statistics(
            self.n + other.n,
            self.weight + other.weight,
            self.log_likelihood + other.log_likelihood,
            self.gradient + other.gradient,
            self.curvature.merge(other.curvature),
        )

    def moved(self, step: Tensor) -> Statistics:
        """The sums at θ + step where ℓ_D is quadratic with exactly this curvature."""
        push = self.curvature.push(step)
        gain = float(step @ self.gradient) - 0.5 * float(step @ push)
        return replace(self, log_likelihood=self.log_likelihood + gain, gradient=self.gradient - push)


@dataclass(frozen=True)
class Report:
    """What `fit` saw and did. `print(posterior.report)` is meant to be read."""

    n: int
    weight: float
    parameters: int
    names: tuple[str, ...]
    outputs: int
    likelihood: str
    structure: str
    blocks: dict[str, str]  # layer -> structure
    mode: str
    residual: float  # √(g₀ᵀH⁻¹g₀) before: distance to the mode in posterior standard deviations
    residual_after: float
    steps: int  # Newton steps of polish
    output_shift: float  # root mean square change of the outputs by polish, in units of the noise
    passes: int
    memory: int  # bytes of statistics and factorisation
    notes: tuple[str, ...] = ()

    @property
    def residual_per_parameter(self) -> float:
        """`residual` / √P: about how many posterior standard deviations each parameter is off its mode."""
        return self.residual / math.sqrt(self.parameters)

    def __str__(self) -> str:
        done = {
            POLISH: f"polished in {self.steps} Newton step{'s' * (self.steps != 1)}: residual now {self.residual_after:.2g}, "
            f"training outputs moved by {self.output_shift:.2g} noise units (rms); your module is unchanged",
            TILT: "tilted: θ̂ is taken as the mode, the point prediction is your network's own",
            AS_IS: "taken as it is",
        }[self.mode]
        weighted = "" if math.isclose(self.weight, self.n) else f" (total weight {self.weight:g})"
        blocks = ", ".join(f"{name or 'network'}: {kind}" for name, kind in self.blocks.items())
        lines = [
            f"n seen       {self.n:,} rows{weighted}, {self.passes} pass{'es' * (self.passes != 1)} over the data",
            f"parameters   {self.parameters:,} free ({', '.join(self.names[:4])}{', …' if len(self.names) > 4 else ''})",
            f"likelihood   {self.likelihood} on {self.outputs} output{'s' * (self.outputs != 1)}",
            f"structure    {self.structure} ({blocks})",
            f"residual     {self.residual:.3g} posterior sd from the mode ({self.residual_per_parameter:.2g} per parameter)",
            f"mode         {done}",
            f"memory       {self.memory / 2**20:.1f} MiB",
            *(f"note         {note}" for note in self.notes),
        ]
        return "\n".join(lines)


@dataclass(frozen=True, eq=False)
class Posterior:
    """p(θ | D) by its mode and curvature, ready to predict. Made by `ssla.fit`."""

    network: Network
    likelihood: Likelihood
    prior: Prior
    theta: Tensor  # θ̂ (P,), float64
    statistics: Statistics  # at θ̂
    report: Report
    memory_budget: int = DEFAULT_BUDGET

    @cached_property
    def bound_prior(self) -> BoundPrior:
        return self.prior.bind(self.network.layout)

    @cached_property
    def operator(self) -> Operator:
        """H⁻¹, H = Σ JᵀΛJ − ∇² log π."""
        return self.statistics.curvature.with_prior(self.bound_prior.precision(self.theta))

    @property
    def parameters(self) -> dict[str, Tensor]:
        """θ̂ by name (after `polish` not the module's own values)."""
        return self.network.layout.unpack(self.theta.clone())

    def expansions(self, x: Any) -> Iterator[tuple[Tensor, Jacobian]]:
        """f̂ and J at x, a chunk at a time."""
        inputs = self.network.cast(as_inputs(x))
        for part in self.network.chunks(inputs, self.memory_budget):
            f, J = self.network.expand(part, self.theta)
            self.likelihood.check_outputs(f)
            yield f, J

    def marginal(self, x: Inputs) -> Marginal:
        """f̂ (N, C) and K = J H⁻¹ Jᵀ (N, C, C), in bounded memory for any N, in the model's dtype."""
        return Marginal(*(part.to(self.network.device, self.network.dtype) for part in self.outputs_at(x)))

    def outputs_at(self, x: Inputs) -> Marginal:
        """`marginal` in float64 on the CPU, where everything else is computed."""
        return _joined([(f, self.operator.covariance(J)) for f, J in self.expansions(x)])

    def prior_response(self, x: Inputs) -> Marginal:
        """What a refit does to log π, to second order: mean b = J H⁻¹ ∇log π, covariance J H⁻¹ (−∇² log π) H⁻¹ Jᵀ.

        A refit that moves the outputs by K u moves θ by H⁻¹Jᵀu and log π by bᵀu − ½ uᵀ(·)u.
        """
        pull = self.operator.solve(self.bound_prior.gradient(self.theta))
        middle = self.bound_prior.precision(self.theta)
        return _joined([(J.push(pull), self.operator.response(J, middle)) for _, J in self.expansions(x)])

    def log_evidence(self) -> float:
        """Laplace: ℓ_D(θ̂) + log π(θ̂) + (P/2) log 2π − ½ log|H|. Exact for linear Gaussian models."""
        size = self.theta.numel()
        prior = float(self.bound_prior.log_prob(self.theta))
        return self.statistics.log_likelihood + prior + 0.5 * (size * math.log(2 * math.pi) - self.operator.logdet())

    # --- more data -------------------------------------------------------------------------

    @property
    def quadratic(self) -> bool:
        """Whether ℓ_D is a quadratic that the sums hold whole, so that the mode can move without another pass."""
        return self.network.linear and isinstance(self.likelihood, Gaussian) and isinstance(self.statistics.curvature, Dense)

    def update(self, data: Any) -> Posterior:
        """The posterior with more data, in one pass over them alone.

        A polished last layer with Gaussian noise and dense curvature moves to the new mode, exactly as if all data had been
        fitted at once. Otherwise θ̂ stays where it is, and the report says so.
        """
        from ssla.fitting import collect

        return self._with_statistics(self.statistics.merge(collect(self, data)), passes=self.report.passes + 1)

    def merge(self, other: Posterior) -> Posterior:
        """The posterior of both data sets (the prior counts once). Associative, and free of order.

        Both must come from the same network, likelihood and prior, and stand at the same θ̂ (fit shards with mode="tilt"), unless
        their sums are quadratic, when they are brought to the same place exactly.
        """
        mine, theirs = self.report, other.report
        for what in ("names", "outputs", "likelihood", "structure"):
            if getattr(mine, what) != getattr(theirs, what):
                pair = f"{getattr(mine, what)} and {getattr(theirs, what)}"
                raise ValueError(f"Only posteriors alike can be merged, but their {what} differ: {pair}.")
        if not torch.equal(self.network.theta, other.network.theta):
            raise ValueError("Only posteriors of the same trained network can be merged, but the networks' weights differ.")
        both = (self.bound_prior, other.bound_prior)
        if any(
            not torch.equal(getattr(both[0], m)(self.theta), getattr(both[1], m)(self.theta)) for m in ("gradient", "precision")
        ):
            raise ValueError("Only posteriors with the same prior can be merged, but the priors differ.")
        statistics = other.statistics
        if not torch.equal(self.theta, other.theta):
            if not self.quadratic:
                raise ValueError(
                    "The two posteriors stand at different modes, and their sums cannot be moved. Fit every shard with "
                    "mode='tilt'."
                )
            statistics = statistics.moved(self.theta - other.theta)
        return self._with_statistics(self.statistics.merge(statistics), passes=mine.passes + theirs.passes)

    def _with_statistics(self, statistics: Statistics, passes: int) -> Posterior:
        theta, note = self.theta, "data were added: θ̂ was kept, and is no longer the mode of all of them"
        if self.quadratic and self.report.mode == POLISH:
            operator = statistics.curvature.with_prior(self.bound_prior.precision(theta))
            step = operator.solve(statistics.gradient + self.bound_prior.gradient(theta))
            theta, statistics, note = theta + step, statistics.moved(step), "data were added: moved to the mode of all of them"
        moved = replace(self, theta=theta, statistics=statistics)
        gradient = statistics.gradient + self.bound_prior.gradient(theta)
        residual = math.sqrt(max(float(gradient @ moved.operator.solve(gradient)), 0.0))
        notes = tuple(n for n in self.report.notes if not n.startswith("data were added"))
        report = replace(
            self.report, n=statistics.n, weight=statistics.weight, passes=passes, residual_after=residual, notes=(*notes, note)
        )
        return replace(moved, report=report)

    def predict(self, x: Inputs, refit: str | Refit = "output") -> Predictive:
        """The predictive distribution of y at x.

        refit: "output" (default: the mode in the outputs), "newton" (one step), "none" (ASSLA), or an object such
        as `ssla.NoRefit(curvature="fisher")`.

        >>> post.predict(x).interval(0.95)      # doctest: +SKIP
        """
        from ssla.predictive import predict

        return predict(self, x, refit)

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write to a directory of tensors and JSON (needs safetensors); `ssla.load(path, model)` opens it.

        Neither the network nor any data are stored: keep the module's state_dict beside it.
        """
        from ssla.persistence import save

        return save(self, path)

    def __repr__(self) -> str:
        r = self.report
        return f"Posterior(n={r.n}, parameters={r.parameters}, likelihood={r.likelihood}, structure={r.structure!r})"


def _joined(parts: list[tuple[Tensor, Tensor]]) -> Marginal:
    """Chunks -> all rows, in float64."""
    return Marginal(torch.cat([f for f, _ in parts]).double(), torch.cat([K for _, K in parts]).double())
