"""The page of the reproduction: what holds, what does not, what was wrong. Tables and verdicts come from the results."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Collection
from pathlib import Path
from typing import Any

from ssla.persistence.replacing import new_file
from ssla_paper.runner import OURS, PAPER, REPEATED, Workplace, write_whole

HEAD = """# Reproduction of the paper

Written by `python -m ssla_paper`{quick}; do not edit. Each study shows the published value beside ours: by the procedure that
produced it, if that is known, and by a correct computation of the method.
"""
WRONG = """
## What was wrong

The method is correct: with the prior in refit and curvature, and a refit for every y, SSLA is exact in normal and linear models
(see conjugate, sine, priors), and ASSLA is the plug-in with corrections of order 1/n (rates). Many published numbers measure
something else. "By the code" marks statements that are based on the authors' code and not only on the paper; the claims below
state how much each explanation covers.

- The text: θ̂ is a maximum-likelihood estimate in the derivation and a posterior mode in Algorithm 1 and in the proofs; "no refit
  for another prior" is true only for the former. Algorithm 1 refits on ŷ, where for a Gaussian nothing moves and SSLA would be
  ASSLA: a refit for every y is needed. The appendix on highest-density regions uses ∫(y − f)² as a likelihood and cannot be used.
- Network rows of ASSLA (by the code): one width for every input, the bandwidth of a kernel density estimate over the grid of y,
  0.3985. It reproduces part of the published cells to within a test row, since rows, splits and networks are not given.
  (heteroscedastic, uci)
- Rows of classical Laplace (by the code): the noise was left at one on standardised targets. Its wide intervals come from this
  setting. With fitted noise and prior it is a strong method; on the same network, at the same mode and with the same noise, it
  and our default are the same predictive. (uci)
- Network rows of SSLA (by the code): an optimiser is started again for at most ten epochs on each candidate, and the curvature
  term vanishes. The order of rows alone changes its coverage; refits that converge agree. (heteroscedastic)
- The networks (by the code) have one output trained by squared error, not a mean and a variance; Table 2 is one seed and 25 rows,
  four points each. MFVI weights its divergence by the number of weights, HMC counts its variance twice. (heteroscedastic)
- The loss of accuracy at a million rows comes from subtracting two float32 sums of ℓ. The text names the curvature term as the
  cause in one sentence, and the sums, correctly, in the next and in a footnote. (conjugate, precision)
- The prior-modularity tables have the prior in the refit but not in the curvature: the shape is that of the exact predictive,
  the mass is not. (priors)
- The proof of Lemma 1 has the wrong sign of the step, and that of Theorem 1 a remainder of order 1/n² that is of order 1/n.
  (rates)
- The appendix names Brier score, calibration error, out-of-distribution inputs, shift, label noise, ablations and overhead, but
  no results are shown. In our measurements our default for classes is not the best calibrated. (robustness)
- Of the UCI sets, Bike Sharing predicts a temperature from the felt temperature and Daily Demand a sum from its terms; scalers
  were fitted with the test rows, and for the four larger sets 50 test rows were scored (by the code). Our splits share rows with
  those on which our defaults were chosen. (uci)
"""
QUICK = " --quick: a small version of every study, as a test of the code"


def write_page(place: Workplace, studies: Collection[str], target: Path | None = None) -> Path:
    """page.md beside the results, from existing summaries and tables, in the order of the studies.

    target: another file; copies of the figures go to a folder of the same name beside it.
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
            parts.append(f"**From {done} of {all_tasks} tasks:** the run was not finished. Run it again to continue.\n")
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
    """One line for each study, and the counts by kind of claim."""
    rows = [
        "| study | the paper's statements: hold | do not | its results: reproduced | not reproduced | ours: hold | do not |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    wanted = [(kind, holds) for kind in (PAPER, REPEATED, OURS) for holds in (True, False)]
    total = [0] * len(wanted)
    for name, summary in found.items():
        kinds = [(claim["kind"], claim["holds"]) for claim in summary["claims"]]
        counts = [kinds.count(kind) for kind in wanted]
        total = [a + b for a, b in zip(total, counts, strict=True)]
        rows.append(f"| [{name}](#{_anchor(summary['title'])}) | {' | '.join(map(str, counts))} |")
    totals = (
        f"Of the paper's statements {total[0]} hold and {total[1]} do not, when the method is computed correctly. Of its results "
        f"{total[2]} are reproduced by the procedure known, or stated, to have produced them and {total[3]} are not. Of our "
        f"own goals and findings, including those about our default, {total[4]} hold and {total[5]} do not."
    )
    return f"\n{totals}\n\n" + "\n".join(rows)


def _anchor(title: str) -> str:
    """The anchor of a heading on GitHub."""
    return "".join(letter for letter in title.lower().replace(" ", "-") if letter.isalnum() or letter in "-_")


def _claim(claim: dict[str, Any]) -> str:
    verdict = "Holds" if claim["holds"] else "**Does not hold**"
    reason = f" {claim['reason']}" if claim["reason"] else ""
    return f"- {verdict}: {claim['statement']}. Published: {claim['published']}. Found: {claim['found']}.{reason}"


def _placed(figure: Path, page: Path, folder: Path) -> Path:
    """The path of the figure for the page: in the results, or a copy beside the page."""
    if page.parent == folder:
        return figure.relative_to(folder)
    copy = page.with_suffix("") / figure.name
    with new_file(copy) as draft:
        shutil.copyfile(figure, draft)
    return Path(os.path.relpath(copy, page.parent))
