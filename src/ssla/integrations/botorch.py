"""Posteriors as BoTorch models (`pip install 'ssla[botorch]'`).

Acquisition functions and `optimize_acqf` take them.

    model = ssla.botorch.train(X, Y, bounds=bounds)        # a small network, trained and fitted
    model = ssla.botorch.SSLAModel(posterior)              # or a posterior of your own network
    candidate, value = optimize_acqf(qLogExpectedImprovement(model, best_f=Y.max()), bounds, q=1, …)

f is Gaussian under the linearised network, so groups of q inputs are one Gaussian each, with
gradients in X. New observations condition that Gaussian exactly: in closed form over the inputs, or
by `posterior.update` where the mode can follow.

X (…, q, d) holds q inputs with d columns in each batch, and Y (…, q, m) their m outcomes, in units
of the user. The network's own scale is y = (Y − offset)/scale. Fantasies are observations that
BoTorch draws from a model, to condition it on them. f, mean and K are of the network's outputs.
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
    """Rows that condition f, in batches that broadcast.

    x is (…, n, d), y (…, n, m), and the noise variances are (…, n, m). None: those of the
    likelihood.
    """

    x: Tensor
    y: Tensor
    noise: Tensor | None


@final
class SSLAModel(Model, FantasizeMixin):  # type: ignore[misc]
    """A posterior with Gaussian noise as a BoTorch model.

    Its answers are of f, or of y with observation_noise=True.

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
        """Check the arguments and store them.

        observations: rows that condition f, on the network's scale; None: there are none. Raises
        TypeError if `posterior` is not a Posterior, and ValueError for another likelihood than
        Gaussian or for wrong offsets and scales.
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
        """Return the number m of outcomes."""
        return self.fitted.network.outputs

    @property
    def batch_shape(self) -> torch.Size:
        """Return the shape of the batch of data sets that the model is conditioned on.

        The shape is empty for one data set.
        """
        if self.observations is None:
            return torch.Size()
        x, y, _ = self.observations
        return torch.Size(torch.broadcast_shapes(x.shape[:-2], y.shape[:-2]))

    @property
    def likelihood(self) -> Gaussian:
        """Return the likelihood of y, in the units in which the network was trained."""
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
        """Return the joint Gaussian of q inputs in each batch, as a GPyTorchPosterior.

        X is (…, q, d), and the result is over (…, q, m), in units of Y.

        observation_noise: whether the Gaussian is of y and not of f. True adds the likelihood's
        noise; a tensor (…, q, m) or (…, 1, m) holds variances in units of Y².
        output_indices: the outcomes to return; None: all.
        posterior_transform: one of BoTorch, applied to the result; None: none.

        Raises ValueError if X is not a finite floating-point tensor (…, q, d), or if the noise does
        not broadcast to (…, q, m), and LinAlgError if the model is conditioned on observations
        whose covariance is singular to rounding.
        """
        _check_inputs(X)
        mean, K = self._compute_conditional_moments(X)
        q = X.shape[-2]
        m = self.num_outputs

        # In units of Y. K is (…, q·m, q·m), with the m outcomes of an input side by side.
        mean = self.offset + self.scale * mean.unflatten(-1, (q, m))
        scales = self.scale.repeat(q)
        K = scales[:, None] * K * scales
        if isinstance(observation_noise, Tensor):
            noise = _expand_noise("observation_noise", observation_noise, mean.shape)
            K = K + torch.diag_embed(noise.flatten(-2))
        elif observation_noise:
            K = K + torch.block_diag(*[self._compute_noise_covariance(self.scale)] * q)

        if output_indices is not None:
            mean = mean[..., output_indices]
            # The row of outcome j of input i is i·m + j.
            rows = (torch.arange(q)[:, None] * m + torch.arange(m)[output_indices]).flatten()
            K = K[..., rows, :][..., rows]

        result = _make_botorch_posterior(mean.to(X), K.to(X))
        return result if posterior_transform is None else posterior_transform(result, X=X)

    def _compute_conditional_moments(self, X: Tensor) -> tuple[Tensor, Tensor]:
        """Return the mean (…, q·m) and covariance K (…, q·m, q·m) of f, given the observations.

        X is (…, q, d), and f is on the network's scale. Raises LinAlgError if the covariance of the
        observations is singular to rounding.
        """
        if self.observations is None:
            return self._compute_joint_moments(X)
        x, y, noise = self.observations
        batch = torch.broadcast_shapes(X.shape[:-2], x.shape[:-2])
        rows = [inputs.expand(*batch, *inputs.shape[-2:]) for inputs in (x.to(X), X)]
        mean, K = self._compute_joint_moments(torch.cat(rows, -2))
        if noise is None:
            noise_covariance = torch.block_diag(*[self._compute_noise_covariance()] * y.shape[-2])
        else:
            noise_covariance = torch.diag_embed(noise.flatten(-2))

        # The first n outputs are observed: the others follow by conditioning the joint Gaussian.
        n = y.shape[-2] * y.shape[-1]
        factor = torch.linalg.cholesky(K[..., :n, :n] + noise_covariance)
        cross_K = K[..., :n, n:]  # (…, n, q·m)
        whitened_K = torch.linalg.solve_triangular(factor, cross_K, upper=False)
        whitened_residual = torch.linalg.solve_triangular(
            factor, (y.flatten(-2) - mean[..., :n]).unsqueeze(-1), upper=False
        )
        conditional_mean = mean[..., n:] + (whitened_K.mT @ whitened_residual).squeeze(-1)
        conditional_K = K[..., n:, n:] - whitened_K.mT @ whitened_K

        # Only the mean depends on y, which may have more batches than the inputs.
        batch = conditional_mean.shape[:-1]
        return conditional_mean, conditional_K.expand(*batch, *conditional_K.shape[-2:])

    def _compute_joint_moments(self, X: Tensor) -> tuple[Tensor, Tensor]:
        """Return the mean (…, q·m) and covariance (…, q·m, q·m) of f at X (…, q, d).

        They are those of the fitted posterior, on the network's scale.
        """
        q = X.shape[-2]
        batch = X.shape[:-2]
        joint = compute_joint_of_groups(
            self.fitted, X.reshape(-1, X.shape[-1]), q, differentiable=True
        )
        K = joint.covariance
        return joint.mean.reshape(*batch, -1), K.reshape(*batch, *K.shape[-2:])

    def _compute_noise_covariance(self, scale: Tensor | None = None) -> Tensor:
        """Return the covariance Σ (m, m) of the likelihood's noise.

        scale (m,): the unit of each outcome, in which Σ is returned; None: on the network's scale.
        """
        sigma = self.likelihood.covariance_for(self.offset)
        return sigma if scale is None else scale[:, None] * sigma * scale

    @in_plain_torch
    def condition_on_observations(
        self, X: Tensor, Y: Tensor, noise: Tensor | None = None, **_: Any
    ) -> SSLAModel:
        """Return the model given more rows X (…, n, d) with outcomes Y (…, n, m).

        One batch is added by `posterior.update` where that moves the mode: for a polished last
        layer with dense or kfac curvature. Otherwise, and for batches of fantasies, the Gaussian of
        f is conditioned, with gradients in X and Y. Prior, noise and features stay the same: call
        `train` again for new ones.

        noise: variances (…, n, m) in units of Y²; None: those of the likelihood. Other keywords are
        part of BoTorch's protocol and are not used. Raises ValueError for wrong shapes, also of the
        noise, or values that are not finite.
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
        known_noise = None
        if noise is not None:
            known_noise = _expand_noise("noise", noise, Y.shape) / self.scale**2

        # An update has the noise of the likelihood, one batch, and no gradients in X and Y.
        is_plain = self.observations is None and known_noise is None and X.dim() == Y.dim() == 2
        needs_graph = torch.is_grad_enabled() and (X.requires_grad or Y.requires_grad)
        if is_plain and not needs_graph and self.fitted.updates_mode_from_sums:
            updated = self.fitted.update((X, y.squeeze(-1) if self.num_outputs == 1 else y))
            return SSLAModel(updated, offset=self.offset, scale=self.scale)
        observations = _join_observations(
            self.observations,
            Observations(X, y, known_noise),
            self._compute_noise_covariance().diagonal(),
        )
        return SSLAModel(
            self.fitted, offset=self.offset, scale=self.scale, observations=observations
        )

    @in_plain_torch
    def draw_functions(self, n: int, generator: torch.Generator | None = None) -> list[Any]:
        """Draw n functions f, and return them as deterministic models of BoTorch.

        The models are for Thompson sampling: maximise `PosteriorMean(draw)`, one for each
        candidate. A draw is one function, so its values in different calls fit each other.
        generator: None is that of torch. Raises ValueError for a model that is conditioned on
        observations.
        """
        if self.observations is not None:
            raise ValueError(
                "Functions are drawn from a fitted posterior, but this model is conditioned on "
                "fantasies or on rows that its posterior has not seen. Draw from the model before, "
                "or train on all rows."
            )
        return [self._make_deterministic_model(f) for f in self.fitted.draw_functions(n, generator)]

    def _make_deterministic_model(self, function: Any) -> Any:
        """Return a drawn function as a deterministic model, in units of Y.

        function: as `Posterior.draw_functions` returns it, on the network's scale.
        """

        def evaluate(X: Tensor) -> Tensor:
            """Return the values (…, q, m) of the function at X (…, q, d)."""
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
    """Fit a posterior over all weights of a cosine network, and return it as a model.

    The rows are X (n, d) and Y (n, m). Outcomes are standardised. The network is linearised at
    random weights, on which the prior is centred. Its length scale for each input, the prior
    precision of each layer and the noise are chosen by the evidence. The posterior of the
    linearised network is then exact. Random numbers are drawn only for the weights.

    bounds: (2, d), those of the search; by default the range of X.
    categories: column -> number of categories, for columns that hold 0, 1, 2, …
    noise: the standard deviation of Y; None: it is chosen by the evidence.
    hidden: the number of cosine units of each layer.
    start: a model of `train` whose weights, length scales, prior and noise are the start, with its
    bounds and layers. None: a new network.
    rounds: the number of linearisations. Each after the first is at the mean of the one before, so
    they are Gauss–Newton steps towards the mode.
    steps: at most as many iterations of L-BFGS in each round.
    seed: of the random weights of a new network.

    Raises ValueError for data, bounds, categories or a start that do not fit each other.
    """
    x, y, offset, scale = _standardise(X, Y)
    if rounds < 1 or steps < 1:
        raise ValueError(f"rounds and steps must be at least 1, but are {rounds} and {steps}.")
    if start is None:
        network = cosine_networks.draw_network(
            x, y.shape[1], bounds, dict(categories or {}), tuple(hidden), seed
        )
        settings = cosine_networks.make_expected_settings(network)
    elif bounds is None and categories is None:
        network, settings = cosine_networks.continue_from(start.fitted)
    else:
        raise ValueError("bounds and categories are those of start. Give them only without start=.")

    known_noise = None if noise is None else noise / scale
    posterior = cosine_networks.fit_by_evidence(network, settings, x, y, known_noise, rounds, steps)
    return SSLAModel(posterior, offset=offset, scale=scale)


def _make_botorch_posterior(mean: Tensor, K: Tensor) -> Any:
    """Return the GPyTorchPosterior with mean (…, q, m) and covariance K (…, q·m, q·m).

    In K the m outcomes of an input are side by side.
    """
    # A lazy operator is factorised only where BoTorch draws: K may be singular without noise.
    covariance = to_linear_operator(K)
    if mean.shape[-1] == 1:
        return GPyTorchPosterior(MultivariateNormal(mean.squeeze(-1), covariance))
    # Interleaved: the outcomes of an input are side by side in the covariance.
    return GPyTorchPosterior(MultitaskMultivariateNormal(mean, covariance, interleaved=True))


def _standardise(X: Tensor, Y: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return x (n, d), standardised y (n, m), and the mean and standard deviation of Y (m,).

    All are in float64 and without gradients. X (n, d) and Y (n, m) with n ≥ 2. Raises ValueError
    for other shapes, values that are not finite, or a constant outcome.
    """
    _check_inputs(X)
    if X.dim() != 2 or not isinstance(Y, Tensor) or Y.dim() != 2 or len(X) != len(Y) or len(X) < 2:
        shown = tuple(Y.shape) if isinstance(Y, Tensor) else type(Y).__name__
        raise ValueError(
            "train needs X (n, d) and Y (n, m) with the same n, at least 2, but X is "
            f"{tuple(X.shape)} and Y is {shown}. Give one outcome as Y[:, None]."
        )

    check_finite("Y", Y, "Drop those rows.")
    x = X.detach().double()
    Y = Y.detach().double()
    offset = Y.mean(0)
    scale = Y.std(0)
    check_positive(
        "The standard deviation of Y",
        scale,
        "Observe more inputs first: a constant outcome has no scale.",
    )
    return x, (Y - offset) / scale, offset, scale


def _expand_to_outputs(name: str, value: float | Tensor, m: int) -> Tensor:
    """Return a number, or one for each of the m outcomes, as (m,) in float64.

    name: the argument, for messages. Raises ValueError for another shape, or values that are not
    finite.
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


def _expand_noise(name: str, noise: Tensor, shape: torch.Size) -> Tensor:
    """Return noise variances expanded to the shape (…, q, m) of outcomes, in float64.

    name: of the argument. Raises ValueError unless the noise broadcasts to the shape.
    """
    try:
        fits = torch.broadcast_shapes(noise.shape, shape) == shape
    except RuntimeError:  # torch's error for shapes that do not broadcast
        fits = False

    if not fits:
        raise ValueError(
            f"{name} must hold variances that broadcast to the outcomes {tuple(shape)}, but has "
            f"shape {tuple(noise.shape)}. Give one variance for each outcome, with the outcomes as "
            "the last dimension."
        )

    return noise.double().expand(shape)


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
    old: Observations | None, new: Observations, likelihood_noise: Tensor
) -> Observations:
    """Return the old rows followed by the new ones, with their batches broadcast.

    old: None is no row. likelihood_noise (m,): the variances of rows that have none of their own.
    The result has no variances if neither has.
    """
    if old is None:
        return new
    batch = torch.broadcast_shapes(*(t.shape[:-2] for t in (old.x, old.y, new.x, new.y)))

    def join_rows(first: Tensor, second: Tensor) -> Tensor:
        """Return the rows of first (…, n₁, k) and second (…, n₂, k), (*batch, n₁ + n₂, k)."""
        return torch.cat([rows.expand(*batch, *rows.shape[-2:]) for rows in (first, second)], -2)

    noise = None
    if old.noise is not None or new.noise is not None:
        noise = join_rows(
            _get_noise_variances(old, likelihood_noise), _get_noise_variances(new, likelihood_noise)
        )

    return Observations(join_rows(old.x, new.x.to(old.x)), join_rows(old.y, new.y), noise)


def _get_noise_variances(rows: Observations, likelihood_noise: Tensor) -> Tensor:
    """Return the noise variances of rows (…, n, m).

    likelihood_noise (m,): the variances of each row if the rows have none of their own.
    """
    if rows.noise is None:
        return rows.y.new_ones(rows.y.shape) * likelihood_noise
    return rows.noise
