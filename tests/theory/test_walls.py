"""The law that steps at a wall settle to: projection is off by order `eta^(1/2)`.

One step of a particle is a Gaussian kernel, with atoms on the walls for projection and
mirror images for reflection; what it leaves invariant is solved for on Gauss nodes.
"""

import math
from typing import NamedTuple

import numpy as np
import pytest
import torch
from scipy.interpolate import CubicSpline
from scipy.stats import norm

from coulomb._support.stats import fit_power
from coulomb.domains import Box
from coulomb.dynamics.langevin import ProjectedLangevin
from coulomb.energy import Hamiltonian
from coulomb.features import Particles
from coulomb.interactions import Riesz
from coulomb.theory import Interval, MeanField, Potential, equilibrium
from coulomb.theory.pair_sums import gauss_nodes
from coulomb.theory.system import evaluate

GRID = Interval(-1, 1, 200)


class StationaryLaw(NamedTuple):
    nodes: np.ndarray
    masses: np.ndarray  # at the nodes
    wall: tuple[float, float]  # atoms at the lower and the upper wall


def stationary_law(system, step_size, *, boundary, nodes):
    """Accurate to many digits where several nodes resolve `sqrt(2 eta / beta)`."""
    grid, beta = system.grid, system.inverse_temperature
    points, weights = nodes_of(grid, nodes)
    slope = felt_by(system).derivative()
    noise = math.sqrt(2 * step_size / beta)
    if boundary == "reflect":
        target = points - step_size * slope(points)
        kernel = images(points, target, noise, grid) * weights
        return StationaryLaw(points, stationary(kernel), (0.0, 0.0))
    places = np.concatenate([points, [grid.lower, grid.upper]])
    target = places - step_size * slope(places)
    inner = norm.pdf(points, target[:, None], noise) * weights
    below = norm.cdf(grid.lower, target, noise)
    above = norm.sf(grid.upper, target, noise)
    kernel = np.concatenate([inner, below[:, None], above[:, None]], axis=1)
    masses = stationary(kernel)
    return StationaryLaw(points, masses[:-2], (float(masses[-2]), float(masses[-1])))


def nodes_of(grid, count):
    points, weights = gauss_nodes(count)
    width = grid.upper - grid.lower
    return grid.lower + width * points, width * weights


def felt_by(system):
    return CubicSpline(system.grid.centres[:, 0], equilibrium(system).felt)


def images(points, target, noise, grid):
    """Fold the Gaussian at the walls: sum over mirror images of the arrival points."""
    width = grid.upper - grid.lower
    total = np.zeros((target.size, points.size))
    for shift in range(-1, 2):
        mirrored = 2 * grid.lower - points + 2 * shift * width
        total += norm.pdf(points + 2 * shift * width, target[:, None], noise)
        total += norm.pdf(mirrored, target[:, None], noise)
    return total


def stationary(kernel):
    kernel = kernel / kernel.sum(axis=1, keepdims=True)
    matrix = np.eye(len(kernel)) - kernel.T
    matrix[-1] = 1.0  # the masses sum to one
    side = np.zeros(len(kernel))
    side[-1] = 1.0
    return np.linalg.solve(matrix, side)


def gibbs_mean(system, observable, nodes):
    """The exact mean, and values at the nodes and on the walls."""
    grid = system.grid
    points, weights = nodes_of(grid, nodes)
    level = felt_by(system)(points)
    gibbs = weights * np.exp(-system.inverse_temperature * (level - level.min()))
    places = torch.from_numpy(np.concatenate([points, [grid.lower, grid.upper]]))
    values = evaluate(observable, places.unsqueeze(-1))
    return float(gibbs @ values[:-2] / gibbs.sum()), values


@pytest.mark.parametrize("strength", [0.0, 1.0])
def test_projection_is_off_by_a_root_of_the_step_and_reflection_by_the_step(strength):
    """Orders 1/2 and 1, from four steps; the first is still bending."""
    system = MeanField(
        Interval(-1, 1, 400),
        lambda w: 2 * w[..., 0] + w[..., 0] ** 2,
        Riesz(s=-1),
        strength,
        1.0,
    )
    nodes, steps = 300, [0.008, 0.004, 0.002, 0.001]
    expected, values = gibbs_mean(system, lambda w: w[..., 0], nodes)
    bias, atoms = {}, {}
    for boundary in ("project", "reflect"):
        laws = [
            stationary_law(system, eta, boundary=boundary, nodes=nodes) for eta in steps
        ]
        means = [np.concatenate([law.masses, law.wall]) @ values for law in laws]
        bias[boundary] = np.abs(np.array(means) - expected)
        atoms[boundary] = np.array([sum(law.wall) for law in laws])
    orders = {
        name: fit_power(np.array(steps), each, 0.01 * each).slope
        for name, each in bias.items()
    }
    assert orders["project"] == pytest.approx(0.5, abs=0.06)
    assert orders["reflect"] == pytest.approx(1.0, abs=0.05)
    assert (bias["reflect"] < 0.1 * bias["project"]).all()
    assert (np.diff(atoms["project"]) < 0).all()


def test_reflection_without_forces_is_exact_and_projection_leaves_atoms():
    system = MeanField(Interval(-1, 1, 50), lambda w: 0 * w[..., 0])
    reflected = stationary_law(system, 0.01, boundary="reflect", nodes=200)
    second = reflected.masses @ reflected.nodes**2
    assert second == pytest.approx(1 / 3, abs=1e-10)
    projected = stationary_law(system, 0.01, boundary="project", nodes=200)
    assert projected.wall[0] == pytest.approx(projected.wall[1], rel=1e-8)
    assert projected.wall[0] > 0.02
    assert projected.masses.sum() + sum(projected.wall) == pytest.approx(1)


def test_the_stationary_law_is_that_of_the_sampler(generator):
    """Long runs of the projected steps; five standard errors by batches."""
    system = MeanField(Interval(-1, 1, 100), lambda w: w[..., 0])
    eta, count = 0.05, 20000
    law = stationary_law(system, eta, boundary="project", nodes=200)
    expected = law.masses @ law.nodes + law.wall[1] - law.wall[0]
    sampler = ProjectedLangevin(
        step_size=eta, inverse_temperature=1.0, domain=Box(-1.0, 1.0)
    )
    start = torch.zeros(count, 1, dtype=torch.float64)
    state, _ = sampler.advance(
        sampler.init(Particles(start)),
        Hamiltonian(Potential(lambda w: w[..., 0])),
        200,
        generator=generator,
    )
    places = state.particles.positions
    error = 5 * float(places.std()) / math.sqrt(count)
    assert abs(float(places.mean()) - expected) < error
    at_wall = float((places.abs() == 1).double().mean())
    share = sum(law.wall)
    assert abs(at_wall - share) < 5 * math.sqrt(share * (1 - share) / count)


def test_gibbs_density_is_the_limit_of_small_steps():
    system = MeanField(GRID, lambda w: w[..., 0])
    law = stationary_law(system, 1e-3, boundary="reflect", nodes=400)
    rest = equilibrium(system).density * GRID.volumes
    assert law.masses @ law.nodes == pytest.approx(rest @ GRID.centres[:, 0], abs=1e-3)
