"""Whether the last layer of a classifier is trained: what decides between "tilt" and "polish" without a prior and a mode.

Polish continues where the training was stopped, on the same rows, and can make a trained classifier worse. Tilt keeps it, and
would also keep a last layer that was never trained. The sums of the first pass tell the two apart. In log likelihood:

    learned   the network's, less that of the class frequencies
    missing   what a Newton step of the last layer would add, ½ gᵀ(S + τ)⁻¹g, less what such a step loses on new rows by fitting
              noise: the number of parameters that the rows determine, tr S(S + τ)⁻¹ (Akaike)

The layer is trained if it has learned at least three quarters of both together. τ depends on the features only: under N(0, 1/τ)
the logits have a standard deviation of 3. So neither the units of the features nor the scale of the weights matter.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ssla.fitting.sums import Sums
from ssla.likelihoods import Bernoulli, Categorical, Likelihood, Tempered
from ssla.state import POLISH, TILT
from ssla.structures.jacobians import Features

LOGITS = 3.0  # their standard deviation under N(0, 1/τ)
SHARE = 0.75  # of what the features allow


@dataclass(frozen=True, eq=False)
class Classes:
    """The classes of the rows, and the size of the features that predict them. Those of shards merge."""

    counts: Tensor  # the weight of each class (K,)
    squares: float  # Σ w |φ|²

    @staticmethod
    def of(likelihood: Likelihood, y: Tensor, outputs: int, features: Features | None, weights: Tensor | None) -> Classes | None:
        """None where the targets are no classes, or the free weights no last layer."""
        law = likelihood.predictive
        if features is None or not isinstance(law, Bernoulli | Categorical):
            return None
        w = torch.ones(len(y), dtype=torch.float64) if weights is None else weights
        found = torch.bincount(y.flatten().long(), weights=w, minlength=max(outputs, 2))
        return Classes(found, float(w @ features.phi.double().square().sum(1)))

    def merge(self, other: Classes) -> Classes:
        return Classes(self.counts + other.counts, self.squares + other.squares)

    @property
    def log_likelihood(self) -> float:
        """Of the class frequencies as a prediction for every row."""
        return -float(self.counts.sum() * torch.special.entr(self.counts / self.counts.sum()).sum())

    @property
    def precision(self) -> float:
        """τ."""
        return self.squares / float(self.counts.sum()) / LOGITS**2


class Verdict(NamedTuple):
    """Log likelihoods that a last layer has learned, and that it misses."""

    learned: float
    missing: float

    @property
    def trained(self) -> bool:
        return self.learned > 0 and self.learned >= SHARE * (self.learned + self.missing)

    @property
    def mode(self) -> str:
        return TILT if self.trained else POLISH

    @property
    def note(self) -> str:
        if self.learned > 0:
            learned = f"the network's log likelihood is {self.learned:.3g} above that of the class frequencies"
        else:
            learned = f"the network's log likelihood is {-self.learned:.3g} below that of the class frequencies"
        missing = f"a Newton step of the last layer would add {self.missing:.3g} beyond noise"
        trained = "trained" if self.trained else "not trained"
        return f"mode={self.mode!r} was chosen, because the last layer is {trained}: {learned}, and {missing}"


def judged(sums: Sums, classes: Classes, likelihood: Likelihood) -> Verdict:
    """From the sums at the trained weights."""
    power = likelihood.beta if isinstance(likelihood, Tempered) else 1.0
    statistics, g = sums.statistics, sums.statistics.gradient
    learned = statistics.log_likelihood - power * classes.log_likelihood
    precision = torch.full_like(g, power * classes.precision)
    if not classes.precision > 0:  # without features there is nothing to learn
        return Verdict(learned, 0.0)
    determined = float((1 - precision * statistics.curvature.with_prior(precision).variances()).sum())
    gain = 0.5 * float(g @ sums.newton_step(g, precision))
    return Verdict(learned, max(gain - power * determined, 0.0))
