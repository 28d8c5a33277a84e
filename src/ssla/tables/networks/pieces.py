"""Piecewise linear inputs: a number is also given by its position in each piece of its range.

A column with edges b₀ < … < b_T adds T columns, clamp((x − b_t)/(b_{t+1} − b_t), 0, 1). The first
piece has no lower bound, and the last no upper one. A ReLU network then bends where the data are,
and not where its weights started. A column with two values has no pieces, because a single piece
would repeat the column.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

PIECES = 8  # of a column, at most: a guess
FAR = 1e30  # beyond every standardised number; stands for no bound


class Pieces(nn.Module):
    """A layer that appends the pieces of its columns to an input: x (…, d) -> (…, d + Σ counts).

    The edges are not trained. They are buffers, in one row for all pieces, column by column.
    """

    low: Tensor  # b_t of each piece
    width: Tensor  # b_{t+1} − b_t
    least: Tensor  # smallest output of each piece
    most: Tensor  # largest output of each piece
    column: Tensor  # index of the column of each piece

    def __init__(self, counts: tuple[int, ...]) -> None:
        """Create the layer without edges, which `set_edges` or a loaded file gives.

        counts: the number of pieces of each column, not all of them 0.
        """
        super().__init__()

        # The number of each piece within its column, and the number of pieces of that column.
        number = torch.cat([torch.arange(count) for count in counts if count])
        column = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts))
        count_of_column = torch.tensor(counts)[column]
        least = torch.where(number == 0, -FAR, 0.0).float()
        most = torch.where(number == count_of_column - 1, FAR, 1.0).float()
        self.register_buffer("low", torch.zeros(len(column), dtype=torch.float32))
        self.register_buffer("width", torch.ones(len(column), dtype=torch.float32))

        # The counts determine these buffers, so files do not hold them.
        self.register_buffer("least", least, persistent=False)
        self.register_buffer("most", most, persistent=False)
        self.register_buffer("column", column, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return x (…, d) with its pieces appended (…, d + Σ counts)."""
        t = (x[..., self.column] - self.low) / self.width
        return torch.cat([x, torch.minimum(torch.maximum(t, self.least), self.most)], -1)

    def set_edges(self, edges: tuple[Tensor, ...]) -> None:
        """Set the edges in place: b₀, …, b_T (T + 1,) for each column, (0,) without pieces."""
        self.low.copy_(torch.cat([column[:-1] for column in edges]))
        self.width.copy_(torch.cat([column.diff() for column in edges]))


def find_quantile_edges(x: Tensor, weights: Tensor, pieces: int = PIECES) -> tuple[Tensor, ...]:
    """Return the edges of each column of x (n, d): its weighted quantiles without repetition.

    weights (n,) are row weights.  pieces: the largest number of pieces of a column. A column whose
    quantiles have at most two different values has no edges (0,).
    """
    probabilities = torch.linspace(0, 1, pieces + 1, dtype=x.dtype)
    all_edges = []
    for column in x.unbind(1):
        values, codes = column.unique(return_inverse=True)  # sorted
        weight_of_value = torch.zeros_like(values).index_add_(0, codes, weights.to(values))
        cumulated = weight_of_value.cumsum(0)
        # The factor below one keeps rounding from choosing the value above a quantile.
        wanted_weights = (probabilities * cumulated[-1]).clamp_max(cumulated[-1]) * (1 - 1e-12)
        index = torch.searchsorted(cumulated, wanted_weights)
        edges = values[index.clamp_max(len(values) - 1)].unique()
        all_edges.append(edges if len(edges) > 2 else edges[:0])

    return tuple(all_edges)


def count_pieces(edges: tuple[Tensor, ...]) -> tuple[int, ...]:
    """Return the number T of pieces of each column by its edges (T + 1,); () if no column has any.

    A column without pieces has the edges (0,).
    """
    counts = tuple(max(len(column) - 1, 0) for column in edges)
    return counts if any(counts) else ()
