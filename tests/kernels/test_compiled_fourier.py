import kernel_twins as plain
import numpy as np
import pytest

from coulomb.kernels.math import sincos_row
from coulomb.kernels.particles import FourierData


def fourier_alignment(x, y, w, scale):
    return FourierData.of(x, y).alignment(w, scale=scale)


@pytest.mark.parametrize(("real", "tolerance"), [("f4", 3e-7), ("f8", 1e-14)])
def test_sine_and_cosine_up_to_the_largest_angle(rng, real, tolerance):
    multiples = np.arange(-6366, 6367) * (np.pi / 2)
    angles = np.concatenate([rng.uniform(-1e4, 1e4, 100_000), multiples, [0.0]])
    angles = angles.astype(real)
    sine, cosine = np.empty_like(angles), np.empty_like(angles)
    sincos_row(angles, sine, cosine)
    exact = angles.astype("f8")
    np.testing.assert_allclose(sine, np.sin(exact), rtol=0, atol=tolerance)
    np.testing.assert_allclose(cosine, np.cos(exact), rtol=0, atol=tolerance)


@pytest.mark.parametrize("n", [1, 8, 33, 1024, 1500])
@pytest.mark.parametrize(("p", "c"), [(1, 1), (2, 3), (3, 1), (4, 1), (5, 2), (8, 10)])
def test_float64_is_exact(rng, n, p, c):
    x, y = rng.normal(size=(n, p)), rng.normal(size=(n, c))
    w = rng.normal(size=(7, p))
    potential, gradient = fourier_alignment(x, y, w, scale=0.3 / n)
    expected = plain.fourier_potential(x, y, w, 0.3 / n)
    np.testing.assert_allclose(potential, expected, rtol=1e-11, atol=1e-13)
    expected = plain.fourier_gradient(x, y, w, 0.3 / n)
    np.testing.assert_allclose(gradient, expected, rtol=1e-11, atol=1e-11)


def test_gradient_is_the_derivative_of_the_potential(rng):
    x, y, w = (
        rng.normal(size=(40, 3)),
        rng.normal(size=(40, 3)),
        rng.normal(size=(9, 3)),
    )
    data = FourierData.of(x, y)
    slope = plain.numerical_gradient(lambda v: data.alignment(v, scale=0.1)[0], w)
    np.testing.assert_allclose(data.alignment(w, scale=0.1)[1], slope, atol=1e-6)


@pytest.mark.parametrize(("n", "p", "c"), [(70, 5, 1), (20_000, 5, 1), (1400, 32, 3)])
def test_float32_agrees_to_rounding(rng, n, p, c):
    x, y = rng.normal(size=(n, p)).astype("f4"), rng.normal(size=(n, c)).astype("f4")
    w = rng.normal(size=(20, p)).astype("f4")
    potential, gradient = fourier_alignment(x, y, w, scale=1 / n)
    assert potential.dtype == gradient.dtype == np.float32
    wide = [a.astype("f8") for a in (x, y, w)]
    expected = plain.fourier_potential(*wide, 1 / n)
    # Angles carry the rounding of p products, sums that of n random terms.
    assert np.abs(potential - expected).max() < 1e-5 * np.abs(expected).max()
    expected = plain.fourier_gradient(*wide, 1 / n)
    assert np.abs(gradient - expected).max() < 1e-5 * np.abs(expected).max()


def test_float32_sums_of_a_million_terms_keep_their_digits():
    x = np.zeros((1_000_000, 1), "f4")
    potential, _ = fourier_alignment(
        x, np.full_like(x, 0.1), np.ones((1, 1), "f4"), scale=1.0
    )
    # Equal terms round the same way: the worst case for the sums of a tile.
    assert potential[0] == pytest.approx(-1e10, rel=3e-6)


@pytest.mark.parametrize("real", ["f4", "f8"])
def test_threads_change_no_bit(rng, real):
    x, y = rng.normal(size=(3000, 5)).astype(real), rng.normal(size=(3000, 2))
    data = FourierData.of(x, y)
    w = rng.normal(size=(301, 5)).astype(real)
    one, two = (data.alignment(w, scale=1.0, threads=t) for t in (1, 2))
    for a, b in zip(one, two, strict=True):
        np.testing.assert_array_equal(a, b)


def test_nan_is_not_hidden(rng):
    x = rng.normal(size=(40, 2))
    x[3, 1] = np.nan
    potential, gradient = fourier_alignment(x, x[:, :1] * 0 + 1, x[:1], scale=1.0)
    assert np.isnan(potential).all()
    assert np.isnan(gradient).all()
