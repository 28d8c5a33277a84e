"""−½[log|S̃(θ̃)| − log|S(θ̂)|] of last-layer refits, with S the fitted structure (dense, kfac, diag).

The mode θ̃ and the other increments do not depend on the structure. S̃ sums the Fisher information
of the training rows at θ̃ and of the new row there, as a fit of the structure would. Each task has
sums of its own, so this is slower than the exact determinant, and only kfac and diag differ from
it.

Terms and symbols are those of `ssla.refit.weights`; the basis is that of `last_layer`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ssla.curvature import Structure
from ssla.curvature.jacobians import Features
from ssla.refit.weights.refit_rows import Block

if TYPE_CHECKING:
    from ssla.refit.weights.last_layer import LastLayerRefit
    from ssla.refit.weights.last_layer_group import Group


@dataclass(frozen=True, eq=False)
class StructureDeterminants:
    """Curvature increments of tasks at their modes by the fitted structure."""

    refit: LastLayerRefit

    @property
    def _empty(self) -> Structure:
        """Return the structure without data."""
        posterior = self.refit.posterior
        return posterior.statistics.curvature.zero(posterior.theta.numel())

    def _make_features(self, white: Tensor) -> Features:
        """Return the Jacobian of features φ = L_B φ' in their own coordinates, for φ' (b, F).

        A structure depends on the coordinates; an exact ratio of determinants does not.
        """
        return Features(white @ self.refit.basis.mT, self.refit.outputs)

    def _compute_logdet(self, sums: Structure, step: Tensor) -> float:
        """Compute log|S| with the determinants' prior at θ̂ + δ, for a step δ' (P,) in the basis.

        sums: the statistics of the rows. Raises NoFactorError if S is not positive definite.
        """
        refit = self.refit
        theta = refit.posterior.theta + refit.from_basis(step.unsqueeze(0)).squeeze(0)
        return sums.with_prior(refit.posterior.determinant_prior.precision(theta)).logdet()

    @cached_property
    def start(self) -> float:
        """Return log|S(θ̂)|, from the same rows in the same dtype as S̃; it is computed once."""
        likelihood = self.refit.posterior.likelihood
        sums = self._empty
        for block in self.refit.rows:
            precision = block.apply_weights(likelihood.fisher(block.f))
            sums = sums.add(self._make_features(block.x), precision, block.weights)
        return self._compute_logdet(sums, torch.zeros_like(self.refit.gradient))

    def __call__(self, group: Group, point: Tensor) -> Tensor:
        """Compute the increments of a group's tasks at points δ' (m, P): (m,).

        group: tasks of the same refit. Raises ValueError if S̃ is not positive definite, as under a
        flat prior.
        """
        posterior = self.refit.posterior
        sums = [self._empty for _ in point]
        for block, _, f in group.yield_outputs(point):
            J = self._make_features(block.x)
            for task in range(len(point)):
                sums[task] = self._add_rows(sums[task], J, block, f[:, task])

        f_new = group.f + group.push(point)
        fisher = posterior.likelihood.predictive.fisher(f_new)
        increments = []
        for task, step in enumerate(point):
            J = self._make_features(group.phi[task : task + 1])
            augmented = sums[task].add(J, fisher[task : task + 1], None)
            increments.append(-0.5 * (self._compute_logdet(augmented, step) - self.start))

        return torch.tensor(increments, dtype=torch.float64)

    def _add_rows(self, sums: Structure, J: Features, block: Block, f: Tensor) -> Structure:
        """Return the sums with a block of training rows whose outputs are f (b, C)."""
        precision = block.apply_weights(self.refit.posterior.likelihood.fisher(f.contiguous()))
        return sums.add(J, precision, block.weights)
