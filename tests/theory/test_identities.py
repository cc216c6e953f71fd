import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from coulomb._support.errors import ParameterError, ParameterTypeError
from coulomb.features import Particles
from coulomb.interactions import Riesz, pair_energy
from coulomb.objectives import FourierAlignment, Sample
from coulomb.theory import (
    Disc,
    FlowSettings,
    Interval,
    MeanField,
    Potential,
    Rectangle,
    dissipation,
    equilibrium,
    evolve,
    finite_size_correction,
    measure_interaction,
    robin_residual,
)
from coulomb.theory.system import chemical_potential


@settings(max_examples=30)
@given(
    st.integers(2, 12),
    st.integers(1, 3),
    st.sampled_from([-1.0, 0.0, 0.5, 2.0, 5.0]),
    st.floats(0.05, 1.0),
    st.integers(0, 10**6),
)
def test_finite_size_correction_of_the_interaction(n, dim, s, eps, seed):
    positions = np.random.default_rng(seed).normal(size=(n, dim))
    kernel = Riesz(s=s, truncation=eps)
    pairs = float(pair_energy(kernel, torch.from_numpy(positions)))
    measured = measure_interaction(kernel, positions)
    assert finite_size_correction(kernel, pairs, n) == pytest.approx(
        measured, rel=1e-9, abs=1e-9
    )


def test_finite_size_needs_a_truncation():
    with pytest.raises(ParameterError, match="truncated"):
        finite_size_correction(Riesz(s=1), 1.0, 3)


def log_gas(cells=400, beta=2.0, s=0.0):
    return MeanField(
        Interval(-1, 1, cells), lambda w: w[..., 0] ** 2, Riesz(s=s), 1.0, beta
    )


def test_dissipation_is_the_fall_of_the_free_energy():
    """dF/dt by central differences, accurate to dt^2 and the tolerance of the flow."""
    system = log_gas()
    start = np.exp(-((system.grid.centres[:, 0] - 0.3) ** 2) / 0.1) + 0.05
    step = 2e-4
    times = 0.05 + step * np.arange(3)
    flow = evolve(system, start, times, settings=FlowSettings(tolerance=1e-5))
    energies = [system.free_energy(density).total for density in flow.densities]
    fall = (energies[0] - energies[2]) / (2 * step)
    assert fall == pytest.approx(dissipation(system, flow.densities[1]), rel=2e-3)


def test_dissipation_vanishes_at_equilibrium():
    system = log_gas()
    assert dissipation(system, equilibrium(system).density) < 1e-15
    level = chemical_potential(system, equilibrium(system).density)
    assert np.ptp(level) < 1e-9


def test_robin_condition_at_the_walls_to_first_order():
    residuals = []
    for cells in (100, 200):
        system = MeanField(
            Interval(-1, 1, cells),
            lambda w: w[..., 0] ** 2 + w[..., 0],
            Riesz(s=-1),
            1.0,
            2.0,
        )
        flow = evolve(system, system.grid.uniform(), [0.05])
        residuals.append(robin_residual(system, flow.last))
    assert residuals[1] < 0.01
    assert residuals[0] / residuals[1] == pytest.approx(2, rel=0.1)


def test_robin_condition_of_a_rectangle_at_equilibrium():
    grid = Rectangle((-1, -1), (1, 1), (80, 80))
    system = MeanField(grid, lambda w: w[..., 0] + w[..., 1] ** 2)
    assert robin_residual(system, equilibrium(system).density) < 0.05


def test_robin_condition_needs_walls_and_temperature():
    disc = MeanField(Disc(1.0, 8), lambda w: w[..., 0])
    with pytest.raises(ParameterError, match="straight walls"):
        robin_residual(disc, disc.grid.uniform())
    cold = log_gas(beta=math.inf)
    with pytest.raises(ParameterError, match="finite"):
        robin_residual(cold, cold.grid.uniform())


def test_free_energy_of_the_uniform_density():
    system = MeanField(
        Interval(0, 1, 500), lambda w: w[..., 0] ** 2, Riesz(s=0), 2.0, 4.0
    )
    parts = system.free_energy(system.grid.uniform())
    assert parts.external == pytest.approx(1 / 3, abs=1e-6)
    assert parts.interaction == pytest.approx(1.5, abs=1e-9)  # int int -log|x-y| = 3/2
    assert parts.entropy == pytest.approx(0, abs=1e-12)


def test_energy_of_particles_is_near_that_of_their_density():
    """With N independent draws the error is a few N^-1/2."""
    system = log_gas()
    uniform = torch.rand(1000, 1, dtype=torch.float64, generator=_generator()) * 2 - 1
    found = float(system.hamiltonian().value(Particles(uniform)))
    parts = system.free_energy(system.grid.uniform())
    assert found == pytest.approx(parts.external + parts.interaction, abs=0.05)


def test_potential_from_data_is_the_alignment_of_the_library():
    x = torch.tensor([[0.3], [1.2], [-0.7]], dtype=torch.float64)
    labels = torch.tensor([[1.0], [-1.0], [1.0]], dtype=torch.float64)
    objective = FourierAlignment(Sample(x, labels))
    system = MeanField(Interval(-3, 3, 50), objective)
    points = torch.from_numpy(system.grid.points)
    expected = objective.potential(Particles(points)).numpy()
    np.testing.assert_allclose(system.external, expected)


def test_potentials_are_checked():
    with pytest.raises(ParameterError, match="one value per position"):
        _ = MeanField(Interval(), lambda w: w).external
    with pytest.raises(ParameterTypeError, match="tensor"):
        _ = MeanField(Interval(), lambda w: 1.0).external
    with pytest.raises(ParameterError, match="finite on the grid"):
        _ = MeanField(Interval(), lambda w: w[..., 0].log()).external
    with pytest.raises(ParameterError, match="strength"):
        MeanField(Interval(), lambda w: w[..., 0], strength=-1.0)


def test_constant_potentials_have_no_force():
    field = Potential(lambda w: torch.ones(w.shape[:-1])).field(
        Particles(torch.zeros(3, 1))
    )
    assert (field.gradient == 0).all()


def _generator():
    return torch.Generator().manual_seed(0)
