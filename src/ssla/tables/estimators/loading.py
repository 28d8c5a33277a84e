"""Opens estimators that `saving` wrote, and validates what a file holds before it is used.

A function `_open_…` reads a part of the *content*, the values that a file has as JSON. A `Decoder`
gives the tensors that the content names. A file may be forged, so a part that this library cannot
have written raises ValueError, KeyError or TypeError, which `load_trained` turns into a FileError.
In all functions `tensors` are those of the file by their names, and `source` is its path, for
errors.
"""

from __future__ import annotations

import os
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ssla._checks import in_plain_torch
from ssla.files import Decoder, FileError, read_model
from ssla.files.container import convert_to_file_error
from ssla.files.load_posterior import LARGEST, decode_posterior
from ssla.likelihoods import Gaussian
from ssla.predictive.positive import Censored, Positive
from ssla.predictive.transformed import Transform
from ssla.tables.columns import Plan
from ssla.tables.estimators.classifier import SSLAClassifier
from ssla.tables.estimators.estimator import AUTO
from ssla.tables.estimators.file_parts import (
    SUM_TOLERANCE,
    check_class_count,
    open_layer,
    open_scaling,
    open_settings,
)
from ssla.tables.estimators.inputs import list_column_names
from ssla.tables.estimators.regressor import SSLARegressor
from ssla.tables.estimators.saving import KIND, LAYOUT
from ssla.tables.estimators.split_conformal import Conformal
from ssla.tables.estimators.training_table import TrainingTable
from ssla.tables.estimators.wrapped_files import WRAPPED, open_wrapped
from ssla.tables.networks import CONTINUOUS, LIKELIHOODS, ON_SCALE, Ensemble, Settings
from ssla.tables.networks.component import Component
from ssla.tables.networks.ensemble import CLASSES, GAUSSIAN, HETEROSCEDASTIC, POSITIVE
from ssla.tables.networks.training import Architecture, Schedule
from ssla.tables.trees.beside_networks import Trees
from ssla.tables.trees.forest import Forest
from ssla.tables.trees.out_of_fold import ClassLayer, make_linear

ESTIMATORS: dict[str, type[Any]] = {
    "SSLARegressor": SSLARegressor,
    "SSLAClassifier": SSLAClassifier,
}


@in_plain_torch
def load(path: str | os.PathLike[str], models: Any = None) -> Any:
    """Load an estimator that `estimator.save(path)` wrote. Its predictions have the same bits.

    models: the fitted models of a `PredictiveRegressor` or `PredictiveClassifier`, its `models_`,
    which the file does not hold.

    Raises FileError for a file that is missing, damaged, forged or of another version of ssla, and
    for models that are not those of the fit.

    >>> ssla.sklearn.load("model").predict_interval(X)      # doctest: +SKIP
    """
    return load_trained(path, models)[0]


def load_trained(
    path: str | os.PathLike[str], models: Any = None
) -> tuple[Any, TrainingTable | None]:
    """Load an estimator, and what `ssla train` stored beside it; None if it was saved from Python.

    path, models and errors are those of `load`. Raises ValueError too, for models that the
    estimator does not need.
    """
    content, tensors = read_model(path, KIND)
    source = Path(path)
    _check_layout(content, source)
    if content.get("estimator") in WRAPPED:
        return open_wrapped(content, tensors, models, source), None
    if models is not None:
        raise ValueError(
            f"models= is for a PredictiveRegressor or PredictiveClassifier, but {source} holds its "
            "own networks."
        )

    with convert_to_file_error(source):
        estimator = _open_estimator(content, tensors, source)
        _check_estimator(estimator)
        training = content["training"]
        return estimator, None if training is None else TrainingTable.from_json(training)


def _check_layout(content: dict[str, Any], source: Path) -> None:
    """Raise FileError for a file whose content has the layout of another version of ssla.

    Files without a layout number have layout 1.

    content: that of the file.
    """
    layout = content.get("layout", 1)
    if layout != LAYOUT:
        version = "a newer" if type(layout) is int and layout > LAYOUT else "an earlier"
        raise FileError(
            f"{source} was written by {version} version of ssla, whose estimators this version "
            "does not read. Train the model again."
        )


# --- from content to an estimator ----------------------------------------------------------


def _open_estimator(content: dict[str, Any], tensors: dict[str, Tensor], source: Path) -> Any:
    """Return the fitted estimator of a file.

    Its parts are checked, but not yet whether they fit one another: see `_check_estimator`. Raises
    FileError for an unknown estimator, and ValueError for parts that are impossible.
    """
    decoder = Decoder(tensors)
    if content["estimator"] not in ESTIMATORS:
        raise FileError(
            f"{source} holds a {content['estimator']!r}, which this version of ssla does not "
            "support."
        )

    estimator = open_settings(ESTIMATORS[content["estimator"]], content, decoder)
    if content["classes"] is not None:
        _open_class_weights(estimator, content)
    estimator.plan_ = Plan.from_json(content["plan"])
    estimator.ensemble_ = _open_ensemble(content["ensemble"], decoder, tensors, source)
    estimator.n_iter_ = estimator.ensemble_.epochs
    if isinstance(estimator, SSLARegressor):
        estimator.conformal_ = _open_conformal(content["conformal"], decoder)
    return estimator


def _open_class_weights(estimator: Any, content: dict[str, Any]) -> None:
    """Set `class_weights_`, and replace the keys of `class_weight` by the labels of the classes.

    A file holds these keys as texts. Raises ValueError if `class_weights_` is not one finite number
    for each class.
    """
    weights = np.array(content["class_weights"], dtype=np.float64)
    if weights.shape != estimator.classes_.shape or not bool(
        ((weights >= 0) & (weights <= LARGEST)).all()
    ):
        raise ValueError("the weights of the classes do not fit the classes")

    estimator.class_weights_ = weights
    class_weight = getattr(estimator, "class_weight", None)
    if isinstance(class_weight, dict):
        labels = {str(label): label for label in estimator.classes_.tolist()}
        estimator.class_weight = {
            labels.get(name, name): weight for name, weight in class_weight.items()
        }


def _open_conformal(content: Any, decoder: Decoder) -> Conformal | None:
    """Return the conformal scores of a file; None if it has none.

    Their values are checked by `_check_conformal`.
    """
    if content is None:
        return None
    fields = decoder.decode(content, dict)
    return Conformal(fields["scores"].numpy(), fields["weights"].numpy(), fields["refit"])


def _open_ensemble(
    content: dict[str, Any], decoder: Decoder, tensors: dict[str, Tensor], source: Path
) -> Ensemble:
    """Return the ensemble of a file: its networks, posteriors and trees.

    Raises ValueError for parts that are impossible or do not fit one another.

    content: that of the ensemble.
    """
    settings = decoder.decode(content["settings"], dict)
    architecture = Architecture(**decoder.decode(content["architecture"], dict))

    # The sizes are checked before memory is allocated, because a forged file could choose them.
    _check_network_sizes(architecture, settings["members"], tensors)
    modules = [_open_network(architecture, m, tensors) for m in range(settings["members"])]
    inputs = open_scaling(content["scaling"]["inputs"], decoder)
    target = open_scaling(content["scaling"]["target"], decoder)
    if inputs is None:
        raise ValueError("the inputs have no scaling")
    components = _open_components(content["components"], modules, tensors, source)
    if (
        type(content["one_target"]) is not bool
        or type(content["epochs"]) is not int
        or content["epochs"] < 0
    ):
        raise ValueError("epochs must be a count, and one_target true or false")

    settings["schedule"] = Schedule(**settings["schedule"])
    spreads = tuple((float(factor), float(share)) for factor, share in content["spreads"])
    trust = float(content["trust"])
    _check_spreads(spreads, trust, target is not None)
    return Ensemble(
        Settings(**settings),
        architecture,
        tuple(modules),
        components,
        inputs,
        target,
        epochs=content["epochs"],
        one_target=content["one_target"],
        spreads=spreads,
        trust=trust,
        trees=_open_trees(content["trees"], decoder, tensors, architecture, source),
        scale=_open_scale(content["scale"], settings["likelihood"]),
        left_out=_open_left_out(content, len(modules)),
        constant=content["constant"],
    )


def _open_components(
    content: list[dict[str, Any]],
    modules: list[nn.Sequential],
    tensors: dict[str, Tensor],
    source: Path,
) -> tuple[Component, ...]:
    """Return the components of the mixture, each with its posterior on the module of its member.

    Raises ValueError or IndexError for a component of no member.

    content: a dictionary for each component.  modules: the networks of all members.
    """
    components = tuple(
        Component(
            decode_posterior(part["posterior"], tensors, modules[part["member"]], source),
            part["member"],
            float(part["weight"]),
        )
        for part in content
    )

    # A negative index would be that of a module, too.
    if any(component.member not in range(len(modules)) for component in components):
        raise ValueError("a component belongs to no member")
    return components


def _check_network_sizes(
    architecture: Architecture, members: int, tensors: dict[str, Tensor]
) -> None:
    """Raise ValueError if the tensors are not those of `members` networks of the architecture.

    The shapes of the first network are checked. Those of the others follow when their tensors are
    loaded.
    """
    pieces = architecture.pieces
    if pieces and (
        len(pieces) != architecture.inputs
        or any(type(count) is not int or count < 0 for count in pieces)
    ):
        raise ValueError("the pieces are not one whole number, 0 or more, for each input")

    _check_embeddings(architecture, tensors)

    # A layer of pieces and a layer of embeddings come first, if there are any. Then linear layers
    # and activations alternate.
    widths = architecture.widths
    first_linear = int(bool(pieces)) + int(bool(architecture.levels))
    shapes = [
        tuple(tensors[f"network.0.{first_linear + 2 * i}.weight"].shape)
        for i in range(len(widths) - 1)
    ]
    if shapes != [(following, width) for width, following in pairwise(widths)]:
        raise ValueError(f"the networks do not have the widths {widths}")
    networks = {name.split(".")[1] for name in tensors if name.startswith("network.")}
    if members != len(networks):
        raise ValueError(f"there are {len(networks)} networks for {members} members")


def _check_embeddings(architecture: Architecture, tensors: dict[str, Tensor]) -> None:
    """Raise ValueError for levels and dimensions that are impossible.

    They are also impossible if the embeddings of the first network have other sizes.
    """
    levels = architecture.levels
    dimensions = architecture.dimensions
    if any(type(count) is not int or count < 0 for count in (*levels, *dimensions)):
        raise ValueError("the levels of the inputs are not counts")
    if not levels and not dimensions:
        return

    # An embedding has L + 1 rows: one is for levels without a code. The lengths are compared next.
    sizes = [(count + 1, size) for count, size in zip(levels, dimensions, strict=False) if count]
    if (
        {len(levels), len(dimensions)} != {architecture.inputs}
        or not sizes
        or any((count > 0) != (size > 0) for count, size in zip(levels, dimensions, strict=True))
    ):
        raise ValueError(
            "the levels of the inputs are not one count for each, with the size of its embedding"
        )

    if any(count and pieces for count, pieces in zip(levels, architecture.pieces, strict=False)):
        raise ValueError("a code of levels has no pieces")

    # The layer of embeddings is the first one, or follows the layer of pieces.
    layer = int(bool(architecture.pieces))
    shapes = [tuple(tensors[f"network.0.{layer}.tables.{i}"].shape) for i in range(len(sizes))]
    if shapes != sizes:
        raise ValueError(f"the embeddings do not have the sizes {sizes}")


def _open_network(
    architecture: Architecture, member: int, tensors: dict[str, Tensor]
) -> nn.Sequential:
    """Return the network of a member, with its parameters, in double precision.

    Raises RuntimeError if its tensors are not those of the architecture.
    """
    module = architecture.build().double()
    prefix = f"network.{member}."
    module.load_state_dict(
        {
            name.removeprefix(prefix): value
            for name, value in tensors.items()
            if name.startswith(prefix)
        }
    )
    return module


def _check_spreads(spreads: tuple[tuple[float, float], ...], trust: float, has_unit: bool) -> None:
    """Raise ValueError for impossible spreads, which are pairs of a factor and its share.

    trust: the share of the posteriors beside the networks as trained.  has_unit: whether the target
    is continuous; others have the factor 1 only.
    """
    total = sum(share for _, share in spreads)
    if not (
        abs(total - 1) <= SUM_TOLERANCE
        and all(0 < factor <= LARGEST and share > 0 for factor, share in spreads)
        and 0 <= trust <= 1
    ):
        raise ValueError(
            "the spreads are not positive factors with shares of sum 1, or the trust is not a share"
        )

    if not has_unit and any(factor != 1 for factor, _ in spreads):
        raise ValueError("only the predictive of a continuous target is stretched")


def _open_left_out(content: dict[str, Any], networks: int) -> tuple[int, ...]:
    """Return the indices of the members without a share.

    networks: the number of networks in the file. Raises ValueError for indices that are not among
    the trained members, and for a flag `constant` that is not a boolean.  content: that of the
    ensemble.
    """
    left_out = tuple(content["left_out"])
    constant = content["constant"]

    # The networks of members that are left out are not in the file. If all members are left out,
    # the file has a constant for each of them.
    trained = networks if constant else networks + len(left_out)
    if type(constant) is not bool or any(
        type(member) is not int or member not in range(trained) for member in left_out
    ):
        raise ValueError("the members that are left out are not among those that were trained")

    return left_out


def _open_scale(content: dict[str, Any] | None, likelihood: str) -> Transform | None:
    """Return the scale of the target; None for a linear one.

    content: what `saving` wrote. It is None for a scale that follows from the likelihood, {} for a
    linear one that ends at zero, and the fields of a positive one. Raises ValueError for a scale
    that the likelihood does not have.
    """
    if content is None and likelihood != POSITIVE:
        return ON_SCALE.get(likelihood)
    if content == {} and likelihood == HETEROSCEDASTIC:
        return Censored()
    scale = Positive(**(content or {}))
    ends = (scale.low, scale.high)
    if (
        likelihood != POSITIVE
        or type(scale.closed) is not bool
        # The ends are logarithms, whose exponentials must be finite.
        or not all(type(end) is float and abs(end) < 700 for end in ends)
    ):
        raise ValueError("the scale of the target does not fit the likelihood")

    if not scale.low < scale.high:
        raise ValueError("the ends of the target's scale are not in order")
    return scale


def _open_trees(
    content: dict[str, Any] | None,
    decoder: Decoder,
    tensors: dict[str, Tensor],
    architecture: Architecture,
    source: Path,
) -> Trees | None:
    """Return the trees beside the networks; None if there are none.

    Raises ValueError for trees whose sizes do not fit the networks, and for an impossible share or
    pull.

    content: that of the trees.  architecture: that of the networks beside them.
    """
    if content is None:
        return None
    forest = Forest(**decoder.decode(content["forest"], dict))
    weights = decoder.decode(content["layer"], dict)
    module = make_linear(weights["weight"], weights["bias"])
    posterior = decode_posterior(content["posterior"], tensors, module, source)
    target = open_scaling(content["target"], decoder)
    layer = open_layer(posterior, decoder.decode(content["numbers"], dict), target)
    values = max(architecture.outputs, 2) if isinstance(layer, ClassLayer) else 1
    forest.check_tensors(architecture.inputs, values)
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


# --- checks of the whole -------------------------------------------------------------------


def _check_estimator(estimator: Any) -> None:
    """Raise ValueError if settings, sizes, classes, weights or scales do not fit one another."""
    ensemble: Ensemble = estimator.ensemble_
    likelihood = ensemble.settings.likelihood
    outputs = ensemble.architecture.outputs

    # This refuses unknown names and parameters out of range, for any number of rows.
    estimator._make_settings(likelihood, rows=1)
    is_classifier = isinstance(estimator, SSLAClassifier)
    requested = CLASSES if is_classifier else estimator.likelihood
    if likelihood not in LIKELIHOODS or requested not in (likelihood, AUTO):
        raise ValueError(f"the likelihood {likelihood!r} is not that of the estimator")
    classes: Any = getattr(estimator, "classes_", None)
    if (classes is not None) != is_classifier:
        raise ValueError("the classes do not fit the estimator")
    if is_classifier:
        check_class_count(classes, outputs)
    _check_columns(estimator)
    targets = outputs if likelihood == GAUSSIAN else 1
    _check_scalings(ensemble, targets)
    _check_components(ensemble, len(classes) if is_classifier else targets)
    conformal = getattr(estimator, "conformal_", None)
    if conformal is not None:
        _check_conformal(conformal, targets)


def _check_columns(estimator: Any) -> None:
    """Raise ValueError if column names, plan and networks do not fit one another."""
    plan: Plan = estimator.plan_
    architecture = estimator.ensemble_.architecture
    columns = estimator.n_features_in_
    column_names = getattr(estimator, "feature_names_in_", None)  # None: rows without names
    if column_names is not None and len(column_names) != columns:
        raise ValueError(f"there are {len(column_names)} names for {columns} columns")
    if plan.width != architecture.inputs:
        raise ValueError(
            f"the plan has {plan.width} inputs and the network has {architecture.inputs}"
        )

    # Without names there is one made up for each column, so a forged number must not be huge.
    if columns > len(plan.features) + len(plan.left_out):
        raise ValueError(f"there are {columns} columns, more than the plan has")
    names = set(list_column_names(estimator))
    inputs = {feature.name for feature in plan.features}

    # A column that the plan leaves out is among the names, unless the plan came with encoded rows.
    if not inputs <= names <= inputs | set(plan.left_out):
        raise ValueError("the plan is not that of the columns")
    if plan.level_counts != architecture.levels:
        raise ValueError("the codes of the plan are not those of the network")


def _check_scalings(ensemble: Ensemble, targets: int) -> None:
    """Raise ValueError if the scalings of inputs and targets do not fit the networks.

    targets: the number of targets. Codes of levels must not be standardised.
    """
    levels = ensemble.architecture.levels
    has_unit = ensemble.settings.likelihood in CONTINUOUS
    if (ensemble.target is not None) != has_unit or ensemble.one_target != (targets == 1):
        raise ValueError("the scaling of the target does not fit the likelihood")
    sizes = ((ensemble.inputs, ensemble.architecture.inputs), (ensemble.target, targets))
    for scaling, size in sizes:
        if scaling is not None:
            _check_numbers("the shift of a scaling", scaling.shift, (size,))
            _check_numbers("the scale of a scaling", scaling.scale, (size,), least=1 / LARGEST)

    coded = torch.tensor([count > 0 for count in levels], dtype=torch.bool)
    if levels and not bool(
        ((ensemble.inputs.shift[coded] == 0) & (ensemble.inputs.scale[coded] == 1)).all()
    ):
        raise ValueError("codes of levels are not standardised")


def _check_components(ensemble: Ensemble, size: int) -> None:
    """Raise ValueError for components with impossible weights, or with another likelihood.

    size: the number of classes or targets.
    """
    likelihood = ensemble.settings.likelihood
    components = ensemble.components
    known_likelihood, _ = LIKELIHOODS[likelihood](size)

    # None stands for a Gaussian with unknown noise.
    expected = Gaussian if known_likelihood is None else type(known_likelihood)
    weights = torch.tensor([component.weight for component in components], dtype=torch.float64)
    if (
        not components
        or not bool((weights > 0).all())
        or abs(float(weights.sum()) - 1) > SUM_TOLERANCE
    ):
        raise ValueError("the weights of the components are not positive with sum 1")
    if any(type(component.posterior.likelihood) is not expected for component in components):
        raise ValueError(f"a component has another likelihood than {likelihood!r}")


def _check_conformal(conformal: Conformal, targets: int) -> None:
    """Raise ValueError for impossible conformal scores or weights, both (n, targets).

    Both must be finite and not negative, and the scores sorted.
    """
    scores = torch.from_numpy(conformal.scores)
    weights = torch.from_numpy(conformal.weights)
    _check_numbers("the conformal scores", scores, (max(len(scores), 1), targets), least=0.0)
    if not bool((scores.diff(dim=0) >= 0).all()):
        raise ValueError("the conformal scores are not sorted")
    if weights.shape != scores.shape or not isinstance(conformal.refit, str):
        raise ValueError("the conformal weights do not fit the scores")
    _check_numbers("the conformal weights", weights, tuple(scores.shape), least=0.0)


def _check_numbers(
    subject: str, values: Tensor, shape: tuple[int, ...], least: float = -LARGEST
) -> None:
    """Raise ValueError unless the values have this shape, are float64, and in [least, LARGEST].

    subject: the values, for the error.
    """
    if (
        values.dtype != torch.float64
        or values.shape != shape
        or not bool(((values >= least) & (values <= LARGEST)).all())
    ):
        raise ValueError(
            f"{subject}: {shape} numbers in float64 between {least:g} and {LARGEST:g} were expected"
        )
