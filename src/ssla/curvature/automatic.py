"""The structure that a fit takes by default: dense where it is cheap, Kronecker factors elsewhere.

The choice follows from the size of the problem alone, so that every process of a distributed fit
makes the same one.
"""

from __future__ import annotations

from typing import NamedTuple

from ssla.curvature import Dense, Extent, Kfac, Structure
from ssla.curvature.memory import describe_bytes, make_default_kfac

AUTO = "auto"
# of a dense fit that is taken by default. A guess: what a user waits without looking for another
# way
MOST_SECONDS = 10.0


class Choice(NamedTuple):
    """A structure, and why it was chosen."""

    structure: Structure
    reason: str


def choose_structure(extent: Extent, budget: int, uneven: bool = False) -> Choice:
    """Choose dense where it takes little time and memory, else Kronecker factors.

    budget: bytes. uneven: whether the prior's precision varies inside a layer, which Kronecker
    factors do not allow. The reason is a phrase for the report.
    """
    dense = Dense()
    seconds = dense.estimate_seconds(extent)
    memory = dense.memory(extent)
    if seconds <= MOST_SECONDS and memory <= budget:
        return Choice(dense, "the whole curvature, which is cheap here")
    cost = f"dense would take about {describe_time(seconds)} and {describe_bytes(memory)}"
    if uneven:
        return Choice(
            dense,
            f"{cost}, but the prior's precision varies inside a layer, which kfac does not allow",
        )

    # Where neither fits, dense is returned: the fit refuses it, and the error names what fits.
    if make_default_kfac(extent).memory(extent) > budget:
        return Choice(dense, f"{cost}, but the memory budget allows no kfac")
    return Choice(Kfac(), cost)


def describe_time(seconds: float) -> str:
    """Return a number of seconds as text, in seconds (at least one), minutes or hours."""
    if seconds < 120:
        return f"{max(round(seconds), 1)} s"
    unit, word = (60, "min") if seconds < 7200 else (3600, "h")
    # The inner format rounds to two digits.
    return f"{float(f'{seconds / unit:.2g}'):,.0f} {word}"
