"""The Hamiltonian against the double sums of the paper."""

import pytest
import torch

from coulomb._support.errors import ParameterError
from coulomb.energy import Hamiltonian
from coulomb.features import Fourier, Particles
from coulomb.interactions import ExactSum, RandomBatchSum, Riesz
from coulomb.objectives import (
    Alignment,
    CentredAlignment,
    FourierAlignment,
    GaussianPrior,
    Sample,
)


@pytest.fixture
def system(generator):
    x = torch.randn(8, 3, generator=generator, dtype=torch.float64)
    y = torch.randn(8, 1, generator=generator, dtype=torch.float64).sign()
    positions = torch.randn(6, 3, generator=generator, dtype=torch.float64)
    phases = 6.28 * torch.rand(6, generator=generator, dtype=torch.float64)
    return Sample(x, y), Particles(positions, phases)


def paper_hamiltonian(sample, particles, strength, s):
    """[CPM eq:main-hamiltonian], written with its loops."""
    x, y = sample.x, sample.labels[:, 0]
    n, count = len(x), particles.n_particles
    features = Fourier()(x, particles)
    alignment = repulsion = 0.0
    for i in range(n):
        for j in range(n):
            if i != j:
                for k in range(count):
                    alignment += float(y[i] * y[j] * features[i, k] * features[j, k])
    for k in range(count):
        for m in range(count):
            if k != m:
                gap = particles.positions[k] - particles.positions[m]
                repulsion += float(Riesz(s).radial(gap.norm()))
    return -alignment / (n * (n - 1) * count) + strength * repulsion / (
        2 * count * (count - 1)
    )


@pytest.mark.parametrize("s", [0.0, 1.0, -1.0])
def test_value_is_the_double_sum_of_the_paper(system, s):
    sample, particles = system
    energy = Hamiltonian(Alignment(sample, Fourier()), Riesz(s), strength=0.3)
    expected = paper_hamiltonian(sample, particles, 0.3, s)
    assert float(energy.value(particles)) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("s", [0.0, 1.0])
@pytest.mark.parametrize("prior", [None, GaussianPrior(0.5, 10.0)])
@pytest.mark.parametrize("make", [Alignment, FourierAlignment, CentredAlignment])
def test_force_is_n_times_the_gradient_of_the_value(system, s, prior, make):
    sample, particles = system
    objective = make(sample) if make is FourierAlignment else make(sample, Fourier())
    energy = Hamiltonian(objective, Riesz(s), strength=0.3, prior=prior)
    step = 1e-6
    gradient = energy.gradient(particles)
    for index in range(particles.positions.numel()):
        ahead, behind = particles.positions.clone(), particles.positions.clone()
        ahead.view(-1)[index] += step
        behind.view(-1)[index] -= step
        slope = energy.value(particles._replace(positions=ahead)) - energy.value(
            particles._replace(positions=behind)
        )
        expected = particles.n_particles * float(slope) / (2 * step)
        assert float(gradient.view(-1)[index]) == pytest.approx(expected, abs=1e-7)


def test_energies_per_particle(system):
    sample, particles = system
    energy = Hamiltonian(Alignment(sample, Fourier()), Riesz(1.0), strength=0.3)
    felt = energy.energy_per_particle(particles)
    terms = energy.terms(particles)
    # Each pair is felt by both its particles, but counted once in the value.
    doubled = terms.alignment + 2 * 0.3 * terms.repulsion
    torch.testing.assert_close(felt.mean(), doubled)
    with pytest.warns(DeprecationWarning, match="energy_per_particle"):
        assert torch.equal(energy.felt_energy(particles), felt)


def test_zero_strength_is_no_interaction(system):
    sample, _ = system
    together = Particles(torch.zeros(2, 3, dtype=torch.float64), torch.zeros(2))
    energy = Hamiltonian(FourierAlignment(sample), Riesz(1.0))
    assert energy.value(together).isfinite()
    assert energy.gradient(together).isfinite().all()


def test_one_particle(system):
    sample, particles = system
    alone = Particles(particles.positions[:1], particles.phases[:1])
    energy = Hamiltonian(Alignment(sample, Fourier()), Riesz(1.0), strength=1.0)
    torch.testing.assert_close(energy.value(alone), energy.objective.energy(alone))


def test_random_sums_are_used_when_asked(system, generator):
    sample, particles = system
    energy = Hamiltonian(
        FourierAlignment(sample), Riesz(0.0), 0.3, pair_sum=RandomBatchSum(100)
    )
    exact = Hamiltonian(FourierAlignment(sample), Riesz(0.0), 0.3, pair_sum=ExactSum())
    torch.testing.assert_close(
        energy.gradient(particles, generator=generator), exact.gradient(particles)
    )


def test_messages(system):
    sample, _ = system
    with pytest.raises(ParameterError, match="`strength` must be at least 0; got -1"):
        Hamiltonian(FourierAlignment(sample), strength=-1)


def test_a_known_attraction_is_not_evaluated_again(system):
    sample, particles = system
    energy = Hamiltonian(Alignment(sample, Fourier()), strength=0.3)
    known = 2 * energy.objective.field(particles).gradient
    expected = energy.gradient(particles) + known / 2
    found = energy.gradient(particles, attraction=known)
    torch.testing.assert_close(found, expected)
