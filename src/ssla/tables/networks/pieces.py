"""Piecewise linear inputs: each number is also given as its progress through the pieces of its
range.

A column with edges b₀ < … < b_T becomes T more columns, clamp((x − b_t)/(b_{t+1} − b_t), 0, 1); the
first piece goes on to the left and the last to the right without bound. A ReLU network then bends
where the data are, not where its weights started. Columns with two values have one piece and need
no more than themselves.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

PIECES = 8  # of a column, at most: a guess
FAR = 1e30  # beyond every standardised number


class Pieces(nn.Module):
    """A layer that appends its pieces to an input: x (…, d) -> (…, d + Σ counts).

    The edges are buffers: they are not trained.
    """

    low: Tensor  # b_t of each piece
    width: Tensor  # b_{t+1} − b_t
    least: Tensor  # smallest output of each piece
    most: Tensor  # largest output
    column: Tensor  # number of the column of each piece

    def __init__(self, counts: tuple[int, ...]) -> None:
        """Create the layer without edges: `set_edges` or a loaded file gives them.

        counts: the number of pieces of each column.
        """
        super().__init__()
        # which pieces are the first and the last of their column (Σ counts, 2)
        ends = torch.cat(
            [
                torch.tensor([[i == 0, i == count - 1] for i in range(count)])
                for count in counts
                if count
            ]
        )
        self.register_buffer("low", torch.zeros(len(ends), dtype=torch.float32))
        self.register_buffer("width", torch.ones(len(ends), dtype=torch.float32))
        self.register_buffer("least", torch.where(ends[:, 0], -FAR, 0.0).float(), persistent=False)
        self.register_buffer("most", torch.where(ends[:, 1], FAR, 1.0).float(), persistent=False)
        self.register_buffer(
            "column",
            torch.arange(len(counts)).repeat_interleave(torch.tensor(counts)),
            persistent=False,
        )

    def forward(self, x: Tensor) -> Tensor:
        """Append the pieces to x (…, d)."""
        t = (x[..., self.column] - self.low) / self.width
        return torch.cat([x, torch.minimum(torch.maximum(t, self.least), self.most)], -1)

    def set_edges(self, edges: tuple[Tensor, ...]) -> None:
        """Set the edges of the pieces of each column, in place."""
        self.low.copy_(torch.cat([column[:-1] for column in edges]))
        self.width.copy_(torch.cat([column.diff() for column in edges]))


def quantile_edges(x: Tensor, weights: Tensor, pieces: int = PIECES) -> tuple[Tensor, ...]:
    """Return the edges of each column of x (n, d): its quantiles by weight, without repetition.

    weights (n,) are row weights. There are no edges for columns of two values.
    """
    levels = torch.linspace(0, 1, pieces + 1, dtype=x.dtype)
    all_edges = []
    for column in x.unbind(1):
        values, codes = column.unique(return_inverse=True)
        cumulated = torch.zeros_like(values).index_add_(0, codes, weights.to(values)).cumsum(0)
        # The factor below one keeps rounding from choosing the value above a quantile.
        wanted = (levels * cumulated[-1]).clamp_max(cumulated[-1]) * (1 - 1e-12)
        index = torch.searchsorted(cumulated, wanted)
        edges = values[index.clamp_max(len(values) - 1)].unique()
        all_edges.append(edges if len(edges) > 2 else edges[:0])
    return tuple(all_edges)


def piece_counts(edges: tuple[Tensor, ...]) -> tuple[int, ...]:
    """Return the number of pieces of each column; () if no column has any."""
    counts = tuple(max(len(column) - 1, 0) for column in edges)
    return counts if any(counts) else ()
