"""Settings and rows -> a fitted ensemble."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ssla._checks import unknown_name, warn
from ssla.fitting.again import polish_again
from ssla.fitting.tuning import tune
from ssla.likelihoods import Gaussian, Likelihood
from ssla.posterior import Posterior
from ssla.predictive.positive import Censored, Positive
from ssla.predictive.transformed import Transform
from ssla.priors import Gaussian as GaussianPrior
from ssla.report import POLISH
from ssla.tables.networks.component import Component
from ssla.tables.networks.constant_members import constant_network, is_worse_than_constant
from ssla.tables.networks.embeddings import check_codes, dimensions_of, without_codes
from ssla.tables.networks.ensemble import (
    CLASSES,
    CONTINUOUS,
    LIKELIHOODS,
    VARYING,
    Ensemble,
    Settings,
    on_scale,
    scale_of,
)
from ssla.tables.networks.folds import folds
from ssla.tables.networks.held_out_noise import NODES, Noise, at_noise, held_out_noise
from ssla.tables.networks.last_layer_fits import fit_last_layer
from ssla.tables.networks.pieces import counts_of, edges_of
from ssla.tables.networks.recalibration import as_trained, spreads_of, stretched_log_densities
from ssla.tables.networks.scaling import Scaling, scaling_of
from ssla.tables.networks.stacking import shares
from ssla.tables.networks.training import Architecture, Rows, train
from ssla.tables.networks.whole_numbers import log_probs, small_counts
from ssla.tables.trees.beside_networks import calibrated_trees
from ssla.tables.trees.forest import Forest
from ssla.values import Marginal

PRECISIONS = (
    0.03,
    100.0,
)  # of priors that held-out rows choose; inputs and targets are standardised
DOUBT = 1.5  # standard deviation of their logarithm around the precision of the training
FEW_ROWS, MOST_LEFT_OUT = 30, 0.2
# nats: by how much another scale of the target must be better, and by more than its standard error
WORTH_A_SCALE = 0.01
ENOUGH_NEGATIVE = (
    7.0  # rows that a model expects below zero: that none is there by chance has probability e⁻⁷
)
SEARCHES = 2  # members that search for a prior
MOST_HELD_OUT, MOST_OTHERS = 2_000, 10_000
MOST_FITTED = (
    200_000  # rows of last layers that need several passes: with more they would predict the same
)

Grow = Callable[[Tensor, Tensor, Tensor, int], Forest]
"""Rows (n, d), targets (n,), row weights (n,) and a seed -> trees that predict probabilities,
or one number.
"""


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
    """x (n, d) float64, y (n,) or (n, D), row weights (n,) > 0 -> a fitted ensemble.

    Draws no global random number.

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
    inputs = scaling_of(x, weights, levels)
    z = inputs(x)
    generator = torch.Generator().manual_seed(settings.seed)
    held = folds(
        len(x),
        settings.members,
        _fraction(settings, len(x)),
        generator,
        y if classes else None,
        groups,
        time,
    )
    data = _Data(z, y, weights, held)
    # Held-out rows of every member choose between two scales of y.
    both = rival is not None and bool(held.any(1).all())
    names = (settings.likelihood, rival) if both else (settings.likelihood,)
    targets = [_Target.of(y, weights, str(name)) for name in names]
    edges = edges_of(without_codes(z, levels), weights) if settings.piecewise else ()
    layers = settings.hidden, settings.activation, counts_of(edges)
    architecture = Architecture(x.shape[1], outputs, *layers, levels, dimensions_of(levels))
    bias = _first_bias(y, weights) if settings.likelihood == "poisson" else None
    rows = _training_rows(data, targets, edges, settings, whole_numbers=bool(classes))
    trained = train(
        architecture, likelihood, rows, settings.schedule, settings.seed, bias, on_epoch
    )
    modules = _by_target(trained.modules, len(targets))
    best = 0
    if both and likelihood is not None:
        best = _best_target(targets, modules, trained.losses, data, likelihood)
    target = targets[best]
    settings = replace(settings, likelihood=target.likelihood)
    fitted_data = _Data(z, target.y, weights, held)
    if likelihood is not None:
        fitted_data = fitted_data.at(_at_most(torch.ones(len(z), dtype=torch.bool), MOST_FITTED))
    work = _Work(fitted_data, likelihood, settings, modules[best], grow, levels)
    work, posteriors = _with_posteriors(work, bias)
    ensemble = Ensemble(
        replace(settings, members=len(work.kept)),
        architecture,
        work.kept_modules,
        _components(posteriors),
        inputs,
        target.unit,
        trained.epochs,
        target.y.dim() == 1,
        scale=target.scale,
        held=fitted_data.held[work.kept],
        left_out=tuple(m for m in range(len(held)) if work.constant or m not in work.kept),
        constant=work.constant,
    )
    ensemble = work.calibrated(ensemble)
    return _with_support(ensemble, x, weights) if both else ensemble


def _check_likelihood(name: str) -> None:
    """ValueError for an unknown name, with the most similar one."""
    if name not in LIKELIHOODS:
        raise ValueError(
            unknown_name("likelihood", name, [known for known in LIKELIHOODS if known != CLASSES])
        )


def _first_bias(y: Tensor, weights: Tensor) -> Tensor:
    """The bias with which the training of counts starts: the logarithm of their mean (1,)."""
    return (weights @ y / weights.sum()).clamp_min(1e-3).log()[None]


def _training_rows(
    data: _Data,
    targets: list[_Target],
    edges: tuple[Tensor, ...],
    settings: Settings,
    whole_numbers: bool,
) -> Rows:
    """The rows of the training: every member once for each target. whole_numbers: of classes."""
    # All rows at once: in double precision, so that row weights equal repeated rows.
    dtype = torch.float64 if settings.schedule.batch_size is None else torch.float32
    values = [target.y if whole_numbers else target.y.to(dtype) for target in targets]
    members = len(data.held)
    by_member = None if len(values) == 1 else torch.stack(values).repeat_interleave(members, 0)
    return Rows(
        data.z.to(dtype),
        values[0],
        data.weights.to(dtype),
        data.held.repeat(len(values), 1),
        edges,
        by_member,
    )


def _by_target(modules: Sequence[nn.Sequential], targets: int) -> list[tuple[nn.Sequential, ...]]:
    """The trained modules of each target, in double precision."""
    members = len(modules) // targets
    return [
        tuple(module.double() for module in modules[k * members :][:members])
        for k in range(targets)
    ]


def _best_target(
    targets: list[_Target],
    modules: list[tuple[nn.Sequential, ...]],
    losses: Tensor,
    data: _Data,
    likelihood: Likelihood,
) -> int:
    """Which of two targets the networks predict best at held-out rows."""
    if small_counts(data.y, data.weights):
        return _best(_gains_of_counts(targets, modules, data, likelihood))
    return _best(_gains(targets, losses, data))


def _with_posteriors(
    work: _Work, bias: Tensor | None
) -> tuple[_Work, list[list[tuple[Posterior, float]]]]:
    """The work with its posteriors; with constants in place of the networks if none has a share."""
    with warnings.catch_warnings():  # these fits are tuned afterwards
        warnings.filterwarnings("ignore", "polish moved", UserWarning)
        warnings.filterwarnings("ignore", "The network is not at the mode", UserWarning)
        posteriors = work.all_posteriors()
        if posteriors:
            return work, posteriors
        warn(
            f"All {len(work.modules)} networks predict their held-out rows worse than the mean of "
            "y does, so none is used. The predictive is that of a constant with the spread of y, "
            "mixed with decision trees where these are better. Use fewer columns or more rows, or "
            "give likelihood='gaussian'."
        )
        work = work.of_constants(bias)
        return work, work.all_posteriors()


def _components(posteriors: list[list[tuple[Posterior, float]]]) -> tuple[Component, ...]:
    """The parts of the mixture: every member has the same weight."""
    return tuple(
        Component(posterior, member, share / len(posteriors))
        for member, parts in enumerate(posteriors)
        for posterior, share in parts
    )


def _with_support(ensemble: Ensemble, x: Tensor, weights: Tensor) -> Ensemble:
    """Without negative targets, if the table shows that there are none: the model would have
    expected some such rows.
    """
    some = x[_at_most(torch.ones(len(x), dtype=torch.bool), MOST_HELD_OUT)]
    below = ensemble.predict(some).cdf(torch.zeros(len(some), dtype=torch.float64))
    shown = float(below.mean() * weights.sum()) >= ENOUGH_NEGATIVE
    if isinstance(ensemble.scale, Positive):
        return ensemble if shown else replace(ensemble, scale=replace(ensemble.scale, closed=False))
    return replace(ensemble, scale=Censored()) if shown else ensemble


@dataclass(frozen=True, eq=False)
class _Target:
    """Targets on the scale of the networks, in their unit there (None: counts and classes have
    none).
    """

    y: Tensor
    likelihood: str
    scale: Transform | None
    unit: Scaling | None

    @staticmethod
    def of(y: Tensor, weights: Tensor, likelihood: str) -> _Target:
        scale = scale_of(y, likelihood)
        y = on_scale(y, scale, likelihood)
        if likelihood not in CONTINUOUS:
            return _Target(y, likelihood, scale, None)
        columns = y[:, None] if y.dim() == 1 else y
        unit = scaling_of(columns, weights)
        return _Target(unit(columns).reshape(y.shape), likelihood, scale, unit)

    def log_probs(self, likelihood: Likelihood, f: Tensor, y: Tensor) -> Tensor:
        """log P (n,) of what rounds to counts y (n,), by a network with outputs f (n, C)."""
        assert self.unit is not None
        return log_probs(likelihood, f, self.unit, self.scale, y)

    @property
    def log_slopes(self) -> Tensor:
        """log dy/dz for the standardised z of each row (n,), of one continuous target."""
        assert self.unit is not None
        z = self.unit.shift + self.unit.scale * self.y
        return self.unit.scale.log() + (
            torch.zeros_like(self.y) if self.scale is None else self.scale.log_slope(z)
        )


def _best(gain: Tensor) -> int:
    """Which of two targets is predicted best, by the gains of the second (M,)."""
    error = float(gain.std()) / math.sqrt(len(gain)) if len(gain) > 1 else 0.0
    return int(float(gain.mean()) > max(WORTH_A_SCALE, error))


def fitted_rows(ensemble: Ensemble, rows: int) -> Tensor:
    """The rows of the table (n,) bool that the last layers were fitted to: those of
    `ensemble.held`.
    """
    whole = torch.ones(rows, dtype=torch.bool)
    return (
        whole
        if ensemble.held is None or ensemble.held.shape[1] == rows
        else _at_most(whole, MOST_FITTED)
    )


def _gains(targets: list[_Target], losses: Tensor, data: _Data) -> Tensor:
    """How much lower the NLL of y at held-out rows is with the second targets, for each member
    (M,).

    losses: the NLL of the targets there (epochs, targets · M).
    """
    shares = data.held * data.weights
    shares = shares / shares.sum(1, keepdim=True)
    lowest = losses.amin(0).reshape(len(targets), -1)
    first, second = (
        own + shares @ target.log_slopes for own, target in zip(lowest, targets, strict=True)
    )
    return torch.sub(first, second)


def _gains_of_counts(
    targets: list[_Target],
    modules: list[tuple[nn.Sequential, ...]],
    data: _Data,
    likelihood: Likelihood,
) -> Tensor:
    """The same for small counts: how much higher log P(y) is (M,)."""
    found = []
    for m, held in enumerate(data.held):
        z, y, weights = data.of(held)
        with torch.no_grad():
            parts = zip(targets, modules, strict=True)
            first, second = (target.log_probs(likelihood, own[m](z), y) for target, own in parts)
        found.append(weights @ (second - first) / weights.sum())
    return torch.stack(found)


def _fraction(settings: Settings, rows: int) -> float:
    """Small tables hold out a larger fraction: thirty rows, but at most a fifth."""
    least = settings.validation_fraction
    return max(least, min(FEW_ROWS / rows, MOST_LEFT_OUT)) if least > 0 else 0.0


def _at_most(chosen: Tensor, most: int) -> Tensor:
    """At most that many of the chosen rows (n,) bool, evenly spread: enough for a prior and for
    spreads.
    """
    rows = chosen.nonzero().flatten()
    if len(rows) <= most:
        return chosen
    some = torch.zeros_like(chosen)
    some[rows[torch.linspace(0, len(rows) - 1, most).long()]] = True
    return some


def _disagreement(modules: tuple[nn.Sequential, ...], z: Tensor) -> Tensor:
    """The variance between members (N, D)."""
    with torch.no_grad():
        return torch.stack([module(z) for module in modules]).var(0, unbiased=False)


@dataclass(frozen=True, eq=False)
class _Data:
    """Standardised inputs, targets, row weights, and which rows each member held out."""

    z: Tensor
    y: Tensor
    weights: Tensor
    held: Tensor  # (M, n)

    def at(self, rows: Tensor) -> _Data:
        """Some of the rows (n,) bool."""
        return _Data(self.z[rows], self.y[rows], self.weights[rows], self.held[:, rows])

    def of(self, rows: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """Inputs, targets and weights of rows; all if not given."""
        chosen: Any = slice(None) if rows is None else rows
        return self.z[chosen], self.y[chosen], self.weights[chosen]


class _Residuals(NamedTuple):
    """What held-out rows say about a constant noise: see `ssla.tables.networks.held_out_noise`."""

    squares: Tensor  # s (n, D) of the member's held-out rows
    inside: Tensor  # mean square of its training residuals (D,)
    means: Tensor  # of its posterior at all rows that some member held out (N, D)


@dataclass(frozen=True, eq=False)
class _Work:
    """The posteriors of each member in turn."""

    data: _Data
    likelihood: Likelihood | None
    settings: Settings
    modules: tuple[nn.Sequential, ...]
    grow: Grow | None = None
    levels: tuple[int, ...] = ()
    residuals: list[_Residuals] = field(default_factory=list)  # constant noise: of each member
    forests: list[Forest] = field(default_factory=list)
    priors: list[Any] = field(
        default_factory=list
    )  # of the first members, chosen by their held-out rows
    kept: list[int] = field(default_factory=list)  # members with a share
    held_out: list[tuple[Tensor, Tensor, Tensor]] = field(
        default_factory=list
    )  # z, y and weights of held-out rows
    # there: f and K, or log densities of classes
    answers: list[tuple[Tensor, ...]] = field(default_factory=list)
    constant: bool = False  # the modules are constants, which are kept in any case

    @property
    def kept_modules(self) -> tuple[nn.Sequential, ...]:
        return tuple(self.modules[m] for m in self.kept)

    def of_constants(self, bias: Tensor | None) -> _Work:
        """The same work with constants in place of the networks, and with the forests that have
        been grown.
        """
        modules = tuple(constant_network(module, bias) for module in self.modules)
        return _Work(
            self.data,
            self.likelihood,
            self.settings,
            modules,
            None,
            self.levels,
            forests=self.forests,
            constant=True,
        )

    def all_posteriors(self) -> list[list[tuple[Posterior, float]]]:
        """The posteriors of each member that has a share, with their shares in it.

        `kept` has the numbers of these members.
        """
        found = []
        for member in range(len(self.modules)):
            parts = self.posteriors(member)
            if parts:
                self.kept.append(member)
                found.append(parts)
        return found

    def _fit(
        self,
        module: nn.Module,
        rows: Tensor | None,
        likelihood: Likelihood,
        prior: Any = None,
        rough: bool = False,
    ) -> Posterior:
        """rough: only to choose a prior."""
        data, prior = self.data.of(rows), prior or GaussianPrior(self.settings.schedule.precision)
        weights, structure = self.settings.weights, self.settings.structure
        return fit_last_layer(module, data, likelihood, prior, weights, structure, rough)

    def posteriors(self, member: int) -> list[tuple[Posterior, float]]:
        """Posteriors with their shares: one, or one for each node of the noise; none where a
        constant is better.
        """
        module, held = self.modules[member], self.data.held[member]
        if self.likelihood is not None:
            posterior = self._by_held_out_rows(module, held, self.likelihood)
            return [] if posterior is None else [(posterior, 1.0)]
        if not bool(held.any()):
            return [(self._tuned(self._fit(module, None, Gaussian(noise="estimate"))), 1.0)]
        noise = self._noise(member)
        middle = self._tuned(self._fit(module, None, noise.at(0.0)))
        found = [(middle, NODES[0][1])]
        for t, share in NODES[1:]:
            likelihood = noise.at(t)
            whole = middle.quadratic
            posterior = (
                at_noise(middle, likelihood)
                if whole
                else self._fit(module, None, likelihood, middle.prior)
            )
            found.append((posterior, share))
        return found

    def _noise(self, member: int) -> Noise:
        """The noise from the member's held-out rows.

        Several members: less the disagreement of their posteriors.
        """
        if not self.residuals:
            self.residuals.extend(
                self._residuals(*both) for both in zip(self.modules, self.data.held, strict=True)
            )
        own = self.residuals[member]
        disagreement = None
        if (
            len(self.modules) > 1
        ):  # a strong prior keeps posteriors closer together than the networks
            disagreement = (
                torch.stack([other.means for other in self.residuals])
                .var(0, unbiased=False)
                .mean(0)
            )
        return held_out_noise(
            own.squares, self.data.of(self.data.held[member])[2], own.inside, disagreement
        )

    def _residuals(self, module: nn.Module, held: Tensor) -> _Residuals:
        """Of the posterior of the other rows, with the noise of the network's held-out
        residuals and the tuned prior.
        """
        z, y, _ = self.data.of(held)
        y = y.reshape(len(z), -1)
        with torch.no_grad():
            first = Noise(((y - module(z)) ** 2).mean(0).sqrt().clamp_min(1e-6), 0.0)
        posterior = self._tuned(self._fit(module, ~held, first.at(0.0)))
        f, K = posterior.outputs_at(z)
        share = K.diagonal(dim1=1, dim2=2) / first.scale**2
        seen, target, w = self.data.of(~held)
        errors = target.reshape(len(seen), -1) - posterior.outputs_at(seen).mean
        inside = (w[:, None] * errors**2).sum(0) / w.sum()
        means = posterior.outputs_at(self.data.z[self.data.held.any(0)]).mean
        return _Residuals((y - f) ** 2 / (1 + share), inside, means)

    def _by_held_out_rows(
        self, module: nn.Module, held: Tensor, likelihood: Likelihood
    ) -> Posterior | None:
        """The posterior of all rows, with the prior precision that predicts best the rows that the
        features never saw.

        None where a constant predicts these rows better. The trees of such a member are grown all
        the same.
        """
        seen = ~held
        judged = bool(held.any())
        if not (self.settings.tune and judged):
            worse = judged and self._is_left_out(module(self.data.z[held]), likelihood, held, seen)
            return None if worse else self._tuned(self._fit(module, None, likelihood))
        if self.grow is not None:
            x, target, w = self.data.of(seen)
            numbers = without_codes(x, self.levels)  # trees would read a code as a number
            self.forests.append(
                self.grow(numbers, target, w, self.settings.seed + len(self.forests))
            )
        held, others = _at_most(held, MOST_HELD_OUT), _at_most(seen, MOST_OTHERS)
        z, y, weights = self.data.of(held)
        self.held_out.append((z, y, weights))
        if self._is_left_out(module(z), likelihood, held, seen):
            self._answer_constant(z)
            return None
        prior: Any = self._shared_prior()
        with warnings.catch_warnings():  # these posteriors choose a prior and are not kept
            warnings.filterwarnings(
                "ignore", "the variational Gaussian did not converge", RuntimeWarning
            )
            warnings.filterwarnings("ignore", "polish did not reach the mode", RuntimeWarning)
            chosen = self._fit(module, others, likelihood, prior, rough=True)
            if prior is None:
                chosen = tune(
                    chosen,
                    "nll",
                    (z, y),
                    ("prior",),
                    False,
                    None,
                    within=PRECISIONS,
                    doubt=DOUBT,
                    quiet=True,
                    rough=True,
                )
                prior = chosen.prior
                self.priors.append(prior)
        outputs = chosen.outputs_at(z)
        if self._is_left_out(outputs.mean, likelihood, held, seen):
            self._answer_constant(z)
            return None
        if self.settings.likelihood in VARYING:
            self.answers.append(tuple(outputs))
        elif self.settings.likelihood == CLASSES:
            both = chosen.predict(z), as_trained(module, likelihood, z)
            self.answers.append((torch.stack([p.log_prob(y) for p in both], 1),))
        if self.settings.likelihood == CLASSES and chosen.mode == POLISH:
            return polish_again(chosen, prior, self.data.of(), from_there=True)
        return self._fit(module, None, likelihood, prior)

    def _is_left_out(self, f: Tensor, likelihood: Likelihood, held: Tensor, seen: Tensor) -> bool:
        """Whether the mean of the rows that a network has seen predicts its held-out rows better
        than outputs f (n, C) there.

        Classes: never, because log scores choose their shares.
        """
        if self.constant or self.settings.likelihood == CLASSES:
            return False
        _, y, weights = self.data.of(held)
        _, target, w = self.data.of(seen)
        means = likelihood.mean(f.detach()).reshape(len(y), 1)
        return is_worse_than_constant(y[:, None], means, weights, (w @ target / w.sum())[None])

    def _answer_constant(self, z: Tensor) -> None:
        """Mean and log variance of a constant in place of those of a member that is left out:
        zero in the target's unit.
        """
        if self.settings.likelihood in VARYING:
            self.answers.append((z.new_zeros(len(z), 2), z.new_zeros(len(z), 2, 2)))

    def _shared_prior(self) -> GaussianPrior | None:
        """The prior of the later members: with the geometric mean of the first members' precisions.

        None: not known yet.
        """
        if len(self.priors) < SEARCHES:
            return None
        return GaussianPrior(
            math.exp(
                sum(math.log(float(prior.precision)) for prior in self.priors) / len(self.priors)
            )
        )

    def calibrated(self, ensemble: Ensemble) -> Ensemble:
        """With what the held-out rows choose: spreads of a continuous target, shares of posteriors
        for classes, and of trees.

        At the rows of a member that is left out, trees are compared with the constant. Otherwise
        the few rows of members that were kept, because they did well there, would choose too small
        a share of trees. Spreads are chosen by the rows of members that were kept.
        """
        if not self.answers:
            return ensemble
        places = [z for z, _, _ in self.held_out]
        _, y, weights = (torch.cat(parts) for parts in zip(*self.held_out, strict=True))
        answers = [torch.cat(parts) for parts in zip(*self.answers, strict=True)]
        trees, own, move = None, None, torch.zeros(len(y), dtype=torch.float64)
        if self.forests:
            modules = [
                m if i in self.kept else constant_network(m, None)
                for i, m in enumerate(self.modules)
            ]
            trees, own, move = calibrated_trees(self.forests, modules, places, y, weights)
        if self.settings.likelihood in VARYING:
            f, K = answers
            disagreement = torch.cat([_disagreement(self.kept_modules, z)[:, 0] for z in places])
            of_kept = torch.cat(
                [torch.full((len(z),), i in self.kept) for i, z in enumerate(places)]
            )
            densities = stretched_log_densities(
                Marginal(f, K), y - move, torch.where(of_kept, disagreement, 0.0)
            )
            spreads, share = spreads_of(densities, weights, own)
            if not bool(of_kept.all()):
                spreads, _ = spreads_of(
                    densities[of_kept], weights[of_kept], None if own is None else own[of_kept]
                )
            return replace(ensemble, spreads=spreads, trees=trees and replace(trees, share=share))
        densities = answers[0] if own is None else torch.cat([answers[0], own[:, None]], 1)
        found = shares(
            densities, weights, torch.ones(densities.shape[1], dtype=torch.float64)
        ).tolist()
        trust = found[0] / (found[0] + found[1])
        scores = 1 - densities.exp() @ torch.tensor(found, dtype=torch.float64)
        known = scores.nan_to_num(1.0), weights / self._copies()
        return replace(
            ensemble, trust=trust, trees=trees and replace(trees, share=found[2]), scores=known
        )

    def _copies(self) -> Tensor:
        """How many members have held out each of the held-out rows (m,)."""
        rows = torch.cat(
            [_at_most(held, MOST_HELD_OUT).nonzero().flatten() for held in self.data.held]
        )
        return rows.bincount()[rows]

    def _tuned(self, posterior: Posterior) -> Posterior:
        """The posterior with the prior precision of the highest evidence; no warning where
        columns do not help.
        """
        if not self.settings.tune:
            return posterior
        return tune(posterior, "evidence", None, ("prior",), False, None, quiet=True)
