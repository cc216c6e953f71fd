"""The mean-field system: a grid, a potential, an interaction and a temperature.

`F(rho) = int V rho + (lambda/2) int int g rho rho + (1/beta) int rho log rho`, and its
identities on the grid.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from coulomb._support.checks import check_real
from coulomb._support.errors import ParameterError, ParameterTypeError
from coulomb.energy import Hamiltonian
from coulomb.features import Particles
from coulomb.interactions import AbstractInteraction, Riesz
from coulomb.objectives import AbstractOneBody
from coulomb.theory.grids import AbstractGrid, FloatArray
from coulomb.theory.pair_sums import AbstractGridSum, check_continuum, grid_sum

Function = Callable[[Tensor], Tensor]


@dataclass(frozen=True, eq=False)
class Potential(AbstractOneBody):
    """A potential `V(w)` written as a function of positions.

    Parameters
    ----------
    function
        Takes positions `(..., dim)` and returns values `(...)`, in torch.

    Examples
    --------
    >>> bowl = Potential(lambda w: 2 * w[..., 0] ** 2)
    >>> bowl.potential(Particles(torch.tensor([[0.5]])))
    tensor([0.5000])
    """

    function: Function

    def potential(self, particles: Particles) -> Tensor:
        values = self.function(particles.positions)
        if not isinstance(values, Tensor):
            raise ParameterTypeError(
                f"`function` must return a tensor; got {type(values).__name__}."
            )
        # A constant potential has a zero gradient, not a missing one.
        values = values + 0 * particles.positions.sum(dim=-1)
        if values.shape != particles.positions.shape[:-1]:
            raise ParameterError(
                "`function` must return one value per position, "
                f"{tuple(particles.positions.shape[:-1])}; got {tuple(values.shape)}."
            )
        return values


class EnergyParts(NamedTuple):
    """The free energy and its three parts."""

    total: float
    external: float  # int V rho
    interaction: float  # (lambda/2) int int g rho rho
    entropy: float  # (1/beta) int rho log rho; zero at zero temperature


@dataclass(frozen=True, eq=False)
class MeanField:
    """What the continuum limit is made of. [CPM eq:continuum-energy-main].

    Parameters
    ----------
    grid
        The domain, cut into cells.
    potential
        `V`: a one-body objective of this package (such as `FourierAlignment`, which is
        the `V_D` of the estimator), or a function of positions in torch.
    interaction
        The pair potential `g`; `s < d`, or truncated.
    strength
        `lambda`, at least zero.
    inverse_temperature
        `beta`, positive; infinity for zero temperature.

    Examples
    --------
    >>> from coulomb.theory.grids import Interval
    >>> system = MeanField(Interval(-1, 1, 100), lambda w: w[..., 0] ** 2)
    >>> round(system.free_energy(system.grid.uniform()).total, 4)  # 1/3 - log 2
    -0.3598
    """

    grid: AbstractGrid
    potential: AbstractOneBody | Function
    interaction: AbstractInteraction = field(default_factory=Riesz)
    strength: float = 0.0
    inverse_temperature: float = 1.0

    def __post_init__(self) -> None:
        check_real("strength", self.strength, at_least=0)
        check_real(
            "inverse_temperature", self.inverse_temperature, above=0, infinite=True
        )
        if self.strength:
            check_continuum(self.interaction, self.grid.dim)

    @cached_property
    def objective(self) -> AbstractOneBody:
        """The potential as an objective."""
        if isinstance(self.potential, AbstractOneBody):
            return self.potential
        return Potential(self.potential)

    @cached_property
    def external(self) -> FloatArray:
        """`V` at the centres of the cells."""
        points = torch.from_numpy(self.grid.points)
        values = evaluate(lambda w: self.objective.potential(Particles(w)), points)
        if not np.isfinite(values).all():
            raise ParameterError(
                "`potential` must be finite on the grid; got an infinite or undefined "
                "value."
            )
        return values

    @cached_property
    def pairs(self) -> AbstractGridSum:
        """The sum over pairs of cells."""
        return grid_sum(self.interaction, self.grid)

    def pair_potential(self, density: FloatArray) -> FloatArray:
        """Evaluate `lambda g * rho` on the cells.

        Parameters
        ----------
        density
            Values on the cells.

        Returns
        -------
        FloatArray
            One value per cell; zeros without interaction.
        """
        if not self.strength:
            return np.zeros(self.grid.size)
        return self.strength * self.pairs(density * self.grid.volumes)

    def felt(self, density: FloatArray) -> FloatArray:
        """Evaluate `U = V + lambda g * rho` on the cells. [CPM eq:proof-U-b-def].

        Parameters
        ----------
        density
            Values on the cells.

        Returns
        -------
        FloatArray
            One value per cell.
        """
        return self.external + self.pair_potential(density)

    def free_energy(self, density: FloatArray) -> EnergyParts:
        """Evaluate `F(rho)` with its parts.

        Parameters
        ----------
        density
            Values on the cells, at least zero.

        Returns
        -------
        EnergyParts
            At zero temperature the entropy does not count.
        """
        masses = density * self.grid.volumes
        external = float(masses @ self.external)
        pairs = 0.5 * float(masses @ self.pair_potential(density))
        entropy = 0.0
        if math.isfinite(self.inverse_temperature):
            entropy = float(masses @ safe_log(density)) / self.inverse_temperature
        return EnergyParts(external + pairs + entropy, external, pairs, entropy)

    def hamiltonian(self) -> Hamiltonian:
        """Give the energy of finitely many particles with this mean field.

        Returns
        -------
        Hamiltonian
            `H = mean_k V + lambda W`.
        """
        return Hamiltonian(self.objective, self.interaction, self.strength)

    def at(self, inverse_temperature: float) -> "MeanField":
        """Give the same system at another temperature; the sums are shared.

        Parameters
        ----------
        inverse_temperature
            The new `beta`.

        Returns
        -------
        MeanField
            A new system.
        """
        return self._sharing(replace(self, inverse_temperature=inverse_temperature))

    def tilted(self, values: FloatArray) -> "MeanField":
        """Give the system with `V` replaced by `V - values` on the cells.

        Its Hamiltonian is that of this system: the tilt lives on the grid alone.

        Parameters
        ----------
        values
            One per cell.

        Returns
        -------
        MeanField
            A new system.
        """
        other = self._sharing(replace(self))
        other.__dict__["external"] = self.external - values
        return other

    def _sharing(self, other: "MeanField") -> "MeanField":
        other.__dict__["external"] = self.external
        if self.strength:
            other.__dict__["pairs"] = self.pairs
        return other


def evaluate(function: Function, points: Tensor) -> FloatArray:
    """Evaluate a function of positions, without its gradient."""
    with torch.no_grad():
        return np.array(function(points).numpy(), dtype=np.float64)


def safe_log(density: FloatArray) -> FloatArray:
    """Take the logarithm of a density, finite where the density is zero."""
    return np.asarray(np.log(np.maximum(density, np.finfo(np.float64).tiny)))
