"""
A transformer
=============

A small transformer classifies sequences of tokens: does the first token occur again? Only the head gets a posterior, so the
cost does not depend on the size of the body.
"""

import matplotlib.pyplot as plt
import torch

import ssla
from ssla import plots

torch.manual_seed(0)


def sequences(n):
    x = torch.randint(0, 8, (n, 6))
    return x, (x[:, 1:] == x[:, :1]).any(1).long()


class Reader(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens = torch.nn.Embedding(8, 24)
        self.places = torch.nn.Parameter(0.1 * torch.randn(6, 24))
        layer = torch.nn.TransformerEncoderLayer(24, 4, 48, dropout=0.0, batch_first=True)
        self.body = torch.nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = torch.nn.Linear(24, 2)

    def forward(self, x):
        return self.head(self.body(self.tokens(x) + self.places)[:, 0])


x, y = sequences(600)
model = Reader()
optimiser = torch.optim.Adam(model.parameters(), lr=0.003)
for _ in range(35):
    optimiser.zero_grad()
    torch.nn.functional.cross_entropy(model(x), y).backward()
    optimiser.step()

posterior = ssla.fit(model.eval(), (x, y), likelihood=ssla.likelihoods.Categorical())
x_new, y_new = sequences(1000)
predictive = posterior.predict(x_new)
right = (predictive.probs.argmax(1) == y_new).float().mean().item()
print(f"accuracy {right:.1%}, log-loss {-predictive.log_prob(y_new).mean().item():.3f}")

# %%
# Where the model is less sure it is wrong more often.
figure, ax = plt.subplots(figsize=(5.5, 4))
plots.reliability(predictive, y_new, ax=ax)
figure.tight_layout()
