"""The pages docs/paper/statements.md, index.md and errata.md: complete, and what they name exists."""

import ast
import importlib
import re
from functools import cache
from pathlib import Path

import pytest
import torch

pytest.importorskip(
    "ssla_paper", reason="the studies are not installed: pip install ./reproduction"
)

from ssla_paper.networks import gaussian_nll, squared_error
from ssla_paper.studies import STUDIES

ROOT = Path(__file__).parents[1]
PAPER = ROOT / "docs" / "paper"
PAGES = ("statements", "index", "errata")
VERDICTS = {"verified", "in part", "contradicted", "deviates", "missing"}
UNEXPLAINED = {"verified"}  # every other verdict has its reason in the line
STATE = re.compile(r"done|in work: h-\w+")
COLUMNS = ["no.", "statement", "where", "verdict", "reason", "state", "command"]


def text(page):
    return (PAPER / f"{page}.md").read_text(encoding="utf-8")


def statements():
    """The numbered rows of the table as dicts."""
    lines = [
        [cell.strip() for cell in line.split("|")[1:-1]] for line in text("statements").split("\n")
    ]
    assert COLUMNS in lines
    return [dict(zip(COLUMNS, line, strict=True)) for line in lines if line and line[0].isdigit()]


def test_there_are_76_statements_in_order():
    assert [row["no."] for row in statements()] == [str(number) for number in range(1, 77)]


@pytest.mark.parametrize("row", statements(), ids=lambda row: row["no."])
def test_a_statement_has_a_verdict_a_reason_a_state_and_a_command(row):
    assert row["verdict"] in VERDICTS
    assert row["reason"] or row["verdict"] in UNEXPLAINED
    assert STATE.fullmatch(row["state"])
    assert row["state"] != "done" or row["verdict"] != "missing"
    command = re.fullmatch(r"`python -m (pytest|ssla_paper) (\S+)( --quick)?`", row["command"])
    assert command, row["command"]
    if command[1] == "ssla_paper":
        assert command[2] in STUDIES
    else:
        assert is_a_test(command[2])
    assert re.search(r"`[^`]+`", row["where"])


def named(page):
    """Everything in backticks that is a name of ours: symbols, paths, tests, commands."""
    return sorted(set(re.findall(r"`([^`\n]+)`", text(page))))


def is_a_symbol(name):
    """Whether the dotted name can be imported, and its attributes found."""
    parts = name.split(".")
    for cut in range(len(parts), 0, -1):
        try:
            value = importlib.import_module(".".join(parts[:cut]))
        except ModuleNotFoundError:
            continue
        for part in parts[cut:]:
            value = getattr(value, part, None)
            if value is None:
                return False
        return True
    return False


@cache
def functions_in(path):
    """Names of the test functions of a file."""
    tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}


def is_a_test(name):
    path, _, function = name.partition("::")
    return (ROOT / path).is_file() and (not function or function in functions_in(path))


@pytest.mark.parametrize("page", PAGES)
def test_what_a_page_names_exists(page):
    names = named(page)
    wrong = []
    for name in names:
        if re.fullmatch(r"ssla(_paper)?(\.\w+)+", name):
            good = is_a_symbol(name)
        elif re.match(r"(docs|src|tests|reproduction)/", name):
            good = (
                is_a_test(name) if name.endswith(".py") or "::" in name else (ROOT / name).exists()
            )
        elif name.startswith("python -m pytest "):
            good = is_a_test(name.split()[3])
        elif name.startswith("python -m ssla_paper "):
            good = name.split()[3] in {*STUDIES, "STUDY"}
        else:
            continue
        if not good:
            wrong.append(name)
    assert not wrong
    assert len(names) > 10


@pytest.mark.parametrize(
    "name",
    ["ssla.no_such_name", "ssla.Posterior.no_such_method", "ssla_paper.no_such_module.thing"],
)
def test_a_name_that_does_not_exist_is_found(name):
    assert not is_a_symbol(name)


def test_a_test_that_does_not_exist_is_found():
    assert is_a_test("tests/test_paper_pages.py::test_a_test_that_does_not_exist_is_found")
    assert not is_a_test("tests/test_paper_pages.py::test_no_such")
    assert not is_a_test("tests/no_such_file.py")


def test_every_algorithm_and_theorem_is_in_the_index():
    rows = [
        line.split("|")[1].strip() for line in text("index").split("\n") if line.startswith("| ")
    ]
    wanted = {"Algorithm 1", "Algorithm 2", "Lemma 1", "Theorem 1", "Corollary 1", "Corollary 2"}
    assert wanted <= set(rows)
    numbers = set()
    for row in rows:
        for first, last in re.findall(r"\((\d+)\)(?: to \((\d+)\))?", row):
            numbers |= set(range(int(first), int(last or first) + 1))
    assert numbers == set(range(1, 35))  # the numbered displays of the TeX source


def test_every_section_of_the_errata_says_what_checks_it():
    sections = re.split(r"^## ", text("errata"), flags=re.M)[1:]
    assert len(sections) == 10
    for section in sections:
        assert "**Correction.**" in section
        assert "*Checked by*" in section
        assert re.search(r"`[\w/]+\.py::\w+`", section)


def test_the_losses_are_those_of_the_paper():
    """MSE, and half the sum of log σ² and (y − μ)²/σ² (here its mean over rows)."""
    y = torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64)
    f = torch.tensor([[0.5, 0.2], [-1.0, -0.3], [0.0, 1.0]], dtype=torch.float64)
    squares = [(a - b) ** 2 for a, b in zip(y.tolist(), f[:, 0].tolist(), strict=True)]
    assert float(squared_error(f, y)) == pytest.approx(sum(squares) / 3, rel=1e-12)
    normal = torch.distributions.Normal(f[:, 0], (0.5 * f[:, 1]).exp())
    constant = 0.5 * torch.log(torch.tensor(2 * torch.pi, dtype=torch.float64))
    expected = float(-normal.log_prob(y).mean() - constant)
    assert float(gaussian_nll(f, y)) == pytest.approx(expected, rel=1e-12)
