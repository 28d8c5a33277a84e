"""The integrals of a softmax for many classes: E softmax(f), its variance, and the mean entropy,
over fixed nodes ±z.

    f = f̂ ± w ∘ (R z),   w² = diag(K) / mean (R z)²        (w = 1 where the nodes are whitened)

R z is computed for one node of each mirrored pair. Where a root has profiles (Kronecker factors),
it is a combination of products that all rows share (`SharedNodes`): r·C·S multiplications a row
with r about 10, in place of C²·S. Rows whose scale is not such a combination, to a share
`TOLERANCE`, take the whole product. The combination changes probabilities by about 1e-7 (see
benchmarks/predict_scale.py), far less than the error of the nodes.

The sums are taken over slabs of some rows, some nodes and all classes, with the classes last, which
fit a processor's cache. Probabilities that are too small for the dtype are summed in logarithms, in
a second pass over their rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ssla.maths.roots import Root, ScaledRoot, SharedNodes, build_shared_nodes

TOLERANCE = 5e-6  # of a scale, relative to its largest entry; rounding in float32 reaches 3e-6
# rows for each profile from which the shared products are made: each costs as much as a row without
# them
ROWS_FOR_A_PROFILE = 2
# Slabs (rows, nodes, classes), best for 32, 150 and 1,000 classes (benchmarks/predict_scale.py
# --slabs).
NODES_AT_ONCE = 16
ENTRIES_AT_ONCE = 1 << 18
COPIES = 6  # of a slab, at most
TINY = {
    torch.float32: 1e-30,
    torch.float64: 1e-280,
}  # smaller probabilities are summed in logarithms
# logits below the highest; the product of an infinite one with a zero probability has no value
LOWEST = -1e30


class Sums(NamedTuple):
    """The integrals of a chunk of rows, in float64.

    log_probs: log E p (B, C), not normalised; spread: Var p (B, C); entropy: E H(p) in nats (B,).
    """

    log_probs: Tensor
    spread: Tensor
    entropy: Tensor


class _Nodes(NamedTuple):
    """The nodes of a block of rows: w (b, C), None for ones, and R z at some nodes (b, s, C)."""

    factors: Tensor | None
    moved: Callable[[slice], Tensor]


@dataclass
class SoftmaxIntegrals:
    """Integrates chunk after chunk. The shared products are kept for the chunks that follow."""

    half: Tensor  # one node of each mirrored pair (S/2, C)
    budget: int  # bytes of intermediate results
    whitened: bool
    rows: int | None = None  # of all chunks together, if known
    shared: SharedNodes | None = None

    def __call__(self, f: Tensor, root: Root) -> Sums:
        """Integrate a chunk: f̂ (B, C) in float64 and a root of K.

        Rows that are combinations of the shared products take them; others take their own product.
        """
        self._make_shared_products(root)
        shared = self.shared
        if shared is None or not isinstance(root, ScaledRoot) or not shared.has_basis_of(root):
            return self._by_product(f, root)
        covered = shared.find_covered_rows(root, TOLERANCE)
        if bool(covered.all()):
            return self._by_shared(f, root, shared)
        sums = _empty_sums(f)
        near, far = covered.nonzero().squeeze(1), (~covered).nonzero().squeeze(1)
        _put_rows(sums, near, self._by_shared(f[near], root.select_rows(near), shared))
        _put_rows(sums, far, self._by_product(f[far], root.select_rows(far)))
        return sums

    def _make_shared_products(self, root: Root) -> None:
        """Make the products that rows of this basis share, where there are enough rows for them."""
        if not isinstance(root, ScaledRoot) or root.basis is None or root.profiles is None:
            return
        if self.shared is not None and self.shared.has_basis_of(root):
            return
        # The products have the size of r rows' nodes, and so have to fit the budget.
        count = len(root.profiles())
        fits = COPIES * count * self.half.numel() * root.dtype.itemsize <= self.budget
        enough = (self.rows or len(root.scale)) >= ROWS_FOR_A_PROFILE * count
        self.shared = (
            build_shared_nodes(root, self.half.to(root.dtype)) if fits and enough else None
        )

    def _by_shared(self, f: Tensor, root: ScaledRoot, shared: SharedNodes) -> Sums:
        """Integrate rows f̂ (B, C) by combinations of shared products, a slab of nodes at a time."""
        coefficients = shared.coefficients(root)

        def nodes_of_block(block: slice) -> _Nodes:
            """Return the nodes of some rows, which are combined when a slab asks for them."""
            combination = coefficients[block]
            factors = self._factors(root.select_rows(block), shared.mean_squares(combination))
            return _Nodes(factors, lambda nodes: shared.combine_products(combination, nodes))

        return self._in_blocks(f, nodes_of_block, NODES_AT_ONCE, root.dtype)

    def _by_product(self, f: Tensor, root: Root) -> Sums:
        """Integrate rows f̂ (B, C) by a product of all nodes with each row's own root."""
        half = self.half.to(root.dtype)

        def nodes_of_block(block: slice) -> _Nodes:
            """Return the nodes of some rows, all computed at once."""
            roots = root.select_rows(block)
            moved = roots.multiply_outputs_last(half)
            mean_squares = (moved * moved).mean(1) if not self.whitened else moved
            return _Nodes(self._factors(roots, mean_squares), lambda nodes: moved[:, nodes])

        return self._in_blocks(f, nodes_of_block, len(half), root.dtype)

    def _factors(self, root: Root, mean_squares: Tensor) -> Tensor | None:
        """Return w (b, C) with which each output has its own variance exactly; None for ones.

        mean_squares (b, C): of R z over the nodes. Many outputs' nodes have the variance only in
        the mean over outputs.
        """
        if self.whitened:
            return None
        return torch.where(mean_squares > 0, root.variances() / mean_squares, 1.0).sqrt()

    def _rows_at_once(self, nodes: int, dtype: torch.dtype) -> int:
        """Return the rows of a block: as many as the cache and the budget hold, at least one.

        nodes: of a slab; dtype: of the nodes.
        """
        entries = nodes * self.half.shape[1]
        affordable = self.budget // (COPIES * dtype.itemsize * entries)
        return max(min(ENTRIES_AT_ONCE // entries, affordable), 1)

    def _in_blocks(
        self, f: Tensor, nodes_of_block: Callable[[slice], _Nodes], nodes: int, dtype: torch.dtype
    ) -> Sums:
        """Integrate rows f̂ (B, C), a block of rows at a time; nodes: the size of a slab."""
        # With the largest output at zero nothing overflows; a quarter of the range is left for R z.
        top = (f - f.amax(1, keepdim=True)).clamp_min(torch.finfo(dtype).min / 4).to(dtype)
        slabs = _split_into_slices(len(self.half), nodes)
        sums = _empty_sums(f)
        for block in _split_into_slices(len(f), self._rows_at_once(nodes, dtype)):
            part = _Block(top[block], nodes_of_block(block), slabs)
            _put_rows(sums, block, part.integrate(2 * len(self.half)))
        return sums


def _empty_sums(f: Tensor) -> Sums:
    """Return uninitialised sums for the rows f̂ (B, C)."""
    return Sums(torch.empty_like(f), torch.empty_like(f), torch.empty_like(f[:, 0]))


def _put_rows(sums: Sums, rows: Tensor | slice, part: Sums) -> None:
    """Write the sums of some rows into those of all rows."""
    for target, values in zip(sums, part, strict=True):
        target[rows] = values


@dataclass(frozen=True, eq=False)
class _Block:
    """The integrals of some rows over all nodes, a slab of nodes at a time."""

    top: Tensor  # f̂ less its maximum (b, C)
    nodes: _Nodes
    slabs: list[slice]

    def integrate(self, count: int) -> Sums:
        """Sum p, its squares and its entropy over `count` nodes: mirror images are counted."""
        likeliest = self.top.argmax(1)[:, None, None]
        # Squares are summed around a point near E p: Var p is then no difference of large numbers.
        centre = torch.softmax(self.top, 1).unsqueeze(1)
        # Sums over slabs are kept by node (b, s, C): adding to them is faster than a sum over the
        # nodes of each slab.
        total, squares, entropy = (self._zeros_of_slab() for _ in range(3))
        for logits in self._logits():
            p = torch.softmax(logits, -1)
            total[:, : p.shape[1]].add_(p)
            log_p = logits.sub_(_log_sum_exp(logits, p, likeliest))
            entropy[:, : p.shape[1]].addcmul_(log_p, p)
            off = p.sub_(centre)
            squares[:, : p.shape[1]].addcmul_(off, off)
        mean = total.sum(1).double() / count
        shift = mean - centre.squeeze(1).double()
        spread = (squares.sum(1).double() / count - shift * shift).clamp_min(0)
        log_probs = mean.log()
        tiny = (mean < TINY[self.top.dtype]).any(1).nonzero().squeeze(1)
        if len(tiny):
            log_probs[tiny] = self._log_means(tiny, count)
        return Sums(log_probs, spread, (-entropy.sum((1, 2)).double() / count).clamp_min(0))

    def _zeros_of_slab(self) -> Tensor:
        """Return zeros for a slab of nodes (b, s, C)."""
        rows, classes = self.top.shape
        return self.top.new_zeros(rows, self.slabs[0].stop, classes)

    def _logits(self, rows: Tensor | None = None) -> Iterator[Tensor]:
        """Yield f̂ ± w ∘ (R z) (b, s, C) for each slab of nodes, and then for their mirror images.

        rows: of the block; None for all.
        """
        top = (self.top if rows is None else self.top[rows]).unsqueeze(1)
        factors = self.nodes.factors
        factors = factors if factors is None or rows is None else factors[rows]
        for nodes in self.slabs:
            moved = self.nodes.moved(nodes)
            moved = moved if rows is None else moved[rows]
            for sign in (1, -1):
                if factors is None:
                    yield torch.add(top, moved, alpha=sign)
                else:
                    yield torch.addcmul(top, factors.unsqueeze(1), moved, value=sign)

    def _log_means(self, rows: Tensor, count: int) -> Tensor:
        """Return log E p (r, C) of some rows (r,) over `count` nodes, summed in logarithms."""
        total = torch.full((len(rows), self.top.shape[1]), -torch.inf, dtype=torch.float64)
        for logits in self._logits(rows):
            total = torch.logaddexp(total, torch.log_softmax(logits, -1).logsumexp(1).double())
        return total - torch.tensor(count, dtype=torch.float64).log()


def _log_sum_exp(logits: Tensor, p: Tensor, likeliest: Tensor) -> Tensor:
    """Return log Σ_c exp(logits) (b, s, 1) as logit − log p of a class.

    logits, p (b, s, C); likeliest (b, 1, 1): the most probable class at f̂, which is tried first.
    Any class will do unless its probability is tiny. Then it is the most probable class of each
    node, which is slower to find.
    """
    index = likeliest.expand(-1, logits.shape[1], -1)
    known = p.gather(2, index)
    if bool((known > TINY[p.dtype]).all()):
        return logits.gather(2, index) - known.log_()
    return logits.amax(-1, keepdim=True) - p.amax(-1, keepdim=True).log_()


def _split_into_slices(count: int, size: int) -> list[slice]:
    """Split `count` entries into slices of `size`."""
    return [slice(start, start + size) for start in range(0, count, size)]
