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

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, final

import torch
from torch import Tensor

from ssla._checks import check_finite, check_positive, in_plain_torch
from ssla.likelihoods import Gaussian
from ssla.posterior import Posterior
from ssla.predictive.functions import compute_joint_of_groups

try:
    from botorch.models.deterministic import GenericDeterministicModel
    from botorch.models.model import FantasizeMixin, Model
    from botorch.posteriors.gpytorch import GPyTorchPosterior
    from gpytorch.distributions import MultitaskMultivariateNormal, MultivariateNormal
    from linear_operator import to_linear_operator

    from ssla.integrations import cosine_networks  # which needs SciPy
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
        """Check the arguments; TypeError for another posterior, ValueError for another likelihood
        or wrong offsets and scales.
        """
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
        self.fitted = posterior
        self.observations = observations
        self.offset = _expand_to_outputs("offset", offset, m)
        self.scale = _expand_to_outputs("scale", scale, m)
        check_positive("scale", self.scale)
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
        """The likelihood of y, on the network's own scale."""
        likelihood = self.fitted.likelihood
        assert isinstance(likelihood, Gaussian)
        return likelihood

    @in_plain_torch
    def posterior(
        self,
        X: Tensor,
        output_indices: list[int] | None = None,
        observation_noise: bool | Tensor = False,
        posterior_transform: Any = None,
    ) -> Any:
        """Compute the joint Gaussian of q inputs in each batch.

        X (…, q, d) -> a GPyTorchPosterior over (…, q, m).

        observation_noise: True adds the likelihood's noise; a tensor (…, q, m) or (…, 1, m) holds
        variances in units of Y². output_indices: the outcomes to return, all by default.
        posterior_transform: of BoTorch, applied to the result. ValueError for a wrong X.
        """
        _check_inputs(X)
        mean, K = self._conditional_moments(X)
        q, m = X.shape[-2], self.num_outputs
        mean = self.offset + self.scale * mean.unflatten(-1, (q, m))
        stretch = self.scale.repeat(q)
        K = stretch[:, None] * K * stretch
        if isinstance(observation_noise, Tensor):
            K = K + torch.diag_embed(observation_noise.double().expand(*mean.shape).flatten(-2))
        elif observation_noise:
            K = K + torch.block_diag(*[self._noise_covariance(self.scale)] * q)
        if output_indices is not None:
            mean = mean[..., output_indices]
            rows = (torch.arange(q)[:, None] * m + torch.arange(m)[output_indices]).flatten()
            K = K[..., rows, :][..., rows]
        mean = mean.to(X)
        # A lazy operator is factorised only where BoTorch draws: K may be singular without noise.
        covariance = to_linear_operator(K.to(X))
        if mean.shape[-1] == 1:
            law = MultivariateNormal(mean.squeeze(-1), covariance)
        else:
            law = MultitaskMultivariateNormal(mean, covariance, interleaved=True)
        result = GPyTorchPosterior(law)
        return result if posterior_transform is None else posterior_transform(result, X=X)

    def _conditional_moments(self, X: Tensor) -> tuple[Tensor, Tensor]:
        """Compute the mean (…, q·m) and covariance (…, q·m, q·m) of f given the observations, on
        the network's scale.  X (…, q, d).
        """
        if self.observations is None:
            return self._joint_moments(X)
        x, y, noise = self.observations
        batch = torch.broadcast_shapes(X.shape[:-2], x.shape[:-2])
        rows = [t.expand(*batch, *t.shape[-2:]) for t in (x.to(X), X)]
        mean, K = self._joint_moments(torch.cat(rows, -2))
        if noise is None:
            noise_covariance = torch.block_diag(*[self._noise_covariance()] * y.shape[-2])
        else:
            noise_covariance = torch.diag_embed(noise.flatten(-2))
        # The first n outputs are observed: the others follow by conditioning the joint Gaussian.
        n = y.shape[-2] * y.shape[-1]
        factor = torch.linalg.cholesky(K[..., :n, :n] + noise_covariance)
        white = torch.linalg.solve_triangular(factor, K[..., :n, n:], upper=False)  # (…, n, q·m)
        residual = torch.linalg.solve_triangular(
            factor, (y.flatten(-2) - mean[..., :n]).unsqueeze(-1), upper=False
        )
        moved = mean[..., n:] + (white.mT @ residual).squeeze(-1)
        remaining = K[..., n:, n:] - white.mT @ white
        return moved, remaining.expand(*moved.shape[:-1], *remaining.shape[-2:])

    def _joint_moments(self, X: Tensor) -> tuple[Tensor, Tensor]:
        """Compute the mean (…, q·m) and covariance (…, q·m, q·m) of f under the fitted posterior.

        X (…, q, d).
        """
        q, batch = X.shape[-2], X.shape[:-2]
        joint = compute_joint_of_groups(
            self.fitted, X.reshape(-1, X.shape[-1]), q, differentiable=True
        )
        K = joint.covariance
        return joint.mean.reshape(*batch, -1), K.reshape(*batch, *K.shape[-2:])

    def _noise_covariance(self, scale: Tensor | None = None) -> Tensor:
        """Return the noise covariance Σ (m, m), by default on the network's scale."""
        sigma = self.likelihood.covariance_for(self.offset)
        return sigma if scale is None else scale[:, None] * sigma * scale

    @in_plain_torch
    def condition_on_observations(
        self, X: Tensor, Y: Tensor, noise: Tensor | None = None, **_: Any
    ) -> SSLAModel:
        """Return the model given more rows.

        X (…, n, d), Y (…, n, m), noise variances (…, n, m) in units of Y² if they are known.

        One batch goes through `posterior.update` where that moves the mode: a polished last layer,
        with dense or kfac curvature. Otherwise, and for batches of fantasies, the Gaussian of f is
        conditioned, with gradients in X and Y. Prior, noise and features stay: call `train` again
        for new ones. ValueError for wrong shapes or values that are not finite.
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
        check_finite("Y", Y, "Drop those rows.")
        y = (Y.double() - self.offset) / self.scale
        known_noise = None if noise is None else noise.double().expand(Y.shape) / self.scale**2
        # An update has the noise of the likelihood, one batch, and no gradients in X and Y.
        is_plain = self.observations is None and known_noise is None and X.dim() == Y.dim() == 2
        needs_graph = torch.is_grad_enabled() and (X.requires_grad or Y.requires_grad)
        if is_plain and not needs_graph and self.fitted.updates_mode_from_sums:
            updated = self.fitted.update((X, y.squeeze(-1) if self.num_outputs == 1 else y))
            return SSLAModel(updated, offset=self.offset, scale=self.scale)
        observations = _join_observations(
            self.observations, Observations(X, y, known_noise), self._noise_covariance().diagonal()
        )
        return SSLAModel(
            self.fitted, offset=self.offset, scale=self.scale, observations=observations
        )

    @in_plain_torch
    def draw_functions(self, n: int, generator: torch.Generator | None = None) -> list[Any]:
        """Draw n functions f as deterministic models, for Thompson sampling: maximise
        `PosteriorMean(draw)`, one for each candidate.

        A draw is one function: its values at different inputs, and in different calls, belong
        together. ValueError for a model that is conditioned on observations.
        """
        if self.observations is not None:
            raise ValueError(
                "Functions are drawn from a fitted posterior, but this model is conditioned on "
                "fantasies or on rows that its posterior has not seen. Draw from the model before, "
                "or train on all rows."
            )
        return [self._deterministic_model(f) for f in self.fitted.draw_functions(n, generator)]

    def _deterministic_model(self, function: Any) -> Any:
        """Return a drawn function as a deterministic model, in units of Y."""

        def evaluate(X: Tensor) -> Tensor:
            """Evaluate the function at X (…, q, d) -> (…, q, m)."""
            _check_inputs(X)
            f: Tensor = function(X.reshape(-1, X.shape[-1]), differentiable=True).double()
            return (self.offset + self.scale * f).reshape(*X.shape[:-1], -1).to(X)

        return GenericDeterministicModel(evaluate, num_outputs=self.num_outputs)


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

    Raises ValueError for data, bounds, categories or a start that do not fit each other.
    """
    x, y, offset, scale = _standardise(X, Y)
    if rounds < 1 or steps < 1:
        raise ValueError(f"rounds and steps must be at least 1, but are {rounds} and {steps}.")
    if start is None:
        network = cosine_networks.draw_network(
            x, y.shape[1], bounds, dict(categories or {}), tuple(hidden), seed
        )
        settings = cosine_networks.expect_settings(network)
    elif bounds is None and categories is None:
        network, settings = cosine_networks.continue_from(start.fitted)
    else:
        raise ValueError("bounds and categories are those of start. Give them only without start=.")
    known_noise = None if noise is None else noise / scale
    posterior = cosine_networks.fit_by_evidence(network, settings, x, y, known_noise, rounds, steps)
    return SSLAModel(posterior, offset=offset, scale=scale)


def _standardise(X: Tensor, Y: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return x, standardised y, and the mean and standard deviation of Y (m,), in float64.

    X (n, d), Y (n, m). Raises ValueError for other shapes, values that are not finite, or a
    constant outcome.
    """
    _check_inputs(X)
    if X.dim() != 2 or not isinstance(Y, Tensor) or Y.dim() != 2 or len(X) != len(Y) or len(X) < 2:
        shown = tuple(Y.shape) if isinstance(Y, Tensor) else type(Y).__name__
        raise ValueError(
            "train needs X (n, d) and Y (n, m) with the same n, at least 2, but X is "
            f"{tuple(X.shape)} and Y is {shown}. Give one outcome as Y[:, None]."
        )
    check_finite("Y", Y, "Drop those rows.")
    x, Y = X.detach().double(), Y.detach().double()
    offset, scale = Y.mean(0), Y.std(0)
    check_positive(
        "The standard deviation of Y",
        scale,
        "Observe more inputs first: a constant outcome has no scale.",
    )
    return x, (Y - offset) / scale, offset, scale


def _expand_to_outputs(name: str, value: float | Tensor, m: int) -> Tensor:
    """Return a number, or one for each outcome, as (m,) in float64; ValueError for another shape or
    values that are not finite.
    """
    numbers = torch.as_tensor(value, dtype=torch.float64).detach()
    if numbers.dim() > 1 or numbers.numel() not in (1, m):
        raise ValueError(
            f"{name} must be a number, or one for each of the {m} outcomes, but has shape "
            f"{tuple(numbers.shape)}."
        )
    check_finite(
        name, numbers, "Give the mean and standard deviation that the targets were standardised by."
    )
    return numbers.expand(m)


def _check_inputs(X: Tensor) -> None:
    """Raise ValueError unless X is a finite floating-point tensor (…, q, d)."""
    if not isinstance(X, Tensor) or not X.is_floating_point() or X.dim() < 2:
        shown = (
            f"{X.dtype} of shape {tuple(X.shape)}" if isinstance(X, Tensor) else type(X).__name__
        )
        raise ValueError(
            f"X must be a tensor of floating-point numbers (…, q, d), but is {shown}. Give one "
            "input as X[None]."
        )
    check_finite("X", X, "Drop those inputs.")


def _join_observations(
    old: Observations | None, new: Observations, usual_noise: Tensor
) -> Observations:
    """Append new rows to the old ones, with their batches broadcast.

    usual_noise (m,): the variances where they are not given.
    """
    if old is None:
        return new
    batch = torch.broadcast_shapes(*(t.shape[:-2] for t in (old.x, old.y, new.x, new.y)))

    def append(first: Tensor, second: Tensor) -> Tensor:
        """Join rows (…, n, k) of both, in the broadcast batch."""
        return torch.cat([t.expand(*batch, *t.shape[-2:]) for t in (first, second)], -2)

    noise = None
    if old.noise is not None or new.noise is not None:
        noise = append(_noise_of(old, usual_noise), _noise_of(new, usual_noise))
    return Observations(append(old.x, new.x.to(old.x)), append(old.y, new.y), noise)


def _noise_of(rows: Observations, usual_noise: Tensor) -> Tensor:
    """Return the noise variances of rows (…, n, m); usual_noise (m,) where they are not given."""
    return rows.y.new_ones(rows.y.shape) * usual_noise if rows.noise is None else rows.noise
