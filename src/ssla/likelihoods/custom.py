"""A likelihood of the user's own: one function, the rest by automatic differentiation and quadrature."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ssla import quadrature
from ssla._checks import unknown_name
from ssla.likelihoods.base import Derivatives, Likelihood, event, need_outputs, uniform
from ssla.likelihoods.support import Classes, Continuous, Counts, Positive, Real, Support, UnitInterval

SUPPORTS = ("real", "positive", "unit_interval", "counts", "classes")
MOST_COUNTS = 1 << 16
SMALL_STEP = 0.01

Function = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Custom:
    """See `custom`."""

    log_prob_function: Callable[[Tensor, Tensor], Tensor]
    support: Support
    outputs: int | None
    fisher_function: Function | None
    mean_function: Function | None
    variance_function: Function | None

    @property
    def predictive(self) -> Likelihood:
        return self

    linear_domain = True

    def support_for(self, outputs: int) -> Support:
        if self.outputs is not None:
            need_outputs("This custom likelihood", outputs, self.outputs, "as declared by outputs=")
        return self.support

    def check_outputs(self, f: Tensor) -> None:
        """The user's log_prob is asked; a non-finite answer is refused where it matters (in `fit`)."""

    def log_prob(self, y: Tensor, f: Tensor) -> Tensor:
        y = event(y, f)
        value = self.log_prob_function(y, f)
        expected = torch.broadcast_shapes(y.shape, f.shape[:-1])
        if value.shape != expected:
            raise ValueError(
                f"log_prob(y, f) must return one value for each y: for y {tuple(y.shape)} and f {tuple(f.shape)} the shape "
                f"{tuple(expected)}, but it returned {tuple(value.shape)}. Index the outputs as f[..., 0], f[..., 1], …"
            )
        return value

    def log_prob_difference(self, y: Tensor, f_new: Tensor, f_old: Tensor) -> Tensor:
        """∫₀¹ g(f̂ + tΔ)ᵀΔ dt by four Gauss–Legendre nodes where every |Δ| ≤ 0.01: no digit of a small Δ is lost, and the rule's
        own error is of the order |Δ|⁹. Elsewhere the plain difference, whose rounding is that of log p itself.
        """
        y = event(y, f_new)
        d = f_new - f_old
        plain = self.log_prob(y, f_new) - self.log_prob(y, f_old)
        close = (d.abs() <= SMALL_STEP).all(-1)
        if not bool(close.any()):
            return plain
        nodes, weights = np.polynomial.legendre.leggauss(4)
        total = torch.zeros_like(plain)
        for node, weight in zip(nodes, weights, strict=True):
            total = total + weight / 2 * (self.score(y, f_old + (node + 1) / 2 * d) * d).sum(-1)
        return torch.where(close, total, plain)

    def score(self, y: Tensor, f: Tensor) -> Tensor:
        return self._differentiate(y, f, second=False)[1]

    def precision(self, y: Tensor, f: Tensor) -> Tensor:
        return self.derivatives(y, f).precision

    def derivatives(self, y: Tensor, f: Tensor) -> Derivatives:
        value, score, precision = self._differentiate(y, f, second=True)
        assert precision is not None
        return Derivatives(value, score, precision)

    def _differentiate(self, y: Tensor, f: Tensor, second: bool) -> tuple[Tensor, Tensor, Tensor | None]:
        """Rows are independent, so the gradient of the sum is the score of each, and so once more."""
        y = event(y, f)
        shape = torch.broadcast_shapes(y.shape, f.shape[:-1])
        with torch.enable_grad():
            free = f.detach().expand(*shape, f.shape[-1]).clone().requires_grad_(True)
            value = self.log_prob(y, free)
            score = _gradient(value.sum(), free, keep=second)
            if not second:
                return value.detach(), score.detach(), None
            columns = [-_gradient(score[..., c].sum(), free, keep=True) for c in range(f.shape[-1])]
            precision = torch.stack(columns, -2).detach()
        return value.detach(), score.detach(), (precision + precision.mT) / 2

    def fisher(self, f: Tensor) -> Tensor:
        """E_y[g gᵀ] (equal to E_y Λ), by summation or quadrature over y: positive semi-definite by form."""
        if self.fisher_function is not None:
            return self.fisher_function(f)
        flat = f.reshape(-1, f.shape[-1]).double()
        total = torch.zeros(flat.shape[0], f.shape[-1], f.shape[-1], dtype=torch.float64)
        for rows, y, share in self._nodes(flat):
            g = self.score(y, flat[rows].unsqueeze(1))
            total[rows] = torch.einsum("nk,nka,nkb->nab", share, g, g)
        return total.reshape(*f.shape, f.shape[-1]).to(f.dtype)

    def mean(self, f: Tensor) -> Tensor:
        return self._moments(f)[0] if self.mean_function is None else self.mean_function(f)

    def variance(self, f: Tensor) -> Tensor:
        return self._moments(f)[1] if self.variance_function is None else self.variance_function(f)

    def _moments(self, f: Tensor) -> tuple[Tensor, Tensor]:
        flat = f.reshape(-1, f.shape[-1]).double()
        if isinstance(self.support, Classes):  # of the class indicators, as Categorical has them
            p = self._table(flat)[1].exp()
            p = p.reshape(*f.shape[:-1], p.shape[-1]).to(f.dtype)
            return p, p * (1 - p)
        mean = torch.zeros(flat.shape[0], dtype=torch.float64)
        variance = torch.zeros_like(mean)
        for rows, y, share in self._nodes(flat):
            share = share / share.sum(1, keepdim=True)
            centre = (share * y).sum(1)
            mean[rows] = centre
            variance[rows] = (share * (y - centre[:, None]) ** 2).sum(1)
        return mean.reshape(f.shape[:-1]).to(f.dtype), variance.reshape(f.shape[:-1]).to(f.dtype)

    @property
    def _continuous(self) -> Continuous:
        assert isinstance(self.support, Continuous)
        return self.support

    def _nodes(self, f: Tensor) -> list[tuple[Tensor, Tensor, Tensor]]:
        """(rows, y (m, k), probability share (m, k)) with Σ h(y)·share ≈ E h(y)."""
        if isinstance(self.support, Counts | Classes):
            y, logs = self._table(f)
            return [(torch.arange(f.shape[0]), y, logs.exp())]
        return [(rows, self._continuous.from_real(grid.nodes), grid.shares) for rows, grid in self._grids(f)]

    def _table(self, f: Tensor) -> tuple[Tensor, Tensor]:
        """All y that matter, with their log probabilities: (N, k)."""
        count = self.support.count if isinstance(self.support, Classes) else 64
        while True:
            y = torch.arange(count, dtype=f.dtype, device=f.device).expand(f.shape[0], -1)
            logs = self.log_prob(y, f.unsqueeze(1))
            missing = 1 - logs.exp().sum(1)
            if isinstance(self.support, Classes) or bool((missing.abs() < 1e-9).all()):
                return y, logs
            if count >= MOST_COUNTS:
                raise ValueError(
                    f"The custom count likelihood's probabilities over 0 … {count - 1} sum to "
                    f"{float(1 - missing.abs().max()):.6g} in the worst row, not 1. Normalise log_prob over y, or pass "
                    "fisher=, mean= and variance= for such large counts."
                )
            count *= 4

    def _log_density(self, f: Tensor) -> quadrature.LogDensity:
        """log p(y|f) of the rows of f, in the support's real coordinate."""
        support = self._continuous

        def log_density(z: Tensor, rows: Tensor) -> Tensor:
            return self.log_prob(support.from_real(z), f[rows].unsqueeze(1)) + support.log_slope(z)

        return log_density

    def guess(self, f: Tensor, K: Tensor) -> tuple[Tensor, Tensor]:
        if self.mean_function is not None and self.variance_function is not None and isinstance(self.support, Real):
            return self.mean_function(f), self.variance_function(f).sqrt()
        return quadrature.locate(self._log_density(f), f.shape[0])

    def _grids(self, f: Tensor) -> list[quadrature.Built]:
        accuracy = quadrature.Accuracy(tail=1e-11, half_rule=1e-6)
        return quadrature.build(self._log_density(f), *self.guess(f, f), accuracy)

    def sample(self, f: Tensor, n: int, generator: torch.Generator | None = None) -> Tensor:
        """By inversion of the distribution function."""
        flat = f.reshape(-1, f.shape[-1]).double()
        u = uniform(flat[:, 0], n, generator)
        if isinstance(self.support, Counts | Classes):
            _, logs = self._table(flat)
            cumulative = logs.exp().cumsum(1)
            draws = torch.searchsorted(cumulative / cumulative[:, -1:], u.mT.contiguous()).mT.to(f.dtype)
        else:
            draws = torch.empty_like(u)
            for rows, grid in self._grids(flat):
                draws[:, rows] = self._continuous.from_real(grid.icdf(u[:, rows].mT)).mT
        return draws.reshape(n, *f.shape[:-1]).to(f.dtype)


def _gradient(total: Tensor, free: Tensor, keep: bool) -> Tensor:
    if not total.requires_grad:
        return torch.zeros_like(free)
    (gradient,) = torch.autograd.grad(total, free, create_graph=keep, allow_unused=True)
    return torch.zeros_like(free) if gradient is None else gradient


def custom(
    log_prob: Callable[[Tensor, Tensor], Tensor],
    *,
    support: str = "real",
    classes: int | None = None,
    outputs: int | None = None,
    fisher: Function | None = None,
    mean: Function | None = None,
    variance: Function | None = None,
) -> Custom:
    """A likelihood from its log density alone.

    Parameters
    ----------
    log_prob:
        log_prob(y, f) with y (...) and f (..., C), broadcasting, normalised over y, twice
        differentiable in f by autograd. Index outputs as `f[..., 0]`.
    support:
        What y may be: "real", "positive", "unit_interval", "counts" or "classes" (with `classes=`).
    outputs:
        How many outputs the network must have, if that should be checked.
    fisher, mean, variance:
        Functions of f, if known in closed form: E_y[Λ] (..., C, C), E[y|f] and Var[y|f] (...).
        Otherwise they are found by summation or quadrature over y.

    Example
    -------
    >>> import math, torch, ssla
    >>> def log_prob(y, f):                     # a smooth Laplace distribution around the first output
    ...     distance = torch.sqrt((y - f[..., 0]) ** 2 + 1e-6)
    ...     return -math.log(2) - f[..., 1] - distance * torch.exp(-f[..., 1])
    >>> likelihood = ssla.likelihoods.custom(log_prob, outputs=2)
    """
    if not callable(log_prob):
        raise TypeError(f"log_prob must be a function log_prob(y, f), but is {log_prob!r}.")
    if support not in SUPPORTS:
        raise ValueError(unknown_name("support", support, SUPPORTS))
    if (support == "classes") != (classes is not None):
        raise ValueError('Give classes= (how many) together with support="classes", and only then.')
    kinds: dict[str, Support] = {
        "real": Real(),
        "positive": Positive(),
        "unit_interval": UnitInterval(),
        "counts": Counts(),
        "classes": Classes(classes or 0),
    }
    return Custom(log_prob, kinds[support], outputs, fisher, mean, variance)
