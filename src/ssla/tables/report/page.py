"""The page of the report, from its numbers.

Scores, columns, fit and versions need no script and are written here; page.js draws the others, in
the elements with the ids that are written here. In all functions `facts` are as `collect_facts`
returns them.
"""

from __future__ import annotations

import json
import platform
import re
import sys
from datetime import datetime, timezone
from html import escape
from importlib import metadata
from importlib.resources import files
from typing import Any

from ssla import __version__
from ssla.tables.report.subject import Subject

NO_SCRIPT = (
    "<noscript><p>The pictures and the table of rows need JavaScript, which is part of this file."
    "</p></noscript>"
)
POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"
LIBRARIES = ("torch", "numpy", "scikit-learn")
ROWS_OF_COLUMNS = 30  # a longer table of columns scrolls


def render_page(subject: Subject, facts: dict[str, Any], title: str) -> str:
    """Return the HTML text of the page.

    title: the heading, as plain text.
    """
    # "<" is escaped so that no text can close the script element that holds the data.
    data = json.dumps(facts, allow_nan=False, separators=(",", ":"), ensure_ascii=False).replace(
        "<", "\\u003c"
    )
    package = files("ssla.tables.report")
    style = package.joinpath("page.css").read_text(encoding="utf-8")
    script = package.joinpath("page.js").read_text(encoding="utf-8")

    sections = _render_sections(subject, facts)
    shown_rows = _describe_shown_rows(facts)
    remarks = "".join(f"<p>{escape(text)}</p>" for text in subject.remarks)
    links = " ".join(f'<a href="#{name}">{text}</a>' for name, text, _ in sections)
    body = "\n".join(text for _, _, text in sections)
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{POLICY}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{escape(title)}</title>
<style>
{style}</style>
</head>
<body>
<header>
<h1>{escape(title)}</h1>
<p>{facts["n"]:,} test rows, target <b>{escape(subject.target)}</b>. {shown_rows}</p>
{remarks}
<nav aria-label="Sections">{links}</nav>
</header>
<main>
{NO_SCRIPT}
{body}
</main>
<script type="application/json" id="data">{data}</script>
<script>
{script}</script>
</body>
</html>
"""


def _render_sections(subject: Subject, facts: dict[str, Any]) -> list[tuple[str, str, str]]:
    """Return the anchor, the title and the HTML of each section, in the order of the page."""
    return [
        _render_section("scores", "Scores", _render_summary(facts) + _render_scores(facts)),
        _render_section("calibration", "Calibration", _render_calibration(facts)),
        _render_section("doubt", "Where it is unsure", _render_doubt(facts)),
        _render_section("row", "One row", _render_row(facts)),
        _render_section("rows", "Rows", _render_rows(facts)),
        _render_section("columns", "Columns", _render_columns(subject)),
        _render_section("fit", "How the model was fitted", _render_fit(subject)),
        _render_section("versions", "Versions and data", _render_versions(subject)),
    ]


def _render_section(name: str, title: str, content: str) -> tuple[str, str, str]:
    """Return the anchor, the title and the HTML of one section.

    content: the HTML below its title.
    """
    return (
        name,
        title,
        f'<section id="{name}" aria-labelledby="{name}-title">\n<h2 '
        f'id="{name}-title">{title}</h2>\n{content}\n</section>',
    )


def _describe_shown_rows(facts: dict[str, Any]) -> str:
    """Return the sentences on which rows the page shows."""
    if facts["shown"] == facts["n"]:
        return "All of them are in the table below."
    return (
        "Scores and calibration are of all rows. The table and the pictures of single rows have "
        f"{facts['shown']:,} of them: the worst predicted, the most doubtful, and evenly spaced "
        "ones."
    )


def _render_summary(facts: dict[str, Any]) -> str:
    """Return the paragraph on the coverage of the highest level, and on rows with a warning.

    The coverage is compared with the range in which that of a calibrated model would be.
    """
    level = facts["levels"][-1]
    is_class = facts["kind"] == "class"
    scores = {name: value for name, value, _ in facts["scores"]}
    inside = scores[f"share inside the {level:.0%} {'set' if is_class else 'interval'}"]
    low, high = facts["expected"][-1]
    if low <= inside <= high:
        verdict = "This agrees with"
    elif inside > high:
        verdict = "More than"
    else:
        verdict = "Fewer than"

    closing = f"{verdict} a calibrated model, which would have {low:.1%} to {high:.1%}."
    if facts["kind"] in ("class", "count") and inside > high:
        closing += " Sets and counts are discrete, so they contain more than their level."
    warnings = ""
    if facts["flagged"]:
        warnings = f" In {facts['flagged']:,} rows the computation did not reach its tolerance."
    if facts["off_centre"]:
        warnings += (
            f" In {facts['off_centre']:,} rows the mean is farther from the median than the "
            "quartiles are from each other: use quantiles there."
        )

    region = "set of classes" if is_class else "interval"
    return (
        f"<p><b>{inside:.1%} of the rows are inside their {level:.0%} {region}.</b> "
        f"{closing}{warnings}</p>"
    )


def _render_scores(facts: dict[str, Any]) -> str:
    """Return the table of scores beside those of the plug-in, and how to read it."""
    rows = "".join(
        "<tr><th "
        f'scope="row">{escape(name)}</th><td>{_format_number(score)}</td><td>{_format_number(plug_in)}</td></tr>'
        for name, score, plug_in in facts["scores"]
    )
    return (
        '<div class="wide" tabindex="0" role="region" aria-label="Table of scores">'
        '<table><thead><tr><th scope="col">score</th><th scope="col">predictive</th>'
        f'<th scope="col">plug-in</th></tr></thead><tbody>{rows}</tbody></table></div>'
        "<p class=note>The plug-in is the same model without the uncertainty of its weights; of "
        "several members, the mixture. Lower is better for the negative log-likelihood, CRPS, "
        "Brier score, RMSE and calibration errors.</p>"
    )


def _render_calibration(facts: dict[str, Any]) -> str:
    """Return elements that page.js fills with pictures of calibration, and how to read them.

    Classes have one picture of reliability; other targets have a curve and a histogram.
    """
    if facts["kind"] == "class":
        text = (
            "Below the diagonal the model is too sure. The bars are the range of a calibrated "
            "model, the numbers count rows."
        )
        return f'<p>{text}</p><div class="charts"><figure id="reliability"></figure></div>'

    text = (
        "The first picture has the share of rows inside intervals of each level: above the "
        "diagonal, intervals are too wide. The second has the histogram of P(Y ≤ y): flat if "
        "calibrated, a U if intervals are too narrow, a hump if too wide."
    )
    if facts["kind"] == "count":
        text += " Intervals of counts contain more than their level, because counts are discrete."
    return (
        f'<p>{text}</p><div class="charts"><figure id="curve"></figure><figure '
        'id="pit"></figure></div>'
    )


def _render_doubt(facts: dict[str, Any]) -> str:
    """Return elements that page.js fills with doubtful rows, and how to read them.

    The text says whether causes of the doubt are shown.
    """
    text = (
        "Doubt (epistemic) is what more training data would remove; noise (aleatoric) stays. "
        "Doubt as a share of the variance is large for rows that are unlike the training data "
        f"(out-of-distribution). The median share is {facts['medianShare']:.1%}."
    )
    if facts["why"]:
        text += " For the rows listed here, the part on one row says which inputs cause the doubt."
    else:
        text += (
            " What causes the doubt is not shown: this model does not hold its training data, or "
            "holds too many for this page."
        )

    return (
        f'<p>{text}</p><div class="charts"><figure id="scatter"></figure><div><h3 id="most">Rows '
        'with the largest share of doubt</h3><ol id="doubtful" '
        'aria-labelledby="most"></ol></div></div>'
    )


def _render_row(facts: dict[str, Any]) -> str:
    """Return elements that page.js fills with one row, and the slider of the prior.

    In place of the slider there may be the reason why the prior is fixed.
    """
    last = len(facts["factors"]) - 1
    if facts["fixedPrior"]:
        slider = f"<p>{escape(facts['fixedPrior'])}</p>"
    else:
        slider = (
            '<p class="slider"><label for="prior">Strength of the prior: precision × <output '
            'id="strength" for="prior">1</output></label><input type="range" id="prior" min="0" '
            f'max="{last}" step="1" value="{facts["own"]}"></p><p class="note">Other strengths are '
            "computed from the fit by with_prior, without training again.</p>"
        )

    return (
        '<p>Choose a row in the list above or in the table below.</p><h3 id="row-name" '
        f'aria-live="polite"></h3>{slider}<div class="charts"><figure '
        'id="predictive"></figure><div id="numbers" aria-live="polite"></div></div>'
    )


def _render_rows(facts: dict[str, Any]) -> str:
    """Return the empty table that page.js fills with rows, with its search and its pages."""
    return (
        '<p class="tools"><label for="search">Search</label> '
        '<input type="search" id="search" autocomplete="off"> '
        '<span id="found" role="status"></span></p>'
        '<div class="wide" tabindex="0" role="region" aria-label="Table of rows">'
        '<table id="table"><thead></thead><tbody></tbody></table></div>'
        '<p class="tools"><button type="button" id="previous">Previous</button> '
        '<span id="page"></span> '
        '<button type="button" id="next">Next</button></p>'
        '<p class=note>Search looks in all columns and inputs; "doubt &gt; 0.5" and the like '
        "compare a column. A header sorts. Arrow keys move between rows, Enter selects.</p>"
    )


def _render_columns(subject: Subject) -> str:
    """Return the table of the columns and their uses, which scrolls if it is long."""
    rows = "".join(
        f'<tr><th scope="row">{escape(name)}</th><td>{escape(use)}</td></tr>'
        for name, use in subject.columns
    )
    count = len(subject.columns)
    scrolls = count > ROWS_OF_COLUMNS
    note = f"<p class=note>{count:,} columns: the table scrolls.</p>" if scrolls else ""
    box = "wide low" if scrolls else "wide"
    return (
        f'{note}<div class="{box}" tabindex="0" role="region" aria-label="Table '
        'of columns"><table class="texts"><thead><tr><th scope="col">column</th><th '
        f'scope="col">use</th></tr></thead><tbody>{rows}</tbody></table></div>'
    )


def _render_fit(subject: Subject) -> str:
    """Return a list for each text on the fit: the settings, and reports of posteriors."""
    lists = []
    for name, text in subject.fit:
        items = "".join(map(_render_item, text.splitlines()))
        lists.append(f'<h3>{escape(name)}</h3><dl class="fit">{items}</dl>')
    return "".join(lists)


def _render_item(line: str) -> str:
    """Return the HTML entry for a line of a report: a name, two spaces or more, and a value.

    A line without a value has an empty one.
    """
    name, *value = re.split(r" {2,}", line, maxsplit=1)
    return f"<div><dt>{escape(name)}</dt><dd>{escape(''.join(value))}</dd></div>"


def _render_versions(subject: Subject) -> str:
    """Return the list of the versions of libraries, the time now, and the hashes of the data."""
    entries = [("ssla", __version__), ("Python", platform.python_version())]

    # Only libraries that are in use: the report of a posterior needs no scikit-learn.
    for name in LIBRARIES:
        module = "sklearn" if name == "scikit-learn" else name
        if module in sys.modules:
            entries.append((name, metadata.version(name)))

    entries.append(("written", datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC")))
    entries += [(f"SHA-256 of the {name}", value) for name, value in subject.hashes]
    items = "".join(
        f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>" for name, value in entries
    )
    return f"<dl>{items}</dl>"


def _format_number(value: float) -> str:
    """Return a number as text with four digits, and with a minus sign in place of a hyphen."""
    return f"{value:.4g}".replace("-", "−")
