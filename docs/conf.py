"""The documentation site: `make docs` builds it into build/site, offline, with warnings as errors."""

from __future__ import annotations

import inspect
import re
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "tools")]

import latex2mathml.converter
from docutils import nodes
from messages import messages
from sphinx.util.images import get_image_size

import ssla

project = "ssla"
author = "The ssla maintainers"
copyright = "the ssla maintainers. MIT licence"
release = ssla.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx_gallery.gen_gallery"]
exclude_patterns = ["gallery"]
myst_enable_extensions = ["dollarmath", "deflist", "colon_fence"]
myst_heading_anchors = 3
smartquotes = False  # --options stay as they are
suppress_warnings = ["config.cache"]  # the gallery's order is a function

html_theme = "furo"
html_title = f"ssla {release}"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_copy_source = False
html_show_sourcelink = False
html_theme_options = {"navigation_with_keys": True}
html_math_renderer = "mathml"
pygments_style, pygments_dark_style = "a11y-high-contrast-light", "a11y-high-contrast-dark"

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_default_options = {"members": True}
python_use_unqualified_type_names = True

sphinx_gallery_conf = {
    "examples_dirs": "gallery",
    "gallery_dirs": "examples",
    "filename_pattern": "plot_",
    "within_subsection_order": "FileNameSortKey",
    "show_memory": False,
    "show_signature": False,
    "write_computation_times": False,  # that page would load scripts from a network
    "download_all_examples": False,
    "abort_on_example_error": True,
    "min_reported_time": 5,
    "remove_config_comments": True,
    "plot_gallery": True,
    "thumbnail_size": (400, 280),
    "reset_modules": ("matplotlib",),
    "default_thumb_file": str(ROOT / "docs" / "demo.png"),
}


def as_rst(
    app: Any, what: str, name: str, obj: Any, options: Any, lines: list[str]
) -> None:
    """Docstrings are plain text with `code`, `name:` before an indented text, headings under ----, and indented formulas."""
    found: list[str] = []
    named = literal = False  # what the indented lines that follow are
    for line in inspect.cleandoc("\n".join(lines)).split("\n"):
        indented = line.startswith(" ")
        if indented and not named and not literal:
            found += ["", ".. code-block:: text", ""]
            literal = True
        if re.fullmatch("-{3,}", line):
            found[-1] = f".. rubric:: {found[-1]}"
            found.append("")
        elif line.startswith((">>>", "... ")) or not line.strip():
            found.append(line)
            literal = literal and not line.strip()
        elif indented:
            text = line.replace("`", "") if literal else _escaped(line.strip())
            found.append(f"    {text}")
        else:
            if named or literal:
                found.append("")
            named, literal = re.fullmatch(r"\w+(, \w+)*:", line) is not None, False
            found.append(f"``{line[:-1]}``" if named else _escaped(line))
    lines[:] = [*found, ""]


def _escaped(text: str) -> str:
    """Without what reStructuredText would read as markup, but for `code`; pages are links, and arrows have one character."""
    found = []
    for part in re.split(r"(`[^`]+`)", text):
        if part.startswith("`"):
            found.append(f"`{part}`")
        else:
            plain = re.sub(r"([\\*|_`])", r"\\\1", part.replace("->", "→"))
            found.append(re.sub(r"docs/(\w+)\.md", r":doc:`/\1`", plain))
    return "".join(found)


def readable_signature(
    app: Any, what: str, name: str, obj: Any, options: Any, signature: Any, returns: Any
) -> tuple[str, str | None] | None:
    """A protocol has no arguments of its own, and an empty tensor is short."""
    if what == "class" and getattr(obj, "_is_protocol", False):
        return "", None
    empty = r"tensor\(\[\][^()]*(?:\([^()]*\)[^()]*)?\)"
    return (re.sub(empty, "tensor([])", signature), returns) if signature else None


def without_noise(
    app: Any, what: str, name: str, obj: Any, skip: bool, options: Any
) -> bool | None:
    """Leaves out the fields of named tuples and what scikit-learn adds for the routing of metadata."""
    is_field = (obj.__doc__ or "").startswith("Alias for field")
    return True if is_field or re.fullmatch(r"set_\w+_request", name) else None


UNBROKEN = re.compile(
    r"--\w[\w-]*|[-−<]?\d[\d.,]*(?:e[-−+]?\d+)?(?:\s[±/]\s\d[\d.,]*(?:e[-−+]?\d+)?)*(?:\s\([\d.]+…[\d.]+\))?[%;,]?"
)


SHORT = 14  # characters of a cell, or of code, that stays on one line
WORD = 24  # characters of one word of code that does so
MANY = 6  # columns of a table that may scroll
WIDE, VERY_WIDE = 800, 1800  # pixels of a picture


def for_small_windows(app: Any, tree: nodes.document, page: str) -> None:
    """Numbers (1e-3, 0.35 ± 0.01), options (--output) and short cells in tables, and short code, stay on one line.

    Wide pictures and tables are marked: see site.css.
    """
    for code in tree.findall(nodes.literal):
        text = code.astext()
        if len(text) <= SHORT or (len(text) <= WORD and " " not in text):
            code["classes"].append("short")
    for table in tree.findall(nodes.table):
        rows = [row for body in table.findall(nodes.tbody) for row in body.children]
        names = {row[0].astext() for row in rows}
        if len(rows[0]) >= MANY and len(names) == len(rows):
            table["classes"].append("named-rows")
    for entry in tree.findall(nodes.entry):
        if len(entry.astext()) <= SHORT and not isinstance(
            entry.parent.parent, nodes.thead
        ):
            entry["classes"].append("short")
    texts = [
        text for entry in tree.findall(nodes.entry) for text in entry.findall(nodes.Text)
    ]
    for text in texts:
        numbers = [
            found for found in UNBROKEN.finditer(text) if re.search(r"[\s-]", found.group())
        ]
        if isinstance(text.parent, nodes.literal | nodes.math) or not numbers:
            continue
        parts: list[nodes.Node] = []
        end = 0
        for found in numbers:
            parts += [
                nodes.Text(text[end : found.start()]),
                nodes.inline("", found.group(), classes=["number"]),
            ]
            end = found.end()
        text.parent.replace(text, [*parts, nodes.Text(text[end:])])
    for image in tree.findall(nodes.image):
        size = get_image_size(str(Path(app.srcdir) / image["uri"]))
        if size and size[0] > WIDE:
            image["classes"] += ["wide"] + ["very-wide"] * (size[0] > VERY_WIDE)


def write_messages(app: Any) -> None:
    """docs/messages.md: every warning and error of the source, by module. It is not committed."""
    lines = [
        "# All messages",
        "",
        "Read from the source when this site is built; … stands for a value. Causes and remedies: [Failures](failures.md).",
    ]
    module = None
    for found in messages():
        if not found.text or found.kind in ("Exit", "SystemExit", "AssertionError"):
            continue
        if found.module != module:
            module = found.module
            lines += ["", f"## {_plain(module)}", "", "| kind | text |", "|---|---|"]
        lines.append(f"| {found.kind} | {_plain(found.text)} |")
    page, text = Path(app.srcdir) / "messages.md", "\n".join(lines) + "\n"
    if not page.exists() or page.read_text(encoding="utf-8") != text:
        page.write_text(text, encoding="utf-8")


def _plain(text: str) -> str:
    """Without what Markdown would read as markup."""
    return re.sub(r"([\\`*_|<>$\[\]{}])", r"\\\1", text)


def inline_maths(writer: Any, node: nodes.math) -> None:
    writer.body.append(latex2mathml.converter.convert(node.astext()))
    raise nodes.SkipNode


def display_maths(writer: Any, node: nodes.math_block) -> None:
    writer.body.append(
        f'<div class="maths">{latex2mathml.converter.convert(node.astext(), display="block")}</div>'
    )
    raise nodes.SkipNode


def scrolled_by_keyboard(
    app: Any, page: str, template: str, context: dict[str, Any], tree: Any
) -> None:
    """What may be wider than its window can have the focus, so that arrow keys scroll it. A wide picture opens in full size."""
    scrolls = r'<(pre|div class="(?:maths|table-wrapper)[^"]*")>'
    body = re.sub(scrolls, r'<\1 tabindex="0">', context.get("body", ""))
    wide = r'(<img [^>]*class="[^"]*wide[^"]*"[^>]*src="([^"]+)"[^>]*>)'
    context["body"] = re.sub(wide, r'<a href="\2">\1</a>', body)


def setup(app: Any) -> None:
    app.connect("builder-inited", write_messages)
    app.connect("autodoc-process-docstring", as_rst)
    app.connect("autodoc-process-signature", readable_signature)
    app.connect("autodoc-skip-member", without_noise)
    app.connect("doctree-resolved", for_small_windows)
    app.connect("html-page-context", scrolled_by_keyboard)
    app.add_html_math_renderer("mathml", (inline_maths, None), (display_maths, None))
