"""Columns of texts in memory of pyarrow.

The texts are read from large CSV files, converted to numbers, and counted, without a loop over
cells. pyarrow splits a CSV file like Python's csv module, except for what raises `DifferentError`.
Then csv must read the file.

pyarrow's own conversions from and to Python and NumPy (`pyarrow.array`, `to_numpy`) import pandas,
which takes seconds. So this module reads and makes the buffers of arrays itself. The buffers of a
StringArray are: 0 which rows are given (none is missing here), 1 where each text starts, 2 the
bytes of all texts. Those of an array of numbers are: 0 as above, 1 the values.
"""

from __future__ import annotations

import csv
import threading
import zlib
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, overload

import numpy as np

BLOCK = 1 << 22  # bytes that pyarrow parses at once; a guess
SIGNS = b"0123456789eE+-"  # the characters of plain numbers, beside the decimal mark


class DifferentError(Exception):
    """pyarrow could read this file in another way than csv, or it is not installed."""


@dataclass(frozen=True, eq=False)
class Texts(Sequence[str]):
    """A column of strings, none of which is missing."""

    array: Any  # a ChunkedArray of pyarrow

    def __len__(self) -> int:
        """Return the number of rows."""
        return len(self.array)

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> list[str]: ...
    def __getitem__(self, index: int | slice) -> str | list[str]:
        """Return the text of a row, or the texts of a slice."""
        if isinstance(index, slice):
            texts: list[str] = self.array[index].to_pylist()
            return texts
        text: str = self.array[index].as_py()
        return text

    def __iter__(self) -> Iterator[str]:
        """Return an iterator over the texts, all of which are converted to Python first."""
        return iter(self.array.to_pylist())

    def find_distinct(self) -> tuple[list[str], np.ndarray]:
        """Return the L different texts, and for each row (n,) the position of its text among them.

        The different texts are in the order of their first rows.
        """
        chunks = self.array.dictionary_encode().unify_dictionaries().chunks
        levels: list[str] = chunks[0].dictionary.to_pylist() if chunks else []
        positions = [_read_values(chunk.indices, np.int32) for chunk in chunks]
        # An empty array, because there may be no chunk to join.
        return levels, np.concatenate([np.zeros(0, np.int32), *positions])

    def parse_numbers(self, decimal: str, gaps: Collection[str]) -> np.ndarray | None:
        """Return the texts as floats (n,), or None if one is not a number such as 1, +1.5 and 1e5.

        With only the characters of such numbers, pyarrow accepts what `float` accepts, and both
        round to the nearest double. So the result is that of a loop with `float`.

        decimal: the decimal mark.  gaps: the texts of missing values, which become NaN.
        """
        import pyarrow
        import pyarrow.compute

        is_given = pyarrow.compute.invert(
            pyarrow.compute.is_in(self.array, value_set=_make_string_array(sorted(gaps)))
        )
        values = np.full(len(self), np.nan)
        parsed = []

        # Empty chunks have no buffers.
        for chunk in filter(len, self.array.filter(is_given).chunks):
            # The remaining bytes are characters that no plain number has.
            if _read_bytes(chunk).translate(None, SIGNS + decimal.encode()):
                return None
            if decimal != ".":
                chunk = _make_string_array(
                    [text.replace(decimal, ".") for text in chunk.to_pylist()]
                )
            try:
                parsed.append(_read_values(chunk.cast(pyarrow.float64()), np.float64))
            except pyarrow.ArrowInvalid:
                return None

        if parsed:
            # Booleans are stored as bits, so they are cast to bytes before they are read.
            rows = [
                _read_values(chunk.cast(pyarrow.uint8()), np.uint8) for chunk in is_given.chunks
            ]
            values[np.concatenate(rows).astype(bool)] = np.concatenate(parsed)

        return values


def read_arrow_columns(
    stream: Any, delimiter: str, width: int, rows: int | None
) -> Iterator[list[Texts]]:
    """Yield the columns of a CSV file with a header line, in parts of `rows` rows each.

    Cells have no spaces around them, and a part has at least one row. Raises DifferentError if csv
    must read the file, or if pyarrow is missing. The parts that were yielded before are then right.

    stream: an open file of bytes, at its start.  width: the number of columns of the header.  rows:
    None is one part with all rows.  delimiter: that of the cells.
    """
    try:
        import pyarrow
        import pyarrow.csv
    except ImportError:
        raise DifferentError from None

    checked_stream = _CheckedStream(stream)
    try:
        # A file that is read in one part is read into memory first. Only then is it known whether
        # it has quotes, in which a cell may have several lines.
        data = checked_stream.read() if rows is None else None
        options = _make_csv_options(delimiter, width, data is None or b'"' in data)
        if rows is None:
            tables = iter([pyarrow.csv.read_csv(pyarrow.BufferReader(data), **options).slice(1)])
        else:
            batches = pyarrow.csv.open_csv(pyarrow.PythonFile(checked_stream, mode="r"), **options)
            tables = split_batches(_skip_header(batches), rows)
        del data  # the whole file, whose memory the tables do not need
        for table in tables:
            if table.num_columns != width:
                raise DifferentError
            if table.num_rows:
                yield [Texts(_strip_cells(column)) for column in table.columns]
    except (pyarrow.ArrowException, OSError, EOFError, zlib.error):
        raise DifferentError from None
    finally:
        checked_stream.close()


def _make_csv_options(delimiter: str, width: int, has_long_cells: bool) -> dict[str, Any]:
    """Return the options of pyarrow's readers of CSV: all cells are texts, also the header.

    width: the number of columns.  has_long_cells: whether a cell may have several lines.
    """
    import pyarrow
    import pyarrow.csv

    return {
        # pyarrow names the columns f0, f1, …, and the header is its first row.
        "read_options": pyarrow.csv.ReadOptions(autogenerate_column_names=True, block_size=BLOCK),
        "parse_options": pyarrow.csv.ParseOptions(
            delimiter=delimiter, newlines_in_values=has_long_cells
        ),
        "convert_options": pyarrow.csv.ConvertOptions(
            column_types={f"f{i}": pyarrow.string() for i in range(width)}
        ),
    }


def split_batches(batches: Any, rows: int) -> Iterator[Any]:
    """Yield the rows of record batches of any size as tables of `rows` rows each.

    The last table has the remaining rows. Without a row, there is no table.

    batches: an iterator over RecordBatches of pyarrow.
    """
    import pyarrow

    waiting: list[Any] = []  # batches whose rows have not been yielded
    for batch in batches:
        waiting.append(batch)
        while sum(part.num_rows for part in waiting) >= rows:
            table = pyarrow.Table.from_batches(waiting)
            yield table.slice(0, rows)
            waiting = table.slice(rows).to_batches()

    if sum(part.num_rows for part in waiting):
        yield pyarrow.Table.from_batches(waiting)


def _skip_header(batches: Any) -> Iterator[Any]:
    """Yield the record batches without the first row, which is the header."""
    rows_to_skip = 1
    for batch in batches:
        yield batch.slice(rows_to_skip)
        rows_to_skip = max(0, rows_to_skip - batch.num_rows)  # the first batches may be empty


def _strip_cells(column: Any) -> Any:
    """Return a ChunkedArray with its texts stripped as by `str.strip`.

    Raises DifferentError for a cell that csv may refuse as too long.
    """
    import pyarrow.compute

    # Most columns have no space at all: a test of their bytes is faster than stripping. The spaces
    # of ASCII are bytes up to that of " ", and those of Unicode have bytes from 0x80.
    may_have_spaces = False
    for chunk in filter(len, column.chunks):
        longest = int(np.diff(_read_offsets(chunk)).max())
        if longest > csv.field_size_limit():
            raise DifferentError
        data = np.frombuffer(_read_bytes(chunk), dtype=np.uint8)
        may_have_spaces = may_have_spaces or bool(((data <= ord(" ")) | (data >= 0x80)).any())

    return pyarrow.compute.utf8_trim_whitespace(column) if may_have_spaces else column


def _make_string_array(texts: list[str]) -> Any:
    """Return the texts as a StringArray, as `pyarrow.array` would."""
    import pyarrow

    data = [text.encode() for text in texts]
    # Text i has the bytes from offset i to offset i + 1.
    offsets = np.cumsum([0, *map(len, data)], dtype=np.int32)
    return pyarrow.StringArray.from_buffers(
        len(texts), pyarrow.py_buffer(offsets), pyarrow.py_buffer(b"".join(data))
    )


def _read_values(chunk: Any, dtype: type[np.generic], extra: int = 0) -> np.ndarray:
    """Return the values (n + extra,) of an array of n rows without nulls, as `to_numpy` would.

    Without rows the array is empty.

    dtype: the type of the values in memory.  extra: how many values are read after those of the
    rows; a buffer of offsets has one more than rows.
    """
    if not len(chunk):
        return np.zeros(0, dtype)
    # A chunk can be a slice of a larger buffer.
    end = chunk.offset + len(chunk) + extra
    return np.frombuffer(chunk.buffers()[1], dtype=dtype)[chunk.offset : end]


def _read_offsets(chunk: Any) -> np.ndarray:
    """Return where the n texts of an array start and end (n + 1,), in bytes of its data."""
    return _read_values(chunk, np.int32, extra=1)


def _read_bytes(chunk: Any) -> bytes:
    """Return the texts of an array with at least one row, one after the other, in UTF-8."""
    offsets = _read_offsets(chunk)
    data = chunk.buffers()[2]  # None if all texts are empty
    return b"" if data is None else bytes(memoryview(data)[int(offsets[0]) : int(offsets[-1])])


class _CheckedStream:
    """A file of bytes that refuses what pyarrow and csv read in different ways.

    `read` raises OSError for NUL bytes, and for line ends of a single carriage return. A thread of
    pyarrow may read it.
    """

    def __init__(self, stream: Any) -> None:
        """Wrap an open file of bytes."""
        self.stream = stream
        self.after_return = False  # whether the last block ended with a carriage return
        self.closed = False
        self.lock = threading.Lock()  # so that `close` waits for the end of a read

    def read(self, size: int = -1) -> bytes:
        """Return the next `size` bytes (−1: all), and none after `close`.

        Raises OSError if csv must read the file; `read_arrow_columns` turns it into DifferentError.
        """
        with self.lock:
            block: bytes = b"" if self.closed else self.stream.read(size)

        # The end of a line, a carriage return and a newline, may be in two blocks.
        starts_after_single_return = self.after_return and not block.startswith(b"\n")
        self.after_return = block.endswith(b"\r")

        # A carriage return at the end of the block is checked with the next one.
        followed_returns = block.count(b"\r\n") + self.after_return
        has_single_return = block.count(b"\r") != followed_returns
        if starts_after_single_return or has_single_return or b"\0" in block:
            raise OSError("csv reads this file")
        return block

    def close(self) -> None:
        """Make all further reads return no bytes. The stream stays open, for csv to read it."""
        with self.lock:
            self.closed = True
