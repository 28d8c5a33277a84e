"""What a refit is, and the refits that need f̂ and K only.

A refit has two stages. The first runs once for each x and returns a `LogDensity`; the second
evaluates that for any y.

rung      a kind of refit: an object of a class below, or of `ssla.refit.weights`
rule      the function of `ssla.refit.increments` by which an output rung evaluates log densities
f̂, K      mean and covariance of the outputs at x; f̃ is the outputs after the refit
task      one y at one row of x
portion   some of the candidates of some rows, which are evaluated together
y         of a number (N,), or (N, k) with k candidates for each row; of a vector with D entries
          (N, D) or (N, k, D). Answers "of y's shape" are (N,) or (N, k)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

from ssla._checks import check_name
from ssla.data import Inputs, row_count, take_rows
from ssla.likelihoods import Likelihood
from ssla.maths import linalg
from ssla.priors import ADDITIVE, EXACT, PAPER
from ssla.refit.increments import (
    CURVATURES,
    FISHER,
    OBSERVED,
    Evaluated,
    Increments,
    Rule,
    evaluate_at_mode,
    evaluate_newton_step,
    evaluate_plug_in,
    evaluate_without_refit,
)
from ssla.refit.observed_curvature import observed_covariance
from ssla.refit.prior_response import compute_data_covariance, prior_response
from ssla.values import Marginal

if TYPE_CHECKING:
    from ssla.posterior import Posterior

TASKS_AT_ONCE = 1 << 18  # a guess: the most tasks that a rule evaluates together
ENTRIES_AT_ONCE = 1 << 24  # a guess: numbers in the roots of K of these tasks, 128 MiB
MATRICES = 12  # a guess: C×C matrices in float64 that a task of a refit takes


class Density(NamedTuple):
    """Un-normalised log densities and flags, all of y's shape."""

    log: Tensor
    fallback: Tensor  # whether the Fisher information replaced an indefinite observed curvature
    converged: Tensor  # whether the mode was reached
    error: Tensor | None = None  # standard error of log, where determinants are estimated


class LogDensity(Protocol):
    """Log densities at fixed inputs x (N rows), as a function of y."""

    @property
    def likelihood(self) -> Likelihood:
        """Return the likelihood of the new observation; for `Tempered` it is the base."""
        ...

    @property
    def marginal(self) -> Marginal:
        """Return f̂ (N, C) and K (N, C, C) in float64."""
        ...

    @property
    def outputs_move(self) -> bool:
        """Return whether f̃ depends on y, so that the predictive includes the uncertainty of f."""
        ...

    @property
    def like(self) -> Tensor:
        """Return a tensor whose dtype and device are those of the answers."""
        ...

    def __call__(self, y: Tensor) -> Increments:
        """Compute the three increments, of y's shape."""
        ...

    def density_at(self, y: Tensor, rows: Tensor | None = None) -> Density:
        """Compute log densities and flags, of y's shape.

        rows (m,): the rows of x that y (m, …) belongs to; None: all rows, so that m = N.
        """
        ...


class Refit(Protocol):
    """One kind of refit, a rung: its first stage."""

    @property
    def name(self) -> str:
        """Return the name by which users choose this refit."""
        ...

    def __call__(self, posterior: Posterior, x: Inputs) -> LogDensity:
        """Compute what depends on x alone, and return the log density as a function of y."""
        ...


@runtime_checkable
class OutputRung(Refit, Protocol):
    """A rung that needs f̂ and K only, an output rung."""

    @property
    def rule(self) -> Rule:
        """Return the function that evaluates log densities from f̂ and K."""
        ...

    @property
    def outputs_move(self) -> bool:
        """Return whether f̃ depends on y."""
        ...

    @property
    def outputs_known(self) -> bool:
        """Return whether f is taken as known, so that K is not used."""
        ...


@dataclass(frozen=True, eq=False)
class OutputLogDensity:
    """A log density that needs f̂ and K only, by one of the rules of `ssla.refit.increments`.

    `prior` returns how log π responds to a refit (see `prior_response`). It is called for
    increments, and under the additive convention, where the prior is not in K, for densities too.
    `determinant` returns the covariance in the determinant where that is not K.
    """

    likelihood: Likelihood
    marginal: Marginal
    prior: Callable[[], Marginal]
    rule: Rule
    outputs_move: bool
    like: Tensor
    convention: str = EXACT
    determinant: Callable[[], Tensor] | None = None
    outputs_known: bool = False  # whether f is taken as known, so that K is not used

    @cached_property
    def _covariance_root(self) -> Tensor:
        """Return R (N, C, C) with R Rᵀ = K; without columns where K is not used."""
        K = self.marginal.covariance
        return K[..., :0] if self.outputs_known else linalg.covariance_root(K)

    @cached_property
    def _determinant_root(self) -> Tensor | None:
        """Return a root (N, C, C) of the covariance in the determinant; None where that is K."""
        if self.determinant is None or self.outputs_known:
            return None
        return linalg.covariance_root(self.determinant())

    @cached_property
    def prior_response(self) -> Marginal:
        """Return how log π responds to a refit, b (N, C) and M (N, C, C): see the function.

        That is `ssla.refit.prior_response.prior_response`. It is computed once.
        """
        return self.prior()

    def density_at(self, y: Tensor, rows: Tensor | None = None) -> Density:
        """Compute log densities and flags, of y's shape.

        rows (m,): the rows of x that y (m, …) belongs to; None: all rows, so that m = N.
        """
        evaluated = self._evaluate_tasks(y, rows)
        shape = self._find_answer_shape(y)
        log = evaluated.total.reshape(shape)
        if self.convention == ADDITIVE:
            pull = evaluated.pull.reshape(*shape, self._outputs)
            log = log + self._compute_prior_increment(pull, rows)
        return Density(log, evaluated.fallback.reshape(shape), evaluated.converged.reshape(shape))

    def __call__(self, y: Tensor) -> Increments:
        """Compute the three increments, of y's shape."""
        evaluated = self._evaluate_tasks(y, None)
        shape = self._find_answer_shape(y)
        prior = self._compute_prior_increment(evaluated.pull.reshape(*shape, self._outputs), None)
        likelihood = (evaluated.fit + evaluated.shift).reshape(shape)
        # −½‖v‖² is the loss of data and prior together. Under the additive convention the prior is
        # not in K, so it is the loss of the data alone.
        if self.convention != ADDITIVE:
            likelihood = likelihood - prior
        curvature = evaluated.curvature.reshape(shape)
        return Increments(likelihood, prior, curvature, self.convention)

    def _compute_prior_increment(self, pull: Tensor, rows: Tensor | None) -> Tensor:
        """Compute log π(θ̃) − log π(θ̂) to second order, bᵀu − ½ uᵀMu.

        pull: u, (m, C) or (m, k, C); the result is (m,) or (m, k), and zero if f̃ does not depend
        on y. rows (m,): the rows of x that the pull belongs to; None: all rows.
        """
        if not self.outputs_move:
            return torch.zeros(pull.shape[:-1], dtype=pull.dtype)
        b, M = self.prior_response
        if rows is not None:
            b, M = b[rows], M[rows]
        # b and M of a row belong to all of its y: they get a dimension of one for k candidates.
        ones = [1] * (pull.dim() - 2)
        b = b.reshape(len(b), *ones, *b.shape[1:])
        M = M.reshape(len(M), *ones, *M.shape[1:])
        square = (pull.unsqueeze(-2) @ M @ pull.unsqueeze(-1)).squeeze((-2, -1))
        return (b * pull).sum(-1) - 0.5 * square

    def select_rows(self, rows: Tensor) -> OutputLogDensity:
        """Return the log density at some rows of x only, by number (m,).

        The prior's response is still computed for all rows.
        """
        f, K = self.marginal
        determinant = self.determinant
        return replace(
            self,
            marginal=Marginal(f[rows], K[rows]),
            prior=lambda: Marginal(*(values[rows] for values in self.prior_response)),
            determinant=None if determinant is None else lambda: determinant()[rows],
        )

    def step_length(self, y: Tensor) -> Tensor:
        """Compute √(uᵀKu), of y's shape: how far a refit with (x, y) moves the parameters.

        The unit is posterior standard deviations.
        """
        shift = self._evaluate_tasks(y, None).shift  # −½ uᵀKu
        return (-2 * shift).clamp_min(0).sqrt().reshape(self._find_answer_shape(y))

    def _find_answer_shape(self, y: Tensor) -> torch.Size:
        """Return the shape of the answers for y: that of y, without the dimension D of a vector."""
        return y.shape[:-1] if self._has_vector_target else y.shape

    @property
    def _outputs(self) -> int:
        """Return the number of outputs C."""
        return self.marginal.mean.shape[1]

    @property
    def _has_vector_target(self) -> bool:
        """Return whether a target is a vector."""
        return self.likelihood.support_for(self._outputs).kind == "vector"

    def _evaluate_tasks(self, y: Tensor, rows: Tensor | None) -> Evaluated:
        """Evaluate all tasks in the order of y, flattened: (M,) for M tasks.

        rows (m,): the rows of x that y (m, …) belongs to; None: all rows. The rule is called for
        pieces of the rows, which bounds the memory.
        """
        f, R, D = self.marginal.mean, self._covariance_root, self._determinant_root
        if rows is not None:
            f, R, D = f[rows], R[rows], None if D is None else D[rows]
        shape = self._find_answer_shape(y)
        per_row = shape[1] if len(shape) > 1 else 1
        tasks_at_once = 1
        if len(R):
            tasks_at_once = min(TASKS_AT_ONCE, ENTRIES_AT_ONCE // max(R[0].numel(), 1))
        rows_at_once = max(tasks_at_once // per_row, 1)

        pieces = []
        # Without rows there is one empty piece, which gives the result its dtypes.
        for first in range(0, max(shape[0], 1), rows_at_once):
            piece = slice(first, first + rows_at_once)
            pieces.append(
                self.rule(
                    self.likelihood,
                    y[piece].reshape(-1, *y.shape[len(shape) :]),
                    _repeat_rows(f[piece], per_row),
                    _repeat_rows(R[piece], per_row),
                    None if D is None else _repeat_rows(D[piece], per_row),
                )
            )

        return Evaluated(*(_join_tensors(list(column)) for column in zip(*pieces, strict=True)))


@dataclass(frozen=True, eq=False)
class ByChunks:
    """The log density of a rung at x, computed for a chunk of rows at a time when y is given.

    K of all rows is not stored. Targets are numbers: y is (N,) or (N, k).
    """

    rung: OutputRung
    posterior: Posterior
    x: Inputs

    @property
    def likelihood(self) -> Likelihood:
        """Return the likelihood of the new observation."""
        return self.posterior.likelihood.predictive

    @property
    def marginal(self) -> Marginal:
        """Return f̂ (N, C) and K (N, C, C) of all rows in float64, computed at each call."""
        return self.posterior.outputs_at(self.x)

    @property
    def outputs_move(self) -> bool:
        """Return whether f̃ depends on y."""
        return self.rung.outputs_move

    @cached_property
    def like(self) -> Tensor:
        """Return an empty tensor whose dtype and device are those of the answers."""
        C = self.posterior.network.outputs
        return self.posterior.answer_template(Marginal(torch.empty(0, C), torch.empty(0, C, C)))

    def density_at(self, y: Tensor, rows: Tensor | None = None) -> Density:
        """Compute log densities and flags, of y's shape.

        rows (m,): the rows of x that y (m, …) belongs to; None: all rows, so that m = N.
        """
        chunks = [
            [log_density.density_at(portion) for portion in portions]
            for log_density, portions in self._yield_chunks(y, rows)
        ]
        # The fourth field, the standard error, is None: nothing is estimated here.
        return Density(
            log=_join_portions([[density.log for density in chunk] for chunk in chunks]),
            fallback=_join_portions([[density.fallback for density in chunk] for chunk in chunks]),
            converged=_join_portions(
                [[density.converged for density in chunk] for chunk in chunks]
            ),
        )

    def __call__(self, y: Tensor) -> Increments:
        """Compute the three increments, of y's shape."""
        chunks = [
            [log_density(portion) for portion in portions]
            for log_density, portions in self._yield_chunks(y, None)
        ]
        return Increments(
            likelihood=_join_portions([[item.likelihood for item in chunk] for chunk in chunks]),
            prior=_join_portions([[item.prior for item in chunk] for chunk in chunks]),
            curvature=_join_portions([[item.curvature for item in chunk] for chunk in chunks]),
            convention=self.posterior.convention,
        )

    def _yield_chunks(
        self, y: Tensor, rows: Tensor | None
    ) -> Iterator[tuple[OutputLogDensity, list[Tensor]]]:
        """Yield the log density at each chunk of rows, with its y in portions (m,) or (m, k).

        rows (n,): the rows of x that y (n, …) belongs to; None: all rows. Chunks and portions bound
        the memory: a task takes MATRICES matrices C×C. Without rows there is one empty chunk.
        """
        index = torch.arange(row_count(self.x)) if rows is None else rows
        task_bytes = MATRICES * 8 * self.posterior.network.outputs**2
        tasks_at_once = max(self.posterior.memory_budget // task_bytes, 1)
        per_row = y.shape[1] if y.dim() > 1 else 1
        rows_at_once = max(min(tasks_at_once // per_row, TASKS_AT_ONCE), 1)
        for first in range(0, max(len(index), 1), rows_at_once):
            chunk = slice(first, first + rows_at_once)
            x = take_rows(self.x, index[chunk])
            portions = [y[chunk]] if y.dim() == 1 else list(y[chunk].split(tasks_at_once, 1))
            yield log_density_of_posterior(self.rung, self.posterior, x), portions


def _join_portions(chunks: list[list[Tensor]]) -> Tensor:
    """Join the portions of each chunk along the columns, and the chunks along the rows."""
    return _join_tensors([_join_tensors(portions, dimension=1) for portions in chunks])


def _join_tensors(tensors: list[Tensor], dimension: int = 0) -> Tensor:
    """Join tensors along a dimension; a single tensor is returned without a copy."""
    return tensors[0] if len(tensors) == 1 else torch.cat(tensors, dimension)


def log_density_of_posterior(rung: OutputRung, posterior: Posterior, x: Inputs) -> OutputLogDensity:
    """Return the log density of a rung at inputs x (N rows), from the posterior's f̂ and K there."""
    marginal = posterior.outputs_at(x)
    determinant = None
    if posterior.convention == PAPER:
        determinant = partial(compute_data_covariance, posterior, x)
    return OutputLogDensity(
        likelihood=posterior.likelihood.predictive,
        marginal=marginal,
        prior=partial(prior_response, posterior, x),
        rule=rung.rule,
        outputs_move=rung.outputs_move,
        like=posterior.answer_template(marginal),
        convention=posterior.convention,
        determinant=determinant,
        outputs_known=rung.outputs_known,
    )


def make_log_density_of_marginal(
    rung: OutputRung, likelihood: Likelihood, mean: Tensor, covariance: Tensor
) -> OutputLogDensity:
    """Return the log density of a rung for outputs f of given mean and covariance.

    mean (N, C), covariance (N, C, C). The prior is not known here: its increment is zero, and its
    change is part of the likelihood's. Answers have the dtype and the device of `mean`.
    """
    marginal = Marginal(mean.to("cpu", torch.float64), covariance.to("cpu", torch.float64))
    zero = Marginal(torch.zeros_like(marginal.mean), torch.zeros_like(marginal.covariance))
    return OutputLogDensity(
        likelihood=likelihood.predictive,
        marginal=marginal,
        prior=lambda: zero,
        rule=rung.rule,
        outputs_move=rung.outputs_move,
        like=mean.new_empty(0),
        outputs_known=rung.outputs_known,
    )


def _repeat_rows(values: Tensor, times: int) -> Tensor:
    """Repeat each row of values `times` times, (N, …) -> (N·times, …).

    The result is stored component-major, as `ssla.maths.linalg` needs it.
    """
    by_component = values.movedim(0, -1).contiguous()
    if times > 1:
        by_component = by_component.repeat_interleave(times, -1)
    return by_component.movedim(-1, 0)


@dataclass(frozen=True)
class PlugIn:
    """log p(y|f̂): the network's own answer, as if its weights were known.

    It is the baseline of the other refits. Its mass is 1.
    """

    name = "plug_in"
    outputs_move = False
    outputs_known = True

    @property
    def rule(self) -> Rule:
        """Return the function that evaluates log densities from f̂ and K."""
        return evaluate_plug_in

    def __call__(self, posterior: Posterior, x: Inputs) -> OutputLogDensity:
        """Return the log density at inputs x (N rows)."""
        return log_density_of_posterior(self, posterior, x)


@dataclass(frozen=True)
class NoRefit:
    """θ̃ = θ̂: log p(y|f̂) − ½ log|I + Λ K|.

    curvature: Λ of the new row, "observed" (the paper's Algorithm 2), "fisher", or "empirical" (its
    Corollary 2).

    data_curvature: the curvature of the training rows, from which K = J H⁻¹ Jᵀ follows. "fisher"
    (default) is that of the posterior. "observed" sums Σ JᵀΛ(y_i, f̂_i)J + prior again over the
    training rows, as Algorithm 2 is written; a ValueError says where that is not positive definite.
    The two differ for heteroscedastic noise and StudentT, not for Gaussian noise, classes and
    counts with their usual links. data: the training data for "observed", where the posterior does
    not hold them.

    With Gaussian noise the curvature does not depend on y, so the normalised predictive is the
    plug-in; with "empirical" it is even narrower. It is offered because it was published; it is
    not recommended.
    """

    curvature: str = OBSERVED
    data_curvature: str = FISHER
    data: Any = field(default=None, compare=False)

    name = "none"
    outputs_move = False
    outputs_known = False

    def __post_init__(self) -> None:
        """Raise ValueError for an unknown curvature, and for data that would not be read."""
        check_name("curvature", self.curvature, CURVATURES)
        check_name("data_curvature", self.data_curvature, (FISHER, OBSERVED))
        if self.data is not None and self.data_curvature == FISHER:
            raise ValueError(
                "NoRefit(data=…) is for data_curvature='observed', which reads the training rows. "
                "Leave data out, or ask for data_curvature='observed'."
            )

    @property
    def rule(self) -> Rule:
        """Return the function that evaluates log densities from f̂ and K."""
        return partial(evaluate_without_refit, curvature=self.curvature)

    def __call__(self, posterior: Posterior, x: Inputs) -> OutputLogDensity:
        """Return the log density at inputs x.

        Raises ValueError if the observed curvature of the data is asked for and does not exist.
        """
        log_density = log_density_of_posterior(self, posterior, x)
        if self.data_curvature == FISHER:
            return log_density
        K = observed_covariance(posterior, x, self.data)
        # Without a refit the determinant alone has a covariance, so K is right in all conventions.
        marginal = Marginal(log_density.marginal.mean, K)
        return replace(log_density, marginal=marginal, determinant=None)


@dataclass(frozen=True)
class OutputRefit:
    """The output refit: f̃ is the mode of log p(y|f) − ½(f−f̂)ᵀK⁻¹(f−f̂), in C dimensions.

    It is the refit of the network linearised at θ̂, exactly, with the training rows' curvature at
    θ̂. steps = None goes to the mode; steps = 1 takes one Newton step and its quadratic value. Both
    are exact for Gaussian noise and a network linear in its free parameters.
    """

    steps: int | None = None

    outputs_move = True
    outputs_known = False

    def __post_init__(self) -> None:
        """Raise ValueError for steps other than None and 1."""
        if self.steps not in (None, 1):
            raise ValueError(
                f"steps must be None (to the mode) or 1 (one Newton step), but is {self.steps!r}."
            )

    @property
    def name(self) -> str:
        """Return the name by which users choose this refit."""
        return "output" if self.steps is None else "newton"

    @property
    def rule(self) -> Rule:
        """Return the function that evaluates log densities from f̂ and K."""
        return evaluate_at_mode if self.steps is None else evaluate_newton_step

    def __call__(self, posterior: Posterior, x: Inputs) -> OutputLogDensity:
        """Return the log density at inputs x (N rows)."""
        return log_density_of_posterior(self, posterior, x)
