"""Classes: their integrals, or one evaluation for each, normalised."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import final

import torch
from torch import Tensor

from ssla.likelihoods.support import Classes
from ssla.predictive.class_integrals import ClassIntegrals, entropy_of
from ssla.predictive.law import Law, highest
from ssla.predictive.predictive import Diagnostics, Predictive
from ssla.predictive.spread import mean_entropy, total_variance
from ssla.refit import LogDensity
from ssla.refit.increments import Increments

ENTRIES_AT_ONCE = 1 << 22  # probabilities (rows, C) that are ordered together


@final
@dataclass(frozen=True, eq=False)
class ClassLaw(Law):
    """P(Y = c) = exp(log_weights_c) / mass.

    The weights are integrals over f (the mass is then one), or the un-normalised densities of a
    refit. `increments` are those of the refit in both cases: they approximate the logarithm of the
    integral. `mean` and `variance` are of the class indicators: (N, C), or (N,) (of y itself) for
    Bernoulli.
    """

    log_density: LogDensity
    log_weights: Tensor  # (N, C); float32 for very many answers of a float32 network
    integrals: ClassIntegrals | None = (
        None  # under f ~ N(f̂, K); None: what is needed of them is found when asked for
    )

    kind = "class"

    @property
    def rows(self) -> int:
        return self.log_weights.shape[0]

    @property
    def log_probs(self) -> Tensor:
        """(N, C)."""
        # Weights in float32 are normalised integrals, and so many that they are not held twice.
        return self.log_weights if self.log_weights.dtype == torch.float32 else self._normalised

    @cached_property
    def _normalised(self) -> Tensor:
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
        return self.probs[:, 1] if self.log_density.likelihood.one_probability else self.probs

    @property
    def variance(self) -> Tensor:
        return self.mean * (1 - self.mean)

    @property
    def epistemic(self) -> Tensor:
        """In the proportion of the law of total variance under f ~ N(f̂, K)."""
        if not self.log_density.moves:
            return torch.zeros_like(self.variance)
        share = self._found_share if self.integrals is None else self._share_of(self.integrals)
        return self.variance * share

    @property
    def aleatoric(self) -> Tensor:
        return self.variance - self.epistemic

    @cached_property
    def _found_share(self) -> Tensor:
        """Of the variance that is epistemic, of its shape."""
        doubt, noise = total_variance(self.log_density.likelihood, *self.log_density.marginal)
        return doubt / (doubt + noise).clamp_min(1e-300)

    def _share_of(self, integrals: ClassIntegrals) -> Tensor:
        p = integrals.log_probs.exp()
        share = (integrals.spread / (p * (1 - p)).clamp_min(torch.finfo(p.dtype).tiny)).clamp_max(
            1.0
        )
        return share[:, 1] if self.log_density.likelihood.one_probability else share

    @cached_property
    def entropy(self) -> Tensor:
        return entropy_of(self.log_probs)

    @cached_property
    def mutual_information(self) -> Tensor:
        """In the proportion of H(E p) and E H(p) under f ~ N(f̂, K), so that it is at most the
        entropy.

        Where the probabilities are integrals over f, it is I(y; f) itself.
        """
        if not self.log_density.moves:
            return torch.zeros_like(self.entropy)
        if self.integrals is None:
            classes = self.log_weights.shape[1]
            of_mean, mean = mean_entropy(
                self.log_density.likelihood, *self.log_density.marginal, classes
            )
            doubt = of_mean - mean
        else:
            of_mean, doubt = entropy_of(self.integrals.log_probs), self.integrals.mutual_information
        share = torch.where(of_mean > 0, doubt / of_mean, torch.zeros_like(doubt))
        return self.entropy * share.clamp(0.0, 1.0)

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
    """The fewest classes with at least that probability; none where it is NaN.

    (N, C) -> bool (N, C).
    """
    # The order of all classes of all rows would take several times the memory of the probabilities.
    blocks = probs.split(max(ENTRIES_AT_ONCE // max(probs.shape[1], 1), 1))
    return torch.cat([highest(p, p, level) & ~p.isnan().any(1, keepdim=True) for p in blocks])


def draw_classes(probs: Tensor, n: int, generator: torch.Generator | None) -> Tensor:
    """(N, C) -> (n, N) integers."""
    if bool(probs.isnan().any()):
        raise ValueError(
            f"{int(probs.isnan().any(1).sum())} of {len(probs)} predictives are NaN and have no "
            "samples: refits failed there and on_failure='nan' was asked for. Use "
            "on_failure='fallback', or leave these rows out."
        )
    if not n or not len(probs):  # torch.multinomial refuses both
        return torch.empty(n, len(probs), dtype=torch.int64)
    return torch.multinomial(probs, n, replacement=True, generator=generator).mT


def integrated_predictive(
    log_density: LogDensity, found: ClassIntegrals, refit: str, differentiable: bool = False
) -> Predictive:
    """Probabilities that are integrals over f."""
    no = torch.zeros(len(found.entropy), dtype=torch.bool)
    law, flags = ClassLaw(log_density, found.log_probs, found), Diagnostics(refit, no, no, no)
    return Predictive(law, log_density.like, flags, differentiable=differentiable)


def class_predictive(log_density: LogDensity, count: int, refit: str) -> Predictive:
    """Evaluate every class at every input."""
    rows = log_density.marginal.mean.shape[0]
    density = log_density.at(torch.arange(count, dtype=torch.float64).expand(rows, -1))
    no = torch.zeros(rows, dtype=torch.bool)
    flags = Diagnostics(refit, density.fallback.any(1), ~density.converged.all(1), no)
    return Predictive(ClassLaw(log_density, density.log), log_density.like, flags)
