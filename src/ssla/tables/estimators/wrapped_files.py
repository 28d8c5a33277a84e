"""Opening the estimators of `wrapped`. The file has the last layer; the models are given."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ssla.files import Decoder, FileError
from ssla.files.container import guarded
from ssla.files.load_posterior import unpack
from ssla.tables.estimators.bases import is_fitted
from ssla.tables.estimators.last_layers import check_scaling, open_layer
from ssla.tables.estimators.wrapped import (
    CLASSES,
    MEAN,
    NOISE,
    PredictiveClassifier,
    PredictiveRegressor,
)
from ssla.tables.networks.scaling import Scaling
from ssla.tables.trees.out_of_fold import NumberLayer, linear

TYPES: dict[str, type[Any]] = {
    "PredictiveRegressor": PredictiveRegressor,
    "PredictiveClassifier": PredictiveClassifier,
}
WRAPPED = tuple(TYPES)  # not a dictionary: a forged file may ask for a name that has no hash
TOLERANCE = 1e-6  # of predictions at the probe: other versions of a library may round differently


def open_wrapped(
    content: Mapping[str, Any], tensors: Mapping[str, Tensor], models: Any, source: Path
) -> Any:
    """The estimator, with its models.

    Other models than those of the fit are refused, as far as the file can tell.
    """
    with guarded(source):
        decoder = Decoder(dict(tensors))
        estimator = TYPES[content["estimator"]](**decoder.decode(content["parameters"], dict))
        estimator.n_features_in_ = content["columns"]
        if content["names"]:
            estimator.feature_names_in_ = np.array(
                [str(name) for name in content["names"]], dtype=object
            )
        if content["classes"] is not None:
            kinds = {"bool": bool, "int": int, "float": float, "str": str, "object": object}
            estimator.classes_ = np.array(
                content["classes"]["values"], dtype=kinds[content["classes"]["dtype"]]
            )
        estimator.ensemble_ = _layer(content, decoder, tensors, source)
        _check(estimator)
        expected = {
            kind: [str(name) for name in names] for kind, names in content["models"].items()
        }
        if set(expected) != (
            {MEAN, NOISE} if isinstance(estimator, PredictiveRegressor) else {CLASSES}
        ):
            raise ValueError("the models are not those of the estimator")
        probe = decoder.decode(content["probe"])
    estimator.models_ = _checked_models(models, expected, source)
    found = None if probe is None else estimator.probe()
    if probe is not None and (
        found is None or not all(_alike(a, b) for a, b in zip(found, probe, strict=True))
    ):
        raise FileError(
            f"The models given do not predict what those of {source} did, at the means of the "
            "columns. Give the models_ of the estimator that was saved."
        )
    return estimator


def _alike(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and bool(
        torch.isclose(a, b, rtol=TOLERANCE, atol=TOLERANCE * float(b.abs().max())).all()
    )


def _checked_models(
    models: Any, expected: Mapping[str, Sequence[str]], source: Path
) -> dict[str, tuple[Any, ...]]:
    wanted = ", ".join(
        f"{kind}: {len(names)} × {names[0]}" for kind, names in expected.items() if names
    )
    if models is None:
        raise FileError(
            f"{source} holds the last layer, but not the models that it needs ({wanted}): trees "
            "have no common format that is free of code. Keep model.models_ by other means, and "
            "give it as load(path, models=…), or Scorer(path, models=…)."
        )
    if not isinstance(models, Mapping) or {
        k: [type(m).__name__ for m in models.get(k, ())] for k in expected
    } != dict(expected):
        raise FileError(
            f"models must be the models_ of the estimator that was saved ({wanted}), but is not."
        )
    kept = {kind: tuple(models[kind]) for kind in expected}
    if not all(is_fitted(model) for group in kept.values() for model in group):
        raise FileError("The models are not fitted. Give the models_ of the fitted estimator.")
    return kept


def _layer(
    content: Mapping[str, Any], decoder: Decoder, tensors: Mapping[str, Tensor], source: Path
) -> Any:
    module = linear(tensors["network.0.weight"], tensors["network.0.bias"])
    scalings = {
        name: None if part is None else Scaling(*(decoder.decode(one, Tensor) for one in part))
        for name, part in content["scaling"].items()
    }
    numbers = decoder.decode(content["numbers"], dict)
    if ("floor" in numbers) != (content["estimator"] == PredictiveClassifier.__name__):
        raise ValueError("the layer is not that of the estimator")
    posterior = unpack(content["posterior"], tensors, module, source)
    return open_layer(posterior, numbers, scalings["target"], scalings["inputs"])


def _check(estimator: Any) -> None:
    """ValueError for a forged file: columns and classes."""
    layer, columns = estimator.ensemble_, estimator.n_features_in_
    estimator._check_settings(estimator._base(0))
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
    classes, outputs = getattr(estimator, "classes_", np.zeros(0)), layer.posterior.network.outputs
    if len(classes) != max(outputs, 2) or len(set(classes.tolist())) != len(classes):
        raise ValueError(
            f"{len(classes)} classes do not fit {outputs} outputs, or one occurs twice"
        )
