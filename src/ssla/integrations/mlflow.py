"""Saved models as MLflow models (`pip install 'ssla[mlflow]'`), without pickle.

MLflow stores the model's own directory.

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
from ssla._checks import check_level as checked_level
from ssla.files import FileError
from ssla.files.container import read_model_kind
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
    """Log a model to the active run of MLflow (or a new one), and return MLflow's ModelInfo.

    model: a directory of `ssla train` or of an estimator's `save`, or a fitted estimator.
    name: of the model in MLflow.
    level: the default probability of the intervals; each call may give another as params={"level":
    0.5}.
    refit, keep, inputs: as in `ssla.Scorer`.
    pip_requirements: the packages of the environment. None: this version of ssla, and the installed
    versions of torch, numpy, scikit-learn, safetensors, pandas and mlflow-skinny.
    options: more keywords of `mlflow.pyfunc.log_model`, for example input_example or
    registered_model_name.

    Raises FileError for a directory of a posterior, and TypeError for a refit that is an object.
    """
    with _make_pyfunc_arguments(model, level, refit, keep, inputs, pip_requirements) as arguments:
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
    """Save a model to a local directory.

    It can be used by `mlflow models predict -m path` and `mlflow.pyfunc.load_model(path)`.

    path: the directory, which must not exist or be empty. The other arguments and the errors are
    those of `log_model`; options are keywords of `mlflow.pyfunc.save_model`.
    """
    with _make_pyfunc_arguments(model, level, refit, keep, inputs, pip_requirements) as arguments:
        pyfunc.save_model(path=str(path), **arguments, **options)


@contextmanager
def _make_pyfunc_arguments(
    model: Any,
    level: float,
    refit: str | None,
    keep: Sequence[str],
    inputs: Sequence[str] | None,
    pip_requirements: Sequence[str] | None,
) -> Any:
    """Yield the keywords of `mlflow.pyfunc.log_model` and `save_model`.

    The keywords are a directory with the model and the options, the signature, and the environment.
    The directory is temporary, and is removed after the block. Arguments and errors: as in
    `log_model`.
    """
    if refit is not None and not isinstance(refit, str):
        raise TypeError(
            f"refit={refit!r} is an object, which a file cannot hold. Give it by name, for example "
            "refit='newton'."
        )

    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder) / "data"
        data.mkdir()
        if isinstance(model, str | os.PathLike):
            if read_model_kind(model) != KIND:
                raise FileError(
                    f"{model} holds a posterior, which needs the code of its network. Log an "
                    "estimator or a model of `ssla train`, or call ssla.Scorer(path, model=…) in "
                    "an mlflow.pyfunc.PythonModel of your own."
                )
            shutil.copytree(model, data / MODEL)
        else:
            model.save(data / MODEL)

        options = {
            "level": checked_level(level),
            "refit": refit,
            "keep": list(keep),
            "inputs": None if inputs is None else list(inputs),
        }
        (data / OPTIONS).write_text(json.dumps(options, indent=1))
        packages = list_installed_packages() if pip_requirements is None else list(pip_requirements)
        yield {
            "loader_module": __name__,
            "data_path": str(data),
            "signature": _make_model_signature(
                _load_pyfunc(str(data)).scorer, checked_level(level)
            ),
            "pip_requirements": packages,
        }


def list_installed_packages() -> list[str]:
    """Return the packages that a prediction needs, as pip requirements of the installed versions.

    A suffix of a version, such as +cpu, is left out, because no package index has it.
    """
    return [
        f"ssla[sklearn]=={__version__}",
        *(f"{name}=={version(name).partition('+')[0]}" for name in PINNED),
    ]


class Model:
    """A saved model with the method that MLflow calls. `_load_pyfunc` makes it."""

    def __init__(self, scorer: Scorer) -> None:
        """Store the scorer of a saved model."""
        self.scorer = scorer

    def predict(self, data: Any, params: dict[str, Any] | None = None) -> Any:
        """Return the columns of the prediction, in the form of the data.

        It is a data frame for a data frame, and a dictionary for an array.

        params: {"level": the probability of the intervals}; None or empty: the default level.
        Raises ValueError for another parameter.
        """
        unknown = set(params or {}) - {"level"}
        if unknown:
            raise ValueError(
                f"The only parameter is 'level', but {sorted(unknown)[0]!r} was given."
            )
        return self.scorer(data, (params or {}).get("level"))


def _load_pyfunc(path: str) -> Model:
    """Return the model that `log_model` or `save_model` stored.

    MLflow calls this function by its name, with the path of the data directory.
    """
    options = json.loads((Path(path) / OPTIONS).read_text())
    return Model(
        Scorer(
            Path(path) / MODEL,
            levels=options["level"],
            refit=options["refit"],
            keep=options["keep"],
            inputs=options["inputs"],
        )
    )


def _make_model_signature(scorer: Scorer, level: float) -> Any:
    """Return the signature of a model, as MLflow stores it.

    It has the inputs by name, the columns of the prediction at the default level, and the parameter
    `level`.

    MLflow refuses integers where a signature has the type double, and numbers where it has text.
    The scorer reads both. So columns of a table have any type here, and the scorer checks their
    cells. Inputs without names are an array; −1 stands for any size.
    """
    model = scorer.opened_model
    names = model.names if scorer.inputs is None else scorer.inputs
    if names is None:
        inputs = Schema([TensorSpec(np.dtype(np.float64), (-1, model.width or -1))])
        no_rows: Any = np.zeros((0, model.width or 0))
    else:
        input_names = [*names, *(name for name in scorer.keep if name not in names)]
        input_type = DataType.double if model.numbers_only else AnyType()
        inputs = Schema(
            [ColSpec(input_type if name in names else AnyType(), name) for name in input_names]
        )
        no_rows = {name: np.zeros(0) for name in input_names}

    # A prediction for no rows has the columns and types of any other.
    columns = scorer(no_rows)
    outputs = Schema(
        [ColSpec(_choose_column_type(column), name) for name, column in columns.items()]
    )
    parameters = ParamSchema([ParamSpec("level", DataType.double, level)])
    return ModelSignature(inputs, outputs, parameters)


def _choose_column_type(column: np.ndarray) -> Any:
    """Return the MLflow type of an output column; text unless it has numbers or booleans."""
    # The keys are NumPy's letters for floats, integers and booleans.
    types = {"f": DataType.double, "i": DataType.long, "b": DataType.boolean}
    return types.get(column.dtype.kind, DataType.string)
