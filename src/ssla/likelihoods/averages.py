"""Averages E log p(y|f), E g and E Λ for f ~ N(f̂, K), which a variational Gaussian sums over rows.

A likelihood with closed forms has the method `averages_in_closed_form`. For others the averages are
sums over fixed nodes, a few rows at a time: Gauss–Hermite for one and two outputs, a
low-discrepancy set for more.

With `pool`, the weights of the rows (B,), Λ is Σ_i w_i Λ_i (1, C, C), and many classes need no C×C
matrix for each row. With `diagonal` as well it is Σ_i w_i diag Λ_i (1, C), without any C×C matrix.

Symbols: B rows, C outputs, J or S nodes (points of f at which a sum stands for an integral), g the
score, Λ the observed precision, R a root of K = R Rᵀ, β the power of a tempered likelihood, T the
temperature of class logits. p is the vector of class probabilities at one f.
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

NUMBERS_AT_ONCE = 1 << 17  # larger arrays do not fit the processor's cache
# (largest number of outputs, pairs of nodes of the low-discrepancy set). More pairs for ten classes
# change predictives by less than 2e-4 in KL. For many classes the sums over rows average out what
# the nodes of one row miss.
PAIRS = ((64, 128), (300, 32), (math.inf, 16))
# From this number of rows on, or beyond this number of classes, pooled sums over classes have other
# nodes in each row. Guesses, not measured.
MANY_ROWS, MANY_CLASSES = 4096, 1000
# Measured for 10,000 rows × 512 features × 10 classes against 512 nodes for each row, by a script
# that was not kept: 8 nodes change the variances of outputs by 0.4%, 64 by 0.6%, so that the
# tolerance of the rounds is larger than the rest.
NODES_OF_ALL_ROWS = 1 << 17
FEWEST_NODES = 8  # of a row. A guess
# Numbers in the nodes of one block of rows; more for many classes, whose C×C matrix is as large.
# A guess, not measured.
BLOCK = 1 << 18


@dataclass(frozen=True)
class RowNodes:
    """Other nodes for each row: `count` normal draws, of which half are mirror images.

    The nodes are the same in every pass. A sum over n rows averages over n · count nodes, so that a
    few nodes for each row are enough for the sum, but not for one row.
    """

    count: int
    seed: int = 0

    @staticmethod
    def for_rows(rows: int, classes: int) -> RowNodes | None:
        """Return nodes for a sum over this number of rows with this number of classes.

        The result is None for few rows of few classes: there, nodes that all rows share are as fast
        and more accurate.
        """
        if rows < MANY_ROWS and (classes <= MANY_CLASSES or rows == 0):
            return None
        count = max(FEWEST_NODES, min(math.ceil(NODES_OF_ALL_ROWS / rows), _count_pairs(classes)))
        # The count must be even, because half of the nodes are mirror images.
        return RowNodes(2 * math.ceil(count / 2))

    def for_chunk(self, number: int) -> RowNodes:
        """Return nodes whose seed is the chunk's number, so that no two chunks share nodes."""
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
    """Return E log p (B,), E g (B, C) and E Λ (B, C, C) for f ~ N(f̂, R Rᵀ), with f (B, C) as f̂.

    y is (B,) or (B, C), and root is R. fisher: return the expected Fisher information, which is
    never indefinite, in place of E Λ. pool (B,): return Σ_i w_i E Λ_i (1, C, C) with these weights
    in place of E Λ. diagonal: return only the diagonal of that sum (1, C); it has no meaning
    without `pool`. row_nodes: use other nodes for each row; they are ignored unless rows are
    pooled, the likelihood is a softmax and the root is a ScaledRoot.
    """
    if (
        row_nodes is not None
        and pool is not None
        and isinstance(root, ScaledRoot)
        and likelihood.softmax
    ):
        return _average_pooled_classes(likelihood, y, f, root, pool, diagonal, row_nodes)
    exact = likelihood.averages_in_closed_form(y, f, root, fisher)
    if exact is None:
        return _average_at_shared_nodes(likelihood, y, f, root, fisher, pool, diagonal)
    if pool is None:
        return exact
    return exact._replace(precision=_pool_precisions(exact.precision, pool, diagonal))


def _average_at_shared_nodes(
    likelihood: Likelihood,
    y: Tensor,
    f: Tensor,
    root: Root,
    fisher: bool,
    pool: Tensor | None,
    diagonal: bool,
) -> Derivatives:
    """Return E log p (B,), E g (B, C) and E Λ or its pooled sum, by nodes that all rows share.

    The arguments and the shapes are those of `averages`, for f (B, C).
    """
    B, C = f.shape
    nodes, weights = normal_nodes(C, _count_pairs(C))
    z = nodes.mT.contiguous()  # (C, J)
    average_block = _average_classes_at_nodes if likelihood.softmax else _average_at_nodes

    # The largest arrays of a row: derivatives at its nodes, and its own C×C matrix.
    numbers_at_nodes = len(nodes) * C * (1 if likelihood.softmax else C)
    numbers_of_matrix = 0 if likelihood.softmax and pool is not None else C * C
    rows_at_once = max(NUMBERS_AT_ONCE // (numbers_at_nodes + numbers_of_matrix), 1)
    blocks: list[Derivatives] = []
    for start in range(0, max(B, 1), rows_at_once):
        rows = slice(start, start + rows_at_once)
        points = root.select_rows(rows).multiply(z).add_(f[rows].unsqueeze(2))  # (b, C, J)
        weights_of_rows = None if pool is None else pool[rows]
        block = average_block(
            likelihood, y[rows], points, weights, fisher, weights_of_rows, diagonal
        )
        # The first block holds the sum over all blocks.
        if pool is not None and blocks:
            block = block._replace(precision=blocks[0].precision.add_(block.precision))
        blocks.append(block)

    if pool is not None:
        precision = blocks[0].precision
    else:
        precision = torch.cat([block.precision for block in blocks])
    log_prob = torch.cat([block.log_prob for block in blocks])
    return Derivatives(log_prob, torch.cat([block.score for block in blocks]), precision)


def _count_pairs(outputs: int) -> int:
    """Return the number of pairs of low-discrepancy nodes of a row, by `PAIRS`.

    outputs: their number C. A pair is a node and its mirror image.
    """
    return next(pairs for largest, pairs in PAIRS if largest >= outputs)


def pool_fisher(likelihood: Likelihood, f: Tensor, pool: Tensor, diagonal: bool = False) -> Tensor:
    """Return the pooled Fisher information Σ_i w_i E_y Λ(f_i) (1, C, C), for f (B, C).

    pool (B,): the weights w. diagonal: return only its diagonal (1, C).
    """
    if likelihood.softmax:
        # Σ w_i (diag(p_i) − p_i p_iᵀ) by one product, without a matrix for each row.
        p = likelihood.mean(f)
        factor = _compute_class_factor(likelihood)
        if diagonal:
            return (pool @ (p * (1 - p))).mul_(factor).unsqueeze(0)
        return _form_class_precision((p * pool[:, None]).mT @ p).mul_(factor).unsqueeze(0)
    rows_at_once = max(NUMBERS_AT_ONCE // f.shape[1] ** 2, 1)
    starts = range(0, max(len(f), 1), rows_at_once)
    blocks = [slice(start, start + rows_at_once) for start in starts]
    total = torch.stack(
        [torch.tensordot(pool[rows], likelihood.fisher(f[rows]), 1) for rows in blocks]
    ).sum(0, keepdim=True)
    return total.diagonal(dim1=-2, dim2=-1) if diagonal else total


def _require_temperature(likelihood: Likelihood) -> float:
    """Return T of a likelihood with p = softmax(f/T). Raises AssertionError if it has none."""
    temperature = likelihood.logit_temperature
    assert temperature is not None
    return temperature


def _compute_class_factor(likelihood: Likelihood) -> float:
    """Return the factor in Λ = factor · (diag(p) − ppᵀ), for a likelihood with softmax(f/T).

    The factor is β/T², with β the power of a tempered likelihood: both derivatives in f carry 1/T.
    """
    return likelihood.power / _require_temperature(likelihood) ** 2


def _average_at_nodes(
    likelihood: Likelihood,
    y: Tensor,
    points: Tensor,
    weights: Tensor,
    fisher: bool,
    pool: Tensor | None,
    diagonal: bool,
) -> Derivatives:
    """Return the averages of b rows, for y (b, ...), points (b, C, J) and node weights (J,).

    This is for any likelihood. fisher, pool (b,), diagonal: as in `averages`.
    """
    points = points.mT  # (b, J, C)
    targets = y.unsqueeze(1).expand(*points.shape[:2], *y.shape[1:])
    derivatives = likelihood.derivatives(targets, points)
    if fisher:
        derivatives = derivatives._replace(precision=likelihood.fisher(points))
    log_prob, score, precision = (
        torch.tensordot(values, weights, dims=([1], [0])) for values in derivatives
    )
    precision = (precision + precision.mT) / 2
    if pool is not None:
        precision = _pool_precisions(precision, pool, diagonal)
    return Derivatives(log_prob, score, precision)


def _pool_precisions(precision: Tensor, pool: Tensor, diagonal: bool) -> Tensor:
    """Return Σ_i w_i Λ_i (1, C, C), or its diagonal (1, C), for Λ (B, C, C) and weights w (B,).

    precision: Λ. pool: w. diagonal: return only the diagonal.
    """
    total: Tensor = torch.tensordot(pool, precision, 1).unsqueeze(0)
    return total.diagonal(dim1=-2, dim2=-1) if diagonal else total


def _average_classes_at_nodes(
    likelihood: Likelihood,
    y: Tensor,
    points: Tensor,
    weights: Tensor,
    fisher: bool,
    pool: Tensor | None,
    diagonal: bool,
) -> Derivatives:
    """Return the averages of b rows of classes, for y (b,), points (b, C, J) and weights (J,).

    E Λ is diag(E p) − E p pᵀ, without a matrix for each node. pool (b,), diagonal: as in
    `averages`; fisher is ignored, because Λ is its own expectation. points is overwritten.
    """
    beta, temperature = likelihood.power, _require_temperature(likelihood)
    if temperature != 1:
        points /= temperature

    # log softmax and softmax in place, with the largest logit subtracted against overflow.
    index_of_y = y.long()[:, None, None].expand(-1, 1, points.shape[2])
    points -= points.amax(1, keepdim=True)
    logit_of_y = points.gather(1, index_of_y)
    p = points.exp_()
    total = p.sum(1, keepdim=True)
    log_prob = logit_of_y.sub_(total.log()).squeeze(1) @ weights
    p /= total
    is_y = torch.nn.functional.one_hot(y.long(), points.shape[1])
    factor = _compute_class_factor(likelihood)
    if pool is None:
        # Equal weights need no copy of p that is multiplied by them.
        equal_weights = bool((weights == weights[0]).all())
        outer = (p @ p.mT).mul_(weights[0]) if equal_weights else (p * weights) @ p.mT
        score = is_y - outer.sum(-1)  # Σ_c p_c = 1 at each node, so rows of E p pᵀ sum to E p
        precision = _form_class_precision(outer).mul_(factor)
    else:
        score = is_y - p @ weights
        if diagonal:
            precision = factor * (pool @ ((1 - p).mul_(p) @ weights)).unsqueeze(0)
        else:
            # One product over all rows and nodes.
            flat = p.movedim(1, 0).flatten(1)  # (C, bJ)
            outer = (flat * (pool[:, None] * weights).flatten()) @ flat.mT
            precision = _form_class_precision(outer).mul_(factor).unsqueeze(0)
    return Derivatives(beta * log_prob, beta / temperature * score, precision)


def multiply_by_curvature(
    likelihood: Likelihood,
    y: Tensor,
    f: Tensor,
    u: Tensor,
    root: Root | None = None,
    fisher: bool = False,
    row_nodes: RowNodes | None = None,
) -> Tensor:
    """Return the products Λ_i u_i (B, C) for f (B, C) and u (B, C), one for each row.

    y is (B,) or (B, C). root: R of N(f, R Rᵀ), over which Λ is averaged; None: Λ at f itself.
    `fisher` and `row_nodes` are those of `averages`, and have an effect only with a root. For a
    softmax no matrix of a row is formed without a root, nor with `row_nodes`.
    """
    if likelihood.softmax and root is None:
        p = likelihood.mean(f)
        return _compute_class_factor(likelihood) * p * (u - (p * u).sum(1, keepdim=True))
    if likelihood.softmax and row_nodes is not None and isinstance(root, ScaledRoot):
        products = []
        for rows, _, p in _iterate_row_nodes(likelihood, y, f, root, row_nodes):
            columns = u[rows].to(p.dtype).mT.unsqueeze(-1)  # (C, b, 1)
            at_nodes = p.mul(columns - (p * columns).sum(0))  # p∘(u − pᵀu), (C, b, S)
            products.append(at_nodes.mean(2, dtype=torch.float64).mT)
        return _compute_class_factor(likelihood) * torch.cat(products)

    rows_at_once = max(NUMBERS_AT_ONCE // f.shape[1] ** 2, 1)
    products = []
    for start in range(0, len(f), rows_at_once):
        rows = slice(start, start + rows_at_once)
        if root is None:
            precision = likelihood.precision(y[rows], f[rows])
        else:
            precision = averages(
                likelihood, y[rows], f[rows], root.select_rows(rows), fisher
            ).precision
        products.append((precision @ u[rows].to(precision.dtype).unsqueeze(-1)).squeeze(-1))

    return torch.cat(products)


def _iterate_row_nodes(
    likelihood: Likelihood, y: Tensor, f: Tensor, root: ScaledRoot, nodes: RowNodes
) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """Yield (rows, average log p(y|f) (b,), probabilities (C, b, S)) for blocks of b rows.

    y is (B,), f is (B, C), and root is R. The probabilities are those at the S nodes of each row.
    log p(y|f) is that of the predictive likelihood, without the power of a tempered one. The caller
    may overwrite the probabilities: each block has its own.
    """
    B, C = f.shape
    temperature = _require_temperature(likelihood)
    generator = torch.Generator().manual_seed(nodes.seed)
    logits = (f / temperature).to(root.dtype).mT.contiguous()  # (C, B)
    scale = (root.scale / temperature).mT.contiguous()
    rows_at_once = max(max(BLOCK, C * C) // (nodes.count * C), 1)

    for start in range(0, B, rows_at_once):
        rows = slice(start, start + rows_at_once)
        centre = logits[:, rows].unsqueeze(-1)
        shape = (C, centre.shape[1], nodes.count // 2)
        # Half of the nodes are drawn. The others are their mirror images around the centre.
        deviations = torch.randn(shape, dtype=root.dtype, generator=generator)
        deviations.mul_(scale[:, rows].unsqueeze(-1))
        if root.basis is not None:
            deviations = (root.basis @ deviations.flatten(1)).view_as(deviations)
        p = torch.cat([centre + deviations, centre - deviations], 2)
        # softmax in place, without a second array of this size.
        p -= p.amax(0)
        index_of_y = y[rows].long()[None, :, None].expand(1, -1, nodes.count)
        logit_of_y = p.gather(0, index_of_y)[0]
        sums = p.exp_().sum(0)
        log_prob = logit_of_y.sub_(sums.log()).mean(1, dtype=torch.float64)
        p /= sums
        yield rows, log_prob, p


def _average_pooled_classes(
    likelihood: Likelihood,
    y: Tensor,
    f: Tensor,
    root: ScaledRoot,
    pool: Tensor,
    diagonal: bool,
    nodes: RowNodes,
) -> Derivatives:
    """Return what `averages` does for pooled rows of classes, with other nodes in each row.

    y and pool are (B,), f is (B, C). The third field is the sum of Λ over rows: (1, C, C), or its
    diagonal (1, C). Products are in the dtype of the root, and sums over blocks of rows in float64.
    """
    B, C = f.shape
    beta, temperature = likelihood.power, _require_temperature(likelihood)
    log_prob = torch.empty(B, dtype=torch.float64)
    mean = torch.empty(C, B, dtype=torch.float64)
    total = torch.zeros((C,) if diagonal else (C, C), dtype=torch.float64)
    for rows, log_prob_of_block, p in _iterate_row_nodes(likelihood, y, f, root, nodes):
        log_prob[rows] = log_prob_of_block
        mean[:, rows] = p.mean(2)
        weights = pool[rows].to(root.dtype).div(nodes.count)
        if diagonal:
            total += ((1 - p).mul_(p).sum(2) @ weights).double()
        else:
            # One product over all rows and nodes.
            total += ((p * weights[:, None]).flatten(1) @ p.flatten(1).mT).double()
    is_y = torch.nn.functional.one_hot(y.long(), C)
    precision = total if diagonal else _form_class_precision((total + total.mT).div_(2))
    precision = precision.mul_(_compute_class_factor(likelihood)).unsqueeze(0)
    return Derivatives(beta * log_prob, beta / temperature * (is_y - mean.mT), precision)


def _form_class_precision(outer: Tensor) -> Tensor:
    """Return diag(E p) − E p pᵀ from outer = E p pᵀ (..., C, C), which is overwritten.

    The result is Λ of a softmax up to its factor (`_compute_class_factor`). Its rows sum to zero
    exactly, because each diagonal entry is the sum of the others in its row. E p itself is not
    needed.
    """
    diagonal = outer.diagonal(dim1=-2, dim2=-1)
    off_diagonal_sums = outer.sum(-1) - diagonal
    outer.neg_()
    diagonal.copy_(off_diagonal_sums)
    return outer
