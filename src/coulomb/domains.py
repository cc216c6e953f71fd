"""Domains: where particles may be, and how they are brought back.

Projection takes the nearest point. Reflection mirrors the excess at the wall; it is
what the no-flux boundary of the continuum equation means at a finite step.
"""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.linalg import vector_norm

from coulomb._support.checks import Registry, check_real
from coulomb._support.errors import ParameterError


class AbstractDomain(ABC):
    """A closed set of points `(..., dim)`."""

    @abstractmethod
    def project(self, points: Tensor) -> Tensor:
        """Move each point to the nearest one of the domain.

        Parameters
        ----------
        points
            Shape `(..., dim)`.

        Returns
        -------
        Tensor
            The same shape; points inside are unchanged, bit for bit.
        """

    @abstractmethod
    def reflect(self, points: Tensor) -> Tensor:
        """Mirror the part of each step that went through the wall.

        Parameters
        ----------
        points
            Shape `(..., dim)`.

        Returns
        -------
        Tensor
            The same shape; points inside are unchanged, bit for bit.
        """

    @abstractmethod
    def contains(self, points: Tensor) -> Tensor:
        """Tell which points are inside, up to rounding.

        Parameters
        ----------
        points
            Shape `(..., dim)`.

        Returns
        -------
        Tensor
            Booleans, shape `(...)`.
        """


domains: Registry[AbstractDomain] = Registry("domain")


def check_boundary(boundary: str) -> None:
    """Refuse what is neither projection nor reflection.

    Parameters
    ----------
    boundary
        "project" or "reflect".
    """
    if boundary not in ("project", "reflect"):
        raise ParameterError(
            f"`boundary` must be 'project' or 'reflect'; got {boundary!r}."
        )


def _slack(points: Tensor) -> float:
    return 8 * torch.finfo(points.dtype).eps


@domains.add("space")
@dataclass(frozen=True)
class Space(AbstractDomain):
    """The whole space: nothing to do.

    Examples
    --------
    >>> Space().project(torch.tensor([3.0, 4.0]))
    tensor([3., 4.])
    """

    def project(self, points: Tensor) -> Tensor:
        return points

    def reflect(self, points: Tensor) -> Tensor:
        return points

    def contains(self, points: Tensor) -> Tensor:
        return points.isfinite().all(dim=-1)


@domains.add("ball")
@dataclass(frozen=True)
class Ball(AbstractDomain):
    """The centred ball `|w| <= radius`.

    Parameters
    ----------
    radius
        Positive; infinity gives the whole space.

    Examples
    --------
    >>> Ball(2.5).project(torch.tensor([3.0, 4.0]))
    tensor([1.5000, 2.0000])
    >>> Ball(4.0).reflect(torch.tensor([3.0, 4.0]))
    tensor([1.8000, 2.4000])
    """

    radius: float = 1.0

    def __post_init__(self) -> None:
        check_real("radius", self.radius, above=0, infinite=True)

    def project(self, points: Tensor) -> Tensor:
        norm = vector_norm(points, dim=-1, keepdim=True)
        # Divided first: points in one direction land on one point, to the bit.
        moved = points / norm * self.radius
        return torch.where(self._is_outside(norm, points), moved, points)

    def reflect(self, points: Tensor) -> Tensor:
        # A radial coordinate r is folded into [-radius, radius] as a triangle wave, so
        # that a step of any length ends inside.
        if math.isinf(self.radius):
            return points
        norm = vector_norm(points, dim=-1, keepdim=True)
        outside = self._is_outside(norm, points)
        folded = _fold(norm, -self.radius, self.radius)
        scale = torch.where(outside, folded / norm, torch.ones_like(norm))
        return self.project(torch.where(outside, points * scale, points))

    def _is_outside(self, norm: Tensor, points: Tensor) -> Tensor:
        # A projected point is on the wall up to rounding and must not move again.
        wall = self.radius * (1 + _slack(points) / 2)
        return norm.gt(wall)

    def contains(self, points: Tensor) -> Tensor:
        return vector_norm(points, dim=-1) <= self.radius * (1 + _slack(points))


@domains.add("box")
@dataclass(frozen=True)
class Box(AbstractDomain):
    """The box `lower <= w_j <= upper` in every coordinate.

    Parameters
    ----------
    lower, upper
        The sides, the same in every coordinate.

    Examples
    --------
    >>> Box(-1, 1).project(torch.tensor([3.0, 0.5]))
    tensor([1.0000, 0.5000])
    >>> Box(-1, 1).reflect(torch.tensor([1.25, 0.5]))
    tensor([0.7500, 0.5000])
    """

    lower: float = -1.0
    upper: float = 1.0

    def __post_init__(self) -> None:
        check_real("lower", self.lower, infinite=True)
        check_real("upper", self.upper, infinite=True)
        if not self.lower < self.upper:
            raise ParameterError(
                f"`upper` must be greater than `lower`; got {self.upper!r} and "
                f"{self.lower!r}. Swap them?"
            )

    @property
    def bounded(self) -> bool:
        """Whether both sides are finite."""
        return math.isfinite(self.lower) and math.isfinite(self.upper)

    def project(self, points: Tensor) -> Tensor:
        return points.clamp(self.lower, self.upper)

    def reflect(self, points: Tensor) -> Tensor:
        if not self.bounded:
            once = torch.where(points < self.lower, 2 * self.lower - points, points)
            once = torch.where(once > self.upper, 2 * self.upper - once, once)
            return self.project(once)
        outside = (points < self.lower) | (points > self.upper)
        folded = _fold(points, self.lower, self.upper)
        return self.project(torch.where(outside, folded, points))

    def contains(self, points: Tensor) -> Tensor:
        scale = max(
            abs(side) for side in (self.lower, self.upper, 1.0) if math.isfinite(side)
        )
        slack = _slack(points) * scale
        above, under = points.ge(self.lower - slack), points.le(self.upper + slack)
        return torch.logical_and(above, under).all(dim=-1)


@domains.add("sphere")
@dataclass(frozen=True)
class Sphere(AbstractDomain):
    """The sphere `|w| = radius`. The centre goes to the first axis.

    There is nothing to reflect from on a sphere: reflection is projection.

    Parameters
    ----------
    radius
        Positive.

    Examples
    --------
    >>> Sphere(1.0).project(torch.tensor([[3.0, 4.0], [0.0, 0.0]]))
    tensor([[0.6000, 0.8000],
            [1.0000, 0.0000]])
    """

    radius: float = 1.0

    def __post_init__(self) -> None:
        check_real("radius", self.radius, above=0)

    def project(self, points: Tensor) -> Tensor:
        norm = vector_norm(points, dim=-1, keepdim=True)
        pole = torch.zeros_like(points)
        pole[..., 0] = self.radius
        at_centre = norm == 0
        safe = torch.where(at_centre, torch.ones_like(norm), norm)
        moved = torch.where(at_centre, pole, points * (self.radius / safe))
        # Points already on the sphere stay as they are, so that projecting twice is
        # projecting once to the bit.
        on_sphere = (norm - self.radius).abs() <= self.radius * _slack(points) / 2
        return torch.where(on_sphere, points, moved)

    def reflect(self, points: Tensor) -> Tensor:
        return self.project(points)

    def contains(self, points: Tensor) -> Tensor:
        gap = (vector_norm(points, dim=-1) - self.radius).abs()
        return gap <= self.radius * _slack(points)


@dataclass(frozen=True, eq=False)
class Masked(AbstractDomain):
    """A domain in which each particle keeps to its own coordinates.

    Projecting on a coordinate subspace and then on a centred ball or box is the
    projection on their intersection.

    Parameters
    ----------
    domain
        The domain inside the subspaces; it must contain the origin's coordinates.
    mask
        Ones where a particle may move, zeros elsewhere, shape `(n_particles, dim)`.

    Examples
    --------
    >>> mask = torch.tensor([[1.0, 0.0], [0.0, 1.0]])
    >>> Masked(Ball(1.0), mask).project(torch.full((2, 2), 3.0))
    tensor([[1., 0.],
            [0., 1.]])
    """

    domain: AbstractDomain
    mask: Tensor

    def project(self, points: Tensor) -> Tensor:
        return self.domain.project(points * self.mask)

    def reflect(self, points: Tensor) -> Tensor:
        return self.domain.reflect(points * self.mask)

    def contains(self, points: Tensor) -> Tensor:
        on_subspace = (points * (1 - self.mask) == 0).all(dim=-1)
        return on_subspace & self.domain.contains(points)


def _fold(values: Tensor, lower: float, upper: float) -> Tensor:
    """Fold the line into [lower, upper] by mirrors at both ends."""
    width = upper - lower
    position = torch.remainder(values - lower, 2 * width)
    folded = torch.where(position > width, 2 * width - position, position)
    return folded.add(lower)
