"""Settings beside their log densities on validation rows."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ssla.fitting.choice import MOST_LOSS, Setting, choose_setting, mean_and_error
from ssla.fitting.validation_rows import Candidate, ValidationRows

# standard errors below the best, and beyond what doubt may cost: weaker priors are not tried
HOPELESS = 4.0

Scored = tuple[Setting, "Candidate | None"]
"""A setting with its Gaussian; None where there is none."""


@dataclass(eq=False)
class ScoreTable:
    """Settings that were scored on the rows, in the order in which they were tried."""

    rows: ValidationRows
    settings: list[Setting] = field(default_factory=list)
    scored: list[Tensor] = field(default_factory=list)  # log densities (n,) of each

    def add(self, candidates: Iterable[Scored]) -> None:
        """Score settings that have a Gaussian, in one pass over the rows."""
        known = [(setting, candidate) for setting, candidate in candidates if candidate is not None]
        if known:
            self.scored.extend(self.rows.scores([candidate for _, candidate in known]))
            self.settings.extend(setting for setting, _ in known)

    def descend(self, groups: Iterable[list[Scored]]) -> None:
        """Score groups of settings from the strongest prior on, until a whole group is hopeless.

        Rows whose Jacobians are not kept are read once for all settings.
        """
        if self.rows.kept is None:
            self.add([scored for group in groups for scored in group])
            return
        weights = self.rows.weights
        best: Tensor | None = None
        for group in groups:
            before = len(self.scored)
            self.add(group)
            if len(self.scored) == before:
                return
            here = max(self.scored[before:], key=lambda scores: float(scores @ weights))
            if best is None or float((here - best) @ weights) >= 0:
                best = here
                continue
            loss = mean_and_error(best - here, weights)
            if not loss.mean <= max(HOPELESS * loss.error, MOST_LOSS):
                return

    def extend(self, other: ScoreTable) -> None:
        """With the settings of another table of the same rows."""
        self.settings.extend(other.settings)
        self.scored.extend(other.scored)

    def of(self, gaussian: str | None) -> ScoreTable:
        """The settings with that Gaussian; all of them for None."""
        own = [i for i, setting in enumerate(self.settings) if gaussian in (None, setting.gaussian)]
        return ScoreTable(self.rows, [self.settings[i] for i in own], [self.scored[i] for i in own])

    @property
    def scores(self) -> Tensor:
        """(k, n)."""
        return torch.stack(self.scored)

    @property
    def choice(self) -> int:
        """The number of the setting that the rows choose."""
        return choose_setting(self.settings, self.scores, self.rows.weights)

    @property
    def best(self) -> Setting:
        """The setting with the highest mean log density."""
        return self.settings[int((self.scores @ self.rows.weights).argmax())]
