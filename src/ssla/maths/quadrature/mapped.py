"""Moments of a monotone function y = h(z), where the density p of z is known pointwise.

z is the variable of a grid of nodes (see `search`), and the moments are E y and Var y. A node's
weight w grows like |h(z) − h(centre)|, so that p·w and p·w² have about the widths of the integrands
of the first and the second moment: see `_compute_log_weight`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from ssla.maths.quadrature.grid import Grid
from ssla.maths.quadrature.search import Accuracy, LogDensity, RowGrid, build_grids

# Least fall of a log integrand from its highest to its last point: with a smaller one it has no
# integral. A guess
FALL = 1.0
# Distances in scales, to either side, at which an integrand is evaluated. A guess
LADDER = torch.logspace(0, 6, 241, dtype=torch.float64)

Map = Callable[[Tensor], Tensor]
"""z -> h(z), elementwise, for a monotone function h."""


def mapped_moments(
    log_density: LogDensity,
    pieces: list[RowGrid],
    h: Map,
    accuracy: Accuracy = Accuracy(),  # noqa: B008
) -> tuple[Tensor, Tensor]:
    """Compute mean and variance of h(Z), each (N,), for the N rows of all pieces.

    h: a monotone function, elementwise. pieces: grids with their rows, as from `build_grids` for
    this log_density. accuracy: of the integrals. A moment is infinite where it does not exist.

    Nodes that resolve the mass may miss a moment: the second moment of a log-normal with σ = 3 lies
    six standard deviations out. So the nodes must integrate p·w² as well, with w of
    `_compute_log_weight`, and rows where they do not get other nodes.
    """
    count = sum(piece.rows.numel() for piece in pieces)
    mean, variance = torch.empty(2, count, dtype=torch.float64).unbind(0)
    for rows, grid in pieces:
        mean[rows] = _compute_moment_from_nodes(grid, grid.log_mass, h, h(grid.centre), 1)
        variance[rows] = _compute_moment_from_nodes(grid, grid.log_mass, h, mean[rows], 2)
        lost = (~_resolves_moments(grid, h, accuracy)).nonzero().squeeze(-1)
        if not lost.numel():
            continue
        piece = RowGrid(rows[lost], grid.select_rows(lost))
        around = h(piece.grid.centre)
        mean[piece.rows] = _compute_refined_moment(log_density, piece, h, around, 1, accuracy)
        around = mean[piece.rows]
        variance[piece.rows] = _compute_refined_moment(log_density, piece, h, around, 2, accuracy)

    return mean, variance


def _compute_moment_from_nodes(
    grid: Grid, log_mass: Tensor, h: Map, around: Tensor, order: int
) -> Tensor:
    """Compute a moment of y = h(z) from the nodes of a grid.  log_mass, around (m,) -> (m,).

    around: the value of y from which deviations are taken. Order 1 gives the mean, as around + E[y
    − around], and order 2 gives E[(y − around)²]. Terms are formed in logarithms, for y from 1e-300
    to 1e300.
    """
    offset = h(grid.nodes) - around[:, None]
    terms = torch.exp(grid.log_terms + order * offset.abs().log() - log_mass[:, None])
    return around + (terms * offset.sign()).sum(1) if order == 1 else terms.sum(1)


def _compute_refined_moment(
    log_density: LogDensity, piece: RowGrid, h: Map, around: Tensor, order: int, accuracy: Accuracy
) -> Tensor:
    """Compute a moment of y = h(z) (m,) for the rows of a piece, from new nodes that resolve it.

    around (m,): the value of y from which deviations are taken. The new nodes are those for
    p·wᵒʳᵈᵉʳ. The moment is infinite where p·wᵒʳᵈᵉʳ has no
    integral. order: 1 or 2, as in `_compute_moment_from_nodes`. accuracy: of the new nodes.
    """
    rows, grid = piece

    def log_integrand(z: Tensor, i: Tensor) -> Tensor:
        """Compute log(p·wᵒʳᵈᵉʳ) at z (r, k) for some rows i (r,) of the piece."""
        return log_density(z, rows[i]).double() + order * _compute_log_weight(
            grid.select_rows(i), h, z
        )

    moment = torch.full_like(grid.centre, math.inf)
    finite = _integrand_falls(log_integrand, grid, h).nonzero().squeeze(-1)
    if finite.numel():
        for part, refined in build_grids(
            lambda z, i: log_integrand(z, finite[i]),
            grid.centre[finite],
            grid.scale[finite],
            accuracy,
        ):
            i = finite[part]
            # The nodes hold log(p·wᵒʳᵈᵉʳ); the moment needs log p.
            log_weights = order * _compute_log_weight(grid.select_rows(i), h, refined.nodes)
            density = replace(refined, logs=refined.logs - log_weights)
            moment[i] = _compute_moment_from_nodes(density, grid.log_mass[i], h, around[i], order)

    return moment


def _compute_log_weight(grid: Grid, h: Map, z: Tensor) -> Tensor:
    """Compute log w at z, with w² = 1 + ((h(z) − h(c))/d)².  (m, k) -> (m, k).

    c is the grid's centre, and d the change of h over one scale to either side of it. So p·w² has
    about the width of the integrands of both moments.
    """
    centre, scale = grid.centre[:, None], grid.scale[:, None]
    d = (h(centre + scale) - h(centre - scale)).clamp_min(1e-300)
    return torch.hypot(h(z) - h(centre), d).log() - d.log()


def _resolves_moments(grid: Grid, h: Map, accuracy: Accuracy) -> Tensor:
    """Return which rows (m,) have nodes that integrate p·w² too, to the accuracy.

    The end terms must be a small share, and the rule on every second node must give the same.
    """
    terms = grid.relative_terms * (2 * _compute_log_weight(grid, h, grid.nodes)).exp()
    total = terms.sum(1)
    ends_are_small = terms[:, 0] + terms[:, -1] <= accuracy.tail * total
    half_rule = 2 * terms[:, ::2].sum(1)
    return ends_are_small & ((half_rule / total - 1).abs() <= accuracy.half_rule)


def _integrand_falls(log_integrand: LogDensity, grid: Grid, h: Map) -> Tensor:
    """Return for which rows (m,) an integrand falls towards both ends of LADDER, as if integrable.

    Where h is constant at an end (by rounding, or at a bound), the last point at which it changes
    takes the place of that end.
    """
    z = grid.centre[:, None] + grid.scale[:, None] * torch.cat([-LADDER.flip(0), LADDER])
    y = h(z)
    logs = log_integrand(z, torch.arange(len(z)))
    number = torch.arange(z.shape[1])
    first = torch.where(y > y[:, :1], number, z.shape[1] - 1).amin(1, keepdim=True)
    last = torch.where(y < y[:, -1:], number, 0).amax(1, keepdim=True)
    ends = torch.maximum(logs.gather(1, first), logs.gather(1, last)).squeeze(1)
    return logs.amax(1) - ends > FALL
