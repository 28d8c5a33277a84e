"""Decision trees: grown by scikit-learn, held as tensors, beside the networks or under a last
layer.
"""
