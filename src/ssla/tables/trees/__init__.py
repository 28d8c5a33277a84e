"""Decision trees, beside the networks or under a last layer.

The trees are grown by scikit-learn (`growing`) and held as tensors (`forest`). `out_of_fold` has
the last layer on their predictions, and `beside_networks` the mixture of trees and networks.
"""
