"""Columns of texts in memory of pyarrow: read from large CSV files, converted to numbers, and
counted, without a loop over cells.

pyarrow splits a CSV file like Python's csv module, except for what raises `DifferentError`. Then
csv must read the file.
"""

from __future__ import annotations

import csv
import threading
import zlib
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, overload

import numpy as np

BLOCK = 1 << 22  # bytes that pyarrow parses at once
SIGNS = b"0123456789eE+-"


class DifferentError(Exception):
    """pyarrow could read this file in another way than csv, or it is not installed."""


@dataclass(frozen=True, eq=False)
class Texts(Sequence[str]):
    """Strings without nulls, as a ChunkedArray of pyarrow."""

    array: Any

    def __len__(self) -> int:
        return len(self.array)

    @overload
    def __getitem__(self, at: int) -> str: ...
    @overload
    def __getitem__(self, at: slice) -> list[str]: ...
    def __getitem__(self, at: int | slice) -> str | list[str]:
        found: str | list[str] = (
            self.array[at].to_pylist() if isinstance(at, slice) else self.array[at].as_py()
        )
        return found

    def __iter__(self) -> Iterator[str]:
        return iter(self.array.to_pylist())

    def distinct(self) -> tuple[list[str], np.ndarray]:
        """Different texts in the order of their first rows, and which of them each row has (n,)."""
        chunks = self.array.dictionary_encode().unify_dictionaries().chunks
        levels: list[str] = chunks[0].dictionary.to_pylist() if chunks else []
        return levels, np.concatenate(
            [np.zeros(0, np.int32), *(_values(chunk.indices, np.int32) for chunk in chunks)]
        )

    def numbers(self, decimal: str, gaps: Collection[str]) -> np.ndarray | None:
        """Floats (n,), NaN for the texts in gaps, if all others are numbers such as 1, +1.5 and
        1e5; else None.

        With only these characters, pyarrow accepts what `float` accepts, and both round to the
        nearest double.
        """
        import pyarrow
        import pyarrow.compute

        there = pyarrow.compute.invert(
            pyarrow.compute.is_in(self.array, value_set=_array(sorted(gaps)))
        )
        values = np.full(len(self), np.nan)
        given = self.array.filter(there)
        found = []
        for chunk in filter(len, given.chunks):
            data = _bytes(chunk)
            if data.translate(None, SIGNS + decimal.encode()):
                return None
            if decimal != ".":
                chunk = _array([text.replace(decimal, ".") for text in chunk.to_pylist()])
            try:
                found.append(_values(chunk.cast(pyarrow.float64()), np.float64))
            except pyarrow.ArrowInvalid:
                return None
        if found:
            rows = [_values(chunk.cast(pyarrow.uint8()), np.uint8) for chunk in there.chunks]
            values[np.concatenate(rows).astype(bool)] = np.concatenate(found)
        return values


def arrow_columns(
    stream: Any, delimiter: str, width: int, rows: int | None
) -> Iterator[list[Texts]]:
    """The columns of a CSV file with a header line, with stripped cells, in parts of `rows` rows
    (None: in one part).

    stream: an open file of bytes, at its start.  DifferentError if csv must read it: then only the
    parts given before are right.
    """
    try:
        import pyarrow
        import pyarrow.csv
    except ImportError:
        raise DifferentError from None
    watched = _Watched(stream)
    try:
        data = watched.read() if rows is None else None
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
            batches = pyarrow.csv.open_csv(pyarrow.PythonFile(watched, mode="r"), **options)
            tables = of_equal_size(_without_first(batches), rows)
        del data
        for table in tables:
            if table.num_columns != width:
                raise DifferentError
            if table.num_rows:
                yield [Texts(_stripped(column)) for column in table.columns]
    except (pyarrow.ArrowException, OSError, EOFError, zlib.error):
        raise DifferentError from None
    finally:
        watched.close()


def of_equal_size(batches: Any, rows: int) -> Iterator[Any]:
    """Record batches of any size -> tables of that many rows; the last has the rest."""
    import pyarrow

    rest: list[Any] = []
    for batch in batches:
        rest.append(batch)
        while sum(part.num_rows for part in rest) >= rows:
            table = pyarrow.Table.from_batches(rest)
            yield table.slice(0, rows)
            rest = table.slice(rows).to_batches()
    if sum(part.num_rows for part in rest):
        yield pyarrow.Table.from_batches(rest)


def _without_first(batches: Any) -> Iterator[Any]:
    """Without the first row, which is the header."""
    header = 1
    for batch in batches:
        yield batch.slice(header)
        header = max(0, header - batch.num_rows)


def _stripped(column: Any) -> Any:
    """Like str.strip. DifferentError for a cell that csv may refuse as too long."""
    import pyarrow.compute

    bare = True
    for chunk in filter(len, column.chunks):
        if int(np.diff(_offsets(chunk)).max()) > csv.field_size_limit():
            raise DifferentError
        data = np.frombuffer(_bytes(chunk), dtype=np.uint8)
        bare = bare and not bool(((data <= ord(" ")) | (data >= 0x80)).any())
    return column if bare else pyarrow.compute.utf8_trim_whitespace(column)


def _array(texts: list[str]) -> Any:
    """Like pyarrow.array, which would import pandas, for seconds."""
    import pyarrow

    data = [text.encode() for text in texts]
    offsets = np.cumsum([0, *map(len, data)], dtype=np.int32)
    return pyarrow.StringArray.from_buffers(
        len(texts), pyarrow.py_buffer(offsets), pyarrow.py_buffer(b"".join(data))
    )


def _values(chunk: Any, dtype: type[np.generic], more: int = 0) -> np.ndarray:
    """Like to_numpy, which would import pandas: (n + more,), for arrays without nulls."""
    if not len(chunk):
        return np.zeros(0, dtype)
    return np.frombuffer(chunk.buffers()[1], dtype=dtype)[
        chunk.offset : chunk.offset + len(chunk) + more
    ]


def _offsets(chunk: Any) -> np.ndarray:
    """Where the texts of an array start (n + 1,), in bytes of its data."""
    return _values(chunk, np.int32, 1)


def _bytes(chunk: Any) -> bytes:
    offsets, data = _offsets(chunk), chunk.buffers()[2]
    return b"" if data is None else bytes(memoryview(data)[int(offsets[0]) : int(offsets[-1])])


class _Watched:
    """A file of bytes, also for a thread of pyarrow.

    OSError for NUL bytes, and for line ends of a single carriage return.
    """

    def __init__(self, stream: Any) -> None:
        self.stream, self.after_return, self.closed, self.lock = (
            stream,
            False,
            False,
            threading.Lock(),
        )

    def read(self, size: int = -1) -> bytes:
        with self.lock:
            block: bytes = b"" if self.closed else self.stream.read(size)
        single = self.after_return and not block.startswith(b"\n")
        self.after_return = block.endswith(b"\r")
        if (
            single
            or block.count(b"\r") != block.count(b"\r\n") + self.after_return
            or b"\0" in block
        ):
            raise OSError("csv reads this file")
        return block

    def close(self) -> None:
        """pyarrow reads no more from the stream, which stays open: csv may have to read it."""
        with self.lock:
            self.closed = True
