"""Fits an ensemble to rows: trains the networks, fits their posteriors, and mixes them."""

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
from ssla.tables.networks.embeddings import check_codes, choose_embedding_dimensions, without_codes
from ssla.tables.networks.ensemble import CLASSES, LIKELIHOODS, Ensemble, Settings
from ssla.tables.networks.folds import hold_out_rows
from ssla.tables.networks.member_posteriors import MOST_HELD_OUT, Grow, MemberPosteriors
from ssla.tables.networks.pieces import count_pieces, find_quantile_edges
from ssla.tables.networks.scaling import Scaling, fit_scaling
from ssla.tables.networks.target_scales import ScaledTarget, choose_target
from ssla.tables.networks.training import Architecture, Rows, train_networks
from ssla.tables.networks.training_data import TrainingData, thin_out

# Small tables hold out thirty rows, but at most a fifth of the table. Both are guesses.
FEW_ROWS = 30
MOST_LEFT_OUT = 0.2
# If a model expects seven rows below zero, none is there by chance with probability e⁻⁷ only.
ENOUGH_NEGATIVE = 7.0
# Rows of last layers that need several passes: with more they would predict the same (a guess).
MOST_FITTED = 200_000
SMALLEST_MEAN_COUNT = 1e-3  # keeps the logarithm finite where all counts are zero; a guess


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
    """Fit an ensemble of networks to inputs x (n, d) in float64, targets y and row weights (n,).

    y holds numbers (n,) or (n, D), or codes 0, 1, … of classes (n,). All weights are positive. No
    global random number is drawn. Raises ValueError for an unknown likelihood, and for targets or
    codes that are outside their range.

    classes: the number of classes; 0 if y holds numbers.
    on_epoch: a function that is called with the number of each finished epoch.
    groups (n,), time (n,): the groups or times that decide which rows are held out, see `folds`.
    grow: a function that grows a forest beside each network; None: there are no forests.
    rival: the name of a likelihood that is the same on another scale of y. It replaces that of the
    settings if its networks predict held-out rows better. None: there is no other scale.
    levels: for each column of x the number L of levels if it holds codes 0, 1, …, L, and 0 if it
    holds numbers. (): all columns hold numbers.
    """
    _check_likelihood(settings.likelihood)
    targets = 1 if y.dim() == 1 else y.shape[1]
    likelihood, outputs = LIKELIHOODS[settings.likelihood](classes or targets)
    check_codes(x, levels)
    inputs = fit_scaling(x, weights, levels)
    strata = y if classes else None
    held = _draw_held_out_rows(len(x), settings, strata, groups, time)
    data = TrainingData(inputs(x), y, weights, held)

    # The held-out rows of all members choose between two scales of y. If a member has none, the
    # rival is not tried.
    names: tuple[str, ...] = (settings.likelihood,)
    has_rival = rival is not None and bool(held.any(1).all())
    if has_rival:
        names = (settings.likelihood, str(rival))
    networks = _train_networks(
        data, names, likelihood, outputs, settings, classes, on_epoch, levels
    )
    settings = replace(settings, likelihood=networks.target.likelihood)

    # The posteriors of the members, each on its own network.
    members = MemberPosteriors(
        data=_select_fitted_data(data, networks.target, likelihood),
        likelihood=likelihood,
        settings=settings,
        modules=networks.modules,
        grow=grow,
        levels=levels,
    )
    members, posteriors = _fit_members(members, networks.bias)
    ensemble = _assemble_ensemble(members, posteriors, networks, inputs)
    ensemble = members.calibrate_ensemble(ensemble)
    return _restrict_support(ensemble, x, weights) if has_rival else ensemble


def _draw_held_out_rows(
    rows: int,
    settings: Settings,
    strata: Tensor | None,
    groups: Tensor | None,
    time: Tensor | None,
) -> Tensor:
    """Return which of the n rows each member holds out (M, n) bool, drawn by the settings' seed.

    strata: the class of each row (n,), None for numbers.  groups, time: as in `fit_ensemble`.
    Raises ValueError if all rows have one group or one time.
    """
    fraction = _choose_held_out_fraction(settings, rows)
    generator = torch.Generator().manual_seed(settings.seed)
    return hold_out_rows(rows, settings.members, fraction, generator, strata, groups, time)


class _TrainedNetworks(NamedTuple):
    """The trained networks of all members, on the scale of y that predicts best."""

    architecture: Architecture
    modules: tuple[nn.Sequential, ...]
    target: ScaledTarget
    epochs: int  # that were trained
    bias: Tensor | None  # (C,): the biases at which the last layer's training started; None: zero


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
    """Train all members on each of one or two scales of y, and return those of the best scale.

    Raises ValueError if y is outside the support of a scale.

    data: all rows, with standardised inputs and y in its own unit.  names: the name of the
    likelihood on each scale.  likelihood: None is Gaussian with unknown noise.  outputs: the number
    of outputs of a network.  classes, on_epoch, levels: as in `fit_ensemble`.
    """
    targets = [ScaledTarget.from_values(data.y, data.weights, name) for name in names]
    edges: tuple[Tensor, ...] = ()
    if settings.piecewise:
        edges = find_quantile_edges(without_codes(data.z, levels), data.weights)
    architecture = Architecture(
        inputs=data.z.shape[1],
        outputs=outputs,
        hidden=settings.hidden,
        activation=settings.activation,
        pieces=count_pieces(edges),
        levels=levels,
        dimensions=choose_embedding_dimensions(levels),
    )
    bias = _compute_first_bias_of_counts(data) if settings.likelihood == "poisson" else None
    rows = _make_training_rows(data, targets, edges, settings, whole_numbers=bool(classes))
    trained = train_networks(
        architecture, likelihood, rows, settings.schedule, settings.seed, bias, on_epoch
    )
    modules = _group_modules_by_target(trained.modules, len(targets))
    best = 0

    # With unknown noise (no likelihood) there is one target only.
    if len(targets) > 1 and likelihood is not None:
        best = choose_target(targets, modules, trained.losses, data, likelihood)
    return _TrainedNetworks(architecture, modules[best], targets[best], trained.epochs, bias)


def _check_likelihood(name: str) -> None:
    """Raise ValueError for the name of an unknown likelihood, with the most similar valid one."""
    if name not in LIKELIHOODS:
        raise ValueError(
            unknown_name(
                "likelihood",
                name,
                [valid_name for valid_name in LIKELIHOODS if valid_name != CLASSES],
            )
        )


def _choose_held_out_fraction(settings: Settings, rows: int) -> float:
    """Return the fraction of the n rows that a member holds out.

    The fraction is that of the settings, or larger for small tables. A fraction of 0 stays 0.
    """
    least = settings.validation_fraction
    return max(least, min(FEW_ROWS / rows, MOST_LEFT_OUT)) if least > 0 else 0.0


def _compute_first_bias_of_counts(data: TrainingData) -> Tensor:
    """Return the bias (1,) with which a network of counts starts: the logarithm of their mean."""
    mean = data.weights @ data.y / data.weights.sum()
    return mean.clamp_min(SMALLEST_MEAN_COUNT).log()[None]


def _make_training_rows(
    data: TrainingData,
    targets: list[ScaledTarget],
    edges: tuple[Tensor, ...],
    settings: Settings,
    whole_numbers: bool,
) -> Rows:
    """Return the rows of the training, in which every member occurs once for each target.

    The members of the first target come first.  edges: the edges (T + 1,) of the T pieces of each
    column, () without pieces.  whole_numbers: whether the targets are codes of classes, which stay
    integers.

    data: all rows.  targets: their y on one or two scales.
    """
    # With all rows in one batch the precision is double, so that a row of weight 2 gives the same
    # training as that row twice.
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


def _group_modules_by_target(
    modules: Sequence[nn.Sequential], targets: int
) -> list[tuple[nn.Sequential, ...]]:
    """Return the trained modules of each target; they are changed in place to double precision.

    modules: those of all members for the first target, then for the next.  targets: their number.
    """
    members = len(modules) // targets
    in_double = [module.double() for module in modules]
    return [tuple(in_double[k * members : (k + 1) * members]) for k in range(targets)]


def _select_fitted_data(
    data: TrainingData, target: ScaledTarget, likelihood: Likelihood | None
) -> TrainingData:
    """Return the rows to which posteriors are fitted, with standardised targets.

    All rows are taken for Gaussian noise (likelihood None), whose last layers need few passes. For
    other likelihoods at most MOST_FITTED rows are taken, evenly spread.

    data: all rows.  target: their y on the scale of the networks.
    """
    fitted_data = replace(data, y=target.y)
    if likelihood is None:
        return fitted_data
    return fitted_data.select_rows(_choose_fitted_rows(len(target.y)))


def _fit_members(
    members: MemberPosteriors, bias: Tensor | None
) -> tuple[MemberPosteriors, list[list[tuple[Posterior, float]]]]:
    """Fit the posteriors of all members, or of constants with a warning if no network is kept.

    Returns the filled `members` (those of the constants in the second case), and for each kept
    member its posteriors with their shares.  bias (C,): the outputs of a constant; zero if None.
    """
    # The priors are tuned after these fits, so the distance to the mode needs no warning.
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "polish moved", UserWarning)
        warnings.filterwarnings("ignore", "The network is not at the mode", UserWarning)
        posteriors = members.fit_members()
        if posteriors:
            return members, posteriors
        warn(
            f"All {len(members.modules)} networks predict their held-out rows worse than the mean "
            "of y does, so none is used. The predictive is that of a constant with the spread of "
            "y, mixed with decision trees where these are better. Use fewer columns or more rows, "
            "or give likelihood='gaussian'."
        )
        constants = members.with_constants(bias)
        return constants, constants.fit_members()


def _assemble_ensemble(
    members: MemberPosteriors,
    posteriors: list[list[tuple[Posterior, float]]],
    networks: _TrainedNetworks,
    inputs: Scaling,
) -> Ensemble:
    """Return the ensemble of the kept members, which held-out rows have not calibrated yet.

    posteriors: for each kept member its posteriors with their shares.  inputs: the scaling of x.
    members: their fits.  networks: as they were trained.
    """
    target = networks.target
    left_out = tuple(
        member
        for member in range(len(members.modules))
        if members.constant or member not in members.kept
    )
    return Ensemble(
        settings=replace(members.settings, members=len(members.kept)),
        architecture=networks.architecture,
        modules=members.kept_modules,
        components=_make_components(posteriors),
        inputs=inputs,
        target=target.unit,
        epochs=networks.epochs,
        one_target=target.y.dim() == 1,
        scale=target.scale,
        held=members.data.held[members.kept],
        left_out=left_out,
        constant=members.constant,
    )


def _make_components(posteriors: list[list[tuple[Posterior, float]]]) -> tuple[Component, ...]:
    """Return the parts of the mixture, in which every member has the same weight.

    posteriors: for each member its posteriors with their shares, which sum to one.
    """
    return tuple(
        Component(posterior, member, share / len(posteriors))
        for member, posteriors_of_member in enumerate(posteriors)
        for posterior, share in posteriors_of_member
    )


def _restrict_support(ensemble: Ensemble, x: Tensor, weights: Tensor) -> Ensemble:
    """Return the ensemble with a support that ends at zero, if the rows show that y never is below.

    No target of the rows x (n, d) with weights (n,) is negative. If the ensemble expects at least
    ENOUGH_NEGATIVE negative targets among them, that is no chance, and the support ends at zero. If
    it expects fewer, the rows do not show it, and negative targets stay possible.
    """
    rows = x[thin_out(torch.ones(len(x), dtype=torch.bool), MOST_HELD_OUT)]
    below = ensemble.predict(rows).cdf(torch.zeros(len(rows), dtype=torch.float64))
    ends_at_zero = float(below.mean() * weights.sum()) >= ENOUGH_NEGATIVE
    # The positive scale ends at zero already, and the linear one does not.
    if isinstance(ensemble.scale, Positive):
        if ends_at_zero:
            return ensemble
        return replace(ensemble, scale=replace(ensemble.scale, closed=False))
    return replace(ensemble, scale=Censored()) if ends_at_zero else ensemble


def find_fitted_rows(ensemble: Ensemble, rows: int) -> Tensor:
    """Return a mask (n,) of the rows of the table to which the last layers were fitted.

    These are the rows that the columns of `ensemble.held` stand for.  rows: n.
    """
    if ensemble.held is None or ensemble.held.shape[1] == rows:
        return torch.ones(rows, dtype=torch.bool)
    return _choose_fitted_rows(rows)


def _choose_fitted_rows(rows: int) -> Tensor:
    """Return a mask (n,) of at most MOST_FITTED of n rows, evenly spread.  rows: n."""
    return thin_out(torch.ones(rows, dtype=torch.bool), MOST_FITTED)
