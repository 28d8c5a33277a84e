"""The paper's table of prior modularity, and the exact predictive beside it."""

SELF, OFF = [-0.0259] * 5, [-1.9612, -1.9303, -1.9255, -1.9250, -1.9250]
EXACT_OFF = [-1.9518, -1.9289, -1.9254, -1.9250]
VARIANCES = [0.01, 0.1, 1.0, 10.0, 1e6]
