"""
Counts
======

A Poisson likelihood on a network that predicts the logarithm of the mean. Predictives are distributions over whole numbers,
with intervals whose ends are counts. Where there are no data the rate is uncertain, and the counts spread more than a
Poisson law.
"""

import matplotlib.pyplot as plt
import torch

import ssla
from ssla import plots

torch.manual_seed(0)
x = 4 * torch.rand(25, 1) - 2
y = torch.poisson(torch.exp(1 + torch.sin(1.5 * x[:, 0])))

model = torch.nn.Sequential(torch.nn.Linear(1, 30), torch.nn.Tanh(), torch.nn.Linear(30, 1))
optimiser = torch.optim.Adam(model.parameters(), lr=0.01)
for _ in range(400):
    optimiser.zero_grad()
    torch.nn.functional.poisson_nll_loss(model(x)[:, 0], y).backward()
    optimiser.step()

posterior = ssla.fit(model.eval(), (x, y), likelihood=ssla.likelihoods.Poisson())
places = torch.tensor([[0.9], [3.2]])
predictive, plug_in = posterior.predict(places), posterior.predict(places, refit="plug_in")

# %%
# Dashed: the network's own Poisson law. The shaded counts have 90% probability.
figure, axes = plt.subplots(1, 2, figsize=(8, 3.6), sharey=True)
for row, ax in enumerate(axes):
    plots.density({"network itself": plug_in, "predictive": predictive}, row, ax=ax)
    low, high = predictive.interval(0.9)[row].tolist()
    title = f"x = {places[row].item():.1f}, 90% interval {low:.0f} … {high:.0f}"
    ax.set(title=title, xlabel="count")
figure.tight_layout()
