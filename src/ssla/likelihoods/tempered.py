"""A likelihood raised to a power."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ssla._checks import in_plain_torch, positive
from ssla.likelihoods.likelihood import Derivatives, Likelihood, dispersed, dispersion_in_words
from ssla.likelihoods.support import Support


@dataclass(frozen=True)
class Tempered:
    """p(y|f)^β: β < 1 gives the data less weight (a warm posterior), β > 1 more (a cold one).

    Tempering scales the likelihood of the training data: log_prob, score, precision and fisher are
    β times the base's. A new observation still follows the base, so predictions use `base` (see
    `predictive`).
    """

    base: Likelihood
    beta: float

    @in_plain_torch
    def __post_init__(self) -> None:
        positive("Tempered beta", torch.tensor(float(self.beta)))

    @property
    def support(self) -> Support:
        return self.base.support

    @property
    def predictive(self) -> Likelihood:
        return self.base.predictive

    @property
    def linear_domain(self) -> bool:
        return self.base.linear_domain

    def dispersed(self, factor: float) -> Likelihood:
        """With the base that the base's `dispersed` gives; as it is where that has none."""
        return replace(self, base=dispersed(self.base, factor))

    def dispersion_in_words(self, factor: float) -> str:
        return dispersion_in_words(self.base, factor)

    def support_for(self, outputs: int) -> Support:
        return self.base.support_for(outputs)

    def check_outputs(self, f: Tensor) -> None:
        self.base.check_outputs(f)

    def log_prob(self, y: Tensor, f: Tensor) -> Tensor:
        return self.beta * self.base.log_prob(y, f)

    def log_prob_difference(self, y: Tensor, f_new: Tensor, f_old: Tensor) -> Tensor:
        return self.beta * self.base.log_prob_difference(y, f_new, f_old)

    def score(self, y: Tensor, f: Tensor) -> Tensor:
        return self.beta * self.base.score(y, f)

    def precision(self, y: Tensor, f: Tensor) -> Tensor:
        return self.beta * self.base.precision(y, f)

    def fisher(self, f: Tensor) -> Tensor:
        return self.beta * self.base.fisher(f)

    def derivatives(self, y: Tensor, f: Tensor) -> Derivatives:
        return Derivatives(*(self.beta * part for part in self.base.derivatives(y, f)))

    def mean(self, f: Tensor) -> Tensor:
        return self.base.mean(f)

    def variance(self, f: Tensor) -> Tensor:
        return self.base.variance(f)

    def sample(self, f: Tensor, n: int, generator: torch.Generator | None = None) -> Tensor:
        return self.base.sample(f, n, generator)
