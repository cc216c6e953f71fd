"""Figures are drawn whole, from the data they are given."""

import numpy as np
import pytest
import torch

from coulomb._support.archive import plain
from coulomb.interactions import Riesz
from coulomb.report.print import print_side_by_side
from coulomb.report.sections.theory import theory_charts
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
    found = {"points": grid.points, "flow": flow, "gap": gap}
    found["equilibrium"] = equilibrium(system)
    print_side_by_side(theory_charts("meanfield", "a", plain(found)), path)
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
    found = plain({"deviations": curve, "free_energy": energy})
    print_side_by_side(theory_charts("deviations", "a", found), tmp_path / "rare.png")
    assert (tmp_path / "rare.png").read_bytes().startswith(PNG)
