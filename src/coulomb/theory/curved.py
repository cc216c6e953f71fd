"""Round domains: a disc cut out of a Cartesian grid, and a ball by its radius alone."""

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from coulomb._support.checks import check_count, check_real
from coulomb._support.errors import ParameterError
from coulomb.domains import AbstractDomain, Ball
from coulomb.theory.grids import AbstractBoxGrid, AbstractGrid, Faces, FloatArray

# Cells with less of their square inside than this are left out.
_SLIVER = 1e-8


@dataclass(frozen=True)
class Disc(AbstractBoxGrid):
    """The disc `|w| <= radius`, cut out of a Cartesian grid.

    Parameters
    ----------
    radius
        Positive.
    cells
        Along the diameter; even, at least 4.

    Examples
    --------
    >>> grid = Disc(1.0, 32)
    >>> bool(abs(grid.volumes.sum() - math.pi) < 1e-12)
    True
    """

    radius: float = 1.0
    cells: int = 64
    dim = 2

    def __post_init__(self) -> None:
        check_real("radius", self.radius, above=0)
        check_count("cells", self.cells, at_least=4)
        if self.cells % 2:
            raise ParameterError(f"`cells` must be even for a disc; got {self.cells}.")

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.cells, self.cells)

    @property
    def spacing(self) -> tuple[float, ...]:
        return (2 * self.radius / self.cells,) * 2

    @property
    def corner(self) -> tuple[float, ...]:
        return (-self.radius,) * 2

    @cached_property
    def _all_volumes(self) -> FloatArray:
        half = self.cells // 2
        ends = self.spacing[0] * np.arange(half + 1, dtype=np.float64)
        quarter = _corner_areas(ends[:-1], ends[1:], self.radius)
        side = np.concatenate([quarter[::-1], quarter])
        return np.concatenate([side[:, ::-1], side], axis=1)

    @cached_property
    def inside(self) -> NDArray[np.bool_]:
        kept: NDArray[np.bool_] = self._all_volumes > _SLIVER * self.spacing[0] ** 2
        return kept

    @cached_property
    def centres(self) -> FloatArray:
        axis = self.spacing[0] * (np.arange(self.cells) + 0.5) - self.radius
        grid = np.stack(np.meshgrid(axis, axis, indexing="ij"), axis=-1)
        return np.asarray(grid[self.inside])

    @property
    def points(self) -> FloatArray:
        """The centres; those of cut cells moved onto the disc."""
        norm = np.linalg.norm(self.centres, axis=1, keepdims=True)
        return np.asarray(self.centres * np.minimum(1, self.radius / norm))

    @cached_property
    def volumes(self) -> FloatArray:
        return self._all_volumes[self.inside]

    @cached_property
    def faces(self) -> Faces:
        width = self.spacing[0]
        ends = width * np.arange(self.cells + 1) - self.radius
        chord = np.sqrt(np.maximum(self.radius**2 - ends[1:-1, None] ** 2, 0))
        open_length = np.minimum(chord, ends[1:]) - np.maximum(-chord, ends[:-1])
        area = np.clip(open_length, 0, width)
        return self._neighbours([area, area.T])

    @property
    def domain(self) -> AbstractDomain:
        return Ball(float(self.radius))


def _corner_areas(low: FloatArray, high: FloatArray, radius: float) -> FloatArray:
    """Areas of the disc in the cells `[low_i, high_i] x [low_j, high_j]`, all >= 0."""
    x0, x1, y0, y1 = low[:, None], high[:, None], low[None], high[None]

    def below_arc(x: FloatArray) -> FloatArray:  # the integral of sqrt(R^2 - x^2)
        x = np.clip(x, 0, radius)
        root = np.sqrt(radius**2 - x**2)
        return 0.5 * (x * root + radius**2 * np.arcsin(x / radius))

    full = np.sqrt(np.maximum(radius**2 - y1**2, 0))  # the arc is above y1 up to here
    reach = np.sqrt(np.maximum(radius**2 - y0**2, 0))  # and above y0 up to here
    whole = np.clip(np.minimum(x1, full) - x0, 0, None) * (y1 - y0)
    start, stop = np.maximum(x0, full), np.minimum(x1, reach)
    stop = np.maximum(stop, start)
    partial = below_arc(stop) - below_arc(start) - y0 * (stop - start)
    return np.asarray(whole + partial)


@dataclass(frozen=True)
class RadialBall(AbstractGrid):
    """The ball of three dimensions in shells, for densities that depend on `|w|`.

    Parameters
    ----------
    radius
        Positive.
    cells
        Shells of equal thickness, at least 4.

    Examples
    --------
    >>> grid = RadialBall(1.0, 50)
    >>> bool(abs(grid.volumes.sum() - 4 * math.pi / 3) < 1e-12)
    True
    """

    radius: float = 1.0
    cells: int = 200
    dim = 3

    def __post_init__(self) -> None:
        check_real("radius", self.radius, above=0)
        check_count("cells", self.cells, at_least=4)

    @property
    def edges(self) -> FloatArray:
        """The radii between the shells, shape `(cells + 1,)`."""
        return np.linspace(0, self.radius, self.cells + 1)

    @cached_property
    def centres(self) -> FloatArray:
        return 0.5 * (self.edges[1:] + self.edges[:-1])[:, None]

    @property
    def points(self) -> FloatArray:
        """Points of these radii along the first axis."""
        return np.pad(self.centres, ((0, 0), (0, 2)))

    @cached_property
    def volumes(self) -> FloatArray:
        return 4 * math.pi / 3 * np.diff(self.edges**3)

    @cached_property
    def faces(self) -> Faces:
        left = np.arange(self.cells - 1)
        area = 4 * math.pi * self.edges[1:-1] ** 2
        distance = np.full(self.cells - 1, self.radius / self.cells)
        return Faces(left, left + 1, area, distance)

    @property
    def domain(self) -> AbstractDomain:
        return Ball(float(self.radius))
