"""The documentation site: its pages are complete, and its check finds what it should.

`make docs` builds the site itself.
"""

import ast
import importlib.util
import re
import sys
from pathlib import Path

import pytest

import ssla
from ssla._checks import SEE, warn

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
BUILT = {"examples/index", "messages"}  # written by the build


def tool(name):
    spec = importlib.util.spec_from_file_location(name, ROOT / "tools" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def plain(text):
    """Without the markup and line breaks of a table of Markdown."""
    return " ".join(re.sub(r"\\([|*_])", r"\1", text).split())


def test_every_page_is_in_the_table_of_contents_once():
    listed = [
        line
        for tree in re.findall(r"```\{toctree\}\n(.*?)```", (DOCS / "index.md").read_text(), re.S)
        for line in tree.splitlines()
        if line and not line.startswith(":")
    ]
    pages = {page.relative_to(DOCS).with_suffix("").as_posix() for page in DOCS.rglob("*.md")}
    written = {page for page in pages if not page.startswith("examples/")} - {"index"}
    assert len(set(listed)) == len(listed)
    assert set(listed) - BUILT == written - BUILT


def test_every_public_name_is_on_the_page_of_the_api():
    text = (DOCS / "api.md").read_text()
    missing = [
        name for name in ssla.__all__ if not re.search(rf"auto\w+:: ssla\.{name}$", text, re.M)
    ]
    assert not missing


MESSAGES = list(tool("messages").messages())
WARNINGS = [message for message in MESSAGES if message.kind == "warning"]


@pytest.mark.parametrize(
    "message", WARNINGS, ids=lambda message: f"{message.module}:{message.line}"
)
def test_every_warning_has_an_entry_among_the_failures(message):
    """Quote the warning in docs/failures.md, with its cause and remedy. Values are written as …."""
    assert message.text, (
        "the text of this warning cannot be read from the source: give it in the call, or as a "
        "variable above it"
    )
    sentences = [s for s in re.split(r"(?<=[.:])\s|…", message.text) if len(s) > 20] or [
        message.text
    ]
    entries = plain((DOCS / "failures.md").read_text())
    assert any(plain(sentence).strip(" .,:()") in entries for sentence in sentences)


def test_every_module_that_raises_has_a_topic_among_the_failures():
    topics = re.findall(r"\*From (.*?)\.\*", (DOCS / "failures.md").read_text())
    covered = {name for topic in topics for name in re.findall(r"`([\w.]+)`", topic)}
    raising = {message.module for message in MESSAGES if message.kind != "warning"}
    known = {
        "__init__",
        "demo",
        "maths.linalg",
    }  # attribute errors of Python, the demo's file name, and an assertion
    assert not [
        m for m in raising - known if not any(m == c or m.startswith(f"{c}.") for c in covered)
    ]


def test_messages_are_read_through_variables_and_sums():
    tree = ast.parse('def f(n):\n    text = f"{n} rows " "are odd: " + str(n)\n    warn(text)\n')
    messages = sys.modules["messages"]
    call = tree.body[0].body[1].value
    assert messages._text(call, messages._assigned(tree)) == "… rows are odd: …"


@pytest.mark.parametrize(
    ("page", "problem"),
    [
        ('<img src="https://a.b/c.png">', "index.html loads https://a.b/c.png"),
        ('<script src="//a.b/c.js"></script>', "index.html loads //a.b/c.js"),
        ('<link rel="stylesheet" href="http://a.b/c.css">', "index.html loads http://a.b/c.css"),
        ("<style>@import 'https://a.b/c.css';</style>", "index.html loads https://a.b/c.css"),
        ('<p style="background: url(https://a.b/c.png)">', "index.html loads https://a.b/c.png"),
        ('<img src="missing.png">', "index.html: missing.png does not exist"),
        ('<a href="#nowhere">', "index.html: #nowhere has no such anchor"),
        ('<a href="https://a.b/">there</a><a href="#here" id="here">', None),
    ],
)
def test_the_check_of_the_site_finds_what_is_loaded_and_what_is_missing(page, problem, tmp_path):
    (tmp_path / "index.html").write_text(page)
    assert list(tool("check_site").problems(tmp_path.resolve())) == ([problem] if problem else [])


def test_the_check_of_the_site_reads_styles_and_refuses_an_empty_site(tmp_path):
    (tmp_path / "a.css").write_text("p { background: url('https://a.b/c.png') }")
    found = list(tool("check_site").problems(tmp_path.resolve()))
    assert found[0].endswith("has no pages. Build the site first: make docs.")
    assert found[1] == "a.css loads https://a.b/c.png"


@pytest.mark.parametrize(
    "script", sorted((DOCS / "gallery").glob("*.py")), ids=lambda path: path.stem
)
def test_scripts_of_the_gallery_have_a_title_and_a_text(script):
    """`make docs` executes them."""
    assert script.name.startswith("plot_")
    title, line, text = ast.get_docstring(ast.parse(script.read_text())).split("\n", 2)
    assert line == "=" * len(title)
    assert len(text.split()) >= 15


def test_a_warning_names_the_page_on_failures():
    with pytest.warns(UserWarning, match=r"^odd rows\. See docs/failures\.md\.$"):
        warn("odd rows.")
    assert (ROOT / SEE.strip(" .").removeprefix("See ")).exists()
