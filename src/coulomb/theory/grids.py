"""Grids of finite volumes: boxes, a disc, and a ball by its radius alone.

A grid is a list of cells with volumes, and a list of faces between neighbours; that is
all the solver sees. A cell that the boundary cuts keeps the part of its volume and of
its faces that lies inside, so that no flux leaves the domain. Arrays over cells are
flat.
"""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from coulomb._support.checks import check_count, check_real
from coulomb._support.errors import ParameterError
from coulomb.domains import AbstractDomain, Ball, Box

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.intp]
# Cells of a disc with less of their square inside than this are left out.
_SLIVER = 1e-8


class Faces(NamedTuple):
    """The inner faces of a grid, from cell `left` to cell `right`."""

    left: IntArray
    right: IntArray
    area: FloatArray
    distance: FloatArray  # between the two centres


class AbstractGrid(ABC):
    """Cells, their volumes and the faces between them."""

    dim: int  # of the space the particles live in

    @property
    @abstractmethod
    def centres(self) -> FloatArray:
        """Where functions are evaluated, shape `(n_cells, coordinates)`."""

    @property
    @abstractmethod
    def volumes(self) -> FloatArray:
        """Volume of each cell, shape `(n_cells,)`."""

    @property
    @abstractmethod
    def faces(self) -> Faces:
        """The faces between cells."""

    @property
    @abstractmethod
    def domain(self) -> AbstractDomain:
        """The domain that particles of this grid live in."""

    @property
    def size(self) -> int:
        """Number of cells."""
        return int(self.volumes.size)

    @property
    def points(self) -> FloatArray:
        """The centres as points of the particles' space, shape `(n_cells, dim)`."""
        return self.centres

    def normalise(self, density: FloatArray) -> FloatArray:
        """Scale a non-negative function to mass one.

        Parameters
        ----------
        density
            Values on the cells.

        Returns
        -------
        FloatArray
            A density.
        """
        density = np.asarray(density, dtype=np.float64)
        if density.shape != (self.size,):
            raise ParameterError(
                f"`density` must have one value per cell, ({self.size},); "
                f"got {density.shape}."
            )
        mass = float(density @ self.volumes)
        if not (np.isfinite(density).all() and density.min() >= 0 and mass > 0):
            raise ParameterError(
                "`density` must be finite, at least 0 and of positive mass; got values "
                f"from {density.min():g} to {density.max():g}."
            )
        return density / mass

    def uniform(self) -> FloatArray:
        """Give the uniform density.

        Returns
        -------
        FloatArray
            The same value on every cell.
        """
        return np.full(self.size, 1 / self.volumes.sum())


class AbstractBoxGrid(AbstractGrid):
    """A part of a uniform Cartesian grid, on which sums over pairs are convolutions."""

    @property
    @abstractmethod
    def sides(self) -> tuple[tuple[float, float, int], ...]:
        """The two ends and the number of cells along each axis."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Cells along each axis of the whole Cartesian grid."""
        return tuple(cells for _, _, cells in self.sides)

    @property
    def spacing(self) -> tuple[float, ...]:
        """Width of a cell along each axis."""
        return tuple((upper - lower) / cells for lower, upper, cells in self.sides)

    @property
    def corner(self) -> tuple[float, ...]:
        """The lowest corner of the whole Cartesian grid."""
        return tuple(lower for lower, _, _ in self.sides)

    @property
    def domain(self) -> AbstractDomain:
        (lower, upper, _), *others = self.sides
        if any(other[:2] != (lower, upper) for other in others):
            raise ParameterError(
                "`grid` must have the same sides in both coordinates for particles, "
                f"which live in a Box; got {self!r}. Use a square or a Disc."
            )
        return Box(float(lower), float(upper))

    @cached_property
    def inside(self) -> NDArray[np.bool_]:
        """Which cells of the Cartesian grid belong to this one, shape `shape`."""
        return np.ones(self.shape, dtype=bool)

    @cached_property
    def centres(self) -> FloatArray:
        axes = [
            lower + width * (np.arange(cells) + 0.5)
            for (lower, _, cells), width in zip(self.sides, self.spacing, strict=True)
        ]
        whole = np.stack(np.meshgrid(*axes, indexing="ij"), axis=-1)
        return np.asarray(whole[self.inside])

    @cached_property
    def volumes(self) -> FloatArray:
        return np.full(math.prod(self.shape), math.prod(self.spacing))

    @cached_property
    def faces(self) -> Faces:
        areas = []
        for axis in range(self.dim):
            shape = [count - (a == axis) for a, count in enumerate(self.shape)]
            sides = [width for a, width in enumerate(self.spacing) if a != axis]
            areas.append(np.full(shape, math.prod(sides), dtype=np.float64))
        return self._neighbours(areas)

    def embed(self, values: FloatArray) -> FloatArray:
        """Put values on the cells into the Cartesian grid, zero elsewhere.

        Parameters
        ----------
        values
            Shape `(n_cells,)`.

        Returns
        -------
        FloatArray
            Shape `shape`.
        """
        whole = np.zeros(self.shape)
        whole[self.inside] = values
        return whole

    @cached_property
    def walls(self) -> tuple[IntArray, IntArray, FloatArray]:
        """The cells along straight walls, the next ones inwards, and their distance."""
        if not self.inside.all():
            raise ParameterError(
                f"`grid` must have straight walls for this; got {self!r}."
            )
        index = np.arange(self.size).reshape(self.shape)
        parts = []
        for axis, width in enumerate(self.spacing):
            outer = index.take([0, -1], axis=axis).ravel()
            inner = index.take([1, -2], axis=axis).ravel()
            parts.append((outer, inner, np.full(outer.size, width)))
        cells, neighbours, distances = map(np.concatenate, zip(*parts, strict=True))
        return cells, neighbours, distances

    def _neighbours(self, open_area: list[FloatArray]) -> Faces:
        """Collect faces; `open_area[axis]` is the area of the face to the next cell."""
        index = np.full(self.shape, -1, dtype=np.intp)
        index[self.inside] = np.arange(int(self.inside.sum()))
        parts = []
        for axis, width in enumerate(self.spacing):
            count = self.shape[axis]
            left = index.take(range(count - 1), axis=axis).ravel()
            right = index.take(range(1, count), axis=axis).ravel()
            area = open_area[axis].ravel()
            keep = (left >= 0) & (right >= 0) & (area > 0)
            distance = np.full(int(keep.sum()), width)
            parts.append((left[keep], right[keep], area[keep], distance))
        return Faces(*(np.concatenate(part) for part in zip(*parts, strict=True)))


@dataclass(frozen=True)
class Interval(AbstractBoxGrid):
    """Equal cells on `[lower, upper]`.

    Parameters
    ----------
    lower, upper
        The ends.
    cells
        How many, at least 4.

    Examples
    --------
    >>> grid = Interval(-1.0, 1.0, 4)
    >>> grid.centres[:, 0]
    array([-0.75, -0.25,  0.25,  0.75])
    >>> grid.domain
    Box(lower=-1.0, upper=1.0)
    """

    lower: float = -1.0
    upper: float = 1.0
    cells: int = 200
    dim = 1

    def __post_init__(self) -> None:
        check_real("lower", self.lower)
        check_real("upper", self.upper, above=self.lower)
        check_count("cells", self.cells, at_least=4)

    @property
    def sides(self) -> tuple[tuple[float, float, int], ...]:
        return ((self.lower, self.upper, self.cells),)

    @property
    def edges(self) -> FloatArray:
        """The ends of the cells, shape `(cells + 1,)`."""
        return np.linspace(self.lower, self.upper, self.cells + 1)

    @cached_property
    def centres(self) -> FloatArray:
        return 0.5 * (self.edges[1:] + self.edges[:-1])[:, None]


@dataclass(frozen=True)
class Rectangle(AbstractBoxGrid):
    """Equal cells on `[lower_x, upper_x] x [lower_y, upper_y]`.

    Parameters
    ----------
    lower, upper
        Opposite corners.
    cells
        How many along each side, at least 4.

    Examples
    --------
    >>> grid = Rectangle((0.0, 0.0), (2.0, 1.0), (8, 4))
    >>> grid.size, grid.spacing
    (32, (0.25, 0.25))
    """

    lower: tuple[float, float] = (-1.0, -1.0)
    upper: tuple[float, float] = (1.0, 1.0)
    cells: tuple[int, int] = (64, 64)
    dim = 2

    def __post_init__(self) -> None:
        for lower, upper, cells in self.sides:
            check_real("lower", lower)
            check_real("upper", upper, above=lower)
            check_count("cells", cells, at_least=4)

    @property
    def sides(self) -> tuple[tuple[float, float, int], ...]:
        return tuple(zip(self.lower, self.upper, self.cells, strict=True))


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
    def sides(self) -> tuple[tuple[float, float, int], ...]:
        return ((-self.radius, self.radius, self.cells),) * 2

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
