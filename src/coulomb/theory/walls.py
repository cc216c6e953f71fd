"""What a finite step does at the wall: projection against reflection, without noise.

The law of one particle in the equilibrium field is followed exactly: the Euler step is
a Gaussian kernel, its stationary law an eigenvector. Projection leaves atoms on the
walls.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from scipy.interpolate import CubicSpline
from scipy.stats import norm

from coulomb._support.checks import check_real
from coulomb._support.errors import ParameterError
from coulomb._support.stats import Fit, fit_power
from coulomb.theory.equilibrium import equilibrium
from coulomb.theory.grids import FloatArray, Interval
from coulomb.theory.pair_sums import gauss_nodes
from coulomb.theory.system import Function, MeanField


class StationaryLaw(NamedTuple):
    """The law that Euler steps of a finite length settle to."""

    nodes: FloatArray
    masses: FloatArray  # at the nodes
    wall: tuple[float, float]  # atoms at the lower and the upper wall


class WallBias(NamedTuple):
    """The bias of the stationary law as the step goes to zero."""

    step_sizes: FloatArray
    projected: FloatArray  # int f dpi_eta - int f dGibbs
    reflected: FloatArray
    atoms: FloatArray  # mass of the projected law on the walls
    projected_order: Fit
    reflected_order: Fit


def stationary_law(
    system: MeanField, step_size: float, *, boundary: str, nodes: int = 400
) -> StationaryLaw:
    """Find the law that projected or reflected Euler steps leave invariant.

    Parameters
    ----------
    system
        A system on an interval at finite temperature; particles feel its equilibrium.
    step_size
        `eta`.
    boundary
        "project" or "reflect".
    nodes
        Of the Gauss rule; several are needed per `sqrt(2 eta / beta)`.

    Returns
    -------
    StationaryLaw
        Accurate to many digits where the nodes resolve a step.
    """
    check_real("step_size", step_size, above=0)
    grid, beta = system.grid, system.inverse_temperature
    if not isinstance(grid, Interval) or math.isinf(beta):
        raise ParameterError(
            "`system` must be on an Interval at finite temperature; got "
            f"{grid!r} and inverse temperature {beta:g}."
        )
    points, weights = _gauss_nodes(grid, nodes)
    slope = _field(system).derivative()
    noise = math.sqrt(2 * step_size / beta)
    if boundary == "reflect":
        target = points - step_size * slope(points)
        kernel = _images(points, target, noise, grid) * weights
        return StationaryLaw(points, _stationary(kernel), (0.0, 0.0))
    if boundary != "project":
        raise ParameterError(
            f"`boundary` must be 'project' or 'reflect'; got {boundary!r}."
        )
    places = np.concatenate([points, [grid.lower, grid.upper]])
    target = places - step_size * slope(places)
    inner = norm.pdf(points, target[:, None], noise) * weights
    below = norm.cdf(grid.lower, target, noise)
    above = norm.sf(grid.upper, target, noise)
    kernel = np.concatenate([inner, below[:, None], above[:, None]], axis=1)
    masses = _stationary(kernel)
    return StationaryLaw(points, masses[:-2], (float(masses[-2]), float(masses[-1])))


def _gauss_nodes(grid: Interval, count: int) -> tuple[FloatArray, FloatArray]:
    points, weights = gauss_nodes(count)
    width = grid.upper - grid.lower
    return grid.lower + width * points, width * weights


def _field(system: MeanField) -> CubicSpline:
    assert isinstance(system.grid, Interval)
    rest = equilibrium(system)
    return CubicSpline(system.grid.centres[:, 0], rest.felt)


def _images(
    points: FloatArray, target: FloatArray, noise: float, grid: Interval
) -> FloatArray:
    """Fold the Gaussian at the walls: sum over mirror images of the arrival points."""
    width = grid.upper - grid.lower
    total = np.zeros((target.size, points.size))
    for shift in range(-1, 2):
        mirrored = 2 * grid.lower - points + 2 * shift * width
        total += norm.pdf(points + 2 * shift * width, target[:, None], noise)
        total += norm.pdf(mirrored, target[:, None], noise)
    return total


def _stationary(kernel: FloatArray) -> FloatArray:
    size = kernel.shape[0]
    kernel = kernel / kernel.sum(axis=1, keepdims=True)
    matrix = np.eye(size) - kernel.T
    matrix[-1] = 1.0  # the masses sum to one
    side = np.zeros(size)
    side[-1] = 1.0
    return np.asarray(np.linalg.solve(matrix, side))


def wall_bias(
    system: MeanField,
    observable: Function,
    step_sizes: Sequence[float],
    *,
    nodes: int = 400,
) -> WallBias:
    """Measure the bias of projected and of reflected steps against the Gibbs law.

    Projection is off by order `eta^(1/2)`, reflection by order `eta`.

    Parameters
    ----------
    system
        A system on an interval at finite temperature.
    observable
        `f`, a function of positions.
    step_sizes
        Values of `eta`, at least three.
    nodes
        Of the Gauss rule.

    Returns
    -------
    WallBias
        Biases and their fitted orders.
    """
    grid, beta = system.grid, system.inverse_temperature
    laws = [
        [stationary_law(system, eta, boundary=kind, nodes=nodes) for eta in step_sizes]
        for kind in ("project", "reflect")
    ]
    assert isinstance(grid, Interval)  # stationary_law has refused the others
    points, weights = _gauss_nodes(grid, nodes)
    level = _field(system)(points)
    gibbs = weights * np.exp(-beta * (level - level.min()))
    gibbs /= gibbs.sum()
    places = torch.from_numpy(np.concatenate([points, [grid.lower, grid.upper]]))
    with torch.no_grad():
        values = observable(places.unsqueeze(-1)).double().numpy()
    expected = float(gibbs @ values[:-2])
    biases = [
        np.array([np.concatenate([law.masses, law.wall]) @ values for law in row])
        - expected
        for row in laws
    ]
    etas = np.array(step_sizes, dtype=np.float64)
    orders = [fit_power(etas, np.abs(b), 0.01 * np.abs(b)) for b in biases]
    atoms = np.array([sum(law.wall) for law in laws[0]])
    return WallBias(etas, biases[0], biases[1], atoms, *orders)
