"""Many particles and their density
================================

In the limit of many particles their density solves an equation of its own. Its solution
in time, by a scheme that keeps mass, sign and the fall of the free energy; and where 20
particles are at rest, drawn from their own law, not from the density.
"""

import matplotlib.pyplot as plt
import numpy as np
import torch

from coulomb import Riesz
from coulomb.theory import (
    Interval,
    MeanField,
    TemperingSettings,
    equilibrium,
    evolve,
    gibbs_sample,
    parse_expression,
)

bowl = parse_expression("2*x**2", dim=1)
grid = Interval(-1, 1, 200)
gas = MeanField(grid, bowl, Riesz(s=0), strength=1.0, inverse_temperature=2.0)
x = grid.centres[:, 0]
start = grid.normalise(np.exp(-20 * (x - 0.4) ** 2))
flow = evolve(gas, start, times=[0.02, 0.1, 0.5])
settings = TemperingSettings(chains=8, warmup=50, draws=50)
generator = torch.Generator().manual_seed(0)
particles = gibbs_sample(gas, 20, settings=settings, generator=generator).positions

plt.figure(figsize=(7, 3.6), layout="constrained")
plt.hist(
    particles.flatten(),
    40,
    range=(-1, 1),
    density=True,
    color="0.85",
    label="particles",
)
plt.plot(x, start, "k:", label="start")
for time, density in zip(flow.times, flow.densities, strict=True):
    plt.plot(x, density, label=f"t = {time:g}")
plt.plot(x, equilibrium(gas).density, "k", label="at rest")
plt.legend()
plt.show()
