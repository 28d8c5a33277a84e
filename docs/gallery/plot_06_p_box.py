"""
A set of priors: the p-box
==========================

Nobody knows the right prior exactly. Give a range of means and precisions: ``ssla.credal`` bounds every answer over all of
these priors. The two curves bound the distribution function. The interval has at least 90% probability under every prior of
the box.
"""

import matplotlib.pyplot as plt
import torch

import ssla
from ssla import plots

torch.manual_seed(0)
figure, axes = plt.subplots(1, 2, figsize=(8.5, 3.8), sharey=True)
for ax, n in zip(axes, (8, 80), strict=True):
    x = torch.linspace(-2, 2, n, dtype=torch.float64)[:, None]
    y = 1 + 0.8 * x[:, 0] + 0.5 * torch.randn(n, dtype=torch.float64)
    posterior = ssla.fit(
        torch.nn.Linear(1, 1).double().eval(),
        (x, y),
        likelihood=ssla.likelihoods.Gaussian(noise=0.5),
        prior=ssla.priors.Gaussian(1.0),
    )
    box = ssla.priors.Box(mean=(-1.0, 1.0), precision=(0.1, 10.0))
    credal = ssla.credal(posterior, torch.tensor([[2.5]], dtype=torch.float64), box)
    plots.p_box(credal, ax=ax)
    ax.set_title(f"{n} rows")
    lower, upper = credal.probability((3.0, float("inf")))
    print(f"{n} rows: P(y > 3) is between {lower.item():.2f} and {upper.item():.2f}")
    print(f"  interval {credal.interval(0.9)[0].numpy().round(2)}")
figure.tight_layout()

# %%
# With more data the priors agree, and the two curves meet.
