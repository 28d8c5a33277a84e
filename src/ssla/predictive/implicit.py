"""Gradients through the output refit: implicit differentiation of the mode, and of the integrals
over y.

The log density is L(y) = log p(y|f̃) − ½ uᵀKu − ½ log|I + ΛK| with f̃ = f̂ + Ku and u = g(y, f̃) at
the mode. One Newton step from the mode that was found, with a fixed matrix I + ΛK, leaves its value
as it is and gives it the derivative of the implicit function. Mass, moments and distribution
function are functions of L at the nodes y_j. The nodes are kept in place: moving them changes an
integral by no more than its quadrature error. Where the refit changes from one mode to another, L
jumps, and `ssla.predictive.mode_switches` adds what the jump's own movement does to the integrals.
Values are those of the plain predictive.

A tensor with a graph is one from which autograd can differentiate back to the inputs x and to y. A
"zero with a graph" is zeros with the derivative of another tensor: added to plain values, it gives
them that derivative. "Plain" means without a graph.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NoReturn, final

import torch
from torch import Tensor

from ssla._checks import outside_transforms
from ssla.data import Inputs, as_inputs, map_inputs, values_outside_transforms
from ssla.likelihoods import Likelihood
from ssla.likelihoods.support import Real
from ssla.maths import linalg
from ssla.maths.quadrature import RowGrid
from ssla.predictive.count_law import CountLaw, Table, make_count_predictive
from ssla.predictive.grid_law import GridLaw, make_grid_predictive
from ssla.predictive.law import Law
from ssla.predictive.mode_switches import differentiate_jumps
from ssla.predictive.predictive import Predictive
from ssla.refit import Density, OutputLogDensity, OutputRefit
from ssla.refit.increments import Increments, evaluate_at_mode
from ssla.values import Marginal

if TYPE_CHECKING:
    from ssla.posterior import Posterior


@dataclass(frozen=True, eq=False)
class GraphDensity:
    """The log density of an output refit, with gradients in y, f̂ and K.

    Values come from the plain log density, and derivatives from `log_density_with_graph`.
    """

    plain: OutputLogDensity
    marginal: Marginal  # f̂ (N, C) and K (N, C, C), with their graph

    outputs_move = True

    @property
    def likelihood(self) -> Likelihood:
        """Return the likelihood of the new observation."""
        return self.plain.likelihood

    @property
    def like(self) -> Tensor:
        """Return a tensor of the dtype and device of the answers."""
        return self.plain.like

    def make_zero_with_graph(self, y: Tensor, rows: Tensor | None = None) -> Tensor:
        """Return zeros (m, k) with the derivative of the log density at y (m, k).

        rows (m,): the inputs to which the rows of y belong; None: all in order. Raises ValueError
        where a refit does not reach a mode.
        """
        f, K = self.marginal if rows is None else (values[rows] for values in self.marginal)
        return _make_zero_with_graph(log_density_with_graph(self.likelihood, y, f, K))

    def density_at(self, y: Tensor, rows: Tensor | None = None) -> Density:
        """Return the plain log densities and flags at y (m, k), with their graph.

        rows (m,): the inputs to which the rows of y belong; None: all in order.
        """
        values = values_outside_transforms(y)
        with torch.no_grad(), outside_transforms():
            density = self.plain.density_at(values, rows)
        return density._replace(log=density.log + self.make_zero_with_graph(y, rows))

    def __call__(self, y: Tensor) -> Increments:
        """Raise ValueError: increments carry no gradient. The argument is part of the protocol."""
        _refuse_answer("increments")


@final
@dataclass(frozen=True, eq=False)
class ImplicitLaw(Law):
    """A law of counts or numbers whose nodes carry a graph.

    Moments, mass and density have gradients; for numbers also cdf and quantiles. The other answers
    are refused.
    """

    law: GridLaw | CountLaw

    @property
    def kind(self) -> str:
        """Return "scalar" or "count"."""
        return self.law.kind

    @property
    def rows(self) -> int:
        """Return N, the number of inputs."""
        return self.law.rows

    @property
    def mean(self) -> Tensor:
        """Return E[y] (N,), with its graph."""
        return self.law.mean

    @property
    def variance(self) -> Tensor:
        """Return Var[y] (N,), with its graph."""
        return self.law.variance

    @property
    def mass(self) -> Tensor:
        """Return the integral (or sum) of the un-normalised density (N,), with its graph."""
        return self.law.mass

    def check(self, y: Tensor) -> None:
        """Raise ValueError where y (N, k) is outside the support."""
        self.law.check(values_outside_transforms(y))

    def log_prob(self, y: Tensor) -> Tensor:
        """Return the log density with its graph: (N, k) -> (N, k)."""
        return self.law.log_prob(y)

    def cdf(self, y: Tensor) -> Tensor:
        """Return P(Y ≤ y) with its graph, (N, k) -> (N, k). Raises ValueError for counts."""
        return self.law.cdf(y) if isinstance(self.law, GridLaw) else _refuse_answer("cdf")

    def icdf(self, q: Tensor) -> Tensor:
        """Return the quantiles at q (k,), with their graph: (N, k). Raises ValueError for counts.

        A quantile y is defined by F(y) = q, with F the cdf. The implicit function has the
        derivative dy = −dF(y) / p(y).
        """
        if not isinstance(self.law, GridLaw):
            _refuse_answer("icdf and interval")
        with torch.no_grad():
            y = self.law.icdf(q)
            density = self.law.log_prob(y).exp()
        return y - _make_zero_with_graph(self.law.cdf(y)) / density

    @property
    def mode(self) -> Tensor:
        """Raise ValueError: the mode carries no gradient."""
        _refuse_answer("mode")

    @property
    def epistemic(self) -> Tensor:
        """Return the epistemic variance (N,), with its graph.

        Raises ValueError where the likelihood does not allow every f.
        """
        return self.law.epistemic if self._splits_with_graph else _refuse_answer("epistemic")

    @property
    def aleatoric(self) -> Tensor:
        """Return the aleatoric variance (N,), with its graph.

        Raises ValueError where the likelihood does not allow every f.
        """
        return self.law.aleatoric if self._splits_with_graph else _refuse_answer("aleatoric")

    @property
    def _splits_with_graph(self) -> bool:
        """Tell whether the epistemic and the aleatoric variance have a graph.

        The variances have no graph where the likelihood does not allow every f: `split_variance`
        then uses a slope without a graph.
        """
        return self.law.log_density.likelihood.linear_domain

    # The arguments of the answers that are refused are part of the protocol of a law.

    def hdr(self, level: float) -> NoReturn:
        """Raise ValueError: the region carries no gradient."""
        _refuse_answer("hdr")

    def sample(self, n: int, generator: torch.Generator | None) -> Tensor:
        """Raise ValueError: draws carry no gradient."""
        _refuse_answer("sample")

    def increments(self, y: Tensor) -> Increments:
        """Raise ValueError: increments carry no gradient."""
        _refuse_answer("increments")


def _make_zero_with_graph(value: Tensor) -> Tensor:
    """Return zeros with the derivative of `value`, and with its shape."""
    return value - value.detach()


def _refuse_answer(name: str) -> NoReturn:
    """Raise ValueError for the answer of this name, which carries no gradient."""
    raise ValueError(
        f"With differentiable=True, {name} of this predictive carries no gradient yet. Moments, "
        "mass and log_prob do, and cdf, icdf and interval where y is a real number. Ask "
        "posterior.predict(x), without differentiable=True."
    )


def log_density_with_graph(likelihood: Likelihood, y: Tensor, f: Tensor, K: Tensor) -> Tensor:
    """Return the un-normalised log density L(y) of the module, differentiable in y, f̂ and K.

    y (N, k), f: f̂ (N, C), K (N, C, C) -> (N, k). Only the first derivatives of the result are those
    of L, not higher ones. Raises ValueError where a refit does not reach a mode.
    """
    mean, covariance = f.unsqueeze(1), K.unsqueeze(1)
    boundary = likelihood.refit_at_boundary(y, mean, covariance)
    if boundary is not None:
        # The derivative of a mode at the boundary would be NaN. These y are replaced by E[y|f̂],
        # whose mode is f̂, and their log density by that of the boundary at the end.
        y = torch.where(boundary.cut, likelihood.mean(mean).detach(), y)
    u = _find_modes(likelihood, y, f, K)
    f_at_mode = mean + _multiply_by_covariance(covariance, u)
    eye = torch.eye(f.shape[1], dtype=f.dtype)

    # At the mode u = g. A Newton step for this equation, with a fixed matrix, leaves the value of u
    # and gives it the derivative of the implicit function.
    with torch.no_grad():
        matrix = eye + likelihood.precision(y, f_at_mode) @ covariance
    u = u - torch.linalg.solve(matrix, u - likelihood.score(y, f_at_mode))
    move = _multiply_by_covariance(covariance, u)
    refitted = mean + move
    curvature = eye + likelihood.precision(y, refitted) @ covariance
    logdet: Tensor = torch.linalg.slogdet(curvature).logabsdet
    total: Tensor = likelihood.log_prob(y, refitted) - 0.5 * (u * move).sum(-1) - 0.5 * logdet
    if boundary is None:
        return total
    return torch.where(boundary.cut, boundary.total, total)


def _find_modes(likelihood: Likelihood, y: Tensor, f: Tensor, K: Tensor) -> Tensor:
    """Find the modes f̃ of the refits as u = K⁻¹(f̃ − f̂), without a graph.

    y (N, k), f: f̂ (N, C), K (N, C, C) -> (N, k, C). Raises ValueError where a refit does not reach
    a mode.
    """
    rows, count = y.shape
    y, f, K = (values_outside_transforms(tensor) for tensor in (y, f, K))
    with torch.no_grad(), outside_transforms():
        means = f.repeat_interleave(count, 0)
        roots = linalg.covariance_root(K).repeat_interleave(count, 0)
        refit = evaluate_at_mode(likelihood, y.reshape(-1), means, roots)
        if bool(refit.fallback.any()) or not bool(refit.converged.all()):
            failed = (refit.fallback | ~refit.converged).view(rows, count).any(1)
            raise ValueError(
                f"The refit did not reach a mode for every y at {int(failed.sum())} of {rows} "
                "inputs, so the predictive has no gradient there. "
                "posterior.predict(x).diagnostics names the rows: leave them out."
            )
        return refit.pull.view(rows, count, -1)


def _multiply_by_covariance(K: Tensor, u: Tensor) -> Tensor:
    """Return K u: (…, C, C), (…, C) -> (…, C)."""
    return (K @ u.unsqueeze(-1)).squeeze(-1)


def _add_graph_to_table(table: Table, density: GraphDensity) -> Table:
    """Return a table of counts with the derivative of the log density added to its block totals.

    The derivative of a total is taken as that of log p at the mean count of the block. Blocks
    without a count have none.
    """
    empty = table.widths <= 0
    zero = density.make_zero_with_graph(torch.where(empty, 0.0, table.centres), table.rows)
    return table._replace(logs=table.logs + torch.where(empty, 0.0, zero))


def _add_graph_to_grid(piece: RowGrid, density: GraphDensity) -> RowGrid:
    """Return a grid with the derivative of the log density added to its values at the nodes.

    The derivative contains what moving jumps of the density add to integrals (see the module). The
    nodes stay in place.
    """
    rows, grid = piece
    zero = density.make_zero_with_graph(grid.nodes, rows)
    if zero.requires_grad:
        marginal, plain_marginal = (
            Marginal(*(values[rows] for values in of_all_rows))
            for of_all_rows in (density.marginal, density.plain.marginal)
        )
        zero = zero + differentiate_jumps(density.likelihood, grid, plain_marginal, marginal)
    return RowGrid(rows, replace(grid, logs=grid.logs + zero))


def make_pointwise_predictive(posterior: Posterior, x: Inputs, rung: OutputRefit) -> Predictive:
    """Return the predictive of a count or a number at the inputs x, with the graph of x.

    rung: the output refit, to the mode. Raises ValueError where a refit does not reach a mode.
    """
    x_without_graph = map_inputs(values_outside_transforms, as_inputs(x, differentiable=True))
    with torch.no_grad(), outside_transforms():
        log_density = rung(posterior, x_without_graph)
        support = log_density.likelihood.support_for(posterior.network.outputs)
        predictive = (
            make_grid_predictive(log_density, support, rung.name)
            if isinstance(support, Real)
            else make_count_predictive(log_density, rung.name)
        )
    marginal = posterior.outputs_at(x, differentiable=True)
    return add_graph(predictive, GraphDensity(log_density, marginal))


def add_graph(predictive: Predictive, density: GraphDensity) -> Predictive:
    """Return the predictive of a plain output refit with the graph of the outputs of `density`.

    Its values stay the same. Its law must be a GridLaw or a CountLaw.
    """
    law = predictive.law
    if isinstance(law, GridLaw):
        pieces = [_add_graph_to_grid(piece, density) for piece in law.pieces]
        law = replace(law, log_density=density, pieces=pieces)
    else:
        assert isinstance(law, CountLaw)
        tables = [_add_graph_to_table(table, density) for table in law.tables]
        law = replace(law, log_density=density, tables=tables)
    return replace(predictive, law=ImplicitLaw(law), differentiable=True)
