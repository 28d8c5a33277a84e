"""Digests of answers: numbers by their bits, texts without times and paths, errors by words."""

from __future__ import annotations

import hashlib
import json
import re
import tempfile
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

MASKS = (  # what differs between two runs of the same code
    (re.compile(re.escape(tempfile.gettempdir()) + r"/golden\w*"), "<folder>"),
    (re.compile(r"\d{4}-\d\d-\d\d[ T]\d\d:\d\d(:\d\d)?(\.\d+)?( ?UTC|Z|\+00:00)?"), "<time>"),
    (re.compile(r'("?seconds"?:? +)[\d.]+'), r"\1<seconds>"),
    (re.compile(r"\b[\d.]+ (seconds?|minutes?|ms|s)\b"), "<duration>"),
    (re.compile(r"0x[0-9a-f]{6,}"), "<address>"),
    (re.compile(r" \(\w+Law\)"), ""),  # a private class, which may be renamed
)
Answers = Iterator[tuple[str, Any]]


class Raised(NamedTuple):
    """An error in place of an answer."""

    kind: str
    sentence: str


def masked(text: str) -> str:
    """The text without times, durations, temporary folders and addresses."""
    for pattern, word in MASKS:
        text = pattern.sub(word, text)
    return text


def attempt(ask: Callable[[], Any]) -> Any:
    """The answer, or the type of its error and the first sentence of the message."""
    try:
        return ask()
    except Exception as error:
        sentence = re.split(r"(?<=[.!?])\s", masked(str(error)).strip(), maxsplit=1)[0]
        return Raised(type(error).__name__, sentence)


def asked(case: str, questions: Mapping[str, Callable[[], Any]]) -> Answers:
    """Each question of a case with its answer or error."""
    for what, ask in questions.items():
        yield f"{case}: {what}", attempt(ask)


def digest(value: Any) -> str:
    """Eight hexadecimal digits of a SHA-256. Type, shape and bits of arrays count."""
    return hashlib.sha256(_bytes(value)).hexdigest()[:8]


def _bytes(value: Any) -> bytes:
    if isinstance(value, Tensor):
        value = value.detach().cpu().contiguous()
        head = f"tensor {value.dtype} {tuple(value.shape)} "
        return head.encode() + value.numpy().tobytes()
    if isinstance(value, np.ndarray) and value.dtype != object and value.dtype.kind in "biufc":
        head = f"array {value.dtype} {value.shape} "
        return head.encode() + np.ascontiguousarray(value).tobytes()
    if isinstance(value, np.ndarray):
        return _bytes(["array", value.shape, value.tolist()])
    if isinstance(value, Mapping):
        return _bytes([(str(name), part) for name, part in value.items()])
    if isinstance(value, list | tuple):
        return "|".join(digest(part) for part in value).encode()
    if isinstance(value, str):
        return masked(value).encode()
    if value is None or isinstance(value, bool | int | float | np.generic | bytes):
        return repr(value).encode()
    raise TypeError(f"There is no digest of a {type(value).__name__}.")


def files_in(folder: Path) -> dict[str, Any]:
    """The files below a folder with their content; JSON as text without times and paths."""
    found: dict[str, Any] = {}
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            content = path.read_bytes()
            name = path.relative_to(folder).as_posix()
            found[name] = _without_address(content.decode()) if path.suffix == ".json" else content
    return found


def _without_address(text: str) -> str:
    """Custom code is named by its address in memory, so the checksum of its file does not count."""
    if re.search(r"0x[0-9a-f]{6,}", text):
        text = re.sub(r'("sha256": )"\w+"', r'\1"<checksum>"', text)
    return text


def page_parts(text: str) -> dict[str, Any]:
    """The numbers that a page of `ssla.html_report` draws, and the page without its scripts."""
    numbers = re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.S)
    words = re.sub(r"<(script|style)\b.*?</\1>", "", text, flags=re.S)
    return {"numbers": json.loads(numbers[1]) if numbers else None, "page": words}


class Found(NamedTuple):
    """What a group answered: a line of digests for each case, and the errors by their digests."""

    cases: dict[str, str]
    errors: dict[str, str]


def collect(answers: Iterable[tuple[str, Any]]) -> Found:
    """Digests of a stream of "case: what" and answers, with the warnings of each case.

    Every answer starts from the same global seeds, so that no case depends on those before it.
    """
    found = Found({}, {})
    noted: dict[str, list[str]] = {}
    stream = iter(answers)
    with warnings.catch_warnings(record=True) as caught:
        while True:
            warnings.simplefilter("always")
            torch.manual_seed(0)
            np.random.seed(0)
            try:
                name, value = next(stream)
            except StopIteration:
                break
            case, _, what = name.partition(": ")
            part, token = what.replace(" ", "_") or "answer", digest(value)
            if isinstance(value, Raised):
                found.errors[token] = f"{value.kind}: {value.sentence}"
                token = f"{value.kind}:{token}"
            found.cases[case] = f"{found.cases.get(case, '')} {part}={token}".strip()
            # Warnings of other libraries may come once for a process: only those for users count.
            noted.setdefault(case, []).extend(
                str(one.message) for one in caught if one.category is UserWarning
            )
            caught.clear()
    for case, texts in noted.items():
        if texts:
            found.cases[case] += f" warnings={digest(texts)}"
    return found
