"""The page that a reviewer reads: what holds, what does not, what was wrong. Tables and verdicts are written from the results."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Collection
from pathlib import Path
from typing import Any

from ssla.persistence.replacing import new_file
from ssla_paper.runner import OURS, PAPER, REPEATED, Workplace, write_whole

HEAD = """# The paper, reproduced

Written by `python -m ssla_paper`{quick}; do not edit. Each study gives the published value beside ours, by the procedure that
produced it where that is known, and beside what the method gives when it is computed right.
"""
WRONG = """
## What was wrong, in one place

The method stands: with the prior in refit and curvature, and a refit for every y, SSLA is exact in normal and linear models (see
conjugate, sine, priors), and ASSLA is the plug-in with corrections of order 1/n (rates). Much of what was published measures
something else. Where the authors' code was read and not only the paper, this says so (by the code); the claims below say how far
each explanation carries.

- The text: θ̂ is a maximum-likelihood estimate in the derivation and a posterior mode in Algorithm 1 and in the proofs; "no refit
  for another prior" fits the former alone. Algorithm 1 refits on ŷ, where for a Gaussian nothing moves and SSLA would be ASSLA: a
  refit for every y is needed. The appendix on highest-density regions uses ∫(y − f)² as a likelihood and is of no use.
- Network rows of ASSLA (by the code): one width for every input, the bandwidth of a kernel density estimate over the grid of y,
  0.3985. Of the published cells it gives part to a test row, since the rows, splits and networks are not given. (heteroscedastic,
  uci)
- Rows of classical Laplace (by the code): the noise was left at one on standardised targets. That it is wide and safe is this
  setting. With noise and prior fitted it is a strong peer; on the same network, at the same mode and with the same noise, it and
  our default are one predictive. (uci)
- Network rows of SSLA (by the code): an optimiser is started again for at most ten epochs on each candidate, and the curvature
  term vanishes. The order of rows alone moves its coverage; refits taken to their mode agree. (heteroscedastic)
- The networks (by the code) have one output trained by squared error, not a mean and a variance; Table 2 is one seed and 25 rows,
  four points each. MFVI weights its divergence by the number of weights, HMC counts its variance twice. (heteroscedastic)
- The loss of accuracy at a million rows comes from subtracting two float32 sums of ℓ. The text blames the curvature term in one
  sentence, and in the next and a footnote, rightly, the sums. (conjugate, precision)
- The prior-modularity tables have the prior in the refit but not in the curvature: the shape is that of the exact predictive, the
  mass is not. (priors)
- Lemma 1's proof has the sign of the step reversed, and Theorem 1's a remainder of order 1/n², which is 1/n. (rates)
- Brier score, calibration error, foreign inputs, shift, label noise, ablations and overhead are named in the appendix and shown
  nowhere; measured, our default for classes is not the best calibrated. (robustness)
- Of the UCI sets, Bike Sharing predicts a temperature from the felt temperature and Daily Demand a sum from its terms; scalers
  saw the test rows, and of the four larger sets 50 test rows were scored (by the code). Our splits share rows with those on which
  our defaults were chosen. (uci)
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
    """One line a study, and the count by kind of claim."""
    rows = [
        "| study | the paper's statements: hold | do not | its results: given | not given | ours: hold | do not |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    wanted = [(kind, holds) for kind in (PAPER, REPEATED, OURS) for holds in (True, False)]
    total = [0] * len(wanted)
    for name, summary in found.items():
        kinds = [(claim["kind"], claim["holds"]) for claim in summary["claims"]]
        counts = [kinds.count(kind) for kind in wanted]
        total = [a + b for a, b in zip(total, counts, strict=True)]
        rows.append(f"| [{name}](#{_anchor(summary['title'])}) | {' | '.join(map(str, counts))} |")
    said = (
        f"Of the paper's statements {total[0]} hold and {total[1]} do not, when the method is computed right. Of its results "
        f"{total[2]} are given by the procedure that is known, or said, to have made them and {total[3]} are not. Of our own "
        f"goals and findings, those about our default among them, {total[4]} hold and {total[5]} do not."
    )
    return f"\n{said}\n\n" + "\n".join(rows)


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
    with new_file(copy) as draft:
        shutil.copyfile(figure, draft)
    return Path(os.path.relpath(copy, page.parent))
