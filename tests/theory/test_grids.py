import math

import numpy as np
import pytest
import torch

from coulomb._support.errors import ParameterError
from coulomb.domains import Ball, Box
from coulomb.theory import Disc, Interval, RadialBall, Rectangle

GRIDS = [
    Interval(-1.0, 2.0, 30),
    Rectangle((0.0, -1.0), (2.0, 1.0), (8, 12)),
    Disc(1.5, 20),
    RadialBall(2.0, 25),
]
VOLUMES = [3.0, 4.0, math.pi * 1.5**2, 4 * math.pi / 3 * 8]


@pytest.mark.parametrize("grid, volume", list(zip(GRIDS, VOLUMES, strict=True)))
def test_volumes_add_up_to_the_domain(grid, volume):
    assert grid.volumes.sum() == pytest.approx(volume, rel=1e-12)
    assert grid.volumes.min() > 0
    assert grid.points.shape == (grid.size, grid.dim)
    assert grid.uniform() @ grid.volumes == pytest.approx(1, abs=1e-14)


@pytest.mark.parametrize("grid", GRIDS)
def test_faces_join_neighbours_once_and_connect_the_grid(grid):
    left, right, area, distance = grid.faces
    gap = np.linalg.norm(grid.centres[left] - grid.centres[right], axis=1)
    np.testing.assert_allclose(gap, distance, rtol=1e-12)
    assert (area > 0).all()
    pairs = set(zip(left.tolist(), right.tolist(), strict=True))
    assert len(pairs) == left.size
    reached = np.zeros(grid.size, dtype=bool)
    reached[0] = True
    for _ in range(grid.size):
        before = reached.sum()
        reached[left[reached[right]]] = True
        reached[right[reached[left]]] = True
        if reached.sum() == before:
            break
    assert reached.all()


@pytest.mark.parametrize("cells", [4, 10, 64])
def test_disc_areas_agree_with_counting_points(cells):
    grid = Disc(1.0, cells)
    fine = 50
    axis = (np.arange(cells * fine) + 0.5) / (cells * fine) * 2 - 1
    inside = axis[:, None] ** 2 + axis**2 <= 1
    counted = inside.reshape(cells, fine, cells, fine).mean(axis=(1, 3))
    share = grid.volumes / grid.spacing[0] ** 2
    # A straight edge through a cell is counted to about 1/fine^1.5.
    np.testing.assert_allclose(share, counted[grid.inside], atol=0.01)


def test_points_of_a_disc_lie_in_it():
    grid = Disc(1.0, 16)
    assert grid.domain.contains(torch.from_numpy(grid.points)).all()


def test_domains_are_those_of_the_particles():
    assert Interval(0, 2, 10).domain == Box(0.0, 2.0)
    assert Disc(3.0, 8).domain == Ball(3.0)
    assert Rectangle().domain == Box(-1.0, 1.0)
    with pytest.raises(ParameterError, match="same sides"):
        _ = Rectangle((0.0, 0.0), (1.0, 2.0), (4, 4)).domain


@pytest.mark.parametrize(
    "make",
    [
        lambda: Interval(1.0, 0.0, 10),
        lambda: Interval(0.0, 1.0, 2),
        lambda: Disc(1.0, 7),
        lambda: Disc(-1.0, 8),
        lambda: Interval().normalise(np.ones(3)),
        lambda: Interval().normalise(np.full(200, -1.0)),
        lambda: Disc().walls,
    ],
)
def test_mistakes_are_named(make):
    with pytest.raises(ParameterError, match="must"):
        make()


def test_walls_of_a_rectangle():
    grid = Rectangle((0.0, 0.0), (1.0, 1.0), (4, 5))
    cell, inner, _ = grid.walls
    assert cell.size == 2 * 4 + 2 * 5
    assert (np.abs(grid.centres[cell] - grid.centres[inner]).sum(axis=1) > 0).all()
