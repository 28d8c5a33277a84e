"""How far each rung is from the truth: a small heteroscedastic network whose predictive is known by long Hamiltonian Monte Carlo.

    python benchmarks/truth.py [--rows 150] [--samples 500]

Prints the mean KL divergence from the truth to each predictive over test inputs inside and outside the data. The Monte Carlo
error of the truth is shown by the KL between its two halves. Chains start around the mode, so they explore the
one that was trained and what is connected to it, which is what every rung approximates.
"""

from __future__ import annotations

import argparse

import torch
from torch import Tensor, nn

import ssla

CHAINS = 64
LEAPS = 16
PRECISION = 0.5


def train(rows: int) -> tuple[nn.Sequential, Tensor, Tensor]:
    """A 1-2-2 tanh network at the mode of its posterior (P = 10)."""
    generator = torch.Generator().manual_seed(0)
    x = 4 * torch.rand(rows, 1, dtype=torch.float64, generator=generator) - 2
    noise = 0.15 + 0.15 * torch.sigmoid(2 * x[:, 0])
    y = torch.tanh(1.5 * x[:, 0]) + noise * torch.randn(rows, dtype=torch.float64, generator=generator)
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(1, 2), nn.Tanh(), nn.Linear(2, 2)).double()
    law = ssla.likelihoods.HeteroscedasticGaussian()
    optimiser = torch.optim.LBFGS(model.parameters(), max_iter=2000, tolerance_grad=1e-9, line_search_fn="strong_wolfe")

    def loss() -> Tensor:
        optimiser.zero_grad()
        value = -law.log_prob(y, model(x)).sum() + 0.5 * PRECISION * sum((p**2).sum() for p in model.parameters())
        value.backward()
        return value

    optimiser.step(loss)
    return model.eval(), x, y


def hmc(post: ssla.Posterior, x: Tensor, y: Tensor, samples: int) -> Tensor:
    """Draws of θ (samples, chains, P): many chains at once, momentum scaled by the posterior's own curvature."""
    generator = torch.Generator().manual_seed(2)
    layout, law = post.network.layout, ssla.likelihoods.HeteroscedasticGaussian()
    covariance = torch.linalg.inv(post.operator.factor @ post.operator.factor.mT)
    root = torch.linalg.cholesky(covariance)

    def value_and_gradient(v: Tensor) -> tuple[Tensor, Tensor]:
        free = v.detach().requires_grad_(True)
        theta = post.theta + free @ root.mT
        named = {name: theta[:, index] for name, index in layout.positions.items()}
        hidden = torch.tanh(x[:, 0] * named["0.weight"] + named["0.bias"].unsqueeze(-1))  # (chains, hidden, n)
        f = (named["2.weight"] @ hidden + named["2.bias"].unsqueeze(-1)).mT
        log = law.log_prob(y, f).sum(-1) - 0.5 * PRECISION * (theta**2).sum(-1)
        (gradient,) = torch.autograd.grad(log.sum(), free)
        return log.detach(), gradient

    v = 0.2 * torch.randn(CHAINS, len(post.theta), dtype=torch.float64, generator=generator)
    here, gradient = value_and_gradient(v)
    size, kept, accepted = 0.2, [], 0.0
    for round_ in range(samples + 500):
        p = torch.randn(v.shape, dtype=torch.float64, generator=generator)
        start, w, g = here - 0.5 * (p**2).sum(-1), v, gradient
        for _ in range(LEAPS):
            p = p + 0.5 * size * g
            w = w + size * p
            there, g = value_and_gradient(w)
            p = p + 0.5 * size * g
        gain = torch.nan_to_num(there - 0.5 * (p**2).sum(-1) - start, nan=-torch.inf)
        take = torch.rand(CHAINS, dtype=torch.float64, generator=generator).log() < gain
        v, here = torch.where(take[:, None], w, v), torch.where(take, there, here)
        gradient = torch.where(take[:, None], g, gradient)
        if round_ < 500:
            size *= 1.02 if float(take.double().mean()) > 0.8 else 0.97
        else:
            kept.append(post.theta + v @ root.mT)
            accepted += float(take.double().mean()) / samples
    print(f"HMC: {CHAINS} chains × {samples} draws, {accepted:.0%} accepted, step {size:.2f}\n")
    return torch.stack(kept)


def predictive_log_density(model: nn.Sequential, layout, thetas: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """log mean_θ p(y|f_θ(x)) for x (N, 1), y (N, k)."""
    law = ssla.likelihoods.HeteroscedasticGaussian()
    total = torch.full(y.shape, -torch.inf, dtype=torch.float64)
    flat = thetas.reshape(-1, thetas.shape[-1])
    for part in flat.split(2000):
        named = {name: part[:, index] for name, index in layout.positions.items()}
        hidden = torch.tanh(x[:, 0] * named["0.weight"] + named["0.bias"].unsqueeze(-1))
        f = (named["2.weight"] @ hidden + named["2.bias"].unsqueeze(-1)).mT  # (draws, N, 2)
        total = torch.logaddexp(total, law.log_prob(y, f.unsqueeze(2)).logsumexp(0))
    return total - torch.log(torch.tensor(float(len(flat)), dtype=torch.float64))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rows", type=int, default=150)
    parser.add_argument("--samples", type=int, default=500)
    options = parser.parse_args()
    model, x, y = train(options.rows)
    post = ssla.fit(
        model, (x, y), likelihood=ssla.likelihoods.HeteroscedasticGaussian(), prior=ssla.priors.Gaussian(PRECISION), weights="all"
    )
    draws = hmc(post, x, y, options.samples)
    inside = torch.linspace(-1.9, 1.9, 12, dtype=torch.float64)[:, None]
    outside = torch.tensor([-2.6, -2.3, 2.3, 2.6], dtype=torch.float64)[:, None]
    new = torch.cat([inside, outside])
    f = model(new).detach()
    t = torch.linspace(-1, 1, 401, dtype=torch.float64)
    grid = f[:, :1] + 14 * (0.5 * f[:, 1:]).exp() * torch.sign(t) * t.abs() ** 1.7
    weights = torch.zeros_like(grid)
    weights[:, 1:-1] = (grid[:, 2:] - grid[:, :-2]) / 2
    layout = post.network.layout
    truth = predictive_log_density(model, layout, draws, new, grid)

    def kl(log_q: Tensor) -> list[float]:
        each = (truth.exp() * (truth - log_q) * weights).sum(1)
        return [float(each[: len(inside)].mean()), float(each[len(inside) :].mean())]

    generator = torch.Generator().manual_seed(3)
    mean, K = post.marginal(new)
    root = torch.linalg.cholesky(K)
    white = torch.randn(20_000, *mean.shape, 1, dtype=torch.float64, generator=generator)
    outputs = mean + (root @ white).squeeze(-1)
    law = ssla.likelihoods.HeteroscedasticGaussian()
    linearised = torch.cat(
        [law.log_prob(row, o.unsqueeze(1)).logsumexp(0)[None] for row, o in zip(grid, outputs.unbind(1), strict=True)]
    )
    halves = [predictive_log_density(model, layout, half, new, grid) for half in draws.chunk(2, 1)]
    rows = {
        "plug-in": post.predict(new, refit="plug_in").log_prob(grid),
        "ASSLA (none)": post.predict(new, refit="none").log_prob(grid),
        "newton": post.predict(new, refit="newton").log_prob(grid),
        "output": post.predict(new, refit="output").log_prob(grid),
        "linearised Monte Carlo": linearised - torch.log(torch.tensor(20_000.0, dtype=torch.float64)),
        "weights (SSLA)": post.predict(new, refit="weights").log_prob(grid),
        "weights, full Hessian": post.predict(new, refit=ssla.WeightRefit(curvature="hessian")).log_prob(grid),
    }
    print(f"| KL from the truth, n = {options.rows}, P = {len(post.theta)} | inside the data | outside |\n|---|---|---|")
    for name, log_q in rows.items():
        a, b = kl(log_q)
        print(f"| {name} | {a:.1e} | {b:.1e} |")
    noise = (halves[0].exp() * (halves[0] - halves[1]) * weights).sum(1)
    print(f"| *one half of the truth to the other* | {float(noise[:12].mean()):.1e} | {float(noise[12:].mean()):.1e} |")
    for name in ("output", "weights"):
        print(f"\n{name}: {post.predict(new, refit=name).diagnostics}; mass {post.predict(new, refit=name).mass.tolist()}")


if __name__ == "__main__":
    main()
