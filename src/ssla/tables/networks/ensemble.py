"""The settings of a fit, and the fitted ensemble with its predictions.

f are the outputs of a network, and K is their covariance under its posterior. `LIKELIHOODS` has the
likelihoods of tables by their names.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from ssla import likelihoods
from ssla._checks import check_level as checked_level
from ssla._checks import warn
from ssla.diagnostics.conformal import Member, cross_conformal_sets
from ssla.likelihoods import Likelihood
from ssla.maths.order_statistics import conformal_quantile, describe_row_shortage
from ssla.network.bounds import shrink_factors, shrink_rows
from ssla.predictive import Predictive, affine, mixture, transformed
from ssla.predictive.normals import average_normals, pool_normals
from ssla.predictive.positive import Positive
from ssla.predictive.transformed import Exponential, Logistic, Transform
from ssla.refit import OutputRefit, Refit, resolve
from ssla.tables.networks.component import Component
from ssla.tables.networks.embeddings import check_codes
from ssla.tables.networks.recalibration import (
    LARGEST_LOG_VARIANCE,
    predict_as_trained,
    stretch_predictive,
)
from ssla.tables.networks.scaling import Scaling
from ssla.tables.networks.training import Architecture, Schedule
from ssla.tables.trees.beside_networks import Trees
from ssla.values import Marginal

GAUSSIAN = "gaussian"
HETEROSCEDASTIC = "heteroscedastic"
POSITIVE = "positive"
VARYING = (HETEROSCEDASTIC, POSITIVE)  # the noise depends on x: mean and log variance
CLASSES = "classes"
# Each function takes the number of targets or classes. It returns the likelihood (None: Gaussian
# with unknown noise) and the number of outputs of a network.
LIKELIHOODS: dict[str, Callable[[int], tuple[Likelihood | None, int]]] = {
    GAUSSIAN: lambda count: (None, count),
    HETEROSCEDASTIC: lambda count: (likelihoods.HeteroscedasticGaussian(), 2),
    "poisson": lambda count: (likelihoods.Poisson(), 1),
    CLASSES: lambda count: (
        (likelihoods.Bernoulli(), 1) if count == 2 else (likelihoods.Categorical(), count)
    ),
}
# These likelihoods are Gaussian on another scale of y.
ON_SCALE: dict[str, Transform] = {"log_normal": Exponential(), "logit_normal": Logistic()}
LIKELIHOODS |= dict.fromkeys(ON_SCALE, LIKELIHOODS[GAUSSIAN]) | {
    POSITIVE: LIKELIHOODS[HETEROSCEDASTIC]
}
CONTINUOUS = (GAUSSIAN, *VARYING, *ON_SCALE)
LINEAR_BELOW = 0.05  # the positive scale is linear below this quantile of positive targets; a guess
SMALLEST_RANGE = 1e-6  # of the positive scale, in logarithms; a guess
UNKNOWN_ROWS = (
    "predictive_set compares new rows with those that each network held out of its training, but "
    "these are not known: the model was loaded from a file, got more rows by partial_fit, or was "
    "trained with {}. Fit again with {}, or use {}."
)


def choose_scale(y: Tensor, likelihood: str) -> Transform | None:
    """Return the scale on which a likelihood has its targets y (n,) or (n, D), such as log y.

    None means the scale of y itself. Raises ValueError for the positive likelihood if y has several
    columns, negative values or no positive one.
    """
    if likelihood != POSITIVE:
        return ON_SCALE.get(likelihood)

    if y.dim() != 1 or not bool((y >= 0).all()) or not bool((y > 0).any()):
        raise ValueError(
            f"likelihood={likelihood!r} needs one target that is {Positive.support} in every row, "
            "and not always zero."
        )

    positive = y[y > 0]
    rank = 1 + int(LINEAR_BELOW * (len(positive) - 1))  # `kthvalue` counts from one
    low = positive.kthvalue(rank).values

    # The small term keeps the ends in order where all positive targets are equal.
    return Positive(float(low.log()), float(positive.max().log()) + SMALLEST_RANGE)


def scale_targets(y: Tensor, scale: Transform | None, likelihood: str) -> Tensor:
    """Return targets y (n,) or (n, D) on the scale of the network; as they are if scale is None.

    likelihood: its name, for the error. Raises ValueError if there are several targets, or if one
    is outside the support of the scale.
    """
    if scale is None:
        return y
    if y.dim() != 1 or not bool(scale.is_in_support(y).all()):
        raise ValueError(
            f"likelihood={likelihood!r} needs one target that is {scale.support} in every row."
        )
    return scale.to_z(y)


@dataclass(frozen=True)
class Settings:
    """The settings of a fit, as the estimators and the command choose them."""

    likelihood: str = GAUSSIAN  # a key of LIKELIHOODS
    hidden: tuple[int, ...] = (50, 50)  # widths of the hidden layers
    activation: str = "silu"  # a key of `training.ACTIVATIONS`
    # whether a number is also given by the pieces of its range: see `ssla.tables.networks.pieces`
    piecewise: bool = False
    members: int = 1  # number of networks
    weights: str = "last_layer"  # which weights are uncertain, as in `ssla.fit`
    structure: str = "dense"  # of their curvature, as in `ssla.fit`
    tune: bool = True  # whether the data choose the prior, and calibrate the predictive
    validation_fraction: float = 0.1  # 0: no early stopping, noise from the training residuals
    trees: int = 0  # number for each member, beside its network
    schedule: Schedule = field(default_factory=Schedule)
    seed: int = 0  # of the held-out rows, the training and the trees


@dataclass(frozen=True, eq=False)
class Ensemble:
    """One or several fitted networks with their posteriors, which predict in the table's units."""

    settings: Settings
    architecture: Architecture
    modules: tuple[nn.Sequential, ...]  # the networks of the kept members, in double precision
    components: tuple[Component, ...]  # of the mixture of the networks
    inputs: Scaling  # of the columns
    target: Scaling | None  # the unit of the target; None: counts and classes have none
    epochs: int  # of the training
    one_target: bool = True  # whether y was (n,), and not (n, D)
    # (factor, share): see `ssla.tables.networks.recalibration`
    spreads: tuple[tuple[float, float], ...] = ((1.0, 1.0),)
    # classes: the share of the posteriors; the rest is that of the networks as they were trained
    trust: float = 1.0
    trees: Trees | None = None  # beside the networks, for classes or mean and log variance
    scale: Transform | None = None  # of the target, beside its unit; None: linear
    # rows that each kept member held out (M, n) bool; None: not known, after loading or an update
    held: Tensor | None = None
    # classes: 1 − p(y) of held-out rows by their member (m,), and their weights (m,); None: not
    # known
    scores: tuple[Tensor, Tensor] | None = None
    # indices, among the trained members, of those without a share, because a constant is better:
    # see `ssla.tables.networks.constant_members`
    left_out: tuple[int, ...] = ()
    # whether all members are left out; `modules` are then constants, one for each trained member
    constant: bool = False

    @property
    def kept_members(self) -> tuple[int, ...]:
        """The index, among all trained members, of each network in `modules`."""
        # Constants take the places of all trained members. Otherwise those left out have no module.
        if self.constant:
            return tuple(range(len(self.modules)))
        trained = len(self.modules) + len(self.left_out)
        return tuple(member for member in range(trained) if member not in self.left_out)

    @property
    def remark(self) -> str:
        """The sentence of a report about members without a share; empty if all have one."""
        if self.constant:
            return (
                f"All {len(self.left_out)} networks predicted their held-out rows worse than the "
                "mean of y. The predictive is that of a constant with the spread of y, and of the "
                "decision trees if there are any."
            )

        if not self.left_out:
            return ""
        trained = len(self.kept_members) + len(self.left_out)
        return (
            f"{len(self.left_out)} of {trained} networks predicted "
            "their held-out rows worse than the mean of y (by squared error) and have no share."
        )

    def standardise(self, x: Tensor) -> Tensor:
        """Return the inputs z (N, d) of the networks for rows x (N, d) of the table.

        A row that is so far away that squares would overflow is shrunk, except for its codes of
        levels. Raises ValueError where codes are impossible.
        """
        check_codes(x, self.architecture.levels)
        z = self.inputs(x)
        factors = shrink_factors(z)
        if factors is None:
            return z
        is_code = torch.tensor(self.architecture.levels or [0] * z.shape[1]) > 0
        return torch.where(is_code, z, shrink_rows(z, factors))

    def predict(self, x: Tensor, refit: str | Refit = "output") -> Predictive:
        """Return the predictive of y at x (N, d), in y's own unit.

        Where the average over the posteriors of mean and log variance has a closed form, it takes
        the place of the refit. Raises ValueError where codes of levels are impossible.

        refit: how a posterior becomes a predictive, by the name of the refit or as an object.
        """
        z = self.standardise(x)
        is_averaged = self._has_closed_average(refit)

        # The trees have a predictive of their own, and they move the networks' means.
        tree_predictive = None
        move = None
        if self.trees is not None:
            tree_refit = None if is_averaged else refit
            tree_predictive, move = self.trees.predict(z, self.modules, tree_refit)
        if is_averaged:
            predictive = self._average_posteriors(z, move)
        else:
            predictive = self._mix_posteriors(z, refit, move)

        # Averages of Gaussians are pooled as Gaussians; other predictives are mixed.
        if self.trees is not None and tree_predictive is not None:
            share = self.trees.share
            if is_averaged:
                predictive = pool_normals(predictive, tree_predictive, share)
            else:
                predictive = mixture([predictive, tree_predictive], [1 - share, share])

        return self._convert_to_target_unit(predictive)

    def _convert_to_target_unit(self, predictive: Predictive) -> Predictive:
        """Convert the predictive of standardised targets to y's own unit and scale.

        The predictive is returned as it is for counts and classes, which have no unit.
        """
        if self.target is None:
            return predictive
        shift = self.target.shift
        scale = self.target.scale
        if self.one_target:
            predictive = affine(predictive, shift[0], scale[0])
        else:
            predictive = affine(predictive, shift, scale)
        return predictive if self.scale is None else transformed(predictive, self.scale)

    def predictive_set(self, x: Tensor, level: float) -> Tensor:
        """Return cross-conformal intervals (N, 2) of one target at x (N, d), in y's own unit.

        Each new row is compared with held-out rows, by the members that held them out. Raises
        ValueError if the held-out rows are not known, and for a wrong level.

        level: the coverage, between 0 and 1.
        """
        if self.held is None or not bool(self.held.any(1).all()):
            raise ValueError(
                UNKNOWN_ROWS.format(
                    "early_stopping=False", "early_stopping=True", "predict_interval"
                )
            )

        z = self.standardise(x)

        # A member may have a posterior for each node of the noise, the central one first. In
        # reverse order the central posterior is written last, and stays.
        central = {component.member: component for component in reversed(self.components)}

        # A row counts once, also where several networks held it out.
        row_shares = 1 / self.held.sum(0).clamp_min(1).double()
        members = [
            Member(central[m].posterior, z, rows=held, shares=row_shares)
            for m, held in enumerate(self.held)
        ]
        intervals = cross_conformal_sets(members, level)
        if self.target is not None:
            intervals = self.target.shift + self.target.scale * intervals
        return intervals if self.scale is None else self.scale.to_y(intervals)

    def class_sets(self, x: Tensor, level: float) -> Tensor:
        """Return cross-conformal sets of classes at x (N, d), bool (N, C).

        A set has the most probable class, and all classes whose score 1 − p is at most the quantile
        of the held-out rows' scores at this level. If these are too few for the level, a warning is
        given, and every set has all classes. Raises ValueError if the scores are not known, and for
        a wrong level.

        level: the coverage, between 0 and 1.
        """
        if self.scores is None:
            raise ValueError(
                UNKNOWN_ROWS.format(
                    "early_stopping=False or tune=False",
                    "early_stopping=True and tune=True",
                    "predict_set",
                )
            )

        level = checked_level(level)
        scores, weights = self.scores
        too_few = describe_row_shortage(weights, level, "held-out rows")
        if too_few is not None:
            warn(
                f"A predictive set of {level:g} {too_few}: every set has all classes. Use more "
                "rows or a lower level."
            )

        probs = self.predict(x).probs.double()
        most_probable = probs == probs.amax(1, keepdim=True)
        return (1 - probs <= conformal_quantile(scores, weights, level)) | most_probable

    def _has_closed_average(self, refit: str | Refit) -> bool:
        """Return whether mean and log variance are averaged over the posteriors in closed form.

        That is so for the default refit, if all posteriors are variational Gaussians.  refit: as in
        `predict`.
        """
        return (
            self.settings.likelihood in VARYING
            and all(component.posterior.gaussian == "variational" for component in self.components)
            and resolve(refit) == OutputRefit()
        )

    def _average_posteriors(self, z: Tensor, move: Tensor | None) -> Predictive:
        """Return the predictive at z (N, d), averaged over all posteriors of mean and log variance.

        The predictive is that of the standardised target.  move (N,): what the trees add to the
        means; None: nothing.
        """
        marginals = [component.posterior.outputs_at(z) for component in self.components]
        if move is not None:
            marginals = [
                Marginal(torch.stack([f[:, 0] + move, f[:, 1]], 1), K) for f, K in marginals
            ]

        weights = torch.tensor(
            [component.weight for component in self.components], dtype=torch.float64
        )
        factors, factor_shares = torch.tensor(self.spreads, dtype=torch.float64).unbind(1)
        return average_normals(marginals, weights, factors, factor_shares, z, LARGEST_LOG_VARIANCE)

    def _mix_posteriors(self, z: Tensor, refit: str | Refit, move: Tensor | None) -> Predictive:
        """Return the mixture of all posteriors, spreads and networks as trained, at z (N, d).

        The predictive is that of the standardised target.  refit: as in `predict`.  move (N,): what
        the trees add to the means; None: nothing.
        """
        predictives = []
        weights = []
        for component in self.components:
            predictive = component.posterior.predict(z, refit)
            if move is not None:
                predictive = affine(predictive, move, 1.0)
            for factor, share in self.spreads:
                predictives.append(
                    predictive if factor == 1 else stretch_predictive(predictive, factor)
                )
                weights.append(self.trust * share * component.weight)

        if self.trust < 1:
            likelihood = self.components[0].posterior.likelihood
            predictives += [predict_as_trained(module, likelihood, z) for module in self.modules]
            weights += [(1 - self.trust) / len(self.modules)] * len(self.modules)

        return predictives[0] if len(predictives) == 1 else mixture(predictives, weights)
