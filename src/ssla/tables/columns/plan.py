"""How columns become numbers.

This is decided once on the training table, applied to every later table, and reported. A later row
may lack a value, or have a category that was not in the training table. If training had enough such
rows, the row is encoded like those. Otherwise the plan gives several copies of the row, with values
of the training table in the gap, and the prediction is a mixture over them
(`Encoded.make_filled_copies`).

The module has, in this order, `Feature` (one column), `Encoded` (rows as numbers), `Plan` (all
columns), the checks of a plan that is read from a file, and `make_plan`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import timedelta
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from ssla.tables.columns.kinds import (
    BOOLEAN,
    DATE,
    EPOCH,
    NUMBER,
    PLAIN,
    TEXT,
    Column,
    Style,
    TableError,
    find_distinct_cells,
)
from ssla.tables.columns.reading import Table

# These limits are guesses: no benchmark compares them with others.
MOST_LEVELS = 50  # levels of a category that has one column of numbers for each
# A text column with more than FEW_LEVELS values, in more than this share of the rows, is free text.
FREE_TEXT = 0.1
FEW_LEVELS = 20
FEWEST_ROWS = 2  # training rows of a level that has a code
MOST_CODES = 10_000
# A text column with many values is a category if levels with a code have this share of the rows.
CODED = 0.5
ENOUGH = 20  # training rows with a gap, or a rare category, from which a network learns its effect
DRAWS = 16  # values of a column, and complete rows, that represent the training table
SETS = 200  # random sets of rows, of which `_find_closest_set` keeps the closest to the table

NOTED_LENGTH = 40  # characters of a category in a note
LARGEST_FILL = 1e300  # numbers of a file that are larger are refused
YEAR, DAY = 365.2425, 1.0  # periods of dates, in days
KINDS = (NUMBER, BOOLEAN, TEXT, DATE)


@dataclass(frozen=True)
class Feature:
    """How the cells of one column become one or more columns of numbers.

    Numbers, booleans and dates have one column with gaps filled by the mean, and a flag for gaps if
    training had any. Dates are days since the first one, with sine and cosine of each period that
    the table spans. A category has one column for each level, and one for all rare levels. With
    many levels it has one column of codes in place of these, if its plan has codes (see
    `make_plan`).
    """

    name: str
    kind: str
    fill: float = 0.0  # takes the place of a gap, in days since `start` for dates
    flag: bool = False  # whether a column says where gaps are
    levels: tuple[str, ...] = ()  # of a category, with a column each
    rare: tuple[str, ...] = ()  # levels of a category that share one column, or the code 0
    rare_rows: int = 0  # training rows with a rare level
    style: Style = field(default_factory=Style)  # the format of numbers in the training table
    start: float = 0.0  # of dates: the first one, in days since 1970; 0 for other kinds
    periods: tuple[float, ...] = ()  # of dates, in days: YEAR and DAY, as far as they are used
    gaps: int = 0  # training rows without a value
    # values that represent the training column, with their shares, which sum to one
    draws: tuple[float | str, ...] = ()
    shares: tuple[float, ...] = ()
    interpretation: str = ""  # how the column was read, if that is not obvious
    # levels with the codes 1, 2, …, the most frequent first; one more code is for gaps, if training
    # had any, and 0 is for every other level
    codes: tuple[str, ...] = ()

    @property
    def width(self) -> int:
        """The number of columns of numbers that encode this column."""
        return len(self.encoded_names)

    @property
    def level_counts(self) -> list[int]:
        """The largest code of each column of numbers (width); 0 for a column without codes.

        The largest code is the number of levels with a code, plus one if gaps have a code.
        """
        if not self.codes:
            return [0] * self.width
        return [len(self.codes) + 1 if self.gaps > 0 else len(self.codes)]

    @property
    def encoded_names(self) -> list[str]:
        """The names of the columns of numbers (width)."""
        if self.codes:
            return [f"{self.name}: code"]
        if self.kind == TEXT:
            names = [f"{self.name}={level}" for level in self.levels]
            if self.rare:
                names.append(f"{self.name}: rare")
            return names

        names = [self.name]
        if self.flag:
            names.append(f"{self.name}: missing")
        for period in self.periods:
            cycle = "year" if period == YEAR else "day"
            names += [f"{self.name}: sine of the {cycle}", f"{self.name}: cosine of the {cycle}"]

        return names

    def encode(self, column: Column) -> tuple[np.ndarray, np.ndarray]:
        """Return the numbers (n, width), and which rows have an unknown category (n,) bool.

        column: of this feature's kind, with n rows. An unknown category is one that the training
        table did not have.
        """
        if self.codes:
            return self._encode_codes(column)
        if self.kind == TEXT:
            return self._encode_levels(column)
        return self._encode_numbers(column), np.zeros(len(column.values), dtype=bool)

    def _encode_numbers(self, column: Column) -> np.ndarray:
        """Return the filled values, the flag for gaps, and sines and cosines (n, width).

        There is a flag if the feature has one, and a sine and a cosine for each period, which are 0
        for a gap.  column: numbers, booleans or dates.
        """
        gaps = column.missing
        values = np.where(gaps, self.fill, column.values.astype(float) - self.start)
        encoded = [values]
        if self.flag:
            encoded.append(gaps.astype(float))
        for period in self.periods:
            # Angles count from 1970, so that the same day of two years has the same angle.
            angle = 2 * np.pi * (values + self.start) / period
            encoded += [np.where(gaps, 0.0, np.sin(angle)), np.where(gaps, 0.0, np.cos(angle))]

        return np.stack(encoded, 1)

    def _encode_levels(self, column: Column) -> tuple[np.ndarray, np.ndarray]:
        """Return the columns of the levels (n, width), and which rows have an unknown category.

        There is one column for each level, and one for all rare levels. The second result is (n,)
        bool. A row has a 1 in the column of its category and 0 in the others. A gap has zeros only.
        So has an unknown category that is not treated as a rare one.
        """
        # The position of a text is its column of the block; −1 gives zeros.
        rare_position = len(self.levels)
        positions = {level: i for i, level in enumerate(self.levels)}
        positions |= dict.fromkeys(self.rare, rare_position)
        unknown_position = rare_position if self.has_enough_rare_rows else -1

        # Each different text is looked up once: L texts for n rows.
        texts, text_of_row = find_distinct_cells(column.values)  # (L), (n,)
        unknown = np.array(
            [text is not None and text not in positions for text in texts], dtype=bool
        )
        position_of_text = np.array(
            [
                positions.get(text, unknown_position if is_unknown else -1)
                for text, is_unknown in zip(texts, unknown, strict=True)
            ],
            dtype=np.intp,
        )
        position = position_of_text[text_of_row]  # (n,)
        rows = np.flatnonzero(position >= 0)
        block = np.zeros((len(position), self.width))
        block[rows, position[rows]] = 1.0
        return block, unknown[text_of_row]

    def _encode_codes(self, column: Column) -> tuple[np.ndarray, np.ndarray]:
        """Return the code of each row (n, 1), and which rows have an unknown category (n,) bool.

        Gaps have a code of their own if training had any. Rare and unknown categories, and other
        gaps, have the code 0.
        """
        codes: dict[str | None, int] = {level: i for i, level in enumerate(self.codes, 1)}
        code_of_gaps = self.level_counts[0] if self.gaps else 0
        code_of_text = codes | dict.fromkeys(self.rare, 0) | {None: code_of_gaps}
        # The code −1 marks unknown categories. In the result they have 0.
        code = np.array(
            [code_of_text.get(text, -1) for text in column.values.tolist()], dtype=float
        )
        return np.maximum(code, 0.0)[:, None], code < 0

    @property
    def has_enough_rare_rows(self) -> bool:
        """Whether training had enough rows with rare categories to learn their effect.

        A category that is unknown is then treated as a rare one.
        """
        return bool(self.rare) and self.rare_rows >= ENOUGH

    def find_unlearned_rows(
        self, column: Column, unknown: np.ndarray, scarce: np.ndarray
    ) -> np.ndarray:
        """Find the rows (n,) bool with an input whose effect could not be learned from training.

        That is a gap where training had too few gaps, an unknown category where it had too few rows
        with rare categories, or a scarce category.  unknown, scarce (n,) bool: as `encode` and
        `find_scarce_rows` return them for the column.
        """
        too_few_gaps = self.gaps < ENOUGH
        return np.asarray(
            (column.missing & too_few_gaps) | (unknown & (not self.has_enough_rare_rows)) | scarce
        )

    def find_scarce_rows(
        self, block: np.ndarray, column: Column, unknown: np.ndarray
    ) -> np.ndarray:
        """Find the rows (n,) bool with a scarce category.

        A category of the training table is scarce if it has no code, and all such categories
        together had too few training rows. Without codes none is scarce.  block (n, width), unknown
        (n,) bool: as `encode` returns them for the column.
        """
        if not self.codes or self.has_enough_rare_rows:
            return np.zeros(len(unknown), dtype=bool)
        # Gaps and unknown categories may have the code 0 too.
        return np.asarray((block[:, 0] == 0) & ~column.missing & ~unknown)

    def encode_values(self, values: Sequence[float | str]) -> np.ndarray:
        """Return the numbers (k, width) of k values without gaps, in the feature's kind."""
        cells = np.array(values, dtype=object if self.kind == TEXT else float)
        return self.encode(Column(self.name, self.kind, cells))[0]


@dataclass(frozen=True, eq=False)
class Encoded:
    """The n rows of a table as numbers, with notes and counts.

    The counts are those of the whole table, also where only some of its rows are kept.
    """

    values: np.ndarray  # (n, width of the plan)
    missing: dict[str, int]  # gaps by column, for columns that have some
    unknown: dict[str, int]  # rows with an unknown category by column, for columns that have some
    notes: np.ndarray  # (n,) texts; empty where all inputs were known
    unlearned: np.ndarray  # (n, features) bool: as `Feature.find_unlearned_rows` finds them
    plan: Plan

    def __getitem__(self, rows: np.ndarray | slice) -> Encoded:
        """Return some of the rows, with the counts of the whole table.

        rows: a slice, positions (k,), or a mask (n,) bool.
        """
        return replace(
            self,
            values=self.values[rows],
            notes=self.notes[rows],
            unlearned=self.unlearned[rows],
        )

    def __len__(self) -> int:
        """Return the number of rows."""
        return len(self.values)

    @property
    def noted_row_count(self) -> int:
        """The number of rows with a note: those with a missing or unknown input."""
        return int((self.notes != "").sum())

    @property
    def mixed_rows(self) -> np.ndarray:
        """Which rows (n,) bool need a mixture over training values."""
        return np.asarray(self.unlearned.any(axis=1))

    def make_filled_copies(self) -> Iterator[np.ndarray]:
        """Yield DRAWS copies (A, width) of the A mixed rows, each with other values in their gaps.

        A row with one gap gets a draw of its column in each copy. A row with several gaps gets the
        values of one row of `plan.rows`, so that they fit each other. A gap is an unlearned input.
        """
        values = self.values[self.mixed_rows]
        gaps = self.unlearned[self.mixed_rows]
        several = gaps.sum(1) > 1
        for k in range(DRAWS):
            filled = values.copy()
            for f, columns in enumerate(self.plan.column_slices):
                draws, complete_rows = self.plan.encoded_representatives[f]
                # A column with fewer draws repeats its last one; `copy_weights` gives it no weight.
                filled[gaps[:, f] & ~several, columns] = draws[min(k, len(draws) - 1)]
                filled[gaps[:, f] & several, columns] = complete_rows[k]
            yield filled

    @property
    def copy_weights(self) -> np.ndarray:
        """The weights (DRAWS, A) of the copies of the A mixed rows, for `make_filled_copies`.

        The weights of a row, a column of the result, sum to one. A row with one gap has the shares
        of its column's draws. A row with several gaps has equal weights.
        """
        gaps = self.unlearned[self.mixed_rows]
        has_one_gap = gaps.sum(1) == 1
        weights = np.full((DRAWS, len(gaps)), 1 / DRAWS)
        for f, feature in enumerate(self.plan.features):
            shares = np.zeros(DRAWS)
            shares[: len(feature.shares)] = feature.shares
            weights[:, gaps[:, f] & has_one_gap] = shares[:, None]
        return weights


class Representatives(NamedTuple):
    """The training values of one feature as numbers, by which its gaps are filled."""

    values: np.ndarray  # (k, width): its draws, for rows with this gap only
    complete_rows: np.ndarray  # (DRAWS, width): its values in `Plan.rows`, for rows with more gaps


@dataclass(frozen=True)
class Plan:
    """How the columns of a table become numbers, as the training table decided it."""

    features: tuple[Feature, ...]  # in the order of the columns
    left_out: dict[str, str]  # the reason why a column is not used, by its name
    # DRAWS rows of the training table, which represent it: a value for each feature
    rows: tuple[tuple[float | str, ...], ...]

    @property
    def width(self) -> int:
        """The number of columns of numbers that encode all columns."""
        return sum(feature.width for feature in self.features)

    @property
    def is_identity(self) -> bool:
        """Whether numbers without gaps are encoded as themselves."""
        return not self.left_out and all(
            feature.kind == NUMBER and feature.width == 1 for feature in self.features
        )

    @property
    def interpretation(self) -> dict[str, str]:
        """How columns were interpreted, by name, without those where that is obvious."""
        return {
            feature.name: feature.interpretation
            for feature in self.features
            if feature.interpretation
        }

    @property
    def level_counts(self) -> tuple[int, ...]:
        """The largest code of each column of numbers (width); 0 for a column without codes.

        The result is () if no column has codes.
        """
        counts = tuple(count for feature in self.features for count in feature.level_counts)
        return counts if any(counts) else ()

    @cached_property
    def column_slices(self) -> list[slice]:
        """The slice of the columns of numbers (width) for each feature."""
        ends = np.cumsum([feature.width for feature in self.features]).tolist()
        return [
            slice(end - feature.width, end)
            for end, feature in zip(ends, self.features, strict=True)
        ]

    @cached_property
    def encoded_representatives(self) -> list[Representatives]:
        """The numbers that represent the training values of each feature."""
        return [
            Representatives(
                feature.encode_values(feature.draws),
                feature.encode_values([row[i] for row in self.rows]),
            )
            for i, feature in enumerate(self.features)
        ]

    def encode(self, table: Table) -> Encoded:
        """Return the columns of the plan as numbers, with notes; other columns are ignored.

        Raises TableError for a missing column, or a cell of another kind.
        """
        blocks = []
        unlearned = []
        missing: dict[str, int] = {}
        unknown: dict[str, int] = {}
        notes = np.full(table.rows, "", dtype=object)
        for feature in self.features:
            column = table.read_column_as_kind(feature.name, feature.kind, feature.style)
            block, is_unknown = feature.encode(column)
            scarce = feature.find_scarce_rows(block, column, is_unknown)
            blocks.append(block)
            unlearned.append(feature.find_unlearned_rows(column, is_unknown, scarce))
            if gaps := int(column.missing.sum()):
                missing[feature.name] = gaps
            if is_unknown.any():
                unknown[feature.name] = int(is_unknown.sum())
            _add_notes(notes, feature, column, is_unknown, scarce)

        # Each note begins with a separator, also the first of a row.
        noted = np.flatnonzero(notes)
        notes[noted] = [note.removeprefix("; ") for note in notes[noted].tolist()]
        return Encoded(
            np.concatenate(blocks, 1), missing, unknown, notes, np.stack(unlearned, 1), self
        )

    def as_json(self) -> dict[str, Any]:
        """Return the plan as plain values for a file."""
        return {
            "features": [asdict(feature) for feature in self.features],
            "left_out": self.left_out,
            "rows": self.rows,
        }

    @staticmethod
    def from_json(content: dict[str, Any]) -> Plan:
        """Return the plan of a file, whose content is that of `as_json`.

        Raises ValueError if `make_plan` could not have made it, and KeyError or TypeError if a
        value is missing or of another type.
        """
        features = tuple(_read_feature(feature) for feature in content["features"])
        left_out = dict(content["left_out"])
        names = [feature.name for feature in features] + list(left_out)
        if not features or len(set(names)) < len(names):
            raise ValueError("there is no column, or one occurs twice")
        if not all(isinstance(text, str) for pair in left_out.items() for text in pair):
            raise ValueError("the columns that were left out have no reasons")
        rows = tuple(tuple(row) for row in content["rows"])
        if (
            len(rows) != DRAWS
            or any(len(row) != len(features) for row in rows)
            or not all(feature.draws for feature in features)
        ):
            raise ValueError("the rows that represent the training table do not fit the columns")

        return Plan(features, left_out, rows)


def _add_notes(
    notes: np.ndarray, feature: Feature, column: Column, unknown: np.ndarray, scarce: np.ndarray
) -> None:
    """Append to the notes (n,), in place, what is missing or unknown in a column.

    Each appended note begins with "; ".  feature: that of the column.  unknown, scarce (n,) bool:
    which rows have such a category.
    """
    name = feature.name
    notes[column.missing] += f"; {name}: missing"
    treatment = ", treated as a rare one" if feature.has_enough_rare_rows else ""
    for rows, before, after in (
        (unknown, "unknown category", treatment),
        (scarce, "category", " of too few training rows"),
    ):
        texts = column.values[rows].tolist() if rows.any() else []
        added = [f"; {name}: {before} {text[:NOTED_LENGTH]!r}{after}" for text in texts]
        notes[rows] += np.array(added, dtype=object)


def _read_feature(content: dict[str, Any]) -> Feature:
    """Return the feature of a file, whose content has the fields of `Feature`.

    Raises ValueError for values that no feature has, and KeyError for a missing field.
    """
    names = ("levels", "rare", "periods", "draws", "shares", "codes")
    if not all(isinstance(content[name], list | tuple) for name in names):
        raise ValueError("a list of the plan is not a list")
    lists = {name: tuple(content[name]) for name in names}
    _check_kind_and_categories(content, lists)
    _check_numbers(content, lists)
    return Feature(
        name=content["name"],
        kind=content["kind"],
        fill=float(content["fill"]),
        flag=content["flag"],
        rare_rows=content["rare_rows"],
        style=Style(**{str(name): str(mark) for name, mark in content["style"].items()}),
        start=float(content["start"]),
        gaps=content["gaps"],
        interpretation=content["interpretation"],
        **lists,
    )


def _check_kind_and_categories(content: dict[str, Any], lists: dict[str, tuple[Any, ...]]) -> None:
    """Raise ValueError for an unknown kind, and for categories that do not fit it.

    content: a feature of a file.  lists: its lists as tuples, by name.
    """
    name = content["name"]
    kind = content["kind"]
    categories = (*lists["levels"], *lists["rare"], *lists["codes"])
    drawn = lists["draws"] if kind == TEXT else ()
    texts = (name, kind, content["interpretation"], *categories, *drawn)
    if not all(isinstance(text, str) for text in texts) or kind not in KINDS:
        raise ValueError(f"the column {name!r} is of the unknown kind {kind!r}")

    # A text has levels or codes, but not both; another kind has neither.
    has_levels = bool(lists["levels"])
    has_codes = bool(lists["codes"])
    if kind == TEXT:
        fits_kind = has_levels != has_codes
    else:
        fits_kind = not has_levels and not has_codes
    if not fits_kind or len(set(categories)) < len(categories):
        raise ValueError(
            f"the categories of the column {name!r} do not fit its kind, or one occurs twice"
        )


def _check_numbers(content: dict[str, Any], lists: dict[str, tuple[Any, ...]]) -> None:
    """Raise ValueError for numbers of a feature that `make_plan` cannot have made.

    Such numbers are too large or not finite, counts that are negative, and periods and shares that
    are not positive.  content: a feature of a file.  lists: its lists as tuples, by name.
    """
    name = content["name"]
    drawn = lists["draws"] if content["kind"] != TEXT else ()
    positive = (*lists["periods"], *lists["shares"])
    numbers = (content["fill"], content["start"], *positive, *drawn)
    if type(content["flag"]) is not bool or any(
        type(number) not in (int, float) or not abs(number) <= LARGEST_FILL for number in numbers
    ):
        raise ValueError(f"the column {name!r} has no usable value for gaps")

    counts = (content["rare_rows"], content["gaps"])
    if (
        any(type(count) is not int or count < 0 for count in counts)
        or min(positive, default=1) <= 0
    ):
        raise ValueError(f"the column {name!r} has counts, periods or shares that are not positive")


def make_plan(
    table: Table,
    excluded: set[str],
    deciding_rows: np.ndarray | None = None,
    keep_constants: bool = False,
    codes: bool = False,
) -> Plan:
    """Make a plan of how the columns of a table become numbers.

    excluded: the names of columns that the plan does not have.  deciding_rows (n,) bool: the rows
    that decide the plan; None: all.  keep_constants: whether numbers that are constant are kept, so
    that a table of numbers without gaps is encoded as itself.  codes: whether the levels of
    categories that have many are numbered, for a model that learns an effect of each; other models
    would read a code as a number.

    Raises TableError where no column is usable, or where a column mixes kinds.
    """
    if deciding_rows is None:
        deciding_rows = np.ones(table.rows, dtype=bool)

    features: list[Feature] = []
    columns: list[Column] = []
    left_out: dict[str, str] = {}
    for name in table.names:
        if name in excluded:
            continue
        column = table.interpret_column(name, mixed=True)
        column = replace(column, values=column.values[deciding_rows])
        feature = _plan_column(column, table, keep_constants=keep_constants, codes=codes)
        if isinstance(feature, str):
            left_out[name] = feature
        else:
            features.append(feature)
            columns.append(column)

    if not features:
        reasons = "; ".join(f"{name}: {why}" for name, why in left_out.items())
        raise TableError(
            f"{table.path} has no usable input column{f' ({reasons})' if reasons else ''}."
        )

    return Plan(tuple(features), left_out, _choose_rows(features, columns))


def _plan_column(
    column: Column, table: Table, *, keep_constants: bool, codes: bool
) -> Feature | str:
    """Return the feature of a column, or the reason why it is left out.

    column: the deciding rows of a column of the table.  keep_constants, codes: as in `make_plan`.
    """
    gaps = column.missing
    if bool(gaps.all()):
        return "empty in every row"

    # A constant column has no information, unless some of its rows are gaps.
    values = column.values[~gaps]
    is_constant = bool((values == values[0]).all()) and not gaps.any()
    if column.kind == TEXT:
        return "constant" if is_constant else _plan_texts(column, values, codes=codes)
    if is_constant and not keep_constants:
        return "constant"

    # The cells as they were read are needed for an example of another format only.
    cells = [] if column.style == PLAIN else table.get_cells(column.name)
    return _plan_numbers(column, values, column.style.describe(cells))


def _plan_numbers(column: Column, values: np.ndarray, format_used: str) -> Feature:
    """Return the feature of numbers, booleans or dates.

    values (k,): those that are not missing.  format_used: the text of the report on the format of
    the numbers; dates have a text of their own.  column: the rows that decide the plan.
    """
    gaps = int(column.missing.sum())
    interpretation = format_used
    start = 0.0
    periods: tuple[float, ...] = ()
    if column.kind == DATE:
        start = float(values.min())
        span = float(np.ptp(values))
        interpretation = f"dates, as days since {(EPOCH + timedelta(days=start)).date()}"
        # A table of less than a year does not show the effect of the time of the year.
        if span > YEAR:
            periods += (YEAR,)
            interpretation += ", with the time of the year"
        # Dates without a time of the day are whole numbers of days.
        if span > DAY and bool((values % 1 != 0).any()):
            periods += (DAY,)
            interpretation += ", with the time of the day"

    return Feature(
        column.name,
        column.kind,
        fill=float(values.mean()) - start,
        flag=gaps > 0,
        style=column.style,
        start=start,
        periods=periods,
        gaps=gaps,
        interpretation=interpretation,
        **_choose_draws(values),
    )


def _plan_texts(column: Column, values: np.ndarray, *, codes: bool) -> Feature | str:
    """Return the feature of texts, or the reason why they are left out.

    A column is free text if it has many different values for its number of rows (FEW_LEVELS,
    FREE_TEXT). With `codes`, texts with many levels have codes if the levels with at least
    FEWEST_ROWS rows cover the share CODED of the rows. Other free texts are left out. Of other
    texts, the MOST_LEVELS most frequent levels have a column each, and the rest are rare.

    values (k,): those that are not missing.  codes: whether categories with many levels may have
    codes.
    """
    levels, counts = _count_values(values)
    most_frequent_first = np.argsort(-counts, kind="stable")
    is_free_text = len(levels) > FEW_LEVELS and len(levels) > FREE_TEXT * len(column.values)

    # Free text can have codes too, so codes are tried first.
    if codes and (is_free_text or len(levels) > MOST_LEVELS):
        candidates = most_frequent_first[:MOST_CODES]
        coded = candidates[counts[candidates] >= FEWEST_ROWS]
        rows_with_code = int(counts[coded].sum())
        if rows_with_code >= CODED * len(values):
            return _make_coded_feature(column, values, levels, coded, len(values) - rows_with_code)

    if is_free_text:
        return f"{len(levels)} different texts in {len(column.values)} rows"

    kept = sorted(levels[most_frequent_first[:MOST_LEVELS]].tolist())
    rare = sorted(levels[most_frequent_first[MOST_LEVELS:]].tolist())
    rare_rows = int(counts[most_frequent_first[MOST_LEVELS:]].sum())
    interpretation = (
        f"the {len(kept)} most frequent of {len(levels)} categories; the others ({rare_rows} rows) "
        "share one column"
        if rare
        else column.interpretation
    )
    return Feature(
        column.name,
        TEXT,
        levels=tuple(kept),
        rare=tuple(rare),
        rare_rows=rare_rows,
        gaps=int(column.missing.sum()),
        interpretation=interpretation,
        **_choose_draws(values),
    )


def _make_coded_feature(
    column: Column, values: np.ndarray, levels: np.ndarray, coded: np.ndarray, rare_rows: int
) -> Feature:
    """Return the feature with codes for levels[coded]; the other levels are rare.

    values (k,): those that are not missing.  levels (L,): the different values.  coded (c,): the
    positions of c levels, the most frequent first.  rare_rows: the training rows of rare levels.
    column: the rows that decide the plan, of which some may be gaps.
    """
    rare = np.delete(levels, coded).tolist()
    interpretation = (
        f"{len(coded)} of {len(levels)} categories have an effect of their own, which is learned"
    )
    if rare:
        interpretation += f"; the others ({rare_rows} rows) share one"
    return Feature(
        column.name,
        TEXT,
        rare=tuple(rare),
        rare_rows=rare_rows,
        gaps=int(column.missing.sum()),
        interpretation=interpretation,
        codes=tuple(levels[coded].tolist()),
        **_choose_draws(values),
    )


def _choose_draws(values: np.ndarray) -> dict[str, Any]:
    """Return the fields `draws` and `shares` of a feature, from its values (n,) without gaps.

    If there are at most DRAWS different values, all are drawn, with their frequencies. Of more, the
    quantiles at (i + ½)/DRAWS for i = 0 … DRAWS − 1 are drawn, with equal shares. Texts are in
    alphabetical order.
    """
    draws, counts = _count_values(values)
    shares = counts / counts.sum()
    if len(draws) > DRAWS:
        draws = draws[np.searchsorted(np.cumsum(shares), (np.arange(DRAWS) + 0.5) / DRAWS)]
        shares = np.full(DRAWS, 1 / DRAWS)
    return {"draws": tuple(draws.tolist()), "shares": tuple(shares.tolist())}


def _count_values(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the different values (n,), sorted (L,), and how often each occurs (L,)."""
    # Texts are counted before they are sorted, because few of them are different.
    if values.dtype != object:
        return np.unique(values, return_counts=True)
    counts = Counter(values.tolist())
    distinct = sorted(counts)
    return np.array(distinct, dtype=object), np.array([counts[value] for value in distinct])


def _choose_rows(
    features: list[Feature], columns: list[Column]
) -> tuple[tuple[float | str, ...], ...]:
    """Choose DRAWS rows that represent the table, and return their values (DRAWS, features).

    Of SETS random sets of complete rows, drawn with the seed 0, these are the set whose means and
    standard deviations are closest to those of all rows. If no row is complete, any rows are drawn,
    and gaps are filled with draws of their columns.

    columns: one for each feature, with the n rows that decide the plan.
    """
    blocks = [feature.encode(column)[0] for feature, column in zip(features, columns, strict=True)]
    numbers = np.concatenate(blocks, 1)  # (n, width)
    gaps = np.stack([column.missing for column in columns], 1)  # (n, features)
    complete = np.flatnonzero(~gaps.any(axis=1))
    pool = complete if len(complete) else np.arange(len(numbers))

    # Codes are not quantities, so their means and standard deviations are not compared.
    is_quantity: list[bool] = []
    for feature in features:
        is_quantity += [count == 0 for count in feature.level_counts]
    best = _find_closest_set(numbers[:, is_quantity], pool)

    values = [column.values[best].tolist() for column in columns]
    chosen_rows = []
    for k, row in enumerate(best):
        cells = [
            feature.draws[k % len(feature.draws)] if gaps[row, j] else values[j][k]
            for j, feature in enumerate(features)
        ]
        chosen_rows.append(tuple(cells))

    return tuple(chosen_rows)


def _find_closest_set(numbers: np.ndarray, pool: np.ndarray) -> np.ndarray:
    """Return the positions (DRAWS,) of rows that have about the moments of all rows.

    The moments are means and standard deviations. SETS random sets of the pool are compared, in
    standardised columns.  numbers (n, k): the columns that are compared, which are changed in
    place.  pool (m,): positions of the m rows to draw from.
    """
    scale = numbers.std(0)
    numbers -= numbers.mean(0)
    numbers /= np.where(scale > 0, scale, 1.0)
    spread = numbers.std(0)  # 1, or 0 for a constant column

    sets = np.random.default_rng(0).choice(pool, (SETS, DRAWS))
    distance = [
        (numbers[rows].mean(0) ** 2 + (numbers[rows].std(0) - spread) ** 2).sum() for rows in sets
    ]
    closest: np.ndarray = sets[int(np.argmin(distance))]
    return closest
