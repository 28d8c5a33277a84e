"""What people meet at the command: their files, their columns, their typing errors, and Ctrl-C."""

import csv
import gzip
import json
import signal
import subprocess
import sys
import time
from importlib.util import find_spec

import numpy as np
import pandas
import pyarrow.parquet
import pytest
from typer.testing import CliRunner

import ssla
from ssla import _checks
from ssla.sklearn import load
from ssla.tables.cli.app import app
from ssla.tables.columns import TableError, read_table
from ssla.tables.scoring.answer_columns import choose_separator

RUN = CliRunner()
COMMANDS = ["train", "predict", "evaluate", "sensitivity", "report", "cost", "demo", "reproduce"]


def call(*arguments, data=None):
    return RUN.invoke(app, [str(a) for a in arguments], input=data)


def good(*arguments, data=None):
    done = call(*arguments, "--json", data=data)
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)


def words(done):
    return " ".join(done.output.split())


def frame(rows=60, seed=0):
    rng = np.random.default_rng(seed)
    x, kind = rng.normal(size=rows).round(3), rng.choice(["cat", "dog", "eel"], rows)
    y = (1500 + 900 * x + 300 * (kind == "cat") + 40 * rng.normal(size=rows)).round(1)
    return pandas.DataFrame(
        {"id": [f"{i:04d}" for i in range(rows)], "x": x, "kind": kind, "mean": y}
    )


def rows_of(path):
    with path.open(newline="", encoding="utf-8") as stream:
        return list(csv.DictReader(stream))


@pytest.fixture(scope="module")
def room(tmp_path_factory):
    """A table whose target is called like an output, and models of its numbers and of its
    classes.
    """
    room = tmp_path_factory.mktemp("command")
    frame().to_csv(room / "data.csv", index=False)
    good(
        "train",
        room / "data.csv",
        "-t",
        "mean",
        "-o",
        room / "numbers",
        "--drop",
        "id",
        "--max-epochs",
        5,
    )
    good(
        "train",
        room / "data.csv",
        "-t",
        "kind",
        "-o",
        room / "classes",
        "--drop",
        "id",
        "--max-epochs",
        5,
    )
    return room


def test_the_version_is_shown_without_torch():
    code = "import sys; from ssla.tables.cli import main; sys.argv = ['ssla', '--version']"
    code += "\ntry: main()\nfinally: assert 'torch' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stdout.split()) == (0, ["ssla", ssla.__version__]), done.stderr


def test_kept_columns_are_the_cells_as_they_were_read(room, tmp_path):
    names = ["--keep", "id", "--keep", "kind", "--keep", "mean"]
    done = call("predict", room / "numbers", room / "data.csv", "-o", tmp_path / "out.csv", *names)
    assert done.exit_code == 0
    assert (
        "note: The kept column 'mean' is written as 'input_mean', because 'mean' is an output."
        in words(done)
    )
    written, source = rows_of(tmp_path / "out.csv"), rows_of(room / "data.csv")
    assert list(written[0])[:4] == ["id", "kind", "input_mean", "mean"]
    assert [row["id"] for row in written] == [row["id"] for row in source]  # 0000, not 0
    assert [row["input_mean"] for row in written] == [row["mean"] for row in source]
    assert [row["mean"] for row in written] != [row["mean"] for row in source]


def test_kept_columns_of_a_parquet_file_keep_their_types(room, tmp_path):
    table = frame(5).assign(
        when=pandas.Timestamp("2024-02-29"), part=[None, 1, 2, 3, 4], parts=[[1, 2]] * 5
    )
    table.to_parquet(tmp_path / "new.parquet")
    keep = [part for name in ("when", "parts", "id") for part in ("--keep", name)]
    good(
        "predict", room / "numbers", tmp_path / "new.parquet", "-o", tmp_path / "out.parquet", *keep
    )
    found = pyarrow.parquet.read_table(tmp_path / "out.parquet").to_pydict()
    assert found["when"] == list(table["when"])
    assert found["parts"] == [[1, 2]] * 5
    assert found["id"] == list(table["id"])


def test_an_unknown_column_to_keep_is_refused_before_the_work(room, tmp_path):
    done = call(
        "predict", room / "numbers", room / "data.csv", "-o", tmp_path / "out.csv", "--keep", "ID"
    )
    assert done.exit_code == 1
    assert "no column 'ID'. Did you mean 'id'?" in words(done)
    assert not list(tmp_path.iterdir())


def test_prefixes_go_on_until_the_name_is_free(room, tmp_path):
    frame(4).assign(input_mean=range(4)).to_csv(tmp_path / "new.csv", index=False)
    keep = ("--keep", "mean", "--keep", "input_mean")
    assert (
        call(
            "predict", room / "numbers", tmp_path / "new.csv", "-o", tmp_path / "out.csv", *keep
        ).exit_code
        == 0
    )
    written = rows_of(tmp_path / "out.csv")
    assert [row["input_mean"] for row in written] == ["0", "1", "2", "3"]
    assert [float(row["input_input_mean"]) for row in written] == list(frame(4)["mean"])


def test_columns_carry_their_level_and_epistemic_is_a_standard_deviation(room, tmp_path):
    levels = (0.5, 0.95, 0.975, 0.5)
    options = [part for level in levels for part in ("--level", level)]
    facts = good(
        "predict", room / "numbers", room / "data.csv", "-o", tmp_path / "out.parquet", *options
    )
    assert facts["levels"] == [0.5, 0.95, 0.975]
    found = {
        k: np.array(v)
        for k, v in pyarrow.parquet.read_table(tmp_path / "out.parquet").to_pydict().items()
    }
    assert [name for name in found if "er_" in name] == [
        f"{e}_{n}" for n in ("50", "95", "97.5") for e in ("lower", "upper")
    ]
    p = load(room / "numbers").predict_dist(read_table(room / "data.csv"))
    np.testing.assert_allclose(found["upper_97.5"], p.icdf(0.9875).numpy(), rtol=1e-12)
    np.testing.assert_allclose(found["lower_95"], found["q0.025"], rtol=1e-9)
    np.testing.assert_allclose(
        found["sd"] ** 2 - found["epistemic"] ** 2, p.aleatoric.numpy(), rtol=1e-9
    )
    assert (found["epistemic"] < found["sd"]).all()


def test_one_level_is_95_and_a_wrong_one_among_many_is_refused(room, tmp_path):
    assert good("predict", room / "numbers", room / "data.csv", "-o", tmp_path / "out.csv")[
        "levels"
    ] == [0.95]
    done = call(
        "predict",
        room / "numbers",
        room / "data.csv",
        "-o",
        tmp_path / "o.csv",
        "--level",
        0.5,
        "--level",
        90,
    )
    assert "For 90% write 0.9" in words(done)
    assert not (tmp_path / "o.csv").exists()


def test_sets_of_classes_are_the_smallest_that_hold_the_level(room, tmp_path):
    facts = good(
        "predict",
        room / "classes",
        room / "data.csv",
        "-o",
        tmp_path / "out.csv",
        "--level",
        0.5,
        "--level",
        0.9,
        "--level",
        0.999,
    )
    assert facts["set_separator"] == "|"
    sizes = set()
    for row in rows_of(tmp_path / "out.csv"):
        probs = {name[2:-1]: float(value) for name, value in row.items() if name.startswith("p(")}
        ranked = sorted(probs, key=probs.get, reverse=True)
        assert row["label"] == ranked[0]
        for name, level in (("set_50", 0.5), ("set_90", 0.9), ("set_99.9", 0.999)):
            size = next(k for k in range(1, 4) if sum(probs[c] for c in ranked[:k]) >= level)
            assert set(row[name].split("|")) == set(ranked[:size])
            sizes.add(size)
    assert len(sizes) > 1


def test_the_separator_of_a_set_is_in_no_label():
    assert [
        choose_separator(labels) for labels in (["a", "b"], ["a|b", "c"], ["|;", ",/&+~^"])
    ] == [
        "|",
        ";",
        "\x1f",
    ]


@pytest.mark.parametrize("head", ["", "Unnamed: 0", "__index_level_0__"])
def test_an_index_of_pandas_is_no_input_and_a_note_says_so(tmp_path, head):
    table = frame(30).drop(columns="id")
    table.to_csv(tmp_path / "data.csv", index_label=head)
    done = call(
        "train",
        tmp_path / "data.csv",
        "-t",
        "mean",
        "-o",
        tmp_path / "model",
        "--max-epochs",
        1,
        "--likelihood",
        "gaussian",
    )
    assert done.exit_code == 0, done.output
    name = head or "Unnamed: 0"
    assert f"the column '{name}' is treated as a row index and is not an input" in words(done)
    assert load(tmp_path / "model").feature_names_in_.tolist() == ["x", "kind"]
    good(
        "predict",
        tmp_path / "model",
        tmp_path / "data.csv",
        "-o",
        tmp_path / "out.csv",
        "--keep",
        name,
    )
    assert [row[name] for row in rows_of(tmp_path / "out.csv")] == [str(i) for i in range(30)]


@pytest.mark.filterwarnings("ignore:.*row index")
def test_an_index_that_was_written_twice_is_read(tmp_path):
    (tmp_path / "data.csv").write_text(",Unnamed: 0,a\n0,0,5\n1,1,6\n")
    table = read_table(tmp_path / "data.csv")
    assert table.names == ["a"]
    assert list(table.cells) == ["Unnamed: 0.1", "Unnamed: 0", "a"]


def test_the_same_table_is_read_from_every_kind_of_file(tmp_path, monkeypatch):
    table = frame(12)
    table.to_csv(tmp_path / "plain.csv", index=False)
    table.to_csv(tmp_path / "tight.csv.gz", index=False)
    table.to_csv(tmp_path / "bars.txt", index=False, sep="|")
    table.to_csv(tmp_path / "tabs.tsv.gz", index=False, sep="\t")
    expected = read_table(tmp_path / "plain.csv").cells
    for name in ("tight.csv.gz", "bars.txt", "tabs.tsv.gz"):
        assert read_table(tmp_path / name).cells == expected, name
    with (tmp_path / "plain.csv").open() as stream:
        monkeypatch.setattr("sys.stdin", stream)
        assert read_table("-").cells == expected


def test_standard_input_can_be_the_data_of_every_command(room, tmp_path):
    data = (room / "data.csv").read_text()
    assert (
        good(
            "train",
            "-",
            "-t",
            "mean",
            "-o",
            tmp_path / "m",
            "--drop",
            "id",
            "--max-epochs",
            1,
            data=data,
        )["rows"]
        == 60
    )
    assert (
        good("predict", room / "numbers", "-", "-o", tmp_path / "out.csv", data=data)["rows"] == 60
    )
    assert good("evaluate", room / "numbers", "-", data=data) == good(
        "evaluate", room / "numbers", room / "data.csv"
    )
    assert "no column 'kind'" in words(
        call("predict", room / "numbers", "-", "-o", tmp_path / "o.csv", data="x\n1\n")
    )
    assert "standard input is empty" in words(call("cost", "-", "-t", "mean", data=""))


HEADERS = {
    "commas in quotes": ('"size, m";"price, k";c\n1;2;3\n', ["size, m", "price, k", "c"]),
    "commas without quotes": ("size, a, b;price\n1;2\n3;4\n", ["size, a, b", "price"]),
    "line break in quotes": ('"a,\nb,c,d";e\n1;2\n', ["a,\nb,c,d", "e"]),
    "bars in a comma file": ("a|b|c,d\n1|2|3,4\n1,5\n", ["a|b|c", "d"]),
    "decimal commas": ("x;y\n1,5;2,5\n", ["x", "y"]),
    "one column": ("x\n1,5\n2,5\n", ["x"]),
    "an inch": ('5" pipe,price\n1,2\n', ['5" pipe', "price"]),
}


@pytest.mark.parametrize("name", HEADERS)
def test_the_delimiter_is_found(tmp_path, name):
    text, names = HEADERS[name]
    (tmp_path / "data.csv").write_text(text)
    assert read_table(tmp_path / "data.csv").names == names


def test_a_mark_of_numbers_is_no_delimiter_if_another_one_fits(tmp_path):
    (tmp_path / "data.csv").write_text("x, in m;y, in s\n1,5;2,5\n")
    assert read_table(tmp_path / "data.csv", decimal=",").names == ["x, in m", "y, in s"]
    (tmp_path / "data.csv").write_text('x,y\n"1,5","2,5"\n')
    assert read_table(tmp_path / "data.csv", decimal=",").interpret_column("y").values.tolist() == [
        2.5
    ]


NUMBERS = [
    ("1,5", ",", "", 1.5),
    ("-1.234.567,25", ",", ".", -1234567.25),
    ("1,5e3", ",", "", 1500.0),
    ("1,234.5", ".", ",", 1234.5),
    ("1 234,5", ",", " ", 1234.5),
    ("1\u202f234,5", ",", " ", 1234.5),
    ("1'234.5", ".", "'", 1234.5),
    ("12", ",", ".", 12.0),
    ("1.5", ",", ".", None),  # not 15
    ("1.5", ",", "", None),
    ("1.2345", ",", ".", None),
    ("1,5", ".", ",", None),
    ("1,5,5", ",", "", None),
]


@pytest.mark.parametrize(("cell", "decimal", "thousands", "value"), NUMBERS)
def test_numbers_in_the_marks_of_other_countries(tmp_path, cell, decimal, thousands, value):
    (tmp_path / "data.csv").write_text(f"a|b\n{cell}|x\n")
    table = read_table(tmp_path / "data.csv", decimal, thousands)
    if cell == "1,5,5":
        assert table.interpret_column("a").kind == "text"
    elif value is None:
        with pytest.raises(TableError, match="is not in the format"):
            table.interpret_column("a")
    else:
        assert table.interpret_column("a").values.tolist() == [value]


def test_the_marks_of_training_hold_for_later_tables(room, tmp_path):
    table = frame()
    written = table.assign(
        **{
            n: [f"{v:,.3f}".translate(str.maketrans(",.", ".,")) for v in table[n]]
            for n in ("x", "mean")
        }
    )
    assert "." in written["mean"][0] and "," in written["mean"][0]  # noqa: PT018
    written.to_csv(tmp_path / "data.csv", index=False, sep=";")
    marks = ("--decimal", ",", "--thousands", ".")
    options = ("-t", "mean", "--drop", "id")
    good(
        "train",
        tmp_path / "data.csv",
        *options,
        "-o",
        tmp_path / "model",
        "--max-epochs",
        5,
        *marks,
    )
    ours, plain = tmp_path / "data.csv", room / "data.csv"
    expected = good("evaluate", room / "numbers", plain)
    assert good("evaluate", tmp_path / "model", ours) == expected  # the marks are in the model
    assert good("evaluate", tmp_path / "model", plain, "--decimal", ".") == expected
    assert good("evaluate", room / "numbers", ours, *marks) == expected
    for command in (("predict", "-o", tmp_path / "out.csv"), ("sensitivity",)):
        name, *rest = command
        assert good(name, tmp_path / "model", ours, *rest) == good(
            name, room / "numbers", plain, *rest
        )
    cost = [good("cost", *arguments) for arguments in ((ours, *options, *marks), (plain, *options))]
    assert len({(c["rows"], c["inputs"], c["cost"]) for c in cost}) == 1
    done = call("evaluate", room / "numbers", ours)
    assert done.exit_code == 1
    assert "held numbers at training, but row 1 of" in words(done)


@pytest.mark.parametrize(("decimal", "thousands"), [(";", ""), (",", ","), (".", "."), (".", "x")])
def test_impossible_marks_are_refused(tmp_path, decimal, thousands):
    (tmp_path / "data.csv").write_text("a\n1\n")
    with pytest.raises(TableError, match="mark"):
        read_table(tmp_path / "data.csv", decimal, thousands)


BYTES = {
    "latin.csv": (
        "näme,y\n1,2\n".encode("latin-1"),
        "line 1: the byte 0xe4 is not UTF-8 text.*iconv -f WINDOWS-1252 -t UTF-8",
    ),
    "later.csv": (b"a,y\n" + b"1,2\n" * 9000 + b"\xe4,2\n", "line 9002"),
    "wide.csv": ("a,y\n1,2\n".encode("utf-16"), "is UTF-16 text.*iconv -f UTF-16 -t UTF-8"),
    "bare.csv": ("a,y\n1,2\n".encode("utf-16-le"), "NUL byte.*UTF-8"),
    "short.csv.gz": (
        gzip.compress(b"a,y\n" + bytes(range(48, 90)) * 50)[:-12],
        "not a complete gzip file",
    ),
    "plain.csv.gz": (b"a,y\n1,2\n", "not a complete gzip file"),
    "none.csv.gz": (gzip.compress(b""), "is empty"),
    "old.xls": (b"", "'.xls'; only .csv, .*Save the table"),
}


@pytest.mark.parametrize("name", BYTES)
def test_files_that_cannot_be_read_say_what_to_do(tmp_path, name):
    data, match = BYTES[name]
    (tmp_path / name).write_bytes(data)
    with pytest.raises(TableError, match=match):
        read_table(tmp_path / name)


def test_excel_gives_the_same_cells_as_parquet(tmp_path):
    pytest.importorskip("openpyxl")
    table = frame(12).assign(gap=[None, 1.5] * 6, whole=range(12), flag=[True, False] * 6)
    table.to_parquet(tmp_path / "data.parquet")
    table.to_excel(tmp_path / "data.xlsx", index=False)
    excel, parquet = read_table(tmp_path / "data.xlsx"), read_table(tmp_path / "data.parquet")
    assert excel.names == parquet.names
    for name in parquet.names:
        left, right = excel.interpret_column(name), parquet.interpret_column(name)
        assert left.kind == right.kind, name
        np.testing.assert_array_equal(left.values, right.values)
    table.to_excel(tmp_path / "indexed.xlsx")
    with pytest.warns(UserWarning, match="row index"):
        assert read_table(tmp_path / "indexed.xlsx").names == parquet.names


def test_what_excel_leaves_out_is_noted(tmp_path):
    openpyxl = pytest.importorskip("openpyxl")
    book = openpyxl.Workbook()
    for row in (["a", "b", None], [None] * 3, [1, "=A3+1", None], [2, 5, None]):
        book.active.append(row)
    book.create_sheet("more")
    book.save(tmp_path / "data.xlsx")
    with (
        pytest.warns(UserWarning, match="1 formulas have no stored value"),
        pytest.warns(UserWarning, match="only the first sheet 'Sheet' is read, not more"),
    ):
        table = read_table(tmp_path / "data.xlsx")
    assert table.cells == {"a": [1, 2], "b": [None, 5]}
    (tmp_path / "bad.xlsx").write_bytes(b"a,b\n1,2\n")
    with pytest.raises(TableError, match="not a readable Excel file"):
        read_table(tmp_path / "bad.xlsx")


def test_without_openpyxl_the_error_names_the_extra(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "openpyxl", None)
    (tmp_path / "data.xlsx").write_bytes(b"")
    with pytest.raises(TableError, match=r"pip install 'ssla\[excel\]'"):
        read_table(tmp_path / "data.xlsx")


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("KFAC", "kfac"),
        ("Low_Rank", "low_rank"),
        ("dens", "dense"),
        ("DIAGONAL", "diag"),
        ("xyz", ""),
        ("", ""),
    ],
)
def test_hints_are_by_likeness_without_regard_to_case(name, hint):
    text = _checks.unknown_name("structure", name, ["dense", "kfac", "diag", "low_rank"])
    assert (f"Did you mean {hint!r}?" in text) if hint else ("Did you mean" not in text)


def test_commands_options_columns_and_values_have_the_hint(room, tmp_path):
    train = ("train", room / "data.csv", "-o", tmp_path / "m")
    for arguments, hint in [
        (("tarin",), "'train'"),
        (("predict", "a", "b", "-o", "c", "--Level", 0.9), "--level"),
        ((*train, "-t", "MEAN"), "'mean'"),
        ((*train, "-t", "mean", "--likelihood", "GAUSSIAN"), "'gaussian'"),
        (("evaluate", room / "numbers", room / "data.csv", "--refit", "NEWTON"), "'newton'"),
        (("cost", room / "data.csv", "-t", "mean", "--structure", "KFAC"), "'kfac'"),
    ]:
        done = call(*arguments)
        assert done.exit_code
        assert hint in words(done), done.output


def interrupted_at(arguments, marker):
    """The command is stopped by SIGINT when it begins to import `marker`; (exit code, standard
    error).
    """
    code = f"""
import signal, sys, time
signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background starts with it ignored
class Slow:
    def find_spec(self, name, path=None, target=None):
        if name == {marker!r}:
            sys.stdout.write("here\\n"); sys.stdout.flush(); time.sleep(20)
sys.meta_path.insert(0, Slow())
sys.argv = {["ssla", *map(str, arguments)]!r}
from ssla.tables.cli import main
main()
"""
    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout.readline() == "here\n"
        time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        _, text = process.communicate(timeout=15)
    return process.returncode, text


@pytest.mark.parametrize(
    "marker", ["typer", "rich.table", "typer._adapters", "torch", "ssla.tables.cli.train"]
)
def test_ctrl_c_while_importing_is_one_line(room, tmp_path, marker):
    if find_spec(marker) is None:
        pytest.skip(f"this version has no {marker}")
    code, text = interrupted_at(
        ("train", room / "data.csv", "-t", "mean", "-o", tmp_path / "model"), marker
    )
    assert (code, text.strip()) == (130, "Interrupted. Nothing was written.")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("command", COMMANDS)
def test_help_has_an_example_and_fits_80_columns(command):
    done = RUN.invoke(app, [command, "--help"], env={"COLUMNS": "80", "TERMINAL_WIDTH": "80"})
    assert done.exit_code == 0
    assert f"Example: ssla {command} " in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 80


def test_the_help_of_predict_names_every_output_column(room, tmp_path):
    text = call("predict", "--help").stdout
    for model in ("numbers", "classes"):
        good("predict", room / model, room / "data.csv", "-o", tmp_path / "out.csv")
        for name in rows_of(tmp_path / "out.csv")[0]:
            shown = (
                "p(...)"
                if name.startswith("p(")
                else "q0.025 ... q0.975"
                if name.startswith("q0")
                else name
            )
            assert shown in text, name


def test_outputs_that_cannot_be_written_are_refused_before_the_work(room, tmp_path, monkeypatch):
    def work(*_, **__):
        raise AssertionError("the work was begun")

    monkeypatch.setattr("ssla.tables.cli.work.read_table", work)
    monkeypatch.setattr("ssla.tables.cli.work.read_parts", work)
    monkeypatch.setattr("ssla.demo.draw_toy_data", work)
    (tmp_path / "file").write_text("")
    for arguments in [
        ("train", room / "data.csv", "-t", "mean", "-o"),
        ("predict", room / "numbers", room / "data.csv", "-o"),
        ("demo", "-o"),
    ]:
        done = call(*arguments, tmp_path / "file" / "deeper" / "out.csv")
        assert done.exit_code == 1
        assert "is a file and not a folder" in words(done)
    assert "must end in one of .png" in words(call("demo", "-o", tmp_path / "picture.txt"))
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
    monkeypatch.setattr("os.access", lambda *_: False)
    with pytest.raises(ValueError, match="no permission to write to"):
        _checks.check_writable(tmp_path / "deeper" / "out.csv")


def test_the_demo_names_a_missing_matplotlib_before_the_work(tmp_path, monkeypatch):
    def work(*_, **__):
        raise AssertionError("the work was begun")

    monkeypatch.setattr("ssla.demo.draw_toy_data", work)
    monkeypatch.setitem(sys.modules, "matplotlib.pyplot", None)
    done = call("demo", "-o", tmp_path / "folder" / "demo.png")
    assert done.exit_code == 1
    assert "Plots need matplotlib: pip install 'ssla[plots]'." in words(done)
    assert not list(tmp_path.iterdir())


def test_json_is_one_object_without_colours_or_notes(room, tmp_path, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    frame(20).to_csv(tmp_path / "data.csv")  # with an index: a note
    data, model = tmp_path / "data.csv", room / "numbers"
    for arguments in [
        (
            "train",
            data,
            "-t",
            "mean",
            "-o",
            tmp_path / "m",
            "--max-epochs",
            1,
            "--likelihood",
            "gaussian",
        ),
        ("predict", model, data, "-o", tmp_path / "out.csv"),
        ("evaluate", model, data),
        ("sensitivity", model, data),
        ("report", model),
        ("cost", data, "-t", "mean"),
    ]:
        done = call(*arguments, "--json")
        assert done.exit_code == 0, done.output
        assert isinstance(json.loads(done.stdout), dict)
        assert ("row index" in done.stderr) == (data in arguments)
    assert set(json.loads(call("report", tmp_path / "nothing", "--json").stdout)) == {"error"}


def test_json_has_no_nan_and_text_has_no_markup(capsys):
    from ssla.tables.cli.console import print_values

    print_values({"a": float("nan"), "b": {"c": [float("inf"), 1.5]}}, as_json=True)
    assert json.loads(capsys.readouterr().out, parse_constant=pytest.fail) == {
        "a": None,
        "b": {"c": [None, 1.5]},
    }
    print_values({"left_out": {"[bold]size[/bold]": "constant"}}, as_json=False)
    assert "[bold]size[/bold]: constant" in capsys.readouterr().out
