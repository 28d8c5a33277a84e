"""tr[log(I + A) − A] of many refits by random probes, with a Gauss quadrature over the eigenvalues
of A for each.

It is slower than a sketch (`last_layer_sketch`). Its error falls to zero with more probes, whatever
the eigenvalues are.

Terms and symbols are those of `ssla.refit.weights`; A, H₁ and G are those of `last_layer_products`.
Here too:

probe       a random vector w of weights, w ~ N(0, H⁻¹)
moments     means of wᵀΔH (H₁⁻¹ΔH)^k w over probes w ~ N(0, H₁⁻¹), estimates of tr A^{k+1}
nodes       the points of a Gauss quadrature; j of them take 2j moments
remainder   tr[log(I + A) − A], of which the curvature increment has −½
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from ssla.refit.weights.last_layer_blocks import SharedBlocks
from ssla.refit.weights.last_layer_curvature import FEW_PROBES
from ssla.refit.weights.last_layer_sketch import compute_scaled_remainder
from ssla.refit.weights.refit_rows import Block

if TYPE_CHECKING:
    from ssla.refit.weights.last_layer_products import Group

MOST_NODES = 4  # a guess: of the quadrature over eigenvalues
# The largest error of the quadrature that was seen, over the change by its last node: with two
# nodes, and with more. Measured on 2,000 rows, 128 features and 10 classes, by a script that was
# not kept.
FIRST_QUADRATURE, QUADRATURE = 2.0, 0.25
SINGULAR = 1e-6  # a guess: smaller pivots of a matrix of moments are rounding
GROUPS = 16  # a guess: groups of probes in the jackknife for the standard error
BYTES_AT_ONCE = 1 << 26  # a guess: bytes of the probes of all tasks
# Guesses: probes of the first two rounds. Each later round has as many as all before it.
FIRST_PROBES, MORE_PROBES = 2, 6
PROBE_COPIES = 6  # a guess: tensors of the size of the probes that a task takes
LEAST_ROOT = 1e-7  # a guess: roots of eigenvalues of K, over the largest, that count as zero
LEAST_MU = -0.999  # a guess: μ is raised to it where I + RᵀΛR is not positive definite


class NewRow(NamedTuple):
    """The change of H⁻¹ by the new row of each of m tasks, in the outputs of that row.

    With U = J H⁻¹ at the new row, H₁⁻¹ = H⁻¹ − Uᵀ G U, and (I − UᵀBJ) w ~ N(0, H₁⁻¹) for w ~ N(0,
    H⁻¹). The new row is said to explain G.
    """

    explained: Tensor  # G = (I + ΛK)⁻¹Λ (m, C, C)
    shrink: Tensor  # B with B + Bᵀ − BKBᵀ = G (m, C, C)

    @staticmethod
    def from_covariance(K: Tensor, precision: Tensor) -> NewRow:
        """Compute G and B of m new rows, from K and precision, their Λ: both (m, C, C).

        K may be singular. With K = RRᵀ and RᵀΛR = E diag(μ) Eᵀ, RᵀGR is the same with μ/(1 + μ) in
        place of μ, and RᵀBR with 1 − (1 + μ)^{-½}.
        """
        values, vectors = torch.linalg.eigh(K)
        lengths = values.clamp_min(0).sqrt()
        R = vectors * lengths.unsqueeze(-2)

        # The pseudo-inverse R⁺ᵀ: K may be singular.
        least = LEAST_ROOT * lengths.amax(-1, keepdim=True)
        inverse_root = vectors * torch.where(lengths > least, 1 / lengths, 0.0).unsqueeze(-2)
        white = R.mT @ precision @ R
        mu, E = torch.linalg.eigh((white + white.mT) / 2)

        # Below −1 there is no determinant, and `compute_new_row_increment` marks the task.
        mu = mu.clamp_min(LEAST_MU)
        directions = inverse_root @ E

        def replace_eigenvalues(eigenvalues: Tensor) -> Tensor:
            """Return R⁺ᵀE diag(eigenvalues) EᵀR⁺ (m, C, C), with eigenvalues (m, C) in place of μ.

            It is a matrix in the outputs of the new row.
            """
            product: Tensor = (directions * eigenvalues.unsqueeze(-2)) @ directions.mT
            return product

        return NewRow(replace_eigenvalues(mu / (1 + mu)), replace_eigenvalues(1 - (1 + mu).rsqrt()))

    def list_explaining_outputs(self, least: float) -> Tensor:
        """Return the numbers of the outputs (r,) that have a part in G of any task.

        They are those with a diagonal entry of G above `least`, in size: the new rows say nothing
        about the others.
        """
        is_important = self.explained.diagonal(dim1=-2, dim2=-1).abs() > least
        return is_important.any(0).nonzero().squeeze(-1)

    def select_tasks(self, tasks: Tensor) -> NewRow:
        """Return the new rows of some tasks (k,)."""
        return NewRow(self.explained[tasks], self.shrink[tasks])


@dataclass(frozen=True, eq=False)
class Probing:
    """The remainders of m tasks by random probes: rounds of them, until the error is small."""

    group: Group
    point: Tensor  # the modes (m, P)
    new_row: NewRow
    trace: Tensor  # tr A (m,)
    target: Tensor  # the standard error in log density at which probing ends (m,)

    def estimate_remainders(self) -> tuple[Tensor, Tensor, Tensor]:
        """Estimate the remainders of all tasks, in rounds of more and more probes.

        Returns the estimates (m,), NaN where I + A is not positive definite; where it is, as far as
        the probes show (m,); and the errors (m,). A task is done when its standard error is at most
        twice its target, or when no probes are left.
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
            # The first two rounds have counts of their own; a later one doubles the probes so far.
            count = {0: FIRST_PROBES, FIRST_PROBES: MORE_PROBES}.get(used, used)
            if len(probes) < FEW_PROBES:  # a small problem: all probes at once leave no error
                count = len(probes)
            fresh = probes[used : used + count]
            self._add_round(fresh, active, rounds, same_nodes=used > FIRST_PROBES)
            used += len(fresh)

            estimates = [
                estimate_from_rounds(rounds[task], float(self.trace[task]))
                for task in active.tolist()
            ]
            by_column = torch.tensor(estimates, dtype=torch.float64).unbind(1)
            new_values, standard_error, quadrature = by_column
            value[active] = new_values
            if used == FIRST_PROBES < len(probes):
                standard_error = pool_standard_errors(value[active], standard_error)
            standard_error *= shared.compute_missing_error(used)
            error[active] = (standard_error**2 + quadrature**2).sqrt()
            # The increment is half of the remainder, so twice its target is allowed here.
            too_large = standard_error > 2 * self.target[active]
            active = active[too_large & torch.isfinite(value[active])]

        return value, torch.isfinite(value), error

    def _add_round(
        self, probes: Tensor, active: Tensor, rounds: list[list[Tensor]], same_nodes: bool
    ) -> None:
        """Append the moments of some probes (s, P) to the `rounds` of the active tasks, in place.

        active (k,): the numbers of these tasks. same_nodes: take as many nodes as in the round
        before, so that the moments of both can be averaged.
        """
        probe_bytes = PROBE_COPIES * probes.numel() * probes.element_size()
        for tasks in active.split(max(BYTES_AT_ONCE // probe_bytes, 1)):
            nodes = 0
            if same_nodes:
                nodes = max(rounds[task][-1].shape[1] // 2 for task in tasks.tolist())
            moments = self.compute_moments(probes, tasks, nodes)
            for task, moments_of_task in zip(tasks.tolist(), moments, strict=True):
                rounds[task].append(moments_of_task)

    def compute_moments(self, probes: Tensor, tasks: Tensor, nodes: int) -> Tensor:
        """Compute wᵀΔH (H₁⁻¹ΔH)^k w for w ~ N(0, H₁⁻¹), k = 0, 1, …, of some tasks (m,).

        probes: s vectors w₀ ~ N(0, H⁻¹) (s, P), the same for all tasks; each becomes a w of the
        task. nodes: the number j of Gauss nodes; 0: as many as the error needs, at most MOST_NODES.
        Returns (m, s, 2) if two moments are enough, and otherwise (m, s, 2j + 1).
        """
        group = self.group.select_tasks(tasks)
        s, C = len(probes), group.refit.outputs
        # Draws of N(0, H⁻¹) become draws of N(0, H₁⁻¹) (see `NewRow`).
        at_x = torch.einsum("scf,mf->msc", probes.reshape(s, C, -1), group.phi)
        shrink = self.new_row.shrink[tasks].to(at_x.dtype)
        w = probes - torch.einsum("msc,mdc,mdp->msp", at_x, shrink, group.U)

        moments: list[Tensor] = []
        for count in range(1, MOST_NODES + 1):
            form, r = self.multiply_by_change(tasks, w)
            assert r is not None
            w = self.solve_augmented(tasks, r)
            # `form` is the last moment of the round before, computed again with `pull`.
            moments = [*moments[: 2 * count - 2], form, (r * w).sum(-1).double()]
            if count == 1 and self.is_accurate(tasks, torch.stack(moments, -1).mean(1)):
                break
            if count < nodes:
                continue
            moments.append(self.multiply_by_change(tasks, w, pull=False)[0])
            if count == nodes or self.is_accurate(tasks, torch.stack(moments, -1).mean(1)):
                break

        return torch.stack(moments, -1)

    def is_accurate(self, tasks: Tensor, moments: Tensor) -> bool:
        """Return whether the error of the quadrature is below its target for all of the tasks (m,).

        moments (m, 2) or (m, 2j + 1): means over the probes.
        """
        estimates = [
            compute_remainder_from_moments(moments_of_task.tolist(), float(self.trace[task]))
            for moments_of_task, task in zip(moments, tasks, strict=True)
        ]
        # The increment is half of the remainder, so twice its target is allowed here.
        return all(
            estimate.quadrature < 2 * target
            for estimate, target in zip(estimates, self.target[tasks].tolist(), strict=True)
        )

    def solve_augmented(self, tasks: Tensor, r: Tensor) -> Tensor:
        """Compute H₁⁻¹r = H⁻¹r − UᵀG U r (m, s, P) of some tasks (m,), for r (m, s, P)."""
        group = self.group.select_tasks(tasks)
        solved = group.refit.shared.solve(r.flatten(0, 1)).reshape(r.shape)
        along = torch.einsum("mcp,msp->msc", group.U, r)
        explained = self.new_row.explained[tasks].to(r.dtype)
        return solved - torch.einsum("msc,mcd,mdp->msp", along, explained, group.U)

    def multiply_by_change(
        self, tasks: Tensor, w: Tensor, pull: bool = True
    ) -> tuple[Tensor, Tensor | None]:
        """Compute wᵀΔHw (m, s) in float64, and ΔHw (m, s, P), for w (m, s, P) of some tasks (m,).

        It takes a pass over the training rows. With pull=False the second result is None, which
        saves a product with the features.
        """
        group = self.group.select_tasks(tasks)
        refit = group.refit
        likelihood, fisher = refit.posterior.likelihood, refit.uses_fisher
        m, s, C = len(tasks), w.shape[1], refit.outputs
        step = split_by_output(self.point[tasks], C)
        directions = split_by_output(w.flatten(0, 1), C)
        form = torch.zeros(m, s, dtype=torch.float64)
        total = torch.zeros(C * m * s, group.phi.shape[1], dtype=refit.dtype)

        for _, part, _ in group.yield_parts(m * s * C):
            f = group.compute_output_changes(part.x, step).add_(part.f).unsqueeze(1)  # (m, 1, b, C)
            v = group.compute_output_changes(part.x, directions).unflatten(0, (m, s))
            change = likelihood.precision_times(part.y, f, v, fisher)
            change = change - likelihood.precision_times(part.y, part.f, v, fisher)
            change = multiply_by_row_weights(change, part)
            form += (v * change).sum(-1).sum(-1, dtype=torch.float64)
            if pull:
                total += move_outputs_first(change).flatten(0, 2) @ part.x

        if not pull:
            return form, None
        return form, total.reshape(C, m, s, -1).permute(1, 2, 0, 3).reshape(m, s, -1)


def pool_standard_errors(value: Tensor, standard_error: Tensor) -> Tensor:
    """Return standard errors (m,) of which none is smaller than the pooled one.

    Two probes of one task do not give its standard error; those of all tasks together do. The
    pooled one is the root mean square of relative errors, times the value. value (m,): the
    estimates; standard_error (m,): their own ones, returned unchanged if no value is usable.
    """
    usable = torch.isfinite(value) & (value != 0)
    if not bool(usable.any()):
        return standard_error
    relative = (standard_error[usable] / value[usable]).square().mean().sqrt()
    return torch.maximum(standard_error, relative * value.abs())


class Remainder(NamedTuple):
    """An estimate of tr[log(I + A) − A]."""

    value: float  # NaN if an eigenvalue of I + A is not positive
    quadrature: float  # the error of the quadrature


def estimate_from_rounds(rounds: list[Tensor], trace: float) -> tuple[float, float, float]:
    """Estimate tr[log(I + A) − A] of a task from rounds of moments, each (s, 2) or (s, 2j + 1).

    trace: tr A. Of all rounds as many moments are used as the shortest one has. Returns the value,
    its standard error by a jackknife over groups of probes, and the error of the quadrature.
    """
    least = min(moments_of_round.shape[1] for moments_of_round in rounds)
    moments = torch.cat([moments_of_round[:, :least] for moments_of_round in rounds])
    value, quadrature = compute_remainder_from_moments(moments.mean(0).tolist(), trace)
    groups = moments.tensor_split(min(len(moments), GROUPS))
    total = moments.sum(0)
    means_without = [(total - group.sum(0)) / (len(moments) - len(group)) for group in groups]
    jackknife = torch.tensor(
        [compute_remainder_from_moments(mean.tolist(), trace).value for mean in means_without],
        dtype=torch.float64,
    )
    return value, float((len(jackknife) - 1) * jackknife.var(correction=0)) ** 0.5, quadrature


def compute_remainder_from_moments(moments: list[float], trace: float) -> Remainder:
    """Compute tr[log(I + A) − A] from moments, estimates of tr A, tr A², …: two, or an odd number.

    With λ the eigenvalues of A it is Σ λ² h(λ), h(λ) = (log(1 + λ) − λ)/λ². Under the weights λ²
    the Gauss nodes of the moments give the mean of h. The first moment, whose expectation is
    `trace`, tr A, is a control variate for the second. NaN where a moment or a node shows that
    I + A is not positive definite.
    """
    if not moments[1] > 0:
        return Remainder(0.0 if moments[1] == 0 else math.nan, 0.0)
    if len(moments) == 2:  # |tr A³| ≤ (tr A²)^{3/2}
        return Remainder(-0.5 * moments[1], moments[1] ** 1.5 / 3)
    mean = moments[2] / moments[1]
    total_weight = moments[1] - mean * (moments[0] - trace)  # tr A², with the control variate
    h_means = [-0.5 + mean / 3]  # h at the mean of λ, by its series to first order

    for count in range(1, len(moments) // 2 + 1):
        nodes, shares = compute_gauss_nodes(
            torch.tensor(moments[1 : 2 * count + 1], dtype=torch.float64)
        )
        if not float(nodes.min()) > -1:
            return Remainder(math.nan, 0.0)
        h_means.append(
            sum(
                node_share * compute_scaled_remainder(node)
                for node, node_share in zip(nodes.tolist(), shares.tolist(), strict=True)
            )
        )

    share = FIRST_QUADRATURE if len(h_means) == 2 else QUADRATURE
    return Remainder(
        total_weight * h_means[-1], share * abs(total_weight * (h_means[-1] - h_means[-2]))
    )


def compute_gauss_nodes(moments: Tensor) -> tuple[Tensor, Tensor]:
    """Compute the Gauss nodes of a distribution and their shares, both (j,), from 2j moments (2j,).

    The moments of order 0, 1, … need not be normalised; the shares add up to one. A distribution
    with fewer than j atoms has fewer nodes.
    """
    count = len(moments) // 2
    # The nodes are the eigenvalues of the Hankel matrix of shifted moments, relative to that of the
    # moments themselves.
    index = torch.arange(count)
    hankel = moments[index[:, None] + index]
    factor, info = torch.linalg.cholesky_ex(hankel)
    pivots = factor.diagonal()
    if int(info) or float(pivots.min()) < SINGULAR * float(hankel.diagonal().max()) ** 0.5:
        return compute_gauss_nodes(moments[: 2 * (count - 1)])
    shifted = moments[index[:, None] + index + 1]

    # L⁻¹(L⁻¹M)ᵀ = L⁻¹ML⁻ᵀ for the symmetric matrix M of shifted moments.
    white = torch.linalg.solve_triangular(factor, shifted, upper=False)
    white = torch.linalg.solve_triangular(factor, white.mT, upper=False)
    nodes, vectors = torch.linalg.eigh((white + white.mT) / 2)
    return nodes, vectors[0].square()


def split_by_output(point: Tensor, outputs: int) -> Tensor:
    """Return vectors of weights (m, P), such as points, by output: (C, m, F), contiguous."""
    return point.reshape(len(point), outputs, -1).movedim(1, 0).contiguous()


def move_outputs_first(values: Tensor) -> Tensor:
    """Return values (..., C) as (C, ...), contiguous: no copy is made where they are stored so."""
    return values.movedim(-1, 0).contiguous()


def multiply_by_row_weights(values: Tensor, block: Block) -> Tensor:
    """Return values (..., b, C) times the weights of the rows of a block."""
    return values if block.weights is None else values * block.weights.unsqueeze(-1)
