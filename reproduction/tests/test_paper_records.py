"""The pages are those of the shipped records, and say which records are stale or missing."""

import gzip
import json
import shutil
from dataclasses import dataclass
from pathlib import Path

import pytest

from ssla_paper import __main__ as command
from ssla_paper import shipped
from ssla_paper.__main__ import list_studies, reproduce
from ssla_paper.page import _claim, write_page
from ssla_paper.runner import Claim, Task, Workplace, run
from ssla_paper.shipped import (
    describe_records,
    list_changes,
    locate_records,
    locate_summary,
    read_shipped,
    read_summary,
    report_shipped,
    ship_records,
)
from ssla_paper.studies import STUDIES, study
from ssla_paper.tables import Table

DOCS = Path(__file__).parents[2] / "docs"
SHIPPED = [name for name in STUDIES if locate_records(name).exists()]
NOT_SHIPPED = [name for name in STUDIES if name not in SHIPPED]
WRITTEN_BY_HAND = {"statements.md", "index.md", "errata.md"}
AGAIN = "run `make paper`, which writes it from the shipped records"


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    """docs/paper.md and its folder, with everything made again that the records give.

    The appendices and figures of studies without records are copies.
    """
    folder = tmp_path_factory.mktemp("clone")
    (folder / "docs" / "paper").mkdir(parents=True)
    for file in (DOCS / "paper").iterdir():
        if file.name.startswith(tuple(NOT_SHIPPED)):
            shutil.copyfile(file, folder / "docs" / "paper" / file.name)
    reproduce(list(STUDIES), folder / "paper", work=False, page=folder / "docs" / "paper.md")
    return folder / "docs"


def test_the_page_is_that_of_the_records(pages):
    assert (pages / "paper.md").read_bytes() == (DOCS / "paper.md").read_bytes(), AGAIN


@pytest.mark.parametrize("name", SHIPPED)
def test_the_appendix_is_that_of_the_records(pages, name):
    page = Path("paper") / f"{name}.md"
    assert (pages / page).read_bytes() == (DOCS / page).read_bytes(), AGAIN


@pytest.mark.parametrize("name", NOT_SHIPPED)
def test_the_appendix_of_a_study_without_records_has_the_statements_of_the_page(pages, name):
    """Until it is run: its page stays as it was, and the page for readers quotes it."""
    text = (DOCS / "paper" / f"{name}.md").read_text(encoding="utf-8")
    statements = text.split("## Statements")[1].split("\n## ")[0].strip()
    claims = read_summary(study(name))["claims"]
    assert statements == "\n".join(_claim(claim) for claim in claims)
    start = "Records not shipped yet:** " if claims else "Not run yet:** "
    names = (pages / "paper.md").read_text(encoding="utf-8").split(start)[1].split(".")[0]
    assert name in names.split(", ")


def test_the_folder_has_no_other_pages_and_figures(pages):
    """Pictures are not compared byte by byte: another version of a font moves a pixel."""
    made = {file.name for file in (pages / "paper").iterdir()}
    assert made == {file.name for file in (DOCS / "paper").iterdir()} - WRITTEN_BY_HAND


def test_a_study_has_records_or_a_summary_and_nothing_else_is_shipped():
    files = {file.name for file in shipped.FOLDER.iterdir()}
    summaries = {locate_summary(name).name for name in NOT_SHIPPED}
    assert files - summaries == {locate_records(name).name for name in SHIPPED}


def test_every_table_is_shipped_as_tex_and_csv_and_every_figure_as_pdf_and_png(pages):
    results = pages.parent / "paper" / "results"
    for name in SHIPPED:
        kinds = {
            kind: {file.stem for file in (results / name).glob(f"*.{kind}")}
            for kind in ("md", "tex", "csv", "pdf", "png")
        }
        assert kinds["md"] == kinds["tex"] == kinds["csv"] != set()
        assert kinds["pdf"] == kinds["png"]


def test_the_list_names_every_study_with_its_cost_and_the_state_of_its_records():
    lines = list_studies().splitlines()
    assert lines[0].split() == ["study", "tasks", "CPU", "minutes", "records", "title"]
    assert [line.split()[0] for line in lines[1:]] == list(STUDIES)
    for line in lines[1:]:
        if line.split()[0] in NOT_SHIPPED:
            assert "not measured  not shipped yet" in line
        else:
            assert float(line.split()[2]) > 0


@pytest.mark.parametrize("name", STUDIES)
def test_the_tasks_of_a_full_run_are_the_same_with_and_without_data(name, monkeypatch, tmp_path):
    """Else its shipped records would be stale on a machine without the data."""
    tasks = []
    for folder in (None, str(tmp_path)):
        monkeypatch.delenv("SSLA_DATA", raising=False)
        if folder:
            (tmp_path / "concrete.csv").touch()
            monkeypatch.setenv("SSLA_DATA", folder)
        tasks.append([(t.key, t.settings, t.edition) for t in study(name).tasks(quick=False)])
    assert tasks[0] == tasks[1]


def square(number):
    return {"value": number**2}


def cube(number):
    return {"value": number**3}


@dataclass(frozen=True)
class Squares:
    numbers: tuple = (1, 2, 3)
    function: object = square
    column: str = "value"
    name = "squares"
    title = "Squares"

    def tasks(self, quick):
        return [Task(str(i), self.function, {"number": i}) for i in self.numbers]

    def report(self, records, folder):
        rows = [[key, record[self.column]] for key, record in records.items()]
        Table("squares", "Squares.", ["n", "n²"], rows, {}).write(folder)
        return [Claim("A sum", "14", str(sum(row[1] for row in rows)), True)]


@pytest.fixture
def place(tmp_path):
    """Where the squares were computed and shipped."""
    place = Workplace(tmp_path / "run")
    run(Squares(), place, progress=False)
    ship_records(Squares(), place, tmp_path)
    return place


def appendix(squares, tmp_path):
    place = Workplace(tmp_path / "report")
    report_shipped(read_shipped("squares", tmp_path), squares, place)
    page = write_page(place, ["squares"])
    return page.read_text(), (page.with_suffix("") / "squares.md").read_text()


def test_shipped_records_give_the_tables_of_the_run(place, tmp_path):
    page, text = appendix(Squares(), tmp_path)
    assert "Stale" not in page + text
    again = Workplace(tmp_path / "report")
    for name in ("squares.md", "squares.csv", "squares.tex", "summary.json"):
        made, before = (p.results("squares") / name for p in (again, place))
        assert made.read_bytes() == before.read_bytes()


def test_records_that_are_shipped_twice_are_the_same_bytes(place, tmp_path):
    before = locate_records("squares", tmp_path).read_bytes()
    locate_summary("squares", tmp_path).write_text("{}")
    ship_records(Squares(), place, tmp_path)
    assert locate_records("squares", tmp_path).read_bytes() == before
    assert not locate_summary("squares", tmp_path).exists()


def edit(tmp_path, change):
    """Change the text of the shipped records."""
    path = locate_records("squares", tmp_path)
    text = json.loads(gzip.decompress(path.read_bytes()))
    for entry in text["records"].values():
        change(entry)
    path.write_bytes(gzip.compress(json.dumps(text).encode()))


def test_records_of_other_sources_or_another_version_are_stale_on_the_page(place, tmp_path):
    assert list_changes(read_shipped("squares", tmp_path), Squares()) == []
    module = square.__module__

    def age(entry):
        entry["sources"] = {module: "0123456789abcdef", "ssla_paper.gone": "0123456789abcdef"}
        entry["made_by"]["ssla"] = "0.0.1"

    edit(tmp_path, age)
    changes = list_changes(read_shipped("squares", tmp_path), Squares())
    assert changes[:2] == sorted([module, "ssla_paper.gone"])
    assert changes[2].startswith("ssla 0.0.1 (now ")
    sentence = f"**Stale:** since the records of squares were made, this has changed: {changes[0]};"
    page, text = appendix(Squares(), tmp_path)
    assert sentence in page
    assert sentence in text
    assert describe_records(Squares(), tmp_path)[1] == f"stale: {'; '.join(changes)}"


def test_another_function_for_a_task_makes_it_stale(place, tmp_path):
    changes = list_changes(read_shipped("squares", tmp_path), Squares(function=cube))
    assert changes == [cube.__module__]


def test_tasks_that_differ_from_the_shipped_ones_are_counted(place, tmp_path):
    read = read_shipped("squares", tmp_path)
    assert list_changes(read, Squares((1, 2, 3, 4, 5))) == ["2 tasks without records"]
    assert list_changes(read, Squares((1,))) == ["2 tasks removed"]
    edit(tmp_path, lambda entry: entry["made_by"].update(settings={"number": 7}))
    assert list_changes(read_shipped("squares", tmp_path), Squares()) == [
        "3 tasks with other settings"
    ]


def test_a_report_that_cannot_read_stale_records_says_so(place, tmp_path):
    with pytest.raises(KeyError):  # the records are current: a fault of the report
        appendix(Squares(column="cube"), tmp_path)
    with pytest.raises(ValueError, match=r"failed on its shipped records, which are stale \(1 tas"):
        appendix(Squares((1, 2, 3, 4), column="cube"), tmp_path)


def test_damaged_records_are_named(place, tmp_path):
    path = locate_records("squares", tmp_path)
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(ValueError, match=r"squares.json.gz is not a file of records"):
        read_shipped("squares", tmp_path)


def test_only_complete_runs_are_shipped(place, tmp_path):
    with pytest.raises(ValueError, match=r"--quick are a test of the code"):
        ship_records(Squares(), Workplace(tmp_path / "run", quick=True), tmp_path)
    with pytest.raises(ValueError, match=r"1 of the 4 tasks .* the first is '4'"):
        ship_records(Squares((1, 2, 3, 4)), place, tmp_path)


def test_a_run_computes_stale_records_again(place, tmp_path):
    """Other sources of a task's function: its old record is not used."""
    assert run(Squares(function=cube), place, progress=False)[0].found == "36"


def test_a_study_without_records_keeps_its_page(place, tmp_path):
    claims = [vars(Claim("A statement", "1", "2", False))]
    summary = {"title": "T", "done": [1, 1], "claims": claims, "not_shipped": True}
    target = tmp_path / "docs" / "paper.md"
    kept = target.with_suffix("") / "squares.md"
    write_page(place, ["squares"], target, {"squares": summary})
    text = kept.read_text()
    assert "- **Does not hold**: A statement. Published: 1. Found: 2." in text
    assert "**Records not shipped yet:** squares." in text
    assert "## Tables" not in text  # the results in the folder are those of another run
    kept.write_text("as it was")
    write_page(place, ["squares"], target, {"squares": summary})
    assert kept.read_text() == "as it was"
    assert "| A statement | [squares](paper/squares.md) |" in target.read_text()


def test_a_study_that_was_never_run_is_named(tmp_path):
    never = read_summary(Squares(), tmp_path)
    page = write_page(Workplace(tmp_path), ["squares"], None, {"squares": never})
    assert "**Not run yet:** squares." in page.read_text()
    assert "| [squares](page/squares.md) | 0 | 0 | 0 | 0 | 0 | 0 |" in page.read_text()
    assert "**Not run yet:** squares." in (page.with_suffix("") / "squares.md").read_text()


@pytest.mark.parametrize("options", [{"quick": True}, {"work": False}, {"unfinished": True}])
def test_shipping_without_a_full_run_is_refused(options, tmp_path):
    with pytest.raises(ValueError, match="give --ship without"):
        reproduce(["sine"], tmp_path, ship=True, **options)


def test_a_report_of_small_records_is_refused(tmp_path):
    with pytest.raises(ValueError, match="give --report without --quick"):
        reproduce(["sine"], tmp_path, work=False, quick=True)


def test_records_in_the_folder_are_reported_on_request(tmp_path, monkeypatch, capsys):
    place = Workplace(tmp_path)
    for task in Squares().tasks(False)[:2]:
        place.keep("squares", task, {"value": 7})
    monkeypatch.setattr(command, "study", lambda name: Squares())
    monkeypatch.setattr(command, "STUDIES", ["squares"])
    reproduce(["squares"], tmp_path, unfinished=True)
    assert "found 14" in capsys.readouterr().out
    assert "**From 2 of 3 tasks:**" in (tmp_path / "results" / "page.md").read_text()


def test_a_run_that_is_shipped_is_reported_from_its_records(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(shipped, "FOLDER", tmp_path / "shipped")
    monkeypatch.setattr(command, "study", lambda name: Squares())
    monkeypatch.setattr(command, "STUDIES", ["squares"])
    reproduce(["squares"], tmp_path / "run", progress=False, ship=True)
    assert "records shipped: " in capsys.readouterr().out
    reproduce(["squares"], tmp_path / "report", work=False)
    reproduce([], tmp_path / "all", work=False, page=tmp_path / "docs" / "paper.md")
    assert "| [squares](paper/squares.md) |" in (tmp_path / "docs" / "paper.md").read_text()
    for name in ("page.md", "page/squares.md"):
        made, before = (tmp_path / folder / "results" / name for folder in ("report", "run"))
        assert made.read_bytes() == before.read_bytes()


def test_a_study_that_cannot_be_shipped_does_not_stop_the_others(tmp_path, monkeypatch):
    monkeypatch.setattr(shipped, "FOLDER", tmp_path / "shipped")
    monkeypatch.setattr(command, "study", lambda name: Squares(function=miss))
    monkeypatch.setattr(command, "STUDIES", ["squares"])
    with pytest.raises(ValueError, match=r"3 of the 3 tasks .* have no complete record"):
        reproduce(["squares"], tmp_path, progress=False, ship=True)
    assert (tmp_path / "results" / "page.md").exists()
    assert not (tmp_path / "shipped").exists()


def miss(number):
    return {"value": number, "missing": {"peer": "needs a library"}}
