"""What every sampler must do, and closed forms of the dynamics."""

import math

import pytest
import torch

from coulomb._support.errors import ParameterError
from coulomb.domains import Ball, Box, Masked, Space, Sphere
from coulomb.dynamics.langevin import (
    AdamLangevin,
    Annealed,
    ProjectedLangevin,
    clip_per_particle,
    samplers,
)
from coulomb.dynamics.metropolis import MetropolisLangevin
from coulomb.energy import Hamiltonian
from coulomb.features import Fourier, Particles
from coulomb.interactions import RandomBatchSum, Riesz
from coulomb.objectives import (
    AbstractOneBody,
    Alignment,
    CentredAlignment,
    FourierAlignment,
    GaussianPrior,
    Sample,
)


class Nothing(AbstractOneBody):
    """V = 0."""

    def potential(self, particles):
        return 0 * particles.positions.sum(dim=-1)


def fourier_energy(generator, *, strength=0.05, prior=True, n=30, n_labels=1, dim=3):
    x = torch.randn(n, dim, generator=generator, dtype=torch.float64)
    y = torch.randn(n, n_labels, generator=generator, dtype=torch.float64)
    return Hamiltonian(
        FourierAlignment(Sample(x, y)),
        Riesz(0.0),
        strength,
        GaussianPrior(1.0, 50.0) if prior else None,
    )


def start(generator, n=12, dim=3):
    positions = torch.randn(n, dim, generator=generator, dtype=torch.float64)
    return Particles(positions, torch.zeros(n, dtype=torch.float64))


@pytest.mark.parametrize("name", list(samplers))
@pytest.mark.parametrize("domain", [Space(), Ball(1.5), Box(-1, 1)], ids=repr)
class TestEverySampler:
    def test_same_seed_same_particles_whatever_the_grouping(self, name, domain):
        sampler = samplers.build(name, step_size=0.2, domain=domain)
        energy = fourier_energy(torch.Generator().manual_seed(1))
        ends = []
        for groups in ([7], [7], [3, 4], [1] * 7):
            state = sampler.init(start(torch.Generator().manual_seed(2)))
            state = state._replace(
                particles=Particles(domain.project(state.particles.positions))
            )
            random = torch.Generator().manual_seed(3)
            for steps in groups:
                state, _ = sampler.advance(state, energy, steps, generator=random)
            ends.append(state)
        assert ends[0].step == 7
        for end in ends[1:]:
            assert torch.equal(end.particles.positions, ends[0].particles.positions)

    def test_stays_inside(self, name, domain, generator):
        sampler = samplers.build(
            name, step_size=0.5, inverse_temperature=1.0, domain=domain
        )
        energy = fourier_energy(generator)
        inside = Particles(domain.project(start(generator).positions))
        state, _ = sampler.advance(
            sampler.init(inside), energy, 50, generator=generator
        )
        assert domain.contains(state.particles.positions).all()


def test_every_sampler_is_registered():
    kinds = {type(samplers.build(name)) for name in samplers}
    assert kinds == {ProjectedLangevin, MetropolisLangevin, AdamLangevin}


@pytest.mark.parametrize("n_labels", [1, 3])
@pytest.mark.parametrize("batch_size", [None, 8])
@pytest.mark.parametrize(
    "domain",
    [Space(), Ball(1.2), Masked(Ball(1.2), (1 - torch.eye(3)).repeat(4, 1).double())],
    ids=["space", "ball", "masked"],
)
@pytest.mark.parametrize("clip", [math.inf, 0.05])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("rates", [None, torch.linspace(0.2, 1.5, 12).double()])
def test_compiled_steps_are_the_plain_steps(
    n_labels, batch_size, domain, clip, weighted, rates
):
    generator = torch.Generator().manual_seed(1)
    energy = fourier_energy(generator, n_labels=n_labels)
    if weighted:
        sample = energy.objective.sample
        weights = torch.rand(sample.size, generator=generator, dtype=torch.float64)
        sample = Sample(sample.x, sample.labels, weights / weights.sum())
        variance = 0.5 + torch.rand(12, generator=generator, dtype=torch.float64)
        energy = Hamiltonian(
            FourierAlignment(sample), Riesz(0.0), 0.05, GaussianPrior(variance, 50.0)
        )
    particles = start(generator)
    particles = particles._replace(positions=domain.project(particles.positions))
    ends = []
    for compiled in (True, False):
        sampler = ProjectedLangevin(
            0.7,
            Annealed(10.0, 100.0, 15),
            domain=domain,
            clip=clip,
            batch_size=batch_size,
            rates=rates,
            compiled=compiled,
        )
        state, info = sampler.advance(
            sampler.init(particles),
            energy,
            20,
            generator=torch.Generator().manual_seed(5),
        )
        ends.append((state.particles.positions, torch.tensor(info[:4])))
    torch.testing.assert_close(ends[0][0], ends[1][0], rtol=1e-9, atol=1e-10)
    torch.testing.assert_close(ends[0][1], ends[1][1], rtol=1e-5, atol=1e-9)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_one_and_two_threads_move_the_same(dtype):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(3000, 5, generator=generator, dtype=dtype)
    y = x[:, :1].sign()
    particles = Particles(torch.randn(300, 5, generator=generator, dtype=dtype))
    ends = []
    for threads in (1, 2):
        objective = FourierAlignment(Sample(x, y), threads=threads)
        energy = Hamiltonian(objective, Riesz(0.0), 0.01)
        sampler = ProjectedLangevin(1.0, 100.0)
        state, _ = sampler.advance(
            sampler.init(particles),
            energy,
            5,
            generator=torch.Generator().manual_seed(1),
        )
        ends.append(state.particles.positions)
    assert torch.equal(*ends)


def test_ornstein_uhlenbeck_moments_at_every_time(generator):
    """V = |w|^2 / (2 v beta) is Gaussian at every step: the exact discrete moments."""
    variance, beta, eta, count = 0.8, 4.0, 0.3, 100_000
    energy = Hamiltonian(GaussianPrior(variance, beta))
    sampler = ProjectedLangevin(eta, beta)
    state = sampler.init(Particles(torch.full((count, 1), 2.0, dtype=torch.float64)))
    mean, spread = 2.0, 0.0
    rate = 1 - eta / (variance * beta)
    for _ in range(12):
        state, _ = sampler.step(state, energy, generator=generator)
        mean, spread = rate * mean, rate**2 * spread + 2 * eta / beta
        values = state.particles.positions
        assert abs(float(values.mean()) - mean) < 4.5 * math.sqrt(spread / count)
        error = spread * math.sqrt(2 / count)
        assert abs(float(values.var()) - spread) < 4.5 * error


def test_two_particles_part_at_the_known_rate():
    """Log repulsion, no noise: d(r^2)/dt = 4 lambda until the wall."""
    strength, eta = 0.7, 5e-4
    energy = Hamiltonian(Nothing(), Riesz(0.0), strength)
    sampler = ProjectedLangevin(eta, math.inf, domain=Ball(1.0))
    positions = torch.tensor([[-0.1, 0.0], [0.1, 0.0]], dtype=torch.float64)
    state = sampler.init(Particles(positions))
    random = torch.Generator()
    state, _ = sampler.advance(state, energy, 400, generator=random)
    gap = float((state.particles.positions[0] - state.particles.positions[1]).norm())
    assert gap**2 == pytest.approx(0.2**2 + 4 * strength * 400 * eta, rel=1e-2)
    state, _ = sampler.advance(state, energy, 3000, generator=random)
    torch.testing.assert_close(
        state.particles.positions.norm(dim=-1), torch.ones(2, dtype=torch.float64)
    )


def test_coincident_particles_part_without_noise():
    energy = Hamiltonian(Nothing(), Riesz(0.0), 0.1)
    sampler = ProjectedLangevin(0.01, math.inf, domain=Ball(1.0), clip=1.0)
    state = sampler.init(Particles(torch.zeros(5, 2, dtype=torch.float64)))
    state, _ = sampler.advance(state, energy, 1000, generator=torch.Generator())
    gaps = torch.pdist(state.particles.positions)
    assert float(gaps.min()) > 0.3


@pytest.mark.parametrize("strength", [0.0, 0.2])
def test_metropolis_has_the_gibbs_law(strength, generator):
    """One and two particles on [-1, 1], against quadrature."""
    beta, count = 6.0, 2000
    grid = torch.linspace(-1, 1, 401, dtype=torch.float64)

    class Tilted(AbstractOneBody):
        def potential(self, particles):
            return (
                0.3 * particles.positions[..., 0] ** 2
                + 0.2 * particles.positions[..., 0]
            )

    energy = Hamiltonian(Tilted(), Riesz(-1.0), strength)
    sampler = MetropolisLangevin(0.25, beta, domain=Box(-1, 1))
    one = Tilted().potential(Particles(grid[:, None]))
    pair = strength * Riesz(-1.0).radial((grid[:, None] - grid).abs())
    weight = torch.exp(-beta * (one[:, None] + one + pair))
    expected_mean = float((weight.sum(1) * grid).sum() / weight.sum())
    expected_gap = float((weight * (grid[:, None] - grid).abs()).sum() / weight.sum())
    state = sampler.init(Particles(torch.tensor([[-0.3], [0.4]], dtype=torch.float64)))
    means, gaps = [], []
    for _ in range(count):
        state, _ = sampler.step(state, energy, generator=generator)
        w = state.particles.positions
        means.append(float(w.mean()))
        gaps.append(float((w[0] - w[1]).abs()))
    for values, expected in ((means, expected_mean), (gaps, expected_gap)):
        batches = torch.tensor(values).reshape(40, -1).mean(dim=1)
        standard_error = float(batches.std()) / math.sqrt(40)  # of batch means
        assert abs(float(batches.mean()) - expected) < 4 * standard_error + 2e-3


def test_small_langevin_steps_tend_to_the_metropolis_law(generator):
    """In the whole space the Gaussian prior has exact moments for both."""
    energy = Hamiltonian(GaussianPrior(0.5, 3.0))
    for sampler in (ProjectedLangevin(0.02, 3.0), MetropolisLangevin(0.3, 3.0)):
        state = sampler.init(Particles(torch.zeros(4000, 1, dtype=torch.float64)))
        state, info = sampler.advance(state, energy, 300, generator=generator)
        spread = float(state.particles.positions.var())
        bias = 0.02 / (0.5 * 3.0) / 2  # of the Euler step, to first order
        assert abs(spread / 0.5 - 1) < 4 * math.sqrt(2 / 4000) + bias
        assert 0 < info.accepted <= 1


def test_reflection_and_projection_differ_at_the_wall(generator):
    """Projection piles mass on the wall; reflection keeps the uniform law."""
    energy = Hamiltonian(Nothing())
    share = {}
    for boundary in ("project", "reflect"):
        sampler = ProjectedLangevin(0.05, 1.0, Box(-1, 1), boundary=boundary)
        state = sampler.init(Particles(torch.zeros(5000, 1, dtype=torch.float64)))
        state, _ = sampler.advance(state, energy, 200, generator=generator)
        positions = state.particles.positions
        share[boundary] = float((positions.abs() == 1).double().mean())
        if boundary == "reflect":
            standard_error = math.sqrt(4 / 45 / 5000)  # of the mean square
            assert abs(float(positions.square().mean()) - 1 / 3) < 4 * standard_error
    assert share["project"] > 0.1
    assert share["reflect"] < 1e-3


def test_annealing_cools_the_noise(generator):
    sampler = ProjectedLangevin(0.5, Annealed(1.0, 100.0, 10))
    energy = Hamiltonian(Nothing())
    state = sampler.init(Particles(torch.zeros(2000, 2, dtype=torch.float64)))
    state, hot = sampler.step(state, energy, generator=generator)
    state, cold = sampler.step(state._replace(step=10), energy, generator=generator)
    assert hot.noise / cold.noise == pytest.approx(100, rel=0.2)


def test_clipping_is_per_particle_and_never_of_the_noise(generator):
    gradient = torch.tensor([[3.0, 4.0], [0.0, 0.0]])
    clipped = clip_per_particle(gradient, 1.0)
    torch.testing.assert_close(clipped, torch.tensor([[0.6, 0.8], [0.0, 0.0]]))
    energy = Hamiltonian(Nothing())
    sampler = ProjectedLangevin(1.0, 0.01, clip=1e-3)
    state = sampler.init(Particles(torch.zeros(50, 2, dtype=torch.float64)))
    _, info = sampler.step(state, energy, generator=generator)
    assert info.displacement > 1


@pytest.mark.parametrize(
    "make",
    [
        lambda s: Alignment(s, Fourier()),
        lambda s: CentredAlignment(s, Fourier()),
        FourierAlignment,
    ],
)
def test_gradient_flow_lowers_every_energy(make, generator):
    x = torch.randn(30, 3, generator=generator, dtype=torch.float64)
    energy = Hamiltonian(make(Sample(x, x[:, :1].sign())), Riesz(0.0), 0.01)
    sampler = ProjectedLangevin(0.05, math.inf)
    state = sampler.init(start(generator))
    before = energy.value(state.particles)
    for _ in range(5):
        state, _ = sampler.advance(state, energy, 5, generator=generator)
        after = energy.value(state.particles)
        assert after < before
        before = after


def test_random_pair_sums_in_the_dynamics(generator):
    energy = Hamiltonian(
        fourier_energy(generator).objective,
        Riesz(0.0),
        0.05,
        pair_sum=RandomBatchSum(4),
    )
    sampler = ProjectedLangevin(0.1, 100.0)
    ends = [
        sampler.advance(
            sampler.init(start(torch.Generator().manual_seed(2))),
            energy,
            5,
            generator=torch.Generator().manual_seed(3),
        )[0].particles.positions
        for _ in range(2)
    ]
    assert torch.equal(*ends)


def test_messages(generator):
    with pytest.raises(ParameterError, match=r"`step_size` must be positive; got -0"):
        ProjectedLangevin(step_size=-0.1)
    with pytest.raises(ParameterError, match="`boundary` must be 'project' or"):
        ProjectedLangevin(boundary="bounce")
    with pytest.raises(ParameterError, match="`batch_size` must be at least 2; got 1"):
        ProjectedLangevin(batch_size=1)
    with pytest.raises(ParameterError, match="`domain` must have an interior"):
        MetropolisLangevin(domain=Sphere())
    with pytest.raises(ParameterError, match="`inverse_temperature` must be finite"):
        MetropolisLangevin(inverse_temperature=math.inf)
    with pytest.raises(ParameterError, match="`batch_size` needs an objective"):
        ProjectedLangevin(batch_size=4).step(
            ProjectedLangevin().init(start(generator)),
            Hamiltonian(Nothing()),
            generator=generator,
        )


@pytest.mark.parametrize("kind", [ProjectedLangevin, AdamLangevin])
@pytest.mark.parametrize("compiled", [True, False])
def test_a_batch_as_large_as_the_data_is_the_data(kind, compiled):
    """It would otherwise be drawn, and summed, in full."""
    ends = []
    for batch_size in (None, 30, 10**12):
        generator = torch.Generator().manual_seed(1)
        energy = fourier_energy(generator)
        options = {"compiled": compiled} if kind is ProjectedLangevin else {}
        sampler = kind(0.3, batch_size=batch_size, **options)
        state, _ = sampler.advance(
            sampler.init(start(generator)), energy, 3, generator=generator
        )
        ends.append(state.particles.positions)
    assert torch.equal(ends[0], ends[1])
    assert torch.equal(ends[0], ends[2])


@pytest.mark.parametrize("make", [ProjectedLangevin, AdamLangevin])
def test_a_step_tells_its_drift(make):
    sampler = make(0.1, math.inf, clip=0.5)
    energy = Hamiltonian(GaussianPrior(1.0, inverse_temperature=1.0))
    state = sampler.init(Particles(torch.tensor([[1.0, 2.0], [0.1, -0.1]])))
    after, info = sampler.step(state, energy, generator=torch.Generator())
    moved = after.particles.positions - state.particles.positions
    torch.testing.assert_close(info.drift_vectors, moved)
