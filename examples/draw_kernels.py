"""A kernel before and after learning
===================================

The Gram matrix of a kernel that knows the classes has blocks. Random features do not
know them; learned ones do, on rows they have not seen.
"""

import matplotlib.pyplot as plt
import numpy as np
from sklearn.model_selection import train_test_split

from coulomb import CoulombSampler

rng = np.random.default_rng(0)
X = rng.normal(size=(600, 6))
y = np.sin(3 * X[:, 0]) + X[:, 1] * X[:, 2] > 0
X, X_new, y, y_new = train_test_split(X, y, random_state=0)
order = np.argsort(y_new)

figure, axes = plt.subplots(1, 2, figsize=(8, 4), layout="constrained")
for ax, (name, steps) in zip(axes, {"drawn": 0, "learned": 100}.items(), strict=True):
    sampler = CoulombSampler(64, max_iter=steps, random_state=0).fit(X, y)
    features = sampler.transform(X_new[order])
    gram = features @ features.T
    same = y_new[order][:, None] == y_new[order]
    gap = gram[same].mean() - gram[~same].mean()
    ax.imshow(gram, cmap="viridis")
    ax.set(title=f"{name}: within classes {gap:+.3f} larger", xticks=[], yticks=[])
plt.show()
