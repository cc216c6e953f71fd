import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.special import erf, j0

from coulomb._support.errors import ParameterError
from coulomb.interactions import Riesz
from coulomb.theory import (
    Disc,
    FlowSettings,
    Interval,
    MeanField,
    RadialBall,
    Rectangle,
    equilibrium,
    evolve,
    relax,
)
from coulomb.theory.flow import FlowEnd, bernoulli, implicit_step, rate_and_slope


def nothing(w):
    return 0 * w[..., 0]


def bowl(w):
    return (w**2).sum(dim=-1) - 0.5 * w[..., 0]


def mass_error(system, density):
    return abs(float(density @ system.grid.volumes) - 1)


SYSTEMS = {
    "interval log": MeanField(Interval(-1, 1, 80), bowl, Riesz(s=0), 1.0, 2.0),
    "interval riesz cold": MeanField(
        Interval(-1, 1, 80), bowl, Riesz(s=0.7), 1.0, 50.0
    ),
    "interval zero temperature": MeanField(
        Interval(-2, 2, 60), bowl, Riesz(s=0), 1.0, math.inf
    ),
    "interval truncated": MeanField(
        Interval(-1, 1, 80), bowl, Riesz(s=2, truncation=0.2), 1.0, 3.0
    ),
    "interval advection": MeanField(Interval(-1, 1, 60), bowl, Riesz(), 0.0, math.inf),
    "rectangle": MeanField(
        Rectangle((-1, -1), (1, 2), (16, 20)), bowl, Riesz(s=1), 1.0, 4.0
    ),
    "disc": MeanField(Disc(1.0, 20), bowl, Riesz(s=0), 2.0, 5.0),
    "ball": MeanField(RadialBall(1.0, 60), bowl, Riesz(s=1), 1.0, 5.0),
}


@pytest.mark.parametrize("name", SYSTEMS)
def test_mass_sign_and_free_energy_are_kept(name):
    system = SYSTEMS[name]
    start = np.exp(-4 * ((system.grid.centres - 0.3) ** 2).sum(axis=1))
    flow = evolve(system, start, [0.05, 0.3])
    assert flow.end is FlowEnd.TIME_REACHED
    assert all(mass_error(system, density) < 1e-12 for density in flow.densities)
    assert flow.densities.min() >= 0
    assert (np.diff(flow.free_energies) <= 0).all()
    assert (np.diff(flow.step_times) > 0).all()
    # The recorded energies are those of the densities, to rounding.
    assert flow.free_energies[-1] == pytest.approx(
        system.free_energy(flow.last).total, rel=1e-12, abs=1e-12
    )


@settings(max_examples=20)
@given(
    st.floats(1e-5, 1e3),
    st.sampled_from([0.1, 1.0, 100.0, math.inf]),
    st.sampled_from([-1.0, 0.0, 0.6]),
    st.integers(0, 1000),
)
def test_one_implicit_step_of_any_length_is_safe(dt, beta, s, seed):
    """Positive interactions: the free energy falls without any step control."""
    system = MeanField(Interval(-1, 1, 30), bowl, Riesz(s=s), 1.0, beta)
    rho = system.grid.normalise(np.random.default_rng(seed).random(30) ** 4)
    step = implicit_step(system, rho, dt, tolerance=1e-10, max_iterations=50)
    assert mass_error(system, step.density) < 1e-12
    assert step.density.min() >= 0
    if step.converged:
        before, after = system.free_energy(rho), system.free_energy(step.density)
        assert after.total <= before.total + 1e-9


def test_relaxation_ends_at_the_gibbs_density():
    for name in ("interval log", "interval riesz cold", "rectangle", "disc", "ball"):
        system = SYSTEMS[name]
        flow = relax(system)
        rest = equilibrium(system)
        assert flow.end is FlowEnd.STATIONARY
        assert np.abs(flow.last - rest.density) @ system.grid.volumes < 1e-6
        assert (np.diff(flow.free_energies) <= 0).all()


def test_relaxation_at_zero_temperature_ends_at_the_ground_state():
    """The upwind flux smears the edge of the support over a few cells."""
    system = SYSTEMS["interval zero temperature"]
    flow = relax(system, tolerance=1e-6)
    rest = equilibrium(system)
    assert np.abs(flow.last - rest.density) @ system.grid.volumes < 0.05
    assert flow.free_energies[-1] == pytest.approx(rest.free_energy, abs=1e-3)
    assert flow.free_energies[-1] >= rest.free_energy - 1e-12


def order(errors):
    return np.log2(errors[:-1] / np.array(errors[1:]))


def test_second_order_in_space_against_the_heat_kernel():
    errors, time = [], 0.1
    for cells in (20, 40, 80):
        grid = Interval(-1, 1, cells)

        def exact(t, edges=grid.edges):
            wave = np.diff(np.sin(np.pi * (edges + 1))) / np.pi / np.diff(edges)
            return 0.5 * (1 + 0.8 * wave * np.exp(-(np.pi**2) * t))

        system = MeanField(grid, nothing)
        flow = evolve(system, exact(0), [time], settings=FlowSettings(tolerance=1e-5))
        errors.append(np.abs(flow.last - exact(time)) @ grid.volumes)
    assert (order(errors) > 1.9).all()


@pytest.mark.parametrize("s", [0.0, 0.5])
def test_second_order_in_space_with_interaction(s):
    densities, rests = {}, {}
    for cells in (40, 80, 320):
        grid = Interval(-2, 2, cells)
        system = MeanField(
            grid, lambda w: 4 * w[..., 0] ** 2 + w[..., 0], Riesz(s=s), 1.0, 2.0
        )
        start = np.diff(erf((grid.edges - 0.3) / 0.5))
        settings = FlowSettings(tolerance=1e-4)
        densities[cells] = evolve(system, start, [0.2], settings=settings).last
        rests[cells] = equilibrium(system).density
    for found in (densities, rests):
        errors = [
            np.abs(found[n] - found[320].reshape(n, -1).mean(axis=1)).mean()
            for n in (40, 80)
        ]
        assert order(errors) > 1.8


def test_second_order_on_a_disc_against_a_bessel_mode():
    errors, wave = [], 3.8317059702075125  # the first zero of J_1: no flux at r = 1
    for cells in (16, 32):
        grid = Disc(1.0, cells)
        mode = j0(wave * np.linalg.norm(grid.points, axis=1))
        system = MeanField(grid, nothing)
        start = (1 + 0.8 * mode) / np.pi
        flow = evolve(system, start, [0.05], settings=FlowSettings(tolerance=1e-4))
        exact = (1 + 0.8 * mode * np.exp(-(wave**2) * 0.05)) / np.pi
        errors.append(np.abs(flow.last - exact) @ grid.volumes)
    assert order(errors) > 1.7


def test_ornstein_uhlenbeck_moments_at_every_time():
    """V = c x^2 without interaction; walls so far that no mass meets them."""
    c, beta, mean, variance = 1.5, 4.0, 0.6, 0.02
    grid = Interval(-3, 3, 600)
    x = grid.centres[:, 0]
    system = MeanField(grid, lambda w: c * w[..., 0] ** 2, inverse_temperature=beta)
    times = np.array([0.1, 0.4, 1.0])
    flow = evolve(
        system,
        np.exp(-((x - mean) ** 2) / (2 * variance)),
        times,
        settings=FlowSettings(tolerance=1e-4),
    )
    masses = flow.densities * grid.volumes
    means = masses @ x
    variances = masses @ x**2 - means**2
    decay = np.exp(-2 * c * times)
    limit = 1 / (2 * c * beta)
    np.testing.assert_allclose(means, mean * decay, atol=2e-4)
    np.testing.assert_allclose(
        variances, limit + (variance - limit) * decay**2, rtol=4e-3
    )


def test_zero_temperature_advection_follows_the_characteristics():
    """x' = -2 c x carries the mean; the upwind flux is of first order in space."""
    grid = Interval(-1, 1, 400)
    x = grid.centres[:, 0]
    system = MeanField(grid, lambda w: w[..., 0] ** 2, inverse_temperature=math.inf)
    flow = evolve(system, np.exp(-((x - 0.5) ** 2) / 0.01), [0.3])
    mean = float(flow.last * grid.volumes @ x)
    assert mean == pytest.approx(0.5 * np.exp(-0.6), rel=0.01)


def test_two_log_charges_part_as_in_closed_form():
    """The continuum twin of d(r^2)/dt = 4 lambda is d/dt var = lambda + 2/beta."""
    grid = Interval(-4, 4, 800)
    x = grid.centres[:, 0]
    system = MeanField(grid, nothing, Riesz(s=0), 0.7, 2.0)
    flow = evolve(system, np.exp(-(x**2) / 0.5), [0.1, 0.3])
    second = flow.densities * grid.volumes @ x**2
    growth = (second[1] - second[0]) / 0.2
    assert growth == pytest.approx(0.7 + 2 / 2.0, rel=1e-3)


def test_bernoulli_function_and_its_derivative():
    x = np.array([-800.0, -3.0, -1e-7, 0.0, 1e-7, 1e-4, 3.0, 800.0])
    assert (bernoulli(x) >= 0).all()
    np.testing.assert_allclose(bernoulli(-x), bernoulli(x) + x, atol=1e-9)
    for beta in (0.5, 7.0):
        value, slope = rate_and_slope(x[1:-1], beta)
        plus, _ = rate_and_slope(x[1:-1] + 1e-6, beta)
        minus, _ = rate_and_slope(x[1:-1] - 1e-6, beta)
        np.testing.assert_allclose(slope, (plus - minus) / 2e-6, atol=1e-5)
        assert (value >= 0).all()


def test_cold_fluxes_become_upwind():
    differences = np.array([-1.0, 0.5])
    cold, _ = rate_and_slope(differences, 1e6)
    frozen, _ = rate_and_slope(differences, math.inf)
    np.testing.assert_allclose(cold, frozen, atol=1e-12)


def test_flows_end_with_a_reason_and_refuse_nonsense():
    system = SYSTEMS["interval log"]
    short = evolve(
        system, system.grid.uniform(), [5.0], settings=FlowSettings(max_steps=2)
    )
    assert short.end is FlowEnd.STEP_LIMIT
    seen = []
    relax(system, watch=lambda time, density: seen.append(time))
    assert len(seen) > 2
    for times in ([], [0.2, 0.1], [-1.0]):
        with pytest.raises(ParameterError, match="increasing"):
            evolve(system, system.grid.uniform(), times)
