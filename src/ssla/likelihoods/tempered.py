"""A likelihood raised to a power."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ssla._checks import in_plain_torch, positive
from ssla.likelihoods.likelihood import Derivatives, Likelihood, dispersed, dispersion_in_words
from ssla.likelihoods.support import Support
from ssla.maths.roots import Root


@dataclass(frozen=True)
class Tempered(Likelihood):
    """p(y|f)^β: β < 1 gives the data less weight (a warm posterior), β > 1 more (a cold one).

    Tempering scales the likelihood of the training data: log_prob, score, precision and fisher are
    β times the base's. A new observation still follows the base, so predictions use `base` (see
    `predictive`).

    What is true of every power of a density (its domain, its concavity, the form of Λ) is asked of
    the base. What is true of a density of y alone (`quadratic`, `closed_form`) is not so of its
    power, and has the default of a likelihood without it.
    """

    base: Likelihood
    beta: float

    @in_plain_torch
    def __post_init__(self) -> None:
        positive("Tempered beta", torch.tensor(float(self.beta)))

    @property
    def predictive(self) -> Likelihood:
        return self.base.predictive

    @property
    def power(self) -> float:
        return self.beta * self.base.power

    @property
    def linear_domain(self) -> bool:
        return self.base.linear_domain

    @property
    def links(self) -> tuple[str, ...]:
        return self.base.links

    @property
    def estimated(self) -> bool:
        return self.base.estimated

    @property
    def concave(self) -> bool:
        return self.base.concave

    @property
    def averages_differ(self) -> bool:
        return self.base.averages_differ

    @property
    def fisher_in_closed_form(self) -> bool:
        return self.base.fisher_in_closed_form

    @property
    def mean_has_gradient(self) -> bool:
        return self.base.mean_has_gradient

    @property
    def logit_temperature(self) -> float | None:
        return self.base.logit_temperature

    @property
    def softmax(self) -> bool:
        return self.base.softmax

    @property
    def overdispersion(self) -> float | None:
        return self.base.overdispersion

    @property
    def shift_invariant(self) -> bool:
        return self.base.shift_invariant

    @property
    def one_probability(self) -> bool:
        return self.base.one_probability

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

    def score_change(self, y: Tensor, f: Tensor, before: Tensor) -> Tensor:
        return self.beta * self.base.score_change(y, f, before)

    def precision_times(self, y: Tensor, f: Tensor, v: Tensor, fisher: bool = False) -> Tensor:
        return self.beta * self.base.precision_times(y, f, v, fisher)

    def precision_diagonal(self, y: Tensor, f: Tensor, fisher: bool = False) -> Tensor:
        return self.beta * self.base.precision_diagonal(y, f, fisher)

    def precision_trace(self, y: Tensor, f: Tensor, K: Tensor, fisher: bool = False) -> Tensor:
        return self.beta * self.base.precision_trace(y, f, K, fisher)

    def precision_change_along(
        self,
        y: Tensor,
        f: Tensor,
        before: Tensor,
        directions: Tensor,
        weights: Tensor | None = None,
        fisher: bool = False,
    ) -> Tensor:
        inside = self.base.precision_change_along(y, f, before, directions, weights, fisher)
        return self.beta * inside

    def averages_in_closed_form(
        self, y: Tensor, f: Tensor, root: Root, fisher: bool
    ) -> Derivatives | None:
        found = self.base.averages_in_closed_form(y, f, root, fisher)
        return None if found is None else Derivatives(*(self.beta * part for part in found))

    def mean(self, f: Tensor) -> Tensor:
        return self.base.mean(f)

    def variance(self, f: Tensor) -> Tensor:
        return self.base.variance(f)

    def sample(self, f: Tensor, n: int, generator: torch.Generator | None = None) -> Tensor:
        return self.base.sample(f, n, generator)
