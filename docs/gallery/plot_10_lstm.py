"""
An LSTM
=======

Any module works whose forward pass ends in a linear layer. Here an LSTM predicts the next value of a series from the last
twenty. The model returns one tensor; a model that returns a tuple or a dict needs ``output=``.
"""

import matplotlib.pyplot as plt
import torch

import ssla
from ssla import plots

torch.manual_seed(0)
time = torch.arange(400) * 0.15
series = torch.sin(time) + 0.5 * torch.sin(0.37 * time) + 0.1 * torch.randn(400)
windows = series.unfold(0, 21, 1)
x, y = windows[:, :20, None], windows[:, 20]


class Next(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.body = torch.nn.LSTM(1, 24, batch_first=True)
        self.head = torch.nn.Linear(24, 1)

    def forward(self, x):
        return self.head(self.body(x)[0][:, -1])


model = Next()
optimiser = torch.optim.Adam(model.parameters(), lr=0.01)
for _ in range(120):
    optimiser.zero_grad()
    (model(x[:300])[:, 0] - y[:300]).square().mean().backward()
    optimiser.step()

posterior = ssla.fit(
    model.eval(), (x[:300], y[:300]), likelihood=ssla.likelihoods.Gaussian(noise="estimate")
)
predictive = posterior.predict(x[300:])
low, high = predictive.interval(0.9).unbind(-1)
inside = ((low <= y[300:]) & (y[300:] <= high)).float().mean().item()
print(f"90% intervals hold {inside:.0%} of the later values")

figure, ax = plt.subplots(figsize=(8, 3.6))
steps = torch.arange(300, 300 + len(low))
plots.bands(predictive, steps, (steps, y[300:]), levels=[0.9], ax=ax)
ax.set(xlabel="step", ylabel="value", title="one step ahead, after training ended")
figure.tight_layout()
