"""Straight domains: an interval and a rectangle, in equal cells."""

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from coulomb._support.checks import check_count, check_real
from coulomb._support.errors import ParameterError
from coulomb.domains import AbstractDomain, Box
from coulomb.theory.grids import AbstractBoxGrid, Faces, FloatArray


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
    def shape(self) -> tuple[int, ...]:
        return (self.cells,)

    @property
    def spacing(self) -> tuple[float, ...]:
        return ((self.upper - self.lower) / self.cells,)

    @property
    def corner(self) -> tuple[float, ...]:
        return (self.lower,)

    @property
    def edges(self) -> FloatArray:
        """The ends of the cells, shape `(cells + 1,)`."""
        return np.linspace(self.lower, self.upper, self.cells + 1)

    @cached_property
    def centres(self) -> FloatArray:
        return 0.5 * (self.edges[1:] + self.edges[:-1])[:, None]

    @cached_property
    def volumes(self) -> FloatArray:
        return np.full(self.cells, self.spacing[0])

    @cached_property
    def faces(self) -> Faces:
        return self._neighbours([np.ones(self.cells - 1)])

    @property
    def domain(self) -> AbstractDomain:
        return Box(float(self.lower), float(self.upper))


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
        for low, high, count in zip(self.lower, self.upper, self.cells, strict=True):
            check_real("lower", low)
            check_real("upper", high, above=low)
            check_count("cells", count, at_least=4)

    @property
    def shape(self) -> tuple[int, ...]:
        return self.cells

    @property
    def spacing(self) -> tuple[float, ...]:
        sides = zip(self.lower, self.upper, self.cells, strict=True)
        return tuple((high - low) / count for low, high, count in sides)

    @property
    def corner(self) -> tuple[float, ...]:
        return self.lower

    @cached_property
    def centres(self) -> FloatArray:
        return _cartesian(self.lower, self.spacing, self.cells).reshape(-1, 2)

    @cached_property
    def volumes(self) -> FloatArray:
        return np.full(math.prod(self.cells), math.prod(self.spacing))

    @cached_property
    def faces(self) -> Faces:
        (nx, ny), (hx, hy) = self.cells, self.spacing
        return self._neighbours([np.full((nx - 1, ny), hy), np.full((nx, ny - 1), hx)])

    @property
    def domain(self) -> AbstractDomain:
        if self.lower[0] != self.lower[1] or self.upper[0] != self.upper[1]:
            raise ParameterError(
                "`grid` must have the same sides in both coordinates for particles, "
                f"which live in a Box; got {self!r}. Use a square or a Disc."
            )
        return Box(float(self.lower[0]), float(self.upper[0]))


def _cartesian(
    lower: tuple[float, ...], spacing: tuple[float, ...], cells: tuple[int, ...]
) -> FloatArray:
    axes = [
        low + width * (np.arange(count) + 0.5)
        for low, width, count in zip(lower, spacing, cells, strict=True)
    ]
    return np.stack(np.meshgrid(*axes, indexing="ij"), axis=-1)
