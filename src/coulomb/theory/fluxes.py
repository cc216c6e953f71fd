"""Scharfetter-Gummel fluxes between cells, and the implicit step they make.

The flux from cell i to cell j is `(a/(d beta)) (B(beta D) rho_i - B(-beta D) rho_j)`,
`B(x) = x / (e^x - 1)` and `D = U_j - U_i`. It vanishes exactly for Gibbs densities, and
becomes the upwind flux as `beta -> inf`. For fixed `U` the implicit step solves an
M-matrix: its density is positive and its mass is that of the step before, whatever `U`.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from scipy import sparse
from scipy.sparse import linalg

from coulomb.theory.grids import AbstractGrid, FloatArray
from coulomb.theory.system import MeanField


def bernoulli(x: FloatArray) -> FloatArray:
    """Evaluate `B(x) = x / (e^x - 1)`.

    Examples
    --------
    >>> bernoulli(np.array([0.0]))
    array([1.])
    """
    small = np.abs(x) < 1e-5
    safe = np.where(small, 1.0, x)
    steep = np.expm1(np.minimum(safe, 700.0))  # beyond, B is zero in any case
    return np.where(small, 1 - x / 2 + x * x / 12, safe / steep)


def rate_and_slope(
    difference: FloatArray, beta: float
) -> tuple[FloatArray, FloatArray]:
    """Evaluate `b(D) = B(beta D) / beta` and its derivative; upwind at `beta = inf`."""
    if math.isinf(beta):
        return np.maximum(-difference, 0.0), np.where(
            difference < 0, -1.0, np.where(difference > 0, 0.0, -0.5)
        )
    x = beta * difference
    value = bernoulli(x)
    small = np.abs(x) < 1e-3
    safe = np.where(small, 1.0, x)
    slope = np.where(small, -0.5 + x / 6, value * (1 - safe - value) / safe)
    return value / beta, slope


class Step(NamedTuple):
    """One implicit step."""

    density: FloatArray
    felt: FloatArray  # the potential that moved it, the guess for the next step
    converged: bool


class _Linear:
    """The implicit step for a fixed potential, and its derivative in the potential."""

    def __init__(
        self,
        grid: AbstractGrid,
        before: FloatArray,
        felt: FloatArray,
        dt: float,
        beta: float,
    ) -> None:
        left, right, area, distance = grid.faces
        self._faces = left, right
        difference = felt[right] - felt[left]
        out, out_slope = rate_and_slope(difference, beta)
        back, back_slope = rate_and_slope(-difference, beta)
        weight = area / distance
        matrix = _transport_matrix(grid, weight * out, weight * back, dt)
        self._grid, self._matrix, self._factors = grid, matrix, _factorise(matrix)
        masses = before * grid.volumes
        density = np.maximum(self._factors.solve(masses / dt), 0.0)
        # The exact solution keeps the mass; what is corrected here is rounding.
        self.density = density * (masses.sum() / (density @ grid.volumes))
        self._mobility = weight * (
            out_slope * self.density[left] + back_slope * self.density[right]
        )

    def response(self, change: FloatArray) -> FloatArray:
        """Tell how the density changes with the potential."""
        left, right = self._faces
        flux = self._mobility * (change[right] - change[left])
        size = change.size
        net = np.bincount(left, flux, size) - np.bincount(right, flux, size)
        return np.asarray(-self._factors.solve(net))

    def stiff_solver(self, local: float) -> Callable[[FloatArray], FloatArray]:
        """Invert `1 + local * response` approximately, where `local` stands for K.

        With a local interaction the Newton matrix is `(M + local L)^-1 M` inverted, `L`
        the diffusion that the interaction drives; it tames the fast oscillations.
        """
        coupling = -local * self._mobility
        diffusion = _transport_matrix(self._grid, coupling, coupling, math.inf)
        volumes = self._grid.volumes
        scaled = diffusion @ sparse.diags(volumes)
        factors = _factorise((self._matrix + scaled).tocsc())

        def solve(residual: FloatArray) -> FloatArray:
            return np.asarray(factors.solve(self._matrix @ residual.ravel()))

        return solve


def _factorise(matrix: sparse.csc_matrix) -> linalg.SuperLU:
    # Diagonally dominant by columns: no pivoting is needed.
    return linalg.splu(
        matrix,
        permc_spec="MMD_AT_PLUS_A",
        diag_pivot_thresh=0.0,
        options={"SymmetricMode": True},
    )


def _transport_matrix(
    grid: AbstractGrid, out: FloatArray, back: FloatArray, dt: float
) -> sparse.csc_matrix:
    left, right = grid.faces.left, grid.faces.right
    cells = np.arange(grid.size)
    rows = np.concatenate([cells, left, right, left, right])
    columns = np.concatenate([cells, left, right, right, left])
    values = np.concatenate([grid.volumes / dt, out, back, -back, -out])
    return sparse.csc_matrix((values, (rows, columns)), shape=(grid.size,) * 2)


def implicit_step(
    system: MeanField,
    density: FloatArray,
    dt: float,
    *,
    guess: FloatArray | None = None,
    tolerance: float = 1e-8,
    max_iterations: int = 12,
) -> Step:
    """Make a backward Euler step, implicit in the interaction too.

    The unknown is the potential `U`: with `S(U)` the density after the linear step,
    Newton solves `U = V + lambda g * S(U)`, the linear systems by GMRES. For
    interactions that are positive on differences of densities the free energy cannot
    rise, whatever `dt`. [CPM eq:main-mckean-vlasov].
    """
    grid, beta = system.grid, system.inverse_temperature
    if not system.strength:
        linear = _Linear(grid, density, system.external, dt, beta)
        return Step(linear.density, system.external, True)
    felt = system.felt(density) if guess is None else guess
    linear = _Linear(grid, density, felt, dt, beta)
    residual = system.felt(linear.density) - felt
    for _ in range(max_iterations):
        change = _newton_change(system, linear, residual)
        answer = linear.response(change)
        moved = float(np.abs(answer) @ grid.volumes)
        if moved <= tolerance:
            return Step(linear.density, felt, True)
        corrected = linear.density + answer
        # What the linear answer leaves out is smaller by beta times the change.
        if moved * beta * float(np.ptp(change)) <= tolerance and corrected.min() >= 0:
            return Step(corrected, felt + change, True)
        size, share = float(np.linalg.norm(residual)), 1.0
        # Where a front moves through cells, whole Newton steps can cycle.
        while True:
            trial = felt + share * change
            after = _Linear(grid, density, trial, dt, beta)
            residual = system.felt(after.density) - trial
            if np.linalg.norm(residual) <= (1 - 0.1 * share) * size or share < 0.1:
                break
            share /= 2
        moved = float(np.abs(after.density - linear.density) @ grid.volumes)
        felt, linear = trial, after
        if moved <= share * tolerance:
            return Step(linear.density, felt, True)
    return Step(linear.density, felt, False)


def _newton_change(
    system: MeanField, linear: _Linear, residual: FloatArray
) -> FloatArray:
    def apply(change: FloatArray) -> FloatArray:
        change = change.ravel()
        return change - system.pair_potential(linear.response(change))

    shape = (residual.size,) * 2
    operator = linalg.LinearOperator(shape, matvec=apply, dtype=float)
    local = system.strength * system.pairs.local
    largest = float((linear.density * system.grid.volumes).max())
    stiff = None
    if system.inverse_temperature * local * largest > 1:  # diffusion does not tame K
        stiff = linalg.LinearOperator(shape, linear.stiff_solver(local), dtype=float)
    change, _ = linalg.gmres(
        operator, residual, rtol=1e-4, restart=40, maxiter=2, M=stiff
    )
    return np.asarray(change)
