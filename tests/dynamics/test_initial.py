import math

import pytest
import torch

from coulomb._support.errors import ParameterError
from coulomb.dynamics.initial import (
    Gaussian,
    Orthogonal,
    Sparse,
    draw_phases,
    starting_laws,
)


@pytest.mark.parametrize("name", list(starting_laws))
@pytest.mark.parametrize("dim", [1, 3])
def test_every_law_is_repeatable_and_centred(name, dim):
    law = starting_laws.build(name)
    draws = [
        law.draw(20_001, dim, generator=torch.Generator().manual_seed(seed))
        for seed in (0, 0, 1)
    ]
    assert torch.equal(draws[0], draws[1])
    assert not torch.equal(draws[0], draws[2])
    assert draws[0].shape == (20_001, dim)
    assert draws[0].dtype == torch.float64
    # Coordinates have a standard deviation of at most one.
    assert float(draws[0].mean(dim=0).abs().max()) < 4 / math.sqrt(20_001)


@pytest.mark.parametrize("law", [Gaussian(0.7), Orthogonal(0.7), Sparse(9, 0.7)])
def test_variance_of_the_coordinates(law, generator):
    drawn = law.draw(30_000, 4, generator=generator)
    spread = drawn.square().mean()
    standard_error = float(drawn.square().std()) / math.sqrt(drawn.numel())
    assert abs(float(spread) - 0.7) < 4 * standard_error


def test_orthogonal_blocks(generator):
    drawn = Orthogonal().draw(10, 4, generator=generator)
    for block in (drawn[:4], drawn[4:8], drawn[8:]):
        gram = block @ block.T
        assert float((gram - gram.diagonal().diag()).abs().max()) < 1e-12


def test_sparse_particles_choose_coordinates_uniformly(generator):
    drawn = Sparse(coordinates=2).draw(30_000, 5, generator=generator) != 0
    assert (drawn.sum(dim=1) == 2).all()
    share = drawn.double().mean(dim=0)
    assert float((share - 0.4).abs().max()) < 4 * math.sqrt(0.24 / 30_000)


def test_phases(generator):
    phases = draw_phases(10_000, generator=generator)
    assert phases.min() >= 0
    assert phases.max() < 2 * math.pi
    assert abs(float(phases.cos().mean())) < 4 / math.sqrt(20_000)


def test_messages():
    with pytest.raises(ParameterError, match="`variance` must be positive; got 0"):
        Gaussian(0)
    with pytest.raises(ParameterError, match="`coordinates` must be at least 1; got 0"):
        Sparse(0)
