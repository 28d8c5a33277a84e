"""How a tuning went: kept with the posterior that it made."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, eq=False)
class Trace:
    """Every accepted point of an optimisation, first to last."""

    objective: str
    names: tuple[str, ...]  # of the coordinates: "precision of head", "noise"
    points: Tensor  # (rounds + 1, d), in their own units (not logarithms)
    values: Tensor  # (rounds + 1,): log evidence, or minus a score: larger is better
    gradient: Tensor  # (d,) at the end, in the logarithms of the coordinates
    converged: bool
    at_bound: tuple[str, ...]  # coordinates that ended at the edge of their range
    evaluations: int
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        ends = ", ".join(
            f"{name} {float(a):.4g} → {float(b):.4g}"
            for name, a, b in zip(self.names, self.points[0], self.points[-1], strict=True)
        )
        lines = [
            f"{self.objective}  {float(self.values[0]):.6g} → {float(self.values[-1]):.6g} in {len(self.values) - 1} rounds, "
            f"{self.evaluations} evaluations" + ("" if self.converged else "; NOT converged"),
            ends,
        ]
        if self.at_bound:
            lines.append(f"at the edge of their range: {', '.join(self.at_bound)}")
        return "\n".join([*lines, *self.notes])
