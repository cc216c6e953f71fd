import kernel_twins as plain
import numpy as np
import pytest

from coulomb.kernels.particles import index_directions, riesz_sums

EXPONENTS = [0.0, 1.0, 2.0, -1.0, 0.7, 3.0, -0.5]


@pytest.mark.parametrize("s", EXPONENTS)
@pytest.mark.parametrize("truncation", [0.0, 0.8])
@pytest.mark.parametrize(("n", "p"), [(2, 1), (33, 2), (60, 5)])
def test_equals_the_double_sum(rng, s, truncation, n, p):
    w = rng.normal(size=(n, p))
    potential, gradient = riesz_sums(w, s=s, truncation=truncation)
    expected, slope = plain.riesz(w, s, truncation)
    np.testing.assert_allclose(potential, expected, rtol=1e-12, atol=1e-13)
    np.testing.assert_allclose(gradient, slope, rtol=1e-10, atol=1e-12)
    single = riesz_sums(w.astype("f4"), s=s, truncation=truncation)[1]
    scale = np.abs(slope).max() + 1e-12
    narrow = plain.riesz(w.astype("f4").astype("f8"), s, truncation)[1]
    assert np.abs(single - narrow).max() < 3e-6 * scale


@pytest.mark.parametrize("s", EXPONENTS)
def test_gradient_is_the_derivative_of_the_potential(rng, s):
    w = rng.normal(size=(6, 2))
    gradient = riesz_sums(w, s=s)[1]
    for k in range(6):

        def energy(row, k=k):
            return riesz_sums(np.vstack([w[:k], row, w[k + 1 :]]), s=s)[0][[k]]

        slope = plain.numerical_gradient(energy, w[[k]])[0]
        np.testing.assert_allclose(gradient[k], slope, rtol=1e-6, atol=1e-7)


def test_many_partners_span_tiles(rng):
    w = rng.normal(size=(2500, 2))
    expected = plain.riesz(w[:200], 0.0, 0.0)
    np.testing.assert_allclose(riesz_sums(w[:200], s=0)[0], expected[0], rtol=1e-12)
    gap = w[:, None] - w[None]
    squares = (gap**2).sum(axis=2) + np.eye(2500)
    slope = -(gap / squares[..., None]).sum(axis=1) / 2499
    np.testing.assert_allclose(riesz_sums(w, s=0)[1], slope, atol=1e-10)


def test_one_particle_feels_nothing():
    potential, gradient = riesz_sums(np.ones((1, 3)), s=1.0)
    assert not potential.any()
    assert not gradient.any()


@pytest.mark.parametrize("s", EXPONENTS)
@pytest.mark.parametrize("truncation", [0.0, 0.1])
@pytest.mark.parametrize("real", ["f4", "f8"])
def test_coincident_particles_part(rng, s, truncation, real):
    w = rng.normal(size=(40, 3)).astype(real)
    w[7] = w[20] = w[31]
    potential, gradient = riesz_sums(w, s=s, truncation=truncation)
    expected, slope = plain.riesz(w.astype("f8"), s, truncation)
    np.testing.assert_allclose(potential, expected, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(
        gradient, slope, rtol=1e-5, atol=1e-5 * np.abs(slope).max()
    )
    # Downhill is apart.
    step = -1e-3 * gradient / np.abs(gradient).max()
    assert np.linalg.norm((w + step)[7] - (w + step)[20]) > 0


def test_coincident_pair_is_pushed_with_opposite_forces():
    gradient = riesz_sums(np.zeros((2, 4)), s=0.0)[1]
    np.testing.assert_allclose(gradient[0], -gradient[1])
    assert np.linalg.norm(gradient[0]) == pytest.approx(1e6)


def test_directions_are_distinct_and_centred():
    for p in (1, 2, 7):
        u = index_directions(500, p)
        assert np.abs(u).max() <= 0.5
        assert np.abs(u.mean(axis=0)).max() < 0.05
        assert len(np.unique(u[:, 0])) == 500


@pytest.mark.parametrize("real", ["f4", "f8"])
def test_threads_change_no_bit(rng, real):
    w = rng.normal(size=(1501, 5)).astype(real)
    one, two = (riesz_sums(w, s=0.0, threads=t) for t in (1, 2))
    for a, b in zip(one, two, strict=True):
        np.testing.assert_array_equal(a, b)
