"""The particle system without an estimator
========================================

Energy, dynamics, a saved run.

Particles in the plane are pulled by an alignment energy and pushed apart by a
logarithmic repulsion. The run is interrupted, saved, loaded and continued; it ends
where an uninterrupted one ends.
"""

import math
import tempfile
from pathlib import Path

import matplotlib.pyplot as plt
import torch

from coulomb import Ball, Hamiltonian, Particles, Riesz
from coulomb.dynamics.langevin import ProjectedLangevin
from coulomb.dynamics.loop import RunSettings, init_run, load_run, run, save_run
from coulomb.objectives import FourierAlignment, Sample


def main():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(200, 2, generator=generator, dtype=torch.float64)
    labels = torch.sin(2 * x[:, :1] + x[:, 1:]).sign()
    energy = Hamiltonian(FourierAlignment(Sample(x, labels)), Riesz(s=0), strength=1e-3)
    sampler = ProjectedLangevin(0.5, inverse_temperature=500.0, domain=Ball(4.0))
    positions = torch.randn(100, 2, generator=generator, dtype=torch.float64)

    def begin():
        seeded = torch.Generator().manual_seed(1)
        return init_run(sampler, Particles(positions), generator=seeded)

    whole = run(begin(), sampler, energy, RunSettings(max_steps=400))

    part = run(begin(), sampler, energy, RunSettings(max_steps=150))
    with tempfile.TemporaryDirectory() as folder:
        save_run(part, Path(folder) / "run.safetensors")
        resumed = load_run(Path(folder) / "run.safetensors")
    run(resumed, sampler, energy, RunSettings(max_steps=400))

    same = torch.equal(whole.particles.positions, resumed.particles.positions)
    first, last = whole.history[0], whole.history[-1]
    near = (whole.particles.positions.abs() - torch.tensor([2.0, 1.0])).norm(
        dim=1
    ) < 0.7
    print(f"alignment {first['alignment']:.3f} -> {last['alignment']:.3f}")
    print(f"particles near the planted frequency ±(2, 1): {near.double().mean():.0%}")
    print(f"ended because {whole.reason.value}; resumed run equal to the bit: {same}")
    assert same
    assert last["alignment"] > first["alignment"]
    assert math.isfinite(last["energy"])

    plt.figure(figsize=(4.5, 4.5), layout="constrained")
    plt.plot(*positions.T, "o", color="0.75", label="drawn")
    plt.plot(*whole.particles.positions.T, "o", color="C1", label="after 400 steps")
    plt.plot([2, -2], [1, -1], "k+", markersize=14, label="planted frequency")
    plt.axis("equal")
    plt.legend(loc="upper left")
    plt.show()


if __name__ == "__main__":
    main()
