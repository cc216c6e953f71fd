import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import wasserstein_distance

from coulomb._support.errors import ParameterError
from coulomb.interactions import Riesz
from coulomb.theory import (
    Disc,
    GapSettings,
    Interval,
    MeanField,
    kernel_observable,
    line_distances,
    mean_field_gap,
)

KERNEL = kernel_observable([1.0], [0.0])
GRID = Interval(-1, 1, 200)
START = np.exp(-((GRID.centres[:, 0] - 0.4) ** 2) / 0.1)


def bowl(w):
    return (w**2).sum(dim=-1)


def run(interaction, settings, counts=(16, 64, 256), generator=None):
    system = MeanField(GRID, bowl, interaction, 1.0, 2.0)
    return mean_field_gap(
        system,
        START,
        0.2,
        counts,
        KERNEL,
        settings=settings,
        generator=generator or torch.Generator().manual_seed(0),
    )


@pytest.mark.parametrize("boundary", ["project", "reflect"])
@pytest.mark.parametrize(
    "interaction", [Riesz(s=-1), Riesz(s=0), Riesz(s=0.5, truncation=0.1)]
)
def test_particles_meet_the_density_as_one_over_root_n(interaction, boundary):
    """Exponent -1/2 within four standard errors of the fit and 0.05 for the step."""
    gap = run(
        interaction,
        GapSettings(step_size=5e-3, boundary=boundary, replicas=10, clip=50.0),
    )
    assert (np.diff(gap.first) < 0).all()
    assert (np.diff(gap.second) < 0).all()
    for fit in (gap.first_exponent, gap.second_exponent, gap.observable_exponent):
        assert abs(fit.slope + 0.5) < 4 * fit.standard_error + 0.05
        assert fit.low < fit.slope < fit.high
    # At 256 particles the observable is right to a few hundredths.
    assert abs(gap.bias[-1]) < 0.01 + 4 * gap.bias_errors[-1]
    assert gap.positions[-1].shape == (10, 256, 1)


def test_gap_on_a_disc_by_the_observable_alone(generator):
    system = MeanField(Disc(1.0, 24), bowl, Riesz(s=0), 1.0, 2.0)
    gap = mean_field_gap(
        system,
        system.grid.uniform(),
        0.1,
        [8, 32, 128],
        kernel_observable([1.0, 0.0], [0.0, 0.0]),
        settings=GapSettings(step_size=5e-3, replicas=12, clip=50.0),
        generator=generator,
    )
    assert gap.first_exponent is None
    assert np.isnan(gap.first).all()
    fit = gap.observable_exponent
    assert abs(fit.slope + 0.5) < 4 * fit.standard_error + 0.1


def test_gap_settings_are_checked(generator):
    with pytest.raises(ParameterError, match="boundary"):
        GapSettings(boundary="absorb")
    with pytest.raises(ParameterError, match="at least 3 values"):
        run(Riesz(s=-1), GapSettings(step_size=0.05, replicas=2), counts=(4, 8))


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
