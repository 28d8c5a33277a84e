"""Pseudo-labels: labels of unlabelled inputs, ranked by their predictive density.

In self-training a model labels the inputs that it is surest of, and is trained on them. The
network's own probabilities do not say how sure it is: they leave out the doubt about its weights.
Here an input x is scored by the predictive of its own prediction, log p(ŷ | x, D), which is how
well (x, ŷ) agrees with the data. By Bayesian pseudo-label selection (arXiv:2302.08883) this is the
choice of a decision maker whose utility is the likelihood.

The pool is a set of unlabelled inputs, its M rows. ŷ is the mode of the predictive, and D the
training data.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from torch import Tensor

from ssla import predictive
from ssla._checks import in_plain_torch
from ssla.data import Inputs, as_inputs, row_count
from ssla.refit import Refit

if TYPE_CHECKING:
    from ssla.posterior import Posterior

__all__ = ["Chosen", "PseudoLabels", "pseudo_label"]


class Chosen(NamedTuple):
    """The k best rows of a pool, best first."""

    rows: Tensor  # (k,): their numbers in the pool
    labels: Tensor  # (k,), or (k, D): ŷ of these rows
    scores: Tensor  # (k,)


@dataclass(frozen=True, eq=False)
class PseudoLabels:
    """A label for each of the M rows of a pool, with its score. Made by `ssla.pseudo_label`."""

    labels: Tensor  # ŷ (M,), or (M, D): classes as integers
    scores: Tensor  # (M,): log p(ŷ | x, D)

    @property
    def order(self) -> Tensor:
        """Return the rows of the pool (M,), from the highest score to the lowest.

        Of equal scores the earlier row comes first.
        """
        return self.scores.argsort(descending=True, stable=True)

    def take(self, k: int) -> Chosen:
        """Return the k rows with the highest scores, with their labels.

        Raises ValueError unless k is a whole number from 1 to M.
        """
        count = len(self.scores)
        if isinstance(k, bool) or not isinstance(k, int) or not 1 <= k <= count:
            raise ValueError(
                f"k must be a whole number from 1 to {count}, the number of rows of the pool, but "
                f"is {k!r}."
            )
        rows = self.order[:k]
        return Chosen(rows, self.labels[rows], self.scores[rows])

    def __repr__(self) -> str:
        """Return the class name with the number of rows and the range of the scores."""
        low, high = float(self.scores.min()), float(self.scores.max())
        return f"PseudoLabels({len(self.scores)} rows, scores from {low:.4g} to {high:.4g})"


@in_plain_torch
def pseudo_label(posterior: Posterior, pool: Inputs, refit: str | Refit = "output") -> PseudoLabels:
    """Label the rows of a pool, and rank them by how sure the predictive is of its own label.

    The label is ŷ, the mode of the predictive: the most probable class or count, the number of
    highest density. Its score is log p(ŷ | x, D). Nothing is trained and the posterior does not
    change: add the best rows to the training data, train, and fit again.

    For classes and counts the score is the log probability of ŷ with the doubt about the weights,
    not the network's softmax. For numbers it is a log density at its mode: with one noise for all
    inputs it ranks them by the width of the predictive, narrowest first, and it says nothing about
    the place of ŷ (without a refit all scores are then equal).

    refit: as in `posterior.predict`. "plug_in" scores by the network's own probabilities, as plain
    self-training does.

    Raises TypeError unless `posterior` is a Posterior, and ValueError for a pool without rows or
    with values that are not finite, and where a refit has no answer.

    >>> best = ssla.pseudo_label(post, pool).take(20)          # doctest: +SKIP
    >>> x_new, y_new = pool[best.rows], best.labels            # doctest: +SKIP
    """
    inputs = as_inputs(pool)
    if row_count(inputs) == 0:
        raise ValueError("pool has no rows. Give at least one input to label.")
    prediction = predictive.predict(posterior, inputs, refit)
    labels = prediction.mode
    scores = prediction.log_prob(labels)
    unknown = scores.isnan()
    if bool(unknown.any()):
        raise ValueError(
            f"{int(unknown.sum())} of {len(scores)} rows have no score: their refits failed and "
            "on_failure='nan' was asked for. Use on_failure='fallback', or another refit."
        )

    return PseudoLabels(labels, scores)
