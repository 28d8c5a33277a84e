"""The page that a reviewer reads: what holds, what does not, what was wrong. Written from the results alone."""

from __future__ import annotations

import json
from pathlib import Path

from ssla.paper.runner import Workplace, write_whole

HEAD = """# The paper, reproduced

Written by `python -m ssla.paper`{quick}; do not edit. Each study gives the published value beside ours, by the procedure that
produced it where that is known, and beside what the method gives when it is computed right.
"""


def write_page(place: Workplace) -> Path:
    """page.md beside the results, from the summaries and tables that are there."""
    folder = place.results("")
    parts = [HEAD.format(quick=" --quick: a small version of every study, for checking the machinery" if place.quick else "")]
    held = refuted = 0
    for summary in sorted(folder.glob("*/summary.json")):
        found = json.loads(summary.read_text(encoding="utf-8"))
        parts.append(f"\n## {found['title']}\n")
        for claim in found["claims"]:
            held, refuted = held + claim["holds"], refuted + (not claim["holds"])
            verdict = "Holds" if claim["holds"] else "**Does not hold**"
            reason = f" {claim['reason']}" if claim["reason"] else ""
            parts.append(f"- {verdict}: {claim['statement']}. Published: {claim['published']}. Found: {claim['found']}.{reason}")
        for table in sorted(summary.parent.glob("*.md")):
            parts.append("\n" + table.read_text(encoding="utf-8").strip())
        for figure in sorted(summary.parent.glob("*.png")):
            parts.append(f"\n![{figure.stem}]({figure.relative_to(folder)})")
    parts.insert(1, f"\n{held} statements hold, {refuted} do not.")
    page = folder / "page.md"
    write_whole(page, "\n".join(parts) + "\n")
    return page
