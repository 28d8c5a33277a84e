"""python -m ssla_paper: reproduce studies of the paper."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from ssla_paper.page import write_page
from ssla_paper.runner import TaskError, Workplace, run
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
) -> None:
    """Run the studies (work=False: only report existing records) and write the page, beside the
    results and at `page`.
    """
    if jobs < 1:
        raise ValueError(f"jobs must be 1 or more, but is {jobs}.")
    place, studies = (
        Workplace(folder, quick),
        [study(name) for name in names],
    )  # all of them before the first starts
    if page is not None:
        _can_be_written(page)
    failed: list[str] = []
    for each in studies:
        try:
            found = run(each, place, jobs, progress, work)
        except TaskError as error:  # the other studies still run
            failed.append(f"{each.name}: {error}")
            continue
        for claim in found:
            print(
                f"{'holds   ' if claim.holds else 'does not'} {claim.statement}: published "
                f"{claim.published}; found {claim.found}"
            )
    written = write_page(place, STUDIES)
    if page is not None:
        written = write_page(place, STUDIES, page)
    print(f"tables and figures are in {place.results('')}, the page is {written}")
    if failed:
        raise TaskError(
            "Not reproduced (finished tasks are kept; run again to continue): " + "; ".join(failed)
        )


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
        "--report",
        action="store_true",
        help="no computation: tables and page from existing records",
    )
    parser.add_argument("--jobs", type=int, default=2, help="processes (default: 2)")
    options = parser.parse_args()
    names = list(STUDIES) if options.all else options.studies
    if not names:
        parser.error("name a study, or --all")
    try:
        settings = {
            "quick": options.quick,
            "jobs": options.jobs,
            "page": options.page,
            "work": not options.report,
        }
        reproduce(names, options.folder, **settings)
    except (ValueError, ImportError, TaskError) as error:
        print(error, file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted: finished tasks are kept; run again to continue", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
