"""Axes, colours and legends that all pictures share."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

BAND, OTHER = "#0072b2", "#d55e00"  # blue and vermillion of Okabe and Ito
SKY, GREEN, PURPLE, ORANGE = "#56b4e9", "#009e73", "#cc79a7", "#e69f00"
DARK_LIFT = 0.12  # a tint needs more colour to be seen on black

Color = tuple[float, float, float]


class Palette(NamedTuple):
    """The colours of one Axes."""

    ink: Color  # dots and reference lines: the colour of the labels
    paper: Color  # the background
    main: str
    other: str

    def tint(self, share: float, color: str | None = None) -> Color:
        """Return a share of a colour mixed with the background.

        share: from 0 (background) to 1 (colour); more on a dark background. color: as matplotlib
        takes it; None: `main`. The result is opaque, so a legend shows the same colour as
        overlapping bands.
        """
        lift = DARK_LIFT if is_dark(self.paper) else 0.0
        return _mix_colors(self.paper, convert_to_rgb(color or self.main), min(share + lift, 1.0))

    @property
    def faint(self) -> Color:
        """Return the colour of grid lines and diagonals, which is between ink and paper."""
        return _mix_colors(self.paper, self.ink, 0.45)


def import_pyplot() -> Any:
    """Return the module matplotlib.pyplot; raise ImportError with the remedy if it is missing."""
    try:
        import matplotlib.pyplot as plt
    except ImportError:
        raise ImportError("Plots need matplotlib: pip install 'ssla[plots]'.") from None
    return plt


def open_axes(ax: Any, title: str | None = None) -> tuple[Any, Palette]:
    """Return the Axes to draw on, and its colours.

    ax: an Axes of matplotlib; None: a new figure is made. title: set on the Axes if it is not None
    or empty. Raises ImportError with the remedy if matplotlib is needed and missing.
    """
    if ax is None:
        ax = import_pyplot().subplots(figsize=(5.4, 3.8), layout="constrained")[1]
    if title:
        ax.set_title(title, fontsize="medium")
    paper = ax.get_facecolor()[:3]
    main, other = (SKY, ORANGE) if is_dark(paper) else (BAND, OTHER)
    return ax, Palette(convert_to_rgb(ax.xaxis.label.get_color()), paper, main, other)


def is_dark(color: Color) -> bool:
    """Return whether a colour is dark, by its luminance."""
    # The weights of red, green and blue are those of Rec. 709; the limit 0.4 is a guess.
    return float(np.dot(color, (0.2126, 0.7152, 0.0722))) < 0.4


def set_log_ticks(axis: Any, low: float, high: float) -> None:
    """Put few ticks on a logarithmic axis from low to high, with plain numbers as labels.

    There is one for each decade, or three (1, 2 and 5) if there are fewer than two decades.
    """
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    multiples = (1.0, 2.0, 5.0) if high < 100 * low else (1.0,)
    axis.set_major_locator(LogLocator(subs=multiples))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))


def add_legend(ax: Any, **options: Any) -> None:
    """Add a legend without a frame and in a small font.

    options: keywords of matplotlib's `legend`, which are used in place of the defaults here.
    """
    ax.legend(**({"frameon": False, "fontsize": "small", "handlelength": 1.5} | options))


def convert_to_rgb(color: Any) -> Color:
    """Return red, green and blue, from 0 to 1, of any colour that matplotlib understands.

    Transparency is left out.
    """
    from matplotlib.colors import to_rgb

    red, green, blue = to_rgb(color)
    return red, green, blue


def _mix_colors(paper: Color, color: Color, share: float) -> Color:
    """Return a share of `color`, from 0 to 1, mixed with the colour of the background."""
    red, green, blue = ((1 - share) * p + share * c for p, c in zip(paper, color, strict=True))
    return red, green, blue
