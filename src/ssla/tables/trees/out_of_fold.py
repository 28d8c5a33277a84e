"""A Bayesian last layer on the out-of-fold predictions of any model: trees, boosters, …

Numbers. m is the out-of-fold prediction, v an out-of-fold prediction of log (y − m)², and the
network is linear,

    μ = a + b m + c v,   log σ² = d + e m + g v + o,    y ~ N(μ, σ²)

in units of the out-of-fold error. The prior is centred on the least-squares line for μ, tightly, so
that noisy rows count in the mean as well, and on log σ² = v, loosely. o is zero in the fit, and its
weight is one. Predictions take several values of o: a scale mixture of Gaussians, whose shares are
the stacking weights of the out-of-fold densities. It has the heavy tails or the sharp peak that the
errors have.

Classes. The features are the logarithms of the out-of-fold probabilities, and the layer starts at
the identity with the prior centred there: a temperature for each class, with its uncertainty.

The rows were not seen by the models whose predictions are their features, so the posterior is
honest about them.
"""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ssla.likelihoods import Bernoulli, Categorical, HeteroscedasticGaussian
from ssla.network.unset import unset_linear
from ssla.posterior import Posterior
from ssla.predictive import Predictive, affine, mixture
from ssla.predictive.normals import averaged
from ssla.priors import Gaussian
from ssla.refit import Refit
from ssla.tables.networks.component import Component
from ssla.tables.networks.last_layer_fits import fit_last_layer
from ssla.tables.networks.scaling import Scaling, units_of
from ssla.tables.networks.stacking import shares
from ssla.values import Marginal

OFFSETS = (-3.0, -1.5, 0.0, 1.5, 3.0)  # o, of the log variance
ONE_ROW = torch.full(
    (len(OFFSETS),), 1 / len(OFFSETS), dtype=torch.float64
)  # one more row, spread over all offsets
LEAST_SHARE = 1e-4  # smaller shares of the mixture are left out
LEAST_ERROR = 1e-6  # of the target's spread
FLOOR = 1e-2  # added to squares in units of their mean, before their logarithm
# prior precisions, in units of the out-of-fold error; chosen with seeds 0 to 2 (docs/tables.md)
LINE, ACROSS, LEVEL, SLOPE, KNOWN, OFFSET = 1e3, 1e4, 10.0, 1.0, 1e12, 0.1
SHRINKAGE = (10.0, 100.0)  # of the least-squares line towards 0 + 1·m, as rows
OWN, OTHERS = (
    1.0,
    100.0,
)  # of classes: a class's own log probability and bias; those of others, more beyond ten classes
HIGHEST_FLOOR = 0.01  # of probabilities
MANY_CLASSES = 16  # more have a diagonal curvature


@dataclass(frozen=True, eq=False)
class NumberLayer:
    """The layer of mean and log variance, in the target's unit. Made by `fit_numbers`."""

    components: tuple[Component, ...]  # one
    target: Scaling  # mean of y, out-of-fold error
    centre: float  # of v
    shares: Tensor  # of OFFSETS
    inputs: Scaling | None = (
        None  # of the columns that the models take, for reports; None: not all are numbers
    )

    @property
    def posterior(self) -> Posterior:
        return self.components[0].posterior

    def features(self, m: Tensor, v: Tensor, offset: float = 0.0) -> Tensor:
        """Inputs of the layer (N, 3)."""
        return torch.stack([self.target(m), v - self.centre, torch.full_like(m, offset)], 1)

    def averaged(self, m: Tensor, v: Tensor) -> Predictive:
        """The average over the posterior in closed form; `predict` has a refit in its place."""
        kept = (self.shares > LEAST_SHARE).nonzero().flatten().tolist()
        shift, scale = self.target.shift[0], self.target.scale[0]
        unit, one = torch.stack([scale, torch.ones_like(scale)]), torch.ones(1, dtype=torch.float64)
        marginals = []
        for k in kept:
            f, K = self.posterior.outputs_at(self.features(m, v, OFFSETS[k]))
            own = torch.stack([shift + scale * f[:, 0], f[:, 1] + 2 * scale.log()], 1)
            marginals.append(Marginal(own, unit[:, None] * K * unit))
        return averaged(marginals, self.shares[kept] / self.shares[kept].sum(), one, one, m)

    def predict(self, m: Tensor, v: Tensor, refit: str | Refit = "output") -> Predictive:
        """The predictive of y where the models predict m (N,) and v (N,)."""
        parts, shares = [], []
        for offset, share in zip(OFFSETS, self.shares.tolist(), strict=True):
            if share > LEAST_SHARE:
                parts.append(self.posterior.predict(self.features(m, v, offset), refit))
                shares.append(share)
        whole = parts[0] if len(parts) == 1 else mixture(parts, shares)
        return affine(whole, self.target.shift[0], self.target.scale[0])


@dataclass(frozen=True, eq=False)
class ClassLayer:
    """The layer of class logits. Made by `fit_classes`."""

    components: tuple[Component, ...]  # one
    floor: float  # of probabilities
    inputs: Scaling | None = None

    @property
    def posterior(self) -> Posterior:
        return self.components[0].posterior

    def features(self, p: Tensor) -> Tensor:
        """Inputs of the layer (N, C), or (N, 1) for two classes."""
        return log_features(p, self.floor)

    def predict(self, p: Tensor, refit: str | Refit = "output") -> Predictive:
        """The predictive of the class where the models give probabilities p (N, C)."""
        return self.posterior.predict(self.features(p), refit)


def log_squares(errors: Tensor, weights: Tensor) -> Tensor:
    """log (r²/mean r² + 0.01) (n,): what the noise model is grown on.

    The second term bounds the logarithm of small errors.
    """
    squares = (errors / units_of(errors[:, None])) ** 2  # which neither overflow nor vanish
    mean = weights @ squares / weights.sum()
    return (squares / mean.clamp_min(torch.finfo(mean.dtype).tiny) + FLOOR).log()


def log_features(p: Tensor, floor: float) -> Tensor:
    """log p, centred over classes (N, C); for two classes the logit (N, 1).

    Probabilities below the floor are raised to it.
    """
    logs = p.clamp_min(floor).log()
    return (
        (logs[:, 1] - logs[:, 0])[:, None] if p.shape[1] == 2 else logs - logs.mean(1, keepdim=True)
    )


def fit_numbers(
    m: Tensor, v: Tensor, y: Tensor, weights: Tensor, strength: float = 1.0
) -> NumberLayer:
    """From out-of-fold predictions m and v (n,), targets y (n,) and row weights (n,).

    strength: a factor on the prior.
    """
    total, unit = weights.sum(), units_of(y[:, None])
    part, predicted = y / unit, m / unit  # whose squares neither overflow nor vanish
    shift = weights @ part / total
    spread = (weights @ (part - shift) ** 2 / total).sqrt()
    error = (weights @ (part - predicted) ** 2 / total).sqrt().clamp_min(LEAST_ERROR * spread)
    target, centre = Scaling(unit * shift, unit * error), float(weights @ v / total)
    z = target(y)
    bare = NumberLayer((), target, centre, torch.ones(0, dtype=torch.float32))
    x = bare.features(m, v)
    a, b = _line(x[:, 0], z, weights)
    start = torch.tensor([[b, 0, 0], [0, 1, 1]], dtype=torch.float64)
    bias = torch.tensor([a, 0], dtype=torch.float64)
    precision = {
        "weight": strength
        * torch.tensor([[LINE, ACROSS, KNOWN], [LEVEL, SLOPE, KNOWN]], dtype=torch.float64),
        "bias": strength * torch.tensor([LINE, OFFSET], dtype=torch.float64),
    }
    posterior = _fitted(start, bias, (x, z, weights), HeteroscedasticGaussian(), precision)
    f, K = posterior.marginal(x)
    logs = f[:, 1:] + torch.tensor(OFFSETS, dtype=torch.float64)
    variance = logs.exp() + K[:, :1, 0]
    densities = -0.5 * (
        variance.log() + (z[:, None] - f[:, :1]) ** 2 / variance + math.log(2 * math.pi)
    )
    return NumberLayer(
        (Component(posterior, 0, 1.0),), target, centre, shares(densities, weights, ONE_ROW)
    )


def fit_classes(p: Tensor, y: Tensor, weights: Tensor, strength: float = 1.0) -> ClassLayer:
    """From out-of-fold probabilities p (n, C), classes y (n,) and row weights (n,)."""
    floor = min(0.5 / float(weights.sum()), HIGHEST_FLOOR)
    x = log_features(p, floor)
    size = x.shape[1]
    identity, others = torch.eye(size, dtype=torch.float64), OTHERS * max(1.0, (size / 10) ** 2)
    precision = {
        "weight": strength * (others + (OWN - others) * identity),
        "bias": torch.full((size,), strength * OWN, dtype=torch.float64),
    }
    likelihood = Bernoulli() if size == 1 else Categorical()
    structure = "diag" if size > MANY_CLASSES else "dense"
    posterior = _fitted(
        identity,
        torch.zeros(size, dtype=torch.float64),
        (x, y, weights),
        likelihood,
        precision,
        structure,
    )
    return ClassLayer((Component(posterior, 0, 1.0),), floor)


def linear(weight: Tensor, bias: Tensor) -> nn.Linear:
    """The network: x ↦ weight·x + bias, in float64."""
    module = unset_linear(weight.shape[1], weight.shape[0], torch.float64)
    with torch.no_grad():
        module.weight.copy_(weight)
        module.bias.copy_(bias)
    return module.eval()


def _fitted(
    weight: Tensor,
    bias: Tensor,
    data: Any,
    likelihood: Any,
    precision: Any,
    structure: str = "dense",
) -> Posterior:
    """The prior is centred on the start."""
    prior = Gaussian(precision, {"weight": weight, "bias": bias})
    with warnings.catch_warnings():  # the start is the prior's mean, which the fit may leave
        warnings.filterwarnings("ignore", "polish moved", UserWarning)
        warnings.filterwarnings("ignore", "The network is not at the mode", UserWarning)
        return fit_last_layer(linear(weight, bias), data, likelihood, prior, structure=structure)


def _line(m: Tensor, z: Tensor, weights: Tensor) -> tuple[float, float]:
    """Least squares of z on a + b m, shrunk towards a = 0, b = 1."""
    A = torch.stack([torch.ones_like(m), m], 1)
    towards = torch.diag(torch.tensor(SHRINKAGE, dtype=torch.float64))
    wanted = torch.tensor([0, 1], dtype=torch.float64)
    a, b = torch.linalg.solve(
        A.mT @ (weights[:, None] * A) + towards, A.mT @ (weights * z) + towards @ wanted
    ).tolist()
    return a, b
