"""Trace a graph, write it, and compare the file with the library before it is moved to its
place.
"""

from __future__ import annotations

import json
import logging
import os
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ssla._checks import writable
from ssla.data import Inputs, leaves
from ssla.files.exporting.graph import CLASSES, Graph
from ssla.files.replacing import new_file
from ssla.predictive import Predictive

ONNX, TORCH = ".onnx", ".pt2"
TOLERANCE = 1e-5  # of the larger of an answer and its standard deviation; of a probability
LEAST_LEVEL = 1e-6
MISSING = (
    "Writing .onnx files needs onnx and onnxscript (and onnxruntime for their check): pip install "
    "'ssla[export]'."
)


@dataclass(frozen=True)
class Exported:
    """A written graph: its file, the names of its inputs and answers, and the largest difference
    from the library on `rows` rows.

    differences: by the program that ran the graph ("torch" and, for .onnx files where it is
    installed, "onnxruntime") and by answer: in units of the larger of the answer and its standard
    deviation; of probabilities as they are.
    """

    path: Path
    inputs: tuple[str, ...]
    answers: tuple[str, ...]
    levels: tuple[float, ...]
    rows: int
    differences: Mapping[str, Mapping[str, float]]

    def __str__(self) -> str:
        checks = "; ".join(
            f"{program}: " + ", ".join(f"{name} {value:.1e}" for name, value in found.items())
            for program, found in self.differences.items()
        )
        return (
            f"{self.path}: {', '.join(self.inputs)} -> {', '.join(self.answers)}. Differences on "
            f"{self.rows} rows: {checks}."
        )


def checked_levels(levels: Any) -> tuple[float, ...]:
    found = tuple(float(level) for level in levels)
    if not found or not all(LEAST_LEVEL <= level <= 1 - LEAST_LEVEL for level in found):
        raise ValueError(
            f"levels must be probabilities of quantiles between {LEAST_LEVEL:g} and 1 − "
            f"{LEAST_LEVEL:g}, but are {levels!r}."
        )
    return found


def write(
    path: str | os.PathLike[str],
    graph: Graph,
    example: Inputs,
    predict: Callable[[], Predictive],
    facts: Mapping[str, Any],
) -> Exported:
    """The file of a graph.

    ValueError if its answers differ from those of `predict`, the library's own for the example.
    """
    target = Path(path)
    if target.suffix not in (ONNX, TORCH):
        raise ValueError(
            f"export writes {ONNX} (ONNX) or {TORCH} (torch.export) files, but the path is "
            f"{str(target)!r}."
        )
    writable(target)
    parts, names = leaves(example), _names(example)
    expected = reference(predict(), graph)
    with torch.no_grad():
        graph(*parts)  # constants are made before tracing
    program = _traced(graph, parts)
    with torch.no_grad():
        found = {"torch": _compare("torch", graph, program.module()(*parts), expected)}
        program.module()(*(part[:1] for part in parts))
    about = {
        **facts,
        "inputs": list(names),
        "answers": list(graph.names),
        "levels": graph.levels.q.tolist(),
    }
    with new_file(target) as draft:
        if target.suffix == TORCH:
            with _quiet():
                torch.export.save(program, draft, extra_files={"ssla.json": json.dumps(about)})
                loaded = torch.export.load(draft).module()
            with torch.no_grad():  # of the file itself
                found["torch"] = _compare("torch", graph, loaded(*parts), expected)
        else:
            _write_onnx(program, graph, names, draft, about)
            answers = run_onnx(draft, dict(zip(names, parts, strict=True)))
            if answers is not None:
                found["onnxruntime"] = _compare("onnxruntime", graph, answers, expected)
    return Exported(
        target, names, graph.names, tuple(graph.levels.q.tolist()), len(parts[0]), found
    )


def _names(example: Inputs) -> tuple[str, ...]:
    if isinstance(example, Tensor):
        return ("x",)
    return (
        tuple(str(key) for key in example)
        if isinstance(example, Mapping)
        else tuple(f"x{i}" for i in range(len(example)))
    )


def reference(predictive: Predictive, graph: Graph) -> tuple[Tensor, ...]:
    """The library's answers, in the order of the graph's."""
    if graph.names is CLASSES:
        return (predictive.probs,)
    return predictive.mean, predictive.stddev, predictive.icdf(graph.levels.q)


def _compare(
    program: str, graph: Graph, answers: Any, expected: tuple[Tensor, ...]
) -> dict[str, float]:
    """The largest difference of each answer; ValueError above the tolerance."""
    found = {}
    for name, mine, theirs in zip(
        graph.names, answers, expected, strict=False
    ):  # the label follows from the probabilities
        mine, theirs = mine.double(), theirs.double()
        unit = torch.ones_like(theirs)
        if graph.names is not CLASSES:
            sd = expected[1].double()
            unit = torch.maximum(theirs.abs(), sd if theirs.dim() == sd.dim() else sd.unsqueeze(-1))
        gap = (mine - theirs).abs() / unit
        gap = torch.where((mine == theirs) | (mine.isnan() & theirs.isnan()), 0.0, gap).nan_to_num(
            nan=torch.inf
        )
        found[name] = float(gap.max()) if gap.numel() else 0.0
        if found[name] > TOLERANCE:
            rows = gap.flatten(1).amax(1) if gap.dim() > 1 else gap
            bad = rows > TOLERANCE
            lost = int(
                mine.isnan().flatten(1).any(1).sum() if mine.dim() > 1 else mine.isnan().sum()
            )
            raise ValueError(
                f"The exported graph is not exact enough, and no file was written: {name} by "
                f"{program} differs from posterior.predict by up to {found[name]:.2g} (allowed: "
                f"{TOLERANCE:g}) in {int(bad.sum())} of {len(bad)} rows, the first is row "
                f"{int(bad.nonzero()[0])}; {lost} rows are NaN, because fixed nodes do not resolve "
                "them. Likely causes: (a) inputs far from the training data; (b) a network in "
                "float32 with large outputs. Remedy: give example rows like those that the graph "
                "will see, or convert the network with model.double() before the fit."
            )
    return found


def _traced(graph: Graph, parts: list[Tensor]) -> torch.export.ExportedProgram:
    rows = torch.export.Dim("rows", min=1)
    several = tuple(
        torch.cat([part[:1], part[:1], part[:2]]) for part in parts
    )  # one row would be taken as a constant
    try:
        with warnings.catch_warnings(), torch.no_grad():
            warnings.simplefilter("ignore")
            return torch.export.export(
                graph, several, dynamic_shapes=(tuple({0: rows} for _ in parts),), strict=False
            )
    except Exception as error:  # whatever the user's module raises while it is traced
        raise ValueError(
            f"torch.export could not trace the network: {error}. Likely causes: (a) steps in its "
            "forward that depend on the values of x (if, loops, .item()); (b) a fixed number of "
            "rows in its forward. Remedy: write its forward without them."
        ) from error


def _write_onnx(
    program: Any, graph: Graph, names: tuple[str, ...], draft: Path, about: Mapping[str, Any]
) -> None:
    try:
        import onnx  # noqa: F401
        import onnxscript  # noqa: F401
    except ImportError:
        raise ImportError(MISSING) from None
    try:
        with _quiet():
            made = torch.onnx.export(
                program,
                (),
                dynamo=True,
                verbose=False,
                input_names=list(names),
                output_names=list(graph.names),
            )
    except Exception as error:  # the exporter's own, of many kinds
        raise ValueError(
            f"The graph could not be written as ONNX: {error}. A likely cause: an operation of the "
            f"network that ONNX lacks. Write a {TORCH} file, which holds every operation of torch."
        ) from error
    assert made is not None
    made.model.metadata_props.update(
        {f"ssla.{key}": json.dumps(value) for key, value in about.items()}
    )
    made.save(draft)


@contextmanager
def _quiet() -> Iterator[None]:
    """Without the exporter's warnings, which are about packages that are not needed."""
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)


def run_onnx(path: Path, inputs: Mapping[str, Tensor]) -> list[Tensor] | None:
    """The answers of a file by onnxruntime; None where that is not installed."""
    try:
        import onnxruntime
    except ImportError:
        return None
    try:
        session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
        session.run(None, {name: part[:1].numpy() for name, part in inputs.items()})
        answers = session.run(None, {name: part.numpy() for name, part in inputs.items()})
    except Exception as error:  # onnxruntime's own classes
        raise ValueError(
            f"onnxruntime cannot run the graph: {error}. A likely cause: an operation of the "
            "network that it does not have in float64, such as ELU or GELU. Convert the network "
            f"with model.float() before the fit, or write a {TORCH} file."
        ) from error
    return [torch.from_numpy(answer) for answer in answers]
