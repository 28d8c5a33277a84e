"""Tables that pyarrow reads and columns that are read by distinct values: the same as by csv
and cell by cell.
"""

import csv
import gzip
import io
import math
import random
import sys

import numpy as np
import pyarrow
import pytest

from ssla.tables.columns import Style, TableError, make_plan, read_parts, read_table, reading, texts
from ssla.tables.columns.kinds import (
    MARKS,
    MISSING,
    UNIT,
    WAYS,
    _parse_boolean,
    convert_to_text,
    find_distinct_cells,
    interpret_cells,
    is_missing,
    parse_boolean_word,
    parse_date,
    read_as_kind,
)
from ssla.tables.columns.texts import DifferentError, Texts


def arrow(cells, chunk=3):
    """The cells in several chunks, which do not start at the start of their memory."""
    array = pyarrow.array(["before", *cells], pyarrow.string())
    return Texts(
        pyarrow.chunked_array(
            [array.slice(i, min(chunk, len(array) - i)) for i in range(1, len(array), chunk)],
            array.type,
        )
    )


# --- the oracle: one cell after the other


def floats(cells, read):
    return [math.nan if is_missing(cell) else read(cell) for cell in cells]


def mixed(name, cells, read, what):
    wrong = [i for i, cell in enumerate(cells) if not is_missing(cell) and read(cell) is None]
    raise TableError(
        f"Column {name!r} mixes {what} and texts: row {wrong[0] + 1} is "
        f"{str(cells[wrong[0]])[:30]!r}, {len(wrong)} such cells in total. Correct them, or leave "
        f"the column out with --drop {name!r}."
    )


def finite(name, values):
    rows = [i for i, value in enumerate(values) if math.isinf(value)]
    if rows:
        raise TableError(
            f"Column {name!r} has an infinite value in row {rows[0] + 1} ({len(rows)} in total). "
            "Correct or empty them."
        )
    return values


def by_cell(name, cells, style):
    """(kind, values, style) of a training column."""
    given = [cell for cell in cells if not is_missing(cell)]
    if given and all(parse_boolean_word(cell) is not None for cell in given):
        return "boolean", floats(cells, parse_boolean_word), Style()
    days = sum(parse_date(cell) is not None for cell in given)
    if days > len(given) / 2:
        return (
            ("date", floats(cells, parse_date), Style())
            if days == len(given)
            else mixed(name, cells, parse_date, "dates")
        )
    chosen = style_by_cell(given, style)
    wrong = sum(chosen.parse(cell) is None for cell in given)
    if wrong > len(given) / 2:
        return (
            "text",
            [None if is_missing(cell) else convert_to_text(cell) for cell in cells],
            Style(),
        )
    return (
        ("number", finite(name, floats(cells, chosen.parse)), chosen)
        if not wrong
        else mixed(name, cells, chosen.parse, "numbers")
    )


def style_by_cell(given, asked):
    stated = asked or Style()
    if all(stated.parse(cell) is not None for cell in given):
        return stated
    unit = next(
        (
            m
            for m in map(
                UNIT.fullmatch, list(dict.fromkeys(c for c in given if isinstance(c, str)))[:100]
            )
            if m
        ),
        None,
    )
    if unit is None:
        return stated
    units = (unit[2] or "", (unit[4] or "").strip())
    every = [Style(d, t, *units) for d, t in ((".", ""), *WAYS)]
    styles = every if asked is None else [Style(stated.decimal, stated.thousands, *units)]
    fits = [(style, [style.parse(cell) for cell in given]) for style in styles]
    whole = [(style, values) for style, values in fits if None not in values]
    if whole and whole[0] is not fits[0] and any(values != whole[0][1] for _, values in whole):
        raise TableError("ambiguous")
    if (
        asked is not None
        and not whole
        and any(all(s.parse(cell) is not None for cell in given) for s in every)
    ):
        raise TableError("not in the format")
    return max(whole or fits, key=lambda fit: len(fit[1]) - fit[1].count(None))[0]


def later_by_cell(name, cells, kind, style):
    if kind == "text":
        return [None if is_missing(cell) else convert_to_text(cell) for cell in cells]
    read = {"number": style.parse, "boolean": _parse_boolean, "date": parse_date}[kind]
    found = floats(cells, read)
    if None in found:
        wrong = [i for i, value in enumerate(found) if value is None]
        raise TableError(
            f"row {7 + wrong[0] + 1} of the table is {str(cells[wrong[0]])[:30]!r} ({len(wrong)} "
            f"such cells up to row {7 + len(cells)}). Correct or empty them."
        )
    if any(map(math.isinf, found)):
        raise TableError("infinite value")
    return found


def outcome(work, *arguments):
    try:
        return work(*arguments)
    except TableError as error:
        return str(error)


def same(one, other):
    """Equal values, also NaN, with their signs."""
    return len(one) == len(other) and all(
        repr(a) == repr(b) for a, b in zip(one, other, strict=True)
    )


POOLS = [
    [
        "1",
        "2.5",
        "-3",
        "+4",
        "1e5",
        "1E-3",
        ".5",
        "5.",
        "007",
        "-0",
        "12345678901234567890",
        "0.1",
        "",
        "NA",
    ],
    ["1", "2.5", "inf", "1e999", "Infinity", "-inf"],
    ["1", "1_000", "0x10", "١٢", "1e", "--1", "1-2", "1.2.3", "e5", "."],
    ["1,234.5", "12", "1,234,567", "950", "-1,000.25", "", "?"],
    ["12,5", "1,234", "7", "-0,5", ",5", "1,e5", "+3,25", "n/a"],
    ["1.234,5", "7", "1.234.567", "12.5"],
    ["950", "1,234"],
    ["1 234", "12,5", "1\u00a0234", "1\u202f234,5", "x"],
    ["1'234.5", "3", "1’234"],
    ["12.3%", "-4%", "5 %", "6", ""],
    ["$5", "-$1,234.50", "$ 4", "USD 7", "€3"],
    ["5 EUR", "6 EUR", "5 USD", "1.5 EUR"],
    ["yes", "no", "True", "FALSE", "YES", "", "-"],
    ["yes", "no", "1", "0", "maybe"],
    [
        "2024-01-01",
        "2024-02-29",
        "2024-03-01T12:30Z",
        "2023-02-29",
        "soon",
        "NULL",
        "2024-01-01 10:00:00.5+0200",
    ],
    ["a", "b", "größer", "小さい", "1", "2", "None", "none", "nOnE", "nán"],
    ["", "NA", "null", "?", "-", "NaN"],
    ["1", "2", "x", "y"],
]


def columns(count=40):
    draw = random.Random(0)
    for pool in POOLS:
        yield pool
        for _ in range(count):
            yield draw.choices(draw.sample(pool, draw.randint(1, len(pool))), k=draw.randint(1, 12))


@pytest.mark.parametrize("style", [None, Style(","), Style(".", ","), Style(",", " ")])
def test_columns_by_distinct_values_equal_columns_by_cell(style):
    kinds = set()
    for cells in columns():
        expected = outcome(by_cell, "c", cells, style)
        for given in (cells, arrow(cells)):
            column = outcome(interpret_cells, "c", given, style)
            if isinstance(expected, str):
                assert isinstance(column, str), cells
                assert expected in column, cells
                kinds.add(expected.split("'")[-1][:12])
                continue
            assert not isinstance(column, str), (cells, column)
            assert (column.kind, column.style) == (expected[0], expected[2]), cells
            assert same(column.values.tolist(), expected[1]), cells
            assert column.missing.tolist() == [is_missing(cell) for cell in cells]
            kinds.add(column.kind)
    assert {"boolean", "date", "number", "text"} < kinds


@pytest.mark.parametrize("kind", ["number", "boolean", "date", "text"])
def test_later_columns_by_distinct_values_equal_columns_by_cell(kind):
    for style in (
        (Style(), Style(","), Style(".", ","), Style(after="%"), Style(".", ",", "$"))
        if kind == "number"
        else (Style(),)
    ):
        for cells in columns(20):
            expected = outcome(later_by_cell, "c", cells, kind, style)
            for given in (cells, arrow(cells)):
                column = outcome(read_as_kind, "c", given, kind, style, "the table", 7, True)
                if isinstance(expected, str):
                    assert isinstance(column, str), cells
                    assert expected in column, cells
                else:
                    assert same(column.values.tolist(), expected), cells


def test_cells_of_several_types_are_read_one_by_one():
    cells = [1, 1.0, "1", 2, None, math.nan]
    assert interpret_cells("c", cells).values.tolist()[:4] == [1, 1, 1, 2]
    assert read_as_kind("c", [1, 1.0, True, "1"], "text").values.tolist() == [
        "1",
        "1.0",
        "true",
        "1",
    ]
    numbers = np.array([1, 2, 2**53 + 1])
    assert interpret_cells("c", numbers).values.tolist() == [float(n) for n in numbers.tolist()]
    with pytest.raises(
        TableError, match=r"mixes numbers and texts: row 3 is '\+nan', 1 such cells"
    ):
        interpret_cells("c", ["1", "2", "+nan"])


def test_numbers_of_texts_equal_float():
    rng = np.random.default_rng(0)
    doubles = rng.integers(0, 2**63, 3000).view(np.float64)
    cells = [repr(x) for x in doubles.tolist() if math.isfinite(x)] + [
        f"{x:.20e}" for x in rng.normal(size=300)
    ]
    cells += [f"{x:+.3f}" for x in rng.normal(size=300)] + [
        "4.9e-324",
        "2.4703282292062328e-324",
        "9007199254740993",
        "1e-999",
    ]
    assert same(arrow(cells, 100).parse_numbers(".", MARKS).tolist(), list(map(float, cells)))
    assert same(
        arrow([c.replace(".", ",") for c in cells], 100).parse_numbers(",", MARKS).tolist(),
        list(map(float, cells)),
    )
    for wrong in ("1 ", "nan", "inf", "1_0", "١", "0x1", "1e", "1,5"):
        assert arrow(["1", wrong if wrong != "nan" else "+nan"]).parse_numbers(".", MARKS) is None
    assert {mark.lower() for mark in MARKS} == MISSING


def test_all_spaces_are_stripped_as_by_python():
    cells = [f"{chr(c)}a{chr(c)}" for c in range(1, sys.maxunicode + 1) if not 0xD800 <= c < 0xE000]
    found = texts._strip_cells(pyarrow.chunked_array([pyarrow.array(cells)])).to_pylist()
    assert found == [cell.strip() for cell in cells]


def test_a_column_of_texts_is_a_sequence():
    column = arrow(["a", "b", "a", "c"], 3)
    assert list(column) == ["a", "b", "a", "c"]
    assert (len(column), column[3], column[1:3]) == (4, "c", ["b", "a"])
    levels, codes = column.find_distinct()
    assert (levels, codes.tolist()) == (["a", "b", "c"], [0, 1, 0, 2])
    assert Texts(pyarrow.chunked_array([], pyarrow.string())).find_distinct()[0] == []


# --- files


@pytest.fixture
def count(monkeypatch):
    """How many parts pyarrow gave; it reads small files too."""
    monkeypatch.setattr(reading, "LARGE", 0)
    given = []

    def counted(*arguments):
        for part in texts.read_arrow_columns(*arguments):
            given.append(part)
            yield part

    monkeypatch.setattr(reading, "read_arrow_columns", counted)
    return given


def different(*_):
    raise DifferentError
    yield


def parts_of(path, rows, **marks):
    """Cells of all parts, and the error after them."""
    found = []
    try:
        for part in read_parts(path, rows=rows, **marks):
            found.append(
                (
                    part.rows_before,
                    part.may_have_more,
                    part.rows,
                    {name: part.get_cells(name) for name in part.cells},
                )
            )
    except TableError as error:
        found.append(str(error))
    return found


def both(path, monkeypatch, rows=None, **marks):
    found = parts_of(path, rows, **marks)
    with monkeypatch.context() as patch:
        patch.setattr(reading, "read_arrow_columns", different)
        expected = parts_of(path, rows, **marks)
    assert found == expected
    return found


LONG = "".join(f"{i},word {i % 7}\n" for i in range(400))
FILES = {
    "plain": "a,b\n1,2\n3,4\n",
    "no end of line": "a,b\n1,2\n3,4",
    "windows": "a,b\r\n1,2\r\n\r\n3,4\r\n",
    "old mac": "a,b\r1,2\r3,4\r",
    "single return": "a,b\n1,2\n3\r4,5\n",
    "byte-order mark": "\ufeffa,b\n1,2\n",
    "semicolons": "a;b\n1,5;2\n3;4\n",
    "tabs": "a\tb\n1\t x \n",
    "blank lines": "a,b\n\n1,2\n\n\n3,4\n\n",
    "a line of spaces": "a,b\n1,2\n   \n3,4\n",
    "one column": 'a\n1\n\n2\n \n""\n3\n',
    "quoted": 'a,b\n"1","x, ""y"""\n" 2 ","two\nlines"\n3,"a\r\nb"\n',
    "quotes inside": 'a,b\n5" pipe,6"\n "x","a"b\n',
    "open quote": 'a,b\n1,"2\n3,4\n',
    "header in two lines": '"a\nx",b\n1,2\n',
    "spaces": "a , b\n 1 ,\u00a0x\u2003\n\t2,\x1f3\n",
    "short row": "a,b\n1,2\n3\n4,5\n",
    "long row": "a,b\n1,2\n3,4,5\n",
    "header only": "a,b\n",
    "two headers": "a,a\n1,2\n",
    "index": "Unnamed: 0,b\n1,2\n",
    "nul": "a,b\n1,\0\n",
    "long cell": "a,b\n1," + "x" * 140_000 + "\n",
    "long": "n,t\n" + LONG,
    "long, short row at the end": "n,t\n" + LONG + "5\n" + LONG,
    "long, quotes at the end": "n,t\n" + LONG + '5,"a\nb"\n' + LONG,
    "long, return at the end": "n,t\n" + LONG + "5,a\rb\n" + LONG,
    "backslash": 'a,b\n\\,1\n"\\",2\n',
}
BYTES = {
    "latin": "a,b\n1,é\n".encode("latin-1"),
    "utf-16": "a,b\n1,2\n".encode("utf-16"),
    "late latin": ("n,t\n" + LONG).encode() + b"1,\xe9\n",
}
BY_CSV = {
    "old mac",
    "single return",
    "short row",
    "long row",
    "header only",
    "two headers",
    "nul",
    "long cell",
}
BY_CSV |= {
    "a line of spaces",
    "latin",
    "utf-16",
    "late latin",
    "long, short row at the end",
    "long, return at the end",
}


@pytest.mark.filterwarnings("ignore:.*treated as a row index")
@pytest.mark.parametrize("name", [*FILES, *BYTES])
def test_files_are_read_as_by_csv(name, tmp_path, monkeypatch, count):
    monkeypatch.setattr(texts, "BLOCK", 1 << 10)
    path = tmp_path / "a.csv"
    content = BYTES[name] if name in BYTES else FILES[name].encode()
    path.write_bytes(content)
    whole = both(path, monkeypatch)
    assert bool(count) == (name not in BY_CSV)
    for rows in (1, 2, 7, 100, 1000):
        both(path, monkeypatch, rows)
    both(path, monkeypatch, 100, decimal=",")
    packed = tmp_path / "b.csv.gz"
    packed.write_bytes(gzip.compress(content))
    assert [str(part).replace("b.csv.gz", "a.csv") for part in both(packed, monkeypatch)] == [
        str(part) for part in whole
    ]
    packed.write_bytes(gzip.compress(content)[:-9])
    both(packed, monkeypatch)
    both(packed, monkeypatch, 2)


def test_random_files_are_read_as_by_csv(tmp_path, monkeypatch, count):
    draw, path = random.Random(0), tmp_path / "a.csv"
    monkeypatch.setattr(texts, "BLOCK", 64)
    signs = [
        "a",
        '"',
        '""',
        ",",
        ",",
        "\n",
        "\n",
        "\r\n",
        " ",
        'b"',
        "\x0b",
        "é",
        "\\",
        "'",
        "#",
        "1",
    ]
    for _ in range(400):
        path.write_text(
            "h,k\n" + "".join(draw.choices(signs, k=draw.randint(1, 40))),
            encoding="utf-8",
            newline="",
        )
        for rows in (None, 2):
            both(path, monkeypatch, rows)
    assert len(count) > 50


@pytest.mark.parametrize("seekable", [True, False])
@pytest.mark.parametrize("rows", [None, 100])
def test_standard_input_is_read_as_by_csv(rows, seekable, monkeypatch, count):
    class Pipe(io.BytesIO):
        def seekable(self):
            return seekable

    def found(content):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(Pipe(content.encode())))
        return parts_of("-", rows)

    contents = (FILES["long"], FILES["long, short row at the end"])
    by_arrow = [found(content) for content in contents]
    assert bool(count) == (seekable or rows is None)
    monkeypatch.setattr(reading, "read_arrow_columns", different)
    assert by_arrow == [found(content) for content in contents]


def test_reading_can_stop_after_a_part(tmp_path, count):
    path = tmp_path / "a.csv"
    path.write_text("n,t\n" + LONG * 50)
    parts = read_parts(path, rows=10)
    assert next(parts).get_cells("n") == [str(i) for i in range(10)]
    parts.close()
    assert read_table(path).rows == 20_000


def test_csv_reads_large_files_without_pyarrow(tmp_path, monkeypatch):
    path = tmp_path / "a.csv"
    path.write_text("n,t\n" + LONG * 400)
    assert isinstance(read_table(path).cells["n"], Texts)
    for module in ("pyarrow", "pyarrow.csv"):
        monkeypatch.setitem(sys.modules, module, None)
    table = read_table(path)
    assert isinstance(table.cells["n"], list)
    assert table.rows == 160_000


def test_plans_do_not_depend_on_who_reads(tmp_path, monkeypatch, count):
    rng, path = np.random.default_rng(0), tmp_path / "a.csv"
    n = 300
    with path.open("w", newline="", encoding="utf-8") as stream:
        rows = csv.writer(stream)
        rows.writerow(["x", "gaps", "price", "city", "flag", "when", "y"])
        for i in range(n):
            gap = "" if rng.random() < 0.3 else f"{rng.normal():.4f}"
            city, flag = (
                rng.choice(["New York", "Zürich", 'a "b", c', "NA"]),
                rng.choice(["yes", "no"]),
            )
            rows.writerow(
                [rng.normal(), gap, f"${1000 + i:,}.50", city, flag, f"2024-01-{1 + i % 28:02d}", i]
            )
    found = []
    for read in (reading.read_arrow_columns, different):
        monkeypatch.setattr(reading, "read_arrow_columns", read)
        table = read_table(path)
        plan = make_plan(table, {"y"})
        found.append((plan.as_json(), plan.encode(table)))
    (plan, one), (expected, other) = found
    assert plan == expected
    assert np.array_equal(one.values, other.values)
    assert one.notes.tolist() == other.notes.tolist()
    assert (one.missing, one.unknown) == (other.missing, other.unknown)
    assert set(one.notes) == {"", "gaps: missing", "city: missing", "gaps: missing; city: missing"}


@pytest.mark.parametrize(
    ("cells", "levels", "codes"),
    [
        (["b", None, "a", "b"], ["b", None, "a"], [0, 1, 2, 0]),
        ([1, True, 1.0, "1"], [1, True, 1.0, "1"], [0, 1, 2, 3]),  # equal, but of different types
        (np.array(["a", "a"], dtype=object), ["a"], [0, 0]),
        ([], [], []),
    ],
)
def test_only_texts_are_compared_to_find_distinct_cells(cells, levels, codes):
    found, positions = find_distinct_cells(cells)
    assert list(found) == levels
    assert positions.tolist() == codes
