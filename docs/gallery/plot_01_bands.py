"""
Bands over one input
====================

A small network with Gaussian noise. Inside the data the width of the bands is the noise. In the gap and outside, where no
row says what the function does, the bands grow.
"""

import matplotlib.pyplot as plt
import torch

import ssla
from ssla import plots

torch.manual_seed(0)
x = torch.cat([torch.linspace(-3, -0.5, 60), torch.linspace(1.5, 3, 40)])[:, None]
y = torch.sin(2 * x[:, 0]) + 0.15 * torch.randn(100)

model = torch.nn.Sequential(torch.nn.Linear(1, 50), torch.nn.Tanh(), torch.nn.Linear(50, 1))
optimiser = torch.optim.Adam(model.parameters(), lr=0.01)
for _ in range(800):
    optimiser.zero_grad()
    (model(x)[:, 0] - y).square().mean().backward()
    optimiser.step()

# %%
# One call fits the posterior of the last layer; the noise and the prior are found from the data.
posterior = ssla.fit(
    model.eval(), (x, y), likelihood=ssla.likelihoods.Gaussian(noise="estimate")
)
grid = torch.linspace(-4.5, 4.5, 200)[:, None]
predictive = posterior.predict(grid)

figure, ax = plt.subplots(figsize=(7, 4))
plots.bands(predictive, grid, (x, y), ax=ax)
ax.set(xlabel="x", ylabel="y", ylim=(-3.5, 3.5))
figure.tight_layout()

# %%
# The width has two parts: noise, which stays, and uncertainty about the network, which more data would remove.
for at in (-2.0, 0.5, 4.0):
    one = posterior.predict(torch.tensor([[at]]))
    noise, network = one.aleatoric.sqrt().item(), one.epistemic.sqrt().item()
    sd = one.stddev.item()
    print(f"x = {at:4.1f}: sd {sd:.2f}, noise {noise:.2f}, network {network:.2f}")
