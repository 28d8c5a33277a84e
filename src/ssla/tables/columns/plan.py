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

MOST_LEVELS = 50
# of the rows: a text column with more different values, and more than twenty, is not a category
FREE_TEXT = 0.1
FEW_LEVELS = 20
LARGEST_FILL = 1e300
FEWEST_ROWS = 2  # of a level that has a code
MOST_CODES = 10_000
# of the rows: a text column with many values is a category if levels with a code have at least that
# many
CODED = 0.5
ENOUGH = (
    20  # training rows with a gap, or a rare category, that the network needs to learn its effect
)
DRAWS = 16  # values of a column, and complete rows, that represent the training table
SETS = 200  # of rows, of which the one closest in means and spreads is kept
YEAR, DAY = 365.2425, 1.0


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
    draws: tuple[
        float | str, ...
    ] = ()  # values that represent the training column, with their shares
    shares: tuple[float, ...] = ()
    said: str = ""  # how the column was interpreted, if that is not obvious
    codes: tuple[
        str, ...
        # levels 1, 2, …, the most frequent first; then gaps, if training had any; 0: every other
        # level
    ] = ()

    @property
    def width(self) -> int:
        if self.codes:
            return 1
        return (
            len(self.levels) + bool(self.rare)
            if self.kind == TEXT
            else 1 + self.flag + 2 * len(self.periods)
        )

    @property
    def coded(self) -> list[int]:
        """The largest code of each column of numbers (width); 0 for a column that is no code."""
        return [len(self.codes) + (self.gaps > 0)] if self.codes else [0] * self.width

    @property
    def names(self) -> list[str]:
        """Of the columns of numbers (width)."""
        if self.codes:
            return [f"{self.name}: code"]
        if self.kind == TEXT:
            return [f"{self.name}={level}" for level in self.levels] + [
                f"{self.name}: rare"
            ] * bool(self.rare)
        cycles = [
            f"{self.name}: {wave} of the {'year' if p == YEAR else 'day'}"
            for p in self.periods
            for wave in ("sine", "cosine")
        ]
        return [self.name] + [f"{self.name}: missing"] * self.flag + cycles

    def encode(self, column: Column) -> tuple[np.ndarray, np.ndarray]:
        """(n, width), and which categories were unknown (n,)."""
        gaps = column.missing
        if self.codes:
            return self._codes(column)
        if self.kind == TEXT:
            return self._levels(column)
        values = np.where(gaps, self.fill, column.values.astype(float) - self.start)
        parts = [values] + [gaps.astype(float)] * self.flag
        for period in self.periods:
            angle = 2 * np.pi * (values + self.start) / period
            parts += [np.where(gaps, 0.0, np.sin(angle)), np.where(gaps, 0.0, np.cos(angle))]
        return np.stack(parts, 1), np.zeros(len(gaps), dtype=bool)

    def _levels(self, column: Column) -> tuple[np.ndarray, np.ndarray]:
        other = len(self.levels)
        places = {level: i for i, level in enumerate(self.levels)} | dict.fromkeys(self.rare, other)
        codes = {value: i for i, value in enumerate(dict.fromkeys(column.values.tolist()))}
        new = np.array([value is not None and value not in places for value in codes], dtype=bool)
        at = np.array(
            [
                places.get(v, other if strange and self.rare_learned else -1)
                for v, strange in zip(codes, new, strict=True)
            ],
            dtype=np.intp,
        )
        index = np.fromiter(
            map(codes.__getitem__, column.values.tolist()), dtype=np.intp, count=len(column.values)
        )
        block, unknown = np.zeros((len(column.values), self.width)), new[index]
        rows = np.flatnonzero(at[index] >= 0)
        block[rows, at[index[rows]]] = 1.0
        return block, unknown

    def _codes(self, column: Column) -> tuple[np.ndarray, np.ndarray]:
        codes: dict[str | None, int] = {level: i for i, level in enumerate(self.codes, 1)}
        known = codes | dict.fromkeys(self.rare, 0) | {None: self.coded[0] * (self.gaps > 0)}
        found = [known.get(value, -1) for value in column.values.tolist()]
        block = np.fromiter(found, dtype=float, count=len(found))
        return np.maximum(block, 0.0)[:, None], block < 0

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
        """(k, width)."""
        return self.encode(
            Column(
                self.name, self.kind, np.array(values, dtype=object if self.kind == TEXT else float)
            )
        )[0]


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
        values, gaps = self.values[self.mixed], self.unlearned[self.mixed]
        several = gaps.sum(1) > 1
        for k in range(DRAWS):
            filled = values.copy()
            for f, place in enumerate(self.plan.places):
                own, whole = self.plan.blocks[f]
                filled[gaps[:, f] & ~several, place] = own[min(k, len(own) - 1)]
                filled[gaps[:, f] & several, place] = whole[k]
            yield filled

    @property
    def shares(self) -> np.ndarray:
        """Weights (DRAWS, A) of the versions."""
        gaps = self.unlearned[self.mixed]
        shares = np.full((DRAWS, len(gaps)), 1 / DRAWS)
        for f, feature in enumerate(self.plan.features):
            own = np.zeros(DRAWS)
            own[: len(feature.shares)] = feature.shares
            shares[:, gaps[:, f] & (gaps.sum(1) == 1)] = own[:, None]
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
    def said(self) -> dict[str, str]:
        """How columns were interpreted, if that is not obvious."""
        return {feature.name: feature.said for feature in self.features if feature.said}

    @property
    def levels(self) -> tuple[int, ...]:
        """The number of codes of each column of numbers (width), 0 for a column that is no
        code; () if no column is one.
        """
        found = tuple(count for feature in self.features for count in feature.coded)
        return found if any(found) else ()

    @cached_property
    def places(self) -> list[slice]:
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
        blocks, missing, unknown, unlearned = [], {}, {}, []
        notes = np.full(table.rows, "", dtype=object)
        for feature in self.features:
            column = table.column_as(feature.name, feature.kind, feature.style)
            block, new = feature.encode(column)
            scarce = feature.scarce(block, column, new)
            blocks.append(block)
            unlearned.append(feature.unlearned(column, new, scarce))
            if gaps := int(column.missing.sum()):
                missing[feature.name] = gaps
                notes[column.missing] += f"; {feature.name}: missing"
            if new.any():
                unknown[feature.name] = int(new.sum())
                rare = ", treated as a rare one" if feature.rare_learned else ""
                found = [
                    f"; {feature.name}: unknown category {text[:40]!r}{rare}"
                    for text in column.values[new].tolist()
                ]
                notes[new] += np.array(found, dtype=object)
            if scarce.any():
                found = [
                    f"; {feature.name}: category {text[:40]!r} of too few training rows"
                    for text in column.values[scarce].tolist()
                ]
                notes[scarce] += np.array(found, dtype=object)
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


def _feature(f: dict[str, Any]) -> Feature:
    """The feature of a file; ValueError for an impossible one."""
    name, kind = f["name"], f["kind"]
    lists = {
        part: tuple(_list(f[part]))
        for part in ("levels", "rare", "periods", "draws", "shares", "codes")
    }
    texts = (
        name,
        kind,
        f["said"],
        *lists["levels"],
        *lists["rare"],
        *lists["codes"],
        *(lists["draws"] if kind == TEXT else ()),
    )
    if not all(isinstance(text, str) for text in texts) or kind not in (
        NUMBER,
        BOOLEAN,
        TEXT,
        DATE,
    ):
        raise ValueError(f"the column {name!r} is of the unknown kind {kind!r}")
    known = (*lists["levels"], *lists["rare"], *lists["codes"])
    one_kind = bool(lists["levels"]) + bool(lists["codes"]) == (kind == TEXT)
    if not one_kind or len(set(known)) < len(known):
        raise ValueError(
            f"the categories of the column {name!r} do not fit its kind, or one occurs twice"
        )
    numbers = (
        f["fill"],
        f["start"],
        *lists["periods"],
        *lists["shares"],
        *(lists["draws"] if kind != TEXT else ()),
    )
    if type(f["flag"]) is not bool or any(
        type(n) not in (int, float) or not abs(n) <= LARGEST_FILL for n in numbers
    ):
        raise ValueError(f"the column {name!r} has no usable value for gaps")
    counts = (f["rare_rows"], f["gaps"])
    if (
        any(type(count) is not int or count < 0 for count in counts)
        or min((*lists["periods"], *lists["shares"]), default=1) <= 0
    ):
        raise ValueError(f"the column {name!r} has counts, periods or shares that are not positive")
    return Feature(
        name,
        kind,
        float(f["fill"]),
        f["flag"],
        lists["levels"],
        lists["rare"],
        counts[0],
        Style(**{str(k): str(v) for k, v in f["style"].items()}),
        float(f["start"]),
        lists["periods"],
        counts[1],
        lists["draws"],
        lists["shares"],
        f["said"],
        lists["codes"],
    )


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
    features, columns, left_out = [], [], {}
    for name in table.names:
        if name in without:
            continue
        whole = table.column(name, mixed=True)
        column = replace(whole, values=whole.values[kept])
        feature: Feature | str
        if bool(column.missing.all()):
            feature = "empty in every row"
        elif column.kind == TEXT:
            feature = _categories(column, codes)
        else:
            feature = _numeric(
                column,
                "" if column.style == Style() else column.style.words(table.cells_of(name)),
                constants,
            )
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
    return Plan(tuple(features), left_out, _rows(features, columns))


def _numeric(column: Column, said: str, constants: bool) -> Feature | str:
    gaps = int(column.missing.sum())
    values = column.values[~column.missing]
    if bool((values == values[0]).all()) and not gaps and not constants:
        return "constant"
    start = 0.0
    periods: tuple[float, ...] = ()
    if column.kind == DATE:
        start, span = float(values.min()), float(np.ptp(values))
        periods = (YEAR,) * (span > YEAR) + (DAY,) * (span > DAY and bool((values % 1 != 0).any()))
        first = (EPOCH + timedelta(days=start)).date()
        cycles = "".join(
            f", with the time of the {name}"
            for name, period in (("year", YEAR), ("day", DAY))
            if period in periods
        )
        said = f"dates, as days since {first}{cycles}"
    return Feature(
        column.name,
        column.kind,
        float(values.mean()) - start,
        gaps > 0,
        style=column.style,
        start=start,
        periods=periods,
        gaps=gaps,
        said=said,
        **_draws(values),
    )


def _categories(column: Column, codes: bool) -> Feature | str:
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
    said = (
        f"the {len(kept)} most frequent of {len(levels)} categories; the others ({rare_rows} rows) "
        "share one column"
        if rare
        else column.said
    )
    return Feature(
        column.name,
        TEXT,
        levels=tuple(kept),
        rare=tuple(rare),
        rare_rows=rare_rows,
        gaps=gaps,
        said=said,
        **_draws(values),
    )


def _coded(column: Column, levels: np.ndarray, order: np.ndarray, rare_rows: int) -> Feature:
    """The category with codes for levels[order]; the others are rare."""
    rare = np.delete(levels, order).tolist()
    said = f"{len(order)} of {len(levels)} categories have an effect of their own, which is learned"
    said += f"; the others ({rare_rows} rows) share one" if rare else ""
    gaps, values = int(column.missing.sum()), column.values[~column.missing]
    return Feature(
        column.name,
        TEXT,
        rare=tuple(rare),
        rare_rows=rare_rows,
        gaps=gaps,
        said=said,
        codes=tuple(levels[order].tolist()),
        **_draws(values),
    )


def _draws(values: np.ndarray) -> dict[str, Any]:
    """All values with their frequencies if they are few; else the quantiles at (k + ½)/DRAWS
    (texts: in alphabetical order).
    """
    found, counts = _frequencies(values)
    shares = counts / counts.sum()
    if len(found) > DRAWS:
        at = np.searchsorted(np.cumsum(shares), (np.arange(DRAWS) + 0.5) / DRAWS)
        found, shares = found[at], np.full(DRAWS, 1 / DRAWS)
    return {"draws": tuple(found.tolist()), "shares": tuple(shares.tolist())}


def _frequencies(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Different values in their order, and how often each occurs."""
    if values.dtype != object:
        return np.unique(values, return_counts=True)
    rows = Counter(values.tolist())
    found = sorted(rows)
    return np.array(found, dtype=object), np.array([rows[value] for value in found])


def _rows(features: list[Feature], columns: list[Column]) -> tuple[tuple[float | str, ...], ...]:
    """DRAWS rows: of SETS random sets of complete rows, the one whose means and spreads are closest
    to those of all rows.

    If no row is complete, gaps are filled with draws of their columns.
    """
    numbers = np.concatenate([f.encode(c)[0] for f, c in zip(features, columns, strict=True)], 1)
    gaps = np.stack([column.missing for column in columns], 1)
    pool = np.flatnonzero(~gaps.any(axis=1))
    pool = pool if len(pool) else np.arange(len(numbers))
    numbers = numbers[
        :, [not count for feature in features for count in feature.coded]
    ]  # codes are not numbers
    scale = numbers.std(0)
    numbers -= numbers.mean(0)
    numbers /= np.where(scale > 0, scale, 1.0)
    z = numbers
    sets = np.random.default_rng(0).choice(pool, (SETS, DRAWS))
    spread = z.std(0)
    distance = [(z[s].mean(0) ** 2 + (z[s].std(0) - spread) ** 2).sum() for s in sets]
    best = sets[int(np.argmin(distance))]
    values = [column.values[best].tolist() for column in columns]
    return tuple(
        tuple(
            f.draws[k % len(f.draws)] if gaps[i, j] else values[j][k]
            for j, f in enumerate(features)
        )
        for k, i in enumerate(best)
    )
