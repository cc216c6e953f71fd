"""Maps, forces and dynamics on a GPU; attention is in `attention`."""

import pytest
import torch

from coulomb.domains import Ball
from coulomb.dynamics.langevin import ProjectedLangevin
from coulomb.energy import Hamiltonian
from coulomb.features import Particles, feature_maps
from coulomb.interactions import ExactSum, FarFieldSum, Riesz
from coulomb.objectives import FourierAlignment, Sample

DEVICES = [
    "cpu",
    pytest.param(
        "cuda",
        marks=pytest.mark.skipif(
            not torch.cuda.is_available(), reason="there is no GPU here"
        ),
    ),
]


def drawn(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def features(device):
    x, w = drawn(7, 4).to(device), drawn(5, 4).to(device)
    phases = drawn(5).to(device)
    maps = [feature_maps.build(name) for name in feature_maps]
    return [feature(x, Particles(w, phases)) for feature in maps]


def repulsion(device):
    cloud = drawn(40, 6).to(device)
    return [*ExactSum()(Riesz(1.0), cloud), *FarFieldSum(0)(Riesz(1.0), cloud)]


def langevin(device):
    x, labels = drawn(50, 3).to(device), drawn(50, 1).to(device)
    energy = Hamiltonian(FourierAlignment(Sample(x, labels)), Riesz(0.0), 0.1)
    sampler = ProjectedLangevin(0.1, float("inf"), domain=Ball(3.0))
    state = sampler.init(Particles(drawn(8, 3).to(device), drawn(8).to(device)))
    draw = torch.Generator().manual_seed(0)
    state, _ = sampler.step(state, energy, generator=draw)
    return [state.particles.positions]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("path", [features, repulsion, langevin])
def test_the_same_on_every_device(path, device):
    for here, there in zip(path("cpu"), path(device), strict=True):
        assert there.device.type == device
        torch.testing.assert_close(there.cpu(), here, rtol=1e-4, atol=1e-5)
