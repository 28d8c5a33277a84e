"""Posteriors as BoTorch models (`pip install 'ssla[botorch]'`): acquisition functions and
`optimize_acqf` take them.

    model = ssla.botorch.train(X, Y, bounds=bounds)        # a small network, trained and fitted
    model = ssla.botorch.SSLAModel(posterior)              # or a posterior of your own network
    candidate, value = optimize_acqf(qLogExpectedImprovement(model, best_f=Y.max()), bounds, q=1, …)

f is Gaussian under the linearised network, so groups of q inputs are one Gaussian each, with
gradients in X. New observations condition that Gaussian exactly: in closed form over the inputs, or
by `posterior.update` where the mode can follow.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import replace
from itertools import pairwise
from typing import Any, NamedTuple, cast, final

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.linalg import LinAlgError  # type: ignore[attr-defined]

from ssla import priors
from ssla._checks import finite, in_plain_torch, positive
from ssla.fitting.variational import recentred
from ssla.likelihoods import Gaussian
from ssla.network import module_of
from ssla.network.unset import unset_linear
from ssla.posterior import Posterior, fit
from ssla.predictive.functions import joint_of_groups
from ssla.report import VARIATIONAL
from ssla.values import Variational

try:
    from botorch.models.deterministic import GenericDeterministicModel
    from botorch.models.model import FantasizeMixin, Model
    from botorch.posteriors.gpytorch import GPyTorchPosterior
    from gpytorch.distributions import MultitaskMultivariateNormal, MultivariateNormal
    from linear_operator import to_linear_operator
    from scipy.optimize import Bounds, minimize
except ImportError as error:
    if (error.name or "").partition(".")[0] not in (
        "botorch",
        "gpytorch",
        "linear_operator",
        "scipy",
    ):
        raise
    raise ImportError("ssla.botorch needs BoTorch: pip install 'ssla[botorch]'.") from None

__all__ = ["SSLAModel", "train"]

# Logarithms that the evidence chooses: expected values, their standard deviations, and how far from
# them it may go.
LENGTH = (math.log(0.5), 0.7, 4.0)  # length scales over √columns, of inputs in [−1, 1]
SPREAD = (0.0, 1.0, 4.0)  # standard deviations of weights, over 1/√inputs, and of biases
NOISE = (
    -4.0,
    1.0,
    4.0,
)  # the standard deviation of standardised outcomes; at most 1, at least e⁻⁸ ≈ 0.0003
NOT_A_MODE, RESIDUALS = "The network is not at the mode", "The residuals are"
LEAST = math.exp(NOISE[0] - NOISE[2])  # of the noise, while the other settings are chosen


class Observations(NamedTuple):
    """Rows that condition f, in batches that broadcast: x (…, n, d), y (…, n, m) and noise
    variances (…, n, m) or None.
    """

    x: Tensor
    y: Tensor
    noise: Tensor | None


@final
class SSLAModel(Model, FantasizeMixin):  # type: ignore[misc]
    """A posterior with Gaussian noise as a BoTorch model: of f, or of y with
    observation_noise=True.

    posterior: of `ssla.fit`, one output for each outcome.
    offset, scale: of the outcomes: Y = offset + scale · y, if the network was trained on y = (Y −
    offset)/scale. Numbers or (m,).

    The model is a frozen value. It computes in float64 and answers in the dtype of X.
    """

    def __init__(
        self,
        posterior: Posterior,
        *,
        offset: float | Tensor = 0.0,
        scale: float | Tensor = 1.0,
        observations: Observations | None = None,
    ) -> None:
        Model.__init__(self)
        if not isinstance(posterior, Posterior):
            raise TypeError(
                "SSLAModel takes a Posterior, as ssla.fit returns it, but got a "
                f"{type(posterior).__name__}."
            )
        if not isinstance(posterior.likelihood, Gaussian):
            raise ValueError(
                "A BoTorch model needs outcomes that are the network's outputs plus Gaussian "
                f"noise, but the likelihood is {posterior.likelihood!r}. Fit with "
                "likelihood=ssla.likelihoods.Gaussian(…), for classes or counts on a numerical "
                "score of them."
            )
        m = posterior.network.outputs
        self.fitted, self.observations = posterior, observations
        self.offset, self.scale = (
            _per_output(name, value, m) for name, value in (("offset", offset), ("scale", scale))
        )
        positive("scale", self.scale)
        self.eval()

    @property
    def num_outputs(self) -> int:
        """The number m of outcomes."""
        return self.fitted.network.outputs

    @property
    def batch_shape(self) -> torch.Size:
        """The batch of data sets that the model is conditioned on; empty for one."""
        if self.observations is None:
            return torch.Size()
        x, y, _ = self.observations
        return torch.Size(torch.broadcast_shapes(x.shape[:-2], y.shape[:-2]))

    @property
    def likelihood(self) -> Gaussian:
        """Of y on the network's own scale."""
        found = self.fitted.likelihood
        assert isinstance(found, Gaussian)
        return found

    @in_plain_torch
    def posterior(
        self,
        X: Tensor,
        output_indices: list[int] | None = None,
        observation_noise: bool | Tensor = False,
        posterior_transform: Any = None,
    ) -> Any:
        """The joint Gaussian of q inputs in each batch.

        X (…, q, d) -> a GPyTorchPosterior over (…, q, m).

        observation_noise: True adds the likelihood's noise; a tensor (…, q, m) or (…, 1, m) holds
        variances in units of Y².
        """
        _check_inputs(X)
        mean, K = self._conditioned(X)
        q, m = X.shape[-2], self.num_outputs
        mean = self.offset + self.scale * mean.unflatten(-1, (q, m))
        stretch = self.scale.repeat(q)
        K = stretch[:, None] * K * stretch
        if isinstance(observation_noise, Tensor):
            K = K + torch.diag_embed(observation_noise.double().expand(*mean.shape).flatten(-2))
        elif observation_noise:
            K = K + torch.block_diag(*[self._noise(self.scale)] * q)
        if output_indices is not None:
            mean = mean[..., output_indices]
            rows = (torch.arange(q)[:, None] * m + torch.arange(m)[output_indices]).flatten()
            K = K[..., rows, :][..., rows]
        mean, K = (
            mean.to(X),
            to_linear_operator(K.to(X)),
        )  # factorised only where BoTorch draws: K may be singular without noise
        single = mean.shape[-1] == 1
        law = (
            MultivariateNormal(mean.squeeze(-1), K)
            if single
            else MultitaskMultivariateNormal(mean, K, interleaved=True)
        )
        found = GPyTorchPosterior(law)
        return found if posterior_transform is None else posterior_transform(found, X=X)

    def _conditioned(self, X: Tensor) -> tuple[Tensor, Tensor]:
        """The mean (…, q·m) and covariance of f, on the network's scale, given the observations."""
        if self.observations is None:
            return self._joint(X)
        x, y, noise = self.observations
        n, batch = y.shape[-2] * y.shape[-1], torch.broadcast_shapes(X.shape[:-2], x.shape[:-2])
        both = torch.cat(
            [x.to(X).expand(*batch, *x.shape[-2:]), X.expand(*batch, *X.shape[-2:])], -2
        )
        mean, K = self._joint(both)
        added = (
            torch.block_diag(*[self._noise()] * y.shape[-2])
            if noise is None
            else torch.diag_embed(noise.flatten(-2))
        )
        factor = torch.linalg.cholesky(K[..., :n, :n] + added)
        white = torch.linalg.solve_triangular(factor, K[..., :n, n:], upper=False)  # (…, n, q·m)
        residual = torch.linalg.solve_triangular(
            factor, (y.flatten(-2) - mean[..., :n]).unsqueeze(-1), upper=False
        )
        moved = mean[..., n:] + (white.mT @ residual).squeeze(-1)
        left = K[..., n:, n:] - white.mT @ white
        return moved, left.expand(*moved.shape[:-1], *left.shape[-2:])

    def _joint(self, X: Tensor) -> tuple[Tensor, Tensor]:
        q, batch = X.shape[-2], X.shape[:-2]
        found = joint_of_groups(self.fitted, X.reshape(-1, X.shape[-1]), q, differentiable=True)
        return found.mean.reshape(*batch, -1), found.covariance.reshape(
            *batch, *found.covariance.shape[-2:]
        )

    def _noise(self, scale: Tensor | None = None) -> Tensor:
        """Σ (m, m), by default on the network's scale."""
        sigma = self.likelihood.covariance_for(self.offset)
        return sigma if scale is None else scale[:, None] * sigma * scale

    @in_plain_torch
    def condition_on_observations(
        self, X: Tensor, Y: Tensor, noise: Tensor | None = None, **_: Any
    ) -> SSLAModel:
        """The model given more rows.

        X (…, n, d), Y (…, n, m), noise variances (…, n, m) in units of Y² if they are known.

        One batch goes through `posterior.update` where that moves the mode: a polished last layer,
        with dense or kfac curvature. Otherwise, and for batches of fantasies, the Gaussian of f is
        conditioned, with gradients in X and Y. Prior, noise and features stay: call `train` again
        for new ones.
        """
        _check_inputs(X)
        if (
            not isinstance(Y, Tensor)
            or Y.shape[-1:] != (self.num_outputs,)
            or Y.shape[-2:-1] != X.shape[-2:-1]
        ):
            raise ValueError(
                f"Y must be (…, n, m) with n = {X.shape[-2]} rows, as X has, and m = "
                f"{self.num_outputs} outcomes, but has shape "
                f"{tuple(Y.shape) if isinstance(Y, Tensor) else type(Y).__name__}. Give one "
                "outcome as Y[:, None]."
            )
        finite("Y", Y, "Drop those rows.")
        y = (Y.double() - self.offset) / self.scale
        known = None if noise is None else noise.double().expand(Y.shape) / self.scale**2
        plain = self.observations is None and known is None and X.dim() == Y.dim() == 2
        graph = torch.is_grad_enabled() and (X.requires_grad or Y.requires_grad)
        if plain and not graph and self.fitted.follows_mode:
            return self._with(
                self.fitted.update((X, y.squeeze(-1) if self.num_outputs == 1 else y)), None
            )
        return self._with(
            self.fitted,
            _joined(self.observations, Observations(X, y, known), self._noise().diagonal()),
        )

    def _with(self, posterior: Posterior, observations: Observations | None) -> SSLAModel:
        return SSLAModel(posterior, offset=self.offset, scale=self.scale, observations=observations)

    @in_plain_torch
    def draw_functions(self, n: int, generator: torch.Generator | None = None) -> list[Any]:
        """n draws of f as deterministic models, for Thompson sampling: maximise
        `PosteriorMean(draw)`, one for each candidate.

        A draw is one function: its values at different inputs, and in different calls, belong
        together.
        """
        if self.observations is not None:
            raise ValueError(
                "Functions are drawn from a fitted posterior, but this model is conditioned on "
                "fantasies or on rows that its posterior has not seen. Draw from the model before, "
                "or train on all rows."
            )
        return [self._deterministic(f) for f in self.fitted.draw_functions(n, generator)]

    def _deterministic(self, function: Any) -> Any:
        def values(X: Tensor) -> Tensor:
            _check_inputs(X)
            f: Tensor = function(X.reshape(-1, X.shape[-1]), differentiable=True).double()
            return (self.offset + self.scale * f).reshape(*X.shape[:-1], -1).to(X)

        return GenericDeterministicModel(values, num_outputs=self.num_outputs)


class Inputs(nn.Module):
    """Numbers from their bounds to [−1, 1]; a category, a whole number from 0, to one column for
    each of its values.

    All are divided by length scales: one for each number, then one for each category.
    """

    low: Tensor
    width: Tensor
    lengths: Tensor

    def __init__(self, bounds: Tensor, categories: Mapping[int, int]) -> None:
        super().__init__()
        self.categories = dict(categories)
        self.numbers = [i for i in range(bounds.shape[1]) if i not in categories]
        self.register_buffer("low", bounds[0, self.numbers])
        self.register_buffer("width", bounds[1, self.numbers] - bounds[0, self.numbers])
        self.counts = torch.tensor(
            [1] * len(self.numbers) + list(categories.values())
        )  # columns of each length scale
        expected = LENGTH[0] + 0.5 * math.log(int(self.counts.sum()))
        self.expected = torch.full(
            (len(self.counts),), expected, dtype=torch.float64
        )  # logarithms of length scales
        self.register_buffer("lengths", self.expected.exp())

    def forward(self, x: Tensor) -> Tensor:
        parts = [2 * (x[:, self.numbers] - self.low) / self.width - 1]
        parts += [
            (x[:, i, None].round() == torch.arange(k, device=x.device)).to(x)
            for i, k in self.categories.items()
        ]
        return torch.cat(parts, 1) / self.lengths.repeat_interleave(self.counts.to(x.device))


class Cosine(nn.Module):
    """√2 cos z: features whose products are those of a stationary kernel, as random weights and
    phases are averaged over.
    """

    def forward(self, z: Tensor) -> Tensor:
        return math.sqrt(2) * torch.cos(z)

    def slope(self, z: Tensor) -> Tensor:
        return -math.sqrt(2) * torch.sin(z)


@in_plain_torch
def train(
    X: Tensor,
    Y: Tensor,
    *,
    bounds: Tensor | None = None,
    categories: Mapping[int, int] | None = None,
    noise: float | None = None,
    hidden: Sequence[int] = (200,),
    start: SSLAModel | None = None,
    rounds: int = 1,
    steps: int = 100,
    seed: int = 0,
) -> SSLAModel:
    """Fit a posterior over all weights of a cosine network to X (n, d) and Y (n, m).

    Outcomes are standardised. The network is linearised at random weights, on which the prior is
    centred. Its length scale for each input, the prior precision of each layer and the noise are
    chosen by the evidence, in at most `steps` iterations of L-BFGS. The posterior of the linearised
    network is then exact. Draws random numbers only for the weights.

    bounds: (2, d), those of the search; by default the range of X.
    categories: column -> number of categories, for columns that hold 0, 1, 2, …
    noise: the standard deviation of Y, if it is known.
    hidden: numbers of cosine units.
    start: a model of `train` from which weights, length scales, prior and noise continue, with its
    bounds and layers. rounds: linearisations. Each after the first is at the mean of the one
    before: Gauss–Newton steps towards the mode.
    """
    x, y, offset, scale = _standardised(X, Y)
    if rounds < 1 or steps < 1:
        raise ValueError(f"rounds and steps must be at least 1, but are {rounds} and {steps}.")
    if start is None:
        network = _untrained(x, y.shape[1], bounds, dict(categories or {}), tuple(hidden), seed)
        settings = _expected(network)
    else:
        network, settings = _from_there(start, bounds is None and categories is None)
    known = None if noise is None else noise / scale
    for _ in range(rounds):
        settings = _by_evidence(network, settings, x, y, known, steps)
        _inputs(network).lengths.copy_(settings.lengths)
        likelihood = Gaussian(noise=settings.noise if known is None else known)
        rows = (x, y.squeeze(1) if y.shape[1] == 1 else y)
        state = _linearised(network, rows, likelihood, settings.prior)
        network.load_state_dict(state.network.layout.unpack(state.mean), strict=False)
    return SSLAModel(state, offset=offset, scale=scale)


class Settings(NamedTuple):
    """What the evidence chooses."""

    lengths: Tensor  # (k,)
    precision: Mapping[str, float]  # of each parameter, around its mean
    mean: Mapping[str, Tensor]
    noise: float  # of standardised outcomes

    @property
    def prior(self) -> priors.Gaussian:
        return priors.Gaussian(self.precision, self.mean)


def _expected(network: nn.Sequential) -> Settings:
    """Before data are seen: hidden weights are expected where they are, and those of the last layer
    at zero.

    The linearised network has then mean zero, whatever the random weights are.
    """
    *_, last = (name for name, part in network.named_children() if isinstance(part, nn.Linear))
    named = {name: p.detach().clone() for name, p in network.named_parameters()}
    precision = {name: float(p.shape[1]) if p.dim() == 2 else 1.0 for name, p in named.items()}
    mean = {name: 0 * p if name.startswith(f"{last}.") else p for name, p in named.items()}
    return Settings(_inputs(network).lengths.clone(), precision, mean, math.exp(NOISE[0]))


def _from_there(start: SSLAModel, alone: bool) -> tuple[nn.Sequential, Settings]:
    """A copy of the network of an earlier model, and its settings."""
    network = deepcopy(module_of(start.fitted.network))
    if not alone:
        raise ValueError("bounds and categories are those of start. Give them only without start=.")
    if not isinstance(network, nn.Sequential) or not isinstance(network[0], Inputs):
        raise ValueError(
            "start must be a model of ssla.botorch.train, but it has another network. Leave start= "
            "out."
        )
    prior, noise = start.fitted.prior, torch.as_tensor(start.likelihood.noise)
    assert isinstance(prior, priors.Gaussian)
    precision, mean = (
        cast("dict[str, float]", prior.precision),
        cast("dict[str, Tensor]", prior.mean),
    )
    return network, Settings(
        network[0].lengths.clone(), precision, mean, float(noise.log().mean().exp())
    )


def _inputs(network: nn.Sequential) -> Inputs:
    found = network[0]
    assert isinstance(found, Inputs)
    return found


def _by_evidence(
    network: nn.Sequential,
    settings: Settings,
    x: Tensor,
    y: Tensor,
    known: Tensor | None,
    steps: int,
) -> Settings:
    """The settings of the largest evidence of the linearised network, times the density that
    they are expected to have.
    """
    sizes = {name: p.shape[1] if p.dim() == 2 else 1 for name, p in network.named_parameters()}
    count, mean = len(settings.lengths), settings.mean
    kinds = [LENGTH] * count + [SPREAD] * len(sizes) + [NOISE]
    middle, doubt, reach = torch.tensor(kinds, dtype=torch.float64).unbind(1)
    middle[:count] = _inputs(network).expected
    spreads = [-0.5 * math.log(settings.precision[name] / size) for name, size in sizes.items()]
    first = torch.cat(
        [
            settings.lengths.log(),
            torch.tensor([*spreads, math.log(settings.noise)], dtype=torch.float64),
        ]
    )

    def unpacked(point: Tensor) -> tuple[Tensor, dict[str, Tensor], Tensor]:
        values = point.exp()
        variances = {
            name: spread**2 / sizes[name]
            for name, spread in zip(sizes, values[count:-1], strict=True)
        }
        return values[:count], variances, values[-1:] if known is None else known.clamp_min(LEAST)

    @torch.enable_grad()
    def objective(flat: Any) -> tuple[float, Any]:
        point = torch.from_numpy(flat.copy()).requires_grad_(True)
        lengths, variances, noise = unpacked(point)
        try:
            height = _log_evidence(network, x, y, lengths, variances, mean, noise)
        except LinAlgError:  # singular to rounding: a shorter step is taken
            return math.inf, 0 * flat
        loss = 0.5 * (((point - middle) / doubt) ** 2).sum() - height
        (slope,) = torch.autograd.grad(loss, point)
        return float(loss.detach()), slope.numpy()

    low, high = middle - reach, middle + reach
    found = minimize(
        objective,
        first.clamp(low, high).numpy(),
        jac=True,
        method="L-BFGS-B",
        bounds=Bounds(low, high),
        options={"maxiter": steps},
    )
    lengths, variances, _ = unpacked(torch.from_numpy(found.x))
    return Settings(
        lengths, {name: 1 / float(v) for name, v in variances.items()}, mean, math.exp(found.x[-1])
    )


def _log_evidence(
    network: nn.Sequential,
    x: Tensor,
    y: Tensor,
    lengths: Tensor,
    variances: Mapping[str, Tensor],
    mean: Mapping[str, Tensor],
    noise: Tensor,
) -> Tensor:
    """log N(y; f + J(μ − θ̂), J T⁻¹ Jᵀ + Σ), less its constant, for the network linearised at its
    own weights θ̂.

    A layer with inputs a and backpropagated gradients δ contributes (δᵢ·δⱼ)(v aᵢ·aⱼ + v_bias) to J
    T⁻¹ Jᵀ: J is not built.
    """
    f, places, slopes = functional_call(network[0], {"lengths": lengths}, (x,)), [], []
    for name, part in network[1:].named_children():
        if isinstance(part, nn.Linear):
            weight, bias = part.weight.detach(), part.bias.detach()
            places.append((name, f, weight, bias))
            f = f @ weight.mT + bias
        else:
            assert isinstance(part, Cosine)
            slopes.append(part.slope(f))
            f = part(f)
    delta: Tensor = torch.eye(y.shape[1], dtype=y.dtype).expand(
        len(y), -1, -1
    )  # (n, m, outputs of the layer)
    K, change = y.new_zeros(()), y.new_zeros(())  # J T⁻¹ Jᵀ (n, m, n, m), and J(μ − θ̂) (n, m)
    for name, a, weight, bias in reversed(places):
        inside = variances[f"{name}.weight"] * (a @ a.mT) + variances[f"{name}.bias"]
        K = K + torch.einsum("iao,jbo->iajb", delta, delta) * inside[:, None, :, None]
        move = a @ (mean[f"{name}.weight"] - weight).mT + mean[f"{name}.bias"] - bias
        change = change + torch.einsum("iao,io->ia", delta, move)
        if slopes:
            delta = (delta @ weight) * slopes.pop()[:, None]
    whole = K.reshape(y.numel(), y.numel()) + torch.diag(noise.expand_as(y).flatten() ** 2)
    factor = torch.linalg.cholesky(whole)
    white = torch.linalg.solve_triangular(factor, (y - f - change).flatten()[:, None], upper=False)
    found: Tensor = -0.5 * (white**2).sum() - factor.diagonal().log().sum()
    return found


def _linearised(
    network: nn.Module, rows: tuple[Tensor, Tensor], likelihood: Gaussian, prior: priors.Prior
) -> Posterior:
    """The exact posterior of the network linearised at its own weights θ̂: its mean is one
    Newton step from θ̂.
    """
    with warnings.catch_warnings():  # θ̂ need be neither trained nor a mode
        for text in (NOT_A_MODE, RESIDUALS):
            warnings.filterwarnings("ignore", text, UserWarning)
        state = fit(network, rows, likelihood=likelihood, prior=prior, weights="all", mode="tilt")
    notes = tuple(note for note in state.report.notes if not note.startswith(RESIDUALS))
    report = replace(state.report, gaussian=VARIATIONAL, rounds=1, notes=notes)
    variational = Variational(state.theta, state.statistics, tilted=False)
    return recentred(replace(state, variational=variational, report=report))


def _standardised(X: Tensor, Y: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """x, y, and the mean and standard deviation of Y, in float64."""
    _check_inputs(X)
    if X.dim() != 2 or not isinstance(Y, Tensor) or Y.dim() != 2 or len(X) != len(Y) or len(X) < 2:
        shown = tuple(Y.shape) if isinstance(Y, Tensor) else type(Y).__name__
        raise ValueError(
            "train needs X (n, d) and Y (n, m) with the same n, at least 2, but X is "
            f"{tuple(X.shape)} and Y is {shown}. Give one outcome as Y[:, None]."
        )
    finite("Y", Y, "Drop those rows.")
    x, Y = X.detach().double(), Y.detach().double()
    offset, scale = Y.mean(0), Y.std(0)
    positive(
        "The standard deviation of Y",
        scale,
        "Observe more inputs first: a constant outcome has no scale.",
    )
    return x, (Y - offset) / scale, offset, scale


def _untrained(
    x: Tensor,
    outputs: int,
    bounds: Tensor | None,
    categories: dict[int, int],
    hidden: tuple[int, ...],
    seed: int,
) -> nn.Sequential:
    """A network with random weights: first N(0, 1), later N(0, 1/inputs), and phases from 0 to
    2π.
    """
    bounds = (
        torch.stack([x.amin(0), x.amax(0)])
        if bounds is None
        else torch.as_tensor(bounds, dtype=torch.float64)
    )
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
    widths = (len(numbers) + sum(categories.values()), *hidden, outputs)
    layers: list[nn.Module] = [Inputs(bounds, categories)]
    for inside, out in pairwise(widths):
        layers += [unset_linear(inside, out, torch.float64), Cosine()]
    network, generator = nn.Sequential(*layers[:-1]).eval(), torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for i, part in enumerate(part for part in network if isinstance(part, nn.Linear)):
            weight = torch.randn(part.weight.shape, generator=generator, dtype=torch.float64)
            part.weight.copy_(weight if i == 0 else weight / part.in_features**0.5)
            phases = torch.rand(part.bias.shape, generator=generator, dtype=torch.float64)
            part.bias.copy_(2 * math.pi * phases if part is not network[-1] else 0 * phases)
    return network


def _per_output(name: str, value: float | Tensor, m: int) -> Tensor:
    found = torch.as_tensor(value, dtype=torch.float64).detach()
    if found.dim() > 1 or found.numel() not in (1, m):
        raise ValueError(
            f"{name} must be a number, or one for each of the {m} outcomes, but has shape "
            f"{tuple(found.shape)}."
        )
    finite(
        name, found, "Give the mean and standard deviation that the targets were standardised by."
    )
    return found.expand(m)


def _check_inputs(X: Tensor) -> None:
    if not isinstance(X, Tensor) or not X.is_floating_point() or X.dim() < 2:
        shown = (
            f"{X.dtype} of shape {tuple(X.shape)}" if isinstance(X, Tensor) else type(X).__name__
        )
        raise ValueError(
            f"X must be a tensor of floating-point numbers (…, q, d), but is {shown}. Give one "
            "input as X[None]."
        )
    finite("X", X, "Drop those inputs.")


def _joined(old: Observations | None, new: Observations, usual: Tensor) -> Observations:
    """Both sets of rows, with their batches broadcast.

    usual: the noise variances where they are not given.
    """
    if old is None:
        return new
    batch = torch.broadcast_shapes(*(part.shape[:-2] for rows in (old, new) for part in rows[:2]))
    given = old.noise is not None or new.noise is not None

    def both(a: Tensor, b: Tensor) -> Tensor:
        return torch.cat([part.expand(*batch, *part.shape[-2:]) for part in (a, b)], -2)

    noises = [
        rows.y.new_ones(rows.y.shape) * usual if rows.noise is None else rows.noise
        for rows in (old, new)
    ]
    return Observations(
        both(old.x, new.x.to(old.x)), both(old.y, new.y), both(*noises) if given else None
    )
