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
FIRST_QUADRATURE, QUADRATURE = (
    2.0,
    0.25,
)  # its error over the change by its last node (measured: at most; 2,000 × 128 × 10)
SINGULAR = 1e-6  # a guess: of the pivots of a matrix of moments: smaller ones are rounding
GROUPS = 16  # a guess: of probes, for the standard error
AT_ONCE = 1 << 26  # a guess: bytes of the probes of all tasks
# Guesses: of the first two rounds; each later round has as many as all before it.
FIRST_PROBES, MORE_PROBES = 2, 6


class NewRow(NamedTuple):
    """How the new row changes H⁻¹, in its outputs: H₁⁻¹ = H⁻¹ − Uᵀ G U, and (I − UᵀBJ) w ~ N(0,
    H₁⁻¹) for w ~ N(0, H⁻¹).
    """

    explained: Tensor  # G = (I + ΛK)⁻¹Λ (m, C, C)
    shrink: Tensor  # B with B + Bᵀ − BKBᵀ = G (m, C, C)

    @staticmethod
    def of(K: Tensor, precision: Tensor) -> NewRow:
        """With K = RRᵀ and RᵀΛR = E diag(μ) Eᵀ: RᵀGR has μ/(1 + μ) and RᵀBR has 1 − (1 +
        μ)^{-½} in place of μ.
        """
        values, vectors = torch.linalg.eigh(K)
        size = values.clamp_min(0).sqrt()
        R = vectors * size.unsqueeze(-2)
        least = 1e-7 * size.amax(-1, keepdim=True)
        back = vectors * torch.where(size > least, 1 / size, 0.0).unsqueeze(-2)  # R⁺ᵀ
        inside = R.mT @ precision @ R
        mu, E = torch.linalg.eigh((inside + inside.mT) / 2)
        mu = mu.clamp_min(-0.999)  # not positive definite elsewhere: that task is flagged
        turned = back @ E

        def scaled(by: Tensor) -> Tensor:
            product: Tensor = (turned * by.unsqueeze(-2)) @ turned.mT
            return product

        return NewRow(scaled(mu / (1 + mu)), scaled(1 - (1 + mu).rsqrt()))

    def take(self, tasks: Tensor) -> NewRow:
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
        """The estimates (m,), where I + A is positive definite as far as the probes show, and
        their errors (m,).
        """
        shared = self.group.refit.shared
        assert not isinstance(shared, SharedBlocks)
        m, probes = len(self.point), shared.probes
        value, error = torch.zeros(m, dtype=torch.float64), torch.zeros(m, dtype=torch.float64)
        active, used = torch.arange(m), 0
        seen: list[list[Tensor]] = [[] for _ in range(m)]
        while active.numel() and used < len(probes):
            count = {0: FIRST_PROBES, FIRST_PROBES: MORE_PROBES}.get(used, used)
            if len(probes) < FEW_PROBES:  # all there are: no error is left
                count = len(probes)
            fresh = probes[used : used + count]
            size = max(AT_ONCE // (6 * fresh.numel() * fresh.element_size()), 1)
            for tasks in active.split(size):
                depth = max(
                    (part.shape[1] // 2 for task in tasks.tolist() for part in seen[task][-1:]),
                    default=0,
                )
                moments = self.moments(fresh, tasks, depth if used > FIRST_PROBES else 0)
                for k, task in enumerate(tasks.tolist()):
                    seen[task].append(moments[k])
            used += len(fresh)
            found = [estimate(seen[task], float(self.trace[task])) for task in active.tolist()]
            value[active], spread, quadrature = torch.tensor(found, dtype=torch.float64).unbind(1)
            if used == FIRST_PROBES < len(probes):
                spread = pooled(value[active], spread)
            spread *= shared.missing(used)
            error[active] = (spread**2 + quadrature**2).sqrt()
            active = active[(spread > 2 * self.target[active]) & torch.isfinite(value[active])]
        return value, torch.isfinite(value), error

    def moments(self, probes: Tensor, tasks: Tensor, nodes: int) -> Tensor:
        """wᵀΔH (H₁⁻¹ΔH)^k w for w ~ N(0, H₁⁻¹), k = 0, 1, …: two of them (m, s, 2), or 2j + 1 for j
        Gauss nodes.

        probes: s vectors w₀ ~ N(0, H⁻¹) (s, P), the same for all tasks. nodes: the number of them;
        0: as many as it takes.
        """
        group = self.group.take(tasks)
        s, C = len(probes), group.refit.outputs
        at_x = torch.einsum("scf,mf->msc", probes.reshape(s, C, -1), group.phi)
        shrink = self.new.shrink[tasks].to(at_x.dtype)
        w = probes - torch.einsum("msc,mdc,mdp->msp", at_x, shrink, group.pulled)
        found: list[Tensor] = []
        for count in range(1, MOST_NODES + 1):
            form, r = self.changed(tasks, w)
            assert r is not None
            w = self.solved(tasks, r)
            found = [*found[: 2 * count - 2], form, (r * w).sum(-1).double()]
            if count == 1 and self.enough(tasks, torch.stack(found, -1).mean(1)):
                break
            if count < nodes:
                continue
            found.append(self.changed(tasks, w, pull=False)[0])
            if count == nodes or self.enough(tasks, torch.stack(found, -1).mean(1)):
                break
        return torch.stack(found, -1)

    def enough(self, tasks: Tensor, moments: Tensor) -> bool:
        """Whether moments of some tasks (m, 2 or 2j + 1) are enough for all of their values."""
        values = [
            from_moments(own.tolist(), float(self.trace[task]))
            for own, task in zip(moments, tasks, strict=True)
        ]
        return all(
            value.quadrature < 2 * target
            for value, target in zip(values, self.target[tasks].tolist(), strict=True)
        )

    def solved(self, tasks: Tensor, r: Tensor) -> Tensor:
        """H₁⁻¹r = H⁻¹r − UᵀG U r.  (m, s, P) -> (m, s, P)."""
        group = self.group.take(tasks)
        inside = group.refit.shared.solve(r.flatten(0, 1)).reshape(r.shape)
        along = torch.einsum("mcp,msp->msc", group.pulled, r)
        explained = self.new.explained[tasks].to(r.dtype)
        return inside - torch.einsum("msc,mcd,mdp->msp", along, explained, group.pulled)

    def changed(self, tasks: Tensor, w: Tensor, pull: bool = True) -> tuple[Tensor, Tensor | None]:
        """wᵀΔHw (m, s) in float64, and ΔHw (m, s, P), for w (m, s, P)."""
        group = self.group.take(tasks)
        refit = group.refit
        likelihood, fisher = refit.posterior.likelihood, refit.fisher
        m, s, C = len(tasks), w.shape[1], refit.outputs
        step, directions = by_output(self.point[tasks], C), by_output(w.flatten(0, 1), C)
        form = torch.zeros(m, s, dtype=torch.float64)
        total = torch.zeros(C * m * s, group.phi.shape[1], dtype=refit.dtype)
        for _, part, _ in group.chunks(m * s * C):
            f = group.moved(part.x, step).add_(part.f).unsqueeze(1)  # (m, 1, b, C)
            v = group.moved(part.x, directions).unflatten(0, (m, s))
            change = likelihood.precision_times(part.y, f, v, fisher)
            change = weighted(change - likelihood.precision_times(part.y, part.f, v, fisher), part)
            form += (v * change).sum(-1).sum(-1, dtype=torch.float64)
            if pull:
                total += by_component(change).flatten(0, 2) @ part.x
        if not pull:
            return form, None
        return form, total.reshape(C, m, s, -1).permute(1, 2, 0, 3).reshape(m, s, -1)


def pooled(value: Tensor, spread: Tensor) -> Tensor:
    """Standard errors that are as large, relative to the values, as they are over all tasks:
    two probes do not tell more.
    """
    good = torch.isfinite(value) & (value != 0)
    if not bool(good.any()):
        return spread
    relative = (spread[good] / value[good]).square().mean().sqrt()
    return torch.maximum(spread, relative * value.abs())


class Remainder(NamedTuple):
    """tr[log(I + A) − A] (NaN: an eigenvalue of I + A is not positive), and the error of the
    quadrature that gives it.
    """

    value: float
    quadrature: float


def estimate(rounds: list[Tensor], trace: float) -> tuple[float, float, float]:
    """tr[log(I + A) − A] from moments of probes (s, 2j) in rounds; its standard error; the error of
    the quadrature.

    The standard error is a jackknife's over groups of probes.
    """
    least = min(part.shape[1] for part in rounds)
    moments = torch.cat([part[:, :least] for part in rounds])
    value, quadrature = from_moments(moments.mean(0).tolist(), trace)
    groups = moments.tensor_split(min(len(moments), GROUPS))
    total = moments.sum(0)
    without = [(total - part.sum(0)) / (len(moments) - len(part)) for part in groups]
    left = torch.tensor(
        [from_moments(mean.tolist(), trace).value for mean in without], dtype=torch.float64
    )
    return value, float((len(left) - 1) * left.var(correction=0)) ** 0.5, quadrature


def from_moments(moments: list[float], trace: float) -> Remainder:
    """tr[log(I + A) − A] from estimates of tr A, tr A², …: two of them, or an odd number.

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
    """The j Gauss nodes and shares of a distribution from 2j moments (not normalised), fewer
    where it has fewer atoms.
    """
    count = len(moments) // 2
    index = torch.arange(count)
    hankel = moments[index[:, None] + index]
    factor, info = torch.linalg.cholesky_ex(hankel)
    pivots = factor.diagonal()
    if int(info) or float(pivots.min()) < SINGULAR * float(hankel.diagonal().max()) ** 0.5:
        return gauss_nodes(moments[: 2 * (count - 1)])
    shifted = moments[index[:, None] + index + 1]
    inside = torch.linalg.solve_triangular(factor, shifted, upper=False)
    inside = torch.linalg.solve_triangular(factor, inside.mT, upper=False)
    nodes, vectors = torch.linalg.eigh((inside + inside.mT) / 2)
    return nodes, vectors[0].square()


def by_output(point: Tensor, outputs: int) -> Tensor:
    """(m, P) -> (C, m, F), contiguous."""
    return point.reshape(len(point), outputs, -1).movedim(1, 0).contiguous()


def by_component(values: Tensor) -> Tensor:
    """(..., C) -> (C, ...), contiguous: without a copy where they are stored so."""
    return values.movedim(-1, 0).contiguous()


def weighted(values: Tensor, part: Block) -> Tensor:
    """values (..., b, C) times the row weights."""
    return values if part.weights is None else values * part.weights.unsqueeze(-1)
