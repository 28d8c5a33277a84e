"""Progress: shown by itself after two seconds on a terminal, never elsewhere, always or never
on request.
"""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from torch import nn

import ssla
from ssla.maths import progress


class Terminal:
    """A stderr that says it is a terminal."""

    def __init__(self) -> None:
        self.written = ""

    def isatty(self) -> bool:
        return True

    def write(self, text: str) -> int:
        self.written += text
        return len(text)

    def flush(self) -> None:
        pass


def on_terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    """Inside the test: pytest sets stderr again between a fixture and its test."""
    stream = Terminal()
    monkeypatch.setattr(sys, "stderr", stream)
    return stream


def without_tqdm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tqdm.auto", None)


def test_nothing_is_shown_without_a_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "DELAY", 0.0)
    items = [1, 2]
    assert progress.progress_bar(items, 2, None, "fit", "batch") is items
    assert progress.progress_bar(items, 2, False, "fit", "batch") is items
    assert capsys.readouterr().err == ""


def test_a_bar_waits_for_two_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    on_terminal(monkeypatch)
    given: dict[str, Any] = {}

    def tqdm(items: Any, **options: Any) -> Any:
        given.update(options)
        return items

    monkeypatch.setattr(progress, "choose_tqdm_class", lambda required: tqdm)
    assert list(progress.progress_bar([1, 2], 2, None, "fit", "batch")) == [1, 2]
    assert given["delay"] == 2.0
    list(progress.progress_bar([1, 2], 2, True, "fit", "batch"))
    assert given["delay"] == 0.0


def test_without_tqdm_there_is_a_line_of_text(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = on_terminal(monkeypatch)
    without_tqdm(monkeypatch)
    assert list(progress.progress_bar([1, 2], 2, None, "fit", "batch")) == [1, 2]
    assert terminal.written == ""  # less than two seconds
    monkeypatch.setattr(progress, "DELAY", 0.0)
    monkeypatch.setattr(progress, "EVERY", 0.0)
    assert list(progress.progress_bar([1, 2], 2, None, "fit", "batch")) == [1, 2]
    assert "fit: 1 done" in terminal.written
    assert terminal.written.endswith("\r")
    with pytest.raises(ImportError, match="progress=True needs tqdm"):
        progress.progress_bar([1], 1, True, "fit", "batch")


def test_a_fit_shows_its_passes_over_stored_features(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = on_terminal(monkeypatch)
    without_tqdm(monkeypatch)
    monkeypatch.setattr(progress, "DELAY", 0.0)
    monkeypatch.setattr(progress, "EVERY", 0.0)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4)).double().eval()
    x, y = torch.randn(40, 3).double(), torch.arange(40) % 4
    options = {"likelihood": ssla.likelihoods.Categorical(), "prior": ssla.priors.Gaussian()}
    ssla.fit(model, (x, y), progress=False, **options)
    assert terminal.written == ""
    ssla.fit(model, (x, y), **options)
    assert "over stored features" in terminal.written
