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
# The blue bars are the predictive, the orange dots the network's own Poisson law.
counts = torch.arange(0, 30.0)
figure, axes = plt.subplots(1, 2, figsize=(8, 3.6), sharey=True)
for row, ax in enumerate(axes):
    ax.bar(counts, predictive.log_prob(counts[None]).exp()[row], color="#2f6db5", label="predictive")
    ax.plot(counts, plug_in.log_prob(counts[None]).exp()[row], "o", ms=4, color="#d1651f", label="network itself")
    low, high = predictive.interval(0.9)[row].tolist()
    ax.set(title=f"x = {places[row].item():.1f}, 90% interval {low:.0f} … {high:.0f}", xlabel="count")
axes[0].set_ylabel("probability")
axes[0].legend()
figure.tight_layout()
