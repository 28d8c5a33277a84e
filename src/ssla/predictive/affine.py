"""The predictive of shift + scale · y, exactly: a target in another unit of measurement.

z is the target in the unit of the base law, and y = shift + scale · z the target in the new unit.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, final

import torch
from torch import Tensor

from ssla._checks import check_finite, check_positive, in_plain_torch
from ssla.data import as_tensor
from ssla.maths.quadrature import Regions
from ssla.predictive.gaussian_law import Ellipsoid
from ssla.predictive.law import Law
from ssla.predictive.mixture_laws import DensityRegion
from ssla.predictive.predictive import Predictive
from ssla.refit.increments import Increments
from ssla.values import COARSE

SCALAR = "scalar"
VECTOR = "vector"


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
        """Return the kind of the base, "scalar" or "vector"."""
        return self.base.kind

    @property
    def rows(self) -> int:
        """Return N, the number of inputs."""
        return self.base.rows

    def _to_y(self, z: Tensor) -> Tensor:
        """Return y = shift + scale · z, in the new unit and of z's shape, (N, …) or (N, …, D)."""
        return self._broadcast_shift(z) + self.scale * z

    def _to_z(self, y: Tensor) -> Tensor:
        """Return z = (y − shift)/scale in the base's unit, of y's shape (N, …) or (N, …, D)."""
        return (y - self._broadcast_shift(y)) / self.scale

    def _broadcast_shift(self, values: Tensor) -> Tensor:
        """Return the shift in a shape that broadcasts with values (N, …) or (N, …, D).

        A shift by row (N,) is along the first dimension of the values, one by target (D,) along
        the last.
        """
        by_row = self.shift.dim() == 1 and self.kind == SCALAR
        return self.shift.reshape(-1, *[1] * (values.dim() - 1)) if by_row else self.shift

    @property
    def _log_scale(self) -> float:
        """Return log |det dy/dz|: the sum of log scale over the targets."""
        return float(self.scale.log().sum())

    @property
    def mean(self) -> Tensor:
        """Return shift + scale · E[z], (N,) or (N, D)."""
        return self._to_y(self.base.mean)

    @property
    def mode(self) -> Tensor:
        """Return the y of highest density, (N,) or (N, D): the mode of the base in the new unit."""
        return self._to_y(self.base.mode)

    @property
    def variance(self) -> Tensor:
        """Return scale² · Var[z], (N,) or (N, D)."""
        return self.base.variance * self.scale**2

    @property
    def stddev(self) -> Tensor:
        """Return the standard deviation in the new unit, (N,) or (N, D)."""
        return self.base.stddev * self.scale

    @property
    def covariance(self) -> Tensor:
        """Return the covariance of the targets in the new unit (N, D, D).

        Raises AttributeError where the base has no covariance.
        """
        scale = self.scale.reshape(-1)
        return self.base.covariance * scale[:, None] * scale[None, :]

    @property
    def epistemic(self) -> Tensor:
        """Return the epistemic variance in the new unit, (N,) or (N, D)."""
        return self.base.epistemic * self.scale**2

    @property
    def aleatoric(self) -> Tensor:
        """Return the aleatoric variance in the new unit, (N,) or (N, D)."""
        return self.base.aleatoric * self.scale**2

    @property
    def mass(self) -> Tensor:
        """Return the mass of the base (N,), which does not depend on the unit."""
        return self.base.mass

    def check(self, y: Tensor) -> None:
        """Raise ValueError where y is outside the support of the base."""
        self.base.check(self._to_z(y))

    def log_prob(self, y: Tensor) -> Tensor:
        """Return log p(z) − Σ log scale, of the shape that the base returns."""
        return self.base.log_prob(self._to_z(y)) - self._log_scale

    def cdf(self, y: Tensor) -> Tensor:
        """Return P(Y ≤ y), of y's shape."""
        return self.base.cdf(self._to_z(y))

    def below(self, y: Tensor) -> Tensor:
        """Return P(Y < y), of y's shape."""
        return self.base.below(self._to_z(y))

    def icdf(self, q: Tensor) -> Tensor:
        """Return the quantiles at q (k,): (N, k) or (N, D, k)."""
        # The quantiles are the last dimension, so shift and scale get a last dimension of one.
        return self.shift[..., None] + self.scale[..., None] * self.base.icdf(q)

    def hdr(self, level: float) -> Regions | Ellipsoid | DensityRegion:
        """Return the smallest region with probability `level`, of the type of the base's region."""
        region = self.base.hdr(level)
        if isinstance(region, Regions):
            return Regions(self._to_y(region.lower), self._to_y(region.upper))
        if isinstance(region, Ellipsoid):
            return Ellipsoid(self._to_y(region.centre), self.covariance, region.squared_radius)
        # The log density is lower by log scale everywhere, and the threshold with it.
        return DensityRegion(self, region.threshold - self._log_scale)

    def sample(self, n: int, generator: torch.Generator | None) -> Tensor:
        """Draw n values for each input: (n, N) or (n, N, D)."""
        return self.shift + self.scale * self.base.sample(n, generator)

    def increments(self, y: Tensor) -> Increments:
        """Return the increments of the base at y, of log_prob's shape.

        The likelihood increment contains the change of units, −Σ log scale.
        """
        increments = self.base.increments(self._to_z(y))
        return replace(increments, likelihood=increments.likelihood - self._log_scale)


@in_plain_torch
def affine(predictive: Predictive, shift: Any, scale: Any) -> Predictive:
    """Return the predictive of shift + scale · y for continuous targets, without approximation.

    For example, this undoes a standardisation of y.

    shift, scale: numbers, or one for each of D targets; for one target shift may also be one number
    for each row (N,). scale must be positive. Answers are in float64 where the dtype of the
    predictive cannot hold the sum. Raises TypeError for other targets, and ValueError for other
    shapes and for numbers that are not finite or not positive.

    >>> affine(post.predict(x), shift=y.mean(), scale=y.std())      # doctest: +SKIP
    """
    kind = predictive.kind
    law = predictive.law
    like = predictive.like
    if kind not in (SCALAR, VECTOR):
        raise TypeError(
            "Only continuous targets can be shifted and scaled, but this predictive is of kind "
            f"{kind!r}."
        )

    shift, scale = (as_tensor(value).to("cpu", torch.float64) for value in (shift, scale))
    check_finite("shift", shift, "Give finite numbers.")
    check_positive("scale", scale)
    _check_shapes(law, shift, scale)
    if kind == VECTOR:
        shift, scale = (value.expand(law.mean.shape[1]) for value in (shift, scale))

    # The sum needs more digits where the rounding of the shift is large beside the spread of y.
    rounding = torch.finfo(like.dtype).eps * shift.abs()
    is_coarse = bool((rounding > COARSE * scale * law.stddev).any())
    like = like.double() if is_coarse else like

    # The parts (members of a mixture) are in the old unit.
    return replace(predictive, law=AffineLaw(law, shift, scale), like=like, parts=())


def _check_shapes(law: Law, shift: Tensor, scale: Tensor) -> None:
    """Raise ValueError unless shift and scale have a shape that `affine` allows for this law."""
    is_shift_by_row = law.kind == SCALAR and shift.shape == (law.rows,)
    allowed_dimensions = (0, 1) if law.kind == VECTOR else (0,)
    shift_fits = shift.dim() in allowed_dimensions or is_shift_by_row
    if not shift_fits or scale.dim() not in allowed_dimensions:
        more = (
            " or one number for each target"
            if law.kind == VECTOR
            else f" (shift also one for each of {law.rows} rows)"
        )
        raise ValueError(
            f"shift and scale must be numbers{more}, but have shapes {tuple(shift.shape)} and "
            f"{tuple(scale.shape)}."
        )
