"""
A transformer
=============

A small transformer classifies sequences of tokens: does the first token occur again? Only the head gets a posterior, so the
cost does not depend on the size of the body.
"""

import matplotlib.pyplot as plt
import torch

import ssla

torch.manual_seed(0)


def sequences(n):
    x = torch.randint(0, 8, (n, 6))
    return x, (x[:, 1:] == x[:, :1]).any(1).long()


class Reader(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens, self.places = torch.nn.Embedding(8, 24), torch.nn.Parameter(0.1 * torch.randn(6, 24))
        layer = torch.nn.TransformerEncoderLayer(24, 4, 48, dropout=0.0, batch_first=True)
        self.body, self.head = torch.nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), torch.nn.Linear(24, 2)

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
right = (predictive.probs.argmax(1) == y_new).float()
print(f"accuracy {right.mean().item():.1%}, log-loss {-predictive.log_prob(y_new).mean().item():.3f}")

# %%
# Sorted by the highest probability: where the model is less sure it is wrong more often.
sure, order = predictive.probs.max(1).values.sort()
groups = right[order].reshape(10, 100).mean(1)
figure, ax = plt.subplots(figsize=(5.5, 4))
ax.plot([0.5, 1], [0.5, 1], color="#999999", lw=1)
ax.plot(sure.reshape(10, 100).mean(1), groups, "o-", color="#2f6db5")
ax.set(xlabel="mean of the highest probability", ylabel="share of correct answers", title="ten groups of 100 new sequences")
figure.tight_layout()
