"""Opens the parts that the files of all estimators have.

What a file holds is validated before it is used: the functions raise ValueError for content that
this library did not write.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from torch import Tensor

from ssla.files import Decoder
from ssla.files.load_posterior import LARGEST
from ssla.likelihoods import Bernoulli, Categorical, HeteroscedasticGaussian
from ssla.posterior import Posterior
from ssla.tables.networks.component import Component
from ssla.tables.networks.scaling import Scaling
from ssla.tables.trees.out_of_fold import OFFSETS, ClassLayer, NumberLayer

SUM_TOLERANCE = 1e-6  # of shares and weights that sum to 1, up to rounding
# The types of class labels, by the names that `saving` writes.
DTYPES: dict[str, type] = {
    "bool": bool,
    "int": int,
    "float": float,
    "str": str,
    "object": object,
}


def open_settings(estimator_class: type[Any], content: Mapping[str, Any], decoder: Decoder) -> Any:
    """Return an estimator of this class with the parameters, columns and classes of a file.

    The estimator has no models yet. Raises KeyError, TypeError or ValueError for content of another
    form.

    estimator_class: one with the constructor arguments that are stored.  decoder: gives the tensors
    of the file.
    """
    estimator = estimator_class(**decoder.decode(content["parameters"], dict))
    estimator.n_features_in_ = content["columns"]
    if content["names"]:
        names = [str(name) for name in content["names"]]
        estimator.feature_names_in_ = np.array(names, dtype=object)
    classes = content["classes"]
    if classes is not None:
        estimator.classes_ = np.array(classes["values"], dtype=DTYPES[classes["dtype"]])
    return estimator


def open_scaling(content: Any, decoder: Decoder) -> Scaling | None:
    """Return the scaling that a file holds as two tensors, shift and scale (d,).

    The result is None if the content is None. The values are not checked yet.
    """
    if content is None:
        return None
    tensors = [decoder.decode(part, Tensor).double() for part in content]
    return Scaling(*tensors)


def open_layer(
    posterior: Posterior,
    numbers: Mapping[str, Any],
    target: Scaling | None,
    inputs: Scaling | None = None,
) -> ClassLayer | NumberLayer:
    """Return the last layer on the predictions of trees or other models, by its posterior.

    numbers: "floor" for a layer of classes, "shares" and "centre" for a layer of numbers.  target:
    the scaling of the target, which a layer of numbers needs.  inputs: that of the columns; None:
    the file has none. Raises ValueError if sizes, scales, shares or likelihood are not those of
    such a layer.
    """
    components = (Component(posterior, member=0, weight=1.0),)
    outputs, width = posterior.parameters["weight"].shape
    if "floor" in numbers:
        floor = float(numbers["floor"])
        expected = Bernoulli if outputs == 1 else Categorical
        if type(posterior.likelihood) is not expected or width != outputs or not 0 < floor < 0.5:
            raise ValueError("the layer is not one of classes")
        return ClassLayer(components, floor, inputs)

    if target is None:
        raise ValueError("the target has no scaling")
    check_scaling(target, 1)
    shares = numbers["shares"]
    centre = float(numbers["centre"])

    # Two outputs, mean and log variance, are linear in three features: see `out_of_fold`.
    if type(posterior.likelihood) is not HeteroscedasticGaussian or (outputs, width) != (2, 3):
        raise ValueError("the layer is not one of mean and log variance")
    if (
        shares.shape != (len(OFFSETS),)
        or not bool((shares >= 0).all())
        or abs(float(shares.sum()) - 1) > SUM_TOLERANCE
    ):
        raise ValueError("the shares are not positive with sum 1")

    if not abs(centre) <= LARGEST:
        raise ValueError("the centre is not a number")
    return NumberLayer(components, target, centre, shares, inputs)


def check_scaling(scaling: Scaling, size: int) -> None:
    """Raise ValueError unless a scaling has `size` columns, and finite positive scales."""
    is_valid = (
        scaling.shift.shape == scaling.scale.shape == (size,)
        and bool((scaling.shift.abs() <= LARGEST).all())
        and bool(((scaling.scale > 0) & (scaling.scale <= LARGEST)).all())
    )
    if not is_valid:
        raise ValueError("a scaling does not fit its columns")


def check_class_count(classes: Any, outputs: int) -> None:
    """Raise ValueError if the classes (C,) do not fit the outputs of a layer, or one occurs twice.

    A layer has one output for two classes, and otherwise one for each class.
    """
    if len(classes) != max(outputs, 2) or len(set(classes.tolist())) != len(classes):
        raise ValueError(
            f"{len(classes)} classes do not fit {outputs} outputs, or one occurs twice"
        )
