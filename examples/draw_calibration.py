"""A calibration curve
===================

When a classifier says 80 %, is it right in 80 of 100 cases? Shares of right answers
against what was said, on rows it has not seen.
"""

import matplotlib.pyplot as plt
import numpy as np
from sklearn.calibration import calibration_curve
from sklearn.metrics import brier_score_loss
from sklearn.model_selection import train_test_split
from sklearn.naive_bayes import GaussianNB

from coulomb import CoulombClassifier

rng = np.random.default_rng(0)
X = rng.normal(size=(3000, 5))
noise = rng.logistic(size=3000) / 2
y = np.sin(2 * X[:, 0]) + X[:, 1] * X[:, 2] + noise > 0
X, X_new, y, y_new = train_test_split(X, y, test_size=0.5, random_state=0)

plt.figure(figsize=(4.5, 4.5), layout="constrained")
plt.plot([0, 1], [0, 1], "k:")
models = {"learned features": CoulombClassifier(64, random_state=0)}
models["naive Bayes"] = GaussianNB()
for name, model in models.items():
    chance = model.fit(X, y).predict_proba(X_new)[:, 1]
    right, said = calibration_curve(y_new, chance, n_bins=8, strategy="quantile")
    plt.plot(said, right, "o-", label=f"{name}, {brier_score_loss(y_new, chance):.3f}")
plt.xlabel("said")
plt.ylabel("happened")
plt.legend(title="Brier score")
plt.show()
