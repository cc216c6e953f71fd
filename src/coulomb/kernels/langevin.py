"""Many projected Langevin steps in one call."""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from coulomb._support.errors import ParameterError
from coulomb.kernels import threads as _threads
from coulomb.kernels.availability import compiled
from coulomb.kernels.fourier import FourierData
from coulomb.kernels.riesz import index_directions, pair_law, riesz_sums, transposed

_SECONDS_PER_PAIR = 0.5e-9


class LangevinSteps(NamedTuple):
    """What many steps lead to."""

    positions: NDArray
    drift_squares: NDArray[np.float64]
    move_squares: NDArray[np.float64]


def langevin_steps(
    positions: NDArray,
    noise: NDArray | None,
    step_sizes: NDArray,
    data: FourierData,
    *,
    scale: float,
    batches: NDArray[np.int64] | None = None,
    prior_precision: float | NDArray = 0.0,
    rates: NDArray | None = None,
    strength: float = 0.0,
    s: float = 0.0,
    truncation: float = 0.0,
    clip: float = np.inf,
    radius: float = np.inf,
    mask: NDArray | None = None,
    threads: int = 1,
) -> LangevinSteps:
    """Move all particles by several projected Langevin steps.

    ``w_k <- P(w_k - eta_m rate_k clip(grad V(w_k) + precision w_k + strength grad U_k)
    + noise_mk)`` with V of `fourier_alignment`, U of `riesz_sums`, clipping of each
    particle's drift to length `clip`, and P the projection on the centred ball. All
    particles move at the same time.
    """
    n, dim = positions.shape
    real = data.rows.dtype
    steps = len(step_sizes)
    buffers = np.stack([transposed(np.asarray(positions, dtype=real))] * 2)
    if batches is None:
        batches = np.empty((steps, 0), np.int64)
    _check(data, positions, noise, steps, batches, mask, rates, prior_precision)
    law = pair_law(float(s), float(truncation), real == np.float32)
    precision = np.full(n, 1.0) * np.asarray(prior_precision, dtype=np.float64)
    laws = (law.number, law.s, law.floor, law.push)
    directions = index_directions(n, dim)
    squares = np.zeros((2, steps, n))
    arrays = (
        *(data.rows, data.targets, data.tiles, data.target_tiles, float(scale)),
        np.ascontiguousarray(batches, dtype=np.int64),
        _or_empty(noise, real, 3),
        np.ascontiguousarray(step_sizes, dtype=np.float64),
        np.ones(n) if rates is None else np.ascontiguousarray(rates, dtype=np.float64),
        _or_empty(mask, real, 2),
    )
    rest = (
        *(precision, float(strength) if n > 1 else 0.0, *laws, directions),
        *(float(clip), float(radius), squares[0], squares[1]),
    )
    loop = compiled().langevin_range
    guess = data.guess(n, batches.shape[1] or None)
    if strength != 0.0:
        guess += _SECONDS_PER_PAIR * n * n * (1 + dim / 4)

    def advance(step_from: int, step_to: int, useful: int) -> None:
        def work(first: int, end: int) -> None:
            loop(first, end, step_from, step_to, buffers, n, *arrays, *rest)

        _threads.over_ranges(work, n, useful)

    if strength == 0.0:
        # Particles do not see each other: no thread has to wait for another.
        advance(0, steps, _threads.useful_threads(threads, n, guess * steps))
    elif (useful := _threads.useful_threads(threads, n, guess)) == 1:
        advance(0, steps, 1)
    else:
        for step in range(steps):
            advance(step, step + 1, useful)
    last = np.ascontiguousarray(buffers[steps % 2, :, :n].T)
    return LangevinSteps(last, squares[0].mean(axis=1), squares[1].mean(axis=1))


def _check(
    data: FourierData,
    positions: NDArray,
    noise: NDArray | None,
    steps: int,
    batches: NDArray[np.int64],
    mask: NDArray | None,
    rates: NDArray | None,
    precision: float | NDArray,
) -> None:
    # Compiled loops do not check indices: a wrong shape would read foreign memory.
    n, dim = positions.shape
    shapes = {
        "positions": (positions, (n, data.rows.shape[1])),
        "noise": (noise, (steps, n, dim)),
        "mask": (mask, (n, dim)),
        "rates": (rates, (n,)),
        "prior_precision": (np.broadcast_to(precision, np.shape(precision) or n), (n,)),
        "batches": (batches, (steps, batches.shape[-1])),
    }
    for name, (array, shape) in shapes.items():
        if array is not None and array.shape != shape:
            raise ParameterError(
                f"`{name}` must have shape {shape}; got {array.shape}."
            )
    count = len(data.rows)
    if batches.size and not 0 <= batches.min() <= batches.max() < count:
        raise ParameterError(f"`batches` must hold indices from 0 to {count - 1}.")


def _or_empty(array: NDArray | None, real: np.dtype, axes: int) -> NDArray:
    # The compiled loop takes arrays of one type: none is an array without elements.
    if array is None:
        return np.empty((1,) + (0,) * (axes - 1), real)
    return np.ascontiguousarray(array, dtype=real)


def warm_up() -> None:
    """Compile the loops for both real types, or load them from numba's cache."""
    for real in (np.float32, np.float64):
        x = np.linspace(-1, 1, 6, dtype=real).reshape(3, 2)
        data = FourierData.of(x, x[:, :1])
        data.alignment(x, scale=1.0)
        compiled().sincos_row(x[0], x[1].copy(), x[2].copy())
        langevin_steps(x, None, np.ones(1), data, scale=1.0, strength=1.0)
        riesz_sums(x, s=0.0)
