"""A scale of each row, by which features and outputs are divided.

The scale is a temperature that depends on the input. Logits of a last layer grow with the length of
the features, and so does the confidence of the network, whether that is earned or not. Rows that
the network has not seen can tell (`ssla.fitting.tuning.row_scale`).
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from ssla.curvature.jacobians import Features


@dataclass(frozen=True)
class RowScale:
    """The scale s(x) = √((1 + c h) / (1 + c)) with h = max(|φ(x)|², least) / mean.

    A row of mean length has s = 1. c = 0 changes nothing; a large c is a last layer on features of
    equal length. Features shorter than `least` have its scale: nothing is known of them, and a
    smaller scale would make the network more confident there.
    """

    strength: float  # c
    mean: float  # of |φ|²
    least: float  # of |φ|²

    def compute_scales(self, squares: Tensor) -> Tensor:
        """Return the scale s (B,) of rows with the squared lengths |φ|² (B,)."""
        h = squares.clamp_min(self.least) / self.mean
        return ((1 + self.strength * h) / (1 + self.strength)).sqrt()

    def scale_features(self, J: Features, inputs: int) -> Features:
        """Return φ/s with a column 1/s in place of ones, so that outputs are divided by s too.

        inputs: the number of features of the last layer, without the ones.
        """
        s = self.compute_scales(compute_squared_lengths(J, inputs))
        phi = J.with_ones()
        return Features(phi / s[:, None].to(phi.dtype), J.outputs, keeps_squares=J.keeps_squares)


def compute_squared_lengths(J: Features, inputs: int) -> Tensor:
    """Return the squared lengths |φ|² (B,) of the features of rows, in float64.

    inputs: the number of features of the last layer. A stored column of ones is left out.
    """
    return J.phi[:, :inputs].double().square().sum(1)
