"""
Data that arrive later
======================

A posterior is made of sums over rows, so new rows are added without reading the old ones: ``posterior.update(rows)``. With
Gaussian noise and a last layer the result is that of one fit on all rows.
"""

import matplotlib.pyplot as plt
import torch

import ssla
from ssla import plots

torch.manual_seed(0)
x = (6 * torch.rand(240, 1) - 3).double()
y = torch.sin(2 * x[:, 0]) + 0.2 * torch.randn(240).double()
centres = torch.linspace(-3, 3, 12).double()


class Bumps(torch.nn.Module):
    """Fixed features and a linear head."""

    def __init__(self):
        super().__init__()
        self.head = torch.nn.Linear(12, 1).double()

    def forward(self, x):
        return self.head(torch.exp(-((x - centres) ** 2) / 0.5))


settings = {
    "likelihood": ssla.likelihoods.Gaussian(noise=0.2),
    "prior": ssla.priors.Gaussian(1.0),
}
model = Bumps().eval()
# each day another part of the inputs
day = [x[:, 0] < -1, (x[:, 0] >= -1) & (x[:, 0] < 1), x[:, 0] >= 1]

posterior = ssla.fit(model, (x[day[0]], y[day[0]]), **settings)
grid = torch.linspace(-3.5, 3.5, 150)[:, None].double()
figure, axes = plt.subplots(1, 3, figsize=(9, 3.3), sharey=True)
seen = day[0]
for number, ax in enumerate(axes):
    if number:
        posterior = posterior.update((x[day[number]], y[day[number]]))
        seen = seen | day[number]
    plots.bands(posterior.predict(grid), grid, (x[seen], y[seen]), levels=(0.9,), ax=ax)
    ax.set(
        title=f"day {number + 1}: {int(seen.sum())} rows",
        xlabel="x",
        ylabel="y" if number == 0 else "",
    )
    if ax.get_legend() is not None and number:
        ax.get_legend().remove()
figure.tight_layout()

# %%
whole = ssla.fit(model, (x, y), **settings)
difference = (posterior.predict(grid).mean - whole.predict(grid).mean).abs().max()
print(f"largest difference from one fit on all rows: {difference.item():.1e}")
