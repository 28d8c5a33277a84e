"""E log p(y|f), E g and E Λ under f ~ N(f̂, K): what a variational Gaussian sums in place of the
values at f̂.

In closed form where the likelihood has one (`averages_in_closed_form`), else by fixed nodes
(Gauss–Hermite for one and two outputs, a low-discrepancy set for more), a few rows at a time. With
`pool`, the weights of the rows (B,), Λ is Σ_i w_i Λ_i (1, C, C), and many classes need no C×C
matrix for each row. With `diagonal` besides it is Σ_i w_i diag Λ_i (1, C), and they need none at
all.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ssla.likelihoods.likelihood import Derivatives, Likelihood
from ssla.maths.quadrature.normal import normal_nodes
from ssla.maths.roots import Root, ScaledRoot

NUMBERS_AT_ONCE = 1 << 17  # more fall out of the processor's cache
# up to how many outputs -> pairs of the low-discrepancy set; for ten classes more change
# predictives by less than 2e-4 in KL, and for many classes the sums over rows average out what one
# row's nodes miss
PAIRS = ((64, 128), (300, 32), (math.inf, 16))
# from so many rows on, or beyond so many classes, pooled sums over classes have nodes of their own
# in each row
MANY_ROWS, MANY_CLASSES = 4096, 1000
# Measured at (10k, 512, 10) against 512 nodes a row: 8 change the variances of outputs by 0.4%, 64
# by 0.6%, so that the rounds' own tolerance hides the rest (10,000 × 512 × 10, by a script that was
# not kept).
NODES_OF_ALL_ROWS = 1 << 17
FEWEST_NODES = 8  # of a row
# numbers of those nodes that are worked on together: more for many classes, whose matrix is as
# large
BLOCK = 1 << 18


@dataclass(frozen=True)
class RowNodes:
    """Nodes of its own for every row: `count` normal draws, half of them mirror images.

    The same in every pass.

    A sum over n rows averages over n · count nodes, so that few of them for each row are enough for
    it, but not for one row.
    """

    count: int
    seed: int = 0

    @staticmethod
    def for_rows(rows: int, classes: int) -> RowNodes | None:
        """For a sum over so many rows; None: nodes that all rows share are as fast, or more
        accurate.
        """
        if rows < MANY_ROWS and (classes <= MANY_CLASSES or rows == 0):
            return None
        count = max(FEWEST_NODES, min(math.ceil(NODES_OF_ALL_ROWS / rows), _pairs(classes)))
        return RowNodes(2 * math.ceil(count / 2))

    def of_chunk(self, number: int) -> RowNodes:
        """Other nodes for each chunk of rows."""
        return replace(self, seed=number)


def averages(
    likelihood: Likelihood,
    y: Tensor,
    f: Tensor,
    root: Root,
    fisher: bool = False,
    pool: Tensor | None = None,
    diagonal: bool = False,
    row_nodes: RowNodes | None = None,
) -> Derivatives:
    """E log p (B,), E g (B, C), E Λ (B, C, C); with `fisher` the expected Fisher information, never
    indefinite, for E Λ.

    row_nodes: of pooled classes, nodes of its own for every row.
    """
    B, C = f.shape
    if (
        row_nodes is not None
        and pool is not None
        and isinstance(root, ScaledRoot)
        and of_classes(likelihood)
    ):
        return _of_classes_by_rows(likelihood, y, f, root, pool, diagonal, row_nodes)
    exact = likelihood.averages_in_closed_form(y, f, root, fisher)
    if exact is not None:
        return (
            exact
            if pool is None
            else exact._replace(precision=_pooled(exact.precision, pool, diagonal))
        )
    nodes, weights = normal_nodes(C, _pairs(C))
    z = nodes.mT.contiguous()
    fast = of_classes(likelihood)
    each = len(nodes) * C * (1 if fast else C) + (0 if fast and pool is not None else C * C)
    size = max(NUMBERS_AT_ONCE // each, 1)
    parts: list[Derivatives] = []
    for start in range(0, max(B, 1), size):
        rows = slice(start, start + size)
        points = root.take(rows).times(z).add_(f[rows].unsqueeze(2))  # (b, C, J)
        share = None if pool is None else pool[rows]
        found = (_of_classes if fast else _of_nodes)(
            likelihood, y[rows], points, weights, fisher, share, diagonal
        )
        if pool is not None and parts:
            found = found._replace(precision=parts[0].precision.add_(found.precision))
        parts.append(found)
    log_prob, score = (torch.cat([part[k] for part in parts]) for k in (0, 1))
    return Derivatives(
        log_prob,
        score,
        parts[0].precision if pool is not None else torch.cat([p.precision for p in parts]),
    )


def _pairs(outputs: int) -> int:
    return next(pairs for most, pairs in PAIRS if most >= outputs)


def pooled_fisher(
    likelihood: Likelihood, f: Tensor, pool: Tensor, diagonal: bool = False
) -> Tensor:
    """Σ_i w_i E_y Λ(f_i) (1, C, C), or its diagonal (1, C)."""
    if of_classes(likelihood):
        p, weight = likelihood.mean(f), _weight(likelihood)
        if diagonal:
            return (pool @ (p * (1 - p))).mul_(weight).unsqueeze(0)
        return _from_outer((p * pool[:, None]).mT @ p).mul_(weight).unsqueeze(0)
    size = max(NUMBERS_AT_ONCE // f.shape[1] ** 2, 1)
    blocks = [slice(start, start + size) for start in range(0, max(len(f), 1), size)]
    total = torch.stack(
        [torch.tensordot(pool[rows], likelihood.fisher(f[rows]), 1) for rows in blocks]
    ).sum(0, keepdim=True)
    return total.diagonal(dim1=-2, dim2=-1) if diagonal else total


def concave(likelihood: Likelihood) -> bool:
    """Whether log p is known to be concave in f, so that E Λ is never indefinite."""
    return likelihood.concave


def of_classes(likelihood: Likelihood) -> bool:
    """Whether Λ = diag(p) − ppᵀ, up to a factor."""
    return likelihood.softmax


def _temperature(likelihood: Likelihood) -> float:
    """T of p = softmax(f/T)."""
    temperature = likelihood.logit_temperature
    assert temperature is not None
    return temperature


def _weight(likelihood: Likelihood) -> float:
    """The factor on diag(p) − ppᵀ of classes."""
    return likelihood.power / _temperature(likelihood) ** 2


def _of_nodes(
    likelihood: Likelihood,
    y: Tensor,
    f: Tensor,
    weights: Tensor,
    fisher: bool,
    pool: Tensor | None,
    diagonal: bool,
) -> Derivatives:
    f = f.mT
    found = likelihood.derivatives(y.unsqueeze(1).expand(*f.shape[:2], *y.shape[1:]), f)
    if fisher:
        found = found._replace(precision=likelihood.fisher(f))
    log_prob, score, precision = (torch.tensordot(part, weights, dims=([1], [0])) for part in found)
    precision = (precision + precision.mT) / 2
    return Derivatives(
        log_prob, score, precision if pool is None else _pooled(precision, pool, diagonal)
    )


def _pooled(precision: Tensor, pool: Tensor, diagonal: bool) -> Tensor:
    """Σ_i w_i Λ_i (1, C, C), or its diagonal (1, C)."""
    total: Tensor = torch.tensordot(pool, precision, 1).unsqueeze(0)
    return total.diagonal(dim1=-2, dim2=-1) if diagonal else total


def _of_classes(
    likelihood: Likelihood,
    y: Tensor,
    f: Tensor,
    weights: Tensor,
    fisher: bool,
    pool: Tensor | None,
    diagonal: bool,
) -> Derivatives:
    """E Λ = diag(E p) − E p pᵀ, without a matrix for each node. f is overwritten."""
    beta, temperature = likelihood.power, _temperature(likelihood)
    if temperature != 1:
        f /= temperature
    hit = y.long()[:, None, None].expand(-1, 1, f.shape[2])
    f -= f.amax(1, keepdim=True)
    own = f.gather(1, hit)
    p = f.exp_()
    total = p.sum(1, keepdim=True)
    log_prob = own.sub_(total.log()).squeeze(1) @ weights
    p /= total
    hits = torch.nn.functional.one_hot(y.long(), f.shape[1])
    if pool is None:
        even = bool((weights == weights[0]).all())
        outer = (p @ p.mT).mul_(weights[0]) if even else (p * weights) @ p.mT
        score = hits - outer.sum(-1)  # Σ p = 1 at each node
        return Derivatives(
            beta * log_prob,
            beta / temperature * score,
            _from_outer(outer).mul_(_weight(likelihood)),
        )
    score = hits - p @ weights
    if diagonal:
        precision = _weight(likelihood) * (pool @ ((1 - p).mul_(p) @ weights)).unsqueeze(0)
    else:  # one product over all rows and nodes
        flat = p.movedim(1, 0).flatten(1)
        outer = (flat * (pool[:, None] * weights).flatten()) @ flat.mT
        precision = _from_outer(outer).mul_(_weight(likelihood)).unsqueeze(0)
    return Derivatives(beta * log_prob, beta / temperature * score, precision)


def curvature_product(
    likelihood: Likelihood,
    y: Tensor,
    f: Tensor,
    u: Tensor,
    root: Root | None = None,
    fisher: bool = False,
    row_nodes: RowNodes | None = None,
) -> Tensor:
    """Λ u for each row at f; with a root, E[Λ] u under N(f, R Rᵀ).  u (B, C) -> (B, C).

    For classes no matrix of a row is formed at f, nor with nodes of its own for each row. `fisher`
    and `row_nodes` as in `averages`.
    """
    B, C = f.shape
    if of_classes(likelihood) and root is None:
        p = likelihood.mean(f)
        return _weight(likelihood) * p * (u - (p * u).sum(1, keepdim=True))
    if of_classes(likelihood) and row_nodes is not None and isinstance(root, ScaledRoot):
        parts = []
        for rows, _, p in _at_row_nodes(likelihood, y, f, root, row_nodes):
            here = u[rows].to(p.dtype).mT.unsqueeze(-1)
            parts.append(p.mul(here - (p * here).sum(0)).mean(2, dtype=torch.float64).mT)
        return _weight(likelihood) * torch.cat(parts)
    size = max(NUMBERS_AT_ONCE // C**2, 1)
    products = []
    for start in range(0, B, size):
        rows = slice(start, start + size)
        if root is None:
            precision = likelihood.precision(y[rows], f[rows])
        else:
            precision = averages(likelihood, y[rows], f[rows], root.take(rows), fisher).precision
        products.append((precision @ u[rows].to(precision.dtype).unsqueeze(-1)).squeeze(-1))
    return torch.cat(products)


def _at_row_nodes(
    likelihood: Likelihood, y: Tensor, f: Tensor, root: ScaledRoot, nodes: RowNodes
) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """Blocks of rows, with E log p(y|f) (b,) of the base law and the probabilities at their
    nodes (C, b, S).
    """
    B, C = f.shape
    temperature = _temperature(likelihood)
    generator = torch.Generator().manual_seed(nodes.seed)
    logits = (f / temperature).to(root.dtype).mT.contiguous()  # (C, B)
    scale = (root.scale / temperature).mT.contiguous()
    size = max(max(BLOCK, C * C) // (nodes.count * C), 1)
    for start in range(0, B, size):
        rows = slice(start, start + size)
        here = logits[:, rows].unsqueeze(-1)
        z = torch.randn(C, here.shape[1], nodes.count // 2, dtype=root.dtype, generator=generator)
        z.mul_(scale[:, rows].unsqueeze(-1))
        if root.basis is not None:
            z = (root.basis @ z.flatten(1)).view_as(z)
        p = torch.cat([here + z, here - z], 2)
        p -= p.amax(0)
        own = p.gather(0, y[rows].long()[None, :, None].expand(1, -1, nodes.count))[0]
        sums = p.exp_().sum(0)
        log_prob = own.sub_(sums.log()).mean(1, dtype=torch.float64)
        p /= sums
        yield rows, log_prob, p


def _of_classes_by_rows(
    likelihood: Likelihood,
    y: Tensor,
    f: Tensor,
    root: ScaledRoot,
    pool: Tensor,
    diagonal: bool,
    nodes: RowNodes,
) -> Derivatives:
    """As `_of_classes` for pooled rows, with `nodes`, in the dtype of the root.

    Sums over blocks of rows are float64.
    """
    beta, temperature = likelihood.power, _temperature(likelihood)
    B, C = f.shape
    log_prob, mean = torch.empty(B, dtype=torch.float64), torch.empty(C, B, dtype=torch.float64)
    total = torch.zeros((C,) if diagonal else (C, C), dtype=torch.float64)
    for rows, own, p in _at_row_nodes(likelihood, y, f, root, nodes):
        log_prob[rows] = own
        mean[:, rows] = p.mean(2)
        weights = pool[rows].to(root.dtype).div(nodes.count)
        if diagonal:
            total += ((1 - p).mul_(p).sum(2) @ weights).double()
        else:  # one product over all rows and nodes
            total += ((p * weights[:, None]).flatten(1) @ p.flatten(1).mT).double()
    hits = torch.nn.functional.one_hot(y.long(), C)
    precision = (
        (total if diagonal else _from_outer((total + total.mT).div_(2)))
        .mul_(_weight(likelihood))
        .unsqueeze(0)
    )
    return Derivatives(beta * log_prob, beta / temperature * (hits - mean.mT), precision)


def _from_outer(outer: Tensor) -> Tensor:
    """diag(E p) − E p pᵀ from E p pᵀ (..., C, C), in place: rows sum to zero."""
    diagonal = outer.diagonal(dim1=-2, dim2=-1)
    others = outer.sum(-1) - diagonal
    outer.neg_()
    diagonal.copy_(others)
    return outer
