"""The self-consistent Gibbs density, `rho = exp(-beta (V + lambda g * rho)) / Z`."""

import math
from typing import NamedTuple

import numpy as np
from scipy.sparse import linalg

from coulomb._support.errors import ParameterError
from coulomb.theory.grids import FloatArray
from coulomb.theory.system import MeanField


class Equilibrium(NamedTuple):
    """A minimiser of the free energy."""

    density: FloatArray
    felt: FloatArray  # U = V + lambda g * rho
    free_energy: float
    level: float  # U + log(rho) / beta, the same everywhere on the support
    residual: float  # see `gibbs_equilibrium` and `ground_state`
    iterations: int
    converged: bool


def gibbs_density(system: MeanField, felt: FloatArray) -> FloatArray:
    """Evaluate `exp(-beta U) / Z` on the cells."""
    weights = np.exp(-system.inverse_temperature * (felt - felt.min()))
    return np.asarray(weights / (weights @ system.grid.volumes))


def gibbs_equilibrium(
    system: MeanField,
    *,
    start: FloatArray | None = None,
    tolerance: float = 1e-10,
    max_iterations: int = 100,
) -> Equilibrium:
    """Solve `U = V + lambda g * exp(-beta U) / Z` by damped Newton steps.

    Each step solves `(1 + beta lambda K (diag m - m m')) dU = residual` by GMRES; it is
    halved until the residual falls. Low temperatures are reached through higher ones.

    Parameters
    ----------
    system
        A system at finite temperature.
    start
        A first guess of `U`.
    tolerance
        Of the residual, `int |rho - Gibbs(V + lambda g * rho)|`.
    max_iterations
        Newton steps before giving up.

    Returns
    -------
    Equilibrium
        `converged` tells whether the tolerance was met.
    """
    beta = system.inverse_temperature
    if math.isinf(beta):
        raise ParameterError(
            "`inverse_temperature` must be finite here; got inf. Use `ground_state`."
        )
    felt = _warm_start(system, tolerance) if start is None else start
    volumes = system.grid.volumes
    density = gibbs_density(system, felt)
    residual = system.felt(density) - felt
    count = 0
    while True:
        error = float(
            np.abs(gibbs_density(system, felt + residual) - density) @ volumes
        )
        if error <= tolerance or count == max_iterations:
            break
        count += 1
        change = _newton_change(system, density * volumes, residual)
        size, share = _spread(residual), 1.0
        while True:
            trial = felt + share * change
            density = gibbs_density(system, trial)
            after = system.felt(density) - trial
            if _spread(after) < (1 - 0.1 * share) * size or share < 1e-3:
                break
            share /= 2
        felt, residual = trial, after
        if share < 1e-3:  # rounding: the residual cannot fall further
            max_iterations = count
    # The exponent itself is only known to its rounding.
    rounding = 100 * np.finfo(np.float64).eps * beta * (1 + _spread(felt))
    lowest = float(felt.min())
    level = lowest - math.log(float(np.exp(-beta * (felt - lowest)) @ volumes)) / beta
    return Equilibrium(
        density,
        system.felt(density),
        system.free_energy(density).total,
        level,
        error,
        count,
        bool(error <= max(tolerance, rounding)),
    )


def _spread(residual: FloatArray) -> float:
    """Size of a potential up to constants, which do not move the density."""
    return float(np.ptp(residual))


def _warm_start(system: MeanField, tolerance: float) -> FloatArray:
    """Come down from a temperature at which the interaction is weak."""
    density = gibbs_density(system, system.external)
    felt = system.felt(density)
    beta = system.inverse_temperature
    if beta * system.strength <= 30:
        return felt
    warmer = system.at(beta / 4)
    return gibbs_equilibrium(warmer, tolerance=math.sqrt(tolerance)).felt


def _newton_change(
    system: MeanField, masses: FloatArray, residual: FloatArray
) -> FloatArray:
    if not system.strength:
        return residual
    factor = system.inverse_temperature * system.strength

    def apply(change: FloatArray) -> FloatArray:
        change = change.ravel()
        moved = masses * (change - masses @ change)
        return np.asarray(change + factor * system.pairs(moved))

    operator = linalg.LinearOperator((masses.size,) * 2, matvec=apply, dtype=float)
    change, _ = linalg.gmres(operator, residual, rtol=1e-6, restart=60, maxiter=4)
    return np.asarray(change)
