"""Results do not depend on where in memory the arrays are, to the last bit."""

import numpy as np
import pytest

numba = pytest.importorskip("numba")

from coulomb.kernels import attention_rows, decode  # noqa: E402
from coulomb.kernels import packed_attention as packed  # noqa: E402
from coulomb.kernels.loops import APART  # noqa: E402

WIDTHS = (4, 8, 13, 16, 24, 31, 32, 40, 64)


@numba.njit
def step(old, factors, q, k, value, new):
    return decode._step(old, factors, q, k, value, new)


@numba.njit
def grad_rows(out, grad, dim, row, dots):
    strides = (0, 0, dim)
    inverses = np.full(1, np.float32(1 / 3))
    attention_rows.grad_rows(
        (out, strides), (grad, strides), (0, 0), inverses, 1, dim, (row, dots)
    )


@numba.njit
def weigh(row, weights, n, out):
    return packed.weigh(row, weights, n, out)


@numba.njit
def blocks(bounds):
    return packed._blocks(bounds)


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
        for gap in (0, 1, 8, 20, 33, 500):
            near, new = beside(old, gap)
            found.append((step(near, factors, q, k, 2.0, new), new.tobytes()))
        only(found)


@pytest.mark.parametrize("width", WIDTHS)
def test_gradients_of_ratios(width):
    for out, grad in random(20, 2, width):
        found = []
        for gap in (0, 1, 8, 20, 33, 500):
            near, row = beside(grad, gap)
            dots = np.zeros(1, np.float32)
            grad_rows(out, near, width, row, dots)
            found.append((float(dots[0]), row.tobytes()))
        only(found)


@pytest.mark.parametrize("n", [3, 8, 20, 40])
def test_weights_of_keys(n):
    """Rows in blocks are long enough; with shorter ones the bits would differ."""
    row, _, weights, _ = blocks(np.array([0, n]))
    assert min(row.shape[1], len(weights)) >= APART
    for left, right in np.abs(random(20, 2, n)):
        weights[:n], found = right, []
        for gap in (0, 1, 8, 20, 33, 500):
            near, out = beside(np.resize(row[0] * 0, row.shape[1]), gap)
            near[:n] = left
            found.append((weigh(near, weights, n, out), out.tobytes()))
        only(found)
