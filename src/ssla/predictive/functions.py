"""f at several inputs together: its joint Gaussian, and draws of the whole function.

The Gaussian over θ and the linearised network f(x) = f̂(x) + J_x (θ − m) give, for any two inputs,
K_xx' = J_x S J_x'ᵀ. A draw of θ is a function that can be evaluated anywhere, with that covariance:
no matrix over the inputs is factorised.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, final

import torch
from torch import Tensor

from ssla._checks import all_in_plain_torch
from ssla.curvature.memory import in_words
from ssla.data import Inputs, as_inputs, row_count, slice_inputs
from ssla.values import Marginal

if TYPE_CHECKING:
    from ssla.posterior import Posterior

COPIES = 4  # of the Jacobian of some rows: its entries, those in float64, H⁻¹Jᵀ and its workspace


class Joint(NamedTuple):
    """f at all inputs as one Gaussian. Entry i·C + c is output c at input i."""

    mean: Tensor  # (N·C,)
    covariance: Tensor  # (N·C, N·C)


def joint(posterior: Posterior, x: Inputs, differentiable: bool = False) -> Joint:
    """The joint Gaussian of f at x (see Posterior.joint)."""
    inputs = posterior.network.cast(as_inputs(x, differentiable))
    rows, C = row_count(inputs), posterior.network.outputs
    pieces = _pieces(posterior, rows)
    mean = torch.empty(rows, C, dtype=torch.float64)
    K = torch.empty(rows, C, rows, C, dtype=torch.float64)
    for i, left in enumerate(pieces):
        f, J = next(posterior.linearised(slice_inputs(inputs, left), differentiable))
        J = J.double()
        mean[left] = f
        moves = posterior.covariance.solve_many(J.dense().values.flatten(0, 1).mT)  # S Jᵀ (P, k)
        for right in pieces[i:]:
            other = (
                J
                if right == left
                else next(posterior.linearised(slice_inputs(inputs, right), differentiable))[
                    1
                ].double()
            )
            block = other.push_many(moves).unflatten(-1, (-1, C))  # (B', C, B, C)
            if right == left:
                block = (block + block.permute(2, 3, 0, 1)) / 2
            K[right, :, left], K[left, :, right] = block, block.permute(2, 3, 0, 1)
    blocks = K.diagonal(dim1=0, dim2=2).movedim(-1, 0)  # (N, C, C)
    like = posterior.like(Marginal(mean, blocks))
    return Joint(mean.flatten().to(like), K.view(rows * C, rows * C).to(like))


def joint_of_groups(
    posterior: Posterior, x: Inputs, size: int, differentiable: bool = False
) -> Joint:
    """f at each group of `size` successive inputs as one Gaussian: mean (G, size·C), covariance (G,
    size·C, size·C), in float64.

    The covariance between groups is not computed, so that many small groups cost what their rows
    cost.
    """
    inputs = posterior.network.cast(as_inputs(x, differentiable))
    rows, width = row_count(inputs), size * posterior.network.outputs
    groups = _rows_at_once(posterior) // size
    found = [
        Joint(
            torch.empty(0, width, dtype=torch.float64),
            torch.empty(0, width, width, dtype=torch.float64),
        )
    ]
    for part in _slices(rows, max(groups, 1) * size):
        some = slice_inputs(inputs, part)
        if groups == 0:  # one group is more than a Jacobian may hold
            mean, K = joint(posterior, some, differentiable)
            found.append(Joint(mean.double()[None], K.double()[None]))
            continue
        f, J = next(posterior.linearised(some, differentiable))
        values = J.double().dense().values.reshape(-1, width, J.size)
        moves = (
            posterior.covariance.solve_many(values.flatten(0, 1).mT)
            .unflatten(1, (-1, width))
            .movedim(1, 0)
        )  # S Jᵀ (G, P, ·)
        K = values @ moves
        found.append(Joint(f.double().reshape(-1, width), (K + K.mT) / 2))
    return Joint(*(torch.cat(column) for column in zip(*found, strict=True)))


def _pieces(posterior: Posterior, rows: int) -> list[slice]:
    """Rows whose Jacobian is held at one time.

    ValueError if the result, or the Jacobian of one row, is beyond the budget.
    """
    network, budget = posterior.network, posterior.memory_budget
    size = rows * network.outputs
    need = 2 * 8 * size**2  # the result, and a copy in the model's dtype
    if need > budget:
        most = int((budget / 16) ** 0.5) // network.outputs
        raise ValueError(
            f"The joint covariance of {rows:,} inputs with {network.outputs} "
            f"output{'s' * (network.outputs != 1)} is a matrix of {size:,} × {size:,}. It needs "
            f"{in_words(need)}, more than the memory budget of {in_words(budget)}. Give at most "
            f"{most:,} inputs, use posterior.draw_functions(n), which needs no such matrix, or fit "
            "with a larger memory_budget."
        )
    return _slices(rows, _rows_at_once(posterior))


def _rows_at_once(posterior: Posterior) -> int:
    """How many rows of the Jacobian fit the budget. ValueError if not even one does."""
    network, budget = posterior.network, posterior.memory_budget
    row = COPIES * 8 * network.outputs * network.layout.size
    if row > budget:
        raise ValueError(
            f"The Jacobian of one input takes {in_words(row)}, more than the memory budget of "
            f"{in_words(budget)}. Use posterior.draw_functions(n), which does not build it, select "
            "fewer weights, or fit with a larger memory_budget."
        )
    return min(budget // row, network.rows_at_once(budget))


def _slices(rows: int, some: int) -> list[slice]:
    return [slice(start, min(start + some, rows)) for start in range(0, rows, some)]


@all_in_plain_torch
@final
@dataclass(frozen=True, eq=False)
class Functions:
    """n draws of f.

    Call it with x for the values of all of them at x (n, N, C); `functions[k]` is one of them.

    A draw is one θ, so its values at different inputs, and in different calls, belong to one
    function.
    """

    posterior: Posterior
    steps: Tensor  # θ − m (n, P), float64

    def __len__(self) -> int:
        return len(self.steps)

    def __call__(self, x: Inputs, differentiable: bool = False) -> Tensor:
        """(n, N, C), in the model's dtype. differentiable: with gradients in x."""
        found = self.posterior.linearised(x, differentiable)
        parts = [(f.double(), J.double().push_many(self.steps.mT)) for f, J in found]
        C = self.posterior.network.outputs
        none = (
            torch.empty(0, C, dtype=torch.float64),
            torch.empty(0, C, len(self), dtype=torch.float64),
        )
        f, moves = (torch.cat(column) for column in zip(*(parts or [none]), strict=True))
        nothing = torch.zeros((), dtype=torch.float64).expand(*f.shape, C)
        return (f + moves.movedim(-1, 0)).to(self.posterior.like(Marginal(f, nothing)))

    def __getitem__(self, k: int) -> Callable[..., Tensor]:
        """Draw k as a function of x (and `differentiable`), with values (N, C)."""
        if not -len(self) <= k < len(self):
            raise IndexError(
                f"There are {len(self)} functions, numbered from 0, but number {k} was asked for."
            )
        only = Functions(self.posterior, self.steps[k][None])
        return lambda x, differentiable=False: only(x, differentiable).squeeze(0)

    def __iter__(self) -> Iterator[Callable[..., Tensor]]:
        return (self[k] for k in range(len(self)))

    def __repr__(self) -> str:
        return f"Functions(n={len(self)}, outputs={self.posterior.network.outputs})"


def draw_functions(posterior: Posterior, n: int, generator: torch.Generator | None) -> Functions:
    """n draws of f (see Posterior.draw_functions)."""
    if isinstance(n, bool) or not isinstance(n, int) or n < 1:
        raise ValueError(f"n must be a whole number of functions, at least 1, but is {n!r}.")
    size, budget = posterior.network.layout.size, posterior.memory_budget
    need = 2 * 8 * n * size
    if need > budget:
        raise ValueError(
            f"{n:,} draws of {size:,} weights need {in_words(need)}, more than the memory budget "
            f"of {in_words(budget)}. Draw at most {budget // (16 * size):,} at a time, or fit with "
            "a larger memory_budget."
        )
    return Functions(posterior, posterior.covariance.sample(n, generator))
