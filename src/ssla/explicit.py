"""Models with a few parameters, written by hand: SSLA with a real refit for every candidate.

For studies of priors without a network: the model is log p(row | θ), the data are rows, the prior
is any of `ssla.priors`. Modes are found by Newton steps on autograd derivatives in float64, for all
candidates at once; the curvature is the observed one, of the data and (by convention) of the prior.
This is the paper's SSLA, for models with a known conjugate predictive:

    log p(y|D) ≈ [ℓ(θ̃) − ℓ(θ̂)] + log p(y|θ̃) + [log π(θ̃) − log π(θ̂)] − ½ [log|H̃(θ̃)| −
    log|H(θ̂)|]
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.func import grad, jacrev, vmap

from ssla._checks import all_in_plain_torch, finite, one_of
from ssla.data import as_tensor
from ssla.maths import linalg
from ssla.network.layout import contiguous_layout
from ssla.priors import ADDITIVE, CONVENTIONS, EXACT, BoundPrior, Flat, Prior, as_prior
from ssla.refit.increments import Increments

LARGEST = 50  # parameters: more would make dense Hessians for every candidate too expensive

LogDensity = Callable[[Tensor, Tensor], Tensor]
"""log p(row | θ): one row (a number, or a vector such as (x…, y)) and θ (P,) -> a scalar, in
torch.
"""


@all_in_plain_torch
@dataclass(frozen=True, eq=False)
class ExplicitModel:
    """log p(row | θ) with data and a prior.

    log_prob: see LogDensity; data (n,) or (n, E); start (P,): a θ inside the support, near the
    mode; prior over θ.

    >>> import torch, ssla
    >>> def poisson(y, t):
    ...     return y * t[0].log() - t[0] - torch.lgamma(y + 1)
    >>> gamma = ssla.priors.Gamma(6.0, 2.0, link="identity")
    >>> model = ExplicitModel(poisson, [2.0, 4, 3, 0, 5], [3.0], gamma)
    >>> model.increments([0.0, 3.0, 8.0]).total                                   # doctest: +SKIP
    """

    log_prob: LogDensity
    data: Any
    start: Any
    prior: Prior
    convention: str = EXACT

    def __post_init__(self) -> None:
        one_of("convention", self.convention, CONVENTIONS)
        data, start = as_tensor(self.data).double(), as_tensor(self.start).double()
        finite("data", data, "Drop those rows.")
        finite("start", start, "Give a θ inside the support.")
        if start.dim() != 1 or not 1 <= start.numel() <= LARGEST:
            raise ValueError(
                f"start must be a vector of 1 to {LARGEST} parameters, but has shape "
                f"{tuple(start.shape)}. For a network use ssla.fit."
            )
        if data.dim() not in (1, 2) or not len(data):
            raise ValueError(
                "data must be (n,) or (n, E) with at least one row, but has shape "
                f"{tuple(data.shape)}."
            )
        object.__setattr__(self, "data", data)
        object.__setattr__(self, "start", start)
        object.__setattr__(self, "prior", as_prior(self.prior))
        value = self.log_prob(data[0], start)
        if not isinstance(value, Tensor) or value.dim() != 0:
            raise ValueError(
                "log_prob(row, theta) must return a scalar tensor for one row. Index θ as "
                "theta[0], theta[1], …"
            )
        if not bool(torch.isfinite(self._objective(start))):
            raise ValueError(
                "The log posterior is not finite at start. Give a θ inside the support of "
                "likelihood and prior."
            )

    @cached_property
    def bound(self) -> BoundPrior:
        return self.prior.bind(contiguous_layout({"theta": self.start.shape}))

    @property
    def steering(self) -> BoundPrior:
        """The prior in the objective of the modes: none for the additive convention."""
        return (
            Flat().bind(contiguous_layout({"theta": self.start.shape}))
            if self.convention == ADDITIVE
            else self.bound
        )

    def _rows(self, theta: Tensor) -> Tensor:
        """log p of every row of the data (n,)."""
        return vmap(self.log_prob, in_dims=(0, None))(self.data, theta)

    def _objective(self, theta: Tensor) -> Tensor:
        return self._rows(theta).sum() + self.steering.log_prob(theta)

    def _data_curvature(self, theta: Tensor) -> Tensor:
        """−∇²ℓ (P, P)."""
        return -hessian(lambda t: self._rows(t).sum())(theta)

    def _prior_curvature(self, theta: Tensor, bound: BoundPrior) -> Tensor:
        T = bound.precision(theta)
        return torch.diag(T) if T.dim() == 1 else T

    def _climb(self, starts: Tensor, rows: Tensor | None) -> Tensor:
        """The modes of ℓ + log π (+ log p(row)) from starts (k, P)."""
        extra = None if rows is None else vmap(hessian(lambda t, y: self.log_prob(y, t)))
        slope = None if rows is None else vmap(grad(lambda t, y: self.log_prob(y, t)))
        prior = self.steering

        def evaluate(points: Tensor, index: Tensor | None) -> linalg.Evaluation:
            some = rows if rows is None or index is None else rows[index]
            value = vmap(self._rows)(points).sum(1)
            gradient = vmap(grad(lambda t: self._rows(t).sum()))(points)
            H = vmap(self._data_curvature)(points)
            if some is not None and extra is not None and slope is not None:
                value = value + vmap(self.log_prob)(some, points)
                gradient, H = gradient + slope(points, some), H - extra(points, some)
            # a bound prior takes one θ: a loop over candidates, which are a few hundred
            value = value + torch.stack([prior.log_prob(p) for p in points])
            gradient = gradient + torch.stack([prior.gradient(p) for p in points])
            H = H + torch.stack([self._prior_curvature(p, prior) for p in points])
            factor = _climbing_factor(torch.nan_to_num(H))
            return linalg.Evaluation(
                torch.nan_to_num(value, nan=-torch.inf),
                torch.nan_to_num(gradient),
                lambda b: torch.cholesky_solve(b.unsqueeze(-1), factor).squeeze(-1),
            )

        found = linalg.newton_ascent(evaluate, starts, tolerance=1e-11)
        if not bool(found.converged.all()):
            count = int((~found.converged).sum())
            raise ValueError(
                f"The mode was not found for {count} of {len(starts)} candidates: log p may have "
                "none there. Start closer, or choose another parameterisation (a logarithm for a "
                "positive parameter)."
            )
        return found.point

    @cached_property
    def mode(self) -> Tensor:
        """θ̂ (P,)."""
        return self._climb(self.start.unsqueeze(0), None)[0]

    def _candidates(self, rows: Any) -> Tensor:
        y = as_tensor(rows).double()
        if y.dim() != self.data.dim() or y.shape[1:] != self.data.shape[1:]:
            raise ValueError(
                f"Candidates must be rows like the data's, (k, …) = {('k', *self.data.shape[1:])}, "
                f"but are {tuple(y.shape)}."
            )
        return y

    def modes(self, rows: Any) -> Tensor:
        """θ̃ (k, P): the mode with each candidate of (k,) or (k, E) added to the data
        separately.
        """
        y = self._candidates(rows)
        return self._climb(self.mode.expand(len(y), -1).clone(), y)

    def increments(self, rows: Any, refit: bool = True) -> Increments:
        """The three increments of log p(row | D) for candidates (k,) or (k, E), each with its own
        refit.

        refit=False holds θ̃ = θ̂ (ASSLA).
        """
        y = self._candidates(rows)
        hat = self.mode
        tilde = self.modes(y) if refit else hat.expand(len(y), -1)
        # row by row, so that sums over n are never subtracted
        likelihood = (vmap(self._rows)(tilde) - self._rows(hat)).sum(1) + vmap(self.log_prob)(
            y, tilde
        )
        prior = torch.stack([self.bound.log_prob(t) for t in tilde]) - self.bound.log_prob(hat)
        return Increments(likelihood, prior, self._curvature(hat, tilde, y), self.convention)

    def _curvature(self, hat: Tensor, tilde: Tensor, y: Tensor) -> Tensor:
        """−½ log|H⁻¹H̃| by log1p of the eigenvalues of L⁻¹(H̃ − H)L⁻ᵀ."""
        own = vmap(hessian(lambda t, row: self.log_prob(row, t)))
        change = vmap(self._data_curvature)(tilde) - self._data_curvature(hat) - own(tilde, y)
        H = self._data_curvature(hat)
        if self.convention == EXACT:
            change = change + torch.stack([self._prior_curvature(t, self.bound) for t in tilde])
            change = change - self._prior_curvature(hat, self.bound)
            H = H + self._prior_curvature(hat, self.bound)
        factor, info = torch.linalg.cholesky_ex(H)
        if int(info):
            raise ValueError(
                "The curvature at the mode is not positive definite: the data do not determine "
                "every parameter. Give a proper prior with convention='exact'."
            )
        half = torch.linalg.solve_triangular(factor, change, upper=False)
        white = torch.linalg.solve_triangular(factor, half.mT, upper=False)
        return -0.5 * torch.log1p(torch.linalg.eigvalsh((white + white.mT) / 2)).sum(-1)


def hessian(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """∇² in the first argument, by reverse mode twice (forward mode would import deprecated
    parts of torch).
    """
    found: Callable[..., Tensor] = jacrev(grad(function))
    return found


def _climbing_factor(H: Tensor) -> Tensor:
    """Cholesky of H (k, P, P); where H is not positive definite, of Q|λ|Qᵀ, so that the step is
    an ascent direction.
    """
    factor, info = torch.linalg.cholesky_ex(H)
    bad = info != 0
    if bool(bad.any()):
        values, vectors = torch.linalg.eigh(H[bad])
        values = values.abs().clamp_min(1e-8 * values.abs().amax(-1, keepdim=True) + 1e-300)
        factor[bad] = torch.linalg.cholesky((vectors * values.unsqueeze(-2)) @ vectors.mT)
    found: Tensor = factor
    return found
