"""What a fit warns of: constant columns and targets, scales, weights, a residual gradient.

`Spread` and `TargetRange` are sums and ranges that a pass collects chunk by chunk; those of chunks
and shards merge. Notes are texts for the report, and the methods `warn_…` append to a list of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from ssla._checks import warn
from ssla.fitting.trained import Classes, Numbers
from ssla.report import AS_IS, DATA, POLISH, TILT, Note, Report

T = TypeVar("T")
SMALLEST_DIVISOR = 1e-300  # takes the place of zero
# The limits below were not measured: they are guesses.
WARN_AS_IS = 0.1  # posterior standard deviations per parameter
WARN_TILT = 10.0
# of the rows with a positive weight: a smaller sum of weights cannot be one of frequencies
LEAST_SHARE = 0.5
WARN_RATIO = 2.0  # residuals over the spread of y; of an untrained network about 1


@dataclass(frozen=True, eq=False)
class Spread:
    """Sums that show whether targets y and outputs f have one scale, and how much rounding hides.

    C is the number of outputs, each of which predicts one target.
    """

    weight: float
    mean: Tensor  # of y (C,)
    squares: Tensor  # Σ w (y − mean)² (C,)
    missed: Tensor  # Σ w (y − f)² (C,)
    # the rounding steps ε|y| and ε|f| in the dtypes they came in, at their largest (C,)
    rounding_y: Tensor
    rounding_f: Tensor

    @staticmethod
    def from_chunk(
        y: Tensor, f: Tensor, weights: Tensor | None, epsilon_y: float, rounding_f: Tensor
    ) -> Spread:
        """Return the spread of one chunk of B rows.

        y: targets (B,) or (B, C). f: outputs (B, C). weights (B,): of the rows; None: all ones.
        epsilon_y: ε of the dtype in which y came. rounding_f: the rounding error ε|f| (B, C).
        """
        y = y.reshape(f.shape)
        w = torch.ones_like(y[:, :1]) if weights is None else weights[:, None]  # (B, 1)
        total = float(w.sum())
        mean = (w * y).sum(0) / max(total, SMALLEST_DIVISOR)
        return Spread(
            weight=total,
            mean=mean,
            squares=(w * (y - mean) ** 2).sum(0),
            missed=(w * (y - f) ** 2).sum(0),
            rounding_y=epsilon_y * y.abs().amax(0),
            rounding_f=rounding_f.amax(0).double(),
        )

    def merge(self, other: Spread) -> Spread:
        """Return the spread of both sets of rows."""
        weight = self.weight + other.weight
        # Squares around the common mean: those within each set, and those between the two means.
        step = other.mean - self.mean
        share = other.weight / max(weight, SMALLEST_DIVISOR)
        return Spread(
            weight,
            self.mean + share * step,
            self.squares + other.squares + self.weight * share * step**2,
            self.missed + other.missed,
            torch.maximum(self.rounding_y, other.rounding_y),
            torch.maximum(self.rounding_f, other.rounding_f),
        )

    def warn_scale(self, missed: Tensor, notes: list[str]) -> None:
        """Warn where the residuals are far larger than the targets' own spread.

        missed (C,): the squared residuals of each output. The warning is appended to `notes`. A
        network that has learned nothing has residuals of about the targets' spread.
        """
        ratio = (missed / self.squares.clamp_min(SMALLEST_DIVISOR)).sqrt()
        worst = int(ratio.argmax())
        if float(ratio[worst]) <= WARN_RATIO or not float(self.squares[worst]) > 0:
            return
        root_mean_square = (missed[worst] / self.weight).sqrt()
        sd = (self.squares[worst] / self.weight).sqrt()
        message = (
            f"The residuals are {float(ratio[worst]):.3g} times as large as the spread of the "
            f"targets (root mean square {float(root_mean_square):.3g}, standard deviation "
            f"{float(sd):.3g}): a "
            "constant would predict better. Likely causes: (a) the network was trained on targets "
            "of another scale or unit (standardised, a logarithm): give y as in training, and "
            "change the predictive back by ssla.predictive.affine(predictive, shift, scale); (b) "
            "a strong prior in conflict with the data: see ssla.conflict(posterior)."
        )
        notes.append(Note(message, DATA))
        warn(message)

    def warn_rounding(self, noise: Tensor, dtype: torch.dtype, notes: list[str]) -> None:
        """Warn if the noise (C,) is below the rounding error of y or of the network's outputs.

        The warning is appended to `notes`. dtype: that of the network.
        """
        outputs = f"the network's outputs, in {str(dtype).removeprefix('torch.')}"
        for rounded, rounding, remedy in (
            ("the targets, in the dtype they were given in", self.rounding_y, "Give y in float64"),
            (outputs, self.rounding_f, "Use model.double()"),
        ):
            if bool((noise < rounding).any()):
                worst = int((rounding / noise).argmax())
                message = (
                    f"The noise ({float(noise[worst]):.3g}) is finer than the rounding of "
                    f"{rounded} ({float(rounding[worst]):.3g}): means and widths are wrong by "
                    f"about that much. {remedy}, or subtract an offset from y before training."
                )
                notes.append(message)
                warn(message)


@dataclass(frozen=True, eq=False)
class TargetRange:
    """What a pass shows of targets and inputs: ranges, scales, classes and weights.

    The fields are None where a pass did not see what they are about, as the columns of inputs that
    are not a table. Those of chunks and shards merge.
    """

    low: Tensor | None = None  # the smallest and the largest target
    high: Tensor | None = None
    x_low: Tensor | None = None  # of each input column (D,), for tables
    x_high: Tensor | None = None
    rows: int = 0
    spread: Spread | None = None
    classes: Classes | None = None
    numbers: Numbers | None = None
    weighted: int = 0  # rows with a positive weight
    weight: float = 0.0  # of all rows

    @staticmethod
    def from_chunk(
        y: Tensor,
        x: Any,
        spread: Spread | None,
        classes: Classes | None,
        numbers: Numbers | None = None,
        weights: Tensor | None = None,
    ) -> TargetRange:
        """Return the range of one chunk of B rows.

        y: targets (B,) or (B, C). x: the inputs as they came; only the columns of a table (B, D) of
        floats have a range. spread, classes, numbers: of the same rows. weights (B,): of the rows;
        None: all ones.
        """
        table = isinstance(x, Tensor) and x.dim() == 2 and x.is_floating_point()
        rows = y.shape[0]
        return TargetRange(
            y.amin(0),
            y.amax(0),
            x.amin(0) if table else None,
            x.amax(0) if table else None,
            rows,
            spread,
            classes,
            numbers,
            rows if weights is None else int((weights > 0).sum()),
            float(rows) if weights is None else float(weights.sum()),
        )

    def merge(self, other: TargetRange) -> TargetRange:
        """Return what both sets of rows show together."""
        return TargetRange(
            _combine_known(torch.minimum, self.low, other.low),
            _combine_known(torch.maximum, self.high, other.high),
            _combine_known(torch.minimum, self.x_low, other.x_low),
            _combine_known(torch.maximum, self.x_high, other.x_high),
            self.rows + other.rows,
            _combine_known(Spread.merge, self.spread, other.spread),
            _combine_known(Classes.merge, self.classes, other.classes),
            _combine_known(Numbers.merge, self.numbers, other.numbers),
            self.weighted + other.weighted,
            self.weight + other.weight,
        )

    def warn_weights(self, notes: list[str]) -> None:
        """Warn where the row weights cannot be frequencies, because their sum is too small.

        It is too small below half of the number of rows with a positive weight. The warning is
        appended to `notes`.
        """
        if self.weight >= LEAST_SHARE * self.weighted:
            return
        message = (
            f"Row weights sum to {self.weight:.4g}, less than half of the {self.weighted:,} rows "
            "with a positive weight. They are used as frequencies (a weight of 2 is a row twice), "
            f"so the data count as {self.weight:.4g} rows and the posterior stays near its prior. "
            "If only their ratios matter, give weights / weights.mean()."
        )
        notes.append(Note(message, DATA))
        warn(message)

    @property
    def has_constant_target(self) -> bool:
        """Return whether a target of floats is the same in all rows.

        The result is False for integers, because one class alone does no harm.
        """
        if self.low is None or self.high is None or not self.low.is_floating_point():
            return False
        return bool((self.low == self.high).any())

    def warn_data(self, notes: list[str]) -> None:
        """Warn of data that determine little, and append the warnings to `notes`.

        Such data have small weights, only one row, or a constant target. Constant input columns are
        noted without a warning.
        """
        self.warn_weights(notes)
        if self.rows == 1:
            notes.append(Note("only one row was seen: the posterior is almost the prior", DATA))
            warn("The data hold one row only, so the posterior is almost the prior.")
            return
        if self.has_constant_target:
            notes.append(
                Note("the target is constant: nothing can be learned about its noise", DATA)
            )
            warn("The target is constant: nothing can be learned about its noise.")
        if self.x_low is not None and self.x_high is not None:
            constant = (self.x_low == self.x_high).nonzero().flatten().tolist()
            if constant and len(constant) < self.x_low.numel():
                notes.append(Note(f"constant input columns: {', '.join(map(str, constant))}", DATA))


def _combine_known(combine: Callable[[T, T], T], a: T | None, b: T | None) -> T | None:
    """Return combine(a, b); if one of the two is None, the other one, and None if both are."""
    if a is None or b is None:
        return b if a is None else a
    return combine(a, b)


def warn_residual(report: Report) -> None:
    """Warn where the trained weights are kept, although they are far from the mode.

    report: of the fit. A fit that polished its weights never warns here: `Polish` has warned.
    """
    limit = {AS_IS: WARN_AS_IS, TILT: WARN_TILT, POLISH: math.inf}[report.mode]
    if report.residual_per_parameter > limit:
        remedy = (
            "Train further, or use mode='polish' or mode='tilt'."
            if report.mode == AS_IS
            else "The network is far from trained under this prior: train further or weaken the "
            "prior."
        )
        warn(
            f"The network is not at the mode: its residual gradient is {report.residual:.3g} "
            f"posterior standard deviations ({report.residual_per_parameter:.2g} per parameter). "
            f"{remedy}"
        )
