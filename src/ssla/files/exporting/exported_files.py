"""Traces a graph, writes it, and compares the file with the library.

Only a file that passes is moved to its place.
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

from ssla._checks import check_writable
from ssla.data import Inputs, input_tensors
from ssla.files.exporting.graph import CLASSES, Graph
from ssla.files.replacing import replace_file
from ssla.predictive import Predictive

ONNX, TORCH = ".onnx", ".pt2"
# The largest difference from the library, in units of the larger of an answer and its standard
# deviation; of a probability as it is. A guess.
TOLERANCE = 1e-5
LEAST_LEVEL = 1e-6  # of a quantile, and of one minus it; a guess
MISSING = (
    "Writing .onnx files needs onnx and onnxscript (and onnxruntime for their check): pip install "
    "'ssla[export]'."
)


@dataclass(frozen=True)
class Exported:
    """A written graph, and how far its answers are from those of the library.

    inputs, answers: their names. The differences are the largest on `rows` rows.

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
        """Return the file, its inputs and answers, and the differences in one line."""
        checks = "; ".join(
            f"{program}: " + ", ".join(f"{name} {value:.1e}" for name, value in by_answer.items())
            for program, by_answer in self.differences.items()
        )
        return (
            f"{self.path}: {', '.join(self.inputs)} -> {', '.join(self.answers)}. Differences on "
            f"{self.rows} rows: {checks}."
        )


def checked_levels(levels: Any) -> tuple[float, ...]:
    """Return the probabilities of quantiles.

    Raises ValueError for none, or one too near to 0 or 1.
    """
    checked = tuple(float(level) for level in levels)
    if not checked or not all(LEAST_LEVEL <= level <= 1 - LEAST_LEVEL for level in checked):
        raise ValueError(
            f"levels must be probabilities of quantiles between {LEAST_LEVEL:g} and 1 − "
            f"{LEAST_LEVEL:g}, but are {levels!r}."
        )
    return checked


def write_graph(
    path: str | os.PathLike[str],
    graph: Graph,
    example: Inputs,
    predict: Callable[[], Predictive],
    facts: Mapping[str, Any],
) -> Exported:
    """Trace a graph, write it to a file, run that file, and keep it if its answers are right.

    example: the rows x that are compared. predict: makes the library's predictive for them. facts:
    stored in the file. Raises ValueError for another suffix, for a network that cannot be traced or
    written, and for answers that differ from the library's, and ImportError without the packages
    for .onnx files; no file is then written.
    """
    target = Path(path)
    if target.suffix not in (ONNX, TORCH):
        raise ValueError(
            f"export writes {ONNX} (ONNX) or {TORCH} (torch.export) files, but the path is "
            f"{str(target)!r}."
        )

    check_writable(target)
    inputs = input_tensors(example)
    names = _list_input_names(example)
    expected = _predict_with_library(predict(), graph)
    levels = tuple(graph.levels.q.tolist())
    facts = {**facts, "inputs": list(names), "answers": list(graph.names), "levels": list(levels)}
    with torch.no_grad():
        graph(*inputs)  # makes the constants before tracing
        program = _trace_graph(graph, inputs)
        differences = {
            "torch": _compare_answers("torch", graph, program.module()(*inputs), expected)
        }
        program.module()(*(tensor[:1] for tensor in inputs))  # fails if the rows are fixed

    with replace_file(target) as draft:
        if target.suffix == TORCH:
            loaded = _write_torch_file(program, draft, facts)
            with torch.no_grad():
                differences["torch"] = _compare_answers("torch", graph, loaded(*inputs), expected)
        else:
            _write_onnx_file(program, graph, names, draft, facts)
            answers = _run_onnx_file(draft, dict(zip(names, inputs, strict=True)))
            if answers is not None:
                differences["onnxruntime"] = _compare_answers(
                    "onnxruntime", graph, answers, expected
                )

    return Exported(target, names, graph.names, levels, len(inputs[0]), differences)


def _list_input_names(example: Inputs) -> tuple[str, ...]:
    """Return the name of each tensor of x in the file: its key, x0, x1, …, or x if it is alone."""
    if isinstance(example, Tensor):
        return ("x",)
    if isinstance(example, Mapping):
        return tuple(str(key) for key in example)
    return tuple(f"x{i}" for i in range(len(example)))


def _predict_with_library(predictive: Predictive, graph: Graph) -> tuple[Tensor, ...]:
    """Return the answers of the library's predictive, in the order of the graph's.

    The label of classes, the last answer of the graph, is left out.
    """
    if graph.names is CLASSES:
        return (predictive.probs,)
    return predictive.mean, predictive.stddev, predictive.icdf(graph.levels.q)


def _compare_answers(
    program: str, graph: Graph, answers: Any, expected: tuple[Tensor, ...]
) -> dict[str, float]:
    """Return the largest difference of each answer from the library's, by its name.

    program: the name of what ran the graph, for the error. answers, expected: those of the graph
    and of the library, with N rows each. The unit of a number is the larger of its size and its
    standard deviation; probabilities are compared as they are. Raises ValueError above the
    tolerance.
    """
    differences = {}

    # Classes have one answer more, the label, which follows from the probabilities.
    for name, answer, reference in zip(graph.names, answers, expected, strict=False):
        answer, reference = answer.double(), reference.double()
        unit = torch.ones_like(reference)
        if graph.names is not CLASSES:
            # Quantiles have one dimension more than the standard deviation.
            sd = expected[1].double()
            sd = sd if reference.dim() == sd.dim() else sd.unsqueeze(-1)
            unit = torch.maximum(reference.abs(), sd)

        error = (answer - reference).abs() / unit

        # Equal infinities and equal NaN do not differ.
        equal = (answer == reference) | (answer.isnan() & reference.isnan())

        # A NaN on one side only is an infinite difference.
        error = torch.where(equal, 0.0, error).nan_to_num(nan=torch.inf)
        differences[name] = float(error.max()) if error.numel() else 0.0
        if differences[name] > TOLERANCE:
            raise ValueError(_describe_difference(name, program, error, answer))

    return differences


def _describe_difference(name: str, program: str, error: Tensor, answer: Tensor) -> str:
    """Return the error text: which rows of an answer differ, by how much, and what to do.

    name: of the answer. program: the name of what ran the graph. error, answer: the differences and
    the graph's answer, N rows of the same shape.
    """
    is_bad = _find_largest_by_row(error) > TOLERANCE
    nan_rows = int(_find_largest_by_row(answer.isnan()).sum())
    unresolved = f"; {nan_rows} rows are NaN, because fixed nodes do not resolve them"
    where = f"the first is row {int(is_bad.nonzero()[0])}{unresolved if nan_rows else ''}"
    return (
        f"The exported graph is not exact enough, and no file was written: {name} by "
        f"{program} differs from posterior.predict by up to {float(error.max()):.2g} (allowed: "
        f"{TOLERANCE:g}) in {int(is_bad.sum())} of {len(is_bad)} rows, {where}. "
        "Likely causes: (a) inputs far from the training data; (b) a network in float32 with large "
        "outputs. Remedy: give example rows like those that the graph will see, or convert the "
        "network with model.double() before the fit."
    )


def _find_largest_by_row(values: Tensor) -> Tensor:
    """Return the largest value of each row: (N, …) -> (N,)."""
    return values.flatten(1).amax(1) if values.dim() > 1 else values


def _trace_graph(graph: Graph, inputs: list[Tensor]) -> torch.export.ExportedProgram:
    """Return a graph traced for any number of rows.

    inputs: the tensors of x, with at least one row. Raises ValueError for a network that cannot be
    traced.
    """
    rows = torch.export.Dim("rows", min=1)

    # torch.export would take a number of one row as a constant. Rows are repeated, so that a single
    # row of the example is enough.
    repeated_rows = tuple(torch.cat([tensor[:1], tensor[:1], tensor[:2]]) for tensor in inputs)
    shapes = (tuple({0: rows} for _ in inputs),)
    try:
        with warnings.catch_warnings(), torch.no_grad():
            warnings.simplefilter("ignore")
            return torch.export.export(graph, repeated_rows, dynamic_shapes=shapes, strict=False)
    except Exception as error:  # whatever the user's module raises while it is traced
        raise ValueError(
            f"torch.export could not trace the network: {error}. Likely causes: (a) steps in its "
            "forward that depend on the values of x (if, loops, .item()); (b) a fixed number of "
            "rows in its forward. Remedy: write its forward without them."
        ) from error


def _write_torch_file(
    program: torch.export.ExportedProgram, draft: Path, facts: Mapping[str, Any]
) -> torch.nn.Module:
    """Write a traced program for torch.export, with facts about it, and return it as read again.

    draft: the path of the file.
    """
    with _silence_exporter():
        torch.export.save(program, draft, extra_files={"ssla.json": json.dumps(facts)})
        return torch.export.load(draft).module()


def _write_onnx_file(
    program: Any, graph: Graph, names: tuple[str, ...], draft: Path, facts: Mapping[str, Any]
) -> None:
    """Write a traced program as ONNX, with facts about it.

    names: those of the inputs. Raises ImportError without onnx and onnxscript, ValueError for an
    operation that ONNX lacks. draft: the path of the file. facts: stored in it as metadata.
    """
    try:
        import onnx  # noqa: F401
        import onnxscript  # noqa: F401
    except ImportError:
        raise ImportError(MISSING) from None

    try:
        with _silence_exporter():
            onnx_program = torch.onnx.export(
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

    assert onnx_program is not None
    metadata = {f"ssla.{key}": json.dumps(value) for key, value in facts.items()}
    onnx_program.model.metadata_props.update(metadata)
    onnx_program.save(draft)


@contextmanager
def _silence_exporter() -> Iterator[None]:
    """Hide the exporter's warnings and logs in the block, which are about packages not needed."""
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)


def _run_onnx_file(path: Path, inputs: Mapping[str, Tensor]) -> list[Tensor] | None:
    """Return the answers that onnxruntime computes from a file; None if it is not installed.

    inputs: by name, N rows each. A single row is run too, to show that their number is not fixed.
    Raises ValueError for a graph that onnxruntime cannot run.
    """
    try:
        import onnxruntime
    except ImportError:
        return None

    try:
        session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
        session.run(None, {name: tensor[:1].numpy() for name, tensor in inputs.items()})
        answers = session.run(None, {name: tensor.numpy() for name, tensor in inputs.items()})
    except Exception as error:  # onnxruntime's own classes
        raise ValueError(
            f"onnxruntime cannot run the graph: {error}. A likely cause: an operation of the "
            "network that it does not have in float64, such as ELU or GELU. Convert the network "
            f"with model.float() before the fit, or write a {TORCH} file."
        ) from error

    return [torch.from_numpy(answer) for answer in answers]
