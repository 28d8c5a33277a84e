"""Rows that the network has not seen: read once, linearised once, scored under any number of
Gaussians.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from ssla.curvature import Operator
from ssla.curvature.jacobians import Features, Jacobian
from ssla.curvature.memory import bytes_of
from ssla.data import Source, checked, open_source
from ssla.likelihoods import Likelihood
from ssla.likelihoods.integrals import log_average
from ssla.network import LastLayer, squared_lengths
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


@dataclass(frozen=True, eq=False)
class ValidationRows:
    """Targets, weights and outputs of the rows; features or Jacobians are kept while they fit."""

    posterior: Posterior  # at whose mean the rows are linearised
    source: Source
    y: Tensor
    weights: Tensor  # (n,)
    f: Tensor  # outputs at the mean of θ (n, C), float64
    kept: tuple[tuple[Tensor, Jacobian], ...] | None
    squares: Tensor | None = (
        None  # of the lengths of features (n,); None where no last layer is free
    )

    @staticmethod
    def read(posterior: Posterior, data: Any) -> ValidationRows:
        source = open_source(data)
        outputs = posterior.network.outputs
        support = posterior.likelihood.support_for(outputs)
        targets, weights, means, squares = [], [], [], []
        kept: list[tuple[Tensor, Jacobian]] | None = []
        size = 0
        for batch in source:
            if not batch.y.shape[0]:
                continue
            x, y, w = checked(batch, support, outputs)
            targets.append(y)
            weights.append(torch.ones(len(y), dtype=torch.float64) if w is None else w)
            for f, J in posterior.linearised(x, progress=False):
                means.append(f.double())
                if isinstance(posterior.network, LastLayer):
                    assert isinstance(J, Features)
                    squares.append(squared_lengths(J, posterior.network.inputs))
                size += bytes_of(J)
                if kept is not None and size <= posterior.memory_budget // KEPT_SHARE:
                    kept.append((f, J))
                else:
                    kept = None
        if not targets or not float(torch.cat(weights).sum()) > 0:
            raise ValueError(EMPTY)
        count = sum(len(y) for y in targets)
        if count < FEWEST:
            raise ValueError(
                f"validation= has {count} rows, too few to choose a dispersion and a prior: give "
                f"at least {FEWEST}, better hundreds, or leave validation out."
            )
        if kept is None and not source.repeatable:
            raise ValueError(
                "The validation rows can be read only once (a generator), and what is computed of "
                "them does not fit a quarter of the memory budget. Give arrays, a list of batches "
                "or a DataLoader, or a larger memory_budget."
            )
        parts = None if kept is None else tuple(kept)
        lengths = torch.cat(squares) if squares else None
        return ValidationRows(
            posterior,
            source,
            torch.cat(targets),
            torch.cat(weights),
            torch.cat(means),
            parts,
            lengths,
        )

    def scaled(self, posterior: Posterior) -> ValidationRows:
        """The same rows under a posterior whose network has a scale of rows, where that of the
        rows at hand has none.
        """
        network = posterior.network
        assert isinstance(network, LastLayer)
        assert network.row_scale is not None
        assert self.squares is not None
        s = network.row_scale.of_squares(self.squares)[:, None]
        kept, start = [], 0
        for f, J in self.kept or ():
            assert isinstance(J, Features)
            kept.append((f / s[start : start + len(f)].to(f.dtype), network.scaled(J)))
            start += len(f)
        parts = None if self.kept is None else tuple(kept)
        return replace(self, posterior=posterior, f=self.f / s, kept=parts)

    def thinned(self, most: int) -> ValidationRows:
        """At most so many of the rows, evenly spread; all of them where their Jacobians are not
        kept.
        """
        stride = -(-self.count // most)
        if stride == 1 or self.kept is None or not self.posterior.network.linear:
            return self
        picked = torch.arange(0, self.count, stride)
        kept, start = [], 0
        for f, J in self.kept:
            assert isinstance(J, Features)
            own = slice(-start % stride, None, stride)
            start += len(f)
            kept.append((f[own], replace(J, phi=J.phi[own])))
        squares = None if self.squares is None else self.squares[picked]
        parts = (self.y[picked], self.weights[picked], self.f[picked], tuple(kept), squares)
        return ValidationRows(self.posterior, self.source, *parts)

    @property
    def count(self) -> int:
        return len(self.y)

    def outputs(self, step: Tensor | None) -> Tensor:
        """The outputs with θ moved by `step` (n, C)."""
        if step is None:
            return self.f
        return torch.cat([f + J.double().push(step) for _, f, J in self._chunks()])

    def plug_in(self, likelihood: Likelihood, f: Tensor | None = None) -> Tensor:
        """log p(y|f) (n,): the network without doubt; at other outputs f where they are given."""
        return likelihood.predictive.log_prob(self.y, self.f if f is None else f)

    def scores(self, candidates: Sequence[Candidate]) -> Tensor:
        """log ∫ p(y|f) N(f) df under each candidate (k, n).

        One pass over the rows for all of them.
        """
        found = torch.empty(len(candidates), self.count, dtype=torch.float64)
        for rows, f, J in self._chunks():
            for number, candidate in enumerate(candidates):
                found[number, rows] = log_densities(candidate, self.y[rows], f, J)
        return found.nan_to_num(nan=-torch.inf)

    def predictives(
        self, candidate: Candidate, most: int
    ) -> Iterator[tuple[Predictive, Tensor, Tensor]]:
        """The predictives of at most so many rows, evenly spread, with their targets and
        weights.
        """
        stride = -(-self.count // most)
        for rows, f, J in self._chunks():
            picked = torch.arange(rows.start, rows.start + len(f)) % stride == 0
            if not bool(picked.any()):
                continue
            mean, K = _moved(candidate, f, J), candidate.covariance.covariance(J).double()
            with _quiet():
                predictive = predictive_of_outputs(
                    candidate.likelihood.predictive, mean[picked], K[picked] * candidate.scale**2
                )
            yield predictive, self.y[rows][picked], self.weights[rows][picked]

    def _chunks(self) -> Iterator[tuple[slice, Tensor, Jacobian]]:
        """Rows with f and J at the posterior's mean."""
        start = 0
        for f, J in self.kept if self.kept is not None else self._again():
            yield slice(start, start + len(f)), f.double(), J
            start += len(f)

    def _again(self) -> Iterator[tuple[Tensor, Jacobian]]:
        for batch in self.source:
            if batch.y.shape[0]:
                yield from self.posterior.linearised(batch.x, progress=False)


def log_densities(candidate: Candidate, y: Tensor, f: Tensor, J: Jacobian) -> Tensor:
    """log ∫ p(y|f) N(f) df of rows with outputs f (b, C) and Jacobian J -> (b,)."""
    law, mean = candidate.likelihood.predictive, _moved(candidate, f, J)
    if law.linear_domain:
        return log_average(law, y, mean, candidate.covariance.root(J).scaled(candidate.scale))
    K = candidate.covariance.covariance(J).double() * candidate.scale**2
    with _quiet():
        return predictive_of_outputs(law, mean, K).log_prob(y).double()


def _moved(candidate: Candidate, f: Tensor, J: Jacobian) -> Tensor:
    """f at the candidate's mean of θ, in float64."""
    return f if candidate.step is None else f + J.double().push(candidate.step)


@contextmanager
def _quiet() -> Iterator[None]:
    """Far from the best setting predictives may be rough; they are not used."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        yield
