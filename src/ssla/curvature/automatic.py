"""The structure that a fit takes by default: dense where it is cheap, Kronecker factors elsewhere.

Seconds are those of one core, without the network's own forward passes. They follow from the size
of the problem alone, so that every process of a distributed fit makes the same choice. A source of
unknown length counts as a large one.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from ssla.curvature import Dense, Extent, Kfac, Structure
from ssla.curvature.kfac import DIAGONAL, MANY_CLASSES
from ssla.curvature.memory import in_words, is_last_layer

AUTO = "auto"
# On one core of the machine of 2026-11 (benchmarks/head_speed.py): products of matrices ran at 33
# to 46 Gflop/s in float64 and at 86 to 94 in float32, Cholesky factors and inverses at 22 to 26,
# and eigenvectors of P×P took P³ / 3.1 to 4.3 Gflop/s.
PRODUCTS, SINGLE_PRODUCTS, FACTORS, EIGENVECTORS = 4e10, 8e10, 2.5e10, 3.5e9
OF_NODE = 8e-9  # seconds of one output at one node
OF_FEATURE = 3e-8  # seconds of one feature of one row, once: reading, casting, checks
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


def choose(extent: Extent, budget: int, uneven: bool = False) -> Choice:
    """Dense where it takes little time and memory, else Kronecker factors.

    uneven: whether the prior's precision varies inside a layer, which Kronecker factors do not
    allow.
    """
    dense = Dense()
    seconds, memory = seconds_of(dense, extent), dense.memory(extent)
    if seconds <= MOST_SECONDS and memory <= budget:
        return Choice(dense, "the whole curvature, which is cheap here")
    cost = f"dense would take about {time_in_words(seconds)} and {in_words(memory)}"
    if uneven:
        return Choice(
            dense,
            f"{cost}, but the prior's precision varies inside a layer, which kfac does not allow",
        )
    if memory_of_kfac(extent) > budget:  # a refusal of dense names what fits
        return Choice(dense, f"{cost}, but the memory budget allows no kfac")
    return Choice(Kfac(), cost)


def memory_of_kfac(extent: Extent) -> int:
    """Bytes of Kronecker factors, in the form that a fit takes for a last layer of very many
    classes.
    """
    many = is_last_layer(extent) and extent.outputs > MANY_CLASSES
    return Kfac(output_factor=DIAGONAL if many else None).memory(extent)


def seconds_of(structure: Structure, extent: Extent) -> float:
    """About how long a fit takes. Not known for structures other than dense and kfac: NaN."""
    if isinstance(structure, Dense):
        return _seconds_of_dense(extent)
    return _seconds_of_kfac(extent) if isinstance(structure, Kfac) else math.nan


def _seconds_of_dense(extent: Extent) -> float:
    rows, size, outputs = extent.rows or UNKNOWN_ROWS, extent.size, extent.outputs
    width = size // outputs
    directions = min(size, rows * outputs)
    if directions < size:  # rows in place of a matrix
        sums = 2 * directions**2 * size
    elif is_last_layer(extent):
        sums = outputs * (outputs + 1) * rows * width**2
    else:
        sums = 2 * rows * outputs * size**2
    rounds = ROUNDS if extent.averages else 0
    work = sums * (1 + 2 * rounds) / PRODUCTS  # of each round: covariances of the rows, then sums
    work += (1 + rounds) * directions**2 * size / FACTORS
    work += (CHOICES if extent.averages else 1) * directions**2 * size / EIGENVECTORS
    return work + rows * _features(extent) * OF_FEATURE


def _seconds_of_kfac(extent: Extent) -> float:
    rows, outputs = extent.rows or UNKNOWN_ROWS, extent.outputs
    rounds = ROUNDS if extent.averages else 0
    head = is_last_layer(extent)
    work = rows * _features(extent) * OF_FEATURE
    for inside, out in extent.layers:
        work += inside**3 / EIGENVECTORS + 2 * rows * inside**2 / PRODUCTS
        each = (
            out**3 / EIGENVECTORS
            + 4 * rows * inside * (1 if head else outputs) * out / SINGLE_PRODUCTS
        )
        work += each * (1 + rounds)
    if head and rounds:
        inside, _ = extent.layers[0]
        work += 2 * rows * inside**2 / SINGLE_PRODUCTS
        # Each node adds p pᵀ (C, C) to the output factor
        of_node = outputs * OF_NODE + 2 * outputs**2 / SINGLE_PRODUCTS
        work += rounds * rows * nodes_of_row(rows, outputs) * of_node
    return work


def nodes_of_row(rows: int, classes: int) -> int:
    """How many nodes a row of pooled classes has in one pass: those of `ssla.likelihoods.averages`.

    That package and this one do not import each other; a test compares the two.
    """
    pairs = next(pairs for most, pairs in PAIRS if most >= classes)
    if rows < MANY_ROWS and classes <= MANY_CLASSES:
        return 2 * pairs  # for one or two classes fewer, by a rule of their own
    count = max(FEWEST_NODES, min(math.ceil(NODES_OF_ALL_ROWS / rows), pairs))
    return 2 * math.ceil(count / 2)


def _features(extent: Extent) -> int:
    """Numbers of a row that its layers see."""
    return sum(inside for inside, _ in extent.layers) or extent.size


def time_in_words(seconds: float) -> str:
    """A number of seconds as text."""
    if seconds < 120:
        return f"{max(round(seconds), 1)} s"
    unit, word = (60, "min") if seconds < 7200 else (3600, "h")
    return f"{float(f'{seconds / unit:.2g}'):,.0f} {word}"
