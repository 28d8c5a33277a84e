"""What every predictive distribution can be asked, and the shapes in which it is asked."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from ssla._checks import finite
from ssla.data import as_tensor
from ssla.priors import EXACT
from ssla.refit.increments import Increments


@dataclass(frozen=True)
class Diagnostics:
    """How the answer came about. Flags are by row: something happened for some y of that row."""

    refit: str
    fallback: Tensor  # (N,) bool: an indefinite observed precision was replaced by the Fisher
    unconverged: Tensor  # (N,) bool: an ascent to the mode ended early
    inaccurate: Tensor  # (N,) bool: the quadrature (or the interpolation between refits) did not reach its tolerance
    convention: str = EXACT  # where the prior entered; a mixture of several names them all: "exact, paper"
    refits: Tensor | None = None  # (N,) refits of the weights that were made
    rung: tuple[str, ...] | None = None  # which rung answered for each row; "failed": none, as asked for
    reason: tuple[str, ...] | None = None  # why "auto" went on to the weights; empty where it did not

    def __str__(self) -> str:
        count = self.fallback.numel()
        text = (
            f"refit {self.refit}, prior {self.convention}: {count} rows; Fisher fallback in {int(self.fallback.sum())}, "
            f"not converged in {int(self.unconverged.sum())}, inaccurate quadrature in {int(self.inaccurate.sum())}"
        )
        if self.refits is not None:
            text += f"; {int(self.refits.sum()):,} refits, {float(self.refits.double().mean()):.1f} a row"
        if self.rung is not None:
            text += f"; answered by weights: {self.rung.count('weights')}, by output: {self.rung.count('output')}"
            text += f", failed: {self.rung.count('failed')}" if "failed" in self.rung else ""
        return text


@runtime_checkable
class Predictive(Protocol):
    """A distribution of y for each of N inputs. Names as in torch.distributions; shapes in the API table."""

    @property
    def diagnostics(self) -> Diagnostics: ...

    @property
    def mean(self) -> Tensor: ...

    @property
    def variance(self) -> Tensor:
        """Of y: `epistemic + aleatoric`."""
        ...

    @property
    def stddev(self) -> Tensor: ...

    @property
    def mode(self) -> Tensor: ...

    @property
    def mass(self) -> Tensor:
        """The integral (or sum) before normalisation. The true predictive has 1: the difference is an error meter."""
        ...

    @property
    def epistemic(self) -> Tensor:
        """The part of the variance that more data would remove: Var_f E[y|f]."""
        ...

    @property
    def aleatoric(self) -> Tensor:
        """The part of the variance that is noise: E_f Var[y|f]."""
        ...

    def log_prob(self, y: Any) -> Tensor: ...

    def interval(self, level: float = 0.95) -> Tensor: ...

    def hdr(self, level: float = 0.95) -> Any: ...

    def sample(self, n: int, generator: torch.Generator | None = None) -> Tensor: ...

    def increments(self, y: Any) -> Increments: ...


def kind_of(predictive: Any) -> str:
    """ "scalar", "vector", "circular", "count" or "class"."""
    return str(getattr(predictive, "kind", None) or ("vector" if predictive.mean.dim() == 2 else "scalar"))


def scalar_targets(y: Any, rows: int) -> tuple[Tensor, bool]:
    """y as (N, k) float64, and whether it came with one value a row.

    Accepts a number, (N,), (N, k) and (1, k).
    """
    value = as_tensor(y).to("cpu", torch.float64)
    if value.dim() == 0:
        return value.expand(rows, 1), True
    if value.dim() == 1 and value.shape[0] == rows:
        return value.unsqueeze(1), True
    if value.dim() == 2 and value.shape[0] in (1, rows):
        return value.expand(rows, -1), False
    raise ValueError(
        f"y must be a number, ({rows},) with one value for each input, or ({rows}, k) with k values for each, but has shape "
        f"{tuple(value.shape)}. For one grid of values at every input give shape (1, k): y[None]."
    )


def checked(y: Tensor) -> Tensor:
    """Finite, or ValueError."""
    finite("y", y, "Ask for finite values only.")
    return y


def not_nan(y: Tensor) -> None:
    """Infinite values have a distribution function; NaN has none."""
    if bool(y.isnan().any()):
        raise ValueError("y must not be NaN. Ask for numbers (infinite ones are fine).")


def probabilities(q: Any) -> tuple[Tensor, bool]:
    """q as (k,) float64, and whether it came as one number."""
    value = as_tensor(q).to("cpu", torch.float64)
    if value.dim() > 1 or not bool(((value >= 0) & (value <= 1)).all()):
        raise ValueError(f"q must be a number or a vector of probabilities between 0 and 1, but is {value.tolist()}.")
    return value.reshape(-1), value.dim() == 0


def answer(value: Tensor, single: bool) -> Tensor:
    """(N, k) -> (N,) where one value a row was asked for."""
    return value.squeeze(1) if single else value
