"""The guard at the end of every fit.

The guard warns of a predictive that is clearly worse than the network itself.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from ssla._checks import warn
from ssla.fitting.choice import compute_mean_and_error
from ssla.fitting.training_rows import TrainingRows

if TYPE_CHECKING:
    from ssla.posterior import Posterior

# Nats a row: a guess. A posterior gives up some confidence on rows that its network has memorised,
# and may be better for it on others. Posteriors that fail lose 1 and more (method.md, section 11).
WORSE_ON_TRAINING_ROWS = 0.5
CAUSES = (
    "Likely causes: (a) a prior= or gaussian= that was given and does not fit; (b) "
    "gaussian='laplace' for classes, whose curvature at memorised rows is almost zero; (c) "
    "weights='all' with a structure that is too simple. Give validation rows (validation=), leave "
    "the options out, or use weights='last_layer'."
)


def warn_on_validation_rows(scores: Tensor, plug_in: Tensor, weights: Tensor) -> None:
    """Warn where a predictive is clearly worse than the network itself on validation rows.

    This is so where its mean log density is lower by more than two standard errors. scores: log
    densities (n,) of the predictive. plug_in: those of the network (n,). weights: of the rows (n,).
    """
    loss = compute_mean_and_error(plug_in - scores, weights)
    if loss.mean > 2 * loss.error:
        _warn_worse("validation rows", scores, plug_in, weights)


def warn_on_training_rows(posterior: Posterior, rows: TrainingRows | None) -> None:
    """Warn where a posterior's predictive is far worse than the network itself on training rows.

    The mean log densities of the rows are compared. rows: a sample of the training rows; None:
    nothing is done. A comparison on rows that the network has seen favours the network, so only a
    large loss counts.
    """
    if rows is None:
        return
    scores = rows.compute_scores(posterior)
    loss = compute_mean_and_error(rows.plug_in - scores, rows.weights)
    # Two standard errors, but never more than twice the limit: few rows must not hide a failure.
    if loss.mean > WORSE_ON_TRAINING_ROWS + 2 * min(loss.error, WORSE_ON_TRAINING_ROWS):
        _warn_worse("training rows", scores, rows.plug_in, rows.weights)


def _warn_worse(sample: str, scores: Tensor, plug_in: Tensor, weights: Tensor) -> None:
    """Warn that a predictive is worse than the network, with the mean negative log density of each.

    sample: the name of the rows, for the message. scores, plug_in: log densities (n,) of the
    predictive and of the network, for rows with weights (n,).
    """
    predictive = -compute_mean_and_error(scores, weights).mean
    network = -compute_mean_and_error(plug_in, weights).mean
    warn(
        f"On the {sample} the predictive is worse than the network itself: a negative log density "
        f"of {predictive:.4g} against {network:.4g} a row. {CAUSES}",
    )
