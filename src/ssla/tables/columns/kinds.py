"""The kind of a column: numbers and their format, booleans, dates, or texts.

At training a column is interpreted as a whole. In later tables it must be of the same kind.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from datetime import date, datetime, timedelta, timezone
from decimal import Decimal
from functools import cached_property, lru_cache
from itertools import product
from typing import Any

import numpy as np

from ssla.tables.columns.texts import Texts

MISSING = {"", "na", "n/a", "nan", "null", "none", "?", "-"}
MARKS = {
    "".join(letters)
    for mark in MISSING
    for letters in product(*zip(mark, mark.upper(), strict=True))
}  # in any case
TRUE, FALSE = {"true", "yes"}, {"false", "no"}
NUMBER, BOOLEAN, TEXT, DATE = "number", "boolean", "text", "date"
SPACES = " \u00a0\u2009\u202f"
WAYS = (
    (".", ","),
    (",", ""),
    (",", "."),
    *((d, t) for t in (*SPACES, "'", "’") for d in ".,"),
)  # (decimal, thousands)
CODES = (
    "EUR|USD|GBP|JPY|CHF|CNY|INR|AUD|CAD|NZD|SEK|NOK|DKK|"
    "PLN|CZK|HUF|RON|TRY|ILS|BRL|MXN|ZAR|KRW|SGD|HKD|THB"
)
UNIT = re.compile(
    rf"([+-]?)(?:([€$£¥]|{CODES})\s*)?([+-]?[\d.,].*?)(\s*(?:[%‰€$£¥]|{CODES}))?", re.DOTALL
)
ISO = re.compile(
    r"(\d{4}-\d\d-\d\d)(?:[T ](\d\d:\d\d)(?:(:\d\d)(?:\.(\d{1,9}))?)?(Z|[+-]\d\d:?\d\d)?)?"
)
EPOCH = datetime(1970, 1, 1, tzinfo=timezone.utc)
SECONDS = 86400
TRIED = 100  # cells that are examined for a unit
MOST_MIXED = 20  # different values of a column of numbers and texts that are categories
ROWS_OF_A_TEXT, SHARE_OF_A_TEXT = (
    5,
    0.01,
)  # rows that each of its texts needs, so that it is not a typing error


class TableError(ValueError):
    """A table that cannot be used."""


@dataclass(frozen=True)
class Style:
    """The format of numbers: decimal mark, thousands mark, and a unit before or after."""

    decimal: str = "."
    thousands: str = ""
    before: str = ""
    after: str = ""

    def number(self, cell: Any) -> float | None:
        """The value of a cell, or None.

        A number that is not a text has no unit; a boolean is not a number.
        """
        if isinstance(cell, int | float | Decimal):
            return None if isinstance(cell, bool) or self.before or self.after else float(cell)
        if not isinstance(cell, str) or "_" in cell:
            return None
        if self.thousands == " ":
            cell = re.sub(f"[{SPACES}]", " ", cell)
        if (self.decimal, self.thousands, self.before, self.after) != (".", "", "", ""):
            parts = UNIT.fullmatch(cell)
            if parts is None or (parts[2] or "", (parts[4] or "").strip()) != (
                self.before,
                self.after,
            ):
                return None
            cell = parts[1] + parts[3]
            if (self.decimal, self.thousands) != (".", ""):
                if not _form(self.decimal, self.thousands).fullmatch(cell):
                    return None
                cell = cell.replace(self.thousands, "").replace(self.decimal, ".")
        try:
            return float(cell)
        except ValueError:
            return None

    def words(self, cells: Iterable[Any]) -> str:
        """The format, with a cell as an example; empty for plain numbers."""
        if self == Style():
            return ""
        shown = next(
            (
                c
                for c in cells
                if isinstance(c, str) and self.number(c) is not None and Style().number(c) is None
            ),
            None,
        )
        return "numbers" + (
            f" ({shown!r} is {self.number(shown):.10g})" if shown is not None else ""
        )


@lru_cache
def _form(decimal: str, thousands: str) -> re.Pattern[str]:
    """Numbers with these marks, without a unit."""
    point, group = re.escape(decimal), re.escape(thousands)
    grouped = rf"[1-9]\d{{0,2}}(?:{group}\d{{3}})+|" if group else ""
    return re.compile(rf"[+-]?(?:(?:{grouped}\d+)(?:{point}\d*)?|{point}\d+)(?:[eE][+-]?\d+)?")


@dataclass(frozen=True, eq=False)
class Column:
    """kind "number", "boolean" or "date": values are floats (dates: days since 1970, UTC), NaN
    where missing; "text": strings, None where missing.
    """

    name: str
    kind: str
    values: np.ndarray
    style: Style = field(default_factory=Style)
    interpretation: str = ""  # why these are texts, if that is not obvious

    @cached_property
    def missing(self) -> np.ndarray:
        """bool (n,)."""
        gaps: np.ndarray = (
            self.values == np.array(None) if self.kind == TEXT else np.isnan(self.values)
        )
        return gaps

    @property
    def cells(self) -> list[Any]:
        """The values as cells of a table: whole numbers as int, None where missing."""
        if self.kind == TEXT:
            return list(self.values)
        make: Callable[[float], Any] = (
            _shortest if self.kind == NUMBER else bool if self.kind == BOOLEAN else _moment
        )
        return [None if math.isnan(value) else make(value) for value in self.values.tolist()]

    def as_kind(self, kind: str, style: Style) -> Column | None:
        """The column, if its kind is that of the training column, or booleans for numbers
        without a unit; else None.
        """
        right = self.kind == kind or (self.kind, kind) == (BOOLEAN, NUMBER)
        return replace(self, kind=kind) if right and not (style.before or style.after) else None


def interpret(
    name: str, cells: Sequence[Any] | np.ndarray, style: Style | None = None, mixed: bool = False
) -> Column:
    """Booleans, dates or numbers if all cells are, else texts.

    Numbers or dates mixed with a few texts are refused.

    style: the format of the numbers, if given. Otherwise plain numbers are tried, then the other
    formats (WAYS): one that fits every cell is used, and two that fit with different values are
    refused. mixed: numbers and texts are categories if they have at most MOST_MIXED different
    values and no text is rare.
    """
    stated = style or Style()
    if (
        isinstance(cells, Texts | np.ndarray)
        and (plain := _plain_numbers(cells, stated)) is not None
    ):
        return Column(name, NUMBER, _finite(name, plain), stated)
    levels, codes = _distinct(cells)
    there = np.array([not is_missing(cell) for cell in levels], dtype=bool)
    given = [cell for cell, known in zip(levels, there, strict=True) if known]
    counts = np.bincount(codes, minlength=len(levels))[there]  # rows of each given value
    if given and all(truth(cell) is not None for cell in given):
        return Column(name, BOOLEAN, _floats(levels, truth)[codes])
    values = _floats(levels, day)
    days = ~np.isnan(values[there])
    if counts[days].sum() > counts.sum() / 2:
        if not days.all():
            raise _mixed(name, levels, codes, there & np.isnan(values), "dates")
        return Column(name, DATE, values[codes])
    chosen = _style(name, given, counts, style)
    values = _floats(levels, chosen.number)
    no_number = there & np.isnan(values)
    wrong = counts[no_number[there]].sum()
    if wrong > counts.sum() / 2:
        return read_as(name, cells, TEXT)
    if wrong:
        if mixed and (interpretation := _few_values(given, counts, no_number[there])):
            return replace(read_as(name, cells, TEXT), interpretation=interpretation)
        raise _mixed(name, levels, codes, no_number, "numbers")
    return Column(name, NUMBER, _finite(name, values[codes]), chosen)


def _few_values(given: list[Any], counts: np.ndarray, no_number: np.ndarray) -> str:
    """How numbers and texts are read as categories; empty if they are not.

    A text in few rows may be a typing error.
    """
    rows: Counter[str] = Counter()
    for cell, count in zip(given, counts.tolist(), strict=True):
        rows[text_of(cell)] += count
    texts = {text_of(given[i]) for i in np.flatnonzero(no_number).tolist()}
    fewest = max(ROWS_OF_A_TEXT, SHARE_OF_A_TEXT * counts.sum())
    if len(rows) > MOST_MIXED or min(rows[text] for text in texts) < fewest:
        return ""
    shown = ", ".join(repr(text[:30]) for text in sorted(texts)[:3]) + ", …" * (len(texts) > 3)
    return f"{len(rows)} categories, because some values are texts ({shown})"


def read_as(
    name: str,
    cells: Sequence[Any] | np.ndarray,
    kind: str,
    style: Style = Style(),  # noqa: B008
    source: Any = "the table",
    first: int = 0,
    part: bool = False,
) -> Column:
    """The cells, in the kind of the training column; TableError with the first cell of another
    kind.

    first: the number of rows of the source before these cells.  part: whether there may be more
    after them.
    """
    if kind == NUMBER and (plain := _plain_numbers(cells, style)) is not None:
        return Column(name, kind, _finite(name, plain, first, part), style)
    levels, codes = _distinct(cells)
    if kind == TEXT:
        return Column(
            name,
            TEXT,
            np.array([None if is_missing(c) else text_of(c) for c in levels], dtype=object)[codes],
        )
    read: Callable[[Any], float | None] = {NUMBER: style.number, BOOLEAN: _boolean, DATE: day}[kind]
    found = [math.nan if is_missing(cell) else read(cell) for cell in levels]
    wrong = np.flatnonzero(np.array([value is None for value in found], dtype=bool)[codes])
    if len(wrong):
        what = {NUMBER: "numbers", BOOLEAN: "true or false", DATE: "dates such as 2024-01-31"}[kind]
        if kind == NUMBER and style != Style():
            written = f"{style.before}1{style.thousands}234{style.decimal}5{style.after}"
            what += f" written like {written}"
        raise TableError(
            f"Column {name!r} held {what} at training, but row {first + wrong[0] + 1} of {source} "
            f"is {str(levels[codes[wrong[0]]])[:30]!r} ({len(wrong)} such cells "
            f"{_counted(first + len(cells), part)}). Correct or empty them."
        )
    return Column(
        name, kind, _finite(name, np.array(found, dtype=float)[codes], first, part), style
    )


def _distinct(cells: Sequence[Any] | np.ndarray) -> tuple[Sequence[Any], np.ndarray]:
    """Different cells in the order of their first rows, and which of them each row has (n,).

    Only texts are compared: equal numbers can be of different types, as 1, 1.0 and True.
    """
    if isinstance(cells, Texts):
        return cells.distinct()
    cells = cells.tolist() if isinstance(cells, np.ndarray) else cells
    if not set(map(type, cells)) <= {str, type(None)}:
        return cells, np.arange(len(cells))
    places = {cell: i for i, cell in enumerate(dict.fromkeys(cells))}
    return list(places), np.fromiter(
        map(places.__getitem__, cells), dtype=np.intp, count=len(cells)
    )


def _plain_numbers(cells: Sequence[Any] | np.ndarray, style: Style) -> np.ndarray | None:
    """What `Style.number` gives, but faster, if all cells are numbers or texts of plain
    numbers; else None.
    """
    if isinstance(cells, np.ndarray):
        return (
            cells.astype(float)
            if cells.dtype.kind in "iuf" and not (style.before or style.after)
            else None
        )
    if isinstance(cells, Texts):
        return None if style.before or style.after else cells.numbers(style.decimal, MARKS)
    if style != Style():
        return None
    try:
        return np.array(list(map(float, cells)), dtype=float) if "_" not in "".join(cells) else None
    except (TypeError, ValueError):
        return None


def _counted(rows: int, part: bool) -> str:
    """Of which rows a count is: later parts of a file have not been read."""
    return f"up to row {rows}" if part else "in total"


def text_of(cell: Any) -> str:
    """A cell as text: a string itself, a number in its shortest exact form, a boolean as true
    or false.
    """
    return str(cell).lower() if isinstance(cell, bool) else str(cell)


def is_missing(cell: Any) -> bool:
    return (
        cell is None
        or (isinstance(cell, str) and cell.lower() in MISSING)
        or (isinstance(cell, float) and math.isnan(cell))
    )


def truth(cell: Any) -> float | None:
    text = str(cell).lower()
    return 1.0 if text in TRUE else 0.0 if text in FALSE else None


def day(cell: Any) -> float | None:
    """Days since 1970-01-01 of an ISO date or date-time; UTC if it has no offset."""
    if isinstance(cell, str):
        parts = ISO.fullmatch(cell) if cell[4:5] == "-" else None
        if parts is None:
            return None
        clock, seconds, fraction, offset = (part or "" for part in parts.groups()[1:])
        offset = "+00:00" if offset in ("", "Z") else f"{offset[:3]}:{offset[-2:]}"
        try:
            cell = datetime.fromisoformat(
                f"{parts[1]}T{clock or '00:00'}{seconds or ':00'}.{fraction[:6]:0<6}{offset}"
            )
        except ValueError:
            return None
    elif not isinstance(cell, date):
        return None
    moment = cell if isinstance(cell, datetime) else datetime(cell.year, cell.month, cell.day)
    return (
        (moment.replace(tzinfo=timezone.utc) if moment.tzinfo is None else moment) - EPOCH
    ).total_seconds() / SECONDS


def _boolean(cell: Any) -> float | None:
    """true, false, yes, no; also 0 and 1."""
    number = Style().number(cell)
    return truth(cell) if number is None else number if number in (0, 1) else None


def _floats(cells: Sequence[Any], read: Callable[[Any], float | None]) -> np.ndarray:
    """NaN for gaps, and for cells that are not numbers."""
    return np.array([math.nan if is_missing(cell) else read(cell) for cell in cells], dtype=float)


def checked(column: Column) -> Column:
    """The column; TableError if it has infinite values."""
    return (
        column
        if column.kind == TEXT
        else replace(column, values=_finite(column.name, column.values))
    )


def _shortest(value: float) -> int | float:
    return int(value) if value.is_integer() else value


def _moment(days: float) -> datetime:
    return EPOCH + timedelta(days=days)


def _finite(name: str, values: np.ndarray, first: int = 0, part: bool = False) -> np.ndarray:
    endless = np.isinf(values).nonzero()[0]
    if len(endless):
        raise TableError(
            f"Column {name!r} has an infinite value in row {first + endless[0] + 1} "
            f"({len(endless)} {_counted(first + len(values), part)}). Correct or empty them."
        )
    return values


def _mixed(
    name: str, levels: Sequence[Any], codes: np.ndarray, wrong: np.ndarray, what: str
) -> TableError:
    """wrong: which of the levels are of another kind."""
    rows = np.flatnonzero(wrong[codes])
    return TableError(
        f"Column {name!r} mixes {what} and texts: row {rows[0] + 1} is "
        f"{str(levels[codes[rows[0]]])[:30]!r}, {len(rows)} such cells in total. Correct them, or "
        f"leave the column out with --drop {name!r}."
    )


def _style(name: str, given: list[Any], counts: np.ndarray, asked: Style | None) -> Style:
    """The format that fits most cells, or all of them if possible.

    counts: how often each of the given cells occurs.
    """
    open_to, stated = asked is None, asked or Style()
    if _all_numbers(stated, given) is not None:
        return stated
    texts = list(dict.fromkeys(cell for cell in given if isinstance(cell, str)))
    unit = next((m for m in map(UNIT.fullmatch, texts[:TRIED]) if m), None)
    if unit is None:
        return stated
    units = (unit[2] or "", (unit[4] or "").strip())
    possible = [Style(d, t, *units) for d, t in ((".", ""), *_ways(texts))]
    styles = possible if open_to else [Style(stated.decimal, stated.thousands, *units)]
    whole = [
        (style, values) for style in styles if (values := _all_numbers(style, given)) is not None
    ]
    for style, values in (
        whole[1:] if whole and whole[0][0] is not styles[0] else ()
    ):  # plain numbers need no other format
        if values != whole[0][1]:
            i = next(i for i, (a, b) in enumerate(zip(whole[0][1], values, strict=True)) if a != b)
            raise TableError(
                f"Column {name!r} is ambiguous: {given[i]!r} is {whole[0][1][i]:.10g} with "
                f"{_options(whole[0][0])}, but {values[i]:.10g} with {_options(style)}. Give one "
                f"of these options. An input can be left out with --drop {name!r}."
            )
    if (
        not open_to
        and not whole
        and any(_all_numbers(other, given) is not None for other in possible)
    ):
        raise TableError(
            f"Column {name!r} is not in the format {_options(stated)}: its first value is "
            f"{given[0]!r}. Write all columns in one format, or leave it out with --drop {name!r}."
        )
    if whole:
        return whole[0][0]
    return max(
        styles, key=lambda style: counts[[style.number(cell) is not None for cell in given]].sum()
    )


def _all_numbers(style: Style, cells: list[Any]) -> list[float] | None:
    """The values of all cells, or None at the first that has none."""
    values = []
    for cell in cells:
        value = style.number(cell)
        if value is None:
            return None
        values.append(value)
    return values


def _ways(texts: list[str]) -> list[tuple[str, str]]:
    """The WAYS whose marks occur.

    Another gives the same values as the way without its thousands mark, or as plain numbers.
    """
    found = set("".join(texts))
    spaces = {" "} if found & set(SPACES) else set()
    return [(d, t) for d, t in WAYS if (t or d) in found | spaces]


def _options(style: Style) -> str:
    decimal = f"--decimal {style.decimal!r}" if style.decimal != "." or not style.thousands else ""
    return f"{decimal} --thousands {style.thousands!r}".strip() if style.thousands else decimal
