"""Refits of the network linearised at θ̂: f_i(θ) = f̂_i + J_i(θ − θ̂) on every row.

The objective is that of `ssla.refit.weights.all_weights` with these outputs. Under a Gaussian prior
and a log likelihood that is concave in f it is strictly concave, whatever θ̂ is: every refit has a
mode. It differs from the output refit in that the log likelihood and the curvature of all training
rows are those at θ̃.

Steps are written as δ = H⁻¹(Jᵀa + J_xᵀb), with a number in (a, b) for each output of the training
rows and of the new row. With K = J H⁻¹ Jᵀ (`linearised_covariance`) and T the prior's precision,

    J δ = K a + K_x b,      T δ = Jᵀ(a − ΛJδ) + J_xᵀb,

so that the gradient of the objective is Jᵀr + J_xᵀr_x with

    r = g(y, f) − g(y, f̂) + ΛJδ − a,      r_x = g(y, f_x) − b,

and (r, r_x) is the step of Newton's method with the curvature H at θ̂. An evaluation is one product
with K. The outputs move along with a point: it is (a, b, Jδ, J_xδ), in which everything is linear.

Determinants are those of `linearised_determinants`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from ssla.data import Inputs, as_inputs, row_count
from ssla.likelihoods import Likelihood
from ssla.maths import linalg
from ssla.network.frozen import in_chunks
from ssla.priors import BoundGaussian
from ssla.refit.increments import FISHER, OBSERVED, at_mode
from ssla.refit.interrupts import Interrupted
from ssla.refit.weights.all_weights_dual import MOST_OUTPUTS
from ssla.refit.weights.anderson import SHARED_STEPS, Found, Progress, Slope, ascend
from ssla.refit.weights.contrasts import Contrasts
from ssla.refit.weights.last_layer_probing import NewRow
from ssla.refit.weights.linearised_covariance import (
    SHARE,
    Jacobians,
    OutputCovariance,
    bytes_needed,
    output_covariance,
)
from ssla.refit.weights.linearised_determinants import CurvatureChange, OwnCurvature
from ssla.refit.weights.refit_rows import Block, TrainingRows, check_seen, open_rows
from ssla.refit.weights.solved import (
    EXACT,
    FROZEN,
    TRACES,
    Options,
    Solved,
    own_increment,
    own_pull,
)
from ssla.report import AS_IS

if TYPE_CHECKING:
    from ssla.posterior import Posterior

SHORTER = 0.7  # of the output refit's step, as in `last_layer_group`
MOST_TASKS = 64  # a guess
# Guesses: the error aimed at is TARGET_ERROR/√p for a probability p, at most RARE_ERROR times as
# large.
TARGET_ERROR, RARE_ERROR = 2e-3, 10.0
NEGATIVE = -1e-9  # an eigenvalue of Λ over the largest one, below which it is not rounding


class Size(NamedTuple):
    """The outputs of all training rows, the weights, and the outputs of the new rows."""

    R: int
    P: int
    new: int

    @staticmethod
    def of(posterior: Posterior, new_rows: int) -> Size:
        outputs = contrasts_of(posterior).shape[1]
        n = posterior.statistics.n
        return Size(n * outputs, posterior.theta.numel(), new_rows * outputs)


def contrasts_of(posterior: Posterior) -> Tensor:
    """Q (C, c): contrasts of classes where the likelihood does not depend on their sum, else I."""
    C = posterior.network.outputs
    if posterior.likelihood.shift_invariant:
        return Contrasts(C).matrix
    return torch.eye(C, dtype=torch.float64)


def why_not_linearised(posterior: Posterior, new_rows: int, single: bool) -> str | None:
    """Why refits of the linearised network are not possible, with a remedy; None where they are."""
    prior = posterior.bound_prior
    proper = isinstance(prior, BoundGaussian)
    if not (proper and bool((prior.precision(posterior.theta) > 0).all())):
        return (
            "Refits of the linearised network need a Gaussian prior with a precision above zero "
            f"for every weight, but this posterior has {posterior.report.prior}. Use "
            "ssla.priors.Gaussian, or refit='output'."
        )
    if posterior.mode == AS_IS:
        return (
            "Refits of the linearised network start from a mode, but this posterior has "
            "mode='as_is'. Use mode='tilt', or refit='output'."
        )
    size = Size.of(posterior, new_rows)
    needed = bytes_needed(*size, itemsize=4 if single else 8)
    if needed > posterior.memory_budget:
        return (
            f"Refits of the linearised network need {needed / 2**30:.2g} GiB for the covariance of "
            f"{size.R:,} outputs of training rows ({new_rows:,} new rows, {size.P:,} weights), "
            f"more than the memory budget of {posterior.memory_budget / 2**30:.2g} GiB. Fit with a "
            "larger memory_budget, give fewer new rows at a time, or use refit='output'."
        )
    return None


@dataclass(frozen=True, eq=False)
class Rows:
    """All training rows, in the dtype of the refits unless stated."""

    f: Tensor  # f̂ (n, C), in float64
    y: Tensor
    weights: Tensor | None  # in float64
    score: Tensor  # weighted g(y, f̂) in contrasts (n, c), in float64
    precision: Tensor  # weighted Λ(f̂) in contrasts (n, c, c)

    def weighted(self, values: Tensor) -> Tensor:
        """values (m, n, c) times the weights of rows."""
        return values if self.weights is None else values * self.weights.to(values).unsqueeze(-1)


@dataclass(frozen=True, eq=False)
class LinearisedRefit:
    """All refits of one posterior's linearised network at inputs x. An `Engine`."""

    posterior: Posterior
    options: Options
    rows: Rows
    blocks: TrainingRows  # the rows as they are read, for `modes`
    x: Inputs
    f: Tensor  # f̂ at x (N, C)
    Q: Tensor  # contrasts of outputs (C, c)
    covariance: OutputCovariance
    kind: str  # of the curvature in both determinants
    dtype: torch.dtype
    interrupted: Interrupted

    @property
    def law(self) -> Likelihood:
        """The likelihood of the new observation."""
        return self.posterior.likelihood.predictive

    @property
    def fallback(self) -> bool:
        """Whether the Fisher takes the place of an observed curvature that is indefinite."""
        return self.kind != self.options.curvature

    @property
    def tasks_at_once(self) -> int:
        n, C = self.rows.f.shape
        numbers = 2 * n * self.Q.shape[1]
        state = self.dtype.itemsize * numbers * (3 * self.options.memory + 8) + 8 * 8 * n * C
        return max(min(self.posterior.memory_budget // 8 // state, MOST_TASKS), 1)

    def in_contrasts(self, precision: Tensor) -> Tensor:
        """QᵀΛQ (…, c, c)."""
        Q = self.Q.to(precision.dtype)
        return Q.mT @ precision @ Q

    def solve(self, where: Tensor, y: Tensor, progress: Progress | None = None) -> Solved:
        """Tasks (row of x, y): the three increments at each one's mode.

        Ctrl-C ends the ascent: tasks that have not converged count as such.
        """
        if self.interrupted.asked:
            return Solved.untried(len(where))
        with self.interrupted.listening():
            group = Group(self, where, y)
            end = self._ascend(group, progress)
            likelihood, prior = group.values(end.point)
            curvature, positive, error = group.curvature(end.point, likelihood + prior)
        finite = torch.isfinite(likelihood + prior + curvature)
        return Solved(
            likelihood,
            prior,
            curvature,
            torch.full_like(positive, self.fallback),
            end.converged & positive & finite,
            end.steps,
            end.norm.double(),
            error,
        )

    def stuck(self, where: Tensor, y: Tensor) -> Tensor:
        """Never: the outputs are linear in the weights."""
        return torch.zeros(len(where), dtype=torch.bool)

    def modes(self, where: Tensor, y: Tensor) -> Tensor:
        """θ̃ = θ̂ + T⁻¹(Jᵀ(a − ΛJδ) + J_xᵀb) (m, P), by a pass over the rows."""
        group = Group(self, where, y)
        end = group.split(self._ascend(group).point)
        pulled = (end.a - group.times_precision(end.moved)).double()
        by_row = pulled.reshape(len(y), *self.rows.precision.shape[:2]) @ self.Q.mT
        network, theta = self.posterior.network, self.posterior.theta
        total = torch.zeros(len(theta), len(y), dtype=torch.float64)
        place = 0
        for block in self.blocks:
            _, J = network.linearise(block.x, theta)
            part = slice(place, place + len(block.f))
            total += J.double().pull_many(by_row[:, part].permute(1, 2, 0))
            place += len(block.f)
        at_x = torch.zeros(len(self.f), len(self.Q), len(y), dtype=torch.float64)
        at_x[where, :, torch.arange(len(y))] = end.b.double() @ self.Q.mT
        place = 0
        for inputs in network.chunks(self.x, self.posterior.memory_budget):
            _, J = network.linearise(inputs, theta)
            total += J.double().pull_many(at_x[place : place + row_count(inputs)])
            place += row_count(inputs)
        precision = self.posterior.bound_prior.precision(theta)
        return theta + total.mT / precision

    def _ascend(self, group: Group, progress: Progress | None = None) -> Found:
        """With the curvature at θ̂ first; tasks that have not converged continue with their own."""
        options = self.options
        start = group.start()
        end = Found.nowhere(start)
        rest, left = torch.arange(len(start)), options.max_steps
        while len(rest) and left > 0 and not self.interrupted.asked:
            later = ascend(
                group.evaluate,
                start,
                tolerance=options.tolerance,
                max_steps=min(SHARED_STEPS, left),
                memory=options.memory,
                progress=progress,
                stop=self.interrupted,
            )
            end = end.followed_by(rest, later)
            unfinished = (~later.converged).nonzero().squeeze(-1)
            rest, left = rest[unfinished], left - SHARED_STEPS
            start = later.point[unfinished]
            if len(rest) and left > 0:
                group = group.take(unfinished).with_own_curvature(start)
        return end


class Point(NamedTuple):
    """A step δ = H⁻¹(Jᵀa + J_xᵀb) of m tasks, with the change of the outputs."""

    a: Tensor  # (m, R)
    b: Tensor  # (m, c)
    moved: Tensor  # Jδ (m, R)
    at_x: Tensor  # J_xδ (m, c)


@dataclass(frozen=True, eq=False)
class Group:
    """m tasks that are solved together."""

    refit: LinearisedRefit
    where: Tensor
    y: Tensor
    own: tuple[OwnCurvature, ...] | None = None  # of each task, in its preconditioner

    def take(self, tasks: Tensor) -> Group:
        """Some of the tasks, with what was computed of them."""
        if len(tasks) == len(self.y):
            return self
        curvatures = None if self.own is None else tuple(self.own[task] for task in tasks.tolist())
        part = Group(self.refit, self.where[tasks], self.y[tasks], curvatures)
        known = ("across", "root")
        cached = {name: self.__dict__[name][tasks] for name in known if name in self.__dict__}
        part.__dict__.update(cached)
        return part

    def with_own_curvature(self, point: Tensor) -> Group:
        """With the curvature of the training rows at each task's point in its preconditioner."""
        at = self.split(point)
        precision = self._new_precision(at)
        changes = self._changes(at, precision, range(len(self.y)))
        return replace(self, own=tuple(change.own_curvature() for change in changes))

    def _new_precision(self, at: Point) -> Tensor:
        """Λ of each new row at its outputs (m, C, C)."""
        law, at_x = self.refit.law, self.f + at.at_x.double() @ self.refit.Q.mT
        return law.fisher(at_x) if self.refit.kind == FISHER else law.precision(self.y, at_x)

    def _changes(
        self, at: Point, precision: Tensor, tasks: Iterable[int]
    ) -> Iterator[CurvatureChange]:
        """How the curvature of the training rows changes in some tasks."""
        explained = NewRow.of(self.new, self.refit.in_contrasts(precision)).explained
        f = self.outputs(at.moved)
        for task in tasks:
            yield CurvatureChange(self.refit, f[task], self.across[task], explained[task])

    @cached_property
    def across(self) -> Tensor:
        """J H⁻¹ J_xᵀ of each task's input (m, R, c)."""
        return self.refit.covariance.across[self.where]

    @property
    def new(self) -> Tensor:
        """K_x in contrasts (m, c, c), in float64."""
        return self.refit.covariance.new[self.where]

    @property
    def K(self) -> Tensor:
        """K_x of all outputs (m, C, C)."""
        return self.refit.Q @ self.new @ self.refit.Q.mT

    @cached_property
    def root(self) -> Tensor:
        return linalg.root(self.K)

    @property
    def f(self) -> Tensor:
        return self.refit.f[self.where]

    def split(self, point: Tensor) -> Point:
        R, c = self.refit.covariance.across.shape[1:]
        return Point(*point.split([R, c, R, c], -1))

    def start(self) -> Tensor:
        """SHORTER times the step of the output refit: b alone, a = 0."""
        refit = self.refit
        m = len(self.y)
        R, c = self.across.shape[1:]
        if not refit.law.linear_domain:
            return torch.zeros(m, 2 * (R + c), dtype=refit.dtype)
        pull = SHORTER * at_mode(refit.law, self.y, self.f, self.root).pull @ refit.Q
        b = pull.to(refit.dtype)
        moved, at_x = self._moved(torch.zeros(m, R, dtype=refit.dtype), b)
        return torch.cat([torch.zeros_like(moved), b, moved, at_x], -1)

    def _moved(self, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        """J δ (m, R) and J_x δ (m, c) for δ = H⁻¹(Jᵀa + J_xᵀb)."""
        along = (self.across @ b.unsqueeze(-1)).squeeze(-1)
        at_x = (self.new.to(b.dtype) @ b.unsqueeze(-1)).squeeze(-1)
        if not bool(a.any()):
            return along, at_x
        moved = self.refit.covariance.times(a) + along
        return moved, at_x + (a.unsqueeze(-2) @ self.across).squeeze(-2)

    def outputs(self, moved: Tensor) -> Tensor:
        """The outputs of the training rows (m, n, C), in the dtype of `moved`, from Jδ (m, R)."""
        rows, Q = self.refit.rows, self.refit.Q.to(moved.dtype)
        by_row = moved.reshape(len(moved), len(rows.f), -1)
        return rows.f.to(moved.dtype) + by_row @ Q.mT

    def times_precision(self, moved: Tensor) -> Tensor:
        """Λ Jδ (m, R)."""
        precision = self.refit.rows.precision
        by_row = moved.reshape(len(moved), len(precision), -1)
        product = torch.einsum("ncd,mnd->mnc", precision.to(moved.dtype), by_row)
        return product.reshape(moved.shape)

    def evaluate(self, point: Tensor, tasks: Tensor) -> Slope:
        """The gradient in (Jδ, J_xδ), and the step with H₁ = H + J_xᵀΛJ_x as the curvature."""
        return self.take(tasks)._evaluate(point)

    def _evaluate(self, point: Tensor) -> Slope:
        refit, law, likelihood = self.refit, self.refit.law, self.refit.posterior.likelihood
        Q = refit.Q.to(refit.dtype)
        at = self.split(point)
        f = self.outputs(at.moved)
        y = refit.rows.y
        change = likelihood.score_change(y, f, refit.rows.f.to(f.dtype))
        change = (refit.rows.weighted(change) @ Q).flatten(1)
        r = change + self.times_precision(at.moved) - at.a
        at_x = self.f + at.at_x.double() @ refit.Q.mT
        r_x = (law.score(self.y, at_x) @ refit.Q).to(refit.dtype) - at.b
        gradient = torch.cat([torch.zeros_like(r), torch.zeros_like(r_x), r, r_x], -1)
        if not (likelihood.linear_domain and law.linear_domain):
            inside = torch.isfinite(likelihood.log_prob(y, f)).all(-1)
            inside &= torch.isfinite(law.log_prob(self.y, at_x))
            gradient = torch.where(inside.unsqueeze(-1), gradient, torch.nan)
        step = self._step(r, r_x, at_x)
        if self.own is not None:
            n, c, _ = refit.rows.precision.shape
            parts = zip(self.own, r.reshape(-1, n, c), step.moved.reshape(-1, n, c), strict=True)
            shorter = torch.stack([own.corrected(*part) for own, *part in parts])
            step = self._step(shorter.flatten(1), r_x, at_x)
        return Slope(gradient, torch.cat(step, -1))

    def _step(self, r: Tensor, r_x: Tensor, at_x: Tensor) -> Point:
        """H₁⁻¹(Jᵀr + J_xᵀr_x) with H₁ = H + J_xᵀΛJ_x, Λ of the new row at its outputs (m, C).

        It is z − H⁻¹J_xᵀ(I + ΛK_x)⁻¹ΛJ_xz with z = H⁻¹(Jᵀr + J_xᵀr_x).
        """
        Q, law = self.refit.Q, self.refit.law
        moved, moved_at_x = self._moved(r, r_x)
        along = moved_at_x.double() @ Q.mT
        u = (own_pull(law, self.y, at_x, self.root, along) @ Q).to(r.dtype)
        back, back_at_x = self._moved(torch.zeros_like(r), u)
        return Point(r, r_x - u, moved - back, moved_at_x - back_at_x)

    def values(self, point: Tensor) -> tuple[Tensor, Tensor]:
        """Likelihood increments, with the tilt, and prior increments (m,), in float64.

        log π(θ̃) − log π(θ̂) = ∇log πᵀδ − ½ δᵀTδ, and δᵀTδ = (Jδ)ᵀ(a − ΛJδ) + (J_xδ)ᵀb.
        """
        refit, rows, covariance = self.refit, self.refit.rows, self.refit.covariance
        at = self.split(point.double())
        f = self.outputs(at.moved)
        change = refit.posterior.likelihood.log_prob_difference(rows.y, f, rows.f)
        if rows.weights is not None:
            change = change * rows.weights
        at_x = self.f + at.at_x @ refit.Q.mT
        along_prior = at.a @ covariance.slope + (at.b * covariance.new_slope[self.where]).sum(-1)
        along_data = at.moved @ rows.score.flatten()
        likelihood = refit.law.log_prob(self.y, at_x) + change.sum(-1) - along_data - along_prior
        inside = at.a - self.times_precision(at.moved)
        square = (at.moved * inside).sum(-1) + (at.at_x * at.b).sum(-1)
        return likelihood, along_prior - 0.5 * square

    # --- determinants ----------------------------------------------------------------------

    def curvature(self, point: Tensor, others: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """−½[log|H̃(θ̃)| − log|H(θ̂)|], where H̃ is positive definite, and the standard error. (m,)

        others: the sum of the other increments (m,), which tells how probable a y is.
        """
        options = self.refit.options
        at = self.split(point)
        precision = self._new_precision(at)
        value, positive = own_increment(self.root, precision)
        error = torch.zeros_like(value)
        if options.logdet == FROZEN:
            return value, positive, error
        tasks = positive.nonzero().squeeze(-1).tolist()
        for task, change in zip(tasks, self._changes(at, precision, tasks), strict=True):
            allowed = 0.0
            if options.logdet != EXACT:
                probability = float((others[task] + value[task]).clamp(max=0).exp())
                allowed = TARGET_ERROR * max(probability, RARE_ERROR**-2) ** -0.5
            half, error[task], positive[task] = change.half_logdet(allowed)
            value[task] -= half
        return value, positive, error


def default_logdet(posterior: Posterior) -> str:
    """Exact determinants for few outputs, traces and random vectors for more."""
    from_few = Size.of(posterior, 0).R <= MOST_OUTPUTS
    return EXACT if from_few else TRACES


def open_linearised(
    posterior: Posterior, x: Any, options: Options, data: Any, single: bool
) -> LinearisedRefit:
    """Stage one: passes over the data for the gradient at θ̂ and for the covariance of all outputs.

    single: products in float32. ValueError where `why_not_linearised` has a reason.
    """
    network, theta = posterior.network, posterior.theta
    likelihood = posterior.likelihood
    inputs = network.cast(as_inputs(x))
    reason = why_not_linearised(posterior, row_count(inputs), single)
    if reason is not None:
        raise ValueError(reason)
    Q = contrasts_of(posterior)
    dtype = torch.float32 if single else torch.float64

    def prepare(part: Inputs) -> tuple[Inputs, Tensor]:
        return part, network.evaluate(part, theta).double()

    blocks = open_rows(posterior, data, prepare)
    n, gradient = 0, torch.zeros_like(theta)
    for block in blocks:
        n += len(block.f)
        _, J = network.linearise(block.x, theta)
        gradient += J.double().pull(block.weighted(likelihood.score(block.y, block.f)))
    check_seen(posterior, n, gradient)
    if blocks.kept is None:
        raise ValueError(
            "Refits of the linearised network hold the inputs of all training rows, but they do "
            "not fit in a quarter of the memory budget. Fit with a larger memory_budget, or use "
            "refit='output'."
        )
    f = torch.cat([block.f for block in blocks])
    y = torch.cat([block.y for block in blocks])
    weights = _all_weights_of_rows(list(blocks))
    kind, precision = _curvature(likelihood, options.curvature, y, f)
    score = likelihood.score(y, f) @ Q
    precision = Q.mT @ precision @ Q
    if weights is not None:
        score = score * weights.unsqueeze(-1)
        precision = precision * weights[:, None, None]
    prior = posterior.bound_prior
    root = prior.precision(theta).sqrt()

    # Rows whose Jacobians in all weights fit a part of the budget.
    at_once = max(posterior.memory_budget // SHARE // (8 * len(Q) * len(theta)), 1)
    at_once = min(at_once, network.rows_at_once(posterior.memory_budget))

    def columns(x: Iterable[Inputs], first: int, last: int) -> Iterator[Tensor]:
        for part in (part for block in x for part in in_chunks(block, at_once)):
            _, J = network.linearise(part, theta)
            values = J.dense().values[:, :, first:last].double() / root[first:last]
            yield (Q.mT @ values).flatten(0, 1)

    jacobians = Jacobians(
        training=lambda first, last: columns((block.x for block in blocks), first, last),
        new=lambda first, last: columns([inputs], first, last),
        P=len(theta),
        R=n * Q.shape[1],
        new_outputs=row_count(inputs) * Q.shape[1],
        root=_roots(precision),
        prior_gradient=prior.gradient(theta) / root,
    )
    chunks = network.chunks(inputs, posterior.memory_budget)
    return LinearisedRefit(
        posterior=posterior,
        options=options,
        rows=Rows(f, y, weights, score, precision.to(dtype)),
        blocks=blocks,
        x=inputs,
        f=torch.cat([network.evaluate(part, theta).double() for part in chunks]),
        Q=Q,
        covariance=output_covariance(jacobians, dtype, posterior.memory_budget),
        kind=kind,
        dtype=dtype,
        interrupted=Interrupted(),
    )


def _curvature(likelihood: Likelihood, kind: str, y: Tensor, f: Tensor) -> tuple[str, Tensor]:
    """Λ of all rows (n, C, C): of the kind asked for, or the Fisher where that is indefinite."""
    if kind == OBSERVED:
        precision = likelihood.precision(y, f).expand(*f.shape, f.shape[-1])
        values = torch.linalg.eigvalsh(precision)
        if bool((values.amin(-1) >= NEGATIVE * values.abs().amax(-1)).all()):
            return OBSERVED, precision
    return FISHER, likelihood.fisher(f).expand(*f.shape, f.shape[-1])


def _roots(precision: Tensor) -> Tensor:
    """Λ^½ of rows (n, c, c), symmetric."""
    values, vectors = torch.linalg.eigh(precision)
    root: Tensor = (vectors * values.clamp_min(0).sqrt().unsqueeze(-2)) @ vectors.mT
    return root


def _all_weights_of_rows(blocks: list[Block]) -> Tensor | None:
    """The weights of all rows (n,); None where all are one."""
    if all(block.weights is None for block in blocks):
        return None
    ones = [torch.ones(len(block.f), dtype=torch.float64) for block in blocks]
    pairs = zip(blocks, ones, strict=True)
    return torch.cat(
        [one if block.weights is None else block.weights.double() for block, one in pairs]
    )
