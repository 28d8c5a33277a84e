"""A table of settings with the log densities that validation rows have under each."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ssla.fitting.choice import MOST_LOSS, Setting, choose_setting, compute_mean_and_error
from ssla.fitting.validation_rows import Candidate, ValidationRows

# standard errors below the best, and beyond what doubt may cost: weaker priors are not tried (a
# guess)
HOPELESS = 4.0

SettingWithGaussian = tuple[Setting, "Candidate | None"]
"""A setting with its Gaussian; None where there is none."""


@dataclass(eq=False)
class ScoreTable:
    """Settings that were scored on the rows, in the order in which they were tried.

    The methods that score and add change the table.
    """

    rows: ValidationRows
    settings: list[Setting] = field(default_factory=list)
    log_densities: list[Tensor] = field(default_factory=list)  # (n,) of each setting

    def score_settings(self, candidates: Iterable[SettingWithGaussian]) -> None:
        """Score settings in one pass over the rows, and add them to the table.

        candidates: the settings, each with its Gaussian. Those without a Gaussian are left out.
        """
        usable = [
            (setting, candidate) for setting, candidate in candidates if candidate is not None
        ]
        if usable:
            self.log_densities.extend(
                self.rows.compute_scores([candidate for _, candidate in usable])
            )
            self.settings.extend(setting for setting, _ in usable)

    def score_until_hopeless(self, groups: Iterable[list[SettingWithGaussian]]) -> None:
        """Score groups of settings until one is hopeless, and add all of them to the table.

        groups: from the strongest prior to the weakest. A group is hopeless if its best setting is
        worse than the best before by HOPELESS standard errors and by more than MOST_LOSS. The
        search also ends at a group without any Gaussian.
        """
        # Rows whose Jacobians are not kept are read in each pass: one pass scores all settings.
        if self.rows.kept is None:
            self.score_settings([candidate for group in groups for candidate in group])
            return
        weights = self.rows.weights
        best: Tensor | None = None

        for group in groups:
            before = len(self.log_densities)
            self.score_settings(group)
            if len(self.log_densities) == before:
                return
            best_of_group = max(
                self.log_densities[before:], key=lambda scores: float(scores @ weights)
            )
            if best is None or float((best_of_group - best) @ weights) >= 0:
                best = best_of_group
                continue
            loss = compute_mean_and_error(best - best_of_group, weights)
            # Written with `not`, so that NaN ends the search, too.
            if not loss.mean <= max(HOPELESS * loss.error, MOST_LOSS):
                return

    def add_table(self, other: ScoreTable) -> None:
        """Add the settings of another table of the same rows."""
        self.settings.extend(other.settings)
        self.log_densities.extend(other.log_densities)

    def with_gaussian(self, gaussian: str | None) -> ScoreTable:
        """Return a table of the settings with this Gaussian alone.

        gaussian: LAPLACE or VARIATIONAL; None: all settings are taken.
        """
        indices = [
            i for i, setting in enumerate(self.settings) if gaussian in (None, setting.gaussian)
        ]
        return ScoreTable(
            self.rows,
            [self.settings[i] for i in indices],
            [self.log_densities[i] for i in indices],
        )

    @property
    def scores(self) -> Tensor:
        """Return the log densities (k, n) of all settings."""
        return torch.stack(self.log_densities)

    @property
    def index_of_chosen(self) -> int:
        """Return the index of the setting that the rows choose, by `choose_setting`."""
        return choose_setting(self.settings, self.scores, self.rows.weights)

    @property
    def chosen(self) -> Setting:
        """Return the setting that the rows choose, by `choose_setting`."""
        return self.settings[self.index_of_chosen]

    @property
    def best(self) -> Setting:
        """Return the setting with the highest mean log density, without the rule of `chosen`."""
        return self.settings[int((self.scores @ self.rows.weights).argmax())]
