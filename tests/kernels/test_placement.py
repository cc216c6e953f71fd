"""Results do not depend on where in memory the arrays are, to the last bit."""

import numpy as np
import pytest

numba = pytest.importorskip("numba")

from coulomb.kernels import linear_attention as linear  # noqa: E402
from coulomb.kernels import math as kernel_math  # noqa: E402
from coulomb.kernels import packed_encoder as packed  # noqa: E402
from coulomb.kernels import particle_loops  # noqa: E402

# Beyond any product of vector lanes and interleaved vectors: 16 lanes four times is 64.
WIDTHS = (4, 8, 13, 16, 24, 31, 32, 40, 64, 72, 96, 128, 160, 256)
GAPS = (0, 1, 8, 20, 33, 65, 130, 500)


@numba.njit
def step(old, factors, q, k, value, new):
    return linear._step(old, factors, q, k, value, new)


@numba.njit
def step_in_place(row, factors, q, k, value):
    return linear._step_in_place(row, factors, q, k, np.float32(value))


@numba.njit
def grad_rows(out, grad, row, dots):
    dim, inverses = len(out), np.full(1, np.float32(1 / 3))
    given, pulled = linear.rows_at(out, 0, dim), linear.rows_at(grad, 0, dim)
    rows = linear.rows_at(row, 0, dim)
    linear.grad_rows(given, pulled, inverses, dim, rows, dots)


@numba.njit
def weigh(row, weights, n, out):
    return packed._weigh(row, weights, n, out)


@numba.njit
def query_row(row, z):
    return linear.query_row(row, z)


@numba.njit
def slopes(features, grad_z, slope, totals, given):
    ones, n = np.ones(1, np.float32), len(features)
    rows, target = linear.rows_at(features, 0, n), linear.rows_at(slope, 0, n)
    kind = (False, np.float32(1), given)
    linear.key_slopes(kind, rows, n, ones, grad_z, target, totals)


@numba.njit
def sincos_tile(angles, waves):
    particle_loops._sincos_tile(angles, len(angles), 0, 0, waves)


@numba.njit
def extremes(row):
    sizes = kernel_math.row_max(row), kernel_math.row_min(row)
    return *sizes, kernel_math.row_size(row)


def beside(x, gap):
    """Copy x, and give an array that begins `gap` numbers after the end of the copy."""
    memory = np.zeros(2 * len(x) + gap, np.float32)
    memory[: len(x)] = x
    return memory[: len(x)], memory[len(x) + gap :]


def random(*shape):
    return np.random.default_rng(0).normal(size=shape).astype(np.float32)


def only(found):
    assert len(set(found)) == 1


@pytest.mark.parametrize("width", WIDTHS)
def test_decoding(width):
    for old, factors, q, k in random(20, 4, width):
        found = []
        for gap in GAPS:
            near, new = beside(old, gap)
            found.append((step(near, factors, q, k, 2.0, new), new.tobytes()))
            new[:] = factors
            found.append((step_in_place(near, new, q, k, 2.0), near.tobytes()))
        only(found)


@pytest.mark.parametrize("width", WIDTHS)
def test_gradients_of_ratios(width):
    for out, grad in random(20, 2, width):
        found = []
        for gap in GAPS:
            near, row = beside(grad, gap)
            dots = np.zeros(1, np.float32)
            grad_rows(out, near, row, dots)
            found.append((float(dots[0]), row.tobytes()))
        only(found)


@pytest.mark.parametrize("n", WIDTHS)
def test_weights_of_keys(n):
    padded = (n + 7) // 8 * 8
    for row, weights in np.abs(random(20, 2, padded)):
        found = []
        for gap in GAPS:
            near, out = beside(row, gap)
            found.append((weigh(near, weights, n, out), out.tobytes()))
        only(found)


@pytest.mark.parametrize("given", [0, 1])
@pytest.mark.parametrize("n", WIDTHS)
def test_updates_in_place(n, given):
    """A row that is read and written, after and before another input."""
    for features, z, grads in random(10, 3, n):
        rows, pulled = [], []
        for gap in GAPS:
            for turned in (False, True):
                near, row = beside(z, gap)
                if turned:
                    near, row = row, near
                    near[:n] = z
                near = near[:n]
                row[:n] = features
                rows.append((query_row(row, near), row[:n].tobytes()))
                row[:n], totals = grads, np.zeros(1, np.float32)
                slopes(features, near, row, totals, given)
                pulled.append((float(totals[0]), row[:n].tobytes()))
        only(rows)
        only(pulled)


@pytest.mark.parametrize("n", WIDTHS)
def test_sines(n):
    for angles in random(10, n):
        found = []
        for gap in GAPS:
            memory = np.zeros(3 * n + gap, np.float32)
            memory[:n] = angles
            waves = memory[n + gap :].reshape(1, 1, 2, n)
            sincos_tile(memory[:n], waves)
            found.append(waves.tobytes())
        only(found)


@pytest.mark.parametrize("width", WIDTHS)
def test_extremes(width):
    rows = [*random(20, width), *-np.abs(random(5, width)), np.zeros(width, np.float32)]
    for row in rows:
        assert extremes(row) == (row.max(), row.min(), np.abs(row).max())
    for odd in (np.inf, -np.inf, np.nan, -np.float32(np.nan)):
        row[0] = odd
        assert not extremes(row)[2] < 1e30
    row[0] = np.nan
    assert not extremes(row)[0] < 1e30
