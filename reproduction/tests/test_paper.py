"""Studies that can be killed and started again, tables that say what they should, claims that
hold.
"""

import json
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from ssla_paper.__main__ import reproduce
from ssla_paper.page import ANSWERED, CLAIMED, write_page
from ssla_paper.runner import OURS, PAPER, REPEATED, Claim, Task, TaskError, Workplace, run
from ssla_paper.studies import STUDIES, study
from ssla_paper.tables import Table


def count(folder, number):
    """A task that leaves a mark each time it is done."""
    with open(Path(folder) / "marks", "a") as marks:
        marks.write(f"{number}\n")
    return {"value": number**2}


@dataclass(frozen=True)
class Squares:
    folder: Path
    name = "squares"
    title = "Squares"

    def tasks(self, quick):
        return [Task(str(i), count, {"folder": str(self.folder), "number": i}) for i in range(4)]

    def report(self, records, folder):
        Table(
            "squares",
            "Squares.",
            ["n", "n²"],
            [[k, r["value"]] for k, r in records.items()],
            {"n²": ".1f"},
        ).write(folder)
        return [Claim("squares", "0 to 9", str(sum(r["value"] for r in records.values())), True)]


def test_what_is_done_is_not_done_again_and_a_damaged_record_is(tmp_path):
    place, study = Workplace(tmp_path), Squares(tmp_path)
    run(study, place, progress=False)
    before = (place.results("squares") / "squares.csv").read_text()
    (place.records("squares") / "2.json").write_text('{"value": 4')
    claims = run(study, place, progress=False)
    assert (tmp_path / "marks").read_text().split() == ["0", "1", "2", "3", "2"]
    assert (
        (place.results("squares") / "squares.csv").read_text()
        == before
        == "n,n²\n0,0\n1,1\n2,4\n3,9\n"
    )
    assert claims[0].found == "14"
    assert "| 3 | 9.0 |" in (place.results("squares") / "squares.md").read_text()
    assert r"3 & 9.0 \\" in (place.results("squares") / "squares.tex").read_text()


def test_a_record_of_other_settings_or_of_another_version_is_made_again(tmp_path, monkeypatch):
    place = Workplace(tmp_path)
    task, other = (Task("0", count, {"folder": str(tmp_path), "number": i}) for i in (2, 3))
    place.keep("squares", task, {"value": 4})
    assert place.recall("squares", task) == {"value": 4}
    assert place.recall("squares", other) is None
    monkeypatch.setattr("ssla.__version__", "0")
    assert place.recall("squares", task) is None


def test_part_of_a_run_can_be_reported_and_says_so(tmp_path):
    place, study = Workplace(tmp_path), Squares(tmp_path)
    with pytest.raises(ValueError, match=r"no records of the study 'squares' .* Run it first"):
        run(study, place, progress=False, work=False)
    for task in study.tasks(False)[:2]:
        place.keep("squares", task, {"value": 7})
    assert run(study, place, progress=False, work=False)[0].found == "14"
    assert json.loads((place.results("squares") / "summary.json").read_text())["done"] == [2, 4]
    assert not (tmp_path / "marks").exists()
    assert "**From 2 of 4 tasks:**" in write_page(place, ["squares"]).read_text()


@pytest.mark.parametrize("where", ["file/paper.md", "folder"])
def test_a_page_that_has_no_place_is_refused_before_any_work(where, tmp_path):
    (tmp_path / "file").touch()
    (tmp_path / "folder").mkdir()
    with pytest.raises(ValueError, match=r"paper.md cannot be written|folder cannot be written"):
        reproduce(["priors"], tmp_path / "work", quick=True, progress=False, page=tmp_path / where)
    assert not (tmp_path / "work").exists()


def test_the_page_elsewhere_has_its_figures_beside_it(tmp_path):
    reproduce(
        ["priors"],
        tmp_path / "work",
        quick=True,
        progress=False,
        page=tmp_path / "docs" / "paper.md",
    )
    text = (tmp_path / "docs" / "paper.md").read_text()
    assert "| [priors](paper/priors.md) | 4 | 1 | 1 | 0 | 2 | 2 |" in text
    assert "| All printed numbers of both tables, differences included | yes |" in text
    assert "| 3 | the prior is a module | 4 | 1 | [priors](paper/priors.md) |" in text
    assert "![priors-set](paper/priors-set.png)" in text
    assert (tmp_path / "docs" / "paper" / "priors-set.png").exists()
    appendix = (tmp_path / "docs" / "paper" / "priors.md").read_text()
    assert appendix.startswith("# Prior modularity (two tables)")
    assert (
        "- Holds: All printed numbers of both tables, differences included. Published: 30 cells"
        in appendix
    )
    assert "![priors-set](priors-set.png)" in appendix
    assert "(../paper.md)" in appendix


def test_verdicts_on_the_page_follow_the_claims(tmp_path):
    """The same statements, once true and once false: they change their table, and nothing else
    of the prose decides.
    """
    for holds in (True, False):
        claims = [
            Claim("Calibrated: on A", "yes", "x", holds),
            Claim("Calibrated: on B", "yes", "x", holds),
        ]
        claims += [
            Claim("A number", "1", "x", holds, kind=REPEATED),
            Claim("Ours", "not stated", "x", holds),
        ]
        place = Workplace(tmp_path / str(holds))
        folder = place.results("uci")
        folder.mkdir(parents=True)
        (folder / "uci-ranks-nll.png").write_bytes(b"")
        (folder / "summary.json").write_text(
            json.dumps({"title": "T", "done": [1, 1], "claims": [vars(c) for c in claims]})
        )
        text = write_page(place, ["uci", "sine"]).read_text()
        held, failed = text.split("## What holds")[1].split("## What does not hold")
        assert ("| Calibrated: on A; on B | [uci](page/uci.md) |" in held) == holds
        assert ("| Calibrated: on A; on B | [uci](page/uci.md) |" in failed) != holds
        assert f"| A number | {'yes' if holds else '**no**'} |" in failed
        assert (
            "| [uci](page/uci.md) | "
            f"{'2 | 0 | 1 | 0 | 1 | 0' if holds else '0 | 2 | 0 | 1 | 0 | 1'} |" in text
        )
        assert "![uci-ranks-nll](uci/uci-ranks-nll.png)" in text
        assert "## Why" not in text  # a study is missing
        assert (
            "![uci-ranks-nll](../uci/uci-ranks-nll.png)"
            in (place.results("") / "page" / "uci.md").read_text()
        )


def test_several_processes_give_the_same(tmp_path):
    run(Squares(tmp_path), Workplace(tmp_path), jobs=2, progress=False)
    assert sorted((tmp_path / "marks").read_text().split()) == ["0", "1", "2", "3"]


def stumble(folder, number):
    """A slow task that leaves a mark, or fails at once."""
    if number == 0:
        raise ArithmeticError("no such number")
    time.sleep(0.5)
    (Path(folder) / f"mark-{number}").write_text("")
    return {"value": number}


@pytest.mark.parametrize("jobs", [1, 2])
def test_a_task_that_fails_is_named_and_the_rest_is_not_run_in_vain(tmp_path, jobs):
    @dataclass(frozen=True)
    class Stumbles(Squares):
        def tasks(self, quick):
            return [
                Task(f"number-{i}", stumble, {"folder": str(tmp_path), "number": i})
                for i in range(12)
            ]

    with pytest.raises(
        TaskError, match="The task 'number-0' failed: ArithmeticError: no such number"
    ):
        run(Stumbles(tmp_path), Workplace(tmp_path), jobs=jobs, progress=False)
    assert len(list(tmp_path.glob("mark-*"))) < 6


def test_the_workers_of_a_killed_run_end_too(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "import time\nfrom pathlib import Path\nfrom ssla_paper.runner import Task, _done\n\ndef "
        "slow(number):\n    Path(__file__).with_name(f'begun-{number}').write_text('')\n    "
        "time.sleep(3)\n    Path(__file__).with_name(f'ended-{number}').write_text('')\n    return "
        "{}\n\nif __name__ == '__main__':\n    list(_done([Task(str(i), slow, {'number': i}) for i "
        "in range(6)], 2, '', False))\n"
    )
    process = subprocess.Popen([sys.executable, str(script)])
    while not list(tmp_path.glob("begun-*")) and process.poll() is None:
        time.sleep(0.05)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    time.sleep(5)
    assert not list(tmp_path.glob("ended-*"))


def test_what_was_missing_is_tried_again(tmp_path):
    place, study = Workplace(tmp_path), Squares(tmp_path)
    for task in study.tasks(False):
        place.keep(
            "squares", task, {"value": 1, "methods": {"peer": {"missing": "needs a library"}}}
        )
    place.keep("squares", study.tasks(False)[3], {"value": 9, "missing": {}})  # nothing was
    run(study, place, progress=False)
    assert (tmp_path / "marks").read_text().split() == ["0", "1", "2"]


def test_a_study_that_fails_does_not_keep_the_others_from_the_page(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(STUDIES, "odd", f"{__name__}:Odd")
    with pytest.raises(TaskError, match=r"Not reproduced .* odd: The task 'one' failed"):
        reproduce(["odd", "sine"], tmp_path, quick=True, progress=False)
    assert "[sine](page/sine.md)" in (tmp_path / "quick" / "page.md").read_text()
    assert "# Sine" in (tmp_path / "quick" / "page" / "sine.md").read_text()


class Odd:
    name = "odd"
    title = "Odd"

    def tasks(self, quick):
        return [Task("one", stumble, {"folder": "", "number": 0})]


def results(folder):
    return {
        p.relative_to(folder): p.read_bytes()
        for p in sorted((folder / "quick").rglob("*"))
        if p.is_file()
    }


def test_a_killed_run_goes_on_and_ends_with_the_same_tables(tmp_path):
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    command = [
        sys.executable,
        "-W",
        "ignore",
        "-m",
        "ssla_paper",
        "sine",
        "priors",
        "--quick",
        "--jobs",
        "1",
        "--folder",
    ]
    assert subprocess.run([*command, str(whole)], capture_output=True, check=False).returncode == 0
    process = subprocess.Popen(
        [*command, str(killed)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    records = killed / "records-quick" / "sine"
    while (
        not (records.exists() and len(list(records.glob("*.json"))) >= 2) and process.poll() is None
    ):
        time.sleep(0.01)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    assert subprocess.run([*command, str(killed)], capture_output=True, check=False).returncode == 0
    assert results(whole) == results(killed)


def test_a_record_of_an_older_edition_is_made_again(tmp_path):
    place = Workplace(tmp_path)
    old, new = Task("a", count, {"number": 3}), Task("a", count, {"number": 3}, edition=2)
    place.keep("squares", old, {"value": 9})
    assert place.recall("squares", old) == {"value": 9}
    assert place.recall("squares", new) is None
    place.keep("squares", new, {"value": 10})
    assert place.recall("squares", new) == {"value": 10}
    assert not place.settled("squares", old)


def test_claims_are_counted_by_what_they_are_about():
    kinds = [
        Claim("said", "yes", "no", False).kind,
        Claim("a table", "1.0", "1.0", True, kind=REPEATED).kind,
        Claim("found", "not stated", "yes", True).kind,
        Claim("Our goal: more", "0.3", "0.2", True).kind,
    ]
    assert kinds == [PAPER, REPEATED, OURS, OURS]


def test_claims_are_answered_by_their_number(tmp_path):
    place = Workplace(tmp_path)
    folder = place.results("uci")
    folder.mkdir(parents=True)
    claims = [
        Claim("Sharper: SSLA", "yes", "x", True, number="4"),
        Claim("Sharper: ASSLA", "yes", "x", False, number="4"),
        Claim("Calibrated: ASSLA", "yes", "x", True, number="7"),
        Claim("Sharper: on B", "yes", "x", True, number="7"),
        Claim("A number", "1", "x", False, kind=REPEATED),
    ]
    (folder / "summary.json").write_text(
        json.dumps({"title": "T", "done": [1, 1], "claims": [vars(c) for c in claims]})
    )
    text = write_page(place, ["uci", "sine"]).read_text()
    assert f"| 4 | {ANSWERED['4']} | 1 | 1 | [uci](page/uci.md) |" in text
    assert f"| 7 | {ANSWERED['7']} | 2 | 0 | [uci](page/uci.md) |" in text
    assert f"| 1 | {ANSWERED['1']} |" not in text
    assert "| 4 | Sharper: SSLA | [uci](page/uci.md) |" in text  # not joined with that of claim 7
    assert "| 7 | Sharper: on B | [uci](page/uci.md) |" in text


def test_the_numbers_of_claims_are_those_of_the_page():
    assert list(ANSWERED) == re.findall(r"^(\d)\. ", CLAIMED, re.M)


def test_tables_for_tex_are_plain_ascii():
    table = Table(
        "t", "½ log|J̃(θ̃)|, 5% ± 1", ["ŷ", "nᵀn ≤ 10⁻³"], [["θ̂_1", None], ["−2×3", 1.0]], {}
    )
    text = table.latex()
    assert text.isascii()
    assert r"$\frac{1}{2}$ log|$\tilde{J}$($\tilde{\theta}$)|, 5\% $\pm$ 1" in text
    assert r"$\hat{y}$ & n$^{T}$n $\le$ 10$^{-3}$ \\" in text
    assert r"$\hat{\theta}$\_1 & -- \\" in text
    assert r"$-$2$\times$3 & 1.0 \\" in text


EXPECTED = {  # None: a comparison that a small version, or another machine, may decide either way
    "conjugate": [
        *[True, True, True, True, True, False],
        *[True, True, None, True, False, True, True],
        *[True, True],
        *[True, True, True],
    ],
    "rates": [
        *[True, False, False, True, True, False, False, True, True, False],
        *[False, True, False, True, True],
        *[False, False, True],
    ],
    "precision": [True, False, True, True, True, True, True],
    "heteroscedastic": [True, *[None] * 17],
    "sine": [True, True, True, False, True, True],
    "priors": [True, True, True, True, True, False, False, True, False, True],
    "robustness": [False, *[None] * 26, True, None],
    "uci": [*[None] * (2 * bool(os.environ.get("SSLA_DATA"))), True, True, *[None] * 17],
    "stated": [None] * 23,
}


@pytest.mark.parametrize("name", STUDIES)
def test_every_study_runs_quickly_and_its_claims_are_as_known(name, tmp_path, capsys):
    reproduce([name], tmp_path, quick=True, progress=False)
    found = json.loads((tmp_path / "quick" / name / "summary.json").read_text())
    holds = [claim["holds"] for claim in found["claims"]]
    assert [
        held if known is not None else None
        for held, known in zip(holds, EXPECTED[name], strict=True)
    ] == EXPECTED[name]
    numbers = {claim["number"] for claim in found["claims"] if claim["kind"] == PAPER}
    assert numbers <= set(ANSWERED)  # every statement of the paper answers a claim of the page
    assert f"# {found['title']}" in (tmp_path / "quick" / "page" / f"{name}.md").read_text()
    tables = list((tmp_path / "quick").rglob("*.tex"))
    assert tables
    assert [table.name for table in tables if not table.read_text().isascii()] == []


def test_an_unknown_study_names_the_nearest(tmp_path):
    with pytest.raises(ValueError, match=r"Unknown study 'sin'. Did you mean 'sine'\?"):
        reproduce(["sin"], tmp_path)


def test_a_folder_that_cannot_be_written_is_told_before_the_work(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(
        ValueError, match=r"cannot be written .*Give a folder with write permission"
    ):
        run(Squares(tmp_path), Workplace(tmp_path / "file"), progress=False)
    assert not (tmp_path / "marks").exists()


def test_a_study_whose_libraries_are_missing_says_which_extra_brings_them(monkeypatch):
    monkeypatch.setitem(STUDIES, "odd", "ssla_paper.no_such_module:Odd")
    with pytest.raises(ImportError, match=r"The study 'odd' needs .*pip install ./reproduction"):
        study("odd")
