"""Decision trees as tensors.

The trees predict without the library that grew them, and files hold them without code.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

# The fields of a forest that are tensors, and those of them that hold numbers of nodes.
TENSORS = ("roots", "feature", "threshold", "left", "right", "value")
NODE_INDICES = ("roots", "left", "right")
AT_ONCE = 1 << 20  # rows × trees; a guess


@dataclass(frozen=True, eq=False)
class Forest:
    """T trees, the mean of whose values is the prediction.

    The nodes of all trees are numbered together. From node i a row x goes to the node left[i] if
    x[feature[i]] ≤ threshold[i], and otherwise to right[i]. A leaf leads to itself, so that all
    rows can take the same number of steps.
    """

    roots: Tensor  # the first node of each tree (T,)
    feature: Tensor  # the column of x that a node compares (nodes,)
    threshold: Tensor  # (nodes,)
    left: Tensor  # (nodes,)
    right: Tensor  # (nodes,)
    value: Tensor  # the prediction at each node (nodes, C), which only leaves use
    depth: int  # the number of steps after which every row is at a leaf

    def __call__(self, x: Tensor) -> Tensor:
        """Return the mean prediction over trees: x (N, d) -> (N, C)."""
        # scikit-learn rounds inputs to float32 before it compares them with a threshold.
        rounded = x.float().double()
        size = max(AT_ONCE // len(self.roots), 1)  # rows that are predicted together
        means = [self.value[self._find_leaves(rows)].mean(1) for rows in rounded.split(size)]
        return torch.cat(means)

    def _find_leaves(self, x: Tensor) -> Tensor:
        """Return the leaf of each row in each tree: x (N, d) -> nodes (N, T)."""
        node = self.roots.expand(len(x), -1)
        for _ in range(self.depth):
            goes_left = x.gather(1, self.feature[node]) <= self.threshold[node]
            node = torch.where(goes_left, self.left[node], self.right[node])
        return node

    def check_tensors(self, width: int, outputs: int) -> None:
        """Raise ValueError unless shapes, types, indices and values are those of trees.

        width: the number of inputs.  outputs: the number of values of a node. A forest that was
        grown here is always sound; that of a forged file need not be.
        """
        nodes = len(self.feature)
        tensors_of_nodes = (self.threshold, self.left, self.right)
        sound = (
            nodes > 0
            and self.value.shape == (nodes, outputs)
            and all(tensor.shape == (nodes,) for tensor in tensors_of_nodes)
            and len(self.roots.shape) == 1
            and len(self.roots) > 0
            and all(_is_below(index, nodes) for index in (self.roots, self.left, self.right))
            and _is_below(self.feature, width)
            and self.threshold.dtype == self.value.dtype == torch.float64
            and bool(torch.isfinite(self.value).all())
            and type(self.depth) is int
            and 0 <= self.depth < nodes
        )
        if not sound:
            raise ValueError("the trees do not fit their inputs and outputs")


def join_forests(forests: list[Forest]) -> Forest:
    """Return one forest with the trees of all forests.

    The forests, at least one, must have the same inputs and outputs.
    """
    # The nodes of a forest are numbered from the end of those before it.
    starts = torch.tensor([0] + [len(forest.feature) for forest in forests]).cumsum(0).tolist()
    values: dict[str, Any] = {"depth": max(forest.depth for forest in forests)}
    for name in TENSORS:
        tensors = [getattr(forest, name) for forest in forests]
        # `starts` has one entry more than there are forests: the number of all nodes.
        if name in NODE_INDICES:
            tensors = [tensor + start for tensor, start in zip(tensors, starts, strict=False)]
        values[name] = torch.cat(tensors)
    return Forest(**values)


def _is_below(index: Tensor, count: int) -> bool:
    """Return whether an index of any shape is of type int64, with entries from 0 to count − 1."""
    return index.dtype == torch.int64 and bool(((index >= 0) & (index < count)).all())
