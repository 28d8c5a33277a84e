"""Gradients through the output refit: implicit differentiation of the mode, and of the integrals
over y.

The log density is L(y) = log p(y|f̃) − ½ uᵀKu − ½ log|I + ΛK| with f̃ = f̂ + Ku and u = g(y, f̃) at
the mode. One Newton step from the mode that was found, with a fixed matrix I + ΛK, leaves its value
as it is and gives it the derivative of the implicit function. Mass, moments and distribution
function are functions of L at the nodes y_j. The nodes are kept in place: moving them changes an
integral by no more than its quadrature error. Where the refit changes from one mode to another, L
jumps, and `ssla.predictive.mode_switches` adds what the jump's own movement does to the integrals.
Values are those of the plain predictive.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NoReturn, final

import torch
from torch import Tensor

from ssla._checks import outside_transforms
from ssla.data import Inputs, as_inputs, map_inputs, plain
from ssla.likelihoods import (
    Likelihood,
)
from ssla.likelihoods.support import Real
from ssla.maths import linalg
from ssla.maths.quadrature import Built
from ssla.predictive.count_law import CountLaw, Table, count_predictive
from ssla.predictive.grid_law import GridLaw, grid_predictive
from ssla.predictive.law import Law
from ssla.predictive.mode_switches import change_of_jumps
from ssla.predictive.predictive import Predictive
from ssla.refit import Density, OutputLogDensity, OutputRefit
from ssla.refit.increments import Increments, at_mode
from ssla.values import Marginal

if TYPE_CHECKING:
    from ssla.posterior import Posterior


@dataclass(frozen=True, eq=False)
class GraphDensity:
    """The log density of an output refit, with gradients in y, f̂ and K."""

    plain: OutputLogDensity
    marginal: Marginal  # with its graph

    moves = True

    @property
    def likelihood(self) -> Likelihood:
        return self.plain.likelihood

    @property
    def like(self) -> Tensor:
        return self.plain.like

    def change(self, y: Tensor, rows: Tensor | None = None) -> Tensor:
        """Zero, with the derivative of the log density at y (m, k), for some rows (m,)."""
        f, K = self.marginal if rows is None else (part[rows] for part in self.marginal)
        return _change(log_density_with_graph(self.likelihood, y, f, K))

    def at(self, y: Tensor, rows: Tensor | None = None) -> Density:
        values = plain(y)
        with torch.no_grad(), outside_transforms():
            found = self.plain.at(values, rows)
        return found._replace(log=found.log + self.change(y, rows))

    def __call__(self, y: Tensor) -> Increments:
        _refuse("increments")


@final
@dataclass(frozen=True, eq=False)
class ImplicitLaw(Law):
    """A law whose nodes carry a graph: moments, mass, density, and of numbers cdf and quantiles.

    The rest is refused.
    """

    law: GridLaw | CountLaw

    @property
    def kind(self) -> str:
        return self.law.kind

    @property
    def rows(self) -> int:
        return self.law.rows

    @property
    def mean(self) -> Tensor:
        return self.law.mean

    @property
    def variance(self) -> Tensor:
        return self.law.variance

    @property
    def mass(self) -> Tensor:
        return self.law.mass

    def check(self, y: Tensor) -> None:
        self.law.check(plain(y))

    def log_prob(self, y: Tensor) -> Tensor:
        return self.law.log_prob(y)

    def cdf(self, y: Tensor) -> Tensor:
        return self.law.cdf(y) if isinstance(self.law, GridLaw) else _refuse("cdf")

    def icdf(self, q: Tensor) -> Tensor:
        """F(z) = q defines z: dz = −dF(z) / p(z)."""
        if not isinstance(self.law, GridLaw):
            _refuse("icdf and interval")
        with torch.no_grad():
            z = self.law.icdf(q)
            density = self.law.log_prob(z).exp()
        return z - _change(self.law.cdf(z)) / density

    @property
    def mode(self) -> Tensor:
        _refuse("mode")

    @property
    def epistemic(self) -> Tensor:
        return self.law.epistemic if self._splits else _refuse("epistemic")

    @property
    def aleatoric(self) -> Tensor:
        return self.law.aleatoric if self._splits else _refuse("aleatoric")

    @property
    def _splits(self) -> bool:
        """Where not every f is allowed, the split is to first order, by a slope without a graph."""
        return self.law.log_density.likelihood.linear_domain

    def hdr(self, level: float) -> NoReturn:
        _refuse("hdr")

    def sample(self, n: int, generator: torch.Generator | None) -> Tensor:
        _refuse("sample")

    def increments(self, y: Tensor) -> Increments:
        _refuse("increments")


def _change(value: Tensor) -> Tensor:
    """Zero, with the derivative of `value`."""
    return value - value.detach()


def _refuse(what: str) -> NoReturn:
    raise ValueError(
        f"With differentiable=True, {what} of this predictive carries no gradient yet. Moments, "
        "mass and log_prob do, and cdf, icdf and interval where y is a real number. Ask "
        "posterior.predict(x), without differentiable=True."
    )


def log_density_with_graph(likelihood: Likelihood, y: Tensor, f: Tensor, K: Tensor) -> Tensor:
    """L(y), un-normalised, differentiable in y, f̂ and K.  (N, k), (N, C), (N, C, C) -> (N, k)."""
    rows, count = y.shape
    mean, covariance = f.unsqueeze(1), K.unsqueeze(1)
    boundary = likelihood.refit_at_boundary(y, mean, covariance)
    if boundary is not None:
        # The derivative of a mode at the boundary would be NaN: E[y|f̂], whose mode is f̂, takes
        # the place of these y.
        y = torch.where(boundary.cut, likelihood.mean(mean).detach(), y)
    values = [plain(part) for part in (y, f, K)]
    with torch.no_grad(), outside_transforms():
        spread, R = (
            part.repeat_interleave(count, 0) for part in (values[1], linalg.root(values[2]))
        )
        found = at_mode(likelihood, values[0].reshape(-1), spread, R)
        if bool(found.fallback.any()) or not bool(found.converged.all()):
            bad = (found.fallback | ~found.converged).view(rows, count).any(1)
            raise ValueError(
                f"The refit did not reach a mode for every y at {int(bad.sum())} of {rows} inputs, "
                "so the predictive has no gradient there. posterior.predict(x).diagnostics names "
                "the rows: leave them out."
            )
        u = found.pull.view(rows, count, -1)
    at = mean + _times(covariance, u)
    eye = torch.eye(f.shape[1], dtype=f.dtype)
    with torch.no_grad():
        matrix = eye + likelihood.precision(y, at) @ covariance
    u = u - torch.linalg.solve(matrix, u - likelihood.score(y, at))
    move = _times(covariance, u)
    at = mean + move
    logdet: Tensor = torch.linalg.slogdet(eye + likelihood.precision(y, at) @ covariance).logabsdet
    total: Tensor = likelihood.log_prob(y, at) - 0.5 * (u * move).sum(-1) - 0.5 * logdet
    if boundary is None:
        return total
    return torch.where(boundary.cut, boundary.total, total)


def _times(K: Tensor, u: Tensor) -> Tensor:
    return (K @ u.unsqueeze(-1)).squeeze(-1)


def _with_graph(table: Table, density: GraphDensity) -> Table:
    """Blocks without a count have no density and no derivative."""
    empty = table.widths <= 0
    change = density.change(torch.where(empty, 0.0, table.centres), table.rows)
    return table._replace(logs=table.logs + torch.where(empty, 0.0, change))


def _grid_with_graph(piece: Built, density: GraphDensity) -> Built:
    """Nodes in place, with the derivative of the log density there and of its jumps between
    them.
    """
    rows, grid = piece
    change = density.change(grid.nodes, rows)
    if change.requires_grad:
        marginal, plain_marginal = (
            Marginal(*(part[rows] for part in m))
            for m in (density.marginal, density.plain.marginal)
        )
        change = change + change_of_jumps(density.likelihood, grid, plain_marginal, marginal)
    return Built(rows, replace(grid, logs=grid.logs + change))


def pointwise_predictive(posterior: Posterior, x: Inputs, rung: OutputRefit) -> Predictive:
    """The predictive of a count or a number, with the graph of x."""
    numbers = map_inputs(plain, as_inputs(x, differentiable=True))
    with torch.no_grad(), outside_transforms():
        values = rung(posterior, numbers)
        support = values.likelihood.support_for(posterior.network.outputs)
        found = (
            grid_predictive(values, support, rung.name)
            if isinstance(support, Real)
            else count_predictive(values, rung.name)
        )
    return with_graph(found, GraphDensity(values, posterior.outputs_at(x, differentiable=True)))


def with_graph(found: Predictive, density: GraphDensity) -> Predictive:
    """The predictive of a plain output refit, with the graph of the outputs that `density` has."""
    law = found.law
    if isinstance(law, GridLaw):
        law = GridLaw(
            density, law.support, [_grid_with_graph(piece, density) for piece in law.pieces]
        )
    else:
        assert isinstance(law, CountLaw)
        law = replace(
            law,
            log_density=density,
            tables=[_with_graph(table, density) for table in law.tables],
        )
    return replace(found, law=ImplicitLaw(law), differentiable=True)
