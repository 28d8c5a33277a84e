"""The only package that uses `nn.Module`.

The user's module is copied once and the copy is frozen, so the original is never changed, and
training it further does not change a posterior. Features and layer inputs are read by intercepting
torch calls, without hooks.

Terms of all these modules:

free             a parameter whose uncertainty is wanted; θ (P,) holds all free ones in float64
frozen           a parameter that is not free; also the private copy of the module (`Frozen`)
head             the linear layer that computes the outputs f (B, C)
last layer       a network whose free parameters are those of its head: f is linear in θ
layer            a weight with a linear call or a convolution, with Kronecker form J = Σ_t δ_t ⊗ a_t
norm             a layer norm, group norm or batch norm; its scale and shift may be free
call             one use of a layer or norm in a forward pass, as it was intercepted
position         a place t at which a layer's weight is used in one row: of a sequence, or a window
plan             which layers have a Kronecker form, and where their entries are in θ
cast             checked, and in the dtype and on the device of the module
opening          making a network from a module; reopening: again from a file, without data
J, B, C, P, F    as in `ssla.curvature`
"""

from ssla.network.any_parameters import AnyParameters, LayerPlan, NormPlan
from ssla.network.fingerprint import VALUES, compute_merge_digests, describe_difference, fingerprint
from ssla.network.frozen import Output, check_output_argument
from ssla.network.head import LastLayer
from ssla.network.network import Network
from ssla.network.opening import (
    ALL,
    LAST_LAYER,
    check_evaluation_mode,
    list_trainable_names,
    open_network,
)
from ssla.network.reopening import (
    Opening,
    describe_opening,
    describe_output_argument,
    get_module,
    get_output_argument,
    reopen_network,
)
from ssla.network.row_scale import RowScale, compute_squared_lengths
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
    "check_output_argument",
    "compute_merge_digests",
    "compute_squared_lengths",
    "describe_difference",
    "describe_opening",
    "describe_output_argument",
    "fingerprint",
    "get_module",
    "get_output_argument",
    "list_trainable_names",
    "open_network",
    "reopen_network",
]
