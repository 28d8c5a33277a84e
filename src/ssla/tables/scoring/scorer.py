"""`ssla.Scorer`: a saved model as a function from a batch of rows to columns."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from torch import nn

from ssla._checks import all_in_plain_torch
from ssla._checks import check_level as checked_level
from ssla.files import FileError
from ssla.files.container import read_model_kind
from ssla.files.load_posterior import load
from ssla.files.save_posterior import KIND
from ssla.refit import resolve
from ssla.tables.estimators.loading import load_trained
from ssla.tables.estimators.wrapped import WrappedEstimator
from ssla.tables.scoring.batches import read_batch
from ssla.tables.scoring.saved_models import (
    MatrixModel,
    SavedModel,
    TableModel,
    WrappedModel,
    replace_refit,
)

_opening = threading.Lock()  # threads of one process open a model once


@all_in_plain_torch
class Scorer:
    """A saved model as a function: a batch of rows -> columns.

    The columns are the prediction and its intervals. A scorer can be pickled and holds only the
    path and the options. The model is opened once in each process, at the first call: the path must
    exist there. So it is the function that Ray Data `map_batches`, Spark `mapInPandas`, Dask
    `map_partitions` and MLflow need.

    Parameters
    ----------
    path:
        A directory of `ssla train`, of an estimator's `save`, or of `posterior.save`.
    levels:
        Probabilities of the intervals (of the sets, for classes); also one number.
    refit:
        The refit, for example "newton"; that of the model ("output" for a posterior) if not given.
    keep:
        Columns of the batch to copy before those of the prediction.
    inputs:
        The names of the input columns in their order, where the file has no names: for a posterior,
        and for an estimator that was fitted to an array. One column of arrays is the input itself.
    model:
        For a posterior: its module, or a function without arguments that builds it.
    likelihood, prior, output:
        For a posterior, as in `ssla.load`.
    models:
        For a `PredictiveRegressor` or `PredictiveClassifier`, whose file has no trees: its
        `models_`, or a function without arguments that opens them. Such a function is pickled in
        place of the trees.

    A batch is a data frame of pandas or polars, a mapping of names to arrays, or an array (rows
    first). A data frame is returned as one, with the index of a pandas frame; the others as a
    dictionary of arrays. Columns are named as by `ssla predict` (see docs/tables.md). Rows are
    predicted in blocks, so that memory beyond the result does not grow with the batch.

    >>> scorer = ssla.Scorer("model", levels=(0.5, 0.95), keep=["id"])      # doctest: +SKIP
    >>> scorer(frame)["lower_95"]                                           # doctest: +SKIP
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        levels: float | Sequence[float] = (0.95,),
        refit: Any = None,
        keep: Sequence[str] = (),
        *,
        inputs: Sequence[str] | None = None,
        model: nn.Module | Callable[[], nn.Module] | None = None,
        likelihood: Any = None,
        prior: Any = None,
        output: Any = None,
        models: Mapping[str, Any] | Callable[[], Mapping[str, Any]] | None = None,
    ) -> None:
        """Check the options and store them; the model is opened at the first call.

        Raises ValueError for levels that are not probabilities or for an unknown refit, and
        TypeError for a text in place of a list of names.
        """
        self.path = Path(path).absolute()
        self.levels = check_levels(levels)
        self.refit = refit
        self.keep = _check_names("keep", keep)
        self.inputs = None if inputs is None else _check_names("inputs", inputs)
        self.module = model
        self.posterior_options = {"likelihood": likelihood, "prior": prior, "output": output}
        self.models = models
        self._opened: SavedModel | None = None

        # An unknown refit is an error now, and not in each process at the first batch.
        if refit is not None:
            resolve(refit)

    def __call__(self, batch: Any, levels: float | Sequence[float] | None = None) -> Any:
        """Return the kept columns and those of the prediction, in the form of the batch.

        levels: used in place of those of the scorer; None: those of the scorer. Raises TypeError or
        ValueError if the batch does not match the model.
        """
        call_levels = self.levels if levels is None else check_levels(levels)
        rows = read_batch(batch)
        # A missing column is an error before the prediction, which may take long.
        for name in self.keep:
            rows.get_column(name)  # its error names the most similar column
        columns = self.opened_model.predict_columns(rows, self.inputs, call_levels)
        return rows.attach_columns(columns, self.keep)

    @property
    def opened_model(self) -> SavedModel:
        """The saved model, which the first use opens.

        Errors are those of a missing or damaged file, and of options that are for another kind of
        model.
        """
        with _opening:
            if self._opened is None:
                self._opened = self._open_model()
        return self._opened

    def _open_model(self) -> SavedModel:
        """Open the model of the path, and return it.

        Raises ValueError if options of the scorer are for another kind of model, and FileError for
        a file that cannot be read or needs `model`.
        """
        if read_model_kind(self.path) == KIND:
            return self._open_posterior()
        options = self.posterior_options | {"model": self.module}

        # These options are for a posterior only.
        given = [name for name, value in options.items() if value is not None]
        if given:
            raise ValueError(
                f"{self.path} holds an estimator, which contains its networks. Omit {given[0]}=."
            )

        estimator, training = load_trained(
            self.path, self.models() if callable(self.models) else self.models
        )
        if self.refit is not None:
            estimator = replace_refit(estimator, self.refit)
        is_wrapped = isinstance(estimator, WrappedEstimator)

        # An estimator of Python may be given other names for its columns.
        has_fixed_names = training is not None or (
            is_wrapped and hasattr(estimator, "feature_names_in_")
        )
        if has_fixed_names and self.inputs is not None:
            raise ValueError(f"{self.path} contains the names of its inputs. Omit inputs=.")
        if is_wrapped:
            return WrappedModel(estimator, self.path)
        return TableModel(estimator, training, self.path)

    def _open_posterior(self) -> SavedModel:
        """Open the posterior of the path, and return it as a model.

        Raises ValueError if models= is given, and FileError if model= is missing.
        """
        if self.models is not None:
            raise ValueError(f"{self.path} holds a posterior. Omit models=; its network is model=.")
        if self.module is None:
            raise FileError(
                f"{self.path} holds a posterior without its network. Give the module as model=."
            )

        module = self.module if isinstance(self.module, nn.Module) else self.module()
        posterior = load(self.path, module, **self.posterior_options)
        refit = "output" if self.refit is None else self.refit
        return MatrixModel(
            lambda x: posterior.predict(np.ascontiguousarray(x), refit), refit, self.path
        )

    def __getstate__(self) -> dict[str, Any]:
        """Return what is pickled: the options without the opened model.

        Each process opens the model for itself.
        """
        return vars(self) | {"_opened": None}

    def __repr__(self) -> str:
        """Return a text with the path and the levels."""
        return f"Scorer({str(self.path)!r}, levels={self.levels})"


def check_levels(levels: float | Sequence[float]) -> tuple[float, ...]:
    """Return the levels in their order, each once.

    levels: a number or several. Raises ValueError if there is none, or if any is not a probability.
    """
    level_list = np.atleast_1d(np.asarray(levels, dtype=float)).tolist()
    if not level_list:
        raise ValueError("levels must have at least one probability, for example (0.95,).")
    return tuple(dict.fromkeys(map(checked_level, level_list)))


def _check_names(argument: str, names: Sequence[str]) -> tuple[str, ...]:
    """Return the names as a tuple; raise TypeError if they are a single text.

    argument: the name of the argument that has them, for the message.
    """
    if isinstance(names, str):
        raise TypeError(
            f"{argument} must be a list of names, but is the text {names!r}. Write "
            f"{argument}=[{names!r}]."
        )
    return tuple(names)
