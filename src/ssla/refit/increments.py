"""log p(y|x,D) as three increments, for any y, from f̂ and K alone.

    log p(y|x,D) ≈ log p(y|f̃) − ½ (f̃−f̂)ᵀK⁻¹(f̃−f̂) − ½ log|I + Λ K|

The rungs differ in f̃. Everything is written in whitened coordinates: K = R Rᵀ and
f̃ = f̂ + R v, so K may be singular, matrices stay symmetric, and the middle term is −½‖v‖². M tasks
(test points × candidate y) are solved at once; there is no loop over either.

Where I + RᵀΛR with the observed Λ is not positive definite, that task uses the Fisher and is
counted.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from ssla._checks import in_plain_torch
from ssla.likelihoods import Derivatives, Likelihood
from ssla.maths import linalg

OBSERVED, FISHER, EMPIRICAL = "observed", "fisher", "empirical"
TOLERANCE = 1e-8  # of the ascent: standard deviations of f from the mode
STEP_MARGIN = 0.1  # a guess: the least pivot of I + RᵀΛR on which one Newton step is trusted
PUSH = 0.05  # a guess: away from a saddle, in standard deviations of f
HIGHER = 1e-12  # a guess: by which another mode must be higher, so that rounding does not decide
CURVATURES = (OBSERVED, FISHER, EMPIRICAL)


@dataclass(frozen=True)
class Increments:
    """The three increments of an un-normalised log predictive density, and their total.

    likelihood: of the data and the new observation; prior: of log π; curvature: −½ of the log
    determinant's. convention: where the prior enters, "exact", "paper" or "additive" (see
    Posterior.with_prior).
    """

    likelihood: Tensor
    prior: Tensor
    curvature: Tensor
    convention: str = "exact"

    @property
    @in_plain_torch
    def total(self) -> Tensor:
        """The un-normalised log predictive density."""
        return self.likelihood + self.prior + self.curvature

    def map(self, function: Callable[[Tensor], Tensor]) -> Increments:
        """Return increments with a function applied to each of the three, as to reshape or cast
        them.
        """
        return replace(
            self,
            likelihood=function(self.likelihood),
            prior=function(self.prior),
            curvature=function(self.curvature),
        )


class Evaluated(NamedTuple):
    """The log densities of M tasks at one point each."""

    fit: Tensor  # log p(y|f̃) (M,)
    shift: Tensor  # −½‖v‖²: the loss of data and prior together (M,)
    curvature: Tensor  # −½ log|I + ΛK| (M,)
    pull: Tensor  # u with f̃ − f̂ = K u (M, C)
    fallback: Tensor  # Fisher in place of an indefinite observed precision (M,) bool
    converged: Tensor  # (M,) bool

    @property
    def total(self) -> Tensor:
        """The un-normalised log densities (M,)."""
        return (self.fit + self.shift).add_(self.curvature)


class Rule(Protocol):
    """A function (likelihood, y (M, …), f̂ (M, C), R (M, C, C)) -> Evaluated.

    D (M, C, C), if given, is a root of the covariance that the determinant takes in place of K = R
    Rᵀ: the paper leaves the prior out of the curvature but not out of the refit.
    """

    def __call__(
        self, likelihood: Likelihood, y: Tensor, f: Tensor, R: Tensor, D: Tensor | None = None, /
    ) -> Evaluated:
        """Evaluate M tasks (see the class)."""
        ...


def plug_in(
    likelihood: Likelihood, y: Tensor, f: Tensor, R: Tensor, D: Tensor | None = None
) -> Evaluated:
    """Evaluate log p(y|f̂) as if f were known. R and D are not used."""
    fit = likelihood.log_prob(y, f)
    no = torch.zeros_like(fit, dtype=torch.bool)
    return Evaluated(
        fit, torch.zeros_like(fit), torch.zeros_like(fit), torch.zeros_like(f), no, ~no
    )


def without_refit(
    likelihood: Likelihood,
    y: Tensor,
    f: Tensor,
    R: Tensor,
    D: Tensor | None = None,
    *,
    curvature: str,
) -> Evaluated:
    """Evaluate ASSLA, θ̃ = θ̂: log p(y|f̂) − ½ log|I + ΛK|.

    curvature: the kind of Λ, one of CURVATURES. The other arguments are those of `Rule`.
    """
    without_curvature = plug_in(likelihood, y, f, R)
    R = R if D is None else D
    if curvature == EMPIRICAL:  # Λ = g gᵀ has rank one: |I + ΛK| = 1 + gᵀKg
        white = linalg.multiply_root_transposed(R, likelihood.score(y, f))
        logdet = torch.log1p(linalg.dot(white, white))
        return without_curvature._replace(curvature=-0.5 * logdet)
    if curvature == FISHER:
        precision = likelihood.fisher(f)
    else:
        precision = _derivatives_with_curvature(likelihood, y, f).precision
    factor, fallback, _ = _factor_with_fallback(likelihood, f, R, precision)
    return without_curvature._replace(curvature=-0.5 * factor.logdet(), fallback=fallback)


def one_step(
    likelihood: Likelihood, y: Tensor, f: Tensor, R: Tensor, D: Tensor | None = None
) -> Evaluated:
    """Evaluate the quadratic model after one Newton step from f̂.

    Its value is log p(y|f̂) + ½ gᵀK(I+ΛK)⁻¹g − ½ log|I + ΛK|. The gain has a pole where I + RᵀΛR
    turns singular, so the Fisher information takes over before that (STEP_MARGIN), and is counted.
    The arguments are those of `Rule`.
    """
    log_prob, score, precision = _derivatives_with_curvature(likelihood, y, f)
    factor, fallback, used = _factor_with_fallback(likelihood, f, R, precision, margin=STEP_MARGIN)
    white = linalg.multiply_root_transposed(R, score)
    v = factor.solve(white)
    gain = linalg.dot(white, v)  # gᵀδ with δ = R v
    shift = -0.5 * linalg.dot(v, v)
    # The quadratic model of log p at the step: log p + gᵀδ − ½ δᵀΛδ, and δᵀΛδ = gᵀδ − ‖v‖².
    fit = log_prob + 0.5 * gain - shift
    delta = linalg.multiply_root(R, v)
    pull = score - (used @ delta.unsqueeze(-1)).squeeze(-1)
    converged = torch.ones_like(fallback)
    evaluated = Evaluated(fit, shift, -0.5 * factor.logdet(), pull, fallback, converged)
    if D is not None:
        evaluated = _with_determinant(likelihood, y, f, D, evaluated)
    return _replace_steps_outside(likelihood, y, f, R, D, f + delta, evaluated)


def _replace_steps_outside(
    likelihood: Likelihood,
    y: Tensor,
    f: Tensor,
    R: Tensor,
    D: Tensor | None,
    f_tilde: Tensor,
    evaluated: Evaluated,
) -> Evaluated:
    """Take the mode where a Newton step ends at an f̃ (M, C) that is not allowed.

    The quadratic model has no meaning there. These tasks count as fallbacks.
    """
    if not likelihood.has_boundary:
        return evaluated
    rows = (~torch.isfinite(likelihood.log_prob(y, f_tilde))).nonzero().squeeze(-1)
    tasks = _Tasks(likelihood, y, f, R).take(rows)
    mode = evaluate_at_mode(likelihood, *tasks, None if D is None else D[rows])
    mode = mode._replace(fallback=torch.ones_like(mode.fallback))
    _overwrite_rows(evaluated, rows, mode)
    return evaluated


def evaluate_at_mode(
    likelihood: Likelihood, y: Tensor, f: Tensor, R: Tensor, D: Tensor | None = None
) -> Evaluated:
    """Evaluate at f̃ = the mode of log p(y|f) − ½(f−f̂)ᵀK⁻¹(f−f̂), with the observed precision.

    At a mode I + RᵀΛR is positive semi-definite by the second-order condition. Where the boundary
    of the allowed outputs cuts the integral that the mode stands for, the likelihood computes the
    increments. The arguments are those of `Rule`.
    """
    boundary = likelihood.refit_at_boundary(y, f, R @ R.mT) if likelihood.has_boundary else None
    if boundary is None:
        return _mode_inside(likelihood, y, f, R, D)
    no = torch.zeros_like(boundary.cut)
    fit, shift, curvature, pull = (values.clone() for values in boundary[1:])
    evaluated = Evaluated(fit, shift, curvature, pull, no, ~no)
    rows = (~boundary.cut).nonzero().squeeze(-1)
    tasks = _Tasks(likelihood, y, f, R).take(rows)
    mode = _mode_inside(likelihood, *tasks, None if D is None else D[rows])
    _overwrite_rows(evaluated, rows, mode)
    return evaluated


def _mode_inside(
    likelihood: Likelihood, y: Tensor, f: Tensor, R: Tensor, D: Tensor | None
) -> Evaluated:
    """Evaluate at a mode that is inside the allowed outputs. The arguments are those of `Rule`."""
    evaluated = _highest_mode(likelihood, y, f, R)
    if D is None:
        return evaluated
    f_tilde = f + linalg.multiply_root(R, linalg.multiply_root_transposed(R, evaluated.pull))
    return _with_determinant(likelihood, y, f_tilde, D, evaluated)


def _with_determinant(
    likelihood: Likelihood, y: Tensor, f: Tensor, D: Tensor, evaluated: Evaluated
) -> Evaluated:
    """Put −½ log|I + DᵀΛ(y, f)D| in place of the curvature increment, for D (M, C, C)."""
    precision = _derivatives_with_curvature(likelihood, y, f).precision
    factor, fallback, _ = _factor_with_fallback(likelihood, f, D, precision)
    return evaluated._replace(
        curvature=-0.5 * factor.logdet(), fallback=evaluated.fallback | fallback
    )


def _highest_mode(likelihood: Likelihood, y: Tensor, f: Tensor, R: Tensor) -> Evaluated:
    """Evaluate at the highest of the modes that the likelihood's starts lead to."""
    starts = likelihood.starting_points(y, f, R)
    if not starts:
        return _climb_to_mode(likelihood, y, f, R, torch.zeros_like(f))
    best = _mode_from(likelihood, y, f, R, starts[0])
    for start in starts[1:]:
        other = _mode_from(likelihood, y, f, R, start)
        higher = other.fit + other.shift > best.fit + best.shift + HIGHER
        rows = higher.nonzero().squeeze(-1)
        _overwrite_rows(best, rows, Evaluated(*(values[rows] for values in other)))
    return best


def _mode_from(likelihood: Likelihood, y: Tensor, f: Tensor, R: Tensor, v: Tensor) -> Evaluated:
    """Evaluate at the mode reached from v (M, C): v itself where it is one, by ascent elsewhere."""
    evaluated, gradient = _evaluate_at(likelihood, y, f, R, v)
    is_mode = linalg.dot(gradient, gradient) <= TOLERANCE**2 * (1 + linalg.dot(v, v))
    rows = (~(is_mode & ~evaluated.fallback)).nonzero().squeeze(-1)
    if rows.numel():
        tasks = _Tasks(likelihood, y, f, R).take(rows)
        mode = _climb_to_mode(likelihood, *tasks, linalg.select_rows(v, rows))
        _overwrite_rows(evaluated, rows, mode)
    return evaluated


def evaluate_at_mode_from(
    likelihood: Likelihood, y: Tensor, f: Tensor, R: Tensor, pull: Tensor
) -> Evaluated:
    """Evaluate at the mode that an ascent reaches from f̂ + K·pull, for example the mode of a y
    nearby.  pull (M, C).
    """
    return _climb_to_mode(likelihood, y, f, R, linalg.multiply_root_transposed(R, pull), push=False)


def _overwrite_rows(target: Evaluated, rows: Tensor, values: Evaluated) -> None:
    """Write the values of some rows into `target` in place: its tensors are fresh and our own."""
    if rows.numel():
        for target_tensor, new_values in zip(target, values, strict=True):
            target_tensor[rows] = new_values


def _climb_to_mode(
    likelihood: Likelihood, y: Tensor, f: Tensor, R: Tensor, start: Tensor, push: bool = True
) -> Evaluated:
    """Evaluate at the mode that Newton ascent reaches from `start` (M, C), in whitened coordinates.

    With `push`, a start that is worse than v = 0 is replaced by it, and an ascent that ends at an
    indefinite curvature is continued from a point nearby. Without it these tasks fail.
    """
    tasks = _Tasks(likelihood, y, f, R)
    if push:
        origin = torch.zeros_like(start)
        better = tasks.value(start) >= tasks.value(origin)
        start = torch.where(better.unsqueeze(-1), start, origin)
    ascent = linalg.newton_ascent(tasks.evaluate, start, tolerance=TOLERANCE)
    evaluated, _ = _evaluate_at(likelihood, y, f, R, ascent.point)
    evaluated = evaluated._replace(converged=ascent.converged)
    if not push:
        return evaluated._replace(converged=evaluated.converged & ~evaluated.fallback)
    # An indefinite curvature is not that of a maximum: move away from the saddle and go on.
    saddle = evaluated.fallback.nonzero().squeeze(-1)
    if saddle.numel():
        point = linalg.select_rows(ascent.point, saddle)
        beside = point + PUSH * (1 + point.abs())
        mode = _climb_to_mode(likelihood, *tasks.take(saddle), beside, push=False)
        _overwrite_rows(evaluated, saddle, mode)
    return evaluated


def _evaluate_at(
    likelihood: Likelihood, y: Tensor, f: Tensor, R: Tensor, v: Tensor
) -> tuple[Evaluated, Tensor]:
    """Evaluate at f̂ + Rv, v (M, C), and return the gradient of the objective there (M, C)."""
    f_tilde = linalg.multiply_root(R, v).add_(f)
    log_prob, score, precision = _derivatives_with_curvature(likelihood, y, f_tilde)
    factor, fallback, _ = _factor_with_fallback(likelihood, f_tilde, R, precision)
    evaluated = Evaluated(
        fit=log_prob,
        shift=-0.5 * linalg.dot(v, v),
        curvature=-0.5 * factor.logdet(),
        pull=score,
        fallback=fallback,
        converged=torch.ones_like(fallback),
    )
    return evaluated, linalg.multiply_root_transposed(R, score).sub_(v)


def _derivatives_with_curvature(
    likelihood: Likelihood, y: Tensor, f: Tensor, for_step: bool = False
) -> Derivatives:
    """Return log p (M,), g (M, C) and a Λ (M, C, C) that is not zero everywhere.

    Where log p has kinks and no curvature (|y − f|), Λ is the Fisher information if it has a closed
    form, and g gᵀ otherwise. Exactly at a kink g may be zero: there the Fisher information is
    computed by quadrature, unless the answer is `for_step`.
    """
    derivatives = likelihood.derivatives(y, f)
    if not likelihood.may_be_piecewise_linear or bool(derivatives.precision.any()):
        return derivatives
    if not likelihood.is_piecewise_linear(f):
        return derivatives
    if likelihood.fisher_in_closed_form:
        return derivatives._replace(precision=likelihood.fisher(f))
    g = derivatives.score
    stand_in = g.unsqueeze(-1) * g.unsqueeze(-2)
    at_kink = (g == 0).all(-1)
    if bool(at_kink.any()) and not for_step:
        stand_in[at_kink] = likelihood.fisher(f[at_kink])
    return derivatives._replace(precision=stand_in)


def _factor_with_fallback(
    likelihood: Likelihood,
    f: Tensor,
    R: Tensor,
    precision: Tensor,
    score: Tensor | None = None,
    margin: float = 0.0,
) -> tuple[linalg.IdentityPlus, Tensor, Tensor]:
    """Factorise I + RᵀΛR, with the Fisher information where Λ (M, C, C) makes it indefinite.

    Returns the factor, which tasks have the Fisher information (M,), and the Λ used (M, C, C).
    score (M, C): given for a step, where any positive stand-in will do: g gᵀ takes the place of a
    Fisher information that costs a quadrature. margin: the least pivot that counts as positive.
    """
    factor = linalg.factorise_identity_plus(R, precision, margin)
    indefinite = ~factor.positive
    if bool(indefinite.any()):
        rows = indefinite.nonzero().squeeze(-1)
        if score is not None and not likelihood.fisher_in_closed_form:
            g = score[rows]
            stand_in = g.unsqueeze(-1) * g.unsqueeze(-2)
        else:
            stand_in = likelihood.fisher(f[rows])
        # A clone in this order keeps the component-major storage.
        by_component = precision.movedim(0, -1).clone(memory_format=torch.contiguous_format)
        by_component[..., rows] = stand_in.movedim(0, -1)
        precision = by_component.movedim(-1, 0)
        factor = linalg.factorise_identity_plus(R, precision)
    return factor, indefinite, precision


@dataclass(eq=False)
class _Tasks:
    """M objectives log p(y|f̂ + Rv) − ½‖v‖² in v, all of them or the last rows that were taken."""

    likelihood: Likelihood
    y: Tensor
    f: Tensor
    R: Tensor
    taken_rows: Tensor | None = None
    taken: tuple[Tensor, Tensor, Tensor] | None = None

    def value(self, v: Tensor) -> Tensor:
        """Return the objectives at v (M, C), −∞ where they are not a number (M,)."""
        log_prob = self.likelihood.log_prob(self.y, self.f + linalg.multiply_root(self.R, v))
        return torch.nan_to_num(log_prob - 0.5 * linalg.dot(v, v), nan=-torch.inf)

    def take(self, rows: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """Return y, f̂ and R of some tasks (None: all), and keep them: an ascent asks again."""
        if rows is None:
            return self.y, self.f, self.R
        if self.taken is None or self.taken_rows is not rows:
            R = self.R.movedim(0, -1).index_select(-1, rows).movedim(-1, 0)
            self.taken_rows = rows
            self.taken = (self.y[rows], linalg.select_rows(self.f, rows), R)
        return self.taken

    def evaluate(self, v: Tensor, rows: Tensor | None) -> linalg.Evaluation:
        """Return objective, gradient and Newton's solve of some tasks at v (m, C)."""
        y, f, R = self.take(rows)
        f_tilde = f + linalg.multiply_root(R, v)
        log_prob, score, precision = _derivatives_with_curvature(
            self.likelihood, y, f_tilde, for_step=True
        )
        factor, _, _ = _factor_with_fallback(self.likelihood, f_tilde, R, precision, score)
        value = log_prob - 0.5 * linalg.dot(v, v)
        return linalg.Evaluation(value, linalg.multiply_root_transposed(R, score) - v, factor.solve)
