"""Fitted estimators to files: plan of the columns, networks, posteriors, scaling, settings.
`loading` opens them.

They are self-contained, except for the models of other libraries inside `PredictiveRegressor` and
`PredictiveClassifier`.
"""

from __future__ import annotations

import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ssla.files import Encoder, FileError, encode_posterior, write_model
from ssla.network import module_of
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
    """Write a fitted estimator to a directory, and return its path.

    training: what the command adds, returned by `load_trained`. Raises FileError for classes or
    parameters that a file cannot hold.
    """
    encoder = Encoder()
    content = {
        **_pack_head(estimator, estimator.get_params(deep=False), encoder),
        "plan": estimator.plan_.as_json(),
        "ensemble": _pack_ensemble(estimator.ensemble_, encoder),
        "training": None if training is None else training.as_json(),
        "conformal": _pack_conformal(getattr(estimator, "conformal_", None), encoder),
    }
    if hasattr(estimator, "class_weights_"):
        content["class_weights"] = estimator.class_weights_.tolist()
    return write_model(path, KIND, content, encoder.tensors)


def save_wrapped(estimator: Any, path: str | os.PathLike[str]) -> Path:
    """Write the last layer of a fitted `PredictiveRegressor` or `PredictiveClassifier`, without
    its models, and return the path of the directory.

    Raises FileError for classes or parameters that a file cannot hold.
    """
    encoder = Encoder()
    layer = estimator.ensemble_
    parameters = estimator.get_params(deep=False)
    for name in ("base", "noise_base"):
        parameters.pop(name, None)
    if not isinstance(parameters["cv"], int | np.integer):
        del parameters["cv"]  # an object that predictions do not need
    for name, value in module_of(layer.posterior.network).state_dict().items():
        encoder.tensors[f"network.0.{name}"] = value
    scalings = {name: getattr(layer, name, None) for name in ("inputs", "target")}
    content = {
        **_pack_head(estimator, parameters, encoder),
        "numbers": encoder.encode(_numbers_of_layer(layer), "numbers"),
        "scaling": _pack_scalings(scalings, encoder),
        "posterior": encode_posterior(layer.posterior, encoder, "posterior."),
        "models": {
            kind: [type(model).__name__ for model in models]
            for kind, models in estimator.models_.items()
        },
        "probe": encoder.encode(estimator.predict_probe(), "probe"),
    }
    return write_model(path, KIND, content, encoder.tensors)


def _pack_head(estimator: Any, parameters: dict[str, Any], encoder: Encoder) -> dict[str, Any]:
    """Return the content that the files of all estimators have: settings, columns and classes."""
    plain = {name: _plain_parameter(name, value) for name, value in parameters.items()}
    return {
        "layout": LAYOUT,
        "estimator": type(estimator).__name__,
        "parameters": encoder.encode(plain, "parameters"),
        "columns": int(estimator.n_features_in_),
        "names": [str(name) for name in getattr(estimator, "feature_names_in_", ())],
        "classes": _pack_classes(getattr(estimator, "classes_", None)),
    }


def _pack_conformal(conformal: Conformal | None, encoder: Encoder) -> Any:
    """Return the content for the conformal scores; None if there are none."""
    if conformal is None:
        return None
    arrays = {
        name: torch.from_numpy(getattr(conformal, name).copy()) for name in ("scores", "weights")
    }
    refit = _plain_parameter("refit", conformal.refit)
    return encoder.encode(arrays | {"refit": refit}, "conformal")


def _pack_scalings(scalings: dict[str, Scaling | None], encoder: Encoder) -> dict[str, Any]:
    """Return the content for scalings by name: shift and scale of each, or None."""
    return {
        name: scaling
        and [
            encoder.encode(scaling.shift, f"{name}.shift"),
            encoder.encode(scaling.scale, f"{name}.scale"),
        ]
        for name, scaling in scalings.items()
    }


def _numbers_of_layer(layer: ClassLayer | NumberLayer) -> dict[str, Any]:
    """Return what a last layer on predictions has beside its posterior and scalings."""
    return {
        name: getattr(layer, name) for name in ("centre", "shares", "floor") if hasattr(layer, name)
    }


def _pack_ensemble(ensemble: Ensemble, encoder: Encoder) -> dict[str, Any]:
    """Return the content for networks, posteriors and trees; their tensors go to the encoder."""
    for m, module in enumerate(ensemble.modules):
        for name, value in module.state_dict().items():
            encoder.tensors[f"network.{m}.{name}"] = value
    scalings = {"inputs": ensemble.inputs, "target": ensemble.target}
    # Another scale follows from the likelihood.
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
    """Return the content for the trees beside the networks; None if there are none."""
    if trees is None:
        return None
    layer = module_of(trees.layer.posterior.network).state_dict()
    scalings = {"trees.target": getattr(trees.layer, "target", None)}
    return {
        "forest": encoder.encode(vars(trees.forest), "forest"),
        "layer": encoder.encode(dict(layer), "trees"),
        "posterior": encode_posterior(trees.layer.posterior, encoder, "trees."),
        "numbers": encoder.encode(_numbers_of_layer(trees.layer), "trees.numbers"),
        "target": _pack_scalings(scalings, encoder)["trees.target"],
        "share": trees.share,
        "pull": trees.pull,
    }


def _plain_parameter(name: str, value: Any) -> Any:
    """Return a parameter as JSON can hold it.

    A random state that is an object is left out, because predictions do not need it. Raises
    FileError for a refit that is an object.
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
    """Return the content for the labels of classes (C,), None if there are none.

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
