"""Sums of the particle system on numpy arrays, and many Langevin steps in one call."""

import importlib
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from coulomb._support.errors import ParameterError
from coulomb.kernels.runtime import over_ranges, useful_threads

# Beyond this angle the range reduction loses digits: use the plain form.
LARGEST_ANGLE = 1e4
# Coincident particles are pushed as if they were this far apart.
CLOSEST = 1e-6


def _loops() -> Any:
    # Only here: this imports numba.
    return importlib.import_module("coulomb.kernels.particle_loops")


@dataclass(frozen=True, eq=False)
class FourierData:
    """Samples and targets, laid out once for the compiled loops."""

    rows: NDArray
    targets: NDArray
    tiles: NDArray
    target_tiles: NDArray

    @classmethod
    def of(cls, x: NDArray, targets: NDArray) -> "FourierData":
        """Lay out samples and targets."""
        x = np.ascontiguousarray(x)
        targets = np.ascontiguousarray(targets, dtype=x.dtype)
        if targets.ndim != 2 or len(targets) != len(x):
            raise ParameterError(
                f"`targets` must have shape ({len(x)}, c); got {targets.shape}."
            )
        return cls(x, targets, _tiled(x), _tiled(targets))

    def guess(self, n_particles: int, batch: int | None = None) -> float:
        """Guess the seconds one thread needs for one evaluation."""
        (n, dim), classes = self.rows.shape, self.targets.shape[1]
        pairs = (n if batch is None else batch) * n_particles
        width = self.rows.itemsize / 4
        return 1e-9 * width * pairs * (0.4 + 0.06 * dim + 0.1 * classes)

    def alignment(
        self, positions: NDArray, *, scale: float, threads: int = 1
    ) -> tuple[NDArray, NDArray]:
        """Evaluate the alignment potential of every particle and its gradient.

        ``V(w) = -scale sum_c |sum_i Y_ic exp(i w.x_i)|^2`` and ``dV/dw``, with one sine
        and cosine per sample and particle. Angles must stay below `LARGEST_ANGLE`.
        """
        (n, dim), count = self.rows.shape, positions.shape[0]
        if positions.shape != (count, dim):
            raise ParameterError(
                f"`positions` must have shape (N, {dim}); got {positions.shape}."
            )
        potential = np.zeros(count, self.rows.dtype)
        gradient = np.zeros((count, dim), self.rows.dtype)
        w = np.ascontiguousarray(positions.T, dtype=self.rows.dtype)
        data = (self.tiles, self.target_tiles, n)
        loop = _loops().fourier_range

        def work(first: int, end: int) -> None:
            loop(first, end, w, *data, float(scale), potential, gradient)

        over_ranges(work, count, useful_threads(threads, count, self.guess(count)))
        return potential, gradient


def _tiled(rows: NDArray) -> NDArray:
    loops = _loops()
    n, columns = rows.shape
    width = min(loops.TILE, max(1, -(-n // loops.LANES)) * loops.LANES)
    tiles = np.zeros((-(-n // width), width, columns), rows.dtype)
    tiles.reshape(-1, columns)[:n] = rows
    return np.ascontiguousarray(tiles.transpose(0, 2, 1))


@lru_cache(maxsize=32)
def index_directions(n: int, dim: int) -> NDArray[np.float64]:
    """Give every particle a fixed vector of its own, by its index alone.

    ``u_kj = frac((k + 1) alpha_j) - 1/2`` with ``alpha_j = phi^-(j+1)`` and phi the
    positive root of ``x^(dim+1) = x + 1``: a low-discrepancy sequence, so that no two
    vectors agree. Coincident particles k and l part along ``u_k - u_l``.

    Examples
    --------
    >>> index_directions(2, 1).round(3)
    array([[ 0.118], [-0.264]])
    """
    phi = 2.0
    for _ in range(64):
        phi = (1.0 + phi) ** (1.0 / (dim + 1))
    alpha = np.mod(phi ** -np.arange(1.0, dim + 1), 1.0)
    directions = np.mod(np.arange(1.0, n + 1)[:, None] * alpha, 1.0) - 0.5
    directions.flags.writeable = False
    return directions


def _transposed(rows: NDArray) -> NDArray:
    """Transpose and pad with zeros to a multiple of the vector width."""
    lanes = _loops().LANES
    n, dim = rows.shape
    columns = np.zeros((dim, -(-n // lanes) * lanes), rows.dtype)
    columns[:, :n] = rows.T
    return columns


@lru_cache(maxsize=64)
def _pair_law(s: float, truncation: float, single: bool) -> tuple[Any, ...]:
    """Translate a Riesz potential into what `riesz_range` takes."""
    loops = _loops()
    laws = {0.0: loops.LOG, 1.0: loops.INVERSE, 2.0: loops.INVERSE_SQUARE}
    laws[-1.0] = loops.LINEAR
    # Closer than this, r^(-s-2) or r^2 itself leaves the range of the real type.
    huge, smallest = (1e36, 1e-37) if single else (1e300, 1e-300)
    tiny = max(smallest, huge ** (-2 / (s + 2)))
    push = (abs(s) if s else 1.0) * max(truncation, CLOSEST) ** (-s - 1)
    return laws.get(s, loops.POWER), s, (tiny, max(tiny, truncation**2)), push


def _guess_pairs(n: int, dim: int) -> float:
    """Guess the seconds one thread needs for the forces between all pairs."""
    return 0.6e-9 * n * n * (1 + dim / 4)


def riesz_sums(
    positions: NDArray,
    *,
    s: float,
    truncation: float = 0.0,
    threads: int = 1,
    rows: slice | None = None,
) -> tuple[NDArray, NDArray]:
    """Sum a Riesz potential and its gradient over all partners of every particle.

    ``U_k = 1/(N-1) sum_{l != k} g(max(|w_k - w_l|, truncation))`` and its gradient in
    w_k with the partners held fixed, where ``g(r) = r^-s`` for s > 0, ``-log r`` for
    s = 0 and ``-r^-s`` for -2 < s < 0. Inside the truncation there is no force, except
    between coincident particles k and l: they are pushed apart along ``u_k - u_l`` of
    `index_directions` with magnitude ``|g'(max(truncation, 1e-6))|``. Particles outside
    of `rows` are left at zero.
    """
    n, dim = positions.shape
    block = slice(0, n) if rows is None else rows
    potential = np.zeros(n, positions.dtype)
    gradient = np.zeros((n, dim), positions.dtype)
    if n < 2:
        return potential, gradient
    others = _transposed(positions)
    law = _pair_law(float(s), float(truncation), positions.dtype == np.float32)
    directions = index_directions(n, dim)
    loops = _loops()

    def work(first: int, end: int) -> None:
        common = (block.start + first, block.start + end, others, n)
        loops.riesz_range(*common, law, directions, gradient)
        loops.riesz_energy_range(*common, *law[:2], float(truncation), potential)

    count = block.stop - block.start
    over_ranges(work, count, useful_threads(threads, n, _guess_pairs(n, dim)))
    return potential, gradient


class ParticleField(NamedTuple):
    """What acts on every particle: both potentials and their gradients."""

    potential: NDArray  # V of `FourierData.alignment`, shape (N,)
    gradient: NDArray
    repulsion: NDArray  # U of `riesz_sums`, shape (N,)
    force: NDArray  # the gradient of U


class LangevinSteps(NamedTuple):
    """What many steps lead to."""

    positions: NDArray
    drift_squares: NDArray[np.float64]
    move_squares: NDArray[np.float64]
    field: ParticleField | None  # at these positions


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
    field: ParticleField | None = None,
    want_field: bool = False,
) -> LangevinSteps:
    """Move all particles by several projected Langevin steps.

    ``w_k <- P(w_k - eta_m rate_k clip(grad V(w_k) + precision w_k + strength grad U_k)
    + noise_mk)`` with V of `FourierData.alignment`, U of `riesz_sums`, clipping of each
    particle's drift to length `clip`, and P the projection on the centred ball. All
    particles move at the same time.

    With `want_field`, both potentials and their gradients at the last positions come
    along. Given to the next call as `field`, they spare it the first evaluation: a run
    whose energies are recorded between calls evaluates every configuration once. With
    `batches` every step sees other samples, and there is neither.
    """
    n, dim = positions.shape
    real = data.rows.dtype
    steps = len(step_sizes)
    buffers = np.stack([_transposed(np.asarray(positions, dtype=real))] * 2)
    if batches is None:
        batches = np.empty((steps, 0), np.int64)
    elif field is not None or want_field:
        raise ParameterError("`field` must be None with `batches`.")
    precision = np.asarray(prior_precision, dtype=np.float64)
    # Compiled loops do not check indices: a wrong shape would read foreign memory.
    shapes = {
        "positions": (positions, (n, data.rows.shape[1])),
        "noise": (noise, (steps, n, dim)),
        "mask": (mask, (n, dim)),
        "rates": (rates, (n,)),
        "prior_precision": (precision if precision.ndim else None, (n,)),
        "batches": (batches, (steps, batches.shape[-1])),
        "field": (field and field.gradient, (n, dim)),
    }
    for name, (array, shape) in shapes.items():
        if array is not None and array.shape != shape:
            raise ParameterError(
                f"`{name}` must have shape {shape}; got {array.shape}."
            )
    count = len(data.rows)
    if batches.size and not 0 <= batches.min() <= batches.max() < count:
        raise ParameterError(f"`batches` must hold indices from 0 to {count - 1}.")

    squares = np.zeros((2, steps, n))
    gradients = np.zeros((2, n, dim), real)
    if field is not None:
        gradients[0] = field.gradient
        gradients[1] = field.force if strength else 0.0
    law = _pair_law(float(s), float(truncation), real == np.float32)
    acting = float(strength) if n > 1 else 0.0
    arguments = (
        (data.rows, data.targets, data.tiles, data.target_tiles, float(scale)),
        (acting, law, index_directions(n, dim)),
        np.ascontiguousarray(batches, dtype=np.int64),
        (gradients[0], gradients[1], field is not None),
        (
            _or_empty(noise, real, 3),
            np.ascontiguousarray(step_sizes, dtype=np.float64),
            np.ones(n) if rates is None else np.ascontiguousarray(rates, np.float64),
            _or_empty(mask, real, 2),
            np.full(n, 1.0) * precision,
            *(float(clip), float(radius), squares),
        ),
    )
    loop = _loops().langevin_range
    guess = data.guess(n, batches.shape[1] or None)
    guess += _guess_pairs(n, dim) if acting else 0.0

    def advance(step_from: int, step_to: int, useful: int) -> None:
        def work(first: int, end: int) -> None:
            loop(first, end, step_from, step_to, buffers, n, *arguments)

        over_ranges(work, n, useful)

    if not acting:
        # Particles do not see each other: no thread has to wait for another.
        advance(0, steps, useful_threads(threads, n, guess * steps))
    elif (useful := useful_threads(threads, n, guess)) == 1:
        advance(0, steps, 1)
    else:
        for step in range(steps):
            advance(step, step + 1, useful)
    last = np.ascontiguousarray(buffers[steps % 2, :, :n].T)
    found = None
    if want_field:
        found = ParticleField(
            *data.alignment(last, scale=scale, threads=threads),
            *riesz_sums(last, s=s, truncation=truncation, threads=threads),
        )
    means = squares.mean(axis=2)
    return LangevinSteps(last, means[0], means[1], found)


def _or_empty(array: NDArray | None, real: np.dtype, axes: int) -> NDArray:
    # The compiled loop takes arrays of one type: none is an array without elements.
    if array is None:
        return np.empty((1,) + (0,) * (axes - 1), real)
    return np.ascontiguousarray(array, dtype=real)


def compile_loops() -> None:
    """Compile the loops for both real types, or load them from the cache."""
    sincos_row = importlib.import_module("coulomb.kernels.math").sincos_row
    for real in (np.float32, np.float64):
        x = np.linspace(-1, 1, 6, dtype=real).reshape(3, 2)
        data = FourierData.of(x, x[:, :1])
        data.alignment(x, scale=1.0)
        sincos_row(x[0], x[1].copy(), x[2].copy())
        langevin_steps(x, None, np.ones(1), data, scale=1.0, strength=1.0)
        riesz_sums(x, s=0.0)
