"""The methods of the suite. Each is a function of a `Setting` that returns a `Predictor`.

All start from the same trained network and the same validation rows. Last-layer methods start from
the features of the network, so the forward pass of its body is in nobody's time. A method that has
several settings is listed with all of them; `laplace-torch, best` takes the one with the lowest
loss on the validation rows, which is a choice that a user can make.
"""

from __future__ import annotations

import inspect
import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import ssla
from ssla import likelihoods

from . import prototype
from .scores import ClassPrediction, Prediction, RealPrediction, best_temperature
from .tasks import CLASSES, Rows, Task
from .training import MEMBERS, features, in_chunks, trained

try:
    import laplace
except ImportError:
    laplace = None

DROPOUT_PASSES = 50
LAPLACE_DRAWS = 100
LAPLACE_GRID = tuple(10.0 ** (k / 2) for k in range(-6, 9))  # 1e-3 to 1e4, two a decade
JACOBIAN_NUMBERS = 30_000_000  # numbers of a batch's Jacobian in laplace-torch: 120 MB


@dataclass(frozen=True)
class Setting:
    """One trained network with all its rows. `phi` has the features of its last layer as inputs."""

    task: Task
    seed: int
    cache: Path
    raw: Rows
    phi: Rows
    head: nn.Linear

    @property
    def classes(self) -> bool:
        return self.task.kind == CLASSES


# (raw inputs, features) -> prediction
Predictor = Callable[[Tensor, Tensor], Prediction]
Method = Callable[[Setting], Predictor]


class NotApplicable(Exception):  # noqa: N818 (not an error of the run)
    """The method has no meaning for this task, or the installed version has no such argument."""


def plain(f: Tensor) -> ClassPrediction:
    """Softmax of outputs; one member, so its mutual information is zero."""
    probs = torch.softmax(f.double(), -1)
    return ClassPrediction(probs, torch.special.entr(probs).sum(-1))


def averaged(members: Tensor) -> ClassPrediction:
    """The mean of class probabilities (members, N, C)."""
    return ClassPrediction(members.mean(0), torch.special.entr(members).sum(-1).mean(0))


# --- the network itself -------------------------------------------------------------------------


def residual_sd(setting: Setting, rows: tuple[Tensor, Tensor]) -> float:
    f = in_chunks(setting.head, rows[0])[:, 0]
    return float((f - rows[1]).square().mean().sqrt())


def constant_sd(setting: Setting, sd: float) -> Predictor:
    def predict(x: Tensor, phi: Tensor) -> Prediction:
        mean = in_chunks(setting.head, phi)[:, 0]
        return RealPrediction(mean, torch.full_like(mean, sd), torch.zeros_like(mean))

    return predict


def plug_in(setting: Setting) -> Predictor:
    """The network alone; of a regression with the σ of its training residuals."""
    if not setting.classes:
        return constant_sd(setting, residual_sd(setting, setting.phi.train))
    return lambda x, phi: plain(in_chunks(setting.head, phi))


def temperature(setting: Setting) -> Predictor:
    """Temperature scaling by the validation rows; of a regression the σ of their residuals."""
    if not setting.classes:
        return constant_sd(setting, residual_sd(setting, setting.phi.validation))
    phi_val, y_val = setting.phi.validation
    T = best_temperature(in_chunks(setting.head, phi_val), y_val)
    return lambda x, phi: plain(in_chunks(setting.head, phi) / T)


# --- several networks ---------------------------------------------------------------------------


def member_outputs(setting: Setting) -> Callable[[Tensor], Tensor]:
    """Outputs (members, N, C) of the five networks, at raw inputs."""
    networks = [
        trained(setting.task, setting.raw, member, setting.cache) for member in range(MEMBERS)
    ]
    return lambda x: torch.stack([in_chunks(network, x) for network in networks])


def mixture_of_real(f: Tensor, sd: float) -> RealPrediction:
    """The mean and variance of an equal mixture of N(f_m, sd²), as a Gaussian.  f (members, N)."""
    epistemic = f.var(0, correction=0)
    return RealPrediction(f.mean(0), (epistemic + sd**2).sqrt(), epistemic.sqrt())


def ensemble(setting: Setting) -> Predictor:
    """Deep ensemble of five: the mean of their probabilities. A regression has the plug-in's σ."""
    outputs = member_outputs(setting)
    if setting.classes:
        return lambda x, phi: averaged(torch.softmax(outputs(x), -1))
    sd = residual_sd(setting, setting.phi.train)
    return lambda x, phi: mixture_of_real(outputs(x)[..., 0], sd)


def ensemble_temperature(setting: Setting) -> Predictor:
    """As `ensemble`, with one temperature (or σ) for the average by the validation rows."""
    outputs = member_outputs(setting)
    x_val, y_val = setting.raw.validation
    f_val = outputs(x_val)
    if setting.classes:
        log_probs = torch.softmax(f_val, -1).mean(0).clamp_min(1e-30).log()
        T = best_temperature(log_probs, y_val)

        def predict(x: Tensor, phi: Tensor) -> Prediction:
            members = torch.softmax(outputs(x), -1)
            powered = torch.softmax(members.mean(0).clamp_min(1e-30).log() / T, -1)
            # The mutual information is that of the members before the power.
            information = averaged(members).information
            return ClassPrediction(powered, torch.special.entr(powered).sum(-1) - information)

        return predict
    f_val = f_val[..., 0]
    error = (f_val.mean(0) - y_val).square()
    spread = f_val.var(0, correction=0)
    grid = torch.logspace(-3, 1, 200)

    def loss(sd: Tensor) -> float:
        variance = spread + sd**2
        return float((0.5 * variance.log() + 0.5 * error / variance).mean())

    best = float(min(grid, key=loss))
    return lambda x, phi: mixture_of_real(outputs(x)[..., 0], best)


def dropout(setting: Setting) -> Predictor:
    """Monte Carlo dropout, fifty passes with the dropout layers alone in training mode."""
    if not setting.task.dropout:
        raise NotApplicable("The network has no dropout.")
    network = trained(setting.task, setting.raw, setting.seed, setting.cache)
    for module in network.modules():
        if isinstance(module, nn.Dropout):
            module.train()
        # Attention applies its dropout itself, in training mode. The layers around it would take a
        # fused path without any dropout.
        if isinstance(module, nn.MultiheadAttention | nn.TransformerEncoderLayer):
            module.training = True

    def predict(x: Tensor, phi: Tensor) -> Prediction:
        torch.manual_seed(0)
        return averaged(
            torch.stack([torch.softmax(in_chunks(network, x), -1) for _ in range(DROPOUT_PASSES)])
        )

    return predict


# --- laplace-torch ------------------------------------------------------------------------------


@dataclass(frozen=True)
class LaplaceSetting:
    """structure "kron" or "full"; prior "marglik" or "grid"; link "probit" or "mc" (of classes)."""

    structure: str
    prior: str
    link: str

    @property
    def name(self) -> str:
        prior = {"marglik": "marginal likelihood", "grid": "grid search"}[self.prior]
        return f"laplace-torch {self.structure}, {prior}" + (f", {self.link}" if self.link else "")


MOST_FULL_WEIGHTS = 2_000  # not measured: 5,130 weights and 50,000 rows are 26 TFLOP


def laplace_fit(setting: Setting, structure: str, sd: float = 1.0) -> Any:
    """The package's last-layer approximation, fitted to features with one linear layer."""
    if laplace is None:
        raise NotApplicable(
            "laplace-torch is not installed: pip install -r benchmarks/requirements-peers.txt"
        )
    head = setting.head
    weights = sum(p.numel() for p in head.parameters())
    if structure == "full" and weights > MOST_FULL_WEIGHTS:
        raise NotApplicable(f"A full matrix of {weights} weights is left out for its cost.")
    model = nn.Sequential(nn.Identity(), head)
    options: dict[str, Any] = {} if setting.classes else {"sigma_noise": sd}
    found = laplace.Laplace(
        model,
        "classification" if setting.classes else "regression",
        subset_of_weights="last_layer",
        hessian_structure=structure,
        **options,
    )
    found.fit(loader(setting, setting.phi.train))
    return found


def batch_rows(setting: Setting) -> int:
    """Rows whose Jacobian (rows, C, P) has at most JACOBIAN_NUMBERS numbers."""
    head = setting.head
    weights = sum(p.numel() for p in head.parameters())
    return max(4, min(1_000, JACOBIAN_NUMBERS // (weights * head.out_features)))


def loader(setting: Setting, rows: tuple[Tensor, Tensor]) -> DataLoader[Any]:
    x, y = rows
    target = y if setting.classes else y[:, None]
    return DataLoader(TensorDataset(x, target), batch_size=batch_rows(setting))


MANY_CLASSES = 50  # beyond, weights are drawn: the Jacobian of one clinc row has 46 MB


def laplace_outputs(setting: Setting, found: Any, phi: Tensor) -> tuple[Tensor, Tensor]:
    """Mean (N, C) and covariance (N, C, C) of the outputs."""
    means = []
    covariances = []
    for part in phi.split(batch_rows(setting)):
        mean, covariance = found._glm_predictive_distribution(part)
        means.append(mean)
        covariances.append(covariance)
    return torch.cat(means), torch.cat(covariances)


def laplace_probs(setting: Setting, found: Any, phi: Tensor, link: str) -> ClassPrediction:
    """The package's probit or Monte Carlo predictive of linearised outputs.

    With many classes the Monte Carlo predictive draws weights (pred_type="nn"), which is the same
    for a last layer.
    """
    torch.manual_seed(0)
    if setting.head.out_features > MANY_CLASSES:
        if link == "probit":
            raise NotApplicable(
                "The probit link needs Jacobians of (classes, weights) for each row."
            )
        with torch.no_grad():
            draws = found.sample(LAPLACE_DRAWS)
            size = setting.head.weight.numel()
            total = torch.zeros(len(phi), setting.head.out_features)
            entropies = torch.zeros(len(phi))
            for draw in draws:
                weight = draw[:size].reshape_as(setting.head.weight)
                probs = torch.softmax(nn.functional.linear(phi, weight, draw[size:]), -1)
                total += probs / len(draws)
                entropies += torch.special.entr(probs).sum(-1) / len(draws)
        return ClassPrediction(total, entropies)
    mean, covariance = laplace_outputs(setting, found, phi)
    if link == "probit":
        kappa = (1 + math.pi / 8 * covariance.diagonal(dim1=1, dim2=2)).rsqrt()
        return plain(kappa * mean)
    # As the package does: a Cholesky factor of each covariance.
    scale = torch.linalg.cholesky(covariance + 1e-6 * torch.eye(mean.shape[1]))
    total = torch.zeros_like(mean)
    entropies = torch.zeros(len(mean))
    for _ in range(LAPLACE_DRAWS):
        f = mean + (scale @ torch.randn(*mean.shape, 1))[..., 0]
        probs = torch.softmax(f.double(), -1)
        total += probs / LAPLACE_DRAWS
        entropies += torch.special.entr(probs).sum(-1) / LAPLACE_DRAWS
    return ClassPrediction(total, entropies)


def laplace_real(setting: Setting, found: Any, phi: Tensor) -> RealPrediction:
    mean, covariance = laplace_outputs(setting, found, phi)
    epistemic = covariance[:, 0, 0]
    sd = (epistemic + float(found.sigma_noise) ** 2).sqrt()
    return RealPrediction(mean[:, 0], sd, epistemic.sqrt())


def laplace_predict(setting: Setting, found: Any, link: str) -> Predictor:
    if setting.classes:
        return lambda x, phi: laplace_probs(setting, found, phi, link)
    return lambda x, phi: laplace_real(setting, found, phi)


def set_by_marginal_likelihood(setting: Setting, found: Any) -> None:
    """As in the package's documentation: its own optimiser; of a regression Adam on τ and σ."""
    if setting.classes:
        found.optimize_prior_precision(pred_type="glm", method="marglik", prior_structure="scalar")
        return
    log_prior = torch.zeros(1, requires_grad=True)
    log_sigma = torch.zeros(1, requires_grad=True)
    optimiser = torch.optim.Adam([log_prior, log_sigma], lr=1e-1)
    for _ in range(100):
        optimiser.zero_grad()
        loss = -found.log_marginal_likelihood(log_prior.exp(), log_sigma.exp())
        loss.backward()
        optimiser.step()
    found.prior_precision = log_prior.detach().exp()
    found.sigma_noise = log_sigma.detach().exp()


def set_by_grid(setting: Setting, found: Any, link: str) -> None:
    """The precision of a grid with the lowest loss on the validation rows.

    The package's own grid search scores a regression by its squared error, which no precision
    changes; here the score is the log-loss for classes and for a regression, with σ by the
    validation residuals.
    """
    phi_val, y_val = setting.phi.validation
    best = math.inf, 0.0
    for precision in LAPLACE_GRID:
        found.prior_precision = precision
        prediction = laplace_predict(setting, found, link)(phi_val, phi_val)
        loss = float(prediction.losses(y_val).mean())
        best = min(best, (loss, precision))
    found.prior_precision = best[1]


def laplace_method(options: LaplaceSetting) -> Method:
    def method(setting: Setting) -> Predictor:
        if setting.classes == (options.link == ""):
            raise NotApplicable("Links are of classes.")
        with torch.enable_grad():
            grid = options.prior == "grid"
            sd = (
                residual_sd(setting, setting.phi.validation)
                if grid and not setting.classes
                else 1.0
            )
            found = laplace_fit(setting, options.structure, sd)
            if not grid:
                set_by_marginal_likelihood(setting, found)
        if grid:
            set_by_grid(setting, found, options.link)
        return laplace_predict(setting, found, options.link)

    return method


LAPLACE_SETTINGS = [
    LaplaceSetting(structure, prior, link)
    for structure in ("kron", "full")
    for prior in ("marglik", "grid")
    for link in ("probit", "mc", "")
]


# --- ssla ---------------------------------------------------------------------------------------


def likelihood_of(setting: Setting) -> Any:
    return likelihoods.Categorical() if setting.classes else likelihoods.Gaussian(noise="estimate")


def ssla_predict(posterior: Any) -> Predictor:
    def predict(x: Tensor, phi: Tensor) -> Prediction:
        found = posterior.predict(phi)
        if found.kind == "class":
            probs = found.probs.float()
            information = getattr(found, "mutual_information", None)
            entropy = torch.special.entr(probs).sum(-1)
            if information is None:
                return ClassPrediction(probs, torch.full_like(entropy, math.nan))
            return ClassPrediction(probs, entropy - information.float())
        return RealPrediction(
            found.mean.float(),
            found.variance.sqrt().float(),
            found.epistemic.sqrt().float(),
            predictive=found,
        )

    return predict


def ssla_fit(setting: Setting, **options: Any) -> Predictor:
    """`ssla.fit` of the head on features."""
    names = inspect.signature(ssla.fit).parameters
    for name in options:
        if name not in names:
            raise NotApplicable(f"This version of ssla.fit has no argument {name!r}.")
    model = nn.Sequential(setting.head).eval()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        posterior = ssla.fit(model, setting.phi.train, likelihood=likelihood_of(setting), **options)
    return ssla_predict(posterior)


def ssla_default(setting: Setting) -> Predictor:
    """`ssla.fit` without validation rows."""
    return ssla_fit(setting)


def ssla_validation(setting: Setting) -> Predictor:
    """`ssla.fit` with validation=."""
    return ssla_fit(setting, validation=setting.phi.validation)


def ssla_kfac(setting: Setting) -> Predictor:
    return ssla_fit(setting, structure="kfac")


def ssla_kfac_laplace(setting: Setting) -> Predictor:
    """kfac at the trained head with precision 1: a reference without any choice."""
    prior = ssla.priors.Gaussian(precision=1.0)
    return ssla_fit(setting, structure="kfac", gaussian="laplace", mode="tilt", prior=prior)


# --- the prototype of the rule ------------------------------------------------------------------


def prototype_method(gaussian: str) -> Method:
    def method(setting: Setting) -> Predictor:
        if not setting.classes:
            raise NotApplicable("The prototype is for classes.")
        head = prototype.Head(setting.phi.train[0], in_chunks(setting.head, setting.phi.train[0]))
        phi_val, y_val = setting.phi.validation
        f_val = in_chunks(setting.head, phi_val)
        pick = prototype.chosen(prototype.Search(head, gaussian, phi_val, f_val, y_val).run())
        cov = head.covariance(pick.B, pick.precision)

        def predict(x: Tensor, phi: Tensor) -> Prediction:
            f = in_chunks(setting.head, phi)
            return ClassPrediction(*prototype.predict(cov, phi, f, pick.temperature))

        return predict

    return method


METHODS: dict[str, Method] = {
    "plug-in": plug_in,
    "temperature": temperature,
    **{options.name: laplace_method(options) for options in LAPLACE_SETTINGS},
    "MC dropout": dropout,
    "ensemble of 5": ensemble,
    "ensemble of 5, temperature": ensemble_temperature,
    "ssla": ssla_default,
    "ssla, validation": ssla_validation,
    "ssla kfac": ssla_kfac,
    "ssla kfac, laplace, precision 1": ssla_kfac_laplace,
    "prototype, laplace": prototype_method(prototype.LAPLACE),
    "prototype, variational": prototype_method(prototype.VARIATIONAL),
}


def setting_of(task: Task, seed: int, cache: Path, raw: Rows) -> Setting:
    phi, head = features(task, raw, seed, cache)
    for parameter in head.parameters():
        parameter.requires_grad_(True)
    return Setting(task, seed, cache, raw, phi, head)
