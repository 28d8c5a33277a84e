"""
The paper in fifteen minutes
============================

The self-supervised Laplace approximation adds a candidate (x, y) to the data, refits, and adds up three increments: of the
likelihood, of the prior, and of the curvature. This page repeats the main steps of the paper with code that runs in
seconds. ``docs/paper.md`` has every table and every statement, with what holds of it.

All blocks together are a script and a notebook: see the links at the end.
"""

import math

import matplotlib.pyplot as plt
import torch

import ssla

torch.manual_seed(0)
F64 = torch.float64

# %%
# 1. Where the answer is known
# ----------------------------
# Normal data with a known variance of 2 and a normal prior of the mean, as in the paper. SSLA with a refit for each y is the
# exact predictive, before normalisation. ASSLA does not refit: it is the plug-in times a constant.

rows = 4.0 + math.sqrt(2.0) * torch.randn(20, dtype=F64)


def normal(row, theta):
    return -0.25 * (row - theta[0]) ** 2 - 0.5 * math.log(4 * math.pi)


model = ssla.ExplicitModel(normal, rows, [4.0], ssla.priors.Gaussian(1.0, mean=4.0))
variance = 1 / (20 / 2.0 + 1.0)
mean = (4.0 + float(rows.sum()) / 2.0) * variance
exact = torch.distributions.Normal(
    *torch.tensor([mean, math.sqrt(variance + 2.0)], dtype=F64)
)
y = torch.linspace(0, 8, 9, dtype=F64)
full, fast = model.increments(y).total, model.increments(y, refit=False).total
print(f"SSLA:  largest error {float((full - exact.log_prob(y)).abs().max()):.1e}")
print(f"ASSLA: largest error {float((fast - exact.log_prob(y)).abs().max()):.3f}")

# %%
# 2. A million rows
# -----------------
# The paper reports errors of 0.06 at n = 1,000,000. They come from subtracting two float32 sums. Increments that are
# added up row by row do not have them.

many = 4.0 + math.sqrt(2.0) * torch.randn(1_000_000, dtype=F64)
single = many.float()
theta = many.mean()


def sum_single(at):
    return float(normal(single, at.float().reshape(1)).sum())


errors = []
for y_new in torch.linspace(0, 8, 9, dtype=F64):
    refitted = (many.sum() + y_new) / (len(many) + 1)
    change = normal(many, refitted.reshape(1)) - normal(many, theta.reshape(1))
    errors.append(abs(sum_single(refitted) - sum_single(theta) - float(change.sum())))
print(f"two float32 sums: errors of up to {max(errors):.4f}; row by row there are none")

# %%
# 3. How fast refits stop to matter
# ---------------------------------
# Lemma 1: the mode moves by O(1/n). Each increment shrinks at the same rate, that of the prior too.

print("     n   step · n   prior increment · n")
for n in (100, 1_000, 10_000):
    subset = ssla.ExplicitModel(normal, many[:n], [4.0], ssla.priors.Gaussian(1.0))
    candidate = torch.tensor([5.0], dtype=F64)
    moved = float(subset.modes(candidate)[0, 0] - subset.mode[0])
    prior = float(subset.increments(candidate).prior[0])
    print(f"{n:6,}   {moved * n:8.3f}   {prior * n:8.3f}")

# %%
# 4. The prior is a module
# ------------------------
# One weight, 50 rows, noise 0.5, at ŷ + 1. The paper's table has the prior in the refit and not in the curvature
# (``"paper"``). With the prior in both (``"exact"``) the value is the exact predictive. The table leaves −½ log 2πσ² out.

leverage = 0.05315
x = torch.randn(50, dtype=F64)
x = x * math.sqrt(1.5**2 / leverage / float((x * x).sum()))
line = torch.stack([x, 0.8 * x + 0.5 * torch.randn(50, dtype=F64)], 1)


def regression(row, w):
    return -0.5 * ((row[1] - row[0] * w[0]) / 0.5) ** 2


print("prior variance   paper's table   convention paper   convention exact")
for variance, printed in ((0.01, -1.9612), (0.1, -1.9303), (1.0, -1.9255), (10.0, -1.9250)):
    values = []
    for convention in ("paper", "exact"):
        gaussian = ssla.priors.Gaussian(1 / variance)
        slope = ssla.ExplicitModel(regression, line, [0.5], gaussian, convention)
        candidate = torch.tensor([[1.5, 1.5 * float(slope.mode[0]) + 1.0]], dtype=F64)
        values.append(float(slope.increments(candidate).total[0]))
    print(f"{variance:14g}   {printed:13.4f}   {values[0]:16.4f}   {values[1]:16.4f}")

# %%
# 5. A network with a mean and a log variance
# -------------------------------------------
# Algorithm 1 as it is written refits once, on the prediction ŷ. That makes the predictive narrower than the network's own.
# The derivation needs a refit for each y, which makes it wider. ASSLA is close to the plug-in.

x = (6 * torch.rand(200, 1) - 3).double()
y = torch.sin(x[:, 0]) + 0.4 * torch.cos(x[:, 0] / 2).abs() * torch.randn(200, dtype=F64)
net = torch.nn.Sequential(
    torch.nn.Linear(1, 20), torch.nn.Tanh(), torch.nn.Linear(20, 2)
).double()
likelihood = ssla.likelihoods.HeteroscedasticGaussian()
optimiser = torch.optim.Adam(net.parameters(), lr=0.02, weight_decay=1 / 200)
for _ in range(500):
    optimiser.zero_grad()
    (-likelihood.log_prob(y, net(x)).mean()).backward()
    optimiser.step()

settings = ssla.paper_settings(half_width=3.0, structure="dense")
posterior = ssla.fit(net.eval(), (x, y), likelihood=likelihood, **settings.fit)
answers = {
    "plug-in": "plug_in",
    "ASSLA": settings.refits["ASSLA"],
    "SSLA as written": ssla.WeightRefit(at="prediction"),
    "SSLA, a refit for each y": ssla.WeightRefit(),
    "LA": settings.refits["LA"],
}
grid = torch.linspace(-3.6, 3.6, 19, dtype=F64)[:, None]
figure, ax = plt.subplots(figsize=(7, 4))
for name, refit in answers.items():
    answer = posterior.predict(grid, refit=refit)
    ax.plot(grid[:, 0], answer.stddev, label=name)
    print(f"{name:25s} mean standard deviation {float(answer.stddev.mean()):.3f}")
ax.plot(x[:, 0], torch.full((200,), 0.1), "|", color="#333333", label="training inputs")
ax.set(xlabel="x", ylabel="standard deviation of y")
ax.legend(fontsize=8)
figure.tight_layout()

# %%
# What to read next
# -----------------
# The page on the paper lists what holds and what does not; its appendices have every number. ``python -m ssla_paper
# --list`` says what each study costs, and ``make paper`` makes all pages from the shipped records.
