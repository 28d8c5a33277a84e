"""Rows of several predictives of the same kind as one predictive, in the order of the inputs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor
from torch.nn.functional import pad

from ssla.maths.quadrature import Regions
from ssla.predictive.law import Law
from ssla.predictive.predictive import FLAGS, Diagnostics, Predictive, choose_widest_like
from ssla.refit.increments import Increments


def _make_joined_property(name: str) -> Any:
    """Make a property of JoinedLaw that joins the property `name` of its laws.

    Its value is in the order of the inputs. The property raises AttributeError where a law does.
    """
    return property(lambda self: self.join_answers([getattr(law, name) for law in self.laws]))


@final
@dataclass(frozen=True, eq=False)
class JoinedLaw(Law):
    """The law of N inputs in which each of several laws answers for some rows.

    The laws are of one kind of target. Made by `join_predictives`.
    """

    laws: tuple[Law, ...]
    index: tuple[Tensor, ...]  # for each law the indices (m,) of its rows among the N inputs

    mean = _make_joined_property("mean")
    variance = _make_joined_property("variance")
    stddev = _make_joined_property("stddev")
    covariance = _make_joined_property("covariance")
    mode = _make_joined_property("mode")
    probs = _make_joined_property("probs")
    mass = _make_joined_property("mass")
    epistemic = _make_joined_property("epistemic")
    aleatoric = _make_joined_property("aleatoric")
    entropy = _make_joined_property("entropy")
    mutual_information = _make_joined_property("mutual_information")

    @property
    def kind(self) -> str:
        """Return the kind of target, which is that of every law."""
        return self.laws[0].kind

    @property
    def rows(self) -> int:
        """Return N, the number of inputs of all laws together."""
        return sum(len(rows) for rows in self.index)

    def join_answers(self, answers: Sequence[Tensor], dim: int = 0) -> Tensor:
        """Join one answer of each law along its dimension `dim` of rows, in the inputs' order.

        Where the last sizes of the answers differ, they are padded with NaN.
        """
        return _join_rows(self.index, answers, dim)

    def ask_by_rows(self, y: Tensor, ask: Callable[[Law, Tensor], Tensor]) -> Tensor:
        """Return ask(law, y of its rows) of every law, joined in the order of the inputs.

        y and the result are (N, …).
        """
        return self.join_answers(
            [ask(law, y[rows]) for law, rows in zip(self.laws, self.index, strict=True)]
        )

    def check(self, y: Tensor) -> None:
        """Raise ValueError where y is outside the support of its row's law."""
        for law, rows in zip(self.laws, self.index, strict=True):
            law.check(y[rows])

    def log_prob(self, y: Tensor) -> Tensor:
        """Return each row's log density of y, of the shape that a law returns."""
        return self.ask_by_rows(y, lambda law, y_of_law: law.log_prob(y_of_law))

    def cdf(self, y: Tensor) -> Tensor:
        """Return each row's P(Y ≤ y), of y's shape."""
        return self.ask_by_rows(y, lambda law, y_of_law: law.cdf(y_of_law))

    def below(self, y: Tensor) -> Tensor:
        """Return each row's P(Y < y), of y's shape."""
        return self.ask_by_rows(y, lambda law, y_of_law: law.below(y_of_law))

    def icdf(self, q: Tensor) -> Tensor:
        """Return each row's quantiles at q (k,): (N, k) or (N, D, k)."""
        return self.join_answers([law.icdf(q) for law in self.laws])

    def interval(self, level: float) -> Tensor:
        """Return each row's central interval (N, 2) or (N, D, 2), or its set of classes (N, C)."""
        return self.join_answers([law.interval(level) for law in self.laws])

    def hdr(self, level: float) -> Any:
        """Return the smallest region of each row: Regions, or sets of classes, bool (N, C).

        Raises TypeError for vectors, whose regions may be of several types.
        """
        regions = [law.hdr(level) for law in self.laws]
        if self.kind == "class":
            return self.join_answers(regions)
        if self.kind == "vector":
            raise TypeError(
                "These rows have regions of several forms. Ask them one by one: [part.hdr(level) "
                "for part in p.parts]."
            )
        return Regions(*(self.join_answers(ends) for ends in zip(*regions, strict=True)))

    def sample(self, n: int, generator: torch.Generator | None) -> Tensor:
        """Draw n values for each row, law by law: (n, N) or (n, N, D)."""
        return self.join_answers([law.sample(n, generator) for law in self.laws], dim=1)

    def increments(self, y: Tensor) -> Increments:
        """Raise TypeError: increments belong to a single predictive.

        The argument is part of the protocol.
        """
        raise TypeError(
            "These rows come from several predictives. Ask them one by one: [part.increments(y) "
            "for part in p.parts]."
        )


def join_predictives(parts: Sequence[Predictive], rows: Sequence[Tensor]) -> Predictive:
    """Join predictives of different inputs into one, in the order of the inputs.

    parts: the predictives. rows: for each part the indices of its inputs; all together they are 0 …
    N − 1, each once. The parts are of one kind of target. A single part is returned as it is. The
    convention of the diagnostics is that of the first part.
    """
    if len(parts) == 1:
        return parts[0]
    all_flags = [part.diagnostics for part in parts]
    fallback, unconverged, inaccurate = (
        _join_rows(rows, [getattr(flags, name) for flags in all_flags]) for name in FLAGS
    )
    law = JoinedLaw(tuple(part.law for part in parts), tuple(rows))
    diagnostics = Diagnostics(
        ", ".join(dict.fromkeys(flags.refit for flags in all_flags)),
        fallback,
        unconverged,
        inaccurate,
        all_flags[0].convention,
        mixed=law if any(flags.mixed is not None for flags in all_flags) else None,
    ).with_extreme(_join_rows(rows, [flags.extreme_rows for flags in all_flags]))
    return Predictive(law, choose_widest_like(parts), diagnostics, tuple(parts))


def _join_rows(index: Sequence[Tensor], answers: Sequence[Tensor], dim: int = 0) -> Tensor:
    """Join answers along the dimension `dim` of rows, sorted by the indices of the rows.

    index: the indices (m,) of each answer's rows. Answers whose last sizes differ, such as unions
    of intervals, are padded with NaN. The last dimension is left as it is if it is that of rows.
    """
    if len({answer.shape[-1] for answer in answers}) > 1 and dim < answers[0].dim() - 1:
        most = max(answer.shape[-1] for answer in answers)
        answers = [pad(answer, (0, most - answer.shape[-1]), value=torch.nan) for answer in answers]
    return torch.cat(list(answers), dim).index_select(dim, torch.cat(list(index)).argsort())
