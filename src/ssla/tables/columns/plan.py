"""How columns become numbers: decided once on the training table, applied to every later table, and
reported.

A later row may lack a value, or have a category that was not in the training table. If training had
enough such rows, the row is encoded like those. Otherwise the plan gives several copies of the row,
with values of the training table in the gap, and the prediction is a mixture over them
(`Encoded.copies`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import timedelta
from functools import cached_property
from typing import Any

import numpy as np

from ssla.tables.columns.kinds import BOOLEAN, DATE, EPOCH, NUMBER, TEXT, Column, Style, TableError
from ssla.tables.columns.reading import Table

MOST_LEVELS = 50  # of a category that has one column for each
# A text column with more than FEW_LEVELS values, in more than this share of the rows, is free text.
FREE_TEXT = 0.1
FEW_LEVELS = 20
LARGEST_FILL = 1e300
FEWEST_ROWS = 2  # of a level that has a code
MOST_CODES = 10_000
# A text column with many values is a category if levels with a code have this share of the rows.
CODED = 0.5
ENOUGH = 20  # training rows with a gap, or a rare category, from which a network learns its effect
DRAWS = 16  # values of a column, and complete rows, that represent the training table
SETS = 200  # of rows, of which the one closest in means and spreads is kept
YEAR, DAY = 365.2425, 1.0
KINDS = (NUMBER, BOOLEAN, TEXT, DATE)


@dataclass(frozen=True)
class Feature:
    """One column: numbers, booleans and dates with gaps filled by the mean (and a flag if there
    were any); one column for each category, one for all rare ones. Dates are days since the first,
    with sine and cosine of each period that the table spans. A category with many levels has one
    column of codes in place of one for each, if its plan has codes (see `make_plan`).
    """

    name: str
    kind: str
    fill: float = 0.0
    flag: bool = False
    levels: tuple[str, ...] = ()
    rare: tuple[str, ...] = ()
    rare_rows: int = 0
    style: Style = field(default_factory=Style)
    start: float = 0.0
    periods: tuple[float, ...] = ()
    gaps: int = 0  # training rows without a value
    # values that represent the training column, with their shares
    draws: tuple[float | str, ...] = ()
    shares: tuple[float, ...] = ()
    interpretation: str = ""  # how the column was read, if that is not obvious
    # levels with the codes 1, 2, …, the most frequent first; one more code is for gaps, if training
    # had any, and 0 is for every other level
    codes: tuple[str, ...] = ()

    @property
    def width(self) -> int:
        """The number of columns of numbers."""
        if self.codes:
            return 1
        if self.kind == TEXT:
            return len(self.levels) + bool(self.rare)
        return 1 + self.flag + 2 * len(self.periods)

    @property
    def coded(self) -> list[int]:
        """The largest code of each column of numbers (width); 0 for a column that is no code."""
        return [len(self.codes) + (self.gaps > 0)] if self.codes else [0] * self.width

    @property
    def names(self) -> list[str]:
        """The names of the columns of numbers (width)."""
        if self.codes:
            return [f"{self.name}: code"]
        if self.kind == TEXT:
            by_level = [f"{self.name}={level}" for level in self.levels]
            return by_level + [f"{self.name}: rare"] * bool(self.rare)
        cycles = [
            f"{self.name}: {wave} of the {'year' if p == YEAR else 'day'}"
            for p in self.periods
            for wave in ("sine", "cosine")
        ]
        return [self.name] + [f"{self.name}: missing"] * self.flag + cycles

    def encode(self, column: Column) -> tuple[np.ndarray, np.ndarray]:
        """The numbers (n, width), and which categories were unknown (n,)."""
        if self.codes:
            return self._encode_codes(column)
        if self.kind == TEXT:
            return self._encode_levels(column)
        return self._encode_numbers(column), np.zeros(len(column.values), dtype=bool)

    def _encode_numbers(self, column: Column) -> np.ndarray:
        """The values with gaps filled, a flag for gaps, and sine and cosine of each period."""
        gaps = column.missing
        values = np.where(gaps, self.fill, column.values.astype(float) - self.start)
        parts = [values] + [gaps.astype(float)] * self.flag
        for period in self.periods:
            angle = 2 * np.pi * (values + self.start) / period
            parts += [np.where(gaps, 0.0, np.sin(angle)), np.where(gaps, 0.0, np.cos(angle))]
        return np.stack(parts, 1)

    def _encode_levels(self, column: Column) -> tuple[np.ndarray, np.ndarray]:
        """One column for each level, one for all rare ones; zeros for a gap."""
        rare_place = len(self.levels)
        places = {level: i for i, level in enumerate(self.levels)}
        places |= dict.fromkeys(self.rare, rare_place)
        # Each different text is looked up once.
        distinct = {value: i for i, value in enumerate(dict.fromkeys(column.values.tolist()))}
        is_new = np.array([v is not None and v not in places for v in distinct], dtype=bool)
        new_place = rare_place if self.rare_learned else -1
        place_of = np.array(
            [
                places.get(value, new_place if new else -1)
                for value, new in zip(distinct, is_new, strict=True)
            ],
            dtype=np.intp,
        )
        index = np.fromiter(
            map(distinct.__getitem__, column.values.tolist()),
            dtype=np.intp,
            count=len(column.values),
        )
        block = np.zeros((len(column.values), self.width))
        rows = np.flatnonzero(place_of[index] >= 0)
        block[rows, place_of[index[rows]]] = 1.0
        return block, is_new[index]

    def _encode_codes(self, column: Column) -> tuple[np.ndarray, np.ndarray]:
        """The code of each level; 0 for levels without a code, which may be unknown."""
        codes: dict[str | None, int] = {level: i for i, level in enumerate(self.codes, 1)}
        known = codes | dict.fromkeys(self.rare, 0) | {None: self.coded[0] * (self.gaps > 0)}
        code = np.array([known.get(v, -1) for v in column.values.tolist()], dtype=float)
        return np.maximum(code, 0.0)[:, None], code < 0

    @property
    def rare_learned(self) -> bool:
        """Whether training had enough rare categories to treat a new category as a rare one."""
        return bool(self.rare) and self.rare_rows >= ENOUGH

    def unlearned(self, column: Column, unknown: np.ndarray, scarce: np.ndarray) -> np.ndarray:
        """Rows (n,) with a gap, or an unknown or scarce category, if training had too few such
        rows.
        """
        rows: np.ndarray = (
            (column.missing & (self.gaps < ENOUGH)) | (unknown & (not self.rare_learned)) | scarce
        )
        return rows

    def scarce(self, block: np.ndarray, column: Column, unknown: np.ndarray) -> np.ndarray:
        """Rows (n,) with a category of so few training rows that it has no code, if all such
        categories have too few.
        """
        if not self.codes or self.rare_learned:
            return np.zeros(len(unknown), dtype=bool)
        rows: np.ndarray = (block[:, 0] == 0) & ~column.missing & ~unknown
        return rows

    def of_values(self, values: Sequence[float | str]) -> np.ndarray:
        """The numbers (k, width) of values without gaps."""
        cells = np.array(values, dtype=object if self.kind == TEXT else float)
        return self.encode(Column(self.name, self.kind, cells))[0]


@dataclass(frozen=True, eq=False)
class Encoded:
    """The numbers (n, d), with notes and counts. The counts are those of the whole table."""

    values: np.ndarray
    missing: dict[str, int]
    unknown: dict[str, int]
    notes: np.ndarray  # (n,) texts; empty where all inputs were known
    unlearned: np.ndarray  # (n, features) bool
    plan: Plan

    def __getitem__(self, rows: np.ndarray | slice) -> Encoded:
        return Encoded(
            self.values[rows],
            self.missing,
            self.unknown,
            self.notes[rows],
            self.unlearned[rows],
            self.plan,
        )

    def __len__(self) -> int:
        return len(self.values)

    @property
    def marked(self) -> int:
        """Rows with a missing or unknown input."""
        return int((self.notes != "").sum())

    @property
    def mixed(self) -> np.ndarray:
        """Rows (n,) bool that need a mixture over training values."""
        rows: np.ndarray = np.asarray(self.unlearned.any(axis=1))
        return rows

    def copies(self) -> Iterator[np.ndarray]:
        """DRAWS versions (A, d) of the A mixed rows: one gap gets values of its column, several
        get those of complete rows.
        """
        values = self.values[self.mixed]
        gaps = self.unlearned[self.mixed]
        several = gaps.sum(1) > 1
        for k in range(DRAWS):
            filled = values.copy()
            for f, place in enumerate(self.plan.places):
                draws, complete_rows = self.plan.blocks[f]
                filled[gaps[:, f] & ~several, place] = draws[min(k, len(draws) - 1)]
                filled[gaps[:, f] & several, place] = complete_rows[k]
            yield filled

    @property
    def shares(self) -> np.ndarray:
        """Weights (DRAWS, A) of the versions."""
        gaps = self.unlearned[self.mixed]
        shares = np.full((DRAWS, len(gaps)), 1 / DRAWS)
        for f, feature in enumerate(self.plan.features):
            of_column = np.zeros(DRAWS)
            of_column[: len(feature.shares)] = feature.shares
            shares[:, gaps[:, f] & (gaps.sum(1) == 1)] = of_column[:, None]
        return shares


@dataclass(frozen=True)
class Plan:
    """Features in their order, excluded columns with the reason, and rows that represent the
    training table.
    """

    features: tuple[Feature, ...]
    left_out: dict[str, str]
    rows: tuple[tuple[float | str, ...], ...]  # (DRAWS, features)

    @property
    def width(self) -> int:
        return sum(feature.width for feature in self.features)

    @property
    def plain(self) -> bool:
        """Whether numbers without gaps are encoded as themselves."""
        return not self.left_out and all(
            feature.kind == NUMBER and feature.width == 1 for feature in self.features
        )

    @property
    def interpretation(self) -> dict[str, str]:
        """How columns were interpreted, if that is not obvious."""
        return {
            feature.name: feature.interpretation
            for feature in self.features
            if feature.interpretation
        }

    @property
    def levels(self) -> tuple[int, ...]:
        """The number of codes of each column of numbers (width), 0 for a column that is no
        code; () if no column is one.
        """
        counts = tuple(count for feature in self.features for count in feature.coded)
        return counts if any(counts) else ()

    @cached_property
    def places(self) -> list[slice]:
        """The columns of numbers of each feature."""
        ends = np.cumsum([feature.width for feature in self.features]).tolist()
        return [
            slice(end - feature.width, end)
            for end, feature in zip(ends, self.features, strict=True)
        ]

    @cached_property
    def blocks(self) -> list[tuple[np.ndarray, np.ndarray]]:
        """For each feature: its draws (k, width), and its part of the rows (DRAWS, width)."""
        return [
            (f.of_values(f.draws), f.of_values([row[i] for row in self.rows]))
            for i, f in enumerate(self.features)
        ]

    def encode(self, table: Table) -> Encoded:
        """The columns of the plan; others are ignored.

        TableError for a missing column, or a cell of another kind.
        """
        blocks, unlearned = [], []
        missing: dict[str, int] = {}
        unknown: dict[str, int] = {}
        notes = np.full(table.rows, "", dtype=object)
        for feature in self.features:
            column = table.column_as(feature.name, feature.kind, feature.style)
            block, is_new = feature.encode(column)
            scarce = feature.scarce(block, column, is_new)
            blocks.append(block)
            unlearned.append(feature.unlearned(column, is_new, scarce))
            if gaps := int(column.missing.sum()):
                missing[feature.name] = gaps
            if is_new.any():
                unknown[feature.name] = int(is_new.sum())
            _add_notes(notes, feature, column, is_new, scarce)
        noted = np.flatnonzero(notes)
        notes[noted] = [note.removeprefix("; ") for note in notes[noted].tolist()]
        return Encoded(
            np.concatenate(blocks, 1), missing, unknown, notes, np.stack(unlearned, 1), self
        )

    def as_json(self) -> dict[str, Any]:
        return {
            "features": [asdict(feature) for feature in self.features],
            "left_out": self.left_out,
            "rows": self.rows,
        }

    @staticmethod
    def from_json(content: dict[str, Any]) -> Plan:
        """The plan of a file; ValueError if `make_plan` could not have made it."""
        features = tuple(_feature(f) for f in content["features"])
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
            or not all(f.draws for f in features)
        ):
            raise ValueError("the rows that represent the training table do not fit the columns")
        return Plan(features, left_out, rows)


def _add_notes(
    notes: np.ndarray, feature: Feature, column: Column, is_new: np.ndarray, scarce: np.ndarray
) -> None:
    """Append to the notes (n,) what is missing or unknown in a column; each begins with "; "."""
    name = feature.name
    notes[column.missing] += f"; {name}: missing"
    rare = ", treated as a rare one" if feature.rare_learned else ""
    for rows, before, after in (
        (is_new, "unknown category", rare),
        (scarce, "category", " of too few training rows"),
    ):
        texts = column.values[rows].tolist() if rows.any() else []
        added = [f"; {name}: {before} {text[:40]!r}{after}" for text in texts]
        notes[rows] += np.array(added, dtype=object)


def _feature(content: dict[str, Any]) -> Feature:
    """The feature of a file; ValueError for an impossible one."""
    lists = {
        part: tuple(_list(content[part]))
        for part in ("levels", "rare", "periods", "draws", "shares", "codes")
    }
    _check_texts(content, lists)
    _check_numbers(content, lists)
    return Feature(
        content["name"],
        content["kind"],
        float(content["fill"]),
        content["flag"],
        lists["levels"],
        lists["rare"],
        content["rare_rows"],
        Style(**{str(part): str(mark) for part, mark in content["style"].items()}),
        float(content["start"]),
        lists["periods"],
        content["gaps"],
        lists["draws"],
        lists["shares"],
        content["interpretation"],
        lists["codes"],
    )


def _check_texts(content: dict[str, Any], lists: dict[str, tuple[Any, ...]]) -> None:
    """ValueError for an unknown kind, and for categories that do not fit it."""
    name, kind = content["name"], content["kind"]
    categories = (*lists["levels"], *lists["rare"], *lists["codes"])
    drawn = lists["draws"] if kind == TEXT else ()
    texts = (name, kind, content["interpretation"], *categories, *drawn)
    if not all(isinstance(text, str) for text in texts) or kind not in KINDS:
        raise ValueError(f"the column {name!r} is of the unknown kind {kind!r}")
    one_kind = bool(lists["levels"]) + bool(lists["codes"]) == (kind == TEXT)
    if not one_kind or len(set(categories)) < len(categories):
        raise ValueError(
            f"the categories of the column {name!r} do not fit its kind, or one occurs twice"
        )


def _check_numbers(content: dict[str, Any], lists: dict[str, tuple[Any, ...]]) -> None:
    """ValueError for numbers that are not finite, and for counts that are not positive."""
    name = content["name"]
    drawn = lists["draws"] if content["kind"] != TEXT else ()
    positive = (*lists["periods"], *lists["shares"])
    numbers = (content["fill"], content["start"], *positive, *drawn)
    if type(content["flag"]) is not bool or any(
        type(n) not in (int, float) or not abs(n) <= LARGEST_FILL for n in numbers
    ):
        raise ValueError(f"the column {name!r} has no usable value for gaps")
    counts = (content["rare_rows"], content["gaps"])
    if (
        any(type(count) is not int or count < 0 for count in counts)
        or min(positive, default=1) <= 0
    ):
        raise ValueError(f"the column {name!r} has counts, periods or shares that are not positive")


def _list(value: Any) -> list[Any] | tuple[Any, ...]:
    if not isinstance(value, list | tuple):
        raise ValueError("a list of the plan is not a list")
    return value


def make_plan(
    table: Table,
    without: set[str],
    given: np.ndarray | None = None,
    constants: bool = False,
    codes: bool = False,
) -> Plan:
    """Make a plan from the given rows (n,) bool, for every column except those named. constants:
    keep numbers that are constant, so that a table of numbers without gaps is encoded as itself.
    codes: number the levels of categories that have many, for a model that learns an effect of
    each; other models would read a code as a number.
    """
    kept = np.ones(table.rows, dtype=bool) if given is None else given
    features: list[Feature] = []
    columns: list[Column] = []
    left_out: dict[str, str] = {}
    for name in table.names:
        if name in without:
            continue
        column = table.column(name, mixed=True)
        column = replace(column, values=column.values[kept])
        feature = _feature_of(column, table, constants, codes)
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
    return Plan(tuple(features), left_out, _representative_rows(features, columns))


def _feature_of(column: Column, table: Table, constants: bool, codes: bool) -> Feature | str:
    """How a column becomes numbers, or why it is left out."""
    if bool(column.missing.all()):
        return "empty in every row"
    if column.kind == TEXT:
        return _categories(column, codes)
    plain = column.style == Style()
    format_used = "" if plain else column.style.words(table.cells_of(column.name))
    return _numeric(column, format_used, constants)


def _numeric(column: Column, interpretation: str, constants: bool) -> Feature | str:
    """The feature of numbers, booleans or dates, or why it is left out."""
    gaps = int(column.missing.sum())
    values = column.values[~column.missing]
    if bool((values == values[0]).all()) and not gaps and not constants:
        return "constant"
    start = 0.0
    periods: tuple[float, ...] = ()
    if column.kind == DATE:
        start = float(values.min())
        span = float(np.ptp(values))
        periods = (YEAR,) * (span > YEAR) + (DAY,) * (span > DAY and bool((values % 1 != 0).any()))
        first = (EPOCH + timedelta(days=start)).date()
        cycles = "".join(
            f", with the time of the {name}"
            for name, period in (("year", YEAR), ("day", DAY))
            if period in periods
        )
        interpretation = f"dates, as days since {first}{cycles}"
    return Feature(
        column.name,
        column.kind,
        float(values.mean()) - start,
        gaps > 0,
        style=column.style,
        start=start,
        periods=periods,
        gaps=gaps,
        interpretation=interpretation,
        **_draws(values),
    )


def _categories(column: Column, codes: bool) -> Feature | str:
    """The feature of texts, or why it is left out."""
    gaps = int(column.missing.sum())
    values = column.values[~column.missing]
    levels, counts = _frequencies(values)
    if len(levels) == 1 and not gaps:
        return "constant"
    order = np.argsort(-counts, kind="stable")
    free_text = len(levels) > FEW_LEVELS and len(levels) > FREE_TEXT * len(column.values)
    if codes and (free_text or len(levels) > MOST_LEVELS):
        order = order[:MOST_CODES][counts[order[:MOST_CODES]] >= FEWEST_ROWS]
        coded = int(counts[order].sum())
        if coded >= CODED * len(values):
            return _coded(column, levels, order, len(values) - coded)
        order = np.argsort(-counts, kind="stable")
    if free_text:
        return f"{len(levels)} different texts in {len(column.values)} rows"
    kept, rare = (
        sorted(levels[part].tolist()) for part in (order[:MOST_LEVELS], order[MOST_LEVELS:])
    )
    rare_rows = int(counts[order[MOST_LEVELS:]].sum())
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
        gaps=gaps,
        interpretation=interpretation,
        **_draws(values),
    )


def _coded(column: Column, levels: np.ndarray, order: np.ndarray, rare_rows: int) -> Feature:
    """The category with codes for levels[order]; the others are rare."""
    rare = np.delete(levels, order).tolist()
    interpretation = (
        f"{len(order)} of {len(levels)} categories have an effect of their own, which is learned"
    )
    interpretation += f"; the others ({rare_rows} rows) share one" if rare else ""
    values = column.values[~column.missing]
    return Feature(
        column.name,
        TEXT,
        rare=tuple(rare),
        rare_rows=rare_rows,
        gaps=int(column.missing.sum()),
        interpretation=interpretation,
        codes=tuple(levels[order].tolist()),
        **_draws(values),
    )


def _draws(values: np.ndarray) -> dict[str, Any]:
    """All values with their frequencies if they are few; else the quantiles at (k + ½)/DRAWS
    (texts: in alphabetical order).
    """
    draws, counts = _frequencies(values)
    shares = counts / counts.sum()
    if len(draws) > DRAWS:
        draws = draws[np.searchsorted(np.cumsum(shares), (np.arange(DRAWS) + 0.5) / DRAWS)]
        shares = np.full(DRAWS, 1 / DRAWS)
    return {"draws": tuple(draws.tolist()), "shares": tuple(shares.tolist())}


def _frequencies(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Different values in their order, and how often each occurs."""
    if values.dtype != object:
        return np.unique(values, return_counts=True)
    rows = Counter(values.tolist())
    distinct = sorted(rows)
    return np.array(distinct, dtype=object), np.array([rows[value] for value in distinct])


def _representative_rows(
    features: list[Feature], columns: list[Column]
) -> tuple[tuple[float | str, ...], ...]:
    """DRAWS rows: of SETS random sets of complete rows, the one whose means and spreads are closest
    to those of all rows.

    If no row is complete, gaps are filled with draws of their columns.
    """
    numbers = np.concatenate([f.encode(c)[0] for f, c in zip(features, columns, strict=True)], 1)
    gaps = np.stack([column.missing for column in columns], 1)
    complete = np.flatnonzero(~gaps.any(axis=1))
    pool = complete if len(complete) else np.arange(len(numbers))
    # Codes are not numbers: their means and spreads say nothing.
    z = numbers[:, [not count for feature in features for count in feature.coded]]
    scale = z.std(0)
    z -= z.mean(0)
    z /= np.where(scale > 0, scale, 1.0)
    sets = np.random.default_rng(0).choice(pool, (SETS, DRAWS))
    spread = z.std(0)
    distance = [(z[rows].mean(0) ** 2 + (z[rows].std(0) - spread) ** 2).sum() for rows in sets]
    best = sets[int(np.argmin(distance))]
    values = [column.values[best].tolist() for column in columns]
    return tuple(
        tuple(
            feature.draws[k % len(feature.draws)] if gaps[row, j] else values[j][k]
            for j, feature in enumerate(features)
        )
        for k, row in enumerate(best)
    )
