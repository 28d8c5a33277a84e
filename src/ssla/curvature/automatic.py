"""The structure that a fit takes by default: dense where it is cheap, Kronecker factors elsewhere.

Seconds are those of one core, without the network's own forward passes. They follow from the size
of the problem alone, so that every process of a distributed fit makes the same choice. A source of
unknown length counts as a large one.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from ssla.curvature import Dense, Extent, Kfac, Structure
from ssla.curvature.kfac import MANY_CLASSES
from ssla.curvature.memory import bytes_in_words, default_kfac, is_last_layer

AUTO = "auto"
# On one core of the machine of 2026-11 (benchmarks/head_speed.py): products of matrices ran at 33
# to 46 Gflop/s in float64 and at 86 to 94 in float32, Cholesky factors and inverses at 22 to 26,
# and eigenvectors of P×P took P³ / 3.1 to 4.3 Gflop/s.
PRODUCTS, SINGLE_PRODUCTS, FACTORS, EIGENVECTORS = 4e10, 8e10, 2.5e10, 3.5e9
SECONDS_PER_NODE = 8e-9  # of one output at one node
SECONDS_PER_FEATURE = 3e-8  # of one feature of one row, once: reading, casting, checks
ROUNDS = 12  # of a variational Gaussian
CHOICES = 4  # of a prior on the way
# Nodes of rows and classes, as in ssla.likelihoods.averages
PAIRS = ((64, 128), (300, 32), (math.inf, 16))
MANY_ROWS, NODES_OF_ALL_ROWS, FEWEST_NODES = 4096, 1 << 17, 8
UNKNOWN_ROWS = 100_000  # for a source of unknown length
# of a dense fit that is taken by default. A guess: what a user waits without looking for another
# way
MOST_SECONDS = 10.0


class Choice(NamedTuple):
    """A structure, and why it was chosen."""

    structure: Structure
    reason: str


def choose_structure(extent: Extent, budget: int, uneven: bool = False) -> Choice:
    """Choose dense where it takes little time and memory, else Kronecker factors.

    budget: bytes. uneven: whether the prior's precision varies inside a layer, which Kronecker
    factors do not allow.
    """
    dense = Dense()
    seconds = _dense_seconds(extent)
    memory = dense.memory(extent)
    if seconds <= MOST_SECONDS and memory <= budget:
        return Choice(dense, "the whole curvature, which is cheap here")
    cost = f"dense would take about {time_in_words(seconds)} and {bytes_in_words(memory)}"
    if uneven:
        return Choice(
            dense,
            f"{cost}, but the prior's precision varies inside a layer, which kfac does not allow",
        )
    # Where neither fits, dense is returned: the fit refuses it, and the error names what fits.
    if default_kfac(extent).memory(extent) > budget:
        return Choice(dense, f"{cost}, but the memory budget allows no kfac")
    return Choice(Kfac(), cost)


def estimate_seconds(structure: Structure, extent: Extent) -> float:
    """Estimate how long a fit takes; NaN for structures other than dense and kfac."""
    if isinstance(structure, Dense):
        return _dense_seconds(extent)
    return _kfac_seconds(extent) if isinstance(structure, Kfac) else math.nan


def _dense_seconds(extent: Extent) -> float:
    """Estimate the seconds of a dense fit."""
    rows = extent.rows or UNKNOWN_ROWS
    size = extent.size
    outputs = extent.outputs
    directions = min(size, rows * outputs)
    # Operations of one pass: rows in place of a matrix, blocks of a last layer, or JᵀΛJ.
    if directions < size:
        sums = 2 * directions**2 * size
    elif is_last_layer(extent):
        sums = outputs * (outputs + 1) * rows * (size // outputs) ** 2
    else:
        sums = 2 * rows * outputs * size**2
    rounds = ROUNDS if extent.averages else 0
    # A round computes the covariances of the rows, and then sums.
    seconds = sums * (1 + 2 * rounds) / PRODUCTS
    seconds += (1 + rounds) * directions**2 * size / FACTORS
    seconds += (CHOICES if extent.averages else 1) * directions**2 * size / EIGENVECTORS
    return seconds + rows * _layer_inputs(extent) * SECONDS_PER_FEATURE


def _kfac_seconds(extent: Extent) -> float:
    """Estimate the seconds of a fit with Kronecker factors."""
    rows = extent.rows or UNKNOWN_ROWS
    outputs = extent.outputs
    rounds = ROUNDS if extent.averages else 0
    last_layer = is_last_layer(extent)
    seconds = rows * _layer_inputs(extent) * SECONDS_PER_FEATURE
    for inside, out in extent.layers:
        # The input factor is summed and decomposed once, the output factor in each round.
        seconds += inside**3 / EIGENVECTORS + 2 * rows * inside**2 / PRODUCTS
        backward_passes = 1 if last_layer else outputs
        each_round = (
            out**3 / EIGENVECTORS + 4 * rows * inside * backward_passes * out / SINGLE_PRODUCTS
        )
        seconds += each_round * (1 + rounds)
    if last_layer and rounds:
        inside, _ = extent.layers[0]
        seconds += 2 * rows * inside**2 / SINGLE_PRODUCTS
        # Each node adds p pᵀ (C, C) to the output factor
        each_node = outputs * SECONDS_PER_NODE + 2 * outputs**2 / SINGLE_PRODUCTS
        seconds += rounds * rows * nodes_of_row(rows, outputs) * each_node
    return seconds


def nodes_of_row(rows: int, classes: int) -> int:
    """Return how many nodes a row of classes has in one pass of `ssla.likelihoods.averages`.

    That package and this one do not import each other; a test compares the two.
    """
    pairs = next(pairs for most, pairs in PAIRS if most >= classes)
    if rows < MANY_ROWS and classes <= MANY_CLASSES:
        return 2 * pairs  # for one or two classes fewer, by a rule of their own
    count = max(FEWEST_NODES, min(math.ceil(NODES_OF_ALL_ROWS / rows), pairs))
    return 2 * math.ceil(count / 2)


def _layer_inputs(extent: Extent) -> int:
    """Return how many numbers of a row the layers take as inputs."""
    return sum(inside for inside, _ in extent.layers) or extent.size


def time_in_words(seconds: float) -> str:
    """Return a number of seconds as text, in seconds, minutes or hours."""
    if seconds < 120:
        return f"{max(round(seconds), 1)} s"
    unit, word = (60, "min") if seconds < 7200 else (3600, "h")
    return f"{float(f'{seconds / unit:.2g}'):,.0f} {word}"
