"""Identities of the mean field: dissipation, wall condition, finite size."""

import math

import numpy as np

from coulomb._support.checks import check_count
from coulomb._support.errors import ParameterError
from coulomb.interactions import AbstractInteraction
from coulomb.theory.grids import AbstractBoxGrid, FloatArray
from coulomb.theory.pair_sums import radial
from coulomb.theory.system import MeanField, safe_log


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
