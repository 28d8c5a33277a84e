"""Classes: one evaluation for each, then normalise."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from ssla._checks import level as checked_level
from ssla.likelihoods import Bernoulli
from ssla.likelihoods.support import Classes
from ssla.predictive.predictive import Diagnostics, answer, scalar_targets
from ssla.predictive.spread import total_variance
from ssla.refit import LogDensity
from ssla.refit.increments import Increments


@dataclass(frozen=True, eq=False)
class ClassPredictive:
    """P(Y = c) = exp(total(c)) / mass.

    `mean` and `variance` are of the class indicators: (N, C), or (N,) (of y itself) for Bernoulli.
    """

    log_density: LogDensity
    log_weights: Tensor  # un-normalised (N, C)
    diagnostics: Diagnostics

    kind = "class"

    def _out(self, value: Tensor) -> Tensor:
        return value.to(self.log_density.like)

    @property
    def _rows(self) -> int:
        return self.log_weights.shape[0]

    @property
    def _count(self) -> int:
        return self.log_weights.shape[1]

    @cached_property
    def _log_probs(self) -> Tensor:
        return torch.log_softmax(self.log_weights, 1)

    @property
    def _binary(self) -> bool:
        return isinstance(self.log_density.likelihood, Bernoulli)

    @property
    def probs(self) -> Tensor:
        """(N, C)."""
        return self._out(self._log_probs.exp())

    @property
    def mode(self) -> Tensor:
        """The most probable class (N,); −1 where the predictive is NaN."""
        best = torch.where(self._log_probs.isnan().any(1), -1, self._log_probs.argmax(1))
        return best.to(self.log_density.like.device)

    @property
    def mass(self) -> Tensor:
        return self._out(self.log_weights.logsumexp(1).exp())

    @property
    def _indicators(self) -> Tensor:
        p = self._log_probs.exp()
        return p[:, 1] if self._binary else p

    @property
    def mean(self) -> Tensor:
        return self._out(self._indicators)

    @property
    def variance(self) -> Tensor:
        return self._out(self._indicators * (1 - self._indicators))

    @property
    def stddev(self) -> Tensor:
        return self.variance.sqrt()

    @cached_property
    def _parts(self) -> tuple[Tensor, Tensor]:
        """In the proportion of the law of total variance under f ~ N(f̂, K)."""
        variance = self._indicators * (1 - self._indicators)
        if not self.log_density.moves:
            return torch.zeros_like(variance), variance
        f, K = self.log_density.marginal
        doubt, noise = total_variance(self.log_density.likelihood, f, K)
        epistemic = variance * (doubt / (doubt + noise).clamp_min(1e-300))
        return epistemic, variance - epistemic

    @property
    def epistemic(self) -> Tensor:
        return self._out(self._parts[0])

    @property
    def aleatoric(self) -> Tensor:
        return self._out(self._parts[1])

    def log_prob(self, y: Any) -> Tensor:
        """(N,) -> (N,); (N, k) -> (N, k)."""
        value, single = scalar_targets(y, self._rows)
        Classes(self._count).check(value.flatten(), self._count)
        return self._out(answer(self._log_probs.gather(1, value.long()), single))

    def interval(self, level: float = 0.95) -> Tensor:
        """The smallest set of classes with at least that probability: bool (N, C); empty where the predictive is NaN."""
        known = ~self._log_probs.isnan().any(1, keepdim=True)
        return (smallest_set(self._log_probs.exp(), level) & known).to(self.log_density.like.device)

    def hdr(self, level: float = 0.95) -> Tensor:
        """The same as `interval`."""
        return self.interval(level)

    def sample(self, n: int, generator: torch.Generator | None = None) -> Tensor:
        """(n, N) integers."""
        probs = self._log_probs.exp()
        if bool(probs.isnan().any()):
            raise ValueError(
                f"{int(probs.isnan().any(1).sum())} of {len(probs)} predictives are NaN and have no samples: refits failed there "
                "and on_failure='nan' was asked for. Use on_failure='fallback', or leave these rows out."
            )
        draws = torch.multinomial(probs, n, replacement=True, generator=generator)
        return draws.mT.to(self.log_density.like.device)

    def increments(self, y: Any) -> Increments:
        """The three increments of the un-normalised log probability, of log_prob's shape."""
        value, single = scalar_targets(y, self._rows)
        Classes(self._count).check(value.flatten(), self._count)
        parts = self.log_density(value)
        return parts.map(lambda part: self._out(answer(part, single)))


def smallest_set(probs: Tensor, level: float) -> Tensor:
    """The fewest classes with at least that probability.  (N, C) -> bool (N, C)."""
    checked_level(level)
    p, order = probs.sort(1, descending=True)
    needed = torch.nn.functional.pad(p.cumsum(1)[:, :-1] < level, (1, 0), value=True)
    return torch.zeros_like(needed).scatter(1, order, needed)


def class_predictive(log_density: LogDensity, count: int, refit: str) -> ClassPredictive:
    """Evaluate every class at every input."""
    rows = log_density.marginal.mean.shape[0]
    density = log_density.at(torch.arange(count, dtype=torch.float64).expand(rows, -1))
    no = torch.zeros(rows, dtype=torch.bool)
    flags = Diagnostics(refit, density.fallback.any(1), ~density.converged.all(1), no)
    return ClassPredictive(log_density, density.log, flags)
