"""The posterior of each member of an ensemble, in turn, and what its held-out rows choose.

Gaussian noise: the prior has the highest evidence, and held-out rows give the noise. Other
likelihoods: held-out rows choose the prior, the shares of trees and of posteriors, and spreads.
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
from ssla.tables.networks.held_out_noise import NODES, Noise, change_noise, held_out_noise
from ssla.tables.networks.last_layer_fits import fit_last_layer
from ssla.tables.networks.recalibration import as_trained, choose_spreads, stretched_log_densities
from ssla.tables.networks.stacking import model_shares
from ssla.tables.networks.training_data import TrainingData, thin_out
from ssla.tables.trees.beside_networks import Trees, calibrate_trees
from ssla.tables.trees.forest import Forest
from ssla.values import Marginal

# The range of prior precisions from which held-out rows choose, for standardised inputs and
# targets, and the standard deviation of their logarithm around the precision of the training.
PRECISIONS = (0.03, 100.0)
DOUBT = 1.5
SEARCHES = 2  # members that search for a prior; the later ones use the mean of their results
MOST_HELD_OUT = 2_000  # held-out rows: enough to choose a prior and spreads
MOST_OTHERS = 10_000  # rows of the fit whose prior held-out rows choose

Grow = Callable[[Tensor, Tensor, Tensor, int], Forest]
"""Rows (n, d), targets (n,), row weights (n,) and a seed -> trees that predict probabilities,
or one number.
"""


class Residuals(NamedTuple):
    """Residuals of one member, for a constant noise: see `ssla.tables.networks.held_out_noise`."""

    squares: Tensor  # s (n, D) of the member's held-out rows
    training_square: Tensor  # mean square of its training residuals (D,)
    means: Tensor  # of its posterior at all rows that some member held out (N, D)


@dataclass(frozen=True, eq=False)
class MemberPosteriors:
    """The fits of all members, and the held-out answers that later members and shares use.

    The lists are filled by `fit`, one member after the other.
    """

    data: TrainingData
    likelihood: Likelihood | None  # None: Gaussian with unknown noise
    settings: Settings
    modules: tuple[nn.Sequential, ...]
    grow: Grow | None = None
    levels: tuple[int, ...] = ()
    constant: bool = False  # the modules are constants, which are kept in any case
    residuals: list[Residuals] = field(default_factory=list)  # of each member, constant noise
    forests: list[Forest] = field(default_factory=list)
    priors: list[GaussianPrior] = field(default_factory=list)  # that the first members have found
    kept: list[int] = field(default_factory=list)  # numbers of the members with a share
    # z, y and weights of each member's held-out rows; and the answers of the kept members and of
    # constants there: f and K, or log densities of classes
    held_out: list[tuple[Tensor, Tensor, Tensor]] = field(default_factory=list)
    answers: list[tuple[Tensor, ...]] = field(default_factory=list)

    @property
    def kept_modules(self) -> tuple[nn.Sequential, ...]:
        """The networks of the members with a share."""
        return tuple(self.modules[m] for m in self.kept)

    def with_constants(self, bias: Tensor | None) -> MemberPosteriors:
        """Return empty fits of constants in place of the networks, with the forests grown so far.

        bias (C,): the outputs of the constants; zero if None.
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

    def fit(self) -> list[list[tuple[Posterior, float]]]:
        """Fit all members; return the posteriors of each kept one, with their shares in it.

        `kept` then has the numbers of the kept members.
        """
        fits = []
        for member in range(len(self.modules)):
            parts = self._fit_member(member)
            if parts:
                self.kept.append(member)
                fits.append(parts)
        return fits

    def _fit_member(self, member: int) -> list[tuple[Posterior, float]]:
        """Return the posteriors of one member with their shares: one, or one for each noise node.

        The list is empty where a constant predicts the held-out rows better.
        """
        module = self.modules[member]
        if self.likelihood is not None:
            posterior = self._fit_by_held_out_rows(member, self.likelihood)
            return [] if posterior is None else [(posterior, 1.0)]
        if not bool(self.data.held[member].any()):
            return [(self._tune(self._fit(module, None, Gaussian(noise="estimate"))), 1.0)]
        return self._fit_noise_nodes(module, self._estimate_noise(member))

    def _fit_noise_nodes(self, module: nn.Module, noise: Noise) -> list[tuple[Posterior, float]]:
        """Return a posterior for each quadrature node of the noise, with the node's weight."""
        central = self._tune(self._fit(module, None, noise.at(0.0)))
        fits = [(central, NODES[0][1])]
        for t, share in NODES[1:]:
            likelihood = noise.at(t)
            # A quadratic posterior is moved to the other noise without a pass over the rows.
            if central.quadratic:
                posterior = change_noise(central, likelihood)
            else:
                posterior = self._fit(module, None, likelihood, central.prior)
            fits.append((posterior, share))
        return fits

    def _fit(
        self,
        module: nn.Module,
        rows: Tensor | None,
        likelihood: Likelihood,
        prior: Prior | None = None,
        rough: bool = False,
    ) -> Posterior:
        """Fit the last layer (or more) of a module to the chosen rows (n,) bool; to all if None.

        prior None: that of the training.  rough: with a lower accuracy, to choose a prior only.
        """
        return fit_last_layer(
            module,
            self.data.batch(rows),
            likelihood,
            prior or GaussianPrior(self.settings.schedule.precision),
            self.settings.weights,
            self.settings.structure,
            rough,
        )

    def _tune(self, posterior: Posterior) -> Posterior:
        """Return the posterior with the prior precision of the highest evidence, without warnings.

        It is returned as it is if the settings have no tuning.
        """
        if not self.settings.tune:
            return posterior
        return tune(posterior, "evidence", None, ("prior",), False, None, quiet=True)

    def _estimate_noise(self, member: int) -> Noise:
        """Estimate the noise from the member's held-out rows."""
        # Every member needs the means of all others, so all residuals are computed at once.
        if not self.residuals:
            self.residuals.extend(
                self._fit_residuals(module, held)
                for module, held in zip(self.modules, self.data.held, strict=True)
            )
        residuals = self.residuals[member]
        # The disagreement is that of the posteriors: a strong prior keeps them closer together
        # than the networks.
        disagreement = None
        if len(self.modules) > 1:
            means = torch.stack([each.means for each in self.residuals])
            disagreement = means.var(0, unbiased=False).mean(0)
        _, _, weights = self.data.batch(self.data.held[member])
        return held_out_noise(residuals.squares, weights, residuals.training_square, disagreement)

    def _fit_residuals(self, module: nn.Module, held: Tensor) -> Residuals:
        """Fit the rows that are not held (n,) bool, and return the residuals of this posterior.

        Its noise is that of the network's held-out residuals, and its prior is tuned.
        """
        z, y, _ = self.data.batch(held)
        y = y.reshape(len(z), -1)
        # σ₀; a noise-free target has a small one in place of zero
        with torch.no_grad():
            first = Noise(((y - module(z)) ** 2).mean(0).sqrt().clamp_min(1e-6), 0.0)
        posterior = self._tune(self._fit(module, ~held, first.at(0.0)))
        f, K = posterior.outputs_at(z)
        relative_variance = K.diagonal(dim1=1, dim2=2) / first.scale**2
        seen_z, seen_y, seen_weights = self.data.batch(~held)
        errors = seen_y.reshape(len(seen_z), -1) - posterior.outputs_at(seen_z).mean
        training_square = (seen_weights[:, None] * errors**2).sum(0) / seen_weights.sum()
        means = posterior.outputs_at(self.data.z[self.data.held.any(0)]).mean
        return Residuals((y - f) ** 2 / (1 + relative_variance), training_square, means)

    def _fit_by_held_out_rows(self, member: int, likelihood: Likelihood) -> Posterior | None:
        """Fit all rows with the prior that predicts best the rows that the features never saw.

        Return None where a constant predicts these rows better. The trees of such a member are
        grown all the same.
        """
        module = self.modules[member]
        held = self.data.held[member]
        seen = ~held
        if not (self.settings.tune and bool(held.any())):
            return self._fit_without_search(module, held, likelihood)
        self._grow_forest(seen)
        held = thin_out(held, MOST_HELD_OUT)
        z, y, weights = self.data.batch(held)
        self.held_out.append((z, y, weights))
        if self._is_left_out(module(z), likelihood, held, seen):
            self._record_constant(z)
            return None
        posterior, prior = self._choose_prior(module, likelihood, seen, (z, y))
        outputs = posterior.outputs_at(z)
        if self._is_left_out(outputs.mean, likelihood, held, seen):
            self._record_constant(z)
            return None
        if self.settings.likelihood in VARYING:
            self.answers.append(tuple(outputs))
        elif self.settings.likelihood == CLASSES:
            both = posterior.predict(z), as_trained(module, likelihood, z)
            self.answers.append((torch.stack([p.log_prob(y) for p in both], 1),))
        # The mode of the fit that chose the prior is close to that of all rows.
        if self.settings.likelihood == CLASSES and posterior.mode == POLISH:
            return polish_again(posterior, prior, self.data.batch(), warm_start=True)
        return self._fit(module, None, likelihood, prior)

    def _fit_without_search(
        self, module: nn.Module, held: Tensor, likelihood: Likelihood
    ) -> Posterior | None:
        """Fit all rows with the prior of the highest evidence, or that of the training.

        Return None where a constant predicts the held-out rows (n,) bool better.
        """
        if bool(held.any()) and self._is_left_out(
            module(self.data.z[held]), likelihood, held, ~held
        ):
            return None
        return self._tune(self._fit(module, None, likelihood))

    def _grow_forest(self, seen: Tensor) -> None:
        """Grow the trees of the next member on the rows that it has seen (n,) bool."""
        if self.grow is None:
            return
        z, y, weights = self.data.batch(seen)
        numbers = without_codes(z, self.levels)  # trees would read a code as a number
        self.forests.append(self.grow(numbers, y, weights, self.settings.seed + len(self.forests)))

    def _choose_prior(
        self,
        module: nn.Module,
        likelihood: Likelihood,
        seen: Tensor,
        held_out: tuple[Tensor, Tensor],
    ) -> tuple[Posterior, GaussianPrior]:
        """Return the prior of a member, and the rough posterior of seen rows (n,) bool with it.

        The first members search for the precision with the lowest NLL at the held-out z and y.
        """
        prior = self._shared_prior()
        rows = thin_out(seen, MOST_OTHERS)
        # Warnings are left out because these posteriors are not kept.
        with warnings.catch_warnings():
            for message in (
                "the variational Gaussian did not converge",
                "polish did not reach the mode",
            ):
                warnings.filterwarnings("ignore", message, RuntimeWarning)
            posterior = self._fit(module, rows, likelihood, prior, rough=True)
            if prior is not None:
                return posterior, prior
            posterior = tune(
                posterior,
                "nll",
                held_out,
                ("prior",),
                False,
                None,
                within=PRECISIONS,
                doubt=DOUBT,
                quiet=True,
                rough=True,
            )
        assert isinstance(posterior.prior, GaussianPrior)
        self.priors.append(posterior.prior)
        return posterior, posterior.prior

    def _shared_prior(self) -> GaussianPrior | None:
        """Return the prior with the geometric mean of the precisions that were found so far.

        Return None as long as fewer than SEARCHES members have searched.
        """
        if len(self.priors) < SEARCHES:
            return None
        # One number each: the search is for a scalar precision.
        precisions = [prior.precision for prior in self.priors]
        logs = sum(math.log(float(value)) for value in precisions if not isinstance(value, Mapping))
        return GaussianPrior(math.exp(logs / len(self.priors)))

    def _is_left_out(self, f: Tensor, likelihood: Likelihood, held: Tensor, seen: Tensor) -> bool:
        """Check whether the mean of the seen rows predicts the held-out ones better than f (n, C).

        held, seen (n,) bool. It is never so for classes, because log scores choose their shares.
        """
        if self.constant or self.settings.likelihood == CLASSES:
            return False
        _, y, weights = self.data.batch(held)
        _, seen_y, seen_weights = self.data.batch(seen)
        means = likelihood.mean(f.detach()).reshape(len(y), 1)
        constant = (seen_weights @ seen_y / seen_weights.sum())[None]
        return is_worse_than_constant(y[:, None], means, weights, constant)

    def _record_constant(self, z: Tensor) -> None:
        """Record the answer of a constant at z (n, d), in place of a member that is left out.

        Mean and log variance are zero in the target's unit.
        """
        if self.settings.likelihood in VARYING:
            self.answers.append((z.new_zeros(len(z), 2), z.new_zeros(len(z), 2, 2)))

    def calibrate(self, ensemble: Ensemble) -> Ensemble:
        """Return the ensemble with what held-out rows choose: spreads or shares, and trees.

        It is returned as it is where members have no held-out answers (constant noise).
        """
        if not self.answers:
            return ensemble
        y = torch.cat([y for _, y, _ in self.held_out])
        weights = torch.cat([weights for _, _, weights in self.held_out])
        answers = [torch.cat(parts) for parts in zip(*self.answers, strict=True)]
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
        """Return the trees, their log densities (n,) at held-out y (n,), and the means' move (n,).

        At the rows of a member that is left out, trees are compared with the constant. Otherwise
        the few rows of members that were kept, because they did well there, would choose too small
        a share of trees.
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

        outputs: f (n, 2) and K (n, 2, 2) of the members at held-out rows.  y (n,): less the move
        of the means.
        """
        inputs = [z for z, _, _ in self.held_out]
        disagreement = torch.cat([self._disagreement(z) for z in inputs])
        of_kept = torch.cat(
            [torch.full((len(z),), member in self.kept) for member, z in enumerate(inputs)]
        )
        densities = stretched_log_densities(outputs, y, torch.where(of_kept, disagreement, 0.0))
        spreads, tree_share = choose_spreads(densities, weights, tree_log_densities)
        # Constants have no spread to correct, so only kept members choose the spreads.
        if not bool(of_kept.all()):
            kept_trees = None if tree_log_densities is None else tree_log_densities[of_kept]
            spreads, _ = choose_spreads(densities[of_kept], weights[of_kept], kept_trees)
        trees = None if trees is None else replace(trees, share=tree_share)
        return replace(ensemble, spreads=spreads, trees=trees)

    def _disagreement(self, z: Tensor) -> Tensor:
        """Return the variance between the means of the kept networks at z (n, d) -> (n,)."""
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

        log_densities (n, 2): of posteriors and of networks as trained, at held-out rows.
        """
        if tree_log_densities is not None:
            log_densities = torch.cat([log_densities, tree_log_densities[:, None]], 1)
        one_row = torch.ones(log_densities.shape[1], dtype=torch.float64)
        models = model_shares(log_densities, weights, one_row).tolist()
        if trees is not None:
            trees = replace(trees, share=models[2])
        # Scores of predictive sets: 1 − p(y). A density that is not a number counts as zero, and
        # a row that several members held out counts once.
        scores = 1 - log_densities.exp() @ torch.tensor(models, dtype=torch.float64)
        return replace(
            ensemble,
            trust=models[0] / (models[0] + models[1]),
            trees=trees,
            scores=(scores.nan_to_num(1.0), weights / self._count_copies()),
        )

    def _count_copies(self) -> Tensor:
        """Return how many members have held out each of the held-out rows (m,)."""
        rows = torch.cat(
            [thin_out(held, MOST_HELD_OUT).nonzero().flatten() for held in self.data.held]
        )
        return rows.bincount()[rows]
