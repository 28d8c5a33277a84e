"""Trees of scikit-learn, as tensors: random forests for classes, boosted trees for numbers."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from sklearn.ensemble import GradientBoostingRegressor, RandomForestClassifier
from torch import Tensor

from ssla.tables.trees.forest import Forest, join_forests

# docs/tables.md has the measurements of the trees as a whole. Each of these numbers is a guess.
MOST_ROWS = 10_000  # of one tree, or of all boosted trees
MOST_LEAVES = 2_000  # of a tree of a random forest
FEW_ROWS = 300  # with more, a leaf of a random forest has two rows at least
BOOSTED = {"max_depth": None, "max_leaf_nodes": 31, "subsample": 0.5}  # settings of boosted trees
# Standardised targets are rounded to so many decimals. Splits of a few rows are often equally good,
# and without this rounding errors would choose between them.
DECIMALS = 10
TOTAL_RATE = 10.0  # of learning, over all boosted trees

Data = tuple[np.ndarray, np.ndarray, np.ndarray]
"""Rows (n, d), targets (n,), row weights (n,)."""


def grow_forest(
    trees: int, classes: int, x: Tensor, y: Tensor, weights: Tensor, seed: int
) -> Forest:
    """Grow trees on rows x (n, d), targets y (n,) and row weights (n,), and return the forest.

    The values of the nodes are probabilities (nodes, C) for classes, and one number (nodes, 1)
    otherwise.

    trees: how many trees are grown.  classes: the number C of classes, whose codes are y; 0: y are
    standardised numbers.  seed: any integer.
    """
    data = x.numpy(), y.numpy(), weights.numpy()
    seed = seed % 2**32  # scikit-learn takes no larger seed
    if classes:
        return _grow_classes(trees, classes, data, seed)
    return _grow_boosted(trees, data, seed)


def _grow_classes(trees: int, classes: int, data: Data, seed: int) -> Forest:
    """Grow a random forest whose values are class probabilities (nodes, classes).

    data: y are codes from 0 to classes − 1, of which some may not occur.  seed: from 0 to 2³² − 1.
    trees: how many trees are grown.
    """
    x, y, weights = data
    rows = min(len(x), MOST_ROWS)  # that each tree is grown on
    fewest_rows = 2 if len(x) > FEW_ROWS else 1  # of a leaf
    forest = RandomForestClassifier(
        trees,
        max_samples=rows if rows < len(x) else None,
        min_samples_leaf=max(fewest_rows, rows // MOST_LEAVES),
        random_state=seed,
    ).fit(x, y, sample_weight=weights)

    # Classes without a row have probability zero.
    labels = forest.classes_
    grown = []
    for estimator in forest.estimators_:
        tree = estimator.tree_
        value = np.zeros((tree.node_count, classes))
        value[:, labels] = tree.value[:, 0] / tree.value[:, 0].sum(1, keepdims=True)
        grown.append(_convert_tree(tree, value))

    return join_forests(grown)


def _grow_boosted(trees: int, data: Data, seed: int) -> Forest:
    """Grow boosted trees on numbers, and return them as a forest with values (nodes, 1).

    The prediction of boosted trees is start + rate · Σ values. That of a forest is the mean of its
    values, so each tree of the forest has the values start + trees · rate · values.  seed: from 0
    to 2³² − 1.
    """
    x, y, weights = data
    y = np.round(y, DECIMALS)
    if len(x) > MOST_ROWS:
        kept = np.random.default_rng(seed).choice(len(x), MOST_ROWS, replace=False)
        x, y, weights = x[kept], y[kept], weights[kept]

    rate = TOTAL_RATE / max(trees, 2 * TOTAL_RATE)  # at most ½, where there are few trees

    model = GradientBoostingRegressor(
        n_estimators=trees, learning_rate=rate, random_state=seed, **BOOSTED
    )
    model.fit(x, y, sample_weight=weights)
    start = float(model.init_.constant_.item())
    grown = [estimator.tree_ for estimator in model.estimators_[:, 0]]
    return join_forests(
        [_convert_tree(tree, start + trees * rate * tree.value[:, 0]) for tree in grown]
    )


def _convert_tree(tree: Any, value: np.ndarray) -> Forest:
    """Return a tree of scikit-learn as a forest of one tree.

    value (nodes, C): the predictions at its nodes, in the order of scikit-learn.
    """
    # A leaf of scikit-learn has the child −1 and no feature; here it leads to itself.
    leaf = tree.children_left < 0
    node = np.arange(tree.node_count)
    return Forest(
        roots=torch.zeros(1, dtype=torch.int64),
        feature=_convert_to_int64(np.where(leaf, 0, tree.feature)),
        threshold=torch.from_numpy(np.array(tree.threshold)),
        left=_convert_to_int64(np.where(leaf, node, tree.children_left)),
        right=_convert_to_int64(np.where(leaf, node, tree.children_right)),
        value=torch.from_numpy(np.array(value)),
        depth=tree.max_depth,
    )


def _convert_to_int64(values: np.ndarray) -> Tensor:
    """Return whole numbers of any shape as an int64 tensor."""
    return torch.from_numpy(values.astype(np.int64))
