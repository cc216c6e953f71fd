"""Distances between particles and densities on the line, exact by quantiles."""

from typing import NamedTuple

import numpy as np

from coulomb._support.errors import ParameterError
from coulomb.theory.boxes import Interval
from coulomb.theory.grids import AbstractGrid, FloatArray


class Distances(NamedTuple):
    """Wasserstein distances of order one and two."""

    first: float
    second: float


def line_distances(
    positions: FloatArray, grid: AbstractGrid, density: FloatArray
) -> Distances:
    """Compare particles on the line with a piecewise constant density.

    `W_p^p = int_0^1 |Q_N(u) - Q(u)|^p du`; between jumps of the empirical quantile
    function `Q_N` and kinks of `Q` the integrand is a power of a line, so that the
    integral is exact.

    Parameters
    ----------
    positions
        Shape `(n,)` or `(n, 1)`.
    grid
        An interval.
    density
        Values on the cells, of mass one.

    Returns
    -------
    Distances
        `W_1` and `W_2`.

    Examples
    --------
    >>> grid = Interval(0.0, 1.0, 10)
    >>> gap = line_distances(np.array([0.5]), grid, grid.uniform())
    >>> round(gap.first, 6), round(gap.second, 6)
    (0.25, 0.288675)
    """
    if not isinstance(grid, Interval):
        raise ParameterError(f"`grid` must be an Interval; got {grid!r}.")
    points = np.sort(np.asarray(positions, dtype=np.float64).reshape(-1))
    masses = density * grid.volumes
    levels = np.concatenate([[0.0], np.cumsum(masses)])
    levels /= levels[-1]
    rises = np.concatenate([[True], np.diff(levels) > 0])
    marks = np.arange(points.size + 1) / points.size
    cuts = np.union1d(levels, marks)
    low, high = cuts[:-1], cuts[1:]
    middle = 0.5 * (low + high)
    place = np.minimum((middle * points.size).astype(np.intp), points.size - 1)
    # Quantiles at both ends of a piece, from the cell its middle lies in: empty cells
    # make the quantile function jump.
    above = np.clip(np.searchsorted(levels, middle, side="left"), 1, grid.size)
    width = np.where(rises[above], levels[above] - levels[above - 1], 1.0)
    slope = grid.volumes[above - 1] / width
    base = grid.edges[above - 1]
    start = base + slope * (low - levels[above - 1]) - points[place]
    stop = base + slope * (high - levels[above - 1]) - points[place]
    length = high - low
    same = start * stop >= 0
    span = np.where(same, 1.0, np.abs(stop - start))
    absolute = np.where(
        same, 0.5 * np.abs(start + stop), 0.5 * (start**2 + stop**2) / span
    )
    square = (start**2 + start * stop + stop**2) / 3
    return Distances(
        float(length @ absolute), float(np.sqrt(max(float(length @ square), 0.0)))
    )


def draw_from(grid: Interval, density: FloatArray, uniforms: FloatArray) -> FloatArray:
    """Turn uniform numbers into draws of a piecewise constant density on the line."""
    levels = np.concatenate([[0.0], np.cumsum(density * grid.volumes)])
    return np.asarray(np.interp(uniforms * levels[-1], levels, grid.edges))
