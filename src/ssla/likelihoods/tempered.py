"""A likelihood raised to a power."""

from __future__ import annotations

from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from ssla._checks import check_positive, in_plain_torch
from ssla.likelihoods.likelihood import (
    Derivatives,
    Likelihood,
    dispersion_in_words,
    multiply_dispersion,
)
from ssla.likelihoods.support import Support
from ssla.maths.roots import Root


def _make_property_of_base(name: str) -> Any:
    """Return a property of `Tempered` that has the value of its base's property of that name."""
    return property(attrgetter(f"base.{name}"))


@dataclass(frozen=True)
class Tempered(Likelihood):
    """The power p(y|f)^β of another likelihood, its base.

    β < 1 gives the data less weight (a warm posterior), β > 1 more (a cold one). Tempering scales
    the likelihood of the training data: log_prob, score, precision and fisher are β times the
    base's. A new observation still follows the base, so predictions use `base` (see `predictive`).

    Members that hold for every power of a density (its domain, its concavity, the form of Λ) are
    those of the base. Members that hold for a density of y alone (`quadratic`, `has_log_average`)
    do not hold for its power and keep their default.
    """

    base: Likelihood
    beta: float

    @in_plain_torch
    def __post_init__(self) -> None:
        """Check that beta is positive; raise ValueError if not."""
        check_positive("Tempered beta", torch.tensor(float(self.beta)))

    @property
    def predictive(self) -> Likelihood:
        """Return the likelihood of a new observation, which is not tempered."""
        return self.base.predictive

    @property
    def power(self) -> float:
        """Return β, times the base's own power if the base is tempered too."""
        return self.beta * self.base.power

    # True of every power of a density.
    linear_domain = _make_property_of_base("linear_domain")
    links = _make_property_of_base("links")
    needs_noise_estimate = _make_property_of_base("needs_noise_estimate")
    concave = _make_property_of_base("concave")
    averages_differ = _make_property_of_base("averages_differ")
    fisher_in_closed_form = _make_property_of_base("fisher_in_closed_form")
    mean_has_gradient = _make_property_of_base("mean_has_gradient")
    logit_temperature = _make_property_of_base("logit_temperature")
    softmax = _make_property_of_base("softmax")
    shift_invariant = _make_property_of_base("shift_invariant")
    one_probability = _make_property_of_base("one_probability")
    overdispersion = _make_property_of_base("overdispersion")

    def multiply_dispersion(self, factor: float) -> Likelihood:
        """Return the same power of the base with `factor` times its spread.

        The spread of a base with a fixed one is unchanged.
        """
        return replace(self, base=multiply_dispersion(self.base, factor))

    def dispersion_in_words(self, factor: float) -> str:
        """Return the base's clause for the report, for the factor that its spread needs."""
        return dispersion_in_words(self.base, factor)

    def support_for(self, outputs: int) -> Support:
        """Return the support of the base for C outputs; raises ValueError as the base does."""
        return self.base.support_for(outputs)

    def check_outputs(self, f: Tensor) -> None:
        """Raise ValueError where f is outside the domain of the base."""
        self.base.check_outputs(f)

    def log_prob(self, y: Tensor, f: Tensor) -> Tensor:
        """Return β log p of the base (...)."""
        return self.beta * self.base.log_prob(y, f)

    def log_prob_difference(self, y: Tensor, f_new: Tensor, f_old: Tensor) -> Tensor:
        """Return β times the base's log_prob_difference (...)."""
        return self.beta * self.base.log_prob_difference(y, f_new, f_old)

    def score(self, y: Tensor, f: Tensor) -> Tensor:
        """Return βg of the base (..., C)."""
        return self.beta * self.base.score(y, f)

    def precision(self, y: Tensor, f: Tensor) -> Tensor:
        """Return βΛ of the base (..., C, C)."""
        return self.beta * self.base.precision(y, f)

    def fisher(self, f: Tensor) -> Tensor:
        """Return β times the base's Fisher information (..., C, C)."""
        return self.beta * self.base.fisher(f)

    def derivatives(self, y: Tensor, f: Tensor) -> Derivatives:
        """Return β log p (...), βg (..., C) and βΛ (..., C, C) of the base, computed together."""
        return Derivatives(*(self.beta * value for value in self.base.derivatives(y, f)))

    def score_change(self, y: Tensor, f: Tensor, before: Tensor) -> Tensor:
        """Return β times the base's change of the score (..., C)."""
        return self.beta * self.base.score_change(y, f, before)

    def precision_times(self, y: Tensor, f: Tensor, v: Tensor, fisher: bool = False) -> Tensor:
        """Return βΛv of the base (..., C)."""
        return self.beta * self.base.precision_times(y, f, v, fisher)

    def precision_diagonal(self, y: Tensor, f: Tensor, fisher: bool = False) -> Tensor:
        """Return the diagonal of βΛ of the base (..., C)."""
        return self.beta * self.base.precision_diagonal(y, f, fisher)

    def precision_trace(self, y: Tensor, f: Tensor, K: Tensor, fisher: bool = False) -> Tensor:
        """Return tr(KβΛ) of the base (m, b)."""
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
        """Return β times the base's precision_change_along (m, r, r), with the same arguments."""
        change = self.base.precision_change_along(y, f, before, directions, weights, fisher)
        return self.beta * change

    def averages_in_closed_form(
        self, y: Tensor, f: Tensor, root: Root, fisher: bool
    ) -> Derivatives | None:
        """Return β times the base's averages, or None where the base has no formula."""
        averages = self.base.averages_in_closed_form(y, f, root, fisher)
        if averages is None:
            return None
        return Derivatives(*(self.beta * average for average in averages))

    def mean(self, f: Tensor) -> Tensor:
        """Return the mean of a new observation, with the shape that the base gives it."""
        return self.base.mean(f)

    def variance(self, f: Tensor) -> Tensor:
        """Return the variance of a new observation, with the shape of `mean`."""
        return self.base.variance(f)

    def sample(self, f: Tensor, n: int, generator: torch.Generator | None = None) -> Tensor:
        """Return n draws of a new observation under the base (n, ...)."""
        return self.base.sample(f, n, generator)
