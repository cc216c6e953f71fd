"""A table as it comes
===================

Numbers, words and gaps, in one estimator.

The wage depends on a bump in age, on the job and on whether a form was left empty. The
regressor finds the columns that matter; the classifier says how sure it is. Nothing is
encoded, scaled or filled by hand.
"""

import numpy as np
import pandas as pd
from sklearn.metrics import log_loss
from sklearn.model_selection import train_test_split

from coulomb import CoulombClassifier, CoulombRegressor


def make_table(n, rng):
    table = pd.DataFrame(
        {
            "age": rng.uniform(18, 65, n),
            "job": pd.Categorical(rng.choice(["clerk", "cook", "pilot"], n)),
            "experience": np.where(rng.random(n) < 0.2, np.nan, rng.gamma(2.0, 4.0, n)),
            "shoe size": rng.normal(42, 2, n),
        }
    )
    bump = np.exp(-(((table.age - 45) / 10) ** 2))
    wage = 2 * bump + (table.job == "pilot") - 0.5 * table.experience.isna()
    return table, wage + 0.2 * rng.normal(size=n)


def main():
    table, wage = make_table(800, np.random.default_rng(0))
    train, test, y_train, y_test = train_test_split(table, wage, random_state=0)
    model = CoulombRegressor(128, random_state=0).fit(train, y_train)
    print(f"R2 {model.score(test, y_test):.3f}")
    for name, share in zip(table, model.feature_importances_, strict=True):
        print(f"{name:12s} {share:.3f}")

    low, high = y_train > 1, y_test > 1
    classifier = CoulombClassifier(128, random_state=0).fit(train, low)
    forecast = classifier.predict_proba(test)
    print(f"accuracy {classifier.score(test, high):.3f}")
    print(f"log loss {log_loss(high, forecast):.3f}")

    unseen = test.head(1).assign(job="astronaut")
    print("an unknown job:", model.predict(unseen).round(2))


if __name__ == "__main__":
    main()
