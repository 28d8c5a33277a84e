"""Rows of several predictives of the same kind as one predictive, in the order of the inputs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ssla.numerics.quadrature import Regions
from ssla.predictive.predictive import Diagnostics, Predictive, answer, kind_of, scalar_targets
from ssla.refit.increments import Increments


@dataclass(frozen=True, eq=False)
class Joined:
    """Each part answers for its rows (indices into the N inputs): numbers, counts or classes. Made by `joined`."""

    parts: tuple[Any, ...]
    rows: tuple[Tensor, ...]

    @property
    def kind(self) -> str:
        return kind_of(self.parts[0])

    def put(self, answers: Sequence[Tensor], dim: int = 0) -> Tensor:
        """One answer a part, in the order of the inputs along a dimension; trailing sizes padded with NaN."""
        if len({part.shape[-1] for part in answers}) > 1 and dim < answers[0].dim() - 1:
            most = max(part.shape[-1] for part in answers)
            answers = [torch.nn.functional.pad(part, (0, most - part.shape[-1]), value=torch.nan) for part in answers]
        order = torch.cat(self.rows).argsort()
        return torch.cat(list(answers), dim).index_select(dim, order.to(answers[0].device))

    def _each(self, ask: Callable[[Any], Tensor]) -> Tensor:
        return self.put([ask(part) for part in self.parts])

    def _at(self, y: Any, ask: Callable[[Any, Tensor], Tensor]) -> Tensor:
        value, single = scalar_targets(y, sum(len(rows) for rows in self.rows))
        found = [ask(part, value[rows]) for part, rows in zip(self.parts, self.rows, strict=True)]
        return answer(self.put(found), single)

    @property
    def diagnostics(self) -> Diagnostics:
        found = [part.diagnostics for part in self.parts]
        fallback, unconverged, inaccurate = (
            self.put([getattr(one, flag) for one in found]) for flag in ("fallback", "unconverged", "inaccurate")
        )
        names = ", ".join(dict.fromkeys(one.refit for one in found))
        return Diagnostics(names, fallback, unconverged, inaccurate, found[0].convention)

    @property
    def mean(self) -> Tensor:
        return self._each(lambda p: p.mean)

    @property
    def variance(self) -> Tensor:
        return self._each(lambda p: p.variance)

    @property
    def stddev(self) -> Tensor:
        return self._each(lambda p: p.stddev)

    @property
    def mode(self) -> Tensor:
        return self._each(lambda p: p.mode)

    @property
    def probs(self) -> Tensor:
        """(N, C), for classes."""
        return self._each(lambda p: p.probs)

    @property
    def mass(self) -> Tensor:
        return self._each(lambda p: p.mass)

    @property
    def epistemic(self) -> Tensor:
        return self._each(lambda p: p.epistemic)

    @property
    def aleatoric(self) -> Tensor:
        return self._each(lambda p: p.aleatoric)

    def log_prob(self, y: Any) -> Tensor:
        return self._at(y, lambda p, value: p.log_prob(value))

    def cdf(self, y: Any) -> Tensor:
        return self._at(y, lambda p, value: p.cdf(value))

    def icdf(self, q: Any) -> Tensor:
        return self._each(lambda p: p.icdf(q))

    def interval(self, level: float = 0.95) -> Tensor:
        return self._each(lambda p: p.interval(level))

    def hdr(self, level: float = 0.95) -> Any:
        found = [part.hdr(level) for part in self.parts]
        if self.kind == "class":
            return self.put(found)
        return Regions(self.put([one.lower for one in found]), self.put([one.upper for one in found]))

    def sample(self, n: int, generator: torch.Generator | None = None) -> Tensor:
        return self.put([part.sample(n, generator) for part in self.parts], 1)

    def increments(self, y: Any) -> Increments:
        raise TypeError(
            "These rows come from several predictives. Ask them one by one: [part.increments(y) for part in p.parts]."
        )


def joined(parts: Sequence[Predictive], rows: Sequence[Tensor]) -> Predictive:
    """rows: for each part the indices of its inputs; together 0 … N − 1, each once."""
    return parts[0] if len(parts) == 1 else Joined(tuple(parts), tuple(rows))
