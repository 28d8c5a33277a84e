"""J = ∂f/∂θ of a batch, through its products.

Structures use contractions with J and not its entries, and each kind of J computes them in the
cheapest way: a last layer's J = φ ⊗ I is never built; a layer's J = Σ_t δ_t ⊗ a_t is built a few
rows at a time, and only if its weight is used at several positions. Only the dual form of the dense
curvature stores the entries (`to_dense`).
"""

from ssla.curvature.jacobians.features import Features
from ssla.curvature.jacobians.jacobian import DenseJacobian, Jacobian
from ssla.curvature.jacobians.layers import LayerBlock, LayerJacobian, RestBlock

__all__ = ["DenseJacobian", "Features", "Jacobian", "LayerBlock", "LayerJacobian", "RestBlock"]
