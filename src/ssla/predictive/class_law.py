"""Classes: their integrals, or one evaluation for each, normalised."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from functools import cached_property
from typing import final

import torch
from torch import Tensor

from ssla.likelihoods.support import Classes
from ssla.predictive.class_integrals import ClassIntegrals, entropy_of
from ssla.predictive.law import Law, select_highest
from ssla.predictive.predictive import Diagnostics, Predictive
from ssla.predictive.spread import average_entropies, total_variance
from ssla.refit import LogDensity
from ssla.refit.increments import Increments

ENTRIES_AT_ONCE = 1 << 22  # probabilities (rows, C) that are ordered together; a guess


class ClassProbabilities(Law):
    """A law whose answers follow from the normalised log probabilities of C classes."""

    @property
    def kind(self) -> str:
        """Return "class"."""
        return "class"

    @property
    @abstractmethod
    def log_probs(self) -> Tensor:
        """Return the normalised log probabilities (N, C)."""

    @property
    def probs(self) -> Tensor:
        """Return the probabilities (N, C)."""
        return self.log_probs.exp()

    @property
    def mode(self) -> Tensor:
        """Return the most probable class (N,); −1 where the probabilities are NaN."""
        log_probs = self.log_probs
        return torch.where(log_probs.isnan().any(1), -1, log_probs.argmax(1))

    @cached_property
    def entropy(self) -> Tensor:
        """Return −Σ p log p in nats (N,)."""
        return entropy_of(self.log_probs)

    def check(self, y: Tensor) -> None:
        """Raise ValueError unless y are whole numbers from 0 to C − 1."""
        count = self.log_probs.shape[1]
        Classes(count).check(y.flatten(), count)

    def log_prob(self, y: Tensor) -> Tensor:
        """Look up the log probabilities of classes y (N, k) -> (N, k)."""
        return self.log_probs.gather(1, y.long())

    def interval(self, level: float) -> Tensor:
        """Return the smallest set of classes with that probability, bool (N, C)."""
        return smallest_set(self.probs, level)

    def hdr(self, level: float) -> Tensor:
        """Return the same set as `interval`."""
        return smallest_set(self.probs, level)

    def sample(self, n: int, generator: torch.Generator | None) -> Tensor:
        """Draw n classes for each input: integers (n, N)."""
        return draw_classes(self.probs, n, generator)


@final
@dataclass(frozen=True, eq=False)
class ClassLaw(ClassProbabilities):
    """P(Y = c) = exp(log_weights_c) / mass.

    The weights are integrals over f (the mass is then one), or the un-normalised densities of a
    refit. `increments` are those of the refit in both cases: they approximate the logarithm of the
    integral. `mean` and `variance` are of the class indicators: (N, C), or (N,) (of y itself) for
    Bernoulli.
    """

    log_density: LogDensity
    log_weights: Tensor  # (N, C); float32 for very many answers of a float32 network
    # under f ~ N(f̂, K); None: the moments that are needed are computed when they are asked for
    integrals: ClassIntegrals | None = None

    @property
    def rows(self) -> int:
        """Return N, the number of inputs."""
        return self.log_weights.shape[0]

    @property
    def log_probs(self) -> Tensor:
        """Return the normalised log probabilities (N, C)."""
        # Weights in float32 are normalised integrals, and so many that they are not held twice.
        return (
            self.log_weights
            if self.log_weights.dtype == torch.float32
            else self._normalised_log_weights
        )

    @cached_property
    def _normalised_log_weights(self) -> Tensor:
        """Return the normalised log weights (N, C)."""
        return torch.log_softmax(self.log_weights, 1)

    @property
    def mass(self) -> Tensor:
        """Return the sum of the weights (N,)."""
        return self.log_weights.logsumexp(1).exp()

    @property
    def mean(self) -> Tensor:
        """Return the mean of the indicators (N, C), or of y (N,) for Bernoulli."""
        return self._indicators(self.probs)

    def _indicators(self, by_class: Tensor) -> Tensor:
        """Take the values that the moments are about from (N, C): for Bernoulli those of y (N,)."""
        return by_class[:, 1] if self.log_density.likelihood.one_probability else by_class

    @property
    def variance(self) -> Tensor:
        """Return p(1 − p), of the shape of the mean."""
        return self.mean * (1 - self.mean)

    @property
    def epistemic(self) -> Tensor:
        """Return the variance times its epistemic share under f ~ N(f̂, K), (N,) or (N, C)."""
        if not self.log_density.moves:
            return torch.zeros_like(self.variance)
        share = self._estimated_share if self.integrals is None else self._share_of(self.integrals)
        return self.variance * share

    @property
    def aleatoric(self) -> Tensor:
        """Return the variance that is not epistemic, of the shape of the mean."""
        return self.variance - self.epistemic

    @cached_property
    def _estimated_share(self) -> Tensor:
        """Estimate the epistemic share of the variance, (N,) or (N, C), by a quadrature over f."""
        doubt, noise = total_variance(self.log_density.likelihood, *self.log_density.marginal)
        return doubt / (doubt + noise).clamp_min(1e-300)

    def _share_of(self, integrals: ClassIntegrals) -> Tensor:
        """Return the epistemic share Var_f E[y|f] / Var[y], (N,) or (N, C), from the integrals."""
        p = integrals.log_probs.exp()
        variance = (p * (1 - p)).clamp_min(torch.finfo(p.dtype).tiny)
        return self._indicators((integrals.spread / variance).clamp_max(1.0))

    @cached_property
    def mutual_information(self) -> Tensor:
        """Return the entropy times the share of H(E p) − E H(p) in H(E p) under f ~ N(f̂, K) (N,).

        So it is at most the entropy. Where the probabilities are integrals over f, it is I(y; f)
        itself.
        """
        if not self.log_density.moves:
            return torch.zeros_like(self.entropy)
        if self.integrals is None:
            classes = self.log_weights.shape[1]
            of_mean, mean = average_entropies(
                self.log_density.likelihood, *self.log_density.marginal, classes
            )
            doubt = of_mean - mean
        else:
            of_mean, doubt = entropy_of(self.integrals.log_probs), self.integrals.mutual_information
        share = torch.where(of_mean > 0, doubt / of_mean, torch.zeros_like(doubt))
        return self.entropy * share.clamp(0.0, 1.0)

    def increments(self, y: Tensor) -> Increments:
        """Return the increments of the refit at classes y (N, k), (N, k) each."""
        return self.log_density(y)


def smallest_set(probs: Tensor, level: float) -> Tensor:
    """Select the fewest classes with at least that probability; none where it is NaN.

    (N, C) -> bool (N, C).
    """
    # The order of all classes of all rows would take several times the memory of the probabilities.
    blocks = probs.split(max(ENTRIES_AT_ONCE // max(probs.shape[1], 1), 1))
    return torch.cat(
        [select_highest(p, p, level) & ~p.isnan().any(1, keepdim=True) for p in blocks]
    )


def draw_classes(probs: Tensor, n: int, generator: torch.Generator | None) -> Tensor:
    """Draw n classes for each row of probabilities (N, C): integers (n, N).

    ValueError where a probability is NaN.
    """
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
    log_density: LogDensity, integrals: ClassIntegrals, refit: str, differentiable: bool = False
) -> Predictive:
    """Make the predictive whose probabilities are integrals over f; no row is flagged."""
    no = torch.zeros(len(integrals.entropy), dtype=torch.bool)
    law = ClassLaw(log_density, integrals.log_probs, integrals)
    flags = Diagnostics(refit, no, no, no)
    return Predictive(law, log_density.like, flags, differentiable=differentiable)


def class_predictive(log_density: LogDensity, count: int, refit: str) -> Predictive:
    """Evaluate the density of each of `count` classes at every input and normalise."""
    rows = log_density.marginal.mean.shape[0]
    density = log_density.at(torch.arange(count, dtype=torch.float64).expand(rows, -1))
    no = torch.zeros(rows, dtype=torch.bool)
    flags = Diagnostics(refit, density.fallback.any(1), ~density.converged.all(1), no)
    return Predictive(ClassLaw(log_density, density.log), log_density.like, flags)
