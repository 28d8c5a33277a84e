"""What is tuned: logarithms of factors on prior precisions and on the noise, and the posterior
at any of them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ssla.fitting.evidence import Problem
from ssla.fitting.fit_plan import outputs_apart
from ssla.fitting.noise import at_noise
from ssla.fitting.variational import recentred
from ssla.likelihoods import Likelihood
from ssla.priors import BoundGaussian, Flat, trained_scale
from ssla.priors import Gaussian as GaussianPrior
from ssla.values import residual_squares

if TYPE_CHECKING:
    from ssla.posterior import Posterior

EVIDENCE, NLL, CRPS, LOO = "evidence", "nll", "crps", "loo"
PRIOR, NOISE = "prior", "noise"
# Of precisions, around those of the trained weights' scale; not measured. Far above it the evidence
# is flat: at 1e8 its slope still exceeds the tolerance of the search, so that weights which do not
# help are found at the edge. Far below it rises steeply: the range may be wide there, for a last
# layer that was never trained and needs weights a million times as large.
PRECISION_FACTORS = (1e-16, 1e8)
NOISE_FACTORS = (1e-6, 1e6)
LOG_2PI = math.log(2 * math.pi)


@dataclass(frozen=True, eq=False)
class Space:
    """What is tuned: logarithms of factors on precisions (one a group) and on the noise, those
    that are free.
    """

    posterior: Posterior
    bound: BoundGaussian
    pattern: Tensor  # (P,)
    groups: Tensor  # (P,)
    labels: tuple[str, ...]  # one a group
    free: Tensor  # indices into (a_1 … a_G, t)
    usual: Tensor  # (P,) precisions of the trained weights' scale, which follows the units
    reach: float = math.inf  # the largest change of a logarithm
    within: tuple[float, float] | None = None  # precisions; None: PRECISION_FACTORS · usual
    home: Tensor | None = None  # log precisions (G,) that are expected
    doubt: float = math.inf  # standard deviation of a log precision around those

    @staticmethod
    def of(
        posterior: Posterior, over: Sequence[str], per_layer: bool, per_output: bool = False
    ) -> tuple[Space, list[str]]:
        bound, notes = posterior.bound_prior, []
        if not isinstance(bound, BoundGaussian):
            raise ValueError(
                "Tuning is for Gaussian priors, whose precision it scales, but this posterior has "
                "another. Use with_prior(priors.Gaussian()) first, or compare priors by "
                "log_evidence() and ssla.sensitivity."
            )
        flat = isinstance(posterior.prior, Flat)
        pattern = torch.ones_like(posterior.theta) if flat else bound.scale_precision
        labels, groups = _grouped(posterior, per_layer, per_output)
        free = list(range(len(labels))) if PRIOR in over else []
        if NOISE in over:
            if posterior.likelihood.quadratic:
                free.append(len(labels))
            else:
                notes.append(f"{posterior.report.likelihood} has no noise to tune")
        if flat and PRIOR not in over:
            raise ValueError(
                "Under a flat prior the evidence is not defined. Tune the prior too, or give a "
                "Gaussian one."
            )
        chosen = torch.tensor(free, dtype=torch.long)
        usual = _trained_precisions(posterior)
        return Space(posterior, bound, pattern, groups, labels, chosen, usual), notes

    @property
    def names(self) -> tuple[str, ...]:
        return tuple((*self.labels, "noise")[i] for i in self.free.tolist())

    @property
    def noisy(self) -> bool:
        return self.posterior.likelihood.quadratic

    @property
    def moves(self) -> bool:
        return self.posterior.follows_prior

    def full(self, point: Tensor) -> Tensor:
        """Free coordinates -> (a_1 … a_G, t)."""
        return torch.zeros(len(self.labels) + 1, dtype=torch.float64).index_copy(
            0, self.free, point
        )

    def precision(self, point: Tensor) -> Tensor:
        return self.pattern * self.full(point)[:-1].exp()[self.groups]

    @property
    def box(self) -> tuple[Tensor, Tensor]:
        # The ends of each group, without further vectors (P,): with millions of weights each counts
        base = self.usual if self.within is None else torch.ones_like(self.usual)
        away = (base / self.pattern).log_()
        nothing = torch.zeros(len(self.labels), dtype=torch.float64)
        down, up = (
            nothing.scatter_reduce(0, self.groups, away, end, include_self=False)
            for end in ("amin", "amax")
        )
        lowest, highest = map(math.log, self.within or PRECISION_FACTORS)
        low = [*(down + lowest).tolist(), math.log(NOISE_FACTORS[0])]
        high = [*(up + highest).tolist(), math.log(NOISE_FACTORS[1])]
        least, most = (torch.tensor(edge, dtype=torch.float64)[self.free] for edge in (low, high))
        return least.clamp_min(-self.reach), most.clamp_max(self.reach)

    @cached_property
    def levels(self) -> Tensor:
        """Log precisions now, the mean of each group (G,).

        Each evaluation of the evidence needs them.
        """
        return torch.stack(
            [self.pattern[self.groups == g].log().mean() for g in range(len(self.labels))]
        )

    def middle(self, scanned: float) -> Tensor:
        """The point (d,) to scan around: here, or the trained weights' scale where no scan
        reaches it from here.
        """
        away = (self.usual / self.pattern).log()
        means = [away[self.groups == g].mean() for g in range(len(self.labels))]
        found = torch.stack([*means, torch.zeros((), dtype=torch.float64)])[self.free]
        return torch.where(found.abs() > scanned, found, 0.0)

    def expected(self, point: Tensor) -> float:
        """The log density of the precisions at a point, less its maximum, where some are
        expected.
        """
        if self.home is None:
            return 0.0
        return -0.5 * float((self._surprise(point) ** 2).sum())

    def expected_slope(self, point: Tensor) -> Tensor:
        """The gradient of `expected` in the free coordinates."""
        if self.home is None:
            return torch.zeros_like(point)
        return torch.cat(
            [-self._surprise(point) / self.doubt, torch.zeros(1, dtype=torch.float64)]
        )[self.free]

    @property
    def expected_curvature(self) -> Tensor:
        """Minus the second derivatives of `expected` in the free coordinates."""
        each = 0.0 if self.home is None else self.doubt**-2
        return torch.where(self.free < len(self.labels), each, 0.0).double()

    def _surprise(self, point: Tensor) -> Tensor:
        """How far the log precisions (G,) are from those that are expected, in standard
        deviations.
        """
        assert self.home is not None
        return (self.levels + self.full(point)[:-1] - self.home) / self.doubt

    def moved(self, posterior: Posterior) -> Space:
        """The same coordinates around another posterior."""
        bound = posterior.bound_prior
        assert isinstance(bound, BoundGaussian)
        return replace(self, posterior=posterior, bound=bound, pattern=bound.scale_precision)

    @property
    def scale(self) -> Tensor:
        """About the inverse curvature of the evidence: 2/P_g and 1/(2nC)."""
        sizes = torch.bincount(self.groups, minlength=len(self.labels)).double()
        rows = self.posterior.sums.weight * self.posterior.network.outputs
        return torch.cat([2 / sizes, torch.tensor([0.5 / rows], dtype=torch.float64)])[self.free]

    @property
    def problem(self) -> Problem:
        post = self.posterior
        stats = post.sums
        rows = stats.weight * post.network.outputs if self.noisy else 0.0
        squares = (
            residual_squares(stats, post.likelihood, post.network.outputs) if self.noisy else 0.0
        )
        offset = post.mean - self.bound.mean
        return Problem(
            stats.curvature,
            stats.gradient,
            offset,
            stats.log_likelihood,
            squares,
            rows,
            self.pattern,
            self.groups,
            self.moves,
        )

    def units(self, points: Tensor) -> Tensor:
        """Logarithms of factors (R, d) -> precisions (the mean over a group) and noise (of the
        first output).
        """
        columns = []
        for column, i in enumerate(self.free.tolist()):
            if i == len(self.labels):
                base = first_noise(self.posterior.likelihood, self.posterior.network.outputs)
            else:
                base = float(self.pattern[self.groups == i].mean())
            columns.append(base * points[:, column].exp())
        return torch.stack(columns, 1)

    def posterior_at(self, point: Tensor) -> Posterior:
        """The posterior with that prior and noise; its mode where it moves with them."""
        post = at_noise(self.posterior, math.exp(float(self.full(point)[-1])))
        prior = posterior_prior(post, self.precision(point))
        found = replace(post, prior=prior)
        if not self.moves:
            return found
        if found.variational is not None:
            # else passes follow, which move it
            return recentred(found) if self.reach == math.inf else found
        theta, statistics = found.statistics.at_mode(found.bound_prior, found.theta)
        return replace(found, theta=theta, statistics=statistics)


def _grouped(
    posterior: Posterior, per_layer: bool, per_output: bool
) -> tuple[tuple[str, ...], Tensor]:
    """Labels, and the group of each parameter (P,): by layer; per_output: by output in a last
    layer.
    """
    network, layout = posterior.network, posterior.network.layout
    layers = layout.layers() if per_layer else {"all": layout.names}
    groups = torch.zeros(layout.size, dtype=torch.long)
    for i, names in enumerate(layers.values()):
        for name in names:
            groups[layout.positions[name]] = i
    labels = [f"precision of {layer or 'network'}" for layer in layers]
    # One factor for all of a large network keeps the pattern of its outputs' precisions.
    if per_output and (per_layer or network.linear):
        outputs = network.parameter_outputs
        groups = torch.where(outputs < 0, groups, len(labels) + outputs)
        labels += [f"precision of output {c}" for c in range(network.outputs)]
    used, groups = groups.unique(return_inverse=True)
    return tuple(labels[i] for i in used.tolist()), groups


def _trained_precisions(posterior: Posterior) -> Tensor:
    """The precisions (P,) of the trained weights' scale, by output where each has its own unit."""
    network = posterior.network
    apart = outputs_apart(network, posterior.likelihood, posterior.statistics.curvature)
    return trained_scale(network.layout, network.theta, apart).bind(network.layout).scale_precision


def first_noise(likelihood: Likelihood, outputs: int) -> float:
    return math.sqrt(
        float(likelihood.covariance_for(torch.zeros(outputs, dtype=torch.float64))[0, 0])
    )


def posterior_prior(posterior: Posterior, precision: Tensor) -> GaussianPrior:
    """A Gaussian prior with this precision (P,), written as shortly as it can be, and the mean
    that the posterior's prior has.
    """
    mean = posterior.prior.mean if isinstance(posterior.prior, GaussianPrior) else 0.0
    if bool((precision == precision[0]).all()):
        return GaussianPrior(float(precision[0]), mean)
    layout = posterior.network.layout
    setting: dict[str, float | Tensor] = {}
    for name, index in layout.positions.items():
        own = precision[index]
        setting[name] = float(own.flatten()[0]) if bool((own == own.flatten()[0]).all()) else own
    return GaussianPrior(setting, mean)
