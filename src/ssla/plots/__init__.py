"""Pictures of predictives, with matplotlib (`pip install 'ssla[plots]'`).

Each function takes `ax=` and returns the Axes. Colours are those of Okabe and Ito, which
colour-blind readers can tell apart, and no meaning is in colour alone. Text, dots and reference
lines have the colour of the axes' labels, so a dark style works.
"""

from ssla.plots.calibration import calibration, intervals, pit, reliability
from ssla.plots.canvas import BAND, OTHER
from ssla.plots.distributions import bands, density, increments, p_box, prior_bands
from ssla.plots.doubt import doubt, influence, out_of_distribution

__all__ = [
    "BAND",
    "OTHER",
    "bands",
    "calibration",
    "density",
    "doubt",
    "increments",
    "influence",
    "intervals",
    "out_of_distribution",
    "p_box",
    "pit",
    "prior_bands",
    "reliability",
]
