"""The rows of an ensemble in the units of its networks, and which of them each member held out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class TrainingData:
    """Inputs z (n, d) and targets y (n,) or (n, D), both standardised, with row weights (n,)."""

    z: Tensor
    y: Tensor
    weights: Tensor
    held: Tensor  # (M, n) bool: the rows that each member held out of its training

    def select(self, rows: Tensor) -> TrainingData:
        """Return the data of the chosen rows (n,) bool alone."""
        return TrainingData(self.z[rows], self.y[rows], self.weights[rows], self.held[:, rows])

    def batch(self, rows: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """Return inputs, targets and weights of the chosen rows (n,) bool; of all if None."""
        chosen: Any = slice(None) if rows is None else rows
        return self.z[chosen], self.y[chosen], self.weights[chosen]


def thin_out(chosen: Tensor, most: int) -> Tensor:
    """Keep at most `most` of the chosen rows (n,) bool, evenly spread over the table -> (n,)."""
    rows = chosen.nonzero().flatten()
    if len(rows) <= most:
        return chosen
    kept = torch.zeros_like(chosen)
    kept[rows[torch.linspace(0, len(rows) - 1, most).long()]] = True
    return kept
