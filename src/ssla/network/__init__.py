"""The only package that uses `nn.Module`.

The user's module is copied once and the copy is frozen, so the original is never changed, and
training it further does not change a posterior. Features and layer inputs are read by intercepting
torch calls, without hooks.
"""

from ssla.network.any_parameters import AnyParameters, LayerPlan, NormPlan
from ssla.network.fingerprint import VALUES, describe_difference, fingerprint, merge_digests
from ssla.network.frozen import Output, checked_output
from ssla.network.head import LastLayer
from ssla.network.network import Network
from ssla.network.opening import (
    ALL,
    LAST_LAYER,
    check_evaluation_mode,
    open_network,
    trainable_names,
)
from ssla.network.reopening import (
    Opening,
    describe_opening,
    describe_output_argument,
    module_of,
    output_argument_of,
    reopen_network,
)
from ssla.network.row_scale import RowScale, squared_lengths
from ssla.network.tapping import LayerInputs

__all__ = [
    "ALL",
    "LAST_LAYER",
    "VALUES",
    "AnyParameters",
    "LastLayer",
    "LayerInputs",
    "LayerPlan",
    "Network",
    "NormPlan",
    "Opening",
    "Output",
    "RowScale",
    "check_evaluation_mode",
    "checked_output",
    "describe_difference",
    "describe_opening",
    "describe_output_argument",
    "fingerprint",
    "merge_digests",
    "module_of",
    "open_network",
    "output_argument_of",
    "reopen_network",
    "squared_lengths",
    "trainable_names",
]
