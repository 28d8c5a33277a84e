"""What is noticed on the way: constant columns and targets, a residual gradient, progress."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from ssla.batches import Batch, Source
from ssla.posterior import AS_IS, POLISH, TILT, Report

T = TypeVar("T")
WARN_AS_IS = 0.1  # posterior standard deviations per parameter
WARN_TILT = 10.0


@dataclass(frozen=True, eq=False)
class TargetRange:
    """Watches for constant targets and input columns."""

    low: Tensor | None = None
    high: Tensor | None = None
    x_low: Tensor | None = None
    x_high: Tensor | None = None
    rows: int = 0

    def see(self, y: Tensor, x: Any) -> TargetRange:
        inside = isinstance(x, Tensor) and x.dim() == 2 and x.is_floating_point()
        x_low, x_high = (x.amin(0), x.amax(0)) if inside else (None, None)
        return self.merge(TargetRange(y.amin(0), y.amax(0), x_low, x_high, y.shape[0]))

    def merge(self, other: TargetRange) -> TargetRange:
        return TargetRange(
            _either(torch.minimum, self.low, other.low),
            _either(torch.maximum, self.high, other.high),
            _either(torch.minimum, self.x_low, other.x_low),
            _either(torch.maximum, self.x_high, other.x_high),
            self.rows + other.rows,
        )

    def note(self, notes: list[str]) -> None:
        if self.rows == 1:
            notes.append("only one row was seen: the posterior is almost the prior")
            warnings.warn("The data hold one row only, so the posterior is almost the prior.", UserWarning, stacklevel=4)
            return
        numbers = self.low is not None and self.low.is_floating_point()
        if numbers and self.low is not None and self.high is not None and bool((self.low == self.high).any()):
            notes.append("the target is constant: nothing can be learned about its noise")
            warnings.warn("The target is constant: nothing can be learned about its noise.", UserWarning, stacklevel=4)
        if self.x_low is not None and self.x_high is not None:
            constant = (self.x_low == self.x_high).nonzero().flatten().tolist()
            if constant and len(constant) < self.x_low.numel():
                notes.append(f"constant input columns: {', '.join(map(str, constant))}")


def _either(choose: Callable[[Tensor, Tensor], Tensor], a: Tensor | None, b: Tensor | None) -> Tensor | None:
    if a is None or b is None:
        return b if a is None else a
    return choose(a, b)


def warn_residual(report: Report) -> None:
    limit = {AS_IS: WARN_AS_IS, TILT: WARN_TILT, POLISH: math.inf}[report.mode]
    if report.residual_per_parameter > limit:
        remedy = {
            AS_IS: "Train further, or use mode='polish' or mode='tilt'.",
            TILT: "The network is far from trained under this prior: train further or weaken the prior.",
            POLISH: "",
        }[report.mode]
        warnings.warn(
            f"The network is not at the mode: its residual gradient is {report.residual:.3g} posterior standard deviations "
            f"({report.residual_per_parameter:.2g} per parameter). {remedy}",
            UserWarning,
            stacklevel=4,
        )


def bar(source: Source, length: int | None, show: bool, label: str) -> Iterable[Batch]:
    return progress_bar(source, length, show, label, "batch")


def progress_bar(items: Iterable[T], length: int | None, show: bool, label: str, unit: str) -> Iterable[T]:
    """The items, with a bar if it is to be shown."""
    if not show:
        return items
    try:
        from tqdm.auto import tqdm
    except ImportError:
        raise ImportError("progress=True needs tqdm: pip install 'ssla[progress]'.") from None
    shown: Iterable[T] = tqdm(items, total=length, desc=label, unit=unit)
    return shown
