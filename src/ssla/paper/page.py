"""The page that a reviewer reads: what holds, what does not, what was wrong. Written from the results alone."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Collection
from pathlib import Path
from typing import Any

from ssla.paper.runner import Workplace, write_whole

HEAD = """# The paper, reproduced

Written by `python -m ssla.paper`{quick}; do not edit. Each study gives the published value beside ours, by the procedure that
produced it where that is known, and beside what the method gives when it is computed right.
"""
WRONG = """
## What was wrong, in one place

The method stands: with the prior in refit and curvature, and a refit for every y, SSLA is exact where theory says so (normal and
linear models, Student's t), and ASSLA is the plug-in with a correction of order 1/n. Most published numbers measure
something else:

- The network rows of ASSLA have one width for every input: the bandwidth of a kernel density estimate over the grid of y, 0.3985.
  They say nothing about the method. (heteroscedastic, uci)
- The rows of classical Laplace leave the noise at one on standardised targets. That it is wide and safe is this setting, not
  Laplace; with noise and prior fitted it is a strong peer. (heteroscedastic, uci)
- The network rows of SSLA restart an optimiser for ten epochs on each candidate, and their curvature term is zero: what differs
  between KFAC, diagonal and dense is the optimiser's noise. (heteroscedastic)
- The loss of accuracy at a million rows comes from subtracting two float32 sums of ℓ, not from the curvature, and increments row
  by row do not have it. (conjugate, precision)
- The prior-modularity tables have the prior in the refit but not in the curvature; with a strong prior that is not the
  predictive. (priors)
- Lemma 1 has the sign of the step reversed, and Theorem 1's remainder is of order 1/n, not 1/n². (rates)
- Brier score, calibration error, foreign inputs, shift, label noise, ablations and overhead are named in the appendix
  and shown nowhere. (robustness)
"""
QUICK = " --quick: a small version of every study, for checking the machinery"


def write_page(place: Workplace, studies: Collection[str], target: Path | None = None) -> Path:
    """page.md beside the results, from the summaries and tables that are there, in the order of the studies.

    target: another file, which gets copies of the figures in a folder of its own name beside it.
    """
    folder = place.results("")
    page = target or folder / "page.md"
    found = {name: _summary(folder / name) for name in studies if (folder / name / "summary.json").exists()}
    parts = [HEAD.format(quick=QUICK if place.quick else ""), _overview(found)]
    if set(found) == set(studies):
        parts.append(WRONG.rstrip())
    for name, summary in found.items():
        parts.append(f"\n## {summary['title']}\n")
        done, all_tasks = summary["done"]
        if done < all_tasks:
            parts.append(f"**From {done} of {all_tasks} tasks:** the run was not finished. Start it again to go on.\n")
        parts += [_claim(claim) for claim in summary["claims"]]
        for table in sorted((folder / name).glob("*.md")):
            parts.append("\n" + table.read_text(encoding="utf-8").strip())
        for figure in sorted((folder / name).glob("*.png")):
            parts.append(f"\n![{figure.stem}]({_placed(figure, page, folder).as_posix()})")
    write_whole(page, "\n".join(parts) + "\n")
    return page


def _summary(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    return found


def _overview(found: dict[str, dict[str, Any]]) -> str:
    """One line a study, and the count."""
    rows = ["| study | statements that hold | that do not |", "|---|---:|---:|"]
    held = refuted = 0
    for name, summary in found.items():
        good = sum(claim["holds"] for claim in summary["claims"])
        bad = len(summary["claims"]) - good
        held, refuted = held + good, refuted + bad
        rows.append(f"| [{name}](#{_anchor(summary['title'])}) | {good} | {bad} |")
    return f"\n{held} statements hold, {refuted} do not.\n\n" + "\n".join(rows)


def _anchor(title: str) -> str:
    """As GitHub makes it."""
    return "".join(letter for letter in title.lower().replace(" ", "-") if letter.isalnum() or letter in "-_")


def _claim(claim: dict[str, Any]) -> str:
    verdict = "Holds" if claim["holds"] else "**Does not hold**"
    reason = f" {claim['reason']}" if claim["reason"] else ""
    return f"- {verdict}: {claim['statement']}. Published: {claim['published']}. Found: {claim['found']}.{reason}"


def _placed(figure: Path, page: Path, folder: Path) -> Path:
    """Where the page finds the figure: as it lies in the results, or a copy beside the page."""
    if page.parent == folder:
        return figure.relative_to(folder)
    copy = page.with_suffix("") / figure.name
    copy.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(figure, copy)
    return Path(os.path.relpath(copy, page.parent))
