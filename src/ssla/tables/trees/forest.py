"""Decision trees as tensors: they predict without the library that grew them, and files hold
them without code.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
from torch import Tensor

AT_ONCE = 1 << 20  # rows × trees


@dataclass(frozen=True, eq=False)
class Forest:
    """Trees whose mean is the prediction. From node i a row x goes to left[i] if x[feature[i]] ≤
    threshold[i], else to right[i]; a leaf leads to itself.

    roots (T,), feature, threshold, left, right (nodes,), value (nodes, C).  depth: steps that lead
    every row to a leaf.
    """

    roots: Tensor
    feature: Tensor
    threshold: Tensor
    left: Tensor
    right: Tensor
    value: Tensor
    depth: int

    def __call__(self, x: Tensor) -> Tensor:
        """x (N, d) -> (N, C)."""
        rounded = x.float().double()  # as scikit-learn compares
        size = max(AT_ONCE // len(self.roots), 1)
        parts = [self.value[self._leaves(rows)].mean(1) for rows in rounded.split(size)]
        return torch.cat(parts)

    def _leaves(self, x: Tensor) -> Tensor:
        """(N, T)."""
        at = self.roots.expand(len(x), -1)
        for _ in range(self.depth):
            at = torch.where(
                x.gather(1, self.feature[at]) <= self.threshold[at], self.left[at], self.right[at]
            )
        return at

    def check(self, width: int, outputs: int) -> None:
        """ValueError for trees that do not fit their inputs and outputs (of a forged file)."""
        nodes = len(self.feature)
        one_each = (self.threshold, self.left, self.right)
        sound = (
            nodes > 0
            and self.value.shape == (nodes, outputs)
            and all(part.shape == (nodes,) for part in one_each)
            and len(self.roots.shape) == 1
            and len(self.roots) > 0
            and all(_inside(part, nodes) for part in (self.roots, self.left, self.right))
            and _inside(self.feature, width)
            and self.threshold.dtype == self.value.dtype == torch.float64
            and bool(torch.isfinite(self.value).all())
            and type(self.depth) is int
            and 0 <= self.depth < nodes
        )
        if not sound:
            raise ValueError("the trees do not fit their inputs and outputs")


def joined(forests: list[Forest]) -> Forest:
    """All trees together."""
    sizes = torch.tensor([0] + [len(forest.feature) for forest in forests]).cumsum(0).tolist()
    moved = [
        {name: getattr(forest, name) + start for name in ("roots", "left", "right")}
        for forest, start in zip(forests, sizes, strict=False)
    ]
    tensors = [field.name for field in fields(Forest) if field.name != "depth"]
    parts = {
        name: torch.cat(
            [
                own.get(name, getattr(forest, name))
                for forest, own in zip(forests, moved, strict=True)
            ]
        )
        for name in tensors
    }
    return Forest(**parts, depth=max(forest.depth for forest in forests))


def _inside(index: Tensor, count: int) -> bool:
    return index.dtype == torch.int64 and bool(((index >= 0) & (index < count)).all())
