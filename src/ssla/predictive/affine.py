"""Another unit of measurement: the predictive of shift + scale · y, exactly."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, final

import torch
from torch import Tensor

from ssla._checks import finite, in_plain_torch, positive
from ssla.data import as_tensor
from ssla.maths.quadrature import Regions
from ssla.predictive.gaussian_law import Ellipsoid
from ssla.predictive.law import Law
from ssla.predictive.mixture_laws import DensityRegion
from ssla.predictive.predictive import Predictive
from ssla.refit.increments import Increments
from ssla.values import COARSE

SCALAR = "scalar"


@final
@dataclass(frozen=True, eq=False)
class AffineLaw(Law):
    """y = shift + scale · z with z ~ base and scale > 0: log p(y) = log p(z) − Σ log scale.

    shift and scale are numbers () for one target, (D,) for D of them. For one target shift may be
    (N,), one for each row. Made by `affine`.
    """

    base: Law
    shift: Tensor
    scale: Tensor

    @property
    def kind(self) -> str:
        return self.base.kind

    @property
    def rows(self) -> int:
        return self.base.rows

    def _out(self, z: Tensor) -> Tensor:
        """z (N, …, [D]) -> y."""
        return self._shift(z) + self.scale * z

    def _shift(self, z: Tensor) -> Tensor:
        """The shift to add to z (N, …, [D])."""
        by_row = self.shift.dim() == 1 and self.kind == SCALAR
        return self.shift.reshape(-1, *[1] * (z.dim() - 1)) if by_row else self.shift

    def _trailing(self, z: Tensor) -> Tensor:
        """z (N, [D], k) -> y: quantiles come after the targets."""
        return self.shift[..., None] + self.scale[..., None] * z

    def _in(self, y: Tensor) -> Tensor:
        return (y - self._shift(y)) / self.scale

    @property
    def _log_scale(self) -> float:
        return float(self.scale.log().sum())

    @property
    def mean(self) -> Tensor:
        return self._out(self.base.mean)

    @property
    def mode(self) -> Tensor:
        return self._out(self.base.mode)

    @property
    def variance(self) -> Tensor:
        return self.base.variance * self.scale**2

    @property
    def stddev(self) -> Tensor:
        return self.base.stddev * self.scale

    @property
    def covariance(self) -> Tensor:
        scale = self.scale.reshape(-1)
        return self.base.covariance * scale[:, None] * scale[None, :]

    @property
    def epistemic(self) -> Tensor:
        return self.base.epistemic * self.scale**2

    @property
    def aleatoric(self) -> Tensor:
        return self.base.aleatoric * self.scale**2

    @property
    def mass(self) -> Tensor:
        """The same in every unit."""
        return self.base.mass

    def check(self, y: Tensor) -> None:
        self.base.check(self._in(y))

    def log_prob(self, y: Tensor) -> Tensor:
        return self.base.log_prob(self._in(y)) - self._log_scale

    def cdf(self, y: Tensor) -> Tensor:
        return self.base.cdf(self._in(y))

    def below(self, y: Tensor) -> Tensor:
        return self.base.below(self._in(y))

    def icdf(self, q: Tensor) -> Tensor:
        return self._trailing(self.base.icdf(q))

    def hdr(self, level: float) -> Regions | Ellipsoid | DensityRegion:
        region = self.base.hdr(level)
        if isinstance(region, Regions):
            return Regions(self._out(region.lower), self._out(region.upper))
        if isinstance(region, Ellipsoid):
            return Ellipsoid(self._out(region.centre), self.covariance, region.squared_radius)
        return DensityRegion(self, region.threshold - self._log_scale)

    def sample(self, n: int, generator: torch.Generator | None) -> Tensor:
        return self.shift + self.scale * self.base.sample(n, generator)

    def increments(self, y: Tensor) -> Increments:
        """Those of the base; the change of units is counted with the likelihood."""
        parts = self.base.increments(self._in(y))
        return replace(parts, likelihood=parts.likelihood - self._log_scale)


@in_plain_torch
def affine(predictive: Predictive, shift: Any, scale: Any) -> Predictive:
    """The predictive of shift + scale · y, for continuous targets: un-standardises a distribution
    exactly.

    One target: shift may be one number for each row (N,). Answers are in float64 where the dtype of
    the predictive cannot hold the sum.

    >>> affine(post.predict(x), shift=y.mean(), scale=y.std())      # doctest: +SKIP
    """
    kind, law, like = predictive.kind, predictive.law, predictive.like
    if kind not in (SCALAR, "vector"):
        raise TypeError(
            "Only continuous targets can be shifted and scaled, but this predictive is of kind "
            f"{kind!r}."
        )
    a, b = (as_tensor(value).to("cpu", torch.float64) for value in (shift, scale))
    finite("shift", a, "Give finite numbers.")
    positive("scale", b)
    by_row = kind == SCALAR and a.shape == (law.rows,)
    allowed = (0, 1) if kind == "vector" else (0,)
    if not (a.dim() in allowed or by_row) or b.dim() not in allowed:
        more = (
            " or one number for each target"
            if kind == "vector"
            else f" (shift also one for each of {law.rows} rows)"
        )
        raise ValueError(
            f"shift and scale must be numbers{more}, but have shapes {tuple(a.shape)} and "
            f"{tuple(b.shape)}."
        )
    if kind == "vector":
        a, b = (value.expand(law.mean.shape[1]) for value in (a, b))
    step = torch.finfo(like.dtype).eps * a.abs()
    coarse = bool(
        (step > COARSE * b * law.stddev).any()
    )  # the sum needs digits that the dtype lacks
    return replace(
        predictive, law=AffineLaw(law, a, b), like=like.double() if coarse else like, parts=()
    )
