"""Refits of a last layer: thousands of tasks as a few matrix products over the features.

With f = φᵀΘ the outputs of n rows under m tasks are Φ Δ (n × mC), their scores come elementwise,
and the gradients of all tasks are one product with Φ again. Nothing is formed per task but its step
(P) and, for the determinant, its curvature (P×P):

    H(θ̃) − H(θ̂) = Σ_i φφᵀ ⊗ (Λ(y_i, f̃_i) − Λ(y_i, f̂_i)): vech(φφᵀ) is shared, so this too is one
    product.

Features are first brought to a basis in which the curvature's diagonal blocks average to the
identity. Pivots are then of the order of one, and log|H̃| − log|H| = Σ_j log(l̃_j²/l_j²) is a sum
of small terms, not a difference of large ones. What each trick brings: `last_layer_group`. The
same for one task and without tricks: `reference`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ssla.curvature.jacobians import Features
from ssla.curvature.structure import NoFactorError, no_factor
from ssla.data import as_inputs
from ssla.likelihoods import Likelihood
from ssla.refit.increments import FISHER, OBSERVED
from ssla.refit.weights.anderson import SHARED_STEPS, Found, Progress, ascend, finished
from ssla.refit.weights.contrasts import Contrasts
from ssla.refit.weights.last_layer_group import Base, Group, congruent, pairs, squared
from ssla.refit.weights.refit_rows import (
    Block,
    PriorChange,
    TrainingRows,
    check_seen,
    open_rows,
    square,
)
from ssla.refit.weights.solved import Options, Solved

if TYPE_CHECKING:
    from ssla.posterior import Posterior

SINGLE_MODE = (
    1e-4  # posterior standard deviations from the mode: single precision finds it that well
)
# The limits of single precision: `capped_exp` is exact up to e²², and squares of targets must not
# overflow.
SHARPEST_SINGLE, LARGEST_SINGLE = math.exp(22), 1e15
# rows × tasks × outputs worked on together: larger arrays do not fit the processor's cache
CACHE_ELEMENTS = 1 << 19


@dataclass(frozen=True, eq=False)
class LastLayerRefit:
    """All refits of one posterior's last layer at inputs x.

    `solve` takes any tasks (row of x, y).
    """

    posterior: Posterior
    options: Options
    rows: TrainingRows  # features in the basis
    features: Tensor  # of x, in the basis (N, F)
    f: Tensor  # f̂ at x (N, C)
    basis: Tensor  # L_B (F, F): φ' = L_B⁻¹φ, δ' = L_Bᵀδ
    gradient: Tensor  # g₀ = ∇(ℓ_D + log π)(θ̂) (P,)
    bases: tuple[Base, ...]  # the kind asked for first; the Fisher after it where they differ
    # the observed curvature at θ̂ is not positive definite: all tasks use the Fisher
    fallback: bool

    # --- sizes -----------------------------------------------------------------------------

    @property
    def law(self) -> Likelihood:
        """The likelihood of the new observation."""
        return self.posterior.likelihood.predictive

    @property
    def outputs(self) -> int:
        return self.f.shape[1]

    @property
    def tasks_at_once(self) -> int:
        size, P = self.posterior.memory_budget, self.gradient.numel()
        state = 8 * P * (3 * self.options.memory + 12)
        if self.rows.kept is None:  # a pass is expensive: as many tasks as the memory holds
            return max(size // 2 // state, 1)
        largest = max(block.f.shape[0] for block in self.rows)
        return max(min(CACHE_ELEMENTS // (largest * self.outputs), size // 2 // state), 8)

    @cached_property
    def prior(self) -> PriorChange:
        return PriorChange(self.posterior.bound_prior, self.posterior.theta)

    def original(self, point: Tensor) -> Tensor:
        """Steps δ' (m, P) of the basis in the coordinates of θ: δ = L_B⁻ᵀδ' for each output."""
        m = point.shape[0]
        parts = point.reshape(-1, self.basis.shape[0])
        solved: Tensor = torch.linalg.solve_triangular(self.basis.mT, parts.mT, upper=True)
        return solved.mT.reshape(m, -1)

    def to_basis(self, gradient: Tensor) -> Tensor:
        """A gradient (m, P) in the coordinates δ'."""
        parts = gradient.reshape(-1, self.basis.shape[0])
        solved: Tensor = torch.linalg.solve_triangular(self.basis, parts.mT, upper=False)
        return solved.mT.reshape(gradient.shape)

    def prior_gradient(self, point: Tensor) -> Tensor:
        """∇log π(θ̂ + δ) − ∇log π(θ̂) in the coordinates δ' (m, P), in the precision of `point`."""
        if not self.prior.gaussian:
            return self.to_basis(self.prior.gradient(self.original(point.double()))).to(point.dtype)
        parts = point.reshape(len(point), self.outputs, -1).movedim(1, 0)
        return -(parts @ self._prior_precision[point.dtype]).movedim(0, 1).reshape(point.shape)

    @cached_property
    def _prior_precision(self) -> dict[torch.dtype, Tensor]:
        """The precision of a Gaussian prior in the basis (C, F, F), in single and in double."""
        diagonal = torch.diag_embed(
            self.prior.bound.precision(self.prior.theta).reshape(self.outputs, -1)
        )
        half = torch.linalg.solve_triangular(self.basis, diagonal, upper=False)
        in_basis = torch.linalg.solve_triangular(self.basis, half.mT, upper=False)
        return {torch.float64: in_basis, torch.float32: in_basis.float()}

    @cached_property
    def _memo(self) -> dict[tuple[int, str], Tensor]:
        """Values of `remember`, by the id of a kept block and a name.

        A kept block lives as long as this refit, so no other block has its id.
        """
        return {}

    def remember(self, block: Block, what: str, compute: Callable[[], Tensor]) -> Tensor:
        """A value of a block, computed once where blocks are kept and a quarter of the memory
        budget holds all such values.
        """
        known = self._memo.get((id(block), what))
        if known is None:
            known = compute()
            used = sum(part.numel() * part.element_size() for part in (*self._memo.values(), known))
            if self.rows.kept is not None and used <= self.posterior.memory_budget // 4:
                self._memo[id(block), what] = known
        return known

    def in_kind(self, block: Block, kind: torch.dtype) -> Block:
        """A block in single or double precision."""
        if kind == torch.float64:
            return block

        def cast(what: str, value: Tensor) -> Tensor:
            return (
                self.remember(block, f"{what} {kind}", lambda: value.to(kind))
                if value.is_floating_point()
                else value
            )

        weights = None if block.weights is None else cast("weights", block.weights)
        return Block(cast("x", block.x), cast("f", block.f), cast("y", block.y), weights)

    @cached_property
    def holds_in_single(self) -> bool:
        """Whether the likelihood's derivatives fit single precision, which very small or large
        units of y do not.
        """
        likelihood = self.posterior.likelihood
        for block in self.rows:
            sharpest = float(likelihood.fisher(block.f).amax())
            largest = float(torch.maximum(block.f.abs().amax(), block.y.abs().amax()))
            if sharpest > SHARPEST_SINGLE or largest > LARGEST_SINGLE:
                return False
        return True

    def squares(self, block: Block, dtype: torch.dtype) -> Tensor:
        """vech(φφᵀ) of a block's rows (b, F(F + 1)/2)."""
        return self.remember(block, f"squares {dtype}", lambda: squared(block.x).to(dtype))

    def covariances(self, block: Block, base: Base) -> Tensor:
        """K = J H⁻¹ Jᵀ at a block's rows, its entries a ≤ b (pairs, b).

        Entries off the diagonal are doubled: their sum with ΔΛ is tr KΔΛ.
        """

        def compute() -> Tensor:
            K = base.operator.covariance(Features(block.x, base.outputs))
            return torch.stack([(1 + (a != b)) * K[:, a, b] for a, b in pairs(base.outputs)])

        return self.remember(block, f"{base.kind} {base.outputs}", compute)

    @cached_property
    def contrasts(self) -> Base | None:
        """The curvature in contrasts of classes, which has C − 1 outputs in place of C.

        None where the ratio of determinants would not be the same: other likelihoods, the Fisher in
        place of the observed curvature, and priors that differ by class.
        """
        prior, base, likelihood = self.prior, self.bases[0], self.posterior.likelihood
        temperature = likelihood.logit_temperature
        if temperature is None or not likelihood.softmax or likelihood.power != 1:
            return None
        if not prior.gaussian or base.kind != OBSERVED:
            return None
        precision = prior.bound.precision(prior.theta).reshape(self.outputs, -1)
        if not torch.equal(precision, precision[:1].expand_as(precision)):
            return None
        contrasts = Contrasts(self.outputs, temperature)
        return Base(
            base.kind,
            torch.linalg.cholesky(contrasts.of_blocks(base.matrix)),
            self.outputs - 1,
            contrasts,
        )

    # --- one group of tasks ----------------------------------------------------------------

    def solve(self, where: Tensor, y: Tensor, progress: Progress | None = None) -> Solved:
        """The three increments of tasks (row of x, y), each at its own mode.

        Tasks whose observed curvature is indefinite at the mode use the Fisher, and are counted.
        """
        base = self.bases[0]
        group = Group(self, base, where, y)
        found = self._ascend(group, progress)
        likelihood, prior = group.values(found.point)
        curvature, positive = group.curvature(found.point, self.contrasts or base)
        bad = (~positive).nonzero().squeeze(-1)
        if bad.numel() and base.kind == OBSERVED:
            curvature[bad], positive[bad] = group.take(bad).curvature(
                found.point[bad], self.bases[-1]
            )
        fallback = torch.ones_like(positive) if self.fallback else torch.zeros_like(positive)
        fallback[bad] = True
        converged = found.converged & positive & torch.isfinite(likelihood + prior + curvature)
        error = torch.zeros_like(curvature)
        return Solved(
            likelihood, prior, curvature, fallback, converged, found.steps, found.norm, error
        )

    def stuck(self, where: Tensor, y: Tensor) -> Tensor:
        """Never: f is linear in a last layer, and refits of it are quick."""
        return torch.zeros(len(where), dtype=torch.bool)

    def modes(self, where: Tensor, y: Tensor) -> Tensor:
        return self.posterior.theta + self.original(
            self._ascend(Group(self, self.bases[0], where, y)).point
        )

    def _ascend(self, group: Group, progress: Progress | None = None) -> Found:
        """The modes of all tasks, in three stages.

        First the shared preconditioner in single precision, where the rows are in memory; then the
        same in double; then each task's own Hessian, for tasks that have not converged. Classes
        (targets without rounding) may end after the first stage.
        """
        o = self.options
        point = group.start()
        found, rest, left = Found.nowhere(point), torch.arange(len(point)), o.max_steps
        if self.rows.kept is not None and self.holds_in_single:
            ends = o.tolerance >= SINGLE_MODE and not group.y.is_floating_point()
            rough, most = max(o.tolerance, SINGLE_MODE), min(SHARED_STEPS, left // 2)
            seen = progress if ends else None
            near = ascend(
                group.evaluate,
                point.float(),
                tolerance=rough,
                max_steps=most,
                memory=o.memory,
                progress=seen,
            )
            point = torch.where(torch.isfinite(near.point), near.point.double(), point)
            found, left = replace(near, point=point, norm=near.norm.double()), left - most
            rest = (~found.converged).nonzero().squeeze(-1) if ends else rest
        if rest.numel():
            most, part = min(SHARED_STEPS, left), group.take(rest)
            start = found.point[rest]
            later = ascend(
                part.evaluate,
                start,
                tolerance=o.tolerance,
                max_steps=most,
                memory=o.memory,
                progress=progress,
            )
            found, left = found.followed_by(rest, later), left - most
        newton = lambda tasks: group.take(tasks).evaluate_newton  # noqa: E731
        return finished(found, newton, tolerance=o.tolerance, max_steps=left, progress=progress)


def open_last_layer(posterior: Posterior, x: Any, options: Options, data: Any) -> LastLayerRefit:
    """Stage one: a pass over the data for gradient and curvature at θ̂, then everything that
    does not depend on y.
    """
    network, likelihood = posterior.network, posterior.likelihood
    C = network.outputs

    def prepare(inputs: Any) -> tuple[Tensor, Tensor]:
        f, J = network.linearise(inputs, posterior.theta)
        assert isinstance(J, Features)
        return J.double().phi, f.double()

    rows = open_rows(posterior, data, prepare)
    kinds = (OBSERVED, FISHER) if options.curvature == OBSERVED else (FISHER,)
    F = posterior.theta.numel() // C
    n, gradient = 0, torch.zeros(C * F, dtype=torch.float64)
    sums = {kind: torch.zeros(C * F, C * F, dtype=torch.float64) for kind in kinds}
    for block in rows:
        features = Features(block.x, C)
        n += block.y.shape[0]
        gradient += features.pull(block.weighted(likelihood.score(block.y, block.f)))
        for kind, total in sums.items():
            precision = (
                likelihood.fisher(block.f)
                if kind == FISHER
                else likelihood.precision(block.y, block.f)
            )
            total += features.gram(block.weighted(precision))
    check_seen(posterior, n, gradient)
    prior_precision = square(posterior.bound_prior.precision(posterior.theta))
    curvatures = {kind: total + prior_precision for kind, total in sums.items()}
    # The basis makes the average of the diagonal blocks the identity.
    mean_block = curvatures[FISHER].reshape(C, F, C, F).diagonal(dim1=0, dim2=2).mean(-1)
    basis, info = torch.linalg.cholesky_ex(mean_block)
    bases = []
    if not int(info):
        bases = [_factorise(kind, congruent(H, basis), C) for kind, H in curvatures.items()]
    usable = tuple(base for base in bases if base is not None)
    if not usable:
        raise NoFactorError(no_factor(prior_precision, " on the data to refit on"))
    parts = [
        prepare(network.cast(part))
        for part in network.chunks(as_inputs(x), posterior.memory_budget)
    ]
    return LastLayerRefit(
        posterior=posterior,
        options=options,
        rows=rows.changed(lambda block: block._replace(x=_whitened(block.x, basis))),
        features=_whitened(torch.cat([phi for phi, _ in parts]), basis),
        f=torch.cat([f for _, f in parts]),
        basis=basis,
        gradient=gradient + posterior.bound_prior.gradient(posterior.theta),
        bases=usable,
        fallback=usable[0].kind != options.curvature,
    )


def _whitened(phi: Tensor, basis: Tensor) -> Tensor:
    """φ' = L_B⁻¹φ for the rows of phi."""
    white: Tensor = torch.linalg.solve_triangular(basis, phi.mT, upper=False)
    return white.mT.contiguous()


def _factorise(kind: str, H: Tensor, outputs: int) -> Base | None:
    """H = L Lᵀ as a `Base`; None where it is not positive definite."""
    factor, info = torch.linalg.cholesky_ex(H)
    return None if int(info) else Base(kind, factor, outputs)
