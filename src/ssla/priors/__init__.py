"""Priors of θ: log density, gradient, curvature.

The user writes a prior in numbers, layer names or tensors, and `bind` maps it to a layout once;
the bound prior works on flat θ. Any twice-differentiable log density fits the interface:
`precision` returns −∇² log π as a diagonal (P,) or a full matrix (P, P).

Words of this package:

    layout           which parameters are free, and their positions in θ (`ssla.network.layout`)
    flat θ           all P free parameters in one vector (P,), in the order of the layout
    named order      the same P numbers, parameter by parameter in the order of their names
    setting          what the user writes: a number, a tensor (P,) in the named order, or a dict
                     by layer or parameter name
    bound prior      a prior over the flat θ of one layout
"""

from ssla.priors.box import Box
from ssla.priors.composed import FromDistribution, NormalInverseGamma, Product, as_prior, custom
from ssla.priors.gaussian_prior import BoundGaussian, Flat, Gaussian, trained_scale
from ssla.priors.prior import (
    ADDITIVE,
    CONVENTIONS,
    EXACT,
    PAPER,
    BoundPrior,
    Prior,
    Setting,
    check_density_at,
    concavity_notes,
    describe,
    indefinite,
)
from ssla.priors.separable import Gamma, Horseshoe, Laplace, SpikeSlab, StudentT

__all__ = [
    "ADDITIVE",
    "CONVENTIONS",
    "EXACT",
    "PAPER",
    "BoundGaussian",
    "BoundPrior",
    "Box",
    "Flat",
    "FromDistribution",
    "Gamma",
    "Gaussian",
    "Horseshoe",
    "Laplace",
    "NormalInverseGamma",
    "Prior",
    "Product",
    "Setting",
    "SpikeSlab",
    "StudentT",
    "as_prior",
    "check_density_at",
    "concavity_notes",
    "custom",
    "describe",
    "indefinite",
    "trained_scale",
]
