"""The integrals of a softmax for many classes: its mean, its variance and its mean entropy.

They are averages over fixed nodes ±z:

    f = f̂ ± w ∘ (R z),   w² = diag(K) / mean (R z)²        (w = 1 where the nodes are whitened)

R z is computed for one node of each mirrored pair. Where a root has profiles (Kronecker factors),
it is a combination of products that all rows share (`SharedNodes`): r·C·S multiplications a row
with r about 10, in place of C²·S. Rows whose scale is not such a combination, to a share
`TOLERANCE`, take the whole product. The combination changes probabilities by about 1e-7 (see
benchmarks/speed/predict_scale.py), far less than the error of the nodes.

The sums are taken over slabs of some rows, some nodes and all classes, with the classes last, which
fit a processor's cache. Probabilities that are too small for the dtype are summed in logarithms, in
a second pass over their rows.

B rows of a chunk, C classes, S nodes. R is a root of K = R Rᵀ. A `ScaledRoot` is R = Q diag(s): all
rows have one basis Q, and each row has a scale s. Its profiles are a few vectors of which the
scales of all rows are combinations. Nodes are whitened if they have unit variance in every
direction.
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
# Slabs (rows, nodes, classes), best for 32, 150 and 1,000 classes
# (benchmarks/speed/predict_scale.py --slabs).
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
    """The integrals of a chunk of rows, in float64."""

    log_probs: Tensor  # log E p (B, C), not normalised
    spread: Tensor  # Var p (B, C)
    entropy: Tensor  # E H(p) in nats (B,)


class _Nodes(NamedTuple):
    """The nodes f̂ ± w ∘ (R z) of a block of b rows, without f̂."""

    factors: Tensor | None  # w (b, C); None: ones
    moved: Callable[[slice], Tensor]  # a slice of s nodes -> R z there (b, s, C)


@dataclass
class SoftmaxIntegrals:
    """Integrates chunks of rows, one after the other.

    A call changes `shared`: it keeps the products that rows share, for the chunks that follow.
    """

    half: Tensor  # one node of each mirrored pair (S/2, C)
    budget: int  # bytes of intermediate results
    whitened: bool  # whether the nodes have unit variance in every direction
    rows: int | None = None  # number of rows of all chunks together, if known
    shared: SharedNodes | None = None

    def __call__(self, f: Tensor, root: Root) -> Sums:
        """Integrate a chunk, from f̂ (B, C) in float64 and a root of K.

        Rows whose nodes are combinations of the shared products use these; the other rows use the
        product with their own root.
        """
        self._prepare_shared_products(root)
        shared = self.shared
        if shared is None or not isinstance(root, ScaledRoot) or not shared.has_basis_of(root):
            return self._integrate_by_own_roots(f, root)
        is_covered = shared.find_covered_rows(root, TOLERANCE)
        if bool(is_covered.all()):
            return self._integrate_by_shared_products(f, root, shared)
        sums = _make_empty_sums(f)
        covered = is_covered.nonzero().squeeze(1)
        uncovered = (~is_covered).nonzero().squeeze(1)
        by_shared = self._integrate_by_shared_products(
            f[covered], root.select_rows(covered), shared
        )
        _put_rows(sums, covered, by_shared)
        by_own = self._integrate_by_own_roots(f[uncovered], root.select_rows(uncovered))
        _put_rows(sums, uncovered, by_own)
        return sums

    def _prepare_shared_products(self, root: Root) -> None:
        """Set `shared` to the products that the rows of this root share; None if they do not pay.

        A root without a basis or profiles leaves `shared` as it is, and so does one that it already
        serves.
        """
        if not isinstance(root, ScaledRoot) or root.basis is None or root.profiles is None:
            return
        if self.shared is not None and self.shared.has_basis_of(root):
            return
        # For r profiles, the products take the memory of the nodes of r rows.
        count = len(root.profiles())
        fits = COPIES * count * self.half.numel() * root.dtype.itemsize <= self.budget
        enough = (self.rows or len(root.scale)) >= ROWS_FOR_A_PROFILE * count
        self.shared = (
            build_shared_nodes(root, self.half.to(root.dtype)) if fits and enough else None
        )

    def _integrate_by_shared_products(
        self, f: Tensor, root: ScaledRoot, shared: SharedNodes
    ) -> Sums:
        """Integrate rows f̂ (B, C) with their roots by combinations of shared products.

        The combinations are computed for a slab of nodes at a time.
        """
        coefficients = shared.coefficients(root)

        def make_nodes(block: slice) -> _Nodes:
            """Return the nodes of a block of rows; a slab of them is combined when it is read."""
            combination = coefficients[block]
            factors = self._compute_variance_factors(
                root.select_rows(block), shared.mean_squares(combination)
            )
            return _Nodes(factors, lambda nodes: shared.combine_products(combination, nodes))

        return self._integrate_in_blocks(f, make_nodes, NODES_AT_ONCE, root.dtype)

    def _integrate_by_own_roots(self, f: Tensor, root: Root) -> Sums:
        """Integrate rows f̂ (B, C) by the product of all nodes with the root of each row."""
        half = self.half.to(root.dtype)

        def make_nodes(block: slice) -> _Nodes:
            """Return the nodes of a block of rows, all computed at once."""
            roots = root.select_rows(block)
            moved = roots.multiply_outputs_last(half)
            # Whitened nodes have no factors, so that any tensor will do.
            mean_squares = moved if self.whitened else (moved * moved).mean(1)
            factors = self._compute_variance_factors(roots, mean_squares)
            return _Nodes(factors, lambda nodes: moved[:, nodes])

        return self._integrate_in_blocks(f, make_nodes, len(half), root.dtype)

    def _compute_variance_factors(self, root: Root, mean_squares: Tensor) -> Tensor | None:
        """Return w (b, C), which gives each output exactly its variance in K.

        The result is None for whitened nodes, which have that variance. mean_squares (b, C): of R z
        over the nodes. Nodes that are not whitened have the variance only on average over outputs.
        """
        if self.whitened:
            return None
        return torch.where(mean_squares > 0, root.variances() / mean_squares, 1.0).sqrt()

    def _count_rows_at_once(self, nodes: int, dtype: torch.dtype) -> int:
        """Return the number of rows of a block, at least one.

        A block has as many rows as the cache and the budget hold. nodes: the number of nodes of a
        slab. dtype: that of the nodes.
        """
        entries = nodes * self.half.shape[1]
        affordable = self.budget // (COPIES * dtype.itemsize * entries)
        return max(min(ENTRIES_AT_ONCE // entries, affordable), 1)

    def _integrate_in_blocks(
        self, f: Tensor, make_nodes: Callable[[slice], _Nodes], slab_size: int, dtype: torch.dtype
    ) -> Sums:
        """Integrate rows f̂ (B, C), a block of rows and a slab of nodes at a time.

        make_nodes: a block of rows -> its nodes. slab_size: nodes of a slab. dtype: of the nodes.
        """
        # With the largest output at zero nothing overflows. The clamp leaves room for adding R z.
        top = (f - f.amax(1, keepdim=True)).clamp_min(torch.finfo(dtype).min / 4).to(dtype)
        slabs = _split_into_slices(len(self.half), slab_size)
        sums = _make_empty_sums(f)
        for block in _split_into_slices(len(f), self._count_rows_at_once(slab_size, dtype)):
            block_of_rows = _Block(top[block], make_nodes(block), slabs)
            # Each node of the half stands for itself and its mirror image.
            _put_rows(sums, block, block_of_rows.integrate(2 * len(self.half)))
        return sums


def _make_empty_sums(f: Tensor) -> Sums:
    """Return uninitialised sums for rows with f̂ (B, C), to be filled by `_put_rows`."""
    return Sums(torch.empty_like(f), torch.empty_like(f), torch.empty_like(f[:, 0]))


def _put_rows(sums: Sums, rows: Tensor | slice, sums_of_rows: Sums) -> None:
    """Write the sums of some rows (indices or a slice) into `sums`, in place."""
    for target, values in zip(sums, sums_of_rows, strict=True):
        target[rows] = values


@dataclass(frozen=True, eq=False)
class _Block:
    """A block of b rows, which are integrated over all nodes, a slab of nodes at a time."""

    top: Tensor  # f̂ less its maximum over the outputs (b, C)
    nodes: _Nodes
    slabs: list[slice]

    def integrate(self, count: int) -> Sums:
        """Return the sums of the block, as means over `count` nodes, mirror images included."""
        likeliest = self.top.argmax(1)[:, None, None]

        # Squares are summed around a point near E p, so that Var p is not a difference of large
        # numbers.
        centre = torch.softmax(self.top, 1).unsqueeze(1)

        # Slabs are added to sums by node (b, s, C), which is faster than a sum over the nodes of
        # each slab. The last slab may be smaller. Its arrays are changed in place.
        total, squares, entropy = (self._make_zero_slab() for _ in range(3))
        for logits in self._iterate_logits():
            p = torch.softmax(logits, -1)
            size = p.shape[1]
            total[:, :size].add_(p)
            log_p = logits.sub_(_log_sum_exp(logits, p, likeliest))
            entropy[:, :size].addcmul_(log_p, p)
            from_centre = p.sub_(centre)
            squares[:, :size].addcmul_(from_centre, from_centre)

        mean = total.sum(1).double() / count
        shift = mean - centre.squeeze(1).double()
        spread = (squares.sum(1).double() / count - shift * shift).clamp_min(0)
        log_probs = mean.log()
        tiny = (mean < TINY[self.top.dtype]).any(1).nonzero().squeeze(1)
        if len(tiny):
            log_probs[tiny] = self._average_in_logarithms(tiny, count)
        return Sums(log_probs, spread, (-entropy.sum((1, 2)).double() / count).clamp_min(0))

    def _make_zero_slab(self) -> Tensor:
        """Return zeros of the size of the first slab, the largest one (b, s, C)."""
        rows, classes = self.top.shape
        return self.top.new_zeros(rows, self.slabs[0].stop, classes)

    def _iterate_logits(self, rows: Tensor | None = None) -> Iterator[Tensor]:
        """Yield for each slab f̂ + w ∘ (R z) (b, s, C), and then f̂ − w ∘ (R z), its mirror image.

        rows: indices of rows of the block; None for all of them.
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

    def _average_in_logarithms(self, rows: Tensor, count: int) -> Tensor:
        """Return log E p (r, C) over `count` nodes, without underflow.

        rows (r,): indices of rows of the block.
        """
        total = torch.full((len(rows), self.top.shape[1]), -torch.inf, dtype=torch.float64)
        for logits in self._iterate_logits(rows):
            total = torch.logaddexp(total, torch.log_softmax(logits, -1).logsumexp(1).double())
        return total - torch.tensor(count, dtype=torch.float64).log()


def _log_sum_exp(logits: Tensor, p: Tensor, likeliest: Tensor) -> Tensor:
    """Return log Σ_c exp(logits) (b, s, 1), as logit − log p of one class.

    logits and their softmax p: (b, s, C). likeliest (b, 1, 1): the most probable class at f̂. Its
    probability is accurate unless it is tiny at some node. If it is, the most probable class of
    each node is taken, which is slower to find.
    """
    index = likeliest.expand(-1, logits.shape[1], -1)
    p_of_likeliest = p.gather(2, index)
    if bool((p_of_likeliest > TINY[p.dtype]).all()):
        return logits.gather(2, index) - p_of_likeliest.log_()
    return logits.amax(-1, keepdim=True) - p.amax(-1, keepdim=True).log_()


def _split_into_slices(count: int, size: int) -> list[slice]:
    """Split `count` entries into slices of `size`; the last one may reach beyond the end."""
    return [slice(start, start + size) for start in range(0, count, size)]
