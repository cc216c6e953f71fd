"""Particles moving
================

A label asks for one frequency, (2, 1) and its mirror image. Particles drawn around zero
are pulled there by the alignment energy, and the repulsion spreads them around it.
"""

import matplotlib.pyplot as plt
import torch

from coulomb import Ball, Hamiltonian, Particles, Riesz
from coulomb.dynamics.langevin import ProjectedLangevin
from coulomb.dynamics.loop import RunSettings, init_run, run
from coulomb.objectives import FourierAlignment, Sample

generator = torch.Generator().manual_seed(0)
x = torch.randn(200, 2, generator=generator, dtype=torch.float64)
labels = torch.sin(2 * x[:, :1] + x[:, 1:]).sign()
energy = Hamiltonian(FourierAlignment(Sample(x, labels)), Riesz(s=0), strength=1e-3)
sampler = ProjectedLangevin(0.5, inverse_temperature=500.0, domain=Ball(4.0))
positions = torch.randn(100, 2, generator=generator, dtype=torch.float64)
state = init_run(sampler, Particles(positions), generator=generator)

figure, axes = plt.subplots(1, 4, figsize=(11, 3), sharey=True, layout="constrained")
for ax, steps in zip(axes, (0, 10, 40, 150), strict=True):
    if steps:
        run(state, sampler, energy, RunSettings(max_steps=steps))
    ax.scatter(*state.particles.positions.T, s=12)
    ax.scatter([2, -2], [1, -1], marker="x", color="tab:red")
    ax.set(title=f"step {steps}", xlim=(-4, 4), ylim=(-4, 4), aspect="equal")
plt.show()
