"""What is noticed on the way: constant columns and targets, a residual gradient, progress."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ssla.batches import Batch, Source
from ssla.posterior import AS_IS, POLISH, TILT, Report

WARN_AS_IS = 0.1  # posterior standard deviations per parameter
WARN_TILT = 10.0


@dataclass(eq=False)
class TargetRange:
    """Watches for constant targets and input columns."""

    low: Tensor | None = None
    high: Tensor | None = None
    x_low: Tensor | None = None
    x_high: Tensor | None = None
    rows: int = 0

    def see(self, y: Tensor, x: Any) -> None:
        self.rows += y.shape[0]
        self.low, self.high = _extend(self.low, self.high, y)
        if isinstance(x, Tensor) and x.dim() == 2 and x.is_floating_point():
            self.x_low, self.x_high = _extend(self.x_low, self.x_high, x)

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


def _extend(low: Tensor | None, high: Tensor | None, values: Tensor) -> tuple[Tensor, Tensor]:
    least, most = values.amin(0), values.amax(0)
    if low is None or high is None:
        return least, most
    return torch.minimum(low, least), torch.maximum(high, most)


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
    if not show:
        return source
    try:
        from tqdm.auto import tqdm
    except ImportError:
        raise ImportError("progress=True needs tqdm: pip install 'ssla[progress]'.") from None
    bar: Iterable[Batch] = tqdm(source, total=length, desc=label, unit="batch")
    return bar
