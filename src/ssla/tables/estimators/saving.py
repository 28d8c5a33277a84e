"""Writes fitted estimators to files, which `loading` opens.

A file holds the plan of the columns, networks, posteriors, scaling and settings. It is
self-contained, except for the models of other libraries inside `PredictiveRegressor` and
`PredictiveClassifier`.

A function `_pack_…` returns the *content* of a part: values that JSON can hold. An `Encoder`
collects the tensors of all parts, and the content names them. Each function has its counterpart
`_open_…` in `loading` or `file_parts`, and a change of one needs a change of the other and another
LAYOUT.
"""

from __future__ import annotations

import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ssla.files import Encoder, FileError, encode_posterior, write_model
from ssla.network import get_module
from ssla.predictive.positive import Censored, Positive
from ssla.tables.estimators.split_conformal import Conformal
from ssla.tables.estimators.training_table import TrainingTable
from ssla.tables.networks import Ensemble
from ssla.tables.networks.scaling import Scaling
from ssla.tables.trees.beside_networks import Trees
from ssla.tables.trees.out_of_fold import ClassLayer, NumberLayer

KIND = "estimator"
LAYOUT = 2  # of the content; files of other layouts are not read
# The types of class labels, by the kind of their array.
CLASS_DTYPES = {
    "b": "bool",
    "i": "int",
    "u": "int",
    "f": "float",
    "U": "str",
    "S": "str",
    "O": "object",
}


def save(
    estimator: Any, path: str | os.PathLike[str], training: TrainingTable | None = None
) -> Path:
    """Write a fitted `SSLARegressor` or `SSLAClassifier` to a directory, and return its path.

    training: what the command stores beside it, and `load_trained` returns; None: nothing. Raises
    FileError for classes or parameters that a file cannot hold.
    """
    encoder = Encoder()
    content = {
        **_pack_common_content(estimator, estimator.get_params(deep=False), encoder),
        "plan": estimator.plan_.as_json(),
        "ensemble": _pack_ensemble(estimator.ensemble_, encoder),
        "training": None if training is None else training.as_json(),
        "conformal": _pack_conformal(getattr(estimator, "conformal_", None), encoder),
    }
    if hasattr(estimator, "class_weights_"):
        content["class_weights"] = estimator.class_weights_.tolist()
    return write_model(path, KIND, content, encoder.tensors)


def save_wrapped(estimator: Any, path: str | os.PathLike[str]) -> Path:
    """Write a fitted `PredictiveRegressor` or `PredictiveClassifier` to a directory.

    Its last layer is written, and the names of the classes of its models, but not the models.
    Returns the path. Raises FileError for classes or parameters that a file cannot hold.
    """
    encoder = Encoder()
    layer = estimator.ensemble_

    # Predictions need none of the parameters that are left out here.
    parameters = estimator.get_params(deep=False)
    parameters.pop("base")
    parameters.pop("noise_base", None)  # the classifier has none
    if not isinstance(parameters["cv"], int | np.integer):
        del parameters["cv"]
    for name, value in get_module(layer.posterior.network).state_dict().items():
        encoder.tensors[f"network.0.{name}"] = value
    scalings = {name: getattr(layer, name, None) for name in ("inputs", "target")}
    content = {
        **_pack_common_content(estimator, parameters, encoder),
        "numbers": encoder.encode(_collect_layer_numbers(layer), "numbers"),
        "scaling": _pack_scalings(scalings, encoder),
        "posterior": encode_posterior(layer.posterior, encoder, "posterior."),
        "models": {
            key: [type(model).__name__ for model in models]
            for key, models in estimator.models_.items()
        },
        "probe": encoder.encode(estimator.predict_probe(), "probe"),
    }
    return write_model(path, KIND, content, encoder.tensors)


def _pack_common_content(
    estimator: Any, parameters: dict[str, Any], encoder: Encoder
) -> dict[str, Any]:
    """Return the content that the files of all estimators have: settings, columns and classes.

    parameters: those to store, as the estimator has them. Raises FileError for classes or
    parameters that a file cannot hold.
    """
    plain = {name: _convert_parameter(name, value) for name, value in parameters.items()}
    return {
        "layout": LAYOUT,
        "estimator": type(estimator).__name__,
        "parameters": encoder.encode(plain, "parameters"),
        "columns": int(estimator.n_features_in_),
        "names": [str(name) for name in getattr(estimator, "feature_names_in_", ())],
        "classes": _pack_classes(getattr(estimator, "classes_", None)),
    }


def _pack_conformal(conformal: Conformal | None, encoder: Encoder) -> Any:
    """Return the content for the conformal scores; None if there are none.

    Raises FileError if they were computed with a refit that is an object.
    """
    if conformal is None:
        return None
    arrays = {
        name: torch.from_numpy(getattr(conformal, name).copy()) for name in ("scores", "weights")
    }
    refit = _convert_parameter("refit", conformal.refit)
    return encoder.encode(arrays | {"refit": refit}, "conformal")


def _pack_scalings(scalings: dict[str, Scaling | None], encoder: Encoder) -> dict[str, Any]:
    """Return the content for scalings by name: shift and scale of each; None for None."""
    content: dict[str, Any] = dict.fromkeys(scalings)
    for name, scaling in scalings.items():
        if scaling is not None:
            content[name] = [
                encoder.encode(scaling.shift, f"{name}.shift"),
                encoder.encode(scaling.scale, f"{name}.scale"),
            ]
    return content


def _collect_layer_numbers(layer: ClassLayer | NumberLayer) -> dict[str, Any]:
    """Return what a last layer on predictions has beside its posterior and scalings.

    That is "floor" for a layer of classes, and "centre" and "shares" for a layer of numbers.
    """
    if isinstance(layer, ClassLayer):
        return {"floor": layer.floor}
    return {"centre": layer.centre, "shares": layer.shares}


def _pack_ensemble(ensemble: Ensemble, encoder: Encoder) -> dict[str, Any]:
    """Return the content for networks, posteriors and trees; the encoder collects their tensors."""
    for m, module in enumerate(ensemble.modules):
        for name, value in module.state_dict().items():
            encoder.tensors[f"network.{m}.{name}"] = value

    scalings = {"inputs": ensemble.inputs, "target": ensemble.target}

    # Scales of other classes follow from the likelihood.
    scale = asdict(ensemble.scale) if isinstance(ensemble.scale, Positive | Censored) else None
    return {
        "settings": encoder.encode(asdict(ensemble.settings), "settings"),
        "architecture": encoder.encode(asdict(ensemble.architecture), "architecture"),
        "epochs": ensemble.epochs,
        "one_target": ensemble.one_target,
        "spreads": [list(pair) for pair in ensemble.spreads],
        "trust": ensemble.trust,
        "left_out": list(ensemble.left_out),
        "constant": ensemble.constant,
        "scale": scale,
        "trees": _pack_trees(ensemble.trees, encoder),
        "scaling": _pack_scalings(scalings, encoder),
        "components": [
            {
                "member": component.member,
                "weight": component.weight,
                "posterior": encode_posterior(component.posterior, encoder, f"component.{i}."),
            }
            for i, component in enumerate(ensemble.components)
        ],
    }


def _pack_trees(trees: Trees | None, encoder: Encoder) -> dict[str, Any] | None:
    """Return the content for the trees beside the networks; None if there are none.

    The encoder collects their tensors.
    """
    if trees is None:
        return None
    layer = get_module(trees.layer.posterior.network).state_dict()
    scalings = {"trees.target": getattr(trees.layer, "target", None)}
    return {
        "forest": encoder.encode(vars(trees.forest), "forest"),
        "layer": encoder.encode(dict(layer), "trees"),
        "posterior": encode_posterior(trees.layer.posterior, encoder, "trees."),
        "numbers": encoder.encode(_collect_layer_numbers(trees.layer), "trees.numbers"),
        "target": _pack_scalings(scalings, encoder)["trees.target"],
        "share": trees.share,
        "pull": trees.pull,
    }


def _convert_parameter(name: str, value: Any) -> Any:
    """Return the parameter `name` as a file can hold it.

    NumPy scalars become Python values, and the keys of class_weight become texts. A random state
    that is an object becomes None, because predictions do not need it. Raises FileError for a refit
    that is an object.
    """
    if isinstance(value, np.generic):
        value = value.item()
    if name == "class_weight" and isinstance(value, dict):
        return {str(label): float(weight) for label, weight in value.items()}
    if name == "random_state" and not isinstance(value, int | None):
        return None
    if name == "refit" and not isinstance(value, str):
        raise FileError(
            f"refit={value!r} is an object, which a file cannot hold. Give it by name, for example "
            "refit='output'."
        )

    return value


def _pack_classes(classes: np.ndarray | None) -> dict[str, Any] | None:
    """Return the content for the labels of classes (C,); None if there are none.

    Raises FileError for labels that are not numbers, texts or booleans.
    """
    if classes is None:
        return None
    dtype = CLASS_DTYPES.get(classes.dtype.kind)
    labels = classes.tolist()
    if dtype is None or any(not isinstance(label, bool | int | float | str) for label in labels):
        raise FileError(
            "Only classes that are numbers, texts or booleans can be saved. Encode the labels "
            "first."
        )

    return {"dtype": dtype, "values": labels}
