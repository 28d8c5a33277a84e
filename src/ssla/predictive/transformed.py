"""Targets on another scale: the predictive of T(z) for a rising function T, such as y = exp(z) of a
model for log y.

    log p(y) = log p(z) − log T′(z),   F(y) = F(z),   Q(q) = T(Q_z(q))        (z = T⁻¹(y))

are exact, and so are intervals and draws. Mean and variance of exp(z) are closed forms where z is
Gaussian or a mixture of Gaussians (log-normal). Otherwise they are quadratures of T(z) p(z) over 30
robust standard deviations on both sides of the median: their relative error is below 1e-6 for laws
of z with the tails of a Gaussian. With heavier tails exp(z) may have no mean (Student t); mean and
variance are then infinite, with a warning. Quantiles always exist.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import ClassVar, Protocol, final

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from ssla._checks import in_plain_torch, one_of, warn
from ssla.maths.quadrature import Regions
from ssla.predictive.affine import AffineLaw
from ssla.predictive.gaussian_law import GaussianLaw
from ssla.predictive.joined import JoinedLaw
from ssla.predictive.law import Law
from ssla.predictive.mixture_laws import MixtureLaw, ScalarMixtureLaw
from ssla.predictive.normals import NormalsLaw
from ssla.predictive.positive import Censored, Positive
from ssla.predictive.predictive import Predictive
from ssla.refit.increments import Increments

REACH, NODES = 30.0, 241  # of the quadrature, in robust standard deviations
NORMAL_QUARTILES = 1.349  # their distance for a standard Gaussian
NEGLIGIBLE = 20.0  # how far the log of the integrand must have fallen at the end of the range


class Transform(Protocol):
    """A rising function T of the real line onto its support; or one that is constant at one
    end, which then has an atom.
    """

    support: ClassVar[str]
    atom: ClassVar[float | None]  # the value at the constant end

    def out(self, z: Tensor) -> Tensor:
        """T(z)."""
        ...

    def into(self, y: Tensor) -> Tensor:
        """T⁻¹(y); −∞ and ∞ (or the ends) beyond the support."""
        ...

    def log_slope(self, z: Tensor) -> Tensor:
        """log T′(z)."""
        ...

    def inside(self, y: Tensor) -> Tensor:
        """bool, of y's shape."""
        ...


@final
@dataclass(frozen=True)
class Exponential:
    """y = exp(z) > 0."""

    support: ClassVar[str] = "positive"
    atom: ClassVar[float | None] = None

    def out(self, z: Tensor) -> Tensor:
        return z.exp()

    def into(self, y: Tensor) -> Tensor:
        return y.clamp_min(0).log()

    def log_slope(self, z: Tensor) -> Tensor:
        return z

    def inside(self, y: Tensor) -> Tensor:
        return y > 0


@final
@dataclass(frozen=True)
class Logistic:
    """y = 1/(1 + exp(−z)), between 0 and 1."""

    support: ClassVar[str] = "strictly between 0 and 1"
    atom: ClassVar[float | None] = None

    def out(self, z: Tensor) -> Tensor:
        return z.sigmoid()

    def into(self, y: Tensor) -> Tensor:
        return y.clamp(0, 1).logit()

    def log_slope(self, z: Tensor) -> Tensor:
        return logsigmoid(z) + logsigmoid(-z)

    def inside(self, y: Tensor) -> Tensor:
        return (y > 0) & (y < 1)


TRANSFORMS: dict[str, Transform] = {"exp": Exponential(), "logistic": Logistic()}


@final
@dataclass(frozen=True, eq=False)
class TransformedLaw(Law):
    """y = T(z) with z ~ base, a number. Made by `transformed`.

    epistemic and aleatoric are exact for exp of Gaussians and mixtures of them. Otherwise they
    divide the variance of y as that of z is divided, which is right to first order.
    """

    base: Law
    transform: Transform

    kind = "scalar"

    @property
    def rows(self) -> int:
        return self.base.rows

    @cached_property
    def _moments(self) -> tuple[Tensor, Tensor, Tensor]:
        """Mean, epistemic and aleatoric variance: of every part of the mixture by itself, and
        of their disagreement.
        """
        if isinstance(self.transform, Positive | Censored):
            mean, variance = self._positive_moments(self.transform)
            share = self.base.epistemic / self.base.variance.clamp_min(1e-300)
            return mean, share * variance, (1 - share) * variance
        zero, one = (
            torch.zeros(self.rows, dtype=torch.float64),
            torch.ones(self.rows, dtype=torch.float64),
        )
        parts = [
            (w, *_moments(law, shift, scale, self.transform))
            for w, law, shift, scale in _leaves(self.base, zero, one, one)
        ]
        weights, means, doubts, noises = (torch.stack(part) for part in zip(*parts, strict=True))
        mean = (weights * means).sum(0)
        apart = torch.where(mean.isinf(), math.inf, (weights * (means - mean) ** 2).sum(0))
        doubt, noise = (weights * doubts).sum(0) + apart, (weights * noises).sum(0)
        endless = int((doubt + noise).isinf().sum())
        if endless:
            warn(
                f"{endless} of {self.rows} predictives have no finite variance (or mean): on the "
                "scale of the model their tails are too heavy, or their spread is very large. "
                "Mean and variance are infinite there. Use quantiles and intervals."
            )
        return mean, doubt, noise

    def _positive_moments(self, transform: Positive | Censored) -> tuple[Tensor, Tensor]:
        """Mean and variance, from the first and second moments of the parts of the mixture."""
        total = torch.zeros(2, self.rows, dtype=torch.float64)
        zero, one = (
            torch.zeros(self.rows, dtype=torch.float64),
            torch.ones(self.rows, dtype=torch.float64),
        )
        for weight, law, shift, scale in _leaves(self.base, zero, one, one):
            if isinstance(law, NormalsLaw):
                centres, spreads = (
                    (shift[:, None] + scale[:, None] * law.means),
                    scale[:, None] * law.scales,
                )
                found = [
                    part @ law.weights for part in transform.moments_of_normals(centres, spreads)
                ]
            elif isinstance(law, GaussianLaw):
                found = list(
                    transform.moments_of_normals(shift + scale * law.mean, scale * law.stddev)
                )
            else:
                mean, variance = _quadrature(law, shift, scale, transform)
                found = [mean, variance + mean**2]
            total += weight * torch.stack(found)
        return total[0], (total[1] - total[0] ** 2).clamp_min(0.0)

    @property
    def mean(self) -> Tensor:
        return self._moments[0]

    @property
    def variance(self) -> Tensor:
        return self._moments[1] + self._moments[2]

    @property
    def epistemic(self) -> Tensor:
        return self._moments[1]

    @property
    def aleatoric(self) -> Tensor:
        return self._moments[2]

    @cached_property
    def _alone(self) -> ScalarMixtureLaw:
        """A mixture of one: finds mode and regions from density and quantiles."""
        return ScalarMixtureLaw((self,), torch.ones(1, dtype=torch.float64))

    @property
    def mode(self) -> Tensor:
        return self._alone.mode

    @property
    def mass(self) -> Tensor:
        """The same on every scale."""
        return self.base.mass

    def check(self, y: Tensor) -> None:
        outside = ~self.transform.inside(y)
        if bool(outside.any()):
            raise ValueError(
                f"y must be {self.transform.support}, because this predictive has density nowhere "
                f"else, but {int(outside.sum())} of {y.numel()} values are not (one is "
                f"{float(y[outside][0]):g})."
            )
        self.base.check(self.transform.into(y))

    def log_prob(self, y: Tensor) -> Tensor:
        z = self.transform.into(y)
        return self.base.log_prob(z) - self.transform.log_slope(z)

    def cdf(self, y: Tensor) -> Tensor:
        return self.base.cdf(self.transform.into(y))

    def below(self, y: Tensor) -> Tensor:
        """Nothing is below the atom, which is the lowest value."""
        atom = self.transform.atom
        return self.cdf(y) if atom is None else torch.where(y <= atom, 0.0, self.cdf(y))

    def icdf(self, q: Tensor) -> Tensor:
        return self.transform.out(self.base.icdf(q))

    def hdr(self, level: float) -> Regions:
        return self._alone.hdr(level)

    def sample(self, n: int, generator: torch.Generator | None) -> Tensor:
        return self.transform.out(self.base.sample(n, generator))

    def increments(self, y: Tensor) -> Increments:
        """Those of the base; the change of scale is counted with the likelihood."""
        z = self.transform.into(y)
        parts = self.base.increments(z)
        return replace(parts, likelihood=parts.likelihood - self.transform.log_slope(z))


@in_plain_torch
def transformed(predictive: Predictive, transform: str | Transform) -> Predictive:
    """The predictive of exp(z) ("exp") or of 1/(1 + exp(−z)) ("logistic") for a model of z: one
    continuous target.

    Needed where a network was trained on log y or logit y, and y itself is asked for.

    >>> transformed(post.predict(x), "exp").interval(0.95)      # doctest: +SKIP
    """
    if predictive.kind != "scalar":
        raise TypeError(
            "Only one continuous target can be transformed, but this predictive is of kind "
            f"{predictive.kind!r}."
        )
    if predictive.differentiable:
        raise ValueError(
            "A transformed predictive carries no gradients. Predict without differentiable=True."
        )
    chosen = (
        TRANSFORMS[one_of("transform", transform, TRANSFORMS)]
        if isinstance(transform, str)
        else transform
    )
    return _with_law(predictive, TransformedLaw(predictive.law, chosen))


def untransformed(predictive: Predictive) -> Predictive:
    """The predictive of z, on the scale of the model; for mixtures and joined rows of
    transformed predictives too.
    """
    return _with_law(predictive, _base(predictive.law))


def _with_law(predictive: Predictive, law: Law) -> Predictive:
    """The predictive with a law on another scale, where mean and median of a mixture are others
    too.
    """
    flags = predictive.diagnostics
    flags = flags if flags.mixed is None else replace(flags, mixed=law)
    return replace(predictive, law=law, diagnostics=flags, parts=())


def _base(law: Law) -> Law:
    if isinstance(law, TransformedLaw):
        return law.base
    if isinstance(law, MixtureLaw | JoinedLaw):
        return replace(law, laws=tuple(map(_base, law.laws)))
    return law


def _leaves(
    law: Law, shift: Tensor, scale: Tensor, weight: Tensor
) -> Iterator[tuple[Tensor, Law, Tensor, Tensor]]:
    """The parts of a mixture, as shift + scale · (law without a unit), with their weights.

    All (N,).
    """
    if isinstance(law, AffineLaw):
        yield from _leaves(law.base, shift + scale * law.shift, scale * law.scale, weight)
    elif isinstance(law, ScalarMixtureLaw):
        for member, share in zip(law.laws, law.weights, strict=True):
            yield from _leaves(member, shift, scale, weight * share)
    else:
        yield weight, law, shift, scale


def _moments(
    law: Law, shift: Tensor, scale: Tensor, transform: Transform
) -> tuple[Tensor, Tensor, Tensor]:
    """Mean, epistemic and aleatoric variance of T(shift + scale · z), (N,)."""
    doubt, noise = law.epistemic * scale**2, law.aleatoric * scale**2
    if isinstance(law, GaussianLaw) and isinstance(transform, Exponential):
        # E[y|f] = exp(f + noise/2), Var[y|f] = exp(2f + noise)(e^noise − 1), f ~ N(centre, doubt)
        mean = (shift + scale * law.mean + (doubt + noise) / 2).exp()
        return mean, mean**2 * torch.expm1(doubt), mean**2 * doubt.exp() * torch.expm1(noise)
    mean, variance = _quadrature(law, shift, scale, transform)
    share = doubt / (doubt + noise).clamp_min(1e-300)
    return mean, variance * share, variance * (1 - share)


def _quadrature(
    law: Law, shift: Tensor, scale: Tensor, transform: Transform
) -> tuple[Tensor, Tensor]:
    """Mean and variance of T(shift + scale · z): trapezoids in u, with z = median + spread ·
    sinh u.
    """
    low, middle, high = law.icdf(torch.tensor([0.25, 0.5, 0.75], dtype=torch.float64)).unbind(1)
    spread = ((high - low) / NORMAL_QUARTILES)[:, None]
    u = torch.linspace(-math.asinh(REACH), math.asinh(REACH), NODES, dtype=torch.float64)
    z = middle[:, None] + spread * torch.sinh(u)
    logs = law.log_prob(z) + torch.cosh(u).log() + spread.log() + math.log(float(u[1] - u[0]))
    logs = logs - logs.logsumexp(1, keepdim=True)
    x = shift[:, None] + scale[:, None] * z
    if not isinstance(transform, Exponential):
        values = transform.out(x)
        mean = (logs.exp() * values).sum(1)
        return mean, (logs.exp() * (values - mean[:, None]) ** 2).sum(1)
    # of exp: in logarithms, without overflow
    first, second = (logs + power * x for power in (1, 2))
    mean = first.logsumexp(1).exp()
    variance = (logs.exp() * (x - first.logsumexp(1, keepdim=True)).expm1() ** 2).sum(1) * mean**2
    ends = [part[:, -1] > part.amax(1) - NEGLIGIBLE for part in (first, second)]
    return torch.where(ends[0], math.inf, mean), torch.where(ends[1], math.inf, variance)
