"""Small cosine networks with a posterior over all of their weights, for `ssla.botorch.train`.

A network of scaled inputs, linear layers and cosines is linearised at random weights, on which the
prior is centred. The length scale of each input, the prior precision of each layer and the noise
are those of the largest evidence, times the density that they are expected to have. The posterior
of the linearised network is then exact.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import replace
from itertools import pairwise
from typing import Any, NamedTuple, cast

import torch
from scipy.optimize import Bounds, minimize
from torch import Tensor, nn
from torch.func import functional_call
from torch.linalg import LinAlgError  # type: ignore[attr-defined]

from ssla import priors
from ssla.fitting.variational import with_recentred_mean
from ssla.likelihoods import Gaussian
from ssla.network import get_module
from ssla.network.unset import make_unset_linear
from ssla.posterior import Posterior, fit
from ssla.report import VARIATIONAL
from ssla.values import Variational

# The logarithms that the evidence chooses: (expected value, standard deviation around it, largest
# distance from it). All are guesses, measured together
# (benchmarks/accuracy/bayesian_optimisation.py).
LENGTH = (math.log(0.5), 0.7, 4.0)  # length scales over √columns, of inputs in [−1, 1]
SPREAD = (0.0, 1.0, 4.0)  # standard deviations of weights, over 1/√inputs, and of biases
# the standard deviation of standardised outcomes; at most 1, at least e⁻⁸ ≈ 0.0003
NOISE = (-4.0, 1.0, 4.0)
LEAST_NOISE = math.exp(NOISE[0] - NOISE[2])  # while the other settings are chosen
NOT_A_MODE, RESIDUALS = "The network is not at the mode", "The residuals are"  # warnings of a fit


class ScaledInputs(nn.Module):
    """A layer that scales numbers from their bounds to [−1, 1], and encodes categories.

    A category is a whole number from 0, and gets one column for each of its values. All columns are
    divided by length scales: one for each number, then one for each category.
    """

    low: Tensor
    width: Tensor
    lengths: Tensor

    def __init__(self, bounds: Tensor, categories: Mapping[int, int]) -> None:
        """Set the bounds, and the length scales to their expected values.

        bounds (2, d): lower and upper. categories: column -> number of categories.
        """
        super().__init__()
        self.categories = dict(categories)
        self.numbers = [i for i in range(bounds.shape[1]) if i not in categories]

        # Buffers are tensors that the network saves and moves with its parameters.
        self.register_buffer("low", bounds[0, self.numbers])
        self.register_buffer("width", bounds[1, self.numbers] - bounds[0, self.numbers])

        # how many columns each length scale divides
        self.counts = torch.tensor([1] * len(self.numbers) + list(categories.values()))

        # The distance of two random inputs grows with √columns, and so do the length scales.
        log_length = LENGTH[0] + 0.5 * math.log(int(self.counts.sum()))
        self.expected = torch.full((len(self.counts),), log_length, dtype=torch.float64)
        self.register_buffer("lengths", self.expected.exp())

    def forward(self, x: Tensor) -> Tensor:
        """Return the scaled columns of x: (n, d) -> (n, columns). Numbers come first."""
        columns = [2 * (x[:, self.numbers] - self.low) / self.width - 1]
        columns += [
            (x[:, i, None].round() == torch.arange(k, device=x.device)).to(x)
            for i, k in self.categories.items()
        ]
        return torch.cat(columns, 1) / self.lengths.repeat_interleave(self.counts.to(x.device))


class Cosine(nn.Module):
    """The activation √2 cos z.

    Averaged over random weights and phases, the products of its outputs at two inputs are a
    stationary kernel.
    """

    def forward(self, z: Tensor) -> Tensor:
        """Return √2 cos z, in the shape of z."""
        return math.sqrt(2) * torch.cos(z)

    def slope(self, z: Tensor) -> Tensor:
        """Return the derivative −√2 sin z, in the shape of z."""
        return -math.sqrt(2) * torch.sin(z)


class Settings(NamedTuple):
    """The settings that the evidence chooses, and the means of the prior, which it keeps."""

    lengths: Tensor  # length scales of the inputs (k,)
    precision: Mapping[str, float]  # of the prior of each parameter, around its mean
    mean: Mapping[str, Tensor]  # of the prior of each parameter
    noise: float  # of standardised outcomes

    @property
    def prior(self) -> priors.Gaussian:
        """Return the Gaussian prior with these precisions and means."""
        return priors.Gaussian(self.precision, self.mean)


# --- networks ------------------------------------------------------------------------------


def draw_network(
    x: Tensor,
    outputs: int,
    bounds: Tensor | None,
    categories: dict[int, int],
    hidden: tuple[int, ...],
    seed: int,
) -> nn.Sequential:
    """Return a cosine network for x (n, d) with random weights, in float64.

    The weights of the first linear layer are N(0, 1), those of later ones N(0, 1/inputs). Biases
    are phases from 0 to 2π, but those of the last layer are 0.

    outputs: their number. bounds (2, d): None is the range of x. categories: column -> number of
    categories. hidden: the number of cosine units of each layer. seed: of the weights and phases.
    Raises ValueError for bounds or categories that x does not fit.
    """
    if bounds is None:
        bounds = torch.stack([x.amin(0), x.amax(0)])
    bounds = torch.as_tensor(bounds, dtype=torch.float64)
    _check_columns(x, bounds, categories)
    columns = x.shape[1] - len(categories) + sum(categories.values())
    layers: list[nn.Module] = [ScaledInputs(bounds, categories)]
    for in_features, out_features in pairwise((columns, *hidden, outputs)):
        layers += [make_unset_linear(in_features, out_features, torch.float64), Cosine()]
    network = nn.Sequential(*layers[:-1]).eval()  # the last linear layer has no cosine after it
    _draw_weights(network, torch.Generator().manual_seed(seed))
    return network


@torch.no_grad()
def _draw_weights(network: nn.Sequential, generator: torch.Generator) -> None:
    """Draw the weights and phases of a cosine network, in place; see `draw_network`.

    generator: of the random numbers; weights are drawn before phases, layer by layer, so that a
    seed gives the same network.
    """
    linear_layers = [layer for layer in network if isinstance(layer, nn.Linear)]
    for i, layer in enumerate(linear_layers):
        weight = torch.randn(layer.weight.shape, generator=generator, dtype=torch.float64)
        layer.weight.copy_(weight if i == 0 else weight / layer.in_features**0.5)
        if layer is network[-1]:
            layer.bias.zero_()
        else:
            phases = torch.rand(layer.bias.shape, generator=generator, dtype=torch.float64)
            layer.bias.copy_(2 * math.pi * phases)


def _check_columns(x: Tensor, bounds: Tensor, categories: Mapping[int, int]) -> None:
    """Raise ValueError unless bounds and categories fit the columns of x (n, d).

    Bounds must be (2, d) with lower before upper. A column of categories must hold whole numbers
    from 0 and below their number.
    """
    # Categories have no bounds: theirs are not looked at.
    numbers = [i for i in range(x.shape[1]) if i not in categories]
    if bounds.shape != (2, x.shape[1]) or not bool((bounds[0] < bounds[1])[numbers].all()):
        raise ValueError(
            f"bounds must be (2, {x.shape[1]}), lower before upper in every column, but are "
            f"{bounds.tolist()}."
        )

    for column, count in categories.items():
        if not 0 <= column < x.shape[1] or not bool(
            ((x[:, column] >= 0) & (x[:, column] < count) & (x[:, column] % 1 == 0)).all()
        ):
            raise ValueError(
                f"categories={categories} needs a column {column} of whole numbers from 0 to "
                f"{count - 1}. Number the categories."
            )


def make_expected_settings(network: nn.Sequential) -> Settings:
    """Return the settings before data are seen.

    The prior is centred on the present hidden weights, and on zero for the last layer. So the
    linearised network has the mean zero, whatever the random weights are. The precision
    is the number of inputs for weights, and 1 for biases: the spread is then 1, as SPREAD expects.
    """
    *_, last = (name for name, layer in network.named_children() if isinstance(layer, nn.Linear))
    named = {name: p.detach().clone() for name, p in network.named_parameters()}
    precision = {name: float(p.shape[1]) if p.dim() == 2 else 1.0 for name, p in named.items()}
    mean = {name: 0 * p if name.startswith(f"{last}.") else p for name, p in named.items()}
    return Settings(
        _get_scaled_inputs(network).lengths.clone(), precision, mean, math.exp(NOISE[0])
    )


def continue_from(posterior: Posterior) -> tuple[nn.Sequential, Settings]:
    """Return a copy of the network of an earlier fit, and the settings of that fit.

    Raises ValueError for a network that `draw_network` has not made.
    """
    network = deepcopy(get_module(posterior.network))
    if not isinstance(network, nn.Sequential) or not isinstance(network[0], ScaledInputs):
        raise ValueError(
            "start must be a model of ssla.botorch.train, but it has another network. Leave start= "
            "out."
        )

    prior = posterior.prior
    likelihood = posterior.likelihood
    assert isinstance(prior, priors.Gaussian)
    assert isinstance(likelihood, Gaussian)

    # The prior of such a fit has a value for each parameter.
    precision = cast("dict[str, float]", prior.precision)
    mean = cast("dict[str, Tensor]", prior.mean)
    noise = float(torch.as_tensor(likelihood.noise).log().mean().exp())
    return network, Settings(network[0].lengths.clone(), precision, mean, noise)


def _get_scaled_inputs(network: nn.Sequential) -> ScaledInputs:
    """Return the first layer of a cosine network, which scales its inputs."""
    layer = network[0]
    assert isinstance(layer, ScaledInputs)
    return layer


# --- fits ----------------------------------------------------------------------------------


def fit_by_evidence(
    network: nn.Sequential,
    settings: Settings,
    x: Tensor,
    y: Tensor,
    known_noise: Tensor | None,
    rounds: int,
    steps: int,
) -> Posterior:
    """Return the posterior of the linearised network, with the settings of the largest evidence.

    Settings are chosen and the network is fitted in each of at least one round. Each round after
    the first is linearised at the mean of the one before. The network is changed in place: it has
    the length scales and the mean of the last round.

    settings: the start. x (n, d), standardised y (n, m). known_noise (m,): standard deviations of
    y; None: chosen by the evidence. steps: at most as many iterations of L-BFGS in each round.
    """
    rows = (x, y.squeeze(1) if y.shape[1] == 1 else y)  # a single target is (n,) for `fit`
    for _ in range(rounds):
        settings = maximise_evidence(network, settings, x, y, known_noise, steps)
        _get_scaled_inputs(network).lengths.copy_(settings.lengths)
        likelihood = Gaussian(noise=settings.noise if known_noise is None else known_noise)
        posterior = _fit_linearised(network, rows, likelihood, settings.prior)
        network.load_state_dict(posterior.network.layout.unpack(posterior.mean), strict=False)
    return posterior


class _Coordinates(NamedTuple):
    """The coordinates of the search, with their expected values.

    The coordinates are logarithms of the k length scales, of the spread of each parameter tensor,
    and of the noise.
    """

    expected: Tensor  # (k + parameters + 1,)
    deviation: Tensor  # standard deviation around the expected value, of the same shape
    reach: Tensor  # largest distance from the expected value, of the same shape
    sizes: dict[str, int]  # inputs of each weight; 1 for a bias
    length_count: int  # k

    @staticmethod
    def build(network: nn.Sequential) -> _Coordinates:
        """Return the coordinates of a network's settings, with LENGTH, SPREAD and NOISE."""
        sizes = {name: p.shape[1] if p.dim() == 2 else 1 for name, p in network.named_parameters()}
        expected_lengths = _get_scaled_inputs(network).expected
        count = len(expected_lengths)
        table = [LENGTH] * count + [SPREAD] * len(sizes) + [NOISE]
        expected, deviation, reach = torch.tensor(table, dtype=torch.float64).unbind(1)
        expected[:count] = expected_lengths
        return _Coordinates(expected, deviation, reach, sizes, count)

    def find_point(self, settings: Settings) -> Tensor:
        """Return the point (k + parameters + 1,) with the coordinates of settings."""
        # The precision is size/spread², so log spread = −½ log (precision/size).
        spreads = [
            -0.5 * math.log(settings.precision[name] / size) for name, size in self.sizes.items()
        ]
        spreads_and_noise = torch.tensor([*spreads, math.log(settings.noise)], dtype=torch.float64)
        return torch.cat([settings.lengths.log(), spreads_and_noise])

    def read_settings(self, point: Tensor) -> tuple[Tensor, dict[str, Tensor], Tensor]:
        """Return length scales (k,), prior variances () by parameter, and noise (1,), at a point.

        point: (k + parameters + 1,), the coordinates.
        """
        # A weight's spread is that over 1/√inputs, so its variance is spread²/inputs.
        values = point.exp()
        spreads = zip(self.sizes, values[self.length_count : -1], strict=True)
        variances = {name: spread**2 / self.sizes[name] for name, spread in spreads}
        return values[: self.length_count], variances, values[-1:]


def maximise_evidence(
    network: nn.Sequential,
    settings: Settings,
    x: Tensor,
    y: Tensor,
    known_noise: Tensor | None,
    steps: int,
) -> Settings:
    """Return the settings with the largest product of evidence and expected density.

    The evidence is that of the linearised network. The expected density is that of LENGTH, SPREAD
    and NOISE.

    settings: the start; its means are kept. x (n, d), standardised y (n, m). known_noise (m,):
    standard deviations of y; None: the noise is chosen too. steps: at most as many iterations of
    L-BFGS.
    """
    coordinates = _Coordinates.build(network)
    expected, deviation, reach, *_ = coordinates

    @torch.enable_grad()
    def compute_loss_and_slope(flat: Any) -> tuple[float, Any]:
        """Return the negative log of evidence times expected density, and its gradient.

        flat: the point as an array. The loss is infinite where the evidence does not exist.
        """
        point = torch.from_numpy(flat.copy()).requires_grad_()
        lengths, variances, noise = coordinates.read_settings(point)
        if known_noise is not None:
            noise = known_noise.clamp_min(LEAST_NOISE)
        try:
            evidence = log_evidence(network, x, y, lengths, variances, settings.mean, noise)
        except LinAlgError:
            # The covariance is singular to rounding. L-BFGS takes a shorter step then, without the
            # gradient.
            return math.inf, 0 * flat

        loss = 0.5 * (((point - expected) / deviation) ** 2).sum() - evidence
        (slope,) = torch.autograd.grad(loss, point)
        return float(loss.detach()), slope.numpy()

    low, high = expected - reach, expected + reach
    result = minimize(
        compute_loss_and_slope,
        coordinates.find_point(settings).clamp(low, high).numpy(),
        jac=True,
        method="L-BFGS-B",
        bounds=Bounds(low, high),
        options={"maxiter": steps},
    )
    lengths, variances, _ = coordinates.read_settings(torch.from_numpy(result.x))
    precision = {name: 1 / float(variance) for name, variance in variances.items()}
    return Settings(lengths, precision, settings.mean, math.exp(result.x[-1]))


def log_evidence(
    network: nn.Sequential,
    x: Tensor,
    y: Tensor,
    lengths: Tensor,
    variances: Mapping[str, Tensor],
    mean: Mapping[str, Tensor],
    noise: Tensor,
) -> Tensor:
    """Return the log evidence of the network linearised at its own weights θ̂, but for a constant.

    It is log N(y; f + J(μ − θ̂), J T⁻¹ Jᵀ + Σ). J is the Jacobian of the outputs f in the weights,
    N(μ, T⁻¹) the prior, and Σ the noise. A layer with inputs a and backpropagated gradients δ
    contributes (δᵢ·δⱼ)(v aᵢ·aⱼ + v_bias) to J T⁻¹ Jᵀ, so J is not built.

    x (n, d), y (n, m), lengths (k,), variances v of each parameter, mean μ of each parameter, and
    standard deviations noise (m,) or (1,) -> scalar. Raises LinAlgError where the covariance is
    singular to rounding.
    """
    # Forward: the inputs of every linear layer, and the slope of every cosine.
    f = functional_call(network[0], {"lengths": lengths}, (x,))
    linear_layers = []
    slopes = []
    for name, layer in network[1:].named_children():
        if isinstance(layer, nn.Linear):
            weight, bias = layer.weight.detach(), layer.bias.detach()
            linear_layers.append((name, f, weight, bias))
            f = f @ weight.mT + bias
        else:
            assert isinstance(layer, Cosine)
            slopes.append(layer.slope(f))
            f = layer(f)

    # Backward: δ (n, m, outputs of the layer), J T⁻¹ Jᵀ (n, m, n, m), and J(μ − θ̂) (n, m).
    delta: Tensor = torch.eye(y.shape[1], dtype=y.dtype).expand(len(y), -1, -1)
    K = y.new_zeros(())
    change = y.new_zeros(())
    for name, a, weight, bias in reversed(linear_layers):
        # In the sums i and j are rows, a and b outcomes, and o outputs of the layer.
        input_products = variances[f"{name}.weight"] * (a @ a.mT) + variances[f"{name}.bias"]
        K = K + torch.einsum("iao,jbo->iajb", delta, delta) * input_products[:, None, :, None]
        # How far the layer's outputs move from the weights θ̂ to μ.
        move = a @ (mean[f"{name}.weight"] - weight).mT + mean[f"{name}.bias"] - bias
        change = change + torch.einsum("iao,io->ia", delta, move)
        # Before each layer but the first there is a cosine.
        if slopes:
            delta = (delta @ weight) * slopes.pop()[:, None]

    covariance = K.reshape(y.numel(), y.numel()) + torch.diag(noise.expand_as(y).flatten() ** 2)
    factor = torch.linalg.cholesky(covariance)
    residual = (y - f - change).flatten()[:, None]
    whitened = torch.linalg.solve_triangular(factor, residual, upper=False)
    evidence: Tensor = -0.5 * (whitened**2).sum() - factor.diagonal().log().sum()
    return evidence


def _fit_linearised(
    network: nn.Module, rows: tuple[Tensor, Tensor], likelihood: Gaussian, prior: priors.Prior
) -> Posterior:
    """Return the exact posterior of the network linearised at its own weights θ̂.

    rows: x (n, d) and y, (n,) or (n, m). The mean of the posterior is one Newton step from θ̂. The
    warnings and notes of `fit` on weights that are not trained are left out.
    """
    # θ̂ need be neither trained nor a mode.
    with warnings.catch_warnings():
        for text in (NOT_A_MODE, RESIDUALS):
            warnings.filterwarnings("ignore", text, UserWarning)
        fitted = fit(network, rows, likelihood=likelihood, prior=prior, weights="all", mode="tilt")
    notes = tuple(note for note in fitted.report.notes if not note.startswith(RESIDUALS))
    report = replace(fitted.report, gaussian=VARIATIONAL, rounds=1, notes=notes)
    # The same sums without the tilt: recentred at the mode of the linearised network.
    variational = Variational(fitted.theta, fitted.statistics, tilted=False)
    return with_recentred_mean(replace(fitted, variational=variational, report=report))
