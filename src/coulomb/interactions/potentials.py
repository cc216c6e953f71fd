"""Radial pair potentials that repel."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from coulomb._support.checks import check_count, check_real
from coulomb._support.registry import Registry
from coulomb.kernels.particles import CLOSEST


class AbstractInteraction(ABC):
    """A repulsive radial potential `g(r)`."""

    @abstractmethod
    def radial(self, distance: Tensor) -> Tensor:
        """Evaluate `g(r)`.

        Parameters
        ----------
        distance
            Distances `r >= 0`, any shape.

        Returns
        -------
        Tensor
            The same shape.
        """

    @abstractmethod
    def slope(self, distance: Tensor) -> Tensor:
        """Evaluate `g'(r) / r`, so that the gradient of `g(|d|)` is `slope * d`.

        Parameters
        ----------
        distance
            Distances `r > 0`, any shape.

        Returns
        -------
        Tensor
            The same shape; at most zero, because `g` repels.
        """

    def taylor(self, square: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Evaluate `g'(r)/r` and its first two derivatives in `r^2`.

        Parameters
        ----------
        square
            Squared distances, any shape.

        Returns
        -------
        tuple
            Three tensors of the same shape.
        """
        with torch.enable_grad():
            variable = square.detach().requires_grad_(True)
            slope = self.slope(variable.sqrt())
            (curve,) = torch.autograd.grad(slope.sum(), variable, create_graph=True)
            (bend,) = torch.autograd.grad(curve.sum(), variable)
        return slope.detach(), curve.detach(), bend

    @abstractmethod
    def push_at_contact(self) -> float:
        """Tell the force between two particles at the same place.

        Returns
        -------
        float
            A finite number, `-g'` at the contact distance.
        """


interactions: Registry[AbstractInteraction] = Registry("interaction")


@interactions.add("riesz")
@dataclass(frozen=True)
class Riesz(AbstractInteraction):
    """The Riesz potential `g_s`, log at `s = 0`. [CPM Eq:homogeneous_potential].

    `g_s(r) = r^-s` for `s > 0`, `-log r` for `s = 0`, `-r^-s` for `-2 < s < 0`; with a
    truncation, `g_s(max(r, truncation))`, whose force is zero inside.

    Parameters
    ----------
    s
        The exponent, above -2.
    truncation
        Distances below it count as it; 0 for none.

    Examples
    --------
    >>> Riesz(s=1).radial(torch.tensor([0.5, 2.0]))
    tensor([2.0000, 0.5000])
    >>> Riesz(s=0, truncation=0.1).radial(torch.tensor([0.0, 1.0]))
    tensor([2.3026, -0.0000])
    """

    s: float = 0.0
    truncation: float = 0.0

    def __post_init__(self) -> None:
        check_real("s", self.s, above=-2)
        check_real("truncation", self.truncation, at_least=0)

    def radial(self, distance: Tensor) -> Tensor:
        distance = distance.clamp_min(self.truncation)
        if self.s == 0:
            return -distance.log()
        power = distance.pow(-self.s)
        return power if self.s > 0 else -power

    def slope(self, distance: Tensor) -> Tensor:
        strength = abs(self.s) if self.s else 1.0
        values = -strength * distance.pow(-self.s - 2)
        if not self.truncation:
            return values
        return values.masked_fill(distance < self.truncation, 0.0)

    def taylor(self, square: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        slope = self.slope(square.sqrt())
        half = self.s / 2
        curve = -(half + 1) * slope / square
        return slope, curve, -(half + 2) * curve / square

    def push_at_contact(self) -> float:
        strength = abs(self.s) if self.s else 1.0
        return float(strength * max(self.truncation, CLOSEST) ** (-self.s - 1))


@interactions.add("log")
def Log(truncation: float = 0.0) -> Riesz:
    """Make the logarithmic interaction, `Riesz(s=0)`.

    Parameters
    ----------
    truncation
        Distances below it count as it; 0 for none.

    Returns
    -------
    Riesz
        The interaction.
    """
    return Riesz(s=0.0, truncation=truncation)


def Coulomb(dim: int, truncation: float = 0.0) -> Riesz:
    """Make the Coulomb interaction of `dim` dimensions, `Riesz(s=dim - 2)`.

    It is `|w|` with a minus sign on the line, the logarithm in the plane and the Newton
    potential `1/r` in space.

    Parameters
    ----------
    dim
        The dimension, at least 1.
    truncation
        Distances below it count as it; 0 for none.

    Returns
    -------
    Riesz
        The interaction.

    Examples
    --------
    >>> Coulomb(3)
    Riesz(s=1.0, truncation=0.0)
    """
    check_count("dim", dim)
    return Riesz(s=float(dim - 2), truncation=truncation)


class PairField(NamedTuple):
    """What each particle feels of the others."""

    potential: Tensor  # (*groups, n): u_k = (1/(n-1)) sum_l g(|w_k - w_l|)
    gradient: Tensor  # (*groups, n, dim): the gradient of u_k in w_k, `N grad_k W`
