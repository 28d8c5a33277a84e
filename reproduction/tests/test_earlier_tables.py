"""Tables of an earlier run stay until all new ones exist."""

import json
import os

import pytest

from ssla_paper.runner import Claim, Task, Workplace, run
from ssla_paper.tables import Table


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
    with pytest.raises(
        ValueError, match=r"records of 1 of the 2 tasks .* Run the study to its end"
    ):
        run(Study(), place, progress=False, work=False)
    assert contents(place.results("two")) == before
    run(Study(), place, progress=False)
    assert contents(place.results("two")) != before
    assert json.loads((place.results("two") / "summary.json").read_text())["done"] == [2, 2]
