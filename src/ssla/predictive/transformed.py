"""Targets on another scale: the predictive of T(z) for a rising function T, for example y = exp(z)
of a model for log y.

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

from ssla._checks import check_name, in_plain_torch, warn
from ssla.maths.quadrature import Regions
from ssla.predictive.affine import AffineLaw
from ssla.predictive.gaussian_law import GaussianLaw
from ssla.predictive.joined import JoinedLaw
from ssla.predictive.law import Law
from ssla.predictive.mixture_laws import MixtureLaw, ScalarMixtureLaw, mixture_of_one
from ssla.predictive.normals import NormalsLaw
from ssla.predictive.positive import Censored, Positive
from ssla.predictive.predictive import Predictive
from ssla.refit.increments import Increments

REACH = 30.0  # of the quadrature, in robust standard deviations; a guess
NODES = 241  # of the quadrature; tests/predictive/test_transformed.py: error below 1e-6
NORMAL_QUARTILES = 1.349  # their distance for a standard Gaussian
# how far the log of the integrand must have fallen at the end of the range; a guess
NEGLIGIBLE = 20.0


class Transform(Protocol):
    """A rising function T of the real line onto its support; or one that is constant at one
    end, which then has an atom.

    Its methods are applied to each value: results have the shape of the argument.
    """

    support: ClassVar[str]
    atom: ClassVar[float | None]  # the value at the constant end

    def to_y(self, z: Tensor) -> Tensor:
        """Return T(z)."""
        ...

    def to_z(self, y: Tensor) -> Tensor:
        """Return T⁻¹(y); −∞ and ∞ (or the ends) beyond the support."""
        ...

    def log_slope(self, z: Tensor) -> Tensor:
        """Return log T′(z)."""
        ...

    def is_in_support(self, y: Tensor) -> Tensor:
        """Tell which y are in the support, as booleans."""
        ...


@final
@dataclass(frozen=True)
class Exponential:
    """y = exp(z) > 0."""

    support: ClassVar[str] = "positive"
    atom: ClassVar[float | None] = None

    def to_y(self, z: Tensor) -> Tensor:
        """Return exp(z)."""
        return z.exp()

    def to_z(self, y: Tensor) -> Tensor:
        """Return log y; −∞ for y ≤ 0."""
        return y.clamp_min(0).log()

    def log_slope(self, z: Tensor) -> Tensor:
        """Return log exp(z) = z."""
        return z

    def is_in_support(self, y: Tensor) -> Tensor:
        """Tell which y are positive."""
        return y > 0


@final
@dataclass(frozen=True)
class Logistic:
    """y = 1/(1 + exp(−z)), between 0 and 1."""

    support: ClassVar[str] = "strictly between 0 and 1"
    atom: ClassVar[float | None] = None

    def to_y(self, z: Tensor) -> Tensor:
        """Return the sigmoid of z."""
        return z.sigmoid()

    def to_z(self, y: Tensor) -> Tensor:
        """Return the logit of y; −∞ for y ≤ 0 and ∞ for y ≥ 1."""
        return y.clamp(0, 1).logit()

    def log_slope(self, z: Tensor) -> Tensor:
        """Return log σ(z)(1 − σ(z)), with σ the sigmoid."""
        return logsigmoid(z) + logsigmoid(-z)

    def is_in_support(self, y: Tensor) -> Tensor:
        """Tell which y are strictly between 0 and 1."""
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
        """Return N, the number of inputs."""
        return self.base.rows

    @cached_property
    def _moments(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return mean, epistemic and aleatoric variance, (N,) each.

        Moments of the parts of a mixture are computed separately. The variance of the parts' means
        is epistemic. Warns where mean or variance are infinite.
        """
        if isinstance(self.transform, Positive | Censored):
            mean, variance = self._positive_moments(self.transform)
            share = self.base.epistemic / self.base.variance.clamp_min(1e-300)
            return mean, share * variance, (1 - share) * variance
        parts = [
            (weight, *_part_moments(law, shift, scale, self.transform))
            for weight, law, shift, scale in self._base_parts()
        ]
        weights, means, doubts, noises = (torch.stack(part) for part in zip(*parts, strict=True))
        mean = (weights * means).sum(0)
        apart = torch.where(mean.isinf(), math.inf, (weights * (means - mean) ** 2).sum(0))
        doubt, noise = (weights * doubts).sum(0) + apart, (weights * noises).sum(0)
        infinite = int((doubt + noise).isinf().sum())
        if infinite:
            warn(
                f"{infinite} of {self.rows} predictives have no finite variance (or mean): on the "
                "scale of the model their tails are too heavy, or their spread is very large. "
                "Mean and variance are infinite there. Use quantiles and intervals."
            )
        return mean, doubt, noise

    def _positive_moments(self, transform: Positive | Censored) -> tuple[Tensor, Tensor]:
        """Return mean and variance (N,) from the first and second moments of the base's parts."""
        total = torch.zeros(2, self.rows, dtype=torch.float64)
        for weight, law, shift, scale in self._base_parts():
            if isinstance(law, NormalsLaw):
                centres = shift[:, None] + scale[:, None] * law.means
                by_normal = transform.moments_of_normals(centres, scale[:, None] * law.scales)
                moments = [part @ law.weights for part in by_normal]
            elif isinstance(law, GaussianLaw):
                centres = shift + scale * law.mean
                moments = list(transform.moments_of_normals(centres, scale * law.stddev))
            else:
                mean, variance = _integrate_moments(law, shift, scale, transform)
                moments = [mean, variance + mean**2]
            total += weight * torch.stack(moments)
        return total[0], (total[1] - total[0] ** 2).clamp_min(0.0)

    def _base_parts(self) -> Iterator[tuple[Tensor, Law, Tensor, Tensor]]:
        """Yield the parts of the base as (weight, law, shift, scale): see `_iterate_parts`."""
        one = torch.ones(self.rows, dtype=torch.float64)
        return _iterate_parts(self.base, torch.zeros_like(one), one, one)

    @property
    def mean(self) -> Tensor:
        """Return E[T(z)] (N,)."""
        return self._moments[0]

    @property
    def variance(self) -> Tensor:
        """Return Var[T(z)] (N,)."""
        return self._moments[1] + self._moments[2]

    @property
    def epistemic(self) -> Tensor:
        """Return the epistemic part of the variance (N,)."""
        return self._moments[1]

    @property
    def aleatoric(self) -> Tensor:
        """Return the aleatoric part of the variance (N,)."""
        return self._moments[2]

    @cached_property
    def _as_mixture(self) -> ScalarMixtureLaw:
        """Return a mixture of this law alone, which finds mode and regions by search."""
        return mixture_of_one(self)

    @property
    def mode(self) -> Tensor:
        """Return the y of highest density (N,)."""
        return self._as_mixture.mode

    @property
    def mass(self) -> Tensor:
        """Return the mass of the base (N,), which is the same on every scale."""
        return self.base.mass

    def check(self, y: Tensor) -> None:
        """Raise ValueError where y is outside the support of T, or of the base."""
        outside = ~self.transform.is_in_support(y)
        if bool(outside.any()):
            raise ValueError(
                f"y must be {self.transform.support}, because this predictive has density nowhere "
                f"else, but {int(outside.sum())} of {y.numel()} values are not (one is "
                f"{float(y[outside][0]):g})."
            )
        self.base.check(self.transform.to_z(y))

    def log_prob(self, y: Tensor) -> Tensor:
        """Return log p(z) − log T′(z), (N, k) -> (N, k)."""
        z = self.transform.to_z(y)
        return self.base.log_prob(z) - self.transform.log_slope(z)

    def cdf(self, y: Tensor) -> Tensor:
        """Return P(Y ≤ y), (N, k) -> (N, k)."""
        return self.base.cdf(self.transform.to_z(y))

    def below(self, y: Tensor) -> Tensor:
        """Return P(Y < y), (N, k) -> (N, k); zero at the atom, which is the lowest value."""
        atom = self.transform.atom
        return self.cdf(y) if atom is None else torch.where(y <= atom, 0.0, self.cdf(y))

    def icdf(self, q: Tensor) -> Tensor:
        """Return the quantiles T(Q_z(q)) at q (k,): (N, k)."""
        return self.transform.to_y(self.base.icdf(q))

    def hdr(self, level: float) -> Regions:
        """Return the smallest region with that probability, a union of intervals."""
        return self._as_mixture.hdr(level)

    def sample(self, n: int, generator: torch.Generator | None) -> Tensor:
        """Draw n values for each input (n, N)."""
        return self.transform.to_y(self.base.sample(n, generator))

    def increments(self, y: Tensor) -> Increments:
        """Return the increments of the base; the change of scale is counted with the likelihood."""
        z = self.transform.to_z(y)
        parts = self.base.increments(z)
        return replace(parts, likelihood=parts.likelihood - self.transform.log_slope(z))


@in_plain_torch
def transformed(predictive: Predictive, transform: str | Transform) -> Predictive:
    """Return the predictive of exp(z) ("exp") or of 1/(1 + exp(−z)) ("logistic") for a model of z,
    one continuous target.

    It is needed where a network was trained on log y or logit y, and y itself is asked for.
    TypeError for other targets, ValueError for an unknown name or with differentiable=True.

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
        TRANSFORMS[check_name("transform", transform, TRANSFORMS)]
        if isinstance(transform, str)
        else transform
    )
    return _with_law(predictive, TransformedLaw(predictive.law, chosen))


def untransformed(predictive: Predictive) -> Predictive:
    """Return the predictive of z, on the scale of the model; for mixtures and joined rows of
    transformed predictives too.
    """
    return _with_law(predictive, _without_transform(predictive.law))


def _with_law(predictive: Predictive, law: Law) -> Predictive:
    """Replace the law by one on another scale.

    Mean and median of a mixture change with the scale, so diagnostics get the new law as well.
    """
    flags = predictive.diagnostics
    flags = flags if flags.mixed is None else replace(flags, mixed=law)
    return replace(predictive, law=law, diagnostics=flags, parts=())


def _without_transform(law: Law) -> Law:
    """Replace every TransformedLaw in a law by its base; other laws stay as they are."""
    if isinstance(law, TransformedLaw):
        return law.base
    if isinstance(law, MixtureLaw | JoinedLaw):
        return replace(law, laws=tuple(map(_without_transform, law.laws)))
    return law


def _iterate_parts(
    law: Law, shift: Tensor, scale: Tensor, weight: Tensor
) -> Iterator[tuple[Tensor, Law, Tensor, Tensor]]:
    """Yield the parts of a nested mixture as (weight, law, shift, scale): shift + scale · law.

    Weights, shifts and scales are (N,); the arguments are those of the mixture itself. The laws are
    neither mixtures nor affine.
    """
    if isinstance(law, AffineLaw):
        yield from _iterate_parts(law.base, shift + scale * law.shift, scale * law.scale, weight)
    elif isinstance(law, ScalarMixtureLaw):
        for member, share in zip(law.laws, law.weights, strict=True):
            yield from _iterate_parts(member, shift, scale, weight * share)
    else:
        yield weight, law, shift, scale


def _part_moments(
    law: Law, shift: Tensor, scale: Tensor, transform: Transform
) -> tuple[Tensor, Tensor, Tensor]:
    """Return mean, epistemic and aleatoric variance of T(shift + scale · z), (N,) each."""
    doubt, noise = law.epistemic * scale**2, law.aleatoric * scale**2
    if isinstance(law, GaussianLaw) and isinstance(transform, Exponential):
        # E[y|f] = exp(f + noise/2), Var[y|f] = exp(2f + noise)(e^noise − 1), f ~ N(centre, doubt)
        mean = (shift + scale * law.mean + (doubt + noise) / 2).exp()
        return mean, mean**2 * torch.expm1(doubt), mean**2 * doubt.exp() * torch.expm1(noise)
    # The variance of y is divided as that of z is, which is right to first order.
    mean, variance = _integrate_moments(law, shift, scale, transform)
    share = doubt / (doubt + noise).clamp_min(1e-300)
    return mean, variance * share, variance * (1 - share)


def _integrate_moments(
    law: Law, shift: Tensor, scale: Tensor, transform: Transform
) -> tuple[Tensor, Tensor]:
    """Integrate mean and variance (N,) of T(shift + scale · z), with z of the law.

    The rule is that of trapezoids in u, with z = median + spread · sinh u. Moments of exp are
    infinite where the integrand has not fallen at the end of the range.
    """
    low, median, high = law.icdf(torch.tensor([0.25, 0.5, 0.75], dtype=torch.float64)).unbind(1)
    spread = ((high - low) / NORMAL_QUARTILES)[:, None]
    u = torch.linspace(-math.asinh(REACH), math.asinh(REACH), NODES, dtype=torch.float64)
    z = median[:, None] + spread * torch.sinh(u)
    # log of p(z) dz, normalised over the nodes
    logs = law.log_prob(z) + torch.cosh(u).log() + spread.log() + math.log(float(u[1] - u[0]))
    logs = logs - logs.logsumexp(1, keepdim=True)
    x = shift[:, None] + scale[:, None] * z
    if not isinstance(transform, Exponential):
        values = transform.to_y(x)
        mean = (logs.exp() * values).sum(1)
        return mean, (logs.exp() * (values - mean[:, None]) ** 2).sum(1)
    # Moments of exp are summed in logarithms, without overflow: Var = E[(eˣ/mean − 1)²] mean².
    first, second = (logs + power * x for power in (1, 2))
    mean = first.logsumexp(1).exp()
    variance = (logs.exp() * (x - first.logsumexp(1, keepdim=True)).expm1() ** 2).sum(1) * mean**2
    no_mean, no_variance = (
        integrand[:, -1] > integrand.amax(1) - NEGLIGIBLE for integrand in (first, second)
    )
    return torch.where(no_mean, math.inf, mean), torch.where(no_variance, math.inf, variance)
