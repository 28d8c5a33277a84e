"""Opens the estimators of `wrapped` by their file, which has the last layer, and their models."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ssla.files import Decoder, FileError
from ssla.files.container import convert_to_file_error
from ssla.files.load_posterior import decode_posterior
from ssla.tables.estimators.bases import is_fitted
from ssla.tables.estimators.file_parts import (
    check_class_count,
    check_scaling,
    open_layer,
    open_scaling,
    open_settings,
)
from ssla.tables.estimators.wrapped import (
    CLASSES,
    MEAN,
    NOISE,
    PredictiveClassifier,
    PredictiveRegressor,
)
from ssla.tables.trees.out_of_fold import NumberLayer, make_linear

ESTIMATORS: dict[str, type[Any]] = {
    "PredictiveRegressor": PredictiveRegressor,
    "PredictiveClassifier": PredictiveClassifier,
}
# A tuple and not a dictionary, because a forged file may have a name that has no hash.
WRAPPED = tuple(ESTIMATORS)
TOLERANCE = 1e-6  # of predictions at the probe: other versions of a library may round differently


def open_wrapped(
    content: Mapping[str, Any], tensors: Mapping[str, Tensor], models: Any, source: Path
) -> Any:
    """Return the estimator of a file, with its models.

    Raises FileError for a file that this library did not write, and for models that are missing or
    not those of the fit, as far as their classes and predictions show it.

    content, tensors: those of the file.  models: the `models_` of the estimator that was saved.
    source: the path of the file, for errors.
    """
    with convert_to_file_error(source):
        decoder = Decoder(dict(tensors))
        estimator = open_settings(ESTIMATORS[content["estimator"]], content, decoder)
        estimator.ensemble_ = _open_last_layer(content, decoder, tensors, source)
        _check_estimator(estimator)
        # The names of the classes of the models, by what they predict.
        expected = {key: [str(name) for name in names] for key, names in content["models"].items()}
        is_regressor = isinstance(estimator, PredictiveRegressor)
        if set(expected) != ({MEAN, NOISE} if is_regressor else {CLASSES}):
            raise ValueError("the models are not those of the estimator")
        saved_probe = decoder.decode(content["probe"])

    estimator.models_ = _check_models(models, expected, source)
    _check_probe(estimator, saved_probe, source)
    return estimator


def _check_probe(estimator: Any, saved: Sequence[Tensor] | None, source: Path) -> None:
    """Raise FileError if the models predict other values than those that were saved.

    saved: the result of `predict_probe` when the estimator was saved. None: it could not predict
    these rows, so nothing is compared.  source: the path of the file, for the error.
    """
    if saved is None:
        return
    predictions = estimator.predict_probe()
    if predictions is None or not all(
        _are_close(prediction, expected)
        for prediction, expected in zip(predictions, saved, strict=True)
    ):
        raise FileError(
            f"The models given do not predict what those of {source} did, at the means of the "
            "columns. Give the models_ of the estimator that was saved."
        )


def _are_close(a: Tensor, b: Tensor) -> bool:
    """Return whether tensors a and b have the same shape, and the same values up to TOLERANCE.

    The absolute tolerance is relative to the largest value of b.
    """
    return a.shape == b.shape and bool(
        torch.isclose(a, b, rtol=TOLERANCE, atol=TOLERANCE * float(b.abs().max())).all()
    )


def _check_models(
    models: Any, expected: Mapping[str, Sequence[str]], source: Path
) -> dict[str, tuple[Any, ...]]:
    """Return the models by what they predict.

    expected: the names of their classes, by what they predict. Raises FileError if models are
    missing, not fitted, or of other classes than those of the fit.  source: the path of the file,
    for errors.
    """
    description = ", ".join(
        f"{key}: {len(names)} × {names[0]}" for key, names in expected.items() if names
    )
    if models is None:
        raise FileError(
            f"{source} holds the last layer, but not the models that it needs ({description}): "
            "trees have no common format that is free of code. Keep model.models_ by other means, "
            "and give it as load(path, models=…), or Scorer(path, models=…)."
        )

    names: dict[str, list[str]] | None = None
    if isinstance(models, Mapping):
        names = {key: [type(model).__name__ for model in models.get(key, ())] for key in expected}
    if names != dict(expected):
        raise FileError(
            f"models must be the models_ of the estimator that was saved ({description}), but is "
            "not."
        )

    models_by_key = {key: tuple(models[key]) for key in expected}
    if not all(is_fitted(model) for group in models_by_key.values() for model in group):
        raise FileError("The models are not fitted. Give the models_ of the fitted estimator.")
    return models_by_key


def _open_last_layer(
    content: Mapping[str, Any], decoder: Decoder, tensors: Mapping[str, Tensor], source: Path
) -> Any:
    """Return the last layer of a file.

    Raises ValueError for a layer that is impossible, or not of the kind of the estimator.

    content, tensors: those of the file.  source: its path, for errors.
    """
    module = make_linear(tensors["network.0.weight"], tensors["network.0.bias"])
    scalings = {name: open_scaling(part, decoder) for name, part in content["scaling"].items()}
    numbers = decoder.decode(content["numbers"], dict)
    if ("floor" in numbers) != (content["estimator"] == PredictiveClassifier.__name__):
        raise ValueError("the layer is not that of the estimator")
    posterior = decode_posterior(content["posterior"], tensors, module, source)
    return open_layer(posterior, numbers, scalings["target"], scalings["inputs"])


def _check_estimator(estimator: Any) -> None:
    """Raise ValueError or TypeError for settings, columns or classes that do not fit one another.

    The last layer must be set.
    """
    layer = estimator.ensemble_
    columns = estimator.n_features_in_
    estimator._check_settings(estimator._make_base(0))
    if (
        type(columns) is not int
        or columns < 1
        or len(getattr(estimator, "feature_names_in_", range(columns))) != columns
    ):
        raise ValueError("the columns do not fit their number")

    if layer.inputs is not None:
        check_scaling(layer.inputs, columns)
    if isinstance(layer, NumberLayer):
        if hasattr(estimator, "classes_"):
            raise ValueError("there are classes for numbers")
        return

    classes = getattr(estimator, "classes_", np.zeros(0))
    check_class_count(classes, layer.posterior.network.outputs)
