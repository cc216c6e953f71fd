import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import wasserstein_distance

from coulomb._support.errors import ParameterError
from coulomb.theory import Disc, Interval, line_distances


def test_one_particle_against_the_uniform_law():
    grid = Interval(0, 1, 7)
    gap = line_distances(np.array([0.5]), grid, grid.uniform())
    assert gap.first == pytest.approx(0.25)
    assert gap.second == pytest.approx(np.sqrt(1 / 12))


def test_particles_in_the_middle_of_equal_shares_are_nearest():
    grid, n = Interval(-1, 1, 50), 10
    places = -1 + 2 * (np.arange(n) + 0.5) / n
    gap = line_distances(places, grid, grid.uniform())
    assert gap.first == pytest.approx(2 / n / 4)
    assert gap.second == pytest.approx(2 / n / np.sqrt(12))


@given(st.integers(1, 30), st.integers(0, 10**6))
def test_first_distance_agrees_with_scipy_on_a_fine_sample(n, seed):
    rng = np.random.default_rng(seed)
    grid = Interval(-2, 1, 12)
    density = rng.random(12)
    density[rng.random(12) < 0.3] = 0
    density = grid.normalise(density + 1e-12)
    points = rng.uniform(-2, 1, n)
    fine = grid.edges[:-1, None] + grid.spacing[0] * (np.arange(200) + 0.5) / 200
    weights = np.repeat(density, 200)
    expected = wasserstein_distance(points, fine.ravel(), None, weights)
    found = line_distances(points, grid, density)
    assert found.first == pytest.approx(expected, abs=grid.spacing[0] / 200)
    assert found.second >= found.first - 1e-12


def test_empty_cells_make_the_quantiles_jump():
    grid = Interval(0, 4, 4)
    density = np.array([0.5, 0.0, 0.0, 0.5])
    gap = line_distances(np.array([0.5, 3.5]), grid, density)
    assert gap.first == pytest.approx(0.25)


def test_only_on_the_line():
    with pytest.raises(ParameterError, match="Interval"):
        line_distances(np.zeros(2), Disc(1.0, 8), Disc(1.0, 8).uniform())
