"""Exact sums of a Riesz pair potential over all pairs of particles."""

from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from coulomb.kernels import threads as _threads
from coulomb.kernels.availability import compiled

# Coincident particles are pushed as if they were this far apart.
CLOSEST = 1e-6

_SECONDS_PER_PAIR = 0.6e-9


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
    return _directions(n, dim)


@lru_cache(maxsize=32)
def _directions(n: int, dim: int) -> NDArray[np.float64]:
    phi = 2.0
    for _ in range(64):
        phi = (1.0 + phi) ** (1.0 / (dim + 1))
    alpha = np.mod(phi ** -np.arange(1.0, dim + 1), 1.0)
    directions = np.mod(np.arange(1.0, n + 1)[:, None] * alpha, 1.0) - 0.5
    directions.flags.writeable = False
    return directions


def transposed(rows: NDArray) -> NDArray:
    """Transpose and pad with zeros to a multiple of the vector width."""
    lanes = compiled().LANES
    n, dim = rows.shape
    columns = np.zeros((dim, -(-n // lanes) * lanes), rows.dtype)
    columns[:, :n] = rows.T
    return columns


class PairLaw(NamedTuple):
    """A Riesz potential as the compiled loops take it."""

    number: int
    s: float
    truncation: float
    floor: tuple[float, float]
    push: float


@lru_cache(maxsize=64)
def pair_law(s: float, truncation: float, single: bool) -> PairLaw:
    """Translate a Riesz potential into the arguments of the compiled loop."""
    loops = compiled()
    laws = {0.0: loops.LOG, 1.0: loops.INVERSE, 2.0: loops.INVERSE_SQUARE}
    laws[-1.0] = loops.LINEAR
    # Closer than this, r^(-s-2) or r^2 itself leaves the range of the real type.
    huge, smallest = (1e36, 1e-37) if single else (1e300, 1e-300)
    tiny = max(smallest, huge ** (-2 / (s + 2)))
    closest = max(truncation, CLOSEST)
    push = (abs(s) if s else 1.0) * closest ** (-s - 1)
    floor = (tiny, max(tiny, truncation**2))
    return PairLaw(laws.get(s, loops.POWER), s, truncation, floor, push)


def riesz_sums(
    positions: NDArray, *, s: float, truncation: float = 0.0, threads: int = 1
) -> tuple[NDArray, NDArray]:
    """Sum a Riesz potential and its gradient over all partners of every particle.

    ``U_k = 1/(N-1) sum_{l != k} g(max(|w_k - w_l|, truncation))`` and its gradient in
    w_k with the partners held fixed, where ``g(r) = r^-s`` for s > 0, ``-log r`` for
    s = 0 and ``-r^-s`` for -2 < s < 0. Inside the truncation there is no force, except
    between coincident particles k and l: they are pushed apart along ``u_k - u_l`` of
    `index_directions` with magnitude ``|g'(max(truncation, 1e-6))|``.
    """
    n, dim = positions.shape
    potential = np.zeros(n, positions.dtype)
    gradient = np.zeros((n, dim), positions.dtype)
    if n < 2:
        return potential, gradient
    rows = transposed(positions)
    single = positions.dtype == np.float32
    law = pair_law(float(s), float(truncation), single)
    directions = index_directions(n, dim)
    loops = compiled()

    def work(first: int, end: int) -> None:
        common = (first, end, rows, n, law.number, law.s)
        loops.riesz_range(*common, law.floor, law.push, directions, gradient)
        loops.riesz_energy_range(*common, law.truncation, potential)

    guess = _SECONDS_PER_PAIR * n * n * (1 + dim / 4)
    _threads.over_ranges(work, n, _threads.useful_threads(threads, n, guess))
    return potential, gradient
