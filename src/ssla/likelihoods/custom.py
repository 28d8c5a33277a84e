"""A custom likelihood: the user gives log p; the rest is computed by autograd and quadrature.

Sums and integrals over y use nodes: values of y with weights that stand for the density. The weight
of a node is called its share, because those of a row sum to one. g and Λ are those of
`ssla.likelihoods.likelihood`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from ssla._checks import in_plain_torch, is_inside_vmap, record_derivatives, unknown_name, warn
from ssla.likelihoods.likelihood import (
    Derivatives,
    Likelihood,
    check_output_count,
    make_log_density_on_line,
    squeeze_scalar_target,
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
from ssla.maths.elementwise import common_shape, uniform_numbers

SUPPORTS = ("real", "positive", "unit_interval", "circular", "counts", "classes")
FIRST_COUNTS = 64  # counts that are tried first
MORE_COUNTS = 4  # the factor from one try to the next
MOST_COUNTS = 1 << 16  # counts that are summed one by one; a guess
ALL_MASS = 1e-9  # the distance from 1 up to which a sum of probabilities has all of them; a guess
COUNTS_AT_ONCE = 1 << 22  # values of log p at one time: bounds memory
LARGEST_COUNT = 2.0**52  # above it, a count and the next one round to the same number
MASS_ERROR = 1e-3  # allowed relative variation with f of the integral of a density
NORMALISED = 1e-5  # allowed difference of the sum of the probabilities from 1
LARGE_COUNTS = quadrature.Accuracy(tail=1e-8, half_rule=1e-4)
ACCURACY = quadrature.Accuracy(tail=1e-11, half_rule=1e-6)

Function = Callable[[Tensor], Tensor]  # of the outputs f (..., C)
Nodes = tuple[Tensor, Tensor, Tensor]
"""Rows (m,), values of y (m, k), and their shares of the probability (m, k).

For each of these rows Σ_j shares_j h(y_j) stands for E h(y).
"""


@dataclass(frozen=True)
class Custom(Likelihood):
    """A likelihood that is computed from its log density; see `custom`."""

    log_prob_function: Callable[[Tensor, Tensor], Tensor]  # (y, f) -> log p(y|f)
    support: Support
    outputs: int | None  # the number of outputs that the network must have; None: any
    # formulas that the user gave; None: summation or quadrature over y
    fisher_function: Function | None
    mean_function: Function | None
    variance_function: Function | None

    may_be_piecewise_linear = True

    @property
    def fisher_in_closed_form(self) -> bool:
        """Return whether the user gave the Fisher information."""
        return self.fisher_function is not None

    @property
    def mean_has_gradient(self) -> bool:
        """Return whether the user gave the mean: autograd cannot differentiate a quadrature."""
        return self.mean_function is not None

    def support_for(self, outputs: int) -> Support:
        """Return the support; raise ValueError unless the number of outputs is the declared one."""
        if self.outputs is not None:
            check_output_count(
                "This custom likelihood", outputs, self.outputs, "as declared by outputs="
            )
        return self.support

    def log_prob(self, y: Tensor, f: Tensor) -> Tensor:
        """Return the user's log p(y|f) (...), interpolated between counts.

        Raises TypeError if the user's function does not return a tensor, and ValueError if the
        result has not one value for each y.
        """
        y = squeeze_scalar_target(y, f)
        if (
            isinstance(self.support, Counts)
            and y.is_floating_point()
            # Inside vmap no step may depend on values; refits ask for whole counts only.
            and not is_inside_vmap(y)
            and bool((y != y.floor()).any())
        ):
            return self._interpolate_between_counts(y, f)

        if isinstance(self.support, Circular):
            y = quadrature.wrap_angles(y)
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

    def _interpolate_between_counts(self, y: Tensor, f: Tensor) -> Tensor:
        """Return log p (...) interpolated linearly between the counts below and above y (...).

        The user's function may be undefined between counts. Whole y keep their own log p. Where one
        of the two counts around another y is impossible (log p = −∞), the result is log p of the
        other.
        """
        below = y.floor()
        low, high = self.log_prob(below, f), self.log_prob(below + 1, f)
        impossible = (low == -torch.inf) | (high == -torch.inf)
        between = torch.where(
            impossible, torch.maximum(low, high), low + (y - below) * (high - low)
        )
        return torch.where(y == below, low, between)

    def score(self, y: Tensor, f: Tensor) -> Tensor:
        """Return the score g (..., C) by autograd, without second derivatives."""
        return self._differentiate(y, f, second=False)[1]

    def precision(self, y: Tensor, f: Tensor) -> Tensor:
        """Return Λ (..., C, C) by autograd."""
        return self.derivatives(y, f).precision

    def derivatives(self, y: Tensor, f: Tensor) -> Derivatives:
        """Return log p (...), g (..., C) and Λ (..., C, C) by autograd."""
        log_prob, score, precision = self._differentiate(y, f, second=True)
        assert precision is not None
        return Derivatives(log_prob, score, precision)

    @in_plain_torch
    def _differentiate(
        self, y: Tensor, f: Tensor, second: bool
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return log p (...), g (..., C) and Λ (..., C, C) by autograd, without their graph.

        second: whether Λ is wanted; otherwise None takes its place.
        """
        y = squeeze_scalar_target(y, f)
        shape = common_shape(y, f[..., 0])

        # Rows are independent, so the gradient of a sum over rows holds the derivative of each row.
        with record_derivatives("log_prob of the likelihood"):
            free = f.detach().expand(*shape, f.shape[-1]).clone().requires_grad_(True)
            log_prob = self.log_prob(y, free)
            score = _compute_gradient(log_prob.sum(), free, keep=second)
            if not second:
                return log_prob.detach(), score.detach(), None
            rows = [
                -_compute_gradient(score[..., c].sum(), free, keep=True) for c in range(f.shape[-1])
            ]
            precision = torch.stack(rows, -2).detach()

        # Second derivatives are symmetric, except for rounding errors of autograd.
        return log_prob.detach(), score.detach(), (precision + precision.mT) / 2

    def fisher(self, f: Tensor) -> Tensor:
        """Return the Fisher information (..., C, C) that the user gave, or E_y[g gᵀ].

        The latter equals E_y Λ and is positive semi-definite by construction. It is computed by
        summation or quadrature over y.
        """
        if self.fisher_function is not None:
            return self.fisher_function(f)
        flat = f.reshape(-1, f.shape[-1]).double()
        total = torch.zeros(flat.shape[0], f.shape[-1], f.shape[-1], dtype=torch.float64)
        for rows, y, share in self._build_nodes(flat):
            g = self.score(y, flat[rows].unsqueeze(1))
            total[rows] = torch.einsum("nk,nka,nkb->nab", share, g, g)
        return total.reshape(*f.shape, f.shape[-1]).to(f.dtype)

    def is_piecewise_linear(self, f: Tensor) -> bool:
        """Return whether log p has a slope but no curvature at f (..., C) for any y.

        The first call decides it, at the first row of f and at nodes over y. Later calls return the
        same answer without a look at f.
        """
        if not self._known_answers:
            first = f.reshape(-1, f.shape[-1])[:1].double()
            at_nodes = [
                self.derivatives(y, first[rows].unsqueeze(1))
                for rows, y, _ in self._build_nodes(first)
            ]
            curved = any(bool(derivatives.precision.any()) for derivatives in at_nodes)
            sloped = any(bool(derivatives.score.any()) for derivatives in at_nodes)
            self._known_answers.append(sloped and not curved)
        return self._known_answers[0]

    @cached_property
    def _known_answers(self) -> list[bool]:
        """Return the list in which `is_piecewise_linear` keeps its answer; empty before that."""
        # A frozen dataclass cannot store the answer itself, but it can keep a list that holds it.
        return []

    def mean(self, f: Tensor) -> Tensor:
        """Return the user's mean, or that of the density: (...), or (..., C) for classes."""
        return self._compute_moments(f)[0] if self.mean_function is None else self.mean_function(f)

    def variance(self, f: Tensor) -> Tensor:
        """Return the user's variance, or that of the density, with the shape of `mean`."""
        return (
            self._compute_moments(f)[1]
            if self.variance_function is None
            else self.variance_function(f)
        )

    def _compute_moments(self, f: Tensor) -> tuple[Tensor, Tensor]:
        """Return mean and variance of y at outputs f, by summation or quadrature over y.

        Both have the shape (...) of f without its last dimension. For classes they have one more
        dimension, with one entry for each class.
        """
        flat = f.reshape(-1, f.shape[-1]).double()
        if isinstance(self.support, Classes):
            # Moments of the class indicators, as in Categorical.
            _, _, p = self._build_nodes(flat)[0]
            p = p.reshape(*f.shape[:-1], p.shape[-1]).to(f.dtype)
            return p, p * (1 - p)
        mean, variance = self._compute_scalar_moments(flat)
        return mean.reshape(f.shape[:-1]).to(f.dtype), variance.reshape(f.shape[:-1]).to(f.dtype)

    def _compute_scalar_moments(self, f: Tensor) -> tuple[Tensor, Tensor]:
        """Return the mean (N,) and the variance (N,) of a y that is not a class, for f (N, C)."""
        mean = torch.zeros(len(f), dtype=torch.float64)
        variance = torch.zeros_like(mean)

        # Real first: it is Continuous too, but its grids have moments of their own.
        if isinstance(self.support, Real):
            for rows, grid in self._build_grids(f):
                mean[rows], variance[rows] = grid.moments
        elif isinstance(self.support, Continuous):
            mean, variance = quadrature.mapped_moments(
                make_log_density_on_line(self, f),
                self._build_grids(f),
                self.support.from_real,
                ACCURACY,
            )
        elif isinstance(self.support, Circular):
            for rows, circle in self._build_circles(f):
                mean[rows], variance[rows] = circle.mean, circle.variance
        else:  # counts
            for rows, y, share in self._build_nodes(f):
                # The probabilities of nodes sum to one only up to the tails that are cut.
                share = share / share.sum(1, keepdim=True)
                mean[rows] = (share * y).sum(1)
                variance[rows] = (share * (y - mean[rows, None]) ** 2).sum(1)
        return mean, variance

    @property
    def _continuous_support(self) -> Continuous:
        """Return the support; raise AssertionError unless it is continuous."""
        assert isinstance(self.support, Continuous)
        return self.support

    def _build_nodes(self, f: Tensor) -> list[Nodes]:
        """Return nodes for the rows of f (N, C), with Σ h(y)·share ≈ E h(y) for smooth functions h.

        The result is a list, because rows may have different numbers of nodes; each row of f is in
        one entry. Warns if the integral of a density depends on f. Raises ValueError unless the
        probabilities of counts or classes sum to 1.
        """
        if isinstance(self.support, Classes):
            classes = torch.arange(self.support.count, dtype=f.dtype, device=f.device)
            y = classes.expand(f.shape[0], -1)
            share = self._require_normalised(self.log_prob(y, f.unsqueeze(1)).exp())
            return [(torch.arange(f.shape[0]), y, share)]
        if isinstance(self.support, Counts):
            return self._build_count_nodes(f)
        if isinstance(self.support, Circular):
            circles = self._build_circles(f)
            self._warn_of_varying_mass([circle.log_mass[circle.accurate] for _, circle in circles])
            return [
                (rows, circle.angles.expand_as(circle.shares), circle.shares)
                for rows, circle in circles
            ]

        grids = self._build_grids(f)
        self._warn_of_varying_mass([grid.log_mass[grid.accurate] for _, grid in grids])
        return [
            (rows, self._continuous_support.from_real(grid.nodes), grid.shares)
            for rows, grid in grids
        ]

    def _warn_of_varying_mass(self, log_masses: list[Tensor]) -> None:
        """Warn if the integral of the density over y depends on f.

        log_masses: the logarithms of the integrals, for many f. An integral that is not one but the
        same for every f is allowed: it only changes `mass`.
        """
        masses = torch.cat(log_masses).exp()
        if masses.numel() and float(masses.max() - masses.min()) > MASS_ERROR * float(masses.max()):
            warn(
                "log_prob must be normalised over y, but the density integrates to "
                f"{float(masses.min()):.4g} … {float(masses.max()):.4g}, depending on f: the fit "
                "will be wrong. Add the normalising constant."
            )

    def _build_count_nodes(self, f: Tensor) -> list[Nodes]:
        """Return the nodes of counts for f (N, C), as many as each row needs.

        Counts below MOST_COUNTS are summed one by one, larger ones by an integral of the
        interpolated log p. Raises ValueError if the probabilities of a row do not sum to 1.
        """
        nodes: list[Nodes] = []
        pending = torch.arange(f.shape[0])
        count = FIRST_COUNTS
        while pending.numel():
            y = torch.arange(count, dtype=f.dtype, device=f.device)
            unfinished = []
            for rows in pending.split(max(COUNTS_AT_ONCE // count, 1)):
                share = self.log_prob(y.expand(rows.numel(), -1), f[rows].unsqueeze(1)).exp()
                # Rows whose probability is all in these counts are done.
                done = (share.sum(1) - 1).abs() < ALL_MASS
                if count >= MOST_COUNTS and not bool(done.all()):
                    nodes += self._build_nodes_with_large_counts(f, rows[~done], y, share[~done])
                elif not bool(done.all()):
                    unfinished.append(rows[~done])
                nodes.append((rows[done], y.expand(int(done.sum()), -1), share[done]))
            pending = torch.cat(unfinished) if unfinished else pending[:0]
            count *= MORE_COUNTS
        return nodes

    def _build_nodes_with_large_counts(
        self, f: Tensor, rows: Tensor, y: Tensor, share: Tensor
    ) -> list[Nodes]:
        """Return nodes for the given counts y = 0 … k − 1, and for all larger counts.

        rows (m,): the rows of f (N, C) that need larger counts. y (k,): the given counts. share
        (m, k): their probabilities. Raises ValueError if the probabilities of a row do not sum to
        1.
        """
        # The integral of the interpolated log p starts half a count before the first large one.
        start = len(y) - 0.5
        beyond = Positive()

        def log_density(z: Tensor, index: Tensor) -> Tensor:
            """Return the log density of z (r, q), y = start + e^z, for rows[index], index (r,)."""
            large = (start + beyond.from_real(z)).clamp_max(LARGEST_COUNT)
            return self.log_prob(large, f[rows[index]].unsqueeze(1)) + beyond.log_slope(z)

        nodes: list[Nodes] = []
        centre, scale = quadrature.locate_densities(log_density, rows.numel())
        for index, grid in quadrature.build_grids(log_density, centre, scale, LARGE_COUNTS):
            large = start + beyond.from_real(grid.nodes)
            values = torch.cat([y.expand(len(index), -1), large], 1)
            shares = torch.cat([share[index], grid.log_terms.exp()], 1)
            nodes.append((rows[index], values, self._require_normalised(shares)))
        return nodes

    def _require_normalised(self, share: Tensor) -> Tensor:
        """Return the probabilities of all y (m, k) unchanged.

        Raises ValueError unless those of each row sum to 1.
        """
        total = share.sum(1)
        wrong = ~((total - 1).abs() <= NORMALISED)
        if bool(wrong.any()):
            raise ValueError(
                "log_prob must be normalised over y, but its probabilities sum to "
                f"{float(total[wrong][0]):.6g} and not to 1 (the first of {int(wrong.sum())} such "
                "rows of f). Add the normalising constant, which may depend on f."
            )
        return share

    def locate_target(self, f: Tensor, K: Tensor) -> tuple[Tensor, Tensor]:
        """Return the centre (N,) and scale (N,) of y at f (N, C), in the support's real coordinate.

        They are the user's mean and standard deviation if y is on the real line, otherwise the
        result of a search of the density. K is part of the protocol and is not used.
        """
        if (
            self.mean_function is not None
            and self.variance_function is not None
            and isinstance(self.support, Real)
        ):
            return self.mean_function(f), self.variance_function(f).sqrt()
        return quadrature.locate_densities(make_log_density_on_line(self, f), f.shape[0])

    def _build_circles(self, f: Tensor) -> list[quadrature.RowCircle]:
        """Return grids of angles (`ssla.maths.quadrature.RowCircle`) for the rows of f (N, C)."""
        return quadrature.build_circles(
            lambda y, rows: self.log_prob(y, f[rows].unsqueeze(1)), f.shape[0]
        )

    def _build_grids(self, f: Tensor) -> list[quadrature.RowGrid]:
        """Return grids over y, in the support's real coordinate, for the rows of f (N, C)."""
        # `locate_target` does not use K, so f stands in for it.
        centre, scale = self.locate_target(f, K=f)
        return quadrature.build_grids(make_log_density_on_line(self, f), centre, scale, ACCURACY)

    def sample(self, f: Tensor, n: int, generator: torch.Generator | None = None) -> Tensor:
        """Return n draws of y (n, ...), by inversion of the distribution function."""
        flat = f.reshape(-1, f.shape[-1]).double()
        u = uniform_numbers(flat[:, 0], n, generator)
        draws = torch.empty_like(u)
        if isinstance(self.support, Counts | Classes):
            for rows, y, share in self._build_nodes(flat):
                cumulative = share.cumsum(1)
                distribution = cumulative / cumulative[:, -1:]
                index = torch.searchsorted(distribution, u[:, rows].mT.contiguous())
                draws[:, rows] = y.gather(1, index.clamp_max(y.shape[1] - 1)).round().mT
        elif isinstance(self.support, Circular):
            for rows, circle in self._build_circles(flat):
                draws[:, rows] = circle.icdf(u[:, rows].mT).mT
        else:
            for rows, grid in self._build_grids(flat):
                draws[:, rows] = self._continuous_support.from_real(grid.icdf(u[:, rows].mT)).mT
        return draws.reshape(n, *f.shape[:-1]).to(f.dtype)


def _compute_gradient(total: Tensor, free: Tensor, keep: bool) -> Tensor:
    """Return the gradient of a scalar `total` with respect to `free`, with the shape of `free`.

    The result is zero if the scalar does not depend on `free`. keep: whether the graph is kept, so
    that the result can be differentiated again.
    """
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
    """Return a likelihood that is computed from its log density alone.

    Raises TypeError if log_prob is not a function, and ValueError if the support is unknown or does
    not fit `classes`.

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
        mapped to [−π, π)), "counts" or "classes".
    classes:
        The number of classes, for support="classes" only.
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

    supports: dict[str, Support] = {
        "real": Real(),
        "positive": Positive(),
        "unit_interval": UnitInterval(),
        "circular": Circular(),
        "counts": Counts(),
        "classes": Classes(classes or 0),
    }
    return Custom(log_prob, supports[support], outputs, fisher, mean, variance)
