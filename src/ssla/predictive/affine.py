"""Another unit of measurement: the predictive of shift + scale · y, exactly."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ssla._checks import finite, positive
from ssla.data import as_tensor
from ssla.numerics.quadrature import Regions
from ssla.predictive.gaussian import Ellipsoid
from ssla.predictive.mixture import in_double
from ssla.predictive.predictive import Diagnostics, Predictive, kind_of
from ssla.refit.increments import Increments
from ssla.state import COARSE


@dataclass(frozen=True, eq=False)
class AffinePredictive:
    """y = shift + scale · z with z ~ base and scale > 0: log p(y) = log p(z) − Σ log scale.

    shift and scale are numbers () for one target, (D,) for D of them. Made by `affine`.
    """

    base: Any
    shift: Tensor
    scale: Tensor

    @property
    def kind(self) -> str:
        return kind_of(self.base)

    @property
    def diagnostics(self) -> Diagnostics:
        diagnostics: Diagnostics = self.base.diagnostics
        return diagnostics

    def _out(self, z: Tensor) -> Tensor:
        """z (…, [D]) -> y."""
        return self.shift.to(z) + self.scale.to(z) * z

    def _trailing(self, z: Tensor) -> Tensor:
        """z (N, [D], k) -> y: quantiles come after the targets."""
        return self.shift.to(z)[..., None] + self.scale.to(z)[..., None] * z

    def _in(self, y: Any) -> Tensor:
        value = as_tensor(y).to("cpu", torch.float64)
        return (value - self.shift) / self.scale

    @property
    def _log_scale(self) -> float:
        return float(self.scale.log().sum())

    @property
    def mean(self) -> Tensor:
        return self._out(self.base.mean)

    @property
    def mode(self) -> Tensor:
        return self._out(self.base.mode)

    def _squared(self, part: Tensor) -> Tensor:
        return part * self.scale.to(part) ** 2

    @property
    def variance(self) -> Tensor:
        return self._squared(self.base.variance)

    @property
    def stddev(self) -> Tensor:
        deviation: Tensor = self.base.stddev
        return deviation * self.scale.to(deviation)

    @property
    def covariance(self) -> Tensor:
        """(N, D, D), for D targets."""
        base: Tensor = self.base.covariance
        scale = self.scale.to(base)
        return base * scale[:, None] * scale[None, :]

    @property
    def epistemic(self) -> Tensor:
        return self._squared(self.base.epistemic)

    @property
    def aleatoric(self) -> Tensor:
        return self._squared(self.base.aleatoric)

    @property
    def mass(self) -> Tensor:
        """The same in every unit."""
        mass: Tensor = self.base.mass
        return mass

    def log_prob(self, y: Any) -> Tensor:
        return self.base.log_prob(self._in(y)) - self._log_scale  # type: ignore[no-any-return]

    def cdf(self, y: Any) -> Tensor:
        value: Tensor = self.base.cdf(self._in(y))
        return value

    def icdf(self, q: Any) -> Tensor:
        z: Tensor = self.base.icdf(q)
        return self._trailing(z) if as_tensor(q).dim() else self._out(z)

    def interval(self, level: float = 0.95) -> Tensor:
        return self._trailing(self.base.interval(level))

    def hdr(self, level: float = 0.95) -> Regions | Ellipsoid:
        region = self.base.hdr(level)
        if isinstance(region, Regions):
            return Regions(self._out(region.lower), self._out(region.upper))
        if isinstance(region, Ellipsoid):
            return Ellipsoid(self._out(region.centre), self.covariance, region.squared_radius)
        return region.moved(self.shift, self.scale)  # type: ignore[no-any-return]

    def sample(self, n: int, generator: torch.Generator | None = None) -> Tensor:
        return self._out(self.base.sample(n, generator))

    def increments(self, y: Any) -> Increments:
        """Those of the base; the change of units is counted with the likelihood."""
        parts: Increments = self.base.increments(self._in(y))
        return replace(parts, likelihood=parts.likelihood - self._log_scale)


def affine(predictive: Predictive, shift: Any, scale: Any) -> AffinePredictive:
    """The predictive of shift + scale · y, for continuous targets: un-standardises a distribution exactly.

    >>> affine(post.predict(x), shift=y.mean(), scale=y.std())      # doctest: +SKIP
    """
    kind = kind_of(predictive)
    if kind not in ("scalar", "vector"):
        raise TypeError(f"Only continuous targets can be shifted and scaled, but this predictive is of kind {kind!r}.")
    a, b = (as_tensor(value).to("cpu", torch.float64) for value in (shift, scale))
    finite("shift", a, "Give finite numbers.")
    positive("scale", b)
    allowed = (0, 1) if kind == "vector" else (0,)
    if a.dim() not in allowed or b.dim() not in allowed:
        raise ValueError(
            f"shift and scale must be numbers{' or one number for each target' if kind == 'vector' else ''}, but have shapes "
            f"{tuple(a.shape)} and {tuple(b.shape)}."
        )
    if kind == "vector":
        size = predictive.mean.shape[1]
        a, b = a.expand(size), b.expand(size)
    step = torch.finfo(predictive.mass.dtype).eps * a.abs()
    if bool((step > COARSE * b * predictive.stddev.to("cpu", torch.float64)).any()):  # the sum needs digits that the base lacks
        predictive = in_double(predictive)
    return AffinePredictive(predictive, a, b)
