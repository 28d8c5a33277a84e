"""The table of traced paths in docs/design.md is that of the code."""

import importlib.util
import sys
from pathlib import Path

import pytest

FILE = Path(__file__).parents[1] / "tools" / "trace_paths.py"


def test_the_design_page_states_the_paths_as_they_are(shipped_defaults):
    """To a tenth: how often a search repeats depends on rounding. To write them again:
    python tools/trace_paths.py --write.
    """
    spec = importlib.util.spec_from_file_location("trace_paths", FILE)
    tool = importlib.util.module_from_spec(spec)
    sys.modules["trace_paths"] = tool
    spec.loader.exec_module(tool)
    stated = tool.counts_on_the_page()
    traces = tool.trace_main_calls()
    assert set(stated) == set(traces)
    for name, found in traces.items():
        assert (found.files, found.changes) == pytest.approx(stated[name], rel=0.1), name
