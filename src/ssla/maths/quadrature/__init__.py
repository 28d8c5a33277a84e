"""One-dimensional densities known pointwise: location, integrals, quantiles. Vectorised over rows.

A row is a log density over the real line. Nodes are z = c + s·sinh(t) with t uniform on [−T, T], so
a few dozen nodes cover the bulk and far tails, and the trapezoidal rule in t converges
exponentially for smooth densities. Accuracy is checked: a row is accepted when

  * every second node gives the same mass to 5e-4 (the full rule then has about the square of that),
  * the tails beyond the last nodes hold < 1e-6 of the mass (heavier ones widen T), and
  * the nodes are centred on the bulk.

Rows that fail are refined together until they pass or the node limit is reached; those that never
pass are flagged `accurate = False`. A density that has no integral is cut where it stops falling,
and flagged.

Between nodes log p is a not-a-knot cubic spline in z (exact for a Gaussian), integrated by
four-point Gauss–Legendre in each panel. Beyond the last node log p continues as a power law with
its last slope. Fails for densities with jumps or poles: they are flagged. Moments of a function of
z (a target with a transformed support) have their own rule: see `mapped`.
"""

from ssla.maths.quadrature.circle import Circle, RowCircle, build_circles, wrap_angles
from ssla.maths.quadrature.grid import Grid, Regions, Tail
from ssla.maths.quadrature.mapped import mapped_moments
from ssla.maths.quadrature.root_finding import bracketed_root
from ssla.maths.quadrature.search import (
    Accuracy,
    LogDensity,
    RowGrid,
    build_grids,
    locate_densities,
)

__all__ = [
    "Accuracy",
    "Circle",
    "Grid",
    "LogDensity",
    "Regions",
    "RowCircle",
    "RowGrid",
    "Tail",
    "bracketed_root",
    "build_circles",
    "build_grids",
    "locate_densities",
    "mapped_moments",
    "wrap_angles",
]
