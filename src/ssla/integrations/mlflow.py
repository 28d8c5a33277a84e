"""Saved models as MLflow models (`pip install 'ssla[mlflow]'`), without pickle: MLflow stores the
model's own directory.

    with mlflow.start_run():
        info = ssla.mlflow.log_model("model", level=0.9)
    mlflow.pyfunc.load_model(info.model_uri).predict(frame, params={"level": 0.5})

`mlflow models predict`, `mlflow models serve` and `mlflow.pyfunc.spark_udf` use the same model.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Sequence
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from ssla import __version__
from ssla._checks import level as checked_level
from ssla.files import FileError
from ssla.files.container import kind_of
from ssla.tables.estimators.saving import KIND
from ssla.tables.scoring import Scorer

try:
    from mlflow import pyfunc
    from mlflow.models import ModelSignature
    from mlflow.types import ColSpec, DataType, ParamSchema, ParamSpec, Schema, TensorSpec
    from mlflow.types.schema import AnyType
except ImportError as error:
    if (error.name or "").partition(".")[0] != "mlflow":
        raise
    raise ImportError("ssla.mlflow needs MLflow: pip install 'ssla[mlflow]'.") from None

MODEL, OPTIONS = "model", "options.json"
PINNED = ("torch", "numpy", "scikit-learn", "safetensors", "pandas", "mlflow-skinny")


def log_model(
    model: Any,
    name: str = "model",
    *,
    level: float = 0.95,
    refit: str | None = None,
    keep: Sequence[str] = (),
    inputs: Sequence[str] | None = None,
    pip_requirements: Sequence[str] | None = None,
    **options: Any,
) -> Any:
    """Log a model to the active run (or a new one) of MLflow. Returns MLflow's ModelInfo.

    model: a directory of `ssla train` or of an estimator's `save`, or a fitted estimator.
    level: the default probability of the intervals; each call may give another as params={"level":
    0.5}. refit, keep, inputs: as in `ssla.Scorer`. pip_requirements: instead of this version of
    ssla and the installed versions of torch, numpy, scikit-learn, safetensors, pandas and
    mlflow-skinny.  options: more for `mlflow.pyfunc.log_model`, for example input_example or
    registered_model_name.
    """
    with _described(model, level, refit, keep, inputs, pip_requirements) as arguments:
        return pyfunc.log_model(name=name, **arguments, **options)


def save_model(
    model: Any,
    path: str | os.PathLike[str],
    *,
    level: float = 0.95,
    refit: str | None = None,
    keep: Sequence[str] = (),
    inputs: Sequence[str] | None = None,
    pip_requirements: Sequence[str] | None = None,
    **options: Any,
) -> None:
    """The same to a local directory, for `mlflow models predict -m path` and
    `mlflow.pyfunc.load_model(path)`.
    """
    with _described(model, level, refit, keep, inputs, pip_requirements) as arguments:
        pyfunc.save_model(path=str(path), **arguments, **options)


@contextmanager
def _described(
    model: Any,
    level: float,
    refit: str | None,
    keep: Sequence[str],
    inputs: Sequence[str] | None,
    pip_requirements: Sequence[str] | None,
) -> Any:
    """What `mlflow.pyfunc` needs: a directory with the model and the options, the signature,
    and the environment.
    """
    if refit is not None and not isinstance(refit, str):
        raise TypeError(
            f"refit={refit!r} is an object, which a file cannot hold. Give it by name, for example "
            "refit='newton'."
        )
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder) / "data"
        place.mkdir()
        if isinstance(model, str | os.PathLike):
            if kind_of(model) != KIND:
                raise FileError(
                    f"{model} holds a posterior, which needs the code of its network. Log an "
                    "estimator or a model of `ssla train`, or call ssla.Scorer(path, model=…) in "
                    "an mlflow.pyfunc.PythonModel of your own."
                )
            shutil.copytree(model, place / MODEL)
        else:
            model.save(place / MODEL)
        chosen = {
            "level": checked_level(level),
            "refit": refit,
            "keep": list(keep),
            "inputs": None if inputs is None else list(inputs),
        }
        (place / OPTIONS).write_text(json.dumps(chosen, indent=1))
        yield {
            "loader_module": __name__,
            "data_path": str(place),
            "signature": _signature(_load_pyfunc(str(place)).scorer, checked_level(level)),
            "pip_requirements": environment()
            if pip_requirements is None
            else list(pip_requirements),
        }


def environment() -> list[str]:
    """The packages that a prediction needs, in the installed versions (without a suffix such as
    +cpu).
    """
    return [
        f"ssla[sklearn]=={__version__}",
        *(f"{name}=={version(name).partition('+')[0]}" for name in PINNED),
    ]


class Model:
    """What MLflow calls. Made by `_load_pyfunc`."""

    def __init__(self, scorer: Scorer) -> None:
        self.scorer = scorer

    def predict(self, data: Any, params: dict[str, Any] | None = None) -> Any:
        """A data frame of columns for a data frame; a dictionary of columns for an array."""
        unknown = set(params or {}) - {"level"}
        if unknown:
            raise ValueError(
                f"The only parameter is 'level', but {sorted(unknown)[0]!r} was given."
            )
        return self.scorer(data, (params or {}).get("level"))


def _load_pyfunc(path: str) -> Model:
    """Called by MLflow."""
    chosen = json.loads((Path(path) / OPTIONS).read_text())
    return Model(
        Scorer(
            Path(path) / MODEL,
            chosen["level"],
            chosen["refit"],
            chosen["keep"],
            inputs=chosen["inputs"],
        )
    )


def _signature(scorer: Scorer, level: float) -> Any:
    """Inputs by name, columns of the prediction at the default level, and the parameter `level`.

    MLflow refuses integers where a signature says double, and numbers where it says text. The
    scorer reads both, so that columns of a table have any type here, and their cells are checked by
    the scorer.
    """
    model = scorer.opened
    names = model.names if scorer.inputs is None else scorer.inputs
    if names is None:
        inputs = Schema([TensorSpec(np.dtype(np.float64), (-1, model.width or -1))])
        nothing: Any = np.zeros((0, model.width or 0))
    else:
        wanted = [*names, *(name for name in scorer.keep if name not in names)]
        kind = DataType.double if model.numbers_only else AnyType()
        inputs = Schema([ColSpec(kind if name in names else AnyType(), name) for name in wanted])
        nothing = {name: np.zeros(0) for name in wanted}
    found = scorer(nothing)
    outputs = Schema([ColSpec(_type(column), name) for name, column in found.items()])
    return ModelSignature(
        inputs, outputs, ParamSchema([ParamSpec("level", DataType.double, level)])
    )


def _type(column: np.ndarray) -> Any:
    kinds = {"f": DataType.double, "i": DataType.long, "b": DataType.boolean}
    return kinds.get(column.dtype.kind, DataType.string)
