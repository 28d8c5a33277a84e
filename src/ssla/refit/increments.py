"""log p(y|x,D) as three increments, for any y, from f̂ and K alone.

    log p(y|x,D) ≈ log p(y|f̃) − ½ (f̃−f̂)ᵀK⁻¹(f̃−f̂) − ½ log|I + Λ K|

The rungs differ in f̃. Everything is written in whitened coordinates: K = R Rᵀ and f̃ = f̂ + R v,
so K may be singular, matrices stay symmetric, and the middle term is −½‖v‖². M tasks (test
points × candidate y) are solved at once; there is no loop over either.

Where I + RᵀΛR with the observed Λ is not positive definite, that task uses the Fisher information
and is counted.

task       one y at one test point; M of them, each with C outputs
rung       a kind of refit, which is a `Rule` here: it decides which f̃ is evaluated
f̂, K       mean and covariance of the outputs; R is a root of K
f̃, v       the outputs after the refit, and the same in whitened coordinates
g, Λ       the gradient of log p(y|f) in f, also called the score, and minus its second derivative.
           Λ is "observed"; its mean over y is the Fisher information, "fisher"; g gᵀ is "empirical"
pull       u (C,) with f̃ = f̂ + K u
mode       a maximum of log p(y|f̂ + Rv) − ½‖v‖² in v
domain     the outputs f that the likelihood allows; log p is not finite outside
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
TOLERANCE = 1e-8  # a guess: an ascent ends this near the mode, in standard deviations of f
STEP_MARGIN = 0.1  # a guess: the least pivot of I + RᵀΛR on which one Newton step is trusted
PUSH = 0.05  # a guess: the step away from a saddle, in standard deviations of f
HIGHER = 1e-12  # a guess: another mode is taken where it is higher by this, more than rounding
CURVATURES = (OBSERVED, FISHER, EMPIRICAL)


@dataclass(frozen=True)
class Increments:
    """The three increments of an un-normalised log predictive density, all of y's shape.

    likelihood: the change of the data's log likelihood, and log p(y|x,θ̃) of the new observation.
    prior: the change of log π. curvature: −½ times the change of the log determinant. convention:
    where the prior enters, "exact", "paper" or "additive" (see Posterior.with_prior).
    """

    likelihood: Tensor
    prior: Tensor
    curvature: Tensor
    convention: str = "exact"

    @property
    @in_plain_torch
    def total(self) -> Tensor:
        """Return the un-normalised log predictive density."""
        return self.likelihood + self.prior + self.curvature

    def map(self, function: Callable[[Tensor], Tensor]) -> Increments:
        """Return increments with `function` applied to each of the three, for example a cast."""
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
        """Return the un-normalised log densities (M,)."""
        return (self.fit + self.shift).add_(self.curvature)


class Rule(Protocol):
    """A function that evaluates the log densities of M tasks from f̂ and K = R Rᵀ.

    Its arguments are likelihood, y (M, …), f: f̂ (M, C), R (M, C, C), and D (M, C, C), a root of
    the covariance in the determinant if that is not K: the paper leaves the prior out of the
    curvature but not out of the refit. D=None: it is K.
    """

    def __call__(
        self, likelihood: Likelihood, y: Tensor, f: Tensor, R: Tensor, D: Tensor | None = None, /
    ) -> Evaluated:
        """Evaluate M tasks: the arguments are those of the class."""
        ...


def evaluate_plug_in(
    likelihood: Likelihood, y: Tensor, f: Tensor, R: Tensor, D: Tensor | None = None
) -> Evaluated:
    """Evaluate log p(y|f̂) as if f were known. R and D are part of `Rule` and not used."""
    fit = likelihood.log_prob(y, f)
    never = torch.zeros_like(fit, dtype=torch.bool)
    return Evaluated(
        fit=fit,
        shift=torch.zeros_like(fit),
        curvature=torch.zeros_like(fit),
        pull=torch.zeros_like(f),
        fallback=never,
        converged=~never,
    )


def evaluate_without_refit(
    likelihood: Likelihood,
    y: Tensor,
    f: Tensor,
    R: Tensor,
    D: Tensor | None = None,
    *,
    curvature: str,
) -> Evaluated:
    """Evaluate ASSLA, θ̃ = θ̂: log p(y|f̂) − ½ log|I + ΛK|.

    curvature: the kind of Λ, one of CURVATURES. The other arguments are those of `Rule`. An
    indefinite observed Λ is replaced by the Fisher information, and the task is marked.
    """
    without_curvature = evaluate_plug_in(likelihood, y, f, R)
    if D is not None:
        R = D  # only the determinant has a covariance here
    if curvature == EMPIRICAL:  # Λ = g gᵀ has rank one: |I + ΛK| = 1 + gᵀKg
        white = linalg.multiply_root_transposed(R, likelihood.score(y, f))
        logdet = torch.log1p(linalg.dot(white, white))
        return without_curvature._replace(curvature=-0.5 * logdet)
    if curvature == FISHER:
        precision = likelihood.fisher(f)
    else:
        precision = _compute_derivatives_with_curvature(likelihood, y, f).precision
    factor, fallback, _ = _factorise_with_fallback(likelihood, f, R, precision)
    return without_curvature._replace(curvature=-0.5 * factor.logdet(), fallback=fallback)


def evaluate_newton_step(
    likelihood: Likelihood, y: Tensor, f: Tensor, R: Tensor, D: Tensor | None = None
) -> Evaluated:
    """Evaluate the quadratic model after one Newton step from f̂.

    Its value is log p(y|f̂) + ½ gᵀK(I+ΛK)⁻¹g − ½ log|I + ΛK|. The second term has a pole where
    I + RᵀΛR becomes singular. Tasks with a pivot below STEP_MARGIN therefore use the Fisher
    information, and are marked. The arguments are those of `Rule`.
    """
    log_prob, score, precision = _compute_derivatives_with_curvature(likelihood, y, f)
    factor, fallback, used_precision = _factorise_with_fallback(
        likelihood, f, R, precision, margin=STEP_MARGIN
    )
    white = linalg.multiply_root_transposed(R, score)
    v = factor.solve(white)
    gain = linalg.dot(white, v)  # gᵀδ with δ = R v
    shift = -0.5 * linalg.dot(v, v)

    # The quadratic model of log p at the step: log p + gᵀδ − ½ δᵀΛδ, and δᵀΛδ = gᵀδ − ‖v‖².
    fit = log_prob + 0.5 * gain - shift
    delta = linalg.multiply_root(R, v)
    pull = score - (used_precision @ delta.unsqueeze(-1)).squeeze(-1)
    converged = torch.ones_like(fallback)
    evaluated = Evaluated(fit, shift, -0.5 * factor.logdet(), pull, fallback, converged)
    if D is not None:
        evaluated = _replace_determinant(likelihood, y, f, D, evaluated)

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
    """Replace Newton steps that end outside the domain by the mode, in `evaluated`, and return it.

    The quadratic model has no meaning outside the domain. These tasks count as fallbacks. f_tilde:
    the ends of the steps (M, C). The tensors of `evaluated` are changed in place. The other
    arguments are those of `Rule`.
    """
    if not likelihood.has_boundary:
        return evaluated
    rows = (~torch.isfinite(likelihood.log_prob(y, f_tilde))).nonzero().squeeze(-1)
    tasks = _Tasks(likelihood, y, f, R).select_arguments(rows)
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
        return _evaluate_inside_domain(likelihood, y, f, R, D)
    never = torch.zeros_like(boundary.cut)

    # Clones, because the rows that are not cut are overwritten below.
    evaluated = Evaluated(
        fit=boundary.log_prob.clone(),
        shift=boundary.shift.clone(),
        curvature=boundary.curvature.clone(),
        pull=boundary.pull.clone(),
        fallback=never,
        converged=~never,
    )
    rows = (~boundary.cut).nonzero().squeeze(-1)
    tasks = _Tasks(likelihood, y, f, R).select_arguments(rows)
    mode = _evaluate_inside_domain(likelihood, *tasks, None if D is None else D[rows])
    _overwrite_rows(evaluated, rows, mode)
    return evaluated


def _evaluate_inside_domain(
    likelihood: Likelihood, y: Tensor, f: Tensor, R: Tensor, D: Tensor | None
) -> Evaluated:
    """Evaluate at the highest mode inside the domain. The arguments are those of `Rule`."""
    evaluated = _evaluate_at_highest_mode(likelihood, y, f, R)
    if D is None:
        return evaluated
    # f̃ = f̂ + K u with K = R Rᵀ
    f_tilde = f + linalg.multiply_root(R, linalg.multiply_root_transposed(R, evaluated.pull))
    return _replace_determinant(likelihood, y, f_tilde, D, evaluated)


def _replace_determinant(
    likelihood: Likelihood, y: Tensor, f: Tensor, D: Tensor, evaluated: Evaluated
) -> Evaluated:
    """Return `evaluated` with −½ log|I + DᵀΛ(y, f)D| as the curvature increment.

    D (M, C, C): a root of the covariance in the determinant. f (M, C): the outputs of Λ. Tasks that
    need the Fisher information here are marked too.
    """
    precision = _compute_derivatives_with_curvature(likelihood, y, f).precision
    factor, fallback, _ = _factorise_with_fallback(likelihood, f, D, precision)
    return evaluated._replace(
        curvature=-0.5 * factor.logdet(), fallback=evaluated.fallback | fallback
    )


def _evaluate_at_highest_mode(likelihood: Likelihood, y: Tensor, f: Tensor, R: Tensor) -> Evaluated:
    """Evaluate at the highest of the modes that the likelihood's starts lead to.

    Without starts the ascent begins at f̂. The arguments are those of `Rule`.
    """
    starts = likelihood.starting_points(y, f, R)
    if not starts:
        return _climb_to_mode(likelihood, y, f, R, torch.zeros_like(f))
    best = _evaluate_from_start(likelihood, y, f, R, starts[0])
    for start in starts[1:]:
        at_mode = _evaluate_from_start(likelihood, y, f, R, start)
        is_higher = at_mode.fit + at_mode.shift > best.fit + best.shift + HIGHER
        rows = is_higher.nonzero().squeeze(-1)
        _overwrite_rows(best, rows, Evaluated(*(values[rows] for values in at_mode)))
    return best


def _evaluate_from_start(
    likelihood: Likelihood, y: Tensor, f: Tensor, R: Tensor, v: Tensor
) -> Evaluated:
    """Evaluate at the mode reached from v (M, C), in whitened coordinates.

    Where the gradient at v is zero to TOLERANCE, v is the mode; other tasks ascend from v. The
    other arguments are those of `Rule`.
    """
    evaluated, gradient = _evaluate_at_point(likelihood, y, f, R, v)
    is_mode = linalg.dot(gradient, gradient) <= TOLERANCE**2 * (1 + linalg.dot(v, v))
    rows = (~(is_mode & ~evaluated.fallback)).nonzero().squeeze(-1)
    if rows.numel():
        tasks = _Tasks(likelihood, y, f, R).select_arguments(rows)
        mode = _climb_to_mode(likelihood, *tasks, linalg.select_rows(v, rows))
        _overwrite_rows(evaluated, rows, mode)
    return evaluated


def evaluate_at_mode_from(
    likelihood: Likelihood, y: Tensor, f: Tensor, R: Tensor, pull: Tensor
) -> Evaluated:
    """Evaluate at the mode that an ascent reaches from f̂ + K·pull, with pull (M, C).

    The pull is, for example, that of the mode of a y nearby. An ascent that ends at a saddle is not
    continued: it has not converged. The other arguments are those of `Rule`.
    """
    return _climb_to_mode(likelihood, y, f, R, linalg.multiply_root_transposed(R, pull), push=False)


def _overwrite_rows(target: Evaluated, rows: Tensor, values: Evaluated) -> None:
    """Write the values of some tasks into `target` in place, at the rows (m,) of its tensors.

    The tensors of `target` must not be shared with a caller.
    """
    if rows.numel():
        for target_tensor, new_values in zip(target, values, strict=True):
            target_tensor[rows] = new_values


def _climb_to_mode(
    likelihood: Likelihood, y: Tensor, f: Tensor, R: Tensor, start: Tensor, push: bool = True
) -> Evaluated:
    """Evaluate at the mode that Newton ascent reaches from `start` (M, C), in whitened coordinates.

    push: if v = 0 is higher than the start, the ascent begins at v = 0; and if it ends at an
    indefinite curvature, a saddle, it continues from a point nearby. Without it such tasks have not
    converged. The other arguments are those of `Rule`.
    """
    tasks = _Tasks(likelihood, y, f, R)
    if push:
        origin = torch.zeros_like(start)
        better = tasks.compute_values(start) >= tasks.compute_values(origin)
        start = torch.where(better.unsqueeze(-1), start, origin)
    ascent = linalg.newton_ascent(tasks.evaluate, start, tolerance=TOLERANCE)
    evaluated, _ = _evaluate_at_point(likelihood, y, f, R, ascent.point)
    evaluated = evaluated._replace(converged=ascent.converged)
    if not push:
        return evaluated._replace(converged=evaluated.converged & ~evaluated.fallback)

    # An indefinite curvature is not that of a maximum: move away from the saddle and go on.
    saddle = evaluated.fallback.nonzero().squeeze(-1)
    if saddle.numel():
        point = linalg.select_rows(ascent.point, saddle)
        beside = point + PUSH * (1 + point.abs())
        mode = _climb_to_mode(likelihood, *tasks.select_arguments(saddle), beside, push=False)
        _overwrite_rows(evaluated, saddle, mode)

    return evaluated


def _evaluate_at_point(
    likelihood: Likelihood, y: Tensor, f: Tensor, R: Tensor, v: Tensor
) -> tuple[Evaluated, Tensor]:
    """Evaluate at f̂ + Rv, for v (M, C), and return the objective's gradient in v too (M, C)."""
    f_tilde = linalg.multiply_root(R, v).add_(f)
    log_prob, score, precision = _compute_derivatives_with_curvature(likelihood, y, f_tilde)
    factor, fallback, _ = _factorise_with_fallback(likelihood, f_tilde, R, precision)
    evaluated = Evaluated(
        fit=log_prob,
        shift=-0.5 * linalg.dot(v, v),
        curvature=-0.5 * factor.logdet(),
        pull=score,
        fallback=fallback,
        converged=torch.ones_like(fallback),
    )
    return evaluated, linalg.multiply_root_transposed(R, score).sub_(v)


def _compute_derivatives_with_curvature(
    likelihood: Likelihood, y: Tensor, f: Tensor, for_step: bool = False
) -> Derivatives:
    """Compute log p (M,), g (M, C) and a Λ (M, C, C) that is not zero for all tasks.

    Where log p has kinks and no curvature (|y − f|), Λ is the Fisher information if it has a closed
    form, and g gᵀ otherwise. Exactly at a kink g may be zero: there the Fisher information is
    computed by quadrature. for_step: Λ only steers a Newton step, so that quadrature is left out.
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


def _factorise_with_fallback(
    likelihood: Likelihood,
    f: Tensor,
    R: Tensor,
    precision: Tensor,
    score: Tensor | None = None,
    margin: float = 0.0,
) -> tuple[linalg.IdentityPlus, Tensor, Tensor]:
    """Factorise I + RᵀΛR, with the Fisher information in tasks where Λ makes it indefinite.

    f (M, C): the outputs of Λ. precision: Λ (M, C, C). score: g (M, C) if Λ only steers a step; g
    gᵀ then takes the place of a Fisher information that costs a quadrature. margin: the least pivot
    that counts as positive. Returns the factor, a mask of the tasks that have the Fisher
    information (M,), and the Λ used (M, C, C).
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
        # Rows are replaced in a copy, which keeps the component-major storage of `linalg`.
        by_component = precision.movedim(0, -1).clone(memory_format=torch.contiguous_format)
        by_component[..., rows] = stand_in.movedim(0, -1)
        precision = by_component.movedim(-1, 0)
        factor = linalg.factorise_identity_plus(R, precision)

    return factor, indefinite, precision


@dataclass(eq=False)
class _Tasks:
    """M objectives log p(y|f̂ + Rv) − ½‖v‖² in v.

    `select_arguments` stores its last result in this object.
    """

    likelihood: Likelihood
    y: Tensor  # (M, …)
    f: Tensor  # f̂ (M, C)
    R: Tensor  # (M, C, C)
    last_rows: Tensor | None = None
    last_arguments: tuple[Tensor, Tensor, Tensor] | None = None

    def compute_values(self, v: Tensor) -> Tensor:
        """Compute the objectives (M,) at v (M, C), −∞ where they are not a number."""
        log_prob = self.likelihood.log_prob(self.y, self.f + linalg.multiply_root(self.R, v))
        return torch.nan_to_num(log_prob - 0.5 * linalg.dot(v, v), nan=-torch.inf)

    def select_arguments(self, rows: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """Return y, f̂ and R of some tasks, by number (m,); None: of all tasks.

        The last result is stored, because an ascent asks for the same tasks in every round: for the
        same tensor `rows`, which must not be changed in place.
        """
        if rows is None:
            return self.y, self.f, self.R
        if self.last_arguments is None or self.last_rows is not rows:
            # Rows are the last dimension here, so R stays component-major.
            R = self.R.movedim(0, -1).index_select(-1, rows).movedim(-1, 0)
            self.last_rows = rows
            self.last_arguments = (self.y[rows], linalg.select_rows(self.f, rows), R)
        return self.last_arguments

    def evaluate(self, v: Tensor, rows: Tensor | None) -> linalg.Evaluation:
        """Compute objectives, gradients and the solve of Newton's steps at v (m, C).

        rows (m,): the numbers of the tasks; None: all tasks.
        """
        y, f, R = self.select_arguments(rows)
        f_tilde = f + linalg.multiply_root(R, v)
        log_prob, score, precision = _compute_derivatives_with_curvature(
            self.likelihood, y, f_tilde, for_step=True
        )
        factor, _, _ = _factorise_with_fallback(self.likelihood, f_tilde, R, precision, score)
        value = log_prob - 0.5 * linalg.dot(v, v)
        return linalg.Evaluation(value, linalg.multiply_root_transposed(R, score) - v, factor.solve)
