"""J = ∂f/∂θ of a batch, by what can be done with it.

Structures do not ask for the entries of J. They ask for contractions, and each kind of J answers in the cheapest way it has: a
last layer's J is φ ⊗ I and is never built; a layer's J = Σ_t δ_t ⊗ a_t is built a few of its rows at a time, and only where its
weight is used in several places. The dual form of the dense curvature keeps the entries by design (`dense`).
"""

from ssla.structures.jacobians.features import Features
from ssla.structures.jacobians.jacobian import DenseJacobian, Jacobian
from ssla.structures.jacobians.layers import LayerBlock, LayerJacobian, RestBlock

__all__ = ["DenseJacobian", "Features", "Jacobian", "LayerBlock", "LayerJacobian", "RestBlock"]
