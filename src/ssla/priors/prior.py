"""The Prior protocol, and how the user's settings become vectors over θ."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Protocol

import torch
from torch import Tensor

from ssla._checks import recorded, unknown_name
from ssla.network.layout import Layout

Setting = float | Tensor | Mapping[str, "float | Tensor"]
"""One number, a tensor (P,) in the order of the parameter names, or a dict by layer or
parameter name.
"""

EXACT, PAPER, ADDITIVE = "exact", "paper", "additive"
CONVENTIONS = (EXACT, PAPER, ADDITIVE)
"""Where the prior is used: in the refit and the curvature; in the refit only; in neither, only
as an increment.
"""


class BoundPrior(Protocol):
    """π over flat θ (P,)."""

    def log_prob(self, theta: Tensor) -> Tensor:
        """log π(θ), a scalar."""
        ...

    def gradient(self, theta: Tensor) -> Tensor:
        """∇ log π (P,)."""
        ...

    def precision(self, theta: Tensor) -> Tensor:
        """−∇² log π: (P,) if diagonal, else (P, P).

        Positive semi-definite only where log π is concave.
        """
        ...


class Prior(Protocol):
    """A prior as the user writes it."""

    def bind(self, layout: Layout) -> BoundPrior: ...


def values_of(setting: Setting) -> list[Tensor]:
    """Every number of a setting, for checks."""
    items = setting.values() if isinstance(setting, Mapping) else [setting]
    return [torch.as_tensor(item, dtype=torch.float64) for item in items]


def resolve(what: str, setting: Setting, layout: Layout) -> Tensor:
    """A setting -> (P,) in the order of θ."""
    if isinstance(setting, Mapping):
        return _resolve_names(what, setting, layout)
    value = recorded(torch.as_tensor(setting, dtype=torch.float64))
    if value.dim() == 0:
        return value.expand(layout.size).clone()
    if value.numel() != layout.size:
        raise ValueError(
            f"prior {what} must be one number, a tensor with one value for each of the "
            f"{layout.size} free parameters, or a dict by layer or parameter name, but has "
            f"{value.numel()} values."
        )
    return layout.from_named_order(value.flatten())


def _resolve_names(what: str, setting: Mapping[str, float | Tensor], layout: Layout) -> Tensor:
    theta = torch.full((layout.size,), math.nan, dtype=torch.float64)
    for key in sorted(
        setting, key=lambda name: name in layout.positions
    ):  # a parameter overrides its layer
        value = torch.as_tensor(setting[key], dtype=torch.float64)
        for name in names_of(key, layout):
            index = layout.positions[name]
            try:
                theta[index] = value.expand(index.shape)
            except RuntimeError:
                raise ValueError(
                    f"prior {what} for {name!r} must be a number or a tensor of shape "
                    f"{tuple(index.shape)}, but has shape {tuple(value.shape)}."
                ) from None
    missing = [name for name, index in layout.positions.items() if bool(theta[index].isnan().any())]
    if missing:
        raise ValueError(
            f"prior {what} has no value for {', '.join(missing)}. Add those names, or their "
            "layers, to the dict."
        )
    return theta


def names_of(key: str, layout: Layout) -> tuple[str, ...]:
    """The parameters of a layer, or the parameter of that name."""
    layers = layout.layers()
    if key in layout.positions:
        return (key,)
    if key not in layers:
        raise ValueError(
            unknown_name("layer or parameter in the prior", key, [*layers, *layout.names])
        )
    return layers[key]


def check_at(prior: Prior, bound: BoundPrior, theta: Tensor) -> None:
    """ValueError if the prior has no density at θ̂: its gradient is undefined there."""
    if not bool(torch.isfinite(bound.log_prob(theta))):
        raise ValueError(
            f"The prior {describe(prior)} has no density at the parameters (log π(θ) is "
            f"{float(bound.log_prob(theta)):g}). Use a prior whose support contains them, state "
            "the change of variable (priors.Gamma(…, link='log')), or apply it only to the "
            "parameters it is meant for (priors.Product)."
        )


def indefinite(precision: Tensor) -> int:
    """The number of negative eigenvalues of −∇² log π: directions in which log π is not concave."""
    values = precision if precision.dim() == 1 else torch.linalg.eigvalsh(precision)
    return int((values < -1e-12 * values.abs().max()).sum())


def concavity_notes(precision: Tensor) -> list[str]:
    """Notes for a report about −∇² log π at θ̂; none if it is positive semi-definite."""
    count = indefinite(precision)
    if not count:
        return []
    of = precision.shape[0]
    return [
        f"the prior is not log-concave in {count} of {of} directions at θ̂: −∇² log π is negative "
        "there and reduces the curvature of the data"
    ]


def describe(prior: object) -> str:
    """A prior on one line; long tensors are shown by their shape."""
    text = " ".join(repr(prior).split())
    if len(text) <= 160:
        return text
    return text[:150] + " …"
