"""Figures are drawn whole, from the data they are given."""

import numpy as np
import pytest
import torch

from coulomb.interactions import Riesz
from coulomb.report.theory import draw_deviations, draw_meanfield
from coulomb.theory import (
    Disc,
    GapSettings,
    ImportanceSettings,
    Interval,
    MeanField,
    deviation_curve,
    equilibrium,
    evolve,
    free_energy_curve,
    mean_field_gap,
    parse_expression,
)

PNG = b"\x89PNG"


@pytest.mark.parametrize("grid", [Interval(-1, 1, 40), Disc(1.0, 12)], ids=["1d", "2d"])
def test_mean_field(tmp_path, generator, grid):
    system = MeanField(grid, parse_expression("x**2", grid.dim), Riesz(0.0), 1.0, 2.0)
    start = grid.normalise(np.exp(-grid.points[:, 0]))
    gap = mean_field_gap(
        system,
        start,
        0.02,
        [4, 8, 16],
        parse_expression("cos(x)", grid.dim),
        settings=GapSettings(step_size=5e-3, replicas=2, clip=50.0),
        generator=generator,
    )
    path = tmp_path / "figures" / "meanfield.png"
    flow = evolve(system, start, [0.01, 0.02])
    draw_meanfield(path, grid, equilibrium(system), flow, gap)
    assert path.read_bytes().startswith(PNG)
    assert [each.name for each in path.parent.iterdir()] == ["meanfield.png"]


def test_deviations(tmp_path):
    system = MeanField(
        Interval(-3, 3, 60), parse_expression("x**2", 1), Riesz(0.0), 0.5, 1.0
    )
    settings = ImportanceSettings(200)
    random = torch.Generator().manual_seed(0)
    curve = deviation_curve(
        system,
        parse_expression("cos(x)", 1),
        0.25,
        [4, 8, 16],
        settings=settings,
        generator=random,
    )
    energy = free_energy_curve(system, [4, 8, 16], settings=settings, generator=random)
    draw_deviations(tmp_path / "rare.png", curve, energy)
    assert (tmp_path / "rare.png").read_bytes().startswith(PNG)
