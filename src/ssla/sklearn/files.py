"""Fitted estimators as files, self-contained: networks, posteriors, scaling, settings. The form is that of `ssla.persistence`."""

from __future__ import annotations

import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ssla.ensemble import Ensemble, Scaling, Settings
from ssla.ensemble.model import Component
from ssla.persistence import Decoder, Encoder, FileError, pack, read, unpack, write
from ssla.persistence.container import guarded
from ssla.sklearn.classifier import SSLAClassifier
from ssla.sklearn.conformal import Conformal
from ssla.sklearn.regressor import SSLARegressor
from ssla.training import Architecture, Schedule

KIND = "estimator"
ESTIMATORS: dict[str, type[Any]] = {"SSLARegressor": SSLARegressor, "SSLAClassifier": SSLAClassifier}


def save(estimator: Any, path: str | os.PathLike[str], extra: dict[str, Any] | None = None) -> Path:
    """Write a fitted estimator. extra: more that is plain JSON, given back by `read_extra`."""
    encoder = Encoder()
    parameters = {name: _plain(name, value) for name, value in estimator.get_params(deep=False).items()}
    content = {
        "estimator": type(estimator).__name__,
        "parameters": encoder.encode(parameters, "parameters"),
        "columns": int(estimator.n_features_in_),
        "names": [str(name) for name in getattr(estimator, "feature_names_in_", ())],
        "classes": _labels(getattr(estimator, "classes_", None)),
        "ensemble": _pack_ensemble(estimator.ensemble_, encoder),
        "extra": extra or {},
    }
    conformal = getattr(estimator, "conformal_", None)
    if conformal is not None:
        arrays = {name: torch.from_numpy(getattr(conformal, name).copy()) for name in ("scores", "weights")}
        content["conformal"] = encoder.encode(arrays | {"refit": _plain("refit", conformal.refit)}, "conformal")
    return write(path, KIND, content, encoder.tensors)


def load(path: str | os.PathLike[str]) -> Any:
    """Open what `estimator.save(path)` wrote. It predicts bit by bit as before.

    >>> ssla.sklearn.load("model").predict_interval(X)      # doctest: +SKIP
    """
    return load_with_extra(path)[0]


def load_with_extra(path: str | os.PathLike[str]) -> tuple[Any, dict[str, Any]]:
    """The estimator, and the plain JSON that was saved with it."""
    content, tensors = read(path, KIND)
    source = Path(path)
    with guarded(source):
        decoder = Decoder(tensors)
        if content["estimator"] not in ESTIMATORS:
            raise FileError(f"{source} holds a {content['estimator']!r}, which this ssla does not know.")
        estimator = ESTIMATORS[content["estimator"]](**decoder.decode(content["parameters"], dict))
        estimator.n_features_in_ = int(content["columns"])
        if content["names"]:
            estimator.feature_names_in_ = np.array([str(name) for name in content["names"]], dtype=object)
        if content["classes"] is not None:
            estimator.classes_ = np.array(content["classes"]["values"], dtype=_dtype(content["classes"]["dtype"]))
        estimator.ensemble_ = _unpack_ensemble(content["ensemble"], decoder, tensors, source)
        estimator.n_iter_ = estimator.ensemble_.epochs
        if isinstance(estimator, SSLARegressor):
            estimator.conformal_ = _unpack_conformal(content, decoder, estimator.refit)
        extra = dict(content["extra"])
    return estimator, extra


def _unpack_conformal(content: dict[str, Any], decoder: Decoder, refit: str) -> Conformal | None:
    if "conformal" not in content:
        return None
    found = decoder.decode(content["conformal"])
    if isinstance(found, Tensor):  # of an ssla without row weights: the scores alone
        found = {"scores": found, "weights": torch.ones_like(found), "refit": refit}
    return Conformal(found["scores"].numpy(), found["weights"].numpy(), found["refit"])


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
        "scaling": {
            name: None
            if part is None
            else [encoder.encode(part.shift, f"{name}.shift"), encoder.encode(part.scale, f"{name}.scale")]
            for name, part in scalings.items()
        },
        "components": [
            {"member": c.member, "weight": c.weight, "posterior": pack(c.posterior, encoder, f"component.{i}.")}
            for i, c in enumerate(ensemble.components)
        ],
    }


def _unpack_ensemble(content: dict[str, Any], decoder: Decoder, tensors: dict[str, Tensor], source: Path) -> Ensemble:
    settings = decoder.decode(content["settings"], dict)
    architecture = Architecture(**decoder.decode(content["architecture"], dict))
    modules = []
    for m in range(int(settings["members"])):
        module = architecture.build().double()
        prefix = f"network.{m}."
        module.load_state_dict({name.removeprefix(prefix): v for name, v in tensors.items() if name.startswith(prefix)})
        modules.append(module)
    scalings = []
    for name in ("inputs", "target"):
        part = content["scaling"][name]
        scalings.append(None if part is None else Scaling(*(decoder.decode(one, Tensor).double() for one in part)))
    if scalings[0] is None:
        raise ValueError("the inputs have no scaling")
    components = tuple(
        Component(unpack(c["posterior"], tensors, modules[c["member"]], source), int(c["member"]), float(c["weight"]))
        for c in content["components"]
    )
    settings["schedule"] = Schedule(**settings["schedule"])
    return Ensemble(
        Settings(**settings),
        architecture,
        tuple(modules),
        components,
        scalings[0],
        scalings[1],
        int(content["epochs"]),
        bool(content["one_target"]),
    )


def _plain(name: str, value: Any) -> Any:
    """A parameter as JSON can hold it. A random state that is an object is not needed to predict."""
    if isinstance(value, np.generic):
        value = value.item()
    if name == "random_state" and not isinstance(value, int | None):
        return None
    if name == "refit" and not isinstance(value, str):
        raise FileError(f"refit={value!r} is an object, which a file cannot hold. Give it by name, for example refit='output'.")
    return value


def _labels(classes: np.ndarray | None) -> dict[str, Any] | None:
    if classes is None:
        return None
    kind = {"b": "bool", "i": "int", "u": "int", "f": "float", "U": "str", "S": "str", "O": "object"}.get(classes.dtype.kind)
    values = classes.tolist()
    if kind is None or any(not isinstance(v, bool | int | float | str) for v in values):
        raise FileError("Only classes that are numbers, texts or booleans can be saved. Encode the labels first.")
    return {"dtype": kind, "values": values}


def _dtype(name: str) -> type:
    return {"bool": bool, "int": int, "float": float, "str": str, "object": object}[name]
