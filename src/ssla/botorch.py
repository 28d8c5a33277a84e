"""Posteriors as BoTorch models (`pip install 'ssla[botorch]'`): acquisition functions and `optimize_acqf` take them.

    model = ssla.botorch.train(X, Y, bounds=bounds)        # a small network, trained and fitted
    model = ssla.botorch.SSLAModel(posterior)              # or a posterior of your own network
    candidate, value = optimize_acqf(qLogExpectedImprovement(model, best_f=Y.max()), bounds, q=1, …)

f is Gaussian under the linearised network, so groups of q inputs are one Gaussian each, with gradients in X. New observations
condition that Gaussian exactly: in closed form over the inputs, or by `posterior.update` where the mode can follow.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import replace
from itertools import pairwise
from typing import Any, NamedTuple, cast, final

import torch
from torch import Tensor, nn
from torch.func import functional_call

from ssla import priors, tuning
from ssla._checks import finite, positive
from ssla.likelihoods import Gaussian
from ssla.network import module_of
from ssla.network.layout import contiguous_layout
from ssla.network.unset import unset_linear
from ssla.posterior import Posterior, fit
from ssla.predictive.functions import joint_of_groups
from ssla.state import VARIATIONAL, State, Variational

try:
    from botorch.models.deterministic import GenericDeterministicModel
    from botorch.models.model import FantasizeMixin, Model
    from botorch.posteriors.gpytorch import GPyTorchPosterior
    from gpytorch.distributions import MultitaskMultivariateNormal, MultivariateNormal
    from scipy.optimize import minimize
except ImportError as error:
    if (error.name or "").partition(".")[0] not in ("botorch", "gpytorch", "linear_operator", "scipy"):
        raise
    raise ImportError("ssla.botorch needs BoTorch: pip install 'ssla[botorch]'.") from None

__all__ = ["SSLAModel", "train"]

FIRST_NOISE = 0.1  # of standardised outcomes, before the evidence chooses


class Observations(NamedTuple):
    """Rows that condition f, in batches that broadcast: x (…, n, d), y (…, n, m) and noise variances (…, n, m) or None."""

    x: Tensor
    y: Tensor
    noise: Tensor | None


@final
class SSLAModel(Model, FantasizeMixin):  # type: ignore[misc]
    """A posterior with Gaussian noise as a BoTorch model: of f, or of y with observation_noise=True.

    posterior: of `ssla.fit`, one output for each outcome.
    offset, scale: of the outcomes: Y = offset + scale · y, if the network was trained on y = (Y − offset)/scale. Numbers or (m,).

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
            raise TypeError(f"SSLAModel takes a Posterior, as ssla.fit returns it, but got a {type(posterior).__name__}.")
        if not isinstance(posterior.likelihood, Gaussian):
            raise ValueError(
                "A BoTorch model needs outcomes that are the network's outputs plus Gaussian noise, but the likelihood is "
                f"{posterior.likelihood!r}. Fit with likelihood=ssla.likelihoods.Gaussian(…), for classes or counts on a "
                "numerical score of them."
            )
        m = posterior.network.outputs
        self.fitted, self.observations = posterior, observations
        self.offset, self.scale = (_per_output(name, value, m) for name, value in (("offset", offset), ("scale", scale)))
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

    def posterior(
        self,
        X: Tensor,
        output_indices: list[int] | None = None,
        observation_noise: bool | Tensor = False,
        posterior_transform: Any = None,
    ) -> Any:
        """The joint Gaussian of q inputs in each batch.  X (…, q, d) -> a GPyTorchPosterior over (…, q, m).

        observation_noise: True adds the likelihood's noise; a tensor (…, q, m) or (…, 1, m) holds variances in units of Y².
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
        mean, K = mean.to(X), K.to(X)
        single = mean.shape[-1] == 1
        law = MultivariateNormal(mean.squeeze(-1), K) if single else MultitaskMultivariateNormal(mean, K, interleaved=True)
        found = GPyTorchPosterior(law)
        return found if posterior_transform is None else posterior_transform(found, X=X)

    def _conditioned(self, X: Tensor) -> tuple[Tensor, Tensor]:
        """The mean (…, q·m) and covariance of f, on the network's scale, given the observations."""
        if self.observations is None:
            return self._joint(X)
        x, y, noise = self.observations
        n, batch = y.shape[-2] * y.shape[-1], torch.broadcast_shapes(X.shape[:-2], x.shape[:-2])
        both = torch.cat([x.to(X).expand(*batch, *x.shape[-2:]), X.expand(*batch, *X.shape[-2:])], -2)
        mean, K = self._joint(both)
        added = torch.block_diag(*[self._noise()] * y.shape[-2]) if noise is None else torch.diag_embed(noise.flatten(-2))
        factor = torch.linalg.cholesky(K[..., :n, :n] + added)
        white = torch.linalg.solve_triangular(factor, K[..., :n, n:], upper=False)  # (…, n, q·m)
        residual = torch.linalg.solve_triangular(factor, (y.flatten(-2) - mean[..., :n]).unsqueeze(-1), upper=False)
        moved = mean[..., n:] + (white.mT @ residual).squeeze(-1)
        left = K[..., n:, n:] - white.mT @ white
        return moved, left.expand(*moved.shape[:-1], *left.shape[-2:])

    def _joint(self, X: Tensor) -> tuple[Tensor, Tensor]:
        q, batch = X.shape[-2], X.shape[:-2]
        found = joint_of_groups(self.fitted.state, X.reshape(-1, X.shape[-1]), q, differentiable=True)
        return found.mean.reshape(*batch, -1), found.covariance.reshape(*batch, *found.covariance.shape[-2:])

    def _noise(self, scale: Tensor | None = None) -> Tensor:
        """Σ (m, m), by default on the network's scale."""
        sigma = self.likelihood.covariance_for(self.offset)
        return sigma if scale is None else scale[:, None] * sigma * scale

    def condition_on_observations(self, X: Tensor, Y: Tensor, noise: Tensor | None = None, **_: Any) -> SSLAModel:
        """The model given more rows.  X (…, n, d), Y (…, n, m), noise variances (…, n, m) in units of Y² if they are known.

        One batch goes through `posterior.update` where that moves the mode: a polished last layer, with dense or kfac curvature.
        Otherwise, and for batches of fantasies, the Gaussian of f is conditioned, with gradients in X and Y. Prior, noise and
        features stay: call `train` again for new ones.
        """
        _check_inputs(X)
        if not isinstance(Y, Tensor) or Y.shape[-1:] != (self.num_outputs,) or Y.shape[-2:-1] != X.shape[-2:-1]:
            raise ValueError(
                f"Y must be (…, n, m) with n = {X.shape[-2]} rows, as X has, and m = {self.num_outputs} outcomes, but has shape "
                f"{tuple(Y.shape) if isinstance(Y, Tensor) else type(Y).__name__}. Give one outcome as Y[:, None]."
            )
        finite("Y", Y, "Drop those rows.")
        y = (Y.double() - self.offset) / self.scale
        known = None if noise is None else noise.double().expand(Y.shape) / self.scale**2
        plain = self.observations is None and known is None and X.dim() == Y.dim() == 2
        graph = torch.is_grad_enabled() and (X.requires_grad or Y.requires_grad)
        if plain and not graph and self.fitted.state.follows_mode:
            return self._with(self.fitted.update((X, y.squeeze(-1) if self.num_outputs == 1 else y)), None)
        return self._with(self.fitted, _joined(self.observations, Observations(X, y, known), self._noise().diagonal()))

    def _with(self, posterior: Posterior, observations: Observations | None) -> SSLAModel:
        return SSLAModel(posterior, offset=self.offset, scale=self.scale, observations=observations)

    def draw_functions(self, n: int, generator: torch.Generator | None = None) -> list[Any]:
        """n draws of f as deterministic models, for Thompson sampling: maximise `PosteriorMean(draw)`, one for each candidate.

        A draw is one function: its values at different inputs, and in different calls, belong together.
        """
        if self.observations is not None:
            raise ValueError(
                "Functions are drawn from a fitted posterior, but this model is conditioned on fantasies or on rows that its "
                "posterior has not seen. Draw from the model before, or train on all rows."
            )
        return [self._deterministic(f) for f in self.fitted.draw_functions(n, generator)]

    def _deterministic(self, function: Any) -> Any:
        def values(X: Tensor) -> Tensor:
            _check_inputs(X)
            f: Tensor = function(X.reshape(-1, X.shape[-1]), differentiable=True).double()
            return (self.offset + self.scale * f).reshape(*X.shape[:-1], -1).to(X)

        return GenericDeterministicModel(values, num_outputs=self.num_outputs)


class Inputs(nn.Module):
    """Numbers from their bounds to [−1, 1]; a category, a whole number from 0, to one column for each of its values."""

    low: Tensor
    width: Tensor

    def __init__(self, bounds: Tensor, categories: Mapping[int, int]) -> None:
        super().__init__()
        self.categories = dict(categories)
        self.numbers = [i for i in range(bounds.shape[1]) if i not in categories]
        self.register_buffer("low", bounds[0, self.numbers])
        self.register_buffer("width", bounds[1, self.numbers] - bounds[0, self.numbers])

    def forward(self, x: Tensor) -> Tensor:
        parts = [2 * (x[:, self.numbers] - self.low) / self.width - 1]
        parts += [(x[:, i, None].round() == torch.arange(k, device=x.device)).to(x) for i, k in self.categories.items()]
        return torch.cat(parts, 1)


def train(
    X: Tensor,
    Y: Tensor,
    *,
    bounds: Tensor | None = None,
    categories: Mapping[int, int] | None = None,
    noise: float | None = None,
    hidden: Sequence[int] = (50, 50),
    start: SSLAModel | None = None,
    rounds: int | None = None,
    steps: int = 300,
    seed: int = 0,
) -> SSLAModel:
    """Train a tanh network on X (n, d) and Y (n, m), and fit a posterior over all of its weights.

    Outcomes are standardised. Each round finds the mode of the log posterior by L-BFGS, in at most `steps` iterations, and then
    the precision of each layer and the noise by the evidence (MacKay). Draws random numbers only for the first weights.

    bounds: (2, d), those of the search; by default the range of X.
    categories: column -> number of categories, for columns that hold 0, 1, 2, …
    noise: the standard deviation of Y, if it is known.
    start: a model of `train` from which weights, prior and noise continue, with the bounds and layers of that model: after one
    more observation one round (the default then; otherwise 3) is enough, at a fraction of the time.
    """
    x, y, offset, scale = _standardised(X, Y)
    count = (3 if start is None else 1) if rounds is None else rounds
    if count < 1 or steps < 1:
        raise ValueError(f"rounds and steps must be at least 1, but are {count} and {steps}.")
    if start is None:
        network, prior = _untrained(x, y.shape[1], bounds, dict(categories or {}), tuple(hidden), seed)
        likelihood = Gaussian(noise=FIRST_NOISE)
    else:
        network, prior, likelihood = _from_there(start, bounds is None and categories is None)
    if noise is not None:
        likelihood = Gaussian(noise=noise / scale)
    rows = (x, y.squeeze(1) if y.shape[1] == 1 else y)
    over = ("prior", "noise") if noise is None else ("prior",)
    for _ in range(count):
        _to_mode(network, prior, likelihood, rows, steps)
        state = fit(network, rows, likelihood=likelihood, prior=prior, weights="all", mode="tilt").state
        state = tuning.tune(state, "evidence", None, over, True, None, quiet=True)
        prior, likelihood = state.prior, cast("Gaussian", state.likelihood)
    return SSLAModel(Posterior(_linearised(state)), offset=offset, scale=scale)


def _from_there(start: SSLAModel, alone: bool) -> tuple[nn.Module, priors.Prior, Gaussian]:
    """A copy of the network of an earlier model, its prior and its noise."""
    network = deepcopy(module_of(start.fitted.network))
    if not alone:
        raise ValueError("bounds and categories are those of start. Give them only without start=.")
    if not isinstance(network, nn.Sequential) or not isinstance(network[0], Inputs):
        raise ValueError("start must be a model of ssla.botorch.train, but it has another network. Leave start= out.")
    return network, start.fitted.prior, start.likelihood


def _linearised(state: State) -> State:
    """The exact posterior of the linearised network: its mean is one Newton step from θ̂, which need not be the mode."""
    report = replace(state.report, gaussian=VARIATIONAL, rounds=1)
    return replace(state, variational=Variational(state.theta, state.statistics, tilted=False), report=report).recentred()


def _standardised(X: Tensor, Y: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """x, y, and the mean and standard deviation of Y, in float64."""
    _check_inputs(X)
    if X.dim() != 2 or not isinstance(Y, Tensor) or Y.dim() != 2 or len(X) != len(Y) or len(X) < 2:
        shown = tuple(Y.shape) if isinstance(Y, Tensor) else type(Y).__name__
        raise ValueError(
            f"train needs X (n, d) and Y (n, m) with the same n, at least 2, but X is {tuple(X.shape)} and Y is {shown}. Give "
            "one outcome as Y[:, None]."
        )
    finite("Y", Y, "Drop those rows.")
    x, Y = X.detach().double(), Y.detach().double()
    offset, scale = Y.mean(0), Y.std(0)
    positive("The standard deviation of Y", scale, "Observe more inputs first: a constant outcome has no scale.")
    return x, (Y - offset) / scale, offset, scale


def _untrained(
    x: Tensor, outputs: int, bounds: Tensor | None, categories: dict[int, int], hidden: tuple[int, ...], seed: int
) -> tuple[nn.Module, priors.Prior]:
    """A network with random weights of variance 1/inputs, and the prior that they are drawn from."""
    bounds = torch.stack([x.amin(0), x.amax(0)]) if bounds is None else torch.as_tensor(bounds, dtype=torch.float64)
    numbers = [i for i in range(x.shape[1]) if i not in categories]
    if bounds.shape != (2, x.shape[1]) or not bool((bounds[0] < bounds[1])[numbers].all()):
        raise ValueError(f"bounds must be (2, {x.shape[1]}), lower before upper in every column, but are {bounds.tolist()}.")
    for column, count in categories.items():
        if not 0 <= column < x.shape[1] or not bool(
            ((x[:, column] >= 0) & (x[:, column] < count) & (x[:, column] % 1 == 0)).all()
        ):
            raise ValueError(
                f"categories={categories} needs a column {column} of whole numbers from 0 to {count - 1}. Number the categories."
            )
    widths = (len(numbers) + sum(categories.values()), *hidden, outputs)
    layers: list[nn.Module] = [Inputs(bounds, categories)]
    for inside, out in pairwise(widths):
        layers += [unset_linear(inside, out, torch.float64), nn.Tanh()]
    network, generator = nn.Sequential(*layers[:-1]).eval(), torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in network.parameters():
            p.copy_(torch.randn(p.shape, generator=generator, dtype=p.dtype) / (p.shape[1] ** 0.5 if p.dim() == 2 else 1.0))
    precision = {name: float(p.shape[1]) if p.dim() == 2 else 1.0 for name, p in network.named_parameters()}
    return network, priors.Gaussian(precision)


def _to_mode(network: nn.Module, prior: priors.Prior, likelihood: Gaussian, rows: tuple[Tensor, Tensor], steps: int) -> None:
    """Move our own network's weights to the mode of the log posterior."""
    x, y = rows
    layout = contiguous_layout({name: p.shape for name, p in network.named_parameters()})
    bound = prior.bind(layout)

    def objective(flat: Any) -> tuple[float, Any]:
        theta = torch.from_numpy(flat.copy()).requires_grad_(True)
        loss = -likelihood.log_prob(y, functional_call(network, layout.unpack(theta), (x,))).sum()
        (slope,) = torch.autograd.grad(loss, theta)
        theta = theta.detach()
        return float(loss.detach()) - float(bound.log_prob(theta)), (slope - bound.gradient(theta)).numpy()

    first = torch.cat([p.detach().flatten() for p in network.parameters()]).numpy()
    found = minimize(objective, first, jac=True, method="L-BFGS-B", options={"maxiter": steps, "maxfun": 2 * steps})
    network.load_state_dict(layout.unpack(torch.from_numpy(found.x)), strict=False)


def _per_output(name: str, value: float | Tensor, m: int) -> Tensor:
    found = torch.as_tensor(value, dtype=torch.float64).detach()
    if found.dim() > 1 or found.numel() not in (1, m):
        raise ValueError(f"{name} must be a number, or one for each of the {m} outcomes, but has shape {tuple(found.shape)}.")
    finite(name, found, "Give the mean and standard deviation that the targets were standardised by.")
    return found.expand(m)


def _check_inputs(X: Tensor) -> None:
    if not isinstance(X, Tensor) or not X.is_floating_point() or X.dim() < 2:
        shown = f"{X.dtype} of shape {tuple(X.shape)}" if isinstance(X, Tensor) else type(X).__name__
        raise ValueError(f"X must be a tensor of floating-point numbers (…, q, d), but is {shown}. Give one input as X[None].")
    finite("X", X, "Drop those inputs.")


def _joined(old: Observations | None, new: Observations, usual: Tensor) -> Observations:
    """Both sets of rows, with their batches broadcast. usual: the noise variances where they are not given."""
    if old is None:
        return new
    batch = torch.broadcast_shapes(*(part.shape[:-2] for rows in (old, new) for part in rows[:2]))
    given = old.noise is not None or new.noise is not None

    def both(a: Tensor, b: Tensor) -> Tensor:
        return torch.cat([part.expand(*batch, *part.shape[-2:]) for part in (a, b)], -2)

    noises = [rows.y.new_ones(rows.y.shape) * usual if rows.noise is None else rows.noise for rows in (old, new)]
    return Observations(both(old.x, new.x.to(old.x)), both(old.y, new.y), both(*noises) if given else None)
