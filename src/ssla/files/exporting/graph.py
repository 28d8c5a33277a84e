"""One module from x to the answers: the network, f̂ and K of the posterior, and the law of y.

f̂ and K are mean and covariance of the network's outputs f. There are N rows, C outputs, D targets
and k quantiles.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from ssla.curvature.diagonal import DiagonalOperator
from ssla.curvature.jacobians import Features
from ssla.curvature.kfac import KfacOperator
from ssla.data import Inputs
from ssla.files.exporting.count_nodes import CountLaw, make_count_law
from ssla.files.exporting.laws import (
    GaussianLaw,
    Levels,
    compute_binary_probabilities,
    compute_covariance_root,
    compute_softmax_probabilities,
    make_gaussian_law,
)
from ssla.network import LastLayer, LayerInputs
from ssla.priors import EXACT

if TYPE_CHECKING:
    from ssla.posterior import Posterior

NUMBERS, CLASSES = ("mean", "sd", "quantiles"), ("probabilities", "label")
MOST_CLASSES = 100  # whose covariance has its root unrolled; a guess


class Graph(nn.Module):
    """A module from x to mean, sd and quantiles, or to probabilities and label, in float64.

    The network computes in its own dtype.
    """

    def __init__(self, posterior: Posterior, example: Inputs, levels: Sequence[float]) -> None:
        """Collect the network and the constants of an exportable posterior of a last layer.

        example: rows x that the network takes. levels: the probabilities of the quantiles.
        """
        super().__init__()
        assert isinstance(posterior.network, LastLayer)
        self.features = LayerInputs(posterior.network, example)
        self.posterior = posterior
        q = torch.tensor(list(levels), dtype=torch.float64)
        self.levels = Levels(q, torch.special.ndtri(q))

    @property
    def names(self) -> tuple[str, ...]:
        """Return the names of the answers, in their order."""
        is_class = self.posterior.likelihood.logit_temperature is not None
        return CLASSES if is_class else NUMBERS

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        """Return the answers for x, given as its tensors with N rows each.

        For numbers they are mean and sd (N,) or (N, D), and quantiles (N, k) or (N, D, k). For
        classes they are probabilities (N, C), and the label (N,) of the most probable class.
        """
        f, J = self._linearise(self.features(*inputs).double())
        if self.names is CLASSES:
            p = self._compute_class_probabilities(f, J)
            return p, p.argmax(1)
        law = self._make_law_of_number(f, self.posterior.covariance.covariance(J))
        return law.mean, law.variance.sqrt(), law.icdf(self.levels)

    def _linearise(self, phi: Tensor) -> tuple[Tensor, Features]:
        """Return f̂ (N, C) and J of the last layer for its inputs phi (N, F), in float64.

        The formulas are those of `LastLayer.linearise`.
        """
        network = self.posterior.network
        assert isinstance(network, LastLayer)
        J = network.scale_features(Features(phi, network.outputs, network.fold_bias))
        f = J.push(self.posterior.mean)
        return f if network.offset is None else f + network.offset, J.double()

    def _compute_class_probabilities(self, f: Tensor, J: Features) -> Tensor:
        """Return the class probabilities for f̂ (N, C) and J: (N, C), or (N, 2) for one logit."""
        covariance = self.posterior.covariance
        temperature = self.posterior.likelihood.predictive.logit_temperature
        assert temperature is not None
        if temperature != 1:
            f = f / temperature
        if f.shape[1] <= 2:
            return compute_binary_probabilities(f, covariance.covariance(J) / temperature**2)
        return compute_softmax_probabilities(
            f, compute_covariance_root(covariance, J).scale_by(1 / temperature)
        )

    def _make_law_of_number(self, f: Tensor, K: Tensor) -> GaussianLaw | CountLaw:
        """Return the law of numbers under Gaussian noise, or of counts.

        f: f̂ (N, C). K (N, C, C).
        """
        likelihood = self.posterior.likelihood.predictive
        if likelihood.quadratic:
            return make_gaussian_law(f, K, likelihood.covariance_for(f))
        return make_count_law(likelihood, f, K)


def check_exportable(posterior: Posterior) -> None:
    """Raise ValueError, with the reason, for a posterior whose predictive has no static graph."""
    network = posterior.network
    likelihood = posterior.likelihood.predictive
    if not isinstance(network, LastLayer):
        names = network.layout.names
        shown = ", ".join(names[:3]) + (", …" if len(names) > 3 else "")
        raise ValueError(
            "export writes posteriors of a last layer, but the free parameters of this one are "
            f"{shown}: its covariance needs the derivatives of the whole network. Fit with "
            "weights='last_layer'."
        )

    if posterior.convention != EXACT:
        raise ValueError(
            "export works with the exact convention only, but this posterior has "
            f"convention={posterior.convention!r}. Use posterior.with_prior(posterior.prior)."
        )

    if not likelihood.linear_domain:
        raise ValueError(
            f"{likelihood!r} does not allow every output, and its refit has no fixed number of "
            "steps. Use the default: Poisson(link='log') or "
            "HeteroscedasticGaussian(parameters='mean_log_variance')."
        )

    is_count = likelihood.overdispersion is not None
    is_class = likelihood.logit_temperature is not None
    if not (likelihood.quadratic or is_class or is_count):
        raise ValueError(
            "export writes Gaussian noise, classes and counts, but not "
            f"{type(likelihood).__name__}: its predictive is found by an adaptive search, which a "
            "static graph cannot hold. Export the network alone (torch.onnx.export), or serve "
            "posterior.predict."
        )

    has_root = isinstance(posterior.covariance, KfacOperator | DiagonalOperator)
    if likelihood.softmax and not has_root and network.outputs > MOST_CLASSES:
        raise ValueError(
            f"The probabilities of {network.outputs} classes need the root of a "
            f"{network.outputs}×{network.outputs} covariance, which the graph would compute in as "
            f"many steps; up to {MOST_CLASSES} are written. Fit with structure='kfac' or 'diag', "
            "whose roots need no steps."
        )
