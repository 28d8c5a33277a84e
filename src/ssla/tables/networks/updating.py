"""Adds rows to a fitted ensemble without training: only the posteriors of its networks change."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from ssla.tables.networks.ensemble import VARYING, Ensemble, scale_targets


def update_ensemble(ensemble: Ensemble, x: Tensor, y: Tensor, weights: Tensor) -> Ensemble:
    """Return the ensemble with the rows x (n, d), y (n,) or (n, D) added to every posterior.

    weights (n,): the row weights. With Gaussian noise each last layer is then that of a fit to all
    rows. Otherwise the variational Gaussian keeps its averages over the earlier rows, which is an
    approximation. Networks, scaling, noise and prior stay as they were. The held-out rows are then
    unknown, so `held` and `scores` become None.

    Raises ValueError where the mode of a posterior cannot follow new rows, or not so many, and for
    targets or codes out of range.
    """
    can_follow = (
        c.posterior.updates_mode_from_sums or c.posterior.gaussian == "variational"
        for c in ensemble.components
    )
    if not all(can_follow):
        raise ValueError(
            "The mode of these posteriors cannot follow new rows: that needs a last layer "
            "(weights='last_layer') with Gaussian noise and structure 'dense' or 'kfac', or a "
            "variational Gaussian. Fit again on all rows."
        )

    z = ensemble.standardise(x)
    target = scale_targets(y, ensemble.scale, ensemble.settings.likelihood)
    if ensemble.target is not None:
        target = ensemble.target(target.reshape(len(y), -1)).reshape(target.shape)
    try:
        components = tuple(
            replace(c, posterior=c.posterior.update((z, target, weights)))
            for c in ensemble.components
        )
    except ValueError as error:
        if ensemble.settings.likelihood not in VARYING:
            raise
        raise ValueError(
            "The last layers for mean and log variance cannot follow so many new rows without "
            "another fit. Fit again on all rows, or use likelihood='gaussian', which follows "
            "exactly."
        ) from error

    return replace(ensemble, components=components, held=None, scores=None)
