"""Particles that look at windows of positions."""

import math

import pytest
import torch

from coulomb._support.errors import ParameterError
from coulomb.attention.align.starts import window_particles
from coulomb.features import Particles, as_feature_map


def test_windows_by_hand():
    table = torch.randn(9, 4, generator=torch.Generator().manual_seed(0))
    found = window_particles(table, n_heads=2, n_particles=4, span=6, norm=2.0)
    for head in range(2):
        part = table[:, 2 * head : 2 * head + 2]
        for k in range(4):
            total = torch.zeros(2)
            for t in range(9):
                # Centres are 2 positions apart, which is more than the width of 1.5.
                weight = math.exp(-((t - 2 * k) ** 2) / (2 * 2.0**2))
                total += weight * part[t] / part[t].norm()
            torch.testing.assert_close(found[head, k], 2 * total / total.norm())


@pytest.mark.parametrize("count", [1, 3, 40])
def test_windows_have_the_norm_and_stay_in_the_table(count):
    table = torch.randn(5, 6, generator=torch.Generator().manual_seed(0))
    found = window_particles(table, n_heads=3, n_particles=count, span=100, norm=1.5)
    assert found.shape == (3, count, 2)
    torch.testing.assert_close(found.norm(dim=-1), torch.full((3, count), 1.5))
    assert (
        window_particles(0 * table, n_heads=3, n_particles=count, span=4)
        .isfinite()
        .all()
    )


def test_the_kernel_of_windows_is_local():
    """With orthogonal embeddings it falls with the distance of two positions."""
    table = 8 * torch.eye(24)
    particles = Particles(
        window_particles(table, n_heads=1, n_particles=24, span=23, norm=3.0)
    )
    features = as_feature_map("softmaxfeat")(table.unsqueeze(0), particles)[0]
    kernel = features @ features.T
    near = kernel[8, 8:16]
    assert (near.diff() < 0).all()
    assert near[0] > 5 * near[6]


def test_a_bad_shape_is_named():
    with pytest.raises(ParameterError, match="`positions` must have shape"):
        window_particles(torch.zeros(4, 5), n_heads=2, n_particles=3, span=4)
