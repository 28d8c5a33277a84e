"""The rows that the page shows, as plain values: each under several strengths of the prior."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ssla.maths.quadrature import wrap_angles
from ssla.tables.report.measures import BLOCK, LEVELS
from ssla.tables.report.subject import Subject

# How much the page draws of a row: guesses, for a page of a few megabytes.
GRID = 45  # points of a density
GRID_TAIL = 0.002  # probability beyond each end of the grid
MOST_BARS = 60  # counts in a picture
MOST_CLASSES = 12  # of one row; the others are added up
HEIGHT = 1000  # densities are whole numbers up to this
DIGITS = 6  # significant digits of numbers
GRID_DIGITS = 8  # of the start and the step of a grid, of which many multiples are taken
CELL_DIGITS = 5  # of an input that is a number
CELL_LENGTHS = (60, 24, 12)  # characters of an input that is a text
INPUT_BYTES = 2_000_000  # of all inputs together


def describe_rows(
    subject: Subject, positions: np.ndarray, factors: tuple[float, ...], predictive_kind: str
) -> dict[str, Any]:
    """Return lists with an entry for each of k rows under each strength of the prior.

    The keys are those of `_describe_number_rows` for numbers, counts and angles, and those of
    `_describe_class_rows` for classes.  positions (k,): which rows, at least one.  factors: on the
    precision of the prior.  predictive_kind: that of the predictives, such as "class".
    """
    blocks = []
    for rows in np.array_split(positions, math.ceil(len(positions) / BLOCK)):
        predictives = [subject.predict(rows, None, factor) for factor in factors]
        if predictive_kind == "class":
            blocks.append(_describe_class_rows(predictives, subject.y[torch.from_numpy(rows)]))
        else:
            blocks.append(_describe_number_rows(predictives, predictive_kind))
    return {name: [value for block in blocks for value in block[name]] for name in blocks[0]}


def _describe_number_rows(predictives: list[Any], predictive_kind: str) -> dict[str, Any]:
    """Return means, standard deviations, intervals and densities of k rows, under each factor.

    predictives: of the same rows, one for each factor.  predictive_kind: such as "count". Each
    list has k entries.
    """
    rows = {
        "mean": _stack_factors(predictives, lambda p: p.mean),
        "doubt": _stack_factors(predictives, lambda p: p.epistemic.clamp_min(0).sqrt()),
        "noise": _stack_factors(predictives, lambda p: p.aleatoric.clamp_min(0).sqrt()),
        # of shape (k, factors, levels, 2)
        "interval": _stack_factors(
            predictives, lambda p: torch.stack([p.interval(level) for level in LEVELS], 1)
        ),
    }
    plain = {name: list_rounded_numbers(values) for name, values in rows.items()}
    return plain | _tabulate_densities(predictives, predictive_kind)


def _stack_factors(predictives: list[Any], measure: Callable[[Any], Tensor]) -> Tensor:
    """Return a measure of the predictives under all factors, (k, factors, …) in float64.

    measure: a function of a predictive that returns (k, …).
    """
    return torch.stack([measure(p) for p in predictives], 1).double().cpu()


def _tabulate_densities(predictives: list[Any], predictive_kind: str) -> dict[str, Any]:
    """Return the densities of k rows: start and step of each row's grid, and heights on it.

    A row has one grid for all factors. Heights are whole numbers, and the largest of a row is
    HEIGHT.  predictives, predictive_kind: as in `_describe_number_rows`.
    """
    low, high = _choose_grid_ends(predictives, predictive_kind)

    # Counts have steps of whole numbers, so that at most MOST_BARS bars are drawn in a row. The
    # grid has as many points as the row with the most bars needs.
    if predictive_kind == "count":
        step = ((high - low + 1) / MOST_BARS).ceil().clamp_min(1)
        points = int(((high - low) / step).ceil().max()) + 1
    else:
        points = GRID
        step = (high - low) / (points - 1)

    grid = low[:, None] + step[:, None] * torch.arange(points, dtype=torch.float64)
    y = wrap_angles(grid) if predictive_kind == "circular" else grid

    # heights of shape (k, factors, points)
    heights = torch.stack([p.log_prob(y).double().cpu().exp() for p in predictives], 1)

    # One scale for all factors of a row, because they are drawn in one picture.
    top = heights.amax((1, 2)).clamp_min(1e-300)  # no division by zero where all heights are 0
    scaled = (heights / top[:, None, None] * HEIGHT).round().int().tolist()

    # Rows of counts have different numbers of bars: those beyond their range are cut.
    if predictive_kind == "count":
        lengths = (((high - low) / step).floor().int() + 1).tolist()
        scaled = [
            [bars[:length] for bars in row] for row, length in zip(scaled, lengths, strict=True)
        ]

    return {
        "start": list_rounded_numbers(low, GRID_DIGITS),
        "step": list_rounded_numbers(step, GRID_DIGITS),
        "heights": scaled,
    }


def _choose_grid_ends(predictives: list[Any], predictive_kind: str) -> tuple[Tensor, Tensor]:
    """Choose the first and the last point (k,) of the grid of each row, for all factors.

    For angles the grid is the whole circle, centred on the mean under the first factor. Otherwise
    each end has the probability GRID_TAIL beyond it, under the factor for which it is farthest.
    predictives, predictive_kind: as in `_describe_number_rows`.
    """
    if predictive_kind == "circular":
        low = predictives[0].mean.double().cpu() - math.pi
        return low, low + 2 * math.pi
    q = torch.tensor([GRID_TAIL, 1 - GRID_TAIL], dtype=torch.float64)
    ends = torch.stack([p.icdf(q).double().cpu() for p in predictives])
    return ends[..., 0].amin(0), ends[..., 1].amax(0)


def _describe_class_rows(predictives: list[Any], y: Tensor) -> dict[str, Any]:
    """Return the probabilities of the most probable classes of k rows, and the sizes of sets.

    The classes of a row are the MOST_CLASSES with the largest probability under any factor, and
    always the observed class.  predictives: of the same rows, one for each factor.  y (k,): the
    codes of the observed classes.
    """
    probs = _stack_factors(predictives, lambda p: p.probs)  # (k, factors, C)

    # The observed class has the rank 2, above every probability.
    rank = probs.amax(1).scatter(1, y.long()[:, None], 2.0)
    top = rank.topk(min(MOST_CLASSES, probs.shape[2]), 1).indices.sort(1).values
    chosen = probs.gather(2, top[:, None].expand(-1, probs.shape[1], -1))

    # The number of classes in each set (k, factors, levels).
    sizes = torch.stack(
        [torch.stack([p.interval(level).sum(1) for level in LEVELS], 1) for p in predictives], 1
    )
    return {
        "classes": top.tolist(),
        "probs": list_rounded_numbers(chosen),
        "label": probs.argmax(2).tolist(),
        "sure": list_rounded_numbers(probs.amax(2)),
        "sizes": sizes.int().cpu().tolist(),
        "doubt": list_rounded_numbers(
            _stack_factors(predictives, lambda p: _compute_total_sd(p.epistemic))
        ),
        "noise": list_rounded_numbers(
            _stack_factors(predictives, lambda p: _compute_total_sd(p.aleatoric))
        ),
    }


def _compute_total_sd(variances: Tensor) -> Tensor:
    """Return the square root (k,) of the sum of the classes' variances (k, C)."""
    return variances.reshape(len(variances), -1).sum(1).clamp_min(0).sqrt()


def list_rounded_numbers(values: Tensor, digits: int = DIGITS) -> Any:
    """Return a tensor of any shape as nested lists of numbers with so many significant digits.

    NaN and infinite values, which JSON cannot hold, become None.
    """
    if values.dim() == 1:
        return [round_number(value, digits) for value in values.tolist()]
    return [list_rounded_numbers(row, digits) for row in values]


def round_number(value: float, digits: int = DIGITS) -> float | int | None:
    """Return a number with so many significant digits, as an int if it is whole.

    The result is None if the number is not finite.
    """
    if not math.isfinite(value):
        return None
    rounded = float(f"{value:.{digits}g}")
    # A whole number of 16 digits or more (from 1e15 on) is shorter as a float, such as 1e+20.
    return int(rounded) if rounded == int(rounded) and abs(rounded) < 1e15 else rounded


def shorten_inputs(rows: list[list[Any]]) -> list[list[Any]]:
    """Return the cells of rows as numbers with few digits and as texts, with long texts cut.

    CELL_LENGTHS are tried from the longest on, until all cells together have at most INPUT_BYTES
    bytes. If none is short enough, the texts have the shortest length.
    """
    cut: list[list[Any]] = []
    for length in CELL_LENGTHS:
        cut = [[_shorten_cell(cell, length) for cell in row] for row in rows]
        if len(json.dumps(cut, ensure_ascii=False).encode()) <= INPUT_BYTES:
            break
    return cut


def _shorten_cell(value: Any, length: int) -> Any:
    """Return a number with CELL_DIGITS, or the text of another value, at most `length` long.

    None becomes the empty text. A cut text ends in "…".
    """
    if isinstance(value, int | float):
        return round_number(float(value), CELL_DIGITS)
    text = "" if value is None else str(value)
    return text if len(text) <= length else text[: length - 1] + "…"
