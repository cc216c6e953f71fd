"""Fixed against learned features
==============================

The labels depend on a sine of the first column and a product of two others. Fixed
features know none of this. Learned ones find the columns and the frequencies; their
control keeps how wide and how sparse they became, but not where the labels put them.
"""

import matplotlib.pyplot as plt
import numpy as np
from sklearn.model_selection import train_test_split
from sklearn.svm import SVC

from coulomb import CoulombSampler


def score(sampler, X_train, X_test, y_train, y_test):
    model = SVC(kernel="linear").fit(sampler.transform(X_train), y_train)
    return model.score(sampler.transform(X_test), y_test)


def main():
    scores = {"fixed": [], "control": [], "learned": []}
    for seed in range(5):
        rng = np.random.default_rng(seed)
        X = rng.normal(size=(600, 6))
        y = np.sin(3 * X[:, 0]) + X[:, 1] * X[:, 2] > 0
        split = train_test_split(X, y, test_size=0.5, random_state=seed)
        fixed = CoulombSampler(64, max_iter=0, random_state=seed)
        learned = CoulombSampler(64, random_state=seed)
        for sampler in (fixed, learned):
            sampler.fit(split[0], split[2])
        scores["fixed"].append(score(fixed, *split))
        scores["control"].append(score(learned.control(seed), *split))
        scores["learned"].append(score(learned, *split))
    plt.figure(figsize=(5, 2.2), layout="constrained")
    for row, (name, values) in enumerate(scores.items()):
        mean, error = np.mean(values), np.std(values, ddof=1) / np.sqrt(len(values))
        print(f"{name:8s} {mean:.3f} ± {error:.3f}")
        plt.plot(values, [row] * len(values), "o", color=f"C{row}", alpha=0.3)
        plt.errorbar(mean, row, xerr=error, fmt="D", color=f"C{row}", capsize=4)
    plt.yticks(range(len(scores)), scores)
    plt.xlabel("accuracy of each seed, and their mean ± one standard error")
    plt.gca().invert_yaxis()
    plt.show()


if __name__ == "__main__":
    main()
