"""Seconds that a fit takes with a structure, estimated from the number of its operations.

The seconds are those of one core, without the network's own forward passes. A source of unknown
length counts as UNKNOWN_ROWS rows.

A variational Gaussian is fitted in rounds. Each round averages the curvature of every row over the
row's outputs, by quadrature at some nodes. Terms of the structures are those of `ssla.curvature`.
"""

from __future__ import annotations

import math

from ssla.curvature.structure import MANY_CLASSES, Extent

# On one core of the machine of 2026-11 (benchmarks/speed/head_speed.py): products of matrices ran
# at 33 to 46 Gflop/s in float64 and at 86 to 94 in float32, Cholesky factors and inverses at 22 to
# 26, and eigenvectors of P×P took P³ / 3.1 to 4.3 Gflop/s.
PRODUCTS, SINGLE_PRODUCTS, FACTORS, EIGENVECTORS = 4e10, 8e10, 2.5e10, 3.5e9
SECONDS_PER_NODE = 8e-9  # of one output at one node
SECONDS_PER_FEATURE = 3e-8  # of one feature of one row, once: reading, casting, checks
ROUNDS = 12  # of a variational Gaussian. A guess
CHOICES = 4  # of a prior in the rounds of a variational Gaussian. A guess
# Nodes of rows and classes: the same numbers as in ssla.likelihoods.averages
PAIRS = ((64, 128), (300, 32), (math.inf, 16))
MANY_ROWS, NODES_OF_ALL_ROWS, FEWEST_NODES = 4096, 1 << 17, 8
UNKNOWN_ROWS = 100_000  # for a source of unknown length


def estimate_dense_seconds(extent: Extent) -> float:
    """Estimate the seconds of a dense fit from the number of its operations."""
    rows = extent.rows or UNKNOWN_ROWS
    size = extent.size
    outputs = extent.outputs

    # With fewer rows of Λ^½J than parameters P these m rows are stored, in place of a matrix P×P.
    directions = min(size, rows * outputs)
    # Operations of one pass. A product (a, b) @ (b, c) takes 2abc of them.
    if directions < size:
        sums = 2 * directions**2 * size
    # A last layer takes C(C + 1)/2 products F × n × F, and other Jacobians one product P × nC × P.
    elif extent.is_last_layer:
        sums = outputs * (outputs + 1) * rows * (size // outputs) ** 2
    else:
        sums = 2 * rows * outputs * size**2
    rounds = ROUNDS if extent.averages else 0

    # The fit sums once. Each round computes the covariances of the rows, and then sums. A Cholesky
    # factor follows each sum, and an eigendecomposition each choice of the prior.
    seconds = sums * (1 + 2 * rounds) / PRODUCTS
    seconds += (1 + rounds) * directions**2 * size / FACTORS
    seconds += (CHOICES if extent.averages else 1) * directions**2 * size / EIGENVECTORS
    return seconds + rows * _count_layer_inputs(extent) * SECONDS_PER_FEATURE


def estimate_kfac_seconds(extent: Extent) -> float:
    """Estimate the seconds of a fit with Kronecker factors from the number of its operations.

    Features are read once. Each layer sums and decomposes its two factors. The rounds of a last
    layer need the averages of classes in addition.
    """
    rows = extent.rows or UNKNOWN_ROWS
    outputs = extent.outputs
    rounds = ROUNDS if extent.averages else 0
    is_last_layer = extent.is_last_layer
    seconds = rows * _count_layer_inputs(extent) * SECONDS_PER_FEATURE

    for layer_inputs, layer_outputs in extent.layers:
        # The input factor is summed and decomposed once, the output factor in each round.
        seconds += layer_inputs**3 / EIGENVECTORS + 2 * rows * layer_inputs**2 / PRODUCTS
        backward_passes = 1 if is_last_layer else outputs
        # A round has two products of rows × inputs × outputs for each backward pass.
        seconds_of_round = (
            layer_outputs**3 / EIGENVECTORS
            + 4 * rows * layer_inputs * backward_passes * layer_outputs / SINGLE_PRODUCTS
        )
        seconds += seconds_of_round * (1 + rounds)

    if is_last_layer and rounds:
        layer_inputs, _ = extent.layers[0]
        # The features are multiplied once by the eigenbasis of the input factor.
        seconds += 2 * rows * layer_inputs**2 / SINGLE_PRODUCTS
        # Each node adds p pᵀ (C, C) to the output factor.
        seconds_of_node = outputs * SECONDS_PER_NODE + 2 * outputs**2 / SINGLE_PRODUCTS
        seconds += rounds * rows * count_nodes_of_row(rows, outputs) * seconds_of_node

    return seconds


def count_nodes_of_row(rows: int, classes: int) -> int:
    """Return how many nodes each row of classes has in one pass of `ssla.likelihoods.averages`.

    That package and this one do not import each other; tests/network/test_cost.py compares them.
    """
    pairs = next(pairs for largest, pairs in PAIRS if largest >= classes)
    if rows < MANY_ROWS and classes <= MANY_CLASSES:
        # One or two classes have fewer, by Gauss–Hermite rules: for them this is an upper bound.
        return 2 * pairs
    count = max(FEWEST_NODES, min(math.ceil(NODES_OF_ALL_ROWS / rows), pairs))
    # The count is even, because half of the nodes are mirror images.
    return 2 * math.ceil(count / 2)


def _count_layer_inputs(extent: Extent) -> int:
    """Return how many numbers the layers take as inputs in each row.

    Without layers of a Kronecker form it is the number of parameters.
    """
    return sum(inputs for inputs, _ in extent.layers) or extent.size
