"""Last layers on the predictions of trees, from files.

What a file holds is validated before it is used.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ssla.files.load_posterior import LARGEST
from ssla.likelihoods import Bernoulli, Categorical, HeteroscedasticGaussian
from ssla.posterior import Posterior
from ssla.tables.networks.component import Component
from ssla.tables.networks.scaling import Scaling
from ssla.tables.trees.out_of_fold import OFFSETS, ClassLayer, NumberLayer


def open_layer(
    posterior: Posterior,
    numbers: Mapping[str, Any],
    target: Scaling | None,
    inputs: Scaling | None = None,
) -> ClassLayer | NumberLayer:
    """ValueError for a forged file: sizes, scales, shares, likelihood."""
    components = (Component(posterior, 0, 1.0),)
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
    shares, centre = numbers["shares"], float(numbers["centre"])
    if type(posterior.likelihood) is not HeteroscedasticGaussian or (outputs, width) != (2, 3):
        raise ValueError("the layer is not one of mean and log variance")
    if (
        shares.shape != (len(OFFSETS),)
        or not bool((shares >= 0).all())
        or abs(float(shares.sum()) - 1) > 1e-6
    ):
        raise ValueError("the shares are not positive with sum 1")
    if not abs(centre) <= LARGEST:
        raise ValueError("the centre is not a number")
    return NumberLayer(components, target, centre, shares, inputs)


def check_scaling(scaling: Scaling, size: int) -> None:
    sound = (
        scaling.shift.shape == scaling.scale.shape == (size,)
        and bool((scaling.shift.abs() <= LARGEST).all())
        and bool(((scaling.scale > 0) & (scaling.scale <= LARGEST)).all())
    )
    if not sound:
        raise ValueError("a scaling does not fit its columns")
