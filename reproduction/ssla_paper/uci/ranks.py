"""Mean ranks over blocks, Friedman's test, and the figure of critical differences."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from ssla_paper.peers import library

LEVEL = 0.05


@dataclass(frozen=True, eq=False)
class Ranking:
    """Methods with their mean ranks over all blocks (1 is best), and the test statistics over
    the sets.
    """

    methods: tuple[str, ...]
    ranks: np.ndarray  # (k,)
    blocks: int
    sets: int
    p: float  # Friedman's, over the sets' means
    critical: float  # Nemenyi's difference at 5%, over the sets

    def of(self, method: str) -> float:
        return float(self.ranks[self.methods.index(method)])


def ranking(methods: tuple[str, ...], scores: dict[str, np.ndarray]) -> Ranking:
    """scores: by set, (splits, k), lower is better.

    Ranks are averaged over sets × splits. Splits of one set share most of their rows, so they are
    not independent blocks: the test and the critical difference count sets, ranked by their mean
    scores.
    """
    each = np.concatenate([ranked(part) for part in scores.values()])
    means = np.stack([part.mean(0) for part in scores.values()])
    return Ranking(
        methods,
        each.mean(0),
        len(each),
        len(means),
        friedman(means),
        critical_difference(len(methods), len(means)),
    )


def ranked(scores: np.ndarray) -> np.ndarray:
    """Ranks in each row, ties shared."""
    found: np.ndarray = library("scipy.stats", "scipy").rankdata(scores, axis=1)
    return found


def friedman(scores: np.ndarray) -> float:
    """p that all columns are equal, from the ranks in rows; NaN with fewer than two rows or
    three columns.
    """
    if len(scores) < 2 or scores.shape[1] < 3:
        return math.nan
    return float(library("scipy.stats", "scipy").friedmanchisquare(*scores.T).pvalue)


def critical_difference(methods: int, blocks: int, level: float = LEVEL) -> float:
    """Nemenyi: q √(k(k + 1)/6N), with q the studentised range's quantile over √2."""
    q = float(
        library("scipy.stats", "scipy").studentized_range.ppf(1 - level, methods, np.inf)
    ) / math.sqrt(2)
    return q * math.sqrt(methods * (methods + 1) / (6 * blocks))


def cliques(ranks: np.ndarray, critical: float) -> list[tuple[float, float]]:
    """The widest stretches of ranks that differ by less than the critical difference, of two
    methods or more.
    """
    order = np.sort(ranks)
    found: list[tuple[float, float]] = []
    for start in order:
        end = float(order[order <= start + critical][-1])
        if end > start and (not found or end > found[-1][1]):
            found.append((float(start), end))
    return found


def draw_ranking(found: Ranking, names: dict[str, str], score: str) -> Any:
    """Methods along a line of mean ranks; bars join those that do not differ significantly."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    order = np.argsort(found.ranks)
    half = (len(order) + 1) // 2
    bars = cliques(found.ranks, found.critical)
    top = 0.55 + 0.22 * len(bars)
    figure, ax = plt.subplots(figsize=(8, 1.4 + 0.27 * half + 0.2 * len(bars)))
    low, high = 1, len(order)
    ax.hlines(0, low, high, color="black", lw=1)
    for tick in range(low, high + 1):
        ax.vlines(tick, 0, 0.12, color="black", lw=1)
        ax.text(tick, 0.22, str(tick), ha="center", va="bottom", fontsize=8)
    for place, method in enumerate(order):
        left = place < half
        depth = -top - 0.42 * (place if left else len(order) - 1 - place)
        end = low - 0.3 if left else high + 0.3
        rank = float(found.ranks[method])
        ax.plot([rank, rank, end], [0, depth, depth], color="#2f6db5", lw=1)
        text = f"{names[found.methods[method]]} ({rank:.2f})"
        ax.text(
            end - 0.08 if left else end + 0.08,
            depth,
            text,
            ha="right" if left else "left",
            va="center",
            fontsize=8,
        )
    for row, (start, end) in enumerate(bars):
        ax.hlines(-0.3 - 0.22 * row, start - 0.05, end + 0.05, color="#d1651f", lw=3.5)
    ax.hlines(0.95, low, low + found.critical, color="black", lw=1.5)
    ax.text(
        low + found.critical / 2,
        1.02,
        f"critical difference {found.critical:.2f}",
        ha="center",
        va="bottom",
        fontsize=8,
    )
    ax.set_title(
        f"Mean rank in {score}: {found.sets} sets, {found.blocks} sets × splits; Friedman p = "
        f"{found.p:.2g}",
        fontsize=9,
    )
    ax.set_xlim(low - 3.4, high + 3.4)
    ax.set_ylim(-top - 0.42 * half, 1.5)
    ax.axis("off")
    return figure
