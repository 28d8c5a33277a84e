"""The digest changes with the code that produces a record, and with nothing else."""

import pytest

from ssla_paper import sources
from ssla_paper.sources import digest_sources

STUDY = '''
"""A study."""
from ssla_paper import tools
from ssla_paper.lower import half as share, unused
from ssla_paper.runner import Record

SIZE = 3  # rows


def one(n: int) -> Record:
    """One run."""
    unrelated = SIZE * share(n)  # hides the function below
    texts = [f"{size!r:>{n}} " "rows" for size in (SIZE, None)]
    return {"value": unrelated + tools.twice(n), "texts": texts}


def report(records):
    return "a claim"


def unrelated():
    return 1
'''
LOWER = """
def half(n):
    return _divide(n, 2)


def _divide(n, by):
    return n / by


def unused():
    return 0
"""
TOOLS = """
def twice(n):
    return 2 * n


def thrice(n):
    return 3 * n
"""
FILES = {"study": STUDY, "lower": LOWER, "tools": TOOLS, "runner": "Record = dict\n"}


@pytest.fixture
def digest(tmp_path, monkeypatch):
    """Writes the files, with one text replaced by another, and digests the function `one`."""
    folders = iter(range(100))

    def of(file="", old="", new="", files=FILES):
        folder = tmp_path / str(next(folders))
        folder.mkdir()
        for name, text in files.items():
            assert name != file or old in text
            (folder / f"{name}.py").write_text(text.replace(old, new) if name == file else text)
        monkeypatch.setattr(sources, "FOLDER", folder)
        return dict(sources._digest("ssla_paper.study", folder / "study.py", "one"))

    return of


def changed(before, after):
    """The last parts of the names of the modules with another digest."""
    return {
        name.rpartition(".")[2] for name in {*before, *after} if before.get(name) != after.get(name)
    }


def test_the_modules_are_those_that_the_function_uses(digest):
    assert list(digest()) == ["ssla_paper.lower", "ssla_paper.study", "ssla_paper.tools"]


@pytest.mark.parametrize(
    ("file", "old", "new"),
    [
        ("study", '"""A study."""', '"""Another text."""'),
        ("study", '"""One run."""', '"""One run: its value."""'),
        ("study", "  # rows", "  # how many rows"),
        ("study", "n: int", "n: float"),
        ("study", "-> Record", "-> dict"),
        ("study", "SIZE * share(n)", "(SIZE\n        * share(n))"),
        ("study", "a claim", "another claim"),
        ("study", "return 1", "return 2"),
        ("study", "from ssla_paper.runner import Record", ""),
        ("lower", "return 0", "return 1"),
        ("tools", "3 * n", "4 * n"),
        ("runner", "dict", "list"),
    ],
)
def test_texts_reports_and_unused_code_do_not_count(digest, file, old, new):
    assert digest(file, old, new) == digest()


@pytest.mark.parametrize(
    ("file", "old", "new", "where"),
    [
        ("study", "SIZE = 3", "SIZE = 4", {"study"}),
        ("study", "unrelated + tools", "unrelated - tools", {"study"}),
        ("study", "SIZE = 3", "SIZE = 3\nSIZE += 1", {"study"}),
        ("study", "SIZE = 3", "SIZE = 3\nimport math\nmath.pi = 3", {"study"}),
        ("study", "SIZE = 3", "SIZE = 3\nprint('at import')", {"study"}),
        ("lower", "n / by", "n // by", {"lower"}),
        ("tools", "2 * n", "n + n", {"tools"}),
        ("study", "half as share", "unused as share", {"lower"}),
    ],
)
def test_what_the_result_depends_on_counts(digest, file, old, new, where):
    assert changed(digest(), digest(file, old, new)) == where


def test_a_module_used_as_a_value_counts_whole(digest):
    value = {**FILES, "study": STUDY.replace("tools.twice(n)", "vars(tools)['twice'](n)")}
    assert changed(digest(files=value), digest("tools", "3 * n", "4 * n", value)) == {"tools"}


def test_imports_inside_a_function_count(digest):
    inside = {
        **FILES,
        "study": STUDY.replace("    unrelated =", "    from .tools import thrice\n    unrelated ="),
    }
    assert changed(digest(files=inside), digest("tools", "3 * n", "4 * n", inside)) == {"tools"}


def test_names_that_a_package_passes_on_are_followed(digest, tmp_path):
    passed_on = {**FILES, "tools": "from ssla_paper.lower import unused as twice\n"}
    before, after = digest(files=passed_on), digest("lower", "return 0", "return 1", passed_on)
    assert changed(before, after) == {"lower"}
    assert "ssla_paper.tools" not in before


def test_the_digest_is_the_same_on_every_machine(digest):
    """Another value marks all shipped records as stale: change it only for a reason."""
    assert digest() == {
        "ssla_paper.lower": "ec075e392ff311fd",
        "ssla_paper.study": "f0fe8af32a0fe9de",
        "ssla_paper.tools": "dcd7e62859e832a8",
    }


def test_a_function_that_other_processes_cannot_find_is_refused():
    def inner():
        return {}

    with pytest.raises(ValueError, match="is not a function at the top level of a module"):
        digest_sources(inner)
