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

from coulomb._support.checks import check_count, check_real
from coulomb._support.errors import ParameterError, ParameterTypeError
from coulomb.energy import Hamiltonian
from coulomb.features import Particles
from coulomb.interactions import AbstractInteraction, Riesz
from coulomb.objectives import AbstractOneBody
from coulomb.theory.grids import AbstractBoxGrid, AbstractGrid, FloatArray
from coulomb.theory.pair_sums import (
    AbstractGridSum,
    check_continuum,
    grid_sum,
    radial,
)

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


def chemical_potential(system: MeanField, density: FloatArray) -> FloatArray:
    """Evaluate `U + log(rho) / beta`, constant at equilibrium."""
    beta = system.inverse_temperature
    entropic = safe_log(density) / beta if math.isfinite(beta) else 0.0
    return system.felt(density) + entropic


def dissipation(system: MeanField, density: FloatArray) -> float:
    """Evaluate `int rho |grad(U + log rho / beta)|^2`, the rate at which `F` falls.

    The density at a face is the mean of its neighbours.

    Parameters
    ----------
    system
        The system.
    density
        Values on the cells, positive.

    Returns
    -------
    float
        At least zero; zero only at equilibrium.
    """
    left, right, area, distance = system.grid.faces
    level = chemical_potential(system, density)
    slope = (level[right] - level[left]) / distance
    at_face = 0.5 * (density[left] + density[right])
    return float((at_face * slope**2 * area * distance).sum())


def robin_residual(system: MeanField, density: FloatArray) -> float:
    """Measure `d_n rho + beta rho d_n U` at straight walls. [CPM eq:proof-robin-form].

    Both derivatives are taken at the wall, extrapolated from the first two cells; the
    result goes to zero with the width of a cell.

    Parameters
    ----------
    system
        A system at finite temperature on an interval or a rectangle.
    density
        Values on the cells.

    Returns
    -------
    float
        The largest absolute value, divided by the largest
        `beta rho |d_n U| + |d_n rho|` of the walls.
    """
    if not isinstance(system.grid, AbstractBoxGrid):
        raise ParameterError(f"`grid` must be a box; got {system.grid!r}.")
    beta = system.inverse_temperature
    if math.isinf(beta):
        raise ParameterError("`inverse_temperature` must be finite here; got inf.")
    cell, inner, distance = system.grid.walls
    level = system.felt(density)
    at_wall = 1.5 * density[cell] - 0.5 * density[inner]
    outward = (density[cell] - density[inner]) / distance
    drift = beta * at_wall * (level[cell] - level[inner]) / distance
    scale = float(np.max(np.abs(outward) + np.abs(drift)))
    return float(np.max(np.abs(outward + drift))) / scale if scale else 0.0


def measure_interaction(
    interaction: AbstractInteraction, positions: FloatArray
) -> float:
    """Evaluate `W^eps(mu_N) = (1/(2N^2)) sum_{k, l} g^eps`, diagonal included.

    [CPM eq:Ws-trunc]; see `finite_size_correction` for its relation to `W_N`.

    Parameters
    ----------
    interaction
        A truncated potential: the diagonal counts `g^eps(0)`.
    positions
        Shape `(n, dim)`.

    Returns
    -------
    float
        Finite for truncated potentials.
    """
    gaps = np.linalg.norm(positions[:, None] - positions[None], axis=-1)
    return 0.5 * float(radial(interaction, gaps).mean())


def finite_size_correction(
    interaction: AbstractInteraction, pair_energy: float, n_particles: int
) -> float:
    """Turn `W_N^eps` into `W^eps(mu_N)`. [CPM eq:diag-identity-rewrite].

    `W^eps(mu_N) = ((N-1)/N) W_N^eps + g^eps(0) / (2N)`.

    Parameters
    ----------
    interaction
        A truncated potential.
    pair_energy
        `W_N^eps`, the mean over pairs.
    n_particles
        `N`.

    Returns
    -------
    float
        The interaction energy of the empirical measure.

    Examples
    --------
    >>> from coulomb.interactions import Riesz
    >>> finite_size_correction(Riesz(s=1, truncation=0.5), 0.25, 2)
    0.625
    """
    check_count("n_particles", n_particles)
    at_zero = float(radial(interaction, np.zeros(1))[0])
    if not math.isfinite(at_zero):
        raise ParameterError(
            f"`interaction` must be truncated here; got {interaction!r}, whose value "
            "at distance 0 is infinite."
        )
    fraction = (n_particles - 1) / n_particles
    return fraction * pair_energy + at_zero / (2 * n_particles)
