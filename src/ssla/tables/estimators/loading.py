"""Opening estimators that `saving` wrote. What a file holds is validated before it is used."""

from __future__ import annotations

import os
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ssla._checks import in_plain_torch
from ssla.files import Decoder, FileError, read
from ssla.files.container import guarded
from ssla.files.load_posterior import LARGEST, unpack
from ssla.likelihoods import Gaussian
from ssla.predictive.positive import Censored, Positive
from ssla.predictive.transformed import Transform
from ssla.tables.columns import Plan
from ssla.tables.estimators.classifier import SSLAClassifier
from ssla.tables.estimators.estimator import AUTO
from ssla.tables.estimators.inputs import column_names
from ssla.tables.estimators.last_layers import open_layer
from ssla.tables.estimators.regressor import SSLARegressor
from ssla.tables.estimators.saving import KIND, LAYOUT
from ssla.tables.estimators.split_conformal import Conformal
from ssla.tables.estimators.training_table import TrainingTable
from ssla.tables.estimators.wrapped_files import WRAPPED, open_wrapped
from ssla.tables.networks import CONTINUOUS, LIKELIHOODS, ON_SCALE, Ensemble, Scaling, Settings
from ssla.tables.networks.component import Component
from ssla.tables.networks.ensemble import CLASSES, GAUSSIAN, HETEROSCEDASTIC, POSITIVE
from ssla.tables.networks.training import Architecture, Schedule
from ssla.tables.trees.beside_networks import Trees
from ssla.tables.trees.forest import Forest
from ssla.tables.trees.out_of_fold import ClassLayer, linear

ESTIMATORS: dict[str, type[Any]] = {
    "SSLARegressor": SSLARegressor,
    "SSLAClassifier": SSLAClassifier,
}


@in_plain_torch
def load(path: str | os.PathLike[str], models: Any = None) -> Any:
    """Load an estimator that `estimator.save(path)` wrote. Its predictions have the same bits.

    models: the fitted models of a `PredictiveRegressor` or `PredictiveClassifier`, its `models_`,
    which the file does not hold.

    >>> ssla.sklearn.load("model").predict_interval(X)      # doctest: +SKIP
    """
    return load_trained(path, models)[0]


def load_trained(
    path: str | os.PathLike[str], models: Any = None
) -> tuple[Any, TrainingTable | None]:
    """The estimator, and what `ssla train` stored beside it; None if it was saved from Python."""
    content, tensors = read(path, KIND)
    source = Path(path)
    _check_layout(content, source)
    if content.get("estimator") in WRAPPED:
        return open_wrapped(content, tensors, models, source), None
    if models is not None:
        raise ValueError(
            f"models= is for a PredictiveRegressor or PredictiveClassifier, but {source} holds its "
            "own networks."
        )
    with guarded(source):
        estimator = _unpack_estimator(content, tensors, source)
        _check(estimator)
        training = content["training"]
        return estimator, None if training is None else TrainingTable.from_json(training)


def _check_layout(content: dict[str, Any], source: Path) -> None:
    """FileError for a file of another layout, in words."""
    layout = content.get("layout", 1)
    if layout != LAYOUT:
        other = "a newer" if type(layout) is int and layout > LAYOUT else "an earlier"
        raise FileError(
            f"{source} was written by {other} version of ssla, whose estimators this version does "
            "not read. Train the model again."
        )


def _unpack_estimator(content: dict[str, Any], tensors: dict[str, Tensor], source: Path) -> Any:
    """The fitted estimator of a file, not yet checked."""
    decoder = Decoder(tensors)
    if content["estimator"] not in ESTIMATORS:
        raise FileError(
            f"{source} holds a {content['estimator']!r}, which this version of ssla does not "
            "support."
        )
    estimator = ESTIMATORS[content["estimator"]](**decoder.decode(content["parameters"], dict))
    estimator.n_features_in_ = content["columns"]
    if content["names"]:
        estimator.feature_names_in_ = np.array(
            [str(name) for name in content["names"]], dtype=object
        )
    if content["classes"] is not None:
        estimator.classes_ = np.array(
            content["classes"]["values"], dtype=_dtype(content["classes"]["dtype"])
        )
        _load_class_weights(estimator, content)
    estimator.plan_ = Plan.from_json(content["plan"])
    estimator.ensemble_ = _unpack_ensemble(content["ensemble"], decoder, tensors, source)
    estimator.n_iter_ = estimator.ensemble_.epochs
    if isinstance(estimator, SSLARegressor):
        estimator.conformal_ = _unpack_conformal(content["conformal"], decoder)
    return estimator


def _load_class_weights(estimator: Any, content: dict[str, Any]) -> None:
    """One weight for each class, and the labels of `class_weight`, which a file holds as texts."""
    weights = np.array(content["class_weights"], dtype=np.float64)
    if weights.shape != estimator.classes_.shape or not bool(
        ((weights >= 0) & (weights <= LARGEST)).all()
    ):
        raise ValueError("the weights of the classes do not fit the classes")
    estimator.class_weights_ = weights
    if isinstance(given := getattr(estimator, "class_weight", None), dict):
        labels = {str(label): label for label in estimator.classes_.tolist()}
        estimator.class_weight = {labels.get(name, name): weight for name, weight in given.items()}


def _unpack_conformal(content: Any, decoder: Decoder) -> Conformal | None:
    if content is None:
        return None
    parts = decoder.decode(content, dict)
    return Conformal(parts["scores"].numpy(), parts["weights"].numpy(), parts["refit"])


def _check(estimator: Any) -> None:
    """ValueError for a forged file: wrong settings, sizes, classes, weights or scales."""
    ensemble: Ensemble = estimator.ensemble_
    width, outputs = ensemble.architecture.inputs, ensemble.architecture.outputs
    settings: Settings = ensemble.settings
    classes: Any = getattr(estimator, "classes_", None)
    estimator._settings(settings.likelihood, 1)  # refuses unknown names and settings out of range
    is_classifier = isinstance(estimator, SSLAClassifier)
    asked = CLASSES if is_classifier else estimator.likelihood
    if settings.likelihood not in LIKELIHOODS or asked not in (settings.likelihood, AUTO):
        raise ValueError(f"the likelihood {settings.likelihood!r} is not that of the estimator")
    if (classes is not None) != is_classifier:
        raise ValueError("the classes do not fit the estimator")
    if is_classifier and (
        len(classes) != max(outputs, 2) or len(set(classes.tolist())) != len(classes)
    ):
        raise ValueError(
            f"{len(classes)} classes do not fit {outputs} outputs, or one occurs twice"
        )
    _check_columns(estimator)
    levels = ensemble.architecture.levels
    targets = outputs if settings.likelihood == GAUSSIAN else 1
    if (ensemble.target is not None) != (
        settings.likelihood in CONTINUOUS
    ) or ensemble.one_target != (targets == 1):
        raise ValueError("the scaling of the target does not fit the likelihood")
    for scaling, size in ((ensemble.inputs, width), (ensemble.target, targets)):
        if scaling is not None:
            _check_numbers("the shift of a scaling", scaling.shift, (size,))
            _check_numbers("the scale of a scaling", scaling.scale, (size,), least=1 / LARGEST)
    coded = torch.tensor([count > 0 for count in levels], dtype=torch.bool)
    if levels and not bool(
        ((ensemble.inputs.shift[coded] == 0) & (ensemble.inputs.scale[coded] == 1)).all()
    ):
        raise ValueError("codes of levels are not standardised")
    made = LIKELIHOODS[settings.likelihood](len(classes) if is_classifier else targets)[0]
    expected = Gaussian if made is None else type(made)
    weights = torch.tensor(
        [component.weight for component in ensemble.components], dtype=torch.float64
    )
    if not len(weights) or not bool((weights > 0).all()) or abs(float(weights.sum()) - 1) > 1e-6:
        raise ValueError("the weights of the components are not positive with sum 1")
    if any(
        type(component.posterior.likelihood) is not expected for component in ensemble.components
    ):
        raise ValueError(f"a component has another likelihood than {settings.likelihood!r}")
    conformal = getattr(estimator, "conformal_", None)
    if conformal is not None:
        scores = torch.from_numpy(conformal.scores)
        _check_numbers("the conformal scores", scores, (max(len(scores), 1), targets), least=0.0)
        if not bool((scores.diff(dim=0) >= 0).all()):
            raise ValueError("the conformal scores are not sorted")
        _check_numbers(
            "the conformal weights",
            torch.from_numpy(conformal.weights),
            tuple(conformal.weights.shape),
            least=0.0,
        )
        if conformal.weights.shape[0] != len(scores) or not isinstance(conformal.refit, str):
            raise ValueError("the conformal weights do not fit the scores")


def _check_columns(estimator: Any) -> None:
    """ValueError where the names, the plan and the network do not fit one another."""
    plan: Plan = estimator.plan_
    architecture = estimator.ensemble_.architecture
    columns = estimator.n_features_in_
    if (
        len(getattr(estimator, "feature_names_in_", range(columns))) != columns
        or plan.width != architecture.inputs
    ):
        raise ValueError(f"the columns are not the {architecture.inputs} inputs of the network")
    names = set(column_names(estimator))
    inputs = {feature.name for feature in plan.features}
    # A column may be left out by the plan, or before it: it is not among the names then.
    if not inputs <= names <= inputs | set(plan.left_out):
        raise ValueError("the plan is not that of the columns")
    if plan.levels != architecture.levels:
        raise ValueError("the codes of the plan are not those of the network")


def _check_numbers(
    what: str, values: Tensor, shape: tuple[int, ...], least: float = -LARGEST
) -> None:
    if (
        values.dtype != torch.float64
        or values.shape != shape
        or not bool(((values >= least) & (values <= LARGEST)).all())
    ):
        raise ValueError(
            f"{what}: {shape} numbers in float64 between {least:g} and {LARGEST:g} were expected"
        )


def _unpack_ensemble(
    content: dict[str, Any], decoder: Decoder, tensors: dict[str, Tensor], source: Path
) -> Ensemble:
    settings = decoder.decode(content["settings"], dict)
    architecture = Architecture(**decoder.decode(content["architecture"], dict))
    pieces = architecture.pieces
    if pieces and (
        len(pieces) != architecture.inputs
        or any(type(count) is not int or count < 0 for count in pieces)
    ):
        raise ValueError("the pieces of the inputs are not one count for each")
    _check_levels(architecture, tensors)
    widths, first = architecture.widths, bool(pieces) + bool(architecture.levels)
    shapes = [
        tuple(tensors[f"network.0.{2 * i + first}.weight"].shape) for i in range(len(widths) - 1)
    ]
    if shapes != [
        (following, width) for width, following in pairwise(widths)
    ]:  # before memory for other sizes is allocated
        raise ValueError(f"the networks do not have the widths {widths}")
    if settings["members"] != len(
        {name.split(".")[1] for name in tensors if name.startswith("network.")}
    ):
        raise ValueError(f"there are no networks of {settings['members']} members")
    modules = []
    for m in range(settings["members"]):
        module = architecture.build().double()
        prefix = f"network.{m}."
        module.load_state_dict(
            {name.removeprefix(prefix): v for name, v in tensors.items() if name.startswith(prefix)}
        )
        modules.append(module)
    scalings = []
    for name in ("inputs", "target"):
        part = content["scaling"][name]
        scalings.append(
            None
            if part is None
            else Scaling(*(decoder.decode(one, Tensor).double() for one in part))
        )
    if scalings[0] is None:
        raise ValueError("the inputs have no scaling")
    components = tuple(
        Component(
            unpack(c["posterior"], tensors, modules[c["member"]], source),
            c["member"],
            float(c["weight"]),
        )
        for c in content["components"]
    )
    if any(component.member not in range(len(modules)) for component in components):
        raise ValueError("a component belongs to no member")
    if (
        type(content["one_target"]) is not bool
        or type(content["epochs"]) is not int
        or content["epochs"] < 0
    ):
        raise ValueError("epochs must be a count, and one_target true or false")
    settings["schedule"] = Schedule(**settings["schedule"])
    spreads = tuple((float(factor), float(share)) for factor, share in content["spreads"])
    trust = float(content["trust"])
    total = sum(share for _, share in spreads)
    if not (
        abs(total - 1) <= 1e-6
        and all(0 < factor <= LARGEST and share > 0 for factor, share in spreads)
        and 0 <= trust <= 1
    ):
        raise ValueError(
            "the spreads are not positive factors with shares of sum 1, or the trust is not a share"
        )
    if scalings[1] is None and any(factor != 1 for factor, _ in spreads):
        raise ValueError("only the predictive of a continuous target is stretched")
    return Ensemble(
        Settings(**settings),
        architecture,
        tuple(modules),
        components,
        scalings[0],
        scalings[1],
        content["epochs"],
        content["one_target"],
        spreads,
        trust,
        _unpack_trees(content["trees"], decoder, tensors, architecture, source),
        _unpack_scale(content["scale"], settings["likelihood"]),
        left_out=_unpack_left_out(content, len(modules)),
        constant=content["constant"],
    )


def _unpack_left_out(content: dict[str, Any], networks: int) -> tuple[int, ...]:
    """The members without a share."""
    left_out = tuple(content["left_out"])
    constant = content["constant"]
    trained = networks if constant else networks + len(left_out)
    if type(constant) is not bool or any(
        type(m) is not int or m not in range(trained) for m in left_out
    ):
        raise ValueError("the members that are left out are not among those that were trained")
    return left_out


def _check_levels(architecture: Architecture, tensors: dict[str, Tensor]) -> None:
    """ValueError for numbers of levels that are impossible, or not those of the embeddings of
    the first network.
    """
    levels, dimensions = architecture.levels, architecture.dimensions
    if any(type(count) is not int or count < 0 for count in (*levels, *dimensions)):
        raise ValueError("the levels of the inputs are not counts")
    expected = {len(levels), len(dimensions)}
    if expected == {0}:
        return
    coded = [(count + 1, size) for count, size in zip(levels, dimensions, strict=False) if count]
    if (
        expected != {architecture.inputs}
        or not coded
        or any((count > 0) != (size > 0) for count, size in zip(levels, dimensions, strict=True))
    ):
        raise ValueError(
            "the levels of the inputs are not one count for each, with the size of its embedding"
        )
    if any(count and pieces for count, pieces in zip(levels, architecture.pieces, strict=False)):
        raise ValueError("a code of levels has no pieces")
    place = f"network.0.{int(bool(architecture.pieces))}.tables"
    if [
        tuple(tensors[f"{place}.{i}"].shape) for i in range(len(coded))
    ] != coded:  # before memory is allocated
        raise ValueError(f"the embeddings do not have the sizes {coded}")


def _unpack_scale(content: dict[str, Any] | None, likelihood: str) -> Transform | None:
    if content is None and likelihood != POSITIVE:
        return ON_SCALE.get(likelihood)
    if content == {} and likelihood == HETEROSCEDASTIC:
        return Censored()
    scale = Positive(**(content or {}))
    ends = (scale.low, scale.high)
    if (
        likelihood != POSITIVE
        or type(scale.closed) is not bool
        or not all(type(end) is float and abs(end) < 700 for end in ends)
    ):
        raise ValueError("the scale of the target does not fit the likelihood")
    if not scale.low < scale.high:
        raise ValueError("the ends of the target's scale are not in order")
    return scale


def _unpack_trees(
    content: dict[str, Any] | None,
    decoder: Decoder,
    tensors: dict[str, Tensor],
    architecture: Architecture,
    source: Path,
) -> Trees | None:
    if content is None:
        return None
    forest = Forest(**decoder.decode(content["forest"], dict))
    weights = decoder.decode(content["layer"], dict)
    module = linear(weights["weight"], weights["bias"])
    posterior = unpack(content["posterior"], tensors, module, source)
    target = content["target"] and Scaling(
        *(decoder.decode(one, Tensor) for one in content["target"])
    )
    layer = open_layer(posterior, decoder.decode(content["numbers"], dict), target)
    forest.check(
        architecture.inputs, max(architecture.outputs, 2) if isinstance(layer, ClassLayer) else 1
    )
    share = float(content["share"])
    pull = float(content["pull"])
    if (
        not 0 <= share <= 1
        or not 0 <= pull <= 1
        or posterior.network.outputs != architecture.outputs
    ):
        raise ValueError(
            "the trees are not those of the networks, or their share or pull is not one"
        )
    return Trees(forest, layer, share, pull)


def _dtype(name: str) -> type:
    return {"bool": bool, "int": int, "float": float, "str": str, "object": object}[name]
