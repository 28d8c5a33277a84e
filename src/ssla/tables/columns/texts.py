"""Columns of texts in memory of pyarrow: read from large CSV files, converted to numbers, and
counted, without a loop over cells.

pyarrow splits a CSV file like Python's csv module, except for what raises `DifferentError`. Then
csv must read the file.

pyarrow's own conversions from and to Python and NumPy (`pyarrow.array`, `to_numpy`) import pandas,
which takes seconds. So this module reads and makes the buffers of arrays itself.
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
    """Strings without nulls, as a ChunkedArray of pyarrow."""

    array: Any

    def __len__(self) -> int:
        """Return the number of rows."""
        return len(self.array)

    @overload
    def __getitem__(self, at: int) -> str: ...
    @overload
    def __getitem__(self, at: slice) -> list[str]: ...
    def __getitem__(self, at: int | slice) -> str | list[str]:
        """Return the text of a row, or the texts of a slice."""
        texts: str | list[str] = (
            self.array[at].to_pylist() if isinstance(at, slice) else self.array[at].as_py()
        )
        return texts

    def __iter__(self) -> Iterator[str]:
        """Iterate over the texts, which are converted at once."""
        return iter(self.array.to_pylist())

    def find_distinct(self) -> tuple[list[str], np.ndarray]:
        """Return the different texts in the order of their first rows (L,), and which of them each
        row has (n,).
        """
        chunks = self.array.dictionary_encode().unify_dictionaries().chunks
        levels: list[str] = chunks[0].dictionary.to_pylist() if chunks else []
        return levels, np.concatenate(
            [np.zeros(0, np.int32), *(_values_of(chunk.indices, np.int32) for chunk in chunks)]
        )

    def parse_numbers(self, decimal: str, gaps: Collection[str]) -> np.ndarray | None:
        """Return floats (n,), NaN for the texts in gaps, if all others are numbers such as 1, +1.5
        and 1e5; otherwise None.

        With only these characters, pyarrow accepts what `float` accepts, and both round to the
        nearest double.
        """
        import pyarrow
        import pyarrow.compute

        is_given = pyarrow.compute.invert(
            pyarrow.compute.is_in(self.array, value_set=_make_array(sorted(gaps)))
        )
        values = np.full(len(self), np.nan)
        parsed = []
        for chunk in filter(len, self.array.filter(is_given).chunks):
            if _bytes_of(chunk).translate(None, SIGNS + decimal.encode()):
                return None
            if decimal != ".":
                chunk = _make_array([text.replace(decimal, ".") for text in chunk.to_pylist()])
            try:
                parsed.append(_values_of(chunk.cast(pyarrow.float64()), np.float64))
            except pyarrow.ArrowInvalid:
                return None
        if parsed:
            # Booleans are stored as bits, so they are cast to bytes before they are read.
            rows = [_values_of(chunk.cast(pyarrow.uint8()), np.uint8) for chunk in is_given.chunks]
            values[np.concatenate(rows).astype(bool)] = np.concatenate(parsed)
        return values


def arrow_columns(
    stream: Any, delimiter: str, width: int, rows: int | None
) -> Iterator[list[Texts]]:
    """Yield the columns of a CSV file with a header line, with stripped cells, in parts of `rows`
    rows (None: in one part).

    stream: an open file of bytes, at its start. width: the number of columns of the header.

    Raises DifferentError if csv must read the file: then only the parts given before are right.
    """
    try:
        import pyarrow
        import pyarrow.csv
    except ImportError:
        raise DifferentError from None
    checked_stream = _CheckedStream(stream)
    try:
        data = checked_stream.read() if rows is None else None
        options = {
            "read_options": pyarrow.csv.ReadOptions(
                autogenerate_column_names=True, block_size=BLOCK
            ),
            "parse_options": pyarrow.csv.ParseOptions(
                delimiter=delimiter, newlines_in_values=data is None or b'"' in data
            ),
            "convert_options": pyarrow.csv.ConvertOptions(
                column_types={f"f{i}": pyarrow.string() for i in range(width)}
            ),
        }
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


def split_batches(batches: Any, rows: int) -> Iterator[Any]:
    """Join and split record batches of any size: yield tables of that many rows; the last table
    has the remaining rows.
    """
    import pyarrow

    waiting: list[Any] = []
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
    header_rows = 1
    for batch in batches:
        yield batch.slice(header_rows)
        header_rows = max(0, header_rows - batch.num_rows)  # the first batches may be empty


def _strip_cells(column: Any) -> Any:
    """Return a ChunkedArray with its texts stripped as by `str.strip`.

    Raises DifferentError for a cell that csv may refuse as too long.
    """
    import pyarrow.compute

    # Most columns have no space at all: a test of their bytes is faster than stripping.
    may_have_spaces = False
    for chunk in filter(len, column.chunks):
        if int(np.diff(_offsets_of(chunk)).max()) > csv.field_size_limit():
            raise DifferentError
        data = np.frombuffer(_bytes_of(chunk), dtype=np.uint8)
        may_have_spaces = may_have_spaces or bool(((data <= ord(" ")) | (data >= 0x80)).any())
    return pyarrow.compute.utf8_trim_whitespace(column) if may_have_spaces else column


def _make_array(texts: list[str]) -> Any:
    """Return a StringArray of the texts, as `pyarrow.array` would."""
    import pyarrow

    data = [text.encode() for text in texts]
    offsets = np.cumsum([0, *map(len, data)], dtype=np.int32)
    return pyarrow.StringArray.from_buffers(
        len(texts), pyarrow.py_buffer(offsets), pyarrow.py_buffer(b"".join(data))
    )


def _values_of(chunk: Any, dtype: type[np.generic], more: int = 0) -> np.ndarray:
    """Return the values (n + more,) of an array of n rows without nulls, as `to_numpy` would.

    more: values after those of the rows, which a buffer of offsets has.
    """
    if not len(chunk):
        return np.zeros(0, dtype)
    return np.frombuffer(chunk.buffers()[1], dtype=dtype)[
        chunk.offset : chunk.offset + len(chunk) + more
    ]


def _offsets_of(chunk: Any) -> np.ndarray:
    """Return where the n texts of an array start and end (n + 1,), in bytes of its data."""
    return _values_of(chunk, np.int32, 1)


def _bytes_of(chunk: Any) -> bytes:
    """Return the texts of an array with at least one row, one after the other, in UTF-8."""
    offsets = _offsets_of(chunk)
    data = chunk.buffers()[2]
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
        self.lock = threading.Lock()

    def read(self, size: int = -1) -> bytes:
        """Return the next bytes, none after `close`; raise OSError if csv must read the file."""
        with self.lock:
            block: bytes = b"" if self.closed else self.stream.read(size)
        # The end of a line, a carriage return and a newline, may be in two blocks.
        single_return = self.after_return and not block.startswith(b"\n")
        self.after_return = block.endswith(b"\r")
        if (
            single_return
            or block.count(b"\r") != block.count(b"\r\n") + self.after_return
            or b"\0" in block
        ):
            raise OSError("csv reads this file")
        return block

    def close(self) -> None:
        """End the reads of pyarrow. The stream stays open: csv may have to read it."""
        with self.lock:
            self.closed = True
