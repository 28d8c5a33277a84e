"""Mixtures of predictives of classes."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from ssla.likelihoods.support import Classes
from ssla.predictive.classes import smallest_set
from ssla.predictive.mixture import Blend
from ssla.predictive.predictive import Diagnostics, answer, scalar_targets
from ssla.refit.increments import Increments


@dataclass(frozen=True, eq=False)
class ClassMixture:
    """P(Y = c) = Σ w_m P_m(Y = c)."""

    blend: Blend

    kind = "class"

    @property
    def members(self) -> tuple[Any, ...]:
        return self.blend.members

    @property
    def diagnostics(self) -> Diagnostics:
        return self.blend.diagnostics

    @cached_property
    def _log_probs(self) -> Tensor:
        classes = torch.arange(self.blend.members[0].probs.shape[1], dtype=torch.float64)[None]
        return self.blend.log_average(lambda m: m.log_prob(classes))

    @property
    def probs(self) -> Tensor:
        """(N, C)."""
        return self.blend.out(self._log_probs.exp())

    @property
    def mode(self) -> Tensor:
        """The most probable class (N,)."""
        return self._log_probs.argmax(1).to(self.blend.like.device)

    @property
    def mean(self) -> Tensor:
        """Of the class indicators."""
        return self.blend.out(self.blend.mean)

    @property
    def variance(self) -> Tensor:
        return self.blend.out(self.blend.epistemic + self.blend.aleatoric)

    @property
    def stddev(self) -> Tensor:
        return self.blend.out((self.blend.epistemic + self.blend.aleatoric).sqrt())

    @property
    def epistemic(self) -> Tensor:
        return self.blend.out(self.blend.epistemic)

    @property
    def aleatoric(self) -> Tensor:
        return self.blend.out(self.blend.aleatoric)

    @property
    def mass(self) -> Tensor:
        return self.blend.out(self.blend.mass)

    def log_prob(self, y: Any) -> Tensor:
        """(N,) -> (N,); (N, k) -> (N, k)."""
        value, single = scalar_targets(y, self.blend.rows)
        count = self._log_probs.shape[1]
        Classes(count).check(value.flatten(), count)
        return self.blend.out(answer(self._log_probs.gather(1, value.long()), single))

    def interval(self, level: float = 0.95) -> Tensor:
        """The smallest set of classes with at least that probability: bool (N, C)."""
        return smallest_set(self._log_probs.exp(), level).to(self.blend.like.device)

    def hdr(self, level: float = 0.95) -> Tensor:
        """The same as `interval`."""
        return self.interval(level)

    def sample(self, n: int, generator: torch.Generator | None = None) -> Tensor:
        """(n, N) integers."""
        draws = torch.multinomial(self._log_probs.exp(), n, replacement=True, generator=generator)
        return draws.mT.to(self.blend.like.device)

    def increments(self, y: Any) -> Increments:
        return self.blend.increments(y)
