"""
Several modes, and the smallest region
======================================

Half of the machines of a plant are of one type, half of another, and the type was not recorded. Two networks that were
trained on one type each give a mixture with two modes. The central 90% interval covers the gap in which almost nothing
happens; the highest density region (HDR) does not.
"""

import matplotlib.pyplot as plt
import torch

import ssla
from ssla import plots

torch.manual_seed(0)
x = torch.rand(80, 1) * 4


def fitted(slope):
    """A posterior of a line with this slope."""
    y = slope * x[:, 0] + 0.3 * torch.randn(80)
    return ssla.fit(
        torch.nn.Linear(1, 1).eval(),
        (x, y),
        likelihood=ssla.likelihoods.Gaussian(noise="estimate"),
    )


posteriors = [fitted(1.0), fitted(-0.5)]
at = torch.tensor([[2.0]])
mixture = ssla.mixture([posterior.predict(at) for posterior in posteriors])
interval, region = mixture.interval(0.9)[0], mixture.hdr(0.9)

# %%
# ``hdr`` returns a union of intervals for each row.
pieces = [
    (low.item(), high.item())
    for low, high in zip(region.lower[0], region.upper[0], strict=True)
    if low.isfinite()
]
print("central interval:", [round(end.item(), 2) for end in interval])
print("HDR:", [(round(low, 2), round(high, 2)) for low, high in pieces])

figure, ax = plt.subplots(figsize=(7, 3.6))
ax.hlines(-0.03, *interval.tolist(), color="#d1651f", lw=4, label="90% central interval")
plots.density(mixture, level=0.9, ax=ax)
ax.set(ylabel="density at x = 2", ylim=(-0.06, None))
figure.tight_layout()
