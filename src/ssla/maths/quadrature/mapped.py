"""Moments of a monotone function y = h(z), where the density of z is known pointwise."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from ssla.maths.quadrature.grid import Grid
from ssla.maths.quadrature.search import Accuracy, Built, LogDensity, build

# of a log integrand from its highest to its last point; with a smaller fall it has no integral
FALL = 1.0
LADDER = torch.logspace(
    0, 6, 241, dtype=torch.float64
)  # in scales, to either side: where an integrand is evaluated

Map = Callable[[Tensor], Tensor]


def mapped_moments(
    log_density: LogDensity,
    pieces: list[Built],
    h: Map,
    accuracy: Accuracy = Accuracy(),  # noqa: B008
) -> tuple[Tensor, Tensor]:
    """Mean and variance of h(Z) for the rows of all pieces; infinite where they do not exist.

    (N,), (N,).

    Nodes that resolve the mass may miss a moment: a log-normal with σ = 3 has its second moment six
    standard deviations out. So the nodes must integrate p·w² as well, w² = 1 + ((h(z) − h(c))/d)²,
    and rows where they do not get other nodes.
    """
    count = sum(piece.rows.numel() for piece in pieces)
    mean, variance = torch.empty(2, count, dtype=torch.float64).unbind(0)
    for rows, grid in pieces:
        mean[rows] = _sum(grid, grid.log_mass, h, h(grid.centre), 1)
        variance[rows] = _sum(grid, grid.log_mass, h, mean[rows], 2)
        lost = (~_integrated(grid, h, accuracy)).nonzero().squeeze(-1)
        for order, moment in ((1, mean), (2, variance)) if lost.numel() else ():
            around = h(grid.centre[lost]) if order == 1 else mean[rows[lost]]
            moment[rows[lost]] = _sought(
                log_density, Built(rows[lost], grid.rows(lost)), h, around, order, accuracy
            )
    return mean, variance


def _sum(grid: Grid, log_mass: Tensor, h: Map, around: Tensor, order: int) -> Tensor:
    """around + E[y − around], or E[(y − around)²] (m,), from the grid's nodes.

    By logarithms, for y from 1e-300 to 1e300.
    """
    off = h(grid.nodes) - around[:, None]
    terms = torch.exp(grid.log_terms + order * off.abs().log() - log_mass[:, None])
    return around + (terms * off.sign()).sum(1) if order == 1 else terms.sum(1)


def _sought(
    log_density: LogDensity, piece: Built, h: Map, around: Tensor, order: int, accuracy: Accuracy
) -> Tensor:
    """The moment of the rows of a piece (m,), from nodes found for p·wᵒʳᵈᵉʳ; infinite where
    that has no integral.
    """
    rows, grid = piece

    def tilted(z: Tensor, i: Tensor) -> Tensor:
        return log_density(z, rows[i]).double() + order * _log_weight(grid.rows(i), h, z)

    moment = torch.full_like(grid.centre, math.inf)
    keep = _falls(tilted, grid, h).nonzero().squeeze(-1)
    if keep.numel():
        for part, built in build(
            lambda z, i: tilted(z, keep[i]), grid.centre[keep], grid.scale[keep], accuracy
        ):
            i = keep[part]
            plain = replace(
                built, logs=built.logs - order * _log_weight(grid.rows(i), h, built.nodes)
            )
            moment[i] = _sum(plain, grid.log_mass[i], h, around[i], order)
    return moment


def _log_weight(grid: Grid, h: Map, z: Tensor) -> Tensor:
    """log w at z (m, k)."""
    centre, scale = grid.centre[:, None], grid.scale[:, None]
    d = (h(centre + scale) - h(centre - scale)).clamp_min(1e-300)
    return torch.hypot(h(z) - h(centre), d).log() - d.log()


def _integrated(grid: Grid, h: Map, accuracy: Accuracy) -> Tensor:
    """Whether the grid's own nodes integrate p·w² (m,)."""
    terms = grid.relative * (2 * _log_weight(grid, h, grid.nodes)).exp()
    whole = terms.sum(1)
    ends = terms[:, 0] + terms[:, -1] <= accuracy.tail * whole
    return ends & ((2 * terms[:, ::2].sum(1) / whole - 1).abs() <= accuracy.half_rule)


def _falls(log_density: LogDensity, grid: Grid, h: Map) -> Tensor:
    """Whether an integrand is lower at the last points at which h changes than somewhere
    between (m,).
    """
    z = grid.centre[:, None] + grid.scale[:, None] * torch.cat([-LADDER.flip(0), LADDER])
    y, logs, place = h(z), log_density(z, torch.arange(len(z))), torch.arange(z.shape[1])
    first = torch.where(y > y[:, :1], place, z.shape[1] - 1).amin(1, keepdim=True)
    last = torch.where(y < y[:, -1:], place, 0).amax(1, keepdim=True)
    return (
        logs.amax(1) - torch.maximum(logs.gather(1, first), logs.gather(1, last)).squeeze(1) > FALL
    )
