"""
Low-rank adapters: named parameters
===================================

A large frozen layer with a trainable low-rank addition, as in LoRA. ``weights=`` takes a list of parameter names, so the
posterior is over the adapter alone: 64 numbers in place of 1,024.
"""

import matplotlib.pyplot as plt
import torch

import ssla
from ssla import plots

torch.manual_seed(0)


class Adapted(torch.nn.Module):
    """frozen(x) + up(down(x))."""

    def __init__(self, frozen, rank):
        super().__init__()
        self.frozen = frozen.requires_grad_(False)
        self.down = torch.nn.Linear(frozen.in_features, rank, bias=False)
        self.up = torch.nn.Linear(rank, frozen.out_features, bias=False)
        torch.nn.init.zeros_(self.up.weight)

    def forward(self, x):
        return self.frozen(x) + self.up(self.down(x))


x = 4 * torch.rand(120, 1) - 2
y = torch.sin(2 * x[:, 0]) + 0.15 * torch.randn(120)
embed, head = (
    torch.nn.Linear(1, 32).requires_grad_(False),
    torch.nn.Linear(32, 1).requires_grad_(False),
)
model = torch.nn.Sequential(
    embed, torch.nn.Tanh(), Adapted(torch.nn.Linear(32, 32), rank=1), torch.nn.Tanh(), head
)
optimiser = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=0.02)
for _ in range(1500):
    optimiser.zero_grad()
    (
        (model(x)[:, 0] - y).square().mean()
        + 1e-4 * sum(p.square().sum() for p in model.parameters() if p.requires_grad)
    ).backward()
    optimiser.step()

posterior = ssla.fit(
    model.eval(),
    (x, y),
    likelihood=ssla.likelihoods.Gaussian(noise="estimate"),
    weights=["2.down.weight", "2.up.weight"],
)
print(posterior.report)

grid = torch.linspace(-3.5, 3.5, 150)[:, None]
figure, ax = plt.subplots(figsize=(7, 4))
plots.bands(posterior.predict(grid), grid, (x, y), ax=ax)
ax.set(xlabel="x", ylabel="y")
figure.tight_layout()
