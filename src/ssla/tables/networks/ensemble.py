"""Settings, and the fitted ensemble."""

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
from ssla.tables.networks.recalibration import LARGEST_LOG_VARIANCE, as_trained, spread_out
from ssla.tables.networks.scaling import Scaling
from ssla.tables.networks.training import Architecture, Schedule
from ssla.tables.trees.beside_networks import Trees
from ssla.values import Marginal

GAUSSIAN = "gaussian"
HETEROSCEDASTIC = "heteroscedastic"
POSITIVE = "positive"
VARYING = (HETEROSCEDASTIC, POSITIVE)  # the noise depends on x: mean and log variance
CLASSES = "classes"
# The number of targets or classes -> the likelihood (None: Gaussian with unknown noise), and the
# number of outputs.
LIKELIHOODS: dict[str, Callable[[int], tuple[Likelihood | None, int]]] = {
    GAUSSIAN: lambda count: (None, count),
    HETEROSCEDASTIC: lambda count: (likelihoods.HeteroscedasticGaussian(), 2),
    "poisson": lambda count: (likelihoods.Poisson(), 1),
    CLASSES: lambda count: (
        (likelihoods.Bernoulli(), 1) if count == 2 else (likelihoods.Categorical(), count)
    ),
}
# Gaussian on another scale of y
ON_SCALE: dict[str, Transform] = {"log_normal": Exponential(), "logit_normal": Logistic()}
LIKELIHOODS |= dict.fromkeys(ON_SCALE, LIKELIHOODS[GAUSSIAN]) | {
    POSITIVE: LIKELIHOODS[HETEROSCEDASTIC]
}
CONTINUOUS = (GAUSSIAN, *VARYING, *ON_SCALE)
LINEAR_BELOW = 0.05  # share of the positive targets below which the scale is linear: a guess
UNKNOWN_ROWS = (
    "predictive_set compares new rows with those that each network held out of its training, but "
    "these are not known: the model was loaded from a file, got more rows by partial_fit, or was "
    "trained with {}. Fit again with {}, or use {}."
)


def choose_scale(y: Tensor, likelihood: str) -> Transform | None:
    """Return the scale of a likelihood for targets y: logarithmic, for example.

    None: the scale of y itself. Raises ValueError if y (n,) cannot be on a positive scale.
    """
    if likelihood != POSITIVE:
        return ON_SCALE.get(likelihood)
    if y.dim() != 1 or not bool((y >= 0).all()) or not bool((y > 0).any()):
        raise ValueError(
            f"likelihood={likelihood!r} needs one target that is {Positive.support} in every row, "
            "and not always zero."
        )
    positive = y[y > 0]
    low = positive.kthvalue(1 + int(LINEAR_BELOW * (len(positive) - 1))).values
    return Positive(float(low.log()), float(positive.max().log()) + 1e-6)


def scale_targets(y: Tensor, scale: Transform | None, likelihood: str) -> Tensor:
    """Return targets y (n,) or (n, D) on the scale of the network.

    Raises ValueError if y is outside the support of the scale.
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
    """The settings of the estimators and the command."""

    likelihood: str = GAUSSIAN
    hidden: tuple[int, ...] = (50, 50)
    activation: str = "silu"
    # numbers also by the pieces of their ranges: see `ssla.tables.networks.pieces`
    piecewise: bool = False
    members: int = 1
    weights: str = "last_layer"
    structure: str = "dense"
    tune: bool = True
    validation_fraction: float = 0.1  # 0: no early stopping, noise from the training residuals
    trees: int = 0  # for each member, beside its network
    schedule: Schedule = field(default_factory=Schedule)
    seed: int = 0


@dataclass(frozen=True, eq=False)
class Ensemble:
    """One or several fitted networks, in the units of the table."""

    settings: Settings
    architecture: Architecture
    modules: tuple[nn.Sequential, ...]
    components: tuple[Component, ...]
    inputs: Scaling
    target: Scaling | None  # None: counts and classes have no unit
    epochs: int
    one_target: bool = True
    # (factor, share): see `ssla.tables.networks.recalibration`
    spreads: tuple[tuple[float, float], ...] = ((1.0, 1.0),)
    # classes: the share of the posteriors; the rest is that of the networks as they were trained
    trust: float = 1.0
    trees: Trees | None = None  # beside the networks, for classes or mean and log variance
    scale: Transform | None = None  # of the target, beside its unit; None: linear
    # rows that each member held out (M, n) bool; None: not known, after a file or an update
    held: Tensor | None = None
    # classes: 1 − p(y) of held-out rows by their member (m,), and their weights (m,)
    scores: tuple[Tensor, Tensor] | None = None
    # members without a share: a constant is better, see `ssla.tables.networks.constant_members`
    left_out: tuple[int, ...] = ()
    constant: bool = False  # all members are left out: the networks are constants

    @property
    def kept(self) -> tuple[int, ...]:
        """The numbers of the members whose networks are kept, among all that were trained."""
        members = len(self.modules) + (0 if self.constant else len(self.left_out))
        return tuple(m for m in range(members) if self.constant or m not in self.left_out)

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
        return (
            f"{len(self.left_out)} of {len(self.kept) + len(self.left_out)} networks predicted "
            "their held-out rows worse than the mean of y (by squared error) and have no share."
        )

    def standardise(self, x: Tensor) -> Tensor:
        """Return the inputs of the networks at x (N, d), (N, d).

        Inputs far outside of the training range are shrunk. Raises ValueError where codes of levels
        are impossible.
        """
        check_codes(x, self.architecture.levels)
        z = self.inputs(x)
        factors = shrink_factors(z)
        if factors is None:
            return z
        levels = torch.tensor(self.architecture.levels or [0] * z.shape[1])
        return torch.where(
            levels > 0, z, shrink_rows(z, factors)
        )  # codes of levels stay as they are

    def predict(self, x: Tensor, refit: str | Refit = "output") -> Predictive:
        """Return the predictive of y at x (N, d), in y's own unit."""
        z = self.standardise(x)
        averages = self._has_closed_average(refit)
        tree_predictive = None
        move = None
        if self.trees is not None:
            tree_predictive, move = self.trees.predict(z, self.modules, None if averages else refit)
        predictive = self._average(z, move) if averages else self._mix(z, refit, move)
        if self.trees is not None and tree_predictive is not None:
            share = self.trees.share
            if averages:
                predictive = pool_normals(predictive, tree_predictive, share)
            else:
                predictive = mixture([predictive, tree_predictive], [1 - share, share])
        return self._in_unit_of_target(predictive)

    def _in_unit_of_target(self, predictive: Predictive) -> Predictive:
        """Return the predictive of standardised targets in y's own unit, and on its own scale."""
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
        """Return cross-conformal intervals of one target at x (N, d), (N, 2), in y's own unit.

        Each row is compared with held-out rows, by the members that held them out. Raises
        ValueError if these are not known.
        """
        if self.held is None or not bool(self.held.any(1).all()):
            raise ValueError(
                UNKNOWN_ROWS.format(
                    "early_stopping=False", "early_stopping=True", "predict_interval"
                )
            )
        z = self.standardise(x)
        # Of several posteriors of a member, for nodes of the noise, the first is the central one.
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

        A set has the classes that are as probable as the observed classes of held-out rows, and
        the most probable one. Raises ValueError if the scores of these rows are not known, and
        warns if they are too few.
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
        """Check whether the average over mean and log variance has a closed form.

        It has one for the default refit of variational Gaussians.
        """
        return (
            self.settings.likelihood in VARYING
            and all(component.posterior.gaussian == "variational" for component in self.components)
            and resolve(refit) == OutputRefit()
        )

    def _average(self, z: Tensor, move: Tensor | None) -> Predictive:
        """Return the average of all posteriors at z (N, d), for mean and log variance.

        move (N,): by how much the trees move the networks' means; None: not at all.
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

    def _mix(self, z: Tensor, refit: str | Refit, move: Tensor | None) -> Predictive:
        """Return the mixture of all posteriors, spreads and networks as trained, at z (N, d).

        move (N,): by how much the trees move the networks' means; None: not at all.
        """
        parts = []
        weights = []
        for component in self.components:
            predictive = component.posterior.predict(z, refit)
            if move is not None:
                predictive = affine(predictive, move, 1.0)
            for factor, share in self.spreads:
                parts.append(predictive if factor == 1 else spread_out(predictive, factor))
                weights.append(self.trust * share * component.weight)
        if self.trust < 1:
            likelihood = self.components[0].posterior.likelihood
            parts += [as_trained(module, likelihood, z) for module in self.modules]
            weights += [(1 - self.trust) / len(self.modules)] * len(self.modules)
        return parts[0] if len(parts) == 1 else mixture(parts, weights)
