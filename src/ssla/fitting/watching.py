"""What is noticed on the way: constant columns and targets, a residual gradient, progress."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from ssla._checks import warn
from ssla.data import Batch, Source
from ssla.fitting.trained import Classes, Numbers
from ssla.maths.progress import progress_bar
from ssla.report import AS_IS, DATA, POLISH, TILT, Note, Report

T = TypeVar("T")
WARN_AS_IS = 0.1  # posterior standard deviations per parameter
WARN_TILT = 10.0
LEAST_SHARE = (
    0.5  # of the rows with a positive weight: a smaller sum of weights cannot be one of frequencies
)
WARN_RATIO = 2.0  # residuals over the spread of y; of an untrained network about 1


@dataclass(frozen=True, eq=False)
class Spread:
    """Numbers y beside the outputs f that predict them: whether their scales belong together,
    and what rounding hides.
    """

    weight: float
    mean: Tensor  # of y (C,)
    squares: Tensor  # Σ w (y − mean)² (C,)
    missed: Tensor  # Σ w (y − f)² (C,)
    grain_y: (
        Tensor  # the rounding steps ε|y| and ε|f| in the dtypes they came in, at their largest (C,)
    )
    grain_f: Tensor

    @staticmethod
    def of(y: Tensor, f: Tensor, weights: Tensor | None, grain_y: float, grain_f: Tensor) -> Spread:
        y = y.reshape(f.shape)
        w = torch.ones_like(y[:, :1]) if weights is None else weights[:, None]
        total = float(w.sum())
        mean = (w * y).sum(0) / max(total, 1e-300)
        missed, squares = (w * (y - f) ** 2).sum(0), (w * (y - mean) ** 2).sum(0)
        return Spread(
            total, mean, squares, missed, grain_y * y.abs().amax(0), grain_f.amax(0).double()
        )

    def merge(self, other: Spread) -> Spread:
        weight = self.weight + other.weight
        step, share = other.mean - self.mean, other.weight / max(weight, 1e-300)
        return Spread(
            weight,
            self.mean + share * step,
            self.squares + other.squares + self.weight * share * step**2,
            self.missed + other.missed,
            torch.maximum(self.grain_y, other.grain_y),
            torch.maximum(self.grain_f, other.grain_f),
        )

    def warn_scale(self, missed: Tensor, notes: list[str]) -> None:
        """Where the residuals are far larger than the targets' own spread: a network that is
        only poor has about their spread.
        """
        ratio = (missed / self.squares.clamp_min(1e-300)).sqrt()
        worst = int(ratio.argmax())
        if float(ratio[worst]) <= WARN_RATIO or not float(self.squares[worst]) > 0:
            return
        off, sd = ((part[worst] / self.weight).sqrt() for part in (missed, self.squares))
        message = (
            f"The residuals are {float(ratio[worst]):.3g} times as large as the spread of the "
            f"targets (root mean square {float(off):.3g}, standard deviation {float(sd):.3g}): a "
            "constant would predict better. Likely causes: (a) the network was trained on targets "
            "of another scale or unit (standardised, a logarithm): give y as in training, and "
            "change the predictive back by ssla.predictive.affine(predictive, shift, scale); (b) "
            "a strong prior in conflict with the data: see ssla.conflict(posterior)."
        )
        notes.append(Note(message, DATA))
        warn(message)

    def warn_rounding(self, noise: Tensor, dtype: torch.dtype, notes: list[str]) -> None:
        """Warn if the noise (C,) is below the rounding error of y or of the network's outputs."""
        for what, grain, remedy in (
            ("the targets, in the dtype they were given in", self.grain_y, "Give y in float64"),
            (
                f"the network's outputs, in {str(dtype).removeprefix('torch.')}",
                self.grain_f,
                "Use model.double()",
            ),
        ):
            if bool((noise < grain).any()):
                worst = int((grain / noise).argmax())
                message = (
                    f"The noise ({float(noise[worst]):.3g}) is finer than the rounding of {what} "
                    f"({float(grain[worst]):.3g}): means and widths are wrong by about that much. "
                    f"{remedy}, or subtract an offset from y before training."
                )
                notes.append(message)
                warn(message)


@dataclass(frozen=True, eq=False)
class TargetRange:
    """Watches for constant targets and input columns, for targets on another scale than the
    outputs, and counts classes.
    """

    low: Tensor | None = None
    high: Tensor | None = None
    x_low: Tensor | None = None
    x_high: Tensor | None = None
    rows: int = 0
    spread: Spread | None = None
    classes: Classes | None = None
    numbers: Numbers | None = None
    weighted: int = 0  # rows with a positive weight
    weight: float = 0.0  # of all rows

    def see(
        self,
        y: Tensor,
        x: Any,
        spread: Spread | None,
        classes: Classes | None,
        numbers: Numbers | None = None,
        weights: Tensor | None = None,
    ) -> TargetRange:
        inside = isinstance(x, Tensor) and x.dim() == 2 and x.is_floating_point()
        x_low, x_high = (x.amin(0), x.amax(0)) if inside else (None, None)
        rows = y.shape[0]
        weighted, weight = (
            (rows, float(rows))
            if weights is None
            else (int((weights > 0).sum()), float(weights.sum()))
        )
        return self.merge(
            TargetRange(
                y.amin(0),
                y.amax(0),
                x_low,
                x_high,
                rows,
                spread,
                classes,
                numbers,
                weighted,
                weight,
            ),
        )

    def merge(self, other: TargetRange) -> TargetRange:
        return TargetRange(
            _either(torch.minimum, self.low, other.low),
            _either(torch.maximum, self.high, other.high),
            _either(torch.minimum, self.x_low, other.x_low),
            _either(torch.maximum, self.x_high, other.x_high),
            self.rows + other.rows,
            _either(Spread.merge, self.spread, other.spread),
            _either(Classes.merge, self.classes, other.classes),
            _either(Numbers.merge, self.numbers, other.numbers),
            self.weighted + other.weighted,
            self.weight + other.weight,
        )

    def warn_weights(self, notes: list[str]) -> None:
        """Warn where the row weights sum to less than half of the rows that have one: they
        cannot be frequencies.
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

    def note(self, notes: list[str]) -> None:
        self.warn_weights(notes)
        if self.rows == 1:
            notes.append(Note("only one row was seen: the posterior is almost the prior", DATA))
            warn("The data hold one row only, so the posterior is almost the prior.")
            return
        numbers = self.low is not None and self.low.is_floating_point()
        if (
            numbers
            and self.low is not None
            and self.high is not None
            and bool((self.low == self.high).any())
        ):
            notes.append(
                Note("the target is constant: nothing can be learned about its noise", DATA)
            )
            warn("The target is constant: nothing can be learned about its noise.")
        if self.x_low is not None and self.x_high is not None:
            constant = (self.x_low == self.x_high).nonzero().flatten().tolist()
            if constant and len(constant) < self.x_low.numel():
                notes.append(Note(f"constant input columns: {', '.join(map(str, constant))}", DATA))


def _either(choose: Callable[[T, T], T], a: T | None, b: T | None) -> T | None:
    if a is None or b is None:
        return b if a is None else a
    return choose(a, b)


def warn_residual(report: Report) -> None:
    limit = {AS_IS: WARN_AS_IS, TILT: WARN_TILT, POLISH: math.inf}[report.mode]
    if report.residual_per_parameter > limit:
        remedy = {
            AS_IS: "Train further, or use mode='polish' or mode='tilt'.",
            TILT: "The network is far from trained under this prior: train further or weaken the "
            "prior.",
            POLISH: "",
        }[report.mode]
        warn(
            f"The network is not at the mode: its residual gradient is {report.residual:.3g} "
            f"posterior standard deviations ({report.residual_per_parameter:.2g} per parameter). "
            f"{remedy}"
        )


def bar(source: Source, length: int | None, show: bool | None, label: str) -> Iterable[Batch]:
    return progress_bar(source, length, show, label, "batch")
