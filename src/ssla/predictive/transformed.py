"""Targets on another scale: the predictive of T(z) for a rising function T.

An example is y = exp(z) of a model for log y.

    log p(y) = log p(z) − log T′(z),   F(y) = F(z),   Q(q) = T(Q_z(q))        (z = T⁻¹(y))

are exact, and so are intervals and draws. Mean and variance of exp(z) are closed forms where z is
Gaussian or a mixture of Gaussians (log-normal). Otherwise they are quadratures of T(z) p(z) over 30
robust standard deviations on both sides of the median: their relative error is below 1e-6 for laws
of z with the tails of a Gaussian. With heavier tails exp(z) may have no mean (Student t); mean and
variance are then infinite, with a warning. Quantiles always exist.

z is the target on the scale of the model, and its law the base. Q is the quantile function and F
the distribution function of y; Q_z is that of z. The base's parts are the members of a mixture, and
what an affine law is made of.
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
from ssla.predictive.mixture_laws import MixtureLaw, ScalarMixtureLaw, make_mixture_of_one
from ssla.predictive.normals import NormalsLaw
from ssla.predictive.positive import Censored, Positive
from ssla.predictive.predictive import Predictive
from ssla.refit.increments import Increments

SMALLEST_DIVISOR = 1e-300  # takes the place of zero
REACH = 30.0  # of the quadrature, in robust standard deviations; a guess
NODES = 241  # of the quadrature; tests/predictive/test_transformed.py: error below 1e-6
NORMAL_QUARTILES = 1.349  # their distance for a standard Gaussian
# how far the log of the integrand must have fallen at the end of the range; a guess
NEGLIGIBLE = 20.0


class Transform(Protocol):
    """A rising function y = T(z) from the real line onto the support of y.

    T may be constant below some z. Its value there then is an atom: it has a positive probability.
    The methods are applied to each value, and their results have the shape of the argument.
    """

    support: ClassVar[str]  # a description of the allowed y, for messages
    atom: ClassVar[float | None]  # the value of the constant part, the lowest y; None: no such part

    def to_y(self, z: Tensor) -> Tensor:
        """Return T(z)."""
        ...

    def to_z(self, y: Tensor) -> Tensor:
        """Return z = T⁻¹(y).

        For y beyond the support it is the limit at that end, which may be infinite.
        """
        ...

    def log_slope(self, z: Tensor) -> Tensor:
        """Return log T′(z)."""
        ...

    def is_in_support(self, y: Tensor) -> Tensor:
        """Return which y are in the support, as a mask of y's shape."""
        ...


@final
@dataclass(frozen=True)
class Exponential:
    """The function y = exp(z) > 0, applied to each value."""

    support: ClassVar[str] = "positive"
    atom: ClassVar[float | None] = None

    def to_y(self, z: Tensor) -> Tensor:
        """Return exp(z)."""
        return z.exp()

    def to_z(self, y: Tensor) -> Tensor:
        """Return log y; −∞ for y ≤ 0."""
        return y.clamp_min(0).log()

    def log_slope(self, z: Tensor) -> Tensor:
        """Return z: the slope of exp(z) is exp(z)."""
        return z

    def is_in_support(self, y: Tensor) -> Tensor:
        """Return which y are positive, as a mask of y's shape."""
        return y > 0


@final
@dataclass(frozen=True)
class Logistic:
    """The function y = 1/(1 + exp(−z)), between 0 and 1, applied to each value."""

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
        """Return which y are strictly between 0 and 1, as a mask of y's shape."""
        return (y > 0) & (y < 1)


TRANSFORMS: dict[str, Transform] = {"exp": Exponential(), "logistic": Logistic()}


@final
@dataclass(frozen=True, eq=False)
class TransformedLaw(Law):
    """The law of y = T(z) for one number z ~ base. Made by `transformed`.

    epistemic and aleatoric are exact for exp of Gaussians and of mixtures of Gaussians. Otherwise
    Var[y] is split in the proportion of Var[z], which is right to first order.
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
        """Return mean, epistemic and aleatoric variance of y, (N,) each.

        The moments are computed for each part of a mixture and combined by the law of total
        variance: the variance between the parts' means is epistemic. Warns where mean or variance
        are infinite.
        """
        if isinstance(self.transform, Positive | Censored):
            mean, variance = self._compute_positive_moments(self.transform)
            epistemic_share = self.base.epistemic / self.base.variance.clamp_min(SMALLEST_DIVISOR)
            return mean, epistemic_share * variance, (1 - epistemic_share) * variance

        weights_and_moments = [
            (weight, *_compute_part_moments(law, shift, scale, self.transform))
            for weight, law, shift, scale in self._iterate_base_parts()
        ]
        weights, means, doubts, noises = (
            torch.stack(column) for column in zip(*weights_and_moments, strict=True)
        )
        mean = (weights * means).sum(0)

        # Where the mean is infinite, the differences from it are NaN.
        between = torch.where(mean.isinf(), math.inf, (weights * (means - mean) ** 2).sum(0))
        doubt = (weights * doubts).sum(0) + between
        noise = (weights * noises).sum(0)
        infinite = int((doubt + noise).isinf().sum())
        if infinite:
            warn(
                f"{infinite} of {self.rows} predictives have no finite variance (or mean): on the "
                "scale of the model their tails are too heavy, or their spread is very large. "
                "Mean and variance are infinite there. Use quantiles and intervals."
            )
        return mean, doubt, noise

    def _compute_positive_moments(self, transform: Positive | Censored) -> tuple[Tensor, Tensor]:
        """Return mean and variance of y, (N,) each, for a transform with closed-form moments.

        Both moments follow from E[y] and E[y²] of the parts of the base: closed forms for Gaussians
        and mixtures of normals, integrals for other laws.
        """
        total = torch.zeros(2, self.rows, dtype=torch.float64)  # E[y] and E[y²]
        for weight, law, shift, scale in self._iterate_base_parts():
            if isinstance(law, NormalsLaw):
                centres = shift[:, None] + scale[:, None] * law.means
                by_normal = transform.moments_of_normals(centres, scale[:, None] * law.scales)
                moments = [moment @ law.weights for moment in by_normal]
            elif isinstance(law, GaussianLaw):
                centres = shift + scale * law.mean
                moments = list(transform.moments_of_normals(centres, scale * law.stddev))
            else:
                mean, variance = _integrate_moments(law, shift, scale, transform)
                moments = [mean, variance + mean**2]
            total += weight * torch.stack(moments)
        return total[0], (total[1] - total[0] ** 2).clamp_min(0.0)

    def _iterate_base_parts(self) -> Iterator[tuple[Tensor, Law, Tensor, Tensor]]:
        """Yield the parts of the base as (weight, law, shift, scale): see `_iterate_parts`."""
        ones = torch.ones(self.rows, dtype=torch.float64)
        return _iterate_parts(self.base, shift=torch.zeros_like(ones), scale=ones, weight=ones)

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
        """Return the epistemic part of Var[y] (N,); the class says how it is computed."""
        return self._moments[1]

    @property
    def aleatoric(self) -> Tensor:
        """Return the aleatoric part of Var[y] (N,); the class says how it is computed."""
        return self._moments[2]

    @cached_property
    def _as_mixture(self) -> ScalarMixtureLaw:
        """Return a mixture with this law as its only member.

        A mixture finds its mode and its regions by search.
        """
        return make_mixture_of_one(self)

    @property
    def mode(self) -> Tensor:
        """Return the y of highest density (N,)."""
        return self._as_mixture.mode

    @property
    def mass(self) -> Tensor:
        """Return the mass of the base (N,), which is the same on every scale."""
        return self.base.mass

    def check(self, y: Tensor) -> None:
        """Raise ValueError where y (N, k) is outside the support of T, or of the base."""
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
        """Return P(Y < y), (N, k) -> (N, k).

        The result is zero at the atom, which is the lowest value, and the cdf elsewhere.
        """
        atom = self.transform.atom
        return self.cdf(y) if atom is None else torch.where(y <= atom, 0.0, self.cdf(y))

    def icdf(self, q: Tensor) -> Tensor:
        """Return the quantiles T(Q_z(q)) at q (k,): (N, k)."""
        return self.transform.to_y(self.base.icdf(q))

    def hdr(self, level: float) -> Regions:
        """Return the smallest region with probability `level`, a union of intervals."""
        return self._as_mixture.hdr(level)

    def sample(self, n: int, generator: torch.Generator | None) -> Tensor:
        """Draw n values for each input (n, N): T of draws of the base."""
        return self.transform.to_y(self.base.sample(n, generator))

    def increments(self, y: Tensor) -> Increments:
        """Return the increments of the base at y (N, k), each of shape (N, k).

        The likelihood increment contains the change of scale, −log T′(z).
        """
        z = self.transform.to_z(y)
        increments = self.base.increments(z)
        return replace(increments, likelihood=increments.likelihood - self.transform.log_slope(z))


@in_plain_torch
def transformed(predictive: Predictive, transform: str | Transform) -> Predictive:
    """Return the predictive of y = T(z) from the predictive of one continuous target z.

    This is needed where a network was trained on z = log y (transform="exp") or on z = logit y
    ("logistic"), and the predictive of y itself is wanted. transform may also be a Transform.
    Raises TypeError for other targets, and ValueError for an unknown name or a predictive with
    differentiable=True.

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
    return _replace_law(predictive, TransformedLaw(predictive.law, chosen))


def remove_transforms(predictive: Predictive) -> Predictive:
    """Return the predictive of z, on the scale of the model.

    Transformed members of a mixture and transformed parts of joined rows are replaced too. A
    predictive without a transform keeps its law.
    """
    return _replace_law(predictive, _remove_transforms_of_law(predictive.law))


def _replace_law(predictive: Predictive, law: Law) -> Predictive:
    """Return the predictive with a law on another scale, without its parts.

    The diagnostics of a mixture get the new law as well: they compare its mean with its median,
    which depend on the scale.
    """
    flags = predictive.diagnostics
    if flags.mixed is not None:
        flags = replace(flags, mixed=law)
    return replace(predictive, law=law, diagnostics=flags, parts=())


def _remove_transforms_of_law(law: Law) -> Law:
    """Return the law with every TransformedLaw in it replaced by its base.

    The laws of mixtures and of joined rows are searched; other laws are returned as they are.
    """
    if isinstance(law, TransformedLaw):
        return law.base
    if isinstance(law, MixtureLaw | JoinedLaw):
        return replace(law, laws=tuple(map(_remove_transforms_of_law, law.laws)))
    return law


def _iterate_parts(
    law: Law, shift: Tensor, scale: Tensor, weight: Tensor
) -> Iterator[tuple[Tensor, Law, Tensor, Tensor]]:
    """Yield the parts of a law that may be a mixture, affine, or nested of both.

    A part (weight, law, shift, scale) has the law of shift + scale · z, where z ~ law is neither a
    mixture nor affine. Weights, shifts and scales are (N,). The arguments are those of the whole
    law: shift 0, scale 1 and weight 1 at the first call.
    """
    if isinstance(law, AffineLaw):
        yield from _iterate_parts(law.base, shift + scale * law.shift, scale * law.scale, weight)
    elif isinstance(law, ScalarMixtureLaw):
        for member, share in zip(law.laws, law.weights, strict=True):
            yield from _iterate_parts(member, shift, scale, weight * share)
    else:
        yield weight, law, shift, scale


def _compute_part_moments(
    law: Law, shift: Tensor, scale: Tensor, transform: Transform
) -> tuple[Tensor, Tensor, Tensor]:
    """Return mean, epistemic and aleatoric variance of T(shift + scale · z), (N,) each.

    z ~ law, and T is the transform. The moments are closed forms for exp of a Gaussian, and
    integrals otherwise.
    """
    doubt, noise = law.epistemic * scale**2, law.aleatoric * scale**2
    if isinstance(law, GaussianLaw) and isinstance(transform, Exponential):
        # E[y|f] = exp(f + noise/2), Var[y|f] = exp(2f + noise)(e^noise − 1), f ~ N(centre, doubt)
        mean = (shift + scale * law.mean + (doubt + noise) / 2).exp()
        return mean, mean**2 * torch.expm1(doubt), mean**2 * doubt.exp() * torch.expm1(noise)
    # Var[y] is split in the proportion of Var[z], which is right to first order.
    mean, variance = _integrate_moments(law, shift, scale, transform)
    epistemic_share = doubt / (doubt + noise).clamp_min(SMALLEST_DIVISOR)
    return mean, variance * epistemic_share, variance * (1 - epistemic_share)


def _integrate_moments(
    law: Law, shift: Tensor, scale: Tensor, transform: Transform
) -> tuple[Tensor, Tensor]:
    """Return mean and variance of T(shift + scale · z), (N,) each, for z ~ law, by quadrature.

    T is the transform. The rule is that of trapezoids in u, with z = median + spread · sinh u. A
    moment of exp counts as infinite where the log of its integrand at the upper end of the range is
    less than NEGLIGIBLE below the maximum: the integrand has not fallen enough there.
    """
    low, median, high = law.icdf(torch.tensor([0.25, 0.5, 0.75], dtype=torch.float64)).unbind(1)
    spread = ((high - low) / NORMAL_QUARTILES)[:, None]
    u = torch.linspace(-math.asinh(REACH), math.asinh(REACH), NODES, dtype=torch.float64)
    z = median[:, None] + spread * torch.sinh(u)

    # log of p(z) dz at the nodes, normalised to sum to one
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
