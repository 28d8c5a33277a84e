"""Models with a few parameters, written by hand: SSLA with a real refit for every candidate.

These models are for studies of priors without a network: the paper's SSLA can be compared with a
known conjugate predictive. The terms:

    model       log p(row | θ), with θ (P,); the data D are n rows
    candidate   a row y whose predictive density is wanted, though it is not in the data
    ℓ, π        the log likelihood of the data, and the prior, which is any of `ssla.priors`
    θ̂, θ̃        the mode of ℓ + log π, and that with a candidate added to the data (the refit)
    H, H̃        minus the second derivatives of the same two objectives (P, P)
    increments  the three terms of the predictive:

    log p(y|D) ≈ [ℓ(θ̃) − ℓ(θ̂)] + log p(y|θ̃) + [log π(θ̃) − log π(θ̂)] − ½ [log|H̃(θ̃)| − log|H(θ̂)|]

The convention says where the prior enters: see `Posterior.with_prior`. Modes are found by Newton
steps on autograd derivatives in float64, for all candidates at once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.func import grad, jacrev, vmap

from ssla._checks import all_in_plain_torch, check_finite, check_name
from ssla.data import as_tensor
from ssla.maths import linalg
from ssla.network.layout import make_contiguous_layout
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
    """A model log p(row | θ) with its data and a prior.

    log_prob: see LogDensity. data: (n,) or (n, E), n ≥ 1 rows. start: (P,) with P ≤ LARGEST, a θ
    inside the support, near the mode. prior: over θ. convention: where the prior enters, "exact",
    "paper" or "additive". Raises ValueError for arguments that the model cannot use.

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
        """Convert data and start to float64 tensors and the prior to a Prior, and check them.

        Raises ValueError for shapes, values or a log_prob that the model cannot use.
        """
        check_name("convention", self.convention, CONVENTIONS)
        data = as_tensor(self.data).double()
        start = as_tensor(self.start).double()
        check_finite("data", data, "Drop those rows.")
        check_finite("start", start, "Give a θ inside the support.")
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

        if not bool(torch.isfinite(self._compute_objective(start))):
            raise ValueError(
                "The log posterior is not finite at start. Give a θ inside the support of "
                "likelihood and prior."
            )

    @cached_property
    def bound(self) -> BoundPrior:
        """Return the prior as a density of the P parameters of this model."""
        return self.prior.bind(make_contiguous_layout({"theta": self.start.shape}))

    @property
    def prior_of_objective(self) -> BoundPrior:
        """Return the prior in the objective of the modes: a flat one for the additive convention.

        In that convention θ̂ and θ̃ are modes of the likelihood alone.
        """
        if self.convention == ADDITIVE:
            return Flat().bind(make_contiguous_layout({"theta": self.start.shape}))
        return self.bound

    def _compute_log_probs(self, theta: Tensor) -> Tensor:
        """Return log p of every row of the data (n,) at θ (P,)."""
        return vmap(self.log_prob, in_dims=(0, None))(self.data, theta)

    def _compute_objective(self, theta: Tensor) -> Tensor:
        """Return ℓ(θ) + log π(θ), whose maximum is the mode: (P,) -> ()."""
        return self._compute_log_probs(theta).sum() + self.prior_of_objective.log_prob(theta)

    def _compute_data_curvature(self, theta: Tensor) -> Tensor:
        """Return −∇²ℓ(θ): (P,) -> (P, P)."""
        return -hessian(lambda t: self._compute_log_probs(t).sum())(theta)

    def _compute_prior_curvature(self, theta: Tensor, bound: BoundPrior) -> Tensor:
        """Return −∇² log π(θ) of a prior as a matrix: (P,) -> (P, P)."""
        precision = bound.precision(theta)  # (P,) for a diagonal one
        return torch.diag(precision) if precision.dim() == 1 else precision

    def _find_modes(self, starts: Tensor, rows: Tensor | None) -> Tensor:
        """Find the modes (k, P) of ℓ + log π from starts (k, P), by Newton steps.

        Each of the k searches is a task. rows (k,) or (k, E): the row that is added to the data of
        each task; None: no row. Raises ValueError if a mode is not found.
        """
        row_hessian = vmap(hessian(lambda t, row: self.log_prob(row, t)))
        row_gradient = vmap(grad(lambda t, row: self.log_prob(row, t)))
        prior = self.prior_of_objective

        def evaluate(points: Tensor, index: Tensor | None) -> linalg.Evaluation:
            """Return values, gradients and Newton solves of the tasks `index` at θ (m, P).

            index: the numbers (m,) of the tasks; None for all. NaN becomes a value of −∞ and a
            derivative of zero, so that the ascent rejects such a point.
            """
            value = vmap(self._compute_log_probs)(points).sum(1)
            gradient = vmap(grad(lambda t: self._compute_log_probs(t).sum()))(points)
            H = vmap(self._compute_data_curvature)(points)
            if rows is not None:
                added = rows if index is None else rows[index]
                value = value + vmap(self.log_prob)(added, points)
                gradient = gradient + row_gradient(points, added)
                H = H - row_hessian(points, added)

            # A bound prior takes one θ, so this is a loop over candidates: they are a few hundred.
            value = value + torch.stack([prior.log_prob(p) for p in points])
            gradient = gradient + torch.stack([prior.gradient(p) for p in points])
            H = H + torch.stack([self._compute_prior_curvature(p, prior) for p in points])
            factor = _factorise_for_ascent(torch.nan_to_num(H))
            return linalg.Evaluation(
                torch.nan_to_num(value, nan=-torch.inf),
                torch.nan_to_num(gradient),
                lambda b: torch.cholesky_solve(b.unsqueeze(-1), factor).squeeze(-1),
            )

        # 1e-11 is a guess, near the rounding error of float64.
        ascent = linalg.newton_ascent(evaluate, starts, tolerance=1e-11)
        if not bool(ascent.converged.all()):
            count = int((~ascent.converged).sum())
            raise ValueError(
                f"The mode was not found for {count} of {len(starts)} candidates: log p may have "
                "none there. Start closer, or choose another parameterisation (a logarithm for a "
                "positive parameter)."
            )

        return ascent.point

    @cached_property
    def mode(self) -> Tensor:
        """Return θ̂ (P,), the mode for the data alone; raise ValueError if it is not found."""
        return self._find_modes(self.start.unsqueeze(0), None)[0]

    def _convert_candidates(self, rows: Any) -> Tensor:
        """Return candidate rows as (k,) or (k, E) in float64.

        Raises ValueError unless they have the form of the rows of the data.
        """
        y = as_tensor(rows).double()
        if y.dim() != self.data.dim() or y.shape[1:] != self.data.shape[1:]:
            raise ValueError(
                f"Candidates must be rows like the data's, (k, …) = {('k', *self.data.shape[1:])}, "
                f"but are {tuple(y.shape)}."
            )
        return y

    def modes(self, rows: Any) -> Tensor:
        """Return θ̃ (k, P), the mode with one candidate added to the data, for each candidate.

        rows: the candidates, (k,) or (k, E). Raises ValueError if a mode is not found.
        """
        y = self._convert_candidates(rows)
        return self._find_modes(self.mode.expand(len(y), -1).clone(), y)

    def increments(self, rows: Any, refit: bool = True) -> Increments:
        """Return the three increments (k,) of log p(row | D), each candidate with its own refit.

        rows: the candidates, (k,) or (k, E). refit=False holds θ̃ = θ̂ (ASSLA). Raises ValueError
        if a mode is not found, or if the curvature at θ̂ is not positive definite.
        """
        y = self._convert_candidates(rows)
        hat = self.mode  # θ̂ (P,)
        tilde = self.modes(y) if refit else hat.expand(len(y), -1)  # θ̃ (k, P)
        # Differences are taken row by row, so that sums over n rows are never subtracted.
        data_change = (vmap(self._compute_log_probs)(tilde) - self._compute_log_probs(hat)).sum(1)
        likelihood = data_change + vmap(self.log_prob)(y, tilde)
        prior = torch.stack([self.bound.log_prob(t) for t in tilde]) - self.bound.log_prob(hat)
        curvature = self._compute_curvature_increment(hat, tilde, y)
        return Increments(likelihood, prior, curvature, self.convention)

    def _compute_curvature_increment(self, hat: Tensor, tilde: Tensor, y: Tensor) -> Tensor:
        """Return −½ log|H⁻¹H̃| (k,) by log1p of the eigenvalues of L⁻¹(H̃ − H)L⁻ᵀ, with H = LLᵀ.

        H is the curvature at θ̂ of the data, and H̃ that at θ̃ with the candidate; the exact
        convention adds the prior to both. hat: θ̂ (P,). tilde: θ̃ (k, P). y: the candidates, (k,)
        or (k, E). Raises ValueError if H is not positive definite. The result is NaN where H̃ is
        not.
        """
        row_hessian = vmap(hessian(lambda t, row: self.log_prob(row, t)))
        change = vmap(self._compute_data_curvature)(tilde) - self._compute_data_curvature(hat)
        change = change - row_hessian(tilde, y)
        H = self._compute_data_curvature(hat)
        if self.convention == EXACT:
            change = change + torch.stack(
                [self._compute_prior_curvature(t, self.bound) for t in tilde]
            )
            change = change - self._compute_prior_curvature(hat, self.bound)
            H = H + self._compute_prior_curvature(hat, self.bound)

        factor, info = torch.linalg.cholesky_ex(H)
        if int(info):
            raise ValueError(
                "The curvature at the mode is not positive definite: the data do not determine "
                "every parameter. Give a proper prior with convention='exact'."
            )

        # L⁻¹ (H̃ − H) L⁻ᵀ: the second solve takes the transpose of the first.
        half_whitened = torch.linalg.solve_triangular(factor, change, upper=False)
        whitened = torch.linalg.solve_triangular(factor, half_whitened.mT, upper=False)
        return -0.5 * torch.log1p(torch.linalg.eigvalsh((whitened + whitened.mT) / 2)).sum(-1)


def hessian(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return the function that computes ∇² (P, P) of a scalar function in its first argument (P,).

    Reverse mode is used twice: forward mode would import deprecated parts of torch.
    """
    second_derivative: Callable[..., Tensor] = jacrev(grad(function))
    return second_derivative


def _factorise_for_ascent(H: Tensor) -> Tensor:
    """Return a lower factor (k, P, P) of H, or of a positive definite matrix near H.

    The factor is that of Cholesky. Where H is not positive definite, Q|λ|Qᵀ takes its place, with
    the eigenvectors Q and the eigenvalues λ of H, so that a Newton step always ascends.
    """
    factor: Tensor
    factor, info = torch.linalg.cholesky_ex(H)
    indefinite = info != 0
    if bool(indefinite.any()):
        values, vectors = torch.linalg.eigh(H[indefinite])
        # An eigenvalue near zero would give a step without bound. 1e-8 is a guess; 1e-300 makes an
        # H of zeros invertible.
        values = values.abs().clamp_min(1e-8 * values.abs().amax(-1, keepdim=True) + 1e-300)
        factor[indefinite] = torch.linalg.cholesky((vectors * values.unsqueeze(-2)) @ vectors.mT)

    return factor
