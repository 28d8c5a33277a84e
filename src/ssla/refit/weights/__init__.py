"""Refits of the weights (SSLA), for every candidate y.

reference      one (x, y) as the paper writes it: read this first
weight_refit   what users pass, and which engine serves it
last_layer*    a last layer: all tasks as products with the features
all_weights*   any weights, through `torch.func`
anderson       maximises thousands of objectives at once from gradients alone
determinants   of all weights at θ̃: exact, frozen at θ̂, or from the structure
"""
