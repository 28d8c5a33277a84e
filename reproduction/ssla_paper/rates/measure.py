"""One data set of one model: the step of the refit, and its gain."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor
from torch.func import grad, jacrev, vmap

import ssla
from ssla_paper.runner import Record

F64 = torch.float64
MODELS = ("linear", "poisson", "network")
BOUNDED = "linear, x_i = 1/i"
NOISE = {"linear": 0.5, "network": 0.25, BOUNDED: 0.5}
POINTS = {"linear": (0.5, -0.3), "poisson": (0.5, -0.3), "network": (0.5, -0.3), BOUNDED: (1.0,)}
TARGETS = {"linear": 2.0, "poisson": 5.0, "network": 2.0, BOUNDED: 2.0}
TRUTH = {
    "linear": (1.0, -0.5, 0.3),
    "poisson": (0.5, -0.3, 0.5),
    "network": (1.5, 0.4, -0.4, 1.3, 0.5, -0.4, 1.5, -1.2, 0.4),
    BOUNDED: (1.0,),
}


def output(model: str, theta: Tensor, x: Tensor) -> Tensor:
    """f_θ(x) of one row x (2,) or (1,)."""
    if model == "network":
        W, b, v, c = theta[:4].reshape(2, 2), theta[4:6], theta[6:8], theta[8]
        return v @ torch.tanh(W @ x + b) + c
    return theta[:-1] @ x + theta[-1] if model != BOUNDED else theta[0] * x[0]


def log_prob(model: str, row: Tensor, theta: Tensor) -> Tensor:
    """log p(y | x, θ) of one row (x…, y), without terms that do not depend on θ."""
    f, y = output(model, theta, row[:-1]), row[-1]
    return y * f - f.exp() if model == "poisson" else -0.5 * ((y - f) / NOISE[model]) ** 2


def rows(model: str, n: int, seed: int) -> Tensor:
    """n rows (x…, y) from the model itself."""
    x_source, y_source = (torch.Generator().manual_seed(2 * seed + i) for i in range(2))
    x = torch.randn(n, 2, dtype=F64, generator=x_source)
    if model == BOUNDED:
        x = 1 / torch.arange(1, n + 1, dtype=F64).unsqueeze(1)
    f = vmap(partial(output, model), in_dims=(None, 0))(torch.tensor(TRUTH[model], dtype=F64), x)
    if model == "poisson":
        y = torch.poisson(f.exp(), generator=y_source)
    else:
        y = f + NOISE[model] * torch.randn(n, dtype=F64, generator=y_source)
    return torch.cat([x, y.unsqueeze(1)], 1)


def one(model: str, seed: int, sizes: list[int]) -> Record:
    """Every quantity at every n, for one seed."""
    data = rows(model, max(sizes), seed)
    found = [measure(model, data[:n]) for n in sizes]
    return {
        "model": model,
        "seed": seed,
        "n": sizes,
        **{key: [point[key] for point in found] for key in found[0]},
    }


def measure(model: str, data: Tensor) -> dict[str, float]:
    """Every quantity for one data set (n, E)."""

    def own(theta: Tensor, row: Tensor) -> Tensor:
        return log_prob(model, row, theta)

    def total(theta: Tensor, some: Tensor) -> Tensor:
        return vmap(own, in_dims=(None, 0))(theta, some).sum()

    def curvature(theta: Tensor, some: Tensor) -> Tensor:  # −∇²ℓ of some rows
        found: Tensor = -jacrev(grad(total))(theta, some)
        return found

    known = ssla.ExplicitModel(
        partial(log_prob, model), data, TRUTH[model], ssla.priors.Gaussian(1.0)
    )
    new = torch.tensor([[*POINTS[model], TARGETS[model]]], dtype=F64)
    hat, tilde = known.mode, known.modes(new)[0]
    parts, still = known.increments(new), known.increments(new, refit=False)
    f = output(model, hat, new[0, :-1])
    self_predicted = torch.cat([new[0, :-1], (f.exp() if model == "poisson" else f).reshape(1)])
    at_prediction = [
        known.increments(self_predicted.unsqueeze(0), refit=refit).total for refit in (True, False)
    ]

    J = curvature(hat, data)
    augmented = torch.cat([data, new])
    J_hat, J_tilde = (curvature(theta, augmented) for theta in (hat, tilde))
    step = tilde - hat
    newton = torch.linalg.solve(
        J_hat + torch.eye(len(hat), dtype=F64), grad(own)(hat, new[0])
    )  # the unit prior's precision
    gradients = vmap(grad(own), in_dims=(None, 0))(hat, data)
    own_gradient = grad(own)(hat, self_predicted)
    G = gradients.sum(0) + own_gradient
    Jx = jacrev(lambda t: output(model, t, new[0, :-1]))(hat)
    fisher = float(f.exp()) if model == "poisson" else NOISE[model] ** -2
    gain = parts.likelihood + parts.prior - own(hat, new[0])
    return {
        "step": float(step.norm()),
        "along": float(step @ newton / (newton @ newton)),
        "cosine": float(step @ newton / (step.norm() * newton.norm())),
        "smallest": float(torch.linalg.eigvalsh(J)[0]),
        "gain": float(gain),
        "loss": float(own(tilde, new[0]) - own(hat, new[0]) - gain),
        "bend": float((J_tilde - J_hat).norm()) / len(data),
        "prior": float(parts.prior.abs()),
        "curvature": float(parts.curvature.abs()),
        "gap": float((parts.total - still.total).abs()),
        "gap_at_prediction": float((at_prediction[0] - at_prediction[1]).abs()),
        "outer": float(G @ G)
        / float(curvature(hat, torch.cat([data, self_predicted.unsqueeze(0)])).trace()),
        "rows_outer": float(gradients.square().sum() / J.trace()),
        "own_outer": float(own_gradient.square().sum()),
        "own_fisher": fisher * float(Jx.square().sum()),
    }
