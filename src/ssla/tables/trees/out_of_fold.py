"""A Bayesian last layer on the out-of-fold predictions of any model: trees, boosters, …

Numbers. m is the out-of-fold prediction, v an out-of-fold prediction of log (y − m)², and the
network is linear,

    μ = a + b m + c v,   log σ² = d + e m + g v + o,    y ~ N(μ, σ²)

in units of the out-of-fold error. The weights a, b, c, d, e and g have a Gaussian prior. For μ the
centre is the least-squares line, with a high precision, so that noisy rows count in the mean as
well. For log σ² the centre is v, with a low precision. The offset o is zero in the fit, and its
weight is one. Predictions take several values of o: a scale mixture of Gaussians, whose shares are
the stacking weights of the out-of-fold densities. It has the heavy tails or the sharp peak that the
errors have.

Classes. The features are the logarithms of the out-of-fold probabilities. The layer starts at the
identity, which is also the centre of its prior. It corrects the confidence by a factor for each
class (a temperature), with its uncertainty.

The models had not seen the rows whose features they predict. So the errors that the layer learns
are those at new rows.

Words: the *out-of-fold* prediction of a row is by a model that was fitted without the fold of this
row. The *features* are the inputs of the layer. The *offset* is o. The *floor* is the smallest
probability whose logarithm is taken. In the code f (n, 2) are the outputs μ and log σ² of the layer
at n rows, and K (n, 2, 2) is their covariance under its posterior.
"""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ssla.likelihoods import Bernoulli, Categorical, HeteroscedasticGaussian
from ssla.network.unset import make_unset_linear
from ssla.posterior import Posterior
from ssla.predictive import Predictive, affine, mixture
from ssla.predictive.normals import average_normals
from ssla.priors import Gaussian
from ssla.refit import Refit
from ssla.tables.networks.component import Component
from ssla.tables.networks.last_layer_fits import fit_last_layer
from ssla.tables.networks.scaling import Scaling, find_column_units
from ssla.tables.networks.stacking import fit_model_shares
from ssla.values import Marginal

OFFSETS = (-3.0, -1.5, 0.0, 1.5, 3.0)  # o, of the log variance; a guess
# The pseudo row of `fit_model_shares`: one more row, spread over all offsets.
ONE_ROW = torch.full((len(OFFSETS),), 1 / len(OFFSETS), dtype=torch.float64)
LEAST_SHARE = 1e-4  # smaller shares of the mixture are left out; a guess
LEAST_ERROR = 1e-6  # of the target's spread; a guess
FLOOR = 1e-2  # added to squares in units of their mean, before their logarithm; a guess
# Prior precisions, in units of the out-of-fold error, chosen with seeds 0 to 2 (docs/tables.md).
LINE = 1e3  # of a and b
ACROSS = 1e4  # of c: the mean hardly depends on v
LEVEL = 10.0  # of e
SLOPE = 1.0  # of g
OFFSET = 0.1  # of d
KNOWN = 1e12  # of the weights of o, which are known: 0 for μ and 1 for log σ²
SHRINKAGE = (10.0, 100.0)  # of the least-squares line towards 0 + 1·m, as rows
# Prior precisions for classes: of the weight of a class's own log probability and of its bias, and
# of the weights of the log probabilities of others, for up to MANY_FEATURES features.
OWN_PRECISION, OTHER_PRECISION = 1.0, 100.0
MANY_FEATURES = 10  # a guess
HIGHEST_FLOOR = 0.01  # of probabilities; a guess
MANY_CLASSES = 16  # more have a diagonal curvature; a guess


@dataclass(frozen=True, eq=False)
class NumberLayer:
    """The layer of mean and log variance, in the target's unit. `fit_number_layer` makes it."""

    components: tuple[Component, ...]  # one
    target: Scaling  # its shift (1,) is the mean of y, its scale (1,) the out-of-fold error
    centre: float  # the mean of v
    shares: Tensor  # of the mixture, one for each of OFFSETS
    # that of the columns that the models take, for reports; None: not all columns are numbers
    inputs: Scaling | None = None

    @property
    def posterior(self) -> Posterior:
        """The posterior of the layer, in units of the out-of-fold error."""
        return self.components[0].posterior

    def compute_features(self, m: Tensor, v: Tensor, offset: float = 0.0) -> Tensor:
        """Return the inputs of the layer (N, 3): standardised m, centred v, and the offset o.

        m (N,), v (N,): as the models predict them, m in the unit of y.  offset: o.
        """
        return torch.stack([self.target(m), v - self.centre, torch.full_like(m, offset)], 1)

    def average_predictive(self, m: Tensor, v: Tensor) -> Predictive:
        """Return the predictive of y averaged over the posterior, without the refit of `predict`.

        The average is that of `average_normals`, over all offsets whose share is above LEAST_SHARE.
        m (N,), v (N,): as the models predict them.
        """
        kept = (self.shares > LEAST_SHARE).nonzero().flatten().tolist()
        shift, scale = self.target.shift[0], self.target.scale[0]
        unit = torch.stack([scale, torch.ones_like(scale)])
        marginals = []
        for k in kept:
            f, K = self.posterior.outputs_at(self.compute_features(m, v, OFFSETS[k]))
            # Mean and log variance (N, 2) in the unit of y, and their covariance (N, 2, 2).
            outputs = torch.stack([shift + scale * f[:, 0], f[:, 1] + 2 * scale.log()], 1)
            marginals.append(Marginal(outputs, unit[:, None] * K * unit))

        # `average_normals` can stretch the marginals by factors: here by 1, with the share 1.
        no_factor = torch.ones(1, dtype=torch.float64)
        shares = self.shares[kept] / self.shares[kept].sum()
        return average_normals(marginals, shares, no_factor, no_factor, m)

    def predict(self, m: Tensor, v: Tensor, refit: str | Refit = "output") -> Predictive:
        """Return the predictive of y where the models predict m (N,) and v (N,), with a refit.

        The predictive is the mixture over all offsets whose share is above LEAST_SHARE.
        """
        predictives = []
        shares = []
        for offset, share in zip(OFFSETS, self.shares.tolist(), strict=True):
            if share > LEAST_SHARE:
                features = self.compute_features(m, v, offset)
                predictives.append(self.posterior.predict(features, refit))
                shares.append(share)
        combined = predictives[0] if len(predictives) == 1 else mixture(predictives, shares)
        return affine(combined, self.target.shift[0], self.target.scale[0])


@dataclass(frozen=True, eq=False)
class ClassLayer:
    """The layer of class logits. `fit_class_layer` makes it."""

    components: tuple[Component, ...]  # one
    floor: float  # of probabilities
    inputs: Scaling | None = None  # as that of `NumberLayer`

    @property
    def posterior(self) -> Posterior:
        """The posterior of the layer."""
        return self.components[0].posterior

    def compute_features(self, p: Tensor) -> Tensor:
        """Return the inputs of the layer (N, C), or (N, 1) for two classes.

        p (N, C): the probabilities of the models.
        """
        return compute_log_features(p, self.floor)

    def predict(self, p: Tensor, refit: str | Refit = "output") -> Predictive:
        """Return the predictive of the class where the models predict p (N, C), with a refit."""
        return self.posterior.predict(self.compute_features(p), refit)


def compute_log_squares(errors: Tensor, weights: Tensor) -> Tensor:
    """Return log (r²/mean r² + FLOOR) (n,), the target of the model that predicts v.

    FLOOR bounds the logarithm of small errors.

    errors (n,): r, the out-of-fold errors y − m.  weights (n,): row weights of the mean.
    """
    # In units in which squares neither overflow nor vanish.
    squares = (errors / find_column_units(errors[:, None])) ** 2
    mean = weights @ squares / weights.sum()
    # `tiny` keeps 0/0 from being NaN, where all errors are zero.
    return (squares / mean.clamp_min(torch.finfo(mean.dtype).tiny) + FLOOR).log()


def compute_log_features(p: Tensor, floor: float) -> Tensor:
    """Return log p less its mean over classes, (N, C); for two classes the logit (N, 1).

    p (N, C): probabilities, of which those below the floor are raised to it.
    """
    logs = p.clamp_min(floor).log()
    if p.shape[1] == 2:
        return (logs[:, 1] - logs[:, 0])[:, None]
    return logs - logs.mean(1, keepdim=True)


def fit_number_layer(
    m: Tensor, v: Tensor, y: Tensor, weights: Tensor, strength: float = 1.0
) -> NumberLayer:
    """Fit the layer of numbers, and return it with the shares of its mixture.

    m (n,), v (n,): the out-of-fold predictions.  y (n,): the targets.  weights (n,): row weights.
    strength: a factor on the precisions of the prior.
    """
    target = _fit_error_scaling(m, y, weights)
    centre = float(weights @ v / weights.sum())
    z = target(y)

    # The features of a layer depend on its scaling only, so this layer has no posterior.
    unfitted = NumberLayer((), target, centre, torch.ones(0, dtype=torch.float32))
    x = unfitted.compute_features(m, v)
    a, b = _fit_shrunken_line(x[:, 0], z, weights)

    # The rows are the outputs μ and log σ², the columns the features m, v and o.
    start = torch.tensor([[b, 0, 0], [0, 1, 1]], dtype=torch.float64)
    bias = torch.tensor([a, 0], dtype=torch.float64)
    weight_precision = [[LINE, ACROSS, KNOWN], [LEVEL, SLOPE, KNOWN]]
    precision = {
        "weight": strength * torch.tensor(weight_precision, dtype=torch.float64),
        "bias": strength * torch.tensor([LINE, OFFSET], dtype=torch.float64),
    }

    posterior = _fit_layer(start, bias, (x, z, weights), HeteroscedasticGaussian(), precision)
    mixture_shares = fit_model_shares(
        _compute_densities_by_offset(posterior, x, z), weights, ONE_ROW
    )
    return NumberLayer((Component(posterior, 0, 1.0),), target, centre, mixture_shares)


def _fit_error_scaling(m: Tensor, y: Tensor, weights: Tensor) -> Scaling:
    """Return the scaling of the target by the mean of y and the out-of-fold error, both (1,).

    The error is the weighted root mean square of y − m, but at least LEAST_ERROR of the standard
    deviation of y.  m (n,), y (n,), weights (n,): as in `fit_number_layer`.
    """
    total = weights.sum()
    # In these units squares neither overflow nor vanish.
    unit = find_column_units(y[:, None])
    y_scaled = y / unit
    m_scaled = m / unit
    shift = weights @ y_scaled / total
    spread = (weights @ (y_scaled - shift) ** 2 / total).sqrt()
    error = (weights @ (y_scaled - m_scaled) ** 2 / total).sqrt().clamp_min(LEAST_ERROR * spread)
    return Scaling(unit * shift, unit * error)


def _compute_densities_by_offset(posterior: Posterior, x: Tensor, z: Tensor) -> Tensor:
    """Return the log densities (n, offsets) of standardised targets z (n,) under each offset.

    The uncertainty of the mean is added to the variance; that of the log variance is left out.
    x (n, 3): the inputs of the layer with the offset 0, whose weight is one in the posterior.
    """
    f, K = posterior.marginal(x)  # (n, 2), (n, 2, 2)
    log_variances = f[:, 1:] + torch.tensor(OFFSETS, dtype=torch.float64)
    variance = log_variances.exp() + K[:, :1, 0]
    squares = (z[:, None] - f[:, :1]) ** 2 / variance
    return -0.5 * (variance.log() + squares + math.log(2 * math.pi))


def fit_class_layer(p: Tensor, y: Tensor, weights: Tensor, strength: float = 1.0) -> ClassLayer:
    """Fit the layer of classes, and return it.

    p (n, C): the out-of-fold probabilities.  y (n,): the codes of the classes.  weights (n,): row
    weights.  strength: a factor on the precisions of the prior.
    """
    # The probability of half a row; a higher floor would change the predictions of the models.
    floor = min(0.5 / float(weights.sum()), HIGHEST_FLOOR)
    x = compute_log_features(p, floor)
    size = x.shape[1]
    identity = torch.eye(size, dtype=torch.float64)

    # With more classes there are more weights to other classes, so their precision is higher.
    other_precision = OTHER_PRECISION * max(1.0, (size / MANY_FEATURES) ** 2)
    precision = {
        # OWN_PRECISION on the diagonal, other_precision beside it.
        "weight": strength * (other_precision + (OWN_PRECISION - other_precision) * identity),
        "bias": torch.full((size,), strength * OWN_PRECISION, dtype=torch.float64),
    }
    likelihood = Bernoulli() if size == 1 else Categorical()
    structure = "diag" if size > MANY_CLASSES else "dense"
    bias = torch.zeros(size, dtype=torch.float64)
    posterior = _fit_layer(identity, bias, (x, y, weights), likelihood, precision, structure)
    return ClassLayer((Component(posterior, 0, 1.0),), floor)


def make_linear(weight: Tensor, bias: Tensor) -> nn.Linear:
    """Return the network x ↦ weight·x + bias in float64, for weight (C, d) and bias (C,)."""
    module = make_unset_linear(weight.shape[1], weight.shape[0], torch.float64)
    with torch.no_grad():
        module.weight.copy_(weight)
        module.bias.copy_(bias)
    return module.eval()


def _fit_layer(
    weight: Tensor,
    bias: Tensor,
    data: Any,
    likelihood: Any,
    precision: Any,
    structure: str = "dense",
) -> Posterior:
    """Fit a linear layer, and return its posterior.

    weight (C, d), bias (C,): where the fit starts, and the centre of the prior.  data: x (n, d),
    y (n,) and row weights (n,).  precision: that of the prior, a dictionary of tensors "weight"
    (C, d) and "bias" (C,).  structure: that of the curvature, as in `ssla.fit`.
    """
    prior = Gaussian(precision, {"weight": weight, "bias": bias})
    # The start is the mean of the prior, not a mode: the fit is expected to move from it.
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "polish moved", UserWarning)
        warnings.filterwarnings("ignore", "The network is not at the mode", UserWarning)
        return fit_last_layer(
            make_linear(weight, bias), data, likelihood, prior, structure=structure
        )


def _fit_shrunken_line(m: Tensor, z: Tensor, weights: Tensor) -> tuple[float, float]:
    """Return a and b of the least-squares line z ≈ a + b m, shrunk towards a = 0 and b = 1.

    The shrinkage is a ridge penalty with the weights SHRINKAGE on a and on b − 1.  m (n,), z (n,):
    standardised predictions and targets.  weights (n,): row weights.
    """
    A = torch.stack([torch.ones_like(m), m], 1)
    shrinkage = torch.diag(torch.tensor(SHRINKAGE, dtype=torch.float64))
    centre = torch.tensor([0, 1], dtype=torch.float64)

    # The normal equations of the penalised squares.
    normal_matrix = A.mT @ (weights[:, None] * A) + shrinkage
    right_side = A.mT @ (weights * z) + shrinkage @ centre
    a, b = torch.linalg.solve(normal_matrix, right_side).tolist()
    return a, b
