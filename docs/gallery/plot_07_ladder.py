"""
The ladder of refits, against the truth
=======================================

Five counts and one unknown rate on the log scale: small enough that the true predictive is an integral over one number,
computed here by brute force. The refits are the rungs of a ladder: no refit (ASSLA), and a real refit for every candidate
count (SSLA). For network-sized checks against long NUTS chains see the tables in :doc:`/models` and :doc:`/refits`.
"""

import matplotlib.pyplot as plt
import torch

import ssla

data = torch.tensor([0.0, 2, 1, 0, 3], dtype=torch.float64)
y = torch.arange(0, 12, dtype=torch.float64)


def log_poisson(count, theta):
    return count * theta[0] - theta[0].exp() - torch.lgamma(count + 1)


model = ssla.ExplicitModel(log_poisson, data, [0.0], ssla.priors.Gaussian(1.0))

# %%
# The truth: the posterior of θ on a fine grid.
theta = torch.linspace(-8, 5, 40_001, dtype=torch.float64)
log_posterior = (data[:, None] * theta - theta.exp()).sum(0) - theta.square() / 2
weights = torch.softmax(log_posterior, 0)
truth = (
    torch.exp(y[:, None] * theta - theta.exp() - torch.lgamma(y + 1)[:, None]) * weights
).sum(-1)

mode = model.mode[0]
found = {
    "plug-in": torch.exp(y * mode - mode.exp() - torch.lgamma(y + 1)),
    "ASSLA (no refit)": model.increments(y, refit=False).total.exp(),
    "SSLA (refits)": model.increments(y).total.exp(),
}
figure, (left, right) = plt.subplots(1, 2, figsize=(8.5, 3.8))
left.bar(y, truth, color="#cccccc", label="truth")
for (name, density), marker, colour in zip(
    found.items(), "sD.", ("#d1651f", "#7b3294", "#2f6db5"), strict=True
):
    left.plot(y, density, marker, color=colour, ms=7 if marker == "." else 4, label=name)
    error = (density / truth).log().abs()
    right.semilogy(y, error, marker + "-", color=colour, label=name)
    print(f"{name:18} largest error of the log probability {error.max().item():.4f}")
left.set(xlabel="count", ylabel="probability")
right.set(xlabel="count", ylabel="error of the log probability")
left.legend()
figure.tight_layout()
