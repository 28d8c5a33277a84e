"""
Five networks in one predictive
===============================

``SSLARegressor(members=5)`` trains five small networks and mixes their predictives. Where the networks disagree, outside
the data most of all, the mixture is wider than each member. On tables this is the setting to use.
"""

import matplotlib.pyplot as plt
import numpy as np

from ssla import plots
from ssla.sklearn import SSLARegressor

rng = np.random.default_rng(0)
x = np.concatenate([rng.uniform(-3, -0.7, 30), rng.uniform(1, 3, 30)])[:, None]
y = np.sin(2 * x[:, 0]) + 0.2 * rng.standard_normal(60)
grid = np.linspace(-4.5, 4.5, 150)[:, None]

figure, axes = plt.subplots(1, 2, figsize=(8.5, 3.8), sharey=True)
for ax, members in zip(axes, (1, 5), strict=True):
    model = SSLARegressor(members=members, random_state=0).fit(x, y)
    plots.bands(model.predict_dist(grid), grid, (x, y), levels=[0.9], ax=ax)
    ax.set(title=f"members={members}", ylim=(-4, 4))
figure.tight_layout()
