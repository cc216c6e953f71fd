"""What every domain must do."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from coulomb._support.errors import ParameterError
from coulomb.domains import Ball, Box, Masked, Space, Sphere, domains

MEMBERS = [Ball(1.3), Box(-0.5, 2.0), Sphere(0.8), Space(), Box(-math.inf, 1.0)]


def test_every_registered_domain_is_tested():
    built = {type(domains.build(name)) for name in domains}
    assert built <= {type(member) for member in MEMBERS}


@pytest.mark.parametrize("domain", MEMBERS, ids=repr)
@given(seed=st.integers(0, 1000), scale=st.floats(0.01, 100), dim=st.integers(1, 4))
def test_bringing_back(domain, seed, scale, dim):
    generator = torch.Generator().manual_seed(seed)
    points = scale * torch.randn(50, dim, generator=generator, dtype=torch.float64)
    for bring_back in (domain.project, domain.reflect):
        inside = bring_back(points)
        assert domain.contains(inside).all()
        assert torch.equal(bring_back(inside), inside)
        assert not inside.isnan().any()


@pytest.mark.parametrize("domain", [Ball(1.3), Box(-0.5, 2.0), Space()], ids=repr)
def test_points_inside_do_not_move(domain, generator):
    points = domain.project(torch.randn(100, 3, generator=generator))
    assert torch.equal(domain.reflect(points), points)
    assert torch.equal(domain.project(points), points)


@pytest.mark.parametrize("domain", MEMBERS, ids=repr)
def test_projection_is_the_nearest_point(domain, generator):
    points = 3 * torch.randn(30, 1, 2, generator=generator, dtype=torch.float64)
    others = domain.project(
        3 * torch.randn(1, 4000, 2, generator=generator, dtype=torch.float64)
    )
    nearest = (points - domain.project(points)).norm(dim=-1)
    assert (nearest <= (points - others).norm(dim=-1) + 1e-12).all()


@pytest.mark.parametrize("domain", [Ball(1.3), Box(-0.5, 2.0), Space()], ids=repr)
def test_projection_on_convex_domains_does_not_expand(domain, generator):
    left, right = 3 * torch.randn(2, 200, 3, generator=generator, dtype=torch.float64)
    before = (left - right).norm(dim=-1)
    after = (domain.project(left) - domain.project(right)).norm(dim=-1)
    assert (after <= before + 1e-12).all()


def test_reflection_mirrors_at_the_wall():
    point = torch.tensor([[1.2, 0.0]], dtype=torch.float64)
    torch.testing.assert_close(Ball(1.0).reflect(point), point * (0.8 / 1.2))
    torch.testing.assert_close(
        Box(0.0, 1.0).reflect(torch.tensor([[-0.25, 2.5]])), torch.tensor([[0.25, 0.5]])
    )


def test_masked_particles_keep_their_coordinates(generator):
    mask = torch.tensor([[1.0, 0.0, 1.0], [0.0, 1.0, 0.0]])
    domain = Masked(Ball(1.0), mask)
    inside = domain.project(torch.randn(2, 3, generator=generator) * 5)
    assert domain.contains(inside).all()
    assert ((inside == 0) | (mask == 1)).all()


def test_messages():
    with pytest.raises(ParameterError, match="`radius` must be positive; got -1"):
        Ball(-1)
    with pytest.raises(ParameterError, match="`upper` must be greater than `lower`"):
        Box(1, 0)
    with pytest.raises(ParameterError, match="did you mean 'ball'"):
        domains.build("bal")


def test_points_of_one_direction_land_on_one_point(generator):
    """To the bit, where the direction is exact."""
    outside = 2 + torch.rand(200, generator=generator)
    points = torch.stack([outside, torch.zeros(200)], dim=1)
    assert set(Ball(1.3).project(points)[:, 0].tolist()) == {
        float(torch.tensor(1.3))
    }  # fmt: skip
