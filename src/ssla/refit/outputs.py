"""What a refit is (stage one runs once for each x, stage two for any y), and the refits that
need f̂ and K only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

from ssla._checks import one_of
from ssla.data import Inputs, row_count, take_rows
from ssla.likelihoods import Likelihood
from ssla.maths import linalg
from ssla.priors import ADDITIVE, EXACT, PAPER
from ssla.refit.increments import (
    CURVATURES,
    OBSERVED,
    Evaluated,
    Increments,
    Rule,
    at_mode,
    one_step,
    plug_in,
    without_refit,
)
from ssla.refit.prior_response import data_covariance, prior_response
from ssla.values import Marginal

if TYPE_CHECKING:
    from ssla.posterior import Posterior

TASKS_AT_ONCE = 1 << 18
ENTRIES_AT_ONCE = 1 << 24  # numbers in the roots of K of these tasks: 128 MiB, a guess
MATRICES = 12  # C×C matrices that a task of a refit takes


class Density(NamedTuple):
    """Un-normalised log densities and flags, all of y's shape."""

    log: Tensor
    fallback: Tensor
    converged: Tensor
    error: Tensor | None = None  # standard error of log, where determinants are estimated


class LogDensity(Protocol):
    """Log densities at fixed inputs, as a function of y.

    A scalar y is (N,) or (N, k); a vector y (N, D) or (N, k, D).
    """

    @property
    def likelihood(self) -> Likelihood:
        """The law of the new observation."""
        ...

    @property
    def marginal(self) -> Marginal:
        """f̂ and K in float64."""
        ...

    @property
    def moves(self) -> bool:
        """Whether the outputs move with y, so that the predictive includes the uncertainty of f."""
        ...

    @property
    def like(self) -> Tensor:
        """Answers are given in this tensor's dtype and on its device."""
        ...

    def __call__(self, y: Tensor) -> Increments: ...

    def at(self, y: Tensor, rows: Tensor | None = None) -> Density:
        """For some rows only: y (m, …) belongs to rows (m,)."""
        ...


class Refit(Protocol):
    """One kind of refit (a rung)."""

    @property
    def name(self) -> str: ...

    def __call__(self, posterior: Posterior, x: Inputs) -> LogDensity: ...


@runtime_checkable
class OutputRung(Refit, Protocol):
    """A rung that needs f̂ and K only."""

    @property
    def rule(self) -> Rule: ...

    @property
    def moves(self) -> bool: ...

    @property
    def certain(self) -> bool:
        """Whether f counts as known, so that K is not used."""
        ...


@dataclass(frozen=True, eq=False)
class OutputLogDensity:
    """A log density that needs f̂ and K only, by one of the rules of `ssla.refit.increments`.

    `prior` returns how log π responds to a refit (see `prior_response`). It is called for
    increments, and always under the additive convention, where the prior is not in K. `determinant`
    returns the covariance of the determinant where that is not K.
    """

    likelihood: Likelihood
    marginal: Marginal
    prior: Callable[[], Marginal]
    rule: Rule
    moves: bool
    like: Tensor
    convention: str = EXACT
    determinant: Callable[[], Tensor] | None = None
    certain: bool = False  # whether f counts as known, so that K is not used

    @cached_property
    def _root(self) -> Tensor:
        """R (N, C, C) with R Rᵀ = K; of no columns where K is not used."""
        K = self.marginal.covariance
        return K[..., :0] if self.certain else linalg.root(K)

    @cached_property
    def _determinant_root(self) -> Tensor | None:
        if self.determinant is None or self.certain:
            return None
        return linalg.root(self.determinant())

    @cached_property
    def prior_response(self) -> Marginal:
        return self.prior()

    def at(self, y: Tensor, rows: Tensor | None = None) -> Density:
        parts = self._run(y, rows)
        shape = self._shape(y)
        log = _cat([p.total for p in parts]).reshape(shape)
        if self.convention == ADDITIVE:
            log = log + self._prior_increment(
                _cat([p.pull for p in parts]).reshape(*shape, self._outputs), rows
            )
        return Density(
            log,
            _cat([p.fallback for p in parts]).reshape(shape),
            _cat([p.converged for p in parts]).reshape(shape),
        )

    def __call__(self, y: Tensor) -> Increments:
        parts = self._run(y, None)
        shape = self._shape(y)
        fit, shift, curvature, pull = (_cat([part[i] for part in parts]) for i in range(4))
        prior = self._prior_increment(pull.reshape(*shape, self._outputs), None)
        likelihood = (fit + shift).reshape(shape)
        # −½‖v‖² is the loss of data and prior together, but under the additive convention the loss
        # of the data alone
        likelihood = likelihood if self.convention == ADDITIVE else likelihood - prior
        return Increments(likelihood, prior, curvature.reshape(shape), self.convention)

    def _prior_increment(self, pull: Tensor, rows: Tensor | None) -> Tensor:
        """log π(θ̃) − log π(θ̂), to second order: bᵀu − ½ uᵀMu.  u (N, …, C) -> (N, …)."""
        if not self.moves:
            return torch.zeros(pull.shape[:-1], dtype=pull.dtype)
        response = (
            self.prior_response
            if rows is None
            else Marginal(*(part[rows] for part in self.prior_response))
        )
        b, M = (t.reshape(t.shape[0], *[1] * (pull.dim() - 2), *t.shape[1:]) for t in response)
        return (b * pull).sum(-1) - 0.5 * (pull.unsqueeze(-2) @ M @ pull.unsqueeze(-1)).squeeze(
            (-2, -1)
        )

    def take(self, rows: Tensor) -> OutputLogDensity:
        """Of some rows only."""
        f, K = self.marginal
        whole = self.determinant
        return replace(
            self,
            marginal=Marginal(f[rows], K[rows]),
            prior=lambda: Marginal(*(part[rows] for part in self.prior_response)),
            determinant=None if whole is None else lambda: whole()[rows],
        )

    def step(self, y: Tensor) -> Tensor:
        """√(uᵀKu): how far (x, y) moves the parameters, in posterior standard deviations.

        Of y's shape.
        """
        parts = self._run(y, None)
        return (-2 * _cat([p.shift for p in parts])).clamp_min(0).sqrt().reshape(self._shape(y))

    def _shape(self, y: Tensor) -> torch.Size:
        return y.shape[:-1] if self._vector else y.shape

    @property
    def _outputs(self) -> int:
        return self.marginal.mean.shape[1]

    @property
    def _vector(self) -> bool:
        return self.likelihood.support_for(self._outputs).kind == "vector"

    def _run(self, y: Tensor, rows: Tensor | None) -> list[Evaluated]:
        """All tasks, component-major, in pieces that bound the memory."""
        f, R, D = (
            part if part is None or rows is None else part[rows]
            for part in (self.marginal.mean, self._root, self._determinant_root)
        )
        assert f is not None
        assert R is not None
        shape = self._shape(y)
        per_row = shape[1] if len(shape) > 1 else 1
        most = min(TASKS_AT_ONCE, ENTRIES_AT_ONCE // max(R[0].numel(), 1)) if len(R) else 1
        size = max(most // per_row, 1)
        return [
            self.rule(
                self.likelihood,
                y[start : start + size].reshape(-1, *y.shape[len(shape) :]),
                _spread(f[start : start + size], per_row),
                _spread(R[start : start + size], per_row),
                None if D is None else _spread(D[start : start + size], per_row),
            )
            for start in range(0, max(shape[0], 1), size)
        ]


@dataclass(frozen=True, eq=False)
class ByChunks:
    """The log density of a rung at x, which is read when y is given, a chunk of rows at a time:
    K of all rows is not held.
    """

    rung: OutputRung
    posterior: Posterior
    x: Inputs

    @property
    def likelihood(self) -> Likelihood:
        return self.posterior.likelihood.predictive

    @property
    def marginal(self) -> Marginal:
        return self.posterior.outputs_at(self.x)

    @property
    def moves(self) -> bool:
        return self.rung.moves

    @cached_property
    def like(self) -> Tensor:
        C = self.posterior.network.outputs
        return self.posterior.like(Marginal(torch.empty(0, C), torch.empty(0, C, C)))

    def at(self, y: Tensor, rows: Tensor | None = None) -> Density:
        parts = [[part.at(own) for own in some] for part, some in self._chunks(y, rows)]
        names = ("log", "fallback", "converged")
        return Density(
            *(_grid([[getattr(own, name) for own in some] for some in parts]) for name in names)
        )

    def __call__(self, y: Tensor) -> Increments:
        parts = [[part(own) for own in some] for part, some in self._chunks(y, None)]
        names = ("likelihood", "prior", "curvature")
        likelihood, prior, curvature = (
            _grid([[getattr(own, name) for own in some] for some in parts]) for name in names
        )
        return Increments(likelihood, prior, curvature, self.posterior.convention)

    def _chunks(
        self, y: Tensor, rows: Tensor | None
    ) -> Iterator[tuple[OutputLogDensity, list[Tensor]]]:
        """Some rows at a time, and their y in portions (m,) or (m, k): a task for each y takes
        several C×C matrices.
        """
        index = torch.arange(row_count(self.x)) if rows is None else rows
        task = MATRICES * 8 * self.posterior.network.outputs**2
        tasks = max(self.posterior.memory_budget // task, 1)
        at_once = max(min(tasks // (y.shape[1] if y.dim() > 1 else 1), TASKS_AT_ONCE), 1)
        for start in range(0, max(len(index), 1), at_once):
            some = slice(start, start + at_once)
            part = on_posterior(self.rung, self.posterior, take_rows(self.x, index[some]))
            yield part, [y[some]] if y.dim() == 1 else list(y[some].split(tasks, 1))


def _grid(parts: list[list[Tensor]]) -> Tensor:
    """Chunks of rows, each in portions of columns -> one tensor."""
    return _cat([some[0] if len(some) == 1 else torch.cat(some, 1) for some in parts])


def _cat(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def on_posterior(rung: OutputRung, posterior: Posterior, x: Inputs) -> OutputLogDensity:
    """Stage one: f̂ and K at x."""
    marginal = posterior.outputs_at(x)
    return OutputLogDensity(
        likelihood=posterior.likelihood.predictive,
        marginal=marginal,
        prior=lambda: prior_response(posterior, x),
        rule=rung.rule,
        moves=rung.moves,
        like=posterior.like(marginal),
        convention=posterior.convention,
        determinant=(lambda: data_covariance(posterior, x))
        if posterior.convention == PAPER
        else None,
        certain=rung.certain,
    )


def on_marginal(
    rung: OutputRung, likelihood: Likelihood, mean: Tensor, covariance: Tensor
) -> OutputLogDensity:
    """From a distribution of f that comes from elsewhere.

    The prior increment is then part of the likelihood's.
    """
    marginal = Marginal(mean.to("cpu", torch.float64), covariance.to("cpu", torch.float64))
    nothing = Marginal(torch.zeros_like(marginal.mean), torch.zeros_like(marginal.covariance))
    like = mean.new_empty(0)
    law = likelihood.predictive
    return OutputLogDensity(
        law, marginal, lambda: nothing, rung.rule, rung.moves, like, certain=rung.certain
    )


def _spread(values: Tensor, times: int) -> Tensor:
    """(N, …) -> (N·times, …), each row repeated, stored component-major."""
    major = values.movedim(0, -1).contiguous()
    return major.repeat_interleave(times, -1).movedim(-1, 0) if times > 1 else major.movedim(-1, 0)


@dataclass(frozen=True)
class PlugIn:
    """log p(y|f̂): the network's own answer, as if its weights were known.

    The baseline; its mass is 1.
    """

    name = "plug_in"
    moves = False
    certain = True

    @property
    def rule(self) -> Rule:
        return plug_in

    def __call__(self, posterior: Posterior, x: Inputs) -> OutputLogDensity:
        return on_posterior(self, posterior, x)


@dataclass(frozen=True)
class NoRefit:
    """θ̃ = θ̂: log p(y|f̂) − ½ log|I + Λ K|.

    curvature: "observed" (the paper's Algorithm 2), "fisher", or "empirical" (its Corollary 3).

    With Gaussian noise the curvature does not depend on y, so the normalised predictive is the
    plug-in; with "empirical" it is even tighter. It is here because it is published; it is not
    recommended.
    """

    curvature: str = OBSERVED

    name = "none"
    moves = False
    certain = False

    def __post_init__(self) -> None:
        one_of("curvature", self.curvature, CURVATURES)

    @property
    def rule(self) -> Rule:
        return partial(without_refit, curvature=self.curvature)

    def __call__(self, posterior: Posterior, x: Inputs) -> OutputLogDensity:
        return on_posterior(self, posterior, x)


@dataclass(frozen=True)
class OutputRefit:
    """f̃ = mode of log p(y|f) − ½(f−f̂)ᵀK⁻¹(f−f̂): the refit of the linearised network, exactly, in
    C dimensions.

    steps = None goes to the mode; steps = 1 takes one Newton step and its quadratic value. Both are
    exact for Gaussian noise and a network linear in its free parameters.
    """

    steps: int | None = None

    moves = True
    certain = False

    def __post_init__(self) -> None:
        if self.steps not in (None, 1):
            raise ValueError(
                f"steps must be None (to the mode) or 1 (one Newton step), but is {self.steps!r}."
            )

    @property
    def name(self) -> str:
        return "output" if self.steps is None else "newton"

    @property
    def rule(self) -> Rule:
        return at_mode if self.steps is None else one_step

    def __call__(self, posterior: Posterior, x: Inputs) -> OutputLogDensity:
        return on_posterior(self, posterior, x)
