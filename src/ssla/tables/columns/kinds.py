"""The kind of a column: numbers and their format, booleans, dates, or texts.

At training a column is interpreted as a whole. In later tables it must be of the same kind.

The module has, in this order, `Style` (the format of numbers), `Column`, `interpret_cells` (at
training), `read_as_kind` (later), parsers of one cell, and the detection of a format.
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

MISSING = {"", "na", "n/a", "nan", "null", "none", "?", "-"}  # texts of gaps, in lower case
# The same with each letter in lower or upper case, as a set of texts to compare with.
MARKS = {
    "".join(letters)
    for mark in MISSING
    for letters in product(*zip(mark, mark.upper(), strict=True))
}
TRUE, FALSE = {"true", "yes"}, {"false", "no"}
NUMBER, BOOLEAN, TEXT, DATE = "number", "boolean", "text", "date"
SPACES = " \u00a0\u2009\u202f"
# Pairs of a decimal mark and a thousands mark, beside the plain (".", "").
WAYS = (
    (".", ","),
    (",", ""),
    (",", "."),
    *((d, t) for t in (*SPACES, "'", "’") for d in ".,"),
)
CODES = (
    "EUR|USD|GBP|JPY|CHF|CNY|INR|AUD|CAD|NZD|SEK|NOK|DKK|"
    "PLN|CZK|HUF|RON|TRY|ILS|BRL|MXN|ZAR|KRW|SGD|HKD|THB"
)
# Groups: sign, unit before, number, unit after.
UNIT = re.compile(
    rf"([+-]?)(?:([€$£¥]|{CODES})\s*)?([+-]?[\d.,].*?)(\s*(?:[%‰€$£¥]|{CODES}))?", re.DOTALL
)
# Groups: day, clock, seconds, fraction of a second, offset.
ISO = re.compile(
    r"(\d{4}-\d\d-\d\d)(?:[T ](\d\d:\d\d)(?:(:\d\d)(?:\.(\d{1,9}))?)?(Z|[+-]\d\d:?\d\d)?)?"
)
EPOCH = datetime(1970, 1, 1, tzinfo=timezone.utc)
SECONDS = 86400  # of a day

# These limits are guesses: no benchmark compares them with others.
TRIED = 100  # cells that are examined for a unit
SHOWN_LENGTH = 30  # characters of a cell in a message
MOST_MIXED = 20  # different values of a column of numbers and texts that are categories
# Rows that each of its texts needs, so that it is not a typing error: a count, and a share.
ROWS_OF_A_TEXT = 5
SHARE_OF_A_TEXT = 0.01


class TableError(ValueError):
    """A table that cannot be used."""


@dataclass(frozen=True)
class Style:
    """The format of numbers: decimal mark, thousands mark, and a unit before or after."""

    decimal: str = "."
    thousands: str = ""
    before: str = ""
    after: str = ""

    def parse(self, cell: Any) -> float | None:
        """Return the value of a cell; None if it is not a number in this format.

        A cell that is a Python number has no unit, so a format with a unit refuses it. A boolean is
        not a number.
        """
        if isinstance(cell, int | float | Decimal):
            return None if isinstance(cell, bool) or self.before or self.after else float(cell)

        # Python's `float` would read 1_000 as a thousand.
        if not isinstance(cell, str) or "_" in cell:
            return None

        # A thousands mark " " stands for all kinds of spaces.
        if self.thousands == " ":
            cell = re.sub(f"[{SPACES}]", " ", cell)
        if self != PLAIN:
            groups = UNIT.fullmatch(cell)
            units = (self.before, self.after)
            if groups is None or (groups[2] or "", (groups[4] or "").strip()) != units:
                return None
            cell = groups[1] + groups[3]  # sign and number, without the unit
            if (self.decimal, self.thousands) != (".", ""):
                if not _make_number_pattern(self.decimal, self.thousands).fullmatch(cell):
                    return None
                cell = cell.replace(self.thousands, "").replace(self.decimal, ".")

        try:
            return float(cell)
        except ValueError:
            return None

    def describe(self, cells: Iterable[Any]) -> str:
        """Return a text on the format for the report; empty for plain numbers.

        The text shows the first of the cells that needs the format, if there is one.
        """
        if self == PLAIN:
            return ""
        for cell in cells:
            value = self.parse(cell) if isinstance(cell, str) else None
            # A cell that is also a plain number does not show the format.
            if value is not None and PLAIN.parse(cell) is None:
                return f"numbers ({cell!r} is {value:.10g})"
        return "numbers"


PLAIN = Style()  # numbers such as -1234.5 and 1e5


@lru_cache
def _make_number_pattern(decimal: str, thousands: str) -> re.Pattern[str]:
    """Return the pattern of numbers with these marks, without a unit.

    A number has a sign or none, digits with or without decimals (or decimals alone), and an
    exponent or none.  decimal: the mark of decimals.  thousands: that of thousands; empty if there
    is none.
    """
    point = re.escape(decimal)
    group = re.escape(thousands)
    # With a thousands mark, digits are in groups of three, or not grouped at all.
    grouped = rf"[1-9]\d{{0,2}}(?:{group}\d{{3}})+|" if group else ""
    return re.compile(rf"[+-]?(?:(?:{grouped}\d+)(?:{point}\d*)?|{point}\d+)(?:[eE][+-]?\d+)?")


@dataclass(frozen=True, eq=False)
class Column:
    """A column of one kind, with the value of each row."""

    name: str
    kind: str  # NUMBER, BOOLEAN, DATE or TEXT
    # (n,): strings for TEXT, with None for gaps; otherwise floats, with NaN for gaps. A boolean is
    # 0 or 1, and a date is the number of days since 1970 in UTC.
    values: np.ndarray
    style: Style = field(default_factory=Style)  # that of its numbers
    interpretation: str = ""  # why these are texts, if that is not obvious

    @cached_property
    def missing(self) -> np.ndarray:
        """Which rows (n,) bool have no value."""
        gaps: np.ndarray = (
            self.values == np.array(None) if self.kind == TEXT else np.isnan(self.values)
        )
        return gaps

    @property
    def cells(self) -> list[Any]:
        """The values (n) as Python objects: whole numbers as int, None where missing."""
        if self.kind == TEXT:
            return list(self.values)
        converters: dict[str, Callable[[float], Any]] = {
            NUMBER: _shorten_number,
            BOOLEAN: bool,
            DATE: _convert_to_date,
        }
        convert = converters[self.kind]
        return [None if math.isnan(value) else convert(value) for value in self.values.tolist()]

    def convert_kind(self, column_kind: str, style: Style) -> Column | None:
        """Return the column in the kind of the training column; None if it does not fit.

        The column fits if it has this kind already, or if it has booleans where numbers are
        expected. It never fits a format with a unit, because its values have none.

        column_kind, style: the kind of the training column, and the format of its numbers.
        """
        has_unit = bool(style.before or style.after)
        fits = self.kind == column_kind or (self.kind == BOOLEAN and column_kind == NUMBER)
        return replace(self, kind=column_kind) if fits and not has_unit else None


def interpret_cells(
    name: str, cells: Sequence[Any] | np.ndarray, style: Style | None = None, mixed: bool = False
) -> Column:
    """Return a column of booleans, dates or numbers if all cells (n) are, otherwise of texts.

    Missing cells are ignored, and a column without any other cell has numbers.

    name: that of the column, for errors.  style: the format of the numbers. If it is None, plain
    numbers are tried first, then the other formats (WAYS). One that fits every cell is used, and
    two that fit with different values are refused.  mixed: whether numbers and texts may be
    categories. They are if they have at most MOST_MIXED different values and no text is rare.

    Raises TableError for dates mixed with fewer other cells, for numbers mixed with a few texts
    that are not categories, and for infinite numbers.
    """
    stated = style or PLAIN

    # Plain numbers in one array need no loop over cells.
    if isinstance(cells, Texts | np.ndarray):
        plain = _read_plain_numbers(cells, stated)
        if plain is not None:
            return Column(name, NUMBER, _check_finite(name, plain), stated)

    # Each different cell is parsed once. Booleans, dates and numbers are tried one after the other:
    # no cell is of two of these kinds.
    distinct = _DistinctCells(*find_distinct_cells(cells))
    column = _interpret_booleans(name, distinct)
    if column is None:
        column = _interpret_dates(name, distinct)
    if column is None:
        column = _interpret_numbers(name, cells, distinct, style, mixed)
    return column


@dataclass(frozen=True, eq=False)
class _DistinctCells:
    """The L different cells of a column, and which of them each of its n rows has."""

    levels: Sequence[Any]  # the different cells (L,)
    codes: np.ndarray  # the position in `levels` of each row's cell (n,)

    @cached_property
    def is_given(self) -> np.ndarray:
        """Which of the different cells (L,) bool are not missing."""
        return np.array([not is_missing(level) for level in self.levels], dtype=bool)

    @cached_property
    def given_cells(self) -> list[Any]:
        """The g different cells that are not missing."""
        return [level for level, keep in zip(self.levels, self.is_given, strict=True) if keep]

    @cached_property
    def counts(self) -> np.ndarray:
        """The number of rows of each of the g `given_cells` (g,)."""
        counts: np.ndarray = np.bincount(self.codes, minlength=len(self.levels))[self.is_given]
        return counts


def _interpret_booleans(name: str, distinct: _DistinctCells) -> Column | None:
    """Return the column of booleans if all given cells are words for them; otherwise None.

    The result is None also for a column without a given cell.
    """
    cells = distinct.given_cells
    if not cells or any(parse_boolean_word(cell) is None for cell in cells):
        return None
    values = _parse_cells(distinct.levels, parse_boolean_word)
    return Column(name, BOOLEAN, values[distinct.codes])


def _interpret_dates(name: str, distinct: _DistinctCells) -> Column | None:
    """Return the column of dates; None unless more than half of the rows with a cell have a date.

    Raises TableError for dates mixed with fewer other cells.
    """
    days = _parse_cells(distinct.levels, parse_date)
    no_date = distinct.is_given & np.isnan(days)
    counts = distinct.counts
    if counts[~no_date[distinct.is_given]].sum() <= counts.sum() / 2:
        return None
    if no_date.any():
        raise _make_mixed_kinds_error(name, distinct, no_date, "dates")
    return Column(name, DATE, days[distinct.codes])


def _interpret_numbers(
    name: str,
    cells: Sequence[Any] | np.ndarray,
    distinct: _DistinctCells,
    style: Style | None,
    mixed: bool,
) -> Column:
    """Return the column of numbers, or of texts if more than half of the rows have texts.

    The arguments are those of `interpret_cells`, with `distinct` for the cells. Raises TableError
    for numbers mixed with a few texts that are not categories, and for infinite numbers.
    """
    detected = _detect_style(name, distinct.given_cells, distinct.counts, style)
    numbers = _parse_cells(distinct.levels, detected.parse)
    no_number = distinct.is_given & np.isnan(numbers)
    is_text = no_number[distinct.is_given]  # of the given cells
    rows_of_texts = distinct.counts[is_text].sum()
    if not rows_of_texts:
        return Column(name, NUMBER, _check_finite(name, numbers[distinct.codes]), detected)
    if rows_of_texts > distinct.counts.sum() / 2:
        return read_as_kind(name, cells, TEXT)

    interpretation = ""
    if mixed:
        interpretation = _interpret_as_categories(distinct.given_cells, distinct.counts, is_text)
    if not interpretation:
        raise _make_mixed_kinds_error(name, distinct, no_number, "numbers")
    return replace(read_as_kind(name, cells, TEXT), interpretation=interpretation)


def _interpret_as_categories(
    given_cells: list[Any], counts: np.ndarray, no_number: np.ndarray
) -> str:
    """Return a text on how numbers and texts are read as categories; empty if they cannot be.

    The cells cannot be categories if there are too many different ones, or if a text is in few
    rows, because it may be a typing error.

    given_cells (L,): the different cells.  counts (L,): the rows of each. no_number (L,) bool:
    which of them are texts.
    """
    # Different cells can have the same text, as the number 1 and the text "1".
    rows: Counter[str] = Counter()
    for cell, count in zip(given_cells, counts.tolist(), strict=True):
        rows[convert_to_text(cell)] += count
    texts = {convert_to_text(given_cells[i]) for i in np.flatnonzero(no_number).tolist()}
    fewest = max(ROWS_OF_A_TEXT, SHARE_OF_A_TEXT * counts.sum())
    if len(rows) > MOST_MIXED or min(rows[text] for text in texts) < fewest:
        return ""
    shown = ", ".join(repr(text[:SHOWN_LENGTH]) for text in sorted(texts)[:3])
    if len(texts) > 3:
        shown += ", …"
    return f"{len(rows)} categories, because some values are texts ({shown})"


def read_as_kind(
    name: str,
    cells: Sequence[Any] | np.ndarray,
    column_kind: str,
    style: Style = PLAIN,
    source: Any = "the table",
    rows_before: int = 0,
    may_have_more: bool = False,
) -> Column:
    """Return the column of the cells (n), in the kind and the format of the training column.

    column_kind: NUMBER, BOOLEAN, DATE or TEXT.  style: the format of numbers; other kinds have
    none.  name, source: what errors call the column and the table.  rows_before: the number of rows
    of the source before these cells.  may_have_more: whether the source may have rows after them.

    Raises TableError with the first cell of another kind, or with the first infinite number.
    """
    # Most columns of numbers are plain, and need no loop over cells.
    if column_kind == NUMBER and (plain := _read_plain_numbers(cells, style)) is not None:
        return Column(
            name, column_kind, _check_finite(name, plain, rows_before, may_have_more), style
        )

    # Each different cell is parsed once: L levels, and the level of each of n rows.
    levels, codes = find_distinct_cells(cells)
    if column_kind == TEXT:
        texts = [None if is_missing(level) else convert_to_text(level) for level in levels]
        return Column(name, TEXT, np.array(texts, dtype=object)[codes])

    parsers: dict[str, Callable[[Any], float | None]] = {
        NUMBER: style.parse,
        BOOLEAN: _parse_boolean,
        DATE: parse_date,
    }
    parse = parsers[column_kind]
    values = [math.nan if is_missing(level) else parse(level) for level in levels]
    wrong = np.flatnonzero(np.array([value is None for value in values], dtype=bool)[codes])
    if len(wrong):
        expected = {NUMBER: "numbers", BOOLEAN: "true or false", DATE: "dates such as 2024-01-31"}
        row = int(rows_before + wrong[0] + 1)
        cell = str(levels[codes[wrong[0]]])[:SHOWN_LENGTH]
        extent = _describe_extent(rows_before + len(cells), may_have_more)
        example = _write_style_example(column_kind, style)
        raise TableError(
            f"Column {name!r} held {expected[column_kind]}{example} "
            f"at training, but row {row} of {source} is {cell!r} ({len(wrong)} such cells "
            f"{extent}). Correct or empty them."
        )

    numbers = np.array(values, dtype=float)[codes]
    return Column(
        name, column_kind, _check_finite(name, numbers, rows_before, may_have_more), style
    )


def _write_style_example(column_kind: str, style: Style) -> str:
    """Return the end of a phrase that shows a number in this format, for an error.

    The text is empty for plain numbers and for other kinds than numbers.
    """
    if column_kind != NUMBER or style == PLAIN:
        return ""
    return f" written like {style.before}1{style.thousands}234{style.decimal}5{style.after}"


def find_distinct_cells(cells: Sequence[Any] | np.ndarray) -> tuple[Sequence[Any], np.ndarray]:
    """Return the L different cells, and for each row (n,) the position of its cell among them.

    The different cells are in the order of their first rows. Only texts and None are compared. If
    there are cells of other types, all n cells are returned: equal cells can be of different
    types, as 1, 1.0 and True.
    """
    if isinstance(cells, Texts):
        return cells.find_distinct()
    cells = cells.tolist() if isinstance(cells, np.ndarray) else cells
    if not set(map(type, cells)) <= {str, type(None)}:
        return cells, np.arange(len(cells))
    positions = {cell: i for i, cell in enumerate(dict.fromkeys(cells))}
    return list(positions), np.fromiter(
        map(positions.__getitem__, cells), dtype=np.intp, count=len(cells)
    )


def _read_plain_numbers(cells: Sequence[Any] | np.ndarray, style: Style) -> np.ndarray | None:
    """Return the numbers (n,) if all cells can be read without a loop over them, otherwise None.

    Such cells are an array of numbers, or texts of numbers without unit and thousands mark. The
    values are those of `style.parse`. Of a list, only texts in the format PLAIN are read.
    """
    has_unit = bool(style.before or style.after)
    if isinstance(cells, np.ndarray):
        # NumPy's letters for integers and floats.
        is_numeric = cells.dtype.kind in "iuf"
        return cells.astype(float) if is_numeric and not has_unit else None
    if isinstance(cells, Texts):
        return None if has_unit else cells.parse_numbers(style.decimal, MARKS)
    if style != PLAIN:
        return None
    try:
        # `float` would read 1_000 as a thousand. Joining raises TypeError for cells that are not
        # texts.
        if "_" in "".join(cells):
            return None
        return np.array(list(map(float, cells)), dtype=float)
    except (TypeError, ValueError):
        return None


def _describe_extent(rows: int, may_have_more: bool) -> str:
    """Return the words for the rows that a count is about.

    rows: how many have been read.  may_have_more: whether the file may have rows after them.
    """
    return f"up to row {rows}" if may_have_more else "in total"


def convert_to_text(cell: Any) -> str:
    """Return a cell as text.

    A string is unchanged, a number has its shortest exact form, and a boolean is "true" or "false".
    """
    return str(cell).lower() if isinstance(cell, bool) else str(cell)


def is_missing(cell: Any) -> bool:
    """Return whether a cell is None, NaN, or one of the texts for a missing value."""
    return (
        cell is None
        or (isinstance(cell, str) and cell.lower() in MISSING)
        or (isinstance(cell, float) and math.isnan(cell))
    )


def parse_boolean_word(cell: Any) -> float | None:
    """Return 1 for "true" and "yes", 0 for "false" and "no", and None for anything else.

    Upper and lower case are the same, and the booleans of Python count as their words.
    """
    text = str(cell).lower()
    if text in TRUE:
        return 1.0
    return 0.0 if text in FALSE else None


def parse_date(cell: Any) -> float | None:
    """Return the days since 1970-01-01 (UTC) of a date, or of a text with an ISO date or date-time.

    A date without an offset is in UTC. Returns None for anything else.
    """
    if isinstance(cell, str):
        # The test of one character is much faster than the pattern, for texts that are not dates.
        groups = ISO.fullmatch(cell) if cell[4:5] == "-" else None
        if groups is None:
            return None
        clock, seconds, fraction, offset = (group or "" for group in groups.groups()[1:])
        offset = "+00:00" if offset in ("", "Z") else f"{offset[:3]}:{offset[-2:]}"
        try:
            # Python 3.10 reads this form only: six digits of a second, an offset with a colon.
            # Further digits are cut, because a datetime has microseconds.
            cell = datetime.fromisoformat(
                f"{groups[1]}T{clock or '00:00'}{seconds or ':00'}.{fraction[:6]:0<6}{offset}"
            )
        except ValueError:
            return None
    elif not isinstance(cell, date):
        return None

    moment = cell if isinstance(cell, datetime) else datetime(cell.year, cell.month, cell.day)
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=timezone.utc)
    return (moment - EPOCH).total_seconds() / SECONDS


def _parse_boolean(cell: Any) -> float | None:
    """Return 1 or 0 for true, false, yes, no, 1 and 0; None for anything else."""
    number = PLAIN.parse(cell)
    if number is None:
        return parse_boolean_word(cell)
    return number if number in (0, 1) else None


def _parse_cells(cells: Sequence[Any], parse: Callable[[Any], float | None]) -> np.ndarray:
    """Return the parsed cells (n,), NaN for gaps and for cells that `parse` refuses."""
    return np.array([math.nan if is_missing(cell) else parse(cell) for cell in cells], dtype=float)


def check_column_finite(column: Column) -> Column:
    """Return the column unchanged; raise TableError if it has infinite values.

    Texts are never infinite. Missing values are allowed.
    """
    if column.kind != TEXT:
        _check_finite(column.name, column.values)
    return column


def _shorten_number(value: float) -> int | float:
    """Return a whole number as int, another number as it is."""
    return int(value) if value.is_integer() else value


def _convert_to_date(days: float) -> datetime:
    """Return the moment that is this number of days after 1970-01-01, in UTC."""
    return EPOCH + timedelta(days=days)


def _check_finite(
    name: str, values: np.ndarray, rows_before: int = 0, may_have_more: bool = False
) -> np.ndarray:
    """Return the values (n,) unchanged; raise TableError if a value is infinite. NaN is allowed.

    name: the column.  rows_before, may_have_more: for the message, as in `read_as_kind`.
    """
    infinite = np.isinf(values).nonzero()[0]
    if len(infinite):
        raise TableError(
            f"Column {name!r} has an infinite value in row {rows_before + infinite[0] + 1} "
            f"({len(infinite)} {_describe_extent(rows_before + len(values), may_have_more)}). "
            "Correct or empty them."
        )
    return values


def _make_mixed_kinds_error(
    name: str, distinct: _DistinctCells, wrong: np.ndarray, expected: str
) -> TableError:
    """Return the error for a column that mixes cells of the expected kind with texts.

    name: the column.  wrong (L,) bool: which of the different cells are not of the expected kind.
    expected: the name of that kind, "dates" or "numbers".
    """
    rows = np.flatnonzero(wrong[distinct.codes])
    first_cell = distinct.levels[distinct.codes[rows[0]]]
    return TableError(
        f"Column {name!r} mixes {expected} and texts: row {rows[0] + 1} is "
        f"{str(first_cell)[:SHOWN_LENGTH]!r}, {len(rows)} such cells in total. Correct them, or "
        f"leave the column out with --drop {name!r}."
    )


def _detect_style(
    name: str, given_cells: list[Any], counts: np.ndarray, stated: Style | None
) -> Style:
    """Return the format of numbers that fits all cells, or most of them if none fits all.

    Where no cell looks like a number in another format, the result is the stated format, or else
    PLAIN. Raises TableError where two formats fit with different values, or where another format
    than the stated one fits.

    name: the column, for errors.  given_cells (L,): the different cells that are not missing.
    counts (L,): the rows of each.  stated: the marks of numbers that the user gave, with which only
    the unit is detected; None if the marks are detected too.
    """
    expected = stated or PLAIN
    if _parse_all(expected, given_cells) is not None:
        return expected

    # The first text that looks like a number, with a unit or without one, decides which unit all
    # cells should have.
    texts = list(dict.fromkeys(cell for cell in given_cells if isinstance(cell, str)))
    first_number = next((match for match in map(UNIT.fullmatch, texts[:TRIED]) if match), None)
    if first_number is None:
        return expected
    units = (first_number[2] or "", (first_number[4] or "").strip())

    # The marks are then those with which all cells are numbers.
    possible = [Style(*marks, *units) for marks in ((".", ""), *_find_possible_marks(texts))]
    candidates = possible if stated is None else [Style(stated.decimal, stated.thousands, *units)]
    parsed = [(style, _parse_all(style, given_cells)) for style in candidates]
    fitting = [(style, values) for style, values in parsed if values is not None]
    if fitting:
        first_fitting, _ = fitting[0]
        # The first candidate has the marks of plain numbers, or the stated marks. Where it fits, no
        # other format is considered.
        if first_fitting is not candidates[0]:
            _check_unambiguous(name, given_cells, fitting)
        return first_fitting

    if stated is not None and any(_parse_all(style, given_cells) is not None for style in possible):
        raise TableError(
            f"Column {name!r} is not in the format {_write_style_options(stated)}: its first value "
            f"is {given_cells[0]!r}. Write all columns in one format, or leave it out with --drop "
            f"{name!r}."
        )

    # No format fits all cells: the caller decides what the others mean.
    return max(
        candidates,
        key=lambda style: counts[[style.parse(cell) is not None for cell in given_cells]].sum(),
    )


def _check_unambiguous(
    name: str, given_cells: list[Any], fitting: Sequence[tuple[Style, list[float]]]
) -> None:
    """Raise TableError if formats that fit all cells give one of them different values.

    given_cells (L,): the different cells.  fitting: the formats, each with its values of these
    cells.
    """
    first_style, first_values = fitting[0]
    for style, values in fitting[1:]:
        for cell, first_value, value in zip(given_cells, first_values, values, strict=True):
            if value != first_value:
                raise TableError(
                    f"Column {name!r} is ambiguous: {cell!r} is {first_value:.10g} with "
                    f"{_write_style_options(first_style)}, but {value:.10g} with "
                    f"{_write_style_options(style)}. Give one of these options. An input can be "
                    f"left out with --drop {name!r}."
                )


def _parse_all(style: Style, cells: list[Any]) -> list[float] | None:
    """Return the values of all cells, or None if one is not a number in this format."""
    values = []
    for cell in cells:
        value = style.parse(cell)
        if value is None:  # the others need not be parsed
            return None
        values.append(value)
    return values


def _find_possible_marks(texts: list[str]) -> list[tuple[str, str]]:
    """Return the pairs of WAYS whose thousands mark occurs in the texts.

    For a pair without a thousands mark, the decimal mark must occur. The other pairs need not be
    tried: they give the same values as a pair without thousands mark, or as plain numbers.
    """
    characters = set("".join(texts))
    # A thousands mark " " stands for all kinds of spaces.
    spaces = {" "} if characters & set(SPACES) else set()
    return [
        (decimal, thousands)
        for decimal, thousands in WAYS
        if (thousands or decimal) in characters | spaces
    ]


def _write_style_options(style: Style) -> str:
    """Return the options of the command that give the marks of this format.

    The default decimal mark is written only where there is no thousands mark to write.
    """
    options = []
    if style.decimal != "." or not style.thousands:
        options.append(f"--decimal {style.decimal!r}")
    if style.thousands:
        options.append(f"--thousands {style.thousands!r}")
    return " ".join(options)
