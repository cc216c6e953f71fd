import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.integrate import quad

from coulomb._support.errors import ParameterError
from coulomb.interactions import Riesz
from coulomb.theory import Disc, Interval, MeanField, RadialBall, Rectangle
from coulomb.theory.pair_sums import (
    ConvolutionSum,
    ShellSum,
    cell_averages,
    check_continuum,
    grid_sum,
    radial,
)


def second_difference(primitive, k):
    """The mean of g over two unit cells, from the second primitive of g."""
    return primitive(k + 1) - 2 * primitive(k) + primitive(abs(k - 1))


@pytest.mark.parametrize("s", [-1.5, -0.5, 0.3, 0.9])
def test_powers_on_the_line_in_closed_form(s):
    table = cell_averages(Riesz(s=s), (12,), (1.0,))
    sign = 1 if s > 0 else -1
    for k in range(12):
        exact = second_difference(
            lambda r: sign * abs(r) ** (2 - s) / ((1 - s) * (2 - s)), k
        )
        assert table[k] == pytest.approx(exact, rel=1e-9)


def test_logarithm_on_the_line_in_closed_form():
    table = cell_averages(Riesz(s=0), (12,), (1.0,))

    def primitive(r):
        return 0.75 * r * r - 0.5 * r * r * np.log(r) if r else 0.0

    for k in range(12):
        exact = second_difference(primitive, k)
        assert table[k] == pytest.approx(exact, abs=1e-9)


@pytest.mark.parametrize("k", [0, 1, 3, 10])
def test_truncated_kernels_on_the_line(k):
    kernel = Riesz(s=1.5, truncation=0.3)
    table = cell_averages(kernel, (12,), (0.5,))

    def integrand(t):
        return (1 - abs(t)) * radial(kernel, np.array([0.5 * abs(k + t)]))[0]

    kinks = sorted({-1, 0, 1, *(x for x in (-k - 0.6, -k + 0.6) if abs(x) < 1)})
    pieces = itertools.pairwise(kinks)
    exact = sum(quad(integrand, low, high)[0] for low, high in pieces)
    assert table[k] == pytest.approx(exact, rel=1e-3 if k else 1e-9)


@pytest.mark.parametrize("s, truncation", [(0, 0), (1, 0), (1.6, 0), (2.5, 0.07)])
def test_averages_in_the_plane_agree_with_random_points(s, truncation):
    kernel = Riesz(s=s, truncation=truncation)
    table = cell_averages(kernel, (4, 4), (0.2, 0.1))
    u = np.random.default_rng(0).random((400_000, 4))
    for k, m in [(0, 0), (1, 0), (1, 1), (3, 2)]:
        x, y = 0.2 * (k + u[:, 0] - u[:, 1]), 0.1 * (m + u[:, 2] - u[:, 3])
        values = radial(kernel, np.hypot(x, y))
        # Five standard errors; for s >= 1 the variance at offset zero is infinite.
        error = 5 * values.std() / np.sqrt(values.size)
        if k or m or s < 1 or truncation:
            assert abs(values.mean() - table[k, m]) < error


@settings(max_examples=15)
@given(
    st.floats(-1.5, 0.9),
    st.integers(4, 40),
    st.integers(0, 10**6),
)
def test_convolution_is_the_direct_sum_on_the_line(s, cells, seed):
    pairs = ConvolutionSum(Riesz(s=s), Interval(-1, 1, cells))
    masses = np.random.default_rng(seed).normal(size=cells)
    direct = pairs.dense() @ masses
    np.testing.assert_allclose(
        pairs(masses), direct, atol=1e-11 * max(1, np.abs(pairs.dense()).max() * cells)
    )


@pytest.mark.parametrize("grid", [Rectangle((0, 0), (1, 2), (7, 10)), Disc(1.0, 14)])
def test_convolution_is_the_direct_sum_in_the_plane(grid):
    pairs = grid_sum(Riesz(s=1.2), grid)
    masses = np.random.default_rng(0).normal(size=grid.size)
    direct = pairs.dense() @ masses
    np.testing.assert_allclose(pairs(masses), direct, atol=1e-11 * np.abs(direct).max())


@pytest.mark.parametrize("s", [-1, 0, 0.5])
def test_energy_is_positive_on_differences_of_densities(s):
    matrix = ConvolutionSum(Riesz(s=s), Interval(-2, 2, 60)).dense()
    centring = np.eye(60) - 1 / 60
    eigenvalues = np.linalg.eigvalsh(centring @ matrix @ centring)
    assert eigenvalues.min() > -1e-12


@pytest.mark.parametrize("s", [-0.5, 0.0, 0.5, 1.0, 1.5, 2.0, 2.5])
def test_shells_agree_with_points_on_spheres(s):
    grid = RadialBall(1.0, 40)
    matrix = ShellSum(Riesz(s=s), grid).dense()
    a, b = grid.centres[10, 0], grid.centres[30, 0]
    cosines = np.linspace(-1, 1, 20001)
    gaps = np.sqrt(a * a + b * b - 2 * a * b * cosines)
    mean = np.trapezoid(radial(Riesz(s=s), gaps), cosines) / 2
    # The average over the thickness of the shells changes the value by O(h^2).
    assert matrix[10, 30] == pytest.approx(mean, rel=2e-3)
    np.testing.assert_allclose(matrix, matrix.T)


def test_infinite_energies_are_refused_with_the_reason():
    for s, dim in [(1.0, 1), (2.0, 2), (3.5, 3)]:
        with pytest.raises(ParameterError, match="For s >= d the continuum energy of"):
            check_continuum(Riesz(s=s), dim)
    with pytest.raises(ParameterError, match="s >= d"):
        MeanField(Interval(), lambda w: w[..., 0], Riesz(s=1.0), strength=1.0)
    check_continuum(Riesz(s=5.0, truncation=0.1), 1)
    MeanField(Interval(), lambda w: w[..., 0], Riesz(s=1.0), strength=0.0)


def test_truncated_shells_are_refused():
    with pytest.raises(ParameterError, match="without truncation"):
        ShellSum(Riesz(s=1, truncation=0.1), RadialBall(1.0, 10))
