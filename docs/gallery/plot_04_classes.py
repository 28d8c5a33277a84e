"""
Classes and out-of-distribution inputs
======================================

A classifier of two moons. Far from the data the network itself stays sure. The predictive averages over the last layer and
becomes a little less sure there. Here the effect is small, and along the
decision boundary alone. Treat the entropy as a hint, not as a guarantee.
"""

import matplotlib.pyplot as plt
import torch

import ssla

torch.manual_seed(0)
angle = torch.rand(200) * torch.pi
first = torch.stack([angle.cos(), angle.sin()], 1)
second = torch.stack([1 - angle.cos(), 0.5 - angle.sin()], 1)
x = torch.cat([first, second]) + 0.15 * torch.randn(400, 2)
y = torch.arange(2).repeat_interleave(200)

model = torch.nn.Sequential(
    torch.nn.Linear(2, 50),
    torch.nn.ReLU(),
    torch.nn.Linear(50, 50),
    torch.nn.ReLU(),
    torch.nn.Linear(50, 2),
)
optimiser = torch.optim.Adam(model.parameters(), lr=0.01, weight_decay=1e-3)
for _ in range(300):
    optimiser.zero_grad()
    torch.nn.functional.cross_entropy(model(x), y).backward()
    optimiser.step()

posterior = ssla.fit(model.eval(), (x, y), likelihood=ssla.likelihoods.Categorical())
side = torch.linspace(-4, 5, 60)
grid = torch.cartesian_prod(side, side - 0.25)


def entropy(probs):
    return -(probs * probs.clamp_min(1e-12).log()).sum(-1).reshape(60, 60).T


figure, axes = plt.subplots(1, 2, figsize=(8.5, 3.9), sharey=True, layout="constrained")
for ax, refit, title in zip(
    axes, ("plug_in", "output"), ("network itself", "predictive"), strict=True
):
    shade = ax.contourf(
        side,
        side - 0.25,
        entropy(posterior.predict(grid, refit=refit).probs),
        levels=torch.linspace(0, 0.7, 15),
        cmap="cividis",
    )
    ax.scatter(*x.T, c=y, s=5, cmap="gray", edgecolors="white", linewidths=0.2)
    ax.set(title=title, xlabel="first input")
axes[0].set_ylabel("second input")
_ = figure.colorbar(shade, ax=axes, label="entropy (nats)")

# %%
# The mean entropy at the training rows and at a distance of 4 from their centre:
far = torch.stack([0.5 + 4 * (2 * angle).cos(), 0.25 + 4 * (2 * angle).sin()], 1)
for name, rows in (("training rows", x), ("far away", far)):
    for refit in ("plug_in", "output"):
        probs = posterior.predict(rows, refit=refit).probs
        mean = -(probs * probs.clamp_min(1e-12).log()).sum(-1).mean().item()
        print(f"{name:14} {refit:8} {mean:.3f}")
