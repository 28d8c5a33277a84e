"""Classes: their integrals, or one evaluation for each, normalised."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from functools import cached_property
from typing import final

import torch
from torch import Tensor

from ssla.likelihoods.support import Classes
from ssla.predictive.class_integrals import ClassIntegrals, compute_entropy
from ssla.predictive.law import Law, select_highest
from ssla.predictive.predictive import Diagnostics, Predictive
from ssla.predictive.spread import average_entropies, compute_variance_parts
from ssla.refit import LogDensity
from ssla.refit.increments import Increments

SMALLEST_DIVISOR = 1e-300  # takes the place of zero
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
        """Return the most probable class (N,); −1 where the probabilities of a row are NaN."""
        log_probs = self.log_probs
        return torch.where(log_probs.isnan().any(1), -1, log_probs.argmax(1))

    @cached_property
    def entropy(self) -> Tensor:
        """Return −Σ p log p in nats (N,)."""
        return compute_entropy(self.log_probs)

    def check(self, y: Tensor) -> None:
        """Raise ValueError unless y (N, k) holds whole numbers from 0 to C − 1."""
        count = self.log_probs.shape[1]
        Classes(count).check(y.flatten(), count)

    def log_prob(self, y: Tensor) -> Tensor:
        """Return the log probabilities of classes y, which are whole numbers: (N, k) -> (N, k)."""
        return self.log_probs.gather(1, y.long())

    def interval(self, level: float) -> Tensor:
        """Return the smallest set of classes with probability `level`, bool (N, C)."""
        return select_smallest_set(self.probs, level)

    def hdr(self, level: float) -> Tensor:
        """Return the same set as `interval`."""
        return select_smallest_set(self.probs, level)

    def sample(self, n: int, generator: torch.Generator | None) -> Tensor:
        """Draw n classes for each input: integers (n, N)."""
        return draw_classes(self.probs, n, generator)


@final
@dataclass(frozen=True, eq=False)
class ClassLaw(ClassProbabilities):
    """The law P(Y = c) = exp(log_weights_c) / mass.

    The weights are either integrals over f, with mass one, or the un-normalised densities of a
    refit. `increments` are those of the refit in both cases; their total approximates the logarithm
    of the integral. `mean` and `variance` are of the class indicators (N, C), and for Bernoulli of
    y itself (N,).
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
        # Weights in float32 are normalised already, and so many that no second array is held.
        return (
            self.log_weights
            if self.log_weights.dtype == torch.float32
            else self._normalised_log_weights
        )

    @cached_property
    def _normalised_log_weights(self) -> Tensor:
        """Return log_weights less the log of their mass (N, C)."""
        return torch.log_softmax(self.log_weights, 1)

    @property
    def mass(self) -> Tensor:
        """Return the sum of the weights (N,)."""
        return self.log_weights.logsumexp(1).exp()

    @property
    def mean(self) -> Tensor:
        """Return the mean of the indicators (N, C), or of y (N,) for Bernoulli."""
        return self._drop_first_class(self.probs)

    def _drop_first_class(self, by_class: Tensor) -> Tensor:
        """Return by_class (N, C) unchanged; for Bernoulli only the values of class 1 (N,).

        The moments of a Bernoulli target are those of y itself, the indicator of class 1.
        """
        return by_class[:, 1] if self.log_density.likelihood.one_probability else by_class

    @property
    def variance(self) -> Tensor:
        """Return p(1 − p), of the shape of the mean."""
        return self.mean * (1 - self.mean)

    @property
    def epistemic(self) -> Tensor:
        """Return the epistemic part of the variance, of the shape of the mean.

        The result is the variance times its epistemic share under f ~ N(f̂, K), and zero without a
        refit.
        """
        if not self.log_density.outputs_move:
            return torch.zeros_like(self.variance)
        share = (
            self._estimated_epistemic_share
            if self.integrals is None
            else self._compute_epistemic_share_from(self.integrals)
        )
        return self.variance * share

    @property
    def aleatoric(self) -> Tensor:
        """Return the variance that is not epistemic, of the shape of the mean."""
        return self.variance - self.epistemic

    @cached_property
    def _estimated_epistemic_share(self) -> Tensor:
        """Return the epistemic share of the variance by a quadrature over f ~ N(f̂, K).

        The result has the shape of the mean.
        """
        doubt, noise = compute_variance_parts(
            self.log_density.likelihood, *self.log_density.marginal
        )
        return doubt / (doubt + noise).clamp_min(SMALLEST_DIVISOR)

    def _compute_epistemic_share_from(self, integrals: ClassIntegrals) -> Tensor:
        """Return the epistemic share Var_f E[y|f] / Var[y] of the variance from integrals.

        The result has the shape of the mean.
        """
        p = integrals.log_probs.exp()
        variance = (p * (1 - p)).clamp_min(torch.finfo(p.dtype).tiny)
        return self._drop_first_class((integrals.spread / variance).clamp_max(1.0))

    @cached_property
    def mutual_information(self) -> Tensor:
        """Return the part of the entropy that more data would remove, in nats (N,).

        This part is the entropy times the share of H(E p) − E H(p) in H(E p) under f ~ N(f̂, K),
        and so at most the entropy. Where the probabilities are integrals over f, it is I(y; f)
        itself. It is zero without a refit.
        """
        if not self.log_density.outputs_move:
            return torch.zeros_like(self.entropy)
        if self.integrals is None:
            classes = self.log_weights.shape[1]
            entropy_of_mean, mean_entropy = average_entropies(
                self.log_density.likelihood, *self.log_density.marginal, classes
            )
            information = entropy_of_mean - mean_entropy
        else:
            entropy_of_mean = compute_entropy(self.integrals.log_probs)
            information = self.integrals.mutual_information
        share = torch.where(
            entropy_of_mean > 0, information / entropy_of_mean, torch.zeros_like(information)
        )
        return self.entropy * share.clamp(0.0, 1.0)

    def increments(self, y: Tensor) -> Increments:
        """Return the increments of the refit at classes y (N, k), each of shape (N, k)."""
        return self.log_density(y)


def select_smallest_set(probs: Tensor, level: float) -> Tensor:
    """Return the smallest set of classes that reaches the level, for probs (N, C): bool (N, C).

    No class is selected in a row with NaN.
    """
    # Rows are sorted in blocks: the sorting of all of them would take several times the memory of
    # the probabilities.
    blocks = probs.split(max(ENTRIES_AT_ONCE // max(probs.shape[1], 1), 1))
    return torch.cat(
        [select_highest(p, p, level) & ~p.isnan().any(1, keepdim=True) for p in blocks]
    )


def draw_classes(probs: Tensor, n: int, generator: torch.Generator | None) -> Tensor:
    """Draw n classes for each row of the probabilities probs (N, C): integers (n, N).

    generator: of the random numbers; None for torch's own. Raises ValueError where a probability is
    NaN.
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


def make_integrated_predictive(
    log_density: LogDensity, integrals: ClassIntegrals, refit: str, differentiable: bool = False
) -> Predictive:
    """Make the predictive whose class probabilities are integrals over f; no row is flagged.

    refit: the name of the rung. differentiable: whether the integrals carry a graph.
    """
    unflagged = torch.zeros(len(integrals.entropy), dtype=torch.bool)
    law = ClassLaw(log_density, integrals.log_probs, integrals)
    flags = Diagnostics(refit, unflagged, unflagged, unflagged)
    return Predictive(law, log_density.like, flags, differentiable=differentiable)


def make_class_predictive(log_density: LogDensity, count: int, refit: str) -> Predictive:
    """Make the predictive of `count` classes from the log density of each class.

    The log density is evaluated once for each class at every input. refit: the name of the rung. A
    row is flagged where one of its classes is.
    """
    rows = log_density.marginal.mean.shape[0]
    density = log_density.density_at(torch.arange(count, dtype=torch.float64).expand(rows, -1))
    # There is no quadrature that could be inaccurate.
    inaccurate = torch.zeros(rows, dtype=torch.bool)
    flags = Diagnostics(refit, density.fallback.any(1), ~density.converged.all(1), inaccurate)
    return Predictive(ClassLaw(log_density, density.log), log_density.like, flags)
