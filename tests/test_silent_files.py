"""Files that are complete at every instant, forged files that are refused, output that a spreadsheet does not execute."""

import contextlib
import csv
import json
import os
import stat
import subprocess
import sys
import textwrap
import threading
import time

import numpy as np
import pytest
import torch

from ssla import replacing
from ssla.paper.runner import Claim, Task, Workplace, run
from ssla.paper.tables import Table
from ssla.persistence import FileError, container, read, write
from ssla.tables import write_table

KIND = "posterior"


def save(path, number):
    """A model that is consistent only if its two files are of one save."""
    return write(path, KIND, {"number": number}, {"t": torch.full((50,), float(number))})


def number_at(path):
    content, tensors = read(path, KIND)
    assert bool((tensors["t"] == content["number"]).all())
    return content["number"]


@pytest.fixture(params=["exchange", "two renames"])
def way(request, monkeypatch):
    """Both ways of replacing a directory: the atomic exchange, and systems without it."""
    monkeypatch.setattr(os, "fsync", lambda _: None)  # slow, and only a power cut could show it
    if request.param == "two renames":
        monkeypatch.setattr(replacing, "_renameat2", None)
    elif replacing._renameat2 is None:
        pytest.skip("this system has no exchange of two directories")
    return request.param


class Interrupting:
    """Raises KeyboardInterrupt at one line of the code that saves, counted over all of its modules."""

    files = (replacing.__file__, container.__file__, contextlib.__file__)

    def __init__(self, at):
        self.at, self.seen = at, 0

    def __call__(self, frame, event, _):
        if frame.f_code.co_filename not in self.files:
            return None
        if event == "line":
            self.seen += 1
            if self.seen == self.at:
                raise KeyboardInterrupt
        return self


def interrupted_save(path, number, at):
    """Whether the save had more lines than `at`: it was interrupted at one."""
    before = sys.gettrace()
    sys.settrace(Interrupting(at))
    try:
        save(path, number)
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(before)
    return False


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_an_interrupt_at_any_line_of_a_save_leaves_a_complete_model_at_the_path(way, tmp_path):
    outcomes = set()
    for at in range(1, 1000):
        path = save(tmp_path / str(at) / "model", 0)
        if not interrupted_save(path, 1, at):
            break
        assert sorted(os.listdir(path)) == ["manifest.json", "tensors.safetensors"], at
        outcomes.add(number_at(path))
        save(path, 2)
    assert 100 < at < 999
    assert outcomes == {0, 1}  # both sides of the exchange were interrupted
    assert number_at(path) == 1
    assert not list(tmp_path.glob("*/.*")), "the next save removes what an interrupted one left"


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("name", ["mkdir", "rename", "replace", "fsync", "open", "close", "rmdir", "unlink", "scandir"])
@pytest.mark.parametrize("after", [False, True])
def test_an_interrupt_beside_any_system_call_leaves_a_complete_model(name, after, way, tmp_path, monkeypatch):
    path, real = save(tmp_path / "model", 0), getattr(os, name)
    for at in range(1, 40):
        calls = iter(range(1, 1000))

        def call(*arguments, at=at, calls=calls, **options):
            now = next(calls) == at
            if now and not after:
                raise KeyboardInterrupt
            result = real(*arguments, **options)
            if now:
                raise KeyboardInterrupt
            return result

        with monkeypatch.context() as patch:
            patch.setattr(os, name, call)
            try:
                save(path, 1)
            except KeyboardInterrupt:
                ended = False
            else:
                ended = True
        assert number_at(path) in (0, 1)
        if ended:
            break
        save(path, 0)
    assert ended


CHILD = """
    import importlib.util, os, signal, sys
    from pathlib import Path

    spec = importlib.util.spec_from_file_location("replacing", {file!r})  # the package itself is slow to import
    replacing = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(replacing)
    if {way!r} == "two renames":
        replacing._renameat2 = None
    MODELS = {models!r}

    def save(path, number):
        with replacing.new_folder(Path(path)) as draft:
            for name, data in MODELS[number].items():
                (draft / name).write_bytes(data)
"""
KILLED = """
    class Killing:
        def __init__(self, at):
            self.at = at

        def __call__(self, frame, event, _):
            if frame.f_code.co_filename not in ({file!r}, "<string>"):
                return None
            self.at -= event == "line"
            if not self.at:
                os.kill(os.getpid(), signal.SIGKILL)
            return self

    at, status = 0, 1
    while status:
        at += 1
        path = os.path.join({folder!r}, str(at), "model")
        save(path, 0)
        child = os.fork()
        if not child:
            sys.settrace(Killing(at))
            save(path, 1)
            os._exit(0)
        status = os.waitpid(child, 0)[1]
    print(at)
"""
WRITER = """
    for number in range(100):
        save({folder!r} + "/model", number % 3)
"""


def started(code, way, folder):
    """Another process that writes models to the folder."""
    made = [save(folder.with_name(f"{folder.name}-made") / str(number), number) for number in range(3)]
    models = [{file.name: file.read_bytes() for file in model.iterdir()} for model in made]
    text = textwrap.dedent(CHILD + code).format(file=replacing.__file__, way=way, models=models, folder=str(folder))
    return subprocess.Popen([sys.executable, "-c", text], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_a_kill_at_any_line_of_a_save_leaves_a_complete_model(way, tmp_path):
    process = started(KILLED, way, tmp_path)
    out, error = process.communicate()
    assert process.returncode == 0, error[-800:]
    count, outcomes, moved = int(out), set(), 0
    assert count > 40
    for at in range(1, count + 1):
        path = tmp_path / str(at) / "model"
        if path.exists():
            outcomes.add(number_at(path))
        else:  # only between two renames: the reader finds the old one and says so, the next save puts it back
            moved += 1
            with pytest.warns(UserWarning, match=r"The last save to .* was interrupted"):
                assert number_at(path) == 0
            with pytest.raises(RuntimeError), replacing.new_folder(path):
                raise RuntimeError
            assert number_at(path) == 0
        save(path, 2)
        assert number_at(path) == 2
    assert outcomes == {0, 1}
    assert (moved > 0) == (way == "two renames")
    assert not list(tmp_path.glob("*/.*")), "the next save removes what a killed one left"


def in_threads(*works):
    """Run until the first error, or the end of all."""
    faults = []

    def guarded(work):
        try:
            work()
        except BaseException as error:
            faults.append(error)

    threads = [threading.Thread(target=guarded, args=(work,)) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not faults, faults


def test_readers_beside_writers_read_complete_models(way, tmp_path):
    path, until, reads = save(tmp_path / "model", 0), time.monotonic() + 2, []

    def writer(start):
        number = start
        while time.monotonic() < until:
            save(path, number)
            number += 2

    def reader():
        while time.monotonic() < until:
            reads.append(number_at(path))

    in_threads(lambda: writer(0), lambda: writer(1), reader, reader)
    assert len(set(reads)) > 10
    assert number_at(path) >= 0
    assert os.listdir(tmp_path) == ["model"]


def test_writers_in_several_processes_leave_one_complete_model(way, tmp_path):
    processes = [started(WRITER, way, tmp_path) for _ in range(3)]
    reads = set()
    while any(process.poll() is None for process in processes):
        if (tmp_path / "model").exists():
            reads.add(number_at(tmp_path / "model"))
    assert [process.communicate()[1] for process in processes] == ["", "", ""]
    assert reads == {0, 1, 2}
    assert number_at(tmp_path / "model") == 0  # each wrote it last
    assert os.listdir(tmp_path) == ["model"]


def test_the_draft_of_a_living_writer_is_not_removed(way, tmp_path):
    path = save(tmp_path / "model", 0)
    with replacing.new_folder(path) as draft:
        (draft / "mine").write_text("")
        save(path, 1)
        assert (draft / "mine").exists()
        assert number_at(path) == 1
    assert os.listdir(path) == ["mine"]


def test_a_foreign_name_beside_a_model_is_left_alone(tmp_path):
    for name in (".model-abc", ".model.saving.txt", ".models.1.saving", "model.1.saving"):
        (tmp_path / name).mkdir()
    save(tmp_path / "model", 0)
    assert len(os.listdir(tmp_path)) == 5


def test_a_damaged_model_is_an_error_beside_no_writer(tmp_path):
    path = save(tmp_path / "model", 0)
    (path / "tensors.safetensors").write_bytes(b"")
    with pytest.raises(FileError, match="truncated"):
        number_at(path)


def test_a_link_to_a_model_stays_a_link(way, tmp_path):
    (tmp_path / "store").mkdir()
    save(tmp_path / "store" / "v1", 0)
    (tmp_path / "current").symlink_to(tmp_path / "store" / "v1")
    save(tmp_path / "current", 1)
    assert (tmp_path / "current").is_symlink()
    assert number_at(tmp_path / "store" / "v1") == number_at(tmp_path / "current") == 1
    assert sorted(os.listdir(tmp_path)) == ["current", "store"]
    assert os.listdir(tmp_path / "store") == ["v1"]


def test_a_parent_that_cannot_be_written_is_our_error(tmp_path, monkeypatch):
    path = save(tmp_path / "model", 0)

    def refuse(*_, **__):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "mkdir", refuse)
    with pytest.raises(FileError, match=r"cannot be written .*Permission denied.* Nothing was changed"):
        save(path, 1)
    monkeypatch.undo()
    monkeypatch.chdir(path)
    with pytest.raises(FileError, match="current directory"):
        save(".", 1)
    assert number_at(path) == 0


def mode(path):
    return stat.S_IMODE(path.stat().st_mode)


@pytest.mark.parametrize("mask", [0o022, 0o077, 0o002])
def test_what_is_written_has_the_modes_of_the_umask(mask, tmp_path):
    before = os.umask(mask)
    try:
        model = save(tmp_path / "a" / "model", 0)
        with replacing.new_file(tmp_path / "table.csv") as draft:
            draft.write_text("")
        write_table(tmp_path / "out.csv", {"mean": np.zeros(1)})
    finally:
        os.umask(before)
    assert mode(tmp_path / "out.csv") == 0o666 & ~mask
    assert mode(model) == mode(model.parent) == 0o777 & ~mask
    assert {mode(file) for file in model.iterdir()} == {mode(tmp_path / "table.csv")} == {0o666 & ~mask}


def test_formulas_in_a_csv_are_escaped_and_numbers_are_not(tmp_path):
    texts = ["=1+1", "+cmd", "-2+3", "@SUM(A1)", "\tx", "\rx", "-1.5", "+3e-2", "-.5", "-", "-inf", "a=b", "", "yes"]
    columns = {"=HYPERLINK(A1)": np.array(texts, dtype=object), "n": -np.arange(len(texts)) / 2}
    write_table(tmp_path / "t.csv", columns)
    with (tmp_path / "t.csv").open(newline="", encoding="utf-8") as stream:
        head, *rows = csv.reader(stream)
    assert head == ["'=HYPERLINK(A1)", "n"]
    assert [row[0] for row in rows] == [
        *("'=1+1", "'+cmd", "'-2+3", "'@SUM(A1)", "'\tx", "'\rx"),
        *("-1.5", "+3e-2", "-.5", "'-", "'-inf", "a=b", "", "yes"),
    ]
    assert [float(row[1]) for row in rows] == columns["n"].tolist()


def one(value):
    return {"value": value}


class Study:
    """Two tasks, and a report that can fail between its two tables."""

    name, title = "two", "Two tables"

    def __init__(self, fault=None):
        self.fault = fault

    def tasks(self, quick):
        return [Task(str(i), one, {"value": i}) for i in range(2)]

    def report(self, records, folder):
        Table("first", "First.", ["n"], [[r["value"]] for r in records.values()], {}).write(folder)
        if self.fault is not None:
            raise self.fault
        Table("second", "Second.", ["n"], [[len(records)]], {}).write(folder)
        return [Claim("two", "2", "2", True)]


def contents(folder):
    return {file.name: file.read_text() for file in folder.iterdir()}


@pytest.mark.parametrize("fault", [KeyboardInterrupt(), OSError(28, "No space left on device")])
def test_a_report_that_fails_leaves_the_earlier_tables(fault, tmp_path):
    place = Workplace(tmp_path)
    run(Study(), place, progress=False)
    before = contents(place.results("two"))
    assert len(before) == 7
    with pytest.raises(type(fault)):
        run(Study(fault), place, progress=False)
    assert contents(place.results("two")) == before
    assert os.listdir(place.results("")) == ["two"]


def test_part_of_a_run_does_not_replace_the_tables_of_a_whole_one(tmp_path, monkeypatch):
    place = Workplace(tmp_path)
    run(Study(), place, progress=False)
    before = contents(place.results("two"))
    monkeypatch.setattr("ssla.__version__", "9")  # the records of the earlier version do not count
    place.keep("two", Study().tasks(False)[0], {"value": 5})
    with pytest.raises(ValueError, match=r"records of 1 of the 2 tasks .* Run the study to its end"):
        run(Study(), place, progress=False, work=False)
    assert contents(place.results("two")) == before
    run(Study(), place, progress=False)
    assert contents(place.results("two")) != before
    assert json.loads((place.results("two") / "summary.json").read_text())["done"] == [2, 2]
