"""The McKean-Vlasov flow: density in time, with mass, sign and free energy kept.

The flux from cell i to cell j is Scharfetter and Gummel's,
`(a/(d beta)) (B(beta D) rho_i - B(-beta D) rho_j)` with `B(x) = x / (e^x - 1)` and
`D = U_j - U_i`. It vanishes exactly for Gibbs densities, and becomes the upwind flux as
`beta -> inf`. For fixed `U` the implicit step solves an M-matrix: its density is
positive and its mass is that of the step before, whatever `U`. Every accepted step
does not raise the free energy (beyond the rounding of its sum); a step that would is
refused and shortened.
"""

import enum
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np
from scipy import sparse
from scipy.sparse import linalg

from coulomb._support.checks import check_count, check_real
from coulomb._support.errors import DivergedError, ParameterError
from coulomb.theory.grids import AbstractGrid, FloatArray
from coulomb.theory.system import MeanField

Watch = Callable[[float, FloatArray], None]


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


class FlowEnd(enum.Enum):
    """Why a flow ended."""

    TIME_REACHED = "the last time was reached"
    STATIONARY = "the density stopped moving"
    STEP_LIMIT = "the step limit was reached"


@dataclass(frozen=True)
class FlowSettings:
    """How time is stepped.

    Parameters
    ----------
    tolerance
        Largest difference, in mass, between a step and its two halves.
    first_step
        Length of the first try.
    max_steps
        Accepted steps before giving up.
    refuse_rises
        Whether a step that raises the free energy beyond rounding is shortened; without
        it the energies tell whether the scheme dissipates by itself.
    """

    tolerance: float = 1e-3
    first_step: float = 1e-4
    max_steps: int = 10_000
    refuse_rises: bool = True

    def __post_init__(self) -> None:
        check_real("tolerance", self.tolerance, above=0)
        check_real("first_step", self.first_step, above=0)
        check_count("max_steps", self.max_steps)


class Flow(NamedTuple):
    """A density in time."""

    times: FloatArray  # (n_times,): those asked for and reached
    densities: FloatArray  # (n_times, n_cells)
    step_times: FloatArray  # (n_steps + 1,): every accepted step
    free_energies: FloatArray  # (n_steps + 1,)
    rejected: int
    end: FlowEnd

    @property
    def last(self) -> FloatArray:
        """The last density."""
        return np.asarray(self.densities[-1])


class _Recorder:
    """Checks and keeps the free energy of every accepted step."""

    def __init__(self, system: MeanField, density: FloatArray, refuse: bool) -> None:
        self._system, self._refuse = system, refuse
        self.times, self.energies, self.rejected = [0.0], [self._energy(density)], 0

    def _energy(self, density: FloatArray) -> float:
        parts = self._system.free_energy(density)
        self._scale = sum(abs(part) for part in parts[1:]) + 1e-300
        return parts.total

    def accepts(self, time: float, density: FloatArray) -> bool:
        energy = self._energy(density)
        rounding = 16 * np.finfo(np.float64).eps * self._scale
        if self._refuse:
            if not energy <= self.energies[-1] + rounding:
                return False
            energy = min(energy, self.energies[-1])
        self.times.append(time)
        self.energies.append(energy)
        return True

    def reject(self, dt: float, time: float) -> None:
        self.rejected += 1
        if dt < 1e-14 * max(time, 1.0):
            raise DivergedError(
                f"The flow stopped at time {time:g}: no step lowers the free energy."
            )

    def flow(self, times: FloatArray, densities: FloatArray, end: FlowEnd) -> Flow:
        steps, energies = np.array(self.times), np.array(self.energies)
        return Flow(times, densities, steps, energies, self.rejected, end)


def evolve(
    system: MeanField,
    density: FloatArray,
    times: Sequence[float] | FloatArray,
    *,
    settings: FlowSettings | None = None,
    watch: Watch | None = None,
) -> Flow:
    """Follow `d rho/dt = div(rho grad U) + lap rho / beta` without flux at the wall.

    Each step is compared with its two halves; their extrapolation, of second order in
    time, is taken if it is non-negative and does not raise the free energy, else the
    halves are. [CPM eq:main-mckean-vlasov].

    Parameters
    ----------
    system
        The system; any temperature.
    density
        At time zero; it is scaled to mass one.
    times
        Increasing times at which the density is kept.
    settings
        How time is stepped.
    watch
        Called with time and density after each step.

    Returns
    -------
    Flow
        The densities and the free energy of every step.

    Examples
    --------
    >>> from coulomb.theory.grids import Interval
    >>> system = MeanField(Interval(-1, 1, 64), lambda w: 2 * w[..., 0] ** 2)
    >>> flow = evolve(system, system.grid.uniform(), [0.1, 1.0])
    >>> bool((np.diff(flow.free_energies) <= 0).all()), flow.end.name
    (True, 'TIME_REACHED')
    """
    settings = settings or FlowSettings()
    marks = np.asarray(times, dtype=np.float64)
    if marks.ndim != 1 or not marks.size or (np.diff(marks, prepend=0) < 0).any():
        raise ParameterError("`times` must be increasing and at least 0.")
    rho = system.grid.normalise(density)
    recorder, kept = _Recorder(system, rho, settings.refuse_rises), []
    time, dt, end = 0.0, settings.first_step, FlowEnd.TIME_REACHED
    felt = system.felt(rho)
    drift = np.zeros_like(felt)  # of U in time, to guess the next one
    for mark in marks:
        while time < mark and end is FlowEnd.TIME_REACHED:
            left = float(mark) - time
            length = left if dt >= left else min(dt, left / 2)  # no sliver is left over
            guess = felt + length * drift
            candidates, error = _try_step(
                system, rho, length, settings.tolerance, felt, guess
            )
            if error > settings.tolerance:
                recorder.reject(length, time)
                dt = length * max(0.1, 0.9 * math.sqrt(settings.tolerance / error))
                dt = min(dt, length / 2)
                continue
            after = float(mark) if length == left else time + length
            for candidate in candidates:
                if candidate.min() >= 0 and recorder.accepts(after, candidate):
                    break
            else:
                recorder.reject(length, time)
                dt = length / 2
                continue
            moved = system.felt(candidate)
            rho, time, drift, felt = candidate, after, (moved - felt) / length, moved
            ideal = 0.9 * math.sqrt(settings.tolerance / max(error, 1e-300))
            proposal = length * min(max(ideal, 0.2), 3.0)
            cut_short = length < dt and ideal > 1  # by a mark, not by the error
            dt = max(dt, proposal) if cut_short else proposal
            if watch is not None:
                watch(time, rho)
            if len(recorder.times) > settings.max_steps:
                end = FlowEnd.STEP_LIMIT
        if end is FlowEnd.TIME_REACHED:
            kept.append(rho)
    return recorder.flow(marks[: len(kept)], np.array(kept or [rho]), end)


def _try_step(
    system: MeanField,
    rho: FloatArray,
    dt: float,
    tolerance: float,
    now: FloatArray,
    guess: FloatArray,
) -> tuple[list[FloatArray], float]:
    """Make a step and its two halves; give what may be taken, best first, and an error.

    The error is infinite if one of them does not converge.
    """
    step = partial(implicit_step, system, tolerance=1e-3 * tolerance)
    whole = step(rho, dt, guess=guess)
    if not whole.converged:
        return [], math.inf
    first = step(rho, dt / 2, guess=0.5 * (now + whole.felt))
    if not first.converged:
        return [], math.inf
    second = step(first.density, dt / 2, guess=whole.felt)
    if not second.converged:
        return [], math.inf
    error = float(np.abs(second.density - whole.density) @ system.grid.volumes)
    return [2 * second.density - whole.density, second.density], error


def relax(
    system: MeanField,
    density: FloatArray | None = None,
    *,
    tolerance: float = 1e-8,
    settings: FlowSettings | None = None,
    watch: Watch | None = None,
) -> Flow:
    """Follow the flow to where it stops, in growing backward Euler steps.

    Times on the way are those of a first-order method with long steps; use `evolve`
    where they matter. The free energy falls at every step all the same.

    Parameters
    ----------
    system
        The system; any temperature.
    density
        Where to start; uniform if None.
    tolerance
        Stop when a step of length one or more moves less mass than this.
    settings
        The first step and the step limit; its tolerance is not used.
    watch
        Called with time and density after each step.

    Returns
    -------
    Flow
        With one density, the last.
    """
    settings = settings or FlowSettings(first_step=1e-2)
    rho = system.grid.uniform() if density is None else system.grid.normalise(density)
    recorder = _Recorder(system, rho, settings.refuse_rises)
    time, dt, end = 0.0, settings.first_step, FlowEnd.STEP_LIMIT
    growth = 3.0
    felt = system.felt(rho)
    while len(recorder.times) <= settings.max_steps:
        step = implicit_step(system, rho, dt, guess=felt, tolerance=0.1 * tolerance)
        if not step.converged or not recorder.accepts(time + dt, step.density):
            recorder.reject(dt, time)
            dt, growth, felt = dt / 4, 1.2, system.felt(rho)
            continue
        moved = float(np.abs(step.density - rho) @ system.grid.volumes)
        rho, felt, time = step.density, step.felt, time + dt
        if watch is not None:
            watch(time, rho)
        if moved <= tolerance * min(dt, 1.0):
            end = FlowEnd.STATIONARY
            break
        dt, growth = min(growth * dt, 1e4), min(1.2 * growth, 3.0)
    return recorder.flow(np.array([time]), rho[None], end)
