"""Every Gaussian prior in a box of means and precisions, as a family of predictives.

In an eigenbasis of S with one precision τ for each block, f̂ and K at any prior are sums over P
eigenvalues:

    K(τ) = Σ_p z_p z_pᵀ/(λ_p + τ_p),      f̂(τ, m) = f̂₀ + Σ_p z_p (g_p − τ_p (θ₀ − m)_p)/(λ_p + τ_p)

so each input may look at its own prior. f̂ is linear in m: over a box of means it sweeps an
interval c(τ) ± r(τ), so a family over P means is one over a single number s ∈ [−1, 1], and f̂ = c +
s r. What is left to optimise is s and one precision a layer.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ssla.curvature.jacobians import DenseJacobian, Features, Jacobian, LayerJacobian
from ssla.curvature.structure import Eigenbasis
from ssla.data import Inputs
from ssla.diagnostics.predictive_sets import Bounds, Functional, Worst
from ssla.fitting.evidence import ThinBasis, eigenbasis, thin_basis
from ssla.likelihoods import Likelihood
from ssla.predictive import Predictive, from_marginal
from ssla.priors import EXACT, Box
from ssla.refit import Refit
from ssla.values import Marginal

if TYPE_CHECKING:
    from ssla.posterior import Posterior

MOST_CORNERS = 64
# quasi-random points for each side of the box, beside the corners, from which a search may start
SPREAD = 16
STARTS = 3  # of them, from which it does
FINE, COARSE = (
    1e-7,
    1e-4,
)  # of a side of the box: where the search ends, for closed-form predictives and for others
MOST_ROUNDS = 150


@dataclass(frozen=True, eq=False)
class BoxMembers:
    """Coordinates u ∈ [0, 1]^d: log precisions by layer, then the place s between the lowest
    and the highest f̂.
    """

    names: tuple[str, ...]  # of the coordinates
    notes: tuple[str, ...]
    likelihood: Likelihood
    refit: str | Refit
    mean: Tensor  # f̂₀ (N, C) at θ₀
    jacobian: Tensor  # J (N, C, P)
    basis: Eigenbasis | ThinBasis
    gradient: Tensor  # ∇ℓ at θ₀ (P,)
    theta: Tensor  # θ₀
    middle: Tensor  # of the box of means (P,)
    half: Tensor  # its half widths (P,)
    groups: Tensor  # of the basis's coordinates
    low: Tensor  # log precisions (G,)
    high: Tensor
    moves: bool

    open = True

    @staticmethod
    def of(
        posterior: Posterior, x: Inputs, box: Box, convention: str, refit: str | Refit
    ) -> BoxMembers:
        if convention != EXACT:
            raise ValueError(
                f"A box of priors is for the exact convention, but it is {convention!r}. Give a "
                "list of priors."
            )
        layout, notes = posterior.network.layout, []
        low, high = box.precisions(layout)
        a, b = box.means(layout)
        layers = layout.layers()
        groups = torch.zeros(layout.size, dtype=torch.long)
        shared = (
            bool((low == low[0]).all())
            and bool((high == high[0]).all())
            and not isinstance(box.precision, dict)
        )
        if not shared:
            for i, names in enumerate(layers.values()):
                for name in names:
                    groups[layout.positions[name]] = i
        firsts = [int((groups == g).nonzero()[0]) for g in range(int(groups.max()) + 1)]
        if not (torch.equal(low, low[firsts][groups]) and torch.equal(high, high[firsts][groups])):
            raise ValueError(
                "A box of priors needs one range of precisions for each layer: weight and bias "
                "alike."
            )
        curvature = posterior.sums.curvature
        basis: Eigenbasis | ThinBasis | None = eigenbasis(curvature, torch.ones_like(low), groups)
        if basis is None and len(firsts) == 1:
            basis = thin_basis(curvature, layout.size)
        if basis is None:
            raise ValueError(
                "A box with different precisions by layer needs structure='kfac' or 'diag', but "
                f"this posterior has structure={curvature.name!r}. Give one range for all layers, "
                "or fit with structure='kfac'."
            )
        moves = posterior.follows_prior
        if not moves:
            notes.append(
                "θ̂ does not move with the prior here, so the range of means has no influence"
            )
        if moves and posterior.network.outputs > 1 and bool((a < b).any()):
            raise ValueError(
                "A range of means is for networks with one output. Give fixed means, or a list of "
                "priors."
            )
        parts = [(f.double(), dense_jacobian(J)) for f, J in posterior.linearised(x)]
        labels = (
            [f"precision of {layer or 'network'}" for layer in layers]
            if not shared
            else ["precision"]
        )
        return BoxMembers(
            tuple(labels + ["place between the lowest and the highest f̂"] * moves),
            tuple(notes),
            posterior.likelihood,
            refit,
            torch.cat([f for f, _ in parts]),
            torch.cat([J for _, J in parts]),
            basis,
            posterior.sums.gradient,
            posterior.mean,
            (a + b) / 2,
            (b - a) / 2,
            groups
            if len(basis.values) == layout.size
            else torch.zeros(len(basis.values), dtype=torch.long),
            low[firsts].log(),
            high[firsts].log(),
            moves,
        )

    @property
    def rows(self) -> int:
        return len(self.mean)

    @cached_property
    def _rotated(self) -> tuple[Tensor, Tensor, Tensor]:
        """J Q (N, C, P), Qᵀ∇ℓ and Qᵀ(θ₀ − middle) (P,); k + P in place of P for a thin basis."""
        turn = self.basis.rotated
        return turn(self.jacobian), turn(self.gradient), turn(self.theta - self.middle)

    def marginal(self, u: Tensor, rows: Tensor) -> Marginal:
        """f̂ and K of each task under its own prior.  u (T, d), rows (T,) -> (T, C), (T, C, C)."""
        Z, g, q = self._rotated
        Z = Z[rows]
        levels = (self.low + (self.high - self.low) * u[:, : len(self.low)]).exp()
        tau = levels[:, self.groups]  # (T, P)
        h = self.basis.values + tau
        K = (Z / h[:, None]) @ Z.mT
        f = self.mean[rows]
        if self.moves:
            f = f + (Z @ ((g - tau * q) / h).unsqueeze(-1)).squeeze(-1)
            sweep = self.basis.restored(Z * (tau / h)[:, None])  # ∂f̂/∂m (T, C, P)
            f = f + (2 * u[:, -1:] - 1) * (sweep.abs() * self.half).sum(-1)
        return Marginal(f, K)

    def predictive(self, u: Tensor, rows: Tensor) -> Predictive:
        with warnings.catch_warnings():
            warnings.simplefilter(
                "ignore", UserWarning
            )  # of rows without an integral on the way to an extreme
            return from_marginal(self.likelihood, *self.marginal(u, rows), self.refit)

    def bounds(self, functional: Functional, argument: Tensor) -> Bounds:
        count, each = argument.shape
        rows = torch.arange(count).repeat_interleave(each)
        at = argument.reshape(-1, 1)

        def value(u: Tensor) -> Tensor:
            return functional(self.predictive(u, rows), at).squeeze(1)

        known = torch.stack([functional(p, argument).flatten() for p in self._first])
        low = -self._highest(lambda u: -value(u), -known)[1]
        high = self._highest(value, known)[1]
        return Bounds(low.reshape(count, each), high.reshape(count, each))

    def start(self) -> list[Predictive]:
        return self._first[: min(2**self._size, MOST_CORNERS)]

    def worst(self, functional: Callable[[Predictive], Tensor]) -> Worst:
        rows = torch.arange(self.rows)
        known = -torch.stack([functional(p) for p in self._first])
        u, value = self._highest(lambda u: -functional(self.predictive(u, rows)), known)
        return Worst(self.predictive(u, rows), -value)

    @property
    def _size(self) -> int:
        """d."""
        return len(self.low) + self.moves

    @cached_property
    def _places(self) -> Tensor:
        """Where a search may start: the corners, then points spread inside (k, d)."""
        corners = list(
            itertools.islice(itertools.product((0.0, 1.0), repeat=self._size), MOST_CORNERS)
        )
        inside = torch.quasirandom.SobolEngine(self._size).draw(
            SPREAD * self._size, dtype=torch.float64
        )
        return torch.cat([torch.tensor(corners, dtype=torch.float64), inside])

    @cached_property
    def _first(self) -> list[Predictive]:
        """The members at those places, shared by every question."""
        rows = torch.arange(self.rows)
        return [self.predictive(place.expand(self.rows, -1), rows) for place in self._places]

    def _highest(self, value: Callable[[Tensor], Tensor], known: Tensor) -> tuple[Tensor, Tensor]:
        """The maxima of T functions over [0, 1]^d at once: from the best starts (known (k, T)),
        each by a compass search.
        """
        found = [
            self._climbed(value, values, place)
            for values, place in zip(*known.topk(STARTS, 0), strict=True)
        ]
        best_u, best = found[0]
        for u, height in found[1:]:
            best_u, best = (
                torch.where((height > best)[:, None], u, best_u),
                torch.maximum(height, best),
            )
        return best_u, best

    def _climbed(
        self, value: Callable[[Tensor], Tensor], best: Tensor, place: Tensor
    ) -> tuple[Tensor, Tensor]:
        best_u = self._places[place]
        step = torch.full_like(best, 0.25)
        end = FINE if self.likelihood.quadratic else COARSE
        for _ in range(MOST_ROUNDS):
            gained = torch.zeros_like(best, dtype=torch.bool)
            for j, sign in itertools.product(range(self._size), (1.0, -1.0)):
                trial = best_u.clone()
                trial[:, j] = (trial[:, j] + sign * step).clamp(0, 1)
                best_u, best, better = _better(value, best_u, best, trial)
                gained |= better
            step = torch.where(gained, step, step / 2)
            if float(step.max()) < end:
                break
        return best_u, best


def _better(
    value: Callable[[Tensor], Tensor], best_u: Tensor, best: Tensor, trial: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    new = value(trial)
    better = new > best
    return torch.where(better[:, None], trial, best_u), torch.where(better, new, best), better


def dense_jacobian(J: Jacobian) -> Tensor:
    """J (B, C, P) in float64, built."""
    if isinstance(J, LayerJacobian):
        J = J.dense()
    if isinstance(J, DenseJacobian):
        return J.values.double()
    assert isinstance(J, Features)
    phi = J.with_ones().double()
    blocks = torch.einsum("bf,cd->bcdf", phi, torch.eye(J.outputs, dtype=torch.float64))
    return blocks.reshape(len(phi), J.outputs, J.size)
