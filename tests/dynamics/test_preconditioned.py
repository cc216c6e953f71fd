"""Adam-preconditioned steps: torch's optimiser, the flow's limit, saved runs."""

import math

import pytest
import torch

from coulomb._support.errors import ParameterError
from coulomb.domains import Ball
from coulomb.dynamics import loop
from coulomb.dynamics.langevin import AdamLangevin, ProjectedLangevin
from coulomb.dynamics.loop import RunSettings, init_run, load_run, save_run
from coulomb.energy import Hamiltonian
from coulomb.features import Particles
from coulomb.interactions import Riesz
from coulomb.objectives import AbstractOneBody, FourierAlignment, GaussianPrior, Sample


class Valley(AbstractOneBody):
    """`V(w) = sum_i c_i (w_i - 1)^2 / 2`, steep in one coordinate, flat in another."""

    curvatures = torch.tensor([1e4, 1e-2], dtype=torch.float64)

    def potential(self, particles):
        return 0.5 * (self.curvatures * (particles.positions - 1).square()).sum(dim=-1)


def cloud(n=5, dim=2, seed=0):
    source = torch.Generator().manual_seed(seed)
    return Particles(torch.randn(n, dim, generator=source, dtype=torch.float64))


def alignment(seed=1):
    source = torch.Generator().manual_seed(seed)
    x = torch.randn(30, 2, generator=source, dtype=torch.float64)
    return Hamiltonian(FourierAlignment(Sample(x, x[:, :1].sign())), Riesz(0.0), 0.05)


def test_without_noise_it_is_torchs_adam():
    energy, particles = alignment(), cloud()
    sampler = AdamLangevin(0.03, decay=(0.8, 0.95), floor=1e-6)
    state, source = sampler.init(particles), torch.Generator()
    parameter = torch.nn.Parameter(particles.positions.clone())
    adam = torch.optim.Adam([parameter], lr=0.03, betas=(0.8, 0.95), eps=1e-6)
    for _ in range(20):
        state, info = sampler.step(state, energy, generator=source)
        parameter.grad = energy.gradient(Particles(parameter.detach()))
        adam.step()
    torch.testing.assert_close(state.particles.positions, parameter.detach())
    assert info.noise == 0


def test_scales_of_coordinates_do_not_matter():
    """Both coordinates are near the bottom where plain steps diverge or stand still."""
    sampler = AdamLangevin(0.05)
    state, source = sampler.init(cloud()), torch.Generator()
    energy = Hamiltonian(Valley())
    state, _ = sampler.advance(state, energy, 300, generator=source)
    assert ((state.particles.positions - 1).abs() < 0.02).all()
    plain = ProjectedLangevin(1e-4, inverse_temperature=math.inf)
    state, _ = plain.advance(plain.init(cloud()), energy, 300, generator=source)
    left = (state.particles.positions - 1).abs() / (cloud().positions - 1).abs()
    assert (left[:, 1] > 0.99).all()


def test_noise_has_the_preconditioned_size():
    """Mean square 2 eta / (beta s); over 20,000 numbers, within five errors."""
    prior = GaussianPrior(1.0, inverse_temperature=1.0)
    particles = Particles(torch.full((10_000, 2), 4.0, dtype=torch.float64))
    sampler = AdamLangevin(0.1, inverse_temperature=50.0)
    _, info = sampler.step(
        sampler.init(particles),
        Hamiltonian(prior),
        generator=torch.Generator().manual_seed(0),
    )
    expected = 2 * (2 * 0.1 / (50 * 4.0))  # two coordinates, s = |gradient| = 4
    assert abs(info.noise / expected - 1) < 5 * math.sqrt(2 / 20_000)


def test_stays_in_its_domain(generator):
    sampler = AdamLangevin(0.5, inverse_temperature=1.0, domain=Ball(0.5))
    inside = Particles(Ball(0.5).project(cloud().positions))
    state, _ = sampler.advance(
        sampler.init(inside), alignment(), 30, generator=generator
    )
    assert Ball(0.5).contains(state.particles.positions).all()


def test_batches_are_drawn_with_the_generator():
    sampler, ends = AdamLangevin(0.05, batch_size=8), []
    for seed in (0, 0, 1):
        source = torch.Generator().manual_seed(seed)
        state, _ = sampler.advance(
            sampler.init(cloud()), alignment(), 5, generator=source
        )
        ends.append(state.particles.positions)
    assert torch.equal(ends[0], ends[1])
    assert not torch.equal(ends[0], ends[2])


def test_a_saved_run_goes_on_to_the_bit(tmp_path):
    sampler, energy = AdamLangevin(0.02, inverse_temperature=1e3), alignment()
    whole = init_run(sampler, cloud(), generator=torch.Generator().manual_seed(0))
    loop.run(whole, sampler, energy, RunSettings(max_steps=30))
    first = init_run(sampler, cloud(), generator=torch.Generator().manual_seed(0))
    loop.run(first, sampler, energy, RunSettings(max_steps=13))
    save_run(first, tmp_path / "run.safetensors")
    again = load_run(tmp_path / "run.safetensors")
    assert set(again.state.memory) == {"mean", "square"}
    loop.run(again, sampler, energy, RunSettings(max_steps=30))
    assert torch.equal(again.particles.positions, whole.particles.positions)


def test_runs_of_other_samplers_have_no_memory(tmp_path):
    sampler = ProjectedLangevin(0.1)
    run = init_run(sampler, cloud(), generator=torch.Generator())
    save_run(run, tmp_path / "run.safetensors")
    assert load_run(tmp_path / "run.safetensors").state.memory == {}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"step_size": 0}, "`step_size` must be positive"),
        ({"decay": (0.9, 1.0)}, "`decay` must be less than 1"),
        ({"floor": 0}, "`floor` must be positive"),
        ({"batch_size": 1}, "`batch_size` must be at least 2"),
    ],
)
def test_settings(settings, message):
    with pytest.raises(ParameterError, match=message):
        AdamLangevin(**settings)
