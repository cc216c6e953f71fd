"""Grids of finite volumes; `boxes` has the straight ones, `curved` the round ones.

A grid is a list of cells with volumes, and a list of faces between neighbours; that is
all the solver sees. A cell that the boundary cuts keeps the part of its volume and of
its faces that lies inside, so that no flux leaves the domain. Arrays over cells are
flat.
"""

from abc import ABC, abstractmethod
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from coulomb._support.errors import ParameterError
from coulomb.domains import AbstractDomain

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.intp]


class Faces(NamedTuple):
    """The inner faces of a grid, from cell `left` to cell `right`."""

    left: IntArray
    right: IntArray
    area: FloatArray
    distance: FloatArray  # between the two centres


class Walls(NamedTuple):
    """The outer faces of a box grid: the cell at the wall and the next one inwards."""

    cell: IntArray
    inner: IntArray
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
    def shape(self) -> tuple[int, ...]:
        """Cells along each axis of the whole Cartesian grid."""

    @property
    @abstractmethod
    def spacing(self) -> tuple[float, ...]:
        """Width of a cell along each axis."""

    @property
    @abstractmethod
    def corner(self) -> tuple[float, ...]:
        """The lowest corner of the whole Cartesian grid."""

    @cached_property
    def inside(self) -> NDArray[np.bool_]:
        """Which cells of the Cartesian grid belong to this one, shape `shape`."""
        return np.ones(self.shape, dtype=bool)

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
    def walls(self) -> Walls:
        """The cells along straight walls with their inner neighbours."""
        if not self.inside.all():
            raise ParameterError(
                f"`grid` must have straight walls for this; got {self!r}."
            )
        index = np.arange(self.size).reshape(self.shape)
        parts = []
        for axis, width in enumerate(self.spacing):
            for outer, inner in ((0, 1), (-1, -2)):
                cell = index.take(outer, axis=axis).ravel()
                next_to = index.take(inner, axis=axis).ravel()
                parts.append((cell, next_to, np.full(cell.size, width)))
        return Walls(*(np.concatenate(part) for part in zip(*parts, strict=True)))

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
