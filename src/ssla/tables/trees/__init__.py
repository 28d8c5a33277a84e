"""Decision trees, beside the networks or under a last layer.

The trees are grown by scikit-learn and held as tensors.
"""
