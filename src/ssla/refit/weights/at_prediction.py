"""The paper's Algorithm 1 as it is written: one refit for each x, with (x, ŷ) added.

ŷ is the point prediction at θ̂. Every y of an input is then evaluated at the θ̃ of that one refit:

    [ℓ_D(θ̃) − ℓ_D(θ̂)] + log p(y|x,θ̃) + [log π(θ̃) − log π(θ̂)] − ½ [log|H̃(y, θ̃)| − log|H(θ̂)|]

θ̃ is not the mode for any y but ŷ, so this is not the Laplace approximation of p(D, (x, y)) that
the derivation needs. With constant Gaussian noise θ̃ = θ̂, and the result is ASSLA. With a log
variance among the outputs the refit on ŷ lowers the variance, and the predictive is too narrow.

Terms and symbols are those of `ssla.refit.weights`.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from ssla.likelihoods import Likelihood
from ssla.refit.weights.anderson import Ascent, Progress
from ssla.refit.weights.solved import Engine, Solved

CANDIDATE, PREDICTION = "candidate", "prediction"
POINTS = (CANDIDATE, PREDICTION)


@dataclass(frozen=True, eq=False)
class RefitAtPrediction:
    """An `Engine` that refits once for each input, with ŷ added, and evaluates all y there.

    It works by another engine. The modes that were found are kept for later calls (`ascents`, which
    `find_modes` fills in place): N × P numbers for N inputs.
    """

    engine: Engine  # which makes the refits
    prediction: Tensor  # ŷ of each input (N, …)
    ascents: dict[int, Ascent] = field(default_factory=dict)  # of one task each, by the row of x

    @property
    def f(self) -> Tensor:
        """Return f̂ at x (N, C)."""
        return self.engine.f

    @property
    def tasks_at_once(self) -> int:
        """Return the number of tasks that `solve` should get in one call."""
        return self.engine.tasks_at_once

    def find_modes(self, x_rows: Tensor, y: Tensor, progress: Progress | None = None) -> Ascent:
        """Find θ̃ of each task (m,) by the refit of its input with ŷ; y (m, …) is not used.

        Inputs that were refitted before are not refitted again.
        """
        rows = x_rows.tolist()
        missing = torch.tensor([row for row in dict.fromkeys(rows) if row not in self.ascents])
        for new_rows in missing.long().split(max(self.tasks_at_once, 1)):
            if not len(new_rows):  # `split` gives one empty part of nothing
                continue
            ascent = self.engine.find_modes(new_rows, self.prediction[new_rows], progress)
            for position, row in enumerate(new_rows.tolist()):
                self.ascents[row] = ascent.select_tasks(torch.tensor([position]))
        return Ascent.join([self.ascents[row] for row in rows])

    def solve(
        self,
        x_rows: Tensor,
        y: Tensor,
        progress: Progress | None = None,
        at: Ascent | None = None,
    ) -> Solved:
        """Compute the increments of each task (m,) for y (m, …), at the θ̃ of its input.

        The arguments are those of `Engine.solve`.
        """
        ascent = self.find_modes(x_rows, y, progress) if at is None else at
        return self.engine.solve(x_rows, y, at=ascent)

    def find_stuck(self, x_rows: Tensor, y: Tensor) -> Tensor:
        """Return a mask of the tasks (m,) whose inputs' refits are stuck; y (m, …) is not used."""
        return self.engine.find_stuck(x_rows, self.prediction[x_rows])

    def find_weights_at_modes(self, x_rows: Tensor, y: Tensor) -> Tensor:
        """Return θ̃ of each task (m, P), the same for all y (m, …) of an input."""
        return self.engine.find_weights_at_modes(x_rows, self.prediction[x_rows])


def predict_points(likelihood: Likelihood, f: Tensor) -> Tensor:
    """Return the point prediction ŷ at outputs f (N, C): (N,), or (N, D) for D targets.

    It is the mean of y; for classes the most probable one, as a float64; for counts the mean
    rounded to the nearest count. Raises ValueError if it is not finite or not in the support of y.
    """
    support = likelihood.support_for(f.shape[1])
    mean = likelihood.mean(f)
    if support.kind == "class":
        is_one_number = likelihood.one_probability
        return ((mean > 0.5).long() if is_one_number else mean.argmax(-1)).to(torch.float64)
    point = mean.round() if support.kind == "count" else mean
    try:
        support.check(point, f.shape[1])
    except ValueError as error:
        raise ValueError(
            "WeightRefit(at='prediction') and WeightRefit(candidates=…) need the mean of y, which "
            f"is no possible y here: {error} Use at='candidate' without candidates, a refit for "
            "every y."
        ) from None
    return point
