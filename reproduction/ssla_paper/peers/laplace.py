"""Classical Laplace by laplace-torch: as published with the noise left at one, or with noise
and prior fitted to the evidence.
"""

from __future__ import annotations

import copy
import math
import warnings

import torch
from torch import Tensor, nn

from ssla_paper.peers import GaussianMixture, library

INSTALL = "laplace-torch"
STEPS, RATE = 150, 0.05


def laplace(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    new: Tensor,
    *,
    subset: str = "last_layer",
    structure: str = "kron",
    noise: float | None = None,
    fit_prior: bool = False,
    scale: Tensor | None = None,
    new_scale: Tensor | None = None,
) -> GaussianMixture:
    """N(f(x), K(x) + σ²) of a network with one output; x (n, d), y (n,), new (N, d).

    structure: "kron", "diag" or "full". noise None: σ and the prior's precision maximise the
    Laplace evidence by Adam, from the training residuals and one; a number is kept, with the prior
    N(0, 1): the published setting is 1. fit_prior: with a given noise, only the prior's precision
    maximises the evidence. scale, new_scale: a known σ(x) > 0 at the rows, by which outputs and
    targets are divided first; σ is then its factor.
    """
    peer = library("laplace", INSTALL)
    net = copy.deepcopy(model).double().eval()
    x, y, new = x.double(), y.double().reshape(-1, 1), new.double()
    if scale is not None and new_scale is not None:
        x, new, y = (
            torch.cat([x, scale.double()[:, None]], 1),
            torch.cat([new, new_scale.double()[:, None]], 1),
            y / scale.double()[:, None],
        )
        net = _divided(net) if subset == "last_layer" else _Divided(net)
    loader: torch.utils.data.DataLoader[tuple[Tensor, ...]] = torch.utils.data.DataLoader(
        torch.utils.data.TensorDataset(x, y), batch_size=512
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        la = peer.Laplace(net, "regression", subset_of_weights=subset, hessian_structure=structure)
        la.fit(loader)
        if noise is None:
            with torch.no_grad():
                noise = _maximise_evidence(
                    la, math.log(float((net(x) - y).square().mean().sqrt()) + 1e-6)
                )
        elif fit_prior:
            _maximise_evidence(la, math.log(noise), noise_too=False)
        else:
            la.sigma_noise = torch.tensor(noise, dtype=torch.float64)
            la.prior_precision = torch.tensor([1.0], dtype=torch.float64)
        with torch.no_grad():
            f, variance = la(new)
    sd = (variance.detach().reshape(-1) + noise**2).sqrt()
    mean = f.detach().reshape(-1)
    if new_scale is not None:
        mean, sd = mean * new_scale.double(), sd * new_scale.double()
    return GaussianMixture(mean[None], sd[None])


class _Divided(nn.Module):
    """f(x) / σ, with σ in the last column."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.net(x[:, :-1]) / x[:, -1:]
        return out


class _Before(nn.Module):
    """(φ(x), 1) / σ, with σ in the last column."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body

    def forward(self, x: Tensor) -> Tensor:
        features = self.body(x[:, :-1])
        return torch.cat([features, torch.ones_like(x[:, -1:])], 1) / x[:, -1:]


def _divided(net: nn.Module) -> nn.Sequential:
    """f / σ with a linear last layer: laplace-torch ignores what comes after it, so the
    division comes before.
    """
    if (
        not isinstance(net, nn.Sequential)
        or not isinstance(net[-1], nn.Linear)
        or net[-1].out_features != 1
    ):
        raise TypeError(
            "A known σ(x) with subset='last_layer' needs an nn.Sequential that ends in "
            "nn.Linear(…, 1)."
        )
    head = nn.Linear(net[-1].in_features + 1, 1, bias=False).double()
    with torch.no_grad():
        head.weight.copy_(torch.cat([net[-1].weight, net[-1].bias[:, None]], 1))
    return nn.Sequential(_Before(net[:-1]), head)


def _maximise_evidence(la: object, log_noise: float, noise_too: bool = True) -> float:
    """Adam on (log σ, log τ), or on log τ alone, as the library's documentation shows; the
    library keeps the result.
    """
    with torch.enable_grad():
        noise = torch.tensor(log_noise, dtype=torch.float64, requires_grad=noise_too)
        prior = torch.zeros(1, dtype=torch.float64, requires_grad=True)
        optimiser = torch.optim.Adam([noise, prior] if noise_too else [prior], lr=RATE)
        for _ in range(STEPS):
            optimiser.zero_grad()
            loss = -la.log_marginal_likelihood(prior.exp(), noise.exp())  # type: ignore[attr-defined]
            loss.backward()
            optimiser.step()
    la.sigma_noise = noise.exp().detach()  # type: ignore[attr-defined]
    la.prior_precision = prior.exp().detach()  # type: ignore[attr-defined]
    return float(noise.exp())
