"""
A prior that contradicts the data
=================================

The data have slope 0.8. The prior expects −3. A weak prior gives way to the data; a strong one wins. ``ssla.conflict``
reports whether the data are ones that the prior expects. No step here needs a second pass over the data.
"""

import matplotlib.pyplot as plt
import torch

import ssla

torch.manual_seed(0)
x = torch.linspace(-2, 2, 12, dtype=torch.float64)[:, None]
y = 1 + 0.8 * x[:, 0] + 0.5 * torch.randn(12, dtype=torch.float64)
posterior = ssla.fit(
    torch.nn.Linear(1, 1).double().eval(),
    (x, y),
    likelihood=ssla.likelihoods.Gaussian(noise=0.5),
    prior=ssla.priors.Gaussian(0.1),
)

grid = torch.linspace(-3, 3, 100, dtype=torch.float64)[:, None]
figure, ax = plt.subplots(figsize=(7, 4))
for precision, colour in ((0.1, "#9ecae1"), (10.0, "#4292c6"), (100.0, "#08306b")):
    prior = ssla.priors.Gaussian(precision, mean={"weight": -3.0, "bias": 0.0})
    other = posterior.with_prior(prior)
    predictive = other.predict(grid)
    low, high = predictive.interval(0.9).unbind(-1)
    ax.fill_between(grid[:, 0], low, high, color=colour, alpha=0.25, lw=0)
    ax.plot(grid[:, 0], predictive.mean, color=colour, label=f"precision {precision:g}")
    print(f"precision {precision:5g}: {ssla.conflict(other)}")
ax.plot(x[:, 0], y, "o", ms=4, color="#333333")
ax.set(xlabel="x", ylabel="y", title="prior slope −3, means and 90% intervals")
ax.legend()
figure.tight_layout()
