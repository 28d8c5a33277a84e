"""
A prior that contradicts the data
=================================

The data have slope 0.8. The prior expects −3. A weak prior gives way to the data; a strong one wins. ``ssla.conflict``
reports whether the data are ones that the prior expects. No step here needs a second pass over the data.
"""

import matplotlib.pyplot as plt
import torch

import ssla
from ssla import plots

torch.manual_seed(0)
x = torch.linspace(-2, 2, 12, dtype=torch.float64)[:, None]
y = 1 + 0.8 * x[:, 0] + 0.5 * torch.randn(12, dtype=torch.float64)
posterior = ssla.fit(
    torch.nn.Linear(1, 1).double().eval(),
    (x, y),
    likelihood=ssla.likelihoods.Gaussian(noise=0.5),
    prior=ssla.priors.Gaussian(0.1),
)

expected = {"weight": -3.0, "bias": 0.0}
priors = {f"precision {p:g}": ssla.priors.Gaussian(p, expected) for p in (0.1, 10.0, 100.0)}
for name, prior in priors.items():
    print(f"{name + ':':14} {ssla.conflict(posterior.with_prior(prior))}")

grid = torch.linspace(-3, 3, 100, dtype=torch.float64)[:, None]
figure, ax = plt.subplots(figsize=(7, 4))
plots.prior_bands(ssla.sensitivity(posterior, grid, priors), grid, ax=ax)
ax.plot(x[:, 0], y, "o", ms=4, color="#333333")
ax.set(xlabel="x", ylabel="y", title="prior slope −3, means and 90% intervals")
figure.tight_layout()
