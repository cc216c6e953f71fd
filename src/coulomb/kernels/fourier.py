"""The Fourier alignment potential and its gradient, one sine and cosine per pair."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from coulomb._support.errors import ParameterError
from coulomb.kernels import threads as _threads
from coulomb.kernels.availability import compiled

# Beyond this angle the range reduction loses digits: use the plain form.
LARGEST_ANGLE = 1e4


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
        """Evaluate `fourier_alignment` without laying out the data again."""
        (n, dim), count = self.rows.shape, positions.shape[0]
        if positions.shape != (count, dim):
            raise ParameterError(
                f"`positions` must have shape (N, {dim}); got {positions.shape}."
            )
        potential = np.zeros(count, self.rows.dtype)
        gradient = np.zeros((count, dim), self.rows.dtype)
        w = np.ascontiguousarray(positions.T, dtype=self.rows.dtype)
        data = (self.tiles, self.target_tiles, n)
        loop = compiled().fourier_range

        def work(first: int, end: int) -> None:
            loop(first, end, w, *data, float(scale), potential, gradient)

        useful = _threads.useful_threads(threads, count, self.guess(count))
        _threads.over_ranges(work, count, useful)
        return potential, gradient


def _tiled(rows: NDArray) -> NDArray:
    loops = compiled()
    n, columns = rows.shape
    width = min(loops.TILE, max(1, -(-n // loops.LANES)) * loops.LANES)
    tiles = np.zeros((-(-n // width), width, columns), rows.dtype)
    tiles.reshape(-1, columns)[:n] = rows
    return np.ascontiguousarray(tiles.transpose(0, 2, 1))


def fourier_alignment(
    x: NDArray, targets: NDArray, positions: NDArray, *, scale: float, threads: int = 1
) -> tuple[NDArray, NDArray]:
    """Evaluate the alignment potential of every particle and its gradient.

    ``V(w) = -scale sum_c |sum_i Y_ic exp(i w.x_i)|^2`` and ``dV/dw``, with one sine and
    cosine per sample and particle. Angles must stay below `LARGEST_ANGLE`.
    """
    data = FourierData.of(x, targets)
    return data.alignment(positions, scale=scale, threads=threads)
