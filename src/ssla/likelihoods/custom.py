"""A custom likelihood: the user gives log p; the rest is computed by autograd and quadrature."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from ssla._checks import batched, differentiated, in_plain_torch, unknown_name, warn
from ssla.likelihoods.likelihood import (
    Derivatives,
    Likelihood,
    common_shape,
    event,
    log_density_on_line,
    need_outputs,
    uniform,
)
from ssla.likelihoods.support import (
    Circular,
    Classes,
    Continuous,
    Counts,
    Positive,
    Real,
    Support,
    UnitInterval,
)
from ssla.maths import quadrature

SUPPORTS = ("real", "positive", "unit_interval", "circular", "counts", "classes")
MOST_COUNTS = 1 << 16
COUNTS_AT_ONCE = 1 << 22  # of log p at one time: bounds memory
LARGEST_COUNT = 2.0**52  # above it, a count and the next one round to the same number
MASS_ERROR = 1e-3  # allowed relative variation with f of the integral of a density
NORMALISED = 1e-5  # allowed difference of the sum of the probabilities from 1
LARGE_COUNTS = quadrature.Accuracy(tail=1e-8, half_rule=1e-4)
ACCURACY = quadrature.Accuracy(tail=1e-11, half_rule=1e-6)

Function = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Custom(Likelihood):
    """See `custom`."""

    log_prob_function: Callable[[Tensor, Tensor], Tensor]
    support: Support
    outputs: int | None
    fisher_function: Function | None
    mean_function: Function | None
    variance_function: Function | None

    may_be_straight = True

    @property
    def fisher_in_closed_form(self) -> bool:
        return self.fisher_function is not None

    @property
    def mean_has_gradient(self) -> bool:
        """Not of a mean by quadrature, which autograd cannot follow."""
        return self.mean_function is not None

    def support_for(self, outputs: int) -> Support:
        if self.outputs is not None:
            need_outputs("This custom likelihood", outputs, self.outputs, "as declared by outputs=")
        return self.support

    def log_prob(self, y: Tensor, f: Tensor) -> Tensor:
        y = event(y, f)
        if (
            isinstance(self.support, Counts)
            and y.is_floating_point()
            # Inside vmap no step may depend on values; refits ask for whole counts only.
            and not batched(y)
            and bool((y != y.floor()).any())
        ):
            return self._between_counts(y, f)
        if isinstance(self.support, Circular):
            y = quadrature.wrapped(y)
        value = self.log_prob_function(y, f)
        if not isinstance(value, Tensor):
            raise TypeError(
                "log_prob(y, f) must return a tensor with one value for each y, but returned "
                f"{value!r}."
            )
        expected = common_shape(y, f[..., 0])
        if value.shape != expected:
            raise ValueError(
                f"log_prob(y, f) must return one value for each y: for y {tuple(y.shape)} and f "
                f"{tuple(f.shape)} the shape {tuple(expected)}, but it returned "
                f"{tuple(value.shape)}. Index the outputs as f[..., 0], f[..., 1], …"
            )
        return value

    def _between_counts(self, y: Tensor, f: Tensor) -> Tensor:
        """log p between two counts, interpolated: log_prob may be undefined there."""
        below = y.floor()
        low, high = self.log_prob(below, f), self.log_prob(below + 1, f)
        impossible = (low == -torch.inf) | (high == -torch.inf)
        return torch.where(impossible, torch.maximum(low, high), low + (y - below) * (high - low))

    def score(self, y: Tensor, f: Tensor) -> Tensor:
        return self._differentiate(y, f, second=False)[1]

    def precision(self, y: Tensor, f: Tensor) -> Tensor:
        return self.derivatives(y, f).precision

    def derivatives(self, y: Tensor, f: Tensor) -> Derivatives:
        value, score, precision = self._differentiate(y, f, second=True)
        assert precision is not None
        return Derivatives(value, score, precision)

    @in_plain_torch
    def _differentiate(
        self, y: Tensor, f: Tensor, second: bool
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """log p, g and Λ.

        Rows are independent, so the gradient of a sum over rows holds the derivative of each row.
        """
        y = event(y, f)
        shape = common_shape(y, f[..., 0])
        with differentiated("log_prob of the likelihood"):
            free = f.detach().expand(*shape, f.shape[-1]).clone().requires_grad_(True)
            value = self.log_prob(y, free)
            score = _gradient(value.sum(), free, keep=second)
            if not second:
                return value.detach(), score.detach(), None
            columns = [-_gradient(score[..., c].sum(), free, keep=True) for c in range(f.shape[-1])]
            precision = torch.stack(columns, -2).detach()
        return value.detach(), score.detach(), (precision + precision.mT) / 2

    def fisher(self, f: Tensor) -> Tensor:
        """E_y[g gᵀ] (equal to E_y Λ), by summation or quadrature over y; positive semi-definite
        by construction.
        """
        if self.fisher_function is not None:
            return self.fisher_function(f)
        flat = f.reshape(-1, f.shape[-1]).double()
        total = torch.zeros(flat.shape[0], f.shape[-1], f.shape[-1], dtype=torch.float64)
        for rows, y, share in self._nodes(flat):
            g = self.score(y, flat[rows].unsqueeze(1))
            total[rows] = torch.einsum("nk,nka,nkb->nab", share, g, g)
        return total.reshape(*f.shape, f.shape[-1]).to(f.dtype)

    def straight(self, f: Tensor) -> bool:
        """Whether log p has a slope but no curvature in f for every y, like |y − f|.

        Tested at the first row of f.
        """
        if not self._straight:
            first = f.reshape(-1, f.shape[-1])[:1].double()
            found = [
                self.derivatives(y, first[rows].unsqueeze(1)) for rows, y, _ in self._nodes(first)
            ]
            self._straight.append(
                not any(bool(d.precision.any()) for d in found)
                and any(bool(d.score.any()) for d in found)
            )
        return self._straight[0]

    @cached_property
    def _straight(self) -> list[bool]:
        """Cache of `straight`."""
        return []

    def mean(self, f: Tensor) -> Tensor:
        return self._moments(f)[0] if self.mean_function is None else self.mean_function(f)

    def variance(self, f: Tensor) -> Tensor:
        return self._moments(f)[1] if self.variance_function is None else self.variance_function(f)

    def _moments(self, f: Tensor) -> tuple[Tensor, Tensor]:
        flat = f.reshape(-1, f.shape[-1]).double()
        if isinstance(self.support, Classes):  # of the class indicators, as in Categorical
            p = self._nodes(flat)[0][2]
            p = p.reshape(*f.shape[:-1], p.shape[-1]).to(f.dtype)
            return p, p * (1 - p)
        mean, variance = torch.zeros(2, flat.shape[0], dtype=torch.float64).unbind(0)
        if isinstance(self.support, Real):
            for rows, grid in self._grids(flat):
                mean[rows], variance[rows] = grid.moments
        elif isinstance(self.support, Continuous):
            mean, variance = quadrature.mapped_moments(
                log_density_on_line(self, flat), self._grids(flat), self.support.from_real, ACCURACY
            )
        elif isinstance(self.support, Circular):
            for rows, circle in self._circles(flat):
                mean[rows], variance[rows] = circle.mean, circle.variance
        else:
            for rows, y, share in self._nodes(flat):
                share = share / share.sum(1, keepdim=True)
                mean[rows] = (share * y).sum(1)
                variance[rows] = (share * (y - mean[rows, None]) ** 2).sum(1)
        return mean.reshape(f.shape[:-1]).to(f.dtype), variance.reshape(f.shape[:-1]).to(f.dtype)

    @property
    def _continuous(self) -> Continuous:
        assert isinstance(self.support, Continuous)
        return self.support

    def _nodes(self, f: Tensor) -> list[tuple[Tensor, Tensor, Tensor]]:
        """(rows, y (m, k), probability share (m, k)) with Σ h(y)·share ≈ E h(y)."""
        if isinstance(self.support, Classes):
            y = torch.arange(self.support.count, dtype=f.dtype, device=f.device).expand(
                f.shape[0], -1
            )
            return [
                (
                    torch.arange(f.shape[0]),
                    y,
                    self._normalised(self.log_prob(y, f.unsqueeze(1)).exp()),
                )
            ]
        if isinstance(self.support, Counts):
            return self._counts(f)
        if isinstance(self.support, Circular):
            circles = self._circles(f)
            self._warn_mass([c.log_mass[c.accurate] for _, c in circles])
            return [(rows, c.angles.expand_as(c.shares), c.shares) for rows, c in circles]
        grids = self._grids(f)
        self._warn_mass([grid.log_mass[grid.accurate] for _, grid in grids])
        return [(rows, self._continuous.from_real(grid.nodes), grid.shares) for rows, grid in grids]

    def _warn_mass(self, log_masses: list[Tensor]) -> None:
        """A warning where the integral of the density depends on f.

        (A constant factor only changes `mass`.)
        """
        masses = torch.cat(log_masses).exp()
        if masses.numel() and float(masses.max() - masses.min()) > MASS_ERROR * float(masses.max()):
            warn(
                "log_prob must be normalised over y, but the density integrates to "
                f"{float(masses.min()):.4g} … {float(masses.max()):.4g}, depending on f: the fit "
                "will be wrong. Add the normalising constant."
            )

    def _counts(self, f: Tensor) -> list[tuple[Tensor, Tensor, Tensor]]:
        """Counts up to 65,535 are summed one by one; larger ones, if needed, by an integral of
        the interpolated log p.
        """
        found, pending, count = [], torch.arange(f.shape[0]), 64
        while pending.numel():
            y = torch.arange(count, dtype=f.dtype, device=f.device)
            rest = []
            for rows in pending.split(max(COUNTS_AT_ONCE // count, 1)):
                share = self.log_prob(y.expand(rows.numel(), -1), f[rows].unsqueeze(1)).exp()
                done = (share.sum(1) - 1).abs() < 1e-9
                if count >= MOST_COUNTS and not bool(done.all()):
                    found += self._with_large_counts(f, rows[~done], y, share[~done])
                elif not bool(done.all()):
                    rest.append(rows[~done])
                found.append((rows[done], y.expand(int(done.sum()), -1), share[done]))
            pending, count = torch.cat(rest) if rest else pending[:0], 4 * count
        return found

    def _with_large_counts(
        self, f: Tensor, rows: Tensor, y: Tensor, share: Tensor
    ) -> list[tuple[Tensor, Tensor, Tensor]]:
        """The counts y with their shares (m, k), and nodes for the counts beyond them: y = k −
        ½ + e^z.
        """
        first, beyond = len(y) - 0.5, Positive()

        def log_density(z: Tensor, index: Tensor) -> Tensor:
            large = (first + beyond.from_real(z)).clamp_max(LARGEST_COUNT)
            return self.log_prob(large, f[rows[index]].unsqueeze(1)) + beyond.log_slope(z)

        found = []
        for part, grid in quadrature.build(
            log_density, *quadrature.locate(log_density, rows.numel()), LARGE_COUNTS
        ):
            large = first + beyond.from_real(grid.nodes)
            shares = torch.cat([share[part], grid.log_terms.exp()], 1)
            found.append(
                (
                    rows[part],
                    torch.cat([y.expand(len(part), -1), large], 1),
                    self._normalised(shares),
                )
            )
        return found

    def _normalised(self, share: Tensor) -> Tensor:
        """The probabilities (m, k) of all y; ValueError unless they sum to 1."""
        total = share.sum(1)
        off = ~((total - 1).abs() <= NORMALISED)
        if bool(off.any()):
            raise ValueError(
                "log_prob must be normalised over y, but its probabilities sum to "
                f"{float(total[off][0]):.6g} and not to 1 (the first of {int(off.sum())} such rows "
                "of f). Add the normalising constant, which may depend on f."
            )
        return share

    def guess(self, f: Tensor, K: Tensor) -> tuple[Tensor, Tensor]:
        if (
            self.mean_function is not None
            and self.variance_function is not None
            and isinstance(self.support, Real)
        ):
            return self.mean_function(f), self.variance_function(f).sqrt()
        return quadrature.locate(log_density_on_line(self, f), f.shape[0])

    def _circles(self, f: Tensor) -> list[quadrature.Around]:
        return quadrature.build_circles(
            lambda y, rows: self.log_prob(y, f[rows].unsqueeze(1)), f.shape[0]
        )

    def _grids(self, f: Tensor) -> list[quadrature.Built]:
        return quadrature.build(log_density_on_line(self, f), *self.guess(f, f), ACCURACY)

    def sample(self, f: Tensor, n: int, generator: torch.Generator | None = None) -> Tensor:
        """By inversion of the distribution function."""
        flat = f.reshape(-1, f.shape[-1]).double()
        u = uniform(flat[:, 0], n, generator)
        draws = torch.empty_like(u)
        if isinstance(self.support, Counts | Classes):
            for rows, y, share in self._nodes(flat):
                cumulative = share.cumsum(1)
                place = torch.searchsorted(
                    cumulative / cumulative[:, -1:], u[:, rows].mT.contiguous()
                )
                draws[:, rows] = y.gather(1, place.clamp_max(y.shape[1] - 1)).round().mT
        elif isinstance(self.support, Circular):
            for rows, circle in self._circles(flat):
                draws[:, rows] = circle.icdf(u[:, rows].mT).mT
        else:
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
        differentiable in f by autograd. Index outputs as `f[..., 0]`. A missing constant factor of
        a density changes only `mass` and the evidence; a missing factor that depends on f makes the
        fit wrong and gives a warning; for counts and classes either is an error. Where log_prob has
        kinks and no curvature in f, like |y − f|, `fit` uses mode="tilt" and warns.
    support:
        The allowed values of y: "real", "positive", "unit_interval", "circular" (angles in radians,
        mapped to [−π, π)), "counts" or "classes" (with `classes=`).
    outputs:
        The number of outputs that the network must have, if it should be checked.
    fisher, mean, variance:
        Functions of f, if known in closed form: E_y[Λ] (..., C, C), E[y|f] and Var[y|f] (...).
        Otherwise they are computed by summation or quadrature over y.

    Example
    -------
    >>> import math, torch, ssla
    >>> def log_prob(y, f):  # a smooth Laplace distribution around the first output
    ...     distance = torch.sqrt((y - f[..., 0]) ** 2 + 1e-6)
    ...     return -math.log(2) - f[..., 1] - distance * torch.exp(-f[..., 1])
    >>> likelihood = ssla.likelihoods.custom(log_prob, outputs=2)
    """
    if not callable(log_prob):
        raise TypeError(f"log_prob must be a function log_prob(y, f), but is {log_prob!r}.")
    if support not in SUPPORTS:
        raise ValueError(unknown_name("support", support, SUPPORTS))
    if (support == "classes") != (classes is not None):
        raise ValueError(
            'Give classes= (their number) together with support="classes", and only then.'
        )
    kinds: dict[str, Support] = {
        "real": Real(),
        "positive": Positive(),
        "unit_interval": UnitInterval(),
        "circular": Circular(),
        "counts": Counts(),
        "classes": Classes(classes or 0),
    }
    return Custom(log_prob, kinds[support], outputs, fisher, mean, variance)
