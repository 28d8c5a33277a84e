"""Random forests of scikit-learn, as tensors."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from sklearn.ensemble import RandomForestClassifier
from torch import Tensor

from ssla.tabular.forest import Forest, joined

MOST_ROWS = 10_000  # of one tree
MOST_LEAVES = 2_000
FEW_ROWS = 300  # with more, a leaf has two rows at least


def grow(trees: int, classes: int, x: Tensor, y: Tensor, weights: Tensor, seed: int) -> Forest:
    """Trees for rows x (n, d), classes y (n,) below `classes` and row weights (n,). Their values are probabilities (nodes, C)."""
    rows = min(len(x), MOST_ROWS)
    forest = RandomForestClassifier(
        trees,
        max_samples=rows if rows < len(x) else None,
        min_samples_leaf=max(1 + (len(x) > FEW_ROWS), rows // MOST_LEAVES),
        random_state=seed % 2**32,
    ).fit(x.numpy(), y.numpy(), sample_weight=weights.numpy())
    return joined([_of_tree(tree.tree_, forest.classes_, classes) for tree in forest.estimators_])


def _of_tree(tree: Any, labels: np.ndarray, classes: int) -> Forest:
    leaf = tree.children_left < 0
    own = np.arange(tree.node_count)
    value = np.zeros((tree.node_count, classes))
    value[:, labels] = tree.value[:, 0] / tree.value[:, 0].sum(1, keepdims=True)
    places = [np.where(leaf, own, child) for child in (tree.children_left, tree.children_right)]
    index = [torch.from_numpy(part.astype(np.int64)) for part in (np.where(leaf, 0, tree.feature), *places)]
    threshold = torch.from_numpy(np.array(tree.threshold))
    return Forest(
        torch.zeros(1, dtype=torch.int64), index[0], threshold, index[1], index[2], torch.from_numpy(value), tree.max_depth
    )
