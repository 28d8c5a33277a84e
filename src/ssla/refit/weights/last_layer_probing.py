"""tr[log(I + A) − A] of many refits by random probes, with a Gauss quadrature over the eigenvalues
of A for each.

Slower than a sketch (`last_layer_sketch`), and exact as there are more probes, whatever the
eigenvalues.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from ssla.refit.weights.last_layer_blocks import SharedBlocks
from ssla.refit.weights.last_layer_curvature import FEW_PROBES
from ssla.refit.weights.last_layer_sketch import remainder
from ssla.refit.weights.refit_rows import Block

if TYPE_CHECKING:
    from ssla.refit.weights.last_layer_products import Group

MOST_NODES = 4  # a guess: of the quadrature over eigenvalues
# The error of the quadrature over the change by its last node, with two nodes and with more
# (measured: at most; 2,000 rows, 128 features, 10 classes).
FIRST_QUADRATURE, QUADRATURE = 2.0, 0.25
SINGULAR = 1e-6  # a guess: of the pivots of a matrix of moments: smaller ones are rounding
GROUPS = 16  # a guess: of probes, for the standard error
AT_ONCE = 1 << 26  # a guess: bytes of the probes of all tasks
# Guesses: of the first two rounds; each later round has as many as all before it.
FIRST_PROBES, MORE_PROBES = 2, 6


class NewRow(NamedTuple):
    """The change of H⁻¹ by the new row, in the outputs of that row.

    H₁⁻¹ = H⁻¹ − Uᵀ G U, and (I − UᵀBJ) w ~ N(0, H₁⁻¹) for w ~ N(0, H⁻¹).
    """

    explained: Tensor  # G = (I + ΛK)⁻¹Λ (m, C, C)
    shrink: Tensor  # B with B + Bᵀ − BKBᵀ = G (m, C, C)

    @staticmethod
    def of(K: Tensor, precision: Tensor) -> NewRow:
        """Compute G and B of m new rows from K and Λ (m, C, C).

        With K = RRᵀ and RᵀΛR = E diag(μ) Eᵀ, RᵀGR has μ/(1 + μ) and RᵀBR has 1 − (1 + μ)^{-½} in
        place of μ.
        """
        values, vectors = torch.linalg.eigh(K)
        size = values.clamp_min(0).sqrt()
        R = vectors * size.unsqueeze(-2)
        # The pseudo-inverse R⁺ᵀ: K may be singular.
        least = 1e-7 * size.amax(-1, keepdim=True)
        inverse_root = vectors * torch.where(size > least, 1 / size, 0.0).unsqueeze(-2)
        white = R.mT @ precision @ R
        mu, E = torch.linalg.eigh((white + white.mT) / 2)
        # Below −1 there is no determinant: that task is flagged elsewhere.
        mu = mu.clamp_min(-0.999)
        directions = inverse_root @ E

        def with_eigenvalues(eigenvalues: Tensor) -> Tensor:
            """Return the matrix in the new row's outputs with these eigenvalues in place of μ (m,
            C).
            """
            product: Tensor = (directions * eigenvalues.unsqueeze(-2)) @ directions.mT
            return product

        return NewRow(with_eigenvalues(mu / (1 + mu)), with_eigenvalues(1 - (1 + mu).rsqrt()))

    def take(self, tasks: Tensor) -> NewRow:
        """Return the new rows of some tasks."""
        return NewRow(self.explained[tasks], self.shrink[tasks])


@dataclass(frozen=True, eq=False)
class Probing:
    """tr[log(I + A) − A] of m tasks by random probes: rounds of them, until the error is small."""

    group: Group
    point: Tensor
    new: NewRow
    trace: Tensor  # tr A (m,)
    target: Tensor  # the standard error in log density at which probing ends (m,)

    def run(self) -> tuple[Tensor, Tensor, Tensor]:
        """Estimate the remainder of all tasks.

        Returns the estimates (m,), where I + A is positive definite as far as the probes show (m,),
        and the errors (m,).
        """
        shared = self.group.refit.shared
        assert not isinstance(shared, SharedBlocks)
        m, probes = len(self.point), shared.probes
        value = torch.zeros(m, dtype=torch.float64)
        error = torch.zeros(m, dtype=torch.float64)
        active = torch.arange(m)
        used = 0
        rounds: list[list[Tensor]] = [[] for _ in range(m)]  # moments of each task
        while active.numel() and used < len(probes):
            count = {0: FIRST_PROBES, FIRST_PROBES: MORE_PROBES}.get(used, used)
            if len(probes) < FEW_PROBES:  # all there are: no error is left
                count = len(probes)
            fresh = probes[used : used + count]
            self._add_round(fresh, active, rounds, same_nodes=used > FIRST_PROBES)
            used += len(fresh)
            estimates = [
                estimate_from_rounds(rounds[task], float(self.trace[task]))
                for task in active.tolist()
            ]
            by_column = torch.tensor(estimates, dtype=torch.float64).unbind(1)
            value[active], spread, quadrature = by_column
            if used == FIRST_PROBES < len(probes):
                spread = pool_standard_errors(value[active], spread)
            spread *= shared.missing(used)
            error[active] = (spread**2 + quadrature**2).sqrt()
            active = active[(spread > 2 * self.target[active]) & torch.isfinite(value[active])]
        return value, torch.isfinite(value), error

    def _add_round(
        self, probes: Tensor, active: Tensor, rounds: list[list[Tensor]], same_nodes: bool
    ) -> None:
        """Append the moments of fresh probes (s, P) to the rounds of the active tasks.

        same_nodes: with as many Gauss nodes as the round before, so that moments can be averaged.
        """
        probe_bytes = 6 * probes.numel() * probes.element_size()
        for tasks in active.split(max(AT_ONCE // probe_bytes, 1)):
            nodes = 0
            if same_nodes:
                nodes = max(rounds[task][-1].shape[1] // 2 for task in tasks.tolist())
            moments = self.moments(probes, tasks, nodes)
            for task, moments_of_task in zip(tasks.tolist(), moments, strict=True):
                rounds[task].append(moments_of_task)

    def moments(self, probes: Tensor, tasks: Tensor, nodes: int) -> Tensor:
        """Compute wᵀΔH (H₁⁻¹ΔH)^k w for w ~ N(0, H₁⁻¹), k = 0, 1, … of some tasks (m,).

        probes: s vectors w₀ ~ N(0, H⁻¹) (s, P), the same for all tasks. nodes: the number j of
        Gauss nodes; 0: as many as the error needs. Returns moments (m, s, 2) or (m, s, 2j + 1).
        """
        group = self.group.take(tasks)
        s, C = len(probes), group.refit.outputs
        at_x = torch.einsum("scf,mf->msc", probes.reshape(s, C, -1), group.phi)
        shrink = self.new.shrink[tasks].to(at_x.dtype)
        w = probes - torch.einsum("msc,mdc,mdp->msp", at_x, shrink, group.pulled)
        moments: list[Tensor] = []
        for count in range(1, MOST_NODES + 1):
            form, r = self.times_change(tasks, w)
            assert r is not None
            w = self.solve(tasks, r)
            # `form` is the last moment of the round before, computed again with `pull`.
            moments = [*moments[: 2 * count - 2], form, (r * w).sum(-1).double()]
            if count == 1 and self.is_enough(tasks, torch.stack(moments, -1).mean(1)):
                break
            if count < nodes:
                continue
            moments.append(self.times_change(tasks, w, pull=False)[0])
            if count == nodes or self.is_enough(tasks, torch.stack(moments, -1).mean(1)):
                break
        return torch.stack(moments, -1)

    def is_enough(self, tasks: Tensor, moments: Tensor) -> bool:
        """Return whether moments of some tasks (m, 2 or 2j + 1) are enough for them."""
        remainders = [
            from_moments(moments_of_task.tolist(), float(self.trace[task]))
            for moments_of_task, task in zip(moments, tasks, strict=True)
        ]
        return all(
            result.quadrature < 2 * target
            for result, target in zip(remainders, self.target[tasks].tolist(), strict=True)
        )

    def solve(self, tasks: Tensor, r: Tensor) -> Tensor:
        """Return H₁⁻¹r = H⁻¹r − UᵀG U r of some tasks, for r (m, s, P): (m, s, P)."""
        group = self.group.take(tasks)
        solved = group.refit.shared.solve(r.flatten(0, 1)).reshape(r.shape)
        along = torch.einsum("mcp,msp->msc", group.pulled, r)
        explained = self.new.explained[tasks].to(r.dtype)
        return solved - torch.einsum("msc,mcd,mdp->msp", along, explained, group.pulled)

    def times_change(
        self, tasks: Tensor, w: Tensor, pull: bool = True
    ) -> tuple[Tensor, Tensor | None]:
        """Return wᵀΔHw (m, s) in float64 and, with `pull`, ΔHw (m, s, P), for w (m, s, P)."""
        group = self.group.take(tasks)
        refit = group.refit
        likelihood, fisher = refit.posterior.likelihood, refit.fisher
        m, s, C = len(tasks), w.shape[1], refit.outputs
        step = split_by_output(self.point[tasks], C)
        directions = split_by_output(w.flatten(0, 1), C)
        form = torch.zeros(m, s, dtype=torch.float64)
        total = torch.zeros(C * m * s, group.phi.shape[1], dtype=refit.dtype)
        for _, part, _ in group.chunks(m * s * C):
            f = group.output_changes(part.x, step).add_(part.f).unsqueeze(1)  # (m, 1, b, C)
            v = group.output_changes(part.x, directions).unflatten(0, (m, s))
            change = likelihood.precision_times(part.y, f, v, fisher)
            change = change - likelihood.precision_times(part.y, part.f, v, fisher)
            change = times_row_weights(change, part)
            form += (v * change).sum(-1).sum(-1, dtype=torch.float64)
            if pull:
                total += outputs_first(change).flatten(0, 2) @ part.x
        if not pull:
            return form, None
        return form, total.reshape(C, m, s, -1).permute(1, 2, 0, 3).reshape(m, s, -1)


def pool_standard_errors(value: Tensor, spread: Tensor) -> Tensor:
    """Return standard errors (m,) that are at least as large, relative to the values, as over all
    tasks.

    Two probes of one task do not give its standard error.
    """
    usable = torch.isfinite(value) & (value != 0)
    if not bool(usable.any()):
        return spread
    relative = (spread[usable] / value[usable]).square().mean().sqrt()
    return torch.maximum(spread, relative * value.abs())


class Remainder(NamedTuple):
    """tr[log(I + A) − A], NaN where an eigenvalue of I + A is not positive, and the quadrature's
    error.
    """

    value: float
    quadrature: float


def estimate_from_rounds(rounds: list[Tensor], trace: float) -> tuple[float, float, float]:
    """Estimate tr[log(I + A) − A] of a task from moments of probes (s, 2j) in rounds.

    Returns the value, its standard error by a jackknife over groups of probes, and the error of the
    quadrature.
    """
    least = min(part.shape[1] for part in rounds)
    moments = torch.cat([part[:, :least] for part in rounds])
    value, quadrature = from_moments(moments.mean(0).tolist(), trace)
    groups = moments.tensor_split(min(len(moments), GROUPS))
    total = moments.sum(0)
    without = [(total - part.sum(0)) / (len(moments) - len(part)) for part in groups]
    jackknife = torch.tensor(
        [from_moments(mean.tolist(), trace).value for mean in without], dtype=torch.float64
    )
    return value, float((len(jackknife) - 1) * jackknife.var(correction=0)) ** 0.5, quadrature


def from_moments(moments: list[float], trace: float) -> Remainder:
    """Compute tr[log(I + A) − A] from estimates of tr A, tr A², …: two of them, or an odd number.

    With λ the eigenvalues of A it is Σ λ² h(λ), h(λ) = (log(1 + λ) − λ)/λ². Under the weights λ²
    the Gauss nodes of the moments give the mean of h. The first moment, whose expectation tr A is
    known, is a control variate for the second.
    """
    if not moments[1] > 0:
        return Remainder(0.0 if moments[1] == 0 else math.nan, 0.0)
    if len(moments) == 2:  # |tr A³| ≤ (tr A²)^{3/2}
        return Remainder(-0.5 * moments[1], moments[1] ** 1.5 / 3)
    mean = moments[2] / moments[1]
    weight = moments[1] - mean * (moments[0] - trace)
    means = [-0.5 + mean / 3]  # the series
    for count in range(1, len(moments) // 2 + 1):
        nodes, shares = gauss_nodes(torch.tensor(moments[1 : 2 * count + 1], dtype=torch.float64))
        if not float(nodes.min()) > -1:
            return Remainder(math.nan, 0.0)
        means.append(
            sum(w * remainder(t) for t, w in zip(nodes.tolist(), shares.tolist(), strict=True))
        )
    share = FIRST_QUADRATURE if len(means) == 2 else QUADRATURE
    return Remainder(weight * means[-1], share * abs(weight * (means[-1] - means[-2])))


def gauss_nodes(moments: Tensor) -> tuple[Tensor, Tensor]:
    """Return the j Gauss nodes and shares of a distribution from 2j moments (not normalised).

    A distribution with fewer atoms has fewer nodes.
    """
    count = len(moments) // 2
    index = torch.arange(count)
    hankel = moments[index[:, None] + index]
    factor, info = torch.linalg.cholesky_ex(hankel)
    pivots = factor.diagonal()
    if int(info) or float(pivots.min()) < SINGULAR * float(hankel.diagonal().max()) ** 0.5:
        return gauss_nodes(moments[: 2 * (count - 1)])
    shifted = moments[index[:, None] + index + 1]
    white = torch.linalg.solve_triangular(factor, shifted, upper=False)
    white = torch.linalg.solve_triangular(factor, white.mT, upper=False)
    nodes, vectors = torch.linalg.eigh((white + white.mT) / 2)
    return nodes, vectors[0].square()


def split_by_output(point: Tensor, outputs: int) -> Tensor:
    """Return vectors of weights (m, P) by output, as (C, m, F), contiguous."""
    return point.reshape(len(point), outputs, -1).movedim(1, 0).contiguous()


def outputs_first(values: Tensor) -> Tensor:
    """Return values (..., C) as (C, ...), contiguous: without a copy where they are stored so."""
    return values.movedim(-1, 0).contiguous()


def times_row_weights(values: Tensor, part: Block) -> Tensor:
    """Return values (..., b, C) times the weights of the rows."""
    return values if part.weights is None else values * part.weights.unsqueeze(-1)
