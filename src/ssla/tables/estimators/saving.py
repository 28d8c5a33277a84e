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

from ssla.files import Encoder, FileError, pack, write
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


def save(
    estimator: Any, path: str | os.PathLike[str], training: TrainingTable | None = None
) -> Path:
    """Write a fitted estimator. training: what the command adds, returned by `load_trained`."""
    encoder = Encoder()
    parameters = {
        name: _plain(name, value) for name, value in estimator.get_params(deep=False).items()
    }
    content = {
        **_head(estimator, parameters, encoder),
        "plan": estimator.plan_.as_json(),
        "ensemble": _pack_ensemble(estimator.ensemble_, encoder),
        "training": None if training is None else training.as_json(),
        "conformal": _pack_conformal(getattr(estimator, "conformal_", None), encoder),
    }
    if hasattr(estimator, "class_weights_"):
        content["class_weights"] = estimator.class_weights_.tolist()
    return write(path, KIND, content, encoder.tensors)


def _pack_conformal(conformal: Conformal | None, encoder: Encoder) -> Any:
    if conformal is None:
        return None
    arrays = {
        name: torch.from_numpy(getattr(conformal, name).copy()) for name in ("scores", "weights")
    }
    return encoder.encode(arrays | {"refit": _plain("refit", conformal.refit)}, "conformal")


def save_wrapped(estimator: Any, path: str | os.PathLike[str]) -> Path:
    """Write the last layer of a fitted `PredictiveRegressor` or `PredictiveClassifier`, without
    its models.
    """
    encoder = Encoder()
    layer = estimator.ensemble_
    given = estimator.get_params(deep=False)
    parameters = {
        name: _plain(name, value)
        for name, value in given.items()
        if name not in ("base", "noise_base")
    }
    if not isinstance(parameters["cv"], int):
        del parameters["cv"]  # an object that predictions do not need
    for name, value in module_of(layer.posterior.network).state_dict().items():
        encoder.tensors[f"network.0.{name}"] = value
    scalings = {name: getattr(layer, name, None) for name in ("inputs", "target")}
    content = {
        **_head(estimator, parameters, encoder),
        "numbers": encoder.encode(_numbers(layer), "numbers"),
        "scaling": _scalings(scalings, encoder),
        "posterior": pack(layer.posterior, encoder, "posterior."),
        "models": {
            kind: [type(model).__name__ for model in models]
            for kind, models in estimator.models_.items()
        },
        "probe": encoder.encode(estimator.probe(), "probe"),
    }
    return write(path, KIND, content, encoder.tensors)


def _head(estimator: Any, parameters: dict[str, Any], encoder: Encoder) -> dict[str, Any]:
    """What all estimators have: settings, columns, classes."""
    return {
        "layout": LAYOUT,
        "estimator": type(estimator).__name__,
        "parameters": encoder.encode(parameters, "parameters"),
        "columns": int(estimator.n_features_in_),
        "names": [str(name) for name in getattr(estimator, "feature_names_in_", ())],
        "classes": _labels(getattr(estimator, "classes_", None)),
    }


def _scalings(scalings: dict[str, Scaling | None], encoder: Encoder) -> dict[str, Any]:
    return {
        name: part
        and [
            encoder.encode(part.shift, f"{name}.shift"),
            encoder.encode(part.scale, f"{name}.scale"),
        ]
        for name, part in scalings.items()
    }


def _numbers(layer: ClassLayer | NumberLayer) -> dict[str, Any]:
    return {
        name: getattr(layer, name) for name in ("centre", "shares", "floor") if hasattr(layer, name)
    }


def _pack_ensemble(ensemble: Ensemble, encoder: Encoder) -> dict[str, Any]:
    for m, module in enumerate(ensemble.modules):
        for name, value in module.state_dict().items():
            encoder.tensors[f"network.{m}.{name}"] = value
    scalings = {"inputs": ensemble.inputs, "target": ensemble.target}
    return {
        "settings": encoder.encode(asdict(ensemble.settings), "settings"),
        "architecture": encoder.encode(asdict(ensemble.architecture), "architecture"),
        "epochs": ensemble.epochs,
        "one_target": ensemble.one_target,
        "spreads": [list(pair) for pair in ensemble.spreads],
        "trust": ensemble.trust,
        "left_out": list(ensemble.left_out),
        "constant": ensemble.constant,
        "scale": asdict(ensemble.scale)
        if isinstance(ensemble.scale, Positive | Censored)
        else None,
        "trees": _pack_trees(ensemble.trees, encoder),
        "scaling": _scalings(scalings, encoder),
        "components": [
            {
                "member": c.member,
                "weight": c.weight,
                "posterior": pack(c.posterior, encoder, f"component.{i}."),
            }
            for i, c in enumerate(ensemble.components)
        ],
    }


def _pack_trees(trees: Trees | None, encoder: Encoder) -> dict[str, Any] | None:
    if trees is None:
        return None
    layer = module_of(trees.layer.posterior.network).state_dict()
    return {
        "forest": encoder.encode(vars(trees.forest), "forest"),
        "layer": encoder.encode(dict(layer), "trees"),
        "posterior": pack(trees.layer.posterior, encoder, "trees."),
        "numbers": encoder.encode(_numbers(trees.layer), "trees.numbers"),
        "target": _scalings({"trees.target": getattr(trees.layer, "target", None)}, encoder)[
            "trees.target"
        ],
        "share": trees.share,
        "pull": trees.pull,
    }


def _plain(name: str, value: Any) -> Any:
    """A parameter as JSON can hold it.

    A random state that is an object is not needed to predict.
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


def _labels(classes: np.ndarray | None) -> dict[str, Any] | None:
    if classes is None:
        return None
    kind = {
        "b": "bool",
        "i": "int",
        "u": "int",
        "f": "float",
        "U": "str",
        "S": "str",
        "O": "object",
    }.get(classes.dtype.kind)
    values = classes.tolist()
    if kind is None or any(not isinstance(v, bool | int | float | str) for v in values):
        raise FileError(
            "Only classes that are numbers, texts or booleans can be saved. Encode the labels "
            "first."
        )
    return {"dtype": kind, "values": values}
