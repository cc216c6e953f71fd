"""Which columns matter
====================

The particles of a fitted regressor are where the function varies; its importances are
the shares of the squared slope. The wage depends on age and job and not on shoes.
"""

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd

from coulomb import CoulombRegressor

rng = np.random.default_rng(0)
n = 600
table = pd.DataFrame({"age": rng.uniform(18, 65, n), "shoe size": rng.normal(42, 2, n)})
table["job"] = pd.Categorical(rng.choice(["clerk", "cook", "pilot"], n))
table["height"] = rng.normal(175, 8, n)
bump = np.exp(-(((table.age - 45) / 10) ** 2))
wage = 2 * bump + (table.job == "pilot") + 0.2 * rng.normal(size=n)

model = CoulombRegressor(64, random_state=0).fit(table, wage)
order = np.argsort(model.feature_importances_)
figure, axes = plt.subplots(1, 2, figsize=(8, 3.2), layout="constrained")
axes[0].barh(table.columns[order], model.feature_importances_[order])
axes[0].set(title="importances")
ages = np.linspace(18, 65, 80)
typical = table.iloc[[0] * len(ages)].assign(age=ages, job="clerk")
axes[1].plot(ages, 2 * np.exp(-(((ages - 45) / 10) ** 2)), "k--", label="true")
axes[1].plot(ages, model.predict(typical), label="predicted")
axes[1].set(title="a clerk's wage", xlabel="age")
axes[1].legend()
plt.show()
