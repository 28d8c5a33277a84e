"""The bits of every public answer, to be compared before and after a refactoring on one machine.

    python tests/golden/bits.py write               # after a change that is meant to change numbers
    python tests/golden/bits.py check               # after one that is not: lists what differs
    python tests/golden/bits.py check core          # one group alone; also `write core`

from the root of the repository, with the package on PYTHONPATH and OMP_NUM_THREADS=1. Groups:

    core          `ssla.fit`, posteriors, predictives, files, exports, costs, pages
    estimators    `ssla.sklearn` on arrays and data frames, their files and pages
    command       `ssla train`, `predict`, `evaluate`, `sensitivity`, `report`, `cost`

`bits.json` has eight digits of a SHA-256 for each answer: of type, shape and bits of numbers; of
texts (reports, printed tables, pages) after times, durations and temporary folders are masked. An
error counts by its type and the first sentence of its message, which is kept in words beside the
cases. Warnings count too. `check` exits with 1 and names each case with the answers that differ.

Only public names are used, so that this needs no edit when modules move. One thread, fixed seeds.
The bits depend on the processor and on the versions of torch, numpy and scikit-learn: another
machine has other bits, so this is a tool and not a test. There run `write` on the code before the
change. `tests/golden/test_golden.py` loads the posteriors kept beside it on any machine.
"""

from __future__ import annotations

import json
import os
import sys
import time
from importlib import import_module
from pathlib import Path

os.environ["COLUMNS"] = "200"  # printed tables have the width of the terminal
os.environ.pop("FORCE_COLOR", None)

import torch
from digests import Found, collect

FILE = Path(__file__).with_name("bits.json")
GROUPS = {
    "core": "core_cases",
    "estimators": "estimator_cases",
    "command": "command_cases",
}


def stored() -> dict[str, dict[str, dict[str, str]]]:
    """The groups in the file."""
    return json.loads(FILE.read_text()) if FILE.exists() else {}


def found_in(group: str) -> Found:
    """The digests of a group; prints how long it took."""
    started, used = time.perf_counter(), time.process_time()
    found = collect(import_module(GROUPS[group]).cases())
    spent = time.perf_counter() - started, time.process_time() - used
    print(f"{group}: {len(found.cases)} cases in {spent[0]:.0f} s ({spent[1]:.0f} s of CPU)")
    return found


def differences(group: str, kept: Found, found: Found) -> list[str]:
    """One line for each case that differs, with the answers that do, and errors in words."""
    lines = []
    for case in sorted(kept.cases.keys() | found.cases.keys()):
        before, after = (
            dict(part.split("=") for part in side.cases.get(case, "").split())
            for side in (kept, found)
        )
        names = [n for n in sorted(before | after) if before.get(n) != after.get(n)]
        if not before or not after:
            lines.append(f"{group}: {case}: {'is missing now' if before else 'is new'}")
        elif names:
            lines.append(f"{group}: {case}: {', '.join(names)}")
        for name in names:
            for label, side, parts in (("before", kept, before), ("now", found, after)):
                error = side.errors.get(parts.get(name, "").rpartition(":")[2])
                if error:
                    lines.append(f"    {name} {label}: {error}")
    return lines


def main(task: str, groups: list[str]) -> int:
    """Write or check the groups; all if none is named."""
    unknown = [group for group in groups if group not in GROUPS]
    if task not in ("write", "check") or unknown:
        print(f"usage: bits.py write|check [{' | '.join(GROUPS)}]")
        return 2
    torch.set_num_threads(1)
    changed, written = [], {}
    for group in groups or GROUPS:
        found = found_in(group)
        if task == "write":
            written[group] = found._asdict()
        else:
            kept = Found(**stored().get(group, {"cases": {}, "errors": {}}))
            changed += differences(group, kept, found)
    if task == "write":
        text = json.dumps(stored() | written, indent=0, sort_keys=True, ensure_ascii=False)
        FILE.write_text(text + "\n")
        print(f"written to {FILE}")
        return 0
    print("\n".join(changed) or "all answers have the same bits")
    return bool(changed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1] if len(sys.argv) > 1 else "check", sys.argv[2:]))
