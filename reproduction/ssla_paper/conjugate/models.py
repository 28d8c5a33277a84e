"""Three conjugate models: their data, their analytic predictive, the published formulas, and the
library's posterior.

The published formulas are maximum likelihood, log likelihood and Fisher information in the dtype of
the rows: every operation rounds as in the authors' code. Rows are (n, E) with y last, θ is (k, P),
candidates y are (k,).
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn

import ssla
from ssla import likelihoods, priors

F64 = torch.float64
LOG_2PI = math.log(2 * math.pi)


class Analytic(NamedTuple):
    """The analytic predictive: log density, centre and standard deviation."""

    log_prob: Callable[[Tensor], Tensor]
    centre: float
    scale: float


class Model(Protocol):
    counts: bool

    def draw(self, n: int, seed: int) -> Tensor:
        """Rows (n, E) of float32 numbers, in float64: the input of both procedures."""
        ...

    def analytic(self, rows: Tensor) -> Analytic: ...

    def likeliest(self, rows: Tensor, y: Tensor | None) -> Tensor:
        """Maximum likelihood (k, P) with each y added to the rows; (1, P) with none."""
        ...

    def log_rows(self, rows: Tensor, theta: Tensor) -> Tensor:
        """log p of every row (k, n)."""
        ...

    def log_new(self, y: Tensor, theta: Tensor) -> Tensor:
        """log p(y | θ) of the new observation (k,)."""
        ...

    def logdet(self, rows: Tensor, y: Tensor | None, theta: Tensor) -> Tensor:
        """log|J| (k,) or (1,), without the prior."""
        ...

    def log_prior(self, theta: Tensor) -> Tensor: ...

    def posteriors(self, rows: Tensor) -> dict[str, ssla.Posterior]:
        """The library's posteriors, by parametrisation."""
        ...

    @property
    def point(self) -> Tensor:
        """The new input (1, E − 1 or 1)."""
        ...


def normal(y: Tensor, mean: Tensor | float, variance: float) -> Tensor:
    return -0.5 * ((y - mean) ** 2 / variance + (LOG_2PI + math.log(variance)))


def _generator(n: int, seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(10_007 * seed + n)


@dataclass(frozen=True)
class Normal:
    """X ~ N(4, 2) with known variance, μ ~ N(mean, variance)."""

    mean: float = 4.0
    variance: float = 1.0
    counts = False
    truth, noise = 4.0, 2.0

    def draw(self, n: int, seed: int) -> Tensor:
        return (
            self.truth + math.sqrt(self.noise) * torch.randn(n, 1, generator=_generator(n, seed))
        ).double()

    def analytic(self, rows: Tensor) -> Analytic:
        spread = 1 / (len(rows) / self.noise + 1 / self.variance)
        centre = spread * (self.mean / self.variance + float(rows.sum()) / self.noise)
        return Analytic(
            lambda y: normal(y, centre, self.noise + spread), centre, math.sqrt(self.noise + spread)
        )

    def likeliest(self, rows: Tensor, y: Tensor | None) -> Tensor:
        found = rows.mean().reshape(1) if y is None else (rows.sum() + y) / (len(rows) + 1)
        return found.unsqueeze(1)

    def log_rows(self, rows: Tensor, theta: Tensor) -> Tensor:
        return normal(rows[:, 0], theta, self.noise)

    def log_new(self, y: Tensor, theta: Tensor) -> Tensor:
        return normal(y, theta[:, 0], self.noise)

    def logdet(self, rows: Tensor, y: Tensor | None, theta: Tensor) -> Tensor:
        n = torch.full((1,), float(len(rows) + (y is not None)), dtype=rows.dtype)
        return torch.log(n / self.noise)

    def log_prior(self, theta: Tensor) -> Tensor:
        return normal(theta[:, 0], self.mean, self.variance)

    def posteriors(self, rows: Tensor) -> dict[str, ssla.Posterior]:
        model = nn.Linear(1, 1, bias=False, dtype=F64)
        nn.init.constant_(model.weight, self.analytic(rows).centre)
        likelihood = likelihoods.Gaussian(noise=math.sqrt(self.noise))
        return {
            "": _fit(
                model,
                torch.ones_like(rows),
                rows[:, 0],
                likelihood,
                priors.Gaussian(1 / self.variance, self.mean),
            )
        }

    @property
    def point(self) -> Tensor:
        return torch.ones(1, 1, dtype=F64)


@dataclass(frozen=True)
class Poisson:
    """X ~ Poisson(3), λ ~ Gamma(shape, rate). The library uses log λ, and λ as in the paper."""

    shape: float = 6.0
    rate: float = 2.0
    counts = True
    truth = 3.0

    def draw(self, n: int, seed: int) -> Tensor:
        return torch.poisson(torch.full((n, 1), self.truth), generator=_generator(n, seed)).double()

    def analytic(self, rows: Tensor) -> Analytic:
        shape, rate = self.shape + float(rows.sum()), self.rate + len(rows)

        def log_prob(y: Tensor) -> Tensor:
            """Negative binomial; Γ(shape + y)/Γ(shape) as a product, since lgamma near 10⁷ has
            only eight digits.
            """
            below = torch.arange(int(y.max()), dtype=F64)
            rising = torch.cat(
                [torch.zeros(1, dtype=F64), torch.log((shape + below) / (rate + 1)).cumsum(0)]
            )
            return rising[y.long()] - torch.lgamma(y + 1) - shape * math.log1p(1 / rate)

        mean = shape / rate
        return Analytic(log_prob, mean, math.sqrt(mean * (1 + 1 / rate)))

    def likeliest(self, rows: Tensor, y: Tensor | None) -> Tensor:
        found = rows.mean().reshape(1) if y is None else (rows.sum() + y) / (len(rows) + 1)
        return found.unsqueeze(1)

    def log_rows(self, rows: Tensor, theta: Tensor) -> Tensor:
        return rows[:, 0] * theta.log() - theta - torch.lgamma(rows[:, 0] + 1)

    def log_new(self, y: Tensor, theta: Tensor) -> Tensor:
        return y * theta[:, 0].log() - theta[:, 0] - torch.lgamma(y + 1)

    def logdet(self, rows: Tensor, y: Tensor | None, theta: Tensor) -> Tensor:
        return torch.log((rows.sum() + (0 if y is None else y)) / theta[:, 0] ** 2)

    def log_prior(self, theta: Tensor) -> Tensor:
        return (self.shape - 1) * theta[:, 0].log() - self.rate * theta[:, 0]

    def posteriors(self, rows: Tensor) -> dict[str, ssla.Posterior]:
        shape, rate = self.shape + float(rows.sum()), self.rate + len(rows)
        found = {}
        for name, link, mode in (
            ("", "log", math.log(shape / rate)),
            (" in λ", "identity", (shape - 1) / rate),
        ):
            model = nn.Linear(1, 1, bias=False, dtype=F64)
            nn.init.constant_(model.weight, mode)
            prior = priors.Gamma(self.shape, self.rate, link=link)
            found[name] = _fit(
                model, torch.ones_like(rows), rows[:, 0], likelihoods.Poisson(link=link), prior
            )
        return found

    @property
    def point(self) -> Tensor:
        return torch.ones(1, 1, dtype=F64)


@dataclass(frozen=True)
class Linear:
    """Y ~ N(1 + 1.5 x, 1) with known variance, both weights ~ N(mean, variance), a prediction
    at x = 1.5.
    """

    mean: float = 0.0
    variance: float = 1.0
    counts = False
    intercept, slope, noise, at = 1.0, 1.5, 1.0, 1.5

    def draw(self, n: int, seed: int) -> Tensor:
        x, error = torch.randn(2, n, generator=_generator(n, seed))
        return torch.stack(
            [x, self.intercept + self.slope * x + math.sqrt(self.noise) * error], 1
        ).double()

    def _design(self, rows: Tensor) -> Tensor:
        return torch.stack([torch.ones(len(rows), dtype=rows.dtype), rows[:, 0]], 1)

    def _new(self, like: Tensor) -> Tensor:
        return torch.tensor([1.0, self.at], dtype=like.dtype)

    def _mode(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Posterior mean and precision of (intercept, slope)."""
        X, eye = self._design(rows), torch.eye(2, dtype=rows.dtype)
        precision = X.mT @ X / self.noise + eye / self.variance
        return torch.linalg.solve(
            precision, X.mT @ rows[:, 1] / self.noise + self.mean / self.variance
        ), precision

    def analytic(self, rows: Tensor) -> Analytic:
        weights, precision = self._mode(rows)
        new = self._new(rows)
        centre, variance = (
            float(new @ weights),
            self.noise + float(new @ torch.linalg.solve(precision, new)),
        )
        return Analytic(lambda y: normal(y, centre, variance), centre, math.sqrt(variance))

    def likeliest(self, rows: Tensor, y: Tensor | None) -> Tensor:
        X = self._design(rows)
        square, product = X.mT @ X, (X.mT @ rows[:, 1]).unsqueeze(0)
        if y is not None:
            new = self._new(rows)
            square, product = square + torch.outer(new, new), product + y.unsqueeze(1) * new
        found: Tensor = torch.linalg.solve(square, product.mT).mT
        return found

    def log_rows(self, rows: Tensor, theta: Tensor) -> Tensor:
        return normal(rows[:, 1], theta[:, :1] + theta[:, 1:] * rows[:, 0], self.noise)

    def log_new(self, y: Tensor, theta: Tensor) -> Tensor:
        return normal(y, theta @ self._new(theta), self.noise)

    def logdet(self, rows: Tensor, y: Tensor | None, theta: Tensor) -> Tensor:
        X, new = self._design(rows), self._new(rows)
        square = X.mT @ X if y is None else X.mT @ X + torch.outer(new, new)
        found: Tensor = torch.logdet(square / self.noise)
        return found.reshape(1)

    def log_prior(self, theta: Tensor) -> Tensor:
        return normal(theta, self.mean, self.variance).sum(1)

    def posteriors(self, rows: Tensor) -> dict[str, ssla.Posterior]:
        model = nn.Linear(1, 1, dtype=F64)
        intercept, slope = self._mode(rows)[0]
        nn.init.constant_(model.bias, float(intercept))
        nn.init.constant_(model.weight, float(slope))
        prior = priors.Gaussian(1 / self.variance, self.mean)
        return {
            "": _fit(
                model,
                rows[:, :1],
                rows[:, 1],
                likelihoods.Gaussian(noise=math.sqrt(self.noise)),
                prior,
            )
        }

    @property
    def point(self) -> Tensor:
        return torch.full((1, 1), self.at, dtype=F64)


def _fit(
    model: nn.Module, x: Tensor, y: Tensor, likelihood: likelihoods.Likelihood, prior: priors.Prior
) -> ssla.Posterior:
    with warnings.catch_warnings():
        warnings.filterwarnings(
            "ignore", message="The residuals are"
        )  # priors in conflict with the data are part of the study
        return ssla.fit(
            model.eval(),
            (x, y),
            likelihood=likelihood,
            prior=prior,
            mode="polish",
            gaussian="laplace",
        )
