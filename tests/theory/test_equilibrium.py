"""Closed forms; each test states the accuracy that is reached."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.special import betainc

from coulomb._support.errors import ParameterError
from coulomb.domains import Ball
from coulomb.dynamics.langevin import ProjectedLangevin
from coulomb.energy import Hamiltonian
from coulomb.features import Particles
from coulomb.interactions import Riesz
from coulomb.theory import (
    Disc,
    Interval,
    MeanField,
    Potential,
    RadialBall,
    Rectangle,
    equilibrium,
    gibbs_equilibrium,
    ground_state,
)
from coulomb.theory.equilibrium import gibbs_density


def nothing(w):
    return 0 * w[..., 0]


def distance(grid, density, cumulative):
    """W_1 to a law on the line, as the area between distribution functions."""
    levels = np.concatenate([[0], np.cumsum(density * grid.volumes)])
    return np.trapezoid(np.abs(levels - cumulative(grid.edges)), grid.edges)


def test_log_gas_on_an_interval_is_the_arcsine_law():
    """W_1 below 4e-4 at 400 cells; first order: the density is infinite at walls."""
    errors = []
    for cells in (200, 400):
        grid = Interval(-1, 1, cells)
        rest = equilibrium(MeanField(grid, nothing, Riesz(s=0), 1.0, math.inf))
        errors.append(
            distance(grid, rest.density, lambda x: 0.5 + np.arcsin(x) / np.pi)
        )
        assert rest.converged
    assert errors[1] < 4e-4
    assert errors[0] / errors[1] > 1.8
    # The energy is half the Robin constant, (lambda/2) log 2.
    assert rest.free_energy == pytest.approx(0.5 * math.log(2), abs=4e-4)


@pytest.mark.parametrize("s", [0.2, 0.5, 0.8])
def test_riesz_gas_on_an_interval(s):
    """Density proportional to (1 - x^2)^((s-1)/2); W_1 below 3e-4 at 400 cells."""
    grid = Interval(-1, 1, 400)
    rest = equilibrium(MeanField(grid, nothing, Riesz(s=s), 1.0, math.inf))
    a = (s + 1) / 2
    error = distance(grid, rest.density, lambda x: betainc(a, a, (x + 1) / 2))
    assert rest.converged
    assert error < 3e-4


def semicircle(radius):
    def cumulative(x):
        y = np.clip(x / radius, -1, 1)
        return 0.5 + (y * np.sqrt(1 - y * y) + np.arcsin(y)) / np.pi

    return cumulative


@settings(max_examples=8)
@given(st.floats(0.5, 3.0), st.floats(0.3, 3.0))
def test_log_gas_in_a_parabola_is_a_semicircle(c, strength):
    """W_1 below 1e-4 of the radius at 400 cells.

    The radius: on the support 2 c x = lambda PV int rho(y) / (x - y) dy, and for the
    semicircle of radius R the right side is lambda 2 x / R^2; so R = sqrt(lambda / c).
    The virial int x V' rho = lambda / 2 says the same: 2 c R^2 / 4 = lambda / 2.
    """
    radius = math.sqrt(strength / c)
    grid = Interval(-1.6 * radius, 1.6 * radius, 400)
    system = MeanField(
        grid, lambda w: c * w[..., 0] ** 2, Riesz(s=0), strength, math.inf
    )
    rest = ground_state(system)
    assert rest.converged
    assert distance(grid, rest.density, semicircle(radius)) < 1e-4 * radius
    x = grid.centres[:, 0]
    virial = float(rest.density * grid.volumes @ (2 * c * x**2))
    assert virial == pytest.approx(strength / 2, rel=1e-3)


@pytest.mark.parametrize("grid", [Rectangle(cells=(40, 40)), Disc(1.0, 40)])
def test_log_gas_of_the_plane_is_a_uniform_disc(grid):
    """Density 2c/(pi lambda) within R = sqrt(lambda/(2c)), to 1 % off the edge."""
    c, strength = 1.0, 1.0
    system = MeanField(
        grid, lambda w: c * (w**2).sum(dim=-1), Riesz(s=0), strength, math.inf
    )
    rest = equilibrium(system)
    radius, height = math.sqrt(strength / (2 * c)), 2 * c / (math.pi * strength)
    r = np.linalg.norm(grid.centres, axis=1)
    inner, outer = r < radius - 3 * grid.spacing[0], r > radius + 2 * grid.spacing[0]
    assert rest.converged
    assert np.abs(rest.density[inner] / height - 1).max() < 0.01
    assert rest.density[outer].max() == 0
    second = float(rest.density * grid.volumes @ r**2)
    assert second == pytest.approx(radius**2 / 2, rel=2e-3)


def test_coulomb_gas_in_the_ball_goes_to_the_sphere():
    """All mass in the outer shell, exactly; energy 1/2 up to the shell's thickness."""
    rest = equilibrium(
        MeanField(RadialBall(1.0, 100), nothing, Riesz(s=1), 1.0, math.inf)
    )
    assert rest.converged
    masses = rest.density * RadialBall(1.0, 100).volumes
    assert masses[-1] == pytest.approx(1, abs=1e-12)
    assert rest.free_energy == pytest.approx(0.5, abs=5e-3)


def test_coulomb_particles_in_the_ball_go_to_the_sphere(generator):
    flow = ProjectedLangevin(
        step_size=0.05, inverse_temperature=math.inf, domain=Ball(1.0)
    )
    energy = Hamiltonian(Potential(nothing), Riesz(s=1), 1.0)
    start = 0.3 * torch.randn(40, 3, generator=generator, dtype=torch.float64)
    state = flow.init(Particles(Ball(1.0).project(start)))
    state, _ = flow.advance(state, energy, 400, generator=generator)
    radii = state.particles.positions.norm(dim=-1)
    assert radii.min() > 1 - 1e-9
    # Uniform on the sphere: the centre of mass is near zero; repulsion keeps it there.
    assert state.particles.positions.mean(dim=0).norm() < 0.02


@pytest.mark.parametrize("beta", [0.5, 5.0, 100.0, 1000.0])
@pytest.mark.parametrize("s", [-1.0, 0.0, 0.7])
def test_gibbs_density_is_self_consistent(beta, s):
    grid = Interval(-2, 2, 300)
    system = MeanField(grid, lambda w: w[..., 0] ** 2, Riesz(s=s), 1.0, beta)
    rest = equilibrium(system)
    assert rest.converged
    again = gibbs_density(system, system.felt(rest.density))
    assert np.abs(again - rest.density) @ grid.volumes < 1e-8
    # U + log(rho)/beta is the level wherever there is mass.
    seen = rest.density > 1e-200
    level = rest.felt[seen] + np.log(rest.density[seen]) / beta
    np.testing.assert_allclose(level, rest.level, atol=1e-7)


def test_no_density_has_a_lower_free_energy(rng):
    system = MeanField(
        Interval(-1, 1, 60), lambda w: w[..., 0] ** 3, Riesz(s=0.3), 2.0, 3.0
    )
    rest = equilibrium(system)
    for size in (1e-3, 0.1, 1.0):
        for _ in range(20):
            other = rest.density * np.exp(size * rng.normal(size=60))
            other = system.grid.normalise(other)
            assert system.free_energy(other).total >= rest.free_energy


def test_low_temperatures_tend_to_the_ground_state():
    system = MeanField(
        Interval(-2, 2, 300), lambda w: w[..., 0] ** 2, Riesz(s=0), 1.0, math.inf
    )
    cold, frozen = equilibrium(system.at(2000.0)), equilibrium(system)
    gap = np.abs(cold.density - frozen.density) @ system.grid.volumes
    assert gap < 0.02
    assert cold.free_energy == pytest.approx(frozen.free_energy, abs=2e-3)


def test_without_interaction_the_ground_state_is_the_lowest_cell():
    system = MeanField(
        Interval(0, 1, 11), lambda w: (w[..., 0] - 0.5) ** 2, Riesz(), 0.0, math.inf
    )
    rest = equilibrium(system)
    assert np.flatnonzero(rest.density).tolist() == [5]


def test_gibbs_refuses_zero_temperature():
    system = MeanField(Interval(), nothing, inverse_temperature=math.inf)
    with pytest.raises(ParameterError, match="ground_state"):
        gibbs_equilibrium(system)
