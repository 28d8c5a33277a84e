"""python -m ssla_paper: reproduce studies of the paper."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from ssla_paper.page import Summary, write_page
from ssla_paper.runner import Claim, TaskError, Workplace, run
from ssla_paper.shipped import (
    describe_records,
    read_shipped,
    read_summary,
    report_shipped,
    ship_records,
)
from ssla_paper.studies import STUDIES, study


def reproduce(
    names: list[str],
    folder: Path,
    *,
    quick: bool = False,
    jobs: int = 1,
    progress: bool = True,
    page: Path | None = None,
    work: bool = True,
    unfinished: bool = False,
    ship: bool = False,
) -> None:
    """Run the studies and write the page, beside the results and at `page`.

    work=False computes nothing: it reports the shipped records. unfinished=True computes nothing
    either: it reports the records in the folder, also of an interrupted run. ship=True then writes
    the records of the run into the package.
    """
    if jobs < 1:
        raise ValueError(f"jobs must be 1 or more, but is {jobs}.")
    if ship and (quick or unfinished or not work):
        raise ValueError(
            "The records of a full run can be shipped: give --ship without --quick, --report and "
            "--unfinished."
        )
    if not work and not unfinished:
        report(names, folder, quick=quick, page=page)
        return
    place, studies = (
        Workplace(folder, quick),
        [study(name) for name in names],
    )  # all of them before the first starts
    if page is not None:
        _can_be_written(page)
    failed: list[str] = []
    for each in studies:
        try:
            found = run(each, place, jobs, progress, work and not unfinished)
        except TaskError as error:  # the other studies still run
            failed.append(f"{each.name}: {error}")
            continue
        _print_claims(found)
        if ship:
            try:
                print(f"records shipped: {ship_records(each, place)}")
            except ValueError as error:  # the other studies still run
                failed.append(f"{each.name}: {error}")
    _write_pages(place, page)
    if failed:
        raise TaskError(
            "Not reproduced (finished tasks are kept; run again to continue): " + "; ".join(failed)
        )


def report(
    names: list[str],
    folder: Path,
    *,
    quick: bool = False,
    page: Path | None = None,
) -> None:
    """Write tables, figures and pages from the shipped records. Nothing is computed.

    A study without shipped records keeps its page; its statements are those of its last summary.
    With `page` all studies are reported, since the page is about all of them.
    """
    if quick:
        raise ValueError("The shipped records are of full runs: give --report without --quick.")
    place, studies = Workplace(folder), [study(name) for name in names]
    if page is not None:
        _can_be_written(page)
        studies = [study(name) for name in STUDIES]
    not_shipped: dict[str, Summary] = {}
    for each in studies:
        shipped = read_shipped(each.name)
        if shipped is not None:
            _print_claims(report_shipped(shipped, each, place))
            continue
        print(f"records not shipped yet: {each.name}; its page stays as it is")
        not_shipped[each.name] = read_summary(each)
    _write_pages(place, page, not_shipped)


def list_studies() -> str:
    """A table of the studies: title, tasks, what they cost, and the state of their records."""
    lines = [("study", "tasks", "CPU minutes", "records", "title")]
    for name in STUDIES:
        each = study(name)
        cost, state = describe_records(each)
        lines.append((name, str(len(each.tasks(quick=False))), cost, state, each.title))
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    )


def _print_claims(claims: list[Claim]) -> None:
    for claim in claims:
        print(
            f"{'holds   ' if claim.holds else 'does not'} {claim.statement}: published "
            f"{claim.published}; found {claim.found}"
        )


def _write_pages(
    place: Workplace, page: Path | None, not_shipped: dict[str, Summary] | None = None
) -> None:
    """Write the page beside the results, and at `page`."""
    written = write_page(place, STUDIES, None, not_shipped)
    if page is not None:
        written = write_page(place, STUDIES, page, not_shipped)
    print(f"tables and figures are in {place.results('')}, the page is {written}")


def _can_be_written(page: Path) -> None:
    """ValueError before hours of work if the page cannot be written."""
    try:
        page.parent.mkdir(parents=True, exist_ok=True)
        is_new = not page.exists()
        page.open("a").close()
        if is_new:
            page.unlink()
    except OSError as error:
        raise ValueError(
            f"The page {page} cannot be written: {error.strerror}. Give another --page."
        ) from error


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m ssla_paper", description=__doc__)
    parser.add_argument("studies", nargs="*", help=f"of: {', '.join(STUDIES)}")
    parser.add_argument("--all", action="store_true", help="every study")
    parser.add_argument("--quick", action="store_true", help="a small version of each, for CI")
    parser.add_argument(
        "--folder",
        type=Path,
        default=Path("paper"),
        help="folder of records and results (default: paper)",
    )
    parser.add_argument(
        "--page",
        type=Path,
        help="write the page here too, with copies of the figures (docs/paper.md)",
    )
    parser.add_argument(
        "--list",
        action="store_true",
        help="each study: tasks, CPU minutes, and whether its shipped records are current",
    )
    parser.add_argument(
        "--report",
        action="store_true",
        help="no computation: tables, figures and pages from the shipped records",
    )
    parser.add_argument(
        "--unfinished",
        action="store_true",
        help="no computation: the same from the records in --folder, also of an interrupted run",
    )
    parser.add_argument(
        "--ship",
        action="store_true",
        help="after a full run: write its records into the package, for --report",
    )
    parser.add_argument("--jobs", type=int, default=2, help="processes (default: 2)")
    options = parser.parse_args()
    names = list(STUDIES) if options.all or not options.studies else options.studies
    try:
        if options.list:
            print(list_studies())
            return 0
        if not options.studies and not options.all and not options.report:
            parser.error("name a study, or --all")
        reproduce(
            names,
            options.folder,
            quick=options.quick,
            jobs=options.jobs,
            page=options.page,
            work=not options.report,
            unfinished=options.unfinished,
            ship=options.ship,
        )
    except (ValueError, ImportError, TaskError) as error:
        print(error, file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted: finished tasks are kept; run again to continue", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
