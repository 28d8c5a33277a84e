"""One part of the mixture of an ensemble."""

from __future__ import annotations

from dataclasses import dataclass

from ssla.posterior import Posterior


@dataclass(frozen=True, eq=False)
class Component:
    """One part of the mixture: a posterior on the network of a member, with its share."""

    posterior: Posterior
    member: int  # the index of its network in `Ensemble.modules`
    weight: float  # its share; the weights of all parts sum to one
