import math

import numpy as np
import pytest
import torch
from scipy.optimize import brentq

from coulomb._support.errors import ParameterError
from coulomb.features import feature_maps
from coulomb.interactions import Riesz
from coulomb.theory import (
    Disc,
    ImportanceSettings,
    Interval,
    MeanField,
    Scaling,
    contract,
    deviation_curve,
    equilibrium,
    free_energy_curve,
    kernel_observable,
    partition_function,
    rate_function,
    tail_probability,
)
from coulomb.theory.deviations import log_mean


def nothing(w):
    return 0 * w[..., 0]


def first(w):
    return w[..., 0]


def bowl(w):
    return w[..., 0] ** 2


def log_gas(beta=2.0, cells=120):
    return MeanField(Interval(-2, 2, cells), bowl, Riesz(s=0), 1.0, beta)


def test_rate_is_zero_at_rest_and_positive_elsewhere(rng):
    for beta in (1.0, math.inf):
        gas = log_gas(beta)
        rest = equilibrium(gas)
        assert rate_function(gas, rest.density) == pytest.approx(0, abs=1e-12)
        for _ in range(5):
            other = gas.grid.normalise(rng.random(gas.grid.size))
            assert rate_function(gas, other, rest=rest) > 0


def test_rate_without_interaction_is_the_relative_entropy(rng):
    """Sanov: J(mu) = Ent(mu | Gibbs)."""
    gas = MeanField(Interval(-1, 1, 100), bowl, inverse_temperature=3.0)
    gibbs = equilibrium(gas).density
    other = gas.grid.normalise(rng.random(100))
    entropy = float(other * np.log(other / gibbs) @ gas.grid.volumes)
    assert rate_function(gas, other) == pytest.approx(entropy, rel=1e-12)


@pytest.mark.parametrize("level", [-0.7, 0.2, 0.5])
def test_contraction_without_interaction_is_cramer(level):
    """Uniform law on [-1, 1]: I(a) = a t - log(sinh t / t) at a = coth t - 1/t."""
    found = contract(MeanField(Interval(-1, 1, 2000), nothing), first, level)
    tilt = brentq(lambda t: 1 / math.tanh(t) - 1 / t - level, -50, 50.1)
    rate = level * tilt - math.log(math.sinh(tilt) / tilt)
    assert found.tilt == pytest.approx(tilt, rel=1e-4)
    assert found.rate == pytest.approx(rate, rel=1e-4)
    assert found.level == pytest.approx(level, abs=1e-6)


@pytest.mark.parametrize("beta", [2.0, math.inf])
def test_tilt_is_the_slope_of_the_rate(beta):
    gas = log_gas(beta)
    step = 0.02 if math.isinf(beta) else 1e-3
    low, middle, high = (contract(gas, first, 0.4 + k * step) for k in (-1, 0, 1))
    slope = (high.rate - low.rate) / (2 * step)
    assert slope == pytest.approx(middle.tilt, rel=2e-3)


def test_contraction_at_zero_temperature_in_closed_form():
    """Moving a semicircle in V = c x^2 by a costs c a^2: translation is cheapest."""
    gas = log_gas(math.inf, cells=400)
    assert contract(gas, first, 0.5).rate == pytest.approx(0.25, rel=1e-2)


def test_contraction_to_the_mean_of_a_confined_gas_is_gaussian():
    """The mean of a gas in c x^2 is Gaussian at any beta: J = beta c a^2."""
    gas = MeanField(Interval(-4, 4, 400), bowl, Riesz(s=0), 1.0, 3.0)
    assert contract(gas, first, 0.5).rate == pytest.approx(3 * 0.25, rel=1e-5)


def test_levels_outside_the_range_are_refused():
    with pytest.raises(ParameterError, match="range"):
        contract(log_gas(), first, 3.0)
    with pytest.raises(ParameterError, match="strength"):
        contract(MeanField(Interval(), bowl, inverse_temperature=math.inf), first, 0.5)


def test_kernel_observables():
    w = torch.tensor([[0.3, -0.2], [1.0, 2.0]], dtype=torch.float64)
    x, y = [1.0, 0.5], [0.2, 0.1]
    gap = torch.tensor([0.8, 0.4], dtype=torch.float64)
    torch.testing.assert_close(kernel_observable(x, y)(w), torch.cos(w @ gap))
    favor = feature_maps.build("favor")
    product = kernel_observable(x, y, feature_map=favor)(w)
    first_x, first_y = torch.tensor(x).double(), torch.tensor(y).double()
    squares = 0.5 * (first_x @ first_x + first_y @ first_y)
    torch.testing.assert_close(product, torch.exp(w @ (first_x + first_y) - squares))
    with pytest.raises(ParameterError, match="phases"):
        kernel_observable(x, y, feature_map=feature_maps.build("fourier"))


def irwin_hall(n, level):
    """The exact chance that the mean of n uniform numbers in [-1, 1] is above level."""
    x = n * (1 - level) / 2
    terms = ((-1) ** k * math.comb(n, k) * (x - k) ** n for k in range(int(x) + 1))
    return sum(terms) / math.factorial(n)


@pytest.mark.parametrize("n, level", [(5, 0.7), (20, 0.7), (12, 0.8)])
@pytest.mark.parametrize("bridges", [0, 4])
def test_rare_events_of_independent_particles(n, level, bridges, generator):
    """Down to 1e-9, within five standard errors of the exact probability."""
    gas = MeanField(Interval(-1, 1, 100), nothing)
    settings = ImportanceSettings(configurations=3000, bridges=bridges)
    found = tail_probability(
        gas, n, first, level, settings=settings, generator=generator
    )
    exact = math.log(irwin_hall(n, level))
    assert found.standard_error < 0.06
    assert abs(found.value - exact) < 5 * found.standard_error
    lower = tail_probability(
        gas, n, first, -level, settings=settings, generator=generator
    )
    assert abs(lower.value - exact) < 5 * lower.standard_error


@pytest.mark.parametrize("bridges", [0, 6])
def test_partition_function_of_two_particles_by_quadrature(bridges, generator):
    gas = MeanField(Interval(-1, 1, 100), bowl, Riesz(s=0.5), 1.0, 2.0)
    x = (np.arange(1000) + 0.5) / 500 - 1
    one, two = np.meshgrid(x, x)
    gap = np.where(one == two, np.inf, np.abs(one - two))
    energy = 0.5 * (one**2 + two**2) + 0.5 * gap**-0.5
    weights = np.where(one == two, 0, np.exp(-2 * 2 * energy))
    exact = math.log(weights.sum() / 500**2)
    found = partition_function(
        gas,
        2,
        settings=ImportanceSettings(8000, bridges=bridges),
        generator=generator,
    )
    # Five standard errors, and the quadrature's own error at the diagonal.
    assert abs(found.value - exact) < 5 * found.standard_error + 1e-3
    assert found.standard_error < 0.02


def test_partition_function_on_a_disc(generator):
    """No energy: the volume to the power N, without error."""
    gas = MeanField(Disc(1.0, 16), nothing)
    found = partition_function(gas, 3, generator=generator)
    assert found.value == pytest.approx(3 * math.log(math.pi), abs=1e-9)


def test_gaussian_mean_of_a_log_gas_at_any_number_of_particles(generator):
    """The mean of N particles in c x^2 with any repulsion is N(0, 1/(2 c beta N)).

    The centre of mass separates from the differences; walls are too far to matter.
    """
    gas = MeanField(Interval(-4, 4, 400), bowl, Riesz(s=0), 1.0, 2.0)
    n, level = 16, 0.6
    settings = ImportanceSettings(configurations=6000)
    found = tail_probability(
        gas, n, first, level, settings=settings, generator=generator
    )
    scale = math.sqrt(1 / (2 * 2 * n))
    exact = math.log(0.5 * math.erfc(level / scale / math.sqrt(2)))
    assert abs(found.value - exact) < 5 * found.standard_error
    assert found.standard_error < 0.15


def test_log_probability_falls_at_speed_n_with_the_predicted_rate(generator):
    gas = MeanField(Interval(-3, 3, 200), bowl, Riesz(s=0), 0.5, 1.0)
    curve = deviation_curve(
        gas,
        kernel_observable([1.0], [0.0]),
        0.25,
        [8, 16, 32],
        settings=ImportanceSettings(configurations=3000),
        generator=generator,
    )
    assert curve.log_probabilities[0] > curve.log_probabilities[-1]
    # Four standard errors, and 3 % for corrections of order 1/N.
    slack = 4 * curve.fit.standard_error + 0.03 * curve.rate
    assert abs(curve.fit.slope - curve.rate) < slack
    np.testing.assert_allclose(curve.predictions, -curve.rate * curve.counts)


def test_log_probability_falls_at_speed_beta_n(generator):
    """beta_N = N^2 for the mean of a log gas: rate c delta^2, whatever the entropy."""
    gas = MeanField(Interval(-3, 3, 300), bowl, Riesz(s=0), 0.2)
    curve = deviation_curve(
        gas,
        first,
        0.5,
        [2, 3, 4, 5],
        scaling=Scaling(1.0, power=2.0),
        settings=ImportanceSettings(configurations=2000, bridges=4),
        generator=generator,
    )
    assert curve.rate == pytest.approx(0.25, rel=0.02)
    exact = [math.log(math.erfc(0.5 * math.sqrt(speed))) for speed in curve.speeds]
    gap = np.abs(curve.log_probabilities - exact)
    assert (gap < 5 * curve.standard_errors + 0.02).all()


def test_free_energy_tends_to_its_variational_limit(generator):
    gas = MeanField(Interval(-1, 1, 100), bowl, Riesz(s=-1), 1.0)
    curve = free_energy_curve(
        gas,
        [4, 8, 16, 32],
        scaling=Scaling(2.0),
        settings=ImportanceSettings(configurations=2000),
        generator=generator,
    )
    gaps = np.abs(curve.values - curve.limit)
    # The correction is of order 1/N: halving with each doubling.
    assert (gaps[1:] < 0.7 * gaps[:-1] + 5 * curve.standard_errors[1:]).all()
    assert gaps[-1] < 0.01
    np.testing.assert_allclose(curve.finite_limits, curve.limit)


def test_free_energy_of_cold_systems_tends_to_the_ground_state(generator):
    gas = MeanField(Interval(-1, 1, 100), bowl, Riesz(s=-1), 1.0)
    curve = free_energy_curve(
        gas,
        [2, 8, 32],
        scaling=Scaling(1.0, power=1.5),
        settings=ImportanceSettings(configurations=1000, bridges=3),
        generator=generator,
    )
    gaps = np.abs(curve.values - curve.limit)
    assert (np.diff(gaps) < 0).all()
    assert curve.limit == pytest.approx(equilibrium(gas.at(math.inf)).free_energy)


def test_scalings():
    assert Scaling(2.0).total(8) == 16
    assert Scaling(2.0).speed(8) == 8
    assert Scaling(2.0, power=2).speed(8) == 128
    gas = log_gas()
    assert Scaling(2.0, power=2).limit(gas).inverse_temperature == math.inf
    assert Scaling(2.0, power=2).finite(gas, 8).inverse_temperature == 16
    with pytest.raises(ParameterError, match="power"):
        Scaling(1.0, power=0.5)


def test_log_mean_of_lognormal_numbers(rng):
    """E exp(Z) = e^(1/2); the error is the delta method's."""
    found = log_mean(rng.normal(size=20000) + 1000)
    assert abs(found.value - 1000.5) < 5 * found.standard_error
    assert found.effective_size == pytest.approx(20000 / math.e, rel=0.15)
    assert log_mean(np.full(5, -np.inf)).value == -math.inf
