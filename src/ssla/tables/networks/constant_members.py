"""Networks that predict worse than a constant, and the constant that takes their place.

With many columns and few rows a network can be wrong by many standard deviations of the target at
every new row, also at the best epoch of its training. Early stopping keeps such a network, because
it only compares epochs. Its n held-out rows show it:

    Σ c (y − m)² > (1 + √(2/n)) Σ c (y − ȳ)²      (ȳ: the mean of the network's training rows)

with m the mean that the network predicts. √(2/n) is the relative standard error of a mean square of
Gaussian errors: a smaller difference may be chance, and does little harm. Squared errors decide,
and not the log score. The spread of the predictives is corrected later, by the same rows
(`ssla.tables.networks.recalibration`), but nothing corrects a wrong mean. Both answers that a
member gives are compared: the mean of the network as it was trained, which trees use, and that of
the posterior of its last layer. A member that is worse with either has no share.

Where no member is left, constants replace all networks. A network without weights predicts the bias
of its last layer, so that its posterior is that of the mean of y and of its spread. Trees may still
be mixed with it.
"""

from __future__ import annotations

import math
from copy import deepcopy

import torch
from torch import Tensor, nn


def is_worse_than_constant(y: Tensor, means: Tensor, weights: Tensor, constant: Tensor) -> bool:
    """Return whether means (n, D) have a clearly larger squared error at y (n, D) than a constant.

    The result is also True where the error of the means is NaN. y are held-out targets, the
    constant is (D,), and weights (n,) are frequencies, so their sum is the number of rows.
    """
    error = weights @ ((y - means) ** 2).sum(1)
    constant_error = weights @ ((y - constant) ** 2).sum(1)
    margin = 1 + math.sqrt(2 / float(weights.sum()))  # see the module's docstring
    # "not <=" and not ">", so that NaN counts as worse.
    return not bool(error <= margin * constant_error)


def make_constant_network(network: nn.Sequential, bias: Tensor | None) -> nn.Sequential:
    """Return a copy of the network whose linear layers are zero, so that its outputs are constant.

    bias (C,): these outputs, which become the bias of the last layer; None: zero.
    """
    constant = deepcopy(network)
    linear_layers = [layer for layer in constant if isinstance(layer, nn.Linear)]
    with torch.no_grad():
        for layer in linear_layers:
            layer.weight.zero_()
            layer.bias.zero_()
        if bias is not None:
            linear_layers[-1].bias.copy_(bias)
    return constant
