"""Rows of several predictives of the same kind as one predictive, in the order of the inputs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor

from ssla.maths.quadrature import Regions
from ssla.predictive.law import Law
from ssla.predictive.predictive import FLAGS, Diagnostics, Predictive, widest
from ssla.refit.increments import Increments


@final
@dataclass(frozen=True, eq=False)
class JoinedLaw(Law):
    """Each law answers for its rows (indices into the N inputs): numbers, counts, vectors or
    classes. Made by `joined`.
    """

    laws: tuple[Law, ...]
    index: tuple[Tensor, ...]

    @property
    def kind(self) -> str:
        return self.laws[0].kind

    @property
    def rows(self) -> int:
        return sum(len(rows) for rows in self.index)

    def put(self, answers: Sequence[Tensor], dim: int = 0) -> Tensor:
        """One answer of each law, in the order of the inputs along a dimension; trailing sizes
        padded with NaN.
        """
        return _put(self.index, answers, dim)

    def _each(self, ask: Callable[[Law], Tensor]) -> Tensor:
        return self.put([ask(law) for law in self.laws])

    def at(self, y: Tensor, ask: Callable[[Law, Tensor], Tensor]) -> Tensor:
        """Ask every law with its rows of y (N, …)."""
        return self.put(
            [ask(law, y[rows]) for law, rows in zip(self.laws, self.index, strict=True)]
        )

    @property
    def mean(self) -> Tensor:
        return self._each(lambda law: law.mean)

    @property
    def variance(self) -> Tensor:
        return self._each(lambda law: law.variance)

    @property
    def stddev(self) -> Tensor:
        return self._each(lambda law: law.stddev)

    @property
    def covariance(self) -> Tensor:
        return self._each(lambda law: law.covariance)

    @property
    def mode(self) -> Tensor:
        return self._each(lambda law: law.mode)

    @property
    def probs(self) -> Tensor:
        return self._each(lambda law: law.probs)

    @property
    def mass(self) -> Tensor:
        return self._each(lambda law: law.mass)

    @property
    def epistemic(self) -> Tensor:
        return self._each(lambda law: law.epistemic)

    @property
    def aleatoric(self) -> Tensor:
        return self._each(lambda law: law.aleatoric)

    @property
    def entropy(self) -> Tensor:
        return self._each(lambda law: law.entropy)

    @property
    def mutual_information(self) -> Tensor:
        return self._each(lambda law: law.mutual_information)

    def check(self, y: Tensor) -> None:
        for law, rows in zip(self.laws, self.index, strict=True):
            law.check(y[rows])

    def log_prob(self, y: Tensor) -> Tensor:
        return self.at(y, lambda law, own: law.log_prob(own))

    def cdf(self, y: Tensor) -> Tensor:
        return self.at(y, lambda law, own: law.cdf(own))

    def below(self, y: Tensor) -> Tensor:
        return self.at(y, lambda law, own: law.below(own))

    def icdf(self, q: Tensor) -> Tensor:
        return self._each(lambda law: law.icdf(q))

    def interval(self, level: float) -> Tensor:
        return self._each(lambda law: law.interval(level))

    def hdr(self, level: float) -> Any:
        found = [law.hdr(level) for law in self.laws]
        if self.kind == "class":
            return self.put(found)
        if self.kind == "vector":
            raise TypeError(
                "These rows have regions of several forms. Ask them one by one: [part.hdr(level) "
                "for part in p.parts]."
            )
        return Regions(
            self.put([one.lower for one in found]), self.put([one.upper for one in found])
        )

    def sample(self, n: int, generator: torch.Generator | None) -> Tensor:
        return self.put([law.sample(n, generator) for law in self.laws], 1)

    def increments(self, y: Tensor) -> Increments:
        raise TypeError(
            "These rows come from several predictives. Ask them one by one: [part.increments(y) "
            "for part in p.parts]."
        )


def joined(parts: Sequence[Predictive], rows: Sequence[Tensor]) -> Predictive:
    """rows: for each part the indices of its inputs; together 0 … N − 1, each once."""
    if len(parts) == 1:
        return parts[0]
    found = [part.diagnostics for part in parts]
    fallback, unconverged, inaccurate = (
        _put(rows, [getattr(one, flag) for one in found]) for flag in FLAGS
    )
    law = JoinedLaw(tuple(part.law for part in parts), tuple(rows))
    diagnostics = Diagnostics(
        ", ".join(dict.fromkeys(one.refit for one in found)),
        fallback,
        unconverged,
        inaccurate,
        found[0].convention,
        mixed=law if any(one.mixed is not None for one in found) else None,
    ).with_extreme(_put(rows, [one.extreme_rows for one in found]))
    return Predictive(law, widest(parts), diagnostics, tuple(parts))


def _put(index: Sequence[Tensor], answers: Sequence[Tensor], dim: int = 0) -> Tensor:
    if len({part.shape[-1] for part in answers}) > 1 and dim < answers[0].dim() - 1:
        most = max(part.shape[-1] for part in answers)
        answers = [
            torch.nn.functional.pad(part, (0, most - part.shape[-1]), value=torch.nan)
            for part in answers
        ]
    return torch.cat(list(answers), dim).index_select(dim, torch.cat(list(index)).argsort())
