"""The pages of the reproduction: one for a reader, and an appendix for each study. Tables and verdicts come from the results."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

from ssla.persistence.replacing import new_file
from ssla_paper.runner import OURS, PAPER, REPEATED, Workplace, write_whole

Summary = dict[str, Any]

HEAD = """# The paper: what holds

Written by `python -m ssla_paper`{quick}; do not edit. The paper is J. Rodemann, A. Marquard, T. Augustin, M. Caprio,
*Self-Supervised Laplace Approximation for Bayesian Uncertainty Quantification*, TMLR, 2026. Every verdict on this page is
computed from the records of a run. Each study has an appendix, with each published value beside ours: by the procedure that
produced it, if that is known, and by a correct computation of the method.
"""
CLAIMED = """
## What was claimed

The paper computes the distribution of y at a new input x without samples: add a candidate (x, y) to the data, fit again,
and compare. Three increments, of the likelihood, of the prior and of the curvature, add up to log p(y | x, D). With a refit
for every candidate this is SSLA; without one it is ASSLA, which is cheaper.

The paper claims that

1. both recover the exact predictive close to perfectly where it is known, from 20 to 100,000 rows (conjugate, sine);
2. replacing the refitted mode by the old one costs an error of order 1/n, which justifies ASSLA (rates);
3. the prior is a module: another prior can be put in directly (priors);
4. on networks ASSLA is often sharper and better calibrated than classical Laplace, which is too conservative, but may
   under-cover; SSLA covers better in some regimes and is costlier and less stable (heteroscedastic, uci);
5. numerical instabilities appear from a million rows on (precision);
6. overall, accuracy matches or exceeds the baselines', with better-calibrated uncertainty, at a modest cost (robustness).
"""
MEANING = """
## What this means for a user

Keep the prior in the refit and in the curvature: this is the library's `exact` convention and its default. Do not expect
uncertainty about the network from ASSLA: with constant Gaussian noise it is the plug-in. With Gaussian noise the default, a
refit in output space, is classical Laplace plus noise. Real refits of the weights are the most accurate answer and the most
expensive one.

"Our default" in these studies is the refit in output space with the Gaussian at the mode, also for classes, counts and
unknown variances. The library has since chosen the variational Gaussian and another prior for those: the pages on trained
models and on priors have its figures.
"""
WHY = """
## Why

The method is correct: with the prior in refit and curvature, and a refit for every y, SSLA is exact in normal and linear
models. Many published numbers measure something else. "By the code" marks what was read in the authors' code and not in the
paper.

- **The text.** θ̂ is a maximum-likelihood estimate in the derivation and a posterior mode in Algorithm 1 and in the proofs;
  "no refit for another prior" is true only for the former. Algorithm 1 refits on ŷ, where for a Gaussian nothing moves and
  SSLA would be ASSLA: a refit for every y is needed. The appendix on highest-density regions uses ∫(y − f)² as a likelihood
  and cannot be used.
- **ASSLA on networks (by the code):** one width for every input, the bandwidth of a kernel density estimate over the grid
  of y.
- **Classical Laplace (by the code):** the noise was left at one on standardised targets, so its intervals are wide. With
  fitted noise and prior, on the same network, it and our default are the same predictive.
- **SSLA on networks (by the code):** an optimiser is started again for at most ten epochs on each candidate, and the
  curvature term vanishes. The order of rows alone changes its coverage; refits that converge agree.
- **The networks (by the code)** have one output trained by squared error, not a mean and a variance; Table 2 is one seed
  and 25 rows, four points each. MFVI weights its divergence by the number of weights, HMC counts its variance twice.
- **A million rows.** The loss of accuracy comes from subtracting two float32 sums of ℓ. The text names the curvature term in one
  sentence, and the sums, correctly, in the next and in a footnote.
- **Prior modularity.** The tables have the prior in the refit but not in the curvature: the shape is exact, the mass is
  not.
- **The proofs.** That of Lemma 1 has the wrong sign of the step, that of Theorem 1 a remainder of order 1/n² that is of
  order 1/n.
- **Robustness.** The appendix names results that are not shown. In our measurements our default for classes is not the best
  calibrated.
- **The UCI sets.** Bike Sharing predicts a temperature from the felt temperature and Daily Demand a sum from its terms;
  scalers were fitted with the test rows, and for the four larger sets 50 test rows were scored (by the code). Our splits
  share rows with those on which our defaults were chosen.
"""
QUICK = " --quick: a small version of every study, as a test of the code"
FIGURES = (  # study, figure, what it shows; verdicts are in the tables
    (
        "conjugate",
        "conjugate-kl",
        "Distance from the exact predictive against the number of rows. The published procedures subtract float32 sums.",
    ),
    (
        "rates",
        "rates",
        "Sizes of the increments against n, beside the powers −1 and −2; on the right with inputs that stop varying.",
    ),
    ("priors", "priors-set", "A set of priors: bounds of the distribution function, and the upper density by its corners alone."),
    (
        "heteroscedastic",
        "heteroscedastic-coverage",
        "Coverage less nominal coverage: as published, and computed correctly over seeds.",
    ),
    ("uci", "uci-ranks-nll", "Mean ranks over the UCI sets. Bars join methods that are not significantly different."),
    ("robustness", "robustness-outside", "Detection of out-of-distribution inputs by the entropy of the prediction."),
)


def write_page(place: Workplace, studies: Collection[str], target: Path | None = None) -> Path:
    """page.md beside the results, and page/<study>.md: from existing summaries and tables, in the order of the studies.

    target: another file; the appendices and copies of the figures go to a folder of the same name beside it.
    """
    folder = place.results("")
    page = target or folder / "page.md"
    found = {name: _summary(folder / name) for name in studies if (folder / name / "summary.json").exists()}
    for name, summary in found.items():
        write_whole(page.with_suffix("") / f"{name}.md", _appendix(name, summary, folder, page))
    write_whole(page, _reader(place, found, set(found) == set(studies), page))
    return page


def _reader(place: Workplace, found: dict[str, Summary], whole: bool, page: Path) -> str:
    """The page for a reader. The prose about all studies is there only if all were run."""
    folder = place.results("")
    parts = [HEAD.format(quick=QUICK if place.quick else ""), *_unfinished(found), CLAIMED.strip(), _overview(found, page)]
    parts += [
        _statements("What holds", "These statements of the paper hold", found, page, lambda c: c["kind"] == PAPER and c["holds"])
    ]
    parts += _figures(FIGURES[:2], found, folder, page)
    parts += [_statements("What does not hold", "These do not", found, page, lambda c: c["kind"] == PAPER and not c["holds"])]
    parts += _figures(FIGURES[2:5], found, folder, page)
    parts += [_reproduced(found, page), *([WHY.strip()] if whole else []), *_figures(FIGURES[5:], found, folder, page)]
    return "\n\n".join(part.strip("\n") for part in [*parts, *([MEANING] if whole else [])]) + "\n"


def _appendix(name: str, summary: Summary, folder: Path, page: Path) -> str:
    """Everything about one study: statements with what was published and found, tables, figures."""
    parts = [
        f"# {summary['title']}",
        f"An appendix of [the page on the paper](../{page.name}), written by `python -m ssla_paper`; do not edit.",
        *_unfinished({name: summary}),
        "## Statements",
        "\n".join(_claim(claim) for claim in summary["claims"]),
    ]
    tables = sorted((folder / name).glob("*.md"))
    parts += ["## Tables"] * bool(tables) + [table.read_text(encoding="utf-8").strip() for table in tables]
    figures = sorted((folder / name).glob("*.png"))
    parts += ["## Figures"] * bool(figures)
    parts += [f"![{figure.stem}]({_placed(figure, page, page.with_suffix(''), folder)})" for figure in figures]
    return "\n\n".join(parts) + "\n"


def _summary(folder: Path) -> Summary:
    found: Summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    return found


def _unfinished(found: dict[str, Summary]) -> list[str]:
    return [
        f"**From {summary['done'][0]} of {summary['done'][1]} tasks:** the run of {name} was not finished. Run it again."
        for name, summary in found.items()
        if summary["done"][0] < summary["done"][1]
    ]


def _link(name: str, page: Path) -> str:
    return f"[{name}]({page.stem}/{name}.md)"


def _overview(found: dict[str, Summary], page: Path) -> str:
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
        rows.append(f"| {_link(name, page)} | {' | '.join(map(str, counts))} |")
    totals = (
        f"Of the paper's statements {total[0]} hold and {total[1]} do not, when the method is computed correctly. Of its results "
        f"{total[2]} are reproduced by the procedure known, or stated, to have produced them and {total[3]} are not. Of our "
        f"own goals and findings, including those about our default, {total[4]} hold and {total[5]} do not."
    )
    return f"## In numbers\n\n{totals}\n\n" + "\n".join(rows)


def _statements(title: str, lead: str, found: dict[str, Summary], page: Path, chosen: Callable[[dict[str, Any]], bool]) -> str:
    """The chosen claims of all studies as a table. What was published and found is in the appendices."""
    rows = [
        f"| {statement} | {_link(name, page)} |"
        for name, summary in found.items()
        for statement in _joined([claim["statement"] for claim in summary["claims"] if chosen(claim)])
    ]
    if not rows:
        return f"## {title}\n\nNone of these studies."
    return f"## {title}\n\n{lead}; the numbers are in the appendix that is named.\n\n" + "\n".join(
        ["| statement | study |", "|---|---|", *rows]
    )


def _joined(statements: list[str]) -> list[str]:
    """Statements that differ only after a colon as one: "A: b", "A: c" -> "A: b; c"."""
    grouped: dict[str, list[str]] = {}
    for statement in statements:
        start, colon, end = statement.partition(": ")
        grouped.setdefault(start, []).append(end if colon else "")
    return [f"{start}: {'; '.join(ends)}" if any(ends) else start for start, ends in grouped.items()]


def _reproduced(found: dict[str, Summary], page: Path) -> str:
    """Whether the procedure behind a published result gives it."""
    rows = [
        f"| {claim['statement']} | {'yes' if claim['holds'] else '**no**'} | {_link(name, page)} |"
        for name, summary in found.items()
        for claim in summary["claims"]
        if claim["kind"] == REPEATED
    ]
    lead = "Whether the published procedure, as far as it is known, gives the published result:"
    table = "\n".join(["| result | reproduced | study |", "|---|---|---|", *rows]) if rows else "None of these studies."
    return f"## Can its numbers be reproduced?\n\n{lead}\n\n{table}"


def _figures(chosen: Collection[tuple[str, str, str]], found: dict[str, Summary], folder: Path, page: Path) -> list[str]:
    """Those that exist, each with its caption."""
    return [
        f"![{name}]({_placed(folder / study / f'{name}.png', page, page.parent, folder)})\n\n*{caption}* ({_link(study, page)})"
        for study, name, caption in chosen
        if study in found and (folder / study / f"{name}.png").exists()
    ]


def _claim(claim: dict[str, Any]) -> str:
    verdict = "Holds" if claim["holds"] else "**Does not hold**"
    reason = f" {claim['reason']}" if claim["reason"] else ""
    return f"- {verdict}: {claim['statement']}. Published: {claim['published']}. Found: {claim['found']}.{reason}"


def _placed(figure: Path, page: Path, start: Path, folder: Path) -> str:
    """The path of the figure from `start`: in the results, or a copy in the folder of the page."""
    if page.parent == folder:
        return Path(os.path.relpath(figure, start)).as_posix()
    copy = page.with_suffix("") / figure.name
    with new_file(copy) as draft:
        shutil.copyfile(figure, draft)
    return Path(os.path.relpath(copy, start)).as_posix()
