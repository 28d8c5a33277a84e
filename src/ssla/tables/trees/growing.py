"""Trees of scikit-learn, as tensors: random forests for classes, boosted trees for numbers."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from sklearn.ensemble import GradientBoostingRegressor, RandomForestClassifier
from torch import Tensor

from ssla.tables.trees.forest import Forest, joined

MOST_ROWS = 10_000  # of one tree, or of all boosted trees
MOST_LEAVES = 2_000
FEW_ROWS = 300  # with more, a leaf has two rows at least
BOOSTED = {"max_depth": None, "max_leaf_nodes": 31, "subsample": 0.5}
# of standardised targets: splits of a few rows are often equally good, and rounding errors would
# decide
DECIMALS = 10
TOTAL_RATE = 10.0  # of learning, over all boosted trees

Data = tuple[np.ndarray, np.ndarray, np.ndarray]
"""Rows (n, d), targets (n,), row weights (n,)."""


def grow(trees: int, classes: int, x: Tensor, y: Tensor, weights: Tensor, seed: int) -> Forest:
    """Trees for rows x (n, d), row weights (n,) and y (n,): classes below `classes`, or numbers
    (classes = 0).

    Their values are probabilities (nodes, C), or one number (nodes, 1).
    """
    rows = x.numpy(), y.numpy(), weights.numpy()
    return (
        _forest(trees, classes, rows, seed % 2**32)
        if classes
        else _boosted(trees, rows, seed % 2**32)
    )


def _forest(trees: int, classes: int, data: Data, seed: int) -> Forest:
    x, y, weights = data
    rows = min(len(x), MOST_ROWS)
    forest = RandomForestClassifier(
        trees,
        max_samples=rows if rows < len(x) else None,
        min_samples_leaf=max(1 + (len(x) > FEW_ROWS), rows // MOST_LEAVES),
        random_state=seed,
    ).fit(x, y, sample_weight=weights)
    labels = forest.classes_
    found = []
    for one in forest.estimators_:
        tree = one.tree_
        value = np.zeros((tree.node_count, classes))
        value[:, labels] = tree.value[:, 0] / tree.value[:, 0].sum(1, keepdims=True)
        found.append(_of_tree(tree, value))
    return joined(found)


def _boosted(trees: int, data: Data, seed: int) -> Forest:
    """The mean over trees is start + rate · Σ values."""
    x, y, weights = data
    y = np.round(y, DECIMALS)
    if len(x) > MOST_ROWS:
        some = np.random.default_rng(seed).choice(len(x), MOST_ROWS, replace=False)
        x, y, weights = x[some], y[some], weights[some]
    rate = TOTAL_RATE / max(trees, 2 * TOTAL_RATE)
    model = GradientBoostingRegressor(
        n_estimators=trees, learning_rate=rate, random_state=seed, **BOOSTED
    )
    model.fit(x, y, sample_weight=weights)
    start = float(model.init_.constant_.item())
    return joined(
        [
            _of_tree(one.tree_, start + trees * rate * one.tree_.value[:, 0])
            for one in model.estimators_[:, 0]
        ]
    )


def _of_tree(tree: Any, value: np.ndarray) -> Forest:
    leaf = tree.children_left < 0
    own = np.arange(tree.node_count)
    places = [np.where(leaf, own, child) for child in (tree.children_left, tree.children_right)]
    index = [
        torch.from_numpy(part.astype(np.int64))
        for part in (np.where(leaf, 0, tree.feature), *places)
    ]
    threshold = torch.from_numpy(np.array(tree.threshold))
    root = torch.zeros(1, dtype=torch.int64)
    return Forest(
        root,
        index[0],
        threshold,
        index[1],
        index[2],
        torch.from_numpy(np.array(value)),
        tree.max_depth,
    )
