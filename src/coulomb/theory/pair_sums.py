"""The interaction on a grid: cell averages of a singular kernel, summed by FFT.

For masses `m_j` of the cells, the potential is `(K m)_i = sum_j g_ij m_j` with
`g_ij = mean over both cells of g(|w - w'|)`. The quadratic form `m.K m / 2` is then the
exact interaction energy of the piecewise constant density, finite for every `s < d` and
positive on differences of densities where `g` is.
"""

import itertools
import math
from abc import ABC, abstractmethod
from functools import cached_property

import numpy as np
import torch
from scipy import fft

from coulomb._support.errors import ParameterError
from coulomb.interactions import AbstractInteraction, Riesz
from coulomb.theory.grids import AbstractBoxGrid, AbstractGrid, FloatArray, RadialBall

# Offsets up to _NEAR cells take more nodes; beyond, g is nearly polynomial.
_NEAR, _NODES_NEAR, _NODES_FAR = 8, 12, 4
_NODES_RADIAL, _NODES_ANGLE = 48, 24


def check_continuum(interaction: AbstractInteraction, dim: int) -> None:
    """Refuse interactions whose continuum energy is infinite.

    Examples
    --------
    >>> check_continuum(Riesz(s=1.0), 1)
    Traceback (most recent call last):
    coulomb._support.errors.ParameterError: `interaction` must have s < d or a ...
    """
    if not isinstance(interaction, Riesz) or interaction.truncation:
        return
    if interaction.s >= dim:
        raise ParameterError(
            f"`interaction` must have s < d or a truncation; got {interaction!r} in "
            f"d = {dim}. For s >= d the continuum energy of every measure with a "
            "density is infinite, so the mean-field and large-deviation statements "
            "hold for s < d or for the truncated kernel with fixed eps."
        )


def radial(interaction: AbstractInteraction, distance: FloatArray) -> FloatArray:
    """Evaluate `g(r)` on numpy arrays."""
    values = interaction.radial(torch.from_numpy(np.ascontiguousarray(distance)))
    return np.asarray(values.numpy(), dtype=np.float64)


def cell_averages(
    interaction: AbstractInteraction,
    shape: tuple[int, ...],
    spacing: tuple[float, ...],
) -> FloatArray:
    """Average `g` over pairs of cells, for every offset `k >= 0` between them.

    `g_k = int prod_a (1 - |t_a|) g(|h (k + t)|) dt` over `[-1, 1]^d`. Where the cells
    touch, the corner at distance zero is integrated in coordinates `w = r (1, u)` with
    `r = z^m`, which makes the integrand smooth for every `s < d`.

    Examples
    --------
    >>> table = cell_averages(Riesz(s=0), (3,), (1.0,))  # int (1 - |t|)(-log |t|) dt
    >>> bool(abs(table[0] - 1.5) < 1e-10)
    True
    """
    check_continuum(interaction, len(shape))
    table = _far_averages(interaction, shape, spacing)
    near = [range(min(count, _NEAR + 1)) for count in shape]
    for offset in itertools.product(*near):
        table[offset] = _near_average(interaction, offset, spacing)
    return table


def _far_averages(
    interaction: AbstractInteraction,
    shape: tuple[int, ...],
    spacing: tuple[float, ...],
) -> FloatArray:
    # Gauss nodes for int (1 - |t|) f(t) dt over [-1, 1], never at zero.
    points, weights = gauss_nodes(_NODES_FAR)
    hat = weights * (1 - points)
    rule = [*zip(-points, hat, strict=True), *zip(points, hat, strict=True)]
    table = np.zeros(shape)
    for choice in itertools.product(rule, repeat=len(shape)):
        square = np.zeros(())
        for (node, _), count, width in zip(choice, shape, spacing, strict=True):
            along = (width * (np.arange(count) + node)) ** 2
            square = np.add.outer(square, along)
        weight = math.prod(part for _, part in choice)
        table += weight * radial(interaction, np.sqrt(square))
    return table


def gauss_nodes(count: int) -> tuple[FloatArray, FloatArray]:
    """Nodes and weights on [0, 1]."""
    points, weights = np.polynomial.legendre.leggauss(count)
    return 0.5 * (points + 1), 0.5 * weights


def _near_average(
    interaction: AbstractInteraction,
    offset: tuple[int, ...],
    spacing: tuple[float, ...],
) -> float:
    """Sum the halves [k-1, k] and [k, k+1] of every axis, each mirrored to p >= 0."""
    total = 0.0
    for halves in itertools.product((True, False), repeat=len(offset)):
        # The hat grows towards k, except that at k = 0 both halves are the same.
        rising = [lower and k > 0 for lower, k in zip(halves, offset, strict=True)]
        lows = [k - rises for k, rises in zip(offset, rising, strict=True)]
        if max(lows) == 0:
            total += _corner_integral(interaction, spacing, rising)
        else:
            total += _cell_integral(interaction, spacing, lows, rising)
    return total


def _hat(position: FloatArray, rises: bool) -> FloatArray:
    return position if rises else 1 - position


def _cell_integral(
    interaction: AbstractInteraction,
    spacing: tuple[float, ...],
    lows: list[int],
    rising: list[bool],
) -> float:
    nodes, weights = gauss_nodes(_NODES_NEAR)
    weight, square = np.ones(()), np.zeros(())
    for width, low, rises in zip(spacing, lows, rising, strict=True):
        weight = np.multiply.outer(weight, weights * _hat(nodes, rises))
        square = np.add.outer(square, (width * (low + nodes)) ** 2)
    return float((weight * radial(interaction, np.sqrt(square))).sum())


def _corner_integral(
    interaction: AbstractInteraction, spacing: tuple[float, ...], rising: list[bool]
) -> float:
    """Integrate over the unit cell whose corner is at distance zero."""
    if len(spacing) == 1:
        return _ray(interaction, [np.ones(1)], spacing, rising, np.ones(1))
    angles, weights = gauss_nodes(_NODES_ANGLE)
    ones = np.ones_like(angles)
    return sum(
        _ray(interaction, direction, spacing, rising, weights)
        for direction in ([ones, angles], [angles, ones])
    )


def _ray(
    interaction: AbstractInteraction,
    direction: list[FloatArray],
    spacing: tuple[float, ...],
    rising: list[bool],
    weights: FloatArray,
) -> float:
    """Integrate along rays `r * direction`, 0 < r < 1, with the Jacobian `r^(d-1)`."""
    dim = len(spacing)
    length = np.sqrt(
        sum((width * part) ** 2 for width, part in zip(spacing, direction, strict=True))
    )
    truncation = interaction.truncation if isinstance(interaction, Riesz) else 0.0
    exponent = interaction.s if isinstance(interaction, Riesz) else 0.0
    power = max(1.0, 4 / (dim - exponent)) if exponent < dim else 4.0
    kink = np.minimum(1.0, truncation / length)
    points, gauss = gauss_nodes(_NODES_RADIAL)
    inner = kink[:, None] * points
    start = (kink ** (1 / power))[:, None]
    root = start + (1 - start) * points
    pieces = [(inner, kink[:, None] * gauss)] if truncation else []
    pieces.append((root**power, (1 - start) * gauss * power * root ** (power - 1)))
    total = 0.0
    for r, measure in pieces:
        value = measure * r ** (dim - 1) * radial(interaction, r * length[:, None])
        for part, rises in zip(direction, rising, strict=True):
            value = value * _hat(r * part[:, None], rises)
        total += float(weights @ value.sum(axis=1))
    return total


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
    >>> from coulomb.theory.grids import Interval
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


class ShellSum(AbstractGridSum):
    """Sums over shells of the 3-ball.

    The mean of `g_s` between spheres of radii `a` and `b` is
    `((a + b)^(2-s) - |a - b|^(2-s)) / (2 a b (2 - s))` for `s > 0`; at `s = 1` that is
    Newton's `1 / max(a, b)`. The second term is averaged over both shells, so that it
    is finite up to `s < 3`.

    Examples
    --------
    >>> pairs = ShellSum(Riesz(s=1), RadialBall(1.0, 50))
    >>> masses = np.zeros(50)
    >>> masses[10] = 1.0
    >>> bool(abs(pairs(masses)[40] - 1 / RadialBall(1.0, 50).centres[40, 0]) < 1e-12)
    True
    """

    def __init__(self, interaction: AbstractInteraction, grid: RadialBall) -> None:
        check_continuum(interaction, grid.dim)
        if not isinstance(interaction, Riesz) or interaction.truncation:
            raise ParameterError(
                "`interaction` must be Riesz without truncation on a RadialBall; got "
                f"{interaction!r}."
            )
        radii = grid.centres[:, 0]
        total = radii[:, None] + radii
        product = 2 * radii[:, None] * radii
        gap = np.abs(radii[:, None] - radii)
        s = interaction.s
        if s <= 0:  # the integral of g(r) r is smooth
            self._matrix = (_moment(total, s) - _moment(gap, s)) / product
            return
        width = (grid.radius / grid.cells,)
        inner = Riesz(s=s - 2)
        table = cell_averages(inner, (grid.cells,), width)
        index = np.arange(grid.cells)
        near = table[np.abs(index[:, None] - index)]
        if s == 2:
            self._matrix = (np.log(total) + near) / product
        elif s < 2:
            self._matrix = (total ** (2 - s) + near) / (product * (2 - s))
        else:
            self._matrix = (near - total ** (2 - s)) / (product * (s - 2))

    def __call__(self, masses: FloatArray) -> FloatArray:
        return np.asarray(self._matrix @ masses)

    @property
    def local(self) -> float:
        steps = np.diag(self._matrix)[1:] - np.diag(self._matrix, 1)
        return max(float(np.median(steps)), 0.0)

    def dense(self) -> FloatArray:
        return np.asarray(self._matrix)


def _moment(r: FloatArray, s: float) -> FloatArray:
    """Integrate `g_s(r) r` from zero, for `s <= 0`."""
    if s < 0:
        return np.asarray(-(r ** (2 - s)) / (2 - s))
    safe = np.where(r > 0, r, 1.0)
    return np.asarray(0.25 * r**2 - 0.5 * r**2 * np.log(safe))


def grid_sum(interaction: AbstractInteraction, grid: AbstractGrid) -> AbstractGridSum:
    """Choose the sum over pairs of cells that fits a grid."""
    if isinstance(grid, AbstractBoxGrid):
        return ConvolutionSum(interaction, grid)
    if isinstance(grid, RadialBall):
        return ShellSum(interaction, grid)
    raise ParameterError(f"`grid` must be a box, a disc or a ball; got {grid!r}.")
