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

PIECES = 8
FAR = 1e30  # beyond every standardised number


class Pieces(nn.Module):
    """x (…, d) -> x and its pieces (…, d + Σ counts).

    The edges are buffers: they are not trained.
    """

    low: Tensor
    width: Tensor
    least: Tensor
    most: Tensor
    column: Tensor

    def __init__(self, counts: tuple[int, ...]) -> None:
        """counts: the number of pieces of each column. The edges are set by `place`, or loaded."""
        super().__init__()
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
        t = (x[..., self.column] - self.low) / self.width
        return torch.cat([x, torch.minimum(torch.maximum(t, self.least), self.most)], -1)


def edges_of(x: Tensor, weights: Tensor, pieces: int = PIECES) -> tuple[Tensor, ...]:
    """The edges of each column (n, d): its quantiles by weight, without repetition.

    Empty for columns of two values.
    """
    levels = torch.linspace(0, 1, pieces + 1, dtype=x.dtype)
    found = []
    for column in x.unbind(1):
        values, places = column.unique(return_inverse=True)
        total = torch.zeros_like(values).index_add_(0, places, weights.to(values)).cumsum(0)
        at = torch.searchsorted(total, (levels * total[-1]).clamp_max(total[-1]) * (1 - 1e-12))
        edges = values[at.clamp_max(len(values) - 1)].unique()
        found.append(edges if len(edges) > 2 else edges[:0])
    return tuple(found)


def counts_of(edges: tuple[Tensor, ...]) -> tuple[int, ...]:
    """The number of pieces of each column; () if no column has any."""
    counts = tuple(max(len(column) - 1, 0) for column in edges)
    return counts if any(counts) else ()


def place(module: Pieces, edges: tuple[Tensor, ...]) -> None:
    """Set the edges."""
    module.low.copy_(torch.cat([column[:-1] for column in edges]))
    module.width.copy_(torch.cat([column.diff() for column in edges]))
