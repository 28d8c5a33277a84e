"""f at several inputs together: its joint Gaussian, and draws of the whole function.

The Gaussian over θ and the linearised network f(x) = f̂(x) + J_x (θ − m) give, for any two inputs,
K_xx' = J_x S J_x'ᵀ. A draw of θ is a function that can be evaluated anywhere, with that covariance:
no matrix over the inputs is factorised.

m and S are mean and covariance of the Gaussian over θ (P,). J_x (C, P) is the Jacobian of the C
outputs at x. A piece is a slice of the inputs whose Jacobian fits the memory budget.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, final

import torch
from torch import Tensor

from ssla._checks import all_in_plain_torch
from ssla.curvature.jacobians import Jacobian
from ssla.curvature.memory import describe_bytes
from ssla.data import Inputs, as_inputs, row_count, take_rows
from ssla.values import Marginal

if TYPE_CHECKING:
    from ssla.posterior import Posterior

BYTES = 8  # of a number in float64
COPIES = 4  # of the Jacobian of some rows: its entries, those in float64, H⁻¹Jᵀ and its workspace


class Joint(NamedTuple):
    """f at all inputs as one Gaussian. Entry i·C + c is output c at input i."""

    mean: Tensor  # (N·C,)
    covariance: Tensor  # (N·C, N·C)


def compute_joint(posterior: Posterior, x: Inputs, differentiable: bool = False) -> Joint:
    """Return the joint Gaussian of f at the N inputs x (see Posterior.joint).

    differentiable: whether the result carries gradients in x. Raises ValueError where the
    covariance, or the Jacobian of one row, exceeds the memory budget.
    """
    inputs = posterior.network.cast(as_inputs(x, differentiable))
    rows = row_count(inputs)
    C = posterior.network.outputs
    pieces = _split_within_budget(posterior, rows)
    mean = torch.empty(rows, C, dtype=torch.float64)
    K = torch.empty(rows, C, rows, C, dtype=torch.float64)

    def linearise(piece: slice) -> tuple[Tensor, Jacobian]:
        """Return f̂ (B, C) of the rows of a piece, and their Jacobian in float64."""
        # A piece is at most one chunk of the network.
        f, J = next(posterior.linearised(take_rows(inputs, piece), differentiable))
        return f, J.double()

    # Each pair of pieces is computed once. J of the second piece is computed again for each pair,
    # because the Jacobians of all pieces together may exceed the budget.
    for i, first in enumerate(pieces):
        mean[first], J = linearise(first)
        moves = posterior.covariance.solve_many(J.to_dense().values.flatten(0, 1).mT)  # S Jᵀ (P, k)
        for second in pieces[i:]:
            J_second = J if second == first else linearise(second)[1]
            block = J_second.push_many(moves).unflatten(-1, (-1, C))  # (B', C, B, C)
            if second == first:  # symmetric up to rounding
                block = (block + block.permute(2, 3, 0, 1)) / 2
            K[second, :, first] = block
            K[first, :, second] = block.permute(2, 3, 0, 1)

    # The covariance of each single input (N, C, C) chooses the dtype of the answer.
    blocks = K.diagonal(dim1=0, dim2=2).movedim(-1, 0)
    like = posterior.answer_template(Marginal(mean, blocks))
    return Joint(mean.flatten().to(like), K.view(rows * C, rows * C).to(like))


def compute_joint_of_groups(
    posterior: Posterior, x: Inputs, size: int, differentiable: bool = False
) -> Joint:
    """Return the joint Gaussian of f at each group of `size` successive inputs of x, in float64.

    The results are mean (G, size·C) and covariance (G, size·C, size·C), for G groups; the number of
    inputs must be G · size. The covariance between groups is not computed, so the cost grows with
    the number of rows only. differentiable: whether the result carries gradients in x. Raises
    ValueError where the Jacobian of one row exceeds the memory budget.
    """
    inputs = posterior.network.cast(as_inputs(x, differentiable))
    rows = row_count(inputs)
    width = size * posterior.network.outputs
    groups_at_once = _count_rows_at_once(posterior) // size

    # The empty tensors give the right shapes where there are no rows.
    empty = torch.empty(0, width, width, dtype=torch.float64)
    joints = [Joint(empty[:, 0], empty)]
    for chunk in _split_into_slices(rows, max(groups_at_once, 1) * size):
        chunk_inputs = take_rows(inputs, chunk)
        if groups_at_once == 0:  # the Jacobian of one group exceeds the budget
            mean, K = compute_joint(posterior, chunk_inputs, differentiable)
            joints.append(Joint(mean.double()[None], K.double()[None]))
            continue
        f, J = next(posterior.linearised(chunk_inputs, differentiable))
        values = J.double().to_dense().values.reshape(-1, width, J.size)  # (G, size·C, P)
        moves = posterior.covariance.solve_many(values.flatten(0, 1).mT)  # S Jᵀ (P, G·size·C)
        K = values @ moves.unflatten(1, (-1, width)).movedim(1, 0)
        joints.append(Joint(f.double().reshape(-1, width), (K + K.mT) / 2))
    return Joint(*(torch.cat(column) for column in zip(*joints, strict=True)))


def _split_within_budget(posterior: Posterior, rows: int) -> list[slice]:
    """Split `rows` rows into pieces, the Jacobian of each of which fits the memory budget.

    Raises ValueError if the joint covariance of all rows, or the Jacobian of one row, exceeds the
    budget.
    """
    network = posterior.network
    budget = posterior.memory_budget
    size = rows * network.outputs
    need = 2 * BYTES * size**2  # the result, and a copy in the model's dtype
    if need > budget:
        most = (
            int((budget / (2 * BYTES)) ** 0.5) // network.outputs
        )  # the rows whose `need` is the budget
        raise ValueError(
            f"The joint covariance of {rows:,} inputs with {network.outputs} "
            f"output{'s' * (network.outputs != 1)} is a matrix of {size:,} × {size:,}. It needs "
            f"{describe_bytes(need)}, more than the memory budget of {describe_bytes(budget)}. "
            f"Give at most {most:,} inputs, use posterior.draw_functions(n), which needs no such "
            "matrix, or fit with a larger memory_budget."
        )
    return _split_into_slices(rows, _count_rows_at_once(posterior))


def _count_rows_at_once(posterior: Posterior) -> int:
    """Return how many rows are linearised at once.

    This is the size of a chunk of the network, or fewer rows where their Jacobian would exceed the
    memory budget. Raises ValueError if the Jacobian of one row exceeds it.
    """
    network = posterior.network
    budget = posterior.memory_budget
    row_bytes = COPIES * BYTES * network.outputs * network.layout.size
    if row_bytes > budget:
        raise ValueError(
            f"The Jacobian of one input takes {describe_bytes(row_bytes)}, more than the memory "
            f"budget of {describe_bytes(budget)}. Use posterior.draw_functions(n), which does not "
            "build it, select fewer weights, or fit with a larger memory_budget."
        )
    return min(budget // row_bytes, network.rows_at_once(budget))


def _split_into_slices(rows: int, size: int) -> list[slice]:
    """Split `rows` into slices of `size`; the last one may be smaller."""
    return [slice(start, min(start + size, rows)) for start in range(0, rows, size)]


@all_in_plain_torch
@final
@dataclass(frozen=True, eq=False)
class Functions:
    """A set of n functions f(x), drawn from the Gaussian of θ by linearisation.

    A call with x returns the values of all functions at x (n, N, C). `functions[k]` is one of them.
    Each function is one draw of θ, so its values at different inputs, and in different calls,
    belong together.
    """

    posterior: Posterior
    steps: Tensor  # θ − m (n, P), float64, one row for each function

    def __len__(self) -> int:
        """Return n, the number of functions."""
        return len(self.steps)

    def __call__(self, x: Inputs, differentiable: bool = False) -> Tensor:
        """Return the values of all functions at the N inputs x (n, N, C).

        The values have the dtype of the posterior's answers. differentiable: whether they carry
        gradients in x.
        """
        chunks = self.posterior.linearised(x, differentiable)
        outputs_and_moves = [(f.double(), J.double().push_many(self.steps.mT)) for f, J in chunks]
        C = self.posterior.network.outputs
        if not outputs_and_moves:  # x has no rows
            no_moves = torch.empty(0, C, len(self), dtype=torch.float64)
            outputs_and_moves = [(torch.empty(0, C, dtype=torch.float64), no_moves)]
        # f (N, C) and its moves (N, C, n)
        f, moves = (torch.cat(column) for column in zip(*outputs_and_moves, strict=True))
        # A function has no covariance, but `answer_template` needs one to choose the dtype.
        no_covariance = torch.zeros((), dtype=torch.float64).expand(*f.shape, C)
        template = self.posterior.answer_template(Marginal(f, no_covariance))
        return (f + moves.movedim(-1, 0)).to(template)

    def __getitem__(self, k: int) -> Callable[..., Tensor]:
        """Return function number k: a function of x and `differentiable` with values (N, C).

        A negative k counts from the end. Raises IndexError unless −n ≤ k < n.
        """
        if not -len(self) <= k < len(self):
            raise IndexError(
                f"There are {len(self)} functions, numbered from 0, but number {k} was asked for."
            )
        single = Functions(self.posterior, self.steps[k][None])
        return lambda x, differentiable=False: single(x, differentiable).squeeze(0)

    def __iter__(self) -> Iterator[Callable[..., Tensor]]:
        """Iterate over the functions, as `self[0]`, `self[1]`, …"""
        return (self[k] for k in range(len(self)))

    def __repr__(self) -> str:
        """Return the class name with the number of functions and of outputs."""
        return f"Functions(n={len(self)}, outputs={self.posterior.network.outputs})"


def draw_functions(posterior: Posterior, n: int, generator: torch.Generator | None) -> Functions:
    """Draw n functions (see Posterior.draw_functions).

    generator: of the random numbers; None for torch's own. Raises ValueError unless n is a positive
    whole number, and where the draws exceed the memory budget.
    """
    if isinstance(n, bool) or not isinstance(n, int) or n < 1:
        raise ValueError(f"n must be a whole number of functions, at least 1, but is {n!r}.")
    size = posterior.network.layout.size
    budget = posterior.memory_budget
    need = 2 * BYTES * n * size  # the draws, and one copy
    if need > budget:
        raise ValueError(
            f"{n:,} draws of {size:,} weights need {describe_bytes(need)}, more than the memory "
            f"budget of {describe_bytes(budget)}. Draw at most "
            f"{budget // (2 * BYTES * size):,} at a time, or fit with a larger memory_budget."
        )
    return Functions(posterior, posterior.covariance.sample(n, generator))
