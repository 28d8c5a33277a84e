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
STEP_MARGIN = 0.1  # the least pivot of I + RᵀΛR on which a single Newton step is trusted
PUSH = 0.05  # away from a saddle, in standard deviations of f
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
        return self.likelihood + self.prior + self.curvature

    def map(self, function: Callable[[Tensor], Tensor]) -> Increments:
        """Each of the three, reshaped or cast."""
        return replace(
            self,
            likelihood=function(self.likelihood),
            prior=function(self.prior),
            curvature=function(self.curvature),
        )


class Evaluated(NamedTuple):
    """One evaluation of M tasks."""

    fit: Tensor  # log p(y|f̃) (M,)
    shift: Tensor  # −½‖v‖²: the loss of data and prior together (M,)
    curvature: Tensor  # −½ log|I + ΛK| (M,)
    pull: Tensor  # u with f̃ − f̂ = K u (M, C)
    fallback: Tensor  # Fisher in place of an indefinite observed precision (M,) bool
    converged: Tensor  # (M,) bool

    @property
    def total(self) -> Tensor:
        return (self.fit + self.shift).add_(self.curvature)


class Rule(Protocol):
    """(likelihood, y (M, …), f̂ (M, C), R (M, C, C)) -> Evaluated.

    D (M, C, C), if given, is a root of the covariance that the determinant takes in place of K = R
    Rᵀ: the paper leaves the prior out of the curvature but not out of the refit.
    """

    def __call__(
        self, likelihood: Likelihood, y: Tensor, f: Tensor, R: Tensor, D: Tensor | None = None, /
    ) -> Evaluated: ...


def plug_in(
    likelihood: Likelihood, y: Tensor, f: Tensor, R: Tensor, D: Tensor | None = None
) -> Evaluated:
    """log p(y|f̂): as if f were known."""
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
    """θ̃ = θ̂ (ASSLA): log p(y|f̂) − ½ log|I + ΛK|."""
    base = plug_in(likelihood, y, f, R)
    R = R if D is None else D
    if curvature == EMPIRICAL:  # Λ = g gᵀ has rank one: |I + ΛK| = 1 + gᵀKg
        white = linalg.upper_times(R, likelihood.score(y, f))
        return base._replace(curvature=-0.5 * torch.log1p(linalg.dot(white, white)))
    precision = (
        likelihood.fisher(f) if curvature == FISHER else _derivatives(likelihood, y, f).precision
    )
    factor, fallback, _ = _safe_factor(likelihood, f, R, precision)
    return base._replace(curvature=-0.5 * factor.logdet(), fallback=fallback)


def one_step(
    likelihood: Likelihood, y: Tensor, f: Tensor, R: Tensor, D: Tensor | None = None
) -> Evaluated:
    """One Newton step from f̂: log p(y|f̂) + ½ gᵀK(I+ΛK)⁻¹g − ½ log|I + ΛK|, the quadratic model's
    value.

    Its gain has a pole where I + RᵀΛR turns singular, so the Fisher takes over before that
    (STEP_MARGIN), and is counted.
    """
    log_prob, score, precision = _derivatives(likelihood, y, f)
    factor, fallback, used = _safe_factor(likelihood, f, R, precision, margin=STEP_MARGIN)
    white = linalg.upper_times(R, score)
    v = factor.solve(white)
    gain = linalg.dot(white, v)  # gᵀδ with δ = R v
    shift = -0.5 * linalg.dot(v, v)
    # the quadratic model of log p at the step: log p + gᵀδ − ½ δᵀΛδ, and δᵀΛδ = gᵀδ − ‖v‖²
    fit = log_prob + 0.5 * gain - shift
    delta = linalg.lower_times(R, v)
    pull = score - (used @ delta.unsqueeze(-1)).squeeze(-1)
    found = Evaluated(fit, shift, -0.5 * factor.logdet(), pull, fallback, torch.ones_like(fallback))
    found = found if D is None else _with_determinant(likelihood, y, f, D, found)
    return _without_steps_outside(likelihood, y, f, R, D, f + delta, found)


def _without_steps_outside(
    likelihood: Likelihood,
    y: Tensor,
    f: Tensor,
    R: Tensor,
    D: Tensor | None,
    end: Tensor,
    found: Evaluated,
) -> Evaluated:
    """The mode in place of a Newton step whose end is not an allowed output, counted as a fallback.

    The quadratic model has no meaning there.
    """
    if not likelihood.has_boundary:
        return found
    rows = (~torch.isfinite(likelihood.log_prob(y, end))).nonzero().squeeze(-1)
    part = _Tasks(likelihood, y, f, R).take(rows)
    mode = at_mode(likelihood, *part, None if D is None else D[rows])
    _overwrite(found, rows, mode._replace(fallback=torch.ones_like(mode.fallback)))
    return found


def at_mode(
    likelihood: Likelihood, y: Tensor, f: Tensor, R: Tensor, D: Tensor | None = None
) -> Evaluated:
    """f̃ = the mode of log p(y|f) − ½(f−f̂)ᵀK⁻¹(f−f̂), with the observed precision there.

    At a mode I + RᵀΛR is positive semi-definite by the second-order condition. Where the boundary
    of the allowed outputs cuts the integral that the mode stands for, the likelihood has the
    answer.
    """
    boundary = likelihood.refit_at_boundary(y, f, R @ R.mT) if likelihood.has_boundary else None
    if boundary is None:
        return _inside(likelihood, y, f, R, D)
    no = torch.zeros_like(boundary.cut)
    fit, shift, curvature, pull = (part.clone() for part in boundary[1:])
    found = Evaluated(fit, shift, curvature, pull, no, ~no)
    rows = (~boundary.cut).nonzero().squeeze(-1)
    part = _Tasks(likelihood, y, f, R).take(rows)
    _overwrite(found, rows, _inside(likelihood, *part, None if D is None else D[rows]))
    return found


def _inside(likelihood: Likelihood, y: Tensor, f: Tensor, R: Tensor, D: Tensor | None) -> Evaluated:
    """The refit whose mode is inside the allowed outputs."""
    found = _highest(likelihood, y, f, R)
    if D is None:
        return found
    end = f + linalg.lower_times(R, linalg.upper_times(R, found.pull))
    return _with_determinant(likelihood, y, end, D, found)


def _with_determinant(
    likelihood: Likelihood, y: Tensor, f: Tensor, D: Tensor, found: Evaluated
) -> Evaluated:
    """The curvature increment −½ log|I + DᵀΛ(y, f)D| in place of the refit's own."""
    factor, fallback, _ = _safe_factor(likelihood, f, D, _derivatives(likelihood, y, f).precision)
    return found._replace(curvature=-0.5 * factor.logdet(), fallback=found.fallback | fallback)


def _highest(likelihood: Likelihood, y: Tensor, f: Tensor, R: Tensor) -> Evaluated:
    """The highest of the modes that the likelihood's starts lead to."""
    starts = likelihood.starts(y, f, R)
    if not starts:
        return _climb(likelihood, y, f, R, torch.zeros_like(f))
    best = _from(likelihood, y, f, R, starts[0])
    for start in starts[1:]:
        other = _from(likelihood, y, f, R, start)
        rows = (other.fit + other.shift > best.fit + best.shift + 1e-12).nonzero().squeeze(-1)
        _overwrite(best, rows, Evaluated(*(part[rows] for part in other)))
    return best


def _from(likelihood: Likelihood, y: Tensor, f: Tensor, R: Tensor, v: Tensor) -> Evaluated:
    """The mode reached from v: v itself where it is one, by ascent elsewhere."""
    here, gradient = _finish(likelihood, y, f, R, v)
    done = linalg.dot(gradient, gradient) <= TOLERANCE**2 * (1 + linalg.dot(v, v))
    rows = (~(done & ~here.fallback)).nonzero().squeeze(-1)
    if rows.numel():
        part = _Tasks(likelihood, y, f, R).take(rows)
        _overwrite(here, rows, _climb(likelihood, *part, linalg.take(v, rows)))
    return here


def follow(likelihood: Likelihood, y: Tensor, f: Tensor, R: Tensor, pull: Tensor) -> Evaluated:
    """The mode that an ascent reaches from f̂ + K·pull, for example from the mode of a y nearby."""
    return _climb(likelihood, y, f, R, linalg.upper_times(R, pull), push=False)


def _overwrite(whole: Evaluated, rows: Tensor, some: Evaluated) -> None:
    """In place: the tensors are fresh and our own."""
    if rows.numel():
        for target, values in zip(whole, some, strict=True):
            target[rows] = values


def _climb(
    likelihood: Likelihood, y: Tensor, f: Tensor, R: Tensor, start: Tensor, push: bool = True
) -> Evaluated:
    """Newton ascent from `start`, which need not be near (nor good: where it is worse than v =
    0, that is taken).
    """
    tasks = _Tasks(likelihood, y, f, R)
    zero = torch.zeros_like(start)
    if push:
        value, origin = tasks.value(start), tasks.value(zero)
        start = torch.where((value >= origin).unsqueeze(-1), start, zero)
    ascent = linalg.newton_ascent(tasks.evaluate, start, tolerance=TOLERANCE)
    found = _finish(likelihood, y, f, R, ascent.point)[0]._replace(converged=ascent.converged)
    saddle = found.fallback.nonzero().squeeze(-1)
    if (
        push and saddle.numel()
    ):  # the observed curvature there is indefinite: not a maximum. Push off and go on
        part = tasks.take(saddle)
        point = linalg.take(ascent.point, saddle)
        again = _climb(likelihood, *part, point + PUSH * (1 + point.abs()), push=False)
        _overwrite(found, saddle, again)
    return found if push else found._replace(converged=found.converged & ~found.fallback)


def _finish(
    likelihood: Likelihood, y: Tensor, f: Tensor, R: Tensor, v: Tensor
) -> tuple[Evaluated, Tensor]:
    """The log density at f̂ + Rv and the gradient of the objective there."""
    end = linalg.lower_times(R, v).add_(f)
    log_prob, score, precision = _derivatives(likelihood, y, end)
    factor, fallback, _ = _safe_factor(likelihood, end, R, precision)
    found = Evaluated(
        log_prob,
        -0.5 * linalg.dot(v, v),
        -0.5 * factor.logdet(),
        score,
        fallback,
        torch.ones_like(fallback),
    )
    return found, linalg.upper_times(R, score).sub_(v)


def _derivatives(likelihood: Likelihood, y: Tensor, f: Tensor, step: bool = False) -> Derivatives:
    """log p, g and Λ.

    Where log p has kinks and no curvature (|y − f|), Λ is the Fisher if it is known, and g gᵀ
    otherwise.

    Exactly at a kink g may be zero: there the Fisher is found by quadrature, unless the answer is
    for a step.
    """
    found = likelihood.derivatives(y, f)
    if not likelihood.may_be_straight or bool(found.precision.any()) or not likelihood.straight(f):
        return found
    if likelihood.fisher_in_closed_form:
        return found._replace(precision=likelihood.fisher(f))
    g, flat = found.score, (found.score == 0).all(-1)
    stand_in = g.unsqueeze(-1) * g.unsqueeze(-2)
    if bool(flat.any()) and not step:
        stand_in[flat] = likelihood.fisher(f[flat])
    return found._replace(precision=stand_in)


def _safe_factor(
    likelihood: Likelihood,
    f: Tensor,
    R: Tensor,
    precision: Tensor,
    score: Tensor | None = None,
    margin: float = 0.0,
) -> tuple[linalg.IdentityPlus, Tensor, Tensor]:
    """I + RᵀΛR with the Fisher for Λ in the tasks where the given one makes it indefinite; which
    those are; the Λ used.

    For a step (score given) of a likelihood whose Fisher costs a quadrature, g gᵀ stands in: any
    positive one will do.
    """
    factor = linalg.identity_plus(R, precision, margin)
    bad = ~factor.positive
    if bool(bad.any()):
        rows = bad.nonzero().squeeze(-1)
        if score is not None and not likelihood.fisher_in_closed_form:
            g = score[rows]
            stand_in = g.unsqueeze(-1) * g.unsqueeze(-2)
        else:
            stand_in = likelihood.fisher(f[rows])
        major = precision.movedim(0, -1).clone(
            memory_format=torch.contiguous_format
        )  # keeps the component-major storage
        major[..., rows] = stand_in.movedim(0, -1)
        precision = major.movedim(-1, 0)
        factor = linalg.identity_plus(R, precision)
    return factor, bad, precision


@dataclass(eq=False)
class _Tasks:
    """M objectives log p(y|f̂ + Rv) − ½‖v‖² in v, whole or in part."""

    likelihood: Likelihood
    y: Tensor
    f: Tensor
    R: Tensor
    rows: Tensor | None = None
    part: tuple[Tensor, Tensor, Tensor] | None = None

    def value(self, v: Tensor) -> Tensor:
        """The objective alone; −∞ where it is not a number."""
        value = self.likelihood.log_prob(
            self.y, self.f + linalg.lower_times(self.R, v)
        ) - 0.5 * linalg.dot(v, v)
        return torch.nan_to_num(value, nan=-torch.inf)

    def take(self, rows: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        if rows is None:
            return self.y, self.f, self.R
        if self.part is None or self.rows is not rows:
            R = self.R.movedim(0, -1).index_select(-1, rows).movedim(-1, 0)
            self.rows, self.part = rows, (self.y[rows], linalg.take(self.f, rows), R)
        return self.part

    def evaluate(self, v: Tensor, rows: Tensor | None) -> linalg.Evaluation:
        y, f, R = self.take(rows)
        here = f + linalg.lower_times(R, v)
        log_prob, score, precision = _derivatives(self.likelihood, y, here, step=True)
        factor, _, _ = _safe_factor(self.likelihood, here, R, precision, score)
        return linalg.Evaluation(
            log_prob - 0.5 * linalg.dot(v, v), linalg.upper_times(R, score) - v, factor.solve
        )
