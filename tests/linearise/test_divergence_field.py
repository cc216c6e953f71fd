"""The divergence written out against autograd of the definition."""

import pytest
import torch
from linearise_cases import particles_case, rows_case

from coulomb.features import Favor, Particles, SoftmaxFeatures
from coulomb.linearise.objectives import RowDivergence, Rows
from coulomb.objectives import AbstractObjective


def both_fields(rows, positions, tilt, feature_map=None):
    energy = RowDivergence(rows, feature_map or SoftmaxFeatures(), tilt)
    particles = Particles(positions)
    return energy.field(particles), AbstractObjective.field(energy, particles)


def make_rows(seed=0, **options):
    q, k, v, mask = rows_case(seed=seed, **options)
    return Rows(q, k, v, mask, mask)


@pytest.mark.parametrize("temperature", [0.5, 1.0])
@pytest.mark.parametrize("shared", [False, True])
def test_value_and_gradient_are_those_of_the_definition(temperature, shared):
    positions, tilt = particles_case()
    if shared:
        positions = positions[..., :5]
    rows = [make_rows(), make_rows(seed=3, n=9)]
    feature_map = SoftmaxFeatures(temperature=temperature)
    for ours, twin in zip(
        *both_fields(rows, positions, tilt, feature_map), strict=True
    ):
        torch.testing.assert_close(ours, twin, rtol=1e-9, atol=1e-11)


def test_fewer_queries_than_keys_in_any_memory_order():
    positions, tilt = particles_case()
    rows = make_rows()
    few = rows._replace(q=rows.q[:, :, 1:4], query_mask=rows.query_mask[:, 1:4])
    turned = few._replace(k=few.k.transpose(0, 1).contiguous().transpose(0, 1))
    fields = [*both_fields([few], positions, tilt)]
    fields += both_fields([turned], positions, tilt)
    for other in fields[1:]:
        for ours, twin in zip(fields[0], other, strict=True):
            torch.testing.assert_close(ours, twin, rtol=1e-9, atol=1e-11)


def test_bias_of_the_scores():
    positions, tilt = particles_case()
    source = torch.Generator().manual_seed(5)
    bias = torch.randn(1, 3, 7, 7, generator=source, dtype=torch.float64)
    rows = make_rows()._replace(bias=bias)
    for ours, twin in zip(*both_fields([rows], positions, tilt), strict=True):
        torch.testing.assert_close(ours, twin, rtol=1e-9, atol=1e-11)


def test_a_sequence_of_padding_does_not_count():
    positions, tilt = particles_case()
    rows = make_rows()
    mask = rows.key_mask.clone()
    mask[1] = False
    alone = Rows(*(x[:1] for x in rows[:5]))
    rows = rows._replace(key_mask=mask, query_mask=mask)
    ours, _ = both_fields([rows], positions, tilt)
    twin, _ = both_fields([alone], positions, tilt)
    for one, other in zip(ours, twin, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-11)


def test_far_particles_stay_finite_in_single_precision():
    rows = make_rows(dtype=torch.float32)
    positions, tilt = particles_case(dtype=torch.float32)
    ours, _ = both_fields([rows], 60 * positions, tilt)
    assert ours.potential.isfinite().all()
    assert ours.gradient.isfinite().all()


def test_other_maps_go_through_autograd():
    positions, tilt = particles_case()
    ours, twin = both_fields([make_rows()], positions, tilt, Favor())
    assert torch.equal(ours.gradient, twin.gradient)
