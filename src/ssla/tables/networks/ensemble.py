"""Settings, and the fitted ensemble."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from ssla import likelihoods
from ssla._checks import level as checked_level
from ssla._checks import warn
from ssla.diagnostics.conformal import Member, cross_sets
from ssla.likelihoods import Likelihood
from ssla.maths.order_statistics import conformal_quantile, shortage
from ssla.network.bounds import shrink_factors, shrunk
from ssla.predictive import Predictive, affine, mixture, transformed
from ssla.predictive.normals import averaged, pooled
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
LIKELIHOODS: dict[
    str, Callable[[int], tuple[Likelihood | None, int]]
] = {  # targets or classes -> likelihood, outputs
    GAUSSIAN: lambda count: (None, count),  # unknown noise
    HETEROSCEDASTIC: lambda count: (likelihoods.HeteroscedasticGaussian(), 2),
    "poisson": lambda count: (likelihoods.Poisson(), 1),
    CLASSES: lambda count: (
        (likelihoods.Bernoulli(), 1) if count == 2 else (likelihoods.Categorical(), count)
    ),
}
ON_SCALE: dict[str, Transform] = {
    "log_normal": Exponential(),
    "logit_normal": Logistic(),
}  # Gaussian on another scale of y
LIKELIHOODS |= dict.fromkeys(ON_SCALE, LIKELIHOODS[GAUSSIAN]) | {
    POSITIVE: LIKELIHOODS[HETEROSCEDASTIC]
}
CONTINUOUS = (GAUSSIAN, *VARYING, *ON_SCALE)
LINEAR_BELOW = 0.05  # of the positive targets
UNKNOWN_ROWS = (
    "predictive_set compares new rows with those that each network held out of its training, but "
    "these are not known: the model was loaded from a file, got more rows by partial_fit, or was "
    "trained with {}. Fit again with {}, or use {}."
)


def scale_of(y: Tensor, likelihood: str) -> Transform | None:
    """The scale of a likelihood for targets y: logarithmic, for example. None: that of y itself."""
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


def on_scale(y: Tensor, scale: Transform | None, likelihood: str) -> Tensor:
    """y on the scale of the network."""
    if scale is None:
        return y
    if y.dim() != 1 or not bool(scale.inside(y).all()):
        raise ValueError(
            f"likelihood={likelihood!r} needs one target that is {scale.support} in every row."
        )
    return scale.into(y)


@dataclass(frozen=True)
class Settings:
    """The settings of the estimators and the command."""

    likelihood: str = GAUSSIAN
    hidden: tuple[int, ...] = (50, 50)
    activation: str = "silu"
    piecewise: bool = (
        False  # numbers also by the pieces of their ranges: see `ssla.tables.networks.pieces`
    )
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
    spreads: tuple[tuple[float, float], ...] = (
        (1.0, 1.0),
    )  # (factor, share): see `ssla.tables.networks.recalibration`
    # classes: the share of the posteriors; the rest is that of the networks as they were trained
    trust: float = 1.0
    trees: Trees | None = None  # beside the networks, for classes or mean and log variance
    scale: Transform | None = None  # of the target, beside its unit; None: linear
    # rows that each member held out (M, n) bool; None: not known, after a file or an update
    held: Tensor | None = None
    scores: tuple[Tensor, Tensor] | None = (
        None  # classes: 1 − p(y) of held-out rows by their member (m,), and their weights (m,)
    )
    left_out: tuple[
        int, ...
        # members without a share: a constant is better, see `ssla.tables.networks.constant_members`
    ] = ()
    constant: bool = False  # all members are left out: the networks are constants

    @property
    def kept(self) -> tuple[int, ...]:
        """The number of the member of each network, among all that were trained."""
        members = len(self.modules) + (0 if self.constant else len(self.left_out))
        return tuple(m for m in range(members) if self.constant or m not in self.left_out)

    @property
    def remark(self) -> str:
        """What a report says about members that have no share; empty if all have one."""
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

    def standardised(self, x: Tensor) -> Tensor:
        """The inputs of the networks at x (N, d).

        ValueError where codes of levels are impossible.
        """
        check_codes(x, self.architecture.levels)
        z = self.inputs(x)
        factors = shrink_factors(z)
        if factors is None:
            return z
        levels = torch.tensor(self.architecture.levels or [0] * z.shape[1])
        return torch.where(levels > 0, z, shrunk(z, factors))  # codes of levels stay as they are

    def predict(self, x: Tensor, refit: str | Refit = "output") -> Predictive:
        """The predictive of y at x (N, d), in y's own unit."""
        z = self.standardised(x)
        average = self._averages(refit)
        own, move = None, None
        if self.trees is not None:
            own, move = self.trees.predict(z, self.modules, None if average else refit)
        whole = self._averaged(z, move) if average else self._mixed(z, refit, move)
        if self.trees is not None and own is not None:
            share = self.trees.share
            whole = (
                pooled(whole, own, share) if average else mixture([whole, own], [1 - share, share])
            )
        if self.target is None:
            return whole
        shift, scale = self.target.shift, self.target.scale
        whole = (
            affine(whole, shift[0], scale[0]) if self.one_target else affine(whole, shift, scale)
        )
        return whole if self.scale is None else transformed(whole, self.scale)

    def predictive_set(self, x: Tensor, level: float) -> Tensor:
        """Cross-conformal intervals of one target (N, 2), in y's own unit: each row is compared
        by members that held it out.
        """
        if self.held is None or not bool(self.held.any(1).all()):
            raise ValueError(
                UNKNOWN_ROWS.format(
                    "early_stopping=False", "early_stopping=True", "predict_interval"
                )
            )
        z, first = (
            self.standardised(x),
            {component.member: component for component in reversed(self.components)},
        )
        # a row counts once, also where several networks held it out
        shares = 1 / self.held.sum(0).clamp_min(1).double()
        members = [
            Member(first[m].posterior, z, rows=held, shares=shares)
            for m, held in enumerate(self.held)
        ]
        found = cross_sets(members, level)
        if self.target is not None:
            found = self.target.shift + self.target.scale * found
        return found if self.scale is None else self.scale.out(found)

    def class_sets(self, x: Tensor, level: float) -> Tensor:
        """Cross-conformal sets of classes, bool (N, C): as probable as held-out rows' own, or
        the most probable.
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
        short = shortage(weights, level, "held-out rows")
        if short is not None:
            warn(
                f"A predictive set of {level:g} {short}: every set has all classes. Use more rows "
                "or a lower level."
            )
        probs = self.predict(x).probs.double()
        return (1 - probs <= conformal_quantile(scores, weights, level)) | (
            probs == probs.amax(1, keepdim=True)
        )

    def _averages(self, refit: str | Refit) -> bool:
        """Whether the average over mean and log variance has a closed form: the default rung of
        a variational Gaussian.
        """
        variational = all(
            component.posterior.gaussian == "variational" for component in self.components
        )
        return (
            self.settings.likelihood in VARYING and variational and resolve(refit) == OutputRefit()
        )

    def _averaged(self, z: Tensor, move: Tensor | None) -> Predictive:
        marginals = [component.posterior.outputs_at(z) for component in self.components]
        if move is not None:
            marginals = [
                Marginal(torch.stack([f[:, 0] + move, f[:, 1]], 1), K) for f, K in marginals
            ]
        weights = torch.tensor(
            [component.weight for component in self.components], dtype=torch.float64
        )
        factors, shares = torch.tensor(self.spreads, dtype=torch.float64).unbind(1)
        return averaged(marginals, weights, factors, shares, z, LARGEST_LOG_VARIANCE)

    def _mixed(self, z: Tensor, refit: str | Refit, move: Tensor | None) -> Predictive:
        parts, weights = [], []
        for component in self.components:
            own = component.posterior.predict(z, refit)
            own = own if move is None else affine(own, move, 1.0)
            for factor, share in self.spreads:
                parts.append(own if factor == 1 else spread_out(own, factor))
                weights.append(self.trust * share * component.weight)
        if self.trust < 1:
            parts += [
                as_trained(module, self.components[0].posterior.likelihood, z)
                for module in self.modules
            ]
            weights += [(1 - self.trust) / len(self.modules)] * len(self.modules)
        return parts[0] if len(parts) == 1 else mixture(parts, weights)
