"""The interaction on a grid: cell averages of a singular kernel, summed by FFT.

For masses `m_j` of the cells, the potential is `(K m)_i = sum_j g_ij m_j` with
`g_ij = mean over both cells of g(|w - w'|)`. The quadratic form `m.K m / 2` is then the
exact interaction energy of the piecewise constant density, finite for every `s < d` and
positive on differences of densities where `g` is.
"""

from abc import ABC, abstractmethod
from functools import cached_property

import numpy as np
from scipy import fft

from coulomb.interactions import AbstractInteraction
from coulomb.theory.averages import cell_averages
from coulomb.theory.grids import AbstractBoxGrid, FloatArray


class AbstractGridSum(ABC):
    """The linear map from cell masses to the interaction potential on the cells."""

    @abstractmethod
    def __call__(self, masses: FloatArray) -> FloatArray:
        """Evaluate `K m`."""

    @property
    @abstractmethod
    def local(self) -> float:
        """The eigenvalue of `K` on the fastest oscillation of the grid, about."""

    @abstractmethod
    def dense(self) -> FloatArray:
        """Write out `K`, the plain twin of the fast sum."""


class ConvolutionSum(AbstractGridSum):
    """Sums on Cartesian grids by FFT, in `O(G log G)`.

    Examples
    --------
    >>> from coulomb.interactions import Riesz
    >>> from coulomb.theory.boxes import Interval
    >>> pairs = ConvolutionSum(Riesz(s=0.5), Interval(-1, 1, 16))
    >>> masses = np.linspace(0, 1, 16)
    >>> bool(np.abs(pairs(masses) - pairs.dense() @ masses).max() < 1e-12)
    True
    """

    def __init__(self, interaction: AbstractInteraction, grid: AbstractBoxGrid) -> None:
        self._grid = grid
        self._table = cell_averages(interaction, grid.shape, grid.spacing)
        self._padded = [fft.next_fast_len(2 * n - 1, real=True) for n in grid.shape]
        self._spectrum = fft.rfftn(self._mirrored())

    def _mirrored(self) -> FloatArray:
        kernel = self._table
        for axis, (count, length) in enumerate(
            zip(self._grid.shape, self._padded, strict=True)
        ):
            index = np.minimum(np.arange(length), length - np.arange(length))
            values = kernel.take(np.minimum(index, count - 1), axis=axis)
            shape = [-1 if a == axis else 1 for a in range(kernel.ndim)]
            kernel = values * (index < count).reshape(shape)
        return kernel

    def __call__(self, masses: FloatArray) -> FloatArray:
        return self._filter(masses, self._spectrum)

    def rough_inverse(self, values: FloatArray) -> FloatArray:
        """Undo the sum about, as if the grid were periodic; symmetric and positive."""
        return self._filter(values, self._inverse_spectrum)

    @cached_property
    def _inverse_spectrum(self) -> FloatArray:
        size = np.abs(self._spectrum.real)
        return np.asarray(1 / np.maximum(size, 1e-6 * size.max()))

    def _filter(self, values: FloatArray, spectrum: FloatArray) -> FloatArray:
        whole = fft.rfftn(self._grid.embed(values), self._padded)
        filtered = fft.irfftn(whole * spectrum, self._padded)
        corner = filtered[tuple(slice(count) for count in self._grid.shape)]
        return np.asarray(corner[self._grid.inside], dtype=np.float64)

    @property
    def local(self) -> float:
        fastest = tuple(length // 2 for length in self._padded)
        return max(float(self._spectrum.real[fastest]), 0.0)

    def dense(self) -> FloatArray:
        index = np.argwhere(self._grid.inside)
        gaps = np.abs(index[:, None] - index[None])
        return np.asarray(self._table[tuple(np.moveaxis(gaps, -1, 0))])
