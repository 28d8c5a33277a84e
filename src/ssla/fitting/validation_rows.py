"""Rows that the network has not seen.

These rows are read once, linearised once, and scored under any number of Gaussians. A candidate is
such a Gaussian over θ, together with a likelihood.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from ssla.curvature import Operator
from ssla.curvature.jacobians import Features, Jacobian
from ssla.curvature.memory import count_tensor_bytes
from ssla.data import Source, check_batch, open_source
from ssla.likelihoods import Likelihood
from ssla.likelihoods.integrals import log_average
from ssla.network import LastLayer, compute_squared_lengths
from ssla.predictive import Predictive, predictive_of_outputs

if TYPE_CHECKING:
    from ssla.posterior import Posterior

KEPT_SHARE = 4  # parts of the memory budget that kept features or Jacobians take at most
FEWEST = 10
EMPTY = (
    "validation= has no rows. Give (X, y) or a loader with rows that the network was not trained "
    "on."
)


class Candidate(NamedTuple):
    """A Gaussian over θ with a likelihood, to be scored."""

    likelihood: Likelihood
    covariance: Operator
    step: Tensor | None  # the mean of θ less that at which the rows are linearised (P,); None: zero
    scale: float = 1.0  # the covariance is scale² times `covariance`

    def compute_mean_outputs(self, f: Tensor, J: Jacobian) -> Tensor:
        """Return the outputs (b, C) at the candidate's mean of θ, in float64.

        f (b, C) in float64 and J are those where the rows are linearised.
        """
        return f if self.step is None else f + J.double().push(self.step)

    def make_predictive(self, f: Tensor, J: Jacobian, rows: Tensor | slice) -> Predictive:
        """Return the predictive of some of the rows with outputs f (b, C) and Jacobian J.

        rows: which of the b rows, as a mask (b,), indices or a slice.
        """
        mean = self.compute_mean_outputs(f, J)[rows]
        K = self.covariance.covariance(J).double()[rows] * self.scale**2
        # Far from the best setting predictives may be inaccurate and warn. They are not kept.
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            return predictive_of_outputs(self.likelihood.predictive, mean, K)


@dataclass(frozen=True, eq=False)
class ValidationRows:
    """Targets, weights and outputs of validation rows, linearised at a posterior.

    Features or Jacobians are kept if all of them fit in memory.
    """

    posterior: Posterior  # at whose mean the rows are linearised
    source: Source
    y: Tensor  # (n,) or (n, D)
    weights: Tensor  # (n,)
    f: Tensor  # outputs at the mean of θ (n, C), float64
    # f (b, C) and J of b rows each; None where they do not fit in memory
    kept: tuple[tuple[Tensor, Jacobian], ...] | None
    # squared lengths of the features (n,); None where other weights than a last layer are free
    squares: Tensor | None = None

    @staticmethod
    def read(posterior: Posterior, data: Any) -> ValidationRows:
        """Read validation rows, and linearise them at a posterior.

        data: in any form that `ssla.fit` takes. Raises ValueError for rows that do not suit the
        likelihood, for too few rows, and for rows that can be read only once and do not fit in
        memory.
        """
        source = open_source(data)
        outputs = posterior.network.outputs
        support = posterior.likelihood.support_for(outputs)
        targets, weights, means, squares = [], [], [], []
        kept: list[tuple[Tensor, Jacobian]] | None = []  # None as soon as they do not fit
        size = 0
        for batch in source:
            if not batch.y.shape[0]:
                continue
            x, y, w = check_batch(batch, support, outputs)
            targets.append(y)
            weights.append(torch.ones(len(y), dtype=torch.float64) if w is None else w)
            for f, J in posterior.linearised(x, progress=False):
                means.append(f.double())
                if isinstance(posterior.network, LastLayer):
                    assert isinstance(J, Features)
                    squares.append(compute_squared_lengths(J, posterior.network.inputs))
                size += count_tensor_bytes(J)
                if kept is not None and size <= posterior.memory_budget // KEPT_SHARE:
                    kept.append((f, J))
                else:
                    kept = None

        if not targets or not float(torch.cat(weights).sum()) > 0:
            raise ValueError(EMPTY)
        rows = ValidationRows(
            posterior,
            source,
            torch.cat(targets),
            torch.cat(weights),
            torch.cat(means),
            None if kept is None else tuple(kept),
            torch.cat(squares) if squares else None,
        )
        rows._check()
        return rows

    def _check(self) -> None:
        """Raise ValueError if the rows cannot choose a setting.

        This is so for too few rows, and for rows that can be read only once and are not kept.
        """
        if self.count < FEWEST:
            raise ValueError(
                f"validation= has {self.count} rows, too few to choose a dispersion and a prior: "
                f"give at least {FEWEST}, better hundreds, or leave validation out."
            )
        if self.kept is None and not self.source.repeatable:
            raise ValueError(
                "The validation rows can be read only once (a generator), and what is computed of "
                "them does not fit a quarter of the memory budget. Give arrays, a list of batches "
                "or a DataLoader, or a larger memory_budget."
            )

    def with_row_scale_of(self, posterior: Posterior) -> ValidationRows:
        """Return the same rows under a posterior whose last layer has a scale of rows.

        The present posterior of the rows must be the same without the scale. Outputs and features
        are divided by the scale of each row, and the network is not evaluated again. Raises
        AssertionError unless the network is a last layer with a scale of rows.
        """
        network = posterior.network
        assert isinstance(network, LastLayer)
        assert network.row_scale is not None
        assert self.squares is not None
        scales = network.row_scale.compute_scales(self.squares)[:, None]
        kept = []
        start = 0
        for f, J in self.kept or ():
            assert isinstance(J, Features)
            scales_of_chunk = scales[start : start + len(f)].to(f.dtype)
            kept.append((f / scales_of_chunk, network.scale_features(J)))
            start += len(f)
        scaled = None if self.kept is None else tuple(kept)
        return replace(self, posterior=posterior, f=self.f / scales, kept=scaled)

    def thin_rows(self, most: int) -> ValidationRows:
        """Return at most `most` of the rows, evenly spread; their weights stay the same.

        All rows are returned where their features are not kept, and for other weights than a last
        layer.
        """
        stride = -(-self.count // most)  # rounded up
        if stride == 1 or self.kept is None or not self.posterior.network.linear:
            return self
        kept = []
        start = 0
        for f, J in self.kept:
            assert isinstance(J, Features)
            # Every stride-th row of all chunks together, not of each chunk.
            rows = slice(-start % stride, None, stride)
            start += len(f)
            kept.append((f[rows], replace(J, phi=J.phi[rows])))

        chosen = torch.arange(0, self.count, stride)
        return replace(
            self,
            y=self.y[chosen],
            weights=self.weights[chosen],
            f=self.f[chosen],
            kept=tuple(kept),
            squares=None if self.squares is None else self.squares[chosen],
        )

    @property
    def count(self) -> int:
        """Return the number of rows."""
        return len(self.y)

    def compute_outputs(self, step: Tensor | None) -> Tensor:
        """Return the outputs (n, C) with the mean of θ moved by `step` (P,); None: not moved."""
        if step is None:
            return self.f
        return torch.cat([f + J.double().push(step) for _, f, J in self._iterate_chunks()])

    def score_plug_in(self, likelihood: Likelihood, f: Tensor | None = None) -> Tensor:
        """Compute log p(y|f) (n,) of the network itself, without the uncertainty of θ.

        f: outputs (n, C); None: those at the posterior's mean.
        """
        return likelihood.predictive.log_prob(self.y, self.f if f is None else f)

    def compute_scores(self, candidates: Sequence[Candidate]) -> Tensor:
        """Compute the log density (k, n) of the rows' targets under each of k candidates.

        The result is log ∫ p(y|f) N(f) df, with N(f) the candidate's Gaussian of the outputs. All
        candidates take one pass over the rows. A value that is not a number becomes −∞.
        """
        scores = torch.empty(len(candidates), self.count, dtype=torch.float64)
        for rows, f, J in self._iterate_chunks():
            for number, candidate in enumerate(candidates):
                scores[number, rows] = compute_log_densities(candidate, self.y[rows], f, J)
        return scores.nan_to_num(nan=-torch.inf)

    def iterate_predictives(
        self, candidate: Candidate, most: int
    ) -> Iterator[tuple[Predictive, Tensor, Tensor]]:
        """Yield (predictive, targets, weights) for at most `most` of the rows, a chunk at a time.

        The rows are evenly spread. The predictives are those under the candidate.
        """
        stride = -(-self.count // most)  # rounded up
        for rows, f, J in self._iterate_chunks():
            is_chosen = torch.arange(rows.start, rows.start + len(f)) % stride == 0
            if bool(is_chosen.any()):
                predictive = candidate.make_predictive(f, J, is_chosen)
                yield predictive, self.y[rows][is_chosen], self.weights[rows][is_chosen]

    def _iterate_chunks(self) -> Iterator[tuple[slice, Tensor, Jacobian]]:
        """Yield (positions, f (b, C) in float64, J) for all rows, a chunk of b rows at a time.

        f and J are those at the posterior's mean. Where J is not kept, the rows are read again.
        """
        start = 0
        for f, J in self.kept if self.kept is not None else self._linearise_again():
            yield slice(start, start + len(f)), f.double(), J
            start += len(f)

    def _linearise_again(self) -> Iterator[tuple[Tensor, Jacobian]]:
        """Read the rows again, and yield f (b, C) and J of a chunk at a time."""
        for batch in self.source:
            if batch.y.shape[0]:
                yield from self.posterior.linearised(batch.x, progress=False)


def compute_log_densities(candidate: Candidate, y: Tensor, f: Tensor, J: Jacobian) -> Tensor:
    """Compute log ∫ p(y|f) N(f) df (b,) of b rows with targets y, under a candidate.

    N(f) is the candidate's Gaussian of the outputs. f (b, C) in float64 and J are those where the
    rows are linearised.
    """
    likelihood = candidate.likelihood.predictive
    if likelihood.linear_domain:
        root = candidate.covariance.root(J).scale_by(candidate.scale)
        return log_average(likelihood, y, candidate.compute_mean_outputs(f, J), root)
    # Where not every output is allowed there is no such average: the predictive scores the rows.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        return candidate.make_predictive(f, J, slice(None)).log_prob(y).double()
