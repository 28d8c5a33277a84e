"""The rows of a fit in the units of the networks, and which of them each member holds out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class TrainingData:
    """The rows of a fit, with standardised inputs."""

    z: Tensor  # inputs (n, d), standardised
    y: Tensor  # targets (n,) or (n, D): in their own unit for the training, then standardised
    weights: Tensor  # row weights (n,)
    held: Tensor  # (M, n) bool: the rows that each member holds out of its training

    def select_rows(self, rows: Tensor) -> TrainingData:
        """Return the data of the chosen rows (n,) bool alone."""
        return TrainingData(self.z[rows], self.y[rows], self.weights[rows], self.held[:, rows])

    def take_rows(self, rows: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """Return inputs, targets and weights of the chosen rows (n,) bool; of all rows if None."""
        chosen: Any = slice(None) if rows is None else rows
        return self.z[chosen], self.y[chosen], self.weights[chosen]


def thin_out(chosen: Tensor, most: int) -> Tensor:
    """Return at most `most` of the chosen rows (n,) bool, evenly spread over them: (n,) bool.

    `chosen` is not changed, and is returned itself if it has few enough rows.
    """
    rows = chosen.nonzero().flatten()
    if len(rows) <= most:
        return chosen
    kept = torch.zeros_like(chosen)
    kept[rows[torch.linspace(0, len(rows) - 1, most).long()]] = True
    return kept
