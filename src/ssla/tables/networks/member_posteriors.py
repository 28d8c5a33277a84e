"""Fits the posteriors of the members of an ensemble in turn, and calibrates their mixture.

With Gaussian noise the prior has the highest evidence, and held-out rows give the noise. With other
likelihoods held-out rows choose the prior, the shares of trees and of posteriors, and spreads.

The *answers* of a member are its outputs or log densities at its held-out rows. `fit_members`
collects them in the lists of a `MemberPosteriors`, and `calibrate_ensemble` uses them after the
last member. So one object serves one fit.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ssla.fitting.further_passes import polish_again
from ssla.fitting.tuning import tune
from ssla.likelihoods import Gaussian, Likelihood
from ssla.posterior import Posterior
from ssla.priors import Gaussian as GaussianPrior
from ssla.priors import Prior
from ssla.report import POLISH
from ssla.tables.networks.constant_members import is_worse_than_constant, make_constant_network
from ssla.tables.networks.embeddings import without_codes
from ssla.tables.networks.ensemble import CLASSES, VARYING, Ensemble, Settings
from ssla.tables.networks.held_out_noise import (
    NODES,
    Noise,
    change_noise,
    estimate_held_out_noise,
)
from ssla.tables.networks.last_layer_fits import fit_last_layer
from ssla.tables.networks.recalibration import (
    choose_spreads,
    compute_stretched_log_densities,
    predict_as_trained,
)
from ssla.tables.networks.stacking import fit_model_shares
from ssla.tables.networks.training_data import TrainingData, thin_out
from ssla.tables.trees.beside_networks import Trees, calibrate_trees
from ssla.tables.trees.forest import Forest
from ssla.values import Marginal

# These numbers are guesses.
# The range of prior precisions from which held-out rows choose, for standardised inputs and
# targets, and the standard deviation of their logarithm around the precision of the training.
PRECISIONS = (0.03, 100.0)
DOUBT = 1.5
SEARCHES = 2  # members that search for a prior; later members use the mean of their results
MOST_HELD_OUT = 2_000  # held-out rows that choose a prior and spreads
MOST_SEEN = 10_000  # rows of the fit whose prior held-out rows choose
SMALLEST_NOISE = 1e-6  # of a first guess, in units of the target's spread

Grow = Callable[[Tensor, Tensor, Tensor, int], Forest]
"""A function of rows (n, d), targets (n,), row weights (n,) and a seed. It returns trees that
predict probabilities, or one number.
"""


class Residuals(NamedTuple):
    """Residuals of one member, for a constant noise: see `ssla.tables.networks.held_out_noise`."""

    squares: Tensor  # s (n, D) of the member's held-out rows
    training_square: Tensor  # mean square of its training residuals (D,)
    means: Tensor  # means of its posterior (N, D) at all rows that some member held out


@dataclass(frozen=True, eq=False)
class MemberPosteriors:
    """The fits of all members, and the held-out answers that later members and shares use.

    `fit_members` fills the lists, one member after the other.
    """

    data: TrainingData
    likelihood: Likelihood | None  # None: Gaussian with unknown noise
    settings: Settings
    modules: tuple[nn.Sequential, ...]
    grow: Grow | None = None  # None: no more forests are grown
    levels: tuple[int, ...] = ()  # numbers of levels of the columns of z that hold codes
    constant: bool = False  # the modules are constants, which are kept in any case
    residuals: list[Residuals] = field(default_factory=list)  # of each member; constant noise only
    forests: list[Forest] = field(default_factory=list)  # of each member
    priors: list[GaussianPrior] = field(default_factory=list)  # that the first members have found
    kept: list[int] = field(default_factory=list)  # indices of the members with a share
    # z, y and weights of each member's held-out rows
    held_out: list[tuple[Tensor, Tensor, Tensor]] = field(default_factory=list)
    # the answers there, of each kept member, and of a constant in place of one that is left out:
    # f and K for mean and log variance, log densities of the observed class for classes
    answers: list[tuple[Tensor, ...]] = field(default_factory=list)

    @property
    def kept_modules(self) -> tuple[nn.Sequential, ...]:
        """The networks of the members with a share."""
        return tuple(self.modules[member] for member in self.kept)

    def with_constants(self, bias: Tensor | None) -> MemberPosteriors:
        """Return a copy that is not fitted yet, with constants in place of the networks.

        The forests that were grown so far are kept, and no others are grown.  bias (C,): the
        outputs of the constants; zero if None.
        """
        return MemberPosteriors(
            data=self.data,
            likelihood=self.likelihood,
            settings=self.settings,
            modules=tuple(make_constant_network(module, bias) for module in self.modules),
            grow=None,
            levels=self.levels,
            constant=True,
            forests=self.forests,
        )

    def fit_members(self) -> list[list[tuple[Posterior, float]]]:
        """Fit all members, and return for each kept member its posteriors with their shares.

        The lists of this object are filled: `kept` then has the indices of the kept members.
        """
        fits = []
        for member in range(len(self.modules)):
            posteriors = self._fit_member(member)
            if posteriors:
                self.kept.append(member)
                fits.append(posteriors)
        return fits

    def _fit_member(self, member: int) -> list[tuple[Posterior, float]]:
        """Fit one member, and return its posteriors with their shares.

        There is a single posterior, or one for each node of an unknown noise. The list is empty
        where a constant predicts the held-out rows better.  member: its index.
        """
        module = self.modules[member]
        if self.likelihood is not None:
            posterior = self._fit_by_held_out_rows(member, self.likelihood)
            return [] if posterior is None else [(posterior, 1.0)]
        # Without held-out rows the noise is estimated from the training residuals.
        if not bool(self.data.held[member].any()):
            posterior = self._fit_module(module, None, Gaussian(noise="estimate"))
            return [(self._tune_prior(posterior), 1.0)]
        return self._fit_noise_nodes(module, self._estimate_noise(member))

    def _fit_noise_nodes(self, module: nn.Module, noise: Noise) -> list[tuple[Posterior, float]]:
        """Fit a posterior to all rows for each node of the noise; return them with their weights.

        The nodes t and their weights are NODES: see `held_out_noise`. The posterior of the central
        node is first, and its tuned prior is that of all.  module: the network of the member.
        """
        central_node, *other_nodes = NODES
        t, share = central_node
        central = self._tune_prior(self._fit_module(module, None, noise.make_likelihood(t)))
        fits = [(central, share)]
        for t, share in other_nodes:
            likelihood = noise.make_likelihood(t)
            # A quadratic posterior is moved to the other noise without a pass over the rows.
            if central.quadratic:
                posterior = change_noise(central, likelihood)
            else:
                posterior = self._fit_module(module, None, likelihood, central.prior)
            fits.append((posterior, share))

        return fits

    def _fit_module(
        self,
        module: nn.Module,
        rows: Tensor | None,
        likelihood: Likelihood,
        prior: Prior | None = None,
        rough: bool = False,
    ) -> Posterior:
        """Fit the uncertain weights of a module to the chosen rows (n,) bool; to all rows if None.

        prior: None is that of the training.  rough: see `fit_last_layer`.
        """
        return fit_last_layer(
            module,
            self.data.take_rows(rows),
            likelihood,
            prior or GaussianPrior(self.settings.schedule.precision),
            self.settings.weights,
            self.settings.structure,
            rough,
        )

    def _tune_prior(self, posterior: Posterior) -> Posterior:
        """Return the posterior with the prior precision of the highest evidence, without warnings.

        The posterior is returned as it is if the settings have no tuning.
        """
        if not self.settings.tune:
            return posterior
        return tune(
            posterior, "evidence", None, ("prior",), per_layer=False, folds=None, quiet=True
        )

    def _estimate_noise(self, member: int) -> Noise:
        """Estimate the noise from the member's held-out rows.

        The first call fills `residuals`, by a fit of every member to its training rows.  member:
        its index.
        """
        # Every member needs the means of all others, so all residuals are computed at once.
        if not self.residuals:
            self.residuals.extend(
                self._fit_residuals(module, held)
                for module, held in zip(self.modules, self.data.held, strict=True)
            )

        # The disagreement is that of the posteriors and not of the networks: a strong prior keeps
        # posteriors closer together.
        disagreement = None
        if len(self.modules) > 1:
            means = torch.stack([residuals.means for residuals in self.residuals])
            disagreement = means.var(0, unbiased=False).mean(0)

        residuals = self.residuals[member]
        _, _, weights = self.data.take_rows(self.data.held[member])
        return estimate_held_out_noise(
            residuals.squares, weights, residuals.training_square, disagreement
        )

    def _fit_residuals(self, module: nn.Module, held: Tensor) -> Residuals:
        """Fit the rows that are not held out, and return the residuals of this posterior.

        The noise of the posterior is σ₀ of `held_out_noise`: the root mean square of the network's
        residuals at the held-out rows. Its prior is tuned.

        module: the network of a member.  held (n,) bool: the rows that it held out.
        """
        z, y, _ = self.data.take_rows(held)
        y = y.reshape(len(z), -1)

        # A target without noise has a small σ₀ in place of zero.
        with torch.no_grad():
            first_scale = ((y - module(z)) ** 2).mean(0).sqrt().clamp_min(SMALLEST_NOISE)
        first = Noise(first_scale, error=0.0)
        posterior = self._tune_prior(self._fit_module(module, ~held, first.make_likelihood(0.0)))
        outputs, covariances = posterior.outputs_at(z)
        relative_variance = covariances.diagonal(dim1=1, dim2=2) / first.scale**2
        squares = (y - outputs) ** 2 / (1 + relative_variance)

        # The posterior was fitted to the seen rows.
        seen_z, seen_y, seen_weights = self.data.take_rows(~held)
        errors = seen_y.reshape(len(seen_z), -1) - posterior.outputs_at(seen_z).mean
        training_square = (seen_weights[:, None] * errors**2).sum(0) / seen_weights.sum()
        means = posterior.outputs_at(self.data.z[self.data.held.any(0)]).mean
        return Residuals(squares, training_square, means)

    def _fit_by_held_out_rows(self, member: int, likelihood: Likelihood) -> Posterior | None:
        """Fit all rows, with the prior that best predicts the rows that the network has not seen.

        Return None where a constant predicts these rows better. The forest of such a member is
        grown all the same. The lists `forests`, `held_out`, `answers` and `priors` are extended.

        member: its index.
        """
        module = self.modules[member]
        held = self.data.held[member]
        seen = ~held
        if not (self.settings.tune and bool(held.any())):
            return self._fit_without_search(module, held, likelihood)

        self._grow_forest(seen)
        held = thin_out(held, MOST_HELD_OUT)
        z, y, weights = self.data.take_rows(held)
        self.held_out.append((z, y, weights))

        # The network as trained is compared with a constant, and then its posterior is.
        if self._is_constant_better(module(z), likelihood, held, seen):
            self._record_constant(z)
            return None

        posterior, prior = self._choose_prior(module, likelihood, seen, (z, y))
        outputs = posterior.outputs_at(z)
        if self._is_constant_better(outputs.mean, likelihood, held, seen):
            self._record_constant(z)
            return None

        # The answers of this member at its held-out rows.
        if self.settings.likelihood in VARYING:
            self.answers.append(tuple(outputs))
        elif self.settings.likelihood == CLASSES:
            predictives = (posterior.predict(z), predict_as_trained(module, likelihood, z))
            log_probs = [predictive.log_prob(y) for predictive in predictives]
            self.answers.append((torch.stack(log_probs, 1),))

        # For classes the fit that chose the prior gives the start, close to the mode of all rows.
        if self.settings.likelihood == CLASSES and posterior.mode == POLISH:
            return polish_again(posterior, prior, self.data.take_rows(), warm_start=True)
        return self._fit_module(module, None, likelihood, prior)

    def _fit_without_search(
        self, module: nn.Module, held: Tensor, likelihood: Likelihood
    ) -> Posterior | None:
        """Fit all rows, and tune the prior by the evidence if the settings have tuning.

        Return None where a constant predicts the held-out rows (n,) bool better than the network.
        """
        if bool(held.any()):
            f = module(self.data.z[held])
            if self._is_constant_better(f, likelihood, held, ~held):
                return None
        return self._tune_prior(self._fit_module(module, None, likelihood))

    def _grow_forest(self, seen: Tensor) -> None:
        """Grow the forest of the next member on the rows that its network has seen (n,) bool.

        The forest is added to `forests`. Nothing is done without `grow`.
        """
        if self.grow is None:
            return
        z, y, weights = self.data.take_rows(seen)
        numbers = without_codes(z, self.levels)  # trees would read a code as a number
        seed = self.settings.seed + len(self.forests)  # another seed for each member
        self.forests.append(self.grow(numbers, y, weights, seed))

    def _choose_prior(
        self,
        module: nn.Module,
        likelihood: Likelihood,
        seen: Tensor,
        held_out: tuple[Tensor, Tensor],
    ) -> tuple[Posterior, GaussianPrior]:
        """Return a rough posterior of the seen rows (n,) bool, and its prior.

        The first SEARCHES members search for the precision with the lowest NLL at the held-out z
        (m, d) and y (m,), and add it to `priors`. The later members share the mean of these.

        module: the network.  seen: the rows that it was trained on.
        """
        prior = self._average_priors()
        rows = thin_out(seen, MOST_SEEN)

        # These posteriors are not kept, so no warnings about them are shown.
        with warnings.catch_warnings():
            for message in (
                "the variational Gaussian did not converge",
                "polish did not reach the mode",
            ):
                warnings.filterwarnings("ignore", message, RuntimeWarning)
            posterior = self._fit_module(module, rows, likelihood, prior, rough=True)
            if prior is not None:
                return posterior, prior
            posterior = tune(
                posterior,
                "nll",
                held_out,
                ("prior",),
                per_layer=False,
                folds=None,
                within=PRECISIONS,
                doubt=DOUBT,
                quiet=True,
                rough=True,
            )

        assert isinstance(posterior.prior, GaussianPrior)
        self.priors.append(posterior.prior)
        return posterior, posterior.prior

    def _average_priors(self) -> GaussianPrior | None:
        """Return the prior with the geometric mean of the precisions that were found so far.

        Return None as long as fewer than SEARCHES members have searched.
        """
        if len(self.priors) < SEARCHES:
            return None
        # The search is for one precision of all weights, so each is a number and not a mapping.
        precisions = [prior.precision for prior in self.priors]
        logs = sum(math.log(float(value)) for value in precisions if not isinstance(value, Mapping))
        return GaussianPrior(math.exp(logs / len(self.priors)))

    def _is_constant_better(
        self, f: Tensor, likelihood: Likelihood, held: Tensor, seen: Tensor
    ) -> bool:
        """Return whether the mean y of the seen rows predicts the m held-out rows better than f.

        The comparison is that of `constant_members`. The answer is False for classes, whose shares
        the log scores choose, and where the networks are constants already.

        f (m, C): outputs at the held-out rows.  likelihood: gives the means of y for f.  held, seen
        (n,) bool: which rows the member holds out, and which it sees.
        """
        if self.constant or self.settings.likelihood == CLASSES:
            return False
        _, y, weights = self.data.take_rows(held)
        _, seen_y, seen_weights = self.data.take_rows(seen)
        means = likelihood.mean(f.detach()).reshape(len(y), 1)
        constant = (seen_weights @ seen_y / seen_weights.sum())[None]
        return is_worse_than_constant(y[:, None], means, weights, constant)

    def _record_constant(self, z: Tensor) -> None:
        """Add to `answers` that of a constant at z (m, d), in place of a member that is left out.

        Its mean and log variance are zero in the target's unit, without uncertainty. Only the
        likelihoods of mean and log variance use such answers.
        """
        if self.settings.likelihood in VARYING:
            self.answers.append((z.new_zeros(len(z), 2), z.new_zeros(len(z), 2, 2)))

    def calibrate_ensemble(self, ensemble: Ensemble) -> Ensemble:
        """Return the ensemble with what held-out rows choose: spreads or shares, and trees.

        ensemble: that of the kept members. It is returned as it is where there are no held-out
        answers: for constant noise and counts, without held-out rows, and without tuning.
        """
        if not self.answers:
            return ensemble
        y = torch.cat([y for _, y, _ in self.held_out])
        weights = torch.cat([weights for _, _, weights in self.held_out])

        # Each answer of all members becomes one tensor for all held-out rows, in their order.
        answers = [
            torch.cat(answers_of_members) for answers_of_members in zip(*self.answers, strict=True)
        ]
        trees, tree_log_densities, move = self._calibrate_trees(y, weights)
        if self.settings.likelihood in VARYING:
            f, K = answers
            return self._with_spreads(
                ensemble, Marginal(f, K), y - move, weights, trees, tree_log_densities
            )

        return self._with_class_shares(ensemble, answers[0], weights, trees, tree_log_densities)

    def _calibrate_trees(
        self, y: Tensor, weights: Tensor
    ) -> tuple[Trees | None, Tensor | None, Tensor]:
        """Fit the layer of the trees to the held-out rows with y (n,) and weights (n,).

        Returns the trees, their log densities of y (n,), and what the trees add to the networks'
        means there (n,) or (). Without forests these are None, None and zeros.

        At the rows of a member that is left out, trees are compared with the constant. Without
        these rows the share of the trees would be too small, because the kept members are those
        that did well at their own rows.
        """
        if not self.forests:
            return None, None, torch.zeros(len(y), dtype=torch.float64)
        modules = [
            module if member in self.kept else make_constant_network(module, None)
            for member, module in enumerate(self.modules)
        ]
        inputs = [z for z, _, _ in self.held_out]
        return calibrate_trees(self.forests, modules, inputs, y, weights)

    def _with_spreads(
        self,
        ensemble: Ensemble,
        outputs: Marginal,
        y: Tensor,
        weights: Tensor,
        trees: Trees | None,
        tree_log_densities: Tensor | None,
    ) -> Ensemble:
        """Return the ensemble with spreads, and the share of trees, for mean and log variance.

        outputs: f (n, 2) and K (n, 2, 2) of the members at their held-out rows.  y (n,): the
        targets of these rows, less what the trees add to the means.  weights (n,): row weights.
        trees: see `_calibrate_trees`; None: there are none.  tree_log_densities (n,): those of the
        targets by the trees; None without trees.
        """
        inputs = [z for z, _, _ in self.held_out]
        disagreement = torch.cat([self._compute_variance_of_means(z) for z in inputs])
        is_of_kept = torch.cat(
            [torch.full((len(z),), member in self.kept) for member, z in enumerate(inputs)]
        )

        # A constant in place of a member does not disagree with anything.
        disagreement = torch.where(is_of_kept, disagreement, 0.0)
        densities = compute_stretched_log_densities(outputs, y, disagreement)
        spreads, tree_share = choose_spreads(densities, weights, tree_log_densities)

        # Constants have no spread to correct, so only the rows of kept members choose the spreads.
        if not bool(is_of_kept.all()):
            kept_trees = None if tree_log_densities is None else tree_log_densities[is_of_kept]
            spreads, _ = choose_spreads(densities[is_of_kept], weights[is_of_kept], kept_trees)

        trees = None if trees is None else replace(trees, share=tree_share)
        return replace(ensemble, spreads=spreads, trees=trees)

    def _compute_variance_of_means(self, z: Tensor) -> Tensor:
        """Return the variance (n,) between the means that the kept networks predict at z (n, d)."""
        with torch.no_grad():
            outputs = torch.stack([module(z) for module in self.kept_modules])
        return outputs.var(0, unbiased=False)[:, 0]

    def _with_class_shares(
        self,
        ensemble: Ensemble,
        log_densities: Tensor,
        weights: Tensor,
        trees: Trees | None,
        tree_log_densities: Tensor | None,
    ) -> Ensemble:
        """Return the ensemble with the shares of posteriors, networks as trained, and trees.

        log_densities (n, 2): those of posteriors and of networks as trained, at held-out rows with
        weights (n,).  tree_log_densities (n,): those of the trees; None without trees. The scores
        for predictive sets are stored too.
        """
        if tree_log_densities is not None:
            log_densities = torch.cat([log_densities, tree_log_densities[:, None]], 1)
        one_row = torch.ones(log_densities.shape[1], dtype=torch.float64)
        shares = fit_model_shares(log_densities, weights, one_row).tolist()
        posterior_share = shares[0]
        trained_share = shares[1]
        if trees is not None:
            trees = replace(trees, share=shares[2])

        # The score of a row in predictive sets is 1 − p(y). NaN counts as p(y) = 0, and a row that
        # several members held out counts once.
        scores = 1 - log_densities.exp() @ torch.tensor(shares, dtype=torch.float64)
        return replace(
            ensemble,
            trust=posterior_share / (posterior_share + trained_share),
            trees=trees,
            scores=(scores.nan_to_num(1.0), weights / self._count_holding_members()),
        )

    def _count_holding_members(self) -> Tensor:
        """Return for each row of `held_out` (m,) how many members have this row there.

        A row that two members hold out is there twice, and has the count 2 in both places.
        """
        rows = torch.cat(
            [thin_out(held, MOST_HELD_OUT).nonzero().flatten() for held in self.data.held]
        )
        return rows.bincount()[rows]
