"""Classes: their integrals, or one evaluation for each, normalised."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import final

import torch
from torch import Tensor

from ssla.likelihoods import Bernoulli
from ssla.likelihoods.support import Classes
from ssla.predictive.class_integrals import ClassIntegrals
from ssla.predictive.law import Law, highest
from ssla.predictive.predictive import Diagnostics, Predictive
from ssla.predictive.spread import total_variance
from ssla.refit import LogDensity
from ssla.refit.increments import Increments


@final
@dataclass(frozen=True, eq=False)
class ClassLaw(Law):
    """P(Y = c) = exp(log_weights_c) / mass.

    The weights are integrals over f (the mass is then one), or the un-normalised densities of a refit. `increments` are those of
    the refit in both cases: they approximate the logarithm of the integral. `mean` and `variance` are of the class indicators:
    (N, C), or (N,) (of y itself) for Bernoulli.
    """

    log_density: LogDensity
    log_weights: Tensor  # (N, C)
    share: Tensor | None = None  # of the variance that is epistemic, of its shape; None: found when asked for

    kind = "class"

    @property
    def rows(self) -> int:
        return self.log_weights.shape[0]

    @cached_property
    def log_probs(self) -> Tensor:
        """(N, C)."""
        return torch.log_softmax(self.log_weights, 1)

    @property
    def probs(self) -> Tensor:
        return self.log_probs.exp()

    @property
    def mode(self) -> Tensor:
        return most_probable(self.log_probs)

    @property
    def mass(self) -> Tensor:
        return self.log_weights.logsumexp(1).exp()

    @property
    def mean(self) -> Tensor:
        return self.probs[:, 1] if isinstance(self.log_density.likelihood, Bernoulli) else self.probs

    @property
    def variance(self) -> Tensor:
        return self.mean * (1 - self.mean)

    @cached_property
    def _parts(self) -> tuple[Tensor, Tensor]:
        """In the proportion of the law of total variance under f ~ N(f̂, K)."""
        if not self.log_density.moves:
            return torch.zeros_like(self.variance), self.variance
        share = self.share
        if share is None:
            doubt, noise = total_variance(self.log_density.likelihood, *self.log_density.marginal)
            share = doubt / (doubt + noise).clamp_min(1e-300)
        epistemic = self.variance * share
        return epistemic, self.variance - epistemic

    @property
    def epistemic(self) -> Tensor:
        return self._parts[0]

    @property
    def aleatoric(self) -> Tensor:
        return self._parts[1]

    def check(self, y: Tensor) -> None:
        check_classes(y, self.log_weights.shape[1])

    def log_prob(self, y: Tensor) -> Tensor:
        return self.log_probs.gather(1, y.long())

    def interval(self, level: float) -> Tensor:
        return smallest_set(self.probs, level)

    def hdr(self, level: float) -> Tensor:
        """The same as `interval`."""
        return smallest_set(self.probs, level)

    def sample(self, n: int, generator: torch.Generator | None) -> Tensor:
        return draw_classes(self.probs, n, generator)

    def increments(self, y: Tensor) -> Increments:
        return self.log_density(y)


def check_classes(y: Tensor, count: int) -> None:
    """ValueError unless y are whole numbers from 0 to count − 1."""
    Classes(count).check(y.flatten(), count)


def most_probable(log_probs: Tensor) -> Tensor:
    """The most probable class; −1 where the probabilities are NaN.  (N, C) -> (N,)."""
    return torch.where(log_probs.isnan().any(1), -1, log_probs.argmax(1))


def smallest_set(probs: Tensor, level: float) -> Tensor:
    """The fewest classes with at least that probability; none where it is NaN.  (N, C) -> bool (N, C)."""
    return highest(probs, probs, level) & ~probs.isnan().any(1, keepdim=True)


def draw_classes(probs: Tensor, n: int, generator: torch.Generator | None) -> Tensor:
    """(N, C) -> (n, N) integers."""
    if bool(probs.isnan().any()):
        raise ValueError(
            f"{int(probs.isnan().any(1).sum())} of {len(probs)} predictives are NaN and have no samples: refits failed there "
            "and on_failure='nan' was asked for. Use on_failure='fallback', or leave these rows out."
        )
    if not n or not len(probs):  # torch.multinomial refuses both
        return torch.empty(n, len(probs), dtype=torch.int64)
    return torch.multinomial(probs, n, replacement=True, generator=generator).mT


def integrated_predictive(log_density: LogDensity, found: ClassIntegrals, refit: str, differentiable: bool = False) -> Predictive:
    """Probabilities that are integrals over f."""
    log_probs, spread = found
    p = log_probs.exp()
    share = (spread / (p * (1 - p)).clamp_min(1e-300)).clamp_max(1.0)
    if isinstance(log_density.likelihood, Bernoulli):
        share = share[:, 1]
    no = torch.zeros(len(p), dtype=torch.bool)
    law, flags = ClassLaw(log_density, log_probs, share), Diagnostics(refit, no, no, no)
    return Predictive(law, log_density.like, flags, differentiable=differentiable)


def class_predictive(log_density: LogDensity, count: int, refit: str) -> Predictive:
    """Evaluate every class at every input."""
    rows = log_density.marginal.mean.shape[0]
    density = log_density.at(torch.arange(count, dtype=torch.float64).expand(rows, -1))
    no = torch.zeros(rows, dtype=torch.bool)
    flags = Diagnostics(refit, density.fallback.any(1), ~density.converged.all(1), no)
    return Predictive(ClassLaw(log_density, density.log), log_density.like, flags)
