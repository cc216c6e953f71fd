import math

import numpy as np
import pytest
import torch

from coulomb._support.errors import ParameterError
from coulomb.features import Particles
from coulomb.interactions import ExactSum, Riesz
from coulomb.theory import (
    Disc,
    Interval,
    MeanField,
    RadialBall,
    Rectangle,
    TemperingSettings,
    effective_sample_size,
    gibbs_sample,
    split_r_hat,
)
from coulomb.theory.ensembles import (
    batched_pairs,
    cell_law,
    configuration_energies,
    draw_independent,
)


def tilted_bowl(w):
    return w[..., 0] ** 2 + 0.5 * w[..., 0]


def system(strength, *, s=0.5, beta=2.0):
    return MeanField(Interval(-1, 1, 100), tilted_bowl, Riesz(s=s), strength, beta)


@pytest.mark.parametrize("dim", [1, 2, 3])
@pytest.mark.parametrize("kernel", [Riesz(s=0), Riesz(s=1.5, truncation=0.3)])
def test_batched_sums_are_the_exact_sums(dim, kernel, generator):
    positions = torch.randn(4, 6, dim, generator=generator, dtype=torch.float64)
    ours, exact = batched_pairs(kernel, positions), ExactSum()(kernel, positions)
    torch.testing.assert_close(ours.potential, exact.potential)
    torch.testing.assert_close(ours.gradient, exact.gradient)
    alone = batched_pairs(kernel, positions[:, :1])
    assert (alone.potential == 0).all()


def test_energies_are_those_of_the_hamiltonian(generator):
    gas = system(1.3)
    positions = torch.rand(5, 7, 1, generator=generator, dtype=torch.float64)
    value, gradient = configuration_energies(gas, positions)
    energy = gas.hamiltonian()
    torch.testing.assert_close(value, energy.value(Particles(positions)))
    torch.testing.assert_close(gradient, energy.gradient(Particles(positions)))


@pytest.mark.parametrize("grid", [Interval(0, 1, 8), Rectangle(), Disc(1.0, 12)])
def test_draws_have_the_density_they_say(grid, generator, rng):
    gas = MeanField(grid, lambda w: 0 * w[..., 0])
    density = grid.normalise(rng.random(grid.size) + 0.1)
    draws = draw_independent(gas, density, 400, 25, generator=generator)
    assert grid.domain.contains(draws).all()
    law = cell_law(grid, np.log(density))
    # A draw is in the cell whose centre is nearest along every axis.
    gaps = np.abs(draws.numpy()[:, :, None] - grid.centres) / np.array(grid.spacing)
    logs = np.log(density)[gaps.max(axis=-1).argmin(axis=-1)].sum(axis=1)
    torch.testing.assert_close(law(draws).value, torch.from_numpy(logs))
    # E[1/density] is the volume; five standard errors of 10000 draws.
    single = draw_independent(gas, density, 10000, 1, generator=generator)
    inverse = (-law(single).value).exp().numpy()
    error = 5 * inverse.std() / 100
    assert abs(inverse.mean() - grid.volumes.sum()) < error


def test_draws_need_a_box(generator):
    gas = MeanField(RadialBall(1.0, 10), lambda w: 0 * w[..., 0])
    with pytest.raises(ParameterError, match="box or a disc"):
        draw_independent(gas, gas.grid.uniform(), 2, 2, generator=generator)


SETTINGS = TemperingSettings(chains=32, rungs=3, warmup=300, draws=300)


def check_moment(values, expected):
    """Compare a mean with quadrature, within five standard errors by effective size."""
    error = values.std() / math.sqrt(effective_sample_size(values))
    assert abs(values.mean() - expected) < 5 * error
    assert error < 0.02
    assert split_r_hat(values) < 1.05


def test_one_particle_by_quadrature(generator):
    gas = system(1.0, beta=3.0)
    sample = gibbs_sample(gas, 1, settings=SETTINGS, generator=generator)
    x = np.linspace(-1, 1, 20001)
    weights = np.exp(-3 * (x**2 + 0.5 * x))
    positions = sample.positions.numpy()[..., 0, 0]
    check_moment(positions, x @ weights / weights.sum())
    check_moment(positions**2, x**2 @ weights / weights.sum())


def test_two_particles_by_quadrature(generator):
    gas = system(1.0)
    sample = gibbs_sample(gas, 2, settings=SETTINGS, generator=generator)
    x = (np.arange(800) + 0.5) / 400 - 1
    one, two = np.meshgrid(x, x)
    gap = np.where(one == two, np.inf, np.abs(one - two))
    felt = 0.5 * (one**2 + 0.5 * one + two**2 + 0.5 * two) + 0.5 * gap**-0.5
    weights = np.where(one == two, 0, np.exp(-2 * 2 * felt))
    weights /= weights.sum()
    positions = sample.positions.numpy()[..., 0]
    check_moment(positions.mean(axis=-1), (one * weights).sum())
    check_moment((positions**2).mean(axis=-1), (one**2 * weights).sum())
    check_moment(positions.prod(axis=-1), (one * two * weights).sum())
    check_moment(sample.energies, (felt * weights).sum())
    assert sample.r_hat < 1.05
    assert 0.2 < sample.accepted.min() <= sample.accepted.max() < 0.9
    assert sample.swapped.min() > 0.2


def test_tempering_crosses_a_barrier_that_one_temperature_does_not(generator):
    """Two wells eight temperatures deep; all chains start uniformly."""
    wells = MeanField(
        Interval(-1.5, 1.5, 50),
        lambda w: 8 * (w[..., 0] ** 2 - 1) ** 2,
        inverse_temperature=1.0,
    )
    settings = TemperingSettings(chains=16, rungs=4, hottest=0.1, warmup=100, draws=400)
    sample = gibbs_sample(wells, 1, settings=settings, generator=generator)
    sign = np.sign(sample.positions.numpy()[..., 0, 0])
    crossings = (np.diff(sign, axis=1) != 0).sum(axis=1)
    assert (crossings > 0).all()


def test_same_generator_same_sample():
    few = TemperingSettings(chains=2, warmup=5, draws=5)
    first, second = (
        gibbs_sample(
            system(1.0), 3, settings=few, generator=torch.Generator().manual_seed(1)
        )
        for _ in range(2)
    )
    assert torch.equal(first.positions, second.positions)


def test_zero_temperature_has_no_gibbs_law(generator):
    with pytest.raises(ParameterError, match="ground_state"):
        gibbs_sample(system(1.0, beta=math.inf), 3, generator=generator)


def test_effective_size_of_an_autoregressive_chain(rng):
    """n (1 - a) / (1 + a) for an AR(1) chain; estimates scatter by 5 % here."""
    a, chains, draws = 0.8, 8, 5000
    noise = rng.normal(size=(chains, draws)) * math.sqrt(1 - a * a)
    values = np.empty_like(noise)
    values[:, 0] = rng.normal(size=chains)
    for t in range(1, draws):
        values[:, t] = a * values[:, t - 1] + noise[:, t]
    expected = chains * draws * (1 - a) / (1 + a)
    assert effective_sample_size(values) == pytest.approx(expected, rel=0.25)
    assert split_r_hat(values) < 1.01


def test_r_hat_sees_chains_apart_and_drifts(rng):
    values = rng.normal(size=(4, 500))
    assert split_r_hat(values) < 1.01
    assert split_r_hat(values + np.arange(4)[:, None]) > 1.3
    assert split_r_hat(values + np.linspace(0, 3, 500)) > 1.1
    assert split_r_hat(np.ones((2, 10))) == 1.0
    with pytest.raises(ParameterError, match="chains, draws"):
        split_r_hat(np.ones(10))


def test_one_rung_is_no_tempering(generator):
    alone = TemperingSettings(chains=2, rungs=1, warmup=5, draws=5)
    sample = gibbs_sample(system(1.0), 3, settings=alone, generator=generator)
    assert sample.positions.shape == (2, 5, 3, 1)
    assert sample.accepted.shape == (1,)
    assert sample.swapped.shape == (0,)
