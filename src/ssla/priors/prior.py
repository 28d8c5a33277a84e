"""The protocols of priors, and how the user's settings become vectors over θ."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Protocol

import torch
from torch import Tensor

from ssla._checks import copy_if_inference, unknown_name
from ssla.network.layout import Layout

Setting = float | Tensor | Mapping[str, "float | Tensor"]
"""One number, a tensor (P,) in the order of the parameter names, or a dict by layer or
parameter name.
"""

# `describe` cuts a longer text to CUT_LENGTH characters.
LONGEST_TEXT, CUT_LENGTH = 160, 150
# Eigenvalues above −ROUNDING times the largest one count as zero. A guess.
ROUNDING = 1e-12

EXACT, PAPER, ADDITIVE = "exact", "paper", "additive"
CONVENTIONS = (EXACT, PAPER, ADDITIVE)
"""Where the prior is used: in the refit and the curvature; in the refit only; in neither, only
as an increment.
"""


class BoundPrior(Protocol):
    """A prior π over flat θ (P,)."""

    def log_prob(self, theta: Tensor) -> Tensor:
        """Return log π(θ), a scalar."""

    def gradient(self, theta: Tensor) -> Tensor:
        """Return ∇ log π (P,) at θ (P,)."""

    def precision(self, theta: Tensor) -> Tensor:
        """Return −∇² log π at θ (P,): (P,) if it is diagonal, else (P, P).

        The result is positive semi-definite only where log π is concave.
        """


class Prior(Protocol):
    """A prior as the user writes it."""

    def bind(self, layout: Layout) -> BoundPrior:
        """Return the prior over flat θ with this layout; raise ValueError if it does not fit."""


def convert_setting_to_tensors(setting: Setting) -> list[Tensor]:
    """Return every value of a setting as a float64 tensor, for checks."""
    values = setting.values() if isinstance(setting, Mapping) else [setting]
    return [torch.as_tensor(value, dtype=torch.float64) for value in values]


def resolve_setting(setting_name: str, setting: Setting, layout: Layout) -> Tensor:
    """Return a setting as a vector (P,) in the order of θ, in float64.

    setting_name: its name in errors. Raises ValueError if its size or its names do not fit the
    layout.
    """
    if isinstance(setting, Mapping):
        return _resolve_setting_by_name(setting_name, setting, layout)
    value = copy_if_inference(torch.as_tensor(setting, dtype=torch.float64))
    if value.dim() == 0:
        return value.expand(layout.size).clone()
    if value.numel() != layout.size:
        raise ValueError(
            f"prior {setting_name} must be one number, a tensor with one value for each of the "
            f"{layout.size} free parameters, or a dict by layer or parameter name, but has "
            f"{value.numel()} values."
        )
    return layout.from_named_order(value.flatten())


def _resolve_setting_by_name(
    setting_name: str, setting: Mapping[str, float | Tensor], layout: Layout
) -> Tensor:
    """Return a dict by layer or parameter name as a vector (P,) in the order of θ.

    A parameter's own entry overrides that of its layer. Raises as `resolve_setting`, and for a
    parameter without a value.
    """
    theta = torch.full((layout.size,), math.nan, dtype=torch.float64)
    for key in sort_layers_first(setting, layout):
        value = torch.as_tensor(setting[key], dtype=torch.float64)
        for name in find_parameters_of_key(key, layout):
            index = layout.positions[name]
            try:
                theta[index] = value.expand(index.shape)
            except RuntimeError:
                raise ValueError(
                    f"prior {setting_name} for {name!r} must be a number or a tensor of shape "
                    f"{tuple(index.shape)}, but has shape {tuple(value.shape)}."
                ) from None
    missing = [name for name, index in layout.positions.items() if bool(theta[index].isnan().any())]
    if missing:
        raise ValueError(
            f"prior {setting_name} has no value for {', '.join(missing)}. Add those names, or "
            "their layers, to the dict."
        )
    return theta


def sort_layers_first(keys: Iterable[str], layout: Layout) -> list[str]:
    """Return the keys with the names of layers first, then the names of parameters.

    A caller that writes values in this order lets a parameter override its layer.
    """
    return sorted(keys, key=lambda name: name in layout.positions)


def find_parameters_of_key(key: str, layout: Layout) -> tuple[str, ...]:
    """Return the names of the parameters that a key stands for: one parameter, or those of a layer.

    Raises ValueError if the layout has no parameter and no layer of that name.
    """
    if key in layout.positions:
        return (key,)
    layers = layout.names_by_layer
    if key not in layers:
        raise ValueError(
            unknown_name("layer or parameter in the prior", key, [*layers, *layout.names])
        )
    return layers[key]


def check_density_at(prior: Prior, bound: BoundPrior, theta: Tensor) -> None:
    """Raise ValueError if log π is not finite at θ (P,): its gradient is then undefined there.

    prior: as the user wrote it, for the error. bound: the same prior over flat θ.
    """
    log_prob = bound.log_prob(theta)
    if not bool(torch.isfinite(log_prob)):
        raise ValueError(
            f"The prior {describe(prior)} has no density at the parameters (log π(θ) is "
            f"{float(log_prob):g}). Use a prior whose support contains them, state "
            "the change of variable (priors.Gamma(…, link='log')), or apply it only to the "
            "parameters it is meant for (priors.Product)."
        )


def indefinite(precision: Tensor) -> int:
    """Return the number of negative eigenvalues of −∇² log π, which is (P,) or (P, P).

    They count the directions in which log π is not concave. Eigenvalues that are zero up to
    rounding errors (ROUNDING) are not counted.
    """
    eigenvalues = precision if precision.dim() == 1 else torch.linalg.eigvalsh(precision)
    return int((eigenvalues < -ROUNDING * eigenvalues.abs().max()).sum())


def concavity_notes(precision: Tensor) -> list[str]:
    """Return notes for a report on −∇² log π at θ̂, which is (P,) or (P, P).

    There is no note if it is positive semi-definite.
    """
    count = indefinite(precision)
    if not count:
        return []
    return [
        f"the prior is not log-concave in {count} of {len(precision)} directions at θ̂: −∇² log π "
        "is negative there and reduces the curvature of the data"
    ]


def describe(prior: object) -> str:
    """Return a prior as one line of at most LONGEST_TEXT characters; a longer text is cut."""
    text = " ".join(repr(prior).split())
    if len(text) <= LONGEST_TEXT:
        return text
    return text[:CUT_LENGTH] + " …"
