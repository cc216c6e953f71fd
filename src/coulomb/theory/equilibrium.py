"""Equilibrium at any temperature: Gibbs densities and, at zero, equilibrium measures.

At finite temperature the density is self-consistent,
`rho = exp(-beta (V + lambda g * rho)) / Z`. At zero temperature the energy
`V.m + (lambda/2) m.K m` is minimised over masses `m >= 0` of sum one: the felt
potential is constant on the support and not below it elsewhere.
"""

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.linalg import cho_factor, cho_solve
from scipy.sparse import linalg

from coulomb._support.errors import ParameterError
from coulomb.theory.grids import FloatArray
from coulomb.theory.pair_sums import ConvolutionSum
from coulomb.theory.system import MeanField

# Up to this many cells a dense Cholesky factor beats conjugate gradients.
_DENSE = 2048


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


def equilibrium(system: MeanField, *, tolerance: float = 1e-10) -> Equilibrium:
    """Minimise the free energy at any temperature.

    Parameters
    ----------
    system
        The system.
    tolerance
        Of the residual.

    Returns
    -------
    Equilibrium
        By `gibbs_equilibrium`, or by `ground_state` if the temperature is zero.

    Examples
    --------
    >>> from coulomb.interactions import Riesz
    >>> from coulomb.theory.grids import Interval
    >>> grid = Interval(-2, 2, 400)
    >>> system = MeanField(grid, lambda w: w[..., 0] ** 2, Riesz(s=0), 1.0, math.inf)
    >>> rest = equilibrium(system)  # the semicircle of radius sqrt(lambda / c) = 1
    >>> bool(abs(rest.density[200] - 2 / math.pi) < 1e-3)
    True
    """
    if math.isinf(system.inverse_temperature):
        return ground_state(system, tolerance=tolerance)
    return gibbs_equilibrium(system, tolerance=tolerance)


def ground_state(
    system: MeanField, *, tolerance: float = 1e-10, max_iterations: int = 1000
) -> Equilibrium:
    """Minimise `int V rho + (lambda/2) int int g rho rho` by an active-set method.

    On a guess of the support the optimality conditions `V + lambda K m = level`,
    `sum m = 1` are linear; cells of negative mass leave it, cells whose potential is
    below the level join. It ends when nothing changes, and then the answer is exact.

    Parameters
    ----------
    system
        The system; its temperature is taken as zero.
    tolerance
        Of the residual, the largest violation of the optimality conditions relative to
        the ranges of `V` and `lambda g`.
    max_iterations
        Changes of the support before giving up.

    Returns
    -------
    Equilibrium
        `converged` tells whether the tolerance was met. Without interaction all mass is
        where `V` is lowest.
    """
    cold = system.at(math.inf)
    volumes = system.grid.volumes
    if not system.strength:
        lowest = system.external <= system.external.min()
        density = lowest / volumes[lowest].sum()
        energy = float(system.external.min())
        return Equilibrium(density, system.external, energy, energy, 0.0, 0, True)
    solver = _SupportSolver(cold)
    free = _first_support(system)
    seen: set[bytes] = set()
    count, masses = 0, np.zeros(0)
    while count < max_iterations:
        count += 1
        masses, level = solver.solve(free)
        felt = cold.external + system.strength * system.pairs(masses)
        following = np.where(free, masses > 0, felt < level - tolerance * solver.scale)
        if (following == free).all() or following.tobytes() in seen:
            break
        seen.add(following.tobytes())
        free = following
    masses = np.maximum(masses, 0)
    density = masses / masses.sum() / volumes
    felt = cold.felt(density)
    level = float(felt @ (density * volumes))
    below = max(0.0, level - float(felt.min()))
    uneven = float(np.abs(felt - level) @ (density * volumes))
    residual = max(below, uneven) / solver.scale
    energy = cold.free_energy(density).total
    # Conjugate gradients are accurate to about 1e-9 of the range.
    met = residual <= max(tolerance, 1e-7)
    return Equilibrium(density, felt, energy, level, residual, count, met)


def _first_support(system: MeanField) -> NDArray[np.bool_]:
    """Guess the support from a low temperature."""
    warm = system.at(200 / system.strength)
    guess = gibbs_equilibrium(warm, tolerance=1e-3, max_iterations=30).density
    kept: NDArray[np.bool_] = guess > 0.02 * float(
        np.median(guess[guess > guess.mean()])
    )
    return kept


class _SupportSolver:
    """Solves `lambda K m + V = level`, `sum m = 1` for cells of a support.

    A constant added to `K` changes nothing for masses of sum one and makes it positive
    definite, where `g` is positive only on differences of densities.
    """

    def __init__(self, system: MeanField) -> None:
        self._system, self._size = system, system.grid.size
        unit = np.zeros(self._size)
        unit[0] = 1.0
        column = system.pairs(unit)
        self._shift = 2 * float(np.abs(column).max())
        self.scale = float(np.ptp(system.external)) + system.strength * self._shift
        self._matrix: FloatArray | None = None
        if self._size <= _DENSE:
            self._matrix = system.pairs.dense() + self._shift

    def solve(self, free: NDArray[np.bool_]) -> tuple[FloatArray, float]:
        strength = self._system.strength
        sides = np.stack(
            [np.ones(int(free.sum())), self._system.external[free]], axis=1
        )
        response = self._invert(free, sides) / strength
        ones, pulled = response[:, 0], response[:, 1]
        level = (1 + pulled.sum()) / ones.sum()
        masses = np.zeros(self._size)
        masses[free] = level * ones - pulled
        return masses, level - strength * self._shift

    def _invert(self, free: NDArray[np.bool_], sides: FloatArray) -> FloatArray:
        if self._matrix is not None:
            factor = cho_factor(self._matrix[np.ix_(free, free)], overwrite_a=True)
            return np.asarray(cho_solve(factor, sides))

        def apply(values: FloatArray) -> FloatArray:
            whole = _spread_out(values, free)
            pulled = self._system.pairs(whole) + self._shift * whole.sum()
            return np.asarray(pulled[free])

        count = int(free.sum())
        shape = (count, count)
        operator = linalg.LinearOperator(shape, matvec=apply, dtype=float)
        inverse = None
        if isinstance(self._system.pairs, ConvolutionSum):
            rough = self._system.pairs.rough_inverse
            inverse = linalg.LinearOperator(
                shape, lambda v: rough(_spread_out(v, free))[free], dtype=float
            )
        columns = []
        for side in sides.T:
            solved, _ = linalg.cg(operator, side, rtol=1e-11, maxiter=4000, M=inverse)
            columns.append(solved)
        return np.stack(columns, axis=1)


def _spread_out(values: FloatArray, free: NDArray[np.bool_]) -> FloatArray:
    whole = np.zeros(free.size)
    whole[free] = values.ravel()
    return whole
