"""Settings and rows -> a fitted ensemble."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ssla._checks import unknown_name, warn
from ssla.likelihoods import Likelihood
from ssla.posterior import Posterior
from ssla.predictive.positive import Censored, Positive
from ssla.tables.networks.component import Component
from ssla.tables.networks.embeddings import check_codes, embedding_dimensions, without_codes
from ssla.tables.networks.ensemble import CLASSES, LIKELIHOODS, Ensemble, Settings
from ssla.tables.networks.folds import hold_out_rows
from ssla.tables.networks.member_posteriors import MOST_HELD_OUT, Grow, MemberPosteriors
from ssla.tables.networks.pieces import piece_counts, quantile_edges
from ssla.tables.networks.scaling import fit_scaling
from ssla.tables.networks.target_scales import ScaledTarget, choose_target
from ssla.tables.networks.training import Architecture, Rows, train_networks
from ssla.tables.networks.training_data import TrainingData, thin_out

# Small tables hold out thirty rows, but at most a fifth of the table (both guesses).
FEW_ROWS = 30
MOST_LEFT_OUT = 0.2
# Rows that a model expects below zero: that none is there by chance has probability e⁻⁷.
ENOUGH_NEGATIVE = 7.0
# Rows of last layers that need several passes: with more they would predict the same.
MOST_FITTED = 200_000


def fit_ensemble(
    x: Tensor,
    y: Tensor,
    weights: Tensor,
    settings: Settings,
    classes: int = 0,
    on_epoch: Callable[[int], None] | None = None,
    groups: Tensor | None = None,
    time: Tensor | None = None,
    grow: Grow | None = None,
    rival: str | None = None,
    levels: tuple[int, ...] = (),
) -> Ensemble:
    """Fit an ensemble to x (n, d) float64, y (n,) or (n, D), and row weights (n,) > 0.

    No global random number is drawn. Raises ValueError for an unknown likelihood, and for targets
    or codes that are outside their range.

    classes: their number, 0 for numbers.  on_epoch: called with the number of each epoch.
    groups (n,) numbers of groups, time (n,): which rows are held out, see `folds`.  grow: grows a
    forest beside each network. rival: the same likelihood on another scale of y, which is taken if
    its networks predict held-out rows better. levels: L for columns of x that are codes 0, 1, …, L
    of levels, 0 for numbers; () if all are numbers.
    """
    _check_likelihood(settings.likelihood)
    likelihood, outputs = LIKELIHOODS[settings.likelihood](
        classes or (1 if y.dim() == 1 else y.shape[1])
    )
    check_codes(x, levels)
    inputs = fit_scaling(x, weights, levels)
    held = hold_out_rows(
        len(x),
        settings.members,
        _held_out_fraction(settings, len(x)),
        torch.Generator().manual_seed(settings.seed),
        y if classes else None,
        groups,
        time,
    )
    data = TrainingData(inputs(x), y, weights, held)

    # The held-out rows of all members choose between two scales of y.
    has_rival = rival is not None and bool(held.any(1).all())
    names = (settings.likelihood, str(rival)) if has_rival else (settings.likelihood,)
    networks = _train_networks(
        data, names, likelihood, outputs, settings, classes, on_epoch, levels
    )
    target = networks.target
    settings = replace(settings, likelihood=target.likelihood)

    # The posteriors of the members, each on its own network.
    fitted_data = replace(data, y=target.y)
    if likelihood is not None:
        every_row = torch.ones(len(x), dtype=torch.bool)
        fitted_data = fitted_data.select(thin_out(every_row, MOST_FITTED))
    members = MemberPosteriors(
        data=fitted_data,
        likelihood=likelihood,
        settings=settings,
        modules=networks.modules,
        grow=grow,
        levels=levels,
    )
    members, posteriors = _fit_members(members, networks.bias)
    ensemble = Ensemble(
        settings=replace(settings, members=len(members.kept)),
        architecture=networks.architecture,
        modules=members.kept_modules,
        components=_components(posteriors),
        inputs=inputs,
        target=target.unit,
        epochs=networks.epochs,
        one_target=target.y.dim() == 1,
        scale=target.scale,
        held=fitted_data.held[members.kept],
        left_out=tuple(m for m in range(len(held)) if members.constant or m not in members.kept),
        constant=members.constant,
    )
    ensemble = members.calibrate(ensemble)
    return _restrict_support(ensemble, x, weights) if has_rival else ensemble


class _TrainedNetworks(NamedTuple):
    """The trained networks of all members, on the scale of y that predicts best."""

    architecture: Architecture
    modules: tuple[nn.Sequential, ...]
    target: ScaledTarget
    epochs: int
    bias: Tensor | None  # (C,) with which the last layer started; None: zero


def _train_networks(
    data: TrainingData,
    names: tuple[str, ...],
    likelihood: Likelihood | None,
    outputs: int,
    settings: Settings,
    classes: int,
    on_epoch: Callable[[int], None] | None,
    levels: tuple[int, ...],
) -> _TrainedNetworks:
    """Train the members on each of one or two scales of y, and return those of the best scale.

    names: of the likelihood on each scale.  outputs, classes: their numbers.  levels: as in
    `fit_ensemble`.
    """
    targets = [ScaledTarget.from_values(data.y, data.weights, name) for name in names]
    edges: tuple[Tensor, ...] = ()
    if settings.piecewise:
        edges = quantile_edges(without_codes(data.z, levels), data.weights)
    architecture = Architecture(
        inputs=data.z.shape[1],
        outputs=outputs,
        hidden=settings.hidden,
        activation=settings.activation,
        pieces=piece_counts(edges),
        levels=levels,
        dimensions=embedding_dimensions(levels),
    )
    bias = _count_bias(data.y, data.weights) if settings.likelihood == "poisson" else None
    rows = _training_rows(data, targets, edges, settings, whole_numbers=bool(classes))
    trained = train_networks(
        architecture, likelihood, rows, settings.schedule, settings.seed, bias, on_epoch
    )
    modules = _modules_by_target(trained.modules, len(targets))
    best = 0
    if len(targets) > 1 and likelihood is not None:
        best = choose_target(targets, modules, trained.losses, data, likelihood)
    return _TrainedNetworks(architecture, modules[best], targets[best], trained.epochs, bias)


def _check_likelihood(name: str) -> None:
    """Check that the name of a likelihood is known; the ValueError has the most similar one."""
    if name not in LIKELIHOODS:
        raise ValueError(
            unknown_name("likelihood", name, [known for known in LIKELIHOODS if known != CLASSES])
        )


def _held_out_fraction(settings: Settings, rows: int) -> float:
    """Return the fraction of the rows that a member holds out; it is larger for small tables."""
    least = settings.validation_fraction
    return max(least, min(FEW_ROWS / rows, MOST_LEFT_OUT)) if least > 0 else 0.0


def _count_bias(y: Tensor, weights: Tensor) -> Tensor:
    """Return the first bias (1,) of a network of counts y (n,): the logarithm of their mean."""
    return (weights @ y / weights.sum()).clamp_min(1e-3).log()[None]


def _training_rows(
    data: TrainingData,
    targets: list[ScaledTarget],
    edges: tuple[Tensor, ...],
    settings: Settings,
    whole_numbers: bool,
) -> Rows:
    """Return the rows of the training: every member occurs once for each target.

    edges: of the pieces of each column.  whole_numbers: targets are codes of classes.
    """
    # All rows at once: in double precision, so that row weights equal repeated rows.
    dtype = torch.float64 if settings.schedule.batch_size is None else torch.float32
    values = [target.y if whole_numbers else target.y.to(dtype) for target in targets]
    members = len(data.held)
    y_by_member = None
    if len(values) > 1:
        y_by_member = torch.stack(values).repeat_interleave(members, 0)
    return Rows(
        x=data.z.to(dtype),
        y=values[0],
        weights=data.weights.to(dtype),
        held_out=data.held.repeat(len(values), 1),
        edges=edges,
        y_by_member=y_by_member,
    )


def _modules_by_target(
    modules: Sequence[nn.Sequential], targets: int
) -> list[tuple[nn.Sequential, ...]]:
    """Return the trained modules of each target, in double precision."""
    members = len(modules) // targets
    return [
        tuple(module.double() for module in modules[k * members :][:members])
        for k in range(targets)
    ]


def _fit_members(
    members: MemberPosteriors, bias: Tensor | None
) -> tuple[MemberPosteriors, list[list[tuple[Posterior, float]]]]:
    """Fit the posteriors; fit constants (outputs: bias (C,)) if no network has a share, and warn.

    Return the fits, and the posteriors of each kept member with their shares in it.
    """
    # These fits are tuned afterwards, so a mode that is far away is no news.
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "polish moved", UserWarning)
        warnings.filterwarnings("ignore", "The network is not at the mode", UserWarning)
        posteriors = members.fit()
        if posteriors:
            return members, posteriors
        warn(
            f"All {len(members.modules)} networks predict their held-out rows worse than the mean "
            "of y does, so none is used. The predictive is that of a constant with the spread of "
            "y, mixed with decision trees where these are better. Use fewer columns or more rows, "
            "or give likelihood='gaussian'."
        )
        constants = members.with_constants(bias)
        return constants, constants.fit()


def _components(posteriors: list[list[tuple[Posterior, float]]]) -> tuple[Component, ...]:
    """Return the parts of the mixture, in which every member has the same weight."""
    return tuple(
        Component(posterior, member, share / len(posteriors))
        for member, parts in enumerate(posteriors)
        for posterior, share in parts
    )


def _restrict_support(ensemble: Ensemble, x: Tensor, weights: Tensor) -> Ensemble:
    """Return the ensemble without negative targets, if x (n, d) shows that there are none.

    It shows so if the model would have expected several negative rows, by row weights (n,).
    """
    rows = x[thin_out(torch.ones(len(x), dtype=torch.bool), MOST_HELD_OUT)]
    below = ensemble.predict(rows).cdf(torch.zeros(len(rows), dtype=torch.float64))
    without_negative = float(below.mean() * weights.sum()) >= ENOUGH_NEGATIVE
    if isinstance(ensemble.scale, Positive):
        if without_negative:
            return ensemble
        return replace(ensemble, scale=replace(ensemble.scale, closed=False))
    return replace(ensemble, scale=Censored()) if without_negative else ensemble


def fitted_rows(ensemble: Ensemble, rows: int) -> Tensor:
    """Return which of the n rows the last layers were fitted to (n,) bool.

    They are the rows of `ensemble.held`.
    """
    every_row = torch.ones(rows, dtype=torch.bool)
    if ensemble.held is None or ensemble.held.shape[1] == rows:
        return every_row
    return thin_out(every_row, MOST_FITTED)
